"""Rules on units that are dead or saturated; their codes are of the family numerics."""

from collections.abc import Iterator
from dataclasses import replace

from anybatch.doctor.rules.registry import rule
from anybatch.doctor.views.courses import course
from anybatch.doctor.views.measures import SQUASHING, latest, model_name, module_name
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, ModuleSample


@rule(
    "AB553",
    "DEAD_UNITS",
    "warning",
    explains=("VANISHING", "INPUT_IGNORED", "LOSS_CONSTANT", "LR_TOO_LOW", "GRAPH_CUT", "CANNOT_FIT_BATCH"),
)
def dead_units(run: Run) -> Iterator[Finding]:
    """Layers most of whose units are always zero."""
    losses = course(run)
    if losses.fell or losses.converged:
        return
    for root, samples in latest(run):
        dead = [one for one in _units(samples[-1]) if one.always_dead > 0.9 and _is_hidden(one, samples[-1])]
        if len(samples) < 3 or not dead:
            continue
        worst = dead[0]
        course_ = [(sample, _of(_units(sample), worst)) for sample in samples]
        begin = next((sample for sample, one in course_ if one is not None and one.dead > 0.9), samples[-1])
        early = begin is samples[0]
        init = f"for layer in {model_name(run, root)}.modules(): isinstance(layer, nn.Linear) and "
        yield Finding(
            message=f"{worst.always_dead:.0%} of the units of {module_name(run, root, worst.module)} ({worst.cls}) are "
            f"zero for every input" + (" from the first step on" if early else f" since step {begin.step}")
            + (f", and {len(dead) - 1} more layers too." if len(dead) > 1 else "."),
            place=Place(module=module_name(run, root, worst.module)),
            fix=f"{init}nn.init.kaiming_normal_(layer.weight, nonlinearity='relu')"
            if early
            else "a lower learning rate with warm-up; then nn.LeakyReLU() or a normalisation before the activation",
            cause="Their inputs are never above zero, so they have no gradient and can't come back"
            + ("; the initialisation left them so." if early else "; an update that was too long drove them there."),
            evidence={"always_dead": {one.module: one.always_dead for one in dead[:8]}, "layers": len(dead)},
            step=samples[min(2, len(samples) - 1)].step if early else begin.step,
            at=begin.at,
        )  # fmt: skip


def _is_hidden(sample: ModuleSample, of: Activations) -> bool:
    """An activation that is not the output of the model, and no dropout, embedding or container."""
    last = max((one.order for one in of.modules if one.module), default=-1)
    return sample.module != "" and sample.order < last and ("LU" in sample.cls or "Threshold" in sample.cls)


def _units(sample: Activations) -> list[ModuleSample]:
    """The activations of a forward: modules, and functions such as ``relu`` under the name of the module before."""
    before = {one.order: one for one in sample.modules}
    functional = [
        replace(
            before[one.order - 1],
            cls="ReLU",
            dead=one.input_dead or 0.0,
            always_dead=one.input_always_dead or 0.0,
        )
        for one in sample.modules
        if one.input_by.startswith("Relu") and one.module and one.order - 1 in before
    ]
    return [*sample.modules, *functional]


def _of(units: list[ModuleSample], wanted: ModuleSample) -> ModuleSample | None:
    return next((one for one in units if (one.module, one.cls) == (wanted.module, wanted.cls)), None)


@rule(
    "AB554",
    "SATURATED",
    "warning",
    explains=("VANISHING", "INPUT_IGNORED", "LOSS_CONSTANT", "LR_TOO_LOW", "CANNOT_FIT_BATCH"),
)
def saturated(run: Run) -> Iterator[Finding]:
    """Squashing activations at their limits."""
    losses = course(run)
    if losses.fell or losses.converged:
        return
    for root, samples in latest(run):
        full: dict[str, list[Activations]] = {}
        for sample in samples:
            last = max((one.order for one in sample.modules if one.module), default=-1)
            for one in sample.modules:
                if one.saturated is not None and one.saturated > 0.9 and one.cls in SQUASHING and one.order < last:
                    full.setdefault(one.module, []).append(sample)
        found = [(name, taken) for name, taken in full.items() if len(taken) >= 3 and taken[-1] is samples[-1]]
        if not found:
            continue
        name, taken = found[0]
        share = next(one.saturated or 0.0 for one in samples[-1].modules if one.module == name)
        cls = next(one.cls for one in samples[-1].modules if one.module == name)
        yield Finding(
            message=f"{share:.0%} of the outputs of {module_name(run, root, name)} ({cls}) are at a limit"
            + (" from the first step on." if taken[0] is samples[0] else f" since step {taken[0].step}."),
            place=Place(module=module_name(run, root, name)),
            fix="nn.LayerNorm before it, nn.init.xavier_uniform_(layer.weight), or nn.ReLU() in its place",
            cause="At a limit the slope is almost zero, and no gradient goes through.",
            evidence={"saturated": share, "layers": [other for other, _ in found[:8]]},
            step=taken[2].step,
            at=taken[0].at,
        )
