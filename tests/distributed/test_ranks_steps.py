"""Steps of several ranks: one update, the same on all of them, with everything in the result global."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import anybatch
from ranks_running import Case, assert_same_everywhere, assert_weights_same, raised
from reference import assert_bitwise, assert_float64, assert_value64, gradients_of, whole_gradients
from test_ranks_exact import Net, batches_of, joined, mean_loss


def with_metrics(model: Any, batch: Any) -> Any:
    out = model(batch["x"])
    right = anybatch.Mean((out.argmax(1) == batch["y"]).sum(), len(out))
    return (out.sum(1) - batch["z"]).square().mean(), {"right": right, "rows": batch["z"]}


def training(rank: int, world: int, *, optimizer: Any, wrap: Any = None) -> None:
    """Six updates with uneven batches, against one process with the joined batches."""
    model, alone = Net(), Net()
    wrapped = model if wrap is None else wrap(model)
    mine, its = optimizer(model.parameters()), optimizer(alone.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(mine, 2)
    step = anybatch.TrainStep(wrapped, with_metrics, mine, micro_batch_size=2 + rank, clip_norm=0.1, scheduler=schedule)
    one = anybatch.TrainStep(
        alone, with_metrics, its, clip_norm=0.1, scheduler=torch.optim.lr_scheduler.StepLR(its, 2), group=False
    )
    for number, rows in enumerate([(3, 5), (1, 7), (0, 4), (6, 0), (2, 2), (5, 1)]):
        batches = batches_of(rows, seed=number)
        out, expected = step(batches[rank]), one(joined(batches))
        assert_value64(out.loss, expected.loss)
        assert_value64(out.grad_norm or 0.0, expected.grad_norm or 1.0)
        assert_value64(out.metrics["right"], expected.metrics["right"])
        assert torch.equal(out.metrics.get("rows", torch.empty(0)), batches[rank]["z"]) or not rows[rank]
        assert out.count == expected.count == sum(rows)
        assert_weights_same(model)
        assert_same_everywhere([out.loss, out.grad_norm, out.count, out.losses])
        assert_float64(list(model.parameters()), list(alone.parameters()), "the weights")
    assert (step.updates, step.samples) == (one.updates, one.samples) == (6, 36)


def evaluating(rank: int, world: int) -> None:
    model = Net()
    step = anybatch.TrainStep(
        DistributedDataParallel(model), with_metrics, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch_size=2
    )
    for rows in ((3, 5), (0, 4)):
        batches = batches_of(rows)
        found = step.evaluate(batches[rank])
        assert_value64(found.loss, float(with_metrics(model, joined(batches))[0].detach()))
        assert found.count == sum(rows)
        assert_same_everywhere(found.metrics["right"])
    assert gradients_of(model) == [None] * len(list(model.parameters()))


def overflowing(rank: int, world: int) -> None:
    """One rank finds an infinite gradient: nobody steps, and the scales stay equal."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.Adam(model.parameters())
    step = anybatch.TrainStep(model, lambda model, x: model(x).mean(), optimizer, scaler=scaler, clip_norm=1.0)
    before = copy.deepcopy(model.state_dict())
    x = torch.ones(3 + rank, 4)
    bad = x.clone()
    if rank == 1:
        bad[0, 0] = float("inf")
    out = step(bad)
    assert "not finite" in out.skipped
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert scaler.get_scale() == 512.0
    assert not step(x).skipped
    assert_weights_same(model)
    assert_same_everywhere([scaler.get_scale(), step.updates, step.skipped])
    assert (step.updates, step.skipped) == (1, 1)


def with_closure(rank: int, world: int) -> None:
    model, alone = Net(), Net()
    options: dict[str, Any] = {"lr": 0.1, "max_iter": 4}
    step = anybatch.TrainStep(model, mean_loss, torch.optim.LBFGS(model.parameters(), **options), micro_batch_size=2)
    one = anybatch.TrainStep(alone, mean_loss, torch.optim.LBFGS(alone.parameters(), **options), group=False)
    for number in range(2):
        batches = batches_of((3, 5), number)
        step(batches[rank])
        one(joined(batches))
        assert_weights_same(model)
    assert_float64(list(model.parameters()), list(alone.parameters()), "the weights")


