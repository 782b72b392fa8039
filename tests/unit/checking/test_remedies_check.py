"""Each line that a check prints, done as it is written: afterwards the gradient is the whole batch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch import check
from anybatch.records.certificates import Certificate, Reason
from remedies import Register

Batch = dict[str, Any]
Loss = Callable[[Any, Any], Any]

REGISTER = Register()
follows = REGISTER.follows


def vectors(rows: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 5, generator=generator)
    return {"x": x, "y": torch.arange(rows) % 3, "t": torch.randn(rows, generator=generator)}


def linear(width: int = 3) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, width)


def cross_entropy(model: Any, batch: Batch) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def said(certificate: Certificate, *lines: str, notes: bool = False) -> Reason:
    """The only reason, or note, whose remedies have these lines in this order."""
    (reason,) = certificate.notes if notes else certificate.reasons
    assert len(reason.remedies) == len(lines), reason.remedies
    for remedy, line in zip(reason.remedies, lines, strict=True):
        assert line in remedy, reason.remedies
    return reason


WHOLE = "anybatch.TrainStep(model, loss_fn, optimizer)  # no micro_batch_size"
COUPLED = "anybatch.Coupled(encode, loss)"
CLIPPED = "anybatch.TrainStep(model, loss_fn, optimizer, clip_norm=1.0)"


def trained(model: Any, loss_fn: Loss, batch: Any, *, steps: int = 3, after: Any = None, **options: Any) -> list[Any]:
    """The weights and buffers after some steps."""
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), **options)
    for _ in range(steps):
        out = step(batch(step) if callable(batch) else batch)
        if after is not None:
            after(out)
    return [*model.state_dict().values()]


def assert_whole_is_plain(model: Any, loss_fn: Loss, batch: Any) -> None:
    """What ``WHOLE`` says: the step on the whole batch is the plain loop's."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = trained(model, loss_fn, batch, steps=1)
    model.load_state_dict(before)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.zero_grad()
    loss = loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(weights, [*model.state_dict().values()])


def assert_same(make: Callable[[int | None], list[Any]]) -> None:
    """The same in micro-batches as in one."""
    torch.testing.assert_close(make(4), make(None), rtol=1e-4, atol=1e-6)


@follows("evaluation mode")
def test_in_evaluation_mode_train_looks_at_the_rest() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).eval()
    said(check(model, cross_entropy, vectors()), "model.train()", notes=True)
    model.train()
    assert [reason.code for reason in check(model, cross_entropy, vectors()).reasons] == ["batch-norm"]


@follows("bound")
def test_of_a_bound_of_a_mean() -> None:
    def floor(model: Any, batch: Batch) -> Any:
        return model(batch["x"]).square().mean(0).clamp(min=1e-4).sum()

    said(check(linear(), floor, vectors()), ".clamp(min=bound).mean()", WHOLE, COUPLED, notes=True)
    assert_whole_is_plain(linear(), floor, vectors())

    def of_each(model: Any, batch: Batch) -> Any:
        return model(batch["x"]).square().clamp(min=1e-4).mean(0).sum()

    coupled = anybatch.Coupled(
        lambda m, b: m(b["x"]), lambda m, out: out.square().mean(0).clamp(min=0.5).sum()
    )  # which micro-batches do cross
    for exact in (check(linear(), of_each, vectors()), check(linear(), coupled, vectors())):
        assert exact.exact
        assert not exact.notes


@follows("not additive", "encode")
def test_of_what_does_not_add_up() -> None:
    batch = vectors()

    def contrastive(model: Any, batch: Batch) -> Any:
        out = model(batch["x"])
        return F.cross_entropy(out @ out.T, torch.arange(len(out)))

    before, apart_from = "batch = prepare(batch); step(batch)", '{"first": anybatch.Mean(items.sum(), len(items)), ...}'
    said(check(linear(), contrastive, batch), WHOLE, COUPLED, before, apart_from)
    assert_whole_is_plain(linear(), contrastive, batch)
    loss = anybatch.Coupled(lambda m, b: m(b["x"]), lambda m, out: F.cross_entropy(out @ out.T, torch.arange(len(out))))
    assert check(linear(), loss, batch).exact

    def two_means(model: Any, batch: Batch) -> Any:
        out = model(batch["x"])[:, 0].square()
        return out[batch["y"] == 0].mean() + out[batch["t"] > 0].mean()

    def apart(model: Any, batch: Batch) -> dict[str, anybatch.Mean]:
        out = model(batch["x"])[:, 0].square()
        first, second = out[batch["y"] == 0], out[batch["t"] > 0]
        return {"first": anybatch.Mean(first.sum(), len(first)), "second": anybatch.Mean(second.sum(), len(second))}

    said(check(linear(), two_means, vectors(31)), WHOLE, COUPLED, before, "Mean(items.sum(), len(items))")
    assert check(linear(), apart, vectors(31), count="forward").exact
    drifting = anybatch.Coupled(lambda m, b: m(b["x"]) - m(b["x"]).mean(0), lambda m, out: out.square().mean())
    said(check(linear(), drifting, batch), WHOLE)


