"""What is put around the forward of a module for a while, and the handle that takes it off again."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, Self

import torch

INSTEAD, INSIDE, OUTSIDE = range(3)
"""Where a layer lies: in place of the forward, next to it, or around the layers inside."""


class Layer(Protocol):
    """What is put around a forward."""

    def __call__(self, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward.

        Args:
            inner: the forward, with the layers further inside.
            *args: of the call.
            **kwargs: of the call.
        """


class Handle:
    """Takes off what was put on; ``remove()`` may be called more than once. Also a context manager.

    Args:
        undo: what takes the parts off; called from the last to the first.

    Example:
        >>> with Handle([lambda: print("off")]) as handle:
        ...     print("on")
        on
        off
        >>> handle.remove()
    """

    def __init__(self, undo: Iterable[Callable[[], None]] = ()) -> None:
        self._undo = list(undo)

    def remove(self) -> None:
        """Takes everything off that is still on."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Layered:
    """A forward with layers around it.

    A call works with the layers that were there when it began, so that what it leaves for the backward does not depend
    on when they are taken off.

    Args:
        forward: what is called in the end.
    """

    __slots__ = ("__wrapped__", "layers")

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.__wrapped__ = forward
        self.layers: tuple[tuple[int, Layer], ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the outermost layer."""
        inner = self.__wrapped__
        for _, layer in self.layers:
            inner = partial(layer, inner)
        return inner(*args, **kwargs)

    def add(self, rank: int, layer: Layer) -> None:
        """Puts a layer around those of the same rank and within those of a higher one."""
        self.layers = tuple(sorted((*self.layers, (rank, layer)), key=lambda entry: entry[0]))

    def drop(self, layer: Layer) -> None:
        """Takes a layer off."""
        self.layers = tuple(entry for entry in self.layers if entry[1] is not layer)


class _ForwardOf(Layered):
    """The layered forward of a module, which knows what was in its place before."""

    __slots__ = ("replaced",)

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module.forward)
        self.replaced = module.__dict__.get("forward")


def put_on(module: torch.nn.Module, layer: Layer, rank: int) -> Callable[[], None]:
    """Puts a layer around the forward of a module.

    The module keeps its class, its hooks, its parameters and the keys of its state: it has an attribute ``forward`` of
    its own as long as there are layers. What was there as such an attribute is called inside, and put back.

    Args:
        module: any.
        layer: what to put on.
        rank: ``INSTEAD``, ``INSIDE`` or ``OUTSIDE``.

    Returns:
        What takes it off; layers may be taken off in any order.
    """
    forward = module.__dict__.get("forward")
    if not isinstance(forward, _ForwardOf):
        # Into the dictionary itself: setting an attribute of a module takes longer and looks for parameters.
        module.__dict__["forward"] = forward = _ForwardOf(module)
    forward.add(rank, layer)
    return partial(_take_off, module, forward, layer)


def _take_off(module: torch.nn.Module, forward: _ForwardOf, layer: Layer) -> None:
    forward.drop(layer)
    if forward.layers or module.__dict__.get("forward") is not forward:
        return  # another's forward lies over this one, which only passes calls through from now on
    if forward.replaced is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward.replaced


class _Runs:
    """The forward of a Sequential, some runs of whose children have layers."""

    def __init__(self, sequential: torch.nn.Module) -> None:
        self.runs: dict[tuple[int, int], Layered] = {}
        self._sequential = sequential

    def __call__(self, _: Callable[..., Any], /, input: Any) -> Any:
        children = list(self._sequential._modules.values())
        at = 0
        for (start, stop), run in sorted(self.runs.items(), key=lambda entry: entry[0]):
            input = run(_through(children[at:start], input))
            at = stop
        return _through(children[at:], input)


def _through(children: Sequence[Any], input: Any) -> Any:
    for child in children:
        input = child(input)
    return input


def spans_of(sequential: torch.nn.Module) -> list[tuple[int, int]]:
    """The runs of children of a Sequential that have layers now."""
    runs = _runs_of(sequential)
    return [] if runs is None else list(runs.runs)


def put_on_run(sequential: torch.nn.Module, span: tuple[int, int], layer: Layer, rank: int) -> Callable[[], None]:
    """Puts a layer around some consecutive children of a Sequential.

    Args:
        sequential: has the children; its class must have the forward of ``torch.nn.Sequential``.
        span: the first child, and the one behind the last; overlaps with no other run.
        layer: what to put on.
        rank: ``INSTEAD``, ``INSIDE`` or ``OUTSIDE``.

    Returns:
        What takes it off.
    """
    runs = _runs_of(sequential)
    if runs is None:
        runs = _Runs(sequential)
        put_on(sequential, runs, INSTEAD)
    if span not in runs.runs:
        runs.runs[span] = Layered(partial(_through, list(sequential._modules.values())[slice(*span)]))
    runs.runs[span].add(rank, layer)
    return partial(_take_off_run, sequential, sequential.__dict__["forward"], runs, span, layer)


def _runs_of(sequential: torch.nn.Module) -> _Runs | None:
    forward = sequential.__dict__.get("forward")
    layers = forward.layers if isinstance(forward, _ForwardOf) else ()
    return next((layer for _, layer in layers if isinstance(layer, _Runs)), None)


def _take_off_run(
    sequential: torch.nn.Module, forward: _ForwardOf, runs: _Runs, span: tuple[int, int], layer: Layer
) -> None:
    run = runs.runs.get(span)
    if run is not None:
        run.drop(layer)
        if not run.layers:
            del runs.runs[span]
    if not runs.runs:
        _take_off(sequential, forward, runs)
