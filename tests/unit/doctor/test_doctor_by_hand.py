"""Trainings without an optimizer: the parameters are changed by hand, and the rest can be judged all the same."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.diagnosing import diagnosis
from anybatch.doctor.recorder import Doctor
from anybatch.records.diagnoses import Diagnosis


def trained(
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    net: nn.Module | None = None,
    after: Callable[[nn.Module, int], object] = lambda net, step: None,
) -> Diagnosis:
    """Plain gradient descent, as tutorials write it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)) if net is None else net
    with Doctor(every=5) as doctor:
        for step in range(80):
            x = torch.randn(64, 8)
            loss = loss_fn(net(x), x[:, :3].argmax(1))
            net.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    parameter.data.add_(parameter.grad, alpha=-0.5)
            after(net, step)
    return diagnosis(doctor.run)


def test_one_that_learns_is_healthy() -> None:
    found = trained(F.cross_entropy)
    assert (found.verdict, found.steps) == ("learning", 80), (found.findings, found.reason)


def test_one_that_does_not_learn_is_told_so() -> None:
    found = trained(lambda scores, y: F.cross_entropy(scores * 1e-3, y[torch.randperm(len(y))]))
    assert found.verdict == "not learning", (found.findings, found.reason)


def forgotten(net: nn.Module, step: int) -> None:
    if step == 30:
        net.eval()


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("SOFTMAX_DIM", lambda: trained(lambda scores, y: F.nll_loss(F.log_softmax(scores, 0), y))),
        ("DOUBLE_ACTIVATION", lambda: trained(lambda scores, y: F.cross_entropy(scores.softmax(1), y))),
        ("EVAL_IN_TRAINING", lambda: trained(F.cross_entropy, dropping(), forgotten)),
    ],
)
def test_faults_of_the_loss_and_the_mode_are_found(name: str, program: Callable[[], Diagnosis]) -> None:
    assert [one.name for one in program().causes][:1] == [name]
