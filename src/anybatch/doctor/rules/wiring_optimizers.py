"""Rules of the family wiring: what belongs into an optimizer and is not there, or is there twice."""

from collections import Counter
from collections.abc import Iterator

from anybatch.doctor.rules.naming import (
    counted,
    listed,
    made_at,
    made_text,
    module_facts,
    names_of,
    optimizer_variable,
    parameters_code,
    place_of,
    root_variable,
    verb,
)
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import ever_touched, members, passes, stepping, windows_of, with_gradient, written
from anybatch.doctor.rules.wiring_built import anew, apart
from anybatch.records.events import Backward, Forward, Loaded, Stepped
from anybatch.records.findings import Finding
from anybatch.records.runs import Run
from anybatch.records.tables import ParameterFacts


def _in_no_group(run: Run) -> list[int]:
    """Trainable parameters that got gradient while optimizers stepped, are in no group and were never written."""
    grouped = frozenset().union(*members(run).values())
    moved = written(run)
    first = next((one.touched for one in passes(run) if one.touched), frozenset[int]())
    return [
        number
        for number in sorted(ever_touched(run) - grouped - moved)
        if (one := run.parameters.get(number)) is not None
        and not one.is_input
        and (one.requires_grad or number not in first)  # it was frozen at first, and is not any more
    ]


def _first_step_after(run: Run, numbers: list[int]) -> Stepped | None:
    """The first step that came after one of some parameters had got its gradient."""
    wanted = frozenset(numbers)
    first = next((one.fact.at for one in passes(run) if one.touched is not None and one.touched & wanted), None)
    if first is None:
        return None
    return next((one for one in run.of(Stepped) if one.at > first), None)


def _with_optimized(run: Run, numbers: list[int]) -> bool:
    """Whether backwards that a step used gave gradient to some parameters and to optimized ones together."""
    wanted, every = frozenset(numbers), members(run)
    together = [one for one in passes(run) if one.touched is not None and one.touched & wanted]
    used = {
        id(one.fact)
        for number in stepping(run)
        for window in windows_of(run, number)
        if window.step is not None
        for one in window.used
        if one.touched is not None and one.touched & every.get(number, frozenset())
    }
    shared = sum(id(one.fact) in used for one in together)
    return shared >= 2 or (shared == 1 and run.steps < 3) or (len(together) >= 5 and _holds_frozen_only(run, wanted))


def _holds_frozen_only(run: Run, wanted: frozenset[int]) -> bool:
    """Whether all that an optimizer steps are frozen parameters of the same model: it was made before adapters were."""
    roots = {run.parameters[one].root for one in wanted}
    every, touched = members(run), with_gradient(run)
    for number in stepping(run):
        own = [run.parameters[one] for one in every.get(number, ()) if one in run.parameters]
        frozen = all(not one.requires_grad and one.parameter not in touched for one in own)
        if own and frozen and {one.root for one in own} <= roots:
            return True
    return False


def _stale(run: Run) -> dict[int, tuple[list[int], list[int]]]:
    """For each optimizer: its parameters that no model uses, and the parameters of models that they should be."""
    called = {one.root for one in run.of(Forward)}
    touched = with_gradient(run)
    left = [one for one in _in_no_group(run) if run.parameters[one].root in called]
    found = {}
    every = members(run)
    for optimizer in stepping(run):
        stale = [
            number
            for number in sorted(every.get(optimizer, ()))
            if number not in touched and (one := run.parameters.get(number)) is not None and one.root not in called
        ]
        shapes = Counter(run.parameters[number].shape for number in stale)
        live = left if _replaced(run, optimizer, stale, left) else []
        for number in left if not live else ():
            if shapes[run.parameters[number].shape] > 0:
                shapes[run.parameters[number].shape] -= 1
                live.append(number)
        if stale and len(live) * 2 >= len(stale):
            found[optimizer] = (stale, live)
            left = [number for number in left if number not in live]
    return found


