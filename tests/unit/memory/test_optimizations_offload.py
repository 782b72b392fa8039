"""Offloaded blocks give the same in every bit; what is on the device, when, and what stays there."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch.memory.checkpointing import recompute
from anybatch.memory.offloading import HostPool, offload
from optimizations_models import (
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
from test_optimizations_copies import Once

LAYERS = ["layers.0", "layers.1", "layers.2"]


def put(*names: str, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: offload(model, names, **options)


@pytest.fixture(autouse=True)
def everything_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models: everything from 16 bytes on is sent to the host."""
    monkeypatch.setattr("anybatch.memory.offloading.SMALLEST", 16)


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
        optimizations: list[Callable[[], Any]] = [
            lambda: recompute(model, recomputed),
            lambda: offload(model, offloaded, pool=pool),
        ]
        handles = [put() for put in (optimizations if order else optimizations[::-1])]
        handles[1].callback(handles[0].remove)
        return handles[1]

    assert_same(outcome(model, language_loss, batch, both), outcome(model, language_loss, batch))
    assert pool.used == 0


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
    monkeypatch.setattr("anybatch.memory.offloading.SMALLEST", smallest)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), nn.Tanh(), nn.Softmax(1))
    kept: list[weakref.ref[Tensor]] = []
    for module in model.modules():
        module.register_forward_hook(lambda *args: kept.append(weakref.ref(args[2])))
    gc.collect()
    gc.disable()
    try:
        with offload(model, ["0", "1", ""]), recompute(model, ["0"]):
            model(torch.rand(2, 8, requires_grad=True)).sum().backward()
            model(torch.rand(2, 8, requires_grad=True))  # whose graph is dropped as it is
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
        handle.callback(recompute(model, names).remove)
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
    monkeypatch.setattr("anybatch.memory.offloading.SMALLEST", 1024)
    pool = HostPool()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with offload(model, ["0:2"], pool=pool, simulate=simulate):
        loss = model(torch.rand(31, 8)).sum()
        assert pool.used == 0
        del loss
        loss = model(torch.rand(33, 8)).sum()
        assert (pool.used > 0) == (not simulate)
        del loss


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
