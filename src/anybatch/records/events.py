"""The events of a run: forwards, backwards, clearing, clipping, optimizer steps, schedules.

``file`` and ``line`` of an event are those of the user's line that caused it; ``file`` is empty if there is none.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from anybatch.records.lines import Fact, Placed, fact


@fact("forward")
class Forward(Placed):
    """The user's code called a root: a model, or a module of one."""

    root: int  # its number
    training: bool = True  # the mode of the root itself
    grad: bool = True  # whether autograd was enabled
    inference: bool = False  # whether inference mode was enabled
    # names of its dropout (p > 0) and batch norm (with running statistics) modules in evaluation mode, at most 20
    evaluating: tuple[str, ...] = ()
    trained: int = 0  # the number of such modules in training mode
    evaluated: int = 0  # the number of such modules in evaluation mode
    rows: int = -1  # the size of dim 0 of the first tensor it was given; -1 if there is none
    seconds: float = 0.0  # its duration on the host; 0 if not measured
    module: str = ""  # the name of the module of the root that was called; empty for the root itself


@fact("backward")
class Backward(Placed):
    """A call of ``backward`` or ``autograd.grad``; recorded after it returned."""

    value: float | None = None  # the loss, unscaled if a scaler scaled it; ``None`` if it is not a scalar
    function: str = "backward"  # ``"backward"`` or ``"grad"``
    is_leaf: bool = False  # whether the loss was a leaf, which has no graph
    numel: int = 1  # the number of elements of the loss
    retain: bool = False  # ``retain_graph``
    create: bool = False  # ``create_graph``
    scaled: bool = False  # whether the loss is a result of ``scaler.scale``
    # the product of the plain numbers by which the loss was multiplied last, such as 0.25 for
    # ``(loss / 4).backward()``, times ``weight``; 1 if there is none
    factor: float = 1.0
    weight: float = 1.0  # the number that was passed as ``gradient=``, which is not in the graph; 1 if there is none
    loss_calls: tuple[int, ...] = ()  # numbers (``at``) of the ``LossCall`` events since the last backward
    # numbers of the parameters whose ``.grad`` appeared or changed; ``None`` if they are those of the last backward
    # from the same line
    touched: tuple[int, ...] | None = None
    # those of ``touched`` whose ``.grad`` had not been cleared since the last optimizer step that used it
    kept: tuple[int, ...] | None = None
    touched_count: int = 0  # the length of ``touched``, recorded even where ``touched`` is ``None``
    kept_count: int = 0  # the length of ``kept``, recorded even where ``kept`` is ``None``
    # the first node of the graph of the loss below plain factors and the scaler, such as ``"MeanBackward0"``
    top: str = ""


@fact("cleared")
class Cleared(Placed):
    """Gradients were cleared, by ``zero_grad`` of an optimizer or a module; or by hand, seen at the next event."""

    by: str = "optimizer"  # ``"optimizer"``, ``"module"`` or ``"hand"``, which has no line
    number: int = -1  # the number of the optimizer or the root; -1 if it is neither
    parameters: int = 0  # the number of parameters whose gradient is now ``None`` or zero
    of: int = 0  # the number of parameters that are known to have had a gradient


@fact("clipped")
class Clipped(Placed):
    """``clip_grad_norm_`` or ``clip_grad_value_`` was called."""

    by: str = "norm"  # ``"norm"`` or ``"value"``
    limit: float = 0.0  # ``max_norm`` or ``clip_value``
    norm: float | None = None  # the norm before clipping; ``None`` for values
    tensors: int = 0  # the number of given parameters that had a gradient
    optimizers: tuple[int, ...] = ()  # numbers of the optimizers that hold some of them
    # whether the gradients were still scaled: a scaler scaled the loss and has not unscaled them yet
    scaled: bool = False
    scale: float = 1.0  # the scale of the scaler; 1 if there is none


@fact("scaler")
class Scaler(Placed):
    """A call of a ``GradScaler``."""

    call: str  # ``"unscale_"``, ``"step"`` or ``"update"``
    optimizer: int = -1  # the number of the optimizer; -1 for ``update``
    scale: float = 1.0  # the scale before the call
    after: float = 1.0  # the scale after the call
    # for ``step``: whether gradients overflowed, so that the optimizer did not run or changed nothing
    skipped: bool = False


@fact("stepped")
class Stepped(Placed):
    """An optimizer stepped; a nested ``super().step()`` does not count again."""

    optimizer: int  # its number
    number: int = 0  # the index of this step among the optimizer's, from 0
    lrs: tuple[float, ...] = ()  # the learning rate of each group at this step
    with_grad: int = 0  # the number of its parameters with a gradient
    zero: bool | None = None  # whether all its gradients were exactly zero; ``None`` if that was not examined
    closure: bool = False  # whether it was given a closure
    by: str = "step"  # ``"step"``, or ``"scaler"`` if a scaler called it
    # the number of gradients that were replaced or changed in place after the last backward, other than by clipping,
    # unscaling and clearing
    edited: int = 0


