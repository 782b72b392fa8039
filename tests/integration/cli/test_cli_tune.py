"""``anybatch tune``: the batch that fits, the batch that pays, and the learning rate that goes with it."""

import copy
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch
import forked_python
from anybatch.records.tunings import BatchAdvice
from anybatch.report.notebook import page_of_advice
from anybatch.scaling.tuning import batch_that_pays, rate_for, rates_that_train
from source_tree import PACKAGE

LOOP = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(40, 64, 8)
targets = inputs.sum(-1, keepdim=True) + 3 * torch.randn(40, 64, 1)
for x, y in zip(inputs, targets):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
open("ran to its end", "w")
"""
STEP = LOOP.replace("import torch\n", "import torch\nimport anybatch\n", 1).replace("for x, y", """
def loss_fn(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()

step = anybatch.TrainStep(model, loss_fn, optimizer)
for x, y""").replace("""    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
""", "    step((x, y))\n")  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tuned(text: str, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    Path("train.py").write_text(text, encoding="utf-8")
    code = "from anybatch.cli.main import main; main(prog_name='anybatch')"
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    written = ["--json", "tune.json", "-o", "tune.html"]
    command = [sys.executable, "-c", code, "tune", "train.py", "--memory", "1GiB", *written, *options]
    values = {**os.environ, "PYTHONPATH": path, "COLUMNS": "100"}
    if text == LOOP:
        done = subprocess.run(command, env=values, capture_output=True, text=True, timeout=200, check=False)
    else:
        done = forked_python.run(command, Path.cwd(), values)
    assert Path("train.py").read_text(encoding="utf-8") == text
    facts = json.loads(Path("tune.json").read_text(encoding="utf-8")) if done.returncode == 0 else {}
    return done, facts


@pytest.mark.parametrize("text", [LOOP, STEP], ids=["a plain loop", "a step"])
def test_a_script_is_measured_for_some_steps_and_told_in_one_sentence_and_one_picture(text: str) -> None:
    done, facts = tuned(text)
    assert done.returncode == 0, done.stderr + done.stdout
    assert not Path("ran to its end").exists()
    assert done.stdout.replace("\n", " ").startswith("Your batch of 64 fits as it is; a batch of about ")
    assert facts["answer"] in done.stdout.replace("\n", " ")
    assert (facts["batch"], facts["steps"], facts["rate"]) == (64, 24, 0.01)
    # The gradient of a row is 2 (error) x: its noise over its signal is known, and falls as the weights come nearer.
    assert 1 < facts["noise"] < 64
    assert facts["new_rate"] == pytest.approx(0.01 * facts["pays"] / 64)
    falls = dict(facts["rated"])
    assert falls[4.0] > falls[1.0] > falls[0.25] > 0
    assert "pays" in done.stdout
    assert "█" in done.stdout
    assert facts["answer"] in Path("tune.html").read_text(encoding="utf-8")


def test_what_is_not_there_is_said_with_2() -> None:
    done, _ = tuned("import torch\n")
    assert done.returncode == 2
    assert "without having called" in done.stderr
    done, _ = tuned(LOOP.replace("    optimizer.step()", "    model.weight.grad.mul_(1)\n    optimizer.step()"))
    assert done.returncode == 2
    assert "update stays the loop's own" in " ".join(done.stderr.split())
    assert "Call an anybatch.TrainStep in its place" in " ".join(done.stderr.split())


def test_a_step_that_does_not_run_after_the_end_of_the_script_is_measured_without_rates() -> None:
    text = STEP.replace("randn(40", "randn(10").replace("    x, y = batch\n", """    if over:
        raise RuntimeError("can't schedule new futures after interpreter shutdown")
    x, y = batch
""").replace("def loss_fn", "over = []\ndef loss_fn") + "over.append(1)\n"  # fmt: skip
    done, facts = tuned(text)
    assert done.returncode == 0, done.stderr
    assert (facts["steps"], facts["rated"]) == (10, [])
    assert "No learning rate was tried" in done.stdout


def test_batches_that_stay_whole_are_not_told_to_be_halved() -> None:
    text = STEP.replace("torch.nn.Linear(8, 1)", "torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))")
    done, facts = tuned(text)
    assert done.returncode == 0, done.stderr
    assert "these batches run whole, since they have one sample, can't be cut, or" in facts["advice"]
    assert "halves=True" not in done.stdout + done.stderr


def test_a_script_that_takes_its_update_itself_is_not_run_to_its_end() -> None:
    done, _ = tuned(STEP.replace("anybatch.TrainStep(model, loss_fn, optimizer)", "None").replace(
        "step((x, y))", "anybatch.backward(model, loss_fn, (x, y)); optimizer.step()"))  # fmt: skip
    assert done.returncode == 2
    assert "change it to anybatch.TrainStep" in " ".join(done.stderr.split())
    assert not Path("ran to its end").exists()


def test_the_rate_of_a_warm_up_is_that_of_the_script_and_a_short_run_that_exits_is_measured() -> None:
    text = STEP.replace("randn(40", "randn(10").replace("step = anybatch", """
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: update / 100)
step = anybatch""").replace("step((x, y))\n", "step((x, y)); schedule.step()\nimport sys; sys.exit(0)\n")  # fmt: skip
    done, facts = tuned(text)
    assert done.returncode == 0, done.stderr + done.stdout
    assert (facts["steps"], facts["rate"]) == (10, 0.01)


@pytest.mark.parametrize(
    ("end", "said"),
    [("import sys; sys.excepthook = print; raise ValueError", "train.py failed before it called"),
     ("import sys; sys.exit(3)", "train.py ended with exit code 3 before 24 steps were measured")],
    ids=["crashes", "gives up"],
)  # fmt: skip
def test_a_run_that_did_not_end_well_gives_no_answer(end: str, said: str) -> None:
    done, _ = tuned(STEP.replace("randn(40", "randn(10").replace("step((x, y))\n", f"step((x, y))\n{end}\n"))
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert not Path("tune.json").exists()


def test_the_range_test_finds_the_rate_at_which_a_quadratic_diverges_and_leaves_nothing() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    step = anybatch.TrainStep(model, lambda model, batch: model(batch).square().mean(), optimizer)
    batches = [torch.ones(4, 1)] * 8
    step(batches[0])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    falls = dict(rates_that_train(step, model, [optimizer], batches))
    after = model.state_dict(), optimizer.state_dict()
    assert torch.equal(before[0]["weight"], after[0]["weight"])
    assert str(before[1]) == str(after[1])
    assert falls[1.0] > 0
    assert falls[0.25] > 0
    assert falls[16.0] < 0


def test_the_batch_and_the_rate_that_go_together() -> None:
    assert [batch_that_pays(one) for one in (90.0, 91.0, 0.1, math.inf, 0.0)] == [64, 128, 1, None, None]
    weights = [torch.nn.Parameter(torch.zeros(2))]
    assert rate_for([torch.optim.SGD(weights, lr=0.1)], (64, 128)) == (0.1, 0.2, "linear")
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    for size, rate, rule in ((256, 0.2, "adam-sde"), (6400, 1.0, "sqrt")):
        now, found, by = rate_for([optimizer], (64, size))
        assert (now, by) == (0.1, rule)
        assert found == pytest.approx(rate)
    assert rate_for([optimizer], (64, 64))[:2] == (0.1, 0.1)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_sentence_says_what_is_not_known() -> None:
    facts = BatchAdvice(64, "in 3 micro-batches of 22", 3, "samples", 0.1, 0.1, "linear", "no signal")
    assert str(facts) == (
        "Your batch of 64 fits in 3 micro-batches of 22; "
        "which batch size pays off is not known after 3 steps: no signal."
    )
    known = replace(facts, pays=64, noise=70.0, low=30.0)
    assert str(known).endswith("at least 30), at the same learning rate.")
    assert BatchAdvice.from_dict(json.loads(json.dumps(known.to_dict()))) == known


def test_a_step_that_is_measured_gives_the_same_answer_and_its_picture() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = anybatch.TrainStep(model, lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), optimizer)
    with pytest.raises(anybatch.BatchError, match="NoiseScale"):
        _ = step.advice
    anybatch.NoiseScale(step, every=1, halves=True)
    for _ in range(24):
        x = torch.randn(64, 8)
        step((x, x.sum(-1, keepdim=True) + 3 * torch.randn(64, 1)))
    found = step.advice
    assert (found.batch, found.steps, found.rate) == (64, 24, 0.01)
    assert found.pays is not None
    assert found.new_rate == pytest.approx(0.01 * found.pays / 64)
    pytest.importorskip("jinja2")
    page = page_of_advice(found)
    assert str(found) in page
    assert page.count("<figure") == 1
    assert 'class="curve c1"' in page
    assert found._repr_html_() is not None
    assert page_of_advice(replace(found, pays=None, noise=None)).count("<figure") == 0
