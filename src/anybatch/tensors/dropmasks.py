"""Masks of dropout as a function of a seed, a call, a sample and a position in the sample.

Every sample of a call has two random 64-bit numbers ``a`` and ``b``, ``b`` odd, and every position in a sample has a
fixed one, ``x``. The element is kept if ``((x ^ a) * b) mod 2^64``, read as a signed number, is below a threshold. A
product with a random odd multiplier whose high bits count is the multiply-shift hash of Dietzfelbinger, Hagerup,
Katajainen and Penttonen 1997, "A reliable randomized algorithm for the closest-pair problem"; the ``xor`` takes the
linear relation between the rows away. All three numbers come from the finalizer of SplitMix64 (Steele, Lea and Flood
2014, "Fast splittable pseudorandom number generators"). Integers wrap around in the same way on every device.
"""

import math
from collections.abc import Sequence

import torch

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, the increment of SplitMix64
_SHIFTS = (30, 27, 31)
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_AT_ONCE_ON_CPU = 2**15  # elements, whose words of 256 KiB a core has in its cache
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
    """The same in place, for a tensor of int64 whose bits are those of the number."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        numbers.bitwise_xor_(torch.bitwise_right_shift(numbers, shift).bitwise_and_(2 ** (64 - shift) - 1))
        numbers.mul_(_signed(factor))
    return numbers


def keys_of(seed: int, call: int, samples: Sequence[int], device: torch.device) -> torch.Tensor:
    """The numbers ``a`` and ``b`` of samples in a call, of shape ``[2, samples]``.

    Args:
        seed: of the logical batch.
        call: of a module.
        samples: their positions in the logical batch; -1 stands for what all samples share.
        device: where the mask is wanted.
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
    """A mask of ones and zeros as uint8, made for some positions at a time.

    Args:
        shape: of the mask; the samples lie in dim 0, where each may have several entries, one behind the other.
        keys: what ``keys_of`` gave.
        keep: the share of ones.
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
        # On the CPU a comparison that gives bool is many times slower.
        mask[:, start : start + step] = torch.lt(words, threshold, out=words)
    return mask.view(*shape)


def _positions(numbers: range, sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """What positions in a sample are known by, which is made of those along each dimension."""
    rest = torch.arange(numbers.start, numbers.stop, dtype=torch.int64, device=device)
    found = torch.zeros_like(rest)
    for dim in reversed(range(len(sizes))):
        found.add_(rest.remainder(sizes[dim]), alpha=_signed(mixed(dim + 1) | 1))
        rest = rest.div(sizes[dim], rounding_mode="floor") if dim else rest
    found.bitwise_xor_(torch.bitwise_right_shift(found, 32)).mul_(_signed(_FACTORS[0]))
    return found.bitwise_xor_(torch.bitwise_right_shift(found, 29))
