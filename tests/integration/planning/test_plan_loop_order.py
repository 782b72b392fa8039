"""A changed loop trains what the original trained, or the loop is refused with what to do.

How it could be silently wrong: a statement that stood between the backward and the step runs behind the step; gradients
of another optimizer are cleared; micro-batches draw, or take out of a queue, once more; a value of the loop is old;
a statement that stood between the forward and the backward runs before both, or after the update.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import forked_python
from anybatch.cli import child
from anybatch.cli.plan import _notes
from anybatch.cli.plan_loops import _COUNT
from anybatch.cli.script import Ending
from anybatch.doctor.loopparts import StepUnclear
from plan_loop_scripts import BATCHES, HEAD, ahead, changed, epochs, folder, found, run  # noqa: F401 - one is a fixture
from source_tree import PACKAGE

OTHER = """
head = whole(nn.Linear(4, 4))
model, optimizer.param_groups[0]["lr"] = nn.Sequential(model, head), 2**-24
other = torch.optim.SGD(head.parameters(), 2**-24)
"""
TEACHER = """
import copy

teacher = copy.deepcopy(model).requires_grad_(False)


def follow(module, model):
    with torch.no_grad():
        for one, new in zip(module.parameters(), model.parameters()):
            one.lerp_(new, 0.5)
"""
SIMPLE = "from types import SimpleNamespace\n"
IN_ORDER = {
    "another optimizer steps once an epoch": epochs(before=OTHER, last="other.step(); other.zero_grad()"),
    "a clip of a list": epochs(
        "nn.utils.clip_grad_norm_(all_of_it, 0.5)", before="all_of_it = list(model.parameters())"
    ),
    "a clip by the loss": epochs("nn.utils.clip_grad_norm_(model.parameters(), loss.item())"),
    "a clip that falls": epochs(
        "nn.utils.clip_grad_norm_(model.parameters(), most)", before="most = 1.0", behind="most /= 2"
    ),
    "a function that clips": epochs("clip()", before="def clip():\n    model[0].weight.grad.clamp_(-1, 1)"),
    "a schedule before the step": epochs(
        "schedule.step()", before="schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)"
    ),
    "an alias of the learning rate": epochs("group['lr'] /= 2", before="group = optimizer.param_groups[0]"),
    "a step that is left out": epochs("if loss < 50: continue"),
    "a tensor that is changed": epochs("total += loss.item()", before="total = torch.zeros(1)"),
    "a batch that is left out": ahead("if loss.item() % 2 < 1:\n    continue"),
    "an end of an epoch": ahead("if loss.item() % 2 < 1:\n    break"),
    "an error": ahead("if not loss.isfinite():\n    raise ValueError(loss)"),
    "a learning rate by the loss": ahead(
        "rate = 2**-12 / (1 + loss.item())\nfor group in optimizer.param_groups:\n    group['lr'] = rate"
    ),
    "a teacher": ahead("follow(teacher, model)", TEACHER).replace("loss = (out - y)", "loss = (out - y - teacher(x))"),
    "a probe of the model": ahead("probes.append(model[0].weight.sum().item() + out.sum().item())", "probes = []"),
    "a counter of an object that has the optimizer": ahead(
        "holder.number += 1\nholder.optimizer.zero_grad()",
        "holder = SimpleNamespace(optimizer=optimizer, number=0)",
    )
    .replace("out = model(x)", "out = model(x) + holder.number")
    .replace(BATCHES, f"{SIMPLE}{BATCHES}"),
    "a change of the model's mode": ahead("model.eval()\nmodel.train()"),
}
READ_LATER = {
    "a metric of a metric": ahead("guess = out.argmax(1)\nhits = (guess == 1).sum().item()\nseen.append(hits)"),
    "a counter that the forward reads": ahead("number += 1\nseen.append(loss.item())", "number = 0").replace(
        "out = model(x)", "out = model(x) + number"
    ),
    "a function that reads a variable of the script": epochs(
        before="def log():\n    seen.append(loss.item())", behind="log()"
    ),
    "else of the loop": epochs().rstrip()[: -len("pass")] + "else:\n        seen.append(loss.item())\n",
    "a value from before the loop": epochs(first="loss = torch.zeros(1)", last="seen.append(loss.item())"),
    "a sum between the backward and the step": epochs("number = 1; seen.append(loss.item())"),
}


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("name", [*IN_ORDER, *READ_LATER])
def test_a_loop_with_an_order_of_its_own_trains_the_same(name: str) -> None:
    text = {**IN_ORDER, **READ_LATER}[name]
    before, after_text = run(HEAD + text, "original.py"), changed(text)
    assert ("anybatch.TrainStep(" in after_text) == (name in READ_LATER)
    after = run(after_text, "after.py")
    for old, new in zip(before["model"].parameters(), after["model"].parameters(), strict=True):
        torch.testing.assert_close(old, new, rtol=1e-9, atol=1e-9)
    assert before["seen"] == pytest.approx(after["seen"], rel=1e-6)
    assert bool(after["seen"]) == (name in READ_LATER)


ROWS = """
table = torch.stack([targets, targets])
positions, i = torch.zeros(300, 8).double(), 0
for i in range(0, 2):
    {}
    optimizer.zero_grad()
    ({}).backward()
    optimizer.step()
