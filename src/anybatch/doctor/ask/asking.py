"""All questions: to copies of models, and of what was kept of a run."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from anybatch.accelerators import free_bytes, is_accelerator
from anybatch.doctor.ask import (
    adversaries,
    agreeing,
    arguments,
    axes,
    batches,
    calls,
    copies,
    crediting,
    fitting,
    functions,
    heldout,
    ideals,
    leaks,
    mining,
    pairs,
    placing,
    pulling,
    relating,
    rows,
    sampling,
    source,
    straightness,
    training,
    weighing,
)
from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.steps import Question, Step
from anybatch.doctor.ask.tape import Tape, is_freed
from anybatch.doctor.ask.trials import Trial, Unknown, told, undisturbed
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_log = logging.getLogger(__name__)

OF_A_RUN = (copies, source, calls, functions, batches, sampling, adversaries, heldout)
"""Has what needs no more than a look at what was kept: functions whose names begin with ``about_``."""

_COPIES = 16
"""How many times what a step makes is held at once: of it run again and once more changed, values, graph, gradients."""

OF_A_STEP = (
    rows,
    pairs,
    agreeing,
    mining,
    pulling,
    placing,
    axes,
    weighing,
    crediting,
    functions,
    arguments,
    ideals,
    straightness,
    fitting,
    relating,
)
"""Has what is asked of each step that was written down."""

_LONG, _EARLY = (fitting, relating, training), 0.4
"""Those that run a step many times, and the share of the time after which the others leave them the rest."""


def asked(kept: Kept, run: Run, modules: Mapping[int, Any], until: float, *, active: bool = False) -> Iterator[Probed]:
    """The answers of all questions, with ``active`` also whether a batch is learned at all.

    One that fails leaves the others theirs.
    """
    of_a_step = [*OF_A_STEP, training] if active else OF_A_STEP
    for tapes in (kept.tapes, kept.earlier):
        for number, tape in list(tapes.items()):
            tape.until = until
            if any(map(is_freed, tape.parameters.values())):
                del tapes[number]
            elif _is_too_large(tape):
                why = f"a step that makes {tape.size} bytes may take more memory to run again than the host has"
                yield told("step", answer="unknown", detail=why, optimizer=number)
                del tapes[number]
    for module in OF_A_RUN:
        for question in [one for name, one in vars(module).items() if name.startswith("about_")]:
            yield from answers(question.__name__, math.inf, question, kept, run)
    for done, (number, tape) in enumerate(sorted(kept.tapes.items())):
        now = time.perf_counter()
        end = now + max(0.0, until - now) / (len(kept.tapes) - done)
        step = Step(tape, number, kept, run, modules, end)
        for module in of_a_step:
            step.until = tape.until = end if module in _LONG else now + _EARLY * (end - now)
            # a list, since a warning of a question writes to its module
            for one in [one for one in vars(module).values() if isinstance(one, Question)]:
                yield from answers(one.name, step.until, one.answers, step, optimizer=number)
    # after the steps, since it has no limit of its own and would take from their time
    yield from answers("helped", math.inf, adversaries.helped, kept)
    for root in kept.batches:
        yield from answers("apart", until, single, batches.apart, kept, root)
        yield from answers("labels", until, single, training.unrelated, kept, modules.get(root), root, until)
        yield from answers("frozen", until, single, training.frozen, kept, modules.get(root), run, root, until)


def _is_too_large(tape: Tape) -> bool:
    """Whether the host might run out of memory, which would end the process. A device that does raises an error."""
    device = next((one.device for one in tape.leaves.values()), torch.device("cpu"))
    return not is_accelerator(device) and _COPIES * tape.size > free_bytes(device)


def single(question: Callable[..., Probed], *args: Any) -> Iterator[Probed]:
    """The answer of a question that gives one."""
    yield question(*args)


def answers(
    name: str, until: float, question: Callable[..., Iterator[Probed]], *args: Any, root: int = -1, **seen: Any
) -> Iterator[Probed]:
    """The answers of a question; one that fails leaves the others theirs, and must never end the script."""
    try:
        if time.perf_counter() > until:
            raise Unknown("there was no time left")
        yield from question(*args)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - code of the user's may raise anything
        why = str(error) if isinstance(error, Unknown) else f"{type(error).__name__}: {error}"
        if not isinstance(error, Unknown):
            _log.warning("the probe %s failed: %s", name, why)
        yield told(name, root=root, answer="unknown", detail=why[:300], **seen)


_MOST_ROOTS = 4
_MOST_BYTES = 16 * 2**20  # of an input, of which questions are asked
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
