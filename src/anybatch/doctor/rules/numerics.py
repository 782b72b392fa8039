"""Rules of the family numerics: gradients that vanish or explode, units that are dead, numbers that are not finite."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from anybatch.doctor.rules.crashes import crashed
from anybatch.doctor.rules.registry import LEARNS_NOTHING, NOWHERE, Found, Limit, rule
from anybatch.doctor.views.courses import course
from anybatch.doctor.views.measures import FAR_TOO_LONG, SQUASHING, entries, latest, ratio, rounded
from anybatch.doctor.views.naming import near, parameter_name, qualified, root_variable
from anybatch.doctor.views.optimizing import OptimizerView, loss_grew, measured
from anybatch.records.events import Backward, Scaler, Stepped
from anybatch.records.lossfacts import LossCall, Probed, Walk
from anybatch.records.runs import Run, grouped
from anybatch.records.samples import Activations, ModuleSample, NonFinite, Norms

_REMEDIES = (
    "1. learning rate and warm-up; 2. clipping and decay; 3. normalisation: nn.LayerNorm or nn.BatchNorm1d between the "
    "layers; 4. residual connections: x = x + block(x); 5. activation: nn.ReLU() or nn.GELU(); 6. initialisation: "
    "nn.init.kaiming_normal_(layer.weight); 7. gated cells (LSTM, GRU); 8. pretraining"
)


@rule("AB551", "VANISHING", "warning", explains=(*LEARNS_NOTHING, "LR_TOO_LOW"), needs=(Norms,))
def vanishing(run: Run, *, squashings: float = Limit(4, "each shrinks it to a quarter at most")) -> Iterator[Found]:
    """Gradients that do not arrive at the first layers."""
    for one in measured(run):
        found = one.faded
        if found is None:
            continue
        (norms, chain), (_, gone), early = found.lost[0], found.lost[-1], found.early
        first, last = (parameter_name(run, chain[index].parameter) for index in (0, -1))
        count, squashing = _squashing(run)
        because, fix, model = "what happened before that step", _REMEDIES, root_variable(run, 0)
        if early:
            because = "the depth and the initialisation of the network"
            fix = f"In {model}: nn.LayerNorm between the layers, x = x + block(x), kaiming_normal_ for ReLU"
        if early and count >= squashings:
            because = f"{count} times {squashing}, each of which shrinks it"
            fix = (
                f"nn.{squashing}() -> nn.ReLU() in {model}, with nn.init.kaiming_normal_(layer.weight); or "
                "x = x + block(x) around the layers, or nn.LayerNorm between them"
            )
        shown = [*gone[: -1 : max(1, len(gone) // 8)], gone[-1]]
        yield Found(
            text=f"The gradient of {first} is {gone[0].grad:.2g}, that of {last} {gone[-1].grad:.2g}: it vanishes on "
            f"its way back{' from the first step on' if early else f', since step {norms.number}'}.",
            fix=fix,
            cause=f"It is lost through {because}.",
            since=norms,
            step=found.lost[min(2, len(found.lost) - 1)][0],
            parameters=(first,),
            module=(chain[0].parameter.root, chain[0].parameter.module),
            evidence={
                "gradients": {parameter_name(run, each.parameter): each.grad for each in shown},
                "first_over_last": gone[0].grad / gone[-1].grad if gone[-1].grad else 0.0,
                "update_ratio_first": gone[0].ratio, "loss_first": one.losses.first, "loss_last": one.losses.last,
            },
        )  # fmt: skip


def _squashing(run: Run) -> tuple[int, str]:
    """How many sigmoids, tanhs and the like lie between input and loss, and what the first is called."""
    found = [module.cls for root in run.roots.values() for module in root.modules if module.cls in SQUASHING]
    kinds = ("Sigmoid", "Tanh", "Softsign", "LogSigmoid")
    nodes = [(walk.kinds.get(f"{kind}Backward0", 0), kind) for walk in run.of(Walk) for kind in kinds]
    return max([(len(found), found[0] if found else ""), *nodes])


@dataclass(frozen=True, slots=True)
class _Jump:
    norms: Norms
    before: float
    after: float
    why: str


@rule(
    "AB552", "EXPLODING", "warning", needs=(Norms,),
    explains=("NAN_IN_FORWARD", "NAN_IN_BACKWARD", "LR_TOO_HIGH", "DEAD_UNITS", "SATURATED", "INPUT_IGNORED",
              "CLIP_ALWAYS_ON", "VANISHING"),
)  # fmt: skip
def exploding(
    run: Run, *, times: float = Limit(100, "the usual norm; a spike of ten is common"),
    soon: float = Limit(3, "steps after which a number that is not finite may still come of it"),
) -> Iterator[Found]:  # fmt: skip
    """Gradients that grow a hundredfold and do harm."""
    for one in measured(run):
        jump = _jump(one, times)
        if jump is None or not (harm := _exploded(one, jump, soon)):
            continue
        backward = [back for back in run.of(Backward) if back.at <= jump.norms.at]
        largest = max(
            entries(run, jump.norms), key=lambda each: each.grad if math.isfinite(each.grad) else math.inf
        ).parameter
        name = parameter_name(run, largest)
        yield Found(
            text=f"The gradients explode: {jump.why} at step {jump.norms.number}, the largest in {name}; {harm}.",
            fix=f"torch.nn.utils.clip_grad_norm_({root_variable(run, 0)}.parameters(), 1.0)  # between backward and "
            "step",
            cause="Products of many factors above 1: layers, time steps, or inputs and targets of thousands.",
            since=backward[-1] if backward else jump.norms,
            step=jump.norms,
            where=NOWHERE,
            parameters=(name,),
            module=(largest.root, largest.module),
            evidence={"norm_before": jump.before, "norm": jump.after, "step": jump.norms.number},
        )


def _jump(one: OptimizerView, times: float) -> _Jump | None:
    totals: list[float] = []
    end = one.lost
    rose = end is not None and loss_grew(one.run, one.number)
    for norms in one.samples:
        found = list(entries(one.run, norms))
        if not found:
            continue
        total, weights = math.hypot(*(each.grad for each in found)), math.hypot(*(each.weight for each in found))
        usual = median(totals) if len(totals) >= 3 else 0.0
        if not math.isfinite(total) and not rose and not any(each > 10 * usual > 0 for each in totals[-2:]):
            return None  # it did not grow: one operation or the data made it, which NAN_IN_BACKWARD or _FORWARD names
        far = not total <= weights or (ratio(one.run, norms) or 0.0) > FAR_TOO_LONG
        if usual > 1e-6 * weights and not total <= times * usual and far:
            return _Jump(norms, usual, total, f"their norm goes from {usual:.3g} to {total:.3g}")
        if not totals and weights > 0 and not total <= times * weights:
            return _Jump(norms, weights, total, f"their norm is {total:.3g}, that of the weights {weights:.3g},")
        totals.append(total)
    return None


def _exploded(one: OptimizerView, jump: _Jump, soon: float) -> str:
    """What harm followed, in words."""
    losses, end = one.losses, one.lost
    if end is not None and end.step >= jump.norms.step:
        near = end.step - jump.norms.step <= soon and not end.is_data
        return "then a number is not finite" if near or loss_grew(one.run, one.number) else ""
    if losses.since(jump.norms.at).finite and losses.first > 0 and losses.last > 3 * losses.first:
        return f"the loss goes from {losses.first:.3g} to {losses.last:.3g}"
    length = ratio(one.run, jump.norms)
    far = length is not None and length > 3 * FAR_TOO_LONG and not losses.fell
    return f"the step changes the weights by {length:.2g} of their length" if far else ""


@rule(
    "AB553", "DEAD_UNITS", "warning", needs=(Activations,),
    explains=(*LEARNS_NOTHING, "VANISHING", "LR_TOO_LOW", "GRAPH_CUT"),
)  # fmt: skip
def dead_units(
    run: Run, *, share: float = Limit(0.9, "of the units: half of them rest in a healthy layer"),
    samples: float = Limit(3, "one batch says little"),
) -> Iterator[Found]:  # fmt: skip
    """Layers most of whose units are always zero."""
    learned = course(run).fell or course(run).converged
    for root, taken in latest(run) if not learned else ():
        dead = [one for one in _units(taken[-1]) if one.always_dead > share and _is_hidden(one, taken[-1])]
        if len(taken) < samples or not dead:
            continue
        worst, name = dead[0], qualified(run, root, dead[0].module)
        same = (
            sample for sample in taken for one in _units(sample)
            if (one.module, one.cls) == (worst.module, worst.cls) and one.dead > share
        )  # fmt: skip
        begin = next(same, taken[-1])
        early = begin is taken[0]
        init = f"for layer in {root_variable(run, root)}.modules(): isinstance(layer, nn.Linear) and "
        yield Found(
            text=f"{worst.always_dead:.0%} of the units of {name} ({worst.cls}) are zero for every input"
            + (" from the first step on" if early else f" since step {begin.step}")
            + (f", and {len(dead) - 1} more layers too." if len(dead) > 1 else "."),
            fix=f"{init}nn.init.kaiming_normal_(layer.weight, nonlinearity='relu')"
            if early
            else "a lower learning rate with warm-up; then nn.LeakyReLU() or a normalisation before the activation",
            cause="Their inputs are never above zero, so they have no gradient and can't come back"
            + ("; the initialisation left them so." if early else "; an update that was too long drove them there."),
            since=begin,
            step=taken[min(2, len(taken) - 1)] if early else begin,
            module=name,
            evidence={"always_dead": {one.module: one.always_dead for one in dead[:8]}, "layers": len(dead)},
        )


def _last(of: Activations) -> int:
    return max((one.order for one in of.modules if one.module), default=-1)


def _is_hidden(sample: ModuleSample, of: Activations) -> bool:
    """An activation that is not the output of the model, and no dropout, embedding or container."""
    return sample.module != "" and sample.order < _last(of) and ("LU" in sample.cls or "Threshold" in sample.cls)


def _units(sample: Activations) -> list[ModuleSample]:
    """The activations of a forward: modules, and functions such as ``relu`` under the name of the module before."""
    before = {one.order: one for one in sample.modules}
    functional = [
        replace(before[one.order - 1], cls="ReLU", dead=one.input_dead or 0.0, always_dead=one.input_always_dead or 0.0)
        for one in sample.modules
        if one.input_by.startswith("Relu") and one.module and one.order - 1 in before
    ]
    return [*sample.modules, *functional]


@rule("AB554", "SATURATED", "warning", explains=(*LEARNS_NOTHING, "VANISHING", "LR_TOO_LOW"), needs=(Activations,))
def saturated(
    run: Run, *, share: float = Limit(0.9, "of the outputs: a gate has half of them there"),
    samples: float = Limit(3, "one batch says little"),
) -> Iterator[Found]:  # fmt: skip
    """Squashing activations at their limits."""
    learned = course(run).fell or course(run).converged
    for root, taken in latest(run) if not learned else ():
        full = grouped(
            (one.module, (sample, one))
            for sample in taken
            for one in sample.modules
            if (one.saturated or 0.0) > share and one.cls in SQUASHING and one.order < _last(sample)
        )
        found = [rows for rows in full.values() if len(rows) >= samples and rows[-1][0] is taken[-1]]
        if not found:
            continue
        (first, _), (_, last) = found[0][0], found[0][-1]
        name = qualified(run, root, last.module)
        yield Found(
            text=f"{last.saturated:.0%} of the outputs of {name} ({last.cls}) are at a limit"
            + (" from the first step on." if first is taken[0] else f" since step {first.step}."),
            fix="nn.LayerNorm before it, nn.init.xavier_uniform_(layer.weight), or nn.ReLU() in its place",
            cause="At a limit the slope is almost zero, and no gradient goes through.",
            since=first,
            step=found[0][min(2, len(found[0]) - 1)][0],
            module=name,
            evidence={"saturated": last.saturated, "layers": [rows[0][1].module for rows in found[:8]]},
        )


_REPAIRS = {
    "LogSoftmax": "leave a score that is finite in each row, and at each target: no mask may hide all of them",
    "Log1P": "torch.log1p(x.clamp_min(-1 + 1e-6)), or logsigmoid for 1 - sigmoid",
    "Log": "torch.log(x.clamp_min(1e-8)), or log_softmax / logsigmoid instead of the log of a softmax or sigmoid",
    "Sqrt": "torch.sqrt(x + 1e-8): the slope of the root is infinite at 0",
    "Div": "x / (y + 1e-8), or y.clamp_min(1e-8)",
    "Exp": "torch.logsumexp, or x.clamp_max(30) before exp",
    "Pow": "(x + 1e-8) ** p for p below 1",
    "Norm": "torch.sqrt((x * x).sum() + 1e-8): the slope of a norm is not defined at 0",
    "Softmax": "scores.masked_fill(mask & ~mask.all(-1, keepdim=True), -torch.inf): give softmax no row that is -inf "
    "everywhere",
    "Acos": "torch.acos(x.clamp(-1 + 1e-6, 1 - 1e-6))",
    "Asin": "torch.asin(x.clamp(-1 + 1e-6, 1 - 1e-6))",
    "Atan2": "torch.atan2(y, x + 1e-8)",
    "Rsqrt": "torch.rsqrt(x + 1e-8)",
    "Reciprocal": "1 / (x + 1e-8)",
    "Std": "x.std(dim, correction=0), or leave out batches of one",
    "Var": "x.var(dim, correction=0), or leave out batches of one",
    "Mean": "x.sum() / max(1, x.numel()), or leave out batches of which nothing is selected",
    "NllLoss": "F.cross_entropy(scores, y, reduction='sum') / (y != -100).sum().clamp_min(1)",
    "Native": "an eps above 0, such as 1e-5, in the norm layer",
}
"""What to write instead, by the name of the node that made the number."""

_ANOMALY = "with torch.autograd.set_detect_anomaly(True): ...  # around that step"


@rule("AB555", "NAN_IN_FORWARD", "error", explains=(*LEARNS_NOTHING, "NAN_IN_BACKWARD", "DEAD_UNITS"))
def nan_in_forward(run: Run) -> Iterator[Found]:
    """The first number that is not finite, if it is not a gradient's."""
    first = next((one for one in run.of(NonFinite) if one.where != "gradient" and _matters(run, one)), None)
    for bad in _lost_losses(run)[:1] if not any(True for _ in run.of(NonFinite)) else ():
        yield Found(
            text=f"The loss is {bad.value} at step {bad.step}.",
            fix=f"{_ANOMALY}, to see which operation made it",
            cause="From the loss it reaches all gradients and weights.",
            since=bad,
            evidence={"step": bad.step},
        )
    if first is None:
        return
    what = {
        "input": "The data", "parameter": f"The parameter {', '.join(first.parameters[:2]) or first.module}",
        "forward": f"The output of {first.module}" if first.module else "The loss" if first.loss is None
        else "A result on the path to the loss",
    }.get(first.where, first.where)  # fmt: skip
    by = f", {'noticed in' if first.where in ('input', 'parameter') else 'made by'} {_made(first)}" if first.op else ""
    made = (
        next(iter(run.answers("buffer not a number")), None)
        if first.where == "input" and first.step == first.late
        else None
    )
    if made is not None:
        yield _of_a_buffer(run, first, made)
        return
    shown = next(iter(run.answers("first nan")), None) if first.where == "input" else None
    if shown is not None:
        yield _of_data(run, first, shown)
        return
    yield _not_finite(
        run,
        first,
        text=f"{what} {'have' if first.where == 'input' else 'has'} the first {first.value} of the run, at step "
        f"{first.step - first.late}{by}",
        cause="No operation with a gradient produced it: inputs, targets or weights of the loss contained it, or it "
        "was computed from them, such as the standard deviation of a batch of one row. From the loss it reaches all "
        "gradients and weights."
        if first.where == "input"
        else "It passes through every later operation into the loss, and from there into all gradients and weights.",
        evidence={"where": first.where, "value": first.value} | ({"op": first.op} if first.op else {}),
    )


