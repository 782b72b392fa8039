"""The page of a diagnosis: it loads nothing, shows user text as text, and stays small."""

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.records.diagnoses import Cell, Diagnosis
from anybatch.records.findings import Finding, Place
from anybatch.records.lines import Fact
from anybatch.records.runs import Run
from anybatch.records.samples import Norms
from anybatch.records.tables import ParameterFacts, Started
from anybatch.report.diagnosis_page import decades_of, flow_pictures, page
from anybatch.report.flow import Flow, FlowRow
from anybatch.report.svg import Axis, Curve, line_chart
from diagnosis_samples import CRASH, FAULTY, FLAT, HEALTHY, MISSING, NOTE, run_of

VOID = {"meta", "br", "wbr"}
RULE = re.compile(
    r"<(link|img|iframe|object|embed|base|form)\b|<script[^>]|@import|javascript:|\s(src|on\w+)\s*=|\shref=(?!\"vscode://file/)"
)
# The page's own script, the same in all pages: what the user named is never in it.
SCRIPT = re.compile(r"<script>\n.*?</script>", re.DOTALL)


class Reader(HTMLParser):
    """Checks that tags are closed in order, and gathers texts and tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.labels: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.labels += [value or "" for name, value in attrs if name == "aria-label"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        goes_on = self.tags[-1:] == ["wbr"] and self.get_starttag_text() == "<wbr>"
        self.texts.append(self.texts.pop() + data if goes_on else data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    return reader


PAGES = {
    "faulty": (FAULTY, run_of(head_in_optimizer=False)),
    "healthy": (HEALTHY, run_of()),
    "crashed": (replace(HEALTHY, exit_code=1), run_of(3, facts=(CRASH,))),
    "empty": (Diagnosis(), Run([])),
    "nothing but a head": (Diagnosis(script="a.py"), Run([Started(script="a.py")])),
    "one step": (HEALTHY, run_of(1)),
    "not a number": (FAULTY, run_of(60, odd=float("nan"))),
    "infinite": (FAULTY, run_of(60, odd=float("inf"))),
}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_whole_loads_nothing_and_is_the_same_every_time(name: str) -> None:
    diagnosis, run = PAGES[name]
    text = page(diagnosis, run)
    assert text == page(diagnosis, run)
    assert not RULE.search(text)
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert "http" not in text
    (script,) = SCRIPT.findall(text)
    assert script == SCRIPT.findall(page(*PAGES["empty"]))[0]
    assert not re.search(r"fetch|XMLHttp|import|eval|innerHTML|document.write", script)
    text = SCRIPT.sub("", text)
    reader = read(text)
    assert reader.tags.count("h1") == 1
    headings = [int(tag[1]) for tag in reader.tags if re.fullmatch(r"h[1-4]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(headings))
    pictures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert len(reader.labels) == len(pictures)
    assert all("<svg" in picture for picture in pictures)
    assert all(len(label) > 20 for label in reader.labels)
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert "nan" not in re.sub(r"<[^>]*>|<style>.*?</style>", "", text, flags=re.DOTALL) or "nan" in str(run.facts)
    drawn = " ".join(re.findall(r'\s(?:d|x|y|width|height)="([^"]*)"', text))
    assert not re.search(r"nan|inf|None", drawn)


def test_the_verdict_comes_first_and_then_what_to_change() -> None:
    text = read(page(*PAGES["faulty"])).text
    order = [
        "1 error: head.weight",
        "What is wrong",
        "AB101",
        MISSING.cause,
        "gradient norm",
        MISSING.fix,
    ]
    order += ["Consequences", "LOSS_FLAT", "Notes", "AB210", "One step", "schedule"]
    order += ["Which gradients and parameters change"]
    order += [
        "in no optimizer",
        "The flow of the gradient",
        "Update over weight",
        "Loss",
        "Learning rate",
        "Norm of the gradient",
        "Memory",
    ]
    order += ["Activations", "The loop as it ran", "210.0 ms of 12.3 s (1.7% of the script's own time)"]
    here = 0
    for piece in order:
        assert piece in text[here:], piece
        here = text.index(piece, here)


def test_a_crash_is_at_the_top_with_its_line_and_its_fix_once() -> None:
    text = read(page(*PAGES["crashed"])).text
    for piece in ("/home/me/project/train.py:33", "loss.backward()", "state = state.detach()", CRASH.text):
        assert text.count(piece) == 1
    told = Finding(CRASH.message, Place(file=CRASH.file, line=33), CRASH.fix, name=CRASH.name, severity="error")
    assert read(page(Diagnosis((told,), exit_code=1), PAGES["crashed"][1])).text.count("state = state.detach()") == 1


@pytest.mark.parametrize(
    "bad", ["<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "a\x00\x1b\ud800]]>&amp;"]
)
def test_what_users_name_is_text(bad: str) -> None:
    finding = Finding(bad, Place(bad, (bad,), bad, 0, bad, 1), bad, bad, {bad: bad}, name=bad, code=bad, proof=bad)
    findings = tuple(replace(finding, severity=kind) for kind in ("error", "warning", "info"))
    follower = replace(finding, consequence_of=bad, name="other", severity="error")
    cells = tuple(Cell(kind, bad, (bad,), why=bad) for kind in range(5))
    diagnosis = Diagnosis((*findings, follower), cells, 3, 0.1, bad, (bad,), bad, notes=(bad,))
    crash = replace(
        CRASH, error=bad, text=bad, message=bad, cause=bad, fix=bad, tensor=bad, file=bad, code=bad, name="x"
    )
    named: list[Fact] = [ParameterFacts(parameter=0, names=(bad,), shape=(2, 2), numel=4)]
    named += [Norms(optimizer=0, parameters=(0,), grad=(1.0,), weight=(1.0,), update=(0.1,))]
    run = run_of(3, facts=(crash, *named))
    run = Run([Started(torch=bad, device=bad), *run.facts])
    text = page(diagnosis, run)
    text.encode("utf-8")
    assert not RULE.search(re.sub(r"&lt;.*?&gt;", "", text))
    tags = read(text).tags
    assert tags.count("script") == 1
    assert SCRIPT.findall(text) == SCRIPT.findall(page(*PAGES["empty"]))
    assert "img" not in tags
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)


def test_the_page_of_a_long_run_of_a_large_model_is_small() -> None:
    names = "encoder.with.a.very.long.name." + "x" * 300
    facts = tuple(
        ParameterFacts(parameter=5000 + i, names=(f"{names}.{i}.weight",), root=0, shape=(2, 2)) for i in range(9)
    )
    cells = tuple(Cell(1, f"layer.{index}", (f"layer.{index}.weight",), numel=5) for index in range(1000))
    many = tuple(replace(MISSING, name=f"N{index}") for index in range(300))
    text = page(replace(FAULTY, findings=many, cells=cells), run_of(500, 500, facts=facts))
    assert len(text) < 400_000
    assert "240 more are in the JSON" in read(text).text
    assert text.count("<article") == 60
    rows = tuple(FlowRow(f"layer.{index}", (0.5,) * 48) for index in range(64))
    assert len(flow_pictures(Flow(tuple(range(48)), rows, 48, 64), Axis(0, 48))[0].svg) < 400_000


@given(st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=50))
def test_a_larger_gradient_never_has_a_lighter_shade(norms: list[float]) -> None:
    low, high = decades_of(norms)
    flow = Flow((0,), tuple(FlowRow(f"layer.{index}", (norm,)) for index, norm in enumerate(sorted(norms))), 1, 1)
    shades = re.findall(r'<rect class="(h\d)"', flow_pictures(flow, Axis(0, 1))[0].svg)
    assert len(shades) == len(norms)
    assert shades == sorted(shades)
    assert high - low >= 6


def test_the_picture_of_the_flow_tells_apart_what_is_not_a_number() -> None:
    flow = Flow((0, 25), (FlowRow("a", (1.0, 0.0)), FlowRow("b", (None, float("nan")))), 2, 2)
    svg = flow_pictures(flow, Axis(0, 25))[0].svg
    cells = re.findall(r'<rect class="(\w+)"[^>]*><title>([^<]+)</title>', svg)
    assert cells == [
        ("h9", "a, step 0: 1"),
        ("zero", "a, step 25: exactly 0"),
        ("none", "b, step 0: no gradient"),
        ("odd", "b, step 25: nan"),
    ]
    label = read(page(Diagnosis(steps=3), run_of(60, odd=float("nan")))).labels[0]
    assert "The first gradient that is not finite: encoder.layers.0 at step 50." in label
    none = Run([ParameterFacts(parameter=0, names=("a.b",), root=0), Norms(optimizer=0, parameters=(0,), grad=(None,))])
    assert "No gradient in a." in read(page(Diagnosis(steps=3), none)).labels[0]


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30),
    st.sampled_from([None, True, False]),
    st.floats(1e-9, 1e9),
)
def test_any_values_can_be_drawn(values: list[float], is_logarithmic: bool | None, level: float) -> None:
    curve = Curve("a", tuple(range(len(values))), tuple(values))
    svg = line_chart([curve], x_label="step", is_logarithmic=is_logarithmic, levels=[("level", level)])
    places = re.findall(r'\s(?:d|x|y|height)="([^"]*)"', svg)
    assert not re.search(r"nan|inf", " ".join(places))
    ups = [
        float(y) for path in re.findall(r'class="curve c0" d="M([^"]*)"', svg) for y in re.findall(r" ([-\d.]+)", path)
    ]
    assert all(0 <= y <= 260 for y in ups)


def test_gaps_are_where_the_values_are_not_finite() -> None:
    values = (1.0, 2.0, float("nan"), 4.0, float("inf"))
    svg = line_chart([Curve("loss", tuple(range(5)), values)], x_label="step")
    assert svg.count('class="curve c0" d=') == 3  # the legend and two pieces
    assert re.findall(r"<title>(loss, [^<]*)</title>", svg) == ["loss, step 2: nan", "loss, step 4: inf"]


def test_long_names_in_a_legend_have_a_line_each() -> None:
    def places(*names: str) -> list[tuple[str, ...]]:
        svg = line_chart([Curve(name, (0, 1), (1.0, 2.0)) for name in names], x_label="step")
        return re.findall(r'<text x="(\d+)" y="(\d+)">[^<]*<title>', svg)

    assert places("a.py:1", "a.py:2") == [("85", "12"), ("285", "12")]
    assert places("fine_tuned_on_something.py:1", "a.py:2") == [("85", "12"), ("85", "28")]


def test_zero_lies_at_the_bottom_of_a_logarithmic_axis() -> None:
    svg = line_chart([Curve("a", (0, 1, 2), (0.0, 1e-4, 1e-2))], x_label="step", is_logarithmic=True)
    assert re.findall(r'<text class="end"[^>]*>([^<]+)</text>', svg) == ["0", "0.0001", "0.001", "0.01"]


def test_the_report_loads_without_torch_and_matplotlib() -> None:
    code = (
        "import sys, anybatch.report.diagnosis_terminal, anybatch.report.diagnosis_page as p;"
        "from anybatch.records.diagnoses import Diagnosis; from anybatch.records.runs import Run;"
        "p.page(Diagnosis(), Run([])); sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_where_gradients_shrink_the_row_stands_out() -> None:
    cells = Cell(1, "encoder", shrinking=True), Cell(1, "head")
    text = page(Diagnosis(cells=cells), Run([]))
    assert re.search(r'<tr class="marked"><td>shrinking</td><td>changing</td><td>0</td><td>encoder</td>', text)
    assert 'class="marked"' not in page(Diagnosis(cells=cells[1:]), Run([]))


def test_noise_does_not_fill_the_axis_where_a_least_span_is_asked_for() -> None:
    svg = line_chart([Curve("a", (0, 1), (320.4, 320.6))], x_label="step", least_span=0.1)
    ticks = [float(text) for text in re.findall(r'<text class="end"[^>]*>([^<]+)</text>', svg)]
    assert max(ticks) - min(ticks) >= 20


def test_notes_and_what_follows_have_their_fix() -> None:
    fixed = replace(FLAT, fix="follow()", cause="for a reason", evidence={"lr": 0.1})
    text = read(page(Diagnosis((MISSING, fixed, NOTE), steps=1), Run([]))).text
    for piece in ("follow()", "for a reason", "lr 0.1", "inputs.requires_grad_(False)"):
        assert piece in text


def test_a_fix_that_is_a_sentence_is_no_code() -> None:
    text = page(
        Diagnosis((replace(MISSING, fix="remove the softmax"), replace(FLAT, fix="follow()")), steps=1), Run([])
    )
    assert "<p>remove the softmax</p>" in text
    assert "<pre><code>follow()</code></pre>" in text
