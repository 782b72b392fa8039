"""Dropout whose masks do not depend on how a batch is split.

Torch draws a mask from a stream of random numbers, so that what a sample gets depends on the samples before it. Here an
element is dropped as a function of the seed, the call, the sample and the position in the sample; ``dropmasks`` has the
formula. Beside this each call draws one number from torch's generator for the CPU, by which it is known again: a
forward that is computed for the second time has the random state of the first and draws the same one.
"""

import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from anybatch.errors import AnyBatchError, BatchError, NotSplittable
from anybatch.tensors.dispatch import current_mode, without_modes
from anybatch.tensors.dropdims import Dimensions, OtherDimension
from anybatch.tensors.dropmasks import CALLS, Calls, Masks, Samples
from anybatch.tensors.droprefusals import REFUSED, place_of_call
from anybatch.tensors.graph import in_backward, is_transformed

_ALPHA = 1.7580993408473766  # Klambauer et al. 2017, "Self-normalizing neural networks": scale times alpha


class _Kind(NamedTuple):
    """What a function does.

    Args:
        arguments: gives tensor, rate, whether it trains and whether it works in place.
        features: drops whole channels.
        alpha: keeps mean and variance of self-normalizing networks.
        unbatched: the number of dimensions that a sample alone has, if the function takes one.
        checks: raises or warns about the tensor's dimensions, also at a rate of 0.
    """

    arguments: Callable[..., tuple[torch.Tensor, float, bool, bool]]
    features: bool = False
    alpha: bool = False
    unbatched: int = 0
    checks: bool = False


_set_aside: ContextVar[bool] = ContextVar("anybatch_masks_set_aside", default=False)


@contextmanager
def masks_set_aside() -> Iterator[None]:
    """Lets torch draw the masks in this block, which only measures: no call is counted or remembered."""
    token = _set_aside.set(True)
    try:
        yield
    finally:
        _set_aside.reset(token)


class _Draw(NamedTuple):
    """A mask that was drawn, so that it can be drawn again."""

    samples: Samples
    call: int
    shape: torch.Size
    dim: int | None