@follows("fixed shape", "squeezed", "too few")
def test_of_parts_that_fail() -> None:
    def fixed(model: Any, batch: Batch) -> Any:
        return model(batch["x"]).view(12, -1).square().mean()

    said(check(linear(), fixed, vectors()), "x.view(x.size(0), -1)")
    assert check(linear(), lambda m, b: (lambda x: x.view(x.size(0), -1))(m(b["x"])).square().mean(), vectors()).exact

    def squeezed(model: Any, batch: Batch) -> Any:
        return torch.stack(list(model(batch["x"]).squeeze())).square().mean()

    batch = vectors(5)
    said(check(linear(1), squeezed, batch, micro_batch_size=2), "x.squeeze(-1)")
    assert check(linear(1), lambda m, b: m(b["x"]).squeeze(-1).square().mean(), batch, micro_batch_size=2).exact

    def hardest(model: Any, batch: Batch) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none").topk(6).values.mean()

    said(check(linear(), hardest, vectors()), WHOLE, COUPLED)
    assert_whole_is_plain(linear(), hardest, vectors())
    loss = anybatch.Coupled(
        lambda m, b: m(b["x"]), lambda m, out, b: F.cross_entropy(out, b["y"], reduction="none").topk(6).values.mean()
    )
    assert check(linear(), loss, vectors()).exact


@follows("size")
def test_of_a_size_that_parts_groups() -> None:
    def in_groups(model: Any, batch: Batch) -> Any:
        return (model(batch["x"]).view(-1, 4, 3) + batch["t"].view(-1, 4, 1)).std(1).mean()

    with pytest.raises(anybatch.NotSplittable, match="such as whole groups") as caught:
        anybatch.backward(linear(), in_groups, vectors(24), micro_batch_size=6)
    assert "micro_batch_size=8  # tried" in str(caught.value)
    proof = anybatch.backward(linear(), in_groups, vectors(24), micro_batch_size=8).proof
    assert proof is not None
    assert proof.exact


@follows("divided by itself")
def test_of_means_that_are_divided_by_themselves() -> None:
    batch, model = vectors(), nn.ModuleDict({"a": linear(), "b": linear()})

    def items(model: Any, batch: Batch) -> list[torch.Tensor]:
        return [
            F.cross_entropy(model["a"](batch["x"]), batch["y"], reduction="none"),
            model["b"](batch["x"]).abs().mean(1),
        ]

    def plain(model: Any, batch: Batch) -> Any:
        return sum(one.mean() / one.mean().detach() for one in items(model, batch))

    def each(model: Any, batch: Batch) -> Any:
        a, b = (anybatch.Mean(one.sum(), one.sum().detach()) for one in items(model, batch))
        return {"first": a, "second": b}

    said(check(model, plain, batch), 'return {"first": anybatch.Mean(items.sum(), items.sum().detach())', WHOLE)
    plain(model, batch).backward()
    expected = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    anybatch.backward(model, each, batch, micro_batch_size=5, count="forward")
    torch.testing.assert_close({name: one.grad for name, one in model.named_parameters()}, expected)


@follows("not per sample")
def test_of_a_leaf_that_belongs_to_all_samples() -> None:
    batch = {**vectors(), "between": torch.rand(12, 12)}
    loss_fn: Loss = lambda model, b: (model(b["x"]) @ b["between"]).square().mean()  # noqa: E731
    said(check(linear(12), loss_fn, batch), "broadcast=('between',)")
    assert check(linear(12), loss_fn, batch, broadcast=("between",)).exact


