"""Which gradients came, were added onto, and were cleared: read off their identity and their version counters."""

import weakref
from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

import torch

from anybatch.doctor.recording.numbering import Numbering
from anybatch.records.events import Cleared, Stepped
from anybatch.tensors.dispatch import has_numbers, unseen

_TRIED = 4  # gradients whose first entry is looked at
FEW = 16
"""Parameters that stand for all of a large model between two samples."""


class Came(NamedTuple):
    """What a backward did.

    Args:
        touched: parameters whose gradient changed or appeared, by number.
        kept: of these, those whose gradient the last step had used and nothing had cleared.
        whole: whether all parameters were looked at, and not only those that stand for them.
    """

    touched: tuple[int, ...]
    kept: tuple[int, ...]
    whole: bool


class Done(Protocol):
    """What was done to gradients that nobody has looked at since: they were added onto, cleared, or used by a step."""

    @property
    def fact(self) -> Any:
        """A ``Backward``, ``Cleared`` or ``Stepped``."""

    @property
    def parameters(self) -> Collection[int]:
        """Whose gradients, by number."""


class Gradients:
    """Follows the gradients of tracked parameters from event to event.

    On sampled steps it looks at all of them, otherwise at a few that stand for the rest.

    Args:
        numbering: knows the parameters.

    Attributes:
        whole: whether all are looked at.
        numbers: of those that are looked at.
        present: how many of these had a gradient when last looked at.
        is_any: whether any had.
        done: what was done to them since somebody has looked, see ``catch_up``.
    """

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self._version = -1
        self._is_close = self._wants_close = True
        self.whole = True
        self.numbers: tuple[int, ...] = ()
        self._numbers: list[int] = []  # of those that are looked at; the lists below are parallel to it
        self._references: list[weakref.ref[torch.Tensor]] = []
        self._ids: list[int] = []  # of the gradients when last looked at, 0 for none
        self._versions: list[int] = []
        self._used: list[int] = []  # ids of the gradients that the last step used and that were not cleared since
        self._used_versions: list[int] = []
        self._before: list[torch.Tensor | None] = []
        self.is_any = False
        self.present = 0
        self.done: list[Done] = []
        self._all = Came((), (), True)
        self._zero: dict[int, int] = {}  # versions of gradients that are known to be zero, by id
        self._share = 1.0
        self._aside: dict[int, int] | None = None  # ``_used`` by number, of gradients that anybatch has put aside

    @property
    def is_close(self) -> bool:
        """Whether all parameters are looked at now, or from the end of the next step on."""
        return self._is_close or self._wants_close

    def look_closely(self, wanted: bool) -> None:
        """Whether all parameters are looked at from the end of the next step on.

        Args:
            wanted: for the next steps.
        """
        self._wants_close = wanted

    def arrange(self) -> None:
        """Chooses those that are looked at from now on."""
        self.catch_up()
        if self._numbering.version == self._version and self._wants_close is self._is_close:
            return
        grown = self._numbering.version != self._version
        self._version, self._is_close = self._numbering.version, self._wants_close
        numbers, references = self._numbering.references()
        places = list(range(len(numbers))) if self._is_close or grown else _spread(len(numbers))
        self._is_close = self._is_close or grown
        self.whole = len(places) == len(numbers)
        self._share = len(numbers) / max(1, len(places))
        old = {number: place for place, number in enumerate(self._numbers)}
        self._references = [references[place] for place in places]
        chosen = [numbers[place] for place in places]
        self._ids = [self._ids[old[n]] if n in old else -1 for n in chosen]
        self._versions = [self._versions[old[n]] if n in old else -1 for n in chosen]
        self._used = [self._used[old[n]] if n in old else 0 for n in chosen]
        self._used_versions = [self._used_versions[old[n]] if n in old else 0 for n in chosen]
        self._numbers, self.numbers = chosen, tuple(chosen)
        if -1 in self._ids:  # looked at for the first time
            for place, gradient in enumerate(self._gradients()):
                if self._ids[place] < 0:
                    self._ids[place] = 0 if gradient is None or grown else id(gradient)
                    self._versions[place] = 0 if gradient is None else gradient._version
        self.is_any = any(self._ids)

    def _gradients(self) -> list[torch.Tensor | None]:
        return [None if (tensor := reference()) is None else tensor.grad for reference in self._references]

    def _look(self) -> list[torch.Tensor | None]:
        self.arrange()
        return self._gradients()

    def _note(self, gradients: list[torch.Tensor | None]) -> None:
        self._ids = [0 if gradient is None else id(gradient) for gradient in gradients]
        self._versions = [0 if gradient is None else gradient._version for gradient in gradients]
        self.present = len(self._ids) - self._ids.count(0)
        self.is_any = self.present > 0

    def _counted(self, number: int) -> int:
        return number if self.whole else round(number * self._share)

    def before_backward(self) -> tuple[int, int]:
        """Looks at the gradients that a backward will add onto.

        Returns:
            How many were cleared by hand since the last event, of how many.
        """
        self.catch_up()
        if self._numbering.version != self._version:
            self.arrange()
        if not self.is_any:
            self._before = []
            return 0, 0
        self._before = self._gradients()
        if self._aside is not None:
            self._note(self._before)
            return 0, 0
        return self._cleared_by_hand(self._before)

    @property
    def is_aside(self) -> bool:
        """Whether anybatch has put the gradients aside."""
        return self._aside is not None

    def put_aside(self) -> None:
        """Is told that the gradients go and come back; which of them a step had used stays known."""
        present = zip(self._numbers, self._used, self._ids, strict=True)
        self._aside = {number: used for number, used, gradient in present if gradient}

    def put_back(self) -> None:
        """Is told that they are there again, with what backwards have added since."""
        if self._aside is not None:
            aside, self._aside = self._aside, None
            self._note(self._look())
            self._used = [aside.get(number, 0) for number in self._numbers]

    def after_backward(self) -> Came:
        """Says what a backward did."""
        if not self._before and not self.is_any and not self._zero and not self._aside:  # there was none
            ids, versions = [], []
            for reference in self._references:
                tensor = reference()
                if tensor is None or (gradient := tensor.grad) is None:
                    break
                ids.append(id(gradient))
                versions.append(gradient._version)
            else:
                self._ids, self._versions, self._used = ids, versions, [0] * len(ids)
                self.present, self.is_any = len(ids), bool(ids)
                if self._all[0] is not self.numbers:
                    self._all = Came(self.numbers, (), self.whole)
                return self._all
        before, after = self._before, self._gradients()
        self._before = []
        kept: list[int] = []
        if not before or len(before) != len(after):
            ids = self._ids
            touched = [place for place, one in enumerate(after) if one is not None and id(one) != ids[place]]
        else:
            touched = [
                place
                for place, (old, new) in enumerate(zip(before, after, strict=True))
                if new is not None and (new is not old or new._version != self._versions[place])
            ]
            kept = [place for place in touched if self._used[place] and self._used[place] == id(before[place])]
        numbers, aside = self._numbers, self._aside
        if aside:
            kept = [place for place in touched if aside.pop(numbers[place], 0)]
        self._note(after)
        for place in touched:
            self._used[place] = 0
            self._zero.pop(self._ids[place], None)
        return Came(tuple([numbers[place] for place in touched]), tuple([numbers[place] for place in kept]), self.whole)

    def after_clearing(self) -> tuple[int, int]:
        """Looks at the gradients after ``zero_grad``.

        Returns:
            How many are gone or were written to, of how many there were.
        """
        if self._aside is not None:
            count, self._aside = len(self._aside), {}
            return self._counted(count), self._counted(count)
        if not self.is_any:
            return 0, 0
        ids, versions = self._ids, self._versions
        for reference in self._references:
            if (tensor := reference()) is not None and tensor.grad is not None:
                gradients = self._gradients()
                break
        else:
            had = len(ids) - ids.count(0) if self.whole else self._counted(len(ids) - ids.count(0))
            self._ids, self._versions, self._used = [0] * len(ids), [0] * len(ids), [0] * len(ids)
            self.present, self.is_any = 0, False
            return had, had
        had = cleared = 0
        for place, gradient in enumerate(gradients):
            if ids[place]:
                had += 1
                if gradient is None or id(gradient) != ids[place] or gradient._version != versions[place]:
                    cleared += 1
                    self._used[place] = 0
                    if gradient is not None:
                        self._zero[id(gradient)] = gradient._version
        self._note(gradients)
        return self._counted(cleared), self._counted(had)

    def at_step(self) -> tuple[int, int, int]:
        """Looks at the gradients before a step.

        Returns:
            How many were cleared by hand since the last event, of how many, and how many were edited.
        """
        self.catch_up()
        if not self.is_any:
            return 0, 0, 0
        gradients = self._gradients()
        if not self._is_close:
            gone = sum(1 for one, old in zip(gradients, self._ids, strict=True) if one is None and old)
            if not gone:
                return 0, 0, 0
        edited = sum(
            1
            for gradient, old, version in zip(gradients, self._ids, self._versions, strict=True)
            if gradient is not None and (id(gradient) != old or gradient._version != version)
        )
        cleared, had = self._cleared_by_hand(gradients)
        return cleared, had, 0 if cleared else self._counted(edited)

    def after_step(self, numbers: frozenset[int]) -> None:
        """Notes which gradients a step has used.

        Args:
            numbers: of the optimizer's parameters.
        """
        gradients = self._look()
        self._note(gradients)
        for place, gradient in enumerate(gradients):
            if gradient is not None and self._numbers[place] in numbers:
                self._used[place] = self._ids[place]
                self._used_versions[place] = self._versions[place]

    def forget_repeated(self) -> None:
        """Keeps of all that was done what was done last."""
        self.done[:] = list({id(one): one for one in self.done[::-1]}.values())[::-1]

    def catch_up(self) -> None:
        """Looks at the gradients again after steps that were like others, in which nobody did."""
        if not self.done:
            return
        self.forget_repeated()
        done = self.done[:]
        self.done.clear()
        ids, versions, looked_at = self._ids, self._versions, self._numbers
        used = {number for number, gradient in zip(self._numbers, self._used, strict=True) if gradient}
        for one in done:
            used = used.union(one.parameters) if type(one.fact) is Stepped else used.difference(one.parameters)
        self._note(self._look())
        self._before = []
        was_cleared = type(done[-1].fact) is Cleared
        if not was_cleared and self._numbers == looked_at:
            for place, old in enumerate(ids):
                if old and not self._ids[place]:  # cleared by hand since, which the next event tells
                    self._ids[place], self._versions[place] = old, versions[place]
            self.is_any = any(self._ids)
        for place, number in enumerate(self._numbers):
            self._used[place] = self._ids[place] if number in used else 0
            self._used_versions[place] = self._versions[place]
        if was_cleared:
            self._zero.update((id(one), one._version) for one in self._gradients() if one is not None)

    def changed_on_purpose(self) -> None:
        """Takes the gradients as they are, after clipping or unscaling."""
        self._note(self._gradients())

    def _cleared_by_hand(self, gradients: list[torch.Tensor | None]) -> tuple[int, int]:
        ids = self._ids
        gone = [place for place, one in enumerate(gradients) if ids[place] and (one is None or id(one) != ids[place])]
        here = [place for place, one in enumerate(gradients) if one is not None and id(one) == ids[place]]
        had = len(gone) + len(here)
        fresh = [(place, one) for place in here if (one := gradients[place]) is not None and not self._is_zero(one)]
        if fresh and _are_zero([one for _, one in fresh]):
            gone += [place for place, _ in fresh]
            self._zero.update((id(one), one._version) for _, one in fresh)
        for place in gone:
            self._used[place] = 0
        for place in here:
            gradient = gradients[place]
            if gradient is not None and gradient._version != self._used_versions[place]:
                self._used[place] = 0
        self._note(gradients)
        return self._counted(len(gone)), self._counted(had)

    def _is_zero(self, gradient: torch.Tensor) -> bool:
        return self._zero.get(id(gradient)) == gradient._version


@unseen
def _are_zero(gradients: list[torch.Tensor]) -> bool:
    """Whether all gradients are zero; nothing waits for a device."""
    if not all(one.layout is torch.strided and one.is_cpu and has_numbers(one) for one in gradients):
        return False
    dense = [one.detach() for one in gradients[::-1]]  # those of the last layers are the largest
    if any(one.numel() and one[(0,) * one.dim()].item() for one in dense[:_TRIED]):
        return False  # most gradients are known by their first entry
    return bool(dense) and not any(bool(one.any()) for one in dense)


def _spread(count: int) -> list[int]:
    """Places of a few out of many, the first and the last ones among them."""
    if count <= FEW:
        return list(range(count))
    return sorted({0, 1, count - 2, count - 1, *(place * count // FEW for place in range(FEW))})
