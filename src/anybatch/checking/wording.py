"""What a check says: each reason with its numbers and the lines that help."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from anybatch.batch.batches import Part
from anybatch.checking.subjects import Subject
from anybatch.checking.substitution import Draw
from anybatch.errors import AnyBatchError
from anybatch.records.certificates import Reason
from anybatch.tensors.sideeffects import Effect
from anybatch.update.batchnorm import BatchNormPolicy

WHOLE = "anybatch.TrainStep(model, loss_fn, optimizer)  # no micro_batch_size: the whole batch at once"

COUPLED = "anybatch.Coupled(encode, loss)  # the loss sees what encode gave for all samples: exact"

_AS_DATA = """batch["{name}"] = {code}  # before the step, a row for each sample
    return loss, {{"{name}": new}}  # in the loss, which reads batch["{name}"] and leaves {code} alone
    {code} = step(batch).metrics["{name}"]  # once, after the step"""


_AFTERWARDS = """return loss, {{"{name}": values}}  # a row for each sample; {code} is left as it is
    out = step(batch)
    {owner}.update(out.metrics["{name}"])  # once, with those of all samples: what the forward did to {name}"""


def about_the_check(
    subject: Subject, total: int, refused: str, dtype: torch.dtype | None, splits: Sequence[Sequence[Part]]
) -> list[Reason]:
    """Notes on what was checked and how."""
    notes = []
    if subject.rows < total:
        notes.append(
            Reason(
                "part-of-batch",
                "batch",
                f"The whole batch does not fit in memory here, so its first {subject.rows} of {total} samples were "
                "checked.",
                evidence={"samples": subject.rows, "samples_in_batch": total},
            )
        )
    if refused and dtype is None:
        notes.append(
            Reason(
                "own-precision",
                type(subject.model).__name__,
                "The model can't run in float64, so it was checked in its own precision, where only errors well above "
                f"rounding show: {refused.splitlines()[0]}",
            )
        )
    if isinstance(subject.model, torch.nn.Module) and not subject.model.training:
        notes.append(
            Reason(
                "evaluation-mode",
                type(subject.model).__name__,
                "The model is in evaluation mode, so BatchNorm and dropout were not looked at.",
                ("model.train()",),
            )
        )
    if len(splits) == 1:
        notes.append(
            Reason("one-split", "batch", f"{subject.rows} samples can be split in one way only; check a larger batch.")
        )
    return notes


def not_finite(losses: Mapping[str, float]) -> Reason:
    """The whole batch gives nothing to compare with."""
    shown = ", ".join(f"{name} {value:g}" for name, value in losses.items())
    return Reason(
        "not-finite",
        "loss",
        f"The gradient of the whole batch is not finite ({shown}), so there is nothing to compare with.",
        evidence={"losses": dict(losses)},
    )


def lowered(operations: Iterable[str]) -> Reason:
    """Something computed in lower precision in the float64 run."""
    names = sorted(operations)
    return Reason(
        "lower-precision",
        "model",
        f"Operations that can't be raised to float64 ({', '.join(names[:5])}) computed in float32, so errors below its "
        "rounding do not show.",
        evidence={"operations": names},
    )


def value_only(error: float) -> Reason:
    """The gradient is right, and the value of the loss is not."""
    return Reason(
        "value",
        "loss",
        f"The gradient is the whole batch's, but the value of the loss is {error:.2g} off in micro-batches: it holds a "
        "term without gradient that does not add up over samples.",
        evidence={"loss_error": error},
    )


def not_examined(what: str, failure: Exception) -> Reason:
    """A search for a cause that failed itself."""
    text = str(failure).splitlines()[0] if str(failure) else ""
    return Reason(
        "not-examined", "check", f"Not examined: {what} ({type(failure).__name__}: {text}).",
        evidence={"error": type(failure).__name__},
    )  # fmt: skip


def not_additive(where: str, evidence: Mapping[str, object]) -> Reason:
    """A loss that is not made up of those of its parts, for a reason of its own."""
    return Reason(
        "not-additive",
        where,
        "The loss does not add up over samples: no weights of its parts give the whole, though every module gives "
        "each sample the same. It holds several means with different denominators in one sum, a ratio of means "
        "(maybe detached), a load-balancing, contrastive or ranking term, or another statistic of the batch.",
        (
            WHOLE,
            COUPLED,
            'return {"first": anybatch.Mean(items.sum(), len(items)), ...}  # each mean alone, with count="forward"',
        ),
        evidence,
    )


