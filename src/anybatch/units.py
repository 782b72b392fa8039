"""Bytes, seconds and counts as text."""

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(count: float) -> str:
    """Writes a number of bytes with a binary unit (1 KiB = 1024 B).

    Args:
        count: bytes, may be negative.

    Returns:
        The text, with three significant digits or so.

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
    """Writes a duration with a unit that suits it.

    Args:
        seconds: the duration.

    Returns:
        The text.

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
