"""From the facts of a run to a diagnosis: runs all rules, ranks their findings, judges, and fills the four cells."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from anybatch.doctor.policy import Policy
from anybatch.doctor.rules.registry import Rule, all_rules
from anybatch.doctor.views.changes import cells
from anybatch.doctor.views.courses import updates
from anybatch.doctor.views.naming import Located
from anybatch.doctor.views.outcomes import learned_well, outcome
from anybatch.records.diagnoses import INTERRUPTED, SEVERAL_THREADS, Cell, Diagnosis, Suppressed, Verdict, missing_of
from anybatch.records.events import Backward, Crashed, Ended, Forward, Stepped, ThreadsAtOnce
from anybatch.records.findings import SEVERITIES, Finding, Severity, is_tested
from anybatch.records.runs import Run
from anybatch.records.samples import Norms

__all__ = ["Cell", "cells", "diagnose", "diagnosis"]

_log = logging.getLogger(__name__)


def diagnose(run: Run, policy: Policy | None = None) -> tuple[Finding, ...]:
    """The findings of a run, in order of rank; without a policy all that no comment ignores.

    A rule that fails is logged and left out.
    """
    return _diagnosed(run, policy or Policy())[0]


def diagnosis(run: Run, policy: Policy | None = None) -> Diagnosis:
    """The whole diagnosis of a run: findings, verdict, cells and notes."""
    policy = policy or Policy()  # a new one, which reads the user's files as they are now
    findings, failed, suppressed = _diagnosed(run, policy)
    ended = next(run.of(Ended), None)
    rest = ended.seconds - ended.own_seconds if ended else 0.0
    unexamined = (
        *(["all rules"] if _is_mixed(run) else failed),
        *([SEVERAL_THREADS] if any(run.of(ThreadsAtOnce)) else []),
        *(["the run"] if ended is not None and ended.failure else []),
    )
    verdict, reason = verdict_on(run, findings, unexamined)
    return Diagnosis(
        findings=findings,
        cells=cells(run),
        steps=_steps(run),
        overhead=ended.own_seconds / rest if ended and rest > 0 else None,
        script=run.started.script,
        arguments=run.started.arguments,
        device=run.started.device,
        exit_code=ended.exit_code if ended else None,
        seconds=ended.seconds if ended else 0.0,
        notes=(
            *failed.values(),
            *_out_of_sight(run),
            *_of_one_thread(run),
            *policy.unused(_files_of(run), suppressed),
        ),
        unexamined=unexamined,
        verdict=verdict,
        reason=reason,
        suppressed=tuple(suppressed),
    )


def _files_of(run: Run) -> list[str]:
    """The user's files that the run went through."""
    seen = (*run.optimizers.values(), *(one for kind in (Forward, Backward, Stepped) for one in run.of(kind)))
    return [one.file for one in seen if isinstance(one, Located)]


def _steps(run: Run) -> int:
    """How many steps were done: of optimizers that step by turns those of one, of one after another those of each.

    Without any, those by hand.
    """
    counts: dict[int, int] = {}
    spans: dict[int, tuple[int, int]] = {}
    for one in run.of(Stepped):
        counts[one.optimizer] = max(counts.get(one.optimizer, 0), one.number + 1)
        spans[one.optimizer] = spans.get(one.optimizer, (one.at, 0))[0], one.at
    total, most, end = 0, 0, -1
    for number, (first, last) in sorted(spans.items(), key=lambda entry: entry[1]):
        if first > end:
            total, most = total + most, 0
        most, end = max(most, counts[number]), max(end, last)
    return total + most if spans else len(updates(run))


def _out_of_sight(run: Run) -> tuple[str, ...]:
    """What to say of a training without an optimizer of torch and without a model: plain tensors, changed by hand."""
    passes = [one for one in run.of(Backward) if one.function == "backward"]
    if run.steps or run.optimizers or run.roots or not passes:
        return ()
    first = passes[0]
    line = f" (the first at {PurePath(first.file).name}:{first.line})" if first.file else ""
    count = f"{len(passes)} backward{'s' if len(passes) > 1 else ''}"
    text = (
        f"{count} ran{line}, but no nn.Module was called and no optimizer of torch was made. Weights that are plain "
        "tensors and are changed by hand are not followed; an nn.Module with an optimizer of torch.optim is. Look "
        "first whether each gradient is cleared after its update, with .grad = None or .grad.zero_()."
    )
    return (text,)


