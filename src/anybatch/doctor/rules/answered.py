"""What rules say where a question to a copy was answered: ``answers.toml`` has the texts, and which answer is meant."""

import string
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from anybatch.doctor.rules.registry import NOWHERE, Found, rule
from anybatch.doctor.views.courses import adversarial, updates
from anybatch.doctor.views.naming import (
    Names,
    counted,
    first_call,
    listed,
    module_code,
    near,
    optimizer_variable,
    root_variable,
)
from anybatch.doctor.views.outcomes import ENOUGH_STEPS, learned_well, outcome
from anybatch.records.events import Forward, Stepped
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.runs import Run
from anybatch.records.samples import Scored

_TABLES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("answers.toml").read_text(encoding="utf-8"))

_OWN = frozenset({"name", "severity", "explains", "slows", "to", "answer", "answers", "seen", "when", "once", "since",
                  "where", "module", "late", "text", "fix", "cause"})  # fmt: skip
"""The entries of a table that are no templates of its own."""

_WHEN: dict[str, Callable[[Run, Probed], bool]] = {
    "not learning": lambda run, probed: outcome(run).word != "learning",
    "nothing learned": lambda run, probed: outcome(run).word == "not learning",
    "one optimizer": lambda run, probed: len({one.optimizer for one in run.of(Stepped)}) == 1,
    "not well": lambda run, probed: not learned_well(run),
    # another loss outweighs it, as in a poly loss
    "not outweighed": lambda run, probed: not (probed.evidence.get("beside") and outcome(run).word == "learning"),
    "alone": lambda run, probed: not adversarial(run),
    "nothing drawn": lambda run, probed: not any(run.of(Scored)),  # what was drawn may be bad
    "of many steps": lambda run, probed: len(updates(run)) >= ENOUGH_STEPS,
    "of one row": lambda run, probed: "one row" in probed.detail,
    "of a table": lambda run, probed: "table" in probed.detail,
    "all taken": lambda run, probed: float(probed.evidence["share"]) >= 0.9999,
    "of several values": lambda run, probed: probed.evidence["value"] is None,
}


def _loss_call(run: Run, probed: Probed, function: str = "") -> LossCall | Probed:
    """The first call of a loss function after the model that was asked, and the answer where there is none."""
    calls = (one for one in run.of(LossCall) if one.root == probed.root and function in ("", one.function))
    return next(calls, probed)


_SINCE: dict[str, Callable[[Run, Probed], LossCall | Probed | int]] = {
    "the start": lambda run, probed: 0,
    "the answer itself": lambda run, probed: probed.at,
    "a loss": _loss_call,
    "a loss where no line is known": lambda run, probed: probed if probed.file else _loss_call(run, probed),
    "a loss of its function": lambda run, probed: _loss_call(run, probed, str(probed.evidence["function"])),
}


_WHERE: dict[str, Callable[[Run, Probed], Forward | tuple[str, int] | None]] = {
    "the first call": lambda run, probed: first_call(run, probed.root),
    "the copy": lambda run, probed: next(  # the first call of a net that never has a gradient
        (one for one in run.of(Forward) if (one.root, one.module) == (probed.root, probed.module)), NOWHERE
    ),
}


def _of_copy(run: Run, probed: Probed) -> dict[str, Any]:
    """What the user's code calls a copy and the net that it was a copy of, and how much it takes of that one."""
    online, share = probed.evidence["online"], float(probed.evidence.get("share", 0))
    every = [module_code(run, one.root, one.module) for one in run.answers(probed.probe)]
    copied = module_code(run, probed.root, probed.module)
    followed = module_code(run, int(online), str(probed.evidence.get("online_module", "")))
    return {
        "copied": f"copy_of_{copied}" if copied == followed else copied, "online": followed,
        "copies": Names(every), "run": run.steps,
        "kept": max(1 - share, 0), "decay": max(round(share, 3), 0.9),
    }  # fmt: skip


class _Templates(string.Formatter):
    """Fills templates, as the first lines of ``answers.toml`` say."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        how, _, other = format_spec.partition(" or ")
        if isinstance(value, list):
            return how.join(map(str, value)) if how else listed(map(str, value))
        if isinstance(value, int) and how.isalpha() and len(how) > 1:
            return counted(value, how)
        return other if other and (value is None or value == "") else format(value, how)


def say(run: Run, code: str) -> Iterator[Found]:
    """What the table of a rule says of the answers of a run."""
    table = _TABLES[code]
    rows = [table | row for row in table.get("answers", [{}])]
    for (to, answer), group in groupby(rows, lambda row: (row["to"], row.get("answer", "yes"))):
        same = list(group)
        for probed in run.answers(to, answer)[: 1 if same[0].get("once") else None]:
            row = next((one for one in same if _fits(run, probed, one)), None)
            if row is not None:
                yield _found(run, probed, row)


def _fits(run: Run, probed: Probed, row: dict[str, Any]) -> bool:
    seen = row.get("seen", {}).items()
    same = all(probed.evidence.get(name) in (value if isinstance(value, list) else [value]) for name, value in seen)
    return same and all(_WHEN[one](run, probed) for one in row.get("when", ()))


def _found(run: Run, probed: Probed, row: dict[str, Any]) -> Found:
    since = _SINCE[row["since"]](run, probed) if "since" in row else probed
    values: dict[str, Any] = {"near": near(probed), "model": root_variable(run, probed.root), "detail": probed.detail}
    values |= {"because": f": {probed.detail}" if probed.detail else "", "loss": getattr(since, "function", "the loss")}
    values |= probed.evidence
    values |= _of_copy(run, probed) if "online" in values else {}
    optimizers = {one: values[one] for one in ("optimizer", "critic") if one in values}
    values |= {name: optimizer_variable(run, int(number)) for name, number in optimizers.items()}
    fill = _Templates().vformat
    values |= {name: fill(row[name], (), values) for name in row.keys() - _OWN}
    text, fix, cause = (fill(row[name], (), values) for name in ("text", "fix", "cause"))
    return Found(
        text=text,
        fix=fix,
        cause=cause,
        since=since,
        step=probed if row.get("late") else None,
        where=(_WHERE[row["where"]](run, probed) if "where" in row else None)
        or (probed if isinstance(since, int) else since),
        module=fill(row["module"], (), values) if "module" in row else None,
        optimizer=int(optimizers.get("optimizer", -1)),
        evidence=probed.evidence,
        severity=row.get("severity", ""),
    )


for _code, _table in _TABLES.items():
    if "name" in _table:
        rule(
            _code, _table["name"], _table["severity"], explains=tuple(_table.get("explains", ())), needs=(Probed,),
            slows=_table.get("slows", False),
        )(partial(say, code=_code))  # fmt: skip
