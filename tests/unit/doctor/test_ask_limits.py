"""Questions end at their time limit, hold little memory, and look at some entries of what is large."""

import math
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from anybatch.doctor.ask import asking, trials
from anybatch.doctor.ask import steps as asked_steps
from anybatch.doctor.ask.functions import flat
from anybatch.doctor.ask.sampling import Sampling
from anybatch.doctor.ask.steps import Question, Step, replayed
from anybatch.doctor.ask.tape import Loss, Tape
from anybatch.doctor.ask.trials import Unknown
from test_doctor_ask import asked, nothing_was_compiled

__all__ = ["nothing_was_compiled"]


def written(*, inplace: bool) -> tuple[Tape, torch.Tensor]:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 1))
    tape = Tape([id(one) for one in net.parameters()], net)
    x = torch.randn(16, 4)
    tape.start()
    loss = net(x).mean()
    tape.loss(loss)
    tape.stop()
    return tape, loss


def test_a_step_is_not_run_again_after_the_limit() -> None:
    tape, loss = written(inplace=False)
    assert torch.equal(replayed(tape, tape.losses[0]).values[tape.losses[0].slot], loss)
    tape.until = time.perf_counter() - 1
    with pytest.raises(Unknown, match="no time left"):
        replayed(tape, tape.losses[0])


def test_operations_without_a_slope_are_sought_with_one_backward_until_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slopes, calls, nothing = Step.slopes, list[int](), cast("Any", None)

    def counted(step: Step, *made: Any) -> Any:
        calls.append(len(made))
        return slopes(step, *made)

    monkeypatch.setattr(Step, "slopes", counted)
    step = Step(written(inplace=False)[0], 0, nothing, nothing, {}, math.inf)
    assert (list(flat.ask(step)), len(calls)) == ([], 1)
    step.until = time.perf_counter() - 1
    with pytest.raises(Unknown, match="no time left"):
        list(flat.ask(step))


@pytest.mark.parametrize("inplace", [True, False])
def test_what_each_operation_gave_stays_as_it_was_then(inplace: bool) -> None:
    tape, _ = written(inplace=inplace)
    last: Loss = tape.losses[0]
    found = {one.name: given[0] for one, given in zip(tape.operations, replayed(tape, last).results, strict=True)}
    first = next(given[0] for one, given in zip(tape.operations, replayed(tape, last).results, strict=True)
                 if one.name == "linear")  # fmt: skip
    assert tape.rewrites is inplace
    assert bool((first < 0).any())
    assert not bool((found["relu"] < 0).any())


