"""Steps that are all alike: only the order of their calls is followed, and the rest is left to the sampled steps."""

import math
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast

import torch

from anybatch.doctor.recording.alike import comes_back, identity_of, rows_and_leaves
from anybatch.doctor.recording.factors import factor_and_top
from anybatch.doctor.recording.journal import Journal
from anybatch.doctor.recording.scaledlosses import Scaled, ScaledLosses
from anybatch.doctor.recording.trusting import Trusting
from anybatch.records.events import Backward, Cleared, Clipped, Forward, Scaler, Scheduled, Stepped
from anybatch.records.lossfacts import LossCall
from anybatch.tensors.dispatch import is_watched, item_of
from anybatch.tensors.graph import in_backward

_PROVED = 4  # steps in a row that have to be alike
_LONGEST = 256  # calls of a step
_END = None, None, 0, 0

Last = Literal["used", "cleared", "added"]
"""What was done last to the gradients: used by a step, cleared, or added onto by a backward."""


class Standing(NamedTuple):
    """Where a run is in a step whose calls were only followed so far.

    Args:
        forward: the module that was called last, and the fact that its call is like; ``None`` where it is gone.
        called: its arguments, where they are known.
        calls: the numbers of calls of loss functions since the last backward.
        gradients: what was done to them last.
        number: of the optimizer that steps.
        optimizer: a weak reference to it.
        loss: a weak reference to the last one that a backward ran for.
        value: of the loss of the last step, ``None`` where it is not known.
    """

    forward: tuple[Any, Forward] | None
    called: tuple[Any, Any] | None
    calls: list[int]
    gradients: Last
    number: int
    optimizer: Callable[[], Any]
    loss: Callable[[], Any] | None
    value: float | None


