"""Rules of the family graph: losses without a graph, and terms of a loss that train nothing."""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from anybatch.doctor.rules.graph_cuts import REMEDIES, followed_cuts, from_crash
from anybatch.doctor.rules.naming import at_line, counted, listed, names_of, optimizer_variable, root_variable, verb
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import Pass, members, passes, trained_on
from anybatch.records.events import Backward, Cleared, Crashed, Forward, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import Followed, LossCall, Walk
from anybatch.records.paths import Cut, Paths, Term
from anybatch.records.runs import Run
from anybatch.records.samples import InputSample


@rule("AB202", "LOSS_TERM_CUT", "warning", explains=("GRAPH_CUT", "STEP_WITHOUT_GRADIENT"))
def _loss_term_cut(run: Run) -> Iterator[Finding]:
    yield from _constant_terms(run)
    yield from _wasted_terms(run)


def _constant_terms(run: Run) -> Iterator[Finding]:
    walks = [one for one in run.of(Walk) if one.nodes]
    seen: set[tuple[str, str, int]] = set()
    for one in run.of(Followed):
        if not one.paths or one.why == "loss without graph":
            continue
        paths = Paths.from_dict(one.paths)
        for index, term in enumerate(paths.terms):
            key = (term.op, term.file, term.line)
            if term.has_gradient or not term.stopped or key in seen or _cancels(term, paths.terms):
                continue
            if walks and not any(walk.constant_terms for walk in walks[-3:]):
                continue
            seen.add(key)
            yield _constant(run, one, term, f"{index + 1} of {len(paths.terms)}")


def _constant(run: Run, followed: Followed, term: Term, which: str) -> Finding:
    step = next((one for one in run.of(Stepped) if one.at > followed.at), None)
    own = members(run).get(step.optimizer, frozenset()) if step is not None else frozenset()
    mine = {name for number in own if number in run.parameters for name in run.parameters[number].names}
    effective = sorted(term.cuts, key=lambda cut: -len(mine.intersection(cut.parameters)))
    value = "" if term.value is None else f" (value {term.value:.4g})"
    what = f"Term {which} of the loss, {term.op}{value}{at_line(term.file, term.line)}, is a constant for autograd"
    evidence = {"term": which, "value": term.value, "parameters": term.stopped}
    if step is not None and effective and mine and not mine.intersection(effective[0].parameters):
        return _of_another(run, followed, term, step, what, evidence)
    cut = effective[0] if effective else Cut(term.by, term.by_file, term.by_line)
    by = cut.op or "what cuts the graph"
    if cut.op == "autograd.grad":
        fix = f"torch.autograd.grad(..., create_graph=True){at_line(cut.file, cut.line)}"
        cause = "Gradients are constants, unless they are asked for with create_graph=True."
    else:
        line = f" in {PurePath(cut.file).name}:{cut.line}" if cut.line else ""
        fix = REMEDIES.get(cut.op, "remove {op}{line}").format(op=by, line=line)
        fix += f", on the way into {term.op}{at_line(term.file, term.line)}" if term.line not in (0, cut.line) else ""
        cause = f"The graph ends at {by}, before the term is computed."
    return Finding(
        message=f"{what}: {counted(term.stopped, 'parameter')} went into it, and none is trained by it.",
        place=Place(module=term.module, file=cut.file if cut.line else term.file, line=cut.line or term.line),
        fix=fix,
        cause=cause,
        evidence=evidence | {"cut_by": cut.op},
        step=followed.step,
        at=followed.at,
    )


