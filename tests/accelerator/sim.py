"""The test accelerator "sim": two devices in host memory with a hard limit of bytes, behind PrivateUse1.

``load()`` builds it once with the machine's C++ compiler (about a minute) and registers it with torch.
"""

import functools
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import types
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration

SOURCE = Path(__file__).with_name("sim.cpp")
_NAME = "anybatch_sim"


def _built() -> Path:
    """The compiled library; it is kept by what it was made from."""
    from torch.utils import cpp_extension

    include = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    flags = ["-std=c++17" if torch.__version__ < "2.10" else "-std=c++20", "-O1", "-fPIC", "-shared", "-w"]
    abi = int(torch.compiled_with_cxx11_abi())
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-DTORCH_EXTENSION_NAME={_NAME}"]
    key = hashlib.sha256(f"{torch.__version__} {sys.version} {flags}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "anybatch-tests"
    library = cache / f"sim-{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / "sim.so"
            links = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
            subprocess.run(["g++", *flags, *include, str(SOURCE), "-o", str(made), *links], check=True)
            made.replace(library)
    return library


@functools.cache
def load() -> Any:
    """Registers the devices ``sim:0`` and ``sim:1`` with torch.

    Returns:
        The extension: ``set_limit``, ``stats``, ``counters``, ``fail_at`` and others; see sim.cpp.
    """
    path = _built()
    loader = ExtensionFileLoader(_NAME, str(path))
    spec = spec_from_loader(_NAME, loader)
    assert spec is not None
    backend_registration.rename_privateuse1_backend("sim")
    own = module_from_spec(spec)
    loader.exec_module(own)
    torch._register_device_module("sim", _module(own))
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    return own


def _module(own: Any) -> types.ModuleType:
    """What torch asks of ``torch.sim``."""
    module = types.ModuleType("torch.sim")

    def index_of(device: Any) -> int:
        found = device if isinstance(device, int) else None if device is None else torch.device(device).index
        return int(own.current_device() if found is None else found)

    def counted(name: str) -> Any:
        return lambda device=None: own.stats(index_of(device))[name]

    entries = {
        "device": _current_device(own, index_of),
        "device_count": own.device_count,
        "current_device": own.current_device,
        "set_device": lambda device: own.set_device(index_of(device)),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "synchronize": lambda device=None: own.synchronize(),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "mem_get_info": lambda device=None: own.memory_info(index_of(device)),
        "memory_allocated": counted("allocated"),
        "max_memory_allocated": counted("peak_allocated"),
        "memory_reserved": counted("reserved"),
        "max_memory_reserved": counted("peak_reserved"),
        "reset_peak_memory_stats": lambda device=None: own.reset_peak(index_of(device)),
        "memory_snapshot": lambda: [one for index in range(own.device_count()) for one in _segments(own, index)],
        "set_per_process_memory_fraction": lambda share, device=None: _set_share(own, index_of(device), share),
        "empty_cache": own.empty_cache,
        "_initialized": True,  # without which torch.utils.checkpoint replays no draws of the device
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        **_draws(own, index_of),
    }
    for name, entry in entries.items():
        setattr(module, name, entry)
    return module


def _segments(own: Any, index: int) -> list[dict[str, Any]]:
    """As ``torch.cuda.memory_snapshot`` describes them."""
    return [
        {
            "device": index, "stream": stream, "segment_type": "small" if is_small else "large",
            "is_expandable": is_expandable, "address": address, "total_size": sum(size for size, _ in blocks),
            "blocks": [{"size": size, "state": "active_allocated" if used else "inactive"} for size, used in blocks],
        }
        for is_small, is_expandable, stream, address, blocks in own.snapshot(index)
    ]  # fmt: skip


def _set_share(own: Any, index: int, share: float) -> None:
    own.set_share(index, int(share * own.memory_info(index)[1]) if share < 1 else 0)


def _draws(own: Any, index_of: Any) -> dict[str, Any]:
    """What concerns the generators of the devices."""

    def generator(device: Any = None) -> torch.Generator:
        found: torch.Generator = own.default_generator(index_of(device))
        return found

    def manual_seed_all(seed: int) -> None:
        for index in range(own.device_count()):
            generator(index).manual_seed(seed)

    return {
        "manual_seed": lambda seed: generator().manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
    }


def _current_device(own: Any, index_of: Any) -> type:
    """What ``torch.cuda.device`` is for CUDA."""

    class CurrentDevice:
        def __init__(self, to: Any) -> None:
            self._to = index_of(to)

        def __enter__(self) -> None:
            self._before = own.current_device()
            own.set_device(self._to)

        def __exit__(self, *_: object) -> None:
            own.set_device(self._before)

    return CurrentDevice
