"""Planning leaves the world bitwise as it was: whatever is planned for, and also when it fails."""

import contextlib
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import anybatch
from anybatch.batch.batches import Splittable
from anybatch.loss.accumulate import Settings
from anybatch.planning.devices import target_of
from anybatch.planning.planner import Planner
from anybatch.planning.subjects import Subject
from anybatch.tensors.modules import modules_of
from faults import Bomb, different, facts

CPU = torch.device("cpu")
LARGE = 2**30


class Busy(nn.Module):
    """Blocks with dropout, statistics, a cache and a counter."""

    seen: Tensor

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3)) for _ in range(3))
        self.norm = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
        self.register_buffer("seen", torch.zeros(16))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.scale: Tensor | None = None
        self.history: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.linspace(0.5, 1, 16)
        self.calls += 1
        self.history.append(x.detach().mean())
        self.seen += x.detach().mean(0)
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.frozen(self.norm(x)) * self.scale
        return y


def square(model: Any, batch: Any) -> Any:
    return model(batch["x"]).square().mean()


def drawing(model: Any, batch: Any) -> Any:
    """Draws from every generator there is."""
    return model(batch["x"] + random.random() + np.random.rand()).square().mean() * torch.rand(())


def asking(model: Any, batch: Any) -> Any:
    """Can't run on fake tensors."""
    loss = model(batch["x"]).square().mean()
    return loss * 2 if loss.item() > 0 else loss


def in_evaluation(model: Any, batch: Any) -> Any:
    """Leaves modes changed."""
    model.train()
    model.norm.eval()
    return model(batch["x"]).square().mean()


LOSSES = [square, drawing, asking, in_evaluation]


