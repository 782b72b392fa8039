"""The noise scale of a real model at frozen weights: over 200 draws its interval of 90 % holds the truth in 85 to 95 %.

How it could be silently wrong: an interval that is right for normal gradients and too narrow for those of a network,
whose samples differ much; estimates of one batch taken for more measurements than they are.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import NoiseScale

DRAWS = 200
CUTS = {"even": (16, 16, 16, 16), "uneven": (3, 13, 1, 15, 8, 8, 11, 5)}


def gradients_of_samples() -> torch.Tensor:
    """The gradient of each of 2048 samples at the weights that some steps have led to, as rows."""
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5)).double()
    x = torch.randn(2048, 8, dtype=torch.float64)
    y = (x @ torch.randn(8, 5, dtype=torch.float64)).argmax(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def of_one(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (x[None],)), y[None])

    each = torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0, 0))(values, x, y)
    return torch.cat([gradient.flatten(1) for gradient in each.values()], 1)


def draw(gradients: torch.Tensor, sizes: tuple[int, ...], measurements: int) -> NoiseScale:
    """Measures batches that are drawn with replacement, in micro-batches of these sizes."""
    noise = NoiseScale(None)
    chosen = gradients[torch.randint(len(gradients), (measurements, sum(sizes)))]
    norms = torch.stack([part.mean(1).square().sum(1) for part in chosen.split(sizes, dim=1)], 1).tolist()
    for row, total in zip(norms, chosen.mean(1).square().sum(1).tolist(), strict=True):
        noise.update(row, list(sizes), total)
    return noise


@pytest.mark.parametrize("measurements", [5, 15])
@pytest.mark.parametrize("cut", CUTS)
def test_the_interval_covers_at_frozen_weights(cut: str, measurements: int) -> None:
    torch.manual_seed(2)
    gradients = gradients_of_samples()
    signal = gradients.mean(0).square().sum()
    truth = float((gradients.square().sum(1).mean() - signal) / signal)
    covered, values = 0, []
    for _ in range(DRAWS):
        noise = draw(gradients, CUTS[cut], measurements)
        low, high = noise.interval
        covered += low <= truth <= high
        values.append(noise.value or 0.0)
    assert 0.85 * DRAWS <= covered <= 0.95 * DRAWS, covered
    assert 0.85 * truth < sorted(values)[DRAWS // 2] < 1.15 * truth
