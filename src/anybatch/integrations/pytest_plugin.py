"""A marker for pytest: it fails a test whose tensors take more memory than its limit."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

MARKER = "anybatch_memory"


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line(
        "markers", f'{MARKER}(limit): the tensors of the test take at most so much memory, such as "200MiB" (anybatch)'
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Measures a test with the marker; its fixtures exist already."""
    marker = pyfuncitem.get_closest_marker(MARKER)
    if marker is None:
        return
    if len(marker.args) != 1 or marker.kwargs:
        pytest.fail(f'{MARKER} got {marker.args or marker.kwargs}; expected one limit, as in {MARKER}("200MiB")', False)
    pyfuncitem.obj = _measured(pyfuncitem.obj, str(marker.args[0]))


def _measured(test: Callable[..., Any], text: str) -> Callable[..., Any]:
    @functools.wraps(test)
    def measured(*args: Any, **kwargs: Any) -> Any:
        from anybatch.memory.measuring import measure
        from anybatch.units import format_bytes, parse_bytes

        limit = parse_bytes(text)
        results: list[Any] = []
        memory = measure(lambda: results.append(test(*args, **kwargs)))
        if memory.peak_bytes > limit:
            took = format_bytes(memory.peak_bytes)
            pytest.fail(f"the tensors of this test take {took}, more than {format_bytes(limit)}: {memory}", False)
        return results[0]

    return measured
