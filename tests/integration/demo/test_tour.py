"""``anybatch demo --tour``: it runs the scripts that it shows, and ends where one does not end well."""

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from anybatch.cli import demo
from anybatch.cli.demo_screen import Screen
from anybatch.demo import touring
from anybatch.demo.touring import CHAPTERS, FOLDER, Chapter
from anybatch.report import pages

COLUMNS = 80


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_the_tour_runs_every_chapter_and_writes_one_page() -> None:
    arguments = [sys.executable, "-m", "anybatch", "demo", "--tour", "--json", "tour.json"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout, "control sequences in a pipe"
    for chapter in CHAPTERS:
        assert chapter.code in done.stdout
        assert chapter.title in done.stdout
    page = Path("anybatch-tour.html")
    assert pages.is_own_page(page)
    text = page.read_text(encoding="utf-8")
    assert "OPT_PARAM_STALE" in text
    assert "<iframe" in text
    assert "<svg" in text
    chapters = json.loads(Path("tour.json").read_text(encoding="utf-8"))["chapters"]
    outputs = {one["script"]: one["runs"][-1]["output"] for one in chapters}
    assert "AB103" in outputs["faulty.py"]
    assert "30: loss" in outputs["training.py"]
    assert not list(Path().glob("*.py")), "the scripts belong into a folder of their own"


def test_the_scripts_fit_a_terminal_of_80_columns_and_show_all_they_need() -> None:
    for chapter in CHAPTERS:
        assert max(len(line) for line in chapter.code.splitlines()) < COLUMNS
        assert any(chapter.script in command.split() for command in chapter.commands)
        compile(chapter.code, chapter.script, "exec")
    assert {path.name for path in FOLDER.glob("*.py")} == {chapter.script for chapter in CHAPTERS}


def test_a_command_gives_its_lines_as_they_come_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text("import sys\nprint('one')\nprint('two', file=sys.stderr)\nsys.exit(3)\n")
    seen: list[str] = []
    done = touring.run("python two.py", tmp_path, columns=70, on_line=seen.append)
    assert (seen, done.output, done.code) == (["one", "two"], "one\ntwo", 3)


def test_a_command_that_is_interrupted_does_not_go_on(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(
        "import time\nprint('here')\ntime.sleep(20)\nopen('left', 'w').close()\n", encoding="utf-8"
    )

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        touring.run("python long.py", tmp_path, columns=70, on_line=interrupt)
    assert not (tmp_path / "left").exists()


def test_a_chapter_that_fails_ends_the_tour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CHAPTERS", (Chapter("One", "It fails.", "exactness.py", ("python nothing.py",)),))
    with pytest.raises(click.ClickException, match="ended with 2"):
        demo.show_tour(Screen(Console()), Path("page.html"), None)
    assert not Path("page.html").exists()


def test_without_its_extra_the_tour_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "CHAPTERS", ())
    monkeypatch.setattr(demo, "missing_extra", lambda: "The page needs jinja2.")
    demo.show_tour(Screen(Console()), Path("page.html"), None)
    assert "The page needs jinja2." in capsys.readouterr().out
    assert not Path("page.html").exists()


@pytest.mark.parametrize("option", [("--quick",), ("--seconds", "3"), ("--memory", "9MiB"), ("--seed", "0")])
def test_options_of_the_other_demo_are_refused(option: tuple[str, ...]) -> None:
    done = CliRunner().invoke(demo.demo_command, ["--tour", *option])
    assert done.exit_code == 2
    assert f"got --tour and {option[0]}" in done.output


def test_a_page_of_somebody_else_is_not_overwritten() -> None:
    Path("anybatch-tour.html").write_text("mine", encoding="utf-8")
    done = CliRunner().invoke(demo.demo_command, ["--tour"])
    assert done.exit_code == 2
    assert Path("anybatch-tour.html").read_text(encoding="utf-8") == "mine"
