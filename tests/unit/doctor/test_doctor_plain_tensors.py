"""Trainings of tensors that no module holds: each is looked at, and steps are asked about as those of modules are."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from anybatch.doctor.diagnosing import diagnosis
from anybatch.doctor.recorder import Doctor
from anybatch.records.diagnoses import Diagnosis
from test_doctor_ask import answer, nothing_was_compiled, torn_scores

__all__ = ["nothing_was_compiled"]

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def train(loss_fn: Loss = F.cross_entropy, left_out: int = 0, moved: bool = False, taken: bool = False) -> None:
    """Two layers of plain tensors, the first of which the optimizer may not have."""
    torch.manual_seed(0)
    weights = [torch.randn(6, 16) / 2, torch.zeros(16), torch.randn(16, 3) / 4, torch.zeros(3)]
    for one in weights:
        one.requires_grad_()
    optimizer = torch.optim.Adam(weights[left_out:], lr=1e-2)
    inputs = torch.randn(500, 6)
    points = torch.randn(24, 6, requires_grad=moved)  # what is differentiated by, as in a penalty
    for _ in range(60):
        x = inputs[torch.randint(0, 500, (24,))] if taken else torch.from_numpy(np.random.randn(24, 6)).float()
        x = points * 1 if moved else x
        hidden = torch.relu(x @ weights[0] + weights[1])
        loss = loss_fn(hidden @ weights[2] + weights[3], x.detach()[:, :3].argmax(1))
        if moved:
            (slope,) = torch.autograd.grad(loss, points, create_graph=True)
            loss = loss + slope.square().sum()
        loss.backward()
        optimizer.step()
        for one in weights:  # clears those that are left out, too
            one.grad = None


def trained(left_out: int = 0, moved: bool = False) -> Diagnosis:
    with Doctor() as doctor:
        train(left_out=left_out, moved=moved)
    return diagnosis(doctor.run)


def test_tensors_that_no_optimizer_has_are_told_of() -> None:
    (found,) = [one for one in trained(left_out=2).findings if one.code == "AB102"]
    assert (found.severity, found.evidence["parameters"]) == ("error", 2)
    assert "were not among the tensors that optimizer was made with" in found.cause


@pytest.mark.parametrize("moved", [False, True])
def test_trained_tensors_and_inputs_with_a_gradient_are_not(moved: bool) -> None:
    found = trained(moved=moved)
    assert not [one for one in found.findings if one.code == "AB102" and one.severity != "info"], found.findings


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return x, x[:3].argmax()


def test_samples_that_a_loader_puts_together_are_no_part_of_a_step() -> None:
    def convolved() -> None:
        weights = [torch.randn(4, 1, 3, 3) / 3, torch.randn(144, 3) / 9]
        optimizer = torch.optim.SGD([one.requires_grad_() for one in weights], 0.1)
        for x, y in torch.utils.data.DataLoader(Numbers(), batch_size=32):
            hidden = F.conv2d(x.view(-1, 1, 8, 8), weights[0]).relu().flatten(1)
            optimizer.zero_grad()
            F.cross_entropy(hidden @ weights[1], y).backward()
            optimizer.step()

    assert answer(convolved, "rows") == "no"


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize(("loss_fn", "expected"), [(F.cross_entropy, "no"), (torn_scores, "yes")])
def test_a_step_without_a_module_is_asked_about(loss_fn: Loss, expected: str, taken: bool) -> None:
    assert answer(lambda: train(loss_fn, taken=taken), "rows") == expected
