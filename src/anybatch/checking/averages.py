"""Why a loss that no module mixes samples for does not add up: its count, a sum, a term of its own, or a ratio."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from anybatch.batch.batches import Part, Splittable, sizes_of
from anybatch.batch.counting import count_samples
from anybatch.checking.candidates import Candidate, apart, ways_to_count
from anybatch.checking.causes import more, reason
from anybatch.checking.cuts import parts_of_sizes
from anybatch.checking.elsewhere import with_labels_moved
from anybatch.checking.gradients import Kept, Outcome, length_of, norm_of
from anybatch.checking.reach import tensors_of
from anybatch.checking.rig import Case
from anybatch.loss.coupling import Coupled
from anybatch.loss.weights import Count
from anybatch.records.certificates import Reason
from anybatch.update.passes import Task
from anybatch.update.transaction import Failure

_SOLVED_SLACK = 1e3  # times the tolerance: how much solved weights may leave, which are no better than least squares
_MOST_SAMPLES = 512  # up to which candidates are told apart sample by sample
_MOST_EXTRA_SPLITS = 4
_TAKE = "take the one that the loss divides by"
_NOTHING = 1e-9  # a weight below which a part that has a gradient was left out


class Columns(NamedTuple):
    """One loss of some parts of a batch, a column each, all in float64."""

    values: torch.Tensor  # of the loss, or of the total of a ``Mean``
    gradients: torch.Tensor  # what is kept of them, of shape ``[entries, parts]``
    counts: list[float]  # what ``Mean`` s are over; empty for a plain loss

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], name: str, nothing: Kept) -> "Columns":
        """The columns of runs in which one loss was the only one that counted.

        Args:
            nothing: what is kept of gradients that are zero.
        """
        counts = [outcome.counts[name] for outcome in outcomes if name in outcome.counts]
        pairs = [(outcome.losses.get(name, 0.0), outcome.counts.get(name, 1.0)) for outcome in outcomes]
        values, factors = torch.tensor(pairs, dtype=torch.float64, device="cpu").T
        each = [[one.gradients.get(key, zeros) for key, zeros in nothing.items()] for one in outcomes]
        kept = [torch.cat([values[:0], *(one.to("cpu", torch.float64) for one in own)]) for own in each]
        return cls(values * factors, torch.stack(kept, 1) * factors, counts)

    def chosen(self, which: torch.Tensor) -> "Columns":
        """Some of the columns."""
        return Columns(self.values[which], self.gradients[:, which], self.counts)

    @property
    def is_finite(self) -> bool:
        """Whether values and gradients are."""
        return bool(self.values.isfinite().all() and self.gradients.isfinite().all())

    @property
    def norms(self) -> torch.Tensor:
        """The norm of each gradient."""
        return torch.tensor([norm_of(column) for column in self.gradients.T], dtype=torch.float64, device="cpu")


class Pieces(NamedTuple):
    """One loss of the whole batch in one column, and of every part of every split in one a part."""

    whole: Columns  # one column
    splits: list[Columns]  # for each split one a part
    tolerance: float  # up to which relative error sums are the same

    def narrowed(self, entries: torch.Tensor) -> "Pieces":
        """The same of some entries of the gradient only, without the value of the loss."""
        whole, *splits = (
            Columns(torch.zeros_like(one.values), one.gradients[entries], one.counts)
            for one in (self.whole, *self.splits)
        )
        return Pieces(whole, splits, self.tolerance)

    def residual(self, split: int, weights: Sequence[float]) -> float:
        """How far the weighted sum of a split's parts is from the whole, relative to what is summed."""
        factors = torch.tensor(weights, dtype=torch.float64, device="cpu")
        used, factors = self.splits[split].chosen(factors != 0), factors[factors != 0]
        if not used.is_finite:
            return float("inf")
        gradient, value = self.whole.gradients[:, 0], self.whole.values[0]
        differences = norm_of(used.gradients @ factors - gradient), abs(float(used.values @ factors - value))
        sums = float(factors.abs() @ used.norms), float(factors.abs() @ used.values.abs())
        scales = norm_of(gradient) + sums[0], abs(float(value)) + sums[1]
        return max(one / scale if scale else 0.0 for one, scale in zip(differences, scales, strict=True))

    def fits(self, weights: Sequence[Sequence[float]], slack: float = 1.0) -> bool:
        """Whether the weights, for each split one a part, give the whole, within some times the tolerance."""
        return all(self.residual(i, weights[i]) <= slack * self.tolerance for i in range(len(self.splits)))

    def shared_term(self) -> tuple[float, float] | None:
        """Finds a term of a sum that does not depend on the samples: N parts hold it N times, the whole once.

        Returns:
            Its value and the norm of its gradient, or ``None`` if the splits do not agree about one.
        """
        sizes = [len(split.values) for split in self.splits]
        if len(set(sizes)) < 2 or not all(split.is_finite for split in self.splits):
            return None
        whole, value = self.whole.gradients[:, 0], float(self.whole.values[0])
        scale = self.tolerance * (norm_of(whole) + sum(float(split.norms.sum()) for split in self.splits))
        value_scale = self.tolerance * (abs(value) + sum(float(split.values.abs().sum()) for split in self.splits))
        values = [(float(split.values.sum()) - value) / (n - 1) for n, split in zip(sizes, self.splits, strict=True)]
        terms = [(split.gradients.sum(1) - whole) / (n - 1) for n, split in zip(sizes, self.splits, strict=True)]
        agree = all(norm_of(term - terms[0]) <= scale for term in terms)
        if not agree or any(abs(one - values[0]) > value_scale for one in values):
            return None
        norm = norm_of(terms[0])
        return (values[0], norm) if norm > 10 * scale or abs(values[0]) > 10 * value_scale else None

    def constant(self) -> float | None:
        """The value of the loss if it is the same for all samples and for any part of them, and not zero."""
        values = torch.cat([self.whole.values, *(split.values for split in self.splits)])
        same = bool(((values - values[0]).abs() <= self.tolerance * abs(values[0])).all())
        return float(values[0]) if same and values[0] else None

    def solved_weights(self, *, of_mean: bool = True) -> list[list[float]] | None:
        """Solves for the weights by which the parts make up the whole, if the parts have enough to tell.

        Returns:
            For each split its weights, which are positive; ``None`` if there are none, or too many.
        """
        solved = []
        for index, split in enumerate(self.splits):
            entries, parts = split.gradients.shape
            scale = norm_of(split.gradients) if split.is_finite and entries > parts else 0.0
            if not scale or int(torch.linalg.matrix_rank(split.gradients / scale, rtol=1e-8)) < parts:
                return None
            solution = torch.linalg.lstsq(split.gradients / scale, self.whole.gradients / scale).solution[:, 0]
            weights: list[float] = solution.tolist()
            if min(weights) < _NOTHING or (
                of_mean and abs(sum(weights) - 1) > 1e-6
            ):  # none counts nothing and has a gradient
                return None
            if self.residual(index, weights) > _SOLVED_SLACK * self.tolerance:
                return None
            solved.append(weights)
        return solved

    def is_mean_of_reached(self, *, of_mean: bool = True) -> bool:
        """Whether such weights give the whole where parts without gradient have none."""
        if not all(split.gradients.any() for split in self.splits):
            return False
        found = self._replace(splits=[split.chosen(split.norms > 0) for split in self.splits])
        weights = found.solved_weights(of_mean=of_mean)
        return weights is not None and found.fits(weights, slack=10)


