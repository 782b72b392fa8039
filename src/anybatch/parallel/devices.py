"""Several devices in one process: their copies of the model, and the assignment of micro-batches to them."""

import functools
import math
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy as shallow
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase

from anybatch.accelerators import capacity_of, is_accelerator, name_of, usual
from anybatch.batch.batches import Part, Splittable
from anybatch.errors import BatchError
from anybatch.loss.coupling import Coupled
from anybatch.loss.losses import InPieces
from anybatch.tensors.modules import modules_behind, modules_of
from anybatch.tensors.spectral import power_iteration

_WRAPPERS = {
    "DataParallel": "pass the model in it, model.module, and devices=model.device_ids",
    "DistributedDataParallel": (
        "it is for one device a process. Leave devices= out under torchrun, or pass the model in it, model.module"
    ),
    "FullyShardedDataParallel": "it is for one device a process; leave devices= out",
    "FSDPModule": "it is for one device a process; leave devices= out",
    "OptimizedModule": "a compiled model works on one device only; pass the model before torch.compile",
    "ScriptModule": "a scripted model can't be copied without its tensors; pass the model before torch.jit",
}


def check_copyable(models: Iterable[Any], home: torch.device) -> None:
    """Refuses models that can't be copied to other devices."""
    modules = modules_of(*models)
    kinds = {  # far fewer than modules
        kind: next((base.__name__ for base in kind.__mro__ if base.__name__ in _WRAPPERS), None)
        for kind in set(map(type, modules))
    }
    for module in modules:
        wrapper = kinds[type(module)]
        if wrapper is None and module.__dict__.get("_compiled_call_impl") is not None:
            wrapper = "OptimizedModule"
        if wrapper is not None:
            raise BatchError(
                f"the model has a {type(module).__name__}, and devices= makes its own copies; expected a plain "
                f"module: {_WRAPPERS[wrapper]}"
            )
        for name, tensor in _tensors_of(module):
            if torch.nn.parameter.is_lazy(tensor):
                raise BatchError(
                    f"{name} of a {type(module).__name__} is created by the first forward pass; run one before "
                    "devices= is used"
                )
            if tensor.device != home:
                raise BatchError(
                    f"{name} of a {type(module).__name__} lies on {tensor.device} and the first parameter on {home}; "
                    "expected the whole model on one of the devices: model.to(...)"
                )


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for found in (module._parameters, module._buffers):
        for name, tensor in found.items():
            if tensor is not None:
                yield name, tensor


