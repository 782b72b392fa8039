"""One iteration that is followed where something was missing, in a run that does not change by it."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from anybatch import Doctor
from anybatch.doctor.recording.numbering import Numbering
from anybatch.doctor.samples.suspicion import Suspicion
from anybatch.doctor.samples.walking import Walker
from anybatch.records.lossfacts import Followed
from anybatch.records.paths import Paths
from anybatch.records.samples import Memory

X = torch.linspace(-1, 1, 24).reshape(6, 4)


class Cut(nn.Module):
    def __init__(self, cut: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder, self.cut = nn.Linear(4, 5), nn.Linear(5, 1), cut
        self.spare = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.cut(self.encoder(x)))  # type: ignore[no-any-return]


def loop(
    model: nn.Module, loss_of: Callable[[int], torch.Tensor], steps: int = 5, seen: bool = True
) -> tuple[list[Followed], list[torch.Tensor]]:
    """A plain loop with what the recorder does around it."""
    numbering = Numbering(lambda fact: None)
    numbering.root(model)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    numbering.optimizer(sgd)
    suspicion, walker = Suspicion(numbering), Walker(numbering)
    found, had = [], set[int]()
    for step in range(steps):
        sgd.zero_grad()
        loss = loss_of(step)
        if seen:
            walk = walker.walk(loss, 6, step=step)
            if (one := suspicion.before_backward(loss)) is not None:
                found.append(one)
        if loss.requires_grad:
            loss.backward()
        if seen:
            suspicion.after_backward()
        sgd.step()
        had |= {number for number, p in numbering.tracked() if p.grad is not None}
        if seen:
            suspicion.after_step([walk], [n for n, p in numbering.tracked() if p.requires_grad and n not in had])
    suspicion.stop()
    assert _get_current_function_mode_stack() == []
    return found, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("cut", "op"),
    [
        (lambda x: x.detach(), "detach"),
        (lambda x: x.data, "data"),
        (lambda x: torch.tensor(x.tolist()), "item"),
        (lambda x: F.one_hot(x.argmax(-1), 5).float(), "argmax"),
        (lambda x: x.round().int().float(), "int"),
    ],
)
def test_what_cuts_a_graph_has_a_name_and_a_line(cut: Callable[[torch.Tensor], torch.Tensor], op: str) -> None:
    model = Cut(cut)
    found, _ = loop(model, lambda step: model(X).pow(2).mean())
    assert len(found) == 1
    paths = Paths.from_dict(found[0].paths)
    stop = paths.stopped["encoder.weight"]
    assert found[0].why == "no gradient"
    assert stop.op in (op, "tolist")
    assert stop.file == __file__
    assert stop.line > 0
    assert stop.after in ("linear in encoder", "round")
    assert paths.stopped["spare.weight"].op == "unused"
    assert set(found[0].unused) == {"spare.weight", "spare.bias"}
    assert set(paths.reached) == {"decoder.weight", "decoder.bias"}


def loaded(model: nn.Module) -> nn.Module:
    other = Cut()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize(("copied", "op"), [(copy.deepcopy, "deepcopy"), (loaded, "state_dict")])
def test_a_loss_on_a_copy_of_the_model_is_cut_by_what_makes_the_copy(
    copied: Callable[[nn.Module], nn.Module], op: str
) -> None:
    model = Cut()
    found, _ = loop(model, lambda step: copied(model)(X).pow(2).mean())
    stop = Paths.from_dict(found[0].paths).stopped["encoder.weight"]
    assert stop.op == op
    assert stop.message.startswith("A copy has parameters of its own")


def test_a_healthy_run_is_never_followed() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    numbering_modes = []

    def loss_of(step: int) -> torch.Tensor:
        numbering_modes.append(len(_get_current_function_mode_stack()))
        loss: torch.Tensor = model(X).pow(2).mean()
        return loss

    found, _ = loop(model, loss_of)
    assert found == []
    assert numbering_modes == [0] * 5


def test_constant_terms_have_values_and_say_what_cut_them() -> None:
    model = Cut()
    model.spare.requires_grad_(False)

    def loss_of(step: int) -> torch.Tensor:
        y: torch.Tensor = model(X)
        return y.pow(2).mean() + (0.5 * y).abs().mean().detach() + 0.1

    found, _ = loop(model, loss_of)
    assert [one.why for one in found] == ["constant term"]
    terms = Paths.from_dict(found[0].paths).terms
    assert [term.has_gradient for term in terms] == [True, False, False]
    assert terms[1].by == "detach"
    assert terms[1].value is not None
    assert terms[2].op == "a number"
    assert terms[2].value == pytest.approx(0.1)


def test_a_loss_that_is_a_leaf_is_followed() -> None:
    model = Cut()
    model.spare.requires_grad_(False)
    found, _ = loop(model, lambda step: model(X).argmax(-1).float().mean().requires_grad_())
    assert found[0].why == "loss without graph"
    assert Paths.from_dict(found[0].paths).stopped["encoder.weight"].op == "argmax"


def test_the_loss_in_question_is_told_from_others() -> None:
    """The discriminator's loss detaches the generator on purpose, so that the generator's own one is looked at."""
    torch.manual_seed(0)
    generator = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 4)})
    judge = nn.Linear(4, 1)
    both = nn.ModuleDict({"generator": generator, "judge": judge})
    numbering = Numbering(lambda fact: None)
    numbering.root(both)
    optimizers = torch.optim.SGD(judge.parameters(), lr=0.1), torch.optim.SGD(generator.parameters(), lr=0.1)
    for optimizer in optimizers:
        numbering.optimizer(optimizer)
    suspicion, had, found = Suspicion(numbering), set[int](), []
    for _ in range(6):
        fake = generator["b"](generator["a"](torch.ones(6, 2)).data)
        for number, optimizer in enumerate(optimizers):
            value: torch.Tensor = -judge(fake).mean() if number else judge(fake.detach()).mean()
            found += [one] if (one := suspicion.before_backward(value)) is not None else []
            optimizer.zero_grad()
            value.backward()
            suspicion.after_backward()
            optimizer.step()
            had |= {number for number, p in numbering.tracked() if p.grad is not None}
            suspicion.after_step([], [n for n, _ in numbering.tracked() if n not in had])
    suspicion.stop()
    stops = Paths.from_dict(found[0].paths).stopped
    assert len(found) == 1
    assert {name for name in stops if name.startswith("generator")} == {"generator.a.weight", "generator.a.bias"}


def test_checkpoints_are_not_run_again() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head, self.spare = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(2, 2)
            self.count = 0

        def block(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.inner(x)  # type: ignore[no-any-return]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=True))  # type: ignore[no-any-return]

    counts = []
    for seen in (False, True):
        model = Counting()
        x = X.clone().requires_grad_()
        found, _ = loop(model, lambda step, model=model, x=x: model(x).mean(), seen=seen)  # type: ignore[misc]
        counts.append(model.count)
    assert counts[0] == counts[1]
    paths = Paths.from_dict(found[0].paths)
    assert set(paths.stopped) == {"spare.weight", "spare.bias"}


def test_weights_random_state_and_versions_are_those_of_a_run_that_nobody_follows() -> None:
    def run(seen: bool) -> tuple[Any, ...]:
        model = Cut(lambda x: F.dropout(x, 0.5).detach())
        torch.manual_seed(5)
        found, weights = loop(model, lambda step: model(torch.randn(6, 4)).pow(2).mean() + 0.1, seen=seen)
        return len(found), weights, torch.get_rng_state(), [p._version for p in model.parameters()]

    plain, followed = run(False), run(True)
    assert followed[0] == 2
    assert all(torch.equal(a, b) for a, b in zip(plain[1], followed[1], strict=True))
    assert torch.equal(plain[2], followed[2])
    assert plain[3] == followed[3]


def test_errors_of_the_script_pass_and_the_mode_is_left() -> None:
    model = Cut(lambda x: x.detach())
    numbering = Numbering(lambda fact: None)
    numbering.root(model)
    suspicion = Suspicion(numbering)
    suspicion.after_step([], [0])
    suspicion.after_step([], [0])
    assert suspicion.is_busy
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 3))
    assert torch.nonzero(torch.ones(2)).shape == (2, 1)
    suspicion.stop()
    assert not suspicion.is_busy
    assert _get_current_function_mode_stack() == []


def test_a_fault_of_the_follower_does_not_reach_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    from anybatch.doctor import following

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("a fault")

    calls = []
    model = Cut(lambda x: calls.append(1) or x.detach())  # type: ignore[func-returns-value]
    monkeypatch.setattr(following.Follower, "_note", fail)
    found, _ = loop(model, lambda step: model(X).mean())
    assert found == []
    assert len(calls) == 5


def test_a_mode_of_somebody_else_is_left_alone() -> None:
    model = Cut(lambda x: x.detach())
    numbering = Numbering(lambda fact: None)
    numbering.root(model)
    with torch.overrides.BaseTorchFunctionMode() as own:
        suspicion = Suspicion(numbering)
        suspicion.after_step([], [0])
        suspicion.after_step([], [0])
        assert _get_current_function_mode_stack() == [own]
    suspicion = Suspicion(numbering)
    suspicion.after_step([], [0])
    suspicion.after_step([], [0])
    mode = torch.overrides.BaseTorchFunctionMode()
    mode.__enter__()
    suspicion.before_backward(model(X).mean())
    assert mode in _get_current_function_mode_stack()
    mode.__exit__(None, None, None)
    suspicion.after_step([], [])
    assert _get_current_function_mode_stack() == []


def test_where_a_whole_optimizer_has_no_gradient_its_own_loss_is_waited_for() -> None:
    """The loss of the other network comes first in each iteration, and does not use this one, or without gradients."""
    actor, critic = nn.Linear(4, 2), nn.Linear(6, 1)
    numbering = Numbering(lambda fact: None)
    numbering.root(actor)
    numbering.root(critic)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (actor, critic)]
    for optimizer in optimizers:
        numbering.optimizer(optimizer)
    suspicion, found = Suspicion(numbering), list[Followed | None]()
    never = [n for n, p in numbering.tracked() if any(p is one for one in actor.parameters())]
    for _ in range(4):
        with torch.no_grad():
            action = actor(X).tanh()
        first = critic(torch.cat([X, action], -1)).mean()
        found.append(suspicion.before_backward(first))
        suspicion.after_backward()
        found.append(suspicion.after_step([], never, 1))
        second = critic(torch.cat([X, actor(X).detach()], -1)).mean()
        found.append(suspicion.before_backward(second))
        suspicion.after_backward()
        found.append(suspicion.after_step([], never, 0))
    suspicion.stop()
    (seen,) = [one for one in found if one is not None]
    assert found.index(seen) % 4 == 3, "of the first loss"
    paths = Paths.from_dict(seen.paths)
    assert {stop.op for stop in paths.stopped.values()} == {"detach"}


def test_each_reason_is_followed_once() -> None:
    model = Cut(lambda x: x.detach())
    found, _ = loop(model, lambda step: model(X).mean() + 0.1, steps=12)
    assert [one.why for one in found] == ["constant term", "no gradient"]


def two_players(cut: Callable[[torch.Tensor], torch.Tensor], rounds: int) -> Doctor:
    """A discriminator that steps several times before the generator, rightly on detached samples."""
    torch.manual_seed(0)
    maker, judge = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), nn.Linear(2, 1)
    ours, theirs = torch.optim.Adam(maker.parameters(), 1e-2), torch.optim.Adam(judge.parameters(), 1e-2)
    with Doctor() as doctor:
        for _ in range(12):
            for _ in range(rounds):
                made = maker(torch.randn(6, 3))
                theirs.zero_grad()
                (F.softplus(-judge(torch.randn(6, 2))) + F.softplus(judge(made.detach()))).mean().backward()
                theirs.step()
            ours.zero_grad()
            F.softplus(-judge(cut(made))).mean().backward()
            ours.step()
    return doctor


def given_up(x: torch.Tensor) -> torch.Tensor:
    return x.detach()  # CUT


@pytest.mark.parametrize("rounds", [1, 5])
def test_the_cut_is_that_of_the_loss_that_the_own_optimizer_steps_on(rounds: int) -> None:
    doctor = two_players(given_up, rounds)
    assert doctor.failure == ""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    found = {one.name: one for one in doctor.findings}
    for name in ("GRAPH_CUT", "LOSS_TERM_CUT"):
        assert lines[found[name].place.line - 1].endswith("# CUT"), found[name]


@pytest.mark.parametrize("rounds", [1, 5])
def test_a_discriminator_on_detached_samples_cuts_nothing(rounds: int) -> None:
    doctor = two_players(lambda x: x, rounds)
    assert doctor.failure == ""
    assert not {"GRAPH_CUT", "LOSS_TERM_CUT"} & {one.name for one in doctor.findings}
    assert not any(True for _ in doctor.run.of(Followed))


@pytest.mark.parametrize("why", ["no gradient", "constant term"])
def test_what_was_followed_keeps_no_graph_of_the_run(why: str) -> None:
    model = Cut(torch.detach) if why == "no gradient" else Cut()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    gc.disable()  # as good as it is between two of its rounds, which may be many steps
    try:
        with Doctor(model, sgd) as doctor:
            for _ in range(8):
                sgd.zero_grad()
                loss = model(X).square().mean()
                if why == "constant term":
                    loss = loss + torch.tensor(model(X).mean().item())
                model(X)  # its graph goes without a backward
                loss.backward()
                sgd.step()
    finally:
        gc.enable()
    assert why in {one.why for one in doctor.run.of(Followed)}
    assert {(one.graphs, one.losses) for one in doctor.run.of(Memory)} == {(0, 0)}
