"""A step that is dropped gives its memory back at once, without waiting for the garbage collector."""

import copy
import functools
import gc
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch
import forked_python
from anybatch.memory.meter import Recording
from faults import OutOfMemoryAt

Batch = dict[str, torch.Tensor]
Built = tuple[torch.nn.Module, torch.optim.Optimizer, anybatch.TrainStep]


def batch_of(rows: int = 8) -> Batch:
    return {"x": torch.randn(rows, 6, 4)}


def loss_fn(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(batch["x"]).pow(2).mean()
    return loss


def encode(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    codes: torch.Tensor = model(batch["x"]).flatten(1)
    return codes


def build(loss: Any = loss_fn, **options: Any) -> Built:
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if "scheduler" in options:
        options["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return model, optimizer, anybatch.TrainStep(model, loss, optimizer, **options)


def over_time() -> Built:
    def chunk_loss(model: torch.nn.Module, batch: Batch, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for one in batch["x"].unbind(1):
            state = torch.tanh(state + model(one))
        return state.pow(2).mean(), state

    return build(
        anybatch.OverTime(chunk_loss, lambda model, batch: torch.zeros(len(batch["x"]), 4), chunk=2), micro_batch_size=2
    )


STEPS: dict[str, Callable[[], Built]] = {
    "micro-batches": lambda: build(micro_batch_size=2),
    "clipped": lambda: build(micro_batch_size=2, clip_norm=1.0),
    "scheduler": lambda: build(micro_batch_size=2, scheduler=True),
    "bfloat16": lambda: build(micro_batch_size=2, autocast=torch.bfloat16),
    "float16": lambda: build(micro_batch_size=2, autocast=torch.float16),
    "fp32 sums": lambda: build(micro_batch_size=2, accumulate="fp32"),
    "a budget": lambda: build(memory="8GiB"),
    "a tight budget": lambda: build(memory=40_000),
    "devices": lambda: build(micro_batch_size=2, devices=["cpu", "cpu"]),
    "coupled": lambda: build(anybatch.Coupled(encode, lambda model, codes: codes.pow(2).mean()), micro_batch_size=2),
    "over time": over_time,
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """No cycle is collected within a test; what torch keeps of a first use is kept before."""
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        one = torch.nn.Parameter(torch.ones(2))
        one.sum().backward()
        optimizer([one], lr=0.1).step()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left(built: Built) -> list[weakref.ref[Any]]:
    return [weakref.ref(one) for one in built]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_goes_with_its_last_reference(name: str, no_collector: None) -> None:
    built = STEPS[name]()
    for _ in range(3):
        built[2](batch_of())
    references = left(built)
    del built
    assert [one() for one in references] == [None, None, None]


def test_after_memory_ran_out(no_collector: None) -> None:
    with OutOfMemoryAt() as smooth:
        build(micro_batch_size=8)[2](batch_of())
    number = next(k for k, name in enumerate(smooth.operations, 1) if "backward" in name or "pow.Tensor_Scalar" in name)
    built = build(micro_batch_size=8)
    with OutOfMemoryAt(number):
        assert built[2](batch_of()).micro_batches > 1
    references = left(built)
    del built
    assert [one() for one in references] == [None, None, None]


def test_after_an_error_of_the_loss(no_collector: None) -> None:
    def broken(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        raise ValueError(f"on purpose, after {model(batch['x']).shape}")

    built = build(broken, micro_batch_size=2)
    with pytest.raises(ValueError, match="on purpose"):
        built[2](batch_of())
    references = left(built)
    del built
    assert [one() for one in references] == [None, None, None]


@pytest.mark.parametrize("name", ["micro-batches", "scheduler", "a budget", "a tight budget"])
def test_a_deep_copy_is_a_step_of_its_own(name: str) -> None:
    model, optimizer, step = STEPS[name]()
    torch.manual_seed(1)
    batches = [batch_of() for _ in range(4)]
    step(batches[0])
    other = copy.deepcopy(step)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    other(batches[1])
    other(batches[2])
    assert (step.updates, other.updates) == (1, 3)
    assert (step.samples, other.samples) == (8, 24)
    assert all(torch.equal(one, now) for one, now in zip(before, model.parameters(), strict=True))
    if other._follower is not None:
        assert other._limit is other._follower is not step._follower
    del model, optimizer, step
    gc.collect()
    other(batches[3])
    assert other.updates == 4


@pytest.mark.parametrize("name", ["micro-batches", "scheduler", "a budget"])
def test_a_pickle_of_a_step_is_refused_with_what_to_save(name: str) -> None:
    step = STEPS[name]()[2]
    step(batch_of())
    with pytest.raises(TypeError, match=r"got a TrainStep to pickle.*save the state_dict\(\)"):
        pickle.dumps(step)


def test_a_plan_keeps_nothing_of_the_model(no_collector: None) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = anybatch.plan(model, loss_fn, batch_of(), optimizer=optimizer, memory="1GiB")
    references: list[weakref.ref[Any]] = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    assert [one() for one in references] == [None, None]
    assert plan.micro_batch_size


THREADS = """
import os, torch, torch.distributed as dist, anybatch
import torch._dynamo  # whose import within a group would keep it, since defaults of functions name it
from test_freed import batch_of, loss_fn

def threads():
    return sum("gloo" in open(f"/proc/self/task/{{one}}/comm").read() for one in os.listdir("/proc/self/task"))

def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, loss_fn, optimizer, {option})
    for _ in range(3):
        step(batch_of())

rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method="file://" + {store!r}, rank=rank, world_size=2)
train()
before = threads()
dist.destroy_process_group()
print("threads", before, threads())
assert rank == 1 or os.wait()[1] == 0
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs the list of threads that Linux gives")
@pytest.mark.skipif(
    tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 8),
    reason="destroying a group waits for its threads while they wait for Python, https://github.com/pytorch/pytorch/pull/154976",
)
@pytest.mark.parametrize("option", ["micro_batch_size=2", "memory='8GiB'"])
def test_the_threads_of_a_process_group_end_when_it_is_destroyed(option: str, tmp_path: Path) -> None:
    """As long as they live at the interpreter's end, a tensor that one of them still holds can abort the process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    code = THREADS.format(option=option, store=str(tmp_path / "store"))
    done = forked_python.run([sys.executable, "-c", code], tmp_path, environment)
    assert done.returncode == 0, done.stderr
    ranks = [line.split() for line in done.stdout.splitlines()]
    assert [int(before) > 0 for _, before, _ in ranks] == [True, True], ranks
    assert [after for *_, after in ranks] == ["0", "0"], ranks


@pytest.mark.parametrize("kind", [Recording, functools.partial(Recording, device_type="cpu")])
def test_no_weak_reference_is_left_to_the_garbage_collector(kind: Callable[[], Any]) -> None:
    """Python 3.11 may crash where the collector takes several of them while their storage goes."""
    x = torch.ones(4, 3)
    for _ in range(3):
        with kind():
            x.mul(2).sum()
    assert weakref.getweakrefcount(x.untyped_storage()) == 0
