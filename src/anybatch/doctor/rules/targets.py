"""Rules on what targets hold, and on what an evaluation is given: labels, constant targets, inputs of another scale."""

import math
import re
from collections.abc import Iterator
from statistics import fmean, stdev

from anybatch.doctor.rules.answered import say
from anybatch.doctor.rules.registry import LEARNS_NOTHING, Found, Limit, rule
from anybatch.doctor.views.courses import adversarial
from anybatch.doctor.views.naming import by_line, listed, near, root_variable
from anybatch.doctor.views.optimizing import OptimizerView
from anybatch.doctor.views.outcomes import ENOUGH_STEPS, ENOUGH_TARGETS, OF_CLASSES, carries_over, outcome
from anybatch.records.events import Backward, Epoch, Forward, Stepped
from anybatch.records.findings import Place
from anybatch.records.lossfacts import Evaluated, LossCall, Printed, Probed, Walk
from anybatch.records.runs import Run
from anybatch.records.samples import Scored

_LOOKS, _TARGETS = 5, 100
"""So many calls, and targets in them, are looked at before all are said to be of one class."""

_NAMED, _GUESSING = 8, 0.5  # classes, and an accuracy that is not of what was learned

_OF_TRUTH = ("binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss")


@rule("AB656", "LABELS_UNRELATED", "warning", explains=(*LEARNS_NOTHING, "LR_TOO_LOW"))
def labels_unrelated(
    run: Run, *, flat: float = Limit(0.95, "of a constant guess, in the first pass over the data")
) -> Iterator[Found]:
    """Labels of other inputs."""
    torn = list(say(run, "AB656"))
    yield from torn
    yield from _terms_apart(run, flat)
    for probed in run.answers("labels") if not torn else ():
        word = outcome(run).word
        same = run.answers("related", "no") if word == "undecided" and not any(run.of(Scored)) else ()
        texts = bool(probed.evidence.get("texts"))  # of which a small copy may know too little
        gained = [float(one.evidence["others"]) - float(one.evidence["loss"]) - float(one.evidence["spread"])
                  for one in same if texts and "spread" in one.evidence]  # fmt: skip
        same = () if any(one > 0 for one in gained) else same
        is_new = probed.evidence.get("fresh") or texts
        if (word == "learning" and not _at_first(run) > flat) or (is_new and word != "not learning" and not same):
            continue
        if texts and any(True for _ in run.answers("rate")):
            continue
        of_numbers = "classes" not in probed.evidence  # what is learned may be finer than the samples that were kept
        if of_numbers and (word == "learning" or adversarial(run)):
            continue
        seen, call = probed.evidence, next((one for one in run.of(LossCall) if one.root == probed.root), None)
        if word == "learning" and carries_over(run, int(seen.get("classes", 0))):
            continue
        yield Found(
            text=f"The labels have nothing to do with the inputs of {root_variable(run, probed.root)}, as far as "
            f"{seen['samples']} samples show: a copy fitted to two thirds of them has a loss of {seen['held_out']:.4g} "
            f"on the others, and a constant guess one of {seen['guess']:.4g}.",
            fix="order = torch.randperm(len(x)); x, y = x[order], y[order]  # one order for both, wherever they are "
            "shuffled, sorted or filtered",
            cause="Inputs and labels were shuffled independently, or the labels belong to other rows.",
            since=probed,
            where=call,
        )


