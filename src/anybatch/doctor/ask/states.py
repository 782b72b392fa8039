"""Are the states of a batch of transitions those that come after them?

An environment that gives its own array, and writes to it, changes what a replay buffer has stored: then a net of
values and the copy that makes its targets are given the same in each step.
"""

from collections.abc import Iterator

from anybatch.doctor.ask.copies import copies_of
from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.rows import slots_of
from anybatch.doctor.ask.tape import Tape, slots
from anybatch.doctor.ask.trials import told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_LEAST_LOOKS = 4
_PICKING = frozenset({"gather", "take_along_dim", "__getitem__"})
_WHOLE = ("torch.int64", "torch.int32")


def about_states(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a net whose outputs actions pick, and its copy, are given the same in all steps that were looked at."""
    tape = next((one for one in kept.tapes.values() if one.losses and not one.failed), None)
    if tape is None or not _picks_actions(tape):
        return
    for state, online in copies_of(kept):
        both = [(mine, {one for one in theirs if one[0] in {shape for shape, _ in mine}})
                for step, mine in state.inputs.items() if (theirs := online.inputs.get(step))]  # fmt: skip
        if len(both) < _LEAST_LOOKS:
            continue
        same = all(len(mine) == 1 and mine == theirs for mine, theirs in both)  # what acts is given one row beside
        same &= len({one for mine, _ in both for one in mine}) > 1
        yield told("unmoved", tape.losses[-1], answer="yes" if same else "no", steps=len(both))


def _picks_actions(tape: Tape) -> bool:
    """Whether what a net gives is picked by whole numbers from outside, one for each row."""
    whole = {slot for slot, one in tape.leaves.items() if str(one.dtype) in _WHOLE and one.shape[:1] == (tape.rows,)}
    made, needed = set(tape.parameters), slots_of(tape, tape.losses[-1])
    for one in tape.operations[: tape.losses[-1].before]:
        given = list(slots((one.args, one.kwargs)))
        if one.name in _PICKING and given[:1] and given[0] in made and whole & set(given) and needed & set(one.outs):
            return True
        if whole & set(given) and not made & set(given):
            whole |= set(one.outs)
        if made & set(given):
            made |= set(one.outs)
    return False
