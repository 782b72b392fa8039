"""A record on disk is complete, survives a killed process, keeps to its size, and belongs to one process."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import forked_python
from anybatch.doctor.recorder import Doctor
from anybatch.doctor.recording.journal import Counter, Journal
from anybatch.records.events import Backward, Ended, Forward, Stepped, Warned
from anybatch.records.runs import load_run
from anybatch.records.tables import Started
from doctor_programs import PROGRAMS

TRAIN = """
import os, signal, sys, time, torch
from anybatch.doctor.recorder import Doctor
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
doctor = Doctor(path=sys.argv[1])
doctor.attach()
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
"""


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script that trains."""
    return forked_python.run([sys.executable, "-c", TRAIN + textwrap.dedent(code), str(path)], Path.cwd())


def test_a_file_has_what_memory_has(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Doctor(path=path) as on_disk:
        PROGRAMS["mlp"]()
    with Doctor() as in_memory:
        PROGRAMS["mlp"]()
    kinds = [type(fact).__name__ for fact in load_run(path).facts]
    assert kinds == [type(fact).__name__ for fact in in_memory.run.facts]
    assert kinds[0] == "Started"
    assert kinds[-1] == "Ended"
    assert on_disk.run.steps == 12
    for line in path.read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=pytest.fail)
    copy = tmp_path / "copy.jsonl"
    in_memory.save(copy)
    assert load_run(copy).facts == in_memory.run.facts


def test_numbers_are_in_order_and_steps_grow() -> None:
    with Doctor() as doctor:
        PROGRAMS["gan"]()
    assert [fact.at for fact in doctor.run.facts] == list(range(len(doctor.run.facts)))
    steps = [fact.step for fact in doctor.run.facts]
    assert steps == sorted(steps)
    ended = next(doctor.run.of(Ended))
    assert 0 < ended.own_seconds < ended.seconds


@pytest.mark.parametrize("steps", [1, 5, 10])
def test_a_killed_process_leaves_its_first_steps(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "run.jsonl"
    done = run(f"train({steps})\nos.kill(os.getpid(), signal.SIGKILL)\n", path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list(load_run(path).of(Stepped))) == steps


def test_a_killed_process_leaves_what_came_before_a_later_sample(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    done = run("train(50)\ntime.sleep(0.6)\ntrain(1)\nos.kill(os.getpid(), signal.SIGKILL)\n", path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list(load_run(path).of(Stepped))) == 51  # the last one was sampled


def test_after_its_greatest_size_only_rare_facts_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Doctor(path=path, max_bytes=6000) as doctor:
        PROGRAMS["mlp"]()
        doctor.emit(Warned(category="UserWarning", text="late"))
    ended = next(doctor.run.of(Ended))
    assert ended.dropped > 10
    assert any(fact.text == "late" for fact in doctor.run.of(Warned))
    assert len(list(doctor.run.of(Forward))) < 12


def test_memory_is_capped_too() -> None:
    counter = Counter()
    journal = Journal(counter, None, 1600)
    for _ in range(100):
        journal.emit(Forward(root=0))
    journal.emit(Started())
    assert len(journal.run().facts) == 12
    assert journal.dropped == 89


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    code = """
    train(3)
    child = os.fork()
    if not child:
        train(20)
        doctor.close()
        sys.exit(0)
    os.waitpid(child, 0)
    train(2)
    doctor.close()
    """
    done = run(code, path)
    assert done.returncode == 0, done.stderr
    facts = load_run(path)
    assert [fact.number for fact in facts.of(Stepped)] == [0, 1, 2, 3, 4]
    assert len(list(facts.of(Ended))) == 1
    assert [fact.at for fact in facts.facts] == list(range(len(facts.facts)))


def test_workers_of_a_loader_write_nothing(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8, 2))
    model = torch.nn.Linear(2, 1)
    with Doctor(path=tmp_path / "run.jsonl") as doctor:
        for (x,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=1):
            model(x).sum().backward()
    assert doctor.failure == ""
    assert len(list(doctor.run.of(Backward))) == 2


def test_the_order_at_the_end_is_detach_emit_close(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    doctor = Doctor(path=path, script="train.py", arguments=("--x", "1"))
    doctor.attach()
    doctor.attach()
    doctor.detach()
    doctor.detach()
    doctor.emit(Warned(category="UserWarning", text="probed"))
    doctor.close(exit_code=3)
    doctor.close(exit_code=4)
    facts = load_run(path)
    assert (facts.started.script, facts.started.arguments) == ("train.py", ("--x", "1"))
    assert [type(fact).__name__ for fact in facts.facts] == ["Started", "Warned", "Ended"]
    assert next(facts.of(Ended)).exit_code == 3


def emitted(journal: Journal, count: int = 1) -> None:
    for _ in range(count):
        journal.emit(Warned(category="W", text="x" * 100))
    journal.flush()


def test_a_script_that_closes_what_it_does_not_know_keeps_its_own_files(tmp_path: Path) -> None:
    """As daemons do; the descriptors are then those of files of the script's own."""
    done = run(
        """
        train(3)
        doctor._journal.flush()
        os.closerange(3, 256)
        mine = [open(f"{sys.argv[1]}.{i}", "wb", buffering=0) for i in range(6)]
        train(20)
        for one in mine:
            one.write(b"mine")
        doctor.close()
        """,
        tmp_path / "run.jsonl",
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"run.jsonl.{i}").read_bytes() for i in range(6)] == [b"mine"] * 6
    record = load_run(tmp_path / "run.jsonl")
    assert record.steps == 23
    assert isinstance(record.facts[-1], Ended)


def test_another_file_of_the_name_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(Counter(), path, 10_000)
    emitted(journal)
    path.rename(tmp_path / "mine")
    path.write_text("the user's", encoding="utf-8")
    emitted(journal)
    assert path.read_text(encoding="utf-8") == "the user's"
    assert "is another file now" in journal.lost
    emitted(journal, 3)
    journal.close(Ended())
    assert path.read_text(encoding="utf-8") == "the user's"
    assert len((tmp_path / "mine").read_text(encoding="utf-8").splitlines()) == 1


def test_a_record_that_is_gone_or_that_the_disk_does_not_take_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(Counter(), path, 10_000)
    path.unlink()
    emitted(journal)
    assert journal.lost == "the record can't be written any more: No such file or directory"
    assert not path.exists()
    full = Path("/dev/full")
    if full.exists():
        other = Journal(Counter(), full, 10_000)
        emitted(other)
        assert other.lost == "the record can't be written any more: No space left on device"
    model = torch.nn.Linear(2, 1)
    doctor = Doctor(model, path=path)
    with doctor:
        path.unlink()
        model(torch.ones(4, 2)).mean().backward()
    assert doctor.failure == journal.lost


def test_a_record_is_found_again_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    journal = Journal(Counter(), Path("run.jsonl"), 10_000)
    monkeypatch.chdir("/")
    emitted(journal)
    assert not journal.lost
    assert len((tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()) == 1
