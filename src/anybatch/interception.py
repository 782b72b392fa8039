"""The hooks by which a command stops a script at its first step, and by which a step notifies an attached doctor."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Call(NamedTuple):
    """The arguments of a step that is about to run."""

    model: Any
    loss_fn: Any
    batch: Any  # the logical batch, or a window
    options: dict[str, Any]  # the other arguments by name; a command uses those that it knows


first_call: ContextVar[Callable[[Call], None] | None] = ContextVar("anybatch_first_call", default=None)


class Watcher(Protocol):
    """Observes a training in this process, as a doctor does."""

    def announced(self, *subjects: Any) -> None:
        """Called before a step with what it trains: the model, the loss function and the optimizers."""

    def look_away(self) -> None:
        """Ignores everything until ``look_again``."""

    def look_again(self) -> None:
        """Observes again."""

    def takes_gradients(self) -> None:
        """Called before anybatch puts gradients aside; it may do so repeatedly until ``gave_gradients``."""

    def gave_gradients(self, items: float) -> None:
        """Called when the gradients are back, with the weight of what was added to them."""


trial: ContextVar[bool] = ContextVar("anybatch_trial", default=False)
"""Whether a step that runs now is one of anybatch's own trials, which leave no trace."""
watchers: list[Watcher] = []
"""The observers in this process."""
WEIGHT = "anybatch_weight"
"""The attribute of a loss's gradient that has the loss's weight, without the scale of a ``GradScaler``."""


def announce(model: Any, loss_fn: Any, optimizers: Sequence[Any]) -> None:
    """Notifies all observers of what a step is about to train."""
    for one in watchers:
        one.announced(model, loss_fn, *optimizers)


@dataclass(slots=True)
class Added:
    """What was added to gradients that were put aside."""

    items: float = 1.0  # its weight beside the gradients that were put aside


def _give(watcher: Watcher, added: Added) -> None:
    watcher.gave_gradients(added.items)


def gradients_aside() -> AbstractContextManager[Added]:
    """A block that puts gradients aside and back; observers must not take this for ``zero_grad``."""
    return _announced_aside() if watchers else nullcontext(Added())


@contextmanager
def _announced_aside() -> Iterator[Added]:
    added = Added()
    with ExitStack() as stack:
        for one in watchers:
            one.takes_gradients()
            stack.callback(_give, one, added)
        yield added


@contextmanager
def unobserved() -> Iterator[None]:
    """A block in which anybatch runs a plan, a trial or a check: observers ignore it, as it is no training step.

    Example:
        >>> class Log:
        ...     announced = print
        ...     look_away = lambda self: print("away")
        ...     look_again = lambda self: print("back")
        >>> watchers.append(Log())
        >>> with unobserved():
        ...     print("trial")
        away
        trial
        back
        >>> del watchers[-1]
    """
    with ExitStack() as stack:
        for one in watchers:
            one.look_away()
            stack.callback(one.look_again)
        stack.callback(trial.reset, trial.set(True))
        if "torch._dynamo" in sys.modules:  # compiling for a trial would count towards the recompilation limit
            import torch

            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
