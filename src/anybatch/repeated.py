"""``backward`` for trainers: called once per logical batch, while the trainer owns the update."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from anybatch.backpropagation import intercept, parameters_of, reducer_of, run_backward
from anybatch.batch.batches import Splittable
from anybatch.batch.counting import count_samples
from anybatch.checking.proving import Proofs
from anybatch.loss.accumulate import DropoutPolicy
from anybatch.loss.losses import LossFunction
from anybatch.loss.weights import Count
from anybatch.options import BatchNormPolicy, Options, Verify, optimizers_of
from anybatch.records.results import StepResult
from anybatch.tensors.modules import device_of
from anybatch.update.batchnorm import refuse_to_split
from anybatch.update.passes import Task
from anybatch.update.refusals import Cause
from anybatch.update.stepstate import GradientState, load_whole, part
from anybatch.update.transaction import SizeLimit

if TYPE_CHECKING:
    from anybatch.planning.following import Follower
    from anybatch.planning.subjects import Subject


class RepeatedBackward:
    """Adds the gradient of each logical batch to ``.grad``, and keeps micro-batch sizes and plans between batches.

    Arguments that are not described here are those of ``anybatch.backward`` and ``anybatch.TrainStep``.

    Args:
        optimizers: whose state the plan includes.
        clip_norm: what the trainer clips the gradient norm to, whose memory a plan includes; ``None`` for no clipping.
        scaler: scales the losses; the trainer unscales.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> gradient = RepeatedBackward(model, lambda model, batch: model(batch).mean(), micro_batch_size=8)
        >>> [gradient(torch.ones(rows, 3)).micro_batches for rows in (22, 8)]
        [3, 1]
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        memory: int | float | str | None = None,
        micro_batch_size: int | None = None,
        count: Count = count_samples,
        broadcast: Sequence[str] = (),
        layout: Mapping[str, int | None] | None = None,
        batch_norm: BatchNormPolicy = "refuse",
        dropout: DropoutPolicy = "native",
        clip_norm: float | None = None,
        scaler: Any = None,
        group: Any = None,
        verify: Verify = "first",
    ) -> None:
        self._options = Options(
            model=model, loss_fn=loss_fn, micro_batch_size=micro_batch_size, memory=memory, count=count,
            broadcast=broadcast, layout=layout, scaler=scaler, batch_norm=batch_norm, dropout=dropout, group=group,
            verify=verify,
        )  # fmt: skip
        self.model, self.loss_fn = model, loss_fn
        self.joined = 1  # batches that the trainer joins to one, of which each call gets one
        self._optimizers, self._clip_norm = optimizers_of(optimizers) if optimizers else [], clip_norm
        self._proofs, self._settings = Proofs(verify), self._options.settings()
        self._follower = self._following(memory)
        self._limit = SizeLimit(micro_batch_size) if self._follower is None else self._follower.limit

    def _following(self, memory: Any) -> "Follower | None":
        if memory is None:
            return None
        from anybatch.planning.following import Follower

        return Follower(self._subject, memory=memory, plan=None)

    def __call__(self, batch: Any) -> StepResult:
        """Adds the gradient of a logical batch to ``.grad``.

        Raises:
            BatchError, CountError, LossError, NotSplittable, DoesNotFit: see ``anybatch.backward``.
        """
        options, settings, is_planned = self._options, self._settings, self._follower is not None
        intercept(options, batch, self._limit.ceiling, optimizer=self._optimizers or None, clip_norm=self._clip_norm)
        settings.device = device_of(self.model)
        settings.reducer = reducer = reducer_of(self.model, options.group, settings.device, settings.reducer)
        parameters = parameters_of(self.model, self.loss_fn)
        with reducer.call("backward", parameters, adds=True, settings=self._alike):
            splittable = options.splittable(batch, may_be_empty=reducer.is_shared, is_planned=is_planned)
            task = Task(
                self.model, self.loss_fn, options.count, settings, options.batch_norm, splittable,
                options.micro_batch_size, "backward", is_planned=is_planned,
            )  # fmt: skip
            self._proofs.is_of_part = is_of_part = self.joined > 1 and splittable.obstacle is None
            if is_of_part and options.batch_norm == "refuse":
                refuse_to_split(task.modules, self.joined, Cause(verb="backward", batches=self.joined))
            with self._planned(splittable, parameters):
                result = run_backward(task, parameters, self._limit, self._optimizations, self._proofs)
        self._limit.resolve(splittable.largest)
        if result.skipped and settings.scaler is not None:
            settings.scaler.scale(torch.zeros((), device=settings.device))  # a scaler that never scaled can't step
            _fill_with_zeros(parameters)
        result.plan = None if self._follower is None else self._follower.plan
        return result

    def _alike(self) -> dict[str, str]:
        """Settings that have to be equal on all ranks."""
        from anybatch.update.overranks import settings_of

        return settings_of(self._optimizers, (), self._clip_norm)

    def _planned(
        self, splittable: Splittable, parameters: Sequence[torch.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        if self._follower is None:
            return contextlib.nullcontext()
        from anybatch.planning.following import followed

        def clear() -> None:
            for parameter in parameters:
                parameter.grad = None

        return followed(self._follower, splittable, clear, self._settings.device)

    def _optimizations(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._follower is None else self._follower.applied(self.model)

    def _subject(self, splittable: Splittable) -> "Subject":
        from anybatch.planning.subjects import Subject

        own = {"optimizers": self._optimizers, "clip_norm": self._clip_norm}
        return Subject.of(self._options, self._settings, splittable, **own)

    def state_dict(self) -> dict[str, Any]:
        """The sizes and the plan, as plain values; a run resumed from them is bitwise the same."""
        plan = None if self._follower is None else self._follower.state_dict()
        return {"limit": self._limit.state_dict(), "plan": plan}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from what ``state_dict`` returned.

        Raises:
            BatchError: the state is malformed; nothing was loaded.
        """
        load_whole(self._load_whole, state, self.state_dict(), GradientState, name=type(self).__name__)

    def _load_whole(self, state: Mapping[str, Any]) -> None:
        with part("plan"):
            if self._follower is not None and state["plan"] is not None:
                self._follower.load_state_dict(state["plan"])
        if (self._follower is None) == (state["plan"] is None):  # a size from a plan says nothing without one
            self._limit.load_state_dict(state["limit"])


def _fill_with_zeros(parameters: Sequence[torch.Tensor]) -> None:
    """A trainer always steps its ``GradScaler``, which raises where no parameter has a gradient."""
    if all(parameter.grad is None for parameter in parameters):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
