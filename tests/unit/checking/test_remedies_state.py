"""Each line that a check prints about state and random numbers, done as it is written; and that none is left out."""

import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Coupled, Mean, NotSplittable, OverTime, TrainStep, check
from anybatch.checking.causes import CAUSES
from remedies import sites
from source_tree import PACKAGE
from test_remedies_check import (
    COUPLED,
    REGISTER,
    WHOLE,
    Batch,
    Loss,
    assert_same,
    assert_whole_is_plain,
    cross_entropy,
    linear,
    said,
    trained,
    vectors,
)

follows = REGISTER.follows
# Where a check can't look, and which name it or say why; what is said of time is followed by test_proof_chunks.py,
# of another dimension by test_proof_uncut.py, of micro-batches of one size by test_proof_moves.py, of one count= of
# several losses by test_proof_worded.py, of samples that meet in ``collate`` by test_proof_coupled_by_collate.py, and
# of those that a loss keeps together by test_proof_groups.py.
IN_PROOFS = {
    "unexplained",
    "in parts",
    "whole batch",
    "time",
    "time of the gradient",
    "time of the state",
    "one count",
    "other dimension",
    "one size",
    "collated together",
} | {"parts", "groups"}
WITH_LINES_MADE_FOR_THE_CASE = {"several means", "time first"}


def test_each_cause_with_lines_that_help_has_a_test_that_follows_them() -> None:
    with_lines = {name for name, cause in CAUSES.items() if cause.remedies} | WITH_LINES_MADE_FOR_THE_CASE
    assert set(REGISTER.known) == with_lines - IN_PROOFS
    assert sites(sorted((PACKAGE / "checking").glob("*.py")), frozenset({"Reason"})) == {"checking/causes.reason"}


@follows("moves")
def test_of_something_that_moves_unseen() -> None:
    numbers = itertools.count(1)
    said(check(linear(), lambda m, b: cross_entropy(m, b) / next(numbers), vectors()), 'batch["value"] = value')
    assert check(linear(), lambda m, b: cross_entropy(m, b) / b["value"], {**vectors(), "value": next(numbers)}).exact


@follows("left over")
def test_of_a_loss_that_reads_the_gradient() -> None:
    def eased(model: Any, batch: Batch) -> Any:
        gradient = model.weight.grad
        return cross_entropy(model, batch) / (1.0 if gradient is None else 1 + gradient.norm())

    found = said(check(linear(), eased, vectors()), 'batch["value"] = value', WHOLE)
    assert found.code == "state"
    assert "averaged" not in found.message
    assert check(linear(), lambda m, b: cross_entropy(m, b) / b["value"], {**vectors(), "value": 1.5}).exact
    trained(linear(), eased, vectors())


@follows("function of a mean")
def test_of_the_logarithm_of_a_mean() -> None:
    def items(model: Any, batch: Batch) -> torch.Tensor:
        made: torch.Tensor = model(batch["x"]).square().sum(1)
        return made

    lines = (WHOLE, COUPLED, "loss = items.log().mean()", "return anybatch.Mean(total, number)")
    said(check(linear(), lambda m, b: items(m, b).mean().log(), vectors()), *lines)
    assert check(linear(), Coupled(items, lambda m, out: out.mean().log()), vectors()).exact
    assert check(linear(), lambda m, b: items(m, b).log().mean(), vectors()).exact