class World:
    """A model in the middle of its training, with everything that planning must not touch."""

    def __init__(self, *, norm: bool = False, kind: Any = torch.optim.AdamW) -> None:
        self.model = Busy(norm)
        self.optimizer = kind([p for p in self.model.parameters() if p.requires_grad], lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.batch: dict[str, Any] = {"x": torch.randn(24, 16), "names": [str(i) for i in range(24)]}
        square(self.model, self.batch).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.model.history.clear()

    def facts(self) -> dict[str, Any]:
        found = facts(self.model, [self.optimizer], scheduler=self.scheduler)
        for index, module in enumerate(modules_of(self.model)):
            found[f"attributes {index}"] = sorted(
                (name, id(value)) for name, value in module.__dict__.items() if not isinstance(value, (int, bool))
            )
            found[f"contents {index}"] = [
                (name, [id(item) for item in value]) for name, value in module.__dict__.items() if type(value) is list
            ]
            found[f"tensors {index}"] = [id(t) for t in [*module._parameters.values(), *module._buffers.values()]]
        found["calls"] = self.model.calls
        found["gradients"] = [id(parameter.grad) for parameter in self.model.parameters()]
        found["optimizer itself"] = (sorted(self.optimizer.__dict__), id(self.optimizer.step))
        found["batch"] = self.batch["x"].clone()
        found["batch itself"] = (sorted(self.batch), id(self.batch["x"]), self.batch["x"].grad)
        found["modes"] = (
            torch._C._len_torch_dispatch_stack(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
        )
        return found

    def subject(self, loss_fn: Any, **options: Any) -> Subject:
        splittable = Splittable([self.batch])
        return Subject(self.model, loss_fn, Settings(CPU), splittable, [self.optimizer], **options)

    def plan(self, loss_fn: Any, budget: int = LARGE, **options: Any) -> anybatch.Plan:
        subject = self.subject(loss_fn, **options)
        return Planner(subject, target_of(None, CPU), patience=0.05).plan(budget)


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("norm", [False, True])
def test_planning_leaves_the_world_as_it_was(loss_fn: Any, norm: bool) -> None:
    world = World(norm=norm)
    before = world.facts()
    plan = world.plan(loss_fn)
    assert different(before, world.facts()) == []
    assert plan.confidence == {asking: "measured", drawing: "estimated"}.get(loss_fn, "predicted")
    assert type(square(world.model, world.batch)) is Tensor


@pytest.mark.parametrize("loss_fn", [square, asking])
def test_so_does_a_plan_that_does_not_fit(loss_fn: Any) -> None:
    world = World()
    before = world.facts()
    with pytest.raises(anybatch.DoesNotFit) as caught:
        world.plan(loss_fn, budget=5000)
    assert different(before, world.facts()) == []
    assert caught.value.budget == 5000
    assert (caught.value.needed or 0) > 5000


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("passes", [0, 1, 2, 3, 5])
def test_so_does_a_loss_that_fails(error: type[BaseException], passes: int) -> None:
    """At the first call, on fakes or in a measured run; an error of the first runs on fakes may show again later."""
    world, calls = World(), itertools.count()  # which nobody can put back

    def bombed(model: Any, batch: Any) -> Any:
        loss = square(model, batch)
        if next(calls) >= passes:
            raise error("bomb")
        return loss

    before = world.facts()
    with pytest.raises((error, anybatch.AnyBatchError)):
        world.plan(bombed)
    assert different(before, world.facts()) == []
    assert next(calls) > passes


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_so_does_a_failure_in_the_backward(error: type[BaseException]) -> None:
    world = World()
    bomb = Bomb("backward", error, passes=2)

    class Passes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            bomb("backward")
            return gradients[0] * 1

    def loss_fn(model: Any, batch: Any) -> Any:
        passed: Tensor = Passes.apply(model(batch["x"]))  # type: ignore[no-untyped-call]
        return passed.square().mean()

    before = world.facts()
    with contextlib.suppress(error):
        world.plan(loss_fn)
    assert bomb.has_exploded
    assert different(before, world.facts()) == []


def test_counters_in_the_closure_of_a_loss_are_put_back() -> None:
    """Also those in lists, dictionaries, objects, defaults and globals."""
    torch.manual_seed(0)
    calls, named, log = [0], {"calls": 0}, list[int]()
    count = 0

    def loss_fn(model: Any, batch: Any, own: dict[str, int] = {"calls": 0}) -> Any:  # noqa: B006 - is what is tested
        nonlocal count
        count += 1
        calls[0] += 1
        named["calls"] += 1
        own["calls"] += 1
        log.append(len(log))
        return model(batch).square().mean()

    model, batch = nn.Linear(4, 4), torch.randn(32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    anybatch.plan(model, loss_fn, batch, optimizer, memory="1MiB")
    assert loss_fn.__defaults__ is not None
    assert (count, calls, named, loss_fn.__defaults__[0], log) == (0, [0], {"calls": 0}, {"calls": 0}, [])
    step = anybatch.TrainStep(model, loss_fn, optimizer, memory="1MiB", verify="off")
    ran = step(batch).micro_batches
    assert (count, calls[0], len(log)) == (ran, ran, ran)


def test_a_leaf_that_the_loss_closes_over_keeps_its_gradient() -> None:
    for asked in (False, True):
        world = World()
        temperature = nn.Parameter(torch.tensor(2.0))
        given = temperature.grad = torch.tensor(5.0)

        def loss_fn(model: Any, batch: Any, t: Tensor = temperature, asked: bool = asked) -> Any:
            loss = (model(batch["x"]) * t).square().mean()
            return loss * 2 if asked and loss.item() > 0 else loss

        world.plan(loss_fn)
        assert temperature.grad is given
        assert given.item() == 5.0
        world.optimizer.add_param_group({"params": [temperature]})
        world.plan(loss_fn)
        assert temperature.grad is given
        assert given.item() == 5.0


@pytest.mark.parametrize("wrap", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_hooks_compute_are_real_again(wrap: Callable[[nn.Module], nn.Module]) -> None:
    linear: Any = wrap(nn.Linear(8, 8))
    model = nn.Sequential(linear, nn.Tanh())
    values = linear.weight.detach().clone()
    anybatch.plan(model, lambda model, batch: model(batch).mean(), torch.ones(8, 8), memory=LARGE)
    assert not isinstance(linear.weight, torch._subclasses.FakeTensor)
    assert torch.equal(linear.weight.detach(), values)


def test_the_hooks_of_an_optimizer_and_what_a_scheduler_wrapped_are_not_called() -> None:
    world = World()
    calls: list[str] = []
    handles = [
        world.optimizer.register_step_pre_hook(lambda *_: calls.append("pre")),
        world.optimizer.register_step_post_hook(lambda *_: calls.append("post")),
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
    ]
    try:
        world.plan(square)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == []
    assert world.optimizer._opt_called  # of the step before


class Counting(torch.optim.SGD):
    """An optimizer with attributes of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.steps = 0
        self.log: list[int] = []

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        self.log.append(self.steps)
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """An optimizer that steps another one."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.inner = torch.optim.Adam(params, lr=lr)
        super().__init__([p for group in self.inner.param_groups for p in group["params"]], {"lr": lr})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("kind", [Counting, Around, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.LBFGS])
def test_optimizers_of_every_kind_are_untouched(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    optimizer = kind(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = facts(model, [optimizer])
    attributes = {name: value for name, value in optimizer.__dict__.items() if type(value) is int}
    anybatch.plan(model, lambda model, batch: model(batch).mean(), torch.ones(8, 16), optimizer, memory=LARGE)
    assert different(before, facts(model, [optimizer])) == []
    assert {name: value for name, value in optimizer.__dict__.items() if type(value) is int} == attributes
    assert getattr(optimizer, "log", []) == []


def test_collate_may_draw_random_numbers() -> None:
    def collate(samples: list[Tensor]) -> Tensor:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return torch.stack([F.pad(sample, (0, 12 - len(sample))) for sample in samples]) + noise

    model = nn.Linear(12, 4)
    samples = [torch.randn(int(n)) for n in torch.randint(3, 12, (9,))]
    before = facts(model)
    anybatch.plan(model, lambda model, batch: model(batch).mean(), samples, memory=LARGE, collate=collate)
    assert different(before, facts(model)) == []


def test_hooks_of_modules_stay_and_no_others_come() -> None:
    world = World()
    seen: list[str] = []
    block = world.model.blocks[1]
    block.register_forward_hook(lambda *_: seen.append("forward"))
    block.register_full_backward_hook(lambda *_: seen.append("backward"))
    before = world.facts()
    world.plan(square)
    assert different(before, world.facts()) == []
    seen.clear()
    square(world.model, world.batch).backward()
    assert seen == ["forward", "backward"]


def test_the_first_call_of_a_step_draws_what_a_plain_step_draws() -> None:
    """The weights after a planned step are bitwise those of a step that was told its size."""

    def after_a_step(**options: Any) -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        world = World()
        options = {"scheduler": world.scheduler, "verify": "off", **options}  # a buffer that the loss reads is moved
        step = anybatch.TrainStep(world.model, drawing, world.optimizer, **options)
        out = step(world.batch)
        return out, facts(world.model, [world.optimizer])

    out, planned = after_a_step(memory=LARGE)
    assert out.plan is not None
    _, plain = after_a_step(micro_batch_size=out.plan.micro_batch_size)
    assert different(planned, plain) == []


@pytest.mark.parametrize("lazy", [functools.partial(nn.LazyLinear, 4), nn.LazyBatchNorm1d])
def test_a_lazy_module_that_never_ran_is_named(lazy: Callable[[], nn.Module]) -> None:
    """And what the message says helps."""
    model, batch = nn.Sequential(nn.Linear(3, 4), lazy()), torch.randn(8, 3)
    options: dict[str, Any] = {"memory": "1GiB", "batch_norm": "ghost"}

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(batch).square().mean()

    with pytest.raises(anybatch.LossError, match=r"1\..* of Sequential is lazy"):
        anybatch.plan(model, loss_fn, batch, **options)
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    with pytest.raises(anybatch.LossError, match=r"1\..* of Sequential is lazy"):
        step(batch)
    model(batch[:2])
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    assert step(batch).count == 8
