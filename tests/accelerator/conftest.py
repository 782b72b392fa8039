"""The test device ``sim`` for the tests of this folder, without limits at the end of each."""

from collections.abc import Iterator
from typing import Any

import pytest

from accelerator import sim


@pytest.fixture(scope="module")
def device() -> Any:
    return sim.load()


@pytest.fixture(autouse=True)
def _without_limits(device: Any) -> Iterator[None]:
    yield
    for index in range(device.device_count()):
        device.fail_at(index, -1)
        device.set_limit(index, 0)
        device.set_share(index, 0)
    device.set_expandable(False)
    device.set_idle(False)
