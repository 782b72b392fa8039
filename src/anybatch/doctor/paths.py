"""why: which parameters a loss reaches, and what stopped the others."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from anybatch.doctor.following import Follower, Subject, explained, losses_of, subject_of
from anybatch.doctor.graphs import Graph, kept_by, nodes_behind, reentrant, terms_of
from anybatch.doctor.sites import Running
from anybatch.errors import LossError
from anybatch.records.paths import Paths, Stop
from anybatch.tensors.randomness import RandomState

_TABLES = ("_parameters", "_buffers", "_modules")


class Preserved:
    """Restores a model after experiments with it.

    Buffers are swapped for copies and attributes are restored by name, so that tensors saved for another backward are
    not written to. A parameter is copied only when it is about to be written to, since a forward rarely does that.

    Raises:
        LossError: a parameter is lazy and has no shape yet.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], parameters: Sequence[torch.Tensor]) -> None:
        if any(isinstance(parameter, (UninitializedParameter, UninitializedBuffer)) for parameter in parameters):
            raise LossError(
                "got a model with lazy parameters that have no shape yet; expected parameters that have values. "
                "Run the model once on a batch before you ask"
            )
        self._modules, self._parameters = modules, parameters
        self._copies: dict[int, torch.Tensor] = {}
        self._own = {id(parameter): parameter for parameter in parameters}

    def before_write(self, tensor: torch.Tensor) -> None:
        """Copies a tensor that is about to be written to, if it is a parameter or a view of one."""
        for own in (tensor, tensor._base):
            if own is not None and id(own) in self._own and id(own) not in self._copies:
                self._copies[id(own)] = own.detach().clone()

    @contextmanager
    def during(self) -> Iterator[None]:
        """Restores everything at the end of its block."""
        random = RandomState({parameter.device for parameter in self._parameters})
        leaves = self._parameters
        given = [(one, one.data, one.grad if one.is_leaf else None, one.requires_grad) for one in leaves]
        own = [vars(module) for module in self._modules if not isinstance(module, torch.jit.ScriptModule)]
        tables = [(one, dict(one)) for each in own for one in (each, *(each[name] for name in _TABLES))]
        try:
            for leaf, _, gradient, _ in given:
                if gradient is not None:
                    leaf.grad = None
            self._swap_buffers()
            yield
        finally:
            for entries, before in tables:
                entries.clear()
                entries.update(before)
            for one in reversed(given):
                self._restore(*one)
            random.restore()

    def _swap_buffers(self) -> None:
        copies: dict[int, torch.Tensor] = {}
        for module in self._modules:
            if module._buffers and not isinstance(module, torch.jit.ScriptModule):
                for name, buffer in module._buffers.items():
                    if buffer is not None and id(buffer) not in copies:
                        copies[id(buffer)] = buffer.detach().clone().requires_grad_(buffer.requires_grad)
                    module._buffers[name] = copies[id(buffer)] if buffer is not None else None

    def _restore(self, parameter: torch.Tensor, data: torch.Tensor, grad: Any, requires_grad: bool) -> None:
        with torch.no_grad():
            if (copy := self._copies.get(id(parameter))) is not None:
                data.copy_(copy)
            if not _same_memory(parameter, data):
                parameter.data = data
        if parameter.is_leaf:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape
    except RuntimeError:
        return True


_PASS_A_FUNCTION = "Pass a function instead: anybatch.why(lambda: loss_fn(model, batch), model)"


def why(loss: torch.Tensor | Callable[[], Any], model: Any) -> Paths:
    """Says for each parameter of a model whether a loss reaches it through autograd, and if not, what stopped it.

    With a function, the forward is followed operation by operation, so each cut has an operation, a module and a line.
    It is called once; afterwards weights, gradients, buffers, attributes and random state are bitwise unchanged. With a
    finished loss nothing runs: its graph shows which parameters are reached, except within reentrant checkpoints, but
    not what was cut. A parameter that is reached may still get a gradient of zero.

    Args:
        loss: a function without arguments that computes the loss (a tensor, a ``Mean``, a mapping of names to them,
            each also with metrics, or a generator), or the loss itself before its backward.
        model: a module, a list of modules, a mapping of names to modules or tensors, or ``named_parameters()``.

    Returns:
        The paths; printed, they are a tree.

    Raises:
        LossError: the loss is neither a tensor nor a function of one, or the model has lazy parameters or none at all.
        TypeError: the model is none of the above.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> x = torch.ones(4, 2)
        >>> paths = why(lambda: model[1](model[0](x).detach()).mean(), model)
        >>> paths.reached, paths.stopped["0.weight"].op, paths.stopped["0.weight"].after
        (('1.weight', '1.bias'), 'detach', 'linear in 0')
        >>> why(model[1](model[0](x).detach()).mean(), model).stopped["0.weight"].op
        'unknown'
    """
    subject = subject_of(model)
    if isinstance(loss, torch.Tensor):
        return _of_tensor(loss, subject)
    if not callable(loss):
        raise LossError(f"got {type(loss).__name__} as the loss; expected a tensor. {_PASS_A_FUNCTION}")
    return _of_function(loss, subject)


def _of_tensor(loss: torch.Tensor, subject: Subject) -> Paths:
    graph = Graph(subject.bits)
    mask = graph.of(loss) | _non_leaves(subject, [loss])
    hidden = sum(1 for node in graph.masks if reentrant(node))
    stopped = {
        name: _unknown(subject, name, loss, hidden)
        for name, parameter in subject.parameters.items()
        if not mask & subject.bits[id(parameter)]
    }
    notes = []
    if hidden:
        notes.append(f"{hidden} reentrant checkpoints hide which parameters are reached in them. {_PASS_A_FUNCTION}.")
    elif any(stop.op == "unknown" for stop in stopped.values()):
        notes.append(f"A finished loss does not show what was cut. {_PASS_A_FUNCTION}.")
    kept = kept_by([loss], {}, subject.fixtures)
    terms = terms_of(loss, graph)
    return Paths(subject.leaves(mask), stopped, False, terms, graph.outside, kept, tuple(notes))


def _unknown(subject: Subject, name: str, loss: torch.Tensor, hidden: int) -> Stop:
    if not subject.parameters[name].requires_grad:
        return Stop("requires_grad", subject.owner(name), message="Its requires_grad is False.")
    if loss.is_inference():
        return Stop("inference_mode", message="The loss was computed in inference mode.")
    sure = loss.requires_grad and not hidden
    return Stop("unknown", message="" if loss.requires_grad else "The loss has no graph at all.", sure=sure)


def _non_leaves(subject: Subject, losses: Iterable[torch.Tensor]) -> int:
    """Bits of tensors that were given as parameters though they are no leaves, and are in the graph."""
    own = {p.grad_fn: subject.bits[id(p)] for p in subject.parameters.values() if p.grad_fn is not None}
    mask = 0
    for node in nodes_behind(losses) if own else ():
        mask |= own.get(node, 0)
    return mask


def _of_function(function: Callable[[], Any], subject: Subject) -> Paths:
    bits = subject.bits
    running = Running(subject.modules)
    modules = list({id(module): module for module in subject.modules.values()}.values())
    preserved = Preserved(modules, list({id(p): p for p in subject.parameters.values()}.values()))
    follower = Follower(bits, running, preserved.before_write)
    with ExitStack() as stack:
        stack.enter_context(preserved.during())
        stack.enter_context(running.attached())
        if "torch._dynamo" in sys.modules:  # which takes seconds to load, and is there where anything was compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        with follower:
            losses = losses_of(function())
        tensors = [value for value in losses.values() if isinstance(value, torch.Tensor)]
        mask = _non_leaves(subject, tensors)
        for tensor in tensors:
            mask |= follower.graph.of(tensor)
        found = explained(losses, subject, follower, running, mask)
        return replace(found, kept=kept_by(tensors, follower.graph.places, subject.fixtures))
