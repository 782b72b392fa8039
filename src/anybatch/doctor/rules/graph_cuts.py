"""Rules of the family graph: parameters that no loss reaches because their way is cut, or runs without a graph."""

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import NamedTuple

from anybatch.doctor.rules.graph_zeros import zero_gradients
from anybatch.doctor.rules.naming import (
    at_line,
    counted,
    listed,
    module_facts,
    names_of,
    place_of,
    qualified,
    root_variable,
    verb,
)
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import ever_touched, members, passes, with_gradient, written
from anybatch.doctor.rules.wiring_values import unused_names
from anybatch.records.events import Crashed, Forward, Stepped, Warned
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import Followed
from anybatch.records.paths import Paths, Stop
from anybatch.records.runs import Run
from anybatch.records.samples import Activations

_NO_CUT = frozenset({"unused", "left out", "unknown", "checkpoint", "requires_grad"})
_MODES = frozenset({"no_grad", "inference_mode"})
REMEDIES = {
    "detach": "remove .detach(){line}",
    "detach_": "remove .detach_(){line}",
    "data": "use the tensor itself instead of .data{line}",
    "item": "keep the tensor instead of the number of .item(){line}",
    "numpy": "compute with torch instead of numpy{line}",
    "tensor": "torch.stack([...]) of the tensors instead of torch.tensor([...]){line}",
    "sample": ".rsample() in the place of .sample(){line}; for discrete draws F.gumbel_softmax, or a loss of log_prob",
    "argmax": "torch.softmax(scores, dim=-1) instead of argmax, or F.gumbel_softmax(scores, hard=True){line}",
    "no_grad": "take the call out of torch.no_grad(){line}",
    "inference_mode": "take the call out of torch.inference_mode(){line}",
}


def from_crash(one: Crashed) -> Finding:
    """The finding for a crash that was explained, at the line that has to be changed.

    Args:
        one: the crash.
    """
    file, line = str(one.evidence.get("origin_file", "")), int(one.evidence.get("origin_line", 0))
    return Finding(
        message=one.message or one.text.splitlines()[0],
        place=Place(module=one.module, parameters=one.parameters, file=file or one.file, line=line or one.line),
        fix=one.fix,
        cause=one.cause,
        evidence={"error": one.error, **one.evidence} | ({"raised_at": f"{one.file}:{one.line}"} if line else {}),
        step=one.step,
        at=one.at,
        severity="error",
    )


def without_gradient(run: Run) -> frozenset[int]:
    """Trainable parameters of optimizers that no backward of the run reached and that nobody else wrote.

    Args:
        run: the facts.
    """
    every = frozenset().union(*members(run).values())
    return frozenset(
        number
        for number in every - with_gradient(run) - written(run)
        if (one := run.parameters.get(number)) is not None and one.requires_grad and one.root >= 0
    )


def roots_without_graph(run: Run) -> dict[int, Forward]:
    """Models with parameters in an optimizer that were only called without a graph, and their first call.

    Args:
        run: the facts.
    """
    lost = without_gradient(run)
    found: dict[int, Forward] = {}
    with_graph: set[int] = set()
    for one in run.of(Forward):
        found.setdefault(one.root, one)
        if one.grad and not one.inference:
            with_graph.add(one.root)
    return {
        root: one
        for root, one in found.items()
        if root not in with_graph and any(run.parameters[number].root == root for number in lost)
    }


class _Cut(NamedTuple):
    stop: Stop
    numbers: list[int]
    at: int
    step: int


