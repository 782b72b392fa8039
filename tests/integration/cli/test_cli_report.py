"""``anybatch report``: a record, shown again without torch."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from anybatch.cli.main import main
from anybatch.records.events import Backward, Ended, Forward, Stepped
from anybatch.records.lines import to_line
from anybatch.records.samples import Norms
from anybatch.records.tables import GroupFacts, ModuleFacts, OptimizerFacts, ParameterFacts, Root, Started
from doctor_scripts import run
from source_tree import PACKAGE

FACTS = [
    Started(script="train.py", arguments=("--lr", "1"), torch="2.13", device="cpu"),
    Root(root=0, variable="model", cls="Net", at=1, modules=(
        ModuleFacts(name="", cls="Net"), ModuleFacts(name="head", cls="Linear", parameters=(0,)),
    )),
    ParameterFacts(parameter=0, names=("he<b>ad.weight",), root=0, module="head", shape=(2, 2), numel=4, at=2),
    OptimizerFacts(optimizer=0, variable="optimizer", cls="SGD", groups=(GroupFacts(parameters=(0,), lr=0.1),), at=3),
    *(
        fact
        for step in range(3)
        for fact in (
            Forward(root=0, at=4 * step + 4, step=step),
            Backward(value=float("nan"), touched=(0,), touched_count=1, at=4 * step + 5, step=step),
            Norms(
                optimizer=0, number=step, parameters=(0,), grad=(1.0,), weight=(1.0,), update=(0.1,), unchanged=(0.0,),
                grad_zeros=(0.0,), state_moved=(None,), at=4 * step + 6, step=step,
            ),
            Stepped(optimizer=0, number=step, lrs=(0.1,), with_grad=1, at=4 * step + 7, step=step),
        )
    ),
    Ended(exit_code=0, seconds=2.0, own_seconds=0.01, at=20, step=3),
]  # fmt: skip


@pytest.fixture
def record(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(f"{to_line(fact)}\n" for fact in FACTS), encoding="utf-8")
    return path


def test_a_record_is_shown_as_it_was_at_the_end_of_its_run(record: Path) -> None:
    page = record.with_name("page.html")
    done = CliRunner().invoke(main, ["report", str(record), "-o", str(page), "--json", str(record) + ".json"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("train.py --lr 1: ")
    facts = json.loads(Path(str(record) + ".json").read_text(encoding="utf-8"))
    assert (facts["version"], facts["steps"], facts["exit_code"], facts["torch"]) == (1, 3, 0, "2.13")
    assert facts["own_seconds"] == 0.01
    assert facts["cells"][0]["parameters"] == ["he<b>ad.weight"]
    text = page.read_text(encoding="utf-8")
    assert "<b>ad" not in text
    assert "&lt;b&gt;ad" in text
    again = CliRunner().invoke(main, ["report", str(record), "-o", str(page)])  # its own page is written anew
    assert again.exit_code == 0


def test_json_has_standard_output_for_itself(record: Path) -> None:
    done = CliRunner().invoke(main, ["report", str(record), "--json", "-"])
    assert json.loads(done.stdout)["script"] == "train.py"
    assert done.stderr.startswith("train.py --lr 1: ")


def test_a_record_that_was_cut_off_is_read_as_far_as_it_goes(record: Path) -> None:
    text = record.read_text(encoding="utf-8")
    record.write_text(text[: text.index('{"kind":"ended"') + 9], encoding="utf-8")
    done = CliRunner().invoke(main, ["report", str(record), "--json", "-"])
    assert done.exit_code == 0
    facts = json.loads(done.stdout)
    assert (facts["steps"], facts["exit_code"], facts["overhead"]) == (3, None, None)


REFUSED = {
    "no record": (["report", "other.txt"], "other.txt is no record of a run"),
    "not there": (["report", "missing.jsonl"], "'missing.jsonl' does not exist"),
    "no folder": (["report", "run.jsonl", "--json", "no/such/out.json"], "does not exist; make it first"),
    **{
        f"two records with {words[0]}": (
            ["report", "run.jsonl", "run.jsonl", "-o", "both.html", *words],
            "compared on a page only; leave --json, --format, --quiet and --baseline out",
        )
        for words in (["--json", "x"], ["--format", "line"], ["--quiet"], ["--baseline", "known.json"])
    },
    "two records": (["report", "run.jsonl", "run.jsonl"], "anybatch report run.jsonl run.jsonl -o both.html"),
    "no page": (["report", "run.jsonl", "-o", "other.txt"], "other.txt exists and is not a page that anybatch wrote"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_before_anything_is_written(
    record: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.with_name("other.txt").write_text("mine", encoding="utf-8")
    monkeypatch.chdir(record.parent)
    arguments, message = REFUSED[name]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert record.with_name("other.txt").read_text(encoding="utf-8") == "mine"
    assert sorted(path.name for path in record.parent.iterdir()) == ["other.txt", "run.jsonl"]


def test_no_torch_is_loaded(record: Path) -> None:
    code = (
        "import sys; from anybatch.cli.main import main\n"
        "helps = [[verb, '--help'] for verb in ('doctor', 'report', 'explain')]\n"
        "runs = ['--help'], ['explain'], ['explain', 'AB101'], ['report', 'run.jsonl', '-o', 'page.html']\n"
        "for arguments in (*helps, *runs):\n"
        "    main(arguments, standalone_mode=False)\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy')))"
    )
    done = run(record.parent, [sys.executable, "-c", code], PACKAGE.parent)
    assert done.code == 0, done.err
    assert "'torch" not in done.out.splitlines()[-1]
