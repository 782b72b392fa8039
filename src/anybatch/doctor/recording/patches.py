"""The seam: has calls of functions seen, which stay the objects that they are, and puts everything back as it was."""

import ast
import functools
import inspect
import itertools
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import torch

from anybatch.doctor.frames import kept
from anybatch.tensors.dispatch import function_modes_paused, function_modes_resumed
from anybatch.torch_private import number_of_function_modes

HIDDEN = "<anybatch doctor, passed over like importlib._bootstrap>"
"""The file that code of the seam says it is from: ``warnings`` then names the user's line, and not one of ours."""
_NUMBERS = itertools.count()
_CALL = "_anybatch_doctor_call"
_BENEATH = f"{_CALL}_beneath"
_COUNT = "_anybatch_doctor_modes"
_CHOSEN = "_anybatch_doctor_chosen"
_RAISED = "_anybatch_doctor_raised"
_NO_CALLS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def hidden(function: Any) -> Any:
    """Has warnings pass over a function."""
    code = function.__code__
    known = _HIDDEN_CODES.get(id(code))
    if known is None:
        known = _HIDDEN_CODES[id(code)] = code, code.replace(co_filename=HIDDEN)
    function.__code__ = known[1]
    return function


_HIDDEN_CODES: dict[int, tuple[types.CodeType, types.CodeType]] = {}
"""What was made of code, by its ``id``; there are as many as functions in the text of this package."""


def raised(error: BaseException) -> None:
    """Gives an error that comes out of a call that is seen the traceback that it has without the doctor."""
    error.__traceback__ = kept(error.__traceback__)


class _Passing:
    """Calls a function, and is in a pickle what the seam has replaced, as ``cloudpickle`` writes down a user's class.

    So do joblib and Ray with it, where a class can't be imported; they could not pickle a doctor.
    """

    __slots__ = ("call", "original")

    def __init__(self, call: Callable[..., Any], original: Callable[..., Any]) -> None:
        self.call, self.original = call, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return functools.partial, (self.original,)


hidden(_Passing.__call__)


def _signature(code: types.CodeType) -> tuple[str, str]:
    """The parameters of code as they are declared, without defaults, and as they are handed on."""
    count, only = code.co_argcount, code.co_kwonlyargcount
    names = list(code.co_varnames)
    declared, handed, after = names[:count], names[:count], count + only
    if code.co_posonlyargcount:
        declared.insert(code.co_posonlyargcount, "/")
    if code.co_flags & inspect.CO_VARARGS:
        declared.append(f"*{names[after]}")
        handed.append(f"*{names[after]}")
        after += 1
    elif only:
        declared.append("*")
    declared += names[count : count + only]
    handed += [f"{name}={name}" for name in names[count : count + only]]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        declared.append(f"**{names[after]}")
        handed.append(f"**{names[after]}")
    return ", ".join(declared), ", ".join(handed)


@functools.cache
def _handing_on(code: types.CodeType) -> types.CodeType:
    """Code that takes the same arguments, and has one of two global functions called with them."""
    declared, handed = _signature(code)
    text = (
        f"def outer({', '.join(code.co_freevars)}):\n"
        f"    def function({declared}):\n"
        f"        try:\n"
        f"            return ({_CALL} if not {_COUNT}() else {_BENEATH})({handed})\n"
        f"        except BaseException as {_RAISED}_error:\n"
        f"            {_RAISED}({_RAISED}_error)\n"
        f"            raise\n"
        f"        ({' '.join(f'{one},' for one in code.co_freevars)})\n"  # have to be as many as before
    )
    file = f"{HIDDEN}{code.co_filename}"  # ``inspect`` asks the module for its text
    outer = next(one for one in compile(text, file, "exec").co_consts if isinstance(one, types.CodeType))
    made = next(one for one in outer.co_consts if isinstance(one, types.CodeType))
    return made.replace(co_name=code.co_name, co_qualname=code.co_qualname, co_firstlineno=code.co_firstlineno)


