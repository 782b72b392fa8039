"""Rules of the family order: zero_grad, backward and step, and what happens when one is missing or misplaced."""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, pairwise
from statistics import mean

from anybatch.doctor.rules.registry import RUNS_AWAY, STANDS_STILL, Found, Limit, rule
from anybatch.doctor.rules.wiring import in_no_group
from anybatch.doctor.views.measures import followed, gradients
from anybatch.doctor.views.naming import counted, names_of, near, root_variable
from anybatch.doctor.views.optimizing import OptimizerView, left_out, optimizers
from anybatch.doctor.views.windows import Pass, Window, by_closure, concerns, members, passes, written
from anybatch.records.events import Backward, Cleared, Clipped, Forward, Scaler, Stepped
from anybatch.records.findings import Place
from anybatch.records.lossfacts import Followed
from anybatch.records.runs import Run
from anybatch.records.samples import Norms, Written

_CALLS = 6  # of the closure, where there are fewer than three steps
_ROUNDING = 1e-6  # relative; a mean over micro-batches is summed in another order
_LOOKS_BY_HAND = 2  # at backwards of the first twenty
_ENOUGH = 20  # steps of which one shows what lies between the clearing and the step


@rule("AB301", "ZERO_GRAD_MISSING", "error", explains=(*RUNS_AWAY, "ACCUM_NOT_DIVIDED", "LEAK_TO_OTHER_NET"))
def zero_grad_missing(run: Run, *, steps: float = Limit(3, "in a row, without the end of an epoch")) -> Iterator[Found]:
    """Steps that use gradients which an earlier step had used."""
    every = optimizers(run)
    for one in every:
        if in_no_group(run) and any(one.own <= other.own for other in every if other is not one):
            continue  # it was given a net of another optimizer, and its own one is in none
        row: list[tuple[Stepped, Pass]] = []
        every_time = list[tuple[Stepped, Pass]]()
        for window, step in one.stepped:
            added = next((back for back in window.used if back.kept is not None and back.kept & one.own), None)
            if added is not None and not window.borders:
                row.append((step, added))
                every_time.append((step, added))
            elif len(row) >= steps:
                break
            else:
                row = []
        if len(row) >= steps:
            yield _not_cleared(run, one, row, "in a row")
        elif len(every_time) >= steps and 2 * len(every_time) > (of := _steps_behind(one, every_time[0][1])):
            yield _not_cleared(run, one, every_time, f"of the {of} behind it")
        else:
            yield from _closure_clears_nothing(run, one)
    yield from _kept_by_hand(run)


def _kept_by_hand(run: Run) -> Iterator[Found]:
    """Updates without any optimizer that use gradients which the update before had used."""
    looks = list(run.of(Written))
    if run.optimizers or len(looks) < _LOOKS_BY_HAND or not all(one.kept for one in looks):
        return
    kept, back = frozenset(looks[-1].kept), passes(run)[0].fact
    yield Found(
        text=f"Updates by hand use the gradients of earlier ones again: nothing clears .grad before the next backward"
        f"{near(back)}.",
        fix=f"{names_of(run, kept)}.grad = None  # after the update"
        if len(kept) == 1
        else "p.grad = None  # of each weight p, after its update",
        cause="backward() adds to .grad; without clearing, each step uses the sum of all gradients so far.",
        since=back,
        parameters=kept,
        evidence={"not_cleared": len(kept), "updates": len(looks)},
    )


def _steps_behind(one: OptimizerView, back: Pass) -> int:
    """How many steps use the gradients of a backward on the same line."""
    return sum(any(other.spot == back.spot for other in window.used) for window, _ in one.stepped)


def _not_cleared(run: Run, one: OptimizerView, row: list[tuple[Stepped, Pass]], how_often: str) -> Found:
    added = row[0][1]
    kept = (added.kept or frozenset()) & one.own
    reached = (added.touched or frozenset()) & one.own
    whole = len(kept) == len(reached)
    return Found(
        text=f"{one}.step() used the gradients{'' if whole else f' of {names_of(run, kept)}'} a second time: no "
        f"zero_grad() came before the next backward{near(added.fact)}, at {counted(len(row), 'step')} {how_often}.",
        fix=f"{one}.zero_grad()  # before the backward{near(added.fact)}",
        cause="backward() adds to .grad; without clearing, each step uses the sum of all gradients so far.",
        since=added.fact,
        step=row[2][0].number,
        parameters=kept,
        optimizer=one.number,
        evidence={"not_cleared": len(kept), "of": len(reached), "steps": len(row)},
        severity="" if whole else "warning",
    )


