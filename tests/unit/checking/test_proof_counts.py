"""Counts that are the same in the first batch are told apart in the first batch in which they differ.

How this could alarm without need: batches that a count suits are refused, or each batch is proved anew.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch.checking import proof as proving
from anybatch.checking.candidates import Candidate
from anybatch.checking.counts import OtherCounts

Batch = dict[str, torch.Tensor]
ROWS, TIME, WORDS = 24, 8, 20
OWN = anybatch.count_tokens("labels", shift=1)
WRONG = anybatch.count_tokens("labels")


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.words(ids))


class Shifting(Tokens):
    """A model that makes its loss itself, as those of Transformers do: of padded labels."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(ids)
        if labels is None:
            return logits
        next_ones = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), next_ones.flatten()))


def shifted(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def tokens(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def of_the_model(model: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(batch["ids"], batch["labels"]).loss
    return loss


def texts(prompt: int, *, rows: int = ROWS, seed: int = 1) -> Batch:
    """Texts of several lengths, whose first labels are ignored, as those of a prompt are."""
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (rows, TIME), generator=drawn)
    lengths = torch.randint(4, TIME + 1, (rows,), generator=drawn)
    mask = (torch.arange(TIME) < lengths[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :prompt] = -100
    return {"ids": ids, "labels": labels, "mask": mask}


def with_one(batch: Batch) -> Batch:
    """The same with a first label that counts, in one of the last rows."""
    labels = batch["labels"].clone()
    labels[-2, 0] = 3
    return {**batch, "labels": labels}


def stepping(loss_fn: Any, count: Any, **options: Any) -> anybatch.TrainStep:
    model = Shifting()
    options = {"micro_batch_size": 6} | options
    return anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), count=count, **options)


def proofs(step: Callable[[Any], Any], batches: list[Any]) -> int:
    with mock.patch.object(proving, "prove", wraps=proving.prove) as proved:
        for batch in batches:
            step(batch)
    return proved.call_count


@pytest.mark.parametrize("later", [texts(0), with_one(texts(2))])
@pytest.mark.parametrize("loss_fn", [shifted, of_the_model])
def test_a_first_label_that_counts_is_proved(loss_fn: Any, later: Batch) -> None:
    step = stepping(loss_fn, WRONG)
    assert proofs(step, [texts(2), texts(2, seed=3)]) == 1
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    for _ in range(2):  # not only where it is seen first
        with pytest.raises(anybatch.NotSplittable, match=r'count=anybatch.count_tokens\("labels", shift=1\)$'):
            step(later)
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    step(texts(2))
    with pytest.raises(anybatch.NotSplittable):
        step(later)


def test_in_a_loop_of_ones_own() -> None:
    model = Tokens()

    def backward(batch: Batch) -> None:
        anybatch.backward(model, shifted, batch, micro_batch_size=6, count=WRONG)

    assert proofs(backward, [texts(2), texts(2, seed=3)]) == 1
    with pytest.raises(anybatch.NotSplittable, match="shift=1"):
        backward(with_one(texts(2)))


@pytest.mark.parametrize("setting", ["planned", "windows", "collate", "scaler", "large"])
def test_where_no_outputs_are_kept(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[Any] = [texts(2), texts(2, seed=3), with_one(texts(2))]
    options: dict[str, Any] = {}
    if setting == "planned":
        options = {"micro_batch_size": None, "memory": "40KiB"}
    if setting == "windows":
        halves = [
            {key: leaf[rows] for key, leaf in one.items()} for one in batches for rows in (slice(12), slice(12, 24))
        ]
        batches = list(anybatch.windows(halves, batches=2))
    if setting == "collate":
        batches = [[{key: leaf[row] for key, leaf in one.items()} for row in range(ROWS)] for one in batches]
        options = {"collate": lambda rows: {key: torch.stack([row[key] for row in rows]) for key in rows[0]}}
    if setting == "scaler":
        options = {"scaler": torch.amp.GradScaler("cpu", init_scale=1.0)}
    if setting == "large":
        monkeypatch.setattr("anybatch.checking.replaying._MOST_BYTES", 0)
    step = stepping(shifted, WRONG, **options)
    for batch in batches[:2]:
        assert step(batch).micro_batches > 1
    with pytest.raises(anybatch.NotSplittable, match="in micro-batches the gradient"):
        step(batches[2])
    step = stepping(shifted, OWN, **options)
    assert proofs(step, batches[:2] + batches[2:] * 4) <= 2


def test_a_mask_that_was_the_labels() -> None:
    def masked(batch: Batch) -> torch.Tensor:
        return batch["mask"].sum()

    assert proofs(stepping(tokens, masked), [texts(0), texts(0, seed=3)]) == 1
    with pytest.raises(anybatch.NotSplittable, match=r'count_tokens\("labels"\)'):
        proofs(stepping(tokens, masked), [texts(0), texts(2)])


def test_samples_that_had_as_many_labels_each() -> None:
    even, later = texts(0), texts(0)
    even["labels"] = even["ids"].clone()
    even["labels"][:, 6:] = -100  # so that it is nothing new that some are ignored
    with pytest.raises(anybatch.NotSplittable, match=r'count_tokens\("labels"\)'):
        proofs(stepping(tokens, anybatch.count_samples), [even, even, later])


def test_one_of_several_losses() -> None:
    def both(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
        return {"next": shifted(model, batch), "all": tokens(model, batch)}

    right, wrong = {"next": OWN, "all": WRONG}, {"next": WRONG, "all": WRONG}
    assert proofs(stepping(both, right), [texts(2), texts(0), texts(0)]) <= 2
    with pytest.raises(anybatch.NotSplittable, match=r'"labels", shift=1\)'):
        proofs(stepping(both, wrong), [texts(2), texts(0)])


def test_a_batch_of_which_few_samples_show_it() -> None:
    """The first one tells the two apart, but in none of the samples that are run."""
    with pytest.raises(anybatch.NotSplittable, match="shift=1"):
        stepping(shifted, WRONG, memory="60KiB", micro_batch_size=None)(with_one(texts(2, rows=96)))


@pytest.mark.parametrize("count", [OWN, lambda batch: (batch["labels"][:, 1:] != -100).sum()])
@pytest.mark.parametrize(("loss_fn", "times"), [(shifted, 0), (of_the_model, 1)])
def test_the_right_count_is_proved_once_more_at_most(loss_fn: Any, times: int, count: Any) -> None:
    """Where the model gives no outputs that the loss could be looked at by."""
    step = stepping(loss_fn, count)
    assert proofs(step, [texts(2), texts(2, seed=3)]) == 1
    assert proofs(step, [texts(0), texts(0, seed=3), texts(2), with_one(texts(2))]) == times


def test_a_count_of_even_texts_is_proved_once_whatever_their_length() -> None:
    def even(length: int) -> Batch:
        return {key: leaf[:, :length] for key, leaf in {**texts(0), "labels": texts(0)["ids"]}.items() if key != "mask"}

    assert proofs(stepping(tokens, WRONG), [even(length) for length in (8, 6, 7, 5, 4, 8, 3)]) == 1


def test_a_warning_comes_once() -> None:
    step = stepping(shifted, WRONG, verify="warn")
    step(texts(2))
    with pytest.warns(anybatch.AnyBatchWarning, match="shift=1"):
        step(texts(0))
    assert proofs(step, [texts(0), texts(0, seed=5)]) == 0


def test_nothing_is_looked_at_in_each_step_where_nothing_can_differ() -> None:
    """As of samples with a class each, and of the function that is the step's own."""
    step = stepping(lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]), anybatch.count_samples)
    with mock.patch.object(OtherCounts, "are_apart", return_value=False) as looked:
        batch = {"x": torch.arange(ROWS) % WORDS, "y": torch.arange(ROWS) % WORDS}
        assert proofs(step, [batch] * 3) == 1
        unmasked = [{key: leaf for key, leaf in texts(2, seed=n).items() if key != "mask"} for n in range(3)]
        assert (
            proofs(
                stepping(tokens, WRONG),
                [{**one, "labels": one["labels"][:, 2:], "ids": one["ids"][:, 2:]} for one in unmasked],
            )
            == 1
        )
    assert not looked.called


@pytest.mark.parametrize("loss_fn", [shifted, of_the_model])
@pytest.mark.parametrize("count", [anybatch.count_samples, lambda batch: batch["mask"].sum()])
def test_of_two_counts_that_fit_the_one_that_the_loss_shifts_by_is_proposed(loss_fn: Any, count: Any) -> None:
    certificate = anybatch.check(Shifting(), loss_fn, texts(2), count=count)
    assert certificate.reasons[0].remedies == ('count=anybatch.count_tokens("labels", shift=1)',)
    assert certificate.reasons[0].message.count("with the labels in other places only the one below fits") == 1
    certificate = anybatch.check(Shifting(), tokens, texts(2), count=count)
    assert certificate.reasons[0].remedies == ('count=anybatch.count_tokens("labels")',)


def test_a_loss_that_takes_no_other_labels_has_both() -> None:
    def own_prompt(model: Any, batch: Batch) -> torch.Tensor:
        assert bool((batch["labels"][:, :2] == -100).all())
        return shifted(model, batch)

    certificate = anybatch.check(Shifting(), own_prompt, texts(2))
    assert certificate.reasons[0].evidence["also_fits"] == ['anybatch.count_tokens("labels", shift=1)']


def test_a_number_that_can_not_be_counted_is_none() -> None:
    assert Candidate("", "", lambda batch: batch["none"]).number({}, 3) != 0


def soft_targets(model: Any, batch: Batch) -> torch.Tensor:
    logs: torch.Tensor = model(batch["x"]).log_softmax(1)
    return -(logs * batch["t"]).sum() / batch["t"].sum()


def of_objects(model: Any, batch: Batch) -> torch.Tensor:
    there = batch["n"][:, None] > torch.arange(2)
    apart: torch.Tensor = (model(batch["x"]).view(-1, 2, 2) - batch["box"]).abs().sum(-1)
    return (apart * there).sum() / there.sum().clamp(min=1)


def with_objects(number: torch.Tensor) -> Batch:
    return {"x": torch.randn(18, 6), "box": torch.randn(18, 2, 2), "n": number}


MEANS_OVER_ITEMS: dict[str, tuple[Any, Callable[[], Batch], Callable[[], Batch], str]] = {
    "soft targets": (
        soft_targets,
        lambda: {"x": torch.randn(18, 6), "t": F.one_hot(torch.randint(0, 4, (18,)), 4).float()},
        lambda: {"x": torch.randn(18, 6), "t": (torch.rand(18, 4) < 0.4).float()},
        r"batch\['t'\]\.sum\(",
    ),
    "objects": (
        of_objects,
        lambda: with_objects(torch.full((18,), 2)),
        lambda: with_objects(torch.randint(0, 3, (18,))),
        r"batch\['n'\]\.sum\(",
    ),
}


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("kind", MEANS_OVER_ITEMS)
def test_in_micro_batches_of_a_few_samples(kind: str, size: int) -> None:
    """Of few samples a micro-batch, only micro-batches of this size are compared, and these have to tell."""
    loss_fn, like_samples, others, told = MEANS_OVER_ITEMS[kind]
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=size)
    assert proofs(step, [like_samples(), like_samples()]) <= 2
    with pytest.raises(anybatch.NotSplittable, match=told):
        step(others())


@pytest.mark.parametrize("size", [2, 3])
def test_a_mean_over_samples_of_a_few_a_micro_batch_is_left_alone(size: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    step = anybatch.TrainStep(
        model,
        lambda model, batch: -(model(batch["x"]).log_softmax(1) * batch["t"]).sum(1).mean(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        micro_batch_size=size,
    )
    _, like_samples, others, _ = MEANS_OVER_ITEMS["soft targets"]
    assert proofs(step, [like_samples(), like_samples(), *(others() for _ in range(6))]) <= 2