"""
DRAW = "inputs[torch.randint(0, 256, (64,))]"
REFUSED = {
    "two draws": ("pass", f"(model({DRAW}) - model({DRAW})).square().mean()", "give it a name before, as in: xs"),
    "two draws beside a batch": (
        "pass", f"(model(inputs[i : i + 64]) - model({DRAW}) - model({DRAW})).mean()", "give it a name before"),
    "inputs that stay whole": ("pass", "(model(inputs) - table[i]).square().mean()", "reads all of 'inputs'"),
    "a bound of the forward": (
        "out = model(inputs[i : i + 64]); end = i + 64", "(out - targets[i:end]).mean()", "give it a name before"),
    "positions": (
        "n = 64", "(model(inputs[i : i + 64] + positions[:n])).mean()", "as a table of positions"),
    "a single sample": ("pass", "(model(inputs[i]) - targets[i]).square().mean()", "give it a name before"),
    "an iterator": (
        "pass", "(model(inputs[i : i + 64]) * next(iter(loader))[1][:64]).mean() + next(others)", "put it before"),
    "a queue": ("pass", "model(inputs[i : i + 64]).mean() + queue.popleft()", "'queue' within the forward"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_micro_batch_would_do_again_or_not_take_is_refused(name: str) -> None:
    before, loss, said = REFUSED[name]
    more = "from collections import deque\nqueue, others = deque([1.0, 2.0]), iter([1.0, 2.0])\n"
    with pytest.raises(StepUnclear, match=said):
        found(more + ROWS.format(before, loss))


LATE = {
    "clears after the step": (
        ahead("if loss.item() % 2 < 1:\n    continue").replace("        optimizer.zero_grad()\n", "")
        .replace("optimizer.step()", "optimizer.step(); optimizer.zero_grad()"), "may leave out the backward"),
    "clears by the loss": (ahead("if loss.item() > 50:\n    optimizer.zero_grad()"), "clears gradients by what"),
    "reads a value that changes": (ahead("seen.append(loss.item())\nloss = loss * 2"), "reads 'loss' before the"),
    "keeps its results in an object": (
        epochs(before=f"{SIMPLE}kept = SimpleNamespace()", behind="seen.append(kept.loss.item())")
        .replace("loss = ", "kept.loss = ").replace("loss.backward", "kept.loss.backward"), "changes 'kept', as each"),
    "decides by the loss": (ahead("if loss > 50:\n    loss = loss * 0.5"), "decides by values of the batch"),
    "decides by a value": (ahead("loss = loss * (2 if out.max().item() else 1)"), "decides by values of the batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE)
def test_what_can_not_run_behind_the_backward_is_said(name: str) -> None:
    text, said = LATE[name]
    answer = found(text).with_change({}, {"memory": None})
    assert (said in answer["trouble"], answer["change"]) == (True, ""), answer["trouble"]


@pytest.mark.parametrize("test", ["out.dim() > 1", "len(out) > 1", "epoch > 0", "out is not None"])
def test_a_decision_by_what_each_micro_batch_has_alike_is_taken_over(test: str) -> None:
    answer = found(ahead(f"if {test}:\n    loss = loss * 2")).with_change({}, {"memory": "free"})
    assert answer["change"], answer["trouble"]


def test_a_forward_that_gives_another_loss_when_it_runs_again_is_refused() -> None:
    function = "def change(values):\n    values[:, 0] = 0"
    text = epochs(before=function).replace("out = model(x)", "out = model(x)\n        change(out)")
    with pytest.raises(StepUnclear, match=r"gives a loss of .* when it runs again, where the loop had"):
        found(text)
    found(text.replace("change(out)", "print(out.sum())"))
    found(epochs().replace("out = model(x)", "out = nn.functional.dropout(model(x))"))  # draws may differ


def test_a_split_that_was_not_proved_is_said_to_be_so() -> None:
    before = "def only(out):\n    return {64: 1, 16: 1}[len(out)]"
    step = found(epochs(before=before).replace("out = model(x)", "out = model(x)\n        out = out * only(out)"))
    refusal, unproved = child._proved(16, step.call, {})
    assert not refusal
    assert "can't be run without the others (KeyError" in unproved
    facts = {"micro_batch_size": None, "updates": True, "unproved": unproved}
    assert (
        f"It is not proved that micro-batches have the whole batch's gradient: {unproved}"
        in _notes(Ending("planned", facts))[0]
    )


def test_other_losses_of_the_loop_are_said_not_to_be_in_the_figures() -> None:
    loop = """
