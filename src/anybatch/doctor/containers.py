"""What containers of the user's hold, read without running any code of theirs."""

from collections import UserDict
from typing import Any


def entries_of(value: Any) -> list[tuple[Any, Any]]:
    """The keys or positions of a list, tuple or dictionary with its entries; empty for anything else.

    A class of the user's that is one of these may do anything when it is read, such as augment a sample at random, so
    its entries are taken as they are stored.

    Example:
        >>> entries_of({"x": 1, "y": 2})
        [('x', 1), ('y', 2)]
        >>> entries_of((5,))
        [(0, 5)]
    """
    if isinstance(value, dict):
        return list(dict.items(value))
    if isinstance(value, list):
        return list(enumerate(list.__iter__(value)))
    if isinstance(value, tuple):
        return list(enumerate(tuple.__iter__(value)))
    if isinstance(value, UserDict):
        return entries_of(vars(value).get("data"))
    return []
