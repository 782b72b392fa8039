"""Activation checkpointing: activations are recomputed in the backward instead of being saved.

Chen, Xu, Zhang, Guestrin 2016, "Training deep nets with sublinear memory cost". This is the only file that calls
``torch.utils.checkpoint``. It adds what that leaves out: buffers are updated once and the second forward sees those
from before, Python's and NumPy's random state is replayed, too, and a block that can't run twice is refused by name.
"""

import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from anybatch.accelerators import attention_kernels, has_cudnn, set_attention_kernels
from anybatch.batch.trees import map_leaves
from anybatch.errors import AnyBatchError
from anybatch.memory.places import Handle, places_of
from anybatch.tensors.graph import is_transformed, recomputing
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.shards import is_sharded

SMALL = 64 * 1024
"""Bytes up to which a copy of a buffer is kept whether or not the buffer is seen to change."""

_DEPTH = 5  # of objects within an object
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_HELD: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    # for each kind how its items are noted, taken out, and put back
    list: (list, list.clear, list.extend),
    set: (set, set.clear, set.update),
    deque: (list, deque.clear, deque.extend),
    OrderedDict: (lambda held: [*OrderedDict.items(held)], OrderedDict.clear, OrderedDict.update),
    dict: (lambda held: [*dict.items(held)], dict.clear, dict.update),
}


class NotRecomputable(AnyBatchError, RuntimeError):
    """A block computes something else when it runs again, so that it can't be checkpointed.

    Attributes:
        block: its name, as it was given to ``recompute``.
    """

    def __init__(self, message: str, *, block: str) -> None:
        super().__init__(message)
        self.block = block


def recompute(model: torch.nn.Module, names: Iterable[str]) -> Handle:
    """Checkpoints blocks of a model: their activations are recomputed in the backward instead of being saved.

    The gradient is bitwise the same. The recomputed forward has the random state and autocast of the first one,
    buffers are updated once, and a forward that changes buffers sees those from before. Besides its arguments a call
    keeps a copy of the buffers that it changed; all others are copied for the time of the forward only. Objects among
    its arguments, such as a cache of keys and values, have the items and attributes that they had before. What a block
    changes elsewhere, such as a counter that is no buffer, can't be seen; tensors of other shapes are. What runs within
    a transform of ``torch.func`` or forward-mode differentiation is not computed again.

    Args:
        names: dotted names of modules, or runs of children of a Sequential such as ``"net.2:5"``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> with recompute(model, ["0:2"]):
        ...     model(torch.ones(2, 3)).sum().backward()
        >>> model[0].weight.grad.shape
        torch.Size([3, 3])
    """
    advice = "Leave the block out of recompute, or change the state after the backward pass"
    return Handle(
        place.put_on(Checkpoint(place.name, place.modules(), title=f"the block {place.name!r}", advice=advice))
        for place in places_of(model, names)
    )


