"""Rules on how a loss takes the rows of a batch; their codes are of the family loss."""

from collections.abc import Iterator

from anybatch.doctor.rules.asked import answers, began
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.views.naming import at_line
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run


@rule("AB610", "LOSS_MIXED_REDUCTION", "warning")
def loss_mixed_reduction(run: Run) -> Iterator[Finding]:
    """Sums over the batch that are added to means."""
    for probed in answers(run, "sums")[:1]:
        yield Finding(
            message=f"The loss adds a sum over the batch to a mean over it{at_line(probed.file, probed.line)}: with "
            f"each of {probed.evidence['rows']} rows twice, one term doubles and the other stays.",
            place=Place(file=probed.file, line=probed.line),
            fix="take the mean over the batch of both terms, such as kl.sum(-1).mean() for kl.sum()",
            cause="One term is summed over all rows, so that it grows with the batch.",
            evidence=probed.evidence,
            at=began(run),
        )


@rule("AB611", "ROWS_TORN", "error", explains=("LOSS_CONSTANT", "CANNOT_FIT_BATCH", "INPUT_IGNORED"))
def rows_torn(run: Run) -> Iterator[Finding]:
    """Views that mix samples between the model and the loss."""
    for probed in answers(run, "rows")[:1]:
        yield Finding(
            message=f"Rows and labels are torn apart by {probed.evidence['op']}{at_line(probed.file, probed.line)}"
            f": permuted together, they give a loss of {probed.evidence['permuted']:.4g} instead of "
            f"{probed.evidence['loss']:.4g} ({probed.detail}).",
            place=Place(file=probed.file, line=probed.line),
            fix="bring the dims into order before the view: scores.movedim(1, -1).reshape(-1, scores.shape[1])",
            cause="A view reads memory in its order, whatever the dims mean.",
            evidence=probed.evidence,
            at=began(run),
        )
