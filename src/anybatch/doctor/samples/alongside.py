"""What else is seen: running statistics, ties, weights changed by no step or drawn anew, memory, replicas."""

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from anybatch.accelerators import in_use, memory_of
from anybatch.doctor.recording.describing import wrapper_of
from anybatch.doctor.recording.naming import modules_in_sight
from anybatch.doctor.recording.numbering import Numbering
from anybatch.doctor.samples.flatcopies import plain
from anybatch.doctor.samples.inputs import some_of
from anybatch.memory.meter import resident_bytes
from anybatch.records.lossfacts import Replicas
from anybatch.records.samples import Buffers, Memory, Tied, Written

_COMPARED = 1 << 20
_MOST_PAIRS = 100
_MOST_WATCHED = 64  # parameters that stand for all
_WATCHED_ENTRIES = 64  # of each
_LOOKS = (5, 10, 20)  # backwards after which they are compared with those at the first


class BufferSampler:
    """Tells which norm layers have moved their running statistics since it was last asked."""

    def __init__(self, numbering: "Numbering") -> None:
        self._numbering = numbering
        self._last: dict[int, torch.Tensor] = {}

    def sample(self) -> Iterator[Buffers]:
        """One fact for each root some of whose statistics have moved."""
        for model in self._numbering.models:
            moved, frozen = [], []
            for name, module, _ in model.modules():
                mean = getattr(module, "running_mean", None)
                if not isinstance(mean, torch.Tensor) or not self._has_moved(mean):
                    continue
                moved.append(name)
                own = [one for one in module._parameters.values() if one is not None]
                if own and not any(parameter.requires_grad for parameter in own):
                    frozen.append(name)
            if moved:
                yield Buffers(root=model.number, moved=tuple(moved), frozen=tuple(frozen))

    def _has_moved(self, mean: torch.Tensor) -> bool:
        """Whether a buffer changed; its version does not tell, since batch norm writes without counting."""
        values = plain(mean)
        if values is None:
            return False
        known = self._last.get(id(mean))
        if known is None or known.shape != values.shape or known.device != values.device:
            self._last[id(mean)] = values.detach().clone()
            return False
        if torch.equal(known, values.detach()):
            return False
        known.copy_(values.detach())
        return True


class TieSampler:
    """Finds parameters that begin bitwise equal though they are two, and tells when they differ."""

    def __init__(self, numbering: "Numbering") -> None:
        self._numbering = numbering
        self._known: set[int] = set()
        self._version = -1
        self._pairs: list[tuple[int, int]] = []
        self._differ: set[tuple[int, int]] = set()

    def sample(self) -> Tied | None:
        """The pairs, or ``None`` where nothing is new."""
        if self._numbering.version == self._version and not self._pairs:
            return None
        self._version = self._numbering.version
        new = [(number, tensor) for number, tensor in self._numbering.tracked() if number not in self._known]
        before = len(self._pairs), len(self._differ)
        if new:
            self._find(new)
        for one, other in self._pairs:
            if (one, other) not in self._differ and not self._equal(one, other):
                self._differ.add((one, other))
        if (len(self._pairs), len(self._differ)) == before:
            return None
        return Tied(pairs=tuple(self._pairs), differ=tuple(pair for pair in self._pairs if pair in self._differ))

    def _find(self, new: list[tuple[int, torch.Tensor]]) -> None:
        groups: dict[object, list[tuple[int, torch.Tensor]]] = {}
        for number, tensor in new:
            self._known.add(number)
            values = plain(tensor)
            if values is not None and values.dim() > 1:
                kind = (values.shape, values.dtype, values.device)
                groups.setdefault(kind, []).append((number, values.detach()))
        for group in groups.values():
            if len(group) < 2:
                continue
            with torch.no_grad():
                prints = torch.stack([some_of(values, 16).double() for _, values in group]).tolist()
            first: dict[tuple[float, ...], tuple[int, torch.Tensor]] = {}
            for print_of_it, (number, values) in zip(map(tuple, prints), group, strict=True):
                if len(set(print_of_it)) < 2 or len(self._pairs) >= _MOST_PAIRS:
                    continue
                known = first.setdefault(print_of_it, (number, values))
                if known[0] != number and known[1].data_ptr() != values.data_ptr() and _same(known[1], values):
                    self._pairs.append((known[0], number))

    def _equal(self, one: int, other: int) -> bool:
        first, second = self._numbering.tensor(one), self._numbering.tensor(other)
        if first is None or second is None or first.shape != second.shape:
            return True
        return first.device != second.device or _same(first.detach(), second.detach())


