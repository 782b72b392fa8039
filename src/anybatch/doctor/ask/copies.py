"""Nets that are copies of trained ones: do they ever change, do their buffers, and does evaluation change them?"""

import re
from collections.abc import Iterator
from typing import Any

from anybatch.doctor.ask.keeping import Kept, State
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_ENOUGH_STEPS = 30
_CACHE = re.compile(r"cache|\bkv|_seen|rope|rotary|cos|sin|freq|alibi|mask|position", re.IGNORECASE)
_STATISTICS = ("running_mean", "running_var")


def about_copies(kept: Kept, run: Run) -> Iterator[Probed]:
    """What becomes of nets that no optimizer steps and that were copies of trained ones when they were first called.

    Args:
        kept: of the run.
        run: its facts.
    """
    optimized = {
        run.parameters[number].root
        for one in run.optimizers.values()
        for group in one.groups
        for number in group.parameters
        if number in run.parameters
    }
    for root, state in kept.states.items():
        if root in optimized or run.steps < _ENOUGH_STEPS:
            continue
        online = next((one for one in sorted(optimized) if one in kept.states and _were_equal(kept, root, one)), None)
        moved = {name for name, mark in state.values.items() if state.last.get(name) != mark}
        weights = state.values.keys() - state.buffers
        if online is not None and not moved & weights and _others_move(kept, online):
            yield _frozen(kept, run, root, online, state)
        elif moved & weights and online is not None and False in state.modes:
            stale = [name for name in state.values if name.endswith(_STATISTICS) and name not in moved]
            theirs = kept.states[online]
            moving = any(theirs.last.get(name) != theirs.values.get(name) for name in stale)
            if stale and moving and True not in state.modes:
                yield Probed(probe="copied buffers", root=root, answer="yes", evidence={"online": online,
                             "buffers": len(stale), "first": stale[0]})  # fmt: skip


def _were_equal(kept: Kept, root: int, other: int) -> bool:
    one, two = kept.states[root].values, kept.states[other].values
    return bool(one) and list(one.values()) == list(two.values())


def _others_move(kept: Kept, online: int) -> bool:
    return kept.states[online].last != kept.states[online].values


def _frozen(kept: Kept, run: Run, root: int, online: int, state: State) -> Probed:
    """A copy that never moves is meant where it is given what the other one is given, as a reference model is."""
    both = state.inputs.keys() & kept.states[online].inputs.keys()
    apart = sum(1 for step in both if not state.inputs[step] & kept.states[online].inputs[step])
    evidence: dict[str, Any] = {"online": online, "steps": run.steps, "looked_at": len(both), "other_inputs": apart}
    replaced = sum(1 for other in kept.states if other != root and other != online and _alike(kept, root, other))
    if replaced:
        return Probed(probe="frozen copy", root=root, detail="there are further copies", evidence=evidence)
    if len(both) < 3 or apart < 0.8 * len(both):
        return Probed(probe="frozen copy", root=root, answer="no", evidence=evidence)
    return Probed(probe="frozen copy", root=root, answer="yes", evidence=evidence)


def _alike(kept: Kept, root: int, other: int) -> bool:
    """Whether another net has the same parameters by name and shape."""
    one, two = kept.states[root].values, kept.states[other].values
    return one.keys() == two.keys() and [mark[0] for mark in one.values()] == [mark[0] for mark in two.values()]


def about_evaluation(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether an evaluation writes to what a forward of the training writes to as well.

    Args:
        kept: of the run.
        run: its facts.
    """
    for (root, training), names in kept.written.items():
        if training or (root, True) not in kept.written:
            continue
        both = [name for name in names if name in kept.written[root, True] and not _CACHE.search(name)]
        if both:
            file, line = names[both[0]]
            yield Probed(probe="written in evaluation", root=root, answer="yes", file=file, line=line,
                         evidence={"names": both[:6], "count": len(both)})  # fmt: skip


def about_inputs(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a net is given numbers of another scale in evaluation than in training.

    Args:
        kept: of the run.
        run: its facts.
    """
    for (root, training), given in kept.given.items():
        trained = [one for one in kept.given.get((root, True), ()) if one.rows >= 4]
        evaluated = [one for one in given if one.rows >= 4]
        if training or len(trained) < 3 or not evaluated:
            continue
        if {len(one.shape) for one in trained} != {len(one.shape) for one in evaluated}:
            continue
        stds, means = sorted(one.std for one in trained), [one.mean for one in trained]
        low, high = stds[0], stds[-1]
        between = max(means) - min(means)
        apart = all(one.std > 2.5 * high or one.std < low / 2.5 for one in evaluated)
        shifted = all(min(abs(one.mean - mean) for mean in means) > max(1.5 * high, 3 * between) for one in evaluated)
        if low > 0 and high < 2 * low and (apart or shifted):
            first = evaluated[0]
            yield Probed(
                probe="evaluated inputs", root=root, answer="yes", file=first.file, line=first.line,
                evidence={"mean": sum(means) / len(means), "std": stds[len(stds) // 2], "mean_evaluated": first.mean,
                          "std_evaluated": first.std},
            )  # fmt: skip
