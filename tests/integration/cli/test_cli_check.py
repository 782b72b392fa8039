"""``anybatch check``: the user's own script, stopped at its first step."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

import forked_python
from anybatch import Certificate
from anybatch.cli import script as script_module
from anybatch.cli.check import show
from anybatch.cli.main import VERBS, main
from anybatch.records.certificates import Reason
from source_tree import PACKAGE

TRAIN = """
import argparse, atexit, os, pickle, sys, threading

parser = argparse.ArgumentParser()
parser.add_argument("--mode", default="step")
mode = parser.parse_args().mode
atexit.register(lambda: print("exit handler ran"))
if mode == "ends":
    sys.exit(3)
if mode == "fails":
    raise ValueError("from the script itself")
if mode == "dies":
    os._exit(7)
if mode == "hangs":
    print("waiting", flush=True)
    threading.Event().wait()

import torch, torch.nn.functional as F
import anybatch
from beside import WIDTH

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return torch.full((4,), float(index)), torch.tensor(index % 3 if index % 4 else -100)

def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

if __name__ == "__main__":
    print("script", sys.argv[0], __name__, os.path.basename(__file__), __spec__, sys.path[0])
    pickle.loads(pickle.dumps(Samples()))  # classes of the script are found again
    layers = [torch.nn.Linear(4, WIDTH), torch.nn.Linear(WIDTH, 3)]
    if mode == "norm":
        layers.insert(1, torch.nn.BatchNorm1d(WIDTH))
    model = torch.nn.Sequential(*layers)
    count = anybatch.count_tokens("1") if mode != "uncounted" else anybatch.count_samples
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), count=count)

    def train():
        try:
            for batch in torch.utils.data.DataLoader(Samples(), 8, num_workers=2 if mode == "workers" else 0):
                if mode == "backward":
                    anybatch.backward(model, loss_fn, batch, count=count, micro_batch_size=3)
                else:
                    step(batch)
                print("a step ran")
        finally:
            print("finally ran")

    if mode == "single":
        anybatch.backward(model, loss_fn, [torch.ones(1, 4), torch.zeros(1, dtype=torch.long)])
    if mode == "broken":
        anybatch.backward(model, lambda model, batch: {}[str(model)], [torch.ones(2, 4)])
    if mode == "thread":
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    elif mode == "fork":
        process = os.fork()
        if process == 0:
            train()
        os.waitpid(process, 0)
        print("the parent went on")
    else:
        train()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "scripts" / "beside.py").write_text("WIDTH = 5\n", encoding="utf-8")
    return tmp_path


ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "PYTHONUNBUFFERED": "",  # what is printed has to be flushed
}
STARTED = {"step", "thread", "ends", "fails", "dies", "hangs"}  # in processes that are really started


COMMAND = [sys.executable, "-c", "from anybatch.cli.main import main; main(prog_name='anybatch')"]


def anybatch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forked_python.run([*COMMAND, *arguments], folder, ENVIRONMENT)


def check(folder: Path, mode: str, *options: str) -> subprocess.CompletedProcess[str]:
    arguments = ("check", "scripts/train.py", *options, "--", "--mode", mode)
    if mode not in STARTED:
        return anybatch(folder, *arguments)
    return subprocess.run(
        [*COMMAND, *arguments], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )


def nothing_ran_after_the_step(done: subprocess.CompletedProcess[str]) -> bool:
    output = done.stdout + done.stderr
    return not any(text in output for text in ("a step ran", "finally ran", "exit handler ran", "went on"))


MODES = ["step", "backward", "thread", "workers"] + (["fork"] if hasattr(os, "fork") else [])


@pytest.mark.parametrize("mode", MODES)
def test_the_first_step_is_checked_and_nothing_runs_after_it(folder: Path, mode: str) -> None:
    done = check(folder, mode, "--fail-on", "not-exact")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("exact: in micro-batches the gradient of Sequential is the whole batch's\n")
    assert "\x1b" not in done.stdout
    assert f"script scripts/train.py __main__ train.py None {folder / 'scripts'}" in done.stderr  # as Python does it
    assert nothing_ran_after_the_step(done), done.stdout + done.stderr


