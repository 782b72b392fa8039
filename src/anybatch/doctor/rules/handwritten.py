"""Rules on gradients that are written by hand; their codes are of the family graph."""

from collections.abc import Iterator

from anybatch.doctor.rules.asked import answers, asked_place, began
from anybatch.doctor.rules.naming import at_line
from anybatch.doctor.rules.registry import rule
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run


@rule("AB210", "BACKWARD_OF_MODULE", "warning")
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


@rule("AB211", "FUNCTION_GRADIENT", "error")
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
