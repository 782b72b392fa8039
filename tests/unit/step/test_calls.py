"""One call at a time, and what an exception says of the update that it may or may not have come after."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import anybatch
from anybatch.backpropagation import RepeatedBackward
from faults import Straight, different, facts, mean_square

BATCH = torch.ones(12, 5)


def made() -> Straight:
    """The same model each time, and the same masks after it."""
    torch.manual_seed(0)
    return Straight()


def step_of(model: nn.Module, **options: Any) -> anybatch.TrainStep:
    return anybatch.TrainStep(
        model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=5, **options
    )


# --- several threads, and calls within calls -------------------------------------------------------------------------


def test_a_second_thread_is_refused_and_the_first_trains_as_if_alone() -> None:
    inside, go_on, caught = threading.Event(), threading.Event(), []

    def waiting(model: nn.Module, batch: torch.Tensor) -> Any:
        inside.set()
        assert go_on.wait(20)
        return mean_square(model, batch)

    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, waiting, optimizer, micro_batch_size=5)
    first = threading.Thread(target=step, args=(BATCH,))
    first.start()
    assert inside.wait(20)
    for call in (step, step.evaluate):
        with pytest.raises(anybatch.BatchError, match="another thread") as error:
            call(BATCH)
        caught.append(str(error.value))
    go_on.set()
    first.join()
    assert all("Nothing was changed" in text and "TrainStep of its own" in text for text in caught)
    alone = made()
    step_of(alone)(BATCH)
    assert different(facts(model), facts(alone)) == []
    assert step.updates == 1
    second = threading.Thread(target=step, args=(BATCH,))  # after it, another thread may
    second.start()
    second.join()
    assert step.updates == 2


def test_a_call_within_the_loss_changes_nothing() -> None:
    def within(model: nn.Module, batch: torch.Tensor) -> Any:
        step(BATCH)
        return mean_square(model, batch)

    model = made()
    step = anybatch.TrainStep(model, within, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=5)
    before = facts(model)
    with pytest.raises(anybatch.BatchError, match="within its own call"):
        step(BATCH)
    assert different(before, facts(model)) == []
    assert step.updates == 0


def test_a_recorder_may_evaluate() -> None:
    seen: list[float] = []
    model = made()
    step = step_of(model, recorder=lambda step, result: seen.append(step.evaluate(BATCH).loss))
    step(BATCH)
    assert seen == [step.evaluate(BATCH).loss]


def test_a_shallow_copy_is_refused_and_a_deep_one_is_a_step_of_its_own() -> None:
    model = made()
    step = step_of(model)
    with pytest.raises(TypeError, match="deepcopy"):
        copy.copy(step)
    twin = copy.deepcopy(step)
    before = facts(model)
    twin(BATCH)
    assert different(before, facts(model)) == ["random torch"]
    assert (step.updates, twin.updates) == (0, 1)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", ["one", "in a row"])
def test_a_deep_copy_goes_on_with_a_scheduler_of_its_own(kind: str, steps: int) -> None:
    """Where a warning of torch, such as that optimizer.step() was overridden, would be an error."""
    schedulers = torch.optim.lr_scheduler
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    each: list[schedulers.LRScheduler] = [schedulers.LambdaLR(optimizer, lambda count: 0.5**count) for _ in range(2)]
    scheduler = each[0] if kind == "one" else schedulers.SequentialLR(optimizer, each, [4])
    step = anybatch.TrainStep(model, mean_square, optimizer, scheduler=scheduler, verify="off")
    for _ in range(steps):
        step(BATCH)
    twin = copy.deepcopy(step)
    rates = [one._boundary._optimizers[0].param_groups[0] for one in (step, twin)]
    assert rates[1]["lr"] == rates[0]["lr"] == 0.1 * 0.5**steps
    twin(BATCH)
    assert rates[1]["lr"] == rates[0]["lr"] / 2
    step(BATCH)
    assert rates[1]["lr"] == rates[0]["lr"]


# --- errors after the update -----------------------------------------------------------------------------------------


class Failing:
    """A scheduler or a recorder that fails at its second call."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.calls = error, 0

    def step(self) -> None:
        self(None, None)

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            raise self.error


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), MemoryError("of the host")], ids=repr)
@pytest.mark.parametrize("place", ["scheduler", "recorder"])
def test_an_error_after_the_update_says_that_it_was_applied(place: str, error: BaseException) -> None:
    model = made()
    step = step_of(model, **{place: Failing(error)})
    step(BATCH)
    with pytest.raises((type(error), anybatch.UpdateInterrupted)) as caught:
        step(BATCH)
    assert any("the update was applied (updates=2)" in note for note in caught.value.__notes__)
    plain = made()
    undisturbed = step_of(plain)
    for _ in range(2):
        undisturbed(BATCH)
    assert different(facts(model), facts(plain)) == []


