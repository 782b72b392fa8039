"""One step of a run as a list of operations, which can be run again with other rows."""

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from anybatch.doctor.recording.modes import SafeMode
from anybatch.doctor.recording.patches import hidden
from anybatch.doctor.seeing import name_of, writes
from anybatch.doctor.values import tensors_in
from anybatch.tensors.dispatch import unseen
from anybatch.userlines import user_place

LEAST_ROWS = 4
_MOST_OPERATIONS = 20_000
_MOST_BYTES = 256 * 2**20
_WRITTEN = "anybatch.doctor.written"
RANDOM = frozenset(
    (
        *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "normal", "bernoulli"),
        *("multinomial", "poisson", "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_"),
    )
)
_DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_NUMBERS = frozenset({"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__index__"})
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_SET = frozenset({"data", "requires_grad"})
_NOT_KEPT = frozenset({"backward", "register_hook", "retain_grad", "is_floating_point", "dim", "size", "shape", "numel",
                       "__len__", "nelement"})  # fmt: skip


_KINDS = {
    **dict.fromkeys(("true_divide", "__truediv__", "__rtruediv__", "__rdiv__"), "div"),
    "__rsub__": "rsub", "__iadd__": "add_", "__isub__": "sub_",
    **{f"__{one}__": one for one in ("add", "sub", "mul", "pow", "matmul", "abs", "neg", "ne")},
    **{f"__r{one}__": one for one in ("add", "mul")},
}  # fmt: skip
_TAKING = frozenset({"__getitem__", "index_select"})
_MADE_OF_DATA = frozenset({"tensor", "as_tensor", "from_numpy"})


def kind_named(name: str) -> str:
    """The name of a function that does what an operator of a name does."""
    return _KINDS.get(name, name)


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
    given: list[Slot] = field(init=False)  # the slots of what it was given, in order

    def __post_init__(self) -> None:
        self.given = list(slots((self.args, self.kwargs)))

    @property
    def kind(self) -> str:
        """Its name, that of the function where it is an operator."""
        return kind_named(self.name)

    @property
    def written(self) -> list[Slot]:
        """The slots of tensors that it writes to, ``x[0] = y`` among them, which gives none."""
        return list(slots((self.args[:1], self.kwargs.get("out")))) if writes(self.name, self.kwargs) else []

    def again(self, values: Mapping[Slot, Any]) -> Any:
        """What it gives for other values of what it was given."""
        args, kwargs = rebuilt((self.args, self.kwargs), lambda one: values[one] if type(one) is Slot else one)
        return self.func(*args, **kwargs)

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
    weight: float = 1.0  # the number that the backward was given as its gradient


