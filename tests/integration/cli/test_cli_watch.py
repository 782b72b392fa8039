"""``anybatch watch``: a run followed from a second process."""

import io
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.text import Text

from anybatch.cli.main import main
from anybatch.cli.watch import Frames, sparkline
from anybatch.records.events import Crashed, Ended, Stepped
from anybatch.records.lines import Fact, to_line
from anybatch.records.samples import NonFinite
from anybatch.records.tables import OptimizerFacts, Started
from doctor_scripts import environment
from source_tree import PACKAGE

LOOP = """
import os, time
import torch
import anybatch
torch.manual_seed(0)
body, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
model = torch.nn.Sequential(body, torch.nn.Tanh(), head)
optimizer = torch.optim.SGD(body.parameters(), lr=0.125)
with anybatch.Doctor(model, optimizer, path="run.jsonl"):
    for step in range(100_000):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
        optimizer.step()
        time.sleep(0.002)
        if os.path.exists("end"):
            break
"""
WATCH = [sys.executable, "-c", "from anybatch.cli.main import main; main(prog_name='anybatch')", "watch"]


def wait(until: Callable[[], bool]) -> None:
    ended = time.monotonic() + 120
    while not until():
        assert time.monotonic() < ended
        time.sleep(0.2)


@pytest.fixture
def running(tmp_path: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", LOOP], cwd=tmp_path, env=environment(PACKAGE.parent))


def test_a_run_is_followed_to_its_end(tmp_path: Path, running: "subprocess.Popen[bytes]") -> None:
    watching = subprocess.Popen(
        [*WATCH, "run.jsonl"], cwd=tmp_path, env=environment(PACKAGE.parent, COLUMNS="150"), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    frames = Frames(tmp_path / "run.jsonl")
    try:
        steps: list[int] = []
        while len(set(steps)) < 3:
            frames.next()
            steps.append(max((tail.step for tail, _ in frames._tails.values()), default=0))
            assert running.poll() is None
            time.sleep(0.5)
        assert steps == sorted(steps)
        assert not frames.has_ended
        assert watching.poll() is None
    finally:
        (tmp_path / "end").touch()
        running.wait(timeout=120)
    out, err = watching.communicate(timeout=120)
    assert watching.returncode == 0, err
    last = out[out.rindex("this run") :] if "this run" in out else out
    assert "ended after" in last
    assert "exit code" not in last  # which a Doctor in the script does not see
    for part in ("loss", "learning rate", "0.125", "gradient norm", "update / weight", "memory", "error AB101"):
        assert part in last, (part, last)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_it_is_seen_in_tmux(tmp_path: Path, running: "subprocess.Popen[bytes]") -> None:
    own = environment(PACKAGE.parent)
    server = ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null"]

    def seen() -> str:
        return subprocess.run([*server, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout

    command = [*server, "-u", "new-session", "-d", "-x", "100", "-y", "30", "-c", str(tmp_path)]
    subprocess.run([*command, *WATCH, "run.jsonl"], env=own | {"LANG": "C.UTF-8"}, check=True)
    try:
        wait(lambda: "steps/s" in seen() and "loss" in seen() and "AB101" in seen())
        first = seen()
        wait(lambda: seen() != first)
        assert max(map(len, seen().splitlines())) <= 100
    finally:
        subprocess.run([*server, "kill-server"], check=False)
        (tmp_path / "end").touch()
        running.wait(timeout=120)


def test_one_frame_of_what_is_not_there_yet_and_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, runner = Path("run.jsonl"), CliRunner()
    result = runner.invoke(main, ["watch", "--once", str(path)])
    assert (result.exit_code, "run.jsonl is not there; anybatch doctor --record" in result.output) == (2, True)
    Path("train.py").write_text("import torch\n", encoding="utf-8")
    result = runner.invoke(main, ["watch", "train.py"])
    assert (result.exit_code, "train.py is no record of a run" in result.output) == (2, True)
    assert "--record run.jsonl train.py" in result.output
    Path("data.jsonl").write_text('{"text": 1}\n', encoding="utf-8")
    assert "--record data.jsonl" not in runner.invoke(main, ["watch", "data.jsonl"]).output  # the user's own file
    Path("begun.jsonl").write_text('{"kind": "sta', encoding="utf-8")  # its first line is on its way
    assert runner.invoke(main, ["watch", "--once", "begun.jsonl"]).exit_code == 0
    for rank, steps in ((0, 3), (1, 2)):
        lines = ['{"kind":"started","script":"train.py","arguments":["--lr","1"]}', '{"kind":"optimizer","at":1}']
        lines += [f'{{"kind":"stepped","optimizer":0,"number":{n},"lrs":[0.5],"at":{n + 2},"step":{n + 1}}}'
                  for n in range(steps)]  # fmt: skip
        (tmp_path / f"run.rank{rank}.jsonl").write_text("\n".join([*lines, '{"kind":"step']), encoding="utf-8")
    result = runner.invoke(main, ["watch", "--once", str(path)])
    assert result.exit_code == 0, result.output
    assert "train.py --lr 1" in result.output
    assert "ranks 0: 3, 1: 2" in " ".join(result.output.split())
    assert "learning rate" in result.output


STARTED = Started(script="train.py", at=0)
STEPPED = [Stepped(optimizer=0, number=n, lrs=(0.5,), at=n + 2, step=n + 1) for n in range(20)]
OPTIMIZER = OptimizerFacts(optimizer=0, at=1)


def written(path: Path, *facts: Fact) -> None:
    path.write_text("".join(f"{to_line(one)}\n" for one in facts), encoding="utf-8")


def shown(frames: Frames) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(frames.next())
    return captured.get()


def test_a_record_that_is_written_anew_is_shown_without_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    nan = NonFinite(at=30, step=20, where="forward", module="head")
    written(path, STARTED, OPTIMIZER, *STEPPED, nan)
    frames = Frames(path)
    assert "step 20" in shown(frames)
    frames._found.append(Text("found in the old one"))
    written(path, STARTED, OPTIMIZER, *STEPPED[:3])
    text = shown(frames)
    assert "step 3" in text
    assert "step 20" not in text
    assert "found in the old one" not in text


@pytest.mark.parametrize(
    ("code", "crashed", "said"),
    [(None, False, "ended after 2"), (0, False, "ended after 2"), (1, True, "crashed after 2"),
     (None, True, "crashed after 2")],
)  # fmt: skip
def test_how_a_run_ended_is_said(tmp_path: Path, code: int | None, crashed: bool, said: str) -> None:
    crash = [Crashed(name="", error="ValueError", text="no", at=30, step=20)] * crashed
    written(tmp_path / "run.jsonl", STARTED, OPTIMIZER, *STEPPED, *crash, Ended(exit_code=code, seconds=2.0, at=31))
    text = shown(Frames(tmp_path / "run.jsonl"))
    assert said in text
    assert ("exit code" in text) == (code is not None)
    assert code is None or f"exit code {code}" in text


def test_a_record_whose_folder_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    frames = Frames(tmp_path / "runs" / "1" / "run.jsonl")
    assert "is not there yet" in shown(frames)
    frames._record.parent.mkdir(parents=True)
    written(frames._record, STARTED, OPTIMIZER, *STEPPED)
    assert "step 20" in shown(frames)


def test_what_is_not_a_number_and_what_is_wide() -> None:
    assert sparkline([1.0, 10.0, 100.0, 1000.0], bars="0123456789") == "0369"
    assert sparkline([0.0, 10.0, 1000.0], bars="0123456789") == "009"
    assert sparkline([float("inf")] * 3 + [2.0]) == "xxx▁"
    assert len(sparkline([float(n) for n in range(1000)])) == 32
