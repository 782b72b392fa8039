"""A state that is carried from batch to batch: as in the loop that detaches it, and a part of the transaction."""

import copy
import gc
import io
import tracemalloc
from typing import Any

import pytest
import torch
from torch import nn

import anybatch
import reference
from anybatch.loss.losses import Place
from live_bytes import LiveBytes
from overtime_models import Batch, Case, Recurrent, batch_of, recurrent

ROWS = 4


def stream_of(count: int = 3) -> list[Batch]:
    return [{k: v for k, v in batch_of(ROWS, 10, seed).items() if k in ("x", "y")} for seed in range(count)]


def case_of(kind: str = "LSTM", layers: int = 2) -> Case:
    case = recurrent(kind, layers)
    return Case(case.model, case.chunk_loss, case.state)


def by_hand(case: Case, stream: list[Batch]) -> list[reference.Gradients]:
    """Windows one after the other, the state detached between them."""
    found, state = [], case.state(case.model, stream[0])
    for batch in stream:
        reference.clear(case.model)
        loss, state = case.chunk_loss(case.model, batch, state)
        loss().backward()
        state = tuple(h.detach() for h in state) if isinstance(state, tuple) else state.detach()
        found.append(reference.gradients_of(case.model))
    reference.clear(case.model)
    return found


def mean_of(one: reference.Gradients, other: reference.Gradients) -> reference.Gradients:
    """Half of the sum, where ``None`` is zero."""
    pairs = zip(one, other, strict=True)
    sums = [b if a is None else a if b is None else a + b for a, b in pairs]
    return [None if total is None else total / 2 for total in sums]


@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_each_batch_begins_where_the_one_before_ended(kind: str, size: int | None) -> None:
    case, stream = case_of(kind), stream_of()
    loss_fn = case.over_time(3, carry=True)
    for _ in range(2):
        for batch, expected in zip(stream, by_hand(case, stream), strict=True):
            anybatch.backward(case.model, loss_fn, batch, micro_batch_size=size)
            reference.assert_float64(reference.gradients_of(case.model), expected)
            reference.clear(case.model)
        loss_fn.reset()


def test_micro_batches_may_change_their_size() -> None:
    case, stream = case_of("GRU", 1), stream_of(5)
    loss_fn = case.over_time(3, carry=True)
    for batch, expected, size in zip(stream, by_hand(case, stream), (1, 2, 3, 4, 1), strict=True):
        anybatch.backward(case.model, loss_fn, batch, micro_batch_size=size)
        reference.assert_float64(reference.gradients_of(case.model), expected)
        reference.clear(case.model)


def test_truncated_windows() -> None:
    case, stream = case_of("GRU", 1), stream_of(2)
    pieces = [{k: v[:, s : s + 5] for k, v in batch.items()} for batch in stream for s in (0, 5)]
    parts = by_hand(case, pieces)
    loss_fn = case.over_time(5, carry=True, mode="truncated")
    for index, batch in enumerate(stream):
        anybatch.backward(case.model, loss_fn, batch, micro_batch_size=3)
        expected = mean_of(parts[2 * index], parts[2 * index + 1])
        found = reference.gradients_of(case.model)
        reference.assert_float64(found, expected)
        reference.clear(case.model)


def test_a_window_of_several_batches_is_a_part_of_the_stream() -> None:
    case, stream = case_of(), stream_of(4)
    expected = by_hand(case, stream)
    loss_fn = case.over_time(4, carry=True)
    for start, window in enumerate(anybatch.windows(stream, batches=2)):
        anybatch.backward(case.model, loss_fn, window, micro_batch_size=3)
        half = mean_of(expected[2 * start], expected[2 * start + 1])
        reference.assert_float64(reference.gradients_of(case.model), half)
        reference.clear(case.model)


def carried(loss_fn: anybatch.OverTime) -> Any:
    return reference.frozen(loss_fn.state_dict()["carried"])


def test_evaluate_and_a_call_leave_what_is_carried_alone() -> None:
    case, stream = case_of(), stream_of()
    loss_fn = case.over_time(3, carry=True)
    step = anybatch.TrainStep(case.model, loss_fn, torch.optim.SGD(case.model.parameters(), 0.1))
    step(stream[0])
    before = carried(loss_fn)
    fresh = anybatch.TrainStep(case.model, case.over_time(3), torch.optim.SGD(case.model.parameters(), 0.1))
    assert step.evaluate(stream[1]).loss == fresh.evaluate(stream[1]).loss  # begins anew
    loss_fn(case.model, stream[1])
    assert carried(loss_fn) == before
    assert before is not None


