"""Which gradients came, were added onto, and were cleared: read off their identity and their version counters."""

import weakref
from typing import NamedTuple

import torch

from anybatch.doctor.recording.numbering import Numbering
from anybatch.tensors.dispatch import has_numbers, unseen


class Came(NamedTuple):
    """What a backward did."""

    touched: tuple[int, ...]  # parameters whose gradient changed or appeared, by number
    kept: tuple[int, ...]  # of these, those whose gradient the last step had used and nothing had cleared


class Gradients:
    """Follows the gradients of tracked parameters from event to event."""

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self.version = -1  # of the numbering whose parameters were taken in
        self.numbers: tuple[int, ...] = ()  # the lists below are parallel to it
        self._references: list[weakref.ref[torch.Tensor]] = []
        self._ids: list[int] = []  # of the gradients when last looked at, 0 for none
        self._versions: list[int] = []
        self._used: list[int] = []  # ids of the gradients that the last step used and that were not cleared since
        self._used_versions: list[int] = []
        self._before: list[torch.Tensor | None] = []
        self.is_any = self.is_aside = False  # whether any had one, and whether anybatch has put them aside
        self.present = 0  # how many of these had a gradient when last looked at
        self._edits: set[frozenset[int]] = set()  # parameters of optimizers whose steps write to gradients
        self._all = Came((), ())
        self._zero: dict[int, int] = {}  # versions of gradients that are known to be zero, by id
        self._aside: dict[int, int] | None = None  # ``_used`` by number, of gradients that anybatch has put aside

    def arrange(self) -> None:
        """Takes in parameters that were not there before."""
        if self._numbering.version == self.version:
            return
        self.version = self._numbering.version
        numbers, self._references = self._numbering.references()
        known = zip(self.numbers, self._ids, self._versions, self._used, self._used_versions, strict=True)
        old = {number: rest for number, *rest in known}
        columns = [old.get(number, [-1, -1, 0, 0]) for number in numbers]
        self._ids, self._versions, self._used, self._used_versions = (
            [row[column] for row in columns] for column in range(4)
        )
        self.numbers = tuple(numbers)
        for place, gradient in enumerate(self._gradients()):
            if self._ids[place] < 0:  # looked at for the first time
                self._ids[place], self._versions[place] = 0, 0 if gradient is None else gradient._version
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

    def before_backward(self) -> tuple[int, int]:
        """Of the gradients that a backward will add onto, how many were cleared by hand since, of how many."""
        if self._numbering.version != self.version:
            self.arrange()
        if not self.is_any:
            self._before = []
            return 0, 0
        self._before = self._gradients()
        if self._aside is not None:
            self._note(self._before)
            return 0, 0
        return self._cleared_by_hand(self._before)

    def put_aside(self) -> None:
        """Is told that the gradients go and come back; which of them a step had used stays known."""
        present = zip(self.numbers, self._used, self._ids, strict=True)
        self._aside, self.is_aside = {number: used for number, used, gradient in present if gradient}, True

    def put_back(self) -> None:
        """Is told that they are there again, with what backwards have added since."""
        if self._aside is not None:
            aside, self._aside, self.is_aside = self._aside, None, False
            self._note(self._look())
            self._used = [aside.get(number, 0) for number in self.numbers]

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
                    self._all = Came(self.numbers, ())
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
        numbers, aside = self.numbers, self._aside
        if aside:
            kept = [place for place in touched if aside.pop(numbers[place], 0)]
        self._note(after)
        for place in touched:
            self._used[place] = 0
            self._zero.pop(self._ids[place], None)
        return Came(tuple([numbers[place] for place in touched]), tuple([numbers[place] for place in kept]))

    def after_clearing(self) -> tuple[int, int]:
        """How many gradients are gone or were written to after ``zero_grad``, of how many there were."""
        if self._aside is not None:
            count, self._aside = len(self._aside), {}
            return count, count
        if not self.is_any:
            return 0, 0
        ids, versions = self._ids, self._versions
        for reference in self._references:
            if (tensor := reference()) is not None and tensor.grad is not None:
                gradients = self._gradients()
                break
        else:
            had = len(ids) - ids.count(0)
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
        return cleared, had

    def at_step(self, *, closely: bool) -> tuple[int, int, int]:
        """Before a step how many gradients were cleared by hand since the last event, of how many, and how many edited.

        Unless it looks ``closely``, it only looks for gradients that are gone.
        """
        if self._numbering.version != self.version:
            self.arrange()
        if not self.is_any:
            return 0, 0, 0
        if not closely:
            for reference, old in zip(self._references, self._ids, strict=True):
                if old and ((tensor := reference()) is None or tensor.grad is None):
                    break
            else:
                return 0, 0, 0
        gradients = self._gradients()
        edited = sum(
            1
            for gradient, old, version in zip(gradients, self._ids, self._versions, strict=True)
            if gradient is not None and (id(gradient) != old or gradient._version != version)
        )
        cleared, had = self._cleared_by_hand(gradients)
        return cleared, had, 0 if cleared else edited

    def after_step(self, numbers: frozenset[int], *, closely: bool) -> None:
        """Notes which gradients a step has used, and if it looks ``closely``, whether the step has written to them."""
        if closely or numbers in self._edits or self._numbering.version != self.version:
            before = self._versions
            self._note(self._look())
            if self.is_any and before != self._versions:
                self._edits.add(numbers)
        if len(numbers) == len(self.numbers):
            self._used, self._used_versions = self._ids[:], self._versions[:]
            return
        for place, gradient in enumerate(self._ids):
            if gradient and self.numbers[place] in numbers:
                self._used[place] = gradient
                self._used_versions[place] = self._versions[place]

    def changed_on_purpose(self) -> None:
        """Takes the gradients as they are, after clipping or unscaling."""
        self._note(self._gradients())

    def _cleared_by_hand(self, gradients: list[torch.Tensor | None]) -> tuple[int, int]:
        ids = self._ids
        gone = [place for place, one in enumerate(gradients) if ids[place] and (one is None or id(one) != ids[place])]
        here = [place for place, one in enumerate(gradients) if one is not None and id(one) == ids[place]]
        had = len(gone) + len(here)
        fresh = [
            (place, one)
            for place in here
            if (one := gradients[place]) is not None and self._zero.get(id(one)) != one._version
        ]
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
        return len(gone), had


@unseen
def _are_zero(gradients: list[torch.Tensor]) -> bool:
    """Whether all gradients are zero; nothing waits for a device. Most are known by their first entries."""
    for one in (gradients[-1], *gradients):  # that of the last layer mostly tells
        if one.layout is not torch.strided or not one.is_cpu or not has_numbers(one):
            return False
        if one.numel() and one.detach().reshape(-1)[0].item():
            return False
    return not any(bool(one.detach().any()) for one in gradients)