class ModelCopy:
    """A copy of some modules on a device.

    Its tensors are kept and written anew once a logical batch. Its modules are made anew each time, as the modules are
    then: modes, hooks, attributes and what is frozen. Lists and dictionaries among their attributes are its own, so
    that a forward may write to them; anything else is shared.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # each parameter with its copy
        self._leaves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # these, and each buffer with its copy
        self._buffers: list[tuple[str, torch.Tensor, int]] = []
        self._modules: dict[int, torch.nn.Module] = {}

    @torch.no_grad()
    def refresh(self, models: Sequence[torch.nn.Module]) -> None:
        """Updates the copy to the modules as they are now."""
        modules, before = modules_of(*models), self._leaves
        tensors = {id(one): one for module in modules for _, one in _tensors_of(module)}
        self._leaves = {key: (one, self._copied(one, before.get(key))) for key, one in tensors.items()}
        self._modules = {id(module): type(module).__new__(type(module)) for module in modules}
        for module in modules:
            self._modules[id(module)].__dict__.update(self.translated(module.__dict__))
        if before.keys() != self._leaves.keys():
            for module in self._modules.values():
                if isinstance(module, torch.nn.RNNBase):  # cuDNN wants its weights in one piece
                    module.flatten_parameters()
        self.pairs = [pair for pair in self._leaves.values() if isinstance(pair[0], torch.nn.Parameter)]
        others = [module for module in modules if not isinstance(module, _NormBase)]
        moved = {id(one) for module in others for one in power_iteration(module)}  # as far on each device
        self._buffers = [
            (f"{name} of {type(module).__name__}", copy := self._leaves[id(one)][1], copy._version)
            for module in others
            for name, one in module._buffers.items()
            if one is not None and id(one) not in moved
        ]

    def _copied(self, tensor: torch.Tensor, known: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        copy = None if known is None else known[1]
        if copy is not None and copy.shape == tensor.shape and copy.dtype == tensor.dtype:
            copy.detach().copy_(tensor.detach(), non_blocking=is_accelerator(self.device))
        else:
            copy = tensor.detach().to(self.device, copy=True)
        if isinstance(tensor, torch.nn.Parameter):
            if not isinstance(copy, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
            copy.requires_grad_(tensor.requires_grad)
            copy.__dict__.update(tensor.__dict__)
            copy.grad = None
            copy._backward_hooks = None
            for hook in (tensor._backward_hooks or {}).values():
                copy.register_hook(hook)
        return copy

    def translated(self, value: Any) -> Any:
        """What stands for a value here: for a module its copy, for one of its methods that of the copy."""
        return _copied(value, self._leaf, {})

    def _leaf(self, value: Any, inner: Callable[[Any], Any]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._leaves.get(id(value), (value, value))[1]
        if isinstance(value, torch.nn.Module):
            return self._modules.get(id(value), value)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, torch.nn.Module):
            return types.MethodType(value.__func__, self._modules.get(id(value.__self__), value.__self__))
        if type(value) is functools.partial:
            options = {key: inner(one) for key, one in value.keywords.items()}
            return functools.partial(inner(value.func), *map(inner, value.args), **options)
        return value

    def leaf_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The copy of a parameter, ``None`` if the modules do not have it."""
        pair = self._leaves.get(id(tensor))
        return None if pair is None else pair[1]

    @property
    def nbytes(self) -> int:
        """The bytes of its parameters and buffers."""
        return sum(copy.nbytes for _, copy in self._leaves.values())

    def changed_buffers(self) -> list[str]:
        """The buffers that were written to since the copy was made, but for those of normalisations and their like."""
        return [name for name, buffer, version in self._buffers if buffer._version != version]

    def clear(self) -> None:
        """Clears the gradients, and releases the modules, which may hold the graph."""
        for _, copy in self.pairs:
            copy.grad = None
        self._modules = {}
        self._buffers = []


_DICTIONARIES = (dict, OrderedDict)


def _copied(value: Any, leaf: Callable[[Any, Callable[[Any], Any]], Any], known: dict[int, tuple[Any, Any]]) -> Any:
    """A copy of containers, with their attributes, in which other values are what ``leaf`` gives for them.

    Args:
        leaf: of a value, and of the function that copies what is within it.
        known: containers with their begun copies, by ``id``, since they may refer to each other.
    """

    def inner(one: Any) -> Any:
        return _copied(one, leaf, known)

    if (found := leaf(value, inner)) is not value:
        return found
    if type(value) is tuple:
        return tuple(map(inner, value))
    if isinstance(value, tuple):
        return value._make(map(inner, value)) if hasattr(value, "_make") else value
    if id(value) in known or not isinstance(value, (dict, list, set, deque)):
        return known.get(id(value), (value, value))[1]
    made = _alone(value)
    known[id(value)] = value, made
    if isinstance(value, dict):
        put = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
        for key, one in value.items():
            if type(value) in _DICTIONARIES and _is_observer(one):
                made.pop(key)
            else:
                put(made, key, inner(one))
    elif isinstance(value, list):
        list.__setitem__(made, slice(None), [inner(one) for one in value])
    else:
        items = [inner(one) for one in value]
        made.clear()
        (made.update if isinstance(made, set) else made.extend)(items)
    attributes = getattr(value, "__dict__", {})
    if made is not value and attributes:
        made.__dict__.update((key, inner(one)) for key, one in attributes.items())
    return made


