"""Rules of the family probes: what questions to a copy of the model have shown after the run."""

from collections.abc import Iterator

from anybatch.doctor.rules.asked import answers, asked_place, began
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.views.courses import course
from anybatch.doctor.views.measures import (
    NO_SPREAD,
    constant_since,
    latest,
    model_name,
    outputs,
    root_place,
)
from anybatch.records.findings import Finding
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.runs import Run
from anybatch.records.samples import InputSample


@rule("AB801", "BATCH_MIXING", "warning", explains=("CANNOT_FIT_BATCH", "ROWS_TORN"))
def batch_mixing(run: Run) -> Iterator[Finding]:
    """Outputs that depend on other samples."""
    for probed in answers(run, "batch", "yes"):
        name = model_name(run, probed.root)
        where = f" in {probed.module}" if probed.module else ""
        yield Finding(
            message=f"Samples of a batch mix in {name}{where}: an output depends on other samples of the batch"
            + (f" ({probed.detail})." if probed.detail else "."),
            place=asked_place(run, probed),
            fix=f"nn.{probed.evidence['op'].upper()}(..., batch_first=True)  # the samples are along its first dim"
            if probed.evidence.get("op") in ("lstm", "gru")
            else "x.transpose(...) instead of x.view(...) where dims change places; softmax over dim -1, not 0",
            cause="A reshape that tears samples apart, or an operation over dim 0.",
            evidence=probed.evidence,
            step=probed.step,
            at=began(run),
            severity="info" if _is_one_set(run, probed) else "",
        )


def _is_one_set(run: Run, probed: Probed) -> bool:
    """Whether dim 0 is no batch: time comes first, a graph with its edges, or one output for all rows."""
    root = probed.root
    modules = run.roots[root].modules if root in run.roots else ()
    if probed.evidence.get("dim") == 1:
        return False
    if not probed.evidence.get("row_is_sample") and any(
        one.options.get("batch_first") is False for one in modules if one.kind in ("recurrent", "attention")
    ):
        return True
    inputs = [one for one in run.of(InputSample) if one.root == root and one.shape]
    rows = max((one.shape[0] for one in inputs), default=0)
    edges = any(
        (one.dtype == "int64" and len(one.shape) == 2 and one.shape[0] == 2 != rows)
        or (len(one.shape) == 2 and one.shape[0] == one.shape[1] == rows and len(inputs) > 1)
        for one in inputs
    )
    pooled = [output for number, samples in latest(run) if number == root for _, output in outputs(samples)]
    return edges or any(one.shape[:1] not in ((), (rows,)) for one in pooled)


@rule("AB802", "TIME_LEAK", "error", explains=("CANNOT_FIT_BATCH",))
def time_leak(run: Run) -> Iterator[Finding]:
    """Outputs that depend on later inputs in a model of the next token."""
    shifts = {one.shift for one in run.of(LossCall) if one.shift is not None}
    if 1 not in shifts:
        return
    for probed in answers(run, "time", "yes"):
        where = f" through {probed.module}" if probed.module else ""
        yield Finding(
            message=f"{model_name(run, probed.root)} is trained to predict the next token and sees it{where}"
            + (f" ({probed.detail})." if probed.detail else "."),
            place=asked_place(run, probed),
            fix="F.scaled_dot_product_attention(q, k, v, is_causal=True), or a mask with -inf above the diagonal",
            cause="Attention without a causal mask, a convolution padded on both sides, or a bidirectional layer.",
            evidence=probed.evidence,
            step=probed.step,
            at=began(run),
        )


def ignores_input(probed: Probed) -> bool:
    """Whether a question has shown that the output does not depend on the input.

    Args:
        probed: any question.
    """
    if probed.probe != "input" or probed.answer == "unknown":
        return False
    spread = probed.evidence.get("spread")
    return probed.answer == "no" if spread is None else float(spread) < NO_SPREAD


@rule("AB803", "INPUT_IGNORED", "warning", explains=("CANNOT_FIT_BATCH",))
def input_ignored(run: Run) -> Iterator[Finding]:
    """Models that give a constant."""
    losses = course(run)
    if losses.converged or losses.diverged or not losses.finite:
        return
    for probed in run.of(Probed):
        if not ignores_input(probed):
            continue
        begin = constant_since(run, probed.root)
        where = f": it is lost in {probed.module}" if probed.module else ""
        yield Finding(
            message=f"The output of {model_name(run, probed.root)} does not depend on its input{where}.",
            place=asked_place(run, probed) if probed.line else root_place(run, probed.root, probed.module),
            fix="print the spread over the batch behind each module, and look where it becomes 0",
            cause="Something between input and output throws the data away, or units have died.",
            evidence=probed.evidence,
            step=probed.step,
            at=begin.at if begin else probed.at,
        )
        return
    for root, _ in latest(run):
        found = constant_since(run, root)
        if found is None:
            continue
        yield Finding(
            message=f"The output of {model_name(run, root)} is the same for all inputs since step {found.step}: its "
            f"spread over the batch is {found.last:.2g}"
            + (f", and was {found.first:.2g}." if found.first > found.last else "."),
            place=root_place(run, root, found.module),
            fix="print the spread over the batch behind each module, and look where it becomes 0",
            cause="Something between input and output throws the data away, or units have died.",
            evidence={"spread_first": found.first, "spread_last": found.last},
            step=found.step,
            at=found.at,
        )


@rule("AB804", "INITIAL_LOSS", "info")
def initial_loss(run: Run) -> Iterator[Finding]:
    """First losses far above the prior."""
    for probed in answers(run, "prior", "no"):
        yield Finding(
            message=f"The first loss of {model_name(run, probed.root)} is far above that of a constant guess"
            + (f": {probed.detail}." if probed.detail else "."),
            place=asked_place(run, probed),
            fix="nn.init.zeros_ of the last layer's weight, and its bias at the mean of the targets or log frequencies",
            cause="The outputs of the last layer are too large, or its bias is far off.",
            evidence=probed.evidence,
            step=0,
            at=began(run),
        )


@rule("AB805", "CANNOT_FIT_BATCH", "warning")
def cannot_fit_batch(run: Run) -> Iterator[Finding]:
    """Copies that don't learn one batch."""
    for probed in answers(run, "one batch", "no"):
        yield Finding(
            message=f"A copy of {model_name(run, probed.root)} can't fit one batch"
            + (f": {probed.detail}." if probed.detail else "."),
            place=asked_place(run, probed),
            fix="print(x.shape, x.mean(), x.std(), y[:10])  # do the labels belong to the inputs?",
            cause="Labels that don't belong to their inputs, a loss that does not fit, or a model that is too small.",
            evidence=probed.evidence,
            step=probed.step,
            at=probed.at,
        )
