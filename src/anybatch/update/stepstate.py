"""The saved state of a step: refused if it is none, and loaded as a whole or not at all."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import torch

from anybatch.errors import BatchError
from anybatch.records.reading import Least, Malformed, read

_Whole = Annotated[int, Least(0)]
_Many = Annotated[int, Least(1)]
_Positive = Annotated[float, Least(1e-300)]


class _Counters(TypedDict):
    updates: _Whole
    skipped: _Whole
    samples: _Whole


class _Limit(TypedDict):
    value: Annotated[float, Least(1)] | None
    patience: _Many
    quiet: _Whole
    grew: bool


class _Scaler(TypedDict, total=False):  # nothing of one that is switched off
    scale: _Positive
    growth_factor: Annotated[float, Least(1)]
    backoff_factor: _Positive
    growth_interval: _Many
    _growth_tracker: _Whole


class _Key(TypedDict):
    key: list[_Whole]
    pos: _Whole


class _NumPy(TypedDict):
    bit_generator: Literal["MT19937"]
    state: _Key
    has_gauss: _Whole
    gauss: float


class _Random(TypedDict):
    cpu: torch.Tensor
    python: tuple[_Many, list[_Whole], float | None]
    devices: Mapping[str, torch.Tensor]
    numpy: NotRequired[_NumPy]


class _Followed(TypedDict):
    plan: Mapping[str, Any] | None
    first: Mapping[str, Any] | None
    rows: _Whole


class _Growth(TypedDict):
    seen: tuple[_Whole, _Whole, _Whole] | None
    quiet: _Whole
    most: _Whole | None


class _Watched(TypedDict):
    shapes: Mapping[str, tuple[_Whole, ...]]
    rows: _Whole
    growth: _Growth


class _Carried(TypedDict):
    rows: _Whole
    parts: list[tuple[_Whole, _Whole, Any]]


class _Loss(TypedDict):
    carried: _Carried | None


class StepState(TypedDict):
    """What ``TrainStep.state_dict`` gives."""

    version: Literal[1]
    counters: _Counters
    limit: _Limit
    evaluation_limit: _Limit
    scaler: _Scaler | None
    random: _Random
    plan: NotRequired[_Followed | _Watched | None]
    loss: NotRequired[_Loss | None]


class GradientState(TypedDict):
    """What ``RepeatedBackward.state_dict`` gives."""

    limit: _Limit
    plan: _Followed | _Watched | None


def load_whole(
    load: Callable[[Mapping[str, Any]], None], state: Any, before: Mapping[str, Any], kind: Any, *, name: str
) -> None:
    """Loads a state, or refuses it and leaves everything as it was.

    Raises:
        BatchError: a part of it is missing, or is not what was saved; ``path`` says which.
    """
    try:
        read(kind, state)
        load(state)
    except BaseException as error:
        load(before)
        if not isinstance(error, Exception):
            raise
        raise BatchError(
            f"the state can't be loaded: {error}. Expected what {name}.state_dict() returned, unchanged. Nothing "
            "was loaded",
            path=getattr(error, "path", ""),
        ) from error


@contextmanager
def part(name: str) -> Iterator[None]:
    """A context in which a part of a state is loaded, so that an error says which."""
    try:
        yield
    except Exception as error:
        raise Malformed(f"can't be taken ({type(error).__name__}: {error})").within(name) from error


def check_scaled(state: Any, *, has_scaler: bool) -> None:
    """Refuses the state of a step that was built otherwise."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != 1:
        raise BatchError(
            f"the state, a {type(state).__name__}, has version {version!r:.80}; expected 1, from TrainStep.state_dict()"
        )
    if "scaler" in state and (state["scaler"] is None) == has_scaler:
        raise BatchError(
            f"the state was saved {'without' if state['scaler'] is None else 'with'} a GradScaler; build TrainStep "
            "with the same autocast= and scaler="
        )
