"""How many bytes of tensors are alive, at each moment and at the peak, and what they are for.

On CUDA the caching allocator keeps these figures itself. On the CPU, and for fake tensors, a mode sees every operation
and counts each storage once, from the operation that made it until nothing refers to it any more. What an operation
allocates and frees within itself is not seen. Tensors on ``meta`` and fake ones hold nothing, unless they are counted.
"""

import functools
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from anybatch.batch.trees import map_leaves
from anybatch.records.memory import ACTIVATIONS, GRADIENTS, INPUTS, OTHER, PARAMETERS, Memory
from anybatch.tensors.dispatch import Mode, current_mode, tensors_in, written_by
from anybatch.tensors.fakes import Fake, QuickFakeMode
from anybatch.tensors.graph import in_backward
from anybatch.torch_private import number_of_node, unwrapped

BEFORE = -1
"""The operation that made what was there before the first one."""

_DEVICE = torch.ops.prim.device.default
_ADD = torch.ops.aten.add_.Tensor
_SUM = torch.ops.aten.add.Tensor
_ENGINE = str(torch.autograd.graph.__file__)
_TORCH = Path(torch.__file__).parent
_BETWEEN = {__file__, str(_TORCH / "_compile.py"), str(_TORCH / "_dynamo" / "eval_frame.py")}  # what calls a mode
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
# What forward-mode differentiation asks of a tensor and its tangent, which it copies if they differ.
_SAME_STORAGE = torch.ops.aten._has_same_storage_numel.default
# Their result is one number in a storage that has room for all summands, which fake tensors do not know.
_ROOMY = (
    torch.ops.aten.mse_loss,
    torch.ops.aten.smooth_l1_loss,
    torch.ops.aten.binary_cross_entropy,
    torch.ops.aten.soft_margin_loss,
)

_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""What holds the numbers of a sparse tensor, by its layout."""


class OverBudget(Exception):  # not an error of the user's: whoever set the limit takes another way
    """More would be alive than is allowed: so many bytes at least."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages that hold a tensor's numbers."""
    # The type is asked, since looking in vain for an attribute of a tensor is slow; also of a type, so that of fake
    # tensors, of which there are most, it is known.
    kind = type(tensor)
    if tensor.layout is torch.strided and (kind is Fake or not hasattr(kind, "__tensor_flatten__")):
        try:
            return [tensor.untyped_storage()]
        except NotImplementedError:  # of a transform of torch.func, which wraps another tensor
            return storages_of(unwrapped(tensor))
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]  # a DTensor names its mesh, too
        return [storage for one in inner if isinstance(one, torch.Tensor) for storage in storages_of(one)]
    return [getattr(tensor, part)().untyped_storage() for part in _PARTS.get(tensor.layout, ())]


