"""What the first batch does not have, such as ignored labels, is proved in the first batch that has it.

How this could alarm without need: batches that a count suits are refused, or each batch is proved anew.
"""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import anybatch
from anybatch.batch.trees import flat
from anybatch.checking import elsewhere, replaying
from anybatch.checking import proof as proving
from anybatch.checking.elsewhere import Unseen

Batch = dict[str, torch.Tensor]
ROWS = 48
HALVES = (slice(0, ROWS // 2), slice(ROWS // 2, ROWS))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batch_of() -> Batch:
    torch.manual_seed(1)
    return {
        "x": torch.randn(ROWS, 6), "y": torch.randint(4, (ROWS,)), "t": torch.randn(ROWS, 4),
        "weight": torch.full((ROWS,), 0.5), "length": torch.full((ROWS,), 4),
    }  # fmt: skip


def labels(model: Any, batch: Batch) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def there(model: Any, batch: Batch) -> Any:
    return (model(batch["x"]) - batch["t"])[~batch["t"].isnan()].square().mean()


def weighed(model: Any, batch: Batch) -> Any:
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (losses * batch["weight"]).sum() / batch["weight"].sum()


def lasting(model: Any, batch: Batch) -> Any:
    kept = torch.arange(4) < batch["length"][:, None]
    return ((model(batch["x"]) - batch["t"]).square() * kept).sum() / kept.sum()


def each_alone(model: Any, batch: Batch) -> Any:
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none", ignore_index=-100)
    return (losses * batch["weight"] * batch["length"]).mean()


def ignored(batch: Batch) -> Batch:
    return {**batch, "y": batch["y"].where(torch.arange(ROWS) > ROWS // 3, -100)}


def missing(batch: Batch) -> Batch:
    rate = torch.linspace(0, 0.9, ROWS)[:, None]
    return {**batch, "t": batch["t"].where(torch.rand(ROWS, 4) > rate, math.nan)}


def uneven(batch: Batch) -> Batch:
    return {**batch, "weight": torch.rand(ROWS), "length": torch.randint(1, 5, (ROWS,))}


COUNTS = {
    labels: anybatch.count_tokens("y"),
    there: lambda batch: (~batch["t"].isnan()).sum(),
    weighed: lambda batch: batch["weight"].sum(),
    lasting: lambda batch: batch["length"].sum(),
}
LATER: dict[Any, Callable[[Batch], Batch]] = {labels: ignored, there: missing, weighed: uneven, lasting: uneven}


def trained(loss_fn: Any, batches: list[Any], **options: Any) -> int:
    """How often a split was proved."""
    model = net()
    step = anybatch.TrainStep(
        model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=6, **options
    )
    with mock.patch.object(proving, "prove", wraps=proving.prove) as proved:
        for batch in batches:
            step(batch)
    return proved.call_count


@pytest.mark.parametrize("loss_fn", LATER)
def test_what_only_a_later_batch_has_is_stopped_there(loss_fn: Any) -> None:
    first = batch_of()
    assert trained(loss_fn, [first] * 3) == 1
    with pytest.raises(anybatch.NotSplittable, match="The loss is averaged over"):
        trained(loss_fn, [first, LATER[loss_fn](first)])


@pytest.mark.parametrize("setting", ["windows", "scaler", "compiled", "large"])
def test_labels_are_ignored_later_where_no_outputs_are_kept(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a batch is not looked at as if it had them."""
    monkeypatch.setattr(replaying, "_MOST_BYTES", 0 if setting == "large" else replaying._MOST_BYTES)
    options = {"scaler": torch.amp.GradScaler("cpu", init_scale=1.0)} if setting == "scaler" else {}
    batches: list[Any] = [batch_of(), batch_of(), ignored(batch_of())]
    if setting == "windows":
        halves = [{key: leaf[rows] for key, leaf in one.items()} for one in batches for rows in HALVES]
        batches = list(anybatch.windows(halves, batches=2))
    if setting == "compiled":
        torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    try:
        assert trained(labels, batches[:2], **options) == 1
        with pytest.raises(anybatch.NotSplittable, match=r'count_tokens\("y"\)'):
            trained(labels, batches, **options)
        assert trained(labels, batches, count=anybatch.count_tokens("y"), **options) <= 2
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("loss_fn", LATER)
def test_the_count_that_suits_it_passes(loss_fn: Any) -> None:
    first = batch_of()
    later = LATER[loss_fn](first)
    assert trained(loss_fn, [first, later, later, first], count=COUNTS[loss_fn]) == 1


@pytest.mark.parametrize("later", [ignored, uneven])
def test_a_mean_over_the_samples_is_proved_once(later: Callable[[Batch], Batch]) -> None:
    first = batch_of()
    assert trained(each_alone, [first, later(first), later(first)]) == 1


def test_labels_of_a_shifted_model() -> None:
    def shifted(model: Any, batch: Batch) -> Any:
        return F.cross_entropy(model(batch["x"])[:, :-1].flatten(0, 1), batch["y"][:, 1:].flatten())

    torch.manual_seed(1)
    first = {"x": torch.randn(ROWS, 5, 6), "y": torch.randint(4, (ROWS, 5))}
    later = {**first, "y": first["y"].where(torch.rand(ROWS, 5) > torch.linspace(0, 0.8, ROWS)[:, None], -100)}
    with pytest.raises(anybatch.NotSplittable, match="shift=1"):
        trained(shifted, [first, first, later])
    assert trained(shifted, [first, later], count=anybatch.count_tokens("y", shift=1)) == 1


def test_keys_with_dots() -> None:
    def dotted(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["img.pth"]), batch["cls"]["y.txt"])

    first, later = ({"img.pth": one["x"], "cls": {"y.txt": one["y"]}} for one in (batch_of(), ignored(batch_of())))
    assert trained(dotted, [first] * 3) == 1
    with pytest.raises(anybatch.NotSplittable, match=r'count_tokens\("cls\.y\.txt"\)'):
        trained(dotted, [first, later])
    assert trained(dotted, [first, later], count=anybatch.count_tokens("cls.y.txt")) == 1


def test_a_batch_without_the_leaf_does_not_have_it() -> None:
    asked = Unseen(("y",), lambda one: bool((one < 0).any()))
    found = [asked.is_in([{name: torch.tensor([1, -100])}]) for name in ("x", "y")]
    assert found == [False, True]


def test_what_a_later_batch_has_is_warned_of_once() -> None:
    later = ignored(batch_of())
    with pytest.warns(UserWarning, match="The loss is averaged over") as said:
        assert trained(labels, [batch_of(), later, later, batch_of(), later], verify="warn") == 2
    assert len(said) == 1


def test_what_is_refused_is_refused_again() -> None:
    model, later = net(), ignored(batch_of())
    step = anybatch.TrainStep(model, labels, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=6)
    step(batch_of())
    for _ in range(2):
        with pytest.raises(anybatch.NotSplittable):
            step(later)
    assert step(batch_of()).proof


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in flat(list(args)) if isinstance(one, torch.Tensor)}
        made = [one for one in flat(result) if isinstance(one, torch.Tensor)]
        self.bytes = max([self.bytes, *(one.nbytes for one in made if one.untyped_storage()._cdata not in given)])
        return result


@pytest.mark.parametrize("later", [-1, 0, 9, None])
def test_a_look_at_a_large_leaf_makes_no_mask_of_its_size(later: int | None) -> None:
    leaf = torch.full((6000, 1000), 7)
    leaf[:, 1] = 5
    weight = torch.ones(6000, 1000)
    with Largest() as largest:
        found = elsewhere.even_in.__wrapped__([{"ids": leaf, "weight": weight}])  # type: ignore[attr-defined]
        assert {str(one.what) for one in found} == {"-1", "0", "1", "2", "3", "uneven"}
        if later is not None:
            leaf[-1, -1] = later
        met = [one.what for one in found if one.is_in([{"ids": leaf, "weight": weight}])]
        elsewhere.is_not_full(weight)
    assert met == ([later] if later in (-1, 0) else [])
    assert 0 < largest.bytes <= 1 << 20
