"""The tests of the engine on the test accelerator: whatever they make lies there, since it is the default device.

``scripts/test --device sim`` runs them; what can't run there is skipped, and said at the end.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerator import sim

FILES = (
    "test_exactness", "test_several_losses", "test_coupled", "test_retries", "test_transaction", "test_noise_scale",
    "test_precision", "test_boundary",
)  # fmt: skip

WHY = {
    "recurrent]": "packed sequences want their lengths on the host, where these tests do not make them",
    "autocast": "what they are compared with runs under autocast of the host",
    "test_boundary.py::test_everything_happens_once_and": "they count torch.autograd.backward, which torch calls once "
    "more where there is a default device",
    "test_a_retry_does_nothing_of_the_boundary_twice": "they count torch.autograd.backward, which torch calls once "
    "more where there is a default device",
}
"""Parts of names of tests, and why these are not run."""


def pytest_load_initial_conftests(args: list[str]) -> None:
    """Makes the device the default one, and takes all files where none is given."""
    sim.load()
    torch.set_default_device("sim")
    if not any(".py" in one for one in args):
        args += [str(path) for path in sorted(Path("tests").rglob("test_*.py")) if path.stem in FILES]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what can't run on the device."""
    for item in items:
        why = next((why for part, why in WHY.items() if part in item.nodeid), None)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says what was left out, and why."""
    skipped = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", ()))
    terminalreporter.section("not run on the test accelerator")
    for why, number in skipped.most_common():
        terminalreporter.write_line(f"{number:5} tests: {why.removeprefix('Skipped: ')}")