@functools.cache
def _asking_first(code: types.CodeType, source: str) -> types.CodeType:
    """Code as it is, which first asks whether it is to hand on its first argument, by its type or its ``id``."""
    tree = ast.increment_lineno(
        ast.parse(f"if True:\n{textwrap.indent(source, '' if source[:1] == ' ' else ' ')}"), code.co_firstlineno - 2
    )  # as it is indented, since tracebacks show columns
    function = tree.body[0].body[0] if isinstance(tree.body[0], ast.If) else None
    if not isinstance(function, ast.FunctionDef) or code.co_freevars or not code.co_argcount:
        raise ValueError(f"got {code.co_qualname}; expected a function without decorators and outer variables")
    one, (_, handed) = code.co_varnames[0], _signature(code)
    asked = f"if type({one}) in {_CHOSEN} or id({one}) in {_CHOSEN}:"
    call = f"return ({_CALL} if not {_COUNT}() else {_BENEATH})({handed})"
    passed_on = f"except BaseException as {_RAISED}_error:\n  {_RAISED}({_RAISED}_error)\n  raise"
    first = ast.parse(f"{asked}\n try:\n  {call}\n {passed_on}").body[0]
    ends = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    last = max(ends, key=lambda node: node.lineno)  # whence a traceback of a call that is handed on seems to come
    for node in ast.walk(first):
        ast.copy_location(node, last)
    function.body.insert(ast.get_docstring(function) is not None, first)
    function.decorator_list, tree.body = [], [function]
    whole = compile(tree, code.co_filename, "exec", dont_inherit=True)
    made = next(one for one in whole.co_consts if isinstance(one, types.CodeType))
    return made.replace(co_qualname=code.co_qualname, co_firstlineno=code.co_firstlineno)


class _All:
    """What everything is in."""

    def __contains__(self, one: Any) -> bool:
        return True


hidden(_All.__contains__)
_ALL: Container[Any] = _All()


