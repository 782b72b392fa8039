"""What nets were seen to be and to be given: copies, buffers, inputs, weights that are drawn anew or put back."""

import contextlib
import itertools
import math
import re
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch.nn.functional as F

from anybatch.doctor.ask.keeping import Given, Kept, Passed, State
from anybatch.doctor.ask.steps import DISTANCES, Step, replayed, total
from anybatch.doctor.ask.tape import Slot, Tape
from anybatch.doctor.ask.trials import Line, Trial, Unknown, tensors, told
from anybatch.doctor.samples.alongside import related
from anybatch.records.events import Loaded
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.runs import Run
from anybatch.records.samples import Scored

_ENOUGH_STEPS = 30
_FAR_APART, _FAR_ALONE = 2.5, 20.0  # times the deviation of the training, in a batch and in one sample
_LEAST_ALONE = 4  # single samples of an evaluation
_TOO_MUCH = 0.5  # of the trained net at each step: an average that forgets faster than it remembers
_SAME_SHARE = 0.02  # warm-ups of averages begin with large shares, which fall
_WHOLE = 0.9999  # of a net: it was copied, and not averaged
_LEAST_LOOKS = 4
_BEHIND = 0.3  # of a step: an average with equal shares is one step behind
_HALFWAY = 0.5  # of the way from the first weights of a net to its last
_CACHE = re.compile(r"cache|\bkv|_seen|rope|rotary|cos|sin|freq|alibi|mask|position", re.IGNORECASE)
_SECONDS = 2.0  # for one forward
_AVERAGED = re.compile(r"ema|av(era)?g|shadow|slow|teacher|momentum|swa|polyak", re.IGNORECASE)
_STATISTICS = ("running_mean", "running_var")


def about_copies(kept: Kept, run: Run) -> Iterator[Probed]:
    """What becomes of nets that were copies of others, which are trained, when both were first called."""
    states = list(kept.states.values()) if run.steps >= _ENOUGH_STEPS else []
    for state in states:
        yield from _within(kept, run, state)
        trained = [one for one in states if one is not state and True in one.modes and _moved(one) & one.weights]
        equal = next((one for one in trained if list(one.values.values()) == list(state.values.values())), None)
        online = equal or next((one for one in trained if _alike(one, state)), None)  # first called when it had moved
        moved = _moved(state)
        if online is None or not state.values:
            continue
        if not moved & state.weights:
            if equal is not None:
                yield _left(kept, run, equal, state) or _frozen(states, run, equal, state)
            elif fresh := _fresh_statistics(state, online):
                yield _of_copy("copied buffers", state, online, buffers=len(fresh), first=fresh[0])
            continue
        share = _share_taken(state, online) or _kept_up(run, state, online)
        acts = share == 1.0 and any(True for _ in run.of(Scored))  # what only acts may be the newest net
        if share is not None and share > _TOO_MUCH and not acts and not _learns(state):
            yield _of_copy("close copy", state, online, share=share)
        if share is None and (slow := _still_at_first(kept, run, state, online)):
            yield _of_copy("slow copy", state, online, steps=run.steps, **slow)
        if state.modes == {False} and not _learns(state):
            stale = _fresh_statistics(state, online)  # of one that had moved when it was first called
            if equal is not None:
                stale = [name for name in state.values if name.endswith(_STATISTICS) and name not in moved]
            if _moved(online) & set(stale):
                yield _of_copy("copied buffers", state, online, buffers=len(stale), first=stale[0])


def _within(kept: Kept, run: Run, state: State) -> Iterator[Probed]:
    """Of a net that has both in it: a part that was a copy of another one, is used by its training and given else."""
    for copied, online in _twins(state):
        one, other = _part(state, copied), _part(state, online)
        if not _moved(other) & other.weights or _learns(one):
            continue
        if not _moved(one) & one.weights:
            if _given_apart(kept, one, other):
                yield _of_copy("frozen copy", one, other, steps=run.steps)
        elif (share := _share_taken(one, other)) is not None and share > _TOO_MUCH:
            yield _of_copy("close copy", one, other, share=share)


def copies_of(kept: Kept) -> Iterator[tuple[State, State]]:
    """Nets without gradients of their own that have the parameters of one that is trained, each with that one."""
    states = list(kept.states.values())
    for state in states:
        trained = (one for one in states if one is not state and _alike(one, state) and _learns(one))
        if not _learns(state) and (online := next(trained, None)) is not None:
            yield state, online


