"""Draws docs/memory.svg: what a training step holds, operation by operation, with each memory optimization.

    python benchmarks/memory_of_a_step.py                     # writes docs/memory.svg
    python benchmarks/memory_of_a_step.py -o FILE

Every panel is a recording of a real step, the second one of a run on the CPU. No figure in the picture is typed in.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from common import LanguageModel, language_loss
from torch import Tensor, nn

import anybatch
from anybatch.memory.meter import Recording
from anybatch.records.memory import ACTIVATIONS, GRADIENTS, INPUTS, OPTIMIZER, PARAMETERS
from anybatch.records.plans import PlanRow
from anybatch.tensors.graph import in_backward
from anybatch.tensors.optimizers import state_tensors

SAMPLES, LENGTH, VOCABULARY, WIDTH, LAYERS = 8, 64, 1024, 64, 4
KEPT, TEMPORARY = "activations kept for the backward", "temporary results"
# From the bottom to the top, with Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
LAYERS_OF_THE_PICTURE = {
    PARAMETERS: "#0072B2",
    OPTIMIZER: "#56B4E9",
    INPUTS: "#8a8a8a",
    GRADIENTS: "#009E73",
    KEPT: "#E69F00",
    TEMPORARY: "#D55E00",
}
STAGES = ("forward", "loss", "backward", "update")
BLOCKS = tuple(f"blocks.{index}" for index in range(LAYERS))
WAYS: dict[str, PlanRow] = {
    "the whole batch at once": PlanRow(SAMPLES, 1),
    "in 4 micro-batches": PlanRow(SAMPLES // 4, 4),
    "its blocks recomputed": PlanRow(SAMPLES, 1, recompute=BLOCKS),
    "both, and the loss in 8 chunks": PlanRow(SAMPLES // 4, 4, recompute=BLOCKS, head="head", loss_chunks=8),
}
MIB = 2**20


class StepRecording(Recording):
    """A recording that also notes in which stage of the step each operation ran.

    Attributes:
        stage: what runs now, unless autograd is running a backward.
        stages: one for each operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stage = STAGES[0]
        self.stages: list[str] = []

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        differentiates = in_backward()
        self.stages.append("backward" if differentiates else self.stage)
        if differentiates:
            self.stage = "update"  # unless a next micro-batch begins
        return super()._run(func, args, kwargs)


@dataclass
class Step:
    """What one step held.

    Args:
        stages: of each operation.
        held: bytes after each operation, by the layers of the picture.
    """

    stages: list[str]
    held: dict[str, list[int]] = field(default_factory=dict)

    @property
    def totals(self) -> list[int]:
        """Bytes after each operation."""
        return [sum(column) for column in zip(*self.held.values(), strict=True)]

    def peak(self) -> tuple[int, int]:
        """The position of the peak, and its bytes."""
        totals = self.totals
        position = max(range(len(totals)), key=totals.__getitem__)
        return position, totals[position]

    def spans(self) -> list[tuple[str, int, int]]:
        """The stages in order, each with its first operation and the one behind its last."""
        found: list[tuple[str, int, int]] = []
        for position, stage in enumerate(self.stages):
            if found and found[-1][0] == stage:
                found[-1] = (stage, found[-1][1], position + 1)
            else:
                found.append((stage, position, position + 1))
        return found


def record(row: PlanRow) -> Step:
    """Records the second step of a small language model.

    Args:
        row: how the logical batch is run.

    Returns:
        What was held after each operation.
    """
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY, WIDTH, 4, LAYERS, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # as on a GPU, where it is the default
    text = torch.randint(VOCABULARY, (SAMPLES, LENGTH))
    batch = {"tokens": text, "labels": text}
    recording = StepRecording()

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        recording.stage = "forward"
        return language_loss(model, batch)

    step = anybatch.TrainStep(model, loss_fn, optimizer, plan=anybatch.Plan(row, samples=SAMPLES))
    step(batch)
    optimizer.zero_grad()

    def loss_begins(*_: Any) -> None:
        recording.stage = "loss"

    def update_begins(*_: Any) -> None:
        recording.assign((parameter.grad for parameter in model.parameters()), GRADIENTS)

    recording.register(model.parameters(), PARAMETERS)
    recording.register(state_tensors(optimizer), OPTIMIZER)
    recording.register([text], INPUTS)
    model.head.register_forward_pre_hook(loss_begins)
    optimizer.register_step_pre_hook(update_begins)
    recording.stage = "forward"
    with recording:
        step(batch)
    return Step(recording.stages, _by_layer(recording))


