"""The lines of a plain loop that change so that anybatch takes its step."""

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from anybatch.doctor.crashing.usercode import LOOPS, SCOPES, names_in, nodes_in
from anybatch.doctor.fixes.source import Change, Edit, UnclearEdit
from anybatch.doctor.looplooks import value_at
from anybatch.doctor.loopnames import free_name, inputs_of, rows_of, stored
from anybatch.doctor.loopparts import LoopStep, StepUnclear
from anybatch.doctor.loopupdates import Update, check_behind, home_of, run_behind
from anybatch.doctor.loopwindows import joined

_SUMS = ("AddBackward0", "SubBackward0", "NegBackward0")
_MOST_NODES = 1000
_ONE_OF_TWO = ("MulBackward0", "DivBackward0")  # the other one is a factor
_REDUCED = ("MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1")
_SAME = 1e-5  # of a number of items in float32


class Counted(NamedTuple):
    """The number of items that the loss is the mean over, by which its terms are means, too."""

    text: str  # the code of the ``count=``
    items: float  # of the whole batch
    terms: Mapping[str, torch.Tensor]  # what the forward gives, with its graph
    name: str = "items"  # of the number in the loss function
    same: str = ""  # the code of another one that counts as many items of this batch


def change_of(step: LoopStep, update: Update | None, budget: str, plan: str, counted: Counted | None = None) -> Edit:
    """The edit of a loop's file; without an ``Update`` the loop keeps its own, and calls ``anybatch.backward``.

    ``budget`` are the arguments of a ``TrainStep`` that say how to split, ``plan`` those of ``anybatch.backward``.
    """
    taken = set(step.names) | stored([step.source.tree])
    function, result, stepper, items = (free_name(taken, one) for one in ("loss_fn", "result", "step", "items"))
    counted = None if counted is None else counted._replace(name=items)
    rows = results_of(step, counted)
    text = step.loss_text(function, rows, _count_line(step, counted, rows))
    note = "" if step.windowed is None else step.windowed.note
    note += "" if counted is None or not counted.same else (
        f"# count= is what the loss divides by; on this batch {counted.same} is the same\n"
    )  # fmt: skip
    if update is None:
        text = note + text
        scaler = f", scaler={step.scaler}" if step.scaler else ""
        size = f", {plan}" if plan else ""
        call = f"anybatch.backward({step.model_text}, {function}, {step.batch_text}{size}{scaler})"
    else:
        options = [one for one in (budget, update.clip and f"clip_norm={update.clip}") if one]
        options += [f"scaler={step.scaler}"] if step.scaler else []
        made = f"anybatch.TrainStep({step.model_text}, {', '.join([function, update.optimizer, *options])})"
        text += f"\n\n{note}{stepper} = {made}"
        call = f"{stepper}({step.batch_text})"
    after = [
        f'{name} = {result}.metrics["{name}"]' if name == text else f'{name} = torch.tensor({result}.metrics["{name}"])'
        for name, text in rows.items()
    ]
    if isinstance(step.loss, ast.Name) and step.loss.id in _outside(step):
        scale = step.windowed.scale if step.windowed is not None else ""
        after.append(f"{step.source.of(step.loss)} = torch.tensor({result}.loss){scale}")
    reads, loss = _loss_reads(step), free_name(taken, "loss")
    if reads:
        after.append(f"{loss} = torch.tensor({result}.loss)")
    lines = [f"{result} = {call}" if after else call, *after, *_joined_items(step)]
    try:
        return step.source.edit(
            [*_edits(step, update, text, lines), *(step.source.replaced(one, loss) for one in reads)]
        )
    except UnclearEdit as error:
        raise StepUnclear(
            f"the lines before {step.where(step.back)} can't be changed in one way only: {error}"
        ) from None


def _edits(step: LoopStep, update: Update | None, text: str, lines: Sequence[str]) -> Iterator[Change]:
    source, block = step.source, step.source.block(step.back)
    first = step.forward[0] if step.forward else step.back
    home = home_of(step, update.optimizer if update else "")
    if "anybatch" not in step.names:  # first, for the loop may be the next statement
        yield _import(step)
    yield source.inserted(home or first, f"{text}\n" if home else text)
    gone = [*step.forward, *(update.statements if update else ())]
    for one in gone:
        yield source.removed(one)
    line = source.text.split("\n")[step.back.lineno - 1].encode()
    if len(lines) > 1 and block[0].lineno == step.back.lineno and line[: block[0].col_offset].strip():
        raise StepUnclear(f"{step.where(step.back)} stands in the line of its loop; put it in a line of its own")
    yield source.replaced(step.back, f"\n{source.indent(step.back)}".join(lines))
    if step.windowed is not None and isinstance(loop := step.loops[0], ast.For):
        parts = (one for one in nodes_in(loop.target, ast.expr) if source.of(one) == step.windowed.item)
        yield source.replaced(next(parts), step.windowed.window)
        if step.windowed.first:
            yield source.inserted(loop.body[0], step.windowed.first)
    for one in run_behind(step).statements:
        yield from source.moved(one, step.back, after=True)


