"""Rules of the family data: what the model is given, in which order, and behind which mask."""

import math
from bisect import bisect
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

from anybatch.doctor.rules.registry import Found, Limit, rule
from anybatch.doctor.views.courses import adversarial, course, phases
from anybatch.doctor.views.measures import SQUASHING
from anybatch.doctor.views.naming import by_line, first_call, qualified, root_variable
from anybatch.doctor.views.onebatch import drawn_for, looped_for, trained_on
from anybatch.doctor.views.outcomes import learned_well, outcome
from anybatch.records.events import Backward, Epoch, Forward, Stepped
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run, grouped, remembered
from anybatch.records.samples import Activations, InputSample

_NORMS = ("BatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm", "RMSNorm", "Embedding", "SyncBatchNorm")
_DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_RARELY = 0.5  # of the changes between two marks that chance gives
_FEW = 4  # targets, which may be of one class by chance


@rule(
    "AB651", "INPUT_SCALE", "warning",
    explains=("EXPLODING", "LR_TOO_HIGH", "SATURATED", "DEAD_UNITS", "NAN_IN_FORWARD", "NAN_IN_BACKWARD", "VANISHING",
              "INPUT_IGNORED", "CLIP_ALWAYS_ON", "LR_TOO_LOW", "CANNOT_FIT_BATCH", "INITIAL_LOSS"),
)  # fmt: skip
def input_scale(
    run: Run, *, far: float = Limit(10, "the mean or the standard deviation of what is not standardised"),
    nothing: float = Limit(0.02, "the largest entry of pictures that say nothing to the first layer"),
    times: float = Limit(30, "by which the last inputs of a run are smaller than the first"),
    flat: float = Limit(30, "by which the mean is larger than all that entries differ by"),
    share: float = Limit(0.8, "of the batches"),
    columns: float = Limit(0.25, "of a table, whose deviation is below a tenth of that of all: each has its own"),
) -> Iterator[Found]:  # fmt: skip
    """Inputs and targets of tens or thousands, or of next to nothing; where several are, one finding has them all."""
    losses = course(run)
    learned = losses.fell or losses.converged or (len(losses.finite) < 3 and not losses.diverged)
    longer = any(one.evidence["other_lr"] > one.evidence["lr"] for one in run.answers("rate"))
    learned = learned and not (longer and outcome(run).word != "learning")  # the rate is too low for such numbers
    learned = learned and not (run.answers("scaled") and not learned_well(run))
    small = [*_tiny_inputs(run, nothing, flat)] or [*_drifting(run, times)]
    found = [*_inputs(run, far, share, columns), *small, *_targets(run, far, share)]
    found = [replace(one, severity=one.severity or ("info" if learned else "warning")) for one in found]
    if len(found) > 1 and found[0].severity == found[-1].severity:
        first, rest = found[0], found[1:]
        text, fix = " ".join(one.text for one in found), "; ".join(one.fix for one in found)
        found = [
            replace(first, text=text, fix=fix, evidence={**first.evidence, "also": [one.evidence for one in rest]})
        ]
    yield from found


def _entered(run: Run, dims: int) -> list[list[InputSample]]:
    """Finite numbers that models were called with, by their argument; not what one root gave to another."""
    calls = [one.root for one in run.of(Forward) if one.grad]
    found: dict[tuple[int, str], list[InputSample]] = {}
    for one in run.of(InputSample):
        inner = bool(calls) and calls[0] != one.root  # a critic, a head of its own
        if one.mean is not None and one.std is not None and len(one.shape) >= dims and one.finite and not inner:
            found.setdefault((one.root, one.name), []).append(one)
    fit: dict[int, set[int]] = {}  # for roots of which an input fits the first layer, how many rows such inputs have
    for (root, _), samples in found.items():
        if (rows := _rows_of(run, samples[0])) is not None:
            fit.setdefault(root, set()).add(rows)
    return [
        samples
        for (root, _), samples in found.items()
        if not samples[0].first.startswith(_NORMS)
        and not _standardised(run, samples[0])
        and (root not in fit or samples[0].shape[0] in fit[root] or _rows_of(run, samples[0]) is not None)
    ]  # the others are targets, such as the boxes of each picture


