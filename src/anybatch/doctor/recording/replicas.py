"""Sees how models are spread over processes, and which are called past the wrapper that exchanges their gradients."""

import sys
from typing import Any

import torch

from anybatch.doctor.recording.describing import wrapper_of
from anybatch.doctor.recording.naming import modules_in_sight
from anybatch.doctor.recording.numbering import Numbering
from anybatch.records.lossfacts import Replicas

_DDP = "DistributedDataParallel"
_SHARDED = frozenset({"FullyShardedDataParallel", "FSDPModule"})


class ReplicaWatch:
    """Looks for wrappers in the running code; nothing is sent to other processes."""

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self._called: dict[int, int] = {}
        self._last: Replicas | None = None

    def called(self, module: torch.nn.Module, root: int) -> None:
        """Notes that the user's code called a module, in training and with autograd on."""
        self._called[id(module)] = root

    def look(self) -> Replicas | None:
        """How models are spread; ``None`` where they are not, or where nothing is new."""
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        modules = {id(module): module for module in modules_in_sight()}
        for model in self._numbering.models:
            if (module := model.module()) is not None:
                modules[id(module)] = module
        wrappers = [module for module in modules.values() if wrapper_of(module) == _DDP]
        bypassed = [
            self._name(self._called[id(inner)], inner)
            for wrapper in wrappers
            if isinstance(inner := getattr(wrapper, "module", None), torch.nn.Module) and id(inner) in self._called
        ]
        classes = {cls.__name__ for module in modules.values() for cls in type(module).__mro__}
        kind = _DDP if wrappers else "FSDP" if classes & _SHARDED else ""
        found = Replicas(world=distributed.get_world_size(), wrapper=kind, bypassed=tuple(dict.fromkeys(bypassed)))
        if self._last is not None and (found.wrapper, found.bypassed) == (self._last.wrapper, self._last.bypassed):
            return None
        self._last = found
        return found

    def _name(self, root: int, inner: torch.nn.Module) -> str:
        model = self._numbering.models[root]
        return model.variable if model.module() is inner else f"{model.variable}.module".lstrip(".")
