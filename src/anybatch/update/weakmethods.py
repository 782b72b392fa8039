"""References to an object from what it has, which do not keep it alive."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import ref

P = ParamSpec("P")
T = TypeVar("T")


class Owner(Generic[T]):
    """The object that has this one, as long as someone else holds it.

    The object goes with its last reference then, and with it the memory of its model; a cycle of references would keep
    them until the garbage collector runs. In a copy by ``copy.deepcopy`` it is the copy of the object.
    """

    def __init__(self, owner: T) -> None:
        self._reference = ref(owner)

    def __call__(self) -> T:
        """The object."""
        found = self._reference()
        if found is None:
            raise ReferenceError("the object that this one belongs to is gone")
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> "Owner[T]":
        return Owner(copy.deepcopy(self(), memo))

    def __reduce__(self) -> Any:
        kind = type(self()).__name__
        raise TypeError(
            f"got a {kind} to pickle, which holds hooks and locks of this process; save the state_dict() of model, "
            f"optimizer and {kind}, and load them into new ones"
        )


def _call(owner: Owner[Any], name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(owner(), name)(*args, **kwargs)


def weak_method(method: Callable[P, T]) -> Callable[P, T]:
    """Calls a method of an object that may own the caller; see ``Owner``."""
    bound: Any = method
    return partial(_call, Owner(bound.__self__), bound.__name__)
