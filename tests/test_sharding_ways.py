"""A budget chooses whether FSDP2's parameters stay gathered during a step, on all ranks alike; see ``keeping``."""

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anybatch
from anybatch.parallel.keeping import Keeping
from anybatch.planning import ways
from anybatch.planning.growing import Seen
from plan_ranks_models import payloads
from ranks_running import Case, assert_same_everywhere, run_cases
from reference import assert_float64
from sharding_models import parts, runs_on_cpu, sharded, whole_weights
from test_sharding_memory import LENGTH, Blocks, adamw, known_peaks, peak_of, square
from test_sharding_memory import rows_of as many_rows_of

BUDGET = 300_000
GATHERS, REDUCES = "all-gather of parameters", "reduce-scatter of gradients"
UNITS = 3
STEPS = 24


class Clock:
    """A step takes as long as the way that it went."""

    def __init__(self, step: anybatch.TrainStep, in_parts: float, kept: float) -> None:
        self._step, self._takes, self._now = step, (in_parts, kept), 0.0

    def __call__(self) -> float:
        self._now += self._takes[keeping_of(self._step).is_kept]
        return self._now


def rows_of(rank: int, seed: int = 0, length: int = LENGTH) -> torch.Tensor:
    return many_rows_of(rank, seed, rows=16, length=length)


def keeping_of(step: anybatch.TrainStep) -> Keeping:
    found: Keeping = step._settings.reducer.keeping
    return found


def clocked(step: anybatch.TrainStep, in_parts: float, kept: float) -> Any:
    return mock.patch.object(ways, "time", SimpleNamespace(perf_counter=Clock(step, in_parts, kept)))


def step_of(model: torch.nn.Module, memory: Any = BUDGET, loss_fn: Any = square) -> anybatch.TrainStep:
    return anybatch.TrainStep(model, loss_fn, adamw(model), memory=memory, clip_norm=1.0)


def wrapped() -> torch.nn.Module:
    return sharded(reshards=True)(Blocks())


def took(step: anybatch.TrainStep, batch: torch.Tensor) -> tuple[bool, int]:
    """Trains; whether all was gathered, and the micro-batches, with the collectives of that way counted."""
    with payloads() as sent:
        out = step(batch)
    kept = keeping_of(step).is_kept
    assert_same_everywhere(kept)
    if kept:
        assert (sent[GATHERS][0], sent[REDUCES][0]) == (UNITS, UNITS), sent
    elif len(out.attempts) == 1:
        assert sent[GATHERS][0] >= out.micro_batches * (2 * UNITS - 1)
        assert sent[REDUCES][0] >= out.micro_batches * UNITS
    return kept, out.micro_batches


def chooses(rank: int, world: int, *, kept: float) -> None:
    """Both ways are timed where both fit, no call holds more than the budget, and the gradient is the same in both."""
    model, alone = wrapped(), Blocks()
    step = step_of(model)
    one = anybatch.TrainStep(alone, square, adamw(alone), group=False, clip_norm=1.0)
    went: list[bool] = []
    chosen = 0
    with clocked(step, 1.0, kept):
        while chosen < 2:  # how soon sizes settle is not the same in every run
            seed = len(went)
            assert seed < 80
            peak, _ = peak_of(step, rows_of(rank, seed))
            one(torch.cat([rows_of(other, seed) for other in range(world)]))
            assert_float64(whole_weights(model), list(alone.parameters()), f"the weights after step {seed}")
            assert peak <= BUDGET, (seed, peak)
            went.append(keeping_of(step).is_kept)
            chosen += keeping_of(step).faster is not None
    assert not any(went[:5])
    assert 3 <= sum(went) < len(went)
    assert went[-1] is (kept < 1.0), went
    assert went[-1] is keeping_of(step).faster
    if kept < 1.0:
        assert went == sorted(went), went
    assert took(step, rows_of(rank))[0] is went[-1]
    before = took(step, rows_of(rank))[1]
    step.evaluate(rows_of(rank))
    assert took(step, rows_of(rank)) == (went[-1], before)


def no_room(rank: int, world: int) -> None:
    """One rank that has no room keeps all in parts, and nothing is timed any more."""
    step = step_of(wrapped(), memory=250_000 if rank else "1GiB")
    with clocked(step, 1.0, 0.5):
        assert not any(took(step, rows_of(rank, seed))[0] for seed in range(STEPS))
    assert keeping_of(step).faster is False
    assert (keeping_of(step).has_room is False) is (rank == 1)
    with clocked(step, 1.0, 0.5), mock.patch.object(Clock, "__call__", side_effect=AssertionError):
        step(rows_of(rank))


def by_the_switch(rank: int, world: int) -> None:
    """What the user's switch keeps gathered stays so; switched between two steps, there is a choice."""
    model: Any = sharded(reshards=False)(Blocks())
    step = step_of(model)
    with clocked(step, 1.0, 0.5):
        for seed in range(STEPS):
            step(rows_of(rank, seed))
            assert not keeping_of(step).is_free
            assert not step._settings.reducer.keeps_step
        model.set_reshard_after_forward(True)
        step(rows_of(rank))
        assert step._settings.reducer.keeps_step
        went = [took(step, rows_of(rank, seed))[0] for seed in range(STEPS)]
    assert went[-1]


