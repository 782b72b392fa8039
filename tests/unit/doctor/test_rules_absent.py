"""Classes that are never a target are told where the others come in every batch."""

import pytest
import torch
import torch.nn.functional as F

from anybatch.records.lossfacts import Printed
from anybatch.records.runs import Run
from number_runs import fires, silent
from test_rules_deceiving import Batches, kinds, of, slices, small, train


def drawn(x: torch.Tensor, y: torch.Tensor) -> Batches:
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(2)).repeat(8)
    return slices(x[order], y[order])


def test_class_uncounted_fires_where_a_class_is_never_a_target() -> None:
    x, y = kinds(1024)
    held = y < 4  # the first rows of data that are sorted by class
    run = of(lambda: train(small(), drawn(x[held], y[held]), 60), ask=True)
    for accuracy, severity in ((0.1, "warning"), (0.97, "info")):
        said = Printed(label="test accuracy", steps=(60,), values=(accuracy,), line=9)
        assert fires(Run([*run.facts, said]), "CLASS_UNCOUNTED", severity).evidence == {"absent": [4], "classes": 5}


@pytest.mark.parametrize(
    "batches",
    [
        drawn(*kinds(512)),
        slices(kinds(1024)[0], kinds(1024)[1].sort().values),  # the last class comes later
        drawn(kinds(512)[0], torch.where(torch.arange(512) % 16 == 0, kinds(512)[1] % 4, 0)),  # some are rare
    ],
)
def test_class_uncounted_is_quiet_where_more_targets_may_come(batches: Batches) -> None:
    silent(of(lambda: train(small(), batches, 20, F.cross_entropy), ask=True), "CLASS_UNCOUNTED")
