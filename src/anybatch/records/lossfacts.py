"""What was seen of losses and their graphs, on sampled steps and by probes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anybatch.records.lines import Fact, fact


@fact("walk")
@dataclass(frozen=True, slots=True, kw_only=True)
class Walk(Fact):
    """The graph of a loss, gone through before its backward."""

    nodes: int = 0  # how many; the walk ends at a limit, see ``cut_short``
    cut_short: bool = False  # whether the limit was reached
    reached: tuple[int, ...] = ()  # parameters that the loss reaches, by number
    outside: tuple[int, ...] = ()  # leaves it reaches that no root has registered, by number; inputs have ``is_input``
    constant_terms: int = 0  # how many summands of the loss have no graph, plain numbers and tensors alike
    constant_values: tuple[float, ...] = ()  # of these summands where they are known to be tensors
    # for each softmax or log-softmax: its dim (not negative), the number of dims, the size of that dim, and whether dim
    # 0 has as many rows as the batch
    softmaxes: tuple[tuple[int, int, int, bool], ...] = ()
    # pairs of names such as ``("softmax", "cross_entropy")`` or ``("sigmoid", "binary_cross_entropy_with_logits")``:
    # the first feeds the second directly; ``("log_softmax", "cross_entropy")`` is harmless
    doubled: tuple[tuple[str, str], ...] = ()
    # names of parameters or descriptions of tensors in the graph that belong to an earlier step: the graph goes on
    # behind a node that an earlier backward had gone through
    previous: tuple[str, ...] = ()
    again: int = 0  # how many of its nodes an earlier backward of this step had gone through
    hidden: int = 0  # how many reentrant checkpoints hide a part of it
    bytes: int = 0  # that the graph keeps, 0 if unknown
    kinds: Mapping[str, int] = field(default_factory=dict)  # counts of the most frequent kinds of nodes
    # whether the loss had ``requires_grad`` set by hand: it is a leaf and was computed from outputs
    forced: bool = False
    # for each summand of the loss, through factors and signs, the parameters that it reaches, by number; only where
    # there are 2 to 8 of them
    terms: tuple[tuple[int, ...], ...] = ()
    # for each product of tensors with several entries, outside of modules, both sides of which carry a gradient and
    # reach other parameters, and one side of which is a difference with a constant, through signs, quotients and
    # shapes: the parameters that this side reaches
    advantages: tuple[tuple[int, ...], ...] = ()
    # the shape, ``(N, 1)`` or ``(N,)`` for a batch of N rows, of what is subtracted from or multiplied with a constant
    # so that the result is ``(N, N)``, with nothing but operations entry by entry, means and sums between that and the
    # loss; empty if there is none
    spread: tuple[int, ...] = ()
    # pairs of layers of which one feeds the other, the last ones first, where nothing bends from the input to the last
    # layer (no activation, no norm of a sample, no product of two results) and each weight is used once: how many
    # features go in, lie between them (0 if they are ordered in another way), and go out
    linear: tuple[tuple[int, int, int], ...] = ()
    # pairs of names such as ``("relu", "mse_loss")``: an activation, and a loss function between numbers that it feeds
    # directly
    activated: tuple[tuple[str, str], ...] = ()


@fact("followed")
@dataclass(frozen=True, slots=True, kw_only=True)
class Followed(Fact):
    """One iteration that was followed operation by operation because something in the graph was missing."""

    why: str  # ``"no gradient"``, ``"constant term"``, ``"loss without graph"``
    # ``anybatch.records.paths.Paths`` as a mapping; read it with ``Paths.from_dict``
    paths: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # names of parameters whose module was not called in it


@fact("loss")
@dataclass(frozen=True, slots=True, kw_only=True)
class LossCall(Fact):
    """A loss function of torch was called with autograd on; what needs the values is there on sampled steps only."""

    function: str  # such as ``"cross_entropy"`` or ``"mse_loss"``
    input_shape: tuple[int, ...] = ()  # of the predictions
    target_shape: tuple[int, ...] = ()  # of the targets
    target_dtype: str = ""  # of the targets
    reduction: str = "mean"  # ``"mean"``, ``"sum"`` or ``"none"``
    weighted: bool = False  # whether class or sample weights were given
    ignore_index: int = -100  # of the classes
    # over how many targets the mean is: rows, pixels or tokens, without ignored ones; -1 if not counted
    items: int = -1
    ignored: int = -1  # how many targets are ``ignore_index``; -1 if not counted
    classes: int = 0  # the size of the class dimension, 0 where there is none
    target_classes: int = -1  # how many different targets there were, up to 1000; -1 if not counted or not of classes
    target_requires_grad: bool = False  # whether a gradient flows into the targets, and they are no leaf
    # of targets with a gradient: the kinds of the first nodes of their graph, at most 6, each the first that carries a
    # gradient below the one before, such as ``("AddBackward0", "MulBackward0")``
    target_top: tuple[str, ...] = ()
    value: float | None = None  # of the loss, ``None`` if not read
    # what it would be for the best prediction that is the same for every input, as the targets of the calls so far tell
    # it; ``None`` if not read or not known
    guess: float | None = None
    low: float | None = None  # the smallest entry of the predictions, ``None`` if not read
    high: float | None = None  # the largest one
    # whether the predictions are probabilities: not negative and of sum 1 over the classes; or for sigmoid losses: all
    # within 0 and 1; ``None`` if not looked at
    normalised: bool | None = None
    log_normalised: bool | None = None  # whether they are log-probabilities
    target_mean: float | None = None  # of targets that are numbers
    target_std: float | None = None
    target_low: float | None = None  # the smallest target that is a number and no class
    target_high: float | None = None  # the largest one
    # by how many places along the last dim the targets are ahead of the integer input of the root: 0 for the same
    # tokens, 1 for the next token, 2 for the one after it; counting that the predictions were cut by as many places;
    # ``None`` if it matches no shift or was not looked at
    shift: int | None = None
    shifted: int = 0  # which of the matrices of integers that the root was given, from 0
    module: str = ""  # the innermost module that ran, empty outside
    root: int = -1  # that was running or ran last, -1 for none
    file: str = ""  # of the user's line
    line: int = 0


@fact("probed")
@dataclass(frozen=True, slots=True, kw_only=True)
class Probed(Fact):
    """What one question to a copy of a root gave, after the script had ended."""

    # ``"batch"`` (do samples of a batch mix?), ``"time"`` (does an output depend on later inputs?), ``"input"`` (does
    # the output depend on the input at all?), ``"modes"`` (do two evaluations differ?), or one of the active ones:
    # ``"prior"``, ``"one batch"``, ``"zeroed input"``
    probe: str
    root: int = 0
    answer: str = "unknown"  # ``"yes"``, ``"no"`` or ``"unknown"``
    module: str = ""  # the innermost module that does it, qualified; empty if not found
    evidence: Mapping[str, Any] = field(default_factory=dict)  # numbers
    detail: str = ""  # in words; why it is unknown
    file: str = ""  # of a line where it happens
    line: int = 0


@fact("replicas")
@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas(Fact):
    """How a model is spread over processes."""

    world: int = 1  # number of processes
    wrapper: str = ""  # ``"DistributedDataParallel"``, ``"FSDP"`` or empty
    # names of roots that are the inside of a wrapper and were called instead of it, in training
    bypassed: tuple[str, ...] = ()
    differ: tuple[str, ...] = ()  # names of parameters whose values differ between processes, some


@fact("evaluated")
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Fact):
    """Losses without a gradient while a model was in evaluation, between two steps of its training."""

    function: str  # such as ``"cross_entropy"``
    value: float = 0.0  # of them, on average
    calls: int = 1  # how many there were
    file: str = ""  # of the user's line
    line: int = 0
