"""Which parameters get a gradient: all that the loss reaches, wherever they are, and no other."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
import reference
from anybatch import LossError
from test_losses import WAYS, Batch, batch_of, cross_entropy, net, total_cross_entropy


@pytest.mark.parametrize("loss_fn", WAYS)
@pytest.mark.parametrize("size", [None, 1, 3])
def test_a_gradient_that_was_there_is_added_to(loss_fn: Any, size: int | None) -> None:
    model, batch = net(), batch_of()
    expected, _ = reference.whole_gradients(model, cross_entropy, batch)
    held = []
    for index, parameter in enumerate(model.parameters()):
        if index != 1:
            parameter.grad = torch.full_like(parameter, index + 1.0)
        held.append(parameter.grad)
    anybatch.backward(model, loss_fn, batch, micro_batch_size=size)
    found = reference.gradients_of(model)
    for index, gradient in enumerate(found):
        if gradient is not None and index != 1:
            gradient.sub_(index + 1.0)
    reference.assert_float64(found, expected)
    assert all(h is None or p.grad is h for p, h in zip(model.parameters(), held, strict=True))  # in place, as autograd


def test_two_calls_add_up_as_two_calls_of_backward_do() -> None:
    model, batch, other = net(), batch_of(), batch_of(5)
    for each in (batch, other):
        anybatch.backward(model, total_cross_entropy, each, micro_batch_size=2)
    first, _ = reference.whole_gradients(model, cross_entropy, batch)
    second, _ = reference.whole_gradients(model, cross_entropy, other)
    expected = [x + y for x, y in zip(first, second, strict=True) if x is not None and y is not None]
    reference.assert_float64(reference.gradients_of(model), list(expected))


class Tempered(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self, way: Any) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.way = way

    def forward(self, model: Any, batch: Batch) -> Any:
        return self.way(lambda x: model(x) * self.temperature, batch)

    def method(self, model: Any, batch: Batch) -> Any:
        return self.forward(model, batch)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["module", "method", "partial", "closure"])
@pytest.mark.parametrize("prior", [None, 10.0])
def test_parameters_outside_of_the_model(way: Any, place: str, prior: float | None) -> None:
    model, loss = net(), Tempered(way)
    ways: dict[str, Any] = {
        "module": loss, "method": loss.method, "partial": functools.partial(loss.forward),
        "closure": lambda model, batch: loss.forward(model, {**batch}),
    }  # fmt: skip
    both = [*model.parameters(), loss.temperature]
    expected, _ = reference.whole_gradients(model, Tempered.forward.__get__(loss), batch_of(), both)
    for size in (None, 1, 3, 7):
        reference.clear(both)
        if prior is not None:
            loss.temperature.grad = torch.full_like(loss.temperature, prior)
        anybatch.backward(model, ways[place], batch_of(), micro_batch_size=size)
        found = reference.gradients_of(both)
        if prior is not None and found[-1] is not None:
            found[-1] -= prior
        reference.assert_float64(found, expected, f"the gradient at {size}")


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_outside_that_only_a_later_micro_batch_reaches(way: Any) -> None:
    model, free = net(), nn.Parameter(torch.ones((), dtype=torch.float64))

    def loss_fn(model: Any, batch: Batch) -> Any:
        return way(lambda x: model(x) * free if batch["mask"].any() else model(x), batch)

    batch = batch_of()
    both = [*model.parameters(), free]
    parts = [{name: leaf[i : i + 1] for name, leaf in batch.items()} for i in range(7)]
    losses = [
        cross_entropy(lambda x, part=part: model(x) * (free if part["mask"].any() else 1), part) for part in parts
    ]
    expected = torch.autograd.grad(torch.stack(losses).mean(), both)
    anybatch.backward(model, loss_fn, batch, micro_batch_size=1, verify="off")
    reference.assert_float64(reference.gradients_of(both), list(expected))


class Once:
    """Runs out of memory in one call of many."""

    def __init__(self, at: int) -> None:
        self.calls_left = at

    def __call__(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise torch.OutOfMemoryError("out of memory, as was asked for")


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("reach", ["always", "where the mask is set"])
def test_a_parameter_outside_counts_once_when_memory_runs_out(at: int, reach: str) -> None:
    model, batch = net(), batch_of()
    batch["mask"] = torch.tensor([0, 0, 1, 1, 0, 0, 1])  # the first micro-batch of two has nothing to count

    def masked(run_out: Any) -> Any:
        def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
            run_out()
            factor = free if reach == "always" or batch["mask"].any() else 1.0
            losses = F.cross_entropy(model(batch["x"]) * factor, batch["y"], reduction="none")
            return (losses * batch["mask"]).sum() / batch["mask"].sum()

        return loss_fn

    free = nn.Parameter(torch.ones((), dtype=torch.float64))
    both = [*model.parameters(), free]
    expected, _ = reference.whole_gradients(model, masked(lambda: None), batch, both)
    free.grad = held = torch.full((), 5.0, dtype=torch.float64)
    out = anybatch.backward(model, masked(Once(at)), batch, micro_batch_size=2, count=lambda batch: batch["mask"].sum())
    assert len(out.attempts) == 1 + (at > 0)
    assert free.grad is held
    held.sub_(5.0)
    reference.assert_float64(reference.gradients_of(both), expected)


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("size", [1, 2, None])
def test_an_encoder_outside_of_the_model_upstream_of_a_cut(total: bool, size: int | None) -> None:
    model, encoder = net(), nn.Linear(3, 3).double()

    def loss_with(cut: Any) -> Any:
        def loss_fn(model: Any, batch: Batch) -> Any:
            with cut(encoder(batch["x"])) as hidden:
                yield "loss", (total_cross_entropy if total else cross_entropy)(model, {**batch, "x": hidden})

        return loss_fn

    both = [*model.parameters(), *encoder.parameters()]
    expected, _ = reference.whole_gradients(model, loss_with(reference.no_cut), batch_of(), both)
    anybatch.backward(model, loss_with(anybatch.cut), batch_of(), micro_batch_size=size)
    reference.assert_float64(reference.gradients_of(both), expected)


class Counting(nn.Module):
    """A loss that counts its calls in a buffer."""

    def __init__(self, run_out: Any) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.calls: torch.Tensor
        self.run_out = run_out

    def forward(self, model: Any, batch: Batch) -> torch.Tensor:
        self.calls += 1
        self.run_out()
        return cross_entropy(model, batch)


@pytest.mark.parametrize("stepping", [False, True])
def test_buffers_of_a_loss_are_rolled_back_too(stepping: bool) -> None:
    model, loss_fn = net(), Counting(Once(3))
    if stepping:
        step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=2)
        out = step(batch_of())
    else:
        out = anybatch.backward(model, loss_fn, batch_of(), micro_batch_size=2)
    assert [attempt.outcome for attempt in out.attempts] == ["out of memory", "done"]
    assert loss_fn.calls == out.micro_batches


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_leaves_gradients_outside_of_the_model_alone(way: Any) -> None:
    model, free = net(), nn.Parameter(torch.ones((), dtype=torch.float64))
    free.grad = held = torch.full((), 5.0, dtype=torch.float64)
    calls = []

    def loss_fn(model: Any, batch: Batch) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError
        return way(lambda x: model(x) * free, batch)

    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD([*model.parameters(), free], lr=0.1), micro_batch_size=2)
    with pytest.raises(ZeroDivisionError):
        step(batch_of())
    assert free.item() == 1.0
    calls.clear()
    free.grad = held
    with pytest.raises(ZeroDivisionError):
        anybatch.backward(model, loss_fn, batch_of(), micro_batch_size=2, inputs=[*model.parameters(), free])
    assert free.grad is held
    assert held.item() == 5.0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [None, 2])
def test_only_the_inputs_that_are_named(way: Any, size: int | None) -> None:
    model, batch = net(), batch_of()
    batch["x"].requires_grad_()
    wanted: list[Any] = [model[0].weight, batch["x"]]
    expected, _ = reference.whole_gradients(model, cross_entropy, batch, wanted)
    anybatch.backward(model, way, batch, micro_batch_size=size, inputs=wanted)
    reference.assert_float64(reference.gradients_of(wanted), expected)
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["0.weight"]


def test_a_step_with_inputs_moves_nothing_else() -> None:
    model = net()
    before = reference.frozen([p for name, p in model.named_parameters() if name != "0.weight"])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # left over from something else
    wanted: list[Any] = [model[0].weight]
    step = anybatch.TrainStep(
        model, cross_entropy, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch_size=2, inputs=wanted
    )
    step(batch_of())
    assert reference.frozen([p for name, p in model.named_parameters() if name != "0.weight"]) == before


@pytest.mark.parametrize("way", WAYS)
def test_frozen_parameters(way: Any) -> None:
    model, batch = net(), batch_of()
    model[0].weight.requires_grad_(False)
    reference.assert_exact_at_every_size(model, way, batch, 7, whole_loss_fn=cross_entropy)
    anybatch.backward(model, way, batch, micro_batch_size=3)
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["0.weight"]


@pytest.mark.parametrize("way", WAYS)
def test_tied_parameters_and_shared_modules(way: Any) -> None:
    shared = nn.Linear(3, 3)
    tied = nn.Linear(3, 3)
    tied.weight = shared.weight
    model = nn.Sequential(shared, nn.Tanh(), shared, tied, nn.Linear(3, 2)).double()
    assert len(list(model.parameters())) == 5
    reference.assert_exact_at_every_size(model, way, batch_of(), 7, whole_loss_fn=cross_entropy)


class Branches(nn.Module):
    """One of two branches for each sample, by its mask; only those that are needed run."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)]).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        which = (x[:, 0] > 0).long()
        out = torch.zeros(len(x), 2, dtype=x.dtype)
        for index in which.unique().tolist():
            out = out.index_add(0, (which == index).nonzero()[:, 0], self.branches[index](x[which == index]))
        return out


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_only_some_micro_batches_use(way: Any) -> None:
    model = Branches()
    reference.assert_exact_at_every_size(model, way, batch_of(), 7, whole_loss_fn=cross_entropy)
    anybatch.backward(model, way, batch_of(), micro_batch_size=2)
    unused = list(model.branches[2].parameters())
    assert all(parameter.grad is None for parameter in unused)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings(way: Any, sparse: bool) -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 2)).double()
    batch = batch_of()
    batch["x"] = torch.randint(0, 5, (7, 3))
    reference.assert_exact_at_every_size(model, way, batch, 7, whole_loss_fn=cross_entropy)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("prior", ["sparse", "dense"])
def test_sparse_and_dense_gradients_are_added(way: Any, prior: str, sparse: bool) -> None:
    model = nn.Embedding(5, 2, sparse=sparse).double()
    batch = {"x": torch.randint(0, 5, (7,)), "y": torch.randint(0, 2, (7,))}
    (expected,), _ = reference.whole_gradients(model, cross_entropy, batch)
    assert expected is not None
    there = torch.tensor([[0, 0], [1, 2], [0, 0], [3, 4], [0, 0]]).double()
    model.weight.grad = there.to_sparse(1) if prior == "sparse" else there.clone()
    anybatch.backward(model, way, batch, micro_batch_size=2)
    assert model.weight.grad is not None
    reference.assert_float64([model.weight.grad.to_dense()], [expected.to_dense() + there])


def test_a_loss_with_parameters_of_its_own_must_use_the_model_too() -> None:
    other = net()
    loss_fn: Any = Tempered(lambda _, batch: cross_entropy(lambda x: other(x) * loss_fn.temperature, batch))
    model = net()
    with pytest.raises(LossError, match="not with another one"):
        anybatch.backward(model, loss_fn, batch_of(), micro_batch_size=3)
    assert loss_fn.temperature.grad is None
    assert reference.gradients_of(model) == [None] * 4
