"""What may be split is let through, whatever it is written with: a false alarm is as bad as a missed fault.

What would be wrong in silence: a proof that is not made where it should be; one that leaves something behind, so that
the run is another than without it.
"""

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_sequence, pad_sequence

import anybatch

ROWS = 11


class Case(NamedTuple):
    """A step that may be split, and how it is known: by a comparison of its own, or by a certificate."""

    model: nn.Module
    loss_fn: Any
    batch: Any
    options: Mapping[str, Any] = {}
    by: str = "comparison"


def net(inputs: int = 6, outputs: int = 3, *middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.GELU(), *middle, nn.Linear(16, outputs))


def rows(classes: int = 3) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, 6), "y": torch.randint(classes, (ROWS,))}


def mean(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def plain() -> Case:
    return Case(net(), mean, rows())


def text() -> dict[str, torch.Tensor]:
    labels = torch.randint(7, (ROWS, 12))
    for row in range(ROWS):
        labels[row, 2 + row :] = -100
    return {"ids": torch.randint(20, (ROWS, 12)), "labels": labels, "topic": torch.randint(3, (ROWS,))}


class Tagger(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.topic = nn.Linear(8, 7), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.embedding(ids))  # type: ignore[no-any-return]


def token_mean(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model.head(model(batch["ids"])).flatten(0, 1), batch["labels"].flatten())


def both(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    states = model(batch["ids"])
    tokens = F.cross_entropy(model.head(states).flatten(0, 1), batch["labels"].flatten())
    return {"tokens": tokens, "topic": F.cross_entropy(model.topic(states.mean(1)), batch["topic"])}


def tokens(**options: Any) -> Case:
    return Case(Tagger(**options), token_mean, text(), {"count": anybatch.count_tokens("labels")})


def yielded() -> Case:
    def loss_fn(model: Any, batch: Any) -> Iterator[Any]:
        yield "tokens", token_mean(model, batch)
        yield "topic", F.cross_entropy(model.topic(model(batch["ids"]).mean(1)), batch["topic"])

    return Case(Tagger(), loss_fn, text(), {"count": {"tokens": COUNT, "topic": anybatch.count_samples}})


COUNT = anybatch.count_tokens("labels")


def mean_over_positive(model: Any, batch: Any) -> anybatch.Mean:
    losses, taken = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none"), batch["y"] > 0
    return anybatch.Mean((losses * taken).sum(), taken.sum())


def two_means(model: Any, batch: Any) -> dict[str, anybatch.Mean]:
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return {
        str(label): anybatch.Mean((losses * (batch["y"] == label)).sum(), (batch["y"] == label).sum())
        for label in range(3)
    }


def dropout() -> Case:
    return Case(net(6, 3, nn.Dropout(0.5)), mean, rows())


def functional_dropout() -> Case:
    return Case(net(), lambda m, b: F.cross_entropy(F.dropout(m(b["x"]), 0.4), b["y"]), rows())


def noise() -> Case:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        time = torch.rand(len(batch["x"]), 1)
        noise = torch.randn_like(batch["x"])
        return (model(batch["x"] * time + noise * (1 - time)) - noise).square().mean()  # type: ignore[no-any-return]

    return Case(net(6, 6), loss_fn, rows())


def own_generator() -> Case:
    generator = torch.Generator().manual_seed(3)

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return mean(model, {**batch, "x": batch["x"] + torch.randn(batch["x"].shape, generator=generator)})

    return Case(net(), loss_fn, rows())


def autocast(dtype: torch.dtype) -> Case:
    return Case(net(), mean, rows(), {"autocast": dtype})


def bfloat16() -> Case:
    batch = rows()
    return Case(net().bfloat16(), mean, {**batch, "x": batch["x"].bfloat16()})


def compiled(backend: str) -> Case:
    torch.compiler.reset()
    return Case(torch.compile(net(), backend=backend), mean, rows())  # type: ignore[arg-type]


def lora() -> Case:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down, self.up = nn.Linear(6, 3), nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)
            self.base.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(F.dropout(x, 0.1, self.training)))  # type: ignore[no-any-return]

    return Case(Adapted(), mean, rows())


