"""What fails on one rank: all ranks start again together, or all of them end, and nobody steps alone."""

import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import anybatch
from ranks_running import Case, assert_same_everywhere, assert_weights_same, everywhere, hashed, raised, run_cases
from reference import assert_bitwise, assert_float64, gradients_of, whole_gradients
from test_ranks_exact import Net, batches_of, joined, mean_loss


class Backward(torch.autograd.Function):
    """Runs out of memory in its backward when it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: Any) -> torch.Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.fault("backward")
        return gradients[0], None


back: Any = Backward.apply


class Fault:
    """Raises at a place, once, in a micro-batch counted from 1 over all attempts.

    Args:
        place: ``"forward"`` or ``"backward"``.
        number: of the micro-batch.
        error: what is raised.
    """

    def __init__(self, place: str, number: int, error: BaseException) -> None:
        self.place, self.number, self.error = place, number, error
        self.seen = 0
        self.has_raised = False

    def __call__(self, place: str) -> None:
        if place != self.place:
            return
        self.seen += 1
        if self.seen == self.number:
            self.has_raised = True
            raise self.error


def faulty(fault: Any) -> Any:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        fault("forward")
        out = torch.nn.functional.dropout(back(model(batch["x"]), fault), 0.3)
        loss: torch.Tensor = (out.sum(1) - batch["z"]).square().mean()
        return loss

    return loss_fn


def nothing(place: str) -> None:
    """No fault."""


def shortage() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory: tried to allocate")


def out_of_memory(rank: int, world: int, *, place: str, number: int, wrap: Any = None, where: int = 1) -> None:
    """Memory runs out once on one rank: as if all had begun with micro-batches of half the size."""
    outcomes = []
    for fault, size in ((Fault(place, number, shortage()) if rank == where else nothing, 4), (nothing, 2)):
        torch.manual_seed(50 + rank)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        wrapped = model if wrap is None else wrap(model)
        step = anybatch.TrainStep(wrapped, faulty(fault), optimizer, micro_batch_size=size, clip_norm=1.0)
        out = step(batches_of((7, 10))[rank])
        assert_weights_same(model)
        assert_same_everywhere([out.loss, out.count, out.grad_norm, step.updates, step._limit.value])
        assert step.updates == 1
        outcomes.append((list(model.parameters()), out, torch.rand(1)))
        if size == 4:
            assert [one.outcome for one in out.attempts] == ["out of memory", "done"]
            assert f"rank {where}" in out.attempts[0].where or rank == where
            assert step._limit.value == 2
        assert step(batches_of((7, 10), 1)[rank]).attempts[-1].outcome == "done"
        assert_weights_same(model)
    (found, one, drawn), (expected, other, drawn_too) = outcomes
    assert_bitwise([p.detach() for p in found], [p.detach() for p in expected])
    assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    assert torch.equal(drawn, drawn_too)


def repeatedly(rank: int, world: int) -> None:
    """Both ranks run out, one after the other, in other places, until single samples are left."""

    class Limited:
        def __call__(self, model: Any, batch: Any) -> torch.Tensor:
            if len(batch["x"]) > (3 if rank == 0 else 1):
                raise shortage()
            return mean_loss(model, batch)

    model = Net()
    step = anybatch.TrainStep(model, Limited(), torch.optim.SGD(model.parameters(), lr=0.0))
    batches = batches_of((9, 12))
    out = step(batches[rank])
    assert_same_everywhere(step._limit.value)
    assert step._limit.value == 1
    assert_float64(gradients_of(model), whole_gradients(Net(), mean_loss, joined(batches))[0])
    assert out.micro_batches == (9, 12)[rank]


def in_backward_verb(rank: int, world: int) -> None:
    model, batches = Net(), batches_of((4, 6))
    fault = Fault("forward", 1, shortage()) if rank == 0 else nothing

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        fault("forward")
        return mean_loss(model, batch)

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    out = anybatch.backward(model, loss_fn, batches[rank])
    expected, _ = whole_gradients(Net(), mean_loss, joined(batches))
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad -= 1
    assert_float64(gradients_of(model), expected)
    assert len(out.attempts) == 2


def does_not_fit(rank: int, world: int) -> None:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        if rank == 1:
            raise shortage()
        return mean_loss(model, batch)

    model = Net()
    before = hashed(model.parameters())
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=1.0))
    error = raised(lambda: step(batches_of((5, 3))[rank]))
    assert type(error) is anybatch.DoesNotFit, error
    assert "rank 1" in str(error)
    assert_same_everywhere(str(error))
    assert hashed(model.parameters()) == before
    assert step.updates == 0
    assert gradients_of(model) == [None] * len(list(model.parameters()))


def user_error(rank: int, world: int, *, place: str, number: int, wrap: Any = None) -> None:
    """An exception on one rank ends the step of all of them at once, and the next step works."""
    fault = Fault(place, number, ValueError("a bad sample")) if rank == 1 else nothing
    model = Net()
    step = anybatch.TrainStep(
        model if wrap is None else wrap(model), faulty(fault), torch.optim.SGD(model.parameters(), lr=1.0),
        micro_batch_size=2,
    )  # fmt: skip
    before, state = hashed(model.parameters()), torch.get_rng_state()
    start = time.monotonic()
    error = raised(lambda: step(batches_of((7, 7))[rank]))
    assert time.monotonic() - start < 10
    if rank == 1:
        assert type(error) is ValueError, error
    else:
        assert isinstance(error, anybatch.AnyBatchError)
        assert "rank 1 failed" in str(error)
        assert "ValueError: a bad sample" in str(error)
    assert hashed(model.parameters()) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert step.updates == 0
    step(batches_of((7, 7))[rank])
    assert step.updates == 1
    assert_weights_same(model)


def bad_batch(rank: int, world: int) -> None:
    """What is refused on one rank before it counts anything ends the others too."""
    model = Net()
    step = anybatch.TrainStep(model, mean_loss, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch_size=4)
    batch = batches_of((7, 7))[rank]
    if rank == 0:
        batch["z"] = batch["z"][:3]
    error = raised(lambda: step(batch))
    assert isinstance(error, anybatch.BatchError if rank == 0 else anybatch.AnyBatchError)
    assert "has 3 rows" in str(error) or "batch['z']" in str(error), error
    counted = anybatch.TrainStep(
        model,
        mean_loss,
        torch.optim.SGD(model.parameters(), lr=1.0),
        count=lambda batch: -1 if rank else len(batch["x"]),
    )
    error = raised(lambda: counted(batches_of((7, 7))[rank]))
    assert "at least 0" in str(error)


def two_faults(rank: int, world: int) -> None:
    """Memory runs out on one rank while the other fails for good: the step ends everywhere."""
    fault = Fault("forward", 1, shortage() if rank == 0 else ValueError("a bad sample"))
    model = Net()
    step = anybatch.TrainStep(model, faulty(fault), torch.optim.SGD(model.parameters(), lr=1.0), micro_batch_size=2)
    error = raised(lambda: step(batches_of((7, 7))[rank]))
    assert "a bad sample" in str(error)
    step(batches_of((7, 7))[rank])
    assert_weights_same(model)


def long_messages(rank: int, world: int) -> None:
    """What does not fit in the first collective of a round comes in a second one, also from one rank alone."""
    model = torch.nn.ParameterList([torch.zeros(1, dtype=torch.float64) for _ in range(4500)])
    for used in (4500, 4250 + rank):
        model.zero_grad()

        def loss_fn(model: Any, batch: Any, used: int = used) -> torch.Tensor:
            loss: torch.Tensor = torch.cat(list(model)[:used]).sum() * batch["z"].mean()
            return loss

        batches = batches_of((4, 5))
        anybatch.backward(model, loss_fn, batches[rank])
        assert [p.grad is None for p in model] == [i >= (4500 if used == 4500 else 4251) for i in range(4500)]
        share = float(batches[1]["z"].sum()) / 9
        if used != 4500:
            assert model[4250].grad is not None
            assert abs(float(model[4250].grad) - share) < 1e-12
    text = "x" * 1500
    error = raised(
        lambda: anybatch.backward(
            Net(), faulty(Fault("forward", 1, ValueError(text)) if rank else nothing), batches[rank]
        )
    )
    assert text in str(error)


class Short(torch.optim.SGD):
    """Has no memory for its state the first time."""

    faults = 0

    def step(self, closure: Any = None) -> Any:
        if self.faults:
            self.faults -= 1
            raise shortage()
        return super().step(closure)


def in_optimizer(rank: int, world: int) -> None:
    """The others apply the update, so the rank that ran out tries it again, and says so if it can't."""
    model = Net()
    optimizer = Short(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, mean_loss, optimizer, clip_norm=0.1)
    optimizer.faults = rank
    step(batches_of((7, 7))[rank])
    assert step.updates == 1
    assert_weights_same(model)
    optimizer.faults = 2 * rank
    error = raised(lambda: step(batches_of((7, 7))[rank]))
    assert type(error) is (anybatch.UpdateInterrupted if rank == 1 else type(None))
    error = raised(lambda: step(batches_of((7, 7))[rank]))
    assert "updates so far" in str(error), error


