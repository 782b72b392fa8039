"""Rules of the family amp: clipping that comes too early, too late or to nothing."""

import math
from collections.abc import Iterator

from anybatch.doctor.rules.courses import course
from anybatch.doctor.rules.measures import ratio
from anybatch.doctor.rules.naming import at_line, counted, optimizer_variable, root_variable
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import members, passes, stepping
from anybatch.records.events import Backward, Clipped, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run
from anybatch.records.samples import Norms

_TOO_SHORT = 1e-5
"""An update ratio at which a hundred thousand steps are needed to change the weights; 0.001 is usual."""

_SHORT = 1e-4
"""The same for an optimizer whose step is as long as the gradient that is left, if all steps together reach nowhere."""

_NOWHERE = 0.05
"""Of their length the weights cannot have moved more than this, had all steps gone in one direction."""

_SCALED = ("sgd", "asgd")
"""Optimizers without a division by the length of the gradient; others undo what clipping does."""


def _clips(run: Run) -> list[Clipped]:
    """The calls that were to clip; a limit of infinity only measures the norm."""
    return [one for one in run.of(Clipped) if math.isfinite(one.limit)]


def _call(one: Clipped) -> str:
    return f"clip_grad_{one.by}_"


def _place(run: Run, one: Clipped) -> Place:
    variable = optimizer_variable(run, one.optimizers[0]) if one.optimizers else ""
    return Place(optimizer=variable, file=one.file, line=one.line)


@rule("AB401", "CLIP_BEFORE_UNSCALE", "error", explains=("LR_TOO_LOW", "CLIP_ALWAYS_ON", "UPDATE_LOST_PRECISION"))
def _clip_before_unscale(run: Run) -> Iterator[Finding]:
    found = [one for one in _clips(run) if one.scaled and one.scale > 1.0 and one.limit < 0.05 * one.scale]
    if len(found) < min(2, len(_clips(run))) or not found:
        return
    first = found[0]
    variable = optimizer_variable(run, first.optimizers[0]) if first.optimizers else "optimizer"
    norm = "" if first.norm is None else f" of {first.norm:.4g}"
    yield Finding(
        message=f"{_call(first)}{at_line(first.file, first.line)} clips gradients{norm} that are still multiplied by "
        f"{first.scale:g}: the limit of {first.limit:g} is one of {first.limit / first.scale:.2g}.",
        place=_place(run, first),
        fix=f"scaler.unscale_({variable})  # before {_call(first)}{at_line(first.file, first.line)}",
        cause="Unscaling comes after the clipping and divides the clipped gradients by the scale.",
        evidence={"limit": first.limit, "scale": first.scale, "norm": first.norm, "times": len(found)},
        step=found[min(1, len(found) - 1)].step,
        at=first.at,
    )


@rule("AB402", "CLIP_NO_EFFECT", "error", explains=("EXPLODING",))
def _clip_no_effect(run: Run) -> Iterator[Finding]:
    late, empty, useful = _sorted_clips(run)
    foreign = [
        one for one in _clips(run) if one.tensors and not one.optimizers and any(run.of(Stepped)) and run.optimizers
    ]
    for found, what, fix in (
        (late, "comes after the step that it should have protected", "move it between the backward and the step"),
        (empty, "is given parameters without any gradient", "call it after the backward, with all parameters"),
        (foreign, "is given parameters that no optimizer has", "give it the parameters of the optimizer"),
    ):
        spots = {(one.file, one.line) for one in found}
        for spot in sorted(spots):
            here = [one for one in found if (one.file, one.line) == spot]
            right = [one for one in useful if (one.file, one.line) == spot]
            if len(here) < 3 or len(right) * 10 > len(here) or _made_up_for(run, here, useful):
                continue
            first = here[0]
            yield Finding(
                message=f"{_call(first)}{at_line(*spot)} {what}: {counted(len(here), 'call')} without effect.",
                place=_place(run, first),
                fix=f"torch.nn.utils.{_call(first)}({_trained(run)}, {first.limit:g})  # {fix}",
                cause="Only gradients that are there, and that a later step uses, can be clipped.",
                evidence={"calls": len(here), "useful": len(right), "limit": first.limit},
                step=here[2].step,
                at=first.at,
                severity="warning" if found is foreign else "",
            )
            return