def _by_layer(recording: StepRecording) -> dict[str, list[int]]:
    end = len(recording.operations)
    changes = {name: [0] * (end + 1) for name in LAYERS_OF_THE_PICTURE}
    for one in recording.allocations:
        name = one.category
        if name not in changes or name == ACTIVATIONS:
            early = one.born >= 0 and recording.stages[one.born] in ("forward", "loss")
            name = KEPT if early and one.back is not None else TEMPORARY
        changes[name][max(one.born, 0)] += one.size
        changes[name][end if one.died is None else min(max(one.died, 0), end)] -= one.size
    held: dict[str, list[int]] = {}
    for name, deltas in changes.items():
        total, held[name] = 0, []
        for delta in deltas[:end]:
            total += delta
            held[name].append(total)
    return held


@dataclass(frozen=True)
class Panel:
    """Where a recording is drawn.

    Args:
        left: of the panel.
        top: of the panel.
        width: of the panel.
        height: of the panel, for ``most`` bytes.
        most: bytes at the top.
    """

    left: float
    top: float
    width: float
    height: float
    most: int

    @property
    def bottom(self) -> float:
        """Where 0 bytes are."""
        return self.top + self.height

    def x(self, share: float) -> float:
        """Where a share of the operations has run."""
        return self.left + share * self.width

    def y(self, count: float) -> float:
        """Where a number of bytes is."""
        return self.bottom - self.height * count / self.most


def layers(step: Step, panel: Panel) -> list[str]:
    """Draws what was held, one path a layer; each is painted over the one above it, down to the baseline."""
    columns = _columns(step, round(panel.width))
    parts = []
    names = list(LAYERS_OF_THE_PICTURE)
    for depth in range(len(names), 0, -1):
        heights = [round(panel.y(sum(step.held[name][at] for name in names[:depth])), 1) for at in columns]
        path, last = [f"M{panel.left:g} {panel.bottom:g}"], panel.bottom
        for index, height in enumerate(heights):
            if height != last:
                path.append(f"H{round(panel.x(index / len(heights)), 1):g}V{height:g}")
                last = height
        path.append(f"H{panel.x(1):g}V{panel.bottom:g}Z")
        parts.append(f'<path fill="{LAYERS_OF_THE_PICTURE[names[depth - 1]]}" d="{"".join(path)}"/>')
    return parts


