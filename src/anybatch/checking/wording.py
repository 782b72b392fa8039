"""How numbers and names are said in the text of a cause."""

import math
import string
from collections.abc import Sequence
from typing import Any


def how_far(error: float, apart: float = 0.0) -> str:
    """How far one gradient or loss is off another, relative to it, or apart where it is 0 within rounding."""
    if apart:
        return f"{apart:.2g} off, where the whole batch's is 0"
    return f"{error:.2g} off" if math.isfinite(error) else "one is not finite"


class _Text(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        return how_far(value) if format_spec == "off" else super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return listed(value) if conversion == "l" else super().convert_field(value, conversion)


TEXT = _Text()
"""Fills the fields of a text in: ``:off`` says how far a number is off, ``!l`` lists names."""


def listed(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
