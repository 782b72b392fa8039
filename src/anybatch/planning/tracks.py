"""The search for a plan at one precision: what was traced, what was measured, and the ways that follow."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from anybatch.levers.checkpointing import NotRecomputable
from anybatch.planning.collating import takes_memory
from anybatch.planning.curve import NotAligned, Profile, Size
from anybatch.planning.devices import Target
from anybatch.planning.lengths import are_within
from anybatch.planning.realruns import TooLarge
from anybatch.planning.recipe import Recipe
from anybatch.planning.searching import FRONT_POINTS, Search, Splitting, splittings
from anybatch.planning.subjects import Subject
from anybatch.planning.timing import CostRecording, Timed, Times, estimated_times, measured
from anybatch.planning.variants import Profiles
from anybatch.records.plans import PlanRow
from anybatch.tensors.batches import Part
from anybatch.tensors.meter import Recording

_CHUNKS = (8, 64)
_MANY_BLOCKS = 48
_LARGE_HEAD = 1024  # outputs, from which on a loss in chunks may be faster
_SMALLEST_HEAD = 64  # outputs; chunks of a smaller layer's loss save nothing that is worth it


class Track:
    """The search at one precision.

    Args:
        subject: what is planned, at this precision.
        target: the device.
        allow: the levers that may be used.
        autocast: the precision as the plan names it, if it is not the user's own.
    """

    def __init__(self, subject: Subject, target: Target, allow: Sequence[str], autocast: str) -> None:
        self.subject = subject
        self.autocast = autocast
        self.profiles = Profiles(subject, Recording if target.is_present else CostRecording)
        self.profiles.may_recompute = "recompute" in allow
        self._all_splittings = self.splittings = splittings(self.profiles)
        self.variants = [Recipe()]
        self.times: Times | None = None
        self._fine: list[tuple[float, ...]] = []
        self._fine_sizes: list[Size] = []
        self._target = target
        self._allow = allow
        self._search: Search | None = None

    @property
    def search(self) -> Search:
        """The search, with the times that are known by now."""
        if self._search is None:
            offloads = "offload" in self._allow and self._target.device_type == "cuda"
            self._search = Search(
                self.profiles, self.times or Times({}), recompute="recompute" in self._allow,
                host_bandwidth=self._target.host_bandwidth if offloads else 0.0,
            )  # fmt: skip
        return self._search

    def look_within(self, usable: int, budget: int) -> None:
        """Leaves out splittings whose micro-batches may not run for real within a budget, where they have to.

        Args:
            usable: bytes of it that a plan may take.
            budget: bytes.
        """
        self.profiles.stay_within(usable, budget)
        if self.profiles.refuses_single:
            several = [one for one in self._all_splittings if min(len(part.samples) for part in one.parts) > 1]
            self._all_splittings = several or self._all_splittings[:1]
            self.profiles.least = max(len(part.samples) for part in self._all_splittings[-1].parts)
        self.splittings = self._all_splittings
        found: list[Splitting] = []
        for splitting in reversed(self._all_splittings):
            try:
                self.search.profile(Recipe(), splitting)
            except TooLarge:
                break
            found.insert(0, splitting)
            if self.profiles.is_fake and not takes_memory(self.subject):
                return
        self.splittings = found or self._all_splittings[-1:]

    def forget(self) -> None:
        """Lets go of what was solved by profiles that are not to be trusted any more."""
        self._search = None

    def _profiled(
        self, variants: Sequence[Recipe], splittings: Sequence[Splitting]
    ) -> Iterator[tuple[Recipe, Splitting]]:
        """The treatments of the loss and the splittings whose profiles may be made."""
        for variant in variants:
            for splitting in splittings:
                try:
                    self.search.profile(variant, splitting)
                except TooLarge:
                    continue
                yield variant, splitting

    @property
    def fewest(self) -> int:
        """How many micro-batches the batch is in where nothing asks for more: one on each device."""
        return 1 if self.subject.devices is None else len(self._all_splittings[0].parts)

    @property
    def looks_at_whole(self) -> bool:
        """Whether the whole batch as one micro-batch is among the splittings."""
        return self.splittings[0].is_single

    def whole_bytes(self) -> int:
        """The peak of the whole batch at once with nothing traded; 0 if it is not known.

        The batches of a window are taken to be joined, where they have one shape and bytes of any size are known.
        """
        if self.looks_at_whole:
            profile, size = self.search.profile(Recipe(), self.splittings[0])
            return profile.peak(size, 1)
        splittable = self.subject.splittable
        may_join = len(splittable.batches) > 1 and not splittable.is_collated and self.subject.devices is None
        if not may_join or self.profiles.has_lengths or not self.profiles.is_straight(Recipe()):
            return 0
        return self.profiles.profile(Recipe(), Size(splittable.rows), single=True).peak(Size(splittable.rows), 1)

    def take_times(self, budget: int, patience: float) -> None:
        """Finds out how long micro-batches take: on a grid of sizes that fit, or by their operations.

        Args:
            budget: bytes.
            patience: seconds that the measurements may take, or little more.
        """
        if self.times is not None:
            return
        if not self._target.is_present:
            found = []
            for splitting in self.splittings:
                profile, size = self.search.profile(Recipe(), splitting)
                found.append((self.search.worst(Recipe(), splitting).cost, profile.fit, size))
            self.times = estimated_times(found, self._target)
        else:
            self.times = self._measured(budget, patience)
        self._search = None

    def _measured(self, budget: int, patience: float) -> Times:
        """Measures the grid from small sizes to large ones, and again from the large ones while there is time."""
        search = Search(self.profiles, Times({}), recompute=True, host_bandwidth=0.0)
        grid = self._grid(search, budget)
        if not grid:
            smallest = self.splittings[-1]
            part = search.worst(Recipe(), smallest)
            return Times({part.cost: self._measured_small(search, smallest)})
        known: dict[float, Timed] = {}
        began = time.perf_counter()
        for part in [*grid, *reversed(grid), *grid]:
            last = known.get(part.cost) or (known[max(known)] if known else None)
            expected = last.seconds * (1 if part.cost in known else 2) if last else 0.0
            if known and expected > patience - (time.perf_counter() - began):
                continue
            timed = measured(self.subject, part, Recipe(self.profiles.always), self.profiles.blocks, repeats=1)
            if timed is None:
                break
            if part.cost not in known or timed.seconds < known[part.cost].seconds:
                known[part.cost] = timed
        return Times(known)

    def _grid(self, search: Search, budget: int) -> list[Part]:
        """The largest micro-batches of splittings that fit with nothing traded, from two samples on, doubling."""
        grid: list[Part] = []
        for splitting in reversed(self.splittings):
            part = search.worst(Recipe(), splitting)
            is_step = not grid or part.cost >= 2 * grid[-1].cost or splitting.is_single
            if not is_step or (len(part.samples) < 2 and len(self.splittings) > 2):
                continue
            profile, size = search.profile(Recipe(), splitting)
            most = profile.peak(size, splitting.count) + self.subject.habits.written_bytes
            if most <= budget and self.profiles.may_collate(part):
                grid.append(part)
        return grid

    def _measured_small(self, search: Search, splitting: Splitting) -> Timed:
        """The smallest micro-batch with everything traded, without the time of that."""
        levers = Recipe.of(search.everything(Recipe(), splitting) or search.smallest(Recipe(), splitting))
        part = search.worst(Recipe(), splitting)
        while True:
            try:
                timed = measured(self.subject, part, levers, self.profiles.blocks, repeats=2)
                break
            except NotRecomputable as error:
                if not levers.recompute:
                    raise
                is_new = search.exclude(error.block)
                levers = Recipe.of(search.smallest(Recipe(), splitting)) if is_new else Recipe()
        if timed is None:
            return Timed(1.0)
        again = sum(timed.forward.values()) if levers.recompute else 0.0
        return Timed(max(timed.seconds - again, 0.5 * timed.seconds), timed.forward)

    def add_chunks(self) -> bool:
        """Takes the loss in chunks into the search, or in smaller ones; says whether there was anything to add."""
        tried = len(self.variants) - 1
        head = self._head() if "loss_chunks" in self._allow else ""
        if not head or tried >= len(_CHUNKS):
            return False
        variant = Recipe(head=head, loss_chunks=_CHUNKS[tried])
        profile, _ = self.search.profile(variant, self.splittings[-1])
        if not profile.is_chunked:
            return False
        self.variants.append(variant)
        return True

    @property
    def has_large_head(self) -> bool:
        """Whether a loss in chunks may be faster, since its logits do not fit into a processor's caches."""
        return "loss_chunks" in self._allow and bool(self._head(_LARGE_HEAD - 1))

    def _head(self, least: int = _SMALLEST_HEAD) -> str:
        """The output layer: the widest linear layer; whether it is the loss's shows when it is tried."""
        widest = ("", least)
        for name, module in self.subject.model.named_modules():
            if type(module) is torch.nn.Linear and name and module.out_features > widest[1]:
                widest = (name, module.out_features)
        return widest[0]

    def rows(self, budget: int) -> list[PlanRow]:
        """The fastest way at each splitting and treatment of the loss that fits."""
        found = (self.search.row(v, splitting, budget) for v in self.variants for splitting in self.splittings)
        return [replace(row, autocast=self.autocast) for row in found if row is not None]

    def smallest(self) -> PlanRow:
        """The way with the least memory: mostly that of the smallest micro-batches, which leave the most losses."""
        looked_at = [*reversed(self.splittings)]
        if len(self.profiles.blocks) > _MANY_BLOCKS:
            looked_at = [*looked_at[:2], *looked_at[2:][-1:]]
        best: PlanRow | None = None
        for variant, splitting in self._profiled(self.variants, looked_at):
            profile, size = self.search.profile(variant, splitting)
            if best is None or profile.update_peak(size, splitting.count) < best.peak_bytes:
                row = self.search.smallest(variant, splitting)
                best = row if best is None or row.peak_bytes < best.peak_bytes else best
        if best is None:
            raise TooLarge(self.profiles.size_of(self.splittings[-1].parts[0]))
        return replace(best, autocast=self.autocast)

    def everything(self) -> PlanRow | None:
        """All blocks recomputed in the smallest micro-batches; ``None`` where ``smallest`` says it all."""
        row = self.search.everything(self.variants[-1], self.splittings[-1])
        return None if row is None else replace(row, autocast=self.autocast)

    def front(self) -> list[PlanRow]:
        """Ways worth a look at any budget; fewer of them where there are very many blocks, of which each takes long."""
        few: list[Splitting] = []
        for splitting in self.splittings:
            if not few or 2 * splitting.limit <= few[-1].limit:
                few.append(splitting)
        share = min(1.0, _MANY_BLOCKS / max(1, len(self.profiles.blocks)))
        some, points = few[: max(1, round(share * len(few)))], max(2, round(share * FRONT_POINTS))
        found = (row for v, one in self._profiled(self.variants, some) for row in self.search.front(v, one, points))
        return [replace(row, autocast=self.autocast) for row in found]

    def floor_size(self, row: PlanRow) -> float | None:
        """The largest micro-batch with nothing traded at which the update is the peak; ``None`` if there is none."""
        for variant, splitting in self._profiled([Recipe.of(row).plain], self.splittings):
            profile, size = self.search.profile(variant, splitting)
            if profile.peak(size, splitting.count) <= profile.update_peak(size, splitting.count):
                return splitting.limit
        return None

    def splitting_of(self, row: PlanRow) -> Splitting:
        """The splitting of a row."""
        return next(one for one in self.splittings if one.limit == row.micro_batch_size)

    def traced(self, row: PlanRow) -> tuple[PlanRow, Profile]:
        """A row with its peak from traces with its levers on.

        The first micro-batch finds no gradients yet, which counts where it is the only one of its size.
        """
        splitting = self.splitting_of(row)
        variant, parts = Recipe.of(row).plain, splitting.parts
        worst = self.search.worst(variant, splitting)
        size, count = self.profiles.size_of(worst), splitting.count
        alone = not splitting.is_single and worst is parts[0] and self.subject.devices is None
        alone = alone and all(self.profiles.size_of(part) != size for part in parts[1:])
        profile = self.profiles.traced(Recipe.of(row), worst, single=splitting.is_single or alone)
        profile.size = size
        others = [part for part in self.profiles.heaviest(parts) if part.samples != worst.samples]
        if not self.profiles.lengths.are_joined:
            others = [self.search.worst(variant, Splitting(splitting.limit, parts[1:]))] if alone else []
        for part in others:
            other = self.profiles.traced(Recipe.of(row), part, single=splitting.is_single)
            other.size = self.profiles.size_of(part)
            if other.peak(other.size, count) > profile.peak(profile.size, count):
                profile = other
        return replace(row, peak_bytes=profile.peak(profile.size, count)), profile

    def outgrown_parts(self, parts: Sequence[Part], row: PlanRow, budget: int) -> str:
        """Says which micro-batch would need more than a budget with the levers of a row; empty if none would."""
        lengths = self.profiles.lengths
        if lengths.are_joined or self._fine_sizes:
            return self._outgrown_joined(parts, row, budget)
        for part in parts:
            samples = len(part.samples)
            has_costs = self.subject.splittable.has_costs
            longest = part.cost / samples if has_costs else float(self.profiles.size_of(part).length)
            large = (samples, *lengths.shape_of(part)) if lengths.shapes else (samples, longest)
            if any(are_within(large, known) for known in self._fine):
                continue
            try:
                profile = self.profiles.traced(Recipe.of(row), part, single=len(parts) == 1)
            except (NotAligned, TooLarge) as error:
                return f"the step runs other operations than before, or takes more: {error}"
            if profile.peak(self.profiles.size_of(part), self.subject.most_on_one(parts)) > budget:
                longer = f"of shape {large}" if lengths.shapes else f"the longest of {longest:g}"
                return f"a micro-batch of {samples} samples, {longer}, would need more"
            self._fine.append(large)
        return ""

    def _outgrown_joined(self, parts: Sequence[Part], row: PlanRow, budget: int) -> str:
        """The same for samples that are not padded, of which one is longer in one micro-batch and one in another."""
        profiles = self.profiles
        for part in profiles.heaviest(parts) if profiles.lengths.are_joined else parts:
            size = profiles.size_of(part)
            if any(size.is_within(known) for known in self._fine_sizes):
                continue
            try:
                profile = profiles.traced(Recipe.of(row), part, single=len(parts) == 1)
            except (NotAligned, TooLarge) as error:
                return f"the step runs other operations than before, or takes more: {error}"
            if profile.peak(size, self.subject.most_on_one(parts)) > budget:
                return f"a micro-batch of {size.samples} samples might need more"
            self._fine_sizes = [known for known in self._fine_sizes if not known.is_within(size)] + [size]
        return ""

    def timed(self, row: PlanRow) -> float:
        """The time of a row by one of its micro-batches, measured."""
        splitting = self.splitting_of(row)
        part = self.search.worst(Recipe(), splitting)
        if self.times and self.subject.habits.written_bytes:  # whose copies may not fit
            return self.subject.seconds(splitting.parts, self.times.seconds)
        may = self.profiles.may_collate(part)
        timed = measured(self.subject, part, Recipe.of(row), (), repeats=1) if may else None
        if timed is None:
            return float("inf")
        if not self.times:  # memory ran out before anything was measured
            return timed.seconds * splitting.count
        times = self.times
        whole = self.subject.seconds(splitting.parts, times.seconds)
        return timed.seconds * whole / max(times.seconds(part.cost), 1e-12)
