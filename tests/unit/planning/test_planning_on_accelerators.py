"""What only a step on an accelerator needs: room for workspaces, limits that end at the update, queued work."""

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anybatch
from anybatch import accelerators
from anybatch.accelerators import reserving_at_most
from anybatch.batch.batches import Part, Splittable
from anybatch.planning import subjects, timing
from anybatch.planning.devices import workspace_bytes
from anybatch.planning.observing import Observing
from anybatch.planning.timing import Timed, measured_grid

KIB = 2**10


def mean_square(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(batch).square().mean()
    return result


def smallest() -> int:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = anybatch.plan(model, mean_square, torch.randn(64, 64), optimizer, memory="1GiB")
    assert plan.smallest_bytes is not None
    return plan.smallest_bytes


def test_workspaces_of_libraries_are_part_of_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workspace_bytes(torch.device("cpu")) == 0
    without = smallest()
    monkeypatch.setattr(subjects, "workspace_bytes", lambda device: 100 * KIB)
    assert smallest() == without + 100 * KIB
    model = torch.nn.Linear(64, 64)
    step = anybatch.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), memory=110 * KIB)
    with pytest.raises(anybatch.DoesNotFit, match=r"buckets and workspaces of libraries 100.0 KiB"):
        step(torch.randn(64, 64))


class Device:
    """A device's module whose allocator only remembers its limit."""

    def __init__(self) -> None:
        self.limit = 1.0

    def set_per_process_memory_fraction(self, share: float, _: torch.device) -> None:
        self.limit = share

    def get_per_process_memory_fraction(self, _: torch.device) -> float:
        return self.limit

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        return 1000, 1000


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(accelerators, "module_of", lambda _: made)
    yield made
    assert made.limit == 1.0


def test_a_limit_ends_where_an_optimizer_steps(device: Device) -> None:
    optimizer, seen = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1), []
    optimizer.register_step_post_hook(lambda *_: seen.append(device.limit))
    with reserving_at_most(100, torch.device("cpu")):
        assert device.limit == pytest.approx(0.1)
        optimizer.step()
    assert seen == [1.0]
    optimizer.step()  # nothing is left of it


def test_a_limit_ends_with_an_error(device: Device) -> None:
    with pytest.raises(KeyError), reserving_at_most(100, torch.device("cpu")):
        raise KeyError


def measure(monkeypatch: pytest.MonkeyPatch, cold: float, patience: float, *, queued: bool) -> dict[float, float]:
    """Times a launch-bound model, whose first run of each size loads kernels."""
    seen, now = set[float](), [0.0]

    def measured(_: Any, part: Part, *__: Any, **___: Any) -> Timed:
        seconds = (0.03 if part.cost in seen else cold) + part.cost * 1e-4
        seen.add(part.cost)
        now[0] += seconds
        return Timed(seconds)

    monkeypatch.setattr(timing, "measured", measured)
    monkeypatch.setattr(timing, "is_accelerator", lambda _: queued)
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    subject: Any = types.SimpleNamespace(settings=types.SimpleNamespace(device=torch.device("cpu")))
    recipe: Any = None
    times = measured_grid(subject, [Part(range(n), n) for n in (2, 8, 32, 128)], recipe, (), patience)
    return {size: times.seconds(size) / size for size in (2, 8, 32, 128)}


@pytest.mark.parametrize("cold", [0.03, 0.3, 2.0])
def test_small_micro_batches_are_not_taken_for_as_fast_as_large_ones(
    monkeypatch: pytest.MonkeyPatch, cold: float
) -> None:
    """A sample is the cheapest in the largest micro-batch, even if there is no time to measure any other."""
    each = measure(monkeypatch, cold, 0.75, queued=True)
    assert each[2] > each[8] > each[32] > each[128]
    assert each[128] == pytest.approx(0.03 / 128 + 1e-4)


def test_the_first_batch_under_fsdp2_is_no_thousands_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    from anybatch.planning import observing

    model, sizes = torch.nn.Linear(4, 4), []
    for is_limited in (False, True):
        step = anybatch.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1))
        follower = Observing(step._subject, memory="1GiB")
        monkeypatch.setattr(observing, "is_accelerator", lambda _, is_limited=is_limited: is_limited)
        monkeypatch.setattr(observing, "_before", lambda _: 0)
        follower.prepare(Splittable([torch.randn(8192, 4)]), lambda: None)
        sizes.append(follower.value)
    assert sizes == [2, 128]


def test_sizes_under_fsdp2_grow_back_a_quiet_while_after_memory_ran_out() -> None:
    """By the rule that all sizes have: the next growth waits twice as long if the last one ran out of memory."""
    model = torch.nn.Linear(4, 4)
    step = anybatch.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1))
    follower = Observing(step._subject, memory="1GiB")

    def next_size() -> float | None:
        follower.prepare(Splittable([torch.randn(64, 4)]), lambda: None)
        with follower.confirmed(torch.device("cpu")):
            size = follower.value
        follower.resolve(64)
        return size

    def quiet_after_memory_ran_out() -> int:
        follower.shrink(64)
        return next(number for number in range(200) if next_size() == 64)

    assert [next_size() for _ in range(6)][-1] == 64
    first = quiet_after_memory_ran_out()
    assert 20 <= first <= 40
    assert first < quiet_after_memory_ran_out() <= 2 * first + 8
    state = follower.plan_state()
    follower.shrink(64)
    assert next_size() == 32
    follower.load_plan_state(state)
    assert next_size() == 64
