"""Is a target made by a net that is trained to meet it? A teacher whose student's loss trains it, too."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anybatch.doctor.ask.rows import replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Slot, Tape, slots
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.events import Backward, Stepped
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.runs import Run

_COMPARING = frozenset({"kl_div", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cross_entropy"})


def only_agreeing(tape: Tape, number: int, run: Run, modules: Mapping[int, Any]) -> Probed:
    """Whether all that a loss asks of two nets, both of which its optimizer trains, is that they agree."""
    rows_of(tape)
    loss = tape.losses[-1]
    if len(tape.losses) > 1 or not _is_alone(run, number):
        raise Unknown("the optimizer takes steps of several losses")
    values, needed = replayed(tape, loss, lambda one: one).values, slots_of(tape, loss)
    trained = {slot for slot, one in tape.parameters.items() if id(one) in _trained(run, number, modules)}
    for operation in tape.operations[: loss.before]:
        sides = list(slots((operation.args, operation.kwargs)))
        if operation.name not in _COMPARING or len(sides) != 2 or not needed & set(operation.outs):
            continue
        one, two = (slots_of(tape, replace(loss, slot=side)) for side in sides)
        inputs = tape.leaves.keys() - tape.parameters.keys()
        nets, data = (one & trained, two & trained), one & inputs == two & inputs != set()
        grads = all(values[side].requires_grad for side in sides)
        beside = slots_of(tape, loss, but=[operation]) & trained or _has_data_of_its_own(tape, one | two)
        if grads and all(nets) and not nets[0] & nets[1] and data and not beside:
            return told("only agreeing", operation, op=operation.name, optimizer=number)
    return told("only agreeing", answer="no")


def _has_data_of_its_own(tape: Tape, sides: set[Slot]) -> bool:
    """Whether data meet what a net has made of them, as in a rest that it is to explain."""
    data, made = set(tape.leaves.keys() - tape.parameters.keys()), set[Slot]()
    for operation in tape.operations:
        given = set(slots((operation.args, operation.kwargs)))
        if given & made and given & data and sides & set(operation.outs):
            return True
        (made if given & (made | tape.parameters.keys()) else data).update(operation.outs if given else ())
    return False


def _is_alone(run: Run, number: int) -> bool:
    """Whether all backwards between the steps of an optimizer are of one line, and of one loss function."""
    steps = [one.at for one in run.of(Stepped) if one.optimizer == number]
    if not steps:
        return False
    backwards = {(one.file, one.line) for one in run.of(Backward) if steps[0] <= one.at <= steps[-1]}
    calls = {one.function for one in run.of(LossCall) if steps[0] <= one.at <= steps[-1]}
    return len(backwards) == 1 and len(calls) <= 1


def _trained(run: Run, number: int, modules: Mapping[int, Any]) -> set[int]:
    """The parameters of an optimizer by their ``id``."""
    facts = run.optimizers.get(number)
    own = {one for group in facts.groups for one in group.parameters} if facts is not None else set()
    names = {(run.parameters[one].root, name) for one in own for name in run.parameters[one].names}
    every = (module.named_parameters() for module in modules.values())
    return {
        id(one) for root, of_root in zip(modules, every, strict=True) for name, one in of_root if (root, name) in names
    }
