"""Whatever else is done with the logits of a loss in chunks is done with the ordinary logits."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import anybatch
from anybatch.errors import AnyBatchError
from anybatch.memory.losschunks import LazyLogits, chunk_loss
from optimizations_classifier import Doubled, Model, Use, V, sample
from optimizations_models import assert_near, assert_same, outcome


def _written(z: Tensor, y: Tensor) -> Tensor:
    z[..., 0] = 0.0
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


def _written_through_a_view(z: Tensor, y: Tensor) -> Tensor:
    copied = z[:, 1:].contiguous()  # made before, stays as it was
    flat = z.view(-1, V)
    flat.mul_(3.0)
    return F.cross_entropy(z.transpose(1, 2), y) + F.cross_entropy(copied.flatten(0, 1), y[:, 1:].flatten())


def _masked(z: Tensor, y: Tensor) -> Tensor:
    mask = y != 3
    chosen = z[mask]
    mask.fill_(True)
    return z.sum() + chosen.detach().sin().mean()


def _without_gradient(z: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        wide = z.double()
        chosen = z[y != 3]
    assert not wide.requires_grad
    assert not chosen.requires_grad
    cut_off = F.cross_entropy(wide.flatten(0, 1), y.flatten()) + F.cross_entropy(chosen, y[y != 3])
    return cut_off + z.sum()


def _hooked(z: Tensor, y: Tensor) -> Tensor:
    z.register_hook(lambda gradient: gradient * 3)
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


OTHERS: dict[str, Use] = {
    "softmax": lambda z, y: z.softmax(-1).square().mean(),
    "scaled": lambda z, y: F.cross_entropy(z.flatten(0, 1) / 3, y.flatten()),
    "sum": lambda z, y: z.sum() + torch.sum(z[0]),
    "in place": lambda z, y: F.cross_entropy(z.mul_(2.0).flatten(0, 1), y.flatten()),
    "written": _written,
    "written through a view": _written_through_a_view,
    "probabilities": lambda z, y: F.cross_entropy(z.flatten(0, 1), F.one_hot(y.flatten(), V).to(z.dtype)),
    "log_softmax": lambda z, y: F.nll_loss(F.log_softmax(z.flatten(0, 1), -1), y.flatten()),
    "another dimension": lambda z, y: z.transpose(1, 2).reshape(-1, 3).square().mean(),
    "classes selected": lambda z, y: F.cross_entropy(z[..., :9].flatten(0, 1), y.flatten() % 9),
    "joined": lambda z, y: F.cross_entropy(torch.cat([z, z], 1).flatten(0, 1), torch.cat([y, y], 1).flatten()),
    "two": lambda z, y: (z * z.detach()).mean(),
    "old arguments": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="mean") + z.mean(),
    "learned weights": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), weight=z.new_ones(V)),
    "operator": lambda z, y: (2 - z @ z.mT).mean() + (z > 0).sum(),
    "unpacked": lambda z, y: sum((row.sin().mean() for row in z), torch.zeros(())),
    "an autograd function": lambda z, y: Doubled.apply(z).square().mean(),  # type: ignore[no-untyped-call]
    "a clone": lambda z, y: F.cross_entropy(z.clone().flatten(0, 1), y.flatten()),
    "a hook": _hooked,
    "a mask that changes": _masked,
    "without gradient": _without_gradient,
    "outside of autocast": lambda z, y: z.square().mean(),
}


@pytest.mark.parametrize("other", OTHERS)
def test_every_other_use_computes_the_logits_and_is_bitwise_the_same(other: str) -> None:
    model, batch = Model(), sample()
    handles = []

    def loss_fn(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=other == "outside of autocast"):
            z = model(batch["x"])
        loss = OTHERS[other](z, batch["y"])
        assert type(loss) is Tensor
        return loss

    def put(model: nn.Module) -> Any:
        handles.append(chunk_loss(model, "head", 3))
        return handles[-1]

    found, plain = outcome(model, loss_fn, batch, put), outcome(model, loss_fn, batch)
    if other == "old arguments":
        assert_near(found, plain, 1e-6)
        assert (handles[0].taken, handles[0].computed) == (1, 1)
        return
    assert_same(found, plain)
    assert handles[0].taken == 0
    assert handles[0].computed >= (other != "an autograd function")


def test_looking_at_shape_and_precision_computes_nothing() -> None:
    model, batch = Model(), sample()
    with chunk_loss(model, "head", 3) as handle:
        z = model(batch["x"])
        assert (z.shape, z.size(-1), z.dim(), z.ndim, len(z), z.numel()) == ((4, 3, V), V, 3, 3, 4, 4 * 3 * V)
        assert (z.dtype, z.device.type, z.requires_grad, z.is_cuda) == (torch.float32, "cpu", True, False)
        assert isinstance(z, Tensor)
        assert torch.is_tensor(z)
        assert torch.is_floating_point(z)
        assert z.grad_fn is not None
        assert hash(z) == id(z)
        assert z.transpose(1, 2).shape == (4, V, 3)
        assert z.double().dtype == torch.float64
        assert z.float() is z
        assert handle.computed == 0
        assert "tensor(" in repr(z)
        assert handle.computed == 1
        again = pickle.loads(pickle.dumps(z.detach()))
        assert type(again) is Tensor
        assert torch.equal(copy.copy(z).detach(), again)


Step = tuple[str, tuple[Any, ...]]


STEPS: list[Step] = [
    ("flatten", (0, 1)),
    ("flatten", (1,)),
    ("transpose", (1, 2)),
    ("transpose", (0, -1)),
    ("permute", (2, 0, 1)),
    ("movedim", (0, 1)),
    ("reshape", (-1, V)),
    ("reshape", (2, -1, V)),
    ("view", (-1, V)),
    ("view", (V, -1)),
    ("contiguous", ()),
    ("double", ()),
    ("to", (torch.bfloat16,)),
    ("__getitem__", (slice(1, None),)),
    ("__getitem__", (0,)),
    ("__getitem__", ((Ellipsis, slice(None, -1), slice(None)),)),
    ("__getitem__", ((Ellipsis, None, slice(None)),)),
    ("__getitem__", ((slice(None), -1),)),
    ("__getitem__", ((Ellipsis, 0),)),
    ("__getitem__", ((slice(None), slice(None), slice(2, 5)),)),
    ("__getitem__", ((None, 0),)),
    ("__getitem__", ((slice(None), torch.tensor([0, 0, 1])),)),
    ("__getitem__", (torch.tensor([True, False, True, True]),)),
    ("__getitem__", ([0, 1],)),
    ("__getitem__", ((0, Ellipsis),)),
]


@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=5))
@example([STEPS[15], STEPS[8]])  # a view of what is not contiguous
@example([STEPS[2], STEPS[10], STEPS[9]])
def test_any_sequence_of_moves_gives_the_same_tensor(steps: list[Step]) -> None:
    torch.manual_seed(0)
    head = nn.Linear(6, V)
    hidden = torch.randn(4, 3, 6, requires_grad=True)

    def through(z: Any) -> Any:
        for name, arguments in steps:
            try:
                z = getattr(z, name)(*arguments)
            except (RuntimeError, IndexError) as error:
                return type(error)
        return z

    expected = through(head(hidden))
    with chunk_loss(nn.ModuleList([head]), "0", 3):
        found = through(head(hidden))
    if isinstance(expected, type):
        assert found is expected
        return
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.requires_grad == expected.requires_grad
    if isinstance(found, LazyLogits):
        rows = F.linear(found.rows, head.weight, head.bias).movedim(-1, found.class_dim)
        for dtype in found.casts:
            rows = rows.to(dtype)
        torch.testing.assert_close(rows, expected)
    assert torch.equal(found + 0, expected + 0)
    gradients = [
        torch.autograd.grad(t.float().sin().sum(), [hidden, head.weight, head.bias]) for t in (found, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_the_gradient_of_the_logits_themselves_is_not_lost_in_silence() -> None:
    model, batch = Model(), sample()
    with chunk_loss(model, "head", 3):
        z = model(batch["x"])
        loss = F.cross_entropy(z.flatten(0, 1), batch["y"].flatten())
        with pytest.raises(AnyBatchError, match="gradient of logits"):
            torch.autograd.grad(loss, z, allow_unused=True)


def test_logits_that_are_looked_at_after_the_update_are_refused() -> None:
    model, batch = Model(), sample()
    with chunk_loss(model, "head", 3):
        z = model(batch["x"])
        F.cross_entropy(z.flatten(0, 1), batch["y"].flatten()).backward()
    with torch.no_grad():
        model.head.weight.add_(1)
    with pytest.raises(AnyBatchError, match="used for the first time after"):
        z.argmax(-1)


def test_logits_may_be_used_after_the_optimization_is_off() -> None:
    model, batch = Model(), sample()
    with chunk_loss(model, "head", 3) as handle:
        z = model(batch["x"])
    assert torch.equal(z.argmax(-1), model(batch["x"]).argmax(-1))
    F.cross_entropy(z.flatten(0, 1), batch["y"].flatten()).backward()
    assert handle.taken == 0


def test_accuracy_beside_the_loss() -> None:
    model, batch = Model().double(), sample()

    def loss_fn(model: Any, batch: Any) -> Any:
        z = model(batch["x"])
        loss = F.cross_entropy(z.transpose(1, 2), batch["y"])
        return loss, {"right": (z.argmax(-1) == batch["y"]).float().mean(1)}

    found = []
    for chunks in (0, 3):
        ours = copy.deepcopy(model)
        if chunks:
            chunk_loss(ours, "head", chunks)
        out = anybatch.backward(ours, loss_fn, batch, micro_batch_size=2)
        grads = {f"gradient {n}": p.grad for n, p in ours.named_parameters()}
        found.append({"loss": torch.tensor(out.loss), "right": out.metrics["right"], **grads})
    assert_near(found[1], found[0])
