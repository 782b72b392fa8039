"""Rules of the family graph: parameters that no loss reaches because their way is cut."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from anybatch.doctor.rules.answered import say
from anybatch.doctor.rules.crashes import crashed
from anybatch.doctor.rules.registry import STANDS_STILL, Found, Limit, rule
from anybatch.doctor.views.measures import COPIES, copied_names, followed, gradients, unused_names
from anybatch.doctor.views.naming import (
    at_line,
    counted,
    first_call,
    module_code,
    module_facts,
    names_of,
    near,
    qualified,
    root_variable,
)
from anybatch.doctor.views.optimizing import left_out, optimizers
from anybatch.doctor.views.outcomes import learned_well, outcome
from anybatch.doctor.views.windows import ever_touched, optimized, passes, with_gradient, written
from anybatch.records.events import Backward, Forward, Stepped, Warned
from anybatch.records.lossfacts import Followed, Walk
from anybatch.records.paths import Stop
from anybatch.records.runs import Run, grouped, remembered
from anybatch.records.samples import Activations, Drawn, Norms, Scored
from anybatch.records.tables import ParameterFacts

_NO_CUT = frozenset({"unused", "left out", "unknown", "checkpoint", "requires_grad"})
_MODES = frozenset({"no_grad", "inference_mode"})
_FUNCTIONAL = (
    "torch.func.functional_call(model, weights, (x,)) instead of a copy{line}, with the model's own weights or "
    "weights computed from them"
)
REMEDIES = {
    "detach": "remove .detach(){line}",
    "detach_": "remove .detach_(){line}",
    "data": "use the tensor itself instead of .data{line}",
    "deepcopy": _FUNCTIONAL,
    "state_dict": _FUNCTIONAL,
    "item": "keep the tensor instead of the number of .item(){line}",
    "numpy": "compute with torch instead of numpy{line}",
    "tensor": "torch.stack([...]) of the tensors instead of torch.tensor([...]){line}",
    "sample": ".rsample() instead of .sample(){line}; for discrete variables F.gumbel_softmax, or a loss of log_prob",
    "argmax": "torch.softmax(scores, dim=-1) instead of argmax, or F.gumbel_softmax(scores, hard=True){line}",
    "no_grad": "take the call out of torch.no_grad(){line}",
    "inference_mode": "take the call out of torch.inference_mode(){line}",
}
"""What to write instead of an operation that cuts the graph."""


@remembered
def _without_gradient(run: Run) -> frozenset[int]:
    """Trainable parameters of optimizers that no backward of the run reached and that nobody else wrote."""
    return frozenset(
        number
        for number in optimized(run) - with_gradient(run) - written(run)
        if (one := run.parameters.get(number)) is not None and one.requires_grad and one.root >= 0
    )


@remembered
def _roots_without_graph(run: Run) -> dict[int, Forward]:
    """Models with parameters in an optimizer that were only called without a graph, and their first call.

    One whose copy takes part in the loss is called without a graph where it is evaluated.
    """
    with_graph = {one.root for one in run.of(Forward) if one.grad and not one.inference}
    left = [run.parameters[number] for number in _without_gradient(run)]
    lost = {one.root for one in left if copied_names(run).isdisjoint(one.names)} - with_graph
    return {one.root: one for one in reversed(list(run.of(Forward))) if one.root in lost}


class Cut(NamedTuple):
    """Where the gradient of some parameters ends, and since when."""

    stop: Stop
    numbers: list[int]
    at: int
    step: int


@rule(
    "AB201", "GRAPH_CUT", "error",
    explains=(*STANDS_STILL, "STEP_WITHOUT_GRADIENT", "PARAM_UNUSED", "BACKEND_NO_WRITE", "LOSS_TERM_CUT"),
)  # fmt: skip
def graph_cut(run: Run, *, backwards: float = Limit(3, "the first ones may leave a part out")) -> Iterator[Found]:
    """Parameters whose way to the loss is cut."""
    yield from _zero_gradients(run)
    yield from say(run, "AB201")
    hidden = _roots_without_graph(run)
    lost = {number for number in _without_gradient(run) if run.parameters[number].root not in hidden}
    lost -= {
        each for one in optimizers(run) if one.number in left_out(run) for each in one.own
    }  # no backward was called
    count = len(passes(run))
    if not lost or count < backwards or (_checkpoint_warning(run) and not any(run.of(Followed))):
        return
    for cut in followed_cuts(run, lost) or _cut_in_order(run, lost):
        stop, names = cut.stop, names_of(run, cut.numbers)
        entered = re.fullmatch(r"Gradients were switched off at (.+):(\d+)\.", stop.message)
        file, number = (entered[1], int(entered[2])) if entered else (stop.file, stop.line)
        line = f" in {PurePath(file).name}:{number}" if file else ""
        fix = REMEDIES.get(stop.op, "use a differentiable operation instead of {op}{line}")
        meant = stop.op in _MODES and _evaluating(run, cut.numbers)
        copied = stop.op in COPIES
        way = (
            f"the loss is computed on a copy that {stop.op} makes"
            if copied
            else f"the way to the loss is cut by {stop.op}"
        )
        yield Found(
            text=f"{names} {names:gets|get} no gradient in any of {counted(count, 'backward')}: {way}"
            f"{f' in {stop.module}' if stop.module else ''}{at_line(file, number)}.",
            fix=fix.format(op=stop.op, line=line),
            cause=stop.message or f"The result of {stop.op} has no graph, so nothing before it is trained.",
            since=passes(run)[0].fact if copied else cut.at,
            step=cut.step,
            where=(file, number),
            parameters=cut.numbers,
            module=stop.module or None,
            evidence={
                "parameters": len(names), "elements": sum(run.parameters[one].numel for one in cut.numbers),
                "backwards": count, "op": stop.op, "last_with_graph": stop.after,
            },
            severity="info" if meant else "error" if stop.sure else "warning",
        )  # fmt: skip


def _evaluating(run: Run, numbers: list[int]) -> bool:
    modes = {sample.module: sample.training for one in run.of(Activations) for sample in one.modules if sample.module}
    found = [module_facts(run, run.parameters[one]) for one in numbers]
    return all(one is not None and not modes.get(one.name, one.training) for one in found)


def followed_cuts(run: Run, lost: set[int] | frozenset[int]) -> list[Cut]:
    """The cuts that an iteration followed operation by operation has shown for some parameters, by place."""
    numbers = {name: number for number in lost for name in run.parameters[number].names}
    stops = {
        numbers[name]: (stop, one)
        for one, paths in followed(run)
        for name, stop in paths.stopped.items()
        if name in numbers
    }
    found: dict[tuple[str, str, str, int], Cut] = {}
    for number, (stop, one) in sorted(stops.items()):
        if stop.op not in _NO_CUT:
            switched = bool(stop.op in _MODES and stop.message)  # one block may hold many modules
            key = (stop.op, stop.message, "", 0) if switched else (stop.op, stop.module, stop.file, stop.line)
            found.setdefault(key, Cut(stop, [], one.at, one.step)).numbers.append(number)
    return list(found.values())


def _cut_in_order(run: Run, lost: set[int]) -> list[Cut]:
    """A cut where the first modules in the order of the forward all lack gradient, and all later ones have it."""
    step = next((one for one in run.of(Stepped) if one.number >= 4), None)
    one = next((one for one in run.of(Activations) if step is not None and one.at > step.at), None)
    if step is None or one is None or any(run.of(Followed)):
        return []
    own: dict[str, list[int]] = {sample.module: [] for sample in one.modules if sample.module}
    for number, facts in run.parameters.items():
        if facts.root == one.root and facts.requires_grad and facts.module in own:
            own[facts.module].append(number)
    having = [(name, numbers) for name, numbers in own.items() if numbers]
    warm = [not ever_touched(run).isdisjoint(numbers) for _, numbers in having]
    first = warm.index(True) if True in warm else 0
    unused, mine = unused_names(run), {number for number in lost if run.parameters[number].root == one.root}
    cold = [n for _, numbers in having[:first] for n in numbers if n in lost and run.parameters[n].name not in unused]
    if first == 0 or not all(warm[first:]) or not cold or len(cold) < len(mine):
        return []
    after, before = having[first - 1][0], having[first][0]
    text = f"The last module without gradient is {after}, the first one with gradient is {before}."
    stop = Stop("an operation that is not known", qualified(run, one.root, before), "", 0, after, text, sure=False)
    return [Cut(stop, cold, step.at, step.number)]


_STEPS = {
    "Round": "round", "Floor": "floor", "Ceil": "ceil", "Trunc": "trunc", "Sign": "sign", "Bernoulli": "bernoulli",
    "Normal": "normal", "Heaviside": "heaviside",
}  # fmt: skip
"""Operations whose gradient is zero everywhere, by the beginning of the names of their nodes."""


def stepwise(kind: str) -> str:
    """The operation of a node whose gradient is zero everywhere; empty for other nodes.

    Example:
        >>> stepwise("RoundBackward0"), stepwise("AddmmBackward0")
        ('round', '')
    """
    return _STEPS.get(kind.partition("Backward")[0], "")


def _zero_gradients(run: Run, least: int = 5) -> Iterator[Found]:
    """Parameters whose gradient is exactly zero in all samples, where such an operation is in the graph."""
    walks = [{op for kind in one.kinds if (op := stepwise(kind))} for one in run.of(Walk) if one.nodes]
    same = next((one for one in run.answers("flat") if one.evidence.get("constant")), None)
    ops = [str(same.evidence["op"])] if same is not None else sorted(walks[0].intersection(*walks)) if walks else []
    seen = grouped(entry for norms in run.of(Norms) for entry in gradients(norms).items())
    own = optimized(run)
    if same is not None:
        own &= frozenset(same.evidence["parameters"])
    zero = [one for one, grads in seen.items() if one in own and len(grads) >= least and not any(grads)]
    others = any(one in optimized(run) and all(grads) for one, grads in seen.items())
    back = next((one for one in run.of(Backward) if one.function == "backward"), None)
    if not ops and others and back is not None:
        yield from _recurrent(run, seen, zero, back)
    if not ops or not zero or not (others or len(zero) == len(seen)) or back is None:
        return
    names, op = names_of(run, zero), ops[0]
    why = "its gradient is zero everywhere", f"{op} gives steps"
    fix = f"y = x + ({op}(x) - x).detach()  # straight through; or a relaxation of {op} with a gradient"
    if op == "normal":
        fix = "y = mean + std * torch.randn_like(mean)  # instead of torch.normal(mean, std): this draw has a gradient"
        why = why[0], "normal draws numbers that no longer depend on its mean and std for autograd"
    if same is not None:
        why = "it returns the same, whatever its input", "Along an axis with one entry nothing can differ"
        fix = f"print the shape of what {op} receives: its axis needs more than one entry"
    place = next((one for one in run.answers("flat") if one.evidence["op"] == op), back)
    yield Found(
        text=f"The {names:gradient|gradients} of {names} {names:is|are} exactly zero in all "
        f"{counted(len(seen[zero[0]]), 'sample')}: {op} is on the way to the loss, and {why[0]}.",
        fix=fix,
        cause=f"{why[1]}: the loss does not depend on its input, so nothing before it in "
        f"{root_variable(run, run.parameters[min(zero)].root)} is trained.",
        since=back,
        where=place,
        parameters=zero,
        evidence={"parameters": len(names), "op": op, "backwards": len(passes(run))},
        severity="info" if same is not None and learned_well(run) else "",
    )


def _recurrent(run: Run, seen: Mapping[int, Sequence[float]], zero: list[int], back: Backward) -> Iterator[Found]:
    """Recurrent layers of whose weights from step to step, or of all in a direction, no loss is made."""
    of = {one: run.parameters[one].name.rpartition(".")[2] for one in seen}
    part = {one: (run.parameters[one].root, run.parameters[one].module, of[one].rpartition("_l")[2]) for one in seen}
    still = {part[one] for one in zero if "weight_ih_l" in of[one]}
    read = {part[one][:2] for one, grads in seen.items() if any(grads) and "weight_ih_l" in of[one]}
    once = [one for one in zero if "weight_hh_l" in of[one] and part[one] not in still]
    # a layer of which nothing is read may be one whose loss counts for nothing yet
    unread = [one for one in zero if part[one] in still and part[one][:2] in read]
    if not unread and not once:
        return
    zero = unread or once
    names, one, samples = names_of(run, zero), run.parameters[zero[0]], len(seen[zero[0]])
    layer = module_code(run, one.root, one.module)
    why = f"their output in {layer} is in no loss"
    fix = "torch.cat([hidden[-2], hidden[-1]], 1)  # the last layer has a state for each of its two directions"
    cause = "Of two directions hidden[-1] is the second one alone, and of several layers hidden[0] is not the last."
    if not unread:
        why = f"of {layer} only a first step, from a state of zeros, counts in the loss"
        fix = (
            "use the output of the last step, out[:, -1] with batch_first=True and out[-1] without; and give the layer "
            "sequences, not one step at a time"
        )
        cause = "Weights between one step and the next are not trained where there is no next step."
    yield Found(
        text=f"The {names:gradient|gradients} of {names} {names:is|are} exactly zero in all "
        f"{counted(samples, 'sample')}: {why}.",
        fix=fix,
        cause=cause,
        since=back,
        where=first_call(run, one.root),
        parameters=zero,
        module=(one.root, one.module),
        evidence={"parameters": len(names), "samples": samples},
        severity="info" if not unread and _has_one_step(run, one) else "warning",
    )


def _has_one_step(run: Run, one: ParameterFacts) -> bool:
    """Whether a recurrent layer is given sequences of one step, as a layer of another kind might be."""
    own = [each for each in run.roots[one.root].modules if each.name == one.module]
    time = 1 if own and own[0].options.get("batch_first") else 0
    shapes = (each.input_shape for seen in run.of(Activations) for each in seen.modules if each.module == one.module)
    return any(shape[0 if len(shape) == 2 else time] == 1 for shape in shapes if len(shape) > 1)


@rule("AB204", "NO_GRAD_ACTIVE", "error", explains=(*STANDS_STILL, "LOSS_NO_GRAD", "GRAPH_CUT", "PARAM_UNUSED"))
def no_grad_active(run: Run, *, steps: float = Limit(3, "the first ones may be a warm-up")) -> Iterator[Found]:
    """Models that are only called without a graph."""
    yield from crashed(run, "NO_GRAD_ACTIVE")
    done = list(run.of(Stepped))
    for root, first in reversed(_roots_without_graph(run).items()) if len(done) >= steps else ():
        lost = [one for one in _without_gradient(run) if run.parameters[one].root == root]
        names, variable = names_of(run, lost), root_variable(run, root)
        mode = "inference mode" if first.inference else "no_grad"
        yield Found(
            text=f"{variable} is only called under {mode}{near(first)}: {names} of the optimizer {names:gets|get} no "
            "gradient.",
            fix=f"call {variable} outside of torch.no_grad(){near(first)}",
            cause=f"Under {mode} no graph is recorded, so no loss reaches the model.",
            since=first,
            step=done[min(2, len(done) - 1)],
            parameters=lost,
            evidence={"parameters": len(names), "calls": sum(one.root == root for one in run.of(Forward))},
            severity="" if first.training else "info",
        )


def _checkpoint_warning(run: Run) -> Warned | None:
    """PyTorch's warning that no input of a reentrant checkpoint requires gradients, if it was shown."""
    text = "None of the inputs have requires_grad=True"
    return next((one for one in run.of(Warned) if text in one.text), None)


