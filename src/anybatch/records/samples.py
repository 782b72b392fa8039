"""What was measured in a run, on sampled steps: norms, activations, the data, memory."""

from dataclasses import dataclass

from anybatch.records.lines import Fact, fact

PERCENTILES = (5, 25, 50, 75, 95)


@fact("norms")
@dataclass(frozen=True, slots=True, kw_only=True)
class Norms(Fact):
    """Norms around one optimizer step; all tuples are parallel to ``parameters``.

    Args:
        optimizer: its number.
        number: which of its steps.
        parameters: by number: those of the optimizer, and those of known roots that are in no optimizer.
        grad: 2-norms of the gradients that the step used, ``None`` where there was none.
        weight: 2-norms before the step.
        update: 2-norms of the change.
        unchanged: share of (sampled) entries that are bitwise what they were, 1.0 for all.
        grad_zeros: share of (sampled) entries of the gradient that are exactly zero, ``None`` without gradient.
        max_grad: the largest absolute entry of all gradients, ``nan`` or ``inf`` if any is not finite.
        state_moved: whether the optimizer's own state (momentum, second moment) of the parameter changed or appeared;
            ``None`` for one without state.
        equal_grad_rows: parameters whose gradient is a matrix of equal rows, and is not zero, by number.
        since: parameters whose values changed since the last ``Norms`` although no step of any optimizer was between,
            or that no optimizer has and that changed, by number.
        silent: of those that changed outside of any step, the ones whose version counter did not grow (``.data``).
    """

    optimizer: int
    number: int = 0
    parameters: tuple[int, ...] = ()
    grad: tuple[float | None, ...] = ()
    weight: tuple[float, ...] = ()
    update: tuple[float, ...] = ()
    unchanged: tuple[float, ...] = ()
    grad_zeros: tuple[float | None, ...] = ()
    max_grad: float = 0.0
    state_moved: tuple[bool | None, ...] = ()
    equal_grad_rows: tuple[int, ...] = ()
    since: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSample:
    """The output of one module in one forward.

    Args:
        module: qualified within the root.
        cls: the name of its class.
        order: in which modules ended, from 0.
        shape: of its first tensor.
        input_shape: of its first input.
        dtype: of the output.
        mean: of all entries.
        std: of all entries.
        absmax: of all entries, ``nan`` or ``inf`` if any is not finite.
        zeros: share of entries that are exactly zero.
        dead: share of units (along dim 1 for maps, the last dim otherwise) that are zero for the whole batch.
        always_dead: share of units that were zero in all samples of this module so far, at least 3 of them.
        saturated: share of entries of a tanh or sigmoid within 1e-3 of a limit, or of rows of a softmax with one entry
            above 0.999; ``None`` for other modules.
        spread: mean over units of the standard deviation over the batch, divided by the mean absolute value; ``None``
            for a batch of one.
        finite_input: whether all its inputs were finite.
        training: its mode.
        input_by: the node of the graph that made its first input if that is no output of a module, such as
            ``"ReluBackward0"`` of ``F.relu``; empty otherwise. The entries below are ``None`` then too.
        input_zeros: share of entries of that input that are exactly zero.
        input_dead: share of its units that are zero for the whole batch.
        input_always_dead: share that was zero in all samples so far, at least 3 of them.
        input_saturated: share within 1e-3 of a limit, if it was made by a tanh or sigmoid.
        percentiles: of the entries, ``PERCENTILES``.
    """

    module: str
    cls: str
    order: int
    shape: tuple[int, ...] = ()
    input_shape: tuple[int, ...] = ()
    dtype: str = "float32"
    mean: float = 0.0
    std: float = 0.0
    absmax: float = 0.0
    zeros: float = 0.0
    dead: float = 0.0
    always_dead: float = 0.0
    saturated: float | None = None
    spread: float | None = None
    finite_input: bool = True
    training: bool = True
    input_by: str = ""
    input_zeros: float | None = None
    input_dead: float | None = None
    input_always_dead: float | None = None
    input_saturated: float | None = None
    percentiles: tuple[float, ...] = ()