def held_by(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """The bytes of the storages of tensors, each once, by what a storage is known by."""
    return {storage._cdata: storage.nbytes() for tensor in tensors for storage in storages_of(tensor)}


@dataclass(eq=False, slots=True)
class Allocation:
    """A storage, from the operation that made it to the first one after which it was gone."""

    born: int  # the position of the operation; ``BEFORE`` for what was there
    size: int  # bytes
    category: str  # one of ``records.memory.CATEGORIES``
    is_fixed: bool = False  # whether its bytes are what was said, and not what the storage says
    died: int | None = None  # the position of the first operation after which it was gone; ``None`` while it is alive
    back: int | None = None  # the position of the first operation of a backward that read it; ``None`` if none did
    holders: int = 0  # storages, and copies that lie elsewhere
    here: int = 0  # storages among them


class Recording(Mode):
    """Writes down every operation and every storage, so that live bytes can be computed at each moment.

    Args:
        device_type: only storages on devices of this type are counted; ``None`` for all.
        granularity: sizes are rounded up to a multiple of it, as the CUDA allocator does with 512.
        counts_fakes: whether tensors without numbers, on ``meta`` or fake, count as if they had them.
        limit: bytes; ``OverBudget`` is raised by the operation that would have more alive. ``None`` for no limit.

    Attributes:
        most: the most bytes that were alive at any moment, or are foreseen where all operations are.
        wrote_inputs: whether an operation wrote to what was registered as an input.
        gave_tangents: whether forward-mode differentiation followed an input.

    Example:
        >>> with Recording() as recording:
        ...     _ = torch.zeros(1000) + 1.0
        >>> recording.operations, max(recording.live_bytes())
        (['zeros', 'add'], 8000)
    """

    def __init__(
        self, *, device_type: str | None = None, granularity: int = 1, counts_fakes: bool = False,
        limit: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts_fakes = counts_fakes
        self._limit, self._current, self.most = limit, 0, 0
        self._away = self.most_here = 0  # bytes of what counts as alive and lies elsewhere; the most that do not
        self.foresees = False  # whether each operation is looked at before it runs, and not only near the limit
        self._makes: dict[Any, int] = {}  # the bytes of what operations give, by their arguments
        self.operations: list[str] = []  # the names of the operations, in order
        self.allocations: list[Allocation] = []  # the storages, in the order in which they were first seen
        self.wrote_inputs = self.gave_tangents = self._is_over = False
        self._written: dict[int, Allocation] = {}
        # what a backward added to each gradient that was there, in the order in which it did
        self.accumulated: list[tuple[Allocation, Allocation]] = []
        self.made_dense: list[Allocation] = []  # those gradients that were dense, and to which it added a sparse one
        # what was added to, and the sum, where torch adds in place as long as no mode is on
        self.sums: list[tuple[Allocation, Allocation]] = []
        self._product: tuple[int, list[Any]] = (BEFORE, [])  # the last one, and where it was called
        self._node = (-1, BEFORE)  # the one of a backward that runs, and where its operations begin
        self._device_type = device_type
        self._granularity = granularity
        self._alive: dict[int, tuple[Any, Allocation]] = {}

    @property
    def now(self) -> int:
        """How many operations have run."""
        return len(self.operations)

    def register(self, tensors: Iterable[Any], category: str, *, counted: bool = True) -> None:
        """Adds what is there before the first operation."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, BEFORE, category, counted=counted)

    def assign(self, tensors: Iterable[Any], category: str) -> None:
        """Says what storages are for that are alive now."""
        for found in self.allocations_of(tensors):
            found.category = category

    @property
    def numbers(self) -> dict[int, int]:
        """The place of each allocation among all of them, by its ``id``."""
        return {id(one): place for place, one in enumerate(self.allocations)}

    def allocations_of(self, tensors: Iterable[Any]) -> list[Allocation]:
        """The allocations of tensors, as far as they were seen."""
        keys = (
            storage._cdata for tensor in tensors if isinstance(tensor, torch.Tensor) for storage in storages_of(tensor)
        )
        return [self._alive[key][1] for key in keys if key in self._alive]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation and writes it down."""
        if func is _DEVICE:  # what autograd asks of fake tensors, several times an operation, and does nothing
            device = getattr(args[0], "fake_device", None)
            return func(*args) if device is None else device
        position = len(self.operations)
        differentiates = in_backward()
        if differentiates and (number := number_of_node()) != self._node[0]:
            self._node = number, position
        for value in tensors_in(args):
            self._note_use(value, position, differentiates)
        if kwargs:
            for value in tensors_in(kwargs.values()):
                self._note_use(value, position, differentiates)
        if func._schema.is_mutable:
            self._note_writes(written_by(func, args, kwargs or {}))
        if func is _SAME_STORAGE and not self.gave_tangents:
            self.gave_tangents = any(one.category == INPUTS for one in self.allocations_of(args))
        if differentiates and func is _ADD and isinstance(args[1], torch.Tensor):
            self._note_accumulation(args[0], args[1])
        if self._limit is not None:
            self._stay_within(self._limit, func, args, kwargs or {})
        result = self._run(func, args, kwargs or {})
        if self._counts_fakes and func.overloadpacket in _ROOMY and result.dim() == 0:
            room = torch.empty(args[0].numel(), dtype=result.dtype, device=result.device)
            result = room.as_strided((), ())
        self.operations.append(func.overloadpacket.__name__)
        for value in tensors_in(result if isinstance(result, (tuple, list)) else (result,)):
            self._see(value, position, ACTIVATIONS)
        if func in _PRODUCTS:
            self._product = position, _calls()
        elif func is _SUM and isinstance(args[1], torch.Tensor):
            self._note_sum(args[0], args[1], result, position)
        if self._limit is not None and self._current - self._away > self._limit:
            raise OverBudget(self._current)
        return result

    def _note_sum(self, first: torch.Tensor, added: torch.Tensor, total: torch.Tensor, position: int) -> None:
        """Notes a sum that without a mode torch writes into its first term, which it holds alone.

        That is a gradient to which that of another use is added, between two nodes of a backward, and the product in a
        linear layer whose input is not contiguous, to which the same call of torch's adds the bias.
        """
        old = self.allocations_of([first])
        if in_backward() and not torch.is_grad_enabled():
            caller = _caller()
            is_engine = caller is None or caller.f_code.co_filename == _ENGINE
            # A view, such as the gradient of a weight that a linear layer transposes, holds its base, too.
            is_in_place = is_engine and not first._is_view() and any(one.born < self._node[1] for one in old)
        else:
            product, calls = self._product
            is_in_place = added.dim() == 1 and product >= position - 2 and calls == _calls()
        if is_in_place:
            self.sums += zip(old, self.allocations_of([total]), strict=False)

    def _stay_within(self, limit: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Looks near the limit at what an operation is going to make, by shapes alone.

        From tensors of one shape it hardly makes more than twice their bytes; from others up to the product of their
        sizes, and from none any number.
        """
        given = [one for one in tensors_in(args) if one.layout is torch.strided and not one.is_nested]
        near = 2 * sum(one.nbytes for one in given) if given else limit + 1
        if len({one.shape for one in given}) > 1:
            near = max(near, 8 * math.prod(sorted(one.numel() for one in given)[-2:]))
        device = torch.device(kwargs.get("device") or (given[0].device if given else "cpu"))
        makes_none = any(one.alias_info is not None for one in func._schema.returns)
        here = self._current - self._away
        if (here + near <= limit and not self.foresees) or makes_none or self._device_type not in (None, device.type):
            return
        try:  # a loop over time steps asks the same again and again
            key = func, _layouts(args), _layouts(kwargs.items())
            if key not in self._makes:
                self._makes[key] = _bytes_made(func, args, kwargs)
            makes = self._makes[key]
        except Exception:  # noqa: BLE001 - it needs numbers, and is looked at afterwards
            return
        if self.foresees:
            self.most = max(self.most, self._current + makes)
        if here + makes > limit:
            raise OverBudget(self._current + makes)

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        below = current_mode()
        return below.result_of(func, args, kwargs) if type(below) is QuickFakeMode else func(*args, **kwargs)

    def _note_writes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes what was there before and is written to, also through ``.data``, which counts no version."""
        for one in self.allocations_of(tensors):
            if one.category == INPUTS:
                self.wrote_inputs = True
            elif one.born == BEFORE and one.category in (PARAMETERS, OTHER):
                self._written[id(one)] = one

    @property
    def bytes_written_elsewhere(self) -> int:
        """The bytes of weights, and of what else was there before besides buffers and gradients, written to."""
        return sum(one.size for one in self._written.values())

    def _note_use(self, tensor: torch.Tensor, position: int, differentiates: bool) -> None:
        for storage in storages_of(tensor):
            found = self._alive.get(storage._cdata)
            if found is None:
                category = PARAMETERS if isinstance(tensor, torch.nn.Parameter) else OTHER
                # A lone number was most likely made of a Python number right now, which no mode is shown.
                self._see(tensor, BEFORE if tensor.dim() else position, category)
            elif differentiates and found[1].back is None:
                found[1].back = position

    def _note_accumulation(self, gradient: torch.Tensor, new: torch.Tensor) -> None:
        found, added = self.allocations_of([gradient]), self.allocations_of([new])
        if found and added and found[0].category == GRADIENTS:
            self.accumulated.append((found[0], added[0]))
            if new.layout is torch.sparse_coo and gradient.layout is torch.strided:
                self.made_dense.append(found[0])

    def _see(self, tensor: torch.Tensor, born: int, category: str, *, counted: bool = True) -> None:
        if self._device_type is not None and tensor.device.type != self._device_type:
            return
        for storage in storages_of(tensor):
            if not self._counts_fakes and storage.device.type == "meta":
                continue
            key, size = storage._cdata, -(-storage.nbytes() // self._granularity) * self._granularity
            known = self._alive.get(key)
            if known is not None:
                if known[1].size == size or known[1].is_fixed:
                    continue
                known[1].died = max(born, 0)  # it was resized
                self._current -= known[1].size
                del self._alive[key]
            allocation = self.add(Allocation(born, size if counted else 0, category, is_fixed=not counted))
            self.hold(allocation, storage, is_here=True)

    def add(self, allocation: Allocation) -> Allocation:
        """Counts a storage, which lies elsewhere until it is held here."""
        self.allocations.append(allocation)
        self._current += allocation.size
        self._away += allocation.size
        self.most = max(self.most, self._current)
        return allocation

    def hold(self, allocation: Allocation, holder: Any, *, is_here: bool) -> None:
        """Counts a storage as alive as long as this one of its holders is: itself, or a copy of it."""
        key = holder._cdata if is_here else -id(holder)
        self._away -= allocation.size * (is_here and not allocation.here)
        self.most_here = max(self.most_here, self._current - self._away)
        allocation.holders += 1
        allocation.here += is_here
        self._alive[key] = (weakref.ref(holder, self._forgetting(key, allocation, is_here=is_here)), allocation)

    def _forgetting(self, key: int, allocation: Allocation, *, is_here: bool) -> Callable[[object], None]:
        # A cycle would leave the weak references to the collector of garbage; Python 3.11 crashes if it takes them
        # while the storage that they refer to is going.
        own = weakref.ref(self)

        def forget(_: object) -> None:
            recording = own()
            if recording is None:
                return
            allocation.holders -= 1
            allocation.here -= is_here
            is_known = key in recording._alive and recording._alive[key][1] is allocation
            if is_known:
                del recording._alive[key]
                recording._away += allocation.size * (is_here and not allocation.here)
            if allocation.holders:
                return
            if not recording._is_over:
                allocation.died = len(recording.operations)
            if is_known:
                recording._current -= allocation.size
                recording._away -= allocation.size

        return forget

    def end(self) -> None:
        """Nothing that goes from now on is written down."""
        self._is_over = True

    @property
    def has_survivors(self) -> bool:
        """Whether something without numbers, or made by an operation, is still alive; is asked after the end."""
        alive = ((reference(), allocation) for reference, allocation in self._alive.values())
        return any(
            storage is not None and (allocation.born != BEFORE or storage.device.type == "meta")
            for storage, allocation in alive
        )

    @property
    def bytes_made(self) -> int:
        """The bytes that operations made and that are still alive."""
        return sum(one.size for one in self.alive_after(self.now) if one.born != BEFORE)

    def live_bytes(self) -> list[int]:
        """The bytes that were alive after each operation."""
        steps = [0] * (len(self.operations) + 2)
        for allocation in self.allocations:
            steps[max(allocation.born, 0)] += allocation.size
            if allocation.died is not None:
                steps[max(allocation.died, 0)] -= allocation.size
        live, total = [], 0
        for step in steps[: len(self.operations)]:
            total += step
            live.append(total)
        return live

    def by_category(self, position: int | None = None) -> dict[str, int]:
        """The bytes that were alive after an operation, by what they are for."""
        found: dict[str, int] = {}
        for one in self.alive_after(len(self.operations) if position is None else position):
            found[one.category] = found.get(one.category, 0) + one.size
        return found

    def alive_after(self, position: int) -> Iterator[Allocation]:
        """What had bytes after an operation."""
        for one in self.allocations:
            if one.size and one.born <= position and (one.died is None or one.died > position):
                yield one

    def memory(self) -> Memory:
        """What was alive at the peak and is alive now."""
        live, at_end = self.live_bytes(), self.by_category()
        if not live:
            total = sum(at_end.values())
            return Memory(total, total, at_end, at_end)
        peak = max(range(len(live)), key=live.__getitem__)
        return Memory(live[peak], sum(at_end.values()), self.by_category(peak), at_end, self.operations[peak])


def _layouts(values: Iterable[Any]) -> tuple[Any, ...]:
    """Arguments of an operation as far as they decide what it makes; numbers with their type, since 1 equals 1.0."""
    return tuple(
        (tuple(one.shape), one.stride(), one.dtype) if isinstance(one, torch.Tensor)
        else _layouts(one) if isinstance(one, (list, tuple)) else (type(one), one)
        for one in values
    )  # fmt: skip


def _bytes_made(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The bytes of what an operation gives, by shapes alone."""
    own = map_leaves(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, [*args])
    on_meta = {"device": "meta"} if any(one.name == "device" for one in func._schema.arguments) else {}
    made = func(*own, **{**kwargs, **on_meta})
    return sum(one.nbytes for one in tensors_in(made if isinstance(made, (tuple, list)) else (made,)) if one.is_meta)


def _caller() -> FrameType | None:
    """Who called an operation; ``None`` for a thread of torch's own."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    return frame


def _calls() -> list[tuple[object, int]]:
    """Where Python is in each function that was called: operations at the same places are of one call of torch's."""
    found: list[tuple[object, int]] = []
    frame = _caller()
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def resident_bytes() -> int:
    """The memory of this process that is in RAM; 0 where the system does not say."""
    import psutil

    try:
        return int(_process(os.getpid()).memory_info().rss)
    except (psutil.Error, OSError):
        return 0


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> Any:
    """Kept from call to call, since making it reads seven times as much of the system as asking it."""
    import psutil

    return psutil.Process(pid)
