"""Finds the first step of a plain loop, by its backward and its update."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from anybatch.interception import Call

_ADAPTERS = {
    "transformers": "the Trainer of Transformers takes it; use anybatch.integrations.transformers.ExactTrainer",
    "trl": "the trainer of TRL takes it; put anybatch.integrations.transformers.ExactTraining before it",
    "lightning": "Lightning takes it; add anybatch.integrations.lightning.ExactGradient to the callbacks",
    "pytorch_lightning": "Lightning takes it; add anybatch.integrations.lightning.ExactGradient to the callbacks",
    "accelerate": "Accelerate takes it; use anybatch.integrations.accelerate.train_step",
}


def users_frame(frame: FrameType | None) -> tuple[FrameType | None, str]:
    """The innermost frame of the user's own code, and the library that it called, except torch and anybatch."""
    from anybatch.doctor.recording.naming import USERS, whose_file

    library = ""
    while frame is not None and (
        whose_file(frame.f_code.co_filename) != USERS or "/site-packages/" in frame.f_code.co_filename
    ):
        library = library or str(frame.f_globals.get("__name__", "")).partition(".")[0]
        library = "" if library in ("torch", "anybatch") else library
        frame = frame.f_back
    return frame, library


class LoopWatch:
    """Waits for the first backward and the update that follows it, in a process that ends there.

    Args:
        found: is called with the variables of the user's frame at the backward, its file and line, and the optimizer;
            it does not return.
        refused: is called with a sentence if a library calls the backward.
    """

    def __init__(self, found: Callable[[dict[str, Any], str, int, Any], None], refused: Callable[[str], None]) -> None:
        self._found, self._refused = found, refused
        self._seen: tuple[dict[str, Any], str, int] | None = None
        self._handles: list[Any] = []
        self._within: Any = None  # an optimizer that evaluates a closure, which goes back within its step

    def attach(self) -> None:
        """Begins to wait; torch must have been imported."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        original = torch.Tensor.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            self._look(sys._getframe(1))
            result = original(*args, **kwargs)  # type: ignore[no-untyped-call]
            self._end()
            return result

        torch.Tensor.backward = backward  # type: ignore[method-assign]
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def detach(self) -> None:
        """Stops waiting for an update."""
        for one in self._handles:
            one.remove()

    def _look(self, frame: FrameType | None) -> None:
        if "anybatch.step" in sys.modules or "anybatch.backpropagation" in sys.modules:
            return  # the script has a step of anybatch's, or is about to make one
        if self._seen is not None:
            return
        frame, library = users_frame(frame)
        if frame is None or library:
            self._refused(_ADAPTERS.get(library, f"{library or 'a library'} calls backward(), not the script itself"))
            return
        self._seen = {**frame.f_globals, **frame.f_locals}, frame.f_code.co_filename, frame.f_lineno

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._within = optimizer
        self._end()

    def _after_step(self, *_: Any) -> None:
        self._within = None

    def _end(self) -> None:
        if self._seen is not None and self._within is not None:
            self._found(*self._seen, self._within)


class FoundStep:
    """A step that was found in a plain loop, as a call of anybatch.

    The gradients of its model are set to ``None``.

    Raises:
        StepUnclear: the step can't be separated from the rest of the loop.
    """

    def __init__(self, names: dict[str, Any], file: str, line: int, optimizer: Any) -> None:
        from anybatch.doctor.loopchanges import results_of, update_of
        from anybatch.doctor.loopsteps import StepUnclear, step_at

        self._step = step = step_at(file, line, names, [optimizer])
        self._update = update_of(step)
        self._trouble = ""
        metrics: list[str] = []
        try:
            metrics = results_of(step)
        except StepUnclear as error:
            self._trouble = str(error)
        for parameter in step.model.parameters():
            parameter.grad = None  # a step begins without
        clip = float(eval(self._update.clip, dict(names))) if self._update and self._update.clip else None
        options = {"optimizer": optimizer, "clip_norm": clip}
        # the step as the arguments of a ``TrainStep``
        self.call = Call(step.model, step.loss_fn(metrics), step.logical_batch, options)

    def with_change(self, facts: dict[str, Any], question: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the lines to change to an answer, or why they can't be written."""
        from anybatch.doctor.fixes.source import unified
        from anybatch.doctor.loopchanges import change_of
        from anybatch.doctor.loopsteps import StepUnclear

        chosen = facts.get("plan", {}).get("chosen", {})
        is_split_only = not any(chosen.get(name) for name in ("recompute", "offload", "autocast"))
        is_split_only &= chosen.get("loss_chunks", 1) == 1
        size = chosen.get("micro_batch_size", 1)
        saved = json.dumps(question.get("output") or "plan.json")
        plan = f"micro_batch_size={size:g}" if is_split_only else f"plan=anybatch.Plan.load({saved})"
        wish = question["memory"] if question["memory"] is not None else "free"
        changed = {"change": "", "after": ""}
        if not self._trouble:
            try:
                norm = f', batch_norm="{question["batch_norm"]}"' if question.get("batch_norm") else ""
                edit = change_of(self._step, self._update, json.dumps(wish) + norm, plan + norm)
                diff = unified({edit.path: edit.before}, {edit.path: edit.after}, str(Path.cwd()))
                changed = {"change": diff, "after": edit.after if self._update else ""}
            except StepUnclear as error:
                self._trouble = str(error)
        at = f"{self._step.source.path}:{self._step.back.lineno}"
        return facts | changed | {"trouble": self._trouble, "found": at}
