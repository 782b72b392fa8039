"""What questions to copies have answered, for rules."""

from anybatch.records.events import Backward
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run


def answers(run: Run, probe: str, answer: str = "yes") -> list[Probed]:
    """The answers of one kind to a question: ``"yes"``, ``"no"`` or ``"unknown"``."""
    return [one for one in run.of(Probed) if one.probe == probe and one.answer == answer]


def began(run: Run) -> int:
    """The first backward: a wiring fault is there from it on, however late it was asked for."""
    return next((one.at for one in run.of(Backward)), 0)
