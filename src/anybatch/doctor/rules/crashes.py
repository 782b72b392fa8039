"""Rules of the family crashes: the script ended with an exception that was explained with what was alive then."""

from collections.abc import Callable, Iterable, Iterator

from anybatch.doctor.rules.registry import rule
from anybatch.records.events import Crashed
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run

CRASHES = (
    "BACKWARD_TWICE_STATE",
    "BACKWARD_TWICE",
    "INPLACE_ON_SAVED",
    "LEAF_INPLACE",
    "DEVICE_MISMATCH",
    "DTYPE_MISMATCH",
    "INFERENCE_TENSOR",
    "EMPTY_OPTIMIZER",
    "NON_LEAF_OPTIMIZED",
    "PARAM_IN_TWO_GROUPS",
    "UNSCALE_TWICE",
    "STEP_TWICE_SCALER",
    "STEP_WITHOUT_SCALE",
    "SCALER_MISUSED",
    "OUT_OF_MEMORY",
    "DDP_READY_TWICE",
    "DDP_UNFINISHED",
    "BN_ONE_VALUE",
    "SHAPE_MISMATCH",
    "INDEX_OUT_OF_RANGE",
    "LOSS_NOT_SCALAR",
    "TENSOR_MISUSED",
    "STATE_NOT_LOADED",
    "SCHED_PAST_END",
    "WORKER_DIED",
    "DEVICE_ASSERT",
    "CKPT_CHANGED",
    "MODULE_NOT_READY",
    "UNCLASSIFIED",
    "SPARSE_GRADIENT",
    "DISTRIBUTION_PARAMETER",
)
"""What is known of torch's own errors. The order gives the codes: append, never insert."""

# A ``Crashed`` fact bears one of the names in ``CRASHES``, an empty one (UNCLASSIFIED), or one of a rule of another
# family that reads it too: LOSS_NO_GRAD, NO_GRAD_ACTIVE, CKPT_NO_INPUT_GRAD (graph), NAN_IN_BACKWARD (numerics).
OF_OTHER_FAMILIES = ("LOSS_NO_GRAD", "NO_GRAD_ACTIVE", "CKPT_NO_INPUT_GRAD", "NAN_IN_BACKWARD")


def _judge(name: str) -> Callable[[Run], Iterable[Finding]]:
    """What finds the crashes that bear a name."""

    def judge(run: Run) -> Iterator[Finding]:
        for crash in run.of(Crashed):
            if crash.name == name:
                yield _finding(crash)

    return judge


def _unclassified(run: Run) -> Iterator[Finding]:
    """Crashes that bear no name, or one that no rule knows."""
    for crash in run.of(Crashed):
        if crash.name not in CRASHES and crash.name not in OF_OTHER_FAMILIES:
            yield _finding(crash)


def _finding(crash: Crashed) -> Finding:
    evidence = {"error": crash.error, "text": crash.text.splitlines()[0][:300] if crash.text else ""}
    evidence |= {"code": crash.code} if crash.code else {}
    evidence |= {"tensor": crash.tensor} if crash.tensor else {}
    origin = str(crash.evidence.get("origin_file", ""))
    return Finding(
        message=crash.message or f"The script ended with {crash.error}: {evidence['text']}",
        place=Place(
            module=crash.module,
            parameters=crash.parameters,
            file=origin or crash.file,
            line=int(crash.evidence.get("origin_line", 0)) if origin else crash.line,
        ),
        fix=crash.fix,
        cause=crash.cause,
        evidence=evidence | dict(crash.evidence) | ({"raised_at": f"{crash.file}:{crash.line}"} if origin else {}),
        step=crash.step,
        at=crash.at,
    )


for _number, _name in enumerate(CRASHES):
    rule(f"AB{901 + _number}", _name, "info" if _name == "UNCLASSIFIED" else "error")(
        _unclassified if _name == "UNCLASSIFIED" else _judge(_name)
    )
