"""What a training loop sets for another phase is proved again, where the split of the first one was proved.

How this could cost without need: a value that changes with each step is a new phase in each step.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

epoch = 0


class Phased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.phase = nn.Linear(4, 3), "first"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out - out.mean(0) if self.phase == "second" else out


def batch_of() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(20, 4), "y": torch.randint(3, (20,))}


def mean(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def coupled(model: Any, batch: Any) -> Any:
    return mean(model, batch) + model(batch["x"]).std(0).mean()


class Scheduled:
    def __init__(self) -> None:
        self.is_coupled = False

    def __call__(self, model: Any, batch: Any) -> Any:
        return (coupled if self.is_coupled else mean)(model, batch)


def by_epoch(model: Any, batch: Any) -> Any:
    return (mean if epoch < 1 else coupled)(model, batch)


@pytest.mark.parametrize("kind", ["object", "global", "closure", "module"])
def test_a_phase_that_couples_the_samples_is_stopped_when_it_begins(kind: str) -> None:
    global epoch
    phase = epoch = 0
    model, scheduled = Phased() if kind == "module" else nn.Linear(4, 3), Scheduled()

    def closed(model: Any, batch: Any) -> Any:
        return (coupled if phase else mean)(model, batch)

    loss_fn: Any = {"object": scheduled, "global": by_epoch, "closure": closed, "module": mean}[kind]
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=8)
    step(batch_of())
    before = [one.detach().clone() for one in model.parameters()]
    phase = epoch = 1
    scheduled.is_coupled, model.phase = True, "second"
    with pytest.raises(anybatch.NotSplittable):
        step(batch_of())
    assert all(map(torch.equal, before, model.parameters()))


def test_a_number_that_changes_in_each_step_is_rarely_proved_again() -> None:
    scheduled, model, proved = Scheduled(), nn.Linear(4, 3), set()
    step = anybatch.TrainStep(model, scheduled, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=10)
    for number in range(33):
        scheduled.number = number  # type: ignore[attr-defined]
        proof = step(batch_of()).proof
        assert proof is not None
        proved.add(proof.update)
    assert proved == {0, 1, 2, 4, 8, 16, 32}
