"""The one place that names torch's private module for modes that see every operation."""

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = ["TorchDispatchMode", "without_modes"]
