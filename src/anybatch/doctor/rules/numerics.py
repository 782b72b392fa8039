"""Rules of the family numerics on gradients that vanish or explode; `units`, `writes`, `finite` hold the others."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from anybatch.doctor.rules.courses import Course, course
from anybatch.doctor.rules.fading import FAR, faded
from anybatch.doctor.rules.growing import loss_grew, lost
from anybatch.doctor.rules.measures import SQUASHING, Entry, entries, model_name, module_name, ratio
from anybatch.doctor.rules.naming import parameter_name
from anybatch.doctor.rules.registry import rule
from anybatch.records.events import Backward
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import Walk
from anybatch.records.runs import Run
from anybatch.records.samples import Norms

_REMEDIES = (
    "1. learning rate and warm-up; 2. clipping and decay; 3. normalisation: nn.LayerNorm or nn.BatchNorm1d between the "
    "layers; 4. residual connections: x = x + block(x); 5. activation: nn.ReLU() or nn.GELU(); 6. initialisation: "
    "nn.init.kaiming_normal_(layer.weight); 7. gated cells (LSTM, GRU); 8. pretraining"
)


@rule(
    "AB551",
    "VANISHING",
    "warning",
    "The gradients of the first layers vanish",
    """
## What is seen

In at least three samples, the last one included, the norm of the gradient of the first trainable layer is below 1e-6 of
that of the last one, and the loss is above a twentieth of its first value. If it was so from the first step on, the
update of that layer is also below 1e-6 of its weights, or the gradient shrinks over at least four layers and the loss
does not fall (Adam moves the first layers all the same, along noise); where the outputs are the same for all inputs,
too, 1e-4 is enough.
Where steps had changed the weights by more than a tenth before, a gradient below 1e-2 of the last one's and below 1e-4
of what it was at the start is enough: there it is the consequence of a learning rate that is far too high.

## Why it matters

Going backwards, every layer multiplies the gradient with the slope of its activation and with its weights. The slope of
a sigmoid is at most 0.25: twenty layers leave 0.25 ** 20 = 1e-12. The first layers then stay as they were initialised.

**First look whether a learning rate that is far too high is the root** (LR_TOO_HIGH): it drives the units into
saturation or death, and vanishing is the last link of that chain. A higher learning rate then makes it worse. If the
gradient was tiny at step 0 already, before any update, the network itself is the cause.

## What to change

In this order:

1. learning rate and warm-up, if the gradients were healthy at the start;
2. clipping and weight decay;
3. normalisation: `nn.LayerNorm` or `nn.BatchNorm1d` between the layers;
4. residual connections: `x = x + block(x)`;
5. the activation: `nn.ReLU()`, `nn.GELU()` instead of `nn.Sigmoid()`, `nn.Tanh()`;
6. the initialisation: `nn.init.kaiming_normal_(layer.weight)` for ReLU, `xavier_uniform_` for tanh;
7. gated cells, `nn.LSTM` or `nn.GRU`, instead of `nn.RNN`;
8. pretraining.

## When it is fine

A model that has converged has tiny gradients everywhere, and layers behind a gate that begins at zero (LoRA, ReZero)
have none at step 0: both are silent.
""",
    explains=("INPUT_IGNORED", "LR_TOO_LOW", "LOSS_CONSTANT", "CANNOT_FIT_BATCH"),
)
def vanishing(run: Run) -> Iterator[Finding]:
    """Gradients that do not arrive at the first layers."""
    for optimizer in sorted({norms.optimizer for norms in run.of(Norms)}):
        losses = course(run, optimizer)
        found = faded(run, optimizer, losses)
        if found is None:
            continue
        lost, early = found.lost, found.early
        norms, chain = lost[0]
        first, last = chain[0], chain[-1]
        gone = lost[-1][1]
        count, squashing = _squashing(run)
        because = (
            f"{count} times {squashing}, each of which shrinks it"
            if early and count >= 4
            else "the depth and the initialisation of the network" if early else "what happened before that step"
        )  # fmt: skip
        yield Finding(
            message=f"The gradient of {parameter_name(run, first.parameter)} is {gone[0].grad:.2g}, that of "
            f"{parameter_name(run, last.parameter)} {gone[-1].grad:.2g}: it vanishes on its way back"
            + (" from the first step on." if early else f", since step {norms.number}."),
            place=Place(
                module=module_name(run, first.parameter.root, first.parameter.module),
                parameters=(parameter_name(run, first.parameter),),
            ),
            fix=_repair(run, count, squashing) if early else _REMEDIES,
            cause=f"It is lost through {because}.",
            evidence={
                "gradients": {parameter_name(run, one.parameter): one.grad for one in _thinned(gone)},
                "first_over_last": gone[0].grad / gone[-1].grad if gone[-1].grad else 0.0,
                "update_ratio_first": gone[0].ratio,
                "loss_first": losses.first,
                "loss_last": losses.last,
            },
            step=lost[min(2, len(lost) - 1)][0].step,
            at=norms.at,
        )


def _thinned(chain: list[Entry]) -> list[Entry]:
    step = max(1, len(chain) // 8)
    return [*chain[:-1:step], chain[-1]]


def _squashing(run: Run) -> tuple[int, str]:
    """How many sigmoids, tanhs and the like lie between input and loss, and what the first is called."""
    found = [module.cls for root in run.roots.values() for module in root.modules if module.cls in SQUASHING]
    kinds = ("Sigmoid", "Tanh", "Softsign", "LogSigmoid")
    nodes = [(walk.kinds.get(f"{kind}Backward0", 0), kind) for walk in run.of(Walk) for kind in kinds]
    return max([(len(found), found[0] if found else ""), *nodes])


def _repair(run: Run, count: int, squashing: str) -> str:
    if count >= 4:
        return (
            f"nn.{squashing}() -> nn.ReLU() in {model_name(run)}, with nn.init.kaiming_normal_(layer.weight); "
            "or x = x + block(x) around the layers, or nn.LayerNorm between them"
        )
    return f"In {model_name(run)}: nn.LayerNorm between the layers, x = x + block(x), kaiming_normal_ for ReLU"


_SOON = 3
"""Steps after which a number that is not finite may still come of one that exploded."""


@dataclass(frozen=True, slots=True)
class _Jump:
    norms: Norms
    before: float
    after: float
    why: str


@rule(
    "AB552",
    "EXPLODING",
    "warning",
    "The gradients explode",
    """
