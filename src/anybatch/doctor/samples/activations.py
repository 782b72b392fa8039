"""Looks at the outputs of the modules in one forward: how large, how many zeros, which units never answer."""

import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from anybatch.doctor.interruptions import is_interruption
from anybatch.doctor.samples.activationtables import Figures, Taken, Units, take
from anybatch.doctor.samples.masks import PaddingLook
from anybatch.doctor.values import tensors_in
from anybatch.records.samples import Activations, ModuleSample
from anybatch.tensors.dispatch import unseen
from anybatch.tensors.graph import is_recomputing

if TYPE_CHECKING:
    from anybatch.doctor.recording.numbering import Numbering
    from anybatch.doctor.samples.draws import Draws

_MOST = 2000  # outputs of one forward
_MOST_CALLS = 64  # of a module without parameters, such as an activation that is used all over
_MOST_CALLS_WITH_PARAMETERS = 4
_MOST_MODULES = 64  # that are looked at; evenly chosen ones in larger models
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CONTAINERS = (torch.nn.ParameterList, torch.nn.ParameterDict)
_LIMITS = {"Sigmoid": "sigmoid", "Tanh": "tanh", "Softmax": "softmax", "Softmax2d": "softmax"}
_CHANNELS_FIRST = (
    torch.nn.modules.conv._ConvNd,
    torch.nn.modules.batchnorm._BatchNorm,
    torch.nn.modules.pooling._MaxPoolNd,
    torch.nn.modules.pooling._AvgPoolNd,
    torch.nn.GroupNorm,
)


@dataclass(slots=True)
class _Seen:
    """One output of one module, and what went into it."""

    name: str
    call: int
    cls: str
    training: bool
    shape: tuple[int, ...]
    dtype: str
    output: Taken
    input_shape: tuple[int, ...] = ()
    input: Taken | None = None
    input_by: str = ""


