"""Model replicas on several processes: checks that they are equal, and disables their own communication."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from anybatch.errors import AnyBatchError
from anybatch.tensors.modules import modules_of
from anybatch.tensors.shards import is_sharded

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 2**20


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to a module itself."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def names_of(model: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> list[str]:
    """The names of parameters, for messages."""
    known = {id(p): name for name, p in model.named_parameters()}
    return [known.get(id(p), f"parameter {i} of the optimizer") for i, p in enumerate(parameters)]


def fingerprints(tensors: Sequence[torch.Tensor | None]) -> list[str]:
    """A fingerprint of the bits of each tensor, as a short text.

    Args:
        tensors: dense, or ``None``; of those that lie on several processes only the form is compared.

    Example:
        >>> one, other, same = fingerprints([torch.tensor(numbers) for numbers in ([1.0, 2.0], [2.0, 1.0], [1.0, 2.0])])
        >>> one == other, one == same
        (False, True)
    """
    sums = [
        None if tensor is None or tensor.numel() == 0 or is_sharded(tensor) else _sum_of_bits(tensor.detach())
        for tensor in tensors
    ]
    texts = []
    for tensor, number in zip(tensors, sums, strict=True):
        kind = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
        texts.append(f"{kind} {0 if number is None else int(number)}")
    return texts


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start, part in zip(range(0, bits.numel(), _AT_ONCE), bits.split(_AT_ONCE), strict=True):
        odd = torch.arange(2 * start + 1, 2 * (start + part.numel()), 2, device=bits.device)
        total += (part * odd).sum()  # integers wrap around, in whatever order they are added
    return total


def joined(texts: Sequence[str]) -> str:
    """One text for many."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:32]


def check_model(model: torch.nn.Module) -> None:
    """Refuses models whose own communication can't be disabled.

    Raises:
        AnyBatchError: it is sharded, or its wrapper counts backwards.
    """
    for module in modules_of(model):
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if "FullyShardedDataParallel" in kinds:
            raise AnyBatchError(
                f"{type(module).__name__} is sharded by FSDP1 (FullyShardedDataParallel), which communicates within "
                "every forward in a way that can't be taken in hand; use FSDP2, torch.distributed.fsdp.fully_shard"
            )
        if isinstance(module, DistributedDataParallel) and getattr(module, "static_graph", False):
            raise AnyBatchError(
                "DistributedDataParallel(static_graph=True) counts on a reduction in its first backward, and fails "
                "later if the first step accumulates; leave static_graph out, which anybatch has no use for, since it "
                "sums gradients itself, once a step"
            )
    is_by_fsdp = any(is_fully_sharded(module) for module in modules_of(model))
    if not is_by_fsdp and any(is_sharded(parameter) for parameter in model.parameters()):
        raise AnyBatchError(
            "a parameter is a DTensor, which lies on several ranks, and fully_shard did not make it; this version "
            "works with DistributedDataParallel, fully_shard, and plain modules that are equal on all ranks"
        )


def group_behind(model: torch.nn.Module) -> Any:
    """The process group of a DistributedDataParallel in a model, ``None`` if there is none."""
    return next((m.process_group for m in modules_of(model) if isinstance(m, DistributedDataParallel)), None)


def bucket_bytes(modules: Iterable[torch.nn.Module]) -> int:
    """The bytes of the buckets that every DistributedDataParallel takes when it is made."""
    wrappers = [module for module in modules_of(*modules) if isinstance(module, DistributedDataParallel)]
    return sum(p.nbytes for wrapper in wrappers for p in wrapper.module.parameters() if p.requires_grad)


@contextmanager
def apart(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Disables the communication of DistributedDataParallel, in forward and backward."""
    with ExitStack() as stack:
        for module in modules_of(*modules):
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
                # True until the first forward that is not synchronised, which would still send buffers around.
                stack.callback(setattr, module, "require_forward_param_sync", module.require_forward_param_sync)
                module.require_forward_param_sync = False
        yield