@rule(
    "AB201",
    "GRAPH_CUT",
    "error",
    explains=(
        "STEP_WITHOUT_GRADIENT",
        "PARAM_UNUSED",
        "LR_TOO_LOW",
        "INPUT_IGNORED",
        "LOSS_CONSTANT",
        "BACKEND_NO_WRITE",
        "VANISHING",
        "LOSS_TERM_CUT",
    ),
)
def _graph_cut(run: Run) -> Iterator[Finding]:
    yield from zero_gradients(run)
    lost = set(without_gradient(run))
    hidden = roots_without_graph(run)
    lost -= {number for number in lost if run.parameters[number].root in hidden}
    count = len(passes(run))
    if not lost or count < 3 or (checkpoint_warning(run) and not any(run.of(Followed))):
        return
    cuts = followed_cuts(run, lost) or _cut_in_order(run, lost)
    for cut in cuts:
        names = names_of(run, cut.numbers)
        stop = cut.stop
        file, number = _switched_off(stop)
        place = place_of(run, cut.numbers, file=file, line=number)
        line = f" in {PurePath(file).name}:{number}" if file else ""
        fix = REMEDIES.get(stop.op, "use a differentiable operation instead of {op}{line}").format(
            op=stop.op, line=line
        )
        meant = stop.op in _MODES and _evaluating(run, cut.numbers)
        yield Finding(
            message=f"{listed(names)} {verb(len(names), 'gets', 'get')} no gradient in any of "
            f"{counted(count, 'backward')}: the way to the loss is cut by {stop.op}"
            f"{f' in {stop.module}' if stop.module else ''}{at_line(file, number)}.",
            place=Place(
                module=stop.module or place.module, parameters=place.parameters, file=place.file, line=place.line
            ),
            fix=fix,
            cause=stop.message or f"What {stop.op} gives has no graph behind it, so that nothing before it is trained.",
            evidence={
                "parameters": len(names),
                "numbers": sum(run.parameters[one].numel for one in cut.numbers),
                "backwards": count,
                "op": stop.op,
                "last_with_graph": stop.after,
            },
            step=cut.step,
            at=cut.at,
            severity="info" if meant else "error" if stop.sure else "warning",
        )


def _switched_off(stop: Stop) -> tuple[str, int]:
    """The line of a cut; of one under a mode the line where that was entered."""
    entered = re.fullmatch(r"Gradients were switched off at (.+):(\d+)\.", stop.message)
    return (entered[1], int(entered[2])) if entered else (stop.file, stop.line)


def _evaluating(run: Run, numbers: list[int]) -> bool:
    modes = {sample.module: sample.training for one in run.of(Activations) for sample in one.modules if sample.module}
    found = [module_facts(run, run.parameters[one]) for one in numbers]
    return all(one is not None and not modes.get(one.name, one.training) for one in found)


def followed_cuts(run: Run, lost: set[int]) -> list[_Cut]:
    """The cuts that an iteration followed operation by operation has shown for some parameters, by place."""
    numbers = {name: number for number in lost for name in run.parameters[number].names}
    stops: dict[int, tuple[Stop, Followed]] = {}
    for one in run.of(Followed):
        if one.paths:
            for name, stop in Paths.from_dict(one.paths).stopped.items():
                if name in numbers:
                    stops[numbers[name]] = (stop, one)
    found: dict[tuple[str, str, str, int], _Cut] = {}
    for number, (stop, one) in sorted(stops.items()):
        if stop.op not in _NO_CUT:
            switched = bool(stop.op in _MODES and stop.message)  # one block may hold many modules
            key = (stop.op, stop.message, "", 0) if switched else (stop.op, stop.module, stop.file, stop.line)
            found.setdefault(key, _Cut(stop, [], one.at, one.step)).numbers.append(number)
    return list(found.values())


def _cut_in_order(run: Run, lost: set[int]) -> list[_Cut]:
    """A cut where the first modules in the order of the forward all lack gradient, and all later ones have it."""
    if any(run.of(Followed)):
        return []
    step = next((one for one in run.of(Stepped) if one.number >= 4), None)
    touched, unused = ever_touched(run), unused_names(run)
    for one in run.of(Activations):
        if step is None or one.at < step.at:
            continue
        order = list(dict.fromkeys(sample.module for sample in one.modules if sample.module))
        has = [
            (
                name,
                [n for n, p in run.parameters.items() if p.root == one.root and p.module == name and p.requires_grad],
            )
            for name in order
        ]
        having = [(name, own) for name, own in has if own]
        cold = [index for index, (_, own) in enumerate(having) if not set(own) & touched]
        if not cold or len(cold) == len(having) or cold != list(range(len(cold))):
            return []
        numbers = [n for index in cold for n in having[index][1] if n in lost and run.parameters[n].name not in unused]
        if not numbers or len(numbers) < len({n for n in lost if run.parameters[n].root == one.root}):
            return []
        after, before = having[cold[-1]][0], having[len(cold)][0]
        text = f"The last module without gradient is {after}, the first one with gradient is {before}."
        stop = Stop("an operation that is not known", qualified(run, one.root, before), "", 0, after, text, sure=False)
        return [_Cut(stop, numbers, step.at, step.number)]
    return []


