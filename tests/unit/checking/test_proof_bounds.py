"""Bounds of what samples give together: the same gradient in micro-batches until one of them crosses the bound."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

Batch = dict[str, torch.Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))


def batch_of() -> Batch:
    made = torch.Generator().manual_seed(1)
    return {"x": torch.randn(24, 6, generator=made), "y": torch.randint(4, (24,), generator=made)}


def cross_entropy(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def flooding(model: Any, batch: Batch) -> torch.Tensor:
    return (cross_entropy(model, batch) - 0.1).abs() + 0.1


def free_bits(model: Any, batch: Batch) -> torch.Tensor:
    squares: torch.Tensor = model(batch["x"]).pow(2)
    return squares.mean(0).clamp(min=1e-3).sum()


def margin(model: Any, batch: Batch) -> torch.Tensor:
    out = model(batch["x"])
    return F.relu(5 + out[:, 0].mean() - out[:, 1].mean())


def winner(model: Any, batch: Batch) -> torch.Tensor:
    loss = cross_entropy(model, batch)
    return torch.stack([loss, loss + 5]).min()


def branch(model: Any, batch: Batch) -> torch.Tensor:
    out = model(batch["x"])
    size: torch.Tensor = out.pow(2).mean()
    return F.cross_entropy(out, batch["y"]) + (2.0 if size > 0.02 else 0.0) * size


def branch_on_a_number(model: Any, batch: Batch) -> torch.Tensor:
    loss = cross_entropy(model, batch)
    return 2 * loss if loss.item() > 2.5 else loss


def branch_below(model: Any, batch: Batch) -> torch.Tensor:
    loss = cross_entropy(model, batch)
    return 0.5 * loss if float(loss.detach()) < 0.5 else loss


def branch_on_any(model: Any, batch: Batch) -> torch.Tensor:
    loss = cross_entropy(model, batch)
    return 0.5 * loss if (batch["x"] > 9).any() else loss


def branch_on_a_count(model: Any, batch: Batch) -> torch.Tensor:
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    rare = batch["y"] == 7
    return losses.mean() + (losses[rare].mean() if rare.sum() > 0 else 0.0)


def bounded_weight(model: Any, batch: Batch) -> torch.Tensor:
    loss = cross_entropy(model, batch)
    return loss * loss.detach().clamp(min=2.5)


def easier_than_the_mean(model: Any, batch: Batch) -> torch.Tensor:
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (losses * (losses.detach() < 1.5 * losses.detach().mean())).mean()


@pytest.mark.parametrize(
    ("loss_fn", "operation"),
    [
        (branch_on_a_number, "a condition"),
        (branch_below, "a condition"),
        (branch_on_any, "a condition"),
        (branch_on_a_count, "a condition"),
        (bounded_weight, "clamp"),
        (easier_than_the_mean, "a comparison (lt)"),
    ],
)
def test_a_branch_on_a_number_of_the_samples_is_named_with_its_line(loss_fn: Any, operation: str) -> None:
    (text,), out = told(loss_fn)
    assert f"applies {operation} (test_proof_bounds.py, line " in text
    assert out.proof is not None
    assert out.proof.exact
    certificate = anybatch.check(net(), loss_fn, batch_of())
    assert certificate.exact
    assert [note.code for note in certificate.notes].count("bound") == 1


def told(loss_fn: Callable[[Any, Batch], Any]) -> tuple[list[str], anybatch.StepResult]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = anybatch.backward(net(), loss_fn, batch_of(), micro_batch_size=8)
    return [str(one.message) for one in caught if issubclass(one.category, anybatch.AnyBatchWarning)], out


@pytest.mark.parametrize(
    ("loss_fn", "operation"),
    [
        (flooding, "abs"),
        (free_bits, "clamp"),
        (margin, "relu"),
        (winner, "min"),
        (branch, "a comparison (gt)"),
    ],
)
def test_a_bound_of_a_mean_that_is_not_reached_yet_is_named(loss_fn: Any, operation: str) -> None:
    (text,), out = told(loss_fn)
    assert f"applies {operation} to what the samples give together" in text
    assert "Coupled" in text
    assert out.proof is not None
    assert out.proof.exact
    assert operation in out.proof.note
    certificate = anybatch.check(net(), loss_fn, batch_of())
    assert certificate.exact
    assert [note.code for note in certificate.notes].count("bound") == 1


def test_what_the_warning_says_is_so() -> None:
    """The same loss once the mean has come down to the bound."""

    def flooded(model: Any, batch: Batch) -> torch.Tensor:
        loss = cross_entropy(model, batch)
        return (loss - 1.4).abs() + 1.4

    with pytest.raises(anybatch.NotSplittable):
        anybatch.backward(net().eval(), flooded, batch_of(), micro_batch_size=8)


def test_the_coupled_loss_that_helps_has_no_bound_of_a_part() -> None:
    coupled = anybatch.Coupled(
        lambda model, batch: model(batch["x"]),
        lambda model, out, batch: (F.cross_entropy(out, batch["y"]) - 0.1).abs() + 0.1,
    )
    assert not told(coupled)[0]


def of_parameters(model: Any, batch: Batch) -> Any:
    return cross_entropy(model, batch) + F.relu(model[0].weight.norm() - 0.1) + model[3].bias.abs().sum()


def of_each_sample(model: Any, batch: Batch) -> torch.Tensor:
    return torch.stack([F.relu(model(row)[0] + 3) for row in batch["x"]]).mean()


def bounded_items(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none").clamp(max=1.4).mean()


def bounded_count(model: Any, batch: Batch) -> torch.Tensor:
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return losses.sum() / torch.ones(len(losses)).sum().clamp(min=1)


def at_drawn_points(model: Any, batch: Batch) -> Any:
    return cross_entropy(model, batch) + model(torch.rand(5, 6)).abs().mean()


def beside_the_loss(model: Any, batch: Batch) -> torch.Tensor:
    loss = cross_entropy(model, batch)
    with torch.no_grad():
        loss.exp().clamp(max=1e4)
    float(loss.detach().abs())
    return loss


def guarded(model: Any, batch: Batch) -> torch.Tensor:
    """No training comes near to what is refused here."""
    loss = cross_entropy(model, batch)
    if not torch.isfinite(loss) or loss.isnan() or loss > 1e6:
        raise ArithmeticError
    assert loss >= 0
    return loss


def logged(model: Any, batch: Batch) -> torch.Tensor:
    """The best of the losses so far, a rate, and how far they are spread."""
    out = model(batch["x"])
    loss = F.cross_entropy(out, batch["y"])
    seen: dict[str, float] = {"best": 9.0}
    if loss.item() < seen["best"]:
        seen["best"] = loss.item()
    seen["rate"] = float((out.argmax(1) == batch["y"]).float().mean())
    seen["spread"] = out.detach().std().item()
    return loss


def refused_numbers(model: Any, batch: Batch) -> torch.Tensor:
    loss = cross_entropy(model, batch)
    assert 0 <= loss.item() < 4
    if not batch["x"].isfinite().all() or torch.isnan(loss).any() or (batch["y"] < 0).any():
        raise ValueError
    return loss if torch.isfinite(loss.detach()) else 0.5 * loss


def nothing_of_what_is_amiss(model: Any, batch: Batch) -> torch.Tensor:
    loss = cross_entropy(model, batch)
    return 0 * loss if loss.item() > 4 or (batch["x"] > 9).any() else loss


def of_some_rows(model: Any, batch: Batch) -> Any:
    """Work that is left out where no row needs it; and a shorter way where all rows are whole."""
    losses, some = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none"), batch["y"] > 7
    more = torch.zeros_like(losses)
    if some.any():
        more[some] = model(2 * batch["x"][some]).square().sum(1)
    kept = batch["x"].abs() < 99
    rows = batch["x"] if kept.all() else batch["x"] * kept
    return (losses + more + model(rows)[:, 0]).mean()


def no_more_than_there_is(model: Any, batch: Batch) -> torch.Tensor:
    most = batch["x"].max().item()
    return cross_entropy(model, {**batch, "x": batch["x"].clamp(max=most)})


def of_the_weights(model: Any, batch: Batch) -> torch.Tensor:
    loss = cross_entropy(model, batch)
    return 0.5 * loss if model[0].weight.norm().item() > 3 else loss


def at_random(model: Any, batch: Batch) -> torch.Tensor:
    loss = cross_entropy(model, batch)
    return 0.5 * loss if torch.rand(1).item() < 0.1 or bool(torch.rand(1) > 0.9) else loss


def counted_by_hand(model: Any, batch: Batch) -> Any:
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    own = (batch["y"] > 1).float()
    return anybatch.Mean((losses * own).sum(), max(own.sum().item(), 1e-6))


def several(model: Any, batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    yield "one", cross_entropy(model, batch)
    yield "other", model(batch["x"]).abs().mean()


@pytest.mark.parametrize(
    "loss_fn",
    [
        cross_entropy,
        of_parameters,
        of_each_sample,
        bounded_items,
        bounded_count,
        at_drawn_points,
        beside_the_loss,
        guarded,
        logged,
        refused_numbers,
        nothing_of_what_is_amiss,
        of_some_rows,
        no_more_than_there_is,
        of_the_weights,
        at_random,
        counted_by_hand,
        several,
    ],
)  # fmt: skip
def test_bounds_of_samples_of_parameters_and_of_constants_are_none(loss_fn: Any) -> None:
    texts, out = told(loss_fn)
    assert not texts
    assert out.proof is not None
    assert out.proof.exact


class Remembering(nn.Module):
    """Keeps its state for the next call with as many samples."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(6, 5), nn.Linear(5, 4)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.state if self.state is not None and len(self.state) == len(x) else None
        after = self.cell(x, before)
        self.state = after.detach()
        found: torch.Tensor = self.out(after)
        return found


def test_a_state_that_goes_on_in_micro_batches_of_one_size_only_is_stopped() -> None:
    torch.manual_seed(0)
    with pytest.raises(anybatch.NotSplittable, match="changed by one micro-batch and read by the next"):
        anybatch.backward(Remembering(), cross_entropy, batch_of(), micro_batch_size=8)
