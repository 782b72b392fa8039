"""What an error about sequences in chunks says to do, done: afterwards the gradient is that of all steps."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch import Mean, OverTime, backward, count_samples
from remedies import Batch, Case, follow, gradient_of, sites
from source_tree import PACKAGE
from test_remedies_losses import CASES as OF_LOSSES

CASES: list[Case] = []
ERRORS = frozenset({"LossError", "CountError", "BatchError", "NotSplittable", "CutClosed", "AnyBatchError"})
ONCE = itertools.count()
wrong: Any
right: Any
mended: Any
options: Any


def case(site: str, says: str, broken: Callable[[], Any], mended: Callable[[], Any]) -> None:
    CASES.append(Case(f"loss/{site}", says, broken, mended))


def sequences(rows: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn(rows, 8, 5, generator=generator).double(), "w": torch.rand(rows, 8).double()}


def rnn(**options: Any) -> Any:
    def make() -> Any:
        torch.manual_seed(0)
        return nn.GRU(5, 4, batch_first=True, **options).double()

    return make


def start(model: Any, batch: Any) -> Any:
    x = batch["x"]
    rows = int(x.batch_sizes[0]) if isinstance(x, nn.utils.rnn.PackedSequence) else len(x)
    return torch.zeros(1, rows, 4).double()


def step_by(result: Any = None, state: Any = None, x: Any = None) -> Any:
    """A loss of a chunk: what it gives for an output, and the state that it hands on."""

    def chunk_loss(model: Any, chunk: Any, before: Any) -> Any:
        output, after = model(chunk["x"] if x is None else x(chunk), before if state is None else state(before))
        return (output.square().mean() if result is None else result(output)), after

    return chunk_loss


def over(chunk_loss: Any = None, begin: Any = start, **options: Any) -> Any:
    return OverTime(chunk_loss or step_by(), begin, **{"chunk": 3, **options})


def timed(loss_fn: Any, batch: Any = None, *, make: Any = None, size: int | None = 3, **options: Any) -> Any:
    return gradient_of(loss_fn, sequences() if batch is None else batch, model=make or rnn(), size=size, **options)


def same_in_time(loss_fn: Any, batch: Any = None, **options: Any) -> Any:
    """In chunks and micro-batches as at once."""
    whole = over(loss_fn.chunk_loss, loss_fn.state, **{**vars_of(loss_fn), "chunk": 8, "mode": "exact"})
    return timed(loss_fn, batch, **options), timed(whole, batch, **{**options, "size": None})


def same_in_rows(loss_fn: Any, batch: Any = None, **options: Any) -> Any:
    """In micro-batches as in one, in the same chunks."""
    return timed(loss_fn, batch, **options), timed(loss_fn, batch, size=None, **options)


def vars_of(loss_fn: Any) -> dict[str, Any]:
    names = ("dim", "last", "carry", "broadcast", "prepare", "state_dim")
    return {name: getattr(loss_fn, name) for name in names}


for options, says, right in (
    ({"state_dim": -1}, "or None to find it", {"state_dim": 1}),
    ({"mode": "some"}, "expected 'exact' or 'truncated'", {"mode": "exact"}),
    ({"chunk": 0}, "or None to measure", {"chunk": None}),
    ({"broadcast": "w"}, "expected a sequence of paths: ['w']", {"broadcast": ["w"]}),
):
    case(
        "sequence.__init__",
        says,
        partial(over, **options),
        partial(same_in_time, over(**right)),
    )
case(
    "sequence.__init__",
    "transpose [time, rows] to [rows, time]",
    lambda: over(dim=0),
    lambda: same_in_time(over(dim=1)),
)
case(
    "sequence.__init__",
    "needs chunk=",
    lambda: over(mode="truncated", chunk=None),
    lambda: timed(over(mode="truncated", chunk=3)),
)
case(
    "sequence._last",
    "anybatch.count_samples}",
    lambda: timed(over(last=lambda m, state, b: state.square().mean()), count=lambda b: b["w"].numel()),
    lambda: same_in_time(
        over(last=lambda m, state, b: state.square().mean()),
        count={"loss": lambda b: b["w"].numel(), "last": count_samples},
    ),
)
for wrong, says, right in (
    (lambda m, c, s: step_by()(m, c, s)[0], "expected (loss, state)", step_by()),
    (
        lambda m, c, s: (*step_by()(m, c, s), 3),
        "a mapping of Means",
        lambda m, c, s: (*step_by()(m, c, s), {"m": Mean(1.0, 1)}),
    ),
):
    case(
        "states._checked_parts",
        says,
        partial(timed, over(wrong)),
        partial(same_in_time, over(right)),
    )
case(
    "states._checked_parts",
    "return (loss, state)",
    lambda: timed(over(lambda m, c, s: (step_by()(m, c, s)[0], None))),
    lambda: same_in_time(over()),
)
for wrong, says in ((lambda o: (yield o.mean()), "is a generator"), (lambda o: (o.mean(), {}), "after the state")):
    case(
        "states.__call__",
        says,
        partial(timed, over(step_by(wrong))),
        lambda: same_in_time(over(lambda m, c, s: (*step_by()(m, c, s), {"m": Mean(1.0, 1)}))),
    )
case(
    "states.__call__",
    "expected a new state: clone it first",
    lambda: timed(over(step_by(state=lambda s: s.mul_(0.5)))),
    lambda: same_in_rows(over(step_by(state=lambda s: s.clone().mul_(0.5)))),
)
case(
    "states.__call__",
    "use the out-of-place operation",
    lambda: timed(over(step_by(x=lambda c: c["x"].mul_(2)))),
    lambda: same_in_time(over(step_by(x=lambda c: c["x"] * 2))),
)


class BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.GRU(5, 2, batch_first=True, bidirectional=True)
        self.top = nn.GRU(4, 4, batch_first=True)
        self.double()


case(
    "states._refuse_both_ways",
    "OverTime(..., prepare=lambda model, batch: {**batch, 'x': model.rnn(batch['x'])[0]})",
    lambda: timed(over(lambda m, c, s: step_by()(m.top, {"x": m.rnn(c["x"])[0]}, s)), make=BothWays),
    lambda: same_in_time(
        over(
            lambda m, c, s: step_by()(m.top, c, s),
            prepare=lambda model, batch: {**batch, "x": model.rnn(batch["x"])[0]},
        ),
        make=BothWays,
    ),
)


def paired(model: Any, chunk: Any, state: Any) -> Any:
    loss, new = step_by()(model, chunk, state[0])
    return loss, (new, state[1])


for wrong, right in (
    (lambda m, b: (start(m, b), object()), lambda m, b: (start(m, b), 3)),
    (lambda m, b: (start(m, b), torch.Generator()), lambda m, b: (start(m, b), None)),
    (
        lambda m, b: (start(m, b), start(m, b).numpy()),
        lambda m, b: (start(m, b), torch.from_numpy(start(m, b).numpy())),
    ),
):
    case(
        "states.checked_state",
        "expected tensors and plain values",
        partial(timed, over(paired, wrong)),
        partial(same_in_time, over(paired, right)),
    )


def square(model: Any, chunk: Any, state: Any) -> Any:
    new = state + chunk["x"].mean((1, 2))[:, None, None]
    return (model.weight_ih_l0.mean() * new).mean(), new


def of_six(**options: Any) -> Any:
    loss_fn = over(square, lambda m, b: torch.zeros(len(b["x"]), 6, 6).double(), carry=True, chunk=4, **options)
    timed(loss_fn, size=6)
    return timed(loss_fn, size=3)


case("states._dim", "OverTime(state_dim=0)", of_six, lambda: of_six(state_dim=0))
case(
    "sequence._check_has_losses",
    "expected a loss",
    lambda: timed(over(step_by(lambda o: None))),
    lambda: same_in_time(over()),
)
case(
    "sequence._compare",
    "pass on in the state what a chunk needs",
    lambda: timed(over(step_by(state=lambda s: s + next(ONCE)))),
    lambda: same_in_rows(over(step_by(state=lambda s: s + 1))),
)


def drawing(result: Any) -> Any:
    def chunk_loss(model: Any, chunk: Any, state: Any) -> Any:
        output, new = model(chunk["x"], state[0])
        later = bool(state[1])
        return result(lambda: (F.dropout(output, 0.5) if later else output).square().mean()), (new, state[1] + 1)

    return over(chunk_loss, lambda m, b: (start(m, b), 0))


case(
    "states._evaluated",
    "expected the loss itself instead of the function",
    lambda: timed(drawing(lambda f: f)),
    lambda: timed(drawing(lambda f: f())),
)


def growing(model: Any, chunk: Any, state: Any) -> Any:
    output, new = model(chunk["x"], state[0])
    return output.square().mean(), (new, *(new for _ in range(1 + next(ONCE) % 2)))


def other_leaves() -> Any:
    later: list[int] = []

    def chunk_loss(model: Any, chunk: Any, state: Any) -> Any:
        output, new = model(chunk["x"], state[0])
        return output.square().mean(), (new, *([new * 2] if later and not torch.is_grad_enabled() else []))

    loss_fn = over(chunk_loss, lambda m, b: (start(m, b),))
    model = rnn()()
    backward(model, loss_fn, sequences(), verify="off")
    later.append(1)
    return backward(model, loss_fn, sequences(), verify="off")


case(
    "sequence._roots_of",
    "does the same when run again",
    other_leaves,
    lambda: same_in_time(over()),
)


def packed(lengths: Any = (8, 5, 5, 3, 2, 1), names: Any = ("x",), **others: Any) -> Batch:
    found = {name: nn.utils.rnn.pack_padded_sequence(sequences()[name], torch.tensor(lengths), True) for name in names}
    return {**found, **others}


def in_packs(model: Any, chunk: Any, state: Any) -> Any:
    output, new = model(chunk["x"], state)
    return Mean(output.data.square().mean(1).sum(), len(output.data)), new


def ending(mode: str, last: Any = lambda m, s, b: s.square().mean()) -> Any:
    count = {"loss": lambda b: len(b["x"].data), "last": count_samples}
    return timed(over(in_packs, mode=mode, last=last), packed(), size=None, count=count)


says = "expected mode='exact', or a loss within chunk_loss"
case("sequence._first_to_last", says, lambda: ending("truncated"), lambda: ending("exact"))
case("sequence._first_to_last", says, lambda: ending("truncated"), lambda: ending("truncated", None))
case(
    "states.__init__",
    "which is not in the batch",
    lambda: timed(over(broadcast=["v"])),
    lambda: same_in_time(over(broadcast=["w"])),
)
case(
    "states.__init__",
    "expected tensors of shape [rows, time, ...]",
    lambda: timed(over(), {"x": torch.zeros(6)}),
    lambda: same_in_time(over()),
)
case(
    "states.__init__",
    "expected at least one",
    lambda: timed(over(), {"x": sequences()["x"][:, :0]}),
    lambda: same_in_time(over()),
)
for mended in (
    partial(timed, over(in_packs), packed(names=("x", "w")), size=None),
    partial(timed, over(in_packs, broadcast=["w"]), packed(w=sequences()["w"]), size=None),
):
    case(
        "states._look_at",
        "expected it to be packed, too, or named in OverTime(broadcast=...)",
        lambda: timed(over(in_packs), packed(w=sequences()["w"]), size=None),
        mended,
    )
case(
    "states._look_at",
    "expected the same lengths for all",
    lambda: timed(over(in_packs), {**packed(), "w": packed((8, 8, 8, 3, 2, 1), ("w",))["w"]}, size=None),
    lambda: timed(over(in_packs), packed(names=("x", "w")), size=None),
)
case(
    "states._note",
    "Name anything that is not a sequence in OverTime(broadcast=...)",
    lambda: timed(over(), {**sequences(), "v": torch.ones(6, 3)}),
    lambda: same_in_time(over(broadcast=["v"]), {**sequences(), "v": torch.ones(6, 3)}),
)
case(
    "states.share",
    "count has no entry for the loss",
    lambda: timed(over(step_by(lambda o: {"b": o.square().mean()})), count={"a": count_samples}),
    lambda: same_in_time(over(step_by(lambda o: {"b": o.square().mean()})), count={"b": count_samples}),
)


def of_a_plain_loss(model: Any, chunk: Any, state: Any) -> Any:
    output, new = model(chunk["x"], state)
    return output.data.square().mean(), new


case(
    "states._counted",
    "expected anybatch.Mean(total, number of steps)",
    lambda: timed(over(of_a_plain_loss), packed()),
    lambda: same_in_time(over(in_packs), packed()),
)
case(
    "states._counted",
    "or count= with a function that counts the steps",
    lambda: timed(over(of_a_plain_loss), packed()),
    lambda: same_in_time(over(of_a_plain_loss), packed(), count=lambda b: len(b["x"].data)),
)


def tokens() -> Any:
    return torch.arange(6 * 9).view(6, 9) % 5


def language(shift: int) -> Any:
    def chunk_loss(model: Any, chunk: Any, state: Any) -> Any:
        output, new = model(F.one_hot(chunk["x"], 5).double(), state)
        logits, labels = output[:, : output.shape[1] - shift], chunk["y"][:, shift:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten() % 4), new

    return over(chunk_loss)


case(
    "states._counted",
    "shift them in the batch (x = tokens[:, :-1], y = tokens[:, 1:])",
    lambda: timed(language(1), {"x": tokens(), "y": tokens()}, count=anybatch.count_tokens("y", shift=1)),
    lambda: same_in_time(language(0), {"x": tokens()[:, :-1], "y": tokens()[:, 1:]}, count=anybatch.count_tokens("y")),
)


def streamed(second: int, *, resets: bool = False) -> Any:
    loss_fn = over(carry=True)
    timed(loss_fn)
    if resets:
        loss_fn.reset()
    return timed(loss_fn, sequences(second))


case("states.of", "Call reset() where new streams begin", lambda: streamed(4), lambda: streamed(4, resets=True))
case("states.of", "drop a smaller last batch", lambda: streamed(4), lambda: streamed(6))


def with_rest(rest: Any) -> Any:
    def chunk_loss(model: Any, chunk: Any, state: Any) -> Any:
        output, new = model(chunk["x"], state[0])
        return output.square().mean(), (new, rest(chunk))

    loss_fn = over(chunk_loss, lambda m, b: (start(m, b), rest(b)), carry=True)
    timed(loss_fn, size=2)
    return timed(loss_fn, size=3)


case(
    "states._check_rest",
    "expected one row per sequence, or the same value",
    lambda: with_rest(lambda c: float(c["x"].sum())),
    lambda: with_rest(lambda c: c["x"].sum((1, 2))),
)
case(
    "states._check_rest",
    "or the same value for all sequences",
    lambda: with_rest(lambda c: float(c["x"].sum())),
    lambda: with_rest(lambda c: 1.0),
)
case(
    "sums.added_metrics",
    "expected a Mean, which can be added up",
    lambda: timed(over(lambda m, c, s: (*step_by()(m, c, s), {"m": torch.ones(3)}))),
    lambda: same_in_time(over(lambda m, c, s: (*step_by()(m, c, s), {"m": Mean(3.0, 3)}))),
)


# What needs an accelerator, several devices, or a caller that is wrong itself.
ELSEWHERE = {
    "loss/accumulate._refuse_parameters_on_meta": "test_calls.py",
    "loss/losses._refuse_criterion": "test_bad_arguments.py",
    "loss/states.refuse_hidden_dropout": "test_overtime_random.py",
}


def test_each_function_that_words_an_error_is_followed() -> None:
    found = sites(sorted((PACKAGE / "loss").glob("*.py")), ERRORS)
    followed = {case.site for case in [*CASES, *OF_LOSSES] if case.site.startswith("loss/")}
    assert found == followed | set(ELSEWHERE)
    assert all(list((PACKAGE.parents[1] / "tests").rglob(name)) for name in ELSEWHERE.values())


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{n}-{case.site}" for n, case in enumerate(CASES)])
def test_what_an_error_about_sequences_says_helps(number: int) -> None:
    follow(CASES[number])
