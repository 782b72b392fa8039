"""The list of slow variants names tests that there are, and leaves a quicker one of each in CI."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LISTED = [line for line in (ROOT / "tests/slow.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]


def test_each_is_a_variant_of_a_test_that_there_is() -> None:
    assert sorted(set(LISTED)) == LISTED
    named = {one.partition("[")[0] for one in LISTED}
    assert not {one for one in named if f"only {one}" in named}, "a test has slow variants or quick ones in the list"
    for one in LISTED:
        path, name, variant = re.fullmatch(r"(?:only )?(.*)::(\w+)(\[.+\])", one).groups()  # type: ignore[union-attr]
        assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), variant


@pytest.mark.parametrize("number", [0, 1])
def test_variants_that_are_not_listed_are_not_slow(number: int, request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("slow") is None, number