def _alone(value: Any) -> Any:
    """Another container of the class of this one, with its attributes and perhaps its items."""
    made = value
    with suppress(Exception):  # it may not take its items one by one
        made = shallow(value)
    if made is value:
        kind: Any = type(value)
        made = kind.__new__(kind)
        if isinstance(value, deque):
            deque.__init__(made, (), value.maxlen)
        made.__dict__.update(value.__dict__)
    return made


def _is_observer(hook: Any) -> bool:
    """Whether a hook is of the doctor, who looks at one device."""
    module = getattr(getattr(hook, "__func__", hook), "__module__", None)
    return isinstance(module, str) and module.startswith("anybatch.doctor")


class Placement(NamedTuple):
    """A device, its speed and its copy of the model."""

    device: torch.device  # on which micro-batches run
    speed: float  # in proportion to the others
    copy: ModelCopy | None  # of the model; ``None`` where the model itself lies


@dataclass(eq=False)
class Devices:
    """The devices of one process that share the micro-batches of a logical batch."""

    placements: list[Placement]  # the first one is where the model lies
    # by whether gradients were taken, whether the last pass drew from generators that all threads share; not in it
    # while nobody has looked
    drew_on_host: dict[bool, bool] = field(default_factory=dict)
    is_checked: bool = False  # whether the loss was seen to use nothing but the copies
    was_warned: bool = False  # whether something was said about buffers

    @property
    def home(self) -> torch.device:
        """The device of the model."""
        return self.placements[0].device

    @property
    def copies(self) -> list[ModelCopy]:
        """The copies of the model on the other devices."""
        return [placement.copy for placement in self.placements if placement.copy is not None]

    def most(self, splittable: Splittable) -> float:
        """What a micro-batch may be at most, in samples or in cost, so that every device gets its share."""
        speeds = [placement.speed for placement in self.placements]
        share = min(speeds) / sum(speeds)
        if splittable.has_costs:
            return max(1.0, splittable.largest * share)
        return max(1, math.ceil(splittable.rows * share * (1 - 1e-12)))

    def assign(self, parts: Sequence[Part]) -> list[list[int]]:
        """Assigns micro-batches to devices.

        Each goes to the device that would be done with it first, going by costs and speeds, as from a queue. The
        answer depends on nothing else, so that sums are taken in the same order each time.
        """
        loads = [0.0] * len(self.placements)
        found: list[list[int]] = [[] for _ in self.placements]
        for number, part in enumerate(parts):
            ends = [
                (load + part.cost) / placement.speed for load, placement in zip(loads, self.placements, strict=True)
            ]
            first = ends.index(min(ends))
            loads[first] += part.cost
            found[first].append(number)
        return found

    def most_on_one(self, parts: Sequence[Part]) -> int:
        """The most micro-batches on one device."""
        return max(len(numbers) for numbers in self.assign(parts))

    def seconds(self, parts: Sequence[Part], one: Callable[[float], float]) -> float:
        """The time until the last device is done."""
        first = self.placements[0].speed
        ends = zip(self.assign(parts), self.placements, strict=True)
        return max(sum(one(parts[n].cost) for n in numbers) * first / placement.speed for numbers, placement in ends)

    @property
    def in_words(self) -> str:
        """What decides who runs which micro-batch: how many devices there are, and their speeds."""
        speeds = [placement.speed for placement in self.placements]
        if len(set(speeds)) == 1:
            return str(len(speeds))
        return f"{len(speeds)} with speeds {', '.join(f'{speed:g}' for speed in speeds)}"

    def check(self, model: torch.nn.Module, loss_fn: Any) -> None:
        """Refuses a model that can't be copied, or was moved."""
        first = next(iter(model.parameters()), None)
        if first is not None and first.device != self.home:
            raise BatchError(
                f"the model lies on {first.device} now, and on {self.home} when TrainStep was made with devices=; move "
                "it back, or make a new TrainStep"
            )
        check_copyable(modules_behind(model, loss_fn), self.home)


