"""Losses that need some samples together: pairs, triplets, and parts that the batch is taken apart into."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
import reference
from anybatch import NotSplittable

Loss = Callable[[Any, Any], Tensor]


def rows_of(batch: Any) -> Tensor:
    found: Tensor = batch if isinstance(batch, Tensor) else batch["x"] if isinstance(batch, dict) else batch[0]
    return found


def triplets(model: Any, batch: Any) -> Tensor:
    anchor, near, far = model(rows_of(batch)).chunk(3)
    return F.triplet_margin_loss(anchor, near, far)


def views(model: Any, batch: Any) -> Tensor:
    one, other = model(rows_of(batch)).chunk(2)
    return 1 - F.cosine_similarity(one, other.detach()).mean()


def pairs(model: Any, batch: Any) -> Tensor:
    out = model(rows_of(batch))
    found: Tensor = (out[0::2] - out[1::2]).square().mean()
    return found


def groups(model: Any, batch: Any) -> Tensor:
    return F.softmax(model(rows_of(batch)).sum(1).view(-1, 3), 1)[:, 0].mean()


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def refused(loss_fn: Loss, batch: Any, size: int) -> str:
    with pytest.raises(NotSplittable) as caught:
        anybatch.backward(model_of(), loss_fn, batch, micro_batch_size=size)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["dict", "tuple", "tensor"])
@pytest.mark.parametrize(("loss_fn", "parts"), [(triplets, 3), (views, 2)])
@pytest.mark.parametrize("size", [2, 4, 5, 6])
def test_a_batch_that_the_loss_takes_apart_is_given_by_its_parts(
    loss_fn: Loss, parts: int, size: int, kind: str
) -> None:
    x = torch.randn(12, 4).double()
    batch: Any = {"x": x} if kind == "dict" else (x, x.sum(1)) if kind == "tuple" else x
    text = refused(loss_fn, batch, size)
    assert f"divides the batch into {parts} parts, as chunk({parts}) does" in text
    lines = [line.strip() for line in text.splitlines()[1:3]]
    before, layout = lines[0].split("  # before step(batch), with layout=")
    within = lines[1].split("  # ")[0]

    def remedied(model: Any, batch: Any) -> Tensor:
        own = {"batch": batch}
        exec(within, {}, own)
        return loss_fn(model, own["batch"])

    model, own = model_of(), {"batch": batch}
    loss_fn(model, batch).backward()
    expected = reference.gradients_of(model)
    reference.clear(model)
    exec(before, {}, own)
    out = anybatch.backward(model, remedied, own["batch"], micro_batch_size=2, layout=eval(layout))
    reference.assert_float64(reference.gradients_of(model), expected)
    assert out.micro_batches > 1
    assert out.proof is not None
    assert out.proof.exact


@pytest.mark.parametrize(("loss_fn", "size", "better"), [(pairs, 3, 2), (groups, 4, 3), (groups, 5, 6), (pairs, 5, 6)])
def test_a_size_that_keeps_groups_is_found(loss_fn: Loss, size: int, better: int) -> None:
    text = refused(loss_fn, {"x": torch.randn(12, 4).double()}, size)
    assert f"\n    micro_batch_size={better}  # " in text
    out = anybatch.backward(model_of(), loss_fn, {"x": torch.randn(12, 4).double()}, micro_batch_size=better)
    assert out.proof is not None
    assert out.proof.exact


@pytest.mark.parametrize("rows", [18, 22])
@pytest.mark.parametrize("size", [3, 8])
def test_a_batch_whose_last_samples_are_no_whole_group_gets_no_size(rows: int, size: int) -> None:
    def without_the_rest(model: Any, batch: Any) -> Tensor:
        out = model(rows_of(batch))
        taken = out[: len(out) // 4 * 4].view(-1, 4, 3).square().mean(-1)
        found: Tensor = taken.min(1).values.sum() / max(len(taken), 1)
        return found

    text = refused(without_the_rest, {"x": torch.randn(rows, 4).double()}, size)
    assert "whole groups of 4" not in text
    assert "whole groups of 8" not in text
    assert "whole groups of 12" not in text


@pytest.mark.parametrize("more", [{"margin": 5.0}, {"ids": [*range(12)]}])
def test_lines_for_parts_are_those_of_tensors_with_their_rows_first(more: dict[str, Any]) -> None:
    text = refused(triplets, {"x": torch.randn(12, 4).double(), **more}, 4)
    assert "into 3 parts" in text
    assert "unflatten" not in text


def test_a_size_at_which_it_makes_no_difference_by_chance_is_none() -> None:
    def contrastive(model: Any, batch: Any) -> Tensor:
        out = F.normalize(model(batch["x"]), dim=1)
        return F.cross_entropy(out @ out.T, torch.arange(len(out)))

    assert "micro_batch_size=" not in refused(contrastive, {"x": torch.randn(24, 4).double()}, 5).split("Instead:")[1]


def test_a_selection_that_is_the_same_by_chance_is_none() -> None:
    def worst(model: Any, batch: Any) -> Tensor:
        errors = (model(batch["x"])[:, 0] - batch["y"]).square()
        found: Tensor = errors[errors >= errors.quantile(0.8).detach()].mean()
        return found

    for seed in range(6):
        torch.manual_seed(seed)
        text = refused(worst, {"x": torch.randn(20, 4).double(), "y": torch.randn(20).double()}, 4)
        assert "chunk(" not in text
        assert "micro_batch_size=" not in text.split("Instead:")[1]


def test_what_no_few_samples_show_is_no_group() -> None:
    def without_outliers(model: Any, batch: Any) -> Tensor:
        errors = (model(batch["x"])[:, 0] - batch["y"]).square()
        kept = errors < errors.mean() + 2 * errors.std()  # all of six, whatever they are
        found: Tensor = (errors * kept.detach()).mean()
        return found

    torch.manual_seed(0)
    batch = {"x": torch.randn(14, 4).double(), "y": torch.randn(14).double()}
    batch["y"][0] = 9
    text = refused(without_outliers, batch, 4)
    assert "chunk(" not in text
    assert "micro_batch_size=" not in text.split("Instead:")[1]


def test_a_size_that_fails_is_refused_where_others_run() -> None:
    def five_parts(model: Any, batch: Any) -> Tensor:
        parts = model(batch["x"]).split(4)
        return torch.stack([one.mean(0) for one in parts if len(one) == 4]).var(0, unbiased=False).log().mean()

    text = refused(five_parts, {"x": torch.randn(20, 4).double()}, 3)
    assert "A micro-batch of 3 samples fails with RuntimeError" in text
    assert "gives a different gradient than the whole batch" in text


def test_check_does_not_take_whole_groups_for_a_fixed_batch_size() -> None:
    certificate = anybatch.check(model_of(), groups, {"x": torch.randn(12, 4).double()}, micro_batch_size=4)
    assert "x.view(x.size(0), -1)" not in str(certificate)
