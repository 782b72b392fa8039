"""What an error about a batch says to do, done: it is cut, and the gradient is the whole batch's."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import anybatch
from anybatch import Coupled, Mean, count_samples, count_tokens, windows
from anybatch.batch.batches import Splittable
from remedies import Case, ce, follow, gradient_of, out, same, sites, vectors
from source_tree import PACKAGE

CASES: list[Case] = []
FILES = ("layout", "batches", "counting", "windowing", "writes")
ERRORS = frozenset({"LossError", "CountError", "BatchError"})
mended: Any
wrong: Any
right: Any
remedy: Any


def case(site: str, says: str, broken: Callable[[], Any], mended: Callable[[], Any]) -> None:
    CASES.append(Case(f"batch/{site}", says, broken, mended))


def shared() -> dict[str, Any]:
    """With a leaf that all samples share."""
    return {**vectors(), "scale": torch.rand(5).double()}


def scaled(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"] * batch["scale"]), batch["y"])


class Box:
    """A type that nobody knows."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Known(Box):
    """One that torch was notified of."""


torch.utils._pytree.register_pytree_node(Known, lambda box: ([box.value], None), lambda values, _: Known(*values))


def boxed(model: Any, batch: Any) -> Any:
    return ce(model, batch.value)


def beside(model: Any, batch: Any) -> Any:
    box = batch["box"].value
    return F.cross_entropy(model(batch["x"] * (box["scale"] if isinstance(box, dict) else box)), batch["y"])


def raw() -> list[dict[str, Any]]:
    return [{"x": x, "y": y} for x, y in zip(vectors()["x"], vectors()["y"], strict=True)]


def stacked(samples: Any) -> dict[str, Any]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "y")}


LOADER: Any = torch.utils.data.DataLoader
AS_RAW = {"collate": stacked}
cut: Any = partial(gradient_of, size=4)

# Where the samples lie.
case(
    "layout.placement",
    "broadcast=('scale',)",
    lambda: cut(scaled, shared(), broadcast="scale"),
    lambda: same(scaled, shared(), broadcast=("scale",)),
)
for wrong in (3, {"x": "0"}):
    case(
        "layout.placement",
        "layout={'x': 1}",
        partial(cut, ce, layout=wrong),
        lambda: same(lambda m, b: ce(m, {**b, "x": b["x"].T}), {**vectors(), "x": vectors()["x"].T}, layout={"x": 1}),
    )
case(
    "layout.placement",
    "expected one of them",
    lambda: cut(scaled, shared(), broadcast=("scale",), layout={"scale": 0}),
    lambda: same(scaled, shared(), layout={"scale": None}),
)
case(
    "layout.lay_out",
    "Leave empty batches out of the loader",
    lambda: cut(ce, {"x": torch.zeros(0, 5), "y": torch.zeros(0)}),
    lambda: same(ce),
)
case(
    "layout.refuse_graphs",
    "or pass batch['x'].detach()",
    lambda: cut(ce, {**vectors(), "x": vectors()["x"].requires_grad_() * 2}),
    lambda: same(ce, {**vectors(), "x": (vectors()["x"].requires_grad_() * 2).detach()}),
)
case(
    "layout.refuse_graphs",
    "Compute it in the loss function",
    lambda: cut(ce, {**vectors(), "x": vectors()["x"].requires_grad_() * 2}),
    lambda: same(lambda m, b: ce(m, {**b, "x": b["x"] * 2}), {**vectors(), "x": vectors()["x"].requires_grad_()}),
)
case(
    "layout.check_names",
    "it has ['x', 'y', 'scale']",
    lambda: cut(scaled, shared(), broadcast=("scales",)),
    lambda: same(scaled, shared(), broadcast=("scale",)),
)
for mended in (partial(same, boxed, Known(vectors())), partial(same, ce, raw(), **AS_RAW)):
    case(
        "layout._count_rows",
        "register_pytree_node. If rows of several samples",
        lambda: cut(boxed, Box(vectors())),
        mended,
    )
for remedy in ({"broadcast": ("names",)}, {}):
    names = ["a", "b"] if remedy else list("abcdefghijkl")
    case(
        "layout._lay_samples",
        "make it 12 items, or pass broadcast=('names',)",
        lambda: cut(ce, {**vectors(), "names": ["a", "b"]}),
        partial(same, ce, {**vectors(), "names": names}, **remedy),
    )
