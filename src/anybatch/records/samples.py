"""What was measured in a run, on sampled steps: norms, activations, the data, memory."""

from dataclasses import dataclass

from anybatch.records.lines import Fact, fact

PERCENTILES = (5, 25, 50, 75, 95)


@fact("norms")
@dataclass(frozen=True, slots=True, kw_only=True)
class Norms(Fact):
    """Norms around one optimizer step; all tuples are parallel to ``parameters``."""

    optimizer: int
    number: int = 0  # which of its steps
    # by number: those of the optimizer, and those of known roots that are in no optimizer
    parameters: tuple[int, ...] = ()
    grad: tuple[float | None, ...] = ()  # 2-norms of the gradients that the step used, ``None`` where there was none
    weight: tuple[float, ...] = ()  # 2-norms before the step
    update: tuple[float, ...] = ()  # 2-norms of the change
    unchanged: tuple[float, ...] = ()  # share of (sampled) entries that are bitwise what they were, 1.0 for all
    # share of (sampled) entries of the gradient that are exactly zero, ``None`` without gradient
    grad_zeros: tuple[float | None, ...] = ()
    max_grad: float = 0.0  # the largest absolute entry of all gradients, ``nan`` or ``inf`` if any is not finite
    # whether the optimizer's own state (momentum, second moment) of the parameter changed or appeared; ``None`` for one
    # without state
    state_moved: tuple[bool | None, ...] = ()
    # parameters whose gradient is a matrix of equal rows, and is not zero, by number
    equal_grad_rows: tuple[int, ...] = ()
    # parameters whose values changed since the last ``Norms`` although no step of any optimizer was between, or that no
    # optimizer has and that changed, by number
    since: tuple[int, ...] = ()
    # of those that changed outside of any step, the ones whose version counter did not grow (``.data``)
    silent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSample:
    """The output of one module in one forward."""

    module: str  # qualified within the root
    cls: str  # the name of its class
    order: int  # in which modules ended, from 0
    shape: tuple[int, ...] = ()  # of its first tensor
    input_shape: tuple[int, ...] = ()  # of its first input
    dtype: str = "float32"  # of the output
    mean: float = 0.0  # of all entries
    std: float = 0.0  # of all entries
    absmax: float = 0.0  # of all entries, ``nan`` or ``inf`` if any is not finite
    zeros: float = 0.0  # share of entries that are exactly zero
    dead: float = 0.0  # share of units (along dim 1 for maps, the last dim otherwise) that are zero for the whole batch
    always_dead: float = 0.0  # share of units that were zero in all samples of this module so far, at least 3 of them
    # share of entries of a tanh or sigmoid within 1e-3 of a limit, or of rows of a softmax with one entry above 0.999;
    # ``None`` for other modules
    saturated: float | None = None
    # mean over units of the standard deviation over the batch, divided by the mean absolute value; ``None`` for a batch
    # of one
    spread: float | None = None
    finite_input: bool = True  # whether all its inputs were finite
    training: bool = True  # its mode
    # the node of the graph that made its first input if that is no output of a module, such as ``"ReluBackward0"`` of
    # ``F.relu``; empty otherwise. The entries below are ``None`` then too.
    input_by: str = ""
    input_zeros: float | None = None  # share of entries of that input that are exactly zero
    input_dead: float | None = None  # share of its units that are zero for the whole batch
    input_always_dead: float | None = None  # share that was zero in all samples so far, at least 3 of them
    input_saturated: float | None = None  # share within 1e-3 of a limit, if it was made by a tanh or sigmoid
    percentiles: tuple[float, ...] = ()  # of the entries, ``PERCENTILES``


@fact("activations")
@dataclass(frozen=True, slots=True, kw_only=True)
class Activations(Fact):
    """The outputs of the modules of a root in one forward with gradient."""

    root: int
    forward: int = 0  # the number (``at``) of the forward
    # leaf modules, and the root itself as the last one, named ``""``, in the order in which they ended
    modules: tuple[ModuleSample, ...] = ()
    # names of modules with parameters of their own that have not been called so far in the run
    uncalled: tuple[str, ...] = ()
    # what the padding mask of the first ``nn.MultiheadAttention`` hides: the share of the positions that hold
    # something, and of those at the end that hold one token or zeros; ``None`` where there is no such mask
    hidden: tuple[float, float] | None = None


