"""A forward that runs twice: without a graph, and later again with one, as if it were the first time."""

from collections.abc import Iterator
from contextlib import contextmanager

from anybatch.levers.checkpointing import Checkpoint, NotRecomputable, State
from anybatch.tensors.graph import recomputing
from anybatch.tensors.replay import Surroundings


class TwoPasses(Checkpoint):
    """Forwards of the same modules that are to run twice, the first time without a graph.

    Example:
        >>> import torch
        >>> dropout = torch.nn.Dropout()
        >>> passes = TwoPasses("encode", [dropout])
        >>> with torch.no_grad(), passes.first() as forward:
        ...     before = dropout(torch.ones(8))
        >>> with forward.again():
        ...     print(torch.equal(dropout(torch.ones(8)), before))
        True
    """

    @contextmanager
    def first(self) -> Iterator["Forward"]:
        """Runs its block for the first time.

        Returns:
            A context whose value runs it again.

        Raises:
            NotRecomputable: the block changed a parameter, or would draw other random numbers the second time.
        """
        if self.is_lazy:
            raise NotRecomputable(
                f"{self.title} can't be recomputed: it has lazy parameters, which its first forward makes; expected "
                "that they exist: call the model once under torch.no_grad() before",
                block=self.name,
            )
        self.refuse_hidden_dropout()
        forward = Forward(Surroundings(self.devices), State(self))
        yield forward
        forward.end()


class Forward:
    """One forward that has run, or is running, for the first time.

    Args:
        surroundings: random state and precision at its beginning.
        state: parameters and buffers of the modules.
    """

    def __init__(self, surroundings: Surroundings, state: State) -> None:
        self._surroundings, self._state = surroundings, state

    def end(self) -> None:
        """Looks at what the forward has changed."""
        self._surroundings.end_forward()
        self._state.end_forward()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs its block as if it were the first time; random state and buffers are afterwards as they were before."""
        with self._surroundings.again(), self._state.as_before(), recomputing():
            yield
