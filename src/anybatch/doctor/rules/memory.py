"""Rules of the families memory and ranks: graphs that grow or are kept, and replicas that differ."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from anybatch.doctor.rules.registry import RUNS_AWAY, Found, Limit, rule
from anybatch.doctor.views.courses import updates
from anybatch.doctor.views.naming import Names, counted, listed, near
from anybatch.doctor.views.windows import Pass, calls_of, passes, walked
from anybatch.records.events import Backward, Forward
from anybatch.records.lossfacts import Replicas, Walk
from anybatch.records.runs import Run
from anybatch.records.samples import Memory


@rule(
    "AB701", "GRAPH_GROWS", "error", needs=(Walk,),
    explains=(*RUNS_AWAY, "RETAIN_GRAPH", "GRAPH_KEPT_IN_LOG", "OUT_OF_MEMORY", "BACKWARD_TWICE_STATE",
              "INPLACE_ON_SAVED"),
)  # fmt: skip
def graph_grows(
    run: Run, *, samples: float = Limit(5, "four rates that can agree"),
    unevenness: float = Limit(1.5, "between the most and the fewest nodes per step: a chain grows evenly"),
) -> Iterator[Found]:  # fmt: skip
    """Graphs that go on into earlier steps."""
    by_line: dict[tuple[str, int], list[tuple[Walk, Backward]]] = {}
    counts: Counter[tuple[str, int]] = Counter()
    for one in passes(run):
        counts[one.spot] += 1
        walk, back = walked(run).get(one.fact.at, (Walk(), one.fact))
        if walk.nodes:
            # Without an optimizer, as in updates by hand, each backward is a step.
            passed = walk if run.steps else replace(walk, step=counts[one.spot])
            by_line.setdefault(one.spot, []).append((passed, back))
    for found in by_line.values():
        row = _growing(found, samples, unevenness)
        if not row:
            continue
        (first, back), (last, _) = row[0], row[-1]
        source = f" through {listed(last.previous, 2)}" if last.previous else ""
        retain = any(one.retain for _, one in row)
        yield Found(
            text=f"The graph of the loss{near(back)} grows from {first.nodes:,} to {last.nodes:,} nodes in "
            f"{counted(max(last.step - first.step, len(row) - 1), 'step')}: it goes on into earlier steps{source}.",
            fix="detach the state that is carried from one step to the next: state = state.detach()"
            + ("; and leave out retain_graph=True" if retain else ""),
            cause="A tensor of an earlier step still has its graph and is used again.",
            since=row[1][0],
            step=row[min(4, len(row) - 1)][0],
            where=back,
            evidence={"nodes": [one.nodes for one, _ in row], "retain_graph": retain},
        )


def _growing(found: list[tuple[Walk, Backward]], samples: float, unevenness: float) -> list[tuple[Walk, Backward]]:
    """The last run of walks that grow by about as many nodes per step each, up to the end."""
    row: list[tuple[Walk, Backward]] = []
    for entry in found:
        if row and (entry[0].nodes <= row[-1][0].nodes and not entry[0].cut_short):
            row = []
        row.append(entry)
    rates = [
        (after.nodes - before.nodes) / max(1, after.step - before.step)
        for (before, _), (after, _) in itertools.pairwise(row)
        if not after.cut_short
    ]
    if len(rates) < samples - 1 or min(rates) <= 0 or max(rates) > unevenness * min(rates):
        return []
    linked = any(walk.previous for walk, _ in row[1:]) or all(back.retain for _, back in row)
    return row if linked else []


@rule("AB702", "GRAPH_KEPT_IN_LOG", "warning", explains=("OUT_OF_MEMORY", "GRAPH_GROWS"), needs=(Memory,))
def graph_kept_in_log(run: Run, *, samples: float = Limit(5, "in a row, with more graphs each")) -> Iterator[Found]:
    """Losses or outputs that are kept with their graphs."""
    found = list(run.of(Memory))
    row: list[Memory] = []
    best: list[Memory] = []
    for one in found:
        row = [*row, one] if not row or (one.graphs > row[-1].graphs and one.step > row[-1].step) else [one]
        best = max(best, row, key=len)
    first, last = best[0], best[-1]
    bounded = sum(one.graphs >= max(other.graphs for other in found) for one in found) >= 3
    grows = (last.graphs - first.graphs) * 2 >= last.step - first.step
    if min(len(best), last.graphs) < samples or not grows or bounded:
        return
    back = next((one for one in run.of(Backward) if one.function == "backward" and one.value is not None), None)
    call = next((one for one in calls_of(run, back) if one.line), None) if back is not None else None
    outputs = 0 <= last.losses * 2 < last.graphs
    yield Found(
        text=f"{'Outputs' if outputs else 'Losses'} of {last.graphs} earlier steps are alive with their graphs after "
        f"{counted(last.step, 'step')}, one more with each step.",
        fix="outputs.append(output.detach())  # .detach() wherever a model output is stored"
        if outputs
        else "total += loss.item()  # loss.item() or loss.detach() wherever a loss is stored",
        cause="Model outputs that are stored, in a list for example, keep the graph of each step alive."
        if outputs
        else "A sum or a list of losses keeps the graph of each.",
        since=best[1],
        step=best[min(4, len(best) - 1)],
        where=call or back,
        evidence={"graphs": [one.graphs for one in best], "resident": [first.resident, last.resident]},
    )


@rule("AB703", "RETAIN_GRAPH", "info")
def retain_graph(run: Run, *, backwards: float = Limit(3, "once may be for a look at a gradient")) -> Iterator[Found]:
    """Graphs that are kept for nothing."""
    needless: dict[tuple[str, int], list[Backward]] = {}
    shared: set[tuple[str, int]] = set()
    last: Pass | None = None
    for one in passes(run):
        if last is not None and not one.forwards:
            shared.add(last.spot)
        last = one if one.fact.retain and not one.fact.create else None
        if last is not None:
            needless.setdefault(one.spot, []).append(one.fact)
    # A later backward may go through a part of an earlier graph, which has to be there for it.
    used = any(one.function == "grad" for one in run.of(Backward)) or any(w.again or w.previous for w in run.of(Walk))
    for spot, found in needless.items():
        if spot not in shared and len(found) >= backwards and updates(run) and not used:
            yield Found(
                text=f"backward(retain_graph=True){near(found[0])} keeps the graph, but no second backward goes "
                "through it.",
                fix="loss.backward()  # without retain_graph=True",
                cause="The graph is kept until the loss is forgotten.",
                since=found[0],
                step=found[min(2, len(found) - 1)],
                evidence={"backwards": len(found)},
            )


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
