"""Rules of the family data: masks that hide the wrong positions."""

from collections.abc import Iterator

from anybatch.doctor.rules.registry import rule
from anybatch.doctor.views.measures import latest, model_name
from anybatch.records.events import Forward
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run

_NEARLY_ALL = 0.9


@rule("AB654", "MASK_INVERTED", "error", explains=("INPUT_IGNORED", "CANNOT_FIT_BATCH", "LR_TOO_LOW", "NAN_IN_FORWARD"))
def mask_inverted(run: Run) -> Iterator[Finding]:
    """Masks whose sign is the wrong one."""
    for root, samples in latest(run):
        looked = [(one, *one.hidden) for one in samples if one.hidden is not None]
        wrong = [entry for entry in looked if entry[1] >= _NEARLY_ALL and entry[2] <= 1 - _NEARLY_ALL]
        if len(wrong) < 2 or len(wrong) < len(looked):
            continue
        sample, content, padding = wrong[0]
        call = next((one for one in run.of(Forward) if one.at == sample.forward), Forward(root=root))
        yield Finding(
            message=f"The padding mask of the attention in {model_name(run, root)} hides {content:.0%} of the tokens, "
            f"and {padding:.0%} of the padding.",
            place=Place(file=call.file, line=call.line),
            fix="key_padding_mask=~mask  # True is what is left out; from 0 and 1: mask == 0",
            cause="True in a padding mask of torch means that a position is left out.",
            evidence={"content_hidden": content, "padding_hidden": padding, "samples": len(wrong)},
            step=wrong[1][0].step,
            at=sample.at,
        )
