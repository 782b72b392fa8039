"""Rules on the value of a loss, and on what became of it; most codes are of the family loss."""

import itertools
import math
from collections.abc import Iterator

from anybatch.doctor.rules.answered import say
from anybatch.doctor.rules.registry import Found, Limit, rule
from anybatch.doctor.views.courses import adversarial, course
from anybatch.doctor.views.measures import gradients, latest, outputs
from anybatch.doctor.views.naming import by_line, first_call, near, root_variable
from anybatch.doctor.views.optimizing import measured
from anybatch.doctor.views.outcomes import outcome
from anybatch.doctor.views.windows import calls_of, walked
from anybatch.records.events import Backward, Stepped
from anybatch.records.lossfacts import LossCall, Walk
from anybatch.records.runs import Run
from anybatch.records.samples import Norms

_NEVER_NEGATIVE = {
    "cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss",
    "smooth_l1_loss", "huber_loss", "hinge_embedding_loss", "triplet_margin_loss", "soft_margin_loss",
    "ctc_loss",
}  # fmt: skip
_OF_CLASSES = {"cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"}
_LEAST_DIVERGENCE = -0.05  # of a row: rounding, of log-probabilities in bfloat16 too, is nearer to 0
_OF_LOGARITHMS = {
    "kl_div": "F.kl_div(scores.log_softmax(-1), target, reduction='batchmean')",
    "nll_loss": "F.nll_loss(F.log_softmax(scores, dim=1), y)",
    "ctc_loss": "F.ctc_loss(F.log_softmax(scores, dim=2), targets, input_lengths, target_lengths)",
}


def _backwards(run: Run) -> list[tuple[Backward, float]]:
    """The backwards of losses whose value is known."""
    return [(one, one.value) for one in run.of(Backward) if one.function == "backward" and one.value is not None]


@rule(
    "AB605", "LOSS_CONSTANT", "warning",
    explains=("VANISHING", "LR_TOO_LOW", "INPUT_IGNORED", "SATURATED", "CANNOT_FIT_BATCH"),
)  # fmt: skip
def loss_constant(run: Run, *, steps: float = Limit(10, "fewer may be a warm-up")) -> Iterator[Found]:
    """Losses that can't change."""
    narrow = by_line(run, lambda one: one.function in ("cross_entropy", "nll_loss") and one.classes == 1)
    for calls in list(narrow.values())[:1]:
        yield Found(
            text=f"{calls[0].function} gets one class only (predictions of shape {calls[0].input_shape}): its value is "
            "always 0.",
            fix="F.binary_cross_entropy_with_logits(scores.squeeze(-1), y.float()), or as many outputs as classes",
            cause="A softmax over one class is 1, whatever the model computes.",
            since=calls[0],
            evidence={"input_shape": list(calls[0].input_shape)},
            severity="error",
        )
        return
    found = list(_softmax_of_one(run))
    yield from found or _same_value(run, steps)


def _softmax_of_one(run: Run) -> Iterator[Found]:
    narrow = [walk for walk in run.of(Walk) if any(size == 1 and dim > 0 for dim, _, size, _ in walk.softmaxes)]
    for root, samples in latest(run) if narrow else ():
        last = [one for _, one in outputs(samples)]
        is_one = all(one.shape[-1:] == (1,) and one.std == 0 and one.mean in (0.0, 1.0) for one in last)
        if len(last) >= 2 and is_one:
            softmax = [sample.module for sample in samples[0].modules if "Softmax" in sample.cls]
            yield Found(
                text=f"{root_variable(run, root)} ends in a softmax over one unit: its output is {last[0].mean:g} for "
                "every input.",
                fix="torch.sigmoid for one unit, or F.binary_cross_entropy_with_logits of the raw score",
                cause="A softmax over one unit is 1, whatever the model computes, and its gradient is 0.",
                since=narrow[0],
                where=first_call(run, root),
                module=(root, softmax[-1] if softmax else ""),
                evidence={"mean": last[0].mean, "std": 0.0, "samples": len(last)},
                severity="error",
            )


