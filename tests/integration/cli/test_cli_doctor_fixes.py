"""``anybatch doctor --fix``: the patch mends the script, and a trial does nothing to the world."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from anybatch.cli.doctor import Trials, is_users, with_fixes
from anybatch.cli.doctor_trial import Shadow, refusal
from anybatch.cli.options import Target
from anybatch.doctor.fixes import trying
from anybatch.doctor.fixes.source import Edit
from anybatch.records.diagnoses import Diagnosis
from anybatch.records.findings import Finding
from anybatch.records.runs import Run
from doctor_scripts import DOCTOR, environment, forked_doctor
from source_tree import PACKAGE

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")

MODEL = '''\
"""A model."""
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = [nn.Linear(width, width) for _ in range(2)]   # two
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)
'''
TRAIN = """\
import argparse
import torch
import torch.nn.functional as F
from pack.model import Net

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
width = parser.parse_args().width
torch.manual_seed(0)
net = Net(width)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
with open("log.txt", "a") as log:
    for step in range(70):
        x = torch.randn(32, width)
        loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    log.write("one run\\n")
print("loss", loss.item())
"""


def test_the_patch_of_an_imported_file_mends_a_module_that_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "pack"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    done = forked_doctor(tmp_path, "--fix", "--json", "out.json", "-m", "pack.train", "--width", "6")
    assert done.code == 0, done.err
    assert (folder / "model.py").read_text(encoding="utf-8") == MODEL
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "one run\n"
    assert "loss" in done.err  # standard output is the patch's
    assert "+        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])   # two" in done.out
    values = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    finding = values["findings"][0]
    assert values["patch"] == finding["patch"] == done.out
    assert (finding["name"], finding["fix_kind"]) == ("OPT_PARAM_UNREGISTERED", "tried")
    assert re.fullmatch(
        r"tried: the loss falls from [\d.]+ to [\d.]+ in \d+ steps, and .* is gone .*", finding["proof"]
    )
    applied = subprocess.run(
        ["git", "apply", "-"], cwd=tmp_path, input=done.out, text=True, capture_output=True, check=False
    )
    assert applied.returncode == 0, applied.stderr
    again = forked_doctor(tmp_path, "--fix", "--patch", "fix.patch", "-m", "pack.train", "--width", "6")
    assert "OPT_PARAM_UNREGISTERED" not in again.err
    assert (tmp_path / "fix.patch").read_text(encoding="utf-8") == ""
    assert again.out.startswith("loss")


STEPS = """\
import torch
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(5):
    optimizer.zero_grad()
    net(torch.ones(4, 3)).mean().backward()
    optimizer.step()
"""


def trials(folder: Path, text: str, seconds: float = 120.0, steps: int = 60) -> Trials:
    """Trials of a script; what they write goes beside it."""
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    (folder / "trials").mkdir()
    return Trials(Target(str(script), (str(script), "--a"), ("--a",)), folder / "trials", steps, seconds)


WRITES = (
    STEPS
    + """
import os, pathlib, sys, tempfile, numpy
assert sys.argv == [__file__, "--a"] and sys.path[0] == os.path.dirname(__file__), (sys.argv, sys.path)
here = pathlib.Path(__file__).parent
os.makedirs(here / "out" / "deep", exist_ok=True)
torch.save(net.state_dict(), here / "out" / "deep" / "last.pt")
net.load_state_dict(torch.load(here / "out" / "deep" / "last.pt"))
assert os.path.exists(here / "out/deep/last.pt") and not (here / "never").exists()
with open(here / "kept.txt", "a") as file:
    file.write(" and more")
assert (here / "kept.txt").read_text() == "what was there and more"
(here / "new.txt").write_text("new")
os.replace(here / "new.txt", here / "newer.txt")
os.remove(here / "newer.txt")
numpy.save(here / "array.npy", numpy.ones(3))
assert numpy.load(here / "array.npy").sum() == 3
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "a", "b").mkdir(parents=True)
    pathlib.Path(folder, "a", "b", "c").write_text("c")
print("to its end")
"""
)


def test_what_a_trial_writes_goes_to_its_folder_and_is_read_from_there(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("what was there", encoding="utf-8")
    done = trials(tmp_path, WRITES).start(None)
    output = (tmp_path / "trials" / "trial0" / "output").read_text(encoding="utf-8")
    assert (done.code, done.refused, done.run.steps) == (0, "", 5), output
    assert output == "to its end\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["kept.txt", "train.py", "trials"]
    assert (tmp_path / "kept.txt").read_text(encoding="utf-8") == "what was there"


READS_ITSELF = """\
import inspect, pathlib, traceback
import torch

