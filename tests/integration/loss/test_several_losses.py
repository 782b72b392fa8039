"""Several losses and the cut, proved together: any container, cuts in cuts, precision, micro-batches."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import anybatch
import reference
from anybatch import Mean
from test_cut import Pair, Record

ROWS = 7
WIDTH = 5
Batch = dict[str, torch.Tensor]
Cut = Callable[[Any], Any]
Loss = Callable[[Any, Batch], Any]


class Trunk(nn.Module):
    """Gives a container of everything that can lie at a cut; counts its passes backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.rnn = nn.GRU(4, WIDTH, batch_first=True)
        self.passes = 0

    def forward(self, batch: Batch) -> dict[str, Any]:
        hidden = self.first(batch["x"]).tanh()
        if hidden.requires_grad:
            hidden.register_hook(self._count)
        packed = pack_padded_sequence(batch["sequence"], batch["lengths"].cpu(), batch_first=True, enforce_sorted=False)
        return {
            "pair": Pair(hidden, None),
            "record": Record([self.second(hidden)], batch["labels"]),
            "packed": self.rnn(packed)[0],
            "scale": 2,
            "words": ("a", torch.Size([1])),
        }

    def _count(self, _gradient: torch.Tensor) -> None:
        self.passes += 1


class Model(nn.Module):
    """A trunk, a middle that some heads share, and a head for each loss."""

    def __init__(self, heads: int = 5) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 3) for _ in range(heads)])
        self.double()


def batch_of(rows: int = ROWS) -> Batch:
    g = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(rows, 4, dtype=torch.float64, generator=g),
        "sequence": torch.randn(rows, 6, 4, dtype=torch.float64, generator=g),
        "lengths": torch.randint(1, 7, (rows,), generator=g),
        "labels": torch.randint(0, 3, (rows,), generator=g),
        "mask": torch.tensor([0, 0, 1, 1, 0, 1, 0])[:rows],
    }


def classify(head: Any, at: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(at), labels)


def masked(head: Any, at: torch.Tensor, mask: torch.Tensor) -> Mean:
    return Mean((head(at).square().sum(1) * mask).sum(), mask.sum())


def sequence(head: Any, packed: Any) -> Mean:
    return Mean(head(packed.data).square().sum(), len(packed.data))


KINDS = ("shallow", "deep", "both", "masked", "sequence", "nested", "nested masked")


