"""What can't be meant is refused: the right error, what was got and expected and what to do, and nothing changed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import anybatch
import reference
from anybatch import AnyBatchError, BatchError, CountError, LossError, Mean, NotSplittable, count_tokens
from anybatch.batch.windowing import Window

NAN, INF = float("nan"), float("inf")


class Noisy(nn.Module):
    """Draws random numbers and writes into a buffer in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.dropout(self.linear(x))  # type: ignore[no-any-return]


def batch_of(**changes: Any) -> dict[str, Any]:
    batch = {"x": torch.ones(6, 3), "y": torch.zeros(6, dtype=torch.long), "names": list("abcdef")}
    return {**batch, **changes}


def good(model: Any, batch: Any) -> torch.Tensor:
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]


def raw(model: Any, batch: Any) -> torch.Tensor:
    return model(batch).mean()  # type: ignore[no-any-return]


class Case(NamedTuple):
    """Arguments that differ from good ones, the error, words of its text in any order, and its path or name."""

    options: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]
    where: str = ""


def of_batch(batch: Any, *words: str, where: str = "", **options: Any) -> Case:
    return Case({"batch": batch, **options}, BatchError, words, where)


def of_size(size: Any, **options: Any) -> Case:
    return Case(
        {"micro_batch_size": size, **options}, BatchError, (f"micro_batch_size={size!r}", "expected", "None for the")
    )


def of_cost(cost: Any, *words: str, where: str = "batch[0]", **options: Any) -> Case:
    samples = [torch.ones(3), torch.ones(3), torch.ones(3)]
    arguments = {"batch": samples, "loss_fn": raw, "collate": torch.stack, "cost": cost, **options}
    return Case(arguments, BatchError, words or ("cost(batch[0])", "positive finite number"), where)


def of_loss(result: Any, *words: str, error: type[Exception] = LossError, where: str = "", **options: Any) -> Case:
    def loss_fn(model: Any, batch: Any) -> Any:
        return result(good(model, batch))

    return Case({"loss_fn": loss_fn, **options}, error, words, where)


def in_a_generator(items: Any) -> Any:
    """Yields the items; of a pair the second is returned."""
    losses, returned = items if isinstance(items, tuple) else (items, None)
    yield from losses
    return returned


def of_yields(given: Callable[[torch.Tensor], Any], *words: str, where: str = "") -> Case:
    def loss_fn(model: Any, batch: Any) -> Any:
        return in_a_generator(given(good(model, batch)))

    return Case({"loss_fn": loss_fn}, LossError, words, where)


def of_count(count: Any, *words: str, where: str = "") -> Case:
    return Case({"count": count}, CountError, words, where)


def of_value(value: Any, *words: str) -> Case:
    return of_count(lambda _: value, *(words or ("count gave", "expected", "number of items")))


