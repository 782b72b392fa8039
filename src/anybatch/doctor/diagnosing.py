"""From the facts of a run to a diagnosis: runs all rules, ranks their findings, judges, and fills the four cells."""

import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from anybatch.doctor.policy import Policy
from anybatch.doctor.rules.registry import Rule, all_rules
from anybatch.doctor.views.courses import taking_turns, updates
from anybatch.doctor.views.measures import at
from anybatch.doctor.views.naming import Located, counted, listed, near
from anybatch.doctor.views.outcomes import learned_well, outcome
from anybatch.records.diagnoses import (
    INTERRUPTED,
    SEVERAL_THREADS,
    Cell,
    Diagnosis,
    Suppressed,
    Verdict,
    missing_of,
)
from anybatch.records.events import Backward, Crashed, Ended, Forward, Stepped, ThreadsAtOnce
from anybatch.records.findings import SEVERITIES, Finding, Severity, is_tested
from anybatch.records.lossfacts import ALL_ASKED
from anybatch.records.runs import Run
from anybatch.records.samples import Norms, Written
from anybatch.records.tables import ParameterFacts

SHRUNK = 1e-3
"""Gradients whose norm falls below this share of the first ones are said to shrink."""


@dataclass(slots=True)
class _Seen:
    """What was seen of one parameter over the run."""

    gradients: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    sampled: int = 0
    moved: bool = False
    outside: bool = False
    cleared: bool = False


def cells(run: Run) -> tuple[Cell, ...]:
    """Which gradients and which parameters change: one entry for all of a module of which the same is true."""
    seen = _look(run)
    optimized = {
        number: (group.weight_decay, group.momentum)
        for optimizer in run.optimizers.values()
        for group in optimizer.groups
        for number in group.parameters
    }
    entries = [
        (parameter, seen[number], *_cell(parameter, seen[number], number in optimized))
        for number, parameter in run.parameters.items()
    ]
    alike = itertools.groupby(entries, key=lambda entry: (entry[0].root, _module(run, entry[0]), *entry[2:]))
    groups = [list(members) for _, members in alike]
    return tuple(_joined(run, [(parameter, one) for parameter, one, *_ in group], *group[0][2:]) for group in groups)


def _look(run: Run) -> dict[int, _Seen]:
    seen = {number: _Seen() for number in run.parameters}
    for norms in run.of(Norms):
        for position, number in enumerate(norms.parameters):
            if number in seen:
                _sample(seen[number], norms, position)
        for number in norms.since:
            if number in seen:
                seen[number].outside = True
    for backward in run.of(Backward):
        for number in backward.touched or ():
            if number in seen:
                seen[number].cleared = True  # unless a step saw it
    if not any(True for _ in run.of(Norms)):
        _by_events(run, seen)
    for number in _by_hand(run):
        seen[number].outside = True
    return seen


def _by_hand(run: Run) -> set[int]:
    """The parameters that changed before any optimizer had stepped.

    Of each some entries are compared, and a row of an embedding changes only where it was used; so without any
    optimizer the other parameters of these models are taken to do as they do.
    """
    found = {number for one in run.of(Written) for number in one.parameters if number in run.parameters}
    if run.optimizers:
        return found
    roots = {run.parameters[number].root for number in found}
    return {number for number, one in run.parameters.items() if one.root in roots and one.requires_grad}


def _sample(one: _Seen, norms: Norms, position: int) -> None:
    one.sampled += 1
    gradient, update = at(norms.grad, position, None), at(norms.update, position, 0.0)
    weight = at(norms.weight, position, 0.0)
    if gradient is not None:
        one.gradients.append(gradient)
    one.moved |= update > 0 or math.isnan(update)
    one.ratios.append(update / weight if weight > 0 else 0.0)


def _by_events(run: Run, seen: Mapping[int, _Seen]) -> None:
    """Without samples only the presence of gradients is known; that a parameter was stepped is taken as a change."""
    for backward in run.of(Backward):
        for number in backward.touched or ():
            if number in seen:
                seen[number].gradients.append(math.nan)
    stepped = {one.optimizer for one in run.of(Stepped)}
    for number in stepped & run.optimizers.keys():
        for group in run.optimizers[number].groups:
            for parameter in set(group.parameters) & seen.keys():
                seen[parameter].sampled += 1
                seen[parameter].moved = bool(seen[parameter].gradients) and group.lr > 0


def _cell(parameter: ParameterFacts, one: _Seen, optimized: bool) -> tuple[int, str]:
    flows = any(gradient != 0 for gradient in one.gradients)
    moves = one.moved or one.outside
    if not one.sampled and not one.gradients and not moves:
        return (3, "frozen") if not parameter.requires_grad else (0, "")
    if flows and moves:
        return 1, "" if parameter.requires_grad else "frozen in a part of the run"
    if flows:
        return 2, "in no optimizer" if not optimized else "the optimizer does not change it"
    if moves:
        return 4, "written outside of the optimizer" if one.outside and not one.moved else "decay or momentum"
    if not parameter.requires_grad:
        return 3, "frozen"
    if one.gradients:
        return 3, "gradient exactly zero"
    return 3, "its gradient is cleared before the step" if one.cleared and optimized else "no gradient arrives"


