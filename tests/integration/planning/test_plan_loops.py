"""A loop that does without anybatch: its step is found, planned, and the printed change trains the same."""

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import anybatch
import forked_python
from anybatch import interception
from anybatch.cli.plan_loops import FoundStep
from anybatch.doctor.loopnames import inputs_of
from anybatch.doctor.loopparts import StepUnclear
from anybatch.doctor.loopsteps import step_at
from anybatch.planning.entrance import plan
from plan_loop_scripts import HEAD, Stop, folder, found  # noqa: F401 - one is a fixture
from source_tree import PACKAGE

# All numbers are small whole ones or halves of halves, in float64: sums are exact in any order, so that in the first
# update a batch in parts has bitwise the gradient of the whole one.
PLAIN = """
for epoch in range(1):
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        loss = (out - y).square().mean()  # of the batch
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
"""

STEPS = {
    "plain": PLAIN,
    "several statements in a line": """
for x, y in loader:
    out = model(x); loss = (out - y).square().mean(); optimizer.zero_grad(); loss.backward(); optimizer.step()
    seen.append(loss.item()); seen.append(len(x))
""",
    "clipped": """
for x, y in loader:
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=2.0**30)
    optimizer.step()
""",
    "in one expression, cleared afterwards": """
for i, (x, y) in enumerate(loader):
    (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "rows that are read afterwards": """
for x, y in loader:
    optimizer.zero_grad()
    out = model(x)
    seen.append(out.detach().sum().item())
    loss = (out - y).square().mean()
    loss.backward()
    optimizer.step()
    seen.append((out > 0).sum().item() + loss.item())
""",
    "terms that are read afterwards": """
for x, y in loader:
    optimizer.zero_grad()
    out = model(x)
    error, size = (out - y).square().mean(), out.abs().mean()
    loss = error + 0.5 * size
    loss.backward()
    optimizer.step()
    seen.extend([error.item(), size.item(), loss.item()])
""",
    "losses of samples that are read afterwards": """
for x, y in loader:
    optimizer.zero_grad()
    each = (model(x) - y).square().mean(1)
    each.mean().backward()
    optimizer.step()
    seen.append(each.max().item())
""",
    "terms of a batch with names": """
for batch in [{"n": 3, "x": x, "y": y} for x, y in loader]:
    optimizer.zero_grad()
    error = (model(batch["x"]) - batch["y"]).square().mean()
    (0.5 * error).backward()
    optimizer.step()
    seen.append(error.item())
""",
    "in a function": """
def train_one_epoch(net, loader, opt, device):
    net.train()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        opt.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        opt.step()


train_one_epoch(model, loader, optimizer, "cpu")
""",
    "in a class": """
class Trainer:
    def __init__(self):
        self.model, self.optimizer = model, optimizer

    def fit(self):
        for batch in loader:
            self.optimizer.zero_grad()
            loss = self.loss(self.model(batch[0]), batch[1])
            loss.backward()
            self.optimizer.step()

    def loss(self, out, y):
        return (out - y).square().mean()


Trainer().fit()
""",
    "two modules, a sum of losses, a mapping": """
other = whole(nn.Linear(4, 4))
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=2**-20)
for x, y in loader:
    batch = {"x": x, "y": y}
    total = 0
    features = model(batch["x"])
    for scale in (1, 2):
        total = total + scale * (other(features) - batch["y"]).square().mean()
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
""",
    "losses in a list": """
other = whole(nn.Linear(32, 4))
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=2**-20)
for x, y in loader:
    losses = []
    hidden = model[:3](x)
    for head in (other, model[3:]):
        losses.append((head(hidden) - y).square().mean())
    loss = sum(losses)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "the forward is in a function": """
def loss_fn(x, y):
    return (model(x) - y).square().mean()


for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(x, y)
    loss.backward()
    optimizer.step()
print(loss.item())
""",
    "one batch again and again": """
for step in range(1):
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    optimizer.step()
""",
}
BACKWARDS = {
    "a function that a loop calls": """
def train_step(x, y):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


for x, y in loader:
    seen.append(train_step(x, y))
""",
    "a method that is given the batch": """
class Trainer:
    def __init__(self):
        self.model, self.optimizer = model, optimizer

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = (self.model(source) - targets).square().mean()
        loss.backward()
        self.optimizer.step()


for x, y in loader:
    Trainer().run_batch(x, y)
""",
    "goes back twice": """
for x, y in loader:
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    penalty = model[0].weight.square().sum()
    penalty.backward()
    optimizer.step()
""",
    "the gradient is looked at": """
for x, y in loader:
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    optimizer.step()
""",
    "a model and an optimizer for each fold": """
for fold in range(1):
    model = whole(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    for epoch in range(1):
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-12)
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 2.0**30)
            optimizer.step()
""",
}


