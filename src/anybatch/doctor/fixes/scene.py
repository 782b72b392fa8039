"""What a fix is made from: a finding, the facts of its run, and the user's files; and the table of who makes which."""

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from anybatch.doctor.crashing.usercode import called, nodes_in
from anybatch.doctor.fixes.source import Change, Edit, UnclearEdit, UserSource, only, receiver
from anybatch.records.events import Backward, Stepped
from anybatch.records.findings import Finding, is_code
from anybatch.records.lines import Placed
from anybatch.records.runs import Run
from anybatch.records.tables import OptimizerFacts

_T = TypeVar("_T")
Maker = Callable[["Scene"], Iterator[Edit]]
MAKERS: dict[str, list[Maker]] = {}
"""For names of findings what makes their edits, the likeliest first."""


def edits_of(*names: str) -> Callable[[Maker], Maker]:
    """Puts a function into the table."""

    def registered(make: Maker) -> Maker:
        for name in names:
            MAKERS.setdefault(name, []).append(make)
        return make

    return registered


class Scene:
    """One finding with what belongs to it; ``read`` raises ``UnclearEdit`` for a file that is not the user's."""

    def __init__(self, finding: Finding, run: Run, read: Callable[[str], UserSource]) -> None:
        self.finding = finding
        self.run = run
        self.read = read

    def number(self, name: str) -> float:
        """A number of the evidence."""
        value = self.finding.evidence.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UnclearEdit(f"the evidence has no {name}")
        return value

    @property
    def source(self) -> UserSource:
        """The file of the finding."""
        return self.read(self.finding.place.file)

    @property
    def files(self) -> list[str]:
        """The file of the finding, and those of the models."""
        every = (self.finding.place.file, *(root.file for root in self.run.roots.values()))
        return [one for one in dict.fromkeys(every) if one]

    @property
    def statement(self) -> ast.stmt:
        """The statement of the finding."""
        return self.source.statement(self.finding.place.line)

    @property
    def fix(self) -> list[ast.stmt]:
        """The fix as it is printed, if it is code that needs nothing filled in."""
        if not is_code(self.finding.fix):
            raise UnclearEdit("the fix is no code")
        body = ast.parse(self.finding.fix).body
        nodes = [node for one in body for node in ast.walk(one)]
        if not body or any(isinstance(node, ast.Constant) and node.value is ... for node in nodes):
            raise UnclearEdit("the fix has to be filled in")
        return body

    @property
    def code(self) -> str:
        """The text of a fix that is one statement, without its comment."""
        only(self.fix, "statements of the fix")
        return self.finding.fix.split("  #")[0].rstrip()

    def call(self, method: str) -> ast.Call:
        """The call of a method that the fix is."""
        code = only(self.fix, "statements of the fix")
        if not isinstance(code, ast.Expr) or not isinstance(code.value, ast.Call) or called(code.value) != method:
            raise UnclearEdit(f"the fix is no call of {method}")
        return code.value

    def origin(self) -> tuple[UserSource, ast.stmt]:
        """Where what crashed later was made, as the evidence says."""
        file, line = self.finding.evidence.get("origin_file"), self.finding.evidence.get("origin_line")
        if not isinstance(file, str) or not isinstance(line, int):
            raise UnclearEdit("the evidence has no origin")
        return self.at(file, line)

    def at(self, file: str, line: int) -> tuple[UserSource, ast.stmt]:
        """A file and the statement at one of its lines."""
        source = self.read(file)
        return source, source.statement(line)

    def optimizer(self) -> OptimizerFacts:
        """The optimizer of the finding: the only one of its name, or the one that steps when it begins."""
        known = list(self.run.optimizers.values())
        named = [one for one in known if one.variable == self.finding.place.optimizer] or known
        lines = {(one.file, one.line) for one in named}
        if len(named) > 1 and len(lines) > 1:
            numbers = {one.optimizer for one in named}
            begins = next((one.optimizer for one in self.run.of(Stepped)
                           if one.at >= self.finding.at and one.optimizer in numbers), None)  # fmt: skip
            together = len({one.variable for one in named}) > 1
            named = named if together else [one for one in named if one.optimizer == begins]
        return named[-1] if len(lines) == 1 else only(named, "optimizers")

    def construction(self) -> tuple[UserSource, ast.stmt, ast.Call]:
        """Where the optimizer is made: file, statement, and call."""
        facts = self.optimizer()
        if not facts.is_made_there or not facts.file:
            raise UnclearEdit("it is not known where the optimizer is made")
        source, statement = self.at(facts.file, facts.line)
        return source, statement, source.one_call(statement, facts.cls)

    def stepping(self) -> tuple[UserSource, ast.stmt, str]:
        """Where the optimizer steps: file, statement, and what it is called there."""
        number = self.optimizer().optimizer
        source, statement = self.commonest(one for one in self.run.of(Stepped) if one.optimizer == number)
        call = source.one_call(statement, "step")
        stepped = receiver(call)
        if call.args and isinstance(call.args[0], ast.Name | ast.Attribute):  # scaler.step(optimizer)
            return source, statement, source.of(call.args[0])
        return source, statement, source.of(stepped)

    def backward(self) -> tuple[UserSource, ast.stmt]:
        """Where the backward is called from most often."""
        return self.commonest(one for one in self.run.of(Backward) if one.function == "backward")

    def commonest(self, facts: Iterable[Backward | Stepped]) -> tuple[UserSource, ast.stmt]:
        """The statement that most of some events come from."""
        lines = Counter((one.file, one.line) for one in facts if one.file)
        if not lines:
            raise UnclearEdit("no such call was seen in a file of the user")
        return self.at(*lines.most_common(1)[0][0])

    def only_one(self, facts: Iterable[Placed], what: str) -> tuple[UserSource, ast.stmt]:
        """The statement that all of some events come from."""
        return self.at(*only(sorted({(one.file, one.line) for one in facts if one.file}), what))


