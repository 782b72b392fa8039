"""Runs the user's own script in a child process, until its first step."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_STDERR = 2
_PATIENCE = 5.0  # seconds that a script has to end by itself after Ctrl-C


class Ending(NamedTuple):
    """How a script ended.

    Args:
        status: ``"checked"``, ``"refused"`` if the check raised an error of its own, ``"broken"`` if it raised another,
            ``"ended"`` without a step, ``"failed"`` with an exception before one, ``"timeout"``, or ``"died"``.
        facts: what belongs to it: the certificate, the error, the exit code.
    """

    status: str
    facts: dict[str, Any]


def run_until_first_call(script: Path, arguments: Sequence[str], timeout: float | None) -> Ending:
    """Runs a script as ``python script arguments`` would, until its first ``TrainStep`` or ``backward`` call.

    Its standard output goes to the standard error of this process, so that a report has standard output for itself.

    Args:
        script: the file.
        arguments: its own.
        timeout: seconds after which it is stopped, ``None`` for never.

    Returns:
        How it ended.
    """
    with tempfile.TemporaryDirectory(prefix="anybatch-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "anybatch.cli.child", str(result), str(script), *arguments]
        process = subprocess.Popen(command, stdout=_STDERR)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            _stop(process)
            return Ending("timeout", {"seconds": timeout})
        except KeyboardInterrupt:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)  # the terminal has sent the signal to it, too
            _stop(process)
            raise
        if not result.exists():
            return Ending("died", {"code": code})
        facts: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return Ending(facts.pop("status"), facts)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
