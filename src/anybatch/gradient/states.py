"""States that are carried from one chunk of time to the next: their leaves, and the rows of these."""

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.errors import BatchError, LossError
from anybatch.tensors.meter import storages_of
from anybatch.tensors.modules import modules_of
from anybatch.tensors.trees import leaves, map_leaves

_FINE = (
    torch.Tensor,
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
)


def checked_state(state: Any, where: str) -> Any:
    """Refuses a state with something in it that no gradient would go through, or that may change unseen.

    Args:
        state: any nested container.
        where: it comes from, for messages.

    Returns:
        The same leaves in containers of their own, so that nobody else can change what is in them.

    Raises:
        LossError: a leaf is neither a tensor nor a plain value.

    Example:
        >>> checked_state({"h": torch.zeros(2), "step": 3}, "state")
        {'h': tensor([0., 0.]), 'step': 3}
    """
    if all(isinstance(leaf, _FINE) for leaf in flat(state)):
        return mapped(lambda leaf: leaf, state)
    for label, _, leaf in leaves(state, "state"):
        if isinstance(leaf, _FINE):
            continue
        hint = "make it a dataclass, or register its class with torch.utils._pytree, so that its tensors are found"
        if isinstance(leaf, PackedSequence):
            hint = "put its .data there and leave the rest in the batch, or pad it"
        elif type(leaf).__module__ == "numpy":
            hint = "make it a tensor"
        elif isinstance(leaf, torch.Generator):
            hint = "draw from the global random state, which is put back for the second pass"
        raise LossError(
            f"{label} of {where} is a {type(leaf).__name__}; expected tensors and plain values in nested containers: "
            + hint
        )
    return state


def flat(state: Any) -> list[Any]:
    """The leaves of a state, in order.

    Args:
        state: any nested container.
    """
    found: list[Any] = []
    _collect(state, found)
    return found


def _collect(state: Any, found: list[Any]) -> None:
    """What ``leaves`` gives, without the labels, which take longer than a small operation."""
    kind = type(state)
    if kind is torch.Tensor or state is None:
        found.append(state)
    elif kind is tuple or kind is list:
        for item in state:
            _collect(item, found)
    elif kind is dict:
        for item in state.values():
            _collect(item, found)
    else:
        found.extend(leaf for _, _, leaf in leaves(state))


def mapped(function: Callable[[Any], Any], state: Any) -> Any:
    """What ``map_leaves`` gives, quickly for the usual containers.

    Args:
        function: takes a leaf, gives what stands in its place.
        state: any nested container.
    """
    kind = type(state)
    if kind is torch.Tensor or state is None:
        return function(state)
    if kind is tuple:
        return tuple([mapped(function, item) for item in state])
    if kind is list:
        return [mapped(function, item) for item in state]
    if kind is dict:
        return {key: mapped(function, item) for key, item in state.items()}
    return map_leaves(function, state)


def like(state: Any, values: Sequence[Any]) -> Any:
    """The same container around other leaves.

    Args:
        state: gives the container.
        values: in the order of ``flat``.
    """
    iterator: Iterator[Any] = iter(values)
    return mapped(lambda _: next(iterator), state)


def detached(state: Any) -> Any:
    """A state without its graph."""
    return mapped(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, state)


