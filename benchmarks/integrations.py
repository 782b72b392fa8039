"""What the exact gradient costs inside the trainers of Transformers and Lightning, beside their own for the same work.

    python benchmarks/integrations.py                        # on the CPU, about five minutes
    python benchmarks/integrations.py --quick                # about one
    python benchmarks/integrations.py --json integrations.json -o integrations.md
    python benchmarks/integrations.py --instructions -o FILE # counts instead of measuring; needs valgrind, slow

Each side trains the same model on the same batches with the same micro-batches. The sides run in turn, in rounds whose
order is reversed from one to the next; a run's figure is the median time from the end of one update to the end of the
next, CPU time of one thread. The ratio is that of two runs in one round. ``again`` is the trainer's own a second time:
how far it is from 1.00 is what the measurement can't tell.

Times of two runs differ by some percent on a shared machine. ``--instructions`` counts what the processor executes in
an update, the difference of a run with some more updates and one with fewer; that is nearly the same each time, but
says nothing of caches.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from common import LanguageModel, Rows, facts, language_loss, markdown, quartiles, write_json, write_text
from torch import Tensor, nn

TARGET = 1.00
WARM = 3
AGAIN = "again"
TITLE = "The exact gradient inside other trainers"
COUNTED = (
    "Instructions that the processor executes in an update, by valgrind's cachegrind: a run with some more updates",
    "less one with fewer. The same models, batches and settings as in the table of times.",
)
NOTES = (
    "Ratio: time of an update over that of the trainer's own, in the same round; under 1 is faster. The median over",
    "the rounds, and the quartiles. AdamW, clipping to norm 1, one device, float32. An update: 4 micro-batches of 4",
    "texts of 64 tokens for the transformers of 4 blocks; 8 of 16 samples for the MLP 64-128-128-10, on which next to",
    "nothing is computed, so that the ratio shows what Python costs.",
)


class Mlp(nn.Module):
    """A model that returns its loss, as those of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"logits": logits} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}


def mlp_rows(count: int) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 64), "labels": torch.randint(10, (count,))}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=64,
        )
    )  # fmt: skip


def texts(count: int) -> dict[str, Tensor]:
    ids = torch.randint(256, (count, 64))
    return {"input_ids": ids, "labels": ids.clone()}


def with_transformers(kind: str, model: nn.Module, rows: dict[str, Tensor], size: int, batches: int) -> list[float]:
    """The seconds of each update of a run of the Trainer of Transformers."""
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from anybatch.integrations.transformers import ExactTrainer

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=size, gradient_accumulation_steps=batches, num_train_epochs=1,
            report_to=[], save_strategy="no", use_cpu=True, logging_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False, seed=0,
        )  # fmt: skip
        trainer = ExactTrainer if kind == "anybatch" else Trainer
        trainer(model, arguments, train_dataset=Rows(rows), callbacks=[Clock()]).train()
    return [end - start for start, end in itertools.pairwise(ends)]


