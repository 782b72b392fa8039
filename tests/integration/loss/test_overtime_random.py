"""Losses over time draw the same random numbers in both passes; they work with autocast, scalers and buffers."""

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
import reference
from anybatch.loss.states import ChunkCall
from anybatch.memory import checkpointing
from overtime_models import Batch, Case, Recurrent, batch_of, recurrent, translator

Draws = list[torch.Tensor]


class Noisy(nn.Module):
    """Dropout before and after the recurrent layers and between them, and a buffer that every chunk changes."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.inner = Recurrent("LSTM", layers, dropout=0.3 if layers > 1 else 0.0)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.draws: Draws = []

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        inner: Any = self.inner
        x = F.dropout(x, 0.4, self.training) * (1 + 0.1 * random.random())
        self.draws.append(x.detach().clone())
        assert isinstance(self.mean, torch.Tensor)
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        output, state = inner.rnn(x + self.mean, state)
        return output, state


def noisy_case(*, late: bool = False) -> Case:
    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, state = model(chunk["x"], state)

        def loss() -> torch.Tensor:
            logits = model.inner.head(F.dropout(output, 0.5, model.training))
            return F.cross_entropy(logits.flatten(0, 1), chunk["y"].flatten())

        return loss if late else loss(), state

    begin = lambda model, batch: model.inner.begin(len(batch["x"]))  # noqa: E731
    return Case(Noisy(), chunk_loss, begin, None, {"broadcast": ["source"]})


def loop(case: Case, batch: Batch, chunk: int) -> tuple[reference.Gradients, Draws]:
    """The chunks in their order with one graph: what people write."""
    model: Any = case.model
    torch.manual_seed(5), random.seed(5)
    model.draws.clear()
    state, total = case.state(model, batch), torch.zeros((), dtype=torch.float64)
    for start in range(0, batch["x"].shape[1], chunk):
        part = {k: v[:, start : start + chunk] for k, v in batch.items() if k in ("x", "y")}
        loss, state = case.chunk_loss(model, part, state)
        loss = loss() if callable(loss) else loss
        total = total + loss * part["x"].shape[1] / batch["x"].shape[1]
    reference.clear(model)
    total.backward()
    return reference.gradients_of(model), list(model.draws)


@pytest.mark.parametrize("late", [False, True], ids=["loss", "loss-as-a-function"])
def test_dropout_is_that_of_the_loop_bitwise(late: bool) -> None:
    case, batch = noisy_case(late=late), batch_of()
    twin: Any = copy.deepcopy(case)
    twin.model.load_state_dict(case.model.state_dict())
    expected, draws = loop(twin, batch, 3)
    after = torch.get_rng_state(), random.getstate()
    model: Any = case.model
    torch.manual_seed(5), random.seed(5)
    anybatch.backward(model, case.over_time(3), batch)
    reference.assert_float64(reference.gradients_of(model), expected)
    assert torch.equal(torch.get_rng_state(), after[0])
    assert random.getstate() == after[1]
    assert torch.equal(model.mean, twin.model.mean)
    first, again = model.draws[:4], model.draws[4:]
    assert all(torch.equal(a, b) for a, b in zip(first, draws, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(again, first[2::-1], strict=True))


def test_a_loss_that_draws_in_later_chunks_only_is_refused() -> None:
    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, (state, t) = model.rnn(chunk["x"], state[0]), (None, state[1] + 1)
        return lambda: (F.dropout(output[0]) if t > 1 else output[0]).square().mean(), (output[1], t)

    loss_fn = anybatch.OverTime(chunk_loss, lambda model, batch: (None, 0), chunk=3, broadcast=["source"])
    with pytest.raises(anybatch.LossError, match="draws random numbers in some chunks"):
        anybatch.backward(recurrent().model, loss_fn, batch_of())


def test_sampled_tokens_are_sampled_again() -> None:
    case, batch = translator("sampled"), batch_of(4, 9)
    torch.manual_seed(2)
    expected, _ = reference.whole_gradients(case.model, case.whole, batch)
    torch.manual_seed(2)
    anybatch.backward(case.model, case.over_time(2), batch)
    reference.assert_float64(reference.gradients_of(case.model), expected)


def test_micro_batches_draw_one_after_the_other() -> None:
    case, batch = noisy_case(), batch_of()
    model: Any = case.model
    grads = []
    for _ in range(2):
        reference.clear(model)
        model.mean.zero_(), torch.manual_seed(5), random.seed(5)
        # Its running mean makes the gradient depend on the micro-batches, which a proof would refuse.
        anybatch.backward(model, case.over_time(3), batch, micro_batch_size=2, verify="off")
        grads.append(reference.gradients_of(model))
    reference.assert_bitwise(*grads)


def as_float32(batch: Batch) -> Batch:
    return {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}


def test_autocast_is_that_of_one_graph() -> None:
    def precision(model: Any, chunk: Batch, state: Any) -> Any:
        output, state = model.rnn(chunk["x"], state)
        seen.append(model.head(output).dtype)
        return lambda: F.cross_entropy(model.head(output).float().flatten(0, 1), chunk["y"].flatten()), state

    seen: list[Any] = []
    case = recurrent("GRU")
    model, batch = case.model.float(), as_float32(batch_of())
    case = Case(model, precision, case.state, None, {"broadcast": ["source"]})
    exact, _ = reference.whole_gradients(reference.as_float64(model), case.whole, batch_of())
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        whole, _ = reference.whole_gradients(model, case.whole, batch)
    for chunk, size in ((1, None), (4, 2)):
        reference.clear(model)
        anybatch.backward(model, case.over_time(chunk), batch, micro_batch_size=size, autocast=torch.bfloat16)
        error = reference.distance(reference.gradients_of(model), exact)
        assert set(seen[2:]) == {torch.bfloat16}  # what follows is of anybatch, in both passes
        assert error <= 2 * reference.distance(whole, exact) + 2**-8 * reference.norm(exact)


def test_float32_is_as_near_as_one_graph() -> None:
    case = recurrent("LSTM", 2, last=True)
    exact, _ = reference.whole_gradients(case.model, case.whole, batch_of(5, 60))
    model, batch = case.model.float(), as_float32(batch_of(5, 60))
    whole, _ = reference.whole_gradients(model, case.whole, batch)
    reference.clear(model)
    anybatch.backward(model, case.over_time(7), batch, micro_batch_size=2)
    reference.assert_float32(reference.gradients_of(model), whole, exact, 3 * 9)


def test_a_scaler_unscales_and_clips_once() -> None:
    case = recurrent("LSTM", 2, last=True)
    model, batch = case.model.float(), as_float32(batch_of())
    twin: Any = copy.deepcopy(model)
    for scale in (8.0, 1024.0):
        model.load_state_dict(twin.state_dict())
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        step = anybatch.TrainStep(
            model, case.over_time(4), torch.optim.SGD(model.parameters(), 0.1), micro_batch_size=2, scaler=scaler,
            clip_norm=0.01,
        )  # fmt: skip
        out = step(batch)
        losses = case.whole(twin, batch)
        reference.clear(twin)
        sum(losses.values()).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        assert out.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
            assert expected.grad is not None
            torch.testing.assert_close(found, expected - 0.1 * expected.grad, rtol=1e-5, atol=1e-7)


def test_buffers_are_changed_as_in_the_loop() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Recurrent("GRU")
            self.decay: torch.Tensor
            self.register_buffer("decay", torch.ones((), dtype=torch.float64))

        def forward(self, x: torch.Tensor, state: Any) -> Any:
            inner: Any = self.inner
            self.decay = self.decay * 0.9  # a new tensor each time
            return inner.rnn(x * self.decay, state)

    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, state = model(chunk["x"], state)
        return output.square().mean(), state

    model, batch = Counting(), batch_of(2, 9)
    loss_fn = anybatch.OverTime(chunk_loss, lambda model, batch: None, chunk=2, broadcast=["source"])
    anybatch.backward(model, loss_fn, batch)
    found = reference.gradients_of(model)
    assert model.decay == pytest.approx(0.9**5)
    model.decay, state, total = torch.ones((), dtype=torch.float64), None, torch.zeros(())
    reference.clear(model)
    for start in range(0, 9, 2):
        output, state = model(batch["x"][:, start : start + 2], state)
        total = total + output.square().mean() * output.shape[1] / 9
    total.backward()
    reference.assert_float64(found, reference.gradients_of(model))


def test_dropout_between_layers_of_cudnn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "has_cudnn", lambda device: True)
    rnn = nn.LSTM(4, 4, 2, dropout=0.1)
    with pytest.raises(anybatch.NotSplittable, match="cuDNN") as caught:
        ChunkCall(len, None, [nn.Linear(1, 1), rnn], {}).refuse_hidden_dropout()
    assert caught.value.modules == ("LSTM",) or list(caught.value.modules) == ["LSTM"]
    quiet = [nn.LSTM(4, 4, 1), nn.LSTM(4, 4, 2), rnn.eval(), nn.GRU(4, 4)]
    ChunkCall(len, None, quiet, {}).refuse_hidden_dropout()


@pytest.mark.gpu
def test_on_cuda() -> None:
    case = recurrent("LSTM", 2, last=True)
    model = case.model.cuda()
    batch = batch_of(5, 40)
    there = {name: value.cuda() for name, value in batch.items()}
    expected, _ = reference.whole_gradients(model, case.whole, there)
    anybatch.backward(model, case.over_time(7), batch, micro_batch_size=2)
    reference.assert_float64(reference.gradients_of(model), expected)
    rnn: Any = model.rnn
    rnn.dropout = 0.2
    with pytest.raises(anybatch.NotSplittable, match="cuDNN"):
        anybatch.backward(model, case.over_time(7), batch)
    with torch.backends.cudnn.flags(enabled=False):
        reference.clear(model)
        anybatch.backward(model, case.over_time(7), batch)
