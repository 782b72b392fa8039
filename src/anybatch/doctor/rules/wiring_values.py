"""Rules of the family wiring: tied, loaded and silently written values, and parameters that nothing uses."""

from collections.abc import Iterator

from anybatch.doctor.rules.naming import (
    at_line,
    counted,
    listed,
    module_code,
    module_facts,
    names_of,
    place_of,
    root_variable,
    verb,
)
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import ever_touched, members, with_gradient, written
from anybatch.records.events import Backward, Loaded, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import Followed
from anybatch.records.paths import Paths
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, Norms, Tied
from anybatch.records.tables import ParameterFacts


@rule("AB109", "TIE_BROKEN", "warning")
def _tie_broken(run: Run) -> Iterator[Finding]:
    seen: set[tuple[int, int]] = set()
    trained = ever_touched(run) & frozenset().union(*members(run).values())
    for tied in run.of(Tied):
        for pair in tied.differ:
            if pair in seen or not set(pair) <= trained or not _pair_of_tie(run, pair):
                continue
            seen.add(pair)
            yield _broken(run, pair, tied.step, tied.at, "were bitwise equal at the start")
    first = next(run.of(Stepped), None)
    for root in run.roots.values():
        if first is not None and root.config.get("tie_word_embeddings") is True and not seen:
            for pair in _untied(run, root.root, trained):
                yield _broken(run, pair, first.step, first.at, "are tied by the configuration of the model")


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
    own = [one for one in run.parameters.values() if one.root == root and one.parameter in trained]
    tables = [one for one in own if one.role == "embedding" and len(one.names) == 1]
    words = run.roots[root].config.get("vocab_size")
    tables = [one for one in tables if one.shape[0] != one.shape[-1] and words in (None, one.shape[0])]
    heads = [one for one in own if _kind(run, one) == "linear" and len(one.shape) == 2]
    heads = heads[-1:]  # the layer that gives the scores comes last
    return [(a.parameter, b.parameter) for a in tables for b in heads if a.shape == b.shape][:1]


def _broken(run: Run, pair: tuple[int, int], step: int, at: int, why: str) -> Finding:
    one, two = sorted((run.parameters[number] for number in pair), key=lambda found: found.role != "embedding")
    first, second = (
        module_code(run, found.root, found.name.removeprefix(f"{root_variable(run, found.root)}."))
        for found in (one, two)
    )
    return Finding(
        message=f"{one.name} and {two.name} {why}, but are two parameters, and differ after {counted(step, 'step')}.",
        place=place_of(run, pair),
        fix=f"{second} = {first}  # after the last line that makes or moves parameters",
        cause="Something replaced one of the two (a copy, a move to another device, loading), and the tie was lost.",
        evidence={"shape": list(one.shape), "numbers": two.numel},
        step=step,
        at=at,
    )


@rule("AB110", "WEIGHTS_NOT_LOADED", "warning", explains=("LR_TOO_LOW",))
def _weights_not_loaded(run: Run) -> Iterator[Finding]:
    for one in run.of(Loaded):
        if one.into != "module" or one.strict or one.of <= 0 or one.matched * 2 >= one.of or not one.unexpected:
            continue
        hint = _prefix(one.missing, one.unexpected)
        if one.matched and not hint and len(one.unexpected) < one.matched:
            continue
        variable = one.variable or root_variable(run, one.number)
        yield Finding(
            message=f"Only {one.matched} of {one.of} entries of {variable} were loaded{at_line(one.file, one.line)}; "
            f"the state has {listed(one.unexpected, 2)} where {listed(one.missing, 2)} is looked for.",
            place=Place(module=variable, file=one.file, line=one.line),
            fix=hint or f"print({variable}.load_state_dict(state, strict=False)) and rename the keys that do not match",
            cause="With strict=False, keys that do not match are passed over without a word.",
            evidence={"matched": one.matched, "of": one.of, "unexpected": list(one.unexpected[:5])},
            step=one.step,
            at=one.at,
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


@rule("AB111", "SILENT_WRITE", "info")
def _silent_write(run: Run) -> Iterator[Finding]:
    trained = frozenset().union(*members(run).values()) & ever_touched(run)
    found: dict[int, int] = {}
    first: Norms | None = None
    for sample in run.of(Norms):
        for number in set(sample.silent) & trained:
            found[number] = found.get(number, 0) + 1
            first = first or sample
    numbers = [number for number, times in found.items() if times >= 2]
    if not numbers or first is None:
        return
    names = names_of(run, numbers)
    yield Finding(
        message=f"{listed(names)} {verb(len(names), 'is', 'are')} written outside of the optimizer's step, through "
        ".data or a detached alias, where autograd can't see it.",
        place=place_of(run, numbers),
        fix="with torch.no_grad(): write to the parameter itself, after the step and before the next forward",
        cause="A write that does not raise the version of the tensor can't be noticed by a backward that needs the "
        "old value.",
        evidence={"parameters": len(names), "samples": max(found.values())},
        step=first.number,
        at=first.at,
    )


@rule("AB112", "PARAM_UNUSED", "info")
def _param_unused(run: Run) -> Iterator[Finding]:
    step = next((one for one in run.of(Stepped) if one.number >= 4), None)
    if step is None or not any(True for _ in run.of(Backward)):
        return
    moved, touched = written(run), with_gradient(run)
    uncalled = {one.root: set(one.uncalled) for one in run.of(Activations)}
    unused = unused_names(run)
    idle = [
        number
        for number in sorted(frozenset().union(*members(run).values()) - touched - moved)
        if (one := run.parameters.get(number)) is not None
        and one.requires_grad
        and (one.module in uncalled.get(one.root, ()) or one.name in unused)
    ]
    if not idle:
        return
    names = names_of(run, idle)
    root = run.parameters[idle[0]].root
    yield Finding(
        message=f"{listed(names)} {verb(len(names), 'is', 'are')} in the optimizer, but nothing in the loss uses "
        f"{verb(len(names), 'it', 'them')}.",
        place=place_of(run, idle),
        fix=f"call {module_code(run, root, run.parameters[idle[0]].module)} in the forward, or take it out",
        cause="The module was never called, or its output is in no loss.",
        evidence={"parameters": len(names), "numbers": sum(run.parameters[one].numel for one in idle)},
        step=step.number,
        at=step.at,
    )


def unused_names(run: Run) -> frozenset[str]:
    """Names of parameters of which an iteration that was followed has seen that nothing, or no loss, uses them.

    Args:
        run: the facts.
    """
    found: set[str] = set()
    for one in run.of(Followed):
        found.update(one.unused)
        if one.paths:
            stopped = Paths.from_dict(one.paths).stopped
            found.update(name for name, stop in stopped.items() if stop.op in ("unused", "left out"))
    return frozenset(found)
