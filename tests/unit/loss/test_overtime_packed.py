"""Losses over time on packed sequences: the state follows the sequences that go on."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import anybatch
import reference
from anybatch import Mean
from overtime_models import CLASSES, WIDTH, Case, Recurrent

Packed = dict[str, Any]


def packed_batch(lengths: list[int], *, is_sorted: bool = False) -> Packed:
    g = torch.Generator().manual_seed(len(lengths))
    x = [torch.randn(n, WIDTH, dtype=torch.float64, generator=g) for n in lengths]
    y = [torch.randint(CLASSES, (n,), generator=g) for n in lengths]
    return {
        "x": pack_sequence(x, enforce_sorted=is_sorted),
        "y": pack_sequence(y, enforce_sorted=is_sorted),
        "label": torch.randint(CLASSES, (len(lengths),), generator=g),
        "memory": torch.randn(len(lengths), 3, WIDTH, dtype=torch.float64, generator=g),
    }


def case_of(kind: str = "LSTM", layers: int = 2, *, loss: str = "mean", last: bool = True) -> Case:
    def begin(model: Any, batch: Packed) -> Any:
        h = model.begin(len(batch["label"]))
        shift = batch["memory"].mean(1)
        return (h[0] + shift, h[1]) if kind == "LSTM" else h + shift  # rows are not exchangeable

    def chunk_loss(model: Any, chunk: Packed, state: Any) -> Any:
        output, state = model.rnn(chunk["x"], state)
        logits = model.head(output.data)
        if loss == "none":
            return None, state
        if loss == "plain":
            return F.cross_entropy(logits, chunk["y"].data), state
        return Mean(F.cross_entropy(logits, chunk["y"].data, reduction="sum"), len(logits)), state

    def on_last(model: Any, state: Any, batch: Packed) -> Any:
        h = state[0] if kind == "LSTM" else state
        return Mean(F.cross_entropy(model.head(h[-1]), batch["label"], reduction="sum"), len(batch["label"]))

    return Case(Recurrent(kind, layers), chunk_loss, begin, on_last if last else None, {"broadcast": ["memory"]})


def assert_exact(case: Case, batch: Packed, chunk: int | None, size: int | None = None, **options: Any) -> None:
    expected, losses = reference.whole_gradients(case.model, case.whole, batch)
    reference.clear(case.model)
    out = anybatch.backward(
        case.model,
        case.over_time(chunk),
        batch,
        micro_batch_size=size,
        broadcast=options.pop("broadcast", ()),
        **options,
    )
    reference.assert_float64(reference.gradients_of(case.model), expected)
    assert sum(losses.values()) == pytest.approx(sum(out.losses.values()), rel=1e-10)
    called, _ = reference.whole_gradients(case.model, case.over_time(chunk), batch)
    reference.assert_float64(called, expected)
    reference.clear(case.model)


LENGTHS = {
    "unsorted": [3, 9, 1, 5, 9, 2],
    "sorted": [9, 7, 7, 3, 1],
    "equal": [6, 6, 6],
    "one row": [8],
    "two rows, as many as layers": [2, 7],
    "as many rows as the width": [4, 2, 6, 1],
}


@pytest.mark.parametrize("name", list(LENGTHS))
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_packed_sequences(name: str, kind: str) -> None:
    batch = packed_batch(LENGTHS[name], is_sorted=name == "sorted")
    for layers, chunk in ((2, 1), (2, 4), (1, 3), (2, 20), (2, None)):
        assert_exact(case_of(kind, layers), batch, chunk, count="forward")


def test_packed_in_micro_batches() -> None:
    batch = packed_batch(LENGTHS["unsorted"])
    for size, chunk in ((1, 2), (4, 1)):
        assert_exact(case_of(last=False), batch, chunk, size)
    for size, chunk in ((2, 3), (5, 4)):
        assert_exact(case_of(loss="none"), batch, chunk, size)
    assert_exact(case_of(), batch, 2, 3, count="forward")


def test_a_plain_mean_over_steps_needs_its_count() -> None:
    batch, case = packed_batch(LENGTHS["unsorted"]), case_of(loss="plain", last=False)
    with pytest.raises(anybatch.CountError, match=r"expected anybatch\.Mean"):
        anybatch.backward(case.model, case.over_time(3), batch)
    for size in (None, 2):
        assert_exact(case, batch, 3, size, count=lambda batch: len(batch["y"].data))


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), chunk=st.integers(1, 13), size=st.integers(1, 6))
def test_any_lengths(lengths: list[int], chunk: int, size: int) -> None:
    assert_exact(case_of("GRU", 2), packed_batch(lengths), chunk, size, count="forward")


class Attentive(nn.Module):
    """Looks at a memory of its own row, so that rows that get mixed up are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.cell = nn.Linear(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.double()


def attentive() -> Case:
    def begin(model: Any, batch: Packed) -> Any:
        memory = model.encoder(batch["memory"])
        return {"h": memory[:, 0], "memory": memory, "ended": 0}

    def chunk_loss(model: Any, chunk: Packed, state: Any) -> Any:
        total: Any = 0
        x, h, ended, at = chunk["x"], state["h"], [], 0
        for rows in x.batch_sizes.tolist():
            if rows < len(h):
                ended.append(h[rows:])
            now, memory = h[:rows], state["memory"][:rows]
            context = ((memory @ now[:, :, None]).softmax(1) * memory).sum(1)
            h = model.cell(x.data[at : at + rows] + context, now)
            at += rows
            total = total + h.square().sum()
        whole = torch.cat([h, *ended[::-1]])
        return Mean(total, len(x.data)), {"h": whole, "memory": state["memory"], "ended": state["ended"] + len(ended)}

    def on_last(model: Any, state: Any, batch: Packed) -> Any:
        return Mean((state["h"] * state["memory"].prod(1)).sum(), len(state["h"]))

    return Case(Attentive(), chunk_loss, begin, on_last, {"broadcast": ["memory"]})


def unpacked_loss(model: Any, batch: Packed) -> dict[str, Any]:
    """Each sequence by itself."""
    x, lengths = pad_packed_sequence(batch["x"], batch_first=True)
    steps, last = [], []
    for row, length in enumerate(lengths.tolist()):
        memory = model.encoder(batch["memory"][row : row + 1])
        h = memory[:, 0]
        for t in range(length):
            context = ((memory @ h[:, :, None]).softmax(1) * memory).sum(1)
            h = model.cell(x[row : row + 1, t] + context, h)
            steps.append(h.square().sum())
        last.append((h * memory.prod(1)).sum())
    return {"loss": torch.stack(steps).mean(), "last": torch.stack(last).mean()}


@pytest.mark.parametrize("lengths", [[3, 9, 1, 5, 9, 2], [5, 2, 7, 1], [2, 6]])
def test_rows_of_a_memory_follow_their_sequences(lengths: list[int]) -> None:
    case, batch = attentive(), packed_batch(lengths)
    expected, _ = reference.whole_gradients(case.model, unpacked_loss, batch)
    for chunk, size in ((1, None), (3, None), (20, None), (2, 2)):
        reference.clear(case.model)
        out = anybatch.backward(case.model, case.over_time(chunk), batch, micro_batch_size=size, count="forward")
        reference.assert_float64(reference.gradients_of(case.model), expected)
        assert set(out.losses) == {"loss", "last"}


def test_a_dimension_that_may_be_of_rows_or_steps_has_to_be_named() -> None:
    lengths = [5, 2, 7]  # as many as steps in the memory
    case, batch = attentive(), packed_batch(lengths)
    expected, _ = reference.whole_gradients(case.model, unpacked_loss, batch)
    with pytest.raises(anybatch.BatchError, match=r"state\['memory'\] has the shape \(3, 3, 4\).*state_dim=0"):
        anybatch.backward(case.model, case.over_time(3), batch, count="forward")
    anybatch.backward(case.model, case.over_time(3, state_dim=0), batch, count="forward")
    reference.assert_float64(reference.gradients_of(case.model), expected)


def test_what_was_found_for_other_batches_is_remembered() -> None:
    case = attentive()
    loss_fn = case.over_time(3)
    anybatch.backward(case.model, loss_fn, packed_batch([5, 2, 7, 7]), count="forward")
    reference.clear(case.model)
    batch = packed_batch([5, 2, 7])
    anybatch.backward(case.model, loss_fn, batch, count="forward")
    expected, _ = reference.whole_gradients(case.model, unpacked_loss, batch)
    reference.assert_float64(reference.gradients_of(case.model), expected)


def test_a_stream_of_packed_sequences_carries_their_last_states() -> None:
    case = case_of("GRU", 2, last=False)
    loss_fn = case.over_time(2, carry=True)
    first, second = packed_batch([3, 9, 1, 5]), packed_batch([2, 2, 8, 4])
    anybatch.backward(case.model, loss_fn, first, micro_batch_size=3)
    reference.clear(case.model)
    anybatch.backward(case.model, loss_fn, second, micro_batch_size=2)
    found = reference.gradients_of(case.model)
    reference.clear(case.model)
    model: Any = case.model
    _, state = model.rnn(first["x"], case.state(model, first))
    output, _ = model.rnn(second["x"], state.detach())
    F.cross_entropy(model.head(output.data), second["y"].data).backward()
    reference.assert_float64(found, reference.gradients_of(model))


def test_truncated_packed_with_a_last_loss_is_refused() -> None:
    case, batch = case_of(loss="none"), packed_batch([3, 9, 1])
    with pytest.raises(anybatch.LossError, match="those that end before the last chunk"):
        anybatch.backward(case.model, case.over_time(3, mode="truncated"), batch)


def test_sequences_packed_with_other_lengths_are_refused() -> None:
    case, batch = case_of(), packed_batch([3, 9, 1])
    other = packed_batch([3, 8, 1])
    with pytest.raises(anybatch.BatchError, match="packed with different lengths"):
        anybatch.backward(case.model, case.over_time(3), {**batch, "y": other["y"]})
    with pytest.raises(anybatch.BatchError, match="beside PackedSequences"):
        anybatch.backward(case.model, case.over_time(3), {**batch, "z": torch.zeros(3, 9, 2)})


def test_a_packed_sequence_in_the_state_is_refused() -> None:
    case = case_of()
    loss_fn = anybatch.OverTime(case.chunk_loss, lambda model, batch: batch["x"], chunk=2, broadcast=["memory"])
    with pytest.raises(anybatch.LossError, match="PackedSequence"):
        anybatch.backward(case.model, loss_fn, packed_batch([3, 9, 1]))
    assert isinstance(packed_batch([1])["x"], PackedSequence)
