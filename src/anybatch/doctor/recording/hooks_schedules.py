"""Sees learning rate schedulers step, data loaders begin and end, states being loaded, and warnings being shown."""

import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler
from torch.utils.data import dataloader as loaders

from anybatch.doctor.recording.describing import itself, rates_of
from anybatch.doctor.recording.hooks_optimizers import OptimizerHooks
from anybatch.doctor.recording.modes import reissued
from anybatch.doctor.recording.naming import variable_of
from anybatch.doctor.recording.patches import noting
from anybatch.doctor.recording.recordings import Depth, Recording
from anybatch.doctor.samples.inputs import data_of, standardised
from anybatch.records.events import Epoch, Loaded, Scheduled, Warned
from anybatch.userlines import user_place

_MOST_SETS = 8  # that are looked at, since a loader may be made for each epoch


class ScheduleHooks:
    """Wraps the ``step`` of all schedulers; ``unstepped`` has those that were made, by their ``id``."""

    def __init__(self, recording: Recording, optimizers: OptimizerHooks, unstepped: dict[int, Any]) -> None:
        self._recording, self._optimizers = recording, optimizers
        self._wrapped = recording.around(
            lambda scheduler, *_: rates_of(getattr(scheduler, "optimizer", None)), self._ended, "updates",
            when=lambda scheduler, _: getattr(scheduler, "_step_count", 1) > 0,  # in its constructor it is 0
            outermost=Depth(),
        )  # fmt: skip
        self._counts: dict[int, int] = {}
        self._made: dict[int, tuple[str, Callable[[], int], tuple[str, int]]] = unstepped
        self._classes: set[type] = set()

    def attach(self) -> None:
        """Puts the wrappers in place; ``Recording.patches`` takes them off."""
        for cls in scheduler_classes():
            self._follow(cls)
        made = noting(self._recording.guarded(self._was_made))
        self._recording.patches.wrap(lr_scheduler.LRScheduler, "__init__", made)

    def _follow(self, cls: type) -> None:
        if cls not in self._classes and "step" in vars(cls):
            self._classes.add(cls)
            self._recording.patches.wrap(cls, "step", self._wrapped)

    def _was_made(self, scheduler: Any, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        for cls in type(scheduler).__mro__:
            if issubclass(cls, lr_scheduler.LRScheduler):
                self._follow(cls)
        number = self._recording.numbering.number_of_optimizer(itself(optimizer))
        self._made[id(scheduler)] = type(scheduler).__name__, number, user_place(2)

    def _ended(self, scheduler: Any, before: tuple[float, ...], _: Any) -> None:
        recording, optimizer = self._recording, itself(getattr(scheduler, "optimizer", None))
        if optimizer is not None:
            self._optimizers.numbered(optimizer)
        _, _, place = self._made.pop(id(scheduler), (None, None, None))
        number = recording.numbering.scheduler(scheduler, place=place)
        count = self._counts.get(number, 0)
        self._counts[number] = count + 1
        recording.note(Scheduled, (number,), (count, before, rates_of(optimizer)), ("scheduler",))


def scheduler_classes() -> list[type]:
    """The classes of schedulers that torch has."""
    classes = [value for value in vars(lr_scheduler).values() if inspect.isclass(value)]
    return [cls for cls in dict.fromkeys(classes) if issubclass(cls, lr_scheduler.LRScheduler)]


class LoaderHooks:
    """Wraps the beginning of every ``DataLoader``, which ``seen`` is shown once, and the giving of batches."""

    def __init__(self, recording: Recording, seen: Callable[[Any], None]) -> None:
        self._recording, self._seen = recording, seen
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._given: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._count = 0
        self._scales: dict[int, tuple[float, ...]] = {}

    def attach(self) -> None:
        """Puts the wrappers in place; ``Recording.patches`` takes them off."""
        guarded = self._recording.guarded  # a loader is often read in a thread of its own
        begun, ended = guarded(self._begun, everywhere=True), guarded(self._ended, everywhere=True)
        given = self._given

        def giving(original: Callable[..., Any]) -> Callable[..., Any]:
            def give(iterator: Any) -> Any:
                try:
                    batch = original(iterator)
                except StopIteration:
                    ended(iterator)
                    raise
                entry = given.get(iterator)
                if entry is not None:
                    entry[1] += 1
                return batch

            return give

        self._recording.patches.wrap(DataLoader, "__iter__", noting(after=begun))
        self._recording.patches.wrap(loaders._BaseDataLoaderIter, "__next__", giving)

    def _begun(self, iterator: Any, loader: Any) -> None:
        number = self._numbers.get(loader)
        if number is None:
            number = self._numbers[loader] = self._count
            self._count += 1
            self._seen(loader)
            if number < _MOST_SETS:
                self._scales[number] = standardised(data_of(getattr(loader, "dataset", None)))
        self._given[iterator] = [number, 0]
        sampler = getattr(loader, "sampler", None)
        self._recording.tell(
            Epoch(
                loader=number, batches=_length(loader), rows=_length(getattr(loader, "dataset", None)),
                batch_size=getattr(loader, "batch_size", None) or -1,
                shuffled=isinstance(sampler, RandomSampler) or bool(getattr(sampler, "shuffle", False)),
                workers=int(getattr(loader, "num_workers", 0)), standardised=self._scales.get(number, ()),
                weights=_length(sampler.weights) if isinstance(sampler, WeightedRandomSampler) else -1,
                **self._recording.place(),
            )
        )  # fmt: skip

    def _ended(self, iterator: Any) -> None:
        entry = self._given.pop(iterator, None)
        if entry is not None:
            self._recording.tell(Epoch(loader=entry[0], ended=True, batches=entry[1], **self._recording.place()))


def _length(sized: Any) -> int:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return -1


_MOST_KEYS = 12
_LONGEST = 500


class LoadingHooks:
    """Wraps ``load_state_dict`` of modules, optimizers and schedulers."""

    def __init__(self, recording: Recording, optimizers: OptimizerHooks) -> None:
        self._recording, self._optimizers = recording, optimizers

    def attach(self) -> None:
        """Puts the wrappers in place; ``Recording.patches`` takes them off."""
        recording, patches = self._recording, self._recording.patches
        loads = Depth()

        owners = [(torch.nn.Module, "module"), (torch.optim.Optimizer, "optimizer")]
        owners += [(cls, "scheduler") for cls in scheduler_classes() if "load_state_dict" in vars(cls)]
        for owner, into in owners:
            seen = recording.around(
                lambda owner, args, kwargs: (rates_of(owner), args, kwargs), partial(self._noted, into), "looks",
                outermost=loads,
            )  # fmt: skip
            patches.wrap(owner, "load_state_dict", seen)
        shown = recording.guarded(self._shown, everywhere=True)

        def showing(original: Callable[..., Any]) -> Callable[..., Any]:
            def show(message: Any) -> Any:
                if reissued(message):
                    return None
                shown(message)
                return original(message)

            return show

        # showwarning can't be replaced without losing what catch_warnings records and the source of the warning
        patches.wrap(warnings, "_showwarnmsg", showing)

    def _noted(self, into: str, owner: Any, begun: Any, _: Any) -> None:
        before, (state, *args), kwargs = begun
        facts: dict[str, Any] = {"lrs_before": before, "lrs_after": rates_of(owner)}
        if into == "module":
            number, facts = self._recording.numbering.root_of(owner), _keys(owner, state)
            facts["strict"] = bool(args[0] if args else kwargs.get("strict", True))
        elif into == "optimizer":
            number = self._optimizers.numbered(owner)
        else:
            number, rates = self._recording.numbering.scheduler(owner), rates_of(getattr(owner, "optimizer", None))
            facts = {"lrs_before": rates, "lrs_after": rates}
        number = -1 if number is None else number
        place = self._recording.place()
        self._recording.emit(Loaded(into=into, number=number, variable=variable_of(owner), **facts, **place))

    def _shown(self, message: Any) -> None:
        self._recording.tell(
            Warned(
                category=getattr(message.category, "__name__", ""), text=str(message.message)[:_LONGEST],
                file=message.filename or "", line=message.lineno or 0,
            )
        )  # fmt: skip


def _keys(module: torch.nn.Module, state: Any) -> dict[str, Any]:
    """What a module and the state that was loaded into it have in common."""
    own = module.state_dict()
    given = {name: _shape(value) for name, value in state.items()} if isinstance(state, Mapping) else {}
    return {
        "matched": sum(1 for name, value in own.items() if name in given and given[name] == _shape(value)),
        "of": len(own), "missing": tuple([name for name in own if name not in given][:_MOST_KEYS]),
        "unexpected": tuple([str(name) for name in given if name not in own][:_MOST_KEYS]),
    }  # fmt: skip


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
