"""All configurations of a logical batch that fit in a budget: splittings, the loss, blocks recomputed or offloaded."""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from anybatch.batch.batches import Part, Splittable
from anybatch.memory.checkpointing import NotRecomputable
from anybatch.memory.meter import Recording
from anybatch.planning.curve import NotAligned, Peak, Profile, Size
from anybatch.planning.devices import Target
from anybatch.planning.knapsack import Choice, Option, Timeline, choose, front, smallest_peak
from anybatch.planning.memorytrace import NotFake
from anybatch.planning.microbatches import takes_memory
from anybatch.planning.predictor import Predictor, TooLarge
from anybatch.planning.recipe import Recipe, Splitting, halving, splittings
from anybatch.planning.reserved import Held, Replay
from anybatch.planning.subjects import Subject
from anybatch.planning.timing import CostRecording, Timed, Times, estimated_times, measured, measured_grid
from anybatch.records.plans import PRECISIONS, Confidence, ModuleShare, PlanRow
from anybatch.tensors.modules import modules_of

_FRONT_POINTS = 6
_CHUNKS = (8, 64)
_MANY_BLOCKS = 48
_LEAST_OFFLOADED = 1024  # bytes; smaller tensors stay
_STRAIGHT = 0.01  # of the whole batch's peak, within which it follows from small micro-batches
_LARGE_HEAD = 1024  # outputs, from which on a loss in chunks may be faster
_SMALLEST_HEAD = 64  # outputs; chunks of a smaller layer's loss save nothing that is worth it


