"""run_probes: questions to a copy of a model after the run."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from anybatch.doctor.ask import leaks, training
from anybatch.doctor.ask.asking import answers, asked, single
from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.trials import Trial, Unknown, undisturbed
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_MOST_ROOTS = 4
_MOST_BYTES = 16 * 2**20  # of an input, of which questions are asked
_log = logging.getLogger(__name__)
_PROBES: list[tuple[str, Callable[[Trial, Run, int, Any], Probed]]] = [
    ("batch", leaks.mixing),
    ("time", leaks.leaking),
    ("input", leaks.ignored),
    ("padding read", leaks.padding_read),
    ("modes", leaks.random_in_evaluation),
    ("evaluated scores", leaks.squashed_in_evaluation),
]
"""Each a name and a function of the copy, the run, the number of the root and the recorder."""


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
    of_training = training.PROBES if active else []
    try:
        trial = Trial(module, args, kwargs, until)
    except Unknown as reason:
        return [Probed(probe=name, root=root, detail=str(reason)) for name, _ in [*_PROBES, *of_training]]

    def put(questions: list[tuple[str, Callable[..., Probed]]]) -> list[Probed]:
        given = trial, run, root, doctor
        return [
            one for name, question in questions for one in answers(name, until, single, question, *given, root=root)
        ]

    whole, trial.inputs = trial.inputs, trial.within(_MOST_BYTES)
    found = put(_PROBES)
    trial.inputs = whole  # the targets of the loss have all rows
    return found + put(of_training)
