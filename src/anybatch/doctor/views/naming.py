"""Texts and code in the user's own names: variables, modules, parameters, lines."""

import re
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Protocol, runtime_checkable

from anybatch.records.events import Forward
from anybatch.records.findings import Place
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run, grouped
from anybatch.records.tables import ModuleFacts, OptimizerFacts, ParameterFacts


def listed(names: Iterable[str], limit: int = 3) -> str:
    """Some names in a row, and how many more there are: ``"a, b, c and 2 more"``."""
    every = list(names)
    more = len(every) - limit
    return ", ".join(every) if more <= 0 else f"{', '.join(every[:limit])} and {more} more"


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun: ``"1 step"``, ``"2 steps"``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


class Names(tuple[str, ...]):
    """Names of the user's, which a text shows in a row, or which choose the form of its verb.

    Example:
        >>> names = Names(["a", "b", "c", "d"])
        >>> f"{names} {names:gets|get} a gradient", f"{Names('a'):gets|get}"
        ('a, b, c and 1 more get a gradient', 'gets')
    """

    __slots__ = ()

    def __format__(self, forms: str) -> str:
        one, _, several = forms.partition("|")
        return (one if len(self) == 1 else several) if forms else listed(self)

    def __str__(self) -> str:
        return listed(self)


@runtime_checkable
class Located(Protocol):
    """What has a line of the user's."""

    @property
    def file(self) -> str:
        """Of the line."""

    @property
    def line(self) -> int:
        """Its number."""


def near(one: Located | None) -> str:
    """The place of a fact in words, with a blank in front; empty where it is not known."""
    return at_line(one.file, one.line) if one is not None else ""


def at_line(file: str, line: int) -> str:
    """A place in the user's code in words, with a blank in front; empty where it is not known."""
    return f" ({PurePath(file).name}:{line})" if file else ""


def as_code(name: str) -> str:
    """A qualified name as an expression: numbers become indices.

    Example:
        >>> as_code("encoder.0.weight"), as_code("layers[1].bias"), as_code("0")
        ('encoder[0].weight', 'layers[1].bias', '[0]')
    """
    return re.sub(r"(^|\.)(\d+)(?=$|[.\[])", r"[\2]", name)


def root_variable(run: Run, root: int) -> str:
    """What the user's code calls a root, ``"model"`` where it is not known."""
    found = run.roots.get(root)
    return found.variable if found is not None and found.variable else "model"


def module_code(run: Run, root: int, module: str) -> str:
    """An expression for a module, such as ``model.encoder[0]``."""
    inner = as_code(module)
    return root_variable(run, root) + ("" if not inner or inner.startswith("[") else ".") + inner


def qualified(run: Run, root: int, module: str) -> str:
    """The name of a module as findings show it: with the variable of its root in front where there are several."""
    if root in run.roots and (len(run.roots) > 1 or module[:1].isdigit()):
        variable = root_variable(run, root)
        return f"{variable}.{module}" if module else variable
    return module or root_variable(run, root)


def parameter_name(run: Run, parameter: ParameterFacts) -> str:
    """The first name of a parameter; one that begins with a number has the variable of its root in front."""
    if parameter.root in run.roots and parameter.name[:1].isdigit():
        return f"{root_variable(run, parameter.root)}.{parameter.name}"
    return parameter.name


def optimizer_variable(run: Run, number: int) -> str:
    """What the user's code calls an optimizer, ``"optimizer"`` where it is not known."""
    found = run.optimizers.get(number)
    return found.variable if found is not None and found.variable else "optimizer"


def names_of(run: Run, numbers: Iterable[int]) -> Names:
    """The first names of parameters, in the order of their numbers."""
    return Names(parameter_name(run, run.parameters[number]) for number in sorted(numbers) if number in run.parameters)


def common_module(run: Run, numbers: Iterable[int]) -> tuple[int, str]:
    """The root and the innermost module that has all of some parameters; -1 where they lie in several roots or none."""
    found = [run.parameters[number] for number in numbers if number in run.parameters]
    roots = {one.root for one in found}
    if len(roots) != 1:
        return -1, ""
    return roots.pop(), shared_path([one.module for one in found])


