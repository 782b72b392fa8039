"""Runs the user's script in a child process, until its first step."""

import json
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from anybatch.cli.doctor_child import BROKEN
from anybatch.cli.launching import end_as, launch
from anybatch.cli.options import INTERRUPTED, Target

RESULT = "result.json"
"""The file in which the child leaves its answer."""


class NoAnswer(click.ClickException):
    """The script did not reach a step that the question can be answered for."""

    exit_code = 2


_DONE = {"check": "checked", "plan": "planned", "tune": "measured"}
"""The status of an answer to each verb."""


class Ending(NamedTuple):
    """How a script ended."""

    # one of ``_DONE``, ``"too-large"`` if nothing fits, ``"refused"`` if the question raised another
    # error of anybatch, ``"broken"`` if it raised one of the script, ``"ended"`` without a step, ``"failed"`` with an
    # exception before one, ``"gave-up"`` with an exit code before all steps were measured, ``"timeout"``, or ``"died"``
    # in the first step
    status: str
    # what belongs to it: the certificate, the plan, the error, the exit code; for ``"timeout"`` whether the first step
    # had been reached
    facts: dict[str, Any]


def run_until_first_call(target: Target, timeout: float | None, question: Mapping[str, Any]) -> Ending:
    """Runs a script until the child has an answer; see ``child``.

    Its standard output goes to the standard error of this process, so that a report can take standard output. A script
    that fails because torchrun did not start it runs again as the only rank.

    Raises:
        NoAnswer: there is none, and why.
    """
    ending, name, verb = _run(target, timeout, question, {}), target.name, question["verb"]
    if ending.status == "needs-ranks":
        sys.stderr.write(
            f"{name} expects torchrun ({ending.facts['error']}); started again as the only rank of torchrun\n"
        )
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
        ending = _run(target, timeout, question, {**ONLY_RANK, "MASTER_PORT": port})
    if ending.status not in (_DONE[verb], "too-large"):
        raise NoAnswer(_no_answer(ending, name, verb, _DONE[verb]))
    return ending


ONLY_RANK = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
"""The environment that torchrun gives to a process that is alone."""


def _run(target: Target, timeout: float | None, question: Mapping[str, Any], variables: Mapping[str, str]) -> Ending:
    with tempfile.TemporaryDirectory(prefix="anybatch-", ignore_cleanup_errors=True) as home:
        folder = Path(home).resolve()
        finished = launch(
            target.command, folder, question, timeout, kills=True, is_edited="sources" in question, child="child",
            quiet=True, variables=variables,
        )  # fmt: skip
        if (folder / BROKEN).exists():
            why = (folder / BROKEN).read_text(encoding="utf-8", errors="replace")
            raise NoAnswer(f"anybatch could not be loaded in the process of {target.name}: {why}")
        result = folder / RESULT
        facts: dict[str, Any] = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    status = facts.pop("status", "ended")
    if signal.SIGINT in finished.came or finished.code in (INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if -finished.code in finished.came:
        end_as(finished.code)
    if finished.limit is not None:
        return Ending("timeout", {"seconds": finished.limit, "reached": status == "reached"})
    if status in ("reached", "ended"):
        return Ending("died" if status == "reached" else "ended", {"code": finished.code})
    if status == "measured" and finished.code > 0:
        return Ending("gave-up", {"code": finished.code, "steps": question["steps"]})
    return Ending(status, facts)


def _no_answer(ending: Ending, script: str, verb: str, done: str) -> str:
    """A sentence on why a script gave no answer."""
    facts = ending.facts
    call = "anybatch.TrainStep" if verb == "tune" else "anybatch.TrainStep or anybatch.backward"
    call += ", or any optimizer stepped after a backward" if verb != "tune" else ""
    if ending.status == "refused":
        return f"the first step of {script} can't be {done}. {facts['error']}"
    if ending.status == "broken":
        if verb == "check":
            return f"the loss of {script} failed in the check, see above: {facts['error']}"
        return (
            f"planning the step of {script} failed, see above: {facts['error'].rstrip('.')}. A plan runs the loss with "
            "fewer samples than the batch has, which may be why; take sizes from the batch, as in len(x), and rows by "
            "an index before the forward. A loss that needs all samples at once, as that of one graph with "
            "its adjacency, can't be planned"
        )
    if ending.status == "failed":
        return f"{script} failed before it called {call}, see above."
    if ending.status == "gave-up":
        return f"{script} ended with exit code {facts['code']} before {facts['steps']} steps were measured, see above."
    if ending.status == "timeout" and facts["reached"]:
        return f"the first step of {script} was not {done} within {facts['seconds']:g} seconds; raise --timeout."
    if ending.status == "timeout":
        return (
            f"{script} did not call {call} within {facts['seconds']:g} seconds; raise --timeout, or give the script "
            "less to do before its first step."
        )
    if ending.status == "died":
        return f"the process was ended ({facts['code']}) while the first step of {script} was {done}."
    how = f"ended with exit code {facts['code']}" if facts["code"] >= 0 else f"was ended ({facts['code']})"
    return (
        f"{script} {how} without having called {call} in its own process, so there is nothing to {verb}. Are its "
        f"arguments right? They go behind it, as in: anybatch {verb} train.py --epochs 1"
    )
