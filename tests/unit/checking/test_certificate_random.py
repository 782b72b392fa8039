"""Random numbers in a check: the same for a sample in the whole batch and in any part of it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from anybatch import NotSplittable, backward, check
from anybatch.checking.standins import StandIns
from anybatch.testing import assert_exact

Batch = dict[str, Any]
RELATIVE_FLOAT64 = 1e-10


def vectors(rows: int = 8) -> Batch:
    return {"x": torch.randn(rows, 5), "y": torch.randint(0, 3, (rows,))}


def cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Checkpointed(nn.Module):
    """A block with dropout that is recomputed in the backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Tanh())
        self.head = nn.Linear(7, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(checkpoint(self.block, x, use_reentrant=self.use_reentrant))
        return result


def test_dropout_alone_is_exact_up_to_the_drawing_with_a_note_that_names_it() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3))
    certificate = assert_exact(model, cross_entropy, vectors())
    assert certificate.error < RELATIVE_FLOAT64
    assert [(note.code, note.evidence["modules"]) for note in certificate.notes] == [("random", ["1"])]
    assert certificate.verdict.endswith("except for random numbers, such as dropout's")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_within_a_checkpoint_is_exact(use_reentrant: bool) -> None:
    model = Checkpointed(use_reentrant)
    batch = vectors()
    batch["x"].requires_grad_()
    assert_exact(model, cross_entropy, batch)
    assert batch["x"].grad is None


def test_noise_that_the_loss_draws_is_the_same_for_each_sample() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        time, noise = torch.rand(len(batch["x"]), 1), torch.randn_like(batch["x"])
        return F.mse_loss(model(batch["x"] * (1 - time) + noise * time), noise)

    certificate = assert_exact(nn.Linear(5, 5), loss_fn, vectors())
    assert certificate.notes[0].where == "loss"


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


