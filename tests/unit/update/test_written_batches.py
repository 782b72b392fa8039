"""A loss that writes into its batch sees what the loader gave, whatever runs it more than once."""

import copy
import functools
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from memory_steps import peak_of_call
from reference import assert_float64, gradients_of, whole_gradients

Loss = Callable[[Any, Any], Any]
ROWS = 40


class Chains(nn.Module):
    """Layers that keep what they are given; one that only runs on real tensors, if wanted."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first: nn.Module = nn.LSTM(6, 8, batch_first=True) if kind == "recurrent" else nn.Linear(6, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.kind == "recurrent":
            hidden = hidden[0][:, -1]
        if self.kind == "looks at numbers" and float(hidden.detach().sum()) > 1e9:
            hidden = hidden * 2
        found: Tensor = self.last(hidden.tanh())
        return found


def model_of(kind: str = "plain") -> nn.Module:
    torch.manual_seed(1)
    return Chains(kind).double()


def batch_of(kind: str = "plain") -> dict[str, Any]:
    torch.manual_seed(2)
    shape = (ROWS, 5, 6) if kind == "recurrent" else (ROWS, 6)
    return {"x": torch.randn(shape, dtype=torch.float64), "y": torch.randint(4, (ROWS,))}


def centred(model: Any, batch: Any) -> Any:
    batch["x"].sub_(1.0)
    return F.cross_entropy(model(batch["x"]), batch["y"])


def plain(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"] - 1.0), batch["y"])


def through_a_view(model: Any, batch: Any) -> Any:
    batch["x"][..., :3] *= 0.5
    return F.cross_entropy(model(batch["x"]), batch["y"])


def truth(model: nn.Module, loss_fn: Loss, batch: Any) -> list[Tensor | None]:
    return whole_gradients(model, loss_fn, copy.deepcopy(batch))[0]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize("kind", ["plain", "recurrent", "looks at numbers"])
@pytest.mark.parametrize("loss_fn", [centred, through_a_view])
def test_a_plan_leaves_the_batch_as_it_was(kind: str, loss_fn: Loss) -> None:
    model, batch = model_of(kind), batch_of(kind)
    before = copy.deepcopy(batch)
    for memory in ("1MiB", 40_000):
        anybatch.plan(model, loss_fn, batch, sgd(model), memory=memory)
        assert torch.equal(batch["x"], before["x"])


@pytest.mark.parametrize("kind", ["plain", "recurrent", "looks at numbers"])
@pytest.mark.parametrize("loss_fn", [centred, through_a_view])
@pytest.mark.parametrize("share", [1.03, 1.3, 20.0])
def test_a_planned_step_has_the_gradient_of_the_batch_that_was_given(kind: str, loss_fn: Loss, share: float) -> None:
    model = model_of(kind)
    smallest = anybatch.plan(model, loss_fn, batch_of(kind), sgd(model), memory=2**40).smallest_bytes
    budget = int(smallest * share)
    step = anybatch.TrainStep(model, loss_fn, sgd(model), memory=budget)
    for _ in range(3):
        batch = batch_of(kind)
        want = truth(model, loss_fn, batch)
        peak = peak_of_call(step, batch)
        assert_float64(gradients_of(model), want)
        assert torch.equal(batch["x"], batch_of(kind)["x"])
        assert peak <= budget


def test_without_a_budget_it_is_written_to_once_as_in_a_plain_loop() -> None:
    model, batch = model_of(), batch_of()
    want = truth(model, centred, batch)
    anybatch.backward(model, centred, batch, micro_batch_size=7)
    assert_float64(gradients_of(model), want)
    assert torch.equal(batch["x"], batch_of()["x"] - 1.0)


def runs_out(model: Any, batch: Any, *, most: int) -> Any:
    batch["x"].sub_(1.0)
    if len(batch["x"]) > most:
        raise torch.OutOfMemoryError("simulated")
    return F.cross_entropy(model(batch["x"]), batch["y"])


@pytest.mark.parametrize("how", ["step", "backward", "evaluate"])
def test_it_is_not_run_again_on_what_it_wrote_when_memory_runs_out(how: str) -> None:
    model = model_of()
    step = anybatch.TrainStep(model, functools.partial(runs_out, most=20), torch.optim.SGD(model.parameters(), lr=0.1))
    before = copy.deepcopy(model.state_dict())
    call: Callable[[Any], Any] = step if how == "step" else step.evaluate
    if how == "backward":
        call = functools.partial(anybatch.backward, model, functools.partial(runs_out, most=20))
    with pytest.raises(anybatch.LossError, match=r"wrote into batch\['x'\] in place.* since memory ran out"):
        call(batch_of())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert step.updates == 0
    assert all(one is None for one in gradients_of(model))


def test_under_a_budget_it_may_run_out_of_memory() -> None:
    """The copies that a plan asks for are made anew for every attempt."""
    model, is_planned = model_of(), [False]

    def loss_fn(model: Any, batch: Any) -> Any:
        most = 20 if is_planned[0] else 10**6
        return runs_out(model, batch, most=most)

    step = anybatch.TrainStep(model, loss_fn, sgd(model), memory="1MiB")
    step(batch_of())
    is_planned[0] = True
    batch = batch_of()
    out = step(batch)
    assert out.micro_batches > 1
    assert_float64(gradients_of(model), truth(model, centred, batch))


@pytest.mark.parametrize("how", ["plan", "state", "backward"])
def test_a_plan_that_was_kept_knows_that_the_loss_writes(how: str, tmp_path: Path) -> None:
    model, batch = model_of(), batch_of()
    want = truth(model, centred, batch)
    anybatch.plan(model, centred, batch, sgd(model), memory="1MiB").save(tmp_path / "plan.json")
    plan = anybatch.Plan.load(tmp_path / "plan.json")
    assert plan.copies_batch
    assert not anybatch.plan(model, plain, batch, sgd(model), memory="1MiB").copies_batch
    if how == "backward":
        anybatch.backward(model, centred, batch, plan=anybatch.plan(model, centred, batch, memory="1MiB"))
    elif how == "plan":
        anybatch.TrainStep(model, centred, sgd(model), plan=plan)(batch)
    else:
        first = anybatch.TrainStep(model, centred, sgd(model), memory="1MiB")
        first(batch)
        other = anybatch.TrainStep(model, centred, sgd(model), memory="1MiB")
        other.load_state_dict(first.state_dict())
        other(batch)
    assert_float64(gradients_of(model), want)
    assert torch.equal(batch["x"], batch_of()["x"])


def test_a_count_by_a_forward_is_refused() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        loss = centred(model, batch)
        return anybatch.Mean(loss * ROWS, ROWS)

    with pytest.raises(anybatch.LossError, match=r'wrote into .* after count="forward" has counted'):
        anybatch.backward(model_of(), loss_fn, batch_of(), count="forward")


def test_arrays_are_as_they_were_after_a_plan() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        batch["x"] -= 1.0
        return F.cross_entropy(model(torch.as_tensor(batch["x"])), batch["y"])

    model, batch = model_of(), {**batch_of(), "x": batch_of()["x"].numpy()}
    made = anybatch.plan(model, loss_fn, batch, sgd(model), memory="1MiB")
    assert np.array_equal(batch["x"], batch_of()["x"].numpy())
    for memory in ("1MiB", (made.smallest_bytes + made.whole_bytes) // 2):  # whole or not, and in micro-batches
        want = truth(model, loss_fn, batch)
        out = anybatch.TrainStep(model, loss_fn, sgd(model), memory=memory)(batch)
        assert_float64(gradients_of(model), want)
    assert out.proof is not None
    assert out.proof.exact
    assert anybatch.check(model, loss_fn, batch).exact


def test_several_devices_get_copies_too() -> None:
    model, batch = model_of(), batch_of()
    want = truth(model, centred, batch)
    anybatch.TrainStep(model, centred, sgd(model), memory="1MiB", devices=["cpu", "cpu"])(batch)
    assert_float64(gradients_of(model), want)


def popped(samples: list[Any]) -> dict[str, Tensor]:
    """Takes the labels out of the samples, as collators of language models do."""
    labels = [sample.pop("y") for sample in samples]
    return {"x": torch.stack([sample["x"] for sample in samples]), "y": torch.stack(labels)}


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("memory", [None, "1MiB"])
def test_a_collate_may_take_items_out_of_samples(kind: Any, memory: str | None) -> None:
    model, batch = model_of(), batch_of()
    want = truth(model, centred, batch)
    samples = [kind(x=x, y=y) for x, y in zip(batch["x"], batch["y"], strict=True)]

    def loss_fn(model: Any, micro_batch: Any) -> Any:
        if len(micro_batch["x"]) > 20 and memory is None:
            raise torch.OutOfMemoryError("simulated")
        return centred(model, micro_batch)

    step = anybatch.TrainStep(model, loss_fn, sgd(model), collate=popped, memory=memory)
    step(samples)
    assert_float64(gradients_of(model), want)
    assert all(set(sample) == {"x", "y"} for sample in samples)


def test_a_collate_that_writes_into_samples_is_not_run_again_on_them() -> None:
    model, batch = model_of(), batch_of()
    samples = list(zip(batch["x"], batch["y"], strict=True))

    def collate(samples: list[Any]) -> dict[str, Tensor]:
        return {"x": torch.stack([x.sub_(1.0) for x, _ in samples]), "y": torch.stack([y for _, y in samples])}

    step = anybatch.TrainStep(model, functools.partial(runs_out, most=20), sgd(model), collate=collate)
    with pytest.raises(anybatch.LossError, match="since memory ran out"):
        step(samples)


def scaled_if_large(model: Any, batch: Any) -> Any:
    if batch["x"].max() > 1:
        batch["x"].div_(255)
    return F.cross_entropy(model(batch["x"]), batch["y"])


def scaled_late(model: Any, batch: Any) -> Any:
    """Writes only where a sample that few have is among them."""
    if batch["x"].max() > 100:
        batch["x"].div_(255)
    return F.cross_entropy(model(batch["x"]), batch["y"])


def through_data(model: Any, batch: Any) -> Any:
    batch["x"].data.mul_(2)
    return F.cross_entropy(model(batch["x"]), batch["y"])


def through_numpy(model: Any, batch: Any) -> Any:
    batch["x"].numpy()[:] *= 2
    return F.cross_entropy(model(batch["x"]), batch["y"])


def through_another_leaf(model: Any, batch: Any) -> Any:
    batch["x"].mul_(2)
    return F.cross_entropy(model(batch["z"]), batch["y"])


def rebound(model: Any, batch: Any) -> Any:
    for sample in batch["s"]:
        sample["x"] = sample["x"] * 2 - 1
    return F.cross_entropy(model(torch.stack([sample["x"] for sample in batch["s"]])), batch["y"])


def aliased_batch() -> dict[str, Any]:
    batch = batch_of()
    return {**batch, "z": batch["x"]}


def late_batch() -> dict[str, Any]:
    batch = batch_of()
    batch["x"][30] = 300.0
    return batch


def listed_batch() -> dict[str, Any]:
    batch = batch_of()
    return {"s": [{"x": x} for x in batch["x"]], "y": batch["y"]}


HIDDEN: dict[str, tuple[Loss, Callable[[], Any]]] = {
    "a value is read": (scaled_if_large, batch_of),
    "late": (scaled_late, late_batch),
    "through .data": (through_data, batch_of),
    "through numpy": (through_numpy, batch_of),
    "through another leaf": (through_another_leaf, aliased_batch),
    "rebound": (rebound, listed_batch),
}


@pytest.mark.usefixtures("constant_times")
@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("memory", ["1MiB", 12_000])
def test_writes_that_are_hard_to_see(name: str, memory: Any) -> None:
    loss_fn, make = HIDDEN[name]
    model = model_of()
    if name == "late":  # what it does to a sample depends on those beside it
        memory = "1MiB"
    plan = anybatch.plan(model, loss_fn, batch := make(), sgd(model), memory=memory)
    before = make()
    assert torch.equal(batch["x"], before["x"]) if "x" in batch else same_samples(batch["s"], before["s"])
    want = truth(model, loss_fn, make())
    # A proof would refuse what is divided or not by whether a large number is among the samples.
    step = anybatch.TrainStep(
        model, loss_fn, sgd(model), memory=memory, verify="off" if name == "a value is read" else "first"
    )
    if name == "a value is read" and plan.chosen.micro_batches > 1:
        want = truth(model, lambda model, batch: F.cross_entropy(model(batch["x"] / 255), batch["y"]), make())
    for _ in range(2):
        step(make())
        assert_float64(gradients_of(model), want)


def same_samples(ones: list[Any], others: list[Any]) -> bool:
    return all(torch.equal(one["x"], other["x"]) for one, other in zip(ones, others, strict=True))


def test_samples_in_lists_are_taken_up_again_as_they_were() -> None:
    model, calls = model_of(), [0]

    def loss_fn(model: Any, batch: Any) -> Any:
        calls[0] += 1
        loss = rebound(model, batch)
        if calls[0] == 1:
            raise torch.OutOfMemoryError("simulated")
        return loss

    want = truth(model, rebound, listed_batch())
    anybatch.backward(model, loss_fn, listed_batch())
    assert_float64(gradients_of(model), want)


def array_in_place(samples: list[Any]) -> dict[str, Tensor]:
    for sample in samples:
        sample["x"] -= 1.0
    return {"x": torch.as_tensor(np.stack([s["x"] for s in samples])), "y": torch.stack([s["y"] for s in samples])}


def nested_pop(samples: list[Any]) -> dict[str, Tensor]:
    labels = [sample["in"].pop("y") for sample in samples]
    return {"x": torch.stack([sample["in"]["x"] for sample in samples]), "y": torch.stack(labels)}


def nested_rebind(samples: list[Any]) -> dict[str, Tensor]:
    for sample in samples:
        sample["in"]["x"] = sample["in"]["x"] - 1.0
    return {"x": torch.stack([s["in"]["x"] for s in samples]), "y": torch.stack([s["in"]["y"] for s in samples])}


def tensor_in_place(samples: list[Any]) -> dict[str, Tensor]:
    for sample in samples:
        sample["x"].sub_(1.0)
    return {"x": torch.stack([s["x"] for s in samples]), "y": torch.stack([s["y"] for s in samples])}


COLLATES: dict[str, tuple[Callable[[list[Any]], Any], Callable[[Any, Any], Any], bool]] = {
    "array": (array_in_place, lambda x, y: {"x": x.numpy(), "y": y}, True),
    "tensor": (tensor_in_place, lambda x, y: {"x": x, "y": y}, True),
    "nested pop": (nested_pop, lambda x, y: {"in": {"x": x, "y": y}}, False),
    "nested rebind": (nested_rebind, lambda x, y: {"in": {"x": x, "y": y}}, True),
}


@pytest.mark.parametrize("options", [{"memory": "1MiB"}, {"micro_batch_size": 4}], ids=lambda one: next(iter(one)))
@pytest.mark.parametrize("name", COLLATES)
def test_what_a_collate_does_to_samples_it_does_once(name: str, options: Any) -> None:
    collate, wrap, shifts = COLLATES[name]
    model, batch = model_of(), batch_of()
    shifted = {**batch, "x": batch["x"] - 1.0} if shifts else batch
    want = truth(model, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]), shifted)
    samples = [wrap(x, y) for x, y in zip(batch["x"], batch["y"], strict=True)]

    def loss_fn(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    assert anybatch.check(model, loss_fn, samples, collate=collate).exact
    step = anybatch.TrainStep(model, loss_fn, sgd(model), collate=collate, **options)
    step(samples)
    assert_float64(gradients_of(model), want)
