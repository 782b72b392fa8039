"""Rules on the value of a loss; their codes are of the family loss."""

import itertools
import math
from collections.abc import Iterator
from statistics import fmean

from anybatch.doctor.rules.registry import rule
from anybatch.doctor.views.courses import adversarial, course
from anybatch.doctor.views.losses import by_line, loss_place
from anybatch.doctor.views.measures import latest, model_name, outputs, root_place
from anybatch.records.events import Backward, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import LossCall, Walk
from anybatch.records.runs import Run

_NEVER_NEGATIVE = {
    "cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss",
    "smooth_l1_loss", "huber_loss", "hinge_embedding_loss", "triplet_margin_loss", "soft_margin_loss",
    "ctc_loss",
}  # fmt: skip
_OF_CLASSES = {"cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"}
_OF_LOGARITHMS = {
    "nll_loss": "F.nll_loss(F.log_softmax(scores, dim=1), y)",
    "ctc_loss": "F.ctc_loss(F.log_softmax(scores, dim=2), targets, input_lengths, target_lengths)",
}
_ABSURD = 1e9
"""Times its first value to which no loss that means something falls below zero."""

_PICKED = {"IndexBackward0", "GatherBackward0", "TakeAlongDimBackward0"}
_OTHERWISE = {"NegBackward0", "MulBackward0", "SubBackward0", "RsubBackward1", "ExpBackward0", "NllLossBackward0"}
"""Nodes that give a log-probability another sign or weight, as in policy gradients and entropies."""


@rule(
    "AB605",
    "LOSS_CONSTANT",
    "warning",
    explains=("VANISHING", "LR_TOO_LOW", "INPUT_IGNORED", "SATURATED", "CANNOT_FIT_BATCH"),
)
def loss_constant(run: Run) -> Iterator[Finding]:
    """Losses that can't change."""
    for calls in by_line(run, lambda one: one.function in ("cross_entropy", "nll_loss") and one.classes == 1).values():
        yield Finding(
            message=f"{calls[0].function} gets one class only (predictions of shape {calls[0].input_shape}): its "
            "value is always 0.",
            place=loss_place(run, calls[0]),
            fix="F.binary_cross_entropy_with_logits(scores.squeeze(-1), y.float()), or as many outputs as classes",
            cause="A softmax over one class is 1, whatever the model computes.",
            evidence={"input_shape": list(calls[0].input_shape)},
            step=calls[0].step,
            at=calls[0].at,
            severity="error",
        )
        return
    found = list(_softmax_of_one(run))
    yield from found or _same_value(run)


def _softmax_of_one(run: Run) -> Iterator[Finding]:
    narrow = [walk for walk in run.of(Walk) if any(size == 1 and dim > 0 for dim, _, size, _ in walk.softmaxes)]
    for root, samples in latest(run):
        last = [output for _, output in outputs(samples)]
        one = len(last) >= 2 and all(
            output.shape[-1:] == (1,) and output.std == 0 and output.mean in (0.0, 1.0) for output in last
        )
        if not narrow or not one:
            continue
        softmax = [sample for sample in samples[0].modules if "Softmax" in sample.cls]
        yield Finding(
            message=f"{model_name(run, root)} ends in a softmax over one unit: its output is {last[0].mean:g} for "
            "every input.",
            place=root_place(run, root, softmax[-1].module if softmax else ""),
            fix="torch.sigmoid for one unit, or F.binary_cross_entropy_with_logits of the raw score",
            cause="A softmax over one unit is 1, whatever the model computes, and its gradient is 0.",
            evidence={"mean": last[0].mean, "std": 0.0, "samples": len(last)},
            step=narrow[0].step,
            at=narrow[0].at,
            severity="error",
        )


