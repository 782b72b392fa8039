"""Masks of dropout as a function of a seed, a call, a sample and a position in the sample.

Every sample of a call has two random 64-bit numbers ``a`` and ``b``, ``b`` odd, and every position in a sample has a
fixed one, ``x``. The element is kept if ``((x ^ a) * b) mod 2^64``, read as a signed number, is below a threshold. A
product with a random odd multiplier whose high bits count is the multiply-shift hash of Dietzfelbinger, Hagerup,
Katajainen and Penttonen 1997, "A reliable randomized algorithm for the closest-pair problem"; the ``xor`` takes the
linear relation between the rows away. All three numbers come from the finalizer of SplitMix64 (Steele, Lea and Flood
2014, "Fast splittable pseudorandom number generators"). Integers wrap around in the same way on every device.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, the increment of SplitMix64
_SHIFTS = (30, 27, 31)
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_POSITIONS_KEPT = 2**18  # 2 MiB, over all shapes
CALLS = 2**32  # in a stage of a micro-batch, at most
_KEYS_AT_ONCE = 2**15
_AT_ONCE_ON_CPU = 2**15  # two buffers of 256 KiB, which a core has in its cache
_AT_ONCE = 2**19  # two buffers of 4 MiB


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
        shifted = torch.bitwise_right_shift(numbers, shift).bitwise_and_(2 ** (64 - shift) - 1)
        numbers.bitwise_xor_(shifted)
        if factor != 1:
            numbers.mul_(_signed(factor))
    return numbers


_STRIDES = tuple(_signed(mixed(dim + 1) | 1) for dim in range(64))  # of positions along each dimension


class Samples:
    """Which samples of the logical batch a micro-batch has.

    Args:
        indices: of its samples, in its order; -1 stands for what all samples share.
    """

    __slots__ = ("_keys", "_own", "indices")

    def __init__(self, indices: range | tuple[int, ...]) -> None:
        self.indices = indices
        self._own: dict[torch.device, torch.Tensor] = {}
        self._keys: dict[torch.device, tuple[int, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.indices)

    def forget(self) -> None:
        """Frees what can be made again."""
        self._own.clear()
        self._keys.clear()

    def keys(self, calls: "Calls", call: int, device: torch.device) -> torch.Tensor:
        """The two numbers of every sample in a call, of shape ``[2, samples]``."""
        known = self._keys.get(device)
        if known is None or not known[0] <= call < known[0] + len(known[1]):
            count = max(1, min(calls.ahead(call), _KEYS_AT_ONCE // max(1, len(self))))
            table = _mix_(calls.keys(call, count, device) ^ self._numbers(device))
            table[:, 1].bitwise_or_(1)
            known = self._keys[device] = call, table
        return known[1][call - known[0]]

    def _numbers(self, device: torch.device) -> torch.Tensor:
        if device not in self._own:
            if isinstance(self.indices, range):
                rows = self.indices
                numbers = torch.arange(rows.start, rows.stop, rows.step, dtype=torch.int64, device=device)
            else:
                numbers = torch.tensor(self.indices, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
            self._own[device] = numbers.mul_(_signed(_GOLDEN))
        return self._own[device]


class Calls:
    """The numbers that tell the calls of a logical batch apart.

    Args:
        seed: of the logical batch.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._most = 8  # calls in one micro-batch
        self._keys: dict[tuple[int, int, torch.device], torch.Tensor] = {}

    def ahead(self, call: int) -> int:
        """For how many calls from this one on it is worth to make the keys at once."""
        order = call % CALLS
        while order >= self._most:
            self._most *= 2
        return self._most - order

    def keys(self, first: int, count: int, device: torch.device) -> torch.Tensor:
        """Two numbers for every call from the first on, of shape ``[count, 2, 1]``."""
        name = (first, count, device)
        if name not in self._keys:
            numbers = torch.arange(2 * first, 2 * (first + count), dtype=torch.int64, device=device)
            numbers.mul_(_signed(_GOLDEN)).add_(_signed(mixed(self._seed)))
            self._keys[name] = _mix_(numbers).view(count, 2, 1)
        return self._keys[name]


