"""Modules that take dimension 0 for time, and get the samples there, are named; what is said to do about it does it.

What would be wrong in silence: an RNN that runs over the samples. What would be a false alarm: a loss that turns its
batch itself.
"""

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
import reference
from anybatch import BatchError, NotSplittable
from anybatch.batch.batches import Splittable
from anybatch.batch.layout import placement

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


class Net(nn.Module):
    """A module that may be built with the batch first, between others."""

    def __init__(self, kind: Callable[..., nn.Module], call: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.inner, self.head, self.call = kind(**options), nn.Linear(4, 3), call

    def forward(self, x: Any) -> Any:
        return self.head(self.call(self.inner, x))


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


KINDS: dict[str, tuple[Callable[..., nn.Module], Callable[..., Any]]] = {
    "RNN": (lambda **o: nn.RNN(4, 4, **o), lambda m, x: m(x)[0]),
    "GRU": (lambda **o: nn.GRU(4, 4, **o), lambda m, x: m(x)[0]),
    "LSTM": (lambda **o: nn.LSTM(4, 4, **o), lambda m, x: m(x)[0]),
    "MultiheadAttention": (lambda **o: nn.MultiheadAttention(4, 2, **o), lambda m, x: m(x, x, x)[0]),
    "TransformerEncoderLayer": (encoder, lambda m, x: m(x)),
    "Transformer": (lambda **o: nn.Transformer(4, 2, 1, 1, 8, 0.0, **o), lambda m, x: m(x, x)),
}


def net(name: str, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(*KINDS[name], **options).double()


def loss_fn(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def turned(model: Any, batch: Any) -> Any:
    logits = model(batch["x"].transpose(0, 1)).transpose(0, 1)
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def batch_of(rows: int, steps: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, steps, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(3, (rows, steps), generator=generator)}


def refusal(model: Any, batch: Any) -> str:
    before = [parameter.clone() for parameter in model.parameters()]
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), micro_batch_size=4)
    with pytest.raises(NotSplittable, match="`inner") as caught:
        step(batch)
    with pytest.raises(NotSplittable, match="`inner"):
        anybatch.backward(model, loss_fn, batch, micro_batch_size=4)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    return str(caught.value)


@pytest.mark.parametrize("steps", [5, 12])  # as many time steps as samples, too
@pytest.mark.parametrize("name", KINDS)
def test_the_module_is_named_and_both_ways_on_are_exact(name: str, steps: int) -> None:
    batch = batch_of(12, steps)
    text = refusal(net(name), batch)
    assert "batch_first=False" in text
    assert f"    {name}(..., batch_first=True)" in text.splitlines()
    assert_exact(net(name, batch_first=True), loss_fn, batch)
    line = next(line for line in text.splitlines() if "layout=" in line)
    assert_exact(net(name), loss_fn, batch, layout=ast.literal_eval(line.split("layout=")[1].split("  #")[0]))


def assert_exact(model: Any, loss_fn: Any, batch: Any, **options: Any) -> None:
    expected, _ = reference.whole_gradients(model, loss_fn, batch)
    reference.clear(model)
    out = anybatch.backward(model, loss_fn, batch, micro_batch_size=4, **options)
    assert out.micro_batches > 1
    reference.assert_float64(reference.gradients_of(model), expected)


@pytest.mark.parametrize("steps", [4, 5, 12])  # 4: a micro-batch has as many samples
@pytest.mark.parametrize("name", KINDS)
def test_a_loss_that_turns_its_batch_is_not_refused(name: str, steps: int) -> None:
    assert_exact(net(name), turned, batch_of(12, steps))


@pytest.mark.parametrize(("dim", "first"), [(0, False), (1, True)])
def test_vectors_that_are_taken_for_one_sequence(dim: int, *, first: bool) -> None:
    def vectors(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    def as_said(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"].unsqueeze(dim)).squeeze(dim), batch["y"])

    batch = {"x": torch.randn(12, 4).double(), "y": torch.randint(3, (12,))}
    with pytest.raises(NotSplittable, match=rf"two dimensions.*\n    x = x.unsqueeze\({dim}\)"):
        anybatch.backward(net("GRU", batch_first=first), vectors, batch, micro_batch_size=4)
    assert_exact(net("GRU", batch_first=first), as_said, batch)


def test_labels_that_say_where_the_samples_lie() -> None:
    batch = {"x": torch.randn(12, 5, 4).double(), "y": torch.randint(3, (5,))}
    with pytest.raises(BatchError, match=r"samples of batch\['x'\] are in dimension 1, pass layout=\{'x': 1\}"):
        anybatch.backward(net("GRU"), loss_fn, batch, micro_batch_size=2)

    def last(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"])[-1], batch["y"])

    model = net("GRU")
    expected, _ = reference.whole_gradients(model, last, batch)
    reference.clear(model)
    assert anybatch.backward(model, last, batch, micro_batch_size=2, layout={"x": 1}).micro_batches == 3
    reference.assert_float64(reference.gradients_of(model), expected)


@pytest.mark.parametrize("names", [("x", "y", "h", "c"), ("x", "h", "c")])
def test_hidden_states_of_several_layers_are_told_together_with_a_line_that_helps(names: tuple[str, ...]) -> None:
    """Whichever are in the majority, and whether they come as a pair or one by one."""
    shapes = {"x": (8, 4, 3), "y": (8, 4, 1), "h": (2, 8, 5), "c": (2, 8, 5)}
    batch = {name: torch.randn(shapes[name]) for name in names}
    with pytest.raises(BatchError, match=r"dimension 1, pass layout=\{'h': 1, 'c': 1\}") as found:
        anybatch.backward(nn.Linear(3, 1), lambda model, batch: model(batch["x"]).mean(), batch, micro_batch_size=2)
    assert str(found.value).index("layout=") < str(found.value).index("broadcast=")
    assert Splittable([batch], broadcast=placement((), {"h": 1, "c": 1})).rows == 8
