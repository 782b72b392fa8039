"""A step proves that it does not matter where ``OverTime`` cuts time, and says where it does.

How it could be silently wrong: a loss that looks at the steps of its chunk only gives other gradients in other chunks,
and both ways to split the samples cut time alike.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import anybatch
import anybatch.checking.chunks

STEPS = 20


class Tagger(nn.Module):
    """A recurrent tagger with what else looks along time."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)
        self.conv = nn.Conv1d(3, 4, 3)
        self.place = nn.Embedding(64, 3)
        self.double()


def batch_of(rows: int = 6, steps: int = STEPS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, steps, 3, generator=generator, dtype=torch.float64)
    counts = torch.rand(rows, steps, generator=generator) > torch.linspace(0.0, 0.8, steps)
    return {"x": x, "y": torch.randint(2, (rows, steps), generator=generator), "counts": counts.double()}


def rows_of(batch: Any) -> int:
    return len(batch["x"]) if isinstance(batch, dict) else int(batch.batch_sizes[0])


def zeros(model: Any, batch: Any) -> torch.Tensor:
    return torch.zeros(1, rows_of(batch), 4, dtype=torch.float64)


def of_steps(model: Any, chunk: Any, hidden: Any) -> torch.Tensor:
    return F.cross_entropy(model.head(hidden).flatten(0, 1), chunk["y"].flatten(), reduction="none")


def plain(model: Any, chunk: Any, state: Any) -> Any:
    hidden, state = model.rnn(chunk["x"], state)
    return of_steps(model, chunk, hidden).mean(), state


def as_function(model: Any, chunk: Any, state: Any) -> Any:
    hidden, state = model.rnn(chunk["x"], state)
    return lambda: of_steps(model, chunk, hidden).mean(), state


def counted(model: Any, chunk: Any, state: Any) -> Any:
    hidden, state = model.rnn(chunk["x"], state)
    counts = chunk["counts"].flatten()
    return anybatch.Mean((of_steps(model, chunk, hidden) * counts).sum(), counts.sum()), state


def uncounted(model: Any, chunk: Any, state: Any) -> Any:
    mean, state = counted(model, chunk, state)
    return mean.total / mean.count.clamp(min=1), state


def with_position(model: Any, chunk: Any, state: Any) -> Any:
    hidden, at = state
    steps = chunk["x"].shape[1]
    hidden, after = model.rnn(chunk["x"] + model.place(torch.arange(at, at + steps)), hidden)
    return of_steps(model, chunk, hidden).mean(), (after, at + steps)


def position_from_0(model: Any, chunk: Any, state: Any) -> Any:
    hidden, state = model.rnn(chunk["x"] + model.place(torch.arange(chunk["x"].shape[1])), state)
    return of_steps(model, chunk, hidden).mean(), state


def with_last_inputs(model: Any, chunk: Any, state: Any) -> Any:
    x = torch.cat([state, chunk["x"]], 1)
    return of_steps(model, chunk, model.conv(x.transpose(1, 2)).transpose(1, 2)).mean(), x[:, -2:]


def conv_without_state(model: Any, chunk: Any, state: Any) -> Any:
    x = F.pad(chunk["x"].transpose(1, 2), (2, 0))
    return of_steps(model, chunk, model.conv(x).transpose(1, 2)).mean(), state


def normalised(model: Any, chunk: Any, state: Any) -> Any:
    return plain(model, {**chunk, "x": chunk["x"] - chunk["x"].mean(1, keepdim=True)}, state)


def normalised_before(model: Any, batch: Any) -> Any:
    return {**batch, "x": batch["x"] - batch["x"].mean(1, keepdim=True)}


def forgetful(model: Any, chunk: Any, state: Any) -> Any:
    return plain(model, chunk, torch.zeros_like(state))


def forgotten(model: Any, chunk: Any, state: Any) -> Any:
    return plain(model, chunk, torch.zeros_like(state))[0], state


def not_handed_on(model: Any, chunk: Any, state: Any) -> Any:
    return plain(model, chunk, state)[0], state


def in_context(model: Any, chunk: Any, state: Any) -> Any:
    """What all chunks have is in the state, and no chunk tells the next one anything."""
    hidden, _ = model.rnn(chunk["x"] + state.unsqueeze(1))
    return of_steps(model, chunk, hidden).mean(), state


