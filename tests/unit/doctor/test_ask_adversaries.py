"""A generator that helps its critic: asked of GANs in the forms in which they are written."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.ask.asking import run_probes
from anybatch.doctor.diagnosing import diagnose
from anybatch.doctor.recorder import Doctor

Score = Callable[[torch.Tensor, bool], torch.Tensor]
Loop = Callable[[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer, Score, bool], None]


def bce(score: torch.Tensor, is_real: bool) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(score, torch.full_like(score, float(is_real)))


def wasserstein(score: torch.Tensor, is_real: bool) -> torch.Tensor:
    return -score.mean() if is_real else score.mean()


def squares(score: torch.Tensor, is_real: bool) -> torch.Tensor:
    return (score - float(is_real)).pow(2).mean()


def tutorial(
    made: nn.Module, critic: nn.Module, of_made: torch.optim.Optimizer, of_critic: torch.optim.Optimizer,
    loss: Score, sign: bool,
) -> None:  # fmt: skip
    """Two backwards of the critic, and what it was shown is used again."""
    critic.zero_grad()
    loss(critic(torch.randn(16, 4) + 2), True).backward()
    fake = made(torch.randn(16, 3))
    loss(critic(fake.detach()), False).backward()
    of_critic.step()
    made.zero_grad()
    loss(critic(fake), sign).backward()
    of_made.step()


def apart(
    made: nn.Module, critic: nn.Module, of_made: torch.optim.Optimizer, of_critic: torch.optim.Optimizer,
    loss: Score, sign: bool,
) -> None:  # fmt: skip
    """One backward each, and what the generator is trained with is made anew."""
    with torch.no_grad():
        fake = made(torch.randn(16, 3))
    of_critic.zero_grad()
    (loss(critic(fake), False) + loss(critic(torch.randn(16, 4) + 2), True)).backward()
    of_critic.step()
    of_made.zero_grad()
    loss(critic(made(torch.randn(16, 3))), sign).backward()
    of_made.step()


def not_detached(
    made: nn.Module, critic: nn.Module, of_made: torch.optim.Optimizer, of_critic: torch.optim.Optimizer,
    loss: Score, sign: bool,
) -> None:  # fmt: skip
    """The loss of the critic has a gradient in the generator, which is cleared before its own."""
    of_critic.zero_grad()
    fake = made(torch.randn(16, 3))
    (loss(critic(fake), False) + loss(critic(torch.randn(16, 4) + 2), True)).backward()
    of_critic.step()
    of_made.zero_grad()
    loss(critic(made(torch.randn(16, 3))), sign).backward()
    of_made.step()


def many_steps(
    made: nn.Module, critic: nn.Module, of_made: torch.optim.Optimizer, of_critic: torch.optim.Optimizer,
    loss: Score, sign: bool,
) -> None:  # fmt: skip
    """Several steps of the critic before one of the generator, for which the critic is frozen."""
    critic.requires_grad_(True)
    for _ in range(5):
        of_critic.zero_grad()
        loss(critic(torch.randn(16, 4) + 2), True).backward()
        loss(critic(made(torch.randn(16, 3)).detach()), False).backward()
        of_critic.step()
    critic.requires_grad_(False)
    of_made.zero_grad()
    loss(critic(made(torch.randn(16, 3))), sign).backward()
    of_made.step()


def given_signs(
    made: nn.Module, critic: nn.Module, of_made: torch.optim.Optimizer, of_critic: torch.optim.Optimizer,
    _: Score, sign: bool,
) -> None:  # fmt: skip
    """The mean scores, each with its sign as the gradient of its backward."""
    one = torch.tensor(1.0)
    of_critic.zero_grad()
    critic(torch.randn(16, 4) + 2).mean().backward(-one)
    critic(made(torch.randn(16, 3)).detach()).mean().backward(one)
    of_critic.step()
    of_made.zero_grad()
    critic(made(torch.randn(16, 3))).mean().backward(-one if sign else one)
    of_made.step()


def helped(loop: Loop, loss: Score, *, sign: bool) -> str:
    torch.manual_seed(0)
    made, critic = (
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)),
        nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
    )
    of_made, of_critic = (torch.optim.Adam(one.parameters(), 1e-3) for one in (made, critic))
    with Doctor() as doctor:
        for _ in range(4):
            loop(made, critic, of_made, of_critic, loss, sign)
    assert doctor.failure == ""
    (found,) = {one.answer for one in run_probes(doctor) if one.probe == "helped"} - {"unknown"}  # of the other order
    return found


@pytest.mark.parametrize("loss", [bce, wasserstein, squares])
@pytest.mark.parametrize("loop", [tutorial, apart, not_detached])
def test_a_generator_that_helps_its_critic_is_told_from_one_that_does_not(loop: Loop, loss: Score) -> None:
    assert helped(loop, loss, sign=True) == "no"
    assert helped(loop, loss, sign=False) == "yes"


@pytest.mark.parametrize(("loop", "loss"), [(many_steps, bce), (many_steps, wasserstein), (given_signs, wasserstein)])
def test_it_is_told_where_the_critic_has_several_steps_and_where_signs_are_given_to_the_backward(
    loop: Loop, loss: Score
) -> None:
    assert helped(loop, loss, sign=True) == "no"
    assert helped(loop, loss, sign=False) == "yes"


def test_two_optimizers_that_work_together_are_not_asked() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 8), nn.Linear(8, 1)
    optimizers = [torch.optim.Adam(one.parameters(), 1e-3) for one in (first, second)]
    with Doctor() as doctor:
        for step in range(8):
            for one in optimizers:
                one.zero_grad()
            second(first(torch.randn(16, 4)).relu()).pow(2).mean().backward()
            optimizers[step % 2].step()
    assert not [one for one in run_probes(doctor) if one.probe == "helped" and one.answer == "yes"]


def test_what_was_generated_is_told_from_data_after_the_generator_has_learned() -> None:
    """The generator ends nearer to the data than what it gave in the step that was written down."""
    torch.manual_seed(0)
    made, critic = nn.Linear(3, 1), nn.Sequential(nn.Linear(1, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    of_made, of_critic = (torch.optim.Adam(one.parameters(), 0.1) for one in (made, critic))
    with Doctor() as doctor:
        for _ in range(40):
            with torch.no_grad():
                fake = made(torch.randn(16, 3))
            of_critic.zero_grad()
            (F.relu(1 - critic(torch.randn(16, 1) + 3)).mean() + F.relu(1 + critic(fake)).mean()).backward()
            of_critic.step()
            of_made.zero_grad()
            (-critic(made(torch.randn(16, 3))).mean()).backward()
            of_made.step()
    assert [one.answer for one in run_probes(doctor) if one.probe == "helped"] == ["no"]


Kept = Callable[[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer], None]


def of_both(critic: nn.Module, fake: torch.Tensor) -> torch.Tensor:
    return bce(critic(torch.randn(16, 4) + 2), True) + bce(critic(fake), False)


def left(
    made: nn.Module, critic: nn.Module, of_made: torch.optim.Optimizer, of_critic: torch.optim.Optimizer,
    *, is_detached: bool = False,
) -> None:  # fmt: skip
    """All is cleared at the start, and the critic's loss puts a gradient on the generator unless it is detached."""
    of_critic.zero_grad()
    of_made.zero_grad()
    fake = made(torch.randn(16, 3))
    of_both(critic, fake.detach() if is_detached else fake).backward()
    of_critic.step()
    bce(critic(made(torch.randn(16, 3))), True).backward()
    of_made.step()


