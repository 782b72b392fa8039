"""Questions that train a copy, and counterfactuals: right for a sound model, and for one that can't learn."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anybatch.doctor.probing import run_probes
from anybatch.records.lines import Fact
from anybatch.records.lossfacts import LossCall, Probed
from probe_models import Made, Recorder

CALLED = LossCall(function="cross_entropy", classes=4, root=0)


class Losing(Recorder):
    """A recorder that has kept the last call of the loss."""

    def __init__(self, model: nn.Module, *args: Any, loss: Any = None, facts: tuple[Fact, ...] = (CALLED,)) -> None:
        super().__init__(model, *args, facts=facts)
        self.last_losses = {} if loss is None else {0: loss}


def classified(model: nn.Module, facts: tuple[Fact, ...] = (CALLED,)) -> Losing:
    torch.manual_seed(5)
    rows = torch.randn(12, 6)
    labels = torch.arange(12) % 4
    return Losing(model, rows, loss=("cross_entropy", (torch.zeros(12, 4), labels), {}), facts=facts)


def asked(recorder: Recorder) -> dict[str, Probed]:
    return {one.probe: one for one in run_probes(recorder, active=True)}


def test_a_sound_model_fits_one_batch_and_begins_at_the_prior() -> None:
    torch.manual_seed(0)
    found = asked(classified(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 4))))
    assert found["one batch"].answer == "yes", found["one batch"]
    assert found["prior"].answer == "yes"
    assert found["prior"].evidence["prior"] == math.log(4)
    assert abs(found["prior"].evidence["initial"] - math.log(4)) < 0.5


def test_a_model_that_can_not_learn_does_not_fit_one_batch() -> None:
    torch.manual_seed(0)
    found = asked(classified(Made(lambda m, x: m[0](x).detach() + 0 * m[0](x), nn.Linear(6, 4))))
    assert found["one batch"].answer == "no", found["one batch"]


def test_a_first_loss_far_above_the_prior_is_told() -> None:
    torch.manual_seed(0)
    found = asked(classified(Made(lambda m, x: 100 * m[0](x), nn.Linear(6, 4))))
    assert found["prior"].answer == "no"
    assert found["prior"].evidence["initial"] > 5


def test_a_loss_in_the_output_is_used() -> None:
    torch.manual_seed(0)

    def forward(layers: Any, rows: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = layers[0](rows)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    found = asked(Losing(Made(forward, nn.Linear(6, 4)), torch.randn(4, 6), torch.arange(4)))
    assert found["one batch"].evidence["after"] < found["one batch"].evidence["before"]


def test_without_targets_there_is_no_answer() -> None:
    found = asked(Losing(nn.Linear(6, 4), torch.randn(4, 6)))
    for probe in ("prior", "one batch"):
        assert found[probe].answer == "unknown"
        assert "targets" in found[probe].detail


@pytest.mark.parametrize("shape", [(12, 5), (6, 4)])
def test_predictions_of_another_shape_are_not_guessed(shape: tuple[int, int]) -> None:
    recorder = classified(nn.Linear(6, 4))
    recorder.last_losses[0] = ("cross_entropy", (torch.zeros(shape), torch.zeros(shape[0], dtype=torch.long)), {})
    assert asked(recorder)["one batch"].answer == "unknown"


def test_an_own_parameter_can_not_be_initialised_again() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, 4))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows @ self.weight

    found = asked(classified(Own()))["prior"]
    assert (found.answer, "reset_parameters" in found.detail) == ("unknown", True)