def _is_mixed(run: Run) -> bool:
    """Whether the events of several threads that train at once lie between each other, so that no order is known."""
    return any(one.turns for one in run.of(ThreadsAtOnce))


def _of_one_thread(run: Run) -> tuple[str, ...]:
    """What to say of a process in which several threads train at once."""
    one = next(run.of(ThreadsAtOnce), None)
    if one is None:
        return ()
    line = f" ({PurePath(one.file).name}:{one.line})" if one.file else ""
    text = (
        f"a second thread began to train beside another one{line}, in step {one.step}; nothing was recorded from then "
        "on, since gradients can't be read while another thread writes them. Train in one thread at a time under the "
        "doctor, and call models in other threads under torch.no_grad(): those calls are passed over."
    )
    return (text,)


def _diagnosed(run: Run, policy: Policy) -> tuple[tuple[Finding, ...], dict[str, str], list[Suppressed]]:
    """The findings, for each rule that failed its code and name with a note, and what the user wants not to hear."""
    rules = {} if _is_mixed(run) else all_rules()
    found: list[Finding] = []
    failed: dict[str, str] = {}
    for rule in rules.values():
        try:
            found += rule.findings(run, **policy.limits.get(rule.name, {}))
        except BaseException as error:  # a rule that can't read a record must not hide what the others find
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            failed[f"{rule.code} {rule.name}"] = _note(rule, error)
    if learned_well(run):
        found = [
            replace(one, severity=_LESS.get(one.severity, "info")) if rules[one.name].slows else one for one in found
        ]
    found, suppressed = policy.parted(found)
    in_order = ranked(found, {name: rule.explains for name, rule in rules.items()})
    is_known = (one.fix_kind == "suggestion" and is_tested(one.name, one.fix) for one in in_order)
    said = (replace(one, fix_kind="tested") if known else one for one, known in zip(in_order, is_known, strict=True))
    return tuple(said), failed, suppressed


_LESS: dict[str, Severity] = {"error": "warning", "warning": "info"}
"""What a finding is that did no harm to be seen: code that does nothing, as a clip without effect, is still wrong."""


def _note(rule: Rule, error: BaseException) -> str:
    note = f"the rule {rule.code} {rule.name} failed with {type(error).__name__}: {error}; its findings are missing"
    _log.warning(note, exc_info=error)
    return note


OUTCOMES = frozenset({"NOT_LEARNING", "GRADIENTS_ZERO"})
"""Findings that say what became of a run, and not why."""

_OF_THE_WHOLE = OUTCOMES | {"LABELS_UNRELATED", "LR_TOO_LOW"}
"""Findings that follow from what explains them whenever that began: they are asked of the whole run."""


def ranked(findings: Iterable[Finding], explains: Mapping[str, tuple[str, ...]]) -> tuple[Finding, ...]:
    """Orders findings: each root is followed by its consequences.

    Roots are ordered by the gravest severity among them and their consequences, then by the time of the anomaly; each
    finding keeps its own severity. A finding is a consequence of another one that explains it, directly or through
    other findings, is not later, and is not merely ``info`` unless both are. That nothing was learned is a consequence
    of any fault.
    """
    found = sorted(_without_repeats(findings), key=lambda one: (one.at, _severity(one), one.code))
    parents: dict[int, int] = {}
    for index in range(len(found)):
        parent = _parent(index, found, explains, parents)
        if parent is not None:
            parents[index] = parent
    roots = [index for index in range(len(found)) if index not in parents]
    under: dict[int, list[int]] = {root: [] for root in roots}
    for index in parents:
        under[_root(index, parents)].append(index)
    worst = {root: min(_severity(found[one]) for one in (root, *under[root])) for root in roots}
    order = sorted(roots, key=lambda root: (worst[root], found[root].at, _severity(found[root]), found[root].code))
    shown: list[Finding] = []
    for root in order:
        shown.append(found[root])
        behind = sorted(under[root], key=lambda one: (found[one].at, _severity(found[one]), found[one].code))
        shown += [replace(found[one], consequence_of=found[root].name) for one in behind]
    return tuple(shown)


