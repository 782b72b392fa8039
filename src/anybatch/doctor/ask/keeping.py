"""What is kept of a run for the questions after it: steps as tapes, batches, what nets were given, copies of others."""

import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import lr_scheduler

from anybatch.doctor.ask.breaking import FirstNan
from anybatch.doctor.ask.sampling import Sampling
from anybatch.doctor.ask.tape import Slot, Tape
from anybatch.doctor.graphs import outputs_first
from anybatch.doctor.recording.modes import SafeMode
from anybatch.doctor.recording.patches import noting
from anybatch.doctor.samples.alongside import Redraws
from anybatch.doctor.samples.draws import Streams
from anybatch.doctor.samples.inputs import has_rows, is_scaled, mark, marks, some_of, stds_of, versions_of
from anybatch.doctor.samples.rows import Rows
from anybatch.doctor.samples.suspicion import FUSED
from anybatch.tensors.dispatch import has_numbers, unseen
from anybatch.tensors.graph import is_transformed
from anybatch.torch_private import has_compiled
from anybatch.userlines import user_place

_TAPED = 10  # steps in which one may be written down
_MOST_TRIES = 6  # for each root
_MOST_PHASES = 4  # optimizers that begin later, as that of a fine-tuning does, each of which may have its own
_ENOUGH = 2  # steps of each optimizer: an early one, and a later one by when caches and states of the user's are there
_MOST_LOSSES = 64
_MOST_NETS = 24
_MOST_WENT = 8  # first steps of each net in which its weights are looked at
_MOST_GIVEN = 40  # figures of inputs for each root and mode
_MOST_ROWS = 64  # of an input that are compared with its first
_MOST_LOOKED_AT = 4096  # entries of an input whose mean and spread are taken
_MOST_BATCHES = 48
_MOST_TOKENS, _ENOUGH_TOKENS = 1 << 16, 20_000  # of a vocabulary, and that are counted of a training or an evaluation
_MOST_COLLATES, _MOST_PASSED = 2, 64
_FEWEST_NAMES, _MOST_NAMES, _MOST_NUMBERINGS = 8, 1 << 18, 8  # that are numbered, and by how many
_MOST_BYTES = 64 * 2**20
_MOST_VALUES = 400
_OF_ONE = 1e-4  # how far sums of rounded probabilities are from it
_MOST_NODES = 3000  # of a graph, among which functions of the user's are looked for
_MOST_FUNCTIONS = 8
_MOST_LINES = 3
_OF_A_PICTURE = 64  # numbers of one sample, enough for their deviation
_PLAIN = (torch.Tensor, int, float, bool, str, type(None))


@dataclass(slots=True)
class Given:
    """The first tensor of numbers that a root was given."""

    mean: float
    std: float
    same: bool  # whether all rows are equal
    rows: int
    shape: tuple[int, ...]  # of a row
    step: int  # in which
    file: str  # of the line of the call
    line: int
    scaled: bool = False  # whether each column of these rows has mean 0 and deviation 1, to the last digits
    known: bool = False  # whether rows of the training are among them
    symbols: bool = False  # whether they are whole numbers, as of words
    grad: bool = True  # whether autograd was enabled
    stds: tuple[float, float] = (0.0, 0.0)  # the least and the largest deviation within a row that is a picture


@dataclass(slots=True)
class State:
    """What a net was like when it was first called."""

    module: "weakref.ref[torch.nn.Module]"
    root: int  # the number of its root
    name: str  # of it within its root
    values: dict[str, Any]  # for each of its parameters and buffers by name what tells its values from others
    last: dict[str, Any]  # the same when it was last looked at
    buffers: set[str]  # the names of its buffers
    methods: dict[str, type]  # modules of it whose class of the user's has a method ``backward``, by name
    # whether it was called in training mode, and whether in evaluation mode
    modes: set[bool] = field(default_factory=set)
    inputs: dict[int, set[Any]] = field(default_factory=dict)  # for each looked at step what it was given
    # the same as ``values`` at each of the first looked at steps, and where another net was first called
    went: dict[int, dict[str, Any]] = field(default_factory=dict)
    steps: int = 0  # steps before its first call
    within: str = ""  # the part of the net that this is of
    before: Any = None  # the step at which it was last called without a graph in training mode, and what it was given
    again: int = 0  # how often it was given the same then as the time before

    @property
    def weights(self) -> set[str]:
        """The names of its parameters."""
        return self.values.keys() - self.buffers


