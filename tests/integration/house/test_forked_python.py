"""A Python that is forked does what one that is started does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import forked_python

SCRIPT = """
import atexit, os, sys, weakref
print(__name__, __file__, __spec__ and __spec__.name, sys.argv, sys.path[0])
print(os.getcwd(), os.environ["WORD"], sys.stdin.read())
print(sys.modules["__main__"].__dict__ is globals(), "torch" in sys.modules, sys.stdout.line_buffering)
atexit.register(print, "exit handler")
class Thing: pass
thing = Thing()
weakref.finalize(thing, print, "finalizer")
print("an error", file=sys.stderr)
"""
ENDS = {
    "falls off its end": "",
    "a code": "sys.exit(3)",
    "a text": "sys.exit('text')",
    "an error": "def f(): 1 / 0\nf()",
    "at once": "sys.stdout.flush(); os._exit(7)",
    "a signal": "sys.stdout.flush(); os.kill(os.getpid(), 9)",
    "a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("way", ["script", "-u", "-c", "-m"])
def test_it_is_as_one_that_is_started(end: str, way: str, tmp_path: Path) -> None:
    text = SCRIPT + ENDS[end]
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    if way == "-c":
        text = text.replace("__file__, ", "")
    command = [
        sys.executable,
        *{"script": ["train.py"], "-u": ["-u", "train.py"], "-c": ["-c", text], "-m": ["-m", "train"]}[way],
        "--x",
        "1",
    ]
    values = {**os.environ, "WORD": "given", "PYTHONUNBUFFERED": ""}
    forked = forked_python.run(command, tmp_path, values, stdin="input")
    started = subprocess.run(
        command, cwd=tmp_path, env=values, input="input", capture_output=True, text=True, check=False
    )
    # What ends at the exit does so in another order, since torch, too, has something that does.
    out, expected = (sorted(done.stdout.splitlines()) for done in (forked, started))
    assert (forked.returncode, out) == (started.returncode, expected)
    assert without_runpy(forked.stderr) == without_runpy(started.stderr)


def without_runpy(text: str) -> list[str]:
    return [line for line in text.splitlines() if "<frozen runpy>" not in line]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_torch_is_found_when_it_is_imported(tmp_path: Path) -> None:
    code = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("is looked for")
sys.meta_path.insert(0, Finder())
import torch.nn
print(torch.__name__, torch.nn.Linear(2, 1)(torch.ones(3, 2)).shape)
"""
    done = forked_python.run([sys.executable, "-c", code], tmp_path)
    assert done.stdout == "is looked for\ntorch torch.Size([3, 1])\n", done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_package_is_found_with_what_it_imports_when_it_is_imported(tmp_path: Path) -> None:
    code = """
import sys
print([name for name in sys.modules if name.partition(".")[0] in ("anybatch", "torch") and name.count(".") == 0])
import anybatch
print("anybatch.step" in sys.modules, "torch" in sys.modules)
step = anybatch.TrainStep
print({*"anybatch.step anybatch.backpropagation torch".split()} <= sys.modules.keys())
print("anybatch.doctor.recorder" in sys.modules, sys.modules["anybatch.step"].__spec__.loader.path[-7:])
"""
    done = forked_python.run([sys.executable, "-c", code], tmp_path)
    assert done.stdout == "[]\nFalse False\nTrue\nFalse step.py\n", done.stderr
