"""How every verb ends: interrupted, without a place to write to, on what is no script, on records that are damaged."""

import json
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

import doctor_scripts
import forked_python
from anybatch.cli import options
from anybatch.cli.main import NOT_WRITTEN, VERBS, main
from anybatch.records.lines import to_line
from anybatch.records.runs import read_run
from anybatch.records.tables import Started
from source_tree import PACKAGE
from test_cli_report import FACTS

ANYBATCH = [sys.executable, "-m", "anybatch"]
SCRIPT = """
import sys
import torch
import anybatch
print("given", sys.argv[1:])
model = torch.nn.Linear(4, 2)
anybatch.backward(model, lambda model, batch: model(batch).square().mean(), torch.ones(8, 4))
"""
WILD: list[Any] = [None, True, "x", -1, 10**400, "nan", [], {}, [[]], {"a": 1}, [1, "b"]]


@pytest.mark.parametrize("verb", VERBS)
def test_ctrl_c_ends_every_verb_as_a_shell_expects(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = main.get_command(SimpleNamespace(), verb)  # type: ignore[arg-type]
    assert command is not None

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "invoke", interrupted)
    files = ("check", "doctor", "plan", "report", "tune", "watch")
    more = {"estimate": ["resnet50", "--memory", "8GiB"]} | {one: [__file__] for one in files}
    done = CliRunner().invoke(main, [verb, *more.get(verb, [])])
    assert (done.exit_code, "Aborted" in done.output) == (130, False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_and_has_a_code_of_its_own(tmp_path: Path) -> None:
    command = f"{sys.executable} -m anybatch explain AB101 > /dev/full"
    done = doctor_scripts.run(tmp_path, ["sh", "-c", command], PACKAGE.parent)
    assert done.code == NOT_WRITTEN
    assert done.err == "Error: the output can't be written: No space left on device\n"


def test_letters_that_the_terminal_does_not_have_are_written_as_escapes(tmp_path: Path) -> None:
    facts = [Started(script="caf\u00e9.py"), *FACTS[1:]]
    (tmp_path / "run.jsonl").write_text("".join(f"{to_line(fact)}\n" for fact in facts), encoding="utf-8")
    done = doctor_scripts.run(
        tmp_path, [*ANYBATCH, "report", "run.jsonl"], PACKAGE.parent, PYTHONIOENCODING="ascii", PYTHONUTF8="0"
    )
    assert done.code == 0, done.err
    assert "caf\\xe9.py" in done.out


def test_a_name_without_end_is_cut() -> None:
    done = CliRunner().invoke(main, ["explain", "x" * 100_000])
    assert done.exit_code == 2
    assert len(done.output) < 500


@pytest.mark.parametrize("verb", ["check", "plan", "doctor"])
def test_arguments_of_the_script_stand_behind_it_with_and_without_dashes(verb: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    for between in ([], ["--"]) if verb == "check" else ([],):
        arguments = [verb, "train.py", *between, "--epochs", "3", "--lr=0.1", "x"]
        done = forked_python.run([*ANYBATCH, *arguments], tmp_path)
        assert done.returncode == 0, done.stderr
        assert "given ['--epochs', '3', '--lr=0.1', 'x']" in done.stdout + done.stderr


def test_own_options_may_stand_behind_the_script_and_unknown_ones_not_before_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    arguments = ["check", "train.py", "--epochs", "3", "--json", "c.json"]
    assert forked_python.run([*ANYBATCH, *arguments], tmp_path).returncode == 0
    values = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert (values["version"], values["kind"], values["exact"]) == (1, "anybatch certificate", True)
    done = CliRunner().invoke(main, ["plan", "--memroy", "1GiB", str(tmp_path / "train.py")])
    assert (done.exit_code, "'--memory'" in done.output) == (2, True)


OPTIONS = "import argparse\np = argparse.ArgumentParser()\np.add_argument('-o', '--device', type=str)\n"


@pytest.mark.parametrize(("option", "value"), [("--device", "cuda"), ("-o", "out.html")])
@pytest.mark.parametrize("target", [("train.py",), ("-m", "lm.train")])
def test_an_option_that_the_script_has_too_is_not_taken_from_behind_it(
    target: tuple[str, ...], option: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "__init__.py").write_text("raise SystemExit('was imported')")
    for path in (tmp_path / "train.py", tmp_path / "lm" / "train.py"):
        path.write_text(OPTIONS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["plan", *target, option, value])
    text = " ".join(done.output.split())
    assert done.exit_code == 2
    assert f"{' '.join(target)} has an option {option}, too" in text
    assert f"behind --, as in: anybatch plan {' '.join(target)} -- {option} ..." in text


def test_an_option_that_may_be_the_scripts_is_said_to_be_taken(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    taken = "--json was taken by anybatch check; options of the script stand behind --"
    for words, says in (["--epochs", "3", "--json", "c.json"], True), (["--json", "c.json"], False):
        done = forked_python.run([*ANYBATCH, "check", "train.py", *words], tmp_path)
        assert (done.returncode, taken in done.stderr) == (0, says), done.stderr
    (tmp_path / "arguments.py").write_text("p.add_argument('--json')", encoding="utf-8")
    assert taken in forked_python.run([*ANYBATCH, "check", "train.py", "--json", "c.json"], tmp_path).stderr


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("HELP = {'--json': 'write a file'}", False),
        ("p = __import__('argparse').ArgumentParser()\np.add_argument('--lr')\nHELP = {'--json': 'a file'}", False),
        ("print('--json')", False),
        ("import sys\nif '--json' in sys.argv: pass", True),
        ("import click\n@click.option('--json')\ndef f(json): pass", True),
        ("import typer\nfile = typer.Option(None, '--json')", True),
    ],
)
def test_a_text_that_no_parser_is_given_is_no_option_of_the_script(line: str, refused: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(line, encoding="utf-8")
    context = click.Context(main, info_name="check")
    with pytest.raises(click.UsageError, match="has an option --json, too") if refused else nullcontext():
        options._check_behind(context, ["--json"], [str(script)])


def test_a_folder_is_no_file_for_a_page(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    done = CliRunner().invoke(main, ["plan", str(tmp_path / "train.py"), "-o", f"{tmp_path}/results/"])
    assert (done.exit_code, "is the name of a folder" in done.output) == (2, True), done.output


@pytest.mark.parametrize("verb", ["check", "plan", "doctor", "tune"])
def test_an_option_of_the_script_before_it_is_said_to_stand_behind_it(verb: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    done = CliRunner().invoke(main, [verb, "--lr", "0.1", str(tmp_path / "train.py")])
    text = " ".join(done.output.split())
    assert done.exit_code == 2
    assert f"options of the script stand behind it, as in: anybatch {verb} train.py --lr" in text
    assert "Did you mean" not in text


def test_an_empty_record_is_no_run(tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    record.write_text("")
    done = CliRunner().invoke(main, ["report", str(record)])
    assert (done.exit_code, "is empty" in done.output) == (2, True), done.output


def test_what_is_no_script_is_said_to_be_none(tmp_path: Path) -> None:
    folder = CliRunner().invoke(main, ["doctor", str(tmp_path)])
    assert (folder.exit_code, "a folder without a __main__.py" in folder.output) == (2, True)
    missing = doctor_scripts.doctor(tmp_path, "-m", "no_such_module_here")
    assert missing.code == 1
    assert "ended with exit code 1 and had not imported torch" in " ".join(missing.err.split())
    (tmp_path / "again.py").write_text("import os, sys\nos.execv(sys.executable, [sys.executable, '-c', ''])\n")
    replaced = doctor_scripts.doctor(tmp_path, "again.py")
    assert "by os._exit or os.exec" in " ".join(replaced.err.split())


def test_a_damaged_line_is_left_out_and_told_with_its_number(tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    lines = [to_line(fact).encode() for fact in FACTS]
    lines[5:5] = [b'{"kind": "stepped", "optimizer": "first"}', b"[1]", b"\xff", b"[" * 100_000]
    record.write_bytes(b"\n".join([*lines, b'{"kind": "stepped", "opt']))
    done = CliRunner().invoke(main, ["report", str(record)])
    text = " ".join(done.output.split())
    assert done.exit_code == 0, text
    assert "4 damaged lines of the record were left out: line 6: ['optimizer'] is 'first', expected an integer" in text
    assert "and 1 more" in text


@pytest.mark.parametrize("seed", range(4))
def test_no_damage_to_a_record_reaches_the_user_as_a_traceback(seed: int, tmp_path: Path) -> None:
    drawn = random.Random(seed)
    record = tmp_path / "run.jsonl"
    for _ in range(25):
        values = [json.loads(to_line(fact)) for fact in FACTS]
        for _ in range(3):
            spoil(drawn.choice(values), drawn)
        record.write_text("\n".join(map(json.dumps, values)), encoding="utf-8")
        done = CliRunner().invoke(main, ["report", str(record), "--json", str(tmp_path / "out.json")])
        assert done.exception is None or isinstance(done.exception, SystemExit), values
        assert done.exit_code in (0, 1, 2)


def spoil(values: Any, drawn: random.Random) -> None:
    """Puts something else in the place of an entry, or takes it out."""
    places = list(values) if isinstance(values, dict) else list(range(len(values)))
    if not places:
        return
    place = drawn.choice(places)
    if isinstance(values[place], (dict, list)) and drawn.random() < 0.6:
        spoil(values[place], drawn)
    elif isinstance(values, dict) and drawn.random() < 0.3:
        del values[place]
    else:
        values[place] = drawn.choice(WILD)


def test_repetitions_are_read_as_carefully_as_facts() -> None:
    lines = [to_line(fact) for fact in FACTS]
    for rows in ("[[1]]", '[["a", "b", "c"]]', "[[7, 30, 3, 3]]", '[[7, 30, 3, "x", "y"]]', "[[[4, 7], 30, 3, []]]"):
        run = read_run([*lines, f'{{"kind": "repeats", "at": 99, "rows": {rows}}}\n'])
        assert len(run.damaged) == 1, rows
    assert read_run([*lines, '{"kind": "repeats", "at": 99, "rows": [[7, 30, 3, 3, [0.5]]]}\n']).damaged == ()


@pytest.mark.parametrize("verb", ["check", "doctor", "plan", "tune"])
def test_a_notebook_is_no_script(verb: str, tmp_path: Path) -> None:
    (tmp_path / "train.ipynb").write_text("{}", encoding="utf-8")
    done = CliRunner().invoke(main, [verb, str(tmp_path / "train.ipynb")])
    assert done.exit_code == 2
    assert "train.ipynb is a notebook" in done.output
    assert "jupyter nbconvert --to script" in done.output
