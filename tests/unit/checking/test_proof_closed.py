"""An error in what explains a difference does not lose the difference: the step stops all the same."""

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def rows(n: int = 24) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(n, 8), "y": torch.randint(4, (n,))}


def summed(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def root(model: Any, batch: Any) -> Any:
    return F.mse_loss(model(batch["x"]), F.one_hot(batch["y"], 4).float()).sqrt()


def hardest(model: Any, batch: Any) -> Any:
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return losses.topk(min(12, len(losses))).values.mean()


def seeding(model: Any, batch: Any) -> Any:
    torch.manual_seed(5)
    x = batch["x"] + torch.randn(batch["x"].shape)
    return F.cross_entropy(model(x), batch["y"])


class Moving:
    """Reads what moves on with each call, and can't be put back."""

    def __init__(self) -> None:
        self.numbers = (float(n) for n in range(10**6))

    def __call__(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"]) * (1 + next(self.numbers))


class Averaged(nn.Module):
    """Keeps a moving average of its weights in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.slow = net(), nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        with torch.no_grad():
            self.slow.mul_(0.5).add_(found.mean(0))
        return found * self.slow


class Trains:
    """Trains a critic itself, so that no certificate can be made."""

    def __init__(self) -> None:
        self.critic = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.5)

    def __call__(self, model: Any, batch: Any) -> Any:
        made = model(batch["x"])
        self.optimizer.zero_grad()
        self.critic(made.detach()).square().mean().backward()
        self.optimizer.step()
        return self.critic(made).mean()


def blocks() -> anybatch.Coupled:
    def loss(model: Any, outputs: Any, rows: Any = slice(None)) -> Any:
        scores = outputs[rows] @ outputs.T
        return scores.softmax(0).max(1).values.mean()

    return anybatch.Coupled(lambda model, batch: model(batch["x"]), loss, row_block=6)


def over_time() -> anybatch.OverTime:
    def chunk_loss(model: Any, chunk: Any, state: Any) -> Any:
        state = model(chunk["x"].mean(1)) + 0.5 * state.detach()
        return state.square().mean(), state

    return anybatch.OverTime(chunk_loss, lambda model, batch: torch.zeros(len(batch["x"]), 2), chunk=4)


LOSSES: dict[str, Callable[[], Any]] = {
    "summed": lambda: summed, "root": lambda: root, "hardest": lambda: hardest, "seeding": lambda: seeding,
    "moving": Moving, "trains": Trains, "blocks": blocks,
}  # fmt: skip
EXPLAINING = {
    "written_weights": ["proof.written_weights"],
    "worded": ["proof.worded", "replaying.worded", "chunks.reason"],
    "seeded": ["proof.seeded"],
    "iterators": ["proof.shown_iterators"],
    "groups": ["proof._Prover.in_groups"],
    "more": ["proof.more", "searches.more"],
    "certificate": ["trial.Trial.certificate"],
    "moves": ["trial.Trial.moves"],
    "bounds": ["trial.bound_of_samples"],
    "certified": ["proof._Prover._certified"],
    "explained": ["proof._Prover._explained"],
    "names": ["trial.Trial.written_by_name"],
}


@pytest.fixture(params=EXPLAINING)
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One of what explains raises an error of its own."""

    def raising(*_: Any, **__: Any) -> Any:
        return missing  # type: ignore[name-defined]  # noqa: F821

    for place in EXPLAINING[request.param]:
        file, *inner, name = place.split(".")
        home: Any = importlib.import_module(f"anybatch.checking.{file}")
        for one in inner:
            home = getattr(home, one)
        monkeypatch.setattr(home, name, raising)
    return str(request.param)


def steps(model: nn.Module, loss_fn: Any, **options: Any) -> anybatch.TrainStep:
    return anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("name", ["root", "seeding", "moving", "trains"])
def test_a_difference_stops_the_step_though_its_explanation_fails(name: str, broken: str) -> None:
    model = net()
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(anybatch.NotSplittable, match="off"):
        steps(model, LOSSES[name](), micro_batch_size=8)(rows())
    assert all(map(torch.equal, before, model.parameters()))


def test_weights_that_are_written_to_stop_the_step_though_the_explanation_fails(broken: str) -> None:
    model = Averaged()
    optimizer = torch.optim.SGD(model.inner.parameters(), lr=0.1)
    loss_fn = lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])  # noqa: E731
    with pytest.raises(anybatch.NotSplittable):
        anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=8)(rows())


def test_chunks_of_time_stop_the_step_though_the_explanation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("_found", "reason"):
        with monkeypatch.context() as patch:
            patch.delattr(f"anybatch.checking.chunks.{place}")
            torch.manual_seed(0)
            model, batch = nn.Linear(3, 2), {"x": torch.randn(4, 24, 3)}
            with pytest.raises(anybatch.NotSplittable, match="failed with NameError"):
                steps(model, over_time())(batch)


def test_a_plan_with_room_for_losses_only_stops_though_the_explanation_fails(broken: str) -> None:
    with pytest.raises(anybatch.NotSplittable):
        steps(net(), root, micro_batch_size=1)(rows(6))


@pytest.mark.parametrize("place", ["examination.Examination", "wording.listed"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_certificate_with_an_error_of_its_own_does_not_lose_a_difference(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(f"anybatch.checking.{place}")
    with pytest.raises(anybatch.NotSplittable):
        steps(net(), LOSSES[name](), micro_batch_size=8)(rows())


def test_what_failed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybatch.checking.proof._Prover._explained", lambda *_: missing)  # type: ignore[name-defined]  # noqa: F821
    with pytest.raises(anybatch.NotSplittable, match=re.escape("The diagnosis failed with NameError")):
        steps(net(), root, micro_batch_size=8)(rows())


def test_a_loss_of_the_whole_batch_stops_though_its_wording_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(model: Any, batch: Any) -> Any:
        squares = model(batch["x"]).square().mean()
        return squares * 5 if len(batch["x"]) > 200 else squares

    monkeypatch.delattr("anybatch.checking.replaying.worded")
    with pytest.raises(anybatch.NotSplittable, match="failed with NameError"):
        steps(net(), larger, micro_batch_size=4)(rows(256))
