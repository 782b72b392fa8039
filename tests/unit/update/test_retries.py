"""The size of micro-batches after memory ran out, the audit trail, and what is let go before the next attempt."""

import gc
import itertools
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anybatch
from anybatch.update.transaction import SizeLimit
from faults import ROW, SmallMemory, Straight, different, facts, mean_square, quick_collections


def sizes_and_outcomes(out: anybatch.StepResult) -> list[tuple[float, str]]:
    return [(attempt.micro_batch_size, attempt.outcome) for attempt in out.attempts]


def test_the_size_halves_and_grows_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Straight(), torch.ones(20, 5)
    step = anybatch.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.0))
    with SmallMemory(6 * ROW):
        assert sizes_and_outcomes(step(batch)) == [(20, "out of memory"), (10, "out of memory"), (5, "done")]
        for _ in range(SizeLimit.PATIENCE - 1):
            assert sizes_and_outcomes(step(batch)) == [(5, "done")]
    for size in (10, 20, 20):  # memory is there again: it grows, and grows again after as long
        assert sizes_and_outcomes(step(batch)) == [(size, "done")]
        for _ in range(SizeLimit.PATIENCE - 1):
            assert sizes_and_outcomes(step(batch)) == [(size, "done")]


def test_the_size_grows_to_what_was_asked_for_and_no_further() -> None:
    model, batch = Straight(), torch.ones(20, 5)
    step = anybatch.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=7)
    with SmallMemory(6 * ROW):
        assert sizes_and_outcomes(step(batch)) == [(7, "out of memory"), (4, "done")]
    found = {step(batch).attempts[-1].micro_batch_size for _ in range(3 * SizeLimit.PATIENCE)}
    assert found == {4, 7}


def test_a_hundred_retries_do_not_lower_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SizeLimit, "PATIENCE", 1)
    monkeypatch.setattr(SizeLimit, "MOST_PATIENCE", 1)
    model, batch = Straight(), torch.ones(64, 5)
    step = anybatch.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.0))
    retries = 0
    step(batch)
    with quick_collections(), SmallMemory(10 * ROW):
        for _ in range(300):
            out = step(batch)
            retries += len(out.attempts) - 1
            assert out.attempts[-1].micro_batch_size == 8
            assert sum(attempt.samples for attempt in out.attempts) == 64
    assert retries > 100
    assert step.updates == 301


def test_growing_becomes_rarer_while_it_fails() -> None:
    model, batch = Straight(), torch.ones(16, 5)
    step = anybatch.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.0))
    with SmallMemory(10 * ROW):
        retried = [number for number in range(300) if len(step(batch).attempts) > 1]
    gaps = [later - earlier for earlier, later in itertools.pairwise(retried)]
    assert gaps == [32, 64, 128]


def test_out_of_memory_in_evaluation_does_not_make_training_smaller() -> None:
    model, batch = Straight(), torch.ones(20, 5)
    step = anybatch.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.0))
    with SmallMemory(6 * ROW):
        assert sizes_and_outcomes(step.evaluate(batch))[-1] == (5, "done")
        assert sizes_and_outcomes(step.evaluate(batch)) == [(5, "done")]
    assert sizes_and_outcomes(step(batch)) == [(20, "done")]


