"""Questions that train or re-initialise a copy: initial loss, one batch, and whether labels belong to the inputs.

For the last one batches that were kept are shared out; a fresh copy of the model is fitted to one part, and so are the
nearest neighbours of each input. Where neither knows more about the labels of the other part than how frequent they
are, what the model learns are the samples by heart.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.trials import FAILURES, Trial, Unknown, tensors, told, unwrapped
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.runs import Run

_STEPS = 200
_FITTED = 0.1  # of the first loss: what counts as fitted
_STUCK = 0.7
_NEAR = 0.35  # of the prior's entropy; PyTorch's initialisation of a small last layer is within 0.2 of it

Batch = tuple[torch.Tensor, str, dict[str, Any]]
"""What a net was given first, and the loss function after it with its arguments."""


class Loss:
    """The loss of a run, computed again from outputs of a copy with the targets of its last call."""

    def __init__(self, trial: Trial, root: int, doctor: Any) -> None:
        self._call = dict(getattr(doctor, "last_losses", None) or {}).get(root)
        self.trial = trial

    def __call__(self, outputs: Any) -> torch.Tensor:
        """The loss."""
        found = tensors(outputs)
        if self._call is None:
            scalars = [one for one in found if one.dim() == 0 and one.is_floating_point()]
            if not scalars:
                raise Unknown("the loss can't be rebuilt: its targets were not kept")
            return scalars[0]
        name, args, kwargs = self._call
        function = getattr(functional, name, None)
        if function is None or not args:
            raise Unknown(f"the loss {name} can't be rebuilt")
        wanted = args[0].shape
        for one in found:
            if one.shape == wanted or (one.numel() == args[0].numel() and one.shape[-1:] == wanted[-1:]):
                try:
                    result: torch.Tensor = function(one.reshape(wanted), *args[1:], **kwargs)
                except FAILURES as error:
                    raise Unknown(f"the loss can't be rebuilt: {error}"[:200]) from None
                return result if result.dim() == 0 else result.mean()
        raise Unknown("the loss can't be rebuilt: no output has the shape of its predictions")


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


def prior(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether a new copy's loss is that of knowing nothing."""
    calls = [one for one in run.of(LossCall) if one.root in (root, -1) and one.classes > 1]
    if not calls or calls[0].function not in ("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits"):
        raise Unknown("no classification loss was seen")
    expected = math.log(calls[0].classes) if calls[0].function != "binary_cross_entropy_with_logits" else math.log(2)
    module, loss = fresh(trial.module), Loss(trial, root, doctor)
    try:
        with torch.no_grad():
            value = float(loss(module(*trial.inputs.args, **trial.inputs.kwargs)))
    except FAILURES as error:
        raise Unknown(f"the model did not run: {type(error).__name__}: {error}"[:300]) from None
    near = math.isfinite(value) and abs(value - expected) <= _NEAR * expected
    return told("prior", root=root, answer="yes" if near else "no", initial=value, prior=expected)


