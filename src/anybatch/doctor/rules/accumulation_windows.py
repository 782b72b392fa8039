"""Rules of the family accumulation: windows that are cleared too often, start wrong or lose their tail."""

import itertools
from collections.abc import Iterator

from anybatch.doctor.rules.naming import at_line, counted, optimizer_variable
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import Window, by_closure, stepping, usual_count, windows_of
from anybatch.records.events import Cleared, Epoch, Forward, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run
from anybatch.records.samples import InputSample


def accumulating(run: Run) -> Iterator[tuple[int, list[Window], int]]:
    """Optimizers whose steps use several backwards from one line, each after a forward of its own.

    Args:
        run: the facts.

    Yields:
        The number of the optimizer, its windows, and how many backwards a step usually uses.
    """
    for optimizer in stepping(run):
        found = [one for one in windows_of(run, optimizer) if not by_closure(run, one)]
        count = usual_count(found)
        usual = [one for one in found if len(one.used) == count]
        if count >= 2 and all(one.of_one_line for one in usual):
            yield optimizer, found, count


def _complete(found: list[Window]) -> list[Window]:
    return [one for one in found if one.step is not None or one.skipped]


@rule("AB351", "ZERO_GRAD_PER_MICROBATCH", "error", explains=("LR_TOO_LOW", "ACCUM_NOT_DIVIDED"))
def _zero_grad_per_microbatch(run: Run) -> Iterator[Finding]:
    for optimizer in stepping(run):
        row: list[Window] = []
        for one in windows_of(run, optimizer):
            wasted = (
                one.step is not None
                and not by_closure(run, one)
                and len(one.passes) >= 2
                and len(one.used) == 1
                and one.clears >= len(one.passes) - 1
                and one.of_one_line
                and not one.step.edited
                and not _one_batch(one)
                and not _one_input(run, one)
                and not _cleared_by_wrapper(run, one)
                and not _steps_another(run, one)
            )
            row = [*row, one] if wasted and (not row or len(one.passes) == len(row[-1].passes)) else []
            if len(row) == 3:
                yield _per_microbatch(run, optimizer, row)
                break


def _steps_another(run: Run, window: Window) -> bool:
    """Whether another optimizer stepped between the backwards: each is of one of two players, in a function of both."""
    first, last = window.passes[0].fact.at, window.passes[-1].fact.at
    own = window.step.optimizer if window.step is not None else -1
    return any(first < one.at < last and one.optimizer != own for one in run.of(Stepped))


def _one_batch(window: Window) -> bool:
    """Whether all losses are so close to each other that they must be of one batch, as with perturbed weights."""
    values = [one.fact.value for one in window.passes]
    known = [value for value in values if value is not None]
    return len(known) == len(values) and max(known) - min(known) <= 0.02 * max(abs(value) for value in known)


def _one_input(run: Run, window: Window) -> bool:
    """Whether the model was given the same input before each backward, as where weights are perturbed and put back."""
    calls = {one.at for one in window.events if isinstance(one, Forward) and one.grad}
    given: dict[int, set[str]] = {}
    for one in run.of(InputSample):
        if one.forward in calls and one.hash:
            given.setdefault(one.forward, set()).add(one.hash)
    return len(given) >= 2 and len({frozenset(hashes) for hashes in given.values()}) == 1


def _cleared_by_wrapper(run: Run, window: Window) -> bool:
    """Whether an optimizer of the user's around this one clears, which may have used the gradient, as SAM does."""
    clears = [one for one in window.events if isinstance(one, Cleared) and one.by == "optimizer"]
    outer = run.optimizers.get(clears[-1].number) if clears else None
    return outer is not None and outer.optimizer != window.optimizer and not outer.is_torchs


def _per_microbatch(run: Run, optimizer: int, row: list[Window]) -> Finding:
    window = row[0]
    count = len(window.passes)
    clear = [one for one in window.events if isinstance(one, Cleared)][-1]
    variable = optimizer_variable(run, optimizer)
    step = row[-1].step
    return Finding(
        message=f"Gradients are cleared{at_line(clear.file, clear.line)} before each of {count} backwards, so that "
        f"{variable}.step() uses 1 of {count} micro-batches.",
        place=Place(optimizer=variable, file=clear.file, line=clear.line),
        fix=f"{variable}.zero_grad()  # only after {variable}.step()"
        + (at_line(step.file, step.line) if step is not None else ""),
        cause="zero_grad() is called in each iteration, the step only in some.",
        evidence={"backwards": count, "used": 1, "windows": len(row)},
        step=step.number if step is not None else 0,
        at=clear.at,
    )


