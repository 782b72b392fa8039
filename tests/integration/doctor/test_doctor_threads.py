"""The doctor records one thread that trains at a time, and reads no gradient that another thread may be writing."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import anybatch
import forked_python
from anybatch.doctor.diagnosing import diagnosis
from anybatch.doctor.recorder import Doctor
from anybatch.doctor.recording.recordings import TrainingThread
from anybatch.records.events import Backward, Cleared, Epoch, Forward, Stepped, ThreadsAtOnce, Warned
from anybatch.report.diagnosis import mood_of, verdict_of

AT_ONCE = Path(__file__).parents[2] / "threads_at_once.py"


def model_and_optimizer(size: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns a small model with its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(size, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Does one step."""
    generator = torch.Generator().manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(5, 3, generator=generator)).square().mean().backward()
    optimizer.step()


def in_thread(function: Callable[[], Any]) -> None:
    """Runs a function in a thread of its own; what it raises is raised here."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result(60)


def kinds(doctor: Doctor) -> list[Any]:
    """Returns the calls of a run without their lines."""
    return [
        (type(fact).__name__, fact.step, getattr(fact, "value", None), getattr(fact, "touched_count", None))
        for fact in doctor.run.of(Forward, Backward, Cleared, Stepped)
    ]


class Held(torch.autograd.Function):
    """Does something in the middle of its backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.function()
        return gradients[0], None


def during_a_backward(function: Callable[[], Any], doctor: Doctor, *, before: int = 0) -> None:
    """Runs a function in another thread while this one is in a backward, after some steps."""
    model, optimizer = model_and_optimizer()
    for number in range(before):
        step(model, optimizer, number)
    optimizer.zero_grad()
    Held.apply(model(torch.ones(5, 3)).square().mean(), lambda: in_thread(function)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert doctor.failure == ""


def test_many_threads_at_once_do_not_crash() -> None:
    """In a process of its own, since it crashed in nearly every run before threads were told apart."""
    run = forked_python.run([sys.executable, str(AT_ONCE)], AT_ONCE.parent)
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout.split()[-1]) > 10


@pytest.mark.parametrize("before", [0, 3, 40, 124])
@pytest.mark.parametrize("call", ["zero_grad", "backward", "step", "clip", "schedule", "scale"])
def test_a_second_thread_that_trains_ends_the_record(call: str, before: int) -> None:
    model, optimizer = model_and_optimizer()
    scheduler = StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    model(torch.ones(2, 3)).mean().backward()
    optimizer.step()
    loss = model(torch.ones(2, 3)).mean()
    with Doctor() as doctor:
        calls: dict[str, Callable[[], Any]] = {
            "zero_grad": optimizer.zero_grad, "backward": loss.backward, "step": optimizer.step,
            "clip": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), "schedule": scheduler.step,
            "scale": lambda: scaler.scale(loss),
        }  # fmt: skip
        during_a_backward(calls[call], doctor, before=before)
        step(*model_and_optimizer(), 0)
    (ended,) = doctor.run.of(ThreadsAtOnce)
    assert ended.file == __file__ or ended.file.endswith("thread.py")
    after = [fact for fact in doctor.run.facts if fact.at > ended.at]
    assert [type(fact).__name__ for fact in after] == ["Ended"]
    assert len(list(doctor.run.of(Stepped))) == before
    found = diagnosis(doctor.run)
    assert not found.findings
    assert any("a second thread" in note for note in found.notes)
    if before:
        assert "several threads trained at once" in verdict_of(found, doctor.run)
    assert mood_of(found, doctor.run) == "unknown"


def test_gradients_are_those_without_a_doctor_after_the_record_ended() -> None:
    def both() -> list[torch.Tensor]:
        pairs = [model_and_optimizer(), model_and_optimizer()]

        def other() -> None:
            for number in range(5):
                step(*pairs[1], number)

        step(*pairs[0], 0)
        pairs[0][1].zero_grad()
        loss = pairs[0][0](torch.ones(5, 3)).square().mean()
        Held.apply(loss, lambda: in_thread(other)).backward()  # type: ignore[no-untyped-call]
        pairs[0][1].step()
        return [tensor.detach().clone() for model, _ in pairs for tensor in model.parameters()]

    expected = both()
    with Doctor() as doctor:
        seen = both()
    assert len(list(doctor.run.of(ThreadsAtOnce))) == 1
    assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_steps_one_after_the_other_in_changing_threads(workers: int) -> None:
    """As with a step in each ``asyncio.to_thread``: the record is that of one thread."""
    model, optimizer = model_and_optimizer()
    with Doctor() as expected:
        for number in range(40):
            step(model, optimizer, number)
    model, optimizer = model_and_optimizer()
    pools = [ThreadPoolExecutor(1) for _ in range(workers)]
    try:
        with Doctor() as doctor:
            for number in range(40):
                pools[number % workers].submit(step, model, optimizer, number).result(60)
    finally:
        for pool in pools:
            pool.shutdown()
    assert doctor.failure == ""
    assert not list(doctor.run.of(ThreadsAtOnce))
    assert kinds(doctor) == kinds(expected)
    assert diagnosis(doctor.run).unexamined == ()