@fact("input")
@dataclass(frozen=True, slots=True, kw_only=True)
class InputSample(Fact):
    """One tensor that a root was called with."""

    root: int
    forward: int = 0  # the number (``at``) of the forward
    name: str = ""  # of the argument, or its place such as ``"0"`` or ``"batch['x']"``
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    requires_grad: bool = False  # whether it is a leaf that does
    bytes: int = 0
    mean: float | None = None  # ``None`` for integers
    std: float | None = None
    low: float | None = None  # its smallest entry
    high: float | None = None  # its largest
    finite: bool = True  # whether all entries are
    hash: str = ""  # of the values: equal for equal tensors
    # whether its rows along dim 0, evenly spaced ones of many, are all equal; ``None`` where there are not two of them,
    # or they were not looked at
    alike: bool | None = None
    first: str = ""  # the class of the first leaf module that was called in the forward, such as ``"Linear"``


@fact("nonfinite")
@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite(Fact):
    """The first number that is not finite, and where it came from."""

    where: str  # ``"input"``, ``"parameter"``, ``"forward"`` (a module or the loss), ``"gradient"``
    value: str = "nan"  # ``"nan"`` or ``"inf"``
    module: str = ""  # whose output, parameter or gradient it is, qualified; empty outside
    op: str = ""  # the node of the graph that made it, such as ``"LogBackward0"``; empty if unknown
    detail: str = ""  # what went into it, in words: ``"its input has 3 zeros"``
    parameters: tuple[str, ...] = ()  # names of parameters with it, some
    loss: float | None = None  # of the step, ``None`` if not finite
    file: str = ""  # of the user's line that noticed it
    line: int = 0
    # whether what made it was no result of the weights: the data, a divisor or a weighting made of them
    of_data: bool = False
    made_in: str = ""  # the file of the lines below
    made_at: tuple[int, ...] = ()  # the lines that can have called ``op``: where there are several, they all spell it
    late: int = 0  # how many steps ago it came, where the gradients of that step were not looked at


@fact("buffers")
@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers(Fact):
    """Buffers of norm layers that changed since they were last looked at."""

    root: int
    moved: tuple[str, ...] = ()  # names of modules whose running statistics changed
    frozen: tuple[str, ...] = ()  # of these, the ones whose own parameters are all frozen (``requires_grad`` False)


@fact("memory")
@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Fact):
    """What is alive at a step.

    Args:
        graphs: earlier steps whose graph is still alive.
        losses: of these, the ones whose loss itself is alive; -1 where that was not counted. The others have an output
            or something else that was made of the model.
        resident: bytes of the process in memory, 0 if unknown.
        allocated: bytes on the device, 0 without one.
        peak: of the device so far.
    """

    graphs: int = 0
    losses: int = -1
    resident: int = 0
    allocated: int = 0
    peak: int = 0


@fact("written")
@dataclass(frozen=True, slots=True, kw_only=True)
class Written(Fact):
    """Parameters, some of those there are, that changed before any optimizer had stepped: updates by hand."""

    parameters: tuple[int, ...] = ()  # by number


@fact("tied")
@dataclass(frozen=True, slots=True, kw_only=True)
class Tied(Fact):
    """Parameters of one shape and not constant that were bitwise equal when first seen, though they are two."""

    pairs: tuple[tuple[int, int], ...] = ()  # of numbers of parameters
    differ: tuple[tuple[int, int], ...] = ()  # of these pairs, the ones that differ now


@fact("watched")
@dataclass(frozen=True, slots=True, kw_only=True)
class Watched(Fact):
    """The output of a module that was asked for, and its gradient."""

    root: int
    module: str  # qualified
    output: float  # norm
    gradient: float | None = None  # norm of it, ``None`` if none came
