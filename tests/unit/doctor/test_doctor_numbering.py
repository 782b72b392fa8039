"""Names, numbers and tables of what a run is made of; none of it is kept alive."""

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.doctor.recorder import Doctor
from anybatch.doctor.recording.describing import held_by
from anybatch.doctor.recording.naming import variable_of
from anybatch.doctor.recording.numbering import Numbering
from anybatch.records.lines import Fact
from anybatch.records.runs import Run
from anybatch.records.tables import ParameterFacts
from doctor_programs import PROGRAMS


def numbered() -> tuple[Numbering, list[Fact]]:
    """Returns a numbering and what it emits."""
    found: list[Fact] = []
    return Numbering(found.append), found


def names(facts: list[Fact]) -> list[tuple[str, ...]]:
    """Returns the latest names of all parameters, in order."""
    return [one.names for one in Run(facts).parameters.values()]


def test_classes_that_are_made_for_each_model_count_as_one_and_are_freed() -> None:
    numbering, classes = numbered()[0], []
    for _ in range(300):
        model = type("Made", (torch.nn.Linear,), {})(1, 1)
        numbering.root(model)
        classes.append(weakref.ref(type(model)))
    assert numbering.is_one_of_many(model)
    del model
    gc.collect()
    assert [one for one in classes if one() is not None] == []