def losses_of(kinds: list[str], cut: Cut) -> Loss:
    """A loss function that yields a loss of each kind, those that are nested from a cut within the cut."""

    def loss_fn(model: Any, batch: Batch) -> Iterator[Any]:
        heads = iter(zip(kinds, model.heads, range(len(kinds)), strict=False))
        with cut(model.trunk(batch)) as t:
            waiting = []
            for kind, head, k in heads:
                if kind == "shallow":
                    yield f"{k}", classify(head, t["pair"].a * t["scale"], t["record"].b)
                elif kind == "deep":
                    yield f"{k}", classify(head, t["record"].a[0], t["record"].b)
                elif kind == "both":
                    yield f"{k}", classify(head, t["pair"].a + t["record"].a[0], t["record"].b)
                elif kind == "masked":
                    yield f"{k}", masked(head, t["pair"].a, batch["mask"])
                elif kind == "sequence":
                    yield f"{k}", sequence(head, t["packed"])
                else:
                    waiting.append((kind, head, k))
            if waiting:
                with cut([model.middle(t["pair"].a), t["record"].b]) as (middle, labels):
                    for kind, head, k in waiting:
                        loss = (
                            classify(head, middle, labels) if kind == "nested" else masked(head, middle, batch["mask"])
                        )
                        yield f"{k}", loss

    return loss_fn


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    st.sampled_from([1, 2, 3, 4, 6, None]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_any_losses_of_any_container_in_any_micro_batches(
    kinds: list[str], size: int | None, restricted: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    model, batch = Model(), batch_of()
    wanted: list[Any] = [model.trunk.first.weight, model.heads[0].bias] if restricted else list(model.parameters())
    expected, values = reference.whole_gradients(model, losses_of(kinds, reference.no_cut), batch, wanted)
    model.trunk.passes = 0
    out = anybatch.backward(
        model, losses_of(kinds, anybatch.cut), batch, micro_batch_size=size, count="forward",
        inputs=wanted if restricted else None,
    )  # fmt: skip
    reference.assert_float64(reference.gradients_of(wanted), expected)
    for name, value in out.losses.items():
        reference.assert_value64(value, values[name])
    assert len(out.losses) == len(kinds)
    assert model.trunk.passes <= out.micro_batches
    if restricted:
        assert sum(p.grad is not None for p in model.parameters()) <= 2


ALL = list(KINDS[:5])


def test_the_comparison_would_see_a_loss_that_is_left_out() -> None:
    model, batch = Model(), batch_of()
    expected, _ = reference.whole_gradients(model, losses_of([*ALL], reference.no_cut), batch)
    anybatch.backward(model, losses_of(ALL[:4], anybatch.cut), batch, micro_batch_size=3, count="forward")
    with pytest.raises(AssertionError, match="is off by"):
        reference.assert_float64(reference.gradients_of(model), expected)


@pytest.mark.parametrize("size", [2, 3, None])
def test_upstream_once_a_micro_batch_and_each_head_freed_at_once(size: int | None) -> None:
    model, batch = Model(), batch_of()
    alive: list[weakref.ref[torch.Tensor]] = []
    counted: list[int] = []

    class Watched(nn.Module):
        def __init__(self, head: nn.Module) -> None:
            super().__init__()
            self.head = head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            counted.append(sum(ref() is not None for ref in alive))
            hidden = x.sigmoid()
            alive.append(weakref.ref(hidden))
            out: torch.Tensor = self.head(hidden)
            return out

    model.heads = nn.ModuleList([Watched(head) for head in model.heads])
    kinds = ["shallow", "deep", "both", "nested", "nested"]
    out = anybatch.backward(model, losses_of(kinds, anybatch.cut), batch, micro_batch_size=size)
    assert model.trunk.passes == out.micro_batches
    assert len(counted) == 5 * out.micro_batches
    assert set(counted) == {0}
    assert not any(ref() is not None for ref in alive)


@pytest.mark.parametrize("failing", range(5))
@pytest.mark.parametrize("at", [0, 1])
def test_an_exception_in_any_head_leaves_everything_as_it_was(failing: int, at: int) -> None:
    model, batch = Model(), batch_of()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain = losses_of(["shallow", "nested", "deep", "nested", "both"], anybatch.cut)
    calls = []

    def loss_fn(model: Any, batch: Batch) -> Iterator[Any]:
        calls.append(1)
        for k, item in enumerate(plain(model, batch)):
            if k == failing and len(calls) == at + 1:
                raise ZeroDivisionError
            yield item

    before = reference.everything(model)
    with pytest.raises(ZeroDivisionError):
        anybatch.backward(model, loss_fn, batch, micro_batch_size=4)
    reference.assert_unchanged(reference.everything(model), before)
    calls.extend([1, 1])
    reference.clear(model)
    expected, _ = reference.whole_gradients(model, plain_of(plain), batch)
    anybatch.backward(model, loss_fn, batch, micro_batch_size=4)  # no block was left open
    reference.assert_float64(reference.gradients_of(model), expected)


def plain_of(_: Loss) -> Loss:
    return losses_of(["shallow", "nested", "deep", "nested", "both"], reference.no_cut)


# Precision.


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_under_autocast_and_with_a_scaler(size: int | None, scaled: bool) -> None:
    """Against the plain loop in the same precision, both measured against float64."""
    torch.manual_seed(0)
    exact, batch = Model(), batch_of()
    kinds = ["shallow", "deep", "both", "nested", "nested"]
    truth, _ = reference.whole_gradients(exact, losses_of(kinds, reference.no_cut), batch)
    batch = {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}
    model = Model()
    model.load_state_dict(exact.state_dict())
    model.float()

    def plain() -> None:
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            losses = [loss for _, loss in losses_of(kinds, reference.no_cut)(model, batch)]
        torch.stack(losses).sum().backward()

    plain()
    own_error = reference.distance(reference.gradients_of(model), truth)
    reference.clear(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if scaled else None
    anybatch.backward(
        model, losses_of(kinds, anybatch.cut), batch, micro_batch_size=size, autocast=torch.bfloat16, scaler=scaler
    )
    found = reference.gradients_of(model)
    if scaler is not None:
        found = [None if g is None else g / 2.0**12 for g in found]
    error = reference.distance(found, truth)
    assert 0 < own_error < 0.02 * reference.norm(truth)
    assert error <= 2 * own_error + 2.0**-9 * reference.norm(truth)


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("overflow", [False, True])
def test_several_optimizers_and_a_scaler(size: int | None, overflow: bool) -> None:
    """A step of both optimizers, or of none."""
    torch.manual_seed(0)
    model, batch = Model().float(), batch_of()
    batch = {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}
    kinds = ["shallow", "deep", "both", "nested", "nested"]
    start = [p.detach().clone() for p in model.parameters()]
    gradient, _ = reference.whole_gradients(model, losses_of(kinds, reference.no_cut), batch)
    heads = {id(p) for p in model.heads.parameters()}
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if id(p) not in heads], lr=0.5),
        torch.optim.SGD(model.heads.parameters(), lr=0.25),
    ]
    plain = losses_of(kinds, anybatch.cut)

    def loss_fn(model: Any, batch: Batch) -> Iterator[Any]:
        for k, (name, loss) in enumerate(plain(model, batch)):
            yield name, loss * (float("inf") if overflow and k == 2 else 1.0)

    step = anybatch.TrainStep(
        model, loss_fn, optimizers, micro_batch_size=size, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)
    )
    out = step(batch)
    assert bool(out.skipped) == overflow
    rates = [0.25 if id(p) in heads else 0.5 for p in model.parameters()]
    moved: list[Any] = [now.detach() - then for now, then in zip(model.parameters(), start, strict=True)]
    expected: list[Any] = [
        None if g is None or overflow else -rate * g for rate, g in zip(rates, gradient, strict=True)
    ]
    assert reference.distance(moved, expected) <= 2.0**-18 * reference.norm(gradient)
