"""Finds the first step of a plain loop, and after an out-of-memory crash a plan that would have fitted it."""

import ast
import builtins
import contextlib
import gc
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any

from anybatch.errors import AnyBatchError, DoesNotFit
from anybatch.interception import Call
from anybatch.records.events import Crashed
from anybatch.records.plans import Plan
from anybatch.report.frontier import micro_batches
from anybatch.units import format_bytes

if TYPE_CHECKING:
    from anybatch.doctor.loopchanges import Counted
    from anybatch.doctor.loopparts import Windowed

_LIGHTNING = (
    "Lightning takes the steps; add anybatch.integrations.lightning.ExactGradient to the callbacks, or with "
    "automatic_optimization=False call anybatch.backward(self, loss_fn, batch) in the place of manual_backward"
)
_ADAPTERS = {
    "transformers": "The Trainer of Transformers takes the steps; use anybatch.integrations.transformers.ExactTrainer",
    "trl": "The trainer of TRL takes the steps; put anybatch.integrations.transformers.ExactTraining before it",
    "lightning": _LIGHTNING,
    "pytorch_lightning": _LIGHTNING,
    "fabric": "Lightning Fabric takes the steps; give what fabric.setup returned to anybatch.TrainStep instead",
    "accelerate": "Accelerate takes the steps; use anybatch.integrations.accelerate.train_step",
}
_FABRIC = ("lightning.fabric.", "lightning_fabric.")
_SAME = 1e-3  # of a loss that is computed again on the same tensors
_ALSO = re.compile(r" the same, such as (.+?); (?:take|with) ")  # another one, in the text of a refusal
_COUNT = re.compile(r"^ +count=((?:anybatch\.|lambda )(?:(?!  #|\.\.\.).)*)(?:  #.*)?$", re.MULTILINE)  # a remedy


def users_frame(frame: FrameType | None) -> tuple[FrameType | None, str]:
    """The innermost frame of the user's own code, and the library that is called, except torch and anybatch.

    Of libraries that call each other it is the outermost that there is an adapter for.
    """
    from anybatch.userlines import USERS, whose_file

    library = ""
    while frame is not None and whose_file(frame.f_code.co_filename) != USERS:
        name = str(frame.f_globals.get("__name__", ""))
        first = "fabric" if name.startswith(_FABRIC) else name.partition(".")[0]
        if first not in ("torch", "anybatch") and (not library or first in _ADAPTERS):
            library = first
        frame = frame.f_back
    return frame, library


