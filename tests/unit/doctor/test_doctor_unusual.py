"""Kinds of models and ways to train that are rarer: the recorder meets no error of its own, and disturbs none."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Doctor
from anybatch.records.events import Backward, Forward
from anybatch.records.lossfacts import LossCall
from anybatch.records.samples import NonFinite

STEPS = 40
PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    """Adds a program; it returns what must be the same under the doctor."""
    PROGRAMS[function.__name__] = function
    return function


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6), torch.randint(3, (8,))


def trained(
    model: Any, optimizer: torch.optim.Optimizer, after: Callable[[int], None] = lambda step: None
) -> list[Tensor]:
    for step in range(STEPS):
        inputs, labels = rows()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        after(step)
    return [parameter.detach().clone() for parameter in model.parameters()]


@program
def scripted() -> list[Tensor]:
    model: Any = torch.jit.script(perceptron())
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1))


@program
def scripted_in_part() -> list[Tensor]:
    model = perceptron()
    model[0] = torch.jit.script(model[0])
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1))


@program
def traced() -> list[Tensor]:
    model: Any = torch.jit.trace(perceptron(), torch.randn(8, 6))
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1))


@program
def traced_between_steps() -> list[str]:
    """As ``SummaryWriter.add_graph`` and the older export to ONNX do it."""
    model, graphs = perceptron(), list[str]()

    def trace(step: int) -> None:
        if step in (0, 3, 30, STEPS - 1):
            found: Any = torch.jit.trace(model, torch.randn(8, 6))
            graphs.append(re.sub(r"___torch_mangle_\d+\.", "", str(found.inlined_graph)))

    trained(model, torch.optim.SGD(model.parameters(), lr=0.1), trace)
    return graphs


@program
def transformed() -> list[Tensor]:
    """Weights in a dictionary, and a gradient that ``torch.func`` takes."""
    model = perceptron()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(STEPS):
        inputs, labels = rows()

        def loss(given: dict[str, Tensor], inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, given, (inputs,)), labels)

        gradients = torch.func.grad(loss)(weights)
        weights = {name: weight - 0.1 * gradients[name] for name, weight in weights.items()}
    return list(weights.values())


@program
def gradients_of_each_sample() -> list[Tensor]:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(weights: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (row[None],)), label[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    for _ in range(STEPS):
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        found = each(weights, *rows())
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.grad = found[name].clamp(-1, 1).mean(0)
        optimizer.step()
    return list(model.parameters())


def ensemble(base: nn.Module, look: Callable[[], object] = lambda: None) -> list[Tensor]:
    """Five models at once, whose weights are stacked; the module itself is only a skeleton."""
    members = [nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)) for _ in range(5)]
    stacked, _ = torch.func.stack_module_state(members)
    weights = {name: one.detach().requires_grad_() for name, one in stacked.items()}
    optimizer = torch.optim.Adam(weights.values(), 1e-2)
    call = torch.func.vmap(lambda given, x: torch.func.functional_call(base, given, (x,)), (0, None))
    for _ in range(STEPS):
        inputs, labels = rows()
        look()
        loss = F.cross_entropy(call(weights, inputs).flatten(0, 1), labels.repeat(5))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [one.detach() for one in weights.values()]


@program
def an_ensemble_on_meta() -> list[Tensor]:
    return ensemble(perceptron().to("meta"))


@program
def an_ensemble_of_a_module_that_also_runs_by_itself() -> list[Tensor]:
    base = perceptron()
    return ensemble(base, lambda: base(rows()[0]))


@program
def second_derivatives_between_steps() -> list[Tensor]:
    model, found = perceptron(), list[Tensor]()

    def look(step: int) -> None:
        if step % 10 == 5:
            inputs, labels = rows()
            weights: dict[str, Tensor] = dict(model.named_parameters())
            found.append(
                torch.func.hessian(lambda x: F.cross_entropy(torch.func.functional_call(model, weights, (x,)), labels))(
                    inputs
                ).detach()
            )
            found.append(torch.autograd.functional.jacobian(model, inputs))

    return [*trained(model, torch.optim.SGD(model.parameters(), lr=0.1), look), *found]


@program
def lazy() -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))
    model(rows()[0])
    return trained(model, torch.optim.Adam(model.parameters()))


@program
def complex_numbers() -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, dtype=torch.complex64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 4, dtype=torch.complex64)).abs().square().mean().backward()
        optimizer.step()
    return list(model.parameters())


@program
def steps_within_the_backward() -> list[Tensor]:
    model = perceptron()
    own = {id(parameter): torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}

    def update(parameter: Tensor) -> None:
        own[id(parameter)].step()
        own[id(parameter)].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        inputs, labels = rows()
        F.cross_entropy(model(inputs), labels).backward()
    return list(model.parameters())


@program
def jagged() -> list[Tensor]:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.nested.nested_tensor([torch.randn(2, 6), torch.randn(3, 6)], layout=torch.jagged)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch).values().square().mean().backward()
        optimizer.step()
    return list(model.parameters())


@program
def sparse_gradients() -> list[Tensor]:
    torch.manual_seed(0)
    words, head = nn.Embedding(50, 6, sparse=True), nn.Linear(6, 3)
    optimizers: list[Any] = [torch.optim.SparseAdam(list(words.parameters())), torch.optim.Adam(head.parameters())]
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(head(words(torch.randint(50, (8,)))), torch.randint(3, (8,))).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [*words.parameters(), *head.parameters()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_recorder_meets_no_error_and_changes_nothing(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = PROGRAMS[name]()
        with Doctor() as doctor:
            found = PROGRAMS[name]()
    assert doctor.failure == ""
    assert torch.overrides._get_current_function_mode() is None, "a mode of the doctor's is still on"
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert [finding.name for finding in doctor.findings if finding.severity == "error"] == []


@pytest.mark.parametrize("between", [traced_between_steps, second_derivatives_between_steps])
def test_the_steps_around_it_are_recorded_as_without_it(between: Callable[[], Any]) -> None:
    """Losses are seen to the end: an error in one of them would have the others left out."""
    with warnings.catch_warnings(), Doctor() as doctor:
        warnings.simplefilter("ignore")
        between()
    backwards = [fact for fact in doctor.run.of(Backward) if fact.function == "backward"]
    assert len(backwards) == STEPS
    assert all(fact.value and len(fact.loss_calls) == 1 for fact in backwards)
    assert sum(1 for fact in doctor.run.of(LossCall)) == STEPS


def test_a_lazy_model_is_known_once_it_has_its_shapes() -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(3))
    with Doctor(model) as doctor:
        model(rows()[0])
        trained(model, torch.optim.Adam(model.parameters()))
    assert doctor.failure == ""
    assert sum(1 for _ in doctor.run.of(Forward)) == STEPS
    assert sorted(fact.shape for fact in doctor.run.parameters.values()) == [(3,), (3, 16), (16,), (16, 6)]


@pytest.mark.parametrize("step", [3, 31])
def test_a_complex_gradient_that_is_not_finite_is_found(step: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Doctor() as doctor:
        for number in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4, dtype=torch.complex64)).abs().square().mean()
            if number == step:
                loss.register_hook(lambda gradient: gradient * float("nan"))
            loss.backward()
            optimizer.step()
    (found,) = doctor.run.of(NonFinite)
    assert found.step - found.late == step
    assert doctor.failure == ""


def test_an_input_that_is_expanded_beyond_all_memory_is_not_copied() -> None:
    with Doctor() as doctor, pytest.raises(RuntimeError, match="memory"):
        nn.Linear(64, 64)(torch.zeros(1, 64).expand(10**11, 64))
    assert doctor.failure == ""
