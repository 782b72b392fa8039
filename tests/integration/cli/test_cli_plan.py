"""``anybatch plan``: the user's own script, planned at its first step."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import forked_python
from anybatch.cli.main import main
from anybatch.cli.plan import _use_of, show_plan
from anybatch.cli.script import Ending
from anybatch.records.plans import ModuleShare, Plan
from anybatch.report import pages
from plan_samples import MIB, PLAN, WHOLE
from source_tree import PACKAGE

# It stands in for a script with a step, and for the planner, so that no test has to load torch for what needs none.
SCRIPT = """
import atexit, dataclasses, json, os, sys, threading, types
from pathlib import Path
from anybatch.errors import BatchError, DoesNotFit
from anybatch.interception import Call, first_call
from anybatch.records.plans import Plan

def plan(model, loss_fn, batch, optimizer=None, *, memory, device=None, **options):
    Path("asked.json").write_text(json.dumps([model, loss_fn, batch, optimizer, memory, device, options]))
    mode = sys.argv[1]
    if mode == "large":
        raise DoesNotFit("The least is 3.0 MiB.", needed=3 * 2**20, budget=2**20, modules=("h.3", "head"))
    if mode == "refused":
        raise BatchError("device='z9' is no device")
    if mode == "broken":
        raise KeyError("from the loss") from ValueError("what led to it")
    if mode == "dies":
        os._exit(9)
    if mode == "hangs":
        threading.Event().wait()
    if mode == "steps":
        step({})
    made = Plan.load("made.json")
    if mode == "infinite":
        return dataclasses.replace(made, chosen=dataclasses.replace(made.chosen, seconds=float("inf")))
    return made

planner = types.ModuleType("anybatch.planning.entrance")
planner.plan = plan
sys.modules["anybatch.planning.entrance"] = planner

def step(options):
    handler = first_call.get()
    if handler is not None:
        handler(Call("model", "loss", "batch", options))
    print("a step ran")

print("the script says something")
atexit.register(lambda: print("exit handler ran"))
try:
    if sys.argv[1] == "none":
        sys.exit(3)
    step(json.loads(sys.argv[2]) if len(sys.argv) > 2 else {"optimizer": "adam"})
except BaseException as error:
    print("the script caught", type(error).__name__)
    raise
finally:
    print("saved a checkpoint")
    if sys.argv[1] != "none":
        Path("checkpoint").touch()
