"""Counters, sums and conditions of a loop that adds up gradients by hand, once it iterates over windows."""

import pytest
import torch

from anybatch.errors import AnyBatchError
from plan_loop_scripts import HEAD, changed, folder, found, run  # noqa: F401 - one is a fixture

BATCHES = "loader = [(inputs[i : i + 16], targets[i : i + 16]) for i in range(0, 256, 16)]\naccumulate = 4\n"
UPDATE = """
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
LOOP = f"""
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        # first
        out = model(x)
        loss = (out - y).square().mean() / accumulate
        loss.backward()
        # then
{UPDATE}
        # last
"""


def loop(first: str = "pass", then: str = "pass", last: str = "pass", *, before: str = "", behind: str = "") -> str:
    """The loop with lines at the start of an iteration, before the update and behind it, and around the epochs."""
    lines = {"# first": first, "# then": then, "# last": last}
    text = LOOP
    for mark, code in lines.items():
        text = text.replace(mark, code.strip().replace("\n", "\n        "))
    return f"{BATCHES}{before}\n{text}\n{behind}\n"


LOOPS = {
    "counters": loop(
        'lr = 2**-12 / (1 + i + it)\nfor group in optimizer.param_groups:\n    group["lr"] = lr',
        'seen.append(0)\nif i == 0:\n    seen.append("first")',
        """
if (i + 1) % 8 == 0:
    seen.append(f"{i + 1} of {len(loader)}" f", {it:>{3}}")
if i % 8 == 7 and i > 8:
    seen.append(("every eighth", i))
if not (i + 1) % 4:
    seen.append(i)
it = it + 1
done += 2
left -= 1
""",
        before="it, done, left = 0, 2, 100",
        behind="seen[:] = [one for one in seen if one != 0] + [i, it, done, left]",
    ),
    "sums": loop(
        "size = x.size(0)",
        """
rows = len(y)
correct = (out.argmax(1) == y.argmax(1)).sum().item()
sums["n"] += 1
total = total + loss.item() * accumulate * size
with torch.no_grad():
    accuracy += (out.argmax(1) == y.argmax(1)).float().mean().item()
    whole += loss.item() / len(loader)
hits += correct
number += rows
bar.update(1)
losses.append(loss.item() * accumulate)
each.append(out.detach().square().mean(1).sum().item())
""",
        before="""
class Bar:
    n = 0
    def update(self, more):
        self.n += more

bar, sums, losses, each = Bar(), {"n": 0}, [], []
total = accuracy = whole = hits = number = 0
""",
        behind='seen += [sums["n"], total, accuracy, whole, hits, number, bar.n, sum(losses) / len(loader), sum(each)]',
    ),
    "a progress bar in the place of the loader": loop(
        then="total += loss.item()", before="tqdm = iter\ntotal = 0.0", behind="seen.append(total / len(bar))"
    )
    .replace("tqdm = iter", "class tqdm(list):\n    pass\n")
    .replace("    for i, (x, y) in enumerate(loader)", "    bar = tqdm(loader)\n    for i, (x, y) in enumerate(bar)"),
    "what begins and ends a window": loop(
        'if i % accumulate == 0:\n    optimizer.zero_grad()\n    optimizer.param_groups[0]["lr"] = 2**-12 / (1 + i)',
        "is_last = (i + 1) % accumulate == 0 or i + 1 == len(loader)",
    ).replace(UPDATE, "\n        if is_last:\n            optimizer.step(); seen.append(i)\n"),
    "a loss that is read before it is divided": loop(then="seen.append(0)\nlast = loss.item()").replace(
        "mean() / accumulate\n",
        "mean()\n        total += loss.item()\n        if accumulate > 1:\n            loss = loss / accumulate\n",
    ).replace("for epoch", "total = 0.0\nfor epoch", 1)
    + "seen[:] = [total, len(seen) > 0]\n",
    "a tuple that is moved": loop("batch = tuple(one.to('cpu') for one in batch)\nx, y = batch").replace(
        "i, (x, y) in", "i, batch in"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_counters_and_sums_are_those_of_the_batches(name: str) -> None:
    before = run(HEAD + LOOPS[name], "original.py")
    text = changed(LOOPS[name])
    assert "anybatch.windows(loader, batches=accumulate)" in text
    after = run(text, "after.py")
    for old, new in zip(before["model"].parameters(), after["model"].parameters(), strict=True):
        torch.testing.assert_close(old, new, rtol=1e-10, atol=1e-12)
    words = [[one for one in each["seen"] if not isinstance(one, float)] for each in (before, after)]
    numbers = [[one for one in each["seen"] if isinstance(one, float)] for each in (before, after)]
    assert words[0] == words[1]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-6)


DIVISIONS = {
    "by a factor": ("mean() / accumulate", "mean() * (1.0 / accumulate)"),
    "by a factor with a name": ("mean() / accumulate", "mean() * share"),
    "in place": ("mean() / accumulate\n", "mean()\n        loss.div_(accumulate)\n"),
    "by a method": ("mean() / accumulate\n        loss.backward()", "mean()\n        loss.div(4).backward()"),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_a_division_in_any_form_is_that_of_the_mean(name: str) -> None:
    text = loop(before="share = 1 / accumulate").replace(*DIVISIONS[name])
    after = changed(text)
    assert "added up" not in after
    models = [run(one, "a.py")["model"] for one in (HEAD + text, after)]
    for old, new in zip(*(one.parameters() for one in models), strict=True):
        torch.testing.assert_close(old, new, rtol=1e-10, atol=1e-12)


STEPPED = "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)\noptimizer.step()  # which it expects first"
TEACHER = """
import copy
teacher = copy.deepcopy(model)