def by_shares(model: Any, chunk: Any, state: Any) -> Any:
    """Statistics of the chunk, and a state that is read through a softmax."""
    hidden, state = model.rnn(chunk["x"] - chunk["x"].mean(1, keepdim=True), state.softmax(-1))
    return of_steps(model, chunk, hidden).mean(), state


def at_a_temperature(model: Any, chunk: Any, state: Any) -> Any:
    hidden, _ = model.rnn((chunk["x"] - chunk["x"].mean(1, keepdim=True)) / state)
    return of_steps(model, chunk, hidden).mean(), state


def temperature(model: Any, batch: Any) -> torch.Tensor:
    return torch.full((rows_of(batch), 1, 1), 2.0, dtype=torch.float64)


def drawn(model: Any, batch: Any) -> torch.Tensor:
    return torch.randn(1, rows_of(batch), 4, dtype=torch.float64)


def no_state(model: Any, batch: Any) -> Any:
    return ()


def context(model: Any, batch: Any) -> torch.Tensor:
    found: torch.Tensor = batch["x"][:, 0]
    return found


def detached(model: Any, chunk: Any, state: Any) -> Any:
    loss, state = plain(model, chunk, state)
    return loss, state.detach()


def noisy(model: Any, chunk: Any, state: Any) -> Any:
    x = F.dropout(chunk["x"] + 0.1 * torch.randn_like(chunk["x"]), 0.2)
    return plain(model, {**chunk, "x": x}, state)


def in_pairs(model: Any, chunk: Any, state: Any) -> Any:
    """Takes two steps at a time, so that a chunk has an even number of them."""
    hidden, state = model.rnn(chunk["x"].unflatten(1, (-1, 2)).mean(2), state)
    return of_steps(model, {"y": chunk["y"][:, ::2]}, hidden).mean(), state


def only_the_end(model: Any, chunk: Any, state: Any) -> Any:
    return None, model.rnn(chunk["x"], state)[1]


def last(model: Any, state: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model.head(state[0]), batch["y"][:, -1])


def packed(model: Any, chunk: PackedSequence, state: Any) -> Any:
    hidden, state = model.rnn(chunk, state)
    return anybatch.Mean(hidden.data.square().sum(), hidden.data.new_tensor(len(hidden.data))), state


def over(chunk_loss: Callable[..., Any], state: Callable[..., Any] = zeros, **options: Any) -> anybatch.OverTime:
    return anybatch.OverTime(chunk_loss, state, **{"chunk": 4, **options})


def lengths(batch: Any) -> torch.Tensor:
    found: torch.Tensor = batch.batch_sizes.sum()
    return found


LEGAL: dict[str, Callable[[], tuple[anybatch.OverTime, dict[str, Any]]]] = {
    "a mean over the steps": lambda: (over(plain), {}),
    "chunks of unequal lengths": lambda: (over(plain, chunk=7), {}),
    "chunks of one step": lambda: (over(plain, chunk=1), {}),
    "a function": lambda: (over(as_function), {}),
    "a Mean": lambda: (over(counted), {}),
    "a count": lambda: (over(uncounted), {"count": lambda batch: batch["counts"].sum()}),
    "a position that carries on": lambda: (over(with_position, lambda model, batch: (zeros(model, batch), 0)), {}),
    "the last inputs": lambda: (
        over(with_last_inputs, lambda model, batch: torch.zeros(rows_of(batch), 2, 3, dtype=torch.float64)),
        {},
    ),
    "prepared": lambda: (over(plain, prepare=normalised_before), {}),
    "random numbers": lambda: (over(noisy), {}),
    "a start that is drawn": lambda: (over(plain, drawn), {}),
    "random numbers from a start that is drawn": lambda: (over(noisy, drawn), {}),
    "two steps at a time": lambda: (over(in_pairs), {}),
    "a loss on the last state": lambda: (over(only_the_end, last=last), {}),
    "carried": lambda: (over(plain, carry=True), {}),
    "truncated": lambda: (over(plain, mode="truncated"), {}),
    "detached in truncated chunks": lambda: (over(detached, mode="truncated"), {}),
    "measured": lambda: (over(plain, chunk=None), {}),
}
FAULTY: dict[str, Callable[[int | None], anybatch.OverTime]] = {
    "a mean over what its chunk has": lambda chunk: over(uncounted, chunk=chunk),
    "a position from 0": lambda chunk: over(position_from_0, chunk=chunk),
    "a convolution without its last inputs": lambda chunk: over(conv_without_state, no_state, chunk=chunk),
    "statistics of the chunk": lambda chunk: over(normalised, chunk=chunk),
    "a state for all chunks": lambda chunk: over(in_context, context, chunk=chunk),
    "a state that is read through a softmax": lambda chunk: over(by_shares, chunk=chunk),
    "a temperature for all chunks": lambda chunk: over(at_a_temperature, temperature, chunk=chunk),
}
WITHOUT_STATE: dict[str, tuple[Callable[..., Any], str]] = {
    "a convolution that does not read its state": (conv_without_state, "does not read the state"),
    "the state is forgotten": (forgetful, "does not read the state"),
    "the state is forgotten and returned": (forgotten, "does not read the state"),
    "the state is read and returned": (not_handed_on, "returns the state it was given"),
}


