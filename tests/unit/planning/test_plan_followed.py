"""A plan that was made is a plan that can be followed."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch
from anybatch.checking import proving
from anybatch.planning import following
from anybatch.planning.blocks import blocks_of
from anybatch.planning.stepmemory import timelines
from anybatch.records.memory import ACTIVATIONS


def model_of(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(layers)))


def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(batch), torch.zeros_like(batch))


BATCH = torch.linspace(-1, 1, 256 * 32).view(256, 32)


def test_a_plan_in_lower_precision_is_followed_in_it() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = anybatch.plan(model, loss_fn, BATCH, optimizer, memory="1MiB", allow=("recompute", "bfloat16"))
    lower = dataclasses.replace(found.chosen, autocast="bfloat16")
    precision = found.fingerprint["precision"].replace("autocast=None", "autocast=torch.bfloat16")
    plan = dataclasses.replace(found, chosen=lower, fingerprint={**found.fingerprint, "precision": precision})
    out = anybatch.TrainStep(model, loss_fn, optimizer, plan=plan)(BATCH)
    assert out.plan is plan
    assert out.micro_batches == lower.micro_batches


def test_what_it_holds_over_time_is_shown_in_that_precision() -> None:
    model = model_of()
    plan = anybatch.plan(model, loss_fn, BATCH, memory="1MiB")
    lower = dataclasses.replace(plan, chosen=dataclasses.replace(plan.chosen, autocast="bfloat16"))
    own, low = (timelines(one, model, loss_fn, BATCH)["before: the whole batch at once"] for one in (plan, lower))
    assert low.layers[ACTIVATIONS] != own.layers[ACTIVATIONS]


@pytest.mark.parametrize("kind", ["offload", "recompute"])
def test_the_blocks_of_a_plan_are_blocks_of_the_model(kind: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(4)))
    one = torch.zeros(1, 4096, 32)
    options: dict[str, Any] = {"device": "24GiB", "allow": (kind,)}
    least = anybatch.plan(model, loss_fn, one, memory="1GiB", **options).smallest_bytes
    found = anybatch.plan(model, loss_fn, one, memory=least, **options)
    names = getattr(found, kind)
    assert names
    blocks = {str(index) for index in range(len(model))}
    runs = {f"{first}:{end}" for first in range(4) for end in range(first + 2, 5)}
    assert set(names) <= blocks | (runs if kind == "recompute" else set())


def test_a_scheduler_that_was_made_later_changes_nothing() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = anybatch.plan(model, loss_fn, BATCH, optimizer, memory="1MiB")
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    step = anybatch.TrainStep(model, loss_fn, optimizer, plan=plan, scheduler=scheduler)
    assert step(BATCH).plan is plan


def test_momentum_and_a_device_are_part_of_what_a_plan_is_for() -> None:
    model = model_of()
    plan = anybatch.plan(model, loss_fn, BATCH, torch.optim.SGD(model.parameters(), lr=0.1), memory="1MiB")
    heavy = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(anybatch.PlanMismatch) as caught:
        anybatch.TrainStep(model, loss_fn, heavy, plan=plan)(BATCH)
    assert list(caught.value.changed) == ["optimizer"]
    card = anybatch.plan(
        model, loss_fn, BATCH, torch.optim.SGD(model.parameters(), lr=0.1), memory="1MiB", device="24GiB"
    )
    assert card.relative_time
    with pytest.raises(anybatch.PlanMismatch) as caught:
        anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), plan=card)(BATCH)
    assert "device" in caught.value.changed


def test_sequences_of_plain_layers_are_blocks_and_run_together() -> None:
    """One sample of a deep and narrow model alone is over the budget."""
    assert blocks_of(model_of(3)) == ["0", "1", "2"]
    model, one = model_of(48), torch.ones(1, 512, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = anybatch.plan(model, loss_fn, one, optimizer, memory="1GiB")
    plan = anybatch.plan(model, loss_fn, one, optimizer, memory=whole.peak_bytes // 2)
    assert any(":" in name for name in plan.recompute)
    measured = anybatch.TrainStep(model, loss_fn, optimizer, plan=plan)
    measured(one)
    memory = anybatch.measure(lambda: measured(one), model=model, optimizer=optimizer, batch=one)
    assert memory.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005)


def test_lbfgs_is_counted_and_called_bounded() -> None:
    model = model_of(2)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=5, max_iter=8)
    plan = anybatch.plan(model, loss_fn, BATCH, optimizer, memory="8MiB")
    step = anybatch.TrainStep(model, loss_fn, optimizer, plan=plan)
    step(BATCH)
    memory = anybatch.measure(lambda: step(BATCH), model=model, optimizer=optimizer, batch=BATCH)
    assert plan.confidence == "estimated"
    assert memory.peak_bytes <= plan.peak_bytes


def test_where_the_history_of_lbfgs_does_not_fit_another_optimizer_is_planned() -> None:
    model = model_of(2)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=30, max_iter=8)
    least = anybatch.plan(model, loss_fn, BATCH, optimizer, memory="1GiB").smallest_bytes
    with pytest.raises(anybatch.DoesNotFit, match=r"and fit: torch\.optim\.SGD without momentum needs") as caught:
        anybatch.plan(model, loss_fn, BATCH, optimizer, memory=least * 3 // 4)
    assert caught.value.needed == least


@pytest.mark.parametrize("way", ["resumed", "given"])
def test_a_plan_for_more_memory_than_there_is_now_is_made_again(way: str, constant_times: None) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())

    whole = anybatch.plan(model, loss_fn, BATCH, optimizer, memory="1GiB").whole_bytes
    larger = anybatch.TrainStep(model, loss_fn, optimizer, memory=2 * whole)
    plan = larger(BATCH).plan
    assert plan is not None
    given = plan if way == "given" else None
    smaller = anybatch.TrainStep(model, loss_fn, optimizer, memory=whole // 2, plan=given)
    if way == "resumed":
        smaller.load_state_dict(larger.state_dict())
    found = anybatch.measure(lambda: smaller(BATCH), model=model, optimizer=optimizer, batch=BATCH)
    assert found.peak_bytes <= whole // 2
    again = smaller(BATCH).plan
    assert again is not None
    assert again.budget == whole // 2


@pytest.mark.parametrize("way", ["vmap", "grad", "jvp"])
def test_a_loss_with_transforms_of_functions_is_planned(way: str) -> None:
    model = model_of(2)

    def transformed(model: Any, batch: torch.Tensor) -> torch.Tensor:
        weights = dict(model.named_parameters())

        def energy(row: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.func.functional_call(model, weights, (row,)).pow(2).sum()
            return result

        found: Any
        if way == "vmap":
            found = torch.func.vmap(energy)(batch)
        elif way == "grad":
            found = torch.func.vmap(torch.func.grad(energy))(batch).pow(2)
        else:
            found = torch.func.jvp(lambda rows: model(rows).pow(2).sum(1), (batch,), (torch.ones_like(batch),))[1]
        loss: torch.Tensor = found.mean()
        return loss

    expected = torch.autograd.grad(transformed(model, BATCH), list(model.parameters()), allow_unused=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = anybatch.TrainStep(model, transformed, optimizer, memory="1GiB")
    step(BATCH)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("least", [0.0, 1e9])
def test_what_takes_long_before_a_step_is_logged_in_a_line(
    least: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (following, proving):
        monkeypatch.setattr(module, "_LONG", least)
    model = model_of()
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), memory="128KiB")
    with caplog.at_level("INFO", "anybatch"):
        for batch in (BATCH, BATCH, torch.cat([BATCH, BATCH])):
            assert step(batch).micro_batches > 1
    told = [text for text in caplog.messages if text.startswith(("a plan was made in ", "a split was proved in "))]
    assert [text.partition(" s: ")[2] for text in told if "plan" in text] == (
        [] if least else ["there is no plan yet", "the batch has 512 samples, the plan is for 256"]
    )
    assert [text.partition(", at ")[2] for text in told if "split" in text] == (
        [] if least else ["the first batch of its layout"]
    )
