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
    """What becomes of nets that were copies of others, which are trained, when both were first called.

    Args:
        kept: of the run.
        run: its facts.
    """
    states = list(kept.states.values()) if run.steps >= _ENOUGH_STEPS else []
    for state in states:
        equal = [one for one in states if one is not state and _were_equal(one, state)]
        online = next((one for one in equal if True in one.modes and _moved(one) & one.weights), None)
        moved = _moved(state)
        if online is None or not state.values:
            continue
        if not moved & state.weights:
            yield _frozen(states, run, online, state)
        elif True not in state.modes and False in state.modes:
            stale = [name for name in state.values if name.endswith(_STATISTICS) and name not in moved]
            if stale and _moved(online) & set(stale):
                evidence = {
                    "online": online.root,
                    "online_module": online.name,
                    "buffers": len(stale),
                    "first": stale[0],
                }
                yield Probed(
                    probe="copied buffers", root=state.root, module=state.name, answer="yes", evidence=evidence
                )


def _were_equal(one: State, two: State) -> bool:
    return list(one.values.values()) == list(two.values.values())


def _moved(state: State) -> set[str]:
    return {name for name, mark in state.values.items() if state.last.get(name) != mark}


def _frozen(states: list[State], run: Run, online: State, state: State) -> Probed:
    """A copy that never moves is meant where it is given what the other one is given, as a reference model is."""
    both = state.inputs.keys() & online.inputs.keys()
    apart = sum(1 for step in both if not state.inputs[step] & online.inputs[step])
    evidence: dict[str, Any] = {"online": online.root, "online_module": online.name, "steps": run.steps,
                                "looked_at": len(both), "other_inputs": apart}  # fmt: skip
    later = [
        one for one in states if one.steps > state.steps + 5 and _alike(one, state) and not _moved(one) & one.weights
    ]
    answer, why = "yes", ""
    if later:
        answer, why = "unknown", "there are further copies"
    elif len(both) < 3 or apart < 0.8 * len(both):
        answer = "no"
    return Probed(probe="frozen copy", root=state.root, module=state.name, answer=answer, detail=why, evidence=evidence)


def _alike(one: State, two: State) -> bool:
    """Whether two nets have the same parameters by name and shape."""
    return {name: mark[0] for name, mark in one.values.items()} == {name: mark[0] for name, mark in two.values.items()}


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
    """Whether a net is given numbers of another scale in evaluation than in training, or one number only.

    Args:
        kept: of the run.
        run: its facts.
    """
    for (root, training), given in kept.given.items():
        trained = [one for one in kept.given.get((root, True), ()) if one.rows >= 4]
        evaluated = [one for one in given if one.rows >= 4]
        alike = [one for one in trained if not one.std]  # the others may be an evaluation that calls no eval()
        if training and len(alike) >= 5 and len(alike) > 0.8 * len(given):
            yield Probed(probe="inputs alike", root=root, answer="yes", file=alike[0].file, line=alike[0].line,
                         evidence={"value": alike[0].mean, "calls": len(alike)})  # fmt: skip
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
