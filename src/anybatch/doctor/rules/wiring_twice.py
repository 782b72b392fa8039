"""Rules of the family wiring: parameters in two optimizers, and optimizers that are made anew."""

import re
from collections import Counter
from collections.abc import Iterator

from anybatch.doctor.rules.naming import at_line, counted, listed, made_at, names_of, optimizer_variable, place_of, verb
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import ever_touched, members, windows_of
from anybatch.records.events import Backward, Cleared, Epoch, Loaded, Scheduled, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run


@rule("AB104", "OPT_PARAM_TWICE", "warning", explains=("LR_TOO_HIGH", "EXPLODING"))
def _opt_param_twice(run: Run) -> Iterator[Finding]:
    every, touched = members(run), ever_touched(run)
    last: dict[int, Stepped] = {}
    count: Counter[tuple[int, int]] = Counter()
    for one in run.facts:
        if isinstance(one, Backward | Cleared):
            last.clear()
        if not isinstance(one, Stepped):
            continue
        for other, step in last.items():
            pair = (min(other, one.optimizer), max(other, one.optimizer))
            shared = every.get(other, frozenset()) & every.get(one.optimizer, frozenset()) & touched
            torchs = all(number in run.optimizers and run.optimizers[number].is_torchs for number in pair)
            if other == one.optimizer or not shared or not torchs or step.closure or one.closure:
                continue
            count[pair] += 1
            if count[pair] == 3:
                yield _twice(run, pair, one, shared)
        last[one.optimizer] = one


def _twice(run: Run, pair: tuple[int, int], step: Stepped, shared: frozenset[int]) -> Finding:
    first, second = (optimizer_variable(run, number) for number in pair)
    file, line = made_at(run.optimizers.get(pair[1]))
    names = names_of(run, shared)
    return Finding(
        message=f"{listed(names)} {verb(len(names), 'is', 'are')} in {first} and in {second}, and both step on the "
        "same gradient.",
        place=place_of(run, shared, optimizer=pair[1], file=file, line=line),
        fix=f"leave them out of one of the two: {second} = "
        f"{run.optimizers[pair[1]].cls}([p for p in ... if p not in those of {first}], ...)",
        cause=f"Each iteration moves {verb(len(names), 'it', 'them')} twice, the second time with a gradient of old "
        "values.",
        evidence={"shared": len(names), "iterations": 3},
        step=step.number,
        at=step.at,
    )


@rule("AB105", "OPT_STATE_RESET", "warning")
def _opt_state_reset(run: Run) -> Iterator[Finding]:
    chain = _chain(run)
    if len(chain) < 2:
        return
    plain = [(old, new, step) for old, new, step in chain if not _by_design(run, old, new, step)]
    serious = len(plain) >= 2
    old, new, step = plain[0] if plain else chain[0]
    facts = run.optimizers[new]
    after = sum(one.optimizer == old for one in run.of(Stepped))
    variable = optimizer_variable(run, new)
    yield Finding(
        message=f"{variable} was made anew {len(chain)} times for the same parameters, first after "
        f"{counted(after, 'step')}; its state starts from zero each time.",
        place=Place(optimizer=variable, file=facts.file, line=facts.line),
        fix=f"move `{variable} = {facts.cls}(...)`{at_line(facts.file, facts.line)} in front of the loop",
        cause=f"A new {facts.cls} has no momentum and no second moments, so that its first steps are too large.",
        evidence={"times": len(chain), "after": after, "lr": facts.groups[0].lr if facts.groups else 0.0},
        step=step.step,
        at=step.at,
        severity="" if serious else "info",
    )


def _chain(run: Run) -> list[tuple[int, int, Stepped]]:
    """Pairs of optimizers of which the second took over parameters of the first, which never stepped again."""
    every = members(run)
    last = {one.optimizer: one for one in run.of(Stepped)}
    first: dict[int, Stepped] = {}
    for one in run.of(Stepped):
        first.setdefault(one.optimizer, one)
    found = []
    for new, begun in first.items():
        facts = run.optimizers.get(new)
        if facts is None or not any(group.momentum for group in facts.groups):
            continue
        olds = [one for one in last if every[one] & every[new] and last[one].at < begun.at]
        old = max(olds, key=lambda one: last[one].at, default=-1)
        if old >= 0 and run.optimizers[old].cls == facts.cls:
            found.append((old, new, begun))
    return found


def _other_task(run: Run, old: int, new: int) -> bool:
    """Whether the loss is so much higher with the new optimizer that it must be another task."""
    before = [one.used[-1].fact.value for one in windows_of(run, old) if one.step is not None and one.used]
    after = [one.used[-1].fact.value for one in windows_of(run, new) if one.step is not None and one.used]
    lower = [value for value in before[-3:] if value is not None]
    higher = [value for value in after[:1] if value is not None]
    return bool(lower and higher) and higher[0] > 2.0 * max(abs(value) for value in lower)


def _by_design(run: Run, old: int, new: int, begun: Stepped) -> bool:
    """Whether something else changed with the optimizer: parameters, learning rate, schedule, data or values."""
    every = members(run)
    if every[old] != every[new]:
        return True
    ended = [one for one in run.of(Stepped) if one.optimizer == old][-1]
    if not re.search("ada|rms|lion|amsgrad", run.optimizers[new].cls.lower()) or _other_task(run, old, new):
        return True
    if [round(lr, 12) for lr in ended.lrs] != [round(lr, 12) for lr in begun.lrs]:
        return True
    if any(one.optimizer in (old, new) for one in run.schedulers.values()) and any(run.of(Scheduled)):
        return True
    if any(one.into == "module" and ended.at < one.at < begun.at for one in run.of(Loaded)):
        return True
    loaders = [one for one in run.of(Epoch) if not one.ended]
    before = [one.loader for one in loaders if one.at < ended.at]
    after = [one.loader for one in loaders if ended.at < one.at < begun.at]
    return bool(before and after and not set(before) & set(after))