def _of_another(
    run: Run, followed: Followed, term: Term, step: Stepped, what: str, evidence: dict[str, Any]
) -> Finding:
    """A term that only a model that is not trained by this step goes into; what ends its graph is no cause."""
    given = list(dict.fromkeys(name for cut in term.cuts for name in cut.parameters))
    numbers = [number for number, one in run.parameters.items() if set(one.names).intersection(given)]
    roots = sorted({run.parameters[number].root for number in numbers})
    others = listed([root_variable(run, root) for root in roots if root >= 0]) or listed(given)
    own = sorted({run.parameters[number].root for number in members(run)[step.optimizer]})
    trained = listed([root_variable(run, root) for root in own if root >= 0]) or "the model"
    calls = [one for one in run.of(LossCall) if one.step == followed.step and one.value == term.value == 0]
    place = calls[-1] if calls else term
    return Finding(
        message=f"{what}: only {others} went into it, and nothing of {trained}, which "
        f"{optimizer_variable(run, step.optimizer)} trains.",
        place=Place(module=term.module, file=place.file, line=place.line),
        fix=f"give this term an output of {trained}",
        cause=f"The term compares {others} with itself or with the data, and no step of the run can change that.",
        evidence=evidence,
        step=followed.step,
        at=followed.at,
        severity="" if term.value == 0 or any(one.function == term.op for one in run.of(LossCall)) else "info",
    )


def _cancels(term: Term, terms: tuple[Term, ...]) -> bool:
    """Whether a constant only corrects the value of another term, as surrogates with the right gradient do."""
    values = [other.value for other in terms if other is not term and other.value is not None]
    return term.value is not None and any(abs(abs(value) - abs(term.value)) <= 1e-6 * abs(value) for value in values)


def _wasted_terms(run: Run) -> Iterator[Finding]:
    """Terms, or whole losses, all of whose gradient is cleared before an optimizer could use it."""
    every = members(run)
    if len(every) < 2:
        return
    counts: dict[tuple[str, int], list[tuple[Pass, frozenset[int], Stepped]]] = {}
    for one, parts, step in _parts(run, every):
        if not _is_input(run, parts):
            counts.setdefault(one.spot, []).append((one, parts, step))
    for spot, found in counts.items():
        if len(found) < 3:
            continue
        one, parts, step = found[0]
        own = every.get(step.optimizer, frozenset())
        root = run.parameters[min(own)].root if own else -1
        others = sorted(number for number, held in every.items() if held & parts)
        names, variable = names_of(run, parts), optimizer_variable(run, step.optimizer)
        cut = next((cut.stop for cut in followed_cuts(run, set(own)) if cut.stop.line), None)
        by = f"{cut.op}{at_line(cut.file, cut.line)}" if cut is not None else ""
        yield Finding(
            message=f"A term of the loss{at_line(*spot)} before {variable}.step() reaches only {listed(names)}, "
            f"which {variable} does not have; it does not train {root_variable(run, root)}, and its gradient is "
            "cleared unused.",
            place=Place(
                module=root_variable(run, root), parameters=names_of(run, own), optimizer=variable,
                file=cut.file if cut is not None else spot[0], line=cut.line if cut is not None else spot[1],
            ),
            fix=f"compute this term on outputs of {root_variable(run, root)} that are not detached"
            + (f": {by}" if by else ""),
            cause=f"The term is computed on detached outputs: all its gradient falls on parameters of "
            f"{', '.join(optimizer_variable(run, number) for number in others)}.",
            evidence={"parameters": len(parts), "times": len(found)},
            step=step.number,
            at=one.fact.at,
        )  # fmt: skip


def _is_input(run: Run, parts: frozenset[int]) -> bool:
    return any(number in run.parameters and run.parameters[number].is_input for number in parts)


def _parts(run: Run, every: dict[int, frozenset[int]]) -> Iterator[tuple[Pass, frozenset[int], Stepped]]:
    """Each part of a loss that touches nothing of the optimizer that steps next, and is cleared before it is used."""
    by_event = {id(one.fact): one for one in passes(run)}
    terms: tuple[tuple[int, ...], ...] = ()
    open_parts: list[tuple[Pass, frozenset[int], Stepped | None]] = []
    for one in run.facts:
        if isinstance(one, Walk):
            terms = one.terms or (one.reached,)
        elif isinstance(one, Backward):  # one of autograd.grad gives .grad nothing, and its graph is its own
            found = by_event.get(id(one))
            parts = [frozenset(term) for term in terms if term]
            if found is not None and one.function == "backward":
                open_parts += [(found, part, None) for part in parts if found.touched is None or part & found.touched]
            terms = ()
        elif isinstance(one, Stepped):
            own = every.get(one.optimizer, frozenset())
            open_parts = [(found, part, step or one) for found, part, step in open_parts if not part & own]
        elif isinstance(one, Cleared):
            gone = every.get(one.number, frozenset()) if one.by == "optimizer" else None
            for found, part, step in open_parts:
                if step is not None and (gone is None or part & gone) and part <= frozenset().union(*every.values()):
                    yield found, part, step
            open_parts = [entry for entry in open_parts if gone is not None and not entry[1] & gone]


