"""Rules on what an update writes; their codes are of the family numerics."""

import itertools
import math
from collections.abc import Iterator
from statistics import fmean

from anybatch.doctor.rules.registry import rule
from anybatch.doctor.views.courses import Course, course, groups_of
from anybatch.doctor.views.measures import Entry, entries, module_name, optimizer_name, ratio
from anybatch.doctor.views.naming import module_code, parameter_name
from anybatch.records.events import Backward, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run
from anybatch.records.samples import Norms
from anybatch.records.tables import OptimizerFacts, ParameterFacts

_HALF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The relative distance below which an update is rounded away."""

_SHRINKING = 0.05
"""The share of the weights that a decay takes at each step, above which nothing can be learned against it."""

_FLOAT32 = 2.0**-24
_EPSILON = 1e-6
"""A hundred times the usual eps of Adam, below which its update shrinks with the gradient."""


def _samples(run: Run) -> dict[int, list[Norms]]:
    found: dict[int, list[Norms]] = {}
    for norms in run.of(Norms):
        found.setdefault(norms.optimizer, []).append(norms)
    return found


def _of(run: Run, samples: list[Norms]) -> dict[int, list[tuple[Norms, Entry]]]:
    """The entries of each parameter over the samples."""
    found: dict[int, list[tuple[Norms, Entry]]] = {}
    for norms in samples:
        for one in entries(run, norms):
            found.setdefault(one.parameter.parameter, []).append((norms, one))
    return found


def _lost(one: Entry) -> float:
    """The share of entries with a gradient that did not change."""
    given = 1.0 - one.grad_zeros
    return (one.unchanged - one.grad_zeros) / given if given > 0.5 else 0.0


@rule("AB557", "UPDATE_LOST_PRECISION", "warning", explains=("LR_TOO_LOW", "LOSS_CONSTANT"))
def update_lost_precision(run: Run) -> Iterator[Finding]:
    """Parameters in half precision that don't move."""
    for optimizer, samples in _samples(run).items():
        lost: list[tuple[ParameterFacts, list[tuple[Norms, Entry]]]] = []
        groups = groups_of(run, optimizer)
        for number, seen in _of(run, samples).items():
            facts = run.parameters[number]
            taken = [(norms, one) for norms, one in seen if one.grad > 0]
            if facts.dtype not in _HALF or len(taken) < 8 or groups[number][1].lr == 0:
                continue
            if sum(_lost(one) > 0.8 for _, one in taken) >= 0.8 * len(taken):
                lost.append((facts, taken))
        if not lost:
            continue
        facts, taken = max(lost, key=lambda entry: _lost(entry[1][-1][1]))
        worst = taken[-1][1]
        others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        yield Finding(
            message=f"{worst.unchanged:.0%} of the entries of {facts.name}{others} ({facts.dtype}) are bitwise the "
            f"same after each step of {optimizer_name(run, optimizer)}, although they have a gradient.",
            place=Place(
                module=module_name(run, facts.root, facts.module), parameters=tuple(one.name for one, _ in lost)
            ),
            fix="Keep the weights in float32 and compute in "
            f"{facts.dtype}: with torch.autocast(device_type, dtype=torch.{facts.dtype}): ...",
            cause=f"An update below {_HALF[facts.dtype] / 2:.2g} of an entry is rounded away in {facts.dtype}.",
            evidence={"unchanged": worst.unchanged, "parameters": len(lost), "dtype": facts.dtype,
                      "root_mean_square": worst.weight / math.sqrt(max(facts.numel, 1))},
            step=taken[7][0].step,
            at=taken[0][0].at,
        )  # fmt: skip


@rule(
    "AB558",
    "SYMMETRIC_INIT",
    "error",
    explains=("LOSS_CONSTANT", "VANISHING", "INPUT_IGNORED", "DEAD_UNITS", "CANNOT_FIT_BATCH", "LR_TOO_LOW"),
)
def symmetric_init(run: Run) -> Iterator[Finding]:
    """Matrices of equal rows whose gradients have equal rows."""
    for samples in _samples(run).values():
        same = [
            number for number, seen in _of(run, samples).items() if _stays_equal(run.parameters[number], seen, samples)
        ]
        if not same:
            continue
        yield _products(run, same, samples) or _equal_rows(run, same, samples)


