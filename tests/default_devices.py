"""The default device of torch, set for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def default_device(device: str | None) -> Iterator[None]:
    """Sets the default device, and leaves nothing behind.

    Once it was set and taken back, ``torch.get_default_device`` of torch 2.6 fails, and so does whatever asks it later.
    """
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        forget_default_device()


def forget_default_device() -> None:
    """Leaves torch as if the default device had never been set."""
    context = torch._GLOBAL_DEVICE_CONTEXT
    if getattr(context, "device_context", torch) is None:
        del context.device_context
