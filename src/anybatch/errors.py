"""The errors of anybatch. Each says what it got, what it expected and what to do, and has the facts as attributes.

::

    Exception
    └── AnyBatchError
        ├── BatchError           the batch cannot be split as it is             .path
        ├── CountError           the counts can't weight the micro-batches      .path
        ├── LossError            the loss function broke its contract           .name
        ├── NotSplittable        micro-batches would give another gradient      .modules
        ├── DoesNotFit           nothing smaller is left to try                 .needed .budget .modules
        ├── PlanMismatch         a plan was made for something else             .changed
        ├── UpdateInterrupted    the optimizer failed in the middle of a step   .changed .state_changed
        └── CutClosed            a cut tensor was used after its block
    UserWarning
    └── AnyBatchWarning
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType

_PACKAGE = __file__.removesuffix("errors.py")


class AnyBatchError(Exception):
    """The base class of all errors that anybatch raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """The traceback that IPython shows, without the frames of this package; IPython looks for this name."""
        shell = sys.modules["IPython"].get_ipython()
        frames = _of_others(self.__traceback__)
        shown: list[str] = shell.InteractiveTB.structured_traceback(type(self), self, frames, tb_offset=1)
        return shown


def _of_others(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this package."""
    if frames is None:
        return None
    rest = _of_others(frames.tb_next)
    if frames.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        return rest
    return TracebackType(rest, frames.tb_frame, frames.tb_lasti, frames.tb_lineno)


class BatchError(AnyBatchError, ValueError):
    """A batch, or an argument that describes one, can't be used as it is.

    Attributes:
        path: the place in the batch, such as ``batch['mask']``; empty where there is no single one.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class CountError(AnyBatchError, ValueError):
    """The counts that weight the micro-batches are missing, not finite, negative or do not add up.

    Attributes:
        path: the leaf of the batch that is counted; empty where it is not known.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class LossError(AnyBatchError, ValueError):
    """The loss function can't be called, or returned something that is not a loss.

    Attributes:
        name: the name of the loss; empty where the loss has no name.
    """

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class NotSplittable(AnyBatchError, RuntimeError):
    """Micro-batches would give another gradient than the whole batch.

    Attributes:
        modules: qualified names of the modules that couple the samples; empty where the loss does.
    """

    def __init__(self, message: str, *, modules: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.modules = tuple(modules)


class DoesNotFit(AnyBatchError, RuntimeError):
    """Not even the smallest micro-batch or plan fits in memory, or in the budget.

    Attributes:
        needed: bytes that are enough for a plan; at least so many if the text says so; ``None`` where not known.
        budget: bytes of the budget; ``None`` without one.
        modules: the modules that hold the bytes, as far as known.
    """

    def __init__(
        self, message: str, *, needed: int | None = None, budget: int | None = None, modules: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.needed = needed
        self.budget = budget
        self.modules = tuple(modules)


class PlanMismatch(AnyBatchError, ValueError):
    """A plan was made for another model, loss, optimizer, device or version of torch, or its file is damaged.

    Attributes:
        changed: what differs, by name: a pair of what the plan was made for and what is here.
    """

    def __init__(self, message: str, changed: Mapping[str, tuple[str, str]] | None = None) -> None:
        super().__init__(message)
        self.changed = dict(changed or {})


class UpdateInterrupted(AnyBatchError, RuntimeError):
    """``optimizer.step`` failed after it had begun to change weights or its own state. It was not run again.

    Attributes:
        changed: names of the parameters that changed; with a fused optimizer, of all that may have.
        state_changed: whether the optimizer's state changed.
    """

    def __init__(self, message: str, *, changed: Sequence[str] = (), state_changed: bool = True) -> None:
        super().__init__(message)
        self.changed = tuple(changed)
        self.state_changed = state_changed


class CutClosed(AnyBatchError, RuntimeError):
    """A gradient reached a cut tensor after its ``with`` block had ended, and can't be passed on."""


class AnyBatchWarning(UserWarning):
    """Something is probably a mistake, but training can go on."""


def warn(text: str) -> None:
    """Warns with the line outside of this package that called it, however deep in the package this is called."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "anybatch":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, AnyBatchWarning, stacklevel=level)
