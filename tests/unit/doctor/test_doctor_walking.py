"""What the graph of a loss shows: what it reaches, its summands, softmaxes, doubled activations, nodes of before."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from anybatch.doctor.recording.numbering import Numbering
from anybatch.doctor.samples.walking import LiveGraphs, Walker


def setting(model: nn.Module) -> tuple[Walker, Numbering]:
    numbering = Numbering(lambda fact: None)
    numbering.root(model)
    return Walker(numbering), numbering


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


X, Y = torch.ones(5, 4), torch.tensor([0, 1, 2, 0, 1])


def test_what_is_reached_and_what_is_not() -> None:
    model = net()
    walker, numbering = setting(model)
    walk = walker.walk(F.cross_entropy(model[2](model[1](model[0](X)).detach()), Y), 5)
    assert [numbering.name(n) for n in walk.reached] == ["2.bias", "2.weight"]
    assert len(walker.walk(F.cross_entropy(model(X), Y), 5).reached) == 4
    assert not walk.outside
    assert not walk.doubled
    assert not walk.previous
    assert not walk.forced
    assert not walk.cut_short


@pytest.mark.parametrize(
    ("activation", "target", "loss", "expected"),
    [
        (nn.Softmax(-1), Y, F.cross_entropy, ("softmax", "cross_entropy")),
        (nn.LogSoftmax(-1), Y, F.cross_entropy, ("log_softmax", "cross_entropy")),
        (nn.Softmax(-1), Y, F.nll_loss, ("softmax", "nll_loss")),
        (nn.Sigmoid(), torch.zeros(5, 3), F.binary_cross_entropy_with_logits,
         ("sigmoid", "binary_cross_entropy_with_logits")),
        (nn.ReLU(), Y, F.cross_entropy, ("relu", "cross_entropy")),
        (nn.Sequential(nn.Sigmoid(), nn.Unflatten(-1, (3, 1)), nn.Flatten()), torch.zeros(5, 3),
         F.binary_cross_entropy_with_logits, ("sigmoid", "binary_cross_entropy_with_logits")),
    ],
)  # fmt: skip
def test_doubled_activations(activation: nn.Module, target: torch.Tensor, loss, expected: tuple[str, str]) -> None:  # type: ignore[no-untyped-def]
    model = net()
    walk = setting(model)[0].walk(loss(activation(model(X)), target), 5)
    assert walk.doubled == (expected,)


def test_usual_ends_are_not_doubled() -> None:
    model = net()
    walker, _ = setting(model)
    healthy = [
        F.cross_entropy(model(X), Y),
        F.nll_loss(model(X).log_softmax(-1), Y),
        F.binary_cross_entropy(model(X).sigmoid(), torch.zeros(5, 3)),
        F.mse_loss(model(X).softmax(-1), torch.zeros(5, 3)),
        F.cross_entropy(model(X).softmax(-1) * 5 + model(X), Y),
        F.nll_loss(model(X).softmax(-1).log(), Y),
        F.cross_entropy(model(X) + model(X).relu(), Y),
    ]
    assert [walker.walk(loss, 5).doubled for loss in healthy] == [()] * len(healthy)


def test_activations_that_feed_a_distance_are_told() -> None:
    model = net()
    walker, _ = setting(model)
    targets = torch.zeros(5, 3)
    losses = [
        F.mse_loss(model(X).relu(), targets),
        F.smooth_l1_loss(model(X).tanh().unsqueeze(0), targets[None]),
        F.huber_loss(model(X).sigmoid().view(-1), targets.view(-1)),
        F.mse_loss(model(X).relu() + 1, targets),
        F.mse_loss(model(X), targets),
    ]
    assert [walker.walk(loss, 5).activated for loss in losses] == [
        (("relu", "mse_loss"),), (("tanh", "smooth_l1_loss"),), (("sigmoid", "huber_loss"),), (), (),
    ]  # fmt: skip


def test_an_activation_before_one_of_two_calls_of_a_distance_is_not_told_of_both() -> None:
    model = net()
    walker, _ = setting(model)
    targets, scores = torch.zeros(5, 3), model(X)
    mixed = F.mse_loss(scores[:, :2].sigmoid(), targets[:, :2]) + F.mse_loss(scores[:, 2:], targets[:, 2:])
    alike = F.mse_loss(scores[:, :2].sigmoid(), targets[:, :2]) + F.mse_loss(scores[:, 2:].sigmoid(), targets[:, 2:])
    assert walker.walk(mixed, 5).activated == ()
    assert walker.walk(alike, 5).activated == (("sigmoid", "mse_loss"),)


def test_softmax_dims_are_not_negative() -> None:
    model = net()
    walker, _ = setting(model)
    assert walker.walk(model(X).softmax(0).sum(), 5).softmaxes == ((0, 2, 5, True),)
    assert walker.walk(model(X).softmax(-1).sum(), 5).softmaxes == ((1, 2, 3, True),)
    assert walker.walk(model(X).view(5, 1, 3).softmax(-1).sum(), 5).softmaxes == ((2, 3, 3, True),)
    assert walker.walk(model(X).log_softmax(1).sum(), 7).softmaxes == ((1, 2, 3, False),)


def test_constant_terms_are_counted() -> None:
    model = net()
    walker, _ = setting(model)
    loss = F.cross_entropy(model(X), Y)
    assert walker.walk(loss, 5).constant_terms == 0
    assert walker.walk(loss + (loss * 3).detach(), 5).constant_terms == 1
    assert walker.walk((loss + 0.1 - torch.tensor(2.0)) / 4, 5).constant_terms == 2
    assert walker.walk(torch.stack([loss, loss.detach()]).mean(), 5).constant_terms == 1
    assert walker.walk((model(X) + 1.0).mean(), 5).constant_terms == 0  # no sum of scalars


def test_a_graph_that_goes_on_behind_an_earlier_step() -> None:
    cell = nn.RNNCell(4, 6)
    walker, _ = setting(cell)
    state = torch.zeros(5, 6)
    found = []
    for step in range(3):
        state = cell(X, state)
        loss = state.pow(2).mean()
        found.append(walker.walk(loss, 5, step=step))
        loss.backward(retain_graph=True)
    assert found[0].previous == ()
    assert "of shape [5, 6], made 1 step before" in found[1].previous[0]
    assert found[2].nodes > found[1].nodes > found[0].nodes
    state = torch.zeros(5, 6)
    graphs = LiveGraphs()
    for step in range(3, 6):  # detached between steps
        state = cell(X, state.detach())
        loss = state.pow(2).mean()
        assert walker.walk(loss, 5, step=step).previous == ()
        graphs.add(loss, step)
        loss.backward()
        assert graphs.count(step) == (0, 0)


def test_what_an_earlier_step_made_is_as_old_as_it_is() -> None:
    model = net()
    walker, _ = setting(model)
    kept = model[0](X)
    for step, ago in enumerate(["", "made 1 step before", "made 2 steps before"]):
        found = walker.walk((model[0](X) + kept).mean(), 5, step=step)
        assert (ago in found.previous[0]) if ago else not found.previous
        assert found.again == 0


def test_two_backwards_of_one_step_are_not_old() -> None:
    model = net()
    walker, _ = setting(model)
    for step in range(2):
        hidden = model[0](X)
        first, second = hidden.mean(), model[2](hidden).mean()
        assert walker.walk(first, 5, step=step).previous == ()
        first.backward(retain_graph=True)
        assert walker.walk(second, 5, step=step).previous == ()
        second.backward()


def test_leaves_outside_of_the_model() -> None:
    model = net()
    walker, numbering = setting(model)
    scale = nn.Parameter(torch.ones(3))
    walk = walker.walk((model(X) * scale).sum(), 5, step=0)
    assert [numbering.tensor(n) is scale for n in walk.outside] == [True]
    for step in range(4):  # inputs that are made anew
        points = torch.rand(5, 4).requires_grad_()
        assert walker.walk(model(points).sum(), 5, step=step).outside == ()
    kept = torch.rand(5, 4).requires_grad_()
    for _ in range(2):  # two losses of one step
        assert walker.walk(model(kept).sum(), 5, step=0).outside == ()
    assert [numbering.tensor(n) is kept for n in walker.walk(model(kept).sum(), 5, step=1).outside] == [True]
    assert not [n for n in walker.walk(model(kept).sum(), 5, step=2).reached if numbering.tensor(n) is kept]


def test_a_loss_that_is_a_leaf() -> None:
    model = net()
    walker, _ = setting(model)
    loss = model(X).argmax(-1).float().mean()
    assert not walker.walk(loss, 5).forced
    assert walker.walk(loss.requires_grad_(), 5).forced
    assert walker.walk(loss, 5).nodes == 0


def test_checkpoints_and_limits() -> None:
    model = net()
    walker, numbering = setting(model)
    x = X.clone().requires_grad_()
    walk = walker.walk(checkpoint(model, x, use_reentrant=True).sum(), 5)
    assert walk.hidden == 1
    assert walk.reached == ()
    assert len(walker.walk(checkpoint(model, X, use_reentrant=False).sum(), 5).reached) == 4
    assert Walker(numbering, limit=3).walk(model(X).sum(), 5).cut_short


def test_what_is_saved_is_not_unpacked() -> None:
    model = net()
    walker, _ = setting(model)

    def refuse(_: object) -> torch.Tensor:
        raise AssertionError("unpacked")

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, refuse):
        loss = F.cross_entropy(model(X).softmax(-1), Y)
    assert walker.walk(loss, 5).doubled == (("softmax", "cross_entropy"),)


def test_sums_of_losses_stay_alive_and_numbers_do_not() -> None:
    model = net()
    for as_number in (False, True):
        graphs, total = LiveGraphs(), 0.0
        for step in range(4):
            loss = model(X).mean()
            graphs.add(loss, step)
            loss.backward()
            total += loss.item() if as_number else loss
        del loss
        assert graphs.count(4) == ((0, 0) if as_number else (4, 4))
        del total


def test_terms_and_what_each_reaches() -> None:
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
    walker, numbering = setting(model)
    fake = model["g"](X)
    walk = walker.walk((fake - X).abs().mean() + 0.01 * -model["d"](fake.detach()).mean() + 0.5, 5)
    names = [{numbering.name(n) for n in term} for term in walk.terms]
    assert names == [{"g.weight", "g.bias"}, {"d.weight", "d.bias"}, set()]
    assert walk.constant_terms == 1
    assert walker.walk(fake.mean(), 5).terms == ()


def test_an_advantage_with_a_gradient() -> None:
    model = nn.ModuleDict({"actor": nn.Linear(4, 2), "critic": nn.Linear(4, 1)})
    walker, numbering = setting(model)
    returns = torch.arange(5.0)

    def walk(*, detached: bool, normalised: bool) -> set[str]:
        advantage = returns - model["critic"](X).squeeze(-1)
        advantage = advantage.detach() if detached else advantage
        if normalised:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        logp = model["actor"](X).log_softmax(-1)[:, 0]
        found = walker.walk(-(logp * advantage).mean(), 5).advantages
        return {numbering.name(n) for one in found for n in one}

    assert walk(detached=False, normalised=False) == {"critic.weight", "critic.bias"}
    assert walk(detached=False, normalised=True) == {"critic.weight", "critic.bias"}
    assert walk(detached=True, normalised=False) == walk(detached=True, normalised=True) == set()
    gate = (1 - model["critic"](X).sigmoid()) * model["critic"](X)  # both sides reach the same
    assert walker.walk(gate.mean(), 5).advantages == ()


@pytest.mark.parametrize("logs", [True, False])
def test_an_advantage_of_a_net_that_the_policy_shares(logs: bool) -> None:
    """A gate is a difference with a constant, too, so a shared trunk counts beside logarithms only."""
    model = nn.ModuleDict({"trunk": nn.Linear(4, 3), "actor": nn.Linear(3, 2), "critic": nn.Linear(3, 1)})
    walker, numbering = setting(model)

    def value() -> torch.Tensor:
        found: torch.Tensor = model["critic"](model["trunk"](X))
        return found

    scores = model["actor"](model["trunk"](X))
    policy = torch.distributions.Categorical(logits=scores).log_prob(torch.ones(5)) if logs else scores[:, 0]
    rewards = torch.ones(5, 1)
    for advantage in (rewards - value(), rewards + 0.9 * value() * torch.ones(5, 1) - value()):
        found = walker.walk(-(policy * advantage.squeeze(1)).mean(), 5).advantages
        assert [[numbering.name(n) for n in one] for one in found] == [["critic.weight", "critic.bias"]] * logs


def test_what_a_constant_of_another_shape_is_spread_over() -> None:
    model = nn.Linear(4, 1)
    walker, _ = setting(model)
    y, old = torch.ones(5), torch.zeros(5)

    def clipped(value: torch.Tensor) -> torch.Tensor:
        """A value loss as one of several terms."""
        near = old + (value - old).clamp(-0.2, 0.2)
        worst = torch.max((value - y) ** 2, (near - y) ** 2)
        loss: torch.Tensor = model(X).pow(2).mean() - 0.01 * model.weight.sum() + 0.5 * worst.mean() * 0.5
        return loss

    def found(loss: torch.Tensor, rows: int = 5) -> tuple[int, ...]:
        return walker.walk(loss, rows).spread

    assert found(((model(X) - y) ** 2).mean()) == (5, 1)
    assert found((model(X).squeeze() - y).abs().mean()) == ()
    assert found((model(X).squeeze() - y[:, None]).abs().mean()) == (5,)
    error = y - model(X)
    assert found((error * error).sum() / 5) == (5, 1)
    assert found(clipped(model(X))) == (5, 1)
    assert found(clipped(model(X).squeeze())) == ()
    assert found(-(model(X).squeeze() * y[:, None]).mean()) == (5,)
    assert found(model(X).pow(2).mean()) == ()
    assert found(F.mse_loss(model(X), y[:, None])) == ()
    assert found(((model(X) - model(X).T) ** 2).mean()) == ()  # all pairs, as is meant
    assert found(((model(X) - y) ** 2).softmax(1).mean()) == ()  # a kernel
    assert found(((model(X) - y) ** 2).mean(), 10) == (5, 1)  # a call of 10 rows came after it
    column = model.weight.T  # plain tensors, without any call of a model
    assert found(((X @ column + model.bias - y) ** 2).mean(), -1) == (5, 1)
    assert found((((X @ column).add_(model.bias) - y[:, None]) ** 2).mean(), -1) == ()
    assert found(((model(X).tanh() - y) ** 2).mean() + model(X).sum(), 10) == ()  # centres of a kernel, say
    assert found(((model.weight[:, :3].T - torch.ones(3)) ** 2).mean(), 10) == ()
