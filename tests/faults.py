"""Faults on purpose: memory that runs out, bombs in user code, and everything that a step could leave changed."""

import gc
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reference import torch_random


class OutOfMemoryAt(TorchDispatchMode):
    """Raises ``torch.OutOfMemoryError`` in place of one operation, counted from 1, and lets all others through.

    Args:
        number: which one; 0 for none.
        touched: asked after every operation until it is true; ``first_touch`` is the operation that made it so.
    """

    def __init__(self, number: int = 0, touched: Callable[[], bool] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = number
        self.operations: list[str] = []
        self.first_touch = 0
        self._touched = touched

    @property
    def has_raised(self) -> bool:
        return 0 < self.number <= len(self.operations)

    def fail(self, operation: str) -> None:
        """What happens at the operation."""
        raise torch.OutOfMemoryError(f"CUDA out of memory in {operation}, operation {self.number}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        if len(self.operations) == self.number:
            self.fail(str(func))
        result = func(*args, **(kwargs or {}))
        if self._touched is not None and not self.first_touch and self._touched():
            self.first_touch = len(self.operations)
        return result


class CtrlCAt(OutOfMemoryAt):
    """Presses Ctrl-C at one operation instead."""

    def fail(self, operation: str) -> None:
        press_ctrl_c()


def press_ctrl_c(*_: Any) -> None:
    """Sends this process the signal that Ctrl-C sends."""
    os.kill(os.getpid(), signal.SIGINT)


class SmallMemory(TorchDispatchMode):
    """An allocator that has no room for any result above some bytes.

    Args:
        limit: bytes of the largest result that it has room for.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = limit
        self.refusals = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for made in tree_leaves(result):
            is_new = isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given
            if is_new and made.numel() * made.element_size() > self.limit:
                self.refusals += 1
                raise torch.OutOfMemoryError(f"CUDA out of memory: {func} wants {tuple(made.shape)}")
        return result


class Bomb:
    """Raises an exception the given time a place in user code is passed, once.

    Args:
        place: where.
        error: what is raised.
        passes: how often the place is passed before it is.
    """

    def __init__(self, place: str = "", error: type[BaseException] = ValueError, passes: int = 0) -> None:
        self.arm(place, error, passes)

    def arm(self, place: str, error: type[BaseException], passes: int) -> None:
        """Sets it to go off, also once more; for the arguments see the class."""
        self.place = place
        self.error = error
        self.passes = passes
        self._seen, self._exploded = itertools.count(), threading.Event()  # which nobody puts back

    @property
    def has_exploded(self) -> bool:
        return self._exploded.is_set()

    def __call__(self, place: str) -> None:
        if place == self.place and not self.has_exploded and next(self._seen) >= self.passes:
            self._exploded.set()
            raise self.error(f"bomb in {place}")


class Straight(torch.nn.Module):
    """Without BatchNorm, so that one row can be a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 64), torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.nn.functional.dropout(self.first(x).relu(), 0.5, self.training))
        return y


ROW = 64 * 4  # bytes of a row of Straight's largest activation


def mean_square(model: Any, batch: torch.Tensor) -> Any:
    return model(batch).pow(2).mean()


class Line(torch.nn.Module):
    """One weight w; the loss w * w / 2 has the gradient w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * self.w / 2 + 0 * x


def half_square(model: Any, batch: torch.Tensor) -> Any:
    return model(batch).mean()


def random_facts() -> dict[str, Any]:
    """The state of every generator."""
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return {
        "random torch": torch.cat(torch_random()),
        "random python": random.getstate(),
        "random numpy": (name, keys.tobytes(), *rest),
    }


def facts(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    *,
    step: Any = None,
    scaler: Any = None,
    scheduler: Any = None,
) -> dict[str, Any]:
    """Everything that a step may change or must not change, copied, by a name that says what it is."""
    found = random_facts()
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = parameter.detach().clone()
        found[f"gradient {name}"] = None if parameter.grad is None else parameter.grad.clone()
        found[f"requires_grad {name}"] = parameter.requires_grad
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        found[f"module {name}"] = (module.training, getattr(module, "momentum", None), [len(h) for h in hooks])
    for which, optimizer in enumerate(optimizers):
        found.update(_optimizer_facts(which, optimizer))
    if step is not None:
        found["counters"] = (step.updates, step.skipped, step.samples)
    for what, thing in (("scaler", scaler), ("scheduler", scheduler)):
        if thing is not None:
            found[what] = {key: value for key, value in thing.state_dict().items() if not key.startswith("_get_lr")}
    return found


def _optimizer_facts(which: int, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    yield f"optimizer {which} has state", [p in optimizer.state for p in parameters]
    for index, parameter in enumerate(parameters):
        if parameter in optimizer.state:
            for key, value in optimizer.state[parameter].items():
                yield f"optimizer {which} state {index} {key}", _copied(value)
    for index, group in enumerate(optimizer.param_groups):
        yield f"optimizer {which} group {index}", {key: value for key, value in group.items() if key != "params"}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_copied(item) for item in value] if isinstance(value, list) else value


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are bitwise equal, NaN included."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        flat = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
        return torch.equal(*flat)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(is_same(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)


def different(one: dict[str, Any], other: dict[str, Any], *, but: tuple[str, ...] = ()) -> list[str]:
    """The names of facts that are not bitwise the same.

    Args:
        one: facts.
        other: facts.
        but: beginnings of names that are not compared.
    """
    names = dict.fromkeys([*one, *other])
    return [
        name
        for name in names
        if not name.startswith(but or ("\0",))
        and not (name in one and name in other and is_same(one[name], other[name]))
    ]


@contextmanager
def quick_collections() -> Iterator[None]:
    """Keeps everything that exists now out of garbage collections, of which every retry makes one."""
    weight = torch.nn.Parameter(torch.ones(()))
    weight.sum().backward()
    torch.optim.AdamW([weight], foreach=True).step()  # loads what torch loads on first use
    gc.collect()
    gc.freeze()  # as conftest.py does; what a user froze stays frozen
    yield