class LoopWatch:
    """Waits for the first backward and the update that follows it, in a process that ends there.

    Args:
        found: is called with the variables of the user's frame at the backward, its file and line, the optimizer, and
            the value that goes back; it does not return.
        refused: is called with a sentence if a library calls the backward.
    """

    def __init__(self, found: Callable[..., None], refused: Callable[[str], None]) -> None:
        self._found, self._refused = found, refused
        self._seen: tuple[dict[str, Any], str, int] | None = None
        self._items: list[Any] = []  # what later backwards of the same update handle
        self._handles: list[Any] = []
        self._loss = math.nan
        self._within: Any = None  # an optimizer that evaluates a closure, which goes back within its step

    def attach(self) -> None:
        """Begins to wait; torch must have been imported."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        original = torch.Tensor.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            self._look(sys._getframe(1), args[0])
            result = original(*args, **kwargs)  # type: ignore[no-untyped-call]
            self._end()
            return result

        torch.Tensor.backward = backward  # type: ignore[method-assign]
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(lambda *_: setattr(self, "_within", None)),
        ]

    def detach(self) -> None:
        """Stops waiting for an update."""
        for one in self._handles:
            one.remove()

    def _look(self, frame: FrameType | None, loss: Any) -> None:
        if "anybatch.step" in sys.modules or "anybatch.backpropagation" in sys.modules:
            return  # the script has a step of anybatch's, or is about to make one
        frame, library = users_frame(frame)
        if self._seen is not None:
            self._go_on(frame, *self._seen[1:])
            return
        if frame is None or library:
            self._refused(_ADAPTERS.get(library, f"{library or 'a library'} calls backward(), not the script itself"))
            return
        self._seen = {**frame.f_globals, **frame.f_locals}, frame.f_code.co_filename, frame.f_lineno
        self._loss = loss.detach().item() if loss.numel() == 1 else math.nan

    def _go_on(self, frame: FrameType | None, file: str, line: int) -> None:
        """Keeps what a loop handles that goes back again before its first update."""
        from anybatch.doctor.loopwindows import item_at

        if frame is None or (frame.f_code.co_filename, frame.f_lineno) != (file, line):
            return
        if (item := item_at(file, line)) is None or self._seen is None:
            return
        before = self._items[-1] if self._items else eval(item, self._seen[0])
        now = eval(item, {**frame.f_globals, **frame.f_locals})
        if list(map(id, _parts(before))) != list(map(id, _parts(now))):  # else the same iteration goes back again
            self._items.append(now)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._within = optimizer
        self._end()

    def _end(self) -> None:
        if self._seen is not None and self._within is not None:
            self._found(*self._seen, self._within, self._loss, self._items)


def _parts(item: Any) -> list[Any]:
    return [part for one in item for part in _parts(one)] if type(item) is tuple else [item]


class FoundStep:
    """A step that was found in a plain loop, as a call of anybatch.

    The gradients of its model are set to ``None``. ``items`` is what the loop handled in further backwards before its
    first update, if that was seen; then the call has a window of batches.

    Raises:
        StepUnclear: the step can't be separated from the rest of the loop.
    """

    def __init__(
        self, names: dict[str, Any], file: str, line: int, optimizer: Any, loss: float = math.nan,
        items: Sequence[Any] | None = None,
    ) -> None:  # fmt: skip
        from anybatch.batch.windowing import Window
        from anybatch.doctor.loopchanges import results_of
        from anybatch.doctor.loopparts import StepUnclear, value_of
        from anybatch.doctor.loopsteps import step_at
        from anybatch.doctor.loopupdates import run_behind, update_of

        others = [
            one for one in _optimizers(names) if one is not optimizer
            and any(each.grad is not None for group in one.param_groups for each in group["params"])
        ]  # fmt: skip
        self.batches = 0 if items is None else 1 + len(items)
        window, self._trouble = _window_of(file, line, names, self.batches)
        self._step = step = step_at(file, line, names, [optimizer, *others], window)
        self._update = None if others else update_of(step)  # the gradients of others add up to a step of their own
        self._count = self._same = ""
        metrics: dict[str, str] = {}
        try:
            metrics = results_of(step)
        except StepUnclear as error:
            self._trouble = self._trouble or str(error)
        for parameter in step.model.parameters():
            parameter.grad = None  # a step begins without
        clip = float(eval(self._update.clip, dict(names))) if self._update and self._update.clip else None
        options = {"optimizer": [optimizer, *others], "clip_norm": clip, "verify": "first"}
        # the step as the arguments of a ``TrainStep``
        batch = step.logical_batch if window is None else Window([step.logical_batch, *(items or ())])
        self.call = Call(step.model, step.loss_fn(metrics), batch, options)
        draws_batch = any("(" in text for text in step.taken_out.values())
        if math.isfinite(loss) and not run_behind(step).changes and not draws_batch:
            scale = value_of(step.scaler, names).get_scale() if step.scaler else 1.0
            self._check_loss(loss / scale * (1 if window is None else window.divided))

    def _check_loss(self, loss: float) -> None:
        """Refuses a forward that gives another loss when it runs again, though it neither draws nor has a state."""
        import torch

        from anybatch.doctor.loopparts import StepUnclear
        from anybatch.interception import unobserved
        from anybatch.tensors.modules import modules_behind
        from anybatch.update.transaction import Snapshot

        model, loss_fn, _, _ = self.call
        batch = self._step.logical_batch
        before = Snapshot(modules_behind(model, loss_fn), None, loss_fn)
        found, drawn = [], _generators(self._step.names)
        try:
            with unobserved():
                for seed in (0, 1):
                    torch.manual_seed(seed)
                    result = loss_fn(model, batch)
                    found.append((result[0] if isinstance(result, tuple) else result).item())
        except Exception as error:  # noqa: BLE001 - planning will say what fails
            logging.getLogger(__name__).info("the forward did not run again: %s", error)
            return
        finally:
            is_drawn = drawn != _generators(self._step.names)
            before.restore()
        if not is_drawn and found[0] == found[1] and not math.isclose(found[0], loss, rel_tol=_SAME, abs_tol=_SAME**2):
            raise StepUnclear(
                f"the forward before {self._step.where(self._step.back)} gives a loss of {found[0]:.6g} when it "
                f"runs again, where the loop had {loss:.6g}: something else affects it, such as a function that "
                "changes a result in place, or a value changed since; have the function return the result, and "
                "change the value after the backward pass"
            )

    @property
    def at(self) -> str:
        """Where the loop goes back."""
        return f"{self._step.source.path}:{self._step.back.lineno}"

    @property
    def other_backwards(self) -> list[int]:
        """The lines in which the loop goes back for other losses, of which the call has none."""
        return self._step.other_backwards

    def counted(self, refusal: str) -> Call | None:
        """The call with the ``count=`` that a refusal proposes, which the lines to change then have, too."""
        proposed = _COUNT.search(refusal)
        if proposed is None or not self._knows(proposed[1]):
            return None
        self._count, same = proposed[1], _ALSO.search(refusal)
        self._same = same[1] if same is not None else ""
        return self.call._replace(options={**self.call.options, "count": self._counts()})

    def _knows(self, count: str) -> bool:
        """Whether the lines to change have all names that a count reads."""
        from anybatch.doctor.crashing.usercode import names_in
        from anybatch.doctor.loopnames import stored

        tree, names = ast.parse(count, mode="eval"), self._step.names
        own = {one.arg for one in ast.walk(tree) if isinstance(one, ast.arg)} | {"anybatch"}
        read = {one for one in names_in([tree], ast.Load) - own if not hasattr(builtins, one)}
        is_torch = "torch" not in read or names.get("torch") is sys.modules["torch"]
        return is_torch and read <= names.keys() - stored(self._step.forward)

    def _counts(self) -> Callable[[Any], Any]:
        from anybatch.batch.counting import count_samples, count_tokens

        known = SimpleNamespace(count_samples=count_samples, count_tokens=count_tokens)
        counts: Callable[[Any], Any] = eval(self._count, {**self._step.names, "anybatch": known})
        return counts

    def _counted_terms(self) -> "Counted":
        """What the loss is the mean over, with the graphs of the terms that the loop reads."""
        import torch

        from anybatch.doctor.loopchanges import Counted, results_of
        from anybatch.doctor.loopparts import StepUnclear
        from anybatch.interception import unobserved
        from anybatch.tensors.modules import modules_behind
        from anybatch.update.transaction import Snapshot

        model, loss_fn, _, _ = self.call
        batch = self._step.logical_batch
        names = [name for name, text in results_of(self._step).items() if text != name]
        terms = dict[str, torch.Tensor]()
        if names:  # the backward of the loop has freed what the graph saved
            before = Snapshot(modules_behind(model, loss_fn), None, loss_fn)
            try:
                with unobserved():
                    terms = self._step.loss_fn({one: one for one in names})(model, batch)[1]
            except Exception as error:
                raise StepUnclear(
                    f"what the loop reads from the forward pass, {', '.join(names)}, has to be weighted by the "
                    f"count of the loss, and the forward pass did not run again ({type(error).__name__}: {error}); "
                    "have the loss function return it with the loss, as an anybatch.Mean"
                ) from error
            finally:
                before.restore()
        return Counted(self._count, float(self._counts()(batch)), terms, same=self._same)

    def with_change(self, facts: dict[str, Any], question: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the lines to change to an answer, or why they can't be written."""
        from anybatch.doctor.fixes.source import unified
        from anybatch.doctor.loopchanges import change_of
        from anybatch.doctor.loopparts import StepUnclear
        from anybatch.doctor.loopwindows import clean

        chosen = facts.get("plan", {}).get("chosen", {})
        is_split_only = not any(chosen.get(name) for name in ("recompute", "offload", "autocast"))
        is_split_only &= chosen.get("loss_chunks", 1) == 1
        is_whole = bool(facts.get("obstacle")) or chosen.get("micro_batches") == 1
        size = "" if is_whole else f"micro_batch_size={chosen.get('micro_batch_size', 1):g}"
        saved = json.dumps(question.get("saved") or "plan.json")
        plan = size if is_split_only else f"plan=anybatch.Plan.load({saved})"
        wish = question["memory"] if question["memory"] is not None else "free"
        changed = {"change": "", "after": ""}
        if not self._trouble:
            try:
                more = [f'batch_norm="{question["batch_norm"]}"'] if question.get("batch_norm") else []
                counted = self._counted_terms() if self._count and not facts.get("refusal") else None
                more += [f"count={self._count}"] if counted is not None else []
                budget = f"memory={json.dumps(wish)}"
                if facts.get("refusal"):  # with a budget the step would look at the split again, and may see less of it
                    budget = "" if _fits_whole(facts["plan"]) else f"plan=anybatch.Plan.load({saved})"
                budget, plan = (", ".join(filter(None, [one, *more])) for one in (budget, plan))
                edit = change_of(self._step, self._update, budget, plan, counted)
                before, after = Path(edit.path).read_bytes().decode(), clean(edit.after)
                diff = unified({edit.path: before}, {edit.path: after}, str(Path.cwd()))
                changed = {"change": diff, "after": after if self._update else ""}
            except StepUnclear as error:
                self._trouble = str(error)
        facts.get("plan", {}).get("fingerprint", {}).pop("loss", None)  # the user's function is yet to be written
        found = {"found": self.at, "batch": self._step.batch_text, "other_backwards": self.other_backwards}
        count = "" if facts.get("refusal") else self._count  # of the call to write where no lines can be
        return facts | changed | found | {"trouble": self._trouble, "count": count}


