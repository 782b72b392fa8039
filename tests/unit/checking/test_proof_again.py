"""A split is proved again where a batch, the model or what the loss calls is not what it was.

How this could alarm without need: what changes makes no difference to the split, or changes in each step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch.checking import proof as proving

Batch = dict[str, Any]
factor = 0.0


def batch_of(**others: Any) -> Batch:
    torch.manual_seed(0)
    return {"x": torch.randn(12, 4), "y": torch.randint(3, (12,)), **others}


def mean(model: Any, batch: Batch) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def spread(out: torch.Tensor) -> torch.Tensor:
    return (out.std(0) - 1).square().sum()


def with_term(model: Any, batch: Batch, weight: Any) -> Any:
    out = model(batch["x"])
    return F.cross_entropy(out, batch["y"]) + weight * spread(out)


@dataclass
class Run:
    """A step, its two batches, and what happens between them."""

    loss_fn: Any
    batches: tuple[Any, Any] = field(default_factory=lambda: (batch_of(), batch_of()))
    between: Callable[[], Any] = lambda: None
    model: nn.Module = field(default_factory=lambda: nn.Linear(4, 3))
    options: dict[str, Any] = field(default_factory=dict)

    def steps(self) -> anybatch.TrainStep:
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        step = anybatch.TrainStep(self.model, self.loss_fn, optimizer, **{"micro_batch_size": 4, **self.options})
        step(self.batches[0])
        self.between()
        before = [one.detach().clone() for one in self.model.parameters()]
        try:
            step(self.batches[1])
        except anybatch.NotSplittable:
            assert all(map(torch.equal, before, self.model.parameters()))
            raise
        return step


def in_batch(first: Any, second: Any) -> Callable[[], Run]:
    def loss_fn(model: Any, batch: Batch) -> Any:
        return with_term(model, batch, float(batch["now"] not in ("warm-up", 0, False)))

    return lambda: Run(loss_fn, (batch_of(now=first), batch_of(now=second)))


def nested(settings: Any, read: Callable[[Any], float], write: Callable[[Any], Any]) -> Callable[[], Run]:
    def made() -> Run:
        own = settings()
        return Run(lambda model, batch: with_term(model, batch, read(own)), between=lambda: write(own))

    return made


class Trainer:
    def __init__(self) -> None:
        self.settings = {"weight": 0.0}

    def loss(self, model: Any, batch: Batch) -> Any:
        return with_term(model, batch, self.settings["weight"])


def trainer() -> Run:
    own = Trainer()
    return Run(own.loss, between=lambda: own.settings.update(weight=1.0))


def helper(model: Any, batch: Batch) -> Any:
    return with_term(model, batch, factor)


def set_factor(value: float) -> None:
    global factor
    factor = value


def helped(model: Any, batch: Batch) -> Any:
    return helper(model, batch)


def in_helper() -> Run:
    set_factor(0.0)
    return Run(helped, between=lambda: set_factor(1.0))


class Reads(nn.Module):
    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("weight", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out - (factor + self.weight) * out.mean(0)


def in_forward() -> Run:
    set_factor(0.0)
    return Run(mean, between=lambda: set_factor(1.0), model=Reads())


def in_buffer() -> Run:
    set_factor(0.0)
    model = Reads()
    return Run(mean, between=lambda: model.weight.fill_(1.0), model=model)


class Criterion(nn.Module):
    weight = 0.0

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y) + self.weight * spread(out)


def in_criterion() -> Run:
    criterion = Criterion()
    criterion.weight = 0.0
    return Run(
        lambda model, batch: criterion(model(batch["x"]), batch["y"]),
        between=lambda: setattr(criterion, "weight", 1.0),
    )


def hook() -> Run:
    model = nn.Linear(4, 3)
    return Run(mean, between=lambda: model.weight.register_hook(lambda g: g / g.norm()), model=model)


class Centred(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def swapped() -> Run:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    return Run(mean, between=lambda: model.__setitem__(1, Centred()), model=model)


def other_function() -> Run:
    used: dict[str, Any] = {"term": lambda out: 0.0}
    return Run(
        lambda model, batch: mean(model, batch) + used["term"](model(batch["x"])),
        between=lambda: used.update(term=spread),
    )


def encode() -> Run:
    phase = {"weight": 0.0}

    def encoded(model: Any, batch: Batch) -> Any:
        out = model(batch["x"])
        return out - phase["weight"] * out.mean(0), batch["y"]

    loss_fn = anybatch.Coupled(encoded, lambda model, outputs: F.cross_entropy(*outputs))
    return Run(loss_fn, between=lambda: phase.update(weight=1.0))


def ragged(collate: Any = None) -> Run:
    torch.manual_seed(0)
    even, uneven = ([torch.randn(size, 4) for size in sizes] for sizes in ([4] * 12, [1, 2, 5, 7] * 3))
    options = {} if collate is None else {"collate": collate}

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(torch.cat(batch["x"]) if collate is None else batch).square().mean()

    batches: Any = (even, uneven) if collate else ({"x": even, "y": torch.ones(12)}, {"x": uneven, "y": torch.ones(12)})
    return Run(loss_fn, batches, options=options)


def lengths_in_lists() -> Run:
    torch.manual_seed(0)
    x = torch.randn(12, 6, 4)

    def loss_fn(model: Any, batch: Batch) -> Any:
        return torch.cat([model(x[:size]) for x, size in zip(batch["x"], batch["size"], strict=True)]).square().mean()

    return Run(loss_fn, ({"x": x, "size": [6] * 12}, {"x": x, "size": [1, 2, 5, 6] * 3}))


BEGIN: dict[str, Callable[[], Run]] = {
    "a number in the batch": in_batch(0.0, 1.0), "a text in the batch": in_batch("warm-up", "main"),
    "a tensor in the batch": in_batch(torch.tensor(0), torch.tensor(1)),
    "a dict in a dict": nested(lambda: {"a": {"b": 0.0}}, lambda s: s["a"]["b"], lambda s: s["a"].update(b=1.0)),
    "a list": nested(lambda: [1.0, 0.0], lambda s: s[1], lambda s: s.__setitem__(1, 1.0)),
    "an attribute of a trainer": trainer, "a global of a helper": in_helper, "a global of the forward": in_forward,
    "a buffer": in_buffer, "a criterion": in_criterion, "a hook": hook, "a module": swapped,
    "a function": other_function, "encode": encode, "sizes of samples": ragged,
    "sizes of raw samples": lambda: ragged(torch.cat), "lengths in lists": lengths_in_lists,
}  # fmt: skip


@pytest.mark.parametrize("kind", BEGIN)
def test_what_couples_the_samples_from_the_second_batch_on_is_stopped_there(kind: str) -> None:
    with pytest.raises(anybatch.NotSplittable):
        BEGIN[kind]().steps()


def of_marks(name: str, read: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Batch], Any]:
    def loss_fn(model: Any, batch: Batch) -> Any:
        kept = read(batch[name]).double()
        losses = model(batch["x"])[:, 0].square().unsqueeze(1).expand_as(kept)
        return (losses * kept).sum() / kept.sum()

    return loss_fn


def of_pairs(model: Any, batch: Batch) -> Any:
    out = model(batch["x"])
    same = (batch["id"][:, None] == batch["id"]) & ~torch.eye(len(out), dtype=torch.bool)
    return F.cross_entropy(out, batch["y"]) + (torch.cdist(out, out)[same].mean() if same.any() else 0.0)


def marked(name: str, value: Any) -> tuple[Batch, Batch]:
    torch.manual_seed(1)
    first = batch_of(
        ids=torch.randint(4, 9, (12, 5)), done=torch.zeros(12, 5, dtype=torch.bool), y=torch.randint(3, (12,)),
        t=torch.rand(12, 1), label=torch.randint(2, (12, 1)), id=torch.arange(12),
    )  # fmt: skip
    leaf = first[name]
    chosen = torch.arange(12) % 5 < 2
    chosen = chosen if leaf.dim() == 1 else chosen[:, None] & (torch.arange(leaf.shape[1]) > leaf.shape[1] // 2 - 1)
    return first, {**first, name: torch.where(chosen, torch.full_like(leaf, value), leaf)}


MARKS: dict[str, tuple[Callable[[Any, Batch], Any], tuple[Batch, Batch]]] = {
    "a padding": (of_marks("ids", lambda ids: ids != 0), marked("ids", 0)),
    "an end": (of_marks("ids", lambda ids: (ids == 2).cumsum(1) == 0), marked("ids", 2)),
    "a flag": (of_marks("done", lambda done: done.cumsum(1) == 0), marked("done", True)),
    "a negative target": (of_marks("t", lambda t: t >= 0), marked("t", -1)),
    "a negative label": (of_marks("label", lambda label: label >= 0), marked("label", -1)),
    "two of one kind": (of_pairs, marked("id", 7)),
}


@pytest.mark.parametrize("kind", MARKS)
def test_what_the_first_batch_does_not_have_is_stopped_where_it_comes(kind: str) -> None:
    loss_fn, batches = MARKS[kind]
    with pytest.raises(anybatch.NotSplittable):
        Run(loss_fn, batches).steps()


def number_of_proofs(loss_fn: Any, batches: Any) -> int:
    model = nn.Linear(4, 3)
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=4)
    with mock.patch.object(proving, "prove", wraps=proving.prove) as proved:
        for batch in batches:
            step(batch)
    return proved.call_count


def test_what_makes_no_difference_passes_and_is_rarely_proved() -> None:
    def scaled(model: Any, batch: Batch) -> Any:
        return mean(model, batch) * batch["scale"]

    batches = [batch_of(scale=0.1 * i, id=torch.arange(12) % (i + 3)) for i in range(17)]
    assert number_of_proofs(scaled, batches) == 6  # the first, and the 1st, 2nd, 4th, 8th and 16th change


def test_a_term_that_no_sign_tells_is_stopped_in_the_end() -> None:
    def rare(model: Any, batch: Batch) -> Any:
        return with_term(model, batch, float(batch["x"].abs().max() > 50))

    torch.manual_seed(0)
    usual, other = batch_of(), batch_of()
    other["x"][0, 0] = 60.0
    with pytest.raises(anybatch.NotSplittable):
        number_of_proofs(rare, [usual] * 3 + [other] * 7)
    assert number_of_proofs(mean, [usual] * 3 + [other] * 14) == 2  # the first and the 8th after it


def test_a_proof_that_shows_nothing_tells_what_an_earlier_one_has_shown() -> None:
    fault = [1.0]
    model = nn.Linear(4, 3)
    step = anybatch.TrainStep(
        model,
        lambda model, batch: mean(model, batch) * fault[0],
        torch.optim.SGD(model.parameters(), lr=0.1),
        micro_batch_size=4,
    )
    outs = [step(batch_of()) for _ in range(8)]
    assert all(out.proof is not None and "before" not in str(out.proof) for out in outs)
    fault[0] = float("nan")
    proof = step(batch_of()).proof
    assert proof is not None
    assert proof.outcome == "undecided"
    assert "(seen last at update 8; before at update 0: 4 samples whole" in str(proof)
    assert str(proof) in str(step)
