"""Models, coupled losses and batches for the tests of their plans; every factory gives the same numbers each time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import anybatch

WIDTH = 24
LENGTH = 12


class Tower(nn.Module):
    """Blocks that keep four times what they are given; the mean over points that are not padding is what comes out."""

    def __init__(self, blocks: int = 2, outputs: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        middle: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), *middle, nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(blocks)
        )
        self.out = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        if lengths is None:
            points = x.mean(1)
        else:
            is_there = torch.arange(x.shape[1]) < lengths[:, None]
            points = torch.einsum("npw,np->nw", x, is_there / lengths[:, None])
        y: Tensor = self.out(points)
        return y


class Pair(nn.Module):
    """Two towers and a temperature, as in CLIP."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.image, self.text = Tower(2, dropout=dropout), Tower(1)
        self.scale = nn.Parameter(torch.tensor(0.5))


class Normed(nn.Module):
    """Convolutions with BatchNorm, which are not split."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv1d(LENGTH, LENGTH, 3, padding=1), nn.BatchNorm1d(LENGTH), nn.ReLU())
              for _ in range(4))
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x).mean(1)
        return y


class Reader(nn.Module):
    """A recurrent encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(WIDTH, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.rnn(x)[1][0])
        return y


class Pixels(nn.Module):
    """A mask of as many numbers as the picture has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


@dataclass(frozen=True, eq=False)
class CoupledSubject:
    """One thing to plan for.

    Args:
        model: a fresh one, in training mode.
        loss_fn: a coupled one.
        batch: makes a logical batch of so many samples.
        adam: whether AdamW steps, else plain SGD.
        tolerance: how far a predicted peak may be from the measured one, relative.
        options: further arguments of ``TrainStep``.
    """

    model: nn.Module
    loss_fn: anybatch.Coupled
    batch: Callable[[int], Any]
    adam: bool = True
    tolerance: float = 0.005
    options: dict[str, Any] = field(default_factory=dict)

    def optimizer(self) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        return torch.optim.SGD(self.model.parameters(), lr=1e-2)

    def step(self, **options: Any) -> anybatch.TrainStep:
        return anybatch.TrainStep(self.model, self.loss_fn, self.optimizer(), **{**self.options, **options})


def points(n: int, seed: int = 1) -> Tensor:
    return torch.randn(n, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def pairs(n: int) -> dict[str, Tensor]:
    return {"a": points(n), "b": points(n, 2), "y": torch.arange(n) % 5}


def contrast(model: Any, outputs: Any) -> Tensor:
    """InfoNCE in one direction."""
    a, b = (F.normalize(x, dim=-1) for x in outputs)
    return F.cross_entropy(a @ b.T * model.scale.exp(), torch.arange(len(a)))


def contrast_rows(model: Any, outputs: Any, rows: slice) -> Tensor:
    a, b = (F.normalize(x, dim=-1) for x in outputs)
    return F.cross_entropy(a[rows] @ b.T * model.scale.exp(), torch.arange(len(a))[rows])


def encode_pair(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return model.image(batch["a"]), model.text(batch["b"])


def supervised(model: Any, outputs: Any, batch: Any) -> Tensor:
    """SupCon over labels of the batch."""
    x = F.normalize(outputs, dim=-1)
    near = (batch["y"][:, None] == batch["y"]).float().fill_diagonal_(0)
    log = (x @ x.T / 0.2).fill_diagonal_(-1e4).log_softmax(1)
    found: Tensor = -(near * log).sum() / near.sum().clamp(min=1)
    return found


def mined(model: Any, outputs: Any, batch: Any) -> Tensor:
    """Triplets of which only the hard ones count, which nobody knows without numbers."""
    distances = torch.cdist(outputs, outputs)
    same = batch["y"][:, None] == batch["y"]
    hard = distances[same].max()
    near = distances[~same & (distances < hard + 0.3)]
    found: Tensor = (hard - near + 1.0).relu().sum() / max(1, len(near))
    return found


def barlow(model: Any, outputs: Any) -> Tensor:
    a, b = ((x - x.mean(0)) / (x.std(0) + 1e-3) for x in outputs)
    c = a.T @ b / len(a)
    found: Tensor = (c - torch.eye(len(c))).square().sum()
    return found


def dice(model: Any, outputs: Any, batch: Any) -> Tensor:
    p = outputs.sigmoid()
    found: Tensor = 1 - (2 * (p * batch["mask"]).sum() + 1) / (p.sum() + batch["mask"].sum() + 1)
    return found


def pictures(n: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(n, 1, 20, 20, generator=generator),
        "mask": (torch.rand(n, 1, 20, 20, generator=generator) > 0.6).float(),
    }


def one(model: Any, batch: Any) -> Tensor:
    y: Tensor = model(batch["a"])
    return y


def raw(n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(4 + int(k) % 9, WIDTH, generator=generator) for k in range(n)]


def padded(samples: list[Tensor]) -> dict[str, Tensor]:
    return {"a": pad_sequence(samples, batch_first=True), "lengths": torch.tensor([len(sample) for sample in samples])}


def one_text(model: Any, batch: Any) -> Tensor:
    y: Tensor = model(batch["a"], batch["lengths"])
    return y


def spread(model: Any, outputs: Any) -> Tensor:
    """Samples are pushed away from each other."""
    return torch.cdist(outputs, outputs).neg().exp().mean()


def clip() -> CoupledSubject:
    return CoupledSubject(Pair(), anybatch.Coupled(encode_pair, contrast), pairs)


def clip_in_rows() -> CoupledSubject:
    return CoupledSubject(Pair(), anybatch.Coupled(encode_pair, contrast_rows, row_block=8), pairs, adam=False)


def clip_with_dropout() -> CoupledSubject:
    return CoupledSubject(Pair(0.2), anybatch.Coupled(encode_pair, contrast), pairs)


def supcon() -> CoupledSubject:
    return CoupledSubject(Tower(), anybatch.Coupled(one, supervised), pairs)


def triplets() -> CoupledSubject:
    return CoupledSubject(Tower(), anybatch.Coupled(one, mined), pairs, tolerance=0.02)


def twins() -> CoupledSubject:
    def encode(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch["a"]), model(batch["b"])

    return CoupledSubject(Tower(2, 16), anybatch.Coupled(encode, barlow), pairs, adam=False)


def segmentation() -> CoupledSubject:
    return CoupledSubject(Pixels(), anybatch.Coupled(lambda model, batch: model(batch["x"]), dice), pictures)


def batchnorm() -> CoupledSubject:
    return CoupledSubject(Normed(), anybatch.Coupled(one, spread), pairs)


def recurrent() -> CoupledSubject:
    return CoupledSubject(Reader(), anybatch.Coupled(one, spread), pairs, tolerance=0.02)


def texts() -> CoupledSubject:
    return CoupledSubject(Tower(2), anybatch.Coupled(one_text, spread), raw, options={"collate": padded})


def texts_by_cost() -> CoupledSubject:
    options = {"collate": padded, "cost": len}
    return CoupledSubject(Tower(2), anybatch.Coupled(one_text, spread), raw, options=options)


FACTORIES: dict[str, Callable[[], CoupledSubject]] = {
    factory.__name__: factory
    for factory in (
        clip, clip_in_rows, clip_with_dropout, supcon, triplets, twins, segmentation, batchnorm, recurrent, texts,
        texts_by_cost,
    )
}  # fmt: skip


def subject_of(name: str) -> CoupledSubject:
    """A fresh one; torch's random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FACTORIES[name]()
