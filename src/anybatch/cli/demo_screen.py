"""The output of ``anybatch demo``: a progress bar on a terminal, plain lines in a pipe."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax

from anybatch.cli.plan_screen import show_choice, show_ways
from anybatch.report.terminal import Terminal
from anybatch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from anybatch.demo.facts import CurvePoint, GradientComparison, TextFacts, TrainingCurve
    from anybatch.demo.training import Moment
    from anybatch.records.plans import Plan

Callbacks = tuple[Callable[["Moment"], None], Callable[["CurvePoint"], None]]

_COLUMN_WIDTHS = (12, 9, 10, 12, 10, 11)
_MOST_WAYS = 6
_PAST_OF_LOSS = 0.9  # of the smoothed loss, what stays at each update


class Screen(Terminal):
    """Prints the demonstration."""

    def say(self, text: str) -> None:
        """Prints a sentence."""
        self.console.print(text, markup=False)

    def announce(self, text: "TextFacts", duration: str, samples: int, memory: str, page: Path | None) -> None:
        """Prints what the demonstration will do."""
        self.heading("anybatch demo: a logical batch larger than the memory")
        rows = (
            ("text", f"the Python files below {text.root}"),
            (
                "",
                f"{text.train_files} files, {format_bytes(text.train_bytes)}; another {text.validation_files} held out",
            ),
            ("", f"entropy of a single byte: {text.unigram_bits:.2f} bits"),
            ("model", "a byte-level transformer, float32, on the CPU"),
            ("memory", f"simulated budget of {memory}"),
            ("batch", f"{samples} sequences for each update of the optimizer"),
            ("steps", "1. the plan: the fastest configuration within that budget"),
            ("", "2. the gradient of the whole batch against that of its micro-batches"),
            ("", f"3. training for {duration}; Ctrl-C ends it early"),
            ("", "4. a sample of what the model writes"),
            ("", "5. no page, see below" if page is None else f"5. the page {page}"),
        )
        self._terms(rows)

    def planning(self) -> AbstractContextManager[Any]:
        """Shows a spinner on a terminal while the update is planned."""
        self.heading("1. The plan")
        return self._working("planning ...")

    def show_plan(self, plan: "Plan") -> None:
        """Prints the chosen configuration and its alternatives."""
        show_choice(plan, self.console)
        self.line()
        show_ways(plan, self.console, _MOST_WAYS, "the page")

    def comparing(self) -> AbstractContextManager[Any]:
        """Shows a spinner on a terminal while the gradients are compared."""
        self.heading("2. The gradient of one logical batch")
        return self._working("computing ...")

    def show_comparison(self, comparison: "GradientComparison") -> None:
        """Prints the table and its explanation."""
        from anybatch.demo.presentation import comparison_notes, comparison_table

        self.table(comparison_table(comparison))
        self._terms(comparison_notes(comparison))

    @contextmanager
    def training(self) -> Iterator[Callbacks]:
        """Yields the callbacks for each update and for each validation."""
        from anybatch.demo.presentation import CURVE_HEADER, curve_row

        self.heading("3. Training (losses in bits per byte)")
        self.say(_columns(CURVE_HEADER))

        def on_validation(point: "CurvePoint") -> None:
            self.say(_columns(curve_row(point)))

        if not self.console.is_terminal:
            yield (lambda moment: None), on_validation
            return
        with _progress(self.console) as progress:
            yield _Bar(progress).advance, on_validation

    def show_outcome(self, text: "TextFacts", plan: "Plan", training: "TrainingCurve") -> None:
        """Prints the outcome of the training."""
        from anybatch.demo.presentation import outcome_text

        self.line()
        self.say(outcome_text(text, plan, training))

    def show_sample(self, sample: str) -> None:
        """Prints the text that the model wrote; if it is empty, says that the model has not learned enough."""
        self.heading("4. What the model writes")
        if not sample:
            self.say("Left out: the model has not learned enough yet. anybatch demo --seconds 600 trains longer.")
        else:
            self.code(sample)

    def code(self, text: str) -> None:
        """Prints the text of a program, in colours on a terminal."""
        text = text.rstrip("\n")
        if self.console.is_terminal:
            self.console.print(Syntax(text, "python", theme="ansi_dark", background_color="default", word_wrap=True))
        else:
            self.console.print(text, markup=False, soft_wrap=True)

    def finish(self, page: Path | None, json_path: Path | None, seconds: float) -> None:
        """Prints the paths of the results and the total time."""
        self.line()
        if page is not None:
            self.line(f"Page  {page.absolute()}")
        if json_path is not None and str(json_path) != "-":
            self.line(f"JSON  {json_path.absolute()}")
        self.say(f"Done in {format_seconds(seconds)}.")

    def _working(self, text: str) -> AbstractContextManager[Any]:
        return self.console.status(text) if self.console.is_terminal else nullcontext()

    def _terms(self, rows: Sequence[tuple[str, str]]) -> None:
        for name, text in rows:
            self.term(name, text)


class _Bar:
    """The line that moves: how far, the loss, the speed and the memory."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=1.0, state="starting")
        self._loss: float | None = None

    def advance(self, moment: "Moment") -> None:
        from anybatch.memory.meter import resident_bytes

        before = moment.loss_bits if self._loss is None else self._loss
        self._loss = _PAST_OF_LOSS * before + (1 - _PAST_OF_LOSS) * moment.loss_bits
        state = f"loss {self._loss:.2f}  {moment.tokens_per_second / 1000:.1f}k tokens/s"
        state += f"  {format_bytes(resident_bytes())}"
        self._progress.update(self._task, completed=moment.fraction, state=state)


def _progress(console: Console) -> Progress:
    columns = (
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[state]}", markup=False),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, expand=True, transient=True)


def _columns(cells: tuple[str, ...]) -> str:
    return "".join(cell.rjust(width) for cell, width in zip(cells, _COLUMN_WIDTHS, strict=True))
