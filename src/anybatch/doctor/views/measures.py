"""What the rules on numbers have in common: update ratios, the course of the loss, names."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from anybatch.doctor.views.courses import groups_of
from anybatch.records.lossfacts import Followed
from anybatch.records.paths import Paths
from anybatch.records.runs import Run, grouped, remembered
from anybatch.records.samples import Activations, InputSample, ModuleSample, Norms
from anybatch.records.tables import ParameterFacts

T = TypeVar("T")

SMALL_WEIGHT = 1e-3
"""A tensor whose root mean square is below this was made of zeros; a change of it says nothing about its step."""

HEALTHY_RATIO = 1e-3
"""The usual length of a step, as a share of the weights (A. Karpathy, A Recipe for Training Neural Networks, 2019)."""

FAR_TOO_LONG = 0.1
"""A step, as a share of the weights, that throws a model out of where it can learn."""

BEGAN_SMALL = 0.1
"""Weights that begin below this share of their usual size were made of zeros, or of next to nothing, on purpose."""

NO_SPREAD = 1e-6
"""Outputs that differ less than this over a batch, as a share of their size, are the same in float32."""

COPIES = frozenset({"deepcopy", "state_dict"})
"""What makes other parameters with the same values."""

SQUASHING = {"Sigmoid", "Tanh", "Softsign", "Hardsigmoid", "Hardtanh", "LogSigmoid"}
"""Activations that are flat at both ends, or at one that is not zero."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one sample says of one parameter; its gradient is there and it is in the optimizer."""

    parameter: ParameterFacts
    grad: float
    weight: float
    update: float
    unchanged: float
    grad_zeros: float
    state_moved: bool | None

    @property
    def is_matrix(self) -> bool:
        """Whether a change of it can be compared with it: two dims, and not made of zeros."""
        return len(self.parameter.shape) >= 2 and self.weight > SMALL_WEIGHT * math.sqrt(self.parameter.numel)

    @property
    def ratio(self) -> float:
        """The length of the update as a share of the weights."""
        return self.update / self.weight if self.weight > 0 else math.inf


def entries(run: Run, norms: Norms) -> Iterator[Entry]:
    """What a sample says of the parameters that its optimizer steps."""
    mine = set(groups_of(run, norms.optimizer))
    for position, number in enumerate(norms.parameters):
        grad = at(norms.grad, position, None)
        if number in mine and number in run.parameters and grad is not None:
            zeros = at(norms.grad_zeros, position, 0.0)
            yield Entry(
                parameter=run.parameters[number],
                grad=grad,
                weight=at(norms.weight, position, 0.0),
                update=at(norms.update, position, 0.0),
                unchanged=at(norms.unchanged, position, 0.0),
                grad_zeros=0.0 if zeros is None else zeros,
                state_moved=at(norms.state_moved, position, None),
            )


def gradients(norms: Norms) -> dict[int, float]:
    """The norms of the gradients that there were, by the numbers of their parameters."""
    pairs = zip(norms.parameters, norms.grad, strict=False)
    return {number: grad for number, grad in pairs if grad is not None}


def at(values: Sequence[T], position: int, default: T) -> T:
    """An entry of a column, which may be shorter than others."""
    return values[position] if position < len(values) else default


def ratio(run: Run, norms: Norms) -> float | None:
    """The median over matrices of the length of the update as a share of the weights.

    It is ``inf`` if any is not finite, ``None`` if there is no matrix with a gradient.
    """
    known = _ratios(run)
    if id(norms) not in known:
        found = [one.ratio for one in entries(run, norms) if one.is_matrix]
        value = median(found) if found else None
        known[id(norms)] = norms, math.inf if any(not math.isfinite(one) for one in found) else value
    return known[id(norms)][1]


@remembered
def _ratios(run: Run) -> dict[int, tuple[Norms, float | None]]:
    """By the ``id`` of a sample, which several rules ask for: that sample, so that it lives on, and its ratio."""
    return {}


def grown_ratio(run: Run, norms: Norms) -> float:
    """The same without those that begin at or near zero, as adapters do: any step is long beside them.

    The usual size of a weight is that of torch's layers: a root mean square of ``1 / sqrt(3 * inputs)``. It is 0 where
    all begin so.
    """
    first: dict[int, float] = {}
    for sample in run.of(Norms):
        for number, weight in zip(sample.parameters, sample.weight, strict=False):
            first.setdefault(number, weight)
    found = []
    for one in entries(run, norms):
        inputs = one.parameter.numel / one.parameter.shape[0] if one.is_matrix else 1.0
        usual = math.sqrt(one.parameter.numel / (3 * inputs))
        if one.is_matrix and first[one.parameter.parameter] >= BEGAN_SMALL * usual:
            found.append(one.ratio)
    return median(found) if found else 0.0


