"""What a rank has of a model, holds for a moment, and sends, by arithmetic on the shapes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from anybatch.parallel.buckets import Buffers, buckets_of
from anybatch.parallel.messages import BYTES_AT_ONCE
from anybatch.planning.blocks import blocks_of
from anybatch.planning.optimizer import state_bytes
from anybatch.planning.subjects import Subject
from anybatch.records.rankplans import GATHERED, GRADIENTS, OPTIMIZER, PARAMETERS, Shard, Traffic, UnitShare


class Unit(NamedTuple):
    """Parameters that are gathered and reduced together.

    Args:
        name: of the module.
        parameters: each once.
    """

    name: str
    parameters: Sequence[torch.Tensor]

    def gathered(self, ranks: int) -> int:
        """Bytes of the whole parameters, the padding to equal parts included."""
        return ranks * sum(part_of(p, ranks).numel() * p.element_size() for p in self.parameters)

    def reduced(self, ranks: int) -> int:
        """The same of those that get a gradient."""
        return Unit("", [p for p in self.parameters if p.requires_grad]).gathered(ranks)

    @property
    def trained_bytes(self) -> int:
        """Bytes of the gradients before they are reduced."""
        return sum(p.numel() * p.element_size() for p in self.parameters if p.requires_grad)


def part_of(parameter: torch.Tensor, ranks: int) -> torch.Tensor:
    """The part of a parameter that rank 0 has, on ``meta``: ``torch.chunk`` along the first dimension.

    Args:
        parameter: of any shape; one without dimensions is on all ranks.
        ranks: how many there are.

    Example:
        >>> part_of(torch.zeros(7, 3), 4).shape
        torch.Size([2, 3])
    """
    shape = list(parameter.shape)
    if shape:
        shape[0] = -(-shape[0] // ranks)
    return torch.empty(shape, dtype=parameter.dtype, device="meta", requires_grad=parameter.requires_grad)


def units_of(subject: Subject) -> list[Unit]:
    """The units that ``fully_shard`` makes when it is applied to each block and then to the whole; that one is first.

    Args:
        subject: what is planned.
    """
    model = subject.model
    taken: set[int] = set()
    units = []
    for name in blocks_of(model, subject.blocks):
        parameters = [p for p in model.get_submodule(name).parameters() if id(p) not in taken]
        taken.update(id(p) for p in parameters)
        units.append(Unit(name, parameters))
    rest = Unit("", [p for p in model.parameters() if id(p) not in taken])
    return [unit for unit in (rest, *units) if unit.parameters]


class Shares(NamedTuple):
    """What a rank has beside the activations, and what one process with the whole model would have.

    Args:
        held: bytes of rank 0 by what they are for.
        alone: bytes that it holds in the place of what was gathered, while there are no activations.
        whole: bytes of parameters, gradients and optimizer state of the whole model.
        units: as they are shown.
        traffic: gives what is sent, by the number of micro-batches.
    """

    held: dict[str, int]
    alone: int
    whole: int
    units: tuple[UnitShare, ...]
    traffic: Callable[[int], tuple[Traffic, ...]]


def shares_of(subject: Subject, ranks: int, shard: Shard) -> Shares:
    """Works out what a rank has.

    Args:
        subject: what is planned, on one process.
        ranks: how many there will be.
        shard: how the model lies on them.
    """
    parameters = subject.parameters
    trained = [p for p in parameters if p.requires_grad]
    whole = _bytes(parameters) + _bytes(trained) + state_bytes(subject, {})
    if shard == "ddp":
        gradients = [torch.empty_like(p, device="meta") for p in trained]
        held = {
            PARAMETERS: _bytes(parameters), GRADIENTS: _bytes(trained), OPTIMIZER: state_bytes(subject, {}),
            GATHERED: 0,
        }  # fmt: skip
        return Shares(
            held,
            Buffers.bytes_for(gradients) if ranks > 1 else 0,
            whole,
            (),
            lambda micro_batches: _of_copies(gradients, ranks),
        )
    units = units_of(subject)
    in_parts = {id(p): part_of(p, ranks) for unit in units for p in unit.parameters}
    parts = [in_parts.get(id(p), p) for p in parameters]
    is_kept = shard == "fsdp2-kept" or len(units) == 1
    held = {
        PARAMETERS: _bytes(parts),
        GRADIENTS: _bytes([p for p in parts if p.requires_grad]),
        OPTIMIZER: state_bytes(subject, in_parts),
        GATHERED: _kept_bytes(units, ranks) if is_kept else _moving_bytes(units, ranks),
    }
    alone = _bytes_alone(units, ranks) if is_kept else 0
    shown = tuple(
        UnitShare(unit.name, _bytes(unit.parameters), _bytes([in_parts[id(p)] for p in unit.parameters]))
        for unit in units
    )
    return Shares(held, alone, whole, shown, lambda n: _of_units(units, ranks, 1 if is_kept else n, is_kept=is_kept))


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _kept_bytes(units: Sequence[Unit], ranks: int) -> int:
    """Everything is gathered during all micro-batches, and so are the gradients."""
    return sum(unit.gathered(ranks) + unit.trained_bytes for unit in units)


def _bytes_alone(units: Sequence[Unit], ranks: int) -> int:
    """Before the first micro-batch units arrive, and after the last they are reduced, one after the other."""
    arriving = sum(unit.gathered(ranks) for unit in units) + max(unit.gathered(ranks) for unit in units)
    gradients = sum(unit.trained_bytes for unit in units)
    return max(arriving, gradients + max(unit.reduced(ranks) + unit.reduced(ranks) // ranks for unit in units))


def _moving_bytes(units: Sequence[Unit], ranks: int) -> int:
    """The most at any time: the root stays gathered, one block is, and the one before it arrives in the backward.

    What arrives lies in one buffer first and is copied out of it. The gradients of a unit are copied into another,
    which is kept until the next unit is reduced.
    """
    root, *blocks = units
    base = root.gathered(ranks)
    most = 2 * base
    before = 0  # what the unit that was reduced last has sent
    for block, earlier in zip(reversed(blocks), [*reversed(blocks[:-1]), None], strict=True):
        gathered, arriving = block.gathered(ranks), 0 if earlier is None else earlier.gathered(ranks)
        reduced = block.reduced(ranks)
        most = max(
            most,
            base + root.trained_bytes + before + 2 * gathered,
            base + root.trained_bytes + before + gathered + arriving + block.trained_bytes,
            base + root.trained_bytes + arriving + block.trained_bytes + reduced + reduced // ranks,
        )
        before = reduced
    return max(most, root.trained_bytes + before + root.reduced(ranks) + root.reduced(ranks) // ranks)


def _messages(count: int, ranks: int) -> Traffic:
    size = count * BYTES_AT_ONCE * ranks
    return Traffic("all-gather of messages", count, size, size * (ranks - 1) // ranks)


def _of_copies(gradients: Sequence[torch.Tensor], ranks: int) -> tuple[Traffic, ...]:
    if ranks == 1:
        return ()
    buckets = buckets_of(gradients)
    size = sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets)
    return (
        _messages(2, ranks),
        Traffic("all-reduce of gradients", len(buckets), size, 2 * size * (ranks - 1) // ranks),
    )


def _of_units(units: Sequence[Unit], ranks: int, passes: int, *, is_kept: bool) -> tuple[Traffic, ...]:
    if ranks == 1:
        return ()
    sizes = [unit.gathered(ranks) for unit in units]
    again = 0 if is_kept else sum(sizes[1:])
    gathers = passes * (len(units) + (0 if is_kept else len(units) - 1))
    reduces = passes * sum(1 for unit in units if unit.reduced(ranks))
    gathered, reduced = passes * (sum(sizes) + again), passes * sum(unit.reduced(ranks) for unit in units)
    return (
        _messages(2 if is_kept else 3 + gathers + reduces, ranks),
        Traffic("all-gather of parameters", gathers, gathered, gathered * (ranks - 1) // ranks),
        Traffic("reduce-scatter of gradients", reduces, reduced, reduced * (ranks - 1) // ranks),
    )
