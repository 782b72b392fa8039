"""Whether parameters that lie in parts stay gathered during a step, where a budget may choose, on all ranks alike."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Keeping:
    """What a rank says of the two ways, and what follows from what all ranks say.

    A rank says whether it has room for everything gathered, once it knows what a logical batch takes in parts, and how
    long that takes. Where all have, they try it; once all know that time too, the faster way is taken. A rank may take
    its word back, for which all go on in parts at once.

    Args:
        whole_bytes: gives the bytes that everything gathered takes, with whole gradients and what reduces them.

    Attributes:
        is_free: whether there is a choice: the user's switch says parts, and this torch can do both.
        has_room: whether this rank has room for that; ``None`` as long as it does not know.
        seconds: of a sample, in parts and gathered; ``None`` where they are not known.
        agreed: whether the ranks would keep parameters gathered in the next step.
        wants: whether this rank would in this one; they are if all want it.
        is_kept: whether they are, which is settled by the first message of a step.
        faster: whether that was found to be faster; ``False`` where a rank has no room, ``None`` before it is known.
    """

    def __init__(self, whole_bytes: Callable[[], int] = lambda: 0) -> None:
        self.whole_bytes = whole_bytes
        self.is_free = False
        self.has_room: bool | None = None
        self.seconds: tuple[float | None, float | None] = (None, None)
        self.agreed = self.wants = self.is_kept = False
        self.faster: bool | None = None

    def tells(self) -> dict[str, Any]:
        """What the others hear before the first micro-batch."""
        return {"wants": self.wants, "has_room": self.has_room, "seconds": self.seconds}

    def hear(self, heard: Sequence[Mapping[str, Any]]) -> None:
        """Settles how this step goes, and the next one if no rank takes its word back.

        Args:
            heard: what every rank tells; all hear the same.

        Example:
            >>> one, other = Keeping(), Keeping()
            >>> one.wants = other.wants = one.has_room = other.has_room = True
            >>> one.seconds, other.seconds = (0.2, 0.1), (0.2, 0.15)
            >>> one.hear([one.tells(), other.tells()])
            >>> one.is_kept, one.faster, one.agreed
            (True, True, True)
        """
        self.is_kept = all(one["wants"] for one in heard)
        rooms, kept = [one["has_room"] for one in heard], [one["seconds"][1] for one in heard]
        if False in rooms:
            self.faster = False
        elif None in rooms:
            self.faster = None
        elif self.faster is None and None not in kept:
            self.faster = sum(kept) < sum(one["seconds"][0] for one in heard)
        self.agreed = None not in rooms and self.faster is not False

    def begin(self) -> None:
        """Begins a step in the way that was agreed on."""
        self.wants = self.is_kept = self.agreed and self.is_free

    def take_back(self) -> None:
        """Goes on in parts."""
        self.wants = self.is_kept = False

    def state_dict(self) -> dict[str, Any]:
        """What was agreed on, and what was found."""
        return {"agreed": self.agreed, "faster": self.faster}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets what ``state_dict`` gave."""
        self.agreed, self.faster = state["agreed"], state["faster"]
