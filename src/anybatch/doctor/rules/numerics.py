"""Rules of the family numerics on gradients that vanish or explode; `units`, `writes`, `finite` hold the others."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from anybatch.doctor.rules.registry import rule
from anybatch.doctor.views.courses import Course, course
from anybatch.doctor.views.fading import faded
from anybatch.doctor.views.growing import loss_grew, lost
from anybatch.doctor.views.measures import FAR_TOO_LONG, SQUASHING, Entry, entries, model_name, module_name, ratio
from anybatch.doctor.views.naming import parameter_name
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


@rule("AB551", "VANISHING", "warning", explains=("INPUT_IGNORED", "LR_TOO_LOW", "LOSS_CONSTANT", "CANNOT_FIT_BATCH"))
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
    explains=(
        "NAN_IN_FORWARD",
        "NAN_IN_BACKWARD",
        "LR_TOO_HIGH",
        "DEAD_UNITS",
        "SATURATED",
        "INPUT_IGNORED",
        "CLIP_ALWAYS_ON",
        "VANISHING",
    ),
)
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
        far = not total <= weights or (ratio(run, norms) or 0.0) > FAR_TOO_LONG
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
