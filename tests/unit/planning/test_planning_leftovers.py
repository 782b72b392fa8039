"""What a trace on fake tensors leaves in caches does not reach the next real step."""

import functools
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anybatch
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
def test_what_a_cache_keeps_is_real(mask: Callable[[int], Any]) -> None:
    model, loss_fn = make_model(), loss_with(mask)
    assert planned(loss_fn, model).confidence == "predicted"
    assert fakes_alive() == []
    kept = mask(5)
    first = kept[0] if isinstance(kept, tuple) else kept
    assert type(first) is Tensor
    assert torch.equal(first, torch.ones(5, 5).tril())
    assert type(loss_fn(model, torch.ones(16, 5, 8))) is Tensor


def test_what_was_written_into_a_cached_tensor_is_in_it() -> None:
    """In place, by slices and through views, from numbers of the program and from arrays."""

    @functools.lru_cache
    def bias(length: int) -> Tensor:
        found = torch.zeros(length, length)
        found[:, 0] = 2.0
        found.diagonal().add_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
        found[1:, 1:].fill_(-1.0)
        found += torch.from_numpy(np.arange(length, dtype=np.float32))
        return found

    expected = bias(5)
    bias.cache_clear()
    planned(loss_with(bias))
    assert bias.cache_info().currsize == 1
    assert torch.equal(bias(5), expected)


def assert_goes_on(loss_fn: Any) -> None:
    """A real step after a plan computes what it would have computed without; or the plan says what is in the way."""
    try:
        planned(loss_fn)
    except anybatch.LossError as error:
        assert "keeps tensors" in str(error)  # noqa: PT017 - either outcome is right
        return
    assert fakes_alive() == []
    model, batch = make_model(), torch.randn(16, 5, 8)
    found = loss_fn(model, batch)
    forget()
    assert torch.equal(found, loss_fn(model, batch))


def test_what_was_mixed_with_samples_is_not_taken_for_a_constant() -> None:
    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        if Keeper.shared is None:
            Keeper.shared = torch.zeros(8)
            Keeper.shared.copy_(batch.detach()[0, 0])
        return (model(batch) * Keeper.shared).square().mean()  # type: ignore[no-any-return]

    assert_goes_on(loss_fn)


def test_a_cache_that_is_filled_from_samples_does_not_poison_the_next_step() -> None:
    seen: list[Tensor] = []

    @functools.lru_cache
    def scale(length: int) -> Tensor:
        return torch.zeros(8).add_(seen[-1].detach()[0, 0, :length].sum())

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        seen.append(batch)
        return (model(batch) * scale(batch.shape[1])).square().mean()  # type: ignore[no-any-return]

    with pytest.raises(anybatch.LossError, match=r"keeps tensors.*\(8,\) of torch.float32"):
        planned(loss_fn)
    scale.cache_clear()
    loss_fn(make_model(), torch.ones(2, 5, 8))  # what the message says
    assert planned(loss_fn).confidence in ("predicted", "measured")  # the list keeps samples of the trace


def test_nothing_of_the_process_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches keep what they had, no object is unfrozen, nothing is forked, whatever code runs."""
    library = torch.library.Library("anybatch_test_own", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CompositeImplicitAutograd")
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    before = bounded_mask(3)
    gc.collect()
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        planned(lambda model, batch: torch.ops.anybatch_test_own.double(loss_with(bounded_mask)(model, batch)))
    finally:
        library._destroy()
    assert gc.get_freeze_count() > 0.99 * frozen
    assert bounded_mask(3) is before
    assert bounded_mask.cache_info().currsize == 2
    assert gc.isenabled()


@pytest.mark.parametrize("mask", [bounded_mask, unbounded_mask, mask_in_a_dictionary])
def test_what_was_cached_before_is_used_and_stays(mask: Callable[[int], Any]) -> None:
    before = mask(5)
    assert planned(loss_with(mask)).confidence == "predicted"
    assert mask(5) is before


def test_other_entries_of_a_dictionary_stay() -> None:
    kept = MASKS[3] = torch.ones(3)
    planned(loss_with(mask_in_a_dictionary))
    assert fakes_alive() == []
    assert MASKS[3] is kept


def test_a_train_step_goes_on_after_its_plan() -> None:
    model = make_model()
    loss_fn = loss_with(bounded_mask)
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), memory=LARGE)
    for _ in range(2):
        assert torch.isfinite(torch.tensor(step(torch.ones(16, 5, 8)).loss))
    assert type(bounded_mask(5)) is Tensor


def test_an_attribute_of_a_class_is_real_or_put_back() -> None:
    keeper = Keeper()
    assert planned(loss_with(keeper.of_the_class)).confidence == "predicted"
    assert fakes_alive() == []


def test_an_attribute_of_an_object_of_the_loss_is_put_back() -> None:
    keeper = Keeper()
    assert planned(loss_with(keeper.own)).confidence == "predicted"
    assert keeper.mask is None


def test_what_nobody_reads_again_is_no_fake() -> None:
    model, watcher = make_model(), Watcher()
    model.get_submodule("1").register_forward_hook(watcher)
    assert planned(loss_with(bounded_mask), model).confidence in ("predicted", "measured")
    assert type(watcher.last) in (Tensor, type(None))
    assert fakes_alive() == []


def test_a_trace_that_fails_leaves_nothing_either() -> None:
    loss_fn = loss_with(bounded_mask)

    def asking(model: Any, batch: Any) -> Any:
        loss = loss_fn(model, batch)
        return loss * 2 if loss.item() > 0 else loss

    assert planned(asking).confidence == "measured"
    assert fakes_alive() == []


def test_reference_cycles_are_no_leftovers() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        cycle: list[Any] = [model(batch)]
        cycle.append(cycle)
        return cycle[0].square().mean()

    assert planned(loss_fn).confidence == "predicted"


def test_where_no_fake_tensors_can_be_made_the_step_runs_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise RuntimeError("no fake tensors here")

    monkeypatch.setattr("anybatch.planning.memorytrace.Fakes", refused)
    found = planned(lambda model, batch: model(batch).square().mean())
    assert found.micro_batch_size == 16
    assert found.confidence == "measured"
