"""The subjects of the planner's tests are what they say: they train, split exactly, and hold more than weights."""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch
from planning_data import as_float64_batch
from planning_models import FACTORIES, NAMES, Subject
from reference import assert_bitwise, assert_exact_at_every_size, gradients_of

ROWS = 5


def without_dropout(model: nn.Module) -> nn.Module:
    """Takes the dropout out of a model, of which a split would draw other masks."""
    for module in model.modules():
        for name in ("p", "dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def whole_loss_fn(subject: Subject) -> Any:
    """The loss over raw samples that were joined, as one who has no micro-batches writes it."""
    collate = subject.options.get("collate")
    return subject.loss_fn if collate is None else lambda model, samples: subject.loss_fn(model, collate(samples))


def heads_at_once(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    """The losses of ``three_heads`` without a cut, which the plain reference can go through."""
    features = model.trunk(batch["x"])
    return {
        name: nn.functional.cross_entropy(head(features).flatten(0, 1), batch["y"].flatten())
        for name, head in model.heads.items()
    }


WHOLE_LOSSES = {"three_heads": heads_at_once}


def parameters_and_buffers(subject: Subject) -> list[torch.Tensor | None]:
    return [tensor.detach().clone() for tensor in subject.model.state_dict().values()]


def test_there_are_many() -> None:
    assert len(NAMES) >= 19
    assert sum(not FACTORIES[name]().splits for name in NAMES) == 1


@pytest.mark.parametrize("name", NAMES)
def test_it_trains(name: str) -> None:
    subject = FACTORIES[name]()
    before = [parameter.detach().clone() for parameter in subject.model.parameters()]
    step = subject.step()
    losses = [step(subject.make_batch(ROWS)).loss for _ in range(3)]
    after = list(subject.model.parameters())
    assert all(torch.tensor(losses).isfinite())
    assert losses[0] != losses[2]
    assert all(parameter.grad is not None for parameter in after)
    assert sum(not torch.equal(one, other) for one, other in zip(before, after, strict=True)) > len(after) / 2


# Hugging Face computes the loss of a causal model in float32, whatever the model's own precision.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt2_cached"])
def test_a_split_gives_the_gradient_of_the_whole(name: str) -> None:
    subject = FACTORIES[name]()
    model = without_dropout(subject.model).double()
    batch = as_float64_batch(subject.make_batch(ROWS))
    if not subject.splits:
        with pytest.raises(anybatch.NotSplittable):
            anybatch.backward(model, subject.loss_fn, batch, micro_batch_size=2)
        return
    sizes = [66, 100, 1000] if "cost" in subject.options else [1, 2, ROWS]
    whole = WHOLE_LOSSES.get(name, whole_loss_fn(subject))
    assert_exact_at_every_size(model, subject.loss_fn, batch, ROWS, whole_loss_fn=whole, sizes=sizes, **subject.options)


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_one_is_the_same_and_draws_nothing(name: str) -> None:
    state = torch.get_rng_state()
    one, other = FACTORIES[name](), FACTORIES[name]()
    first, second = one.make_batch(3), other.make_batch(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert_bitwise(parameters_and_buffers(one), parameters_and_buffers(other))
    flat = first if isinstance(first, list) else list(first.values())
    assert_bitwise(flat, second if isinstance(second, list) else list(second.values()))
    assert one.model is not other.model
    assert all(gradient is None for gradient in gradients_of(other.model))


@pytest.mark.parametrize("name", NAMES)
def test_its_blocks_are_modules(name: str) -> None:
    subject = FACTORIES[name]()
    assert len(set(subject.blocks)) == len(subject.blocks)
    for block in subject.blocks:
        assert any(True for _ in subject.model.get_submodule(block).parameters())
