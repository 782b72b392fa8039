"""The errors of anybatch: each says what it got, what it expected and what to do, and carries the facts as fields.

::

    Exception
    └── AnyBatchError
        ├── BatchError           the batch cannot be split as it is             .path
        ├── CountError           the counts do not weigh the micro-batches      .path
        ├── LossError            the loss function broke its contract           .name
        ├── NotSplittable        a module couples the samples                   .modules
        ├── DoesNotFit           nothing smaller is left to try                 .needed .budget .modules
        ├── PlanMismatch         a plan was made for something else             .changed
        ├── UpdateInterrupted    the optimizer stopped within an update         .changed .state_changed
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
    """Every error that anybatch raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows, which asks for it by this name: the frames of the user, without those in here."""
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
        path: where in the batch, such as ``batch['mask']``; empty if it is no single place.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class CountError(AnyBatchError, ValueError):
    """The counts by which micro-batches are weighted are missing, not finite, negative or do not add up.

    Attributes:
        path: where in the batch the count looks, if known.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class LossError(AnyBatchError, ValueError):
    """The loss function returned something that is not a loss.

    Attributes:
        name: the name of the loss, empty for a single one.
    """

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class NotSplittable(AnyBatchError, RuntimeError):
    """Modules couple the samples of a batch, so that micro-batches would give another gradient.

    Attributes:
        modules: the qualified names of the modules.
    """

    def __init__(self, message: str, *, modules: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.modules = tuple(modules)


class DoesNotFit(AnyBatchError, RuntimeError):
    """The smallest piece of work that is left still runs out of memory.

    Attributes:
        needed: bytes of the smallest plan, ``None`` if they are not known.
        budget: bytes that were allowed, ``None`` if there was no budget.
        modules: the modules that hold the bytes, if known.
    """

    def __init__(
        self, message: str, *, needed: int | None = None, budget: int | None = None, modules: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.needed = needed
        self.budget = budget
        self.modules = tuple(modules)


class PlanMismatch(AnyBatchError, ValueError):
    """A plan is to be used for another model, loss, optimizer, device or torch than it was made for, or is damaged.

    Attributes:
        changed: what changed, by name: what it was planned for and what is here.
    """

    def __init__(self, message: str, changed: Mapping[str, tuple[str, str]] | None = None) -> None:
        super().__init__(message)
        self.changed = dict(changed or {})


class UpdateInterrupted(AnyBatchError, RuntimeError):
    """``optimizer.step`` failed after it had begun to change weights or its own state; it was not applied again.

    Attributes:
        changed: names of the parameters that had changed; with a fused optimizer all that may have.
        state_changed: whether the optimizer's state had changed.
    """

    def __init__(self, message: str, *, changed: Sequence[str] = (), state_changed: bool = True) -> None:
        super().__init__(message)
        self.changed = tuple(changed)
        self.state_changed = state_changed


class CutClosed(AnyBatchError, RuntimeError):
    """A gradient reached a cut tensor after its ``with`` block had ended, where nothing can carry it upstream."""


class AnyBatchWarning(UserWarning):
    """Something that is probably not what was meant, though training can go on."""


def warn(text: str) -> None:
    """Warns at the line of the caller of the package, however deep in it this is called."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "anybatch":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, AnyBatchWarning, stacklevel=level)
