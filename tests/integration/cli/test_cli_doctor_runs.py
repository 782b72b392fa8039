"""``anybatch doctor`` on scripts that train: the same numbers, the same processes, and a diagnosis."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from anybatch.cli import doctor as doctor_module
from anybatch.cli.launching import Finished
from anybatch.cli.main import main
from anybatch.records.runs import load_run
from doctor_scripts import both, forked_both, forked_doctor, light_torch

TRAIN = '''
"""Everything that a script may do: workers, children, code from text, a folder of its own, options."""
import argparse, hashlib, os, pickle, random, runpy, subprocess, sys
from pathlib import Path

here = os.getcwd()
import torch
import torch.multiprocessing as multiprocessing
from torch.utils.data import DataLoader, Dataset
from beside import WIDTH

class Samples(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return torch.randn(4) + index, torch.tensor(index % 3)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.3))
        self.head = torch.nn.Linear(WIDTH, 3)
    def forward(self, x):
        return self.head(self.body(x).relu())

def train(queue=None, steps=1):
    torch.manual_seed(5)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        loss = model(torch.randn(8, 4)).logsumexp(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    value = torch.cat([p.detach().flatten() for p in model.parameters()]).sum().item()
    if queue is None:
        return value
    own = "anybatch" in sys.modules and __name__ != "__main__"  # a fork has what was loaded before it
    print("child", __name__, multiprocessing.current_process().name, own, flush=True)
    queue.put(value)

def digest(*tensors):
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("-o")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    torch.use_deterministic_algorithms(True)
    print(sys.argv, sys.path[0] == str(Path(__file__).parent), __name__, __spec__, __file__, options)
    print("stdin", sys.stdin.read(), os.environ.get("PYTHONPATH"), sys.flags, sys.warnoptions)
    pickle.loads(pickle.dumps(Samples()))
    results = {}
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    losses = []
    os.chdir(Path(__file__).parent / "ünïcode folder")
    for context, workers in (("fork", 2), ("spawn", 1), (None, 0)):
        loader = DataLoader(Samples(), 8, shuffle=True, num_workers=workers, multiprocessing_context=context)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        scheduler.step()
        model.eval()
        with torch.no_grad():
            losses.append(model(torch.randn(5, 4) * 7 + 12).sum())
        model.train()
    for method in ("fork", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=train, args=(queue, 2), name="C")
        process.start()
        results[method] = [queue.get()]
        process.join()
        results[method] += [process.exitcode]
    space = {"torch": torch, "losses": losses}
    exec("w = torch.zeros(3, requires_grad=True); (w - 1).square().sum().backward(); losses.append(w.grad)", space)
    results["runpy"] = str(runpy.run_path(Path(__file__).parent / "beside.py", run_name="__other__"))[:0]
    command = [sys.executable, "-c", "import sys; print('anybatch' in sys.modules, sys.argv, sys.path[0])", "x"]
    results["subprocess"] = subprocess.run(command, capture_output=True, text=True).stdout
    results["weights"] = digest(*model.state_dict().values())
    results["losses"] = [value.tolist() for value in losses]
    results["state"] = digest(*(s for g in optimizer.state_dict()["state"].values() for s in g.values()))
    results["random"] = (digest(torch.get_rng_state()), random.random(), torch.rand(1).item())
    results["grads"] = [p.grad is None or digest(p.grad) for p in model.parameters()]
    results["hooks"] = [len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules()]
    for name, result in results.items():
        print(name, result)
    sys.exit(11)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    scripts = tmp_path / "skripte für 模型"
    (scripts / "ünïcode folder").mkdir(parents=True)
    (scripts / "träin.py").write_text(TRAIN, encoding="utf-8")
    (scripts / "beside.py").write_text("WIDTH = 5\n", encoding="utf-8")
    (scripts / "package").mkdir()
    (scripts / "package" / "__init__.py").write_text("", encoding="utf-8")
    return scripts


def test_a_script_has_the_same_results_bit_for_bit(folder: Path) -> None:
    arguments = ["träin.py", "--json", "results.txt", "-o", "report.html", "a", "--", "-b"]
    options = ["--json", "out.json", "--record", "run.jsonl"]
    without, done = both(folder, *arguments, options=options, stdin="piped")
    assert without.code == 11, without.err
    for there, here in zip(without.out.splitlines(), done.out.splitlines(), strict=True):
        assert here == there
    assert done.code == 11, done.err
    assert "child __mp_main__ C False" in done.out  # in a process of its own there is nothing of the doctor
    assert done.err.startswith(without.err)
    facts: dict[str, Any] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    assert facts["notes"] == []
    assert facts["exit_code"] == 11
    assert facts["steps"] == 9  # of this process alone, not of its children
    assert facts["script"] == "träin.py"
    assert facts["arguments"] == arguments[1:]
    assert [finding["name"] for finding in facts["findings"] if finding["severity"] != "info"] == []
    assert 0 <= facts["overhead"] < 1


MODULE = """
import sys
import torch
print(sys.argv[1:], __name__, __spec__.name, __package__, sys.path[0], bool(__file__))
from . import __name__ as above
print(above)
"""


def test_a_module_runs_as_with_python_m(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (folder / "package" / "train.py").write_text(MODULE, encoding="utf-8")
    light = light_torch(tmp_path_factory.mktemp("light"))
    arguments = ("-m", "package.train", "--lr", "3")
    without, done = both(folder, *arguments, options=["--json", "out.json"], without_paths=[light])
    assert (done.code, done.out) == (without.code, without.out) == (0, without.out), done.err
    assert "['--lr', '3'] __main__ package.train package" in done.out
    assert done.err.startswith(without.err)
    facts = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    assert (facts["script"], facts["arguments"]) == ("-m package.train", ["--lr", "3"])
    assert (facts["steps"], facts["findings"]) == (0, [])


LOOP = """
import os, sys, time, warnings
import torch
torch.manual_seed(0)
body, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
model = torch.nn.Sequential(body, torch.nn.ReLU(), head)
optimizer = torch.optim.SGD(body.parameters(), lr=1e-2)
for step in range(30):
    loss = torch.nn.functional.mse_loss(model(torch.randn(16, 4)), torch.randn(16, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_findings_change_the_exit_code_only_if_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is in no optimizer."""
    (folder / "loop.py").write_text(LOOP, encoding="utf-8")
    done = forked_doctor(folder, "--json", "-", "--record", "run.jsonl", "-o", "page.html", "loop.py", "--", "--x")
    facts = json.loads(done.out)
    assert done.code == 0
    first = facts["findings"][0]
    assert (first["name"], first["severity"]) == ("OPT_PARAM_MISSING", "error"), facts
    assert "model.2.weight" in first["place"]["parameters"]
    assert "head.parameters()" in first["fix"] or "model[2]" in first["fix"], first["fix"]
    assert "OPT_PARAM_MISSING" in done.err
    assert "OPT_PARAM_MISSING" in (folder / "page.html").read_text(encoding="utf-8")
    monkeypatch.chdir(folder)
    for own, fail_on, expected in ((0, "", 0), (0, "error", 1), (0, "warning", 1), (4, "error", 4), (4, "", 4)):

        def same_run(*_: Any, own: int = own, **__: Any) -> Finished:
            return Finished(own, 1.0, None)

        monkeypatch.setattr(doctor_module, "launch", same_run)
        monkeypatch.setattr(doctor_module, "load_run", lambda record: load_run(folder / "run.jsonl"))
        again = CliRunner().invoke(main, ["doctor", *(["--fail-on", fail_on] if fail_on else []), "loop.py"])
        assert (again.exit_code, "OPT_PARAM_MISSING" in again.output) == (expected, True), again.output


CRASH = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
for step in range(5):
    loss = model(torch.randn(16, 4)).square().mean()
    loss.backward()
    print(step)
    if step == 4:
        loss.backward()
"""
OWN_HOOK = "import sys\nsys.excepthook = lambda kind, *_: print('own', kind.__name__, file=sys.stderr)\n"


def test_a_crash_is_explained_once_behind_its_traceback(folder: Path) -> None:
    (folder / "crash.py").write_text(CRASH, encoding="utf-8")
    (folder / "own.py").write_text(CRASH.replace("torch.manual", OWN_HOOK + "torch.manual", 1), encoding="utf-8")
    with_own = forked_doctor(folder, "--json", "own.json", "own.py")
    without, done = forked_both(folder, "crash.py", options=["--json", "out.json"])
    line = CRASH[: CRASH.index("        loss.backward()")].count("\n") + 1
    lines = (line, line - 3)  # where it fails, and where the graph was freed
    assert without.code == done.code == 1
    assert done.err.startswith(without.err)
    assert done.err.count("BACKWARD_TWICE") == 1, done.err
    assert f"crash.py:{line}" in done.err[len(without.err) :]
    facts = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    assert facts["findings"][0]["name"].startswith("BACKWARD_TWICE")
    assert facts["findings"][0]["place"]["line"] in lines
    assert with_own.err.startswith("own RuntimeError\n")
    own = json.loads((folder / "own.json").read_text(encoding="utf-8"))
    assert own["findings"][0]["name"] == facts["findings"][0]["name"]


KILLED = "    if step == 15:\n        time.sleep(0.6)\n    if step == 20:\n        os.kill(os.getpid(), 9)\n"


def test_what_was_seen_until_the_process_died_is_diagnosed(folder: Path) -> None:
    (folder / "killed.py").write_text(LOOP + KILLED, encoding="utf-8")
    done = forked_doctor(folder, "--json", "killed.json", "--record", "killed.jsonl", "killed.py")
    assert done.code == -9
    facts = json.loads((folder / "killed.json").read_text(encoding="utf-8"))
    assert facts["exit_code"] == 137
    assert "was ended by SIGKILL; this is what was seen until then" in facts["notes"][0]
    assert facts["steps"] >= 15
    assert facts["findings"][0]["name"] == "OPT_PARAM_MISSING"
    last = json.loads((folder / "killed.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert (last["kind"], last["exit_code"]) == ("ended", 137)


SHOWN = """
import logging, sys, threading, traceback
import torch
torch.manual_seed(0)
F = torch.nn.functional

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(5, 2))
    def forward(self, x):
        return self.layers(x)

class Broken(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        raise KeyError("in step")

class NoSamples(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        raise IndexError("bad sample")

model, good = Net(), torch.nn.Linear(3, 2)
hooked = Net()
hooked.layers[1].register_forward_hook(lambda *arguments: None)
optimizer = Broken(good.parameters(), 0.1)
good(torch.randn(2, 3)).sum().backward()
plain = torch.randn(2, 3, requires_grad=True)

def twice():
    loss = good(torch.randn(2, 3)).sum()
    loss.backward()
    loss.backward()

FAILING = [
    lambda: model(torch.randn(2, 3)),
    lambda: hooked(torch.randn(2, 3)),
    lambda: F.cross_entropy(torch.randn(3, 4), torch.randn(2, 3)),
    lambda: next(iter(torch.utils.data.DataLoader(NoSamples()))),
    lambda: torch.nn.utils.clip_grad_norm_(3, 1.0),
    lambda: optimizer.step(),
    lambda: optimizer.zero_grad(nothing=1),
    lambda: good.load_state_dict({}),
    lambda: torch.autograd.grad(plain, plain),
    twice,
]
for function in FAILING:
    try:
        function()
    except Exception:
        traceback.print_exc()
        logging.exception("logged")
thread = threading.Thread(target=FAILING[0], name="T")
thread.start()
thread.join()
F.mse_loss(good(torch.randn(4, 3))[:, :1], torch.randn(4))  # these warn, and name this line
torch.optim.lr_scheduler.StepLR(torch.optim.SGD(good.parameters(), 0.1), 1).step()
F.softmax(torch.randn(3, 3))
try:
    FAILING[0]()
except RuntimeError as error:
    raise ExceptionGroup("all", [error]) from error
"""


def test_what_is_shown_of_errors_and_warnings_names_the_same_lines(folder: Path) -> None:
    (folder / "shown.py").write_text(SHOWN, encoding="utf-8")
    without, done = forked_both(folder, "shown.py")
    assert without.err.count("Traceback") > 20
    assert without.code == done.code == 1
    explained = re.sub(r"^anybatch doctor: .*?\n\n", "", done.err, flags=re.MULTILINE | re.DOTALL)
    shown = explained[: len(without.err)].splitlines()
    for there, here in zip(without.err.splitlines(), shown, strict=True):
        assert here == there


HELD = """
import os, sys, warnings
if sys.argv[1] == "closed":
    os.close(0)
import torch
warnings.warn("once", stacklevel=1)
for number in range(20000):
    print(number, "of many lines")
    if number % 500 == 0:
        print(number, file=sys.stderr)
os.chmod(os.getcwd(), 0o500)
print(sorted(os.listdir()))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="modes of folders")
def test_streams_and_folders_are_as_without(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    light = light_torch(tmp_path_factory.mktemp("light"))
    (folder / "held.py").write_text(HELD, encoding="utf-8")
    try:
        without, done = both(folder, "held.py", "closed", paths=[light])
    finally:
        folder.chmod(0o700)
    assert (done.code, done.out) == (without.code, without.out) == (0, without.out), done.err
    assert done.err.startswith(without.err)