@follows("broadcasts")
def test_of_shapes_that_broadcast() -> None:
    said(check(linear(1), lambda m, b: (m(b["x"]) - b["t"]).square().mean(), vectors()), "prediction.squeeze(-1)")
    assert check(linear(1), lambda m, b: (m(b["x"]).squeeze(-1) - b["t"]).square().mean(), vectors()).exact
    assert check(linear(1), lambda m, b: (m(b["x"]) - b["t"].unsqueeze(-1)).square().mean(), vectors()).exact


@follows("several means")
def test_of_means_over_different_items() -> None:
    batch = {**vectors(), "is_a": torch.arange(12) < 3}
    model = nn.ModuleDict({"a": linear(), "b": linear()})

    def items(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return model["a"](batch["x"][batch["is_a"]]).square().mean(1), model["b"](batch["x"]).square().mean(1)

    def summed(model: Any, batch: Batch) -> Any:
        a, b = items(model, batch)
        return a.mean() + b.mean() if len(a) else b.mean()

    def apart(model: Any, batch: Batch) -> Batch:
        a, b = items(model, batch)
        return {"loss_1": a.mean(), "loss_2": b.mean()}

    def means(model: Any, batch: Batch) -> Batch:
        a, b = items(model, batch)
        return {"loss_1": anybatch.Mean(a.sum(), len(a)), "loss_2": anybatch.Mean(b.sum(), len(b))}

    reason = said(check(model, summed, batch), 'return {"loss_1": loss_1, "loss_2": loss_2}', 'count="forward"')
    count = eval(reason.remedy.partition("count=")[2], {"anybatch": anybatch})
    assert check(model, apart, batch, count=count).exact
    assert check(model, means, batch, count="forward").exact


def test_of_experts_that_each_take_the_mean_over_what_is_sent_to_them() -> None:
    torch.manual_seed(2)
    experts = nn.ModuleDict({"router": linear(), "experts": nn.ModuleList([nn.Linear(5, 1) for _ in range(3)])})

    def sent(model: Any, batch: Batch) -> list[torch.Tensor]:
        top = model["router"](batch["x"]).softmax(-1).max(-1)
        rows = [(top.indices == k).nonzero()[:, 0] for k in range(3)]
        return [(model["experts"][k](batch["x"][r])[:, 0] * top.values[r]).square() for k, r in enumerate(rows)]

    def summed(model: Any, batch: Batch) -> Any:
        return torch.stack([items.mean() for items in sent(model, batch) if len(items)]).sum()

    def means(model: Any, batch: Batch) -> dict[str, anybatch.Mean]:
        return {f"loss_{k}": anybatch.Mean(items.sum(), len(items)) for k, items in enumerate(sent(model, batch))}

    reason = check(experts, summed, vectors(18)).reasons[0]
    assert 'count="forward"' in reason.remedies[-1]
    assert check(experts, means, vectors(18), count="forward").exact


@follows("hook")
def test_of_a_hook_that_clips() -> None:
    model = linear()
    handle = model.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    said(check(model, cross_entropy, vectors()), CLIPPED)
    handle.remove()

    def clipped(size: int | None) -> list[Any]:
        return trained(linear(), cross_entropy, vectors(), clip_norm=1.0, micro_batch_size=size)

    assert check(model, cross_entropy, vectors()).exact
    assert_same(clipped)


@follows("optimizer hook")
def test_of_a_hook_that_runs_after_each_micro_batch() -> None:
    model = linear()
    handle: Any = model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    said(check(model, cross_entropy, vectors()), "handle.remove()")
    handle.remove()
    assert check(model, cross_entropy, vectors()).exact
    assert_same(lambda size: trained(linear(), cross_entropy, vectors(), micro_batch_size=size))


@follows("padding")
def test_of_padding_that_counts() -> None:
    samples = [{"x": torch.randn(n, 5), "y": torch.randint(0, 3, (n,))} for n in (2, 5, 3, 7, 4, 1)]

    def padded(label: int) -> Callable[[list[Batch]], Batch]:
        def collate(samples: list[Batch]) -> Batch:
            pad = nn.utils.rnn.pad_sequence
            y = pad([sample["y"] for sample in samples], batch_first=True, padding_value=label)
            return {"x": pad([sample["x"] for sample in samples], batch_first=True), "y": y}

        return collate

    def loss_fn(model: Any, batch: Batch) -> Any:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=-100)

    said(check(linear(), loss_fn, samples, collate=padded(0)), "ignore_index=-100)  # with labels padded with -100")
    assert check(linear(), loss_fn, samples, collate=padded(-100), count=anybatch.count_tokens("y")).exact


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient / gradient.norm()


