"""What a plan holds for, in a few short texts that can be compared."""

import functools
import hashlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.planning.devices import Target
from anybatch.planning.subjects import Subject
from anybatch.tensors.trees import leaves


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


def shapes_of(subject: Subject) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a batch behind their first dimension; empty for raw samples.

    Args:
        subject: has the batch.
    """
    if subject.splittable.is_collated:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for batch in subject.splittable.batches:
        for label, _, leaf in leaves(batch, "batch"):
            if isinstance(leaf, PackedSequence):
                found[label] = (len(leaf.batch_sizes), *leaf.data.shape[1:])
            elif isinstance(leaf, torch.Tensor) and leaf.is_nested:
                longest = max(tuple(item.shape) for item in leaf.unbind())
                found[label] = tuple(longest)
            elif isinstance(leaf, torch.Tensor):
                place, own = _place_of(label, leaf, has_lists=subject.splittable.has_lists)
                known = found.get(place, own)
                same = len(known) == len(own)
                found[place] = tuple(max(pair) for pair in zip(known, own, strict=True)) if same else own
    return found


def _place_of(label: str, leaf: torch.Tensor, *, has_lists: bool) -> tuple[str, tuple[int, ...]]:
    """Where a tensor lies and how large its samples are; items of a list of samples lie in one place."""
    home, _, item = label.removesuffix("]").rpartition("[")
    if has_lists and item.isdigit():
        return home, tuple(leaf.shape)
    return label, tuple(leaf.shape[1:])


def outgrown(planned: dict[str, tuple[int, ...]], here: dict[str, tuple[int, ...]]) -> str:
    """Says which tensor of a batch is larger than planned for; empty if none is.

    Args:
        planned: what ``shapes_of`` gave for the batch that was planned for.
        here: what it gives for this one.
    """
    for label, shape in here.items():
        known = planned.get(label)
        if known is None or len(known) != len(shape) or any(a > b for a, b in zip(shape, known, strict=True)):
            return f"{label} has shape [rows, {', '.join(map(str, shape))}], planned for {known}"
    return ""


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
