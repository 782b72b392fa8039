"""Rules on how a loss takes the rows of a batch; their codes are of the family loss."""

from collections.abc import Iterator

from anybatch.doctor.rules.asked import answers, began
from anybatch.doctor.rules.naming import at_line
from anybatch.doctor.rules.registry import rule
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run


@rule(
    "AB610",
    "LOSS_MIXED_REDUCTION",
    "warning",
    "A loss adds a mean over the batch and a sum over it",
    """
## What is seen

A step of the run was run again on a copy with each row of the batch twice. One term of a sum in the loss stayed what it
was, as a mean does, and the other one was twice as large, as a sum over the batch is.

## Why it matters

How much the second term counts depends on the size of the batch: it drowns the first one in large batches.

## What to change

Take both as means, or both as sums, and give the second term a weight of its own:

```python
kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(-1).mean()
loss = F.mse_loss(output, x) + 0.1 * kl
```

## When it is fine

Penalties of weights don't depend on the batch and are silent; so are sums over features that are then averaged.
""",
)
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


@rule(
    "AB611",
    "ROWS_TORN",
    "error",
    "Predictions and labels are not those of one sample",
    """
## What is seen

A step of the run was run again on a copy with the rows of inputs and labels permuted together. The loss changed, and
the first result that was no longer the same rows in another order came out of a `view` or `reshape`, or out of a
comparison of two tensors whose rows stand in another order.

## Why it matters

Entries of several samples, or predictions and the labels of others, are compared. There is nothing to learn in that.

## What to change

`view` and `reshape` read memory in its order. Bring the dims into order first:

```python
flat = scores.movedim(1, -1).reshape(-1, scores.shape[1])  # (batch, class, h, w) to (batch * h * w, class)
target = target.reshape(-1)
```

## When it is fine

Rows that belong together in pairs or groups are recognised by what splits them, and silent.
""",
    explains=("LOSS_CONSTANT", "CANNOT_FIT_BATCH", "INPUT_IGNORED"),
)
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
