"""Rules of the family wiring: what is frozen, and what should be and is not."""

from collections.abc import Iterator

from anybatch.doctor.rules.naming import (
    counted,
    listed,
    made_at,
    module_code,
    names_of,
    optimizer_variable,
    parameter_name,
    place_of,
    qualified,
    root_variable,
    verb,
)
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import ever_touched, members, passes, stepping, windows_of
from anybatch.records.events import Loaded, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run
from anybatch.records.samples import Norms
from anybatch.records.tables import OptimizerFacts


@rule("AB106", "FREEZE_TOO_MUCH", "warning", explains=("LR_TOO_LOW", "LOSS_CONSTANT"))
def _freeze_too_much(run: Run) -> Iterator[Finding]:
    losses = _losses(run)
    if run.steps < 15 or len(losses) < 15 or any(one.into == "module" and one.matched for one in run.of(Loaded)):
        return
    third = len(losses) // 3
    first, last = sum(losses[:third]) / third, sum(losses[-third:]) / third
    if not last > 0.9 * first:
        return
    trained = ever_touched(run) & frozenset().union(*members(run).values())
    for root in run.roots:
        own = {number: one for number, one in run.parameters.items() if one.root == root and one.registered}
        active = [number for number in own if number in trained]
        total = sum(one.numel for one in own.values())
        share = sum(own[number].numel for number in active) / total if total else 0.0
        frozen = [number for number, one in own.items() if not one.requires_grad and len(one.shape) >= 2]
        if not active or not frozen or share > 0.1 or any(len(own[number].shape) >= 2 for number in trained & set(own)):
            continue
        step = next(run.of(Stepped))
        variable = root_variable(run, root)
        head = max(frozen)
        yield Finding(
            message=f"Only {counted(len(active), 'parameter')} of norm layers and biases of {variable} "
            f"({share:.1%} of its numbers) are trained; all {counted(len(frozen), 'weight matrix', 'weight matrices')} "
            f"are frozen, {parameter_name(run, own[head])} of the last layer too, and the loss stays at {last:.4g} "
            f"(it was {first:.4g}).",
            place=place_of(run, frozen),
            fix=f"{module_code(run, root, own[head].module)}.requires_grad_(True)  # freeze by module, not by name",
            cause="The condition that freezes parameters matches more of them than it was meant to.",
            evidence={"trained_share": share, "trained": len(active), "frozen": len(frozen), "loss": [first, last]},
            step=step.step,
            at=step.at,
        )


def _losses(run: Run) -> list[float]:
    """The value of the loss that each step of the first optimizer used."""
    found = stepping(run)
    every = windows_of(run, found[0]) if found else []
    return [one.used[-1].fact.value for one in every if one.used and one.used[-1].fact.value is not None]


@rule("AB107", "FREEZE_INEFFECTIVE", "error")
def _freeze_ineffective(run: Run) -> Iterator[Finding]:
    touched = ever_touched(run)
    for root in run.roots.values():
        for module in root.modules:
            if module.requires_grad is not False:
                continue
            prefix = f"{module.name}." if module.name else ""
            below = [
                number
                for number, one in run.parameters.items()
                if one.root == root.root
                and one.requires_grad
                and number in touched
                and (one.module == module.name or one.module.startswith(prefix))
            ]
            if not below:
                continue
            code = module_code(run, root.root, module.name)
            step = next(run.of(Stepped), None)
            yield Finding(
                message=f"{code}.requires_grad = False froze nothing: {listed(names_of(run, below))} still "
                f"{verb(len(below), 'gets', 'get')} gradients.",
                place=Place(
                    module=qualified(run, root.root, module.name),
                    parameters=names_of(run, below),
                    file=root.file,
                    line=root.line,
                ),
                fix=f"{code}.requires_grad_(False)",
                cause="requires_grad is an attribute of tensors; on a module it is a new attribute that nobody reads.",
                evidence={"parameters": len(below), "numbers": sum(run.parameters[one].numel for one in below)},
                step=step.step if step else 0,
                at=root.at,
            )