def low_precision(rank: int, world: int) -> None:
    """bfloat16 gradients are summed in float32 over ranks, and rounded once more."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 8).bfloat16()
    rows = torch.randn(12, 64).bfloat16()
    anybatch.backward(model, lambda model, x: model(x).float().square().mean(), rows[:8] if rank == 0 else rows[8:])
    mine = gradients_of(model)
    expected, _ = whole_gradients(
        copy.deepcopy(model).double(), lambda model, x: model(x).square().mean(), rows.double()
    )
    for found, truth in zip(mine, expected, strict=True):
        assert found is not None
        assert truth is not None
        assert found.dtype is torch.bfloat16
        assert float((found.double() - truth).norm()) < 2**-7 * float(truth.norm())


def many_buckets(rank: int, world: int) -> None:
    """More bytes than a bucket has, of several dtypes, some laid out in another order."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "large": torch.nn.Linear(2000, 2000).double(),  # 32 MB
            "single": torch.nn.Linear(8, 8),
            "turned": torch.nn.Linear(1500, 1500).double(),
            "small": torch.nn.Linear(8, 8).double(),
        }
    )
    turned: Any = model["turned"]
    turned.weight = torch.nn.Parameter(turned.weight.detach().t())

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = sum(
            model[name](x[:, : model[name].in_features].to(model[name].weight.dtype)).double().square().mean()
            for name in model
        )
        return found

    rows = torch.randn(5, 2000, dtype=torch.float64)
    expected, _ = whole_gradients(model, loss_fn, rows)
    anybatch.backward(model, loss_fn, rows[:2] if rank == 0 else rows[2:], micro_batch_size=2)
    found = gradients_of(model)
    wide = [i for i, g in enumerate(found) if g is not None and g.dtype is torch.float64]
    assert_float64([found[i] for i in wide], [expected[i] for i in wide])


def over_time(rank: int, world: int) -> None:
    """Sequences in chunks of time, split over ranks by rows."""
    torch.manual_seed(1)
    model = torch.nn.LSTM(3, 5, batch_first=True).double()
    x = torch.randn(5, 12, 3, dtype=torch.float64)

    def chunk_loss(model: Any, chunk: Any, state: Any) -> Any:
        out, state = model(chunk, state)
        return anybatch.Mean(out.square().sum(), out.numel()), state

    def state(model: Any, batch: Any) -> Any:
        zero = torch.zeros(1, len(batch), 5, dtype=torch.float64)
        return zero, zero

    expected, _ = whole_gradients(copy.deepcopy(model), lambda model, x: model(x)[0].square().mean(), x)
    loss_fn = anybatch.OverTime(chunk_loss, state, chunk=4)
    anybatch.backward(model, loss_fn, x[:2] if rank == 0 else x[2:], micro_batch_size=2)
    assert_float64(gradients_of(model), expected)


def windows(rank: int, world: int) -> None:
    model = Net()
    batches = batches_of((3, 1, 4, 2))
    mine = batches[:3] if rank == 0 else batches[3:]
    (window,) = anybatch.windows(mine, batches=3)
    anybatch.backward(model, mean_loss, window, micro_batch_size=2)
    assert_float64(gradients_of(model), whole_gradients(Net(), mean_loss, joined(batches))[0])


def own_loop_after(rank: int, world: int) -> None:
    """DistributedDataParallel works as before when it is called by hand afterwards."""
    model = Net()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    batches = batches_of((4, 4))
    anybatch.backward(wrapped, mean_loss, batches[rank], micro_batch_size=1 + rank)
    model.zero_grad()
    mean_loss(wrapped, batches[rank]).backward()
    expected, _ = whole_gradients(Net(), mean_loss, joined(batches))
    assert_float64(gradients_of(model), expected)


def refusals(rank: int, world: int) -> None:
    """What would be silently wrong is refused on all ranks alike."""
    batch = batches_of((3, 5))[rank]
    other = Net()
    with torch.no_grad():
        other.last.weight[0, 0] += rank
    error = raised(lambda: anybatch.backward(other, mean_loss, batch))
    assert isinstance(error, anybatch.AnyBatchError)
    assert "different values of last.weight;" in str(error)
    step = anybatch.TrainStep(other, mean_loss, torch.optim.SGD(other.parameters(), lr=1.0))
    error = raised(lambda: step(batch))
    assert "last.weight" in str(error)

    model = Net()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    with wrapped.no_sync():
        mean_loss(wrapped, batch).backward()
    kept = gradients_of(model)
    error = raised(lambda: anybatch.backward(wrapped, mean_loss, batch))
    assert "zero_grad" in str(error)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(kept, gradients_of(model), strict=True))  # type: ignore[arg-type]

    static = DistributedDataParallel(Net(), static_graph=True)
    assert "static_graph" in str(raised(lambda: anybatch.backward(static, mean_loss, batch)))
    norm = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).double()
    for model_now, policy, word in (
        (norm, "refuse", "BatchNorm1d"),
        (torch.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm)), "ghost", "SyncBatchNorm"),
    ):
        error = raised(
            lambda m=model_now, p=policy: anybatch.backward(  # type: ignore[misc]
                m, lambda m, b: m(b["x"]).square().mean(), batch, batch_norm=p
            )
        )
        assert isinstance(error, anybatch.NotSplittable)
        assert word in str(error)
    loss = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    error = raised(lambda: anybatch.backward(Net(), lambda m, b: mean_loss(m, b) * loss, batch))
    assert "inputs=" in str(error)
    model = Net()
    make = partial(anybatch.TrainStep, model, mean_loss, torch.optim.SGD(model.parameters()), group="all")
    assert isinstance(raised(make), anybatch.BatchError)