def with_lightning(kind: str, model: nn.Module, rows: dict[str, Tensor], size: int, batches: int) -> list[float]:
    """The seconds of each update of a run of the Trainer of Lightning."""
    import lightning.pytorch as pl

    import anybatch
    from anybatch.integrations.lightning import ExactGradient

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    ends: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if "tokens" in batch:
                return language_loss(self.model, batch)
            loss: Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Clock(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % batches == 0:
                ends.append(time.process_time())

    count = anybatch.count_tokens("labels", shift=1) if "tokens" in rows else anybatch.count_samples
    callbacks = [Clock(), *([ExactGradient(count=count)] if kind == "anybatch" else [])]
    trainer = pl.Trainer(
        max_epochs=1, accumulate_grad_batches=batches, callbacks=callbacks, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(Rows(rows), batch_size=size))
    return [end - start for start, end in itertools.pairwise(ends)]


def own_texts(count: int) -> dict[str, Tensor]:
    tokens = torch.randint(256, (count, 64))
    return {"tokens": tokens, "labels": tokens.clone()}


def language_model() -> nn.Module:
    return LanguageModel(256, 128, 4, 4, 64)


Case = tuple[Callable[..., list[float]], Callable[[], nn.Module], Callable[[int], dict[str, Tensor]], int, int]
CASES: dict[tuple[str, str], Case] = {
    ("Transformers", "Llama, 4 blocks"): (with_transformers, llama, texts, 4, 4),
    ("Transformers", "MLP"): (with_transformers, Mlp, mlp_rows, 16, 8),
    ("Lightning", "transformer, 4 blocks"): (with_lightning, language_model, own_texts, 4, 4),
    ("Lightning", "MLP"): (with_lightning, Mlp, mlp_rows, 16, 8),
}


def measure(name: tuple[str, str], rounds: int, updates: int) -> list[dict[str, Any]]:
    """Runs the sides of a case in turn."""
    run, make, rows_of, size, batches = CASES[name]
    found: dict[str, list[float]] = {"own": [], AGAIN: [], "anybatch": []}
    rows = rows_of((updates + WARM + 1) * size * batches)
    for number in range(rounds):
        order = list(found) if number % 2 == 0 else list(reversed(found))
        for side in order:
            torch.manual_seed(0)
            found[side].append(statistics.median(run(side, make(), rows, size, batches)[WARM:]))
    own = found.pop("own")
    return [
        {
            "trainer": name[0], "model": name[1], "side": side, "own_ms": 1000 * statistics.median(own),
            "ratios": [one / other for one, other in zip(times, own, strict=True)],
        }
        for side, times in found.items()
    ]  # fmt: skip


def counted(name: tuple[str, str], side: str, updates: int) -> int:
    """The instructions of a whole run, in a process of its own under valgrind."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "counts")
        command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", f"--cachegrind-out-file={path}", sys.executable]
        command += [__file__, "--single", *name, side, str(updates)]
        steady = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        steady |= {f"MALLOC_{which}_THRESHOLD_": str(2**32) for which in ("MMAP", "TRIM")}
        subprocess.run(command, env=os.environ | steady, check=True, capture_output=True)
        (line,) = [line for line in path.read_text().splitlines() if line.startswith("summary:")]
    return int(line.split()[1])


def instructions(name: tuple[str, str]) -> dict[str, str]:
    """A row of the table of instructions."""
    few, many = (5, 25) if name[1] == "MLP" else (2, 6)
    own, ours = (
        (counted(name, side, many) - counted(name, side, few)) / (many - few) / 1e6 for side in ("own", "anybatch")
    )
    return {
        "trainer": name[0], "model": name[1], "its own, million instructions an update": f"{own:.1f}",
        "anybatch": f"{ours:.1f}", "ratio": f"{ours / own:.3f}", "target": f"<= {TARGET:.2f}",
    }  # fmt: skip


def run_once(trainer: str, model: str, side: str, updates: str) -> None:
    """Trains once, and leaves without cleaning up; for ``counted``."""
    run, make, rows_of, size, batches = CASES[trainer, model]
    torch.manual_seed(0)
    gc.disable()
    run(side, make(), rows_of(size * batches * int(updates)), size, batches)
    os._exit(0)


def shown(row: dict[str, Any]) -> dict[str, str]:
    low, middle, high = quartiles(row["ratios"])
    side = "its own again" if row["side"] == AGAIN else "anybatch"
    return {
        "trainer": row["trainer"], "model": row["model"], "its own, ms an update": f"{row['own_ms']:.1f}",
        "side": side, "ratio": f"{middle:.3f}", "quartiles": f"{low:.3f} to {high:.3f}",
        "target": "" if row["side"] == AGAIN else f"<= {TARGET:.2f}",
    }  # fmt: skip


@click.command(help="Measures what the exact gradient costs inside other trainers.")
@click.option("--quick", is_flag=True, help="Fewer rounds; for a first look.")
@click.option("--rounds", type=click.IntRange(min=1), help="Runs of each side.")
@click.option("--updates", type=click.IntRange(min=2), default=30, show_default=True, help="Updates of a run.")
@click.option("--trainer", "chosen", multiple=True, type=click.Choice(["Transformers", "Lightning"]))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the unrounded rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, as Markdown.")
@click.option("--instructions", "is_counting", is_flag=True, help="Count instructions instead; needs valgrind.")
@click.option("--single", nargs=4, hidden=True)
def main(
    quick: bool, rounds: int | None, updates: int, chosen: tuple[str, ...], json_path: Path | None,
    output: Path | None, is_counting: bool, single: tuple[str, str, str, str] | None,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if single is not None:
        run_once(*single)
    import transformers

    rounds = rounds or (3 if quick else 9)
    names = [name for name in CASES if not chosen or name[0] in chosen]
    known = facts(torch.device("cpu")) | {"transformers": transformers.__version__}
    if is_counting:
        rows: list[dict[str, Any]] = [dict(instructions(name)) for name in names]
        text = markdown(TITLE, known, COUNTED, rows)
    else:
        rows = [row for name in names for row in measure(name, rounds, updates)]
        text = markdown(TITLE, known, NOTES, [shown(row) for row in rows])
    click.echo(text)
    if json_path is not None:
        write_json(json_path, known, rows)
    if output is not None:
        write_text(output, text)


if __name__ == "__main__":
    main()
