"""Each kind of crash, really provoked: the right finding, the user's line, and the right tensor or module."""

import re
import warnings
from pathlib import Path

import pytest

from anybatch.doctor.crashes import prefix, table
from anybatch.doctor.rules.crashes import CRASHES, OF_OTHER_FAMILIES
from crash_running import SCRIPTS, crash
from crash_scripts import questions, slips, unseen
from crash_scripts.expected import EXPECTED


def test_every_script_has_an_expectation() -> None:
    assert SCRIPTS.keys() == EXPECTED.keys()
    assert ALL.keys() == SAID.keys()
    assert len({name for name, _ in EXPECTED.values()}) >= 20


ALL = SCRIPTS | unseen.SCRIPTS | questions.SCRIPTS | slips.SCRIPTS
SAID = EXPECTED | unseen.EXPECTED | questions.EXPECTED | slips.EXPECTED


@pytest.mark.parametrize("recorded", [False, True], ids=["alone", "recorded"])
@pytest.mark.parametrize("script", SAID)
def test_a_crash_is_explained(script: str, recorded: bool, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        crashed, lines = crash(tmp_path, ALL[script], recorded=recorded)
    name, fields = SAID[script]
    assert crashed.name == name, crashed
    assert crashed.message
    assert crashed.fix
    assert lines[crashed.line - 1].endswith("# CRASH"), crashed
    assert crashed.code == lines[crashed.line - 1].removesuffix("# CRASH").strip()
    assert crashed.file == str(tmp_path / "train.py")
    for field, wanted in fields.items():
        value = getattr(crashed, field)
        found = wanted in value if field != "parameters" else wanted in list(value)
        assert found, f"{field}: {value!r} has no {wanted!r}"
    text = prefix(crashed)
    assert f"train.py:{crashed.line}" in text
    assert crashed.message.splitlines()[0] in text


@pytest.mark.parametrize("mark", ["CUT", "CHANGE"])
def test_the_line_to_be_changed_is_told_too(mark: str, tmp_path: Path) -> None:
    marked = {name: text for name, text in ALL.items() if f"# {mark}" in text}
    assert len(marked) >= 4
    for name, text in marked.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            crashed, lines = crash(tmp_path, text)
        line = crashed.evidence["origin_line"]
        assert lines[line - 1].endswith(f"# {mark}"), (name, crashed)
        assert str(crashed.evidence["origin_code"]) in lines[line - 1]


def test_the_table_is_whole() -> None:
    """Each row has a known name, and texts that its question can fill; each but the plain ones is given a question."""
    for kind in table():
        assert kind.name in CRASHES + OF_OTHER_FAMILIES, kind.name
        assert kind.message
        assert kind.fix
        for pattern in kind.patterns:
            re.compile(pattern)


def test_of_an_error_that_nobody_knows_the_tensors_of_its_line_are_told(tmp_path: Path) -> None:
    crashed, _ = crash(tmp_path, "x = torch.zeros(2, 3)\nx.new_odd_method_of_mine(x)  # CRASH\n")
    assert (crashed.name, prefix(crashed)) == ("", "")
    assert "x [2, 3] float32 on cpu" in crashed.message
    assert crashed.fix == ""
