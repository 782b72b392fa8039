"""Rules of the family wiring: what is frozen, tied, loaded and silently written, and parameters that nothing uses."""

import re
from collections import Counter
from collections.abc import Iterator

from anybatch.doctor.rules.answered import say
from anybatch.doctor.rules.registry import NOWHERE, STANDS_STILL, Found, Limit, rule
from anybatch.doctor.views.measures import unused_names
from anybatch.doctor.views.naming import (
    Names,
    counted,
    listed,
    module_code,
    module_facts,
    names_of,
    near,
    parameter_name,
    root_variable,
)
from anybatch.doctor.views.optimizing import OptimizerView, optimizers
from anybatch.doctor.views.windows import ever_touched, optimized, parameters_by_root, passes, with_gradient, written
from anybatch.records.events import Backward, Loaded, Stepped
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, Norms, Tied
from anybatch.records.tables import ParameterFacts

_FROZEN_STEPS = 3  # of an optimizer whose model may be thawed after a first one


@rule("AB106", "FREEZE_TOO_MUCH", "warning", explains=STANDS_STILL, needs=(Stepped,))
def freeze_too_much(
    run: Run, *, steps: float = Limit(15, "three thirds of five"), rest: float = Limit(0.9, "of the loss stays"),
    share: float = Limit(0.1, "of the numbers: norm layers and biases are a few percent"),
) -> Iterator[Found]:  # fmt: skip
    """Models of which nothing, or only norm layers and biases, is trained, or a frozen table isn't, and don't learn."""
    yield from _all_frozen(run)
    yield from say(run, "AB106")
    used = [one.used[-1].fact.value for one in optimizers(run)[0].windows if one.used]
    losses = [value for value in used if value is not None]
    if min(run.steps, len(losses)) < steps or any(one.into == "module" and one.matched for one in run.of(Loaded)):
        return
    third, step = len(losses) // 3, next(run.of(Stepped))
    first, last = sum(losses[:third]) / third, sum(losses[-third:]) / third
    for root in run.roots if last > rest * first else ():
        own = {one.parameter: one for one in parameters_by_root(run).get(root, ()) if one.registered}
        active = [one for number, one in own.items() if number in ever_touched(run) & optimized(run)]
        frozen = [number for number, one in own.items() if not one.requires_grad and len(one.shape) >= 2]
        trained = sum(one.numel for one in active) / max(sum(one.numel for one in own.values()), 1)
        if not active or not frozen or trained > share or any(len(one.shape) >= 2 for one in active):
            continue
        head = own[max(frozen)]
        yield Found(
            text=f"Only {counted(len(active), 'parameter')} of norm layers and biases of {root_variable(run, root)} "
            f"({trained:.1%} of its numbers) are trained; all "
            f"{counted(len(frozen), 'weight matrix', 'weight matrices')} are frozen, {parameter_name(run, head)} of "
            f"the last layer too, and the loss stays at {last:.4g} (it was {first:.4g}).",
            fix=f"{module_code(run, root, head.module)}.requires_grad_(True)  # freeze by module, not by name",
            cause="The condition that freezes parameters matches more than intended.",
            since=step,
            where=NOWHERE,
            parameters=frozen,
            evidence={"trained_share": trained, "trained": len(active), "frozen": len(frozen), "loss": [first, last]},
        )