def _closure_clears_nothing(run: Run, one: OptimizerView) -> Iterator[Found]:
    """A closure whose backwards add up; LBFGS calls it several times in a step, and a clearing in front is of one."""
    found = [window for window in one.windows if window.step is not None]
    if not found or one.facts.cls != "LBFGS":
        return
    first = one.steps[0].at
    before = max((step.at for step in run.of(Stepped) if step.optimizer != one.number and step.at < first), default=-1)
    backs = [back.fact for window in found for back in window.passes if back.reaches(one.own) and back.fact.at > before]
    enough = len(backs) > len(found) and (len(found) >= 3 or len(backs) >= _CALLS)
    if not enough or not all(by_closure(run, window) for window in found):
        return
    clears = [clear for clear in run.of(Cleared) if clear.at > backs[0].at]  # none of an optimizer before it counts
    outside = any(concerns(run, clear, one.number, members(run)) for clear in clears)
    several = sum(len(window.passes) > 1 for window in found)
    inside = any(window.clears for window in found[1:])  # the first one has those of an optimizer before it
    cleared = inside or (outside and (several < 2 or len(found) < 3))
    if cleared or any(step.edited for step in one.steps):
        return
    yield Found(
        text=f"Nothing clears the gradients of {one} {'within a step, in' if outside else 'in'} "
        f"{counted(len(found), 'step')}: each backward of the closure{near(backs[1])} adds to those before.",
        fix=f"{one}.zero_grad()  # in the closure, before the backward{near(backs[1])}",
        cause=f"{one} calls its closure several times in a step, and takes the gradient to be of one call.",
        since=backs[1],
        step=one.steps[min(2, len(one.steps) - 1)].number,
        parameters=one.own,
        optimizer=one.number,
        evidence={"backwards": len(backs), "steps": len(found), "clearings": 0},
    )


@rule(
    "AB302", "ZERO_GRAD_BEFORE_STEP", "error",
    explains=(*STANDS_STILL, "STEP_WITHOUT_GRADIENT", "CLIP_NO_EFFECT", "ZERO_GRAD_PER_MICROBATCH", "FROZEN_MOVES"),
)  # fmt: skip
def zero_grad_before_step(run: Run) -> Iterator[Found]:
    """Gradients that are cleared before the step that should use them."""
    for one in optimizers(run):
        found = [(window, step) for window, step in one.stepped if step.zero is not None or not step.with_grad]
        bad = [(window, step) for window, step in found if _cleared_in_vain(window, step)]
        if len(bad) < 2 or len(bad) * 2 < len(found) or _never_its_own(run, one):
            continue
        window, step = bad[0]
        clear = [event for event in window.events if isinstance(event, Cleared)][-1]
        back = window.passes[-1].fact
        last = max((one for one in passes(run) if one.fact.at < step.at), key=lambda one: one.fact.at)
        if last.touched and last.touched.issubset(in_no_group(run)):
            continue  # the step is meant for what it was not given
        by = near(clear) if clear.file else " by hand" if clear.by == "hand" else ""
        where, fix = _moved(run, one, clear, step, back)
        yield Found(
            text=f"The gradients of the backward{near(back)} are cleared{by} before {one}.step(): {len(bad)} of "
            f"{counted(len(found), 'step')} examined saw none.",
            fix=fix,
            cause="The step comes after the clearing, so it has no gradients to use.",
            since=clear,
            step=step.number,
            where=where,
            optimizer=one.number,
            evidence={"steps": len(found), "in_vain": len(bad)},
        )


def _cleared_in_vain(window: Window, step: Stepped) -> bool:
    clears = [event for event in window.events if isinstance(event, Cleared)]
    if step.with_grad and clears and clears[-1].by == "hand":
        return False  # nobody was seen to clear: the backward itself may have given zeros, as a margin that is met does
    none = step.with_grad == 0 or step.zero is True
    return bool(window.passes) and not window.used and not step.edited and none


def _never_its_own(run: Run, one: OptimizerView) -> bool:
    """Whether each backward that reaches an optimizer is for another one, and its own was left out.

    The one that discriminates gets gradients of the generator's loss too, and clears them before its next forward.
    """
    others = frozenset().union(*(members(run).get(step.optimizer, frozenset()) for step in run.of(Stepped))) - one.own
    reaching = [back for back in passes(run) if back.reaches(one.own)]
    if not reaching or not all(back.touched is not None and back.touched & others for back in reaching):
        return False
    forwards = [entry.at for entry in run.of(Forward) if entry.grad]
    for window, step in one.stepped[:_ENOUGH]:
        cleared = max((event.at for event in window.events if isinstance(event, Cleared)), default=None)
        if cleared is not None and any(cleared < at < step.at for at in forwards):
            return True
    return False


