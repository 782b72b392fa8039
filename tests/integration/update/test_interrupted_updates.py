"""An optimizer or a scheduler fails: the update is applied once or not at all, and the error says which."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import anybatch
from faults import Line, OutOfMemoryAt, Straight, different, facts, half_square, mean_square, quick_collections


@pytest.fixture(autouse=True, scope="module")
def collections() -> Iterator[None]:
    with quick_collections():
        yield


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory")


def failing(base: type[torch.optim.Optimizer], when: str, error: Callable[[], BaseException]) -> Any:
    """A subclass whose step fails once, before or after it did its work."""

    class Failing(base):  # type: ignore[misc, valid-type]
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls == 1 and when == "before":
                raise error()
            result = super().step(closure)
            if self.calls == 1:
                raise error()
            return result

    return Failing


ONCE = pytest.approx(0.9, abs=1e-7)  # never 0.81


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam])
def test_memory_that_runs_out_before_the_update_is_tried_again(base: Any) -> None:
    model = Line()
    optimizer = failing(base, "before", out_of_memory)(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, half_square, optimizer)
    out = step(torch.zeros(4))
    assert [(a.outcome, a.where, a.samples) for a in out.attempts] == [
        ("out of memory", "optimizer.step", 0), ("done", "", 4),
    ]  # fmt: skip
    assert float(model.w.detach()) == pytest.approx(0.9, abs=1e-5)
    assert step.updates == 1
    if base is torch.optim.Adam:
        assert float(optimizer.state[model.w]["step"]) == 1


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam])
def test_memory_that_runs_out_after_the_update_is_an_interruption(base: Any) -> None:
    model = Line()
    optimizer = failing(base, "after", out_of_memory)(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, half_square, optimizer)
    with pytest.raises(anybatch.UpdateInterrupted, match=r"optimizer\.step .*not\s+applied again") as caught:
        step(torch.zeros(4))
    assert caught.value.changed == ("w",)
    assert caught.value.__cause__ is None  # its traceback would hold the tensors of the attempt
    assert float(model.w.detach()) == pytest.approx(0.9, abs=1e-5)
    if base is torch.optim.Adam:
        assert float(optimizer.state[model.w]["step"]) == 1
    step(torch.zeros(4))  # goes on
    assert step.updates == 1
    assert 0.79 < float(model.w.detach()) < 0.82


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_before_the_update_rolls_back(error: type[BaseException]) -> None:
    model = Line()
    optimizer = failing(torch.optim.Adam, "before", lambda: error("user"))(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, half_square, optimizer)
    before = facts(model, [optimizer], step=step)
    with pytest.raises(error, match="user"):
        step(torch.zeros(4))
    assert not different(before, facts(model, [optimizer], step=step))
    step(torch.zeros(4))
    assert float(model.w.detach()) == pytest.approx(0.9, abs=1e-5)


def test_an_exception_after_the_update_is_an_interruption_with_its_cause() -> None:
    model = Line()
    optimizer = failing(torch.optim.SGD, "after", lambda: ValueError("user"))(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, half_square, optimizer)
    with pytest.raises(anybatch.UpdateInterrupted, match="ValueError: user") as caught:
        step(torch.zeros(4))
    assert isinstance(caught.value.__cause__, ValueError)
    assert float(model.w.detach()) == ONCE


def test_a_keyboard_interrupt_within_the_update_stays_one_and_says_what_changed() -> None:
    model = Line()
    optimizer = failing(torch.optim.SGD, "after", KeyboardInterrupt)(model.parameters(), lr=0.1)
    with pytest.raises(KeyboardInterrupt) as caught:
        anybatch.TrainStep(model, half_square, optimizer)(torch.zeros(4))
    assert "'w'" in caught.value.__notes__[0]
    assert float(model.w.detach()) == ONCE


def test_a_hook_that_fails_after_the_update() -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hook(*_: Any) -> None:
        raise out_of_memory()

    optimizer.register_step_post_hook(hook)
    with pytest.raises(anybatch.UpdateInterrupted):
        anybatch.TrainStep(model, half_square, optimizer)(torch.zeros(4))
    assert float(model.w.detach()) == ONCE


class ThroughData(torch.optim.Optimizer):
    """As many optimizers outside of torch: it writes through ``.data``, where no version counter sees it.

    Args:
        fails_at: which parameter it runs out of memory at; the ones before it are updated.
        momentum: whether it has state, made in its first step.
    """

    def __init__(self, parameters: Any, fails_at: int, momentum: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.fails_at = fails_at
        self.momentum = momentum

    def step(self, closure: Any = None) -> Any:
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if number == self.fails_at:
                self.fails_at = -1
                raise out_of_memory()
            if p.grad is None:
                continue
            if self.momentum:
                self.state[p].setdefault("sum", torch.zeros_like(p.data)).add_(p.grad.data)
            p.data.sub_(p.grad.data, alpha=0.1)


@pytest.mark.parametrize("momentum", [False, True])
def test_the_first_of_several_parameters_was_updated_through_data(momentum: bool) -> None:
    model = Straight().eval()
    optimizer = ThroughData(model.parameters(), fails_at=1, momentum=momentum)
    step = anybatch.TrainStep(model, mean_square, optimizer)
    before = facts(model)
    with pytest.raises(anybatch.UpdateInterrupted) as caught:
        step(torch.ones(4, 5))
    assert "first.weight" in caught.value.changed
    assert [n for n in different(before, facts(model)) if n.startswith("param")] == ["parameter first.weight"]


def test_nothing_was_updated_through_data_yet() -> None:
    model, plain = Straight().eval(), Straight().eval()
    plain.load_state_dict(model.state_dict())
    anybatch.TrainStep(plain, mean_square, torch.optim.SGD(plain.parameters(), lr=0.1), micro_batch_size=2)(
        torch.ones(4, 5)
    )
    out = anybatch.TrainStep(model, mean_square, ThroughData(model.parameters(), fails_at=0))(torch.ones(4, 5))
    assert [attempt.outcome for attempt in out.attempts] == ["out of memory", "done"]
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("momentum", [False, True])
def test_an_embedding_of_which_few_rows_were_updated_through_data(momentum: bool) -> None:
    """Its first rows have no gradient, as those of words that are not in the batch."""
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 1))
    optimizer = ThroughData(model.parameters(), fails_at=1, momentum=momentum)
    before = facts(model)
    with pytest.raises(anybatch.UpdateInterrupted) as caught:
        anybatch.TrainStep(model, mean_square, optimizer)(torch.tensor([[50], [63], [40], [40]]))
    assert "0.weight" in caught.value.changed
    assert [n for n in different(before, facts(model)) if n.startswith("param")] == ["parameter 0.weight"]


@pytest.mark.parametrize("in_first_group", [1, 2])
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_two_groups_of_which_the_second_finds_no_room_for_its_state(
    options: dict[str, bool], in_first_group: int
) -> None:
    """The words of the first rows are not in the batch, so that Adam leaves these rows as they are."""

    def ready() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5000, 8), nn.Linear(8, 1))
        parameters = list(model.parameters())
        groups = [{"params": parameters[:in_first_group]}, {"params": parameters[in_first_group:]}]
        return model, torch.optim.Adam(groups, lr=0.1, **options)  # type: ignore[arg-type]

    words = torch.tensor([[50], [63], [40], [40]])
    references = {}
    for size in (4, 2):
        model, optimizer = ready()
        anybatch.TrainStep(model, mean_square, optimizer, micro_batch_size=size, verify="off")(words)
        references[size] = facts(model, [optimizer])
    wrong, interrupted = [], 0
    for number in itertools.count(1):
        model, optimizer = ready()
        before = facts(model, [optimizer])
        try:
            with OutOfMemoryAt(number) as memory:
                out = anybatch.TrainStep(model, mean_square, optimizer, micro_batch_size=4, verify="off")(words)
            found = different(references[int(out.attempts[-1].micro_batch_size)], facts(model, [optimizer]))
        except anybatch.UpdateInterrupted as error:
            interrupted += 1
            said = tuple(f"parameter {name}" for name in error.changed)
            found = [n for n in different(before, facts(model), but=said) if n.startswith("parameter")]
        if found:
            wrong.append((number, memory.operations[number - 1], found))
        if not memory.has_raised:
            break
    assert not wrong
    assert interrupted


def test_several_parameters_of_which_the_first_was_updated() -> None:
    """In torch's own for-loop the versions name exactly those that have changed."""
    model = Straight().eval()

    class Halfway(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for p in self.param_groups[0]["params"][:2]:
                    p.sub_(p.grad, alpha=0.1)
            raise out_of_memory()

    before = facts(model)
    with pytest.raises(anybatch.UpdateInterrupted) as caught:
        anybatch.TrainStep(model, mean_square, Halfway(model.parameters(), lr=0.1))(torch.ones(4, 5))
    changed = [n.removeprefix("parameter ") for n in different(before, facts(model)) if n.startswith("parameter")]
    assert changed == ["first.weight", "first.bias"]
    assert set(changed) <= set(caught.value.changed)


def test_only_state_that_was_there_before_has_changed() -> None:
    model = Line()

    class StateFirst(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                if p in self.state:
                    self.state[p]["sum"] += 1
                    raise out_of_memory()
                self.state[p]["sum"] = torch.ones(())
            return super().step(closure)

    step = anybatch.TrainStep(model, half_square, StateFirst(model.parameters(), lr=0.1))
    step(torch.zeros(4))
    with pytest.raises(anybatch.UpdateInterrupted, match="own state") as caught:
        step(torch.zeros(4))
    assert caught.value.state_changed
    assert float(model.w.detach()) == ONCE


def two_optimizers(model: Straight, fail: str) -> list[torch.optim.Optimizer]:
    first = failing(torch.optim.SGD, "before", out_of_memory if fail == "first" else KeyError)
    second = failing(torch.optim.SGD, "before", out_of_memory)
    one = first(model.first.parameters(), lr=0.1)
    one.calls = 0 if fail == "first" else 1
    other = second(model.last.parameters(), lr=0.1)
    other.calls = 1 if fail == "first" else 0
    return [one, other]


def test_the_first_of_two_optimizers_fails() -> None:
    model = Straight().eval()
    step = anybatch.TrainStep(model, mean_square, two_optimizers(model, "first"))
    assert [attempt.outcome for attempt in step(torch.ones(4, 5)).attempts] == ["out of memory", "done"]


def test_the_second_of_two_optimizers_fails() -> None:
    model = Straight().eval()
    step = anybatch.TrainStep(model, mean_square, two_optimizers(model, "second"))
    before = facts(model)
    with pytest.raises(anybatch.UpdateInterrupted) as caught:
        step(torch.ones(4, 5))
    changed = [n.removeprefix("parameter ") for n in different(before, facts(model)) if n.startswith("parameter")]
    assert changed == ["first.weight", "first.bias"]
    assert set(caught.value.changed) == set(changed)


def schedule(optimizer: torch.optim.Optimizer, error: Callable[[], BaseException]) -> Any:
    class Failing(torch.optim.lr_scheduler.StepLR):
        def step(self, epoch: int | None = None) -> None:
            if getattr(self, "last_epoch", -1) >= 0:
                raise error()
            super().step(epoch)

    return Failing(optimizer, 1, 0.5)


def test_a_scheduler_that_runs_out_of_memory() -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, half_square, optimizer, scheduler=schedule(optimizer, out_of_memory))
    with pytest.raises(anybatch.UpdateInterrupted, match=r"is complete, then scheduler\.step"):
        step(torch.zeros(4))
    assert float(model.w.detach()) == ONCE
    assert (step.updates, step.samples) == (1, 4)


def test_a_scheduler_that_fails_otherwise() -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, half_square, optimizer, scheduler=schedule(optimizer, lambda: KeyError("user")))
    with pytest.raises(KeyError, match="user"):
        step(torch.zeros(4))
    assert float(model.w.detach()) == ONCE
    assert step.updates == 1


def test_a_scaler_that_runs_out_of_memory_after_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Line()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step = anybatch.TrainStep(model, half_square, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)

    def update(new_scale: Any = None) -> None:
        raise out_of_memory()

    with monkeypatch.context() as patch:
        patch.setattr(scaler, "update", update)
        with pytest.raises(anybatch.UpdateInterrupted, match=r"is complete, then scaler\.update"):
            step(torch.zeros(4))
    assert float(model.w.detach()) == ONCE
    assert step.updates == 1  # it is applied, so it counts
    scaler.update()  # what the message says
    step(torch.zeros(4))
    assert float(model.w.detach()) == pytest.approx(0.81, abs=1e-7)


def test_an_observer_that_fails_does_not_undo_the_update() -> None:
    model = Line()

    def observer(step: anybatch.TrainStep, result: anybatch.StepResult) -> None:
        raise out_of_memory()

    step = anybatch.TrainStep(model, half_square, torch.optim.SGD(model.parameters(), lr=0.1), recorder=observer)
    with pytest.raises(torch.OutOfMemoryError):
        step(torch.zeros(4))
    assert float(model.w.detach()) == ONCE
    assert step.updates == 1
