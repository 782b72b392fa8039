"""Do the edges of a batch of graphs reach all of them, and are messages divided by degrees or multiplied?"""

from typing import Any

import torch

from anybatch.doctor.ask.rows import replayed, rows_of, slots_of
from anybatch.doctor.ask.tape import Operation, Replay, Tape, slots
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.lossfacts import Probed

_LEAST_GRAPHS = 4
_MOST_NODES, _LEAST_NODES, _LEAST_DEGREE = 4096, 16, 8
_EXACT, _ROOT = 1e-4, 0.4  # of a logarithm, and a power that is a square root's or more
_GATHERING = frozenset(
    {"index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_reduce_"}
)
_PRODUCTS = frozenset({"matmul", "__matmul__", "mm", "spmm", "sparse_mm"})


def not_offset(tape: Tape) -> Probed:
    """Whether messages come to no node beyond the number that the largest graph of a batch has."""
    rows_of(tape)
    run, loss = replayed(tape, tape.losses[-1], lambda one: one), tape.losses[-1]
    sizes = next((found for one in tape.leaves.values() if (found := _sizes(one)) is not None), None)
    if sizes is None:
        raise Unknown("no tensor numbers the graphs of the nodes of a batch")
    needed, nodes, largest = slots_of(tape, loss), int(sizes.sum()), int(sizes.max())
    for operation in tape.operations[: loss.before]:
        index = _index(operation, run, nodes)
        if index is None or not needed & set(operation.outs) or 2 * len(index) < nodes:
            continue
        if int(index.max()) < largest <= nodes // _LEAST_GRAPHS:
            seen: dict[str, Any] = {"nodes": nodes, "graphs": len(sizes), "last": int(index.max()), "edges": len(index)}
            return told("edges", operation, op=operation.name.strip("_"), **seen)
    return told("edges", answer="no")


def _sizes(one: torch.Tensor) -> torch.Tensor | None:
    """How many nodes each graph has, if a tensor says for each node the number of its graph, in order."""
    if one.dim() != 1 or one.dtype != torch.int64 or len(one) < 2 * _LEAST_GRAPHS or int(one[0]) != 0:
        return None
    steps = one.diff()
    is_one = bool(((steps == 0) | (steps == 1)).all()) and int(one[-1]) + 1 >= _LEAST_GRAPHS
    return one.bincount() if is_one and int(one[-1]) + 1 < len(one) else None


def _index(operation: Operation, run: Replay, nodes: int) -> torch.Tensor | None:
    """The nodes that an operation brings messages to."""
    given = [run.values[one] for one in slots((operation.args, operation.kwargs))]
    dim = next((one for one in operation.args[1:] if type(one) is int), operation.kwargs.get("dim"))
    index = next((one for one in given[1:] if one.dtype == torch.int64), None)
    if operation.name not in _GATHERING or index is None or dim != 0 or given[0].shape[:1] != (nodes,):
        return None
    return index.reshape(len(index), -1)[:, 0] if len(index) else None


def times_degrees(tape: Tape) -> Probed:
    """Whether a matrix of neighbours is multiplied by the degrees of its nodes, which it has to be divided by."""
    if tape.failed or not tape.losses:
        raise Unknown(tape.failed or "no step with a loss was written down")
    loss = tape.losses[-1]
    needed = slots_of(tape, loss) & tape.leaves.keys()
    for operation in tape.operations[: loss.before]:
        matrix = next(iter(slots(operation.args)), None)
        if operation.name in _PRODUCTS and matrix in needed and not tape.leaves[matrix].requires_grad:
            largest = _multiplied(tape.leaves[matrix].detach())
            if largest:
                return told("degrees", operation, largest=largest, nodes=len(tape.leaves[matrix]))
    return told("degrees", answer="no")


def _multiplied(matrix: torch.Tensor) -> int:
    """The largest degree, if each entry of a matrix is a product of powers of those of its two nodes, one above 0.

    Divided by, the powers are -1, or -1/2 of both; of what is summed up they are 0.
    """
    if matrix.is_sparse:
        matrix = matrix.to_dense() if len(matrix) <= _MOST_NODES else matrix.new_zeros(0)
    if matrix.dim() != 2 or not _LEAST_NODES <= len(matrix) == matrix.shape[1] <= _MOST_NODES:
        return 0
    rows, columns = matrix.nonzero(as_tuple=True)
    degrees = torch.bincount(rows, minlength=len(matrix)).double()
    entries = matrix[rows, columns].double()
    is_graph = 0 < len(rows) < matrix.numel() and bool((entries > 0).all()) and degrees.max() >= _LEAST_DEGREE
    if not is_graph or degrees[degrees > 0].unique().numel() < _LEAST_GRAPHS:
        return 0
    known = torch.stack([degrees[rows].log(), degrees[columns].clamp_min(1).log()], 1)
    powers = torch.linalg.lstsq(known, entries.log()[:, None], driver="gelsd").solution
    off = (known @ powers - entries.log()[:, None]).abs().max()
    is_product = off < _EXACT and powers.max() > _ROOT and powers.min() > -_EXACT
    return int(degrees.max()) if is_product else 0