def detection() -> Case:
    samples = [{"image": torch.randn(3, 4, 4 + i % 3), "boxes": torch.randn(1 + i % 4, 3)} for i in range(ROWS)]

    def loss_fn(model: Any, batch: Any) -> anybatch.Mean:
        found = [model(one["image"].mean((1, 2))) - one["boxes"] for one in batch]
        return anybatch.Mean(torch.cat(found).square().sum(), sum(len(one) for one in found))

    return Case(net(3), loss_fn, samples, {"collate": list})


def images_in_lists() -> Case:
    batch = {"images": [torch.randn(3, 4, 4 + i % 3) for i in range(ROWS)], "y": torch.randint(3, (ROWS,))}

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(torch.stack([model(one.mean((1, 2))) for one in batch["images"]]), batch["y"])

    return Case(net(3), loss_fn, batch)


def preferences() -> Case:
    model, reference = net(), net()

    def loss_fn(model: Any, batch: Any) -> Any:
        with torch.no_grad():
            base = reference(batch["chosen"]).sum(1) - reference(batch["rejected"]).sum(1)
        margin = model(batch["chosen"]).sum(1) - model(batch["rejected"]).sum(1) - base
        return -F.logsigmoid(margin).mean(), {"margin": margin.detach()}

    return Case(model, loss_fn, {"chosen": torch.randn(ROWS, 6), "rejected": torch.randn(ROWS, 6)})


def ctc() -> Case:
    batch = {
        "x": torch.randn(ROWS, 20, 6), "y": torch.randint(1, 5, (ROWS, 6)),
        "in": torch.randint(15, 21, (ROWS,)), "out": torch.randint(1, 7, (ROWS,)),
    }  # fmt: skip

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        scores = model(batch["x"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, batch["y"], batch["in"], batch["out"], reduction="none").mean()

    return Case(net(6, 5), loss_fn, batch)


def physics() -> Case:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        x = batch["x"].detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return (bend + model(x)).square().mean()  # type: ignore[no-any-return]

    return Case(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)), loss_fn, rows())


def critic() -> Case:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        mixed = (batch["real"] + torch.rand(len(batch["real"]), 1) * (batch["fake"] - batch["real"])).requires_grad_()
        (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return model(batch["fake"]).mean() - model(batch["real"]).mean() + 10 * penalty  # type: ignore[no-any-return]

    return Case(net(6, 1), loss_fn, {"real": torch.randn(ROWS, 6), "fake": torch.randn(ROWS, 6)})


def learned_to_learn() -> Case:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        parameters = dict(model.named_parameters())

        def task(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            def inner(weights: Any) -> torch.Tensor:
                out = torch.func.functional_call(model, weights, (x[:3],))
                return F.mse_loss(out, y[:3])

            slopes = torch.func.grad(inner)(parameters)
            moved = {name: weight - 0.1 * slopes[name] for name, weight in parameters.items()}
            return F.mse_loss(torch.func.functional_call(model, moved, (x[3:],)), y[3:])

        return torch.func.vmap(task)(batch["x"], batch["y"]).mean()

    return Case(net(2, 1), loss_fn, {"x": torch.randn(ROWS, 6, 2), "y": torch.randn(ROWS, 6, 1)})


def coupled() -> Case:
    def encode(model: Any, batch: Any) -> Any:
        return F.normalize(model(batch["a"]), dim=1), F.normalize(model(batch["b"]), dim=1)

    def loss(model: Any, outputs: Any) -> torch.Tensor:
        return F.cross_entropy(outputs[0] @ outputs[1].T / 0.1, torch.arange(len(outputs[0])))

    batch = {"a": torch.randn(ROWS, 6), "b": torch.randn(ROWS, 6)}
    return Case(net(6, 8, nn.Dropout(0.1)), anybatch.Coupled(encode, loss), batch)


def over_time() -> Case:
    model = nn.ModuleDict({"rnn": nn.GRU(4, 8, batch_first=True), "head": nn.Linear(8, 3)})

    def chunk_loss(model: Any, chunk: Any, state: Any) -> Any:
        out, state = model["rnn"](chunk["x"], state)
        return F.cross_entropy(model["head"](out).flatten(0, 1), chunk["y"].flatten()), state

    loss_fn = anybatch.OverTime(chunk_loss, lambda model, batch: torch.zeros(1, len(batch["x"]), 8), chunk=5)
    return Case(model, loss_fn, {"x": torch.randn(ROWS, 20, 4), "y": torch.randint(3, (ROWS, 20))})


def sparse() -> Case:
    model = nn.ModuleDict({"table": nn.Embedding(50, 8, sparse=True), "head": nn.Linear(8, 3)})

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model["head"](model["table"](batch["ids"]).mean(1)), batch["y"])

    return Case(model, loss_fn, {"ids": torch.randint(50, (ROWS, 5)), "y": torch.randint(3, (ROWS,))})


def spectral() -> Case:
    return Case(
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 16)), nn.ReLU(), nn.Linear(16, 3)), mean, rows()
    )


