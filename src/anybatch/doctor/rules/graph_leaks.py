"""Rules of the family graph: gradient that arrives where it should not."""

from bisect import bisect
from collections import Counter
from collections.abc import Iterator

from anybatch.doctor.rules.naming import (
    at_line,
    listed,
    names_of,
    optimizer_variable,
    place_of,
    qualified,
    root_variable,
)
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import Pass, Window, by_closure, ever_touched, members, stepping, windows_of
from anybatch.records.events import Backward, Forward, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import LossCall, Walk
from anybatch.records.runs import Run

_REGRESSIONS = frozenset({"mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss"})


@rule("AB206", "LEAK_TO_OTHER_NET", "warning", explains=("EXPLODING", "LOSS_SIGN"))
def _leak_to_other_net(run: Run) -> Iterator[Finding]:
    found = list(_advantages(run)) or list(_between_optimizers(run))
    yield from found
    if not found:
        yield from _targets(run)


def _advantages(run: Run) -> Iterator[Finding]:
    trained = frozenset().union(*members(run).values())
    walks = [
        (one, frozenset(side) & trained) for one in run.of(Walk) for side in one.advantages if frozenset(side) & trained
    ]
    if len(walks) < 2:
        return
    walk, side = walks[0]
    after = next((one for one in run.of(Backward) if one.at >= walk.at), None)
    names = names_of(run, side)
    yield Finding(
        message=f"The advantage that weights the log-probabilities carries a gradient: the policy loss also trains "
        f"{listed(names)}.",
        place=place_of(run, side, file=after.file if after else "", line=after.line if after else 0),
        fix="policy_loss = -(log_prob * advantage.detach()).mean()",
        cause="The difference of returns and values still has its graph when it is multiplied with log-probabilities.",
        evidence={"parameters": len(names), "times": len(walks)},
        step=walk.step,
        at=walk.at,
    )


class _Seen:
    """Walks and losses by step, and steps in order, so that each is looked up once."""

    def __init__(self, run: Run) -> None:
        self.walks: dict[int, list[Walk]] = {}
        self.calls: dict[int, list[LossCall]] = {}
        for walk in run.of(Walk):
            self.walks.setdefault(walk.step, []).append(walk)
        for call in run.of(LossCall):
            self.calls.setdefault(call.step, []).append(call)
        self.steps = list(run.of(Stepped))
        self.stepped = [one.at for one in self.steps]


def _between_optimizers(run: Run) -> Iterator[Finding]:
    every = members(run)
    numbers = stepping(run)
    seen = _Seen(run)
    for owner in numbers:
        own = every.get(owner, frozenset())
        leaks: list[tuple[Window, Pass, int]] = []
        for one in windows_of(run, owner):
            if one.step is not None and not by_closure(run, one):
                leak = _leak(seen, one, own, every)
                if leak is not None:
                    leaks.append((one, *leak))
        if len(leaks) >= 3:
            yield _leaked(run, owner, leaks)


def _leak(
    seen: _Seen, window: Window, own: frozenset[int], every: dict[int, frozenset[int]]
) -> tuple[Pass, int] | None:
    """A backward in a window that belongs to another optimizer and whose gradient this one's step still used."""
    if window.step is None or len(window.used) < 2:
        return None
    last = window.used[-1]
    for one in window.used[:-1]:
        if one.touched is None or last.touched is None or one.spot == last.spot:
            continue
        both = one.touched & own
        others = [number for number, held in every.items() if held & one.touched and not held & own]
        if not others or len(both) * 10 < 9 * len(last.touched & own) or last.touched - own:
            continue
        begin, end = bisect(seen.stepped, one.fact.at), bisect(seen.stepped, last.fact.at)
        between = [step for step in seen.steps[begin:end] if step.optimizer in others]
        if between or (_regresses(seen, last) and _weights_logs(seen, one)):
            return one, others[0]
    return None


def _same(value: float | None, other: float | None) -> bool:
    return value is not None and other is not None and abs(value - other) <= 1e-4 * max(abs(value), abs(other), 1e-12)


def _kinds(seen: _Seen, one: Pass) -> frozenset[str]:
    """The kinds of nodes of the graph that a backward went through; empty where it was not looked at."""
    near = next((walk for walk in seen.walks.get(one.fact.step, ()) if one.fact.at - 2 <= walk.at < one.fact.at), None)
    return frozenset(near.kinds) if near is not None else frozenset()


def _regresses(seen: _Seen, one: Pass) -> bool:
    """Whether a backward was called on a regression: a loss function of torch, or squares and their mean."""
    for call in seen.calls.get(one.fact.step, ()):
        if call.at < one.fact.at and call.function in _REGRESSIONS:
            value, factor = one.fact.value, one.fact.factor or 1.0
            if _same(value, call.value) or (value is not None and _same(value / factor, call.value)):
                return True
    return any(kind.startswith(("Pow", "MseLoss", "SmoothL1", "Huber", "Abs")) for kind in _kinds(seen, one))