@rule("AB205", "CKPT_NO_INPUT_GRAD", "error", explains=(*STANDS_STILL, "GRAPH_CUT", "LOSS_NO_GRAD", "PARAM_UNUSED"))
def ckpt_no_input_grad(run: Run) -> Iterator[Found]:
    """Reentrant checkpoints around trained modules that are given no gradient."""
    crash = list(crashed(run, "CKPT_NO_INPUT_GRAD"))[:1]
    yield from crash
    numbers = {name: number for number in _without_gradient(run) for name in run.parameters[number].names}
    stops = [
        (numbers[name], stop, one)
        for one, paths in followed(run)
        for name, stop in paths.stopped.items()
        if stop.op == "checkpoint" and name in numbers
    ]
    warned = _checkpoint_warning(run)
    inside = {number for number, _, _ in stops} or (set(_without_gradient(run)) if warned is not None else set())
    first = stops[-1][2] if stops else warned
    if crash or not inside or first is None or len(passes(run)) < 2:
        return
    names, root = names_of(run, inside), min(run.parameters[one].root for one in inside)
    of_transformers = root in run.roots and bool(run.roots[root].config)
    yield Found(
        text=f"{names} {names:gets|get} no gradient: no input of the reentrant checkpoint around {names:it|them} "
        "requires gradients.",
        fix="checkpoint(..., use_reentrant=False)"
        + (f"  # or {root_variable(run, root)}.enable_input_require_grads()" if of_transformers else ""),
        cause="A reentrant checkpoint records a graph only if one of its inputs requires gradients; after frozen "
        "layers none does.",
        since=first,
        where=stops[-1][1] if stops and stops[-1][1].file else None,
        parameters=inside,
        evidence={"parameters": len(names)} | ({"warning": warned.text[:120]} if warned is not None else {}),
    )


