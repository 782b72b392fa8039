"""Losses that train different parts of a model, as the two networks of a GAN: each update moves its own part only."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import anybatch
import reference

ROWS = 7
NOISE = 3
Batch = dict[str, torch.Tensor]


class Gan(nn.Module):
    """A generator and a discriminator, the latter with spectral normalisation if asked for."""

    def __init__(self, *, spectral: bool = False) -> None:
        super().__init__()
        wrap: Any = spectral_norm if spectral else lambda layer: layer
        self.generator = nn.Sequential(nn.Linear(NOISE, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4))
        self.discriminator = nn.Sequential(wrap(nn.Linear(4, 6)), nn.LeakyReLU(0.2), wrap(nn.Linear(6, 1)))
        self.double()


def discriminator_loss(model: Any, batch: Batch) -> torch.Tensor:
    fake = model.generator(batch["noise"]).detach()
    real, made = model.discriminator(batch["real"]), model.discriminator(fake)
    loss: torch.Tensor = F.softplus(-real).mean() + F.softplus(made).mean()
    return loss


def generator_loss(model: Any, batch: Batch) -> torch.Tensor:
    return F.softplus(-model.discriminator(model.generator(batch["noise"]))).mean()


def batches(count: int = 3) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    return [
        {
            "real": torch.randn(ROWS, 4, dtype=torch.float64, generator=g),
            "noise": torch.randn(ROWS, NOISE, dtype=torch.float64, generator=g),
        }
        for _ in range(count)
    ]


def optimizers_of(model: Gan) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return (
        torch.optim.Adam(model.discriminator.parameters(), lr=0.02, betas=(0.5, 0.9)),
        torch.optim.SGD(model.generator.parameters(), lr=0.1, momentum=0.9),
    )


def train_plainly(model: Gan) -> None:
    """The loop of every tutorial."""
    by_d, by_g = optimizers_of(model)
    for batch in batches():
        for optimizer, loss_fn in ((by_d, discriminator_loss), (by_g, generator_loss)):
            by_d.zero_grad()
            by_g.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()


def train_in_steps(model: Gan, size: int | None) -> None:
    by_d, by_g = optimizers_of(model)
    step_d = anybatch.TrainStep(
        model, discriminator_loss, by_d, inputs=model.discriminator.parameters(), micro_batch_size=size
    )
    step_g = anybatch.TrainStep(model, generator_loss, by_g, inputs=model.generator.parameters(), micro_batch_size=size)
    for batch in batches():
        step_d(batch)
        held = [(p.grad, reference.frozen(p.grad)) for p in model.discriminator.parameters()]
        step_g(batch)
        for parameter, (gradient, bits) in zip(model.discriminator.parameters(), held, strict=True):
            assert parameter.grad is gradient
            assert reference.frozen(parameter.grad) == bits


def states_of(*models: nn.Module) -> list[list[Any]]:
    return [[value for value in model.state_dict().values() if value.is_floating_point()] for model in models]


@pytest.mark.parametrize("size", [1, 2, 3, 6, None])
def test_two_steps_in_turn_are_the_plain_loop(size: int | None) -> None:
    torch.manual_seed(0)
    plain, ours = Gan(), Gan()
    ours.load_state_dict(plain.state_dict())
    train_plainly(plain)
    train_in_steps(ours, size)
    expected, found = states_of(plain, ours)
    reference.assert_float64(found, expected)


@pytest.mark.parametrize("size", [1, 3, None])
def test_spectral_normalisation_is_that_of_the_whole_batch(size: int | None) -> None:
    torch.manual_seed(0)
    plain, ours = Gan(spectral=True), Gan(spectral=True)
    ours.load_state_dict(plain.state_dict())
    train_plainly(plain)
    train_in_steps(ours, size)
    expected, found = states_of(plain, ours)
    assert len(expected) > len(list(plain.parameters()))
    reference.assert_float64(found, expected)


def test_the_generator_loss_leaves_gradients_in_the_discriminator_by_hand() -> None:
    model, batch = Gan(), batches()[0]
    generator_loss(model, batch).backward()
    assert all(p.grad is not None for p in model.discriminator.parameters())
    reference.clear(model)
    anybatch.backward(model, generator_loss, batch, inputs=model.generator.parameters(), micro_batch_size=3)
    assert all(p.grad is None for p in model.discriminator.parameters())
    assert all(p.grad is not None for p in model.generator.parameters())


@pytest.mark.parametrize("size", [3, None])
def test_one_pass_of_the_generator_for_both(size: int | None) -> None:
    """Both losses from one forward of the generator, each with its own inputs, in a loop of one's own."""
    model, batch = Gan(), batches()[0]
    expected_d, _ = reference.whole_gradients(model, discriminator_loss, batch, model.discriminator.parameters())
    expected_g, _ = reference.whole_gradients(model, generator_loss, batch, model.generator.parameters())
    passes: list[int] = []
    model.generator[1].register_full_backward_hook(lambda *_: passes.append(1))

    def both(model: Any, batch: Batch) -> Iterator[Any]:
        with anybatch.cut(model.generator(batch["noise"])) as fake:
            real, made = model.discriminator(batch["real"]), model.discriminator(fake.detach())
            yield "discriminator", F.softplus(-real).mean() + F.softplus(made).mean()
            frozen = {name: p.detach() for name, p in model.discriminator.named_parameters()}
            yield "generator", F.softplus(-torch.func.functional_call(model.discriminator, frozen, fake)).mean()

    out = anybatch.backward(model, both, batch, micro_batch_size=size)
    reference.assert_float64(reference.gradients_of(model.discriminator), expected_d)
    reference.assert_float64(reference.gradients_of(model.generator), expected_g)
    assert len(passes) == out.micro_batches


