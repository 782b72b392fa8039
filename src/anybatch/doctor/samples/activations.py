"""Looks at the outputs of the modules in one forward: how large, how many zeros, units that never answer."""

import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from anybatch.doctor.frames import is_interruption
from anybatch.doctor.values import tensors_in
from anybatch.records.samples import PERCENTILES, Activations, ModuleSample
from anybatch.tensors.dispatch import unseen
from anybatch.tensors.graph import is_recomputing

if TYPE_CHECKING:
    from anybatch.doctor.recording.numbering import Model
    from anybatch.doctor.samples.draws import Draws

_NEAR = 1e-3
_LEAST_SAMPLES = 3
_ROWS, _COLUMNS = 16, 32  # of the sample of an output
_READ = 1 << 16  # entries of an output among which the largest and smallest are looked for
_ORDERED = 128  # entries of a sample whose percentiles are taken


@dataclass(slots=True, eq=False)
class Taken:
    """What was taken of one tensor."""

    sample: torch.Tensor  # some of its entries, samples of the batch times others, copied
    absmax: torch.Tensor  # of all entries
    live: torch.Tensor  # which of its units are not zero for the whole batch
    limit: str = ""  # ``"sigmoid"``, ``"tanh"`` or ``"softmax"`` where entries have limits
    classes: int = 0  # how many entries a row of a softmax has
    several: bool = True  # whether the batch has several rows


