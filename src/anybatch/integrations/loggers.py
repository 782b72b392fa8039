"""Logs the numbers of updates to TensorBoard, Weights & Biases, a CSV file or any function."""

import csv
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybatch.doctor.live import sentence_of
from anybatch.errors import BatchError
from anybatch.integrations.progress import is_first_rank
from anybatch.records.findings import Finding
from anybatch.records.results import StepResult

if TYPE_CHECKING:
    from anybatch.step import Observer, TrainStep

Sink = Callable[[dict[str, float], int], None]
"""A function of the numbers of an update, by name, and of the number of updates so far."""


class Log:
    """An observer that passes the numbers of every few updates to functions; on the first rank only.

    The numbers are ``loss`` and its parts, metrics that are numbers, ``grad_norm``, the learning rate ``lr``,
    ``micro_batches``, ``count``, ``samples`` so far, ``samples_per_second``, and ``skipped`` logical batches so far.

    Args:
        *sinks: are called with the numbers by name and the number of updates.
        every: updates between two calls; only calls wait for the device.
        prefix: the prefix of each name, such as ``"train/"``.

    Raises:
        BatchError: ``every`` is not a positive integer, or a sink is not callable.

    Example:
        >>> import anybatch, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> seen = []
        >>> log = Log(lambda metrics, step: seen.append((step, metrics["lr"])))
        >>> step = anybatch.TrainStep(model, lambda model, batch: model(batch).mean(), optimizer, recorder=log)
        >>> result = step(torch.ones(4, 2))
        >>> seen
        [(1, 0.1)]
    """

    def __init__(self, *sinks: Sink, every: int = 1, prefix: str = "") -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise BatchError(f"every={every!r}; expected an integer of at least 1")
        for sink in sinks:
            if not callable(sink):
                raise BatchError(f"a sink is a {type(sink).__name__}; expected a function of the numbers and the step")
        self._sinks, self._every, self._prefix = sinks, every, prefix
        self._since = time.perf_counter()
        self._samples: int | None = None

    def __call__(self, step: "TrainStep", result: StepResult) -> None:
        """Logs the result of a logical batch; skipped ones show in the next that is logged."""
        if result.skipped or step.updates % self._every or not is_first_rank():
            return
        metrics = {f"{self._prefix}{name}": value for name, value in self._numbers(step, result).items()}
        for sink in self._sinks:
            sink(dict(metrics), step.updates)

    def _numbers(self, step: "TrainStep", result: StepResult) -> dict[str, float]:
        losses = {f"loss/{name}": loss for name, loss in result.losses.items()} if len(result.losses) > 1 else {}
        metrics = {name: float(value) for name, value in result.metrics.items() if isinstance(value, (int, float))}
        rates = [float(optimizer.param_groups[0]["lr"]) for optimizer in step._optimizers]
        now, before = time.perf_counter(), self._samples
        seconds, self._since, self._samples = now - self._since, now, step.samples
        samples = result.attempts[-1].samples if before is None else step.samples - before
        return {
            "loss": result.loss, **losses, **metrics,
            **({} if result.grad_norm is None else {"grad_norm": result.grad_norm}),
            **({"lr": rates[0]} if len(rates) == 1 else {f"lr/{i}": rate for i, rate in enumerate(rates)}),
            "micro_batches": result.micro_batches, "count": result.count, "samples": step.samples,
            "skipped": step.skipped,
            "samples_per_second": samples / max(seconds, 1e-9),
        }  # fmt: skip


class Observers:
    """Several observers as one: a log and a doctor, for ``TrainStep(recorder=...)``.

    Args:
        *observers: each is notified of every logical batch.

    Example:
        >>> Observers(Log(), Log()) is not None
        True
    """

    def __init__(self, *observers: "Observer") -> None:
        self._observers = observers

    def __call__(self, step: "TrainStep", result: StepResult) -> None:
        """Calls all observers."""
        for observer in self._observers:
            observer(step, result)

    def follow(self, *subjects: Any) -> None:
        """Passes models and optimizers to observers that have this method, such as a doctor."""
        for observer in self._observers:
            follow = getattr(observer, "follow", None)
            if follow is not None:
                follow(*subjects)


class TensorBoard:
    """A sink that writes scalars for TensorBoard.

    Args:
        folder: the folder of the run, or a ``SummaryWriter``.

    Raises:
        ImportError: TensorBoard is not installed, and a folder was given.
    """

    def __init__(self, folder: Any) -> None:
        self.writer = folder
        if isinstance(folder, (str, Path)):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError("loggers.TensorBoard needs TensorBoard: pip install tensorboard") from error
            self.writer = SummaryWriter(str(folder))

    def __call__(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes the numbers."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def alert(self, finding: Finding) -> None:
        """Writes a finding as text, for ``Doctor(on_finding=...)``."""
        self.writer.add_text("anybatch/findings", sentence_of(finding), finding.step)
        self.writer.flush()


class WandB:
    """A sink that sends numbers to Weights & Biases.

    Args:
        run: the result of ``wandb.init``; ``None`` to call it.
        **init: arguments for ``wandb.init``, such as ``project``.

    Raises:
        ImportError: ``wandb`` is not installed, and no run was given.
    """

    def __init__(self, run: Any = None, **init: Any) -> None:
        if run is None:
            try:
                import wandb
            except ImportError as error:
                raise ImportError("loggers.WandB needs Weights & Biases: pip install wandb") from error
            run = wandb.init(**init)
        self.run = run

    def __call__(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends the numbers."""
        self.run.log(dict(metrics), step=step)

    def alert(self, finding: Finding) -> None:
        """Sends a finding as an alert, for ``Doctor(on_finding=...)``."""
        level = {"error": "ERROR", "warning": "WARN"}.get(finding.severity, "INFO")
        self.run.alert(title=f"{finding.code} {finding.name}", text=sentence_of(finding), level=level)


class Csv:
    """A sink that writes a line for each call; later lines have the columns of the first.

    Args:
        path: the file, which is overwritten.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.write_text("", encoding="utf-8")
        self._columns: list[str] = []

    def __call__(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes a line; the file is closed after it."""
        is_first = not self._columns
        self._columns = self._columns or ["step", *metrics]
        with self._path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            if is_first:
                writer.writeheader()
            writer.writerow({"step": step, **metrics})
