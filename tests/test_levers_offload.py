"""Offloaded blocks give the same in every bit; what is on the device, when, and what stays there."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from anybatch.levers.copies import Copied, Layout
from anybatch.levers.hostpool import HostPool, size_class
from anybatch.levers.offloading import offload
from anybatch.levers.recomputation import recompute
from levers_models import (
    Images,
    Language,
    LiveBytes,
    assert_same,
    image_loss,
    images,
    language_loss,
    outcome,
    peak,
    texts,
)

LAYERS = ["layers.0", "layers.1", "layers.2"]


def put(*names: str, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: offload(model, names, **options)


@pytest.fixture(autouse=True)
def everything_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models: everything from 16 bytes on is sent to the host."""
    monkeypatch.setattr("anybatch.levers.offloading.SMALLEST", 16)


@pytest.mark.parametrize("names", [LAYERS, LAYERS[1:2], ["layers.0.mixing", "layers.1.out.0:2", "norm"], [""]], ids=str)
@pytest.mark.parametrize("twice", [False, True])
def test_a_transformer_is_bitwise_the_same(names: list[str], twice: bool) -> None:
    model, batch = Language(), texts()
    assert_same(
        outcome(model, language_loss, batch, put(*names), twice=twice),
        outcome(model, language_loss, batch, twice=twice),
    )


@pytest.mark.parametrize("names", [["stem", "body", "tail"], ["stem.0:2", "body.1:4"], ["", "body"]], ids=str)
def test_convolutions_are_bitwise_the_same(names: list[str]) -> None:
    model, batch = Images(), images()
    assert_same(outcome(model, image_loss, batch, put(*names)), outcome(model, image_loss, batch))


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize(
    ("recomputed", "offloaded"),
    [
        (LAYERS, LAYERS),
        (LAYERS[:1], LAYERS[1:]),
        ([""], LAYERS),
        (LAYERS, [""]),
        (["layers.0", "layers.1.out.0:2"], ["layers.0.mixing", "layers.1.out.0:2"]),
    ],
    ids=str,
)
def test_together_with_recompute(order: int, recomputed: list[str], offloaded: list[str]) -> None:
    model, batch, pool = Language(), texts(), HostPool()

    def both(model: nn.Module) -> Any:
        levers: list[Callable[[], Any]] = [
            lambda: recompute(model, recomputed),
            lambda: offload(model, offloaded, pool=pool),
        ]
        handles = [put() for put in (levers if order else levers[::-1])]
        handles[1]._undo.append(handles[0].remove)
        return handles[1]

    assert_same(outcome(model, language_loss, batch, both), outcome(model, language_loss, batch))
    assert pool.used == 0


class Sent(Copied):
    """Notes what is copied."""

    def __init__(self) -> None:
        super().__init__(HostPool())
        self.events: list[tuple[str, int]] = []

    def out(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous()
        self.events.append(("out", tensor.nbytes))
        return super().out(tensor)

    def back(self, kept: Tensor, like: Layout) -> Any:
        brought, arrival = super().back(kept, like)
        self.events.append(("back", brought.untyped_storage().nbytes()))
        return brought, arrival


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    transfer = Sent()
    monkeypatch.setattr("anybatch.levers.offloading.Copied", lambda _: transfer)
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

    def changing(m: Any, x: Tensor) -> Tensor:
        state = torch.rand(4, 8)
        unused.append(x * state)  # saves the state as it is now, and never goes backward
        state.mul_(2)
        m.wanted = state.clone()
        return x * state

    x = torch.rand(4, 8, requires_grad=True)
    model = nn.ModuleList([Once(changing)])
    with offload(model, ["0"]):
        model[0](x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, model[0].wanted)
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


@pytest.mark.parametrize("what", ["saved", "base", "view", "parameter"])
def test_a_saved_tensor_that_is_changed_in_place_is_refused(what: str) -> None:
    model = nn.ModuleList([Once(lambda m, x: (x.view(-1).sin() @ m.weight.view(-1)[:32]) * 1)])
    x = torch.rand(4, 8, requires_grad=True) * 1
    y = x.detach().clone().requires_grad_() * 1
    with offload(model, ["0"]):
        loss = model[0](y)
        with torch.no_grad():
            if what == "saved":
                y.mul_(2)
            elif what == "base":
                y.view(-1).mul_(2)
            elif what == "view":
                y[0].mul_(2)
            else:
                model.get_parameter("0.weight").mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_two_backwards() -> None:
    def both(names: list[str]) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        x = torch.rand(4, 8, dtype=torch.float64, requires_grad=True)
        with offload(model, names):
            loss = model(x).square().sum()
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            first.square().sum().backward(retain_graph=True)
            loss.backward()
        return {f"gradient {n}": p.grad for n, p in [("x", x), *model.named_parameters()]}

    assert_same(both(["0:2", "2"]), both([]))


def test_the_tensors_of_the_block_before_are_asked_for_early(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = Sent()
    monkeypatch.setattr("anybatch.levers.offloading.Copied", lambda _: transfer)
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


def test_a_pool_is_used_again_and_given_everything_back() -> None:
    model, batch, pool = Language(), texts(), HostPool()
    outcome(model, language_loss, batch, put(*LAYERS, pool=pool))
    made = pool.bytes
    assert made > 0
    for _ in range(3):
        outcome(model, language_loss, batch, put(*LAYERS, pool=pool))
    assert (pool.bytes, pool.used) == (made, 0)
    pool.clear()
    assert pool.bytes == 0


def test_a_graph_that_is_dropped_gives_its_buffers_back() -> None:
    model, batch, pool = Language(), texts(), HostPool()
    gc.collect()
    gc.disable()
    try:
        with offload(model, LAYERS, pool=pool):
            loss = language_loss(model, batch)
            assert pool.used > 0
            del loss
        assert pool.used == 0
    finally:
        gc.enable()


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


def test_what_was_brought_goes_again_where_the_graph_stays() -> None:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())))
    x = torch.rand(100, 8)
    with offload(model, ["0:6"], simulate=True):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        there = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
        with LiveBytes([*there, x]) as live:
            base = live.current
            loss.backward(retain_graph=True)
            assert live.peak - base >= 3 * x.nbytes
            assert live.current - base < x.nbytes


