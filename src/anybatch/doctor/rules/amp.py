"""Rules of the family amp: clipping that comes too early, too late or to nothing, and gradients that stay scaled."""

import math
from collections.abc import Iterator
from statistics import median_high

from anybatch.doctor.rules.registry import NOWHERE, RUNS_AWAY, STANDS_STILL, Found, Limit, rule
from anybatch.doctor.views.measures import entries, ratio
from anybatch.doctor.views.naming import counted, names_of, near, root_variable
from anybatch.doctor.views.optimizing import OptimizerView, optimizers
from anybatch.doctor.views.outcomes import outcome
from anybatch.doctor.views.windows import by_event, members, passes, stepping
from anybatch.records.events import Backward, Clipped, Scaler, Stepped
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, Norms


def _clips(run: Run) -> list[Clipped]:
    """The calls that were to clip; a limit of infinity only measures the norm."""
    return [one for one in run.of(Clipped) if math.isfinite(one.limit)]


def _call(one: Clipped) -> str:
    return f"clip_grad_{one.by}_"


def _first(one: Clipped) -> int:
    return one.optimizers[0] if one.optimizers else -1


@rule(
    "AB401", "CLIP_BEFORE_UNSCALE", "error", needs=(Clipped,),
    explains=(*STANDS_STILL, "CLIP_ALWAYS_ON", "UPDATE_LOST_PRECISION"),
)  # fmt: skip
def clip_before_unscale(
    run: Run, *, share: float = Limit(0.05, "of the scale: a limit above was made for scaled gradients")
) -> Iterator[Found]:
    """Clipping of gradients that are still scaled."""
    found = [one for one in _clips(run) if one.scaled and one.scale > 1.0 and one.limit < share * one.scale]
    if not found or len(found) < min(2, len(_clips(run))):
        return
    first = found[0]
    norm = "" if first.norm is None else f" of {first.norm:.4g}"
    yield Found(
        text=f"{_call(first)}{near(first)} clips gradients{norm} that are still multiplied by {first.scale:g}: the "
        f"limit of {first.limit:g} is one of {first.limit / first.scale:.2g}.",
        fix=f"scaler.unscale_({OptimizerView(run, _first(first))})  # before {_call(first)}{near(first)}",
        cause="Unscaling comes after the clipping and divides the clipped gradients by the scale.",
        since=first,
        step=found[min(1, len(found) - 1)],
        optimizer=_first(first),
        evidence={"limit": first.limit, "scale": first.scale, "norm": first.norm, "times": len(found)},
    )


@rule("AB402", "CLIP_NO_EFFECT", "error", explains=RUNS_AWAY, needs=(Clipped,), slows=True)
def clip_no_effect(run: Run, *, calls: float = Limit(3, "one may be at the start or the end")) -> Iterator[Found]:
    """Clipping after the step, or of nothing."""
    late, empty, useful = _sorted_clips(run)
    foreign = [
        one for one in _clips(run) if one.tensors and not one.optimizers and any(run.of(Stepped)) and run.optimizers
    ]
    for found, what, fix in (
        (late, "comes after the step that it should have limited", "move it between the backward and the step"),
        (empty, "gets parameters without any gradient", "call it after the backward, with all parameters"),
        (foreign, "gets parameters that no optimizer has", "pass the parameters of the optimizer"),
    ):
        for spot in sorted({(one.file, one.line) for one in found}):
            here, right = ([one for one in every if (one.file, one.line) == spot] for every in (found, useful))
            if len(here) < calls or len(right) * 10 > len(here) or _made_up_for(here, useful):
                continue
            steps = [step for one in optimizers(run) for step in one.steps]
            if found is empty and (not passes(run) or (steps and not any(step.with_grad for step in steps))):
                continue  # there is nothing to clip for a graver reason
            yield Found(
                text=f"{_call(here[0])}{near(here[0])} {what}: {counted(len(here), 'call')} without effect.",
                fix=f"torch.nn.utils.{_call(here[0])}({_trained(run)}, {here[0].limit:g})  # {fix}",
                cause="Only existing gradients that a later step uses can be clipped.",
                since=here[0] if right else 0,  # what was never clipped was free to explode from the first step on
                where=(here[0].file, here[0].line),
                step=here[min(2, len(here) - 1)],
                optimizer=_first(here[0]),
                evidence={"calls": len(here), "useful": len(right), "limit": here[0].limit},
                severity="warning" if found is foreign else "",
            )
            return


