"""Rules of the family graph: losses without a graph, terms that train nothing, and gradient that arrives elsewhere."""

from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from anybatch.doctor.rules.answered import say
from anybatch.doctor.rules.crashes import crashed
from anybatch.doctor.rules.graph import REMEDIES, followed_cuts
from anybatch.doctor.rules.registry import RUNS_AWAY, STANDS_STILL, Found, Limit, rule
from anybatch.doctor.views.measures import followed
from anybatch.doctor.views.naming import Names, counted, names_of, near, root_variable
from anybatch.doctor.views.optimizing import OptimizerView, optimizers
from anybatch.doctor.views.windows import (
    Pass,
    Window,
    by_event,
    ever_touched,
    members,
    optimized,
    parameters_by_root,
    trained_on,
    walked,
)
from anybatch.records.events import Backward, Cleared, Forward, Stepped
from anybatch.records.lossfacts import Followed, LossCall, Probed, Walk
from anybatch.records.paths import Cut, Paths, Term
from anybatch.records.runs import Run, grouped
from anybatch.records.samples import InputSample


@rule("AB202", "LOSS_TERM_CUT", "warning", explains=(*STANDS_STILL, *RUNS_AWAY, "GRAPH_CUT", "STEP_WITHOUT_GRADIENT"))
def loss_term_cut(
    run: Run, *, times: float = Limit(3, "one term may be cleared with a whole window")
) -> Iterator[Found]:
    """Terms of a loss that train nothing."""
    yield from say(run, "AB202")
    yield from _constant_terms(run)
    yield from _wasted_terms(run, times)


def _constant_terms(run: Run) -> Iterator[Found]:
    walks = [one for one in run.of(Walk) if one.nodes]
    seen: set[tuple[str, str, int]] = set()
    every = [term for _, paths in followed(run) for term in paths.terms]
    values = grouped(((term.op, term.file, term.line), term.value) for term in every)
    for one, paths in followed(run):
        for index, term in enumerate(paths.terms if one.why != "loss without graph" else ()):
            key = (term.op, term.file, term.line)
            if term.op == "numpy" and len({*values[key]}) < 2:
                continue  # a number of NumPy that is computed with nothing of the step, as log(2 pi)
            # the gradient of a residual may end at the points that it was derived by
            trains = term.has_gradient and (term.parameters > 0 or term.by != "autograd.grad")
            if trains or not term.stopped or key in seen or _cancels(term, paths):
                continue
            if not walks or any(walk.constant_terms for walk in walks[-3:]):
                seen.add(key)
                yield _constant(run, one, term, f"{index + 1} of {len(paths.terms)}")


def _cancels(term: Term, paths: Paths) -> bool:
    """Whether a constant only corrects the value of another term, as surrogates with the right gradient do."""
    values = [other.value for other in paths.terms if other is not term and other.value is not None]
    return term.value is not None and any(abs(abs(value) - abs(term.value)) <= 1e-6 * abs(value) for value in values)


def _constant(run: Run, seen: Followed, term: Term, which: str) -> Found:
    step = next((one for one in run.of(Stepped) if one.at > seen.at), None)
    own = members(run).get(step.optimizer, frozenset()) if step is not None else frozenset()
    mine = {name for number in own if number in run.parameters for name in run.parameters[number].names}
    effective = sorted(term.cuts, key=lambda cut: -len(mine.intersection(cut.parameters)))
    value = "" if term.value is None else f" (value {term.value:.4g})"
    what = f"Term {which} of the loss, {term.op}{value}{near(term)}, is a constant for autograd"
    evidence = {"term": which, "value": term.value, "parameters": term.stopped}
    if step is not None and effective and mine and not mine.intersection(effective[0].parameters):
        return _of_another(run, seen, term, step, what, evidence)
    cut = effective[0] if effective else Cut(term.by, term.by_file, term.by_line)
    by = cut.op or "what cuts the graph"
    if cut.op == "autograd.grad":
        fix = f"torch.autograd.grad(..., create_graph=True){near(cut)}"
        cause = "Gradients are constants, unless they are asked for with create_graph=True."
    else:
        line = f" in {PurePath(cut.file).name}:{cut.line}" if cut.line else ""
        fix = REMEDIES.get(cut.op, "remove {op}{line}").format(op=by, line=line)
        fix += f", on its way into {term.op}{near(term)}" if term.line not in (0, cut.line) else ""
        cause = f"The graph ends at {by}, before the term is computed."
    return Found(
        text=f"{what}: {counted(term.stopped, 'parameter')} went into it, and none is trained by it.",
        fix=fix,
        cause=cause,
        since=next((one for one in run.of(Walk) if one.constant_terms), seen),  # the graph was followed later
        step=seen,
        where=(cut.file if cut.line else term.file, cut.line or term.line),
        module=term.module,
        evidence=evidence | {"cut_by": cut.op},
    )


