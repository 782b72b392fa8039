"""A loss that couples only samples which have something in common, such as their class, is stopped as any other.

How it could be silently wrong: a cut whose parts are as little alike as possible has every class on one side, so that
what is shared within a class is the same whole and in parts.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch.checking.cuts import _of_leaf
from diagonals import diagonals
from planning_referee import peak_of


class Centred(nn.Module):
    """A classifier that keeps the centre of each class."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.register_buffer("centres", torch.zeros(9, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out


def outputs(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    return model(x), y


def pulled_together(model: Any, batch: Any) -> torch.Tensor:
    z, y = outputs(model, batch)
    same = (y[:, None] == y[None]).float().fill_diagonal_(0)
    return ((z[:, None] - z[None]).square().sum(2) * same).sum() / len(z) + F.cross_entropy(z, y % 3)


def moving_centres(model: Any, batch: Any) -> torch.Tensor:
    z, y = outputs(model, batch)
    with torch.no_grad():
        for one in y.unique():
            model.centres[one] = 0.5 * model.centres[one] + 0.5 * z[y == one].mean(0)
    spread: torch.Tensor = (z - model.centres[y]).square().sum(1).mean()
    return spread + F.cross_entropy(z, y % 3)


def deviation_from_the_mean_of_a_user(model: Any, batch: Any) -> torch.Tensor:
    z, user = outputs(model, batch)
    number = torch.zeros(9).index_add(0, user, torch.ones(len(user))).clamp(min=1)
    return (z[:, 0] - (torch.zeros(9).index_add(0, user, z[:, 0]) / number)[user]).square().mean()


def as_a_mapping(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    return {"x": x, "y": y}, {}


def as_raw_samples(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    return list(zip(x, y.tolist(), strict=True)), {"collate": torch.utils.data.default_collate}


def with_other_labels(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    tokens = torch.arange(len(x) * 7).reshape(-1, 7) % 11
    return {"x": x, "tokens": tokens, "y": y, "day": torch.arange(len(x)) // 2}, {}


@pytest.mark.parametrize(
    ("loss_fn", "laid_out", "classes", "size"),
    diagonals(
        [pulled_together, moving_centres, deviation_from_the_mean_of_a_user],
        [as_a_mapping, as_raw_samples, with_other_labels], [3, 9], [1, 3, 4, 6, 16], each=4,
    ),
)  # fmt: skip
def test_what_samples_of_one_class_share_is_seen(
    loss_fn: Callable[[Any, Any], torch.Tensor], laid_out: Callable[..., Any], classes: int, size: int
) -> None:
    """Its parts hold samples of the same class."""
    for seed in range(2):
        torch.manual_seed(seed)
        model = Centred()
        batch, options = laid_out(torch.randn(64, 6), torch.randint(classes, (64,)))
        step = anybatch.TrainStep(
            model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=size, **options
        )
        with pytest.raises(anybatch.NotSplittable):
            step(batch)


def test_it_is_seen_with_many_classes() -> None:
    """Of 300 samples in 200 classes few have one of the same class."""
    for seed in range(5):
        torch.manual_seed(seed)
        model, labels = nn.Linear(6, 3), torch.randint(200, (300,))
        batch = {"x": torch.randn(300, 6), "y": labels}
        step = anybatch.TrainStep(
            model, pulled_together, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=32
        )
        with pytest.raises(anybatch.NotSplittable):
            step(batch)


@pytest.mark.usefixtures("constant_times")
def test_it_is_seen_within_a_budget() -> None:
    """A plan has room for one micro-batch, in which both are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 3))
    batch = {"x": torch.randn(256, 6), "y": torch.randint(3, (256,))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = anybatch.plan(model, pulled_together, batch, optimizer, memory="4GiB")
    step = anybatch.TrainStep(model, pulled_together, optimizer, memory=whole.whole_bytes // 2)
    with pytest.raises(anybatch.NotSplittable):
        step(batch)


def of_the_upper_half(model: Any, batch: Any) -> torch.Tensor:
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return each.topk(len(each) // 2).values.mean()


def of_weighted_classes(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], weight=torch.tensor([1.0, 2.0, 3.0, 0.5]))


@pytest.mark.parametrize("loss_fn", [of_the_upper_half, of_weighted_classes])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_few_equal_cuts_between_pairs_are_no_proof_that_pairs_belong_together(
    loss_fn: Callable[[Any, Any], torch.Tensor], size: int
) -> None:
    """What happens to be the same in some pairs and groups of four is not in all of them."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
        batch = {"x": torch.randn(48, 6), "y": torch.randint(4, (48,))}
        with pytest.raises(anybatch.NotSplittable):
            anybatch.backward(model, loss_fn, batch, micro_batch_size=size)


def normalised_in_halves(model: Any, batch: Any) -> torch.Tensor:
    """Normalised over each half of the samples, as groups along the batch are."""
    z = model(batch["x"])
    halves = z.reshape(2 if len(z) % 2 == 0 else 1, -1)
    halves = (halves - halves.mean(1, keepdim=True)) / (halves.std(1, keepdim=True) + 0.1)
    return F.cross_entropy(halves.reshape_as(z), batch["y"])


def pooled_by_the_longest(model: Any, batch: Any) -> torch.Tensor:
    longest = int(batch["length"].max())
    return F.cross_entropy(model(batch["x"])[:, :longest].sum(1) / longest, batch["y"])


@pytest.mark.parametrize("size", [12, 24])
def test_groups_that_agree_are_no_proof_if_the_micro_batches_themselves_do_not(size: int) -> None:
    """Three samples whole in a part, and six in two halves of three, are the same; 12 and 48 are not."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
        batch = {"x": torch.randn(48, 6), "y": torch.randint(4, (48,))}
        with pytest.raises(anybatch.NotSplittable):
            anybatch.backward(model, normalised_in_halves, batch, micro_batch_size=size)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_the_longest_of_two_parts_are_not_as_long(size: int) -> None:
    """What depends on the longest sample shows where the parts have others."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Linear(6, 4)
        batch = {"x": torch.randn(48, 12, 6), "length": torch.randint(2, 13, (48,)), "y": torch.randint(4, (48,))}
        with pytest.raises(anybatch.NotSplittable):
            anybatch.backward(model, pooled_by_the_longest, batch, micro_batch_size=size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_samples_are_told_apart_in_little_room(dtype: torch.dtype) -> None:
    leaf = torch.randn(1024, 256).mul_(9).to(dtype)
    assert peak_of(lambda: _of_leaf(leaf, 1024), [leaf]) <= 1.25 * leaf.nbytes