for x, y in loader:
    optimizer.zero_grad()
    first = (model(x) - y).square().mean()
    first.backward()
    second = model(x).abs().mean()
    second.backward()
    optimizer.step()
"""
    answer = found(loop).with_change({}, {"memory": None})
    lines = (HEAD + loop).splitlines()
    assert answer["other_backwards"] == [lines.index("    second.backward()") + 1]
    note = _notes(Ending("planned", {"micro_batch_size": None, "updates": True, **answer}))[0]
    assert "alone. The loop calls backward() for other losses, too (line" in note
    assert found(epochs()).with_change({}, {"memory": None})["other_backwards"] == []


@pytest.mark.usefixtures("constant_times")
def test_a_loop_whose_split_was_not_proved_gets_the_plan_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_proved", lambda *given: ("", "why"))
    step = found(epochs())
    question = {"verb": "plan", "memory": "1GiB", "device": None, "ranks": None, "shard": "ddp"}
    answer = child._answered(lambda: step, question)
    assert (answer["is_whole"], answer["refusal"]) == (
        True,
        "that they have the whole batch's gradient is not proved: why",
    )
    assert "TrainStep(model, loss_fn, optimizer)" in answer["change"]


@pytest.mark.parametrize(
    ("remedy", "count"),
    [("count=lambda batch: ...  # what the loss divides by", None),
     ('count=lambda batch: batch["mask"].sum()  # if it is', 'lambda batch: batch["mask"].sum()'),
     ('count=anybatch.count_tokens("y")', 'anybatch.count_tokens("y")')],
)  # fmt: skip
def test_a_count_is_taken_out_of_a_refusal_without_its_remark(remedy: str, count: str | None) -> None:
    proposed = _COUNT.search(f"it is not. Instead:\n    {remedy}\n    more")
    assert (proposed and proposed[1]) == count


WEIGHED = """
kinds = (targets[:, 0].long() + 2) % 4
crit = nn.CrossEntropyLoss({}, ignore_index=3)
fair = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5, 3.0]).double())
for epoch in range(2):
    for x, y in [(inputs, kinds)]:
        optimizer.zero_grad()
        out = model(x) / 2**10
        first = {}(out, y)
        loss = first + model[0].weight.square().mean()
        loss.backward()
        optimizer.step()
        seen.append(first.item())
