"""What ``TrainStep`` and ``backward`` have in common: checked options, and a plan or a size of micro-batches."""

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar
from weakref import ref

import torch
import torch.distributed as dist

from anybatch import interception
from anybatch.batch.batches import Splittable
from anybatch.checking.proving import Proofs
from anybatch.errors import NotSplittable, warn
from anybatch.interception import Call, announce, watchers
from anybatch.loss.reducing import ALONE, Reducer
from anybatch.options import Options, check_devices
from anybatch.records.results import StepResult
from anybatch.tensors.modules import device_of, devices_of
from anybatch.update.passes import Task
from anybatch.update.refusals import Verb
from anybatch.update.transaction import SizeLimit, Snapshot

if TYPE_CHECKING:
    from anybatch.parallel.devices import Devices
    from anybatch.planning.observing import AnyFollower
    from anybatch.planning.subjects import Subject


P = ParamSpec("P")
T = TypeVar("T")


class Owner(Generic[T]):
    """The object that has this one, as long as someone else holds it.

    The object goes with its last reference then, and with it the memory of its model; a cycle of references would keep
    them until the garbage collector runs. In a copy by ``copy.deepcopy`` it is the copy of the object.
    """

    def __init__(self, owner: T) -> None:
        self._reference = ref(owner)

    def __call__(self) -> T:
        """The object."""
        found = self._reference()
        if found is None:
            raise ReferenceError("the object that this one belongs to is gone")
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> "Owner[T]":
        return Owner(copy.deepcopy(self(), memo))

    def __reduce__(self) -> Any:
        kind = type(self()).__name__
        raise TypeError(
            f"got a {kind} to pickle, which holds hooks and locks of this process; save the state_dict() of model, "
            f"optimizer and {kind}, and load them into new ones"
        )


def _call(owner: Owner[Any], name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(owner(), name)(*args, **kwargs)


def weak_method(method: Callable[P, T]) -> Callable[P, T]:
    """Calls a method of an object that may own the caller; see ``Owner``."""
    bound: Any = method
    return partial(_call, Owner(bound.__self__), bound.__name__)


class Engine:
    """A model, a loss and options, and what is kept between logical batches: sizes, the plan and proofs.

    Args:
        devices: several devices of this process that share the micro-batches.
        makes_scaler: whether float16 gets a ``GradScaler`` where none was given.
        beside: what a plan is made for that is not among the options, by the names of ``Subject``.
    """

    _verb: Verb | None = "backward"

    def __init__(
        self, options: Options, proofs: Proofs, *, devices: "Devices | None" = None, makes_scaler: bool = False,
        **beside: Any,
    ) -> None:  # fmt: skip
        self._options, self._proofs, self._placements, self._beside = options, proofs, devices, beside
        self.model, self.loss_fn = options.model, options.loss_fn
        self._settings = options.settings(makes_scaler=makes_scaler)
        self._devices: list[torch.device] | None = None  # of the model; looked for where it is asked for
        planned = options.memory is not None or options.plan is not None
        self._follower = self._following() if planned else None
        if self._follower is not None:
            self._follower.on_plan = proofs.forget_operations
        self._limit = SizeLimit(options.micro_batch_size) if self._follower is None else self._follower

    def _following(self) -> "AnyFollower":
        from anybatch.planning.following import Follower

        return Follower(weak_method(self._subject), memory=self._options.memory, plan=self._options.plan)

    def _subject(self, splittable: Splittable) -> "Subject":
        """What a plan is made for."""
        from anybatch.planning.subjects import Subject

        return Subject.of(self._options, self._settings, splittable, devices=self._placements, **self._beside)

    def _intercept(self, batch: Any) -> None:
        """Gives the arguments to a command that waits for the first call, and what is trained to a doctor."""
        options, beside = self._options, self._beside
        handler = interception.first_call.get()  # which a command that has loaded this before may have replaced
        optimizers = beside.get("optimizers", options.optimizer)
        if handler is not None:
            arguments = options.told() | {"micro_batch_size": self._limit.ceiling}
            arguments |= {"optimizer": optimizers or None, "clip_norm": beside.get("clip_norm", options.clip_norm)}
            handler(Call(options.model, options.loss_fn, batch, arguments))
        if watchers:
            announce(options.model, options.loss_fn, optimizers)

    def _follow_model(self) -> None:
        """Updates device and process group: the model may have been moved or wrapped since the last call."""
        settings, group, device = self._settings, self._options.group, device_of(self.model)
        if settings.device != device:
            settings.device, self._devices = device, devices_of(self.model)
        settings.reducer = reducer_of(self.model, group, device, settings.reducer)
        if self._placements is not None:
            check_devices(
                [placement.device for placement in self._placements.placements], self._follower, settings.reducer, group
            )
            self._placements.check(self.model, self.loss_fn)

    def _splittable(self, batch: Any) -> Splittable:
        found = self._options.splittable(
            batch, may_be_empty=self._settings.reducer.is_shared, is_planned=self._follower is not None
        )
        if self._follower is not None and self._follower.obstacle is not None:
            found.keep_whole(self._follower.obstacle)
        found.most = None if self._placements is None else self._placements.most(found)
        return found

    def _task(self, splittable: Splittable, before: Snapshot | None = None) -> Task:
        options, several = self._options, self._placements
        return Task(
            self.model, self.loss_fn, options.count, self._settings, options.batch_norm, splittable,
            self._limit.ceiling, self._verb, is_planned=self._follower is not None, devices=several,
            optimizations=None if several is None or self._follower is None else self._follower.applied,
            modules=() if before is None else before.models, every_module=() if before is None else before.modules,
        )  # fmt: skip

    def _planned(self, splittable: Splittable) -> AbstractContextManager[None]:
        """A context that applies the plan for this batch, if plans are made."""
        if self._follower is None:
            return contextlib.nullcontext()
        from anybatch.planning.following import followed

        return followed(self._follower, splittable, self._clear, self._settings.device, self._placements)

    def _run_whole(self, refusal: NotSplittable, run: Callable[[], StepResult]) -> StepResult:
        """Runs a batch again, whole, if that is what a plan says since it can't be split; else raises the refusal."""
        if self._follower is None or self._follower.refusal is not refusal:
            raise refusal
        result = run()
        warn(f"the batch runs whole, which the budget allows, since {refusal}")
        return result

    def _clear(self) -> None:
        """Takes gradients off, whose memory is needed."""
        raise NotImplementedError

    def _optimizations(self) -> AbstractContextManager[None]:
        if self._follower is None or self._placements is not None:  # each of several devices applies its own
            return contextlib.nullcontext()
        return self._follower.applied(self.model)


def reducer_of(model: torch.nn.Module, group: Any, device: torch.device, before: Reducer = ALONE) -> Reducer:
    """``parallel.ranks.reducer_for``, which is not imported where there is no process group."""
    if (group is None or group is False) and not (dist.is_available() and dist.is_initialized()):
        return ALONE
    from anybatch.parallel.ranks import reducer_for

    return reducer_for(model, group, device, before)
