"""A sampler that gives a net other levels of noise than its training did keeps a run from being called learning."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from anybatch.doctor.views.outcomes import outcome
from anybatch.records.lossfacts import Probed
from number_runs import Training
from test_doctor_ask import asked, nothing_was_compiled, steps

__all__ = ["nothing_was_compiled"]

STEPS = 40
Schedule = Callable[[torch.Tensor], torch.Tensor]


def cosine(t: torch.Tensor) -> torch.Tensor:
    return torch.cos(t * math.pi / 2 * 0.98) ** 2


def late(t: torch.Tensor) -> torch.Tensor:
    return 1 - 0.95 * t**6


class Ideal(nn.Module):
    """What an ideal net for data of two points says, so that a few steps of a training do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, t: torch.Tensor | None = None) -> torch.Tensor:
        if t is None:  # it is the last column
            x, t = x[:, :-1], x[:, -1]
        kept = cosine(t.float() / STEPS).reshape(-1, *[1] * (x.dim() - 1))
        points = torch.tanh(kept.sqrt() * x.mean(1, keepdim=True) * x.shape[1] / (1 - kept))
        return self.scale * (x - kept.sqrt() * points) / (1 - kept).sqrt()


def sampled(
    net: nn.Module, schedule: Schedule, *, every: int = 1, clips: bool = False, noise: float = 1.0, beside: bool = False
) -> None:
    """Draws as DDIM does, with or without noise."""
    x = torch.randn(64, 4)
    times = list(range(STEPS, 0, -every))
    with torch.no_grad():
        for t, then in zip(times, [*times[1:], 0], strict=True):
            kept, after = (schedule(torch.tensor(one / STEPS)) for one in (t, then))
            given = torch.full((64,), t)
            eps = net(torch.cat([x, given[:, None]], 1)) if beside else net(x, given)
            clean = (x - (1 - kept).sqrt() * eps) / kept.sqrt()
            clean = clean.clamp(-1, 1) if clips else clean
            eps = (x - kept.sqrt() * clean) / (1 - kept).sqrt()
            fresh = noise * ((1 - after) / (1 - kept) * (1 - kept / after)).clamp(min=0).sqrt()
            x = after.sqrt() * clean + (1 - after - fresh**2).clamp(min=0).sqrt() * eps + fresh * torch.randn(64, 4)


Noise = Callable[..., torch.Tensor]


def trained(
    sample: Callable[[nn.Module], None],
    *,
    beside: bool = False,
    draw: Noise = torch.randn,
    size: float = 1.0,
    schedule: Schedule = cosine,
) -> None:
    net = Ideal()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for _ in range(24):
        x = size * torch.randn(128, 1).sign().expand(128, 4)
        t, noise = torch.randint(1, STEPS + 1, (128,)), draw(128, 4)
        kept = schedule(t / STEPS)[:, None]
        optimizer.zero_grad()
        noised = kept.sqrt() * x + (1 - kept).sqrt() * noise
        made = net(torch.cat([noised, t[:, None]], 1)) if beside else net(noised, t)
        (made - noise).square().mean().backward()
        optimizer.step()
    sample(net)


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (lambda net: sampled(net, late), "no"),
        (lambda net: sampled(net, cosine), "yes"),
        (lambda net: sampled(net, cosine, noise=0), "yes"),
        (lambda net: sampled(net, cosine, every=3), "yes"),
        (lambda net: sampled(net, cosine, clips=True), "yes"),
    ],
)
def test_a_loop_of_sampling_is_given_what_the_training_was(sample: Callable[[nn.Module], None], expected: str) -> None:
    found = asked(lambda: trained(sample), "sampling")
    assert [one.answer for one in found] == [expected], found
    assert not any(one.evidence["far"] for one in found)


