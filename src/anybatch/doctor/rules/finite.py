"""Rules on numbers that are not finite; their codes are of the family numerics."""

from collections.abc import Iterator

from anybatch.doctor.rules.registry import rule
from anybatch.doctor.views.courses import course
from anybatch.doctor.views.measures import model_name, rounded
from anybatch.records.events import Backward, Crashed, Scaler, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run
from anybatch.records.samples import NonFinite, Norms

_REPAIRS = {
    "LogSoftmax": "leave a score that is finite in each row, and at each target: no mask may hide all of them",
    "Log1P": "torch.log1p(x.clamp_min(-1 + 1e-6)), or logsigmoid for 1 - sigmoid",
    "Log": "torch.log(x.clamp_min(1e-8)), or log_softmax / logsigmoid instead of the log of a softmax or sigmoid",
    "Sqrt": "torch.sqrt(x + 1e-8): the slope of the root is infinite at 0",
    "Div": "x / (y + 1e-8), or y.clamp_min(1e-8)",
    "Exp": "torch.logsumexp, or x.clamp_max(30) before exp",
    "Pow": "(x + 1e-8) ** p for p below 1",
    "Norm": "torch.sqrt((x * x).sum() + 1e-8): the slope of a norm is not defined at 0",
    "Softmax": "give softmax no row that is -inf everywhere: an attention mask that hides all keys of a row",
    "Acos": "torch.acos(x.clamp(-1 + 1e-6, 1 - 1e-6))",
    "Asin": "torch.asin(x.clamp(-1 + 1e-6, 1 - 1e-6))",
    "Atan2": "torch.atan2(y, x + 1e-8)",
    "Rsqrt": "torch.rsqrt(x + 1e-8)",
    "Reciprocal": "1 / (x + 1e-8)",
    "Std": "x.std(dim, correction=0), or leave out batches of one",
    "Var": "x.var(dim, correction=0), or leave out batches of one",
    "Mean": "x.sum() / max(1, x.numel()), or leave out batches of which nothing is selected",
    "NllLoss": "F.cross_entropy(scores, y, reduction='sum') / (y != -100).sum().clamp_min(1)",
    "Native": "an eps above 0, such as 1e-5, in the norm layer",
}
"""What to write instead, by the name of the node that made the number."""


@rule(
    "AB555",
    "NAN_IN_FORWARD",
    "error",
    explains=(
        "NAN_IN_BACKWARD",
        "LOSS_CONSTANT",
        "INPUT_IGNORED",
        "DEAD_UNITS",
        "CANNOT_FIT_BATCH",
    ),
)
def nan_in_forward(run: Run) -> Iterator[Finding]:
    """The first number that is not finite, if it is not a gradient's."""
    first = next((one for one in run.of(NonFinite) if one.where != "gradient" and _matters(run, one)), None)
    if first is None:
        yield from _only_the_loss(run)
        return
    what = {
        "input": "The data", "parameter": f"The parameter {', '.join(first.parameters[:2]) or first.module}",
        "forward": f"The output of {first.module}" if first.module else "The loss" if first.loss is None
        else "A result on the way to the loss",
    }.get(first.where, first.where)  # fmt: skip
    made = "noticed in" if first.where in ("input", "parameter") else "made by"
    by = f", {made} {_op(first.op)}{_lines(first)}" if first.op else ""
    has = "have" if first.where == "input" else "has"
    yield Finding(
        message=f"{what} {has} the first {first.value} of the run, at step {first.step}{by}"
        + (f": {first.detail}." if first.detail else "."),
        place=_place(first),
        fix=_repair(run, first),
        cause=_BROUGHT if first.where == "input" else _GOES_ON,
        evidence={"where": first.where, "value": first.value, "op": first.op, "step": first.step},
        step=first.step,
        at=first.at,
    )


_GOES_ON = "It goes through every operation after it into the loss, and from there into all gradients and weights."
_BROUGHT = (
    "No operation made it: inputs, targets or weights of the loss had it when they came. From the loss it goes into "
    "all gradients and weights."
)


def _place(bad: NonFinite) -> Place:
    """The line of the operation where only one can be meant, else the one that noticed it."""
    file, line = (bad.made_in, bad.made_at[0]) if len(bad.made_at) == 1 else (bad.file, bad.line)
    return Place(module=bad.module, parameters=bad.parameters, file=file, line=line)


def _lines(bad: NonFinite) -> str:
    found = [str(line) for line in bad.made_at]
    return f" in line {' or '.join(found)}" if found else ""


