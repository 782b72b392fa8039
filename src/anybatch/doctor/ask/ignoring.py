"""Is the input ignored, is its padding read, and do two evaluations differ?"""

from typing import Any

import torch

from anybatch.doctor.ask.leaks import difference, first_of, largest, pairs_of
from anybatch.doctor.ask.trials import Inputs, Trial, Unknown, tensors, told
from anybatch.doctor.ask.weighing import padding_of
from anybatch.records.lossfacts import Evaluated, LossCall, Probed
from anybatch.records.runs import Run

OF_SCORES = ("cross_entropy", "binary_cross_entropy_with_logits")
_SPREAD = 1e-6
_ROUNDED = 1e-4  # of the largest output
_MUCH = 0.5  # of the spread over rows: a convolution at the border of a row, or a mean of many tokens, changes less


def ignored(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether the outputs are the same for different inputs."""
    inputs = trial.inputs
    given = [one for one in inputs.by_rows() if one.numel()]
    if inputs.rows < 2 or not given:
        raise Unknown("the last input has one row")
    different = any(bool((one != one[:1]).any()) for one in given)
    if not different:
        raise Unknown("the rows of the last input are equal")
    turned = inputs.changed(lambda one: one.roll(1, 0) if one.dim() and one.shape[0] == inputs.rows else one)
    before, after = trial.forward(inputs), trial.forward(turned)
    outputs = [(a, b) for a, b in pairs_of(before, after) if a.is_floating_point() and a.dim() and a.numel() > 1]
    if not outputs:
        raise Unknown("the model gives no tensor of real numbers")
    size = max(float(a.double().abs().max()) for a, _ in outputs)
    if size != size or size == float("inf"):
        raise Unknown("the outputs are not finite")
    spread = largest(outputs) / size if size else 0.0
    return told("input", root=root, answer="yes" if spread < _SPREAD else "no", spread=spread, size=size)


def padding_read(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether an output of one row changes with the number of tokens that only fill the rows up."""
    inputs = trial.inputs
    found = [behind for one in inputs.by_rows() if (behind := padding_of(one)) is not None]
    if not found:
        raise Unknown("the last input has no padded tokens")
    behind = found[0]
    length = behind.shape[1]
    spare = max(int(behind.sum(1).min()) - 1, 0)
    outputs = _outputs_of_rows(trial.forward(inputs), trial.forward(_padded(inputs, behind, -spare or length)))
    if not outputs:
        raise Unknown("no output has a place for each row, whatever their length")
    moved = max(float((one - other).pow(2).mean().sqrt()) for one, other in outputs)
    spread = max(float((one - one.mean(0)).pow(2).mean().sqrt()) for one, _ in outputs)
    share = float(behind.double().mean())
    size = max(float(one.abs().max()) for one, _ in outputs)
    answer = "yes" if moved > max(_MUCH * spread, _ROUNDED * size) else "no"
    return told("padding read", root=root, answer=answer, moved=moved, spread=spread, share=share, tokens=length)


def _padded(inputs: Inputs, behind: torch.Tensor, more: int) -> Inputs:
    """The same with so many more places at the ends of rows, or fewer, filled as the ends of short rows are."""

    def change(one: torch.Tensor) -> torch.Tensor:
        if one.shape[:2] != behind.shape:
            return one
        fill = one[behind]
        if one.dim() > 2 or bool((fill != fill[0]).any()):
            raise Unknown("an input has a place for each token, and what it holds for padding differs")
        if more < 0:
            return one[:, :more]
        return torch.cat([one, fill[0].expand(len(one), more)], 1)

    return inputs.changed(change)


def _outputs_of_rows(before: Any, after: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = [
        (one, other) for one, other in zip(tensors(before), tensors(after), strict=False) if one.is_floating_point()
    ]
    return [
        (one.double(), other.double()) for one, other in pairs
        if one.shape == other.shape and 0 < one.dim() < 3 and len(one) > 1
    ]  # fmt: skip


def random_in_evaluation(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether two evaluations of the same input differ, and by which operation."""
    inputs = trial.inputs
    before = trial.forward(inputs)
    trial.advance()
    after = trial.forward(inputs, again=True)
    pairs = [(a, b) for a, b in pairs_of(before, after) if a.numel()]
    if not pairs:
        raise Unknown("the model gives no tensor")
    if not any(bool(difference(a, b).any()) for a, b in pairs):
        return told("modes", root=root, answer="no")
    _, first = trial.operations(inputs)
    trial.advance()
    _, second = trial.operations(inputs, again=True)
    guilty = first_of(first, second, lambda a, b: a.shape == b.shape and a.numel() > 0 and bool(difference(a, b).any()))
    return told("modes", guilty, root=root, op="" if guilty is None else guilty.name, largest=largest(pairs))


def squashed_in_evaluation(trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """Whether what goes as scores into a loss in training comes as probabilities into it in evaluation."""
    losses = [one for one in run.of(Evaluated) if one.function in OF_SCORES]
    if not losses or not any(one.root == root and one.function in OF_SCORES for one in run.of(LossCall)):
        raise Unknown("no loss that takes scores was seen in an evaluation")
    evaluated = tensors(trial.forward(trial.inputs))
    trial.module.train()
    try:
        trained = tensors(trial.forward(trial.inputs))
    finally:
        trial.module.eval()
    pairs = [(a, b) for a, b in zip(evaluated, trained, strict=False) if a.is_floating_point() and a.shape == b.shape]
    is_so = any(_is_probability(a, losses[0].function) and not _is_probability(b, losses[0].function) for a, b in pairs)
    return told("evaluated scores", losses[0], root=root, answer="yes" if is_so else "no", function=losses[0].function)


def _is_probability(one: torch.Tensor, function: str) -> bool:
    is_within = one.numel() > 1 and bool(((one >= 0) & (one <= 1)).all())
    if function != "cross_entropy" or not is_within:
        return is_within
    return one.dim() > 1 and bool(((one.sum(1) - 1).abs() < 1e-3).all())


def zeroed(inputs: Inputs) -> Inputs:
    """The same inputs with zeros for real numbers and the commonest token for whole ones."""

    def change(one: torch.Tensor) -> torch.Tensor:
        if one.is_floating_point():
            return torch.zeros_like(one)
        if one.dtype == torch.bool or not one.numel():
            return one
        return torch.full_like(one, int(one.flatten().mode().values))

    return inputs.changed(change)
