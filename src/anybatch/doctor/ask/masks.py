"""Do masks lie on their pictures, or were the two turned or flipped apart?"""

from collections.abc import Iterator
from typing import Any

import torch

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import Probed

_LEAST, _MOST, _LEAST_SIDE, _MOST_CLASSES = 20, 200, 12, 21
_LEAST_GRID = 4
_ERRORS, _SOMETHING = 6.0, 0.1  # standard errors of what one way explains more, and of the variance it has to explain
_CLEAR = 0.3  # of the variance of a channel that a mask explains where it lies on what it shows
_MOST_CLEAR = 0.5  # of the pictures: fewer explain more than the pictures of other masks by accident
_BETTER = 2.0  # times as much is explained where it is turned
_SHARE = 0.2  # of the clear pictures, as of those that are turned by one of four, and not only flipped at a time


def apart(kept: Kept, root: int) -> Probed:
    """Whether many masks explain their picture far better when they are turned or flipped."""
    own, other = [], []
    pairs = list(_pairs(kept, root))
    for number, (picture, mask) in enumerate(pairs):
        own.append(_explained(picture, mask))
        other.append(_explained(pairs[number - 1][0], mask))
    if len(own) < _LEAST:
        raise Unknown("few masks of pictures were kept")
    shares, others, best = torch.stack(own), torch.stack(other), torch.stack(own).max(1).values
    if (share := _all_alike(shares, others)) > 0:
        return told("apart", root=root, answer="yes", share=share, masks=len(own))
    clear = best > max(_CLEAR, float(others.max(1).values.quantile(0.9)))
    if clear.double().mean() < _MOST_CLEAR:
        raise Unknown("masks explain little of the colours of their pictures")
    share = float((_BETTER * shares[:, 0] < best)[clear].double().mean())
    seen: dict[str, Any] = {"share": share, "masks": int(clear.sum())}
    return told("apart", root=root, answer="yes" if share > _SHARE else "no", **seen)


def _all_alike(shares: torch.Tensor, others: torch.Tensor) -> float:
    """Of how many pictures one way to turn all masks explains more, where it does so surely; 0 where it does not.

    More than the mask as it is, and than that of another picture: what lies at one place in all pictures tells nothing.
    """
    way = int(shares.mean(0).argmax())
    gained = [shares[:, way] - one for one in (shares[:, 0], others[:, way])]
    sure = all(float(one.mean()) > _ERRORS * float(one.std()) / len(one) ** 0.5 for one in gained)
    much = all(_BETTER * float(one.mean()) > float(shares[:, way].mean()) > _SOMETHING for one in gained)
    return float((gained[0] > 0).double().mean()) if way and sure and much else 0.0


def _pairs(kept: Kept, root: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pictures with a mask of few classes of the same size, or with a coarse grid of them, as detectors have."""
    count = 0
    for pictures, _, given in kept.batches.get(root, ()):
        masks = given["target"]
        masks = masks[:, 0] if masks.dim() == 4 and masks.shape[1] == 1 else masks
        sides = pictures.shape[2:]
        if pictures.dim() != 4 or not pictures.is_floating_point() or min(sides) < _LEAST_SIDE:
            return
        if masks.dim() != 3 or len(masks) != len(pictures) or len(masks.unique()) > _MOST_CLASSES:
            continue  # what else a loss has, such as boxes
        if masks.shape[1:] != sides and (
            min(masks.shape[1:]) < _LEAST_GRID
            or any(side % one for side, one in zip(sides, masks.shape[1:], strict=True))
        ):
            return
        seen = torch.nn.functional.adaptive_avg_pool2d(pictures.double(), tuple(masks.shape[1:]))
        for pair in zip(seen, masks, strict=True):
            if count < _MOST:
                count += 1
                yield pair


def _explained(picture: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The share of the variance of the best channel that each way to turn a mask explains; as it is comes first."""
    flat = picture.reshape(len(picture), -1)
    away = flat - flat.mean(1, keepdim=True)
    total = away.pow(2).sum(1).clamp_min(1e-12)
    found = []
    for turned in _ways(mask):
        classes = turned.reshape(-1).unique(return_inverse=True)[1]
        sums = away.new_zeros(len(away), int(classes.max()) + 1).index_add_(1, classes, away)
        found.append((sums.pow(2) / classes.bincount()).sum(1).div(total).max())
    return torch.stack(found)


def _ways(mask: torch.Tensor) -> list[torch.Tensor]:
    """A mask, and as it is when it is turned or flipped."""
    quarters = (0, 1, 2, 3) if mask.shape[0] == mask.shape[1] else (0, 2)
    return [one for quarter in quarters for one in (mask.rot90(quarter), mask.rot90(quarter).flip(1))]
