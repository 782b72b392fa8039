"""The table of crashes: ``table.toml`` says of errors what is asked about them, and what is told."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from anybatch.doctor.crashing import carried, cuts, exhausted, misuses, updating, written
from anybatch.doctor.crashing.kinds import Kind

_ASKING = {one.__name__.rpartition(".")[2]: one for one in (carried, cuts, exhausted, misuses, updating, written)}


def _rows() -> Iterator[Kind]:
    patterns: list[str] = []
    for row in tomllib.loads(Path(__file__).with_name("table.toml").read_text(encoding="utf-8"))["rows"]:
        patterns = [row.pop("pattern")] if "pattern" in row else row.pop("patterns", patterns)
        file, _, function = row.pop("asks", "").partition(".")
        yield Kind(patterns=tuple(patterns), **row, **({"asks": getattr(_ASKING[file], function)} if file else {}))


TABLE = tuple(_rows())
"""What is known of errors for which no call can be run again."""
