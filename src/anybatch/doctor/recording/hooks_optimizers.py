"""Sees optimizers made, their steps, clearing by ``zero_grad``, gradient scalers, and the clipping of gradients."""

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grad

from anybatch.doctor.recording.describing import itself, rates_of
from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.naming import modules_in_sight
from anybatch.doctor.recording.patches import function_in, noting
from anybatch.doctor.recording.recordings import FIRST, Depth, Recording
from anybatch.doctor.recording.samplers import Samplers
from anybatch.doctor.values import tensors_in
from anybatch.records.events import Cleared, Clipped, Scaler, Stepped
from anybatch.tensors.dispatch import has_numbers, item_of, unseen
from anybatch.userlines import user_place

_LOOKS_AROUND = (0, 5)  # steps
_REVIEWED = 5  # steps of which one is followed by a look at whether the record is to be written
_SAME = ("optimizer", "with_grad", "zero", "closure", "by", "edited")
_CLEARING = ("by", "number", "parameters", "of")
_MOST_BEGINNINGS = 4  # optimizers whose first steps are all sampled


@dataclass(slots=True)
class _Known:
    """What is known of an optimizer, which groups may be added to."""

    optimizer: Any  # a weak reference
    number: int
    ends: tuple[int, int] = (-1, -1)  # how many groups it has, and how many parameters the last one
    parameters: frozenset[int] = frozenset()
    count: int = 0  # of its steps
    begun: int = 0  # the step of the run at which it began, if it has taken the place of another one
    with_grad: tuple[int, int] = (0, -1)  # how many of its parameters had a gradient, and how many of all did then


class _Begun(NamedTuple):
    """A step that has begun."""

    known: _Known  # of its optimizer
    step: int  # the number by which it is decided whether it is sampled
    sampled: bool
    closure: bool  # whether it was given a function that takes the gradient
    edited: int  # gradients that the user's code has changed before it


