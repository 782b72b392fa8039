"""What a plan holds for, in a few short texts that can be compared."""

import functools
import hashlib
import types
from collections.abc import Iterator
from typing import Any

import torch

from anybatch.planning.devices import Target
from anybatch.planning.subjects import Subject


def fingerprint_of(subject: Subject, target: Target) -> dict[str, str]:
    """Describes what a plan is made for: the same description, the same plan.

    Args:
        subject: what is planned.
        target: the device.

    Returns:
        Texts by name.
    """
    model = subject.model
    parts = [f"{name}:{type(module).__qualname__}:{module.training}" for name, module in model.named_modules()]
    parts += [
        f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:{tensor.requires_grad}"
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    optimizers = ", ".join(_optimizer_in_words(one) for one in subject.optimizers)
    if subject.optimizers:
        optimizers += f", clip_norm={'given' if subject.clip_norm is not None else None}"
    settings = subject.settings
    several = {} if subject.devices is None else {"devices": subject.devices.in_words}
    return {
        "model": f"{type(model).__name__} {_digest(parts)}",
        "loss": f"{_name_of(subject.loss_fn)} {_digest(list(_code_of(subject.loss_fn)))}",
        "optimizer": optimizers or "none",
        "precision": f"autocast={settings.autocast}, accumulate={settings.policy}",
        "BatchNorm": subject.batch_norm,
        "device": target.device_type,
        "torch": torch.__version__.partition("+")[0],
        **several,
    }


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _optimizer_in_words(optimizer: torch.optim.Optimizer) -> str:
    """What decides about the bytes of its state: its kind, its switches, and how much it steps."""
    groups = optimizer.param_groups
    items = sum(p.numel() for group in groups for p in group["params"])
    switches = sorted(
        f"{name}={_switch(value)}"
        for name, value in {
            (name, value if isinstance(value, (bool, str, int, float, type(None))) else "?")
            for group in groups
            for name, value in group.items()
            if name in optimizer.defaults and name != "lr"
        }
    )
    switches = [text for text in dict.fromkeys(switches) if not text.endswith("'?'")]
    return f"{type(optimizer).__name__}({items} weights, {', '.join(switches)})"


def _switch(value: Any) -> str:
    """A value as far as it changes what is held: numbers are there or 0, whatever else they are."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "0" if value == 0 else "set"
    return repr(value)


def _name_of(function: Any) -> str:
    function = function.func if isinstance(function, functools.partial) else function
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _code_of(function: Any) -> Iterator[str]:
    """What a function names, without its place in a file: a moved or commented loss is the same, on any Python."""
    if isinstance(function, functools.partial):
        yield from (repr(value) for value in function.args if isinstance(value, (int, float, str, bool)))
        yield from (f"{k}={v!r}" for k, v in function.keywords.items() if isinstance(v, (int, float, str, bool)))
        function = function.func
    for part in getattr(function, "user_functions", ()):  # of Coupled and OverTime, whose own code is always the same
        yield _name_of(part)
        yield from _code_of(part)
    if hasattr(function, "user_functions"):
        yield from (f"{k}={v!r}" for k, v in vars(function).items() if isinstance(v, (int, float, str, bool)))
    function = getattr(function, "__func__", function)
    if isinstance(function, torch.nn.Module):
        function = type(function).forward
    elif not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None)
    waiting = [code] if isinstance(code, types.CodeType) else []
    while waiting:
        found = waiting.pop()
        for constant in found.co_consts:
            if isinstance(constant, types.CodeType):
                waiting.append(constant)
            elif isinstance(constant, frozenset):  # whose order changes from process to process
                yield repr(sorted(map(repr, constant)))
            else:
                yield repr(constant)
        yield " ".join(found.co_names)
