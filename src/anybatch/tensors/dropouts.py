"""Dropout whose masks do not depend on how a batch is split.

Torch draws masks from a stream of random numbers, so that the mask of a sample depends on the samples before it. Here
it is a function of the seed, the call, the sample and the position in the sample. Each call also draws one number from
torch's CPU generator as its id: a forward that is recomputed starts from the same random state, draws the same number,
and so gets the same masks.

Every sample of a call has two random 64-bit numbers ``a`` and ``b``, ``b`` odd, and every position in a sample has a
fixed number ``x``. An element is kept if ``((x ^ a) * b) mod 2^64``, read as a signed integer, is below a threshold.
The high bits of a product with a random odd multiplier are the multiply-shift hash of Dietzfelbinger, Hagerup,
Katajainen and Penttonen 1997, "A reliable randomized algorithm for the closest-pair problem"; the ``xor`` removes the
linear relation between rows. All three numbers come from the finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast
splittable pseudorandom number generators"). Integers wrap around in the same way on every device.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from anybatch.errors import AnyBatchError, BatchError, NotSplittable
from anybatch.tensors.dispatch import without_modes
from anybatch.tensors.graph import in_backward
from anybatch.userlines import calling_frame

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, the increment of SplitMix64
_SHIFTS = (30, 27, 31)
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_AT_ONCE_ON_CPU = 2**15  # elements; their int64 words take 256 KiB and stay in a core's cache
_AT_ONCE = 2**19


def _signed(number: int) -> int:
    number &= _MASK
    return number - 2**64 if number >= 2**63 else number


def mixed(number: int) -> int:
    """The finalizer of SplitMix64: a permutation of the integers below 2^64."""
    number &= _MASK
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        number = (number ^ (number >> shift)) * factor & _MASK
    return number


def _mix_(numbers: torch.Tensor) -> torch.Tensor:
    """``mixed`` in place, for an int64 tensor read as unsigned."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        numbers.bitwise_xor_(torch.bitwise_right_shift(numbers, shift).bitwise_and_(2 ** (64 - shift) - 1))
        numbers.mul_(_signed(factor))
    return numbers


