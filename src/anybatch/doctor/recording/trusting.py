"""Steps whose calls are only counted, between steps that are followed call by call."""

import math
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from anybatch.doctor.recording.alike import rows_and_leaves
from anybatch.doctor.recording.journal import Journal
from anybatch.doctor.samples.nonfinite import kept_of
from anybatch.records.events import Backward, Cleared, Forward, Stepped
from anybatch.records.lossfacts import LossCall
from anybatch.tensors.dispatch import item_of
from anybatch.torch_private import in_transform, is_jit_tracing, number_of_function_modes, number_of_modes

FOLLOWED = 32
"""Steps of which one is followed in any case, once the others are trusted; so is the one where a sample may be due."""
FROM = 25
"""Steps of an optimizer before any is trusted."""
LONGEST_STEP = 0.05
"""Seconds of a step up to which following it costs enough to be worth avoiding."""
_MOST_MISSES = 4  # losses that are not those of a loss function, until no step is trusted
_FORWARD, CLEARED, _LOSS, _BACKWARD, STEPPED = 1, 2, 4, 8, 16
_CALLS: dict[type, tuple[int, str]] = {
    Forward: (_FORWARD, "forward_after"),
    Cleared: (CLEARED, "cleared_after"),
    LossCall: (_LOSS, "loss_after"),
    Backward: (_BACKWARD, "backward_after"),
    Stepped: (STEPPED, "step_after"),
}


