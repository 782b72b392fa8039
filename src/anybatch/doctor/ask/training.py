"""Questions that train a copy: one batch, whether labels belong to the inputs, and whether a frozen part has to learn.

For labels, batches that were kept are shared out; a fresh copy of the model is fitted to one part, and so are the
nearest neighbours of each input. Where neither knows more about the labels of the other part than how frequent they
are, what the model learns are the samples by heart.
"""

import copy
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anybatch.doctor.ask.fitting import fitted
from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.steps import OF_CLASSES, Step, asks, replayed, said
from anybatch.doctor.ask.trials import FAILURES, Unknown, tensors, told, unwrapped
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.runs import Run

_STEPS = 200
_FITTED = 0.1  # of the first loss: what counts as fitted
_STUCK = 0.7
_NEAR = 0.35  # of the prior's entropy; PyTorch's initialisation of a small last layer is within 0.2 of it

Batch = tuple[torch.Tensor, str, dict[str, Any]]
"""What a net was given first, and the loss function after it with its arguments."""


@asks("prior", of_rows=False)
def prior(step: Step) -> Iterator[Probed]:
    """Whether a loss of classes begins no higher than that of knowing nothing."""
    for one in step.used(*OF_CLASSES):
        scores = step.values[one.given[0]]
        classes = scores.shape[1] if scores.dim() > 1 else scores.numel()
        if classes > 1 and one.kwargs.get("reduction", "mean") == "mean":
            first = replayed(step.tape, step.loss, held=step.kept.first_of(step.tape))
            value, expected = float(first.values[one.outs[0]].detach()), math.log(classes)
            answer = "yes" if value <= (1 + _NEAR) * expected else "no"
            yield said(one, root=step.root, answer=answer, initial=value, prior=expected)
    raise Unknown("no loss of classes was seen")


@asks("one batch", of_rows=False)
def one_batch(step: Step) -> Iterator[Probed]:
    """Whether a copy can fit the batch."""
    start = step.kept.first_of(step.tape)
    half = time.perf_counter() + max(0.0, step.until - time.perf_counter()) / 2
    optimizer = torch.optim.Adam([*start.values()], lr=3e-3)
    before, after, steps = fitted(step, start, optimizer, half, steps=_STEPS, seconds=math.inf)
    answer = "unknown"
    if math.isfinite(after) and after <= _FITTED * before:
        answer = "yes"
    elif steps == _STEPS and before > 0 and not after <= _STUCK * before:
        answer = "no"
    yield said(root=step.root, answer=answer, before=before, after=after, steps=steps)


def fresh(module: nn.Module) -> nn.Module:
    """A copy with new weights."""
    other = copy.deepcopy(module)
    reset: set[int] = set()
    for one in other.modules():
        again = getattr(one, "reset_parameters", None) or getattr(one, "_reset_parameters", None)
        if callable(again):
            again()
            reset.update(id(p) for p in one.parameters())
    left = [name for name, p in other.named_parameters() if id(p) not in reset]
    if left:
        raise Unknown(f"{left[0]} can't be initialised again: its module has no reset_parameters")
    return other


_LEAST_LENGTH, _LEAST_TEXTS, _LEAST_WORDS, _RARE, _MOST_COUNTED = 12, 1000, 16, 0.02, 1 << 26
_LEAST = 240
_REPEATED = 0.05  # of the samples that came again, at least
_NEIGHBOURS, _MOST_COMPARED = 7, 1500  # samples
_MOST_ROWS, _FEWEST_PARTS = 64, 6  # of the parts that samples are shared out to
_ORDERS = 39  # of the labels, none of which may tell as much
_LITTLE = 0.03  # of the loss of those who know how frequent the labels of the held-out part are


