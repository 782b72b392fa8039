"""The ranks that the tests of a file share."""

import pytest

from asked import asked_for
from ranks_running import run_cases


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What two ranks ended with in the cases of a file that were asked for."""
    return run_cases(request.module.__name__, 2, tmp_path_factory.mktemp("ranks"), only=asked_for(request, "case"))