def _replaced(run: Run, optimizer: int, stale: list[int], live: list[int]) -> bool:
    """Whether parameters of a model are there in the place of those that an optimizer has, of whatever shapes.

    Either nothing in sight has these any more, or they have as many dimensions as the others, and the same neighbours
    in the optimizer as the others have in their model.
    """
    if not stale or not live:
        return False
    if all(".param_groups[" in run.parameters[number].name for number in stale):
        return True
    if [len(run.parameters[one].shape) for one in stale] != [len(run.parameters[one].shape) for one in live]:
        return False
    held = [number for group in run.optimizers[optimizer].groups for number in group.parameters]
    roots = sorted({run.parameters[number].root for number in live})
    every = dict.fromkeys(n for root in roots for one in run.roots[root].modules for n in one.parameters)
    there = [number for number in every if number in {*held, *live}]
    return len(there) > len(live) and _runs_of(held, stale) == _runs_of(there, live)


def _runs_of(numbers: list[int], some: list[int]) -> list[int]:
    """Numbers in a row, in which some that stand together are one -1."""
    marked = [-1 if number in some else number for number in numbers]
    return [one for index, one in enumerate(marked) if one >= 0 or index == 0 or marked[index - 1] >= 0]


def _meant(run: Run, numbers: list[int]) -> str:
    """Why it may be on purpose that trained parameters are in no group; empty if nothing speaks for it."""
    if all((facts := module_facts(run, run.parameters[one])) is not None and not facts.training for one in numbers):
        return "its modules are in evaluation mode"
    root = run.parameters[numbers[0]].root
    for one in run.of(Loaded):
        if one.into == "module" and one.number in (root, -1) and one.matched > 0 and _upstream(run, numbers):
            return "its values were loaded"
    return ""


def _upstream(run: Run, numbers: list[int]) -> bool:
    """Whether some parameters all come before those of the same model that are in a group."""
    root = run.parameters[numbers[0]].root
    grouped = frozenset().union(*members(run).values())
    others = [one for one in grouped if one in run.parameters and run.parameters[one].root == root]
    return bool(others) and max(numbers) < min(others)


@rule(
    "AB101", "OPT_PARAM_MISSING", "error", explains=("LR_TOO_LOW", "PARAM_UNUSED", "LOSS_CONSTANT", "FREEZE_TOO_MUCH")
)
def _opt_param_missing(run: Run) -> Iterator[Finding]:
    if not run.optimizers:
        return
    replaced = {number for _, live in _stale(run).values() for number in live}
    by_root: dict[int, list[int]] = {}
    for number in _in_no_group(run):
        if number not in replaced and run.parameters[number].registered:
            by_root.setdefault(run.parameters[number].root, []).append(number)
    for numbers in [part for every in by_root.values() for part in apart(run, every)]:
        step = _first_step_after(run, numbers)
        if step is None or not _with_optimized(run, numbers):
            continue
        meant = _meant(run, numbers)
        facts = run.optimizers.get(step.optimizer)
        share = sum(run.parameters[one].numel for one in numbers)
        names = names_of(run, numbers)
        variable = optimizer_variable(run, step.optimizer)
        code = parameters_code(run, numbers)
        file, line = made_at(facts)
        found = Finding(
            message=f"{listed(names)} {verb(len(names), 'gets', 'get')} a gradient but {verb(len(names), 'is', 'are')} "
            f"in no group of any optimizer, so {verb(len(names), 'its', 'their')} {counted(share, 'number')} "
            f"never {verb(share, 'changes', 'change')}.",
            place=place_of(run, numbers, optimizer=step.optimizer, file=file, line=line),
            fix=f'{variable}.add_param_group({{"params": {code}}})'
            + (f"  # or, if meant: {_frozen_code(code)}" if meant else ""),
            cause=f"{made_text(facts, variable)} was made without these parameters"
            + (f"; this may be meant, since {meant}." if meant else "."),
            evidence={"parameters": len(names), "numbers": share, "optimizers": len(run.optimizers)},
            step=step.number,
            at=step.at,
            severity="info" if meant else "",
        )
        yield anew(run, numbers, found)


def _frozen_code(parameters: str) -> str:
    if parameters.startswith("["):
        return "p.requires_grad_(False) for each of them"
    return f"{parameters.removesuffix('.parameters()')}.requires_grad_(False)"


