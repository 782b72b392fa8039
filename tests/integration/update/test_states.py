"""A saved state with anything wrong in it is refused with its place, and loaded in no part; plans in files likewise."""

import contextlib
import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch
import reference
from anybatch.backpropagation import RepeatedBackward
from faults import Straight, mean_square

BATCH = torch.ones(12, 5)
ODD: dict[str, Any] = {
    "nothing": None, "a text": "five", "a number as text": "5", "NaN": math.nan, "infinite": math.inf, "below": -3,
    "a fraction": 0.5, "true": True, "a list": [], "a mapping": {}, "huge": 10**400, "an object": object(),
}  # fmt: skip
MISSING = object()


def trained(**options: Any) -> anybatch.TrainStep:
    torch.manual_seed(0)
    model = Straight()
    step = anybatch.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.01), **options)
    step(BATCH)
    return step


def over_time() -> anybatch.TrainStep:
    torch.manual_seed(0)
    cell = torch.nn.RNNCell(5, 3)

    def loss(model: Any, x: torch.Tensor, state: torch.Tensor) -> Any:
        each = []
        for at in range(x.shape[1]):
            state = model(x[:, at], state)
            each.append(state.square().mean())
        return torch.stack(each).mean(), state

    timed = anybatch.OverTime(loss, lambda model, x: x.new_zeros(len(x), 3), chunk=2, mode="truncated", carry=True)
    step = anybatch.TrainStep(cell, timed, torch.optim.SGD(cell.parameters(), lr=0.01))
    step(torch.ones(4, 6, 5))
    return step


def repeated() -> RepeatedBackward:
    torch.manual_seed(0)
    gradient = RepeatedBackward(Straight(), mean_square, memory="1MiB")
    gradient(BATCH)
    return gradient


MADE: dict[str, Callable[[], Any]] = {
    "plain": lambda: trained(micro_batch_size=5),
    "scaled": lambda: trained(scaler=torch.amp.GradScaler("cpu", init_scale=8.0)),
    "planned": lambda: trained(memory="1MiB"),
    "over time": over_time,
    "RepeatedBackward": repeated,
}


def damaged(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """The same value with one place in it made odd or left out, by name and path."""
    for name, odd in ODD.items():
        yield name, path, odd
    if isinstance(value, Mapping):
        for key in value:
            for name, place, inner in [("missing", (*path, key), MISSING), *damaged(value[key], (*path, key))]:
                yield (
                    name,
                    place,
                    {k: v for k, v in value.items() if k != key} | ({} if inner is MISSING else {key: inner}),
                )
    elif isinstance(value, list) and value:
        for name, place, inner in damaged(value[0], (*path, 0)):
            yield name, place, [inner, *value[1:]]


def is_whole(step: Any) -> None:
    """The step can go on, and its state can be saved."""
    torch.save(step.state_dict(), Path("/dev/null"))
    with contextlib.suppress(anybatch.PlanMismatch):  # which is told when there is something to compare with
        step(torch.ones(4, 6, 5) if isinstance(step.loss_fn, anybatch.OverTime) else BATCH)
    repr(step.state_dict())


@pytest.mark.parametrize("kind", MADE)
def test_what_is_loaded_can_go_on_and_what_is_refused_is_loaded_in_no_part(kind: str) -> None:
    step = MADE[kind]()
    saved = step.state_dict()
    before, refused, taken = reference.frozen(saved), 0, []
    for name, path, state in damaged(saved):
        try:
            step.load_state_dict(state)
        except anybatch.BatchError as error:
            refused += 1
            text = str(error)
            assert "the state" in text, (name, path)
            assert len(text) < 700, text
            assert not path or repr(path[0]) in text or "GradScaler" in text or "version" in text, (name, path, text)
            assert reference.frozen(step.state_dict()) == before, (name, path)
        else:
            taken.append((name, path))
            if kind != "planned" or len(taken) % 4 == 0:  # making a plan takes long
                is_whole(copy.deepcopy(step))
            step.load_state_dict(saved)
    assert refused > 100
    assert len(taken) < refused / 3, taken


@pytest.mark.parametrize("path", ["updates", "samples"])
def test_the_place_and_what_was_expected_are_told(path: str) -> None:
    step = MADE["plain"]()
    saved = step.state_dict()
    saved["counters"][path] = "5"
    with pytest.raises(anybatch.BatchError, match="is '5', expected an integer of at least 0") as caught:
        step.load_state_dict(saved)
    assert caught.value.path == f"['counters']['{path}']"
    del saved["counters"][path]
    with pytest.raises(anybatch.BatchError, match=f"'{path}'. is missing"):
        step.load_state_dict(saved)


def test_a_plan_with_anything_wrong_in_it_is_refused_or_can_be_shown_and_saved(tmp_path: Path) -> None:
    plan = anybatch.plan(Straight(), mean_square, BATCH, memory="1MiB")
    refused = longest = 0
    for name, _, values in damaged(plan.to_dict()):
        if name == "an object":
            continue
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(values))
        try:
            found = anybatch.Plan.load(file)
        except anybatch.PlanMismatch as error:
            refused += 1
            longest = max(longest, len(str(error)))
        else:
            assert str(found)
            found.save(file)
            assert anybatch.Plan.load(file) == found
    assert refused > 100
    assert longest < 700


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000, '{"kind":' * 5000, '{"kind": "anybatch plan", "version": ' + "[" * 900 + "]" * 900 + "}",
        "9" * 5000, "\ufeff{}", '"\\ud800"',
    ],
    ids=["deep list", "deep mapping", "deep version", "long number", "mark", "half a letter"],
)  # fmt: skip
def test_files_that_are_no_plans(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(anybatch.PlanMismatch):
        anybatch.Plan.load(tmp_path / "plan.json")


def test_blocks_with_numbers_that_nobody_can_read(tmp_path: Path) -> None:
    plan = anybatch.plan(Straight(), mean_square, BATCH, memory="1MiB")
    values = plan.to_dict()
    values["chosen"]["recompute"] = ["net.0:" + "9" * 5000]
    with pytest.raises(anybatch.PlanMismatch, match="damaged"):
        anybatch.Plan.from_dict(values)
