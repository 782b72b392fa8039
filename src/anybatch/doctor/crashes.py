"""explain: what an error of the script means, with the tensors, modules and lines that were alive then."""

import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from anybatch.doctor.crashing.kinds import told_of
from anybatch.doctor.crashing.live import Live, whose
from anybatch.doctor.crashing.usercode import source_of
from anybatch.records.events import Crashed
from anybatch.records.findings import is_tested
from anybatch.tensors.dispatch import nobody_looks
from anybatch.tensors.randomness import RandomState

_TEXT = 2000
_LONGEST_CHAIN = 10
_WORKER = re.compile(r"^Caught (\w+) in DataLoader worker process \d+\.\s*Original Traceback.*?:\n(.*)", re.DOTALL)
_FRAME = re.compile(r'^  File "(.+?)", line (\d+), in (.+)$\n(?:    (.*)$)?', re.MULTILINE)
_log = logging.getLogger(__name__)


def explain(error: BaseException, doctor: Any = None) -> Crashed | None:
    """Explains the error that a script ended with; the error is unchanged, and no reference to it is kept.

    Args:
        error: the error with its traceback; its causes, contexts and groups are examined too.
        doctor: the recorder of the run, which knows the names of parameters and modules; ``None`` without one.

    Returns:
        The explanation; its name is empty if none fits. ``None`` for ``SystemExit``, ``KeyboardInterrupt`` and
        ``GeneratorExit``.

    Example:
        >>> import torch
        >>> try:
        ...     torch.nn.Linear(3, 1)(torch.ones(2, 3)).backward()
        ... except RuntimeError as error:
        ...     crashed = explain(error)
        >>> crashed.name, crashed.evidence["shape"]
        ('LOSS_NOT_SCALAR', [2, 1])
    """
    if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at things may warn, and where warnings are errors it would end here
        for one in _chain(error):
            crashed = _explain_one(one, doctor)
            if crashed.name:
                return crashed
        return _explain_one(error, doctor)


def prefix(crashed: Crashed) -> str:
    """The text before the traceback: what, where, why and what to change; empty for an error without a name.

    Example:
        >>> print(prefix(Crashed(name="X", error="E", text="", message="It broke.", file="a/b.py", line=3, code="f()")))
        anybatch doctor: X
          what   It broke.
          where  b.py:3  f()
        <BLANKLINE>
    """
    if not crashed.name:
        return ""
    rows = [f"anybatch doctor: {crashed.name}"]
    rows += _row("what", crashed.message)
    rows += _row("where", _where(crashed.file, crashed.line, crashed.code))
    origin = crashed.evidence.get("origin_line")
    if origin and (crashed.evidence.get("origin_file"), origin) != (crashed.file, crashed.line):
        file, code = str(crashed.evidence.get("origin_file", "")), str(crashed.evidence.get("origin_code", ""))
        rows += _row("from", _where(file, int(origin), code))
    rows += _row("module", crashed.module)
    rows += _row("cause", crashed.cause)
    rows += _row("proof", crashed.proof)
    rows += _row("fix" if crashed.proof or is_tested(crashed.name, crashed.fix) else "try", crashed.fix)
    return "\n".join(rows) + "\n"


def _row(head: str, text: str) -> list[str]:
    lines = text.splitlines()
    return [f"  {head:<6} {lines[0]}", *(f"         {line}" for line in lines[1:])] if lines else []


def _where(file: str, line: int, code: str) -> str:
    return f"{PurePath(file).name}:{line}  {code}".rstrip() if file else code


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from."""
    seen: set[int] = set()
    waiting = [error]
    while waiting and len(seen) < _LONGEST_CHAIN:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(one.exceptions)
        if one.__cause__ is not None:
            waiting.append(one.__cause__)
        elif one.__context__ is not None and not one.__suppress_context__:
            waiting.append(one.__context__)


def _explain_one(error: BaseException, doctor: Any) -> Crashed:
    told, place, live = None, ("", 0, ""), None
    try:
        live = Live(error, doctor)
        worker = _WORKER.match(live.text)
        place = _place(live)
        if worker is not None:
            live.text = _message_of(worker.group(2), worker.group(1))
            place = _place_in(worker.group(2)) or place
        told = told_of(live) or _asked(live)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as failure:  # noqa: BLE001 - whatever fails here must not hide the user's error
        _log.warning("the crash could not be explained: %s: %s", type(failure).__name__, failure)
    finally:
        if live is not None:
            live.close()
    file, line, code = place
    told = told or Crashed(name="", error="", text="")
    return replace(told, error=type(error).__name__, text=_text_of(error), file=file, line=line, code=code)


def _asked(live: Live) -> Crashed | None:
    """What the failing call answers; it runs again, which neither the recorder nor a mode of the user's sees."""
    from anybatch.doctor.crashing.asked import told_by_call

    random, away = RandomState(), getattr(live.doctor, "look_away", None)
    try:
        if away is not None:
            away()
        with nobody_looks():
            return told_by_call(live)
    finally:
        random.restore()
        if away is not None:
            live.doctor.look_again()


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:_TEXT]
    except Exception:  # noqa: BLE001 - the user's own class may fail at it
        return ""


def _place(live: Live) -> tuple[str, int, str]:
    if isinstance(live.error, SyntaxError) and live.error.filename:
        return live.error.filename, live.error.lineno or 0, (live.error.text or "").strip()
    return (live.user.file, live.user.line, live.code(live.user)) if live.user is not None else ("", 0, "")


def _message_of(traceback: str, name: str) -> str:
    """The text of the error that a worker's traceback ends with."""
    found = re.search(rf"^(?:[\w.]*\.)?{re.escape(name)}: (.*)", traceback, re.MULTILINE | re.DOTALL)
    return found.group(1).strip() if found else traceback


def _place_in(traceback: str) -> tuple[str, int, str] | None:
    """The user's innermost line in the text of a traceback."""
    found = [(file, int(line), (code or "").strip()) for file, line, _, code in _FRAME.findall(traceback)]
    file, line, code = next((one for one in reversed(found) if whose(one[0]) == "user"), ("", 0, ""))
    source = source_of(file) if file else None
    return (file, line, code if source is None else source.text(line)) if file else None
