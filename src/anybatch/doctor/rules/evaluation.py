"""Rules on what an evaluation is given: inputs and targets of another scale or scaled by themselves, other labels."""

import re
from collections.abc import Iterator

from anybatch.doctor.rules.answered import say
from anybatch.doctor.rules.registry import Found, Limit, rule
from anybatch.doctor.views.naming import near
from anybatch.records.events import Backward, Epoch, Forward
from anybatch.records.lossfacts import Evaluated, LossCall, Printed
from anybatch.records.runs import Run

_HELD_OUT = frozenset({"val", "valid", "validation", "test", "testing", "eval", "evaluation"})
_SHARES = frozenset({"iou", "miou", "dice", "jaccard"})
_LOSSES = frozenset(
    {"loss", "error", "err", "neg", "negative", "diff", "delta", "gain", "change", "drop", "improvement", "vs", "log"}
)
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
                f"those of the training have a standard deviation of {std:.3g}.",
                fix="print(y.std())  # where the targets of the evaluation are made",
                cause="The targets of the evaluation were lost on the way: what it measures is no error.",
                since=one,
                evidence={"value": target_mean, "items": items, "std": std},
            )
        if target_std < larger * std or abs(made_mean - mean) > like * std or made_std > like * std:
            continue
        yield Found(
            text=f"The targets of {one.function} in the evaluation{near(one)} have mean {target_mean:.3g} and standard "
            f"deviation {target_std:.3g}, and its predictions {made_mean:.3g} and {made_std:.3g}, as the targets of "
            f"the training ({mean:.3g} and {std:.3g}).",
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
            "what is counted are outputs of the model, not the masks that they stand for.",
            fix="prediction = (torch.sigmoid(model(x)) > 0.5).float()  # before it is compared with the masks",
            cause="The loss of the training takes scores and has the sigmoid in it, and the evaluation has none.",
            since=next(run.of(Backward), 0),
            where=(one.file, one.line),
            evidence={"label": one.label, "value": one.values[-1], "lowest": min(one.values)},
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
            fix="make the numbers of the classes once, from the training data, and use them for both",
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
