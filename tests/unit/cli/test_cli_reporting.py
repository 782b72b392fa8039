"""``--format``, ``--select``, ``--ignore``, ``--baseline``, ``--quiet``: one behaviour for all commands that report."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from anybatch.cli.main import main
from anybatch.records.lines import to_line
from test_doctor_policy import run_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [to_line(one) for one in run_of(str(tmp_path / "train.py")).facts]
    Path("run.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    Path("train.py").write_text("import a\n\n\noptimizer = a.SGD()\n", encoding="utf-8")
    return tmp_path


def report(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(main, ["report", "run.jsonl", *arguments])
    assert result.exit_code == code, result.output
    return result


def test_several_formats_at_once(folder: Path) -> None:
    result = report("--format", "line", "--format", "sarif=out.sarif", "--format=junit=out.xml", "--json", "out.json")
    assert result.stdout.startswith("train.py:4:1: error AB101 ")
    assert len(result.stdout.splitlines()) == 1
    assert json.loads(Path("out.sarif").read_text(encoding="utf-8"))["version"] == "2.1.0"
    assert Path("out.xml").read_text(encoding="utf-8").startswith("<?xml")
    assert json.loads(Path("out.json").read_text(encoding="utf-8"))["verdict"] == "faults"


def test_the_terminal_gets_the_report_unless_standard_output_is_taken(folder: Path) -> None:
    assert "Which gradients and parameters change" in report().stdout
    assert "Which gradients and parameters change" in report("--format", "sarif=out.sarif").stdout
    taken = report("--format", "sarif")
    assert json.loads(taken.stdout)["version"] == "2.1.0"
    assert taken.stderr == ""
    both = report("--format", "sarif", "--format", "terminal")
    assert json.loads(both.stdout) == json.loads(taken.stdout)
    values = report("--json", "-")
    assert json.loads(values.stdout)["kind"] == "anybatch diagnosis"
    assert "Which gradients and parameters change" in values.stderr
    assert "Which gradients and parameters change" in both.stderr


def test_quiet_is_quiet(folder: Path) -> None:
    assert report("-q").output.startswith("train.py:4:1: error AB101 ")
    assert report("-q", "--ignore", "AB101").output == ""


def test_what_is_selected(folder: Path) -> None:
    assert "AB101" in report("-q", "--select", "AB1").output
    assert report("-q", "--select", "AB5").output == ""
    Path("pyproject.toml").write_text('[tool.anybatch.doctor]\nignore = ["AB101"]\n', encoding="utf-8")
    assert report("-q").output == ""
    assert "(not reported: AB101)" in " ".join(report().output.split())


def test_a_baseline_is_written_once_and_then_compared_with(folder: Path) -> None:
    first = " ".join(report("--baseline", "known.json").output.split())
    assert "known.json has 1 finding now, which will not be reported." in first
    before = Path("known.json").read_bytes()
    Path("train.py").write_text("import a\nimport b\n\noptimizer = a.SGD()\n", encoding="utf-8")
    assert report("-q", "--baseline", "known.json").output == ""
    Path("train.py").write_text("import a\n\n\noptimizer = a.Adam()\n", encoding="utf-8")
    assert "AB101" in report("-q", "--baseline", "known.json").output
    assert Path("known.json").read_bytes() == before
    assert report("-q", "--baseline", "known.json", "--update-baseline").output == ""
    assert Path("known.json").read_bytes() != before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "html"], "got 'html'; expected one of terminal, sarif, github, junit, line"),
        (["--format", "terminal=a.txt"], "got 'terminal=a.txt'"),
        (["--format", "json"], "got 'json'; expected one of terminal, sarif"),
        (["--format", "github", "--format", "line"], "standard output takes one format"),
        (["--format", "line", "--json", "-"], "standard output takes one format"),
        (["--format", "sarif=nowhere/out.sarif"], "nowhere does not exist"),
        (["--update-baseline"], "--update-baseline needs the file"),
        (["--baseline", "run.jsonl"], "is no baseline of anybatch"),
        (["--ignore", "AB101,x"], "--ignore: got 'X'; expected a code"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, arguments: list[str], said: str) -> None:
    assert said in " ".join(report(*arguments, code=2).output.split())


def test_settings_that_are_wrong_are_refused(folder: Path) -> None:
    Path("pyproject.toml").write_text("[tool.anybatch.doctor]\nselects = []\n", encoding="utf-8")
    assert "got 'selects'; expected one of select, ignore" in " ".join(report(code=2).output.split())
