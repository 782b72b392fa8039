"""Who wrote in place to a tensor that a backward needs, or to a leaf."""

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from anybatch.doctor.crashes import Answer, answer, quoted, shape
from anybatch.doctor.crashing.carried import function_of, kept_over, losses_of, stepped_in
from anybatch.doctor.crashing.live import Live
from anybatch.doctor.crashing.usercode import Source, called, loads, nodes_in, path_of, simple_statements, targets
from anybatch.doctor.graphs import nodes_behind
from anybatch.doctor.values import storage_of

_SHAPE = re.compile(r"\[[\w.]+ \[([\d, ]*)\]\]")
_OUTPUT = re.compile(r"output \d+ of (?:\w+::)*(\w+?)(?:Backward\d*)?[,\s]")
_VERSIONS = re.compile(r"is at version (\d+); expected version (\d+)")
_OPS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}
_SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.MatMult: "@"}


class Write(NamedTuple):
    """A line that writes to a tensor."""

    path: str
    file: str  # of the line
    line: int
    code: str
    instead: str  # code that makes a new tensor
    # what made the tensor before, as far as the lines above show: names of functions and classes
    made: frozenset[str] = frozenset()
    module: str = ""  # whose forward it is
    op: str = ""  # that writes, as torch names it, in small letters


class Damage(NamedTuple):
    """What an error says of a saved tensor that was written to."""

    size: list[int]  # its shape
    maker: str  # the operation that made it, if it is told
    version: int
    saved: torch.Tensor | None  # the tensor itself, if it is still to be had
    user: str  # the operation that needs it, empty if it is not known
    evidence: dict[str, Any]


def _damage(live: Live, text: str) -> Damage:
    versions, sizes, output = _VERSIONS.search(text), _SHAPE.search(text), _OUTPUT.search(text)
    maker = output.group(1) if output else ""
    size = [int(entry) for entry in sizes.group(1).split(",") if entry.strip()] if sizes else []
    version, expected = (int(versions[1]), int(versions[2])) if versions else (0, 0)
    saved, user = _damaged(losses_of(live), live.text)
    evidence = {"version": version, "expected": expected, "shape": size, "made_by": maker, "needed_by": user}
    return Damage(size, maker, version, saved, user, evidence)


def _damaged(losses: list[torch.Tensor], text: str) -> tuple[torch.Tensor | None, str]:
    """The saved tensor that an error speaks of, else the first that was written to; and the operation that needs it."""
    found: list[tuple[torch.Tensor | None, str]] = []
    for node in nodes_behind(losses):
        for name in dir(type(node)):
            if name.startswith("_saved_"):
                try:
                    getattr(node, name)
                except RuntimeError as error:
                    if "modified by an inplace" not in str(error):
                        continue
                    data = getattr(getattr(node, f"_raw{name}", None), "data", None)
                    found.append((data if isinstance(data, torch.Tensor) else None, node.name()))
                    if str(error).partition(" Hint")[0] == text.partition(" Hint")[0]:
                        return found[-1]
    return found[0] if found else (None, "")


def _written_parameters(live: Live, damage: Damage) -> list[str]:
    """The parameter that was written to, where it was one; the graph keeps a transposed view of a weight."""
    own = live.parameters()
    if damage.saved is not None:
        key = storage_of(damage.saved)
        return [name for name, one in own.items() if key and storage_of(one) == key]
    if damage.maker not in ("", "AsStrided", "T", "Transpose"):
        return []
    fits = (damage.size, damage.size[::-1])
    return [name for name, one in own.items() if one._version == damage.version and list(one.shape) in fits]


def weights_stepped(live: Live, match: "re.Match[str]") -> Answer | None:
    """The parameter that was stepped between forward and backward, and the line that stepped it."""
    damage = _damage(live, match.group(1))
    names = _written_parameters(live, damage)
    if not names:
        return None
    parameter = live.parameters()[names[0]]
    at = _stepped_at(live)
    by, call = quoted(at[2]) if at else "an optimizer's step or a copy", live.code() or "this backward"
    behind = stepped_in(live, [one for one in live.round() if live.user and one.lineno > live.user.line])
    change = f"{by} after {quoted(call)}"
    if behind and not any(id(parameter) in held for held in behind.values()):
        change = f"compute the loss of {quoted(call)} anew behind {by}, with a new forward; with the step behind this "
        change += "backward, it would use its gradients too"
    return answer(
        name=names[0], size=shape(parameter), by=by, call=quoted(call), change=change, parameters=names[:5], at=at,
        tensor=f"{names[0]} {shape(parameter)}", evidence=damage.evidence,
    )  # fmt: skip


