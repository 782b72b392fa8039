"""Rules on what targets and inputs hold: labels without relation, constant targets, a comparison with itself."""

from collections.abc import Iterator
from statistics import fmean

from anybatch.doctor.rules.asked import answers, asked_place, began
from anybatch.doctor.rules.loss import by_line, loss_place
from anybatch.doctor.rules.outcomes import outcome
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.views.measures import model_name, optimizer_name
from anybatch.doctor.views.naming import at_line
from anybatch.records.draws import Scored
from anybatch.records.events import Epoch, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run

_CALLS = 8
_MOST_CLASSES = 50
_ENOUGH_STEPS = 50
_ENOUGH_TARGETS = 3000
_OF_TRUTH = ("binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss")


@rule("AB655", "EVALUATION_INPUTS", "warning")
def evaluation_inputs(run: Run) -> Iterator[Finding]:
    """Inputs that are not prepared in evaluation as in training."""
    for probed in answers(run, "evaluated inputs"):
        seen = probed.evidence
        yield Finding(
            message=f"{model_name(run, probed.root)} is evaluated on inputs of mean {seen['mean_evaluated']:.3g} and "
            f"standard deviation {seen['std_evaluated']:.3g}{at_line(probed.file, probed.line)}, and trained on "
            f"{seen['mean']:.3g} and {seen['std']:.3g}.",
            place=asked_place(run, probed),
            fix="give the data of the evaluation the transforms of the training, but for augmentation",
            cause="A step of the preprocessing is made for one of the two only.",
            evidence=seen,
            at=began(run),
        )


@rule("AB656", "LABELS_UNRELATED", "warning", explains=("CANNOT_FIT_BATCH", "LOSS_CONSTANT", "INPUT_IGNORED"))
def labels_unrelated(run: Run) -> Iterator[Finding]:
    """Labels of other inputs."""
    yield from _terms_apart(run)
    for probed in answers(run, "labels"):
        if outcome(run).word == "learning" and not _flat_at_first(run):
            continue
        seen = probed.evidence
        call = next((one for one in run.of(LossCall) if one.root == probed.root), None)
        yield Finding(
            message=f"The labels have nothing to do with the inputs of {model_name(run, probed.root)}, as far as "
            f"{seen['samples']} samples show: a copy fitted to two thirds of them has a loss of {seen['held_out']:.4g} "
            f"on the others, and a constant guess one of {seen['guess']:.4g}.",
            place=loss_place(run, call) if call is not None else asked_place(run, probed),
            fix="order = torch.randperm(len(x)); x, y = x[order], y[order]  # one order for both, wherever they are "
            "shuffled, sorted or filtered",
            cause="Inputs and labels were put in order apart from each other, or labels belong to other rows.",
            evidence=seen,
            at=began(run),
        )


def _terms_apart(run: Run) -> Iterator[Finding]:
    """Terms of a loss that is learned otherwise, which are the same with the targets of other rows."""
    if outcome(run).word != "learning" or any(run.of(Scored)):
        return
    for probed in answers(run, "related"):
        steps = sum(one.optimizer == probed.evidence["optimizer"] for one in run.of(Stepped))
        for term in probed.evidence.get("apart", ()):
            if steps < _ENOUGH_STEPS or steps * int(probed.evidence["rows"]) < _ENOUGH_TARGETS:
                continue
            yield Finding(
                message=f"{term['op']}{at_line(term['file'], term['line'])} is {term['loss']:.4g} after {steps} steps, "
                f"and {term['others']:.4g} with the targets of other rows: they have nothing to do with the inputs.",
                place=Place(file=term["file"], line=term["line"]),
                fix="order = torch.randperm(len(x)); x, y = x[order], y[order]  # one order for both",
                cause="Inputs and targets of this term were put in order apart from each other.",
                evidence=term,
                at=began(run),
            )