def _equal_rows(run: Run, same: list[int], samples: list[Norms]) -> Finding:
    facts = run.parameters[same[0]]
    value = f" ({facts.constant:g})" if facts.constant is not None else ""
    return Finding(
        message=f"All {facts.shape[0]} rows of {facts.name}{value} are equal, and so are the rows of its gradient"
        + (f"; {len(same) - 1} more matrices too." if len(same) > 1 else "."),
        place=_place_of(run, same),
        fix=f"nn.init.kaiming_normal_({_code(run, facts)})",
        cause="Units with the same weights get the same gradient and stay the same for ever.",
        evidence={"rows": facts.shape[0], "matrices": len(same)},
        step=samples[min(1, len(samples) - 1)].step,
        at=facts.at,
    )


def _products(run: Run, same: list[int], samples: list[Norms]) -> Finding | None:
    """Two matrices of one module that are both zero: the gradient of each has the other one as a factor."""
    zero = [run.parameters[number] for number in same if run.parameters[number].constant == 0]
    pairs = [
        (one, other) for one, other in itertools.pairwise(zero) if (one.root, one.module) == (other.root, other.module)
    ]
    if not pairs:
        return None
    one, other = pairs[0]
    end, more = one.name.rpartition(".")[2], f"; {len(pairs) - 1} more pairs too" if len(pairs) > 1 else ""
    owner = run.roots[one.root].variable if one.root in run.roots else ""
    fix = f"nn.init.kaiming_uniform_({_code(run, one)})"
    if len(pairs) > 1:
        fix = (
            f"for name, parameter in {owner or 'model'}.named_parameters():\n"
            f'    if name.endswith("{end}"):\n        nn.init.kaiming_uniform_(parameter)'
        )
    return Finding(
        message=f"{one.name} and {other.name} are both zero, and so is every gradient of them{more}.",
        place=_place_of(run, same),
        fix=fix,
        cause="The gradient of a factor is a product with the other factor: where both are zero, both stay zero. "
        "One of them begins at random.",
        evidence={"matrices": len(same)},
        step=samples[min(1, len(samples) - 1)].step,
        at=one.at,
    )


def _place_of(run: Run, numbers: list[int]) -> Place:
    facts = run.parameters[numbers[0]]
    return Place(
        module=module_name(run, facts.root, facts.module),
        parameters=tuple(parameter_name(run, run.parameters[number]) for number in numbers),
    )


def _stays_equal(facts: ParameterFacts, seen: list[tuple[Norms, Entry]], samples: list[Norms]) -> bool:
    if len(facts.shape) < 2 or facts.shape[0] < 2 or facts.role not in ("weight", "other") or len(seen) < 2:
        return False
    begins = facts.equal_rows or facts.constant is not None
    first = samples[:10]  # rounding tells equal rows apart later, one bit after the other
    rows = [norms for norms in first if facts.parameter in norms.equal_grad_rows]
    if begins and len(rows) >= 2 and len(rows) >= 0.6 * min(len(first), len(seen)):
        return True
    return facts.constant == 0 and len(seen) >= 5 and all(one.grad == 0 and one.update == 0 for _, one in seen)


def _code(run: Run, facts: ParameterFacts) -> str:
    """An expression for a parameter."""
    module = module_code(run, facts.root, facts.module)
    return f"{module}.{facts.name.rpartition('.')[2]}"