@rule(
    "AB203",
    "LOSS_NO_GRAD",
    "error",
    explains=("GRAPH_CUT", "STEP_WITHOUT_GRADIENT", "LOSS_CONSTANT", "PARAM_UNUSED", "LR_TOO_LOW", "LOSS_TERM_CUT"),
)
def _loss_no_grad(run: Run) -> Iterator[Finding]:
    for crash in run.of(Crashed):
        if crash.name == "LOSS_NO_GRAD":
            yield from_crash(crash)
    forced = next((one for one in run.of(Walk) if one.forced), None)
    leaves = [one for one in run.of(Backward) if one.function == "backward" and one.is_leaf and not one.touched_count]
    total = sum(one.function == "backward" for one in run.of(Backward))
    if not leaves or (forced is None and len(leaves) * 2 < total):
        return
    first = leaves[0]
    stop = next(
        (
            found
            for one in run.of(Followed)
            if one.paths
            for found in Paths.from_dict(one.paths).stopped.values()
            if found.op not in ("unused", "left out", "unknown", "requires_grad")
        ),
        None,
    )
    by = f" The graph ends at {stop}." if stop is not None else ""
    yield Finding(
        message=f"The loss of {len(leaves)} of {total} backwards{at_line(first.file, first.line)} has no graph: no "
        f"parameter gets a gradient.{by}",
        place=Place(
            module=stop.module if stop is not None else "",
            file=(stop.file if stop is not None and stop.file else first.file),
            line=(stop.line if stop is not None and stop.file else first.line),
        ),
        fix="compute the loss from the outputs with differentiable operations, and remove loss.requires_grad = True",
        cause="The loss is a leaf: requires_grad was set on a tensor that was computed without a graph.",
        evidence={"backwards": total, "without_graph": len(leaves), "value": first.value},
        step=first.step,
        at=first.at,
    )


@rule("AB207", "INPUT_REQUIRES_GRAD", "info")
def _input_requires_grad(run: Run) -> Iterator[Finding]:
    if any(one.function == "grad" or one.create for one in run.of(Backward)):
        return
    inputs = [one for one in run.of(InputSample) if one.requires_grad and not _is_optimized(run, one)]
    trained = trained_on(run)
    found = [one for one in inputs if one.forward in trained]
    if len(found) < 3 or not any(run.of(Stepped)):
        return
    first = found[0]
    variable = root_variable(run, first.root)
    call = next(one for one in run.of(Forward) if one.at == first.forward)
    yield Finding(
        message=f"The input {first.name} of {variable} requires gradients{at_line(call.file, call.line)}: "
        f"{first.bytes:,} bytes for a gradient {verb(len(found), 'at this step', 'at each step')}.",
        place=Place(module=variable, file=call.file, line=call.line),
        fix=f"{variable}({'x' if first.name.isdigit() else first.name}.detach())",
        cause="A leaf that requires gradients makes the backward go on through the first layer.",
        evidence={"bytes": first.bytes, "shape": list(first.shape), "times": len(found)},
        step=first.step,
        at=first.at,
    )


def _is_optimized(run: Run, sample: InputSample) -> bool:
    """Whether an optimizer has the input itself, as where an image is made that suits a model."""
    free = [run.parameters[one] for own in members(run).values() for one in own if one in run.parameters]
    return any(one.root < 0 and one.shape == sample.shape for one in free)
