"""A mode for fake tensors that remembers what operations gave for the shapes that they were given.

Torch's own mode remembers that, too, but asking it takes longer than most operations. This is the one file that names
torch's private module for fake tensors.
"""

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Fake = FakeTensor
_DEVICE = torch.ops.prim.device.default
_PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


class _Known(NamedTuple):
    """A tensor that an operation gave; ``aliases`` says that it is a view of the first argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    aliases: bool


class QuickFakeMode(FakeTensorMode):
    """Torch's mode for fake tensors, which it asks about each operation on the same shapes only once.

    Remembered are operations of torch that depend on nothing but the layouts of their arguments and change none of
    them; what they give is new, or a view of the first argument. All others go to torch each time.

    Attributes:
        is_over: whether nothing may be done any more with tensors of this mode that something still refers to.

    Example:
        >>> with QuickFakeMode(allow_non_fake_inputs=True):
        ...     total = torch.empty(3, 4).sum(1)
        >>> total.shape, type(total).__name__
        (torch.Size([3]), 'FakeTensor')
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.is_over = False
        self._remembered: dict[tuple[Any, ...], tuple[type | None, tuple[_Known | None, ...]]] = {}
        self._is_quick: dict[Any, bool] = {}

    def alive(self) -> list[torch.Tensor]:
        """The fake tensors of this mode that something still refers to."""
        return [one for one in gc.get_objects() if type(one) is FakeTensor and one.fake_mode is self]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Gives what is remembered, else what torch says."""
        if func is _DEVICE and type(args[0]) is FakeTensor and not self.in_kernel_invocation:
            return args[0].fake_device
        if self.is_over:
            raise RuntimeError(f"{func} is to run on a tensor without numbers of a trace that is over")
        key = self._key(func, args, kwargs)
        known = None if key is None else self._remembered.get(key)
        if known is not None:
            return self._made(known, args)
        result = super().__torch_dispatch__(func, types, args, kwargs or {})
        if key is not None:
            self._remember(key, args, kwargs, result)
        return result

    def _key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[Any, ...] | None:
        """What the result depends on; ``None`` if that is more than layouts."""
        is_quick = self._is_quick.get(func)
        if is_quick is None:
            is_quick = self._is_quick[func] = _depends_on_layouts(func)
        if not is_quick or not args or type(args[0]) not in (FakeTensor, list, tuple):
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
        """Adds the layouts of tensors and the values of everything else; says whether it knows them all."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                is_plain = value.fake_mode is self and value.constant is None and value.layout is torch.strided
                if not is_plain or value.is_conj() or value.is_neg():
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
        self, key: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Any
    ) -> None:
        given = [_storage(tensor) for tensor in _tensors_in([*args, *(kwargs or {}).values()])]
        first = _storage(args[0]) if type(args[0]) is FakeTensor else None
        made: list[_Known | None] = []
        new: set[int] = set()
        for one in result if type(result) in (list, tuple) else (result,):
            if one is None:
                made.append(None)
                continue
            if not self._is_plain_result(one) or any(one is tensor for tensor in _tensors_in(args)):
                return
            storage, aliases = _storage(one), _storage(one) == first
            layout = (tuple(one.shape), tuple(one.stride()), one.storage_offset())
            if aliases:
                if given.count(storage) != 1:  # which of them it is a view of is not known
                    return
            elif storage in given or storage in new or one.untyped_storage().nbytes() != _nbytes(one):
                return
            new.add(storage)
            made.append(_Known(*layout, one.dtype, one.fake_device, aliases))
        self._remembered[key] = (type(result) if type(result) in (list, tuple) else None, tuple(made))

    def _is_plain_result(self, one: Any) -> bool:
        if type(one) is not FakeTensor or one.constant is not None or one.layout is not torch.strided:
            return False
        return not (one.requires_grad or one.is_conj() or one.is_neg())


def _depends_on_layouts(func: Any) -> bool:
    """Whether an operation is one of torch's own that looks at no values and changes no argument."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or func._schema.is_mutable:
        return False
    return not any(tag in func.tags for tag in _DEPENDENT) and "lift" not in func.overloadpacket.__name__


def _tensors_in(values: Iterable[Any]) -> list[Any]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors_in(value)
    return found


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _nbytes(tensor: Any) -> int:
    """The bytes of a storage that is made for a tensor; -1 if it begins within a storage."""
    if tensor.storage_offset():
        return -1
    if tensor.numel() == 0:
        return 0
    items = 1 + sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(items * tensor.element_size())
