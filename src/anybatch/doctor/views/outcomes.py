"""What became of a run: whether it was seen to learn."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

from anybatch.doctor.views.courses import Course, Phase, adversarial, course, groups_of, phases, updates
from anybatch.doctor.views.naming import by_line, counted, optimizer_variable
from anybatch.doctor.views.onebatch import one_batch
from anybatch.records.events import Forward, Stepped
from anybatch.records.lossfacts import Evaluated, LossCall, Printed, Probed
from anybatch.records.runs import Run, grouped, remembered
from anybatch.records.samples import Norms, Scored

Word = Literal["learning", "not learning", "undecided"]

FEW_STEPS = 20
"""Fewer steps than these show nothing."""

ENOUGH_STEPS = 50
"""So many steps are enough to say that a loss stays where it is."""

ENOUGH_TARGETS = 3000
"""And so many targets, since a task that is hard at first is not begun with fewer."""

_NEXT_TO_NOTHING = 0.02
"""A share of the loss of a constant guess by which a model is no better than one."""

_SOMETHING = 0.1
"""What a model that learned has gained at least; less may be noise, or a few samples learned by heart."""

_FADED = 1e-3
"""Gradients that end below this share of the largest ones are those of a game that is over."""

_MOST = 0.3
"""A share of the loss of a constant guess below which a model has learned most of what there is to learn."""

_MANY = 15
"""Losses of a line with so many of each number of classes are of several heads."""

_LITTLE = 0.05
"""What a model that learns little may have gained; less than this, with certainty, is nothing."""


_ITS_TARGETS = "a copy of the model makes the targets, so that their loss says little"

OF_CLASSES = ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
"""Losses that are minus the logarithm of a probability."""

_MOSTLY_RIGHT = 0.6
"""Of the training data; one that fits less of it may find its evaluation hard, too."""

_FAR_BELOW = 0.7
"""Of the share that is right in the training data: what an evaluation has where little of it carries over."""

_RIGHT = frozenset({"acc", "accuracy", "correct", "right"})
_DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_OVERLAPS = frozenset({"iou", "miou", "giou", "dice", "ap", "map"})
_NEARLY_ALL, _HALF = 0.1, 0.5  # of the loss of a constant guess, and the share of an overlap that is found by then
_ERRORS = frozenset({"loss", "error", "err"})
_HELD_OUT = frozenset({"val", "valid", "validation", "eval", "evaluation", "test", "dev"})
_NEAR = 1.5  # times the loss of a constant guess
_TRAINED = frozenset({"train", "training", "trn"})

_ENOUGH_EVALUATED = 100
"""Targets of an evaluation that tell what a constant guess gives."""

_FAR = 2.0
"""How many times the loss of a constant guess a loss is above it where it is worse than knowing nothing."""

_AGAIN = 3
"""Thirds of a run: a loss that would not come down to a guess in as many more is on no way to it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a part of a run."""

    word: Word  # whether it learned
    said: str  # how that is known, as the end of a sentence
    call: LossCall | None = None  # of the loss function that ends where a constant guess is, ``None`` without
    last: float = 0.0  # its values at the end, on average
    guess: float = 0.0  # the loss of the best constant guess
    steps: int = 0  # of the part
    # the answer that its loss is the same with the targets of other rows, ``None`` without
    unrelated: Probed | None = None


@remembered
def outcome(run: Run) -> Outcome:
    """Whether a run was seen to learn: every part of it that is long enough to tell."""
    parts = phases(run) or _by_hand(run)
    found = [_doubted(run, part, _of_phase(run, part)) for part in parts]
    learned = [part for part, one in zip(parts, found, strict=True) if one.word == "learning"]
    told = [
        one for part, one in zip(parts, found, strict=True) if one.steps >= FEW_STEPS and not _goes_on(part, learned)
    ]
    if not told:
        most = max((one.steps for one in found), default=0)
        return Outcome("undecided", f"{most} step{'s are' if most != 1 else ' is'} too few to see whether it learns")
    for word in ("not learning", "undecided"):
        worst = next((one for one in told if one.word == word), None)
        if worst is not None:
            return worst
    new = [(one.steps, part.parameters.difference(*(each.parameters for each in parts if each is not part)))
           for part, one in zip(parts, found, strict=True) if one.steps < FEW_STEPS]  # fmt: skip
    short = next((steps for steps, own in new if len(own) > _SOMETHING * sum(len(one.parameters) for one in parts)), 0)
    if short:
        return Outcome("undecided", f"{counted(short, 'step')} of a part are too few to see whether it learns")
    beside = one_batch(run) or _by_heart(run, told[-1]) or _printed_worse(run, told[-1]) or _sampled(run)
    last = Outcome("undecided", f"{told[-1].said}: {beside}", steps=told[-1].steps) if beside else told[-1]
    is_negative = run.sign() < 0 and last.call is None
    return replace(last, said=f"{last.said} (of its negative, as the optimizer maximizes)") if is_negative else last


def _goes_on(part: Phase, learned: list[Phase]) -> bool:
    """Whether the same loop learned later, with more parameters: a head alone may learn nothing on a frozen net."""
    later = [one for one in learned if one.start > part.start and one.lines & part.lines]
    return any(part.parameters < one.parameters for one in later)


def _by_heart(run: Run, found: Outcome) -> str:
    """How it is known that what was learned are the samples of the training alone; empty where it is not.

    A net that is too sure of itself has large losses though it knows much: then its classes are mostly right.
    """
    mine = [one for one in run.of(Evaluated) if found.call is not None and one.function == found.call.function]
    mine += [
        Evaluated(at=one.at, function=one.function, value=one.value or 0.0, guess=one.guess, items=one.items)
        for one in run.of(LossCall)
        if found.call is not None and one.function == found.call.function and (one.file, one.line) in evaluating(run)
    ]
    guesses = [one for one in mine if one.guess is not None and one.items >= _ENOUGH_EVALUATED]
    if not guesses or not 0 <= found.last < (1 - _SOMETHING) * found.guess or any(one.better for one in mine):
        return ""
    best, guess = min(one.value for one in mine), min(one.guess or 0.0 for one in guesses)
    is_early = 2 * mine[-1].at < found.call.at + run.facts[-1].at if found.call is not None else True
    beats = any(one.value < (1 - _NEXT_TO_NOTHING) * (one.guess or 0.0) for one in guesses)
    if best < (1 - _NEXT_TO_NOTHING) * guess or beats or is_early:
        return ""
    return (
        f"that is on its training data only: in evaluation it is {best:.4g} at best, where a constant guess gives "
        f"{guess:.4g}"
    )


def _printed_worse(run: Run, found: Outcome) -> str:
    """How it is known that the script's own evaluation is far from what such a loss gives on the training data."""
    if found.call is None:
        return ""
    steps = min(found.steps, run.steps)  # a step may have several losses
    late = [one for one in run.of(Printed) if one.steps and 2 * one.steps[-1] >= steps]
    if not 0 <= found.last < _MOST * found.guess:
        return _printed_by_chance(found, late)
    right, ends = math.exp(-found.last), [(_at_end(one), _words(one), one) for one in late]
    if found.call.function in OF_CLASSES and right > _MOSTLY_RIGHT:  # the geometric mean of the probabilities
        shares = [
            (max(last), one) for last, words, one in ends if words & _RIGHT and all(0 <= v <= 1 for v in one.values)
        ]
        value, one = max(shares, key=lambda pair: pair[0], default=(1.0, None))
        is_far, such = value < _FAR_BELOW * right, f"such a loss is one of about {right:.0%} right answers"
        if not is_far and one is None:  # a mean as that of the training is near a guess at first, a sum is not
            near = (found.guess / _NEAR, found.guess * _NEAR)
            losses = [(min(last), one) for last, words, one in ends
                      if words & _ERRORS and words & _HELD_OUT and near[0] < one.values[0] < near[1]]  # fmt: skip
            value, one = max(losses, key=lambda pair: pair[0], default=(0.0, None))
            is_far, such = value > found.guess, f"a constant guess has {found.guess:.3g}"
    elif found.call.function in _DISTANCES:
        errors = [(min(last), one) for last, words, one in ends if "mse" in words]
        value, one = min(errors, key=lambda pair: pair[0], default=(0.0, None))
        is_far, such = found.call.function == "mse_loss" and value > found.guess, "it is far below a constant guess"
        if not is_far and found.last < _NEARLY_ALL * found.guess:
            shares = [
                (max(last), one)
                for last, words, one in ends
                if words & _OVERLAPS and not words & _ERRORS and all(0 <= value <= 1 for value in last)
            ]
            value, one = max(shares, key=lambda pair: pair[0], default=(1.0, None))
            is_far, such = value < _HALF, f"it is {found.last / found.guess:.1%} of a constant guess"
    else:
        return ""
    if one is None or not is_far:
        return ""
    return (
        f'that is on its training data, where {such}, and line {one.line} prints "{one.label}" {value:.4g} at the end'
    )