def weights_of_the_step_before(live: Live, match: "re.Match[str]") -> Answer | None:
    """What takes a backward with ``retain_graph`` back to weights that were stepped since."""
    known = weights_stepped(live, match) if "retain_graph" in live.code() else None
    kept = next((one for one in kept_over(live, losses_of(live)) if one.again), None) if known else None
    if known is None or kept is None:
        return None
    at = live.at(kept.line, kept.file)
    return {**known, "path": quoted(kept.path), "detached": kept.detached, "reads": quoted(at[2]), "at": at,
            "parameters": known["parameters"][:1], "module": kept.module,
            "tensor": f"{kept.path}, {known['tensor']}"}  # fmt: skip


def _stepped_at(live: Live) -> tuple[str, int, str] | None:
    """The last line before the user's, in its outermost loop, that steps or else writes."""
    if (found := live.here()) is None:
        return None
    source, here = found
    scope = [source.function(here), *source.loops(here)][-1]
    steps = [s.lineno for s in simple_statements(scope) if any(called(node) == "step" for node in ast.walk(s))]
    steps = steps or [write.line for write in _writes_in(source, scope) if write.line < here]
    lines = [line for line in steps if line < here] or steps
    return live.at(lines[-1]) if lines else None


def tensor_written(live: Live, match: "re.Match[str]") -> Answer:
    """The tensor that was written to, and the line that wrote, if one can be meant."""
    damage = _damage(live, match.group(1))
    key = storage_of(damage.saved) if damage.saved is not None else 0
    alias = next((p for p, one, _ in live.named() if key and storage_of(one) == key and not one.is_leaf), "")
    write = _writer(live, damage, alias)
    name = alias or (write.path if write is not None else "")
    maker, user = damage.maker, damage.user
    needing = f", which {user} needs," if user else ""
    if maker and not (write is not None and _is_last(write, damage)):
        needing = f", which {maker} made and {user or 'the backward'} needs,"
    return answer(
        what=f"{quoted(name)} {damage.size}" if name else f"a tensor of shape {damage.size}", needing=needing,
        made=f", which {maker} made," if maker else "", user=user or "An operation", name=name or "it", write=write,
        code=quoted(write.code) if write else "", instead=write.instead if write else "",
        module=write.module if write else "", at=(write.file, write.line, write.code) if write else None,
        tensor=" ".join(filter(None, (name, str(damage.size), f"made by {maker}" if maker else ""))),
        evidence=damage.evidence,
    )  # fmt: skip


def written_by_a_line(live: Live, match: "re.Match[str]") -> Answer | None:
    """As ``tensor_written``, where the line is known."""
    known = tensor_written(live, match)
    return known if known["write"] is not None else None


def _is_last(write: Write, damage: Damage) -> bool:
    """Whether torch names the write itself: of an input that was kept it tells what made it last, of an output not."""
    needing = damage.user.partition("Backward")[0]
    keeps_output = needing == damage.maker and write.op not in _OPS.values()
    return bool(needing) and not keeps_output and write.op == damage.maker.lower().removesuffix("_")


def _writer(live: Live, damage: Damage, alias: str) -> Write | None:
    """The write that fits best to what made the tensor."""
    wanted = damage.maker.lower().removesuffix("_")

    def weight(one: Write) -> int:
        is_its = wanted != "" and (wanted in one.made or _is_last(one, damage))
        return 2 * is_its + (alias != "" and one.path == alias)

    found = list(_writes(live))
    best = max(map(weight, found), default=0)
    if not best:
        files = {frame.file: source for frame in live.users if (source := live.source(frame)) is not None}
        functions = [(s, node) for s in files.values() for node in nodes_in(s.tree, ast.FunctionDef)]
        made = [
            one
            for s, node in functions
            for one in _writes_in(s, node)
            if wanted and (wanted in one.made or _is_last(one, damage))
        ]
        made = made or list(_inplace_modules(live, wanted))
        if made:
            return made[-1]
    chosen = [one for one in found if weight(one) == best]
    return chosen[-1] if chosen and (best or len({(one.file, one.line) for one in chosen}) == 1) else None


def _inplace_modules(live: Live, maker: str) -> Iterator[Write]:
    """Modules with ``inplace=True`` right behind the one in a Sequential that made the tensor."""
    for parent in live.modules():
        children = list(parent.children()) if isinstance(parent, torch.nn.Sequential) else []
        for before, after in itertools.pairwise(children):
            if getattr(after, "inplace", False) and type(before).__name__.lower() == maker:
                name, cls = live.module_name(after), type(after).__name__
                yield Write("", "", 0, f"{cls}(inplace=True)", f"{name}: nn.{cls}(inplace=False)", module=name)


