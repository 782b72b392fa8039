"""Rules of the family loss: what a loss function was given; ``bounds`` has those on the value it gives."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from anybatch.doctor.rules.answered import say
from anybatch.doctor.rules.registry import LEARNS_NOTHING, NOWHERE, Found, Limit, rule
from anybatch.doctor.views.courses import course
from anybatch.doctor.views.measures import outputs
from anybatch.doctor.views.naming import by_line, qualified, root_variable
from anybatch.doctor.views.outcomes import outcome
from anybatch.doctor.views.windows import members, walked
from anybatch.records.events import Backward
from anybatch.records.lossfacts import Evaluated, LossCall, Probed, Walk
from anybatch.records.runs import Run, grouped
from anybatch.records.samples import Activations, Scored

_SIGMOID_LOSSES = ("binary_cross_entropy_with_logits", "multilabel_soft_margin_loss")
_AGREE, _CALLS = "batches must agree", 20


def _model(run: Run, call: LossCall) -> str:
    return root_variable(run, max(call.root, 0))


@rule(
    "AB601", "DOUBLE_ACTIVATION", "error", slows=True,
    explains=("LOSS_CONSTANT", "LR_TOO_LOW", "VANISHING", "SATURATED", "CANNOT_FIT_BATCH", "LOSS_SIGN"),
)  # fmt: skip
def double_activation(run: Run, *, batches: float = Limit(3, _AGREE)) -> Iterator[Found]:
    """Probabilities where scores belong; several lines that get those of one activation are one finding."""
    first: dict[tuple[Any, ...], Found] = {}
    lines: dict[tuple[Any, ...], list[int]] = {}
    for one in _doubled(run, batches):
        place, made = one.place(run), one.evidence.get("made")
        key = (place.module, made) if made else (place, one.text)
        first.setdefault(key, one)
        lines.setdefault(key, []).append(place.line)
    for key, one in first.items():
        others = sorted(set(lines[key]) - {lines[key][0]})
        more = f" Lines {', '.join(map(str, others))} get the same." if others else ""
        yield replace(one, text=one.text + more)
    if not first:
        yield from _again_by_hand(run, batches)
    yield from say(run, "AB601")


def _again_by_hand(run: Run, least: float) -> Iterator[Found]:
    """A sigmoid of a sigmoid, or a softmax of a softmax, that no loss function of torch is given."""
    for spot, walks in _walks_by_spot(run).items():
        for made in ("sigmoid", "softmax"):
            wrong = [one for one in walks if (made, made) in one.doubled]
            if len(wrong) < least or len(wrong) * 2 < len(walks):
                continue
            module = _only(run, made)
            yield Found(
                text=f"A {made} is taken of the result of a {made}.",
                fix=f"take the {made} once: in the model or in the loss"
                + (f", such as without {module}" if module else ""),
                cause="Between 0 and 1, numbers are all much alike to a second one: from 0.5 to 0.73 after a sigmoid."
                if made == "sigmoid"
                else "Between 0 and 1, scores can hardly differ, so no class can become likely.",
                since=wrong[0],
                where=spot,
                module=module or None,
                evidence={"graphs": len(wrong), "in_the_graph": True, "made": made},
                severity="warning",
            )
            return


def _doubled(run: Run, batches: float) -> Iterator[Found]:
    wanted = {"cross_entropy", "nll_loss", "kl_div", "ctc_loss", *_SIGMOID_LOSSES}
    pairs = {pair[1]: pair[0] for walk in run.of(Walk) for pair in walk.doubled if len(pair) == 2}
    for (_, _, function), calls in by_line(run).items():
        looked = [one for one in calls if one.normalised is not None]
        direct = "" if _refutes(looked, pairs.get(function, "")) else pairs.get(function, "")
        enough = len(looked) >= batches and all(one.normalised for one in looked)
        if function == "kl_div" and not enough:
            looked = [one for one in calls if one.low is not None]
            enough = len(looked) >= batches and all((one.low or 0.0) >= 0 for one in looked)
        sigmoid = function in _SIGMOID_LOSSES
        if function not in wanted or not (direct in ("softmax", "sigmoid") or enough):
            of_logs = [one.log_normalised for one in calls if one.low is not None]
            is_log = direct == "log_softmax" or (len(of_logs) >= batches and all(of_logs))
            if function == "cross_entropy" and is_log:
                yield Found(
                    text="cross_entropy gets log-probabilities; it takes their log-softmax once more, which changes "
                    "nothing.",
                    fix="F.nll_loss for log-probabilities, or F.cross_entropy for raw scores",
                    since=calls[0],
                    severity="info",
                )
        elif direct in ("relu", "tanh"):  # no probabilities: see AB608
            continue
        elif direct or not sigmoid or (_is_squashed(looked) and _may_have(run, "Sigmoid", "Hardsigmoid")):
            made = direct or ("sigmoid" if sigmoid else "softmax")
            at = (looked or calls)[int(min(batches, len(looked or calls))) - 1]
            yield _probabilities(run, calls[0], looked, made, at, sure=bool(direct))


def _probabilities(
    run: Run, call: LossCall, looked: list[LossCall], made: str, at: LossCall, *, sure: bool
) -> Found:  # fmt: skip
    function, name = call.function, _model(run, call)
    module = _only(run, made)
    of_logarithms = {
        "nll_loss": f"F.nll_loss(F.log_softmax({name}(x), dim=1), y), or F.cross_entropy of the raw scores",
        "kl_div": "F.kl_div(probabilities.log(), target) or F.kl_div(scores.log_softmax(-1), target)",
        "ctc_loss": "F.ctc_loss(scores.log_softmax(-1), targets, input_lengths, target_lengths)",
    }
    of_scores = f"give {function} the raw output of {name}: remove the {made} before it"
    low = min((one.low for one in looked if one.low is not None), default=0.0)
    high = max((one.high for one in looked if one.high is not None), default=1.0)
    takes = "their logarithms" if function in of_logarithms else f"raw scores: it applies a {made} itself"
    made = made if sure or function not in of_logarithms or _may_have(run, "Softmax") else ""
    given = f"probabilities ({f'{made}; ' if made else ''}from {low:.2g} to {high:.2g})"
    changed_places = function == "kl_div" and call.target_requires_grad
    if changed_places:
        of_logarithms["kl_div"] = "F.kl_div(scores.log_softmax(-1), target, reduction='batchmean')"
    return Found(
        text=f"{function} gets {given} first, and the model's output as the target: the two are swapped."
        if changed_places
        else f"{function} gets {given} where it takes {takes}.",
        fix=of_logarithms.get(function, f"{of_scores} ({module})" if module else of_scores),
        cause="It takes the logarithm of its second argument, and of its first it takes none."
        if changed_places
        else "Logarithms of probabilities are never above 0; with others the loss is no likelihood."
        if function == "ctc_loss"
        else "Taken as scores, probabilities can hardly differ, so the loss can't become small.",
        since=call,
        step=at,
        module=module or None,
        evidence={"batches": len(looked), "low": low, "high": high, "in_the_graph": sure, "function": function}
        | ({"made": made} if made else {}),
        severity="error" if sure or function not in _SIGMOID_LOSSES else "warning",
    )


def _may_have(run: Run, *activations: str) -> bool:
    """Whether there may be one of some activations: a graph or a model has one, or no graph was looked at."""
    kinds = {kind for walk in run.of(Walk) for kind in walk.kinds}
    modules = any(one.cls in activations for root in run.roots.values() for one in root.modules)
    return modules or not kinds or any(kind.startswith(activations) for kind in kinds)


def _only(run: Run, made: str) -> str:
    """The name of the module that makes it, where the models have one only."""
    wanted = {"softmax": "Softmax", "sigmoid": "Sigmoid"}.get(made, "")
    found = [(root.root, one.name) for root in run.roots.values() for one in root.modules if one.cls == wanted]
    return qualified(run, *found[0]) if len(found) == 1 else ""


def _refutes(calls: list[LossCall], activation: str) -> bool:
    """Whether the numbers that this line's loss got can't come out of an activation: another line's graph has it."""
    if activation == "log_softmax":
        return any(one.high is not None and one.high > 1e-3 for one in calls)
    return any((one.low is not None and one.low < 0) or (one.high is not None and one.high > 1) for one in calls)