def _twins(state: State) -> list[tuple[str, str]]:
    """The largest parts of a net with the same parameters and values at first, a matrix among them, in both orders."""
    parts: dict[str, dict[str, Any]] = {}
    for name, mark in state.values.items():
        for place, letter in enumerate(name):
            if letter == ".":
                parts.setdefault(name[:place], {})[name[place + 1 :]] = mark
    alike: dict[Any, list[str]] = {}
    for part, values in parts.items():
        if any(len(mark[0]) > 1 for mark in values.values() if len(mark) == 2 and isinstance(mark[0], tuple)):
            alike.setdefault(tuple(values.items()), []).append(part)
    found = [pair for a, b in (same for same in alike.values() if len(same) == 2) for pair in ((a, b), (b, a))]
    inner = {
        (one, other) for one, other in found for a, b in found if one.startswith(f"{a}.") and other.startswith(f"{b}.")
    }
    return [pair for pair in found if pair not in inner]


def _part(state: State, name: str) -> State:
    """What is known of a part of a net."""

    def of(values: dict[str, Any]) -> dict[str, Any]:
        return {one.removeprefix(f"{name}."): mark for one, mark in values.items() if one.startswith(f"{name}.")}

    whole = f"{state.name}.{name}" if state.name else name
    went = {step: of(values) for step, values in state.went.items()}
    buffers = {one.removeprefix(f"{name}.") for one in state.buffers}
    return State(state.module, state.root, whole, of(state.values), of(state.last), buffers, {}, went=went, within=name)


def _parameters(state: State) -> dict[str, Any]:
    net = state.module()
    part = net.get_submodule(state.within) if net is not None else None
    return dict(part.named_parameters()) if part is not None else {}


def _learns(state: State) -> bool:
    """Whether a net gets gradients of its own."""
    return any(one.requires_grad and one.grad is not None for one in _parameters(state).values())


def _given_apart(kept: Kept, one: State, other: State) -> bool:
    """Whether both were run in a step that was written down, on different inputs."""
    firsts = []
    for state in (one, other):
        mine = set(map(id, _parameters(state).values()))
        firsts.append([_first_given(tape, mine) for tape in kept.tapes.values()])
    pairs = [(a, b) for a, b in zip(*firsts, strict=True) if a is not None and b is not None]
    return bool(pairs) and all(a != b for a, b in pairs)


def _first_given(tape: Tape, parameters: set[int]) -> Slot | None:
    """What the first operation with one of some parameters was given beside it."""
    for operation in tape.operations:
        held = [slot for slot in operation.given if id(tape.parameters.get(slot)) in parameters]
        others = [slot for slot in operation.given if slot not in tape.parameters]
        if held and others:
            return others[0]
    return None


def _share_taken(state: State, online: State) -> float | None:
    """The share of another net that a copy takes at each step, where it is the same in all that were looked at.

    The mark of a tensor is a weighted sum of its entries, so that marks are averaged as the entries are. Steps in
    which an average was left as it is, as where it follows every second one, say nothing of its share.
    """
    shares, rests = list[float](), 0
    for step, after in state.went.items():
        before, theirs = state.went.get(step - 1), online.went.get(step)
        if before is None or theirs is None or step - 1 not in online.went:
            continue
        names = [name for name in state.weights if all(len(one[name]) == 2 for one in (before, after, theirs))]
        moved = [after[name][1] - before[name][1] for name in names]
        away = [theirs[name][1] - before[name][1] for name in names]
        size = sum(one * one for one in away)
        if not any(moved):
            rests += size > 0
            continue
        share = sum(a * b for a, b in zip(moved, away, strict=True)) / size if size else 0.0
        rest = sum((a - share * b) ** 2 for a, b in zip(moved, away, strict=True))
        if not size or rest > 1e-3 * size:
            return None
        shares.append(share)
    if len(shares) < _LEAST_LOOKS - bool(rests) or max(shares) - min(shares) >= _SAME_SHARE:
        return None
    return min(shares) if not rests or min(shares) < _WHOLE else None  # a whole copy now and then is usual


def _kept_up(run: Run, state: State, online: State) -> float | None:
    """The least share of another net that a copy takes at each step, if it is less than a step behind at two looks.

    Of two looks that are many steps apart: an average of a net that moves is as many steps behind it as it averages.
    """
    steps = run.steps - state.steps
    first = online.went.get(state.steps)
    if first is None or steps < _ENOUGH_STEPS or state.steps < 2:
        return None

    def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
        return math.dist(*([each[name][1] for name in sorted(names)] for each in (one, other)))

    names = {name for name in state.weights if all(len(one.get(name, ())) == 2 for one in (state.values, first))}
    step = apart(online.last, first) / steps  # at least so far it goes in each
    behind = [apart(state.values, first), apart(state.last, online.last)]
    is_near = step > 0 and all(0 < one < _BEHIND * step for one in behind)
    return 1 - max(behind) / step if is_near else None


