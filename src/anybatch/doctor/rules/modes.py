"""Rules of the family modes: training and evaluation mode, dropout, and batch norms."""

from collections.abc import Iterator
from math import prod
from pathlib import PurePath

from anybatch.doctor.rules.answered import say
from anybatch.doctor.rules.registry import Found, Limit, rule
from anybatch.doctor.views.courses import course, updates
from anybatch.doctor.views.naming import Names, counted, module_code, near, qualified, root_variable, shared_path
from anybatch.doctor.views.outcomes import learned_well, outcome
from anybatch.doctor.views.windows import (
    ever_touched,
    forwards_by_root,
    parameters_by_root,
    passes,
    trained_forwards,
    written,
)  # fmt: skip
from anybatch.records.events import Backward, DropoutCall, Ended, Forward, Loaded, Stepped
from anybatch.records.lossfacts import Evaluated, LossCall, Replicas
from anybatch.records.runs import Run, grouped
from anybatch.records.samples import Activations, Buffers
from anybatch.records.tables import ModuleFacts

_TAUGHT = 20
"""Calls beside as many of another net: a teacher, and no evaluation."""


@rule("AB451", "EVAL_IN_TRAINING", "error", explains=("DROPOUT_NEVER_ON",))
def eval_in_training(run: Run, *, steps: float = Limit(3, "fewer may be the end of a run")) -> Iterator[Found]:
    """Models that are trained in evaluation mode since some step."""
    yield from say(run, "AB451")
    for root in run.roots:
        found = trained_forwards(run, root)
        drops, tail = _functional(run, root), list[Forward]()
        for one in reversed(found):
            turned = one.evaluated > found[0].evaluated and one.trained < found[0].trained
            if not turned and not (drops and found[0].training and not one.training):
                break
            tail.insert(0, one)
        if len(tail) < steps or sum(at > tail[0].at for at in updates(run)) < steps or _is_frozen(run, root, tail[0]):
            continue
        first, variable = tail[0], root_variable(run, root)
        held = _held(run, root, first, max((one.at for one in found if one.at < first.at), default=0))
        whole = not held and not any(one.training or one.trained for one in tail)
        student = _beside(run, root, tail) if whole else ""
        if student:
            yield _as_target(run, root, student, tail)
            continue
        before = next((one for one in reversed(list(run.of(Forward))) if one.root == root and one.at < first.at), first)
        what = Names(first.evaluating or drops)
        yield Found(
            text=f"Since step {first.step} {variable} is trained in evaluation mode{near(first)}: "
            f"{what} {what:was|were} in training mode before.",
            fix=f"{variable}.train()  # at the start of each epoch, after evaluation{near(before)}",
            cause=f"{variable}.eval() was called for an evaluation, and {variable}.train() was not called after it.",
            since=first,
            step=tail[min(2, len(tail) - 1)],
            module=(root, ""),
            evidence={"steps": len(tail), "evaluating": list(first.evaluating), "since": first.step},
            severity="" if whole else "info",
        )


def _functional(run: Run, root: int) -> list[str]:
    """The first functional dropout that followed the mode of a model, with its line."""
    calls = [one for one in run.of(DropoutCall) if one.root == root and one.training and one.root_training]
    return [f"F.{one.function}{near(one)}" for one in calls[:1]]


def _is_frozen(run: Run, root: int, first: Forward) -> bool:
    """Whether what is in evaluation mode from there on has parameters, and these had gradients before and no more."""
    own = {number for number, one in run.parameters.items() if one.root == root and one.module in first.evaluating}
    touched = [one.fact.at > first.at for one in passes(run) if one.touched and one.touched & own]
    return bool(touched) and not any(touched)


def _held(run: Run, root: int, first: Forward, last: int) -> bool:
    """Whether it was frozen in evaluation mode for long before it was trained so: the mode is meant to stay."""
    frozen = [one for one in forwards_by_root(run)[root] if last < one.at < first.at]
    begun = next((one.at for one in frozen if one.evaluated >= first.evaluated and not one.training), first.at)
    return sum(begun < at < first.at for at in updates(run)) >= _TAUGHT


def _beside(run: Run, root: int, tail: list[Forward]) -> str:
    """A model in training mode that is trained beside one in evaluation mode, and was not before; empty without."""
    before = max((one.at for one in trained_forwards(run, root) if one.at < tail[0].at), default=0)
    for other in run.roots.keys() - {root}:
        found = trained_forwards(run, other)
        if len(found) * 2 > len(tail) and found[0].at > before and all(one.training for one in found):
            return root_variable(run, other)
    return ""