def test_samples_that_run_away_are_told() -> None:
    def drawn(net: nn.Module) -> None:
        x = torch.randn(64, 4)
        with torch.no_grad():
            for t in range(STEPS, 0, -1):
                x = 1.5 * x + net(x, torch.full((64,), t))

    (found,) = asked(lambda: trained(drawn), "sampling")
    assert (found.answer, found.evidence["far"]) == ("no", True)


def begun(net: nn.Module, draw: Noise, first: int = STEPS) -> None:
    x = draw(64, 4)
    with torch.no_grad():
        for t in range(first, 0, -1):
            x = x - 0.01 * net(x, torch.full((64,), t))


@pytest.mark.parametrize(
    ("draw", "size", "begins", "expected"),
    [
        (torch.rand, 1.0, torch.randn, ["yes"]),
        (torch.randn, 1.0, torch.randn, []),
        (torch.randn, 3.0, torch.randn, []),  # data of any scale, which are gone at the last level
        (torch.randn, 1.0, lambda *shape: 0.8 * torch.randn(*shape), []),  # a low temperature
        (torch.randn, 1.0, lambda *shape: 0.5 * torch.randn(*shape), []),
        (lambda *shape: 20 * torch.randn(*shape), 1.0, torch.randn, ["yes"]),  # the scale was forgotten
        (torch.rand, 1.0, torch.rand, []),
        (torch.randn, 1.0, torch.zeros, []),  # a state that a solver begins with
    ],
)
def test_the_noise_that_sampling_begins_with_is_that_of_the_training(
    draw: Noise, size: float, begins: Noise, expected: list[str]
) -> None:
    found = asked(lambda: trained(lambda net: begun(net, begins), draw=draw, size=size), "sampling start")
    assert [one.answer for one in found] == expected, found


def of_one_level(given: Callable[[torch.Tensor], object], *, every: int = 1) -> None:
    """Trains a net that gets what stands for the level, and samples with all of them."""
    net = Ideal()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for _ in range(24):
        t, noise = torch.randint(1, STEPS + 1, (128,)), torch.randn(128, 4)
        kept = cosine(t / STEPS)[:, None]
        optimizer.zero_grad()
        (net(kept.sqrt() + (1 - kept).sqrt() * noise, given(t)) - noise).square().mean().backward()
        optimizer.step()
    sampled(net, cosine, every=every)


@pytest.mark.parametrize(
    ("given", "every", "expected"),
    [
        (torch.zeros_like, 1, ["yes"]),
        (lambda t: t[:1].expand(128), 1, []),  # one for all rows, and another one in each step
        (lambda t: t, 1, []),
        (lambda t: torch.zeros(1), 1, []),  # one number may be a switch
        (torch.zeros_like, 8, []),  # few calls are no loop of sampling
    ],
)
def test_a_level_that_was_one_and_the_same_in_training_is_told(
    given: Callable[[torch.Tensor], object], every: int, expected: list[str]
) -> None:
    found = asked(lambda: of_one_level(given, every=every), "sampling level")
    assert [one.answer for one in found] == expected, found


@pytest.mark.parametrize(
    ("schedule", "sample", "expected"),
    [
        (lambda t: 1 - 0.1 * t, lambda net: begun(net, torch.randn), "yes"),  # of a single step, and not of all to it
        (lambda t: 1 - 0.1 * t, lambda net: None, "no"),  # it may be made for data with a little noise
        (cosine, lambda net: begun(net, torch.randn), "no"),
        (lambda t: cosine(1 - t), lambda net: begun(net, torch.randn), "yes"),  # at the wrong end
    ],
)
def test_inputs_with_little_of_the_noise_that_sampling_begins_with_are_told(
    schedule: Schedule, sample: Callable[[nn.Module], None], expected: str
) -> None:
    found = asked(lambda: trained(sample, schedule=schedule), "hardly noised")
    assert [one.answer for one in found] == [expected], found


def test_noise_at_a_level_where_training_had_more_than_noise_is_told() -> None:
    found = asked(lambda: trained(lambda net: begun(net, torch.randn, 16), size=3.0), "sampling start")
    assert [one.answer for one in found] == ["yes"], found


