"""A batch that can't be split runs whole where the budget holds that, and is refused where it does not.

How it could be silently wrong: the whole batch would take more than the budget; the step would be taken twice, or with
other random numbers; a plan that splits would be made again for the next batch.
"""

import copy
import time
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch.backpropagation import RepeatedBackward
from anybatch.planning.planner import Planner
from planning_referee import alive_in, peak_of


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every size measured, and more than once: a plan that is told to be quick goes by what it has."""
    assert Planner.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(Planner.__init__.__kwdefaults__, "patience", 1.0)


BATCH = {"x": torch.randn(128, 16), "y": torch.randn(128, 16)}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8)]
    return nn.Sequential(*layers).double()


def contrastive(model: Any, batch: Any) -> torch.Tensor:
    time.sleep(4e-6 * len(batch["x"]) ** 2)  # the more micro-batches, the faster
    one, other = F.normalize(model(batch["x"].double()), dim=1), F.normalize(batch["y"].double(), dim=1)
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


def needed_whole() -> int:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, contrastive, optimizer)
    step(BATCH)
    return peak_of(lambda: step(BATCH), alive_in(model, [optimizer], BATCH))


def test_the_gradient_of_a_trainer_is_that_of_the_whole_batch_too() -> None:
    model = model_of()
    other = copy.deepcopy(model)
    gradient = RepeatedBackward(model, contrastive, memory=needed_whole())
    torch.manual_seed(1)
    with pytest.warns(anybatch.AnyBatchWarning, match="the batch runs whole, which the budget allows, since in micro"):
        out = gradient(BATCH)
    assert out.micro_batches == 1
    torch.manual_seed(1)
    torch.autograd.backward(contrastive(other, BATCH))
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(
        a.grad is not None and b.grad is not None and torch.allclose(a.grad, b.grad, rtol=1e-10) for a, b in pairs
    )
    with pytest.raises(anybatch.NotSplittable):
        RepeatedBackward(model_of(), contrastive, micro_batch_size=32)(BATCH)


@pytest.mark.parametrize("percent", [110, 75])
def test_what_can_not_be_split_runs_whole_within_the_budget(percent: int) -> None:
    budget, model = needed_whole() * percent // 100, model_of()
    other = copy.deepcopy(model)
    optimizer, plain = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other))
    step = anybatch.TrainStep(model, contrastive, optimizer, memory=budget)
    torch.manual_seed(1)
    with pytest.warns(anybatch.AnyBatchWarning, match="the batch runs whole, which the budget allows, since in micro"):
        out = step(BATCH)
    assert (out.micro_batches, step.updates) == (1, 1)
    assert out.plan is not None
    assert out.plan.peak_bytes <= budget
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(BATCH)
        smaller = step({name: leaf[:100] for name, leaf in BATCH.items()})
    assert smaller.micro_batches == 1
    torch.manual_seed(1)
    for batch in (BATCH, BATCH, {name: leaf[:100] for name, leaf in BATCH.items()}):
        plain.zero_grad()
        torch.autograd.backward(contrastive(other, batch))
        plain.step()
    assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert peak_of(lambda: step(BATCH), alive_in(model, [optimizer], BATCH)) <= budget


def test_what_fits_neither_way_is_refused_as_before() -> None:
    model = model_of()
    weights = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, contrastive, optimizer, memory=needed_whole() // 3)
    for _ in range(2):
        with pytest.raises(anybatch.NotSplittable, match="in micro-batches the gradient"):
            step(BATCH)
    assert step.updates == 0
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("is_step", [False, True])
def test_what_fits_neither_way_says_so_once_in_each_batch(is_step: bool) -> None:
    model, memory = model_of(), needed_whole() // 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run: Any = anybatch.TrainStep(model, contrastive, optimizer, memory=memory)
    run = run if is_step else RepeatedBackward(model, contrastive, memory=memory)
    for _ in range(2):
        with pytest.raises(anybatch.NotSplittable) as raised:
            run(BATCH)
        assert [note.partition(":")[0] for note in raised.value.__notes__] == ["The whole batch does not fit"]


def test_a_refusal_after_a_batch_that_was_split_stops_the_training() -> None:
    """Micro-batches of an earlier batch may have been wrong, too."""

    def later(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(4e-6 * len(batch["x"]) ** 2)
        if batch["late"].any():
            return contrastive(model, batch)
        loss: torch.Tensor = (model(batch["x"].double()) - batch["y"]).square().mean()
        return loss

    model = model_of()
    step = anybatch.TrainStep(model, later, torch.optim.SGD(model.parameters(), lr=0.1), memory="64MiB")
    assert step(BATCH | {"late": torch.zeros(128)}).micro_batches > 1
    for _ in range(2):
        with pytest.raises(anybatch.NotSplittable):
            step(BATCH | {"late": torch.ones(128)})
    assert step.updates == 1


class Neighbours(nn.Module):
    """Adds up what the neighbours of each sample give, all of which it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.double()

    def forward(self, x: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head((neighbours @ self.features(x)).relu())
        return found


def graph(rows: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    neighbours = torch.rand(rows, rows, generator=generator, dtype=torch.float64) > 0.7
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (rows,), generator=generator)
    return {"x": x, "neighbours": neighbours.double(), "y": y, "known": torch.arange(rows) % 3 > 0}


def over_known(model: Any, batch: Any) -> torch.Tensor:
    known = batch["known"]
    return F.cross_entropy(model(batch["x"], batch["neighbours"])[known], batch["y"][known])


def test_a_batch_of_which_no_part_can_run_runs_whole_where_that_fits() -> None:
    torch.manual_seed(0)
    model, batch = Neighbours(), graph()
    other = copy.deepcopy(model)
    step = anybatch.TrainStep(model, over_known, torch.optim.SGD(model.parameters(), lr=0.0), memory="1MiB")
    told = r"runs whole, which the budget allows, since Neighbours can't run a part(.|\n)*anybatch\.check"
    with pytest.warns(anybatch.AnyBatchWarning, match=told):
        out = step(batch)
    over_known(other, batch).backward()
    assert (out.micro_batches, out.count, step.updates) == (1, 12, 1)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]
    window = next(anybatch.windows([batch, graph(9)], batches=2))
    over_both = step(window)  # each of its batches whole
    assert (over_both.micro_batches, over_both.count) == (2, 21)
    assert step.evaluate(batch).loss == pytest.approx(over_known(other, batch).item())


