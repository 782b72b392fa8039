"""What a check and a proof say: every cause once, with its text and the lines that help."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from anybatch.checking.wording import TEXT
from anybatch.records.certificates import Reason

WHOLE = "anybatch.TrainStep(model, loss_fn, optimizer)  # no micro_batch_size: the whole batch at once"
COUPLED = "anybatch.Coupled(encode, loss)  # the loss sees the outputs of encode for all samples: exact"
_BEFORE = "batch = prepare(batch); step(batch)"
_CLIP = "anybatch.TrainStep(model, loss_fn, optimizer, clip_norm=1.0)  # clips the whole gradient, once"
_BY_THE_FIRST = (
    "from the samples that it sees: all of them in the whole batch, only those of the first micro-batch in a "
    "split. Later calls leave it alone. Let the whole batch set it before the first step."
)
_BEGUN = ("with torch.no_grad():\n        loss_fn(model, batch)  # once, before the first step", WHOLE)
_MASKS = {"bernoulli_", "native_dropout", "dropout"}  # operations that draw those of dropout
_COUNTED = (
    'batch["{name}"] = step.updates + 1  # before step(batch); the loss reads batch["{name}"], not {code}',
    "step(batch)\n    {code} += 1  # here, once, not in the loss",
)


class Cause(NamedTuple):
    """One thing that is found."""

    code: str  # see ``Reason``
    text: str  # with fields in braces, as for ``str.format``; ``!l`` lists names
    remedies: tuple[str, ...] = ()  # lines of code, likewise


CAUSES: dict[str, Cause] = {
    # of the check itself
    "part of the batch": Cause(
        "part-of-batch",
        "The whole batch does not fit in memory here, so its first {samples} of {samples_in_batch} samples were "
        "checked.",
    ),
    "own precision": Cause(
        "own-precision",
        "The model can't run in float64, so it was checked in its own precision, where only errors well above rounding "
        "show: {refused}",
    ),
    "evaluation mode": Cause(
        "evaluation-mode",
        "The model is in evaluation mode, so BatchNorm and dropout were not looked at.",
        ("model.train()",),
    ),
    "one split": Cause("one-split", "{rows} samples can be split in only one way; check a larger batch."),
    "even batch": Cause(
        "even-batch",
        "Every sample has {labels_per_sample} labels here, so this batch can't tell a loss that is averaged over "
        "labels from one that is averaged over samples. Check a batch with ignored labels, if training has any.",
        ('count=anybatch.count_tokens("{path}")  # if the loss is averaged over labels',),
    ),
    "not finite": Cause(
        "not-finite",
        "The gradient of the whole batch is not finite ({shown}), so there is nothing to compare with.",
    ),
    "lower precision": Cause(
        "lower-precision",
        "Operations that can't run in float64 ({shown}) ran in float32, so errors below its rounding do not show.",
    ),
    "not examined": Cause("not-examined", "Not examined: {what} ({text})."),
    "value": Cause(
        "value",
        "The gradient is the whole batch's, but the value of the loss is {off} in micro-batches: it contains a "
        "term without gradient that does not add up over samples.",
    ),
    # a part that does not run
    "refused": Cause("refused", "A split is refused: {failure}"),
    "fixed shape": Cause(
        "fails",
        "{fails} A shape is hard-coded for the whole batch.",
        ("x.view(x.size(0), -1)  # instead of a fixed batch size",),
    ),
    "size": Cause(
        "fails",
        "A micro-batch of {given} samples fails with {failed}. The model or the loss only accepts other sizes, "
        "such as whole groups.",
        ("micro_batch_size={size}  # tried: {samples} samples of this batch give the same gradient this way",),
    ),
    "groups": Cause(
        "not-additive",
        "Each {group} consecutive samples belong together, such as pairs: micro-batches of {given} separate them.",
        ("micro_batch_size={size}  # whole groups of {group}; tried with {samples} samples",),
    ),
    "parts": Cause(
        "not-additive",
        "The loss divides the batch into {parts} parts, as chunk({parts}) does, and combines the samples at the "
        "same position in each. With those kept together the split is exact (tried with {samples} samples).",
        ("{before}  # before step(batch), with layout={layout}\n    {within}  # first in the loss", WHOLE),
    ),
    "squeezed": Cause(
        "fails",
        "{fails} Look for squeeze() without a dimension, which also drops the batch dimension of a single sample.",
        ("x.squeeze(-1)  # instead of x.squeeze()",),
    ),
    "too few": Cause(
        "fails",
        "{fails} The loss needs more samples than a micro-batch has, or a size that only the whole batch has.",
        (WHOLE, COUPLED),
    ),
    # what the loss is averaged over
    "count": Cause("count", "The loss is averaged over {items:g} {what}, not over {given}.{also}", ("{line}",)),
    "left over": Cause(
        "state",
        "Each micro-batch run alone gives its share of the whole batch; run one after the other they do not: the "
        "loss depends on what the previous one leaves behind, such as the gradient in `.grad`. Read it once before "
        "the step, and pass it as data.",
        ('batch["value"] = value  # before step(batch); the loss reads batch["value"]', WHOLE),
    ),
    "unknown count": Cause(
        "count",
        "The loss is a weighted mean of its parts, with the weights {shown} in the first split, and none of the "
        "counts tried gives these. Return the denominator of the loss along with its total.",
        (
            "return anybatch.Mean(total, denominator)  # instead of total / denominator",
            "count=lambda batch: ...  # what the loss divides by",
        ),
    ),
    "count of a Mean": Cause(
        "count",
        "The count of the Mean is {items:g} for the whole batch and {wrong:g} for its parts together; expected a count "
        "that adds up over samples.",
        ("return anybatch.Mean(total, items)  # items: how many terms the total sums",),
    ),
    "several means": Cause(
        "count",
        "The loss is a sum of means over different items: {shown}. One count can't weight both.",
    ),
    "sum": Cause(
        "sum",
        "The loss is a sum over the samples, or a sum divided by a fixed number, not a mean: its parts add up to the "
        "whole without weights.",
        (
            "return anybatch.Mean(loss, anybatch.count_samples(batch))  # the mean: divided by the number of samples",
            'reduction="mean"',
        ),
    ),
    "shared term": Cause(
        "shared-term",
        "The total contains a term that does not depend on the samples, such as lambda * ||w||^2, worth "
        "{value:.4g}: each of N micro-batches adds it, so it is counted N times.",
        (
            'return {{"data": anybatch.Mean(total, items), "penalty": penalty}}  # with count="forward"',
            "return total / items + penalty  # with count= giving items: the weights of means add up to one",
        ),
    ),
    # samples that are coupled
    "not additive": Cause(
        "not-additive",
        "The loss does not add up over samples: no weighting of its parts gives the whole, though every module "
        "treats each sample independently. It contains several means with different denominators in one sum, a "
        "ratio of means (maybe detached), a load-balancing, contrastive or ranking term, or another batch "
        "statistic, such as one that normalises targets or advantages.",
        (
            WHOLE,
            COUPLED,
            _BEFORE + "  # normalise anything that needs no model, such as targets, before the batch is split",
            'return {{"first": anybatch.Mean(items.sum(), len(items)), ...}}  # each mean alone, with count="forward"',
        ),
    ),
    "one count": Cause(
        "count",
        "The loss function returns the losses {names!l}, and one count= weights all of them, with which their "
        "parts do not add up to the whole: each may be a mean over different items; count= takes a mapping, with "
        "one entry for each. Or one of them compares samples, or is a batch statistic.",
        ("count={line}  # what each of them divides by", WHOLE, COUPLED),
    ),
    "rounding": Cause(
        "not-additive",
        "The gradient of a split differs, {error:off}, but rounding each weight once changes the whole batch's as "
        "much: the model amplifies rounding, which in its own precision can't be told from another cause. Running "
        "the model in float64 would tell.",
        (WHOLE,),
    ),
    "divided by itself": Cause(
        "not-additive",
        "The loss is {value:.4g} for any samples, and only its gradient depends on them: a mean is divided by its "
        "own value, as in loss / loss.detach(), which differs in each micro-batch.",
        (
            'return {{"first": anybatch.Mean(items.sum(), items.sum().detach()), ...}}  # each ratio alone, with count="forward"',  # noqa: E501
            WHOLE,
        ),
    ),
    "function of a mean": Cause(
        "not-additive",
        "The loss is a function of a mean over the samples, such as its square root or logarithm, or a mean times "
        "a number that differs from batch to batch, such as a sum divided by a clamped number of items "
        "(.clamp(min=1)), where a part without items hits the clamp: its parts give the whole gradient only with "
        "weights that no count gives.",
        (
            WHOLE,
            COUPLED,
            "loss = items.log().mean()  # the function per sample, then the mean: a different loss",
            "return anybatch.Mean(total, number)  # if it is total / number.clamp(min=1)",
        ),
    ),
    "bound": Cause(
        "bound",
        "The loss applies {operation} to a value reduced over samples, such as their mean. On the samples "
        "compared, micro-batches give the whole batch's gradient; they give a different one as soon as one of them "
        "lies on one side of the bound and the whole batch on the other.",
        ("loss = items.clamp(min=bound).mean()  # clamp each sample, then take the mean", WHOLE, COUPLED),
    ),
    "encode": Cause(
        "not-additive",
        "The encode of Coupled gives a sample different outputs in a micro-batch than in the whole batch, or draws "
        "different random numbers.",
        (WHOLE,),
    ),
    "mixed before": Cause(
        "not-additive",
        "The loss function couples the samples before {model} sees them: in micro-batches the model gets different "
        "inputs for the same samples, for example because they are normalised over the batch, mixed, or cut to the "
        "longest of them.",
        (WHOLE, _BEFORE + "  # couple the samples before the batch is split"),
    ),
    "collated together": Cause(
        "not-additive",
        "`collate` mixes samples with others of the batch, whatever they are padded to, such as by torch.randperm "
        "or by normalising over the batch: in micro-batches it returns something else for the same samples.",
        (WHOLE, "batch = collate(samples); step(batch)  # without collate=: they are mixed before the batch is split"),
    ),
    "unexplained": Cause(
        "not-additive",
        "Some samples give a different gradient together than in parts, {error:off}, and the cause could not be "
        "found here. The loss is not a mean over count(batch) items, it compares samples or takes a fixed number "
        "of them (the hardest 10), or something keeps state.",
        (WHOLE, "anybatch.check(model, loss_fn, batch)  # on a small model of the same kind"),
    ),
    "whole batch": Cause(
        "not-additive",
        "The loss of all {rows} samples, computed on the model outputs of the micro-batches, has a different "
        "gradient with respect to them, {error:off}. It depends on more samples than a micro-batch has, such as a "
        "fixed number of the hardest.",
        (WHOLE, COUPLED),
    ),
    "full mask": Cause(
        "count",
        "{labels!l} is 1 everywhere in this batch. Where it is not, micro-batches give a different gradient than "
        "the whole batch: the loss is a mean over the unmasked items, whose number differs between them.",
        (
            "count=lambda batch: {labels[0]}.sum()  # if the loss is divided by that",
            "return anybatch.Mean(total, items)  # not total / items",
        ),
    ),
    "other outputs": Cause(
        "not-additive",
        "Micro-batches give the whole batch's gradient now, but a different one once the model's outputs change, "
        "for example become more confident: the loss takes only samples that are above a threshold or active and "
        "divides by their number, or clamps a value reduced over samples.",
        ("return anybatch.Mean(taken.sum(), number)  # not taken.sum() / number", WHOLE, COUPLED),
    ),
    "time": Cause(
        "time",
        "The loss depends on where time is cut: in chunks of {other} steps its value is {loss_error:off}. "
        "`chunk_loss` only sees the steps of its own chunk. Pass on in the state what it needs from earlier ones, "
        "such as a position, the last inputs of a convolution or a running statistic, and weight a mean by its "
        "items. If chunks of {length} steps are part of the loss, this is as intended.",
        (
            "return anybatch.Mean(total, items), state  # not total / items, where a chunk may have fewer items",
            'return loss, {{"hidden": hidden, "steps": state["steps"] + x.shape[1]}}  # a position that carries on',
            "anybatch.OverTime(..., prepare=...)  # for what is computed from all steps at once",
        ),
    ),
    "time of the state": Cause(
        "time",
        "The loss of a chunk does not depend on the state passed on by the previous chunk: {what}. Each chunk "
        "starts like the first one, and in chunks of {other} steps the loss is {loss_error:.2g} off.",
        (
            'hidden, state = model.rnn(chunk["x"], state)  # takes the state, returns a new one',
            "return loss, state  # the new one",
            "anybatch.OverTime(chunk_loss, lambda model, batch: (), ...)  # if chunks are meant to be independent",
        ),
    ),
    "time of the gradient": Cause(
        "time",
        "The loss is the same wherever time is cut, but its gradient is not. The state is detached between chunks, "
        "or a hook changes the gradient of each chunk.",
        (
            "return loss, state  # not state.detach()",
            'anybatch.OverTime(..., mode="truncated", chunk=...)  # if no gradient should flow from chunk to chunk',
        ),
    ),
    "empty part": Cause(
        "not-additive",
        "Part of the samples give a loss or a gradient that is not finite, while all of them together do not: such "
        "as 0 / 0, where a part, or a chunk of it, has no items to average over.",
        ("return anybatch.Mean(total, items)  # not total / items: a part without items adds nothing",),
    ),
    "in parts": Cause(
        "not-additive",
        "The gradient of some samples is not that of their parts, {error:off}. The loss is not a mean over "
        "count(batch) items (a sum, or another count), it compares samples, or something keeps state. Which of "
        "these can't be examined in a sharded model.",
        ("anybatch.check(model, loss_fn, batch)  # before fully_shard: finds the cause and what helps",),
    ),
    "rows": Cause(
        "rows",
        "The loss of Coupled is different when computed {row_block} rows at a time: the means over the blocks do "
        "not add up to the mean over all rows. Each row has to see all columns; a softmax over the columns of a "
        "block, a maximum or a ratio sees only the rows of the block.",
        (
            "anybatch.Coupled(encode, loss)  # without row_block: all rows at once",
            "F.cross_entropy(b[rows] @ a.T, labels)  # not of (a[rows] @ b.T).T, which lacks the other rows",
        ),
    ),
    "module": Cause(
        "module",
        "{shown} ({class}) couples the samples: for the same input, the output of a sample changes with the other "
        "samples in the batch ({difference:off}).",
        (WHOLE,),
    ),
    "time first": Cause("module", " It was built with batch_first=False, which treats dimension 0 as time."),
    "unbatched": Cause(
        "module",
        " Its input has two dimensions, which it treats as one sequence whose time steps are the samples.",
        ("x = x.unsqueeze({dim})  # before it: a sequence of one step for each sample; squeeze({dim}) after it",),
    ),
    "BatchNorm": Cause(
        "batch-norm",
        "{shown!l} couples the samples: in training mode it {what}, so micro-batches give a different "
        "gradient.{accepted}",
        (
            WHOLE,
            'batch_norm="frozen"  # normalise by the running statistics: exact, for fine-tuning',
            'batch_norm="ghost"  # accept per-micro-batch statistics: a different training method',
        ),
    ),
    "padding": Cause(
        "padding",
        "The result depends on the length to which a batch is padded: {shown}. Mask the padding in the model and "
        "in the loss.",
        ("F.cross_entropy(logits, labels, ignore_index=-100)  # with labels padded with -100",),
    ),
    # shapes
    "not per sample": Cause(
        "broadcast",
        "{label} has {rows} rows, as many as there are samples, and is split with them; but each micro-batch needs "
        "it whole. Unsplit, the error is {error_with_remedy:.2g}.",
        ("broadcast=({path!r},)",),
    ),
    "other dimension": Cause(
        "layout",
        "The samples of {label} are in dimension {dim}, which is as long as dimension 0. Split there, the error is "
        "{error_with_remedy:.2g}.",
        ("layout={layout!r}",),
    ),
    "broadcasts": Cause(
        "broadcast",
        "{operation} gets tensors of shapes {shapes[0]} and {shapes[1]}, which broadcast: every sample is compared "
        "with every other one. With the same shape on both sides the loss is different, and the error of a split "
        "is {error_with_remedy:.2g}.",
        ("prediction.squeeze(-1)  # or target.unsqueeze(-1): the same shape on both sides",),
    ),
    # a gradient that is not linear
    "hook": Cause(
        "hook",
        "A gradient hook on {hooks!l} is not linear: it sees the gradient of one micro-batch at a time (for "
        "example to clip it), not the whole batch's. Without hooks the gradients agree.",
        (_CLIP,),
    ),
    "optimizer hook": Cause(
        "hook",
        "A post-accumulate-grad hook on {hooks!l} fires once per micro-batch instead of once per update, for "
        "example to run an optimizer within the backward pass. It was disabled during the check.",
        ("handle.remove()  # let anybatch.TrainStep call the optimizer",),
    ),
    "backward": Cause(
        "backward",
        "The backward pass is not linear: half the loss does not give half the gradient at {shown}. A hook on a "
        "tensor or an autograd.Function clips or normalises the gradient, or adds one of its own, once per "
        "micro-batch.",
        (WHOLE, _CLIP),
    ),
    # state
    "buffer": Cause(
        "buffer",
        "The forward pass changes the buffer {buffers!l}, which N micro-batches change N times; the gradient does "
        "not depend on it.",
    ),
    "moving buffer": Cause(
        "buffer",
        "The forward pass changes the buffer {buffers!l}, and the next micro-batch of the same batch computes with "
        "the changed value. Leave it unchanged in the forward pass, return what updates it as a metric, and update "
        "it once, after the step.",
        (
            (
                'return loss, {{"{name}": values}}  # a row for each sample; {code} is left unchanged\n    out = '
                'step(batch)\n    {owner}.update(out.metrics["{name}"])  # once, with all samples: what the '
                "forward pass did to {name}"
            ),
            WHOLE,
        ),
    ),
    "counting buffer": Cause(
        "buffer",
        "The forward pass counts in the buffer {buffers!l}: once for the whole batch, but once per micro-batch in "
        "a split, and the next one computes with the new count. Count once per step, after it.",
        (
            "step(batch)\n    {owner}.{name}.add_(1)  # once, here, not in the forward pass",
            'batch["{name}"] = step.updates + 1  # before step(batch); the loss reads batch["{name}"]',
        ),
    ),
    "first forward": Cause(
        "weight",
        f"The first call sets {{weights!l}} {_BY_THE_FIRST}",
        _BEGUN,
    ),
    "first call": Cause("state", f"The first call sets {{state!l}} {_BY_THE_FIRST}", _BEGUN),
    "later flag": Cause(
        "buffer",
        "The forward pass or the loss reads the flag {buffers!l}, a buffer. With its present value, micro-batches "
        "give the whole batch's gradient; flipped, they do not.",
        ("anybatch.check(model, loss_fn, batch)  # once it has flipped: finds the cause and what helps", WHOLE),
    ),
    "later buffer": Cause(
        "buffer",
        "The forward pass updates the buffer {buffers!l}. It makes no difference to the gradient at its present "
        "values, but does at others, such as in a full queue or a running average: then the next micro-batch of "
        "the same batch computes with the updated value. Leave it unchanged in the forward pass, return what "
        "updates it as a metric, and update it once, after the step.",
        (
            (
                'return loss, {{"values": values}}  # a row for each sample; the buffers are left unchanged\n    '
                'model.update(step(batch).metrics["values"])  # once, with all samples, as the forward pass did'
            ),
            WHOLE,
        ),
    ),
    "weight": Cause(
        "weight",
        "The forward pass or the loss writes to {weights!l}: once for the whole batch, but once per micro-batch in "
        "a split, and the next one computes with the new values. Update them once per step, after it.",
        ("step(batch)\n    model.update_average()  # a method of yours, called here, not in forward", WHOLE),
    ),
    "trained": Cause(
        "weight",
        "The loss itself trains another network, {weights!l}: once for the whole batch, but once per micro-batch "
        "in a split, and the next one computes with the new weights. Give that network a step of its own.",
        (
            "other = anybatch.TrainStep(net, its_loss, its_optimizer)  # once, with a loss that calls no backward()",
            "other(batch)\n    step(batch)  # after it, with a loss that only calls the network",
            WHOLE,
        ),
    ),
    "state": Cause(
        "state",
        "{shown}. The loss depends on it, so a split {off}. Pass it as data, or update it once after the step.",
        (
            (
                'batch["{name}"] = {code}  # before the step\n'
                '    return loss, {{"{name}": new}}  # in the loss, which reads batch["{name}"] and leaves {code} alone\n'  # noqa: E501
                '    {code} = step(batch).metrics["{name}"]  # once, after the step'
            ),
            WHOLE,
        ),
    ),
    "one size": Cause(  # without the whole batch at once, which is of another size
        "state",
        "Only micro-batches of {size} samples run, and their gradient depends on the order in which they run, "
        "{error:off}: something one of them leaves, such as a hidden state, carries over to the samples of the "
        "next. Give each sample its own, as data.",
        (
            'batch["state"] = state  # a row for each sample; once, after the step: state = out.metrics["state"]',
            'return loss, {{"state": new}}  # in the loss, which reads batch["state"]',
        ),
    ),
    "shared state": Cause(
        "state",
        "{shown}. The loss depends on it, so a split {off}. Pass it as data, and update it once after the step.",
        (
            (
                'batch["{name}"] = state  # what the loss reads of {code}; broadcast=("{name}",) if it is a tensor\n'
                '    return loss, {{"{name}": values}}  # a row for each sample, or anybatch.Mean(value * n, n) of n samples\n'  # noqa: E501
                '    update(step(batch).metrics["{name}"])  # once, after the step: what the loss did to {code}'
            ),
            WHOLE,
        ),
    ),
    "counter": Cause(
        "state",
        "{shown}. The loss depends on it, so a split {off}. Pass it as data, or update it once after the step.",
        _COUNTED,
    ),
    "number": Cause(
        "state",
        "{shown}. The loss depends on it, so a split {off}. Pass it as data, and update it once after the step.",
        (
            'batch["{name}"] = {code}  # before step(batch); the loss reads batch["{name}"], and leaves {code} alone',
            "out = step(batch)\n    {code} = ...  # once, here: by out.loss, out.count or out.metrics",
        ),
    ),
    "later counter": Cause(
        "state",
        "{shown}. It makes no difference to the gradient at its present value, but does at others: a schedule "
        "based on it runs that many times as fast. Pass it as data, or update it once after the step.",
        _COUNTED,
    ),
    "later list": Cause(
        "state",
        "{shown}. It makes no difference to the gradient at its present length, but does at others: a schedule "
        "based on it runs that many times as fast, and a queue contains samples of the same batch. Pass it as "
        "data, and extend it once after the step.",
        (
            (
                'batch["{name}"] = {kept}  # before the step, with broadcast=("{name}",); only read there\n'
                '    return loss, {{"{name}": rows}}  # a row for each sample: what it added\n'
                '    {list}.extend(step(batch).metrics["{name}"])  # once, after the step'
            ),
            WHOLE,
        ),
    ),
    "moves": Cause(
        "state",
        "A second run of the same samples gives a different gradient, though no random generator advanced: {what}. "
        "Each micro-batch advances it. Read it once before the step, and pass it as data.",
        ('batch["value"] = value  # before step(batch); the loss reads batch["value"]',),
    ),
    # random numbers
    "drawn": Cause(
        "random",
        "Random numbers are drawn in {shown!l}, in a different order in micro-batches than in the whole batch. The "
        "gradients were compared with the same numbers for each sample. A split is as valid a draw as the whole "
        "batch, but not the same one.",
    ),
    "seeded": Cause(
        "random",
        "The loss seeds a random generator itself, so two micro-batches draw the same numbers: in the whole batch "
        "the draws differ between all samples; in a split they repeat, and do not average out.",
        (
            "torch.manual_seed(seed)  # once, before step(batch), not in the loss; likewise for a torch.Generator",
            'dropout="per-sample"  # masks depend on the sample only, whatever the split and the seed',
        ),
    ),
    "drawn together": Cause(
        "not-additive",
        "The loss mixes samples with others of the batch by random numbers of NumPy, Python or its own generator, "
        "such as np.random.permutation, or divides by a randomly drawn number of items.",
        (
            WHOLE,
            "batch = prepare(batch); step(batch)  # draw and mix samples before the batch is split",
            "return anybatch.Mean(total, items)  # not total / items, where items is random",
        ),
    ),
    "not held": Cause(
        "random",
        "Random numbers of NumPy, Python or a generator of the user's own can't be fixed per sample, so a split "
        "can't be compared with the whole batch. Draw them when the batch is made, or with torch.",
        ("batch['noise'] = torch.rand(len(batch['x']))  # before step(batch)",),
    ),
}


def reason(cause: str, where: str = "loss", evidence: Mapping[str, Any] | None = None, **said: Any) -> Reason:
    """Words a cause, by its key in ``CAUSES``; its text may name the evidence, and what else is said."""
    code, text, remedies = CAUSES[cause]
    fields = {**(evidence or {}), **said}
    lines = tuple(TEXT.vformat(line, (), fields) for line in remedies)
    return Reason(code, where, TEXT.vformat(text, (), fields), lines, dict(evidence or {}))


def seeded(operations: Iterable[str]) -> Reason:
    """Says that a generator is seeded in the loss; masks of the samples help only if nothing else is drawn."""
    found = reason("seeded")
    return found if set(operations) <= _MASKS else dataclasses.replace(found, remedies=found.remedies[:1])


def unexplained(error: float, failure: BaseException) -> Reason:
    """Says that samples give something else in parts where the explanation itself fails, without what words others."""
    failed = f"{type(failure).__name__}: {failure}"
    message = TEXT.vformat(CAUSES["unexplained"].text, (), {"error": error})
    return dataclasses.replace(
        _UNEXPLAINED, message=f"{message} (The diagnosis failed with {failed})",
        evidence={"error": error, "failed": failed},
    )  # fmt: skip


def explained(error: float, explain: Callable[[], Reason]) -> Reason:
    """Words a difference that was seen, which is not lost where it can't be worded."""
    try:
        return explain()
    except Exception as failure:  # noqa: BLE001 - of this package, as in what is said
        return unexplained(error, failure)


_UNEXPLAINED = reason("unexplained", evidence={"error": 0.0})


def more(found: Reason, text: str = "", *, before: Sequence[str] = (), **evidence: Any) -> Reason:
    """Adds to a reason: to its message, other numbers, and before its own lines those that help more."""
    message, remedies = found.message + text, (*before, *found.remedies)
    return dataclasses.replace(found, message=message, remedies=remedies, evidence={**found.evidence, **evidence})
