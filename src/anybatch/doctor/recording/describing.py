"""Plain facts about modules and what they hold, optimizers, schedulers and the arguments of calls."""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from anybatch.doctor.values import entries_of
from anybatch.records.runs import grouped
from anybatch.records.tables import GroupFacts, ModuleFacts
from anybatch.tensors.dispatch import item_of, unseen
from anybatch.torch_private import stands_in

_MOST_ENTRIES = 1000  # of a plain list or dictionary that are looked at
_MOST_NESTED = 3  # containers within containers


class Held(NamedTuple):
    """A module inside of a root."""

    name: str  # qualified, as ``layers[0]`` for what lies in a plain list
    module: torch.nn.Module
    registered: bool  # whether ``named_modules()`` has it


def held_by(root: torch.nn.Module) -> Iterator[Held]:
    """All modules of a root, the root first, each once."""
    waiting = [Held("", root, True)]
    seen = {id(module) for module in root.modules()}
    given: set[int] = set()
    while waiting:
        held = waiting.pop()
        if id(held.module) in given:
            continue
        given.add(id(held.module))
        yield held
        front = f"{held.name}." if held.name else ""
        inside = [
            Held(front + name, child, held.registered)
            for name, child in held.module._modules.items()
            if child is not None
        ]
        for name, child in _plainly_held(held.module, torch.nn.Module):
            if id(child) not in seen:
                seen.add(id(child))
                inside.append(Held(front + name, child, False))
        waiting.extend(reversed(inside))


