"""A loop that adds up gradients by hand: the plan is of all its batches, and the printed loop has windows of them."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.batch.windowing import Window
from anybatch.cli.plan_loops import FoundStep
from plan_loop_scripts import HEAD, changed, folder, found, run  # noqa: F401 - one is a fixture

BATCHES = "loader = [(inputs[i : i + 16], targets[i : i + 16]) for i in range(0, 256, 16)]\naccumulate = 4\n"

DIVIDED = """
for epoch in range(2):
    optimizer.zero_grad()
    total = 0.0
    for i, (x, y) in enumerate(loader):
        out = model(x)
        loss = (out - y).square().mean() / accumulate
        loss.backward()
        total += loss.item() * accumulate
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    seen.append(total / len(loader))
"""

LOOPS = {
    "divided": DIVIDED,
    "divided in a line of its own": """
total, batches = 0.0, 0
for step, batch in enumerate(loader):
    x, y = batch
    loss = (model(x) - y).square().mean()
    loss = loss / accumulate
    loss.backward()
    total += loss.item()
    batches += 1
    if (step + 1) % accumulate == 0 or (step + 1) == len(loader):
        optimizer.step()
        optimizer.zero_grad()
seen += [total, batches]
""",
    "divided in place, clipped": """
for i, (x, y) in enumerate(loader, 1):
    loss = (model(x) - y).square().mean()
    loss /= 4
    loss.backward()
    if not i % 4:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
""",
    "divided at the backward, moved, with a last update": """
device = torch.device("cpu")
total = 0.0
for i, (x, y) in enumerate(loader):
    x, y = x.to(device), y.to(device, non_blocking=True)
    loss = (model(x) - y).square().mean()
    (loss / accumulate).backward()
    total += loss.item()
    if i % accumulate == accumulate - 1:
        optimizer.step()
        optimizer.zero_grad()
if len(loader) % accumulate != 0:
    optimizer.step()
    optimizer.zero_grad()
seen.append(total)
""",
    "counted by hand, in a function": """
def epoch(model, loader, optimizer, every):
    optimizer.zero_grad()
    done = 0
    for x, y in loader:
        pred = model(x)
        loss = (pred - y).square().mean() / every
        loss.backward()
        done += 1
        if done % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return done

for _ in range(2):
    seen.append(epoch(model, loader, optimizer, accumulate))
""",
    "whose rows and targets are read": """
correct = total = 0
for i, batch in enumerate([{"x": x, "y": y} for x, y in loader]):
    batch = {key: value.to("cpu") for key, value in batch.items()}
    out = model(batch["x"])
    loss = (out - batch["y"]).square().mean() / accumulate
    loss.backward()
    correct += (out.argmax(1) == batch["y"].argmax(1)).sum().item()
    total += batch["y"].size(0)
    if (i + 1) % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
        seen.append(correct / total)
""",
    "whose progress reads the number of batches": """
progress = enumerate(loader)
running = 0.0
for i, (images, labels) in progress:
    images = images.to("cpu", non_blocking=True)
    labels = labels.to("cpu", non_blocking=True)
    loss = (model(images) - labels).square().mean()
    running += loss.item()
    loss = loss / accumulate
    loss.backward()
    if (i + 1) % accumulate == 0 or (i + 1) == len(loader):
        optimizer.step()
        optimizer.zero_grad()
        seen.append(running / (i + 1))
        seen.append(labels.sum().item() * 0 + i)