@fact("activations")
@dataclass(frozen=True, slots=True, kw_only=True)
class Activations(Fact):
    """The outputs of the modules of a root in one forward with gradient.

    Args:
        root: its number.
        forward: the number (``at``) of the forward.
        modules: leaf modules, and the root itself as the last one, named ``""``, in the order in which they ended.
        uncalled: names of modules with parameters of their own that have not been called so far in the run.
        hidden: what the padding mask of the first ``nn.MultiheadAttention`` hides: the share of the positions that hold
            something, and of those at the end that hold one token or zeros; ``None`` where there is no such mask.
    """

    root: int
    forward: int = 0
    modules: tuple[ModuleSample, ...] = ()
    uncalled: tuple[str, ...] = ()
    hidden: tuple[float, float] | None = None


@fact("input")
@dataclass(frozen=True, slots=True, kw_only=True)
class InputSample(Fact):
    """One tensor that a root was called with.

    Args:
        root: its number.
        forward: the number (``at``) of the forward.
        name: of the argument, or its place such as ``"0"`` or ``"batch['x']"``.
        shape: of it.
        dtype: of it.
        requires_grad: whether it is a leaf that does.
        bytes: of it.
        mean: ``None`` for integers.
        std: of it.
        low: its smallest entry.
        high: its largest.
        finite: whether all entries are.
        hash: of the values: equal for equal tensors.
        alike: whether its rows along dim 0, evenly spaced ones of many, are all equal; ``None`` where there are not two
            of them, or they were not looked at.
        first: the class of the first leaf module that was called in the forward, such as ``"Linear"``.
    """

    root: int
    forward: int = 0
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    requires_grad: bool = False
    bytes: int = 0
    mean: float | None = None
    std: float | None = None
    low: float | None = None
    high: float | None = None
    finite: bool = True
    hash: str = ""
    alike: bool | None = None
    first: str = ""


@fact("nonfinite")
@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite(Fact):
    """The first number that is not finite, and where it came from.

    Args:
        where: ``"input"``, ``"parameter"``, ``"forward"`` (a module or the loss), ``"gradient"``.
        value: ``"nan"`` or ``"inf"``.
        module: whose output, parameter or gradient it is, qualified; empty outside.
        op: the node of the graph that made it, such as ``"LogBackward0"``; empty if unknown.
        detail: what went into it, in words: ``"its input has 3 zeros"``.
        parameters: names of parameters with it, some.
        loss: of the step, ``None`` if not finite.
        file: of the user's line that noticed it.
        line: its number.
        of_data: whether what made it was no result of the weights: the data, a divisor or a weighting made of them.
        made_in: the file of the lines below.
        made_at: the lines that can have called ``op``: where there are several, they all spell it.
        late: how many steps ago it came, where the gradients of that step were not looked at.
    """

    where: str
    value: str = "nan"
    module: str = ""
    op: str = ""
    detail: str = ""
    parameters: tuple[str, ...] = ()
    loss: float | None = None
    file: str = ""
    line: int = 0
    of_data: bool = False
    made_in: str = ""
    made_at: tuple[int, ...] = ()
    late: int = 0


@fact("buffers")
@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers(Fact):
    """Buffers of norm layers that changed since they were last looked at.

    Args:
        root: its number.
        moved: names of modules whose running statistics changed.
        frozen: of these, the ones whose own parameters are all frozen (``requires_grad`` False).
    """

    root: int
    moved: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()


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
    """Parameters, some of those there are, that changed before any optimizer had stepped: updates by hand.

    Args:
        parameters: by number.
    """

    parameters: tuple[int, ...] = ()


@fact("tied")
@dataclass(frozen=True, slots=True, kw_only=True)
class Tied(Fact):
    """Parameters of one shape and not constant that were bitwise equal when first seen, though they are two.

    Args:
        pairs: of numbers of parameters.
        differ: of these pairs, the ones that differ now.
    """

    pairs: tuple[tuple[int, int], ...] = ()
    differ: tuple[tuple[int, int], ...] = ()


@fact("watched")
@dataclass(frozen=True, slots=True, kw_only=True)
class Watched(Fact):
    """The output of a module that was asked for, and its gradient.

    Args:
        root: its number.
        module: qualified.
        output: norm.
        gradient: norm of it, ``None`` if none came.
    """

    root: int
    module: str
    output: float
    gradient: float | None = None
