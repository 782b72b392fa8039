"""Rules of the family wiring: what belongs into an optimizer and is not there, is there twice, or is built wrong."""

import itertools
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from anybatch.doctor.rules.registry import NOWHERE, RUNS_AWAY, STANDS_STILL, Found, Limit, rule
from anybatch.doctor.views.courses import groups_of, phases
from anybatch.doctor.views.measures import copied_shapes
from anybatch.doctor.views.naming import (
    Names,
    counted,
    made_at,
    module_code,
    module_facts,
    names_of,
    near,
    parameters_code,
    qualified,
    root_variable,
)
from anybatch.doctor.views.optimizing import OptimizerView, optimizers
from anybatch.doctor.views.outcomes import learned_well, outcome
from anybatch.doctor.views.windows import Pass, ever_touched, optimized, passes, with_gradient, written
from anybatch.records.events import Backward, Cleared, Crashed, Epoch, Forward, Loaded, Scheduled, Stepped
from anybatch.records.lossfacts import Walk
from anybatch.records.runs import Run, remembered
from anybatch.records.samples import Activations
from anybatch.records.tables import ModuleFacts, OptimizerFacts, ParameterFacts, Root

_LATE = 3  # backwards: a few may be of something else than the training


@remembered
def in_no_group(run: Run) -> list[int]:
    """Trainable parameters that got gradient while optimizers stepped, are in no group and were never written."""
    first = next((one.touched for one in passes(run) if one.touched), frozenset[int]())
    found = {
        number
        for number in ever_touched(run) - optimized(run) - written(run)
        if (one := run.parameters.get(number)) is not None
        and (one.requires_grad or number not in first)  # it was frozen at first, and is not any more
        and one.shape not in copied_shapes(run)  # GRAPH_CUT says it of what they are copies of
    }
    return sorted(found | _unfrozen(run))


def _unfrozen(run: Run) -> set[int]:
    """What was trained before, and gets a gradient again in the middle of a later training that does not have it."""
    found = set[int]()
    for part in phases(run)[1:]:
        steps = [one.at for one in run.of(Stepped) if part.start <= one.at <= part.end]
        mine = [
            one.touched for one in passes(run) if one.touched is not None and part.start <= one.fact.at <= steps[-1]
        ]
        counts = Counter(number for touched in mine for number in touched - mine[0])
        found |= {number for number, count in counts.items() if count >= _LATE} - part.parameters
    return found & run.parameters.keys()


def _numbers(run: Run, numbers: list[int]) -> int:
    """How many numbers some parameters have."""
    return sum(run.parameters[one].numel for one in numbers)


def _first_step_after(run: Run, numbers: list[int]) -> Stepped | None:
    """The first step, of an optimizer without them, that came after one of some parameters had got its gradient."""
    reached = (one.fact.at for one in passes(run) if one.touched is not None and not one.touched.isdisjoint(numbers))
    first = next(reached, None)
    after = (one for one in run.of(Stepped) if first is not None and one.at > first)
    return next((one for one in after if groups_of(run, one.optimizer).keys().isdisjoint(numbers)), None)


def _with_optimized(run: Run, numbers: list[int], shared: float) -> bool:
    """Whether backwards that a step used gave gradient to some parameters and to optimized ones together."""
    together = [one for one in passes(run) if one.touched is not None and not one.touched.isdisjoint(numbers)]
    used = {
        id(back.fact)
        for one in optimizers(run)
        for window in one.windows
        if window.step is not None
        for back in window.used
        if back.touched is not None and back.touched & one.own
    }
    both = sum(id(one.fact) in used for one in together)
    if both >= min(shared, max(run.steps - 1, 1)):
        return True
    return len(together) >= 5 and (_holds_frozen_only(run, numbers) or _steps_in_vain(run, together))


def _steps_in_vain(run: Run, passes_: list[Pass]) -> bool:
    """Whether the step behind each of some backwards is of an optimizer whose own parameters have no gradient."""
    steps = sorted((step.at, step.with_grad == 0 or step.zero is True) for step in run.of(Stepped))
    behind = [bisect_left(steps, (one.fact.at,)) for one in passes_]
    return all(at < len(steps) and steps[at][1] for at in behind)