def _as_target(run: Run, root: int, student: str, tail: list[Forward]) -> Found:
    """A teacher that the optimizer of its student has: it is no evaluation that was forgotten."""
    first, teacher = tail[0], root_variable(run, root)
    target = any(one.target_requires_grad and one.at > first.at for one in run.of(LossCall))
    use = "and is the target of a loss" if target else "which looks like a fixed target"
    return Found(
        text=f"Since step {first.step} {teacher} is in evaluation mode beside {student}{near(first)} {use}, and yet it "
        "is trained: an optimizer has it.",
        fix=f"with torch.no_grad(): around the call of {teacher}{near(first)}, and only {student}.parameters() in the "
        "optimizer",
        cause=f"A trained target moves toward the model that should learn from it; if {teacher} is to be trained, "
        f"{teacher}.train() belongs before it.",
        since=first,
        step=tail[min(2, len(tail) - 1)],
        module=(root, ""),
        evidence={"steps": len(tail), "evaluating": list(first.evaluating), "since": first.step, "beside": student},
        severity="" if target else "warning",
    )


@rule("AB452", "TRAIN_IN_EVAL", "warning", explains=("DROPOUT_ALWAYS_ON",))
def train_in_eval(
    run: Run, *, calls: float = Limit(3, "in a row, or evaluations: fewer may be looks at a sample"),
    share: float = Limit(1 / 3, "evaluations for each step, and more belong to the training"),
) -> Iterator[Found]:  # fmt: skip
    """Evaluations in training mode."""
    for root, facts in run.roots.items():
        yield from _teaches_noisily(run, root, calls)
        rows = _evaluations(run, root)
        if not trained_forwards(run, root) or not updates(run) or not rows or len(rows) > share * len(updates(run)):
            continue
        long = [one for one in rows if len(one) >= calls]
        if not (long or len(rows) >= calls) or any(
            one.root == root and int(one.evidence["calls"]) >= calls for one in run.answers("drawn again")
        ):
            continue
        one, variable = (long or rows)[0][0], root_variable(run, root)
        count = sum(map(len, rows))
        own = [
            module.name
            for module in facts.modules
            if module.kind in ("dropout", "batch_norm") and module.name not in one.evaluating
        ]
        names = Names(own or _functional(run, root))
        yield Found(
            text=f"{variable} is called without gradient in training mode{near(one)}, {counted(count, 'time')}: "
            f"{names} {names:is|are} active in evaluation.",
            fix=f"{variable}.eval()  # before evaluation{near(one)}, and {variable}.train() after it",
            cause=f"{variable} is in training mode while it is evaluated.",
            since=one,
            module=(root, ""),
            evidence={"calls": count, "evaluations": len(rows), "active": one.trained},
        )


def _teaches_noisily(run: Run, root: int, calls: float) -> Iterator[Found]:
    """A net that was trained, and is then called in training mode beside another one that is trained."""
    mine = forwards_by_root(run).get(root, [])
    last = max((one.at for one in mine if one.grad), default=run.facts[-1].at)
    after = [one for one in mine if one.at > last and one.training and one.trained]
    if len(after) < _TAUGHT:
        return
    others = [one for one in run.of(Forward) if one.root != root and one.at > last and one.grad and one.training]
    steps = sum(at > last for at in updates(run))
    drawn = any(one.root == root and int(one.evidence["calls"]) >= calls for one in run.answers("drawn again"))
    drifts = any(one.root == root and one.at > last and one.frozen for one in run.of(Buffers))  # FROZEN_BN_DRIFT's
    if len(others) < _TAUGHT or len(after) > 1.2 * steps or drawn or drifts:
        return
    variable = root_variable(run, root)
    yield Found(
        text=f"{variable} is trained no more since step {after[0].step}, and is called in training mode"
        f"{near(after[0])} beside {root_variable(run, others[0].root)}: dropout and batch statistics are active, so "
        "its output for a sample depends on chance and on the rest of the batch.",
        fix=f"{variable}.eval()  # before training{near(others[0])}",
        cause=f"{variable} is still in the mode of its own training.",
        since=after[0],
        step=after[2],
        module=(root, ""),
        evidence={"calls": len(after), "beside": root_variable(run, others[0].root)},
    )