def _window_of(file: str, line: int, names: Mapping[str, Any], batches: int) -> "tuple[Windowed | None, str]":
    """The loop of a backward as one over windows, or why it can't be written so."""
    from anybatch.doctor.loopparts import StepUnclear
    from anybatch.doctor.loopwindows import windowed

    try:
        return windowed(file, line, names, batches), ""
    except StepUnclear as error:
        return None, str(error)


def _generators(names: Mapping[str, Any]) -> list[str]:
    """The states of the generators beside torch's own: Python's, NumPy's, and those that have names."""
    import random

    states = [repr(random.getstate())]
    states += [repr(one.getstate()) for one in names.values() if isinstance(one, random.Random)]
    if (numpy := sys.modules.get("numpy.random")) is not None:
        states.append(repr([part.tolist() if hasattr(part, "tolist") else part for part in numpy.get_state()]))
        generators = [one for one in names.values() if isinstance(one, numpy.Generator)]
        states += [repr(one.bit_generator.state) for one in generators]
    return states


def _fits_whole(plan: Mapping[str, Any]) -> bool:
    """Whether the whole batch fits without memory optimizations."""
    whole, budget = plan.get("whole_bytes"), plan.get("budget")
    return whole is not None and budget is not None and whole <= budget


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
    with_step = next((frame for frame in reversed(frames) if _optimizers(frame.f_locals)), None)
    # The traceback leaves out the doctor's frames, which hold the arguments of modules too.
    frame = frames[-1] if frames and with_step is not None else None
    while frame is not None and frame is not with_step:
        with contextlib.suppress(RuntimeError):  # of one that still runs, where another thread called the step
            frame.clear()
        _ = frame.f_locals  # before Python 3.13 a dict of what was there when it was last read
        frame = frame.f_back
    gc.collect()