class Checkpoint:
    """Runs functions of some modules with checkpointing: once now, and again when the backward needs their activations.

    Args:
        name: what errors call it.
        modules: all whose parameters and buffers the functions read, their children included.
        devices: where they draw random numbers, beside those of ``modules``.
        title: what messages call it.
        advice: what to do where it can't run twice.

    Example:
        >>> drop = torch.nn.Dropout()
        >>> again, x = Checkpoint("dropout", [drop]), torch.ones(8, requires_grad=True)
        >>> y = again(drop, x)
        >>> y.sum().backward()
        >>> bool((x.grad == y).all())
        True
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[torch.nn.Module],
        *,
        devices: Iterable[torch.device] = (),
        title: str = "",
        advice: str = "Change it after the backward pass",
    ) -> None:
        self.name, self.title, self.advice = name, title or name, advice
        self._parameters: list[dict[str, Any]] = [module._parameters for module in modules if module._parameters]
        self._buffers: list[dict[str, Any]] = [module._buffers for module in modules if module._buffers]
        # Kernels of batch normalisation write to their statistics without counting it as a new version.
        self._unseen = [isinstance(module, _NormBase) for module in modules if module._buffers]
        self._recurrent = [module for module in modules if isinstance(module, torch.nn.RNNBase)]
        self.devices = set(devices)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a function now, and again in the backward of what it gives.

        Args:
            function: of its arguments, the modules and the global random state only.
            *args: in any nested containers; tensors stay as they are until the backward.

        Raises:
            NotRecomputable: it can't run twice; what is seen only in the backward is raised there.
        """
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or self.is_lazy or is_transformed():
            return function(*args, **kwargs)
        call = _Call(self, function, args, kwargs)
        with set_checkpoint_early_stop(True):  # by which a forward that saves less the second time is noticed
            return checkpoint(call.on_kept, use_reentrant=False, preserve_rng_state=False)

    @contextmanager
    def first(self, devices: Iterable[torch.device] = ()) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Runs its block for the first time, for whoever runs it again himself.

        Args:
            devices: where it draws random numbers as well.

        Returns:
            A context, whose value makes the one in which the same runs as if it were the first time: with the random
            state, the precision and the buffers of that time, which are afterwards as they are now.

        Raises:
            NotRecomputable: the block can't run twice, as it has lazy parameters or changed what is read again.
        """
        if self.is_lazy:
            raise NotRecomputable(
                f"{self.title} can't be recomputed: it has lazy parameters, which its first forward pass creates; "
                "expected them to exist: call the model once under torch.no_grad() before",
                block=self.name,
            )
        surroundings, state = Surroundings({*self.devices, *devices}), State(self)

        @contextmanager
        def again() -> Iterator[None]:
            with surroundings.again(), state.as_before(), recomputing():
                yield

        yield again
        surroundings.end_forward()
        state.end_forward()

    @property
    def is_lazy(self) -> bool:
        """Whether there are lazy parameters or buffers."""
        return any(isinstance(tensor, (UninitializedParameter, UninitializedBuffer)) for tensor in self.tensors())

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers, as they are now."""
        for home in (*self._parameters, *self._buffers):
            yield from (tensor for tensor in home.values() if tensor is not None)

    def refuse_hidden_dropout(self) -> None:
        """Refuses recurrent modules that would draw other masks the second time."""
        if hidden := hidden_dropout(self._recurrent):
            other = "" if self.title == self.name else ", or leave the block out"
            raise NotRecomputable(f"{self.title} can't be recomputed: {why_hidden(hidden[0])}{other}", block=self.name)

    def changed(self, what: str) -> NotRecomputable:
        """The error that says what the second forward would not find as it was."""
        return NotRecomputable(
            f"{self.title} can't be recomputed, because {what}; expected nothing that it reads to change. "
            f"{self.advice}",
            block=self.name,
        )


