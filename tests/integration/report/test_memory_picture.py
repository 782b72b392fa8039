"""The picture of a step's memory shows what a step holds, and the committed one is what the script draws."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from typing import NamedTuple

import pytest
import torch

import forked_python
from source_tree import ROOT

SCRIPT, PICTURE = ROOT / "benchmarks/memory_of_a_step.py", ROOT / "docs/memory.svg"
FIGURE = re.compile(r"\d+\.\d MiB")


# The script, and each step that it draws is looked at.
DRAW = """
import sys
import torch, memory_of_a_step as picture
from anybatch.records.plans import PlanRow

kept = []
class Kept(picture.StepRecording):
    def __init__(self):
        super().__init__()
        kept.append(self)
picture.StepRecording = Kept
record = picture.record

def looked_at(row):
    step = record(row)
    assert step.totals == kept[-1].live_bytes()
    assert len(step.stages) == len(kept[-1].operations)
    if row.micro_batches == 1:
        assert [name for name, _, _ in step.spans()] == list(picture.STAGES)
    print("looked at")
    return step

picture.record = looked_at
picture.main(["-o", sys.argv[1]], standalone_mode=False)
"""


class Drawing(NamedTuple):
    svg: str
    out: str


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory) -> Drawing:
    """What the script draws here."""
    path = tmp_path_factory.mktemp("picture") / "memory.svg"
    done = forked_python.run([sys.executable, "-c", DRAW, str(path)], SCRIPT.parent)
    assert done.returncode == 0, done.stderr
    return Drawing(path.read_text(encoding="utf-8"), done.stdout)


@pytest.fixture
def drawn(drawing: Drawing) -> str:
    return drawing.svg


def part(svg: str, name: str) -> str:
    found = ET.fromstring(svg).find(f"{{http://www.w3.org/2000/svg}}{name}")
    assert found is not None
    assert found.text
    return found.text


def test_the_committed_picture_is_the_one_that_is_drawn(drawn: str) -> None:
    committed = PICTURE.read_text(encoding="utf-8")
    if part(committed, "metadata") != part(drawn, "metadata"):
        pytest.skip(f"the picture was made with {part(committed, 'metadata')}, this is torch {torch.__version__}")
    assert drawn == committed, "make it again: python benchmarks/memory_of_a_step.py"


def test_its_words_have_its_figures(drawn: str) -> None:
    texts = "".join(ET.fromstring(drawn).itertext())
    peaks = re.findall(r"peak (\d+\.\d MiB)", texts.replace(part(drawn, "desc"), ""))
    assert len(peaks) == 4
    assert all(peak in part(drawn, "desc") for peak in peaks)
    assert max(peaks, key=lambda peak: float(peak.split()[0])) == peaks[0]


def test_the_page_has_the_figures_of_the_picture() -> None:
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "memory.md").read_text(encoding="utf-8"))
    passage = page.partition("![")[2].partition("`measure`")[0]
    assert set(FIGURE.findall(passage)) <= set(FIGURE.findall(part(PICTURE.read_text(encoding="utf-8"), "desc")))
    assert len(FIGURE.findall(passage)) == 4


def test_the_readme_has_the_figures_of_the_plan_beside_it() -> None:
    shown = "".join(ET.parse(ROOT / "docs" / "plan.svg").getroot().itertext()).replace("\xa0", " ")
    passage = (ROOT / "README.md").read_text(encoding="utf-8").partition("`anybatch plan` does")[2].partition("![")[0]
    assert len(FIGURE.findall(passage)) == 2
    assert all(figure in shown for figure in FIGURE.findall(passage))


def test_the_layers_are_the_live_bytes(drawing: Drawing) -> None:
    """A step whose layers are others ends the script."""
    assert drawing.out.count("looked at\n") == 4