def batch_norm(policy: str) -> Case:
    batch = {"x": torch.randn(12, 6), "y": torch.randint(3, (12,))}
    options: dict[str, Any] = {"batch_norm": policy, "micro_batch_size": 4}
    return Case(net(6, 3, nn.BatchNorm1d(16)), mean, batch, options)


def window() -> Case:
    loader = [{"x": torch.randn(n, 6), "y": torch.randint(3, (n,))} for n in (6, 4, 1)]
    return Case(net(), mean, next(iter(anybatch.windows(loader, batches=3))))


def packed_by_cost() -> Case:
    samples = [{"ids": torch.randint(20, (n,)), "y": torch.randint(3, (1,))} for n in range(2, 2 + ROWS)]

    def collate(chosen: Any) -> Any:
        ids = pad_sequence([one["ids"] for one in chosen], batch_first=True, padding_value=-1)
        return {"ids": ids, "y": torch.cat([one["y"] for one in chosen])}

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        mask = (batch["ids"] >= 0)[..., None]
        states = (model["table"](batch["ids"].clamp(min=0)) * mask).sum(1) / mask.sum(1)
        return F.cross_entropy(model["head"](states), batch["y"])

    model = nn.ModuleDict({"table": nn.Embedding(20, 8), "head": nn.Linear(8, 3)})
    options = {"collate": collate, "cost": lambda one: len(one["ids"]), "micro_batch_size": 30}
    return Case(model, loss_fn, samples, options)


def noisy_collate() -> Case:
    def collate(chosen: Any) -> Any:
        return torch.stack(chosen) + torch.randn(len(chosen), 6)

    return Case(net(), lambda m, b: m(b).square().mean(), list(torch.randn(ROWS, 6)), {"collate": collate})


def packed_sequences() -> Case:
    batch = {
        "x": pack_sequence([torch.randn(n, 4) for n in range(ROWS + 2, 2, -1)]), "y": torch.randint(3, (ROWS,))
    }  # fmt: skip
    model = nn.ModuleDict({"rnn": nn.LSTM(4, 8), "head": nn.Linear(8, 3)})
    return Case(model, lambda m, b: F.cross_entropy(m["head"](m["rnn"](b["x"])[1][0][-1]), b["y"]), batch)


def nested() -> Case:
    x = torch.nested.nested_tensor([torch.randn(n, 6) for n in range(2, 2 + ROWS)], layout=torch.jagged)

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(torch.stack([one.mean(0) for one in batch["x"].unbind()])), batch["y"])

    return Case(net(), loss_fn, {"x": x, "y": torch.randint(3, (ROWS,))})


def complex_numbers() -> Case:
    model = nn.Linear(6, 3, dtype=torch.complex64)
    return Case(model, lambda m, b: m(b).abs().square().mean(), torch.randn(ROWS, 6, dtype=torch.complex64))


def time_first_made_right() -> Case:
    model = nn.ModuleDict({"rnn": nn.LSTM(6, 8), "head": nn.Linear(8, 3)})

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model["head"](model["rnn"](batch["x"].transpose(0, 1))[0][-1]), batch["y"])

    return Case(model, loss_fn, {"x": torch.randn(ROWS, 5, 6), "y": torch.randint(3, (ROWS,))})


def images() -> Case:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(8, 3))  # fmt: skip
    return Case(model, mean, {"x": torch.randn(ROWS, 3, 8, 8), "y": torch.randint(3, (ROWS,))})


def penalty() -> Case:
    return Case(net(), lambda m, b: mean(m, b) + 0.01 * sum(p.square().sum() for p in m.parameters()), rows())


