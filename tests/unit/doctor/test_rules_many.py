"""Runs of many models and optimizers, one after the other, are judged in a time that their number does not square."""

from collections.abc import Iterator
from typing import Any

import pytest

from anybatch.doctor.rules.registry import all_rules
from anybatch.records.runs import Run
from rule_runs import RunBuilder


def one_after_the_other(models: int) -> Run:
    built = RunBuilder()
    for number in range(models):
        parameters = built.model(root=number)
        built.optimizer(parameters, number=number)
        for _ in range(4):
            built.clear(number)
            built.forward(number)
            built.backward(parameters)
            built.step(number)
    return built.run


def passes_over_the_facts(models: int, monkeypatch: pytest.MonkeyPatch) -> int:
    run, calls, plain = one_after_the_other(models), list[int](), Run.of

    def counted(self: Run, *kinds: Any) -> Iterator[Any]:
        calls.append(1)
        return plain(self, *kinds)

    with monkeypatch.context() as patched:
        patched.setattr(Run, "of", counted)
        for rule in all_rules().values():
            rule.findings(run)
    return len(calls)


def test_the_facts_are_gone_through_in_proportion_to_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (passes_over_the_facts(models, monkeypatch) for models in (10, 40))
    assert many < 5 * few, (few, many)
