"""What the tests of a file ask for in this run, so that a fixture which they share makes no more."""

from typing import Any

import pytest


def asked_for(request: pytest.FixtureRequest, parameter: str) -> set[Any]:
    """Returns the values of a parameter in those tests of the file that run."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return {call.params[parameter] for call in calls if call is not None and parameter in call.params}
