"""Each parameter is in the right one of the four cells of "do gradients change, do parameters change"."""

import pytest
import torch

from anybatch import Doctor
from anybatch.doctor.diagnosing import cells
from anybatch.records.events import Backward, Stepped
from anybatch.records.runs import Run
from anybatch.records.samples import Norms, Written
from anybatch.records.tables import GroupFacts, OptimizerFacts, ParameterFacts, Root
from number_runs import Training


def one(grad: float | None, update: float, optimized: bool = True, **values: object) -> tuple[int, str]:
    """The cell of a single parameter."""
    facts = {"requires_grad": values.pop("requires_grad", True)}
    weight = ParameterFacts(parameter=0, names=("head.weight",), module="head", root=0, numel=6, **facts)  # type: ignore[arg-type]
    group = (GroupFacts(parameters=(0,) if optimized else (), lr=0.1),)
    norms = Norms(optimizer=0, parameters=(0,), grad=(grad,), weight=(2.0,), update=(update,), **values)  # type: ignore[arg-type]
    (cell,) = cells(Run([weight, OptimizerFacts(optimizer=0, groups=group), norms, norms]))
    return cell.cell, cell.why


@pytest.mark.parametrize(
    ("seen", "cell", "why"),
    [
        (one(0.1, 0.2), 1, ""),
        (one(0.1, 0.2, requires_grad=False), 1, "frozen in a part of the run"),
        (one(0.1, 0.0, optimized=False), 2, "in no optimizer"),
        (one(0.1, 0.0), 2, "the optimizer does not change it"),
        (one(None, 0.0), 3, "no gradient arrives"),
        (one(0.0, 0.0), 3, "gradient exactly zero"),
        (one(None, 0.0, requires_grad=False), 3, "frozen"),
        (one(0.0, 0.1), 4, "decay or momentum"),
        (one(None, 0.0, since=(0,)), 4, "written outside of the optimizer"),
    ],
)
def test_cells(seen: tuple[int, str], cell: int, why: str) -> None:
    assert seen == (cell, why)


def test_parameters_of_a_module_are_together_where_they_agree() -> None:
    table = [
        Root(root=0, variable="model"),
        *(ParameterFacts(parameter=n, names=(f"{m}.{k}",), module=m, root=0, numel=4)
          for n, (m, k) in enumerate([("a", "weight"), ("a", "bias"), ("b", "weight"), ("b", "bias")])),
        Norms(optimizer=0, parameters=(0, 1, 2, 3), grad=(1.0, 1.0, 1.0, None), weight=(1.0,) * 4,
              update=(0.1, 0.1, 0.1, 0.0)),
    ]  # fmt: skip
    found = cells(Run(table))
    assert [(cell.cell, cell.parameters) for cell in found] == [
        (1, ("a.weight", "a.bias")), (1, ("b.weight",)), (3, ("b.bias",))
    ]  # fmt: skip
    assert found[0].numel == 8


def test_gradients_that_shrink_are_marked() -> None:
    run = Training(grad=lambda step, layer: 0.1 * 10.0**-step if layer == 0 else 0.1).run()
    assert [cell.shrinking for cell in cells(run)] == [True, False, False]


def test_roots_are_told_apart() -> None:
    facts = [
        Root(root=0, variable="generator"),
        Root(root=1, variable="critic"),
        ParameterFacts(parameter=0, names=("generator.a.weight",), module="a", root=0),
        ParameterFacts(parameter=1, names=("critic.a.weight",), module="a", root=1),
    ]
    assert [cell.module for cell in cells(Run(list(facts)))] == ["generator.a", "critic.a"]


def test_without_samples_the_events_speak() -> None:
    facts = [
        ParameterFacts(parameter=0, names=("a.weight",), module="a"),
        ParameterFacts(parameter=1, names=("b.weight",), module="b"),
        ParameterFacts(parameter=2, names=("c.weight",), module="c"),
        OptimizerFacts(optimizer=0, groups=(GroupFacts(parameters=(0, 2), lr=0.1),)),
        Backward(touched=(0, 1)),
        Stepped(optimizer=0),
    ]
    assert [cell.cell for cell in cells(Run(list(facts)))] == [1, 2, 3]


@pytest.mark.parametrize(("optimizers", "expected"), [((), [1]), ((OptimizerFacts(optimizer=0),), [1, 2])])
def test_parameters_that_are_changed_by_hand_change(
    optimizers: tuple[OptimizerFacts, ...], expected: list[int]
) -> None:
    facts = [ParameterFacts(parameter=number, names=(f"a.{number}",), module="a", root=0) for number in range(6)]
    run = Run([*facts, *optimizers, Backward(touched=tuple(range(6))), Written(parameters=(0, 1))])
    assert [cell.cell for cell in cells(run)] == expected


def test_models_that_nobody_changes_stay() -> None:
    facts = [ParameterFacts(parameter=number, names=(f"{number}.a",), module="a", root=number) for number in range(2)]
    run = Run([*facts, Backward(touched=(0, 1)), Written(parameters=(0,))])
    assert [(cell.cell, cell.why) for cell in cells(run)] == [(1, ""), (2, "in no optimizer")]


@pytest.mark.parametrize("by_data", [True, False])
def test_updates_by_hand_are_seen_in_the_table(by_data: bool) -> None:
    layer = torch.nn.Linear(4, 2)
    with Doctor() as doctor:
        for _ in range(8):
            layer.zero_grad()
            layer(torch.randn(3, 4)).square().mean().backward()
            with torch.no_grad():
                for one in layer.parameters():
                    assert one.grad is not None
                    (one.data if by_data else one).add_(one.grad.data, alpha=-0.01)
    assert {cell.cell for cell in cells(doctor.run)} == {1}