def _moved(
    run: Run, one: OptimizerView, clear: Cleared, step: Stepped, back: Backward
) -> tuple[tuple[str, int], str]:  # fmt: skip
    """Which call is misplaced, and where it belongs: the clearing may stand in front of the backward already."""
    same = step.file == back.file == clear.file
    if same and max(clear.line, step.line) < back.line:
        return (step.file, step.line), f"move {one}.step(){near(step)} after the backward{near(back)}"
    owner = root_variable(run, clear.number) if clear.by == "module" else str(one)
    where = (clear.file or back.file, clear.line or back.line)
    if same and clear.line < back.line:
        return where, f"let {owner}.zero_grad() run before the backward{near(back)}, not between it and {one}.step()"
    return where, f"move {owner}.zero_grad() before the backward{near(back)}"


@rule("AB303", "STEP_MISSING", "error", explains=(*STANDS_STILL, "ZERO_GRAD_PER_MICROBATCH", "PARAM_UNUSED"))
def step_missing(run: Run, *, backwards: float = Limit(20, "fewer may be one long window")) -> Iterator[Found]:
    """Optimizers whose parameters get gradients and that never step."""
    stepped = {one.optimizer for one in run.of(Stepped)} | {one.optimizer for one in run.of(Scaler)}
    covered = frozenset().union(*(members(run).get(number, frozenset()) for number in stepped))
    for one in (OptimizerView(run, number) for number in members(run)):
        if one.number in stepped or not one.own - covered or one.own & written(run):
            continue
        found = [back.fact for back in passes(run) if back.touched is not None and back.touched & (one.own - covered)]
        if len(found) < backwards:
            continue
        clears = sum(clear.by == "optimizer" and clear.number == one.number for clear in run.of(Cleared))
        yield Found(
            text=f"{one} never steps: {counted(len(found), 'backward')} put gradients on its parameters.",
            fix=f"{one}.step()  # after the backward{near(found[0])}",
            cause=f"{one}.step() is missing, or is behind a condition that never holds, such as accumulating more "
            "batches than an epoch has.",
            since=found[0],
            step=found[min(19, len(found) - 1)],
            where=(found[0].file or one.facts.file, found[0].line or one.facts.line),
            parameters=one.own,
            optimizer=one.number,
            evidence={"backwards": len(found), "clearings": clears},
            severity="" if clears or not stepped else "warning",
        )


@rule("AB304", "STEP_WITHOUT_GRADIENT", "error", explains=(*STANDS_STILL, "PARAM_UNUSED", "FROZEN_MOVES"))
def step_without_gradient(run: Run, *, steps: float = Limit(5, "the first ones may be a warm-up")) -> Iterator[Found]:
    """Optimizers that step and never see a gradient."""
    unknown = any(one.is_leaf or one.touched is None for one in run.of(Backward))
    if unknown and any(one.touched is None for one in passes(run)):
        return
    for one in optimizers(run):
        by_gradient = one.facts.is_torchs or any(run.of(Clipped))  # who clips them wants them
        if not by_gradient or len(one.steps) < steps or any(step.with_grad for step in one.steps):
            continue
        trainable = any(run.parameters[number].requires_grad for number in one.own if number in run.parameters)
        reached = any(back.reaches(one.own) for back in passes(run)) and not _never_its_own(run, one)
        if one.number not in run.optimizers or not trainable or reached:
            continue
        first = one.steps[0]
        spots = Counter(back.spot for back in passes(run))
        common = spots.most_common(1)[0][0] if spots else None
        back = next((back.fact for back in passes(run) if back.spot == common), None)
        call = left_out(run).get(one.number)
        between = f" between {call.function}{near(call)} and its step" if call is not None else ""
        followed = max((look.at for look in run.of(Followed) if look.why == "no gradient"), default=0)
        constant = next(_constants(run), None) if back is not None and not between else None
        at = near(constant)[2:-1]
        fix = f"loss.backward()  # before {one}.step(){near(first)}"
        if back is not None and not between:
            fix = f"anybatch.why(loss, model)  # shows what the loss reaches, before the backward{near(back)}"
        yield Found(
            text=f"{one} stepped {len(one.steps)} times and never saw a gradient: "
            + (
                f"no backward was called{between}."
                if back is None or between
                else f"no backward{near(back)} reaches its parameters."
            )
            + (f" What {at} computes is part of the loss and has no graph." if constant else ""),
            fix=f"# keep the graph up to {at}: no detach(), numpy(), item() or new tensor on the way"
            if constant
            else fix,
            cause="A step passes over parameters whose gradient is None.",
            since=max(first.at, followed),
            step=one.steps[min(4, len(one.steps) - 1)].number,
            where=call or constant or back or first,
            parameters=one.own,
            optimizer=one.number,
            evidence={"steps": len(one.steps), "backwards": sum(spots.values())},
        )


