"""Activation checkpointing: what a block saves for the backward is computed again there.

Chen, Xu, Zhang, Guestrin 2016, "Training deep nets with sublinear memory cost". The graph of the first forward is the
one that is differentiated; the second forward only gives the tensors that the first one would have saved, and stops as
soon as it has.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from anybatch.errors import AnyBatchError
from anybatch.levers.handles import INSIDE, Handle
from anybatch.levers.places import Place, places_of
from anybatch.tensors.graph import is_transformed
from anybatch.tensors.hiddendropout import hidden_dropout, in_words
from anybatch.tensors.replay import NumpyDraws, Surroundings
from anybatch.tensors.state import NotRecomputable, State
from anybatch.tensors.trees import map_leaves


def recompute(model: torch.nn.Module, names: Iterable[str]) -> Handle:
    """Lets chosen blocks compute their activations again in the backward instead of keeping them.

    The gradient is the same in every bit. Random numbers are drawn as in the first forward, autocast is as it was,
    buffers are updated once, and a forward that changes buffers sees those from before. Besides its arguments a call
    keeps a copy of the buffers that it changed; all others are copied for the time of the forward only. What a block
    changes elsewhere, such as a cache or a counter that is no buffer, can't be seen; tensors of other shapes are. What
    runs within a transform of ``torch.func`` or forward-mode differentiation is not computed again.

    Args:
        model: the model.
        names: dotted names of modules, or runs of children of a Sequential such as ``"net.2:5"``.

    Returns:
        A handle that takes the lever off. A backward after that is fine.

    Raises:
        BatchError: a name is unknown or names what can't be called; nothing is changed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> with recompute(model, ["0:2"]):
        ...     model(torch.ones(2, 3)).sum().backward()
        >>> model[0].weight.grad.shape
        torch.Size([3, 3])
    """
    return Handle([place.put_on(_Recomputed(place), INSIDE) for place in places_of(model, names)])


class _Recomputed:
    """The layer around a block.

    Args:
        place: the block.
    """

    def __init__(self, place: Place) -> None:
        self.name = place.name
        self.state = State(place.name, place.modules())
        self._recurrent = [module for module in place.modules() if isinstance(module, torch.nn.RNNBase)]
        self.numpy = NumpyDraws()

    def __call__(self, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or self.state.is_lazy or is_transformed():
            return inner(*args, **kwargs)
        if hidden := hidden_dropout(self._recurrent):
            raise NotRecomputable(
                f"the block {self.name!r} can't be recomputed: {in_words(hidden[0])}. Use layers of their own with "
                "torch.nn.Dropout between them, or torch.backends.cudnn.enabled = False, or leave the block out",
                block=self.name,
            )
        call = _Call(self, inner, args, kwargs)
        with saved_tensors_hooks(call.pack, call.unpack):
            output = inner(*args, **kwargs)
        call.end_forward()
        return output


class _Stop(Exception):  # not an error: everything that was asked for is there
    pass


class _Slot:
    """Stands for a tensor among the arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Kept(torch.autograd.Function):
    """Saves the arguments in the graph, where an outer block or an offload finds them."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors[1:])
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise AnyBatchError("unreachable: nothing depends on the node that keeps the arguments of a block")


class _Holder:
    """Stands for a saved tensor; has the tensor from the second forward until the backward takes it."""

    __slots__ = ("__weakref__", "value")

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None


class _Call:
    """One call of a block, which can run again."""

    def __init__(self, block: _Recomputed, inner: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._block = block
        self._inner = inner
        self._holders: list[weakref.ref[_Holder]] = []
        self._facts: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._keep(args, kwargs)
        self._surroundings = Surroundings(self._devices, block.numpy)
        self._state = block.state.before_forward()

    def _keep(self, args: Any, kwargs: Any) -> None:
        tensors: list[torch.Tensor] = []
        slots: dict[int, _Slot] = {}

        def slot(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in slots:  # a tensor that is there twice stays one: attention looks at `query is key`
                slots[id(leaf)] = _Slot(len(tensors))
                tensors.append(leaf)
            return slots[id(leaf)]

        self._arguments = map_leaves(slot, (args, kwargs))
        self._devices = {t.device for t in (*tensors, *self._block.state.tensors()) if t.device.type not in _HOST}
        # The output is held, not its node alone: in torch 2.6 a node lets go of what it saved when its output dies.
        self._keeper = _Kept.apply(torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]

    def pack(self, tensor: torch.Tensor) -> _Holder:
        """Stands for a tensor that the forward wants to save."""
        holder = _Holder()
        self._holders.append(weakref.ref(holder))
        self._facts.append((tensor.shape, tensor.dtype, tensor.device))
        return holder

    def unpack(self, holder: _Holder) -> torch.Tensor:
        """Gives the tensor to the backward."""
        if holder.value is None:
            self._run_again()
        value, holder.value = holder.value, None
        if value is None:
            raise self._differs("the second forward did not reach it")
        return value

    def end_forward(self) -> None:
        """Looks at what the forward has changed."""
        self._surroundings.end_forward()
        self._state.after_forward()

    def _run_again(self) -> None:
        args, kwargs = self._kept()
        seen = 0

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal seen
            index, seen = seen, seen + 1
            tensor = tensor.detach()  # it may be the result of the node that saves it, which would be a cycle
            if index < len(self._holders):
                self._check(index, tensor)
                holder = self._holders[index]()
                if holder is not None:
                    holder.value = tensor
            if seen == len(self._holders):
                raise _Stop
            return tensor

        with self._surroundings.again(), self._state.as_before(), torch.enable_grad():
            try:
                with saved_tensors_hooks(fill, _same):
                    self._inner(*args, **kwargs)
            except _Stop:
                pass
        if seen < len(self._holders):
            raise self._differs(f"it saved {seen} tensors, the first one {len(self._holders)}")

    def _kept(self) -> tuple[Any, Any]:
        try:
            tensors = self._keeper.grad_fn.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                raise NotRecomputable(
                    f"an argument of the block {self._block.name!r} was changed in place by the block or after it, so "
                    "that the block can't be recomputed; expected arguments that stay as they are. Leave the block out "
                    "of recompute, or give it a clone",
                    block=self._block.name,
                ) from error
            raise
        arguments: tuple[Any, Any] = map_leaves(
            lambda leaf: tensors[leaf.index] if type(leaf) is _Slot else leaf, self._arguments
        )
        return arguments

    def _check(self, index: int, tensor: torch.Tensor) -> None:
        facts = (tensor.shape, tensor.dtype, tensor.device)
        if facts != self._facts[index]:
            (shape, dtype, device), (was, had, lay) = facts, self._facts[index]
            raise self._differs(
                f"saved tensor {index} is {dtype} of shape {tuple(shape)} on {device}, in the first one it was {had} "
                f"of shape {tuple(was)} on {lay}"
            )

    def _differs(self, how: str) -> NotRecomputable:
        return NotRecomputable(
            f"the block {self._block.name!r} does not compute the same when it is recomputed: {how}. Expected a "
            "forward that depends on its arguments, parameters, buffers and random state only. A cache, a counter or a "
            "list that the block changes is the usual reason; leave the block out of recompute",
            block=self._block.name,
        )


_HOST = ("cpu", "meta")


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
