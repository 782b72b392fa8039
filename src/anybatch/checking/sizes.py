"""Which size of micro-batches runs, where the given one does not suit the model or the loss, as a group of four."""

from collections.abc import Sequence

from anybatch.batch.batches import Part, sizes_of
from anybatch.checking.causes import in_one_line, reason
from anybatch.checking.cuts import Cut
from anybatch.checking.trial import Trial
from anybatch.errors import AnyBatchError
from anybatch.records.certificates import Reason
from anybatch.records.proofs import Proof
from anybatch.update.passes import Task
from anybatch.update.transaction import Failure, is_out_of_memory

_MOST = 12  # sizes that are tried
_OF_SHAPES = (RuntimeError, ValueError, IndexError)


def another_size(trial: Trial, task: Task, parts: Sequence[Part]) -> tuple[Proof, Reason] | None:
    """The nearest size in which samples add up to the whole, where the micro-batches of the step fail."""
    splittable, given = task.splittable, max(len(part.samples) for part in parts)
    if task.micro_batch_size is None or splittable.has_costs or len(splittable.layouts) != 1:
        return None
    failed, rows = None, splittable.rows
    nearest = sorted(range(2, min(2 * given, rows // 2) + 1), key=lambda size: (abs(size - given), -size))
    for size in [given, *(one for one in nearest if one != given)][: _MOST + 1]:
        sizes = sizes_of(rows, size)
        try:
            cut = Cut(splittable.chosen([*range(sizes[0]), *range(rows - sizes[-1], rows)]), (sizes[0], sizes[-1]))
            found = trial.difference(cut, in_single=False)
        except Exception as error:  # noqa: BLE001 - only what a shape may cause speaks of the size
            if not isinstance(error, _OF_SHAPES) or isinstance(error, AnyBatchError) or is_out_of_memory(error):
                return None
            failed = failed or in_one_line(error)
            Failure(error).release()
            continue
        if failed is None:  # the step's own do not fail
            return None
        if found.is_none:
            told = reason("size", "model", given=given, failed=failed, size=size, samples=sum(cut.sizes))
            return Proof("not exact", "comparison", given, tuple(sizes_of(rows, given))), told
    return None
