"""Ranks that make their updates otherwise are told, by field and rank, before their weights part."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import anybatch
from ranks_running import Case, assert_same_everywhere, assert_weights_same, counted, everywhere, raised
from sharding_models import runs_on_cpu
from test_closures import Needing, Twice, Usual
from test_ranks_exact import Net, batches_of, mean_loss


def made(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, anybatch.TrainStep]:
    torch.manual_seed(7)
    model = Net()
    kind = options.pop("kind", torch.optim.AdamW)
    optimizer = kind(model.parameters(), lr=options.pop("lr", 0.01))
    return model, optimizer, anybatch.TrainStep(model, mean_loss, optimizer, micro_batch_size=4, **options)


def differing(rank: int, world: int, *, change: Callable[[Any, Any, Any], Any], field: str, at: int = 1) -> None:
    """All goes well until one rank has something else; all are told at the next step, and go on once it is mended."""
    model, optimizer, step = made(clip_norm=1.0)
    step(batches_of((7, 10))[rank])
    undo = change(model, optimizer, step) if rank == at else None
    before = [p.detach().clone() for p in model.parameters()]
    error = raised(lambda: step(batches_of((7, 10))[rank]))
    assert isinstance(error, anybatch.AnyBatchError), error
    text = str(error)
    assert_same_everywhere(text)
    assert field in text, text
    assert "on rank 0" in text, text
    assert "on rank 1" in text, text
    assert "other values" not in text, text
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    if undo is not None:
        undo()
    step(batches_of((7, 10))[rank])
    assert step.updates == 2
    assert_weights_same(model)


def option(key: str, value: Any) -> Callable[[Any, Any, Any], Any]:
    def change(model: Any, optimizer: Any, step: Any) -> Any:
        group = optimizer.param_groups[0]
        before, group[key] = group[key], value
        return partial(group.__setitem__, key, before)

    return change


def frozen(model: Any, optimizer: Any, step: Any) -> Any:
    weight = next(model.parameters())
    weight.requires_grad_(False)
    return partial(weight.requires_grad_, True)


def clipped(model: Any, optimizer: Any, step: Any) -> Any:
    step._boundary._clip_norm = 0.01  # as if it had been built so
    return partial(setattr, step._boundary, "_clip_norm", 1.0)


def from_the_start(rank: int, world: int, *, options: Mapping[str, Any], field: str) -> None:
    _, _, step = made(**(options if rank else {}))
    text = str(raised(lambda: step(batches_of((7, 10))[rank])))
    assert_same_everywhere(text)
    assert field in text, text
    assert step.updates == 0


def scheduled_on_one(rank: int, world: int) -> None:
    """A scheduler that steps on one rank only is found by the learning rate."""
    _, optimizer, step = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step(batches_of((7, 10))[rank])
    if rank == 0:
        scheduler.step()
    text = str(raised(lambda: step(batches_of((7, 10))[rank])))
    assert "param_groups[0]['lr'] is 0.005 on rank 0 and 0.01 on rank 1" in text, text


def frozen_before(rank: int, world: int) -> None:
    """A parameter that one rank never trained: no values differ, and none are blamed."""
    torch.manual_seed(7)
    model = Net()
    if rank:
        next(model.parameters()).requires_grad_(False)
    step = anybatch.TrainStep(model, mean_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    text = str(raised(lambda: step(batches_of((7, 10))[rank])))
    assert "requires_grad of" in text, text
    assert "True on rank 0 and False on rank 1" in text, text
    assert "other values" not in text, text


def alike(rank: int, world: int) -> None:
    """Numbers of other types and kernels of other kinds are no other settings, and nothing is sent besides."""
    _, optimizer, step = made(clip_norm=1.0)
    step(batches_of((7, 10))[rank])
    with counted() as plain:
        step(batches_of((7, 10))[rank])
    if rank:
        group = optimizer.param_groups[0]
        group["lr"], group["betas"], group["foreach"] = torch.tensor(0.01, dtype=torch.double), [0.9, 0.999], False
    with counted() as other:
        step(batches_of((7, 10))[rank])
    assert plain == other
    assert everywhere(step.updates) == [3, 3]


def sharp(rank: int, world: int, *, kind: Any) -> None:
    """Two ranks evaluate the gradient as one process with both batches does."""
    torch.manual_seed(7)
    together, alone = Net(), Net()
    alone.load_state_dict(together.state_dict())
    one = anybatch.TrainStep(together, mean_loss, kind(together.parameters()), micro_batch_size=4)
    other = anybatch.TrainStep(alone, mean_loss, kind(alone.parameters()), group=False)
    parts = batches_of((7, 10))
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    for _ in range(3):
        one(parts[rank])
        other(whole)
    assert_weights_same(together)
    for a, b in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def sharp_in_parts(rank: int, world: int, *, kind: Any) -> None:
    """The same with parameters of which each rank has a part, some of them nothing."""
    torch.manual_seed(7)
    whole, parts = Net(), Net()
    parts.load_state_dict(whole.state_dict())
    fully_shard(parts)
    batch = batches_of((7, 10))[rank]
    steps = [
        anybatch.TrainStep(model, mean_loss, kind(model.parameters()), micro_batch_size=4) for model in (whole, parts)
    ]
    for _ in range(3):
        for step in steps:
            step(batch)
    gathered: Any = parts.parameters()
    for a, b in zip(whole.parameters(), gathered, strict=True):
        torch.testing.assert_close(a, b.full_tensor(), rtol=1e-4, atol=1e-5)


CASES: Mapping[str, Case] = {
    "learning rate": partial(differing, change=option("lr", 0.03), field="['lr'] is 0.01 on rank 0 and 0.03 on rank 1"),
    "learning rate of the first rank": partial(differing, change=option("lr", 0.03), field="['lr'] is 0.03", at=0),
    "weight decay": partial(differing, change=option("weight_decay", 0.5), field="weight_decay"),
    "betas": partial(differing, change=option("betas", (0.9, 0.99)), field="(0.9, 0.999) on rank 0 and (0.9, 0.99)"),
    "amsgrad": partial(differing, change=option("amsgrad", True), field="amsgrad"),
    "clip_norm": partial(differing, change=clipped, field="clip_norm is 1.0 on rank 0 and 0.01 on rank 1"),
    "requires_grad": partial(differing, change=frozen, field="requires_grad of"),
    "another optimizer": partial(from_the_start, options={"kind": torch.optim.SGD}, field="type is AdamW"),
    "no clipping": partial(from_the_start, options={"clip_norm": 2.0}, field="clip_norm is None on rank 0 and 2.0"),
    "a scheduler on one rank": scheduled_on_one,
    "frozen before": frozen_before,
    "alike": alike,
    "sharp": partial(sharp, kind=Needing),
    "sharp, twice": partial(sharp, kind=Twice),
    "sharp, in parts": partial(sharp_in_parts, kind=Needing),
    "usual, in parts": partial(sharp_in_parts, kind=partial(Usual, lr=0.1)),
}


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=runs_on_cpu) if one.endswith("in parts") else one for one in CASES]
)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]
