"""Measurements of sampled steps: norms, activations, inputs, draws, memory."""

from dataclasses import dataclass

from anybatch.records.lines import Fact, Placed, fact

PERCENTILES = (5, 25, 50, 75, 95)


@fact("norms")
class Norms(Fact):
    """Norms around one optimizer step.

    ``grad``, ``weight``, ``update``, ``unchanged``, ``grad_zeros`` and ``state_moved`` are parallel to ``parameters``.
    """

    optimizer: int  # the number of the optimizer
    number: int = 0  # the index of this step among the optimizer's, from 0
    # numbers of the optimizer's parameters, and of those of known roots that are in no optimizer
    parameters: tuple[int, ...] = ()
    grad: tuple[float | None, ...] = ()  # 2-norms of the gradients that the step used; ``None`` without a gradient
    weight: tuple[float, ...] = ()  # 2-norms of the parameters before the step
    update: tuple[float, ...] = ()  # 2-norms of the updates
    unchanged: tuple[float, ...] = ()  # share of (sampled) entries that the step left bitwise equal
    # share of (sampled) entries of the gradient that are exactly zero; ``None`` without a gradient
    grad_zeros: tuple[float | None, ...] = ()
    # whether the optimizer's state of the parameter (momentum, second moment) appeared or changed; ``None`` without
    # state
    state_moved: tuple[bool | None, ...] = ()
    # numbers of parameters whose gradient is a nonzero matrix with equal rows
    equal_grad_rows: tuple[int, ...] = ()
    # numbers of parameters that changed since the last ``Norms`` without a step of any optimizer in between, or that
    # changed and are in no optimizer
    since: tuple[int, ...] = ()
    # those that changed outside of any step and whose version counter did not grow (a write to ``.data``)
    silent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSample:
    """The output of one module in one forward."""

    module: str  # its qualified name within the root
    cls: str  # the name of its class
    order: int  # its position in the order in which modules returned, from 0
    shape: tuple[int, ...] = ()  # the shape of the first tensor of the output
    input_shape: tuple[int, ...] = ()  # the shape of the first input
    dtype: str = "float32"  # the dtype of the output
    mean: float = 0.0  # the mean of all entries
    std: float = 0.0  # the standard deviation of all entries
    absmax: float = 0.0  # the largest absolute entry; ``nan`` or ``inf`` if any is not finite
    zeros: float = 0.0  # share of entries that are exactly zero
    dead: float = 0.0  # share of units (channels of maps, else along the last dim) that are zero for the whole batch
    always_dead: float = 0.0  # share of units that were zero in all samples of this module so far, at least 3 samples
    # share of entries of a tanh or sigmoid within 1e-3 of a limit, or of rows of a softmax with an entry above 0.999;
    # ``None`` for other modules
    saturated: float | None = None
    # the standard deviation over the batch, averaged over units and divided by the mean absolute value; ``None`` for a
    # batch of one
    spread: float | None = None
    training: bool = True  # its mode
    # the graph node that computed its first input, if that is not the output of a module, such as ``"ReluBackward0"``
    # of ``F.relu``; if it is empty, the other entries about the input are ``None``
    input_by: str = ""
    input_dead: float | None = None  # share of its units that are zero for the whole batch
    input_always_dead: float | None = None  # share that was zero in all samples so far, at least 3 samples
    percentiles: tuple[float, ...] = ()  # the percentiles of the entries at ``PERCENTILES``


@fact("activations")
class Activations(Fact):
    """The outputs of the modules of a root in one forward with autograd enabled."""

    root: int  # the number of the root
    forward: int = 0  # the number (``at``) of the forward
    # the leaf modules, and last the root itself, named ``""``, in the order in which they returned
    modules: tuple[ModuleSample, ...] = ()
    # names of modules with parameters of their own that have not been called so far in the run
    uncalled: tuple[str, ...] = ()


