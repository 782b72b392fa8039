"""Numbers that are too large for float32 are told where neighbours have become one, and others are not."""

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from anybatch.doctor.recorder import Doctor
from anybatch.doctor.samples.inputs import rounded
from anybatch.records.lossfacts import Probed

STAMPS = 1_700_000_000 + torch.randint(0, 14 * 86400, (4000,), generator=torch.Generator().manual_seed(0))
NORTHINGS = 5_800_000 + 5 * torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (STAMPS.float(), True), (NORTHINGS.float(), True), ((1 << 26) + torch.arange(3000).float(), True),
        (STAMPS, False), (STAMPS.double(), False), ((STAMPS - STAMPS.min()).float(), False),
        ((STAMPS // 3600 * 3600).float(), False),  # full hours
        ((9_000_000 + torch.arange(3000).repeat(2)).float(), False),  # numbers that are exact, each twice
        (torch.randn(4000).abs() * 1e8, False), (1 + 1e-7 * torch.randn(4000), False), (STAMPS[:9].float(), False),
    ],
)  # fmt: skip
def test_neighbours_that_have_become_one_are_seen(column: torch.Tensor, expected: bool) -> None:
    assert (rounded(column) is not None) == expected


def test_the_column_of_a_part_of_a_data_set_is_told_once() -> None:
    whole = TensorDataset(torch.stack([torch.randn(4000), STAMPS.float()], 1), torch.randn(4000))
    loader = DataLoader(Subset(whole, range(3000)), 1000)
    with Doctor() as doctor:
        for _ in range(2):
            list(loader)
    (found,) = [one for one in doctor.run.of(Probed) if one.probe == "rounded"]
    assert (found.evidence["field"], found.evidence["spacing"]) == ("tensors", 128.0)
    assert found.file == __file__
