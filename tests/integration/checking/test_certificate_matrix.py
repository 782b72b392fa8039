"""A check answers for every batch and every loss that ``backward`` takes, and the answer is what happens."""

import dataclasses
import inspect
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import anybatch
from anybatch import Coupled, Mean, backward, check
from anybatch.testing import assert_exact

ROWS = 9
Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Table:
    x: torch.Tensor
    y: torch.Tensor


class Graphs:
    """What nobody can look into: the nodes of several graphs one after the other, and which graph each is of."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.nodes = torch.cat([sample["x"].expand(sample["n"], -1) for sample in samples])
        self.of = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([s["n"] for s in samples]))
        self.y = torch.stack([sample["y"] for sample in samples])


def features() -> torch.Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(0)).double()


def labels() -> torch.Tensor:
    return torch.tensor([0, 1, 2, 0, -100, 1, 1, -100, 2])


def sequences() -> list[torch.Tensor]:
    return [row.repeat(n, 1) for row, n in zip(features(), (3, 1, 4, 1, 5, 2, 2, 3, 1), strict=True)]


def samples() -> list[dict[str, Any]]:
    return [{"x": x, "y": y, "n": n % 3 + 1} for n, (x, y) in enumerate(zip(features(), labels(), strict=True))]


def stacked(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": torch.stack([s["x"] for s in samples]), "y": torch.stack([s["y"] for s in samples])}


def flat(samples: list[dict[str, Any]]) -> dict[str, Any]:
    graphs = Graphs(samples)
    return {"nodes": graphs.nodes, "of": graphs.of, "y": graphs.y}


def pooled(nodes: torch.Tensor, of: torch.Tensor, rows: int) -> torch.Tensor:
    sums = torch.zeros(rows, 5, dtype=nodes.dtype).index_add(0, of, nodes)
    return sums / torch.bincount(of, minlength=rows)[:, None]


Read = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
Kind = tuple[Callable[[], Any], Read, dict[str, Any]]
IN_A_MAPPING: Read = lambda batch: (batch["x"], batch["y"])  # noqa: E731
KINDS: dict[str, Kind] = {
    "a dict": (lambda: {"x": features(), "y": labels()}, IN_A_MAPPING, {}),
    "a tuple": (lambda: (features(), labels()), lambda batch: batch, {}),
    "a named tuple": (lambda: Pair(features(), labels()), lambda batch: batch, {}),
    "a dataclass": (lambda: Table(features(), labels()), lambda batch: (batch.x, batch.y), {}),
    "an encoding": (lambda: UserDict({"x": features(), "y": labels()}), IN_A_MAPPING, {}),
    "nested": (
        lambda: {"in": {"x": (features(),)}, "y": [labels()]},
        lambda batch: (batch["in"]["x"][0], batch["y"][0]),
        {},
    ),
    "with texts": (lambda: {"x": features(), "y": labels(), "text": list("abcdefghi"), "k": 3}, IN_A_MAPPING, {}),
    "arrays": (
        lambda: {"x": features().numpy(), "y": labels().numpy()},
        lambda batch: (torch.from_numpy(np.asarray(batch["x"])).double(), torch.from_numpy(batch["y"])),
        {},
    ),
    "broadcast": (
        lambda: {"x": features(), "y": labels(), "scale": torch.ones(5).double()},
        lambda batch: (batch["x"] * batch["scale"], batch["y"]),
        {"broadcast": ("scale",)},
    ),
    "sparse rows": (
        lambda: {"x": features().to_sparse(), "y": labels()},
        lambda batch: (batch["x"].to_dense(), batch["y"]),
        {},
    ),
    "jagged rows": (
        lambda: {"x": torch.nested.nested_tensor(sequences(), layout=torch.jagged), "y": labels()},
        lambda batch: (torch.stack([row.mean(0) for row in batch["x"].unbind()]), batch["y"]),
        {},
    ),
    "packed": (
        lambda: {"x": pack_sequence(sequences(), enforce_sorted=False), "y": labels()},
        lambda batch: (pad_packed_sequence(batch["x"], batch_first=True)[0][:, 0], batch["y"]),
        {},
    ),
    "lists of mappings": (
        lambda: {"x": features(), "targets": [{"labels": label[None]} for label in labels()]},
        lambda batch: (batch["x"], torch.cat([target["labels"] for target in batch["targets"]])),
        {},
    ),
    "raw samples": (samples, IN_A_MAPPING, {"collate": stacked}),
    "raw samples by cost": (samples, IN_A_MAPPING, {"collate": stacked, "cost": lambda sample: float(sample["n"])}),
    "raw samples, rows of several": (
        samples,
        lambda batch: (pooled(batch["nodes"], batch["of"], len(batch["y"])), batch["y"]),
        {"collate": flat},
    ),
    "raw samples, an object": (
        samples,
        lambda batch: (pooled(batch.nodes, batch.of, len(batch.y)), batch.y),
        {"collate": Graphs},
    ),
}


def total(model: Any, read: Any) -> torch.Tensor:
    x, y = read
    return F.cross_entropy(model(x), y.clamp_min(0), reduction="sum")


def valid(model: Any, read: Any) -> torch.Tensor:
    return F.cross_entropy(model(read[0]), read[1])


def contrast(model: Any, outputs: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def yielded(model: Any, read: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield "first", total(model, read) / len(read[1])
    yield "second", model(read[0]).square().mean()


def experts(model: Any, read: Any) -> Any:
    kept = read[1] > 0
    rest = model(read[0]).square().mean()
    return rest + model.bias.sum() * model(read[0][kept]).square().mean() if kept.any() else rest


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "a mean": lambda model, read: total(model, read) / len(read[1]),
    "a sum": total,
    "over labels": valid,
    "a Mean": lambda model, read: Mean(valid(model, read) * (read[1] >= 0).sum(), (read[1] >= 0).sum()),
    "a mapping": lambda model, read: {"a": valid(model, read), "b": model(read[0]).square().mean()},
    "yielded": yielded,
    "with metrics": lambda model, read: (total(model, read) / len(read[1]), {"outputs": model(read[0])}),
    "contrastive": lambda model, read: contrast(model, model(read[0])),
    "means of some": experts,
    "with a penalty": lambda model, read: total(model, read) / len(read[1]) + model.weight.square().sum(),
}


def gradient(loss_fn: Any, batch: Any, size: int | None, **options: Any) -> torch.Tensor | None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    try:
        backward(model, loss_fn, batch, micro_batch_size=size, verify="off", **options)
    except anybatch.AnyBatchError:
        return None
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_answer_is_what_happens(kind: str, loss: str) -> None:
    make, read, options = KINDS[kind]

    def loss_fn(model: Any, batch: Any) -> Any:
        return LOSSES[loss](model, read(batch))

    whole = gradient(loss_fn, make(), None, **options)
    split = gradient(loss_fn, make(), 4, **options)
    assert whole is not None
    same = split is not None and bool((whole - split).norm() <= 1e-9 * whole.norm())
    certificate = check(nn.Linear(5, 3).double(), loss_fn, make(), micro_batch_size=4, **options)
    assert certificate.exact == same, certificate
    assert "not-examined" not in {note.code for note in certificate.notes}, certificate


@pytest.mark.parametrize("kind", KINDS)
def test_a_coupled_loss_of_any_batch_is_exact(kind: str) -> None:
    make, read, options = KINDS[kind]
    loss_fn = Coupled(lambda model, batch: model(read(batch)[0]), contrast)
    assert_exact(nn.Linear(5, 3).double(), loss_fn, make(), **options)


def test_a_check_takes_what_backward_takes() -> None:
    taken = set(inspect.signature(backward).parameters) - {"verify"}
    for verb in (check, assert_exact):
        assert taken <= set(inspect.signature(verb).parameters), verb


def test_only_the_inputs_are_compared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1, bias=False))
    x = torch.randn(8, 5)

    def loss_fn(model: Any, batch: torch.Tensor) -> Any:
        return model(batch).mean() + model[0].weight.square().sum() * len(batch)

    only: Any = [model[1].weight]
    assert not check(model, loss_fn, x).exact
    assert check(model, loss_fn, x, inputs=only).exact
    backward(model, loss_fn, x, inputs=only, micro_batch_size=3)
    with pytest.raises(anybatch.LossError, match="no gradient to any of the 1 inputs"):
        check(model, lambda m, b: m(b).mean(), x, inputs=[torch.ones(1, requires_grad=True)])


def test_the_other_options_of_backward_change_nothing() -> None:
    kind = torch.get_default_device().type

    def low(model: Any, batch: torch.Tensor) -> Any:
        assert torch.is_autocast_enabled(kind)
        return model(batch).square().mean()

    plan = anybatch.plan(nn.Linear(5, 3), lambda m, b: m(b).square().mean(), torch.randn(8, 5), memory="64MiB")
    scaler = torch.amp.GradScaler(kind, init_scale=8.0)
    options: dict[str, Any] = {"autocast": torch.bfloat16, "scaler": scaler, "accumulate": "fp32", "group": False}
    certificate = check(nn.Linear(5, 3), low, torch.randn(8, 5), plan=plan, **options)
    assert certificate.exact
    assert scaler.get_scale() == 8.0
