"""Rules on gradients that are written by hand; their codes are of the family graph."""

from collections.abc import Iterator

from anybatch.doctor.rules.asked import answers, asked_place, began
from anybatch.doctor.rules.naming import at_line
from anybatch.doctor.rules.registry import rule
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run


@rule(
    "AB210",
    "BACKWARD_OF_MODULE",
    "warning",
    "A module defines a backward, which autograd never calls",
    """
## What is seen

The class of a module has a method `backward` that takes a gradient and returns one.

## Why it matters

autograd differentiates what `forward` did, and asks a module nothing. The gradient is not reversed, scaled or replaced.

## What to change

```python
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad
```

and `Reverse.apply(x)` in the module's `forward`.

## When it is fine

A `backward` that calls that of a loss, as trainers have, is silent.
""",
)
def backward_of_module(run: Run) -> Iterator[Finding]:
    """Methods that look like a rule of differentiation."""
    for probed in answers(run, "method backward"):
        cls = probed.evidence["cls"]
        yield Finding(
            message=f"{cls}.backward{at_line(probed.file, probed.line)} is never called: {cls} is a module, and "
            "autograd asks only a torch.autograd.Function for its gradient.",
            place=asked_place(run, probed),
            fix=f"make it a torch.autograd.Function with static forward(ctx, x) and backward(ctx, grad), and call "
            f"{cls}.apply(x)",
            cause="Only the graph of what forward did is differentiated.",
            evidence=probed.evidence,
            at=began(run),
        )


@rule(
    "AB211",
    "FUNCTION_GRADIENT",
    "error",
    "The backward of an own autograd.Function does not follow the gradient that it is given",
    """
## What is seen

The `backward` of a `torch.autograd.Function` of the run was called on a copy with a gradient, with twice that one and
with minus that one. What came back was not twice as much, or not the opposite.

## Why it matters

A derivative is linear in the gradient that comes in. One that leaves it out is right only where the function is the
last of the loss with a weight of 1; a sign or a factor behind it is lost.

## What to change

```python
@staticmethod
def backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad * derivative(x)
```

## When it is fine

Functions that clip or quantise gradients on purpose: those that only bound what comes in are silent.
""",
)
def function_gradient(run: Run) -> Iterator[Finding]:
    """Backwards that don't multiply with what comes in."""
    for probed in answers(run, "function gradient"):
        cls = probed.evidence["cls"]
        yield Finding(
            message=f"{cls}.backward{at_line(probed.file, probed.line)} does not follow the gradient that it is given: "
            f"{probed.detail}.",
            place=Place(file=probed.file, line=probed.line),
            fix="multiply what backward returns with the gradient that comes in, such as grad * ctx.saved_tensors[0]",
            cause="The gradient that comes in is left out of the product.",
            evidence=probed.evidence,
            at=began(run),
        )