def _same_value(run: Run) -> Iterator[Finding]:
    if adversarial(run) or any(not any(one.lrs) for one in run.of(Stepped) if one.lrs):
        return
    lines: dict[tuple[str, int], list[tuple[int, Backward]]] = {}
    stepped = 0  # of all optimizers: a second one, made for a second part of the run, counts its own from 0
    for one in run.of(Backward, Stepped):
        if isinstance(one, Stepped):
            stepped += 1
        elif isinstance(one, Backward) and one.value is not None and one.function == "backward":
            lines.setdefault((one.file, one.line), []).append((stepped, one))
    for (file, line), found in lines.items():
        backwards = [one for _, one in found]
        values = [one.value for one in backwards]
        steps = {count for count, _ in found}
        if len(steps) < 10 or len(set(values)) > 1 or not values[0] or not math.isfinite(values[0]):
            continue
        yield Finding(
            message=f"The loss is exactly {values[0]:.6g} in all {len(steps)} steps.",
            place=Place(file=file, line=line),
            fix="print(anybatch.why(loss, model))  # which parameters the loss reaches",
            cause="It does not depend on the parameters, or no parameter changes.",
            evidence={"value": values[0], "steps": len(steps)},
            step=backwards[min(9, len(backwards) - 1)].step,
            at=backwards[-1].at,
        )


@rule(
    "AB606",
    "LOSS_SIGN",
    "warning",
    explains=("EXPLODING", "LR_TOO_HIGH", "NAN_IN_FORWARD", "SATURATED", "DEAD_UNITS", "CANNOT_FIT_BATCH"),
)
def loss_sign(run: Run) -> Iterator[Finding]:
    """Losses below their bound, and losses that are maximised."""
    for calls in by_line(run, lambda one: one.function in _NEVER_NEGATIVE).values():
        least = -0.1 if calls[0].function == "ctc_loss" else -1e-4  # which sums up many roundings
        below = [one for one in calls if one.value is not None and one.value < least and not one.weighted]
        looked = next((one for one in reversed(below) if one.normalised is not None), below[-1] if below else None)
        if len(below) < 2 or looked is None or not _is_wrong(run, looked):
            continue
        call = below[0]
        binary = call.function.startswith("binary")
        given = (
            f"{'probabilities' if looked.normalised else 'raw scores'} instead of log-probabilities"
            if call.function in _OF_LOGARITHMS
            else "targets outside 0 and 1"
        )
        yield Finding(
            message=f"{call.function} is negative ({call.value:.4g}), which it can't be"
            + (f": it gets {given}." if binary or call.function in _OF_LOGARITHMS else "."),
            place=loss_place(run, call),
            fix=_OF_LOGARITHMS.get(call.function, "targets of 0 and 1: y = (y + 1) / 2 for labels of -1 and 1"),
            cause="Below its bound the loss rewards what it should punish.",
            evidence={"value": call.value, "calls": len(below), "target_mean": call.target_mean},
            step=below[1].step,
            at=call.at,
        )
    yield from _turned(run)
    yield from _likelihood(run)
    yield from _unbounded(run)