class Average:
    def __init__(self):
        self.model = teacher

    def update(self, model):
        pass

average = Average()
"""
UNCLEAR = {
    "a schedule of batches": (loop(last="schedule.step()", before=STEPPED), "calls schedule.step for each batch"),
    "an average of weights": (loop(last="average.update(model)", before=TEACHER), "calls average.update for each"),
    "weights in place": (
        loop(
            last="for a, b in zip(teacher.parameters(), model.parameters()):\n    a.data.mul_(0.9).add_(b.data)",
            before=TEACHER,
        ),
        "for each batch",
    ),
    "a number of samples": (
        loop(last="number += len(x)\nif number % 32 == 0:\n    seen.append(number)", before="number = 0"),
        "compares 'number', a sum over batches",
    ),
    "gradients": (loop(then="for one in model.parameters():\n    one.grad = one.grad / 2"), "changes one.grad"),
    "a rate of batches": (
        loop(last='for one in optimizer.param_groups:\n    one["lr"] = 2**-12 / (1 + i)'), "for each batch"
    ),
    "a forward by the last batch": (
        loop(last="scale = 1 / (1 + i)", before="scale = 1.0").replace("model(x)", "model(x) * scale"),
        "reads 'scale', which the loop changes",
    ),
    "a running mean": (loop(then="mean = 0.9 * mean + loss.item()", before="mean = 0.0"), "makes 'mean' of what it"),
    "the least": (loop(then="best = min(best, loss.item())", before="best = 9e9"), "makes 'best' of what it was"),
    "an unknown sum": (
        loop(then="total += rate(out, y)", before="total = 0\nrate = lambda out, y: 1.0"), "their mean or their sum"
    ),
    "gradients of one batch": (loop("optimizer.zero_grad()"), "has only those of the last one"),
    "a clip for each batch": (
        loop(then="nn.utils.clip_grad_norm_(model.parameters(), 1.0)"), "clip_grad_norm_ for each batch"
    ),
    "another backward": (loop(then="model(x).mean().backward()"), "and so does line"),
    "a forward by the batch": (
        LOOP.replace("model(x)", "model(x) * (1 + i)").join([BATCHES, ""]), "reads 'i', which the loop changes"
    ),
    "a batch left out": (loop("if len(x) < 2:\n    continue"), "may leave out one batch of an update"),
    "an end between updates": (loop(last="if i > 8:\n    break"), "may be without an update"),
    "an update more": (BATCHES + LOOP.replace("== 0:", "== 0 or i == 5:"), "it was not seen by which condition"),
    "an end that is not known yet": (
        loop(then="least = 7").replace("== 0:", "== 0 or i == least:"), "it was not seen by which condition"
    ),
    "a part of a batch": (loop("x, y = x.to('cpu')[:8], y.to('cpu')[:8]"), "gives 'x' another value"),
    "a number of another type": (loop("x = x.to('cpu', dtype=torch.float64)"), "gives 'x' another value"),
}  # fmt: skip


def trouble(text: str) -> str:
    """Why a loop is not changed, which the command says."""
    try:
        answer = found(text).with_change({"plan": {"chosen": {"micro_batch_size": 8}}}, {"memory": "free"})
    except AnyBatchError as error:
        return str(error)
    assert not answer["change"]
    return str(answer["trouble"])


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_each_batch_does_and_a_window_can_not_is_said(name: str) -> None:
    text, why = UNCLEAR[name]
    assert why in trouble(text)


def test_an_update_of_every_batch_beside_a_rare_one_is_no_sum_of_gradients() -> None:
    text = loop("slow.zero_grad()\noptimizer.zero_grad()", "optimizer.step()", before="slow = optimizer")
    assert "anybatch.windows" not in changed(text.replace("            optimizer.step()", "            slow.step()"))


def test_a_condition_within_a_window_is_said_to_be_met_with_its_update() -> None:
    assert "a condition on i is met with the update" in changed(loop(last="if i == 5:\n    seen.append(i)"))