class Masks:
    """Makes masks; keeps the numbers of the positions in small samples, and its buffers on the CPU."""

    def __init__(self) -> None:
        self._positions: dict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = {}
        self._room = _POSITIONS_KEPT
        self._buffers: dict[tuple[torch.device, str], torch.Tensor] = {}

    def draw(self, shape: Sequence[int], keys: torch.Tensor, keep: float) -> torch.Tensor:
        """A mask.

        Args:
            shape: of the mask; the samples lie in dim 0, where each may have several entries, one behind the other.
            keys: what ``Samples.keys`` gave; on the device of the mask.
            keep: the share of ones.

        Returns:
            Ones and zeros as uint8.
        """
        device, rows = keys.device, keys.shape[1]
        sizes = ((shape[0] if shape else 1) // rows, *shape[1:])  # of a sample
        keys = keys.view(2, rows, *[1] * len(sizes))
        at_once = _AT_ONCE_ON_CPU if device.type == "cpu" else _AT_ONCE
        threshold = min(round(keep * 2**64), _MASK) - 2**63
        known = self._positions.get((device, sizes))
        if known is not None and known.numel() * rows <= at_once:
            words = torch.bitwise_xor(known, keys[0]).mul_(keys[1])
            if device.type == "cpu":  # a comparison that gives bool is many times slower there
                return torch.lt(words, threshold, out=words).to(torch.uint8).view(shape)
            return torch.lt(words, threshold).view(torch.uint8).view(shape)
        mask = torch.empty((rows, *sizes), dtype=torch.uint8, device=device)
        words = self._buffer("words", min(at_once, mask.numel()), device)
        for block in _blocks(sizes, at_once):
            positions = self._numbers(block, sizes, words)
            step = max(1, at_once // positions.numel())
            for start in range(0, rows, step):
                target = mask[(slice(start, min(start + step, rows)), *block)]
                own = keys.narrow(1, start, len(target))
                word = words[: target.numel()].view(target.shape)
                torch.bitwise_xor(positions, own[0], out=word).mul_(own[1])
                if device.type == "cpu":
                    target.copy_(torch.lt(word, threshold, out=word))
                else:
                    torch.lt(word, threshold, out=target.view(torch.bool))
        return mask.view(shape)

    def _buffer(self, name: str, count: int, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":  # its allocator is fast, and knows of streams
            return torch.empty(count, dtype=torch.int64, device=device)
        kept = self._buffers.get((device, name))
        if kept is None or len(kept) < count:
            kept = self._buffers[device, name] = torch.empty(count, dtype=torch.int64, device=device)
        return kept

    def _numbers(self, block: Sequence[slice], sizes: tuple[int, ...], scratch: torch.Tensor) -> torch.Tensor:
        """The numbers of the positions in a block; the scratch is as long as the block."""
        device, lengths = scratch.device, [part.stop - part.start for part in block]
        whole, key = lengths == list(sizes), (device, sizes)
        if whole and key in self._positions:
            return self._positions[key]
        count = math.prod(lengths)
        keeps = whole and count <= self._room
        out = torch.empty(count, dtype=torch.int64, device=device) if keeps else self._buffer("x", count, device)
        numbers = out[:count].view(lengths).zero_()
        for place, part in enumerate(block):
            if part.stop > 1:
                steps = torch.arange(part.start, part.stop, dtype=torch.int64, device=device)
                numbers.add_(steps.mul_(_STRIDES[place % len(_STRIDES)]).view(-1, *[1] * (len(block) - place - 1)))
        shifted = scratch[:count].view(lengths)
        numbers.bitwise_xor_(torch.bitwise_right_shift(numbers, 32, out=shifted)).mul_(_signed(_FACTORS[0]))
        numbers.bitwise_xor_(torch.bitwise_right_shift(numbers, 29, out=shifted))
        if keeps:
            self._room -= count
            self._positions[key] = numbers
        return numbers


def _blocks(sizes: Sequence[int], limit: int) -> Iterator[tuple[slice, ...]]:
    """Cuts an array into blocks of at most so many elements, each as long as it can be in the last dimensions."""
    whole, count = len(sizes), 1
    while whole and count * sizes[whole - 1] <= limit:
        whole -= 1
        count *= sizes[whole]
    behind = tuple(slice(0, size) for size in sizes[whole:])
    if not whole:
        yield behind
        return
    step, size = max(1, limit // count), sizes[whole - 1]
    for before in itertools.product(*(range(size) for size in sizes[: whole - 1])):
        for start in range(0, size, step):
            yield (*(slice(at, at + 1) for at in before), slice(start, min(start + step, size)), *behind)
