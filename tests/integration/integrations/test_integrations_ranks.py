"""The Trainers of Transformers and Lightning in two processes: one gradient of all their rows."""

import copy
import os
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from transformers import Trainer

import lightning_runs
from anybatch.integrations.lightning import ExactGradient
from anybatch.integrations.transformers import ExactTrainer
from lightning_runs import COUNT
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
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, abs=1e-4)  # transformers 4 rounds it
    weights = [parameter.tolist() for parameter in trainer.model.parameters()]
    assert all(other == weights for other in everywhere(weights))


def of_lightning(rank: int, world: int) -> None:
    """Each rank has every other row, and so other numbers of labels, in a window of three batches."""
    _launched(rank, world)
    torch.manual_seed(0)
    module, rows = lightning_runs.Tagger(), lightning_runs.data(44)
    expected, loss = lightning_runs.truth(module, rows)
    found = {}
    for name, callbacks in {"exact": [ExactGradient(count=COUNT, micro_batch_size=3 + rank)], "own": []}.items():
        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
        trained, options = copy.deepcopy(module), dict[str, Any](strategy=strategy, devices=world)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning_runs.fitted(trained, rows, *callbacks, accumulate_grad_batches=3, **options)
        assert len(trained.gradients) == trainer.global_step == 1
        found[name] = trained.gradients[0]
        if name == "exact":
            assert float(trainer.callback_metrics["loss_epoch"]) == pytest.approx(loss, rel=1e-6)
            weights = [parameter.tolist() for parameter in trained.parameters()]
            assert all(other == weights for other in everywhere(weights))
    assert_float64(found["exact"], expected)
    assert distance(found["own"], expected) > 0.05 * norm(expected)


CASES: dict[str, Case] = {"of all ranks": of_all_ranks, "of Lightning": of_lightning}


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    failed = {name: text for name, text in run_cases("test_integrations_ranks", 2, tmp_path).items() if text}
    assert not failed, "\n".join(failed.values())