def _trained(run: Run) -> str:
    """Code for the parameters that are stepped."""
    stepped = stepping(run)
    own = frozenset().union(*(members(run).get(number, frozenset()) for number in stepped))
    roots = {run.parameters[one].root for one in own if one in run.parameters}
    if len(stepped) == 1 and len(roots) > 1:
        return f"[p for group in {OptimizerView(run, stepped[0])}.param_groups for p in group['params']]"
    return f"{root_variable(run, min(roots, default=-1))}.parameters()"


def _sorted_clips(run: Run) -> tuple[list[Clipped], list[Clipped], list[Clipped]]:
    """Calls after the step, calls on nothing, and useful calls."""
    passed = by_event(run)
    fresh: dict[int, bool] = dict.fromkeys(stepping(run), False)
    begun: set[int] = set()
    late: list[Clipped] = []
    empty: list[Clipped] = []
    useful: list[Clipped] = []
    for one in run.facts:
        if isinstance(one, Backward) and id(one) in passed:
            for number in fresh:
                fresh[number] |= passed[id(one)].reaches(members(run).get(number, frozenset()))
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


def _made_up_for(bad: list[Clipped], useful: list[Clipped]) -> bool:
    """Whether most of the steps had a useful call as well."""
    steps = {one.step for one in useful}
    return sum(one.step in steps or one.step - 1 in steps for one in bad) * 2 > len(bad)


@rule(
    "AB403", "CLIP_ALWAYS_ON", "info", needs=(Clipped,),
    explains=("LR_TOO_LOW", "LOSS_CONSTANT", "UPDATE_LOST_PRECISION", "DECAY_DOMINATES"),
)  # fmt: skip
def clip_always_on(
    run: Run, *, calls: float = Limit(20, "the first gradients of a run are long"),
    times: float = Limit(100, "the limit, which then takes all but a hundredth"),
    share: float = Limit(0.95, "of the calls: a clip for outliers is rare"),
) -> Iterator[Found]:  # fmt: skip
    """Limits that are far below the usual norm."""
    found = [
        (one, one.norm) for one in _clips(run)
        if one.by == "norm" and one.norm is not None and one.tensors and not one.scaled
    ]  # fmt: skip
    hard = [(one, norm) for one, norm in found if one.limit > 0 and norm > times * one.limit]
    if len(found) < calls or len(hard) <= share * len(found):
        return
    first, middle = hard[0][0], median_high(norm for _, norm in hard)
    rest, harm = _harm(run, first)
    yield Found(
        text=f"{_call(first)}{near(first)} shortens {len(hard)} of {len(found)} gradients to less than a hundredth: "
        f"their norm is {middle:.4g}, the limit {first.limit:g}.{rest}",
        fix=f"{_call(first)}(..., max_norm={float(f'{middle:.1g}'):g})  # or average the loss instead of adding it up",
        cause="The limit is far below the usual norm of the gradient.",
        since=first,
        step=hard[-1][0],
        optimizer=_first(first),
        evidence={"median_norm": middle, "limit": first.limit, "calls": len(found), "clipped": len(hard)} | harm,
        severity="warning" if harm else "",
    )


_TOO_SHORT = 1e-5
"""An update ratio at which a hundred thousand steps are needed to change the weights; 0.001 is usual."""

_SHORT, _NOWHERE = 1e-4, 0.05
"""The same for SGD, whose step is as long as the gradient that is left, if all steps together reach nowhere."""


def _harm(run: Run, clip: Clipped) -> tuple[str, dict[str, float]]:
    """How a loss that does not fall comes of what is left: steps are far too short, or the decay outweighs it."""
    for one in (OptimizerView(run, number) for number in clip.optimizers):
        known = [value for norms in one.samples if (value := ratio(run, norms)) is not None]
        if len(known) < 5 or max(known) <= 0:
            continue
        is_scaled = one.facts.cls.lower() in ("sgd", "asgd")  # others undo what clipping does
        least = _SHORT if is_scaled and max(known) * len(one.steps) < _NOWHERE else _TOO_SHORT
        if one.losses.stands and max(known) < least:
            rest = f" The steps that are left change the weights by {max(known):.2g} of their length at most (0.001 is "
            return f"{rest}usual), and the loss does not fall.", {"update_ratio": max(known)}
        decay = max((group.weight_decay for _, group in one.groups.values()), default=0.0)
        times = decay * math.hypot(*(each.weight for each in entries(run, one.samples[-1]))) / clip.limit
        is_apart = one.facts.cls.lower() not in ("sgd", "adam", "rmsprop", "adagrad")  # others may decay apart
        if times > 1 and not is_apart and not one.losses.converged and outcome(run).word != "learning":
            rest = (
                f" The weight decay of {one} is {times:.2g} times as long as what is left, and the loss does not fall."
            )
            return rest, {"decay_over_gradient": times}
    return "", {}


