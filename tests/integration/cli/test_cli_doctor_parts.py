"""The parts of ``anybatch doctor``: its options, the frames it hides, what it writes."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from anybatch.cli import doctor as doctor_module
from anybatch.cli import doctor_child, launching
from anybatch.cli.doctor_records import completed, failed_severity, is_record, values_of
from anybatch.cli.launching import Finished
from anybatch.cli.main import VERBS, main
from anybatch.cli.options import Target
from anybatch.cli.reporting import Output, Outputs
from anybatch.doctor.frames import HiddenFrames, without_own_frames
from anybatch.records.diagnoses import Diagnosis
from anybatch.records.events import Ended, Stepped
from anybatch.records.findings import Finding
from anybatch.records.lines import to_line
from anybatch.records.runs import Run, load_run
from anybatch.records.tables import Started

TARGETS = {
    ("train.py",): ("train.py", ()),
    ("train.py", "--json", "x", "-o", "y"): ("train.py", ("--json", "x", "-o", "y")),
    ("--json", "out.json", "train.py", "--epochs", "1"): ("train.py", ("--epochs", "1")),
    ("--json=out.json", "-oreport.html", "train.py", "a"): ("train.py", ("a",)),
    ("train.py", "--", "--epochs", "1"): ("train.py", ("--epochs", "1")),
    ("train.py", "--", "--", "-x"): ("train.py", ("--", "-x")),
    ("train.py", "a", "--", "b"): ("train.py", ("a", "--", "b")),
    ("--", "train.py", "-m", "x"): ("train.py", ("-m", "x")),
    ("-m", "package.train", "--lr", "3"): ("-m package.train", ("--lr", "3")),
    ("-mpackage.train", "-m", "3"): ("-m package.train", ("-m", "3")),
    ("--active", "--every", "5", "-m", "package.train"): ("-m package.train", ()),
    ("--record", "-m.jsonl", "train.py"): ("train.py", ()),
    ("--fail-on", "error", "-m", "p", "--", "--json"): ("-m p", ("--json",)),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("arguments", TARGETS, ids=" ".join)
def test_options_before_the_script_are_the_doctors(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    seen: list[Target] = []

    def examine(target: Target, wishes: Any, place: Path) -> tuple[Finished, bool, bool]:
        seen.append(target)
        return Finished(0, 1.0, None), False, False

    monkeypatch.setattr(doctor_module, "_examine", examine)
    done = CliRunner().invoke(main, ["doctor", *arguments])
    assert done.exit_code == 0, done.output
    name, rest = TARGETS[arguments]
    command = (*name.split(" "), *rest)
    assert seen == [Target(name, command, rest)]


REFUSED = {
    (): "Missing argument",
    ("--jsn", "x", "train.py"): "No such option",
    ("missing.py", "--json", "x"): "'missing.py' does not exist. Options of anybatch doctor stand before the script",
    ("-m",): "Argument expected for the -m option",
    ("--json", "no/such/out.json", "train.py"): "does not exist; make it first",
    ("--record", "other.txt", "train.py"): "other.txt exists and is not a record that anybatch wrote",
    ("-o", "other.txt", "train.py"): "other.txt exists and is not a page that anybatch wrote",
    ("--fix", "--patch", "other.txt", "train.py"): "other.txt exists and is not a patch",
    ("--fail-on", "info", "train.py"): "Invalid value for '--fail-on'",
    ("--every", "0", "train.py"): "Invalid value for '--every'",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_what_is_wrong_is_refused_before_the_script_runs(folder: Path, arguments: tuple[str, ...]) -> None:
    (folder / "train.py").write_text("open('ran', 'w')", encoding="utf-8")
    (folder / "other.txt").write_text("mine", encoding="utf-8")
    done = CliRunner().invoke(main, ["doctor", *arguments])
    assert done.exit_code == 2
    assert REFUSED[arguments] in " ".join(done.output.split()), done.output
    assert not (folder / "ran").exists()
    assert (folder / "other.txt").read_text(encoding="utf-8") == "mine"


def test_every_verb_is_listed_with_its_own_help() -> None:
    listed = CliRunner().invoke(main, ["--help"]).output
    for name, help in VERBS.items():
        command = main.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        assert command.short_help == help
        assert help in listed


def hidden_module() -> ModuleType:
    """A module whose frames are the doctor's."""
    module = ModuleType("hidden")
    file = str(Path(doctor_child.__file__).parents[1] / "doctor" / "recorder.py")
    exec(compile("def call(function, *args):\n    return function(*args)\n", file, "exec"), vars(module))
    return module