def _all_frozen(run: Run) -> Iterator[Found]:
    """Optimizers all of whose parameters are frozen, of models in which nothing is trained either."""
    for one in optimizers(run):
        own = {number: run.parameters[number] for number in one.own if number in run.parameters}
        roots = {each.root for each in own.values()}
        whole = [each for each in run.parameters.values() if each.root in roots and each.registered]
        moved = ever_touched(run) | with_gradient(run) | written(run)
        is_idle = moved.isdisjoint(each.parameter for each in (*own.values(), *whole))
        frozen = not any(each.requires_grad for each in (*own.values(), *whole))
        stepped = len(one.steps) >= _FROZEN_STEPS and not any(step.with_grad or step.edited for step in one.steps)
        elsewhere = any(step.with_grad for other in optimizers(run) for step in other.steps)  # a head, or a prompt
        if not own or roots == {-1} or not is_idle or not frozen or not stepped or elsewhere:
            continue
        model = root_variable(run, min(roots))
        yield Found(
            text=f"All {counted(len(own), 'parameter')} that {one} steps ({sum(each.numel for each in own.values()):,} "
            f"numbers of {model}) have requires_grad=False: no gradient reaches any, and no step changes anything.",
            fix=f"{model}.requires_grad_(True), and freeze by module: {model}.backbone.requires_grad_(False)",
            cause="The condition that freezes parameters matches all of them, or the trainable part was not added; "
            "as the input of the model requires a gradient, backward() raises no error.",
            since=one.steps[0],
            where=NOWHERE,
            parameters=sorted(own),
            evidence={"frozen": len(own), "steps": len(one.steps)},
            severity="error",
        )


@rule("AB107", "FREEZE_INEFFECTIVE", "error", explains=STANDS_STILL)
def freeze_ineffective(run: Run) -> Iterator[Found]:
    """Flags that were set on a module."""
    for root in run.roots.values():
        for module in (one for one in root.modules if one.requires_grad is False):
            prefix = f"{module.name}." if module.name else ""
            below = [
                number
                for number in sorted(ever_touched(run) & run.parameters.keys())
                if (one := run.parameters[number]).root == root.root and one.requires_grad
                and (one.module == module.name or one.module.startswith(prefix))
            ]  # fmt: skip
            code, names = module_code(run, root.root, module.name), names_of(run, below)
            if below:
                yield Found(
                    text=f"{code}.requires_grad = False froze nothing: {names} still {names:gets|get} gradients.",
                    fix=f"{code}.requires_grad_(False)",
                    cause="requires_grad is an attribute of tensors; on a module it is a new attribute that nothing "
                    "reads.",
                    since=root,
                    step=next(run.of(Stepped), 0),
                    parameters=below,
                    module=(root.root, module.name),
                    evidence={"parameters": len(below), "elements": sum(run.parameters[one].numel for one in below)},
                )


@rule("AB108", "FROZEN_MOVES", "warning", explains=STANDS_STILL, needs=(Norms,))
def frozen_moves(run: Run, *, samples: float = Limit(3, "fewer may be the end of a warm-up")) -> Iterator[Found]:
    """Parameters without gradient that each step moves."""
    for one in optimizers(run):
        if one.number not in run.optimizers or len(one.samples) < samples:
            continue
        found, since = _drifting(run, one, samples), one.samples[0]
        if not found:
            found, since = _left_out(run, one)
        if not found:
            continue
        group = next(group for group in one.facts.groups if set(found) & set(group.parameters))
        decay, momentum, names = group.weight_decay, group.momentum, names_of(run, found)
        why = (
            f"weight decay of {decay:g}" if decay else "momentum" if momentum else f"the step of {one.facts.cls} itself"
        )
        late, first = since is not one.samples[0], run.parameters[found[0]]
        code = module_code(run, first.root, first.module)
        yield Found(
            text=f"{names} {names:has|have} no gradient{f' since step {since.number}' if late else ''} but "
            f"{names:moves|move}: changed by each step of {one}: by {why}.",
            fix=f"{one}.zero_grad(set_to_none=True)  # a step passes over parameters whose grad is None"
            if late
            else f"{code}.requires_grad_(False)  # and leave it out of {one}, or set its grad to None",
            cause="A gradient of zero is not the same as no gradient: decay and momentum still act on the parameter.",
            since=since,
            step=one.samples[min(one.samples.index(since) + 2, len(one.samples) - 1)].number,
            parameters=found,
            optimizer=one.number,
            evidence={
                "parameters": len(names), "weight_decay": decay, "momentum": momentum, "samples": len(one.samples),
                "weight": [
                    dict(zip(norms.parameters, norms.weight, strict=True)).get(found[0])
                    for norms in (since, one.samples[-1])
                ],
            },
        )  # fmt: skip