def trains() -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.randn(16, 4)).pow(2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize(("free", "is_asked"), [(1000, False), (10**9, True)])
def test_a_step_that_the_host_has_no_room_for_is_left_out(
    monkeypatch: pytest.MonkeyPatch, free: int, is_asked: bool
) -> None:
    monkeypatch.setattr(asking, "free_bytes", lambda device: free)
    assert any("more memory to run again" in one.detail for one in asked(trains, "step")) is not is_asked
    assert bool(asked(trains, "related")) is is_asked


def test_a_step_that_takes_long_is_trained_with_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a view counts them."""
    net, x, nothing = nn.Linear(4, 2), torch.randn(16, 3, 4), cast("Any", None)
    tape = Tape([id(one) for one in net.parameters()], net)
    tape.start()
    tape.loss((net(x).view(48, 2) - 1).pow(2).mean())
    tape.stop()
    tape.rows = 16
    monkeypatch.setattr(asked_steps, "_SHORT", 1e6)
    assert Step(tape, 0, nothing, nothing, {}, math.inf).fewer == (None, None)
    monkeypatch.setattr(asked_steps, "_SHORT", 1e-12)
    change, number = Step(tape, 0, nothing, nothing, {}, math.inf).fewer
    assert [len(change(one)) for one in (x, torch.zeros(5, 4))] == [8, 5]
    assert [number(one) for one in (16, 48, 3, 0.5)] == [8, 24, 3, 0.5]


@pytest.mark.parametrize("optimizers", [1, 2])
def test_questions_that_run_a_step_many_times_have_a_share_of_the_time_left(
    monkeypatch: pytest.MonkeyPatch, optimizers: int
) -> None:
    """Where those before take all of theirs, which is a share of each step's part."""
    left: list[float] = []

    def waits(step: Step) -> Any:
        while time.perf_counter() < step.until:
            time.sleep(0.01)
        yield from ()

    def looks(step: Step) -> Any:
        left.append(step.until - time.perf_counter())
        yield from ()

    early = SimpleNamespace(waits=Question("waits", waits, False))
    late = SimpleNamespace(looks=Question("looks", looks, False))
    monkeypatch.setattr(asking, "OF_A_STEP", (early, late))
    monkeypatch.setattr(asking, "_LONG", (late,))
    tapes = {number: written(inplace=False)[0] for number in range(optimizers)}
    kept = SimpleNamespace(tapes=tapes, earlier={}, batches=(), names=())
    monkeypatch.setattr(asking, "OF_A_RUN", ())
    monkeypatch.setattr("anybatch.doctor.ask.adversaries.helped", lambda kept: iter(()))
    list(asking.asked(cast("Any", kept), cast("Any", None), {}, time.perf_counter() + 1.0))
    assert len(left) == optimizers
    assert all(one > 0.2 for one in left)


class Large(nn.Module):
    """Holds what is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.rows = [torch.zeros(1000) for _ in range(3)]
        self.register_buffer("bank", torch.zeros(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Reads neither."""
        y: torch.Tensor = self.inner(x)
        return y


@pytest.mark.parametrize(("most", "fits"), [(15_000, False), (20_000, True)])
def test_what_a_model_holds_beside_its_parameters_is_copied_too(
    monkeypatch: pytest.MonkeyPatch, most: int, fits: bool
) -> None:
    monkeypatch.setattr(trials, "MOST_BYTES", most)
    if fits:
        trials.Trial(Large(), (torch.ones(2, 4),), {}, math.inf)
    else:
        with pytest.raises(Unknown, match="larger ones are not copied"):
            trials.Trial(Large(), (torch.ones(2, 4),), {}, math.inf)


def test_other_threads_have_the_whole_of_a_stream_while_questions_are_asked(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []
    with trials.undisturbed():
        sys.stdout.write("lost")
        thread = threading.Thread(target=lambda: seen.extend([sys.stdout.encoding, sys.stdout.write("kept")]))
        thread.start()
        thread.join()
    assert seen == [sys.stdout.encoding, 4]
    assert capfd.readouterr().out == "kept"


def test_a_question_that_leaves_the_script_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves(kept: Any, run: Any) -> Any:
        sys.exit(3)

    monkeypatch.setattr(asking, "OF_A_RUN", (SimpleNamespace(about_leaves=leaves), *asking.OF_A_RUN))
    assert [one.detail for one in asked(trains, "leaves")] == ["SystemExit: 3"]
    assert asked(trains, "related")


def rows_of(given: torch.Tensor, level: Any) -> list[tuple[float, float]]:
    sampling = Sampling()
    sampling.train(nn.Identity(), (given, level), {})
    return sampling.trained[1, given.shape[1:]]


@pytest.mark.parametrize("shape", [(4096, 3), (8, 3, 96, 96)])
def test_rows_of_large_inputs_are_told_by_some_of_their_entries(shape: tuple[int, ...]) -> None:
    level = torch.rand(shape[0])
    given = level.view(-1, *[1] * (len(shape) - 1)).sqrt() * torch.randn(shape)
    rows = rows_of(given, level)
    assert len(rows) == min(shape[0], 1024)
    assert all(one in set(level.double().tolist()) for one, _ in rows)
    if len(shape) > 2:
        assert all(abs(size - math.log(one)) < 0.2 for one, size in rows)


def test_what_gives_back_what_it_is_given_is_no_write() -> None:
    net, x, tape = nn.Linear(4, 1), torch.randn(16, 4), Tape()
    tape.start()
    tape.loss(net(x.contiguous()).contiguous().mean())
    tape.stop()
    assert any(set(one.outs) & set(one.given) for one in tape.operations)
    assert not tape.rewrites
    values = replayed(tape, tape.losses[0]).values
    assert all(values[slot] is tape.leaves[slot] for slot in tape.leaves)  # nothing writes to it


class Neighbours(nn.Module):
    """Adds to each row the one that an index names."""

    def forward(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Gives as many rows."""
        return rows + rows[index[0]]


@pytest.mark.parametrize(("net", "rows"), [("rows", 32), ("neighbours", 64)])
def test_of_a_large_input_some_rows_are_asked_about_where_these_run(net: str, rows: int) -> None:
    given = torch.randn(64, 8)
    index = torch.arange(63, -1, -1)[None]
    trial = (
        trials.Trial(nn.Linear(8, 2), (given,), {}, math.inf)
        if net == "rows"
        else trials.Trial(Neighbours(), (given, index), {}, math.inf)
    )
    assert trial.within(given.nbytes // 2).rows == rows
    assert trial.within(given.nbytes) is trial.inputs
