"""freeze: parts of a model that are not trained."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import anybatch
from faults import different, facts


class Model(nn.Module):
    encoder: Any

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"first": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4)})
        self.encoder2 = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.encoder["norm"](self.encoder["first"](x))
        z: torch.Tensor = self.head(self.drop(self.norm(self.encoder2(y))))
        return z


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


ENCODER = ["encoder.first.weight", "encoder.first.bias", "encoder.norm.weight", "encoder.norm.bias"]


@pytest.mark.parametrize(
    ("patterns", "parameters", "modules"),
    [
        (["encoder"], ENCODER, ["encoder.norm"]),
        (["encoder.*"], ENCODER, ["encoder.norm"]),
        (["encoder.first.weight"], ["encoder.first.weight"], []),
        (["encoder.?orm"], ENCODER[2:], ["encoder.norm"]),
        (["*norm"], [*ENCODER[2:], "norm.weight", "norm.bias"], ["encoder.norm", "norm"]),
        (["head", "encoder2.bias"], ["head.weight", "head.bias", "encoder2.bias"], []),
        (["head", "head.*", "head.bias"], ["head.weight", "head.bias"], []),
        (["*.bias"], ["encoder.first.bias", "encoder.norm.bias", "encoder2.bias", "norm.bias", "head.bias"], []),
    ],
)
def test_patterns(patterns: list[str], parameters: list[str], modules: list[str]) -> None:
    model = Model()
    everything = trained(model)
    frozen = anybatch.freeze(model, *patterns)
    assert set(frozen.parameters) == set(parameters)
    assert set(frozen.modules) == set(modules)
    assert trained(model) == [name for name in everything if name not in parameters]
    frozen.remove()
    assert trained(model) == everything


@pytest.mark.parametrize("patterns", [["encoder", "decoder"], ["Head"], ["enc"], [""], []])
def test_what_matches_nothing_is_refused_and_nothing_changed(patterns: list[str]) -> None:
    model = Model()
    before = facts(model)
    with pytest.raises(anybatch.BatchError) as caught:
        anybatch.freeze(model, *patterns)
    if patterns:
        assert repr(patterns[-1]) in str(caught.value)
        assert "encoder2" in str(caught.value)  # what there is
    assert not different(before, facts(model))


def test_the_handle_puts_everything_back_and_can_be_used_again() -> None:
    model = Model()
    model.encoder2.bias.requires_grad_(False)
    before = facts(model)
    frozen = anybatch.freeze(model, "encoder*")
    assert different(before, facts(model))
    frozen.remove()
    frozen.remove()
    assert not different(before, facts(model))  # what was frozen before stays so


def test_a_context_manager_also_after_an_exception() -> None:
    model = Model()
    before = facts(model)

    def train() -> None:
        with anybatch.freeze(model, "encoder"):
            assert trained(model)[0] == "encoder2.weight"
            raise KeyError

    with pytest.raises(KeyError):
        train()
    assert not different(before, facts(model))


def test_what_it_saves() -> None:
    frozen = anybatch.freeze(Model(), "encoder")
    assert frozen.gradient_bytes == 4 * (12 + 4 + 4 + 4)
    assert frozen.optimizer_bytes == 2 * frozen.gradient_bytes
    assert "4 parameters, 1 BatchNorm modules" in repr(frozen)


def test_gradients_are_let_go() -> None:
    model = Model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    anybatch.freeze(model, "encoder")
    assert [p.grad is None for p in model.parameters()] == [True] * 4 + [False] * 6


@pytest.mark.parametrize("mode_when_frozen", [True, False], ids=["train", "eval"])
def test_batch_norm_uses_running_statistics_whatever_mode_follows(mode_when_frozen: bool) -> None:
    """Pretrained models often come in evaluation mode, and training loops call train() every epoch."""
    model = Model().train(mode_when_frozen)
    anybatch.freeze(model, "encoder")
    model.train()
    before = copy.deepcopy(model.encoder["norm"].state_dict())
    free = copy.deepcopy(model.norm.state_dict())
    model(torch.randn(8, 3) * 5)
    for name, value in model.encoder["norm"].state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not torch.equal(model.norm.state_dict()["running_mean"], free["running_mean"])
    assert model.drop.training


@pytest.mark.parametrize("policy", ["refuse", "ghost", "frozen"])
def test_a_frozen_batch_norm_does_not_hinder_a_split(policy: str) -> None:
    model = Model()
    model.norm.eval()
    frozen = anybatch.freeze(model, "encoder")
    model.encoder["norm"].running_var.fill_(3.0)
    step = anybatch.TrainStep(
        model,
        lambda model, batch: model(batch).pow(2).mean(),
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        micro_batch_size=2,
        batch_norm=policy,  # type: ignore[arg-type]
    )
    before = copy.deepcopy(model.encoder.state_dict())
    for _ in range(2):
        model.train()
        model.norm.eval()
        assert step(torch.randn(6, 3)).micro_batches == 3
        step.evaluate(torch.randn(6, 3))
    for name, value in model.encoder.state_dict().items():
        assert torch.equal(value, before[name]), name
    frozen.remove()
    assert not model.encoder["norm"]._forward_pre_hooks


def test_removing_in_evaluation_mode_does_not_start_training_mode() -> None:
    model = Model()
    frozen = anybatch.freeze(model, "encoder")
    model.eval()
    frozen.remove()
    assert not model.encoder["norm"].training
    model.train()
    assert model.encoder["norm"].training


def test_removing_in_training_mode_goes_on_with_training_mode() -> None:
    model = Model().eval()
    frozen = anybatch.freeze(model, "encoder")
    model.train()
    model(torch.randn(4, 3))
    frozen.remove()
    assert model.encoder["norm"].training


def test_a_module_that_was_in_evaluation_mode_by_itself_stays_so() -> None:
    model = Model()
    model.encoder["norm"].eval()
    anybatch.freeze(model, "encoder").remove()
    assert not model.encoder["norm"].training
    assert model.training


def test_a_weight_that_is_tied_has_both_names() -> None:
    model: Any = nn.ModuleDict({"words": nn.Embedding(4, 3), "head": nn.Linear(3, 4)})
    model["head"].weight = model["words"].weight
    frozen = anybatch.freeze(model, "head.weight")
    assert trained(model) == ["head.bias"]
    assert len(frozen.parameters) == 1
    assert frozen.gradient_bytes == 4 * 12
    frozen.remove()
    assert trained(model) == ["words.weight", "head.bias"]


def test_two_handles() -> None:
    model = Model()
    first = anybatch.freeze(model, "encoder")
    second = anybatch.freeze(model, "encoder", "head")
    assert second.parameters == ["head.weight", "head.bias"]
    second.remove()
    assert not model.encoder["norm"].training
    model.train()
    model(torch.randn(4, 3))
    assert model.encoder["norm"].num_batches_tracked == 0
    first.remove()
    assert len(trained(model)) == 10


def test_a_copy_of_a_frozen_model_is_frozen() -> None:
    model = Model()
    anybatch.freeze(model, "encoder")
    twin = copy.deepcopy(model).train()
    twin(torch.randn(4, 3))
    assert twin.encoder["norm"].num_batches_tracked == 0
    assert trained(twin) == trained(model)
