"""Labels that have nothing to do with their rows are told, and what is right by chance alone is not called learned."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from answer_runs import EVIDENCE
from answer_runs import asked as answered
from anybatch.doctor.ask.asking import run_probes
from anybatch.doctor.recorder import Doctor
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


def test_the_last_of_several_numbers_that_a_step_prints_is_not_what_is_known() -> None:
    """As of attacks of more and more strength, or of what is pruned more and more."""
    for falls, word in ((lambda step: 1.6 - 0.003 * step, "learning"), (lambda step: 1.6 * 0.9**step, "learning")):
        said = Printed(label="test accuracy", steps=(120,) * 3, values=(0.97, 0.4, 0.0), file="train.py", line=9)
        swept = Training(steps=120, loss=falls, call=call(guess=1.61, classes=5), after=(said,))
        assert outcome(swept.run()).word == word
        epochs = replace(said, steps=(40, 80, 120))  # of which the last one is what became of it
        assert outcome(replace(swept, after=(epochs,)).run()).word == "undecided"


def test_labels_unrelated_is_quiet_about_numbers_that_are_learned_late() -> None:
    """As the texture of a picture, which is finer than what lies between the samples that were kept."""
    late = replace(
        answered("labels", "yes"), loss=lambda step: 2.3 if step < 50 else 0.1, call=call(guess=2.3), steps=120
    )
    quiet(late.run(), "LABELS_UNRELATED")
    of_classes = answered("labels", "yes", {"classes": 10}).after
    fires(replace(late, after=of_classes).run(), "LABELS_UNRELATED", "warning")


def test_labels_unrelated_is_quiet_about_the_labels_of_a_game() -> None:
    """Noisy labels of what is real, and of what is made, are numbers that nothing tells."""
    real = 0.3 * torch.randn(1024, 2) + 1

    def train() -> None:
        maker, critic = nn.Linear(8, 2), nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
        makes, judges = (torch.optim.Adam(net.parameters(), 1e-3) for net in (maker, critic))
        for step in range(120):
            x, made = real[step % 16 * 64 :][:64], maker(torch.randn(64, 8))
            loss = F.mse_loss(critic(x), 1 - 0.1 * torch.rand(64, 1))
            judges.zero_grad()
            (loss + F.mse_loss(critic(made.detach()), 0.1 * torch.rand(64, 1))).backward()
            judges.step()
            makes.zero_grad()
            F.mse_loss(critic(made), torch.ones(64, 1)).backward()
            makes.step()

    with Doctor() as doctor:
        train()
    doctor.emit(Probed(probe="labels", root=0, answer="yes", evidence=EVIDENCE["labels"]))
    assert outcome(doctor.run).word != "learning"
    quiet(doctor.run, "LABELS_UNRELATED")


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
    assert (found.word, "guessing among 5 classes" in found.said) == (word, word == "undecided")


def masks(*, other: bool, with_channel: bool, steps: int = 160) -> Doctor:
    """A record of a net that finds bright squares in noise, whose masks are its own or those of the row before."""
    torch.manual_seed(0)
    pictures, wanted = torch.randn(800, 1, 12, 12) * 0.3, torch.zeros(800, 12, 12)
    for row in range(800):
        top, left = torch.randint(0, 8, (2,)).tolist()
        wanted[row, top : top + 4, left : left + 4] = 1.0
    pictures[:, 0] += wanted
    wanted = wanted.roll(1, 0) if other else wanted
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1 if with_channel else 2, 3, padding=1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    with Doctor() as doctor:
        for step in range(steps):
            index = torch.randperm(800)[:16] if step else torch.arange(16)
            target, made = wanted[index], net(pictures[index])
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(made, target[:, None]) if with_channel else None
            (F.cross_entropy(made, target.long()) if loss is None else loss).backward()
            optimizer.step()
    for one in run_probes(doctor):
        doctor.emit(one)
    return doctor


@pytest.mark.parametrize("with_channel", [True, False])
def test_labels_unrelated_fires_on_masks_of_other_pictures(with_channel: bool) -> None:
    fires(masks(other=True, with_channel=with_channel).run, "LABELS_UNRELATED", "warning")
    for steps in (160, 40):  # also where it has hardly begun to learn
        quiet(masks(other=False, with_channel=with_channel, steps=steps).run, "LABELS_UNRELATED")


class Texts(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(words, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.rnn(self.words(text))[0].mean(1))
        return made


def texts(kind: str, count: int) -> torch.utils.data.DataLoader[Any]:
    """Texts of 30 usual words and 10 that tell the class."""
    words, labels = torch.randint(10, 40, (count, 16)), torch.randint(0, 2, (count,))
    for place in torch.rand(count, 16).topk(3).indices.T:
        words[torch.arange(count), place] = 5 * labels + torch.randint(0, 5, (count,))
    if kind == "in order":  # what the first word is
        words, labels = torch.randint(0, 4, (count, 16)), torch.randint(0, 2, (count,))
        words[:, 0] = 2 * labels
    elif kind == "pairs":  # two texts that begin alike, or do not, with a word between
        words, labels = torch.randint(1, 40, (count, 16)), torch.randint(0, 2, (count,))
        middle = torch.randint(5, 9, (count,))
        words[torch.arange(count), middle] = 0
        words[torch.arange(count), middle + 1] = torch.where(labels == 1, words[:, 0], words[:, 2])
    elif kind == "shuffled":
        labels = labels[torch.randperm(count)]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(words, labels), 32, shuffle=True)


def read(loader: torch.utils.data.DataLoader[Any]) -> None:
    net = Texts(40)
    optimizer = torch.optim.Adam(net.parameters())
    for text, label in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(text), label).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "count", "expected"),
    [
        ("right", 1600, "no"),
        ("shuffled", 1600, "yes"),
        ("shuffled", 640, "unknown"),
        ("in order", 1600, "unknown"),
        ("pairs", 1600, "unknown"),
    ],
)
def test_texts_whose_words_say_nothing_of_their_labels_are_told(kind: str, count: int, expected: str) -> None:
    loader = texts(kind, count)  # which has to be there after the training to be read again
    found = [one for one in asked(lambda: read(loader), "labels") if one.answer]
    assert found[-1].answer == expected, found
