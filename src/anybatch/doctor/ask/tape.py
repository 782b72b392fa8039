"""One step of a run as a list of operations, which can be run again with other rows."""

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anybatch.doctor.recording.naming import user_place
from anybatch.doctor.recording.patches import HIDDEN, hidden
from anybatch.doctor.values import tensors_in
from anybatch.tensors.dispatch import unseen
from anybatch.tensors.graph import in_backward
from anybatch.torch_private import function_modes

_MOST_OPERATIONS = 20_000
_MOST_BYTES = 256 * 2**20
RANDOM = frozenset(
    (
        *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "normal", "bernoulli"),
        *("multinomial", "poisson", "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_"),
    )
)
_DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_NUMBERS = frozenset({"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__index__"})
_SIZES = frozenset({"size", "shape", "numel", "__len__", "nelement"})
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_NOT_KEPT = frozenset({"backward", "register_hook", "retain_grad", "is_floating_point", "dim"})


_BETWEEN = ("torch/overrides.py", "torch/nn/functional.py")
_OWN = (HIDDEN, f"{Path(__file__).parents[2]}/")


_KINDS = {
    "true_divide": "div", "__truediv__": "div", "__rsub__": "rsub", "__iadd__": "add_", "__isub__": "sub_",
    **{f"__{one}__": one for one in ("add", "sub", "mul", "pow", "matmul", "abs", "neg", "ne")},
    **{f"__r{one}__": one for one in ("add", "mul")},
}  # fmt: skip


class Slot(int):
    """Stands for a tensor in the arguments of an operation."""


@dataclass(slots=True)
class Operation:
    """An operation of the step."""

    name: str  # of the function
    func: Any
    args: Any  # with slots in place of tensors
    kwargs: Any  # likewise
    outs: tuple[Slot, ...] = ()  # the slots of the tensors that it gave
    grad: bool = True  # whether with a graph
    file: str = ""  # of the user's line
    line: int = 0
    drawn: tuple[torch.Tensor, ...] | None = None  # what it drew, for one that draws random numbers

    @property
    def kind(self) -> str:
        """Its name, that of the function where it is an operator."""
        return _KINDS.get(self.name, self.name)

    @property
    def given(self) -> list[Slot]:
        """The slots of what it was given, in order."""
        return list(slots((self.args, self.kwargs)))

    @property
    def drops(self) -> bool:
        """Whether it is a dropout that is on, which a replay leaves out."""
        if self.name not in _DROPOUTS:
            return False
        given = dict(zip(("input", "p", "training"), self.args, strict=False)) | self.kwargs
        return bool(given.get("training", True)) and float(given.get("p", 0.5)) > 0


@dataclass(slots=True)
class Loss:
    """A tensor whose backward ran."""

    slot: Slot
    before: int  # how many operations had run
    file: str  # of the line of the backward
    line: int


