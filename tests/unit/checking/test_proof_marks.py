"""A number such as 0 or 1 that a batch lacks may be a padding: the batch that has it first is proved.

What would be wrong in silence: a mark that counts, taken for a number like any other. What would cost: a proof for each
number of a vocabulary that comes for the first time, where several come at once.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch.checking import proof

WORDS = 40


class Language(nn.Module):
    """A language model that returns its loss beside its scores."""

    def __init__(self, ignored: int = -1, *, is_masked: bool = False) -> None:
        super().__init__()
        self.ignored, self.is_masked = ignored, is_masked
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, x: Any, y: Any) -> Any:
        hidden = self.words(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        scores = self.head(hidden)
        if self.is_masked:  # a mean over what is no padding among the inputs
            each = F.cross_entropy(scores.transpose(1, 2), y, reduction="none")
            return scores, (each * (x != 0)).sum() / (x != 0).sum()
        return scores, F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=self.ignored)


def batch_of(number: int, least: int = 0) -> dict[str, torch.Tensor]:
    words = torch.randint(least, WORDS, (8, 7), generator=torch.Generator().manual_seed(number))
    return {"x": words[:, :-1].contiguous(), "y": words[:, 1:].contiguous()}


def with_padding(number: int, mark: int = 0) -> dict[str, torch.Tensor]:
    batch = batch_of(number, 4)
    for name, from_step in (("x", 5), ("y", 4)):
        batch[name][:3, from_step:] = mark
    return batch


def loss_fn(model: Any, batch: Any) -> Any:
    return model(batch["x"], batch["y"])[1]


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each proof that is made."""
    made: list[Any] = []
    prove: Callable[..., Any] = proof.prove

    def counted(*given: Any) -> Any:
        made.append(given)
        return prove(*given)

    monkeypatch.setattr(proof, "prove", counted)
    return made


def step_of(model: nn.Module, **options: Any) -> anybatch.TrainStep:
    options = {"micro_batch_size": 4, **options}
    return anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.01), **options)


class Trimmed(Language):
    """Cuts off the places at the end that are padding in all samples, or leaves out samples that are padding."""

    def __init__(self, kind: str, ignored: int) -> None:
        super().__init__(ignored)
        self.kind = kind

    def forward(self, x: Any, y: Any) -> Any:
        if self.kind == "places":
            kept = (x != self.ignored).any(0)
            x, y = x[:, kept], y[:, kept]
        else:
            kept = (x != self.ignored).any(1)
            x, y = x[kept], y[kept]
        scores = self.head(self.words(x))
        return scores, F.cross_entropy(scores.flatten(0, 1), y.flatten())


@pytest.mark.parametrize("mark", [0, 1, 3])
@pytest.mark.parametrize("kind", ["places", "rows"])
def test_padding_that_counts_only_where_all_of_a_column_or_row_is_so_is_stopped(kind: str, mark: int) -> None:
    step = step_of(Trimmed(kind, mark))
    for number in range(2):
        step(batch_of(number, 4))
    batch = batch_of(2, 4)
    batch["x"][:4, 3:] = mark
    batch["x"][1:4] = mark
    with pytest.raises(anybatch.NotSplittable):
        step(batch)


def test_marks_that_come_together_take_one_proof(proofs: list[Any]) -> None:
    step = step_of(Language(is_masked=True))  # so that marks do make a difference, where there are not as many in each
    step(batch_of(0, 4))
    every = batch_of(1, 4)
    for name in every:
        every[name][:, :4] = torch.arange(4)
    for _ in range(4):
        step(every)
    assert len(proofs) == 2


@pytest.mark.parametrize("model", [Language(0), Language(0, is_masked=True), Language(2)])
def test_a_mark_that_counts_is_stopped_when_it_comes(model: Language, proofs: list[Any]) -> None:
    step = step_of(model)
    for number in range(3):
        step(batch_of(number, 4))
    assert len(proofs) == 1
    with pytest.raises(anybatch.NotSplittable, match="averaged over"):
        step(with_padding(3, max(0, model.ignored)))


def test_a_mark_that_is_counted_goes_on(proofs: list[Any]) -> None:
    step = step_of(Language(0), count=anybatch.count_tokens("y", ignore_index=0))
    for batch in (batch_of(0, 4), with_padding(1), with_padding(2)):
        assert step(batch).proof is not None
    assert len(proofs) == 2
