"""Trains on several ranks, and goes on where it was when torchrun starts it again.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/ranks/restart.py --folder states

``torch.distributed.checkpoint`` writes the model and the optimizer, which are the same on all ranks, once, and of each
rank the random state and the counters of its step. A state counts once every rank has written its part, which a file
says that is replaced in one go. ``--die-at 4`` kills the last rank in update 4 of its first life, to see that the
weights in the end are, bit by bit, those of a run that nothing happened to.
"""

import argparse
import datetime as dt
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

import anybatch


def batch_of(update: int, rank: int) -> dict[str, torch.Tensor]:
    """The share of one rank, which depends on the update and the rank only, so that it is the same in every life."""
    generator = torch.Generator().manual_seed(1000 * update + rank)
    rows = 5 + 3 * rank
    return {"x": torch.randn(rows, 8, generator=generator), "y": torch.randint(0, 3, (rows,), generator=generator)}


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over the samples."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: anybatch.TrainStep) -> dict[str, Any]:
    """All that a life needs of the one before: the same model and optimizer on all ranks, the step of each rank."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, f"step {dist.get_rank()}": step.state_dict()}


def save(folder: Path, state: dict[str, Any], updates: int) -> None:
    """Writes the state after an update, and then that it is whole."""
    home = folder / f"update{updates}"
    state_dict_saver.save(state, checkpoint_id=home)  # returns once all ranks have written
    if dist.get_rank() == 0:
        part = folder / "latest.json.part"
        part.write_text(json.dumps({"folder": home.name, "ranks": dist.get_world_size()}))
        part.replace(folder / "latest.json")


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: anybatch.TrainStep) -> None:
    """Reads the last state that is whole, if there is one."""
    latest = folder / "latest.json"
    if not latest.exists():
        return
    found = json.loads(latest.read_text())
    if found["ranks"] != dist.get_world_size():
        raise SystemExit(f"the state is of {found['ranks']} ranks, and these are {dist.get_world_size()}")
    state = state_of(model, optimizer, step)
    state_dict_loader.load(state, checkpoint_id=folder / found["folder"])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step.load_state_dict(state[f"step {dist.get_rank()}"])


def join() -> None:
    """Makes the process group, apart from what an earlier life has left in the store of torchrun.

    torch 2.13 keeps one store for all lives, in which gloo would find the addresses of processes that are gone.
    """
    store, rank, ranks = next(rendezvous("env://"))
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"life {life}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=dt.timedelta(seconds=60))


def train(options: argparse.Namespace) -> None:
    """Trains from the last state that is whole to the end."""
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same weights everywhere
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=4, clip_norm=1.0)
    torch.manual_seed(1 + rank)  # and other dropout
    load(options.folder, model, optimizer, step)

    is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    while step.updates < options.updates:
        if is_first_life and step.updates + 1 == options.die_at and rank == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        out = step(batch_of(step.updates, rank))
        save(options.folder, state_of(model, optimizer, step), step.updates)
        if rank == 0:
            print(f"update {step.updates}: loss {out.loss:.6f}", flush=True)
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"rank {rank} weights {hashlib.sha256(bits).hexdigest()}", flush=True)


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser(description="train on several ranks, and go on after a failure")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--die-at", type=int, default=None)
    options = parser.parse_args()
    join()
    train(options)  # whose step is gone when it returns, and was the last to hold the group
    dist.destroy_process_group()  # so that this ends the threads of gloo, which may else abort a process that exits


if __name__ == "__main__":
    main()