def _at_end(one: Printed) -> list[float]:
    """What a line printed after the last of its steps: of a sweep, as of attacks of more and more strength, several.

    The best of these is what is known; others are made bad on purpose.
    """
    return [value for step, value in zip(one.steps, one.values, strict=True) if step == one.steps[-1]]


def _printed_by_chance(found: Outcome, late: list[Printed]) -> str:
    """How it is known that no more of the held-out data is right than by guessing one of the classes."""
    classes = found.call.classes if found.call is not None else 0
    if classes < 2 or not 0 <= found.last < (1 - _SOMETHING) * found.guess:
        return ""
    held_out = [one for one in late if (words := _words(one)) & _RIGHT and words & _HELD_OUT]
    shares = [(max(_at_end(one)), one) for one in held_out if all(0 <= value <= 1 for value in one.values)]
    value, one = max(shares, key=lambda pair: pair[0], default=(1.0, None))
    if one is None or value > (1 + _SOMETHING) / classes:
        return ""
    return (
        f'that is on its training data only: line {one.line} prints "{one.label}" {value:.4g} at the end, the '
        f"accuracy of guessing among {classes} classes"
    )


def carries_over(run: Run, classes: int) -> bool:
    """Whether an evaluation was seen to know more than how frequent each class is, or than guessing one of them."""
    known = (one for one in run.of(Evaluated) if one.guess is not None and one.items >= _ENOUGH_EVALUATED)
    if any(one.better or one.value < (1 - _SOMETHING) * (one.guess or 0.0) for one in known):
        return True
    right = [one for one in run.of(Printed) if (words := _words(one)) & _RIGHT and words & _HELD_OUT]
    return classes > 1 and any(_NEAR / classes < max(one.values, default=0.0) <= 1 for one in right)


