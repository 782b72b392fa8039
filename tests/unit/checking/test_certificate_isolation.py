"""A check leaves everything bitwise as it was, also where it or the loss fails."""

import contextlib
import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch import check
from anybatch.batch.batches import Splittable
from anybatch.checking.rig import Rig
from anybatch.loss.accumulate import Settings
from anybatch.update.passes import Task

Batch = dict[str, Any]


class Everything(nn.Module):
    """BatchNorm, dropout, a recurrent network, tied and frozen weights, buffers and attributes that change."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.recurrent = nn.GRU(6, 6, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.seen: torch.Tensor
        self.average: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(6))
        self.calls = 0
        self.history: list[float] = []
        self.cache: dict[str, torch.Tensor] = {}
        self.scratch = torch.zeros(6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(0.0)
        self.seen.add_(len(tokens))
        hidden = self.recurrent(self.embedding(tokens))[0]
        self.cache["hidden"] = hidden
        self.scratch.add_(1.0)
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean((0, 1))  # another tensor, not the same
        self.new_attribute = hidden.detach()
        hidden = self.drop(self.norm(hidden.transpose(1, 2)).transpose(1, 2))
        result: torch.Tensor = self.head(self.spectral(hidden) + self.frozen(hidden))
        return result


MEMORY = torch.zeros(4)


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    random.random()
    np.random.rand()
    MEMORY.add_(1)
    batch["labels"][batch["labels"] == 0] = -100  # a loss may write to its batch
    batch["x"].mul_(2)
    loss: torch.Tensor = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
    loss *= batch["x"].mean().exp()
    return loss


def make_batch() -> Batch:
    tokens = torch.randint(0, 11, (6, 5))
    return {"tokens": tokens, "labels": tokens.clone(), "x": torch.rand(6, 2)}


def make_vectors() -> Batch:
    return {"x": torch.randn(8, 5), "y": torch.randint(0, 3, (8,))}


def facts(model: nn.Module, batch: Batch) -> Iterator[tuple[str, Any]]:
    """Everything that must not change: tensors by identity, address and value, the rest by value."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers(), *batch.items(), ("memory", MEMORY)]:
        yield f"{name} id", id(tensor)
        yield f"{name} address", tensor.data_ptr()
        yield f"{name} kind", (tensor.dtype, tensor.stride(), tensor.requires_grad)
        yield f"{name} value", tensor.detach().clone()
        yield f"{name} gradient id", id(tensor.grad)
        yield f"{name} gradient", None if tensor.grad is None else tensor.grad.clone()
        yield f"{name} hooks", dict(tensor._backward_hooks or {})
        yield f"{name} late hooks", dict(tensor._post_accumulate_grad_hooks or {})
    for name, module in model.named_modules():
        yield f"{name} attributes", sorted(module.__dict__)
        yield f"{name} mode", module.training
        yield (
            f"{name} hooks",
            [dict(module._forward_hooks), dict(module._forward_pre_hooks), dict(module._backward_hooks)],
        )
    for name in ("calls", "history", "cache", "scratch"):
        value = getattr(model, name, None)
        yield name, value.clone() if isinstance(value, torch.Tensor) else value
        yield f"{name} copy", list(value) if isinstance(value, (list, dict)) else None
    yield "torch random", torch.get_rng_state()
    yield "python random", random.getstate()
    yield "numpy random", str(np.random.get_state(legacy=False))
    yield "gradient mode", torch.is_grad_enabled()
    yield "default dtype", torch.get_default_dtype()


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    assert before.keys() == after.keys()

    def same(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)

    return [name for name in before if not same(before[name], after[name])]


def prepared() -> tuple[Everything, Batch]:
    torch.manual_seed(0)
    model, batch = Everything(), make_batch()
    model.embedding.weight.register_hook(lambda gradient: gradient * 2)
    recurrent: Any = model.recurrent
    recurrent.weight_hh_l0.register_post_accumulate_grad_hook(lambda parameter: None)
    model.norm.eval().train()
    model.head.eval()
    for parameter in list(model.parameters())[::2]:
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    return model, batch


@pytest.mark.parametrize("batch_norm", ["refuse", "ghost", "frozen"])
def test_a_check_leaves_everything_as_it_was(batch_norm: Any) -> None:
    model, batch = prepared()
    before = dict(facts(model, batch))
    certificate = check(model, loss_fn, batch, count=anybatch.count_tokens("labels"), batch_norm=batch_norm)
    assert "not-additive" in {reason.code for reason in certificate.reasons}  # it went through the whole diagnosis
    assert differences(before, dict(facts(model, batch))) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError, anybatch.LossError])