def _same_value(run: Run, least: float) -> Iterator[Found]:
    if adversarial(run) or any(not any(one.lrs) for one in run.of(Stepped) if one.lrs):
        return
    lines: dict[tuple[str, int], list[tuple[int, Backward]]] = {}
    stepped = 0  # of all optimizers: a second one, made for a second part of the run, counts its own from 0
    for one in run.of(Backward, Stepped):
        if isinstance(one, Stepped):
            stepped += 1
        elif isinstance(one, Backward) and one.value is not None and one.function == "backward":
            lines.setdefault((one.file, one.line), []).append((stepped, one))
    for found in lines.values():
        backs, steps = [one for _, one in found], len({count for count, _ in found})
        value = backs[0].value or 0.0
        if steps >= least and len({one.value for one in backs}) == 1 and value and math.isfinite(value):
            yield Found(
                text=f"The loss is exactly {value:.6g} in all {steps} steps.",
                fix="print(anybatch.why(loss, model))  # which parameters the loss reaches",
                cause="It does not depend on the parameters, or no parameter changes.",
                since=backs[-1],
                step=backs[min(9, len(backs) - 1)],
                evidence={"value": value, "steps": steps},
            )


@rule(
    "AB606", "LOSS_SIGN", "warning",
    explains=("EXPLODING", "LR_TOO_HIGH", "NAN_IN_FORWARD", "SATURATED", "DEAD_UNITS", "CANNOT_FIT_BATCH",
              "INPUT_IGNORED", "LABELS_UNRELATED", "NOT_LEARNING"),
)  # fmt: skip
def loss_sign(
    run: Run, *, faster: float = Limit(100, "times its first value, for one that falls faster and faster"),
    absurd: float = Limit(1e9, "times its first value, to which no loss that means something falls"),
) -> Iterator[Found]:  # fmt: skip
    """Losses below their bound, and losses that are maximised."""
    below = list(_negative(run))
    yield from below
    yield from say(run, "AB606")
    if not below and not adversarial(run):
        yield from _turned(run)
        yield from _unbounded(run, faster, absurd)


_SCALED = "targets of 0 and 1: y / 255 for masks of 0 and 255, y / 100 for percentages, (y > 0).float() for counts"
_SIGNED = "targets of 0 and 1: y = (y + 1) / 2 for labels of -1 and 1"


def _negative(run: Run) -> Iterator[Found]:
    for below in _below(run):
        looked = next((one for one in reversed(below) if one.normalised is not None), below[-1])
        if not _is_wrong(run, looked, below):
            continue
        call, given = below[0], ""
        if call.function == "kl_div":
            given = f": {_instead_of_logarithms(below)}"
        elif call.function in _OF_LOGARITHMS:
            given = f": it gets {'probabilities' if looked.normalised else 'raw scores'} instead of log-probabilities"
        elif call.function.startswith("binary"):
            given = ": it gets targets outside 0 and 1"
        yield Found(
            text=f"{call.function} is negative ({call.value:.4g}), which it can't be{given}.",
            fix=_OF_LOGARITHMS.get(call.function, _SCALED if (call.target_mean or 0.0) > 1 else _SIGNED),
            cause="Below its bound the loss rewards what it should punish.",
            since=call,
            step=below[1],
            evidence={"value": call.value, "calls": len(below), "target_mean": call.target_mean},
        )


def out_of_bound(run: Run) -> frozenset[str]:
    """The loss functions that give less than they can."""
    return frozenset(below[0].function for below in _below(run))


def _below(run: Run) -> Iterator[list[LossCall]]:
    """The calls of each line that give less than their loss function can, where they are two at least."""
    for calls in by_line(run, lambda one: one.function == "kl_div" or one.function in _NEVER_NEGATIVE).values():
        least = -0.1 if calls[0].function == "ctc_loss" else -1e-4  # which sums up many roundings
        below = [one for one in calls if one.value is not None and one.value < least]
        below = [  # by more than by its weights
            one for one in below
            if not one.weighted or one.function in ("nll_loss", "kl_div") or (one.target_mean or 0.0) > 1
        ]  # fmt: skip
        if calls[0].function == "kl_div":
            known = [one.target_normalised for one in calls if one.target_normalised is not None]
            below = [one for one in below if all(known) and known and _of_a_row(one) < _LEAST_DIVERGENCE]
        if len(below) >= 2:
            yield below


def _of_a_row(call: LossCall) -> float:
    """The divergence of one row, on average."""
    shape = call.input_shape or (1,)
    times = {"sum": 1, "batchmean": shape[0]}.get(call.reduction, math.prod(shape))
    return (call.value or 0.0) * times / max(math.prod(shape[:-1]), 1)


def _instead_of_logarithms(calls: list[LossCall]) -> str:
    """What a divergence is given in place of log-probabilities."""
    looked = [one for one in calls if one.low is not None and one.high is not None]
    if looked and all((one.low or 0.0) >= 0 and (one.high or 0.0) <= 1.001 for one in looked):
        return "it gets probabilities instead of log-probabilities"
    if any((one.high or 0.0) > 1e-3 for one in looked):
        return "it gets raw scores instead of log-probabilities"
    return "exp() of what it gets sums to more than 1 over the classes of the targets, which sum to 1"


