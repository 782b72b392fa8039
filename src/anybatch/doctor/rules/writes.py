"""Rules on what an update writes; their codes are of the family numerics."""

import itertools
import math
from collections.abc import Iterator
from statistics import fmean, median_high

from anybatch.doctor.rules.registry import LEARNS_NOTHING, STANDS_STILL, Found, Limit, rule
from anybatch.doctor.views.courses import Course, groups_of
from anybatch.doctor.views.measures import Entry, entries, ratio
from anybatch.doctor.views.naming import Names, counted, module_code, names_of, parameter_name
from anybatch.doctor.views.optimizing import OptimizerView, measured
from anybatch.doctor.views.outcomes import outcome
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run, grouped
from anybatch.records.samples import Norms, Written
from anybatch.records.tables import ParameterFacts

_HALF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The relative distance below which an update is rounded away."""

_LITTLE_LEFT = 0.3
"""Of the length of the weights of a model that learned nothing, which a gradient does not make so short."""


def _series(one: OptimizerView) -> dict[int, list[tuple[Norms, Entry]]]:
    """The entries of each parameter over the samples."""
    return grouped(
        (entry.parameter.parameter, (norms, entry)) for norms in one.samples for entry in entries(one.run, norms)
    )


def _lost(one: Entry) -> float:
    """The share of entries with a gradient that did not change."""
    given = 1.0 - one.grad_zeros
    return (one.unchanged - one.grad_zeros) / given if given > 0.5 else 0.0


@rule("AB557", "UPDATE_LOST_PRECISION", "warning", explains=("LR_TOO_LOW", "LOSS_CONSTANT"), needs=(Norms,))
def update_lost_precision(
    run: Run, *, share: float = Limit(0.8, "of the entries, in as many samples"),
    samples: float = Limit(8, "the first steps of a warm-up are short"),
) -> Iterator[Found]:  # fmt: skip
    """Parameters in half precision that don't move."""
    for one in measured(run):
        lost: list[tuple[ParameterFacts, list[tuple[Norms, Entry]]]] = []
        is_any = any(facts.dtype in _HALF for facts in run.parameters.values())
        for number, seen in _series(one).items() if is_any else ():
            facts, taken = run.parameters[number], [(norms, entry) for norms, entry in seen if entry.grad > 0]
            known = facts.dtype in _HALF and len(taken) >= samples and one.groups[number][1].lr
            if known and sum(_lost(entry) > share for _, entry in taken) >= share * len(taken):
                lost.append((facts, taken))
        if not lost:
            continue
        facts, taken = max(lost, key=lambda pair: _lost(pair[1][-1][1]))
        worst = taken[-1][1]
        yield Found(
            text=f"{worst.unchanged:.0%} of the entries of {facts.name}"
            f"{f' and {len(lost) - 1} more' if len(lost) > 1 else ''} ({facts.dtype}) are bitwise the same after each "
            f"step of {one}, although they have a gradient.",
            fix=f"Keep the weights in float32 and compute in {facts.dtype}: with torch.autocast(device_type, "
            f"dtype=torch.{facts.dtype}): ...",
            cause=f"An update below {_HALF[facts.dtype] / 2:.2g} of an entry is rounded away in {facts.dtype}.",
            since=taken[0][0],
            step=taken[min(7, len(taken) - 1)][0],
            parameters=tuple(each.name for each, _ in lost),
            module=(facts.root, facts.module),
            evidence={
                "unchanged": worst.unchanged, "parameters": len(lost), "dtype": facts.dtype,
                "root_mean_square": worst.weight / math.sqrt(max(facts.numel, 1)),
            },
        )  # fmt: skip


@rule("AB512", "HAND_UPDATE_LOST", "warning", explains=(*STANDS_STILL,))
def hand_update_lost(
    run: Run, *, looks: float = Limit(2, "nets that take turns have changed by the second")
) -> Iterator[Found]:
    """Parameters with a gradient that updates by hand leave as they were, where others change."""
    seen = list(run.of(Written))
    still = frozenset.intersection(*(frozenset(one.still) for one in seen)) if seen else frozenset()
    if run.optimizers or len(seen) < looks or not still:
        return
    names, others = Names(names_of(run, sorted(still))), len(seen[-1].parameters)
    yield Found(
        text=f"{names} {names:has|have} a gradient in each backward and never {names:changes|change}, while "
        f"{counted(others, 'other parameter')} {'is' if others == 1 else 'are'} updated by hand.",
        fix="parameter.add_(update.view_as(parameter), alpha=-lr)  # under torch.no_grad(), on the parameter itself",
        cause="The loop does not update it, or updates a copy: reshape(-1), flatten() and contiguous() copy a tensor "
        "that is not contiguous, as after .t().",
        since=seen[0],
        parameters=tuple(sorted(still)),
        evidence={"parameters": len(still), "others": others},
    )


