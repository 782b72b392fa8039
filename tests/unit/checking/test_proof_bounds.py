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
    assert f"applies {operation} to a value reduced over samples" in text
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
