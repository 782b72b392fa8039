"""``anybatch watch``: follows a run from another terminal through the record that it writes."""

import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from anybatch.cli.doctor_records import is_record, records_of_ranks
from anybatch.doctor.live import Judge, sentence_of
from anybatch.records.findings import Finding
from anybatch.records.tailing import Tail
from anybatch.report.diagnosis import crash_of, title_of_run
from anybatch.report.series import Series, series_of, thinned
from anybatch.report.svg import Curve
from anybatch.report.tables import clean, number_text
from anybatch.units import format_bytes, format_seconds

_BARS = "▁▂▃▄▅▆▇█"
_ASCII = "_.,-=+*#"
_WIDTH = 32
_MOST_POINTS = 240
_MOST_FINDINGS = 8
_WIDE = 100.0  # ratio of the greatest value to the least above which logarithms are drawn
_LONGEST = 1 << 20  # bytes of a first line
_STYLES = {"error": "bold red", "warning": "bold yellow"}


@click.command("watch", short_help="Follow a run from another terminal.")
@click.argument("record", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--once", is_flag=True, help="Print one frame and end.")
def watch_command(record: Path, once: bool) -> None:
    """Follows the RECORD that anybatch doctor --record or anybatch.Doctor(path=...) is writing.

    Twice a second, until the run ends, it shows the loss, learning rate, gradient norm, update-to-weight ratio, memory,
    and findings. It only reads the file: run it anywhere, end it by Ctrl-C, start it again. If the record does not
    exist yet, it waits; with --once that is an error, with exit code 2.
    """
    if record.is_file() and not (is_record(record) or _is_begun(record)):
        names = (f"run{n or ''}.jsonl" for n in itertools.count())
        new = next(name for name in names if not Path(name).exists())
        raise click.UsageError(f"{record} is no record of a run; anybatch doctor --record {new} train.py writes one")
    console = Console(highlight=False)
    frames = Frames(record, bars=_ASCII if console.options.ascii_only else _BARS)
    if once:
        frame = frames.next()
        if not frames.was_there:
            raise click.UsageError(f"{record} is not there; anybatch doctor --record {record} train.py writes it")
        console.print(frame)
        return
    with Live(frames.next(), console=console, refresh_per_second=4, transient=False) as live:
        while not frames.has_ended:
            time.sleep(0.5)
            live.update(frames.next())


def _is_begun(path: Path) -> bool:
    """Whether the first line of a record may still be on its way."""
    with path.open("rb") as file:
        line = file.readline(_LONGEST)
    return line.startswith(b"{") and len(line) < _LONGEST and not line.endswith(b"\n")


class Frames:
    """Frames of a growing record."""

    def __init__(self, record: Path, *, bars: str = _BARS) -> None:
        self._record, self._bars = record, bars
        self._tails: dict[int, tuple[Tail, Judge]] = {}
        self._begin()

    def _begin(self) -> None:
        self._found: list[Text] = []
        self._curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
        self._speed: tuple[float, int, float] = (time.monotonic(), 0, 0.0)

    @property
    def was_there(self) -> bool:
        """Whether there was a record."""
        return bool(self._tails)

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended on all ranks."""
        return bool(self._tails) and all(tail.ended is not None for tail, _ in self._tails.values())

    def next(self) -> Group:
        """Reads what is new and returns the next frame."""
        ranks = {} if self._record.exists() else records_of_ranks(self._record)
        for rank, path in (ranks or {0: self._record}).items():
            if path.exists():
                tail, judge = self._tails.setdefault(rank, (Tail(path), Judge()))
                is_first, renewals = not tail.step, tail.renewals
                tail.read()
                is_leading = rank == min(ranks, default=0)
                if tail.renewals != renewals:
                    is_first, judge = True, Judge()
                    self._tails[rank] = tail, judge
                    if is_leading:
                        self._begin()
                step = tail.step if is_leading else 0  # of the others, what is not finite is looked at
                if judge.is_due(step, not_finite=tail.not_finite) or (is_leading and tail.ended is not None):
                    self._tell(judge.news(tail.whole(), tail.step), f"rank {rank}, " if ranks else "")
                if is_leading:
                    self._draw(series_of(tail.whole() if is_first else tail.recent()))
        if not self._tails:
            return Group(Text(f"{self._record} is not there yet; waiting for the run to write it."))
        tail = self._tails[min(self._tails)][0]
        return Group(Text(self._head(tail), style="bold"), self._table(), *self._findings(tail))

    def _tell(self, found: Sequence[Finding], whose: str) -> None:
        for one in found:
            sentence = sentence_of(one)
            if not any(known.plain.endswith(clean(sentence)) for known in self._found):  # told by another rank
                self._found.append(Text(clean(f"{whose}{sentence}"), style=_STYLES.get(one.severity, "")))

    def _draw(self, series: Series) -> None:
        """Adds what is new to the curves."""
        ratios = Curve(
            "median", tuple(one.step for one in series.ratios), tuple(one.middle for one in series.ratios)
        )  # fmt: skip
        kinds = (("loss", series.losses), ("learning rate", series.rates), ("gradient norm", series.norms),
                 ("update / weight", (ratios,)), ("memory", series.memory))  # fmt: skip
        for kind, curves in kinds:
            for curve in curves:
                known = self._curves.setdefault(kind, {}).setdefault(curve.name, [])
                last = known[-1][0] if known else -1
                known += [(int(at), value) for at, value in zip(curve.steps, curve.values, strict=True) if at > last]
                known[:] = thinned(known, _MOST_POINTS)

    def _head(self, tail: Tail) -> str:
        now, (before, step, speed) = time.monotonic(), self._speed
        if now - before >= 1.0 or tail.ended is not None:
            speed = (tail.step - step) / max(now - before, 1e-9) if step else 0.0
            self._speed = now, tail.step, speed
        started = tail.recent().started
        said = [clean(title_of_run(started.script, started.arguments)), f"step {tail.step:,}"]
        if tail.ended is not None:
            how = "ended" if crash_of(tail.recent()) is None else "crashed"
            said.append(f"{how} after {format_seconds(tail.ended.seconds)}")
            if tail.ended.exit_code is not None:
                said[-1] += f", exit code {tail.ended.exit_code}"
        else:
            said += [f"{speed:.3g} steps/s"] if speed else []
            said += [format_seconds(max(0.0, time.time() - started.time))] if started.time else []
        if len(self._tails) > 1:
            others = ", ".join(f"{rank}: {tail.step:,}" for rank, (tail, _) in self._tails.items())
            said.append(f"ranks {others}")
        return "  ".join(said)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for kind, curves in self._curves.items():
            show = format_bytes if kind == "memory" else number_text
            for name, points in curves.items():
                if points:
                    step, value = points[-1]
                    label = Text(clean(f"{kind}, {name}" if len(curves) > 1 else kind))
                    table.add_row(
                        label, show(value), sparkline([one for _, one in points], bars=self._bars), f"step {step:,}"
                    )
        return table

    def _findings(self, tail: Tail) -> list[Text]:
        if len(self._found) > _MOST_FINDINGS:
            more = len(self._found) - _MOST_FINDINGS
            return [*self._found[:_MOST_FINDINGS], Text(f"and {more} more: anybatch report {self._record}")]
        so_far = " so far" if tail.ended is None else ""
        return list(self._found) or [Text(f"nothing found{so_far}", style="dim")]


def sparkline(values: Sequence[float], bars: str = _BARS) -> str:
    """Values as small bars, the newest on the right, on a log scale for a wide range; ``x`` is a non-finite value."""
    count = len(values)
    shown = [values[(n + 1) * count // _WIDTH - 1] for n in range(_WIDTH)] if count > _WIDTH else list(values)
    finite = [one for one in shown if math.isfinite(one)]
    if min(finite, default=0.0) > 0 and max(finite) > _WIDE * min(finite):
        shown, finite = [math.log(one) if one > 0 else one for one in shown], [math.log(one) for one in finite]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((one - low) * scale)] if math.isfinite(one) else "x" for one in shown)
