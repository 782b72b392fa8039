"""All questions that are asked of what was kept of a run."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from anybatch.doctor.ask import (
    adversaries,
    agreeing,
    arguments,
    axes,
    collating,
    copies,
    edges,
    fitting,
    flows,
    functions,
    ideals,
    labels,
    late,
    masks,
    mixing,
    negatives,
    outweighing,
    overlaps,
    pairing,
    relating,
    rows,
    sampling,
    schedules,
    seeds,
    selecting,
    source,
    starting,
    states,
    uncounted,
    weighing,
)
from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.tape import Tape
from anybatch.doctor.ask.trials import FAILURES, Unknown
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

Question = Callable[[Kept, Run], Iterator[Probed]]
OBSERVED: tuple[Question, ...] = (
    copies.about_copies, copies.about_evaluation, copies.about_inputs, source.about_fields, source.about_splits,
    source.about_lists, source.about_methods, schedules.about_plateaus, schedules.about_own_states, schedules.about_nan,
    functions.about_functions, axes.about_padding, axes.about_several, axes.about_given, uncounted.about_uncounted,
    uncounted.about_ends, selecting.about_best, collating.about_collates, seeds.about_seeds,
    schedules.about_resumed, sampling.about_sampling, states.about_states,
)  # fmt: skip
"""What needs no more than a look at what was kept."""

OF_A_STEP: tuple[tuple[str, Callable[[Tape], Probed]], ...] = (
    ("rows", rows.torn), ("repeated rows", rows.repeated), ("sums", rows.mixed_sums), ("itself", rows.of_itself),
    ("dropped", rows.dropped),
    ("own negative", negatives.own_negative), ("easiest", negatives.easiest), ("edges", edges.not_offset),
    ("degrees", edges.times_degrees), ("axes", axes.turned),
    ("target given", axes.given_away), ("blank", axes.blank),
    ("softmax axis", weighing.softmax_axis), ("hidden tokens", weighing.hidden_tokens), ("rewarded", weighing.rewarded),
    ("punished", weighing.punished), ("signs", axes.unsigned),
    ("misplaced", weighing.misplaced), ("unlikely", weighing.unlikely), ("forgotten", functions.forgotten),
    ("not carried", functions.not_carried),
    ("flat", functions.flat), ("quantised", functions.quantised), ("twice", functions.twice),
    ("uncounted", uncounted.masked_out), ("rates", arguments.rates), ("class weights", arguments.class_weights),
    ("weighed late", late.weighed_late), ("drawn targets", arguments.drawn_targets),
    ("indices", arguments.of_indices), ("drowned", arguments.drowned), ("weighed away", weighing.weighed_away),
    ("mixed apart", mixing.mixed_apart), ("passed", flows.passed), ("unseen errors", ideals.unseen_errors),
)  # fmt: skip
"""What is asked of a step that was written down."""


def asked(kept: Kept, run: Run, modules: Mapping[int, Any], until: float) -> Iterator[Probed]:
    """The answers of all questions; one that fails leaves the others theirs."""
    for question in OBSERVED:
        try:
            yield from question(kept, run)
        except (*FAILURES, Unknown) as error:
            yield Probed(probe=question.__name__, root=-1, detail=f"{type(error).__name__}: {error}"[:300])
    for number, tape in sorted(kept.tapes.items()):
        for name, of_tape in OF_A_STEP:
            yield _answer(name, until, of_tape, tape, optimizer=number)
        yield _answer("overlap", until, overlaps.apart, kept, tape, optimizer=number)
        yield _answer("mispaired", until, pairing.mispaired, kept, tape, optimizer=number)
        yield _answer("outweighed", until, outweighing.outweighed, kept, tape, until, optimizer=number)
        yield _answer("start", until, starting.too_large, kept, tape, run, optimizer=number)
        yield _answer("rate", until, fitting.other_rate, kept, tape, number, run, until, optimizer=number)
        yield _answer("only agreeing", until, agreeing.only_agreeing, tape, number, run, modules, optimizer=number)
        yield _answer("related", until, relating.related, tape, number, until, optimizer=number)
    try:
        yield from adversaries.helped(kept.tapes, kept.initial)
    except FAILURES as error:
        yield Probed(probe="helped", root=-1, detail=f"{type(error).__name__}: {error}"[:300])
    for root in kept.batches:
        yield _answer("apart", until, masks.apart, kept, root)
        yield _answer("labels", until, labels.unrelated, kept, modules.get(root), root, until)


def _answer(name: str, until: float, question: Callable[..., Probed], *args: Any, optimizer: int = -1) -> Probed:
    try:
        if time.perf_counter() > until:
            raise Unknown("there was no time left")
        return question(*args)
    except (*FAILURES, Unknown) as error:
        why = str(error) if isinstance(error, Unknown) else f"{type(error).__name__}: {error}"
        return Probed(probe=name, root=-1, detail=why[:300], evidence={"optimizer": optimizer})
