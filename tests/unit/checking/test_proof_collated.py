"""What raw samples become in ``collate`` only: labels that are ignored from a later batch on, and the like."""

import contextlib
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
import anybatch.checking.proof


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))


def padded(samples: list[str]) -> dict[str, torch.Tensor]:
    """Texts of which nothing shows how long they are, or which of their tokens count, before this."""
    most = max(map(len, samples))
    ids = [[4 + ord(one) % 40 for one in text] + [4] * (most - len(text)) for text in samples]
    labels = [
        [-100 if one == "?" else 4 + ord(one) % 40 for one in text] + [-100] * (most - len(text)) for text in samples
    ]
    return {"ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def token_mean(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def over_the_mask(model: Any, batch: Any) -> Any:
    labels = batch["labels"]
    losses = F.cross_entropy(model(batch["ids"]).transpose(1, 2), labels.clamp(0), reduction="none")
    return (losses * (labels != -100)).sum() / (labels != -100).sum()


EVEN = ["abcd", "efgh", "ijkl", "mnop", "qrst", "uvwx", "yzab", "cdef"]
LONG = ["abcd", "e", "ij", "mnop", "q", "uvwx", "yzabuvwx", "c"]
MASKED = ["abcd", "e???", "ijkl", "??op", "q???", "uvwx", "yzab", "c?e?"]


def stepping(model: nn.Module, loss_fn: Any, **options: Any) -> anybatch.TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"micro_batch_size": 3} | options
    return anybatch.TrainStep(model, loss_fn, optimizer, collate=padded, **options)


