"""Which state is kept as the best one, read from scripts that keep the worst, and from ones that only look like it."""

import ast

import pytest

from anybatch.doctor.ask.selecting import worse_kept, wrong_modes

KEEP = "state = copy.deepcopy(model.state_dict())"
MEASURE = """
def validate(model, x, y):
    model.eval()
    loss = F.mse_loss(model(x), y).item()
    return loss
def test(model, loader):
    total, correct = 0.0, 0
    for x, y in loader:
        out = model(x)
        total += criterion_loss(out, y).item()
        correct += (out.argmax(1) == y).sum().item()
    return total / len(loader), correct / len(loader.dataset)
def other(model):
    return -F.mse_loss(model(x), y)
"""


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        (f"val = validate(model, x, y)\nif val > best:\n  best = val\n  {KEEP}", "highest"),
        ("val = validate(model, x, y)\nif best < val:\n  best, best_state = val, model.state_dict()", "highest"),
        (f"a, b = test(model, data)\nif b < best:\n  best = b\n  {KEEP}", "lowest"),
        (f"a, b = test(model, data)\nif a > best:\n  best = a\n  {KEEP}", "highest"),
        (f"val = test(model, data)[1]\nif epoch > 3 and val < best:\n  best = val\n  {KEEP}", "lowest"),
        ("val = validate(m, x, y)\nif val > best['v']:\n  best = {'v': val, 's': m.state_dict()}", "highest"),
        ("val = validate(m, x, y)\nif best is None or val > best[0]:\n  best = (val, m.state_dict())", "highest"),
        (f"val = validate(m, x, y)\nbetter = val > best\nif better:\n  best = val\n  {KEEP}", "highest"),
        (f"val = validate(m, x, y)\nif not val < best:\n  best = val\n  {KEEP}", "highest"),
        (f"log = run(m)\nif log['val_loss'] > best:\n  best = log['val_loss']\n  {KEEP}", "highest"),
    ],
)
def test_the_worst_state_is_seen_by_what_its_value_is_made_of(text: str, keeps: str) -> None:
    assert [each for _, _, each in worse_kept(ast.parse(MEASURE + text))] == [keeps]
    turned = text.replace("val <", "val ~").replace("val >", "val <").replace("val ~", "val >")
    turned = turned.replace("b <", "b >").replace("a >", "a <").replace("best < val", "best > val")
    turned = turned.replace("log['val_loss'] >", "log['val_loss'] <")
    assert not list(worse_kept(ast.parse(MEASURE + turned)))


@pytest.mark.parametrize(
    "text",
    [
        f"val = other(model)\nif val > best:\n  best = val\n  {KEEP}",
        f"val = unknown(model)\nif val > best:\n  best = val\n  {KEEP}",
        f"val = validate(model, x, y) * -1\nif val > best:\n  best = val\n  {KEEP}",
        f"val = 1 / validate(model, x, y)\nif val > best:\n  best = val\n  {KEEP}",
        f"val = validate(m, x, y)\nif z:\n  val = other(m)\nif val > best:\n  best = val\n  {KEEP}",
        "cost = validate(model, x + delta, y)\nif cost > best:\n  best = cost\n  torch.save(delta, path)",
        f"val = validate(model, x, y)\nif val > worst:\n  worst = val\n  {KEEP}",
        f"def step(val):\n  if val > best:\n    best = val\n    {KEEP}",
    ],
)
def test_a_value_of_no_sure_direction_is_quiet(text: str) -> None:
    assert not list(worse_kept(ast.parse(MEASURE + text)))


LIGHTNING = "from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint\n"
TRAINER = "from transformers import TrainingArguments\n"
BEST = "TrainingArguments(load_best_model_at_end=True, metric_for_best_model="


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        (LIGHTNING + "EarlyStopping('val_loss', mode='max')", "mode='min'"),
        (LIGHTNING + "ModelCheckpoint(monitor='val_acc')", "mode='max'"),
        ("import lightning as L\nL.pytorch.callbacks.ModelCheckpoint(monitor='val/f1', mode='min')", "mode='max'"),
        (TRAINER + BEST + "'rmse')", "greater_is_better=False"),
        (TRAINER + BEST + "'accuracy', greater_is_better=False)", "greater_is_better=True"),
        (TRAINER + BEST + "'eval_loss', greater_is_better=True)", "greater_is_better=False"),
    ],
)
def test_a_mode_that_is_wrong_is_seen(text: str, fix: str) -> None:
    assert [one[-1] for one in wrong_modes(ast.parse(text))] == [fix]


@pytest.mark.parametrize(
    "text",
    [
        LIGHTNING + "EarlyStopping('val_loss')\nModelCheckpoint(monitor='val_acc', mode='max')",
        LIGHTNING + "ModelCheckpoint(monitor='val_acc', save_top_k=-1)\nModelCheckpoint()",
        LIGHTNING + "EarlyStopping(monitor=name)\nEarlyStopping('val_acc', mode=mode)\nEarlyStopping('val_acc', **kw)",
        LIGHTNING + "EarlyStopping('neg_loss', mode='max')\nEarlyStopping('quality')",
        "from helpers import EarlyStopping\nimport lightning\nEarlyStopping(monitor='val_acc')",
        "class EarlyStopping:\n  pass\nimport lightning\nEarlyStopping(monitor='val_acc')",
        TRAINER + BEST + "'loss')\n" + BEST + "'accuracy')\nTrainingArguments(metric_for_best_model='rmse')",
    ],
)
def test_a_mode_that_is_right_or_not_known_is_quiet(text: str) -> None:
    assert not list(wrong_modes(ast.parse(text)))
