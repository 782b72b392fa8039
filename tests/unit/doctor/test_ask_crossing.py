"""Reshapes that read across the axes of a layer's outputs are told, and those that cut or join axes are not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.ask.axes import reads_across, tears_heads
from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

ROWS, CLASSES = 8, 4
Scores = Callable[[torch.Tensor], torch.Tensor]


def pixels(head: nn.Module, of: Scores) -> None:
    """Trains a net of pictures on a class for each pixel and anchor."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), head)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        made = of(net(torch.randn(ROWS, 3, 8, 6)))
        y = torch.randint(0, made.shape[1], made.shape[:1] + made.shape[2:])
        optimizer.zero_grad()
        F.cross_entropy(made, y).backward()
        optimizer.step()


def anchored(made: torch.Tensor) -> torch.Tensor:
    n, _, h, w = made.shape
    return made.view(n, -1, CLASSES, h, w).permute(0, 1, 3, 4, 2).reshape(-1, CLASSES)


@pytest.mark.parametrize(
    ("channels", "of", "expected"),
    [
        (CLASSES, lambda made: made.reshape(-1, CLASSES), "yes"),
        (3 * CLASSES, lambda made: made.view(ROWS, -1, CLASSES).transpose(1, 2), "yes"),
        (CLASSES, lambda made: made.flatten(2).log_softmax(1).contiguous().view(-1, CLASSES), "yes"),
        (CLASSES, lambda made: made.permute(0, 2, 3, 1).reshape(-1, CLASSES), "no"),
        (CLASSES, lambda made: made.view(ROWS, CLASSES, -1), "no"),
        (CLASSES, lambda made: made, "no"),
        (3 * CLASSES, anchored, "no"),
        (48, lambda made: made.view(ROWS * 48, -1), "no"),  # a place is what is chosen
        (5, lambda made: made.reshape(ROWS * 5, -1), "no"),
        (4 * CLASSES, lambda made: F.pixel_shuffle(made, 2), "no"),
    ],
)
def test_pixels_in_the_place_of_classes_are_told(channels: int, of: Scores, expected: str) -> None:
    assert answer(lambda: pixels(nn.Conv2d(8, channels, 1), of), "axes") == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([16, 3, 32, 32], [16384, 3], True),  # scores of pixels
        ([16, 3, 10, 8], [16, 10, 24], True),  # heads
        ([16, 12, 5, 14], [16, 14, 60], True),  # columns of pictures as times
        ([16, 10, 24], [160, 24], False), ([16, 10, 24], [16, 10, 3, 8], False), ([16, 10, 8], [16, 5, 16], False),
        ([10, 16, 24], [10, 48, 8], False), ([8, 12, 8, 8], [32, 192], False), ([6, 12, 7, 9], [6, 756], False),
    ],
)  # fmt: skip
def test_only_another_order_of_axes_gives_what_is_read(before: list[int], after: list[int], expected: bool) -> None:
    assert reads_across(before, after) == expected