def _is_squashed(calls: list[LossCall]) -> bool:
    """Whether all scores lie strictly between 0 and 1, and are not all alike."""
    lows = [one.low for one in calls if one.low is not None]
    highs = [one.high for one in calls if one.high is not None]
    return len(lows) >= 5 and min(lows) > 0 and max(highs) < 1 and max(highs) - min(lows) > 1e-3


@rule("AB602", "LOSS_BROADCAST", "error", explains=(*LEARNS_NOTHING, "LR_TOO_LOW", "VANISHING", "LABELS_UNRELATED"))
def loss_broadcast(run: Run, *, graphs: float = Limit(2, "one alone may be of something else")) -> Iterator[Found]:
    """Losses whose result is larger than both of its arguments, or has each target for each row of predictions."""
    for calls in by_line(run).values():
        wrong = [one for one in calls if not one.classes and _is_broadcast(one.input_shape, one.target_shape)]
        if wrong:
            call = wrong[0]
            evidence = {"calls": len(wrong)}
            yield _compared(call.function, _model(run, call), call.input_shape, call.target_shape, call, evidence)
            return
    found = list(_of_density(run, graphs)) or list(_by_hand(run, graphs))
    yield from found
    for one in run.of(Evaluated) if not found else ():
        inputs, targets = one.shapes if len(one.shapes) == 2 else ((), ())
        if len(inputs) != len(targets) and _is_broadcast(inputs, targets):  # not all with all, on purpose
            measured = _compared(one.function, "model", inputs, targets, one, {})
            yield replace(measured, severity="warning", cause=_MEASURED)
            return


