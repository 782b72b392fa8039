"""BatchNorm that ``torch.jit`` compiled, which takes no hooks and so can't be split in any way."""

from collections.abc import Mapping
from typing import Any

from anybatch.errors import NotSplittable
from anybatch.tensors.modules import is_scripted

_TRAINING = 5  # which input of the operation it is


def couples_compiled(module: Any) -> bool:
    """Whether a compiled module is BatchNorm that normalises by the samples that run together.

    A trace keeps the mode in which it was made, whatever ``eval()`` says later.

    Args:
        module: any.

    Example:
        >>> import torch
        >>> couples_compiled(torch.nn.BatchNorm1d(3)), couples_compiled(torch.jit.script(torch.nn.BatchNorm1d(3)))
        (False, True)
    """
    if not is_scripted(module) or not _is_batch_norm(getattr(module, "original_name", "")):
        return False
    traced = _mode_in_trace(module)
    if traced is not None:
        return traced
    return bool(getattr(module, "training", False)) or getattr(module, "running_mean", None) is None


def _is_batch_norm(name: str) -> bool:
    return "BatchNorm" in name and not name.startswith("Frozen")


def _mode_in_trace(module: Any) -> bool | None:
    try:
        nodes = list(module.graph.findAllNodes("aten::batch_norm"))
        modes = [list(node.inputs())[_TRAINING].toIValue() for node in nodes]
    except (AttributeError, RuntimeError, IndexError):
        return None
    known = [bool(mode) for mode in modes if mode is not None]
    return any(known) if known else None


def refuse_compiled(modules: Mapping[str, Any], micro_batches: int, *, is_frozen: bool = False) -> None:
    """Refuses to split a batch that goes through such modules, or to freeze them.

    Args:
        modules: those that couple samples, by name.
        micro_batches: how many there are.
        is_frozen: whether they are to be normalised by their running statistics.

    Raises:
        NotSplittable: there are some.
    """
    names = [name for name, module in modules.items() if is_scripted(module)]
    if names and (micro_batches > 1 or is_frozen):
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise NotSplittable(
            f"{listed} is BatchNorm in training mode that torch.jit compiled: it normalises by the samples that run "
            f"together, here in {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}, and takes no hooks, "
            'which batch_norm="ghost" and "frozen" need. Run the whole batch at once with batch_norm="refuse" (leave '
            "micro_batch_size out); pass the model before torch.jit, with batch_norm=; or compile it in evaluation "
            "mode (model.eval()), in which it couples no samples",
            modules=names,
        )