def _still_at_first(kept: Kept, run: Run, state: State, online: State) -> dict[str, float]:
    """How far a copy that is only evaluated came on the way of a net, where its loss shows that this was too little.

    Where a net that makes targets moves as slowly, it is called in each step.
    """
    called = sorted(state.inputs)
    if state.within or any(later - step < 2 for step, later in itertools.pairwise(called)) or _learns(state):
        return {}
    names = {name for name in state.weights if all(len(one.get(name, ())) == 2 for one in (online.values, online.last))}
    went, whole = (
        math.dist(*([each[name][1] for name in sorted(names)] for each in (one.last, online.values)))
        for one in (state, online)
    )
    if went >= _HALFWAY * whole:
        return {}
    losses = _losses_of_step(kept, state, online) or _losses_of_batch(kept, run, state, online)
    if not losses or not max(2 * losses[1], losses[2] / 2) < losses[0] < math.inf:
        return {}
    return {"way": went / whole, "loss": losses[0], "online_loss": losses[1]}


def _left(kept: Kept, run: Run, online: State, state: State) -> Probed | None:
    """A copy that never moves and alone is evaluated, with a loss that the trained net is far below."""
    named = run.roots[state.root].variable if state.root in run.roots else ""
    is_alone = state.modes == {False} and False not in online.modes and (online.root, False) not in kept.given
    is_alone = is_alone and bool(_AVERAGED.search(named))  # others may be what training is compared with
    lost = _still_at_first(kept, run, state, online) if is_alone and state.steps else {}
    return _of_copy("slow copy", state, online, steps=run.steps, **lost) if lost else None


def _losses_of_step(kept: Kept, state: State, online: State) -> list[float]:
    """The loss of the last step that was written down of a net with a copy's weights, its own, and its first ones."""
    names = {id(one): name for name, one in _parameters(online).items()}
    own = {name: one.detach().clone().requires_grad_() for name, one in _parameters(state).items()}
    for tape in kept.tapes.values():
        held = {slot: own[names[id(one)]] for slot, one in tape.parameters.items() if names.get(id(one)) in own}
        if held:
            with contextlib.suppress(Unknown):
                weights: list[Any] = [held, {}, kept.first_of(tape)]
                return [total(replayed(tape, tape.losses[-1], held=one), tape.losses[-1]) for one in weights]
    return []


def _losses_of_batch(kept: Kept, run: Run, state: State, online: State) -> list[float]:
    """The same of a batch of the training and a function of torch, where no step can be run again."""
    first = [one.value for one in run.of(LossCall) if one.root == online.root and one.value is not None][:1]
    found = list[float]()
    for rows, name, given in kept.batches.get(online.root, [])[-1:] if first else ():
        options = {key: value for key, value in given.items() if key not in ("shape", "shares")}
        with contextlib.suppress(Unknown):
            for net in (state, online):
                trial = Trial(net.module(), (rows,), {}, time.perf_counter() + _SECONDS)
                made = [one for one in tensors(trial.forward(trial.inputs)) if one.shape == given["shape"]]
                found += [float(getattr(F, name)(*made, **options).mean())] if len(made) == 1 else []
    return found + first if len(found) == 2 else []


def _trained_as(kept: Kept, run: Run, root: int) -> int:
    """A root, or the one that was trained, where it is a new net that was only given a whole state in the end."""
    state = next((one for one in kept.states.values() if one.root == root and not one.name), None)
    loads = any(one.into == "module" and one.matched == one.of > 0 for one in run.of(Loaded))
    if state is None or state.modes != {False} or (root, True) in kept.given or not loads or _learns(state):
        return root
    trained = (one for one in kept.states.values() if True in one.modes and one.steps < state.steps == run.steps)
    return next((one.root for one in trained if not one.name and _alike(one, state)), root)


def _of_copy(probe: str, state: State, online: State, **seen: Any) -> Probed:
    place = Line(module=state.name)
    return told(probe, place, root=state.root, online=online.root, online_module=online.name, **seen)