def _sampled(run: Run) -> str:
    """How it is known that a sampler gives a net other inputs than its training did."""
    for one in run.answers("sampling", "no", "unknown"):
        if one.answer == "no":
            return (
                f"that is in training, but in the sampling loop at line {one.line} its input has "
                f"{one.evidence['times']:.3g} times the mean square that the same noise level "
                f"({one.evidence['level']:.4g}) has in training; check that both use the same noise schedule"
            )
        if one.line:
            return f"that is in training, and the samples of the loop at line {one.line} were not examined"
    return ""


def _words(one: Printed) -> set[str]:
    """Of the label of numbers that were printed; none where they are of the training."""
    words = set(re.findall("[a-z]+", one.label.lower()))
    return set() if words & _TRAINED else words


def learned_well(run: Run) -> bool:
    """Whether a run was seen to learn most of what there is to learn, so that what only slows it down did no harm."""
    found = outcome(run)
    return found.word == "learning" and 0 <= found.last < _MOST * found.guess


def _by_hand(run: Run) -> list[Phase]:
    """The whole of a run that has no optimizer and changes its parameters by hand."""
    nothing: frozenset[int] = frozenset()
    return [Phase(0, run.facts[-1].at, nothing, nothing, frozenset())] if updates(run) else []


def _doubted(run: Run, part: Phase, found: Outcome) -> Outcome:
    """What a loss shows counts for nothing where it is the same with the targets, or inputs, of other rows."""
    probed = _unrelated(run, part, "related")
    inputs = None if found.guess else _unrelated(run, part, "related inputs")
    same = probed or inputs
    if found.word == "learning" and not found.guess and (little := _little_of_rows(run, part)):
        return Outcome("undecided", f"{found.said}, {little}", steps=found.steps)
    if found.word == "not learning" or same is None:
        return found
    makes_targets = _has_a_target_net(run) and not any(one.classes for one in run.of(LossCall))  # which are numbers
    if probed is not None and makes_targets:
        return _moved(run, part, found.steps, _ITS_TARGETS)
    said = f"the loss on a batch is {same.evidence['loss']:.4g}, and {same.evidence['others']:.4g} with "
    said += f"{'the targets of other rows' if probed else 'one of its inputs from other rows'}"
    rows = int(same.evidence["rows"]) * found.steps
    beats = found.word == "learning" and found.guess > 0  # a batch may be of one kind
    scored = any(True for _ in run.of(Scored))  # what was drawn then is unlikely now, whatever was learned
    if (
        (probed is None and (found.word == "learning" or not same.evidence.get("couples")))  # no rows are paired
        or beats
        or scored
        or found.steps < ENOUGH_STEPS
        or rows < ENOUGH_TARGETS
        or _still_falls(run, part)
    ):
        return Outcome("undecided", said, steps=found.steps)
    return Outcome("not learning", said, last=found.last, steps=found.steps, unrelated=same)


