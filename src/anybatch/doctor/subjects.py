"""The arguments of ``why``: the parameters by name, and the losses."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.errors import LossError
from anybatch.records.means import Mean
from anybatch.records.paths import Leaf


@dataclass(slots=True)
class Subject:
    """The parameters and modules of the model argument."""

    parameters: dict[str, torch.Tensor]  # by name; one that is tied has several
    modules: dict[str, torch.nn.Module]  # by name; the model itself has the name it was given, or none
    bits: dict[int, int]  # one for each parameter, by its ``id``

    @property
    def fixtures(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers."""
        yield from self.parameters.values()
        for module in self.modules.values():
            yield from (buffer for buffer in module.buffers(recurse=False))

    def leaves(self, mask: int) -> dict[str, Leaf]:
        """Its parameters, of which a loss reaches those whose bits are in a mask."""
        return {
            name: Leaf(
                bool(mask & self.bits[id(p)]), p.requires_grad, p.is_leaf, not p.is_leaf and p.retains_grad, p.numel()
            )
            for name, p in self.parameters.items()
        }

    def owner(self, parameter: str) -> str:
        """The name of the module that a parameter belongs to."""
        name = parameter.rpartition(".")[0]
        return name if name in self.modules else ""


def subject_of(model: Any) -> Subject:
    """Reads the model argument of ``why``.

    Raises:
        TypeError: it is no module, iterable of modules, or mapping of names to modules or tensors.
        LossError: it has no parameters.
    """
    subject = Subject({}, {}, {})
    for name, item in _named(model):
        if isinstance(item, torch.nn.Module):
            for path, module in item.named_modules(prefix=name, remove_duplicate=False):
                subject.modules[path] = module
            subject.parameters.update(item.named_parameters(prefix=name, remove_duplicate=False))
        elif isinstance(item, torch.Tensor):
            subject.parameters[name] = item
        else:
            raise TypeError(_EXPECTED.format(got=f"{name!r}: {type(item).__name__}"))
    if not subject.parameters:
        raise LossError("got a model without parameters; expected at least one. Give the module that is to be trained")
    keys = dict.fromkeys(map(id, subject.parameters.values()))
    subject.bits = {key: 1 << position for position, key in enumerate(keys)}
    return subject


_EXPECTED = (
    "got {got} as the model; expected a torch.nn.Module, a list of them, or a mapping of names to modules or tensors. "
    "Write anybatch.why(loss, model)"
)


def _named(model: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(model, torch.nn.Module):
        return [("", model)]
    if isinstance(model, Mapping):
        return [(str(name), item) for name, item in model.items()]
    if isinstance(model, Iterable) and not isinstance(model, (str, bytes, torch.Tensor)):
        items = list(model)
        if items and all(isinstance(item, tuple) and len(item) == 2 for item in items):
            return [(str(name), item) for name, item in items]
        return [(str(position), item) for position, item in enumerate(items)]
    raise TypeError(_EXPECTED.format(got=type(model).__name__))


def losses_of(result: Any) -> dict[str, Any]:
    """The losses by name in the return value of a loss function; the name of a single one is empty.

    Raises:
        LossError: one is not a tensor, a number or a ``Mean``.
    """
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result = result[0]
    if isinstance(result, Mapping):
        return {str(name): _loss(value, str(name)) for name, value in result.items()}
    if isinstance(result, Iterator):
        named = (item if isinstance(item, tuple) else (f"loss_{i}", item) for i, item in enumerate(result))
        return {str(name): _loss(value, str(name)) for name, value in named}
    return {"": _loss(result, "")}


def _loss(value: Any, name: str) -> Any:
    if isinstance(value, Mean):
        value = value.total
    if isinstance(value, (torch.Tensor, int, float)):
        return value
    raise LossError(
        f"got {type(value).__name__} as the loss; expected a tensor. Return the loss itself, as for anybatch.backward",
        name=name,
    )
