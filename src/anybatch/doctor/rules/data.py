"""Rules of the family data: what the model is given."""

import math
from bisect import bisect
from collections.abc import Iterator
from dataclasses import replace

from anybatch.doctor.rules.loss import by_line, loss_place
from anybatch.doctor.rules.outcomes import outcome
from anybatch.doctor.rules.registry import rule
from anybatch.doctor.views.courses import course, phases
from anybatch.doctor.views.measures import model_name, root_place
from anybatch.records.events import Backward, Epoch, Forward, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, InputSample

_FAR = 10.0
"""Mean or standard deviation of an input above which it is not standardised."""

_NEAR_NOTHING = 0.02
"""The largest entry of pictures and sequences that say nothing to the first layer."""

_NEIGHBOURS = 0.5
"""The largest standard deviation that the numbers of two neighbouring classes can have."""

_LONG = 20
"""Steps with one batch that are more than a look at whether the model can fit it."""

_NORMS = ("BatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm", "RMSNorm", "Embedding", "SyncBatchNorm")
_DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


@rule(
    "AB651",
    "INPUT_SCALE",
    "warning",
    explains=(
        "EXPLODING",
        "LR_TOO_HIGH",
        "SATURATED",
        "DEAD_UNITS",
        "NAN_IN_FORWARD",
        "NAN_IN_BACKWARD",
        "VANISHING",
        "INPUT_IGNORED",
        "CLIP_ALWAYS_ON",
        "LR_TOO_LOW",
        "CANNOT_FIT_BATCH",
        "INITIAL_LOSS",
    ),
)
def input_scale(run: Run) -> Iterator[Finding]:
    """Inputs and targets of tens or thousands; where both are, one finding has both."""
    found = list(_scales(run))
    if len(found) > 1 and found[0].severity == found[-1].severity:
        rest = found[1:]
        found = [
            replace(
                found[0],
                message=" ".join(one.message for one in found),
                fix="; ".join(one.fix for one in found),
                evidence={**found[0].evidence, "also": [one.evidence for one in rest]},
            )
        ]
    yield from found


def _scales(run: Run) -> Iterator[Finding]:
    losses = course(run)
    learned = losses.fell or losses.converged or (len(losses.finite) < 3 and not losses.diverged)
    yield from _inputs(run, "info" if learned else "warning")
    yield from _tiny_inputs(run)
    for calls in by_line(run, lambda one: one.function in _DISTANCES and one.target_std is not None).values():
        far = [one for one in calls if max(abs(one.target_mean or 0.0), one.target_std or 0.0) > _FAR]
        if len(far) < 0.8 * len(calls) or _follows(far[0]):
            continue
        call = far[0]
        yield Finding(
            message=f"The targets of {call.function} have mean {call.target_mean:.3g} and standard deviation "
            f"{call.target_std:.3g}; the loss begins at {losses.first:.3g}.",
            place=loss_place(run, call),
            fix=f"y = (y - {call.target_mean:.3g}) / {call.target_std or 1.0:.3g}  # and back for predictions",
            cause="Errors of this size give gradients of this size; learning rates are made for numbers around 1.",
            evidence={"target_mean": call.target_mean, "target_std": call.target_std, "loss_first": losses.first},
            step=call.step,
            at=call.at,
            severity="info" if learned else "warning",
        )


def _follows(call: LossCall) -> bool:
    """Whether the predictions are of the size of the targets already."""
    if call.low is None or call.high is None or call.target_std is None or call.target_mean is None:
        return False
    return call.low <= call.target_mean <= call.high and call.high - call.low > call.target_std


def _inputs(run: Run, severity: str) -> Iterator[Finding]:
    found: dict[tuple[int, str], list[InputSample]] = {}
    for one in run.of(InputSample):
        if one.mean is not None and one.std is not None and len(one.shape) >= 2 and one.finite:
            found.setdefault((one.root, one.name), []).append(one)
    for (root, name), samples in found.items():
        far = [one for one in samples if max(abs(one.mean or 0.0), one.std or 0.0) > _FAR]
        if len(far) < 0.8 * len(samples) or samples[0].first.startswith(_NORMS) or _is_target_of_other(run, root):
            continue
        one = far[0]
        mean, std = one.mean or 0.0, one.std or 0.0
        image = len(one.shape) == 4 and (one.low or 0.0) >= 0 and 100 < (one.high or 0.0) <= 255
        yield Finding(
            message=f"The input {name or '0'} of {model_name(run, root)} has mean {mean:.3g} and standard deviation "
            f"{std:.3g}, and its first layer ({one.first or 'unknown'}) is no norm layer.",
            place=_entrance(run, one),
            fix="x = x / 255" if image else f"x = (x - {mean:.3g}) / {std or 1.0:.3g}",
            cause="Initialisations and learning rates are made for numbers around 1.",
            evidence={"mean": mean, "std": std, "low": one.low, "high": one.high, "shape": list(one.shape)},
            step=one.step,
            at=one.at,
            severity="info" if severity == "info" else "warning",
        )


