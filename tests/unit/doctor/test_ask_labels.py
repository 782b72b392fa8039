"""Labels that have nothing to do with their rows are told, and what is right by chance alone is not called learned."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from answer_runs import EVIDENCE
from anybatch.doctor.views.outcomes import outcome
from anybatch.records.lossfacts import Printed, Probed
from number_runs import Training, call, fires, quiet
from test_doctor_ask import asked, nothing_was_compiled

__all__ = ["nothing_was_compiled"]


@pytest.mark.parametrize(("passes", "expected"), [(1, True), (2, False)])
def test_rows_that_are_mostly_zero_are_told_apart_and_come_again_or_not(passes: int, expected: bool) -> None:
    """Counts of words, of which more came than are kept: in the first pass each is new."""
    rows = torch.zeros(8000, 60)
    rows[torch.arange(8000)[:, None], torch.rand(8000, 60).topk(7).indices] = 1
    labels = torch.randint(0, 3, (8000,))

    def train() -> None:
        net = nn.Linear(60, 3)
        optimizer = torch.optim.Adam(net.parameters())
        for chosen in [one for _ in range(passes) for one in torch.randperm(8000).split(400)]:
            optimizer.zero_grad()
            F.cross_entropy(net(rows[chosen]), labels[chosen]).backward()
            optimizer.step()

    (found,) = [one for one in asked(train, "labels") if one.answer]
    assert (found.answer, found.evidence["fresh"]) == ("yes", expected)
    assert found.evidence["samples"] > 1000


@pytest.mark.parametrize(("right", "is_told"), [(0.21, True), (0.9, False)])
def test_labels_unrelated_is_quiet_where_an_evaluation_knows_them(right: float, is_told: bool) -> None:
    """What is flat at first and falls later was learned by heart, or is hard to begin with."""
    evidence = EVIDENCE["labels"] | {"classes": 5, "fresh": False}
    answer = Probed(probe="labels", root=0, answer="yes", evidence=evidence)
    said = Printed(label="test accuracy", steps=(120,), values=(right,), file="train.py", line=9)
    late = Training(steps=120, loss=lambda step: 1.61 if step < 60 else 0.3, call=call(guess=1.61, classes=5))
    run = replace(late, after=(said, answer)).run()
    if is_told:
        fires(run, "LABELS_UNRELATED", "warning")
    else:
        quiet(run, "LABELS_UNRELATED")


@pytest.mark.parametrize(
    ("label", "value", "word"),
    [("test accuracy", 0.2, "undecided"), ("test accuracy", 0.4, "learning"), ("train accuracy", 0.2, "learning")],
)
def test_what_is_right_by_chance_alone_is_not_learned(label: str, value: float, word: str) -> None:
    said = Printed(label=label, steps=(120,), values=(value,), file="train.py", line=9)
    little = Training(
        steps=120, loss=lambda step: 1.6 - 0.003 * step, call=call(guess=1.61, classes=5), after=(said,)
    )  # fmt: skip
    found = outcome(little.run())
    assert (found.word, "guesses one of 5 classes" in found.said) == (word, word == "undecided")
