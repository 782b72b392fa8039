"""What a plain loop gives ``anybatch plan`` as its batch, and what it reads of the forward.

How it could be silently wrong: micro-batches that take all rows of a batch again; a table that is cut as if it held
samples; an optimizer that is left out of the bytes; a name that the changed loop no longer gives a value.
"""

import pytest

from anybatch.doctor.loopparts import StepUnclear
from plan_loop_scripts import folder, found  # noqa: F401 - one is a fixture

SLICED = """
for i in range(0, len(inputs), 100):
    optimizer.zero_grad()
    {}
    {}.backward()
    optimizer.step()
"""


X, Y = "inputs[i : i + 100]", "targets[i : i + 100]"


@pytest.mark.parametrize(
    ("before", "loss", "batch", "function"),
    [
        ("pass", f"(model({X}) - {Y}).square().mean()", f"({X}, {Y})",
         "(model, batch):\n    inputs, targets = batch\n    return (model(inputs) - targets).square().mean()"),
        (f"out = model({X})", f"(out - {Y}).square().mean()", f"({X}, {Y})",
         ("(model, batch):\n    inputs, targets = batch\n    out = model(inputs)\n"
         "    return (out - targets).square().mean()")),
        (f"x = {X}", f"(model(x) - {Y}).square().mean()", f"({Y}, x)",
         "(model, batch):\n    targets, x = batch\n    return (model(x) - targets).square().mean()"),
        ("pass", f"(model({X}) - {X}[:, :4] / len(inputs)).square().mean()", X,
         "(model, inputs_2):\n    return (model(inputs_2) - inputs_2[:, :4] / len(inputs)).square().mean()"),
        ("rows = list(range(i, min(i + 9, 256)))", "(model(inputs[rows]) - targets[rows, :]).square().mean()",
         "(inputs[rows], targets[rows, :])",
         "(model, batch):\n    inputs, targets = batch\n    return (model(inputs) - targets).square().mean()"),
        ("pass", "model(inputs[torch.randint(0, 256, (64,))]).square().mean()", "inputs[torch.randint(0, 256, (64,))]",
         "(model, inputs):\n    return model(inputs).square().mean()"),
        (f"x = {X}", "(model(x)[:, : inputs[: len(x)].ndim] - 1).square().mean()", "x",
         "(model, x):\n    return (model(x)[:, : inputs[: len(x)].ndim] - 1).square().mean()"),
    ],
)  # fmt: skip
def test_a_batch_that_the_forward_takes_out_of_all_samples_is_the_batch(
    before: str, loss: str, batch: str, function: str
) -> None:
    step = found(SLICED.format(before, loss))
    assert step._step.batch_text == batch
    assert step._step.loss_text() == f"def loss_fn{function}"
    after = step.with_change({}, {"memory": None})["after"]
    assert f"    step({batch})\n" in after
    exec(compile(after, "after.py", "exec"), {"__name__": "after"})


TAUGHT = """
teacher = whole(nn.Linear(8, 4))
for i in range(3):
    with torch.no_grad():
        t = teacher(inputs)
    out = model(inputs)
    loss = (out - t).square().mean() + (out - targets).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_what_is_computed_from_all_samples_before_the_forward_is_cut_with_them() -> None:
    step = found(TAUGHT)
    assert step._step.batch_text == "(inputs, t, targets)"
    after = step.with_change({}, {"memory": None})["after"]
    assert "    step((inputs, t, targets))\n" in after
    exec(compile(after, "after.py", "exec"), {"__name__": "after"})


def test_a_table_of_as_many_rows_that_the_loop_draws_from_is_no_part_of_the_batch() -> None:
    step = found("""
table = torch.randn(256, 4).double()
for i in range(3):
    c = torch.randint(256, (256,))
    x = torch.randn(256, 8).double() + table[c].sum(1, keepdim=True)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x) @ table.T, c)
    loss.backward()
    optimizer.step()
""")
    assert step._step.batch_text == "(c, x)"


def test_what_is_taken_of_a_loader_is_not_joined_by_a_table_of_as_many_rows() -> None:
    step = found("""
table = torch.zeros(256, 4).double()
for x, y in loader:
    optimizer.zero_grad()
    t = y * 2
    loss = (model(x) - t + table[0]).square().mean()
    loss.backward()
    optimizer.step()
""")
    assert step._step.batch_text == "(t, x)"


MIXED = """
for x, y in loader:
    order = torch.randperm(len(x))
    mixed = 0.5 * x + 0.5 * x[order]
    optimizer.zero_grad()
    out = model(mixed)
    loss = (out - y).square().mean() + (out - y[order]).square().mean()
    loss.backward()
    optimizer.step()
"""


def test_rows_that_the_forward_takes_by_their_numbers_in_the_batch_are_taken_before() -> None:
    step = found(MIXED)
    assert step._step.batch_text == "(mixed, y, y[order])"
    assert "(out - y_2).square().mean()" in step._step.loss_text()
    after = step.with_change({}, {"memory": None})["after"]
    exec(compile(after, "after.py", "exec"), {"__name__": "after"})


def test_all_optimizers_of_what_goes_back_are_of_the_step() -> None:
    step = found("""
head = whole(nn.Linear(4, 4))
other = torch.optim.SGD(head.parameters(), lr=2**-12)
idle = torch.optim.SGD(whole(nn.Linear(4, 4)).parameters(), lr=2**-12)
for x, y in loader:
    optimizer.zero_grad()
    other.zero_grad()
    (head(model(x)) - y).square().mean().backward()
    optimizer.step()
    other.step()
