"""What is measured on sampled steps, joined: norms, activations, graphs, losses, inputs."""

import dataclasses
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.frames import is_interruption
from anybatch.doctor.recording.describing import rows_of
from anybatch.doctor.recording.recordings import Recording
from anybatch.doctor.samples import inputs, losscalls
from anybatch.doctor.samples.activations import ActivationSampler
from anybatch.doctor.samples.alongside import BufferSampler, HandWrites, ReplicaWatch, TieSampler, memory
from anybatch.doctor.samples.draws import Draws
from anybatch.doctor.samples.nonfinite import NonFiniteWatch
from anybatch.doctor.samples.norms import NormSampler
from anybatch.doctor.samples.suspicion import Suspicion
from anybatch.doctor.samples.walking import LiveGraphs, Walker
from anybatch.records.lines import Fact
from anybatch.records.lossfacts import LossCall, Walk
from anybatch.records.samples import InputSample, NonFinite

MARKED = 8
"""Steps that are not sampled of which one has its graphs followed."""
_MOST_ROOTS = 4  # whose last inputs are kept
_MOST_CALLS = 3  # of one root in one step whose inputs are looked at: an evaluation may come before what is trained on
_MOST_WALKS = 4  # in one step
_LOOKS_FOR_WRAPPERS = (0, 5)  # steps
_FEW_MODULES = 60  # up to which every sample has activations


