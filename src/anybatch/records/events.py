"""What happened in a run, in order: forwards, backwards, clearing, clipping, steps, schedules."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anybatch.records.lines import Fact, fact


@fact("forward")
@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Fact):
    """The user's code called a root.

    Args:
        root: its number.
        training: the mode of the root itself.
        grad: whether autograd was on.
        inference: whether inference mode was on.
        evaluating: names of its dropout and batch norm modules (with p > 0, or with statistics) that are in
            evaluation mode, at most 20.
        trained: how many of these modules are in training mode.
        evaluated: how many are in evaluation mode.
        rows: the size of dim 0 of its first tensor, -1 if there is none.
        file: of the user's line.
        line: its number.
        seconds: that it took on the host, 0 if not measured.
        module: the name of the part of the root that was called, empty for the root itself.
    """

    root: int
    training: bool = True
    grad: bool = True
    inference: bool = False
    evaluating: tuple[str, ...] = ()
    trained: int = 0
    evaluated: int = 0
    rows: int = -1
    file: str = ""
    line: int = 0
    seconds: float = 0.0
    module: str = ""


@fact("backward")
@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Fact):
    """A backward, or a call of ``autograd.grad``; recorded after it.

    Args:
        value: of the loss, ``None`` where it was no scalar; unscaled where a scaler had scaled it.
        function: ``"backward"`` or ``"grad"``.
        is_leaf: whether the loss was a leaf, which has no graph at all.
        numel: of the loss.
        retain: ``retain_graph``.
        create: ``create_graph``.
        scaled: whether the loss came out of ``scaler.scale``.
        factor: the product of plain numbers that the loss was multiplied with at the very top of its graph, such as
            0.25 for ``(loss / 4).backward()``, and with ``weight``; 1 if there was none.
        weight: the number that it was given as its gradient, which is none of its graph's; 1 if there was none.
        loss_calls: numbers (``at``) of the ``LossCall`` events since the last backward.
        touched: parameters whose ``.grad`` changed or appeared.
        kept: of ``touched``, those whose ``.grad`` had not been cleared since the last optimizer step that used it.
        kept_count: how many these are, where the names were left out to save room.
        touched_count: how many were touched; the tuples are recorded only when they differ from the last backward
            from the same line, and are read from that one otherwise.
        file: of the user's line.
        line: its number.
        top: the kind of the first node of the loss behind plain factors and the scaler, such as ``"MeanBackward0"``.
    """

    value: float | None = None
    function: str = "backward"
    is_leaf: bool = False
    numel: int = 1
    retain: bool = False
    create: bool = False
    scaled: bool = False
    factor: float = 1.0
    weight: float = 1.0
    loss_calls: tuple[int, ...] = ()
    touched: tuple[int, ...] | None = None
    kept: tuple[int, ...] | None = None
    touched_count: int = 0
    kept_count: int = 0
    file: str = ""
    line: int = 0
    top: str = ""


@fact("cleared")
@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared(Fact):
    """Gradients were cleared, by ``zero_grad`` of an optimizer or a module, or by hand (seen at the next event).

    Args:
        by: ``"optimizer"``, ``"module"`` or ``"hand"``.
        number: of the optimizer or the root, -1 if it is neither.
        parameters: how many had a gradient that is gone or zero now.
        of: how many parameters are known to have had one.
        file: of the user's line, empty for ``"hand"``.
        line: its number.
    """

    by: str = "optimizer"
    number: int = -1
    parameters: int = 0
    of: int = 0
    file: str = ""
    line: int = 0


@fact("clipped")
@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped(Fact):
    """``clip_grad_norm_`` or ``clip_grad_value_`` was called.

    Args:
        by: ``"norm"`` or ``"value"``.
        limit: of the norm or the values.
        norm: before clipping, ``None`` for values.
        tensors: how many parameters were given that had a gradient.
        optimizers: numbers of optimizers that have some of them.
        scaled: whether the gradients were still scaled: a scaler has scaled their loss and not yet unscaled them.
        scale: of the scaler, 1 if there is none.
        file: of the user's line.
        line: its number.
    """

    by: str = "norm"
    limit: float = 0.0
    norm: float | None = None
    tensors: int = 0
    optimizers: tuple[int, ...] = ()
    scaled: bool = False
    scale: float = 1.0
    file: str = ""
    line: int = 0


@fact("scaler")
@dataclass(frozen=True, slots=True, kw_only=True)
class Scaler(Fact):
    """A call of a ``GradScaler``.

    Args:
        call: ``"unscale_"``, ``"step"`` or ``"update"``.
        optimizer: its number, -1 for ``update``.
        scale: before the call.
        after: the call.
        skipped: of ``step``: whether the optimizer did not run, or changed nothing, for gradients that overflowed.
        file: of the user's line.
        line: its number.
    """

    call: str
    optimizer: int = -1
    scale: float = 1.0
    after: float = 1.0
    skipped: bool = False
    file: str = ""
    line: int = 0


@fact("stepped")
@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(Fact):
    """An optimizer stepped; nested calls of ``super().step()`` count once.

    Args:
        optimizer: its number.
        number: which of its steps this was, from 0.
        lrs: of its groups at this step.
        with_grad: how many of its parameters had a gradient.
        without: those that require one and had none, by number; recorded when it differs from the last step's.
        without_count: how many these are.
        zero: whether all gradients that it saw were exactly zero, ``None`` where that was not looked at.
        closure: whether it was given a closure.
        by: ``"step"``, or ``"scaler"`` if a scaler called it.
        file: of the user's line.
        line: its number.
        edited: how many gradients were replaced or changed in place (their version grew) after the last backward,
            outside of clipping, unscaling and clearing.
    """

    optimizer: int
    number: int = 0
    lrs: tuple[float, ...] = ()
    with_grad: int = 0
    without: tuple[int, ...] | None = None
    without_count: int = 0
    zero: bool | None = None
    closure: bool = False
    by: str = "step"
    file: str = ""
    line: int = 0
    edited: int = 0


@fact("scheduled")
@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled(Fact):
    """A scheduler stepped; its constructor's own first step does not count.

    Args:
        scheduler: its number.
        number: which of its steps this was, from 0.
        before: the learning rates of its optimizer's groups before the step.
        after: the step.
        file: of the user's line.
        line: its number.
    """

    scheduler: int
    number: int = 0
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()
    file: str = ""
    line: int = 0


@fact("epoch")
@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch(Fact):
    """A ``DataLoader`` was started, or gave its last batch.

    Args:
        loader: its number.
        ended: whether this is the end.
        batches: its length, -1 if unknown; at the end: how many it gave.
        rows: samples of the data set, -1 if unknown.
        batch_size: of the loader, -1 if unknown.
        shuffled: whether its sampler is random.
        workers: how many.
        file: of the user's line.
        line: its number.
    """

    loader: int
    ended: bool = False
    batches: int = -1
    rows: int = -1
    batch_size: int = -1
    shuffled: bool = False
    workers: int = 0
    file: str = ""
    line: int = 0


@fact("loaded")
@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Fact):
    """A state was loaded.

    Args:
        into: ``"module"``, ``"optimizer"`` or ``"scheduler"``.
        number: of the root, optimizer or scheduler, -1 if it has none yet.
        variable: what the user's code calls it.
        strict: as it was given for a module.
        matched: keys that were in both, by name and shape.
        of: keys that the module has.
        missing: some keys that the state lacks.
        unexpected: some keys that the module lacks.
        lrs_before: learning rates of an optimizer's groups.
        lrs_after: loading.
        file: of the user's line.
        line: its number.
    """

    into: str
    number: int = -1
    variable: str = ""
    strict: bool = True
    matched: int = 0
    of: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    lrs_before: tuple[float, ...] = ()
    lrs_after: tuple[float, ...] = ()
    file: str = ""
    line: int = 0


@fact("dropout")
@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutCall(Fact):
    """A functional dropout (also of attention) ran in another mode than the root that was running.

    Args:
        root: its number.
        module: the innermost module, which is no dropout module.
        function: such as ``"dropout"`` or ``"scaled_dot_product_attention"``.
        p: its probability.
        training: whether it dropped.
        root_training: the mode of the innermost module.
        file: of the user's line.
        line: its number.
    """

    root: int
    module: str = ""
    function: str = "dropout"
    p: float = 0.0
    training: bool = True
    root_training: bool = False
    file: str = ""
    line: int = 0


@fact("warned")
@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(Fact):
    """A warning was shown.

    Args:
        category: the name of its class.
        text: of it, at most 500 characters.
        file: that it names.
        line: of it.
    """

    category: str
    text: str
    file: str = ""
    line: int = 0


@fact("crashed")
@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed(Fact):
    """The script ended with an exception, explained with what was alive then.

    Args:
        name: of the finding that explains it, such as ``"BACKWARD_TWICE_STATE"``; empty if none does.
        error: the name of the exception's class.
        text: of it, at most 2000 characters.
        message: what is wrong, in a sentence.
        cause: how it comes to that.
        fix: as code in the user's own names.
        module: the qualified name of the module that ran or that is meant.
        parameters: names that are meant.
        tensor: what tensor is meant, in words.
        evidence: numbers and texts.
        file: of the user's line.
        line: its number.
        code: the text of that line.
    """

    name: str
    error: str
    text: str
    message: str = ""
    cause: str = ""
    fix: str = ""
    module: str = ""
    parameters: tuple[str, ...] = ()
    tensor: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""
    line: int = 0
    code: str = ""


@fact("threads")
@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadsAtOnce(Fact):
    """Two threads trained at once, and nothing was recorded from then on.

    Args:
        turns: how often before that another thread had gone on with the training.
        file: of the user's line at which the second one was seen.
        line: its number.
    """

    turns: int = 0
    file: str = ""
    line: int = 0


@fact("ended")
@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Fact):
    """The end of the run.

    Args:
        exit_code: of the script, ``None`` when attached in code.
        seconds: that the run took.
        own_seconds: of them the doctor's own.
        dropped: lines that were left out because the record had reached its greatest size.
        thinned: how often the samples were made rarer to keep the cost down.
        failure: the text of the first error in the recorder itself, after which it recorded no more of that kind.
    """

    exit_code: int | None = None
    seconds: float = 0.0
    own_seconds: float = 0.0
    dropped: int = 0
    thinned: int = 0
    failure: str = ""
