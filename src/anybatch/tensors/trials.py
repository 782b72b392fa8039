"""Says that what runs now is no part of the training: a proof runs some samples of a batch twice."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_trying: ContextVar[bool] = ContextVar("anybatch_trial", default=False)


@contextmanager
def trial() -> Iterator[None]:
    """Marks what runs in its block: everything that it changes is put back, so recorders look away.

    Example:
        >>> with trial():
        ...     print(is_trial())
        True
        >>> is_trial()
        False
    """
    token = _trying.set(True)
    try:
        yield
    finally:
        _trying.reset(token)


def is_trial() -> bool:
    """Whether what runs now leaves no trace, so that nobody should learn anything about the training from it."""
    return _trying.get()
