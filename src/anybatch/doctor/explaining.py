"""Why a loss does not reach a parameter of a model, and what its summands are, from an observed forward."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.doctor.following import Follower
from anybatch.doctor.graphs import Graph
from anybatch.doctor.sites import NOWHERE, Running, Site
from anybatch.doctor.values import NOTHING, Departure, Event, Summand, Value, joined
from anybatch.errors import LossError
from anybatch.records.means import Mean
from anybatch.records.paths import Cut, Leaf, Paths, Stop, Term


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
        text += "What is not known is whether that number is in the loss; no tensor brings the parameter there."
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