def shared_path(names: Iterable[str]) -> str:
    """The innermost module that has all of some modules, or is the only one.

    Example:
        >>> shared_path(["encoder.0.norm", "encoder.0.linear"]), shared_path(["head"])
        ('encoder.0', 'head')
    """
    shared: list[str] = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def parameters_code(run: Run, numbers: Iterable[int], optimizer: str = "optimizer", limit: int = 4) -> str:
    """An expression for parameters that an optimizer lacks, which can be given to it as it stands.

    By whole modules where nothing else is in them, else by name: ``model.head.parameters()``,
    ``[*model.a.parameters(), model.scale]``. Many of them are those of the model that the optimizer has not.
    """
    wanted = {number for number in numbers if number in run.parameters}
    owners = _by_module(run, wanted)
    parts: list[str] = []
    left = set(wanted)
    for number in sorted(wanted):
        if number not in left:
            continue
        one = run.parameters[number]
        whole = next((key for key in _around(one.root, one.module) if owners.get(key, {-1}) <= left), None)
        last = one.name.rpartition(".")[2]
        path = f"{one.module}.{last}" if one.module else last
        parts.append(f"*{module_code(run, *whole)}.parameters()" if whole else module_code(run, one.root, path))
        left -= owners[whole] if whole else {number}
    roots = {run.parameters[number].root for number in wanted}
    if len(parts) > limit and len(roots) == 1 and len(run.optimizers) == 1:
        every = f"{root_variable(run, roots.pop())}.parameters()"
        held = f'all(p is not q for group in {optimizer}.param_groups for q in group["params"])'
        return f"[p for p in {every} if p.requires_grad and {held}]"
    if len(parts) == 1 and parts[0].startswith("*"):
        return parts[0][1:]
    return f"[{', '.join(parts)}]" if parts else "model.parameters()"


def _around(root: int, module: str) -> list[tuple[int, str]]:
    """A root and the modules that a module lies in, itself last."""
    names = module.split(".") if module else []
    return [(root, ".".join(names[:depth])) for depth in range(len(names) + 1)]


def _by_module(run: Run, wanted: set[int]) -> dict[tuple[int, str], set[int]]:
    """What each module has, with all that is below it, of parameters that are wanted, trainable or in an optimizer."""
    held = {number for one in run.optimizers.values() for group in one.groups for number in group.parameters}
    wide = wanted | held | {number for number, one in run.parameters.items() if one.requires_grad}
    found: dict[tuple[int, str], set[int]] = {}
    places = [(number, one.root, one.module) for number, one in run.parameters.items() if one.root >= 0]
    places += [  # one that is tied is in several
        (number, root.root, module.name)
        for root in run.roots.values()
        for module in root.modules
        for number in module.parameters
    ]
    for number, root, module in places:
        for key in _around(root, module) if number in wide else ():
            found.setdefault(key, set()).add(number)
    return found


def module_facts(run: Run, parameter: ParameterFacts) -> ModuleFacts | None:
    """What is known of the module that owns a parameter."""
    root = run.roots.get(parameter.root)
    if root is None:
        return None
    return next((one for one in root.modules if one.name == parameter.module), None)


def made_at(facts: OptimizerFacts | None) -> tuple[str, int]:
    """The file and the line where an optimizer was made."""
    return (facts.file, facts.line) if facts is not None else ("", 0)


def first_call(run: Run, root: int) -> Forward | None:
    """The first call of a model with a gradient."""
    return next((one for one in run.of(Forward) if one.root == root and one.grad), None)


def by_line(run: Run, keep: Callable[[LossCall], bool] | None = None) -> dict[tuple[str, int, str], list[LossCall]]:
    """Calls of loss functions by the user's line."""
    found = grouped(
        ((call.file, call.line, call.function), call) for call in run.of(LossCall) if keep is None or keep(call)
    )
    for key in [key for key in found if not key[0] or key[0].startswith("<")]:
        known = next((other for other in found if other[2] == key[2] and other[0][:1] not in ("", "<")), None)
        if known is not None:  # a line that could not be found is that of the other calls
            found[known] = sorted(found[known] + found.pop(key), key=lambda one: one.at)
    return found


def loss_place(run: Run, call: LossCall) -> Place:
    """Where a loss was computed."""
    same = [one for one in run.of(LossCall) if one.function == call.function and one.file[:1] not in ("", "<")]
    line = call if call.file[:1] not in ("", "<") or not same else same[0]
    return Place(module=qualified(run, call.root, call.module) if call.module else "", file=line.file, line=line.line)
