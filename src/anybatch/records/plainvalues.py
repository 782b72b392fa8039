"""Records as plain values for JSON, and back."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, cast

from anybatch.records.reading import fields_of


class Plain:
    """Base of dataclasses that are written to, and read from, mappings of plain values."""

    __slots__ = ()
    _not_finite: ClassVar[Callable[[float], Any]] = float  # gives what stands for a float that is not finite

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON."""
        itself, instead = cast(Any, self), type(self)._not_finite
        return {one.name: plain(getattr(self, one.name), instead) for one in dataclasses.fields(itself)}

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Reads what ``to_dict`` gave; unknown fields are ignored.

        Raises:
            ValueError: a field without a default is missing, or a value does not have the type of its field.
        """
        kind: Any = cls
        found: Self = fields_of(kind)(values)
        return found


def plain(value: Any, not_finite: Callable[[float], Any] = float) -> Any:
    """Converts a value to the types of JSON.

    Args:
        value: mappings, sequences, sets, dataclasses and named tuples are converted with all that they contain; any
            other object becomes its ``str``.
        not_finite: gives what stands for a float that is not finite; such floats stay as they are by default.

    Example:
        >>> plain({"sizes": (1, 2), "error": math.inf}, str)
        {'sizes': [1, 2], 'error': 'inf'}
    """
    if isinstance(value, Plain):
        value = value.to_dict()
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(entry, not_finite) for name, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry, not_finite) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return not_finite(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def nothing(_: float) -> None:
    """Gives ``None`` for a number that is not finite; for ``plain``."""