class FullyShardedDataParallel(torch.nn.Sequential):
    """Has the name of what is refused."""


def sharded(rank: int, world: int) -> None:
    model = FullyShardedDataParallel(Net())
    error = raised(lambda: anybatch.backward(model, mean_loss, batches_of((3, 5))[rank]))
    assert "fully_shard" in str(error), error


def batch_norm(rank: int, world: int) -> None:
    """Frozen it is exact; as ghosts every micro-batch of every rank is normalised by itself."""
    torch.manual_seed(2)
    norm = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)).double()
    batches = batches_of((4, 6))
    model = copy.deepcopy(norm)
    anybatch.backward(model, mean_loss, batches[rank], micro_batch_size=2, batch_norm="frozen")
    expected, _ = whole_gradients(copy.deepcopy(norm).eval(), mean_loss, joined(batches))
    assert_float64(gradients_of(model), expected)

    def ghosts(model: Any, batches: Any) -> torch.Tensor:
        parts = [
            mean_loss(model, {name: value[i : i + 2] for name, value in batch.items()}) * 2
            for batch in batches
            for i in range(0, len(batch["x"]), 2)
        ]
        return torch.stack(parts).sum() / 10

    model = copy.deepcopy(norm)
    wrapped = DistributedDataParallel(model)
    anybatch.backward(wrapped, mean_loss, batches[rank], micro_batch_size=2, batch_norm="ghost")
    assert_float64(gradients_of(model), whole_gradients(copy.deepcopy(norm), ghosts, batches)[0])


def dropped_loss(model: Any, batch: Any) -> torch.Tensor:
    return mean_loss(lambda x: F.dropout(model(x), 0.3), batch)


def resuming(rank: int, world: int) -> None:
    """Each rank goes on from its own state, bitwise."""

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, anybatch.TrainStep]:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, anybatch.TrainStep(model, dropped_loss, optimizer, micro_batch_size=2)

    batches = [batches_of((4, 5), seed)[rank] for seed in range(4)]
    model, optimizer, step = build()
    for batch in batches[:2]:
        step(batch)
    states = copy.deepcopy([model.state_dict(), optimizer.state_dict(), step.state_dict()])
    for batch in batches[2:]:
        step(batch)
    again, its_optimizer, its_step = build()
    torch.manual_seed(0)
    for one, state in zip((again, its_optimizer, its_step), states, strict=True):
        one.load_state_dict(state)  # type: ignore[attr-defined]
    for batch in batches[2:]:
        its_step(batch)
    assert_same_everywhere([its_step.updates, its_step.samples])
    assert_weights_same(again)
    assert_bitwise([p.detach() for p in again.parameters()], [p.detach() for p in model.parameters()])


def several_optimizers(rank: int, world: int) -> None:
    """Optimizers may list parameters in another order than the model, and a group may be added later."""
    model, alone = Net(), Net()
    steps = []
    for one, group in ((model, None), (alone, False)):
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.3) for part in (one.last, one.first)]
        steps.append(anybatch.TrainStep(one, mean_loss, optimizers, micro_batch_size=2, group=group))
    for number in range(4):
        batches = batches_of((3, 5), number)
        steps[0](batches[rank])
        steps[1](joined(batches))
        if number == 1:
            for one, step in zip((model, alone), steps, strict=True):
                step._optimizers[0].add_param_group({"params": one.rare.parameters()})
        assert_weights_same(model)
    assert_float64(list(model.parameters()), list(alone.parameters()), "the weights")


CASES: Mapping[str, Case] = {
    "BatchNorm": batch_norm,
    "resuming": resuming,
    "several optimizers": several_optimizers,
    "SGD": partial(training, optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9)),
    "AdamW, DistributedDataParallel": partial(training, optimizer=torch.optim.AdamW, wrap=DistributedDataParallel),
    "evaluate": evaluating,
    "overflow": overflowing,
    "LBFGS": with_closure,
    "bfloat16": low_precision,
    "buckets": many_buckets,
    "OverTime": over_time,
    "windows": windows,
    "by hand afterwards": own_loop_after,
    "refusals": refusals,
    "FSDP1": sharded,
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]