def _rows_of(run: Run, one: InputSample) -> int | None:
    """The rows of an input that the first layer of its root could be given as it is, 0 for one sample."""
    root = run.roots.get(one.root)
    first = next((each for each in root.modules if each.cls == one.first), None) if root is not None else None
    if first is None:
        return None
    dims = next((int(each) for each in first.cls if each.isdigit()), 0) if "in_channels" in first.options else 0
    wanted = first.options.get("in_channels" if dims else "in_features", -1)
    fits = len(one.shape) > dims and one.shape[-dims - 1] == wanted and (not dims or len(one.shape) <= dims + 2)
    return (one.shape[0] if len(one.shape) > dims + 1 else 0) if fits else None


def _standardised(run: Run, one: InputSample) -> bool:
    """Whether a first layer of the user's own, without weights, brings them to unit scale and squashes none."""
    held = {facts.module for facts in run.parameters.values()}
    sample = next((each for each in run.of(Activations) if each.root == one.root), None)
    first = next((each for each in sample.modules if each.cls == one.first), None) if sample is not None else None
    if first is None or first.module in held or first.cls in SQUASHING or first.shape != tuple(one.shape):
        return False
    return abs(first.mean) < 0.5 and 0.5 < first.std < 2 and first.absmax > 1.5  # what is squashed ends at 1


def _entrance(run: Run, one: InputSample) -> str:
    """The first layer that an input comes to."""
    leaves = (each for sample in run.of(Activations) if sample.root == one.root for each in sample.modules)
    return qualified(run, one.root, next((each.module for each in leaves if each.cls == one.first), ""))


def _inputs(run: Run, far: float, share: float, small: float) -> Iterator[Found]:
    for samples in _entered(run, 2):
        wrong = [one for one in samples if max(abs(one.mean or 0.0), one.std or 0.0) > far]
        if len(wrong) < share * len(samples):
            continue
        one, mean, std = wrong[0], wrong[0].mean or 0.0, wrong[0].std or 0.0
        image = len(one.shape) == 4 and (one.low or 0.0) >= 0 and 100 < (one.high or 0.0) <= 255
        fix, apart = "x = x / 255" if image else f"x = (x - {mean:.3g}) / {std or 1.0:.3g}", ""
        seen: dict[str, float] = {}
        if one.small_columns >= small:
            pixels = (one.low or 0.0) >= 0 and 100 < (one.high or 0.0) <= 255
            fix = (
                "x = (x - x.mean(0)) / x.std(0).clamp_min(1e-6)  # of the training rows, before splitting into batches"
            )
            fix = "x = x / 255" if pixels and one.shape[-1] >= _OF_PICTURES else fix
            apart = f", while {one.small_columns:.0%} of its columns have less than a tenth of that"
            seen = {"small_columns": one.small_columns}
        yield Found(
            text=f"The input {one.name or '0'} of {root_variable(run, one.root)} has mean {mean:.3g} and standard "
            f"deviation {std:.3g}{apart}, and its first layer ({one.first or 'unknown'}) is no norm layer.",
            fix=fix,
            cause="Initialisations and learning rates are designed for numbers around 1.",
            since=one,
            where=first_call(run, one.root),
            module=_entrance(run, one),
            evidence={"mean": mean, "std": std, "low": one.low, "high": one.high, "shape": list(one.shape)} | seen,
        )


_OF_PICTURES = 64  # columns: flat pictures rather than a table


def _drifting(run: Run, times: float) -> Iterator[Found]:
    """Inputs that are far smaller at the end than at the start, as where a data set writes into its own tensors."""
    for samples in _entered(run, 2):
        sizes = [math.hypot(one.mean or 0.0, one.std or 0.0) for one in samples]
        if len(sizes) < 6:
            continue
        first, last = median(sizes[:3]), median(sizes[-2:])
        if all(times * one < first for one in sizes[-2:]):
            then = next(one for one, size in zip(samples, sizes, strict=True) if 10 * size < first)
            yield Found(
                text=f"The input {then.name or '0'} of {root_variable(run, then.root)} shrinks in the course "
                f"of the run: its root mean square is {first:.3g} at first and {last:.3g} at the end.",
                fix="x = x / 255 instead of x /= 255: a new tensor, not the one that the data set keeps",
                cause="Scaling a sample in place scales the data set itself, again in each epoch.",
                since=then,
                where=first_call(run, then.root),
                module=_entrance(run, then),
                evidence={"first": first, "last": last, "shape": list(then.shape)},
            )