class _Exchange:
    """Code of a function that was exchanged, so that the function has itself called by another one.

    Everything else stays: the identity, by which pickles and ``from ... import`` know it, the signature, the names, the
    documentation, and what a compiler of Python's text reads. Another one may exchange the code once more.

    Args:
        make: takes the function as it was, and gives what is called in its place.
        chosen: the types or ids of the first arguments for which it is; ``None`` for all.
    """

    def __init__(self, function: Any, make: Callable[[Any], Any], chosen: Container[Any] | None = None) -> None:
        self.function, self.own, self.is_in_force = function, function.__code__, True
        number = next(_NUMBERS)
        self._names = {name: f"{name}_{number}" for name in (_CALL, _BENEATH, _CHOSEN)}
        own = self.own if chosen is None else self.own.replace(co_filename=HIDDEN)  # its frame comes in addition
        self.original: Any = types.FunctionType(
            own, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        self.original.__kwdefaults__ = function.__kwdefaults__
        self.original.__qualname__, self.original.__module__ = function.__qualname__, function.__module__
        code = _handing_on(self.own) if chosen is None else _asking_first(self.own, inspect.getsource(function))
        self.choose(chosen)
        self.code = code.replace(co_names=tuple(self._names.get(name, name) for name in code.co_names))
        self._name(_CALL, _seen(make(self.original)))
        self._name(_BENEATH, _seen(self._making(make)))
        names = function.__globals__
        names[_COUNT], names[_RAISED] = number_of_function_modes, raised
        _EXCHANGED[id(names)] += 1
        function.__code__ = self.code

    def _name(self, name: str, call: Any) -> None:
        function = self.function
        if function.__module__ == "__main__" or "<locals>" in function.__qualname__:
            call = _Passing(call, self.original)
        function.__globals__[self._names[name]] = call

    def _making(self, make: Callable[[Any], Any]) -> Any:
        """What is called where a mode of the user's is on, which is made when that is so for the first time."""

        def first(*args: Any, **kwargs: Any) -> Any:
            beneath = _seen(function_modes_paused(_seen(make(_seen(function_modes_resumed(self.original))))))
            if self.is_in_force:
                self._name(_BENEATH, beneath)
            return beneath(*args, **kwargs)

        return first

    def choose(self, chosen: Container[Any] | None) -> None:
        """Says for which first arguments it is, by type or ``id``."""
        self.function.__globals__[self._names[_CHOSEN]] = _ALL if chosen is None else chosen

    def end(self) -> None:
        """Gives the function its own code back, as soon as nothing else lies above it."""
        self.is_in_force = False
        names = self.function.__globals__
        for name in (self._names[_CALL], self._names[_BENEATH]):
            names[name] = self.original
        above = _ABOVE.setdefault(self.function, [])
        while above and not above[-1].is_in_force and self.function.__code__ is above[-1].code:
            last = above.pop()
            self.function.__code__ = last.own
            for name in last._names.values():
                del names[name]
                _EXCHANGED[id(names)] -= name == last._names[_CALL]
        if not above:
            del _ABOVE[self.function]
        if not _EXCHANGED[id(names)]:
            del _EXCHANGED[id(names)], names[_COUNT], names[_RAISED]


_ABOVE: dict[Any, list[_Exchange]] = {}
_EXCHANGED: Counter[int] = Counter()
"""How many functions with the same global variables have exchanged code, by the ``id`` of these."""


def _seen(call: Any) -> Any:
    return hidden(call) if isinstance(call, types.FunctionType) else call


def function_in(owner: Any, name: str) -> Any:
    """The function behind an attribute, beneath torch's own decorators; ``None`` where it has no code of Python."""
    found = inspect.getattr_static(owner, name, None)
    while isinstance(inner := getattr(found, "__wrapped__", None), types.FunctionType) and inner.__module__.startswith(
        "torch."
    ):
        found = inner
    is_plain = isinstance(found, types.FunctionType) and not found.__code__.co_flags & _NO_CALLS
    return found if is_plain else None


def noting(
    before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> Callable[[Any], Callable[..., Any]]:
    """Makes what is called in the place of a function: it hears each call but those that a compiler looks at."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            if before is not None:
                before(*args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                after(result, *args, **kwargs)
            return result

        return call

    return make


class Patches:
    """Functions whose calls are seen.

    Example:
        >>> class Example:
        ...     def name(self):
        ...         return "own"
        >>> before, patches = Example.name, Patches()
        >>> patches.wrap(Example, "name", lambda original: lambda self: f"seen, {original(self)}")
        True
        >>> Example().name(), Example.name is before
        ('seen, own', True)
        >>> patches.restore()
        >>> Example().name()
        'own'
    """

    def __init__(self) -> None:
        self._exchanged: list[_Exchange] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
        """Has the calls of a function seen, whatever names it is called by.

        Args:
            make: takes the function as it was and gives what is called in its place, with all arguments that have a
                place in the place that they have. It is asked twice: for calls with and without modes of the user's
                that see calls of functions of torch; they see what the function as it was does, and nothing else.

        Returns:
            Whether there is such a function that is written in Python.
        """
        function = function_in(owner, name)
        if function is None:
            return False
        self._exchange(function, make, None)
        return True

    def wrap_some(self, owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[Container[Any] | None], None]:
        """Has some calls of a method seen; the others cost next to nothing, and no call more.

        Returns:
            What takes the types and ids of the objects whose calls are seen from then on, ``None`` for all.
        """
        function = function_in(owner, name)
        try:
            return self._exchange(function, make, _ALL).choose
        except (OSError, SyntaxError, ValueError):  # its text is not there
            self._exchange(function, make, None)
            return lambda chosen: None

    def _exchange(self, function: Any, make: Callable[[Any], Any], chosen: Container[Any] | None) -> _Exchange:
        exchange = _Exchange(function, make, chosen)
        _ABOVE.setdefault(function, []).append(exchange)
        self._exchanged.append(exchange)
        return exchange

    def restore(self) -> None:
        """Puts everything back; beneath what someone else has put there since, calls are passed on."""
        while self._exchanged:
            self._exchanged.pop().end()
