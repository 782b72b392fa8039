"""Which findings are reported: settings of a project, comments on lines, and a baseline of known findings."""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from anybatch.doctor.rules.registry import all_rules
from anybatch.records.diagnoses import Suppressed
from anybatch.records.findings import Finding
from anybatch.records.sources import comments_of, line_at

KEYS = ("select", "ignore", "limits", "per-path", "fail-on")
"""What ``[tool.anybatch.doctor]`` of a ``pyproject.toml`` may have."""

BASELINE = "anybatch baseline"
_TABLE = "[tool.anybatch.doctor]"
_COMMENT = re.compile(r"#\s*anybatch:\s*ignore\b(?:\[(?P<codes>[^\]]*)\])?\s*(?P<reason>.*)")

Known = tuple[str, str, str]
"""What a finding is known by in a baseline: its code, its module, and the text of its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which findings are reported.

    Example:
        >>> found = Finding("no gradient", code="AB101", name="OPT_PARAM_MISSING")
        >>> kept, left_out = Policy(ignore=("AB1",)).parted([found])
        >>> kept, [(one.finding.code, one.by) for one in left_out]
        ([], [('AB101', 'settings')])
    """

    select: tuple[str, ...] = ()  # codes, beginnings of codes, or names of rules; all where it is empty
    ignore: tuple[str, ...] = ()  # the same, of what is not reported
    # for a pattern of paths, what is not reported there
    per_path: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # other thresholds than their own, for each rule by name
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    fail_on: str | None = None  # the least severity that is a failure, ``None`` for none
    folder: Path = field(default_factory=Path)  # that the patterns are relative to
    baseline: frozenset[Known] = frozenset()  # findings that were known before

    def parted(self, findings: Iterable[Finding]) -> tuple[list[Finding], list[Suppressed]]:
        """Separates findings into those that are reported and those that are suppressed."""
        kept: list[Finding] = []
        others: list[Suppressed] = []
        for one in findings:
            suppressed = self._suppressed(one)
            if suppressed is None:
                kept.append(one)
            else:
                others.append(suppressed)
        return kept, others

    def _suppressed(self, one: Finding) -> Suppressed | None:
        for lines, _, codes, reason in self._ignores(one.place.file) if one.place.file else ():
            if one.place.line in lines and is_among(one, codes):
                return Suppressed(one, "line", reason)
        if self.select and not is_among(one, self.select):
            return Suppressed(one, "settings", "not selected")
        path = _relative(one.place.file, self.folder)
        here = (f"per-path {pattern}" for pattern, codes in self.per_path.items()
                if one.place.file and fnmatch(path, pattern) and is_among(one, codes))  # fmt: skip
        where = "ignore" if is_among(one, self.ignore) else next(here, None)
        if where is not None:
            return Suppressed(one, "settings", where)
        return Suppressed(one, "baseline") if self.known_by(one) in self.baseline else None

    def known_by(self, one: Finding) -> Known:
        """The identity of a finding in a baseline, which does not change when lines are added above it."""
        return one.code, one.place.module, line_at(one.place.file, one.place.line).strip()

    def unused(self, files: Iterable[str], suppressed: Iterable[Suppressed]) -> tuple[str, ...]:
        """Notes on comments that ignored nothing, name no finding, or name an unknown one."""
        used = [one.finding for one in suppressed if one.by == "line"]
        notes = []
        for file in dict.fromkeys(filter(None, files)):
            for lines, line, codes, _ in self._ignores(file):
                here = [one for one in used if one.place.file == file and one.place.line in lines]
                where = f"{_relative(file, Path.cwd())}:{line}"
                if not codes:
                    notes.append(f"{where}: the comment names no finding; write anybatch: ignore[AB101] and why.")
                for code in codes:
                    if (unknown := _unknown([code])) is not None:
                        notes.append(f"{where}: the comment ignores {unknown}, which is no code or name of a finding.")
                    elif not any(is_among(one, [code]) for one in here):
                        notes.append(f"{where}: the comment ignores {code}, which was not found there in this run.")
        return tuple(notes)

    def _ignores(self, file: str) -> list[tuple[range, int, tuple[str, ...], str]]:
        """The comments of a file that ignore: the lines of the statement, the comment's own, codes, the reason."""
        found = []
        for lines, line, text in comments_of(file):
            if (match := _COMMENT.search(text)) is not None:
                found.append((lines, line, _codes((match["codes"] or "").split(",")), match["reason"].strip()))
        return found


def is_among(one: Finding, codes: Iterable[str]) -> bool:
    """Whether a finding matches one of several codes, code prefixes or names."""
    return any(one.code.startswith(code) or one.name == code for code in codes)


