"""Crashes of writes: to a tensor that a backward needs, to a leaf, to a view."""

import ast
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from anybatch.doctor.crashing.crashkinds import Told, kind, origin, quoted, shape
from anybatch.doctor.crashing.crashlive import Frame, Live, whose
from anybatch.doctor.crashing.crashsource import Source, called, loads, path_of, simple_statements, targets
from anybatch.doctor.crashing.crashtwice import detached, kept_over, losses_of, stepped_in
from anybatch.doctor.graphs import nodes_behind

_MODIFIED = r"^one of the variables needed for gradient computation has been modified by an inplace operation: (.*)"
_SHAPE = re.compile(r"\[[\w.]+ \[([\d, ]*)\]\]")
_OUTPUT = re.compile(r"output \d+ of (\w+?)(?:Backward\d*)?[,\s]")
_VERSIONS = re.compile(r"is at version (\d+); expected version (\d+)")
_OPS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}
_SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.MatMult: "@"}


class Write(NamedTuple):
    """A line that writes to a tensor.

    Args:
        path: the tensor.
        file: of the line.
        line: its number.
        code: its text.
        instead: code that makes a new tensor.
        made: what made the tensor before, as far as the lines above show: names of functions and classes.
        module: whose forward it is.
        op: that writes, as torch names it, in small letters.
    """

    path: str
    file: str
    line: int
    code: str
    instead: str
    made: frozenset[str]
    module: str = ""
    op: str = ""


@kind(_MODIFIED)
def saved_was_written(live: Live, match: "re.Match[str]") -> Told | None:
    """Tells which tensor was written to, and by which line."""
    text = match.group(1)
    versions = _VERSIONS.search(text)
    sizes = _SHAPE.search(text)
    output = _OUTPUT.search(text)
    maker = output.group(1) if output else ""
    size = [int(entry) for entry in sizes.group(1).split(",") if entry.strip()] if sizes else []
    version, expected = (int(versions[1]), int(versions[2])) if versions else (0, 0)
    losses = losses_of(live)
    saved, user = _damaged(losses, live.text)
    evidence = {"version": version, "expected": expected, "shape": size, "made_by": maker, "needed_by": user}
    parameters = _written_parameters(live, saved, size, maker, version)
    if parameters:
        return _by_step(live, losses, parameters, evidence)
    write = _best(live, maker, saved, user)
    name = _alias(live, saved) or (write.path if write is not None else "")
    tensor = " ".join(filter(None, (name, str(size), f"made by {maker}" if maker else "")))
    what = f"{quoted(name)} {size}" if name else f"a tensor of shape {size}"
    if write is None:
        return Told(
            name="INPLACE_ON_SAVED",
            message=f"{what}{f', which {maker} made,' if maker else ''} was written to after the forward had kept it "
            "for the backward.",
            cause=f"{user or 'An operation'} needs the old values for its gradient.",
            fix=f"Make a new tensor where {name or 'it'} is changed in place (`x = x + y` instead of `x += y`).",
            tensor=tensor,
            evidence=evidence,
        )
    made = f", which {user} needs," if user else ""
    if maker and not _is_last(write, maker, user):
        made = f", which {maker} made and {user or 'the backward'} needs,"
    return Told(
        name="INPLACE_ON_SAVED",
        message=f"{what}{made} was written to by {quoted(write.code)}.",
        cause="The gradient is computed from the old values, which are gone.",
        fix=f"{write.instead}  # instead of {quoted(write.code)}",
        module=write.module,
        tensor=tensor,
        evidence=evidence | origin(write.file, write.line, write.code),
    )


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


def _written_parameters(
    live: Live, saved: torch.Tensor | None, size: list[int], maker: str, version: int
) -> dict[str, torch.Tensor]:
    """The parameter that was written to, where it was one; the graph keeps a transposed view of a weight."""
    own = live.parameters()
    if saved is not None:
        key = _storage(saved)
        return {name: p for name, p in own.items() if key and _storage(p) == key}
    if maker not in ("", "AsStrided", "T", "Transpose"):
        return {}
    return {n: p for n, p in own.items() if p._version == version and size in (list(p.shape), list(p.shape)[::-1])}


