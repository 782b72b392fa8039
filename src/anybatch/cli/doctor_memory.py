"""After an out-of-memory crash: a plan that would have fitted, for the step found in the user's frames."""

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from anybatch.errors import AnyBatchError, DoesNotFit
from anybatch.records.events import Crashed
from anybatch.records.plans import Plan
from anybatch.report.frontier import micro_batches
from anybatch.units import format_bytes

if TYPE_CHECKING:
    from anybatch.cli.plan_loops import FoundStep

_RARELY_LESS = 2**20


def with_plan(crashed: Crashed, error: BaseException) -> Crashed:
    """Adds the plan that would have fitted, and the lines to change; or why there is none.

    The step is only traced on tensors without memory. Without a GPU, frames below the step are cleared first: planning
    needs some of the memory that they hold.
    """
    from anybatch.accelerators import in_use

    try:
        if not in_use() and not sys.flags.interactive:
            _let_go(error.__traceback__)
        found, why = _step_of(error.__traceback__)
        if found is not None:
            return _planned(crashed, found, _room(found.call.model, crashed.evidence))
        why = f"the step was not found: {why}"
    except AnyBatchError as refusal:
        why = str(refusal)
    except Exception as failure:  # noqa: BLE001 - the crash has to be told in any case
        why = f"{type(failure).__name__}: {failure}"
    return replace(crashed, fix=f"{crashed.fix}. No plan was made: {why}")


def _let_go(trace: TracebackType | None) -> None:
    """Empties the frames that have ended below the step: planning needs some of the memory that they hold."""
    frames = [frame for frame, _ in _frames(trace)]
    with_step = max((place for place, frame in enumerate(frames) if _optimizers(frame)), default=len(frames))
    for frame in frames[with_step + 1 :]:
        frame.clear()
    gc.collect()


def _planned(crashed: Crashed, found: "FoundStep", budget: int) -> Crashed:
    evidence = {**crashed.evidence, "budget": budget}
    try:
        plan = _plan(found, budget)
    except DoesNotFit as refusal:
        fix = f"No way was found to run this step in {format_bytes(budget)}, what there was for it: {refusal}"
        return replace(crashed, fix=fix, evidence={**evidence, "needed": refusal.needed})
    memory = format_bytes(budget).replace(" ", "")
    answer = found.with_change({"plan": plan.to_dict()}, {"memory": memory})
    whole = f"; the whole batch at once takes {format_bytes(plan.whole_bytes)}" if plan.whole_bytes else ""
    way = f"{micro_batches(plan.chosen)}{f', {plan.chosen.optimizations}' if plan.chosen.optimizations else ''}"
    saved = f"# plan.json comes from: anybatch plan SCRIPT --memory {memory} -o plan.json"
    lines = [
        f"# The same batch and gradient in {way}: {format_bytes(plan.peak_bytes)} at the peak,",
        f"# of {format_bytes(budget)} that there was for it{whole}.",
        *([saved] if "Plan.load" in answer["change"] else []),
        answer["change"].rstrip() or f"# The lines to change can't be written: {answer['trouble']}",
    ]
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.at_peak.items() if size)
    return replace(
        crashed, fix="\n".join(lines),
        evidence={**evidence, "whole": plan.whole_bytes, "plan": str(plan.chosen), "plan_at_peak": held,
                  "found": answer["found"]},
    )  # fmt: skip


def _plan(found: "FoundStep", budget: int) -> Plan:
    """A plan without any run for its time: the device is full."""
    from anybatch.interception import unobserved
    from anybatch.planning.entrance import subject_of
    from anybatch.planning.planner import Planner
    from anybatch.tensors.dispatch import without_user_modes

    call = found.call
    subject, target = subject_of(
        call.batch, None, model=call.model, loss_fn=call.loss_fn, memory=budget, **call.options
    )
    with unobserved(), without_user_modes():
        return Planner(subject, replace(target, is_present=False)).plan(budget)


def _step_of(trace: TracebackType | None) -> "tuple[FoundStep | None, str]":
    """The step that the innermost of the user's frames stands in that has one, or why none has."""
    from anybatch.cli.plan_loops import FoundStep
    from anybatch.doctor.crashing.live import whose

    why = ""
    for frame, line in reversed(list(_frames(trace))):
        if whose(frame.f_code.co_filename) != "user":
            continue
        optimizers = _optimizers(frame)
        if not optimizers:
            why = why or "no optimizer has a name where it stopped"
            continue
        names = {**frame.f_globals, **frame.f_locals}
        gradients = [(p, p.grad) for group in optimizers[0].param_groups for p in group["params"]]
        try:
            return FoundStep(names, frame.f_code.co_filename, line, optimizers[0]), ""
        except AnyBatchError as refusal:
            why = str(refusal)
        finally:
            for parameter, gradient in gradients:  # the script is over, but an exit handler of the user's may look
                parameter.grad = gradient
    return None, why


def _optimizers(frame: Any) -> list[Any]:
    import torch

    from anybatch.doctor.crashing.live import attributes

    names = frame.f_locals
    held = [*names.values(), *(one for _, one in attributes(names.get("self")))]
    return [one for one in held if isinstance(one, torch.optim.Optimizer)]


def _frames(trace: TracebackType | None) -> Iterator[tuple[Any, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _room(model: Any, held: Any) -> int:
    """Bytes that there were for the step: what its tensors hold, and what was free beside them."""
    from anybatch.accelerators import capacity_of, is_accelerator, memory_of
    from anybatch.tensors.modules import device_of

    device = device_of(model)
    if is_accelerator(device):
        return capacity_of(device)[0] + memory_of(device).reserved
    names = (
        "parameters",
        "gradients",
        "optimizer states",
        "tensors with a graph",
        "other tensors",
        "kept by the graph",
    )
    return sum(int(held.get(name, 0)) for name in names) + _free_on_host()


def _free_on_host() -> int:
    """What the process may still have of the machine's memory, and of its own limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    if sys.platform != "linux":
        return free
    import resource

    for limit, used in ((resource.RLIMIT_AS, psutil.Process().memory_info().vms),):
        most = resource.getrlimit(limit)[0]
        free = min(free, max(_RARELY_LESS, most - used)) if most != resource.RLIM_INFINITY else free
    return free
