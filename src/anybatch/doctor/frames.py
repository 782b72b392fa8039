"""Tracebacks as they would be without the doctor, and whether an exception in the doctor's code is the user's."""

import functools
import linecache
import opcode
import os
import signal
import sys
import traceback
import types
from typing import Any

_DOCTOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")  # noqa: PTH100, PTH118, PTH120 - no pathlib here
_CHILD = os.path.join(os.path.dirname(_DOCTOR[:-1]), "cli", "doctor_child.py")  # noqa: PTH118, PTH120
_CALLED_BY_USERS = frozenset({"following", "graphs", "paths", "seeing", "sites", "values"})
"""Modules of ``anybatch.why``, whose frames are in the user's traceback without the doctor, too."""
_DIRECT_CALL = "return forward_call(*args, **kwargs)"
"""The line on which ``Module._call_impl`` calls the forward of a module without hooks."""
_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


def kept(first: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the doctor's frames, and with module calls as they would be without its hooks."""
    entries: list[tuple[types.FrameType, int, int]] = []
    one, again = first, None
    while one is not None:
        frame = one.tb_frame
        if _is_own(frame.f_code):
            while entries and entries[-1][0].f_code.co_name == "handle_torch_function":
                entries.pop()  # by which a function of torch was handed to a mode of the doctor's, and
                again = entries[-1][0].f_code if entries else None  # is called once more by it
        else:
            if frame.f_code is again:
                entries.pop()
            again = None
            direct = _direct_call(frame, one.tb_next)
            entries.append((frame, *direct) if direct else (frame, one.tb_lasti, one.tb_lineno))
            if direct and one.tb_next is not None:
                one = one.tb_next  # the function that calls the hooks
        one = one.tb_next
    found = None
    for entry in reversed(entries):
        found = types.TracebackType(found, *entry)
    return found


def _is_own(code: types.CodeType) -> bool:
    file = code.co_filename
    if file == _CHILD or file.startswith("<anybatch "):
        return True
    return file.startswith(_DOCTOR) and file[len(_DOCTOR) :].removesuffix(".py") not in _CALLED_BY_USERS


def _direct_call(frame: types.FrameType, after: types.TracebackType | None) -> tuple[int, int] | None:
    """Where ``Module._call_impl`` would have called the forward itself, if it is only the doctor that has hooks."""
    code = frame.f_code
    if code.co_name != "_call_impl" or after is None or after.tb_frame.f_code.co_name != "inner":
        return None
    modules = sys.modules.get("torch.nn.modules.module")
    module = frame.f_locals.get("self")
    if modules is None or code.co_filename != modules.__file__ or any(getattr(module, name, None) for name in _HOOKS):
        return None
    for name in _GLOBAL_HOOKS:
        for hook in getattr(modules, name, {}).values():
            if not str(getattr(hook, "__module__", "")).startswith("anybatch."):
                return None
    return _call_of(code)


@functools.cache
def _call_of(code: types.CodeType) -> tuple[int, int] | None:
    """The last instruction, and the number, of the line that calls the forward directly."""
    found = None
    for index, (line, *_) in enumerate(code.co_positions()):
        if line is not None and linecache.getline(code.co_filename, line).strip() == _DIRECT_CALL:
            if found is not None and found[1] != line:
                break
            if code.co_code[2 * index] == opcode.opmap.get("CALL_FUNCTION_EX"):
                found = (2 * index, line)
    return found


class HiddenFrames:
    """Hides the doctor's frames in all tracebacks that the module ``traceback`` walks.

    Its two functions that walk are replaced; all its others, ``logging`` and coloured tracebacks use these.
    """

    def __init__(self) -> None:
        self._replaced: dict[str, tuple[Any, Any]] = {}

    def put_on(self) -> None:
        """Replaces both functions."""
        for name in ("walk_tb", "_walk_tb_with_full_positions"):
            walk = getattr(traceback, name, None)
            if walk is not None:
                self._replaced[name] = (walk, _through_kept(walk))
                setattr(traceback, name, self._replaced[name][1])

    def take_off(self) -> None:
        """Restores them, unless the script has replaced them, too."""
        for name, (walk, replacement) in self._replaced.items():
            if getattr(traceback, name) is replacement:
                setattr(traceback, name, walk)
        self._replaced.clear()


def _through_kept(walk: Any) -> Any:
    @functools.wraps(walk)
    def walk_kept(tb: Any) -> Any:
        try:
            found = kept(tb)
        except Exception:  # noqa: BLE001 - whoever shows an error must not get another one
            found = tb
        return walk(found)

    return walk_kept


def without_own_frames(error: BaseException) -> None:
    """Removes the doctor's frames from an exception, its causes and contexts, and the exceptions of its group."""
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = kept(one.__traceback__)
        waiting += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def is_interruption(error: BaseException) -> bool:
    """Whether an exception is Ctrl-C, an exit, or was raised by a signal handler, such as one for a time limit."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> Any:
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    if not callable(handler) or isinstance(handler, signal.Handlers):
        return None
    function = handler if hasattr(handler, "__code__") else type(handler).__call__
    return getattr(function, "__code__", None)