def _of_another(run: Run, seen: Followed, term: Term, step: Stepped, what: str, evidence: dict[str, Any]) -> Found:
    """A term that only a model that is not trained by this step goes into; what ends its graph is no cause."""
    given = dict.fromkeys(name for cut in term.cuts for name in cut.parameters)
    roots = {one.root for one in run.parameters.values() if not given.keys().isdisjoint(one.names)}
    others = Names(root_variable(run, root) for root in sorted(roots) if root >= 0) or Names(given)
    own = {run.parameters[number].root for number in members(run)[step.optimizer]}
    trained = Names(root_variable(run, root) for root in sorted(own) if root >= 0) or "the model"
    calls = [one for one in run.of(LossCall) if one.step == seen.step and one.value == term.value == 0]
    told = term.value == 0 or any(one.function == term.op for one in run.of(LossCall))
    return Found(
        text=f"{what}: only {others} went into it, and nothing of {trained}, which "
        f"{OptimizerView(run, step.optimizer)} trains.",
        fix=f"give this term an output of {trained}",
        cause=f"The term compares {others} with itself or with the data, and no step of the run can change that.",
        since=seen,
        where=calls[-1] if calls else term,
        module=term.module,
        evidence=evidence,
        severity="" if told else "info",
    )


def _wasted_terms(run: Run, times: float) -> Iterator[Found]:
    """Terms, or whole losses, all of whose gradient is cleared before an optimizer could use it."""
    every = members(run)
    counts = grouped((one.spot, (one, parts, step)) for one, parts, step in (_parts(run) if len(every) > 1 else ()))
    for found in counts.values():
        if len(found) < times:
            continue
        one, parts, step = found[0]
        optimizer, names = OptimizerView(run, step.optimizer), names_of(run, parts)
        root = root_variable(run, run.parameters[min(optimizer.own)].root if optimizer.own else -1)
        others = [str(OptimizerView(run, number)) for number, held in sorted(every.items()) if held & parts]
        followed = next((cut.stop for cut in followed_cuts(run, optimizer.own) if cut.stop.line), None)
        asked = (one for one in run.answers("cut off") if one.evidence["optimizer"] == step.optimizer)
        cut = followed or next(asked, None)
        op = str(cut.evidence["op"] if isinstance(cut, Probed) else cut.op) if cut else ""
        yield Found(
            text=f"A term of the loss{near(one.fact)} before {optimizer}.step() reaches only {names}, which "
            f"{optimizer} does not have; it does not train {root}, and its gradient is cleared unused.",
            fix=f"compute this term on outputs of {root} that are not detached"
            + (f": {'rsample() in place of sample()' if op == 'normal' else op}{near(cut)}" if cut else ""),
            cause=f"The term is computed on detached outputs: all its gradient falls on parameters of "
            f"{', '.join(others)}.",
            since=one.fact,
            step=step.number,
            where=cut if cut is not None else one.fact,
            parameters=optimizer.own,
            optimizer=step.optimizer,
            module=root,
            evidence={"parameters": len(parts), "times": len(found)},
        )


