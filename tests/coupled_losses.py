"""Losses that see all samples of a batch at once, each written as people write it, and what their tests share."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from reference import Gradients, gradients_of

Batch = dict[str, Tensor]


class Towers(nn.Module):
    """Two encoders into one space, with what several losses learn beside them: all used once a micro-batch."""

    def __init__(self, width: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, width))
        self.text = nn.Sequential(nn.Linear(4, width), nn.Dropout(dropout))
        self.scale = nn.Parameter(torch.tensor(1.2))
        self.double()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.image(batch["image"]), self.text(batch["text"])


class ByPixel(nn.Module):
    """Logits for each of 3 x 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 1, 3, padding=1)
        self.double()

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.conv(batch["picture"]).squeeze(1)
        return logits


class Prototypes(nn.Module):
    """A loss that is a module with parameters of its own, and a temperature that lies in the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.centres = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

    def forward(self, model: Any, outputs: Mapping[str, Tensor]) -> Tensor:
        z = outputs["z"] - outputs["z"].mean(0)
        return F.cross_entropy(z @ self.centres.T * model.scale, outputs["label"])


class Views(NamedTuple):
    one: Tensor
    other: Tensor


@dataclass
class Embedding:
    z: Tensor
    label: Tensor
    name: str = "embedding"
    nothing: None = None


def samples(rows: int, seed: int = 0) -> Batch:
    """A batch for every loss here, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)

    return {
        "image": randn(5), "text": randn(4), "picture": randn(1, 3, 4), "mask": (randn(3, 4) > 0.3).double(),
        "label": torch.randint(0, 3, (rows,), generator=generator),
    }  # fmt: skip


def towers(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    image, text = model(batch)
    return F.normalize(image, dim=1), F.normalize(text, dim=1)


def views(model: Any, batch: Batch) -> Views:
    """Two views of each sample through one encoder."""
    return Views(*(F.normalize(model.image(x), dim=1) for x in (batch["image"], batch["image"] + 0.1)))


def embedding(model: Any, batch: Batch) -> Embedding:
    return Embedding(F.normalize(model.image(batch["image"]), dim=1), batch["label"])


def clip(model: Any, outputs: tuple[Tensor, Tensor]) -> Tensor:
    image, text = outputs
    logits = image @ text.T * model.scale.exp()
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def clip_of_rows(model: Any, outputs: tuple[Tensor, Tensor], rows: slice) -> Tensor:
    image, text = outputs
    own = torch.arange(rows.start, rows.stop)
    there, back = image[rows] @ text.T, text[rows] @ image.T
    scale = model.scale.exp()
    return (F.cross_entropy(there * scale, own) + F.cross_entropy(back * scale, own)) / 2


def ntxent(model: Any, outputs: Views) -> Tensor:
    """Chen et al. 2020, "A Simple Framework for Contrastive Learning of Visual Representations"."""
    z = torch.cat([outputs.one, outputs.other])
    logits = (z @ z.T * model.scale.exp()).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(outputs.one)))


def supcon(model: Any, outputs: Embedding) -> anybatch.Mean:
    return supcon_of_rows(model, outputs, slice(0, len(outputs.z)))


def supcon_of_rows(model: Any, outputs: Embedding, rows: slice) -> anybatch.Mean:
    """Khosla et al. 2020, "Supervised Contrastive Learning": over the anchors that have another sample of their label.

    There are more of them in some rows than in others, so that only a ``Mean`` weighs the rows as the whole does.
    """
    z, label = outputs.z, outputs.label
    own = torch.eye(len(z), dtype=torch.bool)[rows]
    logits = (z[rows] @ z.T * model.scale.exp()).masked_fill(own, -1e9)
    same = (label[rows, None] == label) & ~own
    log_p = logits.log_softmax(1)
    has_same = same.any(1)
    of_anchor = -(log_p * same).sum(1) / same.sum(1).clamp(min=1)
    return anybatch.Mean(of_anchor[has_same].sum(), int(has_same.sum()))


def barlow(model: Any, outputs: Views) -> Tensor:
    """Zbontar et al. 2021, "Barlow Twins": statistics of the batch within the loss."""
    one, other = ((z - z.mean(0)) / z.std(0) for z in outputs)
    c = one.T @ other / len(one)
    on = torch.eye(len(c), dtype=torch.bool)
    result: Tensor = (c[on] - 1).square().sum() + 0.1 * model.scale * c[~on].square().sum()
    return result


def triplet(model: Any, outputs: Embedding) -> Tensor:
    """Hermans et al. 2017, "In Defense of the Triplet Loss": the hardest of the batch for each anchor."""
    return triplet_of_rows(model, outputs, slice(0, len(outputs.z)))


def triplet_of_rows(model: Any, outputs: Embedding, rows: slice) -> Tensor:
    z, label = outputs.z, outputs.label
    distance = (z[rows, None] - z).square().sum(2)
    same = label[rows, None] == label
    furthest = distance.masked_fill(~same, -torch.inf).amax(1)
    nearest = distance.masked_fill(same, 10.0).amin(1)
    return F.softplus(furthest - nearest + model.scale).mean()