def _tiny_inputs(run: Run, nothing: float, flat: float) -> Iterator[Found]:
    """Pictures, sequences or rows of numbers near 0, or near one number, as those that were divided by 255 twice."""
    is_nothing = outcome(run).word == "not learning"  # rows of a few numbers may be small, and are learned from
    for samples in _entered(run, 2 if is_nothing else 3):
        most = max(max(abs(one.low or 0.0), abs(one.high or 0.0)) for one in samples)
        ranges = [(one.high or 0.0) - (one.low or 0.0) for one in samples]
        is_flat = len(samples) > 1 and all(0 < flat * wide < abs(one.mean or 0.0)
                                           for one, wide in zip(samples, ranges, strict=True))  # fmt: skip
        if 0 < most < nothing or (is_flat and outcome(run).word != "learning"):
            one = samples[0]
            seen = f"nowhere above {most:.3g}" if most < nothing else f"everywhere near {one.mean:.3g}"
            fix = "divide by 255 once only" if most < 1.01 / 255 else f"x = x / {most:.3g}"
            if most >= nothing:
                fix = f"scale the input once only; or x = (x - {one.mean:.3g}) / {one.std or 1.0:.3g}"
            yield Found(
                text=f"The input {one.name or '0'} of {root_variable(run, one.root)} is {seen}; its "
                f"standard deviation is {one.std:.3g}.",
                fix=fix,
                cause="Inputs that hardly differ leave the first layer nothing but its bias; mostly they are scaled "
                "twice.",
                since=one,
                where=first_call(run, one.root),
                module=_entrance(run, one),
                evidence={"std": one.std, "low": one.low, "high": one.high, "shape": list(one.shape)},
                severity="info" if outcome(run).word == "learning" else "warning",
            )


def _targets(run: Run, far: float, share: float) -> Iterator[Found]:
    for calls in by_line(run, lambda one: one.function in _DISTANCES and one.target_std is not None).values():
        wrong = [one for one in calls if max(abs(one.target_mean or 0.0), one.target_std or 0.0) > far]
        if len(wrong) < share * len(calls) or _follows(wrong[0]):
            continue
        call, first = wrong[0], course(run).first
        yield Found(
            text=f"The targets of {call.function} have mean {call.target_mean:.3g} and standard deviation "
            f"{call.target_std:.3g}; the loss begins at {first:.3g}.",
            fix=f"y = (y - {call.target_mean:.3g}) / {call.target_std or 1.0:.3g}  # and back for predictions",
            cause="Errors of this size give gradients of this size; learning rates are designed for numbers around 1.",
            since=call,
            evidence={"target_mean": call.target_mean, "target_std": call.target_std, "loss_first": first},
        )


def _follows(call: LossCall) -> bool:
    """Whether the predictions are of the size of the targets already."""
    if call.low is None or call.high is None or call.target_std is None or call.target_mean is None:
        return False
    return call.low <= call.target_mean <= call.high and call.high - call.low > call.target_std


def _marks(call: LossCall) -> bool:
    """Whether its targets are one mark of 0 or 1 for each row of a batch."""
    is_binary = call.function.startswith("binary") and call.target_shape[:1] == (call.items,)
    return is_binary and call.items >= 2 * _FEW and call.target_low in (0, 1) and call.target_high in (0, 1)


def _in_long_runs(run: Run, calls: list[LossCall]) -> bool:
    """Whether marks of batches change far less often than by chance, in the order in which a loader gives them.

    Batches that have one label each, as of a recording, or of what is real and then of what is made, do not.
    """
    starts = [one for one in run.of(Epoch) if one.batches > 1 and not one.ended]
    if any(one.shuffled for one in starts) or len({one.step for one in calls}) < len(calls):
        return False
    first = [one.step for one in starts if one.loader == starts[0].loader]
    places = sorted((one.step - first[max(bisect(first, one.step) - 1, 0)] if first else one.step, one.target_mean or 0)
                    for one in calls)  # fmt: skip
    share = fmean(mark for _, mark in places)
    pairs = list(pairwise(places))
    beside = [pair for pair in pairs if pair[1][0] - pair[0][0] <= 1]
    return all(
        sum(one != other for (_, one), (_, other) in some) <= _RARELY * 2 * share * (1 - share) * len(some)
        for some in (pairs, beside)
    )


