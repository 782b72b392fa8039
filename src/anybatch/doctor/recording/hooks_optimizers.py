"""Sees optimizers made, their steps, and the clearing of gradients."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim import optimizer as optimizers
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from anybatch.doctor.recording.describing import plain_rate
from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.naming import modules_in_sight, user_place
from anybatch.doctor.recording.patches import HIDDEN
from anybatch.doctor.recording.recordings import Recording
from anybatch.doctor.recording.samplers import Samplers
from anybatch.records.events import Cleared, Stepped
from anybatch.records.tables import GroupFacts

_TORCHS_FILE = optimizers.__file__
_LOOKS_AROUND = (0, 5)  # steps
_MOST_BEGINNINGS = 4  # optimizers whose first steps are all sampled
_STEP_FRAMES = frozenset({(_TORCHS_FILE, "wrapper"), (HIDDEN, "doctored_step")})
_STEP_NAMES = frozenset({"wrapper", "doctored_step"})
_MOST_FRAMES = 40  # between two steps that run within each other


class OptimizerHooks:
    """Hooks on all optimizers.

    Args:
        recording: of the run.
        gradients: of the tracked parameters.
        samplers: are shown each step.
        on_step: is called after a step has been counted, with the number that says whether the next one is sampled.
    """

    def __init__(
        self, recording: Recording, gradients: Gradients, samplers: Samplers, on_step: Callable[[int], None]
    ) -> None:
        self._recording, self._gradients, self._samplers, self._on_step = recording, gradients, samplers, on_step
        self.counts: dict[int, int] = {}
        self._made: dict[int, tuple[tuple[str, int], int]] = {}
        self._begun: tuple[int, bool] = (-1, False)
        self._without: dict[int, tuple[int, tuple[int, ...], int]] = {}
        self._numbers: dict[int, tuple[tuple[GroupFacts, ...], frozenset[int]]] = {}
        self._hand: tuple[int, int, int] = (0, 0, 0)
        self._handles: list[Any] = []
        self._before_step = recording.guarded(self._before)
        self._after_step = recording.guarded(self._after)

    def attach(self) -> None:
        """Puts the hooks in place."""
        recording, patches = self._recording, self._recording.patches
        self._handles = [
            register_optimizer_step_pre_hook(self._pre_hook),
            register_optimizer_step_post_hook(self._post_hook),
        ]
        patches.wrap(torch.optim.Optimizer, "__init__", self._initialised(recording.guarded(self._was_made)))
        for owner, by in ((torch.optim.Optimizer, "optimizer"), (torch.nn.Module, "module")):
            patches.wrap(owner, "zero_grad", self._clearing(recording.guarded(self._was_cleared), by))

    def detach(self) -> None:
        """Takes off what ``Recording.patches`` does not know of."""
        while self._handles:
            self._handles.pop().remove()

    def follow(self, optimizer: Any) -> None:
        """Makes sure that the steps of an optimizer are seen whose class torch has not hooked."""
        cls = type(optimizer)
        seen = getattr(cls.step, "hooked", False) or getattr(cls.step, "__name__", "") == "doctored_step"
        if isinstance(optimizer, torch.optim.Optimizer) and not seen:
            self._recording.patches.wrap(cls, "step", self._doctored)

    def _doctored(self, original: Callable[..., Any]) -> Callable[..., Any]:
        pre, post = self._pre_hook, self._post_hook

        def doctored_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            pre(optimizer, (optimizer, *args), kwargs)
            result = original(optimizer, *args, **kwargs)
            post(optimizer, (optimizer, *args), kwargs)
            return result

        return doctored_step

    def _initialised(self, was_made: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
                original(optimizer, *args, **kwargs)
                was_made(optimizer)

            return init

        return wrapped

    def _clearing(self, was_cleared: Callable[..., Any], by: str) -> Callable[..., Any]:
        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(owner, *args, **kwargs)
                was_cleared(owner, by)
                return result

            return zero_grad

        return wrapped

    def _was_made(self, optimizer: Any) -> None:
        known = self._recording.numbering.known
        numbers = {known(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        after = sum(
            count for number, count in self.counts.items() if not numbers.isdisjoint(self._parameter_numbers(number))
        )
        self._made[id(optimizer)] = user_place(2), after

    def _was_cleared(self, owner: Any, by: str) -> None:
        cleared, had = self._gradients.after_clearing()
        numbering = self._recording.numbering
        if by == "optimizer":
            number = numbering.known_optimizer(owner)
            number = self.numbered(owner) if number < 0 else number
        else:
            found = numbering.root_of(owner)
            number = -1 if found is None else found
        self._recording.emit(Cleared(by=by, number=number, parameters=cleared, of=had, **self._recording.place()))

    def numbered(self, optimizer: Any) -> int:
        """The number of an optimizer, with what is known of how it was made."""
        numbering = self._recording.numbering
        if numbering.known_optimizer(optimizer) >= 0:
            return numbering.optimizer(optimizer)
        place, after = self._made.pop(id(optimizer), (None, 0))
        self.follow(optimizer)
        return numbering.optimizer(optimizer, place=place, after=after)

    def _pre_hook(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _depth() <= 1:
            self._before_step(optimizer, args, kwargs)

    def _post_hook(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _depth() <= 1:
            self._after_step(optimizer, args, kwargs)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        number = self.numbered(optimizer)
        count = self.counts.get(number, 0)
        if count in _LOOKS_AROUND:
            self._look_around(number)
        sampled = self._recording.sampling.wants(self._sampling_step(number))
        self._hand = self._gradients.at_step()
        if self._hand[0]:
            self._recording.emit(Cleared(by="hand", parameters=self._hand[0], of=self._hand[1]))
        self._samplers.before_step(optimizer, number, sampled=sampled)
        self._begun = number, sampled

    def _sampling_step(self, number: int) -> int:
        """Each of the first optimizers has its own first steps; one that is made each epoch anew has none."""
        return self.counts.get(number, 0) if number < _MOST_BEGINNINGS else sum(self.counts.values())

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

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recording = self._recording
        number, sampled = self._begun
        if number < 0 or number != recording.numbering.known_optimizer(optimizer):
            return  # its beginning was not seen
        self._begun = -1, False
        count = self.counts.get(number, 0)
        present = self._gradients.present
        known = self._without.get(number)
        if known is None or sampled or present != known[2]:
            with_grad, without = self._counted(optimizer)
            changed = known is None or known[1] != without
            self._without[number] = with_grad, without, present
        else:
            with_grad, without, _ = known
            changed = False
        recording.emit(
            Stepped(
                optimizer=number, number=count, lrs=tuple([plain_rate(g.get("lr")) for g in optimizer.param_groups]),
                with_grad=with_grad, without=without if changed else None, without_count=len(without),
                zero=_are_zero(optimizer) if sampled else None,
                closure=bool(args[1:] and args[1] is not None) or kwargs.get("closure") is not None,
                by="scaler" if recording.in_scaler else "step", edited=self._hand[2], **recording.place(),
            )
        )  # fmt: skip
        self._samplers.after_step(optimizer, number, count, sampled=sampled)
        self.counts[number] = count + 1
        recording.counter.step = max(recording.counter.step, count + 1)
        self._on_step(self._sampling_step(number))
        self._gradients.after_step(self._parameter_numbers(number))

    def _counted(self, optimizer: Any) -> tuple[int, tuple[int, ...]]:
        """How many parameters of an optimizer have a gradient, and which have none though they require one."""
        parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        missing = [tensor for tensor in parameters if tensor.grad is None]
        known = self._recording.numbering.known
        numbers = [known(tensor) for tensor in missing if tensor.requires_grad]
        return len(parameters) - len(missing), tuple([number for number in numbers if number is not None])

    def _parameter_numbers(self, number: int) -> frozenset[int]:
        groups = self._recording.numbering.optimizer_table(number).groups
        known = self._numbers.get(number)
        if known is None or known[0] is not groups:
            known = self._numbers[number] = groups, frozenset(one for group in groups for one in group.parameters)
        return known[1]


def _are_zero(optimizer: Any) -> bool | None:
    gradients = [t.grad for group in optimizer.param_groups for t in group["params"] if t.grad is not None]
    dense = [one for one in gradients if one.layout is torch.strided and not one.is_meta]
    if not gradients or len(dense) < len(gradients):
        return None
    return not any(bool(one.detach().any()) for one in dense)


def _depth() -> int:
    """How many steps of optimizers are running within each other: a class that calls ``super().step()`` has two."""
    depth, frame = 0, _back(sys._getframe(1))
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        if code.co_name in _STEP_NAMES and (code.co_filename, code.co_name) in _STEP_FRAMES:
            depth += 1
        frame = frame.f_back
    return depth


def _back(frame: FrameType) -> FrameType | None:
    return frame.f_back