"""

OPTIONS = {
    name: f"the {name}"
    for name in ("optimizer", "count", "broadcast", "collate", "cost", "autocast", "clip_norm", "batch_norm", "inputs",
                 "accumulate", "blocks")
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT, encoding="utf-8")
    PLAN.save("made.json")
    return tmp_path


STARTED = {"steps"}  # in processes that are really started


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from anybatch.cli.main import main; main(prog_name='anybatch')"
    command = [sys.executable, "-c", code, "plan", *arguments]
    if STARTED.isdisjoint(arguments):
        return forked_python.run(command, Path.cwd(), environment())
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "80", "PYTHONUTF8": "1"}


def planned(mode: str, *options: str, call: Any = None) -> subprocess.CompletedProcess[str]:
    calls = [] if call is None else [json.dumps(call)]
    done = run("train.py", *options, "--", mode, *calls)
    output = done.stdout + done.stderr
    assert not any(text in output for text in ("a step ran", "exit handler ran", "caught")), output
    assert not Path("checkpoint").exists()
    return done


def asked() -> Any:
    return json.loads(Path("asked.json").read_text(encoding="utf-8"))


# What the planner is asked.


def test_the_call_is_planned_with_all_that_it_was_given_and_nothing_of_the_script_runs_after_it() -> None:
    call = {**OPTIONS, "micro_batch_size": 32, "memory": "1GiB", "scaler": "no business of a plan"}
    done = planned("fine", "--memory", "24MiB", "--device", "h200", call=call)
    assert done.returncode == 0, done.stderr
    model, loss_fn, batch, optimizer, memory, device, options = asked()
    assert (model, loss_fn, batch, optimizer) == ("model", "loss", "batch", "the optimizer")
    assert (memory, device) == ("24MiB", "h200")
    rest = {name: value for name, value in OPTIONS.items() if name != "optimizer"}
    assert options == {**rest, "verify": "off"}  # which is proved apart
    assert "the script says something" in done.stderr
    assert done.stdout.startswith("64 samples within 24.0 MiB on cpu: 2 micro-batches of 32, recompute 3 blocks\n")
    assert "The script sets micro_batch_size=32; the plan has its own." in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("typed", "script", "expected"),
    [
        (["--memory", "8GiB"], "1GiB", "8GiB"),
        ([], "1GiB", "1GiB"),
        ([], 1234, 1234),
        ([], None, "free"),
        (["--memory", "free"], "1GiB", "free"),
        (["--memory", "0.5"], None, 0.5),
        (["--memory", "25%"], None, 0.25),
    ],
)
def test_the_budget_is_the_one_that_was_typed_else_that_of_the_script_else_what_is_free(
    typed: list[str], script: Any, expected: Any
) -> None:
    done = planned("fine", *typed, call={"optimizer": "adam", "memory": script})
    assert done.returncode == 0, done.stderr
    assert asked()[4] == expected
    wish = expected if isinstance(expected, float) else f'"{expected}"'
    plans_itself = script is not None and not typed
    use = "run the script: its TrainStep makes the plan" if plans_itself else f"anybatch.TrainStep(..., memory={wish})"
    assert done.stdout.endswith(f"\nTo use it: {use}\n")


def test_a_call_without_an_optimizer_says_what_is_missing() -> None:
    done = planned("fine", call={"micro_batch_size": None, "optimizer": None})
    text = " ".join(done.stdout.split())
    assert "anybatch.backward has no optimizer, so its state and its step are not in the figures" in text
    assert "The script sets" not in text
    use = 'save it with --json plan.json, then anybatch.backward(..., plan=anybatch.Plan.load("plan.json"))'
    assert f"\nTo use it: {use}\n" in done.stdout
    assert "anybatch.backward" not in planned("fine").stdout


def test_a_step_that_the_planner_takes_itself_is_a_step() -> None:
    done = run("train.py", "--", "steps")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("a step ran") == 1
    assert "saved a checkpoint" not in done.stderr


# How it ends.


def test_a_plan_is_saved_shown_and_written() -> None:
    done = planned("fine", "-o", "plan.html", "--json", "plan.json")
    assert done.returncode == 0, done.stderr
    assert Plan.load("plan.json") == PLAN
    assert pages.is_own_page(Path("plan.html"))
    assert "<title>anybatch plan: train.py</title>" in Path("plan.html").read_text(encoding="utf-8")
    assert '\nTo use it: anybatch.TrainStep(..., plan=anybatch.Plan.load("plan.json"))\n' in done.stdout
    assert "Configurations, fastest first" in done.stdout


@pytest.mark.parametrize("to", ["found.json", "-"])
def test_what_does_not_fit_ends_with_1_and_says_what_is_missing(to: str) -> None:
    done = planned("large", "-o", "plan.html", "--json", to)
    assert done.returncode == 1
    for said in (
        "train.py does not fit: The least is 3.0 MiB.",
        "needed: 3.0 MiB, allowed: 1.0 MiB",
        "held by: h.3, head\n",
    ):
        assert said in done.stderr
    found = json.loads(done.stdout if to == "-" else Path(to).read_text(encoding="utf-8"))
    assert (found["kind"], found["needed"], found["budget"]) == ("anybatch does not fit", 3 * MIB, MIB)
    assert found["modules"] == ["h.3", "head"]
    assert not Path("plan.html").exists()


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("none", "ended with exit code 3 without having called"),
        ("refused", "can't be planned. BatchError: device='z9' is no device"),
        ("broken", "planning the step of train.py failed, see above: KeyError"),
        ("dies", "the process was ended (9) while the first step of train.py was planned"),
    ],
)
def test_a_script_that_gives_no_plan_ends_with_2_and_says_why(mode: str, said: str) -> None:
    done = run("train.py", "--json", "-", "--", mode)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert ("ValueError: what led to it" in done.stderr) == (mode == "broken")
    assert not Path("checkpoint").exists()


def test_planning_that_takes_too_long_is_stopped_and_told_from_a_script_that_does() -> None:
    done = planned("hangs", "--timeout", "3")
    assert done.returncode == 2
    assert "the first step of train.py was not planned within 3 seconds; raise --timeout" in done.stderr


def test_what_can_not_be_written_down_never_reaches_the_script() -> None:
    done = planned("infinite")
    assert done.returncode == 2
    assert "ValueError: Out of range float values" in done.stderr
    assert "the process was ended (0) while the first step of train.py was planned" in done.stderr


# What is refused before anything runs.


def invoke(monkeypatch: pytest.MonkeyPatch, *arguments: str, ending: Ending | None = None) -> Result:
    def answer(*_: Any) -> Ending:
        if ending is None:
            pytest.fail("the script ran")
        return ending

    monkeypatch.setattr("anybatch.cli.plan.run_until_first_call", answer)
    return CliRunner().invoke(main, ["plan", "train.py", *arguments], catch_exceptions=False)


FINE = Ending("planned", {"plan": PLAN.to_dict(), "micro_batch_size": None, "updates": True, "plans_itself": False})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memory", "lots"], "got 'lots'; expected a size such as 8GiB"),
        (["--memory", "0"], "got '0'; expected"),
        (["--memory", "-1GiB"], "got '-1GiB'; expected"),
        (["--memory", "nan"], "got 'nan'; expected"),
        (["-o", "no/plan.html"], "does not exist"),
        (["--json", "no/plan.json"], "does not exist"),
        (["-o", "train.py"], "train.py exists and is not a page that anybatch wrote"),
        (["--patch", "train.py"], "train.py exists and is not a patch"),
        (["--json", "train.py"], "train.py exists and is not a plan"),
        (["-o", "plan.json"], "for JSON: --json plan.json"),
        (["--timeout", "0"], "0"),
    ],
)
def test_wrong_usage_ends_with_2_before_the_script_runs(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    done = invoke(monkeypatch, *arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert Path("train.py").read_text(encoding="utf-8") == SCRIPT


def test_its_own_files_are_overwritten_and_others_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        done = invoke(monkeypatch, "-o", "p.html", "--json", "p.json", ending=FINE)
        assert done.exit_code == 0, done.output
    assert Plan.load("p.json") == PLAN
    Path("empty.json").touch()
    assert invoke(monkeypatch, "--json", "empty.json", ending=FINE).exit_code == 0
    assert invoke(monkeypatch, "--json", "-", ending=FINE).exit_code == 0
    assert invoke(monkeypatch, "-o", "train.py", "--force", ending=FINE).exit_code == 0
    assert pages.is_own_page(Path("train.py"))


@pytest.mark.parametrize(
    ("more", "why"),
    [({}, "the script calls anybatch itself"),
     ({"change": "", "trouble": "it reads x", "found": "train.py:3"}, "the loop has to be changed by hand")],
)  # fmt: skip
def test_a_patch_that_can_not_be_written_is_reported(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, str], why: str
) -> None:
    done = invoke(monkeypatch, "--patch", "p.diff", ending=Ending("planned", FINE.facts | more))
    assert done.exit_code == 0, done.output
    assert f"No patch was written: {why}." in done.output
    assert not Path("p.diff").exists()


def test_a_patch_is_written_over_a_patch_and_over_anything_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"change": "--- a/train.py\n+++ b/train.py\n", "trouble": "", "found": "train.py:3"}
    ending = Ending("planned", FINE.facts | changed)
    Path("empty.diff").touch()
    for path in ("p.diff", "p.diff", "empty.diff"):
        assert invoke(monkeypatch, "--patch", path, ending=ending).exit_code == 0
        assert Path(path).read_text(encoding="utf-8") == changed["change"]
    assert invoke(monkeypatch, "--patch", "train.py", "--force", ending=ending).exit_code == 0
    assert Path("train.py").read_text(encoding="utf-8") == changed["change"]


# A real one.

REAL = """
import sys
import torch
import torch.nn.functional as F
import anybatch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
loss_fn = lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])
batch = {"x": torch.randn(256, 8), "y": torch.arange(256) % 3}
try:
    if sys.argv[1] == "backward":
        out = anybatch.backward(model, loss_fn, batch)
    else:
        plan = anybatch.Plan.load(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1] != "step" else None
        step = anybatch.TrainStep(model, loss_fn, optimizer, clip_norm=1.0, plan=plan)
        out = [step(batch) for _ in range(2)][-1]
    print(out.micro_batches, all(p.grad.isfinite().all() for p in model.parameters()))