def _drifting(run: Run, one: OptimizerView, least: float) -> list[int]:
    """Parameters that had no gradient other than zero in any sample and were changed by at least three steps."""
    own = [number for number in one.groups if number in run.parameters]
    moved: Counter[int] = Counter()
    alive: set[int] = set()
    for sample in one.samples:
        for number, grad, update in zip(sample.parameters, sample.grad, sample.update, strict=True):
            if grad:
                alive.add(number)
            elif update > 0.0 and (grad is not None or not one.facts.is_torchs):
                moved[number] += 1
    still = [number for number in own if number not in alive]
    return [
        number
        for number in (still if len(still) * 2 <= len(own) else ())
        if moved[number] >= max(least, len(one.samples) / 3)
        and (one.groups[number][1].weight_decay or not run.parameters[number].requires_grad)
    ]


def _left_out(run: Run, one: OptimizerView) -> tuple[list[int], Norms]:
    """Parameters that no backward reached from a sample on, while their gradients stayed zeros and they moved."""
    starts: dict[int, int] = {}
    kinds = {sample.parameters for sample in one.samples}  # few, mostly one
    places = {kind: {number: place for place, number in enumerate(kind)} for kind in kinds}
    backwards = [(sample, places[sample.parameters]) for sample in reversed(one.samples)]
    for number in one.groups:
        start = len(one.samples)
        for sample, placed in backwards:
            place = placed.get(number, -1)
            if place < 0 or sample.grad[place] != 0.0 or not sample.update[place] > 0.0:
                break
            start -= 1
        if 0 < start <= len(one.samples) - 2:
            starts[number] = start
    first = min(starts.values(), default=0)
    since = one.samples[first]
    after = [back for back in passes(run) if back.fact.at > since.at]
    reached = frozenset().union(*(back.touched for back in after if back.touched is not None))
    found = sorted(number for number, start in starts.items() if start == first and number not in reached)
    known = len(after) >= 10 and all(back.touched is not None for back in after)
    return (found if known and reached & one.groups.keys() else []), since


@rule("AB109", "TIE_BROKEN", "warning", explains=STANDS_STILL)
def tie_broken(run: Run) -> Iterator[Found]:
    """Embeddings and heads that were one tensor, or should be."""
    seen: set[tuple[int, int]] = set()
    trained = ever_touched(run) & optimized(run)
    for tied in run.of(Tied):
        for pair in tied.differ:
            if pair not in seen and set(pair) <= trained and _pair_of_tie(run, pair):
                seen.add(pair)
                yield _broken(run, pair, tied, "were bitwise equal at the start")
    first = next(run.of(Stepped), None)
    for root in run.roots.values():
        if first is not None and root.config.get("tie_word_embeddings") is True and not seen:
            for pair in _untied(run, root.root, trained):
                yield _broken(run, pair, first, "are tied by the configuration of the model")


def _kind(run: Run, parameter: ParameterFacts) -> str:
    facts = module_facts(run, parameter)
    return facts.kind if facts is not None else ""


def _pair_of_tie(run: Run, pair: tuple[int, int]) -> bool:
    both = [run.parameters[number] for number in pair if number in run.parameters]
    if len(both) < 2 or both[0].root != both[1].root:
        return False
    if run.roots[both[0].root].config.get("tie_word_embeddings") is False:
        return False
    kinds = {_kind(run, one) or one.role for one in both}
    return "embedding" in kinds and bool(kinds & {"linear", "weight"})