def runs_out(rank: int, world: int, *, after: int, sample: bool) -> None:
    """Memory that runs out on one rank with everything gathered sends all on in parts, in the same call and later."""
    fails = [False]

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        if fails[0] and rank == 1 and keeping_of(step).is_kept:
            fails[0] = False
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return loss

    model, alone = wrapped(), Blocks()
    step = step_of(model, loss_fn=loss_fn)
    one = anybatch.TrainStep(alone, square, adamw(alone), group=False, clip_norm=1.0)
    kept: list[bool] = []
    attempts: list[int] = []
    with clocked(step, 1.0, 0.5):
        for seed in range(STEPS):
            fails[0] = sum(kept) == after
            if sample and fails[0]:
                keeping_sizes_at_one(step)
            out = step(rows_of(rank, seed))
            one(torch.cat([rows_of(other, seed) for other in range(world)]))
            assert_float64(whole_weights(model), list(alone.parameters()), f"the weights after step {seed}")
            kept.append(keeping_of(step).is_kept)
            attempts.append(len(out.attempts))
    assert_same_everywhere(sum(kept))
    assert sum(kept) == after
    assert sorted(attempts) == [1] * (STEPS - 1) + [2]
    assert kept == [False] * (attempts.index(2) - after) + [True] * after + [False] * (STEPS - attempts.index(2))
    assert keeping_of(step).faster is False
    assert step.updates == STEPS


def keeping_sizes_at_one(step: anybatch.TrainStep) -> None:
    """As if only micro-batches of one sample had fitted with everything gathered."""
    follower: Any = step._follower
    growth = follower._ways._kept.growth
    growth.ran_out(1)


def longer(rank: int, world: int) -> None:
    """Samples that are longer on one rank send all on in parts at once; later all is gathered again."""
    step = step_of(wrapped(), memory="2MiB")
    with clocked(step, 1.0, 0.5):
        assert [took(step, rows_of(rank, seed))[0] for seed in range(STEPS)][-1]
        went = [took(step, rows_of(rank, seed, length=LENGTH * (1 + rank)))[0] for seed in range(STEPS)]
    assert not any(went[:5])
    assert went[-1]


def empty(rank: int, world: int) -> None:
    """A rank that has no samples for a while takes part in either way."""
    step = step_of(wrapped())
    with clocked(step, 1.0, 0.5):
        went = [took(step, rows_of(rank, seed)[: 0 if rank and seed < 3 else None])[0] for seed in range(STEPS)]
        assert went[-1]
        assert took(step, rows_of(rank)[: 0 if rank else None])[0]
        assert took(step, rows_of(rank))[0]


def goes_on(rank: int, world: int) -> None:
    """Saved at any time, a step goes on in the way and with the sizes of one that was not."""
    found = []
    for saved_after in (None, 8, 13, 20):
        model = wrapped()
        optimizer, went = adamw(model), []
        step = anybatch.TrainStep(model, square, optimizer, memory=BUDGET)
        with known_peaks(60_000, 20_000), clocked(step, 1.0, 0.5):
            for seed in range(STEPS):
                if seed == saved_after:
                    state = step.state_dict()
                    step = anybatch.TrainStep(model, square, optimizer, memory=BUDGET)
                    step.load_state_dict(state)
                    ways.time.perf_counter._step = step  # type: ignore[attr-defined]
                out = step(rows_of(rank, seed))
                went.append((keeping_of(step).is_kept, out.micro_batches))
        found.append((went, parts(model)))
        assert went[-1][0]
    for each in found:
        assert each == found[0]


CASES: Mapping[str, Case] = {
    "kept is faster": partial(chooses, kept=0.5),
    "kept is slower": partial(chooses, kept=2.0),
    "no room": no_room,
    "by the switch": by_the_switch,
    **{f"runs out after {n}": partial(runs_out, after=n, sample=False) for n in (0, 6)},
    "runs out with one sample": partial(runs_out, after=3, sample=True),
    "longer": longer,
    "empty": empty,
    "goes on": goes_on,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_cases("test_sharding_ways", 2, tmp_path_factory.mktemp("ways"))


@runs_on_cpu
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]


SECONDS = st.none() | st.floats(0.1, 9.0)
TELLS = st.tuples(st.booleans(), st.sampled_from([None, False, True]), st.floats(0.1, 9.0), SECONDS)


@given(st.lists(st.lists(TELLS, min_size=3, max_size=3), max_size=8))
def test_ranks_never_go_different_ways(rounds: list[list[tuple[bool, bool | None, float, float | None]]]) -> None:
    ranks = [Keeping() for _ in range(3)]
    for told in rounds:
        for one, (takes_back, has_room, in_parts, kept) in zip(ranks, told, strict=True):
            one.has_room, one.seconds = has_room, (in_parts, kept)
            one.is_free = True
            one.begin()
            if takes_back or not has_room:
                one.take_back()
        all_want = all(one.wants for one in ranks)
        heard = [one.tells() for one in ranks]
        for one in ranks:
            one.hear(heard)
        assert {one.is_kept for one in ranks} == {all_want}
        assert len({(one.agreed, one.faster) for one in ranks}) == 1
        if any(has_room is not True for _, has_room, *_ in told):
            assert not ranks[0].agreed


SIZES = st.integers(1, 10**9)


@given(st.integers(1, 64), SIZES, SIZES, SIZES)
def test_what_is_tried_first_fits(samples: int, taken: int, gathered: int, room: int) -> None:
    """What a sample takes in parts is at least what it takes on top of everything gathered."""
    known = ways.Ways()
    known._first.growth.note(Seen(samples, taken, 4))
    known._first.seconds.extend([1.0] * 3)
    keeping = Keeping(lambda: gathered)
    keeping.is_free = keeping.agreed = True
    keeping.begin()
    known.choose(keeping, room, 4 * samples, 0)
    most = next((m for m in range(samples, 0, -1) if gathered + m * taken / samples <= room), 0)
    assert keeping.has_room is bool(most)
    assert keeping.wants is bool(most)
    if most:
        seen = known.growth.seen
        assert seen is not None
        assert seen.samples == most
        assert known.growth.size(room, 4 * samples, 0) >= most