def told():
    return 1

print(inspect.getsource(told).split()[-1], pathlib.Path(__file__).read_text().count("return 2"))
print(traceback.extract_stack()[-1].line, told())
"""


def test_a_script_on_trial_is_the_edited_one_however_it_is_read(tmp_path: Path) -> None:
    on_trial = trials(tmp_path, READS_ITSELF)
    path = str(tmp_path / "train.py")
    after = READS_ITSELF.replace("return 1", "return 2")
    assert on_trial.start(Edit(path, READS_ITSELF, after)).code == 0
    output = (tmp_path / "trials" / "trial0" / "output").read_text(encoding="utf-8")
    assert output == "2 2\nprint(traceback.extract_stack()[-1].line, told()) 2\n"
    assert (tmp_path / "train.py").read_text(encoding="utf-8") == READS_ITSELF


def test_a_trial_ends_after_its_steps_though_the_script_goes_on(tmp_path: Path) -> None:
    text = STEPS.replace("range(5)", "range(10**9)").replace(
        "    optimizer.step()", "    try:\n        optimizer.step()\n    except:\n        print('caught')"
    )
    done = trials(tmp_path, text, steps=7).start(None)
    assert (done.code, done.late) == (0, False)
    assert done.run.steps == 8


REFUSED = {
    "another program": ("import subprocess; subprocess.run(['touch', 'touched'])", "start touch"),
    "a shell": ("import os; os.system('touch touched')", "start touch"),
    "a file is deleted": ("import os; os.remove('kept.txt')", "remove "),
    "a file is renamed": ("import os; os.rename('kept.txt', 'touched')", "rename "),
    "a folder is deleted": ("import shutil; shutil.rmtree('kept')", "rmtree "),
    "a data base": ("import sqlite3; sqlite3.connect('touched')", "connect touched"),
    "another machine": ("import socket; socket.create_connection(('192.0.2.1', 80), 1)", "connect to 192.0.2.1"),
}


def test_what_can_not_be_kept_apart_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept.txt").touch()
    tries = "".join(f"try:\n    {code}\nexcept PermissionError: pass\n" for code, _ in REFUSED.values())
    done = trials(tmp_path, f"import os; os.chdir(os.path.dirname(__file__))\n{tries}").start(None)
    said = (tmp_path / "trials" / "trial0" / "refused").read_text(encoding="utf-8").splitlines()
    assert len(said) == len(REFUSED)
    for one, (_, beginning) in zip(said, REFUSED.values(), strict=True):
        assert one.startswith(beginning), (one, beginning)
    assert done.refused == said[0]
    assert done.unusable == "the script would start touch"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["kept", "kept.txt", "train.py", "trials"]


def test_a_trial_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    done = trials(tmp_path, f"import time\ntime.sleep(600)\n{STEPS}", seconds=1.0).start(None)
    assert done.late
    assert done.unusable == "it takes too long"


@pytest.mark.parametrize(("timeout", "seconds"), [(None, 120.0), (3600.0, 120.0), (5.0, 5.0)])
def test_a_trial_has_two_minutes_or_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: float | None, seconds: float
) -> None:
    class Begun(Exception):
        pass

    def trials_of(target: Target, folder: Path, steps: int, limit: float) -> None:
        raise Begun(limit)

    monkeypatch.setattr("anybatch.doctor.fixes.trying.with_edits", lambda diagnosis: ["a finding"])
    monkeypatch.setattr("anybatch.doctor.fixes.trying.steps_for", lambda found: 60)
    monkeypatch.setattr("anybatch.cli.doctor.Trials", trials_of)
    target = Target("train.py", ("train.py",), ())
    with pytest.raises(Begun) as begun:
        with_fixes(Diagnosis((), verdict="faults"), Run([]), target, tmp_path, timeout)
    assert begun.value.args == (seconds,)


def test_a_trial_that_fails_says_so(tmp_path: Path) -> None:
    done = trials(tmp_path, f"{STEPS}\nraise ValueError('no')\n").start(None)
    assert (done.code, done.unusable) == (1, "")


SLOW_AGAIN = """\
import os, time
if "trial" in os.environ.get("TMPDIR", ""):
    print("on trial", flush=True)
    time.sleep(600)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(30):
    x = torch.randn(8, 3)
    (net(x) - x[:, :1]).pow(2).mean().backward()
    optimizer.step()
