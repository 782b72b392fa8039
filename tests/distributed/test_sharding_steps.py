"""Steps of a model in parts: one update, the same as that of the whole model in one process."""

import copy
import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

import anybatch
from ranks_running import Case, assert_same_everywhere, everywhere, raised, run_cases
from reference import assert_bitwise, assert_float64, assert_value64, whole_gradients
from sharding_models import Wrap, gradients_of_whole, parts, runs_on_cpu, sharded, whole_weights
from test_ranks_exact import Net, batches_of, joined, mean_loss
from test_ranks_steps import dropped_loss, with_metrics

pytestmark = runs_on_cpu

KEPT, SHARDED = sharded(reshards=False), sharded(reshards=True)


def encode(model: Any, batch: Any) -> Any:
    return model(batch["x"])


def contrast(model: Any, outputs: Any) -> Any:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def training(rank: int, world: int, *, optimizer: Any, wrap: Wrap) -> None:
    """Six updates with uneven batches, against one process with the joined batches."""
    model, alone = wrap(Net()), Net()
    mine, its = optimizer(model.parameters()), optimizer(alone.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(mine, 2)
    step = anybatch.TrainStep(model, with_metrics, mine, micro_batch_size=2 + rank, clip_norm=0.1, scheduler=schedule)
    one = anybatch.TrainStep(
        alone, with_metrics, its, clip_norm=0.1, scheduler=torch.optim.lr_scheduler.StepLR(its, 2), group=False
    )
    shapes = [(3, 5), (1, 7), (0, 4), (6, 0), (2, 2), (5, 1)]
    for number, shape in enumerate(shapes):
        rows = (*shape, *range(world - 2))
        batches = batches_of(rows, seed=number)
        out, expected = step(batches[rank]), one(joined(batches))
        assert_value64(out.loss, expected.loss)
        assert_value64(out.grad_norm or 0.0, expected.grad_norm or 1.0)
        assert_value64(out.metrics["right"], expected.metrics["right"])
        assert out.count == expected.count == sum(rows)
        assert_same_everywhere([out.loss, out.grad_norm, out.count, out.losses])
        assert_float64(whole_weights(model), list(alone.parameters()), "the weights")
    assert step.samples == one.samples
    found = step.evaluate(batches[rank])
    assert_value64(found.loss, float(mean_loss(alone, joined(batches)).detach()))
    assert_same_everywhere(found.metrics["right"])


def overflowing(rank: int, world: int, *, wrap: Wrap) -> None:
    """One rank finds an infinite gradient in its own rows: nobody steps, and the scales stay equal."""
    torch.manual_seed(0)
    model = wrap(torch.nn.Linear(4, 3))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.Adam(model.parameters())
    step = anybatch.TrainStep(model, lambda model, x: model(x).mean(), optimizer, scaler=scaler, clip_norm=1.0)
    before = whole_weights(model)
    x = torch.ones(3 + rank, 4)
    bad = x.clone()
    if rank == 1:
        bad[0, 0] = float("inf")
    out = step(bad)
    assert "not finite" in out.skipped
    assert_bitwise(before, whole_weights(model))
    assert scaler.get_scale() == 512.0
    out = step(x)
    assert not out.skipped
    assert abs((out.grad_norm or 0.0) - (3 * (4 + 1) / 9) ** 0.5) < 1e-5, out.grad_norm
    assert_same_everywhere([scaler.get_scale(), step.updates, step.skipped])
    assert (step.updates, step.skipped) == (1, 1)


def coupled(rank: int, world: int, *, wrap: Wrap) -> None:
    """Two passes of a coupled loss, other numbers of micro-batches on each rank."""
    batches = batches_of((3, 6))

    def apart(model: Any, batches: Any) -> torch.Tensor:
        rows = [contrast(model, encode(model, batch)) * len(batch["x"]) for batch in batches]
        return torch.stack(rows).sum() / 9

    def together(model: Any, batches: Any) -> torch.Tensor:
        loss: torch.Tensor = contrast(model, encode(model, joined(batches)))
        return loss

    for gather, whole in ((True, together), (False, apart)):
        model = wrap(Net())
        loss_fn = anybatch.Coupled(encode, contrast, gather=gather)
        anybatch.backward(model, loss_fn, batches[rank], micro_batch_size=2)
        assert_float64(gradients_of_whole(model), whole_gradients(Net(), whole, batches)[0])


def over_time(rank: int, world: int, *, wrap: Wrap) -> None:
    """Sequences in chunks of time, of other lengths on each rank."""

    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first = torch.nn.Linear(3, 5)
            self.cell = torch.nn.GRUCell(5, 5)
            self.last = torch.nn.Linear(5, 2)
            self.double()

        def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            outs = []
            for t in range(x.shape[1]):
                state = self.cell(self.first(x[:, t]), state)
                outs.append(self.last(state))
            return torch.stack(outs, 1), state

    def chunk_loss(model: Any, chunk: Any, state: Any) -> Any:
        out, state = model(chunk, state)
        return anybatch.Mean(out.square().sum(), out.numel()), state

    def state(model: Any, batch: Any) -> Any:
        return torch.zeros(len(batch), 5, dtype=torch.float64)

    model, sequences = Recurrent(), [torch.randn(2, 12, 3).double(), torch.randn(3, 5, 3).double()]
    sequences = everywhere(sequences)[0]

    def whole(model: Any, sequences: Any) -> torch.Tensor:
        outs = [model(x, state(model, x))[0].square() for x in sequences]
        loss: torch.Tensor = sum(out.sum() for out in outs) / sum(out.numel() for out in outs)
        return loss

    expected, _ = whole_gradients(copy.deepcopy(model), whole, sequences)
    wrapped = wrap(model)
    anybatch.backward(wrapped, anybatch.OverTime(chunk_loss, state, chunk=4), sequences[rank], micro_batch_size=2)
    assert_float64(gradients_of_whole(wrapped), expected)


def own_loop_after(rank: int, world: int, *, wrap: Wrap) -> None:
    """A forward and a backward by hand work as before afterwards, and average."""
    model = wrap(Net())
    batches = [{**batch, "x": batch["x"].clamp(max=0.5)} for batch in batches_of((4, 4))]  # all use the same parts
    anybatch.backward(model, mean_loss, batches[rank], micro_batch_size=1 + rank)
    model.zero_grad()
    mean_loss(model, batches[rank]).backward()
    expected, _ = whole_gradients(Net(), mean_loss, joined(batches))
    assert_float64(gradients_of_whole(model), expected)
    with torch.no_grad():  # leaves the root gathered
        model(batches[rank]["x"])
    anybatch.backward(model, mean_loss, batches[rank], micro_batch_size=3)
    assert_float64(gradients_of_whole(model), [None if g is None else 2 * g for g in expected])


def mixed_precision(rank: int, world: int, *, reshards: bool, reduce_dtype: torch.dtype | None) -> None:
    """Forwards in bfloat16, gradients summed in float32 over micro-batches, over ranks as the user or torch says."""
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    plain = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    model = sharded(reshards=reshards, units=("0",), mp_policy=policy)(copy.deepcopy(plain))
    rows = everywhere(torch.randn(24, 16))[0].bfloat16().float()

    def loss_fn(model: Any, x: torch.Tensor) -> anybatch.Mean:
        out = model(x).float().square()
        return anybatch.Mean(out.sum(), torch.tensor(out.numel()))

    out = anybatch.backward(model, loss_fn, rows[:20] if rank == 0 else rows[20:], micro_batch_size=1)
    assert out.micro_batches == (20 if rank == 0 else 4)
    expected, _ = whole_gradients(copy.deepcopy(plain).double(), lambda m, x: m(x).square().mean(), rows.double())
    for found, truth in zip(gradients_of_whole(model), expected, strict=True):
        assert found is not None
        assert truth is not None
        assert found.dtype is torch.float32
        assert float((found.double() - truth).norm()) < 2**-6 * float(truth.norm())


def resuming(rank: int, world: int, *, wrap: Wrap) -> None:
    """A run that was saved by torch.distributed.checkpoint goes on bitwise."""

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, anybatch.TrainStep]:
        net = Net()
        net.unused.requires_grad_(False)  # an optimizer has no state of it, which a checkpoint would miss
        model = wrap(net)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        return model, optimizer, anybatch.TrainStep(model, dropped_loss, optimizer, micro_batch_size=2, clip_norm=1.0)

    dcp: Any = checkpoint
    folder = Path(everywhere(tempfile.mkdtemp())[0])
    batches = [batches_of((4, 5), seed)[rank] for seed in range(4)]
    model, optimizer, step = build()
    for batch in batches[:2]:
        step(batch)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, f"step {rank}": step.state_dict()}, checkpoint_id=folder)
    for batch in batches[2:]:
        step(batch)
    again, its_optimizer, its_step = build()
    torch.manual_seed(0)
    weights, state = get_state_dict(again, its_optimizer)
    found: dict[str, Any] = {"model": weights, "optimizer": state, f"step {rank}": its_step.state_dict()}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(again, its_optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    its_step.load_state_dict(found[f"step {rank}"])
    for batch in batches[2:]:
        its_step(batch)
    assert_same_everywhere([its_step.updates, its_step.samples])
    assert parts(again) == parts(model)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)


