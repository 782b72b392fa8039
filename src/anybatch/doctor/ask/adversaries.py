"""Does a generator work against its critic? The slopes of both losses where the critic scores what was generated.

And where the loss of a critic has a gradient in the generator too: is it the opposite of that of the generator's own?
"""

import contextlib
import itertools
import linecache
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.steps import DISTANCES, following, replayed
from anybatch.doctor.ask.tape import Operation, Replay, Slot, Tape
from anybatch.doctor.ask.trials import FAILURES, Unknown, told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_MOST_OPTIMIZERS = 4
_CLEARLY = 3  # times as far
_ROUNDED = 1e-4  # of the size of what is added up
_AGAINST = -0.5  # the cosine of gradients that undo each other; two tasks that share a net are seldom below 0 by much
_DISCOUNTED = re.compile(r"gamma\s*\*|\*\s*(\w+\.)?gamma|discount|\brewards?\b", re.IGNORECASE)


Held = Mapping[int, torch.Tensor]


def helped(kept: Kept) -> Iterator[Probed]:
    """For each pair of a critic and a generator: whether one step of the latter does what one of the former wants.

    Both are asked with the parameters as they were at first, by their ``id``: what was generated is of then.
    """
    initial = kept.initial
    some = sorted(kept.tapes.items())[:_MOST_OPTIMIZERS]
    for (critic, of_critic), (generator, of_generator) in itertools.permutations(some, 2):
        # The loss of a critic may reach the generator, too, where what is generated was not detached.
        whole, all_there = _trained(of_critic), {id(one) for one in of_generator.parameters.values()}
        own = whole & of_critic.trained or whole
        if own and own <= all_there and (_trained(of_generator) - own or of_generator.opaque):
            evidence = {"critic": critic, "optimizer": generator}
            yield from _against_values(of_critic, of_generator, own, initial, evidence)
            try:
                yield _compared(of_critic, of_generator, own, initial, evidence)
            except Unknown as why:
                if own == whole:  # else it may be the critic that is taken for a generator
                    yield told("helped", answer="unknown", detail=str(why), **evidence)


def _against_values(
    of_critic: Tape, of_actor: Tape, own: Collection[int], initial: Held, evidence: dict[str, Any]
) -> Iterator[Probed]:
    """Whether an actor makes small what its critic learns of rewards, of which its file speaks."""
    loss = of_critic.losses[-1]
    regresses = any(one.name in DISTANCES for one in of_critic.operations)
    if not regresses or not any(map(_DISCOUNTED.search, linecache.getlines(loss.file))):
        return
    with contextlib.suppress(Unknown):
        calls = _calls(of_actor, own)
        # by its last loss alone: since its step before, the critic has been trained, too
        loss = of_actor.losses[-1]
        slopes = list[float]()
        for held in (initial, {}):  # of two heads, the one that is smaller counts, at first or by now
            run, _, _ = _at_first(of_actor, held)
            ends = loss.weight * run.values[loss.slot].sum()
            slopes = slopes if any(slopes) else _sums(_differentiated(ends, [run.values[score] for _, score in calls]))
        wrong = bool(slopes) and all(one >= 0 for one in slopes) and any(slopes)
        yield told("small value", loss, answer="yes" if wrong else "no", **evidence)


def _trained(tape: Tape) -> set[int]:
    """The parameters from which a loss follows without a ``detach`` between them, by their ``id``."""
    needed = {loss.slot for loss in tape.losses}
    for operation in reversed(tape.operations):
        if operation.grad and operation.name not in ("detach", "data") and needed & set(operation.outs):
            needed |= set(operation.given)
    return {id(one) for slot, one in tape.parameters.items() if slot in needed and tape.is_live(one)}


def _compared(
    of_critic: Tape, of_generator: Tape, own: Collection[int], initial: Held, evidence: dict[str, Any]
) -> Probed:
    calls, judged = _calls(of_critic, own), _calls(of_generator, own)
    if len(calls) < 2 or len(judged) != 1:
        raise Unknown("the critic does not score what is given and what is generated each in a call")
    looks, slopes = _slopes(of_critic, calls, initial)
    (made,), (done,) = _slopes(of_generator, judged, initial)
    others = {slot for slot, one in of_critic.parameters.items()
              if id(one) not in own and isinstance(one, torch.nn.Parameter)}  # fmt: skip
    follows = following(of_critic.operations, others)
    kinds = [score in follows for _, score in calls]
    if not any(kinds):  # it was generated before the critic was called
        if any(one.shape != made.shape for one in looks):
            raise Unknown("the critic is given something of a different shape")
        far = [float((one - made).norm()) for one in looks]
        kinds = [one * _CLEARLY < max(far) for one in far]
    generated = [slope for slope, is_made in zip(slopes, kinds, strict=True) if is_made]
    given = [slope for slope, is_made in zip(slopes, kinds, strict=True) if not is_made]
    if not generated or not given:
        raise Unknown("what is generated was not told from what is given")
    wanted, real = max(generated, key=abs), max(given, key=abs)
    loss, helps = of_generator.losses[-1], _helps(done, wanted, real)
    return told("helped", loss, answer="yes" if helps else "no", of_critic=wanted, of_generator=done, **evidence)


