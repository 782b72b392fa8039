"""Optimizers that evaluate the gradient themselves get that of the whole batch; others cost no pass more."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

BATCH = {"x": torch.randn(22, 5, generator=torch.Generator().manual_seed(1)).double(), "y": torch.arange(22) % 3}
RHO = 0.05


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Sharp(torch.optim.Optimizer):
    """Steps by the gradient at weights that were moved uphill: the parts that all kinds of SAM have."""

    through_data = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @property
    def own(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def climb(self) -> None:
        own = [p for p in self.own if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        for p in own:
            self.state[p]["kept"] = p.data.clone()
            (p.data if self.through_data else p).add_(p.grad * (RHO / norm))

    def descend(self) -> None:
        for p in self.state:
            p.data.copy_(self.state[p]["kept"])
        self.base.step()


class Needing(Sharp):
    """Is given the gradient, and the closure for the second one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "needs a closure"
        self.climb()
        self.zero_grad()
        torch.enable_grad()(closure)()
        self.descend()


class ThroughData(Needing):
    through_data = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.climb()
        closure()
        self.descend()


class Twice(Sharp):
    """Takes both gradients by the closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.climb()
        closure()
        self.descend()
        return loss.item()


class Silent(Needing):
    """Is plain SGD where it is given no closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step() if closure is None else super().step(closure)


class Zeroing(Sharp):
    """Fills the gradient with zeros before it takes it, where nothing has moved."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.zero_grad(set_to_none=False)
        closure()
        self.base.step()


class Usual(torch.optim.SGD):
    """Hands the closure on, as nearly all optimizers do."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Refusing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise RuntimeError("this optimizer takes no closure")
        return super().step()


def by_hand(kind: Any, updates: int = 3, clip: float | None = None) -> torch.Tensor:
    model = make()
    optimizer = kind(model.parameters())

    def gradient() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = loss_of(model, BATCH)
            loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        return loss.detach()

    for _ in range(updates):
        gradient()
        optimizer.step(gradient)
    return flat(model)


def in_steps(kind: Any, updates: int = 3, **options: Any) -> tuple[torch.Tensor, int]:
    """The weights after some updates, and how often the loss ran on average."""
    model, calls = make(), []

    def counted(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        return loss_of(model, batch)

    step = anybatch.TrainStep(model, counted, kind(model.parameters()), micro_batch_size=8, **options)
    for _ in range(updates):
        step(BATCH)
    assert step.updates == updates
    return flat(model), len(calls) // updates


PASSES = {Needing: 2, ThroughData: 2, Twice: 2, Silent: 2, Zeroing: 2}


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("kind", PASSES, ids=lambda kind: kind.__name__)
def test_an_optimizer_that_evaluates_the_gradient_gets_that_of_the_whole_batch(kind: Any, clip: float | None) -> None:
    found, runs = in_steps(kind, clip_norm=clip)
    torch.testing.assert_close(found, by_hand(kind, clip=clip), rtol=1e-12, atol=1e-14)
    assert runs == 3 * PASSES[kind]


@pytest.mark.parametrize("closure", [None, True, False])
@pytest.mark.parametrize("kind", [Usual, torch.optim.SGD], ids=lambda kind: kind.__name__)
def test_an_optimizer_that_evaluates_at_the_start_of_its_step_costs_no_pass_more(kind: Any, closure: Any) -> None:
    make_one = functools.partial(kind, lr=0.1)
    found, runs = in_steps(make_one, closure=closure)
    torch.testing.assert_close(found, by_hand(make_one), rtol=1e-12, atol=1e-14)
    assert runs == 3


def test_what_takes_no_closure_steps_without_one() -> None:
    make_one = functools.partial(Refusing, lr=0.1)
    found, runs = in_steps(make_one)
    torch.testing.assert_close(found, by_hand(functools.partial(torch.optim.SGD, lr=0.1)), rtol=1e-12, atol=1e-14)
    assert runs == 3


def test_an_optimizer_that_fails_after_it_has_moved_is_not_called_again() -> None:
    class Late(Needing):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.climb()
            raise RuntimeError("the closure is of the wrong kind")

    model = make()
    step = anybatch.TrainStep(model, loss_of, Late(model.parameters()), micro_batch_size=8)
    with pytest.raises(anybatch.UpdateInterrupted, match="wrong kind"):
        step(BATCH)


def test_the_loss_that_a_closure_gives_without_a_pass() -> None:
    given: list[float] = []

    class Asking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            given.append(closure().item())
            return super().step()

    model = make()
    step = anybatch.TrainStep(model, loss_of, Asking(model.parameters(), lr=0.1), micro_batch_size=4)
    wanted = float(loss_of(model, BATCH).detach())
    assert step(BATCH).loss == pytest.approx(wanted) == pytest.approx(given[0])


def test_closure_false_leaves_it_out_and_true_gives_it_where_the_signature_does_not_tell() -> None:
    plain, runs = in_steps(Silent, closure=False)
    torch.testing.assert_close(
        plain, by_hand(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)), rtol=1e-12, atol=1e-14
    )
    assert runs == 3

    class Hiding(Silent):
        def step(self, *args: Any) -> Any:
            return super().step(*args)

    found, runs = in_steps(Hiding, closure=True)
    torch.testing.assert_close(found, by_hand(Needing), rtol=1e-12, atol=1e-14)
    assert runs == 6


class WithoutArgument(torch.optim.SGD):
    def step(self) -> Any:  # type: ignore[override]
        return super().step()


