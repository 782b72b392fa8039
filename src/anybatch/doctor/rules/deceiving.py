"""Rules on what looks well and is not: a class that never counts, and an evaluation set scaled by itself."""

from collections.abc import Iterator

from anybatch.doctor.rules.registry import Found, Limit, rule
from anybatch.doctor.views.asked import answers
from anybatch.doctor.views.naming import near
from anybatch.records.events import Backward, Epoch, Forward
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.runs import Run

_SCALED_ONCE = (
    "scaler.fit_transform(train), then scaler.transform(test); or mean, std = train.mean(0), train.std(0) for both"
)
_WAYS = {
    "ignore_index": ("ignore_index={number}", "leave ignore_index out; -100 marks what has no label"),
    "weight": ("its weight is 0", "give class {number} a weight above 0"),
    "mask": ("the loss leaves its rows out", "take the mask off, or mark what has no label with -100"),
}


@rule("AB680", "CLASS_UNCOUNTED", "warning", needs=(Probed,))
def class_uncounted(run: Run) -> Iterator[Found]:
    """Classes that targets are of and the loss never counts."""
    for probed in answers(run, "uncounted")[:1]:
        seen = probed.evidence
        call = next((one for one in run.of(LossCall) if one.root == probed.root), None) if not probed.file else None
        why, fix = (one.format(number=seen["number"]) for one in _WAYS[str(seen["by"])])
        yield Found(
            text=f"{seen['share']:.0%} of the targets{near(probed)} are of class {seen['number']}, of "
            f"{seen['classes']}, and none of them counts: {why}. The model has an output for it and never learns it.",
            fix=fix,
            cause="The number that stands for what is not known, or for padding, is that of a class.",
            since=call or probed,
            evidence=seen,
        )


@rule("AB681", "EVALUATION_SCALED", "warning", needs=(Forward,))
def evaluation_scaled(
    run: Run, *, share: float = Limit(0.9, "of the columns that are standardised in the training data"),
    columns: float = Limit(2, "by no chance; of data with one column that one"),
) -> Iterator[Found]:  # fmt: skip
    """Evaluation sets that were scaled with statistics of their own."""
    found = next(_by_loaders(run, share, columns), None) or next(_by_inputs(run), None)
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
                fix=_SCALED_ONCE,
                cause="The scaling was fitted anew to the data of the evaluation.",
                since=other,
                evidence={"columns": own, "of": width, "rows": other.rows, "trained_rows": one.rows},
            )


def _by_inputs(run: Run) -> Iterator[Found]:
    for probed in answers(run, "scaled apart"):
        seen = probed.evidence
        yield Found(
            text=f"The {seen['rows']} rows that are evaluated{near(probed)} have mean 0 and standard deviation 1 in "
            f"each of {seen['columns']} columns, and no row of the training is among them: they were scaled with "
            "statistics of their own.",
            fix=_SCALED_ONCE,
            cause="The scaling was fitted anew to the data of the evaluation.",
            since=probed,
            evidence=seen,
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