def _evaluations(run: Run, root: int) -> list[list[Forward]]:
    """Rows of forwards of a root without gradient and in training mode, after its training has begun."""
    found: list[list[Forward]] = [[]]
    begun = False
    if all(one.grad or not one.training for one in forwards_by_root(run).get(root, ())):
        return []
    drops = bool(_functional(run, root))
    for one in run.of(Stepped, Backward, Forward):
        if isinstance(one, Forward) and one.root != root:
            continue
        if isinstance(one, Forward) and not one.grad and one.training and (one.trained or drops):
            found[-1].append(one)
            continue
        if found[-1]:
            found = [*found, []] if begun else [[]]
        begun = begun or isinstance(one, Stepped)
    return [row for row in found if row and begun]


def _drops(run: Run, *, training: bool) -> list[list[DropoutCall]]:
    """Calls of functions that drop, or don't, against the mode of their module, by line."""
    found = grouped(
        ((one.root, one.module, one.file, one.line), one)
        for one in run.of(DropoutCall)
        if one.training is training and one.root_training is not training and one.p > 0
    )
    return list(found.values())


def _told(run: Run, calls: list[DropoutCall], what: str, cause: str, evidence: dict[str, str], step: int) -> Found:
    one, name = calls[0], qualified(run, calls[0].root, calls[0].module)
    line = f"  # in line {one.line} of {PurePath(one.file).name}" if one.file else ""
    return Found(
        text=f"{one.function} (p={one.p:g}) in {name}{near(one)} {what}.",
        fix=f"F.{one.function}(x, {one.p:g}, training=self.training){line}",
        cause=cause,
        since=one,
        step=calls[step],
        module=name,
        evidence={"p": one.p, "calls": len(calls)} | evidence,
    )


@rule("AB453", "DROPOUT_ALWAYS_ON", "warning", explains=("TRAIN_IN_EVAL",), needs=(DropoutCall,))
def dropout_always_on(run: Run) -> Iterator[Found]:
    """Functions that drop in evaluation mode."""
    why = "The functional form does not know the module's mode; it has to be passed."
    for calls in _drops(run, training=True):
        yield _told(run, calls, "drops in evaluation mode as well", why, {"function": calls[0].function}, 0)


@rule("AB454", "DROPOUT_NEVER_ON", "warning")
def dropout_never_on(run: Run, *, forwards: float = Limit(5, "fewer may be a look at a sample")) -> Iterator[Found]:
    """Dropouts that never drop in training."""
    for root, facts in run.roots.items():
        found, variable = trained_forwards(run, root), root_variable(run, root)
        drops = Names(one.name for one in facts.modules if one.kind == "dropout" and _p(one) > 0)
        if min(len(found), len(updates(run))) < forwards or not drops or any(f.training or f.trained for f in found):
            continue
        loaded = any(one.into == "module" and one.number == root for one in run.of(Loaded))
        yield Found(
            text=f"{variable} is in evaluation mode in all {counted(len(found), 'forward')} that are trained on"
            f"{near(found[0])}: {drops} never {drops:drops|drop}.",
            fix=f"{variable}.train()  # before the loop",
            cause=f"{variable}.train() was not called"
            + (" after loading." if loaded else ", or eval() was called before the loop."),
            since=found[0],
            step=found[min(4, len(found) - 1)],
            module=(root, ""),
            evidence={"forwards": len(found), "dropouts": len(drops)},
        )
    for calls in _drops(run, training=False):
        if len(calls) >= 3:
            yield _told(run, calls, "does not drop in training mode", "It is called with training=False.", {}, 2)


def _p(module: ModuleFacts) -> float:
    return float(module.options.get("p") or 0)