def double() -> Case:
    batch = rows()
    return Case(net().double(), mean, {**batch, "x": batch["x"].double()})


def class_weights_with_their_count() -> Case:
    weight = torch.tensor([1.0, 2.0, 6.0])
    count = {"count": lambda batch: weight[batch["y"]].sum(dtype=torch.float64)}
    return Case(net(), lambda m, b: F.cross_entropy(m(b["x"]), b["y"], weight=weight), rows(), count)


def pairs() -> Case:
    """Rows that belong together stand together, and micro-batches have an even number of them."""

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        z = model(batch["x"])
        return (z[0::2] - z[1::2]).square().mean()  # type: ignore[no-any-return]

    return Case(net(), loss_fn, {"x": torch.randn(12, 6), "y": torch.randint(3, (12,))}, {"micro_batch_size": 4})


def one_size_only() -> Case:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return model(batch["x"].view(4, 6)).square().mean()  # type: ignore[no-any-return]

    return Case(net(), loss_fn, {"x": torch.randn(12, 6)}, {"micro_batch_size": 4}, "")


def one_sample_at_a_time() -> Case:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        (image,) = batch
        return model(image.flatten()[:6]).square().mean()  # type: ignore[no-any-return]

    samples = [torch.randn(3, 4 + i) for i in range(ROWS)]
    return Case(net(), loss_fn, samples, {"collate": list, "micro_batch_size": 1}, "")


def numbers_of_numpy() -> Case:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        noise = torch.tensor(np.random.randn(len(batch["x"]), 6), dtype=torch.float32)
        return mean(model, {**batch, "x": batch["x"] + noise * random.random()})

    return Case(net(), loss_fn, rows(), by="")


def writes_its_batch() -> Case:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        batch["x"].mul_(2)
        return mean(model, batch)

    return Case(net(), loss_fn, rows())


def counts_for_itself() -> Case:
    calls: list[int] = []

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        calls.append(len(batch["x"]))
        return mean(model, batch)

    return Case(net(), loss_fn, rows())


def linear_hook() -> Case:
    model = net()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 0.5 * gradient)
    return Case(model, mean, rows())


def cut() -> Case:
    model = nn.ModuleDict({"trunk": nn.Linear(6, 8), "a": nn.Linear(8, 3), "b": nn.Linear(8, 3)})

    def loss_fn(model: Any, batch: Any) -> Iterator[Any]:
        with anybatch.cut(model["trunk"](batch["x"])) as features:
            for name in "ab":
                yield name, F.cross_entropy(model[name](features), batch["y"])

    return Case(model, loss_fn, rows())


CASES: dict[str, Callable[[], Case]] = {
    "mean": plain, "tokens": tokens, "attention dropout": lambda: tokens(dropout=0.1),
    "mapping": lambda: Case(Tagger(), both, text(), {"count": {"tokens": COUNT, "topic": anybatch.count_samples}}),
    "yielded": yielded, "Mean": lambda: Case(net(), mean_over_positive, rows()),
    "counts of the forward": lambda: Case(net(), two_means, rows(), {"count": "forward"}), "dropout": dropout,
    "dropout per sample": lambda: Case(net(6, 3, nn.Dropout(0.5)), mean, rows(), {"dropout": "per-sample"}),
    "functional dropout": functional_dropout, "noise": noise, "generator of one's own": own_generator,
    "autocast bf16": lambda: autocast(torch.bfloat16), "autocast fp16": lambda: autocast(torch.float16),
    "bf16": bfloat16, "compiled": lambda: compiled("eager"), "compiled by aot": lambda: compiled("aot_eager"),
    "LoRA": lora, "detection": detection, "images in lists": images_in_lists, "DPO": preferences, "CTC": ctc,
    "PINN": physics, "WGAN-GP": critic, "MAML": learned_to_learn, "Coupled": coupled, "OverTime": over_time,
    "sparse": sparse, "spectral norm": spectral, "ghost": lambda: batch_norm("ghost"),
    "frozen": lambda: batch_norm("frozen"), "window": window, "packed by cost": packed_by_cost,
    "noisy collate": noisy_collate, "packed sequences": packed_sequences, "nested": nested,
    "complex": complex_numbers, "time first, made right": time_first_made_right, "images": images,
    "penalty": penalty, "double": double, "class weights": class_weights_with_their_count, "pairs": pairs,
    "one size only": one_size_only, "one sample at a time": one_sample_at_a_time, "numpy": numbers_of_numpy,
    "writes its batch": writes_its_batch, "counts for itself": counts_for_itself, "linear hook": linear_hook,
    "cut": cut,
}  # fmt: skip


