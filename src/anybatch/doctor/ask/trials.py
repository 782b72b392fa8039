"""A copy of a model that questions can be put to: the user's model, gradients and random state stay as they are."""

import copy
import io
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from anybatch.accelerators import in_use
from anybatch.batch.trees import flat, map_leaves
from anybatch.doctor.ask.tape import as_it_is, is_freed
from anybatch.doctor.paths import Preserved
from anybatch.doctor.samples.losscalls import LOSSES
from anybatch.doctor.sites import Running
from anybatch.interception import unobserved
from anybatch.records.lossfacts import Probed
from anybatch.tensors.dispatch import Mode, without_user_modes
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.sideeffects import SideEffects
from anybatch.torch_private import has_hooks_on_saved_tensors
from anybatch.userlines import whose_file

MOST_BYTES = 2 * 2**30
"""Of what a model that is still copied holds."""
_MOST_KEPT = 256 * 2**20
_MOST_OPERATIONS = 5000
_ROWS = (5, 7, 3, 4, 6)
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError, ArithmeticError,
            NotImplementedError, OSError)  # fmt: skip
"""What a model that is asked something unusual may raise."""


class Unknown(Exception):
    """Why a question could not be answered."""


class Line(NamedTuple):
    """A line of the user's, or a module without one."""

    file: str = ""
    line: int = 0
    module: str = ""


def told(
    probe: str, place: Any = None, /, *, root: int = -1, answer: str = "yes", detail: str = "", **seen: Any
) -> Probed:
    """An answer, at the line of the operation that it is about; what else is given is its evidence."""
    where = {name: getattr(place, name) for name in ("module", "file", "line") if hasattr(place, name)}
    return Probed(probe=probe, root=root, answer=answer, detail=detail, evidence=seen, **where)


class Operation(NamedTuple):
    """An operation of a forward."""

    name: str  # of the function
    module: str  # the innermost module that ran
    file: str  # of the user's line
    line: int
    results: tuple[torch.Tensor, ...]  # copies of what it gave


class Operations(TorchFunctionMode):
    """Keeps what each operation gave, up to a limit."""

    def __init__(self, running: Running) -> None:
        super().__init__()
        self._running, self._bytes = running, 0
        self.seen: list[Operation] = []
        self.cut_short = False  # whether the limit was reached

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__") or self.cut_short:
            return result
        results = tuple(one.detach() for one in tensors(result))
        if results:
            self._bytes += sum(one.nelement() * one.element_size() for one in results)
            self.cut_short = self._bytes > _MOST_KEPT or len(self.seen) >= _MOST_OPERATIONS
            kept = tuple(one.clone() for one in results)
            self.seen.append(Operation(name, self._running.name, *_line(), kept))
        return result


class _Scores(TorchFunctionMode):
    """Keeps what the losses of a model compare, which stands for what it gives where that is a loss.

    Of each call it is the side that parameters make, as where a distance is given the target first: those have to be
    found with gradients on, and without a list of them they are.
    """

    def __init__(self, sides: Sequence[int] | None = None) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.sides: list[int] = [*(sides or ())]
        self._finds = sides is None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        both = (*args[:2], *(kwargs[one] for one in ("input", "target") if one in kwargs))[:2]
        of_tensors = bool(both) and all(isinstance(one, torch.Tensor) for one in both)
        if getattr(func, "__name__", "") in LOSSES and of_tensors and both[0].dim():
            if self._finds:
                is_turned = len(both) == 2 and both[1].requires_grad and not both[0].requires_grad
                self.sides.append(int(is_turned))
            place = len(self.seen)
            self.seen.append(both[self.sides[place] if place < len(self.sides) else 0])
        return func(*args, **kwargs)


