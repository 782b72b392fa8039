"""Writes ``docs/architectures.md`` from the rows that ``architectures.py`` made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
SAMPLES = "anybatch.count_samples"
TITLES = {
    "causal": "Causal language models",
    "causal, router loss": "Causal language models with the loss of their router",
    "masked": "Masked language models",
    "seq2seq": "Sequence to sequence",
    "sequence": "Sequence classification",
    "token": "Token classification",
    "question": "Question answering",
    "pretraining": "Two losses in one head",
    "CTC, sum": "CTC, summed",
    "CTC, mean": "CTC, averaged",
    "audio": "Audio classification",
    "image": "Image classification",
    "segmentation": "Segmentation",
    "contrastive": "Contrastive",
}
TEXTS = {
    "causal": (
        "Most heads shift the labels, so the first label of each text is not counted. Decoders of encoder-decoders, "
        "XLM and XLNet do not: for these, shift the labels when you make the batch."
    ),
    "causal, router loss": (
        "`output_router_logits=True` adds a load-balancing loss, a product of two means over all tokens of the batch. "
        "No count makes it add up over micro-batches. It is exact as [`Coupled`](contrastive.md) if `encode` returns "
        "logits and router logits. An architecture without such a loss stays exact. Experts run one by one here, "
        "because torch's grouped matmul has no float64; `check` also accepts grouped experts."
    ),
    "question": (
        "The answer to one of the questions lies beyond the end of the text, as happens in a truncated text. The "
        "head ignores it, so the loss is not the mean over all samples."
    ),
    "pretraining": (
        "The loss sums a mean over masked tokens and a mean over samples: return them as two losses, each with its "
        "count."
    ),
    "CTC, sum": (
        "A sum over samples: no count makes it a mean. Return `anybatch.Mean(loss, count)` or use the averaged loss."
    ),
    "image": "The refused models have BatchNorm in training mode; [BatchNorm](batchnorm.md) lists the alternatives.",
    "contrastive": "The loss compares every sample with every other: exact as [`Coupled`](contrastive.md).",
}


def page(facts: Mapping[str, str], rows: Sequence[Row]) -> str:
    """The page as Markdown, ending in a newline."""
    done = [row for row in rows if "missing" not in row]
    lines = ["# Which architectures split exactly", "", *_introduction(facts, done), *_summary(done)]
    lines += ["", "## What stands out", "", *_findings(done)]
    for head, title in TITLES.items():
        of_head = sorted(
            (row for row in done if row["head"] == head), key=lambda row: (row["library"], row["architecture"])
        )
        if of_head:
            lines += ["", f"## {title}", ""]
            lines += [TEXTS[head], ""] if head in TEXTS else []
            lines += _table(of_head)
    return "\n".join([*lines, *_missing(rows)]) + "\n"


def _introduction(facts: Mapping[str, str], rows: Sequence[Row]) -> list[str]:
    names = {(row["library"], row["architecture"]) for row in rows}
    by_library = Counter(library for library, _ in names)
    counted = ", ".join(f"{number} of {library}" for library, number in sorted(by_library.items(), reverse=True))
    versions = ", ".join(f"{name} {version}" for name, version in facts.items())
    return [
        f"{len(rows)} heads of {len(names)} architectures ({counted}): tiny models made from",
        "configurations, each with its own loss. Seven samples of different lengths, some labels ignored, run in",
        "micro-batches of three, three and one. The page compares the gradient of `anybatch.backward` with that of the",
        "whole batch, in float64; *exact* is a relative error of at most 1e-10 over all parameters together. Models",
        "are in training mode, without dropout.",
        "",
        f"Made with {versions} by",
        "",
        "```",
        "python benchmarks/architectures.py --json rows.json -o architectures.md",
        "```",
        "",
        "- *exact with*: the right `count=`. *samples* is the default, `anybatch.count_samples`; *labels* is",
        '  `anybatch.count_tokens("labels")`, and so on.',
        "- *by samples*: the error with the default.",
        "- *check*: the result of `anybatch.check` with the default: *exact*, or the code and the place of its reason,",
        "  and the count that it suggests, if any. **wrong** marks a wrong result.",
        "- *num_items_in_batch*: how the head uses the count that the Trainer of Transformers passes to it:",
        "  *used*, *in part* (a term of the loss is not divided), *ignored*, or *not taken*, if the Trainer passes",
        "  none.",
        "- *Trainer*: the gradient's error under the Trainer's own rule, over the same three micro-batches: every head",
        "  with keywords gets the count and nothing is divided; other heads are divided by the number of",
        "  micro-batches. `tests/unit/step/test_architectures_trainer.py` compares the rule with the Trainer itself.",
        "",
    ]


def _summary(rows: Sequence[Row]) -> list[str]:
    lines = ["| head | heads | exact with | with none, or refused | check agrees |", "| --- | --- | --- | --- | --- |"]
    for head, title in TITLES.items():
        of_head = [row for row in rows if row["head"] == head]
        if of_head:
            ways = Counter(_first(row) for row in of_head if row["exact"])
            said = ", ".join(f"{way}: {number}" for way, number in ways.most_common())
            none = sum(not row["exact"] for row in of_head)
            agree = sum(row["agrees"] for row in of_head)
            lines.append(f"| {title} | {len(of_head)} | {said or '-'} | {none or '-'} | {agree} of {len(of_head)} |")
    return lines


def _findings(rows: Sequence[Row]) -> list[str]:
    found = []

    def add(text: str, chosen: Callable[[Row], bool]) -> None:
        names = [f"{row['class']}" for row in rows if chosen(row)]
        if names:
            found.append(f"- {text.format(len(names))} {_some(names)}")

    own = [row for row in rows if row["items"]]
    add(
        f"{{}} of {len(own)} heads of Transformers take keywords and ignore `num_items_in_batch`, and the Trainer "
        "divides by nothing else, so their gradient grows with the number of micro-batches:",
        lambda row: row["items"] == "ignored" and (row["trainer"] or 0) > 1e-6,
    )
    add("{} divide only a part of their loss by it:", lambda row: row["items"] == "in part")
    add(
        "{} use it, but the Trainer also counts the first label of each text, which they do not:",
        lambda row: row["items"] == "used" and (row["trainer"] or 0) > 1e-6,
    )
    add("{} are exact with the default count:", lambda row: SAMPLES in row["exact"])
    add(
        "{} are refused in micro-batches because of BatchNorm in training mode:",
        lambda row: bool(row["refused"]),
    )
    add(
        "For {} a second run of the whole batch gives another gradient, so no comparison is possible:",
        lambda r: not r["repeats"],
    )
    add("`anybatch.check` is wrong about {}:", lambda row: not row["agrees"])
    if all(row["agrees"] for row in rows):
        found.append(f"- `anybatch.check` agrees with the comparison of the gradients for all {len(rows)} heads.")
    return found


def _some(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more kinds." if len(names) > 6 else ".")


def _table(rows: Sequence[Row]) -> list[str]:
    items = any(row["items"] for row in rows)
    head = ["architecture", "class", "exact with", "by samples", "check"]
    head += ["num_items_in_batch", "Trainer"] if items else []
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        name = row["architecture"] if row["library"] == "transformers" else f"{row['library']} {row['architecture']}"
        cells = [name, f"`{row['class']}`", _exact_with(row), _error(row["errors"].get(SAMPLES)), _said(row)]
        if items:
            cells += [row["items"] or "-", _error(row["trainer"])]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _first(row: Row) -> str:
    return _short(row["exact"][0])


def _short(code: str) -> str:
    """A count as the table has it."""
    if code == SAMPLES:
        return "samples"
    inner = code.removeprefix("anybatch.count_tokens(").removesuffix(")").replace('"', "")
    return inner if code.startswith("anybatch.count_tokens(") else f"`{code}`"


def _exact_with(row: Row) -> str:
    if row["exact"]:
        return _first(row)
    return "refused" if row["refused"] else "none"


def _error(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value <= 1e-10 else f"{value:.2g}"


def _said(row: Row) -> str:
    said = row["check"][SAMPLES]
    reasons = []
    for reason in said["reasons"]:
        where = "" if reason["where"] == "loss" else f" in `{reason['where']}`"
        offered = reason["remedy"].removeprefix("count=")
        offered = f" ({_short(offered)})" if reason["code"] == "count" and offered.startswith("anybatch.count") else ""
        reasons.append(f"{reason['code']}{where}{offered}")
    text = "exact" if said["exact"] else ", ".join(reasons)
    notes = [note for note in said["notes"] if note in ("random", "own-precision", "lower-precision")]
    text += f"; note: {', '.join(notes)}" if notes else ""
    return text if row["agrees"] else f"{text} **wrong**"


def _missing(rows: Sequence[Row]) -> list[str]:
    failed = [row for row in rows if "missing" in row]
    if not failed:
        return []
    lines = ["", "## Not in the tables", "", "| architecture | head | reason |", "| --- | --- | --- |"]
    for row in failed:
        reason = row["missing"].replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {row['architecture']} | {row['head']} | {reason} |")
    return lines
