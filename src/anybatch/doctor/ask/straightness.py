"""Do layers feed each other with nothing that bends between them, so that together they are one linear layer?"""

from collections.abc import Iterator
from typing import NamedTuple

from anybatch.doctor.ask.steps import MOVING, PRODUCTS, Step, asks, following, said
from anybatch.doctor.ask.tape import Operation, Slot
from anybatch.doctor.ask.trials import Unknown
from anybatch.records.lossfacts import Probed

_MOST = 400  # operations that are looked at; where a model bends, it does so within a few
_WEIGHING = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
_TURNING = frozenset({"t", "T", "mT", "transpose", "swapaxes"})
_STRAIGHT = MOVING | _TURNING | {
    "permute", "movedim", "squeeze", "unsqueeze", "expand", "repeat", "contiguous", "clone", "to", "float", "double",
    "type_as", "__getitem__", "select", "index_select", "narrow", "split", "chunk", "unbind", "cat", "stack", "pad",
    "add", "add_", "sub", "sub_", "rsub", "neg", "mean", "sum", "batch_norm", "embedding",
    *(f"{name}avg_pool{dims}d" for name in ("", "adaptive_") for dims in (1, 2, 3)),
    *(f"dropout{dims}" for dims in ("", "1d", "2d", "3d")),
}  # fmt: skip
_SCALING = frozenset({"mul", "mul_", "div", "div_"})


class _Layer(NamedTuple):
    """A product with a weight."""

    inputs: int
    outputs: int
    weight: Slot


@asks("layers", of_rows=False)
def layers(step: Step) -> Iterator[Probed]:
    """Whether layers feed each other with nothing that bends between them, up to the loss or an activation at the end.

    A bottleneck, which is narrower than what comes in and what goes out, is meant.
    """
    every, products = _pairs(step)
    pairs = [one for one in every if one[1] >= min(one[0], one[2]) > 0]
    made = following(step.operations, (out for at in products for out in step.operations[at].outs))
    behind = (one for one in step.used() if made & set(one.given))  # what comes into the first layer is an input
    sides = (
        [any(step.values[slot].requires_grad for slot in side) for side in (one.given, one.outs)] for one in behind
    )
    if pairs and (step.tape.opaque & step.needed or [True, False] in sides):  # as by the forward of an own function
        raise Unknown("a part of the step was computed by what has no graph, which may bend")
    if pairs:
        sizes = dict.fromkeys(pair for one in pairs[::-1] for pair in (one[:2], one[1:]))
        yield said(step.loss, root=step.root, layers=[f"{one}→{other}" for one, other in sizes])


def _pairs(step: Step) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Layers of which one feeds the other, where nothing bends from the inputs to the last layer, and their places.

    For each pair, the last one first, it gives how many features or channels come into the first layer, lie between
    them, and go out of the second; 0 lie between where they are ordered in another way there. Nothing where something
    bends, where a weight is frozen or computed, and where one feeds itself, as over time.
    """
    last = _products_behind(step, [step.loss.slot], len(step.operations), straight=False)
    found: dict[int, _Layer] = {}
    feeding: list[tuple[int, int]] = []  # the places of both products
    for at in (waiting := last or []):
        layer = _layer(step, step.operations[at])
        before = _products_behind(step, step.operations[at].given[:1], at, straight=True)
        if layer is None or before is None:
            return [], []
        found[at] = layer
        feeding += [(one, at) for one in before]
        waiting.extend(one for one in before if one not in waiting)
    behind: dict[int, set[Slot]] = {}  # the weights that lead to each
    for one, at in sorted(feeding):
        behind.setdefault(at, set()).update({found[one].weight}, behind.get(one, ()))
    if any(found[at].weight in weights for at, weights in behind.items()):
        return [], []
    both = [(found[one], found[at]) for one, at in feeding]
    pairs = [(one.inputs, one.outputs if one.outputs == at.inputs else 0, at.outputs) for one, at in both]
    return pairs, waiting


def _products_behind(step: Step, some: list[Slot], before: int, *, straight: bool) -> list[int] | None:
    """The places of the first products on each way back from tensors with a graph.

    Nothing where a way has to be ``straight`` and something bends, or where it is long.
    """
    waiting, found, seen = [(slot, before) for slot in some], list[int](), set[int]()
    for slot, end in waiting:
        at = step.made_at(slot, end)
        if at < 0 or at in seen or not step.values[slot].requires_grad:
            continue
        seen.add(at)
        one = step.operations[at]
        if one.kind in _WEIGHING | PRODUCTS:
            found.append(at)
        elif len(seen) > _MOST or (straight and not _is_straight(step, one)):
            return None
        else:
            waiting += [(given, at) for given in one.given]
    return found


def _is_straight(step: Step, one: Operation) -> bool:
    given = {*one.given} - step.leaves.keys() - step.parameters.keys()
    computed = [slot for slot in given if step.values[slot].requires_grad]
    return one.kind in _STRAIGHT or (one.kind in _SCALING and len(computed) == 1)


def _layer(step: Step, product: Operation) -> _Layer | None:
    """A product with a weight; ``None`` if it is one with something that is computed or frozen."""
    weight, turned = product.given[1] if len(product.given) > 1 else Slot(-1), product.kind not in _WEIGHING
    for one in step.path(weight):
        if one.kind not in _TURNING:
            return None
        weight, turned = one.given[0], not turned
    held = step.parameters.get(weight)
    if held is None or held.dim() < 2 or not step.values[weight].requires_grad:
        return None
    outputs, inputs = (int(size) for size in (held.shape[:2][::-1] if turned else held.shape[:2]))
    return _Layer(inputs, outputs, weight)