@dataclass(slots=True)
class Inputs:
    """What a model is given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int  # how many samples it has: the size of dim 0 of its first tensor, or of dim 1 where the time comes first
    dim: int = 0  # of the samples

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> "Inputs":
        """Copies tensors out of the graph."""
        args, kwargs = mapped((tuple(args), dict(kwargs)), lambda one: one.detach())
        first = next((one for one in tensors((args, kwargs)) if one.dim()), None)
        return cls(args, kwargs, -1 if first is None else first.shape[0])

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Inputs":
        """The same with other tensors."""
        args, kwargs = mapped((self.args, self.kwargs), change)
        first = next((one for one in tensors((args, kwargs)) if one.dim() > self.dim), None)
        return Inputs(args, kwargs, -1 if first is None else first.shape[self.dim], self.dim)

    def along(self, dim: int) -> "Inputs":
        """The same with the samples along another dim."""
        return Inputs(self.args, self.kwargs, self.rows, dim).changed(lambda one: one)

    def has_rows(self, one: torch.Tensor) -> bool:
        """Whether a tensor has a place for each sample."""
        return one.dim() > self.dim and one.shape[self.dim] == self.rows

    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in order."""
        return tensors((self.args, self.kwargs))

    def by_rows(self) -> list[torch.Tensor]:
        """Those that have a row for each sample."""
        return [one for one in self.tensors() if self.has_rows(one)]


class Trial:
    """A copy of a model with its last input; no question is asked after ``until``, by ``time.perf_counter``."""

    def __init__(self, module: Any, args: Any, kwargs: Any, until: float) -> None:
        self.until = until
        inner = unwrapped(module)
        parameters = list(inner.parameters())
        if any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in parameters):
            raise Unknown("the model has parameters without a shape")
        held = {id(one): one for each in inner.modules() for one in flat(list(vars(each).values()))}
        size = sum(int(getattr(one, "nbytes", 0)) for one in held.values() if not isinstance(one, torch.nn.Module))
        if size > MOST_BYTES:
            raise Unknown(f"the model holds {size} bytes; larger ones are not copied")
        if any(map(is_freed, parameters)):
            raise Unknown("the memory of a parameter was freed")
        try:
            self.module: torch.nn.Module = copy.deepcopy(inner)
        except (*FAILURES, RecursionError) as error:
            raise Unknown(f"the model can't be copied: {type(error).__name__}: {error}"[:300]) from None
        self.inputs = Inputs.of(args, kwargs)
        self.module.eval()
        named = dict(self.module.named_modules())
        self.running = Running(named)
        self._modules = list(named.values())
        self._parameters = list({id(p): p for p in self.module.parameters()}.values())
        self._random = RandomState({p.device for p in self._parameters})
        self.gives_loss = False
        self._sides: list[int] = []

    def forward(self, inputs: Inputs, *, grad: bool = False, watch: Any = None, again: bool = False) -> Any:
        """What the copy gives, or its scores where that is a loss; buffers and attributes are as before afterwards."""
        if time.perf_counter() > self.until:
            raise Unknown("there was no time left")
        given = inputs.changed(lambda one: one) if grad else inputs.changed(lambda one: one.clone())
        if not again:
            self._random.restore()
        try:
            with Preserved(self._modules, self._parameters).during(), torch.set_grad_enabled(grad):
                result = self._run(given, watch)
        except (*FAILURES, SystemExit) as error:
            raise Unknown(f"the model did not run: {type(error).__name__}: {error}"[:300]) from None
        return result

    def _run(self, given: Inputs, watch: Any) -> Any:
        with ExitStack() as stack:
            scores = stack.enter_context(_Scores(self._sides)) if self.gives_loss else None
            if watch is not None:
                stack.enter_context(self.running.attached())
                stack.enter_context(watch)
            result = self.module(*given.args, **given.kwargs)
        if scores is not None and scores.seen:
            return scores.seen
        if not self.gives_loss and (made := tensors(result)) and not any(one.dim() for one in made):
            self.gives_loss = True
            self._random.restore()
            with torch.enable_grad(), _Scores() as found:
                self.module(*given.args, **given.kwargs)
            self._sides = found.sides
            self._random.restore()
            return self._run(given, None)
        return result

    def advance(self) -> None:
        """Goes on to other random numbers for what is drawn next."""
        torch.rand(17)

    def operations(self, inputs: Inputs, *, again: bool = False) -> tuple[Any, Operations]:
        """What the copy gives, and what each of its operations gave."""
        watch = Operations(self.running)
        return self.forward(inputs, watch=watch, again=again), watch

    def hooked(
        self, inputs: Inputs, kinds: tuple[type[torch.nn.Module], ...], see: Callable[[str, Any, Any, Any], None]
    ) -> None:
        """Runs the copy, and shows each module of some kinds, with its name, what it was given and what it gave."""

        def shown(name: str) -> Callable[..., None]:
            return lambda module, args, kwargs, made: see(name, module, (args, kwargs), made)

        named = [(name, one) for name, one in self.module.named_modules() if isinstance(one, kinds)]
        handles = [one.register_forward_hook(shown(name), with_kwargs=True) for name, one in named]
        try:
            self.forward(inputs)
        finally:
            for handle in handles:
                handle.remove()

    def within(self, most: int) -> Inputs:
        """The inputs with so many rows that they have no more bytes, or as they are where that does not run."""
        rows = self.inputs.rows * most // max(1, sum(one.nbytes for one in self.inputs.by_rows()))
        if not max(_ROWS) < rows < self.inputs.rows:
            return self.inputs
        return self._first(self.inputs, rows)[0]

    def few_rows(self, dim: int = 0) -> Inputs:
        """The inputs with a few rows of a number that no dim of them has, or as they are where that does not run."""
        inputs = self.inputs.along(dim) if dim else self.inputs
        sizes = {size for one in inputs.tensors() for dim, size in enumerate(one.shape) if dim != inputs.dim}
        rows = next((one for one in _ROWS if one < inputs.rows and one not in sizes), None)
        few, outputs = (inputs, None) if rows is None else self._first(inputs, rows)
        return few if any(one.dim() for one in tensors(outputs)) else inputs

    def _first(self, inputs: Inputs, rows: int) -> tuple[Inputs, Any]:
        """The first rows, and what they give; the inputs as they are where that does not run."""
        few = inputs.changed(lambda one: one.narrow(inputs.dim, 0, rows) if inputs.has_rows(one) else one)
        try:
            return few, self.forward(few)
        except Unknown:
            return inputs, None


