"""What could be silently wrong in a loss over time, and is refused in words or handled; memory that runs out."""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import anybatch
import reference
from anybatch.loss import cutting
from faults import OutOfMemoryAt, different, facts, quick_collections
from overtime_models import Batch, Case, Recurrent, batch_of, recurrent


@pytest.fixture
def quiet() -> Iterator[None]:
    with quick_collections():
        logging.disable()
        yield
        logging.disable(logging.NOTSET)


def noisy_case() -> Case:
    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, state = model.rnn(nn.functional.dropout(chunk["x"], 0.3), state)
        return lambda: model.head(output).square().mean(), state

    return Case(Recurrent("GRU"), chunk_loss, lambda model, batch: model.begin(len(batch["x"])))


class Run:
    """Two batches of a stream; the second one in a given number of rows at a time, or with a fault."""

    def __init__(self, mode: Any) -> None:
        self.case, self.mode = noisy_case(), mode
        self.batch = {"x": batch_of(2, 4)["x"]}

    def __call__(self, size: int | None = None, number: int = 0) -> tuple[OutOfMemoryAt, dict[str, Any], int]:
        case = self.case
        reference.clear(case.model)
        loss_fn = case.over_time(2, carry=True, mode=self.mode)
        torch.manual_seed(3)
        anybatch.backward(case.model, loss_fn, self.batch)
        with OutOfMemoryAt(number) as memory:
            out = anybatch.backward(case.model, loss_fn, self.batch, micro_batch_size=size)
        assert loss_fn.carried is not None
        state = torch.cat([part for _, _, part in loss_fn.carried.parts], 1)
        return memory, {**facts(case.model), "carried": state, "loss": out.loss}, out.micro_batches


@pytest.mark.parametrize(("mode", "stride"), [("exact", 2), ("truncated", 5)])
def test_memory_runs_out_at_every_operation(mode: Any, stride: int, quiet: None) -> None:
    run = Run(mode)
    expected = {1: run()[1], 2: run(1)[1]}
    wrong = {}
    for number in itertools.count(1, stride):
        memory, found, parts = run(number=number)
        if not memory.has_raised:
            break
        names = different(expected[parts], found)
        if names:
            wrong[f"{number} {memory.operations[number - 1]}"] = names
    assert not wrong, f"{len(wrong)} of {number}: {dict(itertools.islice(wrong.items(), 3))}"
    assert number > 60


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ValueError("by intention")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_no_cut_stays_open_after_an_exception(where: str) -> None:
    def failing(model: Any, chunk: Batch, state: Any) -> Any:
        if where == "forward":
            raise ValueError("by intention")
        output, state = model.rnn(chunk["x"], state)
        loss: Any = Failing.apply(output.square().mean())  # type: ignore[no-untyped-call]
        return loss, state

    case = recurrent()
    with pytest.raises(ValueError, match="by intention") as caught:
        anybatch.backward(case.model, anybatch.OverTime(failing, case.state, chunk=4), {"x": batch_of()["x"]})
    del caught
    assert cutting._open_cuts.get() == ()


def iter_nothing() -> Iterator[None]:
    yield from ()


RUBBISH: dict[str, tuple[Any, str]] = {
    "nothing": (None, "NoneType; expected"),
    "a tensor": (torch.zeros(()), "Tensor; expected"),
    "one": ((1,), "tuple; expected"),
    "four": ((1, 2, 3, 4), "tuple; expected"),
    "a number": ((1.0, None), "float"),
    "a generator": ((iter_nothing(), None), "generator"),
    "metrics with the loss": (((torch.zeros(()), {}), None), "after the state"),
    "metrics that are none": ((None, None, 3), "mapping of Means"),
    "a vector": ((torch.zeros(3, requires_grad=True), None), "shape"),
    "no gradient": ((torch.zeros(()), None), "no gradient"),
    "no loss at all": ((None, None), "None as the loss of every chunk"),
}


