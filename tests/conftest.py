"""What every test starts from: one thread, fixed seeds, and no GPU tests where there is no GPU."""

import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

# Set before torch is imported, and inherited by the processes that tests start: sums then come out in one order.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import numpy as np
import pytest
import torch

from anybatch.doctor.ask.asking import OF_A_STEP
from anybatch.planning.planner import Planner
from anybatch.tensors.randomness import seed
from asked import asked_for
from memory_steps import constant_times as with_constant_times
from ranks_running import run_cases

torch.set_num_threads(1)

# Plans measure times for a moment only: these decide what is chosen, and not how many bytes it takes.
assert Planner.__init__.__kwdefaults__ is not None
Planner.__init__.__kwdefaults__["patience"] = 0.03


SLOW = Path(__file__).with_name("slow.txt")


class TorchRandom:
    """Lets hypothesis start every example from one state of torch's generator, so that failures can be replayed."""

    def seed(self, number: int) -> None:
        seed(number)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


TORCH_RANDOM = TorchRandom()  # hypothesis keeps a weak reference only
hypothesis.register_random(TORCH_RANDOM)

# Examples have no deadline and may be slow to draw: the cores are shared, and time says nothing about correctness.
_SLOW_IS_FINE = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=25, derandomize=True, print_blob=True, suppress_health_check=_SLOW_IS_FINE
)
hypothesis.settings.register_profile("deep", deadline=None, max_examples=2000, suppress_health_check=_SLOW_IS_FINE)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks variants as slow: those that ``slow.txt`` names, and of a test the others than its ``only`` ones."""
    lines = set(SLOW.read_text(encoding="utf-8").splitlines())
    only = {line.removeprefix("only ") for line in lines if line.startswith("only ")}
    narrowed = {name.partition("[")[0] for name in only}
    tests = {item.nodeid.partition("[")[0] for item in items}
    for item in items:
        is_other = item.nodeid not in only and item.nodeid.partition("[")[0] in narrowed
        if is_other or item.nodeid in lines:
            item.add_marker(pytest.mark.slow)
    lost = sorted((tests & narrowed) - {item.nodeid.partition("[")[0] for item in items if item.nodeid in only})
    if lost and not any("::" in one for one in config.args):  # a variant that is asked for alone is no whole test
        raise pytest.UsageError(f"tests/slow.txt names no variant that there is of {', '.join(lost)}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test marked ``gpu`` where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True, scope="module")
def what_is_there_stays() -> Iterator[None]:
    """Leaves what the libraries and the tests before have made out of garbage collections, which plans ask for.

    A worker that runs thousands of tests has millions of objects, and each collection would go through all of them.
    What the user of a library froze stays frozen, whatever is called.
    """
    gc.collect()
    gc.freeze()
    yield
    assert gc.get_freeze_count(), "something took the frozen objects back into garbage collections"


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Seeds every generator, so that a test gives the same numbers alone, in the suite and in any worker."""
    random.seed(0)
    np.random.seed(0)
    seed(0)


@pytest.fixture(autouse=True)
def asks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no doctor put questions when it is closed, except in tests that are marked: most are of what is recorded.

    Those that run a step many times are put where the mark says ``"all"``.
    """
    if (mark := request.node.get_closest_marker("asks")) is None:
        monkeypatch.setattr("anybatch.doctor.recorder._answers", lambda *_, **more: ())
    elif not mark.args:
        monkeypatch.setattr("anybatch.doctor.ask.asking.OF_A_STEP", OF_A_STEP[:-2])


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> None:
    """Lets a test begin as a fresh process does, in which nothing was compiled; the doctor asks for that."""
    evaluation = sys.modules.get("torch._dynamo.eval_frame")
    if evaluation is not None:
        evaluation.cached_backends.clear()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What two ranks, which the tests of a file share, ended with in the cases of the file that were asked for."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_cases(request.module.__name__, 2, folder, only=asked_for(request, "case"))


@pytest.fixture
def constant_times() -> Iterator[None]:
    """Has the plan with the fewest micro-batches be the fastest."""
    with with_constant_times():
        yield
