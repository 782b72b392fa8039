"""``anybatch doctor`` ends as the script does: exit codes, signals, tracebacks, exit handlers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from doctor_scripts import DOCTOR, Done, doctor, environment, forked_doctor, light_torch, plain
from source_tree import PACKAGE

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")

HEAD = """
import atexit, os, signal, sys, threading, time
atexit.register(lambda: print("an early exit handler"))
import torch
atexit.register(lambda: print("a late exit handler"))
print("out"); print("err", file=sys.stderr)

class Custom(Exception):
    pass

def deep(depth):
    if depth:
        deep(depth - 1)
    raise Custom("from below")

def chained():
    try:
        deep(2)
    except Custom as error:
        raise ValueError("from above") from error
"""
ENDS = {
    "falls off its end": "",
    "sys.exit(0)": "sys.exit(0)",
    "sys.exit(3)": "sys.exit(3)",
    "sys.exit()": "sys.exit()",
    "sys.exit(text)": "sys.exit('that is all')",
    "sys.exit(-1)": "sys.exit(-1)",
    "sys.exit(True) in try": "try:\n    sys.exit(True)\nfinally:\n    print('finally')",
    "an exception": "sys.stdout.flush(); deep(1)",
    "a chained exception": "chained()",
    "a recursion": "def again(): again()\nagain()",
    "a group": """
try:
    chained()
except ValueError as error:
    error.add_note("a note")
    raise ExceptionGroup("several", [error, KeyError("key"), ExceptionGroup("inner", [OSError(2, "none")])])
""",
    "os._exit(7)": "sys.stdout.flush(); os._exit(7)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "SIGTERM": "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
    "SIGKILL": "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL); time.sleep(9)",
    "abort": "sys.stdout.flush(); os.abort()",
    "sys.exit in a thread": "t = threading.Thread(target=sys.exit, args=(5,)); t.start(); t.join(); sys.exit(4)",
    "an exception in a thread": "t = threading.Thread(target=chained, name='T'); t.start(); t.join(); print('after')",
    "a thread that goes on": "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
    "an excepthook of its own": """
def hook(kind, error, frames):
    print("hook", kind.__name__, error, frames.tb_frame.f_code.co_name, sys.exc_info())
sys.excepthook = hook
chained()
""",
    "an excepthook that fails": "sys.excepthook = lambda *arguments: 1 / 0\ndeep(0)",
    "an exit handler that fails": "atexit.register(deep, 0)",
    "another program": "sys.stdout.flush(); os.execv(sys.executable, [sys.executable, '-c', 'print(1); exit(6)'])",
    "a forked child": "child = os.fork()\nif not child:\n    sys.exit(5)\nprint(os.waitpid(child, 0)[1]); sys.exit(6)",
    "closed streams": "sys.stdout.close(); sys.stderr.close(); sys.exit(8)",
    "no streams": "sys.stdout.flush(); sys.stderr = sys.stdout = None; sys.exit(9)",
    "an argument list of its own": "sys.argv[:] = ['x']; sys.path[:] = sys.path[1:]; print(sys.argv, sys.path[:1])",
}
BEFORE_TORCH = {
    "a syntax error": "print('never')\nif True print(1)\n",
    "a missing module": "import there_is_no_such_module",
    "no torch at all": "import sys\nprint([name for name in sys.modules if 'torch' in name])\nsys.exit(2)",
    "nothing": "",
    "an encoding that is wrong": "# coding: nonsense\n",
}


# What these do, they do in the same way without the true torch, which takes seconds to load.
LIGHT = {name for name in ENDS if name not in ("falls off its end", "os._exit(7)")}


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where there is a torch that is loaded at once."""
    return light_torch(tmp_path_factory.mktemp("light"))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, light: Path) -> dict[str, tuple[Done, Done]]:
    """What all the scripts leave behind, without the doctor and with it."""
    folder = tmp_path_factory.mktemp("ends")
    scripts = {**{name: HEAD + end for name, end in ENDS.items()}, **BEFORE_TORCH}
    files = {name: f"script{number}.py" for number, name in enumerate(scripts)}

    def with_the_doctor(name: str) -> Done:
        paths = [light] if name in LIGHT else []
        done = doctor(folder, "--json", f"{files[name]}.json", files[name], paths=paths)
        return done._replace(facts=json.loads((folder / f"{files[name]}.json").read_text(encoding="utf-8")))

    for name, text in scripts.items():
        (folder / files[name]).write_text(text, encoding="utf-8")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        with_it = {name: pool.submit(with_the_doctor, name) for name in files}
        without = {name: pool.submit(plain, folder, file, paths=[light]) for name, file in files.items()}
        return {name: (_comparable(without[name].result()), _comparable(with_it[name].result())) for name in files}


def _comparable(done: Done) -> Done:
    return done._replace(err=re.sub(r"0x[0-9a-f]+", "0x", done.err))


