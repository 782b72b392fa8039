"""Rules of the family loss: what a loss function was given; ``bounds`` has those on the value it gives."""

from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from anybatch.doctor.rules.registry import rule
from anybatch.doctor.views.measures import model_name, module_name
from anybatch.records.events import Backward
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import LossCall, Probed, Walk
from anybatch.records.runs import Run

SIGMOID_LOSSES = ("binary_cross_entropy_with_logits", "multilabel_soft_margin_loss")
_NEEDS = 3
"""How many batches must agree."""


def by_line(run: Run, keep: Callable[[LossCall], bool] | None = None) -> dict[tuple[str, int, str], list[LossCall]]:
    """Calls of loss functions by the user's line.

    Args:
        run: the facts.
        keep: which calls; all by default.
    """
    found: dict[tuple[str, int, str], list[LossCall]] = {}
    for call in run.of(LossCall):
        if keep is None or keep(call):
            found.setdefault((call.file, call.line, call.function), []).append(call)
    for key in [key for key in found if not key[0] or key[0].startswith("<")]:
        known = next((other for other in found if other[2] == key[2] and other[0][:1] not in ("", "<")), None)
        if known is not None:  # a line that could not be found is that of the other calls
            found[known] = sorted(found[known] + found.pop(key), key=lambda one: one.at)
    return found


def loss_place(run: Run, call: LossCall) -> Place:
    """Where a loss was computed.

    Args:
        run: the facts.
        call: of the loss function.
    """
    same = [one for one in run.of(LossCall) if one.function == call.function and one.file[:1] not in ("", "<")]
    line = call if call.file[:1] not in ("", "<") or not same else same[0]
    return Place(module=module_name(run, call.root, call.module) if call.module else "", file=line.file, line=line.line)


@rule(
    "AB601",
    "DOUBLE_ACTIVATION",
    "error",
    explains=("LOSS_CONSTANT", "LR_TOO_LOW", "VANISHING", "SATURATED", "CANNOT_FIT_BATCH", "LOSS_SIGN"),
)
def double_activation(run: Run) -> Iterator[Finding]:
    """Probabilities where scores belong; several lines that get those of one activation are one finding."""
    first: dict[tuple[Any, ...], Finding] = {}
    lines: dict[tuple[Any, ...], list[int]] = {}
    for one in _doubled(run):
        key = (one.place.module, one.evidence.get("made")) if one.evidence.get("made") else (one.place, one.message)
        first.setdefault(key, one)
        lines.setdefault(key, []).append(one.place.line)
    for key, one in first.items():
        others = sorted(set(lines[key]) - {one.place.line})
        more = f" Lines {', '.join(map(str, others))} get the same." if others else ""
        yield replace(one, message=one.message + more)


def _doubled(run: Run) -> Iterator[Finding]:
    wanted = {"cross_entropy", "nll_loss", "kl_div", "ctc_loss", *SIGMOID_LOSSES}
    pairs = {pair[1]: pair[0] for walk in run.of(Walk) for pair in walk.doubled if len(pair) == 2}
    for (_, _, function), calls in by_line(run).items():
        looked = [one for one in calls if one.normalised is not None]
        direct = "" if _refutes(looked, pairs.get(function, "")) else pairs.get(function, "")
        enough = len(looked) >= _NEEDS and all(one.normalised for one in looked)
        if function == "kl_div" and not enough:
            looked = [one for one in calls if one.low is not None]
            enough = len(looked) >= _NEEDS and all((one.low or 0.0) >= 0 for one in looked)
        sigmoid = function in SIGMOID_LOSSES
        if function not in wanted or not (direct in ("softmax", "sigmoid") or enough):
            if function == "cross_entropy" and (direct == "log_softmax" or _is_log(calls)):
                yield _log_twice(run, calls[0])
            continue
        if not direct and sigmoid and not (_is_squashed(looked) and _squashes(run)):
            continue
        made = direct or ("sigmoid" if sigmoid else "softmax")
        name = model_name(run, max(calls[0].root, 0))
        module, place = _only(run, made), loss_place(run, calls[0])
        fixes = {
            "nll_loss": f"F.nll_loss(F.log_softmax({name}(x), dim=1), y), or F.cross_entropy of the raw scores",
            "kl_div": "F.kl_div(probabilities.log(), target) or F.kl_div(scores.log_softmax(-1), target)",
            "ctc_loss": "F.ctc_loss(scores.log_softmax(-1), targets, input_lengths, target_lengths)",
        }
        low = min((one.low for one in looked if one.low is not None), default=0.0)
        high = max((one.high for one in looked if one.high is not None), default=1.0)
        yield Finding(
            message=f"{function} gets probabilities ({made}; from {low:.2g} to {high:.2g}) where it takes "
            + ("their logarithms." if function in fixes else f"raw scores: it applies a {made} itself."),
            place=replace(place, module=module or place.module),
            fix=fixes.get(
                function,
                f"give {function} the raw output of {name}: remove the {made} before it"
                + (f" ({module})" if module else ""),
            ),
            cause="Logarithms of probabilities are never above 0; with others the loss is no likelihood."
            if function == "ctc_loss"
            else "Taken as scores, probabilities can hardly differ, so the loss can't become small.",
            evidence={"batches": len(looked), "low": low, "high": high, "in_the_graph": bool(direct), "made": made},
            step=(looked or calls)[min(_NEEDS, len(looked or calls)) - 1].step,
            at=calls[0].at,
            severity="error" if direct or not sigmoid else "warning",
        )


