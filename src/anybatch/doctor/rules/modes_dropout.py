"""Rules of the family modes: dropout that never stops, and dropout that never starts."""

from collections.abc import Iterator
from pathlib import PurePath

from anybatch.doctor.rules.courses import course, updates
from anybatch.doctor.rules.modes_phases import trained_forwards
from anybatch.doctor.rules.naming import at_line, counted, listed, qualified, root_variable, verb
from anybatch.doctor.rules.registry import rule
from anybatch.records.events import DropoutCall, Loaded
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run


def _by_line(run: Run, training: bool) -> dict[tuple[int, str, str, int], list[DropoutCall]]:
    found: dict[tuple[int, str, str, int], list[DropoutCall]] = {}
    for one in run.of(DropoutCall):
        if one.training is training and one.root_training is not training and one.p > 0:
            found.setdefault((one.root, one.module, one.file, one.line), []).append(one)
    return found


def _told(one: DropoutCall) -> str:
    """The call that knows the mode of its module."""
    return f"F.{one.function}(x, {one.p:g}, training=self.training)"


def _in_line(file: str, line: int) -> str:
    return f"  # in line {line} of {PurePath(file).name}" if file else ""


@rule(
    "AB453",
    "DROPOUT_ALWAYS_ON",
    "warning",
    "dropout is active in evaluation mode",
    """
## What is seen

A functional dropout dropped although the module that called it was in evaluation mode.

## Why it matters

`F.dropout` knows nothing of the mode of a module: its `training` is `True` unless it is told
otherwise. Predictions are noisy, and two evaluations of one input differ.

## What to change

```python
x = F.dropout(x, p=0.1, training=self.training)
```

## When it is fine

Monte Carlo dropout wants just this. Dropout modules that were put in training mode on purpose are
not reported.

## Source

facebookresearch/DME#3, huggingface/transformers#33844, pytorch/torchtune#1803.
""",
    explains=("TRAIN_IN_EVAL",),
)
def _dropout_always_on(run: Run) -> Iterator[Finding]:
    for (root, module, file, line), found in _by_line(run, True).items():
        one = found[0]
        name = qualified(run, root, module)
        yield Finding(
            message=f"{one.function} (p={one.p:g}) in {name}{at_line(file, line)} drops in evaluation mode as well.",
            place=Place(module=name, file=file, line=line),
            fix=_told(one) + _in_line(file, line),
            cause="The functional form does not know the mode of the module; it has to be told.",
            evidence={"p": one.p, "calls": len(found), "function": one.function},
            step=one.step,
            at=one.at,
        )


@rule(
    "AB454",
    "DROPOUT_NEVER_ON",
    "warning",
    "dropout is never active in training",
    """
## What is seen

The model is in evaluation mode in each step from the first one on, although it has dropout; or a
functional dropout is told not to drop in training mode.

## Why it matters

The model is trained without the regularisation that is written down in it. `from_pretrained` gives
models in evaluation mode.

## What to change

```python
model.train()
```

## When it is fine

Batch norm in evaluation mode from the first step on is a usual way of fine-tuning and is not
reported. If dropout is to be off, `p=0` says so.

## Source

The documentation of `torch.nn.Module.train`; see also EVAL_IN_TRAINING.
""",
)
def _dropout_never_on(run: Run) -> Iterator[Finding]:
    for root, facts in run.roots.items():
        found = trained_forwards(run, root)
        drops = [one.name for one in facts.modules if one.kind == "dropout" and float(one.options.get("p", 0) or 0) > 0]
        if len(found) < 5 or not drops or any(one.training or one.trained for one in found):
            continue
        if len(updates(run)) < 5:
            continue
        first, variable = found[0], root_variable(run, root)
        loaded = any(one.into == "module" and one.number == root for one in run.of(Loaded))
        yield Finding(
            message=f"{variable} is in evaluation mode in all {counted(len(found), 'forward')} that are trained on"
            f"{at_line(first.file, first.line)}: {listed(drops)} never {verb(len(drops), 'drops', 'drop')}.",
            place=Place(module=qualified(run, root, ""), file=first.file, line=first.line),
            fix=f"{variable}.train()  # before the loop",
            cause=f"{variable}.train() was not called"
            + (" after loading." if loaded else ", or eval() was called before the loop."),
            evidence={"forwards": len(found), "dropouts": len(drops)},
            step=found[4].step,
            at=first.at,
        )
    for (root, module, file, line), calls in _by_line(run, False).items():
        if len(calls) < 3:
            continue
        one, name = calls[0], qualified(run, root, module)
        yield Finding(
            message=f"{one.function} (p={one.p:g}) in {name}{at_line(file, line)} does not drop in training mode.",
            place=Place(module=name, file=file, line=line),
            fix=_told(one) + _in_line(file, line),
            cause="It is called with training=False.",
            evidence={"p": one.p, "calls": len(calls)},
            step=calls[2].step,
            at=one.at,
        )


MOST_DROPPED = 0.8
"""Half is the usual most (Srivastava et al., 2014, section A.4: 0.5 to 0.8 is kept)."""


@rule(
    "AB458",
    "DROPOUT_TOO_HIGH",
    "warning",
    "dropout leaves so little that the model does not learn",
    """
## What is seen

A dropout module with `p` of 0.8 or more was in training mode, and the loss did not fall.

## Why it matters

In torch `p` is the share that is *dropped*; older TensorFlow took the share that is kept. With 0.9 one unit in ten is
left, ten times as large, so that outputs are mostly noise.

## What to change

```python
nn.Dropout(p=0.1)      # drops a tenth; keep_prob of 0.9
```

## When it is fine

Where the loss falls all the same: silent.

## Source

N. Srivastava et al., "Dropout" (2014); the documentation of `torch.nn.Dropout`.
""",
    explains=("LR_TOO_LOW", "CANNOT_FIT_BATCH"),
)
def _dropout_too_high(run: Run) -> Iterator[Finding]:
    went = course(run)
    if len(went.finite) < 20 or went.fell or went.diverged:
        return
    for root, facts in run.roots.items():
        high = {
            one.name: float(p)
            for one in facts.modules
            if one.kind == "dropout" and isinstance(p := one.options.get("p"), float) and MOST_DROPPED <= p < 1
        }
        found = trained_forwards(run, root)
        if not high or not found or not all(one.training for one in found):
            continue
        names, p = [qualified(run, root, one) for one in high], max(high.values())
        yield Finding(
            message=f"{listed(names)} {verb(len(names), 'drops', 'drop')} {p:.0%} of what goes in, and the loss does "
            f"not fall ({went.first:.4g} at first, {went.last:.4g} at last).",
            place=Place(module=names[0], file=found[0].file, line=found[0].line),
            fix=f"nn.Dropout(p={round(1 - p, 6):g})  # p is the share that is dropped",
            cause="So little is left of a sample that outputs are mostly noise.",
            evidence={"p": p, "dropouts": len(names), "loss_first": went.first, "loss_last": went.last},
            step=found[0].step,
            at=found[0].at,
        )
