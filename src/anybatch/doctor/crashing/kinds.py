"""How a kind of crash is declared: what its error says, what is asked of the state that was alive, and what is told."""

import functools
import importlib
import logging
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anybatch.doctor.crashing.live import Live
from anybatch.records.events import Crashed

_log = logging.getLogger(__name__)

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
    for row in tomllib.loads(Path(__file__).with_name("table.toml").read_text(encoding="utf-8"))["rows"]:
        patterns = [row.pop("pattern")] if "pattern" in row else row.pop("patterns", patterns)
        file, _, function = row.pop("asks", "").partition(".")
        asking = {"asks": getattr(importlib.import_module(f"{__package__}.{file}"), function)} if file else {}
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