def _holds_frozen_only(run: Run, wanted: list[int]) -> bool:
    """Whether an optimizer holds only what never gets a gradient, of the same model: it was made before adapters."""
    roots, touched = {run.parameters[one].root for one in wanted}, with_gradient(run)
    for one in optimizers(run):
        own = [run.parameters[number] for number in one.own if number in run.parameters]
        frozen = not any(each.requires_grad for each in own)
        idle = one.own.isdisjoint(touched) and (frozen or not any(step.with_grad for step in one.steps))
        if own and one.steps and idle and {each.root for each in own} <= roots:
            return True
    return False


@remembered
def _stale(run: Run) -> dict[int, tuple[list[int], list[int]]]:
    """For each optimizer: its parameters that no model uses, and the parameters of models that they should be."""
    called = {one.root for one in run.of(Forward)}
    left = [one for one in in_no_group(run) if run.parameters[one].root in called]
    found = {}
    for optimizer in optimizers(run):
        stale = [
            number
            for number in sorted(optimizer.own - with_gradient(run))
            if (one := run.parameters.get(number)) is not None and one.root not in called
        ]
        shapes = Counter(run.parameters[number].shape for number in stale)
        live = left if _replaced(run, optimizer, stale, left) else []
        for number in left if not live else ():
            if shapes[run.parameters[number].shape] > 0:
                shapes[run.parameters[number].shape] -= 1
                live.append(number)
        if stale and len(live) * 2 >= len(stale):
            found[optimizer.number] = (stale, live)
            left = [number for number in left if number not in live]
    return found


def _replaced(run: Run, optimizer: OptimizerView, stale: list[int], live: list[int]) -> bool:
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
    held = [number for group in optimizer.facts.groups for number in group.parameters]
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
    others = [one for one in optimized(run) if one in run.parameters and run.parameters[one].root == root]
    upstream = bool(others) and max(numbers) < min(others)
    loads = (one for one in run.of(Loaded) if one.into == "module" and one.number in (root, -1) and one.matched > 0)
    return "its values were loaded" if upstream and any(loads) else ""


def _apart(run: Run, numbers: list[int]) -> list[list[int]]:
    """Parameters by root, and those of layers that are made again and again apart from others."""
    times = Counter(run.parameters[one].names for one in numbers)
    parts: dict[tuple[int, bool], list[int]] = {}
    for one in numbers:
        parts.setdefault((run.parameters[one].root, times[run.parameters[one].names] >= _AGAIN), []).append(one)
    roots = list(dict.fromkeys(run.parameters[one].root for one in numbers))
    return [parts[key] for root in roots for key in ((root, False), (root, True)) if key in parts]


_AGAIN = 3  # tensors of one name


@rule(
    "AB101", "OPT_PARAM_MISSING", "error",
    explains=(*STANDS_STILL, "PARAM_UNUSED", "FREEZE_TOO_MUCH", "ZERO_GRAD_BEFORE_STEP"),
)  # fmt: skip
def opt_param_missing(
    run: Run, *, shared: float = Limit(2, "backwards: one alone may be of something else")
) -> Iterator[Found]:
    """Parameters that get a gradient with optimized ones and are in no optimizer."""
    replaced = {number for _, live in _stale(run).values() for number in live}
    left = [one for one in in_no_group(run) if one not in replaced and run.parameters[one].registered]
    is_over = any(run.of(Crashed)) and run.steps < shared  # before other optimizers came to their first step
    for numbers in _apart(run, left) if run.optimizers and not is_over else ():
        step = _first_step_after(run, numbers)
        if step is None or not _with_optimized(run, numbers, shared):
            continue
        meant, share = _meant(run, numbers), _numbers(run, numbers)
        names, optimizer = names_of(run, numbers), OptimizerView(run, step.optimizer)
        code = parameters_code(run, numbers, str(optimizer))
        frozen = f"{code.removesuffix('.parameters()')}.requires_grad_(False)"
        if code.startswith("["):
            frozen = "p.requires_grad_(False) for each of them"
        found = Found(
            text=f"{names} {names:gets|get} a gradient but {names:is|are} in no optimizer's param_groups, so "
            f"{names:its|their} {counted(share, 'element')} {'is' if share == 1 else 'are'} never updated.",
            fix=f'{optimizer}.add_param_group({{"params": {code}}})' + (f"  # or, if meant: {frozen}" if meant else ""),
            cause=f"{optimizer.made} was made without these parameters"
            + (f"; this may be meant, since {meant}." if meant else "."),
            since=step,
            where=optimizer.facts,
            step=step.number,
            parameters=numbers,
            optimizer=step.optimizer,
            evidence={"parameters": len(names), "elements": share, "optimizers": len(run.optimizers)},
            severity="info" if meant else "",
        )
        yield _anew(run, numbers, found)
    yield from _emptied(run)