def other_calls(rank: int, world: int) -> None:
    model = Net()
    step = anybatch.TrainStep(model, mean_loss, torch.optim.SGD(model.parameters(), lr=1.0))
    batch = batches_of((3, 3))[rank]
    error = raised(lambda: step(batch) if rank == 0 else step.evaluate(batch))
    assert "rank 0 runs TrainStep, rank 1 runs evaluate" in str(error), error


def evaluation(rank: int, world: int) -> None:
    """Memory that runs out in an evaluation does not make training smaller."""
    fault = Fault("forward", 1, shortage()) if rank == 1 else nothing

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        fault("forward")
        return mean_loss(model, batch)

    model = Net()
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=1.0))
    out = step.evaluate(batches_of((6, 6))[rank])
    assert [one.outcome for one in out.attempts] == ["out of memory", "done"]
    assert (step._limit.value, step._evaluation_limit.value) == (None, 3)
    assert_same_everywhere(out.loss)


def slow_rank(rank: int, world: int) -> None:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(0.2 * rank)
        return mean_loss(model, batch)

    model, batches = Net(), batches_of((6, 6))
    anybatch.backward(model, loss_fn, batches[rank], micro_batch_size=2)
    assert_float64(gradients_of(model), whole_gradients(Net(), mean_loss, joined(batches))[0])