def _weights_logs(seen: _Seen, one: Pass) -> bool:
    """Whether a backward was called on products with logarithms of probabilities, and on no loss function of torch."""
    kinds = _kinds(seen, one)
    losses = any(kind.startswith(("NllLoss", "MseLoss", "SmoothL1", "Huber", "BinaryCross", "KlDiv")) for kind in kinds)
    logs = any(kind.startswith(("LogSoftmax", "Logsumexp", "Log")) for kind in kinds)
    return logs and any(kind.startswith("Mul") for kind in kinds) and not losses


def _leaked(run: Run, owner: int, seen: list[tuple[Window, Pass, int]]) -> Finding:
    window, leak, other = seen[0]
    own = members(run)[owner]
    reached = (leak.touched or frozenset()) & own
    names = names_of(run, reached)
    mine, theirs = optimizer_variable(run, owner), optimizer_variable(run, other)
    file, line = leak.spot
    root = root_variable(run, run.parameters[min(reached)].root)
    return Finding(
        message=f"The backward{at_line(file, line)} of the loss that {theirs} minimises also puts gradient on "
        f"{listed(names)}, and {mine} steps with it.",
        place=place_of(run, reached, optimizer=owner, file=file, line=line),
        fix=f"detach what {root} gives before it enters this loss, or call {mine}.zero_grad() in front of the "
        f"backward of its own loss",
        cause=f"The gradient of another loss is still there when {mine} steps: nothing detached or cleared it.",
        evidence={"parameters": len(names), "steps": len(seen)},
        step=window.step.number if window.step is not None else 0,
        at=leak.fact.at,
    )


def _targets(run: Run) -> Iterator[Finding]:
    touched = ever_touched(run)
    trained = touched & frozenset().union(*members(run).values())
    twins = _twins(run, trained)
    found: dict[tuple[str, int], list[tuple[LossCall, int]]] = {}
    total: Counter[tuple[str, int]] = Counter()
    calls: Counter[int] = Counter()
    for one in run.facts:
        if isinstance(one, Backward):
            calls.clear()
        elif isinstance(one, Forward):
            calls[one.root] += one.grad
        elif isinstance(one, LossCall):
            total[one.file, one.line] += 1
            if one.function in _REGRESSIONS and one.target_requires_grad and _computed(one):
                other = next((twin for twin in twins.get(one.root, ()) if calls[twin]), -1)
                if calls[one.root] >= 2 or (calls[one.root] and other >= 0):
                    found.setdefault((one.file, one.line), []).append((one, other if calls[one.root] < 2 else -1))
    for spot, bad in found.items():
        if len(bad) >= 3 and touched:
            yield _moving_target(run, bad, total[spot], touched if bad[0][1] < 0 else trained)


def _twins(run: Run, trained: frozenset[int]) -> dict[int, list[int]]:
    """For each root that an optimizer trains the others that are built alike and trained as well."""
    built: dict[tuple[object, ...], list[int]] = {}
    for number, root in run.roots.items():
        own = [one for one in run.parameters.values() if one.root == number and one.registered]
        if any(one.parameter in trained for one in own):
            modules = tuple((one.name, one.cls) for one in root.modules)
            built.setdefault((root.cls, modules, tuple(one.shape for one in own)), []).append(number)
    return {one: [other for other in alike if other != one] for alike in built.values() for one in alike}


def _moving_target(run: Run, bad: list[tuple[LossCall, int]], total: int, reached: frozenset[int]) -> Finding:
    call, other = bad[0]
    variable = root_variable(run, call.root)
    nets = [call.root] if other < 0 else sorted((call.root, other))
    names = " or ".join(root_variable(run, one) for one in nets)
    own = [number for number in reached if number in run.parameters and run.parameters[number].root in nets]
    both = "" if other < 0 else "both of "
    return Finding(
        message=f"The target of {call.function}{at_line(call.file, call.line)} is computed from {names}, "
        f"{both}which {'are' if both else 'is'} trained, and carries a gradient.",
        place=Place(
            module=qualified(run, call.root, ""), parameters=names_of(run, own), file=call.file, line=call.line
        ),
        fix="target = target.detach()  # detach() gives a new tensor and leaves the old one as it is"
        if not both
        else "with torch.no_grad(): ...  # around the target, and leave the network that computes it out of the "
        "optimizer",
        cause=f"The loss also moves the targets towards the predictions, since {variable} computes both."
        if not both
        else "The loss also moves the targets towards the predictions, since the copy that computes them is trained.",
        evidence={"calls": total, "target_shape": list(call.target_shape), "function": call.function},
        step=bad[2][0].step,
        at=call.at,
    )


def _computed(call: LossCall) -> bool:
    """Whether a target is arithmetic on what a network gave, such as ``reward + gamma * value``."""
    if call.target_top:
        sums = any(kind.startswith(("Add", "Sub", "Rsub")) for kind in call.target_top[:3])
        return sums and any(kind.startswith("Mul") for kind in call.target_top[:4])
    shape = call.target_shape
    return len(shape) == 1 or (len(shape) == 2 and shape[-1] == 1)