def _emptied(run: Run) -> Iterator[Found]:
    """A group without parameters, where the optimizer that was replaced had some, which get gradients all the same.

    The rest of their net goes on training: else the new optimizer is one of another net, which may have none of a kind.
    """
    made = sorted(run.optimizers.values(), key=lambda one: one.optimizer)
    for old, new in itertools.pairwise(made):
        places = [place for place, group in enumerate(new.groups) if not group.parameters]
        if len(old.groups) != len(new.groups) or not places or len(places) == len(new.groups):
            continue
        if not any(one.optimizer == old.optimizer and one.at < new.at for one in run.of(Stepped)):
            continue  # it had not trained, so that it was not replaced
        going = {one.optimizer for one in made[made.index(new) :]}
        going |= {one.optimizer for one in run.of(Stepped) if one.at > new.at}
        held = {n for one in made if one.optimizer in going for group in one.groups for n in group.parameters}
        had = [number for place in places for number in old.groups[place].parameters if number not in held]
        later = frozenset[int]().union(*(one.touched or () for one in passes(run) if one.fact.at > new.at))
        left = [number for number in had if number in later and number in run.parameters]
        nets = {run.parameters[number].root for number in left}
        rest = {number for group in old.groups for number in group.parameters if number in run.parameters} - {*had}
        if left and all(number in held for number in rest if run.parameters[number].root in nets):
            names = names_of(run, left)
            yield Found(
                text=f"Group {places[0]} of {OptimizerView(run, new.optimizer)}, re-created{near(new)}, has no "
                f"parameters: {names} {names:was|were} in that of the one before, {names:gets|get} a gradient and "
                f"{names:is|are} no longer updated.",
                fix="params = list(filter(..., model.parameters()))  # a list can be used more than once",
                cause="filter, map, a generator and parameters() yield each parameter once, and are then exhausted.",
                since=new,
                parameters=left,
                optimizer=new.optimizer,
                evidence={"parameters": len(names), "group": places[0], "optimizers": len(made)},
            )
            return


def _anew(run: Run, numbers: list[int], found: Found) -> Found:
    """What is said of parameters in no optimizer if they are of a layer that each forward makes anew."""
    first = run.parameters[numbers[0]]
    count = sum(run.parameters[one].names == first.names for one in numbers)
    if count < _AGAIN:
        return found
    names = Names(dict.fromkeys(names_of(run, numbers)))
    above, facts = _owner(run.roots.get(first.root), first.module), module_facts(run, first)
    made = "nn.Linear" if facts is None else facts.cls if facts.file else f"nn.{facts.cls}"
    attribute = first.module.rpartition(".")[2] if first.registered and first.module else "layer"
    place = found.place(run)
    return replace(
        found,
        text=f"{names} {names:is|are} re-created repeatedly: at least {count} different tensors of that name got a "
        "gradient, and none of them is in an optimizer.",
        fix=f"self.{attribute} = {made}(...)  # once, in __init__ of {above.cls if above else 'the model'}; forward "
        "only calls it",
        cause=f"A layer created in forward is random at each call, and {names:its|their} gradient is discarded.",
        where=above if above is not None and above.file else (place.file, place.line),
        parameters=names,
        optimizer=-1,
        module=place.module,
        evidence=dict(found.evidence) | {"made": count},
        severity="",
    )


