"""Follows a forward operation by operation, and says why a loss does not reach a parameter of the model."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.doctor.graphs import Graph
from anybatch.doctor.seeing import Seeing, name_of, writes
from anybatch.doctor.sites import NOWHERE, Running, Site, copying, custom_forward, distribution_drawing
from anybatch.doctor.values import (
    NOTHING,
    Departure,
    Event,
    Summand,
    Value,
    Values,
    joined,
    returning,
    sharing,
    tensors_in,
)
from anybatch.errors import LossError
from anybatch.records.means import Mean
from anybatch.records.paths import Cut, Leaf, Paths, Stop, Term
from anybatch.tensors.graph import in_backward
from anybatch.tensors.randomness import RandomState
from anybatch.userlines import user_place

_SUMS = frozenset({"add", "add_", "sub", "sub_", "rsub", "__radd__", "__rsub__", "__add__", "__sub__"})
_KEEP_TERMS = frozenset(
    (
        *("mul", "mul_", "div", "div_", "true_divide", "__rmul__", "__mul__", "__truediv__", "neg", "sum", "mean"),
        *("squeeze", "unsqueeze", "view", "reshape", "clone", "contiguous", "to", "float", "double", "half", "cpu"),
        *("bfloat16", "cuda"),
    )
)
_NUMBERS = {
    "item": "item", "tolist": "tolist", "numpy": "numpy", "__array__": "numpy", "__float__": "item",
    "__int__": "item", "__complex__": "item", "__dlpack__": "dlpack",
}  # fmt: skip
_CONSTRUCTORS = frozenset(
    {"tensor", "as_tensor", "asarray", "new_tensor", "scalar_tensor", "full", "fill_", "new_full"}
)
_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_FLAGS = frozenset({"requires_grad_", "requires_grad"})
_SHAPES_ONLY = frozenset(
    (
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros"),
        *("new_ones", "new_empty", "new_full", "new_empty_strided", "size", "dim", "numel", "backward", "grad"),
        *("register_hook", "retain_grad"),
    )
)

_MOST_TERMS = 100  # longer sums are one term from there on, so that a loop over time takes no quadratic time
_OTHER_IS_A_SHAPE = frozenset({"view_as", "expand_as", "reshape_as", "type_as"})
_ONE_BY_ONE = frozenset({"broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d"})


class Follower(Seeing):
    """Observes every operation that Python calls while it is entered, and each tensor before it is written to."""

    def __init__(self, bits: Mapping[int, int], running: Running, before_write: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._bits, self._running = bits, running
        self.before_write = before_write
        inside = weakref.WeakMethod(self._look_inside)  # a cycle would keep all nodes until Python looks for cycles
        # the graph of all results
        self.graph = Graph(bits, lambda node: 0 if (look := inside()) is None else look(node), lambda: running.name)
        self.values = Values()  # what is known of each tensor
        self.events: list[Event] = []  # the places where a graph ended
        self.departures: list[Departure] = []  # numbers taken out of tensors
        # of those on what is made of parameters: name, place, the bits of all, and of those in the result's graph
        self.operations: list[tuple[str, Site, int, int]] = []
        self.frozen: dict[int, Site] = {}  # where ``requires_grad`` was switched off, by the ``id`` of the tensor
        self._switched_off: tuple[str, int] = ("", 0)
        self._callers: dict[Any, str] = {}
        self._again = False

    def before(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """What is known of what an operation is given; ``None`` where nothing is to be noted."""
        name, of = name_of(func)
        if of == "__get__" and name not in _PROPERTIES:
            return None
        if name in _FLAGS and args and not (args[1] if len(args) > 1 else kwargs.get("requires_grad", True)):
            self.frozen[id(args[0])] = self._site()
        if of == "__set__" and name != "data":
            return None
        if name in _SHAPES_ONLY:
            return ("autograd.grad", args, kwargs, self._arriving(tensors_in(args[0])), ()) if name == "grad" else None
        if name == "_set_grad_enabled" and not args[0]:
            self._switched_off = user_place(2)
        if in_backward() and of != "__set__":
            return None
        tensors = list(tensors_in(*args, *kwargs.values()) if kwargs else tensors_in(*args))
        if name in _OTHER_IS_A_SHAPE:
            del tensors[1:]
        is_write = of == "__set__" or writes(name, kwargs)
        written = tuple(tensors_in(kwargs.get("out") if "out" in kwargs else args[:1])) if is_write else ()
        for tensor in written:
            self.before_write(tensor)
        came = self._arriving(tensors)
        addends = self._addends(args, came) if name in _SUMS else ()  # before one of them is written to
        return name, args, kwargs, came, written, addends

    def after(self, begun: tuple[Any, ...], result: Any) -> None:
        """Notes the result of an operation; gradients that are asked for without ``create_graph`` are constants."""
        name, args, kwargs, came, *rest = begun
        if name in _ONE_BY_ONE and isinstance(result, (list, tuple)) and len(result) == len(came):
            for one, other in zip(came, result, strict=True):
                self._note(name, args, kwargs, [one], other, ())
        elif name != "autograd.grad" or not any(one.requires_grad for one in tensors_in(result)):
            self._note(name, args, kwargs, came, result, *rest)

    def value_of(self, tensor: torch.Tensor) -> Value:
        """What is known of a tensor, including its own graph."""
        return self._with_graph(tensor)[0]

    def lost(self, event: Event) -> int:
        """Bits of the parameters that an event lost, except those that a custom ``autograd.Function`` passes on."""
        return event.bits & ~(self.graph.masks.get(event.context, 0) if event.context is not None else 0)

    def _with_graph(self, tensor: torch.Tensor) -> tuple[Value, int]:
        value = self.values.of(tensor)
        live = self.graph.of(tensor) if tensor.requires_grad else 0
        own = self._bits.get(id(tensor), 0)
        if value is NOTHING and not own:
            if self.departures and (shared := sharing(tensor, self.departures)) is not None:
                value = shared.value
            elif isinstance(tensor, torch.nn.Parameter):
                value = self._made_parameter(tensor)
        own |= live
        if own & ~value.params:
            value = Value(value.params | own, value.cuts, value.op, value.site, value.terms)
        return value, live

    def _made_parameter(self, parameter: torch.Tensor) -> Value:
        """A parameter that is made of a tensor is a leaf: the graph of the tensor ends there."""
        value = self.values.by_memory(parameter)
        if value.params:
            ended = {self.events[position].bits for position in value.cuts}
            lost = value.params
            for bits in ended:
                lost &= ~bits
            if lost:
                self.events.append(
                    Event("Parameter", self._site(), lost, f"{value.op} in {value.site.module}".removesuffix(" in "))
                )
                value = Value(value.params, value.cuts | {len(self.events) - 1}, value.op, value.site)
            self.values.put(parameter, value)
        return value

    def _arriving(self, tensors: Iterable[torch.Tensor]) -> list[tuple[Value, int]]:
        return [self._with_graph(tensor) for tensor in tensors]

    def _site(self) -> Site:
        return Site(self._running.name, *user_place(3))

    def _note(
        self, name: str, args: Any, kwargs: Any, came: list[tuple[Value, int]], result: Any,
        written: tuple[torch.Tensor, ...],
        addends: tuple[Summand, ...] = (),
    ) -> None:  # fmt: skip
        live = params = 0
        for value, alive in came:
            live |= alive
            params |= value.params
        results = (result,) if isinstance(result, torch.Tensor) else tuple(tensors_in(result))
        if self.departures:
            is_made, every = name in _CONSTRUCTORS, (*args, *kwargs.values())
            numbers = [value for value in every if not isinstance(value, torch.Tensor)]
            back = (d for one in numbers for d in returning(one, self.departures, constructor=is_made))
            came = [*came, *((d.value, 0) for d in back)]
            for value, _ in came:
                params |= value.params
        if not params and not addends and not any(value.terms for value, _ in came):
            return
        site = self._site()
        value = joined((value for value, _ in came), name, site)
        value.terms = addends or (self._terms(name, args, came, results[0]) if results else ())
        lost: dict[int, frozenset[int]] = {0: value.cuts}
        alive = 0
        for put, tensors in ((self.values.put, results), (self.values.wrote, written)):
            for tensor in tensors:
                of_it = self.graph.of(tensor)
                alive |= of_it
                if (missing := live & ~of_it) not in lost:
                    lost[missing] = value.cuts | {self._lose(name, site, missing, came)}
                put(tensor, Value(params, lost[missing], name, site, value.terms))
        if params:
            self.operations.append((name, site, params, alive))
        if name in _NUMBERS:
            if live:
                value.cuts |= {self._lose(name, site, live, came)}
            source = args[0] if _NUMBERS[name] in ("numpy", "dlpack") else None
            self.departures.append(Departure(_NUMBERS[name], result, value, params, source))

    def _lose(self, name: str, site: Site, lost: int, came: list[tuple[Value, int]]) -> int:
        """Notes that a graph ends here; the mode that is on is the cause where there is one, else the operation."""
        after = next((value for value, alive in came if alive & lost and value.op), NOTHING)
        op, inside, note, context = _NUMBERS.get(name, name), "", "", None
        if drawing := distribution_drawing():
            op, note = "sample", f"{drawing}.sample() draws without a gradient."
        elif name in ("detach", "data") and (copy := copying()):
            op, note = copy, "A copy has parameters of its own: they take the gradient, and those of the model do not."
        elif not torch.is_grad_enabled() and name not in ("detach", "detach_", "data"):
            forward = custom_forward()
            if forward is not None:
                op = inside = forward.name
                context = forward.context
                self._callers.setdefault(context, self._running.name_of(forward.module))
            else:
                op = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
                file, line = self._switched_off
                note = f"Gradients were switched off at {file}:{line}." if file and op == "no_grad" else ""
        before = f"{after.op}{f' in {after.site.module}' if after.site.module else ''}" if after.op else ""
        behind = frozenset().union(*(value.cuts for value, _ in came))
        self.events.append(Event(op, site, lost, before, inside, self._again, note, context, behind))
        return len(self.events) - 1

    def _terms(self, name: str, args: Any, came: list[tuple[Value, int]], result: torch.Tensor) -> tuple[Summand, ...]:
        """The summands of what was just made of a sum or of a stack of scalars."""
        if name in ("stack", "cat"):
            parts = args[0] if args and isinstance(args[0], (list, tuple)) else ()
            if not all(isinstance(part, torch.Tensor) and part.numel() == 1 for part in parts):
                return ()
            pairs = zip(parts, came, strict=False)
            return tuple(term for part, (value, live) in pairs for term in self._summands(part, value, live))
        if name not in _KEEP_TERMS or result.numel() != 1:
            return ()
        with_terms = [value.terms for value, _ in came if value.terms]
        return with_terms[0] if len(with_terms) == 1 and sum(1 for _, live in came if live) <= 1 else ()

    def _addends(self, args: Any, came: list[tuple[Value, int]]) -> tuple[Summand, ...]:
        """The summands of a sum of scalars that is about to be made."""
        if len(args) < 2 or any(isinstance(part, torch.Tensor) and part.numel() != 1 for part in args[:2]):
            return ()
        known = iter(came)
        found: list[Summand] = []
        for part in args[:2]:
            if isinstance(part, torch.Tensor):
                found.extend(self._summands(part, *next(known)))
            elif part:  # Python's own sum begins with 0
                left = next(returning(part, self.departures, constructor=False), None)
                value = left.value if left is not None else self._of_arrays(part)
                op = left.op if left is not None else value.op or "a number"
                found.append(Summand(part, 0, value.params, value.cuts, op, self._site(), False))
        return tuple(found)

    def _of_arrays(self, number: Any) -> Value:
        """What is known of the arrays taken out of tensors, for a number of NumPy, which is computed with some of them.

        Not so for a number of Python, which may be any constant.
        """
        left = [one.value for one in self.departures if one.op == "numpy" and one.value.params]
        is_of_numpy = hasattr(number, "__array_interface__") and not isinstance(number, torch.Tensor)
        return joined(left, "numpy", self._site()) if is_of_numpy and left else NOTHING

    def _summands(self, part: torch.Tensor, value: Value, live: int) -> tuple[Summand, ...]:
        if 0 < len(value.terms) < _MOST_TERMS:
            return value.terms
        copy = None if part.is_meta else part.detach().clone()
        site = value.site if value.op else self._site()
        has_graph = bool(live) or part.requires_grad
        return (Summand(copy, live, value.params, value.cuts, value.op or "a tensor", site, has_graph),)

    def _look_inside(self, node: Any) -> int:
        """Goes through a reentrant checkpoint again, with a graph, as its backward would."""
        inputs, before, running = list(node.inputs), self._again, self._running.name
        for position, tensor in zip(node.tensor_indices, node.saved_tensors, strict=True):
            inputs[position] = tensor.detach().requires_grad_(tensor.requires_grad)
        random = RandomState({tensor.device for tensor in tensors_in(inputs)})
        self._again, self._running.name = True, self._callers.get(node, running)
        try:
            with torch.enable_grad(), self:
                result = node.run_function(*inputs)
        finally:
            self._again, self._running.name = before, running
            random.restore()
        found = 0
        for tensor in tensors_in(result):
            found |= self.graph.of(tensor)
        return found


@dataclass(slots=True)
class Subject:
    """The parameters and modules of the model argument."""

    parameters: dict[str, torch.Tensor]  # by name; one that is tied has several
    modules: dict[str, torch.nn.Module]  # by name; the model itself has the name it was given, or none
    bits: dict[int, int]  # one for each parameter, by its ``id``

    @property
    def fixtures(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers."""
        yield from self.parameters.values()
        for module in self.modules.values():
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)

    def leaves(self, mask: int) -> dict[str, Leaf]:
        """Its parameters, of which a loss reaches those whose bits are in a mask."""
        return {
            name: Leaf(
                bool(mask & self.bits[id(p)]), p.requires_grad, p.is_leaf, not p.is_leaf and p.retains_grad, p.numel()
            )
            for name, p in self.parameters.items()
        }

    def owner(self, parameter: str) -> str:
        """The name of the module that a parameter belongs to."""
        name = parameter.rpartition(".")[0]
        return name if name in self.modules else ""


