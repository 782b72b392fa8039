"""A proof in a process that has compiled something.

How this could be silently wrong: what is told of plain models is not told there, or the proof has the user's code
compiled again, by a hook that the compiler sees.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

Batch = dict[str, torch.Tensor]


class Part(nn.Module):
    """The compiler does not compile a part that is one of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Part(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.part(x))


class Counting:
    """A backend that counts what is compiled."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.graphs += 1
        return graph.forward


def each(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(out, batch["y"], reduction="none")


def hard(model: Any, batch: Batch) -> Any:
    losses = each(model(batch["x"]), batch)
    return losses[losses > 0.05].mean()


def mean(model: Any, batch: Batch) -> Any:
    return each(model(batch["x"]), batch).mean()


Case = tuple[Any, Any]


def another(_: Any, loss_fn: Any, backend: Counting) -> Case:
    torch.compile(Part(), backend=backend)(torch.ones(2, 6))
    return Net(), loss_fn


def by_method(_: Any, loss_fn: Any, backend: Counting) -> Case:
    model = Net()
    model.compile(backend=backend)
    return model, loss_fn


def in_part(_: Any, loss_fn: Any, backend: Counting) -> Case:
    model = Net()
    model.part.compile(backend=backend)
    return model, loss_fn


def forward(_: Any, loss_fn: Any, backend: Counting) -> Case:
    model = Net()
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)  # type: ignore[method-assign]
    return model, loss_fn


def in_loss(_: Any, loss_fn: Any, backend: Counting) -> Case:
    called = torch.compile(lambda model, x: model(x), backend=backend, fullgraph=True)
    return Net(), lambda model, batch: loss_fn(lambda x: called(model, x), batch)


WAYS: list[Callable[[Any, Any, Counting], Case]] = [
    another, by_method, in_part, forward, in_loss,
    lambda _, loss_fn, backend: (torch.compile(Net(), backend=backend), loss_fn),
    lambda _, loss_fn, backend: (Net(), torch.compile(loss_fn, backend=backend)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def trained(way: Callable[[Any, Any, Counting], Case], loss_fn: Any, **options: Any) -> tuple[str, int]:
    """What is said in two steps, and how many graphs were compiled."""
    torch.manual_seed(0)
    backend = Counting()
    model, own = way(None, loss_fn, backend)
    step = anybatch.TrainStep(model, own, torch.optim.SGD(model.parameters(), lr=0.01), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # torch warns while it compiles
        for seed in range(2):
            torch.manual_seed(seed)
            step({"x": torch.randn(24, 6), "y": torch.randint(4, (24,))})
    return "".join(
        str(one.message) for one in caught if issubclass(one.category, anybatch.AnyBatchWarning)
    ), backend.graphs


@pytest.mark.parametrize("way", WAYS)
def test_samples_that_are_taken_by_what_the_model_gives_are_told(way: Any) -> None:
    told, graphs = trained(way, hard, micro_batch_size=6)
    assert told.count("once the model's outputs change") == 1
    torch.compiler.reset()
    said, compiled = trained(way, hard, micro_batch_size=6, verify="off")
    assert (said, compiled) == ("", graphs)


@pytest.mark.parametrize("way", WAYS)
def test_a_mean_over_samples_is_not_told(way: Any) -> None:
    assert trained(way, mean, micro_batch_size=6)[0] == ""


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("scripted", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(2, 6))])
def test_a_scripted_model_which_takes_no_hooks_is_proved(scripted: Any) -> None:
    torch.compile(Part(), backend=Counting())(torch.ones(2, 6))
    model = scripted(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    out = anybatch.backward(model, mean, {"x": torch.randn(24, 6), "y": torch.randint(4, (24,))}, micro_batch_size=6)
    assert out.proof is not None
    assert out.proof.exact


def test_a_model_that_refuses_hooks_is_proved() -> None:
    class Closed(Net):
        def register_forward_pre_hook(self, *given: Any, **options: Any) -> Any:
            raise TypeError("takes no hooks")

    torch.compile(Part(), backend=Counting())(torch.ones(2, 6))
    proof = anybatch.backward(
        Closed(), mean, {"x": torch.randn(24, 6), "y": torch.randint(4, (24,))}, micro_batch_size=6
    ).proof
    assert proof is not None
    assert proof.exact
