"""The noise scale beside a training step: training does not notice, and nothing stays behind.

How it could be silently wrong: hooks that stay after a step, an error or remove(); a measurement that changes what is
trained, takes memory, or waits for the device.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch import NoiseScale
from anybatch.scaling.noisescale import MicroGradients
from noise_models import (
    SIZE,
    Loss,
    Network,
    batch_of,
    plain,
    yielded,
)
from reference import everything, frozen


def trained(with_noise: bool, loss_fn: Loss = plain, **options: Any) -> list[Any]:
    """Everything that a short training leaves behind."""
    torch.manual_seed(3)
    keep = options.pop("keep_gradients", False)
    model = Network(torch.float32)
    model.twice.register_forward_hook(lambda module, args, output: F.dropout(output, 0.2))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    step = anybatch.TrainStep(model, loss_fn, optimizer, **{"micro_batch_size": SIZE, "clip_norm": 1.0, **options})
    if with_noise:
        noise = NoiseScale(step, every=2, keep_gradients=keep)
    losses = [step(batch_of(rows)).loss for rows in (22, 22, 9, 22, 5, 30)]
    if with_noise:
        assert noise.measurements == 3
    return [losses, everything(model, optimizer, step), torch.get_rng_state().tolist()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_fn": yielded, "keep_gradients": True},
        {"keep_gradients": True, "accumulate": "fp32"},
        {"autocast": torch.bfloat16},
        {"scaler": True},
    ],
)
def test_training_is_bitwise_the_same(options: dict[str, Any]) -> None:
    def fresh() -> dict[str, Any]:
        return {**options, **({"scaler": torch.amp.GradScaler("cpu")} if "scaler" in options else {})}

    one, other = trained(True, **fresh()), trained(False, **fresh())
    for state in (one[1], other[1]):
        state.pop("which gradients")
    assert frozen(one) == frozen(other)


def test_only_every_so_many_batches_are_measured_and_a_batch_in_one_piece_waits() -> None:
    model = Network()
    step = anybatch.TrainStep(model, plain, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=SIZE)
    noise = NoiseScale(step, every=3)
    assert "no logical batch" in noise.advice
    seen = []
    for rows in (8, 22, 22, 22, 22, 8, 8, 22, 22):
        step(batch_of(rows))
        seen.append(noise.measurements)
    assert seen == [0, 1, 1, 1, 2, 2, 2, 3, 3]


def test_a_batch_in_one_piece_is_told_and_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = looks(monkeypatch)
    model = Network()
    step = anybatch.TrainStep(model, plain, torch.optim.SGD(model.parameters(), lr=0.1))
    noise = NoiseScale(step)
    step(batch_of())
    assert noise.value is None
    assert not calls
    assert "micro_batch_size=" in noise.advice


def test_a_skipped_update_is_not_measured() -> None:
    def infinite(model: Any, batch: Any) -> torch.Tensor:
        return plain(model, batch) * (float("inf") if infinite_now else 1.0)

    model = Network(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step = anybatch.TrainStep(
        model, infinite, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=8, scaler=scaler
    )
    noise = NoiseScale(step)
    infinite_now = True
    assert step(batch_of()).skipped
    assert noise.measurements == 0
    infinite_now = False
    assert not step(batch_of()).skipped
    assert noise.measurements == 1


def test_a_gradient_that_is_not_finite_is_left_out() -> None:
    model = Network()
    step = anybatch.TrainStep(
        model, lambda m, b: plain(m, b) * float("inf"), torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=8
    )
    noise = NoiseScale(step)
    step(batch_of())
    assert noise.measurements == 0


def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts what hooks see."""
    calls: list[int] = []
    watch = MicroGradients._watch

    def counted(self: MicroGradients, key: int) -> Callable[[Sequence[torch.Tensor]], None]:
        look = watch(self, key)

        def called(gradients: Sequence[torch.Tensor]) -> None:
            calls.append(key)
            look(gradients)

        return called

    monkeypatch.setattr(MicroGradients, "_watch", counted)
    return calls


def graph_of(model: nn.Module) -> torch.Tensor:
    """A graph that has the nodes which hooks will be on, and needs no value of the parameters."""
    return torch.stack([p.sum() for p in model.parameters() if p.requires_grad]).sum()


def test_hooks_are_on_while_a_step_is_measured_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = looks(monkeypatch)
    model = Network()
    step = anybatch.TrainStep(model, plain, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=SIZE)
    noise = NoiseScale(step)
    loss = graph_of(model)
    step(batch_of())
    assert len(calls) == 3 * 7  # micro-batches times parameters that get a gradient
    loss.backward()
    step(batch_of())
    assert len(calls) == 21
    noise.remove()
    noise.remove()
    assert step.watcher is None
    step(batch_of())
    assert len(calls) == 21
    assert noise.measurements == 1  # what was measured stays