@follows("backward")
def test_of_a_backward_that_is_not_linear() -> None:
    def loss_fn(model: Any, batch: Batch) -> Any:
        normalised: Any = Normalised
        return F.cross_entropy(normalised.apply(model(batch["x"])), batch["y"])

    said(check(linear(), loss_fn, vectors()), WHOLE, CLIPPED)
    assert_whole_is_plain(linear(), loss_fn, vectors())
    assert_same(lambda size: trained(linear(), cross_entropy, vectors(), clip_norm=1.0, micro_batch_size=size))


@follows("module", "time first")
def test_of_a_module_that_mixes_samples() -> None:
    def last(model: Any, batch: Batch) -> Any:
        return model(batch["x"])[0].square().mean()

    batch = {"x": torch.randn(12, 4, 5)}
    said(check(nn.LSTM(5, 3), last, batch), "LSTM(..., batch_first=True)", "layout={'x': 1}  # if", WHOLE)
    assert check(nn.LSTM(5, 3, batch_first=True), last, batch).exact
    assert check(nn.LSTM(5, 3), last, batch, layout={"x": 1}).exact
    assert_whole_is_plain(nn.LSTM(5, 3), last, batch)


@follows("unbatched")
@pytest.mark.parametrize("dim", [0, 1])
def test_of_samples_that_are_taken_for_the_steps_of_one_sequence(dim: int) -> None:
    def given(batch: Batch, model: Any, turned: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return model(turned(batch["x"]))[0]

    def bare(model: Any, batch: Batch) -> Any:
        return given(batch, model, lambda x: x).square().mean()

    def sequences(model: Any, batch: Batch) -> Any:
        return given(batch, model, lambda x: x.unsqueeze(dim)).squeeze(dim).square().mean()

    model = nn.GRU(5, 3, batch_first=bool(dim))
    said(check(model, bare, vectors()), f"x = x.unsqueeze({dim})  # before it", WHOLE)
    assert check(model, sequences, vectors()).exact


@follows("mixed before")
def test_of_samples_that_are_mixed_before_the_model() -> None:
    def prepare(batch: Batch) -> Batch:
        return {**batch, "x": (batch["x"] - batch["x"].mean(0)) / batch["x"].std(0)}

    said(
        check(linear(), lambda model, batch: cross_entropy(model, prepare(batch)), vectors()),
        WHOLE,
        "batch = prepare(batch); step(batch)",
    )
    assert check(linear(), cross_entropy, prepare(vectors())).exact


@follows("count", "unknown count")
def test_of_counts_that_are_found_or_not() -> None:
    weight = torch.tensor([1.0, 10.0, 0.2])
    segments = {"x": torch.randn(6, 5, 4), "y": torch.randint(0, 3, (6, 4))}
    segments["y"][torch.rand(6, 4) < torch.linspace(0, 0.8, 6)[:, None]] = 255
    boxes = [{"boxes": torch.rand(n, 4), "labels": torch.randint(0, 3, (n,))} for n in (2, 1, 5, 1, 3, 4)]

    def weighed(model: Any, batch: Batch) -> Any:
        logits = model(batch["x"].transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(logits, batch["y"], ignore_index=255, weight=weight.to(logits.dtype))

    def boxed(model: Any, batch: Batch) -> Any:
        number = [len(target["boxes"]) for target in batch["targets"]]
        labels = torch.cat([target["labels"] for target in batch["targets"]])
        return F.cross_entropy(model(batch["x"]).repeat_interleave(torch.tensor(number), 0), labels)

    cases: list[tuple[Loss, Batch]] = [(weighed, segments), (boxed, {"x": torch.randn(6, 5), "targets": boxes})]
    for loss_fn, batch in cases:
        reason = said(check(linear(), loss_fn, batch), "count=")
        count = eval(reason.remedy.removeprefix("count="), {"anybatch": anybatch, "torch": torch, "weight": weight})
        assert check(linear(), loss_fn, batch, count=count).exact

        def both(model: Any, batch: Batch, loss_fn: Loss = loss_fn) -> Batch:
            return {"one": loss_fn(model, batch), "two": 2 * loss_fn(model, batch)}

        line = check(linear(), both, batch).reasons[1].remedy
        count = eval(line.removeprefix("count="), {"anybatch": anybatch, "torch": torch, "weight": weight})
        assert check(linear(), both, batch, count=count).exact

    def chosen(model: Any, batch: Batch) -> Any:
        return model(batch["x"])[batch["x"][:, 0] > 0].square().mean()

    def as_mean(model: Any, batch: Batch) -> anybatch.Mean:
        items = model(batch["x"])[batch["x"][:, 0] > 0].square()
        return anybatch.Mean(items.sum(), items.numel())

    said(check(linear(), chosen, vectors()), "return anybatch.Mean(total, denominator)", "count=lambda batch: ...")
    assert check(linear(), as_mean, vectors()).exact
    assert check(linear(), chosen, vectors(), count=lambda batch: (batch["x"][:, 0] > 0).sum()).exact


@follows("sum", "count of a Mean")
def test_of_sums() -> None:
    def summed(model: Any, batch: Batch) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")

    said(check(linear(), summed, vectors()), "anybatch.Mean(loss, anybatch.count_samples(batch))", 'reduction="mean"')
    assert check(linear(), lambda m, b: anybatch.Mean(summed(m, b), anybatch.count_samples(b)), vectors()).exact
    assert check(linear(), lambda m, b: F.cross_entropy(m(b["x"]), b["y"], reduction="mean"), vectors()).exact
    wrong = check(linear(), lambda m, b: anybatch.Mean(summed(m, b), len(b["x"]) ** 2), vectors())
    said(wrong, "return anybatch.Mean(total, items)")
    assert check(linear(), lambda m, b: anybatch.Mean(summed(m, b), len(b["x"])), vectors()).exact


@follows("shared term")
def test_of_a_term_that_every_part_holds() -> None:
    def total(model: Any, batch: Batch) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")

    def penalty(model: Any) -> Any:
        return 0.1 * model.weight.square().sum()

    certificate = check(linear(), lambda m, b: total(m, b) + penalty(m), vectors())
    said(
        certificate,
        'return {"data": anybatch.Mean(total, items), "penalty": penalty}',
        "return total / items + penalty",
    )
    apart: Loss = lambda m, b: {"data": anybatch.Mean(total(m, b), len(b["x"])), "penalty": penalty(m)}  # noqa: E731
    assert check(linear(), apart, vectors(), count="forward").exact
    together: Loss = lambda m, b: total(m, b) / len(b["x"]) + penalty(m)  # noqa: E731
    assert check(linear(), together, vectors(), count=lambda batch: len(batch["x"])).exact


class Centre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centre: torch.Tensor
        self.register_buffer("centre", torch.zeros(3))

    def update(self, out: torch.Tensor) -> None:
        self.centre = self.centre.lerp(out.detach().mean(0), 0.1)

    def loss(self, out: torch.Tensor) -> torch.Tensor:
        return (out - self.centre).square().mean()

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        loss = self.loss(out)
        self.update(out)
        return loss


class Queue(Centre):
    """The keys of the last samples, which the next ones are compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: torch.Tensor
        self.pointer: torch.Tensor
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("queue", torch.randn(24, 3, generator=generator))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def update(self, out: torch.Tensor) -> None:
        at = int(self.pointer)
        self.queue[at : at + len(out)] = out.detach()
        self.pointer[0] = (at + len(out)) % len(self.queue)

    def loss(self, out: torch.Tensor) -> torch.Tensor:
        positive = out.square().sum(1, keepdim=True)
        logits = torch.cat([positive, out @ self.queue.clone().T], 1)
        return F.cross_entropy(logits, torch.zeros(len(out), dtype=torch.long))


@pytest.mark.parametrize(("kind", "name"), [(Centre, "centre"), (Queue, "queue")])
@follows("moving buffer")
def test_of_a_buffer_that_the_loss_moves(kind: type[Centre], name: str) -> None:
    criterion = kind()
    moved: Loss = lambda model, batch: criterion(model(batch["x"]))  # noqa: E731
    reason = said(check(linear(), moved, vectors()), f'return loss, {{"{name}": values}}', WHOLE)
    assert f'criterion.update(out.metrics["{name}"])  # once' in reason.remedy

    def made(size: int | None) -> list[Any]:
        criterion = kind()

        def loss_fn(model: Any, batch: Batch) -> Any:
            out = model(batch["x"])
            return criterion.loss(out), {name: out}

        def after(out: Any) -> None:
            criterion.update(out.metrics[name])

        return [*trained(linear(), loss_fn, vectors(), after=after, micro_batch_size=size), *criterion.buffers()]

    assert_same(made)
    whole = trained(linear(), moved, vectors())
    torch.testing.assert_close(made(4)[:2], whole, rtol=1e-4, atol=1e-6)  # as the loss that moved it did


@follows("weight")
def test_of_weights_that_the_forward_moves() -> None:
    class Averaged(nn.Module):
        def __init__(self, moves: bool) -> None:
            super().__init__()
            self.head, self.moves = linear(), moves
            self.average = nn.Parameter(torch.zeros(3, 5), requires_grad=False)

        def update_average(self) -> None:
            with torch.no_grad():
                self.average.lerp_(self.head.weight, 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.moves:
                self.update_average()
            result: torch.Tensor = self.head(x) - F.linear(x, self.average)
            return result

    said(check(Averaged(moves=True), cross_entropy, vectors()), "step(batch)\n    model.update_average()", WHOLE)

    def made(size: int | None) -> list[Any]:
        model = Averaged(moves=False)
        return trained(
            model, cross_entropy, vectors(), after=lambda _: model.update_average(), micro_batch_size=size
        )  # fmt: skip

    assert check(Averaged(moves=False), cross_entropy, vectors()).exact
    assert_same(made)


@follows("BatchNorm")
def test_of_batch_norm() -> None:
    def model() -> nn.Module:
        return nn.Sequential(linear(4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    said(check(model(), cross_entropy, vectors()), WHOLE, 'batch_norm="frozen"', 'batch_norm="ghost"')
    assert_whole_is_plain(model(), cross_entropy, vectors())
    assert check(model(), cross_entropy, vectors(), batch_norm="frozen").exact
    trained(model(), cross_entropy, vectors(), micro_batch_size=4, batch_norm="ghost")


@follows("even batch")
def test_of_a_batch_whose_samples_weigh_the_same() -> None:
    batch = {"x": torch.randn(6, 4, 5), "y": torch.randint(0, 3, (6, 4))}
    loss_fn: Loss = lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["y"].flatten())  # noqa: E731
    said(check(linear(), loss_fn, batch), 'count=anybatch.count_tokens("y")', notes=True)
    batch["y"][0, :3] = -100
    assert check(linear(), loss_fn, batch, count=anybatch.count_tokens("y")).exact


@follows("rows")
def test_of_a_loss_in_blocks_that_sees_its_own_rows_only() -> None:
    def encode(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch["x"]), model(batch["x"]).tanh()

    def one_way(model: Any, out: Any, rows: Any) -> torch.Tensor:
        a, b = out
        labels = torch.arange(len(a))[rows]
        return F.cross_entropy(a[rows] @ b.T, labels) + F.cross_entropy(
            (a[rows] @ b.T).T[rows], torch.arange(len(labels))
        )

    def both_ways(model: Any, out: Any, rows: Any) -> torch.Tensor:
        a, b = out
        labels = torch.arange(len(a))[rows]
        return F.cross_entropy(a[rows] @ b.T, labels) + F.cross_entropy(b[rows] @ a.T, labels)

    wrong = check(linear(), anybatch.Coupled(encode, one_way, row_block=4), vectors())
    said(wrong, "anybatch.Coupled(encode, loss)  # without row_block", "F.cross_entropy(b[rows] @ a.T, labels)")
    assert check(linear(), anybatch.Coupled(encode, both_ways, row_block=4), vectors()).exact
    whole: Loss = lambda model, out: both_ways(model, out, slice(None))  # noqa: E731
    assert check(linear(), anybatch.Coupled(encode, whole), vectors()).exact


@follows("rounding")
def test_of_a_model_that_lets_rounding_grow() -> None:
    def sharp(model: Any, batch: Batch) -> Any:
        if batch["x"].dtype is not torch.float32:
            raise TypeError("the kernel takes float32")
        return F.cross_entropy((3e5 * model(batch["x"])).sin(), batch["y"])

    torch.manual_seed(0)
    batch = {"x": torch.randn(32, 512), "y": torch.arange(32) % 3}
    said(check(nn.Linear(512, 3), sharp, batch, micro_batch_size=1), WHOLE)
    assert_whole_is_plain(nn.Linear(512, 3), sharp, batch)