def refusals(rank: int, world: int) -> None:
    batch = batches_of((3, 5))[rank]
    model = SHARDED(Net())
    inputs = list(model.last.parameters())  # type: ignore[union-attr]
    assert "inputs=" in str(raised(lambda: anybatch.backward(model, mean_loss, batch, inputs=inputs)))
    assert "a mesh of 2 dimensions" in str(raised(lambda: anybatch.backward(_on_a_square(world), mean_loss, batch)))
    step = anybatch.TrainStep(model, mean_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    for refused in (
        lambda: anybatch.NoiseScale(step),
        lambda: anybatch.check(model, mean_loss, batch),
        lambda: anybatch.plan(model, mean_loss, batch, memory="1GiB"),
    ):
        error = raised(refused)
        assert isinstance(error, anybatch.AnyBatchError), error
        assert "whole models" in str(error), error
    assert "group=False" in str(raised(lambda: anybatch.backward(model, mean_loss, batch, group=False)))
    other = SHARDED(Net()) if rank else KEPT(Net())
    assert "sharded" in str(raised(lambda: anybatch.backward(other, mean_loss, batch)))
    low = sharded(reshards=True, units=("0",))(torch.nn.Sequential(torch.nn.Linear(4, 3)).bfloat16())
    rows = torch.ones(12, 4, dtype=torch.bfloat16)
    error = raised(lambda: anybatch.backward(low, lambda m, x: m(x).float().mean(), rows, micro_batch_size=1 + rank))
    assert "MixedPrecisionPolicy" in str(error), error


def proved_now_and_then(rank: int, world: int) -> None:
    """The first batch is proved, and the 8th after it; no other one of these."""
    model = SHARDED(Net())
    step = anybatch.TrainStep(model, mean_loss, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=2)
    (batch,) = batches_of((6,))
    proofs = [step(batch).proof for _ in range(20)]
    assert [number for number in range(1, 20) if proofs[number] is not proofs[number - 1]] == [8]


def proved_unsplit(rank: int, world: int) -> None:
    """A batch that no rank splits is one part of that of all ranks, and proved so; ranks may have a sample or none."""
    for rows in ((8, 8), (8, 1), (8, 0), (1, 1)):
        model = SHARDED(Net())
        step = anybatch.TrainStep(model, mean_loss, torch.optim.SGD(model.parameters(), lr=0.1))
        proof = step(batches_of((*rows, *range(world - 2)))[rank]).proof
        assert step.updates == 1
        outcome = "undecided" if max(rows) < 2 else "exact"
        assert (proof.outcome if proof is not None else "undecided") == outcome, (rows, proof)


def a_term_of_the_batch_of_a_rank(rank: int, world: int) -> None:
    """A loss that couples the samples of a rank is refused on all ranks, where none splits its batch."""

    def loss_fn(model: Any, batch: Any) -> Any:
        return mean_loss(model, batch) + model(batch["x"]).std(0).mean()

    model = SHARDED(Net())
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(raised(lambda: step(batches_of((8, 8))[rank])), anybatch.NotSplittable)
    assert step.updates == 0


def proved_where_a_term_begins(rank: int, world: int) -> None:
    """A coupled term that one rank alone is given has the next batch proved on all of them, and refused."""
    model = SHARDED(Net())

    def loss_fn(model: Any, batch: Any) -> Any:
        loss, goes_by = mean_loss(model, batch), int(max((one["step"] for one in optimizer.state.values()), default=0))
        return loss + model(batch["x"]).std(0).mean() if rank == world - 1 and goes_by >= 4 else loss

    optimizer = torch.optim.Adam(model.parameters())
    step = anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=2)
    (batch,) = batches_of((6,))
    proofs = [step(batch).proof for _ in range(5)]
    assert all(one is proofs[0] for one in proofs)
    assert isinstance(raised(lambda: step(batch)), anybatch.NotSplittable)
    assert_same_everywhere(step.updates)
    assert step.updates == 5


