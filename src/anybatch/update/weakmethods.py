"""Calls of a method that do not keep its object alive."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakMethod

P = ParamSpec("P")
T = TypeVar("T")


def weak_method(method: Callable[P, T]) -> Callable[P, T]:
    """A function that calls a method of an object which may own the function.

    The object goes with its last reference then, and with it the memory of its model; a cycle of references would keep
    them until the garbage collector runs.

    Args:
        method: bound to the object.

    Raises:
        ReferenceError: in a call, if the object is gone.
    """
    reference = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        found: Callable[P, T] | None = reference()
        if found is None:
            raise ReferenceError(f"the object of {method_name} is gone")
        return found(*args, **kwargs)

    method_name = getattr(method, "__qualname__", "a method")
    return call
