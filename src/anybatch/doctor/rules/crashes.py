"""Rules of the family crashes: the script ended with an exception that was explained with what was alive then."""

from collections.abc import Iterator
from functools import partial

from anybatch.doctor.rules.registry import Found, rule
from anybatch.records.events import Crashed
from anybatch.records.runs import Run

CRASHES = (
    "BACKWARD_TWICE_STATE", "BACKWARD_TWICE", "INPLACE_ON_SAVED", "LEAF_INPLACE", "DEVICE_MISMATCH", "DTYPE_MISMATCH",
    "INFERENCE_TENSOR", "EMPTY_OPTIMIZER", "NON_LEAF_OPTIMIZED", "PARAM_IN_TWO_GROUPS", "UNSCALE_TWICE",
    "STEP_TWICE_SCALER", "STEP_WITHOUT_SCALE", "SCALER_MISUSED", "OUT_OF_MEMORY", "DDP_READY_TWICE", "DDP_UNFINISHED",
    "BN_ONE_VALUE", "SHAPE_MISMATCH", "INDEX_OUT_OF_RANGE", "LOSS_NOT_SCALAR", "TENSOR_MISUSED", "STATE_NOT_LOADED",
    "SCHED_PAST_END", "WORKER_DIED", "DEVICE_ASSERT", "CKPT_CHANGED", "MODULE_NOT_READY", "UNCLASSIFIED",
    "SPARSE_GRADIENT", "DISTRIBUTION_PARAMETER", "DEVICE_UNAVAILABLE",
)  # fmt: skip
"""What is known of torch's own errors. The order gives the codes: append, never insert."""

OF_OTHER_FAMILIES = ("LOSS_NO_GRAD", "NO_GRAD_ACTIVE", "CKPT_NO_INPUT_GRAD", "NAN_IN_BACKWARD")
"""Rules of other families whose names a ``Crashed`` fact may bear; with an empty or unknown one it is unclassified."""


def crashed(run: Run, name: str) -> Iterator[Found]:
    """What is said of the crashes that bear a name, at the line that has to be changed."""
    for crash in run.of(Crashed):
        unknown = crash.name not in CRASHES + OF_OTHER_FAMILIES
        if name == crash.name or (unknown and name == "UNCLASSIFIED"):
            text = crash.text.splitlines()[0][:300] if crash.text else ""
            origin = str(crash.evidence.get("origin_file", ""))
            optional = {"code": crash.code, "tensor": crash.tensor}
            yield Found(
                text=crash.message or f"The script ended with {crash.error}: {text}",
                fix=crash.fix,
                proof=crash.proof,
                cause=crash.cause,
                since=crash,
                where=(origin, int(crash.evidence.get("origin_line", 0))) if origin else crash,
                parameters=crash.parameters,
                module=crash.module,
                evidence={"error": crash.error, "text": text}
                | {key: value for key, value in optional.items() if value}
                | dict(crash.evidence)
                | ({"raised_at": f"{crash.file}:{crash.line}"} if origin else {}),
            )


for _number, _name in enumerate(CRASHES):
    rule(f"AB{901 + _number}", _name, "info" if _name == "UNCLASSIFIED" else "error", needs=(Crashed,))(
        partial(crashed, name=_name)
    )