def random_faults(rank: int, world: int) -> None:
    """Faults of both kinds at random places for 40 steps: weights stay equal, and every sample counts once."""
    generator = torch.Generator().manual_seed(3)

    def draw(most: int) -> int:
        return int(torch.randint(0, most, (), generator=generator))

    model, alone = Net(), Net()
    mine, its = (torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, alone))
    current: list[Any] = [nothing]

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        current[0]("forward")
        out = back(model(batch["x"]), current[0])
        return (out.sum(1) - batch["z"]).square().mean()  # type: ignore[no-any-return]

    step = anybatch.TrainStep(DistributedDataParallel(model), loss_fn, mine, micro_batch_size=4)
    one = anybatch.TrainStep(alone, mean_loss, its, group=False)
    for number in range(40):
        rows = [1 + draw(9) for _ in range(world)]
        place, micro_batch, is_shortage, victim = ("forward", "backward")[draw(2)], 1 + draw(4), draw(3) > 0, draw(3)
        error = shortage() if is_shortage else ValueError("a bad sample")
        current[0] = Fault(place, micro_batch, error) if rank == victim else nothing
        batches = batches_of(rows, seed=number)
        failure = raised(lambda batches=batches: step(batches[rank]))  # type: ignore[misc]
        failed = everywhere(failure is not None and type(failure).__name__ != "DoesNotFit")
        fits = everywhere(type(failure).__name__ != "DoesNotFit")
        assert len(set(failed)) == len(set(fits)) == 1, (failed, fits, failure)
        if failure is None:
            one(joined(batches))
        assert_weights_same(model)
        assert_float64(list(model.parameters()), list(alone.parameters()), f"the weights after step {number}")
        if step._limit.value == 1:
            step._limit.value = 4
    assert (step.updates, step.samples) == (one.updates, one.samples)


def killed(rank: int, world: int) -> None:
    """A rank that dies ends the others with an error."""

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return mean_loss(model, batch)

    model = Net()
    start = time.monotonic()
    error = raised(lambda: anybatch.backward(model, loss_fn, batches_of((4, 4))[rank]))
    assert isinstance(error, anybatch.AnyBatchError), error
    assert "could not reach the others" in str(error)
    assert time.monotonic() - start < 35
    assert gradients_of(model) == [None] * len(list(model.parameters()))


KILLED: Mapping[str, Case] = {"killed": killed}
CASES: Mapping[str, Case] = {
    "forward": partial(out_of_memory, place="forward", number=2),
    "backward": partial(out_of_memory, place="backward", number=1),
    "last micro-batch": partial(out_of_memory, place="backward", number=3),
    "last micro-batch, DistributedDataParallel": partial(
        out_of_memory, place="backward", number=3, wrap=DistributedDataParallel
    ),
    "first rank": partial(out_of_memory, place="forward", number=1, where=0, wrap=DistributedDataParallel),
    "again and again": repeatedly,
    "backward()": in_backward_verb,
    "DoesNotFit": does_not_fit,
    "exception in the first forward": partial(user_error, place="forward", number=1),
    "exception in a backward": partial(user_error, place="backward", number=2, wrap=DistributedDataParallel),
    "exception in the last backward": partial(user_error, place="backward", number=4),
    "a bad batch": bad_batch,
    "two faults": two_faults,
    "optimizer.step": in_optimizer,
    "long messages": long_messages,
    "other calls": other_calls,
    "evaluate": evaluation,
    "a slow rank": slow_rank,
    "random faults": random_faults,
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]


def test_a_rank_is_killed(tmp_path: Path) -> None:
    text = run_cases("test_ranks_faults", 2, tmp_path, "KILLED")["killed"]
    assert text.startswith("rank 1: did not end"), text
    assert "rank 0" not in text, text