def _parent(
    index: int, found: list[Finding], explains: Mapping[str, tuple[str, ...]], parents: Mapping[int, int]
) -> int | None:
    """The finding that one follows from, the earliest; never one that itself follows from it."""
    finding = found[index]
    for other, candidate in enumerate(found):
        later = candidate.at > finding.at and finding.name not in _OF_THE_WHOLE
        if other == index or candidate.name == finding.name or later:
            continue
        if candidate.severity == "info" != finding.severity or _root(other, parents) == index:
            continue
        if candidate.at == finding.at and other > index and _explains(finding, candidate, explains):
            continue
        if _explains(candidate, finding, explains):
            return other
    return None


def _explains(root: Finding, finding: Finding, explains: Mapping[str, tuple[str, ...]]) -> bool:
    if finding.name in OUTCOMES and root.name not in OUTCOMES:
        return True
    return finding.name in explains.get(root.name, ())


def _root(index: int, parents: Mapping[int, int]) -> int:
    while index in parents:
        index = parents[index]
    return index


def _without_repeats(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for each name and place, the earliest."""
    first: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        key = (finding.name, finding.place.module, finding.place.parameters, finding.place.optimizer,
               finding.place.group, finding.place.file, finding.place.line)  # fmt: skip
        if key not in first or finding.at < first[key].at:
            first[key] = finding
    return list(first.values())


def _severity(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity or "info")


_MOST_NAMES = 3


def verdict_on(run: Run, findings: Iterable[Finding], unexamined: Sequence[str]) -> tuple[Verdict, str]:
    """The verdict on a run, and its reason; what could not be examined keeps it from being ``"learning"``."""
    crash = next(iter(list(run.of(Crashed))[-1:]), None)
    ended = next(run.of(Ended), Ended())
    if crash is not None:
        return "crashed", f"{crash.error}: {crash.text}".strip(": \n")
    if ended.exit_code not in (None, 0, INTERRUPTED):
        return "crashed", f"it ended with exit code {ended.exit_code}"
    grave = [one for one in findings if one.severity != "info"]
    if grave:
        only = all(one.name in OUTCOMES or one.consequence_of in OUTCOMES for one in grave)
        return ("not learning", grave[0].message) if only else ("faults", grave[0].message)
    if unexamined:
        return "undecided", f"not all was examined: {missing_of(unexamined)}"
    if not updates(run):
        return "undecided", "no optimizer stepped"
    unseen = _unseen(run)
    if unseen:
        more = f" and {len(unseen) - _MOST_NAMES} more" if len(unseen) > _MOST_NAMES else ""
        return (
            "undecided",
            f"not every trained parameter was looked at and named: {', '.join(unseen[:_MOST_NAMES])}{more}",
        )
    found = outcome(run)
    if ended.exit_code == INTERRUPTED:
        return "undecided", f"it was interrupted, and {found.said}"
    return ("learning" if found.word == "learning" else "undecided"), found.said


def _unseen(run: Run) -> list[str]:
    """Parameters that an optimizer stepped and that were not looked at, or for which no name was found."""
    seen = {number for one in run.of(Norms) for number in one.parameters}
    seen |= {number for one in run.of(Backward) for number in one.touched or ()}
    found = []
    for optimizer in sorted({one.optimizer for one in run.of(Stepped)} & run.optimizers.keys()):
        for number in (one for group in run.optimizers[optimizer].groups for one in group.parameters):
            facts = run.parameters.get(number)
            if facts is None:
                found.append(f"parameter {number} of {run.optimizers[optimizer].variable or 'the optimizer'}")
            elif facts.requires_grad and (number not in seen or ".param_groups[" in facts.name):
                found.append(facts.name)
    return found
