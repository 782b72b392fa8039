"""Random computations: what is reached is what autograd gives a gradient, and every stop is one that was put there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import anybatch

PARAMETERS = 5
SIZE = 3


class Plus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return a + b

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, gradient


@dataclass(frozen=True)
class Operation:
    """Something that is done with one or two values.

    Args:
        run: what it does.
        stops: what the stop is called, empty if the graph goes on.
        both: whether it reads the second value.
        recomputes: whether it is a reentrant checkpoint, which stops where no input has a graph.
    """

    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    stops: str = ""
    both: bool = False
    recomputes: bool = False


def without_graph(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return a * b


def written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result = a.clone()
    result += b
    return result


def written_view(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result = torch.zeros(2, SIZE)
    result[0] = a
    result[1].add_(b)
    return result.sum(0)


def recomputed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, checkpoint(lambda x, y: torch.tanh(x) * y, a, b, use_reentrant=False))


def reentrant(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, checkpoint(lambda x: torch.tanh(x) * b, a, use_reentrant=True))


OPERATIONS = {
    "add": Operation(lambda a, b: a + b, both=True),
    "mul": Operation(lambda a, b: a * b, both=True),
    "tanh": Operation(lambda a, b: a.tanh()),
    "stack": Operation(lambda a, b: torch.stack([a, b]).mean(0), both=True),
    "where": Operation(lambda a, b: torch.where(torch.tensor([True, False, True]), a, b), both=True),
    "function": Operation(cast(Any, Plus).apply, both=True),
    "written": Operation(written, both=True),
    "written view": Operation(written_view, both=True),
    "checkpoint": Operation(recomputed, both=True),
    "reentrant": Operation(reentrant, "checkpoint", both=True, recomputes=True),
    "detach": Operation(lambda a, b: a.detach() + 1, "detach"),
    "data": Operation(lambda a, b: a.data * 2, "data"),
    "gt": Operation(lambda a, b: (a > 0).float(), "gt"),
    "argsort": Operation(lambda a, b: a.argsort().float(), "argsort"),
    "no_grad": Operation(without_graph, "no_grad", both=True),
    "tolist": Operation(lambda a, b: torch.tensor((a + 0.1234567).tolist()), "tolist"),
}
OPS = tuple(OPERATIONS)


@dataclass(frozen=True)
class Program:
    """A computation with numbered values; the first are the parameters, and the last before the steps a constant."""

    frozen: frozenset[int]
    steps: tuple[tuple[str, int, int], ...]
    loss: tuple[int, ...]

    def values(self, parameters: list[torch.Tensor]) -> torch.Tensor:
        values = [*parameters, torch.linspace(-1, 1, SIZE)]
        for name, a, b in self.steps:
            values.append(OPERATIONS[name].run(values[a % len(values)], values[b % len(values)]))
        return sum((values[i % len(values)].sum() for i in self.loss), torch.zeros(()))

    def expected(self) -> dict[int, set[str]]:
        """What may be said of each parameter, by rules of its own: empty if it is reached."""
        graph = [{i} - self.frozen for i in range(PARAMETERS)] + [set()]
        inside: list[dict[int, set[str]]] = [*({i: set[str]()} for i in range(PARAMETERS)), {}]
        read: set[int] = set()
        for name, first, second in self.steps:
            operation = OPERATIONS[name]
            sources = [first % len(graph), *([second % len(graph)] if operation.both else [])]
            stops = operation.stops and (not operation.recomputes or not graph[sources[0]])
            live = set[int]().union(*(graph[source] for source in sources))
            came: dict[int, set[str]] = {}
            for source in sources:
                for parameter, events in inside[source].items():
                    came.setdefault(parameter, set()).update(events)
            read |= set(came)
            if stops:
                for parameter in live:
                    came[parameter].add(operation.stops)
            graph.append(set() if stops else live)
            inside.append(came)
        used = [i % len(graph) for i in self.loss]
        reached = set[int]().union(*(graph[i] for i in used))
        answers: dict[int, set[str]] = {}
        for parameter in set(range(PARAMETERS)) - reached:
            events = set[str]().union(*(inside[i].get(parameter, set()) for i in used))
            answers[parameter] = (
                {"requires_grad"}
                if parameter in self.frozen
                else events or {"left out" if parameter in read else "unused"}
            )
        return answers


numbers = st.integers(0, 40)
programs = st.builds(
    Program,
    st.frozensets(st.integers(0, PARAMETERS - 1), max_size=2),
    st.lists(st.tuples(st.sampled_from(OPS), numbers, numbers), max_size=14).map(tuple),
    st.lists(numbers, min_size=1, max_size=3).map(tuple),
)


def parameters_of(program: Program) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        str(index): torch.nn.Parameter(torch.randn(SIZE), requires_grad=index not in program.frozen)
        for index in range(PARAMETERS)
    }


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@given(programs)
def test_what_is_reached_is_what_gets_a_gradient(program: Program) -> None:
    parameters = parameters_of(program)
    paths = anybatch.why(lambda: program.values(list(parameters.values())), parameters)
    loss = program.values(list(parameters.values()))
    of_tensor = anybatch.why(loss, parameters)
    try:
        if loss.requires_grad:
            loss.backward()
    except RuntimeError:  # a reentrant checkpoint may not read what has a graph without being given it
        reject()
    truth = {name for name, parameter in parameters.items() if parameter.grad is not None}
    assert set(paths.reached) == truth
    assert set(paths.stopped) == set(parameters) - truth
    assert set(of_tensor.reached) <= truth
    if not any(name == "reentrant" for name, _, _ in program.steps):
        assert set(of_tensor.reached) == truth


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@given(programs)
def test_every_stop_is_one_that_was_put_there(program: Program) -> None:
    parameters = parameters_of(program)
    paths = anybatch.why(lambda: program.values(list(parameters.values())), parameters)
    expected = program.expected()
    assert {int(name) for name in paths.stopped} == set(expected)
    for name, stop in paths.stopped.items():
        said = {stop.op, *(other.op for other in stop.others)}
        if stop.sure:
            assert said <= expected[int(name)], (name, stop, expected[int(name)])
        else:  # its numbers left, and what became of them can't be known
            assert expected[int(name)] == {"left out"}
            assert any(step[0] == "tolist" for step in program.steps)


def test_the_programs_have_every_kind_of_stop() -> None:
    steps = tuple((name, index % PARAMETERS, PARAMETERS) for index, name in enumerate(OPS))
    program = Program(frozenset(), steps, tuple(range(PARAMETERS + 1, PARAMETERS + 1 + len(steps))))
    assert not program.expected()
    alone = Program(frozenset(), (("detach", 0, 0),), (PARAMETERS + 1,))
    assert alone.expected() == {0: {"detach"}, **{index: {"unused"} for index in range(1, PARAMETERS)}}