def unrelated(kept: Kept, module: nn.Module | None, root: int, until: float) -> Probed:
    """Whether labels of classes, or targets of a distance, are related to what the model is given.

    Where neighbours and a straight line know nothing of them, a fresh copy is fitted to two thirds of the samples.
    Of texts it has to be many, and a line through the counts of their words that knows nothing.
    """
    texts = _texts(kept, root, until)
    batches = texts or _of_rows(kept.batches.get(root, ()))
    _, name, given = batches[-1]
    inputs, targets = torch.cat([one for one, *_ in batches]), torch.cat([one["target"] for *_, one in batches])
    counted = _counted(targets, name).to(inputs.device)
    different = {mark: number for number, mark in enumerate(_marks_of(inputs[counted]))}
    once = torch.tensor(sorted(different.values()), device=inputs.device)  # one of those that are alike
    is_fresh = len(once) > (1 - _REPEATED) * int(counted.sum())  # none came twice, to be learned by heart
    inputs, targets = inputs[counted][once], targets.to(inputs.device)[counted][once]
    labels, seen = _classes(targets, name), dict[str, Any](samples=len(once), fresh=is_fresh, texts=bool(texts))
    is_mask = _is_mask(given["target"], name)
    if labels is None:
        _refuse_few(len(once), _LEAST_MASKS if is_mask else _LEAST_NUMBERS)
        is_related = _related(inputs, targets)
    else:
        seen |= {"classes": (count := _count_of(labels)), "fresh": is_fresh and not _came_again(kept, batches)}
        of = _counts_of_words(inputs) if texts else inputs
        is_related = (not texts and _agree(of, labels)) or _correlated(of, labels, count)
    if is_related:
        return told("labels", root=root, answer="no", **seen)
    if module is None:
        raise Unknown("the model is gone")
    order, size = _order(len(once), 3), max(min(_MOST_ROWS, len(once) // _FEWEST_PARTS), 1)
    size = len(given["target"]) if texts else size  # a model of texts may take batches of one size only
    options = {key: given[key] for key in _SHAPING if key in given}  # weights of classes are in no guess
    parts = [
        (inputs[part], name, options | {"target": targets[part], "shape": (size, *given["shape"][1:])})
        for part in order.split(size) if len(part) == size
    ]  # fmt: skip
    cut = len(parts) * 2 // 3
    best, held_out = _held_out(fresh(unwrapped(module)), parts, until, False), size * (len(parts) - cut)
    # of two classes, what is known of how frequent they are in the rest is enough; of more, it differs by chance
    guess = _guessed(parts[cut:] if labels is None or len(labels.unique()) == 2 else parts)
    by_chance = max(_LITTLE * guess, 0.0 if is_mask else _chance(labels, guess) / held_out**0.5)
    answer = "yes" if best >= guess - by_chance else "no"
    return told("labels", root=root, answer=answer, **seen, guess=guess, held_out=best)


def _texts(kept: Kept, root: int, until: float) -> list[Batch]:
    """Batches of texts with a class for each, more than are kept where they can be read; empty where there are none."""
    known = [
        one for one in kept.batches.get(root, ())
        if one[0].dtype == torch.int64 and one[0].dim() == 2 and one[0].shape[1] >= _LEAST_LENGTH
        and len(one[2]["target"]) == len(one[0]) and _is_of_classes(one)
    ]  # fmt: skip
    found = (_read(kept, known[-1], until) or known) if known else []
    found = [one for one in found if one[0].shape == found[-1][0].shape]
    return found if sum(len(first) for first, *_ in found) >= _LEAST_TEXTS else []


def _counts_of_words(texts: torch.Tensor) -> torch.Tensor:
    """How often each word that is neither rare nor nearly everywhere comes in each text.

    Of few words their order may be what counts, and so it may of two texts in one, with something between them.
    """
    words, numbers = texts.unique(return_inverse=True)
    if len(texts) * len(words) > _MOST_COUNTED:
        raise Unknown("there are too many words to be counted")
    counts = torch.zeros(len(texts), len(words), device=texts.device)
    counts.scatter_add_(1, numbers, torch.ones_like(numbers, dtype=counts.dtype))
    shares = (counts > 0).double().mean(0)
    usual = (shares > _RARE) & (shares < 1 - _RARE)
    if int(usual.sum()) < _LEAST_WORDS or _are_pairs(texts, words[(counts == 1).all(0)]):
        raise Unknown("the order of so few words, or how one text goes with another, may be what is to be learned")
    return counts[:, usual]


def _are_pairs(texts: torch.Tensor, once: torch.Tensor) -> bool:
    """Whether a word that comes once in each text is at several places, and not always the last before the filling."""
    for word in once:
        place = (texts == word).long().argmax(1)
        behind = texts.gather(1, (place + 1).clamp(max=texts.shape[1] - 1)[:, None])
        if bool((place != place[0]).any()) and len(behind.unique()) > 2:
            return True
    return False


def _chance(labels: torch.Tensor | None, guess: float) -> float:
    """How far the loss of a guess differs by chance: of numbers by itself, of classes by how frequent they are."""
    if labels is None:
        return guess
    share = labels.bincount().double() / len(labels)
    return 2.5 * float(share.clamp_min(1e-12).log().std()) if len(share) > 2 else 0.0


def _of_rows(batches: Sequence[Batch]) -> list[Batch]:
    """Batches of real numbers with a class, or numbers, for each row, all of one loss and as the last one is."""
    numbers = [one for one in batches if one[1] in _DISTANCES]
    found = [
        (first, name, given) for first, name, given in numbers or batches
        if first.dim() > 1 and len(given["target"]) == len(first) and _fits(given["target"], name, given["shape"])
        and (not numbers or bool((given["target"] != given["target"][:1]).any()))
    ]  # fmt: skip
    found = [one for one in found if one[0].shape[1:] == found[-1][0].shape[1:]]
    if any(not first.is_floating_point() for first, *_ in found):
        raise Unknown("neighbours of symbols say nothing, and what is made of them may be hard to learn")
    if not found:
        raise Unknown("no batches with one class, or numbers, for each row were kept")
    if len({(name, given["shape"][1:], given["target"].shape[1:]) for _, name, given in found}) > 1:
        raise Unknown("the losses are of different classes")
    return found


def _fits(target: torch.Tensor, name: str, shape: Any) -> bool:
    """Whether a loss compares one output with each target, or one for each class with the class of a row."""
    if name in OF_CLASSES:
        is_mask = _is_mask(target, name) and (shape[0], *shape[2:]) == target.shape and int(target.max()) < shape[1]
        return is_mask or (_classes(target, name) is not None and len(shape) == 2)
    is_one = name in _DISTANCES or _is_mask(target, name) or _classes(target, name) is not None
    return is_one and math.prod(shape) == target.numel()


def _is_mask(target: torch.Tensor, name: str) -> bool:
    """Whether there is a target for each pixel."""
    is_known = name == _OF_SCORES or (
        name in OF_CLASSES and not target.is_floating_point() and bool((target >= 0).all())
    )
    return is_known and target.dim() > 2 and target.numel() <= _MOST_PIXELS


def _counted(targets: torch.Tensor, name: str) -> torch.Tensor:
    """Which rows are not left out, as those with a label below 0 are."""
    labels = _classes(targets, name)
    return torch.ones(len(targets), dtype=torch.bool) if labels is None else labels >= 0


def _count_of(labels: torch.Tensor) -> int:
    """How many classes there are, where none is nearly all and each may be learned."""
    counts = labels.bincount()
    _refuse_few(len(labels), max(_LEAST, 12 * int((counts > 0).sum())))
    if float(counts.max()) > 0.9 * len(labels):
        raise Unknown("nearly all labels are of one class")
    return len(counts)


def _refuse_few(count: int, least: int) -> None:
    if count < least:
        raise Unknown(f"{count} different samples were kept, which are too few")


def _marks_of(rows: torch.Tensor) -> list[float]:
    """What tells each row from others, by all its entries: of counts of words, a few are mostly 0."""
    flat = rows.flatten(1).double()
    by = torch.linspace(1, 2, flat.shape[1], dtype=torch.float64, device=flat.device).sqrt()
    marks: list[float] = (flat * by).sum(1).tolist()
    return marks


def _came_again(kept: Kept, kept_batches: Sequence[Batch]) -> bool:
    """Whether a step was given samples of another batch again, so that they may be learned by heart."""
    given = [tape.leaves[slot] for tape in kept.tapes.values() for slot in tape.leaves.keys() - tape.parameters.keys()]
    batches = [first for first, *_ in kept_batches]
    for leaf in given:
        if leaf.shape[1:] == batches[0].shape[1:] and leaf.dim() > 1 and leaf.is_floating_point():
            one = leaf.detach().to(batches[0].device)  # where sums of the same numbers have the same last bits
            others = {mark for batch in batches if not one.equal(batch) for mark in _marks_of(batch)}
            if any(mark in others for mark in _marks_of(one)):
                return True
    return False


def _classes(target: torch.Tensor, name: str) -> torch.Tensor | None:
    """Targets as numbers of classes, one for each row; ``None`` where they are something else."""
    if name in ("cross_entropy", "nll_loss"):
        return None if target.is_floating_point() or target.dim() != 1 else target
    is_binary = (
        name.startswith("binary") and target.numel() == len(target) and bool(((target == 0) | (target == 1)).all())
    )
    return target.flatten().long() if is_binary else None


def _agree(inputs: torch.Tensor, labels: torch.Tensor) -> bool:
    """Whether nearest neighbours have the same label more often than by chance."""
    flat = inputs.reshape(len(inputs), -1).double()[:_MOST_COMPARED]
    flat = (flat - flat.mean(0)) / flat.std(0).clamp_min(1e-6)
    nearest = torch.cdist(flat, flat).fill_diagonal_(math.inf).topk(_NEIGHBOURS, largest=False).indices
    agreement = float((labels[: len(flat)][nearest] == labels[: len(flat), None]).double().mean())
    expected = float((labels.bincount().double() / len(labels)).square().sum())
    error = math.sqrt(expected * (1 - expected) / (len(flat) * _NEIGHBOURS / 2))
    return agreement - expected > 3.5 * error


def _correlated(inputs: torch.Tensor, labels: torch.Tensor, classes: int) -> bool:
    """Whether a straight line through all entries, or the best one of them where they are many, tells something."""
    flat, marks = inputs.reshape(len(inputs), -1).double(), nn.functional.one_hot(labels, classes).double()
    one, other = ((each - each.mean(0)) / each.std(0).clamp_min(1e-9) for each in (flat, marks))
    return _correlated_with(one, other)


def _correlated_with(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of what has mean 0 and standard deviation 1."""
    count, width = one.shape
    basis = torch.linalg.qr(one).Q if width * 3 <= count else None

    def found(order: torch.Tensor) -> float:
        if basis is None:
            return float((one.T @ other[order]).abs().max())
        return float((basis.T @ other[order]).square().sum(0).max())

    # As much would be found of labels in another order, also where few samples have a value at all in some entries.
    by_chance = [found(_order(count, seed)) for seed in range(_ORDERS)]
    return found(torch.arange(count, device="cpu")) > max(by_chance)


def _order(count: int, seed: int) -> torch.Tensor:
    """Numbers in an order that is the same on every device; a tensor of any device can be indexed with it."""
    return torch.randperm(count, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


_AS_A_GUESS, _KNOWN = 0.9, 0.85  # of the loss of a constant guess
_FROZEN_BATCHES, _FROZEN_SECONDS, _FROZEN_RATE, _MOST_NUMBERS = 6, 4.0, 5e-3, 1 << 25
_MOST_READ, _READING = 64, 2.0  # batches, and seconds
_DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_HOW = ("weight", "ignore_index", "label_smoothing", "beta", "delta", "pos_weight")
_SHAPING = ("beta", "delta")
_OF_SCORES = "binary_cross_entropy_with_logits"


def frozen(kept: Kept, module: nn.Module | None, run: Run, root: int, until: float) -> Probed:
    """Whether a copy whose frozen matrices are trained, too, knows of other batches what one with them frozen doesn't.

    It is asked of a run whose loss ends where that of a constant guess is.
    """
    of = unwrapped(module) if module is not None else nn.Module()
    held = [name for name, one in of.named_parameters() if _is_frozen(one)]
    calls = [one for one in run.of(LossCall) if one.root == root and one.value is not None and one.guess]
    ends = [float(one.value or 0) / float(one.guess or 1) for one in calls[-max(len(calls) // 3, 1) :]]
    known = [one for one in kept.batches.get(root, ()) if one[1] in (*_DISTANCES, _OF_SCORES) or _is_of_classes(one)]
    if not held or not ends or sum(ends) < _AS_A_GUESS * len(ends):
        return told("frozen", root=root, answer="no")
    batches = (_read(kept, known[-1], until) if known else []) or known
    count, rows = len(batches), sum(len(first) for first, _, _ in batches)
    if count < _FROZEN_BATCHES or rows < _LEAST or sum(one.numel() for one in of.parameters()) > _MOST_NUMBERS:
        raise Unknown("few batches were kept, or the model is large")
    guess = _guessed(batches[count * 2 // 3 :])
    without, own = (_held_out(of, batches, until, thaw) for thaw in (False, True))
    answer = "yes" if own < _KNOWN * guess and without > _AS_A_GUESS * guess else "no"
    numbers = sum(one.numel() for one in of.parameters() if _is_frozen(one))
    seen: dict[str, Any] = {"guess": guess, "without": without, "trained": own, "numbers": numbers}
    tables = {f"{name}.weight" for name, one in of.named_modules() if isinstance(one, nn.Embedding)}
    seen |= {"name": held[0], "frozen": len(held), "table": tables.issuperset(held)}
    return told("frozen", root=root, answer=answer, **seen)


def _read(kept: Kept, like: Batch, until: float) -> list[Batch]:
    """Batches of a loader of the training, as far as they are like one that was kept: more than were kept."""
    first, name, given = like
    end, found = min(until, time.perf_counter() + _READING), list[Batch]()
    for loader in filter(None, (one() for one in kept.readers)):
        count, size = len(loader.dataset), len(first)
        order = _order(count, 7).tolist()[: _MOST_READ * size]
        for at in range(0, len(order) - size + 1, size):
            if time.perf_counter() > end:
                break
            batch = loader.dataset[order[at : at + size]]
            pair = list[Any](batch) if isinstance(batch, (tuple, list)) and len(batch) == 2 else []
            if [_form(one) for one in pair] != [_form(first), _form(given["target"])]:
                break
            target = pair[1].to(given["target"].device)  # where the training brought them
            found.append((pair[0].to(first.device), name, given | {"target": target}))
        if len(found) > _FROZEN_BATCHES:
            return found
    return []


def _form(one: Any) -> Any:
    return (one.shape, one.dtype) if isinstance(one, torch.Tensor) else None


def _is_frozen(parameter: nn.Parameter) -> bool:
    return not parameter.requires_grad and parameter.is_floating_point() and parameter.dim() >= 2


def _is_of_classes(batch: Batch) -> bool:
    _, name, given = batch
    return name == "cross_entropy" and not given["target"].is_floating_point() and len(given["shape"]) == 2


def _guessed(batches: list[Batch]) -> float:
    """The loss of the constant that fits some batches best."""
    name, target = batches[0][1], torch.cat([one["target"] for _, _, one in batches])
    if name == _OF_SCORES:
        constant = target.mean(0).clamp(1e-6, 1 - 1e-6).logit()
    elif (labels := _classes(target, name)) is not None:
        share = labels[labels >= 0].bincount().double() / max(int((labels >= 0).sum()), 1)
        return float(-(share.clamp_min(1e-12).log() * share).sum())
    elif name in OF_CLASSES:  # of pixels
        shares = functional.one_hot(target).double().mean(0)
        return float(torch.special.entr(shares).sum(-1).mean())
    else:
        constant = target.median(0).values if name == "l1_loss" else target.mean(0)
    rest = {key: one for key, one in batches[0][2].items() if key in _SHAPING}
    return float(getattr(functional, name)(constant.expand_as(target), target, **rest))


def _held_out(module: nn.Module, batches: list[Batch], until: float, thaw: bool) -> float:
    """The lowest loss of the last third of some batches while a copy is fitted to the others."""
    model, cut = copy.deepcopy(module), len(batches) * 2 // 3
    for one in model.parameters():
        one.requires_grad_(one.requires_grad or (thaw and _is_frozen(one)))
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=_FROZEN_RATE)
    end, best = min(until, time.perf_counter() + _FROZEN_SECONDS), math.inf
    try:
        for step in range(_STEPS):
            model.train()
            loss = _loss_of(model, *batches[step % cut])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 19:
                model.eval()
                with torch.no_grad():
                    best = min(best, sum(float(_loss_of(model, *one)) for one in batches[cut:]) / (len(batches) - cut))
            if time.perf_counter() > end:
                break
    except FAILURES as error:
        raise Unknown(f"a copy could not be fitted: {error}"[:200]) from None
    if step < 60:
        raise Unknown("there was no time left")
    return best


def _loss_of(model: nn.Module, first: torch.Tensor, name: str, given: dict[str, Any]) -> torch.Tensor:
    made = next((one for one in tensors(model(first)) if one.numel() == math.prod(given["shape"])), None)
    if made is None:
        raise Unknown("no output has the shape of what the loss was given")
    rest = {key: one for key, one in given.items() if key in _HOW}
    found: torch.Tensor = getattr(functional, name)(made.reshape(given["shape"]), given["target"], **rest)
    return found


_LEAST_NUMBERS, _LEAST_MASKS = 150, 90
_MOST_PIXELS, _MOST_COLUMNS = 1 << 20, 512  # of a batch, and of those that are compared
_KNOWS = 3.0  # standard errors of a correlation


def _related(inputs: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether nearest neighbours, or a straight line, know something of targets."""
    rows = [each[:_MOST_COMPARED].to(inputs.device).flatten(1) for each in (inputs, targets.unsqueeze(-1))]
    # some columns, evenly spread, where there are many, as pixels
    thin = (each[:, :: -(-each.shape[1] // _MOST_COLUMNS)].double() for each in rows)
    one, other = ((each - each.mean(0)) / each.std(0).clamp_min(1e-9) for each in thin)
    distances = torch.cdist(one, one).fill_diagonal_(math.inf)
    near = other[distances.topk(_NEIGHBOURS, largest=False).indices].mean(1)
    far = (_KNOWS + math.sqrt(2 * math.log(other.shape[1]))) / len(other) ** 0.5  # the largest of so many by chance
    alike = ((near - near.mean(0)) * other).mean(0) / near.std(0).clamp_min(1e-9)
    return bool((alike > far).any()) or _correlated_with(one, other)