@pytest.mark.parametrize("name", list(RUBBISH))
@pytest.mark.parametrize("mode", ["exact", "truncated"])
def test_rubbish_is_refused(name: str, mode: Any) -> None:
    given, text = RUBBISH[name]
    model = recurrent().model
    before = reference.everything(model)
    loss_fn = anybatch.OverTime(lambda m, chunk, state: given, lambda m, batch: None, chunk=4, mode=mode)
    with pytest.raises(anybatch.LossError, match=text):
        anybatch.backward(model, loss_fn, {"x": batch_of()["x"]})
    reference.assert_unchanged(reference.everything(model), before)


@pytest.mark.parametrize("new", [None, (), {"h": None}])
def test_a_state_that_is_not_handed_on_is_refused(new: Any) -> None:
    """A GRU would begin each chunk with zeros, and the gradient would be another."""
    model = recurrent().model
    loss_fn = anybatch.OverTime(
        lambda m, chunk, state: (next(iter(m.parameters())).sum() * chunk["x"].sum(), new),
        lambda m, batch: torch.zeros(1, len(batch["x"]), 4), chunk=4,
    )  # fmt: skip
    with pytest.raises(anybatch.LossError, match="after one with tensors; expected the state"):
        anybatch.backward(model, loss_fn, {"x": batch_of()["x"]})


class Plain:
    """A class that nobody can look into."""

    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


@dataclass
class Opened:
    h: torch.Tensor


def test_a_state_that_nobody_can_look_into_is_refused() -> None:
    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, h = model.rnn(chunk["x"], state.h)
        return output.square().mean(), type(state)(h)

    def begin(kind: Any, model: Any, batch: Batch) -> Any:
        return kind(model.begin(5))

    case = recurrent("GRU")
    for kind, wrong in ((Plain, True), (Opened, False)):
        loss_fn = anybatch.OverTime(chunk_loss, partial(begin, kind), chunk=4)
        if wrong:
            with pytest.raises(anybatch.LossError, match="is a Plain; expected tensors and plain values"):
                anybatch.backward(case.model, loss_fn, {"x": batch_of()["x"]})
        else:
            anybatch.backward(case.model, loss_fn, {"x": batch_of()["x"]})


def refused(chunk_loss: Any, text: str, mode: Any = "exact") -> None:
    model = recurrent("GRU").model
    loss_fn = anybatch.OverTime(chunk_loss, lambda m, batch: m.begin(5), chunk=4, mode=mode)
    before = reference.everything(model)
    batch = {"x": batch_of()["x"].clone()}
    with pytest.raises(anybatch.LossError, match=text):
        anybatch.backward(model, loss_fn, batch)
    reference.assert_unchanged(reference.everything(model), before)


def test_a_state_that_is_kept_on_the_module_is_refused() -> None:
    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, model.kept = model.rnn(chunk["x"], getattr(model, "kept", state))
        return output.square().mean(), model.kept.detach() * 1

    refused(chunk_loss, "steps 4 to 7 when it runs again")


def test_a_generator_of_ones_own_is_refused() -> None:
    g = torch.Generator().manual_seed(1)

    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, state = model.rnn(chunk["x"] * torch.rand(1, generator=g), state)
        return output.square().mean(), state

    refused(chunk_loss, "generators of your own")


def test_a_batch_that_is_written_to_is_refused() -> None:
    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, state = model.rnn(chunk["x"].mul_(2), state)
        return output.square().mean(), state

    refused(chunk_loss, "wrote to a tensor of the batch")
    refused(chunk_loss, "wrote to a tensor of the batch", "truncated")


def test_a_state_that_is_written_to_is_refused() -> None:
    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, state = model.rnn(chunk["x"], state.mul_(2))
        return output.square().mean(), state

    refused(chunk_loss, "in place")
    refused(chunk_loss, "in place", "truncated")