def _little_of_rows(run: Run, part: Phase) -> str:
    """How it is known that a loss whose constant guess is not has hardly anything to do with which row is which."""
    for one in run.answers("related"):
        loss, others = one.evidence.get("loss", 0.0), one.evidence.get("others", 0.0)
        if one.evidence.get("optimizer") in part.optimizers and loss > 0 and others - loss < _SOMETHING * others:
            return f"but the loss on a batch is {loss:.4g}, and only {others:.4g} with the targets of other rows"
    return ""


def _unrelated(run: Run, part: Phase, probe: str) -> Probed | None:
    """The answer that nothing of what a part learned belongs to its rows; of each of its optimizers."""
    if len(part.optimizers) != 1 and part.optimizers:
        return None
    asked = run.answers(probe, "yes", "no", "unknown")
    mine = [one for one in asked if one.evidence.get("optimizer") in part.optimizers]
    return mine[0] if mine and all(one.answer == "no" for one in mine) else None


def _still_falls(run: Run, part: Phase) -> bool:
    went = course(run, next(iter(part.optimizers), None))
    third = len(went.finite) // 3
    if third < 5:
        return True
    before, last = went.finite[-2 * third : -third], went.finite[-third:]
    return fmean(before) - fmean(last) > max(3 * _error(last), _NEXT_TO_NOTHING / 4 * abs(fmean(before)))


def _of_phase(run: Run, part: Phase) -> Outcome:
    numbers = [one.optimizer for one in run.of(Stepped) if part.start <= one.at <= part.end]
    steps = max((numbers.count(number) for number in set(numbers)), default=0) if numbers else len(updates(run))
    if steps < FEW_STEPS:
        return Outcome("undecided", "", steps=steps)
    if numbers and adversarial(run, numbers[0]):
        return _moved(run, part, steps, "the losses of several optimizers need not fall")
    terms = [term for term in _terms(run, part) if term is not None]
    better = [term for term in terms if term.word == "learning"]
    if better and all(term.call is not None and not term.call.classes for term in better) and _has_a_target_net(run):
        return _moved(run, part, steps, _ITS_TARGETS)
    if better:
        return better[0]
    went = course(run, numbers[0] if numbers else None)
    if _weighed(terms, went, steps):
        return Outcome("learning", f"the loss fell from {went.first:.4g} to {went.last:.4g}", steps=steps)
    if terms and all(term.word == "not learning" for term in terms) and steps >= ENOUGH_STEPS:
        return Outcome("not learning", terms[0].said, terms[0].call, terms[0].last, terms[0].guess, steps)
    if terms:
        return Outcome("undecided", terms[0].said, steps=steps)
    if any("drawn" in one.evidence for one in run.answers("related", "unknown")):
        return _moved(run, part, steps, "a loss on the model's own samples need not fall")
    if weighs_rewards(run):
        return _moved(run, part, steps, "a loss that weights log-probabilities by rewards need not fall")
    if went.fell:
        return Outcome("learning", f"the loss fell from {went.first:.4g} to {went.last:.4g}", steps=steps)
    if any(True for _ in run.of(Scored)):
        return _moved(run, part, steps, "a loss made of log-probabilities need not fall")
    if not went.finite:
        return Outcome("undecided", "no value of the loss was seen", steps=steps)
    return Outcome(
        "undecided", f"the loss did not clearly fall: {went.first:.4g} at first, {went.last:.4g} at the end",
        steps=steps,
    )  # fmt: skip