def _compared(
    function: str, name: str, inputs: tuple[int, ...], targets: tuple[int, ...], since: LossCall | Evaluated,
    evidence: dict[str, Any],
) -> Found:  # fmt: skip
    given = f"{name}(x), y.reshape({', '.join(map(str, inputs))})"
    if len(inputs) == len(targets) + 1 and inputs[-1] == 1:
        given = f"{name}(x).squeeze(-1), y"
    elif len(targets) == len(inputs) + 1 and targets[-1] == 1:
        given = f"{name}(x), y.squeeze(-1)"
    shape = _joined(inputs, targets)
    fix = f"{function}({given})"
    if shape == targets:
        fix = f"targets of shape {inputs}: what they are made of is of {inputs} and of {inputs[:1]}, say; " + (
            "unsqueeze(-1) what has one dim" if len(inputs) == 2 else "squeeze(-1) what has two"
        )
    return Found(
        text=f"{function} compares predictions of shape {inputs} with targets of shape {targets}: every one with "
        f"every other, {shape} in all.",
        fix=fix,
        cause=_BROADCAST,
        since=since,
        evidence={"input_shape": list(inputs), "target_shape": list(targets), "result": list(shape), **evidence},
    )


_MEASURED = "The shapes are broadcast in an evaluation: it does not measure the error of the predictions."
_BROADCAST = "The shapes are broadcast, and the best such a model can do is to predict the mean of the targets."


def _by_hand(run: Run, least: float) -> Iterator[Found]:
    """Differences of shape (N, N) below a loss that was written by hand, of an output that has (N, 1) or (N,)."""
    for spot, walks in _walks_by_spot(run).items():
        wrong = [one for one in walks if one.spread]
        # of the calls in a step of LBFGS only the first ones are gone through
        is_known = len(wrong) >= least or sum((one.file, one.line) == spot for one in run.of(Backward)) >= _CALLS
        if not wrong or not is_known or len(wrong) * 2 < len(walks):
            continue
        shape, reached, every = wrong[0].spread, frozenset(wrong[0].reached), members(run)
        lines = (one for one in run.answers("outer") if every.get(one.evidence.get("optimizer", -1), reached) & reached)
        result, other = (shape[0], shape[0]), shape[:1] if len(shape) == 2 else (*shape, 1)
        yield Found(
            text=f"The loss is made of a difference or product of shape {result}: an output of shape {shape} meets "
            f"targets of a different shape, such as {other}, and each is compared with every other.",
            fix=f"y.reshape({', '.join(map(str, shape))}) before they meet, or the output "
            + (".squeeze(-1)" if len(shape) == 2 else "[:, None]"),
            cause=_BROADCAST,
            since=wrong[0],
            where=next(lines, spot),
            evidence={"output_shape": list(shape), "result": list(result), "graphs": len(wrong)},
            severity="warning",
        )
        return