def _planned(crashed: Crashed, found: FoundStep, budget: int) -> Crashed:
    evidence = {**crashed.evidence, "budget": budget}
    try:
        plan = _plan(found, budget)
    except DoesNotFit as refusal:
        fix = f"No way was found to run this step in the available {format_bytes(budget)}: {refusal}"
        return replace(crashed, fix=fix, evidence={**evidence, "needed": refusal.needed})
    memory = format_bytes(budget).replace(" ", "")
    answer = found.with_change({"plan": plan.to_dict()}, {"memory": memory})
    whole = f"; the whole batch at once takes {format_bytes(plan.whole_bytes)}" if plan.whole_bytes else ""
    way = f"{micro_batches(plan.chosen)}{f', {plan.chosen.optimizations}' if plan.chosen.optimizations else ''}"
    saved = f"# plan.json comes from: anybatch plan SCRIPT --memory {memory} --json plan.json"
    lines = [
        f"# The same batch and gradient in {way}: {format_bytes(plan.peak_bytes)} at the peak,",
        f"# of {format_bytes(budget)} available{whole}.",
        *([saved] if "Plan.load" in answer["change"] else []),
        answer["change"].rstrip() or f"# The lines to change can't be written: {answer['trouble']}",
    ]
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.at_peak.items() if size)
    return replace(
        crashed, fix="\n".join(lines),
        evidence={**evidence, "whole": plan.whole_bytes, "plan": str(plan.chosen), "plan_at_peak": held,
                  "found": answer["found"]},
    )  # fmt: skip


def _plan(found: FoundStep, budget: int) -> Plan:
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


def _step_of(trace: TracebackType | None) -> tuple[FoundStep | None, str]:
    """The step that the innermost of the user's frames stands in that has one, or why none has."""
    from anybatch.doctor.crashing.live import whose

    why = ""
    for frame, line in reversed(list(_frames(trace))):
        if whose(frame.f_code.co_filename) != "user":
            continue
        optimizers = _optimizers(frame.f_locals)
        if not optimizers:
            why = why or "no optimizer has a name where it stopped"
            continue
        names = {**frame.f_globals, **frame.f_locals}
        gradients = [(p, p.grad) for one in optimizers for group in one.param_groups for p in group["params"]]
        try:
            return FoundStep(names, frame.f_code.co_filename, line, optimizers[0]), ""
        except AnyBatchError as refusal:
            why = str(refusal)
        finally:
            for parameter, gradient in gradients:  # the script is over, but an exit handler of the user's may look
                parameter.grad = gradient
    return None, why


def _optimizers(names: Mapping[str, Any]) -> list[Any]:
    import torch

    from anybatch.doctor.crashing.live import attributes

    held = [*names.values(), *(one for _, one in attributes(names.get("self")))]
    return list({id(one): one for one in held if isinstance(one, torch.optim.Optimizer)}.values())


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

    most, used = resource.getrlimit(resource.RLIMIT_AS)[0], psutil.Process().memory_info().vms
    return free if most == resource.RLIM_INFINITY else min(free, max(_RARELY_LESS, most - used))
