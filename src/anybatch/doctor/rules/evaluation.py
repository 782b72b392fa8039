"""Rules on what an evaluation is given: labels of other numbers."""

from collections.abc import Iterator

from anybatch.doctor.rules.registry import Found, Limit, rule
from anybatch.doctor.views.naming import near
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
