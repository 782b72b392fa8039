"""What the doctor says about trainings of other kinds than those that it was built with, and that it is silent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import anybatch
import unseen_programs as programs
from anybatch.doctor.ask.asking import run_probes
from anybatch.doctor.recorder import Doctor
from anybatch.records.events import Crashed
from anybatch.records.findings import Finding
from anybatch.records.samples import Written


def found_in(program: Callable[[], Any]) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    with Doctor(every=20) as doctor:
        program()
    return doctor.findings


@pytest.mark.parametrize(
    ("program", "name", "place"),
    [
        (programs.layer_made_in_the_first_forward, "OPT_PARAM_MISSING", "align"),
        (programs.thawed_without_the_optimizer, "OPT_PARAM_MISSING", "net.0"),
        (programs.temperature_of_nobody, "OPT_PARAM_UNREGISTERED", "scale"),
        (programs.frozen_but_carried_on, "FROZEN_MOVES", "net.0"),
        (programs.outputs_kept, "GRAPH_KEPT_IN_LOG", ""),
        (programs.penalty_without_a_graph, "LOSS_TERM_CUT", ""),
        (programs.closure_that_clears_nothing, "ZERO_GRAD_MISSING", "field"),
        (lambda: programs.closure_that_clears_nothing(adam_first=True), "ZERO_GRAD_MISSING", "field"),
        (programs.codes_by_chance, "GRAPH_CUT", "coder"),
        (programs.scores_into_nll, "LOSS_SIGN", ""),
        (programs.dropout_made_in_forward, "DROPOUT_ALWAYS_ON", ""),
        (programs.returns_of_numbers, "GRAPH_CUT", "policy"),
        (programs.teacher, "FROZEN_BN_DRIFT", "model.1"),
        (programs.evaluated_before_it_is_trained, "OPT_PARAM_MISSING", "net.0.0"),
    ],
)
def test_what_comes_first(program: Callable[[], Any], name: str, place: str) -> None:
    first = found_in(program)[0]
    assert (first.name, first.severity in ("error", "warning")) == (name, True), first
    where = {first.place.module, *first.place.parameters}
    assert not place or place in where, first.place


@pytest.mark.parametrize(
    "program",
    [
        lambda: programs.penalty_without_a_graph(create_graph=True),
        lambda: programs.closure_that_clears_nothing(clears=True),
        lambda: programs.closure_that_clears_nothing(clears=True, adam_first=True),
        lambda: programs.teacher(evaluating=True),
        programs.stepped_by_hand_beside_an_optimizer,
        programs.average_teacher,
        lambda: programs.evaluated_before_it_is_trained(part=True),
        programs.sequences_from_a_start_symbol,
    ],
    ids=[
        "penalty",
        "closure",
        "closure after Adam",
        "teacher",
        "by hand",
        "average",
        "a part in evaluation mode",
        "start symbol",
    ],
)
def test_a_healthy_one_has_no_error_and_no_warning(program: Callable[[], Any]) -> None:
    assert not [one for one in found_in(program) if one.severity != "info"]


def test_what_cuts_a_penalty_is_named_with_its_remedy() -> None:
    assert "create_graph=True" in found_in(programs.penalty_without_a_graph)[0].fix


def test_the_number_is_blamed_and_not_the_choice() -> None:
    first = found_in(programs.returns_of_numbers)[0]
    assert first.evidence["op"] == "item"


def test_outputs_are_told_from_losses() -> None:
    first = found_in(programs.outputs_kept)[0]
    assert first.message.startswith("Outputs of ")
    assert ".detach()" in first.fix


def test_updates_by_hand_are_recorded_at_each_look() -> None:
    torch.manual_seed(0)
    with Doctor() as doctor:
        programs.stepped_by_hand_beside_an_optimizer()
    assert {fact.parameters for fact in doctor.run.of(Written)} == {(0, 1, 2, 3)}


def test_samples_along_the_second_dim_mix_where_they_are_not_transposed() -> None:
    class Windows(nn.Module):
        def __init__(self, *, turned: bool) -> None:
            super().__init__()
            self.turned, self.f = turned, nn.Linear(12 * 3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.shape[1]
            x = x.transpose(0, 1) if self.turned else x
            out: torch.Tensor = self.f(x.reshape(rows, -1))
            return out

    for turned, expected in ((False, "yes"), (True, "no")):
        model = Windows(turned=turned)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Doctor() as doctor:
            for _ in range(4):
                x = torch.randn(12, 32, 3)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), (x.sum((0, 2)) > 0).long()).backward()
                optimizer.step()
        answers = {one.probe: one for one in run_probes(doctor)}
        assert answers["batch"].answer == expected, answers["batch"]
        assert answers["batch"].evidence.get("dim", 1) == 1
        assert answers["input"].answer == "no"


def test_a_parameter_that_was_computed_in_a_constructor_is_named() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 2)).exp()
            self.b = nn.Parameter(torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w + self.b

    layer = Layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    doctor = anybatch.Doctor(layer)

    def train() -> None:
        with doctor:
            for _ in range(3):
                optimizer.zero_grad()
                layer(torch.randn(8, 4)).mean().backward()
                optimizer.step()

    with pytest.raises(RuntimeError, match="second time"):
        train()
    (crash,) = doctor.run.of(Crashed)
    assert (crash.name, "`self.w`" in crash.message) == ("BACKWARD_TWICE", True)
    assert "nn.Parameter" in crash.fix