@rule("AB108", "FROZEN_MOVES", "warning")
def _frozen_moves(run: Run) -> Iterator[Finding]:
    for optimizer in stepping(run):
        facts = run.optimizers.get(optimizer)
        samples = [one for one in run.of(Norms) if one.optimizer == optimizer]
        if facts is None or len(samples) < 3:
            continue
        drifting, since = _drifting(run, facts, samples), samples[0]
        if not drifting:
            drifting, since = _left_out(run, facts, samples)
        if not drifting:
            continue
        group = next(index for index, one in enumerate(facts.groups) if set(drifting) & set(one.parameters))
        decay, momentum = facts.groups[group].weight_decay, facts.groups[group].momentum
        why = f"weight decay of {decay:g}" if decay else "momentum" if momentum else f"the step of {facts.cls} itself"
        names = names_of(run, drifting)
        variable = optimizer_variable(run, optimizer)
        file, line = made_at(facts)
        root = run.parameters[drifting[0]].root
        code = module_code(run, root, run.parameters[drifting[0]].module)
        late = since is not samples[0]
        when = f" since step {since.number}" if late else ""
        yield Finding(
            message=f"{listed(names)} {verb(len(names), 'has', 'have')} no gradient{when} but "
            f"{verb(len(names), 'moves', 'move')}: changed by each step of {variable}: by {why}.",
            place=place_of(run, drifting, optimizer=optimizer, file=file, line=line),
            fix=f"{variable}.zero_grad(set_to_none=True)  # a step passes over parameters whose grad is None"
            if late
            else f"{code}.requires_grad_(False)  # and leave it out of {variable}, or set its grad to None",
            cause="A gradient of zero is not the same as no gradient: decay and momentum still act on the parameter.",
            evidence={
                "parameters": len(names),
                "weight_decay": decay,
                "momentum": momentum,
                "samples": len(samples),
                "weight": [_entry(one, drifting[0]) for one in (since, samples[-1])],
            },
            step=samples[min(samples.index(since) + 2, len(samples) - 1)].number,
            at=since.at,
        )


def _entry(sample: Norms, number: int) -> float | None:
    return sample.weight[sample.parameters.index(number)] if number in sample.parameters else None


def _drifting(run: Run, facts: OptimizerFacts, samples: list[Norms]) -> list[int]:
    """Parameters that had no gradient other than zero in any sample and were changed by at least three steps."""
    own = [number for group in facts.groups for number in group.parameters if number in run.parameters]
    moved = dict.fromkeys(own, 0)
    decays = {number: bool(group.weight_decay) for group in facts.groups for number in group.parameters}
    still, seen = set(own), 0
    for sample in samples:
        for number, grad, update in zip(sample.parameters, sample.grad, sample.update, strict=True):
            if number not in moved:
                continue
            if grad is not None and grad != 0.0:
                still.discard(number)
            elif update > 0.0 and (grad is not None or not facts.is_torchs):
                moved[number] += 1
        seen += 1
    if len(still) * 2 > len(own):
        return []
    return [
        number
        for number in own
        if number in still
        and moved[number] >= 3
        and moved[number] * 3 >= seen
        and (decays[number] or not run.parameters[number].requires_grad)
    ]


def _left_out(run: Run, facts: OptimizerFacts, samples: list[Norms]) -> tuple[list[int], Norms]:
    """Parameters that no backward reached from a sample on, while their gradients stayed zeros and they moved."""
    own = {number for group in facts.groups for number in group.parameters}
    starts: dict[int, int] = {}
    for number in own:
        start = len(samples)
        for sample in reversed(samples):
            place = sample.parameters.index(number) if number in sample.parameters else -1
            if place < 0 or sample.grad[place] != 0.0 or not sample.update[place] > 0.0:
                break
            start -= 1
        if 0 < start <= len(samples) - 2:
            starts[number] = start
    if not starts:
        return [], samples[0]
    first = min(starts.values())
    after = [one for one in passes(run) if one.fact.at > samples[first].at]
    reached = frozenset().union(*(one.touched for one in after if one.touched is not None))
    found = [number for number, start in starts.items() if start == first and number not in reached]
    others = any(number in reached for number in own)
    known = len(after) >= 10 and all(one.touched is not None for one in after)
    return (sorted(found) if found and others and known else []), samples[first]