def _by_step(live: Live, losses: list[torch.Tensor], named: dict[str, torch.Tensor], evidence: dict[str, Any]) -> Told:
    name, parameter = next(iter(named.items()))
    frame, tensor = live.user, f"{name} {shape(parameter)}"
    call = live.code(frame) if frame else "this backward"
    step = _step_before(live, frame) if frame else None
    evidence = evidence | (origin(*step) if step else {})
    by = quoted(step[2]) if step else "an optimizer's step or a copy"
    kept = next((one for one in kept_over(live, losses) if one.again), None)
    if kept is not None and "retain_graph" in call:
        source = live.source_of_file(kept.file)
        code = "" if source is None else source.text(kept.line)
        return Told(
            name="INPLACE_ON_SAVED",
            message=f"{quoted(kept.path)} still has the graph of the step before, and {by} has changed {name} since.",
            cause=f"With retain_graph=True the backward goes back into the step before, for which it needs {name} as "
            "it was then.",
            fix=f"{detached(kept)}  # before {quoted(code)}; and call backward() without retain_graph=True",
            parameters=(name,),
            module=kept.module,
            tensor=f"{kept.path}, {tensor}",
            evidence=evidence | origin(kept.file, kept.line, code),
        )
    return Told(
        name="INPLACE_ON_SAVED",
        message=f"The parameter {name} {shape(parameter)} was changed by {by} between the forward of the loss and "
        f"{quoted(call)}.",
        cause="The weights are written to in place; the backward needs them as they were in the forward.",
        fix=f"compute the loss of {quoted(call)} anew behind {by}, with a new forward; with the step behind this "
        "backward, it would use its gradients too"
        if frame and _of_another_step(live, frame, parameter)
        else f"{by} after {quoted(call)}",
        parameters=tuple(named)[:5],
        tensor=tensor,
        evidence=evidence,
    )


def _of_another_step(live: Live, frame: Frame, parameter: torch.Tensor) -> bool:
    """Whether the optimizer that steps behind a failed backward does not hold the parameter that was changed."""
    source = live.source(frame)
    loops = [] if source is None else source.loops(frame.line)
    statements = [] if source is None else simple_statements(loops[0] if loops else source.function(frame.line))
    behind = stepped_in(live, frame, [one for one in statements if one.lineno > frame.line])
    return bool(behind) and not any(id(parameter) in held for held in behind.values())


def _step_before(live: Live, frame: Frame) -> tuple[str, int, str] | None:
    source = live.source(frame)
    if source is None:
        return None
    loops = source.loops(frame.line)
    statements = simple_statements(loops[-1] if loops else source.function(frame.line))
    found = [s.lineno for s in statements if any(called(node) == "step" for node in ast.walk(s))]
    if not found:
        writes = list(_writes_in(source, loops[-1] if loops else source.function(frame.line), None, ""))
        found = [w.line for w in writes if w.line < frame.line]
    before = [line for line in found if line < frame.line] or found
    return (frame.file, before[-1], source.text(before[-1])) if before else None


def _alias(live: Live, saved: torch.Tensor | None) -> str:
    if saved is None:
        return ""
    key = _storage(saved)
    return next((p for p, one, _ in live.named() if key and _storage(one) == key and not one.is_leaf), "")


def _storage(tensor: torch.Tensor) -> int:
    try:
        return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _is_last(write: Write, maker: str, user: str) -> bool:
    """Whether torch names the write itself: of an input that was kept it tells what made it last, of an output not."""
    needing = user.partition("Backward")[0]
    keeps_output = needing == maker and write.op not in _OPS.values()
    return bool(needing) and not keeps_output and write.op == maker.lower().removesuffix("_")


def _best(live: Live, maker: str, saved: torch.Tensor | None, user: str) -> Write | None:
    """The write that fits best to what made the tensor."""
    found = list(_writes(live))
    alias, wanted = _alias(live, saved), maker.lower().removesuffix("_")
    fits = [(w, wanted != "" and (wanted in w.made or _is_last(w, maker, user))) for w in found]
    scored = [(2 * is_its + (alias != "" and w.path == alias), w) for w, is_its in fits]
    best = max((score for score, _ in scored), default=0)
    if not best:
        made = [write for write in _writes_in_helpers(live) if wanted and wanted in write.made]
        made = made or list(_inplace_modules(live, wanted))
        if made:
            return made[-1]
    chosen = [write for score, write in scored if score == best]
    return chosen[-1] if chosen and (best or len({(w.file, w.line) for w in chosen}) == 1) else None


def _writes_in_helpers(live: Live) -> Iterator[Write]:
    """The lines of all functions of the user's files that write in place."""
    sources = {source.file: source for frame in live.users if (source := live.source(frame)) is not None}
    for source in sources.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef):
                yield from _writes_in(source, node, None, "")


def _inplace_modules(live: Live, maker: str) -> Iterator[Write]:
    """Modules with ``inplace=True`` right behind the one in a Sequential that made the tensor."""
    for root in live.roots.values():
        for parent in root.modules():
            children = list(parent.children()) if isinstance(parent, torch.nn.Sequential) else []
            for before, after in itertools.pairwise(children):
                if getattr(after, "inplace", False) and type(before).__name__.lower() == maker:
                    name, cls = live.module_name(after), type(after).__name__
                    instead = f"{name}: nn.{cls}(inplace=False)"
                    yield Write("", "", 0, f"{cls}(inplace=True)", instead, frozenset(), name)