@rule("AB352", "ACCUM_FIRST_WINDOW", "warning")
def _accum_first_window(run: Run) -> Iterator[Finding]:
    for optimizer, found, count in accumulating(run):
        whole = _complete(found)
        first = whole[0]
        if first.step is None or not 0 < len(first.used) < count or first.step.number or first.borders:
            continue
        if len(first.passes) != len(first.used) or any(len(one.used) != count for one in whole[1:4]):
            continue
        step = first.step
        variable = optimizer_variable(run, optimizer)
        yield Finding(
            message=f"The first {variable}.step(){at_line(step.file, step.line)} uses "
            f"{counted(len(first.used), 'backward')}, the next ones {count}.",
            place=Place(optimizer=variable, file=step.file, line=step.line),
            fix=f"if (i + 1) % {count} == 0:  # instead of i % {count} == 0, in front of {variable}.step()",
            cause="The condition of the step is already true for the first micro-batch, so that all windows are "
            "shifted.",
            evidence={"first": len(first.used), "next": [len(one.used) for one in whole[1:6]]},
            step=0,
            at=step.at,
        )


@rule("AB353", "ACCUM_TAIL_DROPPED", "warning")
def _accum_tail_dropped(run: Run) -> Iterator[Finding]:
    for optimizer, found, count in accumulating(run):
        bad = [one for one in found if 0 < len(one.passes) - len(one.used) < count and _dropped_at_border(one)]
        usual = sum(len(one.used) == count for one in found)
        if not bad or usual < 3:
            continue
        lost = len(bad[0].passes) - len(bad[0].used)
        clear = next(one for one in bad[0].events if isinstance(one, Cleared) and one.at > bad[0].passes[0].fact.at)
        back = bad[0].passes[0].fact
        variable = optimizer_variable(run, optimizer)
        yield Finding(
            message=f"{counted(lost, 'backward')} at the end of an epoch {'is' if lost == 1 else 'are'} cleared"
            f"{at_line(clear.file, clear.line)} without a step ({counted(len(bad), 'time')}); a step uses {count}.",
            place=Place(optimizer=variable, file=clear.file or back.file, line=clear.line or back.line),
            fix=f"{variable}.step(); {variable}.zero_grad()  # once more, after the loop over the batches",
            cause=f"The number of batches is no multiple of {count}, and the rest gets no step.",
            evidence={"lost": lost, "of": count, "times": len(bad)},
            step=bad[0].step.number if bad[0].step is not None else 0,
            at=clear.at,
        )


def _dropped_at_border(window: Window) -> bool:
    """Whether an epoch ended between the first backward of a window and the clearing that took it away."""
    first = window.passes[0].fact.at
    clear = next((one.at for one in window.events if isinstance(one, Cleared) and one.at > first), None)
    ends = [one.at for one in window.events if isinstance(one, Epoch) and one.ended]
    return clear is not None and window.clears == 1 and any(first < end < clear for end in ends)


@rule("AB354", "ACCUM_TAIL_LEAKS", "warning")
def _accum_tail_leaks(run: Run) -> Iterator[Finding]:
    for optimizer, found, count in accumulating(run):
        whole = _complete(found)
        longer = [one for one in whole if count < len(one.used) < 2 * count]
        bad = [one for one in longer if _mixed(one)]
        if not bad and not any(run.of(Epoch)) and _regular(whole, longer):
            bad = longer
        others = [one for one in whole if len(one.used) != count]
        if not bad or sum(len(one.used) == count for one in whole) < 3 or len(others) > len(bad) + 1:
            continue
        extra = len(bad[0].used) - count
        step, back = bad[0].step, bad[0].used[0].fact
        variable = optimizer_variable(run, optimizer)
        yield Finding(
            message=f"{variable}.step() uses {len(bad[0].used)} backwards at the border of an epoch and {count} "
            f"elsewhere: {counted(extra, 'backward')} of the epoch before {'is' if extra == 1 else 'are'} left over.",
            place=Place(
                optimizer=variable, file=step.file if step else back.file, line=step.line if step else back.line
            ),
            fix=f"{variable}.step(); {variable}.zero_grad()  # once more, after the loop over the batches",
            cause=f"The number of batches is no multiple of {count}, and the gradients of the rest are not cleared.",
            evidence={"used": len(bad[0].used), "usual": count, "times": len(bad)},
            step=step.number if step is not None else 0,
            at=back.at,
        )


def _regular(whole: list[Window], longer: list[Window]) -> bool:
    """Whether windows of one size come at equal distances, as those at the border of an epoch do without a loader."""
    places = [index for index, one in enumerate(whole) if any(one is other for other in longer)]
    distances = {second - first for first, second in itertools.pairwise(places)}
    return (
        len(places) >= 3 and len({len(one.used) for one in longer}) == 1 and len(distances) == 1 and max(distances) > 1
    )


def _mixed(window: Window) -> bool:
    """Whether an epoch ended between two backwards that a step used."""
    first, last = window.used[0].fact.at, window.used[-1].fact.at
    return any(isinstance(one, Epoch) and one.ended and first < one.at < last for one in window.events)
