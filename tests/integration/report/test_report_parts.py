"""Parts of the report: the user's line, one step of a loop, two records side by side, the memory of a step."""

from __future__ import annotations

import json
import linecache
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import anybatch
import forked_python
from anybatch.cli.main import main
from anybatch.doctor.samples.activations import Units, take
from anybatch.records.events import Backward, Cleared, Forward, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.lines import Fact, to_line
from anybatch.records.memory import Timeline
from anybatch.records.runs import Run
from anybatch.records.samples import PERCENTILES
from anybatch.report.comparison import Recorded, comparison_page
from anybatch.report.diagnosis_page import page
from anybatch.report.frontier import plan_page
from anybatch.report.loop import step_of_loop
from anybatch.report.source import link_to, source_of
from anybatch.report.svg import Axis
from diagnosis_samples import FAULTY, FILE, HEALTHY, MISSING, run_of
from plan_samples import PLAN

# The user's line.


def finding_at(path: Path, line: int, **more: object) -> Finding:
    return replace(MISSING, place=Place(file=str(path), line=line), evidence={}, **more)  # type: ignore[arg-type]


def test_the_line_is_shown_with_what_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("x = 1\n    optimizer = SGD(net.parameters(), lr=30)  # far too high\n", encoding="utf-8")
    found = source_of(finding_at(path, 2))
    assert found is not None
    assert found.marked == (
        "2 | optimizer = SGD(net.parameters(), lr=30)  # far too high\n  | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^"
    )
    found = source_of(replace(finding_at(path, 2), evidence={"lr": 30}))
    assert found is not None
    assert found.text[found.start : found.end] == "lr=30"
    patch = (
        f"--- {path}\n+++ {path}\n@@ -2 +2 @@\n-    optimizer = SGD(net.parameters(), lr=30)  # far too high\n"
        "+    optimizer = SGD(net.parameters(), lr=0.01)  # far too high\n"
    )
    found = source_of(finding_at(path, 2, patch=patch))
    assert found is not None
    assert found.text[found.start : found.end] == "30"


def test_a_line_that_may_be_another_one_by_now_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("loss.backward()\n", encoding="utf-8")
    written = path.stat().st_mtime
    assert source_of(finding_at(path, 1), since=written + 1) is not None
    os.utime(path, (written + 9, written + 9))
    assert source_of(finding_at(path, 1), since=written + 1) is None
    assert source_of(finding_at(path, 7)) is None
    assert source_of(finding_at(tmp_path / "gone.py", 1)) is None


def test_no_other_file_than_a_script_is_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("password\n", encoding="utf-8")
    assert source_of(finding_at(secret, 1)) is None  # whatever a record of somebody else's names


def test_the_line_of_a_cell_is_known_though_it_is_in_no_file() -> None:
    linecache.cache["/tmp/ipykernel_1/2.py"] = (9, None, ["loss.backward()\n"], "/tmp/ipykernel_1/2.py")
    try:
        found = source_of(finding_at(Path("/tmp/ipykernel_1/2.py"), 1))
        assert found is not None
        assert found.text == "loss.backward()"
        assert link_to(Place(file="/tmp/ipykernel_1/2.py", line=1)) == ""
    finally:
        del linecache.cache["/tmp/ipykernel_1/2.py"]


@given(st.text(max_size=80), st.text(max_size=80))
def test_any_line_can_be_shown(text: str, patch: str) -> None:
    linecache.cache["<any>"] = (9, None, [text.replace("\n", " ") + "\n"], "<any>")
    found = source_of(replace(MISSING, place=Place(file="<any>", line=1), patch=patch))
    if found is not None:
        assert 0 <= found.start < found.end <= len(found.text)
        assert found.marked.count("\n") == 1


def test_a_link_opens_the_line_and_is_no_other_address() -> None:
    assert link_to(Place(file="/home/me/a b.py", line=3)) == "vscode://file/home/me/a%20b.py:3"
    assert link_to(Place(file="train.py", line=3)) == ""
    assert link_to(Place(file='/x" onclick="y', line=1)) == "vscode://file/x%22%20onclick%3D%22y:1"