def test_a_batch_of_which_no_part_can_run_is_refused_where_the_whole_does_not_fit() -> None:
    model = Neighbours()
    step = anybatch.TrainStep(model, over_known, torch.optim.SGD(model.parameters(), lr=0.1), memory=4000)
    for _ in range(2):
        with pytest.raises(anybatch.NotSplittable, match="can't run a part of this batch alone") as refused:
            step(graph())
        assert "The whole batch does not fit" in refused.value.__notes__[0]


def test_an_error_that_the_whole_batch_has_too_is_the_users_own() -> None:
    def misshapen(model: Any, batch: Any) -> torch.Tensor:
        return over_known(model, {**batch, "x": batch["x"][:, :3]})

    model = Neighbours()
    step = anybatch.TrainStep(model, misshapen, torch.optim.SGD(model.parameters(), lr=0.1), memory="1MiB")
    with pytest.raises(RuntimeError, match=r"12x3 and 5x8") as raised:
        step(graph())
    assert raised.value.__context__ is None
    assert not hasattr(raised.value, "__notes__")


def written_out(model: Any, batch: Any) -> torch.Tensor:
    out = model(batch["x"].double().view(128, -1))
    return F.mse_loss(out, batch["y"].double())


def test_a_size_that_is_written_out_is_named() -> None:
    """The number of all samples stands in the text of torch, in a plan as in micro-batches."""
    model = model_of()
    step = anybatch.TrainStep(model, written_out, torch.optim.SGD(model.parameters(), lr=0.1), memory="1GiB")
    with pytest.warns(anybatch.AnyBatchWarning, match=r"runs whole.*128 is the number of its samples.*x\.size\(0\)"):
        assert step(BATCH).micro_batches == 1
    with pytest.raises(RuntimeError) as failed:
        anybatch.backward(model, written_out, BATCH, micro_batch_size=32)
    assert "as in view(128, -1), take x.size(0)" in failed.value.__notes__[0]
