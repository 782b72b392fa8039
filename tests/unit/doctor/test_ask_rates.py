"""Rates under which a batch is not learned: told where a copy knows more of another batch, too, and quiet on noise."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.recording.describing import optimizer_facts
from anybatch.records.lossfacts import LossCall, Probed
from number_runs import Training, falling, fires, quiet
from test_doctor_ask import ROWS, answer, asked, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Labels = Callable[[torch.Tensor], torch.Tensor]


def linear(x: torch.Tensor) -> torch.Tensor:
    return x[:, :3].argmax(1)


def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 3, (len(x),))


def trains(net: nn.Module, kind: Any, rate: float, labels: Labels = linear, rows: int = ROWS, times: int = 12) -> None:
    optimizer = kind(net.parameters(), lr=rate)
    for _ in range(times):
        x = torch.randn(rows, 6)
        optimizer.zero_grad()
        F.cross_entropy(net(x), labels(x)).backward()
        optimizer.step()


def shallow() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def deep() -> nn.Module:
    """Layers that begin so small that plain descent stays on a plateau, at any rate that does not blow it up."""
    net = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 3))
    for one in net.parameters():
        one.data.mul_(0.1)
    return net


@pytest.mark.parametrize(("labels", "expected"), [(linear, True), (noise, False)])
def test_what_a_copy_knows_of_another_batch_tells_a_low_rate_from_labels_that_are_noise(
    labels: Labels, expected: bool
) -> None:
    found = asked(lambda: trains(shallow(), torch.optim.SGD, 1e-3, labels, rows=64), "rate")[-1]
    assert found.evidence["knows_more"] is expected
    assert found.evidence["unseen"] < 0.5 * found.evidence["final"] or not expected


def test_a_batch_that_is_all_there_is_says_nothing_of_another_one() -> None:
    x = torch.randn(64, 6)

    def whole() -> None:
        net = shallow()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for _ in range(12):
            optimizer.zero_grad()
            F.cross_entropy(net(x), linear(x)).backward()
            optimizer.step()

    assert "unseen" not in asked(whole, "rate")[-1].evidence


def test_adam_is_tried_where_plain_descent_learns_a_batch_at_no_rate() -> None:
    found = asked(lambda: trains(deep(), torch.optim.SGD, 1e-3), "rate")[-1]
    assert (found.answer, found.evidence["by"], found.evidence["other_lr"]) == ("yes", "Adam", 3e-3)


def test_the_second_of_two_trainings_is_asked_and_optimizers_that_take_turns_are_not() -> None:
    def one_after_the_other() -> None:
        trains(shallow(), torch.optim.Adam, 1e-2)
        trains(shallow(), torch.optim.SGD, 1e-5)

    def in_turns() -> None:
        net, other = shallow(), shallow()
        optimizers = [torch.optim.SGD(one.parameters(), lr=1e-5) for one in (net, other)]
        for _ in range(12):
            x = torch.randn(ROWS, 6)
            (F.cross_entropy(net(x), linear(x)) + F.cross_entropy(other(x), linear(x))).backward()
            for one in optimizers:
                one.step()

    assert [one.answer for one in asked(one_after_the_other, "rate")] == ["no", "yes"]
    assert answer(in_turns, "rate") == "unknown"


class Factors(nn.Module):
    """A table as a product of two."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.rand(60, 8)), nn.Parameter(torch.rand(8, 40))

    def forward(self) -> torch.Tensor:
        return self.rows @ self.columns


def factors(kind: Any, rate: float, decay: float) -> None:
    """Steps of a factorisation of a table, whose loss is a mean over so many entries that each slope is small."""
    table = 3 + torch.randn(60, 3) @ torch.randn(3, 40)
    net = Factors()
    optimizer = kind(net.parameters(), lr=rate, weight_decay=decay)
    for _ in range(6):
        optimizer.zero_grad()
        F.mse_loss(net(), table).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "rate", "decay", "expected"),
    [
        (torch.optim.Adam, 0.02, 0.05, "yes"),
        (torch.optim.SGD, 2.0, 0.05, "yes"),
        (torch.optim.Adam, 0.02, 1e-4, "no"),
        (torch.optim.Adam, 0.02, 0.0, "no"),
        (torch.optim.AdamW, 0.02, 0.05, "no"),
        (torch.optim.Adam, 1e-6, 0.05, "no"),  # nothing is learned without it either
    ],
)
def test_a_decay_is_told_where_a_copy_learns_without_it_alone(
    kind: Any, rate: float, decay: float, expected: str
) -> None:
    assert answer(lambda: factors(kind, rate, decay), "decay") == expected


