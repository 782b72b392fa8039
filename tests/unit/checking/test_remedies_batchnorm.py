"""The ways on that the refusals of a split print, each done as it is written."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch import LossError, NotSplittable, backward
from remedies import Register, sites
from source_tree import PACKAGE

REGISTER = Register()
follows = REGISTER.follows


def test_each_function_that_refuses_a_split_is_followed() -> None:
    paths = [PACKAGE / "update" / "refusals.py", PACKAGE / "backpropagation.py"]
    assert sites(paths, frozenset({"NotSplittable", "LossError", "BatchError"})) == set(REGISTER.known)


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def vectors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(12, 5, generator=generator), "y": torch.arange(12) % 3}


def loss_fn(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def refused(call: Callable[[], Any]) -> tuple[str, list[str]]:
    """The text of a refusal, and the lines of code in it."""
    with pytest.raises(NotSplittable) as error:
        call()
    text = str(error.value)
    return text, [line.strip() for line in text.splitlines() if line.startswith("       ")]


def names(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {"anybatch": anybatch, "torch": torch, "model": model, "loss_fn": loss_fn, "optimizer": optimizer,
            "batch": vectors()}  # fmt: skip


def stepped(line: str, model: nn.Module) -> list[torch.Tensor]:
    """The weights after one step of what a line makes, or after a line that makes the gradient itself."""
    space = names(model)
    made = eval(line, space)
    if isinstance(made, anybatch.TrainStep):
        made(space["batch"])
    else:
        space["optimizer"].step()
    return [*model.state_dict().values()]


def plainly(model: nn.Module) -> list[torch.Tensor]:
    space = names(model)
    loss_fn(model, space["batch"]).backward()
    space["optimizer"].step()
    return [*model.state_dict().values()]


@follows("update/refusals.not_splittable")
@pytest.mark.parametrize("verb", ["TrainStep", "backward"])
def test_of_batch_norm_in_training_mode(verb: str) -> None:
    call = f"anybatch.{verb}(model, loss_fn, {'optimizer' if verb == 'TrainStep' else 'batch'}, micro_batch_size=4)"
    model = normalised()
    text, lines = refused(lambda: stepped(call, model))
    whole, ghost, frozen, group = lines
    torch.testing.assert_close(stepped(whole, normalised()), plainly(normalised()))
    stepped(ghost, normalised())
    assert "a different training method" in text
    evaluated = normalised().eval()
    torch.testing.assert_close(stepped(frozen, normalised()), plainly(evaluated), rtol=1e-4, atol=1e-6)
    exec(group, {"model": model, "torch": torch})
    other = normalised()
    exec(group, {"model": other, "torch": torch})
    torch.testing.assert_close(stepped(call, model), plainly(other), rtol=1e-4, atol=1e-6)


def test_of_batch_norm_in_a_window() -> None:
    batches = [{name: value[rows] for name, value in vectors().items()} for rows in (slice(0, 8), slice(8, 12))]
    (window,) = anybatch.windows(batches, batches=2)
    model = normalised()
    text, _ = refused(lambda: backward(model, loss_fn, window))
    assert "Concatenate the 2 batches of the window" in text
    torch.testing.assert_close(
        stepped("anybatch.TrainStep(model, loss_fn, optimizer)", normalised()), plainly(normalised())
    )


@follows("update/refusals.no_statistics")
def test_of_frozen_batch_norm_without_statistics() -> None:
    def model(tracks: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, track_running_stats=tracks), nn.Linear(8, 3))

    def run(tracks: bool, **options: Any) -> Any:
        return backward(model(tracks), loss_fn, vectors(), **options)

    text, _ = refused(lambda: run(tracks=False, micro_batch_size=4, batch_norm="frozen"))
    assert "leave micro_batch_size out" in text
    run(tracks=False)
    for way in ("TrainStep memory=", 'batch_norm="ghost"', "track_running_stats=True"):
        assert way in text
    stepped('anybatch.TrainStep(model, loss_fn, optimizer, memory="free")', model(tracks=False))
    run(tracks=False, micro_batch_size=4, batch_norm="ghost")
    run(tracks=True, micro_batch_size=4, batch_norm="frozen")


@follows("update/refusals.one_value")
def test_of_a_micro_batch_of_one_sample() -> None:
    def run(**options: Any) -> Any:
        rows = {name: value[:9] for name, value in vectors().items()}
        return backward(normalised(), loss_fn, rows, **{"batch_norm": "ghost", **options})

    text, _ = refused(lambda: run(micro_batch_size=4))
    sizes = re.search(r"micro_batch_size=(\d+) or (\d+) leaves no single sample", text)
    assert sizes is not None
    for size in sizes.groups():
        run(micro_batch_size=int(size))
    assert "drop the last samples of the batch (drop_last=True)" in text
    eight = {name: value[:8] for name, value in vectors().items()}
    backward(normalised(), loss_fn, eight, micro_batch_size=4, batch_norm="ghost")
    assert 'or use batch_norm="frozen"' in text
    run(micro_batch_size=4, batch_norm="frozen")


@follows("update/refusals.put_in_training_mode")
def test_of_a_loss_that_puts_the_model_in_training_mode() -> None:
    def trains(model: Any, batch: Any) -> Any:
        model.train()
        return loss_fn(model, batch)

    text, _ = refused(lambda: backward(normalised().eval(), trains, vectors(), micro_batch_size=4))
    assert "Call model.train() before the step, which then lists the options" in text
    _, lines = refused(lambda: backward(normalised().train(), trains, vectors(), micro_batch_size=4))
    assert len(lines) == 4
    assert 'or use batch_norm="frozen"' in text
    backward(normalised().eval(), trains, vectors(), micro_batch_size=4, batch_norm="frozen")


@follows("update/refusals.unused")
def test_of_a_loss_of_another_model() -> None:
    other = normalised().eval()

    def of_another(model: Any, batch: Any) -> Any:
        return loss_fn(other if model is not None else model, batch)

    with pytest.raises(LossError, match="computed with the model passed to loss_fn"):
        backward(normalised().eval(), of_another, vectors())
    backward(normalised().eval(), loss_fn, vectors())
