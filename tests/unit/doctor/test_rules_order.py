"""Rules of the family order: each fires on a run that has the fault, and is quiet on one that only looks like it."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch.doctor.diagnosing import diagnose
from anybatch.doctor.recorder import Doctor
from anybatch.records.events import Cleared
from anybatch.records.lossfacts import Followed
from anybatch.records.paths import Paths, Term
from rule_runs import LINES, RunBuilder, findings, simple


def not_cleared(
    steps: int = 5, *, kept: tuple[int, ...] = (0, 1, 2, 3), closure: bool = False, cls: str = "SGD"
) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers, cls=cls, variable="opt")
    for index in range(steps):
        built.forward()
        built.backward(numbers, kept=kept if index else ())
        built.step(closure=closure)
    return built


def test_zero_grad_missing_fires_after_three_steps() -> None:
    (one,) = findings(not_cleared(), "ZERO_GRAD_MISSING")
    assert (one.severity, one.step, one.place.line) == ("error", 3, LINES["backward"])
    assert one.fix.startswith("opt.zero_grad()")
    assert not findings(not_cleared(3), "ZERO_GRAD_MISSING")


def test_zero_grad_missing_fires_where_every_second_step_uses_gradients_again() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Doctor() as doctor:
        for _ in range(8):
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            net(x).abs().mean().backward()
            optimizer.step()
    (one,) = (each for each in diagnose(doctor.run) if each.name == "ZERO_GRAD_MISSING")
    assert "at 8 steps of the 8 behind it" in one.message


def test_zero_grad_missing_fires_as_a_warning_for_a_part_of_the_parameters() -> None:
    (one,) = findings(not_cleared(kept=(2, 3)), "ZERO_GRAD_MISSING")
    assert one.severity == "warning"
    assert one.place.module == "head"


def test_zero_grad_missing_is_quiet_on_two_backwards_for_one_step() -> None:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for _ in range(5):
        built.clear()
        built.backward(numbers, retain=True)
        built.backward(numbers[:2], line=41)
        built.step()
    assert not findings(built, "ZERO_GRAD_MISSING")
    assert not findings(not_cleared(closure=True, cls="LBFGS"), "ZERO_GRAD_MISSING")


def in_closures(*, inside: bool, backwards: int = 4, steps: int = 5, before: bool = True) -> RunBuilder:
    """Steps of LBFGS, with a clearing in front of each, or of each backward."""
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers, cls="LBFGS", variable="opt")
    for _ in range(steps):
        for index in range(backwards):
            if inside or (before and not index):
                built.clear()
            built.forward()
            built.backward(numbers)
        built.step(closure=True)
    return built


def test_zero_grad_missing_fires_where_a_closure_is_cleared_outside_of_it() -> None:
    (one,) = findings(in_closures(inside=False), "ZERO_GRAD_MISSING")
    assert "within a step, in 5 steps" in one.message
    assert one.evidence["backwards"] == 20


def test_zero_grad_missing_fires_in_one_step_of_many_calls() -> None:
    (one,) = findings(in_closures(inside=False, backwards=20, steps=1, before=False), "ZERO_GRAD_MISSING")
    assert "in 1 step: each backward of the closure" in one.message
    assert not findings(in_closures(inside=True, backwards=20, steps=1), "ZERO_GRAD_MISSING")
    assert not findings(in_closures(inside=False, backwards=2, steps=1, before=False), "ZERO_GRAD_MISSING")


def test_zero_grad_missing_is_quiet_where_the_closure_clears_or_is_called_once() -> None:
    assert not findings(in_closures(inside=True), "ZERO_GRAD_MISSING")
    assert not findings(in_closures(inside=False, backwards=1), "ZERO_GRAD_MISSING")


def test_zero_grad_missing_is_quiet_on_gradient_that_is_cleared_before_its_own_step() -> None:
    built = RunBuilder()
    g, d = built.model(("g.weight",), variable="g"), built.model(("d.weight",), root=1, variable="d")
    built.optimizer(g, number=0)
    built.optimizer(d, number=1)
    for index in range(6):
        built.clear(1)
        built.backward(d, line=41)
        built.step(1)
        built.clear(0)
        built.backward(g + d, kept=d, line=42)
        built.step(0)
        assert index >= 0
    assert not findings(built, "ZERO_GRAD_MISSING")


def cleared_late(*, with_grad: int = 0, zero: bool | None = None, edited: int = 0) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for _ in range(4):
        built.forward()
        built.backward(numbers)
        built.clear()
        built.step(with_grad=with_grad, zero=zero, edited=edited)
    return built


@pytest.mark.parametrize(("with_grad", "zero"), [(0, None), (4, True)])
def test_zero_grad_before_step_fires_on_none_and_on_zeros(with_grad: int, zero: bool | None) -> None:
    (one,) = findings(cleared_late(with_grad=with_grad, zero=zero), "ZERO_GRAD_BEFORE_STEP")
    assert one.place.line == LINES["clear"]
    assert one.evidence["in_vain"] == 4


def test_zero_grad_before_step_fires_where_most_steps_were_not_looked_at() -> None:
    built = cleared_late(with_grad=4, zero=True)
    for _ in range(20):
        built.backward((0, 1, 2, 3))
        built.clear()
        built.step(zero=None)
    assert findings(built, "ZERO_GRAD_BEFORE_STEP")


def test_zero_grad_before_step_is_quiet_where_the_backward_itself_gives_zeros() -> None:
    built = cleared_late(with_grad=4, zero=True)
    built.facts = [
        dataclasses.replace(one, by="hand", number=-1, file="", line=0) if isinstance(one, Cleared) else one
        for one in built.facts
    ]
    assert not findings(built, "ZERO_GRAD_BEFORE_STEP")


def test_zero_grad_before_step_is_quiet_on_gradients_set_by_hand_and_on_skips() -> None:
    assert not findings(cleared_late(with_grad=4, zero=False), "ZERO_GRAD_BEFORE_STEP")
    assert not findings(cleared_late(with_grad=0, edited=4), "ZERO_GRAD_BEFORE_STEP")
    built = simple()
    for _ in range(3):
        built.clear()
        built.backward((0, 1, 2, 3), scaled=True)
        built.scaler("step", 0, skipped=True)
        built.scaler("update")
    built.train((0, 1, 2, 3), 4)
    assert not findings(built, "ZERO_GRAD_BEFORE_STEP")
    assert not findings(built, "ZERO_GRAD_PER_MICROBATCH")


def never_stepped(backwards: int, *, optimizer: bool = True) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model()
    if optimizer:
        built.optimizer(numbers)
    for _ in range(backwards):
        built.clear()
        built.forward()
        built.backward(numbers)
    return built


def test_step_missing_fires_after_twenty_backwards() -> None:
    (one,) = findings(never_stepped(25), "STEP_MISSING")
    assert one.severity == "error"
    assert one.fix.startswith("optimizer.step()")


def test_step_missing_is_quiet_on_hand_written_updates_skips_and_other_optimizers() -> None:
    skipped = never_stepped(25)
    skipped.scaler("step", 0, skipped=True)
    other = never_stepped(25)
    other.optimizer((0, 1, 2, 3), number=1)
    other.step(1)
    for built in (never_stepped(25, optimizer=False), never_stepped(19), skipped, other):
        assert not findings(built, "STEP_MISSING")


def without(*, with_grad: int = 0, torchs: bool = True, backward: bool = False) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers, is_torchs=torchs)
    for _ in range(6):
        built.forward()
        if backward:
            built.backward(numbers)
            built.clear()
        built.step(with_grad=with_grad)
    return built


def test_step_without_gradient_fires_where_no_backward_was_called() -> None:
    (one,) = findings(without(), "STEP_WITHOUT_GRADIENT")
    assert one.fix.startswith("loss.backward()")


def test_step_without_gradient_is_quiet_on_own_optimizers_and_own_gradients() -> None:
    for built in (without(with_grad=4), without(torchs=False), without(backward=True), simple()):
        assert not findings(built, "STEP_WITHOUT_GRADIENT")


def adversaries(*, own: bool = False, late: bool = False, shared: bool = False) -> RunBuilder:
    """Two optimizers, of which the second one's loss reaches the first one's parameters too."""
    built = RunBuilder()
    numbers = built.model(("d.weight", "d.bias", "g.weight", "g.bias"))
    built.optimizer(numbers[:2], 0, variable="optimizer_d")
    built.optimizer(numbers[2:], 1, variable="optimizer_g")
    for _ in range(8):
        if not late:
            built.clear(0)
        built.forward()
        if own:
            built.backward(numbers[:2])
        if not shared:
            built.step(0, with_grad=2 if own else 0)
        built.clear(1)
        built.forward()
        built.backward(numbers)
        built.step(1)
        if late:
            built.clear(0)
        if shared:
            built.clear(0)
            built.step(0, with_grad=0)
    return built


def test_step_without_gradient_fires_where_only_the_loss_of_another_optimizer_reaches() -> None:
    built = adversaries()
    (one,) = findings(built, "STEP_WITHOUT_GRADIENT")
    assert one.place.optimizer == "optimizer_d" or one.message.startswith("optimizer_d")
    assert not findings(built, "ZERO_GRAD_BEFORE_STEP")
    assert findings(adversaries(late=True), "STEP_WITHOUT_GRADIENT")


def test_step_without_gradient_names_the_line_of_a_term_without_a_graph() -> None:
    """As where a policy's numbers go through NumPy on the way to its distribution."""
    built = adversaries()
    terms = Term(0.5, False, "a tensor", file="train.py", line=7), Term(0.1, True, "pow", file="train.py", line=9)
    built.add(Followed(why="no gradient", paths=Paths({}, {}, terms=terms).to_dict()))
    (one,) = findings(built, "STEP_WITHOUT_GRADIENT")
    assert (one.place.file, one.place.line) == ("train.py", 7)
    assert one.message.endswith("What train.py:7 computes is part of the loss and has no graph.")
    assert one.fix.startswith("# keep the graph up to train.py:7")