def _tiny_inputs(run: Run) -> Iterator[Finding]:
    """Pictures or sequences of numbers near 0, as those that were divided by 255 twice."""
    found: dict[tuple[int, str], list[InputSample]] = {}
    for one in run.of(InputSample):
        if one.std is not None and len(one.shape) >= 3 and one.finite and not one.first.startswith(_NORMS):
            found.setdefault((one.root, one.name), []).append(one)
    for (root, name), samples in found.items():
        most = max(max(abs(one.low or 0.0), abs(one.high or 0.0)) for one in samples)
        if not 0 < most < _NEAR_NOTHING or _is_target_of_other(run, root):
            continue
        one = samples[0]
        yield Finding(
            message=f"The input {name or '0'} of {model_name(run, root)} is nowhere above {most:.3g}; its standard "
            f"deviation is {one.std:.3g}.",
            place=_entrance(run, one),
            fix="divide by 255 once only" if most < 1.01 / 255 else f"x = x / {most:.3g}",
            cause="Inputs this small leave the first layer nothing but its bias; mostly they are scaled twice.",
            evidence={"std": one.std, "low": one.low, "high": one.high, "shape": list(one.shape)},
            step=one.step,
            at=one.at,
            severity="info" if outcome(run).word == "learning" else "warning",
        )


def _entrance(run: Run, sample: InputSample) -> Place:
    """The first layer that an input comes to, and the line where the model was called."""
    leaves = (each for one in run.of(Activations) if one.root == sample.root for each in one.modules)
    return root_place(run, sample.root, next((one.module for one in leaves if one.cls == sample.first), ""))


def _is_target_of_other(run: Run, root: int) -> bool:
    """Whether the root is given what another root made: a critic, a head of its own."""
    forwards = [one for one in run.of(Forward) if one.grad]
    return bool(forwards) and forwards[0].root != root


@rule("AB652", "DATA_ORDER", "warning", explains=("LOSS_CONSTANT", "INPUT_IGNORED", "LR_TOO_HIGH"))
def data_order(run: Run) -> Iterator[Finding]:
    """Batches of one class."""
    lines = by_line(run, lambda one: one.target_classes >= 1 and one.classes > 1 and one.items >= 4)
    if len(lines) != 1:
        return
    (calls,) = lines.values()
    single = [one for one in calls if one.target_classes == 1]
    if len(calls) < 5 or not (len(single) > 0.8 * len(calls) or _in_order(calls, single)):
        return
    loaders = [one for one in run.of(Epoch) if one.batches > 1]
    unshuffled = bool(loaders) and not any(one.shuffled for one in loaders)
    known = {one.target_mean for one in single if one.target_mean is not None}
    if len(known) < 2 and not (unshuffled and known and min(known) > 0):
        return
    yield Finding(
        message=f"{len(single)} of {len(calls)} batches have targets of one class only, of {calls[0].classes}"
        + (" (the DataLoader does not shuffle)." if unshuffled else "."),
        place=Place(file=loaders[0].file, line=loaders[0].line) if loaders else loss_place(run, calls[0]),
        fix="DataLoader(..., shuffle=True)" if loaders else "order = torch.randperm(len(x)); x, y = x[order], y[order]",
        cause="The data are sorted by class, so that each class is learned and forgotten in turn.",
        evidence={"batches": len(calls), "of_one_class": len(single), "classes": calls[0].classes},
        step=single[4 if len(single) > 4 else -1].step,
        at=single[0].at,
    )


def _in_order(calls: list[LossCall], single: list[LossCall]) -> bool:
    """Whether the batches of more than one class are those where one class ends and the next begins."""
    borders = [
        one
        for one in calls
        if one.target_classes == 2 and one.classes > 2 and one.target_std is not None and one.target_std <= _NEIGHBOURS
    ]
    different = {one.target_mean for one in single if one.target_mean is not None}
    return len(single) * 2 > len(calls) and len(different) >= 3 and len(single) + len(borders) > 0.8 * len(calls)


@rule("AB653", "DATA_REPEATED", "warning", explains=("LOSS_CONSTANT",))
def data_repeated(run: Run) -> Iterator[Finding]:
    """Batches that are bitwise equal although they should differ."""
    inputs: dict[tuple[int, str], list[InputSample]] = {}
    for one in _trained_on(run):
        if one.hash and math.prod(one.shape) >= 8:
            inputs.setdefault((one.root, one.name), []).append(one)
    starts = [one for one in run.of(Epoch) if not one.ended]
    for (root, _), samples in inputs.items():
        if len(samples) < 5 or not starts or max(one.batches for one in starts) < 2:
            continue
        if len({one.hash for one in samples}) == 1:
            found = list(_always_the_same(run, root, samples))
            yield from found
            if found:
                return
            continue
        turns = _turns(run)
        twice = _within_epochs(samples, starts, turns)
        if len(twice) >= 3 and not _reused(turns, starts):
            yield _repeated(
                run, root, starts[0], twice, f"{len(twice)} of {len(samples)} batches are copies of another one in the "
                "same epoch", "DataLoader(..., worker_init_fn=lambda _: np.random.seed(torch.initial_seed() % 2**32))"
            )  # fmt: skip
            return