@pytest.mark.parametrize("place", ["the loss", "before the optimizer"])
def test_an_error_before_the_update_says_nothing_of_one(place: str) -> None:
    def failing(model: nn.Module, batch: torch.Tensor) -> Any:
        if place == "the loss":
            raise OSError("disk full")
        return mean_square(model, batch)

    def fails(*_: Any) -> None:
        raise OSError("disk full")

    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if place != "the loss":
        optimizer.register_step_pre_hook(fails)
    step = anybatch.TrainStep(model, failing, optimizer, micro_batch_size=5)
    with pytest.raises(OSError, match="disk full") as caught:
        step(BATCH)
    assert not getattr(caught.value, "__notes__", [])


# --- optimizers that step within the backward ------------------------------------------------------------------------


def fused(model: nn.Module) -> None:
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


CALLS: dict[str, Callable[[nn.Module], Callable[[], Any]]] = {
    "backward, split": lambda model: lambda: anybatch.backward(model, mean_square, BATCH, micro_batch_size=5),
    "backward, whole": lambda model: lambda: anybatch.backward(model, mean_square, BATCH),
    "RepeatedBackward": lambda model: lambda: RepeatedBackward(model, mean_square, micro_batch_size=5)(BATCH),
    "TrainStep": lambda model: lambda: step_of(model),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_optimizer_in_the_backward_is_refused_before_weights_move(call: Any) -> None:
    model = made()
    fused(model)
    before = facts(model)
    with pytest.raises(anybatch.BatchError, match=r"fused into the backward.*Nothing was changed"):
        call(model)()
    assert different(before, facts(model)) == []


def test_a_hook_that_comes_after_the_step_was_made_is_seen() -> None:
    model = made()
    step = step_of(model)
    step(BATCH)
    fused(model)
    before = facts(model)
    with pytest.raises(anybatch.BatchError, match="fused into the backward"):
        step(BATCH)
    assert different(before, facts(model)) == []
    assert step.updates == 1


# --- tensors without numbers -----------------------------------------------------------------------------------------


def without_numbers() -> nn.Module:
    with torch.device("meta"):
        return Straight()


VERBS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "a step": lambda model, batch: step_of(model)(batch),
    "evaluate": lambda model, batch: step_of(model).evaluate(batch),
    "a plan": lambda model, batch: anybatch.TrainStep(
        model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), memory="1GiB"
    )(batch),
    "backward": lambda model, batch: anybatch.backward(model, mean_square, batch, micro_batch_size=5),
    "check": lambda model, batch: anybatch.check(model, mean_square, batch),
}


@pytest.mark.parametrize("batch", [BATCH, BATCH.to("meta")], ids=["numbers", "meta"])
@pytest.mark.parametrize("call", VERBS)
def test_a_model_on_meta_is_refused_by_its_name(call: str, batch: torch.Tensor) -> None:
    with pytest.raises(anybatch.LossError, match=r"Straight is on the meta device.*only anybatch.plan.*to_empty"):
        VERBS[call](without_numbers(), batch)


@pytest.mark.parametrize("call", VERBS)
def test_a_model_of_which_a_part_is_on_meta_is_refused_by_the_names_of_its_parameters(call: str) -> None:
    model = nn.Sequential(made(), nn.Linear(1, 1, device="meta"))
    with pytest.raises(anybatch.LossError, match=r"^1\.weight, 1\.bias of Sequential.* on the meta device.*to_empty"):
        VERBS[call](model, BATCH)


@pytest.mark.parametrize("call", ["a step", "evaluate", "backward"])
def test_layers_on_meta_that_nothing_calls_are_no_matter(call: str) -> None:
    model = made()
    model.spare = nn.Linear(1, 1, device="meta")
    VERBS[call](model, BATCH)


@pytest.mark.parametrize("call", ["a step", "evaluate", "backward"])
def test_a_batch_on_meta_is_refused(call: str) -> None:
    with pytest.raises(anybatch.BatchError, match=r"a tensor \(5, 5\) on the meta device|\(12, 5\) on the meta"):
        VERBS[call](made(), BATCH.to("meta"))
    VERBS[call](made(), BATCH)


def test_a_model_on_meta_is_planned() -> None:
    assert anybatch.plan(without_numbers(), mean_square, BATCH.to("meta"), memory="1GiB").peak_bytes