@pytest.mark.parametrize("call", [0, 1, 4, 9])
def test_a_loss_that_fails_leaves_everything_as_it_was(error: type[BaseException], call: int) -> None:
    model, batch = prepared()
    before = dict(facts(model, batch))
    calls = itertools.count()  # which nobody can put back

    def failing(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss = loss_fn(model, batch)
        if next(calls) >= call:
            raise error("out of memory")
        return loss

    with contextlib.suppress(error, anybatch.AnyBatchError):
        check(model, failing, batch)
    assert next(calls) > call
    assert differences(before, dict(facts(model, batch))) == []


def test_parameters_outside_of_the_modules_take_part_and_are_left_as_they_were() -> None:
    scale = nn.Parameter(torch.zeros(2))
    scale.grad = torch.ones(2)
    gradient, address = scale.grad, scale.data_ptr()

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        data = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        return data * scale[0].exp() + scale.sum()

    certificate = check(nn.Linear(5, 3), loss_fn, make_vectors())
    assert [reason.code for reason in certificate.reasons] == ["shared-term"]
    assert scale.grad is gradient
    assert gradient.tolist() == [1.0, 1.0]
    assert (scale.dtype, scale.data_ptr()) == (torch.float32, address)


def test_a_leaf_outside_of_the_modules_is_in_float64_too_and_no_optimizer_moves_it() -> None:
    scale, calls = nn.Parameter(torch.randn(3)), list[torch.Tensor]()
    before = scale.detach().clone()
    optimizer = torch.optim.SGD([scale], lr=0.1)

    def step(leaf: torch.Tensor) -> None:
        calls.append(leaf)
        optimizer.step()
        optimizer.zero_grad()

    scale.register_post_accumulate_grad_hook(step)
    for several in (False, True):

        def loss_fn(model: nn.Module, batch: Batch, several: bool = several) -> Any:
            loss = F.cross_entropy(model(batch["x"]) * scale, batch["y"])
            return {"first": loss, "second": (model(batch["x"]) * scale).square().mean()} if several else loss

        certificate = check(nn.Linear(5, 3), loss_fn, make_vectors())
        assert [reason.message[:49] for reason in certificate.reasons] == [
            "A post-accumulate-grad hook on a tensor of shape "
        ]
        assert certificate.dtype == "float64"
        assert certificate.error < 1e-12
        assert not calls
        assert torch.equal(scale, before)
        assert scale.grad is None


def test_a_leaf_of_the_batch_is_in_float64_too() -> None:
    batch = make_vectors()
    batch["x"].requires_grad_()
    certificate = check(nn.Linear(5, 3), lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), batch)
    assert certificate.exact, certificate
    assert certificate.dtype == "float64"
    assert batch["x"].grad is None


def test_a_small_term_of_the_batch_is_found_beside_a_temperature_outside() -> None:
    temperature = nn.Parameter(torch.tensor(0.3))

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        output: torch.Tensor = model(batch["x"])
        return F.cross_entropy(output * temperature.exp(), batch["y"]) + 1e-5 * output.mean().square()

    certificate = check(nn.Linear(5, 3), loss_fn, make_vectors())
    assert [reason.code for reason in certificate.reasons] == ["not-additive"], certificate


def test_the_graph_behind_a_buffer_is_left_to_the_user() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.logarithm = nn.Linear(5, 3), nn.Parameter(torch.ones(3))
            self.scale: torch.Tensor
            self.register_buffer("scale", self.logarithm.exp())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x) * self.scale
            return result

    model, batch = Computed(), make_vectors()
    scale, values = model.scale, model.scale.detach().clone()
    certificate = check(model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), batch)
    assert certificate.exact, certificate
    assert certificate.dtype == "float64"
    assert model.scale is scale
    assert torch.equal(scale, values)
    F.cross_entropy(model(batch["x"]), batch["y"]).backward()
    assert model.logarithm.grad is not None


def test_a_scripted_model_is_checked_and_left_as_it_was() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    certificate = check(model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), make_vectors())
    assert not certificate.exact
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_leaf_of_a_cut_is_no_parameter() -> None:
    def heads(model: Any, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        with anybatch.cut(model[0](batch)) as features:
            yield model[1](features).pow(2).mean()

    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1))
    batch = torch.randn(8, 5)
    settings = Settings(torch.device("cpu"))
    task = Task(model, heads, anybatch.count_samples, settings, "refuse", Splittable([batch]))
    rig = Rig(task, torch.float64)
    with ExitStack() as stack:
        whole = rig.open(stack)
        assert rig.names == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert len(whole.gradients) == len(rig.parameters) == 4


def test_a_leaf_that_the_loss_makes_for_itself_is_no_parameter() -> None:
    def smooth(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        points = batch.clone().requires_grad_()
        slopes = torch.autograd.grad(model(points).tanh().sum(), points, create_graph=True)[0]
        return slopes.pow(2).mean() + points.mean()

    batch = torch.randn(8, 5)
    assert check(nn.Linear(5, 1), smooth, batch).exact
    batch.requires_grad_()
    assert check(nn.Linear(5, 1), smooth, batch).exact
    assert batch.grad is None


def test_a_loss_that_is_a_module_or_bound_to_an_object_is_isolated_too() -> None:
    class Centres(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centre = nn.Parameter(torch.zeros(3))
            self.norm = nn.BatchNorm1d(3)

        def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = (self.norm(model(batch)) - self.centre).pow(2).mean()
            return result

    class Trainer:
        def __init__(self) -> None:
            self.criterion = Centres()

        def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.criterion(model, batch)
            return result

    trainer = Trainer()
    for loss, name in ((trainer.criterion, "loss_fn.norm"), (trainer.loss, "self.criterion.norm")):
        certificate = check(nn.Linear(5, 3), loss, torch.randn(8, 5))
        assert [reason.where for reason in certificate.reasons] == [name]
    normalisation: Any = trainer.criterion.norm
    assert (normalisation.num_batches_tracked.item(), normalisation.running_mean.tolist()) == (0, [0.0, 0.0, 0.0])
    assert trainer.criterion.centre.grad is None
    assert trainer.criterion.centre.dtype is torch.float32


def test_training_goes_on_as_if_there_had_been_no_check() -> None:
    def train(with_check: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        step = anybatch.TrainStep(model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), optimizer)
        for _ in range(3):
            batch = make_vectors()
            if with_check:
                check(model, step.loss_fn, batch)
            step(batch)
        return [*model.state_dict().values()]

    assert all(torch.equal(one, other) for one, other in zip(train(False), train(True), strict=True))