@rule(
    "AB558", "SYMMETRIC_INIT", "error", needs=(Norms,),
    explains=(*LEARNS_NOTHING, "VANISHING", "DEAD_UNITS", "LR_TOO_LOW", "LR_TOO_HIGH"),
)  # fmt: skip
def symmetric_init(
    run: Run, *, share: float = Limit(0.6, "of the first ten samples: rounding tells equal rows apart later")
) -> Iterator[Found]:
    """Matrices of equal rows whose gradients have equal rows."""
    for one in measured(run):
        same = [n for n, seen in _series(one).items() if _stays_equal(run.parameters[n], seen, one.samples[:10], share)]
        pairs = _zero_pairs(run, same)
        same = same if pairs else [number for number in same if not _has_factor(run, run.parameters[number])]
        if not same:
            continue
        first = run.parameters[same[0]]
        what, count = ("columns", first.shape[1]) if first.role == "embedding" else ("rows", first.shape[0])
        text = f"All {count} {what} of {first.name}"
        text += f" ({first.constant:g})" if first.constant is not None else ""
        of_gates = " within each gate" if first.name.rpartition(".")[2].startswith(("weight_ih", "weight_hh")) else ""
        text += f" are equal, and so are the {what} of its gradient{of_gates}"
        text += f"; {len(same) - 1} more matrices too." if len(same) > 1 else "."
        fix = f"nn.init.kaiming_normal_({_code(run, first)})"
        cause = "Units with the same weights get the same gradient and stay identical."
        if pairs:
            more = f"; {len(pairs) - 1} more pairs too" if len(pairs) > 1 else ""
            text = f"{pairs[0][0].name} and {pairs[0][1].name} are both zero, and so is every gradient of them{more}."
            fix = _random(run, pairs)
            cause = (
                "The gradient of a factor is a product with the other factor: where both are zero, both stay zero. One "
                "of them begins at random."
            )
        yield Found(
            text=text,
            fix=fix,
            cause=cause,
            since=(pairs[0][0] if pairs else first).at,
            step=one.samples[min(1, len(one.samples) - 1)].step,
            parameters=tuple(parameter_name(run, run.parameters[number]) for number in same),
            module=(first.root, first.module),
            evidence=({} if pairs else {what: count}) | {"matrices": len(same)},
        )


def _zero_pairs(run: Run, same: list[int]) -> list[tuple[ParameterFacts, ParameterFacts]]:
    """Two matrices side by side that are both zero: the gradient of each has the other one as a factor."""
    zero = [run.parameters[number] for number in same if run.parameters[number].constant == 0]

    def beside(a: ParameterFacts, b: ParameterFacts) -> bool:
        of_table = "embedding" in (a.role, b.role)
        return a.module == b.module or (of_table and a.module.rpartition(".")[0] == b.module.rpartition(".")[0])

    return [(a, b) for a, b in itertools.pairwise(zero) if a.root == b.root and beside(a, b)]


def _random(run: Run, pairs: list[tuple[ParameterFacts, ParameterFacts]]) -> str:
    first = pairs[0][0]
    if len(pairs) == 1:
        return f"nn.init.kaiming_uniform_({_code(run, first)})"
    owner = run.roots[first.root].variable if first.root in run.roots else ""
    return (
        f"for name, parameter in {owner or 'model'}.named_parameters():\n"
        f'    if name.endswith("{first.name.rpartition(".")[2]}"):\n        nn.init.kaiming_uniform_(parameter)'
    )


