"""Which operation makes nan or inf where none with a gradient did: of a target, a weight or an input that is prepared.

Once a loss is no number because of such a value, the steps that follow are looked at. Where the cause lies in how the
data are prepared, it is mostly met again within a few batches.
"""

import math
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from anybatch.doctor.ask.tape import kind_named
from anybatch.doctor.recording.modes import SafeMode
from anybatch.doctor.recording.patches import hidden
from anybatch.doctor.seeing import name_of
from anybatch.doctor.values import tensors_in
from anybatch.tensors.dispatch import unseen
from anybatch.userlines import user_place

_MOST_STEPS = 100
_TO_INF = frozenset({"log", "log2", "log10", "log1p", "logit", "div", "reciprocal", "exp", "expm1", "pow", "rsqrt"})
_NOT_FILLED = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "resize_", "from_numpy", "tensor"})


class Broken(NamedTuple):
    """An operation without a gradient whose result has nan, or inf, and whose inputs have none."""

    op: str
    file: str
    line: int
    entries: int  # that are no numbers
    of: int
    least: float  # of the numbers of the last operand: of a division that is the divisor
    most: float


class FirstNan(SafeMode):
    """Looks for such an operation, of which the result meets what has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0  # steps that are still looked at
        self.value = "nan"
        self.found: Broken | None = None
        # what was made by one, or of that
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], Broken]] = {}

    def look(self, value: str) -> None:
        """Looks for ``"nan"``, or else for infinity, from the next call of a model on."""
        self.left, self.value = _MOST_STEPS, "nan" if value == "nan" else "inf"

    def stepped(self) -> bool:
        """Is notified of a step; whether it was the last."""
        self.left = 0 if self.found or self.failed else max(0, self.left - 1)
        self._made.clear()
        return not self.left

    @unseen
    def before(self, func: Any, args: Any, kwargs: Any) -> tuple[str, list[torch.Tensor], Broken | None] | None:
        """What it is given, where that is all numbers, or was made by what was not."""
        name, given = kind_named(name_of(func)[0]), _floats((args, kwargs))
        has_gradient = any(one.requires_grad for one in given)
        cause = next((made for one in given if (made := self._cause(one)) is not None), None)
        if cause is not None and has_gradient and torch.is_grad_enabled() and self.found is None:
            self.found = cause
        is_asked = name not in _NOT_FILLED and (self.value == "nan" or name in _TO_INF)
        if has_gradient or self.found is not None or (cause is None and not is_asked):
            return None
        return (name, given, cause) if cause is not None or not any(map(self._is_bad, given)) else None

    @unseen
    def after(self, begun: tuple[str, list[torch.Tensor], Broken | None], result: Any) -> None:
        """Looks at what it gave."""
        name, given, cause = begun
        for bad in [one for one in _floats(result) if not one.requires_grad and self._is_bad(one)]:
            if cause is None:
                limits = (math.nan, math.nan)
                if given and not name.endswith("_"):  # which has written over it
                    limits = float(given[-1].min()), float(given[-1].max())
                cause = Broken(name, *user_place(3), int(self._bad(bad).sum()), bad.numel(), *limits)
            self._made[id(bad)] = weakref.ref(bad), cause

    def _cause(self, tensor: torch.Tensor) -> Broken | None:
        known = self._made.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor and self._is_bad(tensor) else None

    def _bad(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.isnan() if self.value == "nan" else tensor.isfinite().logical_not()

    def _is_bad(self, tensor: torch.Tensor) -> bool:
        return bool(self._bad(tensor).any())


hidden(FirstNan.__torch_function__)


def _floats(value: Any) -> list[torch.Tensor]:
    found: Iterable[torch.Tensor] = tensors_in(value)
    return [one for one in found
            if one.is_floating_point() and one.layout is torch.strided and one.numel() and not one.is_meta]  # fmt: skip