def _is_wrong(run: Run, call: LossCall, below: list[LossCall]) -> bool:
    """Whether what was given explains it; densities and soft targets are left alone."""
    if call.function == "nll_loss":
        last = below[-1].at
        walks = [walk for walk, back in walked(run).values() if back.loss_calls and back.loss_calls[0] <= last]
        kinds = {kind for walk in walks or run.of(Walk) for kind in walk.kinds if not kind.startswith("Expand")}
        raw = bool(kinds) and not any("Log" in kind or "Exp" in kind for kind in kinds)  # densities have one of them
        return bool(call.normalised) or (raw and call.normalised is False and not call.log_normalised)
    if call.function == "ctc_loss":
        return not call.log_normalised
    return call.function.startswith("binary") or call.function not in _OF_CLASSES


def _turned(run: Run) -> Iterator[Found]:
    """Backwards of minus a loss function, which then grows."""
    turned: list[tuple[Backward, float, LossCall, float]] = []
    for one, value in _backwards(run):
        mine = [call for call in calls_of(run, one) if call.value is not None]
        if len(mine) != 1 or len(one.loss_calls) != 1 or mine[0].function not in _NEVER_NEGATIVE:
            continue
        loss = mine[0].value or 0.0
        if loss <= 1e-6 or abs(value / one.factor) < 1e-6:
            continue
        if not math.isclose(-loss * abs(one.factor), value, rel_tol=1e-3):
            return
        turned.append((one, value, mine[0], loss))
    if len(turned) < 3 or turned[-1][3] <= turned[0][3] or len({(b.file, b.line) for b, _ in _backwards(run)}) > 1:
        return
    back, value, call, loss = turned[0]
    yield Found(
        text=f"backward is called on minus {call.function}: the loss is {value:.4g}, and {call.function} grows from "
        f"{loss:.4g} to {turned[-1][3]:.4g}.",
        fix="loss.backward() without the minus",
        cause="The optimizer minimises, so a negated loss makes the model worse at every step.",
        since=back,
        step=turned[2][0],
        evidence={"value": value, "loss_first": loss, "loss_last": turned[-1][3]},
        severity="error",
    )