def test_hooks_come_off_when_the_loss_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = looks(monkeypatch)

    def failing(model: Any, batch: Any) -> torch.Tensor:
        if fails and calls:
            raise ZeroDivisionError
        return plain(model, batch)

    model, fails = Network(), True
    step = anybatch.TrainStep(model, failing, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=SIZE)
    noise = NoiseScale(step)
    loss = graph_of(model)
    with pytest.raises(ZeroDivisionError):
        step(batch_of())
    seen = len(calls)
    assert seen
    loss.backward()
    assert len(calls) == seen
    assert noise.measurements == 0
    fails = False
    step(batch_of())
    assert noise.measurements == 1


def test_as_a_context_manager_it_comes_off() -> None:
    step = anybatch.TrainStep(model := Network(), plain, torch.optim.SGD(model.parameters(), lr=0.1))
    with NoiseScale(step):
        assert step.watcher is not None
        with pytest.raises(anybatch.BatchError, match="measured already"):
            NoiseScale(step)
    assert step.watcher is None


def test_a_loss_that_goes_back_in_pieces_is_refused_at_once() -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, yielded, optimizer, micro_batch_size=SIZE)
    NoiseScale(step)
    batch = batch_of()
    before = everything(model, optimizer, step, with_gradients=False)
    with pytest.raises(anybatch.LossError, match="keep_gradients=True"):
        step(batch)
    assert everything(model, optimizer, step, with_gradients=False) == before


def test_later_it_only_warns() -> None:
    def loss_fn(model: Any, batch: Any) -> Iterator[Any]:
        yield from [plain(model, batch)] if first else yielded(model, batch)

    model, first = Network(), True
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=SIZE)
    noise = NoiseScale(step, every=1)
    step(batch_of())
    first = False
    with pytest.warns(anybatch.AnyBatchWarning, match="several backwards"):
        step(batch_of())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        step(batch_of())
    assert (noise.measurements, step.updates) == (1, 3)


def test_what_cannot_be_measured_is_refused() -> None:
    model = Network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    coupled = anybatch.Coupled(lambda m, b: m(b["x"]), lambda m, outputs: outputs.square().mean())
    over_time = anybatch.OverTime(lambda m, c, s: (m(c["x"]).mean(), s), lambda m, b: torch.zeros(len(b["x"])))
    for loss_fn, said in ((coupled, "all samples together"), (over_time, "keep_gradients=True")):
        with pytest.raises(anybatch.BatchError, match=said):
            NoiseScale(anybatch.TrainStep(model, loss_fn, sgd))
    step = anybatch.TrainStep(model, plain, torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad]))
    with pytest.raises(anybatch.BatchError, match="LBFGS"):
        NoiseScale(step)
    with pytest.raises(anybatch.BatchError, match="expected an anybatch"):
        NoiseScale(model)  # type: ignore[arg-type]


def test_no_copy_of_the_gradient_is_kept() -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    batch = torch.randn(32, 512)

    def peak(measures: bool, keep: bool = False) -> int:
        twin = copy.deepcopy(model)
        step = anybatch.TrainStep(
            twin, lambda m, b: m(b).square().mean(), torch.optim.SGD(twin.parameters(), lr=0.0), micro_batch_size=8
        )
        if measures:
            NoiseScale(step, every=1, keep_gradients=keep)
        step(batch)
        return anybatch.measure(lambda: step(batch), model=twin, batch=batch).peak_bytes

    bare, gradients = peak(False), sum(4 * p.numel() for p in model.parameters())
    assert peak(True) - bare < 0.05 * gradients
    assert peak(True, keep=True) - bare <= 1.1 * gradients


def test_a_saved_state_goes_on() -> None:
    def run(saves: bool) -> NoiseScale:
        torch.manual_seed(1)
        model = Network()
        step = anybatch.TrainStep(model, plain, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=SIZE)
        noise = NoiseScale(step, every=2)
        for number in range(7):
            if saves and number == 3:
                state = noise.state_dict()
                noise.remove()
                noise = NoiseScale(step, every=2)
                noise.load_state_dict(state)
            step(batch_of())
        return noise

    one, other = run(True), run(False)
    assert one.state_dict() == other.state_dict()
    assert one.measurements == 4


def test_the_device_is_asked_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits to be read is bounded, however long nobody reads."""
    monkeypatch.setattr("anybatch.scaling.noisescale._MOST_WAITING", 3)
    model = Network()
    step = anybatch.TrainStep(model, plain, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=SIZE)
    noise = NoiseScale(step, every=1)
    for _ in range(7):
        step(batch_of())
        assert len(noise._waiting) < 3
    assert noise.measurements == 7


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    model = Network(torch.float32).cuda()
    step = anybatch.TrainStep(model, plain, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=SIZE)
    noise = NoiseScale(step, every=1)
    batch = batch_of()
    step(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert noise.measurements == 2


def test_a_gradient_that_no_backward_brought_is_named() -> None:
    model = Network()

    def by_hand(model: Any, batch: Any) -> torch.Tensor:
        loss = plain(model, batch)
        loss.register_hook(lambda _: setattr(model.heads[1].weight, "grad", torch.ones(3, 6, dtype=torch.float64)))
        return loss

    step = anybatch.TrainStep(model, by_hand, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=SIZE)
    noise = NoiseScale(step)
    with pytest.warns(anybatch.AnyBatchWarning, match=r"'heads.1.weight' was put there by something else"):
        step(batch_of())
    assert noise.measurements == 0
