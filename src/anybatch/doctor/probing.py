"""run_probes: questions to a copy of a model after the run."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from anybatch.doctor.ask import ignoring, leaks, straightness
from anybatch.doctor.ask.asking import asked
from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.trials import Trial, Unknown, undisturbed
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_MOST_ROOTS = 4
_MOST_BYTES = 16 * 2**20  # of an input, of which questions are asked
_log = logging.getLogger(__name__)


def run_probes(doctor: Any, *, active: bool = False, seconds: float = 20.0) -> list[Probed]:
    """Asks copies of the models of a run what the run itself did not show.

    The user's models, gradients and random state are unchanged. A question without a sure answer is answered with
    ``"unknown"`` and the reason; those that come after the time limit get no answer.
    """
    found: list[Probed] = []
    try:
        until = time.perf_counter() + seconds
        given = dict(getattr(doctor, "last_inputs", None) or {})
        run = getattr(doctor, "run", None) or Run([])
        with undisturbed(_reached(doctor, given)):
            for root in sorted(given)[:_MOST_ROOTS]:
                module, args, kwargs = given[root]
                found.extend(_of_root(doctor, run, root, module, args, kwargs, active, until))
            if (kept := getattr(doctor, "kept", None)) is not None:
                found.extend(asked(kept, run, {root: one[0] for root, one in given.items()}, until))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a question must never end the user's script otherwise than it ended
        _log.warning("the probes stopped: %s: %s", type(error).__name__, error)
    return found


def _reached(doctor: Any, given: Mapping[int, Any]) -> list[Any]:
    """What code of the user's that a question runs may change: what copies share with their models, and other code."""
    kept = getattr(doctor, "kept", None) or Kept(int, bool, bool)
    nets = [one[0] for one in given.values()] + [state.module() for state in kept.states.values()]
    return [*nets, *kept.collates, *(one.cls for one in kept.functions)]


def _of_root(
    doctor: Any, run: Run, root: int, module: Any, args: Any, kwargs: Any, active: bool, until: float
) -> list[Probed]:
    probes: list[tuple[str, Any]] = [
        ("batch", leaks.mixing),
        ("time", leaks.leaking),
        ("input", ignoring.ignored),
        ("padding read", ignoring.padding_read),
        ("modes", ignoring.random_in_evaluation),
        ("evaluated scores", ignoring.squashed_in_evaluation),
        ("straight", straightness.straight),
    ]
    of_training: list[tuple[str, Any]] = []
    if active:
        from anybatch.doctor.ask import training

        of_training = training.PROBES
    try:
        trial = Trial(module, args, kwargs, until)
    except Unknown as reason:
        return [Probed(probe=name, root=root, detail=str(reason)) for name, _ in [*probes, *of_training]]
    whole, trial.inputs = trial.inputs, trial.within(_MOST_BYTES)
    found = [_answer(name, probe, trial, run, root, doctor) for name, probe in probes]
    trial.inputs = whole  # the targets of the loss have all rows
    return found + [_answer(name, probe, trial, run, root, doctor) for name, probe in of_training]


def _answer(name: str, probe: Any, trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """One answer; a question that fails leaves the others theirs."""
    try:
        answer: Probed = probe(trial, run, root, doctor)
    except Unknown as reason:
        return Probed(probe=name, root=root, detail=str(reason))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a question must never end the script otherwise than it ended
        _log.warning("the probe %s failed: %s: %s", name, type(error).__name__, error)
        return Probed(probe=name, root=root, detail=f"{type(error).__name__}: {error}"[:300])
    return answer
