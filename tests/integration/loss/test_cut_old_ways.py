"""What goes wrong when several losses are differentiated by hand, and what the cut does in its place."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anybatch
import reference
from anybatch import LossError
from test_cut import Heads, X, summed
from test_cut_memory import Peak


def yielding(model: Any, batch: torch.Tensor) -> Iterator[torch.Tensor]:
    with anybatch.cut(model.trunk(batch)) as features:
        for head in model.heads:
            yield head(features).square().mean()


def losses_of(model: Heads) -> list[torch.Tensor]:
    features = model.trunk(X)
    return [head(features).square().mean() for head in model.heads]


def test_the_graph_is_not_gone_for_the_second_loss() -> None:
    model = Heads()
    expected, _ = reference.whole_gradients(model, summed, X)
    losses = losses_of(model)
    losses[0].backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        losses[1].backward()
    anybatch.backward(reset(model), yielding, X, micro_batch_size=4)
    reference.assert_float64(reference.gradients_of(model), expected)


def reset(model: Heads) -> Heads:
    reference.clear(model)
    model.passes = 0
    return model


@pytest.mark.parametrize("size", [4, None])
def test_yielding_without_a_cut_is_refused_with_the_remedy(size: int | None) -> None:
    model = Heads()

    def loss_fn(model: Any, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        features = model.trunk(batch)
        for head in model.heads:
            yield head(features).square().mean()

    with pytest.raises(LossError, match=r"share a graph.*with anybatch\.cut"):
        anybatch.backward(model, loss_fn, X, micro_batch_size=size)
    assert reference.gradients_of(model) == [None] * len(list(model.parameters()))


def test_upstream_is_not_gone_through_for_each_loss() -> None:
    """The loop with retain_graph goes through the trunk once a loss; a sum and the cut once."""
    model = Heads(5)
    losses = losses_of(model)
    for loss in losses:
        loss.backward(retain_graph=loss is not losses[-1])
    by_hand = reference.gradients_of(model)
    assert model.passes == 5
    torch.stack(losses_of(reset(model))).sum().backward()
    assert model.passes == 1
    with anybatch.cut(reset(model).trunk(X)) as features:
        for head in model.heads:
            head(features).square().mean().backward()
    assert model.passes == 1
    reference.assert_float64(reference.gradients_of(model), by_hand)


def test_what_retain_graph_costs_in_memory() -> None:
    """Six heads of several layers: the loop holds all of them, and what it computes anew on top."""
    model, batch = Heads(1), X.repeat(50, 1)
    weights = [nn.Parameter(torch.randn(8, 200, dtype=torch.float64)) for _ in range(6)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)

    def head(weight: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return (features @ weight).sigmoid().tanh().sigmoid().tanh().square().mean()

    def sequential() -> None:
        features = model.trunk(batch)
        losses = [head(weight, features) for weight in weights]
        for loss in losses:
            loss.backward(retain_graph=True)

    def together() -> None:
        features = model.trunk(batch)
        torch.stack([head(weight, features) for weight in weights]).sum().backward()

    def cut() -> None:
        with anybatch.cut(model.trunk(batch)) as features:
            for weight in weights:
                head(weight, features).backward()

    def peak(run: Callable[[], None]) -> int:
        with Peak([*weights, *[weight.grad for weight in weights if weight.grad is not None]]) as found:
            run()
        return int(found.bytes)

    retained, summed_up, pieces = peak(sequential), peak(together), peak(cut)
    assert retained >= summed_up
    assert pieces < 0.45 * summed_up


def test_a_step_between_two_losses_is_not_possible_here() -> None:
    """A step after each loss changes weights that the next backward needs as they were."""
    model = Heads(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = losses_of(model)
    first.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    expected, _ = reference.whole_gradients(model, summed, X)
    before = [p.detach().clone() for p in model.parameters()]
    anybatch.TrainStep(model, yielding, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch_size=4)(X)
    moved: list[Any] = [then - now.detach() for then, now in zip(before, model.parameters(), strict=True)]
    reference.assert_float64(moved, expected)


# In place, at the cut. `detach()` shares the memory, so that a change is seen upstream.


def by_hand(model: nn.Module, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The cut that people write."""
    features = model(X)
    leaf = features.detach().requires_grad_()
    head(leaf).backward()
    features.backward(leaf.grad)