def _constants(run: Run) -> Iterator[Place]:
    """The user's lines whose tensors take part in a loss without a graph, where other terms have one."""
    for look, paths in followed(run):
        if look.why == "no gradient" and any(term.has_gradient for term in paths.terms):
            for term in paths.terms:
                if not term.has_gradient and term.op == "a tensor" and term.line:
                    yield Place(file=term.file, line=term.line)


@rule("AB305", "STEP_TWICE", "warning")
def step_twice(run: Run, *, steps: float = Limit(3, "of those whose gradients were measured")) -> Iterator[Found]:
    """Optimizers that step a second time along the same gradients."""
    for one in optimizers(run):
        own = ((norm.number, gradients(norm)) for norm in run.of(Norms) if norm.optimizer == one.number)
        norms = {number: [grad for each, grad in found.items() if each in one.own] for number, found in own}
        pairs = [
            (window, before, step)
            for (_, before), (window, step) in pairwise(one.stepped)
            if before.number + 1 == step.number and any(norms.get(step.number, ()))
        ]
        again = [
            (before, step)
            for window, before, step in pairs
            if not (window.passes or window.clears or step.edited or step.closure)
            and norms.get(before.number) == norms[step.number]
        ]
        seen = any(window.passes for window, _ in one.stepped)  # else nobody knows what came between
        if not seen or len(again) < steps or 3 * len(again) < len(pairs):
            continue
        first, second = again[0]
        yield Found(
            text=f"{one} steps twice along the same gradients: no backward lies between its steps{near(first)} and"
            f"{near(second)}, {len(again)} times in the {counted(len(pairs), 'step')} that were measured.",
            fix=f"remove the second step of {one}{near(second)}",
            cause="A step that is taken twice is longer than the learning rate says, and moves momentum and moments of "
            "the optimizer twice.",
            since=second,
            step=again[-1][1].number,
            parameters=one.own,
            optimizer=one.number,
            evidence={"twice": len(again), "steps": len(pairs)},
        )


@rule("AB306", "LOSS_COUNTED_TWICE", "warning")
def loss_counted_twice(run: Run, *, steps: float = Limit(3, "of those whose losses are known")) -> Iterator[Found]:
    """Steps along two backwards, on two lines, of losses that are equal but for rounding."""
    for one in optimizers(run):
        found = [(again, step) for window, step in one.stepped if (again := _twice_in(window)) is not None]
        known = [again for again, _ in found if again]
        if len(known) < steps or 2 * len(known) < len(found):
            continue
        first, second = known[0]
        step = next(step for again, step in found if again)
        yield Found(
            text=f"{one}.step() uses the same loss twice: those of the backwards{near(first)} and{near(second)} are "
            f"equal but for rounding, at {len(known)} of {counted(len(found), 'step')}.",
            fix=f"remove the backward{near(second)}",
            cause="Both backwards add to the gradients, so they are twice as large as those of the loss.",
            since=second,
            step=step.number,
            parameters=one.own,
            optimizer=one.number,
            evidence={"twice": len(known), "steps": len(found)},
        )


def _twice_in(window: Window) -> tuple[Backward, Backward] | tuple[()] | None:
    """Two backwards on two lines with one loss, if there are any; ``None`` where the losses are not known.

    Of several micro-batches on a line the mean counts.
    """
    lines = [[*part] for _, part in groupby(window.used, key=lambda back: back.spot)]
    losses = [[back.fact.value for back in part if back.fact.value is not None] for part in lines]
    if len(lines) < 2 or any(len(some) < len(part) for some, part in zip(losses, lines, strict=True)):
        return None
    for place, (one, other) in enumerate(pairwise(map(mean, losses))):
        first, second = lines[place][0], lines[place + 1][0]
        is_alike = first.touched and first.touched == second.touched
        is_alike = is_alike and _weight(lines[place]) == _weight(lines[place + 1])
        if one and is_alike and math.isfinite(one) and math.isclose(one, other, rel_tol=_ROUNDING):
            return first.fact, second.fact
    return ()


def _weight(backs: list[Pass]) -> float:
    """The sum of what was passed as ``gradient=``, which the value does not show; that of micro-batches is 1."""
    return round(sum(back.fact.weight for back in backs), 6)
