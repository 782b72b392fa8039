"""``anybatch demo`` as it is typed: what it writes, what it refuses, how it ends."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from anybatch.cli import demo as command
from anybatch.demo import comparison, corpus
from anybatch.demo.training import TrainingRun
from anybatch.records.plans import Plan
from anybatch.report import pages
from anybatch.units import format_bytes

STAGES = ("1. The plan", "2. The gradient", "3. Training", "4. What the model writes", "entropy of a single byte: 4.")
PAGE = Path("anybatch-demo.html")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def remembered_plan(monkeypatch: pytest.MonkeyPatch, plans: dict[Any, Plan]) -> None:
    """Plans once for all tests that are about something else."""
    plan_update = comparison.plan_update

    def remembered(model: Any, batch: Any, settings: Any, memory: int | None) -> Plan:
        if (settings.samples, memory) not in plans:
            plans[settings.samples, memory] = plan_update(model, batch, settings, memory)
        return plans[settings.samples, memory]

    monkeypatch.setattr(comparison, "plan_update", remembered)


@pytest.fixture(scope="module")
def plans() -> dict[Any, Plan]:
    return {}


def invoke(*arguments: str, samples: int = 11) -> Result:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(command, "_QUICK_SAMPLES", samples)
        patched.setattr(command, "_SAMPLE_BYTES", 5)
        return CliRunner().invoke(command.demo_command, ["--quick", *arguments], catch_exceptions=False)


@pytest.mark.usefixtures("remembered_plan")
def test_the_command_trains_and_writes_what_it_says() -> None:
    done = invoke("--updates", "3", "--json", "found.json", samples=19)
    assert done.exit_code == 0, done.output
    assert str(PAGE.absolute()) in done.output.replace("\n", "")
    assert pages.is_own_page(PAGE)
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    assert found["comparison"]["split"]["error"] <= found["comparison"]["bound"]
    assert len(found["training"]["losses"]) == 3
    assert found["sample"] == ""  # after three updates it would be noise
    assert "Left out" in done.output
    for piece in STAGES:
        assert piece in done.output
    assert "\x1b" not in done.output  # no bar and no colour where output is piped


def test_json_has_standard_output_for_itself_and_runs_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "unigram_entropy", lambda text: 99.0)  # of which the model knows more
    first, second = invoke("--updates", "2", "--json", "-"), invoke("--updates", "2", "--json", "-")
    assert first.exit_code == second.exit_code == 0
    losses = [json.loads(done.stdout)["training"]["losses"] for done in (first, second)]
    assert losses[0] == losses[1]
    assert json.loads(first.stdout)["sample"].startswith("def ")
    assert "The gradient" in first.stderr


def test_the_plan_and_both_peaks_are_shown_for_the_memory_that_was_asked_for() -> None:
    done = invoke("--updates", "2", "--memory", "16MiB", "--json", "found.json", samples=19)
    assert done.exit_code == 0, done.output
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    plan, measured = found["plan"], found["training"]["peak_bytes"]
    assert plan["budget"] == found["comparison"]["memory_bytes"] == 16 * 2**20
    assert measured <= plan["budget"]
    assert 0.9 * plan["chosen"]["peak_bytes"] < measured < 1.0001 * plan["chosen"]["peak_bytes"]
    assert found["training"]["micro_batches"] == plan["chosen"]["micro_batches"]
    text = " ".join(done.output.split())
    assert "simulated budget of 16.0 MiB" in text
    assert f"held at most {format_bytes(measured)} of tensors" in text
    assert f"predicted were {format_bytes(plan['chosen']['peak_bytes'])}" in text


def test_it_runs_beside_the_main_thread() -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(invoke("--updates", "1").exit_code))
    thread.start()
    thread.join()
    assert codes == [0]


def test_too_little_memory_ends_with_1_and_says_how_much_it_takes() -> None:
    done = invoke("--memory", "1MiB", "--json", "found.json")
    assert done.exit_code == 1
    assert "MiB" in done.output
    assert not Path("found.json").exists()
    assert not PAGE.exists()


@pytest.mark.usefixtures("remembered_plan")
def test_a_page_of_somebody_else_is_overwritten_only_by_force() -> None:
    page = Path("mine.html")
    page.write_text("<p>mine</p>", encoding="utf-8")
    done = invoke("--updates", "1", "-o", str(page))
    assert (done.exit_code, page.read_text(encoding="utf-8")) == (2, "<p>mine</p>")
    assert "--force" in done.output
    assert STAGES[0] not in done.output  # nothing has been computed in vain
    assert invoke("--updates", "1", "-o", str(page), "--force").exit_code == 0
    assert invoke("--updates", "1", "-o", str(page)).exit_code == 0  # its own page
    assert pages.is_own_page(page)
    assert not PAGE.exists()


@pytest.mark.parametrize("option", ["-o", "--json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_training(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("held").write_text("", encoding="utf-8")
    access = os.access
    # The administrator may write any file, so that its mode alone would not do.
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != ("held", os.W_OK) and access(path, mode))
    done = invoke(option, "held", "--force")
    assert done.exit_code == 2
    assert "'held' is not writable" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--updates", "0"], "0"),
        (["--memory", "lots"], "got 'lots'; expected a number of bytes"),
        (["-o", "nowhere/page.html"], "does not exist"),
        (["-o", "empty"], "is a directory"),
        (["--json", "nowhere/found.json"], "does not exist"),
        (["--sources", "empty"], "got 0 Python files"),
        (["--sources", "nowhere"], "nowhere"),
    ],
)
def test_wrong_usage_ends_with_2_before_anything_runs(arguments: list[str], said: str) -> None:
    Path("empty").mkdir()
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert said in done.output
    assert not PAGE.exists()
    assert not Path("found.json").exists()


def test_ctrl_c_before_training_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "plan_update", stop)
    done = invoke("--json", "found.json")
    assert done.exit_code == 130
    assert "Stopped" in done.output
    assert not PAGE.exists()
    assert not Path("found.json").exists()


@pytest.mark.usefixtures("remembered_plan")
def test_ctrl_c_in_training_keeps_what_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    update = TrainingRun._update

    def interrupted(run: TrainingRun) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return update(run)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(TrainingRun, "_update", interrupted)
    done = invoke("--updates", "50", "--json", "found.json")
    assert done.exit_code == 0, done.output
    assert "Stopped early." in done.output
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))["training"]
    assert (found["stopped_early"], len(found["losses"])) == (True, 1)
    assert PAGE.exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_help_imports_no_torch() -> None:
    code = """
import sys
from anybatch.cli.demo import demo_command
try:
    demo_command(["--help"], prog_name="anybatch demo")
except SystemExit as stop:
    sys.exit(stop.code or ("torch was imported" if "torch" in sys.modules else 0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout
