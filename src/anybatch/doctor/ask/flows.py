"""Does a flow of couplings leave a part of its data as it is?

What a normal density is taken of is known by the slope of the loss in it, which is itself times a number. Where some of
its entries are bitwise those of the data, in each row and behind several layers, nothing is learned of them.
"""

import torch

from anybatch.doctor.ask.rows import replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Replay, Slot, Tape, slots
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import Probed

_CLOSE = 1e-4


def passed(tape: Tape) -> Probed:
    """Whether entries of the data are the same behind all layers of a flow."""
    rows, loss = rows_of(tape), tape.losses[-1]
    run, needed = replayed(tape, loss, lambda one: one), slots_of(tape, loss)
    of = _parameters_of(tape)
    made_here = sorted(needed - tape.parameters.keys(), reverse=True)
    latent = next((slot for slot in made_here if _is_latent(slot, loss.slot, of, run, rows)), None)
    if latent is None:
        raise Unknown("no normal density of what the model makes was seen")
    made = run.values[latent]
    operation = next(one for one in tape.operations if latent in one.outs)
    alike = [one for one in run.values if one in needed and not of.get(one) and run.values[one].shape == made.shape]
    for given in alike:
        same = (made == run.values[given]).all(0)
        layers = [slot for slot in needed if of.get(slot) and of[slot] < of[latent] and run.values[slot].shape
                  == made.shape and _keeps(run.values[slot], run.values[given], same)]  # fmt: skip
        if layers and 0 < int(same.sum()) < same.numel():
            return told("passed", operation, entries=int(same.sum()), of=same.numel())
    return told("passed", answer="no")


def _keeps(layer: torch.Tensor, given: torch.Tensor, same: torch.Tensor) -> bool:
    """Whether what a layer gives has these entries of the data, and others that it made."""
    own = (layer == given).all(0)
    return bool(own[same].all()) and not bool(own.all())


def _is_latent(slot: Slot, loss: Slot, of: dict[Slot, frozenset[Slot]], run: Replay, rows: int) -> bool:
    """Whether it is made with all parameters, and the slope of the loss in it is itself times a positive number."""
    one = run.values.get(slot)
    if one is None or not of.get(slot) or of[slot] != of.get(loss) or one.dim() < 2 or one.shape[0] != rows:
        return False
    if not one.requires_grad or not one.is_floating_point():
        return False
    (slope,) = torch.autograd.grad(run.values[loss].sum(), one, retain_graph=True, allow_unused=True)
    if slope is None or not bool(slope.any()):
        return False
    own = one.detach()
    factor = float((slope * own).sum() / own.pow(2).sum())
    return factor > 0 and float((slope - factor * own).abs().max()) < _CLOSE * float(slope.abs().max())


def _parameters_of(tape: Tape) -> dict[Slot, frozenset[Slot]]:
    """The parameters that each tensor is made with."""
    of = {slot: frozenset({slot}) for slot, one in tape.parameters.items() if one.requires_grad}
    for operation in tape.operations:
        made = frozenset[Slot]().union(*(of.get(one, ()) for one in slots((operation.args, operation.kwargs))))
        of |= dict.fromkeys(operation.outs, made)
    return of