def _of_density(run: Run, least: float) -> Iterator[Found]:
    """Values in a column whose density is asked of as many distributions in a row, or the other way round."""
    for one in (one for one in run.of(Scored) if len(one.crossed) == 2):
        value, batch = one.crossed
        walks = [walk for walk in run.of(Walk) if walk.spread == batch]
        if len(walks) < least:
            continue  # a mixture or a kernel density takes the scores of each row together
        result = _joined(value, batch)
        yield Found(
            text=f"{one.distribution}.log_prob gets values of shape {value}, and its distributions have shape {batch}: "
            f"each value is scored by every distribution, {result} in all.",
            fix=f".log_prob(value{'.squeeze(-1)' if len(value) == 2 else '[:, None]'})",
            cause=_BROADCAST,
            since=one,
            evidence={"value_shape": list(value), "batch_shape": list(batch), "result": list(result)},
        )
        return


def _walks_by_spot(run: Run) -> dict[tuple[str, int], list[Walk]]:
    """The graphs of losses, by the line of their backward."""
    return grouped(((back.file, back.line), walk) for walk, back in walked(run).values() if back.function == "backward")


def _joined(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what is broadcast; empty if they don't fit."""
    length = max(len(one), len(other))
    pairs = list(zip((1,) * (length - len(one)) + one, (1,) * (length - len(other)) + other, strict=True))
    return tuple(max(pair) for pair in pairs) if all(1 in pair or pair[0] == pair[1] for pair in pairs) else ()


def _is_broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether both are smaller than what they give, or targets are a square that the rows of predictions are one of."""
    joined = _joined(one, other)
    is_square = one in {(*other[:-1], 1), other[:-1]} and len(other) == 2 and other[0] == other[1] > 1
    return bool(joined) and (math.prod(joined) > max(math.prod(one), math.prod(other)) or is_square)


_SOFTMAXES = ("Softmax", "LogSoftmax", "Softmin")


@rule(
    "AB603", "SOFTMAX_DIM", "error",
    explains=("BATCH_MIXING", "LOSS_CONSTANT", "CANNOT_FIT_BATCH", "DOUBLE_ACTIVATION"),
)  # fmt: skip
def softmax_dim(run: Run) -> Iterator[Found]:
    """Softmaxes along the batch, and along another axis than the one that is summed over."""
    yield from say(run, "AB603")
    beside = next(_beside_classes(run), None)
    if beside is not None:
        yield beside
        return
    walks = [(walk, [one for one in walk.softmaxes if _along_batch(run, walk, *one)]) for walk in run.of(Walk)]
    wrong = [(walk, found) for walk, found in walks if found]
    if not wrong or len(wrong) < sum(bool(walk.softmaxes) for walk, _ in walks):
        return
    (walk, found), calls = wrong[0], [one for one in run.of(LossCall) if one.step == wrong[0][0].step]
    dim, dims, size, _ = found[0]
    module = next((one.name for root in run.roots.values() for one in root.modules if one.cls in _SOFTMAXES), "")
    asked = next((one for one in run.of(Probed) if one.probe == "batch" and one.evidence.get("op") == "softmax"), None)
    told = asked is not None and asked.answer == "yes" and asked.line
    yield Found(
        text=f"A softmax{f' ({module})' if module else ''} runs along dim {dim} of {dims}, over the {size} samples of "
        "the batch instead of the classes.",
        fix="softmax(dim=-1)",
        cause="The probabilities sum to 1 over the batch, so a prediction depends on the other samples.",
        since=walk,
        where=asked if told else calls[0] if calls and not module else NOWHERE,
        module=None if told or not module else module,
        evidence={"dim": dim, "dims": dims, "size": size, "graphs": len(wrong)},
    )


_CLASS_DIMS = {"nll_loss": 1, "ctc_loss": -1}


def _beside_classes(run: Run) -> Iterator[Found]:
    """Likelihoods of more than rows and classes whose log-probabilities are those of another dim than the classes."""
    softmaxes = {one.step: one.softmaxes for one in run.of(Walk)}
    wanted = by_line(run, lambda one: one.function in _CLASS_DIMS and one.log_normalised is not None)
    for (_, _, function), calls in wanted.items():
        dims = len(calls[0].input_shape)
        classes, found = _CLASS_DIMS[function] % max(dims, 1), [(one, softmaxes.get(one.step, ())) for one in calls]
        wrong = [
            (one, alike[0])
            for one, made in found
            if (alike := [s for s in made if s[1] == dims and s[2] == one.input_shape[s[0]]])
            and all(s[0] != classes for s in alike)
            and not one.log_normalised
            and one.high is not None
            and one.high <= 0  # scores are on both sides
        ]
        if dims < 3 or len(wrong) < 2 or len(wrong) < sum(1 for _, made in found if made):
            continue
        call, (dim, _, size, _) = wrong[0]
        yield Found(
            text=f"{function} gets logarithms of a softmax along dim {dim} of {dims}, over {size} entries, where it "
            f"takes those along dim {classes}, over the {call.input_shape[classes]} classes.",
            fix=f"log_softmax(dim={_CLASS_DIMS[function]})",
            cause="The class probabilities at one position do not sum to 1, so the loss is not a likelihood.",
            since=call,
            step=wrong[1][0],
            evidence={"dim": dim, "dims": dims, "size": size, "graphs": len(wrong), "classes": classes},
        )


def _along_batch(run: Run, walk: Walk, dim: int, dims: int, size: int, is_batch: bool) -> bool:
    """Whether a softmax runs over samples that the loss then takes one by one."""
    calls = [one for one in run.of(LossCall) if one.step == walk.step]
    # A likelihood has a target for each of the rows, or of some, and what it gets is no log-probability along them.
    likelihoods = [
        one
        for one in calls
        if one.function == "nll_loss"
        and len(one.target_shape) == 1
        and one.target_shape[0] <= size  # a mask takes some
        and one.log_normalised is False
    ]
    taken = dims == 2 and bool(likelihoods)
    if dim != 0 or dims < 2 or not (is_batch or taken) or size < 2:
        return False
    # A contrast takes both dims of a square; attention among the rows, before the scores, has one that is no other's.
    is_square = not taken or any(one.input_shape[1:] == (size,) for one in likelihoods)
    if is_square and any(other[0] != 0 and other[1] == dims and other[2] == size for other in walk.softmaxes):
        return False
    fits = taken or any(one.target_shape[:1] == (size,) for one in calls) or not (calls or _gives_one_number(run))
    return fits and (taken or not _time_comes_first(run))


def _gives_one_number(run: Run) -> bool:
    """Whether what a model gives is one number, as the score of a bag of instances is, which are no samples then."""
    return any(math.prod(output.shape) == 1 for _, output in outputs(run.of(Activations)))


def _time_comes_first(run: Run) -> bool:
    return any(
        module.kind in ("recurrent", "attention") and module.options.get("batch_first") is False
        for root in run.roots.values()
        for module in root.modules
    )


@rule("AB604", "LABEL_SHIFT", "error", explains=("CANNOT_FIT_BATCH",), needs=(LossCall,))
def label_shift(run: Run, *, batches: float = Limit(3, _AGREE)) -> Iterator[Found]:
    """Targets that are two tokens ahead, or none."""
    yield from _not_shifted(run, batches)
    shifted = [(one, one.shift) for one in run.of(LossCall) if one.shift is not None]
    twice = [(one, shift) for one, shift in shifted if shift >= 2]
    if not twice or len(twice) < min(batches, max(run.steps, 1)) or any(shift == 1 for _, shift in shifted):
        yield from say(run, "AB604")
        return
    call, shift = twice[0]
    yield Found(
        text=f"The targets of {call.function} are {shift} tokens ahead of the input: they were shifted "
        f"{'twice' if shift == 2 else f'{shift} times'}.",
        fix="Shift once: give the loss ids that are not shifted, or cut scores[:, :-1] and ids[:, 1:] once",
        cause="The labels were shifted before the loss and once more in it.",
        since=call,
        step=twice[min(len(twice), 3) - 1][0],
        evidence={"shift": shift, "batches": len(twice)},
    )


def _not_shifted(run: Run, batches: float) -> Iterator[Found]:
    """Targets that a model which looks back only is given as its inputs: it has nothing to predict."""
    for probed in run.answers("time", "no"):
        calls = [one for one in run.of(LossCall) if one.root == probed.root and one.shift is not None]
        if len(calls) < batches or any(one.shift or one.classes < 2 for one in calls):
            continue
        if not probed.evidence.get("back") or probed.evidence.get("shifted"):
            continue  # a tagger may look at each token alone, and a decoder may shift its tokens itself
        yield Found(
            text=f"The targets of {calls[0].function} are the tokens that the model is given at the same positions: "
            "it has nothing to predict and learns to copy its input.",
            fix="loss over scores[:, :-1] and ids[:, 1:]  # each position predicts the next token",
            cause="Inputs and targets were cut from the same tokens, without the shift by one.",
            since=calls[0],
            evidence={"shift": 0, "batches": len(calls)},
        )


_NEARLY_ALL = 0.1  # of the loss of a constant guess
_RANGES = {"relu": (0.0, math.inf), "sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "tanh": (-1.0, 1.0)}


@rule(
    "AB608", "OUTPUT_RANGE", "warning",
    explains=(
        *("LR_TOO_LOW", "DEAD_UNITS", "VANISHING", "SATURATED", "INPUT_IGNORED", "CANNOT_FIT_BATCH", "INPUT_SCALE"),
        "LABELS_UNRELATED",
    ),
)  # fmt: skip
def output_range(
    run: Run, *, outside: float = Limit(0.25, "standard deviations of the targets; less may be noise")
) -> Iterator[Found]:
    """Outputs that can't be what the targets are."""
    yield from say(run, "AB608")
    walks = [{pair[1]: pair[0] for pair in (*walk.doubled, *walk.activated)} for walk in run.of(Walk) if walk.nodes]
    for (_, _, function), calls in by_line(run).items():
        made = {pairs.get(function, "") for pairs in walks}
        activation = made.pop() if len(made) == 1 else ""
        if activation in _RANGES and function in ("mse_loss", "smooth_l1_loss", "huber_loss"):
            yield from _beyond(run, calls, activation, outside)
        elif activation in ("relu", "tanh") and function in ("cross_entropy", "binary_cross_entropy_with_logits"):
            yield _bounded(run, calls, activation)


def _beyond(run: Run, calls: list[LossCall], activation: str, outside: float) -> Iterator[Found]:
    low, high = _RANGES[activation]
    looked = [
        (one, max(low - one.target_low, one.target_high - high) if one.target_std else 0.0)
        for one in calls
        if one.target_low is not None and one.target_high is not None
    ]
    beyond = [one for one, far in looked if far > outside * (one.target_std or 0.0)]
    is_zero = low == 0 and [one.high for one in calls if one.high is not None][-2:] == [0.0, 0.0]
    if is_zero and len(beyond) < len(looked):
        name = _model(run, calls[0])
        yield Found(
            text=f"The output of {name} goes through a {activation} and is 0 for every input at the end: nothing "
            "before it gets a gradient any more.",
            fix=f"remove the {activation} after the last layer of {name}; F.softplus keeps it positive",
            cause="Where all that goes into a relu is negative, its gradient is 0, and it stays so.",
            since=calls[0],
        )
    if len(beyond) < 2 or len(beyond) < len(looked):
        return
    call, name = beyond[0], _model(run, calls[0])
    limits = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
    yield Found(
        text=f"The output of {name} goes through a {activation} and is {limits}; the targets of {call.function} go "
        f"from {call.target_low:.4g} to {call.target_high:.4g}.",
        fix=f"remove the {activation} after the last layer of {name}, or scale the targets into its range",
        cause=f"What lies outside of the range of a {activation} can't be learned.",
        since=call,
        step=beyond[1],
        evidence={"activation": activation, "low": call.target_low, "high": call.target_high, "batches": len(beyond)},
    )


def _learned_all(run: Run) -> bool:
    """Whether a relu shut out nothing that counts; one behind which classes are lost ends higher."""
    found = outcome(run)
    return found.guess > 0 and 0 <= found.last < _NEARLY_ALL * found.guess


def _bounded(run: Run, calls: list[LossCall], activation: str) -> Found:
    call, name = calls[0], _model(run, calls[0])
    what = "can't be negative" if activation == "relu" else "lie between -1 and 1"
    return Found(
        text=f"The scores that {call.function} gets come out of a {activation}, so they {what}.",
        fix=f"remove the {activation} after the last layer of {name}: {call.function} takes scores of any size",
        cause="Scores at zero get no gradient through a relu."
        if activation == "relu"
        else "Scores so close together can't be sure of anything, so the loss can't become small.",
        since=call,
        evidence={"activation": activation, "calls": len(calls)},
        severity="info" if course(run).fell and (activation != "relu" or _learned_all(run)) else "warning",
    )