def part_fails(failure: Exception, smallest: int) -> Reason:
    """A micro-batch fails where the whole batch does not."""
    text = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
    if isinstance(failure, AnyBatchError):
        return Reason("refused", "loss", f"A split is refused: {failure}", evidence={"error": type(failure).__name__})
    if "invalid for input of size" in text:
        hint = "A shape is written out that is the whole batch's."
        remedies: tuple[str, ...] = ("x.view(x.size(0), -1)  # instead of a fixed batch size",)
    elif smallest == 1:
        hint = "Look for squeeze() without a dimension, which drops that of a single sample, too."
        remedies = ("x.squeeze(-1)  # instead of x.squeeze()",)
    else:
        hint = "The loss needs more of the samples than a micro-batch has, or another size that is the whole batch's."
        remedies = (WHOLE, COUPLED)
    return Reason(
        "fails",
        "loss",
        f"The whole batch runs, but a split into micro-batches of {smallest} samples and more fails with "
        f"{type(failure).__name__}: {text}. {hint}",
        remedies,
        {"error": type(failure).__name__, "smallest_micro_batch": smallest},
    )


def not_per_sample(label: str, path: str, rows: int, error: float) -> Reason:
    """A leaf that has as many rows as there are samples, and belongs to all of them."""
    return Reason(
        "broadcast",
        label,
        f"{label} has {rows} rows, as many as there are samples, and is cut with them; but each micro-batch needs it "
        f"whole. Not cut, the error is {error:.2g}.",
        (f"broadcast=({path!r},)",),
        {"path": path, "error_with_remedy": error},
    )


def broadcasts(shapes: tuple[str, str, str], error: float) -> Reason:
    """An operation that compares each sample with every other one, since a dimension is missing."""
    operation, one, other = shapes
    return Reason(
        "broadcast",
        "loss",
        f"{operation} gets tensors of shapes {one} and {other}, which broadcast: every sample is compared with every "
        f"other one. With the same shape on both sides the loss is another one, and the error of a split {error:.2g}.",
        ("prediction.squeeze(-1)  # or target.unsqueeze(-1): the same shape on both sides",),
        {"operation": operation, "shapes": [one, other], "error_with_remedy": error},
    )


def several_means(where: str, found: Sequence[tuple[str, str, str]]) -> Reason:
    """A sum of means with different denominators, told apart by the modules that only one of them reaches."""
    shown = [f"in `{module}` the gradient is that of a mean over {items}" for module, items, _ in found]
    codes = [code for _, _, code in found]
    known = all(codes)
    names = [f"loss_{position}" for position in range(1, len(found) + 1)]
    means = ", ".join(f'"{name}": anybatch.Mean(items_{n}.sum(), len(items_{n}))' for n, name in enumerate(names, 1))
    counts = ", ".join(f'"{name}": {code}' for name, code in zip(names, codes, strict=True))
    losses = ", ".join(f'"{name}": {name}' for name in names)
    remedies = (f'return {{{means}}}  # the items of each and their number, with count="forward"',)
    return Reason(
        "count",
        where,
        f"The loss is a sum of means over different items: {'; '.join(shown)}. One count can't weigh both.",
        (f"return {{{losses}}}  # with count={{{counts}}}", *remedies) if known else remedies,
        {"modules": [module for module, _, _ in found], "items": [items for _, items, _ in found]},
    )


def hooks(names: Sequence[str], error: float) -> Reason:
    """Hooks on gradients that are not linear."""
    return Reason(
        "hook",
        names[0],
        f"A gradient hook on {_listed(names)} is not linear: it sees the gradient of one micro-batch at a time, such "
        "as to clip it, and not the whole batch's. Without hooks the gradients agree.",
        ("anybatch.TrainStep(model, loss_fn, optimizer, clip_norm=1.0)  # clips the whole gradient, once",),
        {"hooks": list(names), "error_without_hooks": error},
    )


