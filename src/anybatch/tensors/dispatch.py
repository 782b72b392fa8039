"""The one place that names torch's private module for modes that see every operation."""

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_mode

__all__ = ["TorchDispatchMode", "current_mode", "without_modes"]
