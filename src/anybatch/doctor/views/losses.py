"""The calls of loss functions of a run, by the user's line."""

from collections.abc import Callable

from anybatch.doctor.views.naming import qualified
from anybatch.records.findings import Place
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run, grouped


def by_line(run: Run, keep: Callable[[LossCall], bool] | None = None) -> dict[tuple[str, int, str], list[LossCall]]:
    """Calls of loss functions by the user's line."""
    found = grouped(
        ((call.file, call.line, call.function), call) for call in run.of(LossCall) if keep is None or keep(call)
    )
    for key in [key for key in found if not key[0] or key[0].startswith("<")]:
        known = next((other for other in found if other[2] == key[2] and other[0][:1] not in ("", "<")), None)
        if known is not None:  # a line that could not be found is that of the other calls
            found[known] = sorted(found[known] + found.pop(key), key=lambda one: one.at)
    return found


def loss_place(run: Run, call: LossCall) -> Place:
    """Where a loss was computed."""
    same = [one for one in run.of(LossCall) if one.function == call.function and one.file[:1] not in ("", "<")]
    line = call if call.file[:1] not in ("", "<") or not same else same[0]
    return Place(module=qualified(run, call.root, call.module) if call.module else "", file=line.file, line=line.line)