def _only(run: Run, made: str) -> str:
    """The name of the module that makes it, where the models have one only."""
    wanted = {"softmax": "Softmax", "sigmoid": "Sigmoid"}.get(made, "")
    found = [(root.root, one.name) for root in run.roots.values() for one in root.modules if one.cls == wanted]
    return module_name(run, *found[0]) if len(found) == 1 else ""


def _refutes(calls: list[LossCall], activation: str) -> bool:
    """Whether the numbers that this line's loss got can't come out of an activation: another line's graph has it."""
    if activation == "log_softmax":
        return any(one.high is not None and one.high > 1e-3 for one in calls)
    return any((one.low is not None and one.low < 0) or (one.high is not None and one.high > 1) for one in calls)


def _is_log(calls: list[LossCall]) -> bool:
    looked = [one for one in calls if one.low is not None]
    return len(looked) >= _NEEDS and all(one.log_normalised for one in looked)


def _is_squashed(calls: list[LossCall]) -> bool:
    """Whether all scores lie strictly between 0 and 1, and are not all alike."""
    lows = [one.low for one in calls if one.low is not None]
    highs = [one.high for one in calls if one.high is not None]
    return len(lows) >= 5 and min(lows) > 0 and max(highs) < 1 and max(highs) - min(lows) > 1e-3


def _squashes(run: Run) -> bool:
    """Whether there is a sigmoid that may have made them; scores may lie between 0 and 1 by themselves."""
    modules = any(one.cls in ("Sigmoid", "Hardsigmoid") for root in run.roots.values() for one in root.modules)
    kinds = {kind for walk in run.of(Walk) for kind in walk.kinds}
    return modules or not kinds or any(kind.startswith(("Sigmoid", "Hardsigmoid")) for kind in kinds)


def _log_twice(run: Run, call: LossCall) -> Finding:
    return Finding(
        message="cross_entropy gets log-probabilities; it takes their log-softmax once more, which changes nothing.",
        place=loss_place(run, call),
        fix="F.nll_loss for log-probabilities, or F.cross_entropy for raw scores",
        step=call.step,
        at=call.at,
        severity="info",
    )


@rule(
    "AB602",
    "LOSS_BROADCAST",
    "error",
    explains=("LOSS_CONSTANT", "LR_TOO_LOW", "VANISHING", "INPUT_IGNORED", "LABEL_MISALIGNED", "CANNOT_FIT_BATCH"),
)
def loss_broadcast(run: Run) -> Iterator[Finding]:
    """Losses whose result is larger than both of its arguments."""
    for calls in by_line(run).values():
        wrong = [one for one in calls if _outer(one.input_shape, one.target_shape)]
        if not wrong or wrong[0].classes:
            continue
        call = wrong[0]
        inputs, targets = call.input_shape, call.target_shape
        name = model_name(run, max(call.root, 0))
        if len(inputs) == len(targets) + 1 and inputs[-1] == 1:
            fix = f"{call.function}({name}(x).squeeze(-1), y)"
        elif len(targets) == len(inputs) + 1 and targets[-1] == 1:
            fix = f"{call.function}({name}(x), y.squeeze(-1))"
        else:
            fix = f"{call.function}({name}(x), y.reshape({', '.join(map(str, inputs))}))"
        shape = _joined(inputs, targets)
        yield Finding(
            message=f"{call.function} compares predictions of shape {inputs} with targets of shape {targets}: every "
            f"one with every other, {shape} in all.",
            place=loss_place(run, call),
            fix=fix,
            cause="The shapes are broadcast, and the best such a model can do is to predict the mean of the targets.",
            evidence={"input_shape": list(inputs), "target_shape": list(targets), "result": list(shape),
                      "calls": len(wrong)},
            step=call.step,
            at=call.at,
        )  # fmt: skip
        return
    yield from _by_hand(run)


def _by_hand(run: Run) -> Iterator[Finding]:
    """Differences of shape (N, N) below a loss that was written by hand, of an output that has (N, 1) or (N,)."""
    by_spot: dict[tuple[str, int], list[Walk]] = {}
    backwards = [one for one in run.of(Backward) if one.function == "backward"]
    at = [one.at for one in backwards]
    for walk in run.of(Walk):
        place = bisect(at, walk.at)
        if place < len(at):
            by_spot.setdefault((backwards[place].file, backwards[place].line), []).append(walk)
    for (file, line), walks in by_spot.items():
        wrong = [one for one in walks if one.spread]
        if len(wrong) < 2 or len(wrong) * 2 < len(walks):
            continue
        shape = wrong[0].spread
        result, other = (shape[0], shape[0]), shape[:1] if len(shape) == 2 else (*shape, 1)
        yield Finding(
            message=f"The loss is made of a difference or product of shape {result}: an output of shape {shape} meets "
            f"targets that have another shape, such as {other}, and each is compared with every other.",
            place=Place(file=file, line=line),
            fix=f"y.reshape({', '.join(map(str, shape))}) before they meet, or the output "
            + (".squeeze(-1)" if len(shape) == 2 else "[:, None]"),
            cause="The shapes are broadcast, and the best such a model can do is to predict the mean of the targets.",
            evidence={"output_shape": list(shape), "result": list(result), "graphs": len(wrong)},
            step=wrong[0].step,
            at=wrong[0].at,
            severity="warning",
        )
        return


