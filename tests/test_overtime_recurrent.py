"""Bidirectional layers: refused within a chunk, exact before the cut, and exact in chunks of their own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import anybatch
import reference
from anybatch.gradient.recurrent import in_chunks
from anybatch.tensors.meter import LiveBytes
from overtime_models import Batch, Case, Recurrent, batch_of

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("LSTM", {}), ("GRU", {}), ("RNN", {}), ("RNN", {"nonlinearity": "relu"}), ("LSTM", {"proj_size": 3}),
    ("GRU", {"bias": False}),
]  # fmt: skip


def tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, PackedSequence):
        return [tree.data]
    return [tree] if isinstance(tree, torch.Tensor) else [t for item in tree for t in tensors(item)]


def assert_same(rnn: nn.RNNBase, x: Any, state: Any, chunk: int) -> None:
    """Outputs and every gradient are those of the layer itself."""
    wanted = [*rnn.parameters(), *[t for t in tensors([x, () if state is None else state]) if t.requires_grad]]
    found = []
    for run in (lambda: rnn(x, state), lambda: in_chunks(rnn, x, state, chunk=chunk)):
        torch.manual_seed(3)
        results = tensors(run())
        g = torch.Generator().manual_seed(4)
        loss = sum((t * torch.randn(t.shape, dtype=t.dtype, generator=g)).sum() for t in results)
        assert isinstance(loss, torch.Tensor)
        found.append(
            (list[torch.Tensor | None](results), list(torch.autograd.grad(loss, wanted, materialize_grads=True)))
        )
    reference.assert_float64(found[1][0], found[0][0], "the output")
    reference.assert_float64([*found[1][1]], [*found[0][1]])


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_it_is_the_layer(kind: int, both: bool) -> None:
    name, options = KINDS[kind]
    for layers, batch_first, dropout in ((1, True, 0.0), (2, False, 0.0), (3, True, 0.3)):
        rnn = getattr(nn, name)(4, 5, layers, bidirectional=both, batch_first=batch_first, dropout=dropout, **options)
        rnn.double()
        x = torch.randn(7, 6, 4, dtype=torch.float64, requires_grad=True)
        assert_same(rnn, x, None, 3)
        rows = 7 if batch_first else 6
        shape = (layers * (1 + both), rows)
        h = torch.randn(*shape, rnn.proj_size or 5, dtype=torch.float64, requires_grad=True)
        c = torch.randn(*shape, 5, dtype=torch.float64, requires_grad=True)
        assert_same(rnn, x, (h, c) if name == "LSTM" else h, 4)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    chunk=st.integers(1, 10),
    both=st.booleans(),
    lstm=st.booleans(),
)
def test_packed(lengths: list[int], chunk: int, both: bool, lstm: bool) -> None:
    rnn = (nn.LSTM if lstm else nn.GRU)(4, 3, 2, bidirectional=both).double()
    rows = [torch.randn(n, 4, dtype=torch.float64) for n in lengths]
    packed = pack_sequence(rows, enforce_sorted=False)
    x = PackedSequence(packed.data.requires_grad_(), *packed[1:])
    h = torch.randn(2 * (1 + both), len(lengths), 3, dtype=torch.float64, requires_grad=True)
    assert_same(rnn, x, (h, h.detach().tanh().requires_grad_()) if lstm else h, chunk)
    assert_same(rnn, x, None, chunk)


def runs_in_bfloat16(rnn: nn.LSTM, x: torch.Tensor) -> bool:
    try:
        with torch.autocast("cpu", torch.bfloat16):
            rnn(x)
    except RuntimeError:  # of oneDNN, which has no such kernel for some processors
        return False
    return True


def test_autocast_frozen_input_and_memory() -> None:
    rnn = nn.LSTM(8, 8, 2, bidirectional=True)
    x = torch.randn(1000, 2, 8)
    peaks = []
    for run in (lambda: rnn(x), lambda: in_chunks(rnn, x, chunk=50)):
        rnn.zero_grad()
        with LiveBytes() as live:
            run()[0].sum().backward()
        peaks.append(live.peak)
    assert peaks[1] < peaks[0] / 2.5
    if not runs_in_bfloat16(rnn, x[:2]):
        pytest.skip("this processor runs no LSTM in bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = in_chunks(rnn, x, chunk=50)
        expected, _ = rnn(x)
    assert output.dtype is expected.dtype
    output.float().sum().backward()


def test_what_it_can_not_do_is_refused() -> None:
    for arguments, text in (
        ((nn.Linear(1, 1), torch.zeros(1, 1, 1), 2), "got a Linear"),
        ((nn.GRU(1, 1), torch.zeros(1, 1), 2), r"the input \(1, 1\)"),
        ((nn.GRU(1, 1), torch.zeros(1, 1, 1), 0), "chunk=0"),
    ):
        with pytest.raises(anybatch.LossError, match=text):
            in_chunks(arguments[0], arguments[1], chunk=arguments[2])  # type: ignore[arg-type]


def tagger(both_in_chunk: bool, chunk: int | None = None) -> Case:
    """A bidirectional layer, then a recurrent one over its outputs, and a loss at each step."""

    class Tagger(Recurrent):
        def __init__(self) -> None:
            super().__init__("GRU")
            self.both = nn.LSTM(4, 2, 2, batch_first=True, bidirectional=True).double()

    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        features = model.both(chunk["x"])[0] if both_in_chunk else chunk["x"]
        output, state = model.rnn(features, state)
        logits = model.head(output) + chunk["extra"][:, None]
        return F.cross_entropy(logits.flatten(0, 1), chunk["y"].flatten()), state

    def prepare(model: Any, batch: Batch) -> Batch:
        x = model.both(batch["x"])[0] if chunk is None else in_chunks(model.both, batch["x"], chunk=chunk)[0]
        return {"x": x, "y": batch["y"], "extra": model.head(x.mean(1))}

    def begin(model: Any, batch: Batch) -> Any:
        return batch["x"].mean(1).unsqueeze(0) if "extra" in batch else model.begin(len(batch["x"]))

    return Case(
        Tagger(), chunk_loss, begin, None, {"broadcast": ["extra"], **({} if both_in_chunk else {"prepare": prepare})}
    )


def test_within_a_chunk_it_is_refused() -> None:
    case = tagger(True)
    batch = {"x": batch_of()["x"], "y": batch_of()["y"], "extra": torch.zeros(5, 3).double()}
    for mode in ("exact", "truncated"):
        with pytest.raises(anybatch.NotSplittable, match="a bidirectional LSTM runs within chunk_loss") as caught:
            anybatch.backward(case.model, case.over_time(4, mode=mode), batch)
        assert list(caught.value.modules) == ["LSTM"]
    step = anybatch.TrainStep(case.model, case.over_time(4), torch.optim.SGD(case.model.parameters(), 0.1))
    with pytest.raises(anybatch.NotSplittable):
        step.evaluate(batch)
    anybatch.backward(case.model, case.over_time(11), batch)  # all steps at once see each other
    assert not any(module._forward_pre_hooks for module in case.model.modules())


@pytest.mark.parametrize("inner", [None, 3])
def test_before_the_cut_it_is_exact(inner: int | None) -> None:
    case = tagger(False, inner)
    model: Any = case.model
    batch = {"x": batch_of()["x"], "y": batch_of()["y"]}
    prepare = case.options["prepare"]
    expected, losses = reference.whole_gradients(model, lambda m, b: case.whole(m, prepare(m, b)), batch)
    for chunk, size, mode in ((4, None, "exact"), (3, 2, "exact"), (11, None, "exact"), (20, 2, "truncated")):
        reference.clear(model)
        out = anybatch.backward(model, case.over_time(chunk, mode=mode), batch, micro_batch_size=size)
        reference.assert_float64(reference.gradients_of(model), expected)
        assert out.loss == pytest.approx(losses["loss"], rel=1e-12)
    whole, _ = reference.whole_gradients(model, case.over_time(4), batch)
    reference.assert_float64(whole, expected)
    reference.clear(model)
    wanted = list(model.both.parameters())
    anybatch.backward(model, case.over_time(4), batch, inputs=wanted)
    some, _ = reference.whole_gradients(model, lambda m, b: case.whole(m, prepare(m, b)), batch, wanted)
    reference.assert_float64(reference.gradients_of(wanted), some)


def test_truncated_after_a_cut_reaches_what_was_prepared_in_every_chunk() -> None:
    case = tagger(False)
    model: Any = case.model
    batch = {"x": batch_of()["x"], "y": batch_of()["y"]}
    anybatch.backward(model, case.over_time(4, mode="truncated"), batch)
    found = reference.gradients_of(model)
    reference.clear(model)
    whole, _ = reference.whole_gradients(model, case.over_time(4, mode="truncated"), batch)
    reference.assert_float64(found, whole)


def test_packed_sequences_may_be_prepared() -> None:
    def prepare(model: Any, batch: Any) -> Any:
        return {"x": in_chunks(model.rnn, batch["x"], chunk=2)[0], "y": batch["y"]}

    def chunk_loss(model: Any, chunk: Any, state: Any) -> Any:
        loss = F.cross_entropy(model.head(chunk["x"].data), chunk["y"].data, reduction="sum")
        return anybatch.Mean(loss, len(chunk["y"].data)), None

    model: Any = Recurrent("LSTM", 1, bidirectional=True)
    lengths = [3, 7, 1, 5]
    batch = {
        "x": pack_sequence([torch.randn(n, 4).double() for n in lengths], enforce_sorted=False),
        "y": pack_sequence([torch.randint(3, (n,)) for n in lengths], enforce_sorted=False),
    }
    loss_fn = anybatch.OverTime(chunk_loss, lambda model, batch: None, chunk=3, prepare=prepare)
    expected, _ = reference.whole_gradients(
        model, lambda m, b: F.cross_entropy(m.head(m.rnn(b["x"])[0].data), b["y"].data), batch
    )
    for size in (None, 3):
        reference.clear(model)
        anybatch.backward(model, loss_fn, batch, micro_batch_size=size)
        reference.assert_float64(reference.gradients_of(model), expected)
