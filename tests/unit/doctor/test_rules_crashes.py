"""Each crash that was explained becomes one finding of its own name, at the line that has to be changed."""

import pytest

from anybatch.doctor.diagnosing import diagnose
from anybatch.doctor.rules.crashes import CRASHES, OF_OTHER_FAMILIES
from anybatch.doctor.rules.registry import all_rules
from anybatch.records.events import Crashed
from number_runs import Training, fires, found, silent

KNOWN = [name for name in CRASHES if name != "UNCLASSIFIED"]


def crash(name: str, **values: object) -> Training:
    """A training that ended with an exception."""
    facts = {"error": "RuntimeError", "text": "it broke\nsecond line", "message": "h is of an earlier step.",
             "cause": "It was not detached.", "fix": "h = h.detach()", "module": "rnn", "tensor": "h",
             "file": "train.py", "line": 30, "code": "loss.backward()", **values}  # fmt: skip
    return Training(steps=3, after=(Crashed(name=name, **facts),))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", KNOWN)
def test_a_crash_fires_under_its_name_and_no_other(name: str) -> None:
    one = fires(crash(name).run(), name, "error")
    assert (one.message, one.fix, one.place.line, one.step) == ("h is of an earlier step.", "h = h.detach()", 30, 3)
    assert [other.name for other in diagnose(crash(name).run())] == [name]


@pytest.mark.parametrize("name", KNOWN)
def test_a_crash_is_quiet_of_another_name_or_none(name: str) -> None:
    silent(crash("ANOTHER").run(), name)
    silent(Training(steps=3).run(), name)


def test_the_line_that_has_to_be_changed_is_the_place() -> None:
    elsewhere = crash("INPLACE_ON_SAVED", evidence={"origin_file": "net.py", "origin_line": 7, "version": 2})
    (one,) = found(elsewhere.run(), "INPLACE_ON_SAVED")
    assert (one.place.file, one.place.line, one.evidence["raised_at"]) == ("net.py", 7, "train.py:30")
    assert one.evidence["version"] == 2


def test_codes_of_crashes_stay() -> None:
    rules = all_rules()
    assert [rules[name].code for name in CRASHES] == [f"AB{901 + number}" for number in range(len(CRASHES))]
    assert rules["BACKWARD_TWICE_STATE"].code == "AB901"
    assert rules["UNCLASSIFIED"].code == "AB929"
    assert set(OF_OTHER_FAMILIES) <= set(rules)


def test_unclassified_fires_for_an_error_of_the_script() -> None:
    (one,) = found(crash("", message="", fix="", cause="").run(), "UNCLASSIFIED")
    assert (one.severity, one.message) == ("info", "The script ended with RuntimeError: it broke")
    assert found(crash("OF_A_LATER_VERSION").run(), "UNCLASSIFIED")


def test_unclassified_is_quiet_for_known_crashes() -> None:
    silent(crash("OUT_OF_MEMORY").run(), "UNCLASSIFIED")
    silent(crash("LOSS_NO_GRAD").run(), "UNCLASSIFIED")
    silent(Training(steps=3).run(), "UNCLASSIFIED")