def _joined_items(step: LoopStep) -> list[str]:
    """The lines that join what the loop reads of each batch of a window after the step."""
    if step.windowed is None:
        return []
    loop = step.loops[0]
    later = [*_from_here(step, loop), *(_after(step, loop) if isinstance(loop, LOOPS) else [])]
    return joined(step, later)


def _import(step: LoopStep) -> Change:
    """The import of anybatch, which may not stand behind what runs the loop."""
    body, source = step.source.tree.body, step.source
    ahead = [one for one in body if one.lineno <= step.back.lineno][:-1]
    behind: list[ast.stmt] = [one for one in ahead if isinstance(one, ast.Import | ast.ImportFrom)]
    if not behind and ast.get_docstring(source.tree) is not None:
        behind = body[:1]
    return source.inserted((behind or body[:1])[-1], "import anybatch", after=bool(behind))


def _outside(step: LoopStep) -> set[str]:
    """Names of the forward that something else in the function reads."""
    scope = step.source.scope(step.back)
    inner = step.loops[0] if step.loops else scope
    near = inputs_of(_from_here(step, inner))
    if isinstance(inner, LOOPS):
        near |= inputs_of(inner.orelse) | inputs_of(_after(step, inner))
    return stored(step.forward) & (near | _read_by_functions(scope))


def _loss_reads(step: LoopStep) -> list[ast.Attribute]:
    """Where a loop reads its loss as ``outputs.loss``, and nothing else of the ``outputs`` that a forward gave."""
    name = _home_of_loss(step.loss)
    scope = step.source.scope(step.back)
    inner = step.loops[0] if step.loops else scope
    here = _from_here(step, inner)
    later = inputs_of([*inner.orelse, *_after(step, inner)]) if isinstance(inner, LOOPS) else set[str]()
    if name not in names_in(step.forward, ast.Store) - stored(here) - later - _read_by_functions(scope):
        return []
    names = {id(one) for one in nodes_in(here, ast.Name) if one.id == name}
    reads = {id(one.value): one for one in nodes_in(here, ast.Attribute) if _home_of_loss(one) == name}
    same = all(ast.dump(one) == ast.dump(step.loss) for one in reads.values())
    return list(reads.values()) if same and reads.keys() == names else []


def _home_of_loss(loss: ast.expr) -> str:
    """The name that a loss such as ``outputs.loss`` is an attribute of; empty for none."""
    return loss.value.id if isinstance(loss, ast.Attribute) and isinstance(loss.value, ast.Name) else ""


def _read_by_functions(scope: ast.AST) -> set[str]:
    """Names of a scope that functions in it read, whenever they are called."""
    found = set[str]()
    for one in nodes_in(scope, ast.AST):
        if one is not scope and isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            body = one.body if isinstance(one.body, list) else [one.body]
            own = {each.arg for each in nodes_in(one.args, ast.arg)} | names_in(body, ast.Store)
            found |= names_in(body, ast.Load) - own
    return found


def _after(step: LoopStep, loop: ast.stmt) -> list[ast.AST]:
    """What may run in a function once a loop has ended, in this order."""
    found, here = list[ast.AST](), loop
    while True:
        block = step.source.block(here)
        found += block[block.index(here) + 1 :]
        outer = next(one for one in step.source.ancestors(here) if isinstance(one, ast.stmt | ast.Module))
        if isinstance(outer, SCOPES) or not isinstance(outer, ast.stmt):
            return found
        if isinstance(outer, LOOPS):
            again = [outer.test] if isinstance(outer, ast.While) else []
            found += [*again, *outer.orelse, *block[: block.index(here)]]
        elif isinstance(outer, ast.Try):
            found += [*outer.handlers, *outer.orelse, *outer.finalbody]
        here = outer


