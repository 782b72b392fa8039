"""A batch in which anything is larger than what was planned for is planned for again, whatever kind of leaf it is."""

import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import anybatch
from anybatch.backpropagation import RepeatedBackward
from anybatch.planning.fingerprints import outgrown
from memory_steps import WIDTH, Net, Tokens, peak_of_call, plan_of, sgd, smallest_of

ROWS = 8


class Case(NamedTuple):
    """A loss, and a batch for a size."""

    model: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Any], Any]
    batch_of: Callable[[int], Any]
    options: dict[str, Any]


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean()


def padded(items: Any) -> Tensor:
    return pad_sequence([torch.as_tensor(item) for item in items], batch_first=True)


def lengths(longest: int) -> list[int]:
    return [2, 3, 2, 3, 2, longest, 3, 2]


def texts(longest: int) -> list[Tensor]:
    return [torch.randint(20, (length,)) for length in lengths(longest)]


def sparse(entries: int) -> Tensor:
    rows = torch.arange(ROWS).repeat_interleave(entries)
    return torch.sparse_coo_tensor(
        torch.stack([rows, torch.randint(20, rows.shape)]), torch.ones(len(rows)), (ROWS, 20)
    )


def with_entries(model: Any, batch: Any) -> Any:
    found = batch["x"].coalesce() if batch["x"].is_coalesced() else batch["x"]
    return mean_square(model(found._indices()[1]))


