"""The parts of a plain loop's step: its model, forward, loss and batch, and their code."""

import ast
import itertools
import linecache
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from anybatch.doctor.crashing.usercode import nodes_in
from anybatch.doctor.fixes.source import UserSource
from anybatch.doctor.loopnames import inputs_of, rows_of
from anybatch.errors import AnyBatchError
from anybatch.records.means import Mean


class StepUnclear(AnyBatchError):
    """The step can't be separated from its loop; the text says why, and what to do."""


def branches_of(source: UserSource, node: ast.AST) -> dict[ast.AST, bool]:
    """The ``if`` statements around a node, and whether it is in their ``else``."""
    inner = [node, *source.ancestors(node)]
    return {outer: inside in outer.orelse for inside, outer in itertools.pairwise(inner) if isinstance(outer, ast.If)}


class Windowed(NamedTuple):
    """How a loop that added up the gradients of several batches is written as one over windows of them."""

    text: str  # of the file
    item: str  # the code of what the loader yields, as the loop's target
    window: str  # the name of a window
    moves: tuple[str, ...]  # the statements that moved an item to a device, as a step does by itself
    note: str  # a comment for the changed lines
    divided: int  # by what the loop divided each loss before it went back
    changed: frozenset[str]  # the variables that each batch finds as the last one left them
    first: str  # the first lines of the loop, for the number of the batch; empty without
    scale: str  # what the loop reads of the loss, times that; empty where it is the loss itself
    apart: int  # the line of the loop's own division of what it reads of the loss; 0 without

    @property
    def names(self) -> set[str]:
        """The variables of an item."""
        return {one.id for one in nodes_in(ast.parse(self.item), ast.Name)}


