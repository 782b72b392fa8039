"""Finds the fastest way to run a step with a coupled loss within a budget of memory."""

import logging
from collections.abc import Sequence

from anybatch.errors import DoesNotFit
from anybatch.planning.advice import begun, least_budget, listed, stopped
from anybatch.planning.coupled import CoupledTrack, Way
from anybatch.planning.devices import Target, usable_bytes
from anybatch.planning.fingerprints import fingerprint_of, shapes_of
from anybatch.planning.keeping import LOSS
from anybatch.planning.planner import LEVERS, settled
from anybatch.planning.predictor import NothingRuns
from anybatch.planning.recipe import Recipe
from anybatch.planning.running import random_state_kept
from anybatch.planning.search import pareto, sorted_rows
from anybatch.planning.subjects import Subject
from anybatch.planning.timing import Times
from anybatch.records.memory import ACTIVATIONS, BUFFERS, GRADIENTS, INPUTS, OPTIMIZER, PARAMETERS
from anybatch.records.plans import ModuleShare, Plan, PlanRow
from anybatch.tensors.batches import Splittable
from anybatch.tensors.modules import modules_of
from anybatch.units import format_bytes

logger = logging.getLogger(__name__)

_Found = tuple[CoupledTrack, Way]


class CoupledPlanner:
    """Plans a step with a coupled loss for any budget, as ``Planner`` does for the others.

    Args:
        subject: what is planned.
        target: the device.
        allow: the levers that may be used, and precisions; the loss itself is computed in blocks of rows only where the
            user says so.
        patience: seconds that may go into measuring times.
        times: what was measured before, for each precision; ``None`` to measure.
        budget: bytes, for a plan that was made before.

    Attributes:
        rows: samples of the logical batch that is planned for.
    """

    def __init__(
        self,
        subject: Subject,
        target: Target,
        *,
        allow: Sequence[str] = LEVERS,
        patience: float = 4.0,
        times: Sequence[Times | None] | None = None,
        budget: int = 0,
    ) -> None:
        self.subject = subject
        self.target = target
        self.rows = subject.splittable.rows
        self._patience = patience
        with random_state_kept(subject.parameters):
            self._tracks = [CoupledTrack(one, target, allow, name) for one, name in subject.at_precisions(allow)]
        for track, known in zip(self._tracks, times or (), strict=False):
            track.track.times = known
        self._usable = self._usable_of(budget)

    def _usable_of(self, budget: int) -> int:
        profiles = self._tracks[0].track.profiles
        return usable_bytes(budget, self.target, profiles.confidence, varies=profiles.varies)

    @property
    def times(self) -> list[Times | None]:
        """What was measured, for each precision."""
        return [track.track.times for track in self._tracks]

    def attend(self, splittable: Splittable | None) -> None:
        """Looks at another logical batch with the same samples and shapes, or at none, to let go of the last one.

        Args:
            splittable: the batch.
        """
        for track in self._tracks:
            track.attend(splittable)

    def outgrown_parts(self, splittable: Splittable, limit: float | None, row: PlanRow) -> str:
        """Says which micro-batch of raw samples is larger than planned for; empty if none is.

        Args:
            splittable: the batch.
            limit: the padded cost of a micro-batch.
            row: the plan that is followed.
        """
        track = next(track for track in self._tracks if track.autocast == row.autocast)
        self.attend(splittable)
        with random_state_kept(self.subject.parameters):
            return track.outgrown(splittable.plan(limit, oversized="alone"), limit)

    def plan(self, budget: int, *, race: bool = True) -> Plan:
        """Finds the fastest way within a budget.

        Args:
            budget: bytes.
            race: whether times may be measured now.

        Returns:
            The plan.

        Raises:
            DoesNotFit: nothing does; it says how many bytes the smallest way needs and what holds them.
        """
        with random_state_kept(self.subject.parameters):
            profiles = [track.track.profiles for track in self._tracks]
            try:
                return settled(profiles, lambda: self._planned(budget, race), self._forget)
            except NothingRuns as error:
                raise stopped(error.needed, budget, self._usable_of, self.subject.bytes_beside) from None

    def _forget(self) -> None:
        for track in self._tracks:
            track.forget()

    def _planned(self, budget: int, race: bool) -> Plan:
        usable = self._usable = self._usable_of(budget)
        for track in self._tracks:
            track.look_within(usable)
        usable = self._usable = self._usable_of(budget)  # it is known now how far traces may be trusted
        if self._tracks[0].update_peak() > usable:
            raise self._does_not_fit(budget)
        for track in self._tracks:
            track.take_times(usable, self._patience / 2)
        found: list[_Found] = [(track, way) for track in self._tracks for way in track.ways(usable)]
        if not found:
            smallest = self._smallest()
            if smallest[1].row.peak_bytes > usable:
                raise self._does_not_fit(budget)
            found = [smallest]
        rows = {id(way.row): (track, way) for track, way in found}
        ranked = [rows[id(row)] for row in sorted_rows(way.row for _, way in found)]
        track, way = ranked[0]
        plan = self._plan(track, track.exact(way, usable), budget, [other.row for _, other in ranked[1:]])
        logger.info("planned: %s", plan)
        return plan

    def _smallest(self) -> _Found:
        return min(((track, track.smallest()) for track in self._tracks), key=lambda pair: pair[1].row.peak_bytes)

    def _plan(self, track: CoupledTrack, way: Way, budget: int, others: list[PlanRow]) -> Plan:
        row = way.row
        is_single = track.splittings[0].is_single
        whole = track.way(track.splittings[0], 1).row.peak_bytes if is_single else 0
        front = [one for one_track in self._tracks for one in one_track.front()]
        smallest = self._smallest()[1].row
        return Plan(
            chosen=row,
            alternatives=tuple(pareto([row, *others, *front, smallest])),
            budget=budget,
            samples=self.rows,
            device=self.target.name,
            whole_bytes=whole,
            smallest_bytes=least_budget(smallest.peak_bytes, self._usable_of, self.subject.bytes_beside),
            at_peak=self._at_peak(track, way),
            binding=self._binding(track, way),
            modules=tuple(self._shares(track, row)),
            relative_time=not self.target.is_present,
            shapes=shapes_of(self.subject),
            copies_batch=bool(self.subject.writes_batch),
            fingerprint=fingerprint_of(track.subject, self.target),
        )

    def _at_peak(self, track: CoupledTrack, way: Way) -> dict[str, int]:
        """The bytes at the peak by category; what is left over are activations, outputs of the encoder among them."""
        row = way.row
        if row.peak_bytes == track.update_peak() and row.peak_bytes > way.graphs.peak(row.kept_graphs or 0)[0]:
            return dict(track.update.at_peak)
        parameters, buffers, constants = track.fixed()
        found = {
            PARAMETERS: parameters,
            BUFFERS: buffers + constants.buffers,
            OPTIMIZER: track.update.state,
            INPUTS: constants.batch + way.graphs.around.inputs,
            GRADIENTS: way.graphs.gradients_at_peak(row.kept_graphs or 0),
        }
        found[ACTIVATIONS] = max(0, row.peak_bytes - sum(found.values()))
        return {name: count for name, count in found.items() if count}

    def _binding(self, track: CoupledTrack, way: Way) -> str:
        row = way.row
        peak, where = way.graphs.peak(row.kept_graphs or 0)
        if row.peak_bytes > peak:
            return (
                f"Peak: {track.update.operation} in the optimizer's step, {format_bytes(row.peak_bytes)}, below which "
                "only an optimizer with less state helps."
            )
        kept = "" if not row.kept_graphs else f", with {row.kept_graphs} of {row.micro_batches} graphs kept"
        text = f"Peak: {where}{kept}, {format_bytes(peak)}."
        if where == LOSS:
            text += f" {self._advice(track)}."
        return text

    def _advice(self, track: CoupledTrack) -> str:
        text = f"The loss takes {format_bytes(track.loss.peak)} on the outputs of all samples"
        block = track.coupled.row_block
        if block is None:
            return f"{text}; Coupled(row_block=...) computes it for some rows at a time"
        return f"{text}, {block} rows at a time; a smaller row_block lowers that"

    def _shares(self, track: CoupledTrack, row: PlanRow) -> list[ModuleShare]:
        splitting = next(one for one in track.splittings if one.limit == row.micro_batch_size)
        profile, size = track.track.profile(Recipe(), splitting)
        times = track.track.times
        cost = track.track.worst(Recipe(), splitting).cost

        def seconds(name: str) -> float | None:
            return times.forward(cost, name) if times else None

        return profile.shares(size, len(splitting.parts), self._parameter_bytes, seconds)

    def _parameter_bytes(self, block: str) -> int:
        module = self.subject.model.get_submodule(block)
        own = (p for one in modules_of(module) for p in one._parameters.values() if p is not None)
        return sum(p.numel() * p.element_size() for p in own)

    def _does_not_fit(self, budget: int) -> DoesNotFit:
        track, way = self._smallest()
        row = way.row
        peak, where = way.graphs.peak(row.kept_graphs or 0)
        beside = self.subject.bytes_beside
        holders = sorted(self._shares(track, row), key=lambda one: -(one.parameter_bytes + one.activation_bytes))[:5]
        if row.peak_bytes > peak:
            where = "the optimizer's step"
            remedy = "Use an optimizer with less state, or train fewer parameters with anybatch.freeze"
        elif where == LOSS:
            remedy = self._advice(track)
        else:
            remedy = "Use smaller samples, a smaller encoder, or autocast=torch.bfloat16; blocks= names more to trade"
        return DoesNotFit(
            f"{begun(row, budget, self._usable_of, beside)}, in {where}. At its peak: "
            f"{listed(self._at_peak(track, way), beside)}. The blocks that hold most: "
            + (
                ", ".join(
                    f"{one.name} ({format_bytes(one.parameter_bytes)} parameters, "
                    f"{format_bytes(one.activation_bytes)} kept)"
                    for one in holders
                )
                or "none were found"
            )
            + f". {remedy}",
            needed=least_budget(row.peak_bytes, self._usable_of, beside),
            budget=budget + beside,
            modules=[one.name for one in holders],
        )