@pytest.mark.parametrize("smallest", [16, 1 << 30])
def test_nothing_is_held_by_cycles(smallest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybatch.levers.offloading.SMALLEST", smallest)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), nn.Tanh(), nn.Softmax(1))
    kept: list[weakref.ref[Tensor]] = []
    for module in model.modules():
        module.register_forward_hook(lambda *args: kept.append(weakref.ref(args[2])))
    gc.collect()
    gc.disable()
    try:
        with offload(model, ["0", "1", ""]), recompute(model, ["0"]):
            model(torch.rand(2, 8, requires_grad=True)).sum().backward()
        assert [ref() for ref in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_what_is_on_the_device_is_less_and_the_same_whether_or_not_it_is_copied() -> None:
    """The host's copies are on the CPU too, where they are counted; what is not copied is the difference."""
    model, batch = Language(layers=6, width=16), texts(8)
    names = [f"layers.{i}" for i in range(6)]
    whole = peak(model, language_loss, batch)
    simulated = peak(model, language_loss, batch, put(*names, simulate=True))
    assert simulated < 0.6 * whole
    pool = HostPool()
    outcome(model, language_loss, batch, put(*names, pool=pool))  # fills the pool: from now on no buffer is made
    host = [buffer for free in pool._free.values() for buffer in free]
    assert peak(model, language_loss, batch, put(*names, pool=pool), host) == simulated


def test_recomputed_blocks_keep_their_arguments_on_the_host() -> None:
    model, batch = Language(layers=6, width=16), texts(8)
    names = [f"layers.{i}" for i in range(6)]

    def both(model: nn.Module) -> Any:
        handle = offload(model, names, simulate=True)
        handle._undo.append(recompute(model, names).remove)
        return handle

    def held(put: Any) -> int:
        """Bytes after the forward."""
        ours = copy.deepcopy(model)
        with LiveBytes([*ours.parameters(), *batch.values()]) as live:
            handle = put(ours)
            loss = language_loss(ours, batch)
            found = int(live.current)
            handle.remove()
            del loss
        return found

    stream = 8 * 6 * 16 * 4
    assert held(lambda m: recompute(m, names)) - held(both) >= 5 * stream


@pytest.mark.parametrize("simulate", [False, True])
def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch, simulate: bool) -> None:
    monkeypatch.setattr("anybatch.levers.offloading.SMALLEST", 1024)
    pool = HostPool()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with offload(model, ["0:2"], pool=pool, simulate=simulate):
        loss = model(torch.rand(31, 8)).sum()
        assert pool.used == 0
        del loss
        loss = model(torch.rand(33, 8)).sum()
        assert (pool.used > 0) == (not simulate)
        del loss


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


@pytest.mark.gpu
def test_on_a_gpu_it_is_bitwise_the_same_and_takes_less() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.Dropout(0.1)) for _ in range(8)]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(4096, 512, device="cuda")
    pool = HostPool()
    found = []
    for names in ([], [str(i) for i in range(8)]):
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            torch.manual_seed(1)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with offload(model, names, pool=pool):
                model(x).square().mean().backward()
            torch.cuda.synchronize()
            top = torch.cuda.max_memory_allocated()
        grads = {f"gradient {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((grads, top))
    assert_same(found[1][0], found[0][0])
    assert found[1][1] < 0.7 * found[0][1]
    assert pool.used == 0