def _matters(run: Run, bad: NonFinite) -> bool:
    """Whether it came into the loss or into a weight; ``-inf`` in a mask does not."""
    if bad.where == "parameter" or bad.loss is None:
        return True
    return any(
        one.value is not None and not abs(one.value) < float("inf") for one in _backwards(run) if one.at > bad.at
    )


def _backwards(run: Run) -> list[Backward]:
    return [one for one in run.of(Backward) if one.value is not None]


def _only_the_loss(run: Run) -> Iterator[Finding]:
    """What can be said when only the value of a loss is known."""
    if any(True for _ in run.of(NonFinite)):
        return
    bad = next((one for one in _backwards(run) if not abs(one.value or 0.0) < float("inf")), None)
    if bad is None:
        return
    yield Finding(
        message=f"The loss is {bad.value} at step {bad.step}.",
        place=Place(file=bad.file, line=bad.line),
        fix="with torch.autograd.set_detect_anomaly(True): ...  # around that step, to see which operation made it",
        cause="From the loss it goes into all gradients and weights.",
        evidence={"step": bad.step},
        step=bad.step,
        at=bad.at,
    )


def _op(op: str) -> str:
    """What an operation is called; the classes of the user keep their names."""
    return op.removesuffix("Backward") if op.endswith("Backward") else op.split("Backward")[0].lower()


def _repair(run: Run, bad: NonFinite) -> str:
    if bad.where == "input":
        return "assert torch.isfinite(x).all() in the data set, for targets too; leave such samples out, or nan_to_num"
    if bad.where == "parameter":
        lr = max((max(one.lrs) for one in run.of(Stepped) if one.lrs and one.at <= bad.at), default=0.0)
        lower = f"a lower learning rate (lr={rounded(lr / 10):g}), " if lr else ""
        return f"{lower}torch.nn.utils.clip_grad_norm_({model_name(run)}.parameters(), 1.0) before the step"
    if bad.op.startswith("Sqrt") and "negative" in bad.detail:
        return "torch.sqrt(x.clamp_min(1e-8)), and look why x is below 0"
    if bad.op.startswith("Pow") and "negative" in bad.detail:
        return "x.clamp_min(1e-8) ** p, and look why x is below 0"
    found = next((text for name, text in _REPAIRS.items() if bad.op.startswith((name, f"Linalg{name}"))), "")
    return found or "with torch.autograd.set_detect_anomaly(True): ...  # around that step"


@rule(
    "AB556",
    "NAN_IN_BACKWARD",
    "error",
    explains=("NAN_IN_FORWARD", "LOSS_CONSTANT", "INPUT_IGNORED", "CANNOT_FIT_BATCH"),
)
def nan_in_backward(run: Run) -> Iterator[Finding]:
    """The first gradient that is not finite, if the loss was."""
    crash = next((one for one in run.of(Crashed) if one.name == "NAN_IN_BACKWARD"), None)
    if crash is not None:
        yield Finding(
            message=crash.message or crash.text,
            place=Place(module=crash.module, parameters=crash.parameters, file=crash.file, line=crash.line),
            fix=crash.fix,
            cause=crash.cause,
            evidence=crash.evidence,
            step=crash.step,
            at=crash.at,
        )
        return
    bad = next(iter(run.of(NonFinite)), None)
    if bad is None or bad.where != "gradient" or bad.loss is None or _scaled(run, bad):
        return
    by = f", made by the backward of {_op(bad.op)}{_lines(bad)}" if bad.op else ""
    owner = f" of {bad.parameters[0]}" if bad.parameters else ""
    yield Finding(
        message=f"A gradient{owner} is {bad.value} at step {bad.step - bad.late}, while "
        f"the loss is {bad.loss:.4g}{by}" + (f": {bad.detail}." if bad.detail else "."),
        place=_place(bad),
        fix=_repair(run, bad),
        cause="The slope of an operation is infinite where its value is finite, such as sqrt or norm at 0.",
        evidence={"value": bad.value, "op": bad.op, "loss": bad.loss, "step": bad.step - bad.late},
        step=bad.step - bad.late,
        at=bad.at,
    )


def _scaled(run: Run, bad: NonFinite) -> bool:
    """Whether a scaler looked after it, or the run went on with finite losses as if nothing had been."""
    if any(one.scaled for one in run.of(Backward) if one.at <= bad.at) or any(True for _ in run.of(Scaler)):
        return not course(run).diverged
    later = [norms for norms in run.of(Norms) if norms.at > bad.at]
    losses = [one for one in run.of(LossCall) if one.at > bad.at and one.value is not None]
    return len(later) >= 2 and len(losses) >= 2 and not course(run).diverged