def noisy_by_row(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([noisy(row) for row in x])


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return noisy(x)


@pytest.mark.parametrize("view", [noisy, without_gradient, noisy_by_row])
def test_two_draws_differ_so_that_views_are_told_apart(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 4)), vectors(32)

    def views(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return model(view(batch["x"])), model(view(batch["x"]))

    def each_pair(model: nn.Module, batch: Batch) -> torch.Tensor:
        one, other = (F.normalize(found, dim=1) for found in views(model, batch))
        return (1 - (one * other).sum(1)).mean()

    def all_distances(model: nn.Module, batch: Batch) -> torch.Tensor:
        one, other = views(model, batch)
        return (torch.cdist(one, one) - torch.cdist(other, other)).square().mean()

    assert_exact(model, each_pair, batch)
    out = backward(model, each_pair, batch, micro_batch_size=8)
    assert out.proof is not None
    assert out.proof.exact
    assert not check(model, all_distances, batch).exact
    with pytest.raises(NotSplittable, match="the gradient of Sequential is not the whole batch's"):
        backward(model, all_distances, batch, micro_batch_size=8)


def test_a_loop_that_draws_until_a_number_pleases_it_ends() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        noise = torch.rand(len(batch["x"]), 1)
        while (noise > 0.5).any():
            noise = torch.where(noise > 0.5, torch.rand_like(noise), noise)
        loss: torch.Tensor = model(batch["x"] * noise).square().sum() ** 2
        return loss

    assert not check(nn.Linear(5, 3), loss_fn, vectors(16)).exact


def test_numbers_from_numpy_can_not_be_held_and_that_is_said() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"] + torch.from_numpy(np.random.rand(len(batch["x"]), 1))), batch["y"])

    assert [reason.code for reason in check(nn.Linear(5, 3), loss_fn, vectors()).reasons] == ["random"]
    generator = np.random.default_rng(0)
    shifted = check(nn.Linear(5, 3), lambda m, b: cross_entropy(m, {**b, "x": b["x"] * generator.random()}), vectors())
    assert shifted.exact  # as with a number that torch draws: a split is as good a draw
    assert [note.code for note in shifted.notes] == ["random"]


@pytest.mark.gpu
def test_on_a_gpu_dropout_in_kernels_is_held_or_taken_off() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(5, 6, 2, dropout=0.5, batch_first=True)
            self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
            self.drop = nn.Dropout(0.5)
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.recurrent(x)[0]
            result: torch.Tensor = self.head(self.drop(self.attention(hidden, hidden, hidden)[0]).mean(1))
            return result

    model = Recurrent().cuda()
    state = torch.cuda.get_rng_state()
    certificate = assert_exact(model, cross_entropy, {"x": torch.randn(8, 4, 5), "y": torch.randint(0, 3, (8,))})
    assert certificate.error < RELATIVE_FLOAT64
    assert set(certificate.notes[0].evidence["modules"]) == {"recurrent", "attention", "drop"}
    assert (model.recurrent.dropout, model.head.weight.dtype) == (0.5, torch.float32)
    assert torch.equal(state, torch.cuda.get_rng_state())


class Kernel:
    """Stands for a recurrent kernel of a GPU: has its schema and gives the dropout that it is called with."""

    tags = (torch.Tag.nondeterministic_seeded,)

    def __init__(self, name: str) -> None:
        self.overloadpacket = getattr(torch.ops.aten, name)
        self._schema = self.overloadpacket.default._schema
        self.place = [argument.name for argument in self._schema.arguments].index("dropout")

    def __call__(self, *args: Any) -> Any:
        return args[self.place]


@pytest.mark.parametrize("name", ["_cudnn_rnn", "_cudnn_rnn_backward"])
def test_recurrent_kernels_run_without_their_own_dropout(name: str) -> None:
    kernel, stand_ins = Kernel(name), StandIns(where=lambda: "recurrent")
    names = [argument.name for argument in kernel._schema.arguments]
    args = tuple({"dropout": 0.5, "train": True}.get(one) for one in names)
    assert stand_ins.__torch_dispatch__(kernel, (), args) == 0.0
    assert list(stand_ins.draws) == [("dropout", "recurrent")]
    stand_ins.drawn = []  # where numbers are really drawn
    assert kernel(*args) == 0.5


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(len(x), 3),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(2, 9, x.shape),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 3),
    "normal_": lambda x: torch.empty_like(x).normal_(2, 3),
    "normal of tensors": lambda x: torch.normal(x, 2.0),
    "normal of numbers": lambda x: torch.normal(1.0, 2.0, x.shape),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "random_": lambda x: torch.empty_like(x).random_(1, 9),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.4),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout1d": lambda x: F.dropout1d(x[..., None], 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 2),
    "normal distribution": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "gamma distribution": lambda x: torch.distributions.Gamma(x.exp(), 1.0).rsample(),
    "poisson": lambda x: torch.poisson(x.exp()),
}


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_gives_each_sample_the_same_in_the_whole_batch_and_in_a_part(draw: str, constant: bool) -> None:
    x = torch.randn(7, 3)
    stand_ins = StandIns()
    stand_ins.held.constant = constant
    torch.manual_seed(5)
    with stand_ins:
        stand_ins.numbers.begin(range(7), 7)
        whole = DRAWS[draw](x)
        stand_ins.numbers.begin([2, 3, 4], 7)
        torch.rand(0)  # another state of the generator changes nothing
        stand_ins.numbers.begin([2, 3, 4], 7)
        part = DRAWS[draw](x[2:5])
    assert torch.equal(whole[2:5], part)
    assert whole.dtype is DRAWS[draw](x).dtype
    assert whole.isfinite().all()
    assert stand_ins.draws


def test_numbers_that_stand_in_differ_between_samples_and_positions() -> None:
    with StandIns() as stand_ins:
        stand_ins.numbers.begin(range(50), 50)
        numbers = torch.rand(50, 20)
        kept = F.dropout(torch.ones(50, 20), 0.3) > 0
    assert len(numbers.unique()) > 900
    assert abs(numbers.mean().item() - 0.5) < 0.02
    assert abs(kept.float().mean().item() - 0.7) < 0.02


