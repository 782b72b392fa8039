"""In the script that ``anybatch tune`` runs: measures its step for some batches, then tries learning rates."""

from collections.abc import Callable
from typing import Any

_RATED = 8  # batches of the range test, the last that were seen


class TuneWatch:
    """Measures the first ``TrainStep`` of a script while it trains."""

    def __init__(self, steps: int, answer: Callable[[dict[str, Any]], None]) -> None:
        self._steps, self._answer = steps, answer
        self._step: Any = None
        self._noise: Any = None
        self._batches: list[Any] = []
        self._seen = 0
        self._result: Any = None
        self._rates: list[tuple[dict[str, Any], Any]] = []

    def attach(self) -> None:
        """Begins to wait for a step; torch must have been imported."""
        from anybatch.step import TrainStep

        original: Any = TrainStep.__call__

        def call(step: Any, batch: Any) -> Any:
            if self._step is None:
                self._begin(step)
            if step is not self._step:
                return original(step, batch)
            self._batches = [*self._batches[1 - _RATED :], batch]
            self._result = original(step, batch)
            self._seen += 1
            if self._seen >= self._steps:
                self.finish()
            return self._result

        TrainStep.__call__ = call  # type: ignore[method-assign, assignment]
        self._original = original

    def _begin(self, step: Any) -> None:
        from anybatch.scaling.noisescale import NoiseScale

        self._step, self._noise = step, NoiseScale(step, every=1, halves=True)
        groups = [group for one in step._optimizers for group in one.param_groups]
        self._rates = [(group, group.get("initial_lr", group["lr"])) for group in groups]  # a warm-up begins at 0

    def finish(self) -> None:
        """Answers with the facts if a step was seen; does not return then."""
        if self._step is None or not self._seen:
            return
        self._noise.remove()
        self._answer(self._facts())

    def _facts(self) -> dict[str, Any]:
        from anybatch.scaling.tuning import advice_of, rates_that_train

        step, optimizers = self._step, self._step._optimizers
        for group, rate in self._rates:  # as the script says it, before any schedule
            group["lr"] = rate
        rated = rates_that_train(lambda batch: self._original(step, batch), step.model, optimizers, self._batches)
        found = advice_of(
            self._noise, optimizers, batch=step._rows, micro_batches=self._result.micro_batches, steps=self._seen,
            rated=rated,
        )  # fmt: skip
        return {"status": "tuned", **found.to_dict()}
