"""Where it is not sure that a changed loop trains the same, the loop keeps its own update, or is refused."""

import random
from pathlib import Path

import pytest
import torch

from anybatch.doctor.loopparts import StepUnclear
from plan_loop_scripts import HEAD, ahead, changed, epochs, folder, found, run  # noqa: F401 - one is a fixture

CLEAR, BACK = "        optimizer.zero_grad()\n", "        loss.backward()\n"
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), {})"
OTHERS = """
head = whole(nn.Linear(4, 4))
both = nn.Sequential(model, head)
optimizer = torch.optim.SGD({}.parameters(), 2**-12)
"""
RATE = "def adapt(value):\n    optimizer.param_groups[0]['lr'] = 2**-12 / (1 + value)\n"
CONTROL = """
class Control:
    def __init__(self, optimizer):
        self.held = optimizer

    def observe(self, value):
        self.held.param_groups[0]["lr"] = 2**-12 / (1 + value)


control = Control(optimizer)
"""
LIMIT = "most = 1.0\ndef fall():\n    global most\n    most /= 2\n"
DICT = "held = {'most': 1.0}\ndef fall():\n    held['most'] /= 2\n"
REPLAY = "def replay():\n    if seen: model(inputs[:8]).square().mean().backward()\n"
PULL = "def pull():\n    for one in model.parameters():\n        one.grad = one.detach() / 8\n"
STOP = "class Enough(Exception):\n    pass\ndef check(value):\n    if value < 1e9 and len(seen) > 2: raise Enough\n"
ANEW = "def anew():\n    global optimizer\n    optimizer = torch.optim.SGD(model.parameters(), 2**-13)\n"
LOSS = """
class Loss:
    factor = 1

    def __call__(self, out, y):
        return (out - y).square().mean() * self.factor

    def grow(self):
        self.factor += 1


criterion = Loss()
"""
WEIGHTS = "weights = [1, 1]\ndef grow():\n    weights[0] += 1\n"
LOSS_LINE = "loss = (out - y).square().mean()"
KEPT = {
    "a function that sets the rate by the loss": ahead("adapt(loss.item())", RATE),
    "an object that sets the rate by the loss": ahead("control.observe(loss.item())", CONTROL),
    "an alias of a weight, read before the backward": ahead(
        "seen.append(loss.item() + weight[0, 0].item())", "weight = model[0].weight"
    ),
    "an alias of a weight, read before the step": epochs(
        "seen.append(weight[0, 0].item())", before="weight = model[0].weight"
    ),
    "a state of the optimizer, which is empty at first": ahead(
        "seen.append(loss.item() + sum(1 for one in state.values() if one))",
        "optimizer = torch.optim.SGD(model.parameters(), 2**-12, momentum=0.5)\nstate = optimizer.state",
    ),
    "a function that reads the weights": ahead(
        "seen.append(loss.item() + total())",
        "def total():\n    return sum(one.sum().item() for one in model.parameters())",
    ),
    "an average of the weights": ahead(
        "after(loss.item())",
        "mean = torch.optim.swa_utils.AveragedModel(model)\ndef after(_):\n    mean.update_parameters(model)",
    ),
    "a function that goes back itself": epochs(before=REPLAY, behind="seen.append(1)").replace(
        CLEAR, f"{CLEAR}        replay()\n"
    ),
    "a function that writes gradients": epochs(before=PULL).replace(CLEAR, f"{CLEAR}        pull()\n"),
    "gradients that are read": epochs().replace(
        CLEAR, f"{CLEAR}        seen.append(float(model[0].weight.grad is None))\n"
    ),
    "a clear of another module": epochs(before="other = nn.Linear(2, 2)").replace("optimizer.zero", "other.zero"),
    "a clear between the backward and the step": epochs("model[0].zero_grad()"),
    "a clear before the step": epochs("optimizer.zero_grad()").replace(CLEAR, "", 1),
    "a clip behind the step": epochs(behind=CLIP.format(1.0)),
    "a limit that a function changes": epochs(CLIP.format("most"), before=LIMIT, last="fall()"),
    "a limit in a dict": epochs(CLIP.format("held['most']"), before=DICT, last="fall()"),
    "a limit in an object": epochs(
        CLIP.format("held.most"),
        before="class Held:\n    most = 1.0\ndef fall():\n    held.most /= 2\nheld = Held()", last="fall()",
    ),
    "a clip of more than is trained": epochs(
        "nn.utils.clip_grad_norm_(both.parameters(), 1.0)", before=OTHERS.format("head")
    ).replace("out = model(x)", "out = both(x)"),
    "a clip of less than is trained": epochs(CLIP.format(1.0), before=OTHERS.format("both")).replace(
        "out = model(x)", "out = head(model(x))"
    ),
    "an optimizer that a function replaces": epochs(before=ANEW, last="anew()"),
    "gradients of zeros": epochs().replace("zero_grad()", "zero_grad(set_to_none=False)"),
    "a loss that is changed by a method": ahead("criterion.grow()", LOSS).replace(
        LOSS_LINE, "loss = criterion(out, y)"
    ),
    "a list that is changed by a function": ahead("grow()", WEIGHTS).replace(LOSS_LINE, f"{LOSS_LINE} * weights[0]"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_loop_keeps_its_update_where_it_is_not_sure(name: str) -> None:
    text = KEPT[name]
    before, after_text = run(HEAD + text, "original.py"), changed(text)
    assert "anybatch.backward(" in after_text
    after = run(after_text, "after.py")
    for old, new in zip(before["model"].parameters(), after["model"].parameters(), strict=True):
        torch.testing.assert_close(old, new, rtol=1e-9, atol=1e-9)
    assert before["seen"] == pytest.approx(after["seen"], rel=1e-6)


@pytest.mark.parametrize(
    "line", ["check(loss.item())", "if loss < 1e9 and len(seen) > 2: import sys; sys.exit(0)"], ids=["raises", "exits"]
)
def test_a_loop_that_leaves_before_its_update_leaves_there(line: str) -> None:
    text = ahead(f"seen.append(loss.item())\n{line}", STOP)
    indented = "\n".join(f"    {one}" for one in text.split("\n"))
    text = f"{STOP}try:\n{indented}\nexcept (SystemExit, Exception):\n    pass\n"
    before, after_text = run(HEAD + text, "original.py"), changed(text)
    after = run(after_text, "after.py")
    assert ("anybatch.backward(" in after_text, len(after["seen"])) == (True, 3)
    for old, new in zip(before["model"].parameters(), after["model"].parameters(), strict=True):
        torch.testing.assert_close(old, new, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "text",
    [ahead("seen.append(loss.item())"),
     ahead("print(f'{loss.item():.3f}', (out.argmax(1) == y.argmax(1)).sum().item())"),
     ahead("if len(seen) % 2 == 0: seen.append(loss.item())"), ahead("number += 1", "number = 0"),
     epochs(CLIP.format(1.0)), epochs(CLIP.format("most"), before="most = 0.5"),
     epochs().replace("zero_grad()", "zero_grad(set_to_none=True)"), epochs().replace("optimizer.zero", "model.zero"),
     epochs(before="def double(x):\n    return x * 2").replace(CLEAR, f"{CLEAR}        x = double(x)\n")],
)  # fmt: skip
def test_a_loop_that_only_looks_gets_a_train_step(text: str) -> None:
    answer = found(text).with_change({"plan": {"chosen": {"micro_batch_size": 32}}}, {"memory": "free"})
    assert "anybatch.TrainStep(" in answer["change"], answer["trouble"]


SAID = {
    "a hook of the result": (ahead("out.register_hook(print)"), "uses register_hook between the forward"),
    "a gradient that is kept": (ahead("out.retain_grad()"), "uses retain_grad between the forward"),
    "a gradient of its own": (ahead("g = torch.autograd.grad(loss, out, retain_graph=True)"), "uses grad between"),
    "a criterion in the middle": (
        epochs(before=LOSS).replace(LOSS_LINE, "criterion.grow()\n        loss = criterion(out, y)"),
        "may change 'criterion' in the middle of the forward"),
    "what the forward leaves": (
        epochs(before="def keep(module, given, out):\n    module.aux = out.mean()\nmodel.register_forward_hook(keep)",
               behind="seen.append(model.aux.item())"), "reads model.aux, which the forward leaves"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_needs_the_graph_or_each_micro_batch_would_leave_is_said(name: str) -> None:
    text, said = SAID[name]
    answer = found(text).with_change({}, {"memory": None})
    assert (said in answer["trouble"], answer["change"]) == (True, ""), answer["trouble"]


@pytest.mark.parametrize(
    ("text", "said"),
    [(epochs(before="beta = 0.0").replace(LOSS_LINE, f"beta = min(1.0, beta + 0.1)\n        {LOSS_LINE} * beta"),
      "put beta before the forward"),
     (epochs(before="def note(out):\n    seen.append(out.sum().item())").replace(
         "out = model(x)", "with torch.enable_grad():\n            out = model(x)\n            note(out)"),
      "calls note in a block of the forward")],
)  # fmt: skip
def test_a_forward_that_a_micro_batch_would_do_again_is_refused(text: str, said: str) -> None:
    with pytest.raises(StepUnclear, match=said):
        found(text)


@pytest.mark.parametrize("draw", ["random.random() < 0.5", "generator.random() < 0.5", "numpy.random.rand() < 0.5"])
def test_a_forward_that_draws_by_python_or_numpy_is_not_refused(draw: str) -> None:
    random.seed(3)
    before = (
        "import random\nimport numpy\ngenerator = numpy.random.default_rng(0)\nrandom.seed(1); numpy.random.seed(0)"
    )
    found(epochs(before=before).replace("out = model(x)", f"out = model(x) * (2 if {draw} else 1)"))


@pytest.mark.parametrize(
    ("head", "tail"),
    [
        ("", "\nimport math\nseen.append(math.pi)\n"),
        ('"""A script."""\n', ""),
        ("import os\nos.environ['A'] = '1'\n", ""),
    ],
)
def test_the_import_stands_before_what_runs_the_loop(head: str, tail: str) -> None:
    text = changed(epochs() + tail)
    Path("train.py").write_text(head + text, encoding="utf-8")
    run(head + text, "after.py")
    lines = text.split("\n")
    assert lines.index("import anybatch") < next(i for i, one in enumerate(lines) if "anybatch.TrainStep" in one)


def test_a_function_of_another_file_may_make_gradients(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    (folder / "apart_helpers.py").write_text("def replay(model):\n    pass\n", encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    text = epochs(before="from apart_helpers import replay").replace(CLEAR, f"{CLEAR}        replay(model)\n")
    assert "anybatch.backward(" in changed(text)
