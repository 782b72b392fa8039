"""How the command line stops a script at its first step, and what a doctor that is attached is told by a step."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Call(NamedTuple):
    """The arguments of a step that was about to run."""

    model: Any  # the model
    loss_fn: Any  # the loss function
    batch: Any  # the logical batch, or a window
    options: dict[str, Any]  # the other arguments by name; a verb takes those that it has a use for


first_call: ContextVar[Callable[[Call], None] | None] = ContextVar("anybatch_first_call", default=None)


class Watcher(Protocol):
    """Looks on while a model is trained, as a doctor does."""

    def announced(self, *subjects: Any) -> None:
        """Is notified of what a step is about to train: the model, a loss that is a module, the optimizers."""

    def look_away(self) -> None:
        """Sees nothing until ``look_again``."""

    def look_again(self) -> None:
        """Goes on."""

    def takes_gradients(self) -> None:
        """Is told that anybatch puts gradients aside, as often as it likes until ``gave_gradients``."""

    def gave_gradients(self, items: float) -> None:
        """Is told that they are there again, with what was added."""


trial: ContextVar[bool] = ContextVar("anybatch_trial", default=False)
"""Whether anybatch runs a step for itself, of which nothing stays."""
watchers: list[Watcher] = []
"""Those that look on in this process."""
WEIGHT = "anybatch_weight"
"""The attribute of the gradient of a loss that has its weight, without the scale of a ``GradScaler``."""


def announce(model: Any, loss_fn: Any, optimizers: Sequence[Any]) -> None:
    """Tells those that look on what a step is about to train."""
    for one in watchers:
        one.announced(model, loss_fn, *optimizers)


@dataclass(slots=True)
class Added:
    """What is added to gradients that were put aside."""

    items: float = 1.0  # the weight that all of it has beside what was there


def _give(watcher: Watcher, added: Added) -> None:
    watcher.gave_gradients(added.items)


def gradients_aside() -> AbstractContextManager[Added]:
    """Where anybatch takes gradients off that come back; whoever looks on does not take that for a clearing."""
    return _told_of_gradients() if watchers else nullcontext(Added())


@contextmanager
def _told_of_gradients() -> Iterator[Added]:
    added = Added()
    with ExitStack() as stack:
        for one in watchers:
            one.takes_gradients()
            stack.callback(_give, one, added)
        yield added


@contextmanager
def unobserved() -> Iterator[None]:
    """What anybatch runs for itself: a plan, a trial, a check. Nobody looks on, as it is no step of the training.

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
        if "torch._dynamo" in sys.modules:  # what is compiled for a trial counts towards the limit of recompilations
            import torch

            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