@rule(
    "AB559",
    "DECAY_DOMINATES",
    "warning",
    explains=("VANISHING", "LOSS_CONSTANT", "INPUT_IGNORED", "DEAD_UNITS", "CANNOT_FIT_BATCH", "LR_TOO_HIGH"),
)
def decay_dominates(run: Run) -> Iterator[Finding]:
    """Weights that shrink because their decay is all that moves them."""
    for optimizer, samples in _samples(run).items():
        losses = course(run, optimizer)
        if losses.converged or not losses.finite:
            continue
        facts = run.optimizers.get(optimizer, OptimizerFacts(optimizer=optimizer))
        decoupled = "adamw" in facts.cls.lower()
        decay = max((group.weight_decay for _, group in groups_of(run, optimizer).values()), default=0.0)
        if not samples or samples[-1].number < 20 or not decay:
            continue
        rate = decay * max(max(lrs) for lrs in _lrs(run, optimizer))
        shrinking = rate >= _SHRINKING and (decoupled or facts.cls == "SGD" or not losses.fell)
        shares = sorted(_decay(run, norms, decoupled) for norms in samples)
        first, last = (math.hypot(*(one.weight for one in entries(run, norms))) for norms in (samples[0], samples[-1]))
        usual = shares[len(shares) // 2]
        if not (shrinking or (usual >= 10 and not losses.fell)) or last > 0.9 * first or first == 0:
            continue
        name = optimizer_name(run, optimizer)
        strength = f"takes {rate:.2g} of the weights at each step" if usual < 10 else (
            f"is {usual:.2g} times as strong as the gradient")  # fmt: skip
        begin = next((one.at for one in run.of(Backward)), samples[0].at)
        yield Finding(
            message=f"The weight decay {decay:g} of {name} {strength}; the weights shrink from {first:.3g} to "
            f"{last:.3g} while the loss {'is' if losses.fell and not _stands(losses) else 'stays'} at "
            f"{losses.last:.3g}.",
            place=Place(optimizer=name, file=facts.file, line=facts.line),
            fix=f"for group in {name}.param_groups: group['weight_decay'] = {1e-2 if decoupled else 1e-4:g}",
            cause="The optimizer minimises the length of the weights instead of the loss.",
            evidence={"weight_decay": decay, "decay_over_gradient": usual, "share_of_a_step": rate,
                      "norm_first": first, "norm_last": last},
            step=samples[0].step,
            at=begin,
            severity="info" if losses.fell and not _stands(losses) else "",
        )  # fmt: skip


def _stands(losses: Course) -> bool:
    """Whether the loss has not fallen any more since the middle of the run."""
    half = losses.finite[len(losses.finite) // 2 :]
    middle = len(half) // 2
    return middle >= 10 and fmean(half[middle:]) > 0.95 * fmean(half[:middle])


def _lrs(run: Run, optimizer: int) -> list[tuple[float, ...]]:
    return [one.lrs for one in run.of(Stepped) if one.optimizer == optimizer and one.lrs] or [(0.0,)]


def _decay(run: Run, norms: Norms, decoupled: bool) -> float:
    """How much longer the decay is than the gradient, over all parameters together."""
    groups = groups_of(run, norms.optimizer)
    found = [(one, groups[one.parameter.parameter][1].weight_decay) for one in entries(run, norms)]
    decay = math.hypot(*(weight_decay * one.weight for one, weight_decay in found))
    other = (
        math.sqrt(sum(one.parameter.numel for one, _ in found))
        if decoupled
        else math.hypot(*(one.grad for one, _ in found))
    )
    return decay / other if other > 0 else math.inf


@rule("AB560", "BACKEND_NO_WRITE", "error", explains=("LR_TOO_LOW", "LOSS_CONSTANT"))
def backend_no_write(run: Run) -> Iterator[Finding]:
    """Parameters that an update should have changed and did not."""
    for optimizer, samples in _samples(run).items():
        groups = groups_of(run, optimizer)
        facts = run.optimizers.get(optimizer, OptimizerFacts(optimizer=optimizer))
        if len(samples) < 5:
            continue
        stuck = []
        for number, seen in _of(run, samples).items():
            lr = groups[number][1].lr
            if run.parameters[number].dtype != "float32" or len(seen) < 5 or lr == 0:
                continue
            if all(one.unchanged == 1.0 and one.update == 0 and _should(one, lr, facts.cls) for _, one in seen):
                stuck.append(run.parameters[number])
        if not stuck:
            continue
        name = optimizer_name(run, optimizer)
        whole = all(value == 0 for norms in samples if (value := ratio(run, norms)) is not None)
        yield Finding(
            message=f"{name} ({facts.cls}) computes updates for {parameter_name(run, stuck[0])}"
            + (f" and {len(stuck) - 1} more parameters" if len(stuck) > 1 else "")
            + " and never writes them: not one entry has changed.",
            place=Place(
                module=module_name(run, stuck[0].root, stuck[0].module),
                parameters=tuple(parameter_name(run, one) for one in stuck),
                optimizer=name,
                file=facts.file,
                line=facts.line,
            ),
            fix=f"In {facts.cls}.step: p.add_(update, alpha=-lr) on the parameter itself, or p.copy_(new)",
            cause="The optimizer writes into a copy, such as p.contiguous() or p.float().",
            evidence={"parameters": len(stuck), "samples": len(samples), "all": whole},
            step=samples[4].step,
            at=samples[0].at,
        )


def _should(one: Entry, lr: float, cls: str) -> bool:
    """Whether the update is long enough not to be rounded away: a hundred times the resolution."""
    if one.grad == 0 or one.state_moved is False or (one.state_moved is None and cls != "SGD"):
        return False
    root = math.sqrt(max(one.parameter.numel, 1))
    typical, grad = one.weight / root, one.grad / root
    step = lr * grad if "ada" not in cls.lower() else lr
    return step > 100 * _FLOAT32 * typical and grad > _EPSILON
