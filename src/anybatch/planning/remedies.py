"""What would make a step fit that does not: each way is planned before it is named."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from anybatch.errors import AnyBatchError
from anybatch.planning.subjects import Habits, Subject
from anybatch.tensors.optimizers import state_tensors
from anybatch.units import format_bytes
from anybatch.update.batchnorm import coupling_modules
from anybatch.update.freezing import freeze
from anybatch.update.refusals import named

logger = logging.getLogger(__name__)

_MOST_FROZEN = 2


@dataclass(frozen=True)
class _Way:
    """A way out.

    Args:
        text: what the user writes.
        subject: the step with it.
        during: what has to be done while it is planned.
    """

    text: str
    subject: Subject
    during: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


def what_helps(
    subject: Subject, holders: Sequence[str], needed: int, budget: int, least: Callable[[Subject], int] | None
) -> str:
    """Says why nothing is split, if nothing is, and what would help.

    Args:
        subject: what does not fit.
        holders: the names of the blocks that hold the most.
        needed: bytes that it takes.
        budget: bytes that there are.
        least: gives the smallest budget for a step; ``None`` where nothing is to be tried.
    """
    reasons = [text for text in (why_whole(subject),) if text]
    tried = []
    for way in _ways(subject, holders) if least is not None else ():
        try:
            with way.during():
                tried.append((least(way.subject), way.text))  # type: ignore[misc]
        except (AnyBatchError, RuntimeError, TypeError, ValueError) as error:  # it can't be done with this step
            logger.info("%s was not tried to its end (%s: %.100s)", way.text, type(error).__name__, error)
    fits = [f"{text} needs {format_bytes(size)}" for size, text in tried if size <= budget]
    helps = [f"{text} needs {format_bytes(size)}" for size, text in sorted(tried) if budget < size < needed]
    if fits:
        return " ".join([*reasons, f"These were planned, and fit: {'; '.join(fits)}"])
    also = f"; of what was planned, these need less: {'; '.join(helps)}" if helps else ""
    return " ".join([*reasons, f"Smaller samples or a smaller model are needed{also}"])


def why_whole(subject: Subject) -> str:
    """Why a batch is not split; empty if it may be.

    Args:
        subject: has the model and the batch.
    """
    modules = coupling_modules(*subject.roots)
    if subject.splittable.obstacle is not None:
        return f"The batch is not cut, since it can't be: {subject.splittable.obstacle}."
    if subject.splittable.rows == 1:
        return "The batch is one sample, which is not split."
    if subject.splits or not modules:
        return ""
    verb = "is" if len(modules) == 1 else "are"
    return (
        f"The batch is not split, since {named(modules)} {verb} in training mode and normalise"
        f"{'s' if len(modules) == 1 else ''} by all its samples."
    )


def _ways(subject: Subject, holders: Sequence[str]) -> Iterator[_Way]:
    def other(**changes: object) -> Subject:
        return replace(subject, habits=Habits(), **changes)  # type: ignore[arg-type]

    if subject.batch_norm == "refuse" and not subject.splits:
        for policy in ("ghost", "frozen"):
            yield _Way(f'batch_norm="{policy}"', other(batch_norm=policy))
    if subject.settings.autocast is None and any(p.dtype is torch.float32 for p in subject.parameters):
        settings = replace(subject.settings, autocast=torch.bfloat16)
        yield _Way("autocast=torch.bfloat16", other(settings=settings))
    if subject.optimizers and not all(map(_holds_nothing, subject.optimizers)):
        parameters = [p for one in subject.optimizers for group in one.param_groups for p in group["params"]]
        plain = torch.optim.SGD(parameters, lr=1e-3)
        yield _Way("torch.optim.SGD without momentum", other(optimizers=[plain]))
    names = {
        name for name, module in subject.model.named_modules() if name and next(module.parameters(), None) is not None
    }
    for name in [one for one in holders if one in names][:_MOST_FROZEN]:
        yield _Way(
            f'anybatch.freeze(model, "{name}")',
            other(),
            lambda name=name: _frozen(subject.model, name),  # type: ignore[misc]
        )


def _holds_nothing(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has no state, and will have none."""
    is_plain = type(optimizer) is torch.optim.SGD and not any(group["momentum"] for group in optimizer.param_groups)
    return is_plain and not state_tensors(optimizer)


@contextlib.contextmanager
def _frozen(model: torch.nn.Module, name: str) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    handle = freeze(model, name)
    try:
        yield
    finally:
        handle.remove()
        for parameter, gradient in gradients:
            parameter.grad = gradient
