"""Runs what may take the process down in a child first.

A kernel that somebody registered with torch may read the address of a tensor that has no numbers. Most are stopped by
an error of torch's; one that is not crashes the interpreter, which no ``except`` sees.
"""

import contextlib
import faulthandler
import functools
import logging
import mmap
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_LIMIT_SECONDS = 120.0
_POLL_SECONDS = 0.002
# What torch registers itself, up to 2.15, also in modules that are loaded later; names that begin with an underscore
# are its own.
_OWN_NAMESPACES = {
    "ao", "aten", "bucketing", "c10d", "c10d_functional", "coor", "cplib", "debug_mode_ops", "debugprims",
    "device_mesh", "export", "flex_gemm", "flex_lib", "fsdp", "inductor", "inductor_prims", "mempool", "mkl", "mkldnn",
    "mkldnn_prepacked", "onednn", "onnx", "onnx_symbolic", "pippy", "prim", "prims", "profiler", "quantization",
    "quantized", "quantized_decomposed", "rngprims", "semi_structured", "sparse", "static_runtime", "streams",
    "symm_mem", "torch_attn", "torch_vendor_quack", "triton",
}  # fmt: skip
_LINKED = (b"libtorch", b"libc10", b"torch_python")


def has_unknown_code() -> bool:
    """Whether operations or compiled modules are loaded that use torch and do not come with it."""
    names = {str(name).partition("::")[0] for name in getattr(torch.library, "_defs", ())} - _OWN_NAMESPACES
    return (
        any(not name.startswith("_") for name in names) or bool(torch.ops.loaded_libraries) or any(_foreign_modules())
    )


def _foreign_modules() -> Iterator[str]:
    """Compiled modules outside of torch that are linked to it."""
    own = Path(torch.__file__).parent
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and name.endswith((".so", ".pyd")):
            path = Path(name)
            if own not in path.parents and _is_linked(path):
                yield name


@functools.cache
def _is_linked(path: Path) -> bool:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return any(content.find(name) >= 0 for name in _LINKED)
    except (OSError, ValueError):
        return False


def can_fork() -> bool:
    """Whether a copy of this process can run torch.

    On macOS the system's own libraries do not survive a fork, CUDA nowhere does, and a fork in another thread than the
    first one copies locks that nobody opens.
    """
    is_first = threading.current_thread() is threading.main_thread()
    return sys.platform == "linux" and is_first and not torch.cuda.is_initialized()


def kills(work: Callable[[], object], *, limit: float = _LIMIT_SECONDS) -> str:
    """Runs something in a child, and says what signal ended it; empty if none did, or if it is not known.

    The child has one thread, so that it does not wait for those of torch, which are not copied. What it prints is lost.

    Args:
        work: what is run; an exception is no crash.
        limit: seconds after which the child is ended and nothing is known.

    Example:
        >>> kills(lambda: 1 / 0)
        ''
    """
    if not can_fork():
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside other threads, which are not needed here
        child = os.fork()
    if child == 0:
        _run_and_leave(work)
    status = _waited_for(child, limit)
    if status is None:
        logger.info("what ran in a child did not end within %.0f s, so nothing is known about it", limit)
        return ""
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""


def _run_and_leave(work: Callable[[], object]) -> None:
    try:
        nowhere = Path(os.devnull).open("r+")  # noqa: SIM115 - the process ends before it could be closed
        for stream in (0, 1, 2):
            os.dup2(nowhere.fileno(), stream)
        sys.stdin = sys.stdout = sys.stderr = nowhere
        logging.disable()
        faulthandler.disable()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        torch.set_num_threads(1)
        with contextlib.suppress(BaseException):
            work()
    finally:
        os._exit(0)


def _waited_for(child: int, limit: float) -> int | None:
    """How a child ended; ``None`` if it had to be ended. It does not outlive an exception either."""
    ends = time.monotonic() + limit
    is_gone = False
    try:
        while time.monotonic() < ends:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                is_gone = True
                return status
            time.sleep(_POLL_SECONDS)
        return None
    finally:
        if not is_gone:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
