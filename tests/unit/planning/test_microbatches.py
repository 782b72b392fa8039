"""The micro-batch that a plan is made with takes no more memory than that of the step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybatch.batch import batches
from anybatch.batch.batches import Splittable
from anybatch.planning.microbatches import micro_batch_of


@pytest.mark.parametrize("is_copied", [True, False])
def test_what_lies_before_the_largest_micro_batch_is_not_copied_at_once(
    is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def writable(batch: Any) -> Any:
        copied.append(len(batch["x"]))
        return batch

    monkeypatch.setattr(batches, "writable", writable)
    splittable = Splittable([{"x": [torch.ones(1 + i) for i in range(12)], "y": torch.ones(12)}])
    splittable.is_copied = is_copied
    subject: Any = SimpleNamespace(splittable=splittable, loss_fn=None)
    parts = splittable.plan(3, is_shared=False)
    copied.clear()
    found = micro_batch_of(subject, parts[0])
    assert [len(one) for one in found["x"]] == [10, 11, 12]
    assert max(copied, default=0) == (3 if is_copied else 0)
