"""Ranks of a model in parts run equally many micro-batches: those that one lacks count nothing, whatever they give.

How it could be silently wrong: a micro-batch that counts nothing leaves a gradient, a NaN, a metric, a random number or
a buffer behind; ranks that run other units go on together with wrong gradients; what the user set of FSDP2 is lost.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import anybatch
from anybatch.tensors.shards import is_sharded
from ranks_running import Case, raised, run_cases
from reference import assert_bitwise, assert_float64, whole_gradients
from sharding_models import full, gradients_of_whole, runs_on_cpu, sharded
from test_ranks_exact import Net, batches_of, joined, mean_loss, token_loss
from test_ranks_faults import Fault, faulty, nothing, shortage

pytestmark = runs_on_cpu

TOKENS = anybatch.count_tokens("y")
UNITS = ("first", "rare", "last")


def step_of(model: torch.nn.Module, loss_fn: Any, **options: Any) -> anybatch.TrainStep:
    return anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def unequal_numbers(rank: int, world: int) -> None:
    """Seven micro-batches here, one there, or none: in parts, in one attempt."""
    for rows in ((7, 1), (0, 5), (4, 0), (5, 3)):
        model, batches = sharded(reshards=True)(Net()), batches_of(rows)
        step = step_of(model, mean_loss, micro_batch_size=1)
        out = step(batches[rank])
        assert step._settings.reducer.keeps_step
        assert [one.outcome for one in out.attempts] == ["done"]
        assert out.micro_batches == rows[rank]
        assert_float64(gradients_of_whole(model), whole_gradients(Net(), mean_loss, joined(batches))[0], f"{rows}")


def masked(rank: int, world: int) -> None:
    """A micro-batch without any token has a loss of NaN; it is run, since the others communicate in theirs."""
    batches = batches_of((6, 6), masked=0.0)
    batches[0]["y"][2:4] = -100
    batches[1]["y"][:] = -100
    model = sharded(reshards=True)(Net())
    step = step_of(model, token_loss, micro_batch_size=2, count=TOKENS, verify="off")
    out = step(batches[rank])
    assert step._settings.reducer.keeps_step
    assert [one.outcome for one in out.attempts] == ["done"]
    assert_float64(gradients_of_whole(model), whole_gradients(Net(), token_loss, joined(batches))[0])


class Counting(torch.nn.Module):
    """Drops out, and counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards.add_(1)  # type: ignore[operator]
        found: torch.Tensor = self.last(F.dropout(self.first(x), 0.5))
        return found