def _of_a_buffer(run: Run, bad: NonFinite, probed: Probed) -> Found:
    """A number that the model has had since it was made."""
    name, count = qualified(run, probed.root, str(probed.evidence["first"])), int(probed.evidence["names"]) - 1
    return Found(
        text=f"The buffer {name} has nan since before the first forward{f', and {count} more too' if count else ''}: "
        f"from there it comes into the first step{f' ({_made(bad)})' if bad.op else ''}.",
        fix=f"assert torch.isfinite({name}).all()  # after the line that computes it",
        cause="It is computed where the model is built, such as by the square root of a negative number.",
        since=bad,
        module=(probed.root, ""),
        evidence={"where": "buffer", "buffers": count + 1, "op": bad.op},
    )


def _of_data(run: Run, bad: NonFinite, shown: Probed) -> Found:
    """A number that an operation without a gradient made, which was seen when a step was run again."""
    seen = shown.evidence
    op, least = str(seen["op"]), float(seen["least"])
    given = "a divisor" if op == "div" else "inputs"
    repaired = _repair(run, replace(bad, where="forward", op=op.title().replace("_", "")))
    look = f"look first why its input goes down to {least:.4g}" if least < 0 else "look first why its input is such"
    step = bad.step - bad.late
    return Found(
        text=f"{op}{near(shown)} gives {seen['value']} in {seen['entries']:,} of {seen['of']:,} entries, for {given} "
        f"between {least:.4g} and {seen['most']:.4g}: from there it reaches the loss, first at step {step}.",
        fix=repaired if repaired == _ANOMALY else f"{repaired}; {look}",
        cause="No gradient passes through it: it is part of how inputs, targets or weights of the loss are prepared.",
        since=bad,
        step=step,
        where=(shown.file, shown.line),
        evidence={"where": "data", "op": op, "entries": seen["entries"], "least": least, "step": step},
    )