def _joined(run: Run, members: list[tuple[ParameterFacts, _Seen]], cell: int, why: str) -> Cell:
    first_gradient = _norm([one.gradients[0] for _, one in members if one.gradients])
    last_gradient = _norm([one.gradients[-1] for _, one in members if one.gradients])
    parameter = members[0][0]
    return Cell(
        cell=cell,
        module=_module(run, parameter),
        parameters=tuple(one.name for one, _ in members),
        numel=sum(one.numel for one, _ in members),
        why=why,
        shrinking=bool(first_gradient and last_gradient is not None and last_gradient < SHRUNK * first_gradient),
        frozen=all(not one.requires_grad for one, _ in members),
        first_gradient=first_gradient,
        last_gradient=last_gradient,
        first_ratio=_median([one.ratios[0] for _, one in members if one.ratios]),
        last_ratio=_median([one.ratios[-1] for _, one in members if one.ratios]),
    )


def _module(run: Run, parameter: ParameterFacts) -> str:
    if parameter.root < 0:  # of no model in use: what a variable is called, or the group of an optimizer
        return parameter.name.partition("['params']")[0]
    wanted = parameter.root in run.roots and (len(run.roots) > 1 or parameter.module[:1].isdigit())
    variable = run.roots[parameter.root].variable if wanted else ""
    return ".".join(part for part in (variable, parameter.module) if part)


def _norm(values: list[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return math.sqrt(sum(value * value for value in known)) if known else None


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


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
        *([ALL_ASKED] if run.answers(ALL_ASKED, "unknown") else []),
        *(["the run"] if ended is not None and ended.failure else []),
    )
    verdict, reason = verdict_on(run, findings, unexamined)
    seen = (*run.optimizers.values(), *(one for kind in (Forward, Backward, Stepped) for one in run.of(kind)))
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
            *(f"Not all questions were asked: {one.detail} answers." for one in run.answers(ALL_ASKED, "unknown")),
            *policy.unused([one.file for one in seen if isinstance(one, Located)], suppressed),
        ),
        unexamined=unexamined,
        verdict=verdict,
        reason=reason,
        suppressed=tuple(suppressed),
    )


def _steps(run: Run) -> int:
    """How many steps were done: of optimizers that step by turns those of one, of one after another those of each.

    Without any, those by hand.
    """
    counts = run.steps_of
    return sum(max(counts[one] for one in members) for _, members in taking_turns(run)) if counts else len(updates(run))


def _out_of_sight(run: Run) -> tuple[str, ...]:
    """What to say of a training without an optimizer of torch and without a model: plain tensors, changed by hand."""
    passes = [one for one in run.of(Backward) if one.function == "backward"]
    if run.steps or run.optimizers or run.roots or not passes or any(run.of(Written)):
        return ()
    line = near(passes[0]).replace("(", "(the first at ", 1)
    text = (
        f"{counted(len(passes), 'backward')} ran{line}, but no nn.Module was called and no optimizer of torch was made."
        " Weights that are plain tensors and are changed by hand are not followed; an nn.Module with an optimizer of "
        "torch.optim is. Look first whether each gradient is cleared after its update, with .grad = None or "
        ".grad.zero_()."
    )
    return (text,)


def _is_mixed(run: Run) -> bool:
    """Whether the events of several threads that train at once lie between each other, so that no order is known."""
    return any(one.turns for one in run.of(ThreadsAtOnce))


def _of_one_thread(run: Run) -> tuple[str, ...]:
    """What to say of a process in which several threads train at once."""
    return tuple(
        f"a second thread began to train beside another one{near(one)}, in step {one.step}; nothing was recorded from "
        "then on, since gradients can't be read while another thread writes them. Train in one thread at a time under "
        "the doctor, and call models in other threads under torch.no_grad(): those calls are passed over."
        for one in itertools.islice(run.of(ThreadsAtOnce), 1)
    )


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

_OF_THE_WHOLE = OUTCOMES | {"LABELS_UNRELATED", "LR_TOO_LOW", "TARGET_GIVEN"}
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
    """The finding that one follows from, the earliest; never one that itself follows from it.

    What became of a run follows from the gravest.
    """
    finding = found[index]
    for other, candidate in sorted(
        enumerate(found), key=lambda one: _severity(one[1]) if finding.name in OUTCOMES else 0
    ):
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
        return "undecided", f"not every trained parameter was examined: {listed(unseen)}"
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