class Tape(TorchFunctionMode):
    """Writes down the operations while it is on; nothing of them is changed.

    Args:
        held: the ``id`` of all parameters and buffers of models.

    Attributes:
        operations: in order.
        leaves: copies of the tensors that came from outside, by their slot.
        parameters: of these, those that models hold.
        opaque: of these, those that something computed that was not seen.
        losses: in order.
        bases: of leaves that are views, with all entries in their order, the shape of what they are views of.
        rows: of the batch; -1 where it is not known.
        numbers: slots whose values became numbers of Python, with how many operations had run when they first did.
        sizes: whether a size was asked for.
        nan: the first operation that gave NaN though it was given none.
        bytes: of the leaves that are no parameters.
        failed: why it is of no use; empty if it is.
    """

    def __init__(self, held: Iterable[int] = ()) -> None:
        super().__init__()
        self.held = set(held)
        self.operations: list[Operation] = []
        self.leaves: dict[Slot, torch.Tensor] = {}
        self.parameters: dict[Slot, torch.Tensor] = {}
        self.opaque: set[Slot] = set()
        self.losses: list[Loss] = []
        self.bases: dict[Slot, tuple[int, ...]] = {}
        self.rows = -1
        self.numbers: dict[Slot, int] = {}
        self.sizes = False
        self.nan: Operation | None = None
        self.failed = ""
        self._slots: dict[int, Slot] = {}
        self._alive: list[torch.Tensor] = []
        self.bytes = 0
        self._off = True
        self._entered = False
        self._process, self._thread = os.getpid(), threading.get_ident()

    def start(self) -> bool:
        """Enters the mode unless one of somebody else is on; whether it is on now."""
        if any(type(mode).__name__ != "DeviceContext" for mode in function_modes()):
            return False
        self._off, self._entered = False, True
        self.__enter__()  # type: ignore[no-untyped-call]
        return True

    def stop(self) -> bool:
        """Writes no more down, lets go of the tensors of the run, and leaves the mode; whether that was possible.

        Within a backward modes are those of its beginning, which are there again after it; and one that was entered
        later may still be on.
        """
        self._off = True
        self._slots.clear()
        self._alive.clear()
        modes = function_modes()
        is_last = bool(modes) and modes[-1] is self and threading.get_ident() == self._thread
        if self._entered and is_last and not in_backward():
            self._entered = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return not self._entered

    def loss(self, loss: torch.Tensor) -> None:
        """Is notified of a backward that is about to run."""
        slot = self._slots.get(id(loss))
        if slot is not None and not self._off:
            self.losses.append(Loss(slot, len(self.operations), *user_place(2)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._off or threading.get_ident() != self._thread or os.getpid() != self._process:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            is_set, name = name == "__set__", getattr(func.__self__, "__name__", "")
            if name not in (("data",) if is_set else _VIEWS) and name not in _SIZES:
                return func(*args, **kwargs)
        if name in _SIZES or name in _NOT_KEPT:
            self.sizes |= name in _SIZES
            return func(*args, **kwargs)
        if name == "__iter__" and args and args[0].dim():
            return iter(self._run("unbind", torch.Tensor.unbind, (args[0], 0), {}))
        return self._run(name, func, args, kwargs)

    def _run(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        given: tuple[Any, Any] | None = None
        try:
            given = rebuilt(args, self._encoded), rebuilt(kwargs, self._encoded)
        except Exception as error:  # noqa: BLE001 - the run goes on as it would
            self._give_up(error)
        result = func(*args, **kwargs)
        if given is not None:
            try:
                self._note(Operation(name, func, *given), args, result)
            except Exception as error:  # noqa: BLE001 - as above
                self._give_up(error)
        return result

    def _give_up(self, error: Exception | str) -> None:
        self.failed = str(error)[:200] or "it failed"
        self._off = True

    @unseen
    def _note(self, operation: Operation, given: Any, result: Any) -> None:
        name, kwargs = operation.name, operation.kwargs
        if name in _NUMBERS:
            for slot in slots((operation.args, kwargs)):
                self.numbers.setdefault(slot, len(self.operations))
            return
        found = list(tensors_in(result))
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
        if not found and not writes and name != "data":
            return
        operation.outs = tuple([self._slot_of_new(one) for one in found])
        operation.drawn = tuple([one.detach().clone() for one in found]) if name in RANDOM else None
        operation.grad = torch.is_grad_enabled()
        operation.file, operation.line = user_place(3)
        self.operations.append(operation)
        if self.nan is None and _has_nan(found) and not _has_nan(tensors_in(given)):
            self.nan = operation
        if len(self.operations) > _MOST_OPERATIONS or self.bytes > _MOST_BYTES:
            self._give_up("the step is too long")

    def _slot_of_new(self, tensor: torch.Tensor) -> Slot:
        slot = self._slots.get(id(tensor))
        if slot is None:
            slot = self._slots[id(tensor)] = Slot(len(self._slots))
            self._alive.append(tensor)
        return slot

    def _encoded(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = self._slots.get(id(value))
        return self._leaf(value) if known is None else known

    @unseen
    def _leaf(self, tensor: torch.Tensor) -> Slot:
        slot = self._slot_of_new(tensor)
        if id(tensor) in self.held or isinstance(tensor, torch.nn.Parameter):
            self.parameters[slot] = tensor
            if isinstance(tensor, torch.nn.Parameter):
                return slot
        if is_freed(tensor):
            raise ValueError("the memory of a tensor was freed, as FSDP frees that of parameters")
        self.bytes += tensor.numel() * tensor.element_size()
        base = tensor._base
        if base is not None and base.numel() == tensor.numel() and base.is_contiguous() and tensor.is_contiguous():
            self.bases[slot] = tuple(base.shape)
        self.leaves[slot] = tensor.detach().clone().requires_grad_(tensor.is_leaf and tensor.requires_grad)
        if tensor.grad_fn is not None:
            self.opaque.add(slot)
        return slot


hidden(Tape.__torch_function__)  # so that warnings pass over them
hidden(Tape._run)


def reissued(message: Any) -> bool:
    """Shows a warning that came while a tape was on as of the line that it would be of without one."""
    if not message.filename.startswith(HIDDEN) and not message.filename.endswith(_BETWEEN):
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not Tape.__torch_function__.__code__:
        frame = frame.f_back
    while frame is not None and (_is_between(frame.f_code.co_filename)):
        frame = frame.f_back
    if frame is None:
        return False
    names = frame.f_globals
    warnings.warn_explicit(
        message.message, message.category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"),
        names.setdefault("__warningregistry__", {}), None, message.source,
    )  # fmt: skip
    return True


def _is_between(file: str) -> bool:
    return file.startswith(_OWN) or file.endswith(_BETWEEN)


def slots(value: Any) -> Iterable[Slot]:
    """The slots in nested arguments."""
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, slice):
        yield from slots((value.start, value.stop, value.step))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from slots(one)
    elif isinstance(value, dict):
        yield from slots(tuple(value.values()))


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether its storage was resized to nothing, as FSDP does; to read it would end the process."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _has_nan(found: Iterable[torch.Tensor]) -> bool:
    read = (one for one in found if one.is_cpu and one.is_floating_point() and one.numel() and not is_freed(one))
    return any(bool(one.isnan().any()) for one in read)


Values = dict[Slot, torch.Tensor]


@dataclass(slots=True)
class Replay:
    """The step, run again."""

    values: Values = field(default_factory=dict)  # of all slots, as they were last
    results: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # for each operation copies of what it gave


def replay(
    tape: Tape,
    until: int,
    change: Callable[[torch.Tensor], torch.Tensor],
    number: Callable[[Any], Any],
    held: Mapping[Slot, torch.Tensor],
) -> Replay:
    """Runs the operations of a tape again."""
    values: Values = {}
    for slot, leaf in tape.leaves.items():
        values[slot] = leaf.clone() if slot in tape.parameters else change(leaf).clone()
    for slot, parameter in tape.parameters.items():
        if slot in held:
            values[slot] = held[slot]
        elif slot not in tape.leaves:
            values[slot] = parameter.detach().clone().requires_grad_(parameter.requires_grad)
    done = Replay(values)

    def filled(one: Any) -> Any:
        return values[one] if type(one) is Slot else number(one) if type(one) in (int, float) else one

    for operation in tape.operations[:until]:
        args, kwargs = rebuilt((operation.args, operation.kwargs), filled)
        with torch.set_grad_enabled(operation.grad):
            result = _again(operation, args, kwargs, change)
        found = list(tensors_in(result))
        if len(found) != len(operation.outs):
            raise ValueError(f"{operation.name} gave another number of tensors")
        values.update(zip(operation.outs, found, strict=True))
        done.results.append(tuple([one.detach().clone() for one in found]))
    return done


def _again(operation: Operation, args: Any, kwargs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if operation.drawn is not None:
        drawn = [change(one).clone() for one in operation.drawn]
        if operation.name.endswith("_"):
            with torch.no_grad():
                return args[0].copy_(drawn[0])
        return drawn if len(drawn) > 1 else drawn[0]
    if operation.name in _DROPOUTS:
        first = args[0] if args else kwargs["input"]
        return first * 1
    if operation.name == "multi_head_attention_forward":
        kwargs = {**kwargs, "training": False}
    if operation.name == "scaled_dot_product_attention":
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
    if operation.name in _RECURRENT:
        args = _checked(operation.name, args)
    return operation.func(*args, **kwargs)


def _checked(name: str, args: Any) -> Any:
    """The arguments of a recurrent layer without dropout; torch itself does not look whether their rows fit."""
    if len(args) < 9 or not isinstance(args[5], float):
        raise ValueError("a packed sequence is not run with other rows")
    rows = args[0].shape[0 if args[8] else 1] if args[0].dim() == 3 else None
    states = args[1] if isinstance(args[1], (list, tuple)) else (args[1],)
    if any(one.dim() != 3 or one.shape[1] != rows for one in states):
        raise ValueError(f"the state of {name} has other rows than its input")
    return (*args[:5], 0.0, *args[6:])


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested arguments of an operation with something else in the place of each leaf."""
    if isinstance(value, slice):
        return slice(*[rebuilt(one, change) for one in (value.start, value.stop, value.step)])
    if isinstance(value, torch.Size):
        return torch.Size([change(int(one)) for one in value])
    if type(value) in (list, tuple):
        return type(value)([rebuilt(one, change) for one in value])
    if type(value) is dict:
        return {key: rebuilt(one, change) for key, one in value.items()}
    return change(value)
