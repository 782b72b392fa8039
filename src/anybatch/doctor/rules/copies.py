"""Rules on copies: target and averaged nets, states that were loaded, and what an evaluation writes to."""

from collections.abc import Iterator

from anybatch.doctor.rules.asked import answers, asked_place, began
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.views.measures import model_name, optimizer_name
from anybatch.doctor.views.naming import at_line, counted, listed, module_code, verb
from anybatch.records.events import Forward, Loaded, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run


@rule("AB115", "COPY_NEVER_UPDATED", "warning")
def copy_never_updated(run: Run) -> Iterator[Finding]:
    """Target nets that stay what they were."""
    found = answers(run, "frozen copy")
    for probed in found[:1]:
        copied, online = _both(run, probed)
        names = listed([_both(run, one)[0] for one in found])
        was = verb(len(found), "was a copy of the trained net", "were copies of the trained nets")
        stays = verb(len(found), "is the same after", "are the same after")
        yield Finding(
            message=f"{names} {was} at the start and {stays} {run.steps} steps: targets are made with the weights of "
            "the beginning.",
            place=_called(run, probed),
            fix=f"{copied}.load_state_dict({online}.state_dict())  # every few hundred steps",
            cause="The copy is made once, or the function that updates it is never called or changes nothing.",
            evidence=probed.evidence,
            at=began(run),
        )


def _both(run: Run, probed: Probed) -> tuple[str, str]:
    """What the user's code calls a copy, and the net that it was a copy of."""
    number, inner = int(probed.evidence["online"]), str(probed.evidence.get("online_module", ""))
    one, other = module_code(run, probed.root, probed.module), module_code(run, number, inner)
    return one or model_name(run, probed.root), other or model_name(run, number)


def _called(run: Run, probed: Probed) -> Place:
    """Where a net is called that never has a gradient."""
    calls = [one for one in run.of(Forward) if one.root == probed.root and one.module == probed.module]
    call = calls[0] if calls else Forward(root=probed.root)
    return Place(module=_both(run, probed)[0], file=call.file, line=call.line)


@rule("AB116", "COPY_BUFFERS_STALE", "warning")
def copy_buffers_stale(run: Run) -> Iterator[Finding]:
    """Averages without the buffers."""
    for probed in answers(run, "copied buffers"):
        copied, online = _both(run, probed)
        yield Finding(
            message=f"{copied} follows the weights of {online} and not its buffers: {probed.evidence['first']} "
            f"({counted(int(probed.evidence['buffers']), 'buffer')}) is what it was at the start.",
            place=_called(run, probed),
            fix=f"for slow, fast in zip({copied}.buffers(), {online}.buffers()): slow.copy_(fast)",
            cause="parameters() has no buffers, and the running statistics of norm layers are buffers.",
            evidence=probed.evidence,
            at=began(run),
        )


@rule("AB117", "STATE_NOT_COPIED", "warning")
def state_not_copied(run: Run) -> Iterator[Finding]:
    """States that are loaded into the tensors they are."""
    for probed in answers(run, "own state"):
        yield Finding(
            message=f"The state that is loaded{at_line(probed.file, probed.line)} is that of the module itself, not a "
            f"copy: all {probed.evidence['tensors']} tensors are its own, and nothing is put back.",
            place=Place(file=probed.file, line=probed.line),
            fix="best = copy.deepcopy(model.state_dict())  # where the state is kept",
            cause="state_dict() gives the live tensors, which go on training.",
            evidence=probed.evidence,
            step=probed.step,
            at=began(run),
        )


@rule("AB118", "OPT_STATE_UNUSED", "warning")
def opt_state_unused(run: Run) -> Iterator[Finding]:
    """Optimizers that load and never step."""
    stepped = {one.optimizer for one in run.of(Stepped)}
    loads = [one for one in run.of(Loaded) if one.into == "optimizer"]
    for load in loads:
        later = [one for one in stepped if any(step.at > load.at for step in run.of(Stepped) if step.optimizer == one)]
        given = {one.number for one in loads}
        others = [
            number for number in later
            if number not in given and number in run.optimizers and _like(run, number, load.number)
        ]  # fmt: skip
        if load.number in stepped or not others:
            continue
        name = load.variable or optimizer_name(run, load.number)
        made = run.optimizers[others[0]]
        yield Finding(
            message=f"The state that {name} is given{at_line(load.file, load.line)} is never used: another optimizer "
            f"is made{at_line(made.file, made.line)}, and that one steps.",
            place=Place(optimizer=name, file=made.file or load.file, line=made.line or load.line),
            fix="make the optimizer once, and load its state behind that",
            cause="The optimizer is made anew after its state was loaded.",
            evidence={"loaded": load.number, "steps": others[0]},
            step=load.step,
            at=load.at,
        )


def _like(run: Run, number: int, other: int) -> bool:
    """Whether two optimizers are of one class, with as many parameters."""
    one, two = run.optimizers[number], run.optimizers.get(other)
    if two is None:
        return True
    counts = [sum(len(group.parameters) for group in each.groups) for each in (one, two)]
    return one.cls == two.cls and counts[0] == counts[1]


@rule("AB459", "EVALUATION_WRITES", "warning")
def evaluation_writes(run: Run) -> Iterator[Finding]:
    """Forwards in evaluation mode that write."""
    for probed in answers(run, "written in evaluation"):
        names = listed([str(one) for one in probed.evidence["names"]])
        yield Finding(
            message=f"{model_name(run, probed.root)} changes {names} in evaluation, too"
            f"{at_line(probed.file, probed.line)}.",
            place=asked_place(run, probed),
            fix="if self.training:  # in front of the lines of forward that write to it",
            cause="The forward updates it in both modes, so that the validation data become a part of the model.",
            evidence=probed.evidence,
            at=began(run),
        )