finally:
    torch.save(model.state_dict(), "checkpoint")
"""


def test_a_real_step_is_planned_within_its_budget_and_runs_as_planned(folder: Path) -> None:
    (folder / "real.py").write_text(REAL, encoding="utf-8")
    done = run("real.py", "--memory", "220KiB", "--json", "plan.json", "--", "step")
    assert done.returncode == 0, done.stderr
    assert not Path("checkpoint").exists()
    plan = Plan.load("plan.json")
    assert plan.samples == 256
    assert plan.peak_bytes <= plan.budget == 220 * 1024 < plan.whole_bytes
    assert plan.micro_batches > 1 or plan.recompute
    assert "optimizer state" in plan.at_peak
    values = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    trained = forked_python.run([sys.executable, "real.py", "plan.json"], folder, values)
    assert trained.stdout == f"{plan.micro_batches} True\n", trained.stderr
    assert Path("checkpoint").exists()


def test_a_real_backward_is_planned_without_an_optimizer(folder: Path) -> None:
    (folder / "real.py").write_text(REAL, encoding="utf-8")
    done = run("real.py", "--memory", "180KiB", "--json", "-", "--", "backward")
    assert done.returncode == 0, done.stderr
    assert not Path("checkpoint").exists()
    plan = Plan.from_dict(json.loads(done.stdout))
    assert plan.micro_batches > 1
    assert not plan.chosen.optimizations
    assert not plan.at_peak.get("optimizer state")
    assert f"To use it: anybatch.backward(..., micro_batch_size={plan.micro_batch_size:g})\n" in done.stderr


CONTRASTIVE = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.randn(3, 512, 16):
    one, other = (F.normalize(model(x + torch.randn_like(x)), dim=1) for _ in range(2))
    loss = F.cross_entropy(one @ other.T, torch.arange(len(x)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
DEEP = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
blocks = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32)) for _ in range(12)]
model = torch.nn.Sequential(*blocks)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.randn(3, 256, 32):
    loss = F.cross_entropy(F.normalize(model(x), dim=1) @ F.normalize(x, dim=1).T, torch.arange(len(x)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SPLITS = CONTRASTIVE.replace(
    "F.cross_entropy(one @ other.T, torch.arange(len(x)))", "(1 - (one * other).sum(1)).mean()"
)


@pytest.mark.parametrize("form", [[], ["--json", "-"]])
def test_what_its_step_would_not_split_is_planned_whole_and_says_why(folder: Path, form: list[str]) -> None:
    (folder / "loop.py").write_text(DEEP, encoding="utf-8")
    done = run("loop.py", "--memory", "1800KiB", "--patch", "change.diff", *form)
    assert done.returncode == 0, done.stdout + done.stderr
    told = " ".join((done.stderr if form else done.stdout).split())
    assert "1 micro-batch of 256" in told
    assert "This is a plan of the whole batch" in told
    assert told.count("in micro-batches the gradient of Sequential") == 1
    assert "anybatch.Coupled" in told
    assert "Configurations" not in told
    subprocess.run(["patch", "-p1", "-i", "change.diff"], check=True, capture_output=True)
    assert "TrainStep(model, loss_fn, optimizer)" in Path("loop.py").read_text(encoding="utf-8")  # it fits as it is
    again = subprocess.run([sys.executable, "loop.py"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("form", [[], ["--json", "-"]])
def test_what_its_step_would_not_split_and_is_too_large_whole_ends_with_1(folder: Path, form: list[str]) -> None:
    (folder / "loop.py").write_text(CONTRASTIVE, encoding="utf-8")
    done = run("loop.py", "--memory", "700KiB", "--patch", "change.diff", *form)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "since its step does not add up over samples" in " ".join(done.stderr.split())
    assert "why it is not split: in micro-batches the gradient" in done.stderr
    assert "anybatch.Coupled" in done.stderr
    assert "import anybatch" not in done.stdout + done.stderr
    assert not Path("change.diff").exists()
    (folder / "loop.py").write_text(SPLITS, encoding="utf-8")
    done = run("loop.py", "--memory", "700KiB", "--patch", "change.diff", *form)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "import anybatch" in Path("change.diff").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("library", "memory", "plans_itself", "said"),
    [("transformers", "1MiB", False, 'ExactTrainer(..., memory="1MiB")'),
     ("lightning", 0.5, True, "ExactGradient(..., memory=0.5)"),
     ("transformers", None, True, "run the script: its ExactTrainer makes the plan"),
     ("", "1MiB", False, 'anybatch.TrainStep(..., memory="1MiB")')],
)  # fmt: skip
def test_a_step_of_a_library_is_told_what_takes_the_budget(
    library: str, memory: Any, plans_itself: bool, said: str
) -> None:
    facts = {"updates": True, "plans_itself": plans_itself, "library": library}
    assert _use_of(PLAN, memory, None, "plan.json" if library and memory else None, facts) == said


@pytest.mark.parametrize("verb", ["TrainStep", "backward"])
def test_where_a_split_is_refused_the_whole_batch_is_what_is_used(verb: str) -> None:
    facts = {"updates": verb == "TrainStep", "plans_itself": True, "refusal": "why"}
    rows = [replace(PLAN.chosen, recompute=recompute) for recompute in ((), ("0",))]
    fits, recomputes = (_use_of(replace(PLAN, chosen=row), "1MiB", None, None, facts) for row in rows)
    assert fits == f"anybatch.{verb}(...) without memory= and micro_batch_size=, since the whole batch fits"
    assert recomputes.endswith(f'then anybatch.{verb}(..., plan=anybatch.Plan.load("plan.json"))')


@pytest.mark.parametrize(("updates", "saved"), [(True, None), (False, None), (True, "plan.json")])
def test_the_call_that_is_printed_has_the_count_that_its_step_needs(updates: bool, saved: str | None) -> None:
    facts = {"updates": updates, "plans_itself": False, "count": 'anybatch.count_tokens("labels", shift=1)'}
    row = replace(PLAN.chosen, recompute=())
    assert _use_of(replace(PLAN, chosen=row), "1MiB", None, saved, facts).endswith(
        ', count=anybatch.count_tokens("labels", shift=1))'
    )


def test_one_byte_is_one_byte() -> None:
    done = run("train.py", "--memory", "1", "--", "plan")
    assert (done.returncode, "which is 1 byte; expected a unit, such as 1GiB" in " ".join(done.stderr.split())) == (
        2,
        True,
    )


TOKENS = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def epoch(batches):
    for tokens in batches:
        labels = tokens.masked_fill(torch.arange(20) > torch.arange(32)[:, None], -100)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
        optimizer.step()


epoch(torch.randint(50, (2, 32, 20)))
print(float(sum(one.double().sum() for one in model.parameters())))
"""


