"""Finds where the first number that is not finite came from, and the line that spells the operation."""

import ast
import cmath
import linecache
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from anybatch.doctor.recording.naming import user_files, user_place
from anybatch.doctor.samples.flatcopies import plain
from anybatch.doctor.samples.origins import Origin, kind_of, origin_in, risky
from anybatch.records.samples import NonFinite

if TYPE_CHECKING:
    from anybatch.doctor.recording.numbering import Numbering

_MOST_NAMES = 8
_TRIED = 4  # gradients among which the smallest is looked at in each step


class NonFiniteWatch:
    """Looks at the loss in each step and at one gradient in sampled ones, and searches once when one is not finite.

    Of the gradients that were not looked at, weights and what the optimizer keeps tell in the next step, whose loss is
    not finite then.
    """

    def __init__(self, numbering: "Numbering", stepped: Callable[[], Any] = lambda: None) -> None:
        self._numbering, self._stepped = numbering, stepped
        # gives the loss of the last backward, if it is still there; and the value of the last one that was finite
        self.last: tuple[Callable[[], Any], float | None] = lambda: None, None
        self._probes: dict[int, weakref.ref[torch.Tensor]] = {}
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
            return NonFinite(where="parameter", value=_kind_of(bad, value), module=names[0].rpartition(".")[0],
                             parameters=tuple(names), file=file, line=line)  # fmt: skip
        if loss.grad_fn is None:
            return NonFinite(where="forward", value=value, detail="the loss has no graph", file=file, line=line)
        origin = origin_in(loss.grad_fn)
        if origin is None:
            return NonFinite(where="forward", value=value, file=file, line=line)
        module, detail = self._told(origin)
        made_in, made_at = lines_of(origin.op, user_files())
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
        nearest = [*(p for p in order if id(p) in parameters), *bad]
        names = list(dict.fromkeys(self._name(parameter) for parameter in nearest))[:_MOST_NAMES]
        module, op, detail, where = names[0].rpartition(".")[0], "", "", "gradient"
        if origin is not None:
            op, where = origin.op, origin.where
            module, detail = self._told(origin)
        made_in, made_at = lines_of(op, user_files() if op else ())
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


def kept_of(optimizer: Any, parameter: torch.Tensor) -> list[torch.Tensor]:
    """What an optimizer keeps of the gradients of a parameter."""
    state = optimizer.state.get(parameter) or {}
    return [one for name, one in state.items() if name != "step" and isinstance(one, torch.Tensor)]


def _finite(values: torch.Tensor) -> bool:
    low, high = values.detach().aminmax() if values.numel() else (values.new_zeros(()), values.new_zeros(()))
    return bool((low - low == 0) & (high - high == 0))


_MOST_LINES = 3
_LONGEST = 20_000  # lines of a file
_SIGNS: dict[str, type[ast.operator]] = {
    "Div": ast.Div, "Pow": ast.Pow, "Mul": ast.Mult, "Add": ast.Add, "Sub": ast.Sub, "Rsub": ast.Sub,
    "Mm": ast.MatMult, "Bmm": ast.MatMult, "Reciprocal": ast.Div,
}  # fmt: skip
_NAMES = {
    "Div": ("div", "true_divide", "divide", "normalize"),
    "Pow": ("pow", "square", "float_power"),
    "Mul": ("mul", "multiply"),
    "Log": ("log", "entropy", "log_prob"),
    "Log1P": ("log1p",),
    "Softmax": ("softmax", "Softmax"),
    "LogSoftmax": ("log_softmax", "LogSoftmax", "cross_entropy", "CrossEntropyLoss"),
    "NllLoss": ("nll_loss", "cross_entropy", "NLLLoss", "CrossEntropyLoss"),
    "NllLoss2D": ("nll_loss", "cross_entropy", "NLLLoss", "CrossEntropyLoss"),
    "Std": ("std", "std_mean"),
    "Var": ("var", "var_mean"),
    "MseLoss": ("mse_loss", "MSELoss"),
    "BinaryCrossEntropy": ("binary_cross_entropy", "BCELoss"),
    "BinaryCrossEntropyWithLogits": ("binary_cross_entropy_with_logits", "BCEWithLogitsLoss"),
    "NativeLayerNorm": ("layer_norm", "LayerNorm"),
    "NativeBatchNorm": ("batch_norm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"),
    "NativeGroupNorm": ("group_norm", "GroupNorm"),
    "LinalgVectorNorm": ("norm", "vector_norm", "normalize"),
    "Norm": ("norm", "normalize"),
}


def lines_of(op: str, files: Iterable[str]) -> tuple[str, tuple[int, ...]]:
    """The file and the lines that spell an operation, where they are few and in one file; else empty."""
    kind = re.sub(r"Backward\d*$", "", op)
    names = {*_NAMES.get(kind, (re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower(),)), kind}
    names |= {f"{name}_" for name in names}
    found = {file: lines for file in dict.fromkeys(files) if (lines := sorted(set(_spelled(file, names, kind))))}
    if len(found) != 1:
        return "", ()
    ((file, lines),) = found.items()
    return (file, tuple(lines)) if len(lines) <= _MOST_LINES else ("", ())


def _spelled(file: str, names: set[str], kind: str) -> Iterator[int]:
    lines = linecache.getlines(file)
    try:
        tree = ast.parse("".join(lines)) if 0 < len(lines) <= _LONGEST else None
    except (SyntaxError, ValueError, RecursionError):
        return
    sign = _SIGNS.get(kind)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Call) and _is_called(node.func, names, kind):
            yield node.func.end_lineno or node.lineno
        elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, sign or ()) and not _is_plain(node):
            yield node.lineno


def _is_called(called: ast.expr, names: set[str], kind: str) -> bool:
    if isinstance(called, ast.Name):
        return called.id in names
    if not isinstance(called, ast.Attribute):
        return False
    of = called.value.id if isinstance(called.value, ast.Name) else ""
    return of not in ("math", "np", "numpy") and (called.attr in names or of == kind)


def _is_plain(node: ast.BinOp | ast.AugAssign) -> bool:
    """Whether it computes with numbers that are written there, such as ``1 / 3``."""
    return isinstance(node, ast.BinOp) and all(isinstance(side, ast.Constant) for side in (node.left, node.right))
