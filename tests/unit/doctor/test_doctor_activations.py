"""Outputs of modules in one forward: each figure against a plain computation, dead and saturated units, no traces."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from anybatch.doctor.recording.numbering import Numbering
from anybatch.doctor.samples.activations import ActivationSampler
from anybatch.records.samples import Activations, ModuleSample


def setting(model: nn.Module) -> ActivationSampler:
    numbering = Numbering(lambda fact: None)
    return ActivationSampler(numbering.models[numbering.root(model)])


def looked(sampler: ActivationSampler, model: nn.Module, *args: torch.Tensor) -> Activations:
    with sampler.attached():
        model(*args)
    found = sampler.result()
    assert found is not None
    return found


def by_name(found: Activations) -> dict[str, ModuleSample]:
    return {one.module: one for one in found.modules}


def test_the_figures_are_those_of_a_plain_computation() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(10, 4)
    found = looked(setting(model), model, x)
    assert [(one.module, one.cls, one.order) for one in found.modules] == [
        ("0", "Linear", 0), ("1", "ReLU", 1), ("2", "Linear", 2), ("", "Sequential", 3)
    ]  # fmt: skip
    y = model[1](model[0](x)).detach()
    one = by_name(found)["1"]
    assert (one.shape, one.input_shape, one.dtype) == ((10, 8), (10, 8), "float32")
    assert one.mean == pytest.approx(float(y.mean()), rel=1e-5)
    assert one.std == pytest.approx(float(y.std(correction=0)), rel=1e-5)
    assert one.absmax == pytest.approx(float(y.abs().max()))
    assert one.zeros == pytest.approx(float((y == 0).float().mean()))
    assert one.dead == pytest.approx(float((y == 0).all(0).float().mean()))
    assert one.spread == pytest.approx(float(y.std(0, correction=0).mean() / y.abs().mean()), rel=1e-5)
    assert one.saturated is None
    assert one.input_by == ""
    assert found.uncalled == ()


def test_units_of_maps_are_channels_and_of_sequences_the_last_dim() -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU())
    nn.init.constant_(model[0].bias, -100.0)
    with torch.no_grad():
        model[0].bias[0] = 100.0
    assert by_name(looked(setting(model), model, torch.randn(2, 3, 8, 8)))["1"].dead == pytest.approx(5 / 6)
    line: Any = nn.Sequential(nn.Conv1d(3, 6, 3), nn.ReLU())
    nn.init.constant_(line[0].bias, -100.0)
    with torch.no_grad():
        line[0].bias[0] = 100.0
    assert by_name(looked(setting(line), line, torch.randn(2, 3, 8)))["1"].dead == pytest.approx(5 / 6)
    sequence: Any = nn.Sequential(nn.Linear(3, 6), nn.ReLU())
    nn.init.constant_(sequence[0].bias, -100.0)
    with torch.no_grad():
        sequence[0].bias[0] = 100.0
    assert by_name(looked(setting(sequence), sequence, torch.randn(2, 9, 3)))["1"].dead == pytest.approx(5 / 6)


def test_units_that_are_dead_in_all_samples() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with torch.no_grad():
        model[0].bias[:2] = -1000.0
    sampler = setting(model)
    shares = [by_name(looked(sampler, model, torch.randn(2, 4)))["1"] for _ in range(6)]
    assert [one.always_dead for one in shares[:2]] == [0.0, 0.0]  # too few to tell
    assert shares[-1].always_dead == pytest.approx(0.25)
    assert max(one.dead for one in shares) > 0.25
    assert by_name(looked(sampler, model, torch.randn(2, 4)))["0"].always_dead == 0.0


def test_units_that_are_never_positive_are_not_dead() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Hardtanh(-1.0, 0.0))
    with torch.no_grad():
        model[0].weight.abs_()
    assert by_name(looked(setting(model), model, torch.randn(16, 4)))["1"].dead == 0.0


def test_functional_activations_are_seen_as_inputs() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(torch.tanh(self.b(F.relu(self.a(x))) * 1e4))  # type: ignore[no-any-return]

    model = Functional()
    with torch.no_grad():
        model.a.bias[:4] = -1000.0
    sampler = setting(model)
    for _ in range(3):
        found = by_name(looked(sampler, model, torch.randn(64, 4)))
    assert found["a"].input_by == ""
    assert found["b"].input_by == "ReluBackward0"
    assert found["b"].input_dead == found["b"].input_always_dead == pytest.approx(0.5)
    assert found["c"].input_by == "TanhBackward0"


def test_saturation_of_activations() -> None:
    x = torch.randn(16, 4)
    for activation, scale, low, high in (
        (nn.Sigmoid(), 1e5, 0.9, 1.0), (nn.Sigmoid(), 0.1, 0.0, 0.0), (nn.Tanh(), 1e5, 0.9, 1.0),
        (nn.Softmax(-1), 1e6, 0.9, 1.0), (nn.Softmax(-1), 0.1, 0.0, 0.0),
    ):  # fmt: skip
        model: Any = nn.Sequential(nn.Linear(4, 8), activation)
        with torch.no_grad():
            model[0].weight.mul_(scale)
        saturated = by_name(looked(setting(model), model, x))["1"].saturated
        assert saturated is not None
        assert low <= saturated <= high


def test_an_output_that_does_not_depend_on_the_input() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 3))
    nn.init.zeros_(model[0].weight)
    assert by_name(looked(setting(model), model, torch.randn(8, 4)))[""].spread == pytest.approx(0.0, abs=1e-12)
    nn.init.normal_(model[0].weight)
    sample = by_name(looked(setting(model), model, torch.randn(8, 4)))[""]
    assert sample.spread is not None
    assert sample.spread > 0.1
    assert by_name(looked(setting(model), model, torch.randn(1, 4)))[""].spread is None


@pytest.mark.parametrize("value", [-math.inf, -1e12])
def test_places_that_are_masked_say_nothing_of_the_spread(value: float) -> None:
    class Masked(nn.Module):
        def __init__(self, mask: torch.Tensor) -> None:
            super().__init__()
            self.scores, self.mask = nn.Linear(4, 3), mask

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.scores(x)).masked_fill(self.mask, value)

    some = torch.tensor([[False, False, True]])
    for mask in (some, (torch.arange(8) % 2 == 0)[:, None] & some):
        model = Masked(mask)
        spread = by_name(looked(setting(model), model, torch.randn(8, 4)))[""].spread
        assert spread is not None
        assert spread > 0.1
    nn.init.zeros_(model.scores.weight)
    model.mask = some
    assert by_name(looked(setting(model), model, torch.randn(8, 4)))[""].spread == pytest.approx(0.0, abs=1e-12)


def test_where_numbers_stop_to_be_finite() -> None:
    class Log(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.log()

    model: Any = nn.Sequential(nn.Linear(4, 300), Log(), nn.Linear(300, 2))
    nn.init.ones_(model[0].weight)
    nn.init.ones_(model[0].bias)
    x = torch.ones(200, 4)
    x[77] = -1.0
    found = by_name(looked(setting(model), model, x))
    assert math.isfinite(found["0"].absmax)
    assert math.isnan(found["1"].absmax)


def test_modules_that_are_not_called_and_those_in_lists() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
            self.head, self.spare = nn.Linear(4, 1), nn.Linear(4, 1)
            self.scales = nn.ParameterList([torch.ones(1)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x) * self.scales[0]  # type: ignore[no-any-return]

    model = Listed()
    found = looked(setting(model), model, torch.randn(3, 4))
    assert found.uncalled == ("spare",)
    assert [one.module for one in found.modules] == ["layers[0]", "layers[1]", "head", ""]


def test_shared_modules_in_place_writes_and_dictionaries() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            for _ in range(6):
                x = self.act(self.layer(x))
            return {"ids": torch.ones(2, dtype=torch.int64), "x": x}

    model = Shared()
    with torch.no_grad():
        model.layer.bias.fill_(-1000.0)
    found = looked(setting(model), model, torch.randn(3, 4))
    assert [one.module for one in found.modules].count("act") == 6
    assert [one.module for one in found.modules].count("layer") == 4
    first = next(one for one in found.modules if one.module == "layer")
    assert first.mean < -500  # not what the activation wrote over it
    assert first.dead == 0.0


def test_recomputations_and_hooks_leave_no_trace() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    results = []
    for look in (False, True):
        model.load_state_dict(state)
        model.zero_grad()
        torch.manual_seed(2)
        x = torch.randn(6, 4, requires_grad=True)
        sampler = setting(model)
        if look:
            with sampler.attached():
                loss = checkpoint(model, x, use_reentrant=False).sum()
                loss.backward()
            found = sampler.result()
            assert found is not None
            assert len(found.modules) == 5
        else:
            loss = checkpoint(model, x, use_reentrant=False).sum()
            loss.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        buffers = [b.clone() for b in model.buffers()]
        results.append([loss.detach(), *grads, *buffers, torch.get_rng_state()])
        assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_hooks_are_taken_off_after_an_error_and_other_dtypes_are_read() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    sampler = setting(model)
    with pytest.raises(RuntimeError, match="shapes"), sampler.attached():
        model(torch.ones(2, 3))
    assert not model[0]._forward_hooks
    assert sampler.result() is None
    half: Any = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)).bfloat16()
    found = by_name(looked(setting(half), half, torch.tensor([[1, 2], [3, 4]])))
    assert found["1"].dtype == "bfloat16"
    assert found["0"].input_shape == (2, 2)
    assert math.isfinite(found["1"].std)


def test_transforms_and_compiled_models_are_left_alone() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    sampler = setting(model)
    with sampler.attached():
        torch.func.vmap(model)(torch.ones(3, 4))
    sampler.result()
    compiled: Any = torch.compile(model, backend="eager")
    with setting(model).attached():
        pass
    sampler = setting(compiled)
    with sampler.attached():
        assert not model[0]._forward_hooks
