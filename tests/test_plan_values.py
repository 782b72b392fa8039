"""Plans where the memory of a sample depends on the numbers in it: the heaviest are probed, and heavier ones later."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import anybatch
from anybatch.planning.heaviest import Measured, gathered, is_gatherable
from anybatch.tensors.batches import Splittable

LONGEST, SAMPLES = 40, 120


class Packed(nn.Module):
    """Packs padded sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found: Tensor = self.out(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0].sum(1))
        return found


class Unpadded(nn.Module):
    """Takes the padding out."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 32))
        self.out = nn.Linear(32, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        places = torch.arange(len(x)).repeat_interleave(lengths)
        found: Tensor = self.out(torch.zeros(len(x), 32).index_add(0, places, self.inside(x[mask])))
        return found


class Trimmed(Unpadded):
    """Cuts all to the longest."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        found: Tensor = self.out(self.inside(x[:, : int(lengths.max())]).sum(1))
        return found


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["lengths"]), batch["y"])


def batch_of(order: str, longest: int = LONGEST) -> dict[str, Tensor]:
    lengths = torch.randint(1, longest + 1, (SAMPLES,))
    lengths[0] = longest
    if order == "ascending":
        lengths = lengths.sort().values
    if order == "one in ten":
        lengths = torch.where(torch.arange(SAMPLES) % 10 == 9, longest, 3)
    return {"x": torch.randn(SAMPLES, LONGEST, 8), "lengths": lengths, "y": torch.randint(4, (SAMPLES,))}


def peak_of(run: Callable[[], Any], model: nn.Module, optimizer: Any, batch: Any) -> int:
    return anybatch.measure(run, model=model, optimizer=optimizer, batch=batch).peak_bytes


@pytest.mark.parametrize("order", ["random", "ascending", "one in ten"])
@pytest.mark.parametrize("kind", [Packed, Unpadded, Trimmed])
def test_no_budget_is_exceeded(kind: Callable[[], nn.Module], order: str) -> None:
    torch.manual_seed(0)
    model, batch = kind(), batch_of(order)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def plain() -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()

    budget = int(0.4 * peak_of(plain, model, optimizer, batch))
    # What is trimmed is trimmed to the longest sample of a micro-batch, which is another model for each.
    step = anybatch.TrainStep(model, loss_fn, optimizer, memory=budget, verify="off" if kind is Trimmed else "first")
    assert max(peak_of(lambda: step(batch), model, optimizer, batch) for _ in range(2)) <= budget


def test_a_batch_with_heavier_samples_of_the_same_shape_is_planned_for_again() -> None:
    torch.manual_seed(0)
    model, light, heavy = Unpadded(), batch_of("random", 4), batch_of("random")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = peak_of(lambda: loss_fn(model, heavy).backward(), model, optimizer, heavy)
    budget = whole // 2
    step = anybatch.TrainStep(model, loss_fn, optimizer, memory=budget)
    few = step(light).micro_batches
    assert peak_of(lambda: step(heavy), model, optimizer, heavy) <= budget
    assert step(heavy).micro_batches > few
    assert peak_of(lambda: step(heavy), model, optimizer, heavy) <= budget


def test_steps_that_depend_on_no_numbers_run_the_first_samples() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(8, 16, batch_first=True)
    plan = anybatch.plan(
        model, lambda model, batch: model(batch["x"])[0].square().mean(), batch_of("random"),
        torch.optim.SGD(model.parameters(), lr=0.1), memory="1GiB",
    )  # fmt: skip
    assert not any("the largest" in label for label in plan.shapes)


def test_what_tells_samples_apart() -> None:
    batch: dict[str, Any] = {
        "mask": torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0]], dtype=torch.bool),
        "ids": torch.tensor([[5, 0], [7, 8], [9, 0]]),
        "padded": torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.0, 0.0]]),
        "texts": ["a", "b", "c"],
        "same": torch.ones(3, 2, dtype=torch.long),
    }
    splittable = Splittable([batch])
    measured = Measured(splittable)
    count = "the number of entries that are not zero in a sample of batch['{}']"
    assert measured.order(count.format("mask")) == [1, 2, 0]
    assert measured.order(count.format("padded")) == [0, 1, 2]
    assert measured.order("the sum in a sample of batch['ids']") == [1, 2, 0]
    assert measured.order("the sum in a sample of batch['ids'], negated") == [0, 2, 1]
    assert measured.most("the largest number in a sample of batch['ids']") == 9
    assert measured.order("the sum in a sample of batch['gone']") == []
    assert not any("same" in name or "texts" in name for name in measured.names())
    assert is_gatherable(splittable)
    few = gathered(splittable, [2, 0])
    assert few["texts"] == ["c", "a"]
    assert torch.equal(few["ids"], batch["ids"][[2, 0]])
