"""What a plan holds for: short texts that can be compared, and how large the samples of its batch are."""

import functools
import hashlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.batch.layout import PLAIN, Constant, Rows, rows_of
from anybatch.batch.trees import leaves
from anybatch.planning.devices import Target
from anybatch.planning.subjects import Subject


def fingerprint_of(subject: Subject, target: Target) -> dict[str, str]:
    """Describes in texts by name what a plan is made for: the same description, the same plan."""
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


Shape = tuple[int, ...]
_WHOLE = " as a whole"


def shapes_of(subject: Subject) -> dict[str, Shape]:
    """The shapes of the samples of a batch, and of what is not cut; empty for raw samples.

    Returns:
        The largest of each kind of leaf, dimension by dimension: of a sample behind the first dimension, of one in a
        list whole.
    """
    found: dict[str, Shape] = {}
    for node in subject.splittable.nodes():
        for place, own in shapes_in(node):
            alike = len(found.get(place, own)) == len(own)  # items of a list need not be
            name = place if alike else f"{place} with {len(own)} dimensions"
            found[name] = tuple(max(pair) for pair in zip(found.get(name, own), own, strict=True))
    return found


def shapes_in(node: Rows | Constant) -> Iterator[tuple[str, Shape]]:
    """The shapes of samples in a leaf of a batch, and of what is not cut, each with its place."""
    if not isinstance(node, Constant):
        yield from _of_rows(node.value, node.label)
        return
    for place, shape in _of_leaves(node.value, node.label):
        if shape:
            yield place + _WHOLE, shape


def outgrown(planned: dict[str, Shape], here: dict[str, Shape]) -> str:
    """Says which tensor of a batch is larger than planned for; empty if none is.

    Example:
        >>> outgrown({"batch['x']": (8, 3)}, {"batch['x']": (9, 3)})
        "batch['x'] has shape [rows, 9, 3], planned for (8, 3)"
    """
    for label, shape in here.items():
        known = planned.get(label)
        if known is None or len(known) != len(shape) or any(a > b for a, b in zip(shape, known, strict=True)):
            sizes = [*([] if label.endswith(_WHOLE) else ["rows"]), *map(str, shape)]
            return f"{label} has shape [{', '.join(sizes)}], planned for {known}"
    return ""


def _of_rows(value: Any, label: str) -> Iterator[tuple[str, Shape]]:
    if isinstance(value, PackedSequence):
        yield label, (len(value.batch_sizes), *value.data.shape[1:])
    elif isinstance(value, torch.Tensor) and value.is_nested:
        for item in value.unbind():
            yield label, tuple(item.shape)
    elif isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
        yield label, tuple(value.shape[1:])
        yield f"{label}.values()", (-(-value._nnz() // max(1, len(value))),)
    elif rows_of(value) is not None:
        yield label, tuple(value.shape[1:])
    else:
        for item in value:
            yield from _of_item(item, label)


def _of_item(item: Any, label: str) -> Iterator[tuple[str, Shape]]:
    """A sample in a list: all are in one place, whatever their number."""
    if isinstance(item, (list, tuple)) and all(isinstance(one, PLAIN) for one in item):
        yield label, (len(item),)
    elif not isinstance(item, PLAIN):
        yield from _of_leaves(item, label)


def _of_leaves(value: Any, label: str) -> Iterator[tuple[str, Shape]]:
    for place, _, leaf in leaves(value, label):
        shape = getattr(leaf.data if isinstance(leaf, PackedSequence) else leaf, "shape", None)
        if shape is not None:
            yield place, tuple(shape)
