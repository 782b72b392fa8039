"""Rules of the family modes: steps in evaluation mode, and evaluations in training mode."""

from collections.abc import Iterator
from dataclasses import dataclass

from anybatch.doctor.rules.courses import updates
from anybatch.doctor.rules.naming import at_line, counted, listed, qualified, root_variable
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.rules.windows import members, passes
from anybatch.records.events import Backward, Forward, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run, remembered
from anybatch.records.samples import InputSample


@remembered
def trained_forwards(run: Run, root: int) -> list[Forward]:
    """The forwards of a root with gradient that a backward into its optimized parameters followed.

    Args:
        run: the facts.
        root: its number.
    """
    optimized = frozenset().union(*members(run).values())
    if not run.optimizers and updates(run):  # by hand
        optimized = frozenset(number for number, one in run.parameters.items() if one.requires_grad)
    own = frozenset(number for number in optimized if number in run.parameters and run.parameters[number].root == root)
    by_event = {id(one.fact): one for one in passes(run)}
    waiting: list[Forward] = []
    found: list[Forward] = []
    for one in run.facts:
        if isinstance(one, Forward) and one.root == root and one.grad and not one.inference:
            waiting.append(one)
        elif isinstance(one, Backward) and id(one) in by_event:
            if by_event[id(one)].reaches(own):
                found += waiting
            waiting = []
    return found


@rule("AB451", "EVAL_IN_TRAINING", "error", explains=("DROPOUT_NEVER_ON",))
def _eval_in_training(run: Run) -> Iterator[Finding]:
    steps = updates(run)
    for root in run.roots:
        found = trained_forwards(run, root)
        if len(found) < 4 or not found[0].trained:
            continue
        tail: list[Forward] = []
        for one in reversed(found):
            if one.evaluated <= found[0].evaluated or one.trained >= found[0].trained:
                break
            tail.insert(0, one)
        if len(tail) < 3 or sum(at > tail[0].at for at in steps) < 3:
            continue
        first = tail[0]
        whole = not any(one.training for one in tail) and not any(one.trained for one in tail)
        variable = root_variable(run, root)
        if whole and (learning := _learns_from_it(run, root, tail)) is not None:
            yield _as_target(run, root, learning, tail)
            continue
        before = next((one for one in reversed(list(run.of(Forward))) if one.root == root and one.at < first.at), first)
        yield Finding(
            message=f"Since step {first.step} {variable} is trained in evaluation mode"
            f"{at_line(first.file, first.line)}: {listed(first.evaluating)} "
            f"{'was' if first.evaluated == 1 else 'were'} in training mode before.",
            place=Place(module=qualified(run, root, ""), file=first.file, line=first.line),
            fix=f"{variable}.train()  # at the start of each epoch, after the evaluation"
            + at_line(before.file, before.line),
            cause=f"{variable}.eval() was called for an evaluation, and {variable}.train() was not called after it.",
            evidence={"steps": len(tail), "evaluating": list(first.evaluating), "since": first.step},
            step=tail[2].step,
            at=first.at,
            severity="" if whole else "info",
        )


def _learns_from_it(run: Run, root: int, tail: list[Forward]) -> int | None:
    """A model in training mode that is trained beside one in evaluation mode, and was not before."""
    before = max((one.at for one in trained_forwards(run, root) if one.at < tail[0].at), default=0)
    for other in run.roots:
        found = trained_forwards(run, other) if other != root else []
        if len(found) * 2 > len(tail) and found[0].at > before and all(one.training for one in found):
            return other
    return None


def _as_target(run: Run, root: int, learning: int, tail: list[Forward]) -> Finding:
    """A teacher that the optimizer of its student has: it is no evaluation that was forgotten."""
    first, teacher, student = tail[0], root_variable(run, root), root_variable(run, learning)
    target = any(one.target_requires_grad and one.at > first.at for one in run.of(LossCall))
    use = "and is the target of a loss" if target else "which looks like a fixed target"
    return Finding(
        message=f"Since step {first.step} {teacher} is in evaluation mode beside {student}"
        f"{at_line(first.file, first.line)} {use}, and yet it is trained: an optimizer has it.",
        place=Place(module=qualified(run, root, ""), file=first.file, line=first.line),
        fix=f"with torch.no_grad(): around the call of {teacher}{at_line(first.file, first.line)}, and only "
        f"{student}.parameters() in the optimizer",
        cause=f"A target that is trained comes to meet what should learn from it; if {teacher} is to be trained, "
        f"{teacher}.train() belongs before it.",
        evidence={"steps": len(tail), "evaluating": list(first.evaluating), "since": first.step, "beside": student},
        step=tail[2].step,
        at=first.at,
        severity="" if target else "warning",
    )


@dataclass(slots=True)
class _Batch:
    """Forwards without gradient in a row, with no backward, step or forward with gradient between."""

    calls: list[Forward]
    windows: int


@rule("AB452", "TRAIN_IN_EVAL", "warning", explains=("DROPOUT_ALWAYS_ON",))
def _train_in_eval(run: Run) -> Iterator[Finding]:
    for root in run.roots:
        steps = len(trained_forwards(run, root))
        total = len(updates(run))
        batches = _evaluations(run, root)
        if not steps or not total or not batches:
            continue
        long = [one for one in batches if len(one.calls) >= 3]
        if len(batches) * 3 > total or not (long or len(batches) >= 3) or _repeated(run, root):
            continue
        one = (long or batches)[0].calls[0]
        calls = sum(len(batch.calls) for batch in batches)
        variable = root_variable(run, root)
        names = [
            module.name
            for module in run.roots[root].modules
            if module.kind in ("dropout", "batch_norm") and module.name not in one.evaluating
        ]
        yield Finding(
            message=f"{variable} is called without gradient in training mode{at_line(one.file, one.line)}, "
            f"{counted(calls, 'time')}: {listed(names)} {'is' if len(names) == 1 else 'are'} active in the evaluation.",
            place=Place(module=qualified(run, root, ""), file=one.file, line=one.line),
            fix=f"{variable}.eval()  # before the evaluation{at_line(one.file, one.line)}, "
            f"and {variable}.train() after it",
            cause=f"{variable} is in training mode while it is evaluated.",
            evidence={"calls": calls, "evaluations": len(batches), "active": one.trained},
            step=one.step,
            at=one.at,
        )


def _evaluations(run: Run, root: int) -> list[_Batch]:
    """Rows of forwards of a root without gradient and in training mode, after its training has begun."""
    found: list[_Batch] = []
    begun = False
    row: list[Forward] = []

    def close() -> None:
        if row and begun:
            found.append(_Batch(list(row), 1))
        row.clear()

    for one in run.facts:
        if isinstance(one, Stepped):
            close()
            begun = True
        elif isinstance(one, Backward) or (isinstance(one, Forward) and one.root == root and one.grad):
            close()
        elif isinstance(one, Forward) and one.root == root and one.training and one.trained:
            row.append(one)
        elif isinstance(one, Forward) and one.root == root:
            close()
    close()
    return found


def _repeated(run: Run, root: int) -> bool:
    """Whether calls without gradient were made several times on one and the same batch."""
    without = {one.at for one in run.of(Forward) if one.root == root and not one.grad}
    hashes: dict[str, int] = {}
    for sample in run.of(InputSample):
        if sample.forward in without and sample.hash:
            hashes[sample.hash] = hashes.get(sample.hash, 0) + 1
    return any(count >= 3 for count in hashes.values())