def _untied(run: Run, root: int, trained: frozenset[int]) -> list[tuple[int, int]]:
    own = [one for one in parameters_by_root(run).get(root, ()) if one.parameter in trained]
    words = run.roots[root].config.get("vocab_size")
    tables = [
        one for one in own
        if one.role == "embedding" and len(one.names) == 1 and one.shape[0] != one.shape[-1]
        and words in (None, one.shape[0])
    ]  # fmt: skip
    heads = [one for one in own if _kind(run, one) == "linear" and len(one.shape) == 2]
    # The layer that gives the scores comes last.
    return [(a.parameter, b.parameter) for a in tables for b in heads[-1:] if a.shape == b.shape][:1]


def _broken(run: Run, pair: tuple[int, int], since: Tied | Stepped, why: str) -> Found:
    one, two = sorted((run.parameters[number] for number in pair), key=lambda found: found.role != "embedding")
    first, second = (
        module_code(run, found.root, found.name.removeprefix(f"{root_variable(run, found.root)}."))
        for found in (one, two)
    )
    return Found(
        text=f"{one.name} and {two.name} {why}, but are two parameters, and differ after "
        f"{counted(since.step, 'step')}.",
        fix=f"{second} = {first}  # after the last line that makes or moves parameters",
        cause="Something replaced one of the two (a copy, a move to another device, loading), and the tie was lost.",
        since=since,
        where=NOWHERE,
        parameters=pair,
        evidence={"shape": list(one.shape), "elements": two.numel},
    )


@rule("AB110", "WEIGHTS_NOT_LOADED", "warning", explains=STANDS_STILL, needs=(Loaded,))
def weights_not_loaded(
    run: Run, *, share: float = Limit(0.5, "of the entries: a new head is fewer")
) -> Iterator[Found]:
    """Loads with strict=False that match little."""
    for one in run.of(Loaded):
        if one.into != "module" or one.strict or one.of <= 0 or one.matched >= share * one.of or not one.unexpected:
            continue
        hint = _prefix(one.missing, one.unexpected)
        if one.matched and not hint and len(one.unexpected) < one.matched:
            continue
        variable = one.variable or root_variable(run, one.number)
        yield Found(
            text=f"Only {one.matched} of {one.of} entries of {variable} were loaded{near(one)}; the state has "
            f"{listed(one.unexpected, 2)} where {listed(one.missing, 2)} is looked for.",
            fix=hint or f"print({variable}.load_state_dict(state, strict=False)) and rename the keys that do not match",
            cause="With strict=False, keys that do not match are skipped silently.",
            since=one,
            module=variable,
            evidence={"matched": one.matched, "of": one.of, "unexpected": list(one.unexpected[:5])},
            severity="error" if hint or not one.matched else "",
        )


def _prefix(missing: tuple[str, ...], unexpected: tuple[str, ...]) -> str:
    """The code that repairs the names, where a prefix is all that differs."""
    for wanted in missing:
        for got in unexpected:
            if got.endswith(f".{wanted}"):
                prefix = got.removesuffix(wanted)
                return f'state = {{name.removeprefix("{prefix}"): value for name, value in state.items()}}'
            if wanted.endswith(f".{got}"):
                prefix = wanted.removesuffix(got)
                return f'state = {{"{prefix}" + name: value for name, value in state.items()}}'
    return ""


@rule("AB111", "SILENT_WRITE", "info", needs=(Norms,))
def silent_write(run: Run, *, samples: float = Limit(2, "once may be an initialisation")) -> Iterator[Found]:
    """Writes that autograd can't see."""
    trained = optimized(run) & ever_touched(run)
    seen = [(sample, number) for sample in run.of(Norms) for number in sample.silent if number in trained]
    times = Counter(number for _, number in seen)
    numbers = [number for number, count in times.items() if count >= samples]
    if numbers:
        names = names_of(run, numbers)
        yield Found(
            text=f"{names} {names:is|are} written outside of the optimizer's step, through .data or a detached alias, "
            "where autograd can't see it.",
            fix="with torch.no_grad(): write to the parameter itself, after the step and before the next forward",
            cause="A write that does not raise the version of the tensor goes unnoticed by a backward that needs the "
            "old value.",
            since=seen[0][0],
            step=seen[0][0].number,
            parameters=numbers,
            evidence={"parameters": len(names), "samples": max(times.values())},
        )