def test_a_loss_over_tokens_gets_the_count_that_its_step_needs(folder: Path) -> None:
    (folder / "loop.py").write_text(TOKENS, encoding="utf-8")
    done = run("loop.py", "--memory", "200KiB", "--patch", "change.diff")
    assert done.returncode == 0, done.stdout + done.stderr
    change = Path("change.diff").read_text(encoding="utf-8")
    assert 'TrainStep(model, loss_fn, optimizer, memory="200KiB", count=anybatch.count_tokens("' in change
    assert changed_prints(folder, "change.diff") == pytest.approx(prints(folder), rel=1e-5)


def test_the_changed_loop_takes_the_plan_that_was_saved_for_it(folder: Path) -> None:
    text = TOKENS.replace(
        "        optimizer.step()\n", "        model[0].weight.grad.clamp_(-1, 1)\n        optimizer.step()\n"
    )
    (folder / "loop.py").write_text(text, encoding="utf-8")
    done = run("loop.py", "--memory", "200KiB", "--patch", "change.diff", "--json", "made.plan")
    assert done.returncode == 0, done.stdout + done.stderr
    change, size = Path("change.diff").read_text(encoding="utf-8"), Plan.load("made.plan").micro_batch_size
    assert f"micro_batch_size={size:g}" in change
    Path("plan.diff").write_text(
        change.replace(f"micro_batch_size={size:g}", 'plan=anybatch.Plan.load("made.plan")'), encoding="utf-8"
    )
    assert changed_prints(folder, "plan.diff") == pytest.approx(prints(folder), rel=1e-5)