class Trusting:
    """Steps that are trusted to be like those before.

    Each line of a hook costs most where the matrix products of a step have emptied the processor's caches, so that even
    the comparisons of a followed step show in a step of a few milliseconds. In all but every 25th and every 32nd step
    hooks therefore look at the one model, its mode, the rows that it is given, the value of the loss and the learning
    rate, and see to it that the calls come in their order; whatever differs has the step followed from there on. From
    which lines they come those steps tell, and of gradients that are not finite the next loss, see ``NonFiniteWatch``.
    Only steps with one forward, one backward and one optimizer are trusted, without a scaler, clipping or a schedule,
    and only where steps are short.

    Attributes:
        trusts: whether this step is trusted.
        calls: which ones were seen in it.
        trusted: how many steps were trusted.
        allowed: whether steps are short enough for it to matter.
        stands_for: for how many steps one stands whose graph is followed.
        on_trusted: is told of the number of an optimizer, and how many of its steps were trusted and are recorded now.
        threads: say whose events are recorded.
        called: the arguments of the last forward with a gradient.
        forward_after, cleared_after, loss_after, backward_after, step_after: the calls that come before this one in the
            step, -1 for a call that is not in it.
        optimizer, rate: whose steps are trusted, and its learning rate.
        left: steps that are still to be trusted.
        waiting: the losses of steps that were trusted and are not recorded yet.
        read: the last loss of a loss function, its version then, and its value: most backwards run for that one.
        looks: whether gradients are looked at in each step, since nothing will tell of them later.
        is_unseen: whether nobody looked at the gradients of the last step.
        value: of the loss of the last step that was followed or trusted, ``None`` where it is not known.
    """

    __slots__ = (
        *("trusts", "calls", "trusted", "allowed", "threads", "called", "on_trusted", "stands_for"),
        *("forward_after", "cleared_after", "loss_after", "backward_after", "step_after"),
        *("left", "waiting", "read", "optimizer", "rate", "looks", "is_unseen", "value"),
        *("_at", "_expected", "_journal", "_counter", "_began", "_likes", "_loss", "_values", "_is_plain", "_root"),
        *("_rows", "_name", "_flags", "_ended", "_misses", "_is_direct"),
    )

    def __init__(self, journal: Journal) -> None:
        self._journal, self._counter = journal, journal.counter
        self.trusts = self.allowed = self._is_plain = self.looks = self.is_unseen = False
        self.value: float | None = None
        self.trusted = self.calls = self.left = 0
        self.stands_for = 1
        self.threads: Any = None
        self.on_trusted: Callable[..., None] = lambda number, steps, *, is_last: None
        self.called: tuple[Any, Any] | None = None
        self._expected: list[tuple[Any, Any, int, int]] = []
        self._likes: tuple[Any, ...] = ()
        self._at, self._began = 0, -1
        self._values: list[Any] = []
        self.waiting: list[float] = []
        self._loss: Callable[[], Any] | None = None
        self.read: tuple[Callable[[], Any], int, float] = (lambda: None), 0, 0.0
        self._root: Callable[[], Any] = lambda: None
        self.optimizer: Callable[[], Any] = lambda: None
        self._rows, self._name, self._flags, self.rate = -1, "", (False, False), 0.0
        self.forward_after = self.cleared_after = self.loss_after = self.backward_after = self.step_after = -1
        self._misses, self._is_direct = 0, False  # whether losses were differentiated as a loss function gave them
        self._ended: tuple[int, tuple[Any, ...]] = 0, ()  # steps that are recorded, and the rates of the last one

    def _gave_up(self, error: BaseException) -> None:
        """Ends this for an error of the doctor's own."""
        raise NotImplementedError

    # calls of a step that is trusted

    def trusts_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether the call of a module is as in the steps before."""
        try:
            if self.calls != self.forward_after or module is not self._root() or not module.training:
                return False
            first = args[0] if len(args) == 1 and not kwargs else None
            if type(first) is torch.Tensor:
                rows, known = first.size(0) if first.dim() else -1, not first.requires_grad
            else:
                rows, known = rows_and_leaves(args, kwargs)
            if rows != self._rows or not torch.is_grad_enabled() or self.threads.ident != get_ident():
                return False
            self.called = (args, kwargs) if known else None
            self.calls |= _FORWARD
            return True
        except BaseException as error:  # noqa: BLE001 - see ``_gave_up``
            self._gave_up(error)
            return False

    def trusts_loss(self, name: str, result: Any) -> bool:
        """Whether the call of a loss function is as in the steps before; its value is kept then."""
        try:
            if name != self._name or self.calls != self.loss_after or type(result) is not torch.Tensor:
                return False
            if not (result.requires_grad and result.is_cpu) or is_jit_tracing() or in_transform():
                return False
            value = item_of(result) if number_of_modes() or number_of_function_modes() else result.item()  # fewer calls
            if not math.isfinite(value):
                return False
            self.read = weakref.ref(result), result._version, value
            self.calls |= _LOSS
            return True
        except RuntimeError:  # of several numbers
            return False
        except BaseException as error:  # noqa: BLE001 - see ``_gave_up``
            self._gave_up(error)
            return False

    def trusts_backward(self, tensors: Any, args: Any, kwargs: Any) -> bool:
        """Whether a backward is as in the steps before; the value of its loss is kept then."""
        try:
            loss, (read, version, value) = tensors[0], self.read
            if self.calls != self.backward_after or len(tensors) != 1 or args[1:3] != self._flags:
                return False
            if not kwargs.get("accumulate_grad", True):  # ``torch.autograd.grad``
                return False
            if self._name:
                if read() is not loss or loss._version != version:  # it was not differentiated as it came
                    self._misses += 1
                    self._is_plain = self._misses < _MOST_MISSES
                    return False
            else:
                if type(loss) is not torch.Tensor or not loss.is_cpu or loss.numel() != 1 or loss.is_complex():
                    return False
                value = item_of(loss) if number_of_modes() or number_of_function_modes() else loss.item()
                if not math.isfinite(value):
                    return False
                self.read = read, _, _ = weakref.ref(loss), loss._version, value
            if self.threads.ident != get_ident():
                return False
            self._loss = read
            self.calls |= _BACKWARD
            return True
        except BaseException as error:  # noqa: BLE001 - see ``_gave_up``
            self._gave_up(error)
            return False

    def unseen(self) -> tuple[Any, float | None] | None:
        """The optimizer whose last gradients nobody looked at, and the loss of that step, if there is one."""
        return (self.optimizer(), self.value) if self.is_unseen else None

    def ended_all(self) -> None:
        """The last of the steps that were to be trusted has ended."""
        try:
            self.follow_again(is_last=True)
        except BaseException as error:  # noqa: BLE001 - see ``_gave_up``
            self._gave_up(error)

    # between steps

    def allow(self, steps: int, seconds: float) -> None:
        """Decides whether steps may be trusted.

        Args:
            steps: that were done.
            seconds: that they took.
        """
        self.allowed = steps >= FROM and seconds < LONGEST_STEP * steps
        self.stands_for = 1

    def trust_next(self, optimizer: Any, steps: int, every: int) -> None:
        """Decides about the next steps after one that was followed, where some may be trusted.

        Args:
            optimizer: that has stepped.
            steps: how often it has.
            every: how many steps there are between two samples.
        """
        self.stands_for = FOLLOWED if self._is_plain else 1
        if self._is_plain and steps % FOLLOWED:
            self.optimizer, self.rate = weakref.ref(optimizer), optimizer.param_groups[0]["lr"]
            self.looks = not any(kept_of(optimizer, one) for one in optimizer.param_groups[0]["params"][:1])
            self.left = min(-steps % FOLLOWED, -steps % every or every)
            self.calls, self.trusts = 0, True

    def follow_again(self, *, is_last: bool = False) -> None:
        """Records the steps that were trusted, and has the calls of this one compared from here on.

        Args:
            is_last: whether a step has ended just now, and with it all that were to be trusted.
        """
        if not self.trusts:
            return
        self.trusts = False
        count, rates = self._ended
        waiting, self.waiting = self.waiting, []
        counter, rows = self._counter, self._journal.rows
        self.trusted += len(waiting)
        if waiting:
            self.is_unseen, self.value = not self.looks, waiting[-1]
        for value in waiting:
            values = [value] * (1 + bool(self._name)) + [count, rates]
            rows.append([self._likes, counter.at + 1, max(counter.step, count), values])
            counter.at = self._began = counter.at + len(self._likes)
            count += 1
        counter.step = max(counter.step, count)
        self._ended = count, rates
        self._at, self._values = 0, []
        for like, *_ in self._expected[:-1]:
            if isinstance(like, Stepped) or not self.calls & _CALLS[type(like)][0]:
                break
            self._at += 1
            if isinstance(like, (LossCall, Backward)):
                self._values.append(self.read[2])
        self.calls = 0
        self.on_trusted(self._likes[-1].optimizer, len(waiting), is_last=is_last)

    def _expect(self, likes: tuple[Any, ...], tokens: list[tuple[Any, int, int]]) -> None:
        """Is told which calls are followed from now on."""
        kinds = [type(one) for one in likes]
        self._misses, self._is_plain, self._is_direct = 0, False, False
        if set(kinds) - _CALLS.keys() or len(set(kinds)) < len(kinds) or not {Forward, Backward} <= set(kinds):
            return
        forward, backward = likes[kinds.index(Forward)], likes[kinds.index(Backward)]
        self._is_plain = (
            forward.grad and forward.training and likes[-1].by == "step"
            and not backward.scaled and backward.factor == 1.0
        )  # fmt: skip
        self._root, self._rows = tokens[kinds.index(Forward)][0], forward.rows
        self._flags, self._name = (backward.retain, backward.create), ""
        self.cleared_after = self.loss_after = -1
        calls = 0
        for like, kind in zip(likes, kinds, strict=True):
            call, after = _CALLS[kind]
            setattr(self, after, calls)
            calls |= call
            self._name = like.function if isinstance(like, LossCall) else self._name
