"""Spectral norms: all micro-batches compute with the weights that the whole batch would have, and move them once."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
import reference
from anybatch.tensors.spectral import PowerIterations, power_iteration

KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "parametrization": nn.utils.parametrizations.spectral_norm,
    "hook": nn.utils.spectral_norm,
    "several iterations": lambda layer: nn.utils.parametrizations.spectral_norm(layer, n_power_iterations=3),
}
Batch = tuple[Tensor, Tensor]


class Judge(nn.Module):
    """A discriminator that looks at real and at false samples, one after the other."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = KINDS["parametrization"]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(wrap(nn.Linear(6, 8)), nn.Tanh(), wrap(nn.Linear(8, 4)), nn.Tanh())
        self.head = wrap(nn.Linear(4, 1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def hinge(model: Any, batch: Batch) -> Tensor:
    real, false = batch
    return F.relu(1 - model(real)).mean() + F.relu(1 + model(false)).mean()


def two_losses(model: Any, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    yield "real", F.relu(1 - model(batch[0])).mean()
    yield "false", F.relu(1 + model(batch[1])).mean()


def samples(rows: int = 7) -> Batch:
    generator = torch.Generator().manual_seed(1)
    real, false = torch.randn(2, rows, 6, dtype=torch.float64, generator=generator)
    return real, false


def state(model: nn.Module) -> list[Tensor | None]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [one.detach().clone() for one in (*gradients, *model.parameters(), *model.buffers())]


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    assert len(list(found.buffers())) == 6
    reference.assert_float64(state(found), state(expected))


@pytest.mark.parametrize("size", [1, 3, 7, None])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_and_the_vectors_are_those_of_the_whole_batch(kind: str, size: int | None) -> None:
    plain = Judge(KINDS[kind])
    ours = copy.deepcopy(plain)
    hinge(plain, samples()).backward()
    anybatch.backward(ours, hinge, samples(), micro_batch_size=size)
    assert_same(ours, plain)


WAYS: list[dict[str, Any]] = [
    {"micro_batch_size": 2},
    {"memory": 15_000},
    {"devices": ["cpu", "cpu"], "micro_batch_size": 3},
]


@pytest.mark.parametrize("loss", [hinge, two_losses])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_steps_are_those_of_the_plain_loop(loss: Any, options: dict[str, Any]) -> None:
    plain = Judge()
    ours = copy.deepcopy(plain)
    one, other = (torch.optim.Adam(model.parameters(), lr=0.01) for model in (plain, ours))
    step = anybatch.TrainStep(ours, loss, other, **options)
    for _ in range(3):
        one.zero_grad()
        hinge(plain, samples(64)).backward()
        one.step()
        assert step(samples(64)).micro_batches > 1
    plain.zero_grad()
    ours.zero_grad()
    assert_same(ours, plain)


def test_a_smaller_micro_batch_after_memory_ran_out_begins_where_the_first_did() -> None:
    failed: list[int] = []
    plain = Judge()
    ours = copy.deepcopy(plain)

    def failing(model: Any, batch: Batch) -> Tensor:
        loss = hinge(model, batch)
        if len(batch[0]) > 2 and len(failed) < 2:
            failed.append(len(batch[0]))
            raise torch.OutOfMemoryError("as planned")
        return loss

    one, other = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, ours))
    hinge(plain, samples(8)).backward()
    one.step()
    anybatch.TrainStep(ours, failing, other, micro_batch_size=8)(samples(8))
    assert failed == [8, 4]
    plain.zero_grad()
    ours.zero_grad()
    assert_same(ours, plain)


@pytest.mark.parametrize("keep", [0, 1, 99])
def test_coupled_losses_encode_all_with_the_same_weights(keep: int) -> None:
    def encode(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        return F.normalize(model.body(batch[0])), F.normalize(model.body(batch[1]))

    def loss(model: Any, outputs: tuple[Tensor, Tensor]) -> Tensor:
        aligned = F.cross_entropy(outputs[0] @ outputs[1].T / 0.1, torch.arange(len(outputs[0])))
        total: Tensor = aligned + model.head.weight.sum()
        return total

    plain = Judge()
    ours = copy.deepcopy(plain)
    loss(plain, encode(plain, samples())).backward()
    anybatch.backward(ours, anybatch.Coupled(encode, loss, keep=keep), samples(), micro_batch_size=2)
    assert_same(ours, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_says_that_it_is_exact(kind: str) -> None:
    model = Judge(KINDS[kind])
    before = copy.deepcopy(model)
    certificate = anybatch.check(model, hinge, samples())
    assert certificate.exact, certificate
    assert not certificate.notes
    assert_same(model, before)


def test_in_evaluation_mode_nothing_moves() -> None:
    model = Judge().eval()
    assert not [vector for module in model.modules() for vector in power_iteration(module)]
    before = state(model)
    anybatch.backward(model, hinge, samples(), micro_batch_size=2)
    model.zero_grad()
    reference.assert_float64(state(model), before)


def test_vectors_are_found_in_all_kinds_and_nowhere_else() -> None:
    for wrap in KINDS.values():
        vectors = [vector for module in Judge(wrap).modules() for vector in power_iteration(module)]
        assert sorted(map(len, vectors)) == [1, 4, 4, 6, 8, 8]
    others = nn.Sequential(nn.BatchNorm1d(3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    others.register_forward_pre_hook(lambda module, args: None)
    assert not [vector for module in others.modules() for vector in power_iteration(module)]
    PowerIterations(others.modules()).again_()
