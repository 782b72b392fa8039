"""What a remedy that was tried on a copy has shown for a finding."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from anybatch.records.findings import Finding, is_code
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

Said = Callable[[Mapping[str, Any]], str]


def _of_rate(evidence: Mapping[str, Any]) -> str:
    # A number that is not finite is a text in a record.
    lr, before, after, tenth = (float(evidence[name]) for name in ("lr", "before", "after", "after_tenth"))
    return (
        f"On a new copy and the last batch, {evidence['steps']} steps at lr {lr:g} took the loss from {before:.4g} to "
        f"{after:.4g}; at lr {lr / 10:g} to {tenth:.4g}."
    )


def _of_mode(evidence: Mapping[str, Any]) -> str:
    return (
        f"On a copy in training mode two forwards differ by {evidence['largest']:.3g} ({evidence['op']}); in the run "
        "nothing was dropped."
    )


def _of_scale(evidence: Mapping[str, Any]) -> str:
    return (
        f"The gradients were scaled by {evidence['factor']:.3g}; unscaled first, clipping would have scaled them by "
        f"{evidence['factor_unscaled']:.3g}."
    )


PROOFS: Mapping[str, tuple[str, Said]] = {
    **dict.fromkeys(("LR_TOO_HIGH", "EXPLODING"), ("learning rate", _of_rate)),
    **dict.fromkeys(("EVAL_IN_TRAINING", "DROPOUT_NEVER_ON"), ("mode", _of_mode)),
    "CLIP_BEFORE_UNSCALE": ("unscale first", _of_scale),
}
"""For names of findings the probe that tries the remedy, and what its evidence says."""


TESTED = frozenset(
    {
        *("SYMMETRIC_INIT", "OPT_PARAM_UNREGISTERED", "OPT_PARAM_MISSING", "BACKWARD_TWICE", "BACKWARD_TWICE_STATE"),
        *("ZERO_GRAD_MISSING", "STEP_MISSING", "CLIP_NO_EFFECT", "LR_TOO_HIGH", "LR_TOO_LOW", "EVAL_IN_TRAINING"),
    }
)
"""Names of findings whose fix, where it is code, test_doctor_fixes.py applies as it is printed."""


def with_proofs(findings: Iterable[Finding], run: Run) -> tuple[Finding, ...]:
    """Gives findings the proof that a probe of the run has brought, and says how sure their fixes are.

    Example:
        >>> evidence = {"factor": 0.001, "factor_unscaled": 1.0}
        >>> run = Run([Probed(probe="unscale first", answer="yes", evidence=evidence)])
        >>> with_proofs([Finding("Clipped while scaled.", name="CLIP_BEFORE_UNSCALE")], run)[0].proof
        'The gradients were scaled by 0.001; unscaled first, clipping would have scaled them by 1.'
    """
    shown = {one.probe: one.evidence for one in run.of(Probed) if one.answer == "yes"}
    return tuple(_with_kind(_with_proof(finding, shown)) for finding in findings)


def _with_kind(finding: Finding) -> Finding:
    if finding.proof:
        return replace(finding, fix_kind="tried")
    return replace(finding, fix_kind="tested") if is_tested(finding.name, finding.fix) else finding


def is_tested(name: str, fix: str) -> bool:
    """Whether a test has applied such a fix."""
    return bool(fix) and name in TESTED and is_code(fix)


def _with_proof(finding: Finding, shown: Mapping[str, Mapping[str, Any]]) -> Finding:
    probe, said = PROOFS.get(finding.name, ("", _of_rate))
    evidence = shown.get(probe)
    if evidence is None or finding.proof:
        return finding
    try:
        return replace(finding, proof=said(evidence))
    except (KeyError, TypeError, ValueError):  # of a record that another version wrote
        return finding
