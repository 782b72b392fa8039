"""Sees states being loaded and warnings being shown."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from anybatch.doctor.ask.tape import reissued
from anybatch.doctor.recording.describing import rates_of
from anybatch.doctor.recording.hooks_optimizers import OptimizerHooks
from anybatch.doctor.recording.hooks_schedules import scheduler_classes
from anybatch.doctor.recording.naming import variable_of
from anybatch.doctor.recording.recordings import Depth, Recording
from anybatch.records.events import Loaded, Warned

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

        def loading(note: Callable[..., Any]) -> Callable[[Any], Any]:
            return recording.around(
                lambda owner, args, kwargs: (rates_of(owner), args, kwargs), note, "looks", outermost=loads
            )

        patches.wrap(torch.nn.Module, "load_state_dict", loading(self._into_module))
        patches.wrap(torch.optim.Optimizer, "load_state_dict", loading(self._into_optimizer))
        for cls in scheduler_classes():
            if "load_state_dict" in vars(cls):
                patches.wrap(cls, "load_state_dict", loading(self._into_scheduler))
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

    def _into_module(self, module: Any, begun: Any, _: Any) -> None:
        _, (state, *args), kwargs = begun
        own = module.state_dict()
        given = {name: _shape(value) for name, value in state.items()} if isinstance(state, Mapping) else {}
        matched = sum(1 for name, value in own.items() if name in given and given[name] == _shape(value))
        number = self._recording.numbering.root_of(module)
        self._recording.emit(
            Loaded(
                into="module", number=-1 if number is None else number, variable=variable_of(module),
                strict=bool(args[0] if args else kwargs.get("strict", True)), matched=matched, of=len(own),
                missing=tuple([name for name in own if name not in given][:_MOST_KEYS]),
                unexpected=tuple([str(name) for name in given if name not in own][:_MOST_KEYS]),
                **self._recording.place(),
            )
        )  # fmt: skip

    def _into_optimizer(self, optimizer: Any, begun: Any, _: Any) -> None:
        number = self._optimizers.numbered(optimizer)
        self._recording.emit(
            Loaded(
                into="optimizer", number=number, variable=variable_of(optimizer), lrs_before=begun[0],
                lrs_after=rates_of(optimizer), **self._recording.place(),
            )
        )  # fmt: skip

    def _into_scheduler(self, scheduler: Any, begun: Any, _: Any) -> None:
        number = self._recording.numbering.scheduler(scheduler)
        rates = rates_of(getattr(scheduler, "optimizer", None))
        self._recording.emit(
            Loaded(
                into="scheduler", number=number, variable=variable_of(scheduler), lrs_before=rates, lrs_after=rates,
                **self._recording.place(),
            )
        )  # fmt: skip

    def _shown(self, message: Any) -> None:
        self._recording.tell(
            Warned(
                category=getattr(message.category, "__name__", ""), text=str(message.message)[:_LONGEST],
                file=message.filename or "", line=message.lineno or 0,
            )
        )  # fmt: skip


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
