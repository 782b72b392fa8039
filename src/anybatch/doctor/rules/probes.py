"""Rules of the family probes: what questions to a copy of the model have shown after the run."""

from collections.abc import Iterator

from anybatch.doctor.rules.registry import RUNS_AWAY, Found, rule
from anybatch.doctor.views.courses import course
from anybatch.doctor.views.measures import NO_SPREAD, constant_since, latest, outputs
from anybatch.doctor.views.naming import first_call, root_variable
from anybatch.doctor.views.outcomes import outcome
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.runs import Run
from anybatch.records.samples import InputSample

_LAYERS = {"lstm": "LSTM", "gru": "GRU", "multi_head_attention_forward": "MultiheadAttention"}
_KINDS = dict.fromkeys(_LAYERS, "layer") | dict.fromkeys(("softmax", "log_softmax", "normalize"), "along")
_MIXING = {
    "layer": ("nn.{op}(..., batch_first=True)  # the samples are along its first dim", "It takes dim 0 for the time."),
    "second": (
        "nn.{op}(...)  # without batch_first, for an input of (time, batch, features)",
        "With batch_first=True it takes dim 1 for the time, and there are the samples.",
    ),
    "along": ("{op}(..., dim=-1): over the features of each sample, not over the batch", "{op} runs over dim 0."),
    "moved": (
        "x.transpose(...) instead of x.view(...) where dims are swapped; softmax over dim -1, not 0",
        "A reshape that mixes samples, or an operation over dim 0.",
    ),
}
_RESHAPING = ("view", "reshape", "flatten")
_LEAKS = {
    "seen": (
        "F.scaled_dot_product_attention(q, k, v, is_causal=True), or a mask with -inf above the diagonal",
        "Attention without a causal mask, a convolution padded on both sides, or a bidirectional layer.",
    ),
    "series": (
        "nn.LSTM(..., bidirectional=False); attention with is_causal=True; convolutions padded on the left alone",
        "A bidirectional layer, attention without a causal mask, or a convolution padded on both sides.",
    ),
    "moved": (
        "y.transpose(1, 2).reshape(batch, time, -1)  # of heads after the batch: time moves back to dim 1 first",
        "A reshape puts numbers of several positions into one, as where the heads still come before the time.",
    ),
}


@rule("AB801", "BATCH_MIXING", "warning", explains=(*RUNS_AWAY, "ROWS_TORN"), needs=(Probed,))
def batch_mixing(run: Run) -> Iterator[Found]:
    """Outputs that depend on other samples."""
    for probed in run.answers("batch"):
        if probed.evidence.get("equal_sizes") and outcome(run).word != "not learning":
            continue  # a loader may put the time first
        where, op = f" in {probed.module}" if probed.module else "", str(probed.evidence.get("op", ""))
        is_second = _takes_samples_for_time(run, probed)
        fix, cause = _MIXING["second" if is_second else _KINDS.get(op, "moved")]
        yield Found(
            text=f"Samples of a batch mix in {root_variable(run, probed.root)}{where}: an output depends on other "
            "samples of the batch.",
            fix=fix.format(op=_LAYERS.get(op, op)),
            cause=cause.format(op=op),
            since=probed,
            step=probed,
            severity="info" if _is_one_set(run, probed) else "",
        )


def _is_one_set(run: Run, probed: Probed) -> bool:
    """Whether dim 0 is no batch: time comes first, a graph with its edges, or one output for all rows."""
    root = probed.root
    modules = run.roots[root].modules if root in run.roots else ()
    if _takes_samples_for_time(run, probed):
        return False
    if probed.evidence.get("dim") == 1 or probed.evidence.get("equal_sizes"):
        return False
    if not probed.evidence.get("dim_is_batch") and any(
        one.options.get("batch_first") is False for one in modules if one.kind in ("recurrent", "attention")
    ):
        return True
    inputs = [one for one in run.of(InputSample) if one.root == root and one.shape]
    rows = {one.shape[0] for one in inputs}  # of a batch, and of what the model is evaluated with
    edges = any(
        (one.dtype == "int64" and len(one.shape) == 2 and one.shape[0] == 2 != max(rows))
        or (len(one.shape) == 2 and one.shape[0] == one.shape[1] == max(rows) and len(inputs) > 1)
        for one in inputs
    )
    pooled = [output for number, samples in latest(run) if number == root for _, output in outputs(samples)]
    return edges or any(one.shape and one.shape[0] not in rows - {1} for one in pooled)


