"""Why a loss that no module mixes samples for does not add up: its count, a sum, a term of its own, or a ratio."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.batch.batches import Part, Splittable, sizes_of
from anybatch.batch.counting import count_samples
from anybatch.checking.candidates import Candidate, same_by_sample, ways_to_count
from anybatch.checking.causes import more, reason
from anybatch.checking.comparison import Case
from anybatch.checking.measuring import norm_of
from anybatch.checking.reach import tensors_of
from anybatch.checking.recombination import SOLVED_SLACK, Columns, Pieces
from anybatch.checking.subjects import parts_of_sizes
from anybatch.loss.coupling import Coupled
from anybatch.loss.weights import Count
from anybatch.records.certificates import Reason

_MOST_SAMPLES = 512  # up to which candidates are told apart sample by sample
_MOST_EXTRA_SPLITS = 4


@dataclass
class Finding:
    """Why a loss does not add up, and the count that it needs if that is why.

    Args:
        reason: what to say.
        candidate: the count, or ``None``.
    """

    reason: Reason
    candidate: Candidate | None = None


class Denominators:
    """Looks for what each loss of a subject is the mean over.

    Args:
        case: what is compared.
    """

    def __init__(self, case: Case) -> None:
        self._rig = rig = case.rig
        self._splits = [list(parts) for parts in case.splits]
        self._tolerance = case.tolerance
        self._names = list(case.whole.losses)
        subject = rig.subject
        self._splittable: Splittable = subject.splittable(None)
        self._whole = subject.views(self._splittable.plan(None))[0]
        self._batches = [subject.views(parts) for parts in self._splits]
        self._candidates = ways_to_count(self._whole, subject.broadcast, tensors_of(subject.loss_fn))

    def find(self, name: str) -> Finding:
        """Says why one loss does not add up.

        Args:
            name: of the loss.
        """
        pieces = self._pieces(name)
        where = "loss" if len(self._names) == 1 else f"loss {name!r}"
        if pieces.whole.counts:
            return Finding(self._reason_of_mean(pieces, where))
        if fitting := self._fitting(pieces, name):
            return Finding(self._averaged_over(fitting, where, name), fitting[0])
        if pieces.fits([[1.0] * len(split.values) for split in pieces.splits]):
            return Finding(reason("sum", where, {"samples": self._splittable.rows}))
        if (shared := pieces.shared_term()) is not None:
            return Finding(_holds_shared_term(where, *shared))
        weights = pieces.solved_weights()
        if weights is not None and not self._were_tried(weights):
            shown = ", ".join(f"{weight:.4g}" for weight in weights[0])
            evidence = {"weights": weights, "tried": len(self._candidates)}
            return Finding(reason("unknown count", where, evidence, shown=shown))
        return Finding(self._several_means(pieces, where) or self._does_not_add_up(pieces, where))

    def overlooked(self) -> list[Part] | None:
        """A split that tells the count of the subject from another one, where the splits so far happen not to.

        Returns:
            Two parts, or ``None`` if there is no such count.
        """
        given = self._rig.subject.count
        rows = self._splittable.rows
        if not callable(given) or rows > _MOST_SAMPLES:
            return None
        own = Candidate("", "", given)
        shares = self._shares(own)
        samples = self._rig.subject.views(parts_of_sizes(sizes_of(rows, 1)))
        for candidate in self._candidates:
            others = self._shares(candidate)
            if shares is None or others is None:
                continue
            pairs = zip((s for split in shares for s in split), (s for split in others for s in split), strict=True)
            if all(abs(a - b) < 1e-9 for a, b in pairs) and (cut := same_by_sample(own, candidate, samples)):
                return parts_of_sizes([cut, rows - cut])
        return None

    def _shares(self, candidate: Candidate) -> list[list[float]] | None:
        """The share of each part of each split in the count of the whole, ``None`` if the parts do not add up to it."""
        total = self._number(candidate)
        counts = [
            [candidate.number(batch, len(part.samples)) for part, batch in zip(parts, batches, strict=True)]
            for parts, batches in zip(self._splits, self._batches, strict=True)
        ]
        if not total > 0 or not all(abs(sum(split) - total) <= 1e-6 * total for split in counts):
            return None
        return [[count / sum(split) for count in split] for split in counts]

    def _number(self, candidate: Candidate) -> float:
        return candidate.number(self._whole, self._splittable.rows)

    def _pieces(self, name: str) -> Pieces:
        whole = self._measured(self._splittable.plan(None), name)
        return Pieces(whole, [self._measured(parts, name) for parts in self._splits], self._tolerance)

    def _measured(self, parts: Sequence[Part], name: str) -> Columns:
        only = name if len(self._names) > 1 else ""
        batches = zip(parts, self._rig.parts_of(parts), strict=True)
        outcomes = [self._rig.part(batch, part.samples, only) for part, batch in batches]
        self._owners = outcomes[0].owners()
        return Columns.of(outcomes, name)

    def _fitting(self, pieces: Pieces, name: str) -> list[Candidate]:
        """The candidates by which the parts make up the whole; further splits tell those apart that differ."""
        fitting = self._of_shares(pieces, self._candidates)
        rows = self._splittable.rows
        if len(fitting) < 2 or rows > _MOST_SAMPLES:
            return fitting
        samples = self._rig.subject.views(parts_of_sizes(sizes_of(rows, 1)))
        for _ in range(_MOST_EXTRA_SPLITS):
            cut = next((k for other in fitting[1:] if (k := same_by_sample(fitting[0], other, samples))), 0)
            if not cut:
                break
            self._splits.append(parts_of_sizes([cut, rows - cut]))
            self._batches.append(self._rig.subject.views(self._splits[-1]))
            pieces.splits.append(self._measured(self._splits[-1], name))
            fitting = self._of_shares(pieces, fitting)
        return fitting

    def _of_shares(self, pieces: Pieces, among: Sequence[Candidate]) -> list[Candidate]:
        shares = [(candidate, self._shares(candidate)) for candidate in among]
        return [candidate for candidate, split in shares if split is not None and pieces.fits(split)]

    def _averaged_over(self, fitting: Sequence[Candidate], where: str, name: str) -> Reason:
        chosen, *others = fitting
        number = self._number(chosen)
        samples = self._splittable.rows
        given, given_text = self._given(name)
        evidence = {
            "items": number,
            "samples": samples,
            "counted": given,
            "also_fits": [other.code for other in others][:5],
        }
        also = ""
        if others:
            also = (
                f" On this batch {len(others)} other way{'s' if len(others) > 1 else ''} to count give the same, such "
                f"as {others[0].code}; take the one that the loss divides by."
            )
        said = {"what": chosen.items, "given": given_text, "also": also, "line": self.line({name: chosen})}
        return reason("count", where, evidence, **said)

    def _given(self, name: str) -> tuple[float | None, str]:
        """What the count of the subject gives for the whole batch, and how to say it."""
        count = self._rig.subject.count
        if isinstance(count, Mapping):
            count = count.get(name, count_samples)
        if count is count_samples or not callable(count):
            return self._splittable.rows, f"{self._splittable.rows} samples"
        number = self._number(Candidate("", "", count))
        return number, f"the {number:g} that count= gives"

    def line(self, found: Mapping[str, Candidate]) -> str:
        """The count= that losses need, as it is written in code.

        Args:
            found: by the name of the loss.
        """
        if len(self._names) == 1:
            return f"count={found[self._names[0]].code}"
        given = self._rig.subject.count
        others = "anybatch.count_samples" if given is count_samples else "..."
        entries = [f"{name!r}: {found[name].code if name in found else others}" for name in self._names]
        return f"count={{{', '.join(entries)}}}"

    def _were_tried(self, weights: Sequence[Sequence[float]]) -> bool:
        """Whether solved weights are those of a count that did not fit: then something small beside it does not."""
        given = self._rig.subject.count
        own = [Candidate("", "", given)] if callable(given) else []
        for candidate in [*own, *self._candidates]:
            shares = self._shares(candidate)
            if shares is None:
                continue
            pairs = zip((w for split in weights for w in split), (s for split in shares for s in split), strict=True)
            if all(abs(weight - share) <= 10 * SOLVED_SLACK * self._tolerance for weight, share in pairs):
                return True
        return False

    def _reason_of_mean(self, pieces: Pieces, where: str) -> Reason:
        total = pieces.whole.counts[0]
        sums = [sum(split.counts) for split in pieces.splits]
        wrong = next((value for value in sums if abs(value - total) > 1e-6 * max(abs(value), abs(total))), None)
        if wrong is not None:
            return reason("count of a Mean", where, {"items": total, "items_of_parts": sums}, wrong=wrong)
        if (shared := pieces.shared_term()) is not None:
            return _holds_shared_term(where, *shared)
        return self._does_not_add_up(pieces, where)

    def _several_means(self, pieces: Pieces, where: str) -> Reason | None:
        """Whether modules that one loss alone reaches get the gradients of means over different items."""
        if isinstance(self._rig.subject.loss_fn, Coupled):
            return None
        owners: dict[str, list[int]] = {}
        for position, parameter in enumerate(self._rig.names):
            owners.setdefault(parameter.rpartition(".")[0] or parameter, []).append(position)
        found: dict[str, tuple[str, str, str]] = {}
        for owner, own in owners.items():
            one = pieces.narrowed(torch.isin(self._owners, torch.tensor(own)))
            if not norm_of(one.whole.gradients):
                continue
            if fitting := self._of_shares(one, self._candidates):
                number = f"{self._number(fitting[0]):g} {fitting[0].items}"
                found.setdefault(fitting[0].code, (owner, number, fitting[0].code))
            elif one.is_mean_of_reached():
                found[f"in {owner}"] = owner, "items that only the forward knows", ""
        return _several(where, list(found.values())) if len(found) > 1 else None

    def _does_not_add_up(self, pieces: Pieces, where: str) -> Reason:
        residuals = []
        for number, (parts, split) in enumerate(zip(self._splits, pieces.splits, strict=True)):
            weights = [1.0 if split.counts else len(part.samples) / self._splittable.rows for part in parts]
            residuals.append(pieces.residual(number, weights))
        if isinstance(self._rig.subject.loss_fn, Coupled):
            return reason("encode", "encode", {"residuals": residuals})
        return reason("not additive", where, {"residuals": residuals})

    def count_with(self, found: Mapping[str, Candidate]) -> Count:
        """The count of the subject with those that were found in the places of those that were wrong.

        Args:
            found: by the name of the loss.
        """
        if len(self._names) == 1:
            return next(iter(found.values())).function
        given = self._rig.subject.count
        functions: dict[str, Any] = {}
        for name in self._names:
            own = given.get(name, count_samples) if isinstance(given, Mapping) else given
            functions[name] = found[name].function if name in found else own if callable(own) else count_samples
        return functions


def _holds_shared_term(where: str, value: float, norm: float) -> Reason:
    return reason("shared term", where, {"value": value, "gradient_norm": norm})


def _several(where: str, found: Sequence[tuple[str, str, str]]) -> Reason:
    """A sum of means with different denominators, told apart by the modules that only one of them reaches."""
    shown = "; ".join(f"in `{module}` the gradient is that of a mean over {items}" for module, items, _ in found)
    evidence = {"modules": [module for module, _, _ in found], "items": [items for _, items, _ in found]}
    losses = {f"loss_{number}": code for number, (_, _, code) in enumerate(found, 1)}
    means = ", ".join(f'"{name}": anybatch.Mean(items_{n}.sum(), len(items_{n}))' for n, name in enumerate(losses, 1))
    remedies = [f'return {{{means}}}  # the items of each and their number, with count="forward"']
    if all(losses.values()):
        each = ", ".join(f'"{name}": {name}' for name in losses)
        counts = ", ".join(f'"{name}": {code}' for name, code in losses.items())
        remedies.insert(0, f"return {{{each}}}  # with count={{{counts}}}")
    return more(reason("several means", where, evidence, shown=shown), before=remedies)
