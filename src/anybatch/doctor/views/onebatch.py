"""Whether all that is trained on is one batch, and which data there were beside it."""

from collections.abc import Iterator, Sequence

from anybatch.records.events import Backward, Epoch, Forward
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run, grouped
from anybatch.records.samples import InputSample

_ENOUGH = 5
"""Looks at batches, or values of them, that are the same by no chance."""

_MUCH_MORE = 4
"""Times as many rows as a slice has: of fewer, the others may be kept for a test."""

_MOST_STEPS = 0.8
"""Of the batches of a loader, which are drawn for steps and not for an evaluation."""


def trained_on(run: Run) -> Iterator[InputSample]:
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


def drawn_for(run: Run, root: int) -> dict[int, list[Epoch]]:
    """For each loader that never came to its end its starts, right behind which a root was called and trained."""
    ended = {one.loader for one in run.of(Epoch) if one.ended}
    drawn: dict[int, list[Epoch]] = {}
    latest_start: Epoch | None = None
    given: Epoch | None = None
    for one in run.of(Epoch, Forward, Backward):
        if isinstance(one, Epoch):
            latest_start = None if one.ended or one.loader in ended or one.batches < 2 else one
        elif isinstance(one, Forward):
            given = latest_start if one.root == root else given
            latest_start = None
        elif given is not None:
            drawn.setdefault(given.loader, []).append(given)
            given = None
    return drawn


def looped_for(run: Run, samples: Sequence[InputSample]) -> Epoch | None:
    """The start of a loader whose batches are drawn, one for each step, and of which none is used: all are the same."""
    if len(samples) < _ENOUGH or not _same_targets(run, least=_ENOUGH):
        return None
    passes, begun = [one.at for one in run.of(Backward)], dict[int, Epoch]()
    for one in run.of(Epoch):
        if not one.ended:
            begun[one.loader] = one
            continue
        start = begun.get(one.loader)
        steps = sum(start.at < at < one.at for at in passes) if start is not None else 0
        if start is not None and samples[0].shape[:1] == (start.batch_size,) and steps >= _MOST_STEPS * one.batches > 1:
            return start
    return None


def one_batch(run: Run) -> str:
    """How it is known that a run was trained on one batch of more data, as a sentence; empty where it is not."""
    seen = list(trained_on(run))
    hashes = grouped(((one.root, one.name), one.hash) for one in seen)
    first = next((one for one in seen if one.shape), None)
    if first is None or len({one.step for one in seen}) < _ENOUGH or any(len(set(one)) > 1 for one in hashes.values()):
        return ""
    if not _same_targets(run):
        return ""
    said = f"each step that was looked at had the same {first.shape[0]} samples"
    loaders = [one for starts in drawn_for(run, first.root).values() for one in starts]
    if any(one.batch_size == first.shape[0] for one in loaders):
        more = max(one.rows for one in loaders)
        return f"{said}, and the loader has {more if more > 0 else 'others'}"
    evaluated = any(one.root == first.root and not one.grad for one in run.of(Forward))
    if first.of >= _MUCH_MORE * first.shape[0] and not evaluated:
        return f"{said}, which are a slice of {first.of}"
    return ""


def _same_targets(run: Run, *, least: int = 0) -> bool:
    """Whether the targets of each line have one and the same mean, as far as they were looked at."""
    means = grouped(((one.file, one.line), one.target_mean) for one in run.of(LossCall) if one.target_mean is not None)
    looks = max(map(len, means.values()), default=0)
    return looks >= least and all(len(set(one)) == 1 for one in means.values())
