"""run_probes: questions to a copy of a model after the run."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from anybatch.doctor.ask import leaks
from anybatch.doctor.ask.asking import answers, asked, single
from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.trials import Trial, Unknown, undisturbed
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_MOST_ROOTS = 4
_MOST_BYTES = 16 * 2**20  # of an input, of which questions are asked
_log = logging.getLogger(__name__)
_PROBES: list[tuple[str, Callable[[Trial, Run, int], Probed]]] = [
    ("batch", leaks.mixing),
    ("time", leaks.leaking),
    ("input", leaks.ignored),
    ("padding read", leaks.padding_read),
    ("modes", leaks.random_in_evaluation),
    ("evaluated scores", leaks.squashed_in_evaluation),
]
"""Each a name and a function of the copy, the run and the number of the root."""


def run_probes(doctor: Any, *, active: bool = False, seconds: float = 20.0) -> list[Probed]:
    """All answers of ``probes``."""
    return [*probes(doctor, active=active, seconds=seconds)]


def probes(doctor: Any, *, active: bool = False, seconds: float = 20.0) -> Iterator[Probed]:
    """Asks copies of the models of a run what the run itself did not show.

    The user's models, gradients and random state are unchanged. A question without a sure answer is answered with
    ``"unknown"`` and the reason; those that come after the time limit get no answer.
    """
    try:
        until = time.perf_counter() + seconds
        given = dict(getattr(doctor, "last_inputs", None) or {})
        run = getattr(doctor, "run", None) or Run([])
        with undisturbed(_reached(doctor, given)):
            for root in sorted(given)[:_MOST_ROOTS]:
                module, args, kwargs = given[root]
                yield from _of_root(run, root, module, args, kwargs, until)
            if (kept := getattr(doctor, "kept", None)) is not None:
                yield from asked(kept, run, {root: one[0] for root, one in given.items()}, until, active=active)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a question must never end the user's script otherwise than it ended
        _log.warning("the probes stopped: %s: %s", type(error).__name__, error)


def _reached(doctor: Any, given: Mapping[int, Any]) -> list[Any]:
    """What code of the user's that a question runs may change: what copies share with their models, and other code."""
    kept = getattr(doctor, "kept", None) or Kept(int, bool, bool)
    nets = [one[0] for one in given.values()] + [state.module() for state in kept.states.values()]
    return [*nets, *kept.collates, *(one.cls for one in kept.functions)]


def _of_root(run: Run, root: int, module: Any, args: Any, kwargs: Any, until: float) -> list[Probed]:
    try:
        trial = Trial(module, args, kwargs, until)
    except Unknown as reason:
        return [Probed(probe=name, root=root, detail=str(reason)) for name, _ in _PROBES]
    trial.inputs = trial.within(_MOST_BYTES)
    given = trial, run, root
    return [one for name, question in _PROBES for one in answers(name, until, single, question, *given, root=root)]