def with_detached_state(chunk: int | None) -> anybatch.OverTime:
    return over(detached, chunk=chunk)


def ran(loss: Any, batch: Any, size: int | None, **options: Any) -> Any:
    torch.manual_seed(0)
    return anybatch.backward(Tagger(), loss, batch, micro_batch_size=size, **options)


@pytest.mark.parametrize("size", [None, 4, 1])
@pytest.mark.parametrize("name", list(LEGAL))
def test_what_does_not_depend_on_its_chunks_passes(name: str, size: int | None) -> None:
    loss, options = LEGAL[name]()
    out = ran(loss, batch_of(steps=48) if name == "measured" else batch_of(), size, **options)
    assert out.proof.exact, out.proof
    is_odd = size == 1 and name in (
        "chunks of one step",
        "two steps at a time",
    )  # no longer chunk fits, no shorter does
    assert len(out.proof.chunks) == (0 if is_odd and name == "chunks of one step" else 2)


@pytest.mark.parametrize("size", [None, 4, 1])
@pytest.mark.parametrize("name", list(FAULTY))
def test_what_depends_on_the_chunks_that_its_author_gives_is_told(name: str, size: int | None) -> None:
    is_of_rows = name == "a mean over what its chunk has"  # which is stopped where rows are split
    with pytest.warns(anybatch.AnyBatchWarning, match="where(ver)? time is cut"):
        out = ran(FAULTY[name](4), batch_of(), None if is_of_rows else size)
    assert "in chunks of 4 steps, whose loss differs" in out.proof.note
    assert (": a different gradient" in str(out.proof)) == (out.proof.error > out.proof.tolerance)


@pytest.mark.parametrize("mode", ["exact", "truncated"])
@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("name", list(WITHOUT_STATE))
def test_a_state_that_tells_a_chunk_nothing_is_stopped_whoever_gave_the_chunks(
    name: str, size: int | None, mode: Any
) -> None:
    chunk_loss, cause = WITHOUT_STATE[name]
    with pytest.raises(anybatch.NotSplittable, match=f"does not depend on the state(.|\n)*{cause}") as refused:
        ran(over(chunk_loss, mode=mode), batch_of(), size)
    compared = "loss" if mode == "truncated" else "gradient"
    assert f"the {compared} of Tagger is not that of all steps" in str(refused.value)
    assert "(0 off)" not in str(refused.value)


def test_a_state_that_is_not_read_is_told_where_the_proof_only_warns() -> None:
    with pytest.warns(anybatch.AnyBatchWarning, match="does not read the state"):
        out = ran(over(forgetful), batch_of(), 4, verify="warn")
    assert not out.proof.exact
    assert "a different gradient" in str(out.proof)


@pytest.mark.parametrize("made", [*FAULTY.values(), with_detached_state])
def test_what_depends_on_chunks_that_are_chosen_for_it_is_stopped(made: Callable[[None], anybatch.OverTime]) -> None:
    with pytest.raises(anybatch.NotSplittable, match="in chunks of 16 steps the gradient of Tagger"):
        ran(made(None), batch_of(steps=48), 4)


