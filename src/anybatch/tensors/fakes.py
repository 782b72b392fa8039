"""Fake tensors in place of a model's own: shapes without elements, in a mode with a fast cache of output layouts.

They are CPU tensors for every device: torch can't run a backward through fake CUDA tensors on a machine without a GPU
(pytorch issue 160532). This is the only file that imports torch's private module for fake tensors.
"""

import functools
import itertools
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, ClassVar, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from anybatch.batch.trees import map_leaves
from anybatch.tensors.dispatch import nobody_looks, tensors_in, written_by
from anybatch.tensors.modules import modules_of

Fake = FakeTensor
_LOGGER = logging.getLogger(FakeTensorMode.__module__)
_UNKNOWN = object()
"""The result of a lookup that is not in the cache."""
_DEVICE = torch.ops.prim.device.default
_PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_MOST_KNOWN = 2**15
"""Layouts that are remembered, at most 30 MB of them; two plans of a transformer ask 1,500."""
_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


NAME = "anybatch_constant"


class _Place:
    """A tensor in the log: its number and that of its storage."""

    __slots__ = ("number", "storage")

    def __init__(self, number: int, storage: int) -> None:
        self.number = number
        self.storage = storage


class _Operation(NamedTuple):
    func: Any
    args: Any
    kwargs: Any
    made: tuple[_Place, ...]
    read: frozenset[int]
    changed: frozenset[int]