class SampleDropout(TorchFunctionMode):
    """Draws the masks of dropout as a function of the seed, the call, the sample and the position in the sample.

    It is on for one logical batch, forwards and backwards. It sees ``nn.Dropout*``, ``nn.AlphaDropout``,
    ``nn.FeatureAlphaDropout`` and the functions behind them. A call is known by its number in the micro-batch. The
    position is that along each dimension, so that padding behind a sample does not change its mask. The samples lie in
    dim 0, where one may have several entries, one behind the other, or in dim 1 of ``[T, B, H]``, or in the only
    dimension of their number; which one it was is held against the other micro-batches. Time-major sequences flattened
    to ``[T * B, H]`` look like batch-major ones and get masks that do depend on the split, though valid ones; so do
    weights that are no parameter where their size is a multiple of the number of samples. A parameter, and a tensor
    with no such dimension, gets the same mask in all micro-batches. What drops out by itself, such as fused attention,
    is refused. In a compiled model dropout runs between two graphs.

    Args:
        seed: of the logical batch.

    Example:
        >>> def first_row(rows):
        ...     with SampleDropout(seed=1) as masks:
        ...         masks.begin(range(rows))
        ...         return torch.nn.functional.dropout(torch.ones(rows, 100), 0.5)[0]
        >>> torch.equal(first_row(2), first_row(7))
        True
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._masks, self._calls, self._dimensions = Masks(), Calls(int(seed)), Dimensions()
        self._samples: Samples | None = None
        self._shared = Samples((-1,))
        self._call = 0
        self._drawn: dict[int, list[_Draw]] = {}
        with without_modes():  # fakes have no numbers
            self._ticket = torch.empty((), dtype=torch.int64, device="cpu")
        # Not bound, since that would be a cycle. Without dynamo nothing is compiled, and loading it takes seconds.
        self._drop_eagerly = _disabled() if "torch._dynamo" in sys.modules else SampleDropout._drop

    def begin(self, samples: Sequence[int], *, stage: int = 0) -> None:
        """Begins a micro-batch, or goes through one again.

        Args:
            samples: the indices of its samples in the logical batch, in the micro-batch's order.
            stage: another one for another function of the same samples, whose calls are counted apart.

        Raises:
            BatchError: an index or the stage is negative.
        """
        indices = samples if isinstance(samples, range) else tuple(int(index) for index in samples)
        if stage < 0 or min(indices, default=0) < 0:
            raise BatchError(f"got samples {samples!r} in stage {stage}; expected indices and a stage of at least 0")
        if self._samples is not None:
            self._samples.forget()
        self._samples = Samples(indices)
        self._call = stage * CALLS

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch, with our masks if it drops out."""
        action = _ACTIONS.get(func)
        if action is None or _set_aside.get():
            return func(*args, **kwargs) if kwargs else func(*args)
        return action(self, func, args, kwargs or {})

    def _drop(self, kind: _Kind, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, rate, training, inplace = kind.arguments(*args, **kwargs)
        if (
            not training
            or not 0 < rate < 1
            or not (tensor.is_floating_point() or tensor.is_complex())
            or tensor.dim() < 2 * kind.features
        ):
            return func(*args, **kwargs)
        if tensor.is_nested or tensor.layout is not torch.strided:
            _fail(f"dropout got a tensor of layout {tensor.layout}, whose samples can't be told; expected a dense one")
        if kind.checks:
            func(tensor, 0.0)
        if tensor.numel() == 0:
            self._call += not in_backward()
            return func(*args, **kwargs)
        mask = self._mask(tensor, self._shape(kind, tensor), 1 - rate)
        if tensor.numel() >= _LARGE and not (inplace or kind.alpha or is_transformed()):
            result = _Masked.apply(tensor, mask, 1 / (1 - rate))  # type: ignore[no-untyped-call]
            return (result, mask.view(torch.bool)) if func is torch.native_dropout else result
        result = tensor.mul_(mask) if inplace else tensor.mul(mask)
        if not kind.alpha:
            result.mul_(1 / (1 - rate))
            return (result, mask.view(torch.bool)) if func is torch.native_dropout else result
        scale = ((_ALPHA**2 * rate + 1) * (1 - rate)) ** -0.5
        shift = mask.to(tensor.dtype).sub_(1).mul_(_ALPHA * scale).add_(_ALPHA * scale * rate)
        return result.mul_(scale).add_(shift)

    @staticmethod
    def _shape(kind: _Kind, tensor: torch.Tensor) -> list[int]:
        shape = list(tensor.shape)
        if not kind.features:
            return shape
        channels = 1 if tensor.dim() == kind.unbatched else 2
        return shape[:channels] + [1] * (len(shape) - channels)

    def _mask(self, tensor: torch.Tensor, shape: list[int], keep: float) -> torch.Tensor:
        draw = self._known_draw(tensor)
        dim = draw.dim
        if dim is None or shape[dim] != tensor.shape[dim]:  # the samples lie where a channel is dropped as a whole
            samples, dim = self._shared, 0
        else:
            samples = draw.samples
        mask = self._masks.draw(shape, dim, samples.keys(self._calls, draw.call, tensor.device), keep)
        if tensor.is_contiguous() or len(shape) < 3:
            return mask
        return torch.empty_like(tensor, dtype=torch.uint8).copy_(mask) if mask.shape == tensor.shape else mask

    def _known_draw(self, tensor: torch.Tensor) -> _Draw:
        """What this call draws: if it runs for the second time, what it drew then."""
        current = self._samples
        if current is None:
            raise AnyBatchError("dropout ran before begin(); expected begin(samples) at the start of each micro-batch")
        draws = self._drawn.setdefault(self._next_ticket(tensor), [])
        known = next(
            (draw for draw in draws if draw.samples is current or draw.samples.indices == current.indices), None
        )
        if in_backward():
            known = known or (draws[0] if len(draws) == 1 else None)
            if known is None:
                _fail(_NOT_REPLAYED)
        if known is not None:
            if known.shape != tensor.shape:
                _fail(
                    f"dropout got a tensor of shape {tuple(tensor.shape)} when it ran for the second time and of shape "
                    f"{tuple(known.shape)} before; expected a forward that computes the same when it runs again"
                )
            if not in_backward():
                self._call = max(self._call, known.call + 1)
            return known
        call = self._call
        try:
            dim = self._dimensions.find(call, tensor, len(current))
        except OtherDimension as error:
            _fail(f"the samples of call {call % CALLS} of dropout can't be followed: {error}. {_WHERE}", error)
        draws.append(_Draw(current, call, tensor.shape, dim))
        self._call += 1
        return draws[-1]

    def _next_ticket(self, tensor: torch.Tensor) -> int:
        if type(tensor) in _PLAIN and current_mode() is None:
            return int(self._ticket.random_().item())
        with without_modes():
            return int(self._ticket.random_().item())


class _Masked(torch.autograd.Function):
    """Times a mask and a number, backwards too without a tensor in between: for large tensors that saves a third."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        return tensor.mul(mask).mul_(scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.scale = inputs[2]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return _Masked.apply(gradients[0], mask, ctx.scale), None, None  # type: ignore[no-untyped-call]


_LARGE = 2**18  # elements; for small ones a function in Python takes longer than two operations


@functools.cache
def _disabled() -> Callable[..., Any]:
    """Drops out between two compiled graphs, never in one."""
    dropped: Callable[..., Any] = torch.compiler.disable(SampleDropout._drop)
    return dropped


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NOT_REPLAYED = (
    "dropout ran in a backward, where a forward is computed again, but not with the random state of the first forward, "
    "so that it would drop other elements. Use torch.utils.checkpoint with preserve_rng_state=True, its default"
)
_WHERE = (
    "Apply dropout where the samples lie in dim 0, to a parameter itself, and as often in each micro-batch; "
    "or let the masks depend on the split"
)


def _fail(text: str, cause: BaseException | None = None) -> NoReturn:
    module, where = place_of_call()
    raise NotSplittable(f"{text} (in {where})", modules=[module] if module else []) from cause


def _no_overrides(*_: Any) -> bool:
    return False


def _unchecked(function: Any) -> Any:
    """A copy of a function that does not hand itself over to modes, so that what it calls meets them."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    known = {**function.__globals__, **dict.fromkeys(names, _no_overrides)}
    copied = types.FunctionType(function.__code__, known, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _functional(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[torch.Tensor, float, bool, bool]:
    return input, p, training, inplace


def _evaluating(
    input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> tuple[torch.Tensor, float, bool, bool]:
    return input, p, training, inplace


def _operation(
    input: torch.Tensor, p: float, train: bool | None, *, inplace: bool = False
) -> tuple[torch.Tensor, float, bool, bool]:
    return input, p, train is not False, inplace


_in_place = functools.partial(_operation, inplace=True)
_KINDS: dict[Any, _Kind] = {
    F.dropout: _Kind(_functional),
    F.dropout1d: _Kind(_functional, features=True, unbatched=2, checks=True),
    F.dropout2d: _Kind(_functional, features=True, checks=True),
    F.dropout3d: _Kind(_functional, features=True, unbatched=4, checks=True),
    F.alpha_dropout: _Kind(_evaluating, alpha=True),
    F.feature_alpha_dropout: _Kind(_evaluating, features=True, alpha=True),
    torch.dropout: _Kind(_operation),
    torch.dropout_: _Kind(_in_place),
    torch.native_dropout: _Kind(_operation),
    torch.feature_dropout: _Kind(_operation, features=True),
    torch.feature_dropout_: _Kind(_in_place, features=True),
    torch.alpha_dropout: _Kind(_operation, alpha=True),
    torch.alpha_dropout_: _Kind(_in_place, alpha=True),
    torch.feature_alpha_dropout: _Kind(_operation, features=True, alpha=True),
    torch.feature_alpha_dropout_: _Kind(_in_place, features=True, alpha=True),
}


def _dropping(kind: _Kind) -> Callable[..., Any]:
    return lambda mode, func, args, kwargs: mode._drop_eagerly(mode, kind, func, args, kwargs)


def _differentiating(function: Any) -> Callable[..., Any]:
    meets_modes = _unchecked(function)

    def differentiate(mode: SampleDropout, func: Any, args: Any, kwargs: Any) -> Any:
        with mode:  # torch runs a function without the mode that handles it, and checkpoints run in this one
            return meets_modes(*args, **kwargs)

    return differentiate


def _refusing(check: Callable[..., None]) -> Callable[..., Any]:
    def refuse(mode: SampleDropout, func: Any, args: Any, kwargs: Any) -> Any:
        check(*args, **kwargs)
        return func(*args, **kwargs)

    return refuse


_ACTIONS: dict[Any, Callable[..., Any]] = {
    **{function: _dropping(kind) for function, kind in _KINDS.items()},
    **{
        function: _differentiating(function)
        for function in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
    },
    **{function: _refusing(check) for function, check in REFUSED.items()},
}
