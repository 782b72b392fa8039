"""Outputs of modules that were asked for, and their gradients, which are those of tensors that are no leaves."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from anybatch.doctor.containers import entries_of
from anybatch.doctor.recording.numbering import Numbering
from anybatch.records.samples import Watched
from anybatch.tensors.dispatch import unseen


class Watcher:
    """Follows modules by name."""

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self.names: set[str] = set()  # of the modules, within their root or with its variable in front
        self._seen: list[tuple[int, str, torch.Tensor, list[torch.Tensor]]] = []

    @contextmanager
    def attached(self, root: torch.nn.Module, number: int) -> Iterator[None]:
        """Follows the modules of a root during one forward."""
        with ExitStack() as handles:
            for name, module, _ in self._numbering.models[number].modules() if self.names else ():
                if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    continue
                if name in self.names or self._numbering.module_name(module) in self.names:
                    hook = module.register_forward_hook(self._hook(number, name), always_call=False)
                    handles.callback(hook.remove)
            yield

    def results(self) -> list[Watched]:
        """What was seen since this was last asked; called after a backward."""
        found = []
        for number, name, output, gradients in self._seen:
            gradient = float(gradients[-1]) if gradients else None
            found.append(Watched(root=number, module=name, output=float(output), gradient=gradient))
        self._seen = []
        return found

    def _hook(self, number: int, name: str) -> Any:
        norm = unseen(lambda tensor: tensor.detach().float().norm())

        @unseen
        def see(module: torch.nn.Module, args: Any, result: Any) -> None:
            output = _first(result)
            if output is not None and output.requires_grad:
                gradients: list[torch.Tensor] = []
                self._seen.append((number, name, norm(output), gradients))
                output.register_hook(lambda gradient: gradients.append(norm(gradient)))

        return see


def _first(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    return next((found for _, entry in entries_of(value) if (found := _first(entry)) is not None), None)