def keys_of(seed: int, call: int, samples: Sequence[int], device: torch.device) -> torch.Tensor:
    """The numbers ``a`` and ``b`` of each sample in a call, as int64 of shape ``[2, samples]``.

    Args:
        samples: indices in the logical batch; -1 for a mask that all samples share.
    """
    if isinstance(samples, range):
        own = torch.arange(samples.start, samples.stop, samples.step, dtype=torch.int64, device=device)
    else:
        own = torch.tensor(samples, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
    own.mul_(_signed(_GOLDEN))
    of_call = [_signed(mixed((2 * call + which) * _GOLDEN + mixed(seed))) for which in (0, 1)]
    table = _mix_(torch.stack([own ^ number for number in of_call]))
    table[1].bitwise_or_(1)
    return table


def mask_of(shape: Sequence[int], keys: torch.Tensor, keep: float) -> torch.Tensor:
    """A dropout mask of ones and zeros, uint8, made in chunks of positions.

    Args:
        shape: of the mask; samples are in dim 0, where each may have several consecutive rows.
    """
    device, rows = keys.device, keys.shape[1]
    sizes = ((shape[0] if shape else 1) // rows, *shape[1:])  # of a sample
    places = math.prod(sizes)
    mask = torch.empty((rows, places), dtype=torch.uint8, device=device)
    threshold = min(round(keep * 2**64), _MASK) - 2**63
    step = max(1, (_AT_ONCE_ON_CPU if device.type == "cpu" else _AT_ONCE) // rows)
    for start in range(0, places, step):
        words = _positions(range(start, min(start + step, places)), sizes, device).bitwise_xor(keys[0, :, None])
        words.mul_(keys[1, :, None])
        # On the CPU a comparison with a bool output is many times slower.
        mask[:, start : start + step] = torch.lt(words, threshold, out=words)
    return mask.view(*shape)


def _positions(numbers: range, sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """The number ``x`` of each position in a sample, computed from its index in each dimension."""
    rest = torch.arange(numbers.start, numbers.stop, dtype=torch.int64, device=device)
    found = torch.zeros_like(rest)
    for dim in reversed(range(len(sizes))):
        found.add_(rest.remainder(sizes[dim]), alpha=_signed(mixed(dim + 1) | 1))
        rest = rest.div(sizes[dim], rounding_mode="floor") if dim else rest
    found.bitwise_xor_(torch.bitwise_right_shift(found, 32)).mul_(_signed(_FACTORS[0]))
    return found.bitwise_xor_(torch.bitwise_right_shift(found, 29))


_CALLS = 2**32  # the most calls in a stage of a micro-batch
_ALPHA = 1.7580993408473766  # Klambauer et al. 2017, "Self-normalizing neural networks": scale times alpha


class _Kind(NamedTuple):
    """What a class of dropout modules does."""

    # torch's function, called with a rate of 0 for its errors and warnings about dimensions
    check: Callable[..., Any] | None = None
    features: bool = False  # drops whole channels
    alpha: bool = False  # preserves mean and variance, as self-normalizing networks need
    unbatched: int = -1  # the number of dimensions of an input without a batch dimension, if the module accepts one


_KINDS: dict[type[nn.Module], _Kind] = {
    nn.Dropout: _Kind(),
    nn.Dropout1d: _Kind(F.dropout1d, features=True, unbatched=2),
    nn.Dropout2d: _Kind(F.dropout2d, features=True),
    nn.Dropout3d: _Kind(F.dropout3d, features=True, unbatched=4),
    nn.AlphaDropout: _Kind(alpha=True),
    nn.FeatureAlphaDropout: _Kind(features=True, alpha=True),
}
_set_aside: ContextVar[bool] = ContextVar("anybatch_masks_set_aside", default=False)


@contextmanager
def masks_set_aside() -> Iterator[None]:
    """Lets torch draw the masks in this block, which only measures; its calls are not counted."""
    token = _set_aside.set(True)
    try:
        yield
    finally:
        _set_aside.reset(token)


class _Draw(NamedTuple):
    samples: Sequence[int]
    call: int
    shape: torch.Size


class SampleDropout:
    """Draws the masks of ``nn.Dropout*`` as a function of the seed, the call, the sample and the position in it.

    The context is active for one logical batch, forward and backward. A call is identified by its module and the number
    of times that it ran in the micro-batch before. Positions are indices in each dimension, so that padding after a
    sample does not change its mask. Samples are in dim 0, where each may have several consecutive rows. Parameters, and
    tensors without a sample dimension, get the same mask in all micro-batches. Dropout outside of these modules, such
    as ``F.dropout`` and fused attention, is refused. In a compiled model dropout is a graph break.
    """

    def __init__(self, seed: int, models: Iterable[nn.Module]) -> None:
        self._seed = int(seed)
        named = {module: name for model in models for name, module in model.named_modules()}
        self._names = {module: name or type(module).__name__ for module, name in named.items() if _kind_of(module)}
        self._numbers = {module: number for number, module in enumerate(self._names)}
        self._samples: Sequence[int] | None = None
        self._stage = 0
        self._times: Counter[nn.Module] = Counter()
        self._drawn: dict[int, list[_Draw]] = {}
        self._entries: dict[int, tuple[int, torch.Size]] = {}
        self._refusing = _Refusing()
        with without_modes():  # within a fake mode it would have no value
            self._ticket = torch.empty((), dtype=torch.int64, device="cpu")

    def __enter__(self) -> Self:
        # Without dynamo nothing is compiled, and loading it takes seconds.
        drop: Any = torch.compiler.disable(self._drop) if "torch._dynamo" in sys.modules else self._drop
        for module in self._names:
            module.__dict__["forward"] = partial(drop, module)
        self._refusing.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._refusing.__exit__(*error)  # type: ignore[no-untyped-call]
        for module in self._names:
            module.__dict__.pop("forward", None)

    def begin(self, samples: Sequence[int], *, stage: int = 0) -> None:
        """Begins a micro-batch, or runs one again."""
        indices = samples if isinstance(samples, range) else tuple(int(index) for index in samples)
        if stage < 0 or min(indices, default=0) < 0:
            raise BatchError(f"got samples {samples!r} in stage {stage}; expected indices and a stage of at least 0")
        self._samples, self._stage = indices, stage
        self._times.clear()

    def _drop(self, module: Any, tensor: torch.Tensor) -> torch.Tensor:
        kind, rate, forward = _kind_of(module), module.p, type(module).forward
        is_random = module.training and 0 < rate < 1 and (tensor.is_floating_point() or tensor.is_complex())
        if kind is None or not is_random or _set_aside.get():
            with masks_set_aside():
                return forward(module, tensor)  # type: ignore[no-any-return]
        if kind.check is not None:
            kind.check(tensor, 0.0)
        if tensor.is_nested or tensor.layout is not torch.strided:
            raise self._refused(module, f"got a tensor of layout {tensor.layout}, whose samples can't be found")
        if tensor.numel() == 0:
            self._times[module] += not in_backward()
            return tensor.clone()
        mask = self._mask(module, kind, tensor)
        result = tensor.mul_(mask) if module.inplace else tensor.mul(mask)
        if not kind.alpha:
            return result.mul_(1 / (1 - rate))
        scale = ((_ALPHA**2 * rate + 1) * (1 - rate)) ** -0.5
        shift = mask.to(tensor.dtype).sub_(1).mul_(_ALPHA * scale).add_(_ALPHA * scale * rate)
        return result.mul_(scale).add_(shift)

    def _mask(self, module: Any, kind: _Kind, tensor: torch.Tensor) -> torch.Tensor:
        draw = self._known_draw(module, tensor)
        shape = list(tensor.shape)
        is_alone = tensor.dim() == kind.unbatched
        if kind.features:
            shape[2 - is_alone :] = [1] * (len(shape) - 2 + is_alone)
        is_own = not is_alone and self._is_own(module, draw, tensor)
        keys = keys_of(self._seed, draw.call, draw.samples if is_own else (-1,), tensor.device)
        mask = mask_of(shape, keys, 1 - module.p)
        if tensor.is_contiguous() or len(shape) < 3 or mask.shape != tensor.shape:
            return mask
        return torch.empty_like(tensor, dtype=torch.uint8).copy_(mask)  # channels last

    def _is_own(self, module: nn.Module, draw: _Draw, tensor: torch.Tensor) -> bool:
        """Whether each sample has its own rows in dim 0; other tensors, such as weights, share one mask."""
        if tensor.dim() == 0 or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return False
        rows, size = len(draw.samples), tensor.shape[0]
        if tensor.dim() > 2 and size != rows > 1 and tensor.shape[1] == rows:
            raise self._refused(module, f"got a tensor of shape {tuple(tensor.shape)} in a micro-batch of {rows}")
        before_rows, before = self._entries.get(draw.call, (rows, tensor.shape))
        was_own, is_own = before[0] % before_rows == 0, size % rows == 0
        stands_still = tensor.shape == before and rows != before_rows and size in (rows, before_rows)
        if not (is_own and not stands_still if was_own else tensor.shape == before):
            raise self._refused(
                module,
                f"got a tensor of shape {tuple(tensor.shape)} in a micro-batch of {rows} samples, and of "
                f"{tuple(before)} in one of {before_rows}",
            )
        if draw.call not in self._entries or before_rows == 1:
            self._entries[draw.call] = rows, tensor.shape
        return is_own and was_own

    def _known_draw(self, module: nn.Module, tensor: torch.Tensor) -> _Draw:
        """What this call draws; the same as before if it is recomputed."""
        current = self._samples
        if current is None:
            raise AnyBatchError("dropout ran before begin(); expected begin(samples) at the start of each micro-batch")
        with without_modes():
            ticket = int(self._ticket.random_().item())
        draws = self._drawn.setdefault(ticket, [])
        known = next((draw for draw in draws if draw.samples == current), None)
        if in_backward():
            known = known or (draws[0] if len(draws) == 1 else None)
            if known is None:
                raise self._refused(module, _NOT_REPLAYED)
        if known is None:
            call = self._stage * _CALLS + self._times[module] * len(self._numbers) + self._numbers[module]
            known = _Draw(current, call, tensor.shape)
            draws.append(known)
        elif known.shape != tensor.shape:
            raise self._refused(
                module,
                f"got a tensor of shape {tuple(tensor.shape)} when it was recomputed and of shape "
                f"{tuple(known.shape)} before; expected a forward that computes the same when it runs again",
            )
        self._times[module] += not in_backward()
        return known

    def _refused(self, module: nn.Module, what: str) -> NotSplittable:
        name = self._names[module]
        return NotSplittable(
            f"{name}, a {type(module).__name__}, {what}. With dropout='per-sample' apply it to a tensor with the "
            "samples in dim 0, or to a parameter; or let the masks depend on the split: dropout='native'",
            modules=[name],
        )


_NOT_REPLAYED = (
    "was recomputed in a backward without the random state of the first forward, so that it would drop other elements; "
    "use torch.utils.checkpoint with preserve_rng_state=True, its default"
)


def _kind_of(module: nn.Module) -> _Kind | None:
    """The kind of a dropout module; ``None`` for other modules, and for subclasses with their own forward."""
    for base, kind in _KINDS.items():
        if isinstance(module, base):
            return kind if type(module).forward is base.forward else None
    return None


def refuse_unseen(model: nn.Module) -> None:
    """Refuses a model with dropout inside fused functions or scripts, where masks can't be replaced."""
    found = [(name or "model", *reason) for name, module in model.named_modules() if (reason := _reason(module))]
    if found:
        text = "; ".join(f"{name!r} is {what}, whose {does}. {remedy}" for name, what, does, remedy in found)
        raise NotSplittable(text, modules=[name for name, *_ in found])


def _reason(module: nn.Module) -> tuple[str, str, str] | None:
    if isinstance(module, torch.jit.ScriptModule):
        dropping = [
            part for part in module.modules() if "Dropout" in getattr(part, "original_name", "") and part.training
        ]
        return ("a script", "dropout is not seen", "Use the module that it was made from") if dropping else None
    if not module.training:
        return None
    kind = f"nn.{type(module).__name__}"
    if isinstance(module, nn.MultiheadAttention) and module.dropout > 0:
        return kind, *_ATTENTION
    if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
        return kind, *_LAYERS
    if isinstance(module, nn.RReLU) and module.lower != module.upper:
        return kind, *_SLOPES
    return None


_ATTENTION = (
    "dropout of attention weights is drawn within the function, so that it depends on the split",
    "Set its dropout to 0 and keep nn.Dropout around it; or write attention as softmax, nn.Dropout and a product",
)
_LAYERS = (
    "dropout between layers is drawn within the function, so that it depends on the split",
    "Use modules of one layer with nn.Dropout between them",
)
_SLOPES = ("slopes are drawn within the function, so that they depend on the split", "Use nn.LeakyReLU or nn.PReLU")


class _Refusing(TorchFunctionMode):
    """Refuses dropout functions that are called without a module."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rate, remedy = 0.0, "use nn.Dropout modules of the model"
        if func is F.scaled_dot_product_attention:
            rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            remedy = _ATTENTION[1]
        elif func in _FUNCTIONS:
            is_on = kwargs.get("training", args[2] if len(args) > 2 else _FUNCTIONS[func])
            rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5) if is_on else 0.0
        if 0 < rate < 1 and not _set_aside.get():
            raise NotSplittable(
                f"got {func.__name__} at a rate of {rate} (in {_line_of_call()}), whose masks depend on the split. "
                f"With dropout='per-sample' {remedy}; or let the masks depend on the split: dropout='native'"
            )
        return func(*args, **kwargs)


# Functions, each with its default for training=.
_FUNCTIONS: dict[Any, bool] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.dropout_), True),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), False),
}


def _line_of_call() -> str:
    frame = calling_frame(sys._getframe())
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "torch"
