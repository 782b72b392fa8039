"""Sees the user's code call a model."""

import time
import weakref
from collections.abc import Callable
from operator import attrgetter
from threading import get_ident
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from anybatch.doctor.recording.arguments import without_graph
from anybatch.doctor.recording.describing import kind_of, rows_of
from anybatch.doctor.recording.holdings import parameters_in
from anybatch.doctor.recording.numbering import Model
from anybatch.doctor.recording.patches import hidden
from anybatch.doctor.recording.recordings import Recording
from anybatch.doctor.recording.samplers import Samplers
from anybatch.records.events import Forward
from anybatch.tensors.graph import in_backward
from anybatch.torch_private import is_jit_tracing, number_of_backward, stands_in

_MOST_NAMES = 20
_UNKNOWN: Any = (lambda: None), -1, []
_training = attrgetter("training")


class ForwardHooks:
    """Has calls of modules seen: of all of them while models are looked for, else of known roots and others like them.

    Others are those of the same class, if that is not torch's own: many modules within a model are of these.

    Nothing is hung on the user's modules, so that they can be saved, copied and compiled as without it.

    Args:
        recording: of the run.
        samplers: are shown each call of a root.
    """

    def __init__(self, recording: Recording, samplers: Samplers) -> None:
        self._recording, self._samplers = recording, samplers
        self.last: Model | None = None
        self._chosen: set[Any] = set()
        self._calls: set[Any] = set()
        self._is_searching = False
        self._choose: Callable[[set[Any] | None], None] = lambda chosen: None
        self._before, self._after = recording.guarded(self._begin), recording.guarded(self._end)
        self._adopt = recording.guarded(self._look_at)
        self._modes: dict[int, list[tuple[str, Any]]] = {}
        self._known: dict[int, tuple[weakref.ref[torch.nn.Module], int, list[Any]]] = {}
        self._seen: set[int] = set()

    def attach(self) -> None:
        """Has calls of all modules seen; ``Recording.patches`` ends it."""
        self._choose = self._recording.patches.wrap_some(torch.nn.Module, "_wrapped_call_impl", self._wrapped)
        self.search(True)

    def detach(self) -> None:
        """Forgets whose calls were looked at."""
        self._chosen.clear()
        self._calls.clear()

    def search(self, wanted: bool) -> None:
        """Whether calls of all modules are looked at from now on."""
        self._is_searching = wanted
        self._choose(None if wanted else self._chosen)

    def forget_running(self) -> None:
        """Another thread is recorded from now on, in which nothing runs."""
        self._recording.running = self._recording.innermost = None

    def follow(self, module: torch.nn.Module) -> None:
        """Makes sure that calls of a root are seen from now on."""
        cls = type(module)
        self._chosen.add(id(module) if cls.__module__.startswith("torch.") else cls)
        call = type(module).__call__
        if call not in (torch.nn.Module.__call__, *self._calls):
            self._calls.add(call)
            self._recording.patches.wrap(type(module), "__call__", self._wrapped)

    def _wrapped(self, original: Any) -> Callable[..., Any]:
        """It asks first what a single call tells, since a model may have hundreds of modules."""
        is_traced, flags = torch.compiler.is_dynamo_compiling, vars(torch.compiler)
        recording, chosen, clock, again = self._recording, self._chosen, time.perf_counter, self._again
        threads, known, grad_enabled = recording.threads, recording.known, torch.is_grad_enabled

        def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if is_traced():
                return original(module, *args, **kwargs)
            if recording.running is not None:
                is_root = module is recording.running and recording.innermost is None  # by a method of its class
                if is_root or not self._is_searching or flags.get("_is_compiling_flag") or threads.ident != get_ident():
                    return original(module, *args, **kwargs)
                return self._within(original, module, args, kwargs)
            if not (self._is_searching or type(module) in chosen or id(module) in chosen):
                return original(module, *args, **kwargs)
            if flags.get("_is_compiling_flag") or is_jit_tracing():  # as ``is_compiling`` reads it, without its call
                return original(module, *args, **kwargs)
            me = get_ident()
            was, is_other = threads.inside, threads.ident != me
            if is_other and not threads.admits("forward" if grad_enabled() else "looks", module):
                return original(module, *args, **kwargs)
            threads.inside = True
            if known.usable and again(module, args, kwargs):
                recording.running = module
                try:
                    return original(module, *args, **kwargs)
                finally:
                    if threads.ident == me:
                        recording.running, threads.inside = None, was and not is_other
            begun = None if in_backward() else self._before(module, args, kwargs)
            if begun is None:
                threads.inside = was
                return original(module, *args, **kwargs)
            recording.running, started = module, clock()
            try:
                return original(module, *args, **kwargs)
            finally:
                if threads.ident == me:
                    recording.running = recording.innermost = None
                    threads.inside = was and not is_other
                self._after(module, begun, clock() - started)

        return call

    def _within(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a module that is called by another one."""
        if id(module) not in self._seen:
            self._adopt(module)
        recording = self._recording
        outer, recording.innermost = recording.innermost, module
        try:
            return original(module, *args, **kwargs)
        finally:
            recording.innermost = outer

    def _again(self, module: torch.nn.Module, args: Any, kwargs: Any) -> bool:
        """Records a call that is like one before, with the seconds that that one took; whether it is."""
        recording, known = self._recording, self._recording.known
        known.key = None
        try:
            reference, root, modules = self._known.get(id(module), _UNKNOWN)
            if reference() is not module or number_of_backward() >= 0:
                return False
            first: Any = args[0] if len(args) == 1 else None
            is_plain = type(first) is torch.Tensor and not kwargs
            rows = first.size(0) if is_plain and first.dim() else rows_of(args, kwargs)
            grad = torch.is_grad_enabled() or (None if torch.is_inference_mode_enabled() else False)
            modes = tuple(map(_training, modules)) if modules else ()
            seen = known.find(("forward", id(module), rows, module.training, grad, modes, known.state))
            if seen is None:
                return False
            counter = recording.counter
            counter.at = at = counter.at + 1
            recording.journal.rows.append([seen.fact, at, counter.step, seen.fact.seconds])
            recording.root = root
            if grad:
                known.state = seen.state
                if not is_plain or first.requires_grad:
                    args, kwargs = without_graph(args), without_graph(kwargs)
                recording.arguments = args, kwargs
                if recording.kept == root:
                    self._samplers.last_inputs[root] = module, args, kwargs
                else:
                    self._samplers.keep(root, module)
            return True
        except BaseException as error:  # noqa: BLE001 - the user's run goes on; Ctrl-C is raised again
            recording.gave_up(error)
            return False

    def _begin(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Forward | None:
        numbering, known = self._recording.numbering, self._recording.known
        number = numbering.root_of(module)
        is_part = number is None and (number := numbering.part_of(module)) is not None and not numbering.is_root(module)
        if number is None:
            if not _has_parameters(module) or any(is_lazy(one) or stands_in(one) for one in module.parameters()):
                return None  # a lazy module is known from its second call on, a skeleton of torch.func never
            number = numbering.root(module)
            self._modes.clear()
            self._known.clear()
            self._recording.known.forget()
        self.follow(module)
        model = self.last = numbering.models[number]
        if model.in_evaluation and torch.is_grad_enabled():
            numbering.look_at_modes(model)
        trained = evaluated = 0
        evaluating: list[str] = []
        for name, one in self._moded(model, module, is_part=is_part):
            if one.training:
                trained += 1
            else:
                evaluated += 1
                if evaluated <= _MOST_NAMES:
                    evaluating.append(name)
        fact = Forward(
            root=number, training=module.training, grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(), evaluating=tuple(evaluating), trained=trained,
            evaluated=evaluated, rows=rows_of(args, kwargs), module=self._name(model, module, is_part=is_part),
            **self._recording.place(),
        )  # fmt: skip
        at = self._recording.emit(fact)
        if is_part:  # the next one is another object
            known.key = None
            self._passed(fact)
            self._samplers.before_forward(module, number, at, args, kwargs)
            return fact
        self._passed(fact)
        self._known[id(module)] = weakref.ref(module), number, [one for _, one in self._moded(model, module)]
        self._samplers.before_forward(module, number, at, args, kwargs)
        return fact

    def _passed(self, fact: Forward) -> None:
        """Others come after it, but not after calls without gradient, of which there may be hundreds."""
        known = self._recording.known
        state, key = known.state, known.take_key()
        known.passed(fact, fact.root, fact.training, fact.module, key=key)
        known.state = known.state if fact.grad else state

    def _end(self, module: torch.nn.Module, fact: Forward, seconds: float) -> None:
        object.__setattr__(fact, "seconds", seconds)
        self._samplers.after_forward(module, fact.root)

    def _look_at(self, module: torch.nn.Module) -> None:
        """Adopts a module that runs inside of a root which does not hold it."""
        self._seen.add(id(module))
        model = self.last
        if model is None or id(module) in model.names or self._recording.numbering.root_of(module) is not None:
            return
        if _has_parameters(module):
            self._recording.numbering.adopt(model, module, type(module).__name__)
            self._modes.clear()
            self._known.clear()
            self._recording.known.forget()

    @staticmethod
    def _name(model: Model, module: torch.nn.Module, *, is_part: bool) -> str:
        """What a module is called in its root; a part that was made for one call has the name of its first module."""
        if not is_part:
            return model.names.get(id(module), "")
        return next((name for one in module.modules() if (name := model.names.get(id(one), ""))), "")

    def _moded(self, model: Model, called: torch.nn.Module, *, is_part: bool = False) -> list[tuple[str, Any]]:
        if is_part:
            return [(model.names.get(id(one), ""), one) for one in called.modules() if _has_modes(one)]
        found = self._modes.get(id(called))
        if found is None:
            front = model.names.get(id(called), "")
            found = [
                (name, module)
                for name, module, _ in model.modules()
                if (not front or name == front or name.startswith(f"{front}.")) and _has_modes(module)
            ]
            self._modes[id(called)] = found
        return found


hidden(ForwardHooks._within)  # so that warnings name the caller's line


def _has_modes(module: torch.nn.Module) -> bool:
    kind = kind_of(module)
    if kind == "dropout":
        return getattr(module, "p", 0.0) > 0
    return kind == "batch_norm" and getattr(module, "running_mean", None) is not None


def _has_parameters(module: torch.nn.Module) -> bool:
    if next(module.parameters(), None) is not None:
        return True
    return any(True for _ in parameters_in(module)) or any(
        True for one in module.modules() for _ in parameters_in(one)
    )  # fmt: skip
