"""Bytes, seconds and counts as text."""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from anybatch.errors import BatchError

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {
    **{unit.lower(): 1024**power for power, unit in enumerate(_BYTE_UNITS)},
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb", "pb"))},
    **{unit: 1024**power for power, unit in enumerate("kmgtp", 1)},  # as Docker and Slurm read them
}


def parse_bytes(text: str) -> int:
    """Reads a number of bytes with a unit: KiB, MiB and GiB, or K, M and G, are powers of 1024, kB, MB and GB of 1000.

    Args:
        text: such as ``"8GiB"``, ``"500 MB"`` or ``"1.5 GiB"``; a bare number is bytes.

    Returns:
        Bytes, at least 1 and below 2**63.

    Raises:
        ValueError: ``text`` is not a number of bytes in that range.

    Example:
        >>> parse_bytes("8GiB"), parse_bytes("8G"), parse_bytes("500 MB")
        (8589934592, 8589934592, 500000000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", text)
    factor = _FACTORS.get(match[2].lower() or "b") if match else None
    count = int(Decimal(match[1]) * factor) if match is not None and factor is not None else 0
    if not 1 <= count < 2**63 or (match and factor == 1 and Decimal(match[1]) != count):  # bytes that no machine has
        raise ValueError(f"got {text!r:.80}; expected a number of bytes such as '8GiB', '500MB' or '1.5 GiB'")
    return count


def read_budget(memory: Any) -> int | float | None:
    """Reads the ``memory=`` argument.

    Args:
        memory: bytes as an int; a text such as ``"8GiB"``; ``"free"`` for the free memory of the device; or a float
            in (0, 1], a fraction of its total memory, also as a text such as ``"50%"`` or ``"0.5"``.

    Returns:
        Bytes as an int, a fraction as a float, ``None`` for ``"free"``.

    Raises:
        BatchError: ``memory`` is none of these.

    Example:
        >>> read_budget("1KiB"), read_budget(0.5), read_budget("50%"), read_budget("free")
        (1024, 0.5, 0.5, None)
    """
    if memory == "free":
        return None
    if isinstance(memory, str):
        share = re.fullmatch(r"\s*(\d+\.\d*|\.\d+|\d+(?=\s*%))\s*(%?)\s*", memory)
        if share is not None and 0 < (part := float(share[1]) / (100 if share[2] else 1)) <= 1:
            return part
        try:
            return parse_bytes(memory)
        except ValueError as error:
            expected = str(error).partition("; ")[2]
            share_text = "or 'free', or a share of the device such as '50%'"
            raise BatchError(f"memory={memory!r}; {expected}; {share_text}") from None
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not memory > 0:
        raise BatchError(f"memory={memory!r}; expected bytes, '8GiB', 'free', or a share of the device such as 0.5")
    if isinstance(memory, int):
        if memory >= 2**63:
            raise BatchError(f"memory= is an int of {memory.bit_length()} bits; expected bytes, below 2**63")
        return memory
    if memory > 1:
        raise BatchError(f"memory={memory!r}; a float is a share of the device, at most 1.0; give bytes as an int")
    return memory


def format_bytes(count: float) -> str:
    """Formats a number of bytes, possibly negative, with a binary unit (1 KiB = 1024 B).

    Example:
        >>> format_bytes(512), format_bytes(160 * 2**20), format_bytes(1.5 * 2**30)
        ('512 B', '160.0 MiB', '1.5 GiB')
    """
    value = float(count)
    for unit in _BYTE_UNITS:
        if abs(value) < 1024 or unit == _BYTE_UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Formats a duration in us, ms, s or min.

    Example:
        >>> format_seconds(0.00042), format_seconds(0.034), format_seconds(2.5), format_seconds(150)
        ('420 us', '34.0 ms', '2.5 s', '2 min 30 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def at_lines(lines: Sequence[int]) -> str:
    """Lines of a file as words.

    Example:
        >>> at_lines([10]), at_lines([10, 12, 15])
        ('line 10', 'lines 10, 12 and 15')
    """
    *others, last = map(str, lines)
    return f"lines {', '.join(others)} and {last}" if others else f"line {last}"