class OptimizerHooks:
    """Has steps of all optimizers seen; ``on_step`` is given the number that says whether the next one is sampled."""

    def __init__(
        self, recording: Recording, gradients: Gradients, samplers: Samplers, on_step: Callable[[int], None]
    ) -> None:
        self.has_closure = False  # whether a step was given a function that takes the gradient
        self._recording, self._gradients, self._samplers, self._on_step = recording, gradients, samplers, on_step
        self._made: dict[int, tuple[tuple[str, int], int]] = {}
        self._known: dict[int, _Known] = {}  # by the ``id`` of the optimizer
        self._stepped: list[_Known] = []  # those that have stepped, also where the optimizer is gone
        self._done = 0  # steps of all of them
        self._followed = set[Any]()  # functions
        # of steps within each other, as where a class calls ``super().step()``, the outermost is seen
        seen = partial(recording.around, self._before, self._after, "updates", owned=True, outermost=Depth())
        self._of_torch, self._of_others = seen(), seen(when=_is_itself)

    def attach(self) -> None:
        """Puts the wrappers in place; ``Recording.patches`` takes them off."""
        recording, patches = self._recording, self._recording.patches
        stay_uncompiled()
        self._followed.clear()  # it may have been attached before
        for cls in _subclasses(torch.optim.Optimizer):
            self._follow(cls)
        patches.wrap(torch.optim.Optimizer, "__init__", noting(after=recording.guarded(self._was_made)))
        for owner, by in ((torch.optim.Optimizer, "optimizer"), (torch.nn.Module, "module")):
            patches.wrap(owner, "zero_grad", recording.around(None, partial(self._cleared, by), "updates", owned=True))

    def _follow(self, cls: type) -> None:
        step = function_in(cls, "step") if "step" in vars(cls) else None
        if step is not None and step not in self._followed:  # several classes may have the same one, within torch's own
            self._followed.add(step)
            is_torchs = step.__module__.startswith("torch.")
            self._recording.patches.wrap(cls, "step", self._of_torch if is_torchs else self._of_others)

    def _was_made(self, _: None, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        stay_uncompiled()  # torch loads its compiler with the first optimizer
        for cls in type(optimizer).__mro__:
            if issubclass(cls, torch.optim.Optimizer):
                self._follow(cls)
        known = self._recording.numbering.known
        numbers = {known(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        after = sum(one.count for one in self._stepped if not numbers.isdisjoint(one.parameters))
        self._made[id(optimizer)] = user_place(2), after

    @property
    def is_any_known(self) -> bool:
        """Whether an optimizer was seen, also one that has not stepped."""
        return bool(self._made) or any(True for _ in self._recording.numbering.optimizers())

    def numbered(self, optimizer: Any) -> int:
        """The number of an optimizer, with what is known of how it was made."""
        numbering = self._recording.numbering
        if numbering.known_optimizer(optimizer) >= 0:
            return numbering.optimizer(optimizer)
        place, after = self._made.pop(id(optimizer), (None, 0))
        return numbering.optimizer(optimizer, place=place, after=after)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> _Begun:
        recording = self._recording
        known, groups = self._known.get(id(optimizer)), optimizer.param_groups
        ends = len(groups), len(groups[-1]["params"]) if groups else 0
        if known is None or known.optimizer() is not optimizer or known.ends != ends:
            known = self._know(optimizer)
        number, count, every = known.number, known.count, recording.sampling.every
        if count in _LOOKS_AROUND:
            self._look_around(number)
        step = count if number < _MOST_BEGINNINGS else self._done
        sampled = (recording.looks or step < FIRST or not step % every) and recording.sampling.wants(step)
        closure = bool(args or kwargs) and any(map(callable, (*args, *kwargs.values())))
        self.has_closure = self.has_closure or closure
        closely = recording.looks or self.has_closure
        cleared, had, edited = self._gradients.at_step(closely=closely)
        if cleared:
            recording.emit(Cleared(by="hand", parameters=cleared, of=had))
        if recording.looks or sampled:
            self._samplers.before_step(optimizer, number, sampled=sampled)
        kept = self._samplers.kept
        if kept.on and number not in kept.redraws.without:
            self._samplers.safely("redraws", kept.redraws.look, number, optimizer, sampled=sampled)
        return _Begun(known, step, sampled, closure, edited)

    def _after(self, optimizer: Any, begun: _Begun, _: Any) -> None:
        recording, known = self._recording, begun.known
        number, count, sampled = known.number, known.count, begun.sampled
        with_grad, of = known.with_grad
        if sampled or of != self._gradients.present:
            tensors = (tensor for group in optimizer.param_groups for tensor in group["params"])
            with_grad = sum(tensor.grad is not None for tensor in tensors)
            known.with_grad = with_grad, self._gradients.present
        zero = _are_zero(optimizer) if sampled else None
        groups, by = optimizer.param_groups, "scaler" if recording.in_scaler.count else "step"
        is_plain = len(groups) == 1 and type(groups[0].get("lr")) is float
        rates = (groups[0]["lr"],) if is_plain else rates_of(optimizer)
        recording.note(Stepped, (number, with_grad, zero, begun.closure, by, begun.edited), (count, rates), _SAME)
        recording.stepped = known.optimizer
        if recording.looks or sampled or self._samplers.matters:
            self._samplers.after_step(optimizer, number, count, sampled=sampled)
        if sampled and self._samplers.kept.on:
            self._samplers.safely("redraws", self._samplers.kept.redraws.look_after, number)
        counter = recording.counter
        if count == 0:
            over = all(one.optimizer() is None or one.parameters & known.parameters for one in self._stepped)
            if counter.step > 1 and over:  # as for fine-tuning; those of a game step in turn
                known.begun = counter.step
            self._stepped.append(known)
        known.count, self._done = count + 1, self._done + 1
        counter.step = max(counter.step, known.begun + count + 1)
        closely, step = recording.looks or self.has_closure, begun.step + 1
        if recording.looks or self._samplers.matters or not step % _REVIEWED or not step % recording.sampling.every:
            self._on_step(step)
        self._gradients.after_step(known.parameters, closely=closely)

    def steps_of(self, optimizer: Any) -> int:
        """How many steps of an optimizer were seen."""
        known = self._known.get(id(optimizer))
        return known.count if known is not None and known.optimizer() is optimizer else 0

    def _cleared(self, by: str, owner: Any, *_: Any) -> None:
        known = self._known.get(id(owner))
        if by == "module":
            number = self._recording.numbering.root_of(owner)
        else:
            number = known.number if known is not None and known.optimizer() is owner else self.numbered(owner)
        same = by, -1 if number is None else number, *self._gradients.after_clearing()
        self._recording.note(Cleared, same, entries=_CLEARING)

    def _know(self, optimizer: Any) -> "_Known":
        """What is known of an optimizer, as its groups are now."""
        number, groups = self.numbered(optimizer), optimizer.param_groups
        known = self._known.get(id(optimizer))
        if known is None or known.number != number:
            known = self._known[id(optimizer)] = _Known(weakref.ref(optimizer), number)
        known.ends = len(groups), len(groups[-1]["params"]) if groups else 0
        tables = self._recording.numbering.optimizer_table(number).groups
        known.parameters = frozenset(one for group in tables for one in group.parameters)
        return known

    def _look_around(self, number: int) -> None:
        """Looks for the models of parameters that no module which was called has: ``forward`` is called itself, say."""
        numbering = self._recording.numbering
        numbering.look_again()
        lost = {
            id(numbering.tensor(one))
            for group in numbering.optimizer_table(number).groups
            for one in group.parameters
            if numbering.facts(one).root < 0
        }
        if not lost:
            return
        shares = [(sum(id(p) in lost for p in one.parameters()), one) for one in modules_in_sight()]
        for share, module in sorted(shares, key=lambda entry: -entry[0]):
            if share and any(id(p) in lost for p in module.parameters()):
                numbering.root(module)
                lost -= {id(p) for p in module.parameters()}


@unseen
def _are_zero(optimizer: Any) -> bool | None:
    """Whether all gradients of an optimizer are zero, ``None`` where there are none or that can't be said."""
    gradients = [t.grad for group in optimizer.param_groups for t in group["params"] if t.grad is not None]
    if not gradients or not all(one.layout is torch.strided and has_numbers(one) for one in gradients):
        return None
    gradients.sort(key=torch.Tensor.numel)  # the smallest first, which mostly say it
    return not any(bool(one.detach().any()) for one in gradients)


def _subclasses(cls: type[torch.optim.Optimizer]) -> Iterator[type]:
    for inner in cls.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def _is_itself(optimizer: Any, _: Any) -> bool:
    """Whether it is no wrapper of another one, as Accelerate's is: it has groups of its own, which torch has made."""
    own = vars(optimizer)
    return "param_groups" in own and "state" in own and itself(optimizer) is optimizer


def stay_uncompiled() -> None:
    """Makes torch's compiler, if it has been loaded, skip the functions of the doctor.

    Where a compiled function calls one, such as a hook on an optimizer step, they would be compiled again for each
    tensor that they read.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    folder = f"{Path(__file__).parents[1]}{os.sep}"
    if rules is not None and folder not in rules.SKIP_DIRS:
        rules.add("anybatch.doctor")


class _Call(NamedTuple):
    """A call that has begun."""

    optimizer: Any  # that it was given
    number: int  # of the optimizer, -1 without one
    scale: float  # before the call
    steps: int  # of the optimizer so far


class ScalingHooks:
    """Wraps ``GradScaler``."""

    def __init__(self, recording: Recording, gradients: Gradients, optimizers: OptimizerHooks) -> None:
        self._recording, self._gradients, self._optimizers = recording, gradients, optimizers
        self._losses = recording.scaled
        # the optimizers whose gradients were unscaled since the last ``update``, by ``id``
        self.unscaled: set[int] = set()

    def attach(self) -> None:
        """Puts the wrappers in place; ``Recording.patches`` takes them off."""
        recording = self._recording

        def seen(before: Callable[..., Any] | None, after: Callable[..., Any]) -> Callable[[Any], Any]:
            return recording.around(
                before, after, "updates", when=lambda scaler, _: scaler.is_enabled(), outermost=recording.in_scaler
            )

        recording.patches.wrap(torch.amp.GradScaler, "scale", seen(None, self._was_scaled))
        for call in ("unscale_", "step", "update"):
            recording.patches.wrap(
                torch.amp.GradScaler, call, seen(partial(self._begins, call), partial(self._ended, call))
            )

    def _was_scaled(self, scaler: Any, _: Any, result: Any) -> None:
        losses = self._losses
        if not losses.pending:
            losses.pending = True
            self.unscaled.clear()
        for loss in tensors_in(result):
            losses.add(loss)
        self._read_scale(scaler)

    def _read_scale(self, scaler: Any) -> None:
        """Reads the scale where nothing has to be waited for: on a CPU always, else on sampled steps."""
        scale = getattr(scaler, "_scale", None)
        if scale is None:
            self._losses.scale = float(getattr(scaler, "_init_scale", 1.0))
        elif scale.is_cpu or self._recording.sampled:
            self._losses.scale = float(item_of(scale))

    def _begins(self, call: str, scaler: Any, args: Any, kwargs: Any) -> _Call:
        optimizer = args[0] if args and call != "update" else None
        number = -1 if optimizer is None else self._optimizers.numbered(optimizer)
        self._read_scale(scaler)
        return _Call(optimizer, number, self._losses.scale, self._optimizers.steps_of(optimizer))

    def _ended(self, call: str, scaler: Any, begun: _Call, _: Any) -> None:
        recording, losses = self._recording, self._losses
        skipped: torch.Tensor | bool = False
        if call == "unscale_":
            self.unscaled.add(id(begun.optimizer))
            self._gradients.changed_on_purpose()
        elif call == "update":
            losses.pending = False
            self.unscaled.clear()
            self._read_scale(scaler)
        else:
            skipped = self._optimizers.steps_of(begun.optimizer) == begun.steps or _overflow(scaler, begun)
        values = begun.scale, losses.scale, skipped is True
        noted = recording.note(Scaler, (call, begun.number), values, ("call", "optimizer"))
        if isinstance(skipped, torch.Tensor):
            recording.journal.later(noted, "skipped", skipped, bool)


def _overflow(scaler: Any, begun: _Call) -> torch.Tensor | bool:
    """A tensor that says whether a step that ran has changed nothing, as one that is given the scale itself can."""
    if not getattr(begun.optimizer, "_step_supports_amp_scaling", False):
        return False
    states = getattr(scaler, "_per_optimizer_states", {})
    found = list(states.get(id(begun.optimizer), {}).get("found_inf_per_device", {}).values())
    if not found:
        return False
    first: torch.Tensor = found[0]
    return first if len(found) == 1 else torch.stack([one.to(first.device) for one in found]).sum()


_SAME_CLIP = ("by", "limit", "tensors", "optimizers", "scaled", "scale")


class ClippingHooks:
    """Wraps the two functions that clip."""

    def __init__(self, recording: Recording, gradients: Gradients, scaling: ScalingHooks) -> None:
        self._recording, self._gradients, self._scaling = recording, gradients, scaling
        self._known: tuple[Any, list[tuple[int, weakref.ref[Any]]]] = (None, [])

    def attach(self) -> None:
        """Puts the wrappers in place; ``Recording.patches`` takes them off."""
        patches = self._recording.patches
        norm = "_clip_grads_with_norm_" if hasattr(clip_grad, "_clip_grads_with_norm_") else "clip_grad_norm_"
        patches.wrap(clip_grad, norm, self._clipping("norm"))
        patches.wrap(clip_grad, "clip_grad_value_", self._clipping("value"))

    def _clipping(self, by: str) -> Callable[[Any], Any]:
        recording, is_compiling = self._recording, torch.compiler.is_dynamo_compiling

        def before(parameters: Any, args: Any, kwargs: Any) -> Any:
            limit = args[0] if args else kwargs.get("max_norm" if by == "norm" else "clip_value")
            norm = args[1] if by == "norm" and len(args) > 1 and isinstance(args[1], torch.Tensor) else None
            self._clips(by, [parameters] if isinstance(parameters, torch.Tensor) else parameters, limit, norm)
            return True

        noted = recording.around(before, lambda *_: self._gradients.changed_on_purpose(), "updates")

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            clip_noted = noted(original)

            def clip(parameters: Any, /, *args: Any, **kwargs: Any) -> Any:
                if is_compiling():
                    return original(parameters, *args, **kwargs)
                given = parameters if isinstance(parameters, (torch.Tensor, list)) else list(parameters)
                return clip_noted(given, *args, **kwargs)

            return clip

        return wrapped

    def _clips(self, by: str, given: Any, limit: Any, norm: torch.Tensor | None) -> None:
        if not isinstance(limit, (int, float, torch.Tensor)):
            return  # torch refuses it
        recording, losses = self._recording, self._recording.scaled
        limit = float(item_of(limit)) if isinstance(limit, torch.Tensor) else float(limit)
        tensors = len([tensor for tensor in given if tensor.grad is not None])
        owners = self._owners_of(given, tensors)
        scaled = losses.pending and not any(id(optimizer) in self._scaling.unscaled for _, optimizer in owners)
        same = by, limit, tensors, tuple([number for number, _ in owners]), scaled, losses.in_force
        noted = recording.note(Clipped, same, (None,), _SAME_CLIP)
        if norm is not None:
            recording.journal.later(noted, "norm", norm)

    def _owners_of(self, given: Any, tensors: int) -> list[tuple[int, Any]]:
        """The optimizers that have some of the parameters that have a gradient, with their numbers."""
        numbering = self._recording.numbering
        ends = (id(given[0]), id(given[-1])) if len(given) else ()
        key = len(given), ends, tensors, numbering.optimizers_version
        if key != self._known[0]:
            ids = {id(tensor) for tensor in given if tensor.grad is not None}
            owners = [
                (number, weakref.ref(optimizer))
                for number, optimizer in numbering.optimizers()
                if any(id(tensor) in ids for group in optimizer.param_groups for tensor in group["params"])
            ]
            self._known = key, owners
        return [(number, optimizer) for number, of in self._known[1] if (optimizer := of()) is not None]
