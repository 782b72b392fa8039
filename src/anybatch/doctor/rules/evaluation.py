"""Rules on what an evaluation is given: labels of other numbers, rows that were scaled by their own statistics."""

from collections.abc import Iterator

from anybatch.doctor.rules.registry import Found, Limit, rule
from anybatch.doctor.views.asked import answers
from anybatch.doctor.views.naming import near, root_variable
from anybatch.records.lossfacts import Evaluated, Probed
from anybatch.records.runs import Run


@rule("AB662", "EVALUATION_SCALED_APART", "warning", needs=(Probed,))
def evaluation_scaled_apart(run: Run) -> Iterator[Found]:
    """Tables of an evaluation whose columns have mean 0 and deviation 1 of their own."""
    for probed in answers(run, "scaled apart"):
        seen = probed.evidence
        yield Found(
            text=f"Each column of the {seen['rows']} rows that {root_variable(run, probed.root)} is evaluated "
            f"on{near(probed)} has mean 0 and deviation 1 of its own, and no row of the training is among them.",
            fix="x_test = scaler.transform(x_test)  # fitted to the training rows, not fit_transform",
            cause="They were scaled by their own statistics, so that one value is another number than in training.",
            since=probed,
        )


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