class Cycle(Trusting):
    """The calls of a step, in the order in which they come back in each step.

    Hooks cost most where their code has left the processor's caches since the step before. Once some steps in a row
    were recorded as repetitions of the same facts in the same order, a hook only compares the call that it sees with
    the one that is expected, and keeps the values of losses and learning rates. The first call that differs, the next
    step that is sampled, and every fact from elsewhere end that: what was left out is written down first.

    Args:
        journal: takes the facts.
        depths: how many frames lie between a kind of hook and the user's line.
        given_up: is told why a hook could not tell what it saw, see ``Templates.given_up``.

    Attributes:
        on: whether steps are followed in this way.
        seen: what the calls of a step are known by that is recorded by single repetitions: a weak reference to a
            module, optimizer or scheduler, a name, or ``identity_of`` what is clipped; the code that made the call, by
            ``id``, and the place in it.
        on_leave: is told of the end, and where the run is.
        scaled: losses of a ``GradScaler``.
    """

    __slots__ = ("_alike", "_depths", "_proved", "_tokens", "given_up", "on", "on_leave", "scaled", "seen")

    def __init__(self, journal: Journal, depths: Mapping[str, int], given_up: Callable[[BaseException], None]) -> None:
        super().__init__(journal)
        self.on = self._proved = False
        self.seen: list[tuple[Any, int, int]] = []
        self.given_up, self._depths = given_up, depths
        self.on_leave: Callable[[Standing], None] = lambda standing: None
        self.scaled = ScaledLosses()
        self._tokens: list[tuple[Any, int, int]] = []
        self._expected = [_END]
        self._alike = 0

    # steps that are recorded call by call

    def restart(self) -> None:
        """A step has ended that was recorded in full; those before it count no more."""
        self._alike = 0
        self._begin()

    def stepped(self, *, calm: bool) -> None:
        """A step has ended that was recorded as a repetition.

        Args:
            calm: whether nothing else is being followed.
        """
        rows, count = self._journal.rows, len(self.seen)
        whole = count == self._counter.at - self._began and count <= min(len(rows), _LONGEST)
        likes = tuple([row[0] for row in rows[-count:]]) if whole and calm else ()
        if not likes or not comes_back(likes):
            self._alike, self._proved = 0, False
        elif likes == self._likes and self.seen == self._tokens:
            self._alike += 1
            if self._alike >= (1 if self._proved else _PROVED):
                self._proved = self.on = True
                self._at, self._values = 0, []
        else:
            self._likes, self._tokens = likes, self.seen[:]
            self._expected = [*((like, *token) for like, token in zip(likes, self._tokens, strict=True)), _END]
            self._alike, self._proved = 1, False
            self._expect(likes, self._tokens)
        self._begin()

    def _begin(self) -> None:
        self.seen.clear()
        self._began = self._counter.at

    # steps that are followed

    def forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether the call of a module is the one that is expected."""
        try:
            if self.trusts:
                self.follow_again()
            like, token, code, place = self._expected[self._at]
            frame = sys._getframe(self._depths.get("forward", 0))
            is_there = frame.f_lasti == place and id(frame.f_code) == code
            grad = torch.is_grad_enabled()
            is_there = is_there and type(like) is Forward and token() is module
            if is_there and module.training is like.training and grad is like.grad:
                first = args[0] if len(args) == 1 else None
                if type(first) is torch.Tensor:
                    rows, known = first.size(0) if first.dim() else -1, not first.requires_grad
                else:
                    rows, known = rows_and_leaves(args, kwargs)
                if rows == like.rows and (grad or torch.is_inference_mode_enabled() is like.inference):
                    if grad:
                        self.called = (args, kwargs) if known else None
                    self._at += 1
                    return True
            if not in_backward():  # where something is computed again
                self.leave()
            return False
        except BaseException as error:  # noqa: BLE001 - see ``_gave_up``
            self._gave_up(error)
            return False

    def loss(self, name: str, result: torch.Tensor) -> bool:
        """Whether the call of a loss function is the one that is expected; its value is kept then."""
        try:
            if self.trusts:
                self.follow_again()
            like, token, code, place = self._expected[self._at]
            if type(like) is LossCall and token == name:
                frame = sys._getframe(self._depths.get("loss", 0))
                if frame.f_lasti == place and id(frame.f_code) == code:
                    if type(result) is torch.Tensor and result.is_cpu and result.numel() == 1:
                        value = item_of(result) if is_watched() else result.item()  # fewer calls
                        if type(value) is float and math.isfinite(value):
                            self._values.append(value)
                            self.read = weakref.ref(result), result._version, value
                            self._at += 1
                            return True
                    elif self._keeps(result):
                        self._at += 1
                        return True
            self.leave()
            return False
        except RuntimeError:  # of a transform, whose tensors have no values
            self.leave()
            return False
        except BaseException as error:  # noqa: BLE001 - see ``_gave_up``
            self._gave_up(error)
            return False

    def backward(self, tensors: Any, args: Any, kwargs: Any) -> bool:
        """Whether a backward is the one that is expected; the value of its loss is kept then."""
        try:
            if self.trusts:
                self.follow_again()
            like, _, code, place = self._expected[self._at]
            if type(like) is Backward and len(tensors) == 1 and kwargs.get("accumulate_grad", True):
                loss, frame = tensors[0], sys._getframe(self._depths.get("backward", 0))
                is_there = frame.f_lasti == place and id(frame.f_code) == code
                scaled = like.scaled
                if is_there and like.factor != 1.0:
                    is_there = (like.factor, like.top) == factor_and_top(loss, scaled=scaled)
                if is_there and (like.retain, like.create) == args[1:3]:
                    read, version, value = self.read
                    if not scaled and read() is loss and loss._version == version:
                        self._values.append(value)
                        self._at += 1
                        self._loss, self._is_direct = read, True
                        return True
                    scale, is_like = self.scaled.scale_of(loss), not self._is_direct
                    self._is_direct = False  # something is made of the loss that was not before
                    if is_like and (scale is not None) is scaled and self._keeps(loss, 1.0 / scale if scale else 1.0):
                        self.scaled.drop(loss)
                        self._at += 1
                        self._loss = weakref.ref(loss)
                        return True
            self.leave()
            return False
        except BaseException as error:  # noqa: BLE001 - see ``_gave_up``
            self._gave_up(error)
            return False

    def cleared(self, owner: Any) -> bool:
        """Whether an owner of gradients that is about to clear them is the one that is expected."""
        try:
            if self.trusts:
                self.follow_again()
            like, token, code, place = self._expected[self._at]
            frame = sys._getframe(self._depths.get(like.by, 0)) if type(like) is Cleared else None
            if frame is not None and token() is owner and frame.f_lasti == place and id(frame.f_code) == code:
                self._at += 1
                return True
            self.leave()
            return False
        except BaseException as error:  # noqa: BLE001 - see ``_gave_up``
            self._gave_up(error)
            return False

    def clipped(self, by: str, given: Any, limit: Any, norm: Any) -> bool:
        """Whether a clipping that is about to happen is the one that is expected; the norm is kept then."""
        try:
            if self.trusts:
                self.follow_again()
            like, token, code, place = self._expected[self._at]
            is_like = type(like) is Clipped and like.by == by and type(limit) in (float, int) and like.limit == limit
            if is_like and token == identity_of(given):
                frame = sys._getframe(self._depths.get("clip", 0))
                if frame.f_lasti == place and id(frame.f_code) == code and like.scale == self.scaled.in_force:
                    if norm is None:
                        self._values.append(None)
                    if norm is None or self._keeps(norm):
                        self._at += 1
                        return True
            self.leave()
            return False
        except BaseException as error:  # noqa: BLE001 - see ``_gave_up``
            self._gave_up(error)
            return False

    def schedule(self, scheduler: Any) -> Scheduled | None:
        """What the step of a scheduler that is about to step is like, if it is the one that is expected."""
        try:
            if self.trusts:
                self.follow_again()
            like, token, code, place = self._expected[self._at]
            if type(like) is Scheduled and token() is scheduler:
                frame = sys._getframe(self._depths.get("schedule", 0))
                if frame.f_lasti == place and id(frame.f_code) == code:
                    return like
            self.leave()
            return None
        except BaseException as error:  # noqa: BLE001 - see ``_gave_up``
            self._gave_up(error)
            return None

    def scheduled(self, number: int, before: tuple[float, ...], after: tuple[float, ...]) -> None:
        """The step of the scheduler has ended.

        Args:
            number: of its steps before.
            before: the learning rates before it.
            after: and after it.
        """
        self._values += (number, before, after)
        self._at += 1

    def scaler(self, scaler: Any, call: str, optimizer: int, now: Scaled) -> bool:
        """Whether a call of a ``GradScaler`` that has ended is the one that is expected.

        Args:
            scaler: that was called.
            call: of which of its methods.
            optimizer: the number of the one that it was given.
            now: what it did.
        """
        try:
            if self.trusts:
                self.follow_again()
            like, token, code, place = self._expected[self._at]
            if type(like) is Scaler and (like.call, like.optimizer) == (call, optimizer) and token() is scaler:
                frame = sys._getframe(self._depths.get("scaler", 0))
                if frame.f_lasti == place and id(frame.f_code) == code:
                    values = self._values
                    values += (now.before, now.after, None)
                    if isinstance(now.skipped, torch.Tensor):
                        self._journal.later(values, len(values) - 1, now.skipped, bool)
                    else:
                        values[-1] = now.skipped
                    self._at += 1
                    return True
            self.leave()
            return False
        except BaseException as error:  # noqa: BLE001 - see ``_gave_up``
            self._gave_up(error)
            return False

    def step(self, optimizer: Any, by: str) -> Stepped | None:
        """What the step of an optimizer that is about to step is like, if it is the one that is expected."""
        try:
            if self.trusts:
                self.follow_again()
            like, token, code, place = self._expected[self._at]
            is_like = type(like) is Stepped and like.by == by and token() is optimizer
            if is_like and len(optimizer.param_groups) == len(like.lrs):
                frame = sys._getframe(self._depths.get("step", 0))
                if frame.f_lasti == place and id(frame.f_code) == code:
                    return cast(Stepped, like)
            self.leave()
            return None
        except BaseException as error:  # noqa: BLE001 - see ``_gave_up``
            self._gave_up(error)
            return None

    def ended(self, number: int, rates: tuple[Any, ...]) -> None:
        """The step of the optimizer has ended.

        Args:
            number: of its steps before.
            rates: its learning rates.
        """
        counter, values = self._counter, self._values
        self.value = values[0] if values and type(values[0]) is float else None  # what a step gives first
        values += (number, rates)
        self._journal.rows.append([self._likes, counter.at + 1, counter.step, values])
        counter.at = self._began = counter.at + len(self._likes)
        self._at, self._values = 0, []
        self._ended = number + 1, rates

    def _keeps(self, loss: Any, unscale: float = 1.0) -> bool:
        if type(loss) is not torch.Tensor or loss.numel() != 1 or loss.is_complex():
            return False
        if not loss.is_cpu:
            self._values.append(None)
            self._journal.later(self._values, len(self._values) - 1, loss, lambda value: value * unscale)
            return True
        try:
            value = item_of(loss)
        except RuntimeError:  # of a transform, whose tensors have no values
            return False
        if not math.isfinite(value):
            return False
        self._values.append(value * unscale)
        return True

    def _gave_up(self, error: BaseException) -> None:
        """Ends the cycle for an error of the doctor's own; the user's run goes on, whatever happens in here."""
        self.leave()
        self.given_up(error)

    def leave(self) -> None:
        """Records the calls of this step so far one by one, and has the next ones recorded as without a cycle."""
        if not self.on:
            return
        self.follow_again()
        self.on, self._alike = False, 0
        if None in self._values:
            self._journal.settle()
        begun, self._began = self._expected[: self._at], self._counter.at
        values, calls, counter = iter(self._values), list[int](), self._counter
        gradients: Last = "used"
        for like, *_ in begun:
            counter.at = at = counter.at + 1
            row: list[Any] = [like, at, counter.step]
            if isinstance(like, Forward):
                row.append(like.seconds)
            elif isinstance(like, LossCall):
                row.append(next(values))
                calls.append(at)
            elif isinstance(like, Backward):
                row += (next(values), tuple(calls))
                gradients, calls = "added", []
            elif isinstance(like, Clipped):
                row.append(next(values))
            elif isinstance(like, (Scheduled, Scaler)):
                row += (next(values), next(values), next(values))
            else:
                gradients = "cleared"
            self._journal.rows.append(row)
        self.seen[:] = [(token, code, place) for _, token, code, place in begun]
        calls_before = (*begun[::-1], *self._expected[-2::-1])
        last = next((one for one in calls_before if isinstance(one[0], Forward) and one[0].grad), None)
        module = None if last is None else last[1]()
        forward = None if last is None or module is None else (module, last[0])
        stepped = self._likes[-1].optimizer, self._tokens[-1][0]
        standing = Standing(forward, self.called, calls, gradients, *stepped, self._loss, self.value)
        self.called = None
        try:
            self.on_leave(standing)
        except BaseException as error:  # noqa: BLE001 - the user's run goes on; Ctrl-C is raised again
            self.given_up(error)
