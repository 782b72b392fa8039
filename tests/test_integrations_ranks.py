"""The Trainer of Transformers in two processes: one gradient of all their rows."""

import copy
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import Trainer

from anybatch.integrations.transformers import ExactTrainer
from ranks_running import Case, everywhere, run_cases
from reference import assert_float64, distance, norm
from trainer_heads import Tagger, tokens, trained, truth


def _launched(rank: int, world: int) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def of_all_ranks(rank: int, world: int) -> None:
    _launched(rank, world)
    torch.manual_seed(0)
    model, samples = Tagger(), tokens(48)
    expected, loss = truth(model, samples)
    with TemporaryDirectory() as folder:
        trainer, seen = trained(ExactTrainer, copy.deepcopy(model), samples, Path(folder), micro_batch_size=3 + rank)
        _, own = trained(Trainer, copy.deepcopy(model), samples, Path(folder))
    assert_float64(seen.gradients[0], expected)
    assert distance(own.gradients[0], expected) > 0.1 * norm(expected)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-6)
    weights = [parameter.tolist() for parameter in trainer.model.parameters()]
    assert all(other == weights for other in everywhere(weights))


CASES: dict[str, Case] = {"of all ranks": of_all_ranks}


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    failed = {name: text for name, text in run_cases("test_integrations_ranks", 2, tmp_path).items() if text}
    assert not failed, "\n".join(failed.values())
