"""The cause of a crash is what concerns the trained parameters, and not a block beside it that is meant to be there."""

import warnings
from pathlib import Path

import pytest

from anybatch.doctor.rules.crashes import crashed
from anybatch.records.runs import Run
from crash_running import crash
from crash_scripts.graphs import HEAD

TAUGHT = """
teacher, student = nn.Linear(3, 2), nn.Linear(3, 2)
opt = torch.optim.SGD(student.parameters(), lr=0.1)
for x in torch.randn(2, 4, 3):
    with torch.no_grad():
        goal = teacher(x)
    guess = student(x)
    loss = F.mse_loss(guess, goal)
    opt.zero_grad()
    loss.backward()  # CRASH
    opt.step()
"""


def told(folder: Path, text: str, recorded: bool = True) -> tuple[str, str]:
    """The name of what is said of a script's crash, and the line of the finding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fact, _ = crash(folder, text, recorded=recorded)
    run = Run([fact])
    place = next(crashed(run, fact.name)).place(run)
    return fact.name, (HEAD + text).splitlines()[place.line - 1].strip()


@pytest.mark.parametrize("recorded", [False, True], ids=["alone", "recorded"])
@pytest.mark.parametrize(
    "line",
    [
        "guess = student(x).detach()",
        "guess = student(x).data.view(4, 2)",
        "guess = torch.tensor([student(row).tolist() for row in x])",
        "guess = student(x); guess = guess.detach()",
    ],
)
def test_a_teacher_without_gradients_is_not_the_cause(line: str, recorded: bool, tmp_path: Path) -> None:
    name, found = told(tmp_path, TAUGHT.replace("guess = student(x)", line), recorded)
    assert (name, found) == ("LOSS_NO_GRAD", line)


@pytest.mark.parametrize("teacher", ["student", "(lambda rows: student(rows) * 2)"])
def test_a_target_of_the_same_model_is_not_the_cause(teacher: str, tmp_path: Path) -> None:
    text = TAUGHT.replace("teacher(x)", f"{teacher}(x)").replace("    guess = student(x)\n", "")
    before = text.replace("    with torch", "    guess = student(x).detach()\n    with torch")
    assert told(tmp_path, before) == ("LOSS_NO_GRAD", "guess = student(x).detach()")
    inline = text.replace("mse_loss(guess, goal)", "mse_loss(student(x).data, goal)")
    assert told(tmp_path, inline) == ("LOSS_NO_GRAD", "loss = F.mse_loss(student(x).data, goal)")


def test_a_block_with_no_model_in_it_is_not_the_cause_of_a_checkpoint(tmp_path: Path) -> None:
    text = """