class Normalised(nn.Module):
    """A loss with BatchNorm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        return self.norm(model(batch["x"])).square().mean()  # type: ignore[no-any-return]


OTHER = Noisy()
DEEP = batch_of(deep={"mask": torch.ones(5)})
AMBIGUOUS = {"x": torch.ones(3, 3), "pair": [torch.ones(3), torch.ones(3), torch.ones(3)]}
SAMPLES = [torch.ones(1, 3), torch.ones(5, 3)]
SHARES = ("expected", "adds up over samples")

BATCHES: dict[str, Case] = {
    "leaves that disagree": of_batch(
        batch_of(z=torch.ones(6), y=torch.ones(5)), "batch['y'] has 5 rows", "batch['x'] has 6", "broadcast=('y',)",
        where="batch['y']",
    ),
    "a deep leaf that disagrees": of_batch(
        DEEP, "batch['deep']['mask'] has 5", "('deep.mask',)", where="batch['deep']['mask']",
    ),
    "a list of another length": of_batch(
        batch_of(names=["a"]), "batch['names']", "1 items", "6 rows", "broadcast=('names',)", where="batch['names']"
    ),
    "a tuple of another length": of_batch(
        batch_of(size=(3, 4)), "batch['size']", "2 items", "('size',)", where="batch['size']",
    ),
    "no rows": of_batch({"x": torch.ones(0, 3)}, "no rows", "at least one sample", "Leave empty batches out"),
    "an empty dict": of_batch({}, "a dict", "no tensor with rows", "[rows, ...]"),
    "an empty list": of_batch([], "no rows", "at least one sample"),
    "an empty window": of_batch(Window([]), "no batches", "at least one"),
    "an empty batch in a window": of_batch(Window([batch_of(), {"x": torch.ones(0, 3)}]), "no rows", "Leave empty"),
    "a text": of_batch("batch", "a str", "no tensor with rows", "register_pytree_node"),
    "None": of_batch(None, "a NoneType", "no tensor with rows"),
    "an int": of_batch(3, "a int", "no tensor with rows"),
    "a tensor without dimensions": of_batch(torch.tensor(3.0), "a Tensor", "no tensor with rows"),
    "an iterator": of_batch(iter([batch_of()]), "list_iterator", "iterate over it", "windows(loader, batches=8)"),
    "numbers only": of_batch({"a": 1, "b": 2.0}, "a dict", "no tensor with rows"),
    "an unknown object": of_batch(
        batch_of(o=OTHER), "batch['o']", "Noisy", "register_pytree_node", "('o',)", where="batch['o']",
    ),
    "a set": of_batch(batch_of(o={1, 2}), "batch['o']", "builtins.set", "broadcast=('o',)", where="batch['o']"),
    "an unknown name in broadcast": of_batch(
        batch_of(), "broadcast", "mask", "not in the batch", "it has", "names", broadcast=("mask",),
    ),
    "a text as broadcast": of_batch(
        batch_of(), "broadcast", "expected a sequence", "broadcast=('names',)", broadcast="names",
    ),
    "a list that could be two things": of_batch(
        AMBIGUOUS, "batch['pair']", "make it a tuple", "stack them", "pass collate=", where="batch['pair']",
    ),
    "a tensor with collate": of_batch(
        torch.ones(6, 3), "list of raw samples", "a Tensor", "collate_fn=", collate=torch.stack,
    ),
    "a dict with collate": of_batch(batch_of(), "list of raw samples", "a dict", "collate_fn=", collate=torch.stack),
    "no samples with collate": of_batch([], "no rows", "at least one sample", collate=torch.stack),
    "collate that can't be called": of_batch(SAMPLES, "collate", "expected a function", collate=3, loss_fn=raw),
    "cost without collate": of_batch(batch_of(), "cost=", "without collate=", cost=len),
    "a sample over the limit": of_cost(
        len, "batch[1] costs 5", "limit of a micro-batch is 2", "raise micro_batch_size", where="batch[1]",
        batch=SAMPLES, collate=torch.cat,
    ),
    "cost that can't be called": of_cost(3, "cost", "expected a function", where=""),
    "cost nan": of_cost(lambda _: NAN), "cost inf": of_cost(lambda _: INF), "cost 0": of_cost(lambda _: 0),
    "cost below 0": of_cost(lambda _: -2.0), "cost None": of_cost(lambda _: None), "a text as cost": of_cost(str),
    "a vector as cost": of_cost(lambda sample: sample),
    **{f"micro_batch_size={size!r}": of_size(size) for size in (0, -1, 2.5, True, "8", NAN)},
    "micro_batch_size=inf with cost": of_cost(
        len, "micro_batch_size=inf", "expected a finite number", where="", micro_batch_size=INF,
    ),
    "batch_norm": Case({"batch_norm": "no"}, BatchError, ("batch_norm='no'", "refuse", "ghost", "frozen")),
    "accumulate": Case({"accumulate": "bf16"}, BatchError, ("accumulate='bf16'", "auto", "fp32", "native")),
    "autocast to float32": Case({"autocast": torch.float32}, BatchError, ("autocast=torch.float32", "torch.bfloat16")),
    "a text as autocast": Case({"autocast": "bfloat16"}, BatchError, ("autocast='bfloat16'", "torch.bfloat16")),
    "a leaf with a graph": of_batch(
        batch_of(x=OTHER.linear.weight.T.repeat(2, 2)[:, :3]), "batch['x']", "graph", "detach", where="batch['x']",
    ),
    "no inputs": Case({"inputs": ()}, BatchError, ("inputs", "expected", "leave it out")),
    "a tensor as inputs": Case({"inputs": OTHER.linear.weight}, BatchError, ("inputs", "a sequence", "inputs=[")),
    "inputs without gradient": Case({"inputs": [torch.ones(3)]}, BatchError, ("inputs[0]", "requires_grad")),
    "names as inputs": Case({"inputs": ["weight"]}, BatchError, ("inputs[0]", "a str", "expected")),
    "a function as model": Case({"model": good}, BatchError, ("model is a function", "torch.nn.Module")),
    "no model": Case({"model": None}, BatchError, ("model is a NoneType", "torch.nn.Module")),
    "a group without ranks": Case({"group": "world"}, BatchError, ("group is a str", "init_process_group()")),
    "BatchNorm": Case(
        {"model": nn.Sequential(Noisy(), nn.BatchNorm1d(2))}, NotSplittable,
        ("1 (BatchNorm1d)", "ghost", "frozen", "GroupNorm"),
    ),
    "BatchNorm in the loss": Case(
        {"loss_fn": Normalised()}, NotSplittable, ("norm (BatchNorm1d)", "ghost", "frozen", "GroupNorm"),
    ),
    "a scaler that is none": Case({"scaler": 3}, BatchError, ("scaler is a int", "expected", "GradScaler")),
}  # fmt: skip

LOSSES: dict[str, Case] = {
    "None": of_loss(lambda _: None, "is a NoneType", "expected a scalar tensor"),
    "a float": of_loss(lambda loss: loss.item(), "is a float", ".item()", "expected a scalar tensor"),
    "an integer tensor": of_loss(lambda loss: loss.detach().long(), "torch.int64", "expected a floating-point tensor"),
    "a vector": of_loss(lambda loss: loss.expand(2), "shape (2,)", "without dimensions", ".mean()"),
    "a matrix of one": of_loss(lambda loss: loss[None, None], "shape (1, 1)", "without dimensions", ".mean()"),
    "a complex tensor": of_loss(lambda loss: loss + 1j, "torch.complex64", "floating-point"),
    "a detached tensor": of_loss(lambda loss: loss.detach(), "no gradient", "detach()", "metric", where="loss"),
    "a list": of_loss(lambda loss: [loss], "is a list", "a mapping", "generator"),
    "a text": of_loss(str, "is a str", "expected a scalar tensor"),
    "a pair without metrics": of_loss(lambda loss: (loss, 3), "is a tuple", "expected a scalar tensor"),
    "metrics that are none": of_loss(
        lambda loss: (loss, {"m": 3}), "metric 'm'", "is a int", "expected a Mean", where="m",
    ),
    "an empty mapping": of_loss(lambda _: {}, "empty mapping", "at least one loss"),
    "a mapping to None": of_loss(lambda loss: {"a": loss, "b": None}, "loss 'b'", "is a NoneType", where="b"),
    "a mapping to a detached tensor": of_loss(
        lambda loss: {"a": loss, "b": loss.detach()}, "'b'", "no gradient", where="b",
    ),
    "a mapping to a detached Mean": of_loss(
        lambda loss: {"a": Mean(loss, 2), "b": Mean(loss.detach(), 2)}, "'b'", "no gradient", where="b",
        count={"a": anybatch.count_samples, "b": anybatch.count_samples},
    ),
    "a detached Mean": of_loss(lambda loss: Mean(loss.detach(), 2), "no gradient", "detach()", where="loss"),
    "a Mean of a number": of_loss(lambda _: Mean(2.0, 2), "total of the loss", "is a float", "expected a tensor"),
    "a Mean of a vector": of_loss(
        lambda loss: Mean(loss.expand(2), 2), "total", "shape (2,)", "Mean(total.sum(), count)",
    ),
    "a Mean over a vector": of_loss(
        lambda loss: Mean(loss, torch.ones(2)), "count", "shape (2,)", ".sum()", error=CountError,
    ),
    **{
        f"a Mean over {count!r}": of_loss(lambda loss, c=count: Mean(loss, c), "count", "expected", error=CountError)
        for count in (-2, NAN, INF, True, "2", None, torch.tensor(-2.0), torch.tensor(NAN), torch.tensor(1j))
    },
    "a Mean over what is learned": of_loss(
        lambda loss: Mean(loss, OTHER.linear.weight.sum().exp()), "count", "gradient", "detach", error=CountError
    ),
    "two Means": of_loss(
        lambda loss: {"a": Mean(loss, 2), "b": Mean(loss, 2)}, "'b'", "count='forward'", "count={", where="b",
    ),
    "a Mean beside a mean": of_loss(
        lambda loss: {"a": loss, "b": Mean(loss, 2)}, "'b'", "count='forward'", "count={", where="b",
    ),
    "no count for a loss": of_loss(
        lambda loss: {"b": loss}, "'b'", "['a']", "Add count={'b'", error=CountError,
        count={"a": anybatch.count_samples},
    ),
    "a generator of nothing": of_yields(lambda _: [], "yielded nothing", "at least one loss"),
    "a generator of None": of_yields(lambda _: [None], "loss 'loss_0'", "is a NoneType", where="loss_0"),
    "a generator of triples": of_yields(
        lambda loss: [("a", loss, 1)], "loss 'loss_0'", "is a tuple", where="loss_0",
    ),
    "one name twice": of_yields(
        lambda loss: [("a", loss), ("a", loss * 0)], "'a'", "yielded twice", "its own name", where="a",
    ),
    "a generator that returns a loss": of_yields(lambda loss: ([loss], loss), "returned a Tensor", "not returned"),
    "nothing to call": Case({"loss_fn": 3}, LossError, ("loss_fn is a int", "loss_fn(model, batch)")),
    "one argument": Case({"loss_fn": lambda batch: batch}, LossError, ("loss_fn(model, batch)", "too many positional")),
    "three arguments": Case({"loss_fn": lambda model, x, y: model(x)}, LossError, ("loss_fn(model, batch)", "'y'")),
    "a model from outside": Case(
        {"loss_fn": lambda model, batch: good(OTHER, batch)}, LossError,
        ("no gradient to any", "Noisy", "passed to loss_fn"),
    ),
    "another model": Case(
        {"loss_fn": lambda model, batch: (good(OTHER, batch), len(str(model)))[0]}, LossError,
        ("no gradient to any", "Noisy", "passed to loss_fn"),
    ),
}  # fmt: skip

COUNTS: dict[str, Case] = {
    **{
        f"{value!r}": of_value(value)
        for value in (NAN, INF, -1, True, "3", None, torch.tensor(NAN), torch.tensor(-1), torch.tensor([NAN]))
    },
    "a vector": of_value(torch.ones(3), "shape (3,)", "one number", ".sum()"),
    "a complex number": of_value(torch.tensor(1j), "count", "expected one number"),
    "a constant": of_value(1, "whole batch is 1", "together 3", *SHARES),
    "a maximum": of_count(lambda batch: batch["y"].max() + len(batch["x"]) ** 2, "whole batch is 36", *SHARES),
    "a mean": of_count(lambda batch: batch["x"].mean(), *SHARES),
    "a mapping to a constant": of_count(
        {"loss": lambda _: 2}, "count['loss'] of the whole batch is 2", "together 6", *SHARES,
    ),
    "an empty mapping": of_count({}, "expected a mapping of loss names to functions"),
    "a mapping to numbers": of_count({"loss": 3}, "count={'loss': 3}", "functions of a batch"),
    "a mapping without a name": of_count({"": len}, "the names ['']", "names of losses"),
    "a mapping by numbers": of_count({1: len}, "the names [1]", "names of losses"),
    "an unknown text": of_count("tokens", "count='tokens'", "'forward'"),
    "a number itself": of_count(3, "count=3", "a function of a batch"),
    "nothing": of_count(None, "count=None", "a function of a batch"),
    "labels that are not there": of_count(count_tokens("labels"), "'labels'", "it has", "'x'", where="labels"),
    "labels too deep": of_count(count_tokens("x.a"), "batch['x'] has no 'a'", where="x.a"),
    "labels with a fraction": of_count(count_tokens("x"), "torch.float32 tensor", "integer labels", where="x"),
    "labels that are texts": of_count(count_tokens("names"), "found a list", "integer labels", where="names"),
    "labels without time": of_count(count_tokens("y", shift=1), "shift=1", "shape (2,)", "[rows, time]", where="y"),
}  # fmt: skip
MASK = Case(
    {"batch": batch_of(mask=torch.ones(6, 2).bool()), "count": count_tokens("mask")},
    CountError,
    ("torch.bool", "integer labels"),
    "mask",
)
CASES = {
    **{f"batch: {name}": case for name, case in BATCHES.items()},
    **{f"loss: {name}": case for name, case in LOSSES.items()},
    **{f"count: {name}": case for name, case in COUNTS.items()},
    "count: labels that are a mask": MASK,
}


def assert_says(error: BaseException, case: Case) -> None:
    """Asserts the class itself, the words, and the place."""
    assert type(error) is case.error, repr(error)
    assert [word for word in case.words if word not in str(error)] == [], str(error)
    assert getattr(error, "path", getattr(error, "name", "")) == case.where


def arguments_of(case: Case) -> tuple[Any, Any, Any, dict[str, Any]]:
    options: dict[str, Any] = {
        "model": Noisy(),
        "loss_fn": good,
        "batch": batch_of(),
        "micro_batch_size": 2,
        **case.options,
    }
    return options.pop("model"), options.pop("loss_fn"), options.pop("batch"), options


def test_there_are_many_kinds() -> None:
    assert len(CASES) >= 100


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_backward_refuses_and_changes_nothing(case: Case) -> None:
    model, loss_fn, batch, options = arguments_of(case)
    watched = model if isinstance(model, nn.Module) else Noisy()
    for parameter in watched.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    reference.clear(OTHER)
    before = reference.everything(watched)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # what it is, assert_says says
        anybatch.backward(model, loss_fn, batch, **options)
    assert_says(caught.value, case)
    reference.assert_unchanged(reference.everything(watched), before)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_refuses_and_changes_nothing(case: Case) -> None:
    model, loss_fn, batch, options = arguments_of(case)
    watched = model if isinstance(model, nn.Module) else Noisy()
    optimizer = torch.optim.AdamW(watched.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for parameter in watched.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    optimizer.step()
    options.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=8.0))
    step = None
    before = reference.everything(watched, optimizer)
    try:
        step = anybatch.TrainStep(model, loss_fn, optimizer, scheduler=scheduler, clip_norm=1.0, **options)
    except AnyBatchError as error:
        assert_says(error, case)
        reference.assert_unchanged(reference.everything(watched, optimizer), before)
        return
    before = reference.everything(watched, optimizer, step, with_gradients=False)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # what it is, assert_says says
        step(batch)
    assert_says(caught.value, case)
    reference.assert_unchanged(reference.everything(watched, optimizer, step, with_gradients=False), before)
    assert scheduler.last_epoch == 0
    assert options["scaler"].get_scale() == 8.0


LATE = [
    name
    for name in LOSSES
    if not any(word in name for word in ("argument", "call", "model", "count for", "Means", "beside", "detached Mean"))
]


@pytest.mark.parametrize("name", LATE)
def test_a_later_micro_batch_is_refused_too(name: str) -> None:
    model, bad, _, options = arguments_of(LOSSES[name])
    calls: list[int] = []

    def late(model: Any, batch: Any) -> Any:
        calls.append(1)
        return good(model, batch) if len(calls) == 1 else bad(model, batch)

    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    before = reference.everything(model)
    options["count"] = anybatch.count_samples
    with pytest.raises((LossError, CountError)):
        anybatch.backward(model, late, batch_of(), **options)
    assert len(calls) >= 2
    reference.assert_unchanged(reference.everything(model), before)
