"""The ranks that the tests of a file share."""

import pytest

from ranks_running import run_cases


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What two ranks ended with in the cases of a file that were asked for."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    cases = {call.params["case"] for call in calls if call is not None and "case" in call.params}
    return run_cases(request.module.__name__, 2, tmp_path_factory.mktemp("ranks"), only=cases)
