"""Buffers that make no difference to a split yet, and do once they have moved on."""

from collections.abc import Callable
from itertools import product

import torch

from anybatch.checking.beginnings import announced
from anybatch.checking.causes import reason
from anybatch.checking.comparison import Case
from anybatch.checking.gradients import distance, relative
from anybatch.checking.isolation import is_flag
from anybatch.checking.rig import Outcome, Rig
from anybatch.records.certificates import Reason
from anybatch.tensors.spectral import power_iteration

_COUNTING = (torch.int32, torch.int64)  # others, such as marks of what is filled, are moved on as they are
_AHEAD = (0, 1, 10, 1000, 100_000)  # calls that a buffer is moved on by


class Buffers:
    """The buffers that a run has just moved, and the flags among all of them."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        own = {id(one) for module in rig.modules.values() for one in power_iteration(module)}
        names = {
            (id(module._buffers), inner): f"{name}.{inner}".strip(".")
            for name, module in reversed(rig.modules.items())  # the model's own name counts
            for inner, _ in module.named_buffers(recurse=False)
        }
        self._moved: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []  # with values before and after
        self._flags: list[tuple[str, torch.Tensor]] = []
        for home, inner, buffer, before in rig.isolation.buffer_values:
            name, now = names.get((id(home), inner), inner), home.get(inner)
            if id(buffer) in own or now is None or now.shape != before.shape:
                continue
            if is_flag(buffer):
                if not before.any():  # one that is set says that something was done, which would be done again
                    self._flags.append((name, buffer))
            elif not torch.equal(now, before):
                self._moved.append((name, buffer, before, now.detach().clone()))

    @property
    def is_count(self) -> bool:
        """Whether all that was moved are counts of the calls."""
        steps = [after - before for _, _, before, after in self._moved if after.numel() == 1]
        return len(steps) == len(self._moved) > 0 and all(float(one) == 1.0 for one in steps)

    def later(self, case: Case) -> Reason | None:
        """What makes a difference once the buffers have moved on, or a flag is another."""
        for turned, ahead in product((False, True) if self._flags else (False,), _AHEAD if self._moved else (0,)):
            if (turned or ahead) and (error := self._error(case, ahead, turned)):
                names = [name for name, *_ in (self._moved if ahead else self._flags)]
                cause = "later buffer" if ahead else "later flag"
                return reason(cause, names[0], {"buffers": names, "error": error})
        return None

    def _error(self, case: Case, ahead: int, turned: bool) -> float:
        """How far a split is off the whole from another state on; 0 where it is not, or does not run."""
        whole = case.attempt(fresh=False, loss_fn=self._from(ahead, turned))
        if not isinstance(whole, Outcome) or not whole.is_finite:
            return 0.0
        for parts in case.splits:
            split = case.attempt(parts, fresh=False, loss_fn=self._from(ahead, turned))
            if isinstance(split, Outcome):
                error = relative(distance(split.gradients, whole.gradients), max(whole.norm, case.whole.norm))
                if error > case.tolerance:
                    return error
        return 0.0

    def _from(self, ahead: int, turned: bool) -> Callable[..., object]:
        """The loss, of which the first micro-batch finds another state."""
        begun: list[bool] = []

        def begin() -> None:
            if begun:
                return
            begun.append(True)
            with torch.no_grad():
                for _, buffer, before, after in self._moved if ahead else ():
                    is_count = after.dtype in _COUNTING or (after.is_floating_point() and after.numel() == 1)
                    buffer.copy_(before + (after - before) * ahead if is_count else after)
                for _, flag in self._flags if turned else ():
                    flag.fill_(1)

        return announced(self._rig.task.loss_fn, begin, lambda: None, in_pieces=True)
