"""Whether parameters change although no optimizer has stepped: updates that the user's code makes by hand."""

from typing import TYPE_CHECKING

import torch

from anybatch.doctor.samples.flatcopies import plain
from anybatch.records.samples import Written

if TYPE_CHECKING:
    from anybatch.doctor.recording.numbering import Numbering

_MOST = 64  # parameters that stand for all
_ENTRIES = 64  # of each
_LOOKS = (5, 10, 20)  # backwards after which they are compared with those at the first


class HandWrites:
    """Compares some entries of parameters over the first backwards.

    Args:
        numbering: numbers of parameters.

    Example:
        >>> from anybatch.doctor.recording.numbering import Numbering
        >>> model = torch.nn.Linear(2, 1)
        >>> numbering = Numbering(lambda fact: None)
        >>> number = numbering.root(model)
        >>> writes = HandWrites(numbering)
        >>> found = []
        >>> for step in range(6):
        ...     found.append(writes.after_backward())
        ...     _ = model.bias.data.add_(1)
        >>> found[4].parameters
        (1,)
    """

    def __init__(self, numbering: "Numbering") -> None:
        self._numbering = numbering
        self._count = 0
        self._known: dict[int, torch.Tensor] = {}

    def after_backward(self) -> Written | None:
        """Is notified of a backward; ``None`` where nothing is known to have changed."""
        self._count += 1
        if self._count == 1:
            tracked = self._numbering.tracked()
            step = max(1, len(tracked) // _MOST)
            self._known = {
                number: entries.clone() for number, one in tracked[::step] if (entries := _entries(one)) is not None
            }
        elif self._count in _LOOKS and self._known:
            changed = [number for number, entries in self._known.items() if self._differs(number, entries)]
            if changed or self._count == _LOOKS[-1]:
                self._known = {}
            if changed:
                return Written(parameters=tuple(changed))
        return None

    def _differs(self, number: int, before: torch.Tensor) -> bool:
        tensor = self._numbering.tensor(number)
        now = None if tensor is None else _entries(tensor)
        return now is not None and now.shape == before.shape and not torch.equal(now, before)


def _entries(tensor: torch.Tensor) -> torch.Tensor | None:
    values = plain(tensor)
    if values is None or not values.numel():
        return None
    flat = values.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _ENTRIES)][:_ENTRIES]