@pytest.mark.parametrize(
    ("kind", "closure", "words"),
    [
        (functools.partial(torch.optim.LBFGS), False, ("LBFGS", "closure=False")),
        (functools.partial(WithoutArgument, lr=0.1), True, ("WithoutArgument", "takes no argument")),
        (functools.partial(torch.optim.SGD, lr=0.1), "yes", ("closure='yes'", "True, False")),
    ],
)
def test_a_closure_that_can_not_be_had_is_refused(kind: Callable[..., Any], closure: Any, words: Any) -> None:
    model = make()
    with pytest.raises(anybatch.BatchError) as caught:
        anybatch.TrainStep(model, loss_of, kind(model.parameters()), closure=closure)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("first", [True, False])
def test_beside_another_optimizer_whose_gradient_stays_what_it_was(first: bool) -> None:
    def parts(model: Any) -> list[Any]:
        found = [Needing(model[2].parameters()), torch.optim.SGD(model[0].parameters(), lr=0.3)]
        return found if first else found[::-1]

    ours, plain = make(), make()
    step = anybatch.TrainStep(ours, loss_of, parts(ours), micro_batch_size=5)
    optimizers = parts(plain)

    def gradient() -> None:
        others = [p.grad for p in plain[0].parameters()]  # type: ignore[index]
        with torch.enable_grad():
            plain[2].zero_grad()  # type: ignore[index]
            loss_of(plain, BATCH).backward()
        for p, kept in zip(plain[0].parameters(), others, strict=True):  # type: ignore[index]
            p.grad = kept

    for _ in range(3):
        step(BATCH)
        plain.zero_grad()
        loss_of(plain, BATCH).backward()
        kept = [p.grad.clone() for p in plain[0].parameters()]  # type: ignore[index]
        for optimizer in optimizers:
            optimizer.step(gradient) if isinstance(optimizer, Needing) else optimizer.step()
            for p, gradient_before in zip(plain[0].parameters(), kept, strict=True):  # type: ignore[index]
                p.grad = gradient_before.clone()
        torch.testing.assert_close(flat(ours), flat(plain), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [2.0**8, 2.0**30])  # the larger one overflows within the step
def test_with_a_scaler(scale: float) -> None:
    def overflowing(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch)
        if calls and len(calls) % 6 >= 3:  # of the second evaluation
            loss.register_hook(lambda grad: torch.where(grad.abs() > 2.0**20, torch.inf, grad))
        calls.append(1)
        return loss

    calls: list[int] = []
    model = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    step = anybatch.TrainStep(model, overflowing, Needing(model.parameters()), micro_batch_size=8, scaler=scaler)
    step(BATCH)
    torch.testing.assert_close(flat(model), by_hand(Needing, 1), rtol=1e-10, atol=1e-12)
    assert scaler.get_scale() == scale


@pytest.mark.parametrize("at", [2, 5])
def test_memory_that_runs_out_in_either_evaluation(at: int) -> None:
    calls: list[int] = []

    def failing(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_of(model, batch)

    model = make()
    step = anybatch.TrainStep(model, failing, Needing(model.parameters()), micro_batch_size=8)
    step(BATCH)
    torch.testing.assert_close(flat(model), by_hand(Needing, 1), rtol=1e-12, atol=1e-14)
    assert (step.updates, step.samples) == (1, 22)


def test_an_error_in_the_second_evaluation_says_that_weights_have_moved() -> None:
    calls: list[int] = []

    def failing(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise ValueError("no such row")
        return loss_of(model, batch)

    model = make()
    step = anybatch.TrainStep(model, failing, Needing(model.parameters()), micro_batch_size=8)
    with pytest.raises(anybatch.UpdateInterrupted, match="no such row") as caught:
        step(BATCH)
    assert (len(caught.value.changed), step.updates) == (4, 0)


def test_a_noise_scale_sees_the_gradient_of_the_weights_that_were_there() -> None:
    measured = []
    for kind in (Needing, functools.partial(torch.optim.SGD, lr=0.1)):
        model = make()
        step = anybatch.TrainStep(model, loss_of, kind(model.parameters()), micro_batch_size=4)
        with anybatch.NoiseScale(step, every=1) as noise:
            step(BATCH)
        measured.append((noise.trace, noise.signal))
    assert measured[0] == pytest.approx(measured[1])


# --- budgets ---------------------------------------------------------------------------------------------------------


class Wide(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
        self.double()


@pytest.mark.parametrize("kind", [Needing, Silent, Twice, functools.partial(Usual, lr=0.1)], ids=str)
def test_a_budget_holds_and_knows_the_weights_that_are_kept(kind: Any) -> None:
    batch = {"x": torch.randn(512, 5).double(), "y": torch.arange(512) % 3}
    model: Any = Wide()
    optimizer = kind(model.parameters())
    budget = anybatch.plan(model, loss_of, batch, optimizer, memory="1GiB").whole_bytes // 2
    step = anybatch.TrainStep(model, loss_of, optimizer, memory=budget)
    seen = [
        anybatch.measure(lambda: step(batch), model=model, optimizer=optimizer, batch=batch).peak_bytes
        for _ in range(3)
    ]
    plan = step(batch).plan
    assert plan is not None
    assert max(seen) <= budget
    held = sum(p.nbytes for p in model.parameters())
    if isinstance(optimizer, Sharp):  # the weights where it began, and the momentum
        assert plan.confidence == "estimated"  # what is there while the batch runs again is not followed
        assert plan.at_peak["optimizer state"] == 2 * held
    else:
        assert plan.confidence == "predicted"
        assert max(seen[1:]) <= plan.peak_bytes