@pytest.mark.parametrize("name", [*ENDS, *BEFORE_TORCH])
def test_a_script_ends_as_without_the_doctor(done: dict[str, tuple[Done, Done]], name: str) -> None:
    without, with_it = done[name]
    assert with_it.code == without.code
    assert with_it.out == without.out
    assert with_it.err.startswith(without.err), f"{without.err}\n--- but with the doctor ---\n{with_it.err}"
    assert with_it.err[len(without.err) :].startswith("\nscript")  # the report
    facts = with_it.facts
    assert facts["exit_code"] == (without.code if without.code >= 0 else 128 - without.code)
    assert not any("The doctor itself failed" in note for note in facts["notes"]), facts["notes"]
    assert name in LIGHT or facts["torch"] or name in BEFORE_TORCH or "os._exit" in facts["notes"][0]
    assert not any(finding["severity"] != "info" for finding in facts["findings"]), facts["findings"]


def started(folder: Path, *arguments: str, paths: Sequence[Path] = ()) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [*DOCTOR, *arguments], cwd=folder, env=environment(*paths, PACKAGE.parent), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


WAITS = """
import signal, sys, time
import torch
if sys.argv[1:] == ["handler"]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
if sys.argv[1:] == ["alone"]:
    import os; print("ready", flush=True); print(os.getpid(), flush=True); time.sleep(60)
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted"); raise
"""


@pytest.mark.parametrize(("number", "argument", "code"), [(2, "none", -2), (15, "none", -15), (15, "handler", 5)])
def test_a_signal_to_the_doctor_is_one_to_the_script(
    tmp_path: Path, light: Path, number: int, argument: str, code: int
) -> None:
    (tmp_path / "waits.py").write_text(WAITS, encoding="utf-8")
    paths = [] if number == signal.SIGINT else [light]
    process = started(tmp_path, "--json", "out.json", "waits.py", argument, paths=paths)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert out == ("interrupted\n" if number == signal.SIGINT else "")
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["exit_code"] == (
        128 - code if code < 0 else code
    )
    assert "waits.py" in err


def test_the_script_does_not_outlive_a_doctor_that_was_killed(tmp_path: Path, light: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux ends a process with its parent")
    (tmp_path / "waits.py").write_text(WAITS, encoding="utf-8")
    process = started(tmp_path, "waits.py", "alone", paths=[light])
    assert process.stdout is not None
    script = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=60)
    end = time.monotonic() + 20
    while time.monotonic() < end and _lives(script):
        time.sleep(0.05)
    assert not _lives(script)


def _lives(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return False


def test_a_script_that_takes_too_long_is_interrupted(tmp_path: Path, light: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS.replace('print("ready", flush=True)\n    time', "time"), encoding="utf-8")
    done = doctor(tmp_path, "--timeout", "2", "--json", "out.json", "waits.py", paths=[light])
    assert done.code == 124
    assert done.out == "interrupted\n"
    assert "interrupted after 2 seconds, as --timeout asked for" in " ".join(done.err.split())


DIES = """
import os, signal
import torch

class Net(torch.nn.Linear):
    def forward(self, x):
        if os.getpid() != STARTED:  # in the process of the questions
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

STARTED = os.getpid()
net = Net(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(60):
    x = torch.randn(32, 4)
    optimizer.zero_grad()
    (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
print("done")
"""


def test_questions_whose_process_dies_are_not_taken_for_asked(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES, encoding="utf-8")
    done = doctor(tmp_path, "--json", "out.json", "dies.py")
    assert (done.code, done.out) == (0, "done\n")
    told = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (told["verdict"], told["healthy"], told["unexamined"]) == ("undecided", None, ["the questions"])
    assert "not all questions were asked" in " ".join(done.err.split())


LOSES = """
import os, sys
import torch

way, record = sys.argv[1:]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).square().mean().backward()
    optimizer.step()
    if step == 20 and way != "nothing":
        os.remove(record)
    if step == 20 and way == "is another":
        open(record, "w").write("the script's own")
"""


@pytest.mark.parametrize("way", ["is gone", "is another", "nothing"])
def test_a_record_that_is_lost_is_not_written_to_and_nothing_untrue_is_said(way: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOSES, encoding="utf-8")
    record = tmp_path / "run.jsonl"
    done = forked_doctor(
        tmp_path, "--no-ask", "--record", str(record), "--json", "d.json", "train.py", way, str(record)
    )
    facts, said = json.loads((tmp_path / "d.json").read_text(encoding="utf-8")), " ".join(done.err.split())
    assert done.code == 0
    if way == "nothing":
        assert "can't be written" not in said
        assert '"kind":"ended"' in record.read_text(encoding="utf-8")
        return
    assert (facts["verdict"], facts["healthy"]) == ("undecided", None)
    assert "no optimizer stepped" not in said
    assert said.count("the record can't be written any more") == 1
    assert "damaged" not in said
    assert record.exists() == (way == "is another")
    assert not record.exists() or record.read_text(encoding="utf-8") == "the script's own"
