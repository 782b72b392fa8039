"""A run that is killed at any point and goes on from its last checkpoint is bitwise the run that was not."""

import gc
import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch.update.transaction import SizeLimit
from faults import Straight, different, facts, mean_square

STEPS = 8
PLACES = ["before the step", "in micro-batch 1", "in micro-batch 3", "before the update", "after the update", "saving"]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(F.dropout(self.norm(self.first(x)), 0.3, self.training))
        return y


class Run:
    """Everything that a training script makes anew when it starts.

    Args:
        folder: of the checkpoint.
        fp16: whether there is autocast and a scaler.
        kill: the step and the place at which the process kills itself.
    """

    def __init__(self, folder: Path, fp16: bool, kill: tuple[int, str] | None) -> None:
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        self.folder, self.kill = folder, kill
        self.number = 0
        self.calls = 0
        self.model = Network()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) if fp16 else None
        self.optimizer.register_step_pre_hook(lambda *_: self.at("before the update"))
        self.optimizer.register_step_post_hook(lambda *_: self.at("after the update"))
        self.step = anybatch.TrainStep(
            self.model, self.loss, self.optimizer, scheduler=self.scheduler, clip_norm=1.0, batch_norm="ghost",
            autocast=torch.float16 if fp16 else None, scaler=self.scaler,
        )  # fmt: skip

    def at(self, place: str) -> None:
        if self.kill == (self.number, place):
            os.kill(os.getpid(), signal.SIGKILL)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        self.at(f"in micro-batch {self.calls}")
        if len(batch["x"]) > {1: 6, 5: 2, 6: 6}.get(self.number, 12):
            raise torch.OutOfMemoryError("CUDA out of memory")
        noise = random.random() + float(np.random.rand())
        return F.cross_entropy(model(batch["x"] * noise).float(), batch["y"])

    def batch(self) -> dict[str, torch.Tensor]:
        """The loader's own: a batch by its number."""
        generator = torch.Generator().manual_seed(self.number)
        batch = {"x": torch.randn(12, 4, generator=generator), "y": torch.arange(12) % 2}
        if self.number == 3:
            batch["x"][5] = 1e9 if self.scaler is not None else 0.0  # too large for float16
        return batch

    def save(self) -> None:
        state = {
            "number": self.number,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step.state_dict(),
        }
        torch.save(state, self.folder / "new.pt")
        self.at("saving")
        (self.folder / "new.pt").replace(self.folder / "last.pt")

    def load(self) -> None:
        state = torch.load(self.folder / "last.pt", weights_only=True)
        self.number = state["number"]
        for name in ("model", "optimizer", "scheduler", "step"):
            getattr(self, name).load_state_dict(state[name])

    def train(self) -> list[Any]:
        told = []
        if (self.folder / "last.pt").exists():
            self.load()
        while self.number < STEPS:
            self.calls = 0
            self.at("before the step")
            out = self.step(self.batch())
            told.append((self.number, out.to_dict()))
            self.number += 1
            self.save()
        return told


def train(folder: Path, fp16: bool, kill: tuple[int, str] | None) -> None:
    """What a process does."""
    torch.set_num_threads(1)
    gc.freeze()  # else each retry collects through all that torch has made
    SizeLimit.PATIENCE = 2
    run = Run(folder, fp16, kill)
    told = run.train()
    torch.save((final(run), told), folder / "final.pt")


def final(run: Run) -> dict[str, Any]:
    return facts(run.model, [run.optimizer], step=run.step, scheduler=run.scheduler, scaler=run.scaler)


