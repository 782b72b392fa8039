"""Are the rows that a contrast pulls together the views of one sample?

Two inputs of a step have the views of a sample in the same row: which rows of the matrix of all pairs change with it
tells which belong together. Where both views are one input, they are those that are alike before training.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.rows import replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Operation, Replay, Slot, Tape
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import Probed

_LIKENESS = {"matmul": 1, "__matmul__": 1, "mm": 1, "cosine_similarity": 1, "einsum": 1, "cdist": -1}
_LEAST_ROWS = 16
_MOST_INPUTS = 3
_MOST_OF_IT = 0.4  # of a change: half of it is in the row and half in the column of one set with itself
_BY_CHANCE, _SURELY = 0.65, 0.85
"""Shares of the other rows that are less alike: of a pair by chance it is a half."""


def mispaired(kept: Kept, tape: Tape) -> Probed:
    """Whether the positive pairs of a loss are alike by chance only, and others in a fixed distance are the views."""
    rows_of(tape)
    loss = tape.losses[-1]
    held, needed = kept.first_of(tape), slots_of(tape, loss)
    run = replayed(tape, loss, lambda one: one, held=held)
    for index, operation in enumerate(tape.operations[: loss.before]):
        if operation.name in _LIKENESS and operation.grad and needed & set(operation.outs):
            found = _pulled(tape, run, index, operation)
            if found is not None:
                return _of_sources(tape, index, run, held, found[1]) or _compared(operation, *found)
    raise Unknown("no loss of pairs of rows was seen")


def _pulled(tape: Tape, run: Replay, index: int, operation: Operation) -> tuple[torch.Tensor, torch.Tensor] | None:
    """How alike the rows are, and the one that each is pulled toward, if that is one for each."""
    sign, result, live = _LIKENESS[operation.name], run.results[index][0], run.values[operation.outs[0]]
    if result.dim() != 2 or result.shape[0] != result.shape[1] or len(result) < _LEAST_ROWS or not live.requires_grad:
        return None
    total = run.values[tape.losses[-1].slot].sum()
    (slope,) = torch.autograd.grad(total, live, retain_graph=True, allow_unused=True)
    if slope is None or slope.shape != result.shape:
        return None
    pulls = (sign * slope < 0).sum(1)
    given = (sign * slope).argmin(1)
    is_one = bool((pulls == 1).all()) and len(given.unique()) == len(given)
    return (sign * result.double().nan_to_num(), given) if is_one else None


def _of_sources(
    tape: Tape, index: int, run: Replay, held: Mapping[Slot, torch.Tensor], given: torch.Tensor
) -> Probed | None:
    """Whether two inputs whose rows meet in the matrix belong together in it; nothing where that can't be told."""
    rows, loss = tape.rows, tape.losses[-1]
    inputs = [one for slot, one in tape.leaves.items() if slot in slots_of(tape, loss) - tape.parameters.keys()
              and one.shape[:1] == (rows,) and one.is_floating_point()][:_MOST_INPUTS]  # fmt: skip
    met: list[list[tuple[int, int]]] = []  # for each input and some of its rows, the row and the column that change
    for leaf in inputs if len(inputs) > 1 else ():
        changed = [
            replayed(tape, loss, lambda one, row=row, leaf=leaf: _without(one, row) if one is leaf else one, held=held)
            for row in (0, rows // 3, rows - 1)
        ]
        met.append([_place(again.results[index][0] - run.results[index][0]) for again in changed])
    pairs = [
        [(row, column) for (row, _), (_, column) in zip(one, two, strict=True)]
        for one, two in itertools.permutations(met, 2)
        if all(a[0] >= 0 and b[1] >= 0 and a != b for a, b in zip(one, two, strict=True))
    ]
    if not pairs:
        return None
    right = [[int(given[row]) == column for row, column in one] for one in pairs]
    answer = "no" if any(map(any, right)) else "yes"
    named, both = _pairings(len(given), given), [pair for one in pairs for pair in one]
    given_name = next((name for name, one in named.items() if bool((one == given).all())), "of another order")
    other = next((name for name, one in named.items() if all(int(one[row]) == column for row, column in both)), "")
    seen: dict[str, Any] = {"rows": len(given), "given": given_name, "by": "inputs"}
    seen |= {"other": other or "the row of the same sample"}
    return told("mispaired", tape.operations[index], answer=answer, **seen)


def _without(one: torch.Tensor, row: int) -> torch.Tensor:
    """A tensor with other numbers in a row."""
    other = one.clone()
    other[row] = -one[row - 1] - 1
    return other


def _place(change: torch.Tensor) -> tuple[int, int]:
    """The row and the column of a matrix that change; -1 where none does more than others."""
    size = change.double().nan_to_num().abs()
    return _largest(size.sum(1)), _largest(size.sum(0))


def _largest(size: torch.Tensor) -> int:
    return int(size.argmax()) if float(size.max()) > _MOST_OF_IT * float(size.sum()) > 0 else -1


def _pairings(count: int, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """The usual orders of pairs."""
    here = torch.arange(count, device=like.device)
    found = {
        "i": here,
        "n - 1 - i": count - 1 - here,
        "(i + 1) % n": (here + 1) % count,
        "(i - 1) % n": (here - 1) % count,
    }
    return found if count % 2 else found | {"(i + n // 2) % n": (here + count // 2) % count, "i ^ 1": here ^ 1}


def _compared(operation: Operation, alike: torch.Tensor, given: torch.Tensor) -> Probed:
    count, here = len(alike), torch.arange(len(alike), device=alike.device)
    others = _pairings(count, given)
    crosses = bool((given == here).any())  # two sets of rows, of which the same row may be the right one
    named = next((name for name, one in others.items() if bool((one == given).all())), "")
    shares = {name: _share(alike, one) for name, one in others.items()
              if name != named and (crosses or not bool((one == here).any()))}  # fmt: skip
    own, best = _share(alike, given), max(shares, key=lambda name: shares[name])
    answer = "yes" if own < _BY_CHANCE and shares[best] > _SURELY else "no"
    seen: dict[str, Any] = {"rows": count, "given": named or "of another order", "other": best, "by": "likeness"}
    seen |= {"own_share": own, "share": shares[best]}
    return told("mispaired", operation, answer=answer, **seen)


def _share(alike: torch.Tensor, pairs: torch.Tensor) -> float:
    """The share of the other rows that are less like a row than the one that it is paired with, on average."""
    mine = alike.gather(1, pairs[:, None])
    less = (alike < mine).double()
    less.fill_diagonal_(0)
    own = pairs == torch.arange(len(pairs), device=pairs.device)
    return float((less.sum(1) / (len(pairs) - 2 + own.double())).mean())