class _Kept(torch.autograd.Function):
    """Saves the arguments in the graph, so that an outer checkpoint or an offload handles them."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors[1:])
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise AnyBatchError("unreachable: nothing depends on the node that keeps the arguments of a block")


class _Slot:
    """The place of a tensor among the arguments; no dataclass, which would be looked into as a container is."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Call:
    """One call that can run again: it saves the state it depends on, and restores that for the second run."""

    def __init__(self, what: Checkpoint, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        what.refuse_hidden_dropout()
        self._what, self._function = what, function
        self._first: Any = (args, kwargs)
        tensors, objects = list[torch.Tensor](), list[Any]()
        slots: dict[int, _Slot] = {}

        def slot(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                objects.append(leaf)  # which a block may write to, as to a cache of keys and values
                return leaf
            if id(leaf) not in slots:  # a tensor that is there twice stays one: attention looks at `query is key`
                slots[id(leaf)] = _Slot(len(tensors))
                tensors.append(leaf)
            return slots[id(leaf)]

        self._arguments = map_leaves(slot, (args, kwargs))
        self._contents = Contents(objects)
        # The output is held, not its node alone: in torch 2.6 a node lets go of what it saved when its output dies.
        self._keeper = _Kept.apply(torch.empty(0, requires_grad=True, device="cpu"), *tensors)  # type: ignore[no-untyped-call]
        self._devices = {one.device for one in (*tensors, *what.tensors())}
        self._again: Callable[[], AbstractContextManager[None]]

    def on_kept(self) -> Any:
        """Runs the function on its arguments; the second time torch stops it as soon as it has what it needs."""
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            with self._what.first(self._devices) as self._again:
                return self._function(*args, **kwargs)
        args, kwargs = self._kept()
        _last_run[:] = [(self._what.title, self._what.name)]
        with self._again(), self._contents.as_noted():
            self._function(*args, **kwargs)
        raise _differs(self._what.title, self._what.name, "it saved fewer tensors than the first time")

    def _kept(self) -> tuple[Any, Any]:
        try:
            tensors = self._keeper.grad_fn.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                raise NotRecomputable(
                    f"an argument of {self._what.title} was changed in place by it or after it, so it can't be "
                    "recomputed; expected unmodified arguments. Leave it out of recompute, or give it a clone",
                    block=self._what.name,
                ) from error
            raise
        arguments: tuple[Any, Any] = map_leaves(
            lambda leaf: tensors[leaf.index] if type(leaf) is _Slot else leaf, self._arguments
        )
        return arguments


def _seen(homes: Sequence[dict[str, Any]]) -> dict[tuple[int, str], tuple[torch.Tensor, int]]:
    """Tensors by their home and name, each with its version."""
    return {
        (index, name): (tensor, 0 if tensor.is_inference() else tensor._version)
        for index, home in enumerate(homes)
        for name, tensor in home.items()
        if tensor is not None
    }


def _is_as(found: tuple[torch.Tensor, int] | None, before: tuple[torch.Tensor, int]) -> bool:
    if found is None or (found[0] is before[0] and found[1] == before[1]):
        return found is not None
    return is_sharded(found[0]) is not is_sharded(before[0])  # FSDP2 has gathered or released it


class State:
    """The parameters and buffers that one call sees.

    It keeps a copy of every buffer that is small, that belongs to a normalisation, or whose version grew in the
    forward. Writes to a large buffer through ``.data`` are no new version and can't be seen.
    """

    def __init__(self, what: Checkpoint) -> None:
        self._what = what
        self._parameters, self._buffers = _seen(what._parameters), _seen(what._buffers)
        with torch.no_grad():  # all are copied, since nobody knows yet which will change
            self._copies = {id(buffer): buffer.detach().clone() for buffer, _ in self._buffers.values()}
        self._before: dict[tuple[int, str], torch.Tensor] = {}

    def end_forward(self) -> None:
        """Keeps the copies of the buffers that changed, and drops the others."""
        now = _seen(self._what._buffers)
        for place, before in self._buffers.items():
            copy = self._copies[id(before[0])]
            if not _is_as(now.get(place), before) or copy.nbytes <= SMALL or self._what._unseen[place[0]]:
                self._before[place] = copy
        self._copies = {}
        self._buffers = {place: found for place, found in now.items() if place not in self._before}
        self._refuse_changed_parameters("by the forward pass itself")

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Replaces the buffers by those from before the forward in this block.

        The buffers themselves are not written to: others may have saved them for their own backward.
        """
        self._refuse_changed_parameters("or replaced between the forward and backward pass")
        homes, made, now = self._what._buffers, dict[int, torch.Tensor](), _seen(self._what._buffers)
        for (index, name), before in self._buffers.items():
            if not _is_as(now.get((index, name)), before):
                raise self._what.changed(f"the buffer {name!r} was changed between the forward and backward pass")
        swapped = [(homes[index], name, homes[index].get(name)) for index, name in self._before]
        try:
            for (index, name), copy in self._before.items():
                homes[index][name] = made[id(copy)] = made[id(copy)] if id(copy) in made else copy.clone()
            yield
        finally:
            for home, name, buffer in swapped:
                home[name] = buffer

    def _refuse_changed_parameters(self, when: str) -> None:
        now = _seen(self._what._parameters)
        if now.keys() != self._parameters.keys() or not all(_is_as(now[p], self._parameters[p]) for p in now):
            raise self._what.changed(f"a parameter was changed {when}")


class Autocast:
    """The state of autocast, as it is now."""

    __slots__ = ("_states",)

    def __init__(self, kinds: Iterable[str]) -> None:
        self._states = {kind: _autocast(kind) for kind in kinds}

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs its block in this state."""
        with ExitStack() as stack:
            for kind, state in self._states.items():
                if state != _autocast(kind):
                    enabled, dtype, cache = state
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield


class Surroundings:
    """The random state, autocast, kernels of attention and default device that a forward began with."""

    __slots__ = ("_attention", "_autocast", "_device", "_devices", "_random")

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [*devices]
        self._random: RandomState | None = RandomState(self._devices)
        self._autocast = Autocast({"cpu", *(device.type for device in self._devices if device.type != "meta")})
        self._attention = attention_kernels()
        self._device = default_device()

    def end_forward(self) -> None:
        """Drops what the forward turned out not to need: what drew nothing has nothing to draw again."""
        if self._random is not None and self._random.is_now():
            self._random = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs its block in these surroundings; afterwards they are as before."""
        with ExitStack() as stack:
            self._enter(stack)
            if self._random is not None:
                stack.callback(RandomState(self._devices).restore)
                self._random.restore()
            yield

    def _enter(self, stack: ExitStack) -> None:
        stack.enter_context(self._autocast.again())
        if self._attention != (now := attention_kernels()):
            set_attention_kernels(self._attention)
            stack.callback(set_attention_kernels, now)
        if self._device != default_device():
            stack.enter_context(self._device)


def default_device() -> torch.device:
    """Where tensors are made that no device was named for, also in torch 2.6 after ``set_default_device(None)``."""
    try:
        return torch.get_default_device()
    except AttributeError:  # it looks for the device of None
        return torch.device("cpu")


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


class Contents:
    """What some objects hold now, a few levels deep; the objects, tensors and modules themselves are not copied."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._noted: list[tuple[Any, Any, type]] = []
        seen = set[int]()
        waiting = [(value, _DEPTH) for value in values]
        while waiting:
            value, depth = waiting.pop()
            if type(value) in _PLAIN or id(value) in seen:
                continue
            seen.add(id(value))
            if type(value) is tuple:
                waiting += [(one, depth - 1) for one in value if depth]
                continue
            for held, kind in _holders_of(value):
                items = _HELD[kind][0](held)
                self._noted.append((held, items, kind))
                inner = [one for _, one in items] if issubclass(kind, dict) else items
                waiting += [(one, depth - 1) for one in inner if depth]

    @contextmanager
    def as_noted(self) -> Iterator[None]:
        """Has the objects hold within a block what they held when this was made."""
        now = [(held, _HELD[kind][0](held), kind) for held, _, kind in self._noted]
        _put(self._noted, now)
        try:
            yield
        finally:
            _put(now, [(held, _HELD[kind][0](held), kind) for held, _, kind in self._noted])


def _holders_of(value: Any) -> Iterator[tuple[Any, type]]:
    """What of an object holds others: itself, and its attributes."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, type)) or callable(value):
        return
    kind = next((kind for kind in _HELD if isinstance(value, kind)), None)
    if kind is not None:
        yield value, OrderedDict if isinstance(value, OrderedDict) else kind
    own = getattr(value, "__dict__", None)
    if type(own) is dict and type(value).__module__.partition(".")[0] not in ("torch", "numpy"):
        yield own, dict


def _put(wanted: Sequence[tuple[Any, Any, type]], present: Sequence[tuple[Any, Any, type]]) -> None:
    for (held, items, kind), (_, now, _) in zip(wanted, present, strict=True):
        flat, other = (_flat(one, kind) for one in (items, now))
        if len(flat) != len(other) or not all(map(operator.is_, flat, other)):
            _, clear, fill = _HELD[kind]
            clear(held)
            fill(held, items)


def _flat(items: Any, kind: type) -> list[Any]:
    return [one for pair in items for one in pair] if issubclass(kind, dict) else [*items]


_last_run: list[tuple[str, str]] = []  # one at most: what was recomputed last


@contextmanager
def differences_named() -> Iterator[None]:
    """Adds the name of the block to torch's error about a different recomputation, in this block."""
    try:
        yield
    except CheckpointError as error:
        if not _last_run:
            raise
        said = str(error).removeprefix("torch.utils.checkpoint: ").partition("Tip: ")[0]  # without hints for debugging
        raise _differs(*_last_run[0], how=" ".join(said.split()).rstrip(". ")) from error


def _differs(title: str, name: str, how: str) -> NotRecomputable:
    return NotRecomputable(
        f"{title} does not compute the same when it is recomputed: {how}. Expected a forward pass that depends "
        "only on its arguments, parameters, buffers and random state. The usual reason is a cache, counter or "
        "list that it changes; leave it out of recompute",
        block=name,
    )


def why_hidden(found: torch.nn.RNNBase) -> str:
    """The message on why a recurrent module can't run again, and what to use instead."""
    return (
        f"{type(found).__name__}(num_layers={found.num_layers}, dropout={found.dropout}) on CUDA: cuDNN draws the "
        "dropout between its layers from a separate state that can't be restored, so a second forward pass would "
        "draw different masks. Use separate layers with torch.nn.Dropout between them, or "
        "torch.backends.cudnn.enabled = False (slower)"
    )


def hidden_dropout(modules: Iterable[torch.nn.Module]) -> list[torch.nn.RNNBase]:
    """The recurrent modules that would draw other masks if their forward ran again.

    cuDNN draws the dropout between their layers from a state of its own: https://github.com/pytorch/pytorch/issues/74177
    and https://github.com/pytorch/pytorch/issues/104697.
    """
    found = [m for m in modules if isinstance(m, torch.nn.RNNBase) and m.training and m.dropout and m.num_layers > 1]
    return [m for m in found if any(has_cudnn(p.device) for p in m.parameters())]
