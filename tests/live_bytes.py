"""A count of live bytes of its own, that does not share its code with what it judges but for what a storage is."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from anybatch.memory.meter import storages_of
from anybatch.tensors.dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors within its block, each storage once.

    Args:
        tensors: what is alive already and counts, such as weights and the batch.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0  # bytes that are alive now
        self.peak = 0  # the most that were alive after any operation
        self._alive: dict[int, list[Any]] = {}
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation and looks at what it gave."""
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self._add(value)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        for storage in storages_of(tensor):
            key, size = storage._cdata, storage.nbytes()
            if storage.device.type == "meta":
                continue
            known = self._alive.get(key)
            if known is None:
                self._alive[key] = [size, weakref.ref(storage, self._forgetting(key))]
                self.current += size
            elif known[0] != size:  # it was resized
                self.current += size - known[0]
                known[0] = size
            self.peak = max(self.peak, self.current)

    def _forgetting(self, key: int) -> Callable[[object], None]:
        # A cycle would leave the weak references to the collector of garbage; Python 3.11 crashes if it takes them
        # while the storage that they refer to is going.
        own = weakref.ref(self)

        def forget(_: object) -> None:
            live = own()
            if live is not None:
                live.current -= live._alive.pop(key)[0]

        return forget