def edits(finding: Finding, run: Run, read: Callable[[str], UserSource], most: int = 4) -> Iterator[Edit]:
    """The edits that may mend what was found, the likeliest first."""
    seen: set[str] = set()
    for make in MAKERS.get(finding.name, ()):
        made = make(Scene(finding, run, read))
        while len(seen) < most:
            try:
                edit = next(made)
            except (StopIteration, UnclearEdit):
                break
            if edit.after not in seen:
                seen.add(edit.after)
                yield edit


def each(source: UserSource, things: Iterable[_T], change: Callable[[_T], Iterable[Change]]) -> Iterator[Edit]:
    """An edit for each of some things, but for those that can't be edited."""
    for one in things:
        try:
            yield source.edit(change(one))
        except UnclearEdit:
            continue


def reader(is_users: Callable[[str], bool], edited: dict[str, str]) -> Callable[[str], UserSource]:
    """What reads the files of a user, as they are after edits."""

    @functools.cache  # nodes of one text can be compared
    def read(path: str) -> UserSource:
        if not path or not is_users(path) or not Path(path).is_file():
            raise UnclearEdit(f"{path or 'the place'} is no file of the user")
        return UserSource(path, edited.get(path))

    return read


def inner_loop(source: UserSource, statement: ast.AST) -> ast.For | ast.AsyncFor | ast.While:
    """The innermost loop of the same function that a statement is in."""
    if not (loops := source.loops_around(statement)):
        raise UnclearEdit("the statement is in no loop")
    return loops[0]


def primary(source: UserSource, node: ast.expr) -> str:
    """The text of an expression, in brackets where an attribute could not follow it."""
    text = source.of(node)
    simple = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return text if simple or (text.startswith("(") and text.endswith(")")) else f"({text})"


def nn_name(source: UserSource) -> str:
    """What the file calls ``torch.nn``."""
    plain = [one for node in nodes_in(source.tree, ast.Import) for one in node.names]
    inner = (one for node in nodes_in(source.tree, ast.ImportFrom) if node.module == "torch" for one in node.names)
    found = [one.asname or "nn" for one in inner if one.name == "nn"]
    found += [one.asname for one in plain if one.name == "torch.nn" and one.asname]
    found += ["torch.nn" for one in plain if one.name in ("torch", "torch.nn")]
    if not found:
        raise UnclearEdit("the file does not import torch.nn")
    return found[0]


def assigned(source: UserSource, name: str) -> list[tuple[ast.Assign, ast.Attribute]]:
    """The assignments to an attribute of some name, with what they assign to."""
    pairs = [(one, one.targets[0]) for one in nodes_in(source.tree, ast.Assign)]
    return [(one, to) for one, to in pairs if isinstance(to, ast.Attribute) and to.attr == name]


def methods(source: UserSource, name: str) -> list[ast.Call]:
    """The calls of a method without arguments, such as ``.detach()``."""
    found = source.calls(source.tree, name)
    return [one for one in found if isinstance(one.func, ast.Attribute) and not one.args and not one.keywords]


def within(outer: ast.AST, calls: Iterable[ast.Call]) -> list[ast.Call]:
    """Those calls that are in a node."""
    inside = set(ast.walk(outer))
    return [one for one in calls if one in inside]
