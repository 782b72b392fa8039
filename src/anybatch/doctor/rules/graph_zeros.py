"""Gradients that come and are exactly zero, since an operation on the way has no other."""

from collections.abc import Iterator

from anybatch.doctor.rules.naming import counted, listed, names_of, place_of, root_variable, verb
from anybatch.doctor.rules.windows import members, passes
from anybatch.records.events import Backward
from anybatch.records.findings import Finding
from anybatch.records.lossfacts import Walk
from anybatch.records.runs import Run
from anybatch.records.samples import Norms

_STEPS = {
    "Round": "round", "Floor": "floor", "Ceil": "ceil", "Trunc": "trunc", "Sign": "sign", "Bernoulli": "bernoulli",
    "Normal": "normal", "Heaviside": "heaviside",
}  # fmt: skip
"""Operations whose gradient is zero everywhere, by the beginning of the names of their nodes."""

_LEAST = 5  # samples


def stepwise(kind: str) -> str:
    """The operation of a node whose gradient is zero everywhere; empty for other nodes.

    Args:
        kind: the name of a node.

    Example:
        >>> stepwise("RoundBackward0"), stepwise("AddmmBackward0")
        ('round', '')
    """
    return _STEPS.get(kind.partition("Backward")[0], "")


def zero_gradients(run: Run) -> Iterator[Finding]:
    """Parameters whose gradient is exactly zero in all samples, where such an operation is in the graph.

    Args:
        run: the facts.
    """
    walks = [one for one in run.of(Walk) if one.nodes]
    found = [{op for kind in one.kinds if (op := stepwise(kind))} for one in walks]
    ops = sorted(found[0].intersection(*found)) if found else []
    seen: dict[int, list[float]] = {}
    for norms in run.of(Norms):
        for number, grad in zip(norms.parameters, norms.grad, strict=False):
            if grad is not None:
                seen.setdefault(number, []).append(grad)
    optimized = frozenset().union(*members(run).values())
    zero = [one for one, grads in seen.items() if one in optimized and len(grads) >= _LEAST and not any(grads)]
    others = [one for one, grads in seen.items() if one in optimized and all(grads)]
    if not ops or not zero or not (others or len(zero) == len(seen)):
        return
    back = next((one for one in run.of(Backward) if one.function == "backward"), None)
    if back is None:
        return
    names, op = names_of(run, zero), ops[0]
    root = run.parameters[min(zero)].root
    yield Finding(
        message=f"The {verb(len(names), 'gradient', 'gradients')} of {listed(names)} {verb(len(names), 'is', 'are')} "
        f"exactly zero in all {counted(len(seen[zero[0]]), 'sample')}: {op} is on the way to the loss, and its "
        "gradient is zero everywhere.",
        place=place_of(run, zero, file=back.file, line=back.line),
        fix=f"y = x + ({op}(x) - x).detach()  # straight through; or a relaxation of {op} with a gradient",
        cause=f"{op} gives steps: the loss does not change with what goes into it, so that nothing before it in "
        f"{root_variable(run, root)} is trained.",
        evidence={"parameters": len(names), "op": op, "backwards": len(passes(run))},
        step=back.step,
        at=back.at,
    )
