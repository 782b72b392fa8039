"""The text of the demonstration: the sources of Python's standard library, which every machine with Python has."""

import math
import os
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from anybatch.demo.facts import TextFacts

# Tests and idlelib repeat themselves; encodings and pydoc_data are tables; the rest is not the standard library.
_SKIPPED_FOLDERS = frozenset(
    (
        *("__pycache__", "dist-packages", "encodings", "idle_test", "idlelib", "pydoc_data", "site-packages"),
        *("test", "tests"),
    )
)
# What the build of this very Python wrote: not source, and different on every machine.
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")
_HELD_OUT_EVERY = 10


@dataclass(frozen=True, slots=True)
class SourceText:
    """Text to train on and text held out, split by files."""

    root: str  # the folder that the files are in
    train: bytes  # the files to train on, one after the other
    validation: bytes  # the files held out
    train_files: tuple[str, ...]  # their paths below ``root``, in the order of the text
    validation_files: tuple[str, ...]  # as ``train_files``

    def facts(self) -> TextFacts:
        """How the demo describes it."""
        trained, held_out = (len(self.train_files), len(self.train)), (len(self.validation_files), len(self.validation))
        return TextFacts(self.root, *trained, *held_out, unigram_entropy(self.train))


def read_sources(root: str | Path | None = None) -> SourceText:
    """Reads the Python files below a folder, by default Python's own library, in an order that depends on names alone.

    Raises:
        FileNotFoundError: there are too few files to hold one out.
    """
    folder = Path(sysconfig.get_path("stdlib") if root is None else root)
    paths = _python_files(folder)
    if len(paths) < _HELD_OUT_EVERY:
        raise FileNotFoundError(
            f"got {len(paths)} Python files below {folder}, expected {_HELD_OUT_EVERY} or more: this Python may keep "
            f"its library in an archive; name a folder with Python files with --sources"
        )
    held_out = paths[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    kept = [path for index, path in enumerate(paths) if index % _HELD_OUT_EVERY != _HELD_OUT_EVERY - 1]
    return SourceText(str(folder), _joined(folder, kept), _joined(folder, held_out), tuple(kept), tuple(held_out))


def unigram_entropy(text: bytes) -> float:
    """Computes the entropy of a single byte: what a model that knows only how often each byte occurs can reach.

    Source: Shannon, "A Mathematical Theory of Communication" (1948), H = -sum p log2 p, in bits per byte.

    Example:
        >>> unigram_entropy(b"abcd"), unigram_entropy(b"aaaa")
        (2.0, 0.0)
    """
    shares = [count / len(text) for count in Counter(text).values()]
    return math.fsum(-share * math.log2(share) for share in shares if share < 1)


def _python_files(folder: Path) -> list[str]:
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [one for one in folders if one not in _SKIPPED_FOLDERS and not one.startswith(_SKIPPED_PREFIXES)]
        found += [Path(place, one) for one in files if one.endswith(".py") and not one.startswith(_SKIPPED_PREFIXES)]
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _joined(folder: Path, paths: list[str]) -> bytes:
    return b"\n".join((folder / path).read_bytes().replace(b"\r\n", b"\n") for path in paths)
