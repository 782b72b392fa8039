"""What is inferred of a batch can be seen, and ``layout=`` says otherwise.

What would be wrong in silence: a batch with time first that is cut in time, or a leaf that is cut along another
dimension than the others.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
import reference
from anybatch import BatchError

TIME_FIRST = {"x": 1, "state.*": 1, "y": 1, "weights": None}


class Tagger(nn.Module):
    """A GRU with time first, as it is built by default."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 5), nn.Linear(5, 4)

    def forward(self, x: Any, state: Any) -> Any:
        return self.out(self.rnn(x, state[0] + state[1])[0])


def time_first(rows: int = 6, steps: int = 4) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows)
    return {
        "x": torch.randn(steps, rows, 3, generator=generator).double(),
        "state": tuple(torch.randn(1, rows, 5, generator=generator).double() for _ in range(2)),
        "y": torch.randint(4, (steps, rows), generator=generator),
        "weights": torch.tensor([1.0, 2.0, 0.5, 1.0]).double(),
        "names": [f"n{k}" for k in range(rows)],
    }  # fmt: skip


def loss_fn(model: Any, batch: Any) -> Any:
    assert len(batch["names"]) == batch["x"].shape[1] == batch["y"].shape[1]
    logits = model(batch["x"], batch["state"])
    each = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="none")
    return (each * batch["weights"][batch["y"].flatten()]).mean()


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Tagger().double()


@pytest.mark.parametrize("rows", [4, 6])  # as many samples as time steps, too
def test_time_first_is_cut_along_the_samples(rows: int) -> None:
    model, batch = model_of(), time_first(rows)
    expected, _ = reference.whole_gradients(model, loss_fn, batch)
    reference.clear(model)
    out = anybatch.backward(model, loss_fn, batch, micro_batch_size=2, layout=TIME_FIRST)
    reference.assert_float64(reference.gradients_of(model), expected)
    assert (out.micro_batches, out.count) == (rows // 2, rows)


def test_every_verb_takes_it() -> None:
    model, batch = model_of(), time_first()
    assert anybatch.check(model, loss_fn, batch, layout=TIME_FIRST).exact
    assert anybatch.testing.assert_exact(model, loss_fn, batch, layout=TIME_FIRST).samples == 6
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    plan = anybatch.plan(model, loss_fn, batch, optimizer, memory="1GiB", layout=TIME_FIRST)
    assert plan.samples == 6  # in as many micro-batches as were the fastest when they were measured
    expected, _ = reference.whole_gradients(model, loss_fn, batch)
    for options in ({"micro_batch_size": 2}, {"memory": "1GiB"}, {"micro_batch_size": 4, "verify": "off"}):
        step = anybatch.TrainStep(model, loss_fn, optimizer, layout=TIME_FIRST, **options)
        step(batch)
        reference.assert_float64(reference.gradients_of(model), expected)


def test_a_budget_cuts_along_the_samples() -> None:
    model, batch = model_of(), time_first(64)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    whole = anybatch.plan(model, loss_fn, batch, optimizer, memory="1GiB", layout=TIME_FIRST)
    step = anybatch.TrainStep(model, loss_fn, optimizer, layout=TIME_FIRST, memory=int(0.6 * whole.whole_bytes))
    expected, _ = reference.whole_gradients(model, loss_fn, batch)
    out = step(batch)
    assert out.plan is not None
    assert out.plan.samples == 64
    reference.assert_float64(reference.gradients_of(model), expected)


def test_a_window_is_cut_along_the_samples() -> None:
    model = model_of()
    (window,) = anybatch.windows([time_first(6), time_first(3)], batches=2)
    expected: list[torch.Tensor | None] = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for batch, share in zip(window, (6 / 9, 3 / 9), strict=True):
        for total, own in zip(expected, reference.whole_gradients(model, loss_fn, batch)[0], strict=True):
            if total is not None and own is not None:
                total.add_(share * own)
    reference.clear(model)
    anybatch.backward(model, loss_fn, window, micro_batch_size=4, layout=TIME_FIRST)
    reference.assert_float64(reference.gradients_of(model), expected)


def test_what_was_found_can_be_seen() -> None:
    model, batch = model_of(), time_first()
    step = anybatch.TrainStep(
        model, loss_fn, torch.optim.SGD(model.parameters(), 0.0), micro_batch_size=2, layout=TIME_FIRST
    )
    assert step.layout is None
    out = step(batch)
    assert out.layout is step.layout
    assert str(step.layout).splitlines() == [
        "6 samples",
        "  batch['x']         Tensor [4, 6, 3]  6 samples in dimension 1",
        "  batch['state'][0]  Tensor [1, 6, 5]  6 samples in dimension 1",
        "  batch['state'][1]  Tensor [1, 6, 5]  6 samples in dimension 1",
        "  batch['y']         Tensor [4, 6]     6 samples in dimension 1",
        "  batch['weights']   Tensor [4]        whole to every micro-batch",
        "  batch['names']     list [6]          6 samples, one per item",
    ]
    assert anybatch.backward(nn.Linear(1, 1), lambda m, b: m(b).mean(), torch.ones(3, 1)).layout.samples == 3  # type: ignore[union-attr]


def test_what_can_not_be_cut_and_raw_samples_are_shown_too() -> None:
    def mean(model: Any, batch: Any) -> Any:
        return model(batch["x"] if isinstance(batch, dict) else batch).mean()

    whole = anybatch.backward(nn.Linear(1, 1), mean, {"x": torch.ones(3, 1), "ids": torch.ones(7)}).layout
    assert str(whole).startswith("not cut: batch['ids'] has 7 rows, batch['x'] has 3")
    raw = anybatch.backward(nn.Linear(1, 1), mean, [torch.ones(1)] * 5, collate=torch.stack).layout
    assert str(raw) == "5 samples: raw samples, which collate= joins"
    two = anybatch.backward(nn.Linear(1, 1), mean, next(anybatch.windows([torch.ones(2, 1)] * 2, batches=2))).layout
    assert two is not None
    assert (two.samples, two.batches, two.to_dict()["leaves"][0]["shape"]) == (4, 2, [2, 1])
    assert str(two).startswith("4 samples in 2 batches; the first one\n  batch")


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ({"x": 2}, r"puts the samples of batch\['x'\] in dimension 2, and it has the shape \(3, 4\)"),
        ({"z": 1}, "layout names .*'z'.* not in the batch; it has"),
        ({"x": 1}, r"batch\['y'\] has 3 rows, batch\['x'\] has 4"),
        ({"x": "1"}, r"layout\['x'\] is '1'; expected the sample dimension"),
        ({"x": True}, "expected the sample dimension"),
        ({1: 0}, "dotted path"),
        ([("x", 1)], "layout is a list; expected a mapping"),
    ],
)
def test_what_can_not_be_meant_is_refused(layout: Any, text: str) -> None:
    batch = {"x": torch.zeros(3, 4), "y": torch.zeros(3)}
    with pytest.raises(BatchError, match=text):
        anybatch.backward(nn.Linear(4, 1), lambda m, b: m(b["x"]).mean(), batch, micro_batch_size=2, layout=layout)