@fact("scheduled")
class Scheduled(Placed):
    """A scheduler stepped; the first step, which its constructor takes, does not count."""

    scheduler: int  # its number
    number: int = 0  # the index of this step among the scheduler's, from 0
    before: tuple[float, ...] = ()  # the learning rates of its optimizer's groups before the step
    after: tuple[float, ...] = ()  # the learning rates after the step


@fact("epoch")
class Epoch(Placed):
    """An epoch of a ``DataLoader`` began or ended."""

    loader: int  # the number of the loader
    ended: bool = False  # whether this is the end of the epoch
    batches: int = -1  # the length of the loader, -1 if unknown; at the end, the number of batches that it gave
    rows: int = -1  # the number of samples of the data set; -1 if unknown
    batch_size: int = -1  # the batch size of the loader; -1 if unknown
    shuffled: bool = False  # whether its sampler is random
    workers: int = 0  # ``num_workers``
    # of a data set of plain rows: columns with mean 0 and standard deviation 1, all columns, and what tells it from
    # other sets; empty if it was not looked at
    standardised: tuple[float, ...] = ()
    weights: int = -1  # the number of weights of a sampler that draws by weights; -1 without


@fact("loaded")
class Loaded(Placed):
    """``load_state_dict`` was called."""

    into: str  # ``"module"``, ``"optimizer"`` or ``"scheduler"``
    number: int = -1  # the number of the root, optimizer or scheduler; -1 if it has none yet
    variable: str = ""  # its name in the user's code
    strict: bool = True  # ``strict`` of a module's call
    matched: int = 0  # the number of keys that the module and the state share, with equal shapes
    of: int = 0  # the number of keys of the module
    missing: tuple[str, ...] = ()  # some of the keys that the state lacks
    unexpected: tuple[str, ...] = ()  # some of the keys that the module lacks
    lrs_before: tuple[float, ...] = ()  # the learning rates of an optimizer's groups before the call
    lrs_after: tuple[float, ...] = ()  # the learning rates after the call


@fact("dropout")
class DropoutCall(Placed):
    """A functional dropout ran in another mode than the module around it; of each model also the first that did not."""

    root: int  # the number of the root that was running
    module: str = ""  # the name of the innermost module, which is not a dropout module
    function: str = "dropout"  # such as ``"dropout"`` or ``"scaled_dot_product_attention"``
    p: float = 0.0  # its dropout probability
    training: bool = True  # whether it dropped
    root_training: bool = False  # the mode of the innermost module


@fact("warned")
class Warned(Placed):
    """A Python warning was shown; it names the file and the line."""

    category: str  # the name of its class
    text: str  # its text, at most 500 characters


@fact("crashed")
class Crashed(Placed):
    """The script ended with an exception; the explanation uses the objects that were alive then."""

    name: str  # the finding that explains it, such as ``"BACKWARD_TWICE_STATE"``; empty if none does
    error: str  # the name of the exception's class
    text: str  # the text of the exception, at most 2000 characters
    message: str = ""  # what is wrong, in a sentence
    cause: str = ""  # how it happened
    fix: str = ""  # code in the user's own names
    proof: str = ""  # the result of trying the fix on copies
    module: str = ""  # the qualified name of the module that ran, or that is at fault
    parameters: tuple[str, ...] = ()  # the names of the parameters at fault
    tensor: str = ""  # the tensor at fault, in words
    evidence: Mapping[str, Any] = field(default_factory=dict)  # numbers and texts by name
    code: str = ""  # the text of that line


@fact("threads")
class ThreadsAtOnce(Placed):
    """Two threads trained at once, the second one at the line; nothing was recorded after that."""

    turns: int = 0  # how often the training had passed from one thread to another before


@fact("ended")
class Ended(Fact):
    """The end of the run."""

    exit_code: int | None = None  # the exit code of the script; ``None`` if the doctor was attached in code
    seconds: float = 0.0  # the duration of the run
    own_seconds: float = 0.0  # the part of ``seconds`` that the doctor took
    asked_seconds: float = 0.0  # how long the questions took after it
    dropped: int = 0  # the number of lines left out because the record had reached its size limit
    thinned: int = 0  # how often the sampling interval was lengthened to limit the overhead
    # the text of the first error in the recorder itself, after which it recorded no more facts of that kind
    failure: str = ""