def _writes(live: Live) -> Iterator[Write]:
    """The lines of the user's frames and of the forwards of their modules that write to tensors."""
    seen: set[tuple[str, int]] = set()
    for module in live.modules():
        source, scope = function_of(live, type(module).forward)
        if source is not None and scope is not None and (source.file, scope.lineno) not in seen:
            seen.add((source.file, scope.lineno))
            yield from _writes_in(source, scope, module, live.module_name(module))
    for frame in live.users:
        own = live.source(frame)
        if own is not None:
            yield from _writes_in(own, own.function(frame.line))


def _writes_in(source: Source, scope: ast.AST, owner: Any = None, module: str = "") -> Iterator[Write]:
    made: dict[str, frozenset[str]] = {}
    statements = simple_statements(scope)
    in_lines = Counter(one.lineno for one in statements)
    for statement in statements:
        code = source.text(statement.lineno)
        if in_lines[statement.lineno] > 1:
            code = ast.get_source_segment("".join(source.lines), statement) or code
        for path, instead, op in _written(statement, owner):
            yield Write(path, source.file, statement.lineno, code, instead, made.get(path, frozenset()), module, op)
        if isinstance(statement, ast.Assign):
            names = {_class_of(node, owner) for node in nodes_in(statement.value, ast.Call)}
            made |= dict.fromkeys(targets(statement), frozenset(names))


def _written(statement: ast.stmt, owner: Any) -> Iterator[tuple[str, str, str]]:
    """What a statement writes to in place, code that does not, and the operation that writes."""
    if isinstance(statement, ast.AugAssign) and type(statement.op) in _SYMBOLS:
        path, value = ast.unparse(statement.target), ast.unparse(statement.value)
        if isinstance(statement.target, ast.Subscript):
            base = ast.unparse(statement.target.value)
            yield base, f"{base} = {base}.clone()  # then change the copy", "copyslices"
        else:
            yield path, f"{path} = {path} {_SYMBOLS[type(statement.op)]} {value}", _OPS.get(type(statement.op), "")
    elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        base = ast.unparse(statement.targets[0].value)
        yield base, f"{base} = {base}.clone(); {ast.unparse(statement)}", "copyslices"
    for node in nodes_in(statement, ast.Call):
        name = called(node)
        if name.endswith("_") and not name.endswith("__") and isinstance(node.func, ast.Attribute):
            path = path_of(node.func.value) or (loads(node.func.value) or [""])[0]
            function = path in ("F", "torch", "nn.init", "torch.nn.functional") and node.args
            path = path_of(node.args[0]) if function else path
            instead = f"{path} = {ast.unparse(node).replace(f'{name}(', f'{name[:-1]}(', 1)}"
            yield path, instead, name.replace("_", "").lower()
        elif node.args and (
            any(k.arg == "inplace" and isinstance(k.value, ast.Constant) and k.value.value for k in node.keywords)
            or getattr(_module_called(node, owner), "inplace", False)
        ):
            path = path_of(node.args[0]) or (loads(node.args[0]) or [""])[0]
            yield path, f"inplace=False for {ast.unparse(node.func)}", _class_of(node, owner)


def _module_called(node: ast.Call, owner: Any) -> Any:
    path = path_of(node.func)
    known = owner is not None and path.startswith("self.")
    return dict(owner.named_modules()).get(path.removeprefix("self.")) if known else None


def _class_of(node: ast.Call, owner: Any) -> str:
    module = _module_called(node, owner)
    return called(node).lower().rstrip("_") if module is None else type(module).__name__.lower()


def leaf(live: Live, match: "re.Match[str]") -> Answer | None:
    """The leaf that the user's line writes to."""
    if live.user is None:
        return None
    statements = here[0].statements(here[1]) if (here := live.here()) else []
    paths = [path for one in statements for path, _, _ in _written(one, None) if path]
    tensors = [(path, one) for path in paths if isinstance(one := live.read(path), torch.Tensor)]
    leaves = [(path, one) for path, one in tensors if one.is_leaf or one._base is not None]
    found = [*(one for one in leaves if one[1].requires_grad), *leaves]
    path, tensor = found[0] if found else ("".join(paths[:1]), None)
    name = live.parameter_name(tensor) if tensor is not None else ""
    return answer(
        path=quoted(path) or "A tensor", named=f" (the parameter {name})" if name and name != path else "",
        line=live.code(), module=name.rpartition(".")[0], parameters=filter(None, [name]),
        tensor=" ".join(filter(None, (path, shape(tensor) if tensor is not None else ""))),
    )  # fmt: skip