def test_step_without_gradient_names_the_loss_whose_backward_is_missing_and_no_detach() -> None:
    net, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    of_net, of_critic = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, critic))
    with Doctor() as doctor:
        for _ in range(8):
            made = net(torch.randn(8, 2))
            of_critic.zero_grad()
            F.mse_loss(critic(made.detach()), torch.ones(8, 1)).backward()
            of_critic.step()
            of_net.zero_grad()
            F.l1_loss(critic(made), torch.zeros(8, 1))  # and no backward
            of_net.step()
    (one,) = (each for each in diagnose(doctor.run) if each.severity == "error")
    assert one.name == "STEP_WITHOUT_GRADIENT"
    assert "no backward was called between l1_loss" in one.message


def test_step_without_gradient_is_quiet_beside_another_optimizer() -> None:
    assert not findings(adversaries(own=True), "STEP_WITHOUT_GRADIENT")
    built = adversaries(shared=True)  # one loss for both, cleared before the second step
    assert not findings(built, "STEP_WITHOUT_GRADIENT")
    assert findings(built, "ZERO_GRAD_BEFORE_STEP")


def repeated(between: str, *, rounds: int = 8) -> Doctor:
    """Steps twice in each round, with something between the two steps."""
    net = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with Doctor() as doctor:
        for _ in range(rounds):
            x, y = torch.randn(16, 4), torch.randint(2, (16,))
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            if between == "backward":
                F.cross_entropy(net(x), y).backward()
            elif between == "by hand":
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(0.5)
            elif between == "clearing":
                optimizer.zero_grad()
            optimizer.step()
    return doctor


