"""A forward that runs twice: without a graph, and later again with one, as if it were the first time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from anybatch.tensors.graph import recomputing
from anybatch.tensors.modules import modules_of
from anybatch.tensors.replay import NumpyDraws, Surroundings
from anybatch.tensors.state import State


class TwoPasses:
    """Forwards of the same modules that are to run twice.

    Args:
        name: what messages call it, such as ``the encode of Coupled``.
        models: whose parameters and buffers it reads.
        devices: on which it draws random numbers.
        advice: what to do where it can't run twice.

    Example:
        >>> dropout = torch.nn.Dropout()
        >>> passes = TwoPasses("encode", [dropout])
        >>> with torch.no_grad(), passes.first() as forward:
        ...     before = dropout(torch.ones(8))
        >>> with forward.again():
        ...     print(torch.equal(dropout(torch.ones(8)), before))
        True
    """

    def __init__(
        self,
        name: str,
        models: Sequence[torch.nn.Module],
        devices: Sequence[torch.device] = (),
        *,
        advice: str = "Change it after the backward",
    ) -> None:
        self._state = State(name, modules_of(*models), title=name, advice=advice)
        self._numpy = NumpyDraws()
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]

    @contextmanager
    def first(self) -> Iterator["Forward"]:
        """Runs its block for the first time.

        Returns:
            A context whose value runs it again.
        """
        forward = Forward(self._state, Surroundings(self._devices, self._numpy))
        yield forward
        forward.end()


class Forward:
    """One forward that has run, or is running, for the first time.

    Args:
        state: parameters and buffers of the modules.
        surroundings: random state and precision at its beginning.
    """

    def __init__(self, state: State, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._state = state.before_forward()

    def end(self) -> None:
        """Looks at what the forward has changed."""
        self._surroundings.end_forward()
        self._state.after_forward()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs its block as if it were the first time; random state and buffers are afterwards as they were before."""
        with self._surroundings.again(), self._state.as_before(), recomputing():
            yield