class Net(torch.nn.Module):
    """Has tied weights, a norm, a plain list, a plain dictionary and a module that is frozen in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.LayerNorm(3)
        self.layers = [torch.nn.Linear(3, 3)]
        self.parts = {"a": torch.nn.Linear(3, 3, bias=False)}
        self.scale = [torch.nn.Parameter(torch.zeros(2, 2))]
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.head.requires_grad = False  # type: ignore[assignment]


def test_names_roles_and_what_is_registered() -> None:
    numbering, found = numbered()
    assert numbering.root(Net()) == 0
    facts = Run(found).parameters
    by_name = {one.names[0]: one for one in facts.values()}
    assert by_name["embed.weight"].names == ("embed.weight", "head.weight")
    assert {name: one.role for name, one in by_name.items()} == {
        "scale[0]": "weight",
        "embed.weight": "embedding",
        "norm.weight": "norm",
        "norm.bias": "norm",
        "layers[0].weight": "weight",
        "layers[0].bias": "bias",
        "parts['a'].weight": "weight",
    }
    registered = {name for name, one in by_name.items() if one.registered}
    assert registered == {"embed.weight", "norm.weight", "norm.bias"}
    assert by_name["norm.weight"].constant == 1.0
    assert by_name["scale[0]"].constant == 0.0
    assert by_name["embed.weight"].constant is None
    root = Run(found).roots[0]
    assert {one.name: one.requires_grad for one in root.modules}["head"] is False
    assert {one.name for one in root.modules if not one.registered} == {"layers[0]", "parts['a']"}


def test_equal_rows_are_seen() -> None:
    numbering, found = numbered()
    layer = torch.nn.Linear(3, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
    numbering.root(layer)
    assert [one.equal_rows for one in Run(found).parameters.values()] == [True, False]


def test_several_roots_put_their_variable_in_front() -> None:
    with Doctor() as doctor:
        PROGRAMS["gan"]()
    found = [one.name for one in doctor.run.parameters.values()]
    assert found[0] == "generator.0.weight"
    assert found[4] == "critic.0.weight"
    assert [one.variable for one in doctor.run.roots.values()] == ["generator", "critic"]
    assert [one.variable for one in doctor.run.optimizers.values()] == ["for_critic", "for_generator"]


def test_a_model_that_is_found_around_a_known_part_takes_its_number() -> None:
    numbering, found = numbered()
    whole = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    assert numbering.root(whole[1]) == 0
    assert names(found) == [("weight",), ("bias",)]
    assert numbering.root(whole) == 0
    assert numbering.root_of(whole[1]) == 0
    assert names(found) == [("1.weight",), ("1.bias",), ("0.weight",), ("0.bias",)]
    assert len(Run(found).roots[0].modules) == 3


def test_a_parameter_of_an_optimizer_alone_is_named_by_its_place_or_variable() -> None:
    numbering, found = numbered()
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    numbering.optimizer(optimizer)
    assert names(found)[0][0].endswith("param_groups[0]['params'][0]")
    optimizer.add_param_group({"params": [torch.ones(3, requires_grad=True)], "lr": 0.5})
    assert numbering.optimizer(optimizer) == 0
    assert [len(one.parameters) for one in Run(found).optimizers[0].groups] == [1, 1]
    assert numbering.optimizer(optimizer) == 0
    assert sum(type(one).__name__ == "OptimizerFacts" for one in found) == 2


def test_nothing_is_kept_alive() -> None:
    numbering, _ = numbered()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbering.root(model)
    numbering.optimizer(optimizer)
    gone = [weakref.ref(one) for one in (model, optimizer, *model.parameters())]
    assert numbering.tensor(0) is not None
    del model, optimizer
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)
    assert numbering.tracked() == []


def test_numbers_are_not_given_twice_when_memory_is_used_again() -> None:
    numbering, _ = numbered()
    given = set()
    for _ in range(50):
        given.add(numbering.parameter(torch.nn.Parameter(torch.ones(3))))
    assert len(given) == 50


def test_looking_for_a_name_keeps_no_variable_of_the_user_alive(tmp_path: Path) -> None:
    """Before Python 3.13 a frame keeps what ``f_locals`` gave, and with it every tensor that was a variable."""
    script = tmp_path / "loop.py"
    script.write_text(
        "import weakref, torch\n"
        "def loop(numbering):\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    batch = torch.ones(3, 2)\n"
        "    gone = weakref.ref(batch)\n"
        "    number = numbering.root(model)\n"
        "    variable = numbering.models[0].variable\n"
        "    del batch\n"
        "    return gone() is None, variable\n"
        "def held(numbering):\n"
        "    config = locals()\n"
        "    before = dict(config)\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    numbering.root(model)\n"
        "    return before == config\n"
    )
    scope: dict[str, Any] = {}
    exec(compile(script.read_text(), str(script), "exec"), scope)
    assert scope["loop"](numbered()[0]) == (True, "model")
    if sys.version_info < (3, 13):
        assert scope["held"](numbered()[0])


def test_modules_that_hold_each_other_end() -> None:
    child, parent = torch.nn.Linear(1, 1), torch.nn.Sequential()
    parent.add_module("child", child)
    vars(child)["parents"] = [parent]
    assert [one.name for one in held_by(parent)] == ["", "child"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_every_precision_gets_a_table(dtype: torch.dtype) -> None:
    numbering, found = numbered()
    numbering.parameter(torch.nn.Parameter(torch.ones(2, 2, dtype=dtype)))
    assert isinstance(found[0], ParameterFacts)
    assert found[0].dtype == str(dtype).removeprefix("torch.")


def test_a_wrapped_model_has_the_users_names() -> None:
    numbering, found = numbered()
    numbering.root(torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(1, 1))))
    assert names(found) == [("0.weight",), ("0.bias",)]
    assert Run(found).roots[0].wrapper == "DataParallel"


def test_a_model_that_is_never_called_is_found_by_its_variable() -> None:
    with Doctor() as doctor:
        PROGRAMS["forward itself"]()
    assert doctor.failure == ""
    assert [one.variable for one in doctor.run.roots.values()] == ["model"]
    assert [one.name for one in doctor.run.parameters.values()] == ["weight", "bias"]


def test_a_function_that_evaluates_a_model_has_names() -> None:
    encoder = torch.nn.Linear(2, 2)
    encoder.eval()
    assert variable_of(encoder) == "encoder"


def test_variables_that_the_code_looks_at_itself_are_left_alone() -> None:
    encoder = torch.nn.Linear(2, 2)
    mine = locals()
    assert variable_of(encoder) in ("", "encoder")  # from Python 3.13 on these may be read
    assert mine["encoder"] is encoder
