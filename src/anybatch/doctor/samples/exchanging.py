"""Has calls of functions of torch seen, which stay the objects that they are."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from anybatch.doctor.recording.patches import HIDDEN

NAME = "<anybatch doctor, passed over like importlib._bootstrap>/torch/nn/functional.py"
"""The file of the exchanged code: ``warnings`` passes over it, and ``inspect`` asks the module for its text."""
_SEEN_BY = "_anybatch_doctor_calls"
_KEY = "anybatch: which one"


@functools.cache
def parameters_of(name: str) -> tuple[str, ...]:
    """The names of the parameters of one of ``torch.nn.functional``."""
    return tuple(inspect.signature(getattr(F, name)).parameters)


class _Exchange:
    """Code of a function that was exchanged.

    Args:
        function: whose code it is.
        see: is given its name, the function as it was, and the arguments.
    """

    def __init__(self, function: Any, see: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> None:
        self.own = function.__code__
        self.is_in_force = True
        original = types.FunctionType(self.own, function.__globals__, function.__name__, function.__defaults__)
        original.__kwdefaults__ = function.__kwdefaults__
        self.call = functools.partial(see, function.__name__, original)
        key = f"{function.__name__} {id(self)}"  # several may be in force, each around the one before
        code = _code(function.__name__)
        function.__globals__.setdefault(_SEEN_BY, {})[key] = self
        consts = tuple(key if one == _KEY else one for one in code.co_consts)
        self.code = code.replace(co_firstlineno=self.own.co_firstlineno, co_consts=consts)


@functools.cache
def _code(name: str) -> types.CodeType:
    """Code that hands a call on, made once for a function."""
    given = ", ".join(parameters_of(name))
    text = f"def {name}({given}):\n    return {_SEEN_BY}[{_KEY!r}].call(({given},))"
    made: dict[str, Any] = {}
    exec(compile(text, NAME, "exec"), made)
    code: types.CodeType = made[name].__code__
    return code


def exchange(function: Any, see: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> Callable[[], None]:
    """Gives a function code that has it called by another one.

    Returns:
        What gives its own code back, as soon as nothing else lies above it.
    """
    mine = _Exchange(function, see)
    function.__code__ = mine.code
    original = mine.call.args[1]

    def restore() -> None:
        mine.is_in_force, mine.call = False, functools.partial(_passed_on, original)
        table = function.__globals__.get(_SEEN_BY, {})
        while True:
            found = next(((key, one) for key, one in table.items() if one.code is function.__code__), None)
            if found is None or found[1].is_in_force:
                break
            function.__code__ = found[1].own
            del table[found[0]]
        if not table:
            function.__globals__.pop(_SEEN_BY, None)

    return restore


def _passed_on(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


def replace(name: str, see: Callable[..., Any]) -> Callable[[], None]:
    """Puts a function in the place of one that is built in, whose code can't be exchanged."""
    original = getattr(F, name)
    state = {"in force": True, "original": original}

    @functools.wraps(original)
    def seen(*args: Any, **kwargs: Any) -> Any:
        return see(original, args, kwargs) if state["in force"] else original(*args, **kwargs)

    made: Any = seen
    made.__code__ = made.__code__.replace(co_filename=HIDDEN)
    made.__prepare_scriptable__ = lambda: original
    vars(seen)[_SEEN_BY] = state
    setattr(F, name, seen)

    def restore() -> None:
        state["in force"] = False
        while (known := getattr(getattr(F, name), _SEEN_BY, None)) is not None and not known["in force"]:
            setattr(F, name, known["original"])

    return restore
