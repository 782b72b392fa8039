"""Draws that cut the gradient of latents are found, and draws that are meant so are not."""

import pickle
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import (
    Beta,
    Categorical,
    Distribution,
    Independent,
    LogNormal,
    MixtureSameFamily,
    Normal,
    kl_divergence,
)

from anybatch import why
from anybatch.doctor.recorder import Doctor
from anybatch.records.findings import Finding
from anybatch.records.lines import Fact
from anybatch.records.paths import Paths
from anybatch.records.samples import Drawn, Scored
from number_runs import Training, fires, silent
from versions import saved_tensors

HERE = Path(__file__).name


def drawing(steps: Iterable[int], *others: Fact) -> Training:
    drawn = Drawn(
        root=0, module="decoder", distribution="Normal", width=4, file="vae.py", line=7, code="z = q.sample()"
    )
    wanted = set(steps)
    return Training(every=lambda step: [drawn] if step in wanted else [], after=others)


def test_sample_cuts_gradient_fires() -> None:
    one = fires(drawing(range(0, 60, 25)).run(), "SAMPLE_CUTS_GRADIENT", "warning")
    assert (one.place.file, one.place.line, one.fix) == ("vae.py", 7, "z = q.rsample()")
    assert one.evidence["draws_seen"] == 3
    fires(drawing(range(5), Scored(distribution="Normal", width=9)).run(), "SAMPLE_CUTS_GRADIENT", "warning")


def test_sample_cuts_gradient_is_quiet() -> None:
    silent(drawing([3]).run(), "SAMPLE_CUTS_GRADIENT")
    silent(drawing([]).run(), "SAMPLE_CUTS_GRADIENT")
    silent(drawing(range(5), Scored(distribution="Normal", width=4)).run(), "SAMPLE_CUTS_GRADIENT")


class Autoencoder(nn.Module):
    """A variational autoencoder whose latents are drawn in one way or another."""

    def __init__(self, draw: Callable[[Tensor, Tensor], Tensor], inputs: int = 4) -> None:
        super().__init__()
        self.draw = draw
        self.encoder, self.decoder = (
            nn.Linear(16, 8),
            nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 16)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, scale = self.encoder(x).chunk(2, -1)
        scale = F.softplus(scale)
        z = self.draw(mean, scale)
        return self.decoder(z), mean, scale


def elbo(model: nn.Module, x: Tensor) -> Tensor:
    output, mean, scale = model(x)
    prior = Normal(torch.zeros_like(mean), torch.ones_like(scale))
    return F.mse_loss(output, x, reduction="sum") / len(x) + kl_divergence(Normal(mean, scale), prior).sum(1).mean()


def findings(
    model: nn.Module, loss_fn: Callable[[nn.Module, Tensor], Tensor] = elbo, steps: int = 14
) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Doctor(every=10) as doctor:
        for _ in range(steps):
            loss = loss_fn(model, torch.randn(32, 16))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return tuple(one for one in doctor.findings if one.severity != "info")


WRONG: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "plain": (lambda mean, scale: Normal(mean, scale).sample(), 4),
    "independent": (lambda mean, scale: Independent(Normal(mean, scale), 1).sample(), 4),
    "transformed": (lambda mean, scale: LogNormal(mean, scale).sample(), 4),
    "gamma": (lambda mean, scale: Beta(scale + 0.1, mean.exp()).sample(), 4),
    "several": (lambda mean, scale: Normal(mean, scale).sample((3,)).mean(0) * 0 + Normal(mean, scale).sample(), 4),
    "reshaped": (lambda mean, scale: Normal(mean, scale).sample().view(-1, 4), 4),
    "beside a condition": (lambda mean, scale: torch.cat([Normal(mean, scale).sample(), mean.detach()], -1), 8),
    "behind a condition": (lambda mean, scale: torch.cat([mean.detach(), Normal(mean, scale).sample()], -1), 8),
}


@pytest.mark.parametrize("how", [name for name in WRONG if name != "several"])
def test_latents_that_are_sampled_are_named(how: str) -> None:
    draw, inputs = WRONG[how]
    (one,) = findings(Autoencoder(draw, inputs))
    assert one.name == "SAMPLE_CUTS_GRADIENT"
    assert one.place.module == "decoder.0"
    assert one.place.file.endswith(HERE)
    assert ".rsample()" in one.fix


def test_arithmetic_between_the_draw_and_the_module_hides_it() -> None:
    assert not findings(Autoencoder(WRONG["several"][0]))


RIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rsample": lambda mean, scale: Normal(mean, scale).rsample(),
    "noise": lambda mean, scale: mean + scale * Normal(torch.zeros(4), torch.ones(4)).sample(mean.shape[:1]),
    "prior": lambda mean, scale: Normal(torch.zeros_like(mean), torch.ones_like(mean)).sample() + mean,
    "straight through": lambda mean, scale: mean + (Normal(mean, scale).sample() - mean).detach(),
    "unused": lambda mean, scale: (Normal(mean, scale).sample(), mean + scale * torch.randn_like(mean))[1],
}


