"""The protocol of a recorder."""

from typing import TYPE_CHECKING, Protocol

from anybatch.records.results import StepResult

if TYPE_CHECKING:
    from anybatch.step import TrainStep


class Observer(Protocol):
    """A function that a step calls after each logical batch, for recorders and progress bars.

    Example:
        >>> def observer(step: "TrainStep", result: StepResult) -> None:
        ...     history.append((step.updates, result))
        >>> history = []
    """

    def __call__(self, step: "TrainStep", result: StepResult) -> None:
        """Receives the step and the result of its latest logical batch."""
