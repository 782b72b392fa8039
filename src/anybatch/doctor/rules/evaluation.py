"""Rules on what an evaluation is given: labels of other numbers, and inputs scaled by themselves."""

from collections.abc import Iterator

from anybatch.doctor.rules.answered import say
from anybatch.doctor.rules.registry import Found, Limit, rule
from anybatch.doctor.views.naming import near
from anybatch.records.events import Backward, Epoch, Forward
from anybatch.records.lossfacts import Evaluated
from anybatch.records.runs import Run


@rule("AB663", "LABELS_RENUMBERED", "warning", needs=(Evaluated,))
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