def one_batch(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether a copy can fit the last batch."""
    loss = Loss(trial, root, doctor)
    try:
        module = fresh(trial.module)
    except Unknown:
        module = copy.deepcopy(trial.module)
    before, after, steps = trained(trial, module, loss, lambda p: torch.optim.Adam(p, lr=3e-3), _STEPS)
    answer = "unknown"
    if math.isfinite(after) and after <= _FITTED * before:
        answer = "yes"
    elif steps == _STEPS and before > 0 and not after <= _STUCK * before:
        answer = "no"
    return told("one batch", root=root, answer=answer, before=before, after=after, steps=steps)


def trained(
    trial: Trial, module: nn.Module, loss: Loss, optimizer: Callable[[Any], torch.optim.Optimizer], steps: int
) -> tuple[float, float, int]:
    """Trains a copy on the last input."""
    module.train()
    for one in module.modules():
        if isinstance(one, nn.modules.dropout._DropoutNd):
            one.eval()
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise Unknown("no parameter requires a gradient")
    stepping = optimizer(parameters)
    values: list[float] = []
    half = time.perf_counter() + max(0.0, trial.until - time.perf_counter()) / 2
    try:
        with torch.enable_grad():
            for _ in range(steps):
                if time.perf_counter() > half:
                    break
                value = loss(module(*trial.inputs.args, **trial.inputs.kwargs))
                values.append(float(value.detach()))
                if not math.isfinite(values[-1]):
                    break
                stepping.zero_grad()
                value.backward()
                stepping.step()
    except FAILURES as error:
        raise Unknown(f"the copy could not be trained: {type(error).__name__}: {error}"[:300]) from None
    if not values:
        raise Unknown("there was no time left")
    return values[0], values[-1], len(values)


PROBES: list[tuple[str, Callable[[Trial, Run, int, Any], Probed]]] = [
    ("prior", prior),
    ("one batch", one_batch),
]
"""Each a name and a function of the copy, the run, the number of the root and the recorder."""


_LEAST = 240
_REPEATED = 0.05  # of the samples that came again, at least
_FITTING_STEPS = 120
_SECONDS = 6.0
_NEIGHBOURS = 7
_ORDERS = 39  # of the labels, none of which may tell as much
_LITTLE = 0.03  # of the loss of those who know how frequent the labels of the held-out part are


def unrelated(kept: Kept, module: nn.Module | None, root: int, until: float) -> Probed:
    """Whether labels of classes, or targets of a distance, are related to what the model is given."""
    if numbers := [one for one in kept.batches.get(root, ()) if one[1] in _DISTANCES]:
        return _unrelated_numbers(numbers, module, root, until)
    inputs, labels, width, is_fresh = _pairs(kept, root)
    count = len(labels)
    classes = int(labels.max()) + 1
    half = count * 2 // 3
    share = labels.bincount(minlength=classes).double() / count
    expected = float((share**2).sum())
    agreement, error = _neighbours(inputs, labels, expected)
    evidence: dict[str, Any] = {"samples": count, "classes": classes, "agreement": agreement, "by_chance": expected}
    evidence |= {"fresh": is_fresh}  # none came twice, so that none can have been learned by heart
    if agreement - expected > 3.5 * error or _correlated(inputs, labels, classes):
        return told("labels", root=root, answer="no", **evidence)
    if module is None:
        raise Unknown("the model is gone")
    guess = float(-(share.clamp_min(1e-12).log() * share).sum())
    best, own = _fitted(fresh(unwrapped(module)), inputs, labels, width, half, until)
    evidence |= {"held_out": best, "guess": guess}
    if classes == 2 and best < (1 - _LITTLE) * own:
        return told("labels", root=root, answer="no", **evidence)
    noise = 2.5 * float(share.clamp_min(1e-12).log().std()) / (count - half) ** 0.5 if classes > 1 else 0.0
    answer = "no" if best < guess - max(0.03 * guess, noise) else "yes"
    return told("labels", root=root, answer=answer, **evidence)


def _pairs(kept: Kept, root: int) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
    """Inputs and labels of classes, each input once, how many are told apart, and whether hardly any came twice.

    0 classes are two of which one score tells, and -1 two of which one probability does.
    """
    found = [
        (first, labels, width)
        for first, name, given in kept.batches.get(root, ())
        if (labels := _classes(given["target"], name)) is not None and len(labels) == len(first)
        and (width := _width(name, given["shape"], len(first))) is not None
    ]  # fmt: skip
    found = [one for one in found if one[0].shape[1:] == found[-1][0].shape[1:] and one[0].dim() > 1]
    if any(not one.is_floating_point() for one, *_ in found):
        raise Unknown("neighbours of symbols say nothing, and what is made of them may be hard to learn")
    if not found:
        raise Unknown("no batches with one class for each row were kept")
    if len({one[2] for one in found}) > 1:
        raise Unknown("the losses are of different classes")
    inputs = torch.cat([one[0] for one in found])
    labels = torch.cat([one[1] for one in found]).to(inputs.device)
    ignored = labels < 0
    inputs, labels = inputs[~ignored], labels[~ignored]
    once = _once(inputs)
    is_fresh = len(once) > (1 - _REPEATED) * len(labels) and not _came_again(kept, [one[0] for one in found])
    inputs, labels = inputs[once], labels[once]
    counts = labels.bincount()
    if len(labels) < _LEAST or int((counts > 0).sum()) < 2 or len(labels) < 12 * int((counts > 0).sum()):
        raise Unknown(f"{len(labels)} different samples were kept, which are too few")
    if float(counts.max()) > 0.9 * len(labels):
        raise Unknown("nearly all labels are of one class")
    return inputs, labels, int(found[0][2]), is_fresh


def _once(rows: torch.Tensor) -> torch.Tensor:
    """The number of each row that is unlike all others, and of one of those that are alike."""
    different = {mark: number for number, mark in enumerate(_marks_of(rows))}
    return torch.tensor(sorted(different.values()), device=rows.device)


def _marks_of(rows: torch.Tensor) -> list[float]:
    """What tells each row from others, by all its entries: of counts of words, a few are mostly 0."""
    flat = rows.flatten(1).double()
    by = torch.linspace(1, 2, flat.shape[1], dtype=torch.float64, device=flat.device).sqrt()
    marks: list[float] = (flat * by).sum(1).tolist()
    return marks


def _came_again(kept: Kept, batches: Sequence[torch.Tensor]) -> bool:
    """Whether a step was given samples of another batch again, so that they may be learned by heart."""
    given = [tape.leaves[slot] for tape in kept.tapes.values() for slot in tape.leaves.keys() - tape.parameters.keys()]
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


def _width(name: str, shape: Any, rows: int) -> int | None:
    if name.startswith("binary"):
        return -(name == "binary_cross_entropy") if math.prod(shape) == rows else None
    return int(shape[1]) if len(shape) == 2 else None


def _neighbours(inputs: torch.Tensor, labels: torch.Tensor, expected: float) -> tuple[float, float]:
    """The share of nearest neighbours with the same label, and how far it may lie from chance."""
    flat = inputs.reshape(len(inputs), -1).double()[:1500]
    flat = (flat - flat.mean(0)) / flat.std(0).clamp_min(1e-6)
    distances = torch.cdist(flat, flat)
    distances.fill_diagonal_(float("inf"))
    nearest = distances.topk(_NEIGHBOURS, largest=False).indices
    same = (labels[: len(flat)][nearest] == labels[: len(flat), None]).double()
    return float(same.mean()), (expected * (1 - expected) / (len(flat) * _NEIGHBOURS / 2)) ** 0.5


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


def _fitted(
    model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, width: int, half: int, until: float
) -> tuple[float, float]:
    """The lowest loss on the held-out part while a model is fitted to the other one, and that of its own shares."""
    order = _order(len(labels), 3)
    inputs, labels = inputs[order], labels[order]
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=2e-3)
    end, best = min(until, time.perf_counter() + _SECONDS), float("inf")
    try:
        for step in range(_FITTING_STEPS):
            model.train()
            at = step * 64 % max(half - 63, 1)
            part = slice(at, min(at + 64, half))
            loss = nn.functional.cross_entropy(_logits(model, inputs[part], width), labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 9:
                model.eval()
                with torch.no_grad():
                    best = min(
                        best, float(nn.functional.cross_entropy(_logits(model, inputs[half:], width), labels[half:]))
                    )
            if time.perf_counter() > end:
                if step < 40:
                    raise Unknown("there was no time left")
                break
    except FAILURES as error:
        raise Unknown(f"a copy could not be fitted: {error}"[:200]) from None
    own = labels[half:].bincount().double() / (len(labels) - half)
    return best, float(-(own.clamp_min(1e-12).log() * own).sum())


def _logits(model: nn.Module, inputs: torch.Tensor, width: int) -> torch.Tensor:
    rows = len(inputs)
    found = [one for one in tensors(model(inputs)) if one.shape == (rows, width) or (width < 1 and one.numel() == rows)]
    if len(found) != 1:
        raise Unknown(f"{len(found)} outputs have a row of classes for each input")
    made = found[0].to(inputs.device)  # where the labels are
    if width > 0:
        return made
    score = made.flatten() if width == 0 else made.flatten().clamp(1e-6, 1 - 1e-6).logit()
    return torch.stack((torch.zeros_like(score), score), 1)


_AS_A_GUESS, _KNOWN = 0.9, 0.85  # of the loss of a constant guess
_FROZEN_BATCHES, _FROZEN_SECONDS, _FROZEN_RATE, _MOST_NUMBERS = 6, 4.0, 5e-3, 1 << 25
_MOST_READ, _READING = 64, 2.0  # batches, and seconds
_DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_HOW = ("weight", "ignore_index", "label_smoothing", "beta", "delta", "pos_weight")
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
    elif name not in _DISTANCES:
        share = target[target >= 0].bincount().double() / max(int((target >= 0).sum()), 1)
        return float(-(share.clamp_min(1e-12).log() * share).sum())
    else:
        constant = target.median(0).values if name == "l1_loss" else target.mean(0)
    return float(getattr(functional, name)(constant.expand_as(target), target))


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


_PARTS = 30  # that unrelated samples are shared out to
_LEAST_NUMBERS = 150
_KNOWS = 3.0  # standard errors of a correlation


def _unrelated_numbers(batches: list[Batch], module: nn.Module | None, root: int, until: float) -> Probed:
    """Whether neighbours, a straight line and a copy all know no more of other targets than their mean."""
    like = [one[0].shape[1:] for one in batches[-1:]]
    batches = [
        (first, name, given) for first, name, given in batches
        if first.dim() > 1 and first.is_floating_point() and [first.shape[1:]] == like and _differ(given["target"])
        and len(given["target"]) == len(first) and math.prod(given["shape"]) == given["target"].numel()
    ]  # fmt: skip
    if not batches:
        raise Unknown("no batches with numbers as targets were kept")
    inputs, targets = (
        torch.cat(some) for some in zip(*((one, given["target"]) for one, _, given in batches), strict=True)
    )
    once = _once(inputs)
    seen: dict[str, Any] = {"samples": len(once), "fresh": len(once) > (1 - _REPEATED) * len(targets)}
    inputs, targets = inputs[once], targets[once.to(targets.device)]
    if len(once) < _LEAST_NUMBERS:
        raise Unknown(f"{len(once)} different samples were kept, which are too few")
    if _related(*(one.double().reshape(len(once), -1) for one in (inputs, targets))):
        return told("labels", root=root, answer="no", **seen)
    if module is None:
        raise Unknown("the model is gone")
    order, size = _order(len(once), 3), max(len(once) // _PARTS, 1)
    _, name, given = batches[-1]
    parts = [
        (inputs[part], name, given | {"target": targets[part], "shape": (size, *given["shape"][1:])})
        for part in order.split(size) if len(part) == size
    ]  # fmt: skip
    guess, best = _guessed(parts[len(parts) * 2 // 3 :]), _held_out(fresh(unwrapped(module)), parts, until, False)
    seen |= {"guess": guess, "held_out": best}
    by_chance = max(_LITTLE, (size * (len(parts) - len(parts) * 2 // 3)) ** -0.5)
    return told("labels", root=root, answer="yes" if best > (1 - by_chance) * guess else "no", **seen)


def _differ(targets: torch.Tensor) -> bool:
    return bool((targets != targets[:1]).any())


def _related(inputs: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether nearest neighbours, or a straight line, know something of targets."""
    inputs, targets = inputs[:1500], targets[:1500].to(inputs.device)
    one, other = ((each - each.mean(0)) / each.std(0).clamp_min(1e-9) for each in (inputs, targets))
    distances = torch.cdist(one, one).fill_diagonal_(math.inf)
    near = other[distances.topk(_NEIGHBOURS, largest=False).indices].mean(1)
    far = _KNOWS / len(other) ** 0.5
    alike = ((near - near.mean(0)) * other).mean(0) / near.std(0).clamp_min(1e-9)
    return bool((alike > far).any()) or _correlated_with(one, other)