CASES = {
    "array": Case(
        Net, lambda model, batch: mean_square(model(torch.as_tensor(batch["x"]))),
        lambda size: {"x": np.random.default_rng(0).normal(size=(ROWS, size, WIDTH)).astype("f")}, {},
    ),
    "broadcast": Case(
        Net, lambda model, batch: mean_square(model(batch["x"]) + model(batch["nodes"]).mean(0)),
        lambda size: {"x": torch.randn(ROWS, WIDTH), "nodes": torch.randn(size, WIDTH)}, {"broadcast": ("nodes",)},
    ),
    "broadcast container": Case(
        Net, lambda model, batch: mean_square(model(batch["x"]) + model(batch["graph"]["nodes"][0]).mean(0)),
        lambda size: {"x": torch.randn(ROWS, WIDTH), "graph": {"nodes": [torch.randn(size, WIDTH)]}},
        {"broadcast": ("graph",)},
    ),
    "broadcast array": Case(
        Net, lambda model, batch: mean_square(model(batch["x"]) + model(torch.as_tensor(batch["nodes"])).mean(0)),
        lambda size: {"x": torch.randn(ROWS, WIDTH), "nodes": np.ones((size, WIDTH), "f")}, {"broadcast": ("nodes",)},
    ),
    "lists of numbers": Case(
        Tokens, lambda model, batch: mean_square(model(padded(batch["t"]))),
        lambda size: {"t": [text.tolist() for text in texts(size)]}, {},
    ),
    "arrays in a list": Case(
        Tokens, lambda model, batch: mean_square(model(padded(batch["t"]))),
        lambda size: {"t": [text.numpy() for text in texts(size)]}, {},
    ),
    "tensors in dictionaries in a list": Case(
        Tokens, lambda model, batch: mean_square(model(padded([one["t"] for one in batch["samples"]]))),
        lambda size: {"samples": [{"t": text} for text in texts(size)]}, {},
    ),
    "lists beside tensors": Case(
        Tokens, lambda model, batch: mean_square(model(padded(batch["t"])).sum((1, 2)) - batch["y"]),
        lambda size: {"t": [text.tolist() for text in texts(size)], "y": torch.zeros(ROWS)}, {},
    ),
    "entries of a sparse tensor": Case(Tokens, with_entries, lambda size: {"x": sparse(size)}, {}),
    "nested tensor": Case(
        Net, lambda model, batch: mean_square(model(torch.nested.to_padded_tensor(batch["x"], 0.0))),
        lambda size: {"x": torch.nested.nested_tensor([torch.randn(n, WIDTH) for n in lengths(size)])}, {},
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_grows_is_planned_for_again(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model()
    smallest = smallest_of(model, case.loss_fn, case.batch_of(30), **case.options)
    budget = int(1.3 * smallest)
    step = anybatch.TrainStep(model, case.loss_fn, sgd(model), memory=budget, verify="off", **case.options)
    plans = []
    for size in (4, 30, 4, 30):
        batch = case.batch_of(size)
        step(batch)
        assert peak_of_call(step, batch) <= budget, size
        plans.append(plan_of(step))
    assert plans[0] is not plans[1]
    assert plans[1] is plans[2] is plans[3]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_predicted(name: str) -> None:
    """An array that is copied into a tensor is on the safe side, as one that shares its memory is."""
    case = CASES[name]
    torch.manual_seed(0)
    model, batch = case.model(), case.batch_of(30)
    plan = anybatch.plan(model, case.loss_fn, batch, sgd(model), memory="1GiB", **case.options)
    # The plan that is the fastest may split, and what is padded counts in some of these losses.
    step = anybatch.TrainStep(model, case.loss_fn, sgd(model), plan=plan, verify="off", **case.options)
    step(batch)
    measured = peak_of_call(step, batch)
    assert measured <= plan.peak_bytes * 1.005


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_nested_tensors_are_compared_dimension_by_dimension() -> None:
    model = Net()

    def loss_fn(model: Any, batch: Any) -> Any:
        return mean_square(model(torch.nested.to_padded_tensor(batch["x"], 0.0)))

    def batch_of(*shapes: tuple[int, int]) -> Any:
        return {"x": torch.nested.nested_tensor([torch.randn(*shape, WIDTH) for shape in shapes])}

    plan = anybatch.plan(model, loss_fn, batch_of((3, 40), (4, 2)), sgd(model), memory="1GiB")
    assert dict(plan.shapes) == {"batch['x']": (4, 40, WIDTH)}


def test_the_text_says_whether_it_is_cut() -> None:
    assert outgrown({"batch['x']": (3,)}, {"batch['x']": (4,)}) == "batch['x'] has shape [rows, 4], planned for (3,)"
    assert outgrown({"batch['n'] as a whole": (3,)}, {"batch['n'] as a whole": (4,)}) == (
        "batch['n'] as a whole has shape [4], planned for (3,)"
    )


def test_batches_that_are_larger_in_turn_are_planned_for_once_each(caplog: pytest.LogCaptureFixture) -> None:
    """Many short samples, then few long ones: neither plan is good for the other batch."""
    torch.manual_seed(0)
    model = Tokens()

    def loss_fn(model: Any, batch: Any) -> Any:
        return mean_square(model(batch["x"]))

    def batch_of(rows: int, length: int) -> dict[str, Tensor]:
        return {"x": torch.randint(20, (rows, length))}

    sizes = ((32, 5), (2, 30), (32, 30))
    budget = int(1.2 * max(smallest_of(model, loss_fn, batch_of(*size)) for size in sizes))
    caplog.set_level(logging.INFO, logger="anybatch")
    step = anybatch.TrainStep(model, loss_fn, sgd(model), memory=budget)
    for _ in range(3):
        for size in sizes[:2]:
            batch = batch_of(*size)
            step(batch)
            assert peak_of_call(step, batch) <= budget, size
    assert [record.getMessage().partition(":")[0] for record in caplog.records].count("planned") == 2
    batch = batch_of(*sizes[2])
    step(batch)
    assert peak_of_call(step, batch) <= budget
    assert plan_of(step).samples == 32


def test_items_of_a_list_may_have_other_numbers_of_dimensions() -> None:
    model = Tokens()

    def loss_fn(model: Any, batch: Any) -> Any:
        return mean_square(torch.cat([model(item).flatten() for item in batch["t"]]))

    items = [torch.randint(20, (3,)), torch.randint(20, (2, 5)), torch.randint(20, (4,)), torch.randint(20, (3, 1))]
    forward, backward = (
        dict(anybatch.plan(model, loss_fn, {"t": some}, sgd(model), memory="1GiB").shapes)
        for some in (items, items[::-1])
    )
    assert set(forward.values()) == set(backward.values()) == {(4,), (3, 5)}


def calls_of_a_collated_step(lists: int) -> int:
    """How many functions a step under a plan calls whose model has some lists of its own."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    model.kept = {number: [number] for number in range(lists)}

    def collate(samples: list[Tensor]) -> Tensor:
        return pad_sequence(samples, batch_first=True)[:, :16]

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        found: Tensor = model(batch).square().mean()
        return found

    batch = [torch.randn(16) for _ in range(32)]
    step = anybatch.TrainStep(model, loss_fn, sgd(model), memory="1MiB", collate=collate)
    for _ in range(4):
        step(batch)
    count = 0

    def look(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(look)
    try:
        step(batch)
    finally:
        sys.setprofile(None)
    return count


def test_a_step_under_a_plan_does_not_walk_through_what_the_model_keeps_in_python() -> None:
    few, many = calls_of_a_collated_step(2), calls_of_a_collated_step(300)
    assert many < few + 100


def layers(number: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(number)))


@pytest.mark.parametrize("adds_a_group", [True, False])
def test_weights_that_are_trained_later_are_planned_for(adds_a_group: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = layers().requires_grad_(False)
    model[-1].requires_grad_(True)
    early = model[-1] if adds_a_group else model
    optimizer = torch.optim.AdamW(early.parameters())
    batch = torch.randn(64, WIDTH)
    trained = layers()
    budget = anybatch.plan(
        trained, lambda m, x: mean_square(m(x)), batch, torch.optim.AdamW(trained.parameters()), memory=2**40
    ).smallest_bytes
    step = anybatch.TrainStep(model, lambda m, x: mean_square(m(x)), optimizer, memory=budget)
    first = step(batch).plan
    assert first is not None
    model.requires_grad_(True)
    if adds_a_group:
        optimizer.add_param_group({"params": list(model[:-1].parameters())})
    with caplog.at_level(logging.INFO, "anybatch"):
        assert step(batch).plan is not first
    assert "planning again: 6 parameters are trained that it was not made for" in caplog.text
    assert peak_of_call(step, batch) <= budget
    caplog.clear()
    model[:-1].requires_grad_(False)
    assert step(batch).plan is step(batch).plan
    assert "planning again" not in caplog.text


def test_fewer_other_weights_are_planned_for() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh()) for _ in range(16)))
    model = nn.Sequential(body.requires_grad_(False), nn.Linear(WIDTH, 800))  # of more bytes, for which less is kept
    batch, optimizer, budget = torch.randn(512, WIDTH), sgd(model), 2 * 2**20
    step = anybatch.TrainStep(model, lambda m, x: mean_square(m(x).mean(1)), optimizer, memory=budget)
    step(batch)
    body.requires_grad_(True)
    model[1].requires_grad_(False)
    for _ in range(2):
        assert peak_of_call(step, batch) <= budget


def test_phases_that_train_other_weights_are_planned_for_once_each(caplog: pytest.LogCaptureFixture) -> None:
    model = layers()
    caplog.set_level(logging.INFO, "anybatch")
    step = anybatch.TrainStep(model, lambda m, x: mean_square(m(x)), sgd(model), memory="1MiB")
    for number in range(8):
        model[2:].requires_grad_(number % 2 == 0)
        step(torch.randn(96 if number % 2 else 64, WIDTH))
    assert [record.getMessage().partition(":")[0] for record in caplog.records].count("planned") == 2


@pytest.mark.parametrize("why", ["a larger batch", "more is trained", "nothing fits"])
def test_gradients_of_earlier_calls_stay_where_a_batch_is_planned_for(why: str) -> None:
    model = layers().double()
    model[0].requires_grad_(why != "more is trained")
    gradient = RepeatedBackward(model, lambda m, x: mean_square(m(x)), [sgd(model)], memory="2MiB")
    batches = [torch.randn(rows, WIDTH).double() for rows in (64, 96 if why == "a larger batch" else 64)]
    gradient(batches[0])
    before = {name: p.grad for name, p in model.named_parameters()}
    kept = {name: grad.clone() for name, grad in before.items() if grad is not None}
    if why == "nothing fits":
        with pytest.raises(anybatch.DoesNotFit):
            gradient(torch.randn(2**15, WIDTH).double())
    else:
        model.requires_grad_(True)
        gradient(batches[1])
        for name, grad in zip(
            before, torch.autograd.grad(mean_square(model(batches[1])), [*model.parameters()]), strict=True
        ):
            kept[name] = kept.get(name, 0) + grad
    for name, parameter in model.named_parameters():
        assert before[name] is None or parameter.grad is before[name]
        torch.testing.assert_close(parameter.grad, kept[name])


class Growing:
    """A loss that calls the model more often from some epoch on."""

    epoch = 0

    def __call__(self, model: Any, batch: Tensor) -> Tensor:
        loss = mean_square(model(batch))
        return loss + sum(mean_square(model(batch + one)) for one in range(3)) if self.epoch else loss


@pytest.mark.parametrize("is_seen_before", [True, False])
def test_a_term_that_begins_later_is_planned_for(
    is_seen_before: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_seen_before:  # as where the loss goes by what nobody looks at
        monkeypatch.setattr("anybatch.checking.switches.Switches.are_turned", lambda *_: False)
    model, loss_fn, batch = layers(), Growing(), torch.randn(256, WIDTH)
    loss_fn.epoch = 1
    budget = anybatch.plan(model, loss_fn, batch, sgd(model), memory=2**40).smallest_bytes
    loss_fn.epoch = 0
    step = anybatch.TrainStep(model, loss_fn, sgd(model), memory=budget)
    first = step(batch).plan
    loss_fn.epoch = 1
    with caplog.at_level(logging.INFO, "anybatch"):
        if is_seen_before:
            assert peak_of_call(step, batch) <= budget
        assert step(batch).plan is not first
    assert "runs different operations than planned" in caplog.text
    assert peak_of_call(step, batch) <= budget


def test_a_term_with_which_nothing_fits_says_so_before_it_is_run(caplog: pytest.LogCaptureFixture) -> None:
    model, loss_fn, batch = layers(), Growing(), torch.randn(256, WIDTH)
    budget = smallest_of(model, loss_fn, batch)
    step = anybatch.TrainStep(model, loss_fn, sgd(model), memory=budget)
    step(batch)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss_fn.epoch = 1
    with pytest.raises(anybatch.DoesNotFit) as raised:
        step(batch)
    assert raised.value.__context__ is None
    assert all(map(torch.equal, model.parameters(), before))
    assert step.updates == 1


def test_a_number_that_changes_without_effect_keeps_the_plan() -> None:
    model, batch = layers(), torch.randn(64, WIDTH)
    phase = {"rate": 0.0}
    step = anybatch.TrainStep(model, lambda m, x: (1 + phase["rate"]) * mean_square(m(x)), sgd(model), memory="1MiB")
    first = step(batch).plan
    for phase["rate"] in (0.1, 0.2, 0.3):
        assert step(batch).plan is first


@pytest.mark.usefixtures("constant_times")
@pytest.mark.parametrize("is_whole", [True, False])
def test_phases_of_other_operations_that_come_in_turn_keep_within_the_budget(
    is_whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Larger batches of the plain phase have a plan made in which the other one does not fit."""
    model, loss_fn = layers(), Growing()
    budget = 2**18 if is_whole else 3 * 2**15
    step = anybatch.TrainStep(model, loss_fn, sgd(model), memory=budget)
    caplog.set_level(logging.INFO, "anybatch")
    for number in range(12):
        loss_fn.epoch = int(number % 4 == 3)
        batch = torch.randn(96 if number < 4 or loss_fn.epoch else 96 + 12 * min(number, 8), WIDTH)
        assert peak_of_call(step, batch) <= budget, number
        if number < 4:
            assert (plan_of(step).chosen.micro_batches == 1) == (is_whole and number < 3)
    caplog.clear()
    for number in range(8):
        loss_fn.epoch = number % 2
        assert peak_of_call(step, torch.randn(96 if loss_fn.epoch else 192, WIDTH)) <= budget
    assert "planning again" not in caplog.text
