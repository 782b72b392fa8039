"""The memory of this process."""

import sys
from pathlib import Path

_PROCESS = Path("/proc/self/status")


def resident_bytes() -> int | None:
    """The resident memory of this process in bytes, or without ``/proc`` the most it ever held; ``None`` if unknown."""
    if _PROCESS.exists():
        for line in _PROCESS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