def test_parts_of_a_step_in_different_threads() -> None:
    """The optimizer is seen before the model is, whose parameters it has."""
    model, optimizer = model_and_optimizer()
    with Doctor() as expected:
        for number in range(12):
            step(model, optimizer, number)
    model, optimizer = model_and_optimizer()
    with Doctor() as doctor, ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for number in range(12):
            batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
            one.submit(optimizer.zero_grad).result(60)
            loss = other.submit(lambda batch: model(batch).square().mean(), batch).result(60)
            one.submit(loss.backward).result(60)
            other.submit(optimizer.step).result(60)
    assert kinds(doctor) == kinds(expected)


def test_threads_that_end_one_after_the_other() -> None:
    """Each with a model of its own."""

    def train() -> None:
        model, optimizer = model_and_optimizer()
        for number in range(6):
            step(model, optimizer, number)

    with Doctor() as doctor:
        for _ in range(3):
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
    assert len(list(doctor.run.of(Stepped))) == 18
    assert not list(doctor.run.of(ThreadsAtOnce))


def test_somebody_who_looks_after_the_thread_that_trained_has_ended_gives_way() -> None:
    models = [model_and_optimizer() for _ in range(2)]
    with Doctor() as doctor, ThreadPoolExecutor(1) as pool:
        thread = threading.Thread(target=lambda: step(*models[0], 0))
        thread.start()
        thread.join()
        with torch.no_grad():
            pool.submit(models[0][0], torch.ones(1, 3)).result(60)
        pool.submit(lambda: models[0][0].eval()(torch.ones(1, 3)).detach()).result(60)
        step(*models[1], 0)
    assert not list(doctor.run.of(ThreadsAtOnce))
    assert len(list(doctor.run.of(Stepped))) == 2
    assert len(list(doctor.run.of(Forward))) == 4


def test_a_second_model_in_a_second_thread_ends_the_record() -> None:
    """Even where the two happen not to overlap: the first one could go on at any time."""
    first = model_and_optimizer()
    with Doctor() as doctor:
        for number in range(3):
            step(*first, number)
        in_thread(lambda: step(*model_and_optimizer(), 0))
        step(*first, 3)
    assert len(list(doctor.run.of(Stepped))) == 3
    assert len(list(doctor.run.of(ThreadsAtOnce))) == 1


@pytest.mark.parametrize("grad", [False, True])
def test_calls_of_models_in_other_threads_are_passed_over(grad: bool) -> None:
    """An actor plays with the model while it is trained; without ``no_grad`` too, as long as it does not go back."""
    acting, plain = model_and_optimizer()[0], model_and_optimizer()
    with Doctor() as expected:
        for number in range(40):
            step(*plain, number)

    def play(model: torch.nn.Module) -> None:
        with torch.set_grad_enabled(grad):
            acting(torch.ones(7, 3))
            model(torch.ones(7, 3))

    model, optimizer = model_and_optimizer()

    def held(value: torch.Tensor) -> Any:
        return Held.apply(value, lambda: in_thread(lambda: play(model)))  # type: ignore[no-untyped-call]

    with Doctor() as doctor:
        for number in range(40):
            generator = torch.Generator().manual_seed(number)
            optimizer.zero_grad()
            held(model(torch.randn(5, 3, generator=generator)).square().mean()).backward()
            optimizer.step()
    assert not list(doctor.run.of(ThreadsAtOnce))
    assert kinds(doctor) == kinds(expected)