class HandWrites:
    """Tells which parameters have changed over the first backwards: updates that the user's code makes by hand.

    And which changed behind two backwards in a row, and had what these gave them as their gradient still at the next:
    where two nets take turns, each may clear its own before its own backward.
    """

    def __init__(self, numbering: "Numbering") -> None:
        self._numbering = numbering
        self._count = 0
        self._first: dict[int, torch.Tensor] = {}
        self._last: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # values and gradients
        self._used: set[int] = set()
        self._again: set[int] = set()

    def before_backward(self) -> None:
        """Is notified of a backward that is about to run."""
        now = self._now() if self._last else {}
        used = {number for number, (values, gradient) in now.items() if self._is_used(number, values, gradient)}
        self._again |= used & self._used
        self._used = used

    def after_backward(self) -> Written | None:
        """Is notified that it ran; ``None`` where nothing is known to have changed."""
        self._count += 1
        found = None
        if self._count == 1:
            tracked = self._numbering.tracked()
            step = max(1, len(tracked) // _MOST_WATCHED)
            self._first = {
                number: one.clone() for number, tensor in tracked[::step] if (one := _some(tensor)) is not None
            }
        elif self._count in _LOOKS and self._first:
            changed = tuple(number for number, entries in self._first.items() if self._differs(number, entries))
            still = tuple(number for number in self._first if number not in changed and self._has_gradient(number))
            found = Written(parameters=changed, kept=tuple(sorted(self._again)), still=still) if changed else None
            self._again = set()
        self._last = self._now() if self._count < _LOOKS[-1] else {}
        self._first = self._first if self._count < _LOOKS[-1] else {}
        return found

    def _has_gradient(self, number: int) -> bool:
        tensor = self._numbering.tensor(number)
        gradient = None if tensor is None or tensor.grad is None else _some(tensor.grad)
        return gradient is not None and 2 * int(gradient.count_nonzero()) > gradient.numel()

    def _now(self) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
        tensors = ((number, self._numbering.tensor(number)) for number in self._first)
        alive = [(number, one, _some(one)) for number, one in tensors if one is not None]
        return {
            number: (values.clone(), None if one.grad is None or (some := _some(one.grad)) is None else some.clone())
            for number, one, values in alive if values is not None
        }  # fmt: skip

    def _is_used(self, number: int, values: torch.Tensor, gradient: torch.Tensor | None) -> bool:
        before = self._last.get(number)
        if before is None or before[1] is None or gradient is None or before[1].shape != gradient.shape:
            return False
        return torch.equal(before[1], gradient) and bool(gradient.any()) and not torch.equal(before[0], values)

    def _differs(self, number: int, before: torch.Tensor) -> bool:
        tensor = self._numbering.tensor(number)
        now = None if tensor is None else _some(tensor)
        return now is not None and now.shape == before.shape and not torch.equal(now, before)


def _some(tensor: torch.Tensor) -> torch.Tensor | None:
    values = plain(tensor)
    return None if values is None or not values.numel() else some_of(values, _WATCHED_ENTRIES)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() > _COMPARED:
        step = one.numel() // _COMPARED + 1
        one, other = one.reshape(-1)[::step], other.reshape(-1)[::step]
    return torch.equal(one, other)


def memory(graphs: int = 0, losses: int = 0) -> Memory:
    """What the process and the device hold now, beside earlier steps whose graph is alive, and whose loss is."""
    allocated = peak = 0
    if devices := in_use():
        counted = memory_of(devices[0])
        allocated, peak = counted.allocated, counted.peak_allocated
    return Memory(graphs=graphs, losses=losses, resident=resident_bytes(), allocated=allocated, peak=peak)


_DDP = "DistributedDataParallel"
_SHARDED = frozenset({"FullyShardedDataParallel", "FSDPModule"})


class ReplicaWatch:
    """Looks for wrappers in the running code; nothing is sent to other processes."""

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self._called: dict[int, int] = {}
        self._last: Replicas | None = None

    def called(self, module: torch.nn.Module, root: int) -> None:
        """Notes that the user's code called a module, in training and with autograd on."""
        self._called[id(module)] = root

    def look(self) -> Replicas | None:
        """How models are spread; ``None`` where they are not, or where nothing is new."""
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        modules = {id(module): module for module in modules_in_sight()}
        for model in self._numbering.models:
            if (module := model.module()) is not None:
                modules[id(module)] = module
        wrappers = [module for module in modules.values() if wrapper_of(module) == _DDP]
        bypassed = [
            self._name(self._called[id(inner)], inner)
            for wrapper in wrappers
            if isinstance(inner := getattr(wrapper, "module", None), torch.nn.Module) and id(inner) in self._called
        ]
        classes = {cls.__name__ for module in modules.values() for cls in type(module).__mro__}
        kind = _DDP if wrappers else "FSDP" if classes & _SHARDED else ""
        found = Replicas(world=distributed.get_world_size(), wrapper=kind, bypassed=tuple(dict.fromkeys(bypassed)))
        if self._last is not None and (found.wrapper, found.bypassed) == (self._last.wrapper, self._last.bypassed):
            return None
        self._last = found
        return found

    def _name(self, root: int, inner: torch.nn.Module) -> str:
        model = self._numbering.models[root]
        return model.variable if model.module() is inner else f"{model.variable}.module".lstrip(".")


_ENTRIES, _LEAST_ENTRIES, _MOST_DRAWN = 256, 64, 32
_CLOSELY, _APART = 100, 5  # looks at each step from the beginning; steps between two after these

_TINY = 1e-30
_RELATED = 0.5
"""A part of the square of the weights: a step leaves their product with the next ones near 1, new ones near 0."""


@dataclass(slots=True)
class Watched:
    """The largest matrix of an optimizer."""

    weight: "weakref.ref[torch.Tensor]"
    before: torch.Tensor
    shape: torch.Size
    step: int  # from one of the entries to the next
    looks: int = 0  # steps
    drawn: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # the look, and what came
    after: torch.Tensor | None = None  # a step, as long as the next one has not begun
    kept: list[float] = field(
        default_factory=list
    )  # cosines of what a step changed and what of it was there at the next


class Redraws:
    """Looks before each step, after the first hundred before every fifth until weights were redrawn in them.

    Only on a CPU, since each look would wait for another device.
    """

    def __init__(self) -> None:
        self.optimizers: dict[int, Watched] = {}
        self.without = set[int]()  # optimizers without a matrix that tells

    def look(self, number: int, optimizer: Any, *, sampled: bool = True) -> None:
        """Is told that an optimizer is about to step, which may be a step that is measured."""
        known = self.optimizers.get(number)
        if known is not None:
            known.looks += 1
            is_close = known.looks <= _CLOSELY or sampled or known.drawn or known.after is not None
            if known.looks % _APART and not is_close:
                return
        else:
            weights = (one for group in optimizer.param_groups for one in group["params"] if _is_plain(one))
            weight = max(weights, key=torch.Tensor.numel, default=None)
            if weight is None or weight.numel() < _LEAST_ENTRIES:
                self.without.add(number)
            else:
                step = max(1, weight.numel() // _ENTRIES)
                entries = weight.detach().as_strided((min(_ENTRIES, weight.numel()),), (step,)).clone()
                self.optimizers[number] = Watched(weakref.ref(weight), entries, weight.shape, step)
            return
        weight = known.weight()
        if weight is None or weight.shape != known.shape or len(known.drawn) >= _MOST_DRAWN:
            return
        if not weight.is_cpu or weight.dtype != known.before.dtype:
            return
        now = weight.detach().as_strided(known.before.shape, (known.step,)).clone()
        before, after, known.after = known.before, known.after, None
        known.before = now
        if after is not None and len(known.kept) < _MOST_DRAWN and (moved := after - before).any():
            left = now - before
            known.kept.append(float(torch.dot(left, moved) / (left.norm() * moved.norm()).clamp_min(_TINY)))
        if float(torch.dot(before, now)) < _RELATED * float(torch.dot(before, before)):  # as in ``related``
            known.drawn.append((known.looks, now))

    def look_after(self, number: int) -> None:
        """Is told that an optimizer has made a step that is measured."""
        known = self.optimizers.get(number)
        weight = None if known is None else known.weight()
        if known is None or weight is None or weight.shape != known.shape or len(known.kept) >= _MOST_DRAWN:
            return
        if weight.is_cpu and weight.dtype == known.before.dtype:
            known.after = weight.detach().as_strided(known.before.shape, (known.step,)).clone()


def _is_plain(weight: torch.Tensor) -> bool:
    is_dense = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.layout is torch.strided
    return is_dense and weight.is_contiguous() and weight.is_cpu and weight.dim() > 1 and weight.is_floating_point()


def related(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether weights go on from others; those that are zero or not finite can't be told to be new ones."""
    return not float(torch.dot(one, other)) < _RELATED * float(torch.dot(one, one))
