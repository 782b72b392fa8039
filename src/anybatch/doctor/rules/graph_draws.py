"""Rules of the family graph: draws from distributions that the gradient does not pass."""

from collections.abc import Iterator

from anybatch.doctor.rules.graph_zeros import zero_gradients
from anybatch.doctor.rules.naming import at_line, qualified
from anybatch.doctor.rules.outcomes import outcome
from anybatch.doctor.rules.registry import rule
from anybatch.records.draws import Drawn, Scored
from anybatch.records.events import Backward
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import Followed, Walk
from anybatch.records.paths import Paths
from anybatch.records.runs import Run

_LEAST = 2  # sampled steps
_DRAWN = ("NormalBackward1", "NormalBackward3")  # with a mean that has a gradient


@rule(
    "AB209",
    "SAMPLE_CUTS_GRADIENT",
    "warning",
    explains=("CANNOT_FIT_BATCH", "INPUT_IGNORED", "LR_TOO_LOW", "VANISHING"),
)
def _sample_cuts_gradient(run: Run) -> Iterator[Finding]:
    if any(stop.op == "sample" for one in run.of(Followed) for stop in Paths.from_dict(one.paths).stopped.values()):
        return  # that the way is cut altogether says more
    yield from _of_normal(run)
    scored = {one.width for one in run.of(Scored)}
    by_line: dict[tuple[str, int], list[Drawn]] = {}
    for one in run.of(Drawn):
        if one.width not in scored:
            by_line.setdefault((one.file, one.line), []).append(one)
    for (file, line), drawn in by_line.items():
        if len({one.step for one in drawn}) < _LEAST:
            continue
        first = drawn[0]
        receiver = qualified(run, first.root, first.module)
        yield Finding(
            message=f"What {first.distribution}.sample() draws{at_line(file, line)} goes into {receiver}: no gradient "
            "passes it, and the loss behind it does not train what the distribution is made of.",
            place=Place(module=receiver, file=file, line=line),
            fix=first.code.replace(".sample(", ".rsample(") if first.code.count(".sample(") == 1 else ".rsample()",
            cause="sample() draws under no_grad; rsample() computes the draw from the parameters and from noise.",
            evidence={"distribution": first.distribution, "width": first.width, "draws_seen": len(drawn)},
            step=first.step,
            at=first.at,
        )


def _of_normal(run: Run) -> Iterator[Finding]:
    """Draws by ``torch.normal`` of learnt parameters, which the loss tells nothing through."""
    walks = [one for one in run.of(Walk) if any(kind.startswith(_DRAWN) for kind in one.kinds)]
    if len(walks) < _LEAST or any(run.of(Scored)) or any(zero_gradients(run)):
        return
    back = next((one for one in run.of(Backward) if one.at > walks[0].at), Backward())
    yield Finding(
        message="torch.normal(mean, std) draws on the way to the loss, and its gradient is zero everywhere: the loss "
        "behind it does not train what its mean and scale are made of.",
        place=Place(file=back.file, line=back.line),
        fix="mean + std * torch.randn_like(std)  # in the place of torch.normal(mean, std)",
        cause="A draw of torch.normal is a constant for autograd; with noise that is scaled and shifted the gradient "
        "passes.",
        evidence={"graphs": len(walks)},
        step=walks[0].step,
        at=walks[0].at,
        severity="" if outcome(run).word == "not learning" else "info",
    )
