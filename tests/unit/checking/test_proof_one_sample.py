"""A budget with room for one sample at a time proves its split by the losses of two, which need no gradient.

How it could be silently wrong: a loss that sees the batch is split sample by sample without a word; the proof itself
takes more memory than the plan has; or it is not made, and nothing says so.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

Loss = Callable[[Any, Any], torch.Tensor]


def mean(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def noisy(model: Any, batch: Any) -> torch.Tensor:
    return mean(model, {**batch, "x": batch["x"] + torch.randn_like(batch["x"])})


def quantised(model: Any, batch: Any) -> torch.Tensor:
    """Fake quantization whose scale is that of the whole batch."""
    z = model(batch["x"])
    scale = z.detach().abs().max() / 7
    return mean(lambda _: z + ((z / scale).round() * scale - z).detach(), batch)


def centred(model: Any, batch: Any) -> torch.Tensor:
    z = model(batch["x"])
    return mean(lambda _: z - z.mean(0), batch)


def of_one_class(model: Any, batch: Any) -> torch.Tensor:
    z = model(batch["x"])
    same = (batch["y"][:, None] == batch["y"]).float().fill_diagonal_(0)
    spread: torch.Tensor = ((z[:, None] - z[None]).square().sum(2) * same).sum() / len(z)
    return spread + mean(lambda _: z, batch)


def summed(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def wide(model: Any, batch: Any) -> torch.Tensor:
    """Forward alone takes much, and a backward no more."""
    nothing: torch.Tensor = 0 * batch["x"].repeat(1, 4000).mean()
    return mean(model, batch) + nothing


def smallest(loss_fn: Loss) -> tuple[anybatch.TrainStep, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    batch = {"x": torch.randn(11, 6), "y": torch.randint(3, (11,))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    least = anybatch.plan(model, loss_fn, batch, optimizer, memory="1GiB", verify="off").smallest_bytes
    return anybatch.TrainStep(model, loss_fn, optimizer, memory=least), batch


@pytest.mark.parametrize("loss_fn", [mean, noisy])
def test_a_mean_over_samples_is_proved(loss_fn: Loss) -> None:
    step, batch = smallest(loss_fn)
    out = step(batch)
    assert out.micro_batches == 11
    assert out.proof is not None
    assert (out.proof.outcome, out.proof.by, out.proof.parts) == ("exact", "losses", (1, 1))
    assert "the same loss, by comparison" in str(out.proof)
    assert "the gradient of two samples does not fit" in str(out.proof)


@pytest.mark.parametrize("loss_fn", [quantised, centred, of_one_class, summed])
def test_what_sees_the_batch_is_stopped(loss_fn: Loss) -> None:
    step, batch = smallest(loss_fn)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    with pytest.raises(anybatch.NotSplittable, match="is not the whole batch's"):
        step(batch)
    assert all(map(torch.equal, before, step.model.parameters()))


def test_two_samples_that_do_not_fit_are_not_run(caplog: pytest.LogCaptureFixture) -> None:
    step, batch = smallest(wide)
    proof = step(batch).proof
    assert proof is not None
    assert proof.outcome == "undecided"
    assert "two samples do not fit" in str(proof)
    assert "two samples do not fit" in caplog.text
