"""Rules of the family ranks: models that are spread over processes."""

from collections.abc import Iterator

from anybatch.doctor.rules.registry import Found, rule
from anybatch.doctor.views.naming import Names, counted
from anybatch.records.events import Forward
from anybatch.records.lossfacts import Replicas
from anybatch.records.runs import Run


@rule("AB751", "DDP_BYPASSED", "error", explains=("REPLICAS_DIFFER",), needs=(Replicas,))
def ddp_bypassed(run: Run) -> Iterator[Found]:
    """Models that are called instead of their wrapper."""
    for one in [found for found in run.of(Replicas) if found.bypassed][:1]:
        names = Names(one.bypassed)
        roots = {number for number, root in run.roots.items() if root.variable == names[0]}
        called = next((call for call in run.of(Forward) if call.grad and call.root in roots), None)
        wrapper = next((root.variable for root in run.roots.values() if root.wrapper and root.variable), "ddp_model")
        yield Found(
            text=f"{names} {names:is|are} called in training instead of the {one.wrapper or 'wrapper'} around "
            f"{names:it|them}: the gradients of {counted(one.world, 'process', 'processes')} are not exchanged.",
            fix=f"output = {wrapper}(...)  # instead of {names[0]}(...)",
            cause="Only the forward of the wrapper prepares the exchange of gradients.",
            since=called or one,
            step=one,
            where=called,
            module=names[0],
            evidence={"world": one.world, "bypassed": list(names)},
            severity="" if one.world > 1 else "warning",
        )


@rule("AB752", "REPLICAS_DIFFER", "error", needs=(Replicas,))
def replicas_differ(run: Run) -> Iterator[Found]:
    """Weights that are not the same in all processes."""
    found = [one for one in run.of(Replicas) if one.world > 1 and one.differ and one.wrapper != "FSDP"]
    for one in found[:1]:
        yield Found(
            text=f"{Names(one.differ)} differs between {one.world} processes.",
            fix="broadcast the weights from rank 0 before the first step, and let each step use the exchanged "
            "gradients",
            cause="The processes started from different values, or stepped with different gradients.",
            since=one,
            parameters=one.differ,
            evidence={"world": one.world, "parameters": len(one.differ)},
        )
