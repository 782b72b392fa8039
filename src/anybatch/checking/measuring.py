"""Losses and gradients of a batch, of a split of it or of one part alone, all of the same isolated model."""

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.accelerators import has_cudnn
from anybatch.batch.batches import Part, Splittable
from anybatch.batch.counting import count_samples
from anybatch.batch.moving import to_device
from anybatch.checking.beginnings import announced
from anybatch.checking.isolation import Isolation
from anybatch.checking.reach import modules_of
from anybatch.checking.subjects import Subject, splits_of
from anybatch.checking.substitution import Draw, Substitution
from anybatch.checking.tracing import Tracer
from anybatch.errors import CountError, LossError
from anybatch.loss.accumulate import Settings
from anybatch.loss.coupling import Coupled
from anybatch.loss.losses import Evaluation, LossFunction, is_nothing, unless_nothing
from anybatch.loss.pieces import InPieces
from anybatch.loss.sequence import OverTime
from anybatch.loss.sums import Sums, values_of
from anybatch.loss.weights import Count, Weights, fetched
from anybatch.records.means import Mean
from anybatch.tensors.dispatch import without_modes
from anybatch.tensors.graph import leaves_of
from anybatch.tensors.modules import device_of, modules_behind
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.sideeffects import Effect, SideEffects
from anybatch.update.batchnorm import BatchNormPolicy, coupling_modules
from anybatch.update.passes import Task, run_pass
from anybatch.update.progress import Progress

_ENTRIES = 1 << 16  # of a gradient, from which weights are solved for


class _OutsideLeaves(Exception):
    """A loss depends on leaves that no module holds."""

    def __init__(self, leaves: list[torch.Tensor]) -> None:
        super().__init__()
        self.leaves = leaves