"""
WEIGHTS = "torch.tensor([1.0, 2.0, 0.5, 3.0]).double()"
TOKENS, CLASSES = 'anybatch.count_tokens("1", ignore_index=3)', "lambda batch: crit.weight[batch[1]].sum()"


def answered(text: str, count: str) -> dict[str, object]:
    step = found(text)
    assert step.counted(f"it is not. Instead:\n    count={count}\n") is not None
    return step.with_change({"plan": {"chosen": {"micro_batch_size": 32}}}, {"memory": "free"})


@pytest.mark.parametrize(("given", "count"), [("None", TOKENS), (WEIGHTS, f"{CLASSES} - 3 * (batch[1] == 3).sum()")])
def test_a_term_that_is_read_is_weighed_by_the_count_of_the_loss(given: str, count: str) -> None:
    text = WEIGHED.format(given, "crit")
    before = run(HEAD + text, "before.py")["seen"]
    answer = answered(text, count)
    after = str(answer["after"]).replace('memory="free"', "micro_batch_size=32")
    assert "anybatch.Mean(first * items, items)" in after, answer["trouble"]
    assert run(after, "after.py")["seen"] == pytest.approx(before, rel=2e-7)  # the loop reads a float32


@pytest.mark.parametrize("which", ["take the one that the loss divides by", "with the labels in other places only"])
def test_a_count_that_is_the_same_on_the_batch_is_a_comment(which: str) -> None:
    step, question = found(epochs()), {"memory": "free"}
    text = f"On this batch 1 other way to count gives the same, such as {CLASSES}; {which} it. Instead:"
    assert step.counted(f"{text}\n    count=anybatch.count_samples\n") is not None
    change = str(step.with_change({"plan": {"chosen": {"micro_batch_size": 32}}}, question)["after"])
    comment = f"# count= is what the loss divides by; on this batch {CLASSES} is the same\n"
    assert f"{comment}step = anybatch.TrainStep(" in change
    assert comment not in str(answered(epochs(), "anybatch.count_samples")["after"])


def test_a_term_with_items_of_its_own_is_not_weighed_by_those_of_the_loss() -> None:
    answer = answered(WEIGHED.format("None", "fair"), TOKENS)
    assert "not the mean over the" in str(answer["trouble"])
    assert not answer["change"]


MASKED = """
kinds = (targets.long() + 2) % 5
kinds[:128, 1:] = 3
for epoch in range(2):
    for x, y in [(inputs, kinds)]:
        optimizer.zero_grad()
        out = model(x) / 2**10
        kept = out[y != 3]
        first = {}
        loss = kept.square().mean() + {} * first
        loss.backward()
        optimizer.step()
        seen.append(first.item())
"""


@pytest.mark.parametrize(
    ("term", "weight"),
    [
        ("kept.square().mean()", "items"),
        ("torch.stack([kept, kept.square()], 1).mean()", "items"),
        ("torch.stack([kept, kept.square()], 1).mean(1).mean(0)", "items"),
        ("nn.functional.mse_loss(kept, torch.ones_like(kept))", "items"),
        ("out.square().mean()", "len(x)"),
        ("out.square().mean(1).mean(0)", "len(x)"),
        ("out.square().flatten().mean()", "len(x)"),
        ("out[y != 4].square().mean()", ""),
        ("kept[:, None].expand(-1, 256).mean(0).mean()", ""),
        ("kept.mean() + out.mean()", ""),
    ],
)
def test_a_mean_over_chosen_items_is_weighed_by_what_it_is_over(term: str, weight: str) -> None:
    text = MASKED.format(term, 0.5 if weight == "items" else 0)  # one sum of both kinds of means can't be split
    answer = answered(text, TOKENS)
    if not weight:
        assert "not the mean over the" in str(answer["trouble"])
        return
    before = run(HEAD + text, "before.py")["seen"]
    after = str(answer["after"]).replace('memory="free"', "micro_batch_size=32")
    assert f"anybatch.Mean(first * {weight}, {weight})" in after, answer["trouble"]
    assert run(after, "after.py")["seen"] == pytest.approx(before, rel=2e-6)  # the loop reads a float32


@pytest.mark.parametrize("count", ["lambda batch: others.weight[batch[1]].sum()", "lambda batch: out[batch[1]].sum()"])
def test_a_count_of_names_that_the_loop_does_not_have_is_not_taken(count: str) -> None:
    assert found(WEIGHED.format("None", "crit")).counted(f"Instead:\n    count={count}\n") is None


def test_the_class_weights_of_a_script_are_found_where_the_count_needs_them() -> None:
    call = found(WEIGHED.format(WEIGHTS, "crit")).counted(f"Instead:\n    count={CLASSES}  # the weights\n")
    assert call is not None
    labels = call.batch[1]
    assert call.options["count"](call.batch) == call.options["count"]((None, labels[:100])) + call.options["count"](
        (None, labels[100:])
    )


def test_two_losses_of_one_update_are_to_be_returned_in_a_mapping() -> None:
    text = epochs().replace("loss.backward()", "{}; loss.backward()")
    one = found(text.format("model(x).abs().mean().backward()"))
    assert "calls backward() twice for one update (line 29); have one loss function return both" in one._trouble
    with pytest.raises(StepUnclear, match=r"arguments to backward.* have one loss function return them in a mapping"):
        found(text.replace("; ", "\n        ").format("out.abs().mean().backward(retain_graph=True)"))


def test_a_name_within_the_backward_is_refused() -> None:
    with pytest.raises(StepUnclear, match="gives the loss a name within its backward"):
        found(epochs().replace("loss.backward()", "(goal := loss * 2).backward()"))


def test_indices_of_a_comprehension_in_the_loss_are_the_batch() -> None:
    text = ROWS.format("rows = torch.arange(64) + i", "model(torch.stack([inputs[k] for k in rows])).square().mean()")
    assert list(found(text)._step.batch) == ["rows"]


def test_a_name_of_the_forward_that_the_loop_deletes_is_refused() -> None:
    answer = found(epochs(behind="del out, loss")).with_change({}, {"memory": None})
    assert "deletes 'loss'" in answer["trouble"]
    assert not answer["change"]


WHOLE = {"chosen": {"micro_batch_size": 64, "micro_batches": 1}, "whole_bytes": 5}


@pytest.mark.parametrize(
    ("text", "plan", "call"),
    [
        (epochs(), WHOLE | {"budget": 9}, "TrainStep(model, loss_fn, optimizer)"),
        (epochs(), WHOLE | {"budget": 4}, 'TrainStep(model, loss_fn, optimizer, plan=anybatch.Plan.load("plan.json"))'),
        (epochs("print()"), WHOLE | {"budget": 9}, 'TrainStep(model, loss_fn, optimizer)'),
        (epochs("abs(1)"), WHOLE | {"budget": 9}, "anybatch.backward(model, loss_fn, (x, y))"),
    ],
)  # fmt: skip
def test_where_a_split_is_refused_the_lines_say_what_was_planned(text: str, plan: Mapping[str, Any], call: str) -> None:
    answer = found(text).with_change({"plan": dict(plan), "refusal": "why"}, {"memory": "4"})
    assert call in answer["change"], answer["trouble"]
    assert "memory=" not in answer["change"]


OVER_TIME = """
cells = nn.ModuleList([nn.GRU(8, 16, batch_first=True), nn.Linear(16, 1)]).float()