def weighs_rewards(run: Run) -> bool:
    """Whether a loss weighs log-probabilities with rewards: more reward may make it larger."""
    return bool(run.answers("rewarded", "yes", "no"))


def _has_a_target_net(run: Run) -> bool:
    """Whether a copy of what is trained follows it by hand, and is called without a gradient at most of the steps."""
    trained = {number for one in run.optimizers for number in groups_of(run, one)} & run.parameters.keys()
    follows = {number for one in run.of(Norms) for number in one.since} & run.parameters.keys() - trained
    shapes: dict[tuple[bool, int], Counter[tuple[int, ...]]] = defaultdict(Counter)
    for number in trained | follows:
        one = run.parameters[number]
        shapes[number in trained, one.root][one.shape] += 1
    nets = [own for (is_trained, _), own in shapes.items() if is_trained]
    copies = {root for (is_trained, root), own in shapes.items() if not is_trained and own in nets}
    called = sum(1 for one in run.of(Forward) if one.root in copies and not one.grad)
    return 2 * called >= len(updates(run)) > 0


def _weighed(terms: list[Outcome], went: Course, steps: int) -> bool:
    """Whether a step has several terms, each no better than a guess, and their weighted mean fell below one.

    As with mixup, where each batch has two targets, and the one with the small weight is wrong by intent.
    """
    if sum(term.steps for term in terms) < 2 * steps or not went.fell:
        return False
    guess = fmean(term.guess for term in terms)
    return went.first > _MOST * guess and went.last < (1 - _SOMETHING) * guess


def _terms(run: Run, part: Phase) -> Iterator[Outcome | None]:
    """For each line with a loss function whose best constant guess is known, how it compares with it at the end."""

    def is_known(one: LossCall) -> bool:  # a sum over targets that were not counted is no mean
        is_its = part.start <= one.at <= part.end and (one.file, one.line) not in evaluating(run)
        return is_its and one.value is not None and (one.reduction != "sum" or one.items > 0)

    for line in by_line(run, is_known).values():
        heads = grouped((one.classes, one) for one in line)  # of one line, as of a sum of two
        apart = len(heads) > 1 and min(map(len, heads.values())) >= _MANY
        for same in heads.values() if apart else [line]:
            if math.isfinite(same[-1].value or 0.0):
                yield _compared([one for one in same if math.isfinite(one.value or 0.0)])


@remembered
def evaluating(run: Run) -> frozenset[tuple[str, int]]:
    """Lines with losses of models in evaluation mode, with a graph that nothing needs, where others are trained."""
    modes: dict[int, bool] = {}
    trained: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for one in run.of(Forward, LossCall):
        if isinstance(one, Forward):
            modes[one.root] = one.training
        elif isinstance(one, LossCall):
            trained[one.file, one.line].append(modes.get(one.root, True))
    if not any(sum(found) * 2 > len(found) for found in trained.values()):
        return frozenset()
    return frozenset(line for line, found in trained.items() if sum(found) * 2 <= len(found))


