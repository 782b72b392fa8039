"""What was alive when a script crashed: frames, the user's line, and the names of tensors and modules there."""

import ast
import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from anybatch.doctor.crashing.usercode import Source, called, loads, nodes_in, simple_statements, source_of
from anybatch.userlines import OWN, TORCHS, USERS, whose_file

_OPTIMIZED = 0x1  # the flag of a function's code, whose locals are a copy
_MODULES_OWN = frozenset(vars(torch.nn.Module()))
_MOST = 2000  # tensors that are looked at by name
_DEPTH = 3


class Frame(NamedTuple):
    """A frame of the traceback."""

    file: str  # of its code
    line: int  # that was running
    function: str
    values: Mapping[str, Any]  # its locals, as they were
    names: dict[str, Any]  # its globals
    whose: str  # ``"user"``, ``"library"``, ``"torch"`` or ``"ours"``
    code: CodeType | None = None  # that was running
    # first and last line, first and last column of the expression that was running
    span: tuple[int | None, int | None, int | None, int | None] | None = None


class Live:
    """The state of a crash; close it, so that nothing is kept alive."""

    def __init__(self, error: BaseException, doctor: Any = None) -> None:
        self.error, self.doctor, self.text = error, doctor, str(error)
        self.frames: list[Frame] = []  # the outermost first
        self._raw: list[FrameType] = []
        self._sources: dict[str, Source | None] = {}
        self._modules: dict[int, str] | None = None
        self._parameters: dict[int, str] = {}
        self.roots: dict[str, torch.nn.Module] = {}
        step = error.__traceback__
        while step is not None:
            frame = step.tb_frame
            file = frame.f_code.co_filename
            self._raw.append(frame)
            code = frame.f_code
            span = next(itertools.islice(code.co_positions(), step.tb_lasti // 2, None), None)
            self.frames.append(
                Frame(file, step.tb_lineno, code.co_name, frame.f_locals, frame.f_globals, whose(file), code, span)
            )
            step = step.tb_next
        theirs = [frame for frame in self.frames if frame.whose == "user"]
        others = [frame for frame in self.frames if frame.whose == "library"]
        # the innermost frame of the user's code, if there is one
        self.user: Frame | None = (theirs or others)[-1] if theirs or others else None
        self.users: list[Frame] = theirs or others[-1:]

    def close(self) -> None:
        """Lets go of the frames, and of the copies of locals that looking at them has made."""
        self.user, self.users = None, []
        self.frames.clear()
        self.roots.clear()
        self._sources.clear()
        self.error = None  # type: ignore[assignment]
        if sys.version_info < (3, 13):
            for raw in self._raw:
                if raw.f_code.co_flags & _OPTIMIZED:
                    values = raw.f_locals
                    if sys.getrefcount(values) <= 3:  # more: the user's own code holds what locals() gave it
                        values.clear()
        self._raw.clear()

    def source(self, frame: Frame) -> Source | None:
        """The source of a frame's file."""
        return self.source_of_file(frame.file, frame.names)

    def source_of_file(self, file: str, names: dict[str, Any] | None = None) -> Source | None:
        """The source of a file."""
        if file not in self._sources:
            self._sources[file] = source_of(file, names)
        return self._sources[file]

    def here(self) -> tuple[Source, int] | None:
        """The source of the user's frame, and the line; ``None`` where there is none."""
        source = None if self.user is None else self.source(self.user)
        return None if self.user is None or source is None else (source, self.user.line)

    def code(self) -> str:
        """The text of the user's statement."""
        return here[0].text(here[1]) if (here := self.here()) else ""

    def statement(self) -> ast.stmt | None:
        """The statement of the user's that was running."""
        return here[0].innermost(here[1]) if (here := self.here()) else None

    def round(self) -> list[ast.stmt]:
        """The statements of the innermost loop around the user's line, or of its function."""
        return simple_statements(here[0].round(here[1])) if (here := self.here()) else []

    def scope(self) -> list[ast.stmt]:
        """The statements of the function around the user's line."""
        return simple_statements(here[0].function(here[1])) if (here := self.here()) else []

    def at(self, node: Any, file: str = "") -> tuple[str, int, str]:
        """The file, line and code of a node of the user's file, or of a line's number."""
        file = file or (self.user.file if self.user is not None else "")
        source, line = self.source_of_file(file), getattr(node, "lineno", node)
        return file, line, "" if source is None else source.text(line)

    def read(self, path: str, frame: Frame | None = None) -> Any:
        """What a path such as ``self.name`` means, in the user's frame unless told otherwise."""
        frame = frame or self.user
        return None if frame is None or not path else self.value(frame, ast.parse(path, mode="eval").body)

    def line_reads(self) -> list[tuple[str, Any]]:
        """The paths that the user's line reads, with their values."""
        return [(path, self.read(path)) for path in loads(self.statement())]

    def calls(self) -> list[ast.Call]:
        """The calls in the user's line, the outermost first."""
        return list(nodes_in(self.statement(), ast.Call))

    def called(self, name: str) -> ast.Call | None:
        """The call of a name in the user's line."""
        return next((one for one in self.calls() if called(one) == name), None)

    def modules(self) -> list[torch.nn.Module]:
        """All modules of the models in the user's frames."""
        self._find_roots()
        return [module for root in self.roots.values() for module in root.modules()]

    def label(self, value: Any, unknown: str = "") -> str:
        """The text by which the user's frames read a tensor."""
        return next((path for path, one, _ in self.named() if one is value), unknown)

    def local(self, function: str, *names: str) -> Any:
        """A local of the innermost frame of a function that is torch's; ``None`` if there is none."""
        for frame in reversed(self.frames):
            if frame.whose == "torch" and frame.function == function:
                for name in names:
                    if name in frame.values:
                        return frame.values[name]
        return None

    def module(self) -> torch.nn.Module | None:
        """The innermost module that was running."""
        return next(iter(self.running()), None)

    def running(self) -> Iterator[torch.nn.Module]:
        """The modules that were running, the innermost first, each once."""
        seen: set[int] = set()
        for frame in reversed(self.frames):
            if frame.function in ("forward", "_call_impl", "_wrapped_call_impl"):
                own = frame.values.get("self")
                if isinstance(own, torch.nn.Module) and id(own) not in seen:
                    seen.add(id(own))
                    yield own

    def module_name(self, module: Any) -> str:
        """The user's name of a module, empty if it is not known; that of a model is its variable."""
        self._find_roots()
        numbering = getattr(self.doctor, "numbering", None)
        if numbering is not None and isinstance(module, torch.nn.Module) and numbering.root_of(module) is not None:
            model = numbering.models[numbering.root_of(module)]
            name, of = str(numbering.module_name(module)), model.variable or type(module).__name__
            return f"{of}.{name}" if name.isdigit() else name or of  # of a ``Sequential``
        return (self._modules or {}).get(id(module), "")

    def parameter_name(self, parameter: Any) -> str:
        """The user's name of a parameter or buffer of a module, empty if it is in none."""
        self._find_roots()
        numbering = getattr(self.doctor, "numbering", None)
        if numbering is not None and isinstance(parameter, torch.Tensor):
            number = numbering.known(parameter)
            if number is not None and numbering.facts(number).root >= 0:
                return str(numbering.name(number))
        return self._parameters.get(id(parameter), "")

    def parameters(self) -> dict[str, torch.Tensor]:
        """All parameters of the models that were found, by name."""
        self._find_roots()
        found: dict[str, torch.Tensor] = {}
        numbering = getattr(self.doctor, "numbering", None)
        if numbering is not None:
            for number, tensor in numbering.tracked():
                if numbering.facts(number).root >= 0:
                    found[str(numbering.name(number))] = tensor
        for root in self.roots.values():
            for parameter in root.parameters():
                found.setdefault(self.parameter_name(parameter), parameter)
        return found

    def name_of(self, value: Any) -> str:
        """What the user's code calls a value, the innermost name first; empty if it has none."""
        return self.parameter_name(value) or self.label(value)

    def variable_of(self, value: Any) -> str:
        """The plain variable or attribute that holds any value, such as an optimizer; empty if there is none."""
        for frame in reversed(self.users) if value is not None else ():
            for name, one in frame.values.items():
                if one is value:
                    return str(name)
            for name, one in frame.values.items():
                for attribute, inner in attributes(one) if not isinstance(one, torch.Tensor) else ():
                    if inner is value:
                        return f"{name}.{attribute}"
        return ""

    def tools(self) -> dict[str, str]:
        """The user's variables of an optimizer, a scaler and a scheduler, those that the line reads first."""
        classes = (torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
        names = ("optimizer", "scaler", "scheduler")
        held = [*self.line_reads(), *(pair for frame in reversed(self.users) for pair in _held(frame))]
        return {
            name: next((path for path, one in held if isinstance(one, cls)), name)
            for name, cls in zip(names, classes, strict=True)
        }

    def named(self) -> Iterator[tuple[str, torch.Tensor, Frame]]:
        """Tensors in the user's frames with the text that reads them, the innermost frame first."""
        seen: set[int] = set()
        for frame in reversed(self.users):
            for name, value in list(frame.values.items()):
                if not name.startswith("__"):
                    for path, tensor in tensors_in(name, value):
                        if len(seen) < _MOST:
                            seen.add(id(tensor))
                            yield path, tensor, frame

    def value(self, frame: Frame, node: ast.AST | None) -> Any:
        """What a plain expression means in a frame, without running any code of the user's; ``None`` if unknown."""
        if isinstance(node, ast.Name):
            return frame.values.get(node.id, frame.names.get(node.id))
        if isinstance(node, ast.Attribute):
            owner = self.value(frame, node.value)
            if isinstance(owner, torch.Tensor):
                return owner.detach() if node.attr == "data" else None
            return dict(attributes(owner)).get(node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner, key = self.value(frame, node.value), node.slice.value
            if isinstance(owner, torch.nn.ModuleDict):
                owner = dict(owner.items())
            if type(owner) is dict:
                return owner.get(key)
            if type(owner) in (list, tuple) or isinstance(owner, torch.nn.ModuleList | torch.nn.Sequential):
                return owner[key] if isinstance(key, int) and -len(owner) <= key < len(owner) else None
        return None

    def _find_roots(self) -> None:
        if self._modules is not None:
            return
        self._modules = {}
        found: dict[int, tuple[str, torch.nn.Module]] = {}
        for path, one in (pair for frame in self.users for pair in _held(frame)):
            if isinstance(one, torch.nn.Module):
                found.setdefault(id(one), (path, one))
        inner = {id(m) for _, root in found.values() for m in root.modules() if m is not root}
        tops = [(path, root) for key, (path, root) in found.items() if key not in inner]
        several = sum(1 for _, root in tops if any(True for _ in root.parameters())) > 1
        for path, root in tops:
            self.roots[path] = root
            for name, module in root.named_modules():
                self._modules.setdefault(id(module), ".".join(filter(None, (path if several else "", name))) or path)
            for name, tensor in (*root.named_parameters(), *root.named_buffers()):
                self._parameters.setdefault(id(tensor), f"{path}.{name}" if several else name)


def whose(file: str) -> str:
    """Whose code a file is: ``"user"``, ``"library"``, ``"torch"`` or ``"ours"``."""
    if file.startswith(TORCHS):
        return "torch"
    if file.startswith((OWN, "<anybatch")):  # the recorder's wrappers bear no path
        return "ours"
    return "user" if whose_file(file) == USERS else "library"


def tensors_in(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in a value of the user's and in what it holds, with the text that reads them."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth < _DEPTH and type(value) in (list, tuple):
        for position, entry in enumerate(value[:50]):
            yield from tensors_in(f"{path}[{position}]", entry, depth + 1)
    elif depth < _DEPTH and isinstance(value, dict) and len(value) <= 200:
        for key, entry in list(dict.items(value)):
            yield from tensors_in(f"{path}[{key!r}]", entry, depth + 1)
    elif depth == 0 and re.fullmatch(r"\w+", path):
        for name, entry in attributes(value):
            if not isinstance(entry, torch.nn.Module):
                yield from tensors_in(f"{path}.{name}", entry, depth + 1)


def _held(frame: Frame) -> Iterator[tuple[str, Any]]:
    """What a frame's variables hold by their paths, and what the objects among it hold."""
    for name, value in list(frame.values.items()):
        yield name, value
        yield from ((f"{name}.{key}", inner) for key, inner in _objects(value))


def _objects(value: Any) -> list[tuple[str, Any]]:
    """Attributes of an object of the user's that is neither a module nor torch's."""
    if isinstance(value, torch.nn.Module | torch.Tensor | type):
        return []
    if type(value) in (list, tuple):
        return [(str(position), entry) for position, entry in enumerate(value[:20])]
    return attributes(value) if not type(value).__module__.startswith(("torch.", "builtins")) else []


def attributes(value: Any) -> list[tuple[str, Any]]:
    """Attributes that are simply there; nothing of the user's runs."""
    if isinstance(value, type) or type(value).__name__ == "module":
        return []
    try:
        own = dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return []
    if isinstance(value, torch.nn.Module):
        tables = [own.get(table) or {} for table in ("_parameters", "_buffers", "_modules")]
        own = {name: entry for name, entry in own.items() if name not in _MODULES_OWN}
        for table in tables:
            own.update(table)
    return [(name, entry) for name, entry in own.items() if isinstance(name, str) and not name.startswith("__")]
