"""The doctor says the same of a training in whatever way anybatch runs it, and however the doctor was attached."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch
import verbs_programs as programs
from verbs_programs import FAULTS, HEALTHY, Program

WAYS: dict[str, Callable[..., Iterator[None]]] = {
    "plain": programs.plain,
    "backward": programs.by_backward,
    "micro_batch_size": partial(programs.by_step, micro_batch_size=8),
    "memory": partial(programs.by_step, memory="1GiB"),
    "plan": programs.by_plan,
}
WITH_RECORDER = ("micro_batch_size", "memory", "plan")


def told(doctor: anybatch.Doctor) -> list[tuple[str, str]]:
    """The findings that are more than a remark: code and module."""
    assert not doctor.failure, doctor.failure
    return [(one.code, one.place.module) for one in doctor.findings if one.severity != "info"]


def from_the_start(make: Callable[[], Program], way: Any, tmp_path: Path) -> anybatch.Doctor:
    """As the command line does: attached before there is anything."""
    with anybatch.Doctor(path=tmp_path / "run.jsonl") as doctor:
        programs.run(way(make()))
    return doctor


def without_subjects(make: Callable[[], Program], way: Any, tmp_path: Path) -> anybatch.Doctor:
    """Attached to what is there, and told of nothing."""
    steps = way(make())
    with anybatch.Doctor() as doctor:
        programs.run(steps)
    return doctor


def with_subjects(make: Callable[[], Program], way: Any, tmp_path: Path) -> anybatch.Doctor:
    """Told of the model and the optimizer."""
    program = make()
    with anybatch.Doctor(program.model, program.optimizer) as doctor:
        programs.run(way(program))
    return doctor


def as_recorder(make: Callable[[], Program], way: Any, tmp_path: Path) -> anybatch.Doctor:
    """Given to the step."""
    doctor = anybatch.Doctor()
    programs.run(way(make(), recorder=doctor))
    doctor.close()
    return doctor


ATTACHED = (from_the_start, without_subjects, with_subjects, as_recorder)
CELLS = [
    pytest.param(attached, name, id=f"{attached.__name__}-{name}")
    for attached in ATTACHED
    for name in WAYS
    if attached is not as_recorder or name in WITH_RECORDER
]


@pytest.mark.parametrize(("attached", "way"), CELLS)
@pytest.mark.parametrize("make", FAULTS, ids=lambda make: make.__name__)
def test_a_fault_is_found(make: Any, attached: Any, way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    code, module = FAULTS[make]
    found = told(attached(make, WAYS[way], tmp_path))
    assert found, "healthy"
    assert found[0][0] == code, found
    assert found[0][1].endswith(module), found


@pytest.mark.parametrize(("attached", "way"), CELLS)
@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__name__)
def test_nothing_is_said_of_a_healthy_one(make: Any, attached: Any, way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert told(attached(make, WAYS[way], tmp_path)) == []


def test_a_loss_over_labels_that_is_weighted_by_samples_is_told_of() -> None:
    program = programs.uneven_labels()
    program.count = anybatch.count_samples
    with anybatch.Doctor() as doctor:
        programs.run(programs.by_step(program, micro_batch_size=8))
    assert told(doctor) == [("AB356", "")]


def test_an_optimizer_that_was_not_seen_being_made_is_not_said_to_be_made_where_it_was_first_seen() -> None:
    program = programs.head_forgotten()
    with anybatch.Doctor(program.model, program.optimizer) as doctor:
        programs.run(programs.plain(program))
    assert "(first seen at " in doctor.findings[0].cause


def test_what_nobody_trains_has_the_name_of_the_optimizer_that_holds_it() -> None:
    from anybatch.doctor.diagnosing import diagnosis

    program = programs.head_of_another_shape()
    with anybatch.Doctor(program.model, program.optimizer) as doctor:
        programs.run(programs.plain(program))
    left = [cell for cell in diagnosis(doctor.run).cells if cell.why == "no gradient arrives"]
    assert [cell.module.endswith(".param_groups[0]") for cell in left] == [True]