def _unbounded(run: Run, faster: float, absurd: float) -> Iterator[Found]:
    """A loss that falls without end, since a term of it that should be small is made as large as it can be."""
    went = course(run)
    values = went.finite
    if len(values) < 20 or went.diverged:
        return
    sums = [0.0, *itertools.accumulate(values)]
    deep, count, speeds_up = -max(1.0, abs(went.first)), len(values), False
    first, *_, last = _quarters(sums, count)
    while count >= 20 and not speeds_up and went.first >= -1:  # until it met a bound, as that of saturated units
        means = _quarters(sums, count)
        falls = [before - after for before, after in itertools.pairwise(means)]
        speeds_up = 0 < falls[0] < falls[1] < falls[2] and max(means[-1], last) <= faster * deep
        count = count * 9 // 10
    if not speeds_up and last > min(absurd * deep, first):
        return
    yield Found(
        text=f"The loss goes from {went.first:.4g} to {last:.4g}{', and falls faster and faster' * speeds_up}: nothing "
        "bounds it from below.",
        fix="print each term of the loss, and flip the sign of the one that falls; "
        "kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean(); or bound it, such as by .clamp(min=0)",
        cause="A term that should become small has the wrong sign or no bound, so it is made as large as possible.",
        since=next(one for one in run.of(Backward) if one.at == went.ats[0]),
        step=went.steps[len(values) // 2],
        evidence={"loss_first": went.first, "loss_last": last},
    )


def _quarters(sums: list[float], count: int) -> list[float]:
    """The means of the quarters of the first so many values, of which the sums from the first one on are known."""
    size = count // 4
    return [(sums[(part + 1) * size] - sums[part * size]) / size for part in range(4)]


@rule(
    "AB607", "LOSS_ALL_IGNORED", "error", needs=(LossCall,),
    explains=("NAN_IN_FORWARD", "NAN_IN_BACKWARD", "LOSS_CONSTANT", "LR_TOO_HIGH", "EXPLODING"),
)  # fmt: skip
def loss_all_ignored(run: Run) -> Iterator[Found]:
    """Calls in which every target is ignored."""
    for calls in by_line(run, lambda one: one.reduction == "mean" and one.items == 0 and one.ignored > 0).values():
        call = calls[0]
        if call.value is None or not math.isfinite(call.value):
            yield Found(
                text=f"All {call.ignored} targets of {call.function} are ignore_index ({call.ignore_index}) at step "
                f"{call.step}: the mean over none of them is nan.",
                fix=f"F.{call.function}(scores, y, reduction='sum') / (y != {call.ignore_index}).sum().clamp_min(1)",
                cause="0 / 0 is nan, which the backward carries into every weight.",
                since=call,
                evidence={"ignored": call.ignored, "calls": len(calls), "step": call.step},
            )


@rule("AB609", "NOT_LEARNING", "error")
def not_learning(
    run: Run, *, rises: float = Limit(1.05, "times the rate a quarter before: then it warms up")
) -> Iterator[Found]:
    """A loss at the level of a constant guess, or the same with the targets of other rows."""
    found, end = outcome(run), run.facts[-1].at if run.facts else 0  # what became of it, after all that may be why
    rates = [max(one.lrs) for one in run.of(Stepped) if one.lrs]
    quarter = len(rates) // 4
    warms_up = quarter > 0 and rates[-1] > rises * rates[-quarter - 1] and rates[-1] >= 0.99 * max(rates)
    if found.word != "not learning" or warms_up:
        return
    if found.unrelated is not None:
        seen, asked = found.unrelated.evidence, found.unrelated
        moved = "the targets" if asked.probe == "related" else "one of the inputs"
        yield Found(
            text=f"It did not learn: after {found.steps} steps the loss on a batch is {seen['loss']:.4g}, and with "
            f"{moved} of other rows {seen['others']:.4g}: the predictions have nothing to do with the rows.",
            fix=_LOOK.format("target"),
            cause="Inputs or targets are all alike, belong to other rows, or do not reach the loss.",
            since=end,
            where=(asked.file, asked.line),
            evidence=seen,
        )
    if found.call is not None:
        yield Found(
            text=f"It did not learn: {found.call.function} ends at {found.last:.4g} after {found.steps} steps, and "
            f"the best constant guess gives {found.guess:.4g}.",
            fix=_LOOK.format("label"),
            cause="Nothing that was learned depends on the input.",
            since=end,
            step=found.call,
            where=(found.call.file, found.call.line),
            evidence={"loss_last": found.last, "constant_guess": found.guess, "steps": found.steps},
        )


_LOOK = (
    "look at some pairs of input and {} as the loop gets them, and try whether the model can memorise 10 of them "
    "(anybatch doctor --active)"
)


@rule(
    "AB561", "GRADIENTS_ZERO", "error", needs=(Norms,),
    explains=("LOSS_CONSTANT", "LR_TOO_LOW", "NOT_LEARNING", "VANISHING", "DEAD_UNITS"),
)  # fmt: skip
def gradients_zero(
    run: Run, *, samples: float = Limit(3, "in the second half of the run"), steps: float = Limit(20, "of it")
) -> Iterator[Found]:
    """Optimizers all of whose gradients are zero."""
    for one in measured(run):
        every = [[grad for n, grad in gradients(norms).items() if n in one.groups] for norms in one.samples]
        empty = [bool(found) and not any(found) for found in every]
        half = len(empty) // 2
        if half < samples or not all(empty[half:]) or len(one.steps) < steps or (not all(empty) and one.losses.fell):
            continue
        first = one.samples[max((index + 1 for index, zero in enumerate(empty) if not zero), default=0)]
        back = next((each for each in reversed(list(run.of(Backward))) if each.at < first.at), Backward())
        value = "" if back.value is None else f"; the loss is {back.value:.4g}"
        text, cause = (
            "nothing can be learned",
            "The loss is flat where the model is: no small change of a weight changes it.",
        )
        fix = "print what goes into the last relu, clamp, maximum or mask of the loss: it lies on the flat side"
        asked = next((each for each in run.answers("zero factor") if each.evidence["optimizer"] == one.number), None)
        if asked is not None:
            text = f"a factor of the loss is zero in all {asked.evidence['entries']} entries{near(asked)}"
            cause, fix = "Times zero the loss is zero for all weights.", "print that factor, and what it is made of"
            if asked.evidence["own_mean"]:
                cause = "The mean that is taken off is over an axis with one entry: each entry is its own mean."
                fix = "take the mean, and the deviation, over the axis of the samples"
        yield Found(
            text=f"Every gradient is exactly zero from step {first.step} on{value}: {text}.",
            fix=fix,
            cause=cause,
            since=first,
            where=back if asked is None else asked,
            evidence={"samples": len(one.samples), "since_step": first.step, "loss": back.value},
        )
