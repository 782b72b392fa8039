"""A model in float64 for a while, and afterwards bitwise as it was.

The modules themselves run, on copies of their tensors, rather than a deep copy of the modules: not every model can be
copied, hooks on parameters would be lost, and a loss that reaches the model by another way than its first argument
would use another model.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from anybatch.tensors.precision import in_precision
from anybatch.tensors.sideeffects import INTERNALS, LARGEST_COPY


class Isolation:
    """Gives modules copies of their tensors, and puts everything back: weights, gradients, buffers, modes, attributes.

    Hooks that run an optimizer within the backward are taken off for the while.

    Args:
        dtype: what floating-point parameters and buffers are converted to; ``None`` to leave them.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], dtype: torch.dtype | None) -> None:
        self._modules = list({id(m): m for root in modules for m in root.modules()}.values())
        self._dtype, self._undo = dtype, ExitStack()
        # the buffers by their homes and names, each with its copy and with the values that it began with
        self.buffer_values: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        self.parameters: dict[int, torch.Tensor] = {}  # those that have copies of their values, by their ``id``
        # the ``id`` s of those with hooks that run after the gradient was accumulated
        self.with_optimizer_hooks: set[int] = set()

    def begin(self, undo: ExitStack) -> None:
        """Lasts until a stack is closed."""
        self._undo = undo
        for module in self._modules:
            for value in [value for name, value in vars(module).items() if name in INTERNALS]:
                if isinstance(value, (dict, set)):
                    undo.callback(value.update, value.copy())
                    undo.callback(value.clear)  # which comes before
        buffers: dict[int, torch.Tensor] = {}
        for module in self._modules:
            if isinstance(module, torch.jit.ScriptModule):  # its buffers can't be exchanged
                for buffer in module.buffers(recurse=False):
                    _remember_values(buffer, undo)
            else:
                self._exchange_buffers(module._buffers, buffers)
            for parameter in module._parameters.values():  # parameters() may be another method of the user's
                if parameter is not None:
                    self.add(parameter)

    def add(self, parameter: torch.Tensor) -> None:
        """Gives one more leaf tensor a copy of its values, if it has none yet."""
        if id(parameter) in self.parameters or parameter.is_meta:
            return
        self.parameters[id(parameter)] = parameter
        values, gradient = parameter.data, parameter.grad

        def put_back() -> None:
            parameter.grad = None
            parameter.data = values
            parameter.grad = gradient

        self._undo.callback(put_back)
        if parameter._post_accumulate_grad_hooks:
            self.with_optimizer_hooks.add(id(parameter))
            muted(parameter._post_accumulate_grad_hooks, self._undo)
        parameter.data = in_precision(values.detach().clone(), self._dtype)

    def restore_buffers(self) -> None:
        """Puts the values that the buffers had at the start of the isolation into them."""
        with torch.no_grad():
            for home, name, buffer, value in self.buffer_values:
                home[name] = buffer
                if not torch.equal(buffer, value):  # a graph that is kept may have saved it
                    if buffer.shape != value.shape:  # an observer makes room in its first forward
                        buffer.resize_(value.shape)
                    buffer.copy_(value)

    def _exchange_buffers(self, home: dict[str, Any], known: dict[int, torch.Tensor]) -> None:
        for name, buffer in list(home.items()):
            if buffer is None or buffer.is_meta:
                continue
            if id(buffer) not in known:
                known[id(buffer)] = in_precision(buffer.detach().clone(), self._dtype)
            twin = known[id(buffer)]
            home[name] = twin
            self.buffer_values.append((home, name, twin, twin.clone()))


def is_flag(buffer: torch.Tensor) -> bool:
    """Whether a buffer says no more than yes or no."""
    return buffer.dtype in (torch.bool, torch.uint8) and buffer.numel() == 1


def muted(hooks: Any, undo: ExitStack) -> None:
    """Empties a dictionary of hooks until a stack is closed."""
    if hooks:
        undo.callback(hooks.update, dict(hooks))
        hooks.clear()


def _remember_values(tensor: torch.Tensor, undo: ExitStack) -> None:
    if tensor.is_meta or tensor.is_inference() or tensor.nbytes > LARGEST_COPY:
        return
    version, values = tensor._version, tensor.detach().clone()

    def put_back() -> None:
        if tensor._version != version:
            with torch.no_grad():
                tensor.copy_(values)

    undo.callback(put_back)