def _stays_equal(facts: ParameterFacts, seen: list[tuple[Norms, Entry]], first: list[Norms], share: float) -> bool:
    if len(facts.shape) < 2 or facts.shape[0] < 2:
        return False
    begins = facts.role in ("weight", "other", "embedding") and (facts.equal_rows or facts.constant is not None)
    rows = sum(facts.parameter in norms.equal_grad_rows for norms in first)
    told = sum(one.grad != 0 for norms, one in seen if norms.step <= first[-1].step)  # a dead unit has equal rows, too
    if begins and rows >= 2 and rows >= share * told:
        return True
    return facts.constant == 0 and len(seen) >= 5 and all(one.grad == 0 and one.update == 0 for _, one in seen)


def _has_factor(run: Run, facts: ParameterFacts) -> bool:
    """Whether a matrix of zeros stands beside one that is not: by that it would get a gradient, were there any."""
    beside = [one for one in run.parameters.values() if (one.root, one.module) == (facts.root, facts.module)]
    return facts.constant == 0 and any(len(one.shape) > 1 and one.constant is None for one in beside)


def _code(run: Run, facts: ParameterFacts) -> str:
    """An expression for a parameter."""
    return f"{module_code(run, facts.root, facts.module)}.{facts.name.rpartition('.')[2]}"


@rule(
    "AB559", "DECAY_DOMINATES", "warning", needs=(Norms,),
    explains=(*LEARNS_NOTHING, "VANISHING", "DEAD_UNITS", "LR_TOO_HIGH"),
)  # fmt: skip
def decay_dominates(
    run: Run, *, share: float = Limit(0.05, "of the weights at each step, against which nothing can be learned"),
    times: float = Limit(10, "the gradient"), rest: float = Limit(0.9, "of the length of the weights"),
    steps: float = Limit(20, "fewer shrink nothing"),
) -> Iterator[Found]:  # fmt: skip
    """Weights that shrink because their decay is all that moves them."""
    for one in measured(run):
        losses, cls = one.losses, one.facts.cls
        decay = max((group.weight_decay for _, group in one.groups.values()), default=0.0)
        if not one.samples or one.samples[-1].number < steps or not decay or losses.converged or not losses.finite:
            continue
        if (asked := _held_by_decay(one)) is not None:
            yield _found_by_trial(one, asked)
            continue
        decoupled = "adamw" in cls.lower()
        rate = decay * max(one.rates, default=0.0)
        shrinking = rate >= share and (decoupled or cls == "SGD" or not losses.fell)
        usual = median_high(_decay(run, norms, decoupled) for norms in one.samples)
        first, last = (math.hypot(*(each.weight for each in entries(run, one.samples[index]))) for index in (0, -1))
        pulled = [math.hypot(*(e.weight for e in entries(run, one.samples[at]) if e.grad)) for at in (0, -1)]
        shrinking = shrinking or (outcome(run).word == "not learning" and pulled[1] < _LITTLE_LEFT * pulled[0])
        strong = shrinking or (usual >= times and not losses.fell)
        is_late = (
            one.faded is not None and one.faded.early and rate < share
        )  # no gradient held against it from the start
        if not strong or not last <= rest * first or first == 0 or is_late:  # nan is no shorter length
            continue
        falls = losses.fell and not _stands(losses)
        strength = f"takes {rate:.2g} of the weights at each step"
        if usual >= times:
            strength = f"is {usual:.2g} times as strong as the gradient"
        yield Found(
            text=f"The weight decay {decay:g} of {one} {strength}; the weights shrink from {first:.3g} to {last:.3g} "
            f"while the loss {'is' if falls else 'stays'} at {losses.last:.3g}.",
            fix=f"for group in {one}.param_groups: group['weight_decay'] = {1e-2 if decoupled else 1e-4:g}",
            cause="The optimizer minimises the length of the weights instead of the loss.",
            since=one.samples[0],
            where=one.facts,
            step=one.samples[0],
            optimizer=one.number,
            evidence={
                "weight_decay": decay, "decay_over_gradient": usual, "share_of_a_step": rate, "norm_first": first,
                "norm_last": last,
            },
            severity="info" if falls else "",
        )  # fmt: skip


def _held_by_decay(one: OptimizerView) -> Probed | None:
    """The answer that a copy learns a batch without the decay, and not with it, where the run learned nothing."""
    found = (probed for probed in one.run.answers("decay") if probed.evidence["optimizer"] == one.number)
    is_rate = any(True for _ in one.run.answers("rate"))  # at which chance decides what is learned
    return next(found, None) if outcome(one.run).word == "not learning" and not is_rate else None