def _owner(root: Root | None, module: str) -> ModuleFacts | None:
    """The innermost module of the user's own above a module."""
    rows = {one.name: one for one in root.modules} if root is not None else {}
    while module:
        module = module.rpartition(".")[0]
        if module in rows and rows[module].file:
            return rows[module]
    return None


@rule("AB102", "OPT_PARAM_UNREGISTERED", "error", explains=(*STANDS_STILL, "OPT_PARAM_MISSING"))
def opt_param_unregistered(run: Run) -> Iterator[Found]:
    """Parameters that their model does not register."""
    own = [one for number in optimized(run) if (one := run.parameters.get(number)) is not None and one.numel > 1]
    is_raw = any(not one.is_parameter for one in own)  # weights are plain tensors
    left = [
        number for number in in_no_group(run)
        if not (one := run.parameters[number]).registered
        and (is_raw or one.is_parameter or one.root >= 0 or one.numel == 1)
    ]  # fmt: skip
    begun = min((one.at for one in run.of(OptimizerFacts)), default=0)  # what a backward before it reached is let alone
    late = {number for one in run.of(Walk) if one.at > begun for number in (*one.reached, *one.outside)}
    left = [one for one in left if one in late or run.parameters[one].root >= 0 or run.parameters[one].is_parameter]
    for numbers in _apart(run, left) if run.optimizers else ():
        step, first = _first_step_after(run, numbers), run.parameters[numbers[0]]
        if step is None:
            continue
        names, free = names_of(run, numbers), first.root < 0 and not first.is_parameter
        meant = first.root >= 0 and bool(_meant(run, numbers))
        if free:  # it may be there to be differentiated
            meant = any(one.function == "grad" for one in run.of(Backward))
        found = Found(
            text=f"The loss reaches {names}, which "
            + (
                "no model and no optimizer has"
                if free
                else f"{root_variable(run, first.root)}.parameters() does not give"
            )
            + f": {names:it is|they are} never trained.",
            fix=f'{OptimizerView(run, step.optimizer)}.add_param_group({{"params": [{", ".join(names)}]}})'
            if free
            else _register(run, first),
            cause=f"They were not among the tensors that {OptimizerView(run, step.optimizer)} was made with."
            if free
            else "A module or tensor in a plain list, dictionary or attribute is not registered with its model, so "
            "the optimizer, .to(device) and state_dict() do not see it.",
            since=step,
            step=step.number,
            where=made_at(run.optimizers.get(step.optimizer)) if free else run.roots.get(first.root),
            parameters=numbers,
            evidence={"parameters": len(names), "elements": _numbers(run, numbers)},
            severity="info" if meant else "",
        )
        yield _anew(run, numbers, found)


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
    "AB103", "OPT_PARAM_STALE", "error",
    explains=(*STANDS_STILL, "OPT_PARAM_MISSING", "STEP_WITHOUT_GRADIENT", "ZERO_GRAD_BEFORE_STEP"),
)  # fmt: skip
def opt_param_stale(run: Run) -> Iterator[Found]:
    """Optimizers of parameters that no model uses any more."""
    for number, (stale, live) in _stale(run).items():
        one, root, names = (
            OptimizerView(run, number),
            root_variable(run, run.parameters[live[0]].root),
            names_of(run, live),
        )
        shapes = Counter(run.parameters[number].shape for number in stale)
        same = (shapes & Counter(run.parameters[number].shape for number in live)).total()
        yield Found(
            text=f"{one} updates {counted(len(stale), 'tensor')} that no model uses; {counted(len(live), 'parameter')} "
            f"of {root}{' of the same shapes' if same == len(live) else ''} ({names}) {names:gets|get} gradients and "
            f"{names:is|are} in no group.",
            fix=f"{one} = {one.facts.cls or 'AdamW'}({root}.parameters(), ...)  # after the last line that replaces "
            f"any of {root}",
            cause=f"{one.made} was made before {root} got the parameters that it has now (copied, wrapped or "
            "replaced).",
            since=one.steps[0],
            where=one.facts,
            step=one.steps[0].number,
            parameters=live,
            optimizer=number,
            evidence={"stale": len(stale), "in_no_group": len(live), "shapes_match": same},
        )


