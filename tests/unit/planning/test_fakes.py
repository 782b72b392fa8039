"""Fake tensors stand in for a model's own and leave no trace, whatever happens meanwhile."""

import contextlib
import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import anybatch
from anybatch.tensors.fakes import Fakes, swapped
from anybatch.tensors.modules import modules_of

Fake = torch._subclasses.FakeTensor


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed(x))
        return y


class Odd(nn.Module):
    """Everything that a module may hold beside plain parameters."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.arange(12.0)
        self.left, self.right = nn.Parameter(flat[:4].view(2, 2)), nn.Parameter(flat[4:])
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.register_parameter("none", None)
        self.register_buffer("nothing", None)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("wide", torch.ones(1).expand(5))
        self.twin = self.steps
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.number = nn.Parameter(torch.tensor(2.0))


def shared() -> nn.Module:
    block = nn.Linear(4, 4)
    return nn.Sequential(block, nn.ReLU(), block)


def parametrized() -> nn.Module:
    return nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4))


def on_meta() -> nn.Module:
    return nn.Linear(4, 4, device="meta")


def recurrent() -> nn.Module:
    return nn.LSTM(4, 4, num_layers=2)


MODELS: list[Callable[[], nn.Module]] = [Tied, Odd, shared, parametrized, on_meta, recurrent]


def homes_of(model: nn.Module) -> list[tuple[int, str, str, Any]]:
    """Every place and the very object in it, in order."""
    return [
        (id(module), kind, name, value)
        for module in modules_of(model)
        for kind, home in (("parameter", module._parameters), ("buffer", module._buffers))
        for name, value in home.items()
    ]


def is_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a[:3] == b[:3] and a[3] is b[3] for a, b in zip(one, other, strict=True))


def _spoil(model: nn.Module, error: type[BaseException]) -> None:
    assert all(type(value).__name__ != "Tensor" for *_, value in homes_of(model) if value is not None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    for module in modules_of(model):
        for name in list(module._buffers):
            module._buffers[name] = None
        module.register_buffer("new", torch.ones(1))
    raise error("bomb")


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_everything_is_back_by_identity_and_value(make: Callable[[], nn.Module], error: Any) -> None:
    model = make()
    before, values = homes_of(model), copy.deepcopy(model.state_dict())
    attributes = {id(module): dict(module.__dict__) for module in modules_of(model)}
    with pytest.raises(error or RuntimeError), swapped(Fakes(), [model]):
        _spoil(model, error or RuntimeError)
    assert is_same(homes_of(model), before)
    for name, value in model.state_dict().items():
        assert value.is_meta or torch.equal(value, values[name]), name
    for module in modules_of(model):
        assert all(module.__dict__[name] is value for name, value in attributes[id(module)].items())
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("make", MODELS)
def test_fakes_have_the_shape_the_strides_and_the_kind_of_the_real_ones(make: Callable[[], nn.Module]) -> None:
    model = make()
    real = homes_of(model)
    fakes = Fakes()
    with swapped(fakes, [model]) as parameters:
        for (*_, own), (*_, fake) in zip(real, homes_of(model), strict=True):
            if own is None:
                assert fake is None
                continue
            assert isinstance(fake, Fake)
            assert isinstance(fake, nn.Parameter) == isinstance(own, nn.Parameter)
            assert (fake.shape, fake.stride(), fake.dtype, fake.requires_grad) == (
                own.shape, own.stride(), own.dtype, own.requires_grad,
            )  # fmt: skip
            assert fakes.like(own) is fake
        assert set(parameters) == {id(value) for _, kind, _, value in real if kind == "parameter" and value is not None}


def test_tied_weights_are_one_fake_and_views_of_a_storage_share_one() -> None:
    model, fakes = Tied(), Fakes()
    with swapped(fakes, [model]):
        assert model.head.weight is model.embed.weight
    whole = torch.zeros(12)
    assert fakes.like(whole).untyped_storage()._cdata == fakes.like(whole.view(3, 4)).untyped_storage()._cdata
    assert fakes.like(whole).untyped_storage()._cdata != fakes.like(torch.zeros(12)).untyped_storage()._cdata


def test_a_loss_that_is_a_module_is_swapped_too() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(2.0))

    model, loss = nn.Linear(2, 2), Loss()
    own = loss.temperature
    with swapped(Fakes(), [model, loss, model]) as parameters:
        assert isinstance(loss.temperature, Fake)
        assert len(parameters) == 3
    assert loss.temperature is own


def test_what_has_no_fake_is_refused_and_everything_is_back() -> None:
    class Own(Tensor):
        pass

    for odd in (torch.eye(3).to_sparse(), torch.ones(3).as_subclass(Own)):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].register_buffer("odd", odd)
        before = homes_of(model)
        with pytest.raises(TypeError, match="no fake"), swapped(Fakes(), [model]):
            raise AssertionError("not reached")
        assert is_same(homes_of(model), before)


def test_work_on_fakes_makes_fakes_and_leaves_the_mode_off() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = homes_of(model)
    fakes = Fakes()
    with swapped(fakes, [model]):
        x = fakes.like(torch.ones(3, 4))
        with fakes.mode:
            model(x).sum().backward()
        assert all(isinstance(parameter.grad, Fake) for parameter in model.parameters())
    assert is_same(homes_of(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert type(model(torch.ones(3, 4))) is Tensor
    assert torch._C._len_torch_dispatch_stack() == 0


def test_fakes_take_no_memory_and_copy_no_numbers() -> None:
    fakes = Fakes()
    huge = fakes.like(torch.empty(1, device="meta").expand(2**20).as_strided((2**20, 2**20), (1, 0)))
    assert huge.shape == (2**20, 2**20)
    assert huge.untyped_storage().device.type == "meta"


@given(st.lists(st.integers(0, 5), max_size=3), st.permutations(range(3)), st.booleans(), st.booleans())
def test_any_strided_tensor_has_a_fake_alike(shape: list[int], order: list[int], trained: bool, is_view: bool) -> None:
    tensor = torch.zeros(shape).permute([axis for axis in order if axis < len(shape)])
    if is_view and tensor.dim() and tensor.shape[0] > 1:
        tensor = tensor[1:]
    tensor.requires_grad_(trained)
    fakes = Fakes()
    fake = fakes.like(tensor)
    assert (fake.shape, fake.stride(), fake.requires_grad) == (tensor.shape, tensor.stride(), trained)
    assert fakes.like(tensor) is fake
    assert fake.is_leaf


def test_planning_logs_nothing_of_what_fails_on_fake_tensors_and_what_the_loss_logs_is_heard() -> None:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    own, torchs = logging.getLogger("own"), logging.getLogger("torch._subclasses.fake_tensor")

    def failing() -> None:
        with contextlib.suppress(RuntimeError):
            _ = torch.zeros(2, 3) + torch.zeros(2, 4)

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        failing()
        own.warning("a loss")
        found: torch.Tensor = model(batch).square().mean()
        return found

    for logger in (own, torchs):
        logger.addHandler(handler)
    try:
        assert anybatch.plan(nn.Linear(4, 4), loss_fn, torch.ones(6, 4), memory="1GiB").confidence == "predicted"
        assert {*heard} == {"a loss"}
        with torch._subclasses.FakeTensorMode():
            failing()
        assert "failed while attempting to run meta for aten.add.Tensor" in heard[-1]
    finally:
        for logger in (own, torchs):
            logger.removeHandler(handler)
    assert not torchs.filters
