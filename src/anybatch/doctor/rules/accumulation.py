"""Rules of the family accumulation: windows that are cleared too often, start wrong, lose their tail or weigh wrong."""

import itertools
import math
from collections.abc import Iterator
from statistics import median

from anybatch.doctor.rules.registry import RUNS_AWAY, STANDS_STILL, Found, Limit, rule
from anybatch.doctor.views.naming import counted, near, root_variable
from anybatch.doctor.views.optimizing import OptimizerView, optimizers
from anybatch.doctor.views.windows import Pass, Window, by_closure, calls_of, passes, usual_count
from anybatch.records.events import Backward, Cleared, Clipped, Epoch, Forward, Stepped
from anybatch.records.runs import Run
from anybatch.records.samples import InputSample

_ROUNDING = 1e-3  # relative
_ENOUGH = 3  # windows that agree


def _accumulating(run: Run) -> Iterator[tuple[OptimizerView, list[Window], int]]:
    """Optimizers whose steps use several backwards from one line, each after a forward of its own, and how many."""
    for one in optimizers(run):
        found = [window for window in one.windows if not by_closure(run, window)]
        count = usual_count(found)
        if count >= 2 and all(window.of_one_line for window in found if len(window.used) == count):
            yield one, found, count


def _complete(found: list[Window]) -> list[Window]:
    return [one for one in found if one.step is not None or one.skipped]


def _number(step: Stepped | None) -> int:
    return step.number if step is not None else 0


@rule("AB351", "ZERO_GRAD_PER_MICROBATCH", "error", explains=(*STANDS_STILL, "ACCUM_NOT_DIVIDED"))
def zero_grad_per_microbatch(
    run: Run, *, alike: float = Limit(0.02, "losses of one batch under perturbed weights differ less")
) -> Iterator[Found]:
    """Windows in which only the last backward is used."""
    for one in optimizers(run):
        row: list[tuple[Window, Stepped]] = []
        for window in one.windows:
            step, count = window.step, len(window.passes)
            wasted = (
                step is not None and not by_closure(run, window) and not step.edited
                and count >= 2 and len(window.used) == 1 and window.clears >= count - 1 and window.of_one_line
                and not _one_batch(run, window, alike) and not _by_another(run, one, window)
            )  # fmt: skip
            row = [*row, (window, step)] if wasted and step and (not row or count == len(row[-1][0].passes)) else []
            if len(row) == _ENOUGH:
                yield _per_microbatch(one, row)
                break


def _per_microbatch(one: OptimizerView, row: list[tuple[Window, Stepped]]) -> Found:
    window, step = row[0][0], row[-1][1]
    count = len(window.passes)
    clear = [event for event in window.events if isinstance(event, Cleared)][-1]
    return Found(
        text=f"Gradients are cleared{near(clear)} before each of {count} backwards, so that {one}.step() uses 1 of "
        f"{count} micro-batches.",
        fix=f"{one}.zero_grad()  # only after {one}.step(){near(step)}",
        cause="zero_grad() is called in each iteration, the step only in some.",
        since=clear,
        step=step.number,
        optimizer=one.number,
        evidence={"backwards": count, "used": 1, "windows": len(row)},
    )


def _one_batch(run: Run, window: Window, alike: float) -> bool:
    """Whether all backwards are of one batch, by their losses or their inputs, as where weights are perturbed."""
    values = [one.fact.value for one in window.passes if one.fact.value is not None]
    if len(values) == len(window.passes) and max(values) - min(values) <= alike * max(map(abs, values)):
        return True
    calls = {one.at for one in window.events if isinstance(one, Forward) and one.grad}
    given: dict[int, set[str]] = {}
    for sample in run.of(InputSample):
        if sample.forward in calls and sample.hash:
            given.setdefault(sample.forward, set()).add(sample.hash)
    return len(given) >= 2 and len({frozenset(hashes) for hashes in given.values()}) == 1