def _from_here(step: LoopStep, inner: ast.AST) -> list[ast.AST]:
    """What runs after the forward in a loop, in this order, up to the next forward."""
    first = min((one.lineno for one in step.forward), default=step.back.lineno)
    behind, ahead, here = list[ast.AST](), list[ast.stmt](), step.back
    while True:
        block = [one for one in step.source.block(here) if one not in step.forward]
        behind += block[block.index(here) + 1 :]
        ahead = [*block[: block.index(here)], *ahead]
        outer = next(one for one in step.source.ancestors(here) if isinstance(one, ast.stmt | ast.Module))
        if outer is inner or not isinstance(outer, ast.stmt):
            break
        behind += [one for one in _statements(outer, {id(one) for one in (*block, *step.forward)}) if one is not here]
        here = outer
    behind += [inner.test] if isinstance(inner, ast.While) else []
    between = [one for one in ahead if one.lineno > first]  # such as what is moved behind the step
    return [*between, *behind, *(one for one in ahead if one not in between)]


def _statements(outer: ast.AST, skipped: set[int]) -> Iterator[ast.stmt]:
    """The statements in a block, those of inner blocks too, without other functions."""
    for node in ast.iter_child_nodes(outer):
        if id(node) in skipped or isinstance(node, SCOPES):
            continue
        if isinstance(node, ast.stmt):
            yield node
        yield from _statements(node, skipped)


def _check_block(step: LoopStep) -> None:
    """Refuses a forward elsewhere than its backward, and what can't run behind both."""
    block = step.source.block(step.back)
    away = next((one for one in step.forward if one not in block), None)
    if away is not None:
        raise StepUnclear(
            f"the forward at {step.where(away)} is not in the block of its backward, line {step.back.lineno}; put them "
            "into one block, and where training and evaluation share a loop, give the training a loop of its own"
        )
    check_behind(step)


def _check_left(step: LoopStep) -> None:
    """Refuses to read what a forward leaves in its modules, which would be that of the last micro-batch."""
    around = step.loops[0] if step.loops else step.source.scope(step.back)
    for node in nodes_in(_from_here(step, around), ast.Attribute):
        owner = value_at(step, node.value) if isinstance(node.ctx, ast.Load) else None
        left = owner.__dict__.get(node.attr) if isinstance(owner, torch.nn.Module) else None
        if isinstance(left, torch.Tensor) and left.grad_fn is not None:
            raise StepUnclear(
                f"{step.where(node)} reads {step.source.of(node)}, which the forward leaves, as each micro-batch "
                "would; give it a name in the forward, or have the loss function return it as an anybatch.Mean"
            )


def results_of(step: LoopStep, counted: Counted | None = None) -> dict[str, str]:
    """The code of the metrics for the tensors of the forward that the loop reads after the backward, by name.

    They have one row per sample, or are means over the samples or over what ``counted`` counts, as the terms of a loss.
    """
    _check_block(step)
    _check_left(step)
    scope = step.source.scope(step.back)
    deleted = {one.id for one in nodes_in(scope, ast.Name) if isinstance(one.ctx, ast.Del)} & stored(step.forward)
    if deleted:
        raise StepUnclear(
            f"{step.source.path} deletes {min(deleted)!r}, which exists within the loss function only once anybatch "
            "takes the step; take it out of the del"
        )
    rows = rows_of(step.logical_batch)
    goes_on = len(step.source.calls(step.loops[-1] if step.loops else step.source.scope(step.back), "backward")) > 1
    found: dict[str, str] = {}
    for name in sorted(_outside(step)):
        value: Any = step.names.get(name)
        is_loss = isinstance(step.loss, ast.Name) and name == step.loss.id
        is_loss = is_loss or (bool(reads := _loss_reads(step)) and name == _home_of_loss(reads[0]))
        is_term = not is_loss and bool(step.rows_text) and _means_of(value) is not None
        if (is_loss or is_term) and not isinstance(step.names.get("torch"), type(torch)):
            raise StepUnclear(f"{step.source.path} reads the loss after the backward; it needs import torch")
        if is_loss:
            continue
        if goes_on and isinstance(value, torch.Tensor) and value.requires_grad:
            raise StepUnclear(
                f"the loop reads {name!r} of the forward after {step.where(step.back)}, where it goes back again, and "
                "what micro-batches leave has no graph; compute it again after the step"
            )
        if is_term:
            weight = step.rows_text if counted is None else _weight_of(step, name, counted)
            found[name] = f"anybatch.Mean({name} * {weight}, {weight})"
        elif isinstance(value, torch.Tensor) and value.dim() and len(value) == rows:
            found[name] = name
        elif name not in names_in(step.forward, ast.Store):
            raise StepUnclear(
                f"the forward before {step.where(step.back)} changes {name!r}, as each micro-batch would; give its "
                f"results names of their own, as in out = model(x), and put them into {name!r} after the step"
            )
        else:
            raise StepUnclear(
                f"the loop reads {name!r} of the forward after {step.where(step.back)}, and it is no tensor with a row "
                "for each sample; have the loss function return it with the loss, as an anybatch.Mean"
            )
    return found


