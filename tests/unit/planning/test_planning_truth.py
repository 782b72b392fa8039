"""The referee of the planner's tests is right: by hand, and beside torch's own profiler."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch
from anybatch.tensors.fakes import Fakes
from planning_models import FACTORIES, NAMES, Subject, adamw
from planning_referee import Cap, alive_in, peak_of, tensors_in
from planning_truth import (
    brute_force,
    names_of,
    peak_of_first_call,
    peak_of_step,
    peak_of_whole,
    recomputed,
    sizes_of,
)
from reference import assert_bitwise, gradients_of

KIB = 1024
ACCURATE = 0.0005


def kibibytes(count: int) -> Tensor:
    return torch.zeros(count * KIB, dtype=torch.uint8)


def test_what_lives_at_once_counts_together() -> None:
    def work() -> None:
        one = kibibytes(3)
        del one
        two = kibibytes(2)
        three = kibibytes(5) + 1  # both operands of the addition are alive
        del two, three
        kibibytes(4)

    assert peak_of(work, []) == (2 + 5 + 5) * KIB


def test_storages_count_once_and_views_count_whole() -> None:
    kept = kibibytes(8)

    def work() -> None:
        views = [kept[:10], kept.view(2, -1), kept.detach()]
        del views

    assert peak_of(work, [kept, kept[3:], kept.view(4, -1)]) == 8 * KIB


def test_what_was_alive_before_and_not_told_counts_from_the_start() -> None:
    unknown = kibibytes(7)

    def work() -> None:
        early = kibibytes(10)
        del early
        unknown.sum()

    assert peak_of(work, []) == (7 + 10) * KIB


def test_a_storage_that_grows_counts_at_its_new_size() -> None:
    def work() -> None:
        out = torch.empty(0, dtype=torch.uint8)
        torch.add(kibibytes(4), 1, out=out)

    assert peak_of(work, []) == (4 + 4) * KIB


def test_what_the_work_frees_is_gone() -> None:
    kept = [kibibytes(9)]

    def work() -> None:
        kept.clear()
        kibibytes(4)

    assert peak_of(work, (tensor for tensor in kept)) == 9 * KIB  # not 13


def test_everything_of_a_step_is_alive() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = {"x": torch.randn(4, 3)}
    model(batch["x"]).sum().backward()
    optimizer.step()
    counted = sorted(tensor.nbytes for tensor in alive_in(model, [optimizer], batch))
    weight, vector, scalar = 3 * 2 * 4, 2 * 4, 8
    own = [weight, *[vector] * 3] * 3  # parameters, gradients, momentum
    assert counted == sorted([*own, vector, vector, scalar, batch["x"].nbytes])


def test_fakes_take_no_memory() -> None:
    fakes = Fakes()
    kept = kibibytes(2)

    def work() -> None:
        fake = fakes.like(kept)
        with fakes.mode:
            torch.zeros(KIB) + fake[:KIB]
        torch.ones(1000 * KIB, device="meta").sum()

    assert peak_of(work, [kept]) == 2 * KIB


def test_a_cap_runs_out_of_memory() -> None:
    kept = kibibytes(2)
    with Cap(6 * KIB, [kept]) as cap:
        out = kept + 1
        out = kept + out  # for a moment there are three
        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. 7168 bytes are alive of 6144"):
            kibibytes(3)
        out += kept
    assert cap.raised == 1
    assert cap.peak == 6 * KIB


def test_a_step_under_its_own_peak_just_fits() -> None:
    subject = FACTORIES["plain_mlp"]()
    step, batch = subject.step(), subject.make_batch(8)
    peak = peak_of_step(step, batch)
    with Cap(peak, alive_of(step, batch)) as cap:
        assert step(batch).micro_batches == 1
    assert cap.raised == 0
    with Cap(peak - 1, alive_of(step, batch)) as cap:
        assert step(batch).micro_batches == 2
    assert cap.raised == 1


def test_tensors_in_anything() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    found = list(tensors_in({"a": [torch.ones(1), ("text", torch.ones(2))], "b": packed, "c": 3}))
    assert [len(tensor) for tensor in found] == [1, 2, 5, 3]


def test_a_linear_layer_by_hand() -> None:
    """The largest moment is the gradient of the weights: they, it, the batch, the loss and the gradient of the loss."""
    model = nn.Linear(256, 256, bias=False)
    batch = {"x": torch.randn(8, 256)}
    step = anybatch.TrainStep(model, lambda model, batch: model(batch["x"]).sum(), torch.optim.SGD(model.parameters()))
    weights, rows = 256 * 256 * 4, 8 * 256 * 4
    assert peak_of_step(step, batch) == 2 * weights + rows + 4 + 4


def test_the_second_call_holds_what_the_first_had_not() -> None:
    subject = FACTORIES["plain_mlp"]()
    batch = subject.make_batch(2)
    first = peak_of_first_call(subject.step(), batch)
    second = peak_of_step(FACTORIES["plain_mlp"]().step(), batch)
    momentum = sum(parameter.nbytes for parameter in subject.model.parameters())
    assert first <= second <= first + 2 * momentum


def profiled_peak(step: anybatch.TrainStep, batch: Any) -> int:
    """The peak of the third call by the events of the CPU's allocator, and what was alive before it."""
    step(batch)
    step(batch)
    # The profiler does not tell when something is freed that it did not see being taken, so that goes first.
    step.model.zero_grad()
    gc.collect()
    alive = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive_of(step, batch)}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(batch)
    current = peak = sum(alive.values())
    for event in memory_events(profile):
        current += event
        peak = max(peak, current)
    return peak


