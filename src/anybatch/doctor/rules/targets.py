"""Rules on what targets and inputs hold: labels without relation, constant targets, a comparison with itself."""

from collections.abc import Iterator
from statistics import fmean

from anybatch.doctor.rules.registry import Found, Limit, rule
from anybatch.doctor.views.asked import answers
from anybatch.doctor.views.losses import by_line
from anybatch.doctor.views.naming import first_call, near, root_variable
from anybatch.doctor.views.optimizing import OptimizerView
from anybatch.doctor.views.outcomes import ENOUGH_STEPS, ENOUGH_TARGETS, outcome
from anybatch.records.draws import Scored
from anybatch.records.events import Epoch, Stepped
from anybatch.records.findings import Place
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.runs import Run

_LOOKS, _TARGETS = 5, 100
"""So many calls, and targets in them, are looked at before all are said to be of one class."""

_OF_TRUTH = ("binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss")


@rule("AB655", "EVALUATION_INPUTS", "warning", needs=(Probed,))
def evaluation_inputs(run: Run) -> Iterator[Found]:
    """Inputs that are not prepared in evaluation as in training."""
    for probed in answers(run, "evaluated inputs"):
        seen = probed.evidence
        yield Found(
            text=f"{root_variable(run, probed.root)} is evaluated on inputs of mean {seen['mean_evaluated']:.3g} and "
            f"standard deviation {seen['std_evaluated']:.3g}{near(probed)}, and trained on {seen['mean']:.3g} and "
            f"{seen['std']:.3g}.",
            fix="give the data of the evaluation the transforms of the training, but for augmentation",
            cause="A step of the preprocessing is made for one of the two only.",
            since=probed,
        )


@rule("AB656", "LABELS_UNRELATED", "warning", explains=("CANNOT_FIT_BATCH", "LOSS_CONSTANT", "INPUT_IGNORED"))
def labels_unrelated(
    run: Run, *, flat: float = Limit(0.95, "of a constant guess, in the first pass over the data")
) -> Iterator[Found]:
    """Labels of other inputs."""
    yield from _terms_apart(run)
    for probed in answers(run, "labels"):
        word = outcome(run).word
        if (word == "learning" and not _at_first(run) > flat) or (
            probed.evidence.get("fresh") and word != "not learning"
        ):
            continue
        seen, call = probed.evidence, next((one for one in run.of(LossCall) if one.root == probed.root), None)
        yield Found(
            text=f"The labels have nothing to do with the inputs of {root_variable(run, probed.root)}, as far as "
            f"{seen['samples']} samples show: a copy fitted to two thirds of them has a loss of {seen['held_out']:.4g} "
            f"on the others, and a constant guess one of {seen['guess']:.4g}.",
            fix="order = torch.randperm(len(x)); x, y = x[order], y[order]  # one order for both, wherever they are "
            "shuffled, sorted or filtered",
            cause="Inputs and labels were put in order apart from each other, or labels belong to other rows.",
            since=probed,
            where=call,
        )


def _terms_apart(run: Run) -> Iterator[Found]:
    """Terms of a loss that is learned otherwise, which are the same with the targets of other rows."""
    for probed in answers(run, "related") if outcome(run).word == "learning" and not any(run.of(Scored)) else ():
        steps = len(OptimizerView(run, int(probed.evidence["optimizer"])).steps)
        enough = steps >= ENOUGH_STEPS and steps * int(probed.evidence["rows"]) >= ENOUGH_TARGETS
        for term in probed.evidence.get("apart", ()) if enough else ():
            place = Place(file=term["file"], line=term["line"])
            yield Found(
                text=f"{term['op']}{near(place)} is {term['loss']:.4g} after {steps} steps, and {term['others']:.4g} "
                "with the targets of other rows: they have nothing to do with the inputs.",
                fix="order = torch.randperm(len(x)); x, y = x[order], y[order]  # one order for both",
                cause="Inputs and targets of this term were put in order apart from each other.",
                since=probed,
                step=0,
                where=place,
                evidence=term,
            )