def test_batch_normalisation_in_the_other_network_is_refused_too() -> None:
    """The generator's update splits the discriminator's statistics just as well."""
    model, batch = Gan(), batches()[0]
    model.discriminator.insert(1, nn.BatchNorm1d(6).double())
    _, by_g = optimizers_of(model)
    step = anybatch.TrainStep(model, generator_loss, by_g, inputs=model.generator.parameters(), micro_batch_size=3)
    before = reference.everything(model)
    with pytest.raises(anybatch.NotSplittable, match=r"discriminator\.1"):
        step(batch)
    reference.assert_unchanged(reference.everything(model), before)


@pytest.mark.parametrize("size", [2, None])
def test_one_step_of_two_optimizers(size: int | None) -> None:
    """A trunk and its heads, each with an optimizer of its own, in one update."""
    torch.manual_seed(0)
    trunk, heads = nn.Linear(4, 5).double(), nn.ModuleList([nn.Linear(5, 1).double() for _ in range(3)])
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})
    twin: Any = nn.ModuleDict({"trunk": nn.Linear(4, 5), "heads": nn.ModuleList([nn.Linear(5, 1) for _ in range(3)])})
    twin.double().load_state_dict(model.state_dict())

    def loss_fn(model: Any, batch: Batch) -> Iterator[torch.Tensor]:
        with anybatch.cut(model["trunk"](batch["real"]).tanh()) as features:
            for head in model["heads"]:
                yield head(features).square().mean()

    def optimizers(of: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(of["trunk"].parameters(), lr=0.01), torch.optim.SGD(of["heads"].parameters(), lr=0.1)]

    step = anybatch.TrainStep(model, loss_fn, optimizers(model), micro_batch_size=size)
    plain = optimizers(twin)
    for batch in batches():
        step(batch)
        for optimizer in plain:
            optimizer.zero_grad()
        features = twin["trunk"](batch["real"]).tanh()
        torch.stack([head(features).square().mean() for head in twin["heads"]]).sum().backward()
        for optimizer in plain:
            optimizer.step()
    expected, found = states_of(twin, model)
    reference.assert_float64(found, expected)


def test_an_optimizer_without_any_of_the_inputs_is_refused() -> None:
    pair = nn.ModuleDict({"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(pair["d"].parameters(), lr=0.1)
    with pytest.raises(anybatch.BatchError, match="the optimizer, a SGD, has no parameter among inputs"):
        anybatch.TrainStep(
            pair, lambda model, batch: model["d"](model["g"](batch)).mean(), optimizer, inputs=pair["g"].parameters()
        )