class Averages:
    """Looks for what each loss of a task is the mean over."""

    def __init__(self, case: Case) -> None:
        self._rig = case.rig
        self._splits, self._tolerance = [list(parts) for parts in case.splits], case.tolerance
        self._names = list(case.whole.losses)
        self._splittable = splittable = case.rig.splittable
        self._given = case.rig.task.count
        self._elsewhere = set[str]()  # the ways to count that fit other labels as well
        sizes = {id(one): length_of(one.numel() * (2 if one.is_complex() else 1)) for one in case.rig.parameters}
        self._nothing = {key: torch.zeros(size, dtype=torch.float64, device="cpu") for key, size in sizes.items()}
        self._whole = next(splittable.materialise(splittable.plan(None)))
        self._batches = [list(splittable.materialise(parts)) for parts in self._splits]
        self._candidates = ways_to_count(self._whole, splittable.broadcast, tensors_of(case.rig.task.loss_fn))

    def find(self, name: str) -> tuple[Reason, Candidate | None]:
        """Says why one loss does not add up, with the count that it needs if that is why."""
        whole = self._measured(self._splittable.plan(None), name)
        pieces = Pieces(whole, [self._measured(parts, name) for parts in self._splits], self._tolerance)
        where = "loss" if len(self._names) == 1 else f"loss {name!r}"
        if pieces.whole.counts:
            return self._reason_of_mean(pieces, where), None
        if fitting := self._fitting(pieces, name):
            if callable(own := self._count_of(name)) and self._of_shares(pieces, [Candidate("", "", own)]):
                return reason("left over", where), None  # each part is run without what others leave
            return self._averaged_over(fitting, where, name), fitting[0]
        if pieces.fits([[1.0] * len(split.values) for split in pieces.splits]):
            return reason("sum", where, {"samples": self._splittable.rows}), None
        if (shared := pieces.shared_term()) is not None:
            return _holds_shared_term(where, *shared), None
        if (value := pieces.constant()) is not None:
            return reason("divided by itself", where, {"value": value}), None
        weights = pieces.solved_weights()
        if weights is not None and not self._were_tried(weights):
            shown = ", ".join(f"{weight:.4g}" for weight in weights[0])
            evidence = {"weights": weights, "tried": len(self._candidates)}
            return reason("unknown count", where, evidence, shown=shown), None
        return self._several_means(pieces, where, name) or self._does_not_add_up(pieces, where), None

    def overlooked(self) -> list[Part] | None:
        """A split that tells the count of the task from another one, where the splits so far happen not to."""
        rows = self._splittable.rows
        if not callable(self._given) or rows > _MOST_SAMPLES:
            return None
        own = Candidate("", "", self._given)
        shares = self._shares(own)
        for candidate in self._candidates if shares is not None else ():
            others = self._shares(candidate)
            is_alike = shares is not None and others is not None and _are_alike(shares, others, 1e-9)
            if is_alike and (cut := apart(own, candidate, self._samples())):
                return parts_of_sizes([cut, rows - cut])
        return None

    def _samples(self) -> list[Any]:
        return list(self._splittable.materialise(parts_of_sizes(sizes_of(self._splittable.rows, 1))))

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

    def _measured(self, parts: Sequence[Part], name: str) -> Columns:
        return Columns.of(list(self._rig.parts(parts, name if len(self._names) > 1 else "")), name, self._nothing)

    def _fitting(self, pieces: Pieces, name: str, entries: torch.Tensor | None = None) -> list[Candidate]:
        """The candidates by which the parts make up the whole; further splits tell those apart that differ.

        Args:
            entries: those of the gradient that count, without the value of the loss; ``None`` for all.
        """

        def those(among: Sequence[Candidate]) -> list[Candidate]:
            return self._of_shares(pieces if entries is None else pieces.narrowed(entries), among)

        fitting = those(self._candidates)
        rows = self._splittable.rows
        if len(fitting) < 2 or rows > _MOST_SAMPLES:
            return fitting
        samples = self._samples()
        for _ in range(_MOST_EXTRA_SPLITS):
            cut = next((k for other in fitting[1:] if (k := apart(fitting[0], other, samples))), 0)
            if not cut:
                break
            self._splits.append(parts_of_sizes([cut, rows - cut]))
            self._batches.append(list(self._splittable.materialise(self._splits[-1])))
            pieces.splits.append(self._measured(self._splits[-1], name))
            fitting = those(fitting)
        return fitting if entries is not None or len(fitting) < 2 else self._with_likeliest_first(fitting, name)

    def _with_likeliest_first(self, fitting: Sequence[Candidate], name: str) -> list[Candidate]:
        """First those that fit where the labels change places, too: a prompt that is masked hides which labels count.

        They are labels still, so that a loss takes them; where one does not, the order stays.
        """
        splittable = self._splittable
        if splittable.collate is not None:
            return [*fitting]
        moved = with_labels_moved(self._whole, splittable.broadcast)
        other, found = Splittable([moved], broadcast=splittable.broadcast), list[Candidate]()
        try:
            whole = self._rig.run(splittable=other).losses[name]
            for one in fitting:
                count = self.count_with({name: one})
                value = self._rig.run(self._splits[0], splittable=other, count=count).losses[name]
                if abs(value - whole) <= self._tolerance * abs(whole):
                    found.append(one)
        except Exception as error:  # noqa: BLE001 - the program may take no such labels
            Failure(error).release()
            return [*fitting]
        self._elsewhere.update(one.code for one in found)
        return [*found, *(one for one in fitting if one not in found)]

    def _of_shares(self, pieces: Pieces, among: Sequence[Candidate]) -> list[Candidate]:
        shares = [(candidate, self._shares(candidate)) for candidate in among]
        return [candidate for candidate, split in shares if split is not None and pieces.fits(split)]

    def _averaged_over(self, fitting: Sequence[Candidate], where: str, name: str) -> Reason:
        chosen, *others = fitting
        count, items = self._count_of(name), self._number(chosen)
        given, shown = float(self._splittable.rows), f"{self._splittable.rows} samples"
        if count is not count_samples and callable(count):
            given = self._number(Candidate("", "", count))
            shown = f"the {given:g} that count= gives"
        if f"{given:g}" == f"{items:g}":
            shown = f"{'samples' if count is count_samples else 'what count= gives'}: as many in all, not in each part"
        evidence = {
            "items": items,
            "samples": self._splittable.rows,
            "counted": given,
            "also_fits": [other.code for other in others][:5],
        }
        also = ""
        if others:
            ways = "1 other way to count gives" if len(others) == 1 else f"{len(others)} other ways to count give"
            is_alone = chosen.code in self._elsewhere and self._elsewhere.isdisjoint(one.code for one in others)
            which = "with the labels in other places only the one below fits" if is_alone else _TAKE
            also = f" On this batch {ways} the same, such as {others[0].code}; {which}."
        line = self.line({name: chosen})
        return reason("count", where, evidence, what=chosen.items, given=shown, also=also, line=line)

    def _count_of(self, name: str) -> Any:
        return self._given.get(name, count_samples) if isinstance(self._given, Mapping) else self._given

    def line(self, found: Mapping[str, Candidate], unknown: Collection[str] = ()) -> str:
        """The count= that losses need, by their names, as it is written in code.

        Args:
            unknown: those that the given count does not suit, either, and no other one.
        """
        if len(self._names) == 1:
            return f"count={found[self._names[0]].code}"
        others = "anybatch.count_samples" if self._given is count_samples else "..."
        codes = {name: "..." if name in unknown else others for name in self._names}
        codes |= {name: one.code for name, one in found.items()}
        left = "  # ...: what these are divided by, which is not known" if unknown else ""
        return f"count={{{', '.join(f'{name!r}: {code}' for name, code in codes.items())}}}{left}"

    def _were_tried(self, weights: Sequence[Sequence[float]]) -> bool:
        """Whether solved weights are those of a count that did not fit: then something small beside it does not."""
        own = [Candidate("", "", self._given)] if callable(self._given) else []
        shares = [self._shares(candidate) for candidate in [*own, *self._candidates]]
        return any(one is not None and _are_alike(weights, one, 10 * _SOLVED_SLACK * self._tolerance) for one in shares)

    def _reason_of_mean(self, pieces: Pieces, where: str) -> Reason:
        total = pieces.whole.counts[0]
        sums = [sum(split.counts) for split in pieces.splits]
        wrong = next((value for value in sums if abs(value - total) > 1e-6 * max(abs(value), abs(total))), None)
        if wrong is not None:
            return reason("count of a Mean", where, {"items": total, "items_of_parts": sums}, wrong=wrong)
        if (shared := pieces.shared_term()) is not None:
            return _holds_shared_term(where, *shared)
        return self._does_not_add_up(pieces, where)

    def _several_means(self, pieces: Pieces, where: str, name: str) -> Reason | None:
        """Whether modules that one loss alone reaches get the gradients of means over different items."""
        if isinstance(self._rig.task.loss_fn, Coupled):
            return None
        lengths = torch.tensor([*map(len, self._nothing.values())], dtype=torch.int64, device="cpu")
        places = torch.arange(len(lengths), device="cpu").repeat_interleave(lengths)  # of the parameters, of each entry
        if pieces.narrowed(torch.ones_like(places, dtype=torch.bool)).is_mean_of_reached(of_mean=False):
            return reason("function of a mean", where)  # one mean, by whose weights the value does not add up
        owners: dict[str, list[int]] = {}
        for position, parameter in enumerate(self._rig.names):
            owners.setdefault(parameter.rpartition(".")[0] or parameter, []).append(position)
        found: dict[str, tuple[str, str, str]] = {}
        for owner, own in owners.items():
            one = pieces.narrowed(entries := torch.isin(places, torch.tensor(own, device="cpu")))
            if not norm_of(one.whole.gradients):
                continue
            if fitting := self._fitting(pieces, name, entries):
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
        if isinstance(self._rig.task.loss_fn, Coupled):
            return reason("encode", "encode", {"residuals": residuals})
        return does_not_add_up(self._rig.task, self._names, where, residuals=residuals)

    def count_with(self, found: Mapping[str, Candidate]) -> Count:
        """The count of the task with those that were found, by the name of the loss, for those that were wrong."""
        if len(self._names) == 1:
            return next(iter(found.values())).function
        functions: dict[str, Any] = {}
        for name in self._names:
            own = self._count_of(name)
            functions[name] = found[name].function if name in found else own if callable(own) else count_samples
        return functions


