"""Rules on copies: target and averaged nets, states that were loaded, and what an evaluation writes to."""

from collections.abc import Iterator

from anybatch.doctor.rules.registry import NOWHERE, Found, rule
from anybatch.doctor.views.asked import answers
from anybatch.doctor.views.naming import Names, counted, module_code, near, verb
from anybatch.doctor.views.optimizing import OptimizerView, optimizers
from anybatch.records.events import Forward, Loaded
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run


def _both(run: Run, probed: Probed) -> tuple[str, str]:
    """What the user's code calls a copy, and the net that it was a copy of."""
    number, inner = int(probed.evidence["online"]), str(probed.evidence.get("online_module", ""))
    return module_code(run, probed.root, probed.module), module_code(run, number, inner)


def _called(run: Run, probed: Probed) -> Forward | None:
    """The first call of a net that never has a gradient."""
    calls = (one for one in run.of(Forward) if one.root == probed.root and one.module == probed.module)
    return next(calls, None)


@rule("AB115", "COPY_NEVER_UPDATED", "warning", needs=(Probed,))
def copy_never_updated(run: Run) -> Iterator[Found]:
    """Target nets that stay what they were."""
    found = answers(run, "frozen copy")
    for probed in found[:1]:
        copied, online = _both(run, probed)
        names = Names(_both(run, one)[0] for one in found)
        was = verb(len(found), "was a copy of the trained net", "were copies of the trained nets")
        yield Found(
            text=f"{names} {was} at the start and {names:is|are} the same after {run.steps} steps: targets are made "
            "with the weights of the beginning.",
            fix=f"{copied}.load_state_dict({online}.state_dict())  # every few hundred steps",
            cause="The copy is made once, or the function that updates it is never called or changes nothing.",
            since=probed,
            where=_called(run, probed) or NOWHERE,
            module=copied,
        )


@rule("AB119", "COPY_TOO_CLOSE", "warning", needs=(Probed,))
def copy_too_close(run: Run) -> Iterator[Found]:
    """Averages that are the net itself."""
    for probed in answers(run, "close copy"):
        copied, online = _both(run, probed)
        share = float(probed.evidence["share"])
        yield Found(
            text=f"{copied} takes about {share:.3g} of {online} at each step and keeps {max(1 - share, 0):.2g} of "
            "itself: it is no slow average, but nearly the trained net.",
            fix=f"slow.mul_(decay).add_(fast, alpha=1 - decay)  # with decay = {max(round(share, 3), 0.9):.3g}"
            if share < 0.9999
            else f"{copied}.load_state_dict({online}.state_dict())  # every few hundred steps only, or an average",
            cause="The decay and one minus the decay have changed places, or the copy is made anew at every step.",
            since=probed,
            where=_called(run, probed) or NOWHERE,
            module=copied,
        )


@rule("AB116", "COPY_BUFFERS_STALE", "warning", needs=(Probed,))
def copy_buffers_stale(run: Run) -> Iterator[Found]:
    """Averages without the buffers."""
    for probed in answers(run, "copied buffers"):
        copied, online = _both(run, probed)
        yield Found(
            text=f"{copied} follows the weights of {online} and not its buffers: {probed.evidence['first']} "
            f"({counted(int(probed.evidence['buffers']), 'buffer')}) is what it was at the start.",
            fix=f"for slow, fast in zip({copied}.buffers(), {online}.buffers()): slow.copy_(fast)",
            cause="parameters() has no buffers, and the running statistics of norm layers are buffers.",
            since=probed,
            where=_called(run, probed) or NOWHERE,
            module=copied,
        )


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
            text=f"The state that {name} is given{near(load)} is never used: another optimizer is made{near(made)}, "
            "and that one steps.",
            fix="make the optimizer once, and load its state after that",
            cause="The optimizer is made anew after its state was loaded.",
            since=load,
            where=(made.file or load.file, made.line or load.line),
            optimizer=name,
            evidence={"loaded": load.number, "steps": others[0].number},
        )


def _like(one: OptimizerView, other: OptimizerView) -> bool:
    """Whether two optimizers are of one class, with as many parameters."""
    counts = [sum(len(group.parameters) for group in each.facts.groups) for each in (one, other)]
    return other.number not in other.run.optimizers or (one.facts.cls == other.facts.cls and counts[0] == counts[1])
