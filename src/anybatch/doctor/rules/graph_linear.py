"""Rules of the family graph: layers that follow each other with nothing between them."""

from collections.abc import Iterator, Sequence

from anybatch.doctor.rules.naming import listed, module_code, qualified, root_variable
from anybatch.doctor.rules.registry import rule
from anybatch.records.events import Backward, Forward
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import Walk
from anybatch.records.runs import Run


@rule("AB208", "NO_ACTIVATION", "warning", explains=("CANNOT_FIT_BATCH", "LR_TOO_LOW"))
def _no_activation(run: Run) -> Iterator[Finding]:
    walks = [one for one in run.of(Walk) if one.nodes]
    folded = [[one for one in walk.linear if one[1] >= min(one[0], one[2]) > 0] for walk in walks]
    if not folded or len(walks) < min(3, max(run.steps, 2)) or not all(folded) or any(one.cut_short for one in walks):
        return
    layers = list(dict.fromkeys(pair for one in folded[0][::-1] for pair in (one[:2], one[1:])))
    back = next((one for one in run.of(Backward) if one.function == "backward"), Backward())
    call = next((one for one in run.of(Forward) if one.grad and not one.inference), None)
    root = call.root if call is not None else min(run.roots, default=-1)
    names = _named(run, root, layers)
    owner = run.roots.get(root)
    place = (owner.modules[0].file, owner.modules[0].line) if owner is not None and owner.modules else ("", 0)
    yield Finding(
        message=f"Nothing bends between the layers of {root_variable(run, root)} "
        f"({', '.join(f'{one}→{other}' for one, other in layers[:4])}{', ...' if len(layers) > 4 else ''})"
        + (f", {listed(qualified(run, root, one) for one in names)}" if names else "")
        + ": together they are one linear layer.",
        place=Place(module=qualified(run, root, ""), file=place[0] or back.file, line=place[1] or back.line),
        fix=f"F.relu({module_code(run, root, names[0]) if names else 'layer'}(x))  # an activation after each layer "
        "but the last one",
        cause="A linear function of a linear function is linear, so that more layers can't do more than one.",
        evidence={"layers": [list(one) for one in layers], "graphs": len(walks)},
        step=walks[0].step,
        at=walks[0].at,
    )


def _named(run: Run, root: int, layers: Sequence[tuple[int, ...]]) -> list[str]:
    """The modules that have these layers."""
    sizes = {
        one.name: tuple(one.options.get(key) for key in keys)
        for one in (run.roots[root].modules if root in run.roots else ())
        for kind, keys in (("linear", ("in_features", "out_features")), ("conv", ("in_channels", "out_channels")))
        if one.kind == kind
    }
    return [name for name, size in sizes.items() if size in layers]
