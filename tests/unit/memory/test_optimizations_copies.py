"""What an offloaded block sends to the host, how often, and what comes back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from anybatch.memory.checkpointing import recompute
from anybatch.memory.offloading import HostPool, offload, size_class
from optimizations_models import (
    Language,
    assert_same,
    language_loss,
    texts,
)

LAYERS = ["layers.0", "layers.1", "layers.2"]


@pytest.fixture(autouse=True)
def everything_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models: everything from 16 bytes on is sent to the host."""
    monkeypatch.setattr("anybatch.memory.offloading.SMALLEST", 16)


class Sent(HostPool):
    """Notes what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def out(self, tensor: Tensor) -> Any:
        assert tensor.is_contiguous()
        self.events.append(("out", tensor.nbytes))
        return super().out(tensor)

    def back(self, kept: Tensor, make: Callable[[], Tensor]) -> Any:
        brought, arrival = super().back(kept, make)
        self.events.append(("back", brought.untyped_storage().nbytes()))
        return brought, arrival


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    transfer = Sent()
    monkeypatch.setattr("anybatch.memory.offloading.HostPool", lambda: transfer)
    return transfer


class Once(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.register_buffer("table", torch.rand(8, 8))

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(self, *args)


def run(function: Callable[..., Tensor], *args: Tensor) -> None:
    model = nn.ModuleList([Once(function)])
    with offload(model, ["0"]):
        model[0](*args).sum().backward()


def test_parameters_and_buffers_stay(sent: Sent) -> None:
    x = torch.rand(4, 8, requires_grad=True) * 1
    run(lambda m, x: x @ m.weight.t() @ m.table @ m.table.t()[:, :4], x)
    assert [size for what, size in sent.events if what == "out"] == [
        x.nbytes
    ]  # none for the product's left sides alone


def test_a_storage_is_copied_once(sent: Sent) -> None:
    x = torch.rand(4, 24, requires_grad=True) * 1

    def attention(m: Any, x: Tensor) -> Tensor:
        query, key, value = x.view(4, 3, 8).unbind(1)
        return query.sin() * key.cos() + value.exp().detach() * value + key * query

    run(attention, x)
    outs = [size for what, size in sent.events if what == "out"]
    assert outs.count(x.nbytes) == 1
    assert sum(size == x.nbytes for what, size in sent.events if what == "back") == 1


def test_an_expanded_tensor_is_copied_by_its_storage(sent: Sent) -> None:
    x = torch.rand(1, 8, requires_grad=True) * 1
    run(lambda m, x: x.expand(1000, 8).sin(), x)
    assert sent.events == [("out", 32), ("back", 32)]


def test_a_small_part_of_a_large_storage_goes_alone_and_comes_back_with_its_strides(sent: Sent) -> None:
    x = torch.rand(40, 8, requires_grad=True) * 1
    seen: list[tuple[int, ...]] = []

    class Strides(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (saved,) = ctx.saved_tensors
            seen.append(saved.stride())
            assert torch.equal(saved, x[::5, 1:2])
            return gradient * 2

    run(lambda m, x: Strides.apply(x[::5, 1:2]), x)  # type: ignore[no-untyped-call]
    assert sent.events[0] == ("out", 32)
    assert seen == [(40, 1)]


def test_a_storage_that_changes_is_copied_again(sent: Sent) -> None:
    unused: list[Tensor] = []
    wanted: list[Tensor] = []

    def changing(m: Any, x: Tensor) -> Tensor:
        state = torch.rand(4, 8)
        unused.append(x * state)  # saves the state as it is now, and never goes backward
        state.mul_(2)
        wanted.append(state.clone())
        return x * state

    x = torch.rand(4, 8, requires_grad=True)
    model = nn.ModuleList([Once(changing)])
    with offload(model, ["0"]):
        model[0](x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, wanted[0])
    assert [what for what, _ in sent.events].count("out") == 2


def test_memory_that_is_used_again_by_the_allocator_is_another_storage() -> None:
    """Freed and made anew in turn, so that addresses repeat."""

    def loop(m: Any, x: Tensor) -> Tensor:
        total = x.sum() * 0
        for i in range(50):
            total = total + (x * i).sin().sum()
        return total

    found = []
    for names in ([], ["0"]):
        x = torch.linspace(0, 1, 64, requires_grad=True)
        model = nn.ModuleList([Once(loop)])
        with offload(model, names):
            model[0](x).backward()
        found.append({"gradient": x.grad})
    assert_same(found[1], found[0])


def test_the_tensors_of_the_block_before_are_asked_for_early(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = Sent()
    monkeypatch.setattr("anybatch.memory.offloading.HostPool", lambda: transfer)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()) for _ in range(4)))
    for index, block in enumerate(model):
        block.register_full_backward_hook(lambda *_, i=index: transfer.events.append(("done", i)))
    with offload(model, ["0", "1", "2", "3"]):
        model(torch.rand(16, 8, requires_grad=True) * 1).sum().backward()
    after = [event for event in transfer.events if event[0] != "out"]
    arrived = {i: after[: after.index(("done", i))] for i in range(4)}
    counts = {i: sum(what == "back" for what, _ in events) for i, events in arrived.items()}
    assert counts[3] < counts[2] < counts[1] == counts[0]  # while a block goes backward, the one before it arrives
    assert counts[3] == 2 * counts[0] // 4


def test_a_block_within_a_recomputed_one_is_not_copied_again(sent: Sent) -> None:
    batch = texts()
    copies = []
    for recomputed in ([], [""]):
        model = Language()
        with recompute(model, recomputed), offload(model, LAYERS):
            language_loss(model, batch).backward()
        copies.append([what for what, _ in sent.events].count("out"))
        sent.events.clear()
    assert copies[1] <= copies[0]


@given(st.integers(1, 1 << 40))
def test_size_classes_are_few_and_not_too_large(size: int) -> None:
    found = size_class(size)
    assert found >= size
    assert found == size_class(found)
    assert found <= max(4096, 1.25 * size)
    assert bin(found).count("1") <= 3


KINDS: dict[str, Callable[[], Tensor]] = {
    "complex": lambda: torch.rand(8, 8, dtype=torch.complex64),
    "conjugate": lambda: torch.rand(8, 8, dtype=torch.complex64).conj(),
    "bool": lambda: torch.rand(8, 8) > 0.5,
    "bfloat16": lambda: torch.rand(8, 8).bfloat16(),
    "sparse": lambda: torch.rand(8, 8).relu().to_sparse(),
    "transposed": lambda: torch.rand(8, 8).t(),
    "flipped": lambda: torch.rand(9, 9).t()[:8, 1:],
    "empty": lambda: torch.rand(0, 8),
    "scalar": lambda: torch.rand(()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_comes_back(kind: str) -> None:
    value = KINDS[kind]()

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
            ctx.save_for_backward(value)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (saved,) = ctx.saved_tensors
            assert saved.layout == value.layout
            assert saved.dtype == value.dtype
            one, other = (t.to_dense() if t.layout != torch.strided else t for t in (saved, value))
            assert torch.equal(one, other)
            assert value.layout != torch.strided or saved.stride() == value.stride()
            return gradient * 2, None

    model = nn.ModuleList([Once(lambda m, x: Saves.apply(x, value))])  # type: ignore[no-untyped-call]
    with offload(model, ["0"]):
        model[0](torch.rand(3, requires_grad=True)).sum().backward()