@rule("AB104", "OPT_PARAM_TWICE", "warning", explains=RUNS_AWAY)
def opt_param_twice(run: Run, *, iterations: float = Limit(3, "by chance")) -> Iterator[Found]:
    """Two optimizers that step on one gradient."""
    last: dict[int, Stepped] = {}
    count: Counter[tuple[int, int]] = Counter()
    for one in run.facts:
        if isinstance(one, Backward | Cleared):
            last.clear()
        if not isinstance(one, Stepped):
            continue
        for other, step in last.items():
            pair = (min(other, one.optimizer), max(other, one.optimizer))
            first, second = (OptimizerView(run, number) for number in pair)
            shared = first.own & second.own & ever_touched(run)
            torchs = all(number in run.optimizers and run.optimizers[number].is_torchs for number in pair)
            if other == one.optimizer or not shared or not torchs or step.closure or one.closure:
                continue
            count[pair] += 1
            if iterations <= count[pair] < iterations + 1:
                names = names_of(run, shared)
                yield Found(
                    text=f"{names} {names:is|are} in {first} and in {second}, and both step on the same gradient.",
                    fix=f"leave them out of one of the two: {second} = {second.facts.cls}([p for p in ... if p not in "
                    f"those of {first}], ...)",
                    cause=f"Each iteration moves {names:it|them} twice, the second time with a stale gradient.",
                    since=one,
                    where=second.facts,
                    step=one.number,
                    parameters=shared,
                    optimizer=second.number,
                    evidence={"shared": len(names), "iterations": 3},
                )
        last[one.optimizer] = one


@rule("AB105", "OPT_STATE_RESET", "warning", explains=RUNS_AWAY, slows=True)
def opt_state_reset(run: Run, *, times: float = Limit(2, "once may be meant")) -> Iterator[Found]:
    """Optimizers that are made anew for the same parameters."""
    chain = _chain(run)
    if len(chain) < 2:
        return
    plain = [(old, new) for old, new in chain if not _by_design(run, old, new)]
    old, new = (plain or chain)[0]
    facts = new.facts
    yield Found(
        text=f"{new} was re-created {len(chain)} times for the same parameters, first after "
        f"{counted(len(old.steps), 'step')}; its state starts from zero each time.",
        fix=f"move `{new} = {facts.cls}(...)`{near(facts)} before the loop",
        cause=f"A new {facts.cls} has no momentum and no second moments, so its first steps are too large.",
        since=new.steps[0],
        where=facts,
        optimizer=new.number,
        evidence={
            "times": len(chain), "after": len(old.steps), "lr": facts.groups[0].lr if facts.groups else 0.0,
        },
        severity="" if len(plain) >= times else "info",
    )  # fmt: skip


def _chain(run: Run) -> list[tuple[OptimizerView, OptimizerView]]:
    """Pairs of optimizers of which the second took over parameters of the first, which never stepped again."""
    found, known = [], dict[int, list[OptimizerView]]()  # those that had a parameter before
    for new in sorted(optimizers(run, most=None), key=lambda one: one.steps[0].at):
        begun = new.steps[0].at
        olds = [one for parameter in new.own for one in known.get(parameter, ()) if one.steps[-1].at < begun]
        for parameter in new.own:
            known.setdefault(parameter, []).append(new)
        old = max(olds, key=lambda one: one.steps[-1].at, default=None)
        if old is not None and old.facts.cls == new.facts.cls and any(group.momentum for group in new.facts.groups):
            found.append((old, new))
    return found