@rule("AB458", "DROPOUT_TOO_HIGH", "warning", explains=("LR_TOO_LOW", "CANNOT_FIT_BATCH"))
def dropout_too_high(
    run: Run, *, most: float = Limit(0.8, "half is the usual most: Srivastava et al., 2014, A.4 keeps 0.5 to 0.8"),
    steps: float = Limit(20, "a loss may take so many to begin to fall"),
) -> Iterator[Found]:  # fmt: skip
    """Dropouts that leave next to nothing."""
    went = course(run)
    for root, facts in run.roots.items() if len(went.finite) >= steps and not (went.fell or went.diverged) else ():
        high = {one.name: _p(one) for one in facts.modules if one.kind == "dropout" and most <= _p(one) < 1}
        found = trained_forwards(run, root)
        if not high or not found or not all(one.training for one in found):
            continue
        names, p = Names(qualified(run, root, one) for one in high), max(high.values())
        yield Found(
            text=f"{names} {names:drops|drop} {p:.0%} of what goes in, and the loss does not fall ({went.first:.4g} at "
            f"first, {went.last:.4g} at last).",
            fix=f"nn.Dropout(p={round(1 - p, 6):g})  # p is the share that is dropped",
            cause="So little of a sample is left that outputs are mostly noise.",
            since=found[0],
            module=names[0],
            evidence={"p": p, "dropouts": len(names), "loss_first": went.first, "loss_last": went.last},
        )


@rule("AB455", "FROZEN_BN_DRIFT", "warning", needs=(Buffers,))
def frozen_bn_drift(run: Run, *, samples: float = Limit(2, "once may be before it was frozen")) -> Iterator[Found]:
    """Running statistics of frozen norms that follow the data."""
    for root, facts in run.roots.items():
        own = {one.name: one.parameters for one in facts.modules}
        seen = [one for one in run.of(Buffers) if one.root == root and one.frozen]
        begin = seen[0].at if seen else 0  # it may have been trained before it was frozen, as a teacher is
        late = [one.touched for one in passes(run) if one.touched is not None and one.fact.at > begin]
        touched, ever = frozenset().union(*late), ever_touched(run)
        moving = [
            name
            for sample in seen
            for name in sample.frozen
            if own.get(name) and (touched | written(run)).isdisjoint(own[name]) and not _copied(run, root)
        ]
        # the first sample may show what moved before it was frozen
        times = {name: moving.count(name) - (not ever.isdisjoint(own[name])) for name in dict.fromkeys(moving)}
        names = [name for name, count in times.items()
                 if count >= max(1, min(samples, len(seen) - (not ever.isdisjoint(own[name]))))]  # fmt: skip
        most = max(times.values(), default=0)
        if not names or not updates(run):
            continue
        if all(_behind_trained(run, root, name, touched) for name in names):
            continue
        parent, shown = _above(names), Names(qualified(run, root, one) for one in names)
        variable = root_variable(run, root)
        yield Found(
            text=f"The running statistics of {shown} change although {shown:its|their} parameters are frozen.",
            fix=f"{module_code(run, root, parent)}.eval()  # after each {variable}.train()"
            if parent
            else f"for m in {variable}.modules(): m.eval() if isinstance(m, nn.BatchNorm2d) else None",
            cause="requires_grad_(False) does not stop running statistics; only evaluation mode does.",
            since=seen[0],
            where=next((one for one in run.of(Forward) if one.root == root and one.training), None),
            parameters=[number for name in names for number in own[name]],
            module=(root, parent),
            evidence={"modules": len(names), "samples": most},
        )


def _above(names: list[str]) -> str:
    """The module itself, or the innermost one above several."""
    return names[0] if len(names) == 1 else shared_path(name.rpartition(".")[0] for name in names)


def _behind_trained(run: Run, root: int, name: str, touched: frozenset[int]) -> bool:
    """Whether a layer that is trained runs before a norm, whose statistics then have to follow it."""
    order = {sample.module: sample.order for one in run.of(Activations) if one.root == root for sample in one.modules}
    last = order.get(name, -1)
    return any(order.get(one.name, last) < last and touched & {*one.parameters} for one in run.roots[root].modules)


def _copied(run: Run, root: int) -> bool:
    """Whether most parameters of a root are written by the user's code, as those of a target network."""
    own = [one.parameter for one in parameters_by_root(run).get(root, ()) if not one.requires_grad]
    return bool(own) and sum(number in written(run) for number in own) * 2 > len(own)


