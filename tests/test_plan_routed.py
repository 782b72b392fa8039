"""Plans for mixtures of experts, whose routing shifts while they are trained."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.planning.heaviest import gathered, made_alike
from anybatch.tensors.batches import Splittable
from anybatch.tensors.windowing import Window


class Experts(nn.Module):
    """Each token goes to one expert, and none is dropped."""

    def __init__(self, width: int = 16, hidden: int = 128, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = tokens
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero().squeeze(1)
            if len(own):
                out = out.index_add(0, own, expert(tokens[own]) * weight[own, None])
        return out.view_as(x)


class Routed(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.layers = nn.Sequential(*(Experts() for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.layers(self.first(x))).mean(1)
        return found


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def batch_of(rows: int = 24) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 48, 16), "y": torch.randint(4, (rows,))}


def peak_of(step: anybatch.TrainStep, optimizer: Any, batch: Any) -> int:
    return anybatch.measure(lambda: step(batch), model=step.model, optimizer=optimizer, batch=batch).peak_bytes


def test_samples_that_are_all_alike() -> None:
    batch: dict[str, Any] = {
        "tokens": torch.arange(12).view(3, 4),
        "vectors": torch.arange(24.0).view(3, 4, 2),
        "features": torch.arange(6.0).view(3, 2),
        "y": torch.tensor([3, 4, 5]),
        "names": ["a", "b", "c"],
    }
    found = gathered(Splittable([batch]), [1, 2], alike=True)
    assert found["tokens"].tolist() == [[4] * 4] * 2
    assert found["vectors"].tolist() == [[[8.0, 9.0]] * 4] * 2
    assert found["features"].tolist() == [[2.0, 3.0]] * 2
    assert found["y"].tolist() == [4, 4]
    assert found["names"] == ["b", "c"]
    assert torch.equal(batch["tokens"], torch.arange(12).view(3, 4))


def test_collated_samples_that_are_made_alike() -> None:
    batch = {
        "tokens": torch.arange(12).view(3, 4),
        "lengths": torch.tensor([4, 2, 3]),
        "of all": torch.arange(4),
        "factor": torch.tensor(2.0),
        "names": ["a", "b", "c"],
    }
    found = made_alike(batch, 3)
    assert found["tokens"].tolist() == [[0] * 4] * 3
    assert found["lengths"].tolist() == [4, 4, 4]
    assert found["of all"].tolist() == [0, 1, 2, 3]
    assert found["factor"].item() == 2.0
    assert found["names"] == ["a", "b", "c"]


def test_a_step_that_looks_at_numbers_and_routes_nothing_is_planned_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def looking(model: Any, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch["x"]).mean(1), batch["y"])
        return loss * 2 if loss.item() > 0 else loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, looking, optimizer, memory=2**20)
    batch = batch_of()
    step(batch)
    assert step._follower is not None
    assert not step._follower._planner.subject.habits.alike  # type: ignore[union-attr]


def window_of(rows: int = 12, lengths: Sequence[int] = (48, 48)) -> Window:
    return Window({"x": torch.randn(rows, length, 16), "y": torch.randint(4, (rows,))} for length in lengths)


def raw_of(rows: int = 24) -> list[tuple[Tensor, int]]:
    return [(torch.randn(48, 16), row % 4) for row in range(rows)]


def collate(samples: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.tensor([y for _, y in samples])}


BATCHES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "batch": (batch_of, {}),
    "window": (window_of, {}),
    "window of two lengths": (lambda: window_of(lengths=(24, 48)), {}),
    "window of three lengths": (lambda: window_of(8, (48, 24, 36)), {}),
    "raw samples": (raw_of, {"collate": collate}),
}


def assert_held(kind: str, layers: int, share: float) -> None:
    """Trains within a share of what the whole takes, while the routing shifts to one expert."""
    torch.manual_seed(0)
    make, options = BATCHES[kind]
    model = Routed(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain, batch = anybatch.TrainStep(model, loss_fn, optimizer, **options), make()
    plain(batch)
    budget = int(share * peak_of(plain, optimizer, batch))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = anybatch.TrainStep(model, loss_fn, optimizer, memory=budget, **options)
    for shift in (0.0, 0.0, 1.0, 0.0, 5.0):
        batch = make()
        with torch.no_grad():
            for layer in model.layers:
                layer.gate.bias[0] += shift  # type: ignore[union-attr,index,operator]
        assert peak_of(step, optimizer, batch) <= budget
    assert step._follower._planner.subject.habits.alike  # type: ignore[union-attr]


@pytest.mark.parametrize("share", [0.4, 0.5, 0.65, 0.8])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_budget_holds_while_the_routing_shifts_to_one_expert(layers: int, share: float) -> None:
    assert_held("batch", layers, share)


@pytest.mark.parametrize("share", [0.5, 0.65, 0.8])
@pytest.mark.parametrize("kind", [kind for kind in BATCHES if kind != "batch"])
def test_so_it_does_for_windows_and_raw_samples(kind: str, share: float) -> None:
    assert_held(kind, 2, share)


@pytest.mark.parametrize("share", [0.35, 0.4, 0.45])
def test_so_it_does_where_only_a_few_samples_may_run_to_be_planned(share: float) -> None:
    assert_held("window", 2, share)
