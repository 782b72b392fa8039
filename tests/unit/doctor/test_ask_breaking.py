"""What makes the first nan or inf of data that are prepared in a step is named, with its line and its inputs.

How this could be wrong: an operation is blamed that is given nan, that fills a mask, or that the loss never meets;
or the script itself goes on otherwise.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.diagnosing import diagnosis
from anybatch.doctor.recorder import Doctor
from anybatch.records.findings import Finding
from test_doctor_ask import nothing_was_compiled

__all__ = ["nothing_was_compiled"]

pytestmark = pytest.mark.asks
Prepare = Callable[[torch.Tensor], torch.Tensor]
STEPS, BAD = 40, 6


def trained(prepare: Prepare, *, before: bool = False, watched: bool = True) -> tuple[list[Finding], torch.Tensor]:
    """The findings where targets are made so, each fifth batch having a row below 0, and the next random numbers."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    def train() -> None:
        for step in range(STEPS):
            x = torch.rand(16, 4) + 0.1
            if step >= BAD and not step % 3:
                x[3] = -x[3]
            target = prepare(x) if before else None
            out = net(x)
            target = prepare(x) if target is None else target
            optimizer.zero_grad()
            F.mse_loss(out, target).backward()
            optimizer.step()

    if not watched:
        train()
        return [], torch.rand(4)
    with Doctor() as doctor:
        train()
    drawn = torch.rand(4)
    return list(diagnosis(doctor.run).findings), drawn


def of_a_log(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1, keepdim=True).log()  # the logarithm


def of_a_root(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1, keepdim=True).sqrt()  # the root


def by_way_of_others(x: torch.Tensor) -> torch.Tensor:
    made = x.sum(1, keepdim=True).log()  # the first of several
    return torch.cat([made * 2, made])[:16].view(16, 1) + 1


def of_a_share(x: torch.Tensor) -> torch.Tensor:
    some = x[:, :1].clamp_min(0)
    return some / some  # the share


def to_infinity(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / x[:, :1].clamp_min(0)  # the inverse


def of_masked_scores(x: torch.Tensor) -> torch.Tensor:
    """Fills with -inf what counts nothing, as attention does, and then takes a logarithm of what is below 0."""
    scores = x.masked_fill(x.argsort(1) > 1, -torch.inf)
    return scores.softmax(1)[:, :1] + x.sum(1, keepdim=True).log()  # the masked logarithm


def line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("prepare", "op", "text"),
    [
        (of_a_log, "log", "the logarithm"),
        (of_a_root, "sqrt", "the root"),
        (by_way_of_others, "log", "the first of several"),
        (of_a_share, "div", "the share"),
        (to_infinity, "div", "the inverse"),
        (of_masked_scores, "log", "the masked logarithm"),
    ],
)
def test_what_makes_a_target_no_number_is_named(prepare: Prepare, op: str, text: str, before: bool) -> None:
    findings, drawn = trained(prepare, before=before)
    found = findings[0]
    assert (found.name, found.place.line, found.evidence["op"]) == ("NAN_IN_FORWARD", line_of(text), op)
    assert found.evidence["entries"] == 1
    assert torch.equal(drawn, trained(prepare, before=before, watched=False)[1])


def test_its_inputs_are_told() -> None:
    found = trained(of_a_log)[0][0]
    assert found.evidence["least"] < 0
    assert "look first why its input goes down to -" in found.fix
    assert "a divisor between 0 and" in trained(of_a_share)[0][0].message


def test_nan_that_comes_with_the_data_is_of_no_operation() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[float("nan")] if one[0] < 0 else [1.0] for one in x.tolist()]).log()

    found = trained(broken)[0][0]
    assert (found.name, found.evidence["where"]) == ("NAN_IN_FORWARD", "input")


def test_nan_that_is_taken_out_again_is_not_the_cause_of_another_one() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        spare = x.sum(1, keepdim=True).log().nan_to_num()
        return spare * 0 + x.sum(1, keepdim=True).sqrt()  # the one that reaches

    assert trained(broken)[0][0].place.line == line_of("the one that reaches")


def test_nan_that_is_taken_out_again_is_not_looked_at() -> None:
    findings, _ = trained(lambda x: x.sum(1, keepdim=True).log().nan_to_num())
    assert not [one for one in findings if one.name == "NAN_IN_FORWARD"]
