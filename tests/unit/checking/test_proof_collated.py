"""What raw samples become in ``collate`` only: labels that are ignored from a later batch on, and the like."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch


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
