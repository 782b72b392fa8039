"""Several threads that read one result: a logger beside the training loop.

How this could be silently wrong: the second one finds that a value is computed, before it is known.
"""

import threading
from collections.abc import Callable
from typing import Any

from anybatch.records.results import StepResult


def result_of(losses: Callable[[], dict[str, float]]) -> StepResult:
    return StepResult(losses=losses, counts=lambda: {"loss": 4.0}, metrics=dict, grad_norm=lambda: 2.0, micro_batches=2)


def test_threads_that_read_one_result_at_once_get_the_same() -> None:
    meeting = threading.Barrier(4, timeout=60)

    def losses() -> dict[str, float]:
        meeting.wait()  # until all of them are in here
        return {"loss": 3.0}

    result, found = result_of(losses), list[Any]()

    def read() -> None:
        try:
            found.append(result.losses)
        except Exception as error:  # noqa: BLE001 - of another thread, which would be lost
            found.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert found == [{"loss": 3.0}] * 4
    assert all(one is found[0] for one in found)
    assert (result.loss, result.count, result.grad_norm) == (3.0, 4, 2.0)