@pytest.mark.parametrize("how", RIGHT)
def test_other_draws_are_quiet(how: str) -> None:
    assert not findings(Autoencoder(RIGHT[how]))


class ActorCritic(nn.Module):
    """A policy whose action goes into a critic, as in many that need no gradient of the draw."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(16, 4), nn.Linear(20, 1)
        self.scale = nn.Parameter(torch.zeros(4))


def policy_gradient(model: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(model, ActorCritic)
    policy = Normal(model.actor(x), model.scale.exp())
    action = policy.sample()
    value = model.critic(torch.cat([x, action], -1)).squeeze(-1)
    reward = -(action - x[:, :4]).square().sum(-1)
    chosen: Tensor = policy.log_prob(action).sum(-1)
    surrogate: Tensor = -(chosen * (reward - value).detach()).mean()
    return surrogate + F.mse_loss(value, reward)


def test_a_policy_gradient_is_quiet() -> None:
    assert not [one for one in findings(ActorCritic(), policy_gradient) if one.name == "SAMPLE_CUTS_GRADIENT"]


def test_evaluation_and_no_grad_are_quiet() -> None:
    model = Autoencoder(lambda mean, scale: Normal(mean, scale).rsample())
    other = Autoencoder(lambda mean, scale: Normal(mean, scale).sample())

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            other.train()(x)
        other.eval()(x)
        return elbo(model, x)

    assert not findings(model, loss_fn)


def test_a_way_that_a_draw_cuts_altogether_is_one_finding() -> None:
    def reconstruction(model: nn.Module, x: Tensor) -> Tensor:
        output, _, _ = model(x)
        return F.mse_loss(output, x)

    (one,) = findings(Autoencoder(WRONG["plain"][0]), reconstruction)
    assert (one.name, one.evidence["op"]) == ("GRAPH_CUT", "sample")
    assert ".rsample()" in one.fix
    model = Autoencoder(WRONG["independent"][0])
    paths = why(lambda: reconstruction(model, torch.randn(4, 16)), model)
    assert {paths.stopped[name].op for name in ("encoder.weight", "encoder.bias")} == {"sample"}
    assert "Independent.sample()" in paths.stopped["encoder.weight"].message


def test_a_number_of_numpy_in_a_sum_is_made_of_the_arrays_that_were_taken_out() -> None:
    """As where log-probabilities go through NumPy on their way into the loss of a policy."""
    net, other = nn.Linear(4, 2), nn.Linear(4, 2)

    def loss(*, takes: bool) -> Tensor:
        made = net(torch.ones(3, 4)).mean()
        number = other(torch.ones(3, 4)).detach().numpy() if takes else torch.ones(3, 2).numpy()
        return number.mean() / 3 + 0.1 * made  # type: ignore[no-any-return]

    both = nn.ModuleList([net, other])
    for takes in (True, False):
        terms = Paths.from_dict(why(partial(loss, takes=takes), both).to_dict()).terms
        (number,) = [one for one in terms if not one.has_gradient]
        assert isinstance(number.value, float)
        assert (number.stopped, number.by) == ((2, "detach") if takes else (0, ""))


@pytest.mark.parametrize("is_constant", [True, False])
def test_a_constant_of_numpy_is_no_term_that_was_cut(is_constant: bool) -> None:
    """As log(2 pi) is, also where a metric is computed with NumPy."""
    net = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(net.parameters())
    with Doctor() as doctor:
        for _ in range(6):
            made = net(torch.randn(8, 4))
            error = made.detach().numpy().mean() / 3
            optimizer.zero_grad()
            ((made**2).mean() + (0.5 * np.log(2 * np.pi) if is_constant else error)).backward()
            optimizer.step()
    assert ("LOSS_TERM_CUT" in {one.name for one in doctor.findings}) != is_constant


def test_a_discrete_draw_that_cuts_says_what_else_there_is() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores, self.experts = nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            chosen = Categorical(logits=self.scores(x)).sample()
            taken: Tensor = self.experts(x).gather(1, chosen[:, None])
            return taken

    (one,) = findings(Router(), lambda model, x: F.mse_loss(model(x), x[:, :1]))
    assert one.name == "GRAPH_CUT"
    assert "gumbel_softmax" in one.fix


def methods() -> dict[tuple[str, str], object]:
    classes = [one for one in vars(torch.distributions).values() if isinstance(one, type)]
    known = [one for one in classes if issubclass(one, Distribution)]
    return {
        (one.__name__, name): vars(one).get(name) for one in known for name in ("sample", "rsample", "log_prob")
    }  # fmt: skip


def test_distributions_are_as_before_in_the_end() -> None:
    before = methods()
    with Doctor() as doctor:
        assert methods() == before  # their code is another
        drawn = Normal(torch.zeros(3), torch.ones(3)).sample()
        assert type(pickle.loads(pickle.dumps(Normal(drawn, 1.0)))) is Normal
    assert methods() == before
    assert not doctor.findings


def test_compiled_draws_are_left_alone() -> None:
    torch.compiler.reset()
    count = torch._dynamo.testing.CompileCounter()

    @torch.compile(backend=count, fullgraph=True)
    def drawn(mean: Tensor) -> Tensor:
        policy = Normal(mean, 1.0, validate_args=False)
        value = policy.sample()
        scored: Tensor = policy.log_prob(value)
        return scored

    mean = torch.zeros(5, requires_grad=True)
    with Doctor() as doctor:
        for _ in range(3):
            assert drawn(mean).shape == (5,)
    torch.compiler.reset()
    assert count.frame_count == 1
    assert not list(doctor.run.of(Scored))


def _policy(shape: Callable[[Tensor], Tensor], kind: str) -> None:
    net = nn.Linear(6, 1 if kind == "Normal" else 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(4):
        x = torch.randn(24, 6)
        made = net(x)
        policy: Any = Categorical(logits=made) if kind == "Categorical" else Normal(made.squeeze(-1), 1.0)
        if kind == "mixture":
            policy = MixtureSameFamily(Categorical(torch.ones(24, 3)), Normal(made, 1.0))
        value = torch.randint(0, 3, (24,)) if kind == "Categorical" else torch.randn(24)
        loss = -policy.log_prob(shape(value)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["Categorical", "Normal", "mixture"])
def test_values_in_a_column_that_every_distribution_of_a_row_scores_are_told(kind: str) -> None:
    with Doctor() as doctor:
        _policy(lambda value: value[:, None], kind)
    one = next(one for one in doctor.findings if one.name == "LOSS_BROADCAST")
    assert "(24, 24)" in one.message


@pytest.mark.parametrize("kind", ["Categorical", "Normal", "mixture"])
def test_values_that_have_the_shape_of_their_distributions_are_not(kind: str) -> None:
    with Doctor() as doctor:
        _policy(lambda value: value, kind)  # as do draws of each: of shape (draws, rows)
        _policy(lambda value: value.expand(5, 24), kind)
    assert "LOSS_BROADCAST" not in {one.name for one in doctor.findings}


OF_MATRICES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "mixture": lambda policy, y, scores: -scores.logsumexp(0).mean(),
    "leave one out": lambda policy, y, scores: -scores.masked_fill(torch.eye(24).bool(), -9.0).logsumexp(1).mean(),
    "contrast": lambda policy, y, scores: F.cross_entropy(scores, torch.arange(24)),
    "bound": lambda policy, y, scores: scores.mean() - 2 * policy.log_prob(y[:, None]).mean(),
    "bound by rows": lambda policy, y, scores: (scores.mean(1) - 2 * scores.diagonal()).mean(),
    "weights of pairs": lambda policy, y, scores: -(scores.detach().softmax(0) * scores).sum() / 24,
}


@pytest.mark.parametrize("kind", OF_MATRICES)
def test_values_that_every_distribution_scores_on_purpose_are_not(kind: str) -> None:
    net, scale = nn.Linear(1, 1), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([*net.parameters(), scale], lr=1e-2)
    with Doctor() as doctor:
        for _ in range(4):
            x = torch.randn(24, 1)
            y = (x + 0.3 * torch.randn(24, 1)).squeeze(1)
            policy: Any = Normal(net(x), scale.exp())
            optimizer.zero_grad()
            OF_MATRICES[kind](policy, y, policy.log_prob(y)).backward()
            optimizer.step()
    assert "LOSS_BROADCAST" not in {one.name for one in doctor.findings}


@saved_tensors
def test_values_in_a_column_whose_scores_are_weighed_by_rewards_are_told() -> None:
    net = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    with Doctor() as doctor:
        for _ in range(4):
            policy: Any = Categorical(logits=net(torch.randn(24, 6)))
            action = policy.sample()
            gained = policy.log_prob(action[:, None]) * (action == 1).float()
            optimizer.zero_grad()
            (-gained.mean() - 0.01 * policy.entropy().mean()).backward()
            optimizer.step()
    assert "LOSS_BROADCAST" in {one.name for one in doctor.findings}


def test_draws_are_the_same_as_without_a_doctor() -> None:
    def drawn() -> list[Tensor]:
        torch.manual_seed(3)
        mean = torch.zeros(5, requires_grad=True)
        return [
            Normal(mean, 1.0).sample(),
            Independent(Normal(mean, 1.0), 1).sample((2,)),
            LogNormal(mean, 1.0).sample(),
        ]

    expected = drawn()
    with Doctor():
        for one, other in zip(drawn(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
