"""A budget that is typed: what is read, and what is refused before the script runs."""

import click
import pytest

from anybatch.cli.plan import memory_of, plan_command


def read(value: str) -> str | float | None:
    context = click.Context(plan_command)
    return memory_of(context, plan_command.params[0], value)


@pytest.mark.parametrize("value", ["8", "24", "2.0"])
def test_a_budget_whose_unit_was_forgotten_is_refused(value: str) -> None:
    with pytest.raises(click.BadParameter, match=f"which is [0-9]+ bytes; expected a unit, such as {value}GiB"):
        read(value)


def test_other_budgets_are_taken() -> None:
    assert [read(value) for value in ("8GiB", "80B", "4096", "0.5", "50%", "free")] == [
        "8GiB", "80B", "4096", 0.5, 0.5, "free",
    ]  # fmt: skip