@dataclass
class Outcome:
    """What a run gave.

    Attributes:
        losses: the values by name.
        counts: what ``Mean`` s were over, by name.
        gradients: one for each of the rig's parameters, ``None`` where there is none.
        weights: of the micro-batches.
        sizes: entries of each gradient.
    """

    losses: dict[str, float]
    counts: dict[str, float]
    gradients: list[torch.Tensor | None]
    weights: Weights
    sizes: list[int]

    @property
    def norm(self) -> float:
        """The norm of the whole gradient."""
        return distance(self.gradients, [None] * len(self.gradients))

    @property
    def is_finite(self) -> bool:
        """Whether losses and gradient are finite."""
        return all(map(math.isfinite, self.losses.values())) and math.isfinite(self.norm)

    def sample(self) -> torch.Tensor:
        """Some entries of the gradient, always the same ones, in float64 on the CPU; 0 where there is no gradient."""
        taken = [torch.zeros(0, dtype=torch.float64)]
        for gradient, size, step in zip(self.gradients, self.sizes, self._steps(), strict=True):
            flat = torch.zeros(size) if gradient is None else gradient.reshape(-1)
            taken.append(flat[::step].double().cpu())
        return torch.cat(taken)

    def owners(self) -> torch.Tensor:
        """The position of the parameter that each of these entries is of."""
        lengths = [len(range(0, size, step)) for size, step in zip(self.sizes, self._steps(), strict=True)]
        return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))

    def _steps(self) -> list[int]:
        step = max(1, sum(self.sizes) // _ENTRIES)
        return [min(step, max(1, size // 16)) for size in self.sizes]


def distance(ones: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> float:
    """The Euclidean norm of the difference of two gradients; a missing gradient is zero."""
    norms = [0.0]
    for one, other in zip(ones, others, strict=True):
        if one is None and other is None:
            continue
        if one is None or other is None:
            difference = one if one is not None else other
        else:
            difference = one.double() - other.double()
        norms.append(norm_of(difference))
    return math.hypot(*norms)


def norm_of(values: Any) -> float:
    """The Euclidean norm in float64, also of numbers whose squares are 0 or infinite in it.

    Args:
        values: a tensor of any shape.
    """
    largest = float(torch.linalg.vector_norm(values, math.inf, dtype=torch.float64))
    if not largest or not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(values.double() / largest))


class Rig:
    """Runs a subject in isolation, in one precision and with random numbers that do not depend on the split.

    Args:
        subject: what is checked.
        dtype: the precision, ``None`` for the model's own.
        substitutes: whether random numbers and precisions are replaced.

    Attributes:
        parameters: the leaves that get a gradient.
        names: of the parameters; those that are not in the model have a description.
        effects: what the last run has changed in Python.
    """

    def __init__(self, subject: Subject, dtype: torch.dtype | None, *, substitutes: bool) -> None:
        self.subject = subject
        self.dtype = dtype
        self.device = device_of(subject.model)
        self.roots = modules_of(subject.model, subject.loss_fn)
        self.modules = {
            f"{prefix}.{name}".strip("."): module
            for prefix, root in self.roots.items()
            for name, module in root.named_modules()
        }
        self.tracer = Tracer(self.modules)
        self.substitution = (
            Substitution(promotes=dtype is torch.float64, where=self.tracer.where) if substitutes else None
        )
        self.effects = SideEffects([subject.model, subject.loss_fn])
        self.isolation = Isolation(self.roots.values(), self.effects, dtype, self.device)
        self.parameters: list[torch.Tensor] = []
        self.names: list[str] = []
        self._fresh = True
        self._carries: Collection[Effect] = ()
        self._stands: list[tuple[int, list[str]]] | None = None
        self._turn = 0
        self._turns: list[Sequence[int]] = []

    def open(self, stack: ExitStack) -> Outcome:
        """Isolates the model until a stack is closed, and runs the whole batch.

        Args:
            stack: what puts everything back.

        Returns:
            What the whole batch gave.
        """
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(self.isolation)
        stack.enter_context(self.tracer.attached())
        self._random = RandomState([self.device])
        only = self.subject.inputs
        for prefix, root in self.roots.items():
            for name, parameter in root.named_parameters():
                if parameter.requires_grad and (only is None or any(parameter is one for one in only)):
                    self._add(f"{prefix}.{name}".strip("."), parameter)
        for position, leaf in enumerate(only or ()):
            self.isolation.add(leaf)
            self._add(f"inputs[{position}]", leaf)
        self._prepare_for_cudnn()
        inside = len(self.parameters)
        loss_fn = self._looking_for_leaves(self.subject.loss_fn) if only is None else self.subject.loss_fn
        while True:
            try:
                whole = self.run(loss_fn=loss_fn)
            except _OutsideLeaves as found:
                leaves = found.leaves
            else:
                whole = whole if only is not None else self._without_temporary_leaves(whole, inside)
                # Masks know the place of a call, which is another where a loss is not computed at once.
                return self.run() if self.subject.dropout == "per-sample" else whole
            for leaf in leaves:
                self.isolation.add(leaf)
                self._add(f"a tensor of shape {tuple(leaf.shape)} outside of the modules", leaf)

    def _without_temporary_leaves(self, whole: Outcome, inside: int) -> Outcome:
        """Drops leaves that are not the same in the next run: those of cuts, of the batch, and that the loss makes."""
        kept = [i for i, gradient in enumerate(whole.gradients) if i < inside or gradient is not None]
        self.parameters = [self.parameters[i] for i in kept]
        self.names = [self.names[i] for i in kept]
        whole.gradients = [whole.gradients[i] for i in kept]
        whole.sizes = [whole.sizes[i] for i in kept]
        return whole

    def _prepare_for_cudnn(self) -> None:
        """Puts the copied weights of recurrent networks in one chunk, and takes off dropout that cuDNN draws."""
        for name, module in self.modules.items():
            if not isinstance(module, torch.nn.RNNBase) or not has_cudnn(self.device):
                continue
            module.flatten_parameters()
            if module.training and module.dropout > 0 and self.substitution is not None:
                module.dropout = 0.0
                self.substitution.draws[Draw("dropout", name)] = None

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        if not any(parameter is known for known in self.parameters):
            self.parameters.append(parameter)
            self.names.append(name)

    def _looking_for_leaves(self, loss_fn: LossFunction) -> LossFunction:
        """Stops, once for each loss, before the backward of one that depends on leaves that are not known yet."""
        stopped: set[str] = set()

        def look(name: str, loss: Any) -> Any:
            known = {id(parameter) for parameter in self.parameters}
            found = [
                leaf for leaf in leaves_of(loss.total if isinstance(loss, Mean) else loss) if id(leaf) not in known
            ]
            if found and name not in stopped:
                stopped.add(name)
                raise _OutsideLeaves(found)
            return loss

        return _in_place_of(loss_fn, lambda model, batch: _each(loss_fn(model, batch), look))

    def draws_by_size(self) -> bool:
        """Whether the whole batch draws more random numbers, that nothing stands in for, than a part of it does."""
        self.run()
        after_whole = self._generators()
        parts = self.splits()[0]
        self.part(self.parts_of(parts)[0], parts[0].samples)
        return after_whole != self._generators()

    def repeats_draws(self, parts: Sequence[Part], carries: Collection[Effect]) -> bool:
        """Whether two micro-batches draw the same numbers, since the loss seeds a generator.

        Args:
            parts: a split.
            carries: what goes over from one micro-batch to the next.
        """
        if self.substitution is None:
            return False
        self.substitution.drawn, self._stands = [], []
        try:
            self.run(parts, fresh=False, carries=carries)
            self._note_generators()
        finally:
            drawn, self.substitution.drawn = self.substitution.drawn, None
            stands, self._stands = self._stands, None
        firsts = [drawn[begin:end][:1] for (begin, _), (end, _) in itertools.pairwise(stands)]
        if any(one and one in firsts[:position] for position, one in enumerate(firsts)):
            return True
        sizes = [len(part.samples) for part in parts]
        ends = [(size, others) for size, (_, others) in zip(sizes, stands[1:], strict=False) if others != stands[0][1]]
        return any(end in ends[:position] for position, end in enumerate(ends))

    def _note_generators(self) -> None:
        """How many numbers were drawn so far, and where the generators stand that torch does not draw from."""
        drawn = None if self.substitution is None else self.substitution.drawn
        if self._stands is not None and drawn is not None and len(self._stands) <= len(self._turns):
            self._stands.append((len(drawn), self._generators(torch_too=False)))

    def has_drawn(self, *, torch_too: bool = True) -> bool:
        """Whether the last run has moved a random generator; what stands in for random numbers moves none.

        Args:
            torch_too: also torch's default ones, from which the seeds of masks are drawn.
        """
        after = self._generators(torch_too)
        self._random.restore()
        self.effects.restore()
        return after != self._generators(torch_too)

    def _generators(self, torch_too: bool = True) -> list[str]:
        state = RandomState([self.device]).state_dict()
        tensors = [state.pop("cpu"), *state.pop("devices").values()]
        states = [value.tolist() if isinstance(value, torch.Tensor) else value for value in self.effects.generators()]
        return [str(state), *(str(tensor.tolist()) for tensor in tensors if torch_too), *map(_shown, states)]

    def coupling(self) -> dict[str, torch.nn.Module]:
        """BatchNorm in training mode that a step knows of: in the model and in a loss that is a module."""
        found = coupling_modules(*modules_behind(self.subject.model, self.subject.loss_fn)).values()
        return {name: module for name, module in self.modules.items() if any(module is one for one in found)}

    def has_optimizer_hook(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has a hook that runs after its gradient was accumulated; it is off during the check."""
        return id(parameter) in self.isolation.with_optimizer_hooks

    def splits(self, subject: Subject | None = None) -> list[list[Part]]:
        """The splits that are compared with the whole batch."""
        subject = subject or self.subject
        return splits_of(subject.splittable(self.dtype), subject.micro_batch_size, by_cost=subject.cost is not None)

    def parts_of(self, parts: Sequence[Part], subject: Subject | None = None) -> list[Any]:
        """The micro-batches of a split, on the device."""
        batches = (subject or self.subject).micro_batches(parts, self.dtype)
        return [to_device(batch, self.device) for batch in batches]

    def run(
        self,
        parts: Sequence[Part] | None = None,
        *,
        subject: Subject | None = None,
        loss_fn: LossFunction | None = None,
        count: Count | None = None,
        batch_norm: BatchNormPolicy = "frozen",
        fresh: bool = True,
        carries: Collection[Effect] = (),
    ) -> Outcome:
        """The gradient of the batch, as a step would compute it.

        Args:
            parts: how it is split; ``None`` for the whole batch at once.
            subject: other than the rig's own, such as the same in other pieces.
            loss_fn: other than the subject's own.
            count: other than the subject's own.
            batch_norm: what happens to BatchNorm.
            fresh: whether buffers and random state are those of the start for every micro-batch, so that nothing goes
                over from one to the next.
            carries: what goes over all the same, of what a run changes in Python.

        Returns:
            What it gave.
        """
        subject = subject or self.subject
        splittable = subject.splittable(self.dtype)
        parts = splittable.plan(None) if parts is None else parts
        self._turns = [part.samples for part in parts]
        self._carries = carries
        return self._run(splittable, parts, loss_fn or subject.loss_fn, count or subject.count, batch_norm, fresh)

    def part(self, batch: Any, samples: Sequence[int], name: str = "") -> Outcome:
        """The loss and the gradient of one micro-batch alone, not weighted.

        Args:
            batch: the micro-batch.
            samples: which samples of the whole batch it has.
            name: the only loss that counts, if there are several.
        """
        loss_fn = only(self.subject.loss_fn, name) if name else self.subject.loss_fn
        if not isinstance(loss_fn, (Coupled, InPieces)):
            loss_fn = _filled(loss_fn)
        splittable = self.subject.alone(batch, samples)
        self._turns, self._carries = [samples], ()
        return self._run(splittable, splittable.plan(None), loss_fn, count_samples, "frozen", True)

    def _run(
        self,
        splittable: Splittable,
        parts: Sequence[Part],
        loss_fn: LossFunction,
        count: Count,
        batch_norm: BatchNormPolicy,
        fresh: bool,
    ) -> Outcome:
        self._fresh, self._turn = fresh, 0
        subject = self.subject
        # With every graph kept a coupled loss encodes once, so that random numbers have their turn once.
        settings = Settings(
            self.device, subject.autocast, None, subject.inputs, subject.accumulate, kept_graphs=len(parts),
            dropout=subject.dropout,
        )  # fmt: skip
        task = Task(self.subject.model, self._beginning(loss_fn), count, settings, batch_norm, splittable)
        for parameter in self.parameters:
            parameter.grad = None
        over_time = self.subject.loss_fn if isinstance(self.subject.loss_fn, OverTime) else None
        carried = None if over_time is None else over_time.carried
        if over_time is not None:  # every run begins with state(model, batch)
            over_time.carried = None
        try:
            self.isolation.restore_buffers()  # at which the power iterations of spectral norms begin
            self._random.restore()  # from which the seed of masks is drawn
            with self.substitution or contextlib.nullcontext():
                weights, sums = run_pass(task, parts, self.parameters, Progress())
            gradients = [_dense(parameter.grad) for parameter in self.parameters]
        finally:
            if over_time is not None:
                over_time.carried = carried
            for parameter in self.parameters:
                parameter.grad = None
        _check_not_empty(weights, sums)
        counts = {name: sum(fetched(values)) for name, values in sums.counts.items()}
        sizes = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in self.parameters]
        return Outcome(values_of(sums), counts, gradients, weights, sizes)

    def _beginning(self, loss_fn: LossFunction) -> LossFunction:
        draws = self.substitution is not None and bool(self.substitution.draws)  # a second pass would draw others
        return announced(loss_fn, self._begin, self._begin_whole, in_pieces=not draws)

    def _begin_whole(self) -> None:
        if self.substitution is not None:
            self.substitution.numbers.begin(range(self.subject.rows), self.subject.rows)

    def _begin(self) -> None:
        """Puts back what the last forward has changed; numbers are those of the samples whose turn it is."""
        self.tracer.restart()
        if self.substitution is not None:
            self.substitution.numbers.begin(self._turns[self._turn % len(self._turns)], self.subject.rows)
        if self._fresh or self._turn == 0:
            self.isolation.restore_buffers()
            self._random.restore()
        with without_modes():  # which would take a copy for one of the loss's operations
            goes_on = self._stands is not None and self._turn > 0  # where numbers are really drawn
            self.effects.restore(self._carries if self._turn else (), generators=not goes_on)
        self._note_generators()
        self._turn += 1


def _shown(state: Any) -> str:
    """A state of a generator in full, which numpy abridges."""
    if isinstance(state, dict):
        return str({key: _shown(value) for key, value in state.items()})
    if isinstance(state, tuple):
        return str([_shown(value) for value in state])
    return str(state.tolist() if hasattr(state, "tolist") else state)


def only(loss_fn: LossFunction, wanted: str) -> LossFunction:
    """A loss function that gives one of several losses; the others are multiplied by zero."""
    return _multiplied(loss_fn, lambda name: 1.0 if name == wanted else 0.0)


def _in_place_of(loss_fn: LossFunction, evaluate: Any) -> LossFunction:
    """Lets the modules of a loss be found behind a function that calls it."""
    evaluate.user_functions = (loss_fn, *getattr(loss_fn, "user_functions", ()))
    function: LossFunction = evaluate
    return function


def _filled(loss_fn: LossFunction) -> LossFunction:
    """A loss function that gives 0 where another gives nothing, as for a micro-batch without items."""

    def evaluate(model: Any, batch: Any) -> Any:
        result = loss_fn(model, batch)
        if isinstance(result, Mapping):
            result = {name: loss for name, loss in result.items() if not is_nothing(loss)}
        return torch.zeros((), requires_grad=True) if is_nothing(result) else result

    return _in_place_of(loss_fn, evaluate)


def scaled(loss_fn: LossFunction, factor: float) -> LossFunction:
    """A loss function that gives every loss times a factor."""
    return _multiplied(loss_fn, lambda name: factor)


def _multiplied(loss_fn: LossFunction, factor_of: Callable[[str], float]) -> LossFunction:
    def multiplied(name: str, loss: Any) -> Any:
        factor = factor_of(name)
        return Mean(loss.total * factor, loss.count) if isinstance(loss, Mean) else loss * factor

    return _in_place_of(loss_fn, lambda model, batch: _each(loss_fn(model, batch), multiplied))


def _each(result: Any, function: Callable[[str, Any], Any]) -> Any:
    """What a loss function gave, with a function applied to each loss.

    The losses of a generator are still made one by one; those of a mapping, which may share a graph, still go back
    together.
    """
    evaluation = Evaluation(result, contextlib.nullcontext, unless_nothing)
    if not evaluation.is_generator:
        return {name: loss if is_nothing(loss) else function(name, loss) for name, loss in evaluation}

    def one_by_one() -> Iterator[tuple[str, Any]]:
        for name, loss in evaluation:
            yield name, loss if is_nothing(loss) else function(name, loss)
            del loss

    return one_by_one()


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _check_not_empty(weights: Weights, sums: Sums) -> None:
    if weights.is_empty or (not sums.terms and not any(sum(fetched(c)) for c in sums.counts.values())):
        raise CountError(
            "the count of the batch is 0, so there is no gradient to compare; expected a batch with something to learn "
            "from"
        )


def check_gradient(rig: Rig, whole: Outcome) -> None:
    """Refuses a loss that gives no gradient to any parameter of the model.

    Raises:
        LossError: the loss depends on something else than the model that was passed in.
    """
    model = rig.subject.model
    own = {id(p) for p in model.parameters()} if isinstance(model, torch.nn.Module) else set()
    only = rig.subject.inputs
    pairs = [g for p, g in zip(rig.parameters, whole.gradients, strict=True) if only is not None or id(p) in own]
    if pairs and all(gradient is None for gradient in pairs):
        what = f"{len(pairs)} parameters of {type(model).__name__}" if only is None else f"{len(pairs)} inputs"
        raise LossError(
            f"the loss gave no gradient to any of the {what}; expected a "
            "loss that is computed with the model that is passed to loss_fn, not with another one from outside"
        )
