"""Sees calls of loss functions by themselves, without a whole doctor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from anybatch.doctor.recording.journal import Counter, Journal
from anybatch.doctor.recording.recordings import Recording, Sampling
from anybatch.doctor.samples.losscalls import Calls, CurrentRoot


class _Forgets(dict[Any, Any]):
    """Has each call recorded by itself, whatever came before it."""

    def __setitem__(self, key: Any, value: Any) -> None:
        return


@contextmanager
def patched(emit: Callable[[Any], Any], root: CurrentRoot | None = None) -> Iterator[Recording]:
    """Has the facts of calls given to a function; values are read while ``sampled_much`` of what it gives is set."""
    counter = Counter()
    recording = Recording(Journal(counter, None, 2**20), counter, Sampling())

    def emitted(fact: Any) -> int:
        emit(fact)
        return 0

    recording.emit, recording._known = emitted, _Forgets()
    if root is not None and root.module is not None:
        recording.numbering.root(root.module)
    calls = Calls(recording, emitted, lambda: root, lambda *_: None)
    calls.attach()
    try:
        yield recording
    finally:
        recording.patches.restore()
        calls.end_evaluation()