def _parts(run: Run) -> Iterator[tuple[Pass, frozenset[int], Stepped]]:
    """Each part of a loss that touches nothing of the optimizer that steps next, and is cleared before it is used.

    Where another part touches what that optimizer has and what it has not, optimizers take turns on one loss.
    """
    every, passed = members(run), by_event(run)
    open_parts: list[tuple[Pass, frozenset[int], Stepped | None]] = []
    beside: dict[int, list[frozenset[int]]] = {}  # all parts of a loss, by its backward
    for one in run.facts:
        if isinstance(one, Backward):
            found, (walk, _) = passed.get(id(one)), walked(run).get(one.at, (Walk(), one))
            parts = beside[one.at] = [frozenset(term) for term in walk.terms or (walk.reached,) if term]
            if found is not None:  # one of autograd.grad gives .grad nothing, and its graph is its own
                open_parts += [(found, part, None) for part in parts if found.touched is None or part & found.touched]
        elif isinstance(one, Stepped):
            own = every.get(one.optimizer, frozenset())
            shared = {at for at, parts in beside.items() if any(part & own and part - own for part in parts)}
            open_parts = [(found, part, step or one) for found, part, step in open_parts
                          if not part & own and (step or found.fact.at not in shared)]  # fmt: skip
            beside.clear()
        elif isinstance(one, Cleared):
            gone = every.get(one.number, frozenset()) if one.by == "optimizer" else None
            for found, part, step in open_parts:
                if step is not None and (gone is None or part & gone) and part <= optimized(run):
                    yield found, part, step
            open_parts = [entry for entry in open_parts if gone is not None and not entry[1] & gone]


@rule(
    "AB203", "LOSS_NO_GRAD", "error",
    explains=(*STANDS_STILL, "GRAPH_CUT", "STEP_WITHOUT_GRADIENT", "PARAM_UNUSED", "LOSS_TERM_CUT"),
)  # fmt: skip
def loss_no_grad(run: Run, *, share: float = Limit(0.5, "of the backwards")) -> Iterator[Found]:
    """Losses that are leaves."""
    yield from crashed(run, "LOSS_NO_GRAD")
    backs = [one for one in run.of(Backward) if one.function == "backward"]
    leaves = [one for one in backs if one.is_leaf and not one.touched_count]
    if not leaves or (len(leaves) < share * len(backs) and not any(one.forced for one in run.of(Walk))):
        return
    first, ends = leaves[0], ("unused", "left out", "unknown", "requires_grad")
    stop = next((one for _, paths in followed(run) for one in paths.stopped.values() if one.op not in ends), None)
    yield Found(
        text=f"The loss of {len(leaves)} of {len(backs)} backwards{near(first)} has no graph: no parameter gets a "
        f"gradient.{f' The graph ends at {stop}.' if stop is not None else ''}",
        fix="compute the loss from the outputs with differentiable operations, and remove loss.requires_grad = True",
        cause="The loss is a leaf: requires_grad was set on a tensor that was computed without a graph.",
        since=first,
        where=stop if stop is not None and stop.file else first,
        module=stop.module if stop is not None else "",
        evidence={"backwards": len(backs), "without_graph": len(leaves), "value": first.value},
    )


@rule("AB207", "INPUT_REQUIRES_GRAD", "info", needs=(InputSample, Stepped))
def input_requires_grad(
    run: Run, *, times: float = Limit(3, "once may be a look at a saliency map")
) -> Iterator[Found]:
    """Inputs that get a gradient which nobody asks for."""
    free = [run.parameters[one] for one in optimized(run) if one in run.parameters]
    own = {one.shape for one in free if one.root < 0}  # an image is made that suits a model
    found = [
        one for one in run.of(InputSample)
        if one.requires_grad and one.shape not in own and one.forward in trained_on(run)
    ]  # fmt: skip
    if len(found) < times or any(one.function == "grad" or one.create for one in run.of(Backward)):
        return
    first, variable = found[0], root_variable(run, found[0].root)
    call = next(one for one in run.of(Forward) if one.at == first.forward)
    yield Found(
        text=f"The input {first.name} of {variable} requires gradients{near(call)}: {first.bytes:,} bytes for a "
        f"gradient at {'this' if len(found) == 1 else 'each'} step.",
        fix=f"{variable}({'x' if first.name.isdigit() else first.name}.detach())",
        cause="A leaf that requires gradients makes the backward go on through the first layer.",
        since=first,
        where=call,
        module=variable,
        evidence={"bytes": first.bytes, "shape": list(first.shape), "times": len(found)},
    )


