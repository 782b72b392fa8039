"""Random batches, masks, weights and losses with several denominators: always the whole batch's gradient and values."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import anybatch
import reference
from anybatch import Mean

Batch = dict[str, torch.Tensor]
NAMES = ("samples", "tokens", "weights")


class Net(nn.Module):
    """A trunk with three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.Linear(4, 2) for name in NAMES})
        self.double()


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """A batch of 1 to 6 samples; masks and weights may be 0 for some or all of them."""
    rows = draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    mask = draw(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=rows, max_size=rows))
    weights = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.75]), min_size=rows, max_size=rows))
    return {
        "x": torch.randn(rows, 3, dtype=torch.float64, generator=generator),
        "y": torch.randn(rows, 2, dtype=torch.float64, generator=generator),
        "mask": torch.tensor(mask),
        "weights": torch.tensor(weights, dtype=torch.float64),
    }


COUNTS: dict[str, Callable[[Batch], Any]] = {
    "samples": lambda batch: len(batch["x"]),
    "tokens": lambda batch: batch["mask"].sum(),
    "weights": lambda batch: batch["weights"].sum(),
}


def total(name: str, model: Any, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The sum of one loss over its items."""
    squares = (model.heads[name](hidden) - batch["y"]).square()
    if name == "samples":
        return squares.mean(1).sum()  # type: ignore[no-any-return]
    weighted = squares * batch["mask"] if name == "tokens" else squares.mean(1) * batch["weights"]
    return weighted.sum()  # type: ignore[no-any-return]


def mean(name: str, model: Any, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    return total(name, model, hidden, batch) / torch.as_tensor(COUNTS[name](batch))  # NaN over nothing


def undivided(name: str, model: Any, hidden: torch.Tensor, batch: Batch) -> Mean:
    return Mean(total(name, model, hidden, batch), COUNTS[name](batch))


def one(kind: Any, name: str) -> Any:
    return lambda model, batch: kind(name, model, model.trunk(batch["x"]), batch)


def mapping(*kinds: Any) -> Any:
    """A loss function that gives a mapping; the losses share the trunk's graph."""

    def loss_fn(model: Any, batch: Batch) -> dict[str, Any]:
        hidden = model.trunk(batch["x"])
        return {name: kind(name, model, hidden, batch) for name, kind in zip(NAMES, kinds, strict=False)}

    return loss_fn


def generator(kind: Any, cut: Any, *, named: bool = True) -> Any:
    """A loss function that yields, with the trunk cut off from the heads."""

    def loss_fn(model: Any, batch: Batch) -> Iterator[Any]:
        with cut(model.trunk(batch["x"])) as hidden:
            for name in NAMES if named else NAMES[:1] * 3:
                loss = kind(name, model, hidden, batch)
                yield (name, loss) if named else loss

    return loss_fn


def apart(kind: Any) -> Any:
    """A loss function that yields losses which share no graph."""

    def loss_fn(model: Any, batch: Batch) -> Iterator[Any]:
        for name in NAMES:
            yield name, kind(name, model, model.trunk(batch["x"]), batch)

    return loss_fn


class Form(NamedTuple):
    """A way to write losses, how they are counted, and the same without cuts."""

    loss_fn: Any
    count: Any = anybatch.count_samples
    whole: Any = None


FORMS: dict[str, Form] = {
    **{f"mean over {name}": Form(one(mean, name), COUNTS[name]) for name in NAMES},
    **{f"Mean over {name}": Form(one(undivided, name)) for name in NAMES},
    "one Mean in a mapping": Form(mapping(undivided)),
    "Mean, counted in a forward": Form(one(undivided, "tokens"), "forward"),
    "means in a mapping": Form(mapping(mean, mean, mean), COUNTS),
    "Means in a mapping": Form(mapping(undivided, undivided, undivided), COUNTS),
    "Means, counted in a forward": Form(mapping(undivided, undivided, undivided), "forward"),
    "a mean and Means, counted in a forward": Form(mapping(mean, undivided, undivided), "forward"),
    "means and a Mean in a mapping": Form(mapping(mean, undivided, mean), COUNTS),
    "losses yielded from a cut": Form(generator(mean, anybatch.cut), COUNTS, generator(mean, reference.no_cut)),
    "Means yielded from a cut": Form(
        generator(undivided, anybatch.cut), COUNTS, generator(undivided, reference.no_cut)
    ),
    "Means yielded from a cut, counted in a forward": Form(
        generator(undivided, anybatch.cut), "forward", generator(undivided, reference.no_cut)
    ),
    "losses without names yielded from a cut": Form(
        generator(mean, anybatch.cut, named=False), whole=generator(mean, reference.no_cut, named=False)
    ),
    "losses yielded without a cut": Form(apart(mean), COUNTS),
    "Means yielded, counted in a forward": Form(apart(undivided), "forward"),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@given(batch=batches())
def test_losses_at_every_size(form: Form, batch: Batch) -> None:
    rows = len(batch["x"])
    reference.assert_exact_at_every_size(Net(), form.loss_fn, batch, rows, whole_loss_fn=form.whole, count=form.count)


@pytest.mark.parametrize("name", [name for name in FORMS if "in a mapping" in name])
@given(batch=batches(), size=st.integers(1, 6))
def test_every_loss_has_its_own_count(name: str, batch: Batch, size: int) -> None:
    model, form = Net(), FORMS[name]
    out = anybatch.backward(model, form.loss_fn, batch, micro_batch_size=size, count=form.count)
    for loss, count in out.counts.items():
        reference.assert_value64(count, float(COUNTS[loss](batch)))
    assert out.count == next(iter(out.counts.values()))
    reference.assert_value64(out.loss, sum(out.losses.values()))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@given(batch=batches(), size=st.integers(1, 6))
def test_evaluation_gives_the_same_values(form: Form, batch: Batch, size: int) -> None:
    model = Net()
    step = anybatch.TrainStep(
        model, form.loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=size, count=form.count
    )
    _, expected = reference.whole_gradients(model, form.whole or form.loss_fn, batch)
    out = step.evaluate(batch)
    for name, value in out.losses.items():
        reference.assert_value64(value, expected.get(name, 0.0))
    assert set(expected) <= set(out.losses)
    assert reference.gradients_of(model) == [None] * len(list(model.parameters()))


@given(
    windowed=st.lists(batches(), min_size=1, max_size=4), size=st.integers(1, 6), form=st.sampled_from(sorted(FORMS))
)
def test_a_window_is_the_batches_joined(windowed: list[Batch], size: int, form: str) -> None:
    loss_fn, count, whole = FORMS[form]
    model = Net()
    joined = {name: torch.cat([batch[name] for batch in windowed]) for name in windowed[0]}
    expected, losses = reference.whole_gradients(model, whole or loss_fn, joined)
    (window,) = anybatch.windows(iter(windowed), batches=len(windowed))
    out = anybatch.backward(model, loss_fn, window, micro_batch_size=size, count=count)
    reference.assert_float64(reference.gradients_of(model), expected)
    for name, value in out.losses.items():
        reference.assert_value64(value, losses.get(name, 0.0))


# Metrics, and raw samples that are packed by cost.


def with_metrics(model: Any, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
    hidden = model.trunk(batch["x"])
    squares = (model.heads["samples"](hidden) - batch["y"]).square()
    metrics = {
        "per sample": squares.sum(1),
        "rows of two": squares,
        "masked": Mean((squares * batch["mask"]).sum(), batch["mask"].sum()),
        "in plain numbers": Mean(squares.detach().sum().item(), len(squares)),
    }
    return squares.mean(1).mean(), metrics


@given(batch=batches(), size=st.integers(1, 6), evaluating=st.booleans())
def test_metrics_are_joined(batch: Batch, size: int, evaluating: bool) -> None:
    model = Net()
    with torch.no_grad():
        whole = with_metrics(model, batch)[1]
    step = anybatch.TrainStep(model, with_metrics, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=size)
    out = step.evaluate(batch) if evaluating else step(batch)
    assert set(out.metrics) == set(whole)
    for name, value in whole.items():
        if isinstance(value, Mean):
            reference.assert_value64(out.metrics[name], value.value)
        else:
            assert not out.metrics[name].requires_grad
            torch.testing.assert_close(out.metrics[name], value, rtol=1e-10, atol=1e-10)


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins raw sequences of unlike length."""
    x = nn.utils.rnn.pad_sequence([sample["x"] for sample in samples], batch_first=True)
    return {"x": x, "lengths": torch.tensor([len(s["x"]) for s in samples]), "names": [s["name"] for s in samples]}


def sequence_loss(model: Any, batch: dict[str, Any]) -> Any:
    kept = torch.arange(batch["x"].size(1)) < batch["lengths"][:, None]
    values = (model(batch["x"]).squeeze(-1).square() * kept).sum(1)
    positions = torch.tensor([int(name) for name in batch["names"]])
    return values.sum() / batch["lengths"].sum(), {"position": positions, "value": values, "all": Mean(values.sum(), 2)}


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9), slack=st.integers(0, 30), seed=st.integers(0, 2**16)
)
def test_raw_samples_packed_by_cost(lengths: list[int], slack: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Linear(3, 1).double()
    samples = [{"x": torch.randn(n, 3, dtype=torch.float64), "name": str(i)} for i, n in enumerate(lengths)]
    expected, losses = reference.whole_gradients(model, sequence_loss, padded(samples))
    limit = max(lengths) + slack
    seen: list[torch.Size] = []

    def watched(model: Any, batch: dict[str, Any]) -> Any:
        seen.append(batch["x"].shape[:2])
        assert batch["x"].size(1) == batch["lengths"].max()  # padded to its own longest sample only
        return sequence_loss(model, batch)

    out = anybatch.backward(
        model, watched, samples, collate=padded, cost=lambda sample: len(sample["x"]), micro_batch_size=limit,
        count=lambda batch: batch["lengths"].sum(),
    )  # fmt: skip
    assert all(shape.numel() <= limit for shape in seen)
    assert sum(shape[0] for shape in seen) == len(samples)
    reference.assert_float64(reference.gradients_of(model), expected)
    reference.assert_value64(out.loss, losses["loss"])
    assert out.metrics["position"].tolist() == list(range(len(samples)))
    whole = sequence_loss(model, padded(samples))[1]
    torch.testing.assert_close(out.metrics["value"], whole["value"].detach(), rtol=1e-10, atol=1e-10)
    reference.assert_value64(out.metrics["all"], whole["value"].sum().item() / (2 * out.micro_batches))