def changed(step: FoundStep, size: int = 32) -> str:
    """The script with the change, applied by patch itself, which it asks for micro-batches in place of a budget."""
    facts = {"plan": {"chosen": {"micro_batch_size": size}}}
    answer = step.with_change(facts, {"memory": "free"})
    assert not answer["trouble"], answer["trouble"]
    subprocess.run(["patch", "-p1"], input=answer["change"], text=True, check=True, capture_output=True)
    text = Path("train.py").read_text(encoding="utf-8")
    return text.replace('memory="free"', f"micro_batch_size={size}")


def trained(text: str, name: str) -> dict[str, Any]:
    Path(name).write_text(text, encoding="utf-8")
    return runpy.run_path(name, run_name="__main__")


@pytest.mark.parametrize("name", [*STEPS, *BACKWARDS])
def test_the_changed_loop_trains_bitwise_as_the_original(name: str) -> None:
    text = {**STEPS, **BACKWARDS}[name]
    before = trained(HEAD + text, "original.py")
    after_text = changed(found(text))
    assert ("anybatch.TrainStep(" in after_text) == (name in STEPS)
    after = trained(after_text, "after.py")
    at_first = trained(HEAD, "nothing.py")
    weights = [list(one["model"].parameters()) for one in (before, after)]
    assert not torch.equal(weights[0][0], next(at_first["model"].parameters()))
    for old, new in zip(*weights, strict=True):
        assert torch.equal(old, new)
        if not text.endswith("optimizer.zero_grad()\n"):
            assert torch.equal(old.grad, new.grad)
    assert before["seen"] == pytest.approx(after["seen"], rel=1e-6)


@pytest.mark.parametrize("name", [*STEPS, *BACKWARDS])
def test_the_changed_loop_trains_as_the_original_for_some_updates(name: str) -> None:
    several = "loader = [(inputs[i : i + 100], targets[i : i + 100]) for i in (0, 100, 200)] * 2"
    head = HEAD.replace("loader = [(inputs, targets)]", several)
    before = trained(head + {**STEPS, **BACKWARDS}[name], "original.py")
    changed(found({**STEPS, **BACKWARDS}[name]))
    text = Path("train.py").read_text(encoding="utf-8").replace("loader = [(inputs, targets)]", several)
    after = trained(text.replace('memory="free"', "micro_batch_size=32"), "after.py")
    for old, new in zip(before["model"].parameters(), after["model"].parameters(), strict=True):
        torch.testing.assert_close(old, new, rtol=1e-10, atol=1e-10)
    assert before["seen"] == pytest.approx(after["seen"], rel=1e-6)


@pytest.mark.usefixtures("constant_times")
@pytest.mark.parametrize("name", ["plain", "clipped", "rows that are read afterwards", "in a class"])
def test_the_plan_is_that_of_the_step_that_the_change_makes(name: str) -> None:
    step = found(STEPS[name])
    calls: list[interception.Call] = []

    def keep(call: interception.Call) -> None:
        calls.append(call)
        raise Stop

    token = interception.first_call.set(keep)
    try:
        with pytest.raises(Stop):
            trained(changed(step), "after.py")
    finally:
        interception.first_call.reset(token)
    of_loop, of_step = (planned(call) for call in (step.call, calls[0]))
    both = of_loop.rows.keys() & of_step.rows.keys()  # times decide which others are looked at
    assert len(both) > 1
    assert {size: of_loop.rows[size] for size in both} == {size: of_step.rows[size] for size in both}
    assert of_loop.at_all == of_step.at_all


class Planned(NamedTuple):
    at_all: tuple[int, ...]
    rows: dict[float, int]


def planned(call: interception.Call) -> Planned:
    optimizer, clip_norm = (call.options.get(name) for name in ("optimizer", "clip_norm"))
    made = plan(call.model, call.loss_fn, call.batch, optimizer, memory="120KiB", allow=(), clip_norm=clip_norm)
    rows = {row.micro_batch_size: row.peak_bytes for row in (made.chosen, *made.alternatives)}
    return Planned((made.whole_bytes, made.smallest_bytes, made.samples, made.budget), rows)


