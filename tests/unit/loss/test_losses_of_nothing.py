"""A micro-batch without items of a loss: what the loss function may give for it, and what it may not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import anybatch
from anybatch import LossError, Mean, NotSplittable, backward, check, count_samples

Batch = dict[str, torch.Tensor]
COUNT: dict[str, Any] = {"a": lambda batch: batch["is_a"].sum(), "b": count_samples}


def heads() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 1)}).double()


def samples() -> Batch:
    return {"x": torch.randn(12, 4).double(), "is_a": torch.tensor([True] * 3 + [False] * 9)}


def of_a(model: Any, batch: Batch) -> torch.Tensor:
    result: torch.Tensor = model["a"](batch["x"][batch["is_a"]]).square().mean()
    return result


def of_b(model: Any, batch: Batch) -> torch.Tensor:
    result: torch.Tensor = model["b"](batch["x"]).square().mean()
    return result


def gradient(model: nn.ModuleDict) -> torch.Tensor:
    found = torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )
    model.zero_grad()
    return found


@pytest.mark.parametrize("nothing", [None, 0.0, 0, torch.tensor(float("nan"))])
def test_a_task_without_samples_gives_nothing_where_its_count_is_0(nothing: Any) -> None:
    model, batch = heads(), samples()

    def loss_fn(model: Any, batch: Batch) -> dict[str, Any]:
        return {"a": of_a(model, batch) if batch["is_a"].any() else nothing, "b": of_b(model, batch)}

    def yielded(model: Any, batch: Batch) -> Iterator[tuple[str, Any]]:
        yield from loss_fn(model, batch).items()

    sum(loss_fn(model, batch).values()).backward()
    expected = gradient(model)
    for function in (loss_fn, yielded):
        result = backward(model, function, batch, micro_batch_size=3, count=COUNT)
        torch.testing.assert_close(gradient(model), expected, rtol=1e-10, atol=1e-12)
        assert (result.micro_batches, result.counts) == (4, {"a": 3, "b": 12})
        assert check(model, function, batch, count=COUNT).exact


@pytest.mark.parametrize("nothing", [None, 0.0, {}])
def test_a_loss_may_be_nothing_for_a_micro_batch_whose_count_is_0(nothing: Any) -> None:
    model, batch = heads(), samples()

    def loss_fn(model: Any, batch: Batch) -> Any:
        return of_a(model, batch) if batch["is_a"].any() else nothing

    of_a(model, batch).backward()
    expected = gradient(model)
    backward(model, loss_fn, batch, micro_batch_size=3, count=COUNT["a"])
    torch.testing.assert_close(gradient(model), expected, rtol=1e-10, atol=1e-12)
    # The gradient would be another one; or the samples that are run in parts have a part with nothing.
    with pytest.raises((NotSplittable, LossError), match="count= says so with 0"):
        backward(model, loss_fn, batch, micro_batch_size=3)
    with pytest.raises(LossError, match="count= says so with 0"):
        backward(model, loss_fn, batch, micro_batch_size=3, verify="off")
    assert not check(model, loss_fn, batch).exact


@pytest.mark.parametrize("count", [COUNT["a"], "forward"])
def test_a_mean_over_nothing_needs_no_tensor(count: Any) -> None:
    model, batch = heads(), samples()

    def loss_fn(model: Any, batch: Batch) -> Mean:
        items = int(batch["is_a"].sum())
        return Mean(of_a(model, batch) * items if items else 0.0, items)

    of_a(model, batch).backward()
    expected = gradient(model)
    backward(model, loss_fn, batch, micro_batch_size=3, count=count)
    torch.testing.assert_close(gradient(model), expected, rtol=1e-10, atol=1e-12)


def test_what_a_model_gave_is_no_mapping_of_losses() -> None:
    class Output(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            return self[name]

    def given(make: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda model, batch: make({"loss": of_b(model, batch), "logits": model["a"](batch["x"])})

    for make, expected in (
        (Output, r"returned a Output with 'logits', of shape \(12, 3\).*return output\.loss"),
        (dict, r"returned a dict with 'logits', of shape \(12, 3\).*return output\[\"loss\"\]"),
        (lambda output: tuple(output.values()), r"is a tuple.*return result\[0\]"),
        (lambda output: {**output, "logits": (1, 2)}, r"with 'logits', a tuple.*return output\[\"loss\"\]"),
    ):
        for verb in (backward, check):
            with pytest.raises(LossError, match=expected):
                verb(heads(), given(make), samples())


def test_a_state_that_is_kept_outside_is_no_yielded_loss() -> None:
    hidden = [torch.zeros(12, 3).double()]

    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        hidden[0] = torch.tanh(model["a"](batch["x"]) + hidden[0][: len(batch["x"])])
        return hidden[0].mean()

    with pytest.raises(LossError, match="is kept outside the loss") as error:
        backward(heads(), loss_fn, samples(), micro_batch_size=4)
    assert "yielded" not in str(error.value)


def test_the_state_as_data_and_its_new_value_as_a_metric_give_the_whole_gradient() -> None:
    def loss_fn(model: Any, batch: Batch) -> Any:
        state = torch.tanh(model["a"](batch["x"]) + batch["state"])
        return state.mean(), {"state": state}

    found = []
    for size in (None, 4):
        model, state = heads(), torch.zeros(12, 3).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=size)
        for _ in range(3):
            state = step({**samples(), "state": state}).metrics["state"]
        found.append([*model.state_dict().values(), state])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
