"""A contrastive loss over more samples than fit: memory and time by the number of graphs that are kept.

    python benchmarks/coupled.py                        # on the CPU, about three minutes
    python benchmarks/coupled.py --quick                # small models, some seconds
    python benchmarks/coupled.py -o coupled.md --json coupled.json

The first table: a transformer of 12 layers with dropout embeds each text twice, and InfoNCE with a learned temperature
sees all of them, in 8 micro-batches. Beside anybatch goes the scheme of GradCache, written by hand: it runs every
micro-batch a second time. The sides go in turn in one process, in alternating order from round to round; a ratio is
the median over the rounds of a side's time over GradCache's in the same round.

The second table: pairs of images and texts, 4096 of them in the memory of 256.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from common import facts, markdown, quartiles, seconds, write_json, write_text
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch

GRADCACHE = "GradCache's scheme"
REFERENCE = "one pass, 8 micro-batches in one graph"
NOTES = (
    "Peak: the most bytes of live tensors in an update, parameters, gradients and the batch included. Ratio: time over",
    "that of GradCache's scheme in the same round. Gradient: against one graph over the same micro-batches, with the",
    "same random numbers; the whole batch in one forward draws others. Target: at the memory of GradCache's scheme not",
    "slower, up to the noise that a second copy of the scheme shows, and faster where more is kept.",
)
NOTES_SIZES = (
    "The same loss over pairs, two towers of linear layers. Peak: without the batch itself; the next column is over",
    "that of the small batch in one pass. Error: distance to the float64 gradient of the large batch, over its norm.",
)


class Layer(nn.Module):
    """A pre-norm transformer layer with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        rows, steps, width = x.shape
        parts = self.project_in(self.norm_attention(x)).view(rows, steps, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(rows, steps, width)
        x = x + F.dropout(self.project_out(mixed), 0.1, self.training)
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class Texts(nn.Module):
    """Embeds texts: ``[B, T]`` to ``[B, width]``."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(500, width)
        self.layers = nn.Sequential(*[Layer(width, 4) for _ in range(layers)])
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.layers(self.tokens(tokens)).mean(1), dim=1)


class Residual(nn.Module):
    """A linear layer beside a way around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + F.gelu(self.linear(self.norm(x)))
        return out


class Towers(nn.Module):
    """Embeds pairs."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.image, self.text = (
            nn.Sequential(*[Residual(width) for _ in range(layers)], nn.Linear(width, 32)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(2.0))


def twice(model: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Two views of each text, which differ by their dropout (Gao et al. 2021, "SimCSE")."""
    both = model(torch.cat([batch, batch]))
    return both[: len(batch)], both[len(batch) :]


def pairs(model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Images and texts."""
    return F.normalize(model.image(batch[0]), dim=1), F.normalize(model.text(batch[1]), dim=1)


def info_nce(model: Any, outputs: tuple[Tensor, Tensor]) -> Tensor:
    """Each sample of the one side against all of the other, both ways."""
    return of_rows(model, outputs, slice(0, len(outputs[0])))


def of_rows(model: Any, outputs: tuple[Tensor, Tensor], rows: slice) -> Tensor:
    """The same for some of the samples."""
    one, other = outputs
    own = torch.arange(rows.start, rows.stop, device=one.device)
    scale = model.scale.exp()
    return (F.cross_entropy(one[rows] @ other.T * scale, own) + F.cross_entropy(other[rows] @ one.T * scale, own)) / 2


@dataclass
class Case:
    """A model and a batch.

    Args:
        model: in training mode.
        encode: its encoder.
        batch: a tensor, or a pair of tensors.
        size: samples in a micro-batch.
    """

    model: nn.Module
    encode: Callable[[Any, Any], tuple[Tensor, Tensor]]
    batch: Any
    size: int

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return next(self.model.parameters()).device

    def micro_batches(self) -> list[Any]:
        """Views of the batch."""
        if isinstance(self.batch, Tensor):
            return list(self.batch.split(self.size))
        return list(zip(*[tensor.split(self.size) for tensor in self.batch], strict=True))


Update = Callable[[], None]


def fresh(case: Case, differentiate: Callable[[], Any]) -> Update:
    """Differentiates from no gradient on."""

    def update() -> None:
        case.model.zero_grad()
        differentiate()

    return update


def at_once(case: Case) -> Update:
    """The whole batch in one forward and one backward."""
    return fresh(case, lambda: info_nce(case.model, case.encode(case.model, case.batch)).backward())


def one_graph(case: Case) -> Update:
    """One graph over all micro-batches, and one backward."""

    def differentiate() -> None:
        encoded = [case.encode(case.model, part) for part in case.micro_batches()]
        info_nce(case.model, (torch.cat([a for a, _ in encoded]), torch.cat([b for _, b in encoded]))).backward()

    return fresh(case, differentiate)


def grad_cache(case: Case) -> Update:
    """Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", in our own words.

    All micro-batches are encoded without graph; the loss gives the gradient of what they gave; then each is encoded
    again with its random state, and the dot product with that gradient is differentiated.
    """
    devices = [case.device] if case.device.type == "cuda" else []

    def differentiate() -> None:
        parts, states, encoded = case.micro_batches(), [], []
        for part in parts:
            states.append((torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]))
            with torch.no_grad():
                encoded.append(case.encode(case.model, part))
        cached = [torch.cat(column).requires_grad_() for column in zip(*encoded, strict=True)]
        del encoded
        info_nce(case.model, (cached[0], cached[1])).backward()
        gradients = list(zip(*[c.grad.split(case.size) for c in cached if c.grad is not None], strict=True))
        for part, (on_cpu, on_devices), gradient in zip(parts, states, gradients, strict=True):
            with torch.random.fork_rng(devices):
                torch.set_rng_state(on_cpu)
                for device, state in zip(devices, on_devices, strict=True):
                    torch.cuda.set_rng_state(state, device)
                again = case.encode(case.model, part)
            torch.stack(
                [torch.dot(a.flatten(), g.flatten()) for a, g in zip(again, gradient, strict=True)]
            ).sum().backward()

    return fresh(case, differentiate)


def coupled(case: Case, keep: int, row_block: int | None = None) -> Update:
    """anybatch, with a number of kept graphs."""
    loss = anybatch.Coupled(case.encode, of_rows if row_block else info_nce, keep=keep, row_block=row_block)
    return fresh(case, lambda: anybatch.backward(case.model, loss, case.batch, micro_batch_size=case.size))


KEPT = (0, 1, 2, 4, 8)
SIDES: Mapping[str, Callable[[Case], Update]] = {
    "one pass, the whole batch at once": at_once,
    REFERENCE: one_graph,
    GRADCACHE: grad_cache,
    f"{GRADCACHE} again": grad_cache,
    **{f"anybatch.Coupled, keep={keep}": lambda case, keep=keep: coupled(case, keep) for keep in KEPT},
}


@dataclass
class Found:
    """What was measured of one side."""

    update: Update
    peak: int = 0
    error: float = 0.0
    seconds: list[float] = field(default_factory=list)


def gradient_of(case: Case, update: Update) -> Tensor:
    """The gradient of all parameters, with the same random numbers each time."""
    torch.manual_seed(1)
    update()
    return torch.cat([p.grad.flatten().double() for p in case.model.parameters() if p.grad is not None])


def curve(case: Case, rounds: int) -> list[dict[str, Any]]:
    """Measures all sides; one row for each, unrounded."""
    found = {name: Found(make(case)) for name, make in SIDES.items()}
    reference = gradient_of(case, found[REFERENCE].update)
    for one in found.values():
        one.error = float((gradient_of(case, one.update) - reference).norm() / reference.norm())
        one.peak = anybatch.measure(one.update, model=case.model, batch=case.batch).peak_bytes
    for turn in range(rounds):
        sides = list(found.values())
        for one in sides if turn % 2 == 0 else reversed(sides):
            one.seconds.append(seconds(one.update, case.device))
    base = found[GRADCACHE].seconds
    return [
        {
            "side": name, "peak": one.peak, "error": one.error, "seconds": quartiles(one.seconds)[1],
            "ratio": quartiles([own / other for own, other in zip(one.seconds, base, strict=True)]),
        }
        for name, one in found.items()
    ]  # fmt: skip


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """Rounds one row of the curve."""
    low, middle, high = row["ratio"]
    is_another = row["side"].endswith("at once")
    return {
        "side": row["side"],
        "peak MiB": f"{row['peak'] / 2**20:.1f}",
        "s an update": f"{row['seconds']:.3f}",
        "ratio (quartiles)": f"{middle:.3f} ({low:.3f} to {high:.3f})",
        "gradient": "other dropout"
        if is_another
        else "bitwise equal"
        if row["error"] == 0
        else f"{row['error']:.1e} off",
    }


def sizes(width: int, layers: int, rows: int, small: int, device: torch.device) -> list[dict[str, Any]]:
    """Peaks of a large batch and of a small one; one row a way."""
    torch.manual_seed(0)
    model = Towers(width, layers).to(device)
    batch = torch.randn(rows, width, device=device), torch.randn(rows, width, device=device)
    half, block = small // 2, small // 4

    def case(count: int, size: int) -> Case:
        return Case(model, pairs, (batch[0][:count], batch[1][:count]), size)

    ways: dict[str, tuple[Case, Update]] = {}
    for name, one, make in (
        (f"one pass, {small}", case(small, small), at_once),
        (f"one pass, {rows}", case(rows, rows), at_once),
        (f"{GRADCACHE}, {rows} by {small}", case(rows, small), grad_cache),
        (f"Coupled, {rows} by {small}, keep=0", case(rows, small), lambda c: coupled(c, 0)),
        (f"Coupled, {rows} by {small}, keep=0, row_block={block}", case(rows, small), lambda c: coupled(c, 0, block)),
        (f"Coupled, {rows} by {half}, keep=0, row_block={block}", case(rows, half), lambda c: coupled(c, 0, block)),
        (f"Coupled, {rows} by {half}, keep=1, row_block={block}", case(rows, half), lambda c: coupled(c, 1, block)),
    ):
        ways[name] = one, make(one)
    double = Case(copy.deepcopy(model).double(), pairs, tuple(tensor.double() for tensor in batch), rows)
    exact = gradient_of(double, at_once(double))
    found = []
    for name, (one, update) in ways.items():
        gradient = gradient_of(one, update)
        error = None if len(one.batch[0]) == small else float((gradient - exact).norm() / exact.norm())
        memory = anybatch.measure(update, model=model, batch=one.batch)
        peak = memory.peak_bytes - memory.at_peak.get("inputs", 0)
        found.append({"way": name, "peak": peak, "of small": peak / found[0]["peak"] if found else 1.0, "error": error})
    return found


def shown_size(row: Mapping[str, Any], small: int) -> dict[str, str]:
    """Rounds one row of the second table."""
    return {
        "way": row["way"],
        "peak MiB": f"{row['peak'] / 2**20:.2f}",
        f"of {small}": f"{row['of small']:.2f}",
        "error": "" if row["error"] is None else f"{row['error']:.1e}",
    }


@click.command(help="Measures memory and time of a contrastive loss by the number of graphs that are kept.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--quick", is_flag=True, help="Small models and few rounds; for a first look.")
@click.option("--rounds", type=click.IntRange(min=1), help="Updates of each side that are timed.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the unrounded rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the tables here, as Markdown.")
def main(device: str, quick: bool, rounds: int | None, json_path: Path | None, output: Path | None) -> None:
    """Parses the options, measures, prints the tables and writes the files."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    where = torch.device(device)
    width, layers, size, steps = (16, 2, 2, 4) if quick else (64, 12, 16, 16)
    torch.manual_seed(0)
    model = Texts(width, layers).to(where)
    case = Case(model, twice, torch.randint(500, (8 * size, steps), device=where), size)
    by_keep = curve(case, rounds or (2 if quick else 15))
    small = 16 if quick else 256
    by_size = sizes(*((16, 2) if quick else (256, 12)), 16 * small, small, where)
    every = facts(where)
    known = {
        **{key: every[key] for key in ("device", "python", "torch")},
        "model": f"{layers} layers of width {width}, 8 micro-batches of {size} texts of {steps} tokens, twice each",
        **{key: every[key] for key in ("date", "command")},
    }
    first = markdown("A contrastive loss, by the number of kept graphs", known, NOTES, [shown(row) for row in by_keep])
    second = markdown(
        f"{16 * small} pairs in the memory of {small}", {}, NOTES_SIZES, [shown_size(r, small) for r in by_size]
    )
    text = f"{first}\n#{second}".replace("\n\n\n", "\n\n")
    click.echo(text)
    if output is not None:
        write_text(output, text)
    if json_path is not None:
        write_json(json_path, known, [*by_keep, *by_size])


if __name__ == "__main__":
    main()
