"""Plans of a coupled loss: micro-batches of the encoder, and how many of them keep their graph until the loss is there.

With N micro-batches of which k keep their graph, an encoder whose forward takes F and whose backward takes B for each,
and a loss that takes L, a logical batch takes N (F + B) + (N - k) F + L. Blocks that are recomputed or offloaded make a
graph smaller, so that more of them are kept.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from anybatch.errors import AnyBatchError, LossError
from anybatch.gradient.coupling import Coupled
from anybatch.levers.checkpointing import NotRecomputable
from anybatch.planning.curve import Constants, Size
from anybatch.planning.devices import Target
from anybatch.planning.encoders import Curve, Encoding, OutputFacts, outputs_of
from anybatch.planning.jointlosses import LossTrace, seconds_of_loss, trace_loss
from anybatch.planning.keeping import Encoded, KeptGraphs
from anybatch.planning.lengths import Shapes
from anybatch.planning.optimizer import UpdateTrace
from anybatch.planning.recipe import Recipe
from anybatch.planning.search import Search, Splitting
from anybatch.planning.subjects import Subject
from anybatch.planning.surroundings import around_of, clock_of
from anybatch.records.plans import Confidence, PlanRow
from anybatch.tensors.batches import Part, Splittable
from anybatch.tensors.modules import modules_of

logger = logging.getLogger(__name__)

_FEW = 3  # sizes of micro-batches that are each traced with blocks traded; of more only the one with the most
_NO_LIMIT = 2**62  # an encoder that does not fit as it is may do so with blocks traded
_MOST_TRACES = 8  # of micro-batches with blocks traded, in one search


@dataclass
class Way:
    """A way to run a batch, and what its peak is made of.

    Args:
        row: as the plan shows it.
        graphs: what it takes for any number of kept graphs.
        splitting: how the batch is split.
        traded: a row of the encoder's own search whose levers are taken.
    """

    row: PlanRow
    graphs: KeptGraphs
    splitting: Splitting
    traded: PlanRow | None = None


class CoupledTrack:
    """The search at one precision.

    Args:
        subject: what is planned, with a coupled loss.
        target: the device.
        allow: the levers that may be used.
        autocast: the precision as the plan names it, if it is not the user's own.
    """

    def __init__(self, subject: Subject, target: Target, allow: Sequence[str], autocast: str) -> None:
        if not isinstance(subject.loss_fn, Coupled):
            raise LossError(f"the loss is a {type(subject.loss_fn).__name__}; expected anybatch.Coupled")
        self.subject, self.coupled = subject, subject.loss_fn
        self.encoding = Encoding(subject.loss_fn)
        encoder = replace(subject, loss_fn=self.encoding)
        self.track = Search(encoder, target, [name for name in allow if name != "loss_chunks"], autocast)
        self.autocast = autocast
        self._target = target
        self._outputs: OutputFacts | None = None
        self._loss: LossTrace | None = None
        self._update: UpdateTrace | None = None
        self._seconds_of_loss = 0.0
        self._largest: dict[float | None, Size | Shapes] = {}
        self._graphs: dict[tuple[float, Recipe | None, bool], KeptGraphs] = {}

    def attend(self, splittable: Splittable | None) -> None:
        """Looks at another logical batch, or at none.

        Args:
            splittable: the batch.
        """
        for subject in (self.subject, self.track.subject):
            subject.attend(splittable)
        self.track.profiles.forget_lengths()

    def outgrown(self, parts: Sequence[Part], limit: float | None) -> str:
        """Says which micro-batch of raw samples is larger than those that were planned for; empty if none is.

        Args:
            parts: micro-batches of another batch.
            limit: of their cost or samples.
        """
        profiles = self.track.profiles
        return profiles.lengths.outgrown(parts, self._largest.get(limit), is_exact=profiles.is_fake)

    def forget(self) -> None:
        """Lets go of what was solved by profiles that are not to be trusted any more."""
        self.track.forget()
        self._graphs.clear()

    def fixed(self) -> tuple[int, int, Constants]:
        """The bytes of parameters and of buffers, and what else is alive throughout."""
        profile, _ = self.track.profile(Recipe(), self.splittings[-1])
        modules = modules_of(*self.subject.roots)
        buffers = sum(b.nbytes for module in modules for b in module._buffers.values() if b is not None)
        return sum(p.nbytes for p in self.subject.parameters), buffers, profile.constants

    def look_within(self, budget: int) -> None:
        """Traces what is asked for; what can't run on fake tensors runs for real within a budget.

        Args:
            budget: bytes.
        """
        self.track.look_within(budget, _NO_LIMIT)
        profile, size = self.track.profile(Recipe(), self.splittings[-1])
        if self._outputs is None:
            found = outputs_of(self.track.subject, self.coupled.encode, fake=self.track.profiles.is_fake)
            self._outputs = found.without_values()
        loss = self._loss
        if loss is None or (not loss.is_fake and loss.reaches < self.subject.splittable.rows):
            curve = Curve.of(profile, size, self.outputs, copies=False)
            constants = profile.constants
            state = profile.update.state
            room = budget - curve.fixed - constants.batch - constants.buffers - state
            self._loss = trace_loss(self.subject, self.coupled, self._outputs, self._real_outputs, room)
            trained = self.track.profiles.trained({*profile.fit.trace.trained, *self._loss.trained})
            self._update = self.track.profiles.update_of(trained)
            self._graphs.clear()

    def _real_outputs(self) -> OutputFacts:
        return outputs_of(self.track.subject, self.coupled.encode, fake=False)

    @property
    def splittings(self) -> list[Splitting]:
        """The ways to split the batch as the engine does it for their limit, the fewest micro-batches first."""
        splittable = self.subject.splittable
        if not splittable.has_costs:
            return self.track.splittings
        limits = dict.fromkeys(one.limit for one in self.track.splittings)
        return [Splitting(limit, tuple(splittable.plan(limit, oversized="alone"))) for limit in limits]

    @property
    def outputs(self) -> OutputFacts:
        """What the encoder gives."""
        if self._outputs is None:
            raise LossError("nothing was traced yet")
        return self._outputs

    @property
    def loss(self) -> LossTrace:
        """What the loss takes."""
        if self._loss is None:
            raise LossError("nothing was traced yet")
        return self._loss

    @property
    def update(self) -> UpdateTrace:
        """What the optimizer's step takes."""
        if self._update is None:
            raise LossError("nothing was traced yet")
        return self._update

    def update_peak(self) -> int:
        """The most bytes alive in the update, with the copies of buffers and the logical batch."""
        profile, _ = self.track.profile(Recipe(), self.splittings[-1])
        most = max(self.update.peak, profile.constants.counted + self.update.state)
        return most + 2 * profile.constants.buffers + profile.constants.batch

    def take_times(self, budget: int, patience: float) -> None:
        """Finds out how long the encoder and the loss take.

        Args:
            budget: bytes.
            patience: seconds that the measurements may take, or little more.
        """
        if self.track.times is not None:
            return
        self.track.take_times(budget, patience)
        if not self._target.is_present:
            return
        held = self.graphs(self.splittings[-1]).peak(0)[0]
        if held <= budget:
            self._seconds_of_loss = seconds_of_loss(
                self.subject, self.coupled, self._real_outputs(), clock=lambda: clock_of(self.subject)
            )

    def _in_order(self, splitting: Splitting) -> bool:
        order = [sample for part in splitting.parts for sample in part.samples]
        return order == list(range(len(order)))

    def graphs(self, splitting: Splitting, levers: Recipe | None = None, *, exactly: bool = False) -> KeptGraphs:
        """What a splitting takes, by the number of graphs that are kept.

        Args:
            splitting: how the batch is split.
            levers: what is traded in the encoder; ``None`` for nothing.
            exactly: whether micro-batches of each size are traced with the levers, and not only the one with the most.

        Raises:
            NotRecomputable: a block can't be recomputed.
        """
        key = (splitting.limit, levers, exactly and levers is not None)
        if key not in self._graphs:
            self._graphs[key] = self._made_graphs(splitting, levers, exactly)
        return self._graphs[key]

    def _made_graphs(self, splitting: Splitting, levers: Recipe | None, exactly: bool) -> KeptGraphs:
        search, profiles = self.track, self.track.profiles
        profile, worst = search.profile(Recipe(), splitting)
        accumulators = self.subject.accumulator_bytes(len(splitting.parts) + 1)
        sizes = [profiles.size_of(part) for part in splitting.parts]
        self._largest[splitting.limit] = Size(max(s.samples for s in sizes), max(s.length for s in sizes))
        if profiles.lengths.are_joined:
            sizes = [worst] * len(sizes)
            self._largest[splitting.limit] = worst
        if profiles.lengths.shapes:
            self._largest[splitting.limit] = [profiles.lengths.large(part) for part in splitting.parts]
        curves: dict[Size, Curve] = {}
        heavy = [search.worst(Recipe(), splitting)] * len(sizes) if profiles.lengths.are_joined else splitting.parts
        for part, size in zip(heavy, sizes, strict=True):
            if size in curves:
                continue
            if levers is None:
                own = profiles.profile(Recipe(), size, single=splitting.is_single)
            elif size == worst or (exactly and len(set(sizes)) <= _FEW):
                own = profiles.traced(levers, part, single=splitting.is_single)
            else:
                continue  # no more than the worst of them
            curve = Curve.of(own, size, self.outputs, copies=not self._in_order(splitting))
            # Float32 buffers take the gradients over, so that none are found.
            curves[size] = replace(curve, later=curve.first, gradients=0) if accumulators else curve
        parts = [
            Encoded(len(part.samples), curves.get(size, curves[worst]), profile.fit.input_bytes(size))
            for part, size in zip(splitting.parts, sizes, strict=True)
        ]
        around = around_of(self.subject, self.outputs, self.loss, profile, curves[worst], parts)
        around = replace(
            around, throughout=around.throughout + self.update.state + accumulators,
            shared_gradients=0 if accumulators else around.shared_gradients,
        )  # fmt: skip
        return KeptGraphs(parts, self.outputs, self.loss, around, in_order=self._in_order(splitting))

    def seconds(self, splitting: Splitting, kept: int, levers_seconds: float = 0.0) -> float | None:
        """The predicted time of a logical batch.

        Args:
            splitting: how it is split.
            kept: how many micro-batches keep their graph.
            levers_seconds: what is traded in the encoder takes.
        """
        times = self.track.times
        if not times:
            return None
        both = [times.seconds(part.cost) for part in splitting.parts]
        again = zip(both[: len(both) - kept], splitting.parts, strict=False)
        twice = sum(time * self.encoding.forward_share(len(part.samples)) for time, part in again)
        return sum(both) + twice + levers_seconds + self._seconds_of_loss

    def way(self, splitting: Splitting, kept: int, traded: PlanRow | None = None, *, exactly: bool = False) -> Way:
        """A way to run the batch.

        Args:
            splitting: how it is split.
            kept: how many micro-batches keep their graph.
            traded: a row of the encoder's own search whose levers are taken.
            exactly: whether micro-batches of each size are traced with the levers.
        """
        levers = None if traded is None or not traded.levers else Recipe.of(traded)
        graphs = self.graphs(splitting, levers, exactly=exactly)
        base = self.track.seconds(splitting)
        extra = 0.0 if levers is None or traded is None or base is None else (traded.seconds or 0.0) - base
        row = PlanRow(
            micro_batch_size=splitting.limit,
            micro_batches=len(splitting.parts),
            recompute=() if levers is None else levers.recompute,
            offload=() if levers is None else levers.offload,
            autocast=self.autocast,
            kept_graphs=kept,
            peak_bytes=max(graphs.peak(kept)[0], self.update_peak()),
            seconds=self.seconds(splitting, kept, extra),
            confidence=self.confidence,
        )
        return Way(row, graphs, splitting, traded)

    def exact(self, way: Way, budget: int) -> Way:
        """A way with its peak from traces of every size of micro-batch, in which more graphs may fit.

        Args:
            way: what was found.
            budget: bytes.
        """
        if way.traded is None or not way.traded.levers:
            return way
        kept = self.graphs(way.splitting, Recipe.of(way.traded), exactly=True).most(budget)
        return self.way(way.splitting, kept if kept is not None else way.row.kept_graphs or 0, way.traded, exactly=True)

    @property
    def confidence(self) -> Confidence:
        """How far the traces may be trusted."""
        encoder = self.track.profiles.confidence
        if self.loss.is_fake or encoder == "estimated":
            return encoder
        return "measured" if self.loss.reaches == self.subject.splittable.rows else "estimated"

    def ways(self, budget: int) -> list[Way]:
        """The fastest way of each splitting that fits, with blocks traded only where that may be faster.

        Args:
            budget: bytes.
        """
        found: list[Way] = []
        for splitting in self.splittings:
            kept = self.graphs(splitting).most(budget)
            if kept is not None:
                found.append(self.way(splitting, kept))
        return [*found, *self._traded(budget, found)]

    def _traded(self, budget: int, found: Sequence[Way]) -> list[Way]:
        """Ways with blocks traded, those first that would be the fastest if all graphs were kept."""
        best = min((_time(way.row) for way in found), default=float("inf"))
        if any(way.row.kept_graphs == way.row.micro_batches and way.row.micro_batches == 1 for way in found):
            return []
        candidates = []
        for splitting in self.splittings:
            for row in self.track.front_of(Recipe(), splitting):
                if row.levers:
                    candidates.append(((row.seconds or 0.0) + self._seconds_of_loss, splitting, row))
        candidates.sort(key=lambda one: one[0])
        more: list[Way] = []
        for traces, (least, splitting, row) in enumerate(candidates):
            if least >= best or traces >= _MOST_TRACES:
                break
            way = self._with(splitting, row, budget)
            if way is not None:
                more.append(way)
                best = min(best, _time(way.row))
        return more

    def _with(self, splitting: Splitting, row: PlanRow, budget: int) -> Way | None:
        try:
            kept = self.graphs(splitting, Recipe.of(row)).most(budget)
        except NotRecomputable as error:
            logger.info("%s is left as it is: %s", error.block, error)
            self.track.exclude(error.block)
            return None
        except AnyBatchError as error:
            logger.info("not taken: %s (%s)", row.levers, error)
            return None
        return None if kept is None else self.way(splitting, kept, row)

    def smallest(self) -> Way:
        """The way with the least memory."""
        found = []
        for splitting in self.splittings[-2:]:
            found.append(self.way(splitting, self.graphs(splitting).smallest()))
            search = self.track
            for make in (search.smallest_of, search.everything):
                row = make(Recipe(), splitting)
                if row is None or not row.levers:
                    continue
                try:
                    found.append(self.way(splitting, self.graphs(splitting, Recipe.of(row)).smallest(), row))
                except AnyBatchError as error:
                    logger.info("not taken: %s", error)
        return min(found, key=lambda way: way.row.peak_bytes)

    def front(self) -> list[PlanRow]:
        """Ways worth a look at any budget."""
        found: list[PlanRow] = []
        last = float("inf")
        for splitting in self.splittings:
            if 2 * splitting.limit > last:
                continue
            last = splitting.limit
            count = len(splitting.parts)
            found += [self.way(splitting, kept).row for kept in sorted({0, 1, count // 4, count // 2, count})]
        return found


def _time(row: PlanRow) -> float:
    return float("inf") if row.seconds is None else row.seconds
