"""Dropout as a function of the sample: the same masks and the same gradient however the batch is split."""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch.memory.checkpointing import recompute
from anybatch.tensors.dropouts import SampleDropout

ROWS = 12
SPLITS: dict[str, list[list[int]]] = {
    "whole": [list(range(12))],
    "even": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
    "uneven": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]],
    "last first": [[10, 11], [5, 6, 7, 8, 9], [0, 1, 2, 3, 4]],
    "packed": [[7, 0, 11], [3, 2, 9, 1, 10], [8], [6, 4, 5]],
    "one by one": [[row] for row in range(12)],
}


class Recorded(nn.Module):
    """Drops out, and notes what it dropped, the samples first.

    Args:
        dropout: the module.
        first: brings the samples of its output to the front, given their number.
    """

    def __init__(self, dropout: nn.Module, first: Callable[[Tensor, int], Tensor] = lambda y, rows: y) -> None:
        super().__init__()
        self.dropout, self.first = dropout, first
        self.seen: list[Tensor] = []
        self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x + 3.0  # zeros are dropped ones
        y: Tensor = self.dropout(x)
        self.seen.append(self.first(y.detach() != y.detach().min() if self._alpha() else y.detach() != 0, self.rows))
        return y - 3.0

    def _alpha(self) -> bool:
        return isinstance(self.dropout, nn.AlphaDropout)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, 7)
        self.block = nn.Sequential(
            Recorded(nn.Dropout(0.3)), nn.Tanh(), nn.Linear(7, 6), Recorded(nn.Dropout(0.5, inplace=True)), nn.Sigmoid()
        )
        self.out, self.last = nn.Linear(6, 2), nn.Dropout(0.2)

    def forward(self, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        y: Tensor = self.out(self.last(block(self.into(x)))).square().sum(1)
        return y

    @staticmethod
    def data() -> Tensor:
        return torch.randn(ROWS, 3, dtype=torch.float64)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(2, 4, 3)
        self.block = nn.Sequential(
            Recorded(nn.Dropout2d(0.4)), nn.ELU(), nn.Conv2d(4, 5, 3, padding=1), Recorded(nn.FeatureAlphaDropout(0.3))
        )

    def forward(self, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        y: Tensor = block(self.into(x.to(memory_format=torch.channels_last))).square().mean((1, 2, 3))
        return y

    @staticmethod
    def data() -> Tensor:
        return torch.randn(ROWS, 2, 6, 5, dtype=torch.float64)


def _split_heads(weights: Tensor, rows: int) -> Tensor:
    return weights.view(rows, -1, *weights.shape[1:])


class Heads(nn.Module):
    """A block of a transformer; its attention weights have the shape ``[B * heads, T, T]``."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, 6)
        self.block = _Attention()

    def forward(self, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        y: Tensor = block(self.into(x)).square().mean((1, 2))
        return y

    @staticmethod
    def data() -> Tensor:
        return torch.randn(ROWS, 20, 3, dtype=torch.float64)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.of_weights, self.of_residual = Recorded(nn.Dropout(0.2), _split_heads), Recorded(nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.project(x).view(rows, length, 2, 3, width // 2).transpose(1, 2).flatten(0, 1).unbind(2)
        query, key, value = parts
        weights = self.of_weights(torch.softmax(query @ key.transpose(1, 2), -1))
        mixed = (weights @ value).view(rows, 2, length, width // 2).transpose(1, 2).reshape(rows, length, width)
        y: Tensor = x + self.of_residual(self.out(mixed))
        return y


class FlatTokens(nn.Module):
    """Works on ``[B * T, H]``."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, 8)
        self.block = nn.Sequential(Recorded(nn.Dropout(0.3), _split_heads), nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        return block(self.into(x.flatten(0, 1))).view(len(x), -1).square().mean(1)

    @staticmethod
    def data() -> Tensor:
        return torch.randn(ROWS, 5, 3, dtype=torch.float64)


class DropsWeights(nn.Module):
    """Drops a parameter, and a part of it, whose sizes are multiples of those of the micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, 12)
        self.block = _Weights()

    def forward(self, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        return block(self.into(x)).square().sum(1)

    @staticmethod
    def data() -> Tensor:
        return torch.randn(ROWS, 3, dtype=torch.float64)


class _Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 12))
        self.one, self.other = nn.Dropout(0.4), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x @ self.one(self.weight) @ self.other(self.weight[:, :6])
        return y


MODELS: list[Any] = [Perceptron, Convolutions, Heads, FlatTokens, DropsWeights]
WAYS = ("plain", "reentrant", "not reentrant", "memory optimization")


def train(model: Any, data: Tensor, split: Sequence[Sequence[int]], way: str = "plain", seed: int = 3) -> Any:
    """The loop that people write: the gradient of the mean over the samples, and the masks by sample."""
    block: Callable[[Tensor], Tensor] = model.block
    recorded = [module for module in model.modules() if isinstance(module, Recorded)]
    handle = recompute(model, ["block"]) if way == "memory optimization" else None
    if way in ("reentrant", "not reentrant"):

        def block(x: Tensor) -> Tensor:
            y: Tensor = checkpoint(model.block, x, use_reentrant=way == "reentrant")
            return y

    masks: dict[int, dict[int, list[Tensor]]] = {}
    with SampleDropout(seed, [model]) as dropout:
        for rows in split:
            dropout.begin(rows)
            for module in recorded:
                module.seen, module.rows = [], len(rows)
            (model(data[list(rows)], block).sum() / len(data)).backward()
            for number, module in enumerate(recorded):
                for again, seen in enumerate(module.seen):
                    for row, mask in zip(rows, seen, strict=True):
                        masks.setdefault(number, {}).setdefault(row, [])
                        assert len(masks[number][row]) == again
                        masks[number][row].append(mask)
    if handle is not None:
        handle.remove()
    return [parameter.grad for parameter in model.parameters()], masks


@pytest.fixture(scope="module")
def wholes() -> dict[Any, Any]:
    """Each model with its data, gradient and masks of the whole batch at once."""
    found = {}
    for kind in MODELS:
        torch.manual_seed(1)
        model, data = kind().double(), kind.data()
        found[kind] = model, data, *train(copy.deepcopy(model), data, SPLITS["whole"])
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", MODELS)
def test_masks_and_gradient_do_not_depend_on_the_split(kind: Any, split: str, way: str, wholes: Any) -> None:
    model, data, gradient, masks = wholes[kind]
    torch.manual_seed(len(split))  # what torch would draw does not matter
    own, seen = train(copy.deepcopy(model), data, SPLITS[split], way)
    for number, row in itertools.product(masks, range(ROWS)):
        (mask,) = masks[number][row]
        assert 0 < mask.double().mean() < 1 or mask.numel() < 20 or kind is Convolutions
        assert number or len(seen[number][row]) == (1 if way == "plain" else 2)  # a later one may not run again
        for again in seen[number][row]:
            assert torch.equal(again, mask)
    error = sum(float((a - b).square().sum()) for a, b in zip(own, gradient, strict=True)) ** 0.5
    assert error <= 1e-10 * sum(float(b.square().sum()) for b in gradient) ** 0.5


def test_another_seed_gives_another_gradient(wholes: Any) -> None:
    for kind in MODELS:
        model, data, gradient, _ = wholes[kind]
        other, _ = train(copy.deepcopy(model), data, SPLITS["whole"], seed=4)
        assert not torch.allclose(torch.cat([g.flatten() for g in other]), torch.cat([g.flatten() for g in gradient]))


def dropped(shape: Sequence[int], rows: Sequence[int], seed: int = 0, rate: float = 0.5) -> Tensor:
    module = nn.Dropout(rate)
    with SampleDropout(seed, [module]) as masks:
        masks.begin(rows)
        kept: Tensor = module(torch.ones(*shape)) != 0
        return kept


@st.composite
def layouts(draw: st.DrawFn) -> tuple[bool, int, list[int], list[list[int]]]:
    """Whether a sample has several entries, the number of samples, the other sizes, and a split."""
    is_flat = draw(st.booleans())
    count = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(1, 5), min_size=2 * is_flat, max_size=3))
    if is_flat:
        sizes[1] = 13
    order = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    return is_flat, count, sizes, [order[a:b] for a, b in itertools.pairwise([0, *cuts, count])]


@given(layouts(), st.integers(0, 2**63))
def test_any_shape_and_any_split(layout: tuple[bool, int, list[int], list[list[int]]], seed: int) -> None:
    is_flat, count, sizes, split = layout
    module = nn.Dropout(0.4)

    def masks_of(split: Sequence[Sequence[int]]) -> Tensor:
        out = torch.zeros(count, *sizes, dtype=torch.bool)
        with SampleDropout(seed, [module]) as masks:
            for rows in split:
                masks.begin(rows)
                shape = [len(rows) * sizes[0], *sizes[1:]] if is_flat else [len(rows), *sizes]
                out[list(rows)] = (module(torch.ones(shape)) != 0).reshape(len(rows), *sizes)
        return out

    assert torch.equal(masks_of(split), masks_of([range(count)]))


def test_padding_behind_a_sample_does_not_matter() -> None:
    long, short = dropped((3, 9, 4), range(3)), dropped((2, 5, 4), [2, 0])
    assert torch.equal(long[[2, 0], :5], short)
    images, small = dropped((3, 2, 8, 9), range(3)), dropped((1, 2, 5, 6), [1])
    assert torch.equal(images[1:2, :, :5, :6], small)


def test_a_second_pass_draws_the_masks_of_the_first_and_goes_on_behind_them() -> None:
    x, module = torch.ones(4, 50), nn.Dropout(0.5)

    def forward(times: int) -> list[Tensor]:
        return [module(x) for _ in range(times)]

    with SampleDropout(0, [module]) as masks:
        states, first = [], []
        for rows in ([0, 1, 2, 3], [4, 5, 6, 7]):
            masks.begin(rows)
            states.append(torch.get_rng_state())
            first.append(forward(3))
        torch.manual_seed(5)
        for index in (1, 0):
            masks.begin([4 * index + row for row in range(4)])
            torch.set_rng_state(states[index])
            again = forward(3)
            assert all(map(torch.equal, again, first[index]))
            assert not any(torch.equal(module(x), mask) for mask in first[index])
        masks.begin(range(4), stage=1)
        assert not any(torch.equal(mask, old) for mask in forward(8) for old in first[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_backwards_after_all_forwards(reentrant: bool) -> None:
    inputs, module = [torch.ones(3, 40, requires_grad=True) for _ in range(3)], nn.Dropout(0.5)
    with SampleDropout(0, [module]) as masks:
        outputs: list[Any] = []
        for number, x in enumerate(inputs):
            masks.begin(range(3 * number, 3 * number + 3))
            outputs.append(checkpoint(lambda x: module(x * x), x, use_reentrant=reentrant))
        for y in reversed(outputs):
            y.sum().backward()
    for x, y in zip(inputs, outputs, strict=True):
        assert x.grad is not None
        assert torch.equal(x.grad, 2 * y.detach())


def test_a_forward_that_seeds_itself_keeps_each_micro_batch_its_own_masks() -> None:
    module = nn.Dropout(0.5)

    def masks_of(split: Sequence[Sequence[int]]) -> Tensor:
        out = torch.zeros(4, 2, 40)
        with SampleDropout(0, [module]) as masks:
            for rows in split:
                masks.begin(rows)
                torch.manual_seed(0)
                x = torch.ones(len(rows), 40, requires_grad=True)
                y: Any = checkpoint(lambda x: torch.stack([module(x), module(x)], 1), x, use_reentrant=False)
                y.sum().backward()
                assert x.grad is not None
                assert torch.equal(x.grad, y.sum(1).detach())
                out[list(rows)] = y.detach()
        return out

    whole = masks_of([range(4)])
    assert not torch.equal(whole[0], whole[1])
    assert torch.equal(masks_of([[0, 1], [2, 3]]), whole)


def test_the_masks_of_calls_differ_and_a_call_without_elements_counts() -> None:
    module = nn.Dropout(0.5)
    others = [nn.Dropout(0.0), nn.Dropout(1.0), nn.Dropout(0.5).eval()]
    with SampleDropout(0, [module, *others]) as masks:
        masks.begin(range(2))
        first, second, third = (module(torch.ones(2, 64)) for _ in range(3))
        assert not torch.equal(first, second)
        masks.begin(range(2))
        assert torch.equal(module(torch.ones(2, 64)), first)
        assert module(torch.ones(0, 64)).shape == (0, 64)
        for same in others:
            same(torch.ones(2, 64))
        assert torch.equal(module(torch.ones(2, 64)), third)


def test_modules_have_masks_of_their_own_and_are_as_before_afterwards() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    with SampleDropout(0, [model]) as masks:
        masks.begin(range(2))
        assert not torch.equal(model[0](torch.ones(2, 64)), model[1](torch.ones(2, 64)))
    assert not any("forward" in module.__dict__ for module in model)