def take(tensor: torch.Tensor, axis: int, limit: str) -> Taken:
    """Looks at what a module gave."""
    values = tensor.detach()
    if not values.is_floating_point():
        values = values.float()
    if values.dim() < 2:
        values = values.reshape(-1, 1)
    rows, classes = values.shape[0], values.shape[axis] if limit else 0
    some = values[:: -(-rows // _ROWS)]
    some = some.reshape(some.shape[0], -1)
    some = some[:, :: -(-some.shape[1] // _COLUMNS)].to(torch.float64, copy=True)  # so that a spread of 1e-9 is seen
    if values.numel() > _READ:
        values = _fewer(values, axis % values.dim())
    others = [dim for dim in range(values.dim()) if dim != axis % values.dim()]
    largest = values.abs().amax(others)  # of each unit
    return Taken(some, largest.amax().double(), largest != 0, limit, classes, rows > 1)


def _figures_of(samples: torch.Tensor) -> torch.Tensor:
    """Percentiles, mean, deviation, spread over the batch, zeros, and the shares near one and near zero of each."""
    flat = samples.flatten(1)
    size, mean = flat.abs(), flat.mean(1, keepdim=True)
    ordered = flat[:, :: -(-flat.shape[1] // _ORDERED)].sort(1).values
    places = [round((ordered.shape[1] - 1) * percent / 100) for percent in PERCENTILES]
    percentiles = torch.stack([ordered[:, place] for place in places], 1)  # a list of places would be waited for
    deviation = (flat - mean).square_().mean(1).sqrt_()
    apart = (samples - samples.mean(1, keepdim=True)).square_().mean(1).sqrt_()
    differ = apart > 0  # not where a mask puts -inf or -1e9 for the whole batch
    spread = apart.where(differ, 0).sum(1) / samples.abs().mean(1).where(differ, 0).sum(1)
    spread = spread.nan_to_num(0.0).where(apart.isfinite().any(1), nan)
    shares = [one.double().mean(1) for one in (flat == 0, size > 1 - _NEAR, size < _NEAR)]
    return torch.cat([percentiles, mean, torch.stack([deviation, spread, *shares], 1)], 1)


def _fewer(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Evenly spaced entries of each unit, thinned along positions before samples of the batch."""
    steps, left = [1] * values.dim(), values.numel()
    while left > _READ:
        lengths = {dim: values.shape[dim] // steps[dim] // (4 if dim == 0 else 1) for dim in range(len(steps))}
        longest = max((dim for dim in lengths if dim != axis), key=lengths.__getitem__)
        if values.shape[longest] < 2 * steps[longest]:
            break
        steps[longest] *= 2
        left //= 2
    return values[tuple([slice(None, None, step) for step in steps])]


@dataclass(slots=True)
class Units:
    """Reads samples, and remembers over them which units have ever given something other than zero."""

    _live: dict[Any, torch.Tensor] = field(default_factory=dict)
    _counts: dict[Any, int] = field(default_factory=dict)

    def read(self, taken: Mapping[Any, Taken]) -> dict[Any, dict[str, Any]]:
        """Adds a sample of tensors, by keys that are the same in each sample; gives entries of a ``ModuleSample``."""
        found, alike = dict[Any, dict[str, Any]](), dict[Any, list[Any]]()
        for key, one in taken.items():
            alike.setdefault((one.sample.device, one.sample.shape), []).append(key)
            known = self._live.get(key)
            is_same = known is not None and known.shape == one.live.shape and known.device == one.live.device
            self._live[key] = one.live | known if is_same and known is not None else one.live
            self._counts[key] = self._counts.get(key, 0) + 1
        rows = dict[torch.device, list[torch.Tensor]]()
        for (device, _), keys in alike.items():
            of_all = torch.stack([taken[key].absmax for key in keys])
            units = [one.sum(dtype=torch.float64) for key in keys for one in (taken[key].live, self._live[key])]
            figures = _figures_of(torch.stack([taken[key].sample for key in keys]))
            rows.setdefault(device, []).append(torch.cat([figures, of_all[:, None], torch.stack(units).view(-1, 2)], 1))
        read = {device: iter(torch.cat(parts).tolist()) for device, parts in rows.items()}  # one wait for each device
        for (device, _), keys in alike.items():
            found |= {key: self._figures(key, taken[key], next(read[device])) for key in keys}
        return found

    def _figures(self, key: Any, one: Taken, row: list[float]) -> dict[str, Any]:
        mean, std, spread, zeros, near_one, near_zero, absmax, alive, ever = row[len(PERCENTILES) :]
        saturated = near_one + (near_zero if one.limit == "sigmoid" else 0.0) if one.limit else None
        if one.limit == "softmax":
            saturated = min(1.0, near_one * one.classes)
        units = len(one.live)
        return {
            "percentiles": tuple(float(f"{value:.4g}") for value in row[: len(PERCENTILES)]),
            "mean": mean, "std": std, "zeros": zeros, "saturated": saturated, "absmax": absmax,
            "spread": spread if one.several and spread == spread else None,
            "dead": (units - alive) / units,
            "always_dead": 1.0 - ever / units if self._counts[key] >= _LEAST_SAMPLES else 0.0,
        }  # fmt: skip


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


class _Seen(NamedTuple):
    """One output of one module, and what went into it."""

    key: tuple[str, int]  # the name of the module, and the number of its call
    facts: dict[str, Any]  # entries of a ``ModuleSample``
    output: Taken
    input: Taken | None


class ActivationSampler:
    """Looks at forwards of one root, one at a time.

    Of a model of more than 64 modules it looks at 64 evenly chosen ones, the first and the last among them, and of an
    output of more than 65536 entries at evenly spaced ones.
    """

    def __init__(self, model: "Model", draws: "Draws | None" = None) -> None:
        self._model, self._draws = model, draws
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
        self.first = ""  # the class of the leaf module that was called first in the last forward
        self.seconds = 0.0  # that its hooks took
        # the first error of a hook of its own, after which nothing is looked at
        self.failed: BaseException | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hangs hooks on the modules for one forward; compiled modules are left alone."""
        root = self._model.module()
        self._seen, self._made, self._calls, self.first = [], {}, {}, ""
        self._thread = threading.get_ident()
        with ExitStack() as undo:
            if root is not None and self._surveyed(root):
                for module in (reference() for reference in self._hooked):
                    if module is None or isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                        continue
                    given = self._draws is not None and id(module) in self._draws.receivers
                    if given or id(module) in self._chosen or id(module) not in self._called:
                        undo.callback(module.register_forward_hook(self._after).remove)
            undo.callback(self._made.clear)
            yield

    def result(self, forward: int = -1) -> Activations | None:
        """What was seen in the forward that has just run; ``None`` if nothing was."""
        seen, self._seen = self._seen, []
        if not seen or self._model.module() is None:
            return None
        uncalled = tuple([name for name, module in self._owning if module not in self._called])
        seen = list({one.key: one for one in seen}.values())  # a wrapper has the name of what it wraps
        taken = {(one.key, "output"): one.output for one in seen}
        taken |= {(one.key, "input"): one.input for one in seen if one.input is not None}
        try:
            with torch.no_grad():
                found = self._units.read(taken)
        except RuntimeError:  # of tensors of a transform such as vmap, which has ended
            return None
        modules = []
        for order, one in enumerate(seen):
            given = {f"input_{name}": found[one.key, "input"][name] for name in ("dead", "always_dead") if one.input}
            modules.append(ModuleSample(order=order, **one.facts, **found[one.key, "output"], **given))
        return Activations(root=self._model.number, forward=forward, uncalled=uncalled, modules=tuple(modules))

    def _named(self, root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
        """Modules of the root, those in plain lists included."""
        known = {id(module): (name, module) for name, module, _ in self._model.modules()}
        yield from known.values()
        yield from ((name, module) for name, module in root.named_modules() if id(module) not in known)

    def _surveyed(self, root: torch.nn.Module) -> bool:
        """Finds what is looked at, once for as long as the modules stay the same; not in what is compiled."""
        inside = list(root.modules())
        # whether hooks would have something compiled again
        if any(
            module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule" for module in inside
        ):
            return False
        key = [*map(id, inside), len(self._model.held)]
        if key == self._key:
            return True
        self._key = key  # of several names of a module the first one counts
        self._names = {id(module): name for name, module in reversed(list(self._named(root)))} | {id(root): ""}
        found = self._modules(root)
        inner = [one for one in found if one is not root]
        most, last = min(_MOST_MODULES, len(inner)), len(inner) - 1
        chosen = {id(inner[place * last // max(1, most - 1)]) for place in range(most)} | {id(root)}
        self._chosen = frozenset(chosen)
        owning = [
            (name, module)
            for name, module in self._named(root)
            if not isinstance(module, _CONTAINERS) and any(one is not None for one in module._parameters.values())
        ]
        self._owning = [(name, id(module)) for name, module in owning]
        owners = {id(module) for _, module in owning}
        self._hooked = [weakref.ref(one) for one in found if id(one) in chosen or id(one) in owners]
        return True

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
        root = self._model.module()
        if self._draws is not None and root is not None and module is not root:
            self._draws.given(module, self._names[id(module)], self._model.number, args)
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
        cls, name, entered = type(module).__name__, self._names[id(module)], None
        facts: dict[str, Any] = {
            "module": name, "cls": cls, "training": module.training, "shape": tuple(output.shape),
            "dtype": str(output.dtype).removeprefix("torch."),
        }  # fmt: skip
        if given is not None:
            facts["input_shape"] = tuple(given.shape)
            node = given.grad_fn
            if not is_modules and node is not None and given.is_floating_point():
                facts["input_by"] = node.name()
                entered = take(given, _axis(module, given, -1), "")
        self._seen.append(_Seen((name, call), facts, take(output, axis, _LIMITS.get(cls, "")), entered))
        self._made[id(output)] = weakref.ref(output), axis


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