def test_page_and_terminal_show_the_line_and_the_patch(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("optimizer = SGD(net.parameters(), lr=30)\n", encoding="utf-8")
    patch = f"--- {path}\n+++ {path}\n@@ -1 +1 @@\n-optimizer = SGD(net.parameters(), lr=30)\n+optimizer = 1 < 2\n"
    text = page(replace(FAULTY, findings=(finding_at(path, 1, patch=patch),)), run_of())
    assert f'href="vscode://file{path}:1"' in text
    assert "1 | optimizer = " in text
    assert "<ins>+optimizer = 1 &lt; 2</ins>" in text
    assert "<del>-optimizer = SGD(net.parameters(), lr=30)</del>" in text


# One step.


def events(*, cleared: bool) -> list[Fact]:
    found: list[Fact] = []
    for step in range(3):
        here: list[Fact] = [Forward(root=0, file=FILE, line=10), Forward(root=0, file=FILE, line=10)]
        here += [Cleared(file=FILE, line=11)] if cleared else []
        here += [Backward(file=FILE, line=12), Stepped(optimizer=0, number=step, file=FILE, line=13)]
        if step == 1:
            here.insert(0, Forward(root=0, training=False, grad=False, file=FILE, line=20))
        found += [replace(one, step=step, at=10 * step + place) for place, one in enumerate(here)]
    return found


def test_a_step_has_its_events_in_order_and_the_fault_on_its_line() -> None:
    fault = replace(MISSING, place=Place(file=FILE, line=12), step=1, code="AB301")
    shown = step_of_loop(Run(events(cleared=False)), [fault])
    assert shown is not None
    assert shown.step == 1
    assert [(one.row, one.line, one.times) for one in shown.moments] == [
        ("evaluation", 20, 1), ("forward", 10, 2), ("backward", 12, 1), ("step", 13, 1)
    ]  # fmt: skip
    assert [one.codes for one in shown.moments] == [(), (), ("AB301",), ()]
    assert "clear" in shown.rows  # and it has no moment, which is what is wrong
    text = page(replace(FAULTY, findings=(fault,)), Run(events(cleared=False)))
    assert re.search(r'<th scope="row">clear</th><td class="empty"', text)
    assert 'class="backward fault"' in text
    assert not re.search(r'<th scope="row">clear</th><td class="empty"', page(HEALTHY, Run(events(cleared=True))))


def test_a_fault_outside_of_the_step_is_named() -> None:
    shown = step_of_loop(Run(events(cleared=True)), [replace(MISSING, place=Place(file=FILE, line=3), step=0)])
    assert shown is not None
    assert shown.elsewhere == ("AB101 at train.py:3",)
    assert step_of_loop(Run([]), []) is None


def test_the_last_step_of_two_players_is_one_in_which_both_stepped() -> None:
    turns = [(step, player) for step in range(4) for player in (0, 1)]
    found = [Stepped(optimizer=player, number=step, step=step + player, line=player + 1) for step, player in turns]
    shown = step_of_loop(Run([replace(one, file=FILE, at=at) for at, one in enumerate(found)]), [])
    assert shown is not None
    assert (shown.step, [one.line for one in shown.moments]) == (3, [2, 1])


# The axis.


@given(st.integers(1, 10**6))
def test_steps_keep_their_order_and_stay_on_the_axis(last: int) -> None:
    axis = Axis(0, last)
    places = [axis.part(last * part / 20) for part in range(21)]
    assert places == sorted(places)
    assert places[0] == 0
    assert places[-1] == pytest.approx(1)
    assert all(0 <= axis.part(tick) <= 1 for tick in axis.ticks())
    assert len(axis.ticks()) <= 20


def test_an_axis_of_one_number_has_that_tick() -> None:
    assert Axis(0.0, 0.0, is_even=True).ticks() == [0.0]
    assert Axis(3.0, 3.0).ticks() == [3.0]


# Two records.


def test_two_records_lie_side_by_side_on_one_axis() -> None:
    both = Recorded("before", FAULTY, run_of(200, head_in_optimizer=False)), Recorded("after", HEALTHY, run_of(100))
    text = comparison_page(*both)
    assert text == comparison_page(*both)
    axes = {json.loads(found)[1] for found in re.findall(r'data-x="([^"]*)"', text)}
    assert axes == {199}
    for piece in ("1 error: head.weight", "Healthy: nothing found", "before: train.py:", "after: train.py:"):
        assert piece in text
    row = re.findall(r'<tr class="marked"><td class="name">error AB101 OPT_PARAM_MISSING</td>.*?</tr>', text)
    assert row
    assert row[0].endswith("<td>from step 1</td><td>-</td></tr>")


def test_the_command_writes_two_records_on_a_page(tmp_path: Path) -> None:
    names = []
    for name, run in (("a", run_of(30, head_in_optimizer=False)), ("b", run_of(40))):
        names.append(str(tmp_path / f"{name}.jsonl"))
        Path(names[-1]).write_text("".join(f"{to_line(fact)}\n" for fact in run.facts), encoding="utf-8")
    out = str(tmp_path / "both.html")
    done = CliRunner().invoke(main, ["report", *names, "-o", out])
    assert done.exit_code == 0, done.output
    assert [line.split(":")[0] for line in done.output.splitlines()[:2]] == ["a", "b"]
    assert "The loops as they ran" in Path(out).read_text(encoding="utf-8")
    wrong = CliRunner().invoke(main, ["report", *names])
    assert wrong.exit_code == 2
    assert "-o both.html" in wrong.output


# The memory of a step.


def test_a_timeline_has_the_peak_and_the_lines_that_allocated() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    batch = torch.randn(512, 64)

    def run() -> None:
        loss = model(batch).square().mean()  # the line that allocates
        loss.backward()

    memory = anybatch.measure(run, model=model, batch=batch)
    timeline = memory.timeline
    assert timeline is not None
    assert timeline.peak_bytes == memory.peak_bytes
    held = {kind: values[timeline.peak] for kind, values in timeline.layers.items() if values[timeline.peak]}
    assert held == {kind: count for kind, count in memory.at_peak.items() if count}
    code = run.__code__
    own = {line for moment in timeline.moments for _, _, line in moment.largest if line}
    assert f"{Path(__file__).name}:{code.co_firstlineno + 1}" in own
    assert timeline.moments[timeline.peak].operation == memory.operation
    assert Timeline.from_dict(json.loads(json.dumps(timeline.to_dict()))) == timeline


@pytest.mark.parametrize("place", range(330, 336))
def test_a_long_timeline_keeps_its_peak(place: int) -> None:
    big = [torch.zeros(10**6) for _ in range(1)]

    def run() -> None:
        x = torch.zeros(10)
        for index in range(500):
            x = x + (big[0] * 2).sum() if index == place else x + 1

    memory = anybatch.measure(run)
    timeline = memory.timeline
    assert timeline is not None
    assert len(timeline.moments) <= 120
    assert timeline.peak_bytes == memory.peak_bytes
    assert timeline.operations > 500


PLANNED = """
import torch, torch.nn.functional as F, anybatch
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(6)))
step = anybatch.TrainStep(
    model, lambda model, batch: model(batch).square().mean(), torch.optim.AdamW(model.parameters()), memory="3MiB"
)
step(torch.randn(4096, 128))
"""


def test_the_page_of_a_plan_has_the_step_before_and_after_with_the_predicted_peaks(tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "plan.html"
    script.write_text(PLANNED, encoding="utf-8")
    options = ["--memory", "6MiB", "-o", str(out), "--json", str(tmp_path / "p.json"), str(script)]
    done = forked_python.run([sys.executable, "-m", "anybatch", "plan", *options], tmp_path)
    assert done.returncode == 0, done.stderr
    text = out.read_text(encoding="utf-8")
    plan = anybatch.Plan.from_dict(json.loads((tmp_path / "p.json").read_text(encoding="utf-8")))
    peaks = re.findall(r"([\d.]+) MiB at the peak\. Bytes", text)
    assert len(peaks) == 2
    assert float(peaks[0]) == pytest.approx(plan.whole_bytes / 2**20, rel=0.02)
    assert float(peaks[1]) <= plan.peak_bytes / 2**20 + 0.05  # the optimizer's step is no part of it
    assert "train.py:5" in text


def _poked(page: str, tmp_path: Path) -> list[str]:
    """What the page's script says after the cursor, the slider and a place were touched, in a real browser."""
    poke = (Path(__file__).parents[2] / "page_poking.js").read_text(encoding="utf-8")
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", f"<script>{poke}</script></body>"), encoding="utf-8")
    command = [
        "chromium",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=2000",
        "--dump-dom",
    ]
    done = subprocess.run([*command, f"file://{path}"], capture_output=True, text=True, timeout=120, check=True)
    said: list[str] = json.loads(re.findall(r"<title>(\[.*?\])</title>", done.stdout)[0].replace("&amp;", "&"))
    return said


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser here")
def test_the_slider_takes_the_fastest_way_within_the_budget(tmp_path: Path) -> None:
    least, chosen, most, _ = _poked(plan_page(PLAN, "train.py"), tmp_path)
    assert least.endswith("no configuration found fits //  // 0")
    taken = "2 micro-batches of 32, recompute 3 blocks, 23.0 MiB, 58.0 ms"
    assert chosen == f"budget 24.0 MiB: {taken} // 1 // 1"
    assert "50.0 ms" in most


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser here")
def test_one_cursor_goes_over_all_charts(tmp_path: Path) -> None:
    outputs, lines, _ = _poked(page(FAULTY, run_of()), tmp_path)
    assert outputs.count("step 36: ") == 4
    assert "train.py:33 1.62" in outputs
    assert len(set(lines.split())) == 2  # of the wide charts, and of the small ones


# What is recorded for it.


def test_percentiles_are_those_of_the_entries() -> None:
    values = torch.linspace(-1, 3, 512).reshape(16, 32)[torch.randperm(16)]
    figures = Units().read({"a": take(values, 1, "")})
    found = figures["a"]["percentiles"]
    expected = torch.quantile(values.double(), torch.tensor(PERCENTILES).double() / 100).tolist()
    assert found == pytest.approx(expected, abs=0.2)  # of some of them
    odd = Units().read({"a": take(torch.tensor([[1.0, math.nan], [2.0, 3.0]]), 1, "")})
    assert len(odd["a"]["percentiles"]) == len(PERCENTILES)