def _on_a_square(world: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicas", "parts"))
    return fully_shard(Net(), mesh=mesh)


def _by_default(model: torch.nn.Module) -> Any:
    """Units release their parameters after the forward, and the root keeps its own."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.get_submodule("first"))
    return fully_shard(model)


BOTH = {"kept": KEPT, "sharded": SHARDED}
CASES: Mapping[str, Case] = {
    **{f"SGD, {n}": partial(training, optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9), wrap=w)
       for n, w in BOTH.items()},
    **{f"AdamW, {n}": partial(training, optimizer=torch.optim.AdamW, wrap=w) for n, w in BOTH.items()},
    **{f"overflow, {n}": partial(overflowing, wrap=sharded(reshards=n == "sharded", units=())) for n in BOTH},
    **{f"Coupled, {n}": partial(coupled, wrap=w) for n, w in (BOTH | {"by default": _by_default}).items()},
    **{f"OverTime, {n}": partial(over_time, wrap=w) for n, w in (BOTH | {"by default": _by_default}).items()},
    **{f"by hand afterwards, {n}": partial(own_loop_after, wrap=w) for n, w in BOTH.items()},
    **{
        f"mixed precision, {n}, summed in {dtype}": partial(
            mixed_precision, reshards=n == "sharded", reduce_dtype=getattr(torch, dtype, None)
        )
        for n in BOTH for dtype in ("float32", "what torch chooses")
    },
    **{f"resuming, {n}": partial(resuming, wrap=w) for n, w in BOTH.items()},
    "refusals": refusals,
    "proofs": proved_now_and_then,
    "unsplit": proved_unsplit,
    "coupled on a rank": a_term_of_the_batch_of_a_rank,
    "late terms": proved_where_a_term_begins,
}  # fmt: skip
FOUR: Mapping[str, Case] = {f"SGD, {n}": CASES[f"SGD, {n}"] for n in BOTH}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]


def one_rank(rank: int, world: int) -> None:
    for wrap in BOTH.values():
        model, (batch,) = wrap(Net()), batches_of((7,))
        expected, _ = whole_gradients(Net(), mean_loss, batch)
        anybatch.backward(model, mean_loss, batch, micro_batch_size=2)
        assert_float64(gradients_of_whole(model), expected)


ONE: Mapping[str, Case] = {"one rank": one_rank}


def test_one_rank(tmp_path: Path) -> None:
    results = run_cases("test_sharding_steps", 1, tmp_path, "ONE")
    assert not any(results.values()), "\n".join(results.values())


@pytest.mark.slow  # two ranks see most, and four in test_ranks_exact.py and test_sharding_lockstep.py
def test_four_ranks(tmp_path: Path) -> None:
    results = run_cases("test_sharding_steps", 4, tmp_path, "FOUR")
    assert not any(results.values()), "\n".join(results.values())
