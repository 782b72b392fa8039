"""The saved state of a step: refused if it is none, and loaded as a whole or not at all."""

from collections.abc import Callable, Mapping
from typing import Any

from anybatch.errors import BatchError

_PARTS = ("counters", "limit", "evaluation_limit", "scaler", "random")
_COUNTERS = ("updates", "skipped", "samples")


def check_state(state: Any, *, has_scaler: bool) -> None:
    """Refuses what is no state of a step that was built alike.

    Args:
        state: what ``TrainStep.state_dict`` gave.
        has_scaler: whether this step has a ``GradScaler``.

    Raises:
        BatchError: it is of another version, a part of it is missing, or it was saved with a scaler and there is none,
            or the reverse.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != 1:
        raise BatchError(
            f"the state, a {type(state).__name__}, has version {version!r}; expected 1, from TrainStep.state_dict()"
        )
    missing = [part for part in _PARTS if part not in state]
    missing += [f"counters[{name!r}]" for name in _COUNTERS if name not in (state.get("counters") or {})]
    if missing:
        raise BatchError(
            f"the state lacks {', '.join(missing)}; expected all that TrainStep.state_dict() gave. Nothing was loaded"
        )
    if (state["scaler"] is None) == has_scaler:
        raise BatchError(
            f"the state was saved {'without' if state['scaler'] is None else 'with'} a GradScaler; build TrainStep "
            "with the same autocast= and scaler="
        )


def load_whole(load: Callable[[Mapping[str, Any]], None], state: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Loads a state, and the one before if that fails half way.

    Args:
        load: loads one.
        state: that is wanted.
        before: as it is now.

    Raises:
        BatchError: a part of it is not what was saved.
    """
    try:
        load(state)
    except BaseException as error:
        load(before)
        if not isinstance(error, (KeyError, TypeError, ValueError, AttributeError)):
            raise
        raise BatchError(
            f"the state can't be loaded, got {type(error).__name__}: {error}; expected what TrainStep.state_dict() "
            "gave, as it was. Nothing was loaded"
        ) from error
