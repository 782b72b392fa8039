"""Several batches of a loader as one logical batch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from anybatch.errors import BatchError
from anybatch.tensors.batches import split
from anybatch.tensors.layout import lay_out


class Window:
    """Several batches of a loader that make one logical batch.

    Args:
        batches: in the order of the loader.

    Example:
        >>> len(Window([1, 2]))
        2
    """

    __slots__ = ("batches",)

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __repr__(self) -> str:
        return f"Window of {len(self.batches)} batches"


def windows(
    loader: Iterable[Any],
    *,
    batches: int | None = None,
    samples: int | None = None,
    tokens: int | None = None,
    count: Callable[[Any], Any] | None = None,
    broadcast: Sequence[str] = (),
) -> Iterator[Window]:
    """Groups the batches of a loader into windows; each window makes one step.

    The last window of a pass may be short; ``TrainStep`` and ``backward`` weigh by what is really there, so it is exact
    too. A window is kept in host memory whole.

    Args:
        loader: any iterable of batches, of known length or not.
        batches: batches in a window.
        samples: samples in a window; a batch that reaches over the end is cut and goes on in the next window.
        tokens: items in a window at most, by ``count``; a batch that alone has more makes a window alone.
        count: counts the items of a batch, such as ``count_tokens("labels")``; goes with ``tokens``.
        broadcast: dotted paths of leaves that are not cut, where ``samples`` cuts a batch.

    Returns:
        An iterator over windows.

    Raises:
        BatchError: not exactly one of ``batches``, ``samples`` and ``tokens`` was given, or it is no positive integer.

    Example:
        >>> import torch
        >>> loader = [torch.zeros(4, 2) for _ in range(7)]
        >>> [len(window) for window in windows(loader, batches=3)]
        [3, 3, 1]
        >>> [[len(batch) for batch in window] for window in windows(loader, samples=10)]
        [[4, 4, 2], [2, 4, 4], [4, 4]]
    """
    given = {name: n for name, n in (("batches", batches), ("samples", samples), ("tokens", tokens)) if n is not None}
    if len(given) != 1:
        raise BatchError(f"got {given or 'none of them'}; expected exactly one of batches=, samples= and tokens=")
    name, size = next(iter(given.items()))
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise BatchError(f"{name}={size!r}; expected an integer of at least 1")
    if (tokens is None) != (count is None):
        raise BatchError("tokens= and count= go together: windows(loader, tokens=65536, count=count_tokens('labels'))")
    if batches is not None:
        return _by_batches(loader, size)
    if count is not None:
        return _by_tokens(loader, size, count)
    return _by_samples(loader, size, broadcast)


def _by_batches(loader: Iterable[Any], size: int) -> Iterator[Window]:
    held: list[Any] = []
    for batch in loader:
        held.append(batch)
        if len(held) == size:
            yield Window(held)
            held = []
    if held:
        yield Window(held)


def _by_samples(loader: Iterable[Any], size: int, broadcast: Sequence[str]) -> Iterator[Window]:
    held: list[Any] = []
    room = size
    for batch in loader:
        layout = lay_out(batch, broadcast)
        first = min(room, layout.rows)
        rest, last = divmod(layout.rows - first, size)
        for piece_rows, piece in zip(
            cuts := [first, *[size] * rest, *([last] if last else [])], split(layout, cuts), strict=True
        ):
            held.append(piece)
            room -= piece_rows
            if room == 0:
                yield Window(held)
                held, room = [], size
    if held:
        yield Window(held)


def _by_tokens(loader: Iterable[Any], size: int, count: Callable[[Any], Any]) -> Iterator[Window]:
    held: list[Any] = []
    total = 0.0
    for batch in loader:
        items = float(count(batch))
        if held and total + items > size:
            yield Window(held)
            held, total = [], 0.0
        held.append(batch)
        total += items
    if held:
        yield Window(held)