def dice(model: Any, logits: Tensor, batch: Batch) -> Tensor:
    """One ratio over all pixels of all samples."""
    p = logits.sigmoid()
    return 1 - 2 * (p * batch["mask"]).sum() / (p.sum() + batch["mask"].sum())


def soft_f(model: Any, outputs: Embedding) -> Tensor:
    scale: Tensor = model.scale
    p, positive = (outputs.z[:, 0] * scale).sigmoid(), (outputs.label == 0).double()
    hit = (p * positive).sum()
    precision, recall = hit / p.sum(), hit / positive.sum().clamp(min=1)
    return 1 - 2 * precision * recall / (precision + recall)


def ratio(model: Any, outputs: tuple[Tensor, Tensor]) -> Tensor:
    first, second = ((z + 2).log().mean() for z in outputs)
    return first / second + (first / second).detach() * second


def several(model: Any, outputs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"clip": clip(model, outputs), "ratio": ratio(model, outputs)}


def several_of_rows(model: Any, outputs: tuple[Tensor, Tensor], rows: slice) -> dict[str, Any]:
    apart = (outputs[0][rows] - outputs[1][rows]).square().sum(1)
    return {"clip": clip_of_rows(model, outputs, rows), "apart": apart.mean()}


def yielding(model: Any, outputs: tuple[Tensor, Tensor]) -> Iterator[tuple[str, Tensor]]:
    image, text = outputs
    with anybatch.cut((image * model.scale, text)) as (a, b):
        yield "clip", clip(model, (a, b))
        yield "ratio", ratio(model, (a, b))


def prototypes(model: Any, batch: Batch) -> dict[str, Any]:
    z = model.image(batch["image"])
    return {"z": z, "label": batch["label"], "again": z, "nothing": None}


@dataclass
class Case:
    """A model with its two functions."""

    encode: Callable[[Any, Batch], Any]
    loss: Callable[..., Any]
    of_rows: Callable[..., Any] | None = None
    model: Callable[[], nn.Module] = Towers

    def coupled(self, **options: Any) -> anybatch.Coupled:
        of_rows = self.of_rows if options.get("row_block") else None
        return anybatch.Coupled(self.encode, of_rows or self.loss, **options)

    def whole(self, model: Any, batch: Batch) -> Any:
        """The slow reference: one graph of the whole batch, written without ``Coupled``."""
        outputs = self.encode(model, batch)
        return self.loss(model, outputs, batch) if self.loss is dice else self.loss(model, outputs)


def several_whole(model: Any, outputs: tuple[Tensor, Tensor]) -> dict[str, Any]:
    return several_of_rows(model, outputs, slice(0, len(outputs[0])))


CASES: dict[str, Case] = {
    "clip": Case(towers, clip, clip_of_rows),
    "ntxent": Case(views, ntxent),
    "supcon": Case(embedding, supcon, supcon_of_rows),
    "barlow": Case(views, barlow),
    "triplet": Case(embedding, triplet, triplet_of_rows),
    "dice": Case(ByPixel.__call__, dice, model=ByPixel),
    "soft-f": Case(embedding, soft_f),
    "ratio": Case(towers, ratio),
    "several": Case(towers, several),
    "several-in-rows": Case(towers, several_whole, several_of_rows),
    "module": Case(prototypes, Prototypes()),
}


def parameters_of(case: Case, model: nn.Module) -> list[nn.Parameter]:
    more = list(case.loss.parameters()) if isinstance(case.loss, nn.Module) else []
    return [*model.parameters(), *more]


def run(coupled: anybatch.Coupled, model: nn.Module, batch: Any, size: int | None, **options: Any) -> Gradients:
    """The gradient of a copy of the model, with the same random numbers each time."""
    model = copy.deepcopy(model)
    torch.manual_seed(3)
    anybatch.backward(model, coupled, batch, micro_batch_size=size, **options)
    return gradients_of(model)


def by_hand(
    case: Case, model: nn.Module, micro_batches: Sequence[Batch], weigh: Callable[[Any], Tensor] = lambda loss: loss
) -> Gradients:
    """One pass that keeps every graph: encode by micro-batches, loss at a cut, then back, the last one first."""
    model = copy.deepcopy(model)
    torch.manual_seed(3)
    encoded = [case.encode(model, batch) for batch in micro_batches]
    columns = [[leaf for leaf in outputs if leaf.requires_grad] for outputs in encoded]
    leaves = [torch.cat(column).detach().requires_grad_() for column in zip(*columns, strict=True)]
    weigh(case.loss(model, type(encoded[0])(leaves) if type(encoded[0]) is tuple else Views(*leaves))).backward()
    stop = sum(len(column[0]) for column in columns)
    for column in reversed(columns):
        start = stop - len(column[0])
        torch.autograd.backward(column, [leaf.grad[start:stop] for leaf in leaves if leaf.grad is not None])
        stop = start
    return gradients_of(model)