_REGRESSIONS = frozenset({"mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss"})


@rule("AB206", "LEAK_TO_OTHER_NET", "warning", explains=(*RUNS_AWAY, "LOSS_SIGN"))
def leak_to_other_net(run: Run, *, times: float = Limit(3, "windows or calls, not by chance")) -> Iterator[Found]:
    """Gradient of one loss on what another one trains."""
    found = list(_advantages(run)) or list(_between_optimizers(run, times))
    yield from found or _targets(run, times)


def _advantages(run: Run) -> Iterator[Found]:
    walks = [
        (one, trained)
        for one in run.of(Walk)
        for side in one.advantages
        if (trained := frozenset(side) & optimized(run))
    ]
    if len(walks) >= 2:
        walk, side = walks[0]
        yield Found(
            text="The advantage that weights the log-probabilities carries a gradient: the policy loss also trains "
            f"{names_of(run, side)}.",
            fix="policy_loss = -(log_prob * advantage.detach()).mean()",
            cause="The difference of returns and values still has its graph when it is multiplied with "
            "log-probabilities.",
            since=walk,
            where=next((one for one in run.of(Backward) if one.at >= walk.at), None),
            parameters=side,
            evidence={"parameters": len(names_of(run, side)), "times": len(walks)},
        )


def _kinds(run: Run, one: Pass) -> Mapping[str, int]:
    """The kinds of nodes of the graph that a backward went through; empty where it was not looked at."""
    walk, _ = walked(run).get(one.fact.at, (Walk(), None))
    return walk.kinds


def _weights_logs(run: Run, one: Pass) -> bool:
    """Whether a backward was called on products with log-probabilities, and on no loss function of torch."""
    own, losses = _kinds(run, one), ("NllLoss", "MseLoss", "SmoothL1", "Huber", "BinaryCross", "KlDiv")
    logs = any(kind.startswith(("LogSoftmax", "Logsumexp", "Log")) for kind in own)
    return logs and any(k.startswith("Mul") for k in own) and not any(k.startswith(losses) for k in own)


def _between_optimizers(run: Run, times: float) -> Iterator[Found]:
    steps = [(one.at, one.optimizer) for one in run.of(Stepped)]
    for one in optimizers(run) if len(members(run)) > 1 else ():
        found = [(step, *leaked) for window, step in one.stepped if (leaked := _leak(run, steps, window, one))]
        if len(found) < times:
            continue
        step, leak, other = found[0]
        reached, theirs = (leak.touched or frozenset()) & one.own, OptimizerView(run, other)
        yield Found(
            text=f"The backward{near(leak.fact)} of the loss that {theirs} minimises also puts gradient on "
            f"{names_of(run, reached)}, and {one} steps with it.",
            fix=f"detach what {root_variable(run, run.parameters[min(reached)].root)} gives before it enters this "
            f"loss, or call {one}.zero_grad() before the backward of its own loss",
            cause=f"The gradient of another loss is still there when {one} steps: nothing detached or cleared it.",
            since=leak.fact,
            step=step.number,
            parameters=reached,
            optimizer=one.number,
            evidence={"parameters": len(names_of(run, reached)), "steps": len(found)},
        )


