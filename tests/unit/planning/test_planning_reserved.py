"""The fewest bytes with which a modelled allocator serves a step are found for any sizes."""

import pytest

from anybatch.planning.reserved import Replay

MEBIBYTE = 2**20


class Constant(Replay):
    """A step that reserves one number of bytes, and can't do with fewer."""

    def __init__(self, peak: int) -> None:
        self.peak = peak

    def reserved(self, limit: int | None) -> int:
        if limit is not None and limit < self.peak:
            raise MemoryError
        return self.peak


@pytest.mark.parametrize(
    ("limit", "peak"),
    [(100 * MEBIBYTE, 103 * MEBIBYTE), (50_000_000, 53 * MEBIBYTE + 512), (100 * MEBIBYTE, 120 * MEBIBYTE + 512),
     (100 * MEBIBYTE, 120 * MEBIBYTE), (200 * MEBIBYTE, 100 * MEBIBYTE), (512, 2**40)],
)  # fmt: skip
def test_the_search_for_the_fewest_bytes_ends(limit: int, peak: int) -> None:
    found = Constant(peak).needed(limit)
    assert peak <= found <= max(peak + 4 * MEBIBYTE, peak * 1.02)
