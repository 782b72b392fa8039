"""Healthy trainings that look like what the questions are for: nothing is told of them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.records.lossfacts import Evaluated, LossCall, Walk
from number_runs import Training, call, falling, fires, quiet
from test_doctor_ask import ROWS, answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Step = Callable[[nn.Module], torch.Tensor]


def trains(net: nn.Module, step: Step, times: int = 4) -> Callable[[], None]:
    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(times):
            optimizer.zero_grad()
            step(net).backward()
            optimizer.step()

    return train


class Tasks(nn.Module):
    """Two heads on a table, and a category beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.one, self.two = nn.Embedding(4, 3), nn.Linear(9, 2), nn.Linear(9, 2)

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.cat([x, self.kinds(kind)], 1)
        return self.one(x), self.two(x)


@pytest.mark.parametrize("seed", range(4))
def test_labels_of_few_classes_are_no_edges(seed: int) -> None:
    def step(net: nn.Module) -> torch.Tensor:
        torch.manual_seed(seed)
        x, kind = torch.randn(256, 6), torch.randint(0, 4, (256,))
        y, z = torch.randint(0, 2, (2, 256))
        one, two = net(x, kind)
        return F.cross_entropy(one, y) + F.cross_entropy(two, z)

    assert answer(trains(Tasks(), step), "torn edges") != "yes"


def test_flipped_pictures_keep_their_labels() -> None:
    pictures, labels = torch.rand(16, 3, 6, 6), (torch.rand(16, 4) > 0.5).float()
    flips = iter([False, True] * 8)

    def step(net: nn.Module) -> torch.Tensor:
        x = pictures.flip(-1) if next(flips) else pictures
        return F.binary_cross_entropy_with_logits(net(x), labels)

    net = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
    assert answer(trains(net, step, times=12), "mirrored") != "yes"


def test_scores_that_are_differences_are_all_to_be_positive() -> None:
    def run(*others: LossCall, **kinds: int) -> Training:
        alone = call("binary_cross_entropy_with_logits", target_low=1.0, target_high=1.0)
        walk = Walk(nodes=9, kinds={"AddmmBackward0": 2, **kinds})
        loss = lambda step: 0.69 if step < 2 else 0.01  # noqa: E731
        return Training(steps=60, call=alone, loss=loss, every=lambda step: [walk, *others])

    fires(run().run(), "TARGETS_CONSTANT", "warning")
    quiet(run(SubBackward0=1).run(), "TARGETS_CONSTANT")
    fires(run(call("mse_loss", line=40, value=0.1)).run(), "TARGETS_CONSTANT", "warning")
    drawn = call("binary_cross_entropy_with_logits", line=40, value=0.1, target_low=0.0, target_high=0.0)
    quiet(run(drawn).run(), "TARGETS_CONSTANT")


def test_a_first_batch_of_one_value_is_not_all_of_an_evaluation() -> None:
    calls = [call("mse_loss", value=0.1, target_mean=3.0, target_std=1.0) for _ in range(4)]
    last = Evaluated(function="mse_loss", value=1.0, scales=(3.0, 1.0, 4.0, 0.0), items=1000, guess=1.1)
    quiet(Training(loss=falling, after=(*calls, last)).run(), "EVALUATION_INPUTS")


@pytest.mark.parametrize(("symbols", "expected"), [(1, "yes"), (20, "")])
def test_a_net_that_is_given_one_row_of_symbols_only_is_told(symbols: int, expected: str) -> None:
    net = nn.Sequential(nn.Embedding(20, 3), nn.Flatten(), nn.Linear(12, 3))

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(12):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randint(0, symbols, (ROWS, 4))), torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()

    assert answer(train, "inputs alike") == expected


@pytest.mark.parametrize(("torn", "expected"), [(False, "yes"), (True, "no")])
def test_targets_of_an_episode_which_are_no_rows_of_the_batch_are_asked_about(torn: bool, expected: str) -> None:
    torch.manual_seed(0)
    net, kinds, labels = nn.Linear(8, 6), 3 * torch.randn(4, 8), torch.arange(4).repeat(12)

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        for _ in range(40):
            support, query = (kinds.repeat(count, 1) + torch.randn(4 * count, 8) for count in (5, 12))
            scores = -torch.cdist(net(query), net(support).view(5, 4, -1).mean(0))
            optimizer.zero_grad()
            F.cross_entropy(scores, labels[torch.randperm(48)] if torn else labels).backward()
            optimizer.step()

    assert answer(train, "related") == expected
