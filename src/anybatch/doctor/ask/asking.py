"""All questions that are asked of what was kept of a run."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from anybatch.accelerators import free_bytes, is_accelerator
from anybatch.doctor.ask import (
    adversaries,
    arguments,
    axes,
    batches,
    bootstrapping,
    copies,
    fitting,
    functions,
    ideals,
    labels,
    outweighing,
    pairs,
    redrawn,
    relating,
    rows,
    sampling,
    schedules,
    source,
    states,
    straightness,
    weighing,
)
from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.steps import Question, Step
from anybatch.doctor.ask.tape import Tape, is_freed
from anybatch.doctor.ask.trials import Unknown
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

OBSERVED: tuple[Callable[[Kept, Run], Iterator[Probed]], ...] = (
    copies.about_copies, copies.about_evaluation, copies.about_inputs, source.about_fields, source.about_splits,
    source.about_terms,
    source.about_lists, source.about_orders, source.about_methods, schedules.about_plateaus, schedules.about_own_states,
    functions.about_functions, batches.about_padding, batches.about_several, batches.about_given,
    batches.about_uncounted, batches.about_ends, source.about_best, batches.about_collates,
    batches.about_columns, batches.about_copied, batches.about_mirrored, batches.about_tokens,
    batches.about_numberings, source.about_seeds,
    redrawn.about_redrawn,
    schedules.about_resumed, sampling.about_sampling, states.about_states, adversaries.opposed,
)  # fmt: skip
"""What needs no more than a look at what was kept."""

_COPIES = 16
"""How many times what a step makes is held at once: of it run again and once more changed, values, graph, gradients."""

OF_A_STEP = (
    *(rows, pairs, axes, weighing, functions, arguments, ideals, straightness, bootstrapping),
    *(outweighing, fitting, relating),
)
"""Has what is asked of each step that was written down; the last three run it many times."""


def asked(kept: Kept, run: Run, modules: Mapping[int, Any], until: float) -> Iterator[Probed]:
    """The answers of all questions; one that fails leaves the others theirs."""
    for tapes in (kept.tapes, kept.earlier):
        for number, tape in list(tapes.items()):
            tape.until = until
            if any(map(is_freed, tape.parameters.values())):
                del tapes[number]
            elif _is_too_large(tape):
                why = f"a step that makes {tape.size} bytes may take more memory to run again than the host has"
                yield Probed(probe="step", root=-1, detail=why, evidence={"optimizer": number})
                del tapes[number]
    for question in OBSERVED:
        try:
            yield from question(kept, run)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - others are asked all the same
            yield Probed(probe=question.__name__, root=-1, detail=f"{type(error).__name__}: {error}"[:300])
    for number, tape in sorted(kept.tapes.items()):
        step = Step(tape, number, kept, run, modules, until)
        # a list, since a warning of a question writes to its module
        for one in [one for module in OF_A_STEP for one in vars(module).values() if isinstance(one, Question)]:
            yield _answer(one.name, until, one.answer, step, optimizer=number)
    try:
        yield from adversaries.helped(kept)
    except Exception as error:  # noqa: BLE001 - as above
        yield Probed(probe="helped", root=-1, detail=f"{type(error).__name__}: {error}"[:300])
    for root in kept.batches:
        yield _answer("apart", until, batches.apart, kept, root)
        yield _answer("labels", until, labels.unrelated, kept, modules.get(root), root, until)


def _is_too_large(tape: Tape) -> bool:
    """Whether the host might run out of memory, which would end the process. A device that does raises an error."""
    device = next((one.device for one in tape.leaves.values()), torch.device("cpu"))
    return not is_accelerator(device) and _COPIES * tape.size > free_bytes(device)


def _answer(name: str, until: float, question: Callable[..., Probed], *args: Any, optimizer: int = -1) -> Probed:
    try:
        if time.perf_counter() > until:
            raise Unknown("there was no time left")
        return question(*args)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
        why = str(error) if isinstance(error, Unknown) else f"{type(error).__name__}: {error}"
        return Probed(probe=name, root=-1, detail=why[:300], evidence={"optimizer": optimizer})
