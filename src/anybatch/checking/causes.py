"""What a check and a proof say: every cause once, with its text and the lines that help."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from anybatch.checking.wording import TEXT
from anybatch.records.certificates import Reason

WHOLE = "anybatch.TrainStep(model, loss_fn, optimizer)  # no micro_batch_size: the whole batch at once"
COUPLED = "anybatch.Coupled(encode, loss)  # the loss sees what encode gave for all samples: exact"
_BEFORE = "batch = prepare(batch); step(batch)"
_CLIP = "anybatch.TrainStep(model, loss_fn, optimizer, clip_norm=1.0)  # clips the whole gradient, once"
_BY_THE_FIRST = (
    "by the samples that it is given: with the whole batch by all of them, in a split by those of the first "
    "micro-batch. Later ones leave it alone. Let the whole batch set it before the first step."
)
_BEGUN = ("with torch.no_grad():\n        loss_fn(model, batch)  # once, before the first step", WHOLE)
_MASKS = {"bernoulli_", "native_dropout", "dropout"}  # operations that draw those of dropout
_COUNTED = (
    'batch["{name}"] = step.updates + 1  # before step(batch); the loss reads batch["{name}"], not {code}',
    "step(batch)\n    {code} += 1  # here, once, and not in the loss",
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
    "one split": Cause("one-split", "{rows} samples can be split in one way only; check a larger batch."),
    "even batch": Cause(
        "even-batch",
        "Every sample has {labels_per_sample} labels here, so this batch can't tell a loss that is averaged over "
        "labels from one that is averaged over samples. Check a batch with labels that are ignored, if there are any "
        "in training.",
        ('count=anybatch.count_tokens("{path}")  # if the loss is averaged over labels',),
    ),
    "not finite": Cause(
        "not-finite",
        "The gradient of the whole batch is not finite ({shown}), so there is nothing to compare with.",
    ),
    "lower precision": Cause(
        "lower-precision",
        "Operations that can't be raised to float64 ({shown}) computed in float32, so errors below its rounding do not "
        "show.",
    ),
    "not examined": Cause("not-examined", "Not examined: {what} ({text})."),
    "value": Cause(
        "value",
        "The gradient is the whole batch's, but the value of the loss is {off} in micro-batches: it "
        "holds a term without gradient that does not add up over samples.",
    ),
    # a part that does not run
    "refused": Cause("refused", "A split is refused: {failure}"),
    "fixed shape": Cause(
        "fails",
        "{fails} A shape is written out that is the whole batch's.",
        ("x.view(x.size(0), -1)  # instead of a fixed batch size",),
    ),
    "size": Cause(
        "fails",
        "A micro-batch of {given} samples fails with {failed}. The model or the loss takes other numbers of samples "
        "only, such as whole groups.",
        ("micro_batch_size={size}  # tried: {samples} samples of this batch give the same gradient so",),
    ),
    "groups": Cause(
        "not-additive",
        "{group} samples that stand together belong together, such as pairs: micro-batches of {given} part them.",
        ("micro_batch_size={size}  # whole groups of {group}; tried with {samples} samples",),
    ),
    "parts": Cause(
        "not-additive",
        "The loss takes the batch apart into {parts} parts, as chunk({parts}) does, and puts together what is at the "
        "same place in each. Cut so that these stay together, it is exact (tried with {samples} samples).",
        ("{before}  # before step(batch), with layout={layout}\n    {within}  # first in the loss", WHOLE),
    ),
    "squeezed": Cause(
        "fails",
        "{fails} Look for squeeze() without a dimension, which drops that of a single sample, too.",
        ("x.squeeze(-1)  # instead of x.squeeze()",),
    ),
    "too few": Cause(
        "fails",
        "{fails} The loss needs more of the samples than a micro-batch has, or another size that is the whole batch's.",
        (WHOLE, COUPLED),
    ),
    # what the loss is averaged over
    "count": Cause("count", "The loss is averaged over {items:g} {what}, not over {given}.{also}", ("{line}",)),
    "left over": Cause(
        "state",
        "Each micro-batch run alone gives its share of the whole batch; one after the other they do not: the loss goes "
        "by what the one before leaves, such as the gradient in `.grad`. Read it once before the step, and give it "
        "as data.",
        ('batch["value"] = value  # before step(batch); the loss reads batch["value"]', WHOLE),
    ),
    "unknown count": Cause(
        "count",
        "The loss is a weighted mean of its parts, with the weights {shown} in the first split, and no count that was "
        "tried gives these. Return the denominator of the loss along with its total.",
        (
            "return anybatch.Mean(total, denominator)  # instead of total / denominator",
            "count=lambda batch: ...  # what the loss divides by",
        ),
    ),
    "count of a Mean": Cause(
        "count",
        "The count of the Mean is {items:g} for the whole batch and {wrong:g} for its parts together; expected a count "
        "that adds up over samples.",
        ("return anybatch.Mean(total, items)  # items: how many summands the total has",),
    ),
    "several means": Cause(
        "count",
        "The loss is a sum of means over different items: {shown}. One count can't weigh both.",
    ),
    "sum": Cause(
        "sum",
        "The loss is a sum over the samples, or a sum divided by a fixed number, not a mean: its parts add up to the "
        "whole without weights.",
        (
            "return anybatch.Mean(loss, anybatch.count_samples(batch))  # the mean: 1 / number of samples of it",
            'reduction="mean"',
        ),
    ),
    "shared term": Cause(
        "shared-term",
        "The total holds a term that does not belong to the samples, such as lambda * ||w||^2, worth {value:.4g}: each "
        "of N micro-batches adds it, so it is counted N times.",
        (
            'return {{"data": anybatch.Mean(total, items), "penalty": penalty}}  # with count="forward"',
            "return total / items + penalty  # with count= what items counts: weights of means add up to one",
        ),
    ),
    # samples that are coupled
    "not additive": Cause(
        "not-additive",
        "The loss does not add up over samples: no weights of its parts give the whole, though every module gives each "
        "sample the same. It holds several means with different denominators in one sum, a ratio of means (maybe "
        "detached), a load-balancing, contrastive or ranking term, or another statistic of the batch, "
        "such as that by which targets or advantages are normalised.",
        (
            WHOLE,
            COUPLED,
            _BEFORE + "  # normalise what needs no model, such as targets, before the batch is split",
            'return {{"first": anybatch.Mean(items.sum(), len(items)), ...}}  # each mean alone, with count="forward"',
        ),
    ),
    "one count": Cause(
        "count",
        "The loss function gives the losses {names!l}, and one count= weighs all of them, by which their parts do not "
        "make up the whole: each may be a mean over other items, and count= takes a mapping, with one entry for each. "
        "Or one of them compares samples, or is a statistic of the batch.",
        ("count={line}  # what each of them divides by", WHOLE, COUPLED),
    ),
    "rounding": Cause(
        "not-additive",
        "The gradient of a split is another one, {error:off}, but rounding each weight once moves the whole batch's as "
        "much: the model lets rounding grow, and in its own precision that can't be told from another cause. It is "
        "known once the model runs in float64.",
        (WHOLE,),
    ),
    "divided by itself": Cause(
        "not-additive",
        "The loss is {value:.4g} for any samples, and only its gradient depends on them: a mean is divided by its own "
        "value, as loss / loss.detach(), which is another number in each micro-batch.",
        (
            'return {{"first": anybatch.Mean(items.sum(), items.sum().detach()), ...}}  # each ratio alone, with count="forward"',  # noqa: E501
            WHOLE,
        ),
    ),
    "function of a mean": Cause(
        "not-additive",
        "The loss is a function of a mean over the samples, such as its root or its logarithm, or a mean times a "
        "number that each batch has another one of, such as a sum over a number of items with a bound (.clamp(min=1)) "
        "that a part without items reaches: its parts give the whole gradient by weights that no count gives.",
        (
            WHOLE,
            COUPLED,
            "loss = items.log().mean()  # the function of each sample, and then the mean: another loss",
            "return anybatch.Mean(total, number)  # if it is total / number.clamp(min=1)",
        ),
    ),
    "bound": Cause(
        "bound",
        "The loss applies {operation} to what the samples give together, such as their mean. On the samples that were "
        "compared micro-batches give the whole batch's gradient; they give another one as soon as one of them lies on "
        "one side of the bound and the whole batch on the other.",
        ("loss = items.clamp(min=bound).mean()  # bound each sample, and then take the mean", WHOLE, COUPLED),
    ),
    "encode": Cause(
        "not-additive",
        "The encode of Coupled gives a sample something else in a micro-batch than in the whole batch, or other draws.",
        (WHOLE,),
    ),
    "mixed before": Cause(
        "not-additive",
        "The loss function couples the samples before {model} sees them: in micro-batches the model gets other inputs "
        "for the same samples, such as when they are normalised by the batch, mixed, or cut to the longest of them.",
        (WHOLE, _BEFORE + "  # couple the samples before the batch is split"),
    ),
    "collated together": Cause(
        "not-additive",
        "Samples meet others of the batch in `collate`, however long they are padded, as by torch.randperm or when "
        "they are normalised by the batch: it makes something else of the same samples in micro-batches.",
        (WHOLE, "batch = collate(samples); step(batch)  # without collate=: they meet before the batch is split"),
    ),
    "unexplained": Cause(
        "not-additive",
        "Some samples give something else at once than in their parts, {error:off}, and why could not be found out "
        "here. The loss is no mean over count(batch) items, it compares samples or takes a fixed number of them (the "
        "hardest 10), or something keeps a state.",
        (WHOLE, "anybatch.check(model, loss_fn, batch)  # on a small model of the same kind"),
    ),
    "whole batch": Cause(
        "not-additive",
        "The loss of all {rows} samples, from what the model gives in the micro-batches, has another gradient by its "
        "outputs, {error:off}. It depends on more samples than a micro-batch has, such as a fixed number of the "
        "hardest, or a number that a micro-batch may lack.",
        (WHOLE, COUPLED),
    ),
    "full mask": Cause(
        "count",
        "All of {labels!l} is 1 in this batch. Where it is not, micro-batches give another gradient than the whole "
        "batch: the loss is a mean over what the mask takes, of which each has another number.",
        (
            "count=lambda batch: {labels[0]}.sum()  # if the loss is divided by that",
            "return anybatch.Mean(total, items)  # and not total / items",
        ),
    ),
    "other outputs": Cause(
        "not-additive",
        "Micro-batches give the whole batch's gradient now, and another one once the model gives other numbers, such "
        "as more certain ones: the loss takes those samples only that are above a threshold or active, and divides by "
        "how many these are, or bounds what they give together.",
        ("return anybatch.Mean(taken.sum(), number)  # and not taken.sum() / number", WHOLE, COUPLED),
    ),
    "time": Cause(
        "time",
        "The loss depends on where time is cut: in chunks of {other} steps its value is {loss_error:off}. "
        "`chunk_loss` sees the steps of its chunk only. Hand on in the state what it needs of earlier ones, such as a "
        "position, the last inputs of a convolution or a running statistic, and weigh a mean by its items. Chunks of "
        "{length} steps may be part of the loss: then this is as it should be.",
        (
            "return anybatch.Mean(total, items), state  # and not total / items, where a chunk may have fewer items",
            'return loss, {{"hidden": hidden, "steps": state["steps"] + x.shape[1]}}  # a position that goes on',
            "anybatch.OverTime(..., prepare=...)  # what is computed from all steps at once",
        ),
    ),
    "time of the state": Cause(
        "time",
        "The loss of a chunk does not depend on the state that the chunk before it has handed on: {what}. Each chunk "
        "begins as the first one does, and in chunks of {other} steps the loss is {loss_error:.2g} off.",
        (
            'hidden, state = model.rnn(chunk["x"], state)  # the state goes in, and a new one comes out',
            "return loss, state  # the new one",
            "anybatch.OverTime(chunk_loss, lambda model, batch: (), ...)  # if chunks are to know nothing of others",
        ),
    ),
    "time of the gradient": Cause(
        "time",
        "The loss is the same wherever time is cut, and its gradient is not. The state is detached on its way, or a "
        "hook changes the gradient of each chunk.",
        (
            "return loss, state  # and not state.detach()",
            'anybatch.OverTime(..., mode="truncated", chunk=...)  # if no gradient is to go from chunk to chunk',
        ),
    ),
    "empty part": Cause(
        "not-additive",
        "A part of the samples gives a loss or a gradient that is not finite, all of them do not: as 0 / 0, "
        "where a part, or a chunk of it, has none of the items of a mean.",
        ("return anybatch.Mean(total, items)  # and not total / items: a part without items adds nothing",),
    ),
    "in parts": Cause(
        "not-additive",
        "The gradient of some samples is not that of their parts, {error:off}. The loss is no mean over "
        "count(batch) items (a sum, or another count), it compares samples, or something keeps a state. What it is "
        "can't be looked at in a model that lies in parts.",
        ("anybatch.check(model, loss_fn, batch)  # before fully_shard: says what it is, and what helps",),
    ),
    "rows": Cause(
        "rows",
        "The loss of Coupled is another one when it is computed for {row_block} rows at a time: the means over the "
        "blocks do not make up the mean over all rows. Each row has to see all columns; a softmax over the columns of "
        "a block, a maximum or a ratio sees the rows of the block only.",
        (
            "anybatch.Coupled(encode, loss)  # without row_block: all rows at once",
            "F.cross_entropy(b[rows] @ a.T, labels)  # and not of (a[rows] @ b.T).T, which lacks the other rows",
        ),
    ),
    "module": Cause(
        "module",
        "{shown} ({class}) couples the samples: it is given the same for each sample, and gives something else when "
        "other samples are with it ({difference:off}).",
        (WHOLE,),
    ),
    "time first": Cause("module", " It was built with batch_first=False, which takes dimension 0 for time."),
    "unbatched": Cause(
        "module",
        " It was given two dimensions, which it takes for one sequence whose steps are the samples.",
        ("x = x.unsqueeze({dim})  # before it: a sequence of one step for each sample; squeeze({dim}) after it",),
    ),
    "BatchNorm": Cause(
        "batch-norm",
        "{shown!l} couples the samples: in training mode it {what}, so the gradient of micro-batches is another one."
        "{accepted}",
        (
            WHOLE,
            'batch_norm="frozen"  # normalise by the running statistics: exact, for fine-tuning',
            'batch_norm="ghost"  # accept the statistics of micro-batches: another training method',
        ),
    ),
    "padding": Cause(
        "padding",
        "The result depends on how long a batch is padded: {shown}. Mask the padding in the model and in the loss.",
        ("F.cross_entropy(logits, labels, ignore_index=-100)  # with labels padded by -100",),
    ),
    # shapes
    "not per sample": Cause(
        "broadcast",
        "{label} has {rows} rows, as many as there are samples, and is cut with them; but each micro-batch needs it "
        "whole. Not cut, the error is {error_with_remedy:.2g}.",
        ("broadcast=({path!r},)",),
    ),
    "other dimension": Cause(
        "layout",
        "The samples of {label} are in dimension {dim}, which is as long as dimension 0. Cut there, the error is "
        "{error_with_remedy:.2g}.",
        ("layout={layout!r}",),
    ),
    "broadcasts": Cause(
        "broadcast",
        "{operation} gets tensors of shapes {shapes[0]} and {shapes[1]}, which broadcast: every sample is compared "
        "with every other one. With the same shape on both sides the loss is another one, and the error of a split "
        "{error_with_remedy:.2g}.",
        ("prediction.squeeze(-1)  # or target.unsqueeze(-1): the same shape on both sides",),
    ),
    # a gradient that is not linear
    "hook": Cause(
        "hook",
        "A gradient hook on {hooks!l} is not linear: it sees the gradient of one micro-batch at a time, such as to "
        "clip it, and not the whole batch's. Without hooks the gradients agree.",
        (_CLIP,),
    ),
    "optimizer hook": Cause(
        "hook",
        "A post-accumulate-grad hook on {hooks!l} fires once a micro-batch instead of once an update, such as to run "
        "an optimizer within the backward. It was off during the check.",
        ("handle.remove()  # and let anybatch.TrainStep call the optimizer",),
    ),
    "backward": Cause(
        "backward",
        "The backward is not linear: half of the loss does not have half of the gradient at {shown}. A hook on a "
        "tensor or an autograd.Function clips or normalises the gradient, or adds one of its own; it does so once a "
        "micro-batch.",
        (WHOLE, _CLIP),
    ),
    # state
    "buffer": Cause(
        "buffer",
        "The forward changes the buffer {buffers!l}, which N micro-batches change N times; the gradient does not "
        "depend on it.",
    ),
    "moving buffer": Cause(
        "buffer",
        "The forward changes the buffer {buffers!l}, and the next micro-batch of the same batch computes with what it "
        "finds there. Leave it as it is in the forward, return what moves it as a metric, and move it once, after the "
        "step.",
        (
            (
                'return loss, {{"{name}": values}}  # a row for each sample; {code} is left as it is\n'
                "    out = step(batch)\n"
                '    {owner}.update(out.metrics["{name}"])  # once, with those of all samples: what the forward did to '
                "{name}"
            ),
            WHOLE,
        ),
    ),
    "counting buffer": Cause(
        "buffer",
        "The forward counts in the buffer {buffers!l}: once with the whole batch, and once for each of several "
        "micro-batches, of which the next computes with what it finds there. Count once for each step, after it.",
        (
            "step(batch)\n    {owner}.{name}.add_(1)  # once, here, and not in the forward",
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
        "The forward or the loss reads the flag {buffers!l}, a buffer. As it is, micro-batches give the whole batch's "
        "gradient; turned, they do not.",
        ("anybatch.check(model, loss_fn, batch)  # once it is turned: says why, and what helps", WHOLE),
    ),
    "later buffer": Cause(
        "buffer",
        "The forward moves the buffer {buffers!l}. It makes no difference to the gradient at the values that it has "
        "now, but does at others, such as in a queue that is full or an average that has begun: then the next "
        "micro-batch of the same batch computes with what it finds there. Leave it as it is in the forward, "
        "return what moves it as a metric, and move it once, after the step.",
        (
            (
                'return loss, {{"values": values}}  # a row for each sample; the buffers are left as they are\n'
                '    model.update(step(batch).metrics["values"])  # once, with those of all samples, as the forward did'
            ),
            WHOLE,
        ),
    ),
    "weight": Cause(
        "weight",
        "The forward or the loss writes into {weights!l}: once with the whole batch, and once for each of several "
        "micro-batches, of which the next computes with what it finds there. Move them once for each step, after it.",
        ("step(batch)\n    model.update_average()  # a method of yours, called here and not in forward", WHOLE),
    ),
    "trained": Cause(
        "weight",
        "The loss trains another net itself, {weights!l}: once with the whole batch, and once for each of several "
        "micro-batches, of which the next computes with what it finds there. Give that net a step of its own.",
        (
            "other = anybatch.TrainStep(net, its_loss, its_optimizer)  # once, with a loss that calls no backward()",
            "other(batch)\n    step(batch)  # after it, with a loss that only calls the net",
            WHOLE,
        ),
    ),
    "state": Cause(
        "state",
        "{shown}. The loss depends on it, so that a split {off}. Give it as data, or move it once after the step.",
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
        "Only micro-batches of {size} samples run, and give something else one after the other than in another order, "
        "{error:off}: what the samples of one leave, such as a hidden state, goes on with those of the next. Give each "
        "sample its own, as data.",
        (
            'batch["state"] = state  # a row for each sample; once, after the step: state = out.metrics["state"]',
            'return loss, {{"state": new}}  # in the loss, which reads batch["state"]',
        ),
    ),
    "shared state": Cause(
        "state",
        "{shown}. The loss depends on it, so that a split {off}. Give it as data, and move it once after the step.",
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
        "{shown}. The loss depends on it, so that a split {off}. Give it as data, or move it once after the step.",
        _COUNTED,
    ),
    "number": Cause(
        "state",
        "{shown}. The loss depends on it, so that a split {off}. Give it as data, and move it once after the step.",
        (
            'batch["{name}"] = {code}  # before step(batch); the loss reads batch["{name}"], and leaves {code} alone',
            "out = step(batch)\n    {code} = ...  # once, here: by out.loss, out.count or out.metrics",
        ),
    ),
    "later counter": Cause(
        "state",
        "{shown}. It makes no difference to the gradient at the value that it has now, but does at others: a schedule "
        "by it runs that many times as fast. Give it as data, or move it once after the step.",
        _COUNTED,
    ),
    "later list": Cause(
        "state",
        "{shown}. It makes no difference to the gradient at the length that it has now, but does at others: a schedule "
        "by it runs that many times as fast, and a queue has samples of the very same batch in it. Give it as data, "
        "and extend it once after the step.",
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
        "A second run of the very same samples gives another gradient, and no random generator moved: {what}. Each "
        "micro-batch moves it on. Read it once before the step, and give it as data.",
        ('batch["value"] = value  # before step(batch); the loss reads batch["value"]',),
    ),
    # random numbers
    "drawn": Cause(
        "random",
        "Random numbers are drawn in {shown!l}, by micro-batches in a different order than by the whole batch. The "
        "gradients were compared for the same numbers in each sample. A split is as good a draw as the whole batch, "
        "but not the same one.",
    ),
    "seeded": Cause(
        "random",
        "The loss seeds a random generator itself, so that two micro-batches draw the very same numbers: what is drawn "
        "for the whole batch differs between all of its samples, in a split it repeats, and does not average out.",
        (
            "torch.manual_seed(seed)  # once, before step(batch), and not in the loss; so with a torch.Generator",
            'dropout="per-sample"  # masks that are a function of the sample, whatever the split and the seed',
        ),
    ),
    "drawn together": Cause(
        "not-additive",
        "Samples meet others of the batch in the loss by random numbers of NumPy, Python or a generator of its own, as "
        "by np.random.permutation, or it divides by a number of items that is drawn.",
        (
            WHOLE,
            "batch = prepare(batch); step(batch)  # draw, and mix samples, before the batch is split",
            "return anybatch.Mean(total, items)  # and not total / items, where items are drawn",
        ),
    ),
    "not held": Cause(
        "random",
        "Random numbers of NumPy, Python or a generator of the user's own can't be held for each sample, so a split "
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
        _UNEXPLAINED, message=f"{message} (What explains it failed with {failed})",
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
