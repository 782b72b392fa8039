"""The fixes that a test applies, as they are printed, to a program with their fault."""

from anybatch.records.findings import is_code

TESTED = frozenset(
    {
        *("SYMMETRIC_INIT", "OPT_PARAM_UNREGISTERED", "OPT_PARAM_MISSING", "BACKWARD_TWICE", "BACKWARD_TWICE_STATE"),
        *("ZERO_GRAD_MISSING", "STEP_MISSING", "CLIP_NO_EFFECT", "LR_TOO_HIGH", "LR_TOO_LOW", "EVAL_IN_TRAINING"),
    }
)
"""Names of findings whose fix, where it is code, test_doctor_fixes.py applies as it is printed."""


def is_tested(name: str, fix: str) -> bool:
    """Whether a test applies such a fix: it is code, and of one of these findings."""
    return bool(fix) and name in TESTED and is_code(fix)
