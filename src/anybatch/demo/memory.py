"""How much memory tensors and this process hold."""

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from anybatch.tensors.dispatch import TorchDispatchMode

_PROCESS = Path("/proc/self/status")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors within its block, each storage once.

    What an operation allocates and frees within itself is not seen.

    Args:
        tensors: what is alive already and counts, such as weights and the batch.

    Attributes:
        current: bytes that are alive now.
        peak: the most that were alive after any operation.

    Example:
        >>> with LiveBytes() as live:
        ...     _ = torch.zeros(1000) + 1.0
        >>> live.peak
        8000
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
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
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def forget(_: object) -> None:
            del self._alive[key]
            self.current -= size

        self._alive[key] = weakref.ref(storage, forget)
        self.current += size
        self.peak = max(self.peak, self.current)


def resident_bytes(*, peak: bool = False) -> int | None:
    """Asks the system how much memory this process holds.

    Args:
        peak: the most it ever held instead of what it holds now.

    Returns:
        Bytes. Systems without ``/proc`` give the most it ever held in either case; ``None`` where none is known.
    """
    if _PROCESS.exists():
        field = "VmHWM:" if peak else "VmRSS:"
        for line in _PROCESS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