UNCLEAR = {
    "overwrites": ("x = model(x)", "(x - y).square().mean().backward()", "gives 'x' another value"),
    "keeps the graph": ("", "(model(x) - y).mean().backward(retain_graph=True)", "passes arguments to backward()"),
    "skips": (
        "out = model(x)\n    if out.isnan().any():\n        out = out * 0\n        continue",
        "(out - y).mean().backward()",
        "leaves the forward in its middle",
    ),
    "is no statement": ("", "nothing = (model(x) - y).mean().backward()", "does more than call backward"),
    "goes back twice": ("model(x).mean().backward(); pass", "model(x).sum().backward()", "as in a GAN, make a"),
    "has no batch": ("", "model[0].weight.sum().backward()", "no tensor with the samples of a batch"),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_is_unclear_is_refused_with_the_line_and_what_to_do(name: str) -> None:
    before, back, said = UNCLEAR[name]
    lines = ("optimizer.zero_grad()", before or "pass", back, "optimizer.step()")
    text = "\n    ".join(("\nfor x, y in loader:", *lines)) + "\n"
    with pytest.raises(StepUnclear, match=said.replace("(", r"\(").replace(")", r"\)")) as raised:
        found(text)
    assert "train.py" in str(raised.value)


def test_what_the_loop_reads_that_micro_batches_do_not_leave_is_said_and_planned_all_the_same() -> None:
    step = found(PLAIN.replace("out = model(x)", "h = model(x)\n        out = h - y\n        norm = out.norm()")
                 .replace("(out - y)", "(norm * 0 + out)").replace("loss.item()", "norm.item()"))  # fmt: skip
    answer = step.with_change({}, {"memory": None})
    assert "reads 'norm' of the forward after" in answer["trouble"]
    assert not answer["change"]
    assert step.call.loss_fn(step.call.model, step.call.batch).isfinite()


def test_a_loop_in_one_line_is_planned_and_not_rewritten() -> None:
    text = "loss = model(x).mean(); loss.backward(); seen.append(loss.item()); optimizer.step(); optimizer.zero_grad()"
    answer = found(f"\nfor x, y in loader: {text}\n").with_change({}, {"memory": None})
    assert ("in the line of its loop" in answer["trouble"], answer["change"]) == (True, "")


def test_a_state_that_goes_on_is_no_batch() -> None:
    text = """
cell = whole(nn.Linear(12, 4))
optimizer = torch.optim.SGD(cell.parameters(), lr=2**-12)
state = torch.zeros(256, 4).double()
for x, y in loader:
    optimizer.zero_grad()
    state = cell(torch.cat([x, state], 1))
    loss = (state - y).square().mean()
    loss.backward()
    optimizer.step()
    state = state.detach()
"""
    with pytest.raises(StepUnclear, match=r"gives 'state' another value.*OverTime"):
        found(text)


def test_any_line_of_the_loop_leads_to_its_step_as_that_of_a_crash_does() -> None:
    Path("train.py").write_text(HEAD + PLAIN, encoding="utf-8")
    names = runpy.run_path("train.py", run_name="__main__")
    lines = (HEAD + PLAIN).split("\n")
    for text in ("        optimizer.zero_grad()", "        out = model(x)", "        optimizer.step()"):
        step = step_at("train.py", lines.index(text) + 1, names)
        assert step.model is names["model"]
        assert list(step.batch) == ["x", "y"]
        assert step.loss_text().startswith("def loss_fn(model, batch):\n    x, y = batch\n    out = model(x)")
    with pytest.raises(StepUnclear, match="no backward"):
        step_at("train.py", lines.index("def whole(module):") + 2, names)


def test_names_that_come_from_outside() -> None:
    import ast

    cases = {
        "a = b\na += c": {"b", "c"},
        "a += 1": {"a"},
        "for i in r: s = s + i": {"r", "s"},
        "if t: q = 1\nelse: q = 2\nu = q": {"t"},
        "if t: q = 1\nu = q": {"t", "q"},
        "with f(x) as g: h = g(y)": {"f", "x", "y"},
        "a = [k * w for k in ks]": {"w", "ks"},
        "a = (lambda v: v + w)(1)": {"w"},
    }
    for text, expected in cases.items():
        assert inputs_of(ast.parse(text).body) == expected, text


IMPORTING_NOTHING = """
def epoch(loader, optimizer, model):
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize("docstring", ["", '"""Epochs."""\n'])
def test_a_file_that_imports_nothing_gets_its_import(docstring: str) -> None:
    Path("epochs.py").write_text(docstring + IMPORTING_NOTHING, encoding="utf-8")
    line = (docstring + IMPORTING_NOTHING).split("\n").index("        loss.backward()") + 1
    names = runpy.run_path("epochs.py") | trained(HEAD, "nothing.py")
    step = FoundStep(names | dict(zip("xy", names["loader"][0], strict=True)), "epochs.py", line, names["optimizer"])
    answer = step.with_change({}, {"memory": "free"})
    assert not answer["trouble"]
    assert answer["after"].startswith(f"{docstring}import anybatch\n" if docstring else "\nimport anybatch\ndef epoch")


def test_the_import_stands_before_a_loop_that_follows_the_imports_directly() -> None:
    Path("parts.py").write_text(HEAD, encoding="utf-8")
    text = "from parts import loader, model, optimizer" + IMPORTING_NOTHING.replace(
        "\ndef epoch(loader, optimizer, model):\n", "\n").replace("\n    ", "\n")  # fmt: skip
    Path("train.py").write_text(text, encoding="utf-8")
    names = runpy.run_path("parts.py")
    names |= dict(zip("xy", names["loader"][0], strict=True))
    answer = FoundStep(names, "train.py", 5, names["optimizer"]).with_change({}, {"memory": "free"})
    assert not answer["trouble"]
    assert answer["after"].index("import anybatch") < answer["after"].index("anybatch.TrainStep")


# The command itself.


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "from anybatch.cli.main import main; main(prog_name='anybatch')"
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    values = {**os.environ, "PYTHONPATH": path, "COLUMNS": "80", **environment}
    return forked_python.run([sys.executable, "-c", code, "plan", *arguments], Path.cwd(), values)


@pytest.fixture
def whole_run() -> Iterator[None]:
    yield
    assert not Path("ran to its end").exists()


@pytest.mark.usefixtures("whole_run")
def test_a_plain_script_is_planned_and_its_change_is_printed_and_written() -> None:
    Path("train.py").write_text(HEAD + PLAIN + "open('ran to its end', 'w')\n", encoding="utf-8")
    done = command("train.py", "--memory", "100KiB", "--patch", "use.diff", "--json", "plan.json")
    assert done.returncode == 0, done.stderr
    patch = Path("use.diff").read_text(encoding="utf-8")
    assert patch in f"{done.stdout}\n"
    assert '+step = anybatch.TrainStep(model, loss_fn, optimizer, memory="100KiB")' in patch
    assert "To use it, change the loop at" in done.stdout
    assert anybatch.Plan.load("plan.json").peak_bytes <= 100 * 1024


def test_a_loop_with_batch_norm_says_how_it_can_be_split_and_is_planned_so() -> None:
    text = (HEAD + PLAIN).replace("nn.ReLU(), nn.Linear(32, 4)", "nn.BatchNorm1d(32), nn.Linear(32, 4)")
    Path("train.py").write_text(text, encoding="utf-8")
    whole = command("train.py", "--memory", "100KiB")
    assert whole.returncode == 1
    assert "anybatch plan --batch-norm ghost train.py" in whole.stderr
    split = command("--batch-norm", "ghost", "train.py", "--memory", "100KiB")
    assert split.returncode == 0, split.stderr
    assert '+step = anybatch.TrainStep(model, loss_fn, optimizer, memory="100KiB", batch_norm="ghost")' in split.stdout


TORCHRUN = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
rank = int(os.environ["LOCAL_RANK"])
net = nn.parallel.DistributedDataParallel(model)
for x, y in loader:
    optimizer.zero_grad()
    loss = (net(x) - y).square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("early", ["", "import os\nos.environ['WORLD_SIZE']\n", "import sys\nsys.excepthook = print\n"])
def test_a_script_for_torchrun_is_planned_as_its_only_rank(early: str) -> None:
    Path("train.py").write_text(early + HEAD + TORCHRUN, encoding="utf-8")
    done = command("train.py", "--memory", "1MiB")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "started again as the only rank of torchrun" in done.stderr
    assert "Traceback" not in done.stderr
    assert "step = anybatch.TrainStep(net, loss_fn, optimizer, memory=" in done.stdout


def test_a_step_that_a_library_takes_is_named_with_its_adapter() -> None:
    text = "from accelerate import Accelerator\nfast = Accelerator(cpu=True)\n" + PLAIN.replace(
        "loss.backward()", "fast.backward(loss)"
    )
    Path("train.py").write_text(HEAD + text, encoding="utf-8")
    done = command("train.py", "--memory", "1MiB")
    assert done.returncode == 2
    assert "anybatch.integrations.accelerate.train_step" in " ".join(done.stderr.split())
