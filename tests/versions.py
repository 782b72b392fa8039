"""What the older of the supported versions of torch lack, as marks that skip a test with the reason."""

import pytest
import torch

_SAVED = torch.ones(1, requires_grad=True).exp().grad_fn._raw_saved_result  # type: ignore[union-attr]

SHOWS_SAVED_TENSORS = hasattr(_SAVED, "unpack_hook")
SHOWS_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")

saved_tensors = pytest.mark.skipif(
    not SHOWS_SAVED_TENSORS, reason="this torch (2.6 is one) does not tell a saved tensor from one given to hooks"
)
hooks_on_saved_tensors = pytest.mark.skipif(
    not SHOWS_HOOKS, reason="this torch (2.6 is one) does not show the hooks on saved tensors of a thread"
)
device_allocators = pytest.mark.skipif(
    not hasattr(torch.accelerator, "memory_allocated"), reason="this torch (2.6 is one) has no allocators of devices"
)