def _compared(calls: list[LossCall]) -> Outcome | None:
    third = len(calls) // 3
    known = [_per_item(one, one.guess) for one in calls if one.guess is not None]
    pairs = [
        (_per_item(one, one.value), _per_item(one, one.guess))
        for one in calls[len(calls) // 5 :]
        if one.guess is not None
    ]
    if not pairs or third < 5 or fmean(known) < 1e-6:
        return None
    drifts = _drifts(calls)
    known = [one for _, one in pairs] if drifts else known
    guess, values = fmean(known), [_per_item(one, one.value) for one in calls]
    last, before = values[-third:], values[-2 * third : -third]
    said = f"{calls[-1].function} ends at {fmean(last):.4g}, and a constant guess gives {guess:.4g}"
    gain = 1 - fmean(last) / guess
    error = math.hypot(_error(last), _error(known)) / guess
    differences = [one - value for value, one in pairs]  # the same batches make both, so that their noise goes
    paired, its = fmean(differences) / guess, _error(differences) / guess
    surely = gain > max(_SOMETHING, 3 * error) and paired > _LITTLE
    if surely or (len(pairs) >= 3 and paired > max(_SOMETHING, 3 * its) and gain > _LITTLE):
        return Outcome("learning", said, calls[0], fmean(last), guess, len(calls))
    if gain > _SOMETHING:
        return Outcome("undecided", f"{said}: its values vary too much to tell", steps=len(calls))
    if len(pairs) >= 3:
        gain, error = (paired, its) if its < error and abs(paired - gain) < 3 * error else (gain, error)
    fell = fmean(before) - fmean(last)
    is_hopeless = gain < -_FAR and fmean(last) - _AGAIN * fell > guess
    falls = fell > max(3 * _error(last), _NEXT_TO_NOTHING / 4 * guess) and not is_hopeless
    flat = gain < _NEXT_TO_NOTHING or gain + 2 * error < _LITTLE
    items = [one.items for one in calls if one.items > 0]
    enough = bool(items) and fmean(items) * len(calls) >= ENOUGH_TARGETS
    word: Word = "not learning" if flat and enough and not falls and not drifts else "undecided"
    return Outcome(word, said, calls[-1], fmean(last), guess, len(calls))


def _error(values: list[float]) -> float:
    """Of a mean."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _per_item(call: LossCall, value: float | None) -> float:
    whole = call.reduction == "sum" and call.items > 0
    return (value or 0.0) / (call.items if whole else 1)


def _drifts(calls: list[LossCall]) -> bool:
    """Whether the targets are not those of a data set: what a model makes of them, as values of states, changes."""
    known = [one for one in calls if one.target_mean is not None and one.target_std is not None and not one.classes]
    half = len(known) // 2
    if half < 2:
        return False
    first, last = known[:half], known[half:]
    spreads = [fmean(one.target_std or 0.0 for one in part) for part in (first, last)]
    means = [fmean(one.target_mean or 0.0 for one in part) for part in (first, last)]
    return abs(means[0] - means[1]) > 0.5 * max(spreads) or max(spreads) > 1.5 * min(spreads)


def _moved(run: Run, part: Phase, steps: int, why: str) -> Outcome:
    """Whether the updates of a part move what they should, where the loss itself says little."""
    moved: dict[int, bool] = {}
    flows: dict[int, list[float]] = {}
    for norms in run.of(Norms):
        if not part.start <= norms.at <= part.end:
            continue
        mine = groups_of(run, norms.optimizer)
        used = [
            (number, grad, update)
            for number, grad, update in zip(norms.parameters, norms.grad, norms.update, strict=False)
            if number in mine and grad is not None
        ]
        for number, _, update in used:
            moved[number] = moved.get(number, False) or update > 0
        flows.setdefault(norms.optimizer, []).append(math.hypot(*(grad for _, grad, _ in used)))
    still = min((number for number, one in moved.items() if not one), default=None)
    faded = next((number for number, one in flows.items() if len(one) > 5 and one[-1] < _FADED * max(one)), None)
    if not moved:
        return Outcome("undecided", f"{why}, and no update was measured", steps=steps)
    if still is not None:
        name = run.parameters[still].name if still in run.parameters else "a parameter"
        return Outcome("undecided", f"{why}, and {name} never changes", steps=steps)
    if faded is not None:
        return Outcome(
            "undecided", f"{why}, and the gradients of {optimizer_variable(run, faded)} fade away", steps=steps
        )
    said = f"{why}; every parameter gets a gradient and changes, which does not show that anything is learned"
    return Outcome("undecided", said, steps=steps)
