"""Models of several kinds, and how the tests of the memory optimizations run and compare them."""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.memory.places import Handle
from anybatch.tensors.dispatch import TorchDispatchMode

VOCABULARY = 211
Put = Callable[[nn.Module], Handle]


class Block(nn.Module):
    """Attention and a perceptron with dropout; takes a keyword argument and a nested one, and gives a mapping."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mixing = nn.MultiheadAttention(width, 2, dropout=0.2, batch_first=True)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, stream: Tensor, *, scale: float, extra: dict[str, list[Tensor]]) -> dict[str, Any]:
        x = self.norm(stream)
        mixed, _ = self.mixing(x, x, x, need_weights=False)
        stream = stream + self.drop(mixed) * scale + extra["positions"][0]
        return {"stream": stream + self.drop(self.out(stream)), "parts": (mixed.square().mean(), "text")}


class Language(nn.Module):
    """A language model whose head is tied to its embedding."""

    def __init__(self, layers: int = 3, width: int = 8, *, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(6, width) * 0.1)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        stream, penalty = self.tokens(x), torch.zeros((), dtype=self.positions.dtype)
        for layer in self.layers:
            out = layer(stream, scale=0.5, extra={"positions": [self.positions]})
            stream, penalty = out["stream"], penalty + out["parts"][0]
        return self.head(self.norm(stream)), penalty


def texts(rows: int = 5) -> dict[str, Tensor]:
    """Tokens and labels, some of which do not count."""
    labels = torch.randint(0, VOCABULARY, (rows, 6))
    labels[::2, :2] = -100
    return {"x": torch.randint(0, VOCABULARY, (rows, 6)), "y": labels}


def language_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the rows of the summed loss of their tokens, and a penalty."""
    logits, penalty = model(batch["x"])
    total = F.cross_entropy(logits.view(-1, VOCABULARY), batch["y"].view(-1), reduction="sum")
    loss: Tensor = total / len(batch["x"]) + 0.1 * penalty
    return loss


class Images(nn.Module):
    """A convolutional network with BatchNorm, one of which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.body = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.Dropout(0.4)
        )
        self.tail = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
        self.last = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.body(self.stem(x)))
        out: Tensor = self.last(self.tail(y).mean((2, 3)))
        return out


def images(rows: int = 6) -> dict[str, Tensor]:
    """Small images and their classes."""
    return {"x": torch.randn(rows, 3, 8, 8), "y": torch.randint(0, 5, (rows,))}


def image_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean cross-entropy."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def in_double(batch: Any) -> Any:
    """The batch in float64."""
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def outcome(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any, put: Put | None = None, *, twice: bool = False
) -> dict[str, Any]:
    """Everything that a forward and backward leave, on a copy of the model, by name."""
    model = copy.deepcopy(model)
    torch.manual_seed(11)
    handle = put(model) if put is not None else Handle()
    with handle:
        loss = loss_fn(model, batch)
        if twice:
            loss = loss + loss_fn(model, batch)
        loss.backward()
    found: dict[str, Any] = {"loss": loss.detach(), "random": torch.rand(3)}
    found |= {f"gradient {name}": p.grad for name, p in model.named_parameters()}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Asserts that two outcomes are bitwise equal."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        one = found[name]
        assert (one is None) == (value is None), name
        if value is not None:
            assert one.dtype == value.dtype, name
            assert torch.equal(one, value), name


def assert_near(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-10) -> None:
    """Asserts that two outcomes are equal up to a relative error, all gradients together."""
    names = [name for name in expected if name.startswith("gradient") and expected[name] is not None]
    error = sum(float((found[n] - expected[n]).detach().double().square().sum()) for n in names) ** 0.5
    size = sum(float(expected[n].double().square().sum()) for n in names) ** 0.5
    assert error <= tolerance * size, f"off by {error / size:g}"
    assert abs(float(found["loss"] - expected["loss"])) <= tolerance * abs(float(expected["loss"]))
    others = [name for name in expected if name not in (*names, "loss")]
    assert_same({n: found[n] for n in others}, {n: expected[n] for n in others})


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors, real or fake, each storage once; notes every operation and the bytes after it.

    Args:
        tensors: what is alive already.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = self.peak = 0
        self.operations: list[str] = []
        self.bytes: list[int] = []
        self._alive: dict[int, Any] = {}
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self._add(value)
        if not str(func).startswith("prim"):
            self.operations.append(str(func))
            self.bytes.append(self.current)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._forget(key, size))
            self.current += size
            self.peak = max(self.peak, self.current)

    def _forget(self, key: int, size: int) -> None:
        del self._alive[key]
        self.current -= size


def peak(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    put: Put | None = None,
    known: Sequence[Tensor] = (),
) -> int:
    """The most bytes alive beyond weights, gradients, the batch and what is known; there is a gradient already."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    there = [*model.parameters(), *model.buffers(), *batch.values(), *known]
    there += [p.grad for p in model.parameters() if p.grad is not None]
    handle = put(model) if put is not None else Handle()
    with LiveBytes(there) as live:
        base: int = live.current
        with handle:
            loss_fn(model, batch).backward()
    for parameter in model.parameters():
        parameter.grad = None
    return int(live.peak - base)


def attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What must be as before when a memory optimization is off."""
    for name, module in model.named_modules():
        yield name, (type(module), sorted(module.__dict__), len(module._forward_hooks), len(module._forward_pre_hooks))
    yield "state", list(model.state_dict())
    yield "parameters", [id(parameter) for parameter in model.parameters()]
