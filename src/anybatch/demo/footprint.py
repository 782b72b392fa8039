"""A process of its own that measures how much one pass raises the memory of a process.

A process that has already run the whole batch keeps that memory, so each way is measured in a fresh one.
"""

import json
import subprocess
import sys
from pathlib import Path

from anybatch.records.plans import PlanRow

_RESET_PEAK = "5"  # what Linux wants to be written there, see proc(5)
_CLEAR_REFS = Path("/proc/self/clear_refs")
_TIME_LIMIT_SECONDS = 120.0
_NAMES = ("whole", "split", "loop")


def process_bytes(planned: PlanRow, samples: int) -> dict[str, int | None]:
    """Starts a process for each way to the gradient, which runs one pass over a random logical batch.

    Returns:
        For ``"whole"``, ``"split"`` and ``"loop"`` the bytes that the pass added to the resident memory; ``None`` where
        the system does not say.
    """
    if not _CLEAR_REFS.exists():
        return dict.fromkeys(_NAMES)
    command = [sys.executable, "-m", "anybatch.demo.footprint"]
    way = [json.dumps(planned.to_dict()), str(samples)]
    started = {name: _start([*command, name, *way]) for name in _NAMES}
    return {name: _read(process) for name, process in started.items()}


def _start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _read(process: "subprocess.Popen[str]") -> int | None:
    with process:
        try:
            output, _ = process.communicate(timeout=_TIME_LIMIT_SECONDS)
            return int(json.loads(output))
        except (subprocess.TimeoutExpired, ValueError, TypeError):
            return None
        finally:
            process.kill()


def main(name: str, planned: PlanRow, samples: int) -> None:
    """Measures in this process and writes the number of bytes, or ``null``."""
    import torch

    from anybatch.demo.comparison import Ways
    from anybatch.demo.memory import resident_bytes
    from anybatch.demo.training import random_batch
    from anybatch.demo.transformer import make_model

    model = make_model(0)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (100_000,), generator=generator, dtype=torch.uint8)
    batch = random_batch(text, samples, model.context, generator)
    ways = Ways(planned)
    # One small pass first: what torch loads on first use does not belong to the batch.
    ways.split(model, {key: value[:2] for key, value in batch.items()})
    model.zero_grad()
    _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
    before = resident_bytes()
    {"whole": ways.whole, "split": ways.split, "loop": ways.loop}[name](model, batch)
    after = resident_bytes(peak=True)
    sys.stdout.write(json.dumps(None if before is None or after is None else after - before))


if __name__ == "__main__":
    main(sys.argv[1], PlanRow.from_dict(json.loads(sys.argv[2])), int(sys.argv[3]))