def _at_first(run: Run) -> float:
    """The loss at the end of the first pass over the data, as a share of that of a constant guess."""
    end = next((one.at for one in run.of(Epoch)), run.facts[-1].at // 3)
    first = [(one.value, one.guess) for one in run.of(LossCall) if one.at < end and one.value is not None and one.guess]
    late = first[len(first) // 2 :]
    return fmean(value / guess for value, guess in late if guess) if len(late) >= 3 else 0.0


_UNREAD = {
    "mask": ("the loss is taken over what it leaves out", "weigh the loss with it, and divide by {name}.sum()"),
    "end": (
        "the targets go on behind the last state",
        "... + gamma * next_value * (1 - {name}), with {name} as float",
    ),
    "action": (
        "the value of the best action is trained, whatever was done",
        "q = net(state).gather(1, {name}.unsqueeze(1)).squeeze(1)",
    ),
}
"""What a field is for that nothing reads, and how it is used."""


@rule("AB657", "FIELD_UNREAD", "warning", needs=(Probed,))
def field_unread(run: Run) -> Iterator[Found]:
    """Ends and masks that nothing reads."""
    for probed in answers(run, "unread field"):
        name, (text, fix) = probed.evidence["name"], _UNREAD[str(probed.evidence.get("kind", "end"))]
        yield Found(
            text=f"{name} is given a value{near(probed)} and read by nothing: {text}.",
            fix=fix.format(name=name),
            cause="It was unpacked and then left out of the formula.",
            since=probed,
        )


@rule("AB617", "CLASS_WEIGHTS_SWAPPED", "warning", needs=(Probed,))
def class_weights_swapped(run: Run) -> Iterator[Found]:
    """Weights that make frequent classes count more."""
    for probed in answers(run, "class weights"):
        seen = probed.evidence
        yield Found(
            text=f"The class with {seen['most_targets']:.0f} targets in a batch has the weight "
            f"{seen['most_weight']:.3g}{near(probed)}, and that with {seen['least_targets']:.0f} the weight "
            f"{seen['least_weight']:.3g}: rare classes count even less than without weights.",
            fix="weight = len(targets) / (classes * torch.bincount(targets, minlength=classes))  # in order of classes",
            cause="The weights are not in the order of the classes, or are frequencies instead of their inverse.",
            since=probed,
        )


@rule("AB671", "TARGET_DRAWN", "warning", explains=("NOT_LEARNING", "LOSS_CONSTANT"), needs=(Probed,))
def target_drawn(run: Run) -> Iterator[Found]:
    """Noise that is to be predicted, and is in no input."""
    if outcome(run).word == "learning":
        return
    for probed in answers(run, "drawn targets")[:1]:
        yield Found(
            text=f"{probed.evidence['op']}{near(probed)} compares a prediction with random numbers that no input was "
            "made with: nothing of them can be predicted but their mean.",
            fix="draw the noise once, and give the same tensor to what adds it and to the loss",
            cause="The noise was drawn a second time for the loss, or for the input.",
            since=probed,
        )


@rule("AB670", "WEIGHED_LATE", "warning", needs=(Probed,))
def weighed_late(run: Run) -> Iterator[Found]:
    """Numbers of rows that meet the mean over the rows."""
    for probed in answers(run, "weighed late")[:1]:
        seen, by = probed.evidence, str(probed.evidence["by"])
        is_loss = by not in ("mean", "sum")
        yield Found(
            text=f"What is multiplied{near(probed)} with {seen['entries']} numbers is one already, the "
            f"{f'{by} of' if not is_loss else 'mean that ' + by + ' takes over'} {seen['rows']} rows: every row counts "
            "the same, whatever its number is.",
            fix=f"{by}(..., reduction='none'), and the mean behind the product"
            if is_loss
            else f"(values * numbers).{by}(): first the product, then the {by}",
            cause="Weights, masks and returns belong to single rows, and have to meet them before they are added up.",
            since=probed,
        )


@rule("AB614", "TARGET_GIVEN", "warning", needs=(Probed,))
def target_given(run: Run) -> Iterator[Found]:
    """Targets that are among the inputs."""
    for probed in answers(run, "target given")[:1]:
        seen = probed.evidence
        yield Found(
            text=f"The target{near(probed)} is, in each row, number {seen['place']} of the {seen['of']} numbers that "
            "are given beside it: the model only has to copy it.",
            fix="cut the inputs off before what is to be predicted: x[:, :-1], y[:, -1]",
            cause="The window of the inputs reaches as far as the target, or the column of the targets is a feature.",
            since=probed,
        )


@rule("AB659", "AXES_TORN", "warning", explains=("ROWS_TORN", "BATCH_MIXING", "LABELS_UNRELATED"), needs=(Probed,))
def axes_torn(run: Run) -> Iterator[Found]:
    """Axes that change places by a reshape."""
    for probed in answers(run, "axes")[:1]:
        before, after = (" x ".join(map(str, probed.evidence[one])) for one in ("before", "after"))
        yield Found(
            text=f"What has the axes {before} is read as {after}{near(probed)}: a reshape leaves the entries in their "
            "order, so that each axis holds pieces of the others.",
            fix="x.permute(...) or x.transpose(...) in place of reshape or view where axes change places",
            cause="reshape and view change where an axis is cut, and not which axis comes first.",
            since=probed,
        )


@rule("AB660", "PADDING_COUNTED", "warning", needs=(Probed,))
def padding_counted(run: Run) -> Iterator[Found]:
    """Losses over what only fills up."""
    for probed in answers(run, "padding"):
        call = next((one for one in run.of(LossCall) if one.root == probed.root), None)
        seen = probed.evidence
        yield Found(
            text=f"{seen['share']:.0%} of the targets of {call.function if call else 'the loss'} stand where the input "
            f"is padding, and count: they are all {seen['value']}.",
            fix=f"ignore_index={seen['value']}, or -100 as the target of what is padding",
            cause="The loss does not know which of the targets are there to make rows equally long.",
            since=call or probed,
            evidence=seen,
        )


@rule(
    "AB661", "PADDING_READ", "warning", needs=(Probed,), slows=True,
    explains=("VANISHING", "INPUT_IGNORED", "CANNOT_FIT_BATCH", "LR_TOO_LOW", "LOSS_CONSTANT"),
)  # fmt: skip
def padding_read(run: Run) -> Iterator[Found]:
    """Outputs that change with what only fills up."""
    for probed in answers(run, "padding read"):
        seen = probed.evidence
        yield Found(
            text=f"{seen['share']:.0%} of the tokens that {root_variable(run, probed.root)} is given only fill the "
            "rows up, and its output changes with how many they are.",
            fix="out[torch.arange(len(x)), lengths - 1] or pack_padded_sequence in place of out[:, -1]; "
            "(h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) in place of h.mean(1); "
            "src_key_padding_mask=x == 0 for attention",
            cause="What is read at the end of a row, or averaged over it, is that of padding.",
            since=probed,
            where=first_call(run, probed.root),
            evidence=seen,
        )


@rule("AB615", "CTC_TARGETS", "error", needs=(Probed,))
def ctc_targets(run: Run) -> Iterator[Found]:
    """Blanks among the targets of a CTC loss, and targets that are too long."""
    for probed in answers(run, "blank")[:1]:
        seen = probed.evidence
        yield Found(
            text=f"{seen['blanks']} targets of the CTC loss{near(probed)} are {seen['blank']}, which is the blank: it "
            "stands for no symbol and can't be one."
            if seen["blanks"]
            else f"{seen['too_long']} of {seen['rows']} targets of the CTC loss{near(probed)} are longer than the "
            "input that they are aligned with: their loss is infinite, or counts as 0.",
            fix="number the symbols from 1 on, with blank=0; or blank=len(symbols)"
            if seen["blanks"]
            else "input_lengths in frames of the log-probabilities, and target_lengths in symbols",
            cause="The symbols were numbered without room for the blank, or both lengths have changed places.",
            since=probed,
        )


@rule("AB616", "SEVERAL_CLASSES", "warning", explains=("LR_TOO_LOW", "LOSS_CONSTANT"), needs=(Probed,))
def several_classes(run: Run) -> Iterator[Found]:
    """Targets that mark several classes, for a loss that takes one."""
    for probed in answers(run, "several classes"):
        seen = probed.evidence
        calls = (one for one in run.of(LossCall) if one.root == probed.root and one.function == "cross_entropy")
        yield Found(
            text=f"The targets of cross_entropy mark {seen['least']} to {seen['most']} classes of a row, and it takes "
            "one: its softmax has the classes of a row push each other away.",
            fix="F.binary_cross_entropy_with_logits(scores, y)",
            cause="Classes that may be there together each need a sigmoid of their own.",
            since=next(calls, probed),
            evidence=seen,
        )


@rule("AB612", "TARGETS_CONSTANT", "warning")
def targets_constant(
    run: Run, *, steps: float = Limit(16, "so many alike are no chance"),
    classes: float = Limit(50, "of more a batch may have one"), gone: float = Limit(0.9, "of the loss"),
) -> Iterator[Found]:  # fmt: skip
    """Predictions that are all compared with one value."""
    yield from _told_one_thing(run, steps)
    yield from list(_of_one_class(run, steps, classes, gone)) or _all_alike(run)


def _all_alike(run: Run) -> Iterator[Found]:
    probed = outcome(run).unrelated
    if probed is not None and probed.evidence.get("alike"):
        yield Found(
            text=f"All {probed.evidence['rows']} targets of a batch are the same{near(probed)}, and what was learned "
            "is that one value.",
            fix="print(y.unique(return_counts=True))  # where the targets are made",
            cause="The targets were lost on the way, or the data hold one kind only.",
            since=probed,
        )


def _of_one_class(run: Run, steps: float, classes: float, gone: float) -> Iterator[Found]:
    for same in by_line(run, lambda one: one.function in ("cross_entropy", "nll_loss")).values():
        known = [(one, one.value) for one in same if one.target_classes >= 0 and one.value is not None]
        looked = sum(one.items for one, _ in known)
        if len(same) < steps or len(known) < _LOOKS or looked < _TARGETS or not 1 < known[0][0].classes <= classes:
            continue
        first = known[0][0]
        is_one = all(one.target_classes == 1 and one.target_mean == first.target_mean for one, _ in known)
        if is_one and known[-1][1] < (1 - gone) * known[0][1]:
            yield Found(
                text=f"All targets of {first.function} in the run are of class {first.target_mean or 0:g}.",
                fix="print(y.unique(return_counts=True))  # where the labels are made",
                cause="The labels were lost on the way, or the data hold one class only.",
                since=first,
                evidence={"calls": len(known)},
            )


def _told_one_thing(run: Run, steps: float) -> Iterator[Found]:
    windows: dict[int, list[list[LossCall]]] = {}
    calls: list[LossCall] = []
    for fact in run.of(LossCall, Stepped):
        if isinstance(fact, LossCall):
            calls.append(fact)
        elif isinstance(fact, Stepped):
            windows.setdefault(fact.optimizer, []).append(calls)
            calls = []
    for number, found in windows.items():
        known = [window for window in found if window and all(one.target_mean is not None for one in window)]
        if len(known) < 3 or len(found) < steps:
            continue
        first = known[0][0]
        same = all(
            one.function in _OF_TRUTH and not one.target_std and one.target_mean == first.target_mean
            for window in known
            for one in window
        )
        losses = [sum(one.value or 0.0 for one in window) for window in found]
        third = len(losses) // 3
        vanishes = fmean(losses[-third:]) < 0.5 * fmean(losses[: max(third // 3, 1)])
        is_residual = first.function == "mse_loss" and not first.target_mean
        if same and vanishes and not is_residual and all(len(window) >= 2 for window in found):
            yield Found(
                text=f"All {len(known[0])} losses for which {OptimizerView(run, number)} steps compare with "
                f"{first.target_mean:g}, at each step: nothing tells the inputs apart.",
                fix="torch.zeros_like(...) as the target of one of them",
                cause="The same constant is given as the target of both kinds of inputs.",
                since=first,
                where=known[0][-1],
                evidence={"value": first.target_mean, "calls": len(known[0])},
            )


@rule("AB613", "LOSS_OF_ITSELF", "warning", explains=("LOSS_TERM_CUT", "LOSS_CONSTANT"), needs=(Probed,))
def loss_of_itself(run: Run) -> Iterator[Found]:
    """Terms that are always 0."""
    for probed in answers(run, "itself")[:1]:
        yield Found(
            text=f"{probed.evidence['op']}{near(probed)} compares a tensor with itself: both sides are equal in each "
            "entry, and the term says nothing.",
            fix="compare the prediction of the model that is trained with the target",
            cause="The same tensor is on both sides, or one that was made in the same way.",
            since=0,
            where=probed,
            evidence=probed.evidence,
        )


@rule("AB618", "OWN_NEGATIVE", "warning", explains=("LOSS_CONSTANT", "NOT_LEARNING"), needs=(Probed,))
def own_negative(run: Run) -> Iterator[Found]:
    """Samples that are the nearest of their own negatives."""
    for probed in answers(run, "own negative"):
        yield Found(
            text=f"{probed.evidence['op']}{near(probed)} takes the nearest of all rows for each row, and that is the "
            "row itself each time: no other one is driven away.",
            fix="pairs.masked_fill(torch.eye(len(pairs), dtype=torch.bool), inf)  # -inf for similarities",
            cause="The diagonal of the matrix of all pairs is left in: a sample is one of its own negatives.",
            since=probed,
        )


@rule("AB664", "EDGES_NOT_OFFSET", "warning", explains=("NOT_LEARNING", "LOSS_CONSTANT"), needs=(Probed,))
def edges_not_offset(run: Run) -> Iterator[Found]:
    """Edges of batched graphs that all lie between the first nodes."""
    for probed in answers(run, "edges"):
        seen = probed.evidence
        yield Found(
            text=f"{seen['op']}{near(probed)} brings the messages of {seen['edges']} edges to nodes 0 to "
            f"{seen['last']} only, of {seen['nodes']} nodes in {seen['graphs']} graphs.",
            fix="edges.append(edge_index + offset); offset += len(x)  # for each graph of the batch",
            cause="The edges of each graph number its own nodes; in a batch they begin behind those of the graphs "
            "before it.",
            since=probed,
        )


@rule("AB665", "MASKS_APART", "warning", explains=("NOT_LEARNING", "LABELS_UNRELATED"), needs=(Probed,))
def masks_apart(run: Run) -> Iterator[Found]:
    """Masks that lie on their pictures only when they are turned or flipped."""
    for probed in answers(run, "apart"):
        share, count = float(probed.evidence["share"]), int(probed.evidence["masks"])
        yield Found(
            text=f"{share:.0%} of {count} masks lie on their picture only when they are turned or flipped, as given to "
            f"{root_variable(run, probed.root)} and its loss.",
            fix="draw the turn or flip once for each sample, and apply it to picture and mask",
            cause="Picture and mask are augmented apart, or the axes of one of them are exchanged.",
            since=probed,
            where=first_call(run, probed.root),
        )
