"""Advice in the sources, and cases that follow it: what brings a text about, and the same as it says."""

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import AnyBatchError, backward
from source_tree import PACKAGE

Batch = dict[str, Any]
T = TypeVar("T", bound=Callable[..., Any])


def sites(paths: Iterable[Path], classes: frozenset[str]) -> set[str]:
    """The functions that make an object of one of some classes, as ``folder/file.function``."""
    return {site for path in paths for site in _sites(path, classes)}


def _sites(path: Path, classes: frozenset[str]) -> Iterator[str]:
    where = path.relative_to(PACKAGE).with_suffix("").as_posix()

    def walk(node: ast.AST, function: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id in classes:
                yield f"{where}.{function}"
            yield from walk(child, inside)

    return walk(ast.parse(path.read_text(encoding="utf-8")), "")


class Register:
    """Which tests follow the advice of which functions."""

    def __init__(self) -> None:
        self.known: dict[str, list[str]] = {}

    def follows(self, *names: str) -> Callable[[T], T]:
        """Marks a test that does what the text of some functions says, and finds that it helps."""

        def mark(test: T) -> T:
            for name in names:
                self.known.setdefault(name, []).append(test.__name__)
            return test

        return mark


class Case(NamedTuple):
    """A text, what brings it about, and the same as it says it should be.

    Args:
        site: the function that words it.
        says: a part of it.
        broken: brings it about.
        mended: raises nothing; what it returns, if anything, are gradients to be the same.
    """

    site: str
    says: str
    broken: Callable[[], Any]
    mended: Callable[[], Any]


def vectors() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(12, 5, generator=generator).double(), "y": torch.arange(12) % 3}


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3).double()


def gradient_of(loss_fn: Any, batch: Any = None, *, size: int | None = 4, model: Any = None, **options: Any) -> Any:
    """The gradient by ``backward``, as far as it comes without a proof."""
    options.setdefault("verify", "off")
    model = linear() if model is None else model()
    torch.manual_seed(1)
    backward(model, loss_fn, vectors() if batch is None else batch, micro_batch_size=size, **options)
    return [parameter.grad for parameter in model.parameters()]


def same(loss_fn: Any, batch: Any = None, **options: Any) -> tuple[Any, Any]:
    """The gradient in micro-batches and that of the whole batch."""
    return tuple(gradient_of(loss_fn, batch, size=size, verify="first", **options) for size in (4, None))


def out(model: Any, batch: Any) -> Any:
    return model(batch["x"])


def ce(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def ces(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def total(model: Any, batch: Any) -> Any:
    return ces(model, batch).sum()


def few(batch: Any) -> Any:
    """Items of which each sample has another number."""
    return (batch["x"] > 0).sum()


def follow(case: Case) -> None:
    """Has the text come, and does what it says: whatever gradients that gives are the same."""
    with pytest.raises(AnyBatchError) as error:
        case.broken()
    assert case.says in str(error.value)
    pair = case.mended()
    if isinstance(pair, tuple):
        torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-12)
