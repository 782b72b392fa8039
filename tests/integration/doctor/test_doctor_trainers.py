"""The doctor on trainers of other libraries and on the examples: one planted fault each, silent when healthy."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import forked_python
from anybatch import Doctor
from source_tree import ROOT

SCRIPTS = ROOT / "tests" / "doctor_scripts"
# One example tries rates at which training fails, to show where they are; it trains dozens of models.
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {ROOT / "examples" / "batch_and_learning_rate.py"})
SLOW = {"gan", "images_with_heads", "segmentation_dice", "seq2seq_attention", "vae"}
# An example, a passage of it, what stands there instead, and what has to be found first.
PLANTED = (
    ("character_rnn", "        optimizer.zero_grad()\n", "        pass\n", "ZERO_GRAD_MISSING"),
    ("vae", "Adam(model.parameters(), lr=3e-3)", "Adam(model.decoder.parameters(), lr=3e-3)", "OPT_PARAM_MISSING"),
    ("images_with_heads", "lr=0.05, momentum=0.9", "lr=5e-9, momentum=0.0", "LR_TOO_LOW"),
)


def diagnosed(script: Path, arguments: list[str], folder: Path) -> dict[str, Any]:
    """Runs a script under the doctor; returns what it wrote."""
    answer = folder / "doctor.json"
    command = [sys.executable, "-m", "anybatch", "doctor", "--json", str(answer), str(script), *arguments]
    done = forked_python.run(command, folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def alarms(found: dict[str, Any]) -> list[str]:
    """The names of all findings that are more than an information."""
    return [finding["name"] for finding in found["findings"] if finding["severity"] != "info"]


def script_of(library: str) -> Path:
    """The script that uses a library, if that is installed."""
    if importlib.util.find_spec(library) is None or importlib.util.find_spec("accelerate") is None:
        pytest.skip(f"needs {library} and accelerate")
    return SCRIPTS / f"{library}_trainer.py"


@pytest.mark.parametrize(
    ("library", "fault", "name", "place"),
    [
        ("transformers", "head-not-optimized", "OPT_PARAM_MISSING", "lm_head"),
        pytest.param("transformers", "learning-rate", "LR_TOO_HIGH", "optimizer", marks=pytest.mark.slow),
        ("lightning", "detached", "GRAPH_CUT", "features"),
        pytest.param("lightning", "softmax", "DOUBLE_ACTIVATION", "lightning_trainer.py", marks=pytest.mark.slow),
    ],
)
def test_a_fault_in_another_trainer_is_found(library: str, fault: str, name: str, place: str, tmp_path: Path) -> None:
    found = diagnosed(script_of(library), ["--fault", fault], tmp_path)
    assert found["findings"], found
    assert found["findings"][0]["name"] == name, alarms(found)
    assert place in json.dumps(found["findings"][0]["place"])


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_a_healthy_trainer_is_left_alone(library: str, tmp_path: Path) -> None:
    script = script_of(library)
    found = diagnosed(script, ["--save", str(tmp_path / "with.pt")], tmp_path)
    assert alarms(found) == []
    assert found["healthy"] is not False, found["reason"]
    assert not found["unexamined"]
    forked_python.run([sys.executable, str(script), "--save", str(tmp_path / "without.pt")], tmp_path)
    one, other = (torch.load(tmp_path / name) for name in ("with.pt", "without.pt"))
    assert torch.equal(one["random"], other["random"])
    assert one["weights"].keys() == other["weights"].keys()
    assert all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())


@pytest.mark.parametrize(
    "example",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else []) for path in EXAMPLES],
)
def test_the_examples_are_healthy(example: Path, tmp_path: Path) -> None:
    found = diagnosed(example, [], tmp_path)
    assert alarms(found) == []
    assert found["healthy"] is not False, found["reason"]  # some are too short to be seen to learn
    assert not found["unexamined"]


@pytest.mark.slow  # unit tests of the rules and the benchmark have these faults too
@pytest.mark.parametrize(("example", "right", "wrong", "name"), PLANTED, ids=[entry[0] for entry in PLANTED])
def test_a_fault_in_an_example_is_found(example: str, right: str, wrong: str, name: str, tmp_path: Path) -> None:
    text = (ROOT / "examples" / f"{example}.py").read_text(encoding="utf-8")
    assert right in text
    script = tmp_path / f"{example}.py"
    script.write_text(text.replace(right, wrong, 1), encoding="utf-8")
    found = diagnosed(script, [], tmp_path)
    assert found["findings"][0]["name"] == name, alarms(found)
    assert found["findings"][0]["place"]["file"].endswith(script.name)


def stepped(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=True)
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()


def test_accelerate_finds_the_signature_that_it_asks_for() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = torch.nn.Linear(4, 2)
    with Doctor():
        stepped(*accelerate.Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def test_a_scheduler_of_a_wrapper_drives_the_optimizer_within() -> None:
    """Made after ``prepare``, it holds the wrapper; the rate of a constant schedule does not show whose it is."""
    accelerate = pytest.importorskip("accelerate")
    model = torch.nn.Linear(4, 2)
    with Doctor() as doctor:
        model, optimizer = accelerate.Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        for _ in range(6):
            stepped(model, optimizer)
            scheduler.step()
    assert "AB506" not in [one.code for one in doctor.report().findings]


class Held(torch.optim.SGD):
    """One that holds itself, as some do to be found by a name."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.optimizer = self


class Outer(torch.optim.Optimizer):
    """Sharpness-aware: its own clearing comes between two backwards."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base, self.param_groups = base, base.param_groups

    def first_step(self) -> None:
        with torch.no_grad():
            for one in self.param_groups[0]["params"]:
                self.state[one]["away"] = 0.05 * one.grad / one.grad.norm()
                one.add_(self.state[one]["away"])
        self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for one in self.param_groups[0]["params"]:
                one.sub_(self.state[one]["away"])
        self.base.step()


def test_optimizers_that_hold_themselves_or_clear_between_backwards_are_left_alone() -> None:
    model = torch.nn.Linear(4, 2)

    def gradients() -> None:
        (model(torch.randn(5, 4)) - 1).square().mean().backward()

    with Doctor() as doctor:
        for optimizer in (Held(model.parameters()), Outer(torch.optim.SGD(model.parameters(), lr=0.1))):
            for _ in range(30):
                optimizer.zero_grad()
                gradients()
                if isinstance(optimizer, Outer):
                    optimizer.first_step()
                    gradients()
                optimizer.step()
    assert not [one.code for one in doctor.report().findings if one.severity != "info"]


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    """It loads by keyword."""
    fabrics = pytest.importorskip("lightning.fabric")
    model = torch.nn.Linear(4, 2)
    with Doctor():
        fabric = fabrics.Fabric(accelerator="cpu", devices=1)
        wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        wrapped(torch.randn(5, 4)).square().mean()
        fabric.save(tmp_path / "state.ckpt", {"model": wrapped, "optimizer": optimizer})
        wrapped.load_state_dict(wrapped.state_dict())
        fabric.load(tmp_path / "state.ckpt", {"model": wrapped, "optimizer": optimizer})
