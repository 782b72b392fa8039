"""Every memory optimization, every pair and all three: under a step, in backward, on fakes, out of memory."""

import copy
import functools
import itertools
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.memory.application import apply_optimizations
from anybatch.memory.offloading import HostPool
from anybatch.tensors.fakes import Fakes, swapped
from diagonals import diagonals
from faults import CtrlCAt, OutOfMemoryAt, different, facts, quick_collections
from optimizations_models import (
    VOCABULARY,
    Images,
    Language,
    LiveBytes,
    assert_near,
    assert_same,
    attributes,
    image_loss,
    images,
    language_loss,
    outcome,
    texts,
)

LAYERS = ("layers.0", "layers.1", "layers.2")
PARTS: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": LAYERS},
    "offload": {"offload": LAYERS[1:]},
    "chunks": {"head": "head", "loss_chunks": 4},
}
COMBINATIONS = [names for size in (1, 2, 3) for names in itertools.combinations(PARTS, size)]


def options_of(names: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for name in names for key, value in PARTS[name].items()}


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    with quick_collections():
        logging.disable()  # a warning for each of hundreds of retries
        yield
        logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def everything_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybatch.memory.offloading.SMALLEST", 64)


@pytest.mark.parametrize("names", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("twice", [False, True])
def test_one_forward_and_backward(names: tuple[str, ...], twice: bool) -> None:
    model, batch = Language().double(), texts()
    applied = []

    def put(model: nn.Module) -> Any:
        applied.append(apply_optimizations(model, **options_of(names)))
        return applied[-1]

    check = assert_near if "chunks" in names else assert_same
    check(outcome(model, language_loss, batch, put, twice=twice), outcome(model, language_loss, batch, twice=twice))
    assert applied[0].taken == ("chunks" in names) * (1 + twice)


@pytest.mark.parametrize("names", [names for names in COMBINATIONS if "chunks" not in names], ids="-".join)
def test_images(names: tuple[str, ...]) -> None:
    model, batch = Images(), images()
    options: dict[str, Any] = {name: (["stem", "body"] if name == "recompute" else ["body", "tail"]) for name in names}
    assert_same(
        outcome(model, image_loss, batch, lambda m: apply_optimizations(m, **options)),
        outcome(model, image_loss, batch),
    )


def autocast_loss(model: Any, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return language_loss(model, batch)


@pytest.mark.parametrize("names", COMBINATIONS, ids="-".join)
def test_autocast(names: tuple[str, ...]) -> None:
    model, batch = Language(), texts()
    found = outcome(model, autocast_loss, batch, lambda m: apply_optimizations(m, **options_of(names)))
    plain = outcome(model, autocast_loss, batch)
    if "chunks" in names:
        assert_near(found, plain, 2e-2)
    else:
        assert_same(found, plain)


def generator_loss(model: Any, batch: Any) -> Any:
    """A cut trunk, the same head on two parts of it, and a metric that looks at the logits."""
    stream = model.tokens(batch["x"])
    for layer in model.layers:
        stream = layer(stream, scale=0.5, extra={"positions": [model.positions]})["stream"]
    right = torch.zeros(len(stream))
    with anybatch.cut(model.norm(stream)) as hidden:
        for name, part in (("early", slice(0, 3)), ("late", slice(3, 6))):
            logits = model.head(hidden[:, part])
            yield name, F.cross_entropy(logits.mT, batch["y"][:, part].clamp(min=0))
            right += logits.detach().argmax(-1).eq(batch["y"][:, part]).sum(1)
    return {"right": right}


def mean_loss(model: Any, batch: Any) -> anybatch.Mean:
    logits, _ = model(batch["x"])
    total = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum")
    return anybatch.Mean(total, (batch["y"] != -100).sum())


class WithLoss(nn.Module):
    """Computes its loss itself, as models of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Language()

    def forward(self, batch: Any) -> dict[str, Any]:
        logits, penalty = self.inner(batch["x"])
        loss = F.cross_entropy(logits.float().view(-1, VOCABULARY), batch["y"].view(-1))
        return {"loss": loss + penalty, "logits": logits}


def test_a_model_that_computes_its_loss_itself() -> None:
    model, batch = WithLoss(), texts()
    applied = []

    def put(model: nn.Module) -> Any:
        applied.append(apply_optimizations(model, recompute=[""], offload=[""], head="inner.head", loss_chunks=3))
        return applied[-1]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        loss: Tensor = model(batch)["loss"]
        return loss

    assert_near(outcome(model, loss_fn, batch, put), outcome(model, loss_fn, batch), 1e-6)
    assert (applied[0].taken, applied[0].computed) == (1, 0)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {"scalar": language_loss, "yields": generator_loss, "mean": mean_loss}


@pytest.mark.parametrize(
    ("names", "loss", "size"), diagonals([*COMBINATIONS[:2], *COMBINATIONS[3:]], [*LOSSES], [None, 2], each=2)
)
def test_under_backward(names: tuple[str, ...], loss: str, size: int | None) -> None:
    model, batch = Language().double(), texts()
    found = []
    for chosen in ((), names):
        ours = copy.deepcopy(model)
        torch.manual_seed(2)
        with apply_optimizations(ours, **options_of(chosen)):
            out = anybatch.backward(ours, LOSSES[loss], batch, micro_batch_size=size)
        grads: dict[str, Any] = {f"gradient {n}": p.grad for n, p in ours.named_parameters()}
        metrics = {name: torch.as_tensor(value) for name, value in out.metrics.items()}
        found.append({"loss": torch.tensor(out.loss, dtype=torch.float64), "random": torch.rand(1), **grads, **metrics})
    (assert_near if "chunks" in names else assert_same)(found[1], found[0])


@pytest.mark.parametrize("names", COMBINATIONS, ids="-".join)
def test_under_a_step(names: tuple[str, ...]) -> None:
    batch, pool, found = texts(), HostPool(), []
    for chosen in ((), names):
        torch.manual_seed(3)
        model = Language().double()
        step = anybatch.TrainStep(
            model, language_loss, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=2, clip_norm=1.0
        )
        before = dict(attributes(model))
        for _ in range(3):
            with apply_optimizations(model, pool=pool, **options_of(chosen)):
                out = step(batch)
        assert dict(attributes(model)) == before
        weights = {f"gradient {n}": p.detach().clone() for n, p in model.named_parameters()}
        found.append({"loss": torch.tensor(out.loss, dtype=torch.float64), "random": torch.rand(2), **weights})
    (assert_near if "chunks" in names else assert_same)(found[1], found[0])
    assert pool.used == 0


# --- bytes -----------------------------------------------------------------------------------------------------------


def simulated(names: tuple[str, ...]) -> dict[str, Any]:
    """The options for all layers."""
    options = options_of(names)
    chosen: dict[str, Any] = {key: LAYERS for key in ("recompute", "offload") if key in options}
    return {**options, **chosen, "simulate_offload": True}


@functools.cache
def traced(rows: int, names: tuple[str, ...], *, fake: bool) -> LiveBytes:
    """The second of two passes over a batch."""
    torch.manual_seed(0)
    model, batch, options = Language(layers=3, width=16), texts(rows), simulated(names)
    if not fake:
        return _second_pass(model, batch, options)
    fakes = Fakes()
    with swapped(fakes, [model]):
        batch = {name: fakes.like(tensor) for name, tensor in batch.items()}
        with fakes.mode:
            return _second_pass(model, batch, options)


def _second_pass(model: nn.Module, batch: Any, options: dict[str, Any]) -> LiveBytes:
    trace = LiveBytes()
    for _ in range(2):
        there = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
        trace = LiveBytes([*there, *batch.values()])
        with apply_optimizations(model, **options), trace:
            language_loss(model, batch).backward()
    return trace


@pytest.mark.parametrize("names", [(), *COMBINATIONS], ids="-".join)
def test_fake_tensors_take_the_bytes_of_real_ones(names: tuple[str, ...]) -> None:
    real, fake = (traced(4, names, fake=fake) for fake in (False, True))
    assert fake.operations == real.operations
    assert fake.bytes == real.bytes


@pytest.mark.parametrize("names", [(), *COMBINATIONS], ids="-".join)
def test_operations_do_not_depend_on_the_size(names: tuple[str, ...]) -> None:
    """So that bytes of two small sizes tell those of a large one; the last chunk may be a row off."""
    two, four, large = (traced(rows, names, fake=True) for rows in (2, 4, 64))
    assert two.operations == four.operations == large.operations
    predicted = max(a + (b - a) * 31 for a, b in zip(two.bytes, four.bytes, strict=True))
    assert abs(predicted - large.peak) <= 0.01 * large.peak


def test_each_optimization_takes_less_and_all_together_least() -> None:
    peaks = {names: traced(64, names, fake=True).peak for names in [(), *COMBINATIONS]}
    assert all(peaks[names] < peaks[()] for names in COMBINATIONS)
    assert min(peaks, key=lambda names: peaks[names]) == ("recompute", "offload", "chunks")
    assert peaks["recompute", "offload", "chunks"] < 0.5 * peaks[()]


def test_fakes_leave_no_trace() -> None:
    options = {**options_of(COMBINATIONS[-1]), "simulate_offload": True}
    model, batch = Language(), texts()
    plain = outcome(model, language_loss, batch)
    fakes = Fakes()
    with swapped(fakes, [model]), fakes.mode, apply_optimizations(model, **options):
        language_loss(model, {name: fakes.like(tensor) for name, tensor in batch.items()}).backward()
    for parameter in model.parameters():
        parameter.grad = None
    assert_same(outcome(model, language_loss, batch), plain)


# --- when memory runs out ---------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "recompute": ["layers.0"],
    "offload": ["layers.0", "layers.1"],
    "head": "head",
    "loss_chunks": 2,
}


class Bench:
    """A step with all memory optimizations on, the same at every start."""

    def __init__(self, micro_batch_size: int = 2, verify: Any = "first") -> None:
        torch.manual_seed(4)
        self.model, self.batch = Language(layers=2, width=4), texts(2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.pool = HostPool()
        self.step = anybatch.TrainStep(
            self.model, language_loss, self.optimizer, micro_batch_size=micro_batch_size, clip_norm=1.0, verify=verify
        )

    def run(self) -> anybatch.StepResult:
        with apply_optimizations(self.model, pool=self.pool, **SMALL):
            return self.step(self.batch)

    def facts(self) -> dict[str, Any]:
        return facts(self.model, [self.optimizer], step=self.step)


def test_memory_that_runs_out_anywhere_leads_to_the_same_weights() -> None:
    references = {}
    for size in (2, 1):
        bench = Bench(size)
        bench.run()
        references[size] = bench.facts()
    wrong: dict[str, Any] = {}
    recovered = 0
    for number in itertools.count(1, 61):
        bench = Bench(verify="off" if recovered % 8 else "first")  # nobody sees the operations of a proof
        with OutOfMemoryAt(number) as memory:
            try:
                out = bench.run()
            except anybatch.UpdateInterrupted:
                continue
        if not memory.has_raised:
            break
        recovered += 1
        names = different(references[int(out.attempts[-1].micro_batch_size)], bench.facts())
        if names or bench.pool.used:
            wrong[f"{number} {memory.operations[number - 1]}"] = names, bench.pool.used
    assert not wrong
    assert recovered > 12


def test_ctrl_c_leaves_the_optimizations_off() -> None:
    bench = Bench()
    before = dict(attributes(bench.model))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
    for number in (40, 160, 320):
        with pytest.raises(KeyboardInterrupt), CtrlCAt(number):
            bench.run()
        assert dict(attributes(bench.model)) == before
    bench.run()
    assert bench.pool.used == 0


def test_a_backward_that_fails_half_way_gives_everything_back() -> None:
    model, batch, pool = Language(), texts(), HostPool()
    with apply_optimizations(model, recompute=["layers.0"], offload=LAYERS, pool=pool):
        loss = language_loss(model, batch)
        with OutOfMemoryAt(60):
            try:
                loss.backward()
            except torch.OutOfMemoryError:
                pass
            else:
                pytest.fail("nothing ran out of memory")
        del loss
        # What torch's engine had still to do holds its part of the graph until the next backward of this thread.
        torch.zeros((), requires_grad=True).mul(2).backward()
        assert pool.used == 0
        language_loss(model, batch).backward()
        assert pool.used == 0