@dataclass(slots=True)
class Plateau:
    """The values that a ``ReduceLROnPlateau`` was given."""

    mode: str  # ``"min"`` or ``"max"``
    file: str  # of the line of the first call
    line: int
    values: list[float] = field(default_factory=list)  # in order
    rates: list[float] = field(default_factory=list)  # the first learning rate after each


@dataclass(slots=True)
class Own:
    """A state that was loaded into the module that its tensors belong to."""

    name: str  # of the class
    count: int  # of the tensors
    file: str  # of the line
    line: int


@dataclass(slots=True)
class Function:
    """A function of the user's, with what its forward left for its backward."""

    cls: Any
    context: Any  # has the tensors and attributes of the node of the graph, as copies
    shapes: tuple[tuple[int, ...], ...]  # of the gradients that come in
    dtype: torch.dtype
    given: tuple[Any, ...] = ()  # what its next forward was given, where that is tensors and plain values

    def called(self, args: tuple[Any, ...]) -> None:
        """Is shown a call of its forward."""
        if not self.given:
            args = args[self.cls.setup_context is torch.autograd.Function.setup_context :]  # without the context
            if all(isinstance(one, _PLAIN) for one in args):
                self.given = tuple([one.detach().clone() if torch.is_tensor(one) else one for one in args])


@dataclass(slots=True)
class Passed:
    """The state of a net that was called, which was loaded into another one."""

    into: int  # the ``id`` of the net
    of: int  # likewise
    mine: frozenset[int]  # the ``id`` of the parameters of the former
    others: frozenset[int]  # of the latter
    step: int
    file: str  # of the line
    line: int


def functions_of(loss: torch.Tensor, known: set[Any]) -> Iterator[Function]:
    """The functions of the user's own in the graph of a loss that were not seen before."""
    for node in outputs_first([loss.grad_fn] if loss.grad_fn is not None else [], _MOST_NODES):
        cls = getattr(type(node), "_forward_cls", None)
        if cls is None or cls in known or len(known) >= _MOST_FUNCTIONS or cls.__module__.startswith("torch."):
            continue
        known.add(cls)
        made = node._input_metadata
        saved = tuple([None if one is None else one.detach().clone() for one in node.saved_tensors])
        left = {**vars(node), "saved_tensors": saved, "needs_input_grad": node.needs_input_grad}
        shapes = tuple([tuple(one.shape) for one in made])
        yield Function(cls, types.SimpleNamespace(**left), shapes, made[0].dtype)