class Tape(SafeMode):
    """Writes down the operations while it is on; nothing of them is changed."""

    def __init__(self, held: Iterable[int] = (), net: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.held = set(held)  # the ``id`` of all parameters and buffers of models
        self.net: Callable[[], torch.nn.Module | None] = (lambda: None) if net is None else weakref.ref(net)
        self.begun = True  # whether operations belong to a step, and not to what makes its batch
        self.trained = frozenset[int]()  # the ``id`` of the parameters of the optimizer whose step it is
        self.operations: list[Operation] = []
        self.leaves: dict[Slot, torch.Tensor] = {}  # copies of the tensors that came from outside
        self.parameters: dict[Slot, torch.Tensor] = {}  # of these, those that models hold
        self.opaque: set[Slot] = set()  # of these, those that something computed that was not seen
        self.losses: list[Loss] = []
        # of views that have all entries in order, the shape of what they are views of
        self.bases: dict[Slot, tuple[int, ...]] = {}
        self.rows = -1  # of the batch; -1 where it is not known, as where no module is called
        self.is_row = False  # whether it began with a call on no batch, but on the numbers of one row
        self.acted = -1  # the rows of calls before the batch came, as of what chooses actions
        self.numbers: dict[Slot, int] = {}  # became numbers of Python, with how many operations had run then
        # for each kind of node the lines of the operations that made one
        self.made: dict[str, set[tuple[str, int]]] = {}
        self._slots: dict[int, tuple[weakref.ref[torch.Tensor], Slot]] = {}  # holds none of them: memory is scarce
        self._count = 0
        # of the leaves that are no parameters, and of what was drawn; and of all that the operations gave
        self.bytes = self.size = 0
        self.rewrites = False  # whether an operation may have written to what another one gave
        self.until = math.inf  # the time by ``time.perf_counter`` after which it is not run again

    def changed(self, operations: list[Operation]) -> "Tape":
        """The same step with other operations, to be run again."""
        other = Tape()
        other.leaves, other.parameters, other.operations = self.leaves, self.parameters, operations
        other.rewrites, other.until = self.rewrites, self.until
        return other

    def is_live(self, parameter: torch.Tensor) -> bool:
        """Whether the step trained it, also where it is frozen by now, as a critic is while its generator learns."""
        return parameter.requires_grad or id(parameter) in self.trained

    def stop(self) -> bool:
        """Also lets go of the tensors of the run."""
        self._slots.clear()
        return super().stop()

    def called(self, rows: int, is_row: bool) -> None:
        """Notes the rows of another call: one of a few rows before it, as of what acts, was on no batch."""
        if not self.losses and self._acts() and rows >= LEAST_ROWS and not is_row:
            self.acted, self.rows, self.is_row = self.rows, rows, False

    def _acts(self) -> bool:
        return 0 < self.rows < LEAST_ROWS or self.is_row

    def loss(self, loss: torch.Tensor, weight: float = 1.0) -> None:
        """Is notified of a backward that is about to run."""
        slot = self._slot_of(loss)
        if slot is not None and not self._off:
            self.losses.append(Loss(slot, len(self.operations), *user_place(2), weight))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__iter__ and not self._off and args[0].dim():
            return iter(super().__torch_function__(torch.Tensor.unbind, types, (args[0], 0)))
        return super().__torch_function__(func, types, args, kwargs)

    def before(self, func: Any, args: Any, kwargs: Any) -> Operation | None:
        """Writes down what it is given, where it is an operation."""
        name, of = name_of(func)
        if name in _NOT_KEPT or (of and name not in (_SET if of == "__set__" else _VIEWS)):
            return None
        if name in _TAKING and not kwargs and self._is_batch_taken(args):
            return None
        if not self.begun and not self._begins(name, args, kwargs):
            return None
        return Operation(name, func, rebuilt(args, self._encoded), rebuilt(kwargs, self._encoded))

    def _begins(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether an operation is none of those that make a batch, where no module is called with it: it has a weight.

        The batch that this one is given then is a leaf, and its rows are known.
        """
        given = list(tensors_in((args, kwargs)))
        batch = next((one for one in given if id(one) not in self.held and one.dim()), None)
        if batch is not None and any(id(one) in self.held for one in given) and not writes(name, kwargs):
            self.begun, self.rows = True, len(batch)
        return self.begun

    def _is_batch_taken(self, args: Any) -> bool:
        """Whether a batch is taken from data, as targets are from those of all samples; what is taken is a leaf."""
        given, index = list(tensors_in(args)), args[-1]
        if len(args) < 2 or not isinstance(args[0], torch.Tensor) or not args[0].dim():
            return False
        if isinstance(index, slice) and len(args) == 2:
            count = len(range(*index.indices(len(args[0])))) if index.start else -1  # the first ones may be of a table
        else:
            count = len(index) if isinstance(index, list) or (isinstance(index, torch.Tensor) and index.dim()) else -1
        is_new = all(self._slot_of(one) is None and not one.requires_grad for one in given)
        return count == self.rows < len(args[0]) and is_new and id(args[0]) not in self.held

    @unseen
    def after(self, operation: Operation, result: Any) -> None:
        """Writes down what it gave."""
        name, kwargs = operation.name, operation.kwargs
        if name in _NUMBERS:
            for slot in slots((operation.args, kwargs)):
                self.numbers.setdefault(slot, len(self.operations))
            return
        found = list(tensors_in(result))
        if not found and not writes(name, kwargs) and name not in _SET:
            return
        count = len(found[0]) if name in _MADE_OF_DATA and not operation.given and found[0].dim() else -2
        if count == self.rows or (count >= LEAST_ROWS and self._acts()):
            return  # a batch, or what is known of its rows, also behind a call that acts: a leaf when it is used
        self.rewrites |= (
            writes(name, kwargs)
            or name == "requires_grad"
            # an operation that gives what it was given need not have written to it
            or any(self._slot_of(one) is not None and (one.is_inference() or one._version > 0) for one in found)
        )
        self.size += sum(one.numel() * one.element_size() for one in found)
        operation.outs = tuple([self._slot_of_new(one) for one in found])
        operation.drawn = tuple(map(self._copy_of, found)) if name in RANDOM else None
        operation.grad = torch.is_grad_enabled()
        operation.file, operation.line = user_place(3)
        self.operations.append(operation)
        place = operation.file, operation.line
        for node in _nodes_of([one.grad_fn for one in found]):
            self.made.setdefault(type(node).name(node), set()).add(place)  # its own ``name`` may be anything
        if len(self.operations) > _MOST_OPERATIONS:
            self.give_up("the step is too long")

    def _copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes += tensor.numel() * tensor.element_size()
        if self.bytes > _MOST_BYTES:
            raise ValueError("the step is given and draws too much")
        return tensor.detach().clone()

    def _slot_of(self, tensor: torch.Tensor) -> Slot | None:
        known = self._slots.get(id(tensor))
        return None if known is None or known[0]() is not tensor else known[1]

    def _slot_of_new(self, tensor: torch.Tensor) -> Slot:
        slot = self._slot_of(tensor)
        if slot is None:
            slot = Slot(self._count)
            self._count += 1
            self._slots[id(tensor)] = weakref.ref(tensor), slot
        return slot

    def _encoded(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = self._slot_of(value)
        return self._leaf(value) if known is None else known

    @unseen
    def _leaf(self, tensor: torch.Tensor) -> Slot:
        slot = self._slot_of_new(tensor)
        if id(tensor) in self.held or isinstance(tensor, torch.nn.Parameter):
            self.parameters[slot] = tensor
            if isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
                return slot
        if is_freed(tensor):
            raise ValueError("the memory of a tensor was freed, as FSDP frees that of parameters")
        base = tensor._base
        if base is not None and base.numel() == tensor.numel() and base.is_contiguous() and tensor.is_contiguous():
            self.bases[slot] = tuple(base.shape)
        self.leaves[slot] = self._copy_of(tensor).requires_grad_(tensor.is_leaf and tensor.requires_grad)
        if tensor.grad_fn is not None:
            self.opaque.add(slot)
            for _ in _nodes_of([tensor.grad_fn]):  # no operation of this step has made them
                pass
        return slot


hidden(Tape.__torch_function__)


def _nodes_of(starts: list[Any]) -> Iterator[Any]:
    """Nodes of the graph and those behind them, each once. The node holds the mark, so that nothing keeps it alive."""
    for node in starts:
        if node is not None and _WRITTEN not in (marks := node.metadata):
            marks[_WRITTEN] = True
            yield node
            starts.extend([behind for behind, _ in node.next_functions])


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


def as_it_is(one: Any) -> Any:
    """The same."""
    return one


Values = dict[Slot, torch.Tensor]


@dataclass(slots=True)
class Replay:
    """The step, run again."""

    values: Values = field(default_factory=dict)  # of all slots, as they were last
    results: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # for each operation what it gave, then


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
        is_parameter = slot in tape.parameters
        given = leaf if is_parameter else change(leaf)
        is_safe = not is_parameter and not tape.rewrites and not leaf.requires_grad
        values[slot] = given if is_safe else given.clone()
    for slot, parameter in tape.parameters.items():
        if slot in held:
            values[slot] = held[slot]
        elif slot not in tape.leaves:
            values[slot] = parameter.detach().clone().requires_grad_(parameter.requires_grad)
    done = Replay(values)

    def filled(one: Any) -> Any:
        return values[one] if type(one) is Slot else number(one) if type(one) in (int, float) else one

    for operation in tape.operations[:until]:
        if time.perf_counter() > tape.until:
            raise TimeoutError("there was no time left")
        args, kwargs = rebuilt((operation.args, operation.kwargs), filled)
        with torch.set_grad_enabled(operation.grad):
            result = _again(operation, args, kwargs, change)
        found = list(tensors_in(result))
        if len(found) != len(operation.outs):
            raise ValueError(f"{operation.name} gave another number of tensors")
        values.update(zip(operation.outs, found, strict=True))
        done.results.append(tuple([one.detach().clone() if tape.rewrites else one.detach() for one in found]))
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
    if len(args) < 9:
        raise ValueError(f"{name} was called in an unusual way")
    if isinstance(args[6], float):
        return _checked_as_packed(name, args)
    rows = args[0].shape[0 if args[8] else 1] if args[0].dim() == 3 else None
    states = args[1] if isinstance(args[1], (list, tuple)) else (args[1],)
    if any(one.dim() != 3 or one.shape[1] != rows for one in states):
        raise ValueError(f"the state of {name} has other rows than its input")
    return (*args[:5], 0.0, *args[6:])


def _checked_as_packed(name: str, args: Any) -> Any:
    """The same of a packed sequence, whose rows are in the order of their lengths."""
    sizes = [int(one) for one in args[1]]
    states = args[2] if isinstance(args[2], (list, tuple)) else (args[2],)
    if sizes != sorted(sizes, reverse=True) or sizes[-1] < 1 or sum(sizes) != len(args[0]):
        raise ValueError(f"the packed sequence of {name} is one of other rows")
    if any(one.dim() != 3 or one.shape[1] != sizes[0] for one in states):
        raise ValueError(f"the state of {name} has other rows than its input")
    return (*args[:6], 0.0, *args[7:])


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
