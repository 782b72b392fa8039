"""TrainStep on prepared objects: Accelerate's own loop divides by the number of batches, and steps schedules often."""

import copy
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

import anybatch
import forked_python
from anybatch.integrations.accelerate import train_step
from ranks_running import Case, everywhere, run_cases
from reference import Gradients, assert_bitwise, assert_float64, distance, gradients_of, norm, whole_gradients

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:accelerate")
COUNT = anybatch.count_tokens("labels")


class Tagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.out = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.embed(ids))
        return found


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def data(rows: int = 22) -> list[dict[str, torch.Tensor]]:
    """Rows of which more and more labels are masked."""
    generator = torch.Generator().manual_seed(0)
    found = [{name: torch.randint(20, (9,), generator=generator) for name in ("ids", "labels")} for _ in range(rows)]
    for row, sample in enumerate(found):
        sample["labels"][: int(row * 9 / rows)] = -100
    return found


def whole(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def prepared(accelerator: Accelerator, model: Any, rows: int = 22, batch_size: int = 8) -> tuple[Any, ...]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    samples: Any = data(rows)
    loader: Any = torch.utils.data.DataLoader(samples, batch_size=batch_size)
    found: tuple[Any, ...] = accelerator.prepare(model, optimizer, loader, schedule)
    return found


@pytest.fixture(autouse=True)
def _another_accelerator() -> Any:
    """Accelerate keeps its state for the whole process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state() if hasattr(state, "_reset_state") else state._shared_state.clear()


@pytest.mark.parametrize("dispatched", [False, True])
def test_the_gradient_is_that_of_the_whole_batch(dispatched: bool) -> None:
    from accelerate import DataLoaderConfiguration

    configuration = DataLoaderConfiguration(dispatch_batches=dispatched)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, dataloader_config=configuration)
    model, optimizer, loader, schedule = prepared(accelerator, Tagger().double())
    expected, values = whole_gradients(copy.deepcopy(model), loss_fn, whole(data()))
    step = train_step(
        accelerator, model, loss_fn, optimizer, schedule, count=COUNT, micro_batch_size=3, clip_norm=float("inf")
    )
    results = [step(window) for window in anybatch.windows(loader, batches=3)]
    assert_float64(gradients_of(model), expected)
    assert [result.loss for result in results] == [pytest.approx(values["loss"])]
    assert schedule.scheduler.last_epoch == step.updates == 1
    assert schedule.get_last_lr() == [0.05]


def test_accelerates_own_gradient_is_another() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer, loader, _ = prepared(accelerator, Tagger().double())
    expected, _ = whole_gradients(copy.deepcopy(model), loss_fn, whole(data()))
    found: list[Gradients] = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_fn(model, batch))
            if accelerator.sync_gradients:
                found.append(gradients_of(model))
            optimizer.step()
            optimizer.zero_grad()
    assert len(found) == 1
    assert distance(found[0], expected) > 0.3 * norm(expected)


def test_mixed_precision_is_accelerates() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    plain = Tagger()
    expected, _ = whole_gradients(copy.deepcopy(plain).double(), loss_fn, whole(data()))
    model, optimizer, _, _ = prepared(accelerator, plain)
    loss_fn(model, whole(data())).backward()
    error = distance(gradients_of(model), expected)
    seen: list[torch.dtype] = []
    model.out.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    step = train_step(accelerator, model, loss_fn, optimizer, count=COUNT, micro_batch_size=3)
    step(whole(data()))
    assert set(seen) == {torch.bfloat16}
    assert 0 < distance(gradients_of(model), expected) <= 2 * error


def test_the_scaler_is_accelerates() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)  # made for fp16 on a GPU
    model, optimizer, _, _ = prepared(accelerator, Tagger().double())
    expected, _ = whole_gradients(copy.deepcopy(model), loss_fn, whole(data()))
    train_step(accelerator, model, loss_fn, optimizer, count=COUNT, micro_batch_size=3)(whole(data()))
    assert_float64(gradients_of(model), expected)
    assert accelerator.scaler.get_scale() == 2.0**11


def test_states_are_saved_and_loaded_by_accelerate(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, schedule = prepared(accelerator, Tagger(), rows=64)
    step = train_step(accelerator, model, loss_fn, optimizer, schedule, count=COUNT, micro_batch_size=3)
    accelerator.register_for_checkpointing(step)
    batches = list(loader)
    for batch in batches[:3]:
        step(batch)
    accelerator.save_state(str(tmp_path))
    for batch in batches[3:6]:
        step(batch)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    rate = schedule.get_last_lr()
    accelerator.load_state(str(tmp_path))
    assert step.updates == 3
    for batch in batches[3:6]:
        step(batch)
    assert_bitwise(list(model.parameters()), expected)
    assert schedule.get_last_lr() == rate


def test_several_optimizers_and_those_that_were_not_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    model = Tagger()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.embed, model.out)]
    model, first = accelerator.prepare(model, optimizers[0])
    step = train_step(accelerator, model, loss_fn, [first, optimizers[1]], count=COUNT)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(whole(data()))
    assert all(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_precision_and_scaler_of_ones_own_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, _ = prepared(accelerator, Tagger())
    with pytest.raises(anybatch.BatchError, match="mixed_precision"):
        train_step(accelerator, model, loss_fn, optimizer, autocast=torch.bfloat16)


def test_sharding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import DistributedType

    accelerator = Accelerator(cpu=True)
    model, optimizer, _, _ = prepared(accelerator, Tagger())
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(anybatch.BatchError, match="DEEPSPEED"):
        train_step(accelerator, model, loss_fn, optimizer)


def test_without_accelerate_it_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['accelerate'] = None; import anybatch.integrations.accelerate"
    done = forked_python.run([sys.executable, "-c", code], tmp_path)
    assert "pip install 'accelerate>=1.0'" in done.stderr


def launched(rank: int, world: int) -> Accelerator:
    """What torchrun would have set; the group is there already."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    return Accelerator(cpu=True)


def two_processes(rank: int, world: int) -> None:
    """Each has other rows, and other numbers of labels and micro-batches; schedules step once."""
    accelerator = launched(rank, world)
    assert accelerator.num_processes == world
    plain = Tagger().double()
    expected, values = whole_gradients(copy.deepcopy(plain), loss_fn, whole(data(32)))
    model, optimizer, loader, schedule = prepared(accelerator, plain, rows=32)
    step = train_step(
        accelerator, model, loss_fn, optimizer, schedule, count=COUNT, micro_batch_size=3 + rank, clip_norm=1e9
    )
    for window in anybatch.windows(loader, batches=2):
        result = step(window)
    assert_float64(gradients_of(plain), expected)
    assert result.loss == pytest.approx(values["loss"])
    assert schedule.scheduler.last_epoch == 1
    assert everywhere([parameter.tolist() for parameter in plain.parameters()])[0] == [
        parameter.tolist() for parameter in plain.parameters()
    ]


def repeated_samples(rank: int, world: int) -> None:
    accelerator = launched(rank, world)
    model, optimizer, _, _ = prepared(accelerator, Tagger().double(), rows=22)
    with pytest.warns(anybatch.AnyBatchWarning, match="repeats 10 samples"):
        train_step(accelerator, model, loss_fn, optimizer)


CASES: dict[str, Case] = {"two processes": two_processes, "repeated samples": repeated_samples}


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    failed = {name: text for name, text in run_cases("test_integrations_accelerate", 2, tmp_path).items() if text}
    assert not failed, "\n".join(failed.values())