@rule(
    "AB209", "SAMPLE_CUTS_GRADIENT", "warning",
    explains=("CANNOT_FIT_BATCH", "INPUT_IGNORED", "LR_TOO_LOW", "VANISHING"),
)  # fmt: skip
def sample_cuts_gradient(
    run: Run, *, steps: float = Limit(2, "one alone may be a look at a sample")
) -> Iterator[Found]:
    """Draws from distributions that the gradient does not pass."""
    if any(stop.op == "sample" for _, paths in followed(run) for stop in paths.stopped.values()):
        return  # that the way is cut altogether says more
    yield from _of_normal(run, steps)
    scored = {one.width for one in run.of(Scored)}
    by_line = grouped(((one.file, one.line), one) for one in run.of(Drawn) if one.width not in scored)
    for first, *rest in by_line.values():
        if len({one.step for one in (first, *rest)}) >= steps:
            yield Found(
                text=f"What {first.distribution}.sample() draws{near(first)} goes into "
                f"{qualified(run, first.root, first.module)}: no gradient passes through it, and the loss does not "
                "train the distribution's parameters.",
                fix=first.code.replace(".sample(", ".rsample(") if first.code.count(".sample(") == 1 else ".rsample()",
                cause="sample() draws under no_grad; rsample() computes the draw from the parameters and from noise.",
                since=first,
                module=(first.root, first.module),
                evidence={"distribution": first.distribution, "width": first.width, "draws_seen": len(rest) + 1},
            )


def _of_normal(run: Run, least: float) -> Iterator[Found]:
    """Draws by ``torch.normal`` of learnt parameters, which the loss tells nothing through."""
    kinds = ("NormalBackward1", "NormalBackward3")  # with a mean that has a gradient
    walks = [one for one in run.of(Walk) if any(kind.startswith(kinds) for kind in one.kinds)]
    if len(walks) < least or any(run.of(Scored)) or any(_zero_gradients(run)):
        return
    yield Found(
        text="torch.normal(mean, std) samples on the path to the loss, and its gradient is zero everywhere: the loss "
        "does not train the layers that compute its mean and scale.",
        fix="mean + std * torch.randn_like(std)  # instead of torch.normal(mean, std)",
        cause="A draw of torch.normal is a constant for autograd; with noise that is scaled and shifted the gradient "
        "passes.",
        since=walks[0],
        where=next((one for one in run.of(Backward) if one.at > walks[0].at), None),
        evidence={"graphs": len(walks)},
        severity="" if outcome(run).word == "not learning" else "info",
    )
