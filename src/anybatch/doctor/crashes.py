"""explain: what an error of the script means, with the tensors, modules and lines that were alive then; by a table."""

import functools
import importlib
import logging
import re
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import torch

from anybatch.doctor.crashing.live import Live, whose
from anybatch.doctor.crashing.usercode import source_of
from anybatch.records.events import Crashed
from anybatch.records.findings import is_tested
from anybatch.tensors.dispatch import nobody_looks
from anybatch.tensors.randomness import RandomState

Answer = Mapping[str, Any]
"""What a question found, see ``answer``."""
Question = Callable[[Live, "re.Match[str]"], Answer | None]


def answer(**found: Any) -> Answer:
    """What a question found."""
    return found


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of ``table.toml``, whose first lines say what its entries are."""

    name: str
    patterns: tuple[str, ...]
    message: str
    cause: str
    fix: str
    asks: Question = lambda live, match: {}

    def told(self, live: Live) -> Crashed | None:
        """What is said of a crash; ``None`` if it is of another kind."""
        for pattern in self.patterns:
            texts = (live.text, f"{type(live.error).__name__}: {live.text}")
            match = next(filter(None, (re.search(pattern, text, re.DOTALL) for text in texts)), None)
            found = None if match is None else self.asks(live, match)
            if match is not None and found is not None:
                return self._filled(live, match, found)
        return None

    def _filled(self, live: Live, match: "re.Match[str]", found: Answer) -> Crashed:
        groups = ("", *(group or "" for group in match.groups()))
        common = {
            "code": quoted(live.code()) or "the script",
            "text": first_line(live.text),
            **dict.fromkeys(("module", "tensor"), ""),
            **live.tools(),
        }
        texts = [one.format(*groups, **{**common, **found}) for one in (self.message, self.cause, self.fix)]
        file, line, code = found.get("at") or ("", 0, "")
        place = {"origin_file": file, "origin_line": line, "origin_code": code} if line else {}
        return Crashed(
            name=self.name, error="", text="", message=texts[0], cause=texts[1], fix=texts[2],
            module=found.get("module", ""), parameters=tuple(found.get("parameters", ())),
            tensor=found.get("tensor", ""), evidence={**found.get("evidence", {}), **place},
        )  # fmt: skip


@functools.cache
def table() -> tuple[Kind, ...]:
    """What is known of errors for which no call can be run again; the files that ask are loaded with it."""
    return tuple(_rows())


def _rows() -> Iterator[Kind]:
    patterns: list[str] = []
    for row in tomllib.loads(Path(__file__).with_name("crashing").joinpath("table.toml").read_text(encoding="utf-8"))[
        "rows"
    ]:
        patterns = [row.pop("pattern")] if "pattern" in row else row.pop("patterns", patterns)
        file, _, function = row.pop("asks", "").partition(".")
        asking = {"asks": getattr(importlib.import_module(f"{__package__}.crashing.{file}"), function)} if file else {}
        yield Kind(patterns=tuple(patterns), **row, **asking)


def told_of(live: Live) -> Crashed | None:
    """What the first row says that knows an error; a row whose question fails leaves the others their turn."""
    for kind in table():
        try:
            told = kind.told(live)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as failure:  # noqa: BLE001 - whatever fails here must not hide the user's error
            _log.warning("%s could not explain the crash: %s: %s", kind.name, type(failure).__name__, failure)
            continue
        if told is not None:
            return told
    return None


def shape(tensor: Any) -> str:
    """The shape of a tensor as it is written."""
    return str(list(tensor.shape))


def dtype(tensor: torch.Tensor) -> str:
    """The dtype of a tensor without torch's name."""
    return str(tensor.dtype).removeprefix("torch.")


def quoted(text: str) -> str:
    """Code within a sentence; empty stays empty."""
    return f"`{text}`" if text and text != "its input" else text


def first_line(text: str) -> str:
    """The beginning of an error's text."""
    return text.strip().splitlines()[0][:200] if text.strip() else ""


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
            traceback = worker.group(2)
            found = re.search(rf"^(?:[\w.]*\.)?{re.escape(worker.group(1))}: (.*)", traceback, re.MULTILINE | re.DOTALL)
            live.text = found.group(1).strip() if found else traceback
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
    return (live.user.file, live.user.line, live.code()) if live.user is not None else ("", 0, "")


def _place_in(traceback: str) -> tuple[str, int, str] | None:
    """The user's innermost line in the text of a traceback."""
    found = [(file, int(line), (code or "").strip()) for file, line, _, code in _FRAME.findall(traceback)]
    file, line, code = next((one for one in reversed(found) if whose(one[0]) == "user"), ("", 0, ""))
    source = source_of(file) if file else None
    return (file, line, code if source is None else source.text(line)) if file else None