class Samplers:
    """Calls each sampler where it belongs; one that fails is left out from then on."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        # of the roots that ran last: the module, and what its last forward with gradient was given, without graphs
        self.last_inputs: dict[int, tuple[torch.nn.Module, Any, Any]] = {}
        # for these roots the name and the arguments of the last loss of torch on a sampled step
        self._failed: set[str] = set()
        self._running = ExitStack()
        self._sampled_roots: dict[int, tuple[int, bool]] = {}  # how many calls of this step, and whether one trains
        self._first_layers: dict[int, str] = {}
        self._activations: dict[int, tuple[weakref.ref[torch.nn.Module], ActivationSampler | None]] = {}
        self.kept = Kept(lambda: recording.counter.step, lambda: recording.sampled_much, lambda: recording.saw_mode)
        numbering = recording.numbering
        self._norms, self._walker, self._live = NormSampler(numbering), Walker(numbering), LiveGraphs()
        # has to know the last loss that was finite, and its value
        stepped = lambda: recording.stepped()  # noqa: E731, PLW0108 - replaced
        self.nonfinite = NonFiniteWatch(numbering, stepped, self.kept.lines_of)
        self._buffers, self._ties = BufferSampler(numbering), TieSampler(numbering)
        self._writes = HandWrites(numbering)
        self._suspicion, self._replicas = Suspicion(numbering), ReplicaWatch(numbering)
        self.had_gradient: set[int] = set()  # numbers of all parameters that a backward has touched so far
        self._walks: list[Walk] = []
        self.matters = True  # whether steps that are not sampled have to be told too
        self._never: list[int] = []
        self._is_measuring = False
        self._loss_calls = losscalls.Calls(recording, self._emit_call, self._current_root, self._keep_loss)
        self._draws = Draws(recording)

    @property
    def seconds(self) -> float:
        """What was taken outside of the guard that counts everything else."""
        hooks = sum(one.seconds for _, one in self._activations.values() if one is not None)
        return hooks + self._suspicion.seconds

    def attach(self) -> None:
        """Starts what runs all the time."""
        recording = self._recording
        self.safely("draws", self._draws.attach)
        self.safely("kept", self.kept.attach, recording.patches.wrap, recording.guarded)
        self._loss_calls.attach()

    def detach(self) -> None:
        """Ends it."""
        self._running.close()
        self.safely("kept", self.kept.stop)
        self.safely("kept", self.kept.look_again)
        if not self._recording.sampled:
            self._measure("nonfinite", self.nonfinite.look_back)
        self.safely("losses", self._loss_calls.end_evaluation)
        self.safely("suspicion", self._suspicion.stop)
        self.safely("kept", self.kept.leave)  # what could not be left below a mode that is off now

    # forwards

    def with_gradient(self, module: torch.nn.Module, args: Any, kwargs: Any) -> bool:
        """Is shown one of the first calls of a net with a gradient; returns whether there is more to see."""
        return True is self.safely("kept", self.kept.trains, module, self._recording.root, args, kwargs)

    def without_gradient(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Is shown a call of a net without a gradient."""
        self.safely("kept", self.kept.samples, module, self._recording.root, args, kwargs)

    def before_forward(self, module: torch.nn.Module, root: int, forward: int, args: Any, kwargs: Any) -> None:
        """Is shown the call of a root."""
        name = self._recording.numbering.models[root].names.get(id(module), "")
        self.safely("kept", self.kept.forward, module, root, name, args, kwargs)
        if torch.is_grad_enabled():
            if module.training:
                self._replicas.called(module, root)
            if self._recording.sampled:
                self.safely("forwards", self._before_forward, module, root, forward, args, kwargs)
        self.safely("kept", self.kept.begin, module, root)

    def _before_forward(self, module: torch.nn.Module, root: int, forward: int, args: Any, kwargs: Any) -> None:
        recording = self._recording
        calls, trains = self._sampled_roots.get(root, (0, False))
        if calls and (calls < _MOST_CALLS or (module.training and not trains)):
            self._look_again(module, root, forward, args, kwargs)
        if calls:
            return
        self._sampled_roots[root] = 1, module.training
        if recording.counter.step == 0:  # ties are seen before a step may break them
            self._measure("ties", self._ties.sample)
        model = recording.numbering.models[root]
        if model.module() is not module or not recording.numbering.stands_for_others(root):
            return
        seen = self.safely("inputs", inputs.look, root, args, kwargs) or []
        self._is_measuring = True
        sampler = None
        is_small = len(model.held) <= _FEW_MODULES
        if recording.sampled_much and (is_small or recording.sampled_all):
            known = self._activations.get(root)
            if known is None or known[0]() is not module:
                made = self.safely("activations", ActivationSampler, model, self._draws)
                known = self._activations[root] = weakref.ref(module), made
            sampler = known[1]
        self._running.callback(self._measured, sampler, root, forward, seen)
        if sampler is not None:
            self.safely("activations", self._running.enter_context, sampler.attached())

    def _not_a_number(self, loss: torch.Tensor, *, sampled: bool, scaled: bool) -> NonFinite | None:
        found = self.nonfinite.at_backward(loss, sampled=sampled, scaled=scaled)
        if found is not None and found.where == "input":
            self.kept.look_on(found.value)
        return found

    def _look_again(self, module: torch.nn.Module, root: int, forward: int, args: Any, kwargs: Any) -> None:
        """Looks at the inputs alone of one more call in a step."""
        calls, trains = self._sampled_roots[root]
        self._sampled_roots[root] = calls + 1, trains or module.training
        numbering = self._recording.numbering
        if numbering.models[root].module() is module and numbering.stands_for_others(root):
            for one in self.safely("inputs", inputs.look, root, args, kwargs) or []:
                self._recording.emit(dataclasses.replace(one, forward=forward, first=self._first_layers.get(root, "")))

    def after_forward(self, module: torch.nn.Module, root: int) -> None:
        """Is told that it has ended."""
        self.safely("kept", self.kept.forwarded, module, root)
        if self._is_measuring:
            self._is_measuring = False
            self.safely("activations", self._running.pop_all().close)

    def _measured(
        self, sampler: ActivationSampler | None, root: int, forward: int, seen: list[InputSample]
    ) -> None:  # fmt: skip
        first = "" if sampler is None else sampler.first
        self._first_layers[root] = first or self._first_layers.get(root, "")
        for one in seen:
            self._recording.emit(dataclasses.replace(one, forward=forward, first=first))
        self._measure("draws", self._draws.take)
        if sampler is not None:
            self._measure("activations", sampler.result, forward)

    def keep(self, root: int, module: torch.nn.Module) -> None:
        """Keeps the arguments of the last forward as those of a root."""
        recording = self._recording
        known = root in self.last_inputs
        recording.kept = root
        self.last_inputs.pop(root, None)
        self.last_inputs[root] = (module, *recording.arguments)
        if not known:
            for number, (other, _, _) in list(self.last_inputs.items()):
                if number != root and sys.getrefcount(other) <= 3:  # nobody else holds it any more
                    del self.last_inputs[number]
            while len(self.last_inputs) > _MOST_ROOTS:
                del self.last_inputs[next(iter(self.last_inputs))]
            self.kept.release()

    # backwards

    def before_backward(self, losses: list[torch.Tensor], weight: float, *, into_grad: bool, scaled: bool) -> None:
        """Is shown losses whose backward is about to run, and the number that it is given as their gradient."""
        sampled = self._recording.sampled
        emit, step = self._recording.emit, self._recording.counter.step
        for loss in losses[:1]:
            self.safely("kept", self.kept.backward, loss, weight)
            if into_grad and step == 0:
                self.safely("writes by hand", self._writes.before_backward)
            if into_grad:
                self.safely("live graphs", self._live.add, loss, step)
            self._measure("nonfinite", self._not_a_number, loss, sampled=sampled, scaled=scaled)
            if into_grad:
                self._measure("suspicion", self._suspicion.before_backward, loss)
            if self._recording.sampled_much and len(self._walks) < _MOST_WALKS:
                walk = self.safely("walking", self._walker.walk, loss, rows_of(*self._recording.arguments), step=step)
                if walk is not None:
                    emit(walk)
                    self._walks.append(walk)

    def like_backward(self, loss: torch.Tensor) -> None:
        """Is shown a loss in one of ``MARKED`` steps that are not sampled."""
        self._live.add(loss, self._recording.counter.step, steps=MARKED)

    def after_backward(self) -> None:
        """Is told that it has ended."""
        self.safely("kept", self.kept.leave)
        if self._recording.counter.step == 0:
            self._measure("writes by hand", self._writes.after_backward)
        self.safely("suspicion", self._suspicion.after_backward)

    def _keep_loss(self, root: int, name: str, arguments: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            self.safely("kept", self.kept.evaluated, root, arguments["target"])
        elif root in self.last_inputs:
            self.safely("kept", self.kept.loss, self._recording.arguments, root, name, arguments)

    def _emit_call(self, fact: Fact) -> None:
        number = self._recording.emit(fact)
        if isinstance(fact, LossCall):
            self._recording.loss_calls.append(number)

    def _current_root(self) -> losscalls.CurrentRoot | None:
        recording = self._recording
        model = recording.numbering.models[recording.root] if recording.root >= 0 else None
        if model is None:
            return None
        module = None if recording.running is None else recording.innermost or model.module()
        name = model.names.get(id(module), "") if module is not None else ""
        return losscalls.CurrentRoot(recording.root, *recording.arguments, name, module)

    # steps

    def before_step(self, optimizer: Any, number: int, *, sampled: bool) -> None:
        """Is told that an optimizer is about to step."""
        weights = (one for group in optimizer.param_groups for one in group["params"])
        self.safely("kept", self.kept.stepping, number, weights)
        self._measure("nonfinite", self.nonfinite.at_step, optimizer, sampled=sampled)
        if sampled:
            self.safely("norms", self._norms.before, optimizer)
            self.safely("kept", self.kept.streams.look, number)

    @property
    def is_following(self) -> bool:
        """Whether operations of this step are followed or written down."""
        return bool(self._suspicion._why) or self.kept._tape is not None

    def after_step(self, optimizer: Any, number: int, count: int, *, sampled: bool) -> None:
        """Is told that it has stepped."""
        if sampled:
            self._measure("norms", self._norms.after, optimizer, count)
            self._measure("buffers", self._buffers.sample)
            self._measure("ties", self._ties.sample)
            graphs = self.safely("live graphs", self._live.count, self._recording.counter.step)
            self._measure("memory", memory, *(graphs or (0, 0)))
            if count in _LOOKS_FOR_WRAPPERS:
                self._measure("replicas", self._replicas.look)
            self._never = self.safely("suspicion", self._without_gradient) or []
            weights = (one for group in optimizer.param_groups for one in group["params"])
            self.safely("kept", self.kept.stepped, weights)
        self._measure("suspicion", self._suspicion.after_step, self._walks, self._never, number)
        self.next_step()
        self.matters = bool(self._never or self._suspicion.is_busy)

    def _without_gradient(self) -> list[int]:
        """Parameters of models that an optimizer has, that require a gradient, and that never had one."""
        numbering = self._recording.numbering
        optimized = {
            one
            for number, _ in numbering.optimizers()
            for group in numbering.optimizer_table(number).groups
            for one in group.parameters
        }
        return [
            one
            for one in sorted(optimized - self.had_gradient)
            if numbering.facts(one).root >= 0 and (tensor := numbering.tensor(one)) is not None and tensor.requires_grad
        ]

    def next_step(self) -> None:
        """What is taken once in a step may be taken again."""
        self._sampled_roots.clear()
        self._walks = []
        self._draws.next_step()

    # each on its own

    def _measure(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Records what a sampler says: a fact, several, or nothing."""
        found = self.safely(name, function, *args, **kwargs)
        for fact in () if found is None else (found,) if isinstance(found, Fact) else found:
            self._recording.emit(fact)

    def safely(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a sampler's function unless that sampler has failed before."""
        if name in self._failed:
            return None
        try:
            return function(*args, **kwargs)
        except BaseException as error:  # a sampler that fails must not keep the events from being recorded
            self._failed.add(name)
            self._recording.failed(error)
            if is_interruption(error):
                raise
            return None