def test_an_actor_plays_all_the_time() -> None:
    model, optimizer = model_and_optimizer()
    stop = threading.Event()

    def play() -> None:
        while not stop.is_set():
            with torch.no_grad():
                model(torch.ones(7, 3))

    actor = threading.Thread(target=play)
    with Doctor() as doctor:
        step(model, optimizer, 0)
        actor.start()
        for number in range(1, 60):
            step(model, optimizer, number)
        stop.set()
        actor.join()
    assert doctor.failure == ""
    assert not list(doctor.run.of(ThreadsAtOnce))
    assert len(list(doctor.run.of(Stepped))) == len(list(doctor.run.of(Forward))) == 60


def test_loaders_and_warnings_of_other_threads_are_recorded() -> None:
    model, optimizer = model_and_optimizer()
    loader = DataLoader(TensorDataset(torch.randn(10, 3)), batch_size=5)

    def read() -> None:
        import warnings

        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            warnings.warn("said while it trains", UserWarning, stacklevel=1)
        list(loader)

    with Doctor() as doctor:
        for number in range(3):
            step(model, optimizer, number)
        for _ in range(2):
            optimizer.zero_grad()
            Held.apply(model(torch.ones(5, 3)).mean(), lambda: in_thread(read)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            list(loader)
        in_thread(lambda: list(loader))  # behind the last hook
    assert [one.ended for one in doctor.run.of(Epoch)] == [False, True] * 5
    assert sum(one.text == "said while it trains" for one in doctor.run.of(Warned)) == 2
    assert [fact.at for fact in doctor.run.facts] == list(range(len(doctor.run.facts)))


def test_copies_on_other_devices_are_passed_over() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Doctor() as doctor:
        train = anybatch.TrainStep(
            model, lambda model, batch: model(batch[0]).square().mean(), optimizer, devices=["cpu", "cpu"],
            recorder=doctor, micro_batch_size=2,
        )  # fmt: skip
        for seed in range(12):
            train((torch.randn(8, 3, generator=torch.Generator().manual_seed(seed)),))
    assert doctor.failure == ""
    assert not list(doctor.run.of(ThreadsAtOnce))
    assert len(list(doctor.run.of(Stepped))) == 12
    assert len(doctor.run.roots) == 1
    assert len(list(doctor.run.of(Backward))) == 24  # two of the four micro-batches of each step


def test_nothing_is_left_out_while_another_thread_has_a_hook() -> None:
    """As one has that loads a checkpoint: it began before the backward did, and ends after it has begun."""
    model, optimizer = model_and_optimizer()
    with Doctor() as doctor:
        for _ in range(30):
            loss = model(torch.ones(5, 3)).square().mean()
            for call in (optimizer.zero_grad, loss.backward, optimizer.step):
                held = threading.Event()
                hook = doctor._recording.guarded(lambda held=held: held.set() or threading.Event().wait(0.004))
                other = threading.Thread(target=hook)
                other.start()
                assert held.wait(60)
                call()
                other.join()
    counts = [len(list(doctor.run.of(kind))) for kind in (Cleared, Backward, Stepped)]
    assert counts == [30, 30, 30]


def test_the_place_is_taken_while_somebody_looks() -> None:
    """A thread that only called a model gives way, even in the middle of the call."""
    model, optimizer = model_and_optimizer()
    inside, trained = threading.Event(), threading.Event()

    class Slow(torch.nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert trained.wait(60)
            return super().forward(value)

    slow = Slow(3, 1)

    def look() -> None:
        with torch.no_grad():
            slow(torch.ones(1, 3))

    looker = threading.Thread(target=look)
    with Doctor() as doctor:
        looker.start()
        assert inside.wait(60)
        step(model, optimizer, 0)
        trained.set()
        looker.join()
        step(model, optimizer, 1)
    assert len(list(doctor.run.of(Stepped))) == 2
    assert [one.root for one in doctor.run.of(Forward) if one.grad] == [1, 1]


def test_a_place_that_was_lost_while_waiting_is_not_taken() -> None:
    """Two threads want to go on after a third: the one that was overtaken asks again, and then both train at once."""
    lock = threading.Lock()
    told: list[str] = []
    threads = TrainingThread(lock, lambda one: True, lambda: told.append("several"))
    assert threads.admits("updates")
    answers: list[bool] = []
    lock.acquire()
    waiting = threading.Thread(target=lambda: answers.append(threads.admits("updates")))
    waiting.start()
    while threads.ident == threading.get_ident():
        pass
    threads.ident, threads.inside = threading.get_ident(), True  # as a thread that goes on with a backward does
    threads._owner = threading.current_thread()
    lock.release()
    waiting.join(60)
    assert answers == [False]
    assert told == ["several"]
    assert lock.locked()
