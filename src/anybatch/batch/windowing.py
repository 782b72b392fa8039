"""Windows: several batches of a loader that make one logical batch."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from anybatch.batch.batches import sizes_of, split
from anybatch.batch.layout import IN_WINDOWS, lay_out, placement, rows_of
from anybatch.batch.trees import flat
from anybatch.errors import AnyBatchError, BatchError


class Window:
    """Several batches of a loader that make one logical batch."""

    __slots__ = ("batches",)

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __repr__(self) -> str:
        return f"Window of {len(self.batches)} batches"


def note_the_batches(error: Exception, batch: Any) -> None:
    """Notes on an error of the user's code that it may have been given several batches as one: a list, an iterator."""
    if isinstance(error, AnyBatchError):
        return
    if isinstance(batch, Iterator):
        kind = type(batch).__name__
        error.add_note(f"the batch is a {kind}, and loss_fn was called with it. If it contains batches: {IN_WINDOWS}")
    if type(batch) is not list or len(batch) < 2:
        return
    try:
        rows = [lay_out(one).rows for one in batch]
    except BatchError:
        return
    if min(rows) > 1 and all(len([*filter(rows_of, flat(one))]) > 1 for one in batch):
        error.add_note(
            f"the batch is a list of {len(batch)}, the first of {rows[0]} rows, like batches of a loader, and "
            f"loss_fn was called with it or part of it. If they are batches: {IN_WINDOWS}"
        )


class Windows:
    """The windows of a loader; each ``for`` loop iterates over the loader again."""

    def __init__(
        self, loader: Iterable[Any], make: Callable[[Iterable[Any]], Iterator[Window]], batches: int | None
    ) -> None:
        self._loader, self._make, self._batches = loader, make, batches
        self._begun: Iterator[Window] | None = None
        self._passes = 0

    def __iter__(self) -> Iterator[Window]:
        begun, self._begun = self._begun, None  # a loop after next() continues that pass
        return self._pass() if begun is None else begun

    def __next__(self) -> Window:
        if self._begun is None:
            self._begun = self._pass()
        return next(self._begun)

    def __len__(self) -> int:
        if self._batches is None:
            raise TypeError("these windows have no length; only windows(loader, batches=n) knows it in advance")
        return math.ceil(len(self._loader) / self._batches)  # type: ignore[arg-type]  # raises its own TypeError

    def _pass(self) -> Iterator[Window]:
        self._passes += 1
        window = None
        for window in self._make(self._loader):
            yield window
        if window is None and self._passes > 1 and iter(self._loader) is self._loader:
            raise BatchError(
                f"the loader of these windows, a {type(self._loader).__name__}, is an iterator and is exhausted; "
                "expected one that can be iterated in each epoch, such as a DataLoader or a list"
            )


def windows(
    loader: Iterable[Any],
    *,
    batches: int | None = None,
    samples: int | None = None,
    tokens: int | None = None,
    count: Callable[[Any], Any] | None = None,
    broadcast: Sequence[str] = (),
    layout: Mapping[str, int | None] | None = None,
) -> Windows:
    """Groups the batches of a loader into windows, each of which is the logical batch of one step.

    The last window of a pass may be shorter. Its gradient is exact, too, since ``TrainStep`` and ``backward`` weight by
    the actual counts. A whole window is held in memory, where the loader put its batches. Create it once, outside of
    the loop over epochs: each epoch iterates over the loader again.

    Args:
        loader: any iterable of batches, with or without a length.
        batches: number of batches in a window.
        samples: number of samples in a window; a batch that crosses the end is split between two windows.
        tokens: the most items in a window, by ``count``; a batch with more makes a window alone.
        count: counts the items of a batch, such as ``count_tokens("labels")``; required with ``tokens``.
        broadcast: with ``samples``: dotted paths of leaves that are not split.
        layout: with ``samples``: the sample dimension by dotted path, see ``anybatch.backward``.

    Returns:
        The windows; they can be iterated over repeatedly, and have a length with ``batches``.

    Raises:
        BatchError: not exactly one of ``batches``, ``samples`` and ``tokens`` is given, it is not a positive integer,
            or only one of ``tokens`` and ``count`` is given.

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
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise BatchError(f"windows over {loader!r}, which is not iterable; expected a loader, or a list of batches")
    name, size = next(iter(given.items()))
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise BatchError(f"{name}={size!r}; expected an integer of at least 1")
    if (tokens is None) != (count is None):
        raise BatchError("tokens= and count= go together: windows(loader, tokens=65536, count=count_tokens('labels'))")
    make: Callable[[Iterable[Any]], Iterator[Window]]
    if batches is not None:
        make = partial(_by_batches, size)
    elif count is not None:
        make = partial(_by_tokens, size, count)
    else:
        make = partial(_by_samples, size, placement(broadcast, layout))
    return Windows(loader, make, batches)


def _by_batches(size: int, loader: Iterable[Any]) -> Iterator[Window]:
    coming = iter(loader)
    while held := list(itertools.islice(coming, size)):
        yield Window(held)
        if len(held) < size:  # a loader may begin again when it is asked after its end
            return


def _by_samples(size: int, broadcast: Sequence[str], loader: Iterable[Any]) -> Iterator[Window]:
    held: list[Any] = []
    room = size
    for batch in loader:
        layout = lay_out(batch, broadcast)
        first = min(room, layout.rows)
        sizes = [first, *sizes_of(layout.rows - first, size)]
        for rows, piece in zip(sizes, split(layout, sizes), strict=True):
            held.append(piece)
            room -= rows
            if room == 0:
                yield Window(held)
                held, room = [], size
    if held:
        yield Window(held)


def _by_tokens(size: int, count: Callable[[Any], Any], loader: Iterable[Any]) -> Iterator[Window]:
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
