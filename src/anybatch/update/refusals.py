"""What is said when BatchNorm stands in the way of a split: the modules, the reason, and the ways on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from anybatch.errors import LossError, NotSplittable

Verb = Literal["TrainStep", "backward"]

_MOST_GROUPS, _CHANNELS = 32, 4  # of a GroupNorm, and those of a group: with one it would be an InstanceNorm
_CALLS = {
    "TrainStep": "anybatch.TrainStep(model, loss_fn, optimizer",
    "backward": "anybatch.backward(model, loss_fn, batch",
}


@dataclass(frozen=True)
class WhySplit:
    """Why a logical batch is in several micro-batches.

    Example:
        >>> WhySplit(micro_batch_size=8, sizes=(8, 8, 6)).sentence(3)
        'micro_batch_size=8 cuts these 22 samples into 3 micro-batches.'
    """

    verb: Verb | None = None  # what the user called, ``None`` if it is not known
    micro_batch_size: float | None = None  # what the user asked for, ``None`` for the whole batch
    sizes: tuple[int, ...] = ()  # samples of each micro-batch
    batches: int = 1  # how many batches the window has
    ran_out: bool = False  # whether memory ran out with larger micro-batches
    planned: bool = False  # whether a plan chose the size
    over_time: bool = False  # whether it is the time steps that are cut, and not the samples
    devices: int = 1  # that share the batch

    def sentence(self, micro_batches: int) -> str:
        """Says what cut the batch."""
        samples = f"these {sum(self.sizes)} samples" if self.sizes else "this batch"
        if self.over_time:
            return "OverTime cuts the sequences into chunks of time steps, which are normalised one after the other."
        if self.ran_out:
            under = " under the plan, and none is smaller" if self.planned else ""
            return f"Memory ran out with larger pieces{under}: {samples} would run as {micro_batches} micro-batches."
        if self.devices > 1:
            return f"The {self.devices} devices share {samples}, in {micro_batches} micro-batches."
        if self.planned:
            return f"The given plan cuts {samples} into {micro_batches} micro-batches."
        if self.micro_batch_size is not None and (self.batches == 1 or micro_batches > self.batches):
            return f"micro_batch_size={self.micro_batch_size:g} cuts {samples} into {micro_batches} micro-batches."
        if self.batches > 1:
            return f"The window has {self.batches} batches, which run one after the other."
        return ""


def named(modules: Mapping[str, torch.nn.Module]) -> str:
    """Names modules by their kinds, however many there are.

    Example:
        >>> named({f"layer{i}.bn": torch.nn.BatchNorm2d(1) for i in range(1, 18)} | {"head.1": torch.nn.BatchNorm1d(1)})
        'layer1.bn ... layer17.bn (17 BatchNorm2d) and head.1 (BatchNorm1d)'
    """
    kinds: dict[str, list[str]] = {}
    for name, module in modules.items():
        kinds.setdefault(type(module).__name__, []).append(name)
    texts = []
    for kind, names in kinds.items():
        listed = f"{names[0]} ... {names[-1]}" if len(names) > 3 else ", ".join(names)
        texts.append(f"{listed} ({kind})" if len(names) == 1 else f"{listed} ({len(names)} {kind})")
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def not_splittable(modules: Mapping[str, torch.nn.Module], micro_batches: int, cause: WhySplit) -> NotSplittable:
    """The error for a batch that may not be split."""
    pieces = "chunks of time" if cause.over_time else f"{micro_batches} micro-batches"
    why = cause.sentence(micro_batches)
    each = f" For the first, and likewise for each of the {len(modules)}:" if len(modules) > 1 else ""
    return NotSplittable(
        f"{named(modules)} {'is' if len(modules) == 1 else 'are'} {_mode(modules)}: BatchNorm normalises each "
        f"sample by the mean and the variance of all samples that run together, so in {pieces} the gradient and "
        f"the running statistics are not those of the whole batch. {why}{' ' if why else ''}Choose one:\n\n1. The "
        f'whole batch at once, exact. {_whole(cause)}\n2. "ghost" batch normalisation, a different training '
        "method: each micro-batch is normalised by its own statistics; the running statistics are updated once "
        f"per batch, with those of all samples.\n{_line(cause, 'ghost')}   Coming from nn.DataParallel: each "
        "replica did the same with its share of the batch, and the running statistics were those of the first "
        f"device. Micro-batches now take the place of the shares.\n{_frozen(modules, cause)}4. A different model: "
        f"GroupNorm and LayerNorm do not couple samples.{each}\n{_group_norm(modules)}\nSyncBatchNorm does not "
        "help: it combines the statistics of processes that run at the same time, while micro-batches run one "
        "after the other.",
        modules=list(modules),
    )


def _mode(modules: Mapping[str, Any]) -> str:
    if all(module.training for module in modules.values()):
        return "in training mode"
    if not any(module.training for module in modules.values()):
        return "in evaluation mode without running statistics, where it uses those of the batch"
    return "in training mode or without running statistics"


def _whole(cause: WhySplit) -> str:
    if cause.over_time:
        return "Give OverTime a chunk= at least as long as the sequences, so that time is not cut."
    first = "Give a budget."
    if cause.devices > 1:
        first = "Leave devices= out, and give one device a budget."
    elif cause.batches > 1:
        first = f"Concatenate the {cause.batches} batches of the window, and give a budget instead of the split."
    elif cause.planned:
        first = "Name more modules that may be recomputed with blocks=[...], or use autocast=torch.bfloat16."
    elif cause.micro_batch_size is not None:
        first = f"Replace micro_batch_size={cause.micro_batch_size:g} with a budget."
    budget = _code('anybatch.TrainStep(model, loss_fn, optimizer, memory="free")')
    return (
        f"{first} Blocks are recomputed, and on a GPU offloaded, until the whole batch fits; running statistics are "
        f"updated once.\n{budget}"
    )


def _frozen(modules: Mapping[str, Any], cause: WhySplit) -> str:
    bare = without_statistics(modules)
    if bare:
        return f'3. "frozen" can\'t be chosen here, since {named(bare)} keeps no running statistics.\n'
    return (
        '3. "frozen", for fine-tuning: all samples are normalised by the running statistics, which are not '
        f"updated. Then any split is exact.\n{_line(cause, 'frozen')}"
    )


def without_statistics(modules: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some modules that have no running statistics to be normalised by in evaluation mode."""
    return {name: m for name, m in modules.items() if m.running_mean is None and m.running_var is None}