def _codes(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(word.strip().upper() for word in words if word.strip())


def _unknown(codes: Iterable[str]) -> str | None:
    rules = all_rules()
    known = [rule.code for rule in rules.values()]
    return next((one for one in codes if one not in rules and not any(code.startswith(one) for code in known)), None)


def checked_codes(words: Sequence[str], where: str) -> tuple[str, ...]:
    """Codes, code prefixes and names of findings in capitals, from words that may hold several each.

    Raises:
        ValueError: one of them names nothing.
    """
    codes = _codes(word for text in words for word in text.split(","))
    if (unknown := _unknown(codes)) is not None:
        raise ValueError(
            f"{where}: got {unknown!r}; expected a code such as AB101, the beginning of codes such as AB1, or a name "
            "such as OPT_PARAM_MISSING. anybatch explain lists them"
        )
    return codes


def read_policy(folder: Path) -> Policy:
    """Reads ``[tool.anybatch.doctor]`` of the ``pyproject.toml`` in a folder, or in the nearest one above it.

    Raises:
        ValueError: the file is not valid TOML, or a setting is unknown or invalid.
    """
    for above in (folder.resolve(), *folder.resolve().parents):
        path = above / "pyproject.toml"
        if path.is_file():
            try:
                values = tomllib.loads(path.read_text(encoding="utf-8"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path} is no TOML: {error}") from error
            for name in ("tool", "anybatch"):
                values = values.get(name, {})
                _expect(isinstance(values, dict), f"{path}, {name}", values, "a table")
            return replace(_policy_of(values.get("doctor", {}), f"{path}, {_TABLE}"), folder=above)
    return Policy()


def _policy_of(table: Any, where: str) -> Policy:
    _expect(isinstance(table, dict), where, table, "a table")
    for key in table:
        _expect(key in KEYS, where, key, f"one of {', '.join(KEYS)}")
    fail_on = table.get("fail-on")
    _expect(fail_on in (None, "error", "warning"), f"{where} fail-on", fail_on, "'error' or 'warning'")
    per_path = table.get("per-path", {})
    _expect(isinstance(per_path, dict), f"{where} per-path", per_path, "a table of patterns")
    return Policy(
        select=_listed(table.get("select", []), f"{where} select"),
        ignore=_listed(table.get("ignore", []), f"{where} ignore"),
        per_path={pattern: _listed(codes, f"{where} per-path {pattern!r}") for pattern, codes in per_path.items()},
        limits=_limits(table.get("limits", {}), f"{where} limits"),
        fail_on=fail_on,
    )


def _listed(value: Any, where: str) -> tuple[str, ...]:
    is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
    _expect(is_list, where, value, 'a list of codes, such as ["AB1", "AB501"]')
    return checked_codes(value, where)


def _limits(value: Any, where: str) -> dict[str, dict[str, float]]:
    """The thresholds by the name of their rule, for which its code may stand."""
    _expect(isinstance(value, dict), where, value, "a table of findings")
    rules = all_rules()
    by_code = {rule.code: rule for rule in rules.values()}
    found = {}
    for name, limits in value.items():
        rule = rules.get(name.upper()) or by_code.get(name.upper())
        if rule is None:
            raise ValueError(f"{where}: got {name!r}; expected the code or name of a finding")
        _expect(isinstance(limits, dict), f"{where} {name}", limits, "a table of thresholds")
        for limit, number in limits.items():
            known = ", ".join(rule.limits) or "none, it has no threshold"
            _expect(limit in rule.limits, f"{where} {name}", limit, f"one of its thresholds ({known})")
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            _expect(is_number, f"{where} {name}.{limit}", number, "a number")
        found[rule.name] = {limit: float(number) for limit, number in limits.items()}
    return found


def _expect(is_so: bool, where: str, got: Any, expected: str) -> None:
    if not is_so:
        raise ValueError(f"{where}: got {got!r}; expected {expected}")


def read_baseline(path: Path) -> frozenset[Known]:
    """The findings of a baseline.

    Raises:
        ValueError: the file is not a baseline.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["kind"] != BASELINE:
            raise ValueError(f"its kind is {values['kind']!r}")
        return frozenset((one["code"], one["module"], one["text"]) for one in values["findings"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no baseline of anybatch ({error}); name another file, or write it anew with --update-baseline"
        ) from error


def baseline_of(findings: Iterable[Finding], policy: Policy) -> dict[str, Any]:
    """A baseline as plain values for JSON."""
    known = sorted({policy.known_by(one) for one in findings})
    return {
        "version": 1,
        "kind": BASELINE,
        "findings": [{"code": code, "module": module, "text": text} for code, module, text in known],
    }


def _relative(file: str, folder: Path) -> str:
    path = Path(file).absolute()
    return path.relative_to(folder.resolve()).as_posix() if path.is_relative_to(folder.resolve()) else path.as_posix()
