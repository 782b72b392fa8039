"""Calls that are recorded as repetitions are read as if each had been recorded in full, whichever step differs."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from anybatch import Doctor
from anybatch.doctor.recording import recordings
from anybatch.records.events import Ended, Forward, Stepped
from anybatch.records.lines import Fact, from_line
from anybatch.records.samples import Memory, NonFinite
from diagonals import diagonals
from odd_loops import ODD, OF_SCALERS, STEPS, Loop


def told(fact: Fact) -> Fact:
    """Without what differs from run to run, and without numbers that are counted in one step of eight."""
    if isinstance(fact, Forward):
        return replace(fact, seconds=0.0)
    if isinstance(fact, Memory):
        return replace(fact, resident=0, graphs=0, losses=0)
    return replace(fact, seconds=0.0, own_seconds=0.0, asked_seconds=0.0) if isinstance(fact, Ended) else fact


def recorded(loop: Callable[[Doctor], None], path: Path | None = None) -> tuple[list[Fact], Counter[str]]:
    """The facts of a run, and how many rows of the record were steps and other calls."""
    with Doctor(path=path) as doctor:
        loop(doctor)
    assert doctor.failure == ""
    rows = Counter("step" if isinstance(row[0], Stepped) else "call" for row in doctor._journal.rows)
    return [told(fact) for fact in doctor.run.facts], rows


@contextmanager
def in_full() -> Iterator[None]:
    """Has every call recorded by itself."""
    most, recordings._MOST_KNOWN = recordings._MOST_KNOWN, 0
    try:
        yield
    finally:
        recordings._MOST_KNOWN = most


def compared(make: Callable[[], Callable[[Doctor], None]]) -> Counter[str]:
    found, rows = recorded(make())
    with in_full():
        expected, none = recorded(make())
    assert not none
    assert [fact.at for fact in found] == list(range(len(found)))
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one == other or repr(one) == repr(other)  # nan is not itself
    return rows


@pytest.mark.parametrize(
    ("clears", "parts", "way"),
    diagonals(
        ["before", "after", "last", "never"], [1, 3],
        [(False, ""), (True, ""), (False, "fused"), (True, "unscaled")], each=2,
    ),
)  # fmt: skip
def test_a_steady_run_is_recorded_in_whole_steps(clears: str, parts: int, way: tuple[bool, str]) -> None:
    clips, scales = way
    rows = compared(lambda: Loop({}, parts=parts, clears=clears, clips=clips, scales=scales))
    if clears != "never" or parts == 1:  # else its backwards keep what the one before left, in turn
        assert rows["step"] >= (25 if clips and scales else 35)  # each scale has clippings of its own


@pytest.mark.parametrize(("odd", "clears", "clips"), diagonals(ODD, ["before", "after", "last"], [False, True]))
def test_a_step_that_differs_is_recorded_call_by_call(odd: str, clears: str, clips: bool) -> None:
    """Step 37 lies between two samples, behind many steps that were alike."""
    rows = compared(lambda: Loop({37: odd}, clears=clears, clips=clips))
    assert rows["step"] >= 20


@pytest.mark.parametrize(
    ("odd", "way"),
    diagonals([*ODD, *OF_SCALERS], [("last", "scaled"), ("before", "unscaled"), ("last", "fused")]),
)
def test_a_step_of_a_scaler_that_differs_is_recorded_call_by_call(odd: str, way: tuple[str, str]) -> None:
    clears, scales = way
    rows = compared(lambda: Loop({37: odd}, clears=clears, clips=scales == "unscaled", scales=scales))
    assert rows["step"] >= 12


@settings(max_examples=max(5, settings().max_examples // 50), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    odd=st.dictionaries(st.integers(0, STEPS - 1), st.sampled_from([*ODD, *OF_SCALERS]), max_size=8),
    parts=st.integers(1, 3),
    clears=st.sampled_from(["before", "after", "last", "never"]),
    to_none=st.booleans(),
    clips=st.booleans(),
    scales=st.sampled_from(["", "scaled", "unscaled", "fused"]),
)
def test_any_steps_that_differ(
    odd: dict[int, str], parts: int, clears: str, to_none: bool, clips: bool, scales: str
) -> None:
    compared(lambda: Loop(odd, parts=parts, clears=clears, to_none=to_none, clips=clips, scales=scales))


def test_gradients_that_are_kept_as_zeros_are_not_taken_for_cleared_by_hand() -> None:
    compared(lambda: Loop({37: "another loss", 45: "a smaller batch"}, to_none=False))


def test_gradients_that_are_not_finite_are_told_of_the_step_in_which_they_come() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Doctor() as doctor:
        for step in range(40):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 2)).square().mean() + 0.0
            if step == 37:
                loss.register_hook(lambda gradient: gradient * float("inf"))
            loss.backward()
            optimizer.step()
    (found,) = doctor.run.of(NonFinite)
    assert found.step - found.late == 37


def test_what_is_not_in_the_order_of_calls_is_seen_with_the_next_sample() -> None:
    """The mode of an inner module, say: to look at each in every step is what costs time."""
    loop = Loop({})

    def run(doctor: Doctor) -> None:
        for step in range(80):
            loop.norm.train(step < 37)
            loop.step("")

    facts, _ = recorded(run)
    evaluated = [fact.step for fact in facts if isinstance(fact, Forward) and fact.evaluated]
    assert evaluated[0] in range(37, 51)
    assert set(evaluated) == set(range(evaluated[0], 80))


def test_a_file_holds_the_same(tmp_path: Path) -> None:
    odd = {30: "evaluation", 44: "clips"}
    in_memory, _ = recorded(Loop(odd))
    in_file, _ = recorded(Loop(odd), tmp_path / "run.jsonl")
    assert [one for one in in_file[1:] if not isinstance(one, Memory)] == [
        one for one in in_memory[1:] if not isinstance(one, Memory)
    ]
    lines = [from_line(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert sum(isinstance(one, Stepped) for one in lines) < 20


def test_graphs_that_are_kept_are_counted_as_far_as_one_step_in_eight_tells() -> None:
    loop, kept = Loop({}), list[torch.Tensor]()

    def run(doctor: Doctor) -> None:
        for _ in range(STEPS):
            kept.append(loop.loss(""))
            loop.optimizer.zero_grad()
            kept[-1].backward()
            loop.optimizer.step()

    with Doctor() as doctor:
        run(doctor)
    found = {fact.step: fact.losses for fact in doctor.run.of(Memory) if fact.step >= 20}
    assert found
    assert all(abs(losses - step) <= 4 for step, losses in found.items()), found


def test_nothing_of_the_user_is_kept_alive() -> None:
    loop = Loop({})
    with Doctor() as doctor:
        for _ in range(STEPS - 10):
            loop.step("")
        assert doctor._journal.rows
        gone = weakref.ref(loop.optimizer)
        del loop
        gc.collect()
        assert gone() is None


def test_the_last_inputs_are_those_of_the_last_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Doctor() as doctor:
        for step in range(44):
            optimizer.zero_grad()
            F.mse_loss(model(torch.full((4, 2), float(step))), torch.zeros(4, 1)).backward()
            optimizer.step()
        ((_, args, _),) = doctor.last_inputs.values()
        assert args[0][0, 0] == 43
        optimizer.zero_grad()
        loss = F.mse_loss(model(torch.full((4, 2), -1.0)), torch.zeros(4, 1))
        ((_, args, _),) = doctor.last_inputs.values()
        assert args[0][0, 0] == -1
        loss.backward()


def test_a_graph_behind_the_inputs_is_not_kept_alive() -> None:
    """A model whose inputs another one made: they would hold that one's graph until the next forward."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-3)
    with Doctor() as doctor:
        for _ in range(40):
            optimizer.zero_grad()
            made = first(torch.randn(4, 2))
            held = weakref.ref(made)
            second(made).mean().backward()
            optimizer.step()
            del made
            assert held() is None
        assert doctor._journal.rows


def test_an_error_of_its_own_in_a_repeated_step_does_not_reach_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("own")

    loop = Loop({})
    with Doctor() as doctor:
        for step in range(40):
            if step == 30:
                monkeypatch.setattr(recordings.Recording, "note", fail)
            loop.step("")
    assert "own" in doctor.failure