def test_another_state_each_time_is_refused() -> None:
    calls: list[int] = []

    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        calls.append(1)
        output, h = model.rnn(chunk["x"], state[0] if isinstance(state, tuple) else state)
        return output.square().mean(), (h, h) if len(calls) > 3 else (h,)

    refused(chunk_loss, "when it runs again")


ARGUMENTS: dict[str, dict[str, Any]] = {
    "dim=0": {"dim": 0}, "dim='time'": {"dim": "time"}, "chunk=0": {"chunk": 0}, "chunk=True": {"chunk": True},
    "mode=": {"mode": "both"}, "needs chunk=": {"mode": "truncated"}, "a sequence of paths": {"broadcast": "x"},
    "state_dim=-1": {"state_dim": -1}, r"prepare\(model, batch\)": {"prepare": lambda model: model},
    "last= is a int|last=\\) is a int": {"last": 3},
}  # fmt: skip


@pytest.mark.parametrize("text", list(ARGUMENTS))
def test_arguments_that_can_not_be_meant(text: str) -> None:
    with pytest.raises(anybatch.LossError, match=text):
        anybatch.OverTime(lambda m, c, s: None, lambda m, b: None, **ARGUMENTS[text])


def test_batches_that_can_not_be_meant() -> None:
    case = recurrent()
    loss_fn = anybatch.OverTime(case.chunk_loss, case.state, chunk=4)
    for batch, text in (
        (batch_of(), r"\['source'\] has 6 steps along dimension 1, batch\['x'\] has 11"),
        ({"label": torch.zeros(5)}, "no tensor with a dimension 1 of time"),
        ({"x": torch.zeros(5, 0, 4).double()}, "has no steps"),
    ):
        with pytest.raises(anybatch.BatchError, match=text):
            anybatch.backward(case.model, loss_fn, batch)
    named = anybatch.OverTime(case.chunk_loss, case.state, chunk=4, broadcast=["sauce", "source"])
    with pytest.raises(anybatch.BatchError, match="'sauce', which is not in the batch"):
        anybatch.backward(case.model, named, batch_of())


def test_batch_norm_in_a_chunk_is_refused() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = Recurrent("GRU"), nn.BatchNorm1d(4).double()

    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, state = model.inner.rnn(model.norm(chunk["x"].flatten(0, 1)).view_as(chunk["x"]), state)
        return output.square().mean(), state

    model, batch = Normed(), {"x": batch_of()["x"]}
    with pytest.raises(anybatch.NotSplittable, match="norm"):
        anybatch.backward(model, anybatch.OverTime(chunk_loss, lambda m, b: None, chunk=4), batch)
    for chunk in (11, None):  # all steps are in one chunk
        anybatch.backward(model, anybatch.OverTime(chunk_loss, lambda m, b: None, chunk=chunk), batch)
    model.eval()
    anybatch.backward(model, anybatch.OverTime(chunk_loss, lambda m, b: None, chunk=4), batch)


@pytest.mark.parametrize("chunk", [None, 30])
@pytest.mark.parametrize("steps", [11, 100])
def test_batch_norm_after_prepare_is_refused_for_where_the_time_is_is_not_known(steps: int, chunk: int | None) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.rnn = nn.BatchNorm1d(6), nn.GRU(6, 3, batch_first=True)

    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, state = model.rnn(model.norm(chunk["x"].mT).mT, state)
        return lambda: (output - chunk["y"][:, None, None]).square().mean(), state

    def channels_last(_: Any, batch: Batch) -> Batch:
        return {"x": batch["x"].mT, "y": batch["y"]}

    loss_fn = anybatch.OverTime(chunk_loss, lambda m, b: None, prepare=channels_last, chunk=chunk)
    with pytest.raises(anybatch.NotSplittable, match="norm"):
        anybatch.backward(Normed(), loss_fn, {"x": torch.randn(4, 6, steps), "y": torch.randn(4)})