def test_every_sample_counts_once_in_ten_steps_of_which_one_runs_out_of_memory() -> None:
    """The fault comes in micro-batch 3 of 4 of step 5; the run is the one that used the smaller size in that step."""

    def run(fault: bool) -> tuple[dict[str, Any], list[int], list[Any]]:
        torch.manual_seed(0)
        model, drawn, used = Straight(), [], []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)

        def loader() -> Iterator[dict[str, torch.Tensor]]:
            for number in range(10):
                drawn.append(number)
                yield {"x": torch.randn(8, 5), "row": torch.arange(8) + 8 * number}

        def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
            used.append(batch["row"].tolist())
            if fault and step.updates == 5 and used[-3:] == [[40, 41], [42, 43], [44, 45]]:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return mean_square(model, batch["x"]), {"row": batch["row"]}

        step = anybatch.TrainStep(model, loss, optimizer, micro_batch_size=2, scheduler=scheduler)
        outs = []
        for batch in loader():
            if not fault:
                step._limit.value = 1 if step.updates >= 5 else 2
            outs.append(step(batch))
        assert [int(row) for out in outs for row in out.metrics["row"]] == list(range(80))
        return facts(model, [optimizer], step=step, scheduler=scheduler), drawn, outs

    faulty, drawn, outs = run(fault=True)
    smooth, _, _ = run(fault=False)
    assert not different(smooth, faulty)
    assert drawn == list(range(10))
    assert faulty["counters"] == (10, 0, 80)
    assert faulty["scheduler"]["last_epoch"] == 10
    trail = [(a.micro_batch_size, a.micro_batches, a.samples, a.outcome, a.where) for a in outs[5].attempts]
    assert trail == [(2, 4, 0, "out of memory", "micro-batch 3 of 4"), (1, 8, 8, "done", "")]
    assert all(len(out.attempts) == 1 for out in outs[:5] + outs[6:])