class Search:
    """The search: what was traced, what was measured, and the ways that follow.

    Where a method takes a ``recipe``, the precision and the treatment of the loss are meant, without blocks.
    """

    may_race = True
    """Whether the time of a way follows from that of one of its micro-batches, so that ways can be raced."""

    def __init__(self, subject: Subject, target: Target, allow: Sequence[str]) -> None:
        self.subject = subject
        lower = [name for name in PRECISIONS if name in allow and subject.settings.autocast is None]
        self.precisions = ["", *lower]  # as plans name them, the user's own first
        kind = Recording if target.is_present else CostRecording
        self.profiles = Predictor(subject, kind, may_recompute="recompute" in allow)
        self._all_splittings = self.splittings = splittings(subject)
        self.base = Recipe()
        self._recipes: dict[Recipe, list[Recipe]] = {}
        self.times: dict[Recipe, Times] = {}  # how long micro-batches take with a base at a precision, if it is known
        self.held: Held | None = None  # before a step, where the bytes that an allocator reserves are known from that
        self.limit = 0  # bytes that the allocator may reserve
        self._fine: list[Size] = []
        self._target = target
        self._allow = allow
        self._solved: dict[tuple[Recipe, float], tuple[Timeline, list[Option]]] = {}

    def bases(self, budget: int) -> list[Recipe]:
        """What all ways have in common, of several the first with which something fits; the last holds the least."""
        return [Recipe()]

    def base_of(self, row: PlanRow) -> Recipe:
        """What the row of a plan had in common with the others."""
        return Recipe()

    def begin(self, base: Recipe) -> None:
        """Turns to ways that have this in common."""
        if base != self.base:
            self.base, self._fine = base, []

    @property
    def recipes(self) -> list[Recipe]:
        """The precisions and treatments of the loss that are looked at, the plain ones first."""
        return self._recipes.setdefault(self.base, [replace(self.base, autocast=name) for name in self.precisions])

    @property
    def _last_recipes(self) -> list[Recipe]:
        """Those with the loss in the smallest chunks."""
        return self.recipes[-len(self.precisions) :]

    def _times_of(self, recipe: Recipe) -> Times | None:
        return self.times.get(replace(self.base, autocast=recipe.autocast))

    @property
    def traces_all(self) -> bool:
        """Whether a row's traces are all that a step allocates, so that what is reserved for it follows from them."""
        return True

    @property
    def confidence(self) -> Confidence:
        """How far traces may be trusted, and what an allocator reserves by them."""
        return self.profiles.confidence if self.held is None or self.traces_all else "estimated"

    def attend(self, splittable: Splittable | None) -> None:
        """Looks at another logical batch with the same samples and shapes, or at none, to let go of the last one."""
        self.subject.attend(splittable)
        self.profiles.forget_lengths()

    def forget(self) -> None:
        """Lets go of what was solved by profiles that are not to be trusted any more."""
        self._solved.clear()

    def look_within(self, usable: int, budget: int) -> None:
        """Leaves out splittings whose micro-batches may not run for real within a budget, where they have to."""
        self.profiles.stay_within(usable, budget)
        if self.profiles.refuses_single:
            several = [one for one in self._all_splittings if min(len(part.samples) for part in one.parts) > 1]
            self._all_splittings = several or self._all_splittings[:1]
            self.profiles.least = max(len(part.samples) for part in self._all_splittings[-1].parts)
        self.splittings = self._all_splittings
        found: list[Splitting] = []
        for splitting in reversed(self._all_splittings):  # from the smallest micro-batches on
            if self._profile_within(self.base, splitting) is None:
                break
            found.insert(0, splitting)
            if self.profiles.is_fake and not takes_memory(self.subject):
                return
        self.splittings = found or self._all_splittings[-1:]

    def _profiled(
        self, recipes: Sequence[Recipe], splittings: Sequence[Splitting]
    ) -> Iterator[tuple[Recipe, Splitting, Profile]]:
        """The treatments of the loss and the splittings whose profiles may be made."""
        for recipe, splitting in itertools.product(recipes, splittings):
            profile = self._profile_within(recipe, splitting)
            if profile is not None:
                yield recipe, splitting, profile

    def _profile_within(self, recipe: Recipe, splitting: Splitting) -> Profile | None:
        """The profile of a splitting; ``None`` where it would have to run for real, and might not fit."""
        try:
            return self.profile(recipe, splitting)
        except TooLarge:
            return None

    def worst(self, recipe: Recipe, splitting: Splitting) -> Part:
        """The micro-batch that needs the most memory."""
        profiles = self.profiles
        parts = profiles.heaviest(splitting.parts) if profiles.lengths.are_joined else splitting.parts
        by_size = {profiles.size_of(part): part for part in parts}
        if len(by_size) == 1:
            return parts[0]
        if profiles.lengths.are_apart or not profiles.is_fake:  # each may take a trace of its own
            by_size = {one: by_size[one] for one in by_size if not any(one.is_within(o) for o in by_size if o != one)}

        def peak(size: Size) -> tuple[int, int]:  # the longer of two that are taken to be as long
            profile = profiles.profile(recipe, size, single=splitting.is_single)
            return profile.at(size, splitting.count).peak, size.length

        if not profiles.lengths.are_joined and len({size.length for size in by_size}) == 1:
            return by_size[max(by_size, key=lambda size: size.samples)]
        return by_size[max(by_size, key=peak)]

    def profile(self, recipe: Recipe, splitting: Splitting) -> Profile:
        """The profile of the largest micro-batch of a splitting."""
        size = self.profiles.size_of(self.worst(recipe, splitting))
        return self.profiles.profile(recipe, size, single=splitting.is_single).at(size, splitting.count)

    def seconds(self, recipe: Recipe, splitting: Splitting) -> float | None:
        """The time of a logical batch without memory optimizations, ``None`` if nothing is known."""
        times = self._times_of(recipe)
        return self.subject.seconds(splitting.parts, times.seconds) if times else None

    def holds_update(self, budget: int) -> bool:
        """Whether the update fits beside the losses of micro-batches, of which splittings keep more or fewer."""
        found = (self._profile_within(self.base, one) for one in reversed(self.splittings))
        return any(one is not None and one.update_peak <= budget for one in found)

    def look_at_whole(self) -> None:
        """Has each size traced by itself where the whole batch takes other bytes than small ones tell.

        That is where a loss compares all pairs of samples.
        """
        whole = self._all_splittings[0]
        if whole.is_single and self.profiles.is_straight(self.base):
            told, exact = self.profile(self.base, whole).peak, self._whole(self.base).peak
            if abs(exact - told) > _STRAIGHT * exact:
                self.profiles.note_curved(told, exact)
                self.forget()

    def _whole(self, recipe: Recipe) -> Profile:
        """The whole batch at once, traced as it is where that takes no memory."""
        whole, profiles = self._all_splittings[0], self.profiles
        if profiles.is_fake and profiles.is_straight(recipe):
            part = self.worst(recipe, whole)
            with contextlib.suppress(TooLarge):  # raw samples that are collated for real
                return profiles.traced(recipe, part, single=True).at(profiles.size_of(part), whole.count)
        return self.profile(recipe, whole)

    def whole_bytes(self, autocast: str = "") -> int:
        """The peak of the whole batch at once at a precision, without memory optimizations; 0 if it is not known.

        The batches of a window are taken to be joined, where they have one shape and bytes of any size are known.
        """
        recipe = replace(self.base, autocast=autocast)
        if self.splittings[0].is_single:
            return self._whole(recipe).peak
        splittable = self.subject.splittable
        may_join = len(splittable.batches) > 1 and not splittable.is_collated and self.subject.devices is None
        if not may_join or len({*self.profiles.lengths.each}) > 1 or not self.profiles.is_straight(recipe):
            return 0
        size = Size(splittable.rows)
        return self.profiles.profile(recipe, size, single=True).at(size, 1).peak

    # How long micro-batches take.

    def take_times(self, budget: int, patience: float) -> None:
        """Finds out how long micro-batches take: on a grid of sizes that fit, or by their operations."""
        for recipe in (replace(self.base, autocast=name) for name in self.precisions):
            if recipe not in self.times:
                is_there = self._target.is_present
                self.times[recipe] = self._measured(recipe, budget, patience) if is_there else self._estimated(recipe)
                self._solved.clear()

    def _estimated(self, recipe: Recipe) -> Times:
        found = []
        for splitting in self.splittings:
            profile = self.profile(recipe, splitting)
            found.append((self.worst(recipe, splitting).cost, profile.fit, profile.size))
        return estimated_times(found, self._target)

    def _measured(self, recipe: Recipe, budget: int, patience: float) -> Times:
        grid = self._grid(recipe, budget)
        if not grid:
            smallest = self.splittings[-1]
            return Times({self.worst(recipe, smallest).cost: self._measured_small(recipe, smallest)})
        recipe = replace(recipe, recompute=self.profiles.always)
        return measured_grid(self.subject, grid, recipe, self.profiles.blocks, patience)

    def _grid(self, recipe: Recipe, budget: int) -> list[Part]:
        """The largest micro-batches that fit without memory optimizations, from two samples on, doubling."""
        grid: list[Part] = []
        for splitting in reversed(self.splittings):
            part = self.worst(recipe, splitting)
            # Doubling, since times between two sizes are interpolated; one sample alone may take other kernels.
            is_step = not grid or part.cost >= 2 * grid[-1].cost or splitting.is_single
            if not is_step or (len(part.samples) < 2 and len(self.splittings) > 2):
                continue
            profile = self.profile(recipe, splitting)
            most = profile.peak + self.subject.behaviour.written_bytes
            if most <= budget and self._is_served(profile) and self.profiles.may_collate(part):
                grid.append(part)
        return grid

    def _is_served(self, profile: Profile) -> bool:
        """Whether the allocator gives a micro-batch what it takes; one that takes far less than there is does."""
        if self.held is None or 2 * profile.peak <= self.limit:
            return True
        return self._reserved(self.held, profile) <= self.limit

    def _reserved(self, held: Held, profile: Profile, last: Size | None = None) -> int:
        """The bytes that an allocator has to be given; of several devices the first, which holds the most."""
        return Replay(self.subject, held, profile, last).needed(self.limit)

    def _measured_small(self, recipe: Recipe, splitting: Splitting) -> Timed:
        """The smallest micro-batch with every memory optimization, without the time of that."""
        part = self.worst(recipe, splitting)
        recipe = self.recipe_of(self.everything(recipe, splitting) or self.smallest_of(recipe, splitting))
        timed = self._measured_one(part, recipe, self.profiles.blocks, repeats=2)
        if timed is None:
            return Timed(1.0)
        again = sum(timed.forward.values()) if recipe.recompute else 0.0
        return Timed(max(timed.seconds - again, 0.5 * timed.seconds), timed.forward)

    def _measured_one(self, part: Part, recipe: Recipe, blocks: Sequence[str], *, repeats: int) -> Timed | None:
        try:
            return measured(self.subject, part, recipe, blocks, repeats=repeats)
        except NotRecomputable as error:  # of which some show with numbers only
            self.profiles.excluded.add(error.block)
            raise

    def timed(self, row: PlanRow) -> float:
        """The time of a row by one of its micro-batches, measured."""
        splitting, recipe = self.splitting_of(row), self.recipe_of(row)
        part, times = self.worst(recipe.plain, splitting), self._times_of(recipe)
        if times and self.subject.behaviour.written_bytes:  # whose copies may not fit
            return self.subject.seconds(splitting.parts, times.seconds)
        may = self.profiles.may_collate(part)
        timed = self._measured_one(part, recipe, (), repeats=1) if may else None
        if timed is None:
            return float("inf")
        if not times:  # memory ran out before anything was measured
            return timed.seconds * splitting.count
        whole = self.subject.seconds(splitting.parts, times.seconds)
        return timed.seconds * whole / max(times.seconds(part.cost), 1e-12)

    # The loss in chunks.

    def add_chunks(self) -> bool:
        """Takes the loss in chunks into the search, or in smaller ones; says whether there was anything to add."""
        tried = len(self.recipes) // len(self.precisions) - 1
        head = self._head()
        if not head or tried >= len(_CHUNKS):
            return False
        recipe = replace(self.base, head=head, loss_chunks=_CHUNKS[tried])
        if not self.profile(recipe, self.splittings[-1]).fit.trace.chunked:
            return False
        self.recipes.extend(replace(recipe, autocast=name) for name in self.precisions)
        return True

    def is_bound_by_loss(self) -> bool:
        """Whether the smallest configuration peaks in its loss, so that smaller chunks of it would lower that."""
        if "loss_chunks" not in self._allow:
            return False
        found = []
        for recipe, splitting, profile in self._profiled(self._last_recipes, self.splittings[-1:]):
            timeline, options = self._timeline(recipe, splitting)
            choice = smallest_peak(timeline, options)
            in_loss = timeline.forward[-1] - sum(one.freed for one in choice.options)
            found.append(in_loss >= max(choice.peak, profile.update_peak))
        return any(found) or not found

    def _head(self, least: int = _SMALLEST_HEAD) -> str:
        """The output layer: the widest linear layer; whether it is the loss's shows when it is tried."""
        widest = ("", least if "loss_chunks" in self._allow else sys.maxsize)
        for name, module in self.subject.model.named_modules():
            if type(module) is torch.nn.Linear and name and module.out_features > widest[1]:
                widest = (name, module.out_features)
        return widest[0]

    # Rows.

    def rows(self, budget: int) -> list[PlanRow]:
        """The fastest ways that fit, each with the loss in chunks, too, where that may help."""
        rows = self._rows(budget)
        fewest = 1 if self.subject.devices is None else len(self._all_splittings[0].parts)
        is_plain = any(row.micro_batches == fewest and not row.optimizations for row in rows)
        # Logits that do not fit into a processor's caches may be faster in chunks, which is measured.
        may_be_faster = self._target.is_present and self._head(_LARGE_HEAD - 1)
        is_looked_at = len(self.recipes) > len(self.precisions)
        if (not is_plain or may_be_faster) and not is_looked_at and self.add_chunks():
            return self._rows(budget)
        return rows

    def _rows(self, budget: int) -> list[PlanRow]:
        """The fastest way at each splitting, precision and treatment of the loss that fits."""
        found = (self.row(recipe, splitting, budget) for recipe in self.recipes for splitting in self.splittings)
        return [row for row in found if row is not None]

    def row(self, recipe: Recipe, splitting: Splitting, budget: int) -> PlanRow | None:
        """The fastest way to checkpoint or offload blocks within a budget; ``None`` if no choice is enough."""
        profile = self._profile_within(recipe, splitting)
        if profile is None or profile.update_peak > budget:
            return None
        if profile.peak <= budget:
            return self._row(recipe, splitting, Choice((), 0.0, profile.peak))
        choice = choose(*self._timeline(recipe, splitting), budget)
        return None if choice is None else self._row(recipe, splitting, choice)

    def smallest(self) -> PlanRow:
        """The way with the least memory: mostly that of the smallest micro-batches, which leave the most losses."""
        looked_at = [*reversed(self.splittings)]
        if len(self.profiles.blocks) > _MANY_BLOCKS:
            looked_at = [*looked_at[:2], *looked_at[2:][-1:]]
        best: PlanRow | None = None
        for recipe, splitting, profile in self._profiled(self.recipes, looked_at):
            if best is None or profile.update_peak < best.peak_bytes:
                row = self.smallest_of(recipe, splitting)
                best = row if best is None or row.peak_bytes < best.peak_bytes else best
        if best is None:
            raise TooLarge(self.profiles.size_of(self.splittings[-1].parts[0]))
        return best

    def smallest_of(self, recipe: Recipe, splitting: Splitting) -> PlanRow:
        """The blocks checkpointed or offloaded that leave the least memory."""
        return self._row(recipe, splitting, smallest_peak(*self._timeline(recipe, splitting)))

    def everything(self, recipe: Recipe, splitting: Splitting) -> PlanRow | None:
        """All blocks recomputed, where it is not known for sure that another choice holds less; else ``None``.

        That is where blocks run several times, and where what a kernel works in shows in real runs only.
        """
        profile = self.profile(recipe, splitting)
        # A block that runs several times holds less than is predicted for a choice of blocks.
        if self.profiles.is_fake and not any(link.repeats for link in profile.fit.chain):
            return None
        _, options = self._timeline(recipe, splitting)
        blocks = tuple(one for one in options if one.kind == "recompute" and one.first == one.last)
        choice = Choice(blocks, sum(one.seconds for one in blocks), profile.peak)
        return self._row(recipe, splitting, choice) if blocks else None

    def smallest_runs(self) -> Iterator[tuple[int, int]]:
        """The bytes of ways to run the smallest micro-batches for real, and those that each run takes by itself.

        They are of the user's own precision, whose runs are the first to be refused.
        """
        profiles, splitting = self.profiles, self._all_splittings[-1]
        parts = profiles.lengths.fewest(profiles.least) if self.subject.splits else splitting.parts
        for traces in profiles.smallest_runs(self.base, parts, single=splitting.is_single):
            found = [profiles.profile_of([one]).at(one[0], splitting.count) for one in traces]
            most = max(found, key=lambda one: one.peak)
            reserved = 0 if self.held is None else Replay(self.subject, self.held, most, None).needed(0)
            yield max(most.peak, reserved), max(trace.taken for _, trace in traces)

    def least(self) -> tuple[PlanRow, Peak]:
        """The way with the least memory, traced as it would run, with the fewest bytes that an allocator may have."""
        limit, self.limit = self.limit, 0
        try:
            return min((self.traced(row) for row in self._smallest_rows()), key=lambda one: one[0].needed_bytes)
        finally:
            self.limit = limit

    def _smallest_rows(self) -> list[PlanRow]:
        everything = (self.everything(recipe, self.splittings[-1]) for recipe in self._last_recipes)
        return [self.smallest(), *(row for row in everything if row is not None)]

    def front(self) -> list[PlanRow]:
        """Ways worth a look at any budget; fewer of them where there are very many blocks, of which each takes long."""
        few = halving(self.splittings)
        share = min(1.0, _MANY_BLOCKS / max(1, len(self.profiles.blocks)))
        some, points = few[: max(1, round(share * len(few)))], max(2, round(share * _FRONT_POINTS))
        return [
            row for recipe, one, _ in self._profiled(self.recipes, some) for row in self.front_of(recipe, one, points)
        ]

    def front_of(self, recipe: Recipe, splitting: Splitting, points: int = _FRONT_POINTS) -> list[PlanRow]:
        """The choices of blocks that are worth their time, from the fastest to the smallest."""
        choices = front(*self._timeline(recipe, splitting), points=points)
        return [self._row(recipe, splitting, choice) for choice in choices]

    def _row(self, recipe: Recipe, splitting: Splitting, choice: Choice) -> PlanRow:
        base, profile = self.seconds(recipe, splitting), self.profile(recipe, splitting)
        recompute, offload = (
            tuple(one.name for one in choice.options if one.kind == kind) for kind in ("recompute", "offload")
        )
        return PlanRow(
            splitting.limit, len(splitting.parts), self.profiles.always or recompute, offload, recipe.head,
            recipe.loss_chunks, recipe.autocast, peak_bytes=max(choice.peak, profile.update_peak),
            seconds=None if base is None else base + choice.seconds, confidence=profile.confidence,
        )  # fmt: skip

    def _timeline(self, recipe: Recipe, splitting: Splitting) -> tuple[Timeline, list[Option]]:
        key = (recipe, splitting.limit)
        if key not in self._solved:
            profile, times = self.profile(recipe, splitting), self._times_of(recipe)

            @functools.cache
            def forward(name: str) -> float:
                if not times:
                    return 1.0
                return self.subject.seconds(splitting.parts, lambda cost: times.forward(cost, name))

            timeline, options = profile.timeline(forward)
            options = self.profiles.recomputable(options)
            if "offload" in self._allow and self._target.device_type != "cpu":
                options += self._offloads(profile, forward if times else lambda _: 0.0)
            self._solved[key] = (timeline, options)
        return self._solved[key]

    def _offloads(self, profile: Profile, forward: Callable[[str], float]) -> list[Option]:
        """Copies to the host hide behind the block that computes meanwhile, and take time beyond that."""
        options, sizes = [], profile.fit.sizes(profile.size)
        for index, link in enumerate(profile.fit.chain):
            inside = [i for i in link.saved if i not in link.outputs and sizes[i] >= _LEAST_OFFLOADED]
            if held := sum(sizes[i] for i in inside) if link.in_order else 0:
                seconds = 2 * max(0.0, held * profile.count / self._target.host_bandwidth - forward(link.name))
                options.append(Option(index, index, "offload", held, seconds, lag=1, name=link.name))
        return options

    # A row as it would run.

    def floor_size(self, row: PlanRow) -> float | None:
        """The largest plain micro-batch at which the update is the peak; ``None`` if there is none."""
        for _, splitting, profile in self._profiled([self.recipe_of(row).plain], self.splittings):
            if profile.peak <= profile.update_peak:
                return splitting.limit
        return None

    def recipe_of(self, row: PlanRow) -> Recipe:
        """How a row runs its micro-batches."""
        return Recipe.of(row, self.base.chunks)

    def splitting_of(self, row: PlanRow) -> Splitting:
        """The splitting of a row."""
        return next(one for one in self.splittings if one.limit == row.micro_batch_size)

    def turn_to(self, limit: float) -> None:
        """Turns to micro-batches of one size, which a plan for another batch may have chosen."""
        parts = tuple(self.subject.splittable.plan(limit))
        self.splittings = [Splitting(limit, parts, self.subject.most_on_one(parts))]

    def finished(self, row: PlanRow) -> PlanRow:
        """A row as a plan shows it, which says so where nobody knows what an allocator reserves."""
        is_device = self._target.is_present and self._target.device_type != "cpu"
        is_known = not is_device or (self.held is not None and self.traces_all)
        return row if is_known else replace(row, confidence="estimated")

    def hint(self, row: PlanRow, peak: Peak) -> str:
        """What there is to say of the loss, if it is what a row needs the most memory for."""
        is_chunked = peak.stage == "loss" and row.loss_chunks > 1
        return f" The loss is in {row.loss_chunks} chunks already." if is_chunked else ""

    def shares(self, row: PlanRow) -> list[ModuleShare]:
        """What each block holds in a micro-batch of a row without memory optimizations."""
        splitting, recipe = self.splitting_of(row), replace(self.base, autocast=row.autocast)
        profile, times = self.profile(recipe, splitting), self._times_of(recipe)
        cost = self.worst(recipe, splitting).cost
        sizes, found = profile.fit.sizes(profile.size), []
        for link in profile.fit.chain:
            modules = modules_of(self.subject.model.get_submodule(link.name))
            weights = [p.nbytes for one in modules for p in one._parameters.values() if p is not None]
            seconds = times.forward(cost, link.name) if times else None
            found.append(ModuleShare(link.name, sum(weights), sum(sizes[i] for i in link.saved), seconds))
        return found

    def traced(self, row: PlanRow) -> tuple[PlanRow, Peak]:
        """A row with its peak from traces as it would run.

        The first micro-batch finds no gradients yet, which counts where it is the only one of its size.
        """
        splitting, recipe = self.splitting_of(row), self.recipe_of(row)
        worst, parts = self.worst(recipe.plain, splitting), splitting.parts
        size, count = self.profiles.size_of(worst), splitting.count
        alone = not splitting.is_single and worst is parts[0] and self.subject.devices is None
        alone = alone and all(self.profiles.size_of(part) != size for part in parts[1:])
        looked_at = [(worst, splitting.is_single or alone)]
        if self.profiles.lengths.are_joined:
            others = [part for part in self.profiles.heaviest(parts) if part.samples != worst.samples]
            looked_at += [(part, splitting.is_single) for part in others]
        elif alone:
            looked_at.append((self.worst(recipe.plain, Splitting(splitting.limit, parts[1:])), splitting.is_single))
        found = []
        for part, single in looked_at:
            found.append(self.profiles.traced(recipe, part, single=single).at(self.profiles.size_of(part), count))
        profile = max(found, key=lambda one: one.peak)
        row, peak = replace(row, peak_bytes=profile.peak), profile.peak_in_detail()
        if self.held is not None:
            last = parts[-1]  # whose blocks, if they are smaller, go to other places
            if not self.profiles.lengths.are_joined:
                profile = self.profiles.traced(recipe, worst, single=splitting.is_single, last=last).at(size, count)
            row = replace(row, reserved_bytes=self._reserved(self.held, profile, self.profiles.size_of(last)))
        return row, peak

    def outgrown_parts(self, parts: Sequence[Part], row: PlanRow, budget: int) -> str:
        """Says which micro-batch would need more than a budget as a row runs it; empty if none would."""
        profiles = self.profiles
        for part in profiles.heaviest(parts) if profiles.lengths.are_joined else parts:
            size = profiles.size_of(part)
            if any(size.is_within(known) for known in self._fine):
                continue
            try:
                profile = profiles.traced(self.recipe_of(row), part, single=len(parts) == 1)
            except (NotAligned, NotFake, TooLarge) as error:
                return f"the step runs different operations than before, or takes more memory: {error}"
            if profile.at(size, self.subject.most_on_one(parts)).peak > budget:
                return f"a micro-batch of {size} would need more"
            self._fine = [known for known in self._fine if not known.is_within(size)] + [size]
        return ""


def sorted_rows(rows: Iterable[PlanRow]) -> list[PlanRow]:
    """Rows from the fastest to the slowest; among equals those with fewer micro-batches, then the smaller ones."""
    unknown = float("inf")
    return sorted(
        rows,
        key=lambda row: (row.seconds if row.seconds is not None else unknown, row.micro_batches, row.peak_bytes),
    )


def pareto(rows: Iterable[PlanRow]) -> list[PlanRow]:
    """The rows that no other one beats in both bytes and seconds, the fastest first."""
    kept: list[PlanRow] = []
    for row in sorted_rows(rows):
        if not kept or row.peak_bytes < kept[-1].peak_bytes:
            kept.append(row)
    return kept
