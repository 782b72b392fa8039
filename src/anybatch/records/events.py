"""What happened in a run, in order: forwards, backwards, clearing, clipping, steps, schedules."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anybatch.records.lines import Fact, fact


@fact("forward")
@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Fact):
    """The user's code called a root."""

    root: int
    training: bool = True  # the mode of the root itself
    grad: bool = True  # whether autograd was on
    inference: bool = False  # whether inference mode was on
    # names of its dropout and batch norm modules (with p > 0, or with statistics) that are in evaluation mode, at most
    # 20
    evaluating: tuple[str, ...] = ()
    trained: int = 0  # how many of these modules are in training mode
    evaluated: int = 0  # how many are in evaluation mode
    rows: int = -1  # the size of dim 0 of its first tensor, -1 if there is none
    file: str = ""  # of the user's line
    line: int = 0
    seconds: float = 0.0  # that it took on the host, 0 if not measured
    module: str = ""  # the name of the part of the root that was called, empty for the root itself


@fact("backward")
@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Fact):
    """A backward, or a call of ``autograd.grad``; recorded after it."""

    value: float | None = None  # of the loss, ``None`` where it was no scalar; unscaled where a scaler had scaled it
    function: str = "backward"  # ``"backward"`` or ``"grad"``
    is_leaf: bool = False  # whether the loss was a leaf, which has no graph at all
    numel: int = 1  # of the loss
    retain: bool = False  # ``retain_graph``
    create: bool = False  # ``create_graph``
    scaled: bool = False  # whether the loss came out of ``scaler.scale``
    # the product of plain numbers that the loss was multiplied with at the very top of its graph, such as 0.25 for
    # ``(loss / 4).backward()``, and with ``weight``; 1 if there was none
    factor: float = 1.0
    # the number that it was given as its gradient, which is none of its graph's; 1 if there was none
    weight: float = 1.0
    loss_calls: tuple[int, ...] = ()  # numbers (``at``) of the ``LossCall`` events since the last backward
    touched: tuple[int, ...] | None = None  # parameters whose ``.grad`` changed or appeared
    # of ``touched``, those whose ``.grad`` had not been cleared since the last optimizer step that used it
    kept: tuple[int, ...] | None = None
    # how many were touched; the tuples are recorded only when they differ from the last backward from the same line,
    # and are read from that one otherwise
    touched_count: int = 0
    kept_count: int = 0  # how many these are, where the names were left out to save room
    file: str = ""  # of the user's line
    line: int = 0
    # the kind of the first node of the loss behind plain factors and the scaler, such as ``"MeanBackward0"``
    top: str = ""


@fact("cleared")
@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared(Fact):
    """Gradients were cleared, by ``zero_grad`` of an optimizer or a module, or by hand (seen at the next event)."""

    by: str = "optimizer"  # ``"optimizer"``, ``"module"`` or ``"hand"``
    number: int = -1  # of the optimizer or the root, -1 if it is neither
    parameters: int = 0  # how many had a gradient that is gone or zero now
    of: int = 0  # how many parameters are known to have had one
    file: str = ""  # of the user's line, empty for ``"hand"``
    line: int = 0


@fact("clipped")
@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped(Fact):
    """``clip_grad_norm_`` or ``clip_grad_value_`` was called."""

    by: str = "norm"  # ``"norm"`` or ``"value"``
    limit: float = 0.0  # of the norm or the values
    norm: float | None = None  # before clipping, ``None`` for values
    tensors: int = 0  # how many parameters were given that had a gradient
    optimizers: tuple[int, ...] = ()  # numbers of optimizers that have some of them
    # whether the gradients were still scaled: a scaler has scaled their loss and not yet unscaled them
    scaled: bool = False
    scale: float = 1.0  # of the scaler, 1 if there is none
    file: str = ""  # of the user's line
    line: int = 0


@fact("scaler")
@dataclass(frozen=True, slots=True, kw_only=True)
class Scaler(Fact):
    """A call of a ``GradScaler``."""

    call: str  # ``"unscale_"``, ``"step"`` or ``"update"``
    optimizer: int = -1  # its number, -1 for ``update``
    scale: float = 1.0  # before the call
    after: float = 1.0  # the call
    # of ``step``: whether the optimizer did not run, or changed nothing, for gradients that overflowed
    skipped: bool = False
    file: str = ""  # of the user's line
    line: int = 0


