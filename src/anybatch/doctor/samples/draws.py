"""Sees draws that cut the gradient although they could be drawn with one, and random generators that go back."""

import linecache
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from anybatch.doctor.recording.patches import noting
from anybatch.doctor.samples.walking import SCORES
from anybatch.doctor.values import tensors_in
from anybatch.records.samples import Drawn, Scored
from anybatch.userlines import user_place

if TYPE_CHECKING:
    from anybatch.doctor.recording.recordings import Recording

_MOST = 16  # draws of one step that are kept in mind
_MOST_ENTRIES = 65536  # of an input in which a draw is looked for
_DEPTH = 4  # of distributions within distributions


class _Draw(NamedTuple):
    result: Callable[[], torch.Tensor | None]
    distribution: str
    file: str
    line: int


class Draws:
    """Remembers what ``sample()`` gave in a sampled step until a module is given it."""

    def __init__(self, recording: "Recording") -> None:
        self._recording = recording
        self._pending: list[_Draw] = []
        self._found: list[Drawn] = []
        self._scored: set[tuple[str, int, bool]] = set()
        self.receivers: set[int] = set()  # ids of modules that were given a draw
        self._followed: set[type] = {object}

    def attach(self) -> None:
        """Wraps the methods of those distributions of torch that are made; ``Recording.patches`` takes them off."""
        follow, known = self._recording.guarded(self._follow), self._followed

        def made(distribution: Any, *_: Any, **__: Any) -> None:
            if type(distribution) not in known:
                follow(type(distribution))

        self._recording.patches.wrap(torch.distributions.Distribution, "__init__", noting(made))

    def _follow(self, made: type) -> None:
        for cls in set(made.__mro__) - self._followed:
            self._followed.add(cls)
            if cls.__module__.startswith("torch.distributions."):
                for name, after in (("sample", self._sampling()), ("log_prob", self._scoring())):
                    if name in vars(cls):
                        self._recording.patches.wrap(cls, name, noting(after=after))

    def _sampling(self) -> Callable[..., Any]:
        """What hears of ``sample``; compilers go through it, and can take no more than functions in its closure."""
        recording, drew = self._recording, self._recording.guarded(self._drew)

        def look(result: Any, distribution: Any, *_: Any, **__: Any) -> None:
            if recording.sampled_much and torch.is_grad_enabled():
                drew(distribution, result)

        return look

    def _scoring(self) -> Callable[..., Any]:
        score = self._recording.guarded(self._score)

        def look(result: Any, distribution: Any, value: Any, *_: Any, **__: Any) -> None:
            if isinstance(value, torch.Tensor) and getattr(result, "requires_grad", False):
                score(result, value, distribution)

        return look

    def _drew(self, distribution: Any, result: Any) -> None:
        if type(result) is not torch.Tensor or result.requires_grad or not result.is_floating_point():
            return
        if len(self._pending) < _MOST and distribution.has_rsample and learns(distribution):
            file, line = user_place(2)
            known = [one for one in self._pending if one.result() is not result]  # of a distribution within this one
            # Small ones are kept, since they may be joined with others and gone when a module is given that.
            result_of = (lambda: result) if result.numel() <= _MOST_ENTRIES else weakref.ref(result)
            self._pending = [*known, _Draw(result_of, type(distribution).__name__, file, line)]

    def _score(self, result: torch.Tensor, value: torch.Tensor, distribution: Any) -> None:
        crossed = _crossed(value, distribution)
        node: Any = result.grad_fn
        if node is not None:
            node.metadata[SCORES] = crossed[1] if crossed else ()
        key = type(distribution).__name__, width_of(value), bool(crossed)
        if key not in self._scored:
            self._scored.add(key)
            file, line = user_place(2)
            self._recording.emit(Scored(distribution=key[0], width=key[1], crossed=crossed, file=file, line=line))

    def given(self, module: torch.nn.Module, name: str, root: int, args: Any) -> None:
        """Is told what a module was called with."""
        if not (self._pending and module.training and torch.is_grad_enabled()):
            return
        for tensor in tensors_in(args):
            for draw in self._pending:
                drawn = draw.result()
                if drawn is not None and _holds(tensor, drawn):
                    self._pending.remove(draw)
                    self.receivers.add(id(module))
                    self._found.append(
                        Drawn(
                            root=root, module=name, distribution=draw.distribution, width=width_of(drawn),
                            file=draw.file, line=draw.line, code=linecache.getline(draw.file, draw.line).strip(),
                        )
                    )  # fmt: skip
                    return

    def take(self) -> list[Drawn]:
        """What was found since this was last asked."""
        found, self._found = self._found, []
        return found

    def next_step(self) -> None:
        """Forgets draws that no module was given."""
        self._pending = []


