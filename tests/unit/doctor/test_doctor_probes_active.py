"""Questions that train a copy: right for a sound model, and for one that can't learn."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from anybatch.doctor.ask.asking import run_probes
from anybatch.doctor.recorder import Doctor
from anybatch.records.lossfacts import Probed
from probe_models import Made
from test_doctor_ask import nothing_was_compiled

__all__ = ["nothing_was_compiled"]

ROWS, LABELS = torch.randn(12, 6, generator=torch.Generator().manual_seed(5)), torch.arange(12) % 4


def labelled(made: Any) -> torch.Tensor:
    return F.cross_entropy(made, LABELS)


def asked(
    model: nn.Module, loss: Callable[[Any], torch.Tensor] = labelled, *, active: bool = True
) -> dict[str, Probed]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Doctor() as doctor:
        for _ in range(4):
            optimizer.zero_grad()
            loss(model(ROWS)).backward()
            optimizer.step()
    return {one.probe: one for one in run_probes(doctor, active=active)}


def sound() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 4))


def test_a_sound_model_fits_one_batch_and_begins_at_the_prior() -> None:
    found = asked(sound())
    assert found["one batch"].answer == "yes", found["one batch"]
    assert (found["one batch"].root, found["prior"].root) == (0, 0)
    assert found["prior"].answer == "yes"
    assert found["prior"].evidence["prior"] == math.log(4)
    assert abs(found["prior"].evidence["initial"] - math.log(4)) < 0.5


def test_neither_is_asked_unless_that_is_wanted() -> None:
    assert not {"one batch", "prior"} & asked(sound(), active=False).keys()


def test_a_model_that_can_not_learn_does_not_fit_one_batch() -> None:
    torch.manual_seed(0)
    found = asked(Made(lambda m, x: m[0](x).detach() + 0 * m[0](x), nn.Linear(6, 4)))
    assert found["one batch"].answer == "no", found["one batch"]


def test_a_first_loss_far_above_the_prior_is_told() -> None:
    torch.manual_seed(0)
    found = asked(Made(lambda m, x: 100 * m[0](x), nn.Linear(6, 4)))
    assert found["prior"].answer == "no"
    assert found["prior"].evidence["initial"] > 5


def test_a_loss_of_the_models_own_is_fitted_as_well() -> None:
    torch.manual_seed(0)
    found = asked(Made(lambda m, x: {"loss": m[0](x).square().mean()}, nn.Linear(6, 4)), lambda made: made["loss"])
    assert found["one batch"].evidence["after"] < found["one batch"].evidence["before"]
    assert (found["prior"].answer, "classes" in found["prior"].detail) == ("unknown", True)