def optimizer_hooks(names: Sequence[str]) -> Reason:
    """Hooks that fire once a micro-batch instead of once an update."""
    return Reason(
        "hook",
        names[0],
        f"A post-accumulate-grad hook on {_listed(names)} fires once a micro-batch instead of once an update, such as "
        "to run an optimizer within the backward. It was off during the check.",
        ("handle.remove()  # and let anybatch.TrainStep call the optimizer",),
        {"hooks": list(names)},
    )


def padding() -> Reason:
    """Padding takes part in the loss."""
    return Reason(
        "padding",
        "loss",
        "The result depends on how long a batch is padded: the same samples give the whole's gradient if they are cut "
        "from the batch that is padded as a whole, but not if each micro-batch is padded to its own longest sample. "
        "Mask the padding in the model and in the loss.",
        ("F.cross_entropy(logits, labels, ignore_index=-100)  # with labels padded by -100",),
    )


def backward(module: str, parameters: Sequence[str], error: float) -> Reason:
    """A backward that is not linear."""
    shown = f"the result of `{module}`" if module else f"parameter `{parameters[0]}`" if parameters else "the model"
    return Reason(
        "backward",
        module or (parameters[0] if parameters else "model"),
        f"The backward is not linear: half of the loss does not have half of the gradient at {shown}. A hook on a "
        "tensor or an autograd.Function clips or normalises the gradient, or adds one of its own; it does so once a "
        "micro-batch.",
        (WHOLE, "anybatch.TrainStep(model, loss_fn, optimizer, clip_norm=1.0)  # clips the whole gradient, once"),
        {"error": error, "parameters": list(parameters)[:20]},
    )


def time_first(kind: str, layout: Mapping[str, int]) -> tuple[str, list[str]]:
    """What to do about a module that takes dimension 0 for time: the other way to build it, or to cut the batch."""
    remedies = [f"{kind}(..., batch_first=True)"]
    if layout:
        remedies.append(f"layout={dict(layout)!r}  # if the batch has the time first, and the samples after it")
    return " It was built with batch_first=False, which takes dimension 0 for time.", remedies


def unbatched(*, batch_first: bool) -> tuple[str, list[str]]:
    """What to do about a module that takes a batch of vectors for one sequence."""
    dim = 1 if batch_first else 0
    return (
        " It was given two dimensions, which it takes for one sequence whose steps are the samples.",
        [f"x = x.unsqueeze({dim})  # before it: a sequence of one step for each sample; squeeze({dim}) after it"],
    )


def mixing(name: str, module: torch.nn.Module, difference: float, special: tuple[str, list[str]] | None) -> Reason:
    """A module that mixes samples, with what is special about it."""
    kind = type(module).__name__
    hint, remedies = special or ("", [])
    shown = f"`{name}`" if name else "the model's own forward"
    return Reason(
        "module",
        name or kind,
        f"{shown} ({kind}) couples the samples: it is given the same for each sample, and gives something else when "
        f"other samples are with it ({difference:.2g} off).{hint}",
        (*remedies, WHOLE),
        {"module": name, "class": kind, "difference": difference},
    )


def mixed_before(model: str) -> Reason:
    """Samples are mixed before the model sees them."""
    return Reason(
        "not-additive",
        "loss",
        f"The loss function couples the samples before {model} sees them: in micro-batches the model gets other "
        "inputs for the same samples, such as when they are normalised by the batch, or mixed.",
        (WHOLE, "batch = prepare(batch); step(batch)  # couple the samples before the batch is split"),
    )


def verified(reason: Reason, error: float, tolerance: float) -> Reason:
    """A reason with the error that is left when its remedy is applied."""
    if error <= tolerance:
        text = f"With the count below the error is {error:.2g}."
    else:
        text = f"With the count below the error is {error:.2g} still, so that there is another reason, too."
    return dataclasses.replace(
        reason, message=f"{reason.message} {text}", evidence={**reason.evidence, "error_with_remedy": error}
    )


def drawn_count(reason: Reason) -> Reason:
    """A reason of a loss that is a mean over as many items as are drawn."""
    return dataclasses.replace(
        reason,
        message=f"{reason.message} How many items there are depends on the random numbers that are drawn.",
        remedies=reason.remedies[:1],
    )