def _writes(live: Live) -> Iterator[Write]:
    """The lines of the user's frames and of the forwards of their modules that write to tensors."""
    seen: set[tuple[str, int]] = set()
    scopes: list[tuple[Source, ast.AST, Any, str]] = []
    live.module_name(None)
    for root in live.roots.values():
        for module in root.modules():
            found = forward_of(live, module)
            if found is not None and (found[0].file, found[1].lineno) not in seen:
                seen.add((found[0].file, found[1].lineno))
                scopes.append((*found, module, live.module_name(module)))
    for frame in live.users:
        source = live.source(frame)
        if source is not None:
            scopes.append((source, source.function(frame.line), None, ""))
    for source, scope, owner, name in scopes:
        yield from _writes_in(source, scope, owner, name)


def forward_of(live: Live, module: Any) -> tuple[Source, ast.FunctionDef] | None:
    """The source of the forward of a module of the user's."""
    function = inspect.unwrap(type(module).forward)
    code = getattr(function, "__code__", None)
    if code is None or whose(code.co_filename) not in ("user", "library"):
        return None
    source = live.source_of_file(code.co_filename)
    scope = None if source is None else source.function(code.co_firstlineno + _decorators(code, source))
    return (source, scope) if source is not None and isinstance(scope, ast.FunctionDef) else None


def _decorators(code: Any, source: Source) -> int:
    """How far the ``def`` lies below the first line of a function, which may be a decorator's."""
    for number, line in enumerate(source.lines[code.co_firstlineno - 1 : code.co_firstlineno + 20]):
        if re.match(r"\s*(async\s+)?def\s", line):
            return number
    return 0


def _writes_in(source: Source, scope: ast.AST, owner: Any, module: str) -> Iterator[Write]:
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
            names = {_class_of(node, owner) for node in ast.walk(statement.value) if isinstance(node, ast.Call)}
            for path in targets(statement):
                made[path] = frozenset(names)


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
    for node in ast.walk(statement):
        name = called(node)
        if not isinstance(node, ast.Call):
            continue
        if name.endswith("_") and not name.endswith("__") and isinstance(node.func, ast.Attribute):
            path = path_of(node.func.value) or (loads(node.func.value) or [""])[0]
            function = path in ("F", "torch", "nn.init", "torch.nn.functional") and node.args
            path = path_of(node.args[0]) if function else path
            instead = f"{path} = {ast.unparse(node).replace(f'{name}(', f'{name[:-1]}(', 1)}"
            yield path, instead, name.replace("_", "").lower()
        elif node.args and (_is_inplace(node) or _inplace_module(node, owner)):
            path = path_of(node.args[0]) or (loads(node.args[0]) or [""])[0]
            yield path, f"inplace=False for {ast.unparse(node.func)}", _class_of(node, owner)


def _is_inplace(node: ast.Call) -> bool:
    return any(k.arg == "inplace" and isinstance(k.value, ast.Constant) and k.value.value for k in node.keywords)


def _module_called(node: ast.Call, owner: Any) -> Any:
    path = path_of(node.func)
    if owner is None or not path.startswith("self."):
        return None
    return dict(owner.named_modules()).get(path.removeprefix("self."))


def _inplace_module(node: ast.Call, owner: Any) -> bool:
    return bool(getattr(_module_called(node, owner), "inplace", False))


def _class_of(node: ast.AST, owner: Any) -> str:
    module = _module_called(node, owner) if isinstance(node, ast.Call) else None
    return called(node).lower().rstrip("_") if module is None else type(module).__name__.lower()


@kind(r"^a (view of a )?leaf Variable that requires grad is being used in an in-place operation")
def leaf_was_written(live: Live, _: Any) -> Told | None:
    """Tells which leaf was written to."""
    frame = live.user
    if frame is None:
        return None
    source = live.source(frame)
    statements = [] if source is None else source.statements(frame.line)
    paths = [path for one in statements for path, _, _ in _written(one, None) if path]
    tensors = [(path, live.value(frame, ast.parse(path, mode="eval").body)) for path in paths]
    leaves = [(p, t) for p, t in tensors if isinstance(t, torch.Tensor) and (t.is_leaf or t._base is not None)]
    leaf = next((one for one in leaves if one[1].requires_grad), leaves[0] if leaves else None)
    path, tensor = leaf or ((tensors[0][0] if tensors else ""), None)
    name = live.parameter_name(tensor) if tensor is not None else ""
    owner = name.rpartition(".")[0] if name else ""
    return Told(
        name="LEAF_INPLACE",
        message=f"{quoted(path) or 'A tensor'}{f' (the parameter {name})' if name and name != path else ''} is a leaf "
        "that requires a gradient, and is written to while autograd is on.",
        cause="A value that training computes a gradient for must not be replaced within the graph.",
        fix=f"with torch.no_grad():\n    {live.code(frame)}",
        module=owner,
        parameters=(name,) if name else (),
        tensor=" ".join(filter(None, (path, shape(tensor) if tensor is not None else ""))),
    )
