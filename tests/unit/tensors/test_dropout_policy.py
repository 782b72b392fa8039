"""dropout="per-sample": the same masks at every micro-batch size, through all front doors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch.errors import BatchError, NotSplittable

ROWS = 22
SIZES = [None, 1, 5, 7, 11, 21]


class Net(nn.Module):
    """Dropout by itself, behind a checkpoint, and on a parameter."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.drop, self.inner, self.of_weight = nn.Dropout(0.3), nn.Dropout(0.2), nn.Dropout(0.1)
        self.reentrant = reentrant

    def block(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(torch.tanh(self.second(x)))
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.tanh(self.first(x)))
        if self.reentrant is None:
            x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return F.linear(x, self.of_weight(self.last.weight), self.last.bias)


def square(model: Any, batch: Any) -> torch.Tensor:
    return model(batch["x"]).pow(2).mean()  # type: ignore[no-any-return]


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, 8, dtype=torch.float64)}


def at_size(model: nn.Module, loss_fn: Any, batch: Any, size: int | None, **options: Any) -> torch.Tensor:
    options.setdefault("dropout", "per-sample")
    return gradient(model, lambda: anybatch.backward(model, loss_fn, batch, micro_batch_size=size, **options))


def gradient(model: nn.Module, run: Callable[[], Any]) -> torch.Tensor:
    model.zero_grad()
    torch.manual_seed(5)
    run()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_backward_gives_the_same_gradient_at_every_size(batch: Any, reentrant: bool | None) -> None:
    model = Net(reentrant=reentrant).double()
    found = [at_size(model, square, batch, size) for size in SIZES]
    assert max(off(one, found[0]) for one in found[1:]) < 1e-10
    native = [at_size(model, square, batch, size, dropout="native") for size in SIZES]
    assert off(native[1], native[0]) > 1e-3  # the test sees masks that do depend on the split


def test_each_batch_draws_other_masks(batch: Any) -> None:
    model = Net().double()
    torch.manual_seed(0)
    found = []
    for _ in range(2):
        model.zero_grad()
        anybatch.backward(model, square, batch, dropout="per-sample")
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert off(found[0], found[1]) > 1e-3


def test_a_step_trains_the_same_at_every_size(batch: Any) -> None:
    weights = []
    for size in (None, 5, 11):
        torch.manual_seed(1)
        model = Net().double()
        step = anybatch.TrainStep(
            model, square, torch.optim.Adam(model.parameters(), lr=0.01), micro_batch_size=size, dropout="per-sample",
            clip_norm=1.0,
        )  # fmt: skip
        for _ in range(3):
            step(batch)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert off(weights[1], weights[0]) < 1e-10
    assert off(weights[2], weights[0]) < 1e-10


def test_samples_that_are_packed_by_cost_keep_their_masks() -> None:
    model = Net().double()
    samples = [{"x": torch.randn(8, dtype=torch.float64), "cost": 1 + i % 4} for i in range(ROWS)]
    options: dict[str, Any] = {
        "collate": lambda some: {"x": torch.stack([sample["x"] for sample in some])},
        "cost": lambda sample: sample["cost"],
        "dropout": "per-sample",
    }
    found = [
        at_size(model, square, samples, size, **options)
        for size in (None, 9, 20)
    ]  # fmt: skip
    assert max(off(one, found[0]) for one in found[1:]) < 1e-10


def test_a_window_is_one_logical_batch(batch: Any) -> None:
    model = Net().double()
    parts = [{"x": part} for part in batch["x"].split(8)]
    (window,) = anybatch.windows(parts, batches=3)
    whole = gradient(model, lambda: anybatch.backward(model, square, batch, dropout="per-sample"))
    split = gradient(
        model, lambda: anybatch.backward(model, square, window, micro_batch_size=3, dropout="per-sample")
    )  # fmt: skip
    assert off(split, whole) < 1e-10


def test_an_attempt_that_ran_out_of_memory_draws_the_same_masks(batch: Any) -> None:
    model = Net().double()
    failed: list[int] = []

    def failing(model: Any, batch: Any) -> torch.Tensor:
        if not failed and len(batch["x"]) > 6:
            failed.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return square(model, batch)

    whole = gradient(model, lambda: anybatch.backward(model, square, batch, dropout="per-sample"))
    again = gradient(model, lambda: anybatch.backward(model, failing, batch, dropout="per-sample"))
    assert failed
    assert off(again, whole) < 1e-10


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_a_coupled_loss_draws_by_sample_in_both_passes(batch: Any, keep: int) -> None:
    model = Net().double()
    model.outer = nn.Dropout(0.4)

    def loss(model: Any, outputs: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model.outer(outputs).pow(2).mean() + outputs.std()
        return y

    coupled = anybatch.Coupled(lambda model, batch: model(batch["x"]), loss, keep=keep)
    found = [at_size(model, coupled, batch, size) for size in SIZES]
    assert max(off(one, found[0]) for one in found[1:]) < 1e-10


def test_sequences_draw_by_sample_in_both_passes() -> None:
    rnn = nn.ModuleDict(
        {"cell": nn.GRU(3, 8, batch_first=True), "out": nn.Linear(8, 2), "into": nn.Dropout(0.3), "of": nn.Dropout(0.3)}
    ).double()
    batch = {"x": torch.randn(6, 30, 3, dtype=torch.float64), "y": torch.randint(0, 2, (6, 30))}

    def chunk_loss(model: Any, chunk: Any, state: Any) -> Any:
        output, state = model["cell"](model["into"](chunk["x"]), state)
        return F.cross_entropy(model["out"](model["of"](output)).flatten(0, 1), chunk["y"].flatten()), state

    over_time = anybatch.OverTime(
        chunk_loss, lambda model, batch: torch.zeros(1, len(batch["x"]), 8, dtype=torch.float64), chunk=7
    )
    found = [
        at_size(rnn, over_time, batch, size)
        for size in (None, 1, 4)
    ]  # fmt: skip
    assert max(off(one, found[0]) for one in found[1:]) < 1e-10


def test_the_certificate_is_exact_without_a_note(batch: Any) -> None:
    model = Net().double()
    certificate = anybatch.check(model, square, batch, micro_batch_size=5, dropout="per-sample")
    assert certificate.exact
    assert certificate.error < 1e-12
    assert "random" not in {note.code for note in certificate.notes}
    assert "random" in {note.code for note in anybatch.check(model, square, batch, micro_batch_size=5).notes}


def test_hidden_dropout_is_refused_and_nothing_is_changed(batch: Any) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True).double()
    data = batch["x"].view(11, 2, 8)
    before = torch.get_rng_state()
    with pytest.raises(NotSplittable, match="dropout"):
        anybatch.backward(model, lambda model, batch: model(batch).mean(), data, dropout="per-sample")
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_unknown_policy_is_refused(batch: Any) -> None:
    with pytest.raises(BatchError, match=r"dropout='sample'; expected one of \('native', 'per-sample'\)"):
        anybatch.backward(Net().double(), square, batch, dropout="sample")  # type: ignore[arg-type]