def _moved(state: State) -> set[str]:
    return {name for name, mark in state.values.items() if state.last.get(name) != mark}


def _frozen(states: list[State], run: Run, online: State, state: State) -> Probed:
    """A copy that never moves is meant where it is given what the other one is given, as a reference model is."""
    both = state.inputs.keys() & online.inputs.keys()
    apart = sum(1 for step in both if not state.inputs[step] & online.inputs[step])
    later = [
        one for one in states if one.steps > state.steps + 5 and _alike(one, state) and not _moved(one) & one.weights
    ]
    answer, why = "yes", ""
    if later:
        answer, why = "unknown", "there are further copies"
    elif len(both) < 3 or apart < 0.8 * len(both):
        answer = "no"
    seen = {"steps": run.steps, "looked_at": len(both), "other_inputs": apart}
    return _of_copy("frozen copy", state, online, answer=answer, detail=why, **seen)


def _fresh_statistics(state: State, online: State) -> list[str]:
    """Running means of a net that is only evaluated which are the zeros of a new one, while another net's moved."""
    names = (state.buffers & _moved(online)) - _moved(state) if state.modes == {False} else ()
    return [one for one in sorted(names) if one.endswith(_STATISTICS[0]) and state.values[one][1:] == (0.0,)]


def about_statistics(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a net was trained in evaluation mode only, by running statistics that are those of a new one."""
    for state in kept.states.values():
        means = [one for one in state.buffers if one.endswith(_STATISTICS[0])]
        new = [one for one in means if one not in _moved(state) and state.values[one][1:] == (0.0,)]
        if state.modes == {False} and 2 * len(new) > len(means) and _moved(state) & state.weights:
            yield told("statistics never made", root=state.root, norms=len(new), first=min(new).rpartition(".")[0])


def about_buffers(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a net had buffers that are no numbers when it was first called."""
    for state in kept.states.values():
        values = {one: [value for value in state.values[one] if isinstance(value, float)] for one in state.buffers}
        bad = [one for one in sorted(values) if any(map(math.isnan, values[one]))]
        if bad:
            yield told("buffer not a number", root=state.root, first=bad[0], names=len(bad))


def _alike(one: State, two: State) -> bool:
    """Whether two nets have the same parameters by name and shape."""
    return {name: mark[0] for name, mark in one.values.items()} == {name: mark[0] for name, mark in two.values.items()}


def about_evaluation(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether an evaluation writes to what a forward of the training writes to as well."""
    for (root, training), names in kept.written.items():
        if training or (root, True) not in kept.written:
            continue
        both = [name for name in names if name in kept.written[root, True] and not _CACHE.search(name)]
        if both:
            yield told("written in evaluation", Line(*names[both[0]]), root=root, names=both[:6], count=len(both))


def about_inputs(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a net is given numbers of another scale in evaluation than in training, or rows that are all the same."""
    for state in kept.states.values():
        if state.again:
            yield told("drawn again", root=state.root, answer="yes", calls=state.again)
    for (root, training), given in kept.given.items():
        trained = [one for one in kept.given.get((_trained_as(kept, run, root), True), ()) if one.rows >= 4]
        evaluated = [one for one in given if one.rows >= 4]
        evaluated = [one for one in evaluated if not one.grad] or evaluated  # others may train parts of it in that mode
        alike = [one for one in trained if one.same or not (one.std or one.symbols)]
        if training and len(alike) >= 5 and len(alike) > 0.8 * len(given):
            value = None if any(one.std for one in alike) else alike[0].mean
            seen: dict[str, Any] = {"value": value, "calls": len(alike), "rows": alike[0].rows}
            yield told("inputs alike", alike[0], root=root, symbols=alike[0].symbols, **seen)
        own = [one for one in evaluated if one.scaled and not one.known]
        batches = {(one.mean, one.std) for one in trained if one.scaled}  # more than one: it is done for each batch
        if not training and own and len(batches) < 2:
            yield told("scaled apart", own[0], root=root, rows=own[0].rows, columns=own[0].shape[0])
        far = _FAR_APART if evaluated else _FAR_ALONE
        evaluated = evaluated or [one for one in given if one.rows == 1 and one.std > 0]
        if len({(one.mean, one.std) for one in evaluated}) < 2 and far == _FAR_ALONE:
            continue
        if training or len(trained) < 3 or not evaluated or trained[0].symbols:
            continue
        if {len(one.shape) for one in trained} != {len(one.shape) for one in evaluated}:
            continue
        stds, means = sorted(one.std for one in trained), [one.mean for one in trained]
        low, high = stds[0], stds[-1]
        between = max(means) - min(means)
        apart = all(one.std > far * high or one.std < low / far for one in evaluated)
        if far == _FAR_ALONE and not apart:  # one picture is compared with single ones of the training
            apart = _are_flat(evaluated, trained)
        beyond = max((far - 1) * high, 3 * between)
        shifted = all(min(abs(one.mean - mean) for mean in means) > beyond for one in evaluated)
        if low > 0 and high < 2 * low and (apart or shifted):
            first = evaluated[0]
            seen = {"mean": sum(means) / len(means), "std": stds[len(stds) // 2]}
            seen |= {"mean_evaluated": first.mean, "std_evaluated": first.std}
            yield told("evaluated inputs", first, root=root, **seen)


def _are_flat(evaluated: Sequence[Given], trained: Sequence[Given]) -> bool:
    """Whether single pictures of the training's shape differ far less, or more, within a channel than any of those."""
    different, shapes = {(one.mean, one.std) for one in evaluated}, {one.shape for one in (*evaluated, *trained)}
    if len(different) < _LEAST_ALONE or len(shapes) > 1:
        return False
    least, most = min(one.stds[0] for one in trained), max(one.stds[1] for one in trained)
    return least > 0 and all(one.stds[0] > _FAR_ALONE * most or one.stds[1] < least / _FAR_ALONE for one in evaluated)


_PICKING = frozenset({"gather", "take_along_dim", "__getitem__"})
_SHAPING = frozenset({"squeeze", "view", "reshape", "flatten", "__getitem__", "unsqueeze"})
_COMPARING = DISTANCES | {"sub", "rsub"}
_INTEGERS = ("torch.int64", "torch.int32")


def about_states(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a net whose outputs actions pick, and its copy, are given the same in all steps that were looked at.

    An environment that gives its own array, and writes to it, changes what a replay buffer has stored: the states of
    transitions are those that come after them then.
    """
    tape = next(iter(kept.tapes.values()), None)
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
    whole = {slot for slot, one in leaves if str(one.dtype) in _INTEGERS and one.shape[:1] == (step.rows,)}
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


_LEAST_DRAWN, _RARE = 3, 5
"""The least times, and the least steps between them: small weights at a high rate become others in one step."""


def about_redrawn(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether weights become others between two steps of one optimizer, which were never there before."""
    for number, one in kept.redraws.optimizers.items():
        steps, came = [step for step, _ in one.drawn], [values for _, values in one.drawn]
        put_back = any(related(old, new) for place, new in enumerate(came) for old in came[:place])
        is_rare = all(later - earlier >= _RARE for earlier, later in pairwise(steps))
        if len(steps) >= _LEAST_DRAWN and is_rare and not put_back:
            every = (steps[-1] - steps[0]) // (len(steps) - 1)
            yield told("redrawn", optimizer=number, times=len(steps), every=every)


_LEAST_UNDONE, _NOTHING_KEPT = 8, 0.2  # a cosine
_LEAST_LOADS = 2


def about_undone(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether what an optimizer changes is gone before its next step."""
    for number, one in kept.redraws.optimizers.items():
        gone = sum(abs(cosine) < _NOTHING_KEPT for cosine in one.kept)
        if len(one.kept) >= _LEAST_UNDONE and gone >= 0.8 * len(one.kept):
            yield told("undone", optimizer=number, steps=gone, of=len(one.kept), cosine=median(one.kept))
    yield from _given_back(kept)


def _given_back(kept: Kept) -> Iterator[Probed]:
    """Trained nets that were given, again and again, the weights of one that nothing changes."""
    trained = {one: number for number, tape in kept.tapes.items() for one in tape.trained}
    for pair, same in itertools.groupby(sorted(kept.passed, key=_nets), _nets):
        loads = list(same)
        into, of = (kept.states.get(one) for one in pair)
        if into is None or of is None or len({one.step for one in loads}) < _LEAST_LOADS:
            continue
        mine = [trained[one] for one in loads[0].mine if one in trained]
        if mine and not loads[0].others & trained.keys() and of.values == of.last:
            seen: dict[str, Any] = {"online": of.root, "online_module": of.name, "times": len(loads), "kind": "loaded"}
            line = Line(loads[0].file, loads[0].line, into.name)
            yield told("undone", line, root=into.root, optimizer=mine[0], **seen)


def _nets(one: Passed) -> tuple[int, int]:
    return one.into, one.of