def devices_of_argument(devices: Any, model: torch.nn.Module, loss_fn: Any) -> Devices | None:
    """Reads ``devices=``; gives them with the model's first, or ``None`` if that is the only one.

    They are a sequence, or a mapping of devices to their speeds. Devices that are not there are refused, and a model or
    a loss that can't be copied to them.
    """
    if devices is None:
        return None
    if isinstance(devices, (str, int, torch.device)) or not isinstance(devices, (Mapping, Sequence)):
        raise BatchError(
            f"devices is a {type(devices).__name__}, {devices!r:.60}; expected a sequence such as "
            '["cuda:0", "cuda:1"], or a mapping to their speeds such as {"cuda:0": 2, "cuda:1": 1}'
        )
    found = [_device_of(one) for one in devices]
    speeds = [_speed_of(one, devices[one]) for one in devices] if isinstance(devices, Mapping) else [1.0] * len(found)
    if not found:
        raise BatchError("devices is empty; expected at least one, or leave it out for the device of the model")
    twice = [one for one in found if one.type != "cpu" and found.count(one) > 1]
    if twice:
        raise BatchError(f"devices has {twice[0]} twice; expected each device once")
    first = next(iter(model.parameters()), None)
    home = torch.device("cpu") if first is None else first.device
    if home not in found:
        raise BatchError(
            f"the model lies on {home}, and devices is {[str(one) for one in found]}; expected its device among them: "
            f'model.to("{found[0]}") before the optimizer is made'
        )
    if len(found) == 1:
        return None
    if isinstance(loss_fn, (Coupled, InPieces)):
        raise BatchError(
            f"the loss is {type(loss_fn).__name__}, which runs its micro-batches one after the other on one "
            "device: it needs their outputs together, or splits the backward pass itself; leave devices= out, or "
            "start one process per device with torchrun"
        )
    order = [found.index(home), *(i for i in range(len(found)) if i != found.index(home))]
    placements = [Placement(found[i], speeds[i], None if n == 0 else ModelCopy(found[i])) for n, i in enumerate(order)]
    if len({_kind_of(one) for one in found}) > 1 and not isinstance(devices, Mapping):
        raise BatchError(
            f"devices is {[str(one) for one in found]}, of different kinds, whose relative speeds are unknown"
            '; expected their speeds, as in devices={"cuda:0": 3, "cpu": 1}'
        )
    result = Devices(placements)
    result.check(model, loss_fn)
    return result


def _device_of(value: Any) -> torch.device:
    if isinstance(value, bool) or not isinstance(value, (str, int, torch.device)):
        raise BatchError(f"devices has {value!r:.60}, a {type(value).__name__}; expected devices such as 'cuda:0'")
    if isinstance(value, int) and usual() is None:
        raise BatchError(f"devices has {value}, and torch finds no accelerator here; expected devices such as 'cpu'")
    try:
        device = torch.device(value)
    except RuntimeError as error:
        raise BatchError(f"devices has {value!r}, which torch does not know: {str(error).splitlines()[0]}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    module = getattr(torch, device.type, None)
    if device.type == "meta" or module is None or not module.is_available():
        raise BatchError(f"devices has {str(device)!r}, and torch finds no {device.type} here; expected one that is")
    if device.index is None:
        device = torch.device(device.type, module.current_device())
    if device.index >= module.device_count():
        raise BatchError(
            f"devices has {str(device)!r}, and torch finds {module.device_count()} of {device.type} here, numbered "
            "from 0"
        )
    return device


def _speed_of(device: Any, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise BatchError(f"devices[{device!r}] is {value!r}; expected its relative speed, a positive number such as 2")
    return float(value)


def _kind_of(device: torch.device) -> tuple[Any, ...]:
    if not is_accelerator(device):
        return (device.type,)
    return device.type, name_of([device]), capacity_of(device)[1]
