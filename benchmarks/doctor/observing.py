"""Runs a program in this process and notes what it did: models, weights before and after, gradients, rates, modes."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


@dataclass
class Step:
    """What an optimizer had when it stepped.

    Args:
        optimizer: which.
        lr: of its first group.
        norm: of its gradients together.
        norms: of each of its gradients.
        calls: of models with autograd since the step before.
        training: the mode of the model that ran last.
    """

    optimizer: Optimizer
    lr: float
    norm: float
    norms: list[float]
    calls: int
    training: bool


@dataclass
class Observation:
    """What a program did.

    Attributes:
        roots: models in the order of their first call.
        first: parameters and buffers as they were then, by id.
        steps: of all optimizers.
        modes: of each call of a root: whether autograd was on, and whether the model was in training mode.
        inputs: a sum of the first input of each call of a root.
        text: what was printed.
        warned: messages of warnings.
        error: the exception that ended it.
    """

    roots: list[nn.Module] = field(default_factory=list)
    first: dict[int, Tensor] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    modes: list[tuple[bool, bool]] = field(default_factory=list)
    inputs: list[float] = field(default_factory=list)
    text: str = ""
    warned: list[str] = field(default_factory=list)
    error: BaseException | None = None
    calls: int = 0

    def moved(self, tensor: Tensor) -> bool:
        """Whether a parameter or buffer has changed since its model was first called."""
        return not torch.equal(self.first[id(tensor)], tensor.detach())

    def root(self, kind: str) -> Any:
        """The first model of a class that has this name."""
        return next(root for root in self.roots if type(root).__name__ == kind)

    def numbers(self, after: str = "loss") -> list[float]:
        """All numbers that were printed behind a word."""
        return [float(n) for n in re.findall(rf"{re.escape(after)}\s+(-?(?:[\d.]+(?:e[+-]?\d+)?|nan|inf))", self.text)]

    def lines(self) -> list[list[float]]:
        """The numbers of each printed line."""
        return [
            [float(n) for n in re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?|nan", line)] for line in self.text.split("\n")
        ]


@contextlib.contextmanager
def hooks(seen: Observation) -> Iterator[None]:
    """Notes calls of models and steps of optimizers."""

    def called(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if next(module.parameters(), None) is None and not hidden(module):
            return  # a loss
        known = any(module is part for root in seen.roots for part in root.modules())
        if not known:
            inner = {id(part) for part in module.modules()}
            seen.roots[:] = [root for root in seen.roots if id(root) not in inner]
            seen.roots.append(module)
            for tensor in [*module.parameters(), *module.buffers(), *hidden(module)]:
                seen.first.setdefault(id(tensor), tensor.detach().clone())
        if any(module is root for root in seen.roots):
            seen.calls += torch.is_grad_enabled()
            seen.modes.append((torch.is_grad_enabled(), module.training))
            if inputs and isinstance(inputs[0], Tensor) and inputs[0].device.type != "meta":
                seen.inputs.append(inputs[0].detach().double().sum().item())

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms = [grad.detach().double().norm().item() for grad in grads]
        training = seen.roots[-1].training if seen.roots else True
        whole = sum(norm**2 for norm in norms) ** 0.5
        seen.steps.append(Step(optimizer, float(optimizer.param_groups[0]["lr"]), whole, norms, seen.calls, training))
        seen.calls = 0

    handles = [register_module_forward_pre_hook(called), register_optimizer_step_pre_hook(stepped)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hidden(module: nn.Module) -> list[Tensor]:
    """Parameters of modules in plain lists."""
    lists = [value for part in module.modules() for value in vars(part).values() if isinstance(value, list)]
    parts = [part for values in lists for part in values if isinstance(part, nn.Module)]
    return [tensor for part in parts for tensor in part.parameters()]


def observe(path: Path, seed: int = 0, *, fixed: bool = False) -> Observation:
    """Runs a program.

    Args:
        path: of the script.
        seed: its own.
        fixed: the repaired twin.

    Returns:
        What it did; an exception that it ends with is kept there.
    """
    seen = Observation()
    out = io.StringIO()
    argv = sys.argv
    sys.argv = [str(path), "--seed", str(seed), *(["--fixed"] if fixed else [])]
    try:
        with hooks(seen), contextlib.redirect_stdout(out), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                runpy.run_path(str(path), run_name="__main__")
            except (Exception, SystemExit) as error:  # noqa: BLE001 - how it ends is a part of what it does
                seen.error = error
            seen.warned = [str(one.message) for one in caught]
    finally:
        sys.argv = argv
    seen.text = out.getvalue()
    return seen