def memory_events(profile: Any) -> Iterator[int]:
    """What was allocated (above zero) and freed, in the order of time."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    yield from (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))


def alive_of(step: anybatch.TrainStep, batch: Any) -> Iterator[Tensor]:
    return alive_in(step.model, step._optimizers, batch)


@pytest.mark.parametrize("name", ["plain_mlp", "deep_narrow", "transformer", "vision_transformer", "heterogeneous"])
@pytest.mark.parametrize("samples", [4, 16])
def test_it_agrees_with_the_profiler(name: str, samples: int) -> None:
    subject, other = FACTORIES[name](), FACTORIES[name]()
    batch = subject.make_batch(samples)
    measured = peak_of_step(subject.step(), batch)
    profiled = profiled_peak(other.step(), batch)
    assert abs(measured / profiled - 1) < ACCURATE, (measured, profiled)


@pytest.mark.parametrize("name", NAMES)
def test_activations_outweigh_the_state(name: str) -> None:
    subject = FACTORIES[name]()
    step, batch = subject.step(), subject.make_batch(64)
    peak = peak_of_step(step, batch)
    state = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive_of(step, [])}.values())
    assert peak > 3 * state
    assert 20e6 < peak < 200e6, peak


def test_recomputing_changes_memory_and_no_gradient() -> None:
    subject = FACTORIES["vision_transformer"]()
    batch = subject.make_batch(8)
    anybatch.backward(subject.model, subject.loss_fn, batch)
    plain, peak = gradients_of(subject.model), peak_of_step(subject.step(), batch)
    subject = FACTORIES["vision_transformer"]()
    with recomputed(subject.model, subject.blocks):
        anybatch.backward(subject.model, subject.loss_fn, batch)
        assert_bitwise(gradients_of(subject.model), plain)
        assert peak_of_step(subject.step(), batch) < 0.7 * peak
    assert all("forward" not in vars(module) for module in subject.model.modules())


def tiny() -> Subject:
    """A model whose grid takes a moment."""
    torch.manual_seed(0)
    body = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(*body, nn.Linear(8, 1))
    return Subject(
        "tiny", model, lambda model, batch: model(batch["x"]).mean(),
        lambda samples: {"x": torch.ones(samples, 64, 8)}, adamw, blocks=tuple(map(str, range(6))),
    )  # fmt: skip


def test_brute_force_finds_the_floor_and_the_fastest() -> None:
    whole = peak_of_whole(tiny(), 12)
    found = brute_force(tiny, 12, whole // 2, rounds=3)
    assert sizes_of(tiny(), 12) == [12, 8, 4, 2, 1]
    assert len(found.tried) == 5 * 3
    assert found.tried[0].peak_bytes == whole
    assert found.floor == min(one.peak_bytes for one in found.tried) < whole / 4
    assert found.fastest is not None
    assert found.fastest.peak_bytes <= whole // 2
    timed = [one.seconds for one in found.tried if one.seconds is not None]
    assert len(timed) == sum(one.peak_bytes <= whole // 2 for one in found.tried)
    assert found.fastest.seconds == min(timed)
    peaks = {(one.micro_batch_size, one.recomputed): one.peak_bytes for one in found.tried}
    assert peaks[12, "none"] > peaks[12, "half"] > peaks[12, "all"]
    assert peaks[12, "none"] > peaks[4, "none"] > peaks[1, "none"]


def test_brute_force_knows_what_can_not_be_done() -> None:
    found = brute_force(tiny, 4, 1000)
    assert found.fastest is None
    assert all(one.seconds is None for one in found.tried)
    subject = FACTORIES["cnn_batchnorm"]()
    assert sizes_of(subject, 16) == [16]
    assert names_of(subject, "half") == ("blocks.1",)