def _not_finite(run: Run, bad: NonFinite, text: str, cause: str, evidence: dict[str, Any]) -> Found:
    """What is found of a number, at the line of the operation where only one can be meant, else where it was seen."""
    step = bad.step - bad.late
    return Found(
        text=f"{text}{f': {bad.detail}' if bad.detail else ''}.",
        fix=_repair(run, bad),
        cause=cause,
        since=bad,
        step=step,
        where=(bad.made_in, bad.made_at[0]) if len(bad.made_at) == 1 else (bad.file, bad.line),
        parameters=bad.parameters,
        module=bad.module,
        evidence=evidence | {"step": step},
    )


def _made(bad: NonFinite) -> str:
    """What an operation is called, and its lines; the classes of the user keep their names."""
    op = bad.op.removesuffix("Backward") if bad.op.endswith("Backward") else bad.op.split("Backward")[0].lower()
    return op + (f" in line {' or '.join(map(str, bad.made_at))}" if bad.made_at else "")


def _matters(run: Run, bad: NonFinite) -> bool:
    """Whether it came into the loss or into a weight; ``-inf`` in a mask does not."""
    return bad.where == "parameter" or bad.loss is None or any(one.at > bad.at for one in _lost_losses(run))


def _lost_losses(run: Run) -> list[Backward]:
    return [one for one in run.of(Backward) if one.value is not None and not math.isfinite(one.value)]


