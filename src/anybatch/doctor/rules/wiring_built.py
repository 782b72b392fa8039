"""Rules of the family wiring: models that are built otherwise than they look."""

from collections import Counter
from collections.abc import Iterator

from anybatch.doctor.rules.naming import listed, module_code, names_of, place_of, qualified, verb
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import ever_touched, written
from anybatch.records.events import Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run
from anybatch.records.samples import Activations
from anybatch.records.tables import ModuleFacts, Root

_AGAIN = 3


def apart(run: Run, numbers: list[int]) -> list[list[int]]:
    """Takes parameters of layers that are made again and again apart from others.

    Args:
        run: the facts.
        numbers: of the parameters.

    Returns:
        One list or two, none of them empty.
    """
    times = Counter(run.parameters[one].names for one in numbers)
    again = [one for one in numbers if times[run.parameters[one].names] >= _AGAIN]
    return [part for part in ([one for one in numbers if times[run.parameters[one].names] < _AGAIN], again) if part]


def anew(run: Run, numbers: list[int], finding: Finding) -> Finding:
    """What is said of parameters in no optimizer if they are of a layer that each forward makes anew.

    Args:
        run: the facts.
        numbers: of them, as ``apart`` gives them.
        finding: what is said otherwise.
    """
    first = run.parameters[numbers[0]]
    count = sum(run.parameters[one].names == first.names for one in numbers)
    if count < _AGAIN:
        return finding
    names = tuple(dict.fromkeys(names_of(run, numbers)))
    root = run.roots.get(first.root)
    facts = next((one for one in root.modules if one.name == first.module), None) if root is not None else None
    above = _owner(root, first.module)
    made = "nn.Linear" if facts is None else facts.cls if facts.file else f"nn.{facts.cls}"
    attribute = first.module.rpartition(".")[2] if first.registered and first.module else "layer"
    owner = above.cls if above is not None else "the model"
    where = (above.file, above.line) if above is not None and above.file else (finding.place.file, finding.place.line)
    return Finding(
        message=f"{listed(names)} {verb(len(names), 'is', 'are')} made anew all the time: at least {count} different "
        f"tensors of that name got a gradient, and none of them is in an optimizer.",
        place=Place(module=finding.place.module, parameters=names, file=where[0], line=where[1]),
        fix=f"self.{attribute} = {made}(...)  # once, in __init__ of {owner}; forward only calls it",
        cause=f"A layer that forward makes is random at each call, and {verb(len(names), 'its', 'their')} gradient is "
        "thrown away.",
        evidence=dict(finding.evidence) | {"made": count},
        step=finding.step,
        at=finding.at,
    )


def _owner(root: Root | None, module: str) -> ModuleFacts | None:
    """The innermost module of the user's own above a module."""
    if root is None:
        return None
    rows = {one.name: one for one in root.modules}
    name = module
    while name:
        name = name.rpartition(".")[0]
        if name in rows and rows[name].file:
            return rows[name]
    return None


@rule("AB113", "MODULE_REPEATED", "warning", explains=("CANNOT_FIT_BATCH",))
def _module_repeated(run: Run) -> Iterator[Finding]:
    step = next(run.of(Stepped), None)
    if step is None:
        return
    for root, facts in run.roots.items():
        for one in facts.modules:
            if not one.repeated or not one.registered:
                continue
            front = f"{one.name}." if one.name else ""
            inner = next((row for row in facts.modules if row.name == f"{front}0"), None)
            inside = [n for row in facts.modules if row.name.startswith(f"{front}0") for n in row.parameters]
            if not ever_touched(run) & {*inside}:
                continue
            name, above = qualified(run, root, one.name), _owner(facts, one.name)
            cls = inner.cls if inner is not None else "module"
            yield Finding(
                message=f"The {one.repeated} entries of {name} are one and the same {cls}: there are the parameters "
                "of one only.",
                place=Place(
                    module=name, parameters=names_of(run, inside),
                    file=above.file if above else facts.file, line=above.line if above else facts.line,
                ),
                fix=f"{module_code(run, root, one.name)} = nn.{one.cls}("
                f"{'*' if one.cls == 'Sequential' else ''}[{cls}(...) for _ in range({one.repeated})])",
                cause=f"[module] * {one.repeated} repeats a reference and makes no copies.",
                evidence={"entries": one.repeated, "parameters": len(inside)},
                step=step.number,
                at=step.at,
                severity="" if _keeps_shape(run, root, f"{front}0") else "info",
            )  # fmt: skip


def _keeps_shape(run: Run, root: int, name: str) -> bool:
    """Whether what comes out of a module has the shape of what goes in, so that it can follow itself."""
    for sample in run.of(Activations):
        inside = [one for one in sample.modules if one.module == name or one.module.startswith(f"{name}.")]
        if sample.root == root and inside:
            first, last = (pick(inside, key=lambda one: one.order) for pick in (min, max))
            return bool(first.input_shape) and first.input_shape[1:] == last.shape[1:]
    return False


@rule("AB114", "FROZEN_AT_ZERO", "info")
def _frozen_at_zero(run: Run) -> Iterator[Finding]:
    touched, moved = ever_touched(run), written(run)
    step = next(run.of(Stepped), None)
    trained = {run.parameters[one].root for one in touched if one in run.parameters}
    found = [
        number
        for number, one in sorted(run.parameters.items())
        if one.constant == 0.0 and not one.requires_grad and len(one.shape) >= 2 and one.registered
        and one.is_parameter and one.root in trained and number not in touched | moved
    ]  # fmt: skip
    if step is None or not found:
        return
    names = names_of(run, found)
    yield Finding(
        message=f"{listed(names)} {verb(len(names), 'is', 'are')} zero and frozen: "
        f"{verb(len(names), 'it stays', 'they stay')} zero.",
        place=place_of(run, found),
        fix="p.requires_grad_(True) for them, before the optimizer is made, if they are to be trained",
        cause="A factor that is zero, as of an adapter, takes away what it is multiplied with; a first hidden state of "
        "zeros is usual.",
        evidence={"parameters": len(names)},
        step=step.number,
        at=step.at,
    )