def _columns(step: Step, most: int) -> list[int]:
    """The operations that are drawn: all of them, or in each of so many equal parts the one with most bytes."""
    totals = step.totals
    count = len(totals)
    if count <= most:
        return list(range(count))
    bounds = [index * count // most for index in range(most + 1)]
    return [max(range(a, b), key=totals.__getitem__) for a, b in itertools.pairwise(bounds)]


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", colour: str = "#202124") -> str:
    """Draws a line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" '
        f'stroke="#fff" stroke-width="3" paint-order="stroke">{words}</text>'
    )


def mib(count: int) -> str:
    """Bytes in MiB, with one decimal."""
    return f"{count / MIB:.1f} MiB"


def axis(panel: Panel, step: int) -> list[str]:
    """Draws lines at round numbers of bytes."""
    parts = []
    for count in range(0, panel.most + 1, step):
        y = panel.y(count)
        parts.append(f'<path stroke="#dadce0" d="M{panel.left:g} {y:g}H{panel.x(1):g}"/>')
        parts.append(text(panel.left - 6, y + 4, f"{count // MIB}", size=11, anchor="end", colour="#5f6368"))
    return parts


def peak_mark(step: Step, panel: Panel) -> list[str]:
    """Draws a line at the peak, and says how many bytes it is."""
    position, count = step.peak()
    x, y = panel.x((position + 0.5) / len(step.stages)), panel.y(count)
    return [
        f'<path stroke="#202124" stroke-dasharray="3 3" d="M{panel.left:g} {y:g}H{panel.x(1):g}"/>',
        text(min(max(x, panel.left + 55), panel.x(1) - 55), y - 5, f"peak {mib(count)}", anchor="middle"),
    ]


def stage_marks(step: Step, panel: Panel) -> list[str]:
    """Draws where each stage begins, and its name below."""
    parts = []
    total = len(step.stages)
    for stage, first, behind in step.spans():
        middle = panel.x((first + behind) / 2 / total)
        if first:
            x = panel.x(first / total)
            parts.append(f'<path stroke="#5f6368" stroke-width=".7" d="M{x:.1f} {panel.top:g}V{panel.bottom + 5:g}"/>')
        parts.append(text(round(middle, 1), panel.bottom + 16, stage, anchor="middle"))
    return parts


def legend(names: Sequence[str], left: float, top: float) -> list[str]:
    """Draws what each colour is, from the top of the picture to its bottom."""
    parts = []
    for index, name in enumerate(reversed(names)):
        y = top + 18 * index
        parts.append(f'<path fill="{LAYERS_OF_THE_PICTURE[name]}" d="M{left:g} {y:g}h11v11h-11z"/>')
        parts.append(text(left + 17, y + 10, name))
    return parts


def described(steps: Mapping[str, Step]) -> str:
    """Says in words what the picture shows."""
    whole = next(iter(steps.values()))
    spans = {stage: (first, behind) for stage, first, behind in whole.spans()}
    position, peak = whole.peak()
    at_peak = ", ".join(
        f"{name} {mib(held[position])}" for name, held in whole.held.items() if held[position] > peak / 500
    )
    ends = {stage: mib(whole.totals[spans[stage][1] - 1]) for stage in STAGES}
    others = "; ".join(f"{name} {mib(step.peak()[1])}" for name, step in steps.items())
    return (
        f"A step of the whole batch begins with parameters and optimizer state. The forward rises to "
        f"{ends['forward']}; the peak of {mib(peak)} is in the {whole.stages[position]}: {at_peak}. The backward falls "
        f"while gradients grow and ends at {ends['backward']}; the update ends at {ends['update']}. Peaks: {others}."
    )


def draw(steps: Mapping[str, Step]) -> str:
    """Draws all steps to one scale: the first one large, the others below it.

    Args:
        steps: by what is written over them.

    Returns:
        The text of an SVG file.
    """
    (title, whole), *others = steps.items()
    most = (whole.peak()[1] // (5 * MIB) + 1) * 5 * MIB
    large = Panel(44, 34, 440, 230, most)
    shown = [name for name, held in whole.held.items() if max(held) > whole.peak()[1] / 500]
    parts = [text(large.left, 20, f"One training step: {title}", size=14), text(8, 20, "MiB", size=11)]
    parts += [*axis(large, 5 * MIB), *layers(whole, large), *stage_marks(whole, large), *peak_mark(whole, large)]
    parts += [*legend(shown, 500, 60), text(500, 190, f"{len(whole.stages)} operations,", colour="#5f6368")]
    parts += [text(500, 206, "from left to right", colour="#5f6368")]
    for index, (name, step) in enumerate(others):
        small = Panel(44 + index * 228, 336, 196, 230 * 196 / 440, most)
        parts += [text(small.left, 322, f"... {name}", size=13), *axis(small, 5 * MIB)]
        parts += [*layers(step, small), *peak_mark(step, small)]
    body = "\n".join(parts)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 452" role="img" aria-labelledby="t d" '
        'font-family="system-ui, sans-serif">\n'
        f'<title id="t">Memory of a training step</title>\n<desc id="d">{described(steps)}</desc>\n'
        f"<metadata>torch {torch.__version__.partition('+')[0]}</metadata>\n"
        f'<path fill="#fff" d="M0 0h720v452H0z"/>\n{body}\n</svg>\n'
    )


@click.command()
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Where to, if not to docs/.")
def main(output: Path | None) -> None:
    """Records the steps and writes the picture."""
    steps = {name: record(row) for name, row in WAYS.items()}
    path = output or Path(__file__).parents[1] / "docs" / "memory.svg"
    path.write_text(draw(steps), encoding="utf-8")
    print(described(steps))
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