def _joined(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what is broadcast; empty if they don't fit."""
    length = max(len(one), len(other))
    pairs = list(zip((1,) * (length - len(one)) + one, (1,) * (length - len(other)) + other, strict=True))
    return tuple(max(pair) for pair in pairs) if all(1 in pair or pair[0] == pair[1] for pair in pairs) else ()


def _outer(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    joined = _joined(one, other)
    return bool(joined) and _count(joined) > max(_count(one), _count(other))


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@rule(
    "AB603", "SOFTMAX_DIM", "error", explains=("BATCH_MIXING", "LOSS_CONSTANT", "CANNOT_FIT_BATCH", "DOUBLE_ACTIVATION")
)
def softmax_dim(run: Run) -> Iterator[Finding]:
    """Softmaxes along the batch."""
    walks = [walk for walk in run.of(Walk) if walk.softmaxes]
    wrong = [walk for walk in walks if any(_along_batch(run, walk, *one) for one in walk.softmaxes)]
    if not wrong or len(wrong) < len(walks):
        return
    dim, dims, size, _ = next(one for one in wrong[0].softmaxes if _along_batch(run, wrong[0], *one))
    calls = [one for one in run.of(LossCall) if one.step == wrong[0].step]
    module = next((one.name for root in run.roots.values() for one in root.modules if one.cls in _SOFTMAXES), "")
    asked = next((one for one in run.of(Probed) if one.probe == "batch" and one.evidence.get("op") == "softmax"), None)
    if asked is not None and asked.answer == "yes" and asked.line:
        place = Place(module=module_name(run, asked.root, asked.module), file=asked.file, line=asked.line)
    else:
        place = Place(module=module) if module else loss_place(run, calls[0]) if calls else Place()
    yield Finding(
        message=f"A softmax{f' ({module})' if module else ''} runs along dim {dim} of {dims}, over the {size} samples "
        "of the batch instead of the classes.",
        place=place,
        fix="softmax(dim=-1)",
        cause="The probabilities sum to 1 over the batch, so a prediction depends on the other samples.",
        evidence={"dim": dim, "dims": dims, "size": size, "graphs": len(wrong)},
        step=wrong[0].step,
        at=wrong[0].at,
    )


_SOFTMAXES = ("Softmax", "LogSoftmax", "Softmin")


def _along_batch(run: Run, walk: Walk, dim: int, dims: int, size: int, is_batch: bool) -> bool:
    """Whether a softmax runs over samples that the loss then takes one by one."""
    calls = [one for one in run.of(LossCall) if one.step == walk.step]
    taken = _takes_rows(calls, size) and dims == 2
    if dim != 0 or dims < 2 or not (is_batch or taken) or size < 2:
        return False
    if any(other[0] != 0 and other[1] == dims and other[2] == size for other in walk.softmaxes):
        return False
    return (not calls or any(one.target_shape[:1] == (size,) for one in calls)) and (
        taken or not _time_comes_first(run)
    )


def _takes_rows(calls: list[LossCall], size: int) -> bool:
    """Whether a likelihood has a target for each of some rows, and what it gets is no log-probability along them."""
    return any(
        one.function == "nll_loss" and one.target_shape == (size,) and one.log_normalised is False for one in calls
    )


def _time_comes_first(run: Run) -> bool:
    return any(
        module.kind in ("recurrent", "attention") and module.options.get("batch_first") is False
        for root in run.roots.values()
        for module in root.modules
    )


@rule("AB604", "LABEL_SHIFT", "error", explains=("CANNOT_FIT_BATCH",))
def label_shift(run: Run) -> Iterator[Finding]:
    """Targets that are two tokens ahead."""
    calls = [one for one in run.of(LossCall) if one.shift is not None]
    twice = [one for one in calls if one.shift is not None and one.shift >= 2]
    if len(twice) < min(_NEEDS, max(run.steps, 1)) or any(one.shift == 1 for one in calls):
        return
    call = twice[0]
    yield Finding(
        message=f"The targets of {call.function} are {call.shift} tokens ahead of the input: they were shifted "
        f"{'twice' if call.shift == 2 else f'{call.shift} times'}.",
        place=loss_place(run, call),
        fix="Shift once: give the loss ids that are not shifted, or cut scores[:, :-1] and ids[:, 1:] once",
        cause="The labels were shifted before the loss and once more in it.",
        evidence={"shift": call.shift, "batches": len(twice)},
        step=twice[min(len(twice), _NEEDS) - 1].step,
        at=call.at,
    )