@rule(
    "AB652", "DATA_ORDER", "warning",
    explains=("LOSS_CONSTANT", "INPUT_IGNORED", "LR_TOO_HIGH", "TARGETS_CONSTANT"), needs=(LossCall,),
)  # fmt: skip
def data_order(
    run: Run, *, batches: float = Limit(5, "by chance"), share: float = Limit(0.8, "of the batches"),
    neighbours: float = Limit(0.5, "the standard deviation of the numbers of two neighbouring classes, at most"),
) -> Iterator[Found]:  # fmt: skip
    """Batches of one class."""
    marks = not adversarial(run)  # what is generated and what is real are scored apart
    lines = by_line(run, lambda one: one.items >= _FEW and one.target_classes >= 1 and one.classes > 1)
    lines = lines or by_line(run, lambda one: marks and _marks(one))
    calls = next(iter(lines.values()), [])
    if calls and _marks(calls[0]) and not _in_long_runs(run, calls):
        return
    single = [one for one in calls if one.target_classes == 1 or (_marks(one) and one.target_low == one.target_high)]
    borders = [  # where one class ends and the next begins
        one for one in calls
        if one.target_classes == 2 < one.classes and one.target_std is not None and one.target_std <= neighbours
    ]  # fmt: skip
    known = {one.target_mean for one in single if one.target_mean is not None}
    in_order = len(single) * 2 > len(calls) and len(known) >= 3 and len(single) + len(borders) > share * len(calls)
    loaders = [one for one in run.of(Epoch) if one.batches > 1]
    unshuffled = bool(loaders) and not any(one.shuffled for one in loaders)
    if len(lines) != 1 or len(calls) < batches or not (len(single) > share * len(calls) or in_order):
        return
    if len(known) < 2 and not (unshuffled and known and min(known) > 0):
        return
    yield Found(
        text=f"{len(single)} of {len(calls)} batches have targets of one class only, of {max(calls[0].classes, 2)}"
        + (" (the DataLoader does not shuffle)." if unshuffled else "."),
        fix="DataLoader(..., shuffle=True)" if loaders else "order = torch.randperm(len(x)); x, y = x[order], y[order]",
        cause="The data are sorted by class, so each class is learned and forgotten in turn.",
        since=single[0],
        step=single[4 if len(single) > 4 else -1],
        where=loaders[0] if loaders else calls[0],
        evidence={"batches": len(calls), "of_one_class": len(single), "classes": calls[0].classes},
    )


@rule("AB653", "DATA_REPEATED", "warning", explains=("LOSS_CONSTANT",), needs=(Epoch,))
def data_repeated(
    run: Run, *, samples: float = Limit(5, "by chance"), copies: float = Limit(3, "by chance"),
    steps: float = Limit(20, "with one batch are more than a look at whether the model can fit it"),
) -> Iterator[Found]:  # fmt: skip
    """Batches that are bitwise equal although they should differ, and samples that are never drawn."""
    yield from _never_drawn(run)
    inputs = grouped(((one.root, one.name), one) for one in trained_on(run) if one.hash)
    starts = [one for one in run.of(Epoch) if not one.ended]
    if max((one.batches for one in starts), default=0) < 2:
        return
    for seen in inputs.values():
        if len(seen) < samples:
            continue
        if len({one.hash for one in seen}) == 1 and math.prod(seen[0].shape) >= (2 if seen[0].std else 8):
            found = next(_always_the_same(run, seen, steps), None)
        elif math.prod(seen[0].shape) < 8:  # a few numbers may come again by chance
            continue
        else:
            twice = _within_epochs(run, seen, starts)
            why = f"{len(twice)} of {len(seen)} batches are copies of another one in the same epoch"
            seeds = (
                "in worker_init_fn, seed the data set's generator with torch.initial_seed(), which differs in each "
                "worker: get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed())"
            )
            is_fault = len(twice) >= copies and not _reused(run, starts)
            found = _repeated(run, starts[0], twice, why, seeds) if is_fault else None
        if found is not None:
            yield found
            return


