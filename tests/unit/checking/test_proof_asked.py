"""What the first batch does not show is asked for: averages that begin equal, and bounds that are not reached."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

Batch = dict[str, torch.Tensor]


def batch_of(seed: int = 1) -> Batch:
    drawn = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(24, 6, generator=drawn), "y": torch.randint(4, (24,), generator=drawn)}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


class Student(nn.Module):
    """A net and its teacher, which begins as a copy and follows it."""

    def __init__(self, follows: str = "") -> None:
        super().__init__()
        self.net, self.follows = net(), follows
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            if self.follows == "in .data":
                own.data = 0.95 * own.data + 0.05 * other.data
            else:
                own.lerp_(other, 0.05)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.follows:
            self.follow()
        return self.net(x), self.teacher(x + 0.1)


def consistency(model: Any, batch: Batch) -> torch.Tensor:
    own, other = model(batch["x"])
    return F.mse_loss(own, other.detach())


def same_weights(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("how", ["in place", "in .data"])
def test_an_average_that_the_forward_moves_is_stopped_although_it_begins_equal(how: str) -> None:
    model = Student(how)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(anybatch.NotSplittable, match=r"writes to teacher\.0\.weight") as caught:
        anybatch.backward(model, consistency, batch_of(), micro_batch_size=4)
    assert "model.update_average()" in str(caught.value)
    for name, value in model.state_dict().items():  # a teacher that equals its net is moved to itself
        torch.testing.assert_close(value, before[name])


def test_an_average_that_is_moved_after_the_step_passes() -> None:
    model = Student()
    step = anybatch.TrainStep(model, consistency, torch.optim.SGD(model.net.parameters(), lr=0.1), micro_batch_size=4)
    for seed in range(2):
        result = step(batch_of(seed))
        model.follow()
        assert result.proof is not None
        assert result.proof.exact


def test_weights_that_are_put_in_their_bounds_in_each_forward_pass_and_stay_as_they_were() -> None:
    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for one in self.net.parameters():
                    one.clamp_(-0.3, 0.3)
            return self.net(x)  # type: ignore[no-any-return]

    model = Bounded()
    model(batch_of()["x"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = anybatch.backward(
        model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), batch_of(), micro_batch_size=4, verify="first"
    )
    assert result.proof is not None
    assert result.proof.exact
    assert same_weights(model, before)


def mean(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def test_a_clamp_that_no_gradient_reaches_yet_is_stopped() -> None:
    for bound in (1.0, 100.0):
        model = net()
        for one in model.parameters():
            one.register_hook(lambda gradient, bound=bound: gradient.clamp(-bound, bound))
        with pytest.raises(anybatch.NotSplittable, match="is not linear"):
            anybatch.backward(model, mean, batch_of(), micro_batch_size=4)


@pytest.mark.parametrize(
    "hook", [torch.nan_to_num, lambda gradient: 0.1 * gradient, lambda gradient: gradient * (gradient.abs() >= 0)]
)
def test_hooks_that_are_linear_pass(hook: Any) -> None:
    model = net()
    for one in model.parameters():
        one.register_hook(hook)
    model[2].register_full_backward_hook(lambda module, given, got: None)
    proof = anybatch.backward(model, mean, batch_of(), micro_batch_size=4).proof
    assert proof is not None
    assert proof.exact


def test_remedies_name_what_was_called() -> None:
    def spread(model: Any, batch: Batch) -> torch.Tensor:
        return model(batch["x"]).std(0).mean()  # type: ignore[no-any-return]

    with pytest.raises(anybatch.NotSplittable, match=r"anybatch\.backward\(model, loss_fn, batch\)  # no micro_batch"):
        anybatch.backward(net(), spread, batch_of(), micro_batch_size=4)
    model = net()
    step = anybatch.TrainStep(model, spread, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=4)
    with pytest.raises(anybatch.NotSplittable, match=r"anybatch\.TrainStep\(model, loss_fn, optimizer\)  # no micro"):
        step(batch_of())