def failing(depth: int) -> None:
    call = hidden_module().call
    if depth:
        try:
            call(call, failing, depth - 1)
        except (KeyError, ExceptionGroup) as error:
            raise KeyError(depth) from error
    parts: list[Exception] = [OSError("without frames")]
    try:
        call(int, "x")
    except ValueError as error:
        parts.append(error)
    raise ExceptionGroup("several", parts)  # which has them nowhere else


def test_frames_of_the_doctor_are_taken_out_everywhere() -> None:
    with pytest.raises(KeyError) as caught:
        hidden_module().call(hidden_module().call, failing, 2)
    error = caught.value
    shown = "".join(traceback.format_exception(error))
    assert shown.count("recorder.py") > 5
    hidden = HiddenFrames()
    before = traceback.walk_tb
    hidden.put_on()
    try:
        walked = "".join(traceback.format_exception(error))
    finally:
        hidden.take_off()
    assert traceback.walk_tb is before
    assert "".join(traceback.format_exception(error)) == shown
    without_own_frames(error)
    taken_out = "".join(traceback.format_exception(error))
    assert taken_out == walked
    assert "recorder.py" not in taken_out
    assert taken_out.count("in failing") == shown.count("in failing")
    assert "without frames" in taken_out


def test_frames_of_why_stay() -> None:
    import anybatch

    with pytest.raises(TypeError) as caught:
        anybatch.why(lambda: None, 3)
    before = len(traceback.extract_tb(caught.value.__traceback__))
    without_own_frames(caught.value)
    assert len(traceback.extract_tb(caught.value.__traceback__)) == before > 1


def test_an_exception_that_is_its_own_cause_ends_the_search() -> None:
    first, second = ValueError(1), ValueError(2)
    first.__context__, second.__cause__ = second, first
    without_own_frames(first)
    assert first.__traceback__ is None


def finished(code: int = 0, limit: float | None = None) -> Finished:
    return Finished(code, 2.0, limit)


HEAD = to_line(Started(script="t.py")) + "\n"
STEP = to_line(Stepped(optimizer=0, at=7, step=2)) + "\n"
RECORDS = {
    "ended": (HEAD + STEP + to_line(Ended(seconds=3.0, own_seconds=0.1, at=8, step=3)) + "\n", (8, 3.0, 3), ""),
    "died": (HEAD + STEP, (8, 0.0, 3), "was ended by SIGKILL"),
    "cut off": (HEAD + STEP + '{"kind":"step' + 500 * "x", (8, 0.0, 3), "was ended by SIGKILL"),
    "only a head": (HEAD, (1, 0.0, 2), "was ended by SIGKILL"),
    "half a head": (HEAD[:9], (0, 0.0, 1), "was ended by SIGKILL"),
    "nothing": ("", (1, 0.0, 2), "its Python did not load sitecustomize"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_gets_its_end(tmp_path: Path, name: str) -> None:
    text, expected, note = RECORDS[name]
    record = tmp_path / "run.jsonl"
    record.write_text(text, encoding="utf-8")
    notes = completed(record, tmp_path, Target("t.py", ("t.py",), ()), finished(-9))
    run = load_run(record)
    (ended,) = run.of(Ended)
    assert (ended.at, ended.seconds, len(run.facts)) == expected
    assert ended.exit_code == 137
    assert len(record.read_text(encoding="utf-8").splitlines()) == expected[2]
    assert note in " ".join(notes)
    assert bool(notes) == bool(note)
    assert is_record(record)


def test_numbers_that_are_not_finite_are_texts() -> None:
    finding = Finding("m", evidence={"a": float("nan"), "b": [float("-inf"), 1], "c": {2: (3,)}, "d": Path("x")})
    values = values_of(Diagnosis((finding,)), Run([]))
    assert json.loads(json.dumps(values, allow_nan=False))["findings"][0]["evidence"] == {
        "a": "nan", "b": ["-inf", 1], "c": {"2": [3]}, "d": "x",
    }  # fmt: skip


@pytest.mark.parametrize(("severity", "expected"), [("error", {"error": 1, "warning": 1}), ("warning", {"warning": 1})])
def test_fail_on_names_the_least_severity(severity: Any, expected: dict[str, int]) -> None:
    diagnosis = Diagnosis((Finding("m", severity="info"), Finding("n", severity=severity)))
    for fail_on in ("error", "warning"):
        assert failed_severity(diagnosis, fail_on) == bool(expected.get(fail_on))
    assert not failed_severity(diagnosis, None)
    assert not failed_severity(Diagnosis((Finding("m", severity="info"),)), "warning")


@pytest.mark.skipif(os.name != "posix", reason="modes and links")
def test_files_that_are_written_stay_what_they_are(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old", encoding="utf-8")
    target.chmod(0o640)
    link.symlink_to(target)
    Outputs(link).write({"new": 1})
    assert link.is_symlink()
    assert json.loads(target.read_text(encoding="utf-8")) == {"new": 1}
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    mask = os.umask(0o027)
    try:
        Outputs(tmp_path / "fresh").write({})
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "fresh").stat().st_mode) == 0o640
    Outputs(Path(os.devnull)).write({})
    assert not Path(os.devnull).is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "link", "target"]


