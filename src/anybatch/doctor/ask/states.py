"""Are the states of a batch of transitions those that come after them?

An environment that gives its own array, and writes to it, changes what a replay buffer has stored: then a net of
values and the copy that makes its targets are given the same in each step.
"""

from collections.abc import Iterator

from anybatch.doctor.ask.copies import copies_of
from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.steps import DISTANCES, Step
from anybatch.doctor.ask.tape import Slot
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_LEAST_LOOKS = 4
_PICKING = frozenset({"gather", "take_along_dim", "__getitem__"})
_SHAPING = frozenset({"squeeze", "view", "reshape", "flatten", "__getitem__", "unsqueeze"})
_COMPARING = DISTANCES | {"sub", "rsub"}
_WHOLE = ("torch.int64", "torch.int32")


def about_states(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a net whose outputs actions pick, and its copy, are given the same in all steps that were looked at."""
    tape = next((one for one in kept.tapes.values() if one.losses and not one.failed), None)
    try:
        if tape is None or not _picks_actions(Step(tape, -1, kept, run, {}, 0.0)):
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


def _picks_actions(step: Step) -> bool:
    """Whether values that a layer gives are picked by whole numbers from outside, and compared with a target.

    What is picked of the logarithms of probabilities, as by PPO or DPO, is compared with that of a copy for good.
    """
    step.require_rows()
    leaves, values = step.leaves.items(), step.values
    whole = {slot for slot, one in leaves if str(one.dtype) in _WHOLE and one.shape[:1] == (step.rows,)}
    layers, picked = set[Slot](), set[Slot]()
    for one in step.operations:
        given = one.given
        picks = one.name in _PICKING and bool(given) and given[0] in layers and bool(whole & set(given))
        if picks or (picked & set(given) and one.name in _SHAPING):
            picked |= set(one.outs)
        elif picked & set(given):
            return one.kind in _COMPARING and any(not values[slot].requires_grad for slot in given)
        if whole & set(given) and not any(values[slot].requires_grad for slot in given):
            whole |= set(one.outs)
        if set(given) & step.parameters.keys() and one.grad:
            layers |= set(one.outs)
    return False
