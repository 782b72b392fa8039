"""Masks that were turned apart from their pictures are told, and those that lie on them or say nothing are not."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Pair = tuple[torch.Tensor, torch.Tensor]
Make = Callable[[], Pair]
SIDE = 16


def box(height: int = SIDE) -> torch.Tensor:
    mask = torch.zeros(height, SIDE)
    y, x = (int(torch.randint(0, size - 6, ())) for size in mask.shape)
    mask[y : y + 6, x : x + 4] = 1
    return mask


def shown(mask: torch.Tensor) -> torch.Tensor:
    return mask[None] * torch.tensor([1.0, -0.5])[:, None, None] + 0.2 * torch.randn(2, *mask.shape)


def aligned() -> Pair:
    mask = box()
    return shown(mask), mask


def turned() -> Pair:
    image, mask = aligned()
    return image, mask.rot90(int(torch.randint(0, 4, ())))


def exchanged() -> Pair:
    image, mask = aligned()
    return image, mask.T


def flipped() -> Pair:
    mask = box(24)
    return shown(mask), mask.flip(1) if torch.rand(()) < 0.5 else mask


def faint(*, is_turned: bool = False) -> Pair:
    """What lies under a mask is hardly brighter than the rest."""
    mask = box()
    picture = 0.75 * mask[None] + 0.5 * torch.randn(2, SIDE, SIDE)
    return picture, mask.rot90(int(torch.randint(0, 4, ()))) if is_turned else mask


def faint_and_turned() -> Pair:
    return faint(is_turned=True)


def both() -> Pair:
    image, mask = aligned()
    turn = int(torch.randint(0, 4, ()))
    return image.rot90(turn, (1, 2)), mask.rot90(turn)


def centred() -> Pair:
    mask = torch.zeros(SIDE, SIDE)
    mask[4:12, 4:12] = 1
    return shown(mask), mask


def lit() -> Pair:
    """Light from some side, and masks that have nothing to do with it."""
    side = torch.linspace(-1, 1, SIDE).expand(2, SIDE, SIDE)
    return side.rot90(int(torch.randint(0, 4, ())), (1, 2)) + 0.1 * torch.randn(2, SIDE, SIDE), box()


def rough() -> Pair:
    mask = box()
    return torch.randn(2, SIDE, SIDE) * (0.2 + mask), mask


def moved() -> Pair:
    """Where a thing will be a moment later."""
    image, mask = aligned()
    return image, mask.roll(2, 1)


def cells() -> Pair:
    """A thing somewhere, and a grid of cells in which the one of its middle is marked, as that of a detector."""
    grid = torch.zeros(5, 5)
    y, x = (int(one) for one in torch.randint(0, 5, (2,)))
    grid[y, x] = 1
    picture = 0.2 * torch.randn(2, 30, 30)
    picture[:, 6 * y : 6 * y + 5, 6 * x : 6 * x + 7] += 1
    return picture, grid


def cells_exchanged() -> Pair:
    picture, grid = cells()
    return picture, grid.T


def cells_elsewhere() -> Pair:
    return cells()[0], cells()[1]


def cells_below_a_lamp() -> Pair:
    """A light that is always above, and a dark thing that is always below it."""
    grid = torch.zeros(5, 5)
    grid[4, int(torch.randint(0, 2, ()))] = 1
    picture = 0.2 * torch.randn(2, 30, 30)
    picture[:, :6, :12] += 2
    return picture, grid


def train(make: Make) -> None:
    side = len(make()[1])
    net = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.AdaptiveAvgPool2d(side) if side == 5 else nn.Identity())
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(10):
        images, masks = (torch.stack(one) for one in zip(*(make() for _ in range(8)), strict=True))
        optimizer.zero_grad()
        F.cross_entropy(net(images), masks.long()).backward()
        optimizer.step()


def slid(*, both: bool = False) -> Pair:
    """A patch of any size, and its mask shifted by a draw of its own, or both by the same."""
    mask = torch.zeros(24, 24)
    y, x, height, width = (int(torch.randint(low, high, ())) for low, high in ((4, 12), (4, 12), (2, 9), (2, 9)))
    mask[y : y + height, x : x + width] = 1
    picture = 0.2 * torch.randn(2, 24, 24) + mask
    by = torch.randint(-6, 7, (2,)).tolist()
    return (picture.roll(by, (1, 2)) if both else picture), mask.roll(by, (0, 1))


@pytest.mark.parametrize("make", [turned, slid, exchanged, flipped, faint_and_turned, cells_exchanged])
def test_masks_that_are_turned_apart_are_told(make: Make) -> None:
    assert answer(lambda: train(make), "apart") == "yes"


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(slid, both=True),
        aligned,
        faint,
        both,
        centred,
        lit,
        rough,
        moved,
        cells,
        cells_elsewhere,
        cells_below_a_lamp,
    ],
)
def test_masks_that_lie_on_their_pictures_or_say_nothing_are_not(make: Make) -> None:
    assert answer(lambda: train(make), "apart") in ("no", "unknown")
