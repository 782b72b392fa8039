"""Runs cases of a test module in several processes of one group; a hang is a failure."""

import datetime as dt
import gc
import hashlib
import importlib
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forks import Call, run_forked_calls

SECONDS = 30  # that a collective, and so a case, may wait
STARTING = 60  # that four processes may take to import what they need on two busy cores
Case = Callable[[int, int], None]


def run_cases(
    module: str, world: int, folder: Path, cases: str = "CASES", only: Collection[str] | None = None
) -> dict[str, str]:
    """Runs cases of a module in one group of processes.

    Args:
        module: has the cases.
        world: processes in the group.
        folder: for what they write.
        cases: the name of the cases in the module.
        only: those that run; all by default.

    Returns:
        For each case the tracebacks of the ranks that failed in it, empty if none did.
    """
    names = [name for name in getattr(importlib.import_module(module), cases) if only is None or name in only]
    store, outputs = folder / "store", [folder / f"rank{rank}" for rank in range(world)]
    run_forked_calls(
        [
            Call("ranks_running", "run_rank", [module, cases, "\n".join(names), rank, world, str(store)], output)
            for rank, output in enumerate(outputs)
        ],
        seconds=STARTING + SECONDS * len(names),
    )
    texts = [path.read_text() for path in outputs]
    found = [dict(json.loads(line[5:]) for line in text.splitlines() if line.startswith("case ")) for text in texts]
    ended = {
        name: [one.get(name, f"did not end:\n{text}") for one, text in zip(found, texts, strict=True)] for name in names
    }
    return {name: "\n".join(f"rank {r}: {text}" for r, text in enumerate(all_) if text) for name, all_ in ended.items()}


def run_rank(module: str, cases: str, names: str, rank: int, world: int, store: str) -> None:
    """Runs the named cases, one a line, on one rank, in its process."""
    torch.set_num_threads(1)
    timeout = dt.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    found: Mapping[str, Case] = getattr(importlib.import_module(module), cases)
    gc.freeze()  # what it has loaded, else each collection goes through that too
    for name in names.split("\n"):
        torch.manual_seed(1000 + rank)
        text = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found[name](rank, world)
        except BaseException:  # noqa: BLE001  # the test prints it
            text = traceback.format_exc()
        sys.stdout.write("case " + json.dumps([name, text]) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def everywhere(value: Any) -> list[Any]:
    """What each rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def assert_same_everywhere(value: Any) -> None:
    """Asserts that all ranks have the same."""
    found = everywhere(value)
    assert all(one == found[0] for one in found), found


def hashed(tensors: Any) -> str:
    """A text for all bits of some tensors."""
    bits = b"".join(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(bits).hexdigest()


def assert_weights_same(model: torch.nn.Module) -> None:
    """Asserts that the weights are equal on all ranks in every bit."""
    assert_same_everywhere(hashed(model.parameters()))


@contextmanager
def counted(more: Mapping[str, str] | None = None) -> Iterator[dict[str, int]]:
    """Counts the collectives in its block; of ``more`` ones by their names in ``torch.distributed``."""
    places = {"all_reduce": "all_reduce", "all_gather": "all_gather", "broadcast": "broadcast", **(more or {})}
    numbers = dict.fromkeys(places, 0)
    before = {name: getattr(dist, place) for name, place in places.items()}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            numbers[name] += 1
            return before[name](*args, **options)

        return call

    for name in numbers:
        setattr(dist, places[name], counting(name))
    try:
        yield numbers
    finally:
        for name, function in before.items():
            setattr(dist, places[name], function)


def raised(function: Callable[[], Any]) -> BaseException | None:
    """The error that a function ends with."""
    try:
        function()
    except Exception as error:  # noqa: BLE001  # a test looks at it
        return error
    return None
