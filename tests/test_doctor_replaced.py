"""Whatever is replaced while a doctor is attached looks and behaves as what it replaces.

What would be seen otherwise: a library that asks for a signature, a pickle that names a function, a call by keywords.
"""

import copy
import functools
import inspect
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import anybatch

_OWNERS = ("torch", "warnings", "traceback", "threading", "sys")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, functools.partial)
_PASSED_OVER = ("torch._inductor", "torch._dynamo")


def modules() -> list[Any]:
    """Those of torch that are loaded, and the standard ones that a doctor may touch."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _OWNERS and not name.startswith(_PASSED_OVER)
    ]


def attributes(owners: list[Any]) -> Iterator[tuple[Any, str, Any]]:
    """Every function that is an attribute of some modules or of a class in them."""
    seen: set[int] = set()
    for module in owners:
        for key, value in list(vars(module).items()):
            if isinstance(value, _FUNCTIONS) and not key.startswith("_anybatch_"):  # what exchanged code calls
                yield module, key, value
            if isinstance(value, type) and value.__module__.startswith("torch") and id(value) not in seen:
                seen.add(id(value))
                inside = list(vars(value).items())
                yield from ((value, inner, one) for inner, one in inside if isinstance(one, _FUNCTIONS))


def described(value: Any) -> tuple[Any, ...]:
    """What anyone may ask of a function."""
    try:
        signature: Any = inspect.signature(value)
    except (TypeError, ValueError):
        signature = None
    names = ("__name__", "__qualname__", "__module__", "__doc__")
    marks = {key for key in getattr(value, "__dict__", {}) if key != "__wrapped__"}
    return str(signature), *(getattr(value, name, None) for name in names), marks


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(torch.randn(5, 4)), torch.zeros(5, 2)).backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore")  # of names that torch calls deprecated, which are looked at too
def test_each_replaced_attribute_answers_as_the_one_before() -> None:
    train(*pair(), 1)  # loads what torch loads on first use
    here = modules()
    plain = {(id(owner), name): (owner, value, described(value)) for owner, name, value in attributes(here)}
    codes = {key: value.__code__ for key, (_, value, _) in plain.items() if isinstance(value, types.FunctionType)}
    model, optimizer = pair()
    replaced = []
    with anybatch.Doctor(model, optimizer):
        train(model, optimizer)
        for owner, name, value in attributes(here):
            assert (id(owner), name) in plain, f"{owner}.{name} is new"
            _, before, told = plain[id(owner), name]
            is_other_code = isinstance(value, types.FunctionType) and codes.get((id(owner), name)) is not value.__code__
            if (value is before and not is_other_code) or not callable(value):
                continue
            replaced.append(f"{getattr(owner, '__qualname__', owner.__name__)}.{name}")
            assert described(value) == told, replaced[-1]
            if not name.startswith("_"):
                assert pickle.loads(pickle.dumps(value)) is functools.reduce(
                    getattr, value.__qualname__.split("."), sys.modules[value.__module__]
                ), replaced[-1]
    assert len(replaced) > 60
    left = [
        f"{owner}.{name}"
        for owner, name, value in attributes(here)
        if (id(owner), name) not in plain or plain[id(owner), name][1] is not value
    ]
    assert not left


def keyword_calls() -> dict[str, Callable[[], Any]]:
    """Calls by keywords only, of everything that is replaced and documented."""
    model, optimizer = pair()
    schedule, plateau = lr_scheduler.StepLR(optimizer, 3), lr_scheduler.ReduceLROnPlateau(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    x, y = torch.randn(6, 4), torch.randint(2, (6,))
    normal = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
    q = torch.randn(1, 2, 3, 4)

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    return {
        "module.load_state_dict": lambda: model.load_state_dict(state_dict=model.state_dict()),
        "strict": lambda: model.load_state_dict(state_dict=model.state_dict(), strict=False, assign=True),
        "optimizer.load_state_dict": lambda: optimizer.load_state_dict(state_dict=optimizer.state_dict()),
        "scheduler.load_state_dict": lambda: schedule.load_state_dict(state_dict=schedule.state_dict()),
        "scaler.scale": lambda: scaler.scale(outputs=loss()).backward(),
        "scaler.unscale_": lambda: scaler.unscale_(optimizer=optimizer),
        "scaler.step": lambda: scaler.step(optimizer=optimizer),
        "scaler.update": lambda: scaler.update(new_scale=2.0),
        "scheduler.step": lambda: schedule.step(epoch=2),
        "plateau.step": lambda: plateau.step(metrics=1.0),
        "log_prob": lambda: normal.log_prob(value=torch.zeros(2)),
        "sample": lambda: normal.sample(sample_shape=torch.Size((2,))),
        "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0),
        "clip_grad_value_": lambda: nn.utils.clip_grad_value_(parameters=model.parameters(), clip_value=1.0),
        "attention": lambda: F.scaled_dot_product_attention(query=q, key=q, value=q),
        "cross_entropy": lambda: F.cross_entropy(input=model(x), target=y),
        "dropout": lambda: F.dropout(input=x, p=0.5),
        "module": lambda: model[0](input=x),  # type: ignore[index]
        "zero_grad of the class": lambda: torch.optim.Optimizer.zero_grad(self=optimizer),
        "zero_grad": lambda: optimizer.zero_grad(set_to_none=False),
        "zero_grad of the model": lambda: model.zero_grad(set_to_none=False),
        "autograd.backward": lambda: torch.autograd.backward(tensors=loss()),
        "autograd.grad": lambda: torch.autograd.grad(outputs=loss(), inputs=list(model.parameters())),
        "StepLR": lambda: lr_scheduler.StepLR(optimizer=optimizer, step_size=1),
        "SGD": lambda: torch.optim.SGD(params=model.parameters(), lr=0.1),
        "step": lambda: optimizer.step(closure=lambda: loss().item()),
    }


def outcome(name: str) -> str:
    """What a call gives: nothing, or the error that torch itself raises of it."""
    call = keyword_calls()[name]
    try:
        call()
    except (RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning", "ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize("name", sorted(keyword_calls()))
def test_calls_by_keywords_end_as_without(name: str) -> None:
    plain = outcome(name)
    with anybatch.Doctor():
        assert outcome(name) == plain


class Attends(nn.Module):
    """Keeps a function of torch, as people do who choose between kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.project = F.scaled_dot_product_attention, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.project(x)
        return self.attend(q, q, q)


