"""What a trace on fake tensors leaves in caches does not reach the next real step."""

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch
from anybatch.planning.leftovers import clear_away
from anybatch.tensors.fakes import Fakes
from planning_caches import (
    MASKS,
    Keeper,
    Watcher,
    bounded_mask,
    forget,
    loss_with,
    mask_in_a_dictionary,
    unbounded_mask,
)

Fake = torch._subclasses.FakeTensor
LARGE = 2**30


EARLIER: list[Any] = []


@pytest.fixture(autouse=True)
def empty_places() -> Iterator[None]:
    forget()
    EARLIER[:] = all_fakes()  # what other tests of this process keep, such as in a traceback
    yield
    EARLIER.clear()
    forget()


def all_fakes() -> list[Any]:
    gc.unfreeze()  # Python lists no objects that are frozen, and a search for leftovers unfreezes them
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Fake]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))


def fakes_alive() -> list[Any]:
    earlier = set(map(id, EARLIER))
    return [one for one in all_fakes() if id(one) not in earlier]


def planned(loss_fn: Any, model: nn.Module | None = None, batch: Any = None) -> anybatch.Plan:
    model = model or make_model()
    batch = torch.ones(16, 5, 8) if batch is None else batch
    return anybatch.plan(model, loss_fn, batch, torch.optim.SGD(model.parameters(), lr=0.1), memory=LARGE)


@pytest.mark.parametrize("mask", [bounded_mask, unbounded_mask, mask_in_a_dictionary])
def test_caches_are_emptied(mask: Callable[[int], Any], caplog: pytest.LogCaptureFixture) -> None:
    model, loss_fn = make_model(), loss_with(mask)
    with caplog.at_level(logging.INFO, logger="anybatch"):
        plan = planned(loss_fn, model)
    assert plan.confidence == "exact"
    assert fakes_alive() == []
    assert "held fake tensors" in caplog.text
    assert type(loss_fn(model, torch.ones(16, 5, 8))) is Tensor


def test_caches_are_found_among_objects_that_were_frozen() -> None:
    gc.freeze()
    planned(loss_with(bounded_mask))
    anybatch.backward(model := make_model(), loss_with(bounded_mask), torch.ones(4, 5, 8))
    assert all(type(p.grad) is Tensor for p in model.parameters())


@pytest.mark.parametrize("mask", [bounded_mask, unbounded_mask, mask_in_a_dictionary])
def test_what_was_cached_before_is_used_and_stays(mask: Callable[[int], Any]) -> None:
    before = mask(5)
    assert planned(loss_with(mask)).confidence == "exact"
    assert mask(5) is before


def test_other_entries_of_a_dictionary_stay() -> None:
    kept = MASKS[3] = torch.ones(3)
    planned(loss_with(mask_in_a_dictionary))
    assert list(MASKS) == [3] or type(MASKS[5][0]) is Tensor  # a real run may have filled it again
    assert MASKS[3] is kept


def test_a_train_step_goes_on_after_its_plan() -> None:
    model = make_model()
    loss_fn = loss_with(bounded_mask)
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), memory=LARGE)
    for _ in range(2):
        assert torch.isfinite(torch.tensor(step(torch.ones(16, 5, 8)).loss))
    assert type(bounded_mask(5)) is Tensor


def test_an_attribute_of_a_class_that_the_next_step_reads_is_named() -> None:
    keeper = Keeper()
    with pytest.raises(anybatch.LossError, match=r"keeps tensors.*\(5, 5\) of torch.float32, in .*Keeper"):
        planned(loss_with(keeper.of_the_class))
    Keeper.shared = None
    loss_with(keeper.of_the_class)(make_model(), torch.ones(2, 5, 8))  # what the message says
    assert planned(loss_with(keeper.of_the_class)).confidence == "exact"


def test_an_attribute_of_an_object_of_the_loss_is_put_back() -> None:
    keeper = Keeper()
    assert planned(loss_with(keeper.own)).confidence == "exact"
    assert keeper.mask is None


def test_what_nobody_reads_again_leads_to_real_probes() -> None:
    model, watcher = make_model(), Watcher()
    model.get_submodule("1").register_forward_hook(watcher)
    assert planned(loss_with(bounded_mask), model).confidence == "measured"
    assert type(watcher.last) is Tensor
    assert fakes_alive() == []


def test_a_trace_that_fails_leaves_nothing_either() -> None:
    loss_fn = loss_with(bounded_mask)

    def asking(model: Any, batch: Any) -> Any:
        loss = loss_fn(model, batch)
        return loss * 2 if loss.item() > 0 else loss

    assert planned(asking).confidence == "measured"
    assert fakes_alive() == []


def test_plain_steps_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(fakes: Fakes) -> list[str]:
        raise AssertionError

    monkeypatch.setattr("anybatch.planning.tracers.clear_away", searched)
    assert planned(lambda model, batch: model(batch).square().mean()).confidence == "exact"


def test_reference_cycles_are_no_leftovers() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        cycle: list[Any] = [model(batch)]
        cycle.append(cycle)
        return cycle[0].square().mean()

    assert planned(loss_fn).confidence == "exact"


def test_the_fakes_of_others_are_left_alone() -> None:
    ours, others = Fakes(), Fakes()
    place = {"other": others.like(torch.ones(3)), "ours": ours.like(torch.ones(2))}
    assert clear_away(ours) == []
    assert list(place) == ["other"]
    with others.mode:
        assert type(place["other"] + 1) is Fake