def with_failure(reason: Reason, failure: Exception | None) -> Reason:
    """A reason with the error that a split was refused with."""
    if failure is None:
        return reason
    return dataclasses.replace(reason, message=f"{reason.message} As it is, a split is refused: {failure}")


def buffers_change(names: Sequence[str]) -> Reason:
    """Buffers that a forward changes, and that do not matter for the gradient."""
    return Reason(
        "buffer",
        names[0],
        f"The forward changes the buffer {_listed(names)}, which N micro-batches change N times; the gradient does not "
        "depend on it.",
        evidence={"buffers": list(names)},
    )


def buffers_matter(names: Sequence[str], error: float) -> Reason:
    """Buffers that go over from one micro-batch to the next."""
    owner, _, name = names[0].rpartition(".")
    return Reason(
        "buffer",
        names[0],
        f"The forward changes the buffer {_listed(names)}, and the next micro-batch of the same batch computes with "
        "what it finds there. Leave it as it is in the forward, return what moves it as a metric, and move it once, "
        "after the step.",
        (_AFTERWARDS.format(name=name, code=names[0], owner=owner or "model"), WHOLE),
        {"buffers": list(names), "error": error},
    )


def state(effects: Sequence[Effect], micro_batches: int, error: float) -> Reason:
    """What the forward or the loss changes in Python, and finds changed in the next micro-batch."""
    shown = "; ".join(_moved(effect, micro_batches) for effect in effects[:3])
    off = "fails" if error == float("inf") else f"has another gradient ({error:.2g} off)"
    return Reason(
        "state",
        effects[0].place.code,
        f"{shown}. The loss depends on it, so that a split {off}. Give it as data, or move it once after the step.",
        _remedies_of(effects[0]),
        {"state": [effect.place.code for effect in effects], "error": error},
    )


def state_later(effects: Sequence[Effect], micro_batches: int) -> Reason:
    """A counter that makes no difference at the value that it has now."""
    return Reason(
        "state",
        effects[0].place.code,
        f"{'; '.join(_moved(effect, micro_batches) for effect in effects[:3])}. It makes no difference to the gradient "
        "at the value that it has now, but does at others: a schedule by it runs that many times as fast. Give it as "
        "data, or move it once after the step.",
        _remedies_of(effects[0]),
        {"state": [effect.place.code for effect in effects]},
    )


def _moved(effect: Effect, micro_batches: int) -> str:
    what = f"`{effect.place.code}`{effect.place.owner}"
    now = effect.again()
    if effect.is_number and isinstance(now, (int, float)) and effect.after != effect.before:
        times = (now - effect.before) / (effect.after - effect.before)
        if times == micro_batches:
            return f"{what} was counted {micro_batches} times in one step of {micro_batches} micro-batches"
        return f"{what} went from {effect.before!r} to {now!r} in one step of {micro_batches} micro-batches"
    return f"{what} is changed by one micro-batch and read by the next"


def _remedies_of(effect: Effect) -> tuple[str, ...]:
    code = effect.place.code
    name = re.findall(r"[A-Za-z_]\w*", code)[-1]
    if effect.is_number:
        return (
            f'batch["{name}"] = step.updates + 1  # before step(batch); the loss reads batch["{name}"], not {code}',
            f"step(batch)\n    {code} += 1  # here, once, and not in the loss",
        )
    return (
        _AS_DATA.format(name=name, code=code),
        WHOLE,
    )


def weights_written(names: Sequence[str], error: float) -> Reason:
    """Weights that a forward or a loss writes to."""
    return Reason(
        "weight",
        names[0],
        f"The forward or the loss writes into {_listed(names)}: once with the whole batch, and once for each of "
        "several micro-batches, of which the next computes with what it finds there. Move them once for each step, "
        "after it.",
        ("step(batch)\n    model.update_average()  # here, and not in forward", WHOLE),
        {"weights": list(names), "error": error},
    )