class Remembered:
    """Weak references to all tensors that a loss made, by attempt."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.stored: list[BaseException] = []
        self.alive_at_retry: list[int] = []

    def note(self, *tensors: torch.Tensor) -> None:
        """Takes references that do not keep the tensors."""
        self.made += [weakref.ref(tensor) for tensor in tensors]


def run_out_of_memory(remembered: Remembered, hidden: torch.Tensor) -> None:
    """Its frame is gone when the exception reaches the caller of the loss, but for the traceback."""
    deeper = hidden * 2
    remembered.note(deeper)
    raise torch.OutOfMemoryError("CUDA out of memory")


def fails_once(remembered: Remembered, keep: str) -> Any:
    """A loss that runs out of memory in the second micro-batch and keeps the exception."""

    def loss(model: Straight, batch: dict[str, torch.Tensor]) -> Any:
        if remembered.stored and not remembered.alive_at_retry:
            remembered.alive_at_retry.append(sum(ref() is not None for ref in remembered.made))
        x = batch["x"] * 2
        hidden = model.first(x)
        if hidden.requires_grad:
            hidden.register_hook(remembered.note)
        y = model.last(hidden.relu())
        if not remembered.stored:
            remembered.note(batch["x"], x, hidden, y)
        if not remembered.stored and len(remembered.made) > 5:
            if keep == "cycle":
                cycle: dict[str, Any] = {"hidden": hidden}
                cycle["cycle"] = cycle
            try:
                run_out_of_memory(remembered, hidden)
            except torch.OutOfMemoryError as error:
                remembered.stored.append(error)
                if keep == "logged":
                    logging.getLogger("user").exception("no memory, with %s", "traceback")
                if keep == "chained":
                    raise torch.OutOfMemoryError("CUDA out of memory, again") from error
                raise
        return y.pow(2).mean(), {"y": y[:, 0]}

    return loss


@pytest.mark.parametrize("keep", ["stored", "logged", "chained", "cycle", "generator"])
@pytest.mark.parametrize("how", ["TrainStep", "backward", "evaluate"])
def test_nothing_of_the_failed_attempt_is_reachable(how: str, keep: str, caplog: pytest.LogCaptureFixture) -> None:
    model, remembered = Straight(), Remembered()
    plain = fails_once(remembered, keep)

    def generator(model: Straight, batch: dict[str, torch.Tensor]) -> Any:
        with anybatch.cut(batch["x"] * 1.0) as x:
            mean, metrics = plain(model, {**batch, "x": x})
            remembered.note(x, mean)
            yield mean
        return metrics

    loss = generator if keep == "generator" else plain
    batch = {"x": torch.ones(8, 5)}
    gc.disable()  # so that it is not by luck
    try:
        if how == "backward":
            out = anybatch.backward(model, loss, batch, micro_batch_size=4)
        else:
            step = anybatch.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=4)
            out = step(batch) if how == "TrainStep" else step.evaluate(batch)
    finally:
        gc.enable()
    assert sizes_and_outcomes(out) == [(4, "out of memory"), (2, "done")]
    assert len(remembered.made) >= 6
    assert remembered.alive_at_retry == [0]
    assert remembered.stored[0].args == ("CUDA out of memory",)  # the user's exception itself is still there
    if keep == "logged":
        assert any(record.exc_info for record in caplog.records)


def test_a_parameter_outside_of_the_model_counts_once_too() -> None:
    temperature = torch.nn.Parameter(torch.tensor(2.0))
    model = Straight().eval()

    def run(failures: int, size: int) -> torch.Tensor:
        temperature.grad = torch.tensor(1.0)
        calls = itertools.count()

        def loss(model: Straight, batch: torch.Tensor) -> Any:
            if next(calls) == 1 and failures:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return (model(batch) * temperature).mean()

        anybatch.backward(model, loss, torch.ones(8, 5), micro_batch_size=size)
        assert temperature.grad is not None
        return temperature.grad.clone()

    assert torch.equal(run(1, 4), run(0, 2))


def test_the_gradient_of_a_parameter_outside_of_the_model_is_as_before_after_an_exception() -> None:
    temperature = torch.nn.Parameter(torch.tensor(2.0))
    calls = itertools.count()

    def loss(model: Straight, batch: torch.Tensor) -> Any:
        if next(calls) == 1:
            raise KeyError("user")
        return (model(batch) * temperature).mean()

    with pytest.raises(KeyError):
        anybatch.backward(Straight(), loss, torch.ones(8, 5), micro_batch_size=4, verify="off")
    assert temperature.grad is None


def test_an_optimizer_that_evaluates_the_gradient_itself_draws_the_same_dropout_again() -> None:
    """With one iteration LBFGS evaluates once, so that a retry is bitwise the run at the smaller size."""

    def run(failures: int, size: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = Straight()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)
        calls = itertools.count()

        def loss(model: Straight, batch: torch.Tensor) -> Any:
            result = mean_square(model, batch)
            if next(calls) == 1 and failures:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return result

        step = anybatch.TrainStep(model, loss, optimizer, micro_batch_size=size, verify="off")
        assert sizes_and_outcomes(step(torch.ones(8, 5)))[-1] == (2, "done")
        return facts(model, step=step)

    assert not different(run(0, 2), run(1, 4))


# --- generators of one's own -----------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Adds noise that a generator of its own draws."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.inner, self.generator = Straight(), generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn: torch.Tensor = self.inner(x) * (1 + noise_of(self.generator))
        return drawn


def noise_of(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random())


GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "numpy": lambda: np.random.default_rng(3),
    "Python": lambda: random.Random(3),
}


@pytest.mark.parametrize("place", ["the model", "the closure of the loss"])
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_ones_own_is_put_back_when_a_batch_starts_again(kind: str, place: str) -> None:
    weights, draws = [], []
    for fails in (False, True):
        torch.manual_seed(0)
        generator = GENERATORS[kind]()
        model: Any = Noisy(generator) if place == "the model" else Straight()
        calls: list[int] = []

        def loss(model: Any, batch: torch.Tensor, calls: Any = calls, fails: bool = fails, own: Any = generator) -> Any:
            calls.append(1)
            value = mean_square(model, batch)
            if place != "the model":
                value = value * noise_of(generator)  # noqa: B023 - it is called within this turn
            if fails and len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return value

        step = anybatch.TrainStep(
            model, loss, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=5 if fails else 3, verify="off"
        )
        step(torch.ones(6, 5))
        step(torch.ones(6, 5))
        weights.append([p.detach().clone() for p in model.parameters()])
        draws.append(noise_of(generator))
    assert draws[0] == draws[1]
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_with_a_closure_takes_parameters_without_numbers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.empty = nn.Linear(2, 1), nn.Parameter(torch.empty(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.linear(x) + self.empty.sum()
            return found

    model, x = Net(), torch.randn(6, 2)

    def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (model(batch) - 1).square().mean()
        return found

    step = anybatch.TrainStep(model, loss_fn, torch.optim.LBFGS(model.parameters(), max_iter=3), micro_batch_size=2)
    first = step(x).loss
    assert step(x).loss < first
