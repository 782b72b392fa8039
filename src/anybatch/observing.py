"""What is notified of every logical batch."""

from typing import TYPE_CHECKING, Protocol

from anybatch.records.results import StepResult

if TYPE_CHECKING:
    from anybatch.step import TrainStep


class Observer(Protocol):
    """Is notified of every logical batch, after its update; recorders and progress bars hang on this.

    Example:
        >>> def observer(step: "TrainStep", result: StepResult) -> None:
        ...     history.append((step.updates, result))
        >>> history = []
    """

    def __call__(self, step: "TrainStep", result: StepResult) -> None:
        """Takes the result of a logical batch."""
