"""Has calls of functions of torch seen, which stay the objects that they are."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from anybatch.doctor.recording.patches import HIDDEN

NAME = f"{HIDDEN}/torch/nn/functional.py"
"""The file of the exchanged code: ``warnings`` passes over it, and ``inspect`` asks the module for its text."""
_OF_MODULES = f"{HIDDEN}/torch/nn/modules/module.py"
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
        code: that is to be there.

    Attributes:
        own: the code as it was.
        original: the function as it was.
        call: what the code calls.
    """

    def __init__(self, function: Any, code: types.CodeType) -> None:
        self.function, self.own = function, function.__code__
        self.is_in_force = True
        self.original: Any = types.FunctionType(
            self.own, function.__globals__, function.__name__, function.__defaults__
        )
        self.original.__kwdefaults__ = function.__kwdefaults__
        self.call: Callable[..., Any] = self.original
        key = f"{function.__name__} {id(self)}"  # several may be in force, each around the one before
        function.__globals__.setdefault(_SEEN_BY, {})[key] = self
        consts = tuple(key if one == _KEY else one for one in code.co_consts)
        self.code = code.replace(
            co_firstlineno=self.own.co_firstlineno, co_qualname=self.own.co_qualname, co_consts=consts
        )


@functools.cache
def _code(name: str) -> types.CodeType:
    """Code that hands a call of one of ``torch.nn.functional`` on, made once for a function."""
    given = ", ".join(parameters_of(name))
    return _compiled(f"def {name}({given}):\n    return {_SEEN_BY}[{_KEY!r}].call(({given},))", NAME)


def _compiled(text: str, file: str) -> types.CodeType:
    made: dict[str, Any] = {}
    exec(compile(text, file, "exec"), made)
    (code,) = [one.__code__ for one in made.values() if isinstance(one, types.FunctionType)]
    return code


_CALL = _compiled(
    f"def call(self, *args, **kwargs):\n    return {_SEEN_BY}[{_KEY!r}].call(self, *args, **kwargs)", _OF_MODULES
)


def exchange(function: Any, see: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> Callable[[], None]:
    """Gives a function code that has it called by another one.

    Args:
        function: of ``torch.nn.functional``.
        see: is given its name, the function as it was, and the arguments.

    Returns:
        What gives its own code back, as soon as nothing else lies above it.
    """
    mine = _Exchange(function, _code(function.__name__))
    mine.call = functools.partial(see, function.__name__, mine.original)
    function.__code__ = mine.code
    passed_on = functools.partial(_passed_on, mine.original)
    return functools.partial(_restore, mine, passed_on)


def exchange_calls_of_modules(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Has calls of all modules seen.

    The attribute itself is left as it is: putting another one there takes 0.3 ms, since Python then looks through all
    classes of modules and forgets what it knew of their attributes, and from Python 3.12 on it gives up learning that
    again for a class that was changed a thousand times.

    Args:
        make: takes the function that modules are called by, and gives what is to be called.

    Returns:
        What ends it.
    """
    function: Any = torch.nn.Module._wrapped_call_impl
    mine = _Exchange(function, _CALL)
    mine.call = make(mine.original)
    function.__code__ = mine.code
    return functools.partial(_restore, mine, mine.original)


def _restore(mine: _Exchange, call: Callable[..., Any]) -> None:
    function = mine.function
    mine.is_in_force, mine.call = False, call
    table = function.__globals__.get(_SEEN_BY, {})
    while True:
        found = next(((key, one) for key, one in table.items() if one.code is function.__code__), None)
        if found is None or found[1].is_in_force:
            break
        function.__code__ = found[1].own
        del table[found[0]]
    if not table:
        function.__globals__.pop(_SEEN_BY, None)


def _passed_on(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)