class Constants:
    """A log of the operations on constants: fake tensors made of shapes and Python numbers alone, as a cached mask is.

    A traced step may cache such tensors, which its next real run would find. They are replaced by what a real run would
    have cached.
    """

    def __init__(self) -> None:
        self.is_off = False  # set while fake tensors are made for real ones, which are no constants
        self._operations: list[_Operation] = []
        self._spoiled: set[int] = set()  # storages that something else than a constant was written to
        self._numbers = itertools.count()

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, fake: Any) -> None:
        """Logs an operation if all its arguments are constants."""
        if self.is_off:
            return
        given = [one for one in tensors_in((*args, *kwargs.values()) if kwargs else args) if type(one) is fake]
        known = [vars(one)[NAME] for one in given if NAME in vars(one)]
        if given and not known:
            return
        written = written_by(func, args, kwargs)
        changed = {place.storage for one in written if (place := vars(one).get(NAME)) is not None}
        if len(known) < len(given) or torch.Tag.nondeterministic_seeded in func.tags:
            self._spoiled |= changed
            return
        by_storage = {one.untyped_storage()._cdata: vars(one)[NAME].storage for one in given}
        made = []
        for one in tensors_in((result,)):
            if type(one) is fake and one.layout is torch.strided:
                storage = by_storage.get(one.untyped_storage()._cdata)
                number = next(self._numbers)
                place = vars(one).get(NAME) or _Place(number, number if storage is None else storage)
                vars(one)[NAME] = place
                made.append(place)
        if made or changed:
            own_args, own_kwargs = map_leaves(
                lambda leaf: vars(leaf)[NAME] if type(leaf) is fake else _kept(func, leaf), [args, dict(kwargs)]
            )
            read = frozenset(place.storage for place in known)
            changed |= {place.storage for place in made}
            self._operations.append(_Operation(func, own_args, own_kwargs, tuple(made), read, frozenset(changed)))

    def made_real(self, fakes: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of a fake tensor and its real value, for those that are constants."""
        found = [one for one in fakes if vars(one).get(NAME) is not None]
        needed: set[int] = set()
        chosen = []
        for one in found:
            wanted = self._needed(vars(one)[NAME].storage)
            if wanted is not None:
                needed |= wanted
                chosen.append(one)
        real: dict[int, torch.Tensor] = {}
        for index in sorted(needed):
            operation = self._operations[index]
            args, kwargs = map_leaves(
                lambda leaf: real[leaf.number] if type(leaf) is _Place else leaf, [operation.args, operation.kwargs]
            )
            result = tensors_in((operation.func(*args, **kwargs),))
            real.update((place.number, one) for place, one in zip(operation.made, result, strict=True))
        return [(one, real[vars(one)[NAME].number]) for one in chosen]

    def _needed(self, storage: int) -> set[int] | None:
        """Indices of the operations that made a storage's content; ``None`` if it is not constant."""
        storages, found = {storage}, set()
        for index in reversed(range(len(self._operations))):
            if self._operations[index].changed & storages:
                storages |= self._operations[index].read
                found.add(index)
        return None if storages & self._spoiled else found


def _kept(func: Any, leaf: Any) -> Any:
    """An argument as it is logged; the tensor in ``lift`` is reused by the caller, and has to be copied."""
    if isinstance(leaf, torch.Tensor) and "lift" in func.overloadpacket.__name__:
        return leaf.clone()
    return leaf


class _Known(NamedTuple):
    """The layout of an output; ``aliases``: it is a view of the first argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    aliases: bool


class QuickFakeMode(FakeTensorMode):
    """Torch's ``FakeTensorMode``, asked only once about each operation on the same layouts.

    Torch's mode has a cache, too, but a lookup there takes longer than most operations: plans take 1.6 times as long.
    Cached are aten operations that depend only on the layouts of their arguments, write to none of them, and return new
    tensors or views of the first argument; and operations that write to their first argument and return it. All others
    go to torch each time. What is known holds no tensors and is the same for every mode, so that all modes of a process
    share it: the next plan, or one for another budget, begins with what this one asked.
    """

    # what an operation gave: its kind of container and the tensors in it; ``None`` for the first argument itself
    _results: ClassVar[dict[tuple[Any, ...], tuple[type | None, tuple["_Known | None", ...]] | None]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.cache_enabled = False  # torch's own, which takes longer than it saves where this one has missed
        self.is_over = False  # whether operations on tensors of this mode raise, as the trace has ended
        self.constants = Constants()
        self._is_within = False
        self.given: list[weakref.ref[torch.Tensor]] = []  # all fake tensors of this mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # whoever is outside of it has torch keep its compiler away
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operation on fake tensors, from the cache if possible."""
        if func is _DEVICE and type(args[0]) is FakeTensor and not self.in_kernel_invocation:
            return args[0].fake_device
        if self.is_over:
            raise RuntimeError(f"got {func} on a fake tensor of a trace that has ended; expected real tensors")
        if self._is_within:  # torch decomposes an operation into others
            return self._result(func, types, args, kwargs)
        self._is_within, mine = True, get_ident()

        def is_other(record: logging.LogRecord) -> bool:
            return record.thread != mine

        _LOGGER.addFilter(is_other)  # torch logs what it raises, and whoever traces has an answer to that
        try:
            result = self._result(func, types, args, kwargs)
        finally:
            _LOGGER.removeFilter(is_other)
            self._is_within = False
        self._note(func, args, kwargs or {}, result)
        return result

    def result_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operation gives that comes to this mode next; one that is known takes no way through torch."""
        with no_dispatch():
            _, known = (None, _UNKNOWN) if self.is_over else self._known(func, args, kwargs)
        if known is _UNKNOWN:
            return func(*args, **kwargs)
        self._note(func, args, kwargs, known)
        return known

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        for one in result if type(result) in (list, tuple) else (result,):
            if type(one) is FakeTensor:
                self.given.append(weakref.ref(one))
        self.constants.note(func, args, kwargs, result, FakeTensor)

    def _result(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        key, known = self._known(func, args, kwargs)
        if known is not _UNKNOWN:
            return known
        result = super().__torch_dispatch__(func, types, args, kwargs or {})
        if key is not None:
            self._remember(key, func, args, kwargs, result)
        return result

    def _known(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[Any, Any]:
        """The cache key, ``None`` for what is not cached, and the result as far as it is known."""
        key = self._key(func, args, kwargs) if _can_be_known(func) else None
        known: Any = _UNKNOWN if key is None else self._results.get(key, _UNKNOWN)
        if known is _UNKNOWN:
            return key, _UNKNOWN
        return key, args[0] if known is None else self._made(known, args)

    def _key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[Any, ...] | None:
        """The cache key; ``None`` if the result depends on more than layouts."""
        if not args:
            return None
        parts = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not self._describe(args, parts):
            return None
        if kwargs:
            parts += kwargs
            if not self._describe(kwargs.values(), parts):
                return None
        return tuple(parts)

    def _describe(self, values: Iterable[Any], parts: list[Any]) -> bool:
        """Appends layouts of tensors and plain values to a key; false if a value can't be described."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or not _is_plain(value):
                    return False
                parts += (value.shape, value.stride(), value.storage_offset(), value.dtype)
                parts += (value.fake_device, value.requires_grad)
            elif kind in _PLAIN:
                parts += (kind, value)
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                if not self._describe(value, parts):
                    return False
            else:
                return False
        return True

    def _made(self, known: tuple[type | None, tuple[_Known | None, ...]], args: Sequence[Any]) -> Any:
        kind, tensors = known
        made = [None if one is None else self._tensor(one, args) for one in tensors]
        return made[0] if kind is None else kind(made)

    def _tensor(self, known: _Known, args: Sequence[Any]) -> Any:
        if known.aliases:
            bare = torch.empty(0, dtype=known.dtype, device="meta")
            bare.set_(args[0].untyped_storage(), known.offset, known.shape, known.stride)
        else:
            bare = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
        return FakeTensor(self, bare, known.device)

    def _remember(
        self, key: tuple[Any, ...], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Any
    ) -> None:
        kind, known = type(result) if type(result) in (list, tuple) else None, None
        if not func._schema.is_mutable:
            made = _layouts_of(result if kind else (result,), args, kwargs)
            if made is None:
                return
            known = (kind, made)
        elif result is not args[0] or self._key(func, args, kwargs) != key:  # which a write may have changed
            return
        if len(self._results) >= _MOST_KNOWN:
            self._results.clear()
        self._results[key] = known


def _layouts_of(
    results: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[_Known | None, ...] | None:
    """The layouts of the outputs; ``None`` where they are more than new tensors and views of the first argument."""
    tensors = tensors_in([*args, *(kwargs or {}).values()])
    given = [_storage(tensor) for tensor in tensors]
    first = _storage(args[0]) if type(args[0]) is FakeTensor else None
    made: list[_Known | None] = []
    new: set[int] = set()
    for one in results:
        if one is None:
            made.append(None)
            continue
        is_new = type(one) is FakeTensor and _is_plain(one) and not one.requires_grad
        if not is_new or any(one is tensor for tensor in tensors):
            return None
        storage, aliases = _storage(one), _storage(one) == first
        if aliases:
            if given.count(storage) != 1:  # a view of the first argument or of another on the same storage
                return None
        elif storage in given or storage in new or one.untyped_storage().nbytes() != _nbytes(one):
            return None
        new.add(storage)
        layout = (tuple(one.shape), tuple(one.stride()), one.storage_offset())
        made.append(_Known(*layout, one.dtype, one.fake_device, aliases))
    return tuple(made)


def _is_plain(fake: Any) -> bool:
    """Whether its layout says all about a fake tensor."""
    return fake.constant is None and fake.layout is torch.strided and not (fake.is_conj() or fake.is_neg())


@functools.cache
def _can_be_known(func: Any) -> bool:
    """Whether it is an aten operation whose result depends on layouts alone."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    name, schema = func.overloadpacket.__name__, func._schema
    if any(tag in func.tags for tag in _DEPENDENT) or "lift" in name:
        return False
    if not schema.is_mutable:
        return True
    written = [one.alias_info is not None and one.alias_info.is_write for one in schema.arguments]
    given = [one.alias_info for one in schema.returns]
    is_in_place = name.endswith("_") and written[0] and sum(written) == 1
    return is_in_place and len(given) == 1 and given[0] is not None and given[0].is_write


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _nbytes(tensor: Any) -> int:
    """The bytes that a tensor's layout needs, from the start of its storage; -1 if it has an offset."""
    if tensor.storage_offset():
        return -1
    if tensor.numel() == 0:
        return 0
    items = 1 + sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(items * tensor.element_size())


class Fakes:
    """Makes fake tensors: one per tensor, on one storage per storage."""

    def __init__(self) -> None:
        # the fake mode in which to run operations on them; it makes other tensors fake, too
        self.mode: Any = QuickFakeMode(allow_non_fake_inputs=True)
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the same shape, strides and dtype; the same one for the same tensor.

        Args:
            tensor: dense, on any device, ``meta`` included, or a fake tensor of another mode.

        Raises:
            TypeError: it is not strided, or of another subclass.
        """
        known = self._made.get(id(tensor))
        if known is not None:
            return known[1]
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter, Fake):
            raise TypeError(f"a {type(tensor).__name__} with layout {tensor.layout} has no fake tensor")
        self.mode.constants.is_off = True
        try:
            with self.mode, torch.no_grad():
                fake = self._part_of_storage(tensor)
                if isinstance(tensor, torch.nn.Parameter):
                    fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                elif tensor.requires_grad:
                    fake = fake.requires_grad_(tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        finally:
            self.mode.constants.is_off = False
        self._made[id(tensor)] = (tensor, fake)  # kept alive, so that no other tensor gets its id
        return fake

    def let_go(self) -> None:
        """Releases the fake tensors; from now on operations on those that others still hold raise."""
        self.mode.is_over = True
        self._made.clear()
        self._storages.clear()

    def alive(self) -> list[torch.Tensor]:
        """The fake tensors of the mode that something still refers to."""
        found = {id(one): one for reference in self.mode.given if (one := reference()) is not None}
        return list(found.values())

    def make_real(self, device: torch.device) -> None:
        """Replaces fake tensors that something still refers to by real ones, in place, where that is possible."""
        alive = self.alive()
        with nobody_looks(), torch.no_grad():
            pairs = self.mode.constants.made_real(alive)
            # torch.utils.swap_tensors refuses a tensor with weak references.
            self.mode.fake_tensor_converter = None
            exchanged = {id(fake) for fake, _ in pairs}
            self.mode.given = [weakref.ref(one) for one in alive if id(one) not in exchanged]
            for fake, real in pairs:
                try:
                    torch.utils.swap_tensors(fake, real.to(device))
                except RuntimeError:  # something else has a weak reference to it
                    self.mode.given.append(weakref.ref(fake))

    def _part_of_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        items = tensor.untyped_storage().nbytes() // tensor.element_size()
        if items == tensor.numel():
            shared = (tensor.untyped_storage()._cdata, tensor.dtype)
            if shared not in self._storages:
                self._storages[shared] = torch.empty(items, dtype=tensor.dtype, device="cpu")
            return self._storages[shared].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")


@contextmanager
def swapped(fakes: Fakes, modules: Iterable[torch.nn.Module]) -> Iterator[Mapping[int, torch.Tensor]]:
    """Replaces all parameters and buffers of modules by fake tensors in this block, and gives these by their ``id``."""
    places: list[tuple[Any, dict[str, Any]]] = []
    parameters: dict[int, Any] = {}
    try:
        for module in modules_of(*modules):
            homes: tuple[Any, ...] = (module._parameters, module._buffers)
            for home in homes:
                own = dict(home)
                places.append((home, own))
                for name, tensor in own.items():
                    if tensor is not None:
                        home[name] = fakes.like(tensor)
                        if home is module._parameters:
                            parameters[id(tensor)] = home[name]
        yield parameters
    finally:
        for home, own in places:
            home.clear()
            home.update(own)
