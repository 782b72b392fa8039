"""Coupled losses, sequences, masks by sample, evaluation and check, where two of them meet."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.memory.checkpointing import NotRecomputable
from reference import assert_float64, clear, gradients_of


def recurrent() -> nn.ModuleDict:
    return nn.ModuleDict(
        {"drop": nn.Dropout(0.3), "rnn": nn.GRU(3, 6, batch_first=True), "out": nn.Linear(6, 2)}
    ).double()


def begin(_: Any, batch: Any) -> Tensor:
    return torch.zeros(1, len(batch["x"]), 6, dtype=torch.float64)


def chunk_loss(model: Any, chunk: Any, state: Any) -> Any:
    output, state = model["rnn"](model["drop"](chunk["x"]), state)
    return F.cross_entropy(model["out"](output).flatten(0, 1), chunk["y"].flatten()), state


def sequences(rows: int = 6, steps: int = 60) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, steps, 3, dtype=torch.float64), "y": torch.randint(0, 2, (rows, steps))}


class NormedLoss(nn.Module):
    """A loss with BatchNorm and dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(2), nn.Dropout(0.5)

    def forward(self, model: Any, given: Tensor) -> Tensor:
        return self.drop(self.norm(model(given))).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("coupled", [False, True])
def test_evaluate_puts_a_loss_that_is_a_module_in_evaluation_mode(coupled: bool) -> None:
    model, loss = nn.Linear(3, 2), NormedLoss()
    loss_fn: Any = anybatch.Coupled(lambda model, batch: model(batch), _on_outputs(loss)) if coupled else loss
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    before, batch = loss.norm.running_mean, torch.randn(8, 3)
    kept = None if before is None else before.clone()
    assert step.evaluate(batch).loss == step.evaluate(batch).loss
    assert kept is not None
    assert before is not None
    assert torch.equal(before, kept)
    assert loss.training
    assert loss.norm.training


def _on_outputs(loss: NormedLoss) -> Any:
    class OnOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = loss

        def forward(self, _: Any, outputs: Tensor) -> Tensor:
            return self.inner.drop(self.inner.norm(outputs)).square().mean()  # type: ignore[no-any-return]

    return OnOutputs()


def test_check_leaves_a_carried_state_alone() -> None:
    model = recurrent()
    over_time = anybatch.OverTime(_without_dropout, begin, chunk=20, carry=True)
    assert anybatch.check(model, over_time, sequences(), micro_batch_size=2).exact
    assert over_time.carried is None
    anybatch.backward(model, over_time, sequences())
    carried = over_time.carried
    assert anybatch.check(model, over_time, sequences(), micro_batch_size=2).exact
    assert over_time.carried is carried


def _without_dropout(model: Any, chunk: Any, state: Any) -> Any:
    output, state = model["rnn"](chunk["x"], state)
    return F.cross_entropy(model["out"](output).flatten(0, 1), chunk["y"].flatten()), state


def test_the_loss_on_the_last_state_has_its_name_where_a_micro_batch_has_no_other() -> None:
    model, batch = recurrent(), sequences(4, 20)
    batch["asked"] = torch.tensor([0, 0, 1, 1])

    def some(model: Any, chunk: Any, state: Any) -> Any:
        output, state = model["rnn"](chunk["x"], state)
        if not chunk["asked"].any():
            return None, state
        each = F.cross_entropy(model["out"](output).flatten(0, 1), chunk["y"].flatten(), reduction="none")
        asked = chunk["asked"][:, None].expand(chunk["y"].shape).flatten()
        return (each * asked).sum() / asked.sum(), state

    def asked_steps(batch: Any) -> Tensor:
        return batch["asked"].sum() * batch["x"].shape[1]  # type: ignore[no-any-return]

    def last(model: Any, state: Any, batch: Any) -> Tensor:
        return model["out"](state[0]).square().mean()  # type: ignore[no-any-return]

    over_time = anybatch.OverTime(some, begin, chunk=7, last=last)
    count = {"loss": asked_steps, "last": anybatch.count_samples}
    found = []
    for size in (None, 2):
        clear(model)
        anybatch.backward(model, over_time, batch, micro_batch_size=size, count=count)
        found.append(gradients_of(model))
    assert_float64(found[1], found[0])


def test_check_of_coupled_allows_batch_norm_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    coupled = anybatch.Coupled(lambda model, batch: model(batch), lambda model, outputs: outputs.std())
    batch = torch.randn(9, 3, dtype=torch.float64)
    assert anybatch.check(model, coupled, batch, micro_batch_size=4, batch_norm="frozen").exact
    assert anybatch.check(model.eval(), coupled, batch, micro_batch_size=4).exact


def test_measuring_a_chunk_draws_no_masks_by_sample() -> None:
    model, batch = recurrent(), sequences()
    over_time = anybatch.OverTime(chunk_loss, begin)  # its chunk is measured
    found = []
    for size in (None, 1, 4):
        clear(model)
        torch.manual_seed(0)
        anybatch.backward(model, over_time, batch, micro_batch_size=size, dropout="per-sample")
        found.append(gradients_of(model))
    assert_float64(found[1], found[0])
    assert_float64(found[2], found[0])


def test_a_coupled_generator_that_writes_to_an_output_is_explained() -> None:
    def yielding(_: Any, outputs: Tensor) -> Any:
        outputs += 1
        yield outputs.mean()

    model = nn.Linear(3, 2)
    with pytest.raises(anybatch.LossError, match="was changed in place"):
        anybatch.backward(model, anybatch.Coupled(lambda m, b: m(b), yielding), torch.randn(4, 3), micro_batch_size=2)


def test_lazy_parameters_are_refused_where_an_encoder_runs_twice() -> None:
    coupled = anybatch.Coupled(lambda model, batch: model(batch), lambda model, outputs: outputs.std())
    model, batch = nn.Sequential(nn.LazyLinear(4)), torch.randn(6, 3)
    with pytest.raises(NotRecomputable, match="lazy parameters"):
        anybatch.backward(model, coupled, batch, micro_batch_size=2)
    with torch.no_grad():
        model(batch)
    assert anybatch.backward(model, coupled, batch, micro_batch_size=2).micro_batches == 3


def test_modules_can_be_no_functions_of_coupled() -> None:
    with pytest.raises(anybatch.LossError, match=r"can't be called as encode\(model, batch\)"):
        anybatch.Coupled(nn.Linear(3, 2), lambda model, outputs: outputs.mean())
