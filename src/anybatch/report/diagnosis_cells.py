"""Which gradients and parameters change, in names: as a table, as the four cells, module by module."""

from collections import Counter
from dataclasses import dataclass

from anybatch.records.diagnoses import CELLS, Cell, Diagnosis
from anybatch.report.diagnosis import number_text
from anybatch.report.diagnosis_names import modules_joined
from anybatch.report.tables import TextTable

_WHOLE = "(the model)"


def cells_table(diagnosis: Diagnosis) -> TextTable:
    """Lays out which gradients and parameters change: a row for all modules of which the same is true.

    Args:
        diagnosis: has the cells.

    Returns:
        The table; rows that are not as they should be are marked.
    """
    groups: dict[tuple[int, bool, bool, str], list[Cell]] = {}
    for cell in diagnosis.cells:
        groups.setdefault((cell.cell, cell.shrinking, cell.frozen, cell.why), []).append(cell)
    names_of = _Names(diagnosis)
    among = [name for cell in diagnosis.cells for name in names_of(cell)]
    rows: list[tuple[str, ...]] = []
    marked = set()
    for key in sorted(groups):
        kind, shrinking, frozen, why = key
        members = groups[key]
        if _is_odd(members[0]):
            marked.add(len(rows))
        names = modules_joined([name for cell in members for name in names_of(cell)], among)
        numel = f"{sum(cell.numel for cell in members):,}"
        reason = why or ("frozen" if frozen else "")
        rows.append((*_yes_no(kind, shrinking), numel, f"{names}: {reason}" if reason else names))
    return TextTable(("gradients", "parameters", "numbers", "where"), tuple(rows), frozenset(marked))


class _Names:
    """Names of cells: the module, or its parameters where others of the same module are in another cell."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._cells = Counter(cell.module for cell in diagnosis.cells)

    def __call__(self, cell: Cell) -> tuple[str, ...]:
        """The names for one."""
        if self._cells[cell.module] > 1 and cell.parameters:
            return cell.parameters
        return (cell.module or _WHOLE,)


def _yes_no(kind: int, shrinking: bool) -> tuple[str, str]:
    texts = {1: ("change", "change"), 2: ("change", "stay"), 3: ("stay", "stay"), 4: ("stay", "change")}
    gradients, parameters = texts.get(kind, ("?", "?"))
    return ("shrink" if shrinking else gradients), parameters


def cells_lines(diagnosis: Diagnosis, most: int) -> tuple[TextTable, int]:
    """Lays out each module's gradients and changes, those that are not as they should be first.

    Args:
        diagnosis: has the cells.
        most: rows.

    Returns:
        The table, and how many rows were left out.
    """
    order = sorted(diagnosis.cells, key=lambda cell: cell.frozen or (cell.cell == 1 and not cell.shrinking))
    rows = tuple(
        (
            cell.module or _WHOLE,
            *_yes_no(cell.cell, cell.shrinking),
            _from_to(cell.first_gradient, cell.last_gradient),
            _from_to(cell.first_ratio, cell.last_ratio),
            f"{cell.numel:,}",
            cell.why or ("frozen" if cell.frozen else ""),
        )
        for cell in order[:most]
    )
    header = ("module", "gradients", "parameters", "norm of gradient", "change / weight", "numbers", "why")
    marked = (index for index, cell in enumerate(order[:most]) if _is_odd(cell))
    return TextTable(header, rows, frozenset(marked)), max(0, len(order) - most)


@dataclass(frozen=True, slots=True)
class Square:
    """One of the four cells.

    Args:
        names: of its modules, empty where it has none.
        reasons: why they are in it.
        odd: whether that is not as it should be for some of them.
    """

    names: str
    reasons: str
    odd: bool


def squares_of(diagnosis: Diagnosis) -> dict[int, Square]:
    """Each of the four cells, and as number 0 that of which too little was seen.

    Args:
        diagnosis: has the cells.
    """
    names_of = _Names(diagnosis)
    among = [name for cell in diagnosis.cells for name in names_of(cell)]
    squares = {}
    for kind in (*CELLS, 0):
        cells = [cell for cell in diagnosis.cells if cell.cell == kind]
        names = modules_joined([name for cell in cells for name in names_of(cell)], among)
        groups: dict[str, list[str]] = {}
        for cell in cells:
            groups.setdefault(_reason(cell), []).extend(names_of(cell))
        reasons = [
            f"{reason}: {modules_joined(members, among)}" if len(groups) > 1 else reason
            for reason, members in groups.items()
            if reason
        ]
        squares[kind] = Square(names, "; ".join(reasons), any(_is_odd(cell) for cell in cells))
    return squares


def _reason(cell: Cell) -> str:
    shrunk = "gradients shrink to less than a thousandth" if cell.shrinking else ""
    return ", ".join(text for text in (cell.why or ("frozen" if cell.frozen else ""), shrunk) if text)


def _is_odd(cell: Cell) -> bool:
    return cell.shrinking or (cell.cell in (2, 3, 4) and not cell.frozen)


def _from_to(first: float | None, last: float | None) -> str:
    if first is None and last is None:
        return "-"
    return number_text(first) if first == last else f"{number_text(first)} to {number_text(last)}"