def _repair(run: Run, bad: NonFinite) -> str:
    if bad.where == "input":
        return "assert torch.isfinite(x).all() in the data set, for targets too; leave such samples out, or nan_to_num"
    if bad.where == "parameter" and bad.detail:
        return "v.mul_(beta).addcmul_(p.grad, p.grad, value=1 - beta)  # squares, of which a root can be taken"
    if bad.where == "parameter":
        halves = any(one.dtype == "float16" for one in run.parameters.values())
        if halves and any(one.cls.startswith("Adam") for one in run.optimizers.values()):
            return "torch.autocast, with parameters in float32; in float16 the eps=1e-8 of Adam is 0, and 0 / 0 is nan"
        lr = max((max(one.lrs) for one in run.of(Stepped) if one.lrs and one.at <= bad.at), default=0.0)
        lower = f"a lower learning rate (lr={rounded(lr / 10):g}), " if lr else ""
        return f"{lower}torch.nn.utils.clip_grad_norm_({root_variable(run, 0)}.parameters(), 1.0) before the step"
    if "negative" in bad.detail and bad.op.startswith(("Sqrt", "Pow")):
        code = "torch.sqrt(x.clamp_min(1e-8))" if bad.op.startswith("Sqrt") else "x.clamp_min(1e-8) ** p"
        return f"{code}, and look why x is below 0"
    return next((text for name, text in _REPAIRS.items() if bad.op.startswith((name, f"Linalg{name}"))), _ANOMALY)