def _terms_apart(run: Run, flat: float) -> Iterator[Found]:
    """Terms of a loss that is learned otherwise, which are the same with the targets of other rows."""
    word = outcome(run).word
    asks = word != "not learning" and not any(run.of(Scored))
    for probed in run.answers("related", "yes", "no") if asks else ():
        steps = len(OptimizerView(run, int(probed.evidence["optimizer"])).steps)
        enough = steps >= ENOUGH_STEPS and steps * int(probed.evidence["rows"]) >= ENOUGH_TARGETS
        for term in probed.evidence.get("apart", ()) if enough else ():
            place = Place(file=term["file"], line=term["line"])
            is_open = probed.answer == "no" or word != "learning"
            asked = (one.evidence for one in run.answers("rate", "yes", "no"))
            own = (one for one in asked if one["optimizer"] == probed.evidence["optimizer"])
            is_slow = any(one["other_lr"] != one["lr"] for one in own)  # nothing may be learned as yet
            if is_open and (is_slow or not _at_last(run, place) > flat):
                continue
            yield Found(
                text=f"{term['op']}{near(place)} is {term['loss']:.4g} after {steps} steps, and {term['others']:.4g} "
                "with the targets of other rows: they have nothing to do with the inputs.",
                fix="order = torch.randperm(len(x)); x, y = x[order], y[order]  # one order for both",
                cause="Inputs and targets of this term were shuffled independently.",
                since=probed,
                step=0,
                where=place,
                evidence=term,
            )


def _at_last(run: Run, place: Place) -> float:
    """The loss of a line at the end of the run, as a share of that of a constant guess.

    0 where it is not known, or where it still falls, so that more may be learned.
    """
    calls = [one for one in run.of(LossCall) if (one.file, one.line) == (place.file, place.line)]
    values, guesses = [one.value for one in calls if one.value is not None], [one.guess for one in calls if one.guess]
    third = len(values) // 3
    if not guesses or third < _LOOKS:
        return 0.0
    before, late = values[-2 * third : -third], values[-third:]
    falls = fmean(before) - fmean(late) > 2 * stdev(late) / math.sqrt(third)
    return 0.0 if falls else fmean(late) / fmean(guesses)