def test_of_a_number_of_items_with_a_bound() -> None:
    """A part without positives reaches it, and then counts as much as one with one."""
    batch = {**vectors(), "positive": torch.arange(12) < 5}

    def total(model: Any, batch: Batch) -> torch.Tensor:
        there = batch["positive"].to(batch["x"].dtype)
        return F.binary_cross_entropy_with_logits(model(batch["x"])[:, 0], there, reduction="sum")

    def bounded(model: Any, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = total(model, batch) / batch["positive"].sum().clamp(min=1)
        return loss

    others = (WHOLE, COUPLED, "loss = items.log().mean()")
    said(check(linear(), bounded, batch), *others, "return anybatch.Mean(total, number)")
    assert check(linear(), lambda m, b: Mean(total(m, b), b["positive"].sum()), batch).exact


@follows("empty part")
def test_of_a_chunk_without_items() -> None:
    batch = {"x": torch.randn(8, 6, 4), "kept": torch.ones(8, 6)}
    batch["kept"][:2, :3] = 0  # the first two sequences have no item in their first chunk

    def step(loss: Callable[[torch.Tensor, torch.Tensor], Any]) -> TrainStep:
        def chunk_loss(model: Any, chunk: Batch, state: torch.Tensor) -> Any:
            return loss((model(chunk["x"])[..., 0] - state).square() * chunk["kept"], chunk["kept"].sum()), state

        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        chunks = OverTime(chunk_loss, lambda model, batch: torch.zeros(len(batch["x"]), 1), chunk=3)
        return TrainStep(model, chunks, torch.optim.SGD(model.parameters(), 0.1), micro_batch_size=2)

    with pytest.raises(NotSplittable, match=r"as 0 / 0(.|\n)*return anybatch.Mean\(total, items\)"):
        step(lambda items, count: items.sum() / count)(batch)
    out = step(lambda items, count: Mean(items.sum(), count))(batch)
    assert out.proof is not None
    assert out.proof.exact


@follows("not held", "seeded")
def test_of_random_numbers() -> None:
    def from_numpy(model: Any, batch: Batch) -> Any:
        return cross_entropy(model, {**batch, "x": batch["x"] + torch.from_numpy(np.random.rand(len(batch["x"]), 1))})

    said(check(linear(), from_numpy, vectors()), "batch['noise'] = torch.rand(len(batch['x']))")
    noisy: Loss = lambda m, b: cross_entropy(m, {**b, "x": b["x"] + b["noise"][:, None]})  # noqa: E731
    assert check(linear(), noisy, {**vectors(), "noise": torch.rand(12)}).exact

    def seeded(model: Any, batch: Batch) -> Any:
        torch.manual_seed(1)
        return cross_entropy(model, batch)

    model = nn.Sequential(linear(), nn.Dropout(0.5))
    said(check(model, seeded, vectors()), "torch.manual_seed(seed)  # once, before step(batch)", 'dropout="per-sample"')
    assert check(model, cross_entropy, vectors()).exact
    certificate = check(model, seeded, vectors(), dropout="per-sample")
    assert certificate.exact
    assert not certificate.notes


@follows("drawn together")
def test_of_samples_that_meet_others_by_numbers_of_numpy() -> None:
    def prepare(batch: Batch) -> Batch:
        return {**batch, "x": 0.7 * batch["x"] + 0.3 * batch["x"][np.random.permutation(len(batch["x"]))]}

    def mixed(model: Any, batch: Batch) -> Any:
        return cross_entropy(model, prepare(batch))

    def some(model: Any, batch: Batch) -> tuple[Any, Any]:
        taken = torch.from_numpy(np.random.rand(len(batch["y"]))) < 0.2 + 0.4 * batch["y"]
        return (F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * taken).sum(), taken.sum()

    np.random.seed(0)
    lines = (WHOLE, "batch = prepare(batch); step(batch)", "return anybatch.Mean(total, items)")
    said(check(linear(), mixed, vectors()), *lines)
    assert check(linear(), cross_entropy, prepare(vectors())).exact
    assert_whole_is_plain(linear(), lambda m, b: (np.random.seed(0), mixed(m, b))[1], vectors())

    def share(model: Any, batch: Batch) -> Any:
        total, items = some(model, batch)
        return total / items

    said(check(linear(), share, vectors()), *lines)
    assert check(linear(), lambda m, b: Mean(*some(m, b)), vectors()).reasons[0].evidence == {"meet": False}


def warmed(loss: torch.Tensor, steps: int) -> torch.Tensor:
    return loss * min(1.0, steps / 4)


@pytest.mark.parametrize("start", [0, 50])
@follows("counter", "later counter")
def test_of_a_counter(start: int) -> None:
    class Warmup(nn.Module):
        def __init__(self, counts: bool) -> None:
            super().__init__()
            self.head, self.counts, self.steps = linear(), counts, start

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += int(self.counts)
            return warmed(self.head(x), self.steps)

    certificate = check(Warmup(counts=True), cross_entropy, vectors())
    lines = ('batch["steps"] = step.updates + 1  # before step(batch)', "step(batch)\n    self.steps += 1")
    said(certificate, *lines, notes=bool(start))
    by_hand = trained(Warmup(counts=True), cross_entropy, vectors())

    def as_data(size: int | None) -> list[Any]:
        loss_fn: Loss = lambda model, batch: warmed(model(batch["x"]), start + batch["steps"])  # noqa: E731
        return trained(
            linear(), lambda m, b: F.cross_entropy(loss_fn(m, b), b["y"]),
            lambda step: {**vectors(), "steps": step.updates + 1}, micro_batch_size=size,
        )  # fmt: skip

    def afterwards(size: int | None) -> list[Any]:
        model = Warmup(counts=False)
        model.steps += 1

        def after(_: Any) -> None:
            model.steps += 1

        return trained(model, cross_entropy, vectors(), after=after, micro_batch_size=size)

    for make in (as_data, afterwards):
        assert_same(make)
        torch.testing.assert_close(make(4), by_hand, rtol=1e-4, atol=1e-6)


@follows("number")
def test_of_a_number_that_the_loss_moves() -> None:
    class Controlled:
        def __init__(self) -> None:
            self.beta = 1.0

        def __call__(self, model: Any, batch: Batch) -> Any:
            loss = cross_entropy(model, batch) * self.beta
            self.beta += 0.1 * (float(loss.detach()) - 1.0)
            return loss

    said(
        check(linear(), Controlled(), vectors()),
        'batch["beta"] = self.beta  # before step(batch)',
        "out = step(batch)\n    self.beta = ...",
    )
    by_hand = trained(linear(), Controlled(), vectors())

    def as_data(size: int | None) -> list[Any]:
        beta = [1.0]

        def after(out: Any) -> None:
            beta[0] += 0.1 * (float(out.loss) - 1.0)

        loss_fn: Loss = lambda model, batch: cross_entropy(model, batch) * batch["beta"]  # noqa: E731
        given: Callable[[Any], Any] = lambda step: {**vectors(), "beta": beta[0]}  # noqa: E731
        return trained(linear(), loss_fn, given, after=after, micro_batch_size=size)

    assert_same(as_data)
    torch.testing.assert_close(as_data(4), by_hand, rtol=1e-4, atol=1e-6)


@follows("shared state")
def test_of_a_centre_without_rows() -> None:
    """What has no row for each sample goes whole to each micro-batch."""
    centre = [torch.zeros(1, 3)]

    def loss_fn(model: Any, batch: Batch) -> Any:
        out = model(batch["x"])
        return (out - batch["centre"]).square().mean(), {"centre": out.detach()}

    def trained_in(size: int | None) -> list[Any]:
        centre[0] = torch.zeros(1, 3)

        def after(out: Any) -> None:
            centre[0] = 0.9 * centre[0] + 0.1 * out.metrics["centre"].mean(0, keepdim=True)

        batch: Callable[[Any], Batch] = lambda step: {**vectors(), "centre": centre[0]}  # noqa: E731
        options: dict[str, Any] = {"broadcast": ("centre",), "micro_batch_size": size}
        return [*trained(linear(), loss_fn, batch, after=after, **options), centre[0]]

    assert_same(trained_in)


@follows("shared state")
def test_of_the_last_losses() -> None:
    """The loss reads what it makes of them, and gives its own as a mean over its samples."""
    last = deque([1.0, 2.0], maxlen=3)

    def by_hand(model: Any, batch: Batch) -> Any:
        loss = (model(batch["x"]) - 1).square().mean()
        usual = sum(last) / len(last)
        last.append(loss.item())
        return loss / usual

    reason = said(check(linear(), by_hand, vectors()), 'batch["last"] = state', WHOLE)
    assert 'return loss, {"last": values}' in reason.remedy
    assert "anybatch.Mean(value * n, n)" in reason.remedy

    def loss_fn(model: Any, batch: Batch) -> Any:
        items = (model(batch["x"]) - 1).square().mean(1)
        return items.mean() / batch["last"], {"last": Mean(items.mean() * len(items), len(items))}

    def trained_in(size: int | None) -> list[Any]:
        last.clear()
        last.extend([1.0, 2.0])
        batch: Callable[[Any], Batch] = lambda step: {**vectors(), "last": sum(last) / len(last)}  # noqa: E731
        after: Callable[[Any], None] = lambda out: last.append(float(out.metrics["last"]))  # noqa: E731
        return [*trained(linear(), loss_fn, batch, after=after, micro_batch_size=size), *last]

    assert_same(trained_in)


@follows("state")
def test_of_a_hidden_state() -> None:
    hidden = [torch.zeros(12, 3)]

    def by_hand(model: Any, batch: Batch) -> Any:
        hidden[0] = torch.tanh(model(batch["x"]) + hidden[0][: len(batch["x"])])
        return hidden[0].mean()

    reason = said(check(linear(), by_hand, vectors()), 'batch["hidden"] = hidden[0]', WHOLE)
    assert 'return loss, {"hidden": new}' in reason.remedy
    assert 'hidden[0] = step(batch).metrics["hidden"]' in reason.remedy

    def as_data(size: int | None) -> list[Any]:
        hidden = [torch.zeros(12, 3)]

        def loss_fn(model: Any, batch: Batch) -> Any:
            new = torch.tanh(model(batch["x"]) + batch["hidden"])
            return new.mean(), {"hidden": new}

        def after(out: Any) -> None:
            hidden[0] = out.metrics["hidden"]

        batch: Callable[[Any], Batch] = lambda step: {**vectors(), "hidden": hidden[0]}  # noqa: E731
        return [*trained(linear(), loss_fn, batch, after=after, micro_batch_size=size), hidden[0]]

    assert_same(as_data)


class Kept(nn.Module):
    """A layer, and what a case keeps beside it."""

    kept: torch.Tensor
    seen: torch.Tensor

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("kept", value)


@follows("counting buffer")
def test_of_a_buffer_that_counts() -> None:
    def counts(model: Any, batch: Batch) -> Any:
        model.kept += 1
        return warmed(cross_entropy(model.layer, batch), int(model.kept))

    lines = ("step(batch)\n    model.kept.add_(1)", 'batch["kept"] = step.updates + 1  # before step(batch)')
    said(check(Kept(torch.tensor(0)), counts, vectors()), *lines)

    def after(size: int | None) -> list[Any]:
        reads: Loss = lambda m, b: warmed(cross_entropy(m.layer, b), int(m.kept))  # noqa: E731
        model = Kept(torch.tensor(0))
        return trained(model, reads, vectors(), after=lambda _: model.kept.add_(1), micro_batch_size=size)

    assert_same(after)
    reads: Loss = lambda m, b: warmed(cross_entropy(m.layer, b), b["kept"])  # noqa: E731
    assert check(Kept(torch.tensor(0)), reads, {**vectors(), "kept": 1}).exact


@follows("first forward")
def test_of_a_first_forward_that_sets_weights_by_its_samples() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.shift = linear(), nn.Parameter(torch.zeros(5))
            self.is_set: torch.Tensor
            self.register_buffer("is_set", torch.tensor(False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.is_set:
                self.shift.data.copy_(-x.mean(0))
                self.is_set.fill_(True)
            result: torch.Tensor = self.layer(x + self.shift)
            return result

    line = "with torch.no_grad():\n        loss_fn(model, batch)  # once, before the first step"
    said(check(Normalised(), cross_entropy, vectors()), line, WHOLE)

    def made(size: int | None) -> list[Any]:
        model, batch = Normalised(), vectors()
        with torch.no_grad():
            cross_entropy(model, batch)
        return trained(model, cross_entropy, batch, micro_batch_size=size)

    assert_same(made)


@follows("first call")
def test_of_a_first_call_that_keeps_something_of_its_samples() -> None:
    class Normalised:
        mean: Any = None
        calls = 0

        def __call__(self, model: Any, batch: Batch) -> Any:
            self.calls += 1
            if self.mean is None:
                self.mean, self.deviation = batch["t"].mean(), batch["t"].std()
            return F.mse_loss(model(batch["x"])[:, 0], (batch["t"] - self.mean) / self.deviation)

    found = check(linear(), Normalised(), vectors()).reasons[0]
    assert found.remedies == CAUSES["first call"].remedies
    assert "The first call sets self.mean from the samples" in found.message

    def made(size: int | None) -> list[Any]:
        model, batch, loss_fn = linear(), vectors(), Normalised()
        with torch.no_grad():
            loss_fn(model, batch)
        return trained(model, loss_fn, batch, micro_batch_size=size)

    assert_same(made)


@follows("trained")
@pytest.mark.parametrize("calls_backward", [False, True])
def test_of_a_loss_that_trains_another_net(calls_backward: bool) -> None:
    generator, batch = linear(5), vectors()
    judge = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(judge.parameters(), 0.1)

    def judged(judge: Any, batch: Batch) -> Any:
        return (F.softplus(-judge(batch["x"])) + F.softplus(judge(generator(batch["x"]).detach()))).mean()

    def fooled(model: Any, batch: Batch) -> Any:
        return F.softplus(-judge(model(batch["x"]))).mean()

    def both(model: Any, batch: Batch) -> Any:
        optimizer.zero_grad()
        if calls_backward:
            judged(judge, batch).backward()
            optimizer.step()
        else:
            gradients = torch.autograd.grad(judged(judge, batch), [*judge.parameters()])
            for one, gradient in zip(judge.parameters(), gradients, strict=True):
                one.data.sub_(0.1 * gradient)
        return fooled(model, batch)

    with pytest.raises(NotSplittable, match=r"itself trains another network, judge\.weight, judge\.bias") as refused:
        trained(generator, both, batch, micro_batch_size=4)
    for line in CAUSES["trained"].remedies:
        assert line in str(refused.value)

    def apart(size: int | None) -> list[Any]:
        for one in (*generator.parameters(), *judge.parameters()):
            nn.init.constant_(one, 0.1)
        other = TrainStep(judge, judged, torch.optim.SGD(judge.parameters(), 0.1), micro_batch_size=size)
        step = TrainStep(generator, fooled, torch.optim.SGD(generator.parameters(), 0.1), micro_batch_size=size)
        for _ in range(3):
            other(batch)
            step(batch)
        return [one.detach().clone() for net in (generator, judge) for one in net.parameters()]

    assert_same(apart)


def test_an_average_that_requires_gradients_is_not_trained() -> None:
    """As a copy does unless it is told not to, which no optimizer has."""
    model, batch = linear(5), vectors()
    teacher = [linear(5)]

    def taught(model: Any, batch: Batch) -> Any:
        for one, other in zip(teacher[0].parameters(), model.parameters(), strict=True):
            one.data.lerp_(other.data, 0.3)
        return F.mse_loss(model(batch["x"]), teacher[0](batch["x"]).detach())

    with pytest.raises(NotSplittable) as refused:
        trained(model, taught, batch, micro_batch_size=4)
    assert "trains another network" not in str(refused.value)
    assert "Update them once per step" in str(refused.value)


@follows("later flag")
def test_of_a_flag_that_is_turned_later() -> None:
    def reads(model: Any, batch: Batch) -> Any:
        out = model.layer(batch["x"])
        return F.cross_entropy(out - out.mean(0) if model.kept else out, batch["y"])

    model = Kept(torch.tensor(False))
    with pytest.warns(UserWarning, match=r"anybatch.check\(model, loss_fn, batch\)  # once it has flipped"):
        trained(model, reads, vectors(), steps=1, micro_batch_size=4)
    model.kept.fill_(True)
    said(check(model, reads, vectors()), WHOLE, COUPLED, "batch = prepare(batch)", "return {")


@follows("later buffer")
def test_of_a_buffer_that_matters_later() -> None:
    def reads(model: Any, batch: Batch) -> Any:
        x = batch["x"] - model.kept if model.seen >= 24 else batch["x"]
        return F.cross_entropy(model.layer(x), batch["y"])

    def update(model: Any, values: torch.Tensor) -> None:
        model.seen += len(values)
        model.kept += (values - model.kept).sum(0) / model.seen

    def averaging() -> Kept:
        model = Kept(torch.zeros(5))
        model.register_buffer("seen", torch.tensor(0))
        return model

    def moves(model: Any, batch: Batch) -> Any:
        loss = reads(model, batch)
        update(model, batch["x"])
        return loss

    lines = ('return loss, {"values": values}', 'model.update(step(batch).metrics["values"])')
    certificate = check(averaging(), moves, vectors())
    assert certificate.exact
    (told,) = [note for note in certificate.notes if note.code == "buffer"]
    assert all(any(line in remedy for remedy in told.remedies) for line in lines)

    def made(size: int | None) -> list[Any]:
        model = averaging()
        step = TrainStep(
            model, lambda m, b: (reads(m, b), {"values": b["x"]}), torch.optim.SGD(model.parameters(), 0.1),
            micro_batch_size=size,
        )  # fmt: skip
        for _ in range(4):
            update(model, step(vectors()).metrics["values"])
        return [one.detach() for one in model.parameters()]

    assert_same(made)


@follows("later list")
def test_of_a_list_that_matters_later() -> None:
    class Queue:
        def __init__(self) -> None:
            self.rows: list[torch.Tensor] = []

        def of(self, model: Any, batch: Batch, rows: list[torch.Tensor]) -> Any:
            out = model(batch["x"])
            return F.cross_entropy(out - torch.stack(rows[-24:]).mean(0) if len(rows) >= 24 else out, batch["y"])

        def __call__(self, model: Any, batch: Batch) -> Any:
            loss = self.of(model, batch, self.rows)
            self.rows.extend(model(batch["x"]).detach())
            return loss

    lines = ('batch["rows"] = list(self.rows)', 'return loss, {"rows": rows}', "self.rows.extend(step(batch)")
    (told,) = [note for note in check(linear(), Queue(), vectors()).notes if note.code == "state"]
    assert all(any(line in remedy for remedy in told.remedies) for line in lines)

    def made(size: int | None) -> list[Any]:
        model, queue = linear(), Queue()
        step = TrainStep(
            model, lambda m, b: (queue.of(m, b, b["rows"]), {"rows": m(b["x"]).detach()}),
            torch.optim.SGD(model.parameters(), 0.1), micro_batch_size=size, broadcast=("rows",),
        )  # fmt: skip
        for _ in range(4):
            queue.rows.extend(step({**vectors(), "rows": list(queue.rows)}).metrics["rows"])
        return [one.detach() for one in model.parameters()]

    assert_same(made)


@follows("full mask")
def test_of_a_mask_that_is_full() -> None:
    def masked(model: Any, batch: Batch) -> Any:
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    def totals(model: Any, batch: Batch) -> Any:
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return Mean((losses * batch["mask"]).sum(), batch["mask"].sum())

    full = {**vectors(), "mask": torch.ones(12)}
    with pytest.warns(UserWarning, match=r"count=lambda batch: batch\['mask'\].sum\(\)(.|\n)*Mean\(total, items\)"):
        trained(linear(), masked, full, steps=1, micro_batch_size=4)
    few = {**full, "mask": torch.arange(12) % 3 * 1.0}
    assert check(linear(), masked, few, count=lambda batch: batch["mask"].sum()).exact
    for loss_fn, options in ((masked, {"count": lambda batch: batch["mask"].sum()}), (totals, {})):
        assert_same(partial(_in_turn, loss_fn, (full, few), options))


def _in_turn(loss_fn: Loss, batches: Any, options: dict[str, Any], size: int | None) -> list[Any]:
    model, of = linear(), iter(batches)
    return trained(model, loss_fn, lambda _: next(of), steps=len(batches), micro_batch_size=size, **options)


@follows("other outputs")
def test_of_samples_that_are_taken_by_what_the_model_gives() -> None:
    def taken(model: Any, batch: Batch) -> Any:
        losses = F.cross_entropy(batch["louder"][:, None] * model(batch["x"]), batch["y"], reduction="none")
        return losses * (losses > 0.05), (losses > 0.05).sum()

    def divided(model: Any, batch: Batch) -> Any:
        total, number = taken(model, batch)
        return total.sum() / number

    first, later = ({**vectors(), "louder": torch.full((12,), by)} for by in (0.5, 60.0))
    lines = r"anybatch.Mean\(taken.sum\(\), number\)(.|\n)*TrainStep(.|\n)*Coupled"
    with pytest.warns(UserWarning, match=lines):
        trained(linear(), divided, first, steps=1, micro_batch_size=4)
    assert not check(linear(), divided, later).exact
    of_all = Coupled(lambda m, b: m(b["x"]), lambda m, out, b: divided(lambda _: out, b))
    for loss_fn in (lambda m, b: Mean((made := taken(m, b))[0].sum(), made[1]), of_all):
        assert_same(partial(_in_turn, loss_fn, (first, later), {}))
    assert_same(lambda size: _in_turn(divided, (first, later), {}, None))
