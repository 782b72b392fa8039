"""Are the labels of mixed rows weighed as the rows are? What a trained model finds in the rows says so.

Mixup gives each row two labels: its own, and that of another row of the batch. A loss of both has the same scores and
the same labels in two orders.
"""

from itertools import combinations

import torch
import torch.nn.functional as F

from anybatch.doctor.ask.rows import replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Tape, slots
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import Probed

_CLEAR = 0.55  # the share of the label that counts more
_FEWEST = 8  # rows whose labels differ
_SURE = 4.0  # standard errors


def mixed_apart(tape: Tape) -> Probed:
    """Whether a model finds in its inputs the label that counts less, more than the one that counts more."""
    rows_of(tape)
    loss = tape.losses[-1]
    run, needed = replayed(tape, loss, lambda one: one), slots_of(tape, loss)
    terms = [one for one in tape.operations[: loss.before] if one.name == "cross_entropy" and needed & set(one.outs)]
    for one, other in combinations(terms, 2):
        (scores, *labels), (same, *others) = (list(slots((term.args, term.kwargs))) for term in (one, other))
        if scores != same or len(labels) != 1 or len(others) != 1:
            continue
        both = [run.values[labels[0]], run.values[others[0]]]
        if both[0].dtype != torch.int64 or not torch.equal(both[0].flatten().sort()[0], both[1].flatten().sort()[0]):
            continue
        outs = [run.values[term.outs[0]] for term in (one, other)]
        slopes = torch.autograd.grad(run.values[loss.slot].sum(), outs, retain_graph=True)
        first, second = (float(slope.sum()) for slope in slopes)
        share, rest = max(first, second) / (first + second), min(first, second) / (first + second)
        heavy, light = both if first > second else both[::-1]
        if first <= 0 or second <= 0 or share < _CLEAR or int((heavy != light).sum()) < _FEWEST:
            break
        found = [F.cross_entropy(run.values[scores].detach(), y, reduction="none") for y in (heavy, light)]
        more = (found[0] - found[1])[heavy != light].double()
        sure = float(more.mean() / (more.std() / len(more) ** 0.5).clamp_min(1e-12))
        answer = "yes" if sure > _SURE else "no" if sure < -_SURE else "unknown"
        of_heavy, of_light = (float(each.mean()) for each in found)
        return told("mixed apart", one, answer=answer, share=share, rest=rest, heavy=of_heavy, light=of_light)
    raise Unknown("no labels in two orders were seen that clearly count differently")
