"""``anybatch demo``: trains a real model on files that are already there."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click
from rich.console import Console

from anybatch.cli.demo_screen import Screen
from anybatch.cli.options import INTERRUPTED, check_file, check_folder, file_option, json_option, write_json
from anybatch.errors import DoesNotFit
from anybatch.report.pages import is_own_page, missing_extra
from anybatch.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from anybatch.demo.corpus import SourceText
    from anybatch.demo.facts import DemoRecord, TextFacts

_SECONDS = 120.0
_QUICK_SECONDS = 20.0
_QUICK_AFTERWARDS_SECONDS = 3.5  # the last validation, the sample and the page
_LEARNED = 0.6  # of the entropy of a single byte: above it what the model writes is noise
_QUICK_TRAINING_SECONDS = 5.0  # at least, also on a slow machine
_PROMPT = "def "


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line."""

    quick: bool  # whether it all has to be over in about 20 seconds
    seconds: float | None  # of training, ``None`` for what suits
    updates: int | None  # of training, instead of a time
    seed: int  # of weights, batches and sample
    sources: Path | None  # where the text is from, ``None`` for the standard library
    output: Path  # the page
    json_path: Path | None  # the findings as JSON, ``None`` for none
    memory: int | None  # the simulated budget, in bytes; ``None`` for a quarter of what the whole batch needs
    samples: int | None  # sequences in a logical batch, ``None`` for what suits
    sample_bytes: int  # how much text is written

    @property
    def logical_samples(self) -> int:
        """Sequences in a logical batch; a prime, so that the last micro-batch is short."""
        return self.samples or (19 if self.quick else 37)

    @property
    def pretended(self) -> str:
        """The simulated budget, in words."""
        return "a quarter of what the whole batch needs" if self.memory is None else format_bytes(self.memory)

    @property
    def duration(self) -> str:
        """How long training will take, in words."""
        if self.updates is not None:
            return f"{self.updates} updates"
        if self.quick:
            return f"what is left of {format_seconds(_QUICK_SECONDS)}"
        return format_seconds(self.seconds or _SECONDS)


