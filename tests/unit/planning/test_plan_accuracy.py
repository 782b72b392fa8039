"""The peak that a plan predicts from micro-batches of two and four samples is the one that is measured."""

from typing import Any

import pytest

import anybatch
from planning_models import FACTORIES, NAMES, Subject
from planning_truth import peak_of_step, peak_of_whole

PLENTY = 2**40


def plan_of(subject: Subject, batch: Any, memory: int, **options: Any) -> anybatch.Plan:
    return anybatch.plan(
        subject.model, subject.loss_fn, batch, subject.make_optimizer(subject.model.parameters()), memory=memory,
        **{"autocast": subject.autocast, **subject.options, **options},
    )  # fmt: skip


def assert_accurate(predicted: int, measured: int, tolerance: float) -> None:
    error = predicted / measured - 1
    assert abs(error) <= tolerance, f"predicted {predicted} bytes, measured {measured}: {error:+.3%}"


@pytest.mark.parametrize("samples", [16, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_batch_and_what_is_chosen_under_a_third(name: str, samples: int) -> None:
    """With several micro-batches, blocks recomputed, and a loss in chunks where that helps."""
    subject = FACTORIES[name]()
    batch, whole = subject.make_batch(samples), peak_of_whole(FACTORIES[name](), samples)
    found = plan_of(subject, batch, whole // 3 if subject.splits else whole)
    assert_accurate(found.whole_bytes, whole, subject.tolerance)
    measured = peak_of_step(FACTORIES[name]().step(plan=found), batch)
    assert_accurate(found.peak_bytes, measured, subject.tolerance)
    assert found.chosen.confidence == ("measured" if subject.needs_real_probes else "predicted")


@pytest.mark.parametrize("name", ["transformer", "unet", "gru", "raw_texts"])
def test_without_optimizations_the_size_is_all(name: str) -> None:
    subject = FACTORIES[name]()
    batch = subject.make_batch(16)
    found = plan_of(subject, batch, peak_of_whole(FACTORIES[name](), 16) // 2, allow=())
    assert found.micro_batches > 1
    assert not found.chosen.optimizations
    step = FACTORIES[name]().step(micro_batch_size=found.micro_batch_size)
    assert_accurate(found.peak_bytes, peak_of_step(step, batch), subject.tolerance)


@pytest.mark.parametrize("name", ["vision_transformer", "experts", "cnn_groupnorm", "lstm"])
def test_clipping_and_another_last_micro_batch_count_too(name: str) -> None:
    subject = FACTORIES[name]()
    batch = subject.make_batch(13)
    found = plan_of(subject, batch, peak_of_whole(FACTORIES[name](), 13) // 3, clip_norm=1.0)
    step = FACTORIES[name]().step(plan=found, clip_norm=1.0)
    assert_accurate(found.peak_bytes, peak_of_step(step, batch), subject.tolerance)