def cleared(
    made: nn.Module, critic: nn.Module, of_made: torch.optim.Optimizer, of_critic: torch.optim.Optimizer
) -> None:
    of_critic.zero_grad()
    of_both(critic, made(torch.randn(16, 3))).backward()
    of_critic.step()
    of_made.zero_grad()
    bce(critic(made(torch.randn(16, 3))), True).backward()
    of_made.step()


def generator_first(
    made: nn.Module, critic: nn.Module, of_made: torch.optim.Optimizer, of_critic: torch.optim.Optimizer
) -> None:
    of_made.zero_grad()
    bce(critic(made(torch.randn(16, 3))), True).backward()
    of_made.step()
    of_critic.zero_grad()
    of_both(critic, made(torch.randn(16, 3))).backward()
    of_critic.step()


def tasks(made: nn.Module, critic: nn.Module, of_made: torch.optim.Optimizer, of_critic: torch.optim.Optimizer) -> None:
    """The lower net has the gradients of both losses, as is meant where one is a task and the other has more of it."""
    of_critic.zero_grad()
    of_made.zero_grad()
    x = torch.randn(16, 3)
    F.mse_loss(critic(made(x)), x.sum(1, keepdim=True)).backward()
    of_critic.step()
    (F.mse_loss(critic(made(x)), x.sum(1, keepdim=True)) + 0.1 * made(x).pow(2).mean()).backward()
    of_made.step()


@pytest.mark.parametrize(
    ("loop", "expected"),
    [(left, 1), (cleared, 0), (partial(left, is_detached=True), 0), (generator_first, 0), (tasks, 0)],
)
def test_a_gradient_of_the_critic_that_its_generator_steps_with_is_told(loop: Kept, expected: int) -> None:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    of_made, of_critic = (torch.optim.Adam(one.parameters(), 1e-3) for one in (made, critic))
    with Doctor() as doctor:
        for _ in range(6):
            loop(made, critic, of_made, of_critic)
    for answer in run_probes(doctor):
        doctor.emit(answer)
    assert [one.code for one in diagnose(doctor.run)].count("AB206") == expected


def test_what_takes_long_and_has_no_limit_is_asked_last() -> None:
    made, critic = nn.Linear(3, 4), nn.Linear(4, 1)
    of_made, of_critic = (torch.optim.Adam(one.parameters()) for one in (made, critic))
    with Doctor() as doctor:
        for _ in range(4):
            apart(made, critic, of_made, of_critic, bce, True)
    asked = [one.probe for one in run_probes(doctor, seconds=0)]
    assert asked.index("outweighed") < asked.index("rate") < asked.index("helped")
    assert "helped" not in asked[: len(asked) - asked[::-1].index("related")]
