"""Sees optimizers made, and their steps."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from anybatch.doctor.compiling import stay_uncompiled
from anybatch.doctor.recording.describing import rates_of
from anybatch.doctor.recording.gradients import Gradients
from anybatch.doctor.recording.naming import modules_in_sight, user_place
from anybatch.doctor.recording.recordings import Recording, Seen
from anybatch.doctor.recording.samplers import Samplers
from anybatch.doctor.recording.stepping import LastStep, are_zero, depth_of_steps, lengths_of
from anybatch.records.events import Cleared, Stepped
from anybatch.records.tables import GroupFacts
from anybatch.tensors.dispatch import functions_unseen, is_asked
from anybatch.torch_private import number_of_function_modes

_LOOKS_AROUND = (0, 5)  # steps
_REVIEWED = 5  # steps of which one has its record written, if it is time, where they are all alike
_NONE = 0, 0, 0
_NOT_BEGUN = -1, False
_MOST_BEGINNINGS = 4  # optimizers whose first steps are all sampled


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
        self.has_closure = False  # whether a step was given a function that takes the gradient
        self._recording, self._gradients, self._samplers, self._on_step = recording, gradients, samplers, on_step
        self.counts: dict[int, int] = {}
        self._made: dict[int, tuple[tuple[str, int], int]] = {}
        self._begun: tuple[int, bool] = _NOT_BEGUN
        self._nested = False  # whether a step within another one was seen since the last one that was not
        self._without: dict[int, tuple[int, tuple[int, ...], int]] = {}
        self._numbers: dict[int, tuple[tuple[GroupFacts, ...], frozenset[int]]] = {}
        self._known: dict[int, LastStep] = {}
        self._hand = _NONE
        self._like: Seen | None = None  # what the step that has begun is like
        self._key: Any = None
        self._handles: list[Any] = []
        self._followed: set[Any] = set()
        self._usual, self._threads = recording.known, recording.threads
        self._before_step = recording.guarded(self._before)
        self._after_step = recording.guarded(self._after)

    def __reduce__(self) -> Any:
        """Nothing, in a pickle with the code of a step, as ``cloudpickle`` makes one: torch's hooks come with it."""
        nothing = nullcontext().__exit__
        return SimpleNamespace, (), {"_pre_hook": nothing, "_post_hook": nothing}

    def attach(self) -> None:
        """Puts the hooks in place."""
        recording, patches = self._recording, self._recording.patches
        stay_uncompiled()
        self._handles = [
            register_optimizer_step_pre_hook(self._pre_hook),
            register_optimizer_step_post_hook(self._post_hook),
        ]
        patches.wrap(torch.optim.Optimizer, "__init__", self._initialised(recording.guarded(self._was_made)))

    def detach(self) -> None:
        """Takes off what ``Recording.patches`` does not know of."""
        self._followed.clear()
        while self._handles:
            self._handles.pop().remove()

    def follow(self, optimizer: Any) -> None:
        """Makes sure that the steps of an optimizer are seen whose class torch has not hooked.

        Not those of one that has the very groups of another one, which it has step: Accelerate wraps optimizers so.
        """
        step = type(optimizer).step
        if isinstance(optimizer, torch.optim.Optimizer) and step not in self._followed:
            others = self._recording.numbering.optimizers()
            if any(one is not optimizer and one.param_groups is optimizer.param_groups for _, one in others):
                return
            self._followed.add(step)
            if not getattr(step, "hooked", False):
                self._recording.patches.wrap(type(optimizer), "step", self._doctored)

    def _doctored(self, original: Callable[..., Any]) -> Callable[..., Any]:
        pre, post = self._pre_hook, self._post_hook

        def doctored_step(optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
            pre(optimizer, (optimizer, *args), kwargs)
            result = original(optimizer, *args, **kwargs)
            post(optimizer, (optimizer, *args), kwargs)
            return result

        return doctored_step

    def _initialised(self, was_made: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def init(optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
                original(optimizer, *args, **kwargs)
                was_made(optimizer)

            return init

        return wrapped

    def _was_made(self, optimizer: Any) -> None:
        stay_uncompiled()  # torch loads its compiler with the first optimizer
        known = self._recording.numbering.known
        numbers = {known(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        after = sum(
            count for number, count in self.counts.items() if not numbers.isdisjoint(self._parameter_numbers(number))
        )
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
        self.follow(optimizer)
        return numbering.optimizer(optimizer, place=place, after=after)

    def _pre_hook(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if number_of_function_modes() and is_asked():
            with functions_unseen():
                self._pre_hook(optimizer, args, kwargs)
            return
        if self._threads.ident != get_ident() and not self._threads.admits("updates", optimizer):
            return
        usual = self._usual
        usual.key = None
        closure = (len(args) > 1 and args[1] is not None) or bool(kwargs and kwargs.get("closure"))
        if closure:  # what runs within a step is recorded in full: gradients are cleared and made before its end
            usual.usable, self.has_closure = False, True
        if usual.usable and self._begun[0] < 0 and not self._nested:
            try:  # all of it in here: in each step a function that is called costs most
                known: Any = self._known.get(id(optimizer))
                groups = optimizer.param_groups
                own = groups[0]["params"]
                is_like = known is not None and known.reference() is optimizer and known.count < known.due
                if is_like and known.lengths == ((len(own),) if len(groups) == 1 else lengths_of(groups)):
                    seen = usual.find(("step", known.number, closure, self._recording.in_scaler, usual.state))
                    if seen is not None and (own[0].grad is None) is known.lacks:
                        self._begun, self._like = known.begun, seen
                        return
            except BaseException as error:  # noqa: BLE001 - the user's run goes on; Ctrl-C is raised again
                self._recording.gave_up(error)
        if self._begun[0] >= 0 and depth_of_steps() > 1:
            self._nested = True
        elif depth_of_steps() <= 1:
            self._key, self._like = usual.take_key(), None
            self._before_step(optimizer, args, kwargs)

    def _post_hook(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if number_of_function_modes() and is_asked():
            with functions_unseen():
                self._post_hook(optimizer, args, kwargs)
            return
        if self._threads.ident != get_ident() and self._threads.elsewhere():
            return
        if self._nested or not self._usual.usable:
            if depth_of_steps() > 1:
                return
            self._nested = False
        if self._like is None:
            self._after_step(optimizer, args, kwargs)
            return
        try:  # all of it in here, as above
            recording, known, seen, self._like = self._recording, self._known[id(optimizer)], self._like, None
            self._begun, recording.stepped = _NOT_BEGUN, known.reference
            number, groups, counter = known.number, optimizer.param_groups, recording.counter
            count, rate = self.counts[number], groups[0]["lr"] if len(groups) == 1 else None
            counter.at = at = counter.at + 1
            lrs = (rate,) if type(rate) is float else rates_of(optimizer)
            recording.journal.rows.append([seen.fact, at, counter.step, count, lrs])
            self._usual.state = seen.state
            self._gradients.done.append(seen)
            self.counts[number] = count = count + 1
            known.count = step = count if number < _MOST_BEGINNINGS else sum(self.counts.values())
            if count > counter.step:
                counter.step = count
            if self._samplers.matters:
                self._samplers.like_step()
            if step >= known.due or step % _REVIEWED == 0 or self._samplers.matters:
                self._on_step(step)
        except BaseException as error:  # noqa: BLE001 - the user's run goes on; Ctrl-C is raised again
            self._recording.gave_up(error)

    def _know(self, optimizer: Any, number: int) -> None:
        """Takes note of what the next step is compared with."""
        known = self._known.get(id(optimizer))
        if known is None or known.reference() is not optimizer:
            known = self._known[id(optimizer)] = LastStep(optimizer, number)
        known.lengths = lengths_of(optimizer.param_groups)
        first = next((tensor for group in optimizer.param_groups[:1] for tensor in group["params"]), None)
        known.lacks = None if first is None else first.grad is None

    def _counts_on(self, optimizer: Any, number: int, count: int) -> None:
        self.counts[number] = count + 1
        known = self._known[id(optimizer)]
        known.count = step = self._sampling_step(number)
        every = self._recording.sampling.every
        known.due = -(-step // every) * every if step > _LOOKS_AROUND[-1] else 0
        counter = self._recording.counter
        counter.step = max(counter.step, count + 1)
        self._on_step(self._sampling_step(number))

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        number = self.numbered(optimizer)
        count = self.counts.get(number, 0)
        if count in _LOOKS_AROUND:
            self._look_around(number)
        sampled = self._recording.sampling.wants(self._sampling_step(number))
        self._hand = self._gradients.at_step(closely=self._recording.sampled or self.has_closure)
        if self._hand[0]:
            fact = Cleared(by="hand", parameters=self._hand[0], of=self._hand[1])
            self._recording.emit(fact)
            self._usual.passed(fact, *self._hand)
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
        self._begun = _NOT_BEGUN
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
        fact = Stepped(
            optimizer=number, number=count, lrs=rates_of(optimizer),
            with_grad=with_grad, without=without if changed else None, without_count=len(without),
            zero=are_zero(optimizer) if sampled else None,
            closure=bool(args[1:] and args[1] is not None) or kwargs.get("closure") is not None,
            by="scaler" if recording.in_scaler else "step", edited=self._hand[2], **recording.place(),
        )  # fmt: skip
        recording.emit(fact)
        recording.stepped = weakref.ref(optimizer)
        key, self._key = self._key, None
        key = None if changed or sampled or fact.edited or fact.closure else key
        used = self._parameter_numbers(number)
        recording.known.passed(fact, number, with_grad, len(without), key=key, owner=optimizer, parameters=used)
        self._know(optimizer, number)
        self._samplers.after_step(optimizer, number, count, sampled=sampled)
        self._counts_on(optimizer, number, count)
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
