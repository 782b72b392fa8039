"""Many micro-batches are compared with all of them at once where what the model gave can't stand in for it.

How it could be silently wrong: a loss that takes more of the hardest samples than two micro-batches have is the same in
these two, and the loss of the whole batch is not seen under a plan, or where the loss differentiates by itself, calls
parts of the model, or calls it with other samples.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

Batch = dict[str, torch.Tensor]
Loss = Callable[[Any, Batch], Any]
ROWS, SIZE, HARDEST = 96, 8, 20


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *layers, nn.Linear(8, 4))


def batch_of() -> Batch:
    generator = torch.Generator().manual_seed(1)
    x, other = (torch.randn(ROWS, 6, generator=generator) for _ in range(2))
    return {"x": x, "y": torch.randint(4, (ROWS,), generator=generator), "other": other}


def each_of(z: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(z, batch["y"], reduction="none")


def hardest(losses: torch.Tensor) -> torch.Tensor:
    return losses.topk(min(HARDEST, len(losses))).values.mean()


def penalised(model: Any, batch: Batch, of_losses: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x = batch["x"].clone().requires_grad_()
    losses = each_of(model(x), batch)
    (gradient,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return of_losses(losses) + gradient.square().sum(1).mean()


def through_its_parts(model: Any, batch: Batch) -> torch.Tensor:
    return each_of(model[2:](model[:2](batch["x"])), batch)


def of_some(model: Any, batch: Batch, most: int) -> torch.Tensor:
    """A term of the samples that the model is the surest of, up to a number."""
    z = model(batch["x"])
    chosen = (z.detach().softmax(1).amax(1) > 0.2).nonzero()[:most, 0]
    wanted = z.detach().argmax(1)[chosen]
    return each_of(z, batch).mean() + F.cross_entropy(model(batch["other"][chosen]), wanted, reduction="sum") / len(z)


def with_a_value_of_all(model: Any, batch: Batch) -> torch.Tensor:
    losses = through_its_parts(model, batch)
    return losses.mean() + hardest(losses.detach())


FAULTY: dict[str, Loss] = {
    "the hardest, with a gradient penalty": lambda model, batch: penalised(model, batch, hardest),
    "the hardest, of parts of a model": lambda model, batch: hardest(through_its_parts(model, batch)),
    "some of the samples, up to a number": lambda model, batch: of_some(model, batch, HARDEST),
}
LEGAL: dict[str, Loss] = {
    "a gradient penalty": lambda model, batch: penalised(model, batch, torch.mean),
    "parts of a model": lambda model, batch: through_its_parts(model, batch).mean(),
    "some of the samples": lambda model, batch: of_some(model, batch, ROWS),
    "only the value is of all samples": with_a_value_of_all,
    "random numbers": lambda model, batch: F.dropout(through_its_parts(model, batch), 0.3).mean(),
}


@pytest.mark.parametrize("name", list(FAULTY))
def test_what_only_many_show_is_stopped(name: str) -> None:
    model = net()
    before = [one.clone() for one in model.parameters()]
    step = anybatch.TrainStep(model, FAULTY[name], torch.optim.SGD(model.parameters(), 0.1), micro_batch_size=SIZE)
    with pytest.raises(anybatch.NotSplittable, match="the gradient of Sequential is not the whole batch's"):
        step(batch_of())
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", list(LEGAL))
def test_what_many_show_to_be_the_same_passes(name: str) -> None:
    out = anybatch.backward(net(), LEGAL[name], batch_of(), micro_batch_size=SIZE)
    assert out.proof is not None
    assert out.proof.exact
    assert not out.proof.note


def planned(loss_fn: Loss, memory: str) -> Any:
    model = net()
    return anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), memory=memory)(batch_of())


@pytest.mark.usefixtures("constant_times")
def test_a_plan_sees_as_many_as_it_has_room_for() -> None:
    with pytest.raises(anybatch.NotSplittable, match="the gradient of Sequential is not the whole batch's"):
        planned(lambda model, batch: hardest(each_of(model(batch["x"]), batch)), "12KiB")
    out = planned(lambda model, batch: each_of(model(batch["x"]), batch).mean(), "12KiB")
    assert out.micro_batches > 2
    assert out.proof.exact
    assert not out.proof.note
