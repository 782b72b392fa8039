"""Rules of the family order: zero_grad, backward and step, and what happens when one is missing or misplaced."""

from collections import Counter
from collections.abc import Iterator

from anybatch.doctor.rules.naming import at_line, counted, listed, names_of, optimizer_variable, place_of, root_variable
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import (
    Pass,
    Window,
    by_closure,
    concerns,
    members,
    passes,
    stepping,
    windows_of,
    written,
)
from anybatch.records.events import Backward, Cleared, Scaler, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import Followed
from anybatch.records.runs import Run


def left_over(window: Window, own: frozenset[int]) -> Pass | None:
    """The backward of a window that added to gradients that the step before had used and nobody had cleared.

    Args:
        window: of the optimizer.
        own: its parameters.

    Returns:
        The backward, ``None`` where all gradients that the step used were of this window.
    """
    return next((one for one in window.used if one.kept is not None and one.kept & own), None)


@rule(
    "AB301",
    "ZERO_GRAD_MISSING",
    "error",
    explains=(
        "EXPLODING",
        "LR_TOO_HIGH",
        "NAN_IN_FORWARD",
        "NAN_IN_BACKWARD",
        "ACCUM_NOT_DIVIDED",
        "SATURATED",
        "DEAD_UNITS",
        "CLIP_ALWAYS_ON",
        "LEAK_TO_OTHER_NET",
    ),
)
def _zero_grad_missing(run: Run) -> Iterator[Finding]:
    every = members(run)
    for optimizer in stepping(run):
        own = every.get(optimizer, frozenset())
        row: list[tuple[Window, Pass]] = []
        for window in windows_of(run, optimizer):
            if window.step is None or by_closure(run, window):
                continue
            added = left_over(window, own)
            if added is None or window.borders:
                if len(row) >= 3:
                    break
                row = []
            else:
                row.append((window, added))
        if len(row) >= 3:
            yield _not_cleared(run, optimizer, own, row)
        else:
            yield from _closure_clears_nothing(run, optimizer, own)


def _closure_clears_nothing(run: Run, optimizer: int, own: frozenset[int]) -> Iterator[Finding]:
    """A closure whose backwards add up over the whole run; LBFGS calls it several times in a step."""
    found = [one for one in windows_of(run, optimizer) if one.step is not None]
    facts, first = run.optimizers.get(optimizer), found[0].step if found else None
    if first is None or len(found) < 3 or facts is None or facts.cls != "LBFGS":
        return
    before = max((one.at for one in run.of(Stepped) if one.optimizer != optimizer and one.at < first.at), default=-1)
    backs = [one for window in found for one in window.passes if one.reaches(own) and one.fact.at > before]
    if len(backs) <= len(found) or not all(by_closure(run, one) for one in found):
        return
    clears = [one for one in run.of(Cleared) if one.at > backs[0].fact.at]  # none of an optimizer before it counts
    cleared = any(concerns(run, one, optimizer, members(run)) for one in clears)
    if cleared or any(one.step is not None and one.step.edited for one in found):
        return
    variable, back = optimizer_variable(run, optimizer), backs[1]
    yield Finding(
        message=f"Nothing clears the gradients of {variable} in {counted(len(found), 'step')}: each backward of the "
        f"closure{at_line(*back.spot)} adds to those before.",
        place=place_of(run, own, optimizer=optimizer, file=back.fact.file, line=back.fact.line),
        fix=f"{variable}.zero_grad()  # in the closure, before the backward{at_line(*back.spot)}",
        cause=f"{variable} calls its closure several times in a step, and takes the gradient to be of one call.",
        evidence={"backwards": len(backs), "steps": len(found), "clearings": 0},
        step=found[2].step.number if found[2].step is not None else 0,
        at=back.fact.at,
    )


def _not_cleared(run: Run, optimizer: int, own: frozenset[int], row: list[tuple[Window, Pass]]) -> Finding:
    variable = optimizer_variable(run, optimizer)
    added = row[0][1]
    kept = (added.kept or frozenset()) & own
    reached = (added.touched or frozenset()) & own
    names = names_of(run, kept)
    whole = len(kept) == len(reached)
    text = "the gradients" if whole else f"the gradients of {listed(names)}"
    step = row[2][0].step
    return Finding(
        message=f"{variable}.step() used {text} a second time: no zero_grad() came before the next "
        f"backward{at_line(*added.spot)}, at {counted(len(row), 'step')} in a row.",
        place=place_of(run, kept, optimizer=optimizer, file=added.fact.file, line=added.fact.line),
        fix=f"{variable}.zero_grad()  # before the backward{at_line(*added.spot)}",
        cause="backward() adds to .grad; without clearing, each step uses the sum of all gradients so far.",
        evidence={"kept": len(kept), "of": len(reached), "steps": len(row)},
        step=step.number if step is not None else 0,
        at=added.fact.at,
        severity="" if whole else "warning",
    )


@rule(
    "AB302",
    "ZERO_GRAD_BEFORE_STEP",
    "error",
    explains=(
        "LR_TOO_LOW",
        "LOSS_CONSTANT",
        "STEP_WITHOUT_GRADIENT",
        "CLIP_NO_EFFECT",
        "ZERO_GRAD_PER_MICROBATCH",
        "FROZEN_MOVES",
    ),
)
def _zero_grad_before_step(run: Run) -> Iterator[Finding]:
    for optimizer in stepping(run):
        found = [one for one in windows_of(run, optimizer) if one.step is not None and not by_closure(run, one)]
        found = [one for one in found if one.step is not None and (one.step.zero is not None or not one.step.with_grad)]
        bad = [one for one in found if _cleared_in_vain(one)]
        if len(bad) < 2 or len(bad) * 2 < len(found):
            continue
        window = bad[0]
        clear = [one for one in window.events if isinstance(one, Cleared)][-1]
        step, back = window.step, window.passes[-1].fact
        variable = optimizer_variable(run, optimizer)
        place, fix = _moved(run, variable, clear, step, back)
        yield Finding(
            message=f"The gradients of the backward{at_line(back.file, back.line)} are cleared{_by(clear)} before "
            f"{variable}.step(): {len(bad)} of {counted(len(found), 'step')} that were looked at saw none.",
            place=place,
            fix=fix,
            cause="The step comes after the clearing, so that it has nothing to step along.",
            evidence={"steps": len(found), "in_vain": len(bad)},
            step=step.number if step is not None else 0,
            at=clear.at,
        )