def batch_norm(modules: Mapping[str, torch.nn.Module], error: float, policy: BatchNormPolicy) -> Reason:
    """BatchNorm in training mode."""
    names = list(modules)
    normalising = [name for name, module in modules.items() if isinstance(module, _BatchNorm)]
    what = "normalises each sample by statistics of all samples of a batch" if normalising else "keeps such statistics"
    shown = _listed([f"`{name}` ({type(module).__name__})" for name, module in modules.items()])
    keeps = all(module.running_mean is not None for module in modules.values() if isinstance(module, _BatchNorm))
    frozen = ('batch_norm="frozen"  # normalise by the running statistics: exact, for fine-tuning',) if keeps else ()
    accepted = " It was accepted with batch_norm='ghost'." if policy == "ghost" else ""
    return Reason(
        "batch-norm",
        names[0],
        f"{shown} couples the samples: in training mode "
        f"it {what}, so the gradient of micro-batches is another one.{accepted}",
        (
            WHOLE,
            *frozen,
            'batch_norm="ghost"  # accept the statistics of micro-batches: another training method',
        ),
        {"modules": names, "error": error},
    )


def random_numbers(draws: Sequence[Draw], modules: Mapping[str, torch.nn.Module]) -> Reason:
    """Random numbers that a split draws in another order."""
    places = list(dict.fromkeys(draw.where for draw in draws))
    shown = [
        f"`{place or 'model'}` ({type(modules[place]).__name__})" if place in modules else "the loss"
        for place in places
    ]
    return Reason(
        "random",
        places[0] or "model",
        f"Random numbers are drawn in {_listed(shown)}, by micro-batches in another order than by the whole batch. "
        "The gradients were compared for the same numbers in each sample. A split is as good a draw as the whole "
        "batch, but not the same one.",
        evidence={"modules": places, "operations": sorted({draw.operation for draw in draws})},
    )


def seeded() -> Reason:
    """Random numbers of which two micro-batches get the same."""
    return Reason(
        "random",
        "loss",
        "The loss seeds a random generator itself, so that two micro-batches draw the very same numbers: what is drawn "
        "for the whole batch differs between all of its samples, in a split it repeats, and does not average out.",
        (
            "torch.manual_seed(seed)  # once, before step(batch), and not in the loss",
            'dropout="per-sample"  # masks that are a function of the sample, whatever the split and the seed',
        ),
    )


def even_batch(path: str, number: int) -> Reason:
    """A batch that can't tell a mean over labels from one over samples."""
    return Reason(
        "even-batch",
        path,
        f"Every sample has {number} labels here, so this batch can't tell a loss that is averaged over labels from "
        "one that is averaged over samples. Check a batch with labels that are ignored, if there are any in training.",
        (f'count=anybatch.count_tokens("{path}")  # if the loss is averaged over labels',),
        {"labels_per_sample": number},
    )


def wrong_rows(size: int, error: float) -> Reason:
    """A loss of blocks of rows that is not the mean over these rows of the loss of all."""
    return Reason(
        "rows",
        "loss",
        f"The loss of Coupled is another one when it is computed for {size} rows at a time: the means over the blocks "
        "do not make up the mean over all rows. Each row has to see all columns; a softmax over the columns of a "
        "block, a maximum or a ratio sees the rows of the block only.",
        (
            "anybatch.Coupled(encode, loss)  # without row_block: all rows at once",
            "F.cross_entropy(b[rows] @ a.T, labels)  # and not of (a[rows] @ b.T).T, which lacks the other rows",
        ),
        {"row_block": size, "error": error},
    )


def unseen(iterators: Sequence[Effect]) -> Reason:
    """A loss that is another one each time, by something that can't be put back, and without random numbers."""
    shown = [f"`{effect.place.code}`{effect.place.owner}".rstrip(",") for effect in iterators]
    what = (
        f"the loss goes on with {_listed(shown)}"
        if shown
        else "the loss reads something that moves, such as an iterator, a clock, a file or an object of a library"
    )
    return Reason(
        "state",
        iterators[0].place.code if shown else "loss",
        f"A second run of the very same samples gives another gradient, and no random generator moved: {what}. "
        "Read it once before the step, and give it as data.",
        ('batch["value"] = value  # before step(batch); the loss reads batch["value"]',),
    )


def not_held() -> Reason:
    """Random numbers that could not be held, where a split was not exact."""
    return Reason(
        "random",
        "loss",
        "The model or the loss draws random numbers that can't be held for each sample, from numpy, from Python or "
        "from a generator of its own, so a split can't be compared with the whole batch. Draw them when the batch is "
        "made, or with torch.",
        ("batch['noise'] = torch.rand(len(batch['x']))  # before step(batch)",),
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
