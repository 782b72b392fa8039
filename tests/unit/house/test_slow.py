"""The list of slow variants names tests that there are, and leaves a quicker one of each in CI."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
LISTED = [line for line in (ROOT / "tests/slow.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]


def test_each_is_a_variant_of_a_test_that_there_is() -> None:
    assert sorted(set(LISTED)) == LISTED
    for one in LISTED:
        path, name, variant = re.fullmatch(r"(.*)::(\w+)(\[.+\])", one).groups()  # type: ignore[union-attr]
        assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), variant
