"""What ``devices=`` refuses, before anything is changed, and what it says to write instead."""

from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch
from anybatch.loss.reducing import ALONE
from anybatch.options import check_devices
from device_models import TWO, batch_of, cross_entropy, devices_of, small, step_of


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ("cpu", "expected a sequence"),
        (2, "expected a sequence"),
        ([], "empty"),
        ([None], "devices has None"),
        (["gpu"], "torch does not know"),
        (["cpu", "meta"], "finds no meta"),
        (["cpu", True], "devices has True"),
        ({"cpu": 0, "cpu:0": 1}, "expected its relative speed"),
        ({"cpu": "fast", "cpu:0": 1}, "expected its relative speed"),
        ({"cpu": float("inf"), "cpu:0": 1}, "expected its relative speed"),
    ],
)
def test_devices_that_can_not_be_meant(devices: Any, text: str) -> None:
    with pytest.raises(anybatch.BatchError, match=text):
        step_of(small(), devices=devices)


def test_unlike_devices_need_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = iter(range(9))
    monkeypatch.setattr("anybatch.parallel.devices._kind_of", lambda device: next(kinds))
    with pytest.raises(anybatch.BatchError, match=r"of different kinds.*expected their speeds, as in devices=\{"):
        step_of(small(), devices=TWO)
    assert len(devices_of(step_of(small(), devices={"cpu": 1, "cpu:0": 3})).placements) == 2


def test_devices_that_are_not_there() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(anybatch.BatchError, match="finds no cuda here"):
            step_of(small(), devices=["cpu", "cuda:0"])
    if not torch.accelerator.is_available():
        with pytest.raises(anybatch.BatchError, match="finds no accelerator here"):
            step_of(small(), devices=[0, 1])


def test_one_device_is_the_usual_way() -> None:
    assert step_of(small(), devices=["cpu"])._placements is None
    assert step_of(small(), devices=None)._placements is None
    assert len(devices_of(step_of(small(), devices=TWO)).placements) == 2


def test_a_model_that_lies_elsewhere() -> None:
    with pytest.raises(anybatch.BatchError, match=r"lies on meta.*model\.to\(\"cpu\"\)"):
        step_of(small().to("meta"), devices=TWO)
    parts = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3, device="meta"))
    with pytest.raises(anybatch.BatchError, match="expected the whole model on one"):
        step_of(parts, devices=TWO)


def test_wrapped_models_name_what_to_write() -> None:
    wrapped = torch.nn.DataParallel(small())
    with pytest.raises(
        anybatch.BatchError, match=r"pass the model in it, model\.module, and devices=model\.device_ids"
    ):
        step_of(wrapped, devices=TWO)
    with pytest.raises(anybatch.BatchError, match=r"model\.module"):
        step_of(torch.nn.Sequential(wrapped), devices=TWO)
    compiled = small()
    compiled.compile()
    with pytest.raises(anybatch.BatchError, match=r"before torch\.compile"):
        step_of(compiled, devices=TWO)
    with pytest.raises(anybatch.BatchError, match=r"before torch\.compile"):
        step_of(torch.compile(small()), devices=TWO)  # type: ignore[arg-type]
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3))
    with pytest.raises(anybatch.BatchError, match="created by the first forward pass"):
        step_of(lazy, devices=TWO)


def test_a_scripted_model() -> None:
    scripted: Any = torch.jit.script(small())
    with pytest.raises(anybatch.BatchError, match=r"before torch\.jit"):
        step_of(scripted, devices=TWO)


def test_a_wrapper_that_comes_later() -> None:
    model = small()
    step = step_of(model, devices=TWO)
    step(batch_of(4))
    model[1] = torch.nn.DataParallel(model[1])
    with pytest.raises(anybatch.BatchError, match=r"model\.module"):
        step(batch_of(4))
    assert step.updates == 1


def test_losses_in_pieces() -> None:
    coupled = anybatch.Coupled(lambda model, batch: model(batch["x"]), lambda model, outputs: outputs.square().mean())
    with pytest.raises(anybatch.BatchError, match="Coupled, which runs its micro-batches one after the other"):
        step_of(small(), coupled, devices=TWO)
    over_time = anybatch.OverTime(
        lambda model, chunk, state: (model(chunk["x"]).mean(), state), lambda model, batch: torch.zeros(1)
    )
    with pytest.raises(anybatch.BatchError, match="OverTime, which runs its micro-batches one after the other"):
        step_of(small(), over_time, devices=TWO)


def test_one_plan_for_devices_of_several_types() -> None:
    mixed = [torch.device("cuda:0"), torch.device("cpu")]
    with pytest.raises(anybatch.BatchError, match=r"of the types cpu and cuda.*micro_batch_size="):
        check_devices(mixed, object(), ALONE, None)
    check_devices(mixed, None, ALONE, None)
    check_devices([torch.device("cuda:0"), torch.device("cuda:1")], object(), ALONE, None)


def test_a_size_besides_a_budget() -> None:
    with pytest.raises(anybatch.BatchError, match="leave one of them out"):
        step_of(small(), devices=TWO, memory="1GiB", micro_batch_size=4)


def test_process_groups(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(anybatch.BatchError, match=r"under torchrun each process has one"):
            step_of(small(), devices=TWO, group=torch.distributed.group.WORLD)
        step_of(small(), devices=TWO, group=False)(batch_of(4))
    finally:
        torch.distributed.destroy_process_group()


def test_the_noise_of_micro_batches_elsewhere() -> None:
    with pytest.raises(anybatch.BatchError, match="measure without devices="):
        anybatch.NoiseScale(step_of(small(), devices=TWO))


def test_post_accumulate_hooks() -> None:
    model = small()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(anybatch.BatchError, match="post-accumulate"):
        step_of(model, cross_entropy, devices=TWO)
