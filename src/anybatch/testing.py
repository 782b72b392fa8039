"""For people's own tests: a loss that may be split stays so."""

from typing import Any

from anybatch.certificate import check
from anybatch.gradient.losses import LossFunction
from anybatch.records.certificates import Certificate


def assert_exact(model: Any, loss_fn: LossFunction, batch: Any, **options: Any) -> Certificate:
    """Fails if micro-batches do not give the gradient of the whole batch.

    Args:
        model: see ``anybatch.check``.
        loss_fn: see ``anybatch.check``.
        batch: see ``anybatch.check``; a small one with uneven lengths is best.
        **options: the other arguments of ``anybatch.check``: ``micro_batch_size``, ``count``, ``broadcast``,
            ``collate``, ``cost`` and ``batch_norm``.

    Returns:
        The certificate, whose notes say what else there is to know.

    Raises:
        AssertionError: they do not; its text is the certificate, which says why and what to do.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> assert_exact(model, lambda model, batch: model(batch).pow(2).mean(), torch.randn(5, 3)).samples
        5
        >>> assert_exact(model, lambda model, batch: model(batch).sum(), torch.randn(5, 3))
        Traceback (most recent call last):
            ...
        AssertionError: not exact: in micro-batches the gradient of Linear is not the whole batch's
        ...
    """
    certificate = check(model, loss_fn, batch, **options)
    if not certificate.exact:
        raise AssertionError(str(certificate))
    return certificate