def _by_design(run: Run, old: OptimizerView, new: OptimizerView) -> bool:
    """Whether something else changed with the optimizer: parameters, learning rate, schedule, data, task or values."""
    ended, begun = old.steps[-1], new.steps[0]
    adaptive = re.search("ada|rms|lion|amsgrad", new.facts.cls.lower())
    if old.own != new.own or not adaptive or _other_task(old, new):
        return True
    if [round(lr, 12) for lr in ended.lrs] != [round(lr, 12) for lr in begun.lrs]:
        return True
    if any(one.optimizer in (old.number, new.number) for one in run.schedulers.values()) and any(run.of(Scheduled)):
        return True
    if any(one.into == "module" and ended.at < one.at < begun.at for one in run.of(Loaded)):
        return True
    loaders = [one for one in run.of(Epoch) if not one.ended]
    before = {one.loader for one in loaders if one.at < ended.at}
    after = {one.loader for one in loaders if ended.at < one.at < begun.at}
    return bool(before and after and not before & after)


def _other_task(old: OptimizerView, new: OptimizerView) -> bool:
    """Whether the loss is so much higher with the new optimizer that it must be another task."""
    before, after = (
        [window.used[-1].fact.value for window in one.windows if window.step is not None and window.used]
        for one in (old, new)
    )
    lower = [abs(value) for value in before[-3:] if value is not None]
    return bool(lower and after and after[0] is not None) and (after[0] or 0.0) > 2.0 * max(lower)


@rule("AB113", "MODULE_REPEATED", "warning", explains=("CANNOT_FIT_BATCH",), needs=(Stepped,))
def module_repeated(run: Run) -> Iterator[Found]:
    """Lists of modules that hold one module several times."""
    step = next(run.of(Stepped))
    for root, facts in run.roots.items():
        for one in (each for each in facts.modules if each.repeated and each.registered):
            first = f"{one.name}.0".removeprefix(".")
            inside = [n for row in facts.modules if row.name.startswith(first) for n in row.parameters]
            if ever_touched(run).isdisjoint(inside):
                continue
            cls = next((row.cls for row in facts.modules if row.name == first), "module")
            name = qualified(run, root, one.name)
            yield Found(
                text=f"The {one.repeated} entries of {name} are the same {cls} object: only one set of parameters "
                "exists.",
                fix=f"{module_code(run, root, one.name)} = nn.{one.cls}({'*' if one.cls == 'Sequential' else ''}"
                f"[{cls}(...) for _ in range({one.repeated})])",
                cause=f"[module] * {one.repeated} repeats a reference and makes no copies.",
                since=step,
                step=step.number,
                where=_owner(facts, one.name) or facts,
                parameters=inside,
                module=name,
                evidence={"entries": one.repeated, "parameters": len(inside)},
                severity="" if _keeps_shape(run, root, first) else "info",
            )


def _keeps_shape(run: Run, root: int, name: str) -> bool:
    """Whether what comes out of a module has the shape of what goes in, so that it can follow itself."""
    for sample in run.of(Activations):
        inside = [one for one in sample.modules if one.module == name or one.module.startswith(f"{name}.")]
        if sample.root == root and inside:
            first, last = (pick(inside, key=lambda one: one.order) for pick in (min, max))
            return bool(first.input_shape) and first.input_shape[1:] == last.shape[1:]
    return False


@rule("AB114", "FROZEN_AT_ZERO", "info", explains=("FREEZE_TOO_MUCH",), needs=(Stepped,))
def frozen_at_zero(run: Run) -> Iterator[Found]:
    """Matrices that are zero and frozen."""
    step = next(run.of(Stepped))
    trained = {run.parameters[one].root for one in ever_touched(run) if one in run.parameters}
    found = [
        number
        for number, one in sorted(run.parameters.items())
        if one.constant == 0.0 and not one.requires_grad and len(one.shape) >= 2 and one.registered
        and one.is_parameter and one.root in trained and number not in ever_touched(run) | written(run)
    ]  # fmt: skip
    if found:
        names = names_of(run, found)
        yield Found(
            text=f"{names} {names:is|are} zero and frozen: {names:it stays|they stay} zero.",
            fix="p.requires_grad_(True) for them, before the optimizer is made, if they are to be trained",
            cause="A factor of zero, as in an adapter, cancels whatever it multiplies; an initial hidden state of "
            "zeros is usual.",
            since=step,
            where=NOWHERE,
            step=step.number,
            parameters=found,
            evidence={"parameters": len(names)},
            severity="warning" if outcome(run).guess and not learned_well(run) else "",
        )