class Skewed(nn.Module):
    """Scores of distances, skewed as in Transformer-XL: a column of zeros, and rows that begin one place later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.distances, self.last = nn.Linear(4, 8), nn.Parameter(torch.randn(10, 8)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        scores = torch.cat([torch.zeros(len(x), 10, 1), h @ self.distances.t()], -1)
        scores = scores.view(len(x), 11, 10)[:, 1:].reshape(len(x), 10, 10)
        made: torch.Tensor = self.last((scores.softmax(-1) @ h).mean(1))
        return made


class SkewedWithout(Skewed):
    """The same without padding, as in XLNet, which has one distance more."""

    def __init__(self) -> None:
        super().__init__()
        self.distances = nn.Parameter(torch.randn(13, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        scores = h @ self.distances.t()
        scores = scores.reshape(len(x), 13, 10)[:, 1:].reshape(len(x), 10, 12)[..., :10]
        made: torch.Tensor = self.last((scores.softmax(-1) @ h).mean(1))
        return made


@pytest.mark.parametrize("kind", [Skewed, SkewedWithout])
def test_a_skewed_table_is_not_told(kind: type[Skewed]) -> None:
    def train() -> None:
        net = kind()
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(ROWS, 10, 4)), torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()

    assert answer(train, "axes") == "no"


PLACES, HEADS, WIDTH = 6, 2, 4


class Attending(nn.Module):
    """An attention, with what cuts the heads from the features, and what puts them together."""

    def __init__(self, cut: Scores, join: Scores, fused: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.cut, self.join = nn.Linear(4, 3 * HEADS * WIDTH), nn.Linear(8, 3), cut, join
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.cut(one) for one in self.qkv(x).chunk(3, -1))
        if self.fused:
            found = F.scaled_dot_product_attention(q, k, v)
        else:
            found = (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
        made: torch.Tensor = self.out(self.join(found)).reshape(len(x), PLACES, 3).mean(1)
        return made


def as_meant(one: torch.Tensor) -> torch.Tensor:
    return one.reshape(len(one), PLACES, HEADS, WIDTH).transpose(1, 2)


def torn(one: torch.Tensor) -> torch.Tensor:
    return one.reshape(len(one), HEADS, PLACES, WIDTH)


def joined(one: torch.Tensor) -> torch.Tensor:
    return one.transpose(1, 2).reshape(len(one), PLACES, HEADS * WIDTH)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("cut", "join", "expected"),
    [
        (torn, joined, "yes"),
        (torn, lambda one: one.reshape(len(one), PLACES, -1), "yes"),
        (as_meant, lambda one: one.reshape(len(one), PLACES, -1), "yes"),
        (as_meant, lambda one: one.reshape(-1, HEADS * WIDTH), "yes"),
        (as_meant, joined, "no"),
        (as_meant, lambda one: one.transpose(1, 2).reshape(-1, HEADS * WIDTH), "no"),
        (as_meant, lambda one: one.transpose(1, 2).flatten(2), "no"),
        (lambda one: as_meant(one).reshape(-1, PLACES, WIDTH),
         lambda one: joined(one.reshape(-1, HEADS, PLACES, WIDTH)), "no"),
    ],
)  # fmt: skip
def test_heads_with_features_of_other_places_are_told(cut: Scores, join: Scores, expected: str, fused: bool) -> None:
    def train() -> None:
        net = Attending(cut, join, fused)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(ROWS, PLACES, 4)), torch.randint(0, 3, (ROWS,))).backward()
            optimizer.step()

    assert answer(train, "axes") == expected


@pytest.mark.parametrize(
    ("whole", "parts", "expected"),
    [
        ([64, 16, 32], [64, 4, 16, 8], True),
        ([64, 32, 32], [64, 4, 32, 8], True),  # as many places as features
        ([64, 16, 32], [64, 4, 8, 16], True),  # keys that are turned already
        ([1024, 32], [64, 4, 16, 8], True),  # rows and places in one axis
        ([64, 2, 16, 32], [64, 2, 4, 16, 8], True),
        ([64, 16, 32], [64, 16, 4, 8], False),
        ([64, 4, 32], [64, 4, 4, 8], False),  # as many heads as places
        ([64, 32, 16], [64, 4, 8, 16], False),  # features before places
        ([64, 32, 32], [64, 4, 8, 32], False),
        ([64, 64, 16], [64, 4, 16, 16], False),
        ([1024, 32], [64, 16, 4, 8], False), ([64, 512], [64, 4, 16, 8], False), ([64, 16, 32], [64, 4, 4, 32], False),
        ([16, 64, 32], [16, 256, 8], False), ([64, 8, 8, 32], [64, 2, 4, 2, 4, 32], False),
    ],
)  # fmt: skip
def test_heads_are_torn_only_where_places_lie_behind_them(whole: list[int], parts: list[int], expected: bool) -> None:
    assert tears_heads(whole, parts) is expected