def _takes_samples_for_time(run: Run, probed: Probed) -> bool:
    """Whether a recurrent layer has its batch first, and what the model makes has its samples second."""
    modules = run.roots[probed.root].modules if probed.root in run.roots else ()
    own = next((one for one in modules if one.name == probed.module and one.kind == "recurrent"), None)
    rows = {one.shape[0] for one in run.of(InputSample) if one.root == probed.root and len(one.shape) > 2}
    made = [one.shape for number, seen in latest(run) if number == probed.root for _, one in outputs(seen)]
    return (
        own is not None
        and own.options.get("batch_first") is True
        and any(len(shape) > 2 and shape[1] in rows and shape[0] not in rows | {1} for shape in made)
    )


@rule("AB802", "TIME_LEAK", "error", explains=("CANNOT_FIT_BATCH",), needs=(Probed, LossCall))
def time_leak(run: Run) -> Iterator[Found]:
    """Outputs that depend on later inputs in a model of the next token, or of the next value of a series."""
    tokens = run.answers("time") if any(one.shift == 1 for one in run.of(LossCall)) else ()
    for probed in (*tokens, *run.answers("given ahead")):
        where = f" through {probed.module}" if probed.module else ""
        kind = "series" if probed.probe != "time" else "moved" if probed.evidence.get("op") in _RESHAPING else "seen"
        fix, cause = _LEAKS[kind]
        yield Found(
            text=f"{root_variable(run, probed.root)} is trained to predict the next "
            f"{'token' if probed.probe == 'time' else 'value'} and sees it{where}.",
            fix=fix,
            cause=cause,
            since=probed,
            step=probed,
            severity="warning" if kind == "series" else "error",
        )


def ignores_input(probed: Probed) -> bool:
    """Whether a question has shown that the output does not depend on the input."""
    if probed.probe != "input" or probed.answer == "unknown":
        return False
    spread = probed.evidence.get("spread")
    return probed.answer == "no" if spread is None else float(spread) < NO_SPREAD


@rule("AB803", "INPUT_IGNORED", "warning", explains=("CANNOT_FIT_BATCH",))
def input_ignored(run: Run) -> Iterator[Found]:
    """Models that give a constant."""
    losses = course(run)
    asked = next((one for one in run.of(Probed) if ignores_input(one)), None)
    constant = {root: found for root, _ in latest(run) if (found := constant_since(run, root)) is not None}
    fix = "print the standard deviation over the batch after each module, and look where it becomes 0"
    cause = "Something between input and output throws the data away, or units have died."
    if losses.converged or losses.diverged or not losses.finite:
        return
    if asked is not None:
        since = constant.get(asked.root)
        yield Found(
            text=f"The output of {root_variable(run, asked.root)} does not depend on its input"
            f"{f': it is lost in {asked.module}' if asked.module else ''}.",
            fix=fix,
            cause=cause,
            since=since.at if since else asked.at,
            step=asked,
            where=asked if asked.line else first_call(run, asked.root),
            module=(asked.root, asked.module) if asked.module or not asked.line else None,
            evidence=asked.evidence,
        )
        return
    for root, found in constant.items():
        yield Found(
            text=f"The output of {root_variable(run, root)} is the same for all inputs since step {found.step}: its "
            f"spread over the batch is {found.last:.2g}"
            + (f", and was {found.first:.2g}." if found.first > found.last else "."),
            fix=fix,
            cause=cause,
            since=found.at,
            step=found.step,
            where=first_call(run, root),
            module=(root, found.module),
            evidence={"spread_first": found.first, "spread_last": found.last},
        )
