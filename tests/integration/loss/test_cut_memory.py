"""The graph cut holds one head's activations at a time."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import anybatch
from test_cut import Heads, X


class Peak(TorchDispatchMode):
    """The most bytes that the storages made by operations took together; those that were there before are left out."""

    def __init__(self, there: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.there = {tensor.untyped_storage()._cdata for tensor in there}
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.held = {key: (ref, size) for key, (ref, size) in self.held.items() if not ref.expired()}
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                ref = StorageWeakRef(storage)
                if storage._cdata not in self.there:
                    self.held[ref.cdata] = ref, storage.nbytes()
        self.bytes = max(self.bytes, sum(size for _, size in self.held.values()))
        return result


def wide_head(weight: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return (features @ weight).sigmoid().square().mean()


def test_the_graph_of_each_head_is_freed_before_the_next_is_made() -> None:
    model = Heads(1)
    weights = [nn.Parameter(torch.randn(8, 1000, dtype=torch.float64)) for _ in range(5)]
    alive: list[int] = []
    activations: list[weakref.ref[torch.Tensor]] = []

    def loss_fn(model: Any, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        with anybatch.cut(model.trunk(batch)) as features:
            for weight in weights:
                hidden = (features @ weight).sigmoid()
                activations.append(weakref.ref(hidden))
                loss = hidden.square().mean()
                del hidden
                yield loss
                del loss
                alive.append(sum(ref() is not None for ref in activations))

    anybatch.backward(model, loss_fn, X, micro_batch_size=3)
    assert alive == [0] * 10


def test_peak_memory_is_that_of_one_head() -> None:
    model = Heads(1)
    weights = [nn.Parameter(torch.randn(8, 4000, dtype=torch.float64)) for _ in range(6)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)

    def peak(run: Any) -> int:
        with Peak([*weights, *[weight.grad for weight in weights if weight.grad is not None]]) as found:
            run()
        return int(found.bytes)

    def together() -> None:
        features = model.trunk(X)
        torch.stack([wide_head(weight, features) for weight in weights]).sum().backward()

    def cut() -> None:
        with anybatch.cut(model.trunk(X)) as features:
            for weight in weights:
                wide_head(weight, features).backward()

    hidden = 6 * 4000 * 8  # bytes of one head's activation
    whole, pieces = peak(together), peak(cut)
    assert whole - pieces >= 4 * hidden
    assert pieces <= 6 * hidden