def _trained_on(run: Run) -> Iterator[InputSample]:
    """The inputs of the last call of each root before a backward; what only evaluates is followed by none."""
    waiting: dict[int, list[InputSample]] = {}
    for one in run.of(Forward, InputSample, Backward):
        if isinstance(one, Forward):
            waiting[one.root] = []
        elif isinstance(one, InputSample):
            waiting.setdefault(one.root, []).append(one)
        else:
            for samples in waiting.values():
                yield from samples
            waiting.clear()


def _always_the_same(run: Run, root: int, samples: list[InputSample]) -> Iterator[Finding]:
    """All that is trained on is one batch: of a loader that begins anew, or one that was drawn before the loop."""
    drawn = _drawn_for(run, root)
    steps = {one.step for one in run.of(Backward)}
    for starts in drawn.values():
        fresh = {one.step for one in starts} & steps
        if len({one.step for one in samples} & fresh) >= len(samples) - 2:
            yield _repeated(run, root, starts[0], samples, "the loader is started anew for every step",
                            "for x, y in loader: ...  # instead of next(iter(loader)) in the loop")  # fmt: skip
            return
    others = [one for one in run.of(InputSample) if one.root == root and one.name == samples[0].name]
    elsewhere = {one.step for one in others if one.hash and one.hash != samples[0].hash}
    for number, starts in drawn.items():
        other = {one.step for one in run.of(Epoch) if one.loader != number and one.at > samples[0].at}
        begins = len(starts) == 1 and starts[0].at < samples[0].at and starts[0].step == samples[0].step
        if begins and len(elsewhere | other) >= 2 and len(steps) >= _LONG:
            why = "it was drawn from the loader once, before the loop, while other data are evaluated"
            yield _repeated(run, root, starts[0], samples, why, "for x, y in loader: ...  # the loop over all batches")
            return


def _drawn_for(run: Run, root: int) -> dict[int, list[Epoch]]:
    """For each loader that never came to its end its starts, right behind which a root was called and trained."""
    ended = {one.loader for one in run.of(Epoch) if one.ended}
    drawn: dict[int, list[Epoch]] = {}
    latest: Epoch | None = None
    given: Epoch | None = None
    for one in run.of(Epoch, Forward, Backward):
        if isinstance(one, Epoch):
            latest = None if one.ended or one.loader in ended or one.batches < 2 else one
        elif isinstance(one, Forward):
            if one.root == root:
                given = latest
            latest = None
        elif given is not None:
            drawn.setdefault(given.loader, []).append(given)
            given = None
    return drawn


def _reused(turns: list[int], starts: list[Epoch]) -> bool:
    """Whether more iterations are done than there are batches: each batch is meant to be used again."""
    ends = [one.at for one in starts[1:]] + [max(turns, default=0) + 1]
    return any(
        one.batches > 0 and sum(one.at < at < end for at in turns) > 1.2 * one.batches
        for one, end in zip(starts, ends, strict=True)
    )


def _turns(run: Run) -> list[int]:
    """The events at which iterations end: each optimizer of those that step by turns has stepped once more."""
    found = []
    for part in phases(run):
        counts = dict.fromkeys(part.optimizers, 0)
        done = 0
        for one in run.of(Stepped):
            if part.start <= one.at <= part.end and one.optimizer in counts:
                counts[one.optimizer] += 1
                if min(counts.values()) > done:
                    done += 1
                    found.append(one.at)
    return found


def _within_epochs(samples: list[InputSample], starts: list[Epoch], turns: list[int]) -> list[InputSample]:
    """Samples that were seen before in their epoch, in another iteration."""
    seen: dict[tuple[int, str], int] = {}
    twice = []
    for one in samples:
        epoch = max((start.at for start in starts if start.at < one.at), default=-1)
        turn = bisect(turns, one.at)
        if seen.get((epoch, one.hash), turn) != turn:
            twice.append(one)
        seen[epoch, one.hash] = turn
    return twice


def _repeated(run: Run, root: int, loader: Epoch, samples: list[InputSample], why: str, fix: str) -> Finding:
    return Finding(
        message=f"{model_name(run, root)} gets the same batch again and again: {why}.",
        place=Place(file=loader.file, line=loader.line),
        fix=fix,
        cause="Only a part of the data is seen, and that part is overfitted.",
        evidence={"equal": len(samples), "batches_of_the_loader": loader.batches, "workers": loader.workers},
        step=samples[min(2, len(samples) - 1)].step,
        at=samples[0].at,
    )
