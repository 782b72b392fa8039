"""The graph cut: downstream piece by piece, upstream once, and every way to use it wrongly."""

import dataclasses
import gc
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import anybatch
import reference
from anybatch import AnyBatchWarning, CutClosed, LossError


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Record:
    a: Any
    b: Any


class Heads(nn.Module):
    """A trunk, of which each pass backward is counted, and some heads."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.heads = nn.ModuleList([nn.Linear(8, 1) for _ in range(heads)])
        self.double()
        self.passes = 0
        self.trunk[1].register_forward_hook(self._watch)

    def _watch(self, _module: Any, _args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(self._count)

    def _count(self, _gradient: torch.Tensor) -> None:
        self.passes += 1


X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def summed(model: Heads, batch: torch.Tensor) -> torch.Tensor:
    features = model.trunk(batch)
    return torch.stack([head(features).square().mean() for head in model.heads]).sum()


def test_upstream_is_gone_through_once_and_gets_the_sum() -> None:
    model = Heads()
    expected, _ = reference.whole_gradients(model, summed, X)
    model.passes = 0
    with anybatch.cut(model.trunk(X)) as features:
        for head in model.heads:
            head(features).square().mean().backward()
        assert model.passes == 0
        assert all(p.grad is None for p in model.trunk.parameters())
    assert model.passes == 1
    reference.assert_float64(reference.gradients_of(model), expected)


@pytest.mark.parametrize("size", [1, 2, 4, 6, None])
def test_upstream_is_gone_through_once_a_micro_batch(size: int | None) -> None:
    model = Heads()
    expected, _ = reference.whole_gradients(model, summed, X)
    model.passes = 0

    def loss_fn(model: Any, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        with anybatch.cut(model.trunk(batch)) as features:
            for head in model.heads:
                yield head(features).square().mean()

    out = anybatch.backward(model, loss_fn, X, micro_batch_size=size)
    assert model.passes == out.micro_batches
    assert list(out.losses) == ["loss_0", "loss_1", "loss_2"]
    reference.assert_float64(reference.gradients_of(model), expected)


def test_any_container() -> None:
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    text = ["a"]
    tensors = {
        "list": [w * 2, (w * 3, Pair(w * 4, w * 5))], "record": Record(w * 6, OrderedDict(x=w * 7)),
        "integers": torch.arange(3), "none": None, "text": text, "constant": torch.ones(3), "number": 2.5,
    }  # fmt: skip
    with anybatch.cut(tensors) as t:
        leaves = [
            t["list"][0],
            t["list"][1][0],
            t["list"][1][1].a,
            t["list"][1][1].b,
            t["record"].a,
            t["record"].b["x"],
        ]
        assert all(leaf.is_leaf and leaf.requires_grad for leaf in leaves)
        assert t["integers"] is tensors["integers"]
        assert t["constant"] is tensors["constant"]
        assert (t["none"], t["text"], t["number"]) == (None, text, 2.5)
        for leaf in leaves:
            leaf.sum().backward()
        assert w.grad is None
    assert w.grad is not None
    assert w.grad.tolist() == [27.0] * 3


def test_a_packed_sequence() -> None:
    sequences = [torch.randn(n, 4, dtype=torch.float64) for n in (3, 1, 2)]
    lstm, head = nn.LSTM(4, 8).double(), nn.Linear(8, 1).double()
    both = nn.ModuleList([lstm, head])
    packed = pack_sequence(sequences, enforce_sorted=False)
    expected, _ = reference.whole_gradients(both, lambda *_: 2 * head(lstm(packed)[0].data).square().mean(), None)
    with anybatch.cut(lstm(packed)) as (output, _):
        assert isinstance(output, PackedSequence)
        for _ in range(2):
            head(output.data).square().mean().backward()
    reference.assert_float64(reference.gradients_of(both), expected)


def test_one_tensor_twice_is_one_leaf() -> None:
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    tensor = w * 2
    with anybatch.cut((tensor, [tensor])) as (first, (second,)):
        assert first is second
        (first * second).sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [8.0] * 3


def test_a_parameter_itself_can_be_cut_off() -> None:
    w = nn.Parameter(torch.ones(3))
    with anybatch.cut(w) as leaf:
        (leaf * 3).sum().backward()
        assert w.grad is None
    assert w.grad is not None
    assert w.grad.tolist() == [3.0] * 3


@pytest.mark.parametrize("through", ["backward", "micro-batches"])
def test_cuts_in_cuts(through: str) -> None:
    model = Heads(2)
    middle = nn.Linear(8, 8).double()
    both = nn.ModuleList([model, middle])

    def plain(_: Any, batch: torch.Tensor) -> torch.Tensor:
        features = model.trunk(batch)
        deep = middle(features)
        return model.heads[0](features).square().mean() + 2 * model.heads[1](deep).square().mean()  # type: ignore[no-any-return]

    def losses(_: Any, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        with anybatch.cut(model.trunk(batch)) as features:
            yield model.heads[0](features).square().mean()
            with anybatch.cut(middle(features)) as deep:
                yield model.heads[1](deep).square().mean()
                yield model.heads[1](deep).square().mean()

    expected, _ = reference.whole_gradients(both, plain, X)
    model.passes = 0
    if through == "backward":
        for loss in losses(None, X):
            loss.backward()
        assert model.passes == 1
    else:
        anybatch.backward(both, lambda model, batch: (yield from losses(model, batch)), X, micro_batch_size=4)
        assert model.passes == 2
    reference.assert_float64(reference.gradients_of(both), expected)


def test_only_some_inputs() -> None:
    model = Heads()
    wanted: list[Any] = [model.trunk[0].weight, model.heads[1].weight]
    expected, _ = reference.whole_gradients(model, summed, X, wanted)

    def loss_fn(model: Any, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        with anybatch.cut(model.trunk(batch)) as features:
            for head in model.heads:
                yield head(features).square().mean()

    anybatch.backward(model, loss_fn, X, micro_batch_size=4, inputs=wanted)
    reference.assert_float64(reference.gradients_of(wanted), expected)
    assert sum(p.grad is not None for p in model.parameters()) == 2


# Edges.


def test_an_exception_leaves_upstream_untouched() -> None:
    model = Heads()
    left = []

    def fail() -> None:
        with anybatch.cut(model.trunk(X)) as features:
            left.append(features)
            model.heads[0](features).mean().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(p.grad is None for p in model.trunk.parameters())
    assert left[0].grad is None
    with anybatch.cut(model.trunk(X)) as features:  # nothing is left open
        model.heads[0](features).mean().backward()
    assert model.passes == 1


def test_no_backward_warns_and_resumes_nothing() -> None:
    model = Heads()
    with pytest.warns(AnyBatchWarning, match="backward") as caught, anybatch.cut(model.trunk(X)) as features:
        model.heads[0](features).mean()
    assert caught[0].filename == __file__
    assert all(p.grad is None for p in model.trunk.parameters())
    assert model.passes == 0


def test_no_grad_passes_through() -> None:
    model = Heads()
    with torch.no_grad():
        out = model.trunk(X)
        with anybatch.cut({"x": out}) as features:
            assert features["x"] is out
            model.heads[0](features["x"]).mean()


def test_a_trunk_without_gradient_passes_through() -> None:
    model = Heads()
    model.trunk.requires_grad_(False)
    out = model.trunk(X)
    with anybatch.cut(out) as features:
        assert features is out
        model.heads[0](features).mean().backward()
    assert model.heads[0].weight.grad is not None


@pytest.mark.parametrize("made_inside", [True, False])
def test_a_leaf_after_its_block_raises(made_inside: bool) -> None:
    model = Heads()
    with anybatch.cut(model.trunk(X)) as features:
        late = model.heads[0](features).mean()
        model.heads[1](features).mean().backward()
    before = reference.gradients_of(model.trunk)
    with pytest.raises(CutClosed, match=r"after its block.*inside `with anybatch\.cut") as caught:
        (late if made_inside else model.heads[0](features).mean()).backward()
    assert isinstance(caught.value, anybatch.AnyBatchError)
    reference.assert_bitwise(reference.gradients_of(model.trunk), before)


@pytest.mark.parametrize("failing", [False, True])
def test_nothing_is_kept_after_the_block(failing: bool) -> None:
    model = Heads()
    left = []

    def run() -> None:
        cut = anybatch.cut(model.trunk(X))
        left.append(weakref.ref(cut))
        with cut as features:
            model.heads[0](features).mean().backward()
            if failing:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) if failing else nullcontext():
        run()
    for _ in range(100):  # on a device, a thread of autograd's frees what it has gone through
        gc.collect()
        if left[0]() is None:
            return
        time.sleep(0.01)
    raise AssertionError(gc.get_referrers(left[0]()))


def test_a_cut_is_entered_once() -> None:
    model = Heads()
    once = anybatch.cut(model.trunk(X))
    with once as features:
        model.heads[0](features).mean().backward()
    with pytest.raises(CutClosed, match="make a new one"), once:
        pass


@pytest.mark.parametrize("write", [lambda x: x.relu_(), lambda x: x.add_(1), lambda x: x[:1].mul_(2)])
def test_a_head_that_begins_in_place(write: Any) -> None:
    model = Heads()
    with pytest.raises(LossError, match=r"in place.*clone") as caught, anybatch.cut(model.trunk(X)) as features:
        write(features)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert all(p.grad is None for p in model.trunk.parameters())

    def loss_fn(model: Any, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        with anybatch.cut(model.trunk(batch)) as features:
            yield model.heads[0](write(features)).mean()

    with pytest.raises(LossError, match=r"in place.*clone"):
        anybatch.backward(model, loss_fn, X, micro_batch_size=2)
    assert reference.gradients_of(model) == [None] * len(list(model.parameters()))


def test_a_head_without_any_item_does_not_warn() -> None:
    model = Heads()

    def loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        with anybatch.cut(model.trunk(batch["x"])) as features:
            yield "masked", (model.heads[0](features)[:, 0] * batch["mask"]).sum() / batch["mask"].sum()

    batch = {"x": X, "mask": torch.tensor([0, 0, 1, 1, 0, 0])}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        anybatch.backward(
            model, loss_fn, batch, micro_batch_size=2, count={"masked": lambda batch: batch["mask"].sum()}
        )
    assert model.passes == 1


# Precision.


def test_under_autocast() -> None:
    torch.manual_seed(0)
    model = Heads().float()
    x = X.float()

    def plain() -> list[Any]:
        reference.clear(model)
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            features = model.trunk(x)
            losses = [head(features).float().square().mean() for head in model.heads]
        torch.stack(losses).sum().backward()
        return reference.gradients_of(model)

    expected = plain()
    reference.clear(model)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16), anybatch.cut(model.trunk(x)) as features:
        assert features.dtype is torch.bfloat16
        for head in model.heads:
            head(features).float().square().mean().backward()
    assert reference.distance(reference.gradients_of(model), expected) <= 2.0**-8 * reference.norm(expected)
    reference.clear(model)

    def loss_fn(model: Any, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        with anybatch.cut(model.trunk(batch)) as features:
            for head in model.heads:
                yield head(features).float().square().mean()

    anybatch.backward(model, loss_fn, x, micro_batch_size=2, autocast=torch.bfloat16)
    assert reference.distance(reference.gradients_of(model), expected) <= 2.0**-7 * reference.norm(expected)


def test_with_a_scaler_gradients_are_scaled_once() -> None:
    model = Heads().float()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected, _ = reference.whole_gradients(model, summed, X.float())

    def loss_fn(model: Any, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        with anybatch.cut(model.trunk(batch)) as features:
            for head in model.heads:
                yield head(features).square().mean()

    anybatch.backward(model, loss_fn, X.float(), micro_batch_size=4, scaler=scaler)
    found = [None if g is None else g / 1024 for g in reference.gradients_of(model)]
    assert reference.distance(found, expected) <= 2.0**-20 * reference.norm(expected)


def test_softmax_heads_agree_with_cross_entropy() -> None:
    model = Heads(2)
    targets = torch.tensor([0, 1, 0, 0, 1, 1])

    def plain(model: Any, batch: torch.Tensor) -> torch.Tensor:
        features = model.trunk(batch)
        return F.cross_entropy(torch.cat([head(features) for head in model.heads], 1), targets)

    expected, _ = reference.whole_gradients(model, plain, X)
    with anybatch.cut(model.trunk(X)) as features, anybatch.cut([head(features) for head in model.heads]) as logits:
        F.cross_entropy(torch.cat(logits, 1), targets).backward()
    reference.assert_float64(reference.gradients_of(model), expected)