@fact("input")
class InputSample(Fact):
    """One input tensor of a root."""

    root: int  # the number of the root
    forward: int = 0  # the number (``at``) of the forward
    name: str = ""  # the name of the argument, or its path such as ``"0"`` or ``"batch['x']"``
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    requires_grad: bool = False  # whether it is a leaf that requires a gradient
    bytes: int = 0
    mean: float | None = None  # ``None`` for integers
    std: float | None = None
    low: float | None = None  # its smallest entry
    high: float | None = None  # its largest entry
    # of a table of large numbers the share of the columns whose standard deviation is below a tenth of that of all
    small_columns: float = 0.0
    finite: bool = True  # whether all entries are finite
    hash: str = ""  # a hash of the values: equal for equal tensors
    # whether its rows along dim 0 are all equal; of many rows, evenly spaced ones are compared; ``None`` if there are
    # not two, or they were not examined
    alike: bool | None = None
    first: str = ""  # the class of the first leaf module that was called in the forward, such as ``"Linear"``
    of: int = 0  # the rows of the tensor that it is a slice of along dim 0; 0 if it is none


@fact("nonfinite")
class NonFinite(Placed):
    """The first value that is not finite, its origin, and the line at which it was detected."""

    where: str  # ``"input"``, ``"parameter"``, ``"forward"`` (a module or the loss), ``"gradient"``
    value: str = "nan"  # ``"nan"`` or ``"inf"``
    module: str = ""  # the qualified name of the module whose output, parameter or gradient it is; empty outside
    op: str = ""  # the graph node that computed it, such as ``"LogBackward0"``; empty if unknown
    detail: str = ""  # the operands of ``op``, in words: ``"its input has 3 zeros"``
    parameters: tuple[str, ...] = ()  # some names of parameters that have it
    loss: float | None = None  # the loss of the step; ``None`` if not finite
    # whether its operand does not depend on the weights: the data, or a divisor or a weighting computed from them
    of_data: bool = False
    made_in: str = ""  # the file of the lines below
    made_at: tuple[int, ...] = ()  # the lines that may have called ``op``: all lines of the file that spell it
    late: int = 0  # how many steps earlier it appeared, if the gradients of that step were not examined


@fact("buffers")
class Buffers(Fact):
    """Running statistics of norm layers that changed since they were last examined."""

    root: int  # the number of the root
    moved: tuple[str, ...] = ()  # names of modules whose running statistics changed
    frozen: tuple[str, ...] = ()  # those whose own parameters are all frozen (``requires_grad=False``)


@fact("memory")
class Memory(Fact):
    """Live graphs and memory at a step."""

    graphs: int = 0  # the number of earlier steps whose graph is still alive
    # the number of those steps whose loss itself is alive; -1 if not counted. The graph of the others is kept alive by
    # an output or another result of the model
    losses: int = -1
    resident: int = 0  # the resident bytes of the process; 0 if unknown
    allocated: int = 0  # the allocated bytes on the device; 0 without one
    peak: int = 0  # the peak of the allocated bytes on the device so far


@fact("written")
class Written(Fact):
    """Some parameters changed before any optimizer stepped: they are updated by hand."""

    parameters: tuple[int, ...] = ()  # their numbers
    kept: tuple[
        int, ...
    ] = ()  # those that changed after two backwards in a row, and kept their gradients up to the next
    still: tuple[int, ...] = ()  # those that have a gradient in most of their entries, and have not changed


@fact("tied")
class Tied(Fact):
    """Pairs of distinct parameters, not constant, that were bitwise equal when first seen."""

    pairs: tuple[tuple[int, int], ...] = ()  # numbers of the two parameters
    differ: tuple[tuple[int, int], ...] = ()  # the pairs that differ now


@fact("drawn")
class Drawn(Placed):
    """A module's input was drawn with ``sample()``, which has no gradient, although ``rsample()`` exists."""

    root: int = -1  # the number of the module's root
    module: str = ""  # its qualified name in that root
    distribution: str = ""  # the name of the distribution's class
    width: int = 1  # the size of the last dim of the draw; 1 if it has no dims
    code: str = ""  # the text of that line


@fact("scored")
class Scored(Placed):
    """``log_prob`` gave a value with a gradient: once per class of distribution, width and whether crossed."""

    distribution: str = ""  # the name of the distribution's class
    width: int = 1  # the size of the last dim of the value; 1 if it has no dims
    # where the one is a column and the other a row of as many: the shapes of the value and of the distribution
    crossed: tuple[tuple[int, ...], ...] = ()