def does_not_add_up(task: Task, names: Sequence[str], where: str = "loss", **evidence: Any) -> Reason:
    """What is left to say of a loss whose parts do not make up the whole; of several, that each may have its count."""
    if len(names) > 1 and callable(task.count) and task.count is not count_samples:
        line = "{" + ", ".join(f"{name!r}: ..." for name in names) + "}"
        return reason("one count", where, evidence, names=[repr(name) for name in names], line=line)
    return reason("not additive", where, evidence)


def _are_alike(ones: Sequence[Sequence[float]], others: Sequence[Sequence[float]], tolerance: float) -> bool:
    pairs = zip((a for split in ones for a in split), (b for split in others for b in split), strict=True)
    return all(abs(a - b) <= tolerance for a, b in pairs)


def _holds_shared_term(where: str, value: float, norm: float) -> Reason:
    return reason("shared term", where, {"value": value, "gradient_norm": norm})


def _several(where: str, found: Sequence[tuple[str, str, str]]) -> Reason:
    """A sum of means with different denominators, told apart by the modules that only one of them reaches."""
    shown = "; ".join(f"in `{module}` the gradient is that of a mean over {items}" for module, items, _ in found)
    evidence = {"modules": [module for module, _, _ in found], "items": [items for _, items, _ in found]}
    losses = {f"loss_{number}": code or "..." for number, (_, _, code) in enumerate(found, 1)}
    means = ", ".join(f'"{name}": anybatch.Mean(items_{n}.sum(), len(items_{n}))' for n, name in enumerate(losses, 1))
    remedies = [f'return {{{means}}}  # the items of each and their number, with count="forward"']
    each = ", ".join(f'"{name}": {name}' for name in losses)
    counts = ", ".join(f'"{name}": {code}' for name, code in losses.items())
    if any(code != "..." for code in losses.values()):
        remedies.insert(0, f"return {{{each}}}  # each with its factor, and with count={{{counts}}}")
    return more(reason("several means", where, evidence, shown=shown), before=remedies)
