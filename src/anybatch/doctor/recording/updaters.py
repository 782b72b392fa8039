"""Numbers for optimizers and schedulers, and their tables."""

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anybatch.doctor.recording.describing import group_facts, optimizer_facts, scheduler_options, type_name
from anybatch.doctor.recording.naming import user_place, variable_of, variables_of
from anybatch.records.lines import Fact
from anybatch.records.tables import OptimizerFacts, SchedulerFacts


class UpdaterNumbers:
    """Gives numbers to what changes parameters; ``Numbering`` gives them to the parameters."""

    def __init__(self, emit: Callable[[Fact], Any]) -> None:
        self.emit = emit
        self._optimizers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._optimizer_facts: list[OptimizerFacts] = []
        self._schedulers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._scheduler_facts: list[SchedulerFacts] = []
        self.optimizers_version = 0
        """Grows with each table of an optimizer."""

    def known(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor, ``None`` if it has none yet."""
        raise NotImplementedError

    def _named(self, tensor: torch.Tensor, name: str) -> int:
        """Gives a tensor that is in no model a number and a name."""
        raise NotImplementedError

    def _track(self, number: int) -> None:
        """Adds a parameter to those that are followed."""
        raise NotImplementedError

    def optimizer(self, optimizer: Any, *, place: tuple[str, int] | None = None, after: int = 0) -> int:
        """The number of an optimizer; records it, and again when its groups have changed.

        Args:
            after: how many steps others had done with its parameters when it was made.
        """
        known = self._optimizers.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            number = known[1]
            if self._same_groups(optimizer, self._optimizer_facts[number]):
                return number
            old = self._optimizer_facts[number]
            is_made_there = old.is_made_there
            place, after, variable = (old.file, old.line), old.after, old.variable or variable_of(optimizer)
        else:
            number = len(self._optimizer_facts)
            self._optimizers[id(optimizer)] = weakref.ref(optimizer), number
            is_made_there = place is not None
            variable, place = variable_of(optimizer), place or user_place()
        groups = []
        unknown = [one for group in optimizer.param_groups for one in group["params"] if self.known(one) is None]
        names = variables_of(unknown) if unknown else {}
        for position, group in enumerate(optimizer.param_groups):
            front = f"{variable or 'optimizer'}.param_groups[{position}]['params']"
            numbers = tuple(
                self._optimized(tensor, names.get(id(tensor)) or f"{front}[{entry}]")
                for entry, tensor in enumerate(group["params"])
            )
            groups.append(group_facts(group, numbers))
        facts = optimizer_facts(optimizer, number, variable, tuple(groups), after=after, place=place)
        facts = dataclasses.replace(facts, is_made_there=is_made_there)
        if number == len(self._optimizer_facts):
            self._optimizer_facts.append(facts)
        self._optimizer_facts[number] = facts
        self.optimizers_version += 1
        self.emit(facts)
        return number

    def known_optimizer(self, optimizer: Any) -> int:
        """The number of an optimizer, -1 if it was not seen yet."""
        known = self._optimizers.get(id(optimizer))
        return known[1] if known is not None and known[0]() is optimizer else -1

    def optimizer_table(self, number: int) -> OptimizerFacts:
        """What was recorded of an optimizer last."""
        return self._optimizer_facts[number]

    def optimizers(self) -> Iterator[tuple[int, Any]]:
        """The optimizers that still live, with their numbers."""
        for reference, number in list(self._optimizers.values()):
            if (optimizer := reference()) is not None:
                yield number, optimizer

    def _same_groups(self, optimizer: Any, facts: OptimizerFacts) -> bool:
        groups = optimizer.param_groups
        return len(groups) == len(facts.groups) and all(
            len(group["params"]) == len(known.parameters) for group, known in zip(groups, facts.groups, strict=True)
        )

    def _optimized(self, tensor: torch.Tensor, name: str) -> int:
        number = self.known(tensor)
        if number is None:
            number = self._named(tensor, name)
        self._track(number)
        return number

    def scheduler(self, scheduler: Any, *, place: tuple[str, int] | None = None) -> int:
        """The number of a scheduler; records it when first seen."""
        known = self._schedulers.get(id(scheduler))
        if known is not None and known[0]() is scheduler:
            return known[1]
        number = len(self._scheduler_facts)
        self._schedulers[id(scheduler)] = weakref.ref(scheduler), number
        optimizer = getattr(scheduler, "optimizer", None)
        file, line = place or user_place()
        facts = SchedulerFacts(
            scheduler=number, variable=variable_of(scheduler), cls=type_name(scheduler),
            optimizer=-1 if optimizer is None else self.optimizer(optimizer),
            options=scheduler_options(scheduler), file=file, line=line,
        )  # fmt: skip
        self._scheduler_facts.append(facts)
        self.emit(facts)
        return number