def test_a_module_of_a_package_is_planned_as_python_runs_it(folder: Path) -> None:
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").touch()
    (folder / "pack" / "loop.py").write_text(SPLITS, encoding="utf-8")
    text = "import sys\nfrom . import __name__ as p\nassert [p, *sys.argv[1:]] == ['pack', '--lr']\nfrom . import loop"
    (folder / "pack" / "train.py").write_text(text, encoding="utf-8")
    done = run("--memory", "700KiB", "-m", "pack.train", "--lr", "--patch", "change.diff")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "+++ b/pack/loop.py" in Path("change.diff").read_text(encoding="utf-8")
    for missing, said in ((["-m", "pack.none"], "pack.none"), (["-m"], "Argument expected for the -m option")):
        done = run(*missing)
        assert (done.returncode, said in done.stderr) == (2, True)


def prints(folder: Path) -> float:
    """The number that the script prints."""
    done = forked_python.run([sys.executable, "loop.py"], folder, environment())
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def changed_prints(folder: Path, patch: str) -> float:
    """The number that it prints with a patch; the file is then as it was."""
    original = (folder / "loop.py").read_bytes()
    with Path(patch).open(encoding="utf-8") as change:
        subprocess.run(["patch", "-p1"], stdin=change, check=True, capture_output=True)
    try:
        return prints(folder)
    finally:
        (folder / "loop.py").write_bytes(original)


