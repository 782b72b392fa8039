"""The one place that names torch's private module for modes that see every operation."""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
