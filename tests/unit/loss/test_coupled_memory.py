"""What a coupled loss holds in memory: the graphs that are kept, one more, and no matrix of all pairs."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import anybatch
from live_bytes import LiveBytes

ROWS, SIZE, WIDTH = 256, 32, 32


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
        self.last = nn.Linear(WIDTH, 4)


def encode(model: Any, batch: Tensor) -> Tensor:
    z: Tensor = model.last(model.layers(batch))
    return z


def loss(model: Any, z: Tensor) -> Tensor:
    return (z @ z.T).logsumexp(1).mean()


def loss_of_rows(model: Any, z: Tensor, rows: slice) -> Tensor:
    return (z[rows] @ z.T).logsumexp(1).mean()


def peak(coupled: Any, batch: Tensor, size: int | None) -> int:
    model = Deep()
    with LiveBytes([*model.parameters(), batch]) as live:
        before = live.current
        if size is None:
            loss(model, encode(model, batch)).backward()
        else:
            anybatch.backward(model, coupled, batch, micro_batch_size=size)
    return int(live.peak - before)


def test_the_peak_grows_with_the_graphs_that_are_kept() -> None:
    batch = torch.randn(ROWS, WIDTH)
    whole = peak(None, batch, None)
    keeps = (0, 1, 2, 4, 8)
    by_keep = [peak(anybatch.Coupled(encode, loss, keep=keep), batch, SIZE) for keep in keeps]
    graph = SIZE * WIDTH * 4 * 24  # what each of 24 layers gives
    for keep, found in zip(keeps, by_keep, strict=True):  # beside the matrix of all pairs
        assert found - by_keep[0] == pytest.approx(keep * graph, rel=0.05)
    assert by_keep[4] < 1.05 * whole


class Largest(TorchDispatchMode):
    """The most numbers that one tensor had."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.numbers = max(self.numbers, value.numel())
        return result


def test_in_row_blocks_there_is_no_matrix_of_all_pairs() -> None:
    batch = torch.randn(512, WIDTH)
    found = []
    for coupled in (anybatch.Coupled(encode, loss), anybatch.Coupled(encode, loss_of_rows, row_block=16)):
        with Largest() as largest:
            anybatch.backward(Deep(), coupled, batch, micro_batch_size=32)
        found.append(largest.numbers)
    assert found[0] == 512 * 512
    assert found[1] <= max(512 * 16, 512 * WIDTH)


@pytest.mark.parametrize("keep", [0, 1, 3, 8])
def test_only_the_kept_graphs_are_alive_in_the_loss_and_each_is_freed_before_the_next(keep: int) -> None:
    activations: list[weakref.ref[Tensor]] = []
    alive_in_loss: list[int] = []
    alive_in_encode: list[int] = []

    def alive() -> int:
        return sum(ref() is not None for ref in activations)

    def watched(model: Any, batch: Tensor) -> Tensor:
        alive_in_encode.append(alive())
        hidden = model.layers(batch)
        activations.append(weakref.ref(hidden))
        z: Tensor = model.last(hidden)
        return z

    def watching(model: Any, z: Tensor) -> Tensor:
        alive_in_loss.append(alive())
        return loss(model, z)

    gc.disable()  # reference counts alone have to free them
    try:
        model = Deep()
        anybatch.backward(
            model, anybatch.Coupled(watched, watching, keep=keep), torch.randn(ROWS, WIDTH), micro_batch_size=SIZE
        )
        left = alive()
    finally:
        gc.enable()
    assert alive_in_loss == [keep]
    assert alive_in_encode == [0] * (8 - keep) + list(range(keep)) + [0] * (8 - keep)
    assert left == 0


def test_nothing_but_the_gradient_is_left() -> None:
    model = Deep()
    batch = torch.randn(ROWS, WIDTH)
    with LiveBytes([*model.parameters(), batch]) as live:
        before = live.current
        for _ in range(3):
            anybatch.backward(model, anybatch.Coupled(encode, loss), batch, micro_batch_size=SIZE)
        model.zero_grad()
        gc.collect()
        assert live.current - before < 1000
