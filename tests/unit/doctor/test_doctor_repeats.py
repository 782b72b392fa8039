"""Steps that are like the one before are recorded by what differs, and read as if they had been recorded in full."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Doctor
from anybatch.doctor.recording import recordings
from anybatch.records.events import Backward, Cleared, Ended, Forward, Stepped
from anybatch.records.lines import Fact, from_line
from anybatch.records.lossfacts import LossCall
from anybatch.records.repeats import Repeats, line_of, repeated, with_repeats
from anybatch.records.samples import Memory

Program = Callable[[], None]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3))


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 4), torch.randint(3, (rows,))


def plain() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        inputs, labels = batch()
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def accumulated() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.9)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for step in range(50):
        for part in range(4):
            inputs, labels = batch(8 if part else 5)
            (criterion(model(inputs), labels) / (4 if step < 30 else 2)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def scheduled() -> None:
    """Another limit from step 37 on, no schedule at step 43, clipping by value from 47 on, of fewer from 52 on."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
    for step in range(60):
        inputs, labels = batch()
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        if step < 47:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 if step < 37 else 0.5)
        else:
            torch.nn.utils.clip_grad_value_((model if step < 52 else model[4]).parameters(), 0.1)
        optimizer.step()
        if step != 43:
            schedule.step()


def forgetful() -> None:
    """From step 35 on nothing is cleared, from 45 on in evaluation mode, and the last loss is not finite."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(55):
        if step < 35:
            model.zero_grad()
        if step == 45:
            model.eval()
        inputs, labels = batch()
        loss = F.cross_entropy(model(inputs), labels)
        if step == 54:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()


def adversarial() -> None:
    judge, maker = network(), nn.Linear(2, 4)
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-3) for one in (maker, judge)]
    for step in range(45):
        for turn, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            made = maker(torch.randn(6, 2))
            loss = judge(made.detach() if turn else made).square().mean()
            if step > 40 and turn:
                loss = loss + judge(torch.zeros(6, 4)).square().mean()
            loss.backward()
            optimizer.step()


def closing() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=2)
    inputs, labels = batch()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        return loss

    for _ in range(40):
        optimizer.step(closure)


def by_hand() -> None:
    """Gradients are cleared and edited by hand, layers freeze, groups come, and validation runs in between."""
    model = network()
    optimizer = torch.optim.SGD(model[4].parameters(), lr=1e-2)
    for step in range(60):
        for parameter in model.parameters():
            parameter.grad = None
        inputs, labels = batch()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        if step == 41:
            for parameter in model[4].parameters():
                parameter.grad = None
        optimizer.step()
        if step == 28:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})
        if step == 33:
            model[0].requires_grad_(False)
        if step == 36:
            model[3].eval()
        if step % 9 == 4:
            model.train(step == 40)
            with torch.no_grad():
                F.cross_entropy(model(inputs), labels)
            model.train()


PROGRAMS = [plain, accumulated, scheduled, forgetful, adversarial, closing, by_hand]


def recorded(program: Program, path: Path | None = None) -> list[Fact]:
    with Doctor(path=path) as doctor:
        program()
    assert doctor.failure == ""
    return [told(fact) for fact in doctor.run.facts]


def told(fact: Fact) -> Fact:
    """Without what differs from run to run."""
    if isinstance(fact, Forward):
        return replace(fact, seconds=0.0)
    if isinstance(fact, Memory):
        return replace(fact, resident=0)
    return replace(fact, seconds=0.0, own_seconds=0.0, asked_seconds=0.0) if isinstance(fact, Ended) else fact


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_record_is_that_of_a_run_without_repetitions(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded(program)
    monkeypatch.setattr(recordings, "_MOST_KNOWN", 0)
    expected = recorded(program)
    assert len(found) == len(expected)
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one == other or repr(one) == repr(other)  # nan is not itself
    assert [fact.at for fact in found] == list(range(len(found)))


@pytest.mark.parametrize("program", [plain, accumulated, scheduled], ids=lambda program: program.__name__)
def test_a_file_holds_the_same(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    in_file, in_memory = recorded(program, path), recorded(program)
    assert [one for one in in_file[1:] if not isinstance(one, Memory)] == [
        one for one in in_memory[1:] if not isinstance(one, Memory)
    ]
    kinds = Counter(type(one).__name__ for one in map(from_line, path.read_text().splitlines()))
    assert kinds["Repeats"] >= 1
    assert kinds["Stepped"] < sum(isinstance(one, Stepped) for one in in_file)


def test_most_of_a_steady_run_is_recorded_as_repetitions() -> None:
    with Doctor() as doctor:
        plain()
    rows = Counter(type(row[0]) for row in doctor._journal.rows)
    assert all(rows[kind] >= 40 for kind in (Forward, LossCall, Backward, Cleared, Stepped)), rows


def test_a_step_that_is_not_sampled_calls_few_functions() -> None:
    """The time that it takes is measured in benchmarks/doctor/overhead.py; this keeps it from growing unseen."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        name = frame.f_code.co_filename
        calls += event == "call" and ("anybatch/doctor" in name or name.startswith("<anybatch doctor"))

    model, (inputs, labels) = network(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Doctor():
        for step in range(44):
            if step == 43:  # one of those whose graph is not followed
                calls = 0
            sys.setprofile(count if step >= 40 else None)
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        sys.setprofile(None)
    assert 10 < calls <= 38


def test_what_does_not_fit_is_left_out_and_counted() -> None:
    with Doctor(max_bytes=40_000) as doctor:
        for _ in range(4):
            plain()
    assert doctor.run.steps < 240
    ended = next(doctor.run.of(Ended))
    assert ended.dropped > 0


def test_lines_of_repetitions_are_read_again() -> None:
    like = Stepped(optimizer=0, with_grad=2, lrs=(0.1,), at=4, step=1)
    rows = [(4, 9, 2, 1, (float("nan"), 0.5)), (77, 10, 2, 2, (0.5,))]
    read = from_line(line_of(rows))
    assert isinstance(read, Repeats)
    assert read.at == 10
    found = with_repeats([Forward(root=0, at=12), like, read], [])
    assert [one.at for one in found] == [4, 9, 12]  # the one that 10 is like was lost
    again = found[1]
    assert isinstance(again, Stepped)
    assert (again.number, again.with_grad, again.lrs[1]) == (1, 2, 0.5)
    assert again.lrs[0] != again.lrs[0]
    assert repeated(Forward(root=0, rows=8), 3, 1, (0.25,)) == Forward(root=0, rows=8, seconds=0.25, at=3, step=1)
