"""A pass whose saved tensors lie elsewhere until its backward reads them, so that what it would hold is known.

On the CPU they lie in a file, else in host memory. A recording counts them as if they were still there.
"""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from anybatch.accelerators import free_bytes
from anybatch.memory.meter import BEFORE, Allocation, Recording
from anybatch.memory.offloading import is_plain
from anybatch.tensors.dispatch import without_modes


class Spilling:
    """Lets nothing stay that waits for a backward, nor gradients that were added to others.

    Example:
        >>> weight = torch.ones(100, requires_grad=True)
        >>> recording = Recording()
        >>> with recording, Spilling(recording, []):
        ...     (weight * 2).square().sum().backward()
        >>> recording.most > 1000, weight.grad.sum()
        (True, tensor(800.))
    """

    def __init__(self, recording: Recording, gradients: Sequence[tuple[torch.Tensor, Allocation]]) -> None:
        self._recording, self._gradients = recording, gradients
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._copies: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()
        recording.foresees = True

    def __enter__(self) -> None:
        with ExitStack() as stack:
            self._file = stack.enter_context(tempfile.TemporaryFile())
            self._room = min(shutil.disk_usage(tempfile.gettempdir()).free, free_bytes(torch.device("cpu"))) // 2
            for parameter, allocation in self._gradients:
                handle = parameter.register_post_accumulate_grad_hook(self._adding_to(allocation))
                stack.callback(handle.remove)
            stack.enter_context(self._hooks)
            self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _adding_to(self, earlier: Allocation) -> Callable[[torch.Tensor], None]:
        def add(parameter: torch.Tensor) -> None:
            self._recording.accumulated += [(earlier, new) for new in self._recording.allocations_of([parameter.grad])]
            parameter.grad = None

        return add

    def _pack(self, tensor: torch.Tensor) -> "Callable[[], torch.Tensor] | torch.Tensor":
        with without_modes():
            made = [one for one in self._recording.allocations_of([tensor]) if one.born != BEFORE and one.size]
            if not is_plain(tensor) or not made:
                return tensor.detach()
            held = made[0]
            storage = tensor.untyped_storage()
            copy = self._copies.get(storage._cdata)
            if copy is None or not copy.is_of(storage, tensor._version):
                self._room -= storage.nbytes()
                if self._room < 0:  # a file may lie in host memory, and others need both
                    raise OSError("there is no room for what is saved")
                copy = _Copy(storage, tensor._version, held, self._recording, self._file)
                self._copies[storage._cdata] = copy
                self._recording.hold(held, copy, is_here=False)
            view = tensor.storage_offset(), tensor.size(), tensor.stride()
            return partial(copy.tensor, tensor.dtype, view)


def _unpack(packed: Callable[[], torch.Tensor] | torch.Tensor) -> torch.Tensor:
    return packed if isinstance(packed, torch.Tensor) else packed()


class _Copy:
    """A storage elsewhere."""

    def __init__(
        self, storage: torch.UntypedStorage, version: int, allocation: Allocation, recording: Recording, file: Any
    ) -> None:
        self._allocation, self._recording, self._file = allocation, recording, file
        self._here, self._version = weakref.ref(storage), version
        self._size, self._device, self._kept = storage.nbytes(), storage.device, None
        if storage.device.type == "cpu":
            buffer = bytearray(self._size)
            torch.frombuffer(buffer, dtype=torch.uint8).copy_(_bytes_of(storage))
            self._place = file.seek(0, 2)
            file.write(buffer)
        else:
            self._kept = storage.cpu()

    def is_of(self, storage: torch.UntypedStorage, version: int) -> bool:
        """Whether this is what the storage holds now."""
        return self._here() is storage and self._version == version

    def tensor(self, dtype: torch.dtype, view: Any) -> torch.Tensor:
        """Brings a saved tensor back, which lay in the storage so."""
        with without_modes():
            storage = self._storage()
            return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *view)

    def _storage(self) -> torch.UntypedStorage:
        """The storage, or one like it if that is gone."""
        found = self._here()
        if found is None:
            if self._kept is None:
                buffer = bytearray(self._size)
                self._file.seek(self._place)
                self._file.readinto(buffer)
                found = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
            else:
                found = torch.UntypedStorage(self._size, device=self._device).copy_(self._kept)
            self._here = weakref.ref(found)
            self._recording.hold(self._allocation, found, is_here=True)
        return found


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