def _by_another(run: Run, one: OptimizerView, window: Window) -> bool:
    """Whether another optimizer stepped between the backwards, or one of the user's around this one clears, as SAM."""
    first, last = window.passes[0].fact.at, window.passes[-1].fact.at
    if any(first < step.at < last and step.optimizer != one.number for step in run.of(Stepped)):
        return True
    clears = [event for event in window.events if isinstance(event, Cleared) and event.by == "optimizer"]
    outer = run.optimizers.get(clears[-1].number) if clears else None
    return outer is not None and outer.optimizer != one.number and not outer.is_torchs


@rule("AB352", "ACCUM_FIRST_WINDOW", "warning", explains=RUNS_AWAY)
def accum_first_window(run: Run) -> Iterator[Found]:
    """First windows that are too short."""
    for one, found, count in _accumulating(run):
        whole = _complete(found)
        first, step = whole[0], whole[0].step
        if step is None or not 0 < len(first.used) < count or step.number or first.borders:
            continue
        if len(first.passes) != len(first.used) or any(len(window.used) != count for window in whole[1:4]):
            continue
        yield Found(
            text=f"The first {one}.step(){near(step)} uses {counted(len(first.used), 'backward')}, the next ones "
            f"{count}.",
            fix=f"if (i + 1) % {count} == 0:  # instead of i % {count} == 0, before {one}.step()",
            cause="The condition of the step is already true for the first micro-batch, so every window is shifted.",
            since=step,
            step=0,
            optimizer=one.number,
            evidence={"first": len(first.used), "next": [len(window.used) for window in whole[1:6]]},
        )


@rule("AB353", "ACCUM_TAIL_DROPPED", "warning")
def accum_tail_dropped(run: Run) -> Iterator[Found]:
    """Ends of epochs that are cleared without a step."""
    for one, found, count in _accumulating(run):
        cleared = [(w, clear) for w in found if 0 < len(w.passes) - len(w.used) < count and (clear := _cleared(w))]
        bad = [(window, clear) for window, clear in cleared if _ends_in(window, window.passes[0], clear)]
        is_guessed = not any(run.of(Epoch)) and _regular(_complete(found), [window for window, _ in cleared])
        if is_guessed:  # it may be a measurement of gradients as well
            bad = cleared
        if not bad or sum(len(window.used) == count for window in found) < _ENOUGH:
            continue
        window, clear = bad[0]
        lost, back = len(window.passes) - len(window.used), window.passes[0].fact
        yield Found(
            text=f"{counted(lost, 'backward')}{'' if is_guessed else ' at the end of an epoch'} "
            f"{'is' if lost == 1 else 'are'} cleared{near(clear)} without a step ({counted(len(bad), 'time')}); a step "
            f"uses {count}.",
            fix=f"{one}.step(); {one}.zero_grad()  # once more, after the loop over the batches",
            cause=f"The number of batches is no multiple of {count}, and the rest gets no step.",
            since=clear,
            step=_number(window.step),
            where=(clear.file or back.file, clear.line or back.line),
            optimizer=one.number,
            evidence={"lost": lost, "of": count, "times": len(bad)},
            severity="info" if is_guessed else "",
        )


def _cleared(window: Window) -> Cleared | None:
    """The only clearing of a window, if it is behind the first backward."""
    first = window.passes[0].fact.at
    clear = next((one for one in window.events if isinstance(one, Cleared) and one.at > first), None)
    return clear if window.clears == 1 else None


def _ends_in(window: Window, first: Pass, last: Backward | Cleared) -> bool:
    """Whether an epoch ended between a backward and something behind it."""
    return any(isinstance(one, Epoch) and one.ended and first.fact.at < one.at < last.at for one in window.events)