## What is seen

The norm of all gradients rose above 100 times its running median and above that of the weights (or its update changed
them by more than a tenth), or the first gradients were more than 100 times
as long as the weights, **and** harm followed: the loss rose above three times its first value, the update changed the
weights by more than a tenth, or a number was not finite.

## Why it matters

A single such gradient throws the weights away from everything learned so far.

## What to change

```python
torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # between backward and step
```

If the gradients are huge at step 0, the reason lies before any update: targets or inputs of thousands (standardise
them), an initialisation whose activations grow from layer to layer, a recurrent net over hundreds of steps.

## When it is fine

Spikes that clipping or Adam absorbs do no harm and are silent.
""",
    explains=("NAN_IN_FORWARD", "NAN_IN_BACKWARD", "LR_TOO_HIGH", "DEAD_UNITS", "SATURATED", "INPUT_IGNORED",
              "CLIP_ALWAYS_ON", "VANISHING"),
)  # fmt: skip
def exploding(run: Run) -> Iterator[Finding]:
    """Gradients that grow a hundredfold and do harm."""
    for optimizer in sorted({norms.optimizer for norms in run.of(Norms)}):
        losses = course(run, optimizer)
        samples = [norms for norms in run.of(Norms) if norms.optimizer == optimizer]
        jump = _jump(run, samples, losses)
        if jump is None or not (harm := _exploded(run, losses, jump)):
            continue
        backward = [one for one in run.of(Backward) if one.at <= jump.norms.at]
        largest = max(entries(run, jump.norms), key=lambda one: one.grad if math.isfinite(one.grad) else math.inf)
        yield Finding(
            message=f"The gradients explode: {jump.why} at step {jump.norms.number}, the largest in "
            f"{parameter_name(run, largest.parameter)}; {harm}.",
            place=Place(
                module=module_name(run, largest.parameter.root, largest.parameter.module),
                parameters=(parameter_name(run, largest.parameter),),
            ),
            fix=f"torch.nn.utils.clip_grad_norm_({model_name(run)}.parameters(), 1.0)  # between backward and step",
            cause="Products of many factors above 1: layers, time steps, or inputs and targets of thousands.",
            evidence={"norm_before": jump.before, "norm": jump.after, "step": jump.norms.number},
            step=jump.norms.step,
            at=backward[-1].at if backward else jump.norms.at,
        )


def _jump(run: Run, samples: list[Norms], losses: Course) -> _Jump | None:
    totals: list[float] = []
    end = lost(run, losses)
    rose = end is not None and loss_grew(losses, end)
    for norms in samples:
        found = list(entries(run, norms))
        if not found:
            continue
        total = math.hypot(*(one.grad for one in found))
        weights = math.hypot(*(one.weight for one in found))
        usual = median(totals) if len(totals) >= 3 else 0.0
        if not math.isfinite(total) and not rose and not any(one > 10 * usual > 0 for one in totals[-2:]):
            return None  # it did not grow: one operation or the data made it, which NAN_IN_BACKWARD or _FORWARD names
        far = not total <= weights or (ratio(run, norms) or 0.0) > FAR
        if usual > 1e-6 * weights and not total <= 100 * usual and far:
            return _Jump(norms, usual, total, f"their norm goes from {usual:.3g} to {total:.3g}")
        if not totals and weights > 0 and not total <= 100 * weights:
            return _Jump(norms, weights, total, f"their norm is {total:.3g}, that of the weights {weights:.3g},")
        totals.append(total)
    return None


def _exploded(run: Run, losses: Course, jump: _Jump) -> str:
    """What harm followed, in words."""
    end = lost(run, losses)
    after = losses.since(jump.norms.at)
    if end is not None and end.step >= jump.norms.step:
        near = end.step - jump.norms.step <= _SOON and not end.is_data
        return "then a number is not finite" if near or loss_grew(losses, end) else ""
    if after.finite and losses.finite and losses.first > 0 and losses.last > 3 * losses.first:
        return f"the loss goes from {losses.first:.3g} to {losses.last:.3g}"
    length = ratio(run, jump.norms)
    if length is not None and length > 0.3 and not losses.fell:
        return f"the step changes the weights by {length:.2g} of their length"
    return ""
