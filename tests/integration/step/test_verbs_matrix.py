"""The doctor says the same of a training in whatever way anybatch runs it, and however the doctor was attached."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch
import verbs_programs as programs
from doctor_scripts import forked_doctor
from verbs_programs import FAULTS, HEALTHY, Program

WAYS: dict[str, Callable[..., Iterator[None]]] = {
    "plain": programs.plain,
    "backward": programs.by_backward,
    "several backwards": programs.by_several_backwards,
    "micro_batch_size": partial(programs.by_step, micro_batch_size=8),
    "many micro-batches": partial(programs.by_step, micro_batch_size=2),
    "memory": partial(programs.by_step, memory="1GiB"),
    "smallest budget": programs.by_smallest_budget,
    "plan": programs.by_plan,
    "train_step": programs.by_accelerate,
    "ExactGradient": programs.by_lightning,
    "ExactTrainer": programs.by_transformers,
}
HOSTS_WARN = tuple(
    pytest.mark.filterwarnings(f"ignore{what}")
    for what in (
        "::UserWarning:lightning",
        "::FutureWarning",
        "::DeprecationWarning",
        ":.*does not have many workers.*",
    )
)
NEEDS = {"train_step": "accelerate", "ExactGradient": "lightning", "ExactTrainer": "transformers"}
WITH_RECORDER = ("micro_batch_size", "many micro-batches", "memory", "smallest budget", "plan", "train_step")


def told(doctor: anybatch.Doctor) -> list[tuple[str, str]]:
    """The findings that are more than a remark: their codes, and what they name."""
    assert not doctor.failure, doctor.failure
    found = [one for one in doctor.findings if one.severity != "info"]
    return [(one.code, " ".join([one.place.module, *one.place.parameters])) for one in found]


def from_the_start(make: Callable[[], Program], way: Any, tmp_path: Path) -> anybatch.Doctor:
    """As the command line does: attached before there is anything."""
    with anybatch.Doctor(path=tmp_path / "run.jsonl") as doctor:
        programs.run(way(make()))
    return doctor


def without_subjects(make: Callable[[], Program], way: Any, tmp_path: Path) -> anybatch.Doctor:
    """Attached to what is there, and notified of nothing."""
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


def cells(programs_of: Any) -> list[Any]:
    """All cells; for a quick run each program in a third of the ways, and each way of attaching by turns."""
    found = []
    for number, make in enumerate(programs_of):
        for position, way in enumerate(WAYS):
            if make is programs.left_in_evaluation_mode and way == "ExactTrainer":
                continue  # the Trainer sets the mode itself
            able = [one for one in ATTACHED if one is not as_recorder or way in WITH_RECORDER]
            for turn, attached in enumerate(able):
                quick = (number + position) % 3 == 0 and turn == (number + position) // 3 % len(able)
                marks = [*([] if quick else [pytest.mark.slow]), *(HOSTS_WARN if way in NEEDS else ())]
                found.append(
                    pytest.param(make, attached, way, marks=marks, id=f"{make.__name__}-{way}-{attached.__name__}")
                )
    return found


def diagnosed(make: Any, attached: Any, way: str, tmp_path: Path) -> list[tuple[str, str]]:
    """What the doctor says of a cell."""
    if way in NEEDS:
        pytest.importorskip(NEEDS[way])
    torch.manual_seed(0)
    return told(attached(make, WAYS[way], tmp_path))


@pytest.mark.parametrize(("make", "attached", "way"), cells(FAULTS))
def test_a_fault_is_found(make: Any, attached: Any, way: str, tmp_path: Path) -> None:
    code, module = FAULTS[make]
    found = diagnosed(make, attached, way, tmp_path)
    assert found, "healthy"
    assert found[0][0] == code, found
    assert module in found[0][1], found


@pytest.mark.parametrize(("make", "attached", "way"), cells(HEALTHY))
def test_nothing_is_said_of_a_healthy_one(make: Any, attached: Any, way: str, tmp_path: Path) -> None:
    assert diagnosed(make, attached, way, tmp_path) == []


def test_a_loss_over_labels_that_is_weighted_by_samples_is_told_of() -> None:
    program = programs.uneven_labels()
    program.count = anybatch.count_samples
    with anybatch.Doctor() as doctor:
        programs.run(programs.by_step(program, micro_batch_size=8, verify="off"))
    assert [code for code, _ in told(doctor)] == ["AB356"]


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


@pytest.mark.parametrize("way", ["backward", "several backwards"])
def test_gradients_that_nobody_clears_are_told_of_where_they_are_put_aside_meanwhile(way: str) -> None:
    program = programs.healthy()
    program.optimizer.zero_grad = lambda *args, **kwargs: None  # type: ignore[method-assign]
    with anybatch.Doctor() as doctor:
        programs.run(WAYS[way](program))
    assert told(doctor)[0][0] == "AB301"


SCRIPT = """
import sys
import torch
import verbs_programs as programs
torch.manual_seed(0)
make, way, options = getattr(programs, sys.argv[1]), getattr(programs, sys.argv[2]), eval(sys.argv[3])
programs.run(way(make(), **options))
"""


@pytest.mark.parametrize(("make", "way", "options", "code"), [
    ("head_forgotten", "by_step", {"memory": "1GiB"}, "AB101"),
    ("uneven_labels", "by_step", {"micro_batch_size": 8}, None),
    pytest.param("head_of_another_shape", "by_step", {"memory": "1GiB"}, "AB103", marks=pytest.mark.slow),
    pytest.param("trunk_cut_off", "by_smallest_budget", {}, "AB201", marks=pytest.mark.slow),
    pytest.param("updates_rounded_away", "by_plan", {}, "AB557", marks=pytest.mark.slow),
    pytest.param("recomputed", "by_several_backwards", {}, None, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_command_line_says_the_same(make: str, way: str, options: Any, code: str | None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    arguments = ["--json", "out.json", "train.py", make, way, repr(options)]
    done = forked_doctor(tmp_path, *arguments, paths=[Path(__file__).parents[2]])
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["findings"]
    assert [one["code"] for one in found if one["severity"] != "info"][:1] == ([] if code is None else [code])