def _helps(done: float, wanted: float, real: float) -> bool:
    """Whether a generator's slope is that of the critic at what is generated, not that at data or the opposite one."""
    if wanted * real < 0 and done:
        return wanted * done > 0
    # With squares both may fall: then it is the one that is nearer.
    against, along = min(abs(done - real), abs(done + wanted)), min(abs(done - wanted), abs(done + real))
    if not done or max(against, along) < 2 * min(against, along):
        raise Unknown("the critic's loss does not set what is generated against what is given")
    return along < against


def _calls(tape: Tape, own: Collection[int]) -> list[tuple[Slot, Slot]]:
    """What each call of the critic is given and what it gives: those of operations with its first and last parameters.

    An embedding of classes, which a conditional critic looks up, is none of them. What is made of parameters and
    buffers alone, as by a spectral norm at each call, stands for the parameters.
    """
    of_critic = {slot: frozenset({slot} if id(one) in own else ()) for slot, one in tape.parameters.items()
                 if id(one) in own or not one.requires_grad}  # fmt: skip
    found = list[tuple[Operation, frozenset[Slot]]]()
    for one in tape.operations[: tape.losses[-1].before]:
        mine = frozenset[Slot]().union(*(of_critic.get(slot, ()) for slot in one.given))
        if one.given and of_critic.keys() >= set(one.given):
            of_critic |= dict.fromkeys(one.outs, mine)
        elif one.outs and one.name != "embedding" and mine:
            found.append((one, mine))
    given = [one.given[0] for one, mine in found if mine == found[0][1]]
    scores = [one.outs[0] for one, mine in found if mine == found[-1][1]]
    if len(given) != len(scores) or of_critic.keys() & set(given):
        raise Unknown("the calls of the critic were not told from each other")
    return list(zip(given, scores, strict=True))


def about_opposed(kept: Kept, _: Run) -> Iterator[Probed]:
    """For two optimizers: whether the loss of the first has a gradient in the nets of the second, against its loss."""
    some = sorted(kept.tapes.items())[:_MOST_OPTIMIZERS]
    for (first, before), (second, after) in itertools.permutations(some, 2):
        both = [*(_trained(before) & _trained(after) & after.trained)]
        if not both:
            continue
        with contextlib.suppress(Unknown):
            one, other = (_gradient(tape, both, kept.initial) for tape in (before, after))
            cosine = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
            answer = "yes" if cosine < _AGAINST else "no"
            yield told("opposed", answer=answer, first=first, optimizer=second, cosine=cosine)


def _gradient(tape: Tape, some: Collection[int], initial: Held) -> torch.Tensor:
    """Of the losses of a step, in some parameters by their ``id``, in that order."""
    _, ends, held = _at_first(tape, initial)
    slots = {id(one): held.get(slot) for slot, one in tape.parameters.items()}
    there = [one for number in some if (one := slots[number]) is not None]
    if len(there) < len(some):
        raise Unknown("what the parameters were at first is not known")
    found = _differentiated(ends, there)
    return torch.cat([torch.zeros_like(one).flatten() if slope is None else slope.flatten()
                      for one, slope in zip(there, found, strict=True)])  # fmt: skip


def _at_first(tape: Tape, initial: Held) -> tuple[Replay, torch.Tensor, dict[Slot, torch.Tensor]]:
    """A step with the parameters as they were at first, the sum of its losses, and these parameters."""
    held = {
        slot: initial[id(one)].detach().clone().requires_grad_(tape.is_live(one))
        for slot, one in tape.parameters.items()
        if id(one) in initial
    }
    run = replayed(tape, tape.losses[-1], held=held)
    return run, torch.stack([loss.weight * run.values[loss.slot].sum() for loss in tape.losses]).sum(), held


def _differentiated(ends: torch.Tensor, by: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    try:
        return torch.autograd.grad(ends, by, allow_unused=True)
    except FAILURES as error:
        raise Unknown(f"the losses could not be differentiated: {type(error).__name__}") from None


def _slopes(tape: Tape, calls: Sequence[tuple[Slot, Slot]], initial: Held) -> tuple[list[torch.Tensor], list[float]]:
    """The mean and the spread of what the critic is given in each call, and how the losses rise with its scores."""
    run, ends, _ = _at_first(tape, initial)
    given = [run.values[one].detach().double() for one, _ in calls]
    found = _differentiated(ends, [run.values[score] for _, score in calls])
    slopes = _sums(found)
    return [torch.cat((one.mean(0, keepdim=True), one.std(0, keepdim=True))) for one in given], slopes


def _sums(slopes: Sequence[torch.Tensor | None]) -> list[float]:
    """The sums; 0 where what is left of one is its rounding, as over the scores of two classes."""
    wide = [torch.zeros(()) if one is None else one.double() for one in slopes]
    sums = [(float(one.sum()), float(one.abs().sum())) for one in wide]
    return [total if abs(total) >= _ROUNDED * size else 0.0 for total, size in sums]
