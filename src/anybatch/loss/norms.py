"""The norm of all gradients, and clipping by it."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from types import NoneType

import torch

from anybatch.tensors.shards import is_sharded, local_of


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The Euclidean norm of all gradients together, accumulated in at least float32.

    Args:
        gradients: dense tensors of any shapes; with sharded ones this is a collective call.
    """
    sharded = [one for one in gradients if type(one) is not torch.Tensor and is_sharded(one)]
    if sharded:
        import torch.distributed as dist

        square = total_norm([local_of(gradient) for gradient in sharded]).square()
        dist.all_reduce(square, group=sharded[0].device_mesh.get_group())  # type: ignore[attr-defined]
        parts = square.sqrt()
        plain = [gradient for gradient in gradients if not is_sharded(gradient)]
        return torch.hypot(parts, total_norm(plain).to(parts)) if plain else parts
    return _norm_of(_by_kind(gradients))


def _norm_of(by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]) -> torch.Tensor:
    if not by_kind:
        return torch.zeros((), device="cpu")
    home, norms = next(iter(by_kind))[0], list[torch.Tensor]()
    for (_, dtype), group in by_kind.items():
        if dtype in (torch.bfloat16, torch.float16):
            norms.extend(torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in group)
        else:
            norms.extend(torch._foreach_norm(group))
    if len(by_kind) > 1:
        widest = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
        norms = [norm.to(home, widest) for norm in norms]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _by_kind(gradients: Iterable[torch.Tensor | None]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            own = gradient if type(gradient) is torch.Tensor else local_of(gradient)
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(own)
    return by_kind


def clip_(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clips the gradients in place by their total norm, which it gives, without a device synchronization.

    The factor is ``max_norm / (norm + 1e-6)``, at most 1, as in ``torch.nn.utils.clip_grad_norm_``. An infinite
    ``max_norm`` scales nothing.
    """
    gradients = [*map(attrgetter("grad"), parameters)]
    is_plain = {torch.Tensor, NoneType}.issuperset(map(type, gradients))
    by_kind = _by_kind(gradients)
    norm = _norm_of(by_kind) if is_plain else total_norm([one for one in gradients if one is not None])
    if max_norm != float("inf") and by_kind:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for (device, _), group in by_kind.items():
            torch._foreach_mul_(group, factor.to(device))
    return norm
