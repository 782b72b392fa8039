"""The table of architectures: it is in step with its rows, and a sample of them still holds.

What would be wrong in silence: a page that was edited by hand or not written again; rows of an older version of the
library; a comparison in which nothing is compared; a runner that loses a head.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import forked_python
from asked import asked_for
from source_tree import ROOT

BENCHMARKS = ROOT / "benchmarks"
ROWS = BENCHMARKS / "results" / "architectures_cpu_2026-11-22.json"
SAMPLE = (
    "llama/causal", "bart/causal", "bert/masked", "mixtral/causal, router loss", "vit/image", "resnet/image",
    "wav2vec2/CTC, mean",
)  # fmt: skip
Row = Mapping[str, Any]


def run(*options: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / "architectures.py"), *options]
    done = forked_python.run(command, ROOT, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows_of(path: Path) -> dict[str, Row]:
    return {f"{row['architecture']}/{row['head']}": row for row in json.loads(path.read_text())["rows"]}


@pytest.fixture(scope="module")
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """The sample, measured now."""
    path = tmp_path_factory.mktemp("rows") / "rows.json"
    names = [f"--only={name}" for name in SAMPLE if name in asked_for(request, "name")]
    run("--limit", "200", "--json", str(path), "-o", str(path.with_suffix(".md")), *names)
    return rows_of(path)


def test_the_page_is_written_from_the_rows() -> None:
    assert run("--render", "--json", str(ROWS)).rstrip() == (ROOT / "docs" / "architectures.md").read_text().rstrip()


def test_there_are_sixty_architectures_of_transformers_and_check_agrees_with_every_gradient() -> None:
    done = [row for row in json.loads(ROWS.read_text())["rows"] if "missing" not in row]
    assert len({row["architecture"] for row in done if row["library"] == "transformers"}) >= 60
    assert {"causal", "masked", "sequence", "token", "question", "seq2seq", "image"} <= {row["head"] for row in done}
    assert {"transformers", "torchvision", "timm"} == {row["library"] for row in done}
    assert [row["class"] for row in done if not row["agrees"]] == []
    for row in done:
        # Each row compared something: at least one count, a refusal, or a gradient that is not finite.
        assert row["errors"] or row["refused"]
        assert row["parameters"] > 0


@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_still_holds(name: str, live: dict[str, Row]) -> None:
    now, then = live[name], rows_of(ROWS)[name]
    assert "missing" not in now, now["missing"]
    for what in ("class", "exact", "items", "agrees", "repeats"):
        assert now[what] == then[what], what
    assert now["refused"].partition(":")[0] == then["refused"].partition(":")[0]
    assert now["trainer"] == pytest.approx(then["trainer"], rel=0.05, abs=1e-6)
    assert set(now["check"]) == set(then["check"])
    for count, said in now["check"].items():
        reasons = [[(r["code"], r["where"]) for r in one["reasons"]] for one in (said, then["check"][count])]
        assert said["exact"] == then["check"][count]["exact"]
        assert reasons[0] == reasons[1]


@pytest.mark.slow
def test_a_head_that_takes_too_long_is_in_the_table_and_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    options = ("--json", str(path), "-o", str(tmp_path / "page.md"), "--only=gpt2/sequence", "--jobs", "1")
    run(*options, "--limit", "0.01")
    assert rows_of(path)["gpt2/sequence"]["missing"] == "took longer than 0.01 s"
    assert "| gpt2 | sequence | took longer than 0.01 s |" in (tmp_path / "page.md").read_text()
    run(*options, "--resume")
    assert rows_of(path)["gpt2/sequence"]["exact"] == ["anybatch.count_samples"]
    assert "Not in the tables" not in (tmp_path / "page.md").read_text()
    run(*options, "--resume", "--limit", "0.01")  # what is there is not measured again
    assert rows_of(path)["gpt2/sequence"]["exact"] == ["anybatch.count_samples"]
