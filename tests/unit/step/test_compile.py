"""A compiled model is compiled at most twice: for the micro-batches of equal size and for the remainder."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
import reference

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",  # the compiler of torch 2.15 leaves files open
)


class Counting:
    """A backend that counts the graphs it is given, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batch_of(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 3), "y": torch.randint(0, 2, (rows,))}


def loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


@pytest.mark.parametrize("dynamic", [False, None])
@pytest.mark.parametrize(
    ("rows", "size", "graphs"), [(22, 8, 2), (24, 8, 1), (22, 22, 1), (22, None, 1), (9, 1, 1), (7, 4, 2)]
)
def test_a_compiled_model_over_several_logical_batches(
    rows: int, size: int | None, graphs: int, dynamic: bool | None
) -> None:
    backend = Counting()
    plain = net()
    twin = net()
    twin.load_state_dict(plain.state_dict())
    model: Any = torch.compile(plain, backend=backend, dynamic=dynamic)
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(plain.parameters(), lr=0.1), micro_batch_size=size)
    same = anybatch.TrainStep(twin, loss_fn, torch.optim.SGD(twin.parameters(), lr=0.1), micro_batch_size=size)
    for _ in range(4):
        batch = batch_of(rows)
        assert step(batch).loss == pytest.approx(same(batch).loss, rel=1e-6)
    assert backend.graphs == graphs
    assert reference.distance(list(plain.parameters()), list(twin.parameters())) <= 1e-6 * reference.norm(
        plain.parameters()
    )


def test_the_whole_loss_compiled() -> None:
    backend = Counting()
    plain = net().double()
    compiled = torch.compile(loss_fn, backend=backend, dynamic=False)
    batch = batch_of(22)
    batch["x"] = batch["x"].double()
    expected, _ = reference.whole_gradients(plain, loss_fn, batch)
    for _ in range(2):
        reference.clear(plain)
        anybatch.backward(plain, compiled, batch, micro_batch_size=8)
        reference.assert_float64(reference.gradients_of(plain), expected)
    assert backend.graphs == 2


def test_windows_of_equal_batches_share_their_shapes() -> None:
    backend = Counting()
    model: Any = torch.compile(net(), backend=backend, dynamic=False)
    for window in anybatch.windows([batch_of(22) for _ in range(6)], batches=3):
        out = anybatch.backward(model, loss_fn, window, micro_batch_size=8)
        assert out.micro_batches == 9
    assert backend.graphs == 2


def test_counting_in_a_forward_compiles_once_more_for_each_shape() -> None:
    backend = Counting()
    model: Any = torch.compile(net(), backend=backend, dynamic=False)

    def means(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, anybatch.Mean]:
        loss = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return {"a": anybatch.Mean(loss.sum(), len(loss)), "b": anybatch.Mean(loss.square().sum(), len(loss))}

    for _ in range(3):
        anybatch.backward(model, means, batch_of(22), micro_batch_size=8, count="forward")
    assert backend.graphs == 4  # two shapes, without and with a graph


def test_a_plan_compiles_nothing_and_is_called_an_estimate() -> None:
    backend = Counting()
    model: Any = torch.compile(net(), backend=backend, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = anybatch.plan(model, loss_fn, batch_of(64), optimizer, memory="3KiB")
    assert plan.confidence == "estimated"
    assert plan.micro_batches > 1
    assert backend.graphs == 0
    step = anybatch.TrainStep(model, loss_fn, optimizer, plan=plan)
    for _ in range(2):
        assert step(batch_of(64)).micro_batches == plan.micro_batches
    assert 1 <= backend.graphs <= 2


def test_through_autograd_of_the_compiler() -> None:
    plain = net().double()
    model: Any = torch.compile(plain, backend="aot_eager", dynamic=False)
    batch = batch_of(11)
    batch["x"] = batch["x"].double()
    expected, _ = reference.whole_gradients(plain, loss_fn, batch)
    for size in (4, 11, None):
        reference.clear(plain)
        anybatch.backward(model, loss_fn, batch, micro_batch_size=size)
        reference.assert_float64(reference.gradients_of(plain), expected)