def test_a_decay_is_not_told_where_a_copy_learns_a_batch_with_it_by_heart() -> None:
    """With nothing to learn but one batch, a decay makes less of it, and is not what keeps the run from learning."""

    def train() -> None:
        net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.02)
        for _ in range(60):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(40, 20)), torch.randint(4, (40,))).backward()
            optimizer.step()

    assert answer(train, "decay") == "no"


def test_adamw_is_what_a_copy_learns_with_in_place_of_the_decay_of_adam() -> None:
    seen = asked(lambda: factors(torch.optim.Adam, 0.02, 0.05), "decay")[-1].evidence
    assert (seen["by"], seen["other_decay"]) == ("AdamW", 0.05)
    assert seen["other_after"] < 0.5 * seen["held"]


def tried(**seen: Any) -> Training:
    """A training that learns, of which one batch is learned better at another rate."""
    evidence = {"optimizer": 0, "lr": 0.01, "by": "AdamW", "other_lr": 0.1, "loss": 2.3, "after": 1.9,
                "other_after": 0.01, "steps": 120, "knows_more": True, "unseen": 0.2, "final": 1.5} | seen  # fmt: skip
    call = LossCall(function="cross_entropy", items=32, input_shape=(32, 10), guess=2.3, classes=10)
    return Training(
        steps=120, loss=lambda step: max(falling(step), 1.5), call=call, after=(Probed(probe="rate", root=-1,
        answer="yes", evidence=evidence),)
    )  # fmt: skip


def test_lr_too_low_fires_on_a_run_that_learns_little_where_a_copy_knows_more() -> None:
    one = fires(tried().run(), "LR_TOO_LOW", "warning")
    assert "on another batch it then has 0.2, and the run at its end 1.5" in one.message
    quiet(tried().run(), "LR_TOO_HIGH")
    by_adam = fires(tried(lr=0.5, by="Adam", other_lr=3e-3).run(), "LR_TOO_LOW", "warning")
    assert by_adam.fix == "torch.optim.Adam(model.parameters(), lr=0.003)"


def test_lr_too_low_fires_on_a_run_that_learns_nothing_whatever_a_copy_knows_by_heart() -> None:
    by_heart = replace(tried(knows_more=False, unseen=4.3), loss=lambda step: 2.3)
    fires(by_heart.run(), "LR_TOO_LOW", "warning")


def test_lr_too_high_fires_where_it_is_a_lower_rate_that_learns() -> None:
    fires(tried(other_lr=1e-3).run(), "LR_TOO_HIGH", "warning")


def test_lr_too_low_is_quiet_on_a_run_that_learns_where_a_copy_learns_by_heart_only() -> None:
    quiet(tried(knows_more=False).run(), "LR_TOO_LOW")


def test_lr_too_low_is_quiet_on_a_run_whose_own_loss_ends_as_low_as_that_of_the_copy() -> None:
    """As with codes in buffers, which are those of the beginning where the last weights are tried on a kept step."""
    quiet(replace(tried(), loss=lambda step: max(falling(step), 0.25)).run(), "LR_TOO_LOW")


@pytest.mark.parametrize(("unseen", "is_told"), [(2.35, True), (3.2, False)])
def test_lr_too_low_fires_on_a_run_that_is_still_above_a_guess_that_a_copy_comes_down_to(
    unseen: float, is_told: bool
) -> None:
    """Of what lies above it nothing is left for the copy: twice the loss would say that both are alike."""
    high = replace(tried(knows_more=False, loss=6.0, other_after=2.3, unseen=unseen, final=3.6),
                   loss=lambda step: 6.0 - 0.02 * step)  # fmt: skip
    (fires if is_told else lambda run, name, _: quiet(run, name))(high.run(), "LR_TOO_LOW", "warning")


class Framed(torch.optim.SGD):
    """An optimizer of a framework, which holds that of the user."""

    def __init__(self, held: torch.optim.Optimizer) -> None:
        vars(self).update(vars(held))
        self._optimizer: torch.optim.Optimizer = held


def test_an_optimizer_that_holds_another_one_of_its_class_is_that_one() -> None:
    own = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    framed = Framed(own)
    assert [optimizer_facts(one)["cls"] for one in (own, framed, framed._optimizer)] == ["SGD"] * 3
    framed._optimizer = torch.optim.Adam(own.param_groups[0]["params"])
    assert optimizer_facts(framed)["cls"] == "Framed"
