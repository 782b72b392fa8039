"""How the command line stops a script at its first step."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple


class Call(NamedTuple):
    """The arguments of a step that was about to run.

    Args:
        model: the model.
        loss_fn: the loss function.
        batch: the logical batch, or a window.
        options: the other arguments by name; a verb takes those that it has a use for.
    """

    model: Any
    loss_fn: Any
    batch: Any
    options: dict[str, Any]


first_call: ContextVar[Callable[[Call], None] | None] = ContextVar("anybatch_first_call", default=None)