@rule("AB112", "PARAM_UNUSED", "info", needs=(Stepped, Backward))
def param_unused(
    run: Run, *, steps: float = Limit(5, "some parts are first called late"),
    late: float = Limit(100, "steps, after which a term of the loss that waits would have been added"),
) -> Iterator[Found]:  # fmt: skip
    """Parameters of optimizers that nothing in the loss uses."""
    step = next((one for one in run.of(Stepped) if one.number + 1 >= steps), None)
    uncalled = {one.root: set(one.uncalled) for one in run.of(Activations)}
    idle = _idle(run, uncalled)
    if idle and step is not None:
        names, first = Names(names_of(run, idle)), run.parameters[idle[0]]
        shapes = [list(run.parameters[one].shape) for one in idle]
        again = next((one for one in run.answers("twice") if one.evidence["shape"] in shapes), None)
        lost = next((one for one in run.answers("dropped") if all(s in shapes for s in one.evidence["shapes"])), None)
        after = _taken_instead(run, idle, uncalled)
        for_nothing = run.steps >= late and all(
            _is_computed(run, run.parameters[one]) and not _is_of_the_last_block(run, one, idle) for one in idle
        )
        also = f"; one of the same shape is given the same twice{near(again)}" if again is not None else ""
        also = also or (f"; it is called, and the output of {after} replaces it" if after else "")
        also = also or (
            f"; a number is made of {names:it|them}{near(lost)} and left unused" if lost is not None else ""
        )
        also = also or (f"; {first.module} is still called, and its output is unused" if for_nothing else "")
        fix = f"call {module_code(run, first.root, first.module)} in the forward, or remove it"
        cause = "The module is never called, or its output is in no loss."
        overwritten = lost is not None and bool(lost.evidence["again"])
        forgotten = lost is not None and bool(lost.evidence["is_loss"]) and run.steps >= late
        if overwritten or forgotten:
            fix = "loss = loss + ...  # for each of its terms"
            cause = "Another term replaces it in the loss." if overwritten else "A term is computed and never added."
        elif after:
            fix = "x = layer(x)  # in the loop over the layers: each takes the output of the previous one"
            cause = "Layers that all get the same input leave only the output of the last one."
        elif for_nothing:
            fix = f"use what {module_code(run, first.root, first.module)} gives, or remove it"
            cause = "The name it is assigned to is not the one that is read later, or the sum that contains it is not."
        yield Found(
            text=f"{names} {names:is|are} in the optimizer, but nothing in the loss uses {names:it|them}{also}.",
            fix=fix,
            cause=cause,
            since=step,
            where=again or lost or NOWHERE,
            severity="warning" if again is not None or overwritten or forgotten or after or for_nothing else "",
            step=step.number,
            parameters=idle,
            evidence={"parameters": len(names), "elements": sum(run.parameters[one].numel for one in idle)},
        )


def _idle(run: Run, uncalled: dict[int, set[str]]) -> list[int]:
    unused = unused_names(run)
    return [
        number
        for number in sorted(optimized(run) - with_gradient(run) - written(run))
        if (one := run.parameters.get(number)) is not None
        and one.requires_grad
        and (one.module in uncalled.get(one.root, ()) or one.name in unused)
    ]


