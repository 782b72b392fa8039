"""Counts: the number of items that a loss is the mean over."""

from collections.abc import Callable
from typing import Any

import torch

from anybatch.batch.layout import lay_out
from anybatch.batch.trees import lookup
from anybatch.errors import CountError


def count_samples(batch: Any) -> int:
    """Counts the samples of a batch.

    Args:
        batch: any nested container of tensors of shape ``[rows, ...]``.

    Returns:
        The number of rows.

    Raises:
        BatchError: leaves disagree on the number of rows, or there are none.

    Example:
        >>> count_samples({"x": torch.zeros(5, 3), "y": torch.zeros(5)})
        5
    """
    return lay_out(batch).rows


def count_tokens(path: str, *, ignore_index: int = -100, shift: int = 0) -> Callable[[Any], torch.Tensor]:
    """Returns a ``count=`` function for losses that are means over tokens.

    Args:
        path: dotted path of the labels, an integer tensor of shape ``[rows, ..., time]``, which may be nested; the
            empty string is the batch itself.
        ignore_index: the label that the loss ignores, as in ``torch.nn.functional.cross_entropy``.
        shift: number of positions at the start of each row without a prediction. A causal language model that shifts
            its labels itself needs ``shift=1``.

    Returns:
        A function of a batch that returns a 0-dim tensor on the device of the labels.

    Raises:
        CountError: ``shift`` is not an integer of at least 0. Calling the result raises it if ``path`` is not in the
            batch, is not an integer tensor, or with ``shift`` has no time dimension.

    Example:
        >>> labels = torch.tensor([[5, -100, 7], [1, 2, -100]])
        >>> int(count_tokens("labels")({"labels": labels})), int(count_tokens("labels", shift=1)({"labels": labels}))
        (4, 2)
    """
    if isinstance(shift, bool) or not isinstance(shift, int) or shift < 0:
        raise CountError(f"shift={shift!r}; expected an integer of at least 0", path=path)

    def count(batch: Any) -> torch.Tensor:
        try:
            labels = lookup(batch, path)
        except KeyError as error:
            raise CountError(f"count_tokens({path!r}): {error.args[0]}", path=path) from None
        if (
            not isinstance(labels, torch.Tensor)
            or labels.dtype is torch.bool
            or (labels.is_floating_point() or labels.is_complex())
        ):
            kind = f"{labels.dtype} tensor" if isinstance(labels, torch.Tensor) else type(labels).__name__
            raise CountError(f"count_tokens({path!r}) found a {kind}; expected a tensor of integer labels", path=path)
        if shift and labels.dim() < 2:
            raise CountError(
                f"count_tokens({path!r}, shift={shift}) found labels of shape {tuple(labels.shape)}; expected "
                "[rows, time] with the time as the last dimension",
                path=path,
            )
        # Rows of a nested tensor differ in length.
        rows = [row[..., shift:].reshape(-1) for row in labels.unbind()] if labels.is_nested else []
        predicted = torch.cat(rows) if labels.is_nested else labels[..., shift:]
        limits = torch.iinfo(labels.dtype)
        if not limits.min <= ignore_index <= limits.max:  # a comparison would wrap it around
            return torch.tensor(predicted.numel(), device=labels.device)
        return (predicted != ignore_index).sum()

    return count