def _leak(
    run: Run, steps: list[tuple[int, int]], window: Window, view: OptimizerView
) -> tuple[Pass, int] | None:  # fmt: skip
    """A backward in a window that belongs to another optimizer and whose gradient this one's step still used.

    Where the loss of the step reaches other nets as well, as that of a generator does, the two may be meant to add up,
    unless one is the opposite of the other.
    """
    own, against = view.own, {one.evidence["first"] for one in run.answers("opposed")
                              if one.evidence["optimizer"] == view.number}  # fmt: skip
    for one in window.used[:-1]:
        last = window.used[-1]
        if one.touched is None or last.touched is None or one.spot == last.spot:
            continue
        both = one.touched & own
        others = [number for number, held in members(run).items() if held & one.touched and not held & own]
        if not others or len(both) * 10 < 9 * len(last.touched & own):
            continue
        if last.touched - own and others[0] not in against:
            continue
        begin, end = (bisect(steps, (back.fact.at,)) for back in (one, last))
        between = any(number in others for _, number in steps[begin:end])
        regresses = any(kind.startswith(("Pow", "MseLoss", "SmoothL1", "Huber", "Abs")) for kind in _kinds(run, last))
        if between or (regresses and _weights_logs(run, one)):
            return one, others[0]
    return None


def _targets(run: Run, times: float) -> Iterator[Found]:
    """Regressions whose target is made by the trained model, or by one that is built alike and trained as well."""
    twins = _twins(run)
    found: dict[tuple[str, int], list[tuple[LossCall, int]]] = {}
    calls: Counter[int] = Counter()
    for one in run.facts:
        if isinstance(one, Backward):
            calls.clear()
        elif isinstance(one, Forward):
            calls[one.root] += one.grad
        elif isinstance(one, LossCall) and one.function in _REGRESSIONS and one.target_requires_grad and _computed(one):
            alike = twins.get(one.root, ())
            other = min((root for root in calls if root != one.root and calls[root] and root in alike), default=-1)
            if calls[one.root] >= 2 or (calls[one.root] and other >= 0):
                found.setdefault((one.file, one.line), []).append((one, other if calls[one.root] < 2 else -1))
    for bad in found.values():
        if len(bad) >= times and ever_touched(run):
            yield _moving_target(run, bad)


def _twins(run: Run) -> dict[int, frozenset[int]]:
    """For each root that an optimizer trains those that are built alike and trained as well, itself among them."""
    trained, built = ever_touched(run) & optimized(run), dict[tuple[object, ...], list[int]]()
    for number, root in run.roots.items():
        own = [one for one in parameters_by_root(run).get(number, ()) if one.registered]
        if any(one.parameter in trained for one in own):
            modules = tuple((one.name, one.cls) for one in root.modules)
            built.setdefault((root.cls, modules, tuple(one.shape for one in own)), []).append(number)
    return {one: alike for alike in map(frozenset, built.values()) for one in alike}


def _moving_target(run: Run, bad: list[tuple[LossCall, int]]) -> Found:
    call, other = bad[0]
    nets = [call.root] if other < 0 else sorted((call.root, other))
    reached = ever_touched(run) & (ever_touched(run) if other < 0 else optimized(run))
    names = " or ".join(root_variable(run, one) for one in nets)
    total = sum((one.file, one.line) == (call.file, call.line) for one in run.of(LossCall))
    itself = f"{root_variable(run, call.root)} computes both"
    return Found(
        text=f"The target of {call.function}{near(call)} is computed from {names}, "
        f"{'which is' if other < 0 else 'both of which are'} trained, and carries a gradient.",
        fix="target = target.detach()  # detach() returns a new tensor and leaves the old one unchanged"
        if other < 0
        else "with torch.no_grad(): ...  # around the target, and leave the network that computes it out of the "
        "optimizer",
        cause="The loss also moves the targets towards the predictions, since "
        f"{itself if other < 0 else 'the copy that computes them is trained'}.",
        since=call,
        step=bad[2][0] if len(bad) > 2 else call,
        parameters=[one for one in reached if one in run.parameters and run.parameters[one].root in nets],
        module=(call.root, ""),
        evidence={"calls": total, "target_shape": list(call.target_shape), "function": call.function},
    )


def _computed(call: LossCall) -> bool:
    """Whether a target is arithmetic on what a network gave, such as ``reward + gamma * value``."""
    if call.target_top:
        sums = any(kind.startswith(("Add", "Sub", "Rsub")) for kind in call.target_top[:3])
        return sums and any(kind.startswith("Mul") for kind in call.target_top[:4])
    shape = call.target_shape
    return len(shape) == 1 or (len(shape) == 2 and shape[-1] == 1)