@rule("AB404", "GRAD_UNDERFLOW", "warning", explains=STANDS_STILL, needs=(Norms,))
def grad_underflow(
    run: Run, *, zeros: float = Limit(0.5, "of the entries of a gradient"), samples: float = Limit(3, "by chance")
) -> Iterator[Found]:
    """Gradients in float16 that are mostly zero."""
    half = {number for number, one in run.parameters.items() if one.dtype == "float16"}
    autocast = any(sample.dtype == "float16" for one in run.of(Activations) for sample in one.modules)
    scaled = any(one.scaled for one in run.of(Backward)) or any(True for _ in run.of(Scaler))
    if scaled or not (half or autocast):
        return
    matrices = {
        number for number, one in run.parameters.items()
        if len(one.shape) >= 2 and one.role != "embedding" and (autocast or number in half)
    }  # fmt: skip
    seen: list[tuple[Norms, list[int], int]] = []
    for sample in run.of(Norms):
        entries = zip(sample.parameters, sample.grad_zeros, sample.grad, strict=False)
        known = [(n, zero) for n, zero, grad in entries if None not in (zero, grad) and n in matrices]
        lost = [number for number, zero in known if (zero or 0.0) > zeros]
        if known and len(lost) * 2 > len(known):
            seen.append((sample, lost, len(known)))
    if len(seen) < samples:
        return
    sample, lost, total = seen[0]
    yield Found(
        text=f"In {len(lost)} of {total} weight matrices ({names_of(run, lost)}) more than half of the gradient is "
        "exactly zero: float16 without a scaled loss.",
        fix=f"scaler.scale(loss).backward(); scaler.step({OptimizerView(run, sample.optimizer)}); scaler.update()"
        "  # or torch.bfloat16",
        cause="float16 has no numbers below 6e-8, so small gradients become zero.",
        since=sample,
        where=NOWHERE,
        step=seen[min(2, len(seen) - 1)][0].number,
        parameters=lost,
        optimizer=sample.optimizer,
        evidence={"matrices": len(lost), "of": total, "samples": len(seen)},
    )


@rule(
    "AB405", "STEP_NOT_UNSCALED", "error",
    explains=("LR_TOO_HIGH", "EXPLODING", "NAN_IN_FORWARD", "CLIP_ALWAYS_ON", "CLIP_BEFORE_UNSCALE"),
)  # fmt: skip
def step_not_unscaled(run: Run) -> Iterator[Found]:
    """Steps on gradients that are still scaled."""
    unscaled = {one.optimizer for one in run.of(Scaler) if one.call in ("unscale_", "step")}
    for one in optimizers(run):
        found = [(window, window.step) for window in one.windows if window.step is not None and window.used]
        bad = [
            step for window, step in found
            if step.by == "step" and not step.edited and all(back.fact.scaled for back in window.used)
        ]  # fmt: skip
        if one.number in unscaled or len(bad) < 2 or len(bad) * 2 < len(found):
            continue
        yield Found(
            text=f"{one}.step(){near(bad[0])} uses gradients of a scaled loss that nothing has unscaled, at "
            f"{counted(len(bad), 'step')}.",
            fix=f"scaler.step({one}); scaler.update()  # instead of {one}.step()",
            cause="scaler.scale(loss) multiplies all gradients; only scaler.step or scaler.unscale_ divides them.",
            since=bad[0],
            step=bad[0].number,
            optimizer=one.number,
            evidence={"steps": len(bad), "of": len(found)},
        )


@rule("AB406", "SCALER_NOT_UPDATED", "warning", explains=("STEP_TWICE_SCALER",), needs=(Scaler,))
def scaler_not_updated(run: Run) -> Iterator[Found]:
    """Scalers that step and never update."""
    if any(one.call == "update" for one in run.of(Scaler)):
        return
    calls = [one for one in run.of(Scaler) if one.call == "step"]
    for number in sorted({one.optimizer for one in calls}):
        own, variable = [one for one in calls if one.optimizer == number], OptimizerView(run, number)
        if len(own) >= 2:
            yield Found(
                text=f"scaler.step({variable}){near(own[0])} was called {len(own)} times and scaler.update() never: "
                "the scale stays as it is.",
                fix=f"scaler.update()  # after scaler.step({variable}){near(own[0])}",
                cause="Only update() makes the scale smaller after an overflow and larger after many steps without "
                "one.",
                since=own[0],
                step=own[1],
                optimizer=number,
                evidence={"steps": len(own), "scale": own[-1].scale},
            )
