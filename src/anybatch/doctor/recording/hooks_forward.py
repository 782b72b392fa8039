"""Sees the user's code call a model."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from threading import get_ident
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from anybatch.doctor.recording.describing import kind_of, parameters_in, rows_of, without_graph
from anybatch.doctor.recording.naming import modules_in_sight
from anybatch.doctor.recording.numbering import Model
from anybatch.doctor.recording.patches import hidden
from anybatch.doctor.recording.recordings import Recording
from anybatch.doctor.recording.samplers import Samplers
from anybatch.records.events import Forward
from anybatch.torch_private import is_jit_tracing, number_of_backward, stands_in

_MOST_NAMES = 20
_MOST_DRAWN = 16  # calls without gradient in training mode, which may be draws for the same input
_training = attrgetter("training")


@dataclass(slots=True)
class _Called:
    """What is known of a module that the user's code calls."""

    module: "weakref.ref[torch.nn.Module]"
    root: int
    name: str
    names: list[str]
    modules: list[Any]
    is_looked_at: bool = False
    drawn: int = 0  # how many calls were looked at that draw and do not train
    rows: bool = True  # whether the rows of its calls with a gradient are looked at


class ForwardHooks:
    """Has calls of modules seen: of all of them while models are looked for, else of known roots and others like them.

    Others are those of the same class, if that is not torch's own: many modules within a model are of these.

    Nothing is hung on the user's modules, so that they can be saved, copied and compiled as without it.
    """

    def __init__(self, recording: Recording, samplers: Samplers) -> None:
        self._recording, self._samplers = recording, samplers
        self.last: Model | None = None
        self._chosen: set[Any] = set()
        self._calls: set[Any] = set()
        self._is_searching = False
        self._choose: Callable[[set[Any] | None], None] = lambda chosen: None
        self._before, self._after = recording.guarded(self._begin), recording.guarded(samplers.after_forward)
        self._adopt = recording.guarded(self._look_at)
        self._modes: dict[int, list[tuple[str, Any]]] = {}
        self._known: dict[int, _Called] = {}
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

    def follow_copies(self) -> None:
        """Has calls seen of modules of torch's own classes that look like a root, such as averages of one."""
        known = [_shapes(module) for called in self._known.values() if (module := called.module()) is not None]
        for module in modules_in_sight():
            if type(module).__module__.startswith("torch.") and _shapes(module) in known:
                self._chosen.add(id(module))

    def _wrapped(self, original: Any) -> Callable[..., Any]:
        """It asks first what a single call tells, since a model may have hundreds of modules."""
        is_traced, flags = torch.compiler.is_dynamo_compiling, vars(torch.compiler)
        recording, chosen, threads = self._recording, self._chosen, self._recording.threads
        before, after, grad_enabled = self._before, self._after, torch.is_grad_enabled

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
            begun = None if number_of_backward() != -1 else before(module, args, kwargs)
            if begun is None:
                threads.inside = was
                return original(module, *args, **kwargs)
            recording.running = module
            try:
                return original(module, *args, **kwargs)
            finally:
                if threads.ident == me:
                    recording.running = recording.innermost = None
                    threads.inside = was and not is_other
                if begun.is_looked_at:
                    after(module, begun.root)

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

    def _begin(self, module: torch.nn.Module, args: Any, kwargs: Any) -> "_Called | None":
        """Notes a call; ``None`` where it is none of a model that trains."""
        recording = self._recording
        called = self._known.get(id(module))
        if called is None or called.module() is not module:
            called = None if _compares(module) else self._number(module)
            if called is None:
                return None
        grad, root = torch.is_grad_enabled(), called.root
        first: Any = args[0] if len(args) == 1 and not kwargs else None
        is_plain = type(first) is torch.Tensor and first.dim() > 0
        rows = first.size(0) if is_plain else rows_of(args, kwargs)
        inference = torch.is_inference_mode_enabled()
        same = root, called.name, module.training, grad, inference, tuple(map(_training, called.modules)), rows
        noted = recording.note(Forward, same, (0.0,), lambda: self._entries(called, same))
        is_new = type(noted) is Forward
        recording.root = root
        if grad:
            is_clean = is_plain and not first.requires_grad
            recording.arguments = (args, kwargs) if is_clean else (without_graph(args), without_graph(kwargs))
            if recording.kept == root:
                self._samplers.last_inputs[root] = (module, *recording.arguments)
            else:
                self._samplers.keep(root, module)
            if called.rows:
                called.rows = self._samplers.with_gradient(module, args, kwargs)
        else:
            self._samplers.without_gradient(module, args, kwargs)
        is_drawn = not grad and module.training and bool(called.names) and called.drawn < _MOST_DRAWN
        called.drawn += is_drawn
        called.is_looked_at = recording.looks or is_new or is_drawn
        if called.is_looked_at:
            at = noted.at if is_new else noted[1]
            self._samplers.before_forward(module, root, at, args, kwargs)
        return called

    def _number(self, module: torch.nn.Module) -> "_Called | None":
        """What is known of a module from its first call on."""
        numbering = self._recording.numbering
        number = numbering.root_of(module)
        is_part = number is None and (number := numbering.part_of(module)) is not None and not numbering.is_root(module)
        if number is None:
            if not _has_parameters(module) or any(is_lazy(one) or stands_in(one) for one in module.parameters()):
                return None  # a lazy module is known from its second call on, a skeleton of torch.func never
            if numbering.is_one_of_many(module):
                return None
            number = numbering.root(module)
            self._modes.clear()
            self._known.clear()
        self.follow(module)
        model = self.last = numbering.models[number]
        name = self._name(model, module, is_part=is_part)
        moded = self._moded(model, module, is_part=is_part)
        called = _Called(weakref.ref(module), number, name, [name for name, _ in moded], [one for _, one in moded])
        if not is_part:  # the next one is another object
            self._known[id(module)] = called
        return called

    def _entries(self, called: "_Called", same: Any) -> dict[str, Any]:
        root, name, training, grad, inference, modes, rows = same
        model = self.last = self._recording.numbering.models[root]
        if model.in_evaluation and grad:
            self._recording.numbering.look_at_modes(model)
        evaluating = [one for one, trains in zip(called.names, modes, strict=True) if not trains]
        return {
            "root": root, "training": training, "grad": grad, "inference": inference,
            "evaluating": tuple(evaluating[:_MOST_NAMES]), "trained": len(modes) - len(evaluating),
            "evaluated": len(evaluating), "rows": rows, "module": name,
        }  # fmt: skip

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


def _shapes(module: torch.nn.Module) -> list[tuple[int, ...]]:
    return [tuple(one.shape) for one in module.parameters()]


def _has_modes(module: torch.nn.Module) -> bool:
    kind = kind_of(module)
    if kind == "dropout":
        return getattr(module, "p", 0.0) > 0
    return kind == "batch_norm" and getattr(module, "running_mean", None) is not None


def _compares(module: torch.nn.Module) -> bool:
    """Whether a module is a loss or a metric, which is given outputs, also where it is a part of the model."""
    is_metric = hasattr(module, "update") and hasattr(module, "compute")
    is_loss = isinstance(module, torch.nn.modules.loss._Loss) or type(module).__name__.endswith("Loss")
    return (is_loss or is_metric) and next(module.parameters(), None) is None


def _has_parameters(module: torch.nn.Module) -> bool:
    modules = list(module.modules())
    return any(each is not None for one in modules for each in one._parameters.values()) or any(
        True for one in modules for _ in parameters_in(one)
    )  # fmt: skip