def _never_drawn(run: Run) -> Iterator[Found]:
    """Samplers with weights for some of the samples only, as where there is one for each class."""
    few = [one for one in run.of(Epoch) if 0 < one.weights < one.rows / 2]
    for one in few[:1]:
        yield Found(
            text=f"The sampler has {one.weights} weights for {one.rows} samples: the first {one.weights} of them are "
            "drawn over and over, and the others never.",
            fix="WeightedRandomSampler(class_weights[targets], len(targets))  # one weight per sample",
            cause="The weights are per class, not per sample.",
            since=one,
            evidence={"weights": one.weights, "rows": one.rows},
        )


def _always_the_same(run: Run, samples: list[InputSample], long: float) -> Iterator[Found]:
    """All that is trained on is one batch: of a loader that begins anew, or one that was drawn before the loop."""
    first, steps = samples[0], {one.step for one in run.of(Backward)}
    drawn = drawn_for(run, first.root)
    for starts in drawn.values():
        fresh = {one.step for one in starts} & steps
        if len({one.step for one in samples} & fresh) >= len(samples) - 2:
            yield _repeated(run, starts[0], samples, "the loader is restarted for every step",
                            "for x, y in loader: ...  # instead of next(iter(loader)) in the loop")  # fmt: skip
    if (looped := looped_for(run, samples)) is not None:
        why = "the loop draws batches from the loader, and uses none of them"
        yield _repeated(run, looped, samples, why, "for x, y in loader: ...  # and x and y in the loop")
    others = [one for one in run.of(InputSample) if one.root == first.root and one.name == first.name]
    elsewhere = {one.step for one in others if one.hash and one.hash != first.hash}
    for number, starts in drawn.items():
        other = {one.step for one in run.of(Epoch) if one.loader != number and one.at > first.at}
        begins = len(starts) == 1 and starts[0].at < first.at and starts[0].step == first.step
        if begins and len(elsewhere | other) >= 2 and len(steps) >= long:
            why = "it was drawn from the loader once, before the loop, while other data are evaluated"
            yield _repeated(run, starts[0], samples, why, "for x, y in loader: ...  # the loop over all batches")


def _reused(run: Run, starts: list[Epoch]) -> bool:
    """Whether more iterations are done than there are batches: each batch is meant to be used again."""
    turns = _turns(run)
    ends = [one.at for one in starts[1:]] + [max(turns, default=0) + 1]
    return any(
        one.batches > 0 and sum(one.at < at < end for at in turns) > 1.2 * one.batches
        for one, end in zip(starts, ends, strict=True)
    )


@remembered
def _turns(run: Run) -> list[int]:
    """The events at which iterations end: each optimizer of those that step by turns has stepped once more."""
    found = []
    for part in phases(run):
        counts, done = dict.fromkeys(part.optimizers, 0), 0
        for one in run.of(Stepped):
            if part.start <= one.at <= part.end and one.optimizer in counts:
                counts[one.optimizer] += 1
                if min(counts.values()) > done:
                    done += 1
                    found.append(one.at)
    return found


def _within_epochs(run: Run, samples: list[InputSample], starts: list[Epoch]) -> list[InputSample]:
    """Samples that were seen before in their epoch, in another iteration."""
    seen: dict[tuple[int, str], int] = {}
    twice = []
    for one in samples:
        epoch = max((start.at for start in starts if start.at < one.at), default=-1)
        turn = bisect(_turns(run), one.at)
        if seen.get((epoch, one.hash), turn) != turn:
            twice.append(one)
        seen[epoch, one.hash] = turn
    return twice


def _repeated(run: Run, loader: Epoch, samples: list[InputSample], why: str, fix: str) -> Found:
    return Found(
        text=f"{root_variable(run, samples[0].root)} gets the same batch repeatedly: {why}.",
        fix=fix,
        cause="Only a part of the data is seen, and that part is overfitted.",
        since=samples[0],
        step=samples[min(2, len(samples) - 1)],
        where=loader,
        evidence={"equal": len(samples), "batches_of_the_loader": loader.batches, "workers": loader.workers},
    )
