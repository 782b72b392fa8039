"""Finds where the first number that is not finite came from, and the line of the operation."""

import cmath
import math
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from anybatch.doctor.samples.flatcopies import plain
from anybatch.doctor.samples.norms import kept_of
from anybatch.doctor.samples.origins import Origin, hidden_rows, kind_of, origin_in, risky
from anybatch.records.samples import NonFinite
from anybatch.userlines import user_place

if TYPE_CHECKING:
    from anybatch.doctor.recording.numbering import Numbering

_MOST_NAMES = 8
_TRIED = 4  # gradients among which the smallest is looked at in each step


class NonFiniteWatch:
    """Looks at the loss in each step and at one gradient in sampled ones, and searches once when one is not finite.

    Of the gradients that were not looked at, weights and what the optimizer keeps tell in the next step, whose loss is
    not finite then.
    """

    def __init__(
        self, numbering: "Numbering", stepped: Callable[[], Any] = lambda: None,
        lines_of: Callable[[str], tuple[str, tuple[int, ...]]] = lambda op: ("", ()),
    ) -> None:  # fmt: skip
        self._numbering, self._stepped, self._lines_of = numbering, stepped, lines_of
        # gives the loss of the last backward, if it is still there; and the value of the last one that was finite
        self.last: tuple[Callable[[], Any], float | None] = lambda: None, None
        self._probes: dict[int, weakref.ref[torch.Tensor]] = {}
        self._hidden: Origin | None = None  # of the last backward, whose graph lets go of what it has saved
        self.found = False  # whether there was one

    def at_backward(self, loss: torch.Tensor, *, sampled: bool = True, scaled: bool = False) -> NonFinite | None:
        """Where a loss that is not finite came from, once in a run; one that a scaler had scaled may overflow."""
        if self.found or loss.numel() != 1 or (loss.device.type != "cpu" and not sampled):
            return None
        self.last = weakref.ref(loss), self.last[1]
        try:
            value = float(loss.item())
        except (RuntimeError, TypeError):  # on meta, complex, or of a transform
            return None
        if math.isfinite(value) or (scaled and math.isinf(value)):
            self.last = self.last[0], value
            with torch.no_grad():
                self._hidden = hidden_rows(loss.grad_fn) if sampled and loss.grad_fn is not None else None
            return None
        self.found = True
        with torch.no_grad():
            return self._of_forward(loss, "nan" if math.isnan(value) else str(value))

    def at_step(self, optimizer: Any, *, sampled: bool = True) -> NonFinite | None:
        """Where the first gradient that is not finite came from, once in a run; looks at one before each step."""
        if self.found:
            return None
        grad = self._probe(optimizer)
        if grad is None or (grad.device.type != "cpu" and not sampled):
            return None
        grad = grad.detach() if grad.requires_grad else grad
        if cmath.isfinite(grad.sum().item()):
            return None
        overflow = getattr(optimizer, "found_inf", None)  # of a scaler with a fused step, which will change nothing
        with torch.no_grad():
            if bool(grad.isfinite().all()) or (isinstance(overflow, torch.Tensor) and bool(overflow)):
                return None
            self.found = True
            return self._of_gradient(optimizer)

    def look_back(self) -> NonFinite | None:
        """Looks at weights at the end of a run, where the gradients of its last step were not looked at."""
        optimizer = self._stepped()
        if self.found or optimizer is None:
            return None
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with torch.no_grad():
            bad = self._bad(own)
            if not bad or not _came_with_gradients(bad, optimizer):
                return None
            self.found = True
            return self._of_gradients(None, bad, self.last[1], ("", 0), late=1)

    def _probe(self, optimizer: Any) -> torch.Tensor | None:
        """The gradient of a small early parameter, where what goes wrong in a backward arrives."""
        known = self._probes.get(id(optimizer))
        parameter = known() if known is not None else None
        if parameter is None or parameter.grad is None:
            own = (p for group in optimizer.param_groups for p in group["params"])
            tried = [p for p in own if p.grad is not None and plain(p.grad) is not None][:_TRIED]
            if not tried:
                return None
            parameter = min(tried, key=torch.Tensor.numel)
            self._probes[id(optimizer)] = weakref.ref(parameter)
        return plain(parameter.grad)

    def _of_forward(self, loss: torch.Tensor, value: str) -> NonFinite:
        file, line = user_place(3)
        bad = self._bad(parameter for _, parameter in self._numbering.tracked())
        before = self.last[1]
        if bad and before is not None and _came_with_gradients(bad, self._stepped()):
            return self._of_gradients(loss.grad_fn, bad, before, (file, line), late=1)
        names = [self._name(parameter) for parameter in bad[:_MOST_NAMES]]
        if names:
            return NonFinite(
                where="parameter", value=_kind_of(bad, value), module=names[0].rpartition(".")[0],
                parameters=tuple(names), detail=_rooted(self._stepped(), bad), file=file, line=line,
            )  # fmt: skip
        if loss.grad_fn is None:
            return NonFinite(where="forward", value=value, detail="the loss has no graph", file=file, line=line)
        origin = origin_in(loss.grad_fn)
        if origin is None:
            return NonFinite(where="forward", value=value, file=file, line=line)
        module, detail = self._told(origin)
        made_in, made_at = self._lines_of(origin.op)
        return NonFinite(
            where=origin.where, value=origin.value or value, module=module, op=origin.op, detail=detail, file=file,
            line=line, of_data=origin.of_data, made_in=made_in, made_at=made_at,
        )  # fmt: skip

    def _of_gradient(self, optimizer: Any) -> NonFinite:
        file, line = user_place(3)
        loss = self.last[0]()
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        bad = [p for p in own if p.grad is not None and (g := plain(p.grad)) is not None and not _finite(g)]
        number = float(loss.detach()) if loss is not None else None
        return self._of_gradients(None if loss is None else loss.grad_fn, bad, number, (file, line))

    def _of_gradients(
        self, start: Any, bad: list[torch.Tensor], loss: float | None, place: tuple[str, int], *, late: int = 0
    ) -> NonFinite:
        """Where gradients came from that are not finite, or weights that became so with them ``late`` steps ago."""
        seen = [values for p in bad if (values := plain(p if late else p.grad)) is not None]
        value = "nan" if any(kind_of(values) == "nan" for values in seen) else "inf"
        parameters = {id(parameter): parameter for parameter in bad}
        origin, order = risky(start, parameters, late=late > 0)
        if self._hidden is not None and (origin is None or origin.where == "forward"):
            origin = self._hidden
        nearest = [*(p for p in order if id(p) in parameters), *bad]
        names = list(dict.fromkeys(self._name(parameter) for parameter in nearest))[:_MOST_NAMES]
        module, op, detail, where = names[0].rpartition(".")[0], "", "", "gradient"
        if origin is not None:
            op, where = origin.op, origin.where
            module, detail = self._told(origin)
        made_in, made_at = self._lines_of(op)
        return NonFinite(
            where=where, value=value, module=module, op=op, detail=detail, parameters=tuple(names), loss=loss,
            file=place[0], line=place[1], made_in=made_in, made_at=made_at, late=late,
        )  # fmt: skip

    def _bad(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [one for one in parameters if (values := plain(one)) is not None and not _finite(values)]

    def _name(self, parameter: torch.Tensor) -> str:
        return self._numbering.name(self._numbering.parameter(parameter))

    def _told(self, origin: Origin) -> tuple[str, str]:
        """The module that an operation with weights belongs to, and what is known of it."""
        if origin.parameter is None or (number := self._numbering.known(origin.parameter)) is None:
            return "", origin.detail
        facts = self._numbering.facts(number)
        if origin.is_own:
            return facts.module, origin.detail
        after = f"it comes after {facts.module or 'the whole model'}"
        return "", f"{origin.detail}; {after}" if origin.detail else after


def _kind_of(bad: list[torch.Tensor], value: str) -> str:
    seen = next((values for one in bad if (values := plain(one)) is not None), None)
    return value if seen is None else kind_of(seen)


def _came_with_gradients(bad: list[torch.Tensor], optimizer: Any) -> bool:
    """Whether weights are not finite because gradients were not, and not because a step was too large."""
    first = bad[0]
    if optimizer is None or all(one is not first for group in optimizer.param_groups for one in group["params"]):
        return False  # somebody else writes to it
    if first.grad is not None and (grad := plain(first.grad)) is not None:
        return not _finite(grad)
    kept = kept_of(optimizer, first)
    if not kept:  # a finite step makes an infinite number at most
        return bool(first.isnan().any()) and not bool(first.isinf().any())
    return any((values := plain(one)) is not None and not _finite(values) for one in kept)


def _finite(values: torch.Tensor) -> bool:
    low, high = values.detach().aminmax() if values.numel() else (values.new_zeros(()), values.new_zeros(()))
    return bool((low - low == 0) & (high - high == 0))


def _rooted(optimizer: Any, bad: list[torch.Tensor]) -> str:
    """What a step took a root of: the state that is below 0 just where the weights are not numbers any more."""
    for parameter in bad[:_MOST_NAMES] if optimizer is not None else ():
        lost = parameter.detach().isnan()
        same = [
            repr(name) for name, one in dict(optimizer.state.get(parameter, {})).items()
            if isinstance(one, torch.Tensor) and (one.shape, one.device) == (lost.shape, lost.device)
            and not one.is_complex() and torch.equal(one < 0, lost)
        ]  # fmt: skip
        if same and bool(lost.any()):
            return f"it is nan just where {' and '.join(same)} in the state of {type(optimizer).__name__} is below 0"
    return ""
