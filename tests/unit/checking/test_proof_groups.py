"""Samples that belong together: by their places, which each batch has, or by a value, which is another in each.

How this could be silently wrong: any coupling of the samples passes for one of groups where the first batch happens to
be aligned, and the next batch is not.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

Batch = dict[str, torch.Tensor]
Loss = Callable[[Any, Batch], Any]
ROWS = 48


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def batch_of(y: torch.Tensor, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(len(y), 6, generator=generator, dtype=torch.float64), "y": y}


def any_classes(seed: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randint(4, (rows,), generator=torch.Generator().manual_seed(seed))


def triplets(model: Any, batch: Batch) -> torch.Tensor:
    anchor, positive, negative = model(batch["x"]).unflatten(0, (-1, 3)).unbind(1)
    return F.triplet_margin_loss(anchor, positive, negative)


def first_of_four(model: Any, batch: Batch) -> torch.Tensor:
    scores = model(batch["x"])[:, 0].view(-1, 4)
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


def in_groups_of_four(model: Any, batch: Batch) -> torch.Tensor:
    reward = batch["x"][:, 0].view(-1, 4)
    advantage = (reward - reward.mean(1, keepdim=True)) / reward.std(1, keepdim=True)
    return -(model(batch["x"])[:, 0] * advantage.flatten()).mean()  # type: ignore[no-any-return]


def to_class_means(model: Any, batch: Batch) -> torch.Tensor:
    z = model(batch["x"])
    _, own = batch["y"].unique(return_inverse=True)
    means = torch.stack([z[own == one].mean(0) for one in range(int(own.max()) + 1)])
    return (z - means[own]).square().sum(1).mean()  # type: ignore[no-any-return]


def listwise(model: Any, batch: Batch) -> torch.Tensor:
    scores, queries = model(batch["x"])[:, 0], batch["y"].unique()
    chosen = [-scores[batch["y"] == one].log_softmax(0)[0] for one in queries]
    return torch.stack(chosen).sum() / len(queries)


def balanced(model: Any, batch: Batch) -> torch.Tensor:
    y = (batch["y"] % 2).double()
    return F.binary_cross_entropy_with_logits(model(batch["x"])[:, 0], y, pos_weight=(1 - y).sum() / y.sum())


def inverse_frequency(model: Any, batch: Batch) -> torch.Tensor:
    counts = torch.bincount(batch["y"], minlength=4).double()
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (losses / counts[batch["y"]]).sum() / (counts > 0).sum()


def counted_as_one(model: Any, batch: Batch) -> Any:
    return anybatch.Mean(F.cross_entropy(model(batch["x"]), batch["y"]), 1)


def per_positive(model: Any, batch: Batch) -> Any:
    positives = (batch["y"] > 0).sum()
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return anybatch.Mean(losses.sum(), positives.clamp(min=1))


def over_positives(model: Any, batch: Batch) -> torch.Tensor:
    """Counts positives, of which a part of few samples may have none, and then divides by something else."""
    positives = (batch["y"] > 0).sum()
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum") / positives.clamp(min=1)


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def stepped(loss_fn: Loss, batches: list[Batch], size: int) -> list[anybatch.StepResult]:
    """Steps with a learning rate of nothing, each of which has the gradient of the whole batch."""
    model, whole = net(), net()
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=size)
    results = []
    for batch in batches:
        results.append(step(batch))
        whole.zero_grad()
        loss = loss_fn(whole, batch)
        (loss.total / loss.count if isinstance(loss, anybatch.Mean) else loss).backward()
        torch.testing.assert_close(gradients(model), gradients(whole), rtol=1e-10, atol=1e-12)
    return results


@pytest.mark.parametrize(
    ("loss_fn", "group", "sizes"),
    [(triplets, 3, (3, 6)), (first_of_four, 4, (4, 8)), (in_groups_of_four, 4, (4, 16))],
)
def test_groups_by_their_places_are_proved_once(loss_fn: Loss, group: int, sizes: tuple[int, ...]) -> None:
    for size in sizes:
        first, second = stepped(loss_fn, [batch_of(any_classes(one), one) for one in (0, 1)], size)
        assert first.proof is not None
        assert (first.proof.exact, first.proof.group, first.proof.is_of_batch) == (True, group, False)
        assert second.proof is first.proof


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("loss_fn", [to_class_means, listwise])
def test_groups_by_a_value_are_proved_in_each_batch(loss_fn: Loss, size: int) -> None:
    """A micro-batch may be as large as a group."""
    first, second = stepped(loss_fn, [batch_of(torch.arange(ROWS) // 4, one) for one in (0, 1)], size)
    assert first.proof is not None
    assert second.proof is not None
    assert first.proof.is_of_batch
    assert second.proof is not first.proof
    assert (second.proof.exact, second.proof.group) == (True, 4)


def test_groups_that_a_later_batch_has_apart_are_stopped_there() -> None:
    generator = torch.Generator().manual_seed(0)
    apart = (torch.arange(ROWS) // 4)[torch.randperm(ROWS, generator=generator)]
    with pytest.raises(anybatch.NotSplittable):
        stepped(to_class_means, [batch_of(torch.arange(ROWS) // 4), batch_of(apart, 1)], 8)


def test_groups_of_other_sizes_in_a_later_batch_are_stopped_there() -> None:
    unlike = torch.arange(12).repeat_interleave(torch.tensor([3, 5, 2, 6, 4, 4, 1, 7, 3, 5, 6, 2]))
    with pytest.raises(anybatch.NotSplittable):
        stepped(listwise, [batch_of(torch.arange(ROWS) // 4), batch_of(unlike, 1)], 4)
    aligned = stepped(listwise, [batch_of(torch.arange(ROWS) // 4), batch_of(unlike, 1)], 8)
    assert [result.proof and result.proof.group for result in aligned] == [4, 8]


def test_groups_that_micro_batches_of_a_later_batch_cut_are_proved_again() -> None:
    """A last batch of another size gives micro-batches that end within a group."""
    with pytest.raises((anybatch.NotSplittable, RuntimeError)):
        stepped(triplets, [batch_of(any_classes(0)), batch_of(any_classes(1, 47), 1)], 6)


@pytest.mark.parametrize("loss_fn", [balanced, inverse_frequency, counted_as_one])
def test_a_batch_that_is_balanced_by_chance_is_not_of_groups(loss_fn: Loss) -> None:
    with pytest.raises(anybatch.NotSplittable):
        stepped(loss_fn, [batch_of(torch.arange(ROWS) % 4)], 8)


def test_a_normaliser_with_a_least_value_is_not_of_groups() -> None:
    """Groups of four of the first batch have a positive each; eight samples of the next one have none."""
    first, second = any_classes(1), any_classes(2)
    second[16:24] = 0
    with pytest.raises(anybatch.NotSplittable):
        stepped(per_positive, [batch_of(first), batch_of(second, 1)], 8)


def test_what_makes_no_difference_within_a_group_is_no_group() -> None:
    """Each micro-batch of eight has a positive, and so has each group of eight that can be made of this batch."""
    batch = batch_of(any_classes(3).clamp(max=1))
    batch["y"][batch["y"].argsort(stable=True)[:6]] = 1
    assert 0 < int((batch["y"] == 0).sum()) < 8
    with pytest.raises(anybatch.NotSplittable):
        anybatch.backward(net(), over_positives, batch, micro_batch_size=8, count=lambda batch: (batch["y"] > 0).sum())
