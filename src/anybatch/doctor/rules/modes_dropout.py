"""Rules of the family modes: dropout that never stops, and dropout that never starts."""

from collections.abc import Iterator
from pathlib import PurePath

from anybatch.doctor.rules.courses import course, updates
from anybatch.doctor.rules.modes_phases import trained_forwards
from anybatch.doctor.rules.naming import at_line, counted, listed, qualified, root_variable, verb
from anybatch.doctor.rules.registry import rule
from anybatch.records.events import DropoutCall, Loaded
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run


def _by_line(run: Run, training: bool) -> dict[tuple[int, str, str, int], list[DropoutCall]]:
    found: dict[tuple[int, str, str, int], list[DropoutCall]] = {}
    for one in run.of(DropoutCall):
        if one.training is training and one.root_training is not training and one.p > 0:
            found.setdefault((one.root, one.module, one.file, one.line), []).append(one)
    return found


def _told(one: DropoutCall) -> str:
    """The call that knows the mode of its module."""
    return f"F.{one.function}(x, {one.p:g}, training=self.training)"


def _in_line(file: str, line: int) -> str:
    return f"  # in line {line} of {PurePath(file).name}" if file else ""


@rule("AB453", "DROPOUT_ALWAYS_ON", "warning", explains=("TRAIN_IN_EVAL",))
def _dropout_always_on(run: Run) -> Iterator[Finding]:
    for (root, module, file, line), found in _by_line(run, True).items():
        one = found[0]
        name = qualified(run, root, module)
        yield Finding(
            message=f"{one.function} (p={one.p:g}) in {name}{at_line(file, line)} drops in evaluation mode as well.",
            place=Place(module=name, file=file, line=line),
            fix=_told(one) + _in_line(file, line),
            cause="The functional form does not know the mode of the module; it has to be told.",
            evidence={"p": one.p, "calls": len(found), "function": one.function},
            step=one.step,
            at=one.at,
        )


@rule("AB454", "DROPOUT_NEVER_ON", "warning")
def _dropout_never_on(run: Run) -> Iterator[Finding]:
    for root, facts in run.roots.items():
        found = trained_forwards(run, root)
        drops = [one.name for one in facts.modules if one.kind == "dropout" and float(one.options.get("p", 0) or 0) > 0]
        if len(found) < 5 or not drops or any(one.training or one.trained for one in found):
            continue
        if len(updates(run)) < 5:
            continue
        first, variable = found[0], root_variable(run, root)
        loaded = any(one.into == "module" and one.number == root for one in run.of(Loaded))
        yield Finding(
            message=f"{variable} is in evaluation mode in all {counted(len(found), 'forward')} that are trained on"
            f"{at_line(first.file, first.line)}: {listed(drops)} never {verb(len(drops), 'drops', 'drop')}.",
            place=Place(module=qualified(run, root, ""), file=first.file, line=first.line),
            fix=f"{variable}.train()  # before the loop",
            cause=f"{variable}.train() was not called"
            + (" after loading." if loaded else ", or eval() was called before the loop."),
            evidence={"forwards": len(found), "dropouts": len(drops)},
            step=found[4].step,
            at=first.at,
        )
    for (root, module, file, line), calls in _by_line(run, False).items():
        if len(calls) < 3:
            continue
        one, name = calls[0], qualified(run, root, module)
        yield Finding(
            message=f"{one.function} (p={one.p:g}) in {name}{at_line(file, line)} does not drop in training mode.",
            place=Place(module=name, file=file, line=line),
            fix=_told(one) + _in_line(file, line),
            cause="It is called with training=False.",
            evidence={"p": one.p, "calls": len(calls)},
            step=calls[2].step,
            at=one.at,
        )


MOST_DROPPED = 0.8
"""Half is the usual most (Srivastava et al., 2014, section A.4: 0.5 to 0.8 is kept)."""


@rule("AB458", "DROPOUT_TOO_HIGH", "warning", explains=("LR_TOO_LOW", "CANNOT_FIT_BATCH"))
def _dropout_too_high(run: Run) -> Iterator[Finding]:
    went = course(run)
    if len(went.finite) < 20 or went.fell or went.diverged:
        return
    for root, facts in run.roots.items():
        high = {
            one.name: float(p)
            for one in facts.modules
            if one.kind == "dropout" and isinstance(p := one.options.get("p"), float) and MOST_DROPPED <= p < 1
        }
        found = trained_forwards(run, root)
        if not high or not found or not all(one.training for one in found):
            continue
        names, p = [qualified(run, root, one) for one in high], max(high.values())
        yield Finding(
            message=f"{listed(names)} {verb(len(names), 'drops', 'drop')} {p:.0%} of what goes in, and the loss does "
            f"not fall ({went.first:.4g} at first, {went.last:.4g} at last).",
            place=Place(module=names[0], file=found[0].file, line=found[0].line),
            fix=f"nn.Dropout(p={round(1 - p, 6):g})  # p is the share that is dropped",
            cause="So little is left of a sample that outputs are mostly noise.",
            evidence={"p": p, "dropouts": len(names), "loss_first": went.first, "loss_last": went.last},
            step=found[0].step,
            at=found[0].at,
        )
