"""A number that is not finite is the root where nothing announced it, and a consequence where the loss had exploded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import nan_programs as programs
from anybatch.doctor.diagnosing import diagnose
from anybatch.doctor.recorder import Doctor
from anybatch.records.findings import Finding
from anybatch.records.samples import NonFinite
from number_runs import Training, falling, fires, quiet
from versions import saved_tensors


def found_in(program: Callable[[], Any]) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    with Doctor() as doctor:
        program()
    return doctor.findings


@pytest.mark.parametrize(
    ("program", "name"),
    [
        pytest.param(programs.row_of_a_learner_with_long_steps, "NAN_IN_FORWARD", marks=saved_tensors),
        (programs.row_of_a_linear_model, "NAN_IN_FORWARD"),
        (programs.row_at_a_sampled_step, "NAN_IN_FORWARD"),
        (programs.row_of_small_weights, "NAN_IN_FORWARD"),
        (programs.logarithm_of_zero, "NAN_IN_FORWARD"),
        (programs.slope_of_a_root_at_zero, "NAN_IN_BACKWARD"),
    ],
)
def test_what_comes_out_of_nothing_is_the_root(program: Callable[[], Any], name: str) -> None:
    found = found_in(program)
    assert (found[0].name, found[0].severity) == (name, "error"), found
    assert not [one for one in found if one.name in ("LR_TOO_HIGH", "EXPLODING") and one.severity != "info"], found


class Rooted(torch.optim.Optimizer):
    """Divides by the root of a mean of gradients, or of their squares."""

    def __init__(self, params: Any, power: int) -> None:
        super().__init__(params, {})
        self.power = power

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                second = self.state[one].setdefault("v", torch.zeros_like(one))
                second.mul_(0.9).add_(one.grad**self.power, alpha=0.1)
                one.sub_(0.01 * one.grad / (second.sqrt() + 1e-8))


@pytest.mark.parametrize("power", [1, 2])
def test_a_root_of_what_the_optimizer_keeps_below_zero_is_named(power: int) -> None:
    def program() -> None:
        model = torch.nn.Linear(4, 1)
        optimizer = Rooted(model.parameters(), power)
        for _ in range(4):
            x = torch.randn(32, 4)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()

    found = [one for one in found_in(program) if one.name == "NAN_IN_FORWARD"]
    assert ["'v' in the state of Rooted is below 0" in one.message for one in found] == [True] * (2 - power)


@pytest.mark.parametrize(
    "program",
    [programs.explodes_at_once, programs.explodes_over_many_steps, programs.saturates_into_a_logarithm],
)
def test_what_had_exploded_follows_from_the_learning_rate(program: Callable[[], Any]) -> None:
    found = found_in(program)
    assert found[0].name == "LR_TOO_HIGH", found
    assert {one.consequence_of for one in found if one.name == "NAN_IN_FORWARD"} == {"LR_TOO_HIGH"}


def long_at_first(where: str, *, at: int = 20, **facts: Any) -> Training:
    """A run whose first steps are long, and that loses a number many steps later."""
    return Training(
        ratio=lambda step, layer: 0.2 if step < 3 else 1e-3,
        loss=lambda step: falling(step) if step < at else float("nan"),
        every=lambda step: [NonFinite(where=where, **facts)] if step == at else [],
    )


def test_a_number_that_is_lost_long_after_long_steps_is_no_harm_of_theirs() -> None:
    quiet(long_at_first("forward", op="LogBackward0").run(), "LR_TOO_HIGH")
    quiet(long_at_first("input").run(), "LR_TOO_HIGH")
    assert diagnose(long_at_first("input").run())[0].name == "NAN_IN_FORWARD"


def test_a_number_that_is_lost_right_after_a_long_step_is_its_harm_unless_it_is_of_the_data() -> None:
    fires(long_at_first("forward", at=4, op="LogBackward0").run(), "LR_TOO_HIGH", "warning")
    quiet(long_at_first("input", at=4).run(), "LR_TOO_HIGH")
    quiet(long_at_first("forward", at=4, op="DivBackward0", of_data=True).run(), "LR_TOO_HIGH")


def test_data_that_a_diverging_model_makes_for_itself_follow_from_the_learning_rate() -> None:
    run = Training(
        ratio=lambda step, layer: 0.5,
        loss=lambda step: 2.0 * 3**step if step < 12 else float("nan"),
        every=lambda step: [NonFinite(where="input")] if step == 12 else [],
    ).run()
    fires(run, "LR_TOO_HIGH", "warning")


def test_a_gradient_of_the_first_lost_number_is_no_explosion() -> None:
    """The step before was not measured, and the loss had not risen."""
    run = Training(
        grad=lambda step, layer: 0.5 if step < 25 else float("nan"),
        loss=lambda step: falling(step) if step < 25 else float("nan"),
        every=lambda step: [NonFinite(where="input")] if step == 25 else [],
    ).run()
    quiet(run, "EXPLODING")


class Attending(torch.nn.Module):
    """Attention with a mask, and one whose fully hidden rows are replaced before or behind the softmax."""

    def __init__(self, replaced: str) -> None:
        super().__init__()
        self.replaced = replaced
        self.q, self.v = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ x.transpose(1, 2)
        if self.replaced == "before":
            hidden = hidden & ~hidden.all(1, keepdim=True)
        scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))
        weights = scores.softmax(-1)
        if self.replaced == "weights":
            weights = weights.nan_to_num()
        attended = torch.nn.functional.layer_norm(x + weights @ self.v(x), (4,))
        return attended.nan_to_num() if self.replaced == "output" else attended


def attend(replaced: str) -> Finding | None:
    """The first error of a run over rows the second of which is empty."""
    hidden = torch.zeros(6, 5, dtype=torch.bool)
    hidden[1] = True

    def program() -> None:
        net = Attending(replaced)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(6):
            optimizer.zero_grad()
            net(torch.randn(6, 5, 4), hidden).square().mean().backward()
            optimizer.step()

    return next((one for one in found_in(program) if one.severity == "error"), None)


@saved_tensors
@pytest.mark.parametrize("replaced", ["", "output"])
def test_a_softmax_of_rows_that_are_hidden_altogether_is_named(replaced: str) -> None:
    found = attend(replaced)
    assert found is not None
    assert found.name == "NAN_IN_FORWARD", found
    assert "5 of its 30 rows have no score above -inf" in found.message
    assert "-inf everywhere" in found.fix


@pytest.mark.parametrize("replaced", ["before", "weights"])
def test_rows_that_are_hidden_altogether_and_replaced_in_time_are_no_fault(replaced: str) -> None:
    assert attend(replaced) is None