""")
    assert step.call.options["optimizer"] == [step._step.names["optimizer"], step._step.names["other"]]
    assert step._step.model_text == "torch.nn.ModuleList([head, model])"
    assert "anybatch.backward(torch.nn.ModuleList([head, model]), loss_fn, (x, y)" in step.with_change(
        {}, {"memory": None})["change"]  # fmt: skip


def test_a_name_that_gets_another_value_before_it_is_read_is_not_read() -> None:
    answer = found("""
for x, y in loader:
    optimizer.zero_grad()
    out = model(x)
    loss = (out - y).square().mean()
    loss.backward()
    optimizer.step()
    out = torch.zeros(1)
    seen.append(out)
""").with_change({}, {"memory": None})
    assert (answer["trouble"], "metrics" in answer["change"]) == ("", False)
    answer = found("""
loss = torch.ones(1)
while loss.item() < 0 or not seen:
    x, y = loader[0]
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    seen.append(1)
""").with_change({}, {"memory": None})
    assert "loss = torch.tensor(result.loss)" in answer["change"]


def test_a_number_in_a_tensor_is_no_part_of_the_batch() -> None:
    step = found("""
for x, y in loader:
    share = torch.ones(1).double()
    optimizer.zero_grad()
    (model(x) - share * y).square().mean().backward()
    optimizer.step()
""")
    assert step._step.batch_text == "(x, y)"


def test_a_batch_that_can_not_be_cut_gets_no_size() -> None:
    step = found("""
for x, y in loader:
    optimizer.zero_grad()
    loss = model(x).square().mean() + y[:7].mean()
    loss.backward()
    model[0].weight.grad.clamp_(-1, 1)
    optimizer.step()
""")
    facts = {"plan": {"chosen": {"micro_batch_size": 1}}, "obstacle": "why"}
    assert "    anybatch.backward(model, loss_fn, (x, y))\n" in step.with_change(facts, {"memory": "free"})["change"]


@pytest.mark.parametrize(
    ("before", "loss"),
    [
        ("out = model(inputs[i : i + 100]); i += 1", "out.square().mean()"),  # no longer these at the backward
        ("pass", "(model(inputs[i][None]) - targets[i, 0]).square().mean()"),  # a sample
    ],
)
def test_what_the_forward_takes_out_of_all_samples_and_is_no_batch_is_to_have_a_name(before: str, loss: str) -> None:
    with pytest.raises(
        StepUnclear, match=r"takes the batch out of '(inputs|targets)' within the forward; give it a name"
    ):
        found(SLICED.format(before, loss))


@pytest.mark.parametrize(
    ("before", "loss", "batch"),
    [
        ("x, y = inputs[i : i + 100], targets[i : i + 100]", "(model(x) - y).square().mean()", ["x", "y"]),
        ("rows = torch.arange(i, i + 100) % 256", "(model(inputs[rows]) - targets[rows]).square().mean()", ["rows"]),
    ],
)
def test_a_batch_that_has_a_name_is_found_though_the_loop_counts(before: str, loss: str, batch: list[str]) -> None:
    assert list(found(SLICED.format(before, loss))._step.batch) == batch


OUTPUTS = """
import torch
from torch import nn
from types import SimpleNamespace

class Model(nn.Linear):
    def forward(self, x, y):
        out = super().forward(x)
        return SimpleNamespace(loss=(out - y).square().mean(), logits=out)

torch.manual_seed(0)
model = Model(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [{"x": torch.randn(64, 4), "y": torch.randn(64, 1)} for _ in range(3)]
total = 0.0
for number, batch in enumerate(data):
    outputs = model(**batch)
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total += outputs.loss.detach().item()
    if number % 2 == 0:
        print(f"{number}: {outputs.loss.item():.4f}")
"""
EVALUATED = "with torch.no_grad():\n    outputs = model(**data[0])\n    print(outputs.loss, outputs.logits.sum())\n"


@pytest.mark.parametrize("behind", ["", EVALUATED])
def test_a_loss_that_a_model_gives_with_other_outputs_is_read_from_the_result(behind: str) -> None:
    answer = found(OUTPUTS + behind).with_change({}, {"memory": "free"})
    added = [line[1:].strip() for line in answer["change"].splitlines() if line.startswith("+")]
    assert added[-4:] == [
        "result = step(batch)",
        "loss = torch.tensor(result.loss)",
        "total += loss.detach().item()",
        'print(f"{number}: {loss.item():.4f}")',
    ], answer
    assert "return outputs.loss" in added
    assert "-    print(outputs.loss, outputs.logits" not in answer["change"]
    compile(answer["after"], "loop.py", "exec")


@pytest.mark.parametrize(
    ("line", "behind"),
    [("    last = outputs\n", ""), ("    print(outputs.logits.mean())\n", ""), ("", "print(outputs.loss.item())\n"),
     ("    outputs.loss = None\n", ""), ("", "def told():\n    return outputs.loss\n")],
)  # fmt: skip
def test_outputs_that_are_read_otherwise_stay_to_be_changed_by_hand(line: str, behind: str) -> None:
    answer = found(OUTPUTS + line + behind).with_change({}, {"memory": "free"})
    assert not answer["change"]
    assert "reads 'outputs' of the forward" in answer["trouble"]
