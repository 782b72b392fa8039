"""The cause that is named is one whose removal helps: the optimizer that steps would be reached."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

from anybatch.doctor.recorder import Doctor
from anybatch.records.findings import Finding

STEPS = 40


def found_in(program: Callable[[], Any]) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    with Doctor() as doctor:
        program()
    return tuple(one for one in doctor.findings if one.severity != "info")


def line_of(text: str) -> int:
    """The line of this file with a mark."""
    with open(__file__, encoding="utf-8") as file:  # noqa: PTH123
        return next(number for number, line in enumerate(file, start=1) if line.rstrip().endswith(f"# {text}"))


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def chosen_then_remade(*, stacked: bool = False) -> None:
    """Actions are drawn, as they must be; their log-probabilities lose their graph later."""
    body, actor, critic = nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*body.parameters(), *actor.parameters(), *critic.parameters()], lr=1e-2)
    for _ in range(STEPS):
        logs, values = [], []
        for _ in range(4):
            h = torch.tanh(body(torch.randn(6)))
            policy = Categorical(logits=actor(h))
            logs.append(policy.log_prob(policy.sample()))
            values.append(critic(h).squeeze())
        together = torch.stack(logs) if stacked else torch.tensor([one.item() for one in logs])  # remade
        returns = torch.randn(4)
        gained = (together * returns).mean()
        step(optimizer, F.mse_loss(torch.stack(values), returns) - gained)


def test_what_ends_the_graph_last_is_the_cause() -> None:
    found = found_in(chosen_then_remade)
    assert found[0].name in ("LOSS_TERM_CUT", "GRAPH_CUT")
    assert found[0].place.line == line_of("remade")
    assert not any("sample" in one.fix for one in found)
    assert found_in(lambda: chosen_then_remade(stacked=True)) == ()


def slope_without_graph(*, create: bool = False) -> None:
    """A critic's penalty whose inputs come through ``.data``, which is right; a gradient of it is a constant."""
    maker, critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    other = torch.optim.Adam(maker.parameters(), lr=1e-3)
    for _ in range(STEPS):
        made = maker(torch.randn(16, 3))
        mixed = (0.5 * torch.randn(16, 4) + 0.5 * made.data).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, retain_graph=True, create_graph=create)  # slope
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        step(optimizer, critic(made.detach()).mean() - critic(torch.randn(16, 4)).mean() + penalty)
        step(other, -critic(maker(torch.randn(16, 3))).mean())


def test_a_cut_of_parameters_that_no_step_of_this_loss_trains_is_no_cause() -> None:
    (one,) = found_in(slope_without_graph)
    assert (one.name, one.place.line) == ("LOSS_TERM_CUT", line_of("slope"))
    assert "create_graph=True" in one.fix
    assert found_in(lambda: slope_without_graph(create=True)) == ()