def nothing_is_left(rank: int, world: int) -> None:
    """Random numbers and buffers are as without the micro-batches that count nothing, and so are metrics."""
    rows = (5, 2)
    batch = batches_of(rows)[rank]

    def loss_fn(model: Any, batch: Any) -> Any:
        out = model(batch["x"]).sum(1)
        return out.square().mean(), {"out": out.detach()}

    found = []
    for reshards in (True, False):  # which needs no micro-batches of this kind
        model = sharded(reshards=reshards)(Counting())
        torch.manual_seed(rank)
        out = step_of(model, loss_fn, micro_batch_size=1, verify="off")(batch)
        assert int(model.forwards) == rows[rank]  # type: ignore[arg-type]
        found.append((torch.random.get_rng_state(), out.metrics["out"], gradients_of_whole(model)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(torch.as_tensor(found[0][1]), torch.as_tensor(found[1][1]))
    assert_float64(found[0][2], found[1][2])


def other_units(rank: int, world: int) -> None:
    """Ranks that are about to run other units start again with everything gathered, once and for all."""
    model, alone = sharded(reshards=True, units=UNITS)(Net()), Net()
    step, one = step_of(model, mean_loss, micro_batch_size=2, verify="off"), step_of(alone, mean_loss, group=False)
    outcomes = []
    for seed in range(3):
        batches = batches_of((4, 4), seed)
        for each in batches:
            each["x"][:, 0] = 0.0
        batches[1]["x"][:, 0] = 2.0  # rank 1 uses what rank 0 skips
        outcomes.append([each.outcome for each in step(batches[rank]).attempts])
        one(joined(batches))
        assert_float64([full(p) for p in model.parameters()], list(alone.parameters()), f"the weights after {seed}")
    assert outcomes == [["units differ", "done"], ["done"], ["done"]]
    assert not step._settings.reducer.keeps_step


def user_switches(rank: int, world: int) -> None:
    """What the user had set of each unit is as before after a step, after a failure, and for a loop by hand."""
    batch = batches_of((4, 4))[rank]
    for reshards in (True, False):
        model: Any = sharded(reshards=reshards)(Net())
        model.first.set_gradient_divide_factor(7.0)
        model.set_requires_gradient_sync(False)
        model.last.set_reshard_after_backward(False)
        before = switches(model)
        step_of(model, mean_loss, micro_batch_size=1 + rank)(batch)
        assert switches(model) == before
        model.zero_grad()
        failing = faulty(Fault("backward", 1, ValueError("no")) if rank else nothing)
        step = step_of(model, failing, verify="off")
        assert isinstance(raised(lambda step=step: step(batch)), Exception)  # type: ignore[misc]
        assert switches(model) == before
        assert all(p.grad is None for p in model.parameters())


def the_root_stays(rank: int, world: int) -> None:
    """The outermost module stays gathered after a forward, as FSDP2 has it if nobody has said anything else."""
    batch, model = batches_of((4, 4))[rank], Net()
    mesh = init_device_mesh("cpu", (world,))
    for unit in (model.first, model.last, model):
        fully_shard(unit, mesh=mesh)
    step_of(model, mean_loss, micro_batch_size=1 + rank)(batch)
    assert [is_kept for *_, is_kept in switches(model)] == [True, False, False]
    model(batch["x"])
    assert not is_sharded(model.rare.weight)
    assert is_sharded(model.first.weight)


def switches(model: torch.nn.Module) -> list[Any]:
    names = ("gradient_divide_factor", "force_sum_reduction_for_comms", "reduce_grads", "reshard_after_backward")
    groups = [
        one for m in model.modules() if isinstance(m, FSDPModule) for one in m._get_fsdp_state()._fsdp_param_groups
    ]
    return [[*(getattr(one, name) for name in names), one.post_forward_mesh_info is None] for one in groups]


def no_hooks_are_left(rank: int, world: int) -> None:
    model = sharded(reshards=True)(Net())
    before = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    step_of(model, mean_loss, micro_batch_size=1 + rank)(batches_of((4, 4))[rank])
    assert [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()] == before


def by_older_names(rank: int, world: int) -> None:
    """Where torch has no way to end a pass that failed, as before 2.13, a step is tried again all the same."""
    weights = []
    with mock.patch.object(FSDPModule, "reset_iter_state", create=True):
        del FSDPModule.reset_iter_state
        for place in ("forward", "backward"):
            for reshards in (True, False):
                model = sharded(reshards=reshards)(Net())
                fault = Fault(place, 2, shortage()) if rank == 1 else nothing
                step = step_of(model, faulty(fault), micro_batch_size=4)
                torch.manual_seed(rank)
                assert len(step(batches_of((7, 8))[rank]).attempts) == 2
                weights.append([full(p) for p in model.parameters()])
    assert_bitwise(weights[0], weights[2])
    assert_bitwise(weights[1], weights[3])


def on_a_part_of_the_ranks(rank: int, world: int) -> None:
    """After a forward parameters are kept by every two ranks, from which they are gathered in the backward."""
    for rows, units in (((7, 1, 0, 3), ("first", "last")), ((3, 3, 4, 4), UNITS)):
        batches, model = batches_of(rows), Net()
        mesh = init_device_mesh("cpu", (world,))
        for name in units:
            fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=2)
        fully_shard(model, mesh=mesh)
        step = step_of(model, mean_loss, micro_batch_size=2)
        before = None
        for _ in range(2):
            step(batches[rank])
            assert before in (None, switches(model))
            before = switches(model)
        step.evaluate(batches[rank])
        alone = Net()
        one = step_of(alone, mean_loss, group=False)
        one(joined(batches)), one(joined(batches))
        assert_float64([full(p) for p in model.parameters()], list(alone.parameters()), f"the weights, {rows}")


FOUR: Mapping[str, Case] = {"on a part of the ranks": on_a_part_of_the_ranks}
CASES: Mapping[str, Case] = {
    "unequal numbers": unequal_numbers,
    "masked": masked,
    "nothing is left": nothing_is_left,
    "other units": other_units,
    "switches": user_switches,
    "the root": the_root_stays,
    "hooks": no_hooks_are_left,
    "by older names": by_older_names,
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]


def test_four_ranks(tmp_path: Path) -> None:
    results = run_cases("test_sharding_lockstep", 4, tmp_path, "FOUR")
    assert not any(results.values()), "\n".join(results.values())