@rule("AB204", "NO_GRAD_ACTIVE", "error", explains=("LOSS_NO_GRAD", "GRAPH_CUT", "PARAM_UNUSED", "LR_TOO_LOW"))
def _no_grad_active(run: Run) -> Iterator[Finding]:
    for crash in run.of(Crashed):
        if crash.name == "NO_GRAD_ACTIVE":
            yield from_crash(crash)
    steps = list(run.of(Stepped))
    if len(steps) < 3:
        return
    for root, first in roots_without_graph(run).items():
        lost = [one for one in without_gradient(run) if run.parameters[one].root == root]
        names = names_of(run, lost)
        variable = root_variable(run, root)
        mode = "inference mode" if first.inference else "no_grad"
        yield Finding(
            message=f"{variable} is only called under {mode}{at_line(first.file, first.line)}: "
            f"{listed(names)} of the optimizer {verb(len(names), 'gets', 'get')} no gradient.",
            place=place_of(run, lost, file=first.file, line=first.line),
            fix=f"call {variable} outside of torch.no_grad(){at_line(first.file, first.line)}",
            cause=f"Under {mode} no graph is recorded, so that no loss reaches the model.",
            evidence={"parameters": len(names), "calls": sum(one.root == root for one in run.of(Forward))},
            step=steps[2].step,
            at=first.at,
            severity="" if first.training else "info",
        )


def checkpoint_warning(run: Run) -> Warned | None:
    """PyTorch's warning that no input of a reentrant checkpoint requires gradients, if it was shown.

    Args:
        run: the facts.
    """
    text = "None of the inputs have requires_grad=True"
    return next((one for one in run.of(Warned) if text in one.text), None)


@rule("AB205", "CKPT_NO_INPUT_GRAD", "error", explains=("GRAPH_CUT", "LOSS_NO_GRAD", "PARAM_UNUSED", "LR_TOO_LOW"))
def _ckpt_no_input_grad(run: Run) -> Iterator[Finding]:
    crash = next((one for one in run.of(Crashed) if one.name == "CKPT_NO_INPUT_GRAD"), None)
    if crash is not None:
        yield from_crash(crash)
        return
    lost = without_gradient(run)
    numbers = {name: number for number in lost for name in run.parameters[number].names}
    inside: set[int] = set()
    stop, followed = None, None
    for one in run.of(Followed):
        for name, found in (Paths.from_dict(one.paths).stopped if one.paths else {}).items():
            if found.op == "checkpoint" and name in numbers:
                inside.add(numbers[name])
                stop, followed = found, one
    warned = checkpoint_warning(run)
    if warned is not None and not inside:
        inside = set(lost)
    first = followed or warned
    if not inside or first is None or len(passes(run)) < 2:
        return
    names = names_of(run, inside)
    file, line = (stop.file, stop.line) if stop is not None and stop.file else ("", 0)
    yield Finding(
        message=f"{listed(names)} {verb(len(names), 'gets', 'get')} no gradient: no input of the reentrant checkpoint "
        f"around {verb(len(names), 'it', 'them')} requires gradients.",
        place=place_of(run, inside, file=file, line=line),
        fix="checkpoint(..., use_reentrant=False)" + _of_transformers(run, inside),
        cause="A reentrant checkpoint records a graph only if one of its inputs requires gradients; behind frozen "
        "layers none does.",
        evidence={"parameters": len(names)} | ({"warning": warned.text[:120]} if warned is not None else {}),
        step=first.step,
        at=first.at,
    )


def _of_transformers(run: Run, numbers: set[int]) -> str:
    """What a model of Transformers has for this; empty for others."""
    root = min(run.parameters[one].root for one in numbers)
    if root not in run.roots or not run.roots[root].config:
        return ""
    return f"  # or {root_variable(run, root)}.enable_input_require_grads()"