"""


def test_an_interrupted_trial_ends_the_trials_and_not_the_report(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOW_AGAIN, encoding="utf-8")
    process = subprocess.Popen(
        [*DOCTOR, "--fix", "train.py"], cwd=tmp_path, env=environment(PACKAGE.parent), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "trying fixes" in line:
            break
    time.sleep(3)  # until the trial runs
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == ""
    assert "ZERO_GRAD_MISSING" in err
    assert "The trial of a fix was interrupted" in " ".join(err.split())


def test_what_is_not_tried_is_said(tmp_path: Path) -> None:
    found = tuple(
        Finding("It is.", severity="error", code=code, name=name)
        for code, name in (("AB609", "NOT_LEARNING"), ("AB656", "LABELS_UNRELATED"))
    )
    target = Target("train.py", ("train.py",), ())
    diagnosis, patch = with_fixes(Diagnosis(found, verdict="faults"), Run([]), target, tmp_path, 1.0)
    assert patch == ""
    assert diagnosis.findings == found
    assert diagnosis.notes == ("No fix was tried for AB609 NOT_LEARNING, AB656 LABELS_UNRELATED.",)
    assert not list(tmp_path.iterdir())


def test_an_edit_that_another_fault_made_look_bad_is_tried_again_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (
        Finding("It is.", severity="error", code=code, name=name)
        for code, name in (("AB102", "ONE"), ("AB301", "TWO"), ("AB601", "THREE"))
    )
    here = tmp_path / "train.py"
    diagnosis = Diagnosis((first, second, third), verdict="faults")
    asked: list[str] = []
    texts = ["1\n2\n"]

    def outcome(finding: Finding, *others: object) -> trying.Outcome:
        asked.append(finding.name)
        if finding is third or (finding is first and "TWO" not in asked):
            return trying.Outcome(None, "an edit was tried and is no good")
        texts.append(texts[-1].replace(*(("1", "one") if finding is first else ("2", "two"))))
        edit = Edit(str(here), texts[-2], texts[-1], "it")
        return trying.Outcome(edit, "tried", trying.Tried(diagnosis, Run([])))

    monkeypatch.setattr(trying, "with_edits", lambda _: [first, second, third])
    monkeypatch.setattr(trying, "tried", outcome)
    monkeypatch.chdir(tmp_path)
    made, patch = with_fixes(diagnosis, Run([]), Target("train.py", ("train.py",), ()), tmp_path, 1.0)
    assert asked == ["ONE", "TWO", "THREE", "ONE"]  # nothing was mended after the third was tried
    assert [line for line in patch.splitlines() if line[:1] in "+-"][2:] == ["-1", "-2", "+one", "+two"]
    assert [one.fix_kind for one in made.findings] == ["tried", "tried", "suggestion"]
    assert made.notes == ("AB601 THREE: an edit was tried and is no good.",)


def test_files_of_python_and_of_packages_are_not_the_users(tmp_path: Path) -> None:
    assert is_users(str(tmp_path / "train.py"))
    assert not any(is_users(path) for path in (os.__file__, pytest.__file__, str(PACKAGE / "step.py")))


def test_reading_is_allowed_and_so_is_the_trials_own_folder(tmp_path: Path) -> None:
    folder, outside = str(tmp_path), "/home/me/data.txt"
    assert refusal("open", (outside, "r", os.O_RDONLY), folder) == ""
    assert refusal("open", (outside, "w", os.O_WRONLY | os.O_CREAT), folder) == f"write {outside}"
    assert refusal("open", (f"{folder}/x", "w", os.O_WRONLY), folder) == refusal("open", ("/dev/null", "w", 1), folder)
    assert refusal("open", (3, "w", os.O_WRONLY), folder) == ""
    assert refusal("os.remove", ("b", 5), folder) == ""
    assert refusal("socket.connect", (None, ("127.0.0.1", 80)), folder) == ""
    assert Shadow(folder).own(f"{folder}/x") is None
    assert Shadow(folder).own("/home/me/x") == f"{folder}/files/home/me/x"