class Kept:
    """Is notified of the run by the recorder, and keeps little."""

    def __init__(self, step: Callable[[], int], sampled: Callable[[], bool], saw_mode: Callable[[], bool]) -> None:
        self._step, self._sampled, self._saw_mode, self.on = step, sampled, saw_mode, True
        self.tapes: dict[int, Tape] = {}  # the last step that was written down, for each optimizer
        self.earlier: dict[int, Tape] = {}  # the one before that
        self.initial: dict[int, torch.Tensor] = {}  # parameters as they were before the first of these, by ``id``
        self.given: dict[tuple[int, bool], list[Given]] = {}  # by root and whether it was trained
        self.states: dict[int, State] = {}  # by the ``id`` of the net
        # what each root was given, and the loss function, with its arguments, that came after it
        self.batches: dict[int, list[tuple[torch.Tensor, str, dict[str, Any]]]] = {}
        self._given: dict[int, set[int]] = {}  # ids of what each root was given since the last backward
        # tables of the first evaluation, and the targets of a loss
        self.held_out: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        # by root and mode, how often each number of a vocabulary was given
        self.tokens: dict[tuple[int, bool], torch.Tensor] = {}
        self._last: dict[int, torch.Tensor] = {}  # what each root was given last in an evaluation
        self._evaluated: dict[int, int] = {}  # in which step each was evaluated first
        # by root and mode what a forward wrote to
        self.written: dict[tuple[int, bool], dict[str, tuple[str, int]]] = {}
        self.plateaus: dict[int, Plateau] = {}  # by the ``id`` of the scheduler
        self.schedules: dict[int, Any] = {}  # made and not stepped: class, number of the optimizer, line
        self.own: list[Own] = []  # states that were loaded into the module that they belong to
        self.passed: list[Passed] = []  # states that went from one net to another within the training
        self.functions: list[Function] = []  # of the user's own, with what their forwards left
        # data sets with a collate function of the user's own
        self.readers: list[weakref.ref[Any]] = []  # loaders in an order that is drawn, as those of a training
        self.collates: list[tuple[Any, Callable[[list[Any]], Any]]] = []
        self.numberings: list[tuple[bool, dict[str, dict[Any, int]]]] = []  # with whether the order is drawn
        self.streams, self.sampling, self.redraws, self.rows = Streams(), Sampling(), Redraws(), Rows()
        self.breaking = FirstNan()
        self._left: list[SafeMode] = []  # modes that are still on, and do nothing
        self._classes: set[Any] = set()
        self._tape: Tape | None = None
        self._is_late = False  # whether it began when those of all optimizers that have stepped were there
        self._trained: dict[int, tuple[int, int]] = {}  # by root the first step of its training, and how many tapes
        self._written: dict[int, int] = {}  # how many steps of each optimizer that steps were written down
        self._before: dict[str, Any] | None = None
        self._looks: dict[tuple[int, bool], int] = {}
        self._bytes, self._rows, self._is_row = 0, -1, False

    def attach(self, wrap: Callable[..., Any], guarded: Callable[..., Any]) -> None:
        """Has two functions seen that no other hook looks at in this way."""
        self._wrap, self._guarded = wrap, guarded
        wrap(lr_scheduler.ReduceLROnPlateau, "step", noting(after=guarded(self._valued)))
        wrap(torch.nn.Module, "load_state_dict", noting(guarded(self._loads)))

    def _valued(self, _: Any, scheduler: Any, value: Any = None, *args: Any) -> None:
        known = self.plateaus.setdefault(id(scheduler), Plateau(scheduler.mode, *user_place(3)))
        if len(known.values) < _MOST_VALUES and value is not None:
            known.values.append(float(value))
            known.rates.append(float(scheduler.optimizer.param_groups[0]["lr"]))

    def _loads(self, module: torch.nn.Module, state: Any, *args: Any) -> None:
        own = {name: one for name, one in module.state_dict(keep_vars=True).items() if isinstance(one, torch.Tensor)}
        if not isinstance(state, Mapping) or not own or self._step() == 0:
            return
        same = [name for name, one in own.items() if _same_memory(one, state.get(name))]
        if len(same) == len([one for one in own.values() if one.numel()]) and len(self.own) < 8:
            self.own.append(Own(type(module).__name__, len(same), *user_place(3)))
        if not same and len(self.passed) < _MOST_PASSED and (of := self._holder(state)) is not None:
            mine, others = (frozenset(map(id, net.parameters())) for net in (module, of))
            self.passed.append(Passed(id(module), id(of), mine, others, self._step(), *user_place(3)))

    def _holder(self, state: Mapping[str, Any]) -> torch.nn.Module | None:
        """The net whose tensors a state is of; ``None`` where it is of none that was called."""
        first = next((one for one in state.values() if isinstance(one, torch.Tensor) and one.numel()), None)
        own = (net for _, net in self.nets() if any(_same_memory(one, first) for one in net.parameters()))
        return next(own, None)

    # forwards

    def forward(self, module: torch.nn.Module, root: int, name: str, args: Any, kwargs: Any) -> None:
        """Is shown the call of a root."""
        self.leave()
        if not self.on or is_transformed():
            return
        mode, step = module.training, self._step()
        if self._tape is not None and not mode and (self._tape.losses or _is_fused(module)):
            self.stop()
        state = self.states.get(id(module))
        given = [one for one in _numbers((args, kwargs)) if one.dim()]
        first = given[0] if given else None
        is_new = state is None or state.module() is not module
        if is_new and len(self.states) < _MOST_NETS:
            state = self.states[id(module)] = self._state(module, root, name, step)
            for known, net in self.nets():
                known.went.setdefault(step, marks(net))
        if state is not None:
            state.modes.add(mode)
            if mode and not torch.is_grad_enabled() and first is not None:
                same, state.before = state.before, (step, mark(first))
                state.again += same == state.before
            is_early = step - state.steps < _MOST_WENT
            if not is_new and (is_early or self._sampled()) and step not in state.inputs:
                state.last = marks(module)
                if is_early:
                    state.went[step] = state.last
            if len(state.inputs) < 64 and first is not None:
                state.inputs.setdefault(step, set()).add(mark(first))
        key = root, mode and torch.is_grad_enabled()
        self._looks[key] = self._looks.get(key, 0) + 1
        if given:
            self._look(given, key, step)
        if mode and torch.is_grad_enabled():
            self._given.setdefault(root, set()).add(id(first))
            self.sampling.train(module, args, kwargs)
        self._before = versions_of(module) if self._looks[key] <= 3 and torch.is_tensor(first) else None
        self._rows = first.shape[0] if first is not None else -1
        self._is_row = first is not None and first.dim() == 1 and first.is_floating_point()

    def _look(self, given: Sequence[torch.Tensor], key: tuple[int, bool], step: int) -> None:
        first = given[0]
        found = self.given.setdefault(key, [])
        if key[1]:
            self._count(first, key)
        is_batch = first.shape[0] > 1 and (first.dim() > 1 or torch.is_grad_enabled())  # not one state of a player
        is_batch = is_batch or (len(first) == 1 and first.numel() >= _OF_A_PICTURE and not key[1])
        grad, is_batch = torch.is_grad_enabled(), is_batch and first.is_cpu and not first.is_complex()
        if is_batch and sum(one.grad == grad for one in found) < _MOST_GIVEN:
            std, mean = torch.std_mean(some_of(first, _MOST_LOOKED_AT).float())
            rows, shape = first.shape[0], tuple(first.shape[1:])
            with_rows = [one for one in given if len(one) == rows > 1]  # a grid may be the same where a code is not
            same = bool(with_rows) and all(bool((one[:1] == one[1:_MOST_ROWS]).all()) for one in with_rows)
            scaled = first.is_floating_point() and is_scaled(first)
            known = scaled and has_rows(first, [batch[0] for batch in self.batches.get(key[0], ())][:1])
            stds, seen = stds_of(first, _OF_A_PICTURE), (scaled, known, not first.is_floating_point(), grad)
            found.append(Given(float(mean), float(std), same, rows, shape, step, *user_place(4), *seen, stds=stds))

    @unseen
    def _count(self, tokens: torch.Tensor, key: tuple[int, bool]) -> None:
        """Adds how often each number of a vocabulary was given."""
        is_text = tokens.dtype == torch.int64 and tokens.dim() == 2 and tokens.is_cpu and tokens.numel() > 0
        if is_text and int(tokens.min()) >= 0 and int(tokens.max()) < _MOST_TOKENS:
            if tokens.shape[1] > 2:  # a value that fills up rows is no word
                ends = [each == each[:, :1].where(each[:, :1] == each[:, 1:2], -1) for each in (tokens, tokens.flip(1))]
                first, last = (each.long().cumprod(1).bool() for each in ends)
                tokens = tokens[~(first | last.flip(1))]
            known = self.tokens.get(key, tokens.new_zeros(_MOST_TOKENS))
            if int(known.sum()) < _ENOUGH_TOKENS:
                self.tokens[key] = known + tokens.flatten().bincount(minlength=_MOST_TOKENS)

    def _state(self, module: torch.nn.Module, root: int, name: str, step: int) -> State:
        methods = {
            name: type(one)
            for name, one in module.named_modules()
            if any("backward" in vars(cls) for cls in type(one).__mro__)
        }
        values = marks(module)
        buffers = {name for name, _ in module.named_buffers()}
        return State(weakref.ref(module), root, name, values, values, buffers, methods, steps=step)

    def trains(self, module: torch.nn.Module, root: int, args: Any, kwargs: Any) -> bool:
        """Is shown one of the first calls with a gradient; returns whether there is more to see in the next."""
        first = next((one for one in _numbers((args, kwargs)) if one.dim()), None) if self.on else None
        if first is None or first.requires_grad or is_transformed():
            return False
        return (self.rows.train if module.training else self.rows.evaluate)(root, first)

    def samples(self, module: torch.nn.Module, root: int, args: Any, kwargs: Any) -> None:
        """Is shown any call without a gradient, also where nothing else is looked at."""
        if not self.on or is_transformed():
            return
        if step := self._step():
            self.sampling.sample(step, module, args, kwargs)
        first = next((one for one in _numbers((args, kwargs)) if one.dim()), None)
        if first is not None:
            self.rows.evaluate(root, first)
            if step and len(first) == 1 and first.numel() >= _OF_A_PICTURE:
                self._look([first], (root, False), step)
        if first is not None and not module.training:
            self._count(first, (root, False))
            self._last.pop(root, None)
            if first.is_cpu and first.dim() == 2 and first.is_floating_point():  # a table
                self._last[root] = first

    def forwarded(self, module: torch.nn.Module, root: int) -> None:
        """Is told that it has ended."""
        before, self._before = self._before, None
        if before is None:
            return
        after = versions_of(module)
        changed = [name for name, mark in after.items() if name in before and before[name] != mark]
        if changed:
            place = user_place(3)
            known = self.written.setdefault((root, module.training), {})
            known.update(dict.fromkeys(changed, place))

    def loader(self, loader: Any) -> None:
        """Is shown a loader when it is first gone through."""
        dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
        is_own = not str(getattr(collate, "__module__", "torch.")).startswith("torch.")
        has_room = self.on and len(self.collates) < _MOST_COLLATES
        is_drawn = isinstance(getattr(loader, "sampler", None), torch.utils.data.RandomSampler)
        # A data set of the user's is not read again: it may count, wait or write.
        is_plain = type(dataset) is torch.utils.data.TensorDataset and not is_own
        if self.on and is_drawn and is_plain and len(self.readers) < _MOST_COLLATES:
            self.readers.append(weakref.ref(loader))
        if self.on and len(self.numberings) < _MOST_NUMBERINGS and (found := numberings(dataset)):
            self.numberings.append((is_drawn, found))
        if callable(collate) and is_own and has_room and hasattr(dataset, "__getitem__"):
            self.collates.append((dataset, collate))

    # steps

    def begin(self, module: torch.nn.Module, root: int) -> None:
        """Is told that all that is to be seen of the call before it runs was seen, so that a tape may begin."""
        is_looked_at = self._sampled() or 0 in self._written.values()  # an optimizer may step after many of another
        can = self.on and module.training and torch.is_grad_enabled() and not is_transformed()
        if can and self.breaking.left:
            self.stop()
            if not has_compiled():
                self.breaking.start()
        elif can and is_looked_at:
            is_late = bool(self._written) and min(self._written.values()) >= _ENOUGH
            if is_late and not self._waits(module):
                return
            step = self._step()
            begun, tries = self._trained.setdefault(root, (step, 0))
            weights = [*module.parameters()]
            if step < begun + _TAPED and tries < _MOST_TRIES and self._start(weights, module, self._rows):
                self._trained[root], self._is_late = (begun, tries + 1), is_late

    def _waits(self, module: torch.nn.Module) -> bool:
        """Whether no optimizer that has stepped trains it, as that of a generator before which a critic has steps."""
        weights = {id(one) for one in module.parameters() if one.requires_grad}
        return bool(weights) and all(map(weights.isdisjoint, (one.trained for one in self.tapes.values())))

    def stepped(self, weights: Iterable[torch.Tensor]) -> None:
        """Is told that an optimizer has stepped: where no module is called, the next step is written down from here."""
        if self.on and not self.states and self._step() < _TAPED and min(self._written.values(), default=0) < _ENOUGH:
            self._start(list(weights))

    def _start(self, weights: Sequence[torch.Tensor], module: torch.nn.Module | None = None, rows: int = -1) -> bool:
        """Begins to write a step down; whether that was possible."""
        if self._tape is not None:
            self._remember(weights)  # of a step that trains several
            self._tape.called(rows, self._is_row)
        if self._tape is not None or self._saw_mode() or has_compiled() or (module is not None and _is_fused(module)):
            return False
        held = [one for _, net in self.nets() for one in itertools.chain(net.parameters(), net.buffers())]
        own = [*weights, *(() if module is None else module.buffers())]
        tape = Tape(map(id, held + own), module)
        tape.rows, tape.begun, tape.is_row = rows, module is not None, module is not None and self._is_row
        if not tape.start():
            return False
        self._remember(weights)
        self._tape = tape
        return True

    @unseen
    def _remember(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keeps what parameters are before they are trained, as far as there is room."""
        for one in parameters:
            size = one.numel() * one.element_size()
            if id(one) not in self.initial and self._bytes + size <= _MOST_BYTES and has_numbers(one):
                self._bytes += size
                self.initial[id(one)] = one.detach().clone()

    def backward(self, loss: torch.Tensor, weight: float = 1.0) -> None:
        """Is shown a loss whose backward is about to run, and what its gradient is."""
        self._given.clear()
        if self._tape is not None:
            self._tape.loss(loss, weight)
            for one in functions_of(loss, self._classes):
                self.functions.append(one)
                self._see_call(one)
            if len(self._tape.losses) > _MOST_LOSSES:  # where nothing steps that torch knows
                self.stop()

    def look_on(self, value: str) -> None:
        """Is told that the data have made the loss nan or inf: the next steps may show how."""
        if self.on:
            self.breaking.look(value)

    def _see_call(self, function: Function) -> None:
        """Has the next forward of a function of the user's seen, with what it is given."""
        called = self._guarded(function.called)

        def see(*args: Any, **_: Any) -> None:
            if not function.given:
                called(args)

        self._wrap(types.SimpleNamespace(forward=function.cls.forward), "forward", noting(see))

    def stepping(self, optimizer: int, weights: Iterable[torch.Tensor]) -> None:
        """Is told that an optimizer is about to step its weights, with which a tape ends."""
        if self.breaking.left and self.breaking.stepped():
            self._left.append(self.breaking)
            self.leave()
        tape, self._tape = self._tape, None
        if self._written and optimizer not in self._written and len(self._written) < _MOST_PHASES:
            self._trained.clear()
        count = self._written.setdefault(optimizer, 0)
        if tape is None:
            return
        self._left.append(tape)
        self.leave()
        tape.trained = frozenset(map(id, weights))
        if tape.losses and not tape.failed and not (self._is_late and count >= _ENOUGH):
            before = self.tapes.get(optimizer)
            if before is not None and before.bytes < _MOST_BYTES // 2:
                self.earlier[optimizer] = before
            self.tapes[optimizer], self._written[optimizer] = tape, count + 1

    def release(self) -> None:
        """Lets go of the steps of large models that nobody holds any more: the next one may need the memory."""
        dead = [(number, tape) for number, tape in self.tapes.items() if tape.net() is None]
        room = _MOST_BYTES
        for number, tape in reversed(dead):
            room -= sum(one.numel() * one.element_size() for one in tape.parameters.values())
            if room < 0:
                del self.tapes[number]
                self.earlier.pop(number, None)
                for one in tape.parameters.values():
                    self.initial.pop(id(one), None)

    def nets(self) -> list[tuple[State, torch.nn.Module]]:
        """The nets that are still there, each behind what is known of it."""
        return [(state, net) for state in self.states.values() if (net := state.module()) is not None]

    def look_again(self) -> None:
        """Looks at all nets that are there once more."""
        for state, net in self.nets():
            state.last = marks(net)

    def first_of(self, tape: Tape) -> dict[Slot, torch.Tensor]:
        """Copies of the trained parameters of a step as they were before the first one that was written down."""
        return {
            slot: self.initial.get(id(one), one).detach().clone().requires_grad_()
            for slot, one in tape.parameters.items()
            if one.requires_grad
        }

    def lines_of(self, op: str) -> tuple[str, tuple[int, ...]]:
        """The file and the lines that made a kind of node of the graph, where they are few and in one file."""
        tapes = [*self.tapes.values(), *self.earlier.values(), *([] if self._tape is None else [self._tape])]
        places = sorted({place for tape in tapes for place in tape.made.get(op, ())})
        is_clear = len({file for file, _ in places}) == 1 and len(places) <= _MOST_LINES
        return (places[0][0], tuple([line for _, line in places])) if is_clear else ("", ())

    def stop(self) -> None:
        """Ends what is going on."""
        self._left += [self.breaking] if self._tape is None else [self._tape, self.breaking]
        self._tape = None
        self.leave()

    def leave(self) -> None:
        """Ends what could not be ended before, such as within a backward."""
        if self._left:
            self._left = [mode for mode in self._left if not mode.stop()]

    def evaluated(self, root: int, target: Any) -> None:
        """Is given the targets of a loss without a gradient, of a net in evaluation."""
        first, step = self._last.get(root), self._step()
        kept = self.held_out.setdefault(root, [])
        if not self.on or first is None or not torch.is_tensor(target) or len(kept) >= _MOST_BATCHES:
            return
        size = first.numel() * first.element_size()
        fits = self._bytes + size <= _MOST_BYTES and target.shape[:1] == first.shape[:1]
        if fits and self._evaluated.setdefault(root, step) == step:
            self._bytes += size
            kept.append((first.detach().clone(), target.detach().clone()))

    def loss(self, arguments: Any, root: int, name: str, given: Mapping[str, Any]) -> None:
        """Is given what a root was called with, and a loss function that was called after it.

        Of several calls in a step, one of them may be what the loss is of: rows and labels can't be told to belong.
        """
        target = given.get("target") if self.on and len(self._given.get(root, ())) < 2 else None
        first = next((one for one in _numbers(arguments) if one.dim()), None)
        if first is None or not isinstance(target, torch.Tensor) or target.requires_grad or not target.dim():
            return
        kept = self.batches.setdefault(root, [])
        size = first.numel() * first.element_size() + target.numel() * target.element_size()
        if len(kept) >= _MOST_BATCHES or self._bytes + size > _MOST_BYTES or target.shape[0] % max(first.shape[0], 1):
            return
        self._bytes += size
        rest = {
            key: value.detach() if isinstance(value, torch.Tensor) else value  # a variance has the graph of its step
            for key, value in given.items()
            if key not in ("input", "target")
        }
        made = given["input"].detach() if isinstance(given.get("input"), torch.Tensor) else torch.empty(0)
        shares = name == "binary_cross_entropy" and made.dim() == 2 and bool(((made.sum(1) - 1).abs() < _OF_ONE).all())
        seen = {"target": target.detach().clone(), "shape": tuple(made.shape), "shares": shares}
        kept.append((first.detach().clone(), name, {**seen, **rest}))


def _is_fused(module: torch.nn.Module) -> bool:
    """Whether a part of a net, out of training, has other last bits where a mode is on."""
    return any(isinstance(one, FUSED) and not one.training for one in module.modules())


def _numbers(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in plain containers; those of the user's own are not gone through."""
    if isinstance(value, torch.Tensor):
        if has_numbers(value) and value.layout is torch.strided and not value.is_nested:
            yield value
    elif type(value) in (list, tuple):
        for one in value:
            yield from _numbers(one)
    elif type(value) is dict:
        for one in value.values():
            yield from _numbers(one)


def numberings(dataset: Any) -> dict[str, dict[Any, int]]:
    """The attributes of a data set that number names."""
    while isinstance(dataset, torch.utils.data.Subset):
        dataset = dataset.dataset
    held = getattr(dataset, "__dict__", {}).items()
    return {
        f"{type(dataset).__name__}.{name}": dict(one)
        for name, one in held
        if type(one) is dict and _FEWEST_NAMES <= len(one) <= _MOST_NAMES
        and all(type(key) is str and type(number) is int for key, number in one.items())
        and {*one.values()} == {*range(min(one.values()), min(one.values()) + len(one))}
    }  # fmt: skip


def _same_memory(one: torch.Tensor, other: Any) -> bool:
    if not isinstance(other, torch.Tensor) or not one.numel():
        return False
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
