"""Why the gradient of a split is not the whole's, from the simple causes to the involved ones."""

import dataclasses
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anybatch.batch.layout import lay_out, placement
from anybatch.batch.trees import leaves
from anybatch.checking.causes import more, reason
from anybatch.checking.comparison import Case, Comparisons
from anybatch.checking.denominators import Denominators
from anybatch.checking.isolation import muted
from anybatch.checking.measuring import Outcome, distance, scaled
from anybatch.checking.subjects import Subject
from anybatch.checking.tracing import Parts, Recording, culprits, gets_different_inputs
from anybatch.errors import AnyBatchError, CountError
from anybatch.records.certificates import Reason

_MOST_MODULES = 5  # that are named
_MOST_ARGUMENTS = 3  # of an operation on two tensors, with a factor
_MOST_LEAVES = 8  # which are tried without a cut


class Aligned(TorchFunctionMode):
    """Compares samples in a column, ``[n, 1]``, and in a row, ``[n]``, one by one instead of all with all.

    Attributes:
        found: the first operation on such tensors and their shapes; empty if there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: tuple[str, str, str] | tuple[()] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if len(tensors) == 2 and len(args) <= _MOST_ARGUMENTS:
            one, other = sorted(tensors, key=lambda tensor: tensor.dim())
            column = one.dim() == 1 and other.dim() == 2 and other.shape == (len(one), 1) and len(one) > 1
            if column and one.requires_grad != other.requires_grad:  # two of the model's are compared on purpose
                name = getattr(func, "__name__", str(func)).strip("_")
                self.found = self.found or (name, str(tuple(tensors[0].shape)), str(tuple(tensors[1].shape)))
                args = tuple(value.reshape(-1) if value is other else value for value in args)
        return func(*args, **(kwargs or {}))


class Diagnosis:
    """Looks for what makes the difference.

    Args:
        case: what is compared.
    """

    def __init__(self, case: Case) -> None:
        self._case, self._rig, self._whole, self._tolerance = case, case.rig, case.whole, case.tolerance

    def reasons(self, comparisons: Comparisons) -> list[Reason]:
        """Names the first cause that is found.

        Args:
            comparisons: of the splits.
        """
        for parts, failure in comparisons.failures:
            if not isinstance(failure, CountError):
                whole_leaf = self._case.searched("leaves that are not per sample", self._not_per_sample, None)
                return [whole_leaf or _part_fails(failure, min(len(part.samples) for part in parts))]
        searches: dict[str, Callable[[], list[Reason]]] = {
            "hooks": self._hooks,
            "whether the backward is linear": self._backward,
            "padding": self._padding,
            "modules that mix samples": self._mixing_modules,
            "shapes that broadcast": self._broadcasts,
            "what the loss is averaged over": lambda: self.losses(self._case.compared()),
        }
        for what, search in searches.items():
            nothing: list[Reason] = []
            if found := self._case.searched(what, search, nothing):
                return found
        return [reason("not additive")]

    def losses(self, comparisons: Comparisons) -> list[Reason]:
        """Says of each loss that does not add up why not.

        Args:
            comparisons: of the splits.
        """
        denominators = Denominators(self._case)
        findings = {name: denominators.find(name) for name in comparisons.wrong_losses(self._tolerance)}
        counts = {name: found.candidate for name, found in findings.items() if found.candidate is not None}
        line = (denominators.line(counts),) if counts else ()
        reasons = [
            found.reason if found.candidate is None else dataclasses.replace(found.reason, remedies=line)
            for found in findings.values()
        ]
        if counts and len(counts) == len(findings):
            count = denominators.count_with(counts)
            error = self._case.compared(count=count).error
            rest = "" if error <= self._tolerance else " still, so that there is another reason, too"
            text = f" With the count below the error is {error:.2g}{rest}."
            reasons = [more(one, text, error_with_remedy=error) for one in reasons]
        failures = [f" As it is, a split is refused: {failure}" for _, failure in comparisons.failures[:1]]
        return [more(one, *failures) for one in reasons]

    def _not_per_sample(self) -> Reason | None:
        """Whether a split works once one of the leaves is not cut."""
        subject = self._rig.subject
        if subject.collate is not None:
            return None
        tensors = [found for found in leaves(subject.batch, "batch") if isinstance(found[2], torch.Tensor)]
        for label, keys, _ in tensors[:_MOST_LEAVES] if len(tensors) > 1 else ():
            path = ".".join(keys)
            try:
                placed = placement((*subject.broadcast, path), getattr(subject.broadcast, "dims", None))
                other = dataclasses.replace(subject, broadcast=placed)
                error = self._case.compared(subject=other).error
            except AnyBatchError:
                continue
            if error > self._tolerance:
                continue
            if not self._is_whole(other):
                evidence = {"path": path, "error_with_remedy": error}
                return reason("not per sample", label, evidence, label=label, rows=subject.rows)
        return None

    def _samples_along_1(self) -> dict[str, int]:
        """The layout under which a split adds up, with the samples of all tensors along dimension 1."""
        rig, subject = self._rig, self._rig.subject
        if subject.collate is not None:
            return {}
        tensors = [(".".join(path), leaf) for _, path, leaf in leaves(subject.batch) if isinstance(leaf, torch.Tensor)]
        layout = {path: 1 for path, leaf in tensors if leaf.dim() > 1 and path not in subject.broadcast}
        try:
            placed = placement(tuple(subject.broadcast), layout)
            other = dataclasses.replace(subject, broadcast=placed, rows=lay_out(subject.batch, placed).rows)
            return layout if self._case.is_exact(splits=rig.splits(other), subject=other) else {}
        except AnyBatchError:
            return {}

    def _is_whole(self, subject: Subject) -> bool:
        """Whether a part alone gives the whole's gradient, since what is no longer cut was all the data."""
        rig, own, parts = self._rig, self._rig.subject, self._case.splits[0]
        rig.subject = subject
        try:
            alone = rig.part(rig.parts_of(parts)[0], parts[0].samples)
        finally:
            rig.subject = own
        return self._case.error_of(alone.gradients) <= self._tolerance

    def _broadcasts(self) -> list[Reason]:
        """Whether the split adds up where samples in a column and samples in a row are compared one by one."""
        with Aligned() as aligned:
            whole = self._case.attempt()
            if not aligned.found or not isinstance(whole, Outcome) or not whole.is_finite:
                return []
            error = self._case.compared(whole=whole).error
        operation, *shapes = aligned.found
        evidence = {"operation": operation, "shapes": shapes, "error_with_remedy": error}
        return [reason("broadcasts", "loss", evidence)] if error <= self._tolerance else []

    def _hooks(self) -> list[Reason]:
        """Whether the gradient is the whole's once hooks on parameters and backward hooks on modules are off."""
        rig = self._rig
        hooked = {n: p for n, p in zip(rig.names, rig.parameters, strict=True) if p._backward_hooks}
        modules = {n: m for n, m in rig.modules.items() if m._backward_hooks or m._backward_pre_hooks}
        if not hooked and not modules:
            return []
        with ExitStack() as undo:
            for parameter in hooked.values():
                muted(parameter._backward_hooks, undo)
            for module in modules.values():
                muted(module._backward_hooks, undo)
                muted(module._backward_pre_hooks, undo)
            error = self._case.compared(whole=rig.run()).error
        names = [f"parameter {name}" for name in hooked] + [name or "the model" for name in modules]
        evidence = {"hooks": names, "error_without_hooks": error}
        return [reason("hook", names[0], evidence)] if error <= self._tolerance else []

    def _backward(self) -> list[Reason]:
        """Whether half of the loss has half of the gradient."""
        rig = self._rig
        with rig.tracer.gradients() as of_whole:
            rig.run()
        with rig.tracer.gradients() as of_half:
            half = rig.run(loss_fn=scaled(rig.subject.loss_fn, 0.5))
        doubled = [None if gradient is None else 2 * gradient for gradient in half.gradients]
        error = self._case.error_of(doubled)
        if error <= self._tolerance:
            return []
        where = [
            name
            for name, value in of_whole.items()
            if abs(float(2 * of_half[name] - value)) > self._tolerance * abs(float(value))
        ]
        wrong = [
            name
            for name, one, other in zip(rig.names, doubled, self._whole.gradients, strict=True)
            if distance([one], [other]) > self._tolerance * distance([other], [None])
        ]
        module = where[-1] if where else ""
        shown = f"the result of `{module}`" if module else f"parameter `{wrong[0]}`" if wrong else "the model"
        evidence = {"error": error, "parameters": wrong[:20]}
        return [reason("backward", module or (wrong[0] if wrong else "model"), evidence, shown=shown)]

    def _padding(self) -> list[Reason]:
        """Whether the same samples, cut from the batch that is padded as a whole, give the whole's gradient.

        If not, the diagnosis goes on with that batch, whose tensors can be compared with those of its parts.
        """
        padded = None if self._rig.subject.collate is None else self._rig.subject.collated()
        if padded is None:
            return []
        splits = self._rig.splits(padded)
        if self._case.is_exact(splits=splits, subject=padded):
            return [reason("padding")]
        self._rig.subject = padded
        self._case = Case(self._rig, self._whole, splits, self._tolerance, self._case.notes)
        return []

    def _mixing_modules(self) -> list[Reason]:
        rig = self._rig
        with rig.tracer.recording(rig.subject.rows) as whole:
            rig.run()
        parts: Parts = []
        for split in self._case.splits:
            for part, batch in zip(split, rig.parts_of(split), strict=True):
                with rig.tracer.recording(len(part.samples)) as recording:
                    rig.part(batch, part.samples)
                parts.append((list(part.samples), recording))
        found = culprits(whole, parts, self._tolerance)
        if found:
            return [self._mixing(*one, whole) for one in list(found.items())[:_MOST_MODULES]]
        if "" in rig.modules and gets_different_inputs(whole, parts, "", self._tolerance):
            return [reason("mixed before", model=type(rig.subject.model).__name__)]
        return []

    def _mixing(self, name: str, difference: float, whole: Recording) -> Reason:
        """A module that mixes samples, with what is special about one that knows where its batch lies."""
        modules = self._rig.modules
        module = modules[name]
        evidence = {"module": name, "class": type(module).__name__, "difference": difference}
        shown = f"`{name}`" if name else "the model's own forward"
        coupled = reason("module", name or type(module).__name__, evidence, shown=shown)
        batch_first = getattr(module, "batch_first", None)
        given = whole.visits[name, 0].got
        if batch_first is not None and given and len(given[0].shape) == 2:
            hint = reason("unbatched", dim=1 if batch_first else 0)
            return more(coupled, hint.message, before=hint.remedies)
        if batch_first is not False:
            return coupled
        layout = self._case.searched("samples along dimension 1", self._samples_along_1, dict[str, int]())
        outer = [one for one in modules if f"{name}.".startswith(f"{one}.") and _takes(modules[one])]
        remedies = [f"{type(modules[min(outer, key=len)] if outer else module).__name__}(..., batch_first=True)"]
        remedies += (
            [f"layout={layout!r}  # if the batch has the time first, and the samples after it"] if layout else []
        )
        return more(coupled, reason("time first").message, before=remedies)


def _takes(module: torch.nn.Module) -> bool:
    """Whether a module is built with ``batch_first``, which it hands on to those inside."""
    return "batch_first" in inspect.signature(type(module).__init__).parameters


def _part_fails(failure: Exception, smallest: int) -> Reason:
    """A micro-batch fails where the whole batch does not."""
    kind = type(failure).__name__
    if isinstance(failure, AnyBatchError):
        return reason("refused", "loss", {"error": kind}, failure=failure)
    text = str(failure).splitlines()[0] if str(failure) else kind
    split = f"a split into micro-batches of {smallest} samples and more"
    fails = f"The whole batch runs, but {split} fails with {kind}: {text}."
    cause = "fixed shape" if "invalid for input of size" in text else "squeezed" if smallest == 1 else "too few"
    return reason(cause, "loss", {"error": kind, "smallest_micro_batch": smallest}, fails=fails)
