"""The search for a coupled loss: how many micro-batches keep their graph, beside the memory optimizations.

With N micro-batches of which k keep their graph, an encoder whose forward takes F and whose backward takes B for each,
and a loss that takes L, a logical batch takes N (F + B) + (N - k) F + L. Blocks that are recomputed or offloaded make a
graph smaller, so that more of them are kept. The encoder by itself, with a loss that adds up, is searched as any step
is, which gives times and choices of blocks; a whole pass is traced as one micro-batch of all samples.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from anybatch.batch.batches import Part
from anybatch.errors import AnyBatchError
from anybatch.loss.coupling import Coupled
from anybatch.memory.checkpointing import NotRecomputable
from anybatch.memory.meter import OverBudget
from anybatch.planning.coupledpass import LOSS, SECOND
from anybatch.planning.curve import Peak, Size
from anybatch.planning.devices import Target
from anybatch.planning.recipe import Recipe, Splitting, halving
from anybatch.planning.search import Search
from anybatch.planning.subjects import Subject
from anybatch.records.memory import ACTIVATIONS
from anybatch.records.plans import PlanRow
from anybatch.units import format_bytes

logger = logging.getLogger(__name__)

_FORWARD = 1 / 3  # of the time of linear layers: the backward multiplies twice
_MOST_OPTIMIZED = 8  # ways with blocks checkpointed or offloaded that are looked at in one search


class CoupledSearch(Search):
    """The search at one precision, of whole passes and not of single micro-batches.

    The loss is computed in blocks of rows only where the user says so.
    """

    may_race = False

    def __init__(self, subject: Subject, target: Target, allow: Sequence[str]) -> None:
        super().__init__(subject, target, [name for name in allow if name != "loss_chunks"])
        self._coupled = cast(Coupled, subject.loss_fn)
        self._largest: dict[float, list[Size]] = {}
        self._found: list[PlanRow] = []
        self._budget = 0

    @property
    def traces_all(self) -> bool:
        """Not: of micro-batches that are alike few run, and count as often as there are."""
        return False

    def look_within(self, usable: int, budget: int) -> None:
        """Begins a search among few splittings, since each has a trace of its own."""
        self._budget = usable
        super().look_within(usable, budget)
        splittable, found = self.subject.splittable, self.splittings
        if splittable.has_costs:  # as the engine makes them for their limit
            limits = dict.fromkeys(one.limit for one in found)
            found = [Splitting(limit, tuple(splittable.plan(limit, oversized="alone"))) for limit in limits]
        few = halving(found)
        self.splittings = few if few[-1] is found[-1] else [*few, found[-1]]

    # What a pass holds.

    def traced(self, row: PlanRow) -> tuple[PlanRow, Peak]:
        """A row with its peak; it was traced as it would run when it was made."""
        splitting, recipe = self.splitting_of(row), self.recipe_of(row)
        peak = self._peak(splitting, recipe)
        if self.held is not None and peak.by_category:
            profile = self.profiles.whole_pass(recipe, splitting.parts)
            row = replace(row, reserved_bytes=self._reserved(self.held, profile))
        return row, peak

    def _peak(self, splitting: Splitting, recipe: Recipe) -> Peak:
        """The most bytes alive in a step, and what they are for; of one that was stopped only how many it reached."""
        try:
            found = self.profiles.whole_pass(recipe, splitting.parts)
        except OverBudget as error:
            return Peak(error.needed, {}, "", LOSS)
        sizes, lengths = [self.profiles.size_of(part) for part in splitting.parts], self.profiles.lengths
        if lengths.are_joined:
            sizes = [self.profile(Recipe(), splitting).size]
        elif not lengths.shapes:
            sizes = [Size(max(one.samples for one in sizes), max(one.length for one in sizes))]
        self._largest[splitting.limit] = sizes
        return found.peak_in_detail()

    def whole_bytes(self, autocast: str = "") -> int:
        """The peak of the whole batch at once at a precision, without memory optimizations; 0 if it is not known."""
        splitting = self.splittings[0]
        return self._peak(splitting, Recipe(autocast=autocast, keep=1)).total if splitting.is_single else 0

    def outgrown_parts(self, parts: Sequence[Part], row: PlanRow, budget: int) -> str:
        """Says which micro-batch is larger than those that were planned for; empty if none is."""
        return self.profiles.lengths.outgrown(
            parts, self._largest.get(row.micro_batch_size, ()), is_exact=self.profiles.is_fake
        )

    # Which graphs are kept.

    def row(self, recipe: Recipe, splitting: Splitting, budget: int) -> PlanRow | None:
        """The way that keeps the most graphs within a budget; ``None`` if not even the least fits."""
        kept = self._most(splitting, recipe, budget)
        return None if kept is None else self.row_of(splitting, kept, _plain(splitting, recipe.autocast))

    def _most(self, splitting: Splitting, recipe: Recipe, budget: int) -> int | None:
        """The largest number of graphs that fits in a budget, since what is held grows with it; ``None`` if none."""

        def is_over(kept: int) -> bool:
            return self._peak(splitting, replace(recipe, keep=kept)).total > budget

        count = len(splitting.parts)
        most = bisect_left(range(count), True, key=is_over) - 1 if is_over(count) else count
        return None if most < 0 else most

    def _pass_seconds(self, splitting: Splitting, kept: int, way: PlanRow) -> float | None:
        """The predicted time of a logical batch in the encoder, with the memory optimizations of one of its rows."""
        recipe = self.recipe_of(way)
        times, base = self._times_of(recipe), self.seconds(recipe, splitting)
        if not times or base is None:
            return None
        both = [times.seconds(part.cost) for part in splitting.parts]
        more = (way.seconds or 0.0) - base if _has_blocks(way) else 0.0
        return sum(both) + _FORWARD * sum(both[: len(both) - kept]) + more

    def row_of(self, splitting: Splitting, kept: int, way: PlanRow | None = None) -> PlanRow:
        """A way to run the batch: at the precision and with the blocks of a row of the encoder's own search."""
        way = _plain(splitting) if way is None else way
        return replace(
            way, kept_graphs=kept, seconds=self._pass_seconds(splitting, kept, way), confidence=self.confidence,
            peak_bytes=self._peak(splitting, replace(self.recipe_of(way), keep=kept)).total,
        )  # fmt: skip

    def _rows(self, budget: int) -> list[PlanRow]:
        """The fastest ways that fit, with blocks checkpointed only where that may be faster."""
        found = self._found = list[PlanRow]()

        def look_at(ways: Sequence[tuple[Splitting, PlanRow]]) -> None:
            fastest_possible = [(self._pass_seconds(one, len(one.parts), row) or 0.0, one, row) for one, row in ways]
            for seconds, splitting, row in sorted(fastest_possible, key=lambda way: way[0]):
                if all(row.seconds is None or seconds < row.seconds for row in found):
                    found.extend(self._with(splitting, row, lambda s, recipe: self._most(s, recipe, budget)))

        look_at([(one, _plain(one, name)) for name in self.precisions for one in self.splittings])
        if not any(row.kept_graphs == row.micro_batches == 1 for row in found):
            ways = [(one, recipe) for recipe in self.recipes for one in self.splittings]
            rows = [(one, row) for one, recipe in ways for row in self.front_of(recipe, one) if _has_blocks(row)]
            look_at(sorted(rows, key=lambda pair: pair[1].seconds or 0.0)[:_MOST_OPTIMIZED])
        return found

    def _with(
        self, splitting: Splitting, row: PlanRow, number: Callable[[Splitting, Recipe], int | None]
    ) -> list[PlanRow]:
        """The way with the blocks of a row checkpointed or offloaded, if it runs and keeps any number of graphs."""
        try:
            kept = number(splitting, Recipe.of(row))
            return [] if kept is None else [self.row_of(splitting, kept, row)]
        except AnyBatchError as error:
            if not _has_blocks(row) or isinstance(error, NotRecomputable):
                raise
            logger.info("not taken: %s (%s)", row.optimizations, error)
        return []

    def smallest(self) -> PlanRow:
        """The way with the least memory, which is the whole batch's where activations are few beside what is kept."""
        found, whole = self._smallest_split(), self.splittings[0]
        if not self.profiles.is_fake:  # it would run
            return found
        at_once = self.row_of(whole, len(whole.parts), _plain(whole, found.autocast))
        return min(found, at_once, key=lambda row: row.peak_bytes)

    def _smallest_split(self) -> PlanRow:
        """The same of micro-batches: mostly that of the smallest micro-batches, which keep the most of the others.

        Where it is the graph of one micro-batch that takes the most, fewer of its activations take less, and so may all
        graphs at once, where these are small; else nothing does.
        """

        def least(splitting: Splitting, recipe: Recipe) -> int:
            return min(
                (0, len(splitting.parts)), key=lambda kept: self._peak(splitting, replace(recipe, keep=kept)).total
            )

        plain = [(one, _plain(one, name)) for one in self.splittings[:-3:-1] for name in self.precisions]
        best = min((self.row_of(one, 0, way) for one, way in plain), key=lambda row: row.peak_bytes)
        splitting, recipe = self.splitting_of(best), Recipe(autocast=best.autocast)
        peak = self._peak(splitting, replace(recipe, keep=0))
        if peak.by_category and peak.stage != SECOND:
            return best
        optimized = (make(recipe, splitting) for make in (self.smallest_of, self.everything))
        rows = (_plain(splitting, best.autocast), *(row for row in optimized if row is not None and _has_blocks(row)))
        return min(
            [best, *(one for row in rows for one in self._with(splitting, row, least))], key=lambda row: row.peak_bytes
        )

    def _smallest_rows(self) -> list[PlanRow]:
        return [self.smallest()]

    def front(self) -> list[PlanRow]:
        """Ways worth a look at any budget, those that were found, and the smallest."""
        few = [(one, len(one.parts), _plain(one, name)) for name in self.precisions for one in self.splittings[::2]]
        found = [self.row_of(one, kept, way) for one, count, way in few for kept in (0, -(-count // 2))]
        within = [row for row in found if self.profiles.is_fake or row.peak_bytes <= self._budget]
        return [*self._found, *within, self.smallest()]

    def floor_size(self, row: PlanRow) -> float | None:
        """Not known: how much is held is a matter of the graphs that are kept, too."""
        return None

    def hint(self, row: PlanRow, peak: Peak) -> str:
        """Says what the loss takes, and how it takes less."""
        if peak.stage != LOSS:
            return ""
        activations, block = peak.by_category.get(ACTIVATIONS), self._coupled.row_block
        held = "" if activations is None else f", with {format_bytes(activations)} of activations"
        if block is None:
            return f" The loss sees all samples{held}; Coupled(row_block=...) computes it in blocks of rows."
        return f" The loss takes {block} rows at a time{held}; a smaller row_block helps."


def _plain(splitting: Splitting, autocast: str = "") -> PlanRow:
    """A way without memory optimizations."""
    return PlanRow(splitting.limit, len(splitting.parts), autocast=autocast)


def _has_blocks(row: PlanRow) -> bool:
    return bool(row.recompute or row.offload)