case(
    "layout._rows_along",
    "expected a dense tensor with that dimension",
    lambda: cut(ce, layout={"x": 3}),
    lambda: same(ce, layout={"x": 0}),
)
for mended in (
    partial(same, beside, {**vectors(), "box": Known(torch.rand(12, 5).double())}),
    partial(same, beside, {**vectors(), "box": Box(torch.rand(5).double())}, broadcast=("box",)),
    partial(same, ce, raw(), **AS_RAW),
):
    case(
        "layout._lone_leaf",
        "or pass broadcast=('box',) to pass it whole",
        lambda: cut(beside, {**vectors(), "box": Box(torch.rand(5).double())}),
        mended,
    )


def samples(container: type) -> Any:
    """Five sequences of nine steps, and their labels."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(9, 5, generator=generator).double() for _ in range(4)]
    return container(x), container([torch.arange(9) % 3 for _ in range(4)])


def stacked_loss(model: Any, batch: Any) -> Any:
    x, y = batch
    return F.cross_entropy(model(torch.stack(list(x))).flatten(0, 1), torch.stack(list(y)).flatten())


def of_pairs(samples: Any) -> Any:
    return tuple(map(list, zip(*samples, strict=True)))


apart: Any = partial(gradient_of, stacked_loss, size=3)
for mended in (
    partial(same, stacked_loss, samples(tuple), layout={"0": 0, "1": 0}),
    partial(same, stacked_loss, tuple(map(torch.stack, samples(list)))),
    partial(same, stacked_loss, list(zip(*samples(list), strict=True)), collate=of_pairs),
):
    case("layout.could_be_both", "pass layout={'0': 0, '1': 0}, or stack them", partial(apart, samples(tuple)), mended)
for mended in (
    partial(same, lambda m, b: sum(m(x).square().mean() for x in b["xs"]), {"xs": tuple(samples(list)[0])}),
    partial(
        same, lambda m, b: sum(m(x).square().mean() for x in b["xs"]), {"xs": samples(list)[0][:4]}, layout={"xs.*": 0}
    ),
):
    case(
        "layout.could_be_both",
        "make it a tuple if the items are leaves",
        lambda: cut(
            lambda m, b: sum(m(x).square().mean() for x in b["xs"]), {"xs": [x[:4] for x in samples(list)[0]]}, size=2
        ),
        mended,
    )


def unlike() -> dict[str, Any]:
    return {"x": vectors()["x"].T.contiguous(), "y": vectors()["y"]}


case(
    "layout.mismatch",
    "layout={'x': 1}",
    lambda: cut(lambda m, b: ce(m, {**b, "x": b["x"].T}), unlike()),
    lambda: same(lambda m, b: ce(m, {**b, "x": b["x"].T}), unlike(), layout={"x": 1}),
)
case(
    "layout.mismatch",
    "pass broadcast=('scale',)",
    lambda: cut(scaled, shared()),
    lambda: same(scaled, shared(), broadcast=("scale",)),
)
case(
    "layout.mismatch",
    "pass collate=, the function that joins them",
    lambda: cut(scaled, shared()),
    lambda: same(ce, raw(), **AS_RAW),
)


def in_blocks() -> torch.Tensor:
    with warnings.catch_warnings():  # that its support is in beta
        warnings.simplefilter("ignore")
        return vectors()["x"].to_sparse_bsr((1, 1))  # type: ignore[no-any-return]


# What can't be cut, joined or packed.
case(
    "batches._rows_of_tensor",
    "make it strided or torch.sparse_coo",
    lambda: cut(lambda m, b: ce(m, {**b, "x": b["x"].to_dense()}), {**vectors(), "x": in_blocks()}),
    lambda: same(lambda m, b: ce(m, {**b, "x": b["x"].to_dense()}), {**vectors(), "x": vectors()["x"].to_sparse_coo()}),
)
case("batches.__init__", "the window has no batches", lambda: Splittable([]), lambda: Splittable([vectors()]))
case(
    "batches.__init__",
    "cost packs raw samples, which collate joins",
    lambda: cut(ce, cost=lambda sample: 1.0),
    lambda: same(ce, raw(), cost=lambda sample: 1.0, **AS_RAW),
)


def joined(loss: Any) -> Any:
    batches = [{"x": vectors()["x"][:n], "pad": torch.ones(n, n).double()} for n in (3, 4)]
    (window,) = windows(batches, batches=2)
    return gradient_of(loss, window, size=None)


case(
    "batches._joined",
    "Return what the loss needs of it from encode, and leave the batch argument out",
    lambda: joined(Coupled(out, lambda m, o, b: o.square().mean() * b["pad"].mean())),
    lambda: joined(
        Coupled(lambda m, b: (out(m, b), b["pad"].mean(1)), lambda m, o: o[0].square().mean() * o[1].mean())
    ),
)
case(
    "batches.pack_by_cost",
    "raise micro_batch_size to at least 9",
    lambda: cut(ce, raw(), cost=lambda sample: 9, **AS_RAW),
    lambda: (cut(ce, raw(), size=9, cost=lambda sample: 9, **AS_RAW), cut(ce, raw(), size=None, **AS_RAW)),
)
case(
    "batches._raw",
    "collate_fn=lambda samples: samples",
    lambda: cut(ce, vectors(), **AS_RAW),
    lambda: same(ce, next(iter(LOADER(raw(), 12, collate_fn=lambda samples: samples))), **AS_RAW),
)
case(
    "batches._raw",
    "Leave empty batches out of the loader",
    lambda: cut(ce, [], **AS_RAW),
    lambda: same(ce, raw(), **AS_RAW),
)
case(
    "batches._checked_cost",
    "expected a positive finite number",
    lambda: cut(ce, raw(), cost=lambda sample: 0, **AS_RAW),
    lambda: same(ce, raw(), cost=lambda sample: 1, **AS_RAW),
)


# Counts of tokens, windows, and losses that write.
def texts() -> dict[str, Any]:
    return {
        "x": torch.randn(12, 4, 5, generator=torch.Generator().manual_seed(0)).double(),
        "y": torch.arange(48).view(12, 4) % 3,
    }


def with_count(make: Any) -> Any:
    return cut(token_mean, texts(), count=make())


def token_mean(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


for wrong, says in (
    (partial(count_tokens, "y", shift=-1), "expected an integer of at least 0"),
    (partial(count_tokens, "labels"), "it has ['x', 'y']"),
    (partial(count_tokens, "x"), "expected a tensor of integer labels"),
):
    site = "counting.count_tokens" if "at least" in says else "counting.count"
    case(
        site,
        says,
        partial(with_count, wrong),
        lambda: same(token_mean, texts(), count=count_tokens("y")),
    )
case(
    "counting.count",
    "expected [rows, time] with the time as the last dimension",
    lambda: cut(ce, count=count_tokens("y", shift=1)),
    lambda: same(ce, count=count_tokens("y")),
)


def epochs(loader: Any) -> list[int]:
    made = windows(loader, batches=2)
    return [len(list(made)) for _ in range(2)]


def batches() -> list[Any]:
    return [vectors(), vectors()]


case("windowing._pass", "such as a DataLoader or a list", lambda: epochs(iter(batches())), lambda: epochs(batches()))
case(
    "windowing.windows",
    "exactly one of batches=, samples= and tokens=",
    lambda: list(windows(batches())),
    lambda: list(windows(batches(), samples=12)),
)
case(
    "windowing.windows",
    "expected an integer of at least 1",
    lambda: list(windows(batches(), batches=0)),
    lambda: list(windows(batches(), batches=1)),
)
case(
    "windowing.windows",
    "windows(loader, tokens=65536, count=count_tokens('labels'))",
    lambda: list(windows(batches(), tokens=65536)),
    lambda: list(windows(batches(), tokens=65536, count=count_tokens("y"))),
)


def centred(change: Any) -> Any:
    def loss_fn(model: Any, batch: Any) -> Any:
        x = change(batch["x"])
        return {"a": Mean(model(x).square().sum(), len(x)), "b": Mean(model(x).sum(), len(x))}

    return loss_fn


for right in (lambda x: x - 1, lambda x: x.clone().sub_(1)):
    case(
        "writes.refuse",
        "x = x - mean instead of x.sub_(mean), or x = x.clone() before",
        lambda: cut(centred(lambda x: x.sub_(1)), count="forward"),
        partial(same, centred(right), count="forward"),
    )


def test_each_function_that_words_an_error_about_a_batch_is_followed() -> None:
    found = sites([PACKAGE / "batch" / f"{name}.py" for name in FILES], ERRORS)
    assert found == {case.site for case in CASES}
    assert count_samples is anybatch.count_samples


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{n}-{case.site}" for n, case in enumerate(CASES)])
def test_what_an_error_about_a_batch_says_helps(number: int) -> None:
    follow(CASES[number])