def _count_line(step: LoopStep, counted: Counted | None, metrics: Mapping[str, str]) -> str:
    """The line of the loss function that counts the items of its samples; empty if no metric needs them."""
    if counted is None or not any(text.endswith(f", {counted.name})") for text in metrics.values()):
        return ""
    count = ast.parse(counted.text, mode="eval").body
    if not isinstance(count, ast.Lambda):
        return f"{counted.name} = {counted.text}({step.samples_text})"
    for one in nodes_in(count.body, ast.Name):
        if one.id == count.args.args[0].arg:
            one.id = step.samples_text
    return f"{counted.name} = {ast.unparse(count.body)}"


def _weight_of(step: LoopStep, name: str, counted: Counted) -> str:
    """The code of what a term of the loss is the mean over: the items that the loss is the mean over, or samples."""
    rows = rows_of(step.logical_batch)
    kinds = {_is_over_items(one, rows, counted.items) for one in _means_of(counted.terms.get(name)) or []}
    if None in kinds or len(kinds) > 1:
        raise StepUnclear(
            f"the loop reads {name!r} of the forward after {step.where(step.back)}, and it is not the mean over the "
            f"{counted.items:g} items that the loss is the mean over; have the loss function return it with the loss, "
            "as an anybatch.Mean of its sum and its own number of items"
        )
    return counted.name if True in kinds else step.rows_text


def _is_over_items(mean: Any, rows: int, items: float) -> bool | None:
    """Whether a mean is over the items, and not over the samples; ``None`` if it may be over neither."""
    if hasattr(mean, "_saved_total_weight"):
        sizes, number = (), float(mean._saved_total_weight)
    else:
        given = getattr(mean, "_saved_self", None)
        sizes = tuple(getattr(mean, "_saved_self_sym_sizes", () if given is None else given.shape))
        if not sizes and given is None and not mean.name().startswith("MeanBackward"):
            return False  # a loss that does not say what it is over
        number = float(math.prod(sizes))
        if _takes_first(mean, (rows, items)):
            return None  # what is left has sizes of its own, which may be the same by chance
    if sizes and sizes[0] == rows != items:
        return False
    if any(math.isclose(one, items, rel_tol=_SAME) for one in (number, *sizes[:1])):
        return True
    return False if abs(number / rows - round(number / rows)) <= _SAME else None


def _takes_first(mean: Any, numbers: Sequence[float]) -> bool:
    """Whether a mean is of what an earlier mean or sum left of samples or items, which stand in the first dimension."""
    while len(parts := [one for one, _ in mean.next_functions if one is not None]) == 1:
        mean = parts[0]
        sizes = getattr(mean, "_saved_self_sym_sizes", ())
        if mean.name() in _REDUCED and sizes and sizes[0] in numbers:
            dims = getattr(mean, "_saved_dim", ()) or range(len(sizes))
            if any(one in (0, 2**64 - len(sizes)) for one in dims):  # autograd keeps negative ones without their sign
                return True
    return False


def _means_of(value: Any) -> list[Any] | None:
    """The nodes of the means that a scalar is made of, by sums and by factors that have no graph; else ``None``."""
    if not isinstance(value, torch.Tensor) or value.dim():
        return None
    nodes, seen, ends = [value.grad_fn], set[Any](), list[Any]()
    for node in nodes:  # to which those before it are added
        if node is None or len(nodes) > _MOST_NODES:
            return None
        if node in seen:
            continue
        seen.add(node)
        if node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == 1:
            ends.append(node)
            continue
        name, given = node.name(), [one for one, _ in node.next_functions]
        parts = [one for one in given if one is not None]
        is_factor = name in _ONE_OF_TWO and len(parts) == 1 and (name != "DivBackward0" or given[0] is not None)
        if not parts or not (is_factor or name in _SUMS):
            return None
        nodes += parts
    return ends