def _flat_at_first(run: Run) -> bool:
    """Whether the loss of the first pass over the data stays at a constant guess."""
    epochs = [one.at for one in run.of(Epoch)]
    end = epochs[0] if epochs else run.facts[-1].at // 3
    first = [one for one in run.of(LossCall) if one.at < end and one.value is not None and one.guess]
    late = first[len(first) // 2 :]
    return len(late) >= 3 and fmean((one.value or 0.0) / (one.guess or 1.0) for one in late) > 0.95


@rule("AB657", "FIELD_UNREAD", "warning")
def field_unread(run: Run) -> Iterator[Finding]:
    """Ends and masks that nothing reads."""
    for probed in answers(run, "unread field"):
        name = str(probed.evidence["name"])
        is_mask = bool(probed.evidence.get("mask"))
        yield Finding(
            message=f"{name} is given a value{at_line(probed.file, probed.line)} and read by nothing: "
            + ("the loss is taken over what it leaves out." if is_mask else "the targets go on behind the last state."),
            place=Place(file=probed.file, line=probed.line),
            fix=f"weigh the loss with it, and divide by {name}.sum()" if is_mask
            else f"... + gamma * next_value * (1 - {name}), with {name} as float",
            cause="It was unpacked and then left out of the formula.",
            evidence=probed.evidence,
            at=began(run),
        )  # fmt: skip


@rule("AB612", "TARGETS_CONSTANT", "warning")
def targets_constant(run: Run) -> Iterator[Finding]:
    """Predictions that are all compared with one value."""
    yield from _told_one_thing(run)
    yield from list(_of_one_class(run)) or _all_alike(run)


def _told_one_thing(run: Run) -> Iterator[Finding]:
    windows: dict[int, list[list[LossCall]]] = {}
    calls: list[LossCall] = []
    for one in run.facts:
        if isinstance(one, LossCall):
            calls.append(one)
        elif isinstance(one, Stepped):
            windows.setdefault(one.optimizer, []).append(calls)
            calls = []
    for number, found in windows.items():
        known = [window for window in found if window and all(one.target_mean is not None for one in window)]
        if len(known) < 3 or len(found) < 2 * _CALLS:
            continue
        first = known[0][0]
        same = all(
            one.function in _OF_TRUTH and not one.target_std and one.target_mean == first.target_mean
            for window in known
            for one in window
        )
        several = all(len(window) >= 2 for window in found)
        is_residual = first.function == "mse_loss" and not first.target_mean
        if same and several and not is_residual and _vanishes(found):
            yield Finding(
                message=f"All {len(known[0])} losses for which {optimizer_name(run, number)} steps compare with "
                f"{first.target_mean:g}, at each step: nothing tells the inputs apart.",
                place=loss_place(run, known[0][-1]),
                fix="torch.zeros_like(...) as the target of one of them",
                cause="The same constant is given as the target of both kinds of inputs.",
                evidence={"value": first.target_mean, "calls": len(known[0])},
                step=first.step,
                at=first.at,
            )


def _vanishes(windows: list[list[LossCall]]) -> bool:
    losses = [sum(one.value or 0.0 for one in window) for window in windows]
    third = len(losses) // 3
    return fmean(losses[-third:]) < 0.5 * fmean(losses[: max(third // 3, 1)])


def _of_one_class(run: Run) -> Iterator[Finding]:
    for same in by_line(run, lambda one: one.function in ("cross_entropy", "nll_loss")).values():
        known = [one for one in same if one.target_classes >= 0 and one.value is not None]
        if len(known) < 2 * _CALLS or not 1 < known[0].classes <= _MOST_CLASSES:
            continue
        is_one = all(one.target_classes == 1 and one.target_mean == known[0].target_mean for one in known)
        if is_one and (known[-1].value or 0.0) < 0.1 * (known[0].value or 0.0):
            yield Finding(
                message=f"All targets of {known[0].function} in the run are of class {known[0].target_mean or 0:g}.",
                place=loss_place(run, known[0]),
                fix="print(y.unique(return_counts=True))  # where the labels are made",
                cause="The labels were lost on the way, or the data hold one class only.",
                evidence={"calls": len(known)},
                step=known[0].step,
                at=known[0].at,
            )


def _all_alike(run: Run) -> Iterator[Finding]:
    probed = outcome(run).unrelated
    if probed is not None and probed.evidence.get("alike"):
        yield Finding(
            message=f"All {probed.evidence['rows']} targets of a batch are the same{at_line(probed.file, probed.line)}"
            ", and what was learned is that one value.",
            place=Place(file=probed.file, line=probed.line),
            fix="print(y.unique(return_counts=True))  # where the targets are made",
            cause="The targets were lost on the way, or the data hold one kind only.",
            evidence=probed.evidence,
            at=began(run),
        )


@rule("AB613", "LOSS_OF_ITSELF", "warning", explains=("LOSS_TERM_CUT", "LOSS_CONSTANT"))
def loss_of_itself(run: Run) -> Iterator[Finding]:
    """Terms that are always 0."""
    for probed in answers(run, "itself")[:1]:
        yield Finding(
            message=f"{probed.evidence['op']}{at_line(probed.file, probed.line)} compares a tensor with itself: both "
            "sides are equal in each entry, and the term is always 0.",
            place=Place(file=probed.file, line=probed.line),
            fix="compare the prediction of the model that is trained with the target",
            cause="The same tensor is on both sides, or one that was made in the same way.",
            evidence=probed.evidence,
            at=0,
        )