class _Muted:
    """Stands for a stream: what this thread prints is lost, and what other threads print is not."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream or io.StringIO(), threading.get_ident()

    def write(self, text: str) -> int:
        """Passes on what other threads print."""
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Alone(Mode):
    """Lets no operation wait for other processes, which may be asked something else, or nothing any more."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("the model waits for other processes")
        return func(*args, **(kwargs or {}))


@contextmanager
def undisturbed(reached: Iterable[Any] = ()) -> Iterator[None]:
    """A block like the end of a script, that leaves the process as it was.

    Modes, hooks and observers of the user's are off in it, and what is printed is not shown. Random state, filters of
    warnings, and the values in Python that some objects reach are put back at its end.
    """
    random, effects = RandomState(in_use()), SideEffects(reached)
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            stdout, stderr = (cast("Any", _Muted(one)) for one in (sys.stdout, sys.stderr))
            stack.enter_context(redirect_stdout(stdout))
            stack.enter_context(redirect_stderr(stderr))
            stack.enter_context(unobserved())
            stack.enter_context(without_user_modes())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(True))
            if has_hooks_on_saved_tensors():  # only the last ones run
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is))
            for kind in {"cpu", *(device.type for device in in_use())}:
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                stack.enter_context(_Alone())  # type: ignore[no-untyped-call]
            warnings.simplefilter("ignore")  # they are not of the user's run; and where they are errors, they'd end it
            yield
    finally:
        random.restore()
        effects.restore()


def _line() -> tuple[str, int]:
    """The innermost line of the user's within the model that is asked; none where only torch's own layers run."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not Trial.forward.__code__:
        if whose_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def tensors(node: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in order."""
    return [one for one in flat(node) if isinstance(one, torch.Tensor)]


def mapped(node: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same containers with other tensors."""
    return map_leaves(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, node)


def unwrapped(module: Any) -> torch.nn.Module:
    """The user's own model within a wrapper."""
    if not isinstance(module, torch.nn.Module):
        raise Unknown("the model is gone")
    name = type(module).__name__
    if name in ("DistributedDataParallel", "DataParallel"):
        return unwrapped(module.module)
    if name == "OptimizedModule":
        return unwrapped(module._orig_mod)
    if "FSDP" in name or "FullyShardedDataParallel" in name:
        raise Unknown("the model is spread over processes")
    return module