def _unbounded(run: Run) -> Iterator[Finding]:
    """A loss that falls without end, since a term of it that should be small is made as large as it can be."""
    went = course(run)
    values = went.finite
    if adversarial(run) or len(values) < 20 or went.diverged or went.first < -1:
        return
    quarter = len(values) // 4
    means = [fmean(values[part * quarter : (part + 1) * quarter]) for part in range(4)]
    falls = [before - after for before, after in itertools.pairwise(means)]
    scale = max(1.0, abs(went.first))
    faster = 0 < falls[0] < falls[1] < falls[2]
    if means[-1] > (-100 if faster else -_ABSURD) * scale or means[-1] > means[0]:
        return
    backward = next(one for one in run.of(Backward) if one.at == went.ats[0])
    yield Finding(
        message=f"The loss goes from {went.first:.4g} to {went.last:.4g}{', and falls faster and faster' * faster}: "
        "nothing bounds it from below.",
        place=Place(file=backward.file, line=backward.line),
        fix="print each term of the loss, and turn the sign of the one that falls; "
        "kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean()",
        cause="A term that should become small has the wrong sign, so that it is made as large as possible.",
        evidence={"loss_first": went.first, "loss_last": went.last},
        step=went.steps[len(values) // 2],
        at=backward.at,
    )


def _likelihood(run: Run) -> Iterator[Finding]:
    """Log-probabilities of the targets that are minimised: picked from a log-softmax, with no minus on the way."""
    walks = list(run.of(Walk))
    if adversarial(run) or any(True for _ in run.of(LossCall)) or len(walks) < 2:
        return
    for walk in walks:
        if not _PICKED & walk.kinds.keys() or "LogSoftmaxBackward0" not in walk.kinds or _OTHERWISE & walk.kinds.keys():
            return
    backwards = [one for one in run.of(Backward) if one.function == "backward" and one.value is not None]
    values = [one.value for one in backwards if one.value is not None]
    tops = all(one.top.startswith(("Mean", "Sum")) and one.factor > 0 for one in backwards)
    if len(values) < 10 or not tops or max(values) >= 0 or values[-1] > 2 * values[0]:
        return
    yield Finding(
        message=f"backward is called on the mean of log-probabilities without a minus: it goes from {values[0]:.4g} to "
        f"{values[-1]:.4g}, and with it the probability of the targets towards zero.",
        place=Place(file=backwards[0].file, line=backwards[0].line),
        fix="loss = -loss, or F.cross_entropy(scores, y), which has the minus",
        cause="The optimizer minimises: a log-probability needs a minus, so that it grows.",
        evidence={"loss_first": values[0], "loss_last": values[-1]},
        step=backwards[2].step,
        at=backwards[0].at,
        severity="error",
    )


def _is_wrong(run: Run, call: LossCall) -> bool:
    """Whether what was given explains it; densities and soft targets are left alone."""
    if call.function == "nll_loss":
        kinds = {kind for walk in run.of(Walk) for kind in walk.kinds}
        raw = bool(kinds) and not any("Log" in kind or "Exp" in kind for kind in kinds)  # densities have one of them
        return bool(call.normalised) or (raw and call.normalised is False and not call.log_normalised)
    if call.function.startswith("binary"):
        return True
    if call.function == "ctc_loss":
        return not call.log_normalised
    return call.function not in _OF_CLASSES


def _turned(run: Run) -> Iterator[Finding]:
    if adversarial(run):
        return
    calls = {one.at: one for one in run.of(LossCall)}
    backwards = [one for one in run.of(Backward) if one.function == "backward" and one.value is not None]
    if len({(one.file, one.line) for one in backwards}) > 1:
        return
    turned = []
    for one in backwards:
        mine = [calls[number] for number in one.loss_calls if number in calls]
        if (
            len(mine) == 1
            and mine[0].function in _NEVER_NEGATIVE
            and mine[0].value is not None
            and one.value is not None
        ):
            if mine[0].value <= 1e-6 or abs(one.value / one.factor) < 1e-6:
                continue
            if not math.isclose(-mine[0].value * abs(one.factor), one.value, rel_tol=1e-3):
                return
            turned.append((one, mine[0]))
    if len(turned) < 3 or (turned[-1][1].value or 0.0) <= (turned[0][1].value or 0.0):
        return
    backward, call = turned[0]
    yield Finding(
        message=f"backward is called on minus {call.function}: the loss is {backward.value:.4g}, and {call.function} "
        f"grows from {call.value:.4g} to {turned[-1][1].value:.4g}.",
        place=Place(file=backward.file, line=backward.line),
        fix="loss.backward() without the minus",
        cause="The optimizer minimises, so that a loss with a minus makes the model worse at every step.",
        evidence={"value": backward.value, "loss_first": call.value, "loss_last": turned[-1][1].value},
        step=turned[2][0].step,
        at=backward.at,
        severity="error",
    )


@rule(
    "AB607",
    "LOSS_ALL_IGNORED",
    "error",
    explains=("NAN_IN_FORWARD", "NAN_IN_BACKWARD", "LOSS_CONSTANT", "LR_TOO_HIGH", "EXPLODING"),
)
def loss_all_ignored(run: Run) -> Iterator[Finding]:
    """Calls in which every target is ignored."""
    for calls in by_line(run, lambda one: one.reduction == "mean" and one.items == 0 and one.ignored > 0).values():
        call = calls[0]
        if call.value is not None and math.isfinite(call.value):
            continue
        yield Finding(
            message=f"All {call.ignored} targets of {call.function} are ignore_index ({call.ignore_index}) at step "
            f"{call.step}: the mean over none of them is nan.",
            place=loss_place(run, call),
            fix=f"F.{call.function}(scores, y, reduction='sum') / (y != {call.ignore_index}).sum().clamp_min(1)",
            cause="0 / 0 is nan, which the backward carries into every weight.",
            evidence={"ignored": call.ignored, "calls": len(calls), "step": call.step},
            step=call.step,
            at=call.at,
        )
