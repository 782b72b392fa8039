"""The entries of containers, read without running the user's code."""

from collections import UserDict
from typing import Any


def entries_of(value: Any) -> list[tuple[Any, Any]]:
    """The keys or positions of a list, tuple, dictionary or ``UserDict`` with its entries; empty for anything else.

    The user's subclass of one may run code when it is read, such as a random augmentation, so its entries are taken as
    they are stored.
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