@click.command("demo", short_help="Run a self-contained demo on local files.")
@click.option("--quick", is_flag=True, help="Finish in about 20 seconds.")
@click.option("--seconds", type=click.FloatRange(min=1), help="How long to train.  [default: 120]")
@click.option(
    "--updates", type=click.IntRange(min=1), help="Train for this many updates instead, which is reproducible."
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="The seed of weights, batches and sample.",
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
@file_option("-o", "--output", help="The page to write.  [default: anybatch-demo.html]")
@json_option("the findings")
@click.option("--force", is_flag=True, help="Overwrite a page that anybatch did not write.")
@click.option("--samples", type=click.IntRange(min=2), hidden=True)
@click.option("--sample-bytes", type=click.IntRange(min=1), default=500, hidden=True)
def demo_command(*, force: bool, output: Path | None, **values: object) -> None:
    """Trains a small byte-level transformer on the sources of Python's standard library.

    The logical batch needs more memory than a simulated budget allows. The demo plans a step within that budget,
    compares its gradient, memory and time with those of the whole batch, and trains the model. One HTML file shows the
    curves. Ctrl-C ends training early and keeps the result.
    """
    options = Options(output=output or Path("anybatch-demo.html"), **values)  # type: ignore[arg-type]
    _check_options(options, force=force)
    # JSON has standard output for itself.
    console = Console(stderr=str(options.json_path) == "-", highlight=False)
    screen = Screen(console)
    try:
        _run(options, screen)
    except KeyboardInterrupt:
        screen.say("Stopped. Nothing more was written.")
        sys.exit(INTERRUPTED)
    except DoesNotFit as error:
        raise click.ClickException(str(error)) from error


def _bytes_of(text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _check_options(options: Options, *, force: bool) -> None:
    """Refuses what would fail only after two minutes of training."""
    if options.seconds is not None and (options.updates is not None or options.quick):
        other = "--quick" if options.quick else "--updates"
        raise click.UsageError(f"got --seconds and {other}, expected one of them: leave one out")
    check_folder(options.json_path)
    check_file(options.output, "page that anybatch wrote", is_own_page, force=force)
    for path in (options.output, options.json_path):
        if path is not None and path.exists() and not os.access(path, os.W_OK):
            raise click.UsageError(f"{path} can't be written; name another file")


def _run(options: Options, screen: Screen) -> None:
    began = time.monotonic()
    text = _read_text(options)
    facts = text.facts()
    missing = missing_extra()
    page = None if missing else options.output
    screen.announce(facts, options.duration, options.logical_samples, options.pretended, page)
    if missing:
        screen.say(f"\n{missing}\nEverything else runs without it.")
    if "torch" not in sys.modules:
        # OpenMP's threads spin while they wait; with other work on the cores that made a pass up to ten times slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    record = _record(options, screen, text, facts, began)
    if options.json_path is not None:
        write_json(options.json_path, record.to_dict())
    if page is not None:
        from anybatch.demo.presentation import demo_page

        page.write_text(demo_page(record), encoding="utf-8")
    screen.finish(page, options.json_path, time.monotonic() - began)


def _read_text(options: Options) -> "SourceText":
    from anybatch.demo.corpus import read_sources

    try:
        return read_sources(options.sources)
    except FileNotFoundError as error:
        raise click.UsageError(str(error)) from error


def _record(options: Options, screen: Screen, text: "SourceText", facts: "TextFacts", began: float) -> "DemoRecord":
    from anybatch.demo.comparison import compare_gradients, plan_update
    from anybatch.demo.facts import DemoRecord
    from anybatch.demo.training import TrainingRun, TrainingSettings, as_tensor, first_batch
    from anybatch.demo.transformer import make_model, write_text

    model = make_model(options.seed)
    train, validation = as_tensor(text.train), as_tensor(text.validation)
    settings = TrainingSettings(
        updates=options.updates, samples=options.logical_samples, validations=4 if options.quick else 10,
        validation_samples=64 if options.quick else 256, seed=options.seed,
    )  # fmt: skip
    with screen.planning():
        batch = first_batch(train, options.logical_samples, model.context, options.seed)
        plan = plan_update(model, batch, settings, options.memory)
    screen.show_plan(plan)
    with screen.comparing():
        comparison = compare_gradients(model, batch, plan=plan, rounds=3 if options.quick else 6)
    screen.show_comparison(comparison)
    seconds = options.seconds or _SECONDS
    if options.quick:
        left = _QUICK_SECONDS - _QUICK_AFTERWARDS_SECONDS - (time.monotonic() - began)
        seconds = max(_QUICK_TRAINING_SECONDS, left)
    run = TrainingRun(model, train, validation, replace(settings, plan=plan, seconds=seconds))
    with _asked_to_stop(screen) as asked, screen.training() as (on_update, on_validation):
        curve = run.run(on_update, on_validation, asked.is_set)
    screen.show_outcome(facts, plan, curve)
    # A model that does not yet know how often each byte occurs writes noise.
    has_learned = curve.points[-1].validation_bits < _LEARNED * facts.unigram_bits
    sample = write_text(model, _PROMPT, length=options.sample_bytes, seed=options.seed) if has_learned else ""
    screen.show_sample(sample)
    return DemoRecord(_versions(), options.seed, facts, plan, comparison, curve, sample)


@contextmanager
def _asked_to_stop(screen: Screen) -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into a request, so that training ends between updates; the second stops at once."""
    asked = threading.Event()

    def ask(signal_number: int, frame: FrameType | None) -> None:
        asked.set()
        signal.signal(signal.SIGINT, previous)
        screen.say("Stopping after this update. Ctrl-C again stops at once.")

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)


def _versions() -> dict[str, str | int]:
    import platform

    import torch

    from anybatch._version import __version__

    python, threads = platform.python_version(), torch.get_num_threads()
    return {"anybatch": __version__, "Python": python, "torch": str(torch.__version__), "threads": threads}