def latest(run: Run) -> Iterable[tuple[int, list[Activations]]]:
    """For each root its samples of activations, in order."""
    return grouped((one.root, one) for one in run.of(Activations)).items()


def outputs(samples: Iterable[Activations]) -> list[tuple[Activations, ModuleSample]]:
    """The output of the root in each sample."""
    return [(one, one.modules[-1]) for one in samples if one.modules and one.modules[-1].module == ""]


def told_apart(run: Run, samples: Iterable[Activations]) -> list[tuple[Activations, ModuleSample]]:
    """The outputs of the root where its samples were not given to it all alike, as the first symbol of sequences is."""
    given = grouped((one.forward, one) for one in run.of(InputSample))
    return [(one, output) for one, output in outputs(samples) if not _all_alike(given.get(one.forward, []), output)]


def _all_alike(given: Iterable[InputSample], output: ModuleSample) -> bool:
    looked = [one for one in given if one.alike is not None and one.shape[:1] == output.shape[:1]]
    return bool(looked) and all(one.alike for one in looked)


@dataclass(frozen=True, slots=True)
class Constant:
    """Outputs that are the same for all inputs of a batch."""

    at: int  # the event at which that was certain
    step: int  # since which it is so
    module: str  # the first behind which the rows are equal
    first: float  # the spread in the first sample, as a share of the size of the outputs
    last: float  # in the last one


def constant_since(run: Run, root: int) -> Constant | None:
    """From which sample on all inputs give one output."""
    samples = next((taken for number, taken in latest(run) if number == root), [])
    apart = told_apart(run, samples)
    last = [(one, output) for one, output in apart if output.spread is not None and output.absmax > 0]
    tail = 0
    while tail < len(last) and (last[-1 - tail][1].spread or 0.0) < NO_SPREAD:
        tail += 1
    inputs = {one.hash for one in run.of(InputSample) if one.root == root and one.hash}
    stds = [one.std for one in run.of(InputSample) if one.root == root and one.std is not None]
    differ = not stds or any(std > 0 for std in stds)
    if tail < 2 or len(last) < 3 or not inputs or last[-1][0].step < 2 or not differ:
        return None
    sample = last[len(last) - tail][0]
    flat = [one for one in sample.modules if one.module and one.spread is not None and one.spread < NO_SPREAD]
    return Constant(
        at=last[len(last) - tail + 1][0].at,
        step=sample.step,
        module=flat[0].module if flat else "",
        first=last[0][1].spread or 0.0,
        last=last[-1][1].spread or 0.0,
    )


def rounded(value: float) -> float:
    """A number rounded down to 1, 2, 3 or 5 times a power of ten.

    Example:
        >>> rounded(3.6e-5), rounded(0.0199)
        (3e-05, 0.01)
    """
    if not (0 < value < math.inf):
        return value
    power = 10.0 ** math.floor(math.log10(value))
    lead = max((step for step in (1, 2, 3, 5) if step * power <= value * (1 + 1e-9)), default=1)
    return float(f"{lead * power:.3g}")


@remembered
def copied_shapes(run: Run) -> frozenset[tuple[int, ...]]:
    """The shapes of parameters of which copies take part in the loss, and get their gradient."""
    names = copied_names(run)
    return frozenset(one.shape for one in run.parameters.values() if names.intersection(one.names))


@remembered
def copied_names(run: Run) -> frozenset[str]:
    """The names of these parameters."""
    return frozenset(name for _, paths in followed(run) for name, stop in paths.stopped.items() if stop.op in COPIES)


@remembered
def followed(run: Run) -> list[tuple[Followed, Paths]]:
    """The iterations that were followed operation by operation, with what stopped the gradient in each."""
    return [(one, Paths.from_dict(one.paths)) for one in run.of(Followed) if one.paths]


@remembered
def unused_names(run: Run) -> frozenset[str]:
    """Names of parameters of which an iteration that was followed has seen that nothing, or no loss, uses them."""
    stops = (stop for _, paths in followed(run) for stop in paths.stopped.items())
    left = {name for name, stop in stops if stop.op in ("unused", "left out")}
    return frozenset(left.union(*(one.unused for one in run.of(Followed))))
