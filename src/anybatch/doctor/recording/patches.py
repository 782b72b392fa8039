"""Replaces attributes of classes and modules, and puts everything back as it was."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

HIDDEN = "<anybatch doctor, passed over like importlib._bootstrap>"
"""The file that replacements say they are from: ``warnings`` then names the user's line, and not one of ours."""
_ABSENT: Any = object()
_GONE = "anybatch_restored_to"


def hidden(function: Any) -> Any:
    """Has warnings pass over a function.

    Args:
        function: whose code says that it is from another file from now on.
    """
    function.__code__ = function.__code__.replace(co_filename=HIDDEN)
    return function


def _dressed(replacement: Any, original: Any) -> Any:
    """Gives a replacement the name, the signature, the documentation and the marks of what it replaces.

    Whoever asks for its signature, as Accelerate does, or pickles it by name, as ``torch.save`` does, finds the
    original.
    """
    return functools.update_wrapper(hidden(replacement), original)


def _alive(value: Any) -> Any:
    """What a replacement that was taken off below another one had replaced."""
    while _GONE in getattr(value, "__dict__", ()):
        value = vars(value)[_GONE]
    return value


class _Held:
    """Has a replacement, and in a pickle what was replaced."""

    __slots__ = ("call", "original")

    def __init__(self, call: Any, original: Any) -> None:
        self.call, self.original = call, original

    def __reduce__(self) -> Any:  # as a class that is known where nothing of the doctor is
        return SimpleNamespace, (), {"call": self.original}


def _with_original(replacement: Any, original: Any) -> Any:
    """A function that calls a replacement, and what was replaced once its class went through a pickle with its code.

    So do ``cloudpickle``, and joblib and Ray with it, where a class can't be imported; they could not pickle a doctor.
    """
    held = _Held(replacement, original)

    def call(*args: Any, **kwargs: Any) -> Any:
        return held.call(*args, **kwargs)

    return call


def _set(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute, of a class also where its metaclass would not have it."""
    (type.__setattr__ if isinstance(owner, type) else setattr)(owner, name, value)


class Patches:
    """Attributes that were replaced.

    Example:
        >>> class Example:
        ...     def name(self):
        ...         return "own"
        >>> patches = Patches()
        >>> patches.wrap(Example, "name", lambda original: lambda self: f"wrapped {original(self)}")
        >>> Example().name(), Example.name.__qualname__
        ('wrapped own', 'Example.name')
        >>> patches.restore()
        >>> Example().name()
        'own'
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._cells: list[tuple[Any, Any, Any]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces an attribute, if the owner has it.

        Args:
            owner: a class, module or object.
            name: of the attribute.
            make: takes what was there and gives what is to be there.
        """
        inherited = getattr(owner, name, _ABSENT)
        if inherited is _ABSENT:
            return
        own = vars(owner).get(name, _ABSENT)
        replacement = _dressed(make(inherited), inherited)
        if isinstance(owner, type) and (owner.__module__ == "__main__" or "<locals>" in owner.__qualname__):
            replacement = _dressed(_with_original(replacement, inherited), inherited)
        _set(owner, name, replacement)
        self._undo.append((owner, name, own, replacement))

    def wrap_closed(self, function: Any, make: Callable[[Any], Any]) -> bool:
        """Replaces the function that a decorated one closes over, so that every name of the decorated one has it.

        Args:
            function: made by a decorator with ``functools.update_wrapper``.
            make: takes the function inside and gives what is to be called.

        Returns:
            Whether it was found.
        """
        inside = getattr(function, "__wrapped__", None)
        for cell in getattr(function, "__closure__", None) or ():
            if inside is not None and cell.cell_contents is inside:
                replacement = _dressed(make(inside), inside)
                cell.cell_contents = replacement
                self._cells.append((cell, inside, replacement))
                return True
        return False

    def restore(self) -> None:
        """Puts everything back, the latest first.

        What someone else has replaced since is left as it is; if that is another one of these, it goes back further.
        """
        while self._cells:
            cell, inside, replacement = self._cells.pop()
            if cell.cell_contents is replacement:
                cell.cell_contents = _alive(inside)
            else:
                vars(replacement)[_GONE] = inside
        while self._undo:
            owner, name, own, replacement = self._undo.pop()
            if vars(owner).get(name, _ABSENT) is not replacement:
                vars(replacement)[_GONE] = own
                continue
            own = _alive(own)
            if own is _ABSENT:
                (type.__delattr__ if isinstance(owner, type) else delattr)(owner, name)
            else:
                _set(owner, name, own)