def test_it_does_not_go_with_what_says_otherwise() -> None:
    model, batch = nn.Linear(4, 1), [torch.zeros(4)] * 3
    with pytest.raises(BatchError, match="broadcast names the path, too"):
        anybatch.backward(model, lambda m, b: m(b["x"]).mean(), {"x": batch}, broadcast=("x",), layout={"x": 1})
    with pytest.raises(BatchError, match=r"layout= and collate= were given"):
        anybatch.backward(model, lambda m, b: m(b).mean(), batch, collate=torch.stack, layout={"x": 1})


def test_a_loss_over_time_has_its_samples_first() -> None:
    def chunk(model: Any, part: Any, state: Any) -> Any:
        return model(part["x"]).mean(), state

    loss = anybatch.OverTime(chunk, lambda model, batch: None)
    with pytest.raises(BatchError, match="where OverTime expects them; transpose"):
        anybatch.backward(nn.Linear(4, 1), loss, {"x": torch.zeros(3, 5, 4)}, layout={"x": 1})


def test_the_dimensions_may_be_counted_from_the_end() -> None:
    model = nn.Linear(1, 1)
    out = anybatch.backward(
        model, lambda m, b: m(b["x"][0, :, None]).mean(), {"x": torch.ones(2, 5)}, micro_batch_size=2, layout={"*": -1}
    )
    assert (out.micro_batches, out.count) == (3, 5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("kind", [torch.strided, torch.jagged])
def test_tokens_of_nested_labels_are_counted(kind: torch.layout) -> None:
    rows = [torch.tensor([5, -100, 7]), torch.tensor([1, 2]), torch.tensor([-100])]
    batch = {"labels": torch.nested.nested_tensor(rows, layout=kind)}
    assert int(anybatch.count_tokens("labels")(batch)) == 4
    assert int(anybatch.count_tokens("labels", shift=1)(batch)) == 2


def test_all_leaves_of_the_other_length_are_in_the_remedy_and_it_works() -> None:
    batch = {
        "few": {"x": torch.ones(4, 2), "y": torch.ones(4)},
        "many": {"x": torch.ones(12, 2), "z": torch.ones(12)},
    }
    with pytest.raises(anybatch.BatchError) as caught:
        anybatch.count_samples(batch)
    for names in (("few.x", "few.y"), ("many.x", "many.z")):
        assert f"broadcast={names!r}" in str(caught.value)


def test_flattened_targets_of_a_batch_with_the_time_first() -> None:
    """The line that is printed is followed as it stands."""
    batch: Any = {"x": torch.randn(5, 4, 3), "y": torch.randint(2, (20,))}
    model = nn.ModuleList([nn.GRU(3, 6), nn.Linear(6, 2)])

    def loss_fn(model: Any, batch: Any) -> Any:
        logits = model[1](model[0](batch["x"])[0])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

    with pytest.raises(anybatch.BatchError) as refused:
        anybatch.backward(model, loss_fn, batch, micro_batch_size=2)
    for line in ("batch['y'].unflatten(0, (5, 4))", "layout={'x': 1, 'y': 1}"):
        assert line in str(refused.value)
    loss_fn(model, batch).backward()
    whole = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    batch["y"] = batch["y"].unflatten(0, (5, 4))
    anybatch.backward(model, loss_fn, batch, micro_batch_size=2, layout={"x": 1, "y": 1})
    torch.testing.assert_close([one.grad for one in model.parameters()], whole)