@fact("stepped")
@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(Fact):
    """An optimizer stepped; nested calls of ``super().step()`` count once."""

    optimizer: int
    number: int = 0  # which of its steps this was, from 0
    lrs: tuple[float, ...] = ()  # of its groups at this step
    with_grad: int = 0  # how many of its parameters had a gradient
    # those that require one and had none, by number; recorded when it differs from the last step's
    without: tuple[int, ...] | None = None
    without_count: int = 0  # how many these are
    # whether all gradients that it saw were exactly zero, ``None`` where that was not looked at
    zero: bool | None = None
    closure: bool = False  # whether it was given a closure
    by: str = "step"  # ``"step"``, or ``"scaler"`` if a scaler called it
    file: str = ""  # of the user's line
    line: int = 0
    # how many gradients were replaced or changed in place (their version grew) after the last backward, outside of
    # clipping, unscaling and clearing
    edited: int = 0


@fact("scheduled")
@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled(Fact):
    """A scheduler stepped; its constructor's own first step does not count."""

    scheduler: int
    number: int = 0  # which of its steps this was, from 0
    before: tuple[float, ...] = ()  # the learning rates of its optimizer's groups before the step
    after: tuple[float, ...] = ()  # the step
    file: str = ""  # of the user's line
    line: int = 0


@fact("epoch")
@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch(Fact):
    """A ``DataLoader`` was started, or gave its last batch."""

    loader: int
    ended: bool = False  # whether this is the end
    batches: int = -1  # its length, -1 if unknown; at the end: how many it gave
    rows: int = -1  # samples of the data set, -1 if unknown
    batch_size: int = -1  # of the loader, -1 if unknown
    shuffled: bool = False  # whether its sampler is random
    workers: int = 0
    file: str = ""  # of the user's line
    line: int = 0


@fact("loaded")
@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Fact):
    """A state was loaded."""

    into: str  # ``"module"``, ``"optimizer"`` or ``"scheduler"``
    number: int = -1  # of the root, optimizer or scheduler, -1 if it has none yet
    variable: str = ""  # what the user's code calls it
    strict: bool = True  # as it was given for a module
    matched: int = 0  # keys that were in both, by name and shape
    of: int = 0  # keys that the module has
    missing: tuple[str, ...] = ()  # some keys that the state lacks
    unexpected: tuple[str, ...] = ()  # some keys that the module lacks
    lrs_before: tuple[float, ...] = ()  # learning rates of an optimizer's groups
    lrs_after: tuple[float, ...] = ()  # loading
    file: str = ""  # of the user's line
    line: int = 0


@fact("dropout")
@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutCall(Fact):
    """A functional dropout (also of attention) ran in another mode than the root that was running."""

    root: int
    module: str = ""  # the innermost module, which is no dropout module
    function: str = "dropout"  # such as ``"dropout"`` or ``"scaled_dot_product_attention"``
    p: float = 0.0  # its probability
    training: bool = True  # whether it dropped
    root_training: bool = False  # the mode of the innermost module
    file: str = ""  # of the user's line
    line: int = 0


@fact("warned")
@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(Fact):
    """A warning was shown."""

    category: str  # the name of its class
    text: str  # of it, at most 500 characters
    file: str = ""  # that it names
    line: int = 0


@fact("crashed")
@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed(Fact):
    """The script ended with an exception, explained with what was alive then."""

    name: str  # of the finding that explains it, such as ``"BACKWARD_TWICE_STATE"``; empty if none does
    error: str  # the name of the exception's class
    text: str  # of it, at most 2000 characters
    message: str = ""  # what is wrong, in a sentence
    cause: str = ""  # how it comes to that
    fix: str = ""  # as code in the user's own names
    proof: str = ""  # what a trial of the fix on copies has shown
    module: str = ""  # the qualified name of the module that ran or that is meant
    parameters: tuple[str, ...] = ()  # names that are meant
    tensor: str = ""  # what tensor is meant, in words
    evidence: Mapping[str, Any] = field(default_factory=dict)  # numbers and texts
    file: str = ""  # of the user's line
    line: int = 0
    code: str = ""  # the text of that line


@fact("threads")
@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadsAtOnce(Fact):
    """Two threads trained at once, and nothing was recorded from then on."""

    turns: int = 0  # how often before that another thread had gone on with the training
    file: str = ""  # of the user's line at which the second one was seen
    line: int = 0


@fact("ended")
@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Fact):
    """The end of the run."""

    exit_code: int | None = None  # of the script, ``None`` when attached in code
    seconds: float = 0.0  # that the run took
    own_seconds: float = 0.0  # of them the doctor's own
    dropped: int = 0  # lines that were left out because the record had reached its greatest size
    thinned: int = 0  # how often the samples were made rarer to keep the cost down
    # the text of the first error in the recorder itself, after which it recorded no more of that kind
    failure: str = ""
