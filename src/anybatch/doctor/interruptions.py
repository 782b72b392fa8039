"""Exceptions that belong to the user, although they were raised while the doctor's code ran."""

import functools
import signal
from typing import Any


def is_interruption(error: BaseException) -> bool:
    """Whether an exception is Ctrl-C, an exit, or was raised by a signal handler, such as one for a time limit."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> Any:
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    if not callable(handler) or isinstance(handler, signal.Handlers):
        return None
    function = handler if hasattr(handler, "__code__") else type(handler).__call__
    return getattr(function, "__code__", None)