def test_an_exception_leaves_gradients_and_state_as_they_were() -> None:
    case, stream = case_of(), stream_of()

    def failing(model: Any, chunk: Batch, state: Any) -> Any:
        calls.append(1)
        if len(calls) == fail_at[0]:
            raise ValueError("by intention")
        return case.chunk_loss(model, chunk, state)

    calls: list[int] = []
    fail_at = [0]
    loss_fn = anybatch.OverTime(failing, case.state, chunk=4, carry=True)
    anybatch.backward(case.model, loss_fn, stream[0], micro_batch_size=2)
    whole = len(calls)
    before, facts = carried(loss_fn), reference.everything(case.model)
    kept = []
    for number in range(1, whole + 1):
        fail_at[0] = number
        calls.clear()
        with pytest.raises(ValueError, match="by intention") as caught:
            anybatch.backward(case.model, loss_fn, stream[1], micro_batch_size=2)
        kept.append(caught)
        assert carried(loss_fn) == before
        reference.assert_unchanged(reference.everything(case.model), facts)


def test_a_skipped_float16_step_leaves_the_state() -> None:
    case = case_of("GRU", 1)
    model = case.model.float()
    stream = [{k: v.float() if k == "x" else v for k, v in batch.items()} for batch in stream_of()]
    loss_fn = case.over_time(4, carry=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), scaler=scaler)
    step(stream[0])
    before = carried(loss_fn)
    bad = {"x": stream[1]["x"].clone(), "y": stream[1]["y"]}
    bad["x"][0, 3, 0] = float("inf")
    assert step(bad).skipped
    assert carried(loss_fn) == before
    assert not step(stream[1]).skipped
    assert carried(loss_fn) != before


def test_state_dict_goes_on_bitwise() -> None:
    def run(resume_at: int | None) -> tuple[reference.Gradients, Any]:
        case = copy.deepcopy(original)
        loss_fn = case.over_time(3, carry=True)
        step = anybatch.TrainStep(
            case.model, loss_fn, torch.optim.SGD(case.model.parameters(), 0.1), micro_batch_size=3
        )
        for index, batch in enumerate(stream):
            if index == resume_at:
                file = io.BytesIO()
                torch.save([step.state_dict(), case.model.state_dict()], file)
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                case = copy.deepcopy(original)
                case.model.load_state_dict(saved[1])
                loss_fn = case.over_time(3, carry=True)
                optimizer = torch.optim.SGD(case.model.parameters(), 0.1)
                step = anybatch.TrainStep(case.model, loss_fn, optimizer, micro_batch_size=3)
                step.load_state_dict(saved[0])
            step(batch)
        return [p.detach() for p in case.model.parameters()], carried(loss_fn)

    original, stream = case_of(), stream_of(4)
    weights, state = run(None)
    again, other = run(2)
    reference.assert_bitwise(again, weights)
    assert other == state


def test_another_number_of_rows_is_refused() -> None:
    case, stream = case_of(), stream_of()
    loss_fn = case.over_time(3, carry=True)
    anybatch.backward(case.model, loss_fn, stream[0])
    with pytest.raises(anybatch.BatchError, match=r"3 sequences, the state carried to it 4.*reset\(\)"):
        anybatch.backward(case.model, loss_fn, {k: v[:3] for k, v in stream[1].items()})


def test_a_state_that_is_written_to_is_refused_in_every_mode() -> None:
    def counting(model: Any, chunk: Batch, state: Any) -> Any:
        state["n"] += 1
        output, h = model.rnn(chunk["x"], state["h"])
        return output.square().mean(), {"n": state["n"], "h": h}

    case, stream = case_of("GRU", 1), stream_of()
    for mode in ("exact", "truncated"):
        loss_fn = anybatch.OverTime(
            counting, lambda model, batch: {"n": torch.zeros(()).long(), "h": None}, chunk=20, carry=True,
            mode=mode,
        )  # fmt: skip
        with pytest.raises(anybatch.LossError, match="modifies its input state in place"):
            anybatch.backward(case.model, loss_fn, stream[0])