@rule("AB354", "ACCUM_TAIL_LEAKS", "warning", explains=RUNS_AWAY)
def accum_tail_leaks(run: Run) -> Iterator[Found]:
    """Ends of epochs that are used by the first step of the next one."""
    for one, found, count in _accumulating(run):
        whole = _complete(found)
        longer = [window for window in whole if count < len(window.used) < 2 * count]
        bad = [window for window in longer if _ends_in(window, window.used[0], window.used[-1].fact)]
        if not bad and not any(run.of(Epoch)) and _regular(whole, longer):
            bad = longer
        others = sum(len(window.used) != count for window in whole)
        if not bad or len(whole) - others < _ENOUGH or others > len(bad) + 1:
            continue
        used, step, back = len(bad[0].used), bad[0].step, bad[0].used[0].fact
        yield Found(
            text=f"{one}.step() uses {used} backwards at the border of an epoch and {count} elsewhere: "
            f"{counted(used - count, 'backward')} of the epoch before {'is' if used - count == 1 else 'are'} left "
            "over.",
            fix=f"{one}.step(); {one}.zero_grad()  # once more, after the loop over the batches",
            cause=f"The number of batches is no multiple of {count}, and the gradients of the rest are not cleared.",
            since=back,
            step=_number(step),
            where=step or back,
            optimizer=one.number,
            evidence={"used": used, "usual": count, "times": len(bad)},
        )


def _regular(whole: list[Window], longer: list[Window]) -> bool:
    """Whether windows of one size come at equal distances, as those at the border of an epoch do without a loader."""
    places = [index for index, one in enumerate(whole) if any(one is other for other in longer)]
    distances = {second - first for first, second in itertools.pairwise(places)}
    alike = len({(len(one.used), len(one.passes)) for one in longer}) == 1
    return len(places) >= _ENOUGH and alike and len(distances) == 1 and max(distances) > 1


_MEANS = ("Mean", "NllLoss", "MseLoss", "SmoothL1", "Huber", "BinaryCrossEntropy", "KlDiv", "SoftMargin")


def _near(value: float | None, other: float | None) -> bool:
    return value is not None and other is not None and abs(value - other) <= 1e-3 * max(abs(value), abs(other), 1e-12)


def _raw_mean(run: Run, one: Pass) -> bool:
    """Whether a backward was called on a mean over its micro-batch, without any factor."""
    own = calls_of(run, one.fact)
    if one.fact.factor != 1.0 or any(call.reduction != "mean" for call in own):
        return False
    if any(_near(one.fact.value, call.value) for call in own):
        return True
    return all(call.value is None for call in own) and one.fact.top.startswith(_MEANS)


@rule("AB355", "ACCUM_NOT_DIVIDED", "warning", explains=RUNS_AWAY)
def accum_not_divided(run: Run) -> Iterator[Found]:
    """Means of micro-batches that are added up."""
    for one, found, count in _accumulating(run):
        whole = [window for window in found if window.step is not None and len(window.used) == count]
        raw = [window for window in whole if all(_raw_mean(run, back) for back in window.used)]
        if len(raw) < _ENOUGH or any(window.step is not None and window.step.edited for window in whole):
            continue
        if any(len({back.touched for back in window.used}) > 1 for window in raw):
            continue
        spots = {back.spot for window in whole for back in window.used}
        if any(back.fact.factor != 1.0 and back.spot in spots for back in passes(run)):
            continue
        back, step = raw[0].used[0].fact, raw[2].step
        inside = [event for window in raw for event in window.events if isinstance(event, Forward) and event.grad]
        yield Found(
            text=f"{one}.step() uses the sum of {count} backwards{near(back)} on means of micro-batches: the gradient "
            f"is {count} times that of the whole batch.",
            fix=_divided(run, count, back, step),
            cause="backward() adds up; a mean over the whole batch needs each mean divided by their number.",
            since=back,
            step=_number(step),
            optimizer=one.number,
            evidence={"backwards": count, "windows": len(raw), "factor": 1.0},
            severity="info" if inside and all(event.rows == 1 for event in inside) else "",
        )