def with_cut(model: nn.Module, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with anybatch.cut(model(X)) as leaf:
        head(leaf).backward()


def a_leaf_in_place(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.mul_(2).sum()


def a_leaf_in_place_unseen(leaf: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        leaf.mul_(2)
    return leaf.sum()


@pytest.mark.parametrize("head", [a_leaf_in_place, a_leaf_in_place_unseen])
def test_a_head_that_writes_over_the_features(head: Callable[[torch.Tensor], torch.Tensor]) -> None:
    trunk = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()  # its backward needs what it gave
    with pytest.raises(RuntimeError, match=r"in-place operation|modified by an inplace operation"):
        by_hand(trunk, head)
    reference.clear(trunk)
    with pytest.raises(LossError, match=r"in place.*clone"):
        with_cut(trunk, head)
    assert reference.gradients_of(trunk) == [None, None]
    found = []
    for way in (by_hand, with_cut):
        reference.clear(trunk)
        way(trunk, lambda leaf: head(leaf.clone()))  # the remedy
        found.append(reference.gradients_of(trunk))
    reference.assert_bitwise(found[1], found[0])


def test_writing_where_nobody_needs_the_old_values_is_fine() -> None:
    trunk = nn.Linear(4, 3).double()  # its backward does not need what it gave
    found = []
    for way in (by_hand, with_cut):
        reference.clear(trunk)
        way(trunk, a_leaf_in_place_unseen)
        found.append(reference.gradients_of(trunk))
    reference.assert_bitwise(found[1], found[0])


def test_writing_over_the_cut_tensor_itself() -> None:
    """By hand the gradient of the features goes through an operation that the head has never seen, silently."""
    trunk, w = nn.Linear(4, 3).double(), torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    expected, _ = reference.whole_gradients(trunk, lambda model, batch: (model(batch) * w).sum(), X)
    features = trunk(X)
    leaf = features.detach().requires_grad_()
    loss = (leaf * w).sum()
    features.relu_()
    loss.backward()
    features.backward(leaf.grad)
    assert reference.distance(reference.gradients_of(trunk), expected) > 0.1 * reference.norm(expected)
    reference.clear(trunk)

    def cut() -> None:
        features = trunk(X)
        with anybatch.cut(features) as leaf:
            loss = (leaf * w).sum()
            features.relu_()
            loss.backward()

    with pytest.raises(LossError, match=r"written to in place in its block.*clone"):
        cut()
    assert reference.gradients_of(trunk) == [None, None]


# Under DistributedDataParallel.


class Whole(nn.Module):
    """Gives its losses, so that all of it lies in one wrapper."""

    def __init__(self, model: Heads) -> None:
        super().__init__()
        self.model = model

    def forward(self, _x: torch.Tensor) -> list[torch.Tensor]:
        return losses_of(self.model)


@pytest.fixture
def one_rank() -> Iterator[None]:
    if not torch.distributed.is_gloo_available():
        pytest.skip("needs gloo")
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_second_backward_under_ddp() -> None:
    model = Heads()
    expected, _ = reference.whole_gradients(model, summed, X)
    wrapped = DistributedDataParallel(Whole(copy.deepcopy(model)))
    first, second, _ = wrapped(X)
    first.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ready only once"):
        second.backward()
    trunk, heads = DistributedDataParallel(model.trunk), [DistributedDataParallel(head) for head in model.heads]
    with anybatch.cut(trunk(X)) as features:
        for head in heads:
            head(features).square().mean().backward()
    reference.assert_float64(reference.gradients_of(model), expected)