class Scripts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = F.dropout(self.project(x), 0.0, self.training)
        return F.scaled_dot_product_attention(q, q, q)


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


# torch calls torch.jit deprecated, by a DeprecationWarning or a FutureWarning.
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    "change",
    [saved, copy.deepcopy, torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 3, 4), check_trace=False)],
    ids=["save", "deepcopy", "script", "trace"],
)
def test_a_model_is_saved_copied_and_compiled_as_without(change: Callable[[nn.Module], Any]) -> None:
    model: nn.Module = Scripts() if change in (torch.jit.script,) else Attends()
    x = torch.randn(2, 3, 4)
    with anybatch.Doctor(model, torch.optim.SGD(model.parameters(), 0.1)):
        changed = change(model)
        assert torch.equal(changed(x), model(x))
    assert torch.equal(changed(x), model(x))


def test_a_model_is_exported_as_without() -> None:
    model, x = Scripts().eval(), torch.randn(2, 3, 4)
    with anybatch.Doctor(model, torch.optim.SGD(model.parameters(), 0.1)):
        exported = torch.export.export(model, (x,))
    assert torch.equal(exported.module()(x), model(x))


def test_partials_of_before_and_of_meanwhile() -> None:
    model, optimizer = pair()
    clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=1.0)
    clear = functools.partial(torch.optim.Optimizer.zero_grad, set_to_none=True)
    with anybatch.Doctor(model, optimizer):
        train(model, optimizer, 1)
        clip(model.parameters())
        clear(optimizer)
        meanwhile = functools.partial(torch.optim.Optimizer.zero_grad, set_to_none=True)
        meanwhile(optimizer)
    train(model, optimizer, 1)
    meanwhile(optimizer)
    assert all(p.grad is None for p in model.parameters())


def test_accelerate_finds_the_signature_that_it_asks_for() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, optimizer = pair()
    with anybatch.Doctor():
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        optimizer.zero_grad(set_to_none=True)
        train(model, optimizer, 1)


def test_fabric_loads_and_saves(tmp_path: Any) -> None:
    fabric_module = pytest.importorskip("lightning.fabric")
    model, optimizer = pair()
    with anybatch.Doctor():
        fabric = fabric_module.Fabric(accelerator="cpu", devices=1)
        wrapped, stepping = fabric.setup(model, optimizer)
        train(wrapped, stepping, 1)
        fabric.save(tmp_path / "state.ckpt", {"model": wrapped, "optimizer": stepping})
        wrapped.load_state_dict(wrapped.state_dict())
        fabric.load(tmp_path / "state.ckpt", {"model": wrapped, "optimizer": stepping})


def test_tools_that_hook_models_see_what_they_see_without() -> None:
    """As wandb.watch hooks parameters, torchinfo hooks modules, and PEFT puts a layer around another."""

    def seen(watched: bool) -> list[Any]:
        torch.manual_seed(0)
        model, optimizer = pair()
        found: list[Any] = []
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: found.append(gradient.sum().item()))
        for module in model.modules():
            module.register_forward_hook(lambda module, args, output: found.append((type(module), output.shape)))
        model[0] = Adapted(model[0])  # type: ignore[operator, index]
        with anybatch.Doctor(model, optimizer) if watched else torch.enable_grad():
            train(model, optimizer, 3)
        return found

    assert seen(True) == seen(False)


class Adapted(nn.Module):
    """A layer around another.

    Args:
        base: the layer.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        base.register_forward_pre_hook(lambda module, args: (args[0] * 1.0,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        return y