def _moved(run: Run, variable: str, clear: Cleared, step: Stepped | None, back: Backward) -> tuple[Place, str]:
    """Which call is misplaced, and where it belongs: the clearing may stand in front of the backward already."""
    behind = at_line(back.file, back.line)
    same = step is not None and step.file == back.file == clear.file
    if same and step is not None and max(clear.line, step.line) < back.line:
        place = Place(optimizer=variable, file=step.file, line=step.line)
        return place, f"move {variable}.step(){at_line(step.file, step.line)} behind the backward{behind}"
    owner = root_variable(run, clear.number) if clear.by == "module" else variable
    place = Place(optimizer=variable, file=clear.file or back.file, line=clear.line or back.line)
    if same and clear.line < back.line:
        return place, f"let {owner}.zero_grad() run before the backward{behind}, not between it and {variable}.step()"
    return place, f"move {owner}.zero_grad() in front of the backward{behind}"


def _by(clear: Cleared) -> str:
    return at_line(clear.file, clear.line) if clear.file else " by hand" if clear.by == "hand" else ""


def _cleared_in_vain(window: Window) -> bool:
    step = window.step
    clears = [one for one in window.events if isinstance(one, Cleared)]
    if step is not None and step.with_grad and clears and clears[-1].by == "hand":
        return False  # nobody was seen to clear: the backward itself may have given zeros, as a margin that is met does
    return (
        step is not None
        and bool(window.passes)
        and not window.used
        and not step.edited
        and (step.with_grad == 0 or step.zero is True)
    )


@rule(
    "AB303",
    "STEP_MISSING",
    "error",
    explains=("LR_TOO_LOW", "LOSS_CONSTANT", "ZERO_GRAD_PER_MICROBATCH", "PARAM_UNUSED"),
)
def _step_missing(run: Run) -> Iterator[Finding]:
    every = members(run)
    stepped = {one.optimizer for one in run.of(Stepped)} | {one.optimizer for one in run.of(Scaler)}
    covered = frozenset().union(*(every.get(number, frozenset()) for number in stepped))
    for optimizer, own in every.items():
        if optimizer in stepped or not own - covered or own & written(run):
            continue
        found = [one for one in passes(run) if one.touched is not None and one.touched & (own - covered)]
        if len(found) < 20:
            continue
        clears = sum(one.by == "optimizer" and one.number == optimizer for one in run.of(Cleared))
        facts = run.optimizers[optimizer]
        variable = optimizer_variable(run, optimizer)
        back = found[0].fact
        yield Finding(
            message=f"{variable} never steps: {counted(len(found), 'backward')} put gradients on its parameters.",
            place=place_of(run, own, optimizer=optimizer, file=back.file or facts.file, line=back.line or facts.line),
            fix=f"{variable}.step()  # after the backward{at_line(back.file, back.line)}",
            cause=f"{variable}.step() is not called in the loop.",
            evidence={"backwards": len(found), "clearings": clears},
            step=found[19].fact.step,
            at=back.at,
            severity="" if clears or not stepped else "warning",
        )


@rule("AB304", "STEP_WITHOUT_GRADIENT", "error", explains=("LR_TOO_LOW", "LOSS_CONSTANT", "PARAM_UNUSED"))
def _step_without_gradient(run: Run) -> Iterator[Finding]:
    every = members(run)
    if any(one.is_leaf or one.touched is None for one in run.of(Backward)) and not _all_known(run):
        return
    for optimizer in stepping(run):
        own = every.get(optimizer, frozenset())
        steps = [one for one in run.of(Stepped) if one.optimizer == optimizer]
        facts = run.optimizers.get(optimizer)
        if facts is None or not facts.is_torchs or len(steps) < 5 or any(one.with_grad for one in steps):
            continue
        if any(one.reaches(own) for one in passes(run)) or not any(
            number in run.parameters and run.parameters[number].requires_grad for number in own
        ):
            continue
        variable = optimizer_variable(run, optimizer)
        reached = Counter(one.spot for one in passes(run))
        spot = reached.most_common(1)[0][0] if reached else (steps[0].file, steps[0].line)
        yield Finding(
            message=f"{variable} stepped {len(steps)} times and never saw a gradient: "
            + ("no backward was called." if not reached else f"no backward{at_line(*spot)} reaches its parameters."),
            place=place_of(run, own, optimizer=optimizer, file=spot[0], line=spot[1]),
            fix=f"loss.backward()  # before {variable}.step(){at_line(steps[0].file, steps[0].line)}"
            if not reached
            else f"anybatch.why(loss, model)  # shows what the loss reaches, before the backward{at_line(*spot)}",
            cause="A step passes over parameters whose gradient is None.",
            evidence={"steps": len(steps), "backwards": sum(reached.values())},
            step=steps[4].number,
            at=max(steps[0].at, *(one.at for one in run.of(Followed) if one.why == "no gradient"), 0),
        )


def _all_known(run: Run) -> bool:
    return all(one.touched is not None for one in passes(run))