@dataclass(slots=True)
class LoopStep:
    """The part of a loop that handles one batch, up to its backward."""

    source: UserSource  # the file
    back: ast.stmt  # the statement that calls ``backward``
    loss: ast.expr  # the expression whose backward it is, without the scale of a ``GradScaler``
    scaler: str  # what the loop calls its ``GradScaler``; empty without one
    names: Mapping[str, Any]  # what the loop's names were at the backward
    forward: list[ast.stmt] = field(default_factory=list)  # the statements that make the loss of the batch
    modules: dict[str, torch.nn.Module] = field(default_factory=dict)  # what is trained, by what the loop calls it
    batch: dict[str, Any] = field(default_factory=dict)  # what is new in each iteration, by name in the loss function
    taken_out: dict[str, str] = field(default_factory=dict)  # of these, how the loop calls x[i : i + 64], by that name
    windowed: Windowed | None = None  # in a loop over windows, what the loader yields

    @property
    def loops(self) -> Sequence[ast.stmt]:
        """The loops around the backward within its function, the innermost first."""
        return self.source.loops_around(self.back)

    @property
    def other_backwards(self) -> list[int]:
        """The lines of the loop, or of the function, that call ``backward`` for other losses."""
        source, own = self.source, branches_of(self.source, self.back)
        found = source.calls(self.loops[0] if self.loops else source.scope(self.back), "backward")
        found = [one for one in found if source.around(one) is not self.back]
        others = [(one.lineno, branches_of(source, one)) for one in found]
        return [line for line, branches in others if all(branches.get(one, way) == way for one, way in own.items())]

    @property
    def model(self) -> torch.nn.Module:
        """The model for anybatch: the trained module, or a ``ModuleList`` of several."""
        found = list(self.modules.values())
        return found[0] if len(found) == 1 else torch.nn.ModuleList(found)

    @property
    def model_text(self) -> str:
        """The code for ``model``."""
        texts = list(self.modules)
        return texts[0] if len(texts) == 1 else f"torch.nn.ModuleList([{', '.join(texts)}])"

    @property
    def logical_batch(self) -> Any:
        """The batch for anybatch: the one variable, or a tuple of several; one of a window's."""
        if self.windowed is not None:
            return eval(self.windowed.item, dict(self.names))
        values = tuple(self.batch.values())
        return values[0] if len(values) == 1 else values

    @property
    def batch_text(self) -> str:
        """The code for ``logical_batch``, or for its window."""
        if self.windowed is not None:
            return self.windowed.window
        texts = [self.taken_out.get(name, name) for name in self.batch]
        return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"

    def where(self, node: ast.AST) -> str:
        """The file and line of a node."""
        return f"{self.source.path}:{getattr(node, 'lineno', '?')}"

    @property
    def rows_text(self) -> str:
        """The code for the number of samples in the batch; empty if no tensor of it has a name."""
        rows = rows_of(self.logical_batch)
        for name, value in self.batch.items():
            parts = {name: value} if not isinstance(value, Mapping) else {f"{name}[{k!r}]": value[k] for k in value}
            for text, one in parts.items():
                if isinstance(one, torch.Tensor) and one.dim() and len(one) == rows:
                    return f"len({text})"
        return ""

    @property
    def samples_text(self) -> str:
        """What the function of ``loss_text`` calls its batch."""
        only = list(self.batch) if self.windowed is None else [self.windowed.item]
        if len(only) == 1 and only[0].isidentifier():
            return only[0]
        taken = inputs_of([*self.forward, self.loss]) | self.batch.keys()
        return "samples" if "batch" in taken else "batch"

    def loss_text(self, name: str = "loss_fn", metrics: Mapping[str, str] | None = None, line: str = "") -> str:
        """The forward as the code of a function of the model and the batch, and of one more line.

        It returns ``metrics`` beside the loss.
        """
        only = next(iter(self.modules)) if len(self.modules) == 1 else "models"
        parameter = only.rpartition(".")[2]
        taken, samples = inputs_of([*self.forward, self.loss]), self.samples_text
        lines = [f"def {name}({parameter}, {samples}):"]
        parts = ", ".join(self.batch) if self.windowed is None else self.windowed.item
        lines += [f"    {parts} = {samples}"] if parts != samples else []
        shorter = {text: name for name, text in self.taken_out.items()}
        shorter |= {only: parameter} if only != parameter and parameter not in taken else {}
        for statement in self.forward:
            lines += [f"    {line}" if line else "" for line in self._text(statement, shorter).split("\n")]
        lines += [f"    {line}"] if line else []
        beside = ", ".join(f'"{key}": {text}' for key, text in (metrics or {}).items())
        lines.append(f"    return {self._text(self.loss, shorter)}{f', {{{beside}}}' if metrics else ''}")
        return "\n".join(lines)

    def _text(self, node: ast.stmt | ast.expr, shorter: Mapping[str, str]) -> str:
        """The user's text of a node without its indentation, with the names of the parameters."""
        if any("\n" in self.source.of(one) for one in ast.walk(node) if isinstance(one, ast.Constant | ast.JoinedStr)):
            raise StepUnclear(f"{self.where(node)} holds a string of several lines; give it a name before the loop")
        data, begin = self.source.of(node).encode(), self.source.start(node)
        for one in sorted(expressions_with(self.source, node, shorter), key=self.source.start, reverse=True):
            new = shorter[self.source.of(one)].encode()
            data = data[: self.source.start(one) - begin] + new + data[self.source.end(one) - begin :]
        indent = " " * node.col_offset
        return "\n".join(line.removeprefix(indent) for line in data.decode().split("\n"))

    def loss_fn(self, metrics: Mapping[str, str] | None = None) -> Callable[..., Any]:
        """The function of ``loss_text``, with the loop's variables as globals."""
        names, name = {"anybatch": types.SimpleNamespace(Mean=Mean), **self.names}, "anybatch_loss"
        text, file = self.loss_text(name, metrics), f"<the forward of {self.source.path}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # for tracebacks
        exec(compile(text, file, "exec"), names)
        found: Callable[..., Any] = names[name]
        return found


def value_of(text: str, names: Mapping[str, Any]) -> Any:
    """The value of a dotted name; ``None`` if it does not exist."""
    first, *attributes = text.split(".")
    value = names.get(first)
    for one in attributes:
        value = getattr(value, one, None)
    return value


def expressions_with(source: UserSource, node: ast.AST, texts: Container[str]) -> Iterator[ast.expr]:
    """The outermost expressions in a node that have one of the texts."""
    if isinstance(node, ast.Attribute | ast.Subscript) and source.of(node) in texts:
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from expressions_with(source, child, texts)
