"""Are the rows that a contrast pulls together those that are alike? Before training the views of a sample are."""

import torch

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.rows import replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Operation, Replay, Tape
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import Probed

_LIKENESS = {"matmul": 1, "__matmul__": 1, "mm": 1, "cosine_similarity": 1, "einsum": 1, "cdist": -1}
_LEAST_ROWS = 16
_BY_CHANCE, _SURELY = 0.65, 0.85
"""Shares of the other rows that are less alike: of a pair by chance it is a half."""


def mispaired(kept: Kept, tape: Tape) -> Probed:
    """Whether the positive pairs of a loss are alike by chance only, and others in a fixed distance are the views."""
    rows_of(tape)
    loss = tape.losses[-1]
    run, needed = replayed(tape, loss, lambda one: one, held=kept.first_of(tape)), slots_of(tape, loss)
    for index, operation in enumerate(tape.operations[: loss.before]):
        if operation.name in _LIKENESS and operation.grad and needed & set(operation.outs):
            found = _pulled(tape, run, index, operation)
            if found is not None:
                return _compared(operation, *found)
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


def _compared(operation: Operation, alike: torch.Tensor, given: torch.Tensor) -> Probed:
    count, here = len(alike), torch.arange(len(alike), device=alike.device)
    others = {
        "i": here, "i ^ 1": here ^ 1, "(i + n // 2) % n": (here + count // 2) % count, "n - 1 - i": count - 1 - here,
        "(i + 1) % n": (here + 1) % count, "(i - 1) % n": (here - 1) % count,
    }  # fmt: skip
    crosses = bool((given == here).any())  # two sets of rows, of which the same row may be the right one
    if count % 2:
        others = {name: one for name, one in others.items() if "2" not in name and "^" not in name}
    named = next((name for name, one in others.items() if bool((one == given).all())), "")
    shares = {name: _share(alike, one) for name, one in others.items()
              if name != named and (crosses or not bool((one == here).any()))}  # fmt: skip
    own, best = _share(alike, given), max(shares, key=lambda name: shares[name])
    answer = "yes" if own < _BY_CHANCE and shares[best] > _SURELY else "no"
    seen = {"rows": count, "given": named or "of another order", "other": best, "own_share": own, "share": shares[best]}
    return told("mispaired", operation, answer=answer, **seen)


def _share(alike: torch.Tensor, pairs: torch.Tensor) -> float:
    """The share of the other rows that are less like a row than the one that it is paired with, on average."""
    mine = alike.gather(1, pairs[:, None])
    less = (alike < mine).double()
    less.fill_diagonal_(0)
    own = pairs == torch.arange(len(pairs), device=pairs.device)
    return float((less.sum(1) / (len(pairs) - 2 + own.double())).mean())