GENERATOR = torch.Generator()


def seeds_torch(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(42)
    return F.dropout(x, 0.5)


def seeds_its_own(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(x.shape, generator=GENERATOR.manual_seed(1))


def makes_its_own(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(1))


def seeds_one_number(x: torch.Tensor) -> torch.Tensor:
    np.random.seed(0)
    return x * float(np.random.rand())


def seeds_a_projection(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.randn(5, 5, generator=torch.Generator().manual_seed(3)).to(x)


def seeds_each_sample(x: torch.Tensor) -> torch.Tensor:
    seeds = (x.detach().abs().sum(1) * 10).int().tolist()
    return x + torch.stack([torch.randn(5, generator=torch.Generator().manual_seed(one)) for one in seeds]).to(x)


def draws_on(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(x.shape, generator=GENERATOR)


def draws_from_numpy(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5) * float(np.random.rand())


@pytest.mark.parametrize("noise", [seeds_torch, seeds_its_own, makes_its_own])
def test_a_loss_that_seeds_itself_draws_the_same_in_two_micro_batches_and_that_is_said(
    noise: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model, batch = nn.Linear(5, 3), vectors()
    state = torch.get_rng_state()
    certificate = check(model, lambda m, b: F.cross_entropy(m(noise(b["x"])), b["y"]), batch)
    assert [reason.code for reason in certificate.reasons] == ["random"]
    assert "seeds a random generator itself" in certificate.reasons[0].message
    assert not certificate.notes
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("noise", [seeds_torch, seeds_its_own, makes_its_own])
def test_so_a_step_says_of_its_first_batch(noise: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(NotSplittable):
        backward(nn.Linear(5, 3), lambda m, b: F.cross_entropy(m(noise(b["x"])), b["y"]), vectors(), micro_batch_size=4)


@pytest.mark.parametrize("noise", [seeds_one_number, seeds_a_projection, seeds_each_sample])
def test_seeded_numbers_that_no_split_repeats_are_exact(noise: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(noise(batch["x"])), batch["y"])

    model, batch = nn.Linear(5, 3), vectors()
    assert check(model, loss_fn, batch).exact
    proof = backward(model, loss_fn, batch, micro_batch_size=4).proof
    assert proof is not None
    assert proof.exact


def test_points_of_a_sobol_sequence_go_on_in_the_next_micro_batch() -> None:
    points = torch.quasirandom.SobolEngine(5)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"] + points.draw(len(batch["x"]))), batch["y"])

    model, batch = nn.Linear(5, 3), vectors()
    proof = backward(model, loss_fn, batch, micro_batch_size=4).proof
    assert proof is not None
    assert proof.exact
    split, model.weight.grad = model.weight.grad, None
    points.reset()
    loss_fn(model, batch).backward()
    torch.testing.assert_close(split, model.weight.grad)


@pytest.mark.parametrize("noise", [draws_on, draws_from_numpy])
def test_a_loss_that_goes_on_drawing_is_as_good_a_draw(noise: Callable[[torch.Tensor], torch.Tensor]) -> None:
    certificate = check(nn.Linear(5, 3), lambda m, b: F.cross_entropy(m(noise(b["x"])), b["y"]), vectors())
    assert certificate.exact
    assert [note.code for note in certificate.notes] == ["random"]


def test_weights_that_the_forward_writes_are_no_count_that_depends_on_the_draws() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.no_grad():
                self.linear.weight.mul_(0.9).add_(x.mean(0) * 0.1)
            return self.linear(x)

    def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
        kept = (torch.rand(len(batch)) < 0.5).to(batch.dtype)
        found: torch.Tensor = (model(batch)[:, 0].square() * kept).sum() / kept.sum()
        return found

    certificate = check(Written(), loss_fn, torch.randn(16, 8))
    (reason,) = [one for one in certificate.reasons if one.code == "weight"]
    assert "random numbers" not in reason.message
