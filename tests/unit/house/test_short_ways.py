"""What is looked at in a short way at every step is the same that the long way finds."""

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import anybatch
from anybatch.batch.layout import Constant, Layout, Rows, _lay_out_plain, _Surveyor, lay_out
from anybatch.errors import BatchError
from anybatch.tensors.graph import OutsideLeaves, leaves_of
from anybatch.tensors.modules import device_of, modules_of
from anybatch.update.batchnorm import batch_norm_as

LEAVES = st.one_of(
    st.lists(st.integers(0, 3), max_size=3).map(torch.zeros),
    st.sampled_from([1.5, "a", None, [1, 2], (torch.zeros(2, 1),), nn.Parameter(torch.zeros(2))]),
    st.integers(0, 3).map(lambda n: torch.zeros(n, 2).to_sparse()),
)
BATCHES = st.one_of(
    st.dictionaries(st.sampled_from(["x", "y", 3, None]), LEAVES, max_size=4),
    st.lists(LEAVES, max_size=4),
    st.lists(LEAVES, max_size=4).map(tuple),
)


def outlined(layout: Layout) -> Any:
    def shape(node: Any) -> Any:
        if not hasattr(node, "children"):
            return type(node), id(node.value), getattr(node, "label", "")
        rebuilt = node.container.rebuild([child.value for child in node.container.children])
        return type(rebuilt), repr(rebuilt), node.container.children, [shape(child) for child in node.children]

    return layout.rows, layout.devices, shape(layout.root)


def long_way(batch: Any) -> Any:
    try:
        return outlined(_Surveyor(()).survey(batch))
    except BatchError as error:
        return str(error)


@given(BATCHES)
def test_a_plain_batch_is_laid_out_as_any_other(batch: Any) -> None:
    try:
        found = outlined(lay_out(batch, may_be_empty=True))
    except BatchError as error:
        found = str(error)
    assert found == long_way(batch)


@pytest.mark.parametrize("batch", [{"x": torch.zeros(2, 3), "y": torch.ones(2)}, [torch.zeros(2)], (torch.zeros(2),)])
def test_the_usual_batches_take_the_short_way(batch: Any) -> None:
    found = _lay_out_plain(batch)
    assert found is not None
    assert outlined(found) == long_way(batch)


def test_a_broadcast_leaf_is_not_cut_even_if_it_has_as_many_rows() -> None:
    root: Any = lay_out({"x": torch.zeros(2), "weights": torch.ones(2)}, broadcast=["weights"]).root
    assert [type(child) for child in root.children] == [Rows, Constant]
    with pytest.raises(BatchError, match="broadcast"):
        lay_out({"x": torch.zeros(2)}, broadcast="")


def test_what_a_loss_keeps_in_its_micro_batch_goes_with_it() -> None:
    model = nn.Linear(3, 1)
    kept: list[weakref.ref[torch.Tensor]] = []

    def loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        assert all(ref() is None for ref in kept)
        batch["hidden"] = torch.zeros(5)
        kept.append(weakref.ref(batch["hidden"]))
        return torch.as_tensor(model(batch["x"]).mean())

    batch = {"x": torch.ones(8, 3), "nested": {"y": torch.ones(8), "empty": {}, "z": (1, ())}}
    anybatch.backward(model, loss_fn, batch, micro_batch_size=2)
    assert len(kept) == 4
    assert "hidden" not in batch


class Tagged(torch.autograd.Function):
    """Keeps something under the name by which a leaf is found behind a node of autograd's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.variable = "none"
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * 2


def test_the_leaves_behind_a_node_of_the_users_own() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = Tagged.apply(weight).sum()  # type: ignore[no-untyped-call]
    assert [leaf is weight for leaf in leaves_of(loss)] == [True]


def test_leaves_that_only_a_later_graph_reaches_are_found_there() -> None:
    known, first, second = (torch.ones((), requires_grad=True) for _ in range(3))
    outside = OutsideLeaves([known])
    seen = []
    for step, leaf in enumerate([first, first, second]):
        leaf.grad = held = torch.tensor(float(step))
        outside.look_behind([known * leaf, known * 2])
        seen.append((len(outside.found), leaf.grad is held))
    assert seen == [(1, False), (1, True), (2, False)]  # what was found once is left alone from then on


def test_a_leaf_whose_data_was_replaced_is_still_known() -> None:
    known = torch.ones(2, requires_grad=True)
    outside = OutsideLeaves([known])
    outside.look_behind([known.sum()])
    known.data = known.data.double()
    outside.look_behind([known.sum()])
    assert outside.found == []


def test_the_leaf_of_a_cut_is_not_held() -> None:
    outside = OutsideLeaves([])
    leaf = torch.ones(3, requires_grad=True)
    gone = weakref.ref(leaf)
    outside.look_behind([(leaf * 2).sum()], ignoring=[leaf])
    del leaf
    gc.collect()
    assert gone() is None
    assert outside.found == []


def nested() -> nn.Module:
    shared = nn.Linear(2, 2)
    outer = nn.Sequential(nn.Sequential(), nn.Sequential(nn.ReLU(), shared), nn.Sequential(shared, nn.Linear(2, 2)))
    outer.register_module("nothing", None)
    return outer


@pytest.mark.parametrize("model", [nested(), nn.ReLU(), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2, bias=False)])
def test_modules_and_the_first_device(model: nn.Module) -> None:
    assert [id(module) for module in modules_of(model)] == [id(module) for module in model.modules()]
    for device in ("cpu", "meta"):
        model = model.to(device)
        first = next(model.parameters(), None)
        assert device_of(model) == (torch.device("cpu") if first is None else first.device)


class Kept(nn.BatchNorm2d):
    """A BatchNorm of the user's own."""


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(2), Kept(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm1d()])
def test_every_kind_of_batch_norm_is_found(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(norm))
    with pytest.raises(anybatch.NotSplittable), batch_norm_as("refuse", [model], 2):
        pass
    with batch_norm_as("refuse", [model.eval()], 2):
        pass