def made(name: str) -> Case:
    """A case that nothing has run yet, the same each time."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    return CASES[name]()


def stepped(case: Case, **options: Any) -> tuple[anybatch.TrainStep, Any, list[Any]]:
    """A step, and what it leaves: weights, buffers, and where the generators stand."""
    sparse = any(getattr(module, "sparse", False) for module in case.model.modules())
    optimizer: Any = torch.optim.SGD if sparse else torch.optim.AdamW
    optimizer = optimizer([p for p in case.model.parameters() if p.requires_grad], lr=0.01)
    step = anybatch.TrainStep(case.model, case.loss_fn, optimizer, **{**options, **case.options})
    out = step(case.batch)
    left = [value.clone() for value in case.model.state_dict().values()]
    return step, out, [*left, torch.get_rng_state(), random.random(), np.random.rand()]


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("name", CASES)
def test_it_is_let_through_and_nothing_is_left_of_it(name: str, size: int) -> None:
    case = made(name)
    step, out, values = stepped(case, micro_batch_size=size)
    assert out.micro_batches > 1
    assert out.proof is not None
    assert out.proof.by == case.by, str(out.proof)
    assert out.proof.exact or not case.by
    assert str(out.proof) in repr(step)
    assert step(case.batch).proof is out.proof
    _, plain, expected = stepped(made(name), micro_batch_size=size, verify="off")
    assert plain.proof is None
    assert out.loss == plain.loss
    for one, another in zip(values, expected, strict=True):
        assert torch.equal(one, another) if isinstance(one, torch.Tensor) else one == another


def test_what_is_logged_is_seen_where_no_log_is_configured() -> None:
    """Python prints a warning of a logger without handlers to stderr; a NullHandler would swallow it."""
    assert not logging.getLogger("anybatch").handlers


def test_what_could_not_be_compared_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def with_penalty(model: Any, batch: Any) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)  # which a run without one can't take
        penalty: torch.Tensor = gradient.square().sum(1).mean()
        return penalty + mean(model, batch)

    model, batch = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    smallest = anybatch.plan(model, with_penalty, batch, optimizer, memory="1GiB").smallest_bytes
    step = anybatch.TrainStep(model, with_penalty, optimizer, memory=smallest)
    outs = [step(batch), step(batch)]
    assert [out.micro_batches for out in outs] == [len(batch["x"])] * 2
    assert outs[0].proof is not None
    assert outs[0].proof.outcome == "undecided"
    said = [one.getMessage() for one in caplog.records if "not proved" in one.getMessage()]
    assert len(said) == 1, said
    assert "a micro-batch has one sample" in said[0]
    assert "anybatch.check" in said[0]


def test_an_error_of_the_loss_comes_without_a_word_on_the_proof(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 3))

    def misspelt(model: Any, batch: Any) -> torch.Tensor:
        return mean(model, {**batch, "y": batch["label"]})

    with pytest.raises(KeyError, match="label"):
        anybatch.backward(model, misspelt, rows(), micro_batch_size=4)
    assert not caplog.records


def test_what_a_proof_turns_off_drops_again_afterwards() -> None:
    """Also in a model that holds so much that not all of it is put back by looking at what has changed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = [[[row] for row in range(9000)] for _ in range(3)]
            self.rnn = nn.LSTM(4, 4, num_layers=2, dropout=0.2, batch_first=True)
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
            self.drop = nn.Dropout(0.4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.rnn(x)[0]
            out: torch.Tensor = self.drop(self.attention(x, x, x, need_weights=False)[0]).mean((1, 2))
            return out

    torch.manual_seed(0)
    model = Net()
    proof = anybatch.backward(model, lambda m, x: m(x).square().mean(), torch.randn(12, 3, 4), micro_batch_size=5).proof
    assert proof is not None
    assert proof.exact
    assert (model.rnn.dropout, model.attention.dropout, model.drop.training) == (0.2, 0.3, True)
