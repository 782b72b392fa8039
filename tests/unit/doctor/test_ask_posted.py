"""What people post about: one number as an input, mixed derivatives, norms of places, states that are lost."""

import ast
import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.ask.calls import _OPTIMIZER, _PLACE, saved_only
from test_doctor_ask import ROWS, answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Given = Callable[[int], torch.Tensor]


class Beside(nn.Module):
    """A net with two inputs, each with a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.one(x) + self.two(beside)).tanh().sum(1)
        return found


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        (lambda step: torch.zeros(ROWS, 4), "yes"),
        (lambda step: torch.ones(ROWS, 4), "yes"),
        (lambda step: torch.full((ROWS, 4), 0.1 * step), "no"),  # as a time of all rows
        (lambda step: torch.arange(4.0).expand(ROWS, 4), "no"),
    ],
)
def test_a_layer_that_is_given_one_number_is_told(beside: Given, expected: str) -> None:
    def train() -> None:
        net = Beside()
        optimizer = torch.optim.Adam(net.parameters())
        for step in range(4):
            x = torch.randn(ROWS, 6)
            optimizer.zero_grad()
            F.mse_loss(net(x, beside(step)), x[:, 0]).backward()
            optimizer.step()

    assert answer(train, "one number") == expected


def laplacian(made: torch.Tensor, place: torch.Tensor, form: str) -> torch.Tensor:
    ones = torch.ones_like
    (first,) = torch.autograd.grad(made, place, ones(made), create_graph=True)
    if form == "whole":
        return torch.autograd.grad(first, place, ones(first), create_graph=True)[0].sum(1)
    if form == "sum":
        return torch.autograd.grad(first.sum(), place, create_graph=True)[0].sum(1)
    columns = [first[:, at : at + 1] for at in range(2)]
    return sum(
        (torch.autograd.grad(one, place, ones(one), create_graph=True)[0][:, at] for at, one in enumerate(columns)),
        torch.zeros(()),
    )


@pytest.mark.parametrize("marked", ["set", "called"])
@pytest.mark.parametrize(("form", "expected"), [("whole", "yes"), ("sum", "yes"), ("columns", "no")])
def test_a_second_derivative_with_the_mixed_ones_is_told(form: str, expected: str, marked: str) -> None:
    def train() -> None:
        net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            place = torch.rand(ROWS, 2)
            if marked == "set":
                place.requires_grad = True
            else:
                place.requires_grad_()
            optimizer.zero_grad()
            made = net(place)
            (laplacian(made, place, form) - made[:, 0]).square().mean().backward()
            optimizer.step()

    assert answer(train, "mixed derivative") == expected


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (lambda slope: (slope.norm(2, dim=1) - 1).square().mean(), "yes"),
        (lambda slope: (slope.flatten(1).norm(2, dim=1) - 1).square().mean(), "no"),
        (lambda slope: slope.norm(2, dim=1).mean(), "no"),  # drawn to no number
    ],
)
def test_a_norm_of_a_derivative_that_is_one_of_each_place_is_told(
    norm: Callable[[torch.Tensor], torch.Tensor], expected: str
) -> None:
    def train() -> None:
        critic = nn.Sequential(nn.Conv2d(1, 4, 3, 1, 1), nn.LeakyReLU(), nn.Flatten(), nn.Linear(4 * 36, 1))
        optimizer = torch.optim.Adam(critic.parameters())
        for _ in range(4):
            pictures = torch.randn(ROWS, 1, 6, 6, requires_grad=True)
            optimizer.zero_grad()
            made = critic(pictures)
            (slope,) = torch.autograd.grad(made.sum(), pictures, create_graph=True)
            (made.mean() + 10 * norm(slope)).backward()
            optimizer.step()

    assert answer(train, "norm of places") == expected


@pytest.mark.parametrize(("share", "expected"), [(0.0005, "yes"), (0.05, "")])
def test_an_average_is_asked_by_a_loss_of_the_scripts_own(share: float, expected: str) -> None:
    nets: list[nn.Module] = []

    def train() -> None:
        net, weights = nn.Linear(6, 1), torch.randn(6, 1)
        slow = copy.deepcopy(net)
        nets.extend((net, slow))  # they are asked after it
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(1, 101):
            x = torch.randn(ROWS, 6)
            optimizer.zero_grad()
            (net(x) - x @ weights).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for one, other in zip(slow.parameters(), net.parameters(), strict=True):
                    one.lerp_(other, share)
                if step % 50 == 0:
                    slow(x)

    assert answer(train, "slow copy") == expected


@pytest.mark.parametrize(("times", "loads", "expected"), [(200.0, True, "yes"), (1.0, True, ""), (200.0, False, "")])
def test_a_new_net_with_the_trained_state_is_asked_for_the_scale_of_its_inputs(
    times: float, loads: bool, expected: str
) -> None:
    def train() -> None:
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(8):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(ROWS, 6)), torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()
        other = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        if loads:
            other.load_state_dict(net.state_dict())
        with torch.no_grad():
            other(times * torch.randn(ROWS, 6))

    assert answer(train, "evaluated inputs") == expected


SAVED = """save({'epoch': 3, 'net': net.state_dict(), 'optimizer': opt.state_dict()}, path)
net.load_state_dict(ckpt['net'])
"""


@pytest.mark.parametrize(
    ("text", "goes_on", "expected"),
    [
        ("start = ckpt['epoch']", True, "yes"),
        ("start = ckpt['epoch']", False, ""),  # it is only evaluated
        ("", True, ""),  # weights to begin with
        ("start = ckpt['epoch']\nopt.load_state_dict(ckpt['optimizer'])", True, ""),
    ],
)
def test_an_optimizer_that_begins_anew_on_a_resume_is_told(
    monkeypatch: pytest.MonkeyPatch, text: str, goes_on: bool, expected: str
) -> None:
    tree = ast.parse(SAVED + text)
    monkeypatch.setattr("anybatch.doctor.ask.calls.scripts", lambda run: [("train.py", tree)])
    nets = []

    def train() -> None:
        state = None
        for again in (False, True):
            net = nn.Linear(6, 3)
            nets.append(net)
            if state is not None:
                net.load_state_dict(state)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            for _ in range(4):
                with torch.set_grad_enabled(goes_on or not again):
                    loss = F.cross_entropy(net(torch.randn(12, 6)), torch.randint(0, 3, (12,)))
                if loss.requires_grad:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            state = net.state_dict()

    assert answer(train, "half resumed") == expected


def test_a_number_that_is_saved_and_only_logged_is_no_resume() -> None:
    tree = ast.parse(SAVED + "log({'epoch': epoch})")
    assert not list(saved_only(tree, key=_OPTIMIZER, beside=_PLACE))


@pytest.mark.parametrize("wall", [0.0, 1e-9])
def test_a_border_of_one_value_says_nothing_of_an_equation_that_is_learned(wall: float) -> None:
    def train() -> None:
        net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
        border, targets = torch.tensor([0.0, 1.0]).repeat(ROWS // 2)[:, None], wall * torch.randn(ROWS, 1)
        for _ in range(60):
            place = torch.rand(ROWS + 3, 1, requires_grad=True)
            optimizer.zero_grad()
            at_border = (net(border) - targets).square().mean()
            (slope,) = torch.autograd.grad(net(place).sum(), place, create_graph=True)
            (at_border + (slope - torch.cos(6.28 * place)).square().mean()).backward()
            optimizer.step()

    assert answer(train, "related") == "unknown"
