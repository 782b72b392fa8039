"""Whether a hook on a model would be compiled with it, which takes seconds, and fails under ``fullgraph=True``."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from anybatch.torch_private import has_compiled


class CallsOf:
    """Sees from where a model is called in runs in which nothing is compiled.

    Args:
        model: what is called.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._is_inside, self._is_met = model, False, False

    @property
    def take_hooks(self) -> bool:
        """Whether a hook on the model stays outside of all that was compiled; also where nothing was."""
        return not has_compiled() or (self._is_met and not self._is_inside)

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Sees the calls in the block."""
        if not has_compiled() or not isinstance(self._model, torch.nn.Module):
            yield
            return
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(Exception):  # a scripted module takes none; its calls are then not met
                stack.callback(self._model.register_forward_pre_hook(self._see).remove)
            yield

    def _see(self, *_: Any) -> None:
        compiler = sys.modules["torch._dynamo.eval_frame"].__file__
        self._is_met, frame = True, sys._getframe()
        while frame is not None and not self._is_inside:
            self._is_inside = frame.f_code.co_filename == compiler
            frame = frame.f_back  # type: ignore[assignment]
