"""Losses over time have the gradient of all steps, whatever the chunks: compared with one graph of all steps."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import anybatch
import reference
from anybatch import Mean
from overtime_models import CASES, Batch, Case, batch_of, cells, recurrent, translator

STEPS = 11


def assert_exact(case: Case, batch: Batch, chunk: int | None, size: int | None = None, **options: Any) -> None:
    """Gradient and losses of all chunks and micro-batches, with and without the engine."""
    expected, losses = reference.whole_gradients(case.model, case.whole, batch)
    loss_fn = case.over_time(chunk)
    reference.clear(case.model)
    out = anybatch.backward(case.model, loss_fn, batch, micro_batch_size=size, **options)
    reference.assert_float64(reference.gradients_of(case.model), expected)
    assert sum(losses.values()) == pytest.approx(sum(out.losses.values()), rel=1e-10)
    reference.clear(case.model)


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_every_kind_of_sequence(name: str, chunk: int | None) -> None:
    case = CASES[name]()
    assert_exact(case, batch_of(), chunk)


@pytest.mark.parametrize("name", list(CASES))
def test_micro_batches_and_chunks_together(name: str) -> None:
    case = CASES[name]()
    for size, chunk in ((1, 3), (2, 4), (3, 11)):
        assert_exact(case, batch_of(), chunk, size)


@pytest.mark.parametrize("name", list(CASES))
def test_called_as_a_function_it_is_the_loss_of_all_steps(name: str) -> None:
    case = CASES[name]()
    expected, _ = reference.whole_gradients(case.model, case.whole, batch_of())
    found, _ = reference.whole_gradients(case.model, case.over_time(4), batch_of())
    reference.assert_float64(found, expected)


@given(
    name=st.sampled_from(list(CASES)),
    rows=st.integers(1, 6),
    steps=st.integers(1, 40),
    chunk=st.one_of(st.none(), st.integers(1, 45)),
    size=st.one_of(st.none(), st.integers(1, 6)),
    seed=st.integers(0, 9),
)
def test_any_sizes(name: str, rows: int, steps: int, chunk: int | None, size: int | None, seed: int) -> None:
    batch = batch_of(rows, steps, seed)
    batch["mask"][0, -1] = True
    assert_exact(CASES[name](), batch, chunk, size)


def test_several_losses_with_their_own_counts() -> None:
    case = recurrent(loss="several")
    counts = {"masked": lambda batch: batch["mask"].sum(), "size": anybatch.count_samples}
    for size, chunk in ((None, 4), (2, 3), (5, 1)):
        assert_exact(case, batch_of(), chunk, size, count=counts)
        assert_exact(case, batch_of(), chunk, size, count="forward")


def test_a_plain_loss_with_a_count_of_its_own() -> None:
    def ignoring(model: Any, chunk: Batch, state: Any) -> Any:
        output, state = model.rnn(chunk["x"], state)
        return F.cross_entropy(model.head(output).flatten(0, 1), chunk["y"].flatten(), ignore_index=2), state

    case = Case(recurrent().model, ignoring, lambda model, batch: None, None, {"broadcast": ["source"]})
    batch = batch_of()
    batch["y"][1, :5] = 2
    batch["y"][:, 3:6] = 2  # a chunk without any item
    for size, chunk in ((None, 3), (2, 3), (1, 4), (2, 1)):
        assert_exact(case, batch, chunk, size, count=lambda batch: (batch["y"] != 2).sum())


def test_a_count_that_does_not_add_up_over_time_is_refused() -> None:
    case, count = recurrent(), anybatch.count_tokens("y", shift=1)
    with pytest.raises(anybatch.CountError, match="adds up over time"):
        anybatch.backward(case.model, case.over_time(4), batch_of(), count=count)


def test_a_count_for_chunks_is_not_taken_for_the_last_loss() -> None:
    case, batch = recurrent(last=True), batch_of()
    count = anybatch.count_tokens("y")
    with pytest.raises(anybatch.CountError, match=r"'last': anybatch\.count_samples"):
        anybatch.backward(case.model, case.over_time(4), batch, micro_batch_size=2, count=count)
    assert_exact(case, batch, 4, 2, count={"loss": count, "last": anybatch.count_samples})


def test_metrics_are_added_up_over_chunks() -> None:
    case = recurrent()

    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, state = model.rnn(chunk["x"], state)
        logits = model.head(output)
        hits = (logits.argmax(2) == chunk["y"]).sum()
        return (
            F.cross_entropy(logits.flatten(0, 1), chunk["y"].flatten()),
            state,
            {"hits": Mean(hits, chunk["y"].numel())},
        )

    def last(model: Any, state: Any, batch: Batch) -> Any:
        right = (model.head(state[0][-1]).argmax(1) == batch["label"]).sum()
        return F.cross_entropy(model.head(state[0][-1]), batch["label"]), {"right": Mean(right, len(batch["x"]))}

    loss_fn = anybatch.OverTime(chunk_loss, case.state, last=last, chunk=4, broadcast=["source"])
    out = anybatch.backward(case.model, loss_fn, batch_of(), micro_batch_size=2)
    output, state = case.model.rnn(batch_of()["x"], case.state(case.model, batch_of()))  # type: ignore[operator]
    head: Any = case.model.head
    assert out.metrics["hits"] == pytest.approx((head(output).argmax(2) == batch_of()["y"]).double().mean().item())
    assert out.metrics["right"] == pytest.approx(
        (head(state[0][-1]).argmax(1) == batch_of()["label"]).double().mean().item()
    )


def test_a_mean_over_nothing_in_some_chunks() -> None:
    case, batch = recurrent(loss="mean"), batch_of()
    batch["mask"][:, :4] = False
    batch["mask"][:2] = False
    for size, chunk in ((None, 4), (1, 4), (2, 2)):
        assert_exact(case, batch, chunk, size)


def test_loss_in_some_chunks_only() -> None:
    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, (state, t) = model.rnn(chunk["x"], state[0]), (None, state[1] + chunk["x"].shape[1])
        loss = None if t <= 8 else output[0].square().mean()
        return loss, (output[1], t)

    case = recurrent()
    loss_fn = anybatch.OverTime(chunk_loss, lambda model, batch: (None, 0), chunk=4, broadcast=["source"])
    batch = batch_of()
    anybatch.backward(case.model, loss_fn, batch)
    found = reference.gradients_of(case.model)
    reference.clear(case.model)
    output: Any = case.model.rnn(batch["x"])[0]  # type: ignore[operator]
    (output[:, 8:].square().mean() * 3 / 11).backward()
    reference.assert_float64(found, reference.gradients_of(case.model))


def test_truncated_is_the_loop_that_detaches() -> None:
    for case in (recurrent("LSTM", 2), recurrent("GRU", last=True), translator("attached"), cells()):
        batch = batch_of()
        loss_fn = case.over_time(4, mode="truncated")
        anybatch.backward(case.model, loss_fn, batch, micro_batch_size=2)
        found = reference.gradients_of(case.model)
        reference.clear(case.model)
        state = case.state(case.model, batch)
        total: Any = 0
        for start in range(0, STEPS, 4):
            chunk = {k: v[:, start : start + 4] if k in ("x", "y", "mask") else v for k, v in batch.items()}
            loss, state, *_ = case.chunk_loss(case.model, chunk, state)
            loss = loss() if callable(loss) else loss
            steps = chunk["x"].shape[1]
            total = total + (loss.total / (5 * STEPS) if isinstance(loss, Mean) else loss * steps / STEPS)
            state = _detached(state) if start + 4 < STEPS else state
        total = total + (case.last(case.model, state, batch) if case.last else 0)
        total.backward()
        reference.assert_float64(found, reference.gradients_of(case.model))
        reference.clear(case.model)
        called, _ = reference.whole_gradients(case.model, loss_fn, batch)
        reference.assert_float64(called, found)


def _detached(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach()
    if isinstance(state, tuple | list):
        return type(state)(map(_detached, state))
    if isinstance(state, dict):
        return {key: _detached(value) for key, value in state.items()}
    return type(state)(**{k: _detached(v) for k, v in vars(state).items()}) if hasattr(state, "__dict__") else state


def test_inputs_only() -> None:
    case = translator("attached")
    model: Any = case.model
    wanted = [*model.encoder.parameters(), *model.head.parameters()]
    expected, _ = reference.whole_gradients(model, case.whole, batch_of(), wanted)
    anybatch.backward(model, case.over_time(4), batch_of(), inputs=wanted, micro_batch_size=2)
    reference.assert_float64(reference.gradients_of(wanted), expected)
    assert model.cell.weight_ih.grad is None


def test_evaluate_gives_the_same_loss_without_a_trace() -> None:
    case = recurrent(last=True)
    step = anybatch.TrainStep(case.model, case.over_time(4), torch.optim.SGD(case.model.parameters(), 0.1))
    losses = {name: loss.item() for name, loss in reference.whole_losses(case.model, case.whole, batch_of()).items()}
    out = step.evaluate(batch_of())
    assert {name: pytest.approx(value, rel=1e-12) for name, value in out.losses.items()} == losses
    assert all(parameter.grad is None for parameter in case.model.parameters())


def test_the_measured_length_keeps_what_it_ran_as_it_was() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = recurrent().model
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor, state: Any) -> Any:
            assert isinstance(self.calls, torch.Tensor)
            self.calls.add_(1)
            return self.inner.rnn(F.dropout(x, 0.5), state)  # type: ignore[operator]

    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, state = model(chunk["x"], state)
        return output.square().mean(), state

    model: Any = Noisy()
    loss_fn = anybatch.OverTime(chunk_loss, lambda model, batch: None)
    batch = {"x": torch.randn(2, 100, 4, dtype=torch.float64)}
    torch.manual_seed(1)
    anybatch.backward(model, loss_fn, batch)
    first = reference.gradients_of(model)
    calls = int(model.calls)
    assert 1 <= calls <= 7  # as often as there are chunks, of at least 16 steps
    reference.clear(model)
    torch.manual_seed(1)
    anybatch.backward(model, loss_fn, batch)  # does not measure again
    assert int(model.calls) == 2 * calls
    reference.assert_bitwise(reference.gradients_of(model), first)