def subject_of(model: Any) -> Subject:
    """Reads the model argument of ``why``.

    Raises:
        TypeError: it is no module, iterable of modules, or mapping of names to modules or tensors.
        LossError: it has no parameters.
    """
    subject = Subject({}, {}, {})
    for name, item in _named(model):
        if isinstance(item, torch.nn.Module):
            for path, module in item.named_modules(prefix=name, remove_duplicate=False):
                subject.modules[path] = module
            subject.parameters.update(item.named_parameters(prefix=name, remove_duplicate=False))
        elif isinstance(item, torch.Tensor):
            subject.parameters[name] = item
        else:
            raise TypeError(_EXPECTED.format(got=f"{name!r}: {type(item).__name__}"))
    if not subject.parameters:
        raise LossError("got a model without parameters; expected at least one. Give the module that is to be trained")
    keys = dict.fromkeys(map(id, subject.parameters.values()))
    subject.bits = {key: 1 << position for position, key in enumerate(keys)}
    return subject


_EXPECTED = (
    "got {got} as the model; expected a torch.nn.Module, a list of them, or a mapping of names to modules or tensors. "
    "Write anybatch.why(loss, model)"
)


def _named(model: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(model, torch.nn.Module):
        return [("", model)]
    if isinstance(model, Mapping):
        return [(str(name), item) for name, item in model.items()]
    if isinstance(model, Iterable) and not isinstance(model, (str, bytes, torch.Tensor)):
        items = list(model)
        if items and all(isinstance(item, tuple) and len(item) == 2 for item in items):
            return [(str(name), item) for name, item in items]
        return [(str(position), item) for position, item in enumerate(items)]
    raise TypeError(_EXPECTED.format(got=type(model).__name__))


def losses_of(result: Any) -> dict[str, Any]:
    """The losses by name in the return value of a loss function; the name of a single one is empty.

    Raises:
        LossError: one is not a tensor, a number or a ``Mean``.
    """
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result = result[0]
    if isinstance(result, Mapping):
        return {str(name): _loss(value, str(name)) for name, value in result.items()}
    if isinstance(result, Iterator):
        named = (item if isinstance(item, tuple) else (f"loss_{i}", item) for i, item in enumerate(result))
        return {str(name): _loss(value, str(name)) for name, value in named}
    return {"": _loss(result, "")}


def _loss(value: Any, name: str) -> Any:
    if isinstance(value, Mean):
        value = value.total
    if isinstance(value, (torch.Tensor, int, float)):
        return value
    raise LossError(
        f"got {type(value).__name__} as the loss; expected a tensor. Return the loss itself, as for anybatch.backward",
        name=name,
    )


_MOST_OTHERS = 4
_MOST_NAMES = 200
_CHOICES = frozenset(
    {"argmax", "argmin", "multinomial", "bernoulli", "argsort", "gt", "ge", "lt", "le", "eq", "ne", "__gt__", "__ge__",
     "__lt__", "__le__", "__eq__", "__ne__", "sign", "round", "floor", "ceil", "long", "int", "bool", "sample"}
)  # fmt: skip
"""Operations that never have a gradient, and draws."""


class Explanation:
    """Explains why a loss does not reach parameters."""

    def __init__(self, subject: Subject, follower: Follower, running: Running) -> None:
        self._subject, self._follower, self._running = subject, follower, running
        self._bits = subject.bits
        self._seen: dict[int, Stop] = {}

    def stop(self, name: str, loss: Value) -> Stop:
        """Where the path from a parameter to the loss ends."""
        parameter = self._subject.parameters[name]
        bit = self._bits[id(parameter)]
        if not parameter.requires_grad:
            site = self._follower.frozen.get(id(self._subject.parameters[name]), Site())
            return Stop(
                "requires_grad", self._subject.owner(name), site.file, site.line, message="Its requires_grad is False."
            )
        if loss.params & bit and (events := self._events(loss, bit)):
            # A choice, draw or comparison has no gradient and mostly is not meant to; who writes .item() is on the way.
            first, *others = [self._of_event(event) for event in sorted(events, key=lambda one: one.op in _CHOICES)]
            return replace(first, others=tuple(others[:_MOST_OTHERS]))
        departure = next((left for left in reversed(self._follower.departures) if left.bits & bit), None)
        if departure is not None:
            return self._departed(departure, bit)
        return self._left_out(bit) or self._unused(name)

    def _events(self, value: Value, bit: int) -> list[Event]:
        """The events on the way of one parameter; within a checkpoint those that its backward would meet."""
        found = [self._follower.events[position] for position in sorted(value.cuts)]
        found = [event for event in found if self._follower.lost(event) & bit]
        if any(event.inside == "checkpoint" for event in found):
            again = [event for event in self._follower.events if event.again and not event.inside and event.bits & bit]
            found = again or found
        return list(dict.fromkeys(found))

    def _of_event(self, event: Event) -> Stop:
        message = event.note
        if event.inside == "checkpoint":
            message = (
                "A reentrant checkpoint whose inputs need no gradient gives none to what is in it. "
                "Use checkpoint(..., use_reentrant=False)."
            )
        elif event.inside:
            message = f"The forward of {event.inside} read it without taking it as an argument."
        elif event.op == "Parameter":
            message = "A parameter made of a tensor is a leaf of its own."
        return Stop(event.op, *event.site, event.after, message)

    def _departed(self, departure: Departure, bit: int) -> Stop:
        left = departure.value
        site = left.site
        events = self._events(left, bit)
        if events and events[0].op != departure.op:
            stop = self._of_event(events[0])
            text = f"It left the tensors through {departure.op} at {site.file}:{site.line}. "
        else:
            stop, text = Stop(departure.op, *site, events[0].after if events else ""), ""
        text += "Whether the loss uses that number is not known; no tensor connects the parameter with the loss."
        return replace(stop, message=text, sure=False)

    def _left_out(self, bit: int) -> Stop | None:
        """The last operation with the parameter, if there is one; those with a graph come first."""
        if bit not in self._seen:
            operations = self._follower.operations
            with_graph = (op for op in reversed(operations) if op[3] & bit)
            last = next(with_graph, None) or next((op for op in reversed(operations) if op[2] & bit), None)
            if last is None:
                return None
            name, site = last[0], last[1]
            text = f"What was made of it is not in the loss; the last was {name}."
            self._seen[bit] = Stop("left out", *site, message=text)
        return self._seen[bit]

    def _unused(self, name: str) -> Stop:
        owner = self._subject.owner(name)
        modules, ran = self._subject.modules, self._running.ran
        if self._is_opaque(owner):
            text = "Its module runs outside of Python, where it can't be followed."
            return Stop("unknown", owner, message=text, sure=False)
        names = {id(modules[module]) for module in ran}
        if owner not in modules or id(modules[owner]) in names:
            return Stop("unused", owner, message="Nothing read it." if owner not in modules else
                        "Its module ran, but nothing read it.")  # fmt: skip
        parts = owner.split(".")
        outer = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        above = {
            ".".join(parts[:length]) for parts in (one.split(".") for one in ran) for length in range(len(parts) + 1)
        }
        idle = next((module for module in outer if module in modules and module not in above), owner)
        return Stop("unused", idle, message=f"The module {idle!r} did not run.")

    def _is_opaque(self, name: str) -> bool:
        parts = name.split(".")
        outer = ["", *(".".join(parts[:length]) for length in range(1, len(parts) + 1))]
        return any(isinstance(self._subject.modules.get(module), torch.jit.ScriptModule) for module in outer)


def explained(
    losses: Mapping[str, Any], subject: Subject, follower: Follower, running: Running, mask: int, *, cuts: bool = False
) -> Paths:
    """What an observed forward says of losses that reach the parameters of ``mask``; of each term with ``cuts``."""
    value = joined((_value(follower, loss) for loss in losses.values()), "", NOWHERE)
    explanation, leaves = Explanation(subject, follower, running), subject.leaves(mask)
    stopped = {name: explanation.stop(name, value) for name, leaf in leaves.items() if not leaf.reached}
    of_terms = subject if cuts else None
    terms = tuple(term for name, loss in losses.items() for term in _terms(name, loss, follower, of_terms))
    graph = Graph(subject.bits)  # the follower's has the leaves of everything that was made
    for loss in losses.values():
        if isinstance(loss, torch.Tensor):
            graph.of(loss)
    return Paths(leaves, stopped, True, terms if len(terms) > 1 else (), graph.outside)


def _value(follower: Follower, loss: Any) -> Value:
    if isinstance(loss, torch.Tensor):
        return follower.value_of(loss)
    return next((left.value for left in reversed(follower.departures) if left.number == loss), NOTHING)


def _terms(name: str, loss: Any, follower: Follower, subject: Subject | None) -> tuple[Term, ...]:
    """The summands of a loss, each with the parameters that autograd lost in it; the loss itself if it is no sum."""
    if not isinstance(loss, torch.Tensor):
        return (Term(float(loss), False, name or "a number"),)
    value, live = follower.value_of(loss), follower.graph.of(loss)
    whole = Summand(loss.detach(), live, value.params, value.cuts, name, value.site, loss.requires_grad)
    return tuple(_term(summand, follower, subject) for summand in value.terms or (whole,))


def _term(summand: Summand, follower: Follower, subject: Subject | None) -> Term:
    number = summand.value
    if isinstance(number, torch.Tensor):
        number = None if number.is_meta or number.numel() != 1 or number.is_complex() else float(number)
    elif number is not None:  # such as one of numpy's
        number = None if isinstance(number, complex) else float(number)
    lost = summand.params & ~summand.live
    events = {position: follower.events[position] for position in sorted(summand.cuts)}
    cutting = {position: event for position, event in events.items() if follower.lost(event) & lost}
    # What lies before another cut is none: with it gone, the other one would still end the graph.
    before = frozenset().union(*(event.behind - {position} for position, event in cutting.items()))
    last = [event for position, event in cutting.items() if position not in before] or list(cutting.values())
    last.sort(key=lambda event: -(follower.lost(event) & lost).bit_count())
    names = {} if subject is None else {name: subject.bits[id(one)] for name, one in subject.parameters.items()}
    cuts = tuple(
        Cut(event.op, event.site.file, event.site.line, tuple(
            [name for name, bit in names.items() if bit & lost & follower.lost(event)][:_MOST_NAMES]
        ))
        for event in last
    )  # fmt: skip
    by, site = cuts[0] if cuts else Cut(""), summand.site
    return Term(
        number, summand.has_graph, summand.op, site.module, site.file, site.line, summand.live.bit_count(),
        lost.bit_count() if cuts else 0, by.op, by.file, by.line, cuts if subject is not None else (),
    )  # fmt: skip
