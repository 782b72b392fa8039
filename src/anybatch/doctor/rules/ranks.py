"""Rules of the family ranks: models that are spread over processes."""

from collections.abc import Iterator

from anybatch.doctor.rules.naming import counted, listed, verb
from anybatch.doctor.rules.registry import rule
from anybatch.records.events import Forward
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import Replicas
from anybatch.records.runs import Run


@rule("AB751", "DDP_BYPASSED", "error", explains=("REPLICAS_DIFFER",))
def _ddp_bypassed(run: Run) -> Iterator[Finding]:
    one = next((found for found in run.of(Replicas) if found.bypassed), None)
    if one is None:
        return
    name = one.bypassed[0]
    called = next(
        (f for f in run.of(Forward) if f.grad and f.root in run.roots and run.roots[f.root].variable == name), None
    )
    wrapper = next((root.variable for root in run.roots.values() if root.wrapper and root.variable), "ddp_model")
    yield Finding(
        message=f"{listed(one.bypassed)} {verb(len(one.bypassed), 'is', 'are')} called in training instead of the "
        f"{one.wrapper or 'wrapper'} around {verb(len(one.bypassed), 'it', 'them')}: the gradients of "
        f"{counted(one.world, 'process', 'processes')} are not exchanged.",
        place=Place(module=name, file=called.file if called else "", line=called.line if called else 0),
        fix=f"output = {wrapper}(...)  # instead of {name}(...)",
        cause="Only the forward of the wrapper prepares the exchange of gradients.",
        evidence={"world": one.world, "bypassed": list(one.bypassed)},
        step=one.step,
        at=called.at if called is not None else one.at,
        severity="" if one.world > 1 else "warning",
    )


@rule("AB752", "REPLICAS_DIFFER", "error")
def _replicas_differ(run: Run) -> Iterator[Finding]:
    one = next(
        (found for found in run.of(Replicas) if found.world > 1 and found.differ and found.wrapper != "FSDP"), None
    )
    if one is None:
        return
    yield Finding(
        message=f"{listed(one.differ)} {verb(len(one.differ), 'differs', 'differ')} between {one.world} processes.",
        place=Place(parameters=one.differ),
        fix="broadcast the weights from rank 0 before the first step, and let each step use the exchanged gradients",
        cause="The processes started from different values, or stepped with different gradients.",
        evidence={"world": one.world, "parameters": len(one.differ)},
        step=one.step,
        at=one.at,
    )