@rule("AB556", "NAN_IN_BACKWARD", "error", explains=(*LEARNS_NOTHING, "NAN_IN_FORWARD"))
def nan_in_backward(run: Run) -> Iterator[Found]:
    """The first gradient that is not finite, if the loss was."""
    crash = list(crashed(run, "NAN_IN_BACKWARD"))[:1]
    yield from crash
    bad = next(run.of(NonFinite), None)
    if crash or bad is None or bad.where != "gradient" or bad.loss is None or _went_on(run, bad):
        return
    by = f", made by the backward of {_made(bad)}" if bad.op else ""
    yield _not_finite(
        run,
        bad,
        text=f"A gradient{f' of {bad.parameters[0]}' if bad.parameters else ''} is {bad.value} at step "
        f"{bad.step - bad.late}, while the loss is {bad.loss:.4g}{by}",
        cause="The slope of an operation is infinite where its value is finite, such as sqrt at 0.",
        evidence={"value": bad.value, "op": bad.op, "loss": bad.loss},
    )


def _went_on(run: Run, bad: NonFinite) -> bool:
    """Whether a scaler looked after it, or the run went on with finite losses as if nothing had been."""
    scaled = any(one.scaled for one in run.of(Backward) if one.at <= bad.at) or any(True for _ in run.of(Scaler))
    later = sum(norms.at > bad.at for norms in run.of(Norms))
    losses = sum(one.at > bad.at and one.value is not None for one in run.of(LossCall))
    return (scaled or min(later, losses) >= 2) and not course(run).diverged
