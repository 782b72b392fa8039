"""Hyperparameters of optimizers and schedulers: read, written, and restored bitwise."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

# Of a parameter group: everything that is a learning rate. Schedulers keep some of theirs there.
GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
SCHEDULER_RATES = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min", "default_min_lr")
CYCLED = ("base_momentum", "max_momentum")


class Place(NamedTuple):
    """Where a hyperparameter is stored.

    Args:
        name: for the table.
        home: a mapping, a list, or an object with attributes.
        key: a key, an index or the name of an attribute.
        position: the index in a tuple that is stored there; ``None`` if the number itself is.

    Example:
        >>> group = {"betas": (0.9, 0.999)}
        >>> place = Place("betas[1]", group, "betas", 1)
        >>> place.write(0.992)
        >>> group["betas"], float(place)
        ((0.9, 0.992), 0.992)
    """

    name: str
    home: Any
    key: Any
    position: int | None = None

    def read(self) -> Any:
        """The number or 0-dim tensor."""
        found = self.home[self.key] if isinstance(self.home, (dict, list)) else getattr(self.home, self.key)
        return found if self.position is None else found[self.position]

    def __float__(self) -> float:
        return float(self.read())

    def write(self, value: Any) -> None:
        """Sets the number; a tensor is written in place, since CUDA graphs read it."""
        found = self.read()
        if isinstance(found, torch.Tensor):
            with torch.no_grad():
                found.copy_(value) if isinstance(value, torch.Tensor) else found.fill_(value)
            return
        if self.position is not None:
            whole = self.home[self.key]
            items = [value if at == self.position else item for at, item in enumerate(whole)]
            value = type(whole)(items)
        if isinstance(self.home, (dict, list)):
            self.home[self.key] = value
        else:
            setattr(self.home, self.key, value)


Follow = Callable[[float, float], float]
"""Maps a value and k to the value for a batch k times as large; with 1/k it inverts that."""


class Change:
    """A change of a hyperparameter.

    Args:
        place: of the hyperparameter.
        follow: gives the new value.
        k: the new batch size over the old one.
    """

    def __init__(self, place: Place, follow: Follow, k: float) -> None:
        self.name, self.old = place.name, float(place)
        self.new = follow(self.old, k)
        self._place, self._follow, self._k = place, follow, k
        self._before: Any = None
        self._after: Any = None

    def apply(self) -> None:
        """Writes the new value."""
        self._before = _copy(self._place.read())
        self._place.write(self.new)
        self._after = _copy(self._place.read())

    def undo(self) -> None:
        """Restores the old value, bitwise; a value that a scheduler has changed since is scaled back."""
        is_untouched = bool(self._place.read() == self._after)
        self._place.write(self._before if is_untouched else self._follow(float(self._place), 1 / self._k))


class MomentumChange:
    """A multiplication of the momentum buffers of a parameter group; the table shows their norm.

    Args:
        name: for the table.
        buffers: from the optimizer's state.
        factor: the multiplier.
    """

    def __init__(self, name: str, buffers: Sequence[torch.Tensor], factor: float) -> None:
        self.name, self._buffers, self._factor = name, buffers, factor
        self.old = math.sqrt(sum(float(buffer.double().square().sum()) for buffer in buffers))
        self.new = self.old * factor
        self._before: list[torch.Tensor] = []

    def apply(self) -> None:
        """Multiplies the buffers, and keeps a copy for ``undo``."""
        self._before = [buffer.clone() for buffer in self._buffers]
        for buffer in self._buffers:
            buffer.mul_(self._factor)

    def undo(self) -> None:
        """Restores the buffers, bitwise; those that were updated since are divided by the factor."""
        for buffer, before in zip(self._buffers, self._before, strict=True):
            if torch.equal(buffer, before * self._factor):
                buffer.copy_(before)
            else:
                buffer.div_(self._factor)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def rates_of(optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any]) -> list[Place]:
    """Every learning rate: of the groups, and those that schedulers compute from."""
    places = [
        Place(f"{prefix}.{key}", group, key)
        for prefix, group in named_groups(optimizers)
        for key in GROUP_RATES
        if is_number(group.get(key))
    ]
    seen: set[int] = set()
    for name, scheduler in named_schedulers(schedulers):
        keys = (*SCHEDULER_RATES, *(("eps",) if _is_plateau(scheduler) else ()))
        for key in keys:
            value = getattr(scheduler, key, None)
            if isinstance(value, list) and id(value) not in seen:  # composed schedulers share lists
                seen.add(id(value))
                places += [Place(f"{name}.{key}[{i}]", value, i) for i, v in enumerate(value) if is_number(v)]
            elif is_number(value):
                places.append(Place(f"{name}.{key}", scheduler, key))
    return _distinct(places)


def _distinct(places: list[Place]) -> list[Place]:
    """Drops further places of the same tensor, which would be scaled twice."""
    seen: set[int] = set()
    found = []
    for place in places:
        value = place.read()
        if isinstance(value, torch.Tensor):
            if id(value) in seen:
                continue
            seen.add(id(value))
        found.append(place)
    return found


def cycled_betas(optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any]) -> list[Place]:
    """The bounds between which schedulers cycle the first beta."""
    cycling = [(name, one) for name, one in named_schedulers(schedulers) if _cycles_beta(one)]
    places = []
    for name, scheduler in cycling:
        for key in CYCLED:
            values = getattr(scheduler, f"{key}s", None)
            if isinstance(values, list):
                places += [Place(f"{name}.{key}s[{i}]", values, i) for i, v in enumerate(values) if is_number(v)]
    if any(not hasattr(scheduler, "base_momentums") for _, scheduler in cycling):
        places += [
            Place(f"{prefix}.{key}", group, key)
            for prefix, group in named_groups(optimizers)
            for key in CYCLED
            if is_number(group.get(key))
        ]
    return places


def _cycles_beta(scheduler: Any) -> bool:
    return bool(getattr(scheduler, "cycle_momentum", False)) and bool(getattr(scheduler, "use_beta1", False))


def _is_plateau(scheduler: Any) -> bool:
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def named_groups(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parameter groups, with names for the table."""
    for number, optimizer in enumerate(optimizers):
        prefix = f"optimizers[{number}]." if len(optimizers) > 1 else ""
        for at, group in enumerate(optimizer.param_groups):
            yield f"{prefix}param_groups[{at}]", group


def named_schedulers(schedulers: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Schedulers and those nested in them, each once, with names for the table."""
    seen: set[int] = set()
    waiting = [
        (f"schedulers[{number}]" if len(schedulers) > 1 else "scheduler", one) for number, one in enumerate(schedulers)
    ]
    while waiting:
        name, scheduler = waiting.pop(0)
        if id(scheduler) in seen:
            continue
        seen.add(id(scheduler))
        yield name, scheduler
        inner = getattr(scheduler, "_schedulers", ())
        waiting += [(f"{name}[{number}]", one) for number, one in enumerate(inner)]


def is_number(value: Any) -> bool:
    """Whether a value is a number, or a tensor of one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)
