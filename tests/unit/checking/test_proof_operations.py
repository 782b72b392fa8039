"""A loss that becomes one of other operations has the batch proved where it does, whatever it goes by."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

BEGINS = 11
IS_ON = {0: False}  # read by the losses below
Batch = dict[str, torch.Tensor]


def batch_of() -> Batch:
    torch.manual_seed(0)
    return {"x": torch.randn(20, 4), "y": torch.randint(3, (20,)), "w": torch.ones(20)}


def mean(model: Any, batch: Batch) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def coupled(model: Any, batch: Batch) -> Any:
    return mean(model, batch) + model(batch["x"]).std(0).mean()


def step_of(loss_fn: Callable[[Any, Any], Any]) -> tuple[nn.Linear, torch.optim.Optimizer, anybatch.TrainStep]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=8)


@pytest.mark.parametrize("goes_by", ["counter", "rate", "state"])
def test_a_term_that_begins_late_is_refused_before_an_update_with_it(goes_by: str) -> None:
    number = [0]

    def loss_fn(model: Any, batch: Batch) -> Any:
        seen = {"counter": number[0], "rate": BEGINS * (optimizer.param_groups[0]["lr"] < 0.01)}
        state = optimizer.state.get(model.weight, {})
        return (coupled if seen.get(goes_by, int(state.get("step", 0))) >= BEGINS else mean)(model, batch)

    model, optimizer, step = step_of(loss_fn)
    for number[0] in range(BEGINS):
        step(batch_of())
    number[0], optimizer.param_groups[0]["lr"] = BEGINS, 0.001
    before = model.weight.detach().clone()
    with pytest.raises(anybatch.NotSplittable):
        step(batch_of())
    assert torch.equal(model.weight, before)
    assert step.updates == BEGINS


def contrast(model: Any, outputs: torch.Tensor) -> Any:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def yielding(model: Any, batch: Batch) -> Any:
    yield "mean", mean(model, batch)
    if IS_ON[0]:
        yield "spread", model(batch["x"]).std(0).mean()


def growing(model: Any, batch: Batch) -> Any:
    yield "mean", mean(model, batch)
    loss = model(batch["x"]).square().mean()
    yield "size", loss + model(batch["x"]).std(0).mean() if IS_ON[0] else loss


def centred(model: Any, batch: Batch) -> Any:
    outputs = model(batch["x"])
    return outputs - outputs.mean(0) if IS_ON[0] else outputs


def spread_in_blocks(model: Any, outputs: torch.Tensor, rows: slice) -> Any:
    loss = F.cross_entropy(outputs[rows] @ outputs.T, torch.arange(rows.start, rows.stop))
    return loss + outputs[rows].std(0).mean() if IS_ON[0] else loss


def in_chunks(model: Any, chunk: Batch, state: torch.Tensor) -> Any:
    outputs = model(chunk["t"])
    loss = outputs.square().mean()
    return loss + outputs.std(0).mean() if IS_ON[0] else loss, torch.tanh(outputs.sum(1) + state)


def at_the_end(model: Any, state: torch.Tensor, batch: Batch) -> Any:
    loss = state.square().mean()
    return loss + state.std(0).mean() if IS_ON[0] else loss


def zeros(model: Any, batch: Batch) -> torch.Tensor:
    return torch.zeros(len(batch["t"]), 3)


def without_loss(model: Any, chunk: Batch, state: torch.Tensor) -> Any:
    return None, torch.tanh(model(chunk["t"]).sum(1) + state)


KINDS: dict[str, Any] = {
    "yields one more": yielding,
    "yields a larger one": growing,
    "encode of Coupled": anybatch.Coupled(centred, contrast),
    "blocks of Coupled": anybatch.Coupled(lambda model, batch: model(batch["x"]), spread_in_blocks, row_block=5),
    "chunks of OverTime": anybatch.OverTime(in_chunks, chunk=2, state=zeros),
    "end of OverTime": anybatch.OverTime(without_loss, last=at_the_end, chunk=2, state=zeros),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_term_that_begins_late_is_refused_in_each_kind_of_loss(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    batch = {"t": torch.randn(20, 6, 4)} if "OverTime" in kind else batch_of()
    monkeypatch.setattr("anybatch.checking.switches.Switches.are_turned", lambda *_: False)  # which see ``IS_ON``
    monkeypatch.setitem(IS_ON, 0, False)
    _, _, step = step_of(KINDS[kind])
    for _ in range(BEGINS):
        step(batch)
    IS_ON[0] = True
    with pytest.raises(anybatch.NotSplittable):
        step(batch)
    assert step.updates == BEGINS


def test_a_term_that_begins_late_in_a_batch_that_is_written_to_is_refused_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loss_fn(model: Any, batch: Batch) -> Any:
        batch["x"].mul_(1.0)
        return (coupled if IS_ON[0] else mean)(model, batch)

    monkeypatch.setattr("anybatch.checking.switches.Switches.are_turned", lambda *_: False)
    monkeypatch.setitem(IS_ON, 0, False)
    _, _, step = step_of(loss_fn)
    for _ in range(BEGINS):
        step(batch_of())
    IS_ON[0] = True
    step(batch_of())
    with pytest.raises(anybatch.NotSplittable):
        step(batch_of())


def test_gradients_of_earlier_calls_stay_where_backward_meets_a_new_term(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_fn(model: Any, batch: Batch) -> Any:
        loss = mean(model, batch)
        return loss + model(batch["x"]).square().mean() if IS_ON[0] else loss

    monkeypatch.setitem(IS_ON, 0, False)
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    batch = batch_of() | {"x": torch.randn(20, 4).double()}
    wanted = torch.zeros(3, 4).double()
    for IS_ON[0] in (False, False, True):
        anybatch.backward(model, loss_fn, batch, micro_batch_size=8)
        wanted += torch.autograd.grad(loss_fn(model, batch), model.weight)[0]
    torch.testing.assert_close(model.weight.grad, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_each_kind_that_stays_the_same_is_not_proved_again(kind: str) -> None:
    torch.manual_seed(0)
    batch = {"t": torch.randn(20, 6, 4)} if "OverTime" in kind else batch_of()
    _, _, step = step_of(KINDS[kind])
    for number in range(6):
        out = step(batch)
        assert out.proof is not None
        assert out.proof.update == 0, number


def test_a_term_of_each_sample_may_begin_late() -> None:
    numbers, calls = [0], list[int]()

    def loss_fn(model: Any, batch: Batch) -> Any:
        calls.append(numbers[0])
        loss = mean(model, batch)
        return loss + model(batch["x"]).square().mean() if numbers[0] % 4 == 3 else loss

    model, _, step = step_of(loss_fn)
    plain = nn.Linear(4, 3)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for numbers[0] in range(24):
        step(batch_of())
        optimizer.zero_grad()
        loss_fn(plain, batch_of()).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, plain.weight)
    assert calls.count(23) == 4  # three micro-batches and the plain loop: nothing is proved by then


def test_a_phase_of_an_object_in_a_list_is_seen() -> None:
    class Phase:
        weight = 0.0

    phases = [Phase()]
    phases[0].weight = 0.0

    def loss_fn(model: Any, batch: Batch) -> Any:
        return mean(model, batch) + phases[0].weight * model(batch["x"]).std(0).mean()

    _, _, step = step_of(loss_fn)
    for _ in range(3):
        step(batch_of())
    phases[0].weight = 0.1
    with pytest.raises(anybatch.NotSplittable):
        step(batch_of())


def test_the_first_batch_whose_mask_is_not_full_is_proved() -> None:
    def weighted(model: Any, batch: Batch) -> Any:
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (losses * batch["w"]).sum() / batch["w"].sum()

    _, _, step = step_of(weighted)
    with pytest.warns(anybatch.AnyBatchWarning, match="is 1 everywhere in this batch"):
        step(batch_of())
    step(batch_of())
    with pytest.raises(anybatch.NotSplittable, match="sum"):
        step(batch_of() | {"w": torch.rand(20)})
    model, optimizer, _ = step_of(weighted)
    step = anybatch.TrainStep(model, weighted, optimizer, micro_batch_size=8, count=lambda batch: batch["w"].sum())
    step(batch_of())
    step(batch_of() | {"w": torch.rand(20)})
