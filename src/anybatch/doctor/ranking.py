"""The order of findings: the gravest first, each root followed by its consequences."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from anybatch.records.findings import SEVERITIES, Finding

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
