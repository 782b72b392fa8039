"""A rule on what looks well and is not: an evaluation set scaled by itself."""

from collections.abc import Iterator

from anybatch.doctor.rules.answered import say
from anybatch.doctor.rules.registry import Found, Limit, rule
from anybatch.doctor.views.naming import near
from anybatch.records.events import Backward, Epoch, Forward
from anybatch.records.runs import Run


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
