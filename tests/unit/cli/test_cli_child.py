"""What is shown of an error of a script, which a child process met within the library."""

import traceback
from functools import partial
from typing import Any

import torch

from anybatch.cli import child

LIBRARY = """
def runs(loss, again=None):
    try:
        return loss()
    except Exception:
        if again is None:
            raise
        return again()


def caught(taken_off, *losses):
    try:
        runs(*losses)
    except Exception as error:
        taken_off(error)
        return error
"""


MADE: dict[str, Any] = {}
exec(compile(LIBRARY, f"{child._PACKAGE}/planning/made.py", "exec"), MADE)


def read() -> None:
    raise KeyError("labels")


def with_cause() -> None:
    try:
        read()
    except KeyError as error:
        raise ValueError("no labels") from error


def while_handling() -> None:
    try:
        read()
    except KeyError:
        raise ValueError("no labels")  # noqa: B904


def within_the_library() -> None:
    try:
        MADE["runs"](read)
    except KeyError as error:
        raise ValueError("no labels") from error


def shown(*losses: Any) -> str:
    """What is shown of a loss that fails, or of another one that runs in its place."""
    return "".join(traceback.format_exception(MADE["caught"](child._take_off_own_frames, *losses)))


def test_what_led_to_an_error_of_the_script_is_shown() -> None:
    for loss in (with_cause, while_handling, within_the_library):
        text = shown(loss)
        assert "KeyError: 'labels'" in text
        assert text.index("KeyError") < text.index("ValueError: no labels")
    assert "made.py" not in shown(with_cause) + shown(while_handling)


def test_what_the_library_tried_before_is_not_shown() -> None:
    text = shown(with_cause, read)
    assert "ValueError" not in text
    assert "made.py" not in text
    assert text.count("Traceback") == 1


def of_torch() -> None:
    MADE["runs"](partial(torch.nn.functional.layer_norm, torch.zeros(2, 3), [4]))


def test_what_the_library_looks_at_an_operation_with_is_not_shown() -> None:
    text = shown(of_torch)
    assert "in of_torch" in text
    assert "made.py" not in text
    assert "functional.py" not in text


def test_errors_that_are_the_cause_of_each_other_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    child._take_off_own_frames(one)
