"""The user's current line and the running module."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from anybatch.tensors.graph import in_backward
from anybatch.userlines import NOT_THE_USERS

_DISTRIBUTIONS = f"{Path(torch.distributions.__file__).parent}/"


class Site(NamedTuple):
    """Where an operation ran."""

    module: str = ""  # the qualified name of the innermost module that was running, empty outside of all
    file: str = ""  # of the innermost line that is neither torch's nor this library's
    line: int = 0


NOWHERE = Site()


def _called_by_users() -> Iterator[Any]:
    """The frames between here and the user's line, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
        yield frame
        frame = frame.f_back


def distribution_drawing() -> str:
    """The class of torch's distribution whose ``sample()`` the user's line called; empty if there is none."""
    drawing = [one for one in _called_by_users() if one.f_code.co_name == "sample"]
    own = [one for one in drawing if one.f_code.co_filename.startswith(_DISTRIBUTIONS)]
    return type(own[-1].f_locals.get("self")).__name__ if own else ""


_COPYING = {"__deepcopy__": "deepcopy", "_save_to_state_dict": "state_dict"}


def copying() -> str:
    """What the user's line called that makes other tensors with the values of parameters; empty if nothing did."""
    return next((_COPYING[one.f_code.co_name] for one in _called_by_users() if one.f_code.co_name in _COPYING), "")


class CustomForward(NamedTuple):
    """The running forward of an ``autograd.Function``."""

    name: str  # of the function, ``"checkpoint"`` for a reentrant checkpoint
    context: Any  # its first argument, which becomes its node of the graph
    module: torch.nn.Module | None  # that called it, if one did


def custom_forward() -> CustomForward | None:
    """The innermost ``autograd.Function`` whose forward is running; ``None`` if there is none."""
    frame: Any = sys._getframe(1)
    context, name = None, ""
    while frame is not None:
        code = frame.f_code
        if context is None and code.co_name == "forward" and code.co_argcount:
            found = frame.f_locals.get(code.co_varnames[0])
            if isinstance(found, torch.autograd.function.FunctionCtx):
                context, name = found, type(found).__name__.removesuffix("Backward")
        elif context is not None and code.co_name == "_call_impl":
            return CustomForward(_shown(name), context, frame.f_locals.get("self"))
        frame = frame.f_back
    return CustomForward(_shown(name), context, None) if context is not None else None


def _shown(name: str) -> str:
    return "checkpoint" if name == "CheckpointFunction" else name


class Running:
    """Follows which module is running, by qualified names, the first one of a module that has several."""

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        self._names = {id(module): name for name, module in reversed(modules.items())}
        self._stack: list[str] = []
        self.ran: set[str] = set()  # the names of the modules that were called
        self.name = ""  # the name of the innermost running module

    def name_of(self, module: torch.nn.Module | None) -> str:
        """The qualified name of a module, empty if it has none."""
        return self._names.get(id(module), "")

    def attached(self) -> ExitStack:
        """Adds two global module hooks; closing the stack removes them."""
        handles = ExitStack()
        handles.callback(register_module_forward_pre_hook(self._enter).remove)
        handles.callback(register_module_forward_hook(self._leave, always_call=True).remove)
        return handles

    def _enter(self, module: Any, args: Any) -> None:
        name = self._names.get(id(module))
        if name is not None and not in_backward():
            self._stack.append(self.name)
            self.name = name
            self.ran.add(name)

    def _leave(self, module: Any, args: Any, result: Any) -> None:
        if id(module) in self._names and self._stack and not in_backward():
            self.name = self._stack.pop()