class ActivationSampler:
    """Looks at forwards of one root, one at a time.

    Of a model of more than 64 modules it looks at 64 evenly chosen ones, the first and the last among them, and of an
    output of more than 65536 entries at evenly spaced ones.
    """

    def __init__(self, numbering: "Numbering", root_module: torch.nn.Module, draws: "Draws | None" = None) -> None:
        self._draws = draws
        self._numbering, self._root = numbering, weakref.ref(root_module)
        self._called: set[int] = set()
        self._units = Units()
        self._names: dict[int, str] = {}
        self._key: list[int] = []
        self._hooked: list[weakref.ref[torch.nn.Module]] = []
        self._chosen: frozenset[int] = frozenset()
        self._owning: list[tuple[str, int]] = []  # names and ids of modules with parameters of their own
        self._seen: list[_Seen] = []
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # what modules gave, and along which dim
        self._calls: dict[int, int] = {}
        self._thread = 0
        self._padding = PaddingLook()
        self.first = ""  # the class of the leaf module that was called first in the last forward
        self.seconds = 0.0  # that its hooks took
        # the first error of a hook of its own, after which nothing is looked at
        self.failed: BaseException | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hangs hooks on the modules for one forward; compiled modules are left alone."""
        root, handles = self._root(), []
        padding: AbstractContextManager[None] = nullcontext()
        self._seen, self._made, self._calls, self.first = [], {}, {}, ""
        self._thread = threading.get_ident()
        if root is not None and self._surveyed(root):
            padding = self._padding.attached(root)
            for reference in self._hooked:
                module = reference()
                if module is None or isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                    continue
                given = self._draws is not None and id(module) in self._draws.receivers
                if given or id(module) in self._chosen or id(module) not in self._called:
                    handles.append(module.register_forward_hook(self._after))
        try:
            with padding:
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._made = {}

    def result(self, forward: int = -1) -> Activations | None:
        """What was seen in the forward that has just run; ``None`` if nothing was."""
        root = self._root()
        seen, self._seen = self._seen, []
        if not seen or root is None:
            return None
        number = self._numbering.root_of(root)
        uncalled = tuple([name for name, module in self._owning if module not in self._called])
        seen = list({(one.name, one.call): one for one in seen}.values())  # a wrapper has the name of what it wraps
        taken = {(one.name, one.call, "output"): one.output for one in seen}
        taken |= {(one.name, one.call, "input"): one.input for one in seen if one.input is not None}
        try:
            with torch.no_grad():
                figures = self._units.read(taken)
        except RuntimeError:  # of tensors of a transform such as vmap, which has ended
            return None
        found = {id(part): figures[key] for key, part in taken.items()}
        return Activations(
            root=-1 if number is None else number, forward=forward, uncalled=uncalled, hidden=self._padding.result,
            modules=tuple([_sample(order, one, found) for order, one in enumerate(seen)]),
        )  # fmt: skip

    def _named(self, root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
        """Modules of the root, those in plain lists included."""
        number = self._numbering.root_of(root)
        known = [] if number is None else list(self._numbering.models[number].modules())
        seen = set()
        for name, module, _ in known:
            seen.add(id(module))
            yield name, module
        for name, module in root.named_modules():
            if id(module) not in seen:
                yield name, module

    def _surveyed(self, root: torch.nn.Module) -> bool:
        """Finds what is looked at, once for as long as the modules stay the same; not in what is compiled."""
        inside = list(root.modules())
        if _compiled(inside):
            return False
        number = self._numbering.root_of(root)
        key = [id(module) for module in inside]
        key.append(-1 if number is None else len(self._numbering.models[number].held))
        if key == self._key:
            return True
        self._key, self._names = key, self._all_names(root)
        found = self._modules(root)
        inner = [one for one in found if one is not root]
        most, last = min(_MOST_MODULES, len(inner)), len(inner) - 1
        chosen = {id(inner[place * last // max(1, most - 1)]) for place in range(most)} | {id(root)}
        self._chosen = frozenset(chosen)
        owning = [
            (name, module)
            for name, module in self._named(root)
            if not isinstance(module, _CONTAINERS) and next(module.parameters(recurse=False), None) is not None
        ]
        self._owning = [(name, id(module)) for name, module in owning]
        owners = {id(module) for _, module in owning}
        self._hooked = [weakref.ref(one) for one in found if id(one) in chosen or id(one) in owners]
        return True

    def _all_names(self, root: torch.nn.Module) -> dict[int, str]:
        names = {id(root): ""}
        for name, module in self._named(root):
            names.setdefault(id(module), name)
        return names

    def _modules(self, root: torch.nn.Module) -> list[torch.nn.Module]:
        """Leaves, the root, and whatever has parameters of its own."""
        found, scripted = {id(root): root}, list[str]()
        for name, module in self._named(root):
            if any(name.startswith(outer) for outer in scripted):
                continue
            if isinstance(module, torch.jit.ScriptModule):
                scripted.append(f"{name}.")
                continue
            if not module._modules or module._parameters:
                found[id(module)] = module
        return list(found.values())

    @unseen
    def _after(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if threading.get_ident() != self._thread or self.failed is not None or is_recomputing():
            return
        if torch.compiler.is_compiling():
            return
        before = time.perf_counter()
        try:
            self._look(module, args, result)
        except (RuntimeError, NotImplementedError):  # of a transform such as vmap
            pass
        except BaseException as error:  # a fault must not reach the forward
            if is_interruption(error):
                raise
            self.failed = error
        self.seconds += time.perf_counter() - before

    def _look(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        self._called.add(id(module))
        root = self._root()
        if self._draws is not None and root is not None and module is not root:
            number = self._numbering.root_of(root)
            self._draws.given(module, self._names[id(module)], -1 if number is None else number, args)
        if (module._modules and root is not module) or len(self._seen) >= _MOST:
            return
        if id(module) not in self._chosen:
            self.first = self.first or type(module).__name__
            return
        call = self._calls.get(id(module), 0)
        self._calls[id(module)] = call + 1
        if call >= (_MOST_CALLS_WITH_PARAMETERS if module._parameters else _MOST_CALLS):
            return
        self.first = self.first or type(module).__name__
        output = _first(result)
        if output is not None:
            self._take(module, call, output, _first(args))

    def _take(self, module: torch.nn.Module, call: int, output: torch.Tensor, given: torch.Tensor | None) -> None:
        made = self._made.get(id(given)) if given is not None else None
        is_modules = made is not None and made[0]() is given
        axis = _axis(module, output, made[1] if made is not None and is_modules else -1)
        cls = type(module).__name__
        seen = _Seen(
            self._names[id(module)], call, cls, module.training, tuple(output.shape),
            str(output.dtype).removeprefix("torch."), take(output, axis, _LIMITS.get(cls, "")),
        )  # fmt: skip
        if given is not None:
            seen.input_shape = tuple(given.shape)
            node = given.grad_fn
            if not is_modules and node is not None and given.is_floating_point():
                seen.input_by = node.name()
                seen.input = take(given, _axis(module, given, -1), "")
        self._seen.append(seen)
        self._made[id(output)] = weakref.ref(output), axis


def _sample(order: int, one: _Seen, figures: Mapping[int, Figures]) -> ModuleSample:
    row = figures[id(one.output)]
    of_input = None if one.input is None else figures[id(one.input)]
    return ModuleSample(
        module=one.name, cls=one.cls, order=order, shape=one.shape, input_shape=one.input_shape, dtype=one.dtype,
        mean=row.mean, std=row.std, absmax=row.absmax, zeros=row.zeros, dead=row.dead, always_dead=row.always_dead,
        saturated=row.saturated, spread=row.spread,
        training=one.training,
        input_by=one.input_by,
        input_dead=None if of_input is None else of_input.dead,
        input_always_dead=None if of_input is None else of_input.always_dead,
        percentiles=tuple(float(f"{value:.4g}") for value in row.percentiles),
    )  # fmt: skip


def _first(values: Any) -> torch.Tensor | None:
    """The first tensor of real numbers, or ``None`` if there is none that can be read."""
    for tensor in tensors_in(values) if not isinstance(values, torch.Tensor) else (values,):
        if type(tensor) in _PLAIN and not tensor.is_meta and tensor.numel() and tensor.layout is torch.strided:
            return tensor if not tensor.is_complex() else None
    return None


def _axis(module: torch.nn.Module, tensor: torch.Tensor, inherited: int) -> int:
    """Along which dim the units are: 1 for maps, the last one otherwise, which -1 stands for."""
    if tensor.dim() > 3:
        return 1
    if tensor.dim() == 3 and (inherited == 1 or isinstance(module, _CHANNELS_FIRST)):
        return 1
    return -1


def _compiled(modules: list[torch.nn.Module]) -> bool:
    """Whether hooks would have something compiled again."""
    return any(
        module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule" for module in modules
    )
