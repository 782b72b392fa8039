"""Rules of the family memory: graphs that grow or are kept."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from anybatch.doctor.rules.courses import updates
from anybatch.doctor.rules.naming import at_line, counted, listed
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import Pass, passes
from anybatch.records.events import Backward
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import LossCall, Walk
from anybatch.records.runs import Run
from anybatch.records.samples import Memory


@rule(
    "AB701",
    "GRAPH_GROWS",
    "error",
    explains=("RETAIN_GRAPH", "GRAPH_KEPT_IN_LOG", "OUT_OF_MEMORY", "BACKWARD_TWICE_STATE", "INPLACE_ON_SAVED"),
)
def _graph_grows(run: Run) -> Iterator[Finding]:
    by_line: dict[tuple[str, int], list[tuple[Walk, Backward]]] = {}
    walk: Walk | None = None
    counts: Counter[tuple[str, int]] = Counter()
    for one in run.facts:
        if isinstance(one, Walk):
            walk = one
        elif isinstance(one, Backward) and one.function == "backward":
            counts[one.file, one.line] += 1
            if walk is not None and walk.nodes:
                # Without an optimizer, as in updates by hand, each backward is a step.
                passed = walk if run.steps else replace(walk, step=counts[one.file, one.line])
                by_line.setdefault((one.file, one.line), []).append((passed, one))
            walk = None
    for spot, found in by_line.items():
        row = _growing(found)
        if not row:
            continue
        first, last = row[0], row[-1]
        previous = last[0].previous
        source = f" through {listed(previous, 2)}" if previous else ""
        yield Finding(
            message=f"The graph of the loss{at_line(*spot)} grows from {first[0].nodes:,} to {last[0].nodes:,} nodes "
            f"in {counted(max(last[0].step - first[0].step, len(row) - 1), 'step')}: it goes on into earlier "
            f"steps{source}.",
            place=Place(file=spot[0], line=spot[1]),
            fix="detach what is carried from one step to the next: state = state.detach()"
            + ("; and leave out retain_graph=True" if any(back.retain for _, back in row) else ""),
            cause="A tensor of an earlier step still has its graph and is used again.",
            evidence={"nodes": [walk.nodes for walk, _ in row], "retain_graph": any(back.retain for _, back in row)},
            step=row[4][0].step,
            at=row[1][0].at,
        )


def _growing(found: list[tuple[Walk, Backward]]) -> list[tuple[Walk, Backward]]:
    """The last run of at least five walks that grow by about as many nodes per step each, up to the end."""
    row: list[tuple[Walk, Backward]] = []
    for entry in found:
        if row and (entry[0].nodes <= row[-1][0].nodes and not entry[0].cut_short):
            row = []
        row.append(entry)
    if len(row) < 5:
        return []
    rates = [
        (after.nodes - before.nodes) / max(1, after.step - before.step)
        for (before, _), (after, _) in itertools.pairwise(row)
        if not after.cut_short
    ]
    if len(rates) < 4 or min(rates) <= 0 or max(rates) > 1.5 * min(rates):
        return []
    linked = any(walk.previous for walk, _ in row[1:]) or all(back.retain for _, back in row)
    return row if linked else []


@rule("AB702", "GRAPH_KEPT_IN_LOG", "warning", explains=("OUT_OF_MEMORY", "GRAPH_GROWS"))
def _graph_kept_in_log(run: Run) -> Iterator[Finding]:
    found = list(run.of(Memory))
    row: list[Memory] = []
    best: list[Memory] = []
    for one in found:
        row = [*row, one] if not row or (one.graphs > row[-1].graphs and one.step > row[-1].step) else [one]
        best = max(best, row, key=len)
    if len(best) < 5 or best[-1].graphs < 5:
        return
    steps = best[-1].step - best[0].step
    grown = best[-1].graphs - best[0].graphs
    highest = max(one.graphs for one in found)
    bounded = sum(one.graphs >= highest for one in found) >= 3
    if grown * 2 < steps or bounded:
        return
    back = next((one for one in run.of(Backward) if one.function == "backward" and one.value is not None), None)
    spot = _made(run, back) if back is not None else ("", 0)
    outputs = 0 <= best[-1].losses * 2 < best[-1].graphs
    yield Finding(
        message=f"{'Outputs' if outputs else 'Losses'} of {best[-1].graphs} earlier steps are alive with their graphs "
        f"after {counted(best[-1].step, 'step')}, one more with each step.",
        place=Place(file=spot[0], line=spot[1]),
        fix="outputs.append(output.detach())  # .detach() wherever an output of the model is kept"
        if outputs
        else "total += loss.item()  # loss.item() or loss.detach() wherever a loss is kept",
        cause="Outputs of the model that are kept, in a list for example, keep the graph of each step."
        if outputs
        else "A sum or a list of losses keeps the graph of each.",
        evidence={"graphs": [one.graphs for one in best], "resident": [best[0].resident, best[-1].resident]},
        step=best[4].step,
        at=best[1].at,
    )


def _made(run: Run, back: Backward) -> tuple[str, int]:
    """The line where the loss of a backward was computed, since that tensor is kept; else the line of the backward."""
    call = next((one for one in run.of(LossCall) if one.at in back.loss_calls and one.line), None)
    return (call.file, call.line) if call is not None else (back.file, back.line)


@rule("AB703", "RETAIN_GRAPH", "info")
def _retain_graph(run: Run) -> Iterator[Finding]:
    needless: dict[tuple[str, int], list[Backward]] = {}
    shared: set[tuple[str, int]] = set()
    last: Pass | None = None
    for one in passes(run):
        if last is not None and not one.forwards:
            shared.add(last.spot)
        last = one if one.fact.retain and not one.fact.create else None
        if last is not None:
            needless.setdefault(one.spot, []).append(one.fact)
    if any(one.function == "grad" for one in run.of(Backward)):
        return
    if any(one.again or one.previous for one in run.of(Walk)):
        return  # a later backward goes through a part of an earlier graph, which has to be there for it
    for spot, found in needless.items():
        if spot in shared or len(found) < 3 or not updates(run):
            continue
        yield Finding(
            message=f"backward(retain_graph=True){at_line(*spot)} keeps the graph, but no second backward goes "
            "through it.",
            place=Place(file=spot[0], line=spot[1]),
            fix="loss.backward()  # without retain_graph=True",
            cause="The graph is kept until the loss is forgotten.",
            evidence={"backwards": len(found)},
            step=found[2].step,
            at=found[0].at,
        )
