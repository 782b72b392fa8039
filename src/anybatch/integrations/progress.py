"""Progress of a run: a bar in a terminal or a notebook, otherwise a line now and then."""

import time
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist
from rich.console import Console

from anybatch.errors import BatchError
from anybatch.records.results import StepResult

if TYPE_CHECKING:
    from anybatch.step import TrainStep


class ProgressBar:
    """An observer that shows updates, loss and speed, on the first rank only.

    Args:
        total: the number of updates; ``None`` if it is not known.
        seconds: the time between two updates of the bar or two lines, each of which waits for the device; ``None`` for
            half a second with a bar and 30 without.
        console: where to print; ``None`` for standard error.

    Raises:
        BatchError: ``total`` is not a positive integer.

    Example:
        >>> import anybatch, sys, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with ProgressBar(total=1, seconds=0, console=Console(file=sys.stdout)) as bar:
        ...     step = anybatch.TrainStep(model, lambda model, batch: model(batch).mean(), optimizer, recorder=bar)
        ...     result = step(torch.zeros(4, 2))
        update 1/1, loss ..., ... samples/s
    """

    def __init__(
        self, total: int | None = None, *, seconds: float | None = None, console: Console | None = None
    ) -> None:
        if total is not None and (isinstance(total, bool) or not isinstance(total, int) or total < 1):
            raise BatchError(f"total={total!r}; expected the number of updates, or None")
        self._console = console or Console(stderr=True)
        self._total = total
        self._has_bar = self._console.is_terminal or self._console.is_jupyter
        self._seconds = seconds if seconds is not None else (0.5 if self._has_bar else 30.0)
        self._shown, self._samples = time.perf_counter(), 0
        self._bar: Any = None
        self._handle: Any = None  # of what a notebook shows

    def __call__(self, step: "TrainStep", result: StepResult) -> None:
        """Shows a logical batch, if it is time."""
        now = time.perf_counter()
        if not is_first_rank() or now - self._shown < self._seconds:
            return
        speed = (step.samples - self._samples) / max(now - self._shown, 1e-9)
        self._shown, self._samples = now, step.samples
        text = f"loss {result.loss:.4g}, {speed:.3g} samples/s"
        of = "" if self._total is None else f"/{self._total}"
        if self._console.is_jupyter:
            self._show(step.updates, f"update {step.updates}{of}, {text}")
            return
        if not self._has_bar:
            self._console.print(f"update {step.updates}{of}, {text}", highlight=False, soft_wrap=True)
            return
        if self._bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn(),
                console=self._console,
            )  # fmt: skip
            self._bar.add_task("", total=self._total)
            self._bar.start()
        self._bar.update(0, completed=step.updates, description=text)

    def _show(self, updates: int, text: str) -> None:
        """Shows a bar of the browser's own in the output of a cell, which needs no widgets, and then changes it."""
        from IPython.display import display

        value = "" if self._total is None else f' max="{self._total}" value="{updates}"'
        shown = {"text/html": f"<progress{value}></progress> {text}", "text/plain": text}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(shown, raw=True)

    def close(self) -> None:
        """Stops the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_first_rank() -> bool:
    """Whether this is the first rank, or the only process."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