net = nn.Linear(3, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(4, 3)
def twice(step, x):
    return step(step(x))
with torch.no_grad():
    goal = twice(lambda rows: rows * 2, x)
guess = checkpoint.checkpoint(lambda rows: twice(net, rows), x, use_reentrant=True)
loss = (guess - goal).abs().mean()
loss.backward()  # CRASH
"""
    text = "from torch.utils import checkpoint" + text
    assert told(tmp_path, text)[0] == "CKPT_NO_INPUT_GRAD"


@pytest.mark.parametrize("recorded", [False, True], ids=["alone", "recorded"])
@pytest.mark.parametrize("inside", ["guess = student(x)", "loss = F.mse_loss(student(x), goal)"])
def test_a_block_around_the_trained_model_still_is_the_cause(inside: str, recorded: bool, tmp_path: Path) -> None:
    text = TAUGHT.replace("    with torch.no_grad():\n        goal = teacher(x)", "    goal = teacher(x).detach()")
    plain = inside if "loss" in inside else f"{inside}\n    loss = F.mse_loss(guess, goal)"
    text = text.replace(
        "    guess = student(x)\n    loss = F.mse_loss(guess, goal)", f"    with torch.no_grad():\n        {plain}"
    )
    assert told(tmp_path, text, recorded) == ("NO_GRAD_ACTIVE", "with torch.no_grad():")


STEPPED = """
weight = torch.zeros(3, requires_grad=True)
for x in torch.randn(2, 3):
    (weight * x).sum().backward()
    LINE  # CRASH
"""


@pytest.mark.parametrize(
    "line", ["weight -= weight.grad; weight.grad.zero_()", "x.zero_(); weight.sub_(weight.grad); weight.grad.zero_()"]
)
def test_of_several_writes_in_a_line_that_to_the_leaf_is_told(line: str, tmp_path: Path) -> None:
    crashed, _ = crash(tmp_path, STEPPED.replace("LINE", line))
    assert (crashed.name, crashed.tensor) == ("LEAF_INPLACE", "weight [3]")
    assert "`weight` is a leaf" in crashed.message


def test_a_write_to_a_tensor_that_needs_no_gradient_is_not_taken_for_the_leaf(tmp_path: Path) -> None:
    text = STEPPED.replace("LINE", "x += 1; weight += 1").replace("(weight * x).sum().backward()", "shift = weight")
    crashed, _ = crash(tmp_path, text)
    assert crashed.tensor.startswith("weight"), crashed


OVER_TIME = """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 6)
    def forward(self, x, state):
        hidden, memory = state
        gates, fresh = self.lin(torch.cat([x, hidden], 1)).chunk(2, 1)
        memory = memory * 1.5
        slow = memory * gates.tanh()
        WRITE
        hidden = memory.tanh() + slow
        return hidden, (hidden, memory)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = Cell(), nn.Linear(3, 1)
    def forward(self, xs):
        state = (torch.zeros(4, 3), torch.zeros(4, 3))
        for x in xs:
            hidden, state = self.cell(x, state)
        return self.out(hidden)

net = Net()
total = 0
net(torch.randn(5, 4, 2)).sum().backward()  # CRASH
"""


@pytest.mark.parametrize("recorded", [False, True], ids=["alone", "recorded"])
@pytest.mark.parametrize("write", ["memory += fresh.sigmoid()", "memory.mul_(fresh)", "memory[:, 0] = fresh[:, 0]"])
def test_a_write_in_a_cell_is_found_where_the_cell_runs_in_a_loop(write: str, recorded: bool, tmp_path: Path) -> None:
    text = OVER_TIME.replace("WRITE", write)
    crashed, lines = crash(tmp_path, text, recorded=recorded)
    assert (crashed.name, lines[crashed.evidence["origin_line"] - 1].strip()) == ("INPLACE_ON_SAVED", write)
    assert crashed.message.startswith("`memory` [4, 3], which MulBackward0 needs, was written to by"), crashed


def test_a_write_of_another_operation_than_that_which_made_it_last_is_not_blamed(tmp_path: Path) -> None:
    text = OVER_TIME.replace("WRITE", "memory += fresh.sigmoid(); hidden = hidden * 2; hidden.sub_(1)")
    crashed, _ = crash(tmp_path, text)
    assert crashed.message.startswith("`memory` [4, 3]"), crashed


REUSED = """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(2):
    x = torch.randn(4, 3)
    if True:
        out = net(x); old = out.log_softmax(1)
    for part in range(3):
        out = net(x); ratio = (out.log_softmax(1) - old).exp()
        loss = ratio.mean()
        opt.zero_grad()
        loss.backward()  # CRASH
        opt.step()
"""


@pytest.mark.parametrize("recorded", [False, True], ids=["alone", "recorded"])
def test_what_is_made_and_used_in_one_line_is_not_taken_for_old(recorded: bool, tmp_path: Path) -> None:
    crashed, lines = crash(tmp_path, REUSED, recorded=recorded)
    assert (crashed.name, crashed.tensor) == ("BACKWARD_TWICE_STATE", "old [4, 2]")
    assert "ratio = " in lines[crashed.evidence["origin_line"] - 1]
    assert "old = old.detach()" in crashed.fix


def test_what_a_line_uses_before_it_makes_it_anew_still_is_old(tmp_path: Path) -> None:
    text = """
