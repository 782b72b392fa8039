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
        "XLM and XLNet do not: their labels have to be shifted by whoever makes the batch."
    ),
    "causal, router loss": (
        "`output_router_logits=True` adds a load-balancing loss, a product of two means over all tokens of the batch. "
        "No count makes it add up over micro-batches. It is exact as [`Coupled`](contrastive.md), where `encode` gives "
        "logits and router logits. An architecture that has no such loss stays exact. Experts run one by one here, "
        "because torch's grouped product has no float64; `check` takes the grouped ones too."
    ),
    "question": (
        "The answer to one of the questions lies beyond the end of the text, as it does when a long text was cut. The "
        "head leaves it out, so the loss is not the mean over all samples."
    ),
    "pretraining": (
        "The mean over masked tokens and the mean over samples in one sum: return them as two losses, each with its "
        "count."
    ),
    "CTC, sum": (
        "A sum over samples: no count makes it a mean. Return `anybatch.Mean(loss, count)` or take the averaged one."
    ),
    "image": "What is refused has BatchNorm in training mode; [BatchNorm](batchnorm.md) has the ways to go on.",
    "contrastive": "Every sample is compared with every other: exact as [`Coupled`](contrastive.md).",
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
        f"{len(rows)} heads of {len(names)} architectures ({counted}), tiny, made from configurations, each",
        "with its own loss. Seven samples of different lengths, with labels that are ignored, go in micro-batches of",
        "three, three and one. The gradient of `anybatch.backward` is compared with that of the whole batch, in",
        "float64; *exact* is a relative error of at most 1e-10 over all parameters together. Models are in training",
        "mode, without dropout.",
        "",
        f"Made with {versions} by",
        "",
        "```",
        "python benchmarks/architectures.py --json rows.json -o architectures.md",
        "```",
        "",
        "- *exact with*: what `count=` has to be. *samples* is the default, `anybatch.count_samples`; *labels* is",
        '  `anybatch.count_tokens("labels")`, and so on.',
        "- *by samples*: the error with the default.",
        "- *check*: what `anybatch.check` says of the default: *exact*, or the code and the place of its reason, and",
        "  the count that it offers if it does. It is wrong where **wrong** stands.",
        "- *num_items_in_batch*: what the head makes of the count that the Trainer of Transformers gives to it:",
        "  *used*, *in part* (a term of the loss is not divided), *ignored*, or *not taken*, where the Trainer gives",
        "  none.",
        "- *Trainer*: the error of the gradient by the Trainer's own rule, over the same three micro-batches: its",
        "  count is given to every head with keywords and nothing is divided; other heads are divided by the number of",
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
        "{} use it, and the Trainer counts the first label of each text for them, which they do not:",
        lambda row: row["items"] == "used" and (row["trainer"] or 0) > 1e-6,
    )
    add("{} are exact by samples alone:", lambda row: SAMPLES in row["exact"])
    add(
        "{} are refused in micro-batches, because they have BatchNorm in training mode:",
        lambda row: bool(row["refused"]),
    )
    add(
        "Of {} a second run of the whole batch gives another gradient, so nothing can be compared:",
        lambda r: not r["repeats"],
    )
    add("`anybatch.check` is wrong about {}:", lambda row: not row["agrees"])
    if all(row["agrees"] for row in rows):
        found.append(f"- `anybatch.check` says of all {len(rows)} heads what the comparison of the gradients says.")
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