def test_a_container_that_is_written_to_is_no_matter() -> None:
    def renewing(model: Any, chunk: Batch, state: Any) -> Any:
        output, state["h"] = model.rnn(chunk["x"], state["h"])
        state["seen"].append(len(state["seen"]))
        return output.square().mean(), state

    case, stream = case_of("GRU", 1), stream_of(2)
    loss_fn = anybatch.OverTime(renewing, lambda model, batch: {"h": None, "seen": []}, chunk=3, carry=True)

    def plain(model: Any, chunk: Batch, state: Any) -> Any:
        output, state = model.rnn(chunk["x"], state)
        return lambda: output.square().mean(), state

    whole = Case(case.model, plain, lambda model, batch: torch.zeros(1, ROWS, 4).double())
    for batch, expected in zip(stream, by_hand(whole, stream), strict=True):
        anybatch.backward(case.model, loss_fn, batch)
        reference.assert_float64(reference.gradients_of(case.model), expected)
        reference.clear(case.model)
    assert loss_fn.carried is not None
    assert loss_fn.carried.parts[0][2]["seen"] == list(range(8))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(3, 4).double(), Recurrent("GRU")


@pytest.mark.parametrize("mode", ["exact", "truncated"])
def test_a_stream_of_any_length_needs_no_more(mode: Any) -> None:
    def chunk_loss(model: Any, chunk: torch.Tensor, state: Any) -> Any:
        output, state = model.inner.rnn(model.embedding(chunk[:, :-1]), state)
        return model.inner.head(output).square().mean(), output[:, -1].unsqueeze(0)  # a view of the whole output

    model = Tokens()
    loss_fn = anybatch.OverTime(chunk_loss, lambda model, batch: None, chunk=10, carry=True, mode=mode)
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.01))
    peaks, traced = [], []
    tracemalloc.start()
    for window in range(8):
        text = torch.randint(3, (2, 40))
        with LiveBytes() as live:
            step(text)
        del text
        gc.collect()
        peaks.append((live.current, live.peak))
        traced.append(tracemalloc.get_traced_memory()[0])
        assert loss_fn.carried is not None, window
        assert loss_fn.carried.parts[0][2].untyped_storage().nbytes() == 2 * 4 * 8
    tracemalloc.stop()
    assert len(set(peaks[2:])) == 1
    assert max(traced[4:]) - min(traced[4:]) < 20_000


def test_a_state_that_is_a_view_does_not_keep_the_chunk() -> None:
    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, _ = model.rnn(chunk["x"], state)
        kept.append(0 if state is None else state.untyped_storage().nbytes())
        return output.square().mean(), output[:, -1].unsqueeze(0)

    kept: list[int] = []
    case = case_of("GRU", 1)
    loss_fn = anybatch.OverTime(chunk_loss, lambda model, batch: None, chunk=4)
    anybatch.backward(case.model, loss_fn, stream_of(1)[0])
    assert set(kept) == {0, ROWS * 4 * 8}


def test_what_goes_through_the_state_unchanged_is_not_copied() -> None:
    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, h = model.rnn(chunk["x"], state[0])
        seen.add(state[1].data_ptr())
        return (output * state[1][:, :1]).square().mean(), (h, state[1])

    seen: set[int] = set()
    case = case_of("GRU", 1)
    memory = torch.randn(ROWS, 9, 4, dtype=torch.float64)[:, 2:]  # a view of more
    loss_fn = anybatch.OverTime(chunk_loss, lambda model, batch: (None, memory), chunk=3)
    anybatch.backward(case.model, loss_fn, stream_of(1)[0])
    assert seen == {memory.data_ptr()}


def test_a_plan_does_not_change_how_far_truncated_gradients_go() -> None:
    case, batch = case_of("GRU", 1), stream_of(1)[0]
    for mode, shares in (("truncated", [0.5, 0.5]), ("exact", [0.2] * 5)):
        place = Place(0, ROWS, ROWS, length=2)
        loss_fn = case.over_time(5, mode=mode)
        found = [p.share("loss") for p in loss_fn.pieces(case.model, batch, place) if p.result is not None]
        assert found == pytest.approx(shares)