def _crossed(value: torch.Tensor, distribution: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of a column of values and of as many distributions in a row, or of a row and a column; else empty."""
    own, batch = tuple(value.shape), tuple(distribution.batch_shape)
    row, column = sorted((own, batch), key=len)
    is_crossed = len(row) == 1 and column == (*row, 1) and row[0] > 1 and not distribution.event_shape
    return (own, batch) if is_crossed else ()


def width_of(tensor: torch.Tensor) -> int:
    """The size of the last dim, 1 of a tensor without dims."""
    return tensor.shape[-1] if tensor.dim() else 1


def learns(distribution: Any, depth: int = _DEPTH) -> bool:
    """Whether one of the tensors that a distribution has, or one within it, requires a gradient."""
    for value in vars(distribution).values():
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, torch.distributions.Distribution) and depth and learns(value, depth - 1):
            return True
    return False


def _holds(tensor: torch.Tensor, drawn: torch.Tensor) -> bool:
    """Whether a tensor is what was drawn, in any shape, or has it as some of its columns."""
    if tensor is drawn or (tensor._base is not None and tensor._base is drawn):
        return True
    if drawn._base is not None and (tensor is drawn._base or tensor._base is drawn._base):
        return True
    return any(_begins(tensor, drawn))


def _begins(tensor: torch.Tensor, drawn: torch.Tensor) -> Iterator[bool]:
    if tensor.dim() != drawn.dim() or not tensor.dim() or tensor.shape[:-1] != drawn.shape[:-1]:
        return
    size, width = tensor.shape[-1], drawn.shape[-1]
    if not 1 < width < size or not drawn.numel() or tensor.numel() > _MOST_ENTRIES or tensor.dtype != drawn.dtype:
        return
    with torch.no_grad():
        if bool((drawn == drawn.flatten()[0]).all()):  # nothing that it could be told by
            return
        for start in (0, size - width):
            yield torch.equal(tensor.narrow(-1, start, width), drawn)


_OF_TORCH = slice(24, 24 + 624 * 8), slice(16, 24)  # its numbers, and which is the next, in the bytes of its state


_UNDRAWN = (0, 624)
"""Places of generators that nothing was drawn from since they were seeded."""


class Streams:
    """Looks at the generators of Python, NumPy and torch; none of them is changed, nor is any function.

    A generator makes 624 numbers at a time and hands them out in order. Nothing but a seed, or a state that is set,
    brings it back to an earlier one, or to numbers that it had before.
    """

    def __init__(self) -> None:
        self.back: dict[str, int] = {}  # how often each went back between two looks in one training
        self.stood: dict[str, int] = {}  # how often each, drawn from since its seed, was where it was one look before
        self._last: dict[tuple[int, str], tuple[int, int]] = {}
        self._seen: dict[tuple[int, str], set[int]] = {}

    def look(self, optimizer: int) -> None:
        """Is told that a step of an optimizer is about to be made."""
        for name, now in _places().items():
            key = optimizer, name
            last, self._last[key] = self._last.get(key), now
            seen = self._seen.setdefault(key, set())
            went_on = last is None or (now[1] >= last[1] if now[0] == last[0] else now[0] not in seen)
            self.back[name] = self.back.get(name, 0) + (not went_on)
            self.stood[name] = self.stood.get(name, 0) + (now == last and now[1] not in _UNDRAWN)
            seen.add(now[0])


def _places() -> dict[str, tuple[int, int]]:
    """For each generator which numbers it hands out, and which of them is the next."""
    *numbers, place = random.getstate()[1]
    found = {"random": (hash(tuple(numbers)), place)}
    if (numpy := sys.modules.get("numpy")) is not None:
        state: Any = numpy.random.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":
            found["np.random"] = hash(state["state"]["key"].tobytes()), int(state["state"]["pos"])
    whole = torch.get_rng_state().numpy()
    mine, following = (whole[part].tobytes() for part in _OF_TORCH)
    found["torch"] = hash(mine), int.from_bytes(following, sys.byteorder)
    return found
