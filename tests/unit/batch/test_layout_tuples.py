"""Samples in tuples, as ``tuple(zip(*samples))`` gives them, and leaves in tuples: told apart, or asked about.

What would be wrong in silence: a sample that is cut inside. What would be a false alarm: a question about the usual
``(x, y)``, about two views beside labels, or about what the default collate of PyTorch gives.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import anybatch
from anybatch import BatchError, count_samples

zeros = torch.zeros


def zipped(*samples: Any) -> Any:
    return tuple(zip(*samples, strict=True))


class Views(NamedTuple):
    weak: Any
    strong: Any


COULD_BE_BOTH: dict[str, Any] = {
    "sequences of one length": zipped(*((zeros(9, 4), zeros(9)) for _ in range(4))),
    "clouds with labels without dimensions": zipped(*((zeros(16, 3), zeros(())) for _ in range(6))),
    "clouds with numbers as labels": zipped(*((zeros(16, 3), k) for k in range(6))),
    "two samples": zipped(*((zeros(9, 4), zeros(9)) for _ in range(2))),
    "as many of everything": zipped(*((zeros(3, 8, 8), {"boxes": zeros(3, 4)}) for _ in range(3))),
    "lists of sequences of one length": [[zeros(9, 4) for _ in range(4)], [zeros(9) for _ in range(4)]],
}


@pytest.mark.parametrize("name", COULD_BE_BOTH)
def test_what_could_be_both_is_asked_about_and_either_answer_holds(name: str) -> None:
    batch = COULD_BE_BOTH[name]
    items = len(batch[0])
    with pytest.raises(BatchError, match=r"could be .* samples or leaves.*pass a list.*pass collate=") as caught:
        count_samples(batch)
    samples = {"0": 0, "1": 0}
    leaves = {"0.*": 0, "1.*": 0}
    for layout in (samples, leaves):
        assert str(layout) in str(caught.value)
    assert rows_seen(batch, samples, items) == items
    if items != 6:  # a label without dimensions is no leaf with rows
        assert rows_seen(batch, leaves, len(batch[0][0])) == len(batch[0][0])


def rows_seen(batch: Any, layout: Any, rows: int) -> int:
    """How many micro-batches of one sample there are."""
    model = nn.Linear(1, 1)
    out = anybatch.backward(
        model, lambda model, _: model(torch.ones(1, 1)).mean(), batch, micro_batch_size=1, layout=layout, verify="off"
    )
    assert out.count == rows
    return out.micro_batches


HOLD_SAMPLES: dict[str, Any] = {
    "images of unlike sizes with targets": zipped(*((zeros(3, 8 + k, 9), {"boxes": zeros(k, 4)}) for k in range(4))),
    "images in a tuple and targets in a list": (
        tuple(zeros(3, 8, 9) for _ in range(4)), [{"boxes": zeros(k)} for k in range(4)],
    ),
    "sequences beside one tensor of labels": (tuple(zeros(2 + k, 3) for k in range(4)), zeros(4)),
    "clouds of one size beside one tensor of labels": (tuple(zeros(16, 3) for _ in range(4)), zeros(4)),
    "sequences with numbers as labels": zipped(*((zeros(2 + k, 3), k) for k in range(4))),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLD_SAMPLES)
def test_what_can_only_be_samples_is_cut_into_samples(name: str) -> None:
    seen: list[Any] = []

    def loss_fn(model: Any, batch: Any) -> Any:
        seen.append(batch)
        return model(torch.ones(1, 1)).mean()

    batch = HOLD_SAMPLES[name]
    anybatch.backward(nn.Linear(1, 1), loss_fn, batch, micro_batch_size=3, verify="off")
    assert [[len(one) for one in part] for part in seen] == [[3, 3], [1, 1]]
    assert all(one is other for one, other in zip(seen[0][0], batch[0], strict=False))


HOLD_LEAVES: dict[str, Any] = {
    "x and y": (zeros(8, 3), zeros(8)),
    "two views": ((zeros(8, 3), zeros(8, 3)), zeros(8)),
    "two views of a last batch of two": ((zeros(2, 3), zeros(2, 3)), zeros(2)),
    "two views as the default collate gives them": [[zeros(8, 3), zeros(8, 3)], zeros(8), ["a"] * 8],
    "inputs and targets of unlike kinds": ((zeros(8, 3), zeros(8, 3, 2)), (zeros(8), zeros(8).long())),
    "the same as lists": [[zeros(8, 3), zeros(8, 3, 2)], [zeros(8), zeros(8).long()]],
    "as many views as samples": (tuple(zeros(8, 6) for _ in range(8)), zeros(8)),
    "unlike numbers of inputs and targets": ((zeros(8, 3),) * 3, (zeros(8),) * 2),
    "named tuples": (Views(zeros(8, 3), zeros(8, 3)), Views(zeros(8), zeros(8))),
    "scales": {"x": zeros(8, 3), "scales": (zeros(()), zeros(()))},
    "pairs of mappings": ({"x": zeros(8, 3)}, {"x": zeros(8, 3)}),
    "two views and names": ((zeros(2, 3), zeros(2, 3)), ["a", "b"]),
}


@pytest.mark.parametrize("name", HOLD_LEAVES)
def test_the_usual_batches_are_not_asked_about(name: str) -> None:
    assert count_samples(HOLD_LEAVES[name]) in (2, 8)


@given(
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=6),
    kind=st.sampled_from([tuple, list]),
    deep=st.booleans(),
)
def test_a_sample_is_never_cut_inside(lengths: list[int], kind: Any, *, deep: bool) -> None:
    """Whatever the lengths, micro-batches hold whole samples, or the batch is refused."""
    samples = [torch.full((n, 2), float(k)) for k, n in enumerate(lengths)]
    labels: Any = [{"y": torch.full((n,), float(k))} if deep else k for k, n in enumerate(lengths)]
    seen: list[Any] = []

    def loss_fn(model: Any, batch: Any) -> Any:
        seen.extend(batch[0])
        return model(torch.ones(1, 1)).mean()

    try:
        anybatch.backward(nn.Linear(1, 1), loss_fn, (kind(samples), kind(labels)), micro_batch_size=1, verify="off")
    except BatchError:
        assert len(set(lengths)) == 1 or not deep
        return
    assert [len(one) for one in seen] == lengths


def test_a_detector_trains_on_what_the_collate_of_torchvision_gives() -> None:
    torch.manual_seed(0)
    body, head = nn.Conv2d(3, 4, 3).double(), nn.Linear(4, 4).double()
    model = nn.ModuleList([body, head])
    samples = [(torch.randn(3, 8 + k, 9).double(), {"boxes": torch.rand(k, 4).double()}) for k in (2, 1, 3, 1, 4)]

    def loss_fn(model: Any, batch: Any) -> Any:
        images, targets = batch
        found = [
            model[1](model[0](image).mean((1, 2))).expand_as(one["boxes"])
            for image, one in zip(images, targets, strict=True)
        ]
        return F.l1_loss(torch.cat(found), torch.cat([one["boxes"] for one in targets]), reduction="sum") / boxes(batch)

    def boxes(batch: Any) -> int:
        return sum(len(target["boxes"]) for target in batch[1])

    batch = zipped(*samples)
    loss_fn(model, batch).backward()
    want = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    anybatch.backward(model, loss_fn, batch, micro_batch_size=2, count=boxes)
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_points_inside_and_on_the_boundary_are_both_named() -> None:
    batch = {"inside": zeros(100, 2), "boundary": zeros(20, 2), "value": zeros(20)}
    with pytest.raises(BatchError) as caught:
        count_samples(batch)
    text = str(caught.value)
    assert "broadcast=('inside',)" in text
    assert "broadcast=('boundary', 'value')" in text
    assert "collate_fn=list" in text
    assert rows_of(batch, broadcast=("boundary", "value")) == 100
    assert rows_of(batch, broadcast=("inside",)) == 20


def rows_of(batch: Any, **options: Any) -> int:
    loss_fn = lambda model, _: model(torch.ones(1, 1)).mean()  # noqa: E731
    return int(anybatch.backward(nn.Linear(1, 1), loss_fn, batch, micro_batch_size=7, verify="off", **options).count)
