"""Weights that are plain tensors, or a model's, and are changed by hand, without any optimizer."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from anybatch.doctor.diagnosing import diagnosis
from anybatch.doctor.recorder import Doctor
from anybatch.records.diagnoses import Diagnosis

After = Callable[[torch.Tensor], None]


def trained(after: After, *, rate: float = 0.1, updates: int = 60, of: str = "tensors") -> Diagnosis:
    """A linear regression whose weights move along their gradients, and what is done with each behind its update."""
    torch.manual_seed(0)
    x, net = torch.randn(50, 3), nn.Linear(3, 1)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 3
    w, b = torch.zeros(3, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    with Doctor() as doctor:
        for _ in range(updates):
            loss = ((net(x) if of == "a model" else x @ w + b) - y).square().mean()
            loss.backward()
            for each in net.parameters() if of == "a model" else (w, b):
                assert each.grad is not None
                with torch.no_grad():
                    each.sub_(rate * each.grad)
                after(each)
    return diagnosis(doctor.run)


def nothing(each: torch.Tensor) -> None:
    pass


def dropped(each: torch.Tensor) -> None:
    each.grad = None


def zeroed(each: torch.Tensor) -> None:
    assert each.grad is not None
    each.grad.zero_()


def zeroed_behind(each: torch.Tensor) -> None:
    """As tutorials of old have it; no version counts it."""
    assert each.grad is not None
    each.grad.data.zero_()


def decayed(each: torch.Tensor) -> None:
    """A momentum of 0.5 that lives in the gradient itself."""
    assert each.grad is not None
    each.grad *= 0.5


@pytest.mark.parametrize("of", ["tensors", "a model"])
def test_updates_by_hand_whose_gradients_nothing_clears_are_told(of: str) -> None:
    found = trained(nothing, of=of)
    assert [one.name for one in found.roots] == ["ZERO_GRAD_MISSING"]
    assert "clears .grad before the next backward" in found.roots[0].message


@pytest.mark.parametrize("of", ["tensors", "a model"])
@pytest.mark.parametrize("after", [dropped, zeroed, zeroed_behind, decayed])
def test_updates_by_hand_are_followed_and_healthy_where_they_learn(after: After, of: str) -> None:
    found = trained(after, of=of)
    assert (found.findings, found.verdict) == ((), "learning")
    assert {name for cell in found.cells for name in cell.parameters} >= ({"w", "b"} if of == "tensors" else set())
    assert all(cell.cell == 1 for cell in found.cells)


@pytest.mark.parametrize("of", ["tensors", "a model"])
def test_updates_by_hand_that_are_far_too_long_are_told(of: str) -> None:
    found = trained(dropped, rate=1.5, of=of)
    assert found.roots[0].name == "LR_TOO_HIGH"
    assert found.roots[0].evidence["after"] > found.roots[0].evidence["loss"]


def test_each_tensor_is_a_row_of_its_own() -> None:
    assert [cell.module for cell in trained(dropped).cells] == ["b", "w"]


@pytest.mark.parametrize("clears", [True, False])
def test_two_that_take_turns_and_clear_their_own_gradients_are_healthy(clears: bool) -> None:
    """Each is cleared before its own backward, and has its gradient still when that of the other one begins."""
    torch.manual_seed(0)
    target = torch.randn(20, 2) @ torch.randn(2, 12)
    left, right = torch.randn(20, 2, requires_grad=True), torch.randn(2, 12, requires_grad=True)
    with Doctor() as doctor:
        for step in range(60):
            mine = (left, right)[step % 2]
            if clears:
                mine.grad = None
            (left @ right - target).square().mean().backward()
            assert mine.grad is not None
            with torch.no_grad():
                mine.sub_(0.5 * mine.grad)
    assert not [one for one in diagnosis(doctor.run).findings if one.name == "ZERO_GRAD_MISSING"]


def test_what_is_derived_before_a_model_is_made_is_no_weight_of_it() -> None:
    """A notebook shows autograd first."""
    torch.manual_seed(0)
    with Doctor() as doctor:
        a = torch.tensor([2.0, 3.0], requires_grad=True)
        (a.square().sum()).backward()
        net = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        for _ in range(30):
            x = torch.randn(50, 3)
            optimizer.zero_grad()
            (net(x) - x[:, :1]).square().mean().backward()
            optimizer.step()
    assert not diagnosis(doctor.run).findings


def test_a_loss_that_falls_before_it_is_no_number_has_not_grown() -> None:
    torch.manual_seed(0)
    w = torch.full((3,), 1.0, requires_grad=True)
    with Doctor() as doctor:
        for _ in range(40):
            loss = (w.square() + 1e-3).log().sum() if w.min() > 0.2 else (w - 2 * w.detach()).log().sum()
            w.grad = None
            loss.backward()
            assert w.grad is not None
            with torch.no_grad():
                w.sub_(0.05 * w.grad)
    assert not [one for one in diagnosis(doctor.run).findings if one.name == "LR_TOO_HIGH"]
