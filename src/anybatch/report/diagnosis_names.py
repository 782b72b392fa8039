"""Names of modules in few words: all of a part as one, and rows of numbered ones by their first and last."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

_MOST_NAMES = 12
_SHORTEST_ROW = 3


def modules_joined(names: Collection[str], among: Collection[str]) -> str:
    """Lists modules.

    Args:
        names: of the modules, in order.
        among: all modules that there are.

    Returns:
        The names; where all modules of a part are listed, the part and how many they are.

    Example:
        >>> modules_joined(["a.0", "a.1", "b.0", "c"], ["a.0", "a.1", "b.0", "b.1", "c"])
        'a.* (2), b.0, c'
        >>> modules_joined(["1.fc", "2.fc", "3.fc", "4.fc"], [f"{number}.fc" for number in range(9)])
        '1.fc to 4.fc'
    """
    chosen = dict.fromkeys(names)
    there = Counter(part for name in dict.fromkeys(among) for part in _parts(name))
    listed = Counter(part for name in chosen for part in _parts(name))
    shown: dict[str, None] = {}
    for name in chosen:
        whole = next((part for part in _parts(name) if listed[part] == there[part] > 1), None)
        shown[name if whole is None else f"{whole}.* ({there[whole]})"] = None
    texts = list(_rows(list(shown)))
    more = [f"and {len(texts) - _MOST_NAMES} more"] if len(texts) > _MOST_NAMES else []
    return ", ".join(texts[:_MOST_NAMES] + more)


def _parts(name: str) -> Iterator[str]:
    """The parts of a model that a module is in, the largest first."""
    pieces = name.split(".")
    return (".".join(pieces[:length]) for length in range(1, len(pieces)))


def _rows(texts: Sequence[str]) -> Iterator[str]:
    """The texts; three or more that count on by one become the first and the last."""
    start = 0
    while start < len(texts):
        end, place = start + 1, -1
        while end < len(texts) and (next_place := _counted(texts[end - 1], texts[end])) >= 0:
            if place not in (-1, next_place):
                break
            end, place = end + 1, next_place
        if end - start < _SHORTEST_ROW:
            yield texts[start]
            start += 1
        else:
            first, counted, _ = texts[start].partition(" (")
            last = texts[end - 1]
            yield f"{first} to {last[:-1]} each)" if counted else f"{first} to {last}"
            start = end


def _counted(first: str, second: str) -> int:
    """Which piece of the second name is the number after that in the first, all else equal; -1 for none."""
    pieces, others = first.split("."), second.split(".")
    if len(pieces) != len(others):
        return -1
    differing = [place for place, pair in enumerate(zip(pieces, others, strict=True)) if pair[0] != pair[1]]
    if len(differing) != 1:
        return -1
    before, after = pieces[differing[0]], others[differing[0]]
    counts = before.isdecimal() and after.isdecimal() and int(after) == int(before) + 1
    return differing[0] if counts else -1