@rule("AB456", "BN_TINY_BATCH", "warning", needs=(Activations,))
def bn_tiny_batch(
    run: Run, *, fewest: float = Limit(4, "below, the variance of a batch is off by 100 % and more: sqrt(2 / (n - 1))"),
    samples: float = Limit(3, "one small batch may be the end of an epoch"),
) -> Iterator[Found]:  # fmt: skip
    """Batch norms with too little to average."""
    spread = any(one.world > 1 for one in run.of(Replicas))
    norms = {(root, m.name) for root, facts in run.roots.items() for m in facts.modules if m.kind == "batch_norm"}
    counts: dict[tuple[int, str], list[tuple[Activations, int]]] = {}
    for one in run.of(Activations):
        for sample in one.modules:
            shape = sample.input_shape or sample.shape
            is_trained = (one.root, sample.module) in norms and sample.training and len(shape) >= 2
            if is_trained and not (spread and "Sync" in sample.cls):
                counts.setdefault((one.root, sample.module), []).append((one, shape[0] * prod(shape[2:])))
    by_root = grouped(
        (root, name)
        for (root, name), found in counts.items()
        if len(found) >= samples and sum(count < fewest for _, count in found) * 2 > len(found)
    )
    for root, tiny in by_root.items():
        names, found = Names(tiny), counts[root, tiny[0]]
        first, count = next(entry for entry in found if entry[1] < fewest)
        call = next((one for one in run.of(Forward) if one.at == first.forward), None)
        yield Found(
            text=f"{names} {names:averages|average} over {counted(count, 'value')} per channel{near(call)}.",
            fix=f"{module_code(run, root, tiny[0])} = nn.GroupNorm(groups, channels)  # or a larger batch",
            cause="The batch is too small for statistics of it.",
            since=first,
            step=found[min(2, len(found) - 1)][0],
            where=call,
            module=(root, tiny[0]),
            evidence={"values": [number for _, number in found[:10]], "modules": len(names)},
        )


def _left(run: Run, root: int, momentum: float) -> float:
    """The share of running statistics that a training has left as it was when they are used; 0 where they are not.

    During a run it is not known yet.
    """
    calls = [one for one in run.of(Forward) if one.root == root]
    used = next((one for one in reversed(calls) if not one.training and not one.grad), None)
    batches = sum(one.training and one.grad and used is not None and one.at < used.at for one in calls)
    loaded = any(one.into == "module" for one in run.of(Loaded))
    ended = any(True for _ in run.of(Ended))
    return float((1 - momentum) ** batches) if batches >= 20 and momentum >= 0 and ended and not loaded else 0.0


@rule("AB457", "BN_MOMENTUM", "warning", slows=True)
def bn_momentum(
    run: Run, *, most: float = Limit(0.9, "torch's is the share of the last batch; others give that of what was there"),
    first: float = Limit(0.3, "of the running statistics are still what they were before the training"),
    worse: float = Limit(5, "times the loss of the training at the end, in the last evaluation"),
) -> Iterator[Found]:  # fmt: skip
    """Batch norms that keep nearly nothing of what they have seen, or take nearly nothing of it."""
    end = outcome(run)
    losses = [one.value for one in run.of(Evaluated) if end.call is not None and one.function == end.call.function]
    is_known = learned_well(run) and bool(losses)
    is_worse = is_known and losses[-1] > max(worse * end.last, end.guess / worse)
    for root, facts in run.roots.items():
        found = [
            (one.name, value) for one in facts.modules
            if one.kind == "batch_norm" and one.options.get("track_running_stats", True)
            and isinstance(value := one.options.get("momentum"), (int, float))
            # a good evaluation shows that the statistics of the start will do, or that they were set by hand
            and (most <= value < 1 or (_left(run, root, value) > first and (is_worse or not is_known)))
        ]  # fmt: skip
        called = forwards_by_root(run).get(root, ()) if found else ()
        call = next((one for one in called if one.trained and one.grad), None)
        if call is None:
            continue
        names, (norm, value) = Names(qualified(run, root, name) for name, _ in found), found[0]
        what = f"only {1 - value:.2g} is kept at each batch"
        if value < most:
            what = f"{_left(run, root, value):.0%} still has its initial value (0 and 1, unless set by hand)"
            what += ", and evaluation uses it"
        yield Found(
            text=f"{names} {names:has|have} momentum={value:g}: of the running statistics {what}.",
            fix=f"{module_code(run, root, norm)}.momentum = {round(1 - value, 6) if value >= most else 0.1:g}",
            cause="torch's momentum is the share of the new batch; elsewhere it is that of what was there before.",
            since=call,
            module=_above(list(names)),
            evidence={"momentum": value, "modules": len(names)},
            severity="error"
            if value < most or is_worse
            else "",  # a training that goes well does not help the evaluation
        )