net, h = nn.Linear(3, 3), torch.zeros(4, 3)
for x in torch.randn(3, 4, 3):
    shown = h * 1; h = net(x + h).tanh()
    h.mean().backward()  # CRASH
"""
    crashed, _ = crash(tmp_path, text)
    assert (crashed.name, crashed.tensor) == ("BACKWARD_TWICE_STATE", "h [4, 3]")


MIXED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.lin = nn.NORM(3), nn.Linear(3, 1)
    def forward(self, ids, rows):
        return self.lin(self.norm(torch.log1p(rows)))  # CRASH

net = Net()
net(torch.arange(4), torch.rand(4, 3, dtype=torch.float64))
"""


@pytest.mark.parametrize("recorded", [False, True], ids=["alone", "recorded"])
@pytest.mark.parametrize("norm", ["BatchNorm1d", "LayerNorm"])
def test_a_norm_of_another_dtype_names_the_tensor_that_came_in(norm: str, recorded: bool, tmp_path: Path) -> None:
    crashed, _ = crash(tmp_path, MIXED.replace("NORM", norm), recorded=recorded)
    assert (crashed.name, crashed.module) == ("DTYPE_MISMATCH", "norm"), crashed
    assert crashed.fix == "rows = rows.float()"


def test_no_name_is_given_where_two_tensors_may_be_meant(tmp_path: Path) -> None:
    text = MIXED.replace("NORM", "BatchNorm1d").replace("log1p(rows)", "maximum(rows, self.low)")
    crashed, _ = crash(
        tmp_path, text.replace("        self.norm,", "        self.low = torch.zeros(3).double()\n        self.norm,")
    )
    assert crashed.name == "DTYPE_MISMATCH", crashed
    assert crashed.fix.startswith("return self.lin(self.norm(torch.maximum(rows, self.low).float()"), crashed


SCALED = """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
amp = torch.amp.GradScaler("cpu")
for x in torch.randn(3, 4, 3):
    amp.scale(net(x).mean()).backward()
"""


def test_a_missing_update_is_told_where_unscale_meets_it_first(tmp_path: Path) -> None:
    crashed, _ = crash(tmp_path, SCALED + "    amp.unscale_(opt)  # CRASH\n    amp.step(opt)\n    opt.zero_grad()\n")
    assert crashed.name == "STEP_TWICE_SCALER", crashed
    assert crashed.message.startswith("amp.update() is missing")
    assert crashed.fix == "amp.update()  # after amp.step(opt)"


def test_a_missing_update_is_not_told_where_the_order_is_wrong(tmp_path: Path) -> None:
    crashed, _ = crash(tmp_path, SCALED + "    amp.step(opt)\n    amp.unscale_(opt)  # CRASH\n    amp.update()\n")
    assert crashed.name == "SCALER_MISUSED", crashed
    assert "comes after" in crashed.message


@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop"])
def test_the_embedding_whose_gradient_is_sparse_is_named(optimizer: str, tmp_path: Path) -> None:
    text = f"""
net = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
opt = torch.optim.{optimizer}(net.parameters())
net(torch.arange(4)).sum().backward()
opt.step()  # CRASH
"""
    crashed, _ = crash(tmp_path, text)
    assert (crashed.name, crashed.module, list(crashed.parameters)) == ("SPARSE_GRADIENT", "0", ["0.weight"])
    assert "sparse=False in 0" in crashed.fix


def test_an_error_of_the_users_own_about_sparse_gradients_is_left_alone(tmp_path: Path) -> None:
    crashed, _ = crash(tmp_path, 'raise RuntimeError("Mine does not support sparse gradients")  # CRASH\n')
    assert crashed.name == ""