# What is shown.


def shown(plan: Plan, **options: Any) -> str:
    console = Console(record=True, file=io.StringIO(), highlight=False, **options)
    show_plan(plan, console, ["A note that is so long that it has to go on in another line of the terminal, indented."])
    return console.export_text(styles=options.get("force_terminal", False))


def test_everything_fits_in_80_columns_and_nothing_is_cut_off() -> None:
    text = shown(PLAN, width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert not any(line.endswith(" ") for line in text.splitlines())
    for piece in ("*        2 of 32          3        -       -  23.0 MiB   58.0 ms  predicted\n", "confidence\n",
                  "!        1 of 64", "activations    12.0 MiB   52%  ███", PLAN.binding[:60], "and 2 more",
                  "h.2       3.0 MiB      1.0 MiB   3.0 ms  recompute\n"):  # fmt: skip
        assert piece in text, text
    assert "\n            indented." in text or "\n            terminal" in text
    assert text.index("2 of 32") < text.index("4 of 16") < text.index("1 of 64")


def test_a_terminal_gets_colour_a_pipe_of_ascii_gets_ascii() -> None:
    assert "\x1b[" in shown(PLAN, width=80, force_terminal=True, color_system="standard")

    class Ascii(io.StringIO):
        encoding = "ascii"

    file = Ascii()
    show_plan(PLAN, Console(file=file, width=80))
    assert file.getvalue().isascii()
    assert "52%  ####" in file.getvalue()


def test_long_lists_are_cut_and_say_so_and_the_chosen_way_is_always_there() -> None:
    rows = tuple(replace(WHOLE, micro_batches=n, peak_bytes=n, seconds=n / 1000) for n in range(1, 40))
    plan = replace(PLAN, alternatives=rows, modules=(ModuleShare("a.very.long.name." * 8, 2**40, 1),))
    text = shown(plan, width=80)
    assert "*        2 of 32" in text
    assert "and 28 more" in text  # the chosen way is the first of the twelve
    assert "a.very.long.name." * 8 in text
