"""How an explanation of a kind of crash is declared, and what it says."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from anybatch.doctor.crashing.crashlive import Live


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What is said of a crash; the fields are those of ``anybatch.records.events.Crashed``.

    Args:
        name: of the finding.
        message: what is wrong.
        cause: how it comes to that.
        fix: code in the user's own names, or a sentence.
        module: the qualified name of the module.
        parameters: names.
        tensor: in words.
        evidence: numbers and texts; ``origin_file``, ``origin_line`` and ``origin_code`` are the line to be changed
            where it is not the one that raised.
    """

    name: str
    message: str
    cause: str = ""
    fix: str = ""
    module: str = ""
    parameters: tuple[str, ...] = ()
    tensor: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


Teller = Callable[[Live, "re.Match[str]"], Told | None]
_KINDS: list[tuple["re.Pattern[str]", Teller]] = []


def kind(*patterns: str) -> Callable[[Teller], Teller]:
    """Declares what explains errors whose text matches one of some patterns.

    Args:
        patterns: searched for in the text; long enough to be of one error only, short enough for all versions of torch.

    Returns:
        A decorator for a function of what was alive and the match; it gives ``None`` where it can't be sure.
    """

    def declared(tell: Teller) -> Teller:
        _KINDS.extend((re.compile(pattern, re.DOTALL), tell) for pattern in patterns)
        return tell

    return declared


def matching(text: str) -> Iterator[tuple[Teller, "re.Match[str]"]]:
    """The explanations that may fit a text, in the order in which they were declared.

    Args:
        text: of an error.
    """
    for pattern, tell in _KINDS:
        match = pattern.search(text)
        if match is not None:
            yield tell, match


def origin(file: str, line: int, code: str) -> dict[str, Any]:
    """The line that is to be changed, as evidence."""
    return {"origin_file": file, "origin_line": line, "origin_code": code} if line else {}


def shape(tensor: Any) -> str:
    """The shape of a tensor as it is written."""
    return str(list(tensor.shape))


def dtype(tensor: Any) -> str:
    """The dtype of a tensor without torch's name."""
    return str(tensor.dtype).removeprefix("torch.")


def quoted(text: str) -> str:
    """Code within a sentence; empty stays empty."""
    return f"`{text}`" if text and text != "its input" else text