def _is_computed(run: Run, one: ParameterFacts) -> bool:
    """Whether a class of the user's calls the module of a parameter, and for what it gives.

    Those of libraries have spare parts; and where a hook takes what is needed, the call goes on to the end.
    """
    samples = [each for each in run.of(Activations) if each.root == one.root]
    called = sum(any(unit.module == one.module for unit in each.modules) for each in samples)
    modules = {each.name: each for each in run.roots[one.root].modules}
    within = one.module.rpartition(".")[0]
    while within and within in modules and modules[within].kind == "container":
        within = within.rpartition(".")[0]
    hooked = any(each.options.get("hooked") and name.startswith(within) for name, each in modules.items())
    return bool(one.module) and called > 1 and within in modules and bool(modules[within].file) and not hooked


def _is_of_the_last_block(run: Run, number: int, idle: list[int]) -> bool:
    """Whether earlier blocks of a stack use the part that this parameter is, and the last has none to hand it to."""
    one = run.parameters[number]
    found = re.match(r"(.*?\b)(\d+)\.(.*)", one.name)
    if found is None:
        return False
    stack, position, rest = found[1], int(found[2]), found[3]
    row: dict[int, dict[str, bool]] = {}
    for other, facts in run.parameters.items():
        if facts.root == one.root and (block := re.match(rf"{re.escape(stack)}(\d+)\.(.*)", facts.name)):
            row.setdefault(int(block[1]), {})[block[2]] = other not in idle
    before = [parts.get(rest, False) for index, parts in row.items() if index != position]
    return position == max(row) and bool(before) and all(before) and any(row[position].values())


def _taken_instead(run: Run, idle: list[int], uncalled: dict[int, set[str]]) -> str:
    """The last layer of a list, where all before it are called and none of them is used."""
    rows: dict[tuple[int, str], dict[int, list[bool]]] = {}
    for number, one in run.parameters.items():
        if found := re.match(r"(.*?\b)(\d+)\.", one.name):
            rows.setdefault((one.root, found[1]), {}).setdefault(int(found[2]), []).append(number in idle)
    for (root, prefix), row in rows.items():
        *before, last = sorted(row)
        called = root in uncalled and not any(one.startswith(prefix) for one in uncalled[root])
        within = all(run.parameters[one].name.startswith(prefix) for one in idle)  # what else is idle has another cause
        own = (
            one.shape for one in run.parameters.values() if one.root == root and one.name.startswith(f"{prefix}{last}.")
        )
        matrices = [shape for shape in own if len(shape) > 1]
        fits = all(matrices[-1][0] % shape[1] == 0 for shape in matrices[:1])  # heads do not take what they give
        if called and within and fits and before and not any(row[last]) and all(all(row[one]) for one in before):
            return f"{prefix}{last}"
    return ""


@rule("AB118", "OPT_STATE_UNUSED", "warning", needs=(Loaded,))
def opt_state_unused(run: Run) -> Iterator[Found]:
    """Optimizers that load and never step."""
    loads = [one for one in run.of(Loaded) if one.into == "optimizer"]
    for load in loads:
        loaded = OptimizerView(run, load.number)
        others = [
            one for one in optimizers(run)
            if one.steps[-1].at > load.at and one.number in run.optimizers
            and one.number not in {other.number for other in loads} and _like(one, loaded)
        ]  # fmt: skip
        if loaded.steps or not others:
            continue
        name, made = load.variable or str(loaded), others[0].facts
        yield Found(
            text=f"The state that {name} is given{near(load)} is never used: another optimizer is "
            f"created{near(made)}, and that one steps.",
            fix="create the optimizer once, and load its state after that",
            cause="The optimizer is re-created after its state was loaded.",
            since=load,
            where=(made.file or load.file, made.line or load.line),
            optimizer=name,
            evidence={"loaded": load.number, "steps": others[0].number},
        )


def _like(one: OptimizerView, other: OptimizerView) -> bool:
    """Whether two optimizers are of one class, with as many parameters."""
    counts = [sum(len(group.parameters) for group in each.facts.groups) for each in (one, other)]
    return other.number not in other.run.optimizers or (one.facts.cls == other.facts.cls and counts[0] == counts[1])
