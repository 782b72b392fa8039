"""Arguments of TrainStep, windows and freeze that can't be meant are refused before anything is changed."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch
import reference
from anybatch import BatchError, CountError, count_tokens
from test_bad_input import NAN, Noisy, batch_of, good


class Lookup(nn.Module):
    """Gives sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)


class AcceleratedOptimizer(torch.optim.SGD):
    """Stands in for Accelerate's own, of which the module counts."""


AcceleratedOptimizer.__module__ = "accelerate.optimizer"


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def hooked() -> nn.Module:
    model = Noisy()
    model.linear.bias.register_post_accumulate_grad_hook(lambda _: None)
    return model


def stepped(make: Callable[[], nn.Module] = Noisy, optimizer: Any = sgd, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        model = make()
        made = {name: value(model) if name == "scheduler" else value for name, value in options.items()}
        return anybatch.TrainStep(model, good, optimizer(model), **made)

    return build


def plateau(model: nn.Module) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(model))


def lbfgs(model: nn.Module) -> Any:
    return torch.optim.LBFGS(model.parameters())


def twice() -> Any:
    model = Noisy()
    optimizer = sgd(model)
    return anybatch.TrainStep(model, good, [optimizer, optimizer])


def schedules_twice() -> Any:
    model = Noisy()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return anybatch.TrainStep(model, good, optimizer, scheduler=[scheduler, scheduler])


def number() -> Any:
    return 3


def loaded(state: Any, **options: Any) -> Callable[[], Any]:
    return lambda: stepped(**options)().load_state_dict(state)