def _found_by_trial(one: OptimizerView, asked: Probed) -> Found:
    """What is said of a decay where copies learned one batch with less of it, or with one of another kind."""
    seen = asked.evidence
    fix = f"for group in {one}.param_groups: group['weight_decay'] = {seen['other_decay']:.3g}"
    if seen["by"] != one.facts.cls:
        fix = f"torch.optim.{seen['by']}(..., weight_decay={seen['other_decay']:g})"
    return Found(
        text=f"The weight decay {seen['decay']:g} of {one} keeps it from learning: a copy that fits one batch reduces "
        f"the loss from {seen['loss']:.3g} to {seen['held']:.3g} with it, and to {seen['without']:.3g} "
        "without.",
        fix=f"{fix}  # the copy then reaches {seen['other_after']:.3g} then",
        cause="The gradient of the loss is small in each entry, as for a mean over many targets, and the decay pulls "
        "all weights to zero.",
        since=one.samples[0],
        where=one.facts,
        step=one.samples[0],
        optimizer=one.number,
        evidence={"weight_decay": seen["decay"], "loss": seen["loss"], "with_decay": seen["held"],
                  "without": seen["without"], "by": seen["by"], "other_decay": seen["other_decay"],
                  "other_after": seen["other_after"]},
    )  # fmt: skip


def _stands(losses: Course) -> bool:
    """Whether the loss has not fallen any more since the middle of the run."""
    half = losses.finite[len(losses.finite) // 2 :]
    middle = len(half) // 2
    return middle >= 10 and fmean(half[middle:]) > 0.95 * fmean(half[:middle])


def _decay(run: Run, norms: Norms, decoupled: bool) -> float:
    """How much longer the decay is than the gradient, over all parameters together."""
    groups = groups_of(run, norms.optimizer)
    found = [(one, groups[one.parameter.parameter][1].weight_decay) for one in entries(run, norms)]
    decay = math.hypot(*(weight_decay * one.weight for one, weight_decay in found))
    other = math.hypot(*(math.sqrt(one.parameter.numel) if decoupled else one.grad for one, _ in found))
    return decay / other if other > 0 else math.inf


@rule("AB560", "BACKEND_NO_WRITE", "error", explains=("LR_TOO_LOW", "LOSS_CONSTANT"), needs=(Norms,))
def backend_no_write(run: Run, *, samples: float = Limit(5, "a few steps may be left out")) -> Iterator[Found]:
    """Parameters that an update should have changed and did not."""
    for one in measured(run):
        facts, stuck = one.facts, list[ParameterFacts]()
        for number, seen in _series(one).items() if len(one.samples) >= samples else ():
            lr, each = one.groups[number][1].lr, run.parameters[number]
            known = each.dtype == "float32" and len(seen) >= samples and lr
            if known and all(e.unchanged == 1.0 and not e.update and _should(e, lr, facts.cls) for _, e in seen):
                stuck.append(each)
        if not stuck:
            continue
        names = tuple(parameter_name(run, each) for each in stuck)
        whole = all(value == 0 for norms in one.samples if (value := ratio(run, norms)) is not None)
        yield Found(
            text=f"{one} ({facts.cls}) computes updates for {names[0]}"
            f"{f' and {len(stuck) - 1} more parameters' if len(stuck) > 1 else ''} and never writes them: not one "
            "entry has changed.",
            fix=f"In {facts.cls}.step: p.add_(update, alpha=-lr) on the parameter itself, or p.copy_(new)",
            cause="The optimizer writes into a copy, such as p.contiguous() or p.float().",
            since=one.samples[0],
            step=one.samples[min(4, len(one.samples) - 1)],
            parameters=names,
            optimizer=one.number,
            module=(stuck[0].root, stuck[0].module),
            evidence={"parameters": len(stuck), "samples": len(one.samples), "all": whole},
        )


def _should(one: Entry, lr: float, cls: str) -> bool:
    """Whether the update is long enough not to be rounded away: a hundred times the resolution of float32."""
    if one.grad == 0 or one.state_moved is False or (one.state_moved is None and cls != "SGD"):
        return False
    root = math.sqrt(max(one.parameter.numel, 1))
    typical, grad = one.weight / root, one.grad / root
    step = lr * grad if "ada" not in cls.lower() else lr
    return step > 100 * 2.0**-24 * typical and grad > 1e-6  # a hundred times the eps of Adam, below which it shrinks
