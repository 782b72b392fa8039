"""A loss that changes the gradients that are being accumulated is refused, and the text says what it did."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from reference import assert_bitwise, gradients_of

ROWS = 11
TOOK_OFF = "cleared gradients: .*weight lost"
DIFFERENTIATED = r"called backward\(\) itself: .*weight got a gradient"


def parts(layers: int = 1) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers))).double()
    batch = {"x": torch.randn(ROWS, 6).double(), "y": torch.randint(6, (ROWS,))}
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batch


def plain(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("layers", [1, 100])
@pytest.mark.parametrize("kind", ["returned", "dict", "yielded"])
def test_zero_grad_in_a_loss(to_none: bool, layers: int, kind: str) -> None:
    model, optimizer, batch = parts(layers)

    def loss_fn(model: Any, batch: Any) -> Any:
        optimizer.zero_grad(set_to_none=to_none)
        return {"a": plain(model, batch)} if kind == "dict" else plain(model, batch)

    def yielding(model: Any, batch: Any) -> Any:
        optimizer.zero_grad(set_to_none=to_none)
        yield plain(model, batch)
        yield plain(model, batch)

    found = yielding if kind == "yielded" else loss_fn
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(anybatch.LossError, match=TOOK_OFF):
        anybatch.TrainStep(model, found, optimizer, micro_batch_size=4)(batch)
    assert_bitwise(list(model.parameters()), list(before))
    assert gradients_of(model) == [None] * 2 * layers
    anybatch.TrainStep(model, found, optimizer)(batch)  # one micro-batch has nothing to lose


def test_zero_grad_on_one_of_several_devices() -> None:
    model, optimizer, batch = parts()

    def loss_fn(model: Any, batch: Any) -> Any:
        model.zero_grad()
        return plain(model, batch)

    with pytest.raises(anybatch.LossError, match=TOOK_OFF):
        anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=2, devices=["cpu", "cpu"])(batch)


@pytest.mark.parametrize("retain_graph", [True, False])
@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("planned", [True, False])
def test_backward_in_a_loss(retain_graph: bool, size: int | None, planned: bool) -> None:
    model, optimizer, batch = parts()

    def loss_fn(model: Any, batch: Any) -> Any:
        loss = plain(model, batch)
        loss.backward(retain_graph=retain_graph)
        return loss

    options: dict[str, Any] = {"memory": "1MiB"} if planned else {"micro_batch_size": size}
    with pytest.raises(anybatch.LossError, match=DIFFERENTIATED):
        anybatch.TrainStep(model, loss_fn, optimizer, **options)(batch)
    with pytest.raises(anybatch.LossError, match=DIFFERENTIATED):
        anybatch.check(model, loss_fn, batch)


def test_the_certificate_says_that_a_split_is_refused() -> None:
    model, _, batch = parts()

    def loss_fn(model: Any, batch: Any) -> Any:
        model.zero_grad()
        return plain(model, batch)

    certificate = anybatch.check(model, loss_fn, batch)
    assert not certificate.exact
    assert "cleared gradients" in " ".join(str(certificate).split())


def test_a_gradient_of_an_inner_loss_is_nobodys_business() -> None:
    model, optimizer, batch = parts()

    def loss_fn(model: Any, batch: Any) -> Any:
        x = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(plain(model, {**batch, "x": x}), x, create_graph=True)
        inner = nn.Linear(6, 1).double()
        inner(batch["x"]).mean().backward()
        inner.zero_grad()
        return plain(model, batch) + slope.square().sum()

    anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=4, verify="off")(batch)


@pytest.mark.parametrize("place", ["between", "after"])
def test_zero_grad_while_losses_are_yielded(place: str) -> None:
    model, optimizer, batch = parts()

    def loss_fn(model: Any, batch: Any) -> Any:
        yield plain(model, batch)
        if place == "between":
            optimizer.zero_grad()
        yield plain(model, batch)
        optimizer.zero_grad()

    for size in (None, 4):
        with pytest.raises(anybatch.LossError, match=TOOK_OFF):
            anybatch.backward(model, loss_fn, batch, micro_batch_size=size)


def test_backward_on_one_of_several_devices() -> None:
    model, optimizer, batch = parts()

    def loss_fn(model: Any, batch: Any) -> Any:
        loss = plain(model, batch)
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(anybatch.LossError, match=r"got a gradient while the loss ran: it called backward\(\) itself"):
        anybatch.TrainStep(model, loss_fn, optimizer, devices=["cpu", "cpu"])(batch)


@pytest.mark.parametrize("mode", ["exact", "truncated"])
@pytest.mark.parametrize("does", ["zeroes", "takes off", "differentiates"])
@pytest.mark.parametrize("size", [None, 2])
def test_in_chunks_of_time(size: int | None, does: str, mode: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 6).double()
    batch = {"x": torch.randn(4, 20, 6).double(), "y": torch.randint(6, (4, 20))}

    def chunk_loss(model: Any, chunk: Any, state: Any) -> Any:
        out = model(chunk["x"]) + state
        if does != "differentiates":
            model.zero_grad(set_to_none=does == "takes off")
        loss = F.cross_entropy(out.flatten(0, 1), chunk["y"].flatten())
        if does == "differentiates":
            loss.backward(retain_graph=True)
        return loss, out[:, -1:]

    loss_fn = anybatch.OverTime(
        chunk_loss, lambda model, batch: torch.zeros(len(batch["x"]), 1, 6).double(), chunk=5, mode=mode
    )
    if mode == "exact" and does == "differentiates":  # the first pass has no graph
        expected: tuple[type[Exception], str] = (RuntimeError, "does not require grad")
    else:
        expected = (anybatch.LossError, DIFFERENTIATED if does == "differentiates" else TOOK_OFF)
    with pytest.raises(expected[0], match=expected[1]):
        anybatch.backward(model, loss_fn, batch, micro_batch_size=size)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("keep", [0, 1, 2])
def test_in_encoders_that_run_again(keep: int, to_none: bool) -> None:
    model, optimizer, batch = parts()

    def encode(model: Any, batch: Any) -> Any:
        model.zero_grad(set_to_none=to_none)
        return model(batch["x"])

    loss_fn = anybatch.Coupled(encode, lambda model, out: (out @ out.T).logsumexp(1).mean(), keep=keep)
    with pytest.raises(anybatch.LossError, match=TOOK_OFF):
        anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=2)(batch)