def test_step_twice_fires_on_steps_without_a_backward_between() -> None:
    (one,) = (each for each in diagnose(repeated("").run) if each.name == "STEP_TWICE")
    assert one.severity == "warning"
    assert one.fix.startswith("remove the second step of optimizer")


def test_step_twice_fires_behind_a_step_that_steps_by_itself() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    step = anybatch.TrainStep(
        net, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), optimizer, micro_batch_size=8
    )
    with Doctor() as doctor:
        for _ in range(8):
            step((torch.randn(16, 4), torch.randint(2, (16,))))
            optimizer.step()
    assert any(each.name == "STEP_TWICE" for each in diagnose(doctor.run))


def test_step_twice_is_quiet_on_other_gradients() -> None:
    for between in ("backward", "by hand", "clearing"):
        assert not any(each.name == "STEP_TWICE" for each in diagnose(repeated(between).run)), between
    assert not findings(simple(), "STEP_TWICE")


def backwards_of(second: str, *, rounds: int = 6) -> Doctor:
    """Two backwards for one step."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Doctor() as doctor:
        for _ in range(rounds):
            x, y = torch.randn(16, 4), torch.randint(2, (16,))
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            other = x if second == "same" else x + 0.1
            F.cross_entropy(net(other), y).backward()
            optimizer.step()
    return doctor


def test_loss_counted_twice_fires_on_two_backwards_of_equal_losses() -> None:
    (one,) = (each for each in diagnose(backwards_of("same").run) if each.name == "LOSS_COUNTED_TWICE")
    assert one.fix.startswith("remove the backward (test_rules_order.py:")


def twins() -> Doctor:
    """Two critics that begin alike, each with a loss of its own."""
    one = nn.Linear(4, 1)
    other = copy.deepcopy(one)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.01)
    with Doctor() as doctor:
        for _ in range(6):
            x, y = torch.randn(16, 4), torch.randn(16, 1)
            optimizer.zero_grad()
            F.mse_loss(one(x), y).backward()
            F.mse_loss(other(x), y).backward()
            optimizer.step()
    return doctor


def test_loss_counted_twice_is_quiet_on_other_losses() -> None:
    assert not any(each.name == "LOSS_COUNTED_TWICE" for each in diagnose(backwards_of("noisy").run))
    assert not any(each.name == "LOSS_COUNTED_TWICE" for each in diagnose(twins().run))
    assert not findings(not_cleared(), "LOSS_COUNTED_TWICE")


def test_loss_counted_twice_fires_where_the_first_one_was_split() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    with Doctor() as doctor:
        for _ in range(6):
            batch = torch.randn(16, 4), torch.randint(2, (16,))
            optimizer.zero_grad()
            anybatch.backward(net, loss_fn, batch, micro_batch_size=4)
            loss_fn(net, batch).backward()
            optimizer.step()
    assert any(each.name == "LOSS_COUNTED_TWICE" for each in diagnose(doctor.run))
