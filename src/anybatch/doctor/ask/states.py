"""Are the states of a batch of transitions those that come after them?

An environment that gives its own array, and writes to it, changes what a replay buffer has stored: then a net of
values and the copy that makes its targets are given the same in each step.
"""

from collections.abc import Iterator

import torch

from anybatch.doctor.ask.copies import copies_of
from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.rows import replayed, rows_of
from anybatch.doctor.ask.tape import Slot, Tape, slots
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_LEAST_LOOKS = 4
_PICKING = frozenset({"gather", "take_along_dim", "__getitem__"})
_SHAPING = frozenset({"squeeze", "view", "reshape", "flatten", "__getitem__", "unsqueeze"})
_DISTANCES = frozenset({"mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss", "sub", "__sub__", "__rsub__"})
_WHOLE = (torch.int64, torch.int32)


def about_states(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a net whose outputs actions pick, and its copy, are given the same in all steps that were looked at."""
    tape = next((one for one in kept.tapes.values() if one.losses and not one.failed), None)
    try:
        if tape is None or not _picks_actions(tape):
            return
    except Unknown:
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
    """Whether values that a layer gives are picked by whole numbers from outside, and compared with a target.

    What is picked of the logarithms of probabilities, as by PPO or DPO, is compared with that of a copy for good.
    """
    rows, loss = rows_of(tape), tape.losses[-1]
    run = replayed(tape, loss, lambda one: one)
    whole = {slot for slot, one in tape.leaves.items() if one.dtype in _WHOLE and one.shape[:1] == (rows,)}
    layers, picked = set[Slot](), set[Slot]()
    for one in tape.operations[: loss.before]:
        given = list(slots((one.args, one.kwargs)))
        picks = one.name in _PICKING and bool(given) and given[0] in layers and bool(whole & set(given))
        if picks or (picked & set(given) and one.name in _SHAPING):
            picked |= set(one.outs)
        elif picked & set(given):
            return one.name in _DISTANCES and any(not run.values[slot].requires_grad for slot in given)
        if whole & set(given) and not any(run.values[slot].requires_grad for slot in given):
            whole |= set(one.outs)
        if set(given) & tape.parameters.keys() and one.grad:
            layers |= set(one.outs)
    return False
