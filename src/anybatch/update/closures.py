"""The closure that an optimizer evaluates the gradient with, within its step."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from anybatch.errors import BatchError
from anybatch.options import needs_closure
from anybatch.tensors.precision import sum_of_bits
from anybatch.tensors.shards import is_sharded
from anybatch.update.transaction import is_out_of_memory


class Again(NamedTuple):
    """The gradient of the logical batch whose gradient is in ``.grad``."""

    parameters: Sequence[torch.Tensor]  # all that have a gradient
    loss: Callable[[], torch.Tensor]  # gives the loss that ``.grad`` belongs to
    evaluate: Callable[[], torch.Tensor]  # takes the gradient at the weights as they are by then, and gives the loss


class StepCall:
    """Calls ``step`` of one optimizer, with a closure if it takes one.

    The gradient is there before the step. An optimizer that evaluates it where nothing has moved yet, as most do that
    take a closure, is given the loss of that gradient; the batch runs again only for one that has moved the weights or
    taken the gradient off, as sharpness-aware minimisation does.

    Args:
        closure: whether to pass one; ``None`` for those outside of torch whose ``step`` takes one, and for those that
            need it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, closure: bool | None = None) -> None:
        self._optimizer = optimizer
        self.is_given = _is_given(optimizer, closure)
        self.is_needed = needs_closure(optimizer)
        self._may_refuse = closure is None and not self.is_needed
        self._may_need = closure is None and not self.is_given and _takes_any(optimizer)
        self._begins_here: bool | None = None  # whether the first evaluation is where the step begins

    def __call__(self, again: Again | None, scaler: Any = None) -> None:
        """Steps."""
        step: Callable[..., Any] = self._optimizer.step if scaler is None else partial(scaler.step, self._optimizer)
        unscales = scaler is not None and hasattr(self._optimizer, "_step_supports_amp_scaling")
        if again is None or not self.is_given or unscales:
            try:
                step()
            except Exception as error:
                if self._may_need and not is_out_of_memory(error):
                    error.add_note("step() was called without arguments; if it needs a closure, give closure=True")
                raise
            return
        own = [p for group in self._optimizer.param_groups for p in group["params"]]
        evaluations = _Evaluations(again, own, self._begins_here, may_be_edited=self._may_refuse)
        try:
            step(evaluations)
        except Exception as error:
            is_refused = self._begins_here is None and not evaluations.number and "closure" in str(error).lower()
            if not (self._may_refuse and is_refused and evaluations.is_here()):
                raise
            self.is_given = False  # it has the argument, and refuses to be given one
        finally:
            evaluations.put_back()
        if not self.is_given:
            step()
        else:
            self._begins_here = bool(evaluations.began_here)


def step_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Steps where there is no batch to run again: each evaluation gives the gradient that is there."""
    own = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    before, runs = [_trace(p) for p, _ in own], list[bool]()

    def closure() -> Any:
        runs.append(bool(runs) or before != [_trace(p) for p, _ in own])
        for parameter, gradient in own:
            parameter.grad = gradient
        return torch.zeros((), device="cpu")

    optimizer.step(closure) if _is_given(optimizer, None) else optimizer.step()
    for parameter, gradient in own:  # for the next step
        parameter.grad = gradient
    return any(runs)


class _Evaluations:
    """The closure of one step."""

    def __init__(
        self, again: Again, own: Sequence[torch.Tensor], began_here: bool | None, *, may_be_edited: bool
    ) -> None:
        self.number = 0
        self.began_here = began_here
        self._again, self._own, self._may_be_edited = again, own, may_be_edited
        self._before = [_trace(p) for p in own]
        self._had = [p for p in own if p.grad is not None]
        # Writes through .data are no new version. They are looked for in the first step, and then taken as usual.
        self._prints = _prints(own) if began_here is None else None
        self._others: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def __call__(self, *_: Any, **__: Any) -> torch.Tensor:
        self.number += 1
        if self.number == 1 and self.is_here(may_be_edited=self._may_be_edited):
            return self._again.loss()
        if not self._others:
            own = {id(p) for p in self._own}
            self._others = [(p, p.grad) for p in self._again.parameters if id(p) not in own]
        with torch.enable_grad():
            return self._again.evaluate()

    def is_here(self, *, may_be_edited: bool = False) -> bool:
        """Whether the gradient that is there is that of the weights as they are.

        Args:
            may_be_edited: also if the optimizer has changed it, as ``step()`` without a closure does before it goes on.
        """
        if self._prints is not None:
            self.began_here = self._prints == _prints(self._own)
        now = [_trace(p) for p in self._own]
        is_edited = may_be_edited and self._before != now and all(
            p.grad is not None and bool(p.grad.norm() > 0) for p in self._had
        )  # fmt: skip
        weights = slice(2) if is_edited else slice(None)
        self.began_here = bool(self.began_here) and [t[weights] for t in self._before] == [t[weights] for t in now]
        return self.began_here

    def put_back(self) -> None:
        """Puts the gradients of the parameters back that other optimizers step."""
        for parameter, gradient in self._others:
            parameter.grad = gradient


def _prints(parameters: Sequence[torch.Tensor]) -> list[int]:
    """The bits of weights; not of those that lie on several ranks, which have to come to the same answer."""
    return [int(sum_of_bits(p.detach())) for p in parameters if not (p.is_meta or is_sharded(p))]


def _trace(parameter: torch.Tensor) -> tuple[int, ...]:
    gradient = parameter.grad
    known = (parameter._version, parameter.untyped_storage()._cdata)
    return known if gradient is None else (*known, id(gradient), gradient._version)


def _takes_any(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` takes ``*args`` or ``**kwargs``, which may have to hold a closure."""
    taken = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.values()
    return any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in taken)


def _is_given(optimizer: torch.optim.Optimizer, closure: bool | None) -> bool:
    step = inspect.unwrap(type(optimizer).step)
    taken = list(inspect.signature(step).parameters.values())[1:]
    kind = type(optimizer).__name__
    if closure is None:
        is_torch_s = (step.__module__ or "").startswith("torch.")
        return needs_closure(optimizer) or (not is_torch_s and bool(taken) and taken[0].name == "closure")
    if not isinstance(closure, bool):
        raise BatchError(f"closure={closure!r}; expected True, False, or None to decide by the signature of step()")
    if not closure and needs_closure(optimizer):
        raise BatchError(f"closure=False, and {kind}.step() can't be called without one; leave closure out")
    if closure and not taken:
        raise BatchError(f"closure=True, and {kind}.step() takes no argument; leave closure out")
    return closure