@rule("AB102", "OPT_PARAM_UNREGISTERED", "error", explains=("LR_TOO_LOW", "OPT_PARAM_MISSING"))
def _opt_param_unregistered(run: Run) -> Iterator[Finding]:
    if not run.optimizers:
        return
    by_owner: dict[int, list[int]] = {}
    for number in _in_no_group(run):
        one = run.parameters[number]
        if not one.registered and (one.is_parameter or one.root >= 0 or one.numel == 1):
            by_owner.setdefault(one.root, []).append(number)
    for root, numbers in [(root, part) for root, every in by_owner.items() for part in apart(run, every)]:
        step = _first_step_after(run, numbers)
        if step is None:
            continue
        meant = root >= 0 and bool(_meant(run, numbers))
        names = names_of(run, numbers)
        owner = run.roots.get(root)
        first = run.parameters[numbers[0]]
        fix = _register(run, first)
        free = root < 0 and not first.is_parameter
        file, line = (owner.file, owner.line) if owner else ("", 0)
        if free:
            file, line = made_at(run.optimizers.get(step.optimizer))
            meant = any(one.function == "grad" for one in run.of(Backward))  # it may be there to be differentiated
        if free:
            fix = f'{optimizer_variable(run, step.optimizer)}.add_param_group({{"params": [{", ".join(names)}]}})'
        found = Finding(
            message=f"The loss reaches {listed(names)}, which "
            + ("no model and no optimizer has" if free else f"{root_variable(run, root)}.parameters() does not give")
            + f": {verb(len(names), 'it is', 'they are')} never trained.",
            place=place_of(run, numbers, file=file, line=line),
            fix=fix,
            cause="A module or tensor in a plain list, dictionary or attribute is not registered with its model, so "
            "the optimizer, .to(device) and state_dict() do not see it.",
            evidence={"parameters": len(names), "numbers": sum(run.parameters[one].numel for one in numbers)},
            step=step.number,
            at=step.at,
            severity="info" if meant else "",
        )
        yield anew(run, numbers, found)


def _register(run: Run, first: ParameterFacts) -> str:
    """The line that registers a parameter, for the end of ``__init__``, as far as its name says where it lies."""
    name = first.module or first.name
    if not first.is_parameter:
        owner, _, attribute = first.name.rpartition(".")
        kind = "nn.Parameter"
    elif "[" in name:
        owner, _, attribute = name.split("[", 1)[0].rpartition(".")
        kind = "nn.ModuleDict" if name.split("[", 1)[1][:1] in "'\"" else "nn.ModuleList"
    else:
        return "keep the modules in an nn.ModuleList or nn.ModuleDict, and tensors as nn.Parameter"
    modules = run.roots[first.root].modules if first.root in run.roots else ()
    cls = next((f" of {one.cls}" for one in modules if one.name == owner), "")
    return f"self.{attribute} = {kind}(self.{attribute})  # at the end of __init__{cls}"


@rule(
    "AB103",
    "OPT_PARAM_STALE",
    "error",
    explains=("OPT_PARAM_MISSING", "LR_TOO_LOW", "LOSS_CONSTANT", "STEP_WITHOUT_GRADIENT", "ZERO_GRAD_BEFORE_STEP"),
)
def _opt_param_stale(run: Run) -> Iterator[Finding]:
    for optimizer, (stale, live) in _stale(run).items():
        step = next(one for one in run.of(Stepped) if one.optimizer == optimizer)
        facts = run.optimizers.get(optimizer)
        variable = optimizer_variable(run, optimizer)
        file, line = made_at(facts)
        root = root_variable(run, run.parameters[live[0]].root)
        shapes = Counter(run.parameters[number].shape for number in stale)
        same = (shapes & Counter(run.parameters[number].shape for number in live)).total()
        cls = facts.cls if facts is not None and facts.cls else "AdamW"
        yield Finding(
            message=f"{variable} updates {counted(len(stale), 'tensor')} that no model uses; "
            f"{counted(len(live), 'parameter')} of {root}{' of the same shapes' if same == len(live) else ''} "
            f"({listed(names_of(run, live))}) "
            f"{verb(len(live), 'gets', 'get')} gradients and {verb(len(live), 'is', 'are')} in no group.",
            place=place_of(run, live, optimizer=optimizer, file=file, line=line),
            fix=f"{variable} = {cls}({root}.parameters(), ...)  # after the last line that replaces any of {root}",
            cause=f"{made_text(facts, variable)} was made before {root} got the parameters that it has now "
            "(copied, wrapped or replaced).",
            evidence={"stale": len(stale), "in_no_group": len(live), "shapes_match": same},
            step=step.number,
            at=step.at,
        )