def test_the_arguments_of_the_step_are_those_that_are_checked(folder: Path) -> None:
    done = check(folder, "uncounted", "--json", "certificate.json", "--fail-on", "not-exact")
    assert done.returncode == 1, done.stderr
    assert '    count=anybatch.count_tokens("1")\n' in done.stdout
    certificate = Certificate.from_dict(json.loads((folder / "certificate.json").read_text(encoding="utf-8")))
    assert str(certificate) == done.stdout.rstrip("\n")
    assert [reason.code for reason in certificate.reasons] == ["count"]
    assert nothing_ran_after_the_step(done)


def test_json_has_standard_output_for_itself_and_a_finding_alone_is_no_failure(folder: Path) -> None:
    done = check(folder, "norm", "--json", "-")
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    assert facts["exact"] is False
    assert [(reason["code"], reason["where"]) for reason in facts["reasons"]] == [("batch-norm", "1")]
    assert "`1` (BatchNorm1d) couples the samples" in " ".join(done.stderr.split())


PLAIN = """
import torch, torch.nn.functional as F

model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in [(torch.randn(8, 4), torch.randint(3, (8,)))] * 3:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print("a step ran")
"""


def test_a_loop_without_anybatch_is_checked_at_its_first_update_in_every_format(folder: Path) -> None:
    (folder / "plain.py").write_text(PLAIN, encoding="utf-8")
    files = [f"--format={name}={name}.txt" for name in ("sarif", "github", "junit", "line")]
    done = anybatch(folder, "check", *files, "--json", "json.txt", "plain.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("not exact: in micro-batches the gradient of Sequential")
    assert nothing_ran_after_the_step(done)
    written = {name: (folder / f"{name}.txt").read_text("utf-8") for name in ("json", "sarif", "github", "junit")}
    assert json.loads(written["json"])["reasons"][0]["code"] == "batch-norm"
    run = json.loads(written["sarif"])["runs"][0]
    region = run["results"][0]["locations"][0]["physicalLocation"]["region"]
    assert (run["tool"]["driver"]["name"], region["startLine"]) == ("anybatch check", 9)
    assert "::error file=plain.py,line=9," in written["github"]
    assert 'testsuites name="anybatch check" tests="2" failures="1"' in written["junit"]
    assert (folder / "line.txt").read_text("utf-8").startswith("plain.py:9:5: error batch-norm ")
    alone = anybatch(folder, "check", "plain.py", "--format", "line")
    assert alone.stdout == (folder / "line.txt").read_text("utf-8")
    assert "not exact" not in alone.stderr


TWO = PLAIN.replace("torch.nn.BatchNorm1d(5)", "torch.nn.ReLU()").replace(
    "    loss.backward()\n", "    loss.backward()\n    torch.pdist(model(x)).mean().backward()\n"
)


def test_a_loss_that_goes_back_beside_the_one_that_is_checked_is_noted(folder: Path) -> None:
    (folder / "plain.py").write_text(TWO, encoding="utf-8")
    done = anybatch(folder, "check", "--fail-on", "note", "plain.py")
    assert done.returncode == 1, done.stderr
    note = " ".join(done.stdout.split())
    assert "note: other-losses, in loss: Only the loss whose backward() is called at" in note
    assert "plain.py:9 was checked. The loop calls backward() for other losses, too (line 10)" in note


BY_HAND = """
import torch, torch.nn.functional as F

model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for i, (x, y) in enumerate([(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(6)]):
    loss = F.cross_entropy(model(x), y)
    (loss / 3).backward()
    if (i + 1) % 3 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_loop_that_adds_up_batches_by_hand_is_noted(folder: Path) -> None:
    (folder / "plain.py").write_text(BY_HAND, encoding="utf-8")
    done = anybatch(folder, "check", "plain.py")
    assert done.stdout.startswith("exact")
    assert "weighed-by-hand, in loss: The loop adds up the gradients of 3 batches" in " ".join(done.stdout.split())


def test_a_format_that_there_is_not_is_refused(folder: Path) -> None:
    train = str(folder / "scripts" / "train.py")
    done = CliRunner().invoke(main, ["check", "--format", "html", train])
    assert (done.exit_code, "got 'html'; expected one of terminal, sarif" in done.output) == (2, True)


def test_a_terminal_that_is_gone_takes_nothing_from_the_files(folder: Path) -> None:
    (folder / "plain.py").write_text(PLAIN, encoding="utf-8")
    for verb in ("check", "plan", "doctor"):
        command = [*COMMAND, verb, "--json", f"{verb}.json", "plain.py"]
        if verb == "check":  # in a process that is really started
            with Path("/dev/full").open("w") as full:
                subprocess.run(command, cwd=folder, env=ENVIRONMENT, stdout=full, stderr=full, check=False)
        else:
            forked_python.run(command, folder, ENVIRONMENT, to="/dev/full")
        assert json.loads((folder / f"{verb}.json").read_text("utf-8")), verb


NO_CERTIFICATE = {
    "ends": "ended with exit code 3 without having called",
    "fails": "failed before it called",
    "dies": "ended with exit code 7 without having called",
    "single": "BatchError: the batch has 1 sample",
    "broken": "failed in the check, see above: KeyError",
}


@pytest.mark.parametrize("mode", NO_CERTIFICATE)
def test_a_script_that_comes_to_no_step_gives_exit_code_2_and_says_why(folder: Path, mode: str) -> None:
    done = check(folder, mode)
    assert done.returncode == 2
    assert done.stdout == ""
    assert NO_CERTIFICATE[mode] in done.stderr
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    if mode == "fails":  # the script's own traceback, and nothing of ours in it
        assert done.stderr.index("Traceback") < done.stderr.index("ValueError: from the script itself")
        assert len(frames) == 1
        assert "train.py" in frames[0]


def test_a_script_that_takes_too_long_is_stopped(folder: Path) -> None:
    done = check(folder, "hangs", "--timeout", "0.5")
    assert done.returncode == 2
    assert "within 0.5 seconds" in done.stderr
    assert nothing_ran_after_the_step(done)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_the_script_and_the_command_as_a_shell_expects(folder: Path) -> None:
    # Of a shell's process in the background a script would ignore it.
    command = [*COMMAND, "check", "scripts/train.py", "--mode", "hangs"]
    process = subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "waiting\n"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "KeyboardInterrupt" in err


_WAITING = "print('waiting', flush=True); threading.Event().wait()"
_CATCHES = f"try:\n    {_WAITING}\nexcept KeyboardInterrupt:\n    sys.exit(0)"
_IGNORES = f"signal.signal(signal.SIGINT, signal.SIG_IGN); {_WAITING}"


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(
    ("text", "number", "code"),
    [(_CATCHES, signal.SIGINT, 130), (_IGNORES, signal.SIGINT, 130), (_WAITING, signal.SIGTERM, -signal.SIGTERM)],
    ids=["it catches Ctrl-C", "it ignores Ctrl-C", "it is terminated"],
)
def test_a_signal_ends_the_command_whatever_the_script_makes_of_it(
    folder: Path, text: str, number: int, code: int
) -> None:
    (folder / "waits.py").write_text(f"import signal, sys, threading\n{text}\n", encoding="utf-8")
    process = subprocess.Popen(
        [*COMMAND, "check", "waits.py"], cwd=folder, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "waiting\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip()) == (code, "")


def test_usage_errors_are_exit_code_2_and_say_what_to_do(folder: Path) -> None:
    runner = CliRunner()
    train = str(folder / "scripts" / "train.py")
    unknown = runner.invoke(main, ["check", "--fail-onn", "note", train])
    assert (unknown.exit_code, "--fail-on" in unknown.output) == (2, True)
    assert runner.invoke(main, ["check", str(folder / "none.py")]).exit_code == 2
    launcher = runner.invoke(main, ["check", "-m", "torch.distributed.run", "--nproc-per-node", "2", train])
    assert (launcher.exit_code, "name the script that trains" in launcher.output) == (2, True)
    assert runner.invoke(main, ["check", train, "--fail-on", "nothing"]).exit_code == 2
    missing = runner.invoke(main, ["check", train, "--json", str(folder / "no" / "c.json")])
    assert (missing.exit_code, "does not exist" in missing.output) == (2, True)


def test_the_verbs_are_listed_with_their_help_and_an_unknown_one_is_refused() -> None:
    runner = CliRunner()
    listed = runner.invoke(main, ["--help"]).output
    assert all(name in listed and text in listed for name, text in VERBS.items())
    assert runner.invoke(main, ["--version"]).output.startswith("anybatch, version ")
    assert runner.invoke(main, ["chekc"]).exit_code == 2
    for name in VERBS:
        assert runner.invoke(main, [name, "--help"]).output.startswith(f"Usage: main {name}")


@pytest.mark.parametrize(("fail_on", "exact", "noted", "code"), [
    (None, False, True, 0), ("not-exact", True, True, 0), ("not-exact", False, False, 1), ("note", True, True, 1),
    ("note", True, False, 0), ("note", False, False, 1),
])  # fmt: skip
def test_fail_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fail_on: str | None, exact: bool, noted: bool, code: int
) -> None:
    found = Reason("sum", "loss", "It is a sum.", ("loss.mean()",))
    certificate = Certificate(
        "Linear", 4, 4, ((2, 2),), "float64", 1e-9, 0.5, 0.5, () if exact else (found,), (found,) if noted else ()
    )
    ending = script_module.Ending("checked", {"certificate": certificate.to_dict(), "at": ["", 0]})
    monkeypatch.setattr("anybatch.cli.check.run_until_first_call", lambda *_: ending)
    options = ["--fail-on", fail_on] if fail_on else []
    assert CliRunner().invoke(main, ["check", str(folder / "scripts" / "train.py"), *options]).exit_code == code


def test_a_terminal_gets_colour_and_lines_that_can_be_copied() -> None:
    remedy = "return anybatch.Mean(total, items)  # " + "a remark that is longer than the terminal is wide " * 2
    certificate = Certificate(
        "Linear", 4, 4, ((2, 2),), "float64", 1e-9, 0.5, 0.5, (Reason("sum", "loss", "It is a sum. " * 20, (remedy,)),)
    )
    console = Console(force_terminal=True, width=80, color_system="standard", record=True, file=io.StringIO())
    show(certificate, console)
    text = console.export_text(clear=False)
    assert remedy.rstrip() in text
    assert "\x1b[" in console.export_text(styles=True)
    assert all(len(line) <= 80 for line in text.splitlines() if "anybatch.Mean" not in line)


def test_a_part_of_anybatch_that_can_not_be_loaded_is_said_and_nothing_is_trained(folder: Path) -> None:
    (folder / "own").mkdir()
    (folder / "own" / "click.py").write_text("raise ImportError('not that click')", encoding="utf-8")
    (folder / "plain.py").write_text('print("trained to its end")', encoding="utf-8")
    command = [sys.executable, "-I", "-m", "anybatch", "check", "plain.py"]
    path = {**ENVIRONMENT, "PYTHONPATH": "own"}
    done = subprocess.run(command, cwd=folder, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "could not be loaded in the process of plain.py: ImportError('not that click')" in done.stderr
    assert "trained to its end" not in done.stderr