def kept(state: Any, given: Any) -> Any:
    """A state without its graph and without what else lies in the storages of its tensors.

    The last step of an output, ``output[:, -1]``, would keep the output of the whole chunk. What was in the state
    before, such as the outputs of an encoder, stays where it is.

    Args:
        state: after a chunk.
        given: the state before it.
    """
    before = {storage._cdata for leaf in flat(given) if isinstance(leaf, torch.Tensor) for storage in storages_of(leaf)}

    def alone(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        held = storages_of(leaf)
        is_view = len(held) == 1 and held[0].nbytes() > leaf.nbytes and held[0]._cdata not in before
        return leaf.detach().clone() if is_view else leaf.detach()

    return mapped(alone, state)


def own_bytes(state: Any, given: Any) -> int:
    """The bytes of a state that were not in the one before.

    Args:
        state: after a chunk.
        given: before it.
    """
    tensors = [leaf for leaf in flat(state) if isinstance(leaf, torch.Tensor)]
    before = {storage._cdata for leaf in flat(given) if isinstance(leaf, torch.Tensor) for storage in storages_of(leaf)}
    return sum({id(t): t.nbytes for t in tensors if not any(s._cdata in before for s in storages_of(t))}.values())


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in a container whose writes can be seen, those of ``PackedSequence`` s included.

    Args:
        tree: any nested container.
    """
    found = (leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in flat(tree))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor) and not tensor.is_inference()]


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each tensor was written to.

    Args:
        tensors: what ``tensors_of`` gave; a view counts the writes to all that share its storage.
    """
    return [tensor._version for tensor in tensors]


class RowDims:
    """Along which dimension the sequences of a batch lie, in each tensor of a state.

    It is the first dimension of as many sequences as there are, but for ``[layers, rows, width]`` of the recurrent
    layers of torch. It is decided at the first states, where no sequence has ended yet.

    Args:
        given: what the user says, for all tensors; ``None`` to find it.
        modules: of the model, whose recurrent layers are known.
        known: what was found for earlier batches, by the number of leaves and their position.
    """

    def __init__(
        self, given: int | None, modules: Sequence[torch.nn.Module], known: dict[tuple[int, int], int | None]
    ) -> None:
        self._given = given
        self._modules = modules
        self._known = known
        self._found: dict[int, list[int | None]] = {}

    def of(self, state: Any, rows: int) -> list[int | None]:
        """The dimension for each leaf; ``None`` for what has no rows.

        Args:
            state: of sequences.
            rows: how many they are.

        Raises:
            BatchError: two dimensions may be meant.
        """
        values = flat(state)
        if len(values) not in self._found:
            found = [self._dim(leaf, rows, (len(values), n), label) for n, (label, leaf) in enumerate(_labelled(state))]
            self._found[len(values)] = found
            if rows > 1:
                self._known.update({(len(values), position): dim for position, dim in enumerate(found)})
        return self._found[len(values)]

    def _dim(self, leaf: Any, rows: int, place: tuple[int, int], label: str) -> int | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        fitting = [dim for dim, size in enumerate(leaf.shape) if size == rows]
        if self._given is not None:
            return self._given if self._given in fitting else None
        known = self._known.get(place)
        if known in fitting:
            return known
        if not fitting or leaf.dim() < 3 or fitting[:2] != [0, 1]:
            return fitting[0] if fitting else None
        if leaf.dim() == 3 and any(_is_state_of(module, leaf) for module in self._modules):
            return 1
        raise BatchError(
            f"{label} has the shape {tuple(leaf.shape)}, of which both dimension 0 and dimension 1 may be that of the "
            f"{rows} sequences; expected to be told: OverTime(state_dim=0), or state_dim=1 for [layers, rows, ...]",
            path=label,
        )


def _labelled(state: Any) -> list[tuple[str, Any]]:
    return [(label, leaf) for label, _, leaf in leaves(state, "state")]


def _is_state_of(module: torch.nn.Module, leaf: torch.Tensor) -> bool:
    if not isinstance(module, torch.nn.RNNBase):
        return False
    widths = {module.hidden_size, module.proj_size or module.hidden_size}
    return leaf.shape[0] == module.num_layers * (2 if module.bidirectional else 1) and leaf.shape[2] in widths


def recurrent_layers(*models: Any) -> list[torch.nn.RNNBase]:
    """The recurrent layers of some models.

    Args:
        *models: anything that is no module has none.

    Example:
        >>> recurrent_layers(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.GRU(2, 3)))
        [GRU(2, 3)]
    """
    return [module for module in modules_of(*models) if isinstance(module, torch.nn.RNNBase)]


def narrowed(state: Any, dims: Sequence[int | None], start: int, stop: int) -> Any:
    """Some rows of a state; what has no rows stays.

    Args:
        state: of sequences.
        dims: see ``RowDims``.
        start: the first row.
        stop: the one after the last.
    """
    cut = [
        leaf if dim is None else leaf.narrow(dim, start, stop - start)
        for leaf, dim in zip(flat(state), dims, strict=True)
    ]
    return like(state, cut)


def reordered(state: Any, dims: Sequence[int | None], order: torch.Tensor) -> Any:
    """A state with its rows in another order.

    Args:
        state: of as many sequences as ``order`` has.
        dims: see ``RowDims``.
        order: positions.
    """
    chosen = [
        leaf if dim is None else leaf.index_select(dim, order.to(leaf.device))
        for leaf, dim in zip(flat(state), dims, strict=True)
    ]
    return like(state, chosen)


def joined(states: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """One state of the rows of several, at least one; what has no rows is that of the first.

    Args:
        states: of consecutive rows.
        dims: see ``RowDims``.
    """
    if len(states) == 1:
        return states[0]
    columns = zip(*[flat(state) for state in states], strict=True)
    values = [column[0] if dim is None else torch.cat(column, dim) for column, dim in zip(columns, dims, strict=True)]
    return like(states[0], values)