""",
    "with a scheduler": """
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for i, (x, y) in enumerate(loader):
    loss = (model(x) - y).square().mean() / accumulate
    loss.backward()
    if (i + 1) % accumulate == 0:
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append(scheduler.get_last_lr()[0])
""",
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_loop_over_windows_trains_as_the_one_that_adds_up(name: str) -> None:
    before = run(HEAD + BATCHES + LOOPS[name], "original.py")
    text = changed(BATCHES + LOOPS[name])
    assert re.search(r"anybatch.windows\(.*, batches=(accumulate|every|4)\)", text)
    assert ("anybatch.backward(" if "rows" in name else "anybatch.TrainStep(") in text
    after = run(text, "after.py")
    for old, new in zip(before["model"].parameters(), after["model"].parameters(), strict=True):
        torch.testing.assert_close(old, new, rtol=1e-10, atol=1e-12)
    assert before["seen"] == pytest.approx(after["seen"], rel=1e-6)


def test_the_plan_is_of_all_batches_of_an_update() -> None:
    batch = found(BATCHES + DIVIDED).call.batch
    assert isinstance(batch, Window)
    assert [len(x) for x, _ in batch] == [16] * 4


def test_a_sum_that_nothing_divides_becomes_the_mean_and_is_said_to() -> None:
    text = changed(BATCHES + DIVIDED.replace(" / accumulate", "", 1).replace(" * accumulate", ""))
    assert "their gradients were added up, and this is the mean: 1 / 4 of it" in text


def test_batches_of_unequal_size_weigh_by_their_samples() -> None:
    ends = "((0, 16), (16, 20), (20, 50), (50, 51))"
    uneven = f"loader = [(inputs[a:b], targets[a:b]) for a, b in {ends}] * 2\naccumulate = 4\n"
    text = changed(uneven + DIVIDED.replace("range(2)", "range(1)"))
    after = run(text, "after.py")["model"]
    whole: dict[str, Any] = run(HEAD, "reference.py")
    model, optimizer = whole["model"], whole["optimizer"]
    for _ in range(2):
        optimizer.zero_grad()
        (model(whole["inputs"][:51]) - whole["targets"][:51]).square().mean().backward()
        optimizer.step()
    for old, new in zip(model.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(old, new, rtol=1e-10, atol=1e-12)


UNCLEAR = {
    "reads a part": (
        DIVIDED.replace("        total +=", "        seen.append(size); total +=").replace(
            "i, (x, y) in enumerate(loader)", "i, ((x, y), size) in enumerate([(one, 'small') for one in loader])"
        ),
        "reads 'size' of each batch",
    ),
    "steps at once": (DIVIDED.replace("(i + 1) %", "i %"), "ran backward once before its first update"),
    "divides a part": (
        DIVIDED.replace(
            "(out - y).square().mean() / accumulate", "(out - y).square().mean() / accumulate + 0 * out.sum()"
        ),
        "divides a part of the loss by accumulate",
    ),
    "updates elsewhere": (f"{DIVIDED}\n    pass\n    optimizer.step()\n", "updates, too"),
    "has an inner loop": (
        """
batches = iter(loader)
for _ in range(4):
    optimizer.zero_grad()
    for _ in range(accumulate):
        x, y = next(batches)
        loss = (model(x) - y).square().mean() / accumulate
        loss.backward()
    optimizer.step()
""",
        "anybatch.windows(loader, batches=4)",
    ),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_can_not_be_written_so_is_said_with_the_way_out(name: str) -> None:
    text, why = UNCLEAR[name]
    answer = found(BATCHES + text).with_change({"plan": {"chosen": {"micro_batch_size": 8}}}, {"memory": "free"})
    assert not answer["change"]
    assert why in answer["trouble"]


def test_lines_that_were_taken_out_leave_no_trace() -> None:
    Path("train.py").write_text(HEAD, encoding="utf-8")
    answer = found(BATCHES + LOOPS["divided in a line of its own"])
    change = answer.with_change({"plan": {"chosen": {"micro_batch_size": 8}}}, {"memory": "free"})["change"]
    subprocess.run(["patch", "-p1", "--dry-run"], input=change, text=True, check=True, capture_output=True)
    assert "of a micro-batch alone" not in change


def test_a_loop_that_stopped_before_its_first_update_is_changed_so_too() -> None:
    text = HEAD + BATCHES + DIVIDED
    Path("train.py").write_text(text, encoding="utf-8")
    names = run(text, "original.py")
    line = text.split("\n").index("        loss.backward()") + 1
    answer = FoundStep(names, "train.py", line, names["optimizer"])
    change = answer.with_change({"plan": {"chosen": {"micro_batch_size": 8}}}, {"memory": "free"})
    assert not change["trouble"]
    assert "anybatch.windows(loader, batches=accumulate)" in change["change"]