def test_a_file_stays_as_it_was_where_the_new_one_can_not_be_written(tmp_path: Path) -> None:
    page, sarif = tmp_path / "page.html", tmp_path / "out.sarif"
    for path in (page, sarif):
        path.write_text("old", encoding="utf-8")
    letter_of_no_file = "\ud800"
    for outputs in (Outputs(None, page=page, force=True), Outputs(None, [Output("sarif", sarif)])):
        with pytest.raises(UnicodeEncodeError):
            outputs.write({}, page_of=lambda: letter_of_no_file, text_of=lambda name: letter_of_no_file)
    assert [path.read_text(encoding="utf-8") for path in (page, sarif)] == ["old", "old"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("way", ["_wait_for_signals", "_wait_with_handlers"])
def test_waiting_ends_with_the_script_or_with_its_time(way: str) -> None:
    wait = getattr(launching, way, None)
    if way == "_wait_for_signals" and not hasattr(signal, "sigtimedwait"):
        pytest.skip("this system can't wait for signals")
    assert wait is not None

    def started(code: str) -> Any:
        return lambda in_child: subprocess.Popen([sys.executable, "-c", code], preexec_fn=in_child)  # noqa: PLW1509

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    handler = signal.getsignal(signal.SIGTERM)
    assert wait(started("raise SystemExit(5)"), None) == (5, False, set())
    blocked = "import signal; raise SystemExit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    assert wait(started(blocked), None) == (len(mask), False, set())
    sleep = "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); time.sleep(60)"
    assert wait(started(sleep), time.monotonic() + 0.5) == (-2, True, set())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("way", ["_wait_for_signals", "_wait_with_handlers"])
def test_a_look_that_fails_leaves_the_script_alone_and_is_reported_once(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if way == "_wait_for_signals" and not hasattr(signal, "sigtimedwait"):
        pytest.skip("this system can't wait for signals")
    monkeypatch.setattr(launching, "_LOOKS", 0.01)
    looks: list[int] = []

    def look() -> bool:
        looks.append(1)
        raise OSError("no space left")

    code = "import time; time.sleep(0.5); raise SystemExit(5)"
    ended = getattr(launching, way)(
        lambda in_child: subprocess.Popen([sys.executable, "-c", code], preexec_fn=in_child),  # noqa: PLW1509
        None,
        look,
    )
    assert ended == (5, False, set())
    assert len(looks) > 1  # what --stop-on waits for may still come
    assert capsys.readouterr().err == "anybatch doctor: a look at the run failed: OSError: no space left\n"