def _trained(run: Run) -> str:
    """Code for the parameters that are stepped."""
    stepped = stepping(run)
    own = frozenset().union(*(members(run).get(number, frozenset()) for number in stepped))
    roots = {run.parameters[one].root for one in own if one in run.parameters}
    if len(stepped) == 1 and len(roots) > 1:
        return f"[p for group in {optimizer_variable(run, stepped[0])}.param_groups for p in group['params']]"
    return f"{root_variable(run, min(roots, default=-1))}.parameters()"


def _sorted_clips(run: Run) -> tuple[list[Clipped], list[Clipped], list[Clipped]]:
    """Calls after the step, calls on nothing, and useful calls."""
    every = members(run)
    by_event = {id(one.fact): one for one in passes(run)}
    fresh: dict[int, bool] = dict.fromkeys(stepping(run), False)
    begun: set[int] = set()
    late: list[Clipped] = []
    empty: list[Clipped] = []
    useful: list[Clipped] = []
    for one in run.facts:
        if isinstance(one, Backward) and id(one) in by_event:
            for number in fresh:
                fresh[number] |= by_event[id(one)].reaches(every.get(number, frozenset()))
        elif isinstance(one, Stepped):
            fresh[one.optimizer] = False
            begun.add(one.optimizer)
        elif isinstance(one, Clipped) and math.isfinite(one.limit):
            own = [number for number in one.optimizers if number in fresh]
            if not one.tensors or (one.norm == 0.0 and not any(fresh[number] for number in own)):
                empty.append(one)
            elif own and all(not fresh[number] and number in begun for number in own):
                late.append(one)
            elif own:
                useful.append(one)
    return late, empty, useful


def _made_up_for(run: Run, bad: list[Clipped], useful: list[Clipped]) -> bool:
    """Whether most of the steps had a useful call as well."""
    steps = {one.step for one in useful}
    return sum(one.step in steps or one.step - 1 in steps for one in bad) * 2 > len(bad)


@rule("AB403", "CLIP_ALWAYS_ON", "info", explains=("LR_TOO_LOW", "LOSS_CONSTANT", "UPDATE_LOST_PRECISION"))
def _clip_always_on(run: Run) -> Iterator[Finding]:
    found = [one for one in _clips(run) if one.by == "norm" and one.norm is not None and one.tensors and not one.scaled]
    hard = [one for one in found if one.limit > 0 and (one.norm or 0.0) > 100.0 * one.limit]
    if len(found) < 20 or len(hard) * 100 <= 95 * len(found):
        return
    first = hard[0]
    norms = sorted(one.norm or 0.0 for one in hard)
    middle = norms[len(norms) // 2]
    longest = _longest_step(run, first)
    rest = "" if longest is None else (
        f" The steps that are left change the weights by {longest:.2g} of their length at most (0.001 is usual), and "
        "the loss does not fall."
    )  # fmt: skip
    yield Finding(
        message=f"{_call(first)}{at_line(first.file, first.line)} shortens {len(hard)} of {len(found)} gradients to "
        f"less than a hundredth: their norm is {middle:.4g}, the limit {first.limit:g}.{rest}",
        place=_place(run, first),
        fix=f"{_call(first)}(..., max_norm={float(f'{middle:.1g}'):g})  # or average the loss instead of adding it up",
        cause="The limit is far below the usual norm of the gradient.",
        evidence={"median_norm": middle, "limit": first.limit, "calls": len(found), "clipped": len(hard)}
        | ({} if longest is None else {"update_ratio": longest}),
        step=hard[-1].step,
        at=first.at,
        severity="" if longest is None else "warning",
    )


def _longest_step(run: Run, clip: Clipped) -> float | None:
    """The longest step, as a share of the weights, where all are far too short and the loss does not fall."""
    for optimizer in clip.optimizers:
        losses = course(run, optimizer)
        ratios = [ratio(run, norms) for norms in run.of(Norms) if norms.optimizer == optimizer]
        known = [value for value in ratios if value is not None]
        still = losses.finite and not (losses.fell or losses.converged or losses.diverged)
        if not still or len(known) < 5 or max(known) <= 0:
            continue
        steps = sum(one.optimizer == optimizer for one in run.of(Stepped))
        facts = run.optimizers.get(optimizer)
        is_scaled = facts is not None and facts.cls.lower() in _SCALED
        reach = is_scaled and max(known) < _SHORT and max(known) * steps < _NOWHERE
        if max(known) < _TOO_SHORT or reach:
            return max(known)
    return None
