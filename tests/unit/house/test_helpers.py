"""What the tests share to be quick: no value of a parameter is left out, and no process that was forked stays."""

from pathlib import Path
from typing import Any

import pytest

from diagonals import diagonals
from forks import Call, run_forked_calls

AXES: tuple[list[Any], ...] = (["a", "b", "c", "d", "e"], [1, 2], [None, True], ["x", "y", "z"])


@pytest.mark.parametrize("each", [1, 2, 4])
def test_the_product_is_whole_and_each_value_is_on_a_diagonal(each: int) -> None:
    found = diagonals(*AXES, each=each)
    assert len({one.values for one in found}) == len(found) == 5 * 2 * 2 * 3
    quick = [one.values for one in found if not one.marks]
    assert 5 <= len(quick) <= 5 * each
    for number, axis in enumerate(AXES):
        assert {values[number] for values in quick} == set(axis)


def test_a_forked_process_that_does_not_end_is_killed_and_the_next_ones_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_forked_calls([Call("time", "sleep", [600], tmp_path / "sleeps")], seconds=0.2)
    monkeypatch.setenv("FORKED", "as here")
    calls = [
        Call("os", "system", ["echo $FORKED in $PWD"], tmp_path / "shell"),
        Call("operator", "truediv", [1, 0], tmp_path / "fails"),
    ]
    monkeypatch.chdir(tmp_path)
    run_forked_calls(calls, seconds=60)
    assert (tmp_path / "shell").read_text() == f"as here in {tmp_path}\n"
    assert "ZeroDivisionError" in (tmp_path / "fails").read_text()
