"""Several devices in one process, where there are GPUs."""

from typing import Any

import pytest
import torch

import anybatch
from device_models import batch_of, cross_entropy, small, step_of
from reference import assert_bitwise, assert_float64, gradients_of, whole_gradients

pytestmark = pytest.mark.gpu

MIXED = {"cuda:0": 3, "cpu": 1}


def test_a_gpu_and_the_cpu_share_a_batch() -> None:
    model = small().to("cuda:0")
    batch = batch_of(23)
    there = {key: value.to("cuda:0") for key, value in batch.items()}
    expected, _ = whole_gradients(model, cross_entropy, there)
    step = step_of(model, devices=MIXED, micro_batch_size=3)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    for given in (batch, there):
        step(given)
        assert_float64(gradients_of(model), expected)
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(weight)
    with pytest.raises(anybatch.BatchError, match="expected their speeds"):
        step_of(model, devices=["cuda:0", "cpu"])


def test_outputs_of_several_devices_are_joined_on_the_host() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return cross_entropy(model, batch), {"x": batch["x"]}

    batch = batch_of(11)
    out = step_of(small().to("cuda:0"), loss_fn, devices=MIXED, micro_batch_size=2)(batch)
    assert torch.equal(out.metrics["x"], batch["x"])


def test_masks_on_gpus_are_the_same_each_time_and_their_generators_stay() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = small(dropout=0.5, dtype=torch.float32).to("cuda:0")
        step = step_of(model, devices=MIXED, micro_batch_size=2)
        before = torch.cuda.get_rng_state("cuda:0")
        for i in range(3):
            step(batch_of(13, dtype=torch.float32, seed=i))
        assert torch.equal(torch.cuda.get_rng_state("cuda:0"), before)
        found.append(gradients_of(model))
    assert_bitwise(*found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus() -> None:
    model = small().to("cuda:0")
    batch = batch_of(23)
    expected, _ = whole_gradients(model, cross_entropy, {key: value.to("cuda:0") for key, value in batch.items()})
    step_of(model, devices=[0, 1], micro_batch_size=3)(batch)
    assert_float64(gradients_of(model), expected)
    with pytest.raises(anybatch.BatchError, match="twice"):
        step_of(model, devices=["cuda:0", "cuda:0"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_budget_on_each_of_two_gpus() -> None:
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)) for _ in "ab"
    ]
    model = torch.nn.Sequential(torch.nn.Linear(4, 256), *blocks, torch.nn.Linear(256, 3)).to("cuda:0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    step = anybatch.TrainStep(model, cross_entropy, optimizer, devices=[0, 1], memory="64MiB")
    for _ in range(3):
        step(batch_of(20_000, dtype=torch.float32))
    for device in (0, 1):
        torch.cuda.reset_peak_memory_stats(device)
    out = step(batch_of(20_000, dtype=torch.float32))
    assert out.plan is not None
    for device in (0, 1):
        assert torch.cuda.max_memory_allocated(device) <= out.plan.peak_bytes + 2**20
