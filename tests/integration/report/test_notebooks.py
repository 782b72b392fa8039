"""What a notebook shows: the examples run in a real Jupyter kernel, and every result is a page in a frame."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

from source_tree import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

# The titles of the pages that each notebook shows, in order.
PAGES = {
    "plan": ["anybatch plan: cpu", "Bytes of live tensors", "Bytes of live tensors"],
    "step": ["anybatch check", "A step of anybatch", "anybatch check", "anybatch why"],
    "diagnose": ["anybatch doctor: this run"],
}


def executed(notebook: Any, folder: Path) -> Any:
    resources = {"metadata": {"path": folder}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    return notebook


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def pages(notebook: Any) -> list[str]:
    shown = [output.get("data", {}).get("text/html", "") for output in outputs(notebook)]
    return [html.unescape(found[1]) for text in shown if (found := re.search(r'<iframe srcdoc="([^"]*)"', text))]


@pytest.mark.parametrize("name", PAGES)
def test_an_example_runs_and_shows_its_pages(name: str, tmp_path: Path) -> None:
    source = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in source.cells)
    notebook = executed(source, tmp_path)
    found = pages(notebook)
    assert [html.unescape(re.findall(r"<h1>(.*?)</h1>", page)[0]) for page in found] == PAGES[name]
    texts = [output["data"]["text/plain"] for output in outputs(notebook) if "text/html" in output.get("data", {})]
    assert all(texts)  # for those who do not trust the notebook, or read it as a diff
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    if name == "diagnose":  # the line is in a cell, and in no file
        assert "OPT_PARAM_MISSING" in found[0]
        assert "torch.optim.SGD(body.parameters(), lr=0.1)" in found[0]


BAR = """
import anybatch, torch
from anybatch.integrations.progress import ProgressBar

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ProgressBar(total=3, seconds=0) as bar:
    step = anybatch.TrainStep(model, lambda model, batch: model(batch).mean(), optimizer, recorder=bar)
    for _ in range(3):
        step(torch.ones(4, 2))
"""


ERROR = """
def train():
    anybatch.backward(None, None, torch.ones(0, 2))

train()"""


def test_a_progress_bar_is_one_output_that_changes_and_an_error_of_anybatch_ends_in_the_cell() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in (BAR, ERROR)])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", allow_errors=True).execute()
    bar, failed = outputs(notebook)
    assert bar["data"]["text/html"].startswith('<progress max="3" value="3"></progress> update 3/3, loss ')
    assert bar["data"]["text/plain"].startswith("update 3/3, loss ")
    assert failed.output_type == "error"
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(failed.traceback))
    assert "in train()" in shown
    assert failed.ename in shown.splitlines()[-1]
    assert "backpropagation.py" not in shown
    assert "src/anybatch" not in shown
