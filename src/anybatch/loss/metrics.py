"""What a loss function returns beside the loss, joined over micro-batches."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anybatch.errors import LossError
from anybatch.records.means import Mean


def checked_metrics(metrics: Mapping[str, Any], rows: int | None, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Detaches the metrics of a micro-batch and refuses what can't be joined.

    Args:
        metrics: by name, each a ``Mean`` or a tensor with one row a sample.
        rows: the samples of the micro-batch, ``None`` if nobody knows.
        before: the checked metrics of the micro-batch before, ``None`` for the first one.

    Raises:
        LossError: a metric is of another kind, or the micro-batches do not have the same metrics.
    """
    checked = {str(name): _checked(str(name), value, rows) for name, value in metrics.items()}
    if before is not None:
        kinds, usual = ({name: _kind(value) for name, value in found.items()} for found in (checked, before))
        for name in [*kinds, *usual]:
            if kinds.get(name) != usual.get(name):
                raise LossError(
                    f"the metric {name!r} is {kinds.get(name, 'missing')} in a micro-batch and "
                    f"{usual.get(name, 'missing')} in the one before; expected the same metrics each time: a Mean "
                    "over no "
                    "items is Mean(0, 0), rows of unlike length are padded or given as a Mean",
                    name=name,
                )
    return checked


def _checked(name: str, value: Any, rows: int | None) -> Any:
    if isinstance(value, Mean) and _is_number(value.total) and _is_number(value.count):
        return Mean(_detached(value.total), _detached(value.count))
    if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == (len(value) if rows is None else rows):
        return value.detach()
    if isinstance(value, torch.Tensor):
        kind = f"tensor of shape {tuple(value.shape)}"
    else:
        kind = (
            f"Mean of {value.total!r:.60} over {value.count!r:.60}" if isinstance(value, Mean) else type(value).__name__
        )
    raise LossError(
        f"the metric {name!r} is a {kind}, which can't be joined over micro-batches; expected a Mean of two numbers, "
        f"or a tensor with one row for each of the {rows} samples",
        name=name,
    )


def _kind(value: Any) -> str:
    return f"a tensor with rows of shape {tuple(value.shape[1:])}" if isinstance(value, torch.Tensor) else "a Mean"


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, (int, float))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def joined_metrics(found: Sequence[Mapping[str, Any]], order: Sequence[int]) -> dict[str, Any]:
    """Joins metrics over micro-batches.

    Args:
        found: the checked metrics of each micro-batch.
        order: the position in the logical batch of each sample, in the order in which they ran.

    Returns:
        ``Mean`` s as floats, tensors with one row a sample in the order of the batch.

    Example:
        >>> joined_metrics([{"hits": Mean(3, 4)}, {"hits": Mean(1, 4)}], range(8))
        {'hits': 0.5}
    """
    joined: dict[str, Any] = {}
    for name in found[0] if found else ():
        values: list[Any] = [metrics[name] for metrics in found]
        if isinstance(values[0], Mean):
            total, count = sum(float(mean.total) for mean in values), sum(float(mean.count) for mean in values)
            joined[name] = Mean(total, count).value
            continue
        if len({value.device for value in values}) > 1:  # of several devices: joined on none of them
            values = [value.cpu() for value in values]
        rows = torch.cat(values)
        is_in_order = all(a < b for a, b in itertools.pairwise(order))
        joined[name] = rows if is_in_order else rows[torch.tensor(list(order), device=rows.device).argsort()]
    return joined