def chained(net: nn.Module) -> None:
    """Langevin dynamics, whose first level is gone through until what they began with is forgotten."""
    x = 0.1 * torch.randn(64, 4)
    with torch.no_grad():
        for t in range(STEPS, 0, -1):
            for _ in range(5):
                x = x - 0.1 * net(x, torch.full((64,), t)) + 0.4 * torch.randn_like(x)


def asked_of(net: nn.Module) -> None:
    """What a net says of the same rows at each level, which are no loop of sampling."""
    x = 0.1 * torch.randn(64, 4)
    with torch.no_grad():
        for t in range(STEPS, 0, -1):
            net(x, torch.full((64,), t))


@pytest.mark.parametrize("sample", [chained, asked_of])
def test_where_a_loop_begins_may_not_matter(sample: Callable[[nn.Module], None]) -> None:
    assert asked(lambda: trained(sample), "sampling start") == []


def test_the_last_levels_of_a_training_may_have_too_few_rows() -> None:
    """Levels of a training as EDM draws them are rarely as large as the one that its sampler begins with."""

    def train() -> None:
        net = Ideal()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        for _ in range(24):
            sigma = (1.2 * torch.randn(128) - 1.2).exp()
            optimizer.zero_grad()
            net(sigma[:, None] * torch.randn(128, 4), sigma).square().mean().backward()
            optimizer.step()
        x = 7.0 * torch.randn(64, 4)
        with torch.no_grad():
            for step in range(20):
                x = 0.7 * x + 0 * net(x, torch.full((64,), 7.0 * 0.7**step))

    assert asked(train, "sampling start") == []


@pytest.mark.parametrize(("schedule", "expected"), [(late, "no"), (cosine, "yes")])
def test_the_level_may_be_a_column_of_the_input(schedule: Schedule, expected: str) -> None:
    found = asked(lambda: trained(lambda net: sampled(net, schedule, beside=True), beside=True), "sampling")
    assert [one.answer for one in found] == [expected], found


def test_what_a_part_of_a_net_was_given_in_training_is_not_known() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Ideal()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            t, noise = torch.randint(1, STEPS + 1, (len(x),)), torch.randn_like(x)
            made: torch.Tensor = self.net(x + noise, t)
            return (made - noise).square().mean()

    def train() -> None:
        whole = Whole()
        optimizer = torch.optim.SGD(whole.parameters(), lr=1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            whole(torch.randn(64, 4)).backward()
            optimizer.step()
        sampled(whole.net, cosine)

    assert [one.answer for one in asked(train, "sampling")] == ["unknown"]


@pytest.mark.parametrize("numbers", [range(3), range(12), [4] * 12])
def test_an_evaluation_with_numbers_of_tasks_is_no_sampling(numbers: list[int]) -> None:
    class Tasks(nn.Linear):
        def forward(self, x: torch.Tensor, task: int = 0) -> torch.Tensor:
            return super().forward(x) + task

    def train() -> None:
        net = Tasks(6, 3)
        steps(net, nn.functional.cross_entropy)
        with torch.no_grad():
            for one in numbers:
                net(torch.randn(12, 6), one)

    assert asked(train, "sampling") == []


@pytest.mark.parametrize(
    ("answer", "line", "expected"),
    [("no", 7, "0.5 times the mean square"), ("unknown", 7, "were not examined"), ("yes", 7, ""), ("unknown", 0, "")],
)
def test_what_a_sampler_is_given_keeps_a_run_from_being_called_learning(answer: str, line: int, expected: str) -> None:
    seen = {"times": 0.5, "level": 9.0} if answer == "no" else {}
    probed = Probed(probe="sampling", root=-1, answer=answer, evidence=seen, file="a.py", line=line)
    found = outcome(Training(after=(probed,)).run())
    assert (found.word == "undecided", expected in found.said) == (bool(expected), True)
