"""The rule on ReduceLROnPlateau; its code is of the family schedule."""

from collections.abc import Iterator

from anybatch.doctor.rules.asked import answers, began
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.views.naming import at_line
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run


@rule("AB509", "PLATEAU_MODE", "warning", explains=("LR_TOO_LOW", "LR_COLLAPSED"))
def plateau_mode(run: Run) -> Iterator[Finding]:
    """Values that improve against the mode."""
    for probed in answers(run, "plateau"):
        seen = probed.evidence
        mode = "max" if seen["mode"] == "min" else "min"
        goes = "rises" if seen["mode"] == "min" else "falls"
        yield Finding(
            message=f"ReduceLROnPlateau has mode={seen['mode']!r} and is given {seen['name'] or 'a value'}, which "
            f"{goes} from {seen['first']:.4g} to {seen['last']:.4g}{at_line(probed.file, probed.line)}: the rate fell "
            f"from {seen['rate_first']:.3g} to {seen['rate']:.3g}.",
            place=Place(file=probed.file, line=probed.line),
            fix=f'ReduceLROnPlateau(..., mode="{mode}")',
            cause="What gets better counts as worse.",
            evidence=seen,
            at=began(run),
        )
