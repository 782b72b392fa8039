"""``anybatch demo``: trains a real model on files that are already there."""

import os
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.syntax import Syntax

from anybatch.cli.options import INTERRUPTED, file_option, force_option, json_option
from anybatch.cli.plan import show_choice, show_ways
from anybatch.cli.reporting import Outputs
from anybatch.errors import DoesNotFit
from anybatch.report.terminal import Terminal
from anybatch.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from anybatch.demo.corpus import SourceText
    from anybatch.demo.facts import CurvePoint, DemoRecord, TextFacts, TrainingCurve
    from anybatch.demo.training import TrainingRun

_SECONDS = 120.0
_QUICK_SECONDS = 20.0
_QUICK_AFTERWARDS_SECONDS = 3.5  # the last validation, the sample and the page
_QUICK_TRAINING_SECONDS = 5.0  # at least, also on a slow machine
# A prime number of samples, so that the last micro-batch is short.
_SAMPLES, _QUICK_SAMPLES = 37, 19
_SEED = 0  # of weights, batches and sample
_SAMPLE_BYTES = 500  # of text that the model writes
_LEARNED = 0.6  # of the entropy of a single byte: above it what the model writes is noise
_PROMPT = "def "
_COLUMN_WIDTHS = (12, 9, 10, 12, 10, 11)
_MOST_WAYS = 6


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line."""

    quick: bool  # whether it all has to be over in about 20 seconds
    updates: int | None  # of training, instead of a time
    sources: Path | None  # where the text is from, ``None`` for the standard library
    memory: int | None  # the simulated budget, in bytes; ``None`` for a quarter of what the whole batch needs

    @property
    def samples(self) -> int:
        """Sequences in a logical batch."""
        return _QUICK_SAMPLES if self.quick else _SAMPLES


@click.command("demo", short_help="Run a self-contained demo on local files.")
@click.option("--quick", is_flag=True, help="Finish in about 20 seconds instead of two minutes.")
@click.option(
    "--updates", type=click.IntRange(min=1), help="Train for this many updates instead, which is reproducible."
)
@click.option(
    "--sources",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Train on the Python files of another folder.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    callback=lambda ctx, param, value: _bytes_of(value),
    help="The simulated budget, such as 24MiB.  [default: a quarter of what the whole batch needs]",
)
@file_option("-o", "--output", default="anybatch-demo.html", help="The page to write.")
@json_option("the findings")
@force_option
def demo_command(*, output: Path, json_path: Path | None, force: bool, **values: Any) -> None:
    """Trains a small byte-level transformer on the sources of Python's standard library.

    The logical batch needs more memory than a simulated budget allows. The demo plans a step within that budget,
    compares its gradient, memory and time with those of the whole batch, and trains the model. One HTML page shows the
    curves. Ctrl-C ends training early and keeps the result.
    """
    options, outputs = Options(**values), Outputs(json_path, page=output, force=force)
    screen = Terminal(outputs.console())
    try:
        _run(options, screen, outputs)
    except KeyboardInterrupt:
        _say(screen, "Stopped. Nothing more was written.")
        sys.exit(INTERRUPTED)
    except DoesNotFit as error:
        raise click.ClickException(str(error)) from error


def _bytes_of(text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _run(options: Options, screen: Terminal, outputs: Outputs) -> None:
    began = time.monotonic()
    text = _read_text(options)
    facts = text.facts()
    _announce(options, screen, facts)
    if "torch" not in sys.modules:
        # OpenMP's threads spin while they wait; with other work on the cores that made a pass up to ten times slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    record = _record(options, screen, text, facts, began)
    from anybatch.demo.presentation import demo_page

    outputs.write(record.to_dict(), page_of=lambda: demo_page(record))
    _say(screen, f"Done in {format_seconds(time.monotonic() - began)}.")


def _read_text(options: Options) -> "SourceText":
    from anybatch.demo.corpus import read_sources

    try:
        return read_sources(options.sources)
    except FileNotFoundError as error:
        raise click.UsageError(str(error)) from error


def _announce(options: Options, screen: Terminal, text: "TextFacts") -> None:
    """Prints what the demonstration is made of."""
    budget = "a quarter of what the whole batch needs" if options.memory is None else format_bytes(options.memory)
    screen.heading("anybatch demo: a logical batch larger than the memory")
    for name, said in (
        ("text", f"the Python files below {text.root}"),
        ("", f"{text.train_files} files, {format_bytes(text.train_bytes)}; another {text.validation_files} held out"),
        ("", f"entropy of a single byte: {text.unigram_bits:.2f} bits"),
        ("model", "a byte-level transformer, float32, on the CPU"),
        ("memory", f"simulated budget of {budget}"),
        ("batch", f"{options.samples} sequences for each update of the optimizer"),
    ):
        screen.term(name, said)


def _record(options: Options, screen: Terminal, text: "SourceText", facts: "TextFacts", began: float) -> "DemoRecord":
    """Goes through the stages, and prints each."""
    from anybatch.demo import comparison, presentation
    from anybatch.demo.facts import DemoRecord
    from anybatch.demo.training import TrainingRun, TrainingSettings, as_tensor, first_batch
    from anybatch.demo.transformer import make_model

    model, quick = make_model(_SEED), options.quick
    train, validation = as_tensor(text.train), as_tensor(text.validation)
    settings = TrainingSettings(
        updates=options.updates, samples=options.samples, validations=4 if quick else 10,
        validation_samples=64 if quick else 256, seed=_SEED,
    )  # fmt: skip
    with _stage(screen, "1. The plan", "planning ..."):
        batch = first_batch(train, options.samples, model.context, _SEED)
        plan = comparison.plan_update(model, batch, settings, options.memory)
    show_choice(plan, screen)
    screen.line()
    show_ways(plan, screen, _MOST_WAYS, "the page")
    with _stage(screen, "2. The gradient of one logical batch", "computing ..."):
        compared = comparison.compare_gradients(model, batch, plan=plan, rounds=3 if quick else 6)
    screen.table(presentation.comparison_table(compared))
    for name, said in presentation.comparison_notes(compared):
        screen.term(name, said)
    seconds = _SECONDS
    if quick:
        left = _QUICK_SECONDS - _QUICK_AFTERWARDS_SECONDS - (time.monotonic() - began)
        seconds = max(_QUICK_TRAINING_SECONDS, left)
    curve = _trained(TrainingRun(model, train, validation, replace(settings, plan=plan, seconds=seconds)), screen)
    screen.line()
    _say(screen, presentation.outcome_text(facts, plan, curve))
    sample = _written(screen, model, curve.points[-1].validation_bits < _LEARNED * facts.unigram_bits)
    return DemoRecord(_versions(), facts, plan, compared, curve, sample)


def _say(screen: Terminal, text: str) -> None:
    screen.console.print(text, markup=False)


def _stage(screen: Terminal, heading: str, text: str) -> AbstractContextManager[Any]:
    """Prints a heading, and shows a spinner on a terminal while the stage runs."""
    screen.heading(heading)
    return screen.console.status(text) if screen.console.is_terminal else nullcontext()


def _trained(run: "TrainingRun", screen: Terminal) -> "TrainingCurve":
    """Trains with a row for each validation; the first Ctrl-C stops it between two updates, the second at once."""
    from anybatch.demo.presentation import CURVE_HEADER, curve_row

    def row(cells: tuple[str, ...]) -> None:
        _say(screen, "".join(cell.rjust(width) for cell, width in zip(cells, _COLUMN_WIDTHS, strict=True)))

    def on_validation(point: "CurvePoint") -> None:
        row(curve_row(point))

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, previous)
        run.is_stopped = True
        _say(screen, "Stopping after this update. Ctrl-C again stops at once.")

    screen.heading("3. Training (losses in bits per byte); Ctrl-C ends it early")
    row(CURVE_HEADER)
    if threading.current_thread() is not threading.main_thread():  # Python takes handlers in the main thread only
        return run.run(on_validation)
    previous = signal.signal(signal.SIGINT, stop)
    try:
        return run.run(on_validation)
    finally:
        signal.signal(signal.SIGINT, previous)


def _written(screen: Terminal, model: Any, has_learned: bool) -> str:
    """A sample of what the model writes; one that does not yet know how often each byte occurs would write noise."""
    from anybatch.demo.transformer import write_text

    screen.heading("4. What the model writes")
    if not has_learned:
        _say(screen, "Left out: the model has not learned enough yet. anybatch demo --updates 5000 trains longer.")
        return ""
    sample = write_text(model, _PROMPT, length=_SAMPLE_BYTES, seed=_SEED)
    text, console = sample.rstrip("\n"), screen.console
    if console.is_terminal:
        console.print(Syntax(text, "python", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        console.print(text, markup=False, soft_wrap=True)
    return sample


def _versions() -> dict[str, str | int]:
    import platform

    import torch

    from anybatch._version import __version__

    python, threads = platform.python_version(), torch.get_num_threads()
    return {"anybatch": __version__, "Python": python, "torch": str(torch.__version__), "threads": threads}