def whole_step(model: nn.Module, loss_fn: Any, samples: list[str]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad()
    loss_fn(model, padded(samples)).backward()
    optimizer.step()


@pytest.mark.parametrize("loss_fn", [token_mean, over_the_mask])
@pytest.mark.parametrize("later", [LONG, MASKED])
def test_labels_that_are_ignored_from_a_later_batch_on_stop_that_step(loss_fn: Any, later: list[str]) -> None:
    model = net()
    step = stepping(model, loss_fn)
    for _ in range(2):
        assert step(EVEN).proof.exact  # type: ignore[union-attr]
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(anybatch.NotSplittable, match="count"):
        step(later)
    assert all(map(torch.equal, before, model.parameters()))
    assert step.updates == 2
    assert step(EVEN).micro_batches == 3


@pytest.mark.parametrize("later", [LONG, MASKED])
@pytest.mark.parametrize("memory", [None, "40KiB"])
def test_with_the_count_that_suits_the_loss_each_step_is_that_of_the_whole(later: list[str], memory: Any) -> None:
    model, other = net().double(), net().double()
    options = {} if memory is None else {"memory": memory, "micro_batch_size": None}
    step = stepping(model, token_mean, count=anybatch.count_tokens("labels"), **options)
    for samples in (EVEN, EVEN, later, EVEN, later):
        step(samples)
        whole_step(other, token_mean, samples)
        for one, wanted in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(one, wanted, rtol=1e-12, atol=1e-14)
    assert step.updates == 5


def test_what_one_micro_batch_of_the_proved_batch_has_is_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    proved, prove = [], anybatch.checking.proof.prove

    def counted(*given: Any) -> Any:
        proved.append(given)
        return prove(*given)

    monkeypatch.setattr("anybatch.checking.proof.prove", counted)
    step = stepping(net(), token_mean, count=anybatch.count_tokens("labels"))
    for _ in range(3):
        step(["a?cd", *EVEN[1:]])  # the last micro-batch has no label that is ignored
    assert len(proved) == 1


def test_backward_stops_too_and_leaves_the_gradient() -> None:
    model = net()

    def call(samples: list[str]) -> None:
        anybatch.backward(model, token_mean, samples, micro_batch_size=3, collate=padded)

    call(EVEN)
    before = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    with pytest.raises(anybatch.NotSplittable, match="count"):
        call(LONG)
    assert all(torch.equal(a, b.grad) for a, b in zip(before, model.parameters(), strict=True))  # type: ignore[arg-type]


def test_random_numbers_are_those_of_a_step_that_began_once() -> None:
    """The step that began again draws what it would have drawn."""

    def noisy(model: Any, batch: Any) -> Any:
        found = model[1](F.dropout(model[0](batch["ids"]), 0.3))
        return F.cross_entropy(found.flatten(0, 1), batch["labels"].flatten(), reduction="none").sum() / len(found)

    found = []
    for verify in ("first", "off"):
        model = net()
        step = stepping(model, noisy, verify=verify)
        torch.manual_seed(3)
        for samples in (EVEN, MASKED, EVEN):
            step(samples)
        found.append([one.detach().clone() for one in model.parameters()])
    assert all(map(torch.equal, *found))


def test_the_wrong_count_only_warns_where_that_was_asked_for() -> None:
    step = stepping(net(), token_mean, verify="warn")
    step(EVEN)
    with pytest.warns(anybatch.AnyBatchWarning, match="count"):
        step(MASKED)
    assert step.updates == 2


def raw_samples(mark: int) -> list[dict[str, torch.Tensor]]:
    """16 samples of tokens from 5 on; the last two are longer, and have a mark if it is below."""
    samples = []
    for number in range(16):
        x = torch.randint(5, 20, (64 if number > 13 else 56,))
        x[0] = mark if number > 13 else x[0]
        samples.append({"x": x, "y": x.flip(0)})
    return samples


def read_and_padded(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Reads numbers, so that a planner has to run it as it is."""
    most = max(len(one["x"].tolist()) for one in samples)
    fills = {"x": 7, "y": -100}
    return {
        key: torch.stack([F.pad(one[key], (0, most - len(one[key])), value=fill) for one in samples])
        for key, fill in fills.items()
    }


def mean_of_means(model: Any, batch: Any) -> Any:
    losses = F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["y"], ignore_index=-100, reduction="none")
    return (losses.sum(1) / (batch["y"] != -100).sum(1)).mean()


@pytest.mark.usefixtures("constant_times")  # the smallest plan may be the fastest on a busy machine: none is smaller
def test_a_planner_that_collates_after_memory_ran_out_looks_on_as_nobody() -> None:
    """The new mark is in samples of later micro-batches, which the planner collates between two attempts."""
    torch.manual_seed(0)
    runs_out = False

    def loss_fn(model: Any, batch: Any) -> Any:
        nonlocal runs_out
        within = {"/".join(Path(frame.filename).parts[-3:-1]) for frame in inspect.stack(0)}
        if runs_out and not within & {"anybatch/planning", "anybatch/checking"}:
            runs_out = False
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return mean_of_means(model, batch)

    model, reference = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, loss_fn, optimizer, collate=read_and_padded, memory=330_000)
    for mark in (5, 0, 1):
        samples = raw_samples(mark)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            other.data.copy_(one.data)
        runs_out = mark < 5
        result = step(samples)
        assert not runs_out
        assert len(result.attempts) > (mark < 5)
        reference.zero_grad()
        mean_of_means(reference, read_and_padded(samples)).backward()
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
        assert all(
            torch.allclose(one, other, rtol=1e-4, atol=1e-6)
            for one, other in zip(model.parameters(), reference.parameters(), strict=True)
        )


def test_a_collate_that_writes_into_its_samples_goes_on_and_the_next_batch_is_proved() -> None:
    def clamped(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {key: torch.stack([one[key].clamp_(min=0) for one in samples]) for key in ("x", "y")}

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = lambda model, batch: F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())  # noqa: E731
    step = anybatch.TrainStep(model, loss_fn, optimizer, collate=clamped, micro_batch_size=4)
    proved = []
    for mark in (5, 5, 0, 0, 1, 1):
        samples = [{key: one[key][-56:] for key in one} for one in raw_samples(5)]
        samples[-1]["x"][0] = mark
        proof = step(samples).proof
        assert proof is not None
        assert proof.exact
        proved.append(proof.update)
    assert proved == [0, 0, 0, 3, 3, 5]


VOCABULARY = 30


class Bag(nn.Module):
    """With a mean over the tokens of a text; over the padding, too, if that is not masked."""

    def __init__(self, *, is_masked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.is_masked = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), is_masked

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        found = self.embedding(ids)
        taken = mask[..., None].float() if self.is_masked else torch.ones_like(mask[..., None]).float()
        return self.head(found + (found * taken).sum(1, keepdim=True) / taken.sum(1, keepdim=True))


class Masking:
    """As the collators of Transformers for arrays of NumPy: masks some tokens, and puts others in the place of some."""

    def __init__(self, *, is_left: bool = False, swaps: bool = False) -> None:
        self.is_left, self.swaps, self.numbers = is_left, swaps, np.random.default_rng(0)

    def __call__(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        most, numbers = max(map(len, samples)), self.numbers
        ids = np.zeros((len(samples), most), dtype=np.int64)
        for row, one in zip(ids, samples, strict=True):
            row[most - len(one) if self.is_left else 0 :][: len(one)] = one
        mask = ids != 0
        taken = (numbers.random(ids.shape) < 0.3) & mask
        labels = np.where(taken, ids, -100)
        other = (numbers.random(ids.shape) < 0.3) & taken
        ids[other] = numbers.integers(1, VOCABULARY, size=other.sum())
        if self.swaps:
            ids[:, 0] = ids[numbers.permutation(len(samples)), 0]
        return {"ids": torch.from_numpy(ids), "mask": torch.from_numpy(mask), "labels": torch.from_numpy(labels)}


def masked_language(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["ids"], batch["mask"]).flatten(0, 1), batch["labels"].flatten())


def texts() -> list[Any]:
    numbers = np.random.default_rng(1)
    return [numbers.integers(1, VOCABULARY, size=length) for length in numbers.integers(5, 20, size=24)]


def proved(model: nn.Module, collate: Any) -> Any:
    options = {"micro_batch_size": 8, "collate": collate, "count": anybatch.count_tokens("labels")}
    return anybatch.backward(model, masked_language, texts(), **options).proof


@pytest.mark.parametrize("is_left", [False, True])
def test_tokens_that_are_masked_by_numpy_are_no_padding(is_left: bool) -> None:
    proof = proved(Bag(is_masked=True), Masking(is_left=is_left))
    assert proof.outcome != "not exact"
    assert "draws anew in each micro-batch" in proof.note or "can't be fixed per sample" in proof.note
    certificate = anybatch.check(
        Bag(is_masked=True), masked_language, texts(), collate=Masking(), count=anybatch.count_tokens("labels")
    )
    assert {one.code for one in (*certificate.reasons, *certificate.notes)} == {"random"}


def test_tokens_that_numpy_takes_from_other_texts_are_not_proved() -> None:
    with contextlib.suppress(anybatch.NotSplittable):
        assert proved(Bag(is_masked=True), Masking(swaps=True)).outcome == "undecided"


def test_padding_that_matters_is_told_where_numpy_masks_tokens() -> None:
    with pytest.raises(anybatch.NotSplittable, match="length to which a batch is padded"):
        proved(Bag(is_masked=False), Masking())
