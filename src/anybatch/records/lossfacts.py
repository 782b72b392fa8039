"""What was seen of losses and their graphs, on sampled steps and by probes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anybatch.records.lines import Fact, fact


@fact("walk")
@dataclass(frozen=True, slots=True, kw_only=True)
class Walk(Fact):
    """The graph of a loss, gone through before its backward.

    Args:
        nodes: how many; the walk ends at a limit, see ``cut_short``.
        cut_short: whether the limit was reached.
        reached: parameters that the loss reaches, by number.
        outside: leaves it reaches that no root has registered, by number; inputs have ``is_input``.
        constant_terms: how many summands of the loss have no graph, plain numbers and tensors alike.
        constant_values: of these summands where they are known to be tensors.
        softmaxes: for each softmax or log-softmax: its dim (not negative), the number of dims, the size of that dim,
            and whether dim 0 has as many rows as the batch.
        doubled: pairs of names such as ``("softmax", "cross_entropy")`` or ``("sigmoid",
            "binary_cross_entropy_with_logits")``: the first feeds the second directly; ``("log_softmax",
            "cross_entropy")`` is harmless.
        previous: names of parameters or descriptions of tensors in the graph that belong to an earlier step: the
            graph goes on behind a node that an earlier backward had gone through.
        again: how many of its nodes an earlier backward of this step had gone through.
        hidden: how many reentrant checkpoints hide a part of it.
        bytes: that the graph keeps, 0 if unknown.
        kinds: counts of the most frequent kinds of nodes.
        forced: whether the loss had ``requires_grad`` set by hand: it is a leaf and was computed from outputs.
        terms: for each summand of the loss, through factors and signs, the parameters that it reaches, by number; only
            where there are 2 to 8 of them.
        advantages: for each product of tensors with several entries, outside of modules, both sides of which carry a
            gradient and reach other parameters, and one side of which is a difference with a constant, through signs,
            quotients and shapes: the parameters that this side reaches.
        spread: the shape, ``(N, 1)`` or ``(N,)`` for a batch of N rows, of what is subtracted from or multiplied with a
            constant so that the result is ``(N, N)``, with nothing but operations entry by entry, means and sums
            between that and the loss; empty if there is none.
        linear: pairs of layers of which one feeds the other, the last ones first, where nothing bends from the input to
            the last layer (no activation, no norm of a sample, no product of two results) and each weight is used once:
            how many features go in, lie between them (0 if they are ordered in another way), and go out.
        activated: pairs of names such as ``("relu", "mse_loss")``: an activation, and a loss function between numbers
            that it feeds directly.
    """

    nodes: int = 0
    cut_short: bool = False
    reached: tuple[int, ...] = ()
    outside: tuple[int, ...] = ()
    constant_terms: int = 0
    constant_values: tuple[float, ...] = ()
    softmaxes: tuple[tuple[int, int, int, bool], ...] = ()
    doubled: tuple[tuple[str, str], ...] = ()
    previous: tuple[str, ...] = ()
    again: int = 0
    hidden: int = 0
    bytes: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    forced: bool = False
    terms: tuple[tuple[int, ...], ...] = ()
    advantages: tuple[tuple[int, ...], ...] = ()
    spread: tuple[int, ...] = ()
    linear: tuple[tuple[int, int, int], ...] = ()
    activated: tuple[tuple[str, str], ...] = ()


@fact("followed")
@dataclass(frozen=True, slots=True, kw_only=True)
class Followed(Fact):
    """One iteration that was followed operation by operation because something in the graph was missing.

    Args:
        why: ``"no gradient"``, ``"constant term"``, ``"loss without graph"``.
        paths: ``anybatch.records.paths.Paths`` as a mapping; read it with ``Paths.from_dict``.
        unused: names of parameters whose module was not called in it.
    """

    why: str
    paths: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


@fact("loss")
@dataclass(frozen=True, slots=True, kw_only=True)
class LossCall(Fact):
    """A loss function of torch was called with autograd on; what needs the values is there on sampled steps only.

    Args:
        function: such as ``"cross_entropy"`` or ``"mse_loss"``.
        input_shape: of the predictions.
        target_shape: of the targets.
        target_dtype: of the targets.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        weighted: whether class or sample weights were given.
        ignore_index: of the classes.
        items: over how many targets the mean is: rows, pixels or tokens, without ignored ones; -1 if not counted.
        ignored: how many targets are ``ignore_index``; -1 if not counted.
        classes: the size of the class dimension, 0 where there is none.
        target_classes: how many different targets there were, up to 1000; -1 if not counted or not of classes.
        target_requires_grad: whether a gradient flows into the targets, and they are no leaf.
        target_top: of targets with a gradient: the kinds of the first nodes of their graph, at most 6, each the first
            that carries a gradient below the one before, such as ``("AddBackward0", "MulBackward0")``.
        value: of the loss, ``None`` if not read.
        guess: what it would be for the best prediction that is the same for every input, as the targets of the calls
            so far tell it; ``None`` if not read or not known.
        low: the smallest entry of the predictions, ``None`` if not read.
        high: the largest one.
        normalised: whether the predictions are probabilities: not negative and of sum 1 over the classes; or for
            sigmoid losses: all within 0 and 1; ``None`` if not looked at.
        log_normalised: whether they are log-probabilities.
        target_mean: of targets that are numbers.
        target_std: of them.
        target_low: the smallest target that is a number and no class.
        target_high: the largest one.
        shift: by how many places along the last dim the targets are ahead of the integer input of the root: 0 for the
            same tokens, 1 for the next token, 2 for the one after it; counting that the predictions were cut by as
            many places; ``None`` if it matches no shift or was not looked at.
        module: the innermost module that ran, empty outside.
        root: that was running or ran last, -1 for none.
        file: of the user's line.
        line: its number.
    """

    function: str
    input_shape: tuple[int, ...] = ()
    target_shape: tuple[int, ...] = ()
    target_dtype: str = ""
    reduction: str = "mean"
    weighted: bool = False
    ignore_index: int = -100
    items: int = -1
    ignored: int = -1
    classes: int = 0
    target_classes: int = -1
    target_requires_grad: bool = False
    target_top: tuple[str, ...] = ()
    value: float | None = None
    guess: float | None = None
    low: float | None = None
    high: float | None = None
    normalised: bool | None = None
    log_normalised: bool | None = None
    target_mean: float | None = None
    target_std: float | None = None
    target_low: float | None = None
    target_high: float | None = None
    shift: int | None = None
    module: str = ""
    root: int = -1
    file: str = ""
    line: int = 0


@fact("probed")
@dataclass(frozen=True, slots=True, kw_only=True)
class Probed(Fact):
    """What one question to a copy of a root gave, after the script had ended.

    Args:
        probe: ``"batch"`` (do samples of a batch mix?), ``"time"`` (does an output depend on later inputs?),
            ``"input"`` (does the output depend on the input at all?), ``"modes"`` (do two evaluations differ?), or one
            of the active ones: ``"prior"``, ``"one batch"``, ``"zeroed input"``, ``"learning rate"``, ``"mode"``.
        root: its number.
        answer: ``"yes"``, ``"no"`` or ``"unknown"``.
        module: the innermost module that does it, qualified; empty if not found.
        evidence: numbers.
        detail: in words; why it is unknown.
        file: of a line where it happens.
        line: its number.
    """

    probe: str
    root: int = 0
    answer: str = "unknown"
    module: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    detail: str = ""
    file: str = ""
    line: int = 0


@fact("replicas")
@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas(Fact):
    """How a model is spread over processes.

    Args:
        world: number of processes.
        wrapper: ``"DistributedDataParallel"``, ``"FSDP"`` or empty.
        bypassed: names of roots that are the inside of a wrapper and were called instead of it, in training.
        differ: names of parameters whose values differ between processes, some.
    """

    world: int = 1
    wrapper: str = ""
    bypassed: tuple[str, ...] = ()
    differ: tuple[str, ...] = ()


@fact("evaluated")
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Fact):
    """Losses without a gradient while a model was in evaluation, between two steps of its training.

    Args:
        function: such as ``"cross_entropy"``.
        value: of them, on average.
        calls: how many there were.
        file: of the user's line.
        line: its number.
    """

    function: str
    value: float = 0.0
    calls: int = 1
    file: str = ""
    line: int = 0
