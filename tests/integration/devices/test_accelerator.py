"""The engine on the test accelerator, in a process of its own: what is registered with torch stays there."""

import re
import shutil
import subprocess
import sys

import pytest

from source_tree import PACKAGE, ROOT

NAMED = re.compile(r"torch\.(?:cuda|xpu|mps|mtia)\b|\.is_cuda\b|\.type [!=]= \"(?:cuda|xpu|mps)\"")


@pytest.mark.skipif(shutil.which("g++") is None, reason="the test accelerator is built by g++")
def test_the_engine_keeps_its_promises_there() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/accelerator/engine.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_only_one_file_names_a_type_of_accelerator() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in sorted(PACKAGE.rglob("*.py")) if path.name != "accelerators.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if NAMED.search(line)
    ]  # fmt: skip
    assert not found, found