@rule("AB357", "ACCUM_DIVIDED_TWICE", "warning")
def accum_divided_twice(
    run: Run, *, least: float = Limit(3, "half of a squared error in two micro-batches has the same factor")
) -> Iterator[Found]:
    """Means of micro-batches that are divided by their number twice: by the user, and by what accumulates them."""
    for one, found, count in _accumulating(run):
        whole = [window for window in found if window.step is not None and len(window.used) == count]
        used = [back.fact for window in whole for back in window.used]
        if count < least or len(whole) < _ENOUGH or any(window.step and window.step.edited for window in whole):
            continue
        if not all(math.isclose(back.factor, count**-2, rel_tol=_ROUNDING) for back in used):
            continue
        back = used[0]
        call = next(iter(calls_of(run, back)), None)
        yield Found(
            text=f"The losses of {count} micro-batches{near(call or back)} are divided by {count} twice: the gradient "
            f"is 1/{count} of that of the whole batch.",
            fix=f"divide the loss once: what accumulates{near(back)} takes the mean of the micro-batches itself",
            cause="anybatch's steps, and accelerator.backward of Accelerate, weight each micro-batch; a loss / n left "
            "over from a hand-written loop divides once more.",
            since=back,
            step=_number(whole[2].step),
            where=call or back,
            optimizer=one.number,
            evidence={"backwards": count, "windows": len(whole), "factor": back.factor},
            severity="info" if "Adam" in one.facts.cls and not any(run.of(Clipped)) else "",
        )


def _divided(run: Run, count: int, back: Backward, step: Stepped | None) -> str:
    """The code that divides the losses; another where the loop is not the user's but a trainer's."""
    forward = next((one for one in run.of(Forward) if one.grad), None)
    lines = {(one.file, one.line) for one in (forward, back, step) if one is not None}
    if len(lines) > 1 or forward is None or step is None or not any(forward.file == one[0] for one in lines):
        return f"(loss / {count}).backward()"
    if run.roots[forward.root].config if forward.root in run.roots else {}:
        variable = root_variable(run, forward.root)
        return f"{variable}.accepts_loss_kwargs = False  # before Trainer(...): its loss is a mean, so divide it"
    return f"divide the loss by {count}, where the trainer that is called{near(back)} takes it"


@rule("AB356", "ACCUM_UNEQUAL_WEIGHT", "warning")
def accum_unequal_weight(
    run: Run, *, unequal: float = Limit(2.0, "notes of the reports on unequal windows have 1.5 and more")
) -> Iterator[Found]:
    """Means of micro-batches of different numbers of targets."""
    for one, found, _ in _accumulating(run):
        seen: list[tuple[Window, float, list[int]]] = []
        for window in found:
            known = [entry for back in window.used if (entry := _weight(run, back)) is not None]
            if window.step is not None and len(known) == len(window.used) >= 2:
                weights = [weight for weight, _ in known]
                seen.append((window, max(weights) / min(weights), [items for _, items in known]))
        ratios = [ratio for _, ratio, _ in seen]
        bad = [entry for entry in seen if entry[1] >= unequal]
        if len(bad) < _ENOUGH or len(bad) * 2 <= len(seen) or median(ratios) < unequal:
            continue
        window, _, items = bad[0]
        back = window.used[0].fact
        yield Found(
            text=f"The micro-batches of a step have {min(items)} to {max(items)} targets{near(back)}, but their means "
            f"have equal weight: a target counts up to {max(ratios):.1f} times as much as another.",
            fix='loss = F.cross_entropy(..., reduction="sum") / total_targets_of_the_whole_batch  # as TrainStep does '
            "with the batches of anybatch.windows(loader, batches=...)",
            cause="A mean divides by the targets of its own micro-batch; the sum of such means is not the mean of all.",
            since=back,
            step=_number(bad[2][0].step),
            optimizer=one.number,
            evidence={"items": items, "ratio": median(ratios), "windows": len(bad)},
        )


def _weight(run: Run, one: Pass) -> tuple[float, int] | None:
    """The weight of one target in the sum, and the number of targets; ``None`` if it can't be told."""
    own = calls_of(run, one.fact)
    if len(own) != 1 or own[0].reduction != "mean" or own[0].items <= 0 or own[0].weighted:
        return None
    factor = one.fact.factor
    if one.fact.value is not None and own[0].value:
        factor = one.fact.value / own[0].value * one.fact.weight
    return (factor / own[0].items, own[0].items) if factor > 0 else None