SCALED = stepped(scaler=torch.amp.GradScaler("cpu"))().state_dict()
PLAIN = stepped()().state_dict()
STEPS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "no optimizer": (stepped(optimizer=lambda _: None), ("optimizer is a NoneType", "torch.optim.Optimizer")),
    "an empty list": (stepped(optimizer=lambda _: []), ("empty sequence", "at least one")),
    "a list with something else": (
        stepped(optimizer=lambda model: [sgd(model), 3]), ("optimizer is a int", "a sequence of them"),
    ),
    "parameters as optimizer": (
        stepped(optimizer=lambda model: model.parameters()), ("is a generator", "torch.optim.Optimizer"),
    ),
    "a text as optimizer": (stepped(optimizer=lambda _: "adam"), ("is a str", "torch.optim.Optimizer")),
    "Accelerate": (
        stepped(optimizer=lambda model: AcceleratedOptimizer(model.parameters())),
        ("Accelerate", "optimizer.optimizer"),
    ),
    "ReduceLROnPlateau": (
        stepped(scheduler=plateau), ("ReduceLROnPlateau", "scheduler.step(step.evaluate(batch).loss)"),
    ),
    "ReduceLROnPlateau in a list": (
        stepped(scheduler=lambda model: [plateau(model)]), ("ReduceLROnPlateau", "evaluate"),
    ),
    "a scheduler without step": (stepped(scheduler=lambda _: 3), ("scheduler is a int", "step() method")),
    **{
        f"clip_norm={value!r}": (
            stepped(clip_norm=value), (f"clip_norm={value!r}", "positive number", "None not to clip"),
        )
        for value in (0, -1.0, NAN, True, "1")
    },
    "sparse and clipped": (stepped(Lookup, clip_norm=1.0), ("table", "sparse", "leave clip_norm out", "sparse=False")),
    "sparse and nothing else": (
        stepped(lambda: nn.Embedding(4, 2, sparse=True), clip_norm=1.0), ("Embedding gives sparse gradients",),
    ),
    "a hook after accumulation": (stepped(hooked), ("post-accumulate-grad hook", "Remove the hook")),
    "float16 and a scaler": (
        stepped(lambda: Noisy().half(), scaler=torch.amp.GradScaler("cpu")), ("float16", "float32", "autocast="),
    ),
    "float16 under autocast": (
        stepped(lambda: Noisy().half(), autocast=torch.float16), ("float16", "keep the model in float32"),
    ),
    "LBFGS and a scaler": (
        stepped(optimizer=lbfgs, scaler=torch.amp.GradScaler("cpu")), ("LBFGS", "without a GradScaler", "alone"),
    ),
    "LBFGS and another": (
        stepped(optimizer=lambda model: [sgd(model), lbfgs(model)]), ("LBFGS", "one optimizer", "alone"),
    ),
    "a recorder that can't be called": (stepped(recorder=3), ("recorder is a int", "expected a function")),
    "a state of another version": (
        loaded({**PLAIN, "version": 7}), ("version 7", "expected 1", "TrainStep.state_dict()"),
    ),
    "an empty state": (loaded({}), ("version None", "expected 1")),
    "a state that is none": (loaded(None), ("NoneType", "TrainStep.state_dict()")),
    "a state without a scaler": (
        loaded(PLAIN, scaler=torch.amp.GradScaler("cpu")), ("without a GradScaler", "same autocast= and scaler="),
    ),
    "a state with a scaler": (loaded(SCALED), ("with a GradScaler", "same autocast= and scaler=")),
}  # fmt: skip
SIZES: list[Any] = [0, -1, 2.5, True, "2"]
LOADER = [torch.ones(2, 3)]
OTHERS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "windows of nothing": (
        lambda: anybatch.windows(LOADER), ("none of them", "exactly one of batches=, samples= and tokens="),
    ),
    "windows of two kinds": (
        lambda: anybatch.windows(LOADER, batches=2, samples=3), ("'batches': 2", "'samples': 3", "exactly one"),
    ),
    **{
        f"windows of {size!r}": (
            functools.partial(anybatch.windows, LOADER, batches=size), (f"batches={size!r}", "at least 1"),
        )
        for size in SIZES
    },
    "tokens without count": (
        lambda: anybatch.windows(LOADER, tokens=3), ("tokens= and count= go together", "count_tokens"),
    ),
    "count without tokens": (
        lambda: anybatch.windows(LOADER, batches=3, count=len), ("tokens= and count= go together",),
    ),
    "windows of an odd batch": (lambda: next(anybatch.windows([{"x": 3}], samples=2)), ("no tensor with rows",)),
    "freezing what is not there": (
        lambda: anybatch.freeze(Noisy(), "linear", "encoder.*"), ("'encoder.*' matches no", "linear"),
    ),
    "freezing a number": (lambda: anybatch.freeze(Noisy(), number()), ("a int", "freeze(model, 'encoder.*')")),
    "blocks as a text": (stepped(blocks="linear"), ("blocks=['linear']",)),
    "no blocks": (stepped(blocks=None), ("blocks is a NoneType", "sequence of names")),
    "unknown blocks": (stepped(memory="1GiB", blocks=["encoder"]), ("'encoder'", "linear")),
    "unknown blocks in a plan": (
        lambda: anybatch.plan(Noisy(), good, batch_of(), memory="1GiB", blocks="linear"), ("blocks=['linear']",),
    ),
    "an optimizer twice": (twice, ("optimizer[1] is given twice",)),
    "a scheduler twice": (schedules_twice, ("StepLR is given twice",)),
    "a scheduler of another optimizer": (
        stepped(scheduler=lambda model: torch.optim.lr_scheduler.StepLR(sgd(model), 1)),
        ("a StepLR of another optimizer", "passed to TrainStep"),
    ),
    "freezing nothing": (lambda: anybatch.freeze(Noisy()), ("no pattern", "freeze(model, 'encoder.*')")),
}  # fmt: skip


REFUSED = {**STEPS, **OTHERS}


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_construction_is_refused(call: Callable[[], Any], words: tuple[str, ...]) -> None:
    _, *before = reference.random_state()  # the models that are made here draw from the first, torch's own
    with pytest.raises(BatchError) as caught:
        call()
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    _, *after = reference.random_state()
    assert after == before


@pytest.mark.parametrize("shift", [-1, True, 1.5, "1"])
def test_shifts(shift: Any) -> None:
    with pytest.raises(CountError, match=r"shift=.*expected an integer of at least 0"):
        count_tokens("labels", shift=shift)


_OPTIONAL = ("without plan", "without loss", "without numpy in random")


