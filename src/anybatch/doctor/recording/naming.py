"""What the user's code calls a thing."""

import contextlib
import dis
import functools
import inspect
import itertools
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from anybatch.userlines import LIBRARYS, USERS, whose_file

_MOST_FRAMES = 200
_MOST_ENTRIES = 64
_LOOKS_AT_ITS_LOCALS = frozenset({"locals", "vars", "exec", "eval", "dir", "builtins"})
_GIVES_PROXIES = sys.version_info >= (3, 13)  # PEP 667: ``f_locals`` keeps nothing alive


def variable_of(thing: Any) -> str:
    """What the user's code calls a thing: ``"model"``, ``"self.net"``, ``"nets['g']"``; empty if that is not found."""
    return variables_of([thing]).get(id(thing), "")


def variables_of(things: Iterable[Any]) -> dict[int, str]:
    """What the user's code calls some things, by ``id``, all found at one go."""
    missing, found = {id(thing) for thing in things}, dict[int, str]()
    for named in (_names, _attributes):
        for scope in _scopes(USERS, LIBRARYS):
            if not missing:
                return found
            for name, value in named(scope):
                if id(value) in missing:
                    missing.discard(id(value))
                    found[id(value)] = name
    return found


def _scopes(*whose: int) -> Iterator[Any]:
    """The variables of the running code: the local ones of each frame, and the globals of each module once."""
    frames = [frame for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(2)), _MOST_FRAMES)]
    seen = set[int]()
    for whose_it_is in whose:
        for frame in frames:
            if whose_file(frame.f_code.co_filename) == whose_it_is:
                with _variables(frame) as variables:
                    yield variables
                    if id(frame.f_globals) not in seen:
                        seen.add(id(frame.f_globals))
                        yield frame.f_globals


def modules_in_sight() -> list[torch.nn.Module]:
    """The modules that the user's running code has names for, as variables or as attributes of these."""
    found: dict[int, torch.nn.Module] = {}
    for value in (value for scope in _scopes(USERS) for value in list(scope.values())):
        if isinstance(value, torch.nn.Module):
            found[id(value)] = value
        elif hasattr(value, "__dict__") and not callable(value) and not inspect.ismodule(value):
            for inner in list(vars(value).values())[:_MOST_ENTRIES]:
                if isinstance(inner, torch.nn.Module):
                    found[id(inner)] = inner
    return list(found.values())


@functools.lru_cache(maxsize=256)
def _looks_at_its_locals(code: CodeType) -> bool:
    """Whether code uses one of the built-in functions that see its variables; ``model.eval()`` is none."""
    loaded = (one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return not _LOOKS_AT_ITS_LOCALS.isdisjoint(loaded)


@contextlib.contextmanager
def _variables(frame: FrameType) -> Iterator[Any]:
    """The local variables of a frame, let go of again.

    Before Python 3.13 a frame keeps the dictionary that ``f_locals`` made, and with it every tensor that was in it, as
    long as it runs. A frame whose code looks at its locals itself shares that dictionary, so that one is not read.
    """
    code = frame.f_code
    shared = not code.co_flags & inspect.CO_OPTIMIZED or _GIVES_PROXIES
    hidden = not shared and not _LOOKS_AT_ITS_LOCALS.isdisjoint(code.co_names) and _looks_at_its_locals(code)
    found: Any = {} if hidden else frame.f_locals
    try:
        yield found
    finally:
        if not shared:
            found.clear()


def _names(scope: Any) -> Iterator[tuple[str, Any]]:
    for name, value in list(scope.items()):
        if not name.startswith("__"):
            yield str(name), value


def _attributes(scope: Any) -> Iterator[tuple[str, Any]]:
    for name, value in _names(scope):
        if not (inspect.ismodule(value) or isinstance(value, (type, torch.Tensor))):
            for place, inner in _parts(value):
                yield f"{name}{place}", inner


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", inner) for place, inner in enumerate(value[:_MOST_ENTRIES]))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", inner) for key, inner in _first(value))
    elif isinstance(value, torch.nn.Module):
        yield from ((f".{name}", inner) for name, inner in _first(value._modules))
        yield from ((f".{name}", inner) for name, inner in _first(value._parameters))
        yield from ((f".{name}", inner) for name, inner in list(vars(value).items()) if not name.startswith("_"))
    elif hasattr(value, "__dict__") and not callable(value):
        yield from ((f".{name}", inner) for name, inner in _first(vars(value)))


def _first(entries: dict[Any, Any]) -> list[tuple[Any, Any]]:
    return list(itertools.islice(entries.items(), _MOST_ENTRIES))