def _line(cause: WhySplit, policy: str) -> str:
    said = f"micro_batch_size={cause.micro_batch_size:g}, " if cause.micro_batch_size is not None else ""
    said = 'memory="free", ' if cause.planned else said  # which chooses the size
    if cause.verb is None:
        return _code(f'batch_norm="{policy}"') + "\n"
    return _code(f'{_CALLS[cause.verb]}, {said}batch_norm="{policy}")') + "\n"


def _group_norm(modules: Mapping[str, Any]) -> str:
    """The line that puts a norm of groups of some channels each in the place of the first."""
    name, module = next(iter(modules.items()))
    channels = getattr(module, "num_features", 0)
    groups = math.gcd(_MOST_GROUPS * _CHANNELS, channels) // _CHANNELS or 1
    parent, _, last = name.rpartition(".")
    owner = f'model.get_submodule("{parent}")' if parent else "model"
    return _code(
        f"{owner}.{last} = torch.nn.GroupNorm({groups}, {channels})"
        if last.isidentifier()
        else f'model.set_submodule("{name}", torch.nn.GroupNorm({groups}, {channels}))'
    )


def _code(text: str) -> str:
    return f"       {text}"


def no_statistics(modules: Mapping[str, torch.nn.Module]) -> NotSplittable:
    """The error for BatchNorm that is to be frozen and has no running statistics to be normalised by."""
    return NotSplittable(
        f'batch_norm="frozen" normalises by running statistics, and {named(modules)} '
        f"{'has' if len(modules) == 1 else 'have'} none (track_running_stats=False); expected BatchNorm that keeps "
        "them. Run the whole batch at once (leave micro_batch_size out, or give TrainStep memory=), use "
        'batch_norm="ghost", or build the model with track_running_stats=True',
        modules=list(modules),
    )


def one_value(name: str, module: torch.nn.Module, shape: Sequence[int], cause: WhySplit) -> NotSplittable:
    """The error for a micro-batch that leaves BatchNorm one value a channel, which has no variance."""
    sizes = cause.sizes
    got = f" The {sum(sizes)} samples are in micro-batches of {_listed(sizes)}." if sizes else ""
    good = _without_single(sum(sizes), max(sizes)) if sizes and cause.batches == 1 else []
    advice = (
        f"micro_batch_size={' or '.join(map(str, good))} leaves no single sample"
        if good
        else ("choose a micro_batch_size that leaves no single sample at the end of a batch")
    )
    return NotSplittable(
        f"{name} ({type(module).__name__}) gets an input of shape {tuple(shape)}: one value per channel, which has "
        f'no variance; expected at least two in each micro-batch under batch_norm="ghost".{got} Do one of these: '
        f'{advice}; drop the last samples of the batch (drop_last=True); or use batch_norm="frozen"',
        modules=[name],
    )


def put_in_training_mode(name: str, module: torch.nn.Module) -> NotSplittable:
    """The error for BatchNorm that was in evaluation mode when the batch was split, and no longer is."""
    return NotSplittable(
        f"{name} ({type(module).__name__}) was in evaluation mode when the batch was split, and the loss function "
        "has since put it in training mode, in which it couples the samples; expected modes to stay unchanged "
        "within a step. Call model.train() before the step, which then lists the options; or use "
        'batch_norm="frozen", under which BatchNorm stays in evaluation mode whatever the loss function does',
        modules=[name],
    )


def unused(model: Any, leaves: int, *, are_inputs: bool) -> LossError:
    """The error for a loss that gave no gradient to any of the parameters of the model, or of the inputs."""
    kind = f"{leaves} inputs" if are_inputs else f"{leaves} parameters of {type(model).__name__}"
    return LossError(
        f"the loss gave no gradient to any of the {kind}; expected a loss computed with the model passed to "
        "loss_fn, not with another one from outside"
    )


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if len(sizes) <= 6 else f"{sizes[0]}, {sizes[1]}, ..., {sizes[-1]}"


def _without_single(rows: int, size: int) -> list[int]:
    """The nearest sizes below and above that cut rows without one that is left alone."""
    below = next((n for n in range(size - 1, 1, -1) if rows % n != 1), None)
    above = next((n for n in range(size + 1, rows) if rows % n != 1), None)
    return [n for n in (below, above) if n is not None]