def broken_states() -> dict[str, Any]:
    whole = stepped(micro_batch_size=4)().state_dict()
    found = {f"without {name}": {key: value for key, value in whole.items() if key != name} for name in whole}
    for name in ("counters", "limit", "random"):
        for inner in whole[name]:
            found[f"without {inner} in {name}"] = {
                **whole, name: {key: value for key, value in whole[name].items() if key != inner}
            }  # fmt: skip
    found["a text for random"] = {**whole, "random": "none"}
    found["a text for counters"] = {**whole, "counters": "none"}
    return {name: state for name, state in found.items() if name not in _OPTIONAL}


def test_a_refused_state_leaves_the_step_as_it_was() -> None:
    step = stepped(micro_batch_size=4)()
    step(batch_of())
    before = reference.frozen(step.state_dict())
    for name, state in {"another version": {**PLAIN, "version": 2}, "a scaler": SCALED, "nothing": {}}.items():
        with pytest.raises(BatchError):
            step.load_state_dict(state)
        assert reference.frozen(step.state_dict()) == before, name


@pytest.mark.parametrize("name", broken_states())
def test_a_broken_state_is_loaded_in_no_part(name: str) -> None:
    state = broken_states()[name]
    step = stepped(micro_batch_size=4)()
    step(batch_of())
    before = reference.frozen(step.state_dict())
    with pytest.raises(BatchError, match="state"):
        step.load_state_dict(state)
    assert reference.frozen(step.state_dict()) == before


@pytest.mark.parametrize("size", [np.int64(4), np.int32(4)])
def test_sizes_of_numpy_are_sizes(size: Any) -> None:
    step = stepped(micro_batch_size=size)()
    assert step(batch_of()).micro_batches > 1
    assert type(step.state_dict()["limit"]["value"]) is int


def test_a_refused_freeze_freezes_nothing() -> None:
    model = Noisy()
    with pytest.raises(BatchError):
        anybatch.freeze(model, "linear.weight", "encoder.*")
    assert all(parameter.requires_grad for parameter in model.parameters())


LOSSES = {"ce": nn.CrossEntropyLoss(), "mse": nn.MSELoss(), "function": F.cross_entropy}


@pytest.mark.parametrize("criterion", LOSSES.values(), ids=LOSSES)
def test_a_loss_of_torch_is_refused_with_the_function_to_write(criterion: Any) -> None:
    model = nn.Linear(4, 2)
    for call in (
        lambda: anybatch.backward(model, criterion, torch.ones(3, 4)),
        lambda: anybatch.TrainStep(model, criterion, torch.optim.SGD(model.parameters(), lr=0.1)),
        lambda: anybatch.check(model, criterion, torch.ones(3, 4)),
    ):
        with pytest.raises(anybatch.LossError, match="takes an output and a target") as caught:
            call()
    written: dict[str, Any] = {"criterion": criterion}
    line = str(caught.value).partition("calls it: ")[2]
    exec(line, written)
    batch = {"x": torch.ones(3, 4), "y": torch.zeros(3, 2)}
    anybatch.backward(model, written["loss_fn"], batch, micro_batch_size=2)


def test_a_criterion_with_a_forward_of_its_own_is_a_loss_function() -> None:
    class Own(nn.CrossEntropyLoss):
        def forward(self, model: Any, batch: Any) -> Any:
            return super().forward(model(batch["x"]), batch["y"])

    model = nn.Linear(4, 2)
    anybatch.backward(model, Own(), {"x": torch.ones(3, 4), "y": torch.zeros(3, 2)}, micro_batch_size=2)


def test_data_parallel_without_devices_is_told_what_to_pass() -> None:
    wrapped = nn.DataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped.device_ids = [0, 1]
    with pytest.warns(anybatch.AnyBatchWarning, match=r"TrainStep\(model.module, ..., devices=model.device_ids\)"):
        anybatch.TrainStep(wrapped, lambda model, batch: model(batch).mean(), optimizer)
    wrapped.device_ids = []
    with pytest.warns(
        anybatch.AnyBatchWarning, match=r"does nothing here; pass the wrapped model: model.module"
    ) as seen:
        anybatch.TrainStep(wrapped, lambda model, batch: model(batch).mean(), optimizer)
    assert seen[0].filename == __file__
    anybatch.TrainStep(wrapped.module, lambda model, batch: model(batch).mean(), optimizer)(torch.ones(3, 4))
