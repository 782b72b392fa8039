"""A failing call is run again with repairs: what is told works in the script, and nothing of the script runs again."""

import re
import warnings
from pathlib import Path

import pytest
import torch

from anybatch import Doctor
from anybatch.doctor.crashes import explain
from crash_running import crash
from crash_scripts import forum
from crash_scripts.graphs import HEAD


def run(folder: Path, text: str) -> None:
    """Runs a text as a script."""
    path = folder / "again.py"
    path.write_text(HEAD + text, encoding="utf-8")
    exec(compile(HEAD + text, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})


def changed(text: str, fix: str) -> str:
    """A script with the first of the fixes that were told in its crashing line."""
    lines = text.split("\n")
    number = next(n for n, line in enumerate(lines) if line.endswith("# CRASH"))
    line, indent = lines[number], re.match(r"\s*", lines[number])[0]  # type: ignore[index]
    first, code = fix.split("; or ")[0].split("  # ")[0], line.removesuffix("# CRASH").strip()
    name = first.split(" = ")[0]
    made = [n for n, one in enumerate(lines) if one.strip().startswith(f"{name} = ") and n != number]
    if name.startswith("self.") and made:  # the line that makes a layer
        number, indent = made[0], re.match(r"\s*", lines[made[0]])[0]  # type: ignore[index]
        lines[number] = indent + first
    elif first.split("(")[0] == code.split("(")[0] or (
        code.startswith(f"{name} = ") and name not in first[len(name) :]
    ):
        lines[number] = indent + first
    else:
        lines.insert(number, indent + first)
    return "\n".join(lines)


@pytest.mark.parametrize("script", [one for one in forum.TRIED if one != "bn single image"])
def test_a_change_that_is_told_as_tried_makes_the_script_run(script: str, tmp_path: Path) -> None:
    crashed, _ = crash(tmp_path, forum.SCRIPTS[script])
    assert "it works" in crashed.proof, crashed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(tmp_path, changed(forum.SCRIPTS[script], crashed.fix))


@pytest.mark.parametrize("script", forum.SCRIPTS)
def test_what_people_ask_about_is_told(script: str, tmp_path: Path) -> None:
    crashed, lines = crash(tmp_path, forum.SCRIPTS[script], recorded=True)
    name, said, fix = forum.EXPECTED[script]
    assert crashed.name == name, crashed
    assert said in crashed.message, crashed
    assert fix in crashed.fix, crashed
    assert lines[crashed.line - 1].endswith("# CRASH"), crashed


COUNTING = """
class Net(nn.Module):
    calls = 0
    def __init__(self):
        super().__init__()
        self.norm, self.lin = nn.BatchNorm1d(3), nn.Linear(3, 2)
    def forward(self, x):
        Net.calls += 1
        return self.lin(self.norm(x))

class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Net.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})

net = Net()
try:
    LINE  # CRASH
except Exception:
    calls, buffers = Net.calls, [one.clone() for one in net.buffers()]
    def check():
        assert Net.calls == calls
        assert all(map(torch.equal, buffers, net.buffers()))
    CLEANUP.append(check)
    raise
"""


@pytest.mark.parametrize(
    "line",
    [
        "F.cross_entropy(net(torch.randn(4, 3)), torch.zeros(4))",
        "nn.Sequential(net, nn.Linear(5, 2))(torch.randn(4, 3))",
        "net(torch.randn(4, 3)) + net(torch.randn(4, 3)).expand(3, 4, 2)[:, :3]",
        "F.linear(torch.randn(4, 3).as_subclass(Loud), net.lin.weight.double())",
    ],
)
def test_code_of_the_users_is_not_run_again(line: str, tmp_path: Path) -> None:
    crashed, _ = crash(tmp_path, COUNTING.replace("LINE", line))  # it checks that nothing was called meanwhile
    assert crashed.error in ("RuntimeError", "ValueError"), crashed


def test_random_numbers_operands_and_modules_stay_as_they_were() -> None:
    norm = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    rows, onehot, labels = torch.randn(4, 3), torch.zeros(4, 5), torch.arange(4)
    for fails in (lambda: norm(rows), lambda: onehot.scatter_(1, labels, 1.0), lambda: rows.add_(torch.ones(4))):
        with pytest.raises(RuntimeError) as caught:
            fails()
        state, kept = torch.get_rng_state(), [one.clone() for one in (rows, onehot, *norm.buffers())]
        explain(caught.value)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(map(torch.equal, kept, (rows, onehot, *norm.buffers())))
        assert norm.training


def test_a_layer_without_a_name_is_found_where_it_is_made(tmp_path: Path) -> None:
    text = """
net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(5, 2))
opt = torch.optim.SGD(net.parameters(), 0.1)
F.cross_entropy(net(torch.randn(3, 4)), torch.zeros(3).long()).backward()
"""
    crashed, _ = crash(tmp_path, text)
    assert crashed.fix.startswith("nn.Linear(6, 2)  # in_features=6 instead of nn.Linear(5, 2) in line "), crashed
    twice = text.replace("nn.Linear(5, 2))", "nn.Linear(5, 2), nn.Linear(5, 2))")  # which of the two is not known
    assert "instead of" not in crash(tmp_path, twice)[0].fix
    again = text.replace("nn.ReLU()", "nn.ReLU(), *[nn.Linear(6, 5) for _ in 'ab']").replace(
        "nn.Linear(5, 2)", "nn.Tanh()"
    )
    assert "instead of" not in crash(tmp_path, again)[0].fix  # one line made both


def test_what_runs_again_is_not_recorded() -> None:
    lin = torch.nn.Linear(4, 2)
    with Doctor() as doctor:
        with pytest.raises(RuntimeError) as caught:
            lin(torch.randn(2, 3))
        before = len(doctor.run.facts)
        explain(caught.value, doctor)
        assert len(doctor.run.facts) == before


def test_nothing_is_called_tried_of_a_call_that_does_not_fail_again(tmp_path: Path) -> None:
    text = """
lin, calls = nn.Linear(3, 2), []
def flaky(module, args):
    calls.append(1)
    return (args[0].double(),)
lin.register_forward_pre_hook(flaky)
lin(torch.randn(4, 3))  # CRASH
"""
    crashed, _ = crash(tmp_path, text)
    assert crashed.name == "DTYPE_MISMATCH"
    assert not crashed.proof, crashed


def test_what_is_large_is_not_run_again(tmp_path: Path) -> None:
    text = """
rows = torch.zeros(1, 1).expand(30000, 30000)
rows @ torch.zeros(2, 30000)  # CRASH
"""
    crashed, _ = crash(tmp_path, text)
    assert crashed.name == "SHAPE_MISMATCH"
    assert not crashed.proof, crashed
    assert "rows" in crashed.fix


TRAINED = """
net = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range({steps}):
    opt.zero_grad()
    net(torch.randn(16, 20)).square().mean().backward()
    opt.step()
rows = torch.randn(16, 19)
net(rows)  # CRASH
"""


def test_a_layer_that_took_other_inputs_in_the_steps_before_is_not_made_anew(tmp_path: Path) -> None:
    crashed, _ = crash(tmp_path, TRAINED.format(steps=5), recorded=True)
    assert crashed.name == "SHAPE_MISMATCH"
    assert crashed.message.startswith("In 5 steps before, this layer took [16, 20]")
    assert "Linear(19" not in crashed.fix
    assert not crashed.proof
    assert "[16, 20]" in crashed.fix
    never, _ = crash(tmp_path, TRAINED.format(steps=0), recorded=True)
    assert "Linear(19, 8)" in never.fix