def _at_first(run: Run) -> float:
    """The loss at the end of the first pass over the data, as a share of that of a constant guess."""
    end = next((one.at for one in run.of(Epoch)), run.facts[-1].at // 3)
    first = [(one.value, one.guess) for one in run.of(LossCall) if one.at < end and one.value is not None and one.guess]
    late = first[len(first) // 2 :]
    return fmean(value / guess for value, guess in late if guess) if len(late) >= 3 else 0.0


@rule("AB612", "TARGETS_CONSTANT", "warning")
def targets_constant(
    run: Run, *, steps: float = Limit(16, "so many alike are no chance"),
    classes: float = Limit(50, "of more a batch may have one"), gone: float = Limit(0.9, "of the loss"),
) -> Iterator[Found]:  # fmt: skip
    """Predictions that are all compared with one value."""
    yield from _told_one_thing(run, steps)
    yield from [*_of_one_class(run, steps, classes, gone), *_of_one_mark(run, steps, gone)] or _all_alike(run)


def _all_alike(run: Run) -> Iterator[Found]:
    probed = outcome(run).unrelated or _of_one_value(run)
    same_line = (one for one in run.of(LossCall) if probed is not None and one.line == probed.line)
    values = {one.target_mean for one in same_line if one.target_mean is not None}
    if probed is not None and probed.evidence.get("alike") and len(values) < 2:
        yield Found(
            text=f"All {probed.evidence['rows']} targets of a batch are the same{near(probed)}, and what was learned "
            "is that one value.",
            fix="print(y.unique(return_counts=True))  # where the targets are made",
            cause="The targets were lost in preprocessing, or the data contain only one kind.",
            since=probed,
        )


def _of_one_value(run: Run) -> Probed | None:
    """What was answered of the rows where every target that was looked at in a run that is long enough is the same."""
    known = [one for one in run.of(LossCall) if one.target_mean is not None and not one.classes]
    firm = len(known) >= _LOOKS and sum(one.items for one in known) >= _TARGETS
    same = firm and all(not one.target_std and one.target_mean == known[0].target_mean for one in known)
    return next(iter(run.answers("related", "no")), None) if same else None


def _of_one_class(run: Run, steps: float, classes: float, gone: float) -> Iterator[Found]:
    for same in by_line(run, lambda one: one.function in ("cross_entropy", "nll_loss")).values():
        known = [(one, one.value) for one in same if one.target_classes >= 0 and one.value is not None]
        looked = sum(one.items for one, _ in known)
        if len(same) < steps or len(known) < _LOOKS or looked < _TARGETS or known[0][0].classes < 2:
            continue
        first, stays = known[0][0], outcome(run).word == "not learning"  # as of pairs, whose scores are of each other
        is_one = all(one.target_classes == 1 and one.target_mean == first.target_mean for one, _ in known)
        if is_one and (stays or (first.classes <= classes and known[-1][1] < (1 - gone) * known[0][1])):
            yield Found(
                text=f"All targets of {first.function} in the run are of class {first.target_mean or 0:g}.",
                fix="print(y.unique(return_counts=True))  # where the labels are made",
                cause="The labels were lost in preprocessing, or the data contain only one class.",
                since=first,
                evidence={"calls": len(known)},
            )


def _of_one_mark(run: Run, steps: float, gone: float) -> Iterator[Found]:
    """Of the one loss of a run that compares scores with marks of 0 and 1."""
    lines = by_line(run, lambda one: one.function.startswith("binary"))
    if any(kind.startswith("SubBackward") for walk in run.of(Walk) for kind in walk.kinds):
        return  # scores that are differences, as those of pairs, are all to be positive
    for (_, _, function), same in lines.items() if len(lines) == 1 and not adversarial(run) else ():
        known = [(one, one.value) for one in same if one.target_low is not None and one.value is not None]
        if len(same) < steps or len(known) < _LOOKS:
            continue
        mark, enough = known[0][0].target_low, sum(one.items for one, _ in known) >= _TARGETS
        is_one = all(one.target_low == one.target_high == mark for one, _ in known)
        if mark in (0, 1) and is_one and enough and known[-1][1] < (1 - gone) * known[0][1]:
            yield Found(
                text=f"All targets of {function} in the run are {mark:g}: with that as every prediction it is 0, "
                "whatever the input.",
                fix="labels = torch.cat([torch.ones(n), torch.zeros(k * n)])  # with pairs that were drawn as others",
                cause="The data hold what was seen, such as clicks, and nothing that was not.",
                since=known[0][0],
                evidence={"calls": len(known)},
            )


def _told_one_thing(run: Run, steps: float) -> Iterator[Found]:
    windows: dict[int, list[list[LossCall]]] = {}
    calls: list[LossCall] = []
    for fact in run.of(LossCall, Stepped):
        if isinstance(fact, LossCall):
            calls.append(fact)
        elif isinstance(fact, Stepped):
            windows.setdefault(fact.optimizer, []).append(calls)
            calls = []
    for number, found in windows.items():
        known = [window for window in found if window and all(one.target_mean is not None for one in window)]
        if len(known) < 3 or len(found) < steps:
            continue
        first = known[0][0]
        same = all(
            one.function in _OF_TRUTH and not one.target_std and one.target_mean == first.target_mean
            for window in known
            for one in window
        )
        losses = [sum(one.value or 0.0 for one in window) for window in found]
        third = len(losses) // 3
        vanishes = fmean(losses[-third:]) < 0.5 * fmean(losses[: max(third // 3, 1)])
        is_residual = first.function == "mse_loss" and not first.target_mean
        if same and vanishes and not is_residual and all(len(window) >= 2 for window in found):
            yield Found(
                text=f"All {len(known[0])} losses for which {OptimizerView(run, number)} steps compare with "
                f"{first.target_mean:g}, at each step: nothing tells the inputs apart.",
                fix="torch.zeros_like(...) as the target of one of them",
                cause="The same constant is given as the target of both kinds of inputs.",
                since=first,
                where=known[0][-1],
                evidence={"value": first.target_mean, "calls": len(known[0])},
            )


@rule("AB680", "CLASS_UNCOUNTED", "warning")
def class_uncounted(
    run: Run, *, late: float = Limit(0.75, "of the run, where targets were looked at last: others may come later")
) -> Iterator[Found]:
    """Classes that the model has an output for and never learns."""
    yield from say(run, "AB680")
    calls = {(one.file, one.line, one.classes): one for one in run.of(LossCall) if one.guess is not None}
    printed = re.search(r'prints "[^"]*" ([0-9.e-]+)', outcome(run).said)
    is_guessing = printed is not None and 0 <= float(printed[1]) <= _GUESSING
    tokens = {one.shape[0] for one in run.parameters.values() if one.role == "embedding"}
    for one in calls.values():  # the last ones, which know most; a token may only begin a sequence, or mask a place
        if one.absent and one.classes not in tokens and one.step >= late * run.steps:
            several = f"class {one.absent[0]}"
            if len(one.absent) > 1:
                several = f"classes {listed(map(str, one.absent[:_NAMED]))}"
            yield Found(
                text=f"No target of {one.function}{near(one)} examined is of {several}, of {one.classes}, "
                "and all others occur about equally often: the model has outputs for classes it never learns.",
                fix="order = torch.randperm(len(x)); x, y = x[order], y[order]  # before the data are split",
                cause="If the evaluation data have these classes, the data were sorted by class when they were split; "
                "if not, the model has more outputs than there are classes.",
                since=one,
                step=0,
                evidence={"absent": list(one.absent[:_NAMED]), "classes": one.classes},
                severity="" if is_guessing else "info",
            )


_HELD_OUT = frozenset({"val", "valid", "validation", "test", "testing", "eval", "evaluation"})
_SHARES = frozenset({"iou", "miou", "dice", "jaccard"})
_LOSSES = frozenset(
    {"loss", "error", "err", "neg", "negative", "diff", "delta", "gain", "change", "drop", "improvement", "vs", "log"}
)
_OF_ACCURACIES = frozenset(  # beside which another word may say that a low one is meant, as "adversarial" or "gap" does
    {"acc", "accuracy", "train", "training", "val", "valid", "validation", "test", "testing", "dev", "eval",
     "evaluation", "epoch", "step", "iter", "iteration", "batch", "set", "data", "final", "best", "the", "is", "of",
     "on", "model", "overall", "average", "avg", "current", "loss", "percent"}
)  # fmt: skip
_LATE = 3  # values, of which -1 stands for what was not measured yet


@rule("AB655", "EVALUATION_INPUTS", "warning")
def evaluation_inputs(
    run: Run, *, larger: float = Limit(5, "times the deviation of the targets of the training"),
    like: float = Limit(2.5, "of these deviations: predictions of the scale of the training"),
    calls: float = Limit(3, "by which the scale of the training is known"),
    alike: float = Limit(20, "targets of one value are no accident where those of the training differ"),
) -> Iterator[Found]:  # fmt: skip
    """Evaluations whose inputs, targets, or outputs have another scale than those of the training."""
    yield from say(run, "AB655")
    yield from _no_shares(run)
    trained = [(one.target_mean, one.target_std) for one in run.of(LossCall) if one.target_std and not one.classes]
    stds = sorted(std for mean, std in trained if std and mean is not None)
    if len(stds) < calls or stds[-1] > 2 * stds[0]:
        return
    mean, std = trained[-1][0] or 0.0, stds[len(stds) // 2]
    last = {(one.file, one.line): one for one in run.of(Evaluated) if one.scales}
    for one in last.values():
        made_mean, made_std, target_mean, target_std = one.scales
        mine = [each for each in run.of(Evaluated) if (each.file, each.line) == (one.file, one.line) and each.items]
        items = max((each.items for each in mine), default=0)
        is_one = all(each.guess is not None and each.guess <= 1e-9 * (1 + target_mean**2) for each in mine)
        if not target_std and is_one and items >= alike:
            yield Found(
                text=f"All {items} targets of {one.function} in the evaluation{near(one)} are {target_mean:g}, and "
                f"the training targets have a standard deviation of {std:.3g}.",
                fix="print(y.std())  # where the evaluation targets are made",
                cause="The evaluation targets were lost in preprocessing: it does not measure an error.",
                since=one,
                evidence={"value": target_mean, "items": items, "std": std},
            )
        if target_std < larger * std or abs(made_mean - mean) > like * std or made_std > like * std:
            continue
        yield Found(
            text=f"The targets of {one.function} in the evaluation{near(one)} have mean {target_mean:.3g} and standard "
            f"deviation {target_std:.3g}, and its predictions {made_mean:.3g} and {made_std:.3g}, like the training "
            f"targets ({mean:.3g} and {std:.3g}).",
            fix="prediction = prediction * std + mean  # with those of the training targets",
            cause="The predictions are not put back into the units of the targets, or the targets are not scaled.",
            since=one,
            where=(one.file, one.line),
            evidence={"std": std, "std_evaluated": target_std, "std_predicted": made_std},
        )


def _no_shares(run: Run) -> Iterator[Found]:
    """Overlaps that a script prints of its evaluation, and that are negative at the end."""
    for one in run.of(Printed):
        words = set(re.findall("[a-z0-9]+", one.label.lower()))
        late = one.values[-_LATE:]
        if not words & _HELD_OUT or not words & _SHARES or words & _LOSSES or max(late) >= 0 or -1 in late:
            continue
        yield Found(
            text=f'Line {one.line} prints "{one.label}" {one.values[-1]:.4g}, and no overlap of masks is negative: '
            "it is computed from raw model outputs, not from masks.",
            fix="prediction = (torch.sigmoid(model(x)) > 0.5).float()  # before it is compared with the masks",
            cause="The training loss takes logits and includes the sigmoid, and the evaluation has none.",
            since=next(run.of(Backward), 0),
            where=(one.file, one.line),
            evidence={"label": one.label, "value": one.values[-1], "lowest": min(one.values)},
        )


@rule("AB684", "METRIC_BELOW_CHANCE", "warning", needs=(LossCall,))
def metric_below_chance(
    run: Run, *, right: float = Limit(0.7, "the mean probability of what is right, as the loss at the end has it"),
    below: float = Limit(0.5, "of what guessing gives, at most, in all that was printed"),
    times: float = Limit(3, "printed after so many different numbers of steps"),
) -> Iterator[Found]:  # fmt: skip
    """Accuracies that a script prints and that stay far below guessing, while its loss is that of one that is right.

    Only of losses with one target for each row: of sequences, whole ones may be meant.
    """
    every = [one for one in run.of(LossCall) if one.function in OF_CLASSES]
    call = next((one for one in reversed(every) if one.items >= 0), None)
    rows = next((one.rows for one in reversed(list(run.of(Forward))) if one.grad), -1)
    if call is None or call.reduction != "mean" or call.items != rows or call.value is None:
        return
    if len({one.classes for one in every}) > 1:
        return  # of several heads
    likely, chance = math.exp(-abs(call.value)), 1 / max(call.classes, 2)
    for one in run.of(Printed) if likely > right else ():
        words = set(re.findall("[a-z]+", one.label.lower()))
        best, seen = max(one.values), {step for step in one.steps if step > 0}
        if not words & {"acc", "accuracy"} or not words <= _OF_ACCURACIES or len(seen) < times:
            continue
        if 0 < best < below * chance and min(one.values) >= 0:
            yield Found(
                text=f'Line {one.line} prints "{one.label}" {one.values[-1]:.4g}, {best:.4g} at most, and guessing '
                f"is right {chance:.0%} of the time. The loss ends at {call.value:.3g}, like that of a model that is "
                f"right {likely:.0%} of the time: the counting is wrong, not the model.",
                fix="correct += (prediction == y).sum().item(); total += len(y)  # and correct / total at the end",
                cause="The correct predictions of one batch are divided by the size of the whole set, or predictions "
                "and targets are compared with other class numbers or shapes.",
                since=next(run.of(Backward), 0),
                where=(one.file, one.line),
                evidence={"label": one.label, "value": one.values[-1], "highest": best, "loss": call.value},
            )


@rule("AB663", "LABELS_RENUMBERED", "warning", explains=("TARGET_GIVEN",), needs=(Evaluated,))
def labels_renumbered(
    run: Run, *, rows: float = Limit(50, "of an evaluation, fewer may agree by accident"),
    renamed: float = Limit(0.8, "of the rows, right under other numbers: the classes are told apart"),
    gained: float = Limit(0.4, "of the rows, more than under their own numbers"),
) -> Iterator[Found]:  # fmt: skip
    """Evaluations whose targets name the classes by other numbers than the training did."""
    last = {(one.file, one.line): one for one in run.of(Evaluated) if one.rows}
    for one in last.values():
        if one.rows < rows or one.renamed < renamed or one.renamed - one.right < gained:
            continue
        names = ", ".join(f"{target} is class {given}" for target, given in one.names)
        yield Found(
            text=f"The labels of the evaluation{near(one)} number the classes otherwise than those of the training: "
            f"{one.right:.0%} of {one.rows} rows are right, and {one.renamed:.0%} if label {names}.",
            fix="number the classes once, from the training data, and use that for both",
            cause="Each set of data numbered its own classes, and they do not have the same ones or the same order.",
            since=one,
            where=(one.file, one.line),
            evidence={"rows": one.rows, "right": one.right, "renamed": one.renamed},
        )


@rule("AB681", "EVALUATION_SCALED", "warning", needs=(Forward,))
def evaluation_scaled(
    run: Run, *, share: float = Limit(0.9, "of the columns that are standardised in the training data"),
    columns: float = Limit(2, "by no chance; of data with one column that one"),
) -> Iterator[Found]:  # fmt: skip
    """Evaluation sets that were scaled with statistics of their own."""
    found = next(_by_loaders(run, share, columns), None) or next(say(run, "AB681"), None)
    if found is not None:
        yield found


def _by_loaders(run: Run, share: float, columns: float) -> Iterator[Found]:
    trained, evaluated = _loaders(run)
    for one in trained:
        exact, of, mark = one.standardised
        for other in evaluated if exact >= min(columns, of) > 0 else ():
            own, width, its = other.standardised
            if width != of or its == mark or own < min(columns, of) or own < share * exact:
                continue
            yield Found(
                text=f"The {other.rows} rows that are evaluated{near(other)} have mean 0 and standard deviation 1 in "
                f"{own:.0f} of {width:.0f} columns, as the {one.rows} of the training have: each set was scaled with "
                "statistics of its own.",
                fix="scaler.fit_transform(train), then scaler.transform(test); or mean, std = train.mean(0), "
                "train.std(0) for both",
                cause="The scaling was fitted anew to the data of the evaluation.",
                since=other,
                evidence={"columns": own, "of": width, "rows": other.rows, "trained_rows": one.rows},
            )


def _loaders(run: Run) -> tuple[list[Epoch], list[Epoch]]:
    """The first starts of loaders whose sets were looked at: of those that are trained on, and of the others.

    A loader is one of the others if something is called without a gradient while it runs, and no backward runs.
    """
    begun: dict[int, Epoch] = {}
    latest = -1
    trained, called = set[int](), set[int]()
    for one in run.of(Epoch, Forward, Backward):
        if isinstance(one, Epoch):
            latest = -1 if one.ended else one.loader
            if not one.ended and len(one.standardised) == 3:
                begun.setdefault(one.loader, one)
        elif isinstance(one, Backward):
            trained.add(latest)
        elif isinstance(one, Forward) and not one.grad:
            called.add(latest)
    mine = [one for number, one in begun.items() if number in trained]
    return mine, [one for number, one in begun.items() if number in called - trained]
