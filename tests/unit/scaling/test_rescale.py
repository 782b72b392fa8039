"""Rescaling an optimizer for another batch: worked values, schedules that follow, refusals that change nothing, undo.

How it could be silently wrong: a group or a beta left out; a scheduler that goes back to the old learning rate; a
number that two places share changed twice; an undo that rounds, or that takes a schedule back in time.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop, lr_scheduler

import anybatch
from anybatch.scaling.batchsize import Rescaled, rescale
from reference import frozen


def parameters(number: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)) for _ in range(number)]


def two_groups(kind: Any, **options: Any) -> Any:
    first, second = parameters()
    return kind([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.1, **options)


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def facts(optimizer: torch.optim.Optimizer, *schedulers: Any) -> Any:
    """Everything that a rescaling may touch."""
    states = [{k: v for k, v in vars(one).items() if not callable(v) and k != "optimizer"} for one in schedulers]
    return frozen([optimizer.state_dict(), [{k: repr(v) for k, v in state.items()} for state in states]])


def test_the_sde_rule_for_adam_at_8_times_the_batch() -> None:
    optimizer = AdamW(parameters(), lr=1e-3, weight_decay=0.01)
    done = rescale(optimizer, (64, 512), "adam-sde")
    (group,) = optimizer.param_groups
    assert group["lr"] == pytest.approx(2.8284e-3, rel=1e-4)
    assert group["betas"] == pytest.approx((0.2, 0.992))
    assert group["eps"] == pytest.approx(0.3536e-8, rel=1e-3)
    assert group["weight_decay"] == pytest.approx(0.028284, rel=1e-4)  # lr decay / batch stays
    assert done.table == {
        "param_groups[0].lr": (1e-3, group["lr"]),
        "param_groups[0].betas[0]": (0.9, group["betas"][0]),
        "param_groups[0].betas[1]": (0.999, group["betas"][1]),
        "param_groups[0].eps": (1e-8, group["eps"]),
        "param_groups[0].weight_decay": (0.01, group["weight_decay"]),
    }
    assert "param_groups[0].betas[1]      0.999 -> 0.992" in str(done)
    assert "Malladi" in str(done)


def test_the_sde_rule_for_rmsprop() -> None:
    optimizer = RMSprop(parameters(), lr=0.01, alpha=0.99, eps=1e-8)
    rescale(optimizer, (10, 40), "adam-sde")
    (group,) = optimizer.param_groups
    assert (group["lr"], group["alpha"], group["eps"]) == pytest.approx((0.02, 0.96, 5e-9))


def test_the_linear_rule_for_residual_networks() -> None:
    optimizer = SGD(parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    done = rescale(optimizer, (256, 8192))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(3.2)
    assert list(done.table) == ["param_groups[0].lr"]  # momentum and coupled decay stay
    assert any("five" in note for note in done.notes)
    assert isinstance(done, Rescaled)
    assert repr(done) == "Rescaled(rule='linear', ratio=32, 1 numbers)"


@pytest.mark.parametrize(
    ("batch", "rate"),
    [(512, 6.25e-4), (1024, 8.84e-4), (2048, 1.25e-3), (4096, 1.768e-3), (8192, 2.5e-3), (16384, 3.536e-3)],
)
def test_the_square_root_rule_has_the_rates_of_lamb(batch: int, rate: float) -> None:
    optimizer = Adam(parameters(), lr=5e-3)
    rescale(optimizer, (32768, batch), "sqrt")
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize(("beta", "batch", "expected"), [(0.999, (1, 8), 0.992028), (0.95, (512, 1), 0.9999)])
def test_the_half_life_rule_keeps_the_half_life_in_samples(
    beta: float, batch: tuple[int, int], expected: float
) -> None:
    optimizer = Adam(parameters(), lr=1e-3, betas=(0.9, beta))
    rescale(optimizer, batch, "half-life")
    (group,) = optimizer.param_groups
    assert group["betas"] == pytest.approx((0.9, expected), abs=5e-7)
    half_lives = [size * math.log(2) / -math.log(b) for size, b in zip(batch, (beta, group["betas"][1]), strict=True)]
    assert half_lives[0] == pytest.approx(half_lives[1])
    assert group["lr"] == pytest.approx(1e-3 * (batch[1] / batch[0]) ** 0.25)


@pytest.mark.parametrize("rule", ["linear", "sqrt", "adam-sde", "half-life"])
def test_what_a_sample_decays_is_kept(rule: Any) -> None:
    optimizer = two_groups(AdamW, weight_decay=0.02)
    before = [group["lr"] * group["weight_decay"] / 64 for group in optimizer.param_groups]
    rescale(optimizer, (64, 256), rule)
    assert [group["lr"] * group["weight_decay"] / 256 for group in optimizer.param_groups] == pytest.approx(before)


def test_decay_can_be_kept_and_coupled_decay_is() -> None:
    kept = AdamW(parameters(), lr=0.1, weight_decay=0.02)
    rescale(kept, (64, 256), "sqrt", weight_decay="keep")
    coupled = Adam(parameters(), lr=0.1, weight_decay=0.02)
    rescale(coupled, (64, 256), "sqrt")
    assert kept.param_groups[0]["weight_decay"] == coupled.param_groups[0]["weight_decay"] == 0.02


def test_the_decay_of_an_unknown_optimizer_is_named() -> None:
    class Own(SGD):
        """Says nothing of its decay."""

    Own.__module__ = "somewhere"
    done = rescale(Own(parameters(), lr=0.1, weight_decay=0.02), (64, 256), "sqrt")
    assert any("not known" in note and "by 2" in note for note in done.notes)


def test_every_group_of_every_optimizer_is_changed() -> None:
    first, second = two_groups(SGD), two_groups(AdamW)
    done = rescale([first, second], (10, 20), "sqrt", weight_decay="keep")
    assert list(done.table) == [f"optimizers[{i}].param_groups[{j}].lr" for i in (0, 1) for j in (0, 1)]
    root = math.sqrt(2)
    for optimizer in (first, second):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * root, 0.5 * root])


def test_a_rate_that_is_a_tensor_is_written_into() -> None:
    rate = torch.tensor(0.1)
    optimizer = SGD(parameters(), lr=rate, foreach=False)
    bits = rate.clone()
    done = rescale(optimizer, (10, 30))
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.3)
    done.undo()
    assert torch.equal(rate, bits)


def test_one_tensor_in_two_groups_is_changed_once() -> None:
    rate = torch.tensor(0.1)
    one, other = parameters()
    optimizer = SGD([{"params": [one], "lr": rate}, {"params": [other], "lr": rate}], lr=0.1, foreach=False)
    done = rescale(optimizer, (10, 30))
    assert rate.item() == pytest.approx(0.3)
    rate.mul_(0.5)  # as a schedule does
    done.undo()
    assert rate.item() == pytest.approx(0.05)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "steps": lambda o: lr_scheduler.StepLR(o, 3),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [3, 7]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=6),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8, eta_min=0.01),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, eta_min=0.01),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.3, 0.6], total_steps=12),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=4),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 8, eta_min=0.01)], [4]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 5),
}


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found += [group["lr"] for group in optimizer.param_groups]
        found += scheduler.get_last_lr()
    return found


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_whole_schedule_is_multiplied(schedule: str, kind: Any) -> None:
    """From the moment of the change on, every learning rate is as many times what it would have been."""
    options = {"momentum": 0.9} if kind is SGD else {}
    plain, changed = two_groups(kind, **options), two_groups(kind, **options)
    as_it_was, scheduler = SCHEDULES[schedule](plain), SCHEDULES[schedule](changed)
    assert rates(plain, as_it_was, 3) == rates(changed, scheduler, 3)
    rescale(changed, (64, 256), "sqrt", scheduler=scheduler)
    expected, found = rates(plain, as_it_was, 8), rates(changed, scheduler, 8)
    assert found == pytest.approx([2 * rate for rate in expected], rel=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_undo_is_bitwise_with_a_schedule(schedule: str) -> None:
    optimizer = two_groups(AdamW, weight_decay=0.01)
    scheduler = SCHEDULES[schedule](optimizer)
    rates(optimizer, scheduler, 3)
    inner = [scheduler, *getattr(scheduler, "_schedulers", ())]
    before = facts(optimizer, *inner)
    done = rescale(optimizer, (64, 96), "sqrt", scheduler=scheduler)
    assert facts(optimizer, *inner) != before
    done.undo()
    assert facts(optimizer, *inner) == before
    done.undo()
    assert facts(optimizer, *inner) == before


def test_a_cycled_beta_keeps_its_rule() -> None:
    optimizer = AdamW(parameters(), lr=0.1)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=12, base_momentum=0.85, max_momentum=0.95)
    twin = AdamW(parameters(), lr=0.1)
    as_it_was = lr_scheduler.OneCycleLR(twin, 0.3, total_steps=12, base_momentum=0.85, max_momentum=0.95)
    rescale(optimizer, (64, 128), "adam-sde", scheduler=scheduler)
    for _ in range(6):
        rates(optimizer, scheduler, 1), rates(twin, as_it_was, 1)
        expected = 1 - 2 * (1 - twin.param_groups[0]["betas"][0])
        assert optimizer.param_groups[0]["betas"][0] == pytest.approx(expected)


def test_plateaus_keep_their_floor_in_proportion() -> None:
    optimizer = SGD(parameters(), lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, min_lr=0.02)
    rescale(optimizer, (64, 128), scheduler=scheduler)
    for _ in range(4):
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.04)


def test_a_list_that_schedulers_share_is_changed_once() -> None:
    optimizer = SGD(parameters(), lr=0.1)
    scheduler = SCHEDULES["chain"](optimizer)
    scheduler._last_lr = scheduler._schedulers[0]._last_lr
    done = rescale(optimizer, (64, 128), scheduler=scheduler)
    assert sum("_last_lr" in name for name in done.table) == 2


def test_after_a_schedule_went_on_undo_goes_back_in_proportion() -> None:
    optimizer, twin = AdamW(parameters(), lr=0.1), AdamW(parameters(), lr=0.1)
    scheduler, as_it_was = (lr_scheduler.ExponentialLR(one, 0.9) for one in (optimizer, twin))
    done = rescale(optimizer, (64, 256), "adam-sde", scheduler=scheduler)
    assert rates(optimizer, scheduler, 5) == pytest.approx([2 * rate for rate in rates(twin, as_it_was, 5)])
    done.undo()
    assert options_of(optimizer)[0]["lr"] == pytest.approx(options_of(twin)[0]["lr"])
    assert options_of(optimizer)[0]["betas"] == options_of(twin)[0]["betas"]
    assert rates(optimizer, scheduler, 3) == pytest.approx(rates(twin, as_it_was, 3))


def test_lengths_are_told_and_not_changed() -> None:
    optimizer = SGD(parameters(), lr=0.1)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    done = rescale(optimizer, (64, 512), scheduler=scheduler)
    assert scheduler.T_max == 1000
    assert any("scheduler.T_max" in note and "125" in note for note in done.notes)


def with_momentum() -> tuple[SGD, list[nn.Parameter]]:
    wanted = parameters()
    optimizer = SGD(wanted, lr=0.1, momentum=0.9)
    for parameter in wanted:
        parameter.grad = torch.randn(3)
    optimizer.step()
    return optimizer, wanted


def test_momentum_is_multiplied_only_when_asked() -> None:
    optimizer, wanted = with_momentum()
    buffers = [optimizer.state[p]["momentum_buffer"] for p in wanted]
    before = [buffer.clone() for buffer in buffers]
    rescale(optimizer, (10, 30)).undo()
    assert all(torch.equal(one, other) for one, other in zip(buffers, before, strict=True))
    done = rescale(optimizer, (10, 30), momentum_buffer=True)
    for buffer, old in zip(buffers, before, strict=True):
        assert torch.equal(buffer, old * 3.0)
    old_norm, new_norm = done.table["norm of momentum_buffer, param_groups[0]"]
    assert old_norm == pytest.approx(math.sqrt(sum(b.square().sum().item() for b in before)), rel=1e-6)
    assert new_norm == pytest.approx(3 * old_norm, rel=1e-6)
    done.undo()
    assert all(torch.equal(one, other) for one, other in zip(buffers, before, strict=True))


def test_momentum_that_moved_on_is_divided() -> None:
    optimizer, wanted = with_momentum()
    done = rescale(optimizer, (10, 30), momentum_buffer=True)
    optimizer.step()
    moved = optimizer.state[wanted[0]]["momentum_buffer"].clone()
    done.undo()
    torch.testing.assert_close(optimizer.state[wanted[0]]["momentum_buffer"], moved / 3)


def test_the_buffer_of_sgd_is_a_sum_of_gradients() -> None:
    """Why nothing is done by default: the buffer is the same whatever the learning rate."""
    fast, slow = SGD(parameters(1), lr=1.0, momentum=0.9), SGD(parameters(1), lr=0.1, momentum=0.9)
    for optimizer in (fast, slow):
        (parameter,) = optimizer.param_groups[0]["params"]
        for _ in range(3):
            parameter.grad = torch.ones(3)
            optimizer.step()
    one, other = (next(iter(optimizer.state.values()))["momentum_buffer"] for optimizer in (fast, slow))
    assert torch.equal(one, other)


def test_without_a_rule_nothing_changes_and_each_is_shown() -> None:
    optimizer = AdamW(parameters(), lr=1e-3)
    before = facts(optimizer)
    done = rescale(optimizer, (64, 512), None)
    assert facts(optimizer) == before
    assert done.table == {}
    assert list(done.proposals) == ["linear", "sqrt", "adam-sde", "half-life"]
    proposed = done.proposals["adam-sde"]
    assert isinstance(proposed, dict)
    assert proposed["param_groups[0].betas[0]"] == pytest.approx((0.9, 0.2))
    assert "nothing was changed" in str(done)
    done.undo()
    assert facts(optimizer) == before
    proposals = rescale(SGD(parameters(), lr=0.1), (64, 512), None).proposals
    assert isinstance(proposals["linear"], dict)
    assert "SGD does not have" in str(proposals["adam-sde"])


@given(
    old=st.integers(1, 10_000),
    new=st.integers(1, 10_000),
    rule=st.sampled_from(["linear", "sqrt", "adam-sde", "half-life"]),
    rate=st.floats(1e-6, 10),
    beta=st.floats(0.5, 0.9999),
)
def test_any_rescaling_is_undone_bitwise_and_a_refused_one_changes_nothing(
    old: int, new: int, rule: Any, rate: float, beta: float
) -> None:
    optimizer = AdamW(parameters(), lr=rate, betas=(0.9, beta), weight_decay=0.01)
    before = facts(optimizer)
    try:
        done = rescale(optimizer, (old, new), rule)
    except anybatch.BatchError:
        assert rule != "linear"
        assert facts(optimizer) == before
        return
    group = optimizer.param_groups[0]
    assert all(0 < one < 1 for one in group["betas"])
    assert group["lr"] * group["weight_decay"] * old == pytest.approx(rate * 0.01 * new)
    done.undo()
    assert facts(optimizer) == before


# --- the rule that belongs to the optimizer --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop"])
def test_the_rule_follows_from_the_optimizer(name: str) -> None:
    kind = getattr(torch.optim, name)
    by_itself, told = kind(parameters(), lr=0.01), kind(parameters(), lr=0.01)
    done = rescale(by_itself, (64, 128))
    assert done.rule == ("linear" if name == "SGD" else "adam-sde")
    assert done.table == rescale(told, (64, 128), done.rule).table
    done.undo()
    assert by_itself.param_groups[0]["lr"] == 0.01


def test_a_kin_of_a_known_optimizer_follows_its_rule() -> None:
    class Own(torch.optim.AdamW):
        pass

    assert rescale(Own(parameters(), lr=0.01), (64, 128)).rule == "adam-sde"


@pytest.mark.parametrize("name", ["Adagrad", "Adadelta", "Rprop", "ASGD"])
def test_an_optimizer_without_a_rule_asks_for_one_and_takes_those_that_it_names(name: str) -> None:
    optimizer = getattr(torch.optim, name)(parameters(), lr=0.01)
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(anybatch.BatchError, match=f"derived for {name}") as caught:
        rescale(optimizer, (64, 128))
    assert optimizer.state_dict()["param_groups"] == before
    for rule in ("sqrt", "linear", None):
        assert f'rule="{rule}"' in str(caught.value) or f"rule={rule}" in str(caught.value)
        assert rescale(optimizer, (64, 128), rule).rule == rule


def test_optimizers_of_several_rules_ask_for_one() -> None:
    several = [SGD(parameters(), lr=0.1), torch.optim.Adam(parameters(), lr=0.01)]
    with pytest.raises(anybatch.BatchError, match="SGD: linear, Adam: adam-sde"):
        rescale(several, (64, 128))
    assert [rescale(one, (64, 128)).rule for one in several] == ["linear", "adam-sde"]
    assert rescale(several, (64, 128), "sqrt").rule == "sqrt"


def test_a_batch_beyond_the_rule_of_adam_is_refused_with_the_rule_that_goes_on() -> None:
    optimizer = torch.optim.Adam(parameters(), lr=0.01)
    with pytest.raises(anybatch.BatchError, match='Use rule="sqrt"'):
        rescale(optimizer, (64, 64 * 16))
    assert rescale(optimizer, (64, 64 * 16), "sqrt").table["param_groups[0].lr"] == pytest.approx((0.01, 0.04))
