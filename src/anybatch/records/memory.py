"""Memory of a step: bytes of live tensors, by category and over time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anybatch.records.reading import Plain
from anybatch.records.showing import Shown
from anybatch.units import format_bytes

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
ACTIVATIONS = "activations"
BUFFERS = "buffers"
INPUTS = "inputs"
OTHER = "other"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS, INPUTS, OTHER)


@dataclass(frozen=True, slots=True)
class Moment:
    """One point of a timeline."""

    operation: str  # the operation that had just run
    line: str = ""  # the user's line that called it, such as ``"train.py:12"``; empty if unknown
    module: str = ""  # the qualified name of the module that it ran in; empty outside of modules and in the backward
    # the largest live tensors: for each its bytes, its category, and the line that allocated it
    largest: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline(Plain):
    """Live bytes after each operation; of many operations, those with the most bytes."""

    moments: tuple[Moment, ...] = ()  # the points, in order
    # for each category, in the order of ``CATEGORIES``, the bytes at each moment
    layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    operations: int = 0  # the number of operations in all

    @property
    def totals(self) -> list[int]:
        """The bytes at each moment."""
        return [sum(column) for column in zip(*self.layers.values(), strict=True)]

    @property
    def peak(self) -> int:
        """The index of the moment with the most bytes."""
        totals = self.totals
        return max(range(len(totals)), key=totals.__getitem__)

    @property
    def peak_bytes(self) -> int:
        """The most bytes."""
        return max(self.totals, default=0)


@dataclass(frozen=True, slots=True)
class Memory(Shown):
    """The bytes of live tensors while something ran, by category.

    Example:
        >>> print(Memory(3 * 2**20, 2**20, {"parameters": 2**20, "activations": 2**21}, operation="mm"))
        3.0 MiB at the peak, after mm: activations 2.0 MiB, parameters 1.0 MiB; 1.0 MiB at the end
    """

    peak_bytes: int  # the most bytes alive at one moment
    end_bytes: int  # the bytes alive at the end
    # the bytes at the peak by category, the keys from ``CATEGORIES``
    at_peak: Mapping[str, int] = field(default_factory=dict)
    at_end: Mapping[str, int] = field(default_factory=dict)  # the bytes at the end by category
    operation: str = ""  # the operation after which the peak was reached; empty if no operation was seen
    reserved_bytes: int = 0  # the most bytes that a caching allocator held; 0 if there is none
    # the bytes after each operation, with the lines that allocated them
    timeline: Timeline | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON, without the timeline."""
        return {name: value for name, value in Shown.to_dict(self).items() if name != "timeline"}

    def __str__(self) -> str:
        largest = sorted(self.at_peak.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in largest if count)
        after = f", after {self.operation}" if self.operation else ""
        return (
            f"{format_bytes(self.peak_bytes)} at the peak{after}: {parts or 'nothing'}; "
            f"{format_bytes(self.end_bytes)} at the end"
        )