@pytest.fixture(scope="module")
def run_process() -> Callable[..., int]:
    """Runs ``train`` in a process of its own, which starts quickly because torch is loaded there already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_resume", "torch._dynamo"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # else the server does not find this file
        multiprocessing.forkserver.ensure_running()

    def run(*args: Any) -> int:
        process = context.Process(target=train, args=args)
        process.start()
        process.join(timeout=120)
        assert process.exitcode is not None, "the process hangs"
        return process.exitcode

    return run


@pytest.fixture(scope="module", params=[False, True], ids=["fp32", "fp16"])
def smooth(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_process: Any) -> Any:
    """What a run gives that is never killed."""
    folder = tmp_path_factory.mktemp("smooth")
    assert run_process(folder, request.param, None) == 0
    return request.param, torch.load(folder / "final.pt", weights_only=False)


def test_the_run_has_everything_that_a_checkpoint_has_to_keep(smooth: Any) -> None:
    fp16, (found, told) = smooth
    sizes = [[(a["micro_batch_size"], a["outcome"]) for a in out["attempts"]] for _, out in told]
    out_of_memory, skipped = "out of memory", "skipped" if fp16 else "done"
    assert sizes[0] == [(12, "done")]
    assert sizes[1] == [(12, out_of_memory), (6, "done")]
    assert sizes[2:5] == [[(6, "done")], [(12, skipped)], [(12, "done")]]  # it grew back
    assert sizes[5] == [(12, out_of_memory), (6, out_of_memory), (3, out_of_memory), (2, "done")]
    assert found["counters"] == ((7, 1, 84) if fp16 else (8, 0, 96))


choose = random.Random(2)
KILLS = [(choose.randrange(STEPS), place) for place in PLACES]


@pytest.mark.parametrize(("number", "place"), KILLS, ids=[f"{place} {number}" for number, place in KILLS])
def test_a_killed_run_goes_on_bitwise(smooth: Any, run_process: Any, tmp_path: Path, number: int, place: str) -> None:
    fp16, (found, told) = smooth
    place = place if place != "in micro-batch 3" or len(told[number][1]["attempts"]) > 1 else "in micro-batch 1"
    assert run_process(tmp_path, fp16, (number, place)) == -signal.SIGKILL
    assert not (tmp_path / "final.pt").exists()
    assert run_process(tmp_path, fp16, None) == 0
    again, retold = torch.load(tmp_path / "final.pt", weights_only=False)
    assert not different(found, again)
    start = number - 1 if place == "saving" else number  # what is not saved is done again
    assert repr(retold) == repr(told[start:])  # as text, in which NaN equals NaN


def test_a_run_that_is_killed_again_and_again(smooth: Any, run_process: Any, tmp_path: Path) -> None:
    fp16, (found, _) = smooth
    for number in (1, 2, 6):
        assert run_process(tmp_path, fp16, (number, "after the update")) == -signal.SIGKILL
    assert run_process(tmp_path, fp16, None) == 0
    assert not different(found, torch.load(tmp_path / "final.pt", weights_only=False)[0])


# --- state_dict without processes ------------------------------------------------------------------------------------


def new_step(**options: Any) -> anybatch.TrainStep:
    model = Straight()
    return anybatch.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def through_a_file(state: Any, folder: Path) -> Any:
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


def test_a_size_that_was_found_does_not_undo_what_is_asked_for(tmp_path: Path) -> None:
    """The run goes on with a smaller micro_batch_size, say on a smaller device."""
    large = new_step()
    large(torch.ones(8, 5))
    small = new_step(micro_batch_size=2)
    small.load_state_dict(through_a_file(large.state_dict(), tmp_path))
    assert small(torch.ones(8, 5)).micro_batches == 4
    assert small.evaluate(torch.ones(8, 5)).micro_batches == 4


def test_a_size_that_was_found_is_kept(tmp_path: Path) -> None:
    step = new_step()
    step._limit.shrink(8)
    again = new_step()
    again.load_state_dict(through_a_file(step.state_dict(), tmp_path))
    assert again(torch.ones(8, 5)).micro_batches == 2


@pytest.mark.parametrize("saved_with", [True, False])
def test_a_state_with_another_scaler_is_refused_and_nothing_changed(saved_with: bool) -> None:
    steps = {True: new_step(scaler=torch.amp.GradScaler("cpu")), False: new_step()}
    steps[saved_with].updates = 5
    state = steps[saved_with].state_dict()
    torch.rand(1)
    before = torch.get_rng_state()
    with pytest.raises(anybatch.BatchError, match="GradScaler"):
        steps[not saved_with].load_state_dict(state)
    assert steps[not saved_with].updates == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_of_another_version_is_refused() -> None:
    with pytest.raises(anybatch.BatchError, match="version None; expected 1"):
        new_step().load_state_dict({"model": 1})