def parameters_in(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The parameters of a module itself: names, tensors, and whether they are registered.

    What ``functional_call`` has put in their place within ``vmap`` or ``grad`` is none of the module's own.
    """
    own = set()
    for name, parameter in module._parameters.items():
        if parameter is not None and not stands_in(parameter):
            own.add(id(parameter))
            yield name, parameter, True
    for place, tensor in _plainly_held(module, torch.Tensor):
        if id(tensor) not in own and tensor.is_leaf and tensor.requires_grad and not stands_in(tensor):
            own.add(id(tensor))
            yield place, tensor, False


_HOLDS_NOTHING = (int, float, bool, str, type(None), bytes, complex)
_TORCHS_OWN = frozenset(vars(torch.nn.Module())) - {"training"}


def _plainly_held(module: torch.nn.Module, cls: type) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(module).items()):
        if name not in _TORCHS_OWN and type(value) not in _HOLDS_NOTHING:
            yield from _inside(name, value, cls, 0)


def _inside(name: str, value: Any, cls: type, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, cls):
        yield name, value
    elif depth < _MOST_NESTED:
        entries = list(enumerate(set.__iter__(value))) if isinstance(value, set) else entries_of(value)
        for key, entry in entries if len(entries) <= _MOST_ENTRIES else ():
            if type(entry) not in _HOLDS_NOTHING:
                yield from _inside(f"{name}[{key!r}]", entry, cls, depth + 1)


_KINDS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("dropout", (nn.modules.dropout._DropoutNd,)),
    ("batch_norm", (nn.modules.batchnorm._BatchNorm,)),
    ("norm", (nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)),
    ("attention", (nn.MultiheadAttention,)),
    ("embedding", (nn.Embedding, nn.EmbeddingBag)),
    ("recurrent", (nn.RNNBase, nn.RNNCellBase)),
    ("linear", (nn.Linear, nn.Bilinear)),
    ("conv", (nn.modules.conv._ConvNd,)),
    ("container", (nn.Sequential, nn.ModuleList, nn.ModuleDict)),
)
_MOST_OPTIONS = 24
_CONFIG = (
    *("tie_word_embeddings", "is_encoder_decoder", "is_decoder", "model_type", "vocab_size", "num_labels"),
    *("problem_type", "pad_token_id", "use_cache", "hidden_dropout_prob", "attention_dropout"),
)
_PLAIN = (bool, int, float, str)


def kind_of(module: nn.Module) -> str:
    """What kind of module it is, as ``ModuleFacts`` names them."""
    for kind, classes in _KINDS:
        if isinstance(module, classes):
            return kind
    if type(module).__module__ == "torch.nn.modules.activation":
        return "activation"
    return "norm" if type(module).__name__.endswith("Norm") and not module._modules else ""


def role_of(tensor: torch.Tensor, kind: str, name: str) -> str:
    """What a parameter does in its module, as ``ParameterFacts`` names it."""
    if kind in ("norm", "batch_norm"):
        return "norm"
    last = name.rpartition(".")[2]
    if kind == "embedding" and last == "weight":
        return "embedding"
    if "bias" in last:
        return "bias"
    return "weight" if tensor.dim() >= 2 else "other"


def module_facts(name: str, module: nn.Module, registered: bool, parameters: tuple[int, ...]) -> ModuleFacts:
    """The row of a module in the table of its root."""
    own = vars(module).get("requires_grad")
    file, line = _source(type(module))
    return ModuleFacts(
        name=name, cls=type(module).__name__, kind=kind_of(module), registered=registered,
        training=bool(module.training), requires_grad=own if isinstance(own, bool) else None,
        options=_options(module), parameters=parameters, repeated=_repeated(module), file=file, line=line,
    )  # fmt: skip


def _repeated(module: nn.Module) -> int:
    """How many entries a list has all of which are the same module with parameters; 0 for other modules."""
    children = list(module._modules.values())
    if len(children) < 2 or children[0] is None or any(one is not children[0] for one in children):
        return 0
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    return len(children) if is_list and any(True for _ in children[0].parameters()) else 0


def _options(module: nn.Module) -> dict[str, Any]:
    named = [entry for entry in vars(module).items() if entry[0] not in ("training", "requires_grad")]
    plain = [(name, value) for name, value in named if not name.startswith("_") and _is_plain(value)]
    found = {name: list(value) if isinstance(value, tuple) else value for name, value in plain[:_MOST_OPTIONS]}
    return found | {"hooked": True} if module._forward_hooks else found


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) <= 8 and all(type(entry) in _PLAIN for entry in value)
    return type(value) in _PLAIN and not (isinstance(value, str) and len(value) > 100)


def _source(cls: type) -> tuple[str, int]:
    """File and first line of the class of a user's module; read off its code, since source files may be gone."""
    if cls.__module__.split(".")[0] in ("torch", "anybatch"):
        return "", 0
    for function in (vars(cls).get("forward"), vars(cls).get("__init__")):
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        if code is not None:
            return code.co_filename, code.co_firstlineno
    return "", 0


def wrapper_of(module: nn.Module | None) -> str:
    """What wraps the user's module, as ``Root.wrapper`` names it; empty for none."""
    name = type(module).__name__
    if name in ("DistributedDataParallel", "DataParallel") and isinstance(getattr(module, "module", None), nn.Module):
        return name
    return "compiled" if name == "OptimizedModule" else ""


WRAPPED = {"DistributedDataParallel": "module", "DataParallel": "module", "compiled": "_orig_mod"}
"""The attribute in which a wrapper has what it wraps."""


def config_of(module: nn.Module) -> dict[str, Any]:
    """Plain entries of ``module.config`` that say what is meant."""
    config = getattr(module, "config", None)
    if config is None:
        return {}
    read = config.get if isinstance(config, Mapping) else lambda name: vars(config).get(name, None)
    try:
        found = {name: read(name) for name in _CONFIG}
        if not isinstance(config, Mapping) and found["tie_word_embeddings"] is None:
            found["tie_word_embeddings"] = getattr(config, "tie_word_embeddings", None)
    except TypeError:  # it has no __dict__
        return {}
    return {name: value for name, value in found.items() if type(value) in _PLAIN}


@unseen
def constants(tensors: Sequence[torch.Tensor]) -> list[tuple[float | None, bool]]:
    """For each tensor the value that all entries have, or ``None``; and whether a matrix has all rows equal."""
    with torch.no_grad():
        flags = [_flags(tensor) for tensor in tensors]
        by_device = grouped((found.device, position) for position, found in enumerate(flags) if found is not None)
        read: dict[int, list[float]] = {}
        for positions in by_device.values():  # one wait for each device
            rows = torch.stack([flag for i in positions if (flag := flags[i]) is not None]).tolist()
            read.update(zip(positions, rows, strict=True))
    answers: list[tuple[float | None, bool]] = []
    for position in range(len(tensors)):
        low, high, equal = read.get(position, (0.0, 1.0, 0.0))
        answers.append((low if low == high else None, bool(equal)))
    return answers


def _flags(tensor: torch.Tensor) -> torch.Tensor | None:
    """The least and greatest entry and whether all rows are equal, on the device; ``None`` if that can't be said."""
    if is_lazy(tensor):
        return None
    tensor = tensor.detach()
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        is_short = tensor.dim() == 0 or len(tensor) == 1
        if tensor.device.type == "cpu" and not is_short and not torch.equal(tensor[0], tensor[-1]):
            return None  # without two equal rows nothing is constant
        low, high = torch.aminmax(tensor)
        is_matrix = tensor.dim() >= 2 and tensor.shape[0] > 1
        equal = (tensor == tensor[:1]).all() if is_matrix else torch.zeros((), device=tensor.device)
        return torch.stack([low.float(), high.float(), equal.float()])
    except (RuntimeError, NotImplementedError, TypeError):  # fakes, wrappers, layouts without comparison
        return None


def plain_rate(value: Any) -> float:
    """A learning rate as a number; one that lies on a GPU is not waited for."""
    if isinstance(value, torch.Tensor):
        return float(item_of(value)) if value.device.type == "cpu" and value.numel() == 1 else float("nan")
    return float(value) if isinstance(value, (int, float)) else float("nan")


def group_facts(group: Mapping[str, Any], parameters: tuple[int, ...]) -> GroupFacts:
    """A group of an optimizer."""
    betas = group.get("betas")
    betas = betas if isinstance(betas, (tuple, list)) else ()
    return GroupFacts(
        parameters=parameters,
        lr=plain_rate(group.get("lr", 0.0)),
        weight_decay=plain_rate(group.get("weight_decay", 0.0)),
        momentum=plain_rate(betas[0] if betas else group.get("momentum", 0.0)),
        second=plain_rate(betas[1]) if len(betas) == 2 else 0.0,
        name=str(group.get("name", "")),
        maximize=bool(group.get("maximize", False)),
    )


def optimizer_facts(optimizer: Any) -> dict[str, Any]:
    """The entries of the table of an optimizer that itself tells."""
    defaults, held = getattr(optimizer, "defaults", {}), vars(optimizer).get("_optimizer")
    cls = type(held) if held is not None and isinstance(optimizer, type(held)) else type(optimizer)  # as Fabric has it
    return {
        "cls": cls.__name__, "is_torchs": type(optimizer).__module__.startswith("torch."),
        "default_lr": plain_rate(defaults.get("lr", 0.0) if isinstance(defaults, Mapping) else 0.0),
    }  # fmt: skip


def scheduler_options(scheduler: Any) -> dict[str, Any]:
    """Plain attributes of a scheduler."""
    found: dict[str, Any] = {}
    for name, value in vars(scheduler).items():
        if name.startswith("_") or len(found) >= _MOST_OPTIONS:
            continue
        if type(value) in _PLAIN:
            found[name] = value
        elif name == "milestones" and isinstance(value, Iterable):
            found[name] = sorted(value)[:_MOST_OPTIONS]
        elif isinstance(value, (list, tuple)) and 0 < len(value) <= 8 and all(type(one) in _PLAIN for one in value):
            found[name] = list(value)
        elif name == "lr_lambdas" and isinstance(value, list):
            found[name] = [str(getattr(one, "__name__", "")) for one in value[:_MOST_OPTIONS]]
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    peaks = [one["max_lr"] for one in groups if isinstance(one.get("max_lr"), float)]  # of a OneCycleLR
    if peaks:
        found["peak"] = max(peaks)
    schedulers = getattr(scheduler, "_schedulers", None)
    if isinstance(schedulers, (list, tuple)):
        found["schedulers"] = [type(one).__name__ for one in schedulers]
    return found


def rows_of(args: Any, kwargs: Any) -> int:
    """The rows of the first tensor with dims among the arguments of a model, or in one; -1 where there is none."""
    for value in (*args, *kwargs.values()):
        for one in (value, *(entry for _, entry in entries_of(value))):
            if isinstance(one, torch.Tensor) and one.dim():
                return one.shape[0]
    return -1


def rates_of(optimizer: Any) -> tuple[float, ...]:
    """The learning rates of the groups of an optimizer; none where one isn't known, as of an optimizer without."""
    rates = tuple([plain_rate(group.get("lr")) for group in getattr(optimizer, "param_groups", ())])
    return () if any(map(math.isnan, rates)) else rates


_DEEPEST = 4


def without_graph(value: Any, depth: int = 0) -> Any:
    """An argument whose tensors do not hold the graph that they came out of."""
    if isinstance(value, torch.Tensor):
        return _detached(value) if value.requires_grad else value
    if depth < _DEEPEST and type(value) in (tuple, list):
        return type(value)(without_graph(entry, depth + 1) for entry in value)
    if depth < _DEEPEST and type(value) is dict:
        return {name: without_graph(entry, depth + 1) for name, entry in value.items()}
    return value


@unseen
def _detached(value: torch.Tensor) -> torch.Tensor:
    return value.detach()


def itself(optimizer: Any) -> Any:
    """The optimizer whose groups it has: that in a wrapper, as Accelerate's is; else the same."""
    seen = {id(optimizer)}
    while isinstance(optimizer, torch.optim.Optimizer):
        held = (one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer))
        inner = next((one for one in held if one.param_groups is optimizer.param_groups), None)
        if inner is None or id(inner) in seen:
            break
        seen.add(id(inner))
        optimizer = inner
    return optimizer
