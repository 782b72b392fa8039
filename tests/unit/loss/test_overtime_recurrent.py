"""Bidirectional layers: refused within a chunk, exact before the cut."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import anybatch
import reference
from overtime_models import Batch, Case, Recurrent, batch_of


def tagger(both_in_chunk: bool) -> Case:
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
        x = model.both(batch["x"])[0]
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


def test_before_the_cut_it_is_exact() -> None:
    case = tagger(False)
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
        return {"x": model.rnn(batch["x"])[0], "y": batch["y"]}

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