def teacher_with_itself(*, student: bool = False) -> None:
    large, small = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)), nn.Linear(6, 3)
    optimizer = torch.optim.Adam(small.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x = torch.randn(32, 6)
        with torch.no_grad():
            told = F.log_softmax(large(x), -1)
        said = small(x)
        near = F.kl_div(F.log_softmax(said, -1) if student else told, told, log_target=True, reduction="batchmean")
        step(optimizer, 4 * near + F.cross_entropy(said, x[:, :3].argmax(1)))


def test_a_term_of_another_model_alone_is_told_as_that() -> None:
    (one,) = found_in(teacher_with_itself)
    assert one.name == "LOSS_TERM_CUT"
    assert "only large went into it, and nothing of small" in one.message
    assert "no_grad" not in one.fix
    assert found_in(lambda: teacher_with_itself(student=True)) == ()


def gradient_set_by_hand() -> None:
    """Weights of tasks that get a gradient of their own, set by hand for a second optimizer."""
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    weights = torch.zeros(2, requires_grad=True)
    optimizer, second = torch.optim.Adam(net.parameters(), lr=1e-2), torch.optim.Adam([weights], lr=1e-2)
    for _ in range(STEPS):
        x = torch.randn(32, 6)
        losses = ((net(x) - x[:, :2]) ** 2).mean(0)
        step(optimizer, (losses * F.softmax(weights, 0).detach()).sum())
        second.zero_grad()
        (weights.grad,) = torch.autograd.grad(F.softmax(weights, 0), weights, losses.detach())
        second.step()


def test_a_gradient_that_is_set_by_hand_is_no_wasted_term() -> None:
    assert found_in(gradient_set_by_hand) == ()


def stepped_first() -> None:
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        x = torch.randn(32, 6)
        loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
        net.zero_grad()
        optimizer.step()  # first
        loss.backward()


def test_a_step_before_the_backward_is_what_is_moved() -> None:
    one = found_in(stepped_first)[0]
    assert (one.name, one.place.line) == ("ZERO_GRAD_BEFORE_STEP", line_of("first"))
    assert one.fix.startswith("move optimizer.step()")


def cleared_too_late() -> None:
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        x = torch.randn(32, 6)
        F.cross_entropy(net(x), x[:, :3].argmax(1)).backward()
        net.zero_grad()  # late
        optimizer.step()


def test_a_clearing_behind_the_backward_is_what_is_moved_by_its_own_name() -> None:
    one = found_in(cleared_too_late)[0]
    assert (one.name, one.place.line) == ("ZERO_GRAD_BEFORE_STEP", line_of("late"))
    assert one.fix.startswith("move net.zero_grad() before")


@pytest.mark.parametrize("steps", [5, 40])
def test_a_gradient_that_is_never_cleared_is_counted_to_the_end(steps: int) -> None:
    def program() -> None:
        net = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for _ in range(steps):
            x = torch.randn(32, 6)
            F.cross_entropy(net(x), x[:, :3].argmax(1)).backward()
            optimizer.step()

    one = found_in(program)[0]
    assert one.name == "ZERO_GRAD_MISSING"
    assert one.evidence["steps"] == steps - 1


def values_of_states(*, squeezed: bool = False) -> None:
    """A value loss, one of three terms, of heads that are called one by one in a method."""

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
            self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

        def both(self, x: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
            return Categorical(logits=self.actor(x)), self.critic(x)

    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(32, 4)
        returns, old = x.sum(1), torch.zeros(32)
        policy, value = agent.both(x)
        value = value.squeeze(-1) if squeezed else value
        action = policy.sample()
        ratio = (policy.log_prob(action) - policy.log_prob(action).detach()).exp()
        near = old + (value - old).clamp(-0.2, 0.2)
        of_values = torch.max((value - returns) ** 2, (near - returns) ** 2).mean()
        step(optimizer, -(ratio * returns).mean() - 0.01 * policy.entropy().mean() + 0.5 * of_values)


def test_shapes_that_spread_are_found_in_one_of_several_terms() -> None:
    (one,) = found_in(values_of_states)
    assert one.name == "LOSS_BROADCAST"
    assert "(32, 1)" in one.message
    assert found_in(lambda: values_of_states(squeezed=True)) == ()


def players_of_classes(*, squashed: bool = True) -> None:
    """A judge whose classes come out of a softmax, in three losses."""

    class Judge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
            self.of_class = nn.Sequential(nn.Linear(16, 3), nn.Softmax(1) if squashed else nn.Identity())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.of_class(self.body(x))
            return out

    maker, judge = nn.Linear(4, 6), Judge()
    optimizer_g = torch.optim.Adam(maker.parameters(), lr=1e-2)
    optimizer_d = torch.optim.Adam(judge.parameters(), lr=1e-2)
    for _ in range(STEPS):
        wanted = torch.randint(3, (32,))
        made = maker(torch.randn(32, 4))
        step(optimizer_g, F.cross_entropy(judge(made), wanted))
        x = torch.randn(32, 6)
        real = F.cross_entropy(judge(x), x[:, :3].argmax(1))
        fake = F.cross_entropy(judge(made.detach()), wanted)
        step(optimizer_d, (real + fake) / 2)


def test_one_activation_in_several_losses_is_told_once_with_its_module() -> None:
    found = [one for one in found_in(players_of_classes) if not one.consequence_of]
    assert [(one.name, one.place.module) for one in found] == [("DOUBLE_ACTIVATION", "judge.of_class.1")]
    assert found_in(lambda: players_of_classes(squashed=False)) == ()
