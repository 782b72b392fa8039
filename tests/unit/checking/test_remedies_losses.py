"""What an error about a loss or a count says to do, done: afterwards the gradient is the whole batch's."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from anybatch import Coupled, Mean, TrainStep, backward, count_samples, cut
from remedies import Case, ce, ces, few, follow, gradient_of, linear, out, same, total, vectors


def yielded(*losses: Any) -> Any:
    def loss_fn(model: Any, batch: Any) -> Any:
        for loss in losses:
            yield loss(model, batch) if callable(loss) else (loss[0], loss[1](model, batch))

    return loss_fn


def over_items(count: Any) -> Any:
    return lambda model, batch: Mean(total(model, batch), count(batch))


CASES: list[Case] = []
given: Any
wrong: Any
right: Any
mended: Any
operation: Any
remedy: Any
options: Any


def case(site: str, says: str, broken: Callable[[], Any], mended: Callable[[], Any]) -> None:
    CASES.append(Case(f"loss/{site}", says, broken, mended))


# What a loss function gives.
case(
    "losses._from_generator",
    "give each loss of a step its own name",
    lambda: gradient_of(yielded(("a", ce), ("a", ce))),
    lambda: same(yielded(("a", ce), ("b", ce))),
)
case(
    "losses._from_generator",
    "yielded nothing; expected at least one",
    lambda: gradient_of(yielded()),
    lambda: same(yielded(ce)),
)
case(
    "losses._from_generator",
    "Losses are yielded, not returned",
    lambda: gradient_of(lambda m, b: (yield ce(m, b)) or 3),
    lambda: same(lambda m, b: (yield ce(m, b)) or {}),
)
case(
    "losses._refuse_outputs",
    'return output["loss"]',
    lambda: gradient_of(lambda m, b: {"loss": ce(m, b), "logits": out(m, b)}),
    lambda: same(lambda m, b: {"loss": ce(m, b), "logits": out(m, b)}["loss"]),
)
case(
    "losses._refuse_totals",
    "return result['all'], {'part': anybatch.Mean(part.detach(), 1), ...}",
    lambda: gradient_of(lambda m, b: {"all": ce(m, b) + (half := ces(m, b).square().mean()), "half": half}),
    lambda: same(lambda m, b: (ce(m, b) + (half := ces(m, b).square().mean()), {"half": Mean(half.detach(), 1)})),
)
case(
    "losses.checked_loss",
    "count= says so with 0",
    lambda: gradient_of(lambda m, b: [m][1:] or None),
    lambda: same(lambda m, b: ce(m, b) if (b["y"] == 0).any() else None, count=lambda b: len(b["x"])),
)
case(
    "losses.checked_loss",
    "return result[0]",
    lambda: gradient_of(lambda m, b: (ce(m, b), 1, 2)),
    lambda: same(lambda m, b: (ce(m, b), 1, 2)[0]),
)
case(
    "losses.checked_loss",
    "expected a tensor that depends on the model",
    lambda: gradient_of(lambda m, b: Mean(float(ce(m, b).detach()), 4)),
    lambda: same(lambda m, b: Mean(total(m, b), len(b["x"]))),
)
case(
    "losses._check_scalar",
    "reduce it to the mean over the items: .mean()",
    lambda: gradient_of(ces),
    lambda: same(lambda m, b: ces(m, b).mean()),
)
case(
    "losses._check_scalar",
    "sum it: Mean(total.sum(), count)",
    lambda: gradient_of(lambda m, b: Mean(ces(m, b), 4)),
    lambda: same(lambda m, b: Mean(ces(m, b).sum(), len(b["x"]))),
)
case(
    "losses._check_scalar",
    "expected a floating-point tensor",
    lambda: gradient_of(lambda m, b: ce(m, b).long()),
    lambda: same(lambda m, b: ce(m, b).long() + ce(m, b)),
)
case("losses.check_loss_fn", "expected a function loss_fn(model, batch)", lambda: gradient_of(3), lambda: same(ce))
case(
    "losses.check_loss_fn",
    "a function of the model and the batch",
    lambda: gradient_of(lambda m: m),
    lambda: same(ce),
)
case(
    "differentiation._no_gradient",
    "return values that are only logged as a metric",
    lambda: gradient_of(lambda m, b: {"loss": ce(m, b), "accuracy": (out(m, b).argmax(1) == b["y"]).double().mean()}),
    lambda: same(lambda m, b: (ce(m, b), {"accuracy": (out(m, b).argmax(1) == b["y"]).double()})),
)
for remedy in ({"count": "forward"}, {"count": {"a": lambda b: len(b["x"]), "b": few}}):
    case(
        "differentiation._several_unknown_counts",
        "pass count='forward'",
        lambda: gradient_of(lambda m, b: {"a": Mean(total(m, b), len(b["x"])), "b": Mean(total(m, b), few(b))}),
        partial(same, lambda m, b: {"a": Mean(total(m, b), len(b["x"])), "b": Mean(total(m, b), few(b))}, **remedy),
    )


def of_two_heads(model: Any, batch: Any) -> Any:
    hidden = out(model, batch)
    yield hidden.square().mean()
    yield hidden.tanh().mean()


def of_two_heads_cut(model: Any, batch: Any) -> Any:
    with cut(out(model, batch)) as hidden:
        yield hidden.square().mean()
        yield hidden.tanh().mean()


def of_two_heads_as_a_mapping(model: Any, batch: Any) -> Any:
    hidden = out(model, batch)
    return {"a": hidden.square().mean(), "b": hidden.tanh().mean()}


for mended in (of_two_heads_cut, of_two_heads_as_a_mapping):
    case(
        "differentiation._graph_is_gone",
        "`with anybatch.cut(shared) as shared:`",
        lambda: gradient_of(of_two_heads),
        partial(same, mended),
    )


def carried_by_hand() -> Any:
    state = [torch.zeros(12, 3).double()]

    def loss_fn(model: Any, batch: Any) -> Any:
        state[0] = torch.tanh(out(model, batch) + state[0][: len(batch["x"])])
        return state[0].mean()

    return gradient_of(loss_fn)


def carried_as_data(size: int | None) -> Any:
    state, model = torch.zeros(12, 3).double(), linear()

    def loss_fn(model: Any, batch: Any) -> Any:
        new = torch.tanh(out(model, batch) + batch["state"])
        return new.mean(), {"state": new}

    for _ in range(2):
        state = backward(model, loss_fn, {**vectors(), "state": state}, micro_batch_size=size).metrics["state"]
    return [state, model.weight.grad]


case(
    "differentiation._graph_is_kept",
    "batch['state'] = state",
    carried_by_hand,
    lambda: (carried_as_data(4), carried_as_data(None)),
)


# Counts.
for given, says in ((lambda b: b["x"], "add .sum()"), (lambda b: "3", "expected a number of items")):
    case(
        "weights.counted",
        says,
        partial(gradient_of, ce, count=given),
        lambda: same(lambda m, b: total(m, b) / few(b), count=few),
    )
case(
    "weights.total",
    "Add count={'b': ...}",
    lambda: gradient_of(lambda m, b: {"b": ce(m, b)}, count={"a": count_samples}),
    lambda: same(lambda m, b: {"b": ce(m, b)}, count={"a": count_samples, "b": count_samples}),
)
for given in ({}, {3: count_samples}, "backward"):
    case(
        "weights.check_count",
        "expected",
        partial(gradient_of, ce, count=given),
        lambda: same(lambda m, b: {"a": ce(m, b)}, count={"a": count_samples}),
    )
case(
    "weights.fetched",
    "a finite number of items, at least 0",
    lambda: gradient_of(ce, count=lambda b: float("nan")),
    lambda: same(ce, count=lambda b: len(b["x"])),
)
case(
    "weights._check_sums",
    "adds up over samples: a sum over them",
    lambda: gradient_of(ce, count=lambda b: b["y"].max()),
    lambda: gradient_of(ce, count=lambda b: b["y"].sum()),
)
case(
    "differentiation._check_given_count",
    "expected the same",
    lambda: gradient_of(lambda m, b: {"a": Mean(total(m, b), few(b))}, count={"a": count_samples}),
    lambda: same(lambda m, b: {"a": Mean(total(m, b), few(b))}, count={"a": few}),
)
for wrong, says, right in (
    (lambda b: b["x"].sum(1), ".sum()", lambda b: b["x"].abs().sum(1).sum()),
    (lambda b: "3", "expected a number or a tensor", lambda b: len(b["x"])),
):
    case(
        "differentiation.checked_count",
        says,
        partial(gradient_of, over_items(wrong)),
        partial(same, over_items(right)),
    )
case(
    "differentiation.checked_count",
    "count.detach()",
    lambda: gradient_of(lambda m, b: Mean(total(m, b), out(m, b).square().sum())),
    lambda: same(lambda m, b: Mean(total(m, b), out(m, b).square().sum().detach())),
)


# Gradients within the loss, and metrics.
def clears(model: Any, batch: Any) -> Any:
    model.zero_grad()
    return ce(model, batch)


def goes_back(model: Any, batch: Any) -> Any:
    ce(model, batch).backward()
    return total(model, batch) / len(batch["x"])


case("accumulate._error", "remove zero_grad() from it", lambda: gradient_of(clears), lambda: same(ce))
for mended in (
    lambda m, b: ce(m, b) + total(m, b) / len(b["x"]),
    lambda m, b: {"a": ce(m, b), "b": total(m, b) / len(b["x"])},
    yielded(ce, lambda m, b: total(m, b) / len(b["x"])),
):
    case(
        "accumulate._error",
        "remove backward() from it, and return the sum",
        lambda: gradient_of(goes_back),
        partial(same, mended),
    )
case(
    "sums.checked_metrics",
    "a Mean over no items is Mean(0, 0)",
    lambda: gradient_of(
        lambda m, b: (
            ce(m, b),
            {"m": Mean(1.0, 1)}
            if 0 in b["x"][:, :0].shape and len(b["x"]) and float(b["x"][0, 0]) == float(vectors()["x"][0, 0])
            else {},
        )
    ),
    lambda: same(lambda m, b: (ce(m, b), {"m": Mean(0, 0)})),
)
case(
    "sums._checked",
    "a tensor with one row for each of the",
    lambda: gradient_of(lambda m, b: (ce(m, b), {"m": "3"})),
    lambda: same(lambda m, b: (ce(m, b), {"m": out(m, b)})),
)


# Cuts.
def after_the_block(model: Any, batch: Any) -> Any:
    with cut(out(model, batch)) as hidden:
        yield hidden.square().mean()
    yield hidden.tanh().mean()


def before_the_cut(model: Any, batch: Any) -> Any:
    hidden = out(model, batch)
    with cut(hidden.clone()) as leaf:
        yield leaf.square().mean()
    yield out(model, batch).tanh().mean()


def in_place(model: Any, batch: Any) -> Any:
    with cut(out(model, batch)) as hidden:
        yield hidden.relu_().mean()


def not_in_place(operation: Callable[[Any], Any]) -> Any:
    def loss_fn(model: Any, batch: Any) -> Any:
        with cut(out(model, batch)) as hidden:
            yield operation(hidden).mean()

    return loss_fn


def entered_twice(model: Any, batch: Any) -> Any:
    once = cut(out(model, batch))
    for _ in range(2):
        with once as hidden:
            yield hidden.square().mean()


def made_anew(model: Any, batch: Any) -> Any:
    for _ in range(2):
        with cut(out(model, batch)) as hidden:
            yield hidden.square().mean()


def changed_behind(model: Any, batch: Any) -> Any:
    hidden = out(model, batch).exp()
    with cut(hidden) as leaf:
        with torch.no_grad():
            hidden.mul_(2)
        yield leaf.square().mean()


def changed_a_clone(model: Any, batch: Any) -> Any:
    hidden = out(model, batch).exp()
    with cut(hidden) as leaf:
        hidden.detach().clone().mul_(2)
        yield leaf.square().mean()


def weighted(model: Any, batch: Any) -> Any:
    with cut(model(batch["x"]), weighting=lambda matrix: torch.tensor([[0.3], [0.7]]).double()) as hidden:
        yield hidden.square().mean()
        yield hidden.tanh().mean()


def weighted_heads(model: Any, features: Any) -> Any:
    with cut(features, weighting=lambda matrix: torch.tensor([[0.3], [0.7]]).double()) as hidden:
        yield hidden.square().mean()
        yield hidden.tanh().mean()


case(
    "cutting._refuse_late_gradient",
    "call backward() inside",
    lambda: gradient_of(after_the_block),
    lambda: same(before_the_cut),
)
for operation in (torch.relu, lambda hidden: hidden.clone().relu_()):
    case(
        "cutting.written_in_place",
        "use the out-of-place version, or clone",
        lambda: gradient_of(in_place),
        partial(same, not_in_place(operation)),
    )
case(
    "cutting.__enter__",
    "make a new one: with anybatch.cut",
    lambda: gradient_of(entered_twice),
    lambda: same(made_anew),
)
case(
    "cutting._changed_in_place",
    "or clone the tensor first",
    lambda: gradient_of(changed_behind),
    lambda: same(changed_a_clone),
)
case(
    "cutting.__enter__",
    "use anybatch.Coupled(lambda model, batch: model.trunk(batch), heads)",
    lambda: gradient_of(weighted),
    lambda: same(Coupled(out, weighted_heads)),
)
case(
    "cutting.__init__",
    "expected a function of the K x N matrix",
    lambda: cut(torch.ones(2), weighting=3),  # type: ignore[arg-type]
    lambda: cut(torch.ones(2), weighting=lambda matrix: matrix.sum(0, keepdim=True)),
)


def weighed_by(combined: Any) -> Any:
    def loss_fn(model: Any, batch: Any) -> Any:
        with cut(model(batch["x"])[:4, 0], weighting=lambda matrix: combined) as hidden:
            for power in (1, 2, 3, 4):
                yield (hidden**power).mean()

    return loss_fn


for given, says in ((3.0, "weighting gave a float"), (torch.zeros(5), "expected"), (torch.zeros(4), "(1, ")):
    case(
        "cutting._combined",
        says,
        partial(gradient_of, weighed_by(given), size=None),
        partial(gradient_of, weighed_by(torch.ones(4, 1).double()), size=None),
    )


def read_too_soon(model: Any, batch: Any) -> Any:
    comparing = cut(out(model, batch), per_loss=True)
    with comparing as hidden:
        yield hidden.square().mean()
        _ = comparing.norms
        yield hidden.tanh().mean()


def read_afterwards(model: Any, batch: Any) -> Any:
    comparing = cut(out(model, batch), per_loss=True)
    with comparing as hidden:
        yield hidden.square().mean()
        yield hidden.tanh().mean()
    assert len(comparing.norms) == 2


case(
    "cutting._measurement",
    "Read them after the with block",
    lambda: gradient_of(read_too_soon),
    lambda: same(read_afterwards),
)


# Losses that see all samples at once.
def pairs(model: Any, outputs: Any) -> Any:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def by_rows(model: Any, outputs: Any, rows: Any) -> Any:
    return F.cross_entropy(outputs[rows] @ outputs.T, torch.arange(len(outputs))[rows])


def coupled(encode: Any, loss: Any = pairs, **options: Any) -> Any:
    """In micro-batches whose graphs are made twice."""
    return Coupled(encode, loss, **{"keep": 0, **options})


def noisy(draw: Any) -> Any:
    return lambda model, batch: out(model, batch) + draw(batch["x"][:, :3])


GENERATOR = torch.Generator()
ONCE = itertools.count()


case(
    "coupling.__init__",
    "expected an integer of at least",
    lambda: Coupled(out, pairs, keep=-1),
    lambda: same(coupled(out, keep=2)),
)
case("coupling.__init__", "expected True or False", lambda: Coupled(out, pairs, gather=3), lambda: same(coupled(out)))  # type: ignore[arg-type]
case(
    "coupling.__init__",
    "expected row_block=256",
    lambda: Coupled(out, by_rows),
    lambda: same(coupled(out, by_rows, row_block=256)),
)
for mended in (lambda m, b: m(b["x"] * 2), lambda m, b: m(b["x"].clone().mul_(2))):
    case(
        "coupling._to_run_again",
        "clone the tensor first",
        lambda: gradient_of(coupled(lambda m, b: m(b["x"].mul_(2)))),
        partial(same, coupled(mended)),
    )
case(
    "coupling.add",
    "expected at least one, with one row per sample",
    lambda: gradient_of(coupled(lambda m, b: 3)),
    lambda: same(coupled(out)),
)
CALLS = itertools.count()
case(
    "coupling.refuse_others",
    "Pass what it counts from call to call with the batch",
    lambda: gradient_of(coupled(lambda m, b: out(m, b) * next(CALLS))),
    lambda: same(coupled(lambda m, b: out(m, b) * b["calls"]), {**vectors(), "calls": next(CALLS)}),
)
for mended in (
    coupled(noisy(torch.rand_like)),
    coupled(noisy(lambda like: torch.rand(like.shape, generator=GENERATOR)), keep=1_000_000),
):
    case(
        "coupling.refuse_others",
        "Draw from these, not from a separate generator",
        lambda: gradient_of(coupled(noisy(lambda like: torch.rand(like.shape, generator=GENERATOR)))),
        partial(gradient_of, mended),
    )


def once_more(first: set[float]) -> Any:
    """Gives a second tensor the first time that it sees a micro-batch, and none the second time."""

    def encode(model: Any, batch: Any) -> Any:
        key = float(batch["x"][0, 0])
        is_first = key not in first
        first.add(key)
        return out(model, batch), out(model, batch) if is_first else None

    return encode


case(
    "coupling.refuse_others",
    "when it ran again",
    lambda: gradient_of(coupled(once_more(set()), lambda m, o: pairs(m, o[0]))),
    lambda: same(coupled(out)),
)
case(
    "coupling._column",
    "Anything that is not a tensor can stay in the batch",
    lambda: gradient_of(coupled(lambda m, b: (out(m, b), float(b["x"][0, 0])), lambda m, o: o[0].square().mean())),
    lambda: same(coupled(out, lambda m, o, b: o.square().mean() * b["x"][0, 0])),
)
case(
    "coupling._column",
    "pool or pad them in encode",
    lambda: gradient_of(
        coupled(lambda m, b: out(m, b)[:, : 1 + int(b["y"].sum() % 2)], lambda m, o: o.square().mean()), size=5
    ),
    lambda: same(coupled(lambda m, b: out(m, b).mean(1), lambda m, o: o.square().mean())),
)
case(
    "coupling._of_another_structure",
    "expected the same containers around tensors",
    lambda: gradient_of(coupled(lambda m, b: [out(m, b)] * (1 + len(b["x"]) % 2), lambda m, o: o[0].mean()), size=5),
    lambda: same(coupled(lambda m, b: [out(m, b)] * 2, lambda m, o: o[0].mean())),
)
case(
    "coupling._check_rows",
    "Compute what belongs to the batch as a whole in the loss",
    lambda: gradient_of(coupled(lambda m, b: out(m, b).mean(0))),
    lambda: same(coupled(out, lambda m, o: o.mean(0).square().sum())),
)


def squared(operation: Any) -> Any:
    return lambda model, outputs: operation(outputs).square().mean()


for operation in (lambda o: o * 2, lambda o: o.clone().mul_(2)):
    case(
        "cutting.written_in_place",
        "use the out-of-place version, or clone",
        lambda: gradient_of(coupled(out, lambda m, o: o.mul_(2).mean())),
        partial(same, coupled(out, squared(operation))),
    )
for wrong in (3, lambda model: model):
    case(
        "losses.check_callable",
        "Coupled(encode=)",
        partial(Coupled, wrong, pairs),
        lambda: same(coupled(out)),
    )


def stepped(model: Any, trained: Any) -> None:
    before = model.weight.detach().clone()
    TrainStep(model, ce, torch.optim.SGD(trained.parameters(), lr=0.1), micro_batch_size=5)(vectors())
    assert not torch.equal(model.weight, before)


CASES.append(
    Case(
        "update/boundary.check_reached",
        "build it again from model.parameters()",
        lambda: stepped(linear(), copy.deepcopy(linear())),
        lambda: stepped(model := linear(), model),
    )
)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{n}-{case.site}" for n, case in enumerate(CASES)])
def test_what_an_error_about_a_loss_says_helps(number: int) -> None:
    follow(CASES[number])
