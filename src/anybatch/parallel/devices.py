"""Several devices in one process, and the assignment of micro-batches to them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from anybatch.accelerators import capacity_of, is_accelerator, name_of, usual
from anybatch.batch.batches import Part, Splittable
from anybatch.errors import BatchError
from anybatch.loss.coupling import Coupled
from anybatch.loss.pieces import InPieces
from anybatch.parallel.modelcopies import ModelCopy, check_copyable
from anybatch.tensors.modules import modules_behind


class Placement(NamedTuple):
    """A device, its speed and its copy of the model."""

    device: torch.device  # on which micro-batches run
    speed: float  # in proportion to the others
    copy: ModelCopy | None  # of the model; ``None`` where the model itself lies


class Devices:
    """The devices of one process that share the micro-batches of a logical batch.

    Args:
        placements: the first one is where the model lies.

    Attributes:
        drew_on_host: by whether gradients were taken, whether the last pass drew from generators that all threads
            share; not in it while nobody has looked.
        is_checked: whether the loss was seen to use nothing but the copies.
        was_warned: whether something was said about buffers.
    """

    def __init__(self, placements: Sequence[Placement]) -> None:
        self.placements = list(placements)
        self.drew_on_host: dict[bool, bool] = {}
        self.is_checked = False
        self.was_warned = False

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
        share = min(placement.speed for placement in self.placements) / sum(
            placement.speed for placement in self.placements
        )
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
        """Refuses a model that can't be copied, or was moved.

        Args:
            model: the model.
            loss_fn: may be a module, or a method of one.

        Raises:
            BatchError: see ``check_copyable``.
        """
        first = next(model.parameters(), None)
        if first is not None and first.device != self.home:
            raise BatchError(
                f"the model lies on {first.device} now, and on {self.home} when TrainStep was made with devices=; move "
                "it back, or make a new TrainStep"
            )
        check_copyable(modules_behind(model, loss_fn), self.home)


def devices_of_argument(devices: Any, model: torch.nn.Module, loss_fn: Any) -> Devices | None:
    """Reads ``devices=``.

    Args:
        devices: a sequence of devices; a mapping of devices to their speeds; ``None`` for the model's own.

    Returns:
        The devices, that of the model first; ``None`` if it is the only one.

    Raises:
        BatchError: they are none, are not there, or the model or the loss can't be copied to them.

    Example:
        >>> found = devices_of_argument(["cpu", "cpu"], torch.nn.Linear(2, 1), None)
        >>> [placement.device.type for placement in found.placements]
        ['cpu', 'cpu']
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
        raise BatchError(f"devices has {twice[0]} twice; expected each once, since its memory is there once")
    first = next(model.parameters(), None)
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
            f"the loss is {type(loss_fn).__name__}, which runs its micro-batches one after the other on one device: "
            "it needs their outputs together, or splits the backward itself; leave devices= out, or start one "
            "process a device with torchrun"
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
            f"devices has {str(device)!r}, and torch finds {module.device_count()} of {device.type} here; they are "
            "counted from 0"
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