def of_chunk(cells, chunk, state):
    x, y = chunk
    out, state = cells[0](x, state)
    out = cells[1](out)
    return (out - out.mean(0) - y).square().mean(), state  # by all samples


import anybatch

loss_fn = anybatch.OverTime(of_chunk, lambda cells, batch: torch.zeros(1, len(batch[0]), 16))
optimizer = torch.optim.SGD(cells.parameters(), lr=0.01)
step = anybatch.TrainStep(cells, loss_fn, optimizer, memory="400KiB")
step((torch.randn(64, 40, 8), torch.randn(64, 40, 1)))
"""


def test_chunks_that_are_refused_have_no_plan_of_the_whole_batch() -> None:
    Path("train.py").write_text(HEAD + OVER_TIME, encoding="utf-8")
    code = "from anybatch.cli.main import main; main(prog_name='anybatch')"
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    values = {**os.environ, "PYTHONPATH": path, "COLUMNS": "80"}
    command = [sys.executable, "-c", code, "plan", "train.py", "--json", "plan.json"]
    done = forked_python.run(command, Path.cwd(), values)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the step can't be split as planned: in micro-batches the gradient" in done.stderr
    assert "plan of the whole batch" not in done.stdout


FUNCTION = """
def train(x, y):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    model(x).abs().mean().backward()
    optimizer.step()

train(*next(iter(loader)))
"""
BRANCHES = """
for x, y in loader:
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    if scaler is None:
        loss.backward()
    else:
        scaler.scale(loss).backward()
    if True:
        model(x).abs().mean().backward()
    optimizer.step()
"""


def test_other_losses_are_those_of_the_function_and_not_of_another_branch() -> None:
    lines = (HEAD + FUNCTION).splitlines()
    assert found(FUNCTION).other_backwards == [lines.index("    model(x).abs().mean().backward()") + 1]
    text = "scaler = None" + BRANCHES
    lines = (HEAD + text).splitlines()
    assert found(text).other_backwards == [lines.index("        model(x).abs().mean().backward()") + 1]
