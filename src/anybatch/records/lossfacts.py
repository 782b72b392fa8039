"""Facts about losses and their autograd graphs, from sampled steps and from probes."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from anybatch.records.lines import Fact, Placed, fact


@fact("walk")
class Walk(Fact):
    """A traversal of the graph of a loss, before its backward."""

    nodes: int = 0  # the number of nodes visited; the traversal ends at a limit, see ``cut_short``
    cut_short: bool = False  # whether the limit was reached
    reached: tuple[int, ...] = ()  # numbers of the parameters that the loss reaches
    outside: tuple[int, ...] = ()  # numbers of reached leaves that no root has registered
    constant_terms: int = 0  # the number of summands of the loss without a graph, plain numbers included
    # for each softmax or log-softmax: its dim (not negative), the number of dims, the size of that dim, and whether dim
    # 0 has as many rows as the batch
    softmaxes: tuple[tuple[int, int, int, bool], ...] = ()
    # pairs of names such as ``("softmax", "cross_entropy")`` or ``("sigmoid", "binary_cross_entropy_with_logits")``:
    # the first feeds the second directly; ``("log_softmax", "cross_entropy")`` is harmless
    doubled: tuple[tuple[str, str], ...] = ()
    # names of parameters, or descriptions of tensors, in the part of the graph that belongs to an earlier step: it lies
    # below a node that an earlier backward has already used
    previous: tuple[str, ...] = ()
    again: int = 0  # the number of nodes that an earlier backward of this step has used
    hidden: int = 0  # the number of reentrant checkpoints, which hide a part of the graph
    kinds: Mapping[str, int] = field(default_factory=dict)  # counts of the most frequent kinds of nodes
    # whether ``requires_grad`` of the loss was set by hand: it is a leaf although it was computed from outputs
    forced: bool = False
    # for each summand of the loss (factors and signs ignored), the numbers of the parameters that it reaches; only if
    # the loss has 2 to 8 summands
    terms: tuple[tuple[int, ...], ...] = ()
    # Products, outside of modules, of two tensors with several entries that both carry a gradient and reach different
    # parameters, where one factor is a difference with a constant (signs, quotients and reshapes ignored), as an
    # advantage is. For each: the numbers of the parameters that this factor reaches.
    advantages: tuple[tuple[int, ...], ...] = ()
    # An accidental broadcast: a tensor of shape ``(N, 1)`` or ``(N,)``, N the rows of the batch, is subtracted from or
    # multiplied with a constant to give ``(N, N)``, and only elementwise operations, means and sums follow up to the
    # loss. Or values are scored by as many distributions each, and no more than the mean or sum of all scores is taken.
    # The shape of that tensor, or of the distributions; empty if there is none.
    spread: tuple[int, ...] = ()
    # pairs of names such as ``("relu", "mse_loss")``: an activation, and the regression loss that it feeds directly
    activated: tuple[tuple[str, str], ...] = ()


@fact("followed")
class Followed(Fact):
    """One iteration was traced operation by operation because something was missing in the graph."""

    why: str  # ``"no gradient"``, ``"constant term"``, ``"loss without graph"``
    # ``anybatch.records.paths.Paths`` as a mapping; read it with ``Paths.from_dict``
    paths: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # names of parameters whose module was not called in it


@fact("loss")
class LossCall(Placed):
    """A loss function of torch was called with autograd enabled; on sampled steps its values were examined too."""

    function: str  # such as ``"cross_entropy"`` or ``"mse_loss"``
    input_shape: tuple[int, ...] = ()  # the shape of the predictions
    target_shape: tuple[int, ...] = ()  # the shape of the targets
    reduction: str = "mean"  # ``"mean"``, ``"sum"`` or ``"none"``
    weighted: bool = False  # whether class or sample weights were given
    ignore_index: int = -100  # ``ignore_index`` of the call
    # the number of targets (rows, pixels or tokens) that the mean is over, without ignored ones; -1 if not counted
    items: int = -1
    ignored: int = -1  # the number of targets equal to ``ignore_index``; -1 if not counted
    classes: int = 0  # the size of the class dimension; 0 if there is none
    target_classes: int = -1  # the number of different target classes, up to 1000; -1 if not counted or no classes
    target_requires_grad: bool = False  # whether the targets require a gradient and are not a leaf
    # for targets with a gradient: the first nodes of their graph, from the target down, at most 6, such as
    # ``("AddBackward0", "MulBackward0")``; of several inputs, the first with a gradient is followed
    target_top: tuple[str, ...] = ()
    value: float | None = None  # the value of the loss; ``None`` if not read
    # the loss of the best constant prediction, estimated from the targets of all calls so far; ``None`` if unknown
    guess: float | None = None
    # classes of which no target was so far, where all others are about as frequent as each other; else empty
    absent: tuple[int, ...] = ()
    low: float | None = None  # the smallest entry of the predictions; ``None`` if not read
    high: float | None = None  # the largest entry
    # whether the predictions are probabilities: not negative with sum 1 over the classes, or for sigmoid losses all
    # within 0 and 1; ``None`` if not examined
    normalised: bool | None = None
    log_normalised: bool | None = None  # whether they are log-probabilities
    target_mean: float | None = None  # the mean of targets that are not classes
    target_std: float | None = None  # their standard deviation
    target_low: float | None = None  # the smallest target
    target_high: float | None = None  # the largest target
    # of kl_div, whether the targets are probabilities, not negative with sum 1 in each row; ``None`` if not examined
    target_normalised: bool | None = None
    # how many places along the last dim the targets are ahead of the integer input of the root: 0 for the same tokens,
    # 1 for the next token, 2 for the one after it; a shift of the predictions is taken into account; ``None`` if no
    # shift matches or it was not examined
    shift: int | None = None
    shifted: int = 0  # the index of that input among the integer matrices that the root was given
    start: int = 0  # the place of its first token that has a target; a prompt has none
    time_first: bool = False  # whether its places are along dim 0
    module: str = ""  # the innermost module that ran; empty outside of modules
    root: int = -1  # the number of the root that was running or ran last; -1 for none


ALL_ASKED = "the questions"
"""Not examined, where not all were asked; the probe of a record that says how they ended."""


@fact("probed")
class Probed(Placed):
    """The result of one probe, an experiment on a copy of a root after the script has ended."""

    # ``"batch"`` (do samples of a batch mix?), ``"time"`` (does an output depend on later inputs?), ``"input"`` (does
    # the output depend on the input at all?), ``"modes"`` (do two evaluations differ?), or one of the probes that
    # train: ``"prior"``, ``"one batch"``
    probe: str
    root: int = 0  # the number of the root
    answer: str = "unknown"  # ``"yes"``, ``"no"`` or ``"unknown"``
    module: str = ""  # the qualified name of the innermost module that does it; empty if not found
    evidence: Mapping[str, Any] = field(default_factory=dict)  # numbers by name
    detail: str = ""  # the result in words, or why it is unknown

    def __post_init__(self) -> None:
        """Makes numbers of what JSON has as texts, since it has no NaN and no infinity."""
        found = {name: float(one) if one in ("nan", "inf", "-inf") else one for name, one in self.evidence.items()}
        object.__setattr__(self, "evidence", found)


@fact("replicas")
class Replicas(Fact):
    """How a model is distributed over processes."""

    world: int = 1  # the number of processes
    wrapper: str = ""  # ``"DistributedDataParallel"``, ``"FSDP"`` or empty
    # names of roots that were called in training instead of the wrapper around them
    bypassed: tuple[str, ...] = ()
    differ: tuple[str, ...] = ()  # some names of parameters whose values differ between processes


@fact("evaluated")
class Evaluated(Placed):
    """Losses without a gradient from a model in evaluation mode, between two steps of its training."""

    function: str  # such as ``"cross_entropy"``
    value: float = 0.0  # the mean of these losses
    calls: int = 1  # the number of them
    # of the first evaluations: the loss of the best constant guess for their targets; ``None`` if unknown
    guess: float | None = None
    items: int = 0  # the number of targets that this guess is for
    better: bool = False  # whether more classes are right than by always saying the most frequent one, by no chance
    rows: int = 0  # of scores of classes, of which is known what they say; the following is 0 without
    right: float = 0.0  # the share in which the class of the target has the highest score
    # the share in which the class has it that has it in most rows of this target, if no two targets share one
    renamed: float = 0.0
    shapes: tuple[tuple[int, ...], ...] = ()  # of predictions and targets in the first call; none for classes
    # of the first call of a regression: mean and standard deviation of the predictions, and those of the targets
    scales: tuple[float, ...] = ()
    names: tuple[tuple[int, int], ...] = ()  # some targets, and the class that has it in most of their rows


@fact("printed")
class Printed(Placed):
    """Numbers that one line of the script printed in the course of the run: at most 65, the last one among them."""

    label: str  # the words before the number, such as ``"test accuracy"``
    steps: tuple[int, ...] = ()  # the number of optimizer steps before each
    values: tuple[float, ...] = ()  # percentages as shares
