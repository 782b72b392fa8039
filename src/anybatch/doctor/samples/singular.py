"""What went into an operation that has no finite value for it."""

import math
from typing import Any

import torch

from anybatch.doctor.samples.lossgraphs import shape_of
from anybatch.doctor.samples.nodes import saved_by

_LOGARITHMS = ("LogBackward0", "Log2Backward0", "Log10Backward0")
_SPREADS = ("StdBackward0", "VarBackward0", "StdMeanBackward0", "VarMeanBackward0")
_NORMS = ("NativeLayerNormBackward0", "NativeBatchNormBackward0", "NativeGroupNormBackward0")
_MEAN = 1  # of a loss function: the number of its reduction


def what_went_in(node: Any) -> str:
    """Zeros, negative numbers and the like in the saved input of a node, which has no finite value for them.

    Empty if nothing of the kind is known; then its input was not saved, or it was harmless.
    """
    kind = node.name()
    if kind.startswith("NllLoss"):
        return _of_targets(node)
    if kind in _LOGARITHMS:
        return _counted(node, "self", "its input")
    if kind == "Log1PBackward0":
        return _counted(node, "self", "its input plus 1", shift=1.0)
    if kind in ("DivBackward0", "RemainderBackward0"):
        return _counted(node, "other", "its divisor", negative=False)
    if kind in ("PowBackward0", "PowBackward1"):
        exponent = getattr(node, "_saved_exponent", 2)
        whole = isinstance(exponent, (int, float)) and float(exponent).is_integer()
        if isinstance(exponent, (int, float)) and (exponent < 0 or not whole):
            return _counted(node, "self", "its base", negative=not whole, zeros=exponent < 0)
    if kind in ("AcosBackward0", "AsinBackward0"):
        outside = sum(int((tensor.abs() > 1).sum()) for name, tensor in saved_by(node) if name == "self")
        return f"its input has {outside} numbers outside of -1 to 1" if outside else ""
    if kind in _SPREADS:
        return _of_too_few(node)
    if kind.startswith("MeanBackward") and getattr(node, "_saved_self_sym_numel", 1) == 0:
        return "it is the mean of nothing: its input has no entries"
    return ""


def what_came_out(node: Any) -> str:
    """What the saved output of a node says of its input, if that was finite; empty if it says nothing."""
    kind = node.name()
    out = [tensor for name, tensor in saved_by(node) if name.startswith("result") and tensor.is_floating_point()]
    if not out or out[0].is_complex():
        return ""
    lost, endless = int(out[0].isnan().sum()), int((out[0] == math.inf).sum())
    if kind in ("SqrtBackward0", "RsqrtBackward0") and lost:
        return f"its input has {_numbers(lost, 'negative number')}"
    if kind in ("RsqrtBackward0", "ReciprocalBackward0") and (zeros := int(out[0].isinf().sum())):
        return f"its input has {_numbers(zeros, 'zero')}"
    if kind in ("ExpBackward0", "Exp2Backward0") and endless and not lost:
        return f"{_numbers(endless, 'number')} of its input {'are' if endless > 1 else 'is'} too large for it"
    if kind in ("SoftmaxBackward0", "LogSoftmaxBackward0") and lost:
        dim = int(getattr(node, "_saved_dim", -1))
        dim = dim if -out[0].dim() <= dim < out[0].dim() else -1
        rows = out[0].isnan().all(dim)
        return f"{int(rows.sum())} of its {rows.numel()} rows have no score above -inf" if bool(rows.any()) else ""
    if kind in _NORMS and not bool(out[-1].isfinite().all()):
        return "what it divides by is 0: a row or a channel of its input has no spread, and its eps is too small"
    return ""


def overflows(node: Any) -> str:
    """Whether a product of finite tensors that were saved is not finite."""
    kind, known = node.name(), dict(saved_by(node))
    one = known.get("self", known.get("mat1"))
    if one is None or not one.is_floating_point() or not bool(one.isfinite().all()):
        return ""
    exponent = getattr(node, "_saved_exponent", None)
    if kind == "PowBackward0" and isinstance(exponent, (int, float)):
        made = one.pow(exponent)
    elif kind == "MulBackward0" and "other" in known:
        made = one * known["other"]
    elif kind in ("MmBackward0", "BmmBackward0", "AddmmBackward0") and "mat2" in known:
        made = one @ known["mat2"]
    else:
        return ""
    other = known.get("other", known.get("mat2", one))
    if not bool(other.isfinite().all()) or bool(made.isfinite().all()):
        return ""
    largest = ", ".join(f"{float(tensor.abs().max()):.3g}" for tensor in (one, other))
    return f"it overflows: the largest numbers that went in are {largest}"


def _of_targets(node: Any) -> str:
    """Where it is a mean over none; a sum, or a loss for each target, has a value then."""
    if int(getattr(node, "_saved_reduction", _MEAN)) != _MEAN:
        return ""
    for name, tensor in saved_by(node):
        if name == "total_weight" and float(tensor.sum()) == 0.0:
            return "none of its targets counts: all are ignored, or their weights are 0"
    return ""


def _of_too_few(node: Any) -> str:
    made = shape_of(node)
    size = next((tensor.numel() for name, tensor in saved_by(node) if name == "self"), 0)
    correction = getattr(node, "_saved_correction", None)
    count = size // max(1, math.prod(made)) if made is not None else 0
    if not count or count > (1 if correction is None else correction):
        return ""
    return f"it is the spread of {_numbers(count, 'value')}, which needs one more"


def _numbers(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _counted(node: Any, name: str, what: str, *, shift: float = 0.0, negative: bool = True, zeros: bool = True) -> str:
    none = below = 0
    for saved, tensor in saved_by(node):
        if saved == name and not tensor.is_complex():
            none += int((tensor + shift == 0).sum()) if zeros else 0
            below += int((tensor + shift < 0).sum()) if negative else 0
    parts = [_numbers(none, "zero")] if none else []
    parts += [_numbers(below, "negative number")] if below else []
    return f"{what} has {' and '.join(parts)}" if parts else ""


def is_moderate(tensor: torch.Tensor) -> bool:
    """Whether sums of products of such numbers stay far from the largest number that their type holds."""
    if not tensor.is_floating_point():
        return True
    limit: float = torch.finfo(tensor.dtype).max ** 0.4
    return float(tensor.abs().max()) <= limit