@pytest.mark.parametrize("size", [None, 4, 1])
@pytest.mark.parametrize("state", [zeros, drawn])
def test_a_gradient_that_ends_at_a_chunk_is_stopped_whoever_gave_the_chunks(size: int | None, state: Any) -> None:
    with pytest.raises(anybatch.NotSplittable, match=r"return loss, state  # not state.detach"):
        ran(over(detached, state), batch_of(), size)


def test_a_drawn_start_that_no_chunk_reads_is_told() -> None:
    with pytest.raises(anybatch.NotSplittable, match="does not read the state"):
        ran(over(forgetful, drawn), batch_of(), 4)


@pytest.mark.parametrize("size", [None, 4])
def test_packed_sequences_pass(size: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(steps, 3, generator=generator, dtype=torch.float64) for steps in (20, 17, 11, 9, 5)]
    out = ran(over(packed), pack_sequence(rows), size)
    assert out.proof.exact
    assert "in chunks of 4 and of" in str(out.proof)


def test_truncated_chunks_with_other_values_are_told_once() -> None:
    model, loss = Tagger(), over(position_from_0, mode="truncated")
    step = anybatch.TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.01))
    with pytest.warns(anybatch.AnyBatchWarning, match="depends on where time is cut"):
        step(batch_of())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batch_of())


def test_what_is_in_one_chunk_is_not_compared_until_it_is_cut() -> None:
    loss = over(position_from_0, chunk=STEPS)
    model = Tagger()
    step = anybatch.TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.01))
    assert step(batch_of()).proof is None
    with pytest.warns(anybatch.AnyBatchWarning, match="where time is cut"):
        proof = step(batch_of(steps=2 * STEPS)).proof
    assert proof is not None
    assert proof.chunks == (STEPS, 2 * STEPS)


def test_it_leaves_the_run_as_it_was() -> None:
    gradients = []
    for verify in ("first", "off"):
        torch.manual_seed(0)
        model, loss = Tagger(), over(noisy, carry=True)
        step = anybatch.TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.01), verify=verify)
        for _ in range(2):
            step(batch_of())
        assert loss.carried is not None
        gradients.append([*model.parameters(), loss.carried.parts[0][2]])
    assert all(map(torch.equal, *gradients))


def test_raw_samples_are_compared_before_they_are_put_together() -> None:
    batch = batch_of()
    rows = [{name: one[row] for name, one in batch.items()} for row in range(len(batch["x"]))]
    collate = torch.utils.data.default_collate
    assert ran(over(plain), rows, 4, collate=collate).proof.exact
    with pytest.warns(anybatch.AnyBatchWarning, match="where time is cut"):
        ran(over(position_from_0), rows, 4, collate=collate)


def summed_steps(model: Any, chunk: Any, state: Any) -> Any:
    hidden, state = model.rnn(chunk["x"], state)
    return of_steps(model, chunk, hidden).sum(), state


def test_a_sum_over_the_chunk_is_told_as_a_sum_and_not_as_what_moves() -> None:
    loss = anybatch.OverTime(summed_steps, zeros, chunk=5)
    with pytest.raises(anybatch.NotSplittable, match=r"in micro-batches(.|\n)*The loss is a sum"):
        anybatch.backward(Tagger(), loss, batch_of(), micro_batch_size=3)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), ZeroDivisionError("of its own")])
def test_memory_that_runs_out_while_chunks_are_compared_is_not_said_to_be_inexact(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation of torch has no frame of its own, so that the error seems to come of this package."""
    source = "def runs_out(*given):\n    raise error\n"
    made: dict[str, Any] = {"error": error}
    exec(compile(source, anybatch.checking.chunks.__file__, "exec"), made)
    monkeypatch.setattr("anybatch.checking.chunks._found", made["runs_out"])
    if isinstance(error, ZeroDivisionError):
        with pytest.raises(anybatch.NotSplittable, match="ZeroDivisionError: of its own"):
            ran(with_detached_state(4), batch_of(), None)
        return
    out = ran(with_detached_state(4), batch_of(), None)
    assert out.proof.outcome == "undecided"
    assert "out of memory" in out.proof.note
