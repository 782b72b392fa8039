"""The slow, obvious truth: the whole batch at once, in float64, by plain autograd; and how near to it is near enough.

There are three tolerances, and every test names the one that it uses:

- bitwise, where only the schedule differs;
- ``RELATIVE_FLOAT64`` where the same float64 sum is taken in another order;
- in float32 the error against float64 is at most twice the whole batch's own error and one rounding a micro-batch:
  ``|g - g64| <= 2 |whole - g64| + 2^-24 sqrt(N) |g64|``.

All parameters count together, as one vector.
"""

import copy
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import GeneratorType
from typing import Any

import numpy as np
import torch

import anybatch

RELATIVE_FLOAT64 = 1e-10
ROUNDING_FLOAT32 = 2.0**-24

Gradients = list[torch.Tensor | None]


def whole_losses(model: Any, loss_fn: Callable[[Any, Any], Any], batch: Any) -> dict[str, torch.Tensor]:
    """Evaluates the losses of the whole batch at once; a loss over no items is left out."""
    result = loss_fn(model, batch)
    if isinstance(result, GeneratorType):
        result = dict(item if isinstance(item, tuple) else (f"loss_{i}", item) for i, item in enumerate(list(result)))
    if isinstance(result, tuple):
        result = result[0]
    losses = dict(result) if isinstance(result, Mapping) else {"loss": result}
    return {name: value for name, loss in losses.items() if (value := _mean_of(loss)) is not None}


def _mean_of(loss: Any) -> torch.Tensor | None:
    if isinstance(loss, anybatch.Mean):
        return None if float(loss.count) == 0 else loss.total / float(loss.count)
    value: torch.Tensor = loss
    return None if math.isnan(value.item()) else value


def whole_gradients(
    model: Any,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    parameters: Iterable[torch.Tensor] | None = None,
) -> tuple[Gradients, dict[str, float]]:
    """Differentiates the sum of the losses of the whole batch; ``.grad`` stays as it is.

    Returns:
        One gradient a parameter, ``None`` where the loss does not reach it, and the value of each loss.
    """
    wanted = list(model.parameters() if parameters is None else parameters)
    losses = whole_losses(model, loss_fn, batch)
    values = {name: loss.item() for name, loss in losses.items()}
    trained = [parameter for parameter in wanted if parameter.requires_grad]
    if not losses:
        return [None] * len(wanted), values
    found = torch.autograd.grad(torch.stack(list(losses.values())).sum(), trained, allow_unused=True)
    by_id = dict(zip(map(id, trained), found, strict=True))
    return [by_id.get(id(parameter)) for parameter in wanted], values


def gradients_of(parameters: torch.nn.Module | Iterable[torch.Tensor]) -> Gradients:
    """Copies what lies in ``.grad``."""
    found = parameters.parameters() if isinstance(parameters, torch.nn.Module) else parameters
    return [None if parameter.grad is None else parameter.grad.detach().clone() for parameter in found]


def clear(parameters: torch.nn.Module | Iterable[torch.Tensor]) -> None:
    """Takes all gradients off."""
    for parameter in parameters.parameters() if isinstance(parameters, torch.nn.Module) else parameters:
        parameter.grad = None


def as_float64(model: torch.nn.Module) -> torch.nn.Module:
    """Copies a model in float64, with the same values."""
    return copy.deepcopy(model).double()


def norm(gradients: Iterable[torch.Tensor | None]) -> float:
    """The Euclidean norm of all gradients together, in float64."""
    return math.sqrt(sum(g.detach().double().square().sum().item() for g in gradients if g is not None))


def distance(found: Gradients, expected: Gradients) -> float:
    """The norm of the difference; a gradient that is ``None`` counts as zero."""
    differences: Gradients = []
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            differences.append(other if one is None else one)
        else:
            differences.append(one.to_dense().double() - other.to_dense().double())
    return norm(differences)


def assert_bitwise(found: Gradients, expected: Gradients) -> None:
    """Asserts that two lists of tensors are equal in every bit."""
    assert [g is None for g in found] == [g is None for g in expected]
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one is not None and other is not None:
            assert one.dtype == other.dtype, f"tensor {index}: {one.dtype}, expected {other.dtype}"
            assert torch.equal(one, other), f"tensor {index} differs by {(one - other).abs().max().item():g}"


def assert_float64(found: Gradients, expected: Gradients, what: str = "the gradient") -> None:
    """Asserts the tolerance for float64: ``|found - expected| <= 1e-10 |expected|``, all parameters together."""
    error, size = distance(found, expected), norm(expected)
    assert error <= RELATIVE_FLOAT64 * size, f"{what} is off by {error:g}, its norm is {size:g}"


def assert_value64(found: float, expected: float, size: float = 1.0) -> None:
    """Asserts the tolerance for float64 on one number, relative to the larger of it and of its summands' size."""
    assert abs(found - expected) <= RELATIVE_FLOAT64 * max(abs(expected), size), f"{found!r}, expected {expected!r}"


def assert_float32(found: Gradients, whole: Gradients, exact: Gradients, micro_batches: int) -> None:
    """Asserts the tolerance for float32: at most twice the whole batch's own error, and a rounding a micro-batch."""
    allowed = 2 * distance(whole, exact) + ROUNDING_FLOAT32 * math.sqrt(micro_batches) * norm(exact)
    error = distance(found, exact)
    assert error <= allowed, (
        f"the gradient is off by {error:g} in {micro_batches} micro-batches, allowed is {allowed:g}"
    )


def assert_exact_at_every_size(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    rows: int,
    *,
    whole_loss_fn: Callable[[Any, Any], Any] | None = None,
    sizes: Sequence[int | None] | None = None,
    parameters: Iterable[torch.Tensor] | None = None,
    **options: Any,
) -> None:
    """Asserts gradient and losses in float64 for every micro-batch size from 1 to the whole batch."""
    wanted = list(model.parameters() if parameters is None else parameters)
    expected, losses = whole_gradients(model, whole_loss_fn or loss_fn, batch, wanted)
    for size in sizes or [*range(1, rows + 1), None]:
        clear(wanted)
        out = anybatch.backward(model, loss_fn, batch, micro_batch_size=size, **options)
        assert_float64(gradients_of(wanted), expected, f"the gradient at micro-batches of {size}")
        for name, value in out.losses.items():
            assert_value64(value, losses.get(name, 0.0))
        assert set(losses) <= set(out.losses)
    clear(wanted)


def torch_random() -> list[torch.Tensor]:
    """The states of torch's generators: of the host, and of the default device if that is another."""
    device = torch.empty(0).device
    return [torch.get_rng_state(), *([] if device.type == "cpu" else [getattr(torch, device.type).get_rng_state()])]


def set_torch_random(states: Sequence[torch.Tensor]) -> None:
    """Puts back what ``torch_random`` gave."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        getattr(torch, torch.empty(0).device.type).set_rng_state(state)


def random_state() -> tuple[Any, ...]:
    """The state of torch's, Python's and numpy's generators, comparable with ``==``."""
    name, keys, *rest = np.random.get_state()
    return frozen(torch_random()), random.getstate(), (name, tuple(map(int, keys)), *rest)


def frozen(value: Any) -> Any:
    """A copy that can be compared with ``==`` in every bit: tensors become bytes, containers become tuples."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, Mapping):
        return tuple((str(key), frozen(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(frozen(item) for item in value)
    return value


def everything(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    step: anybatch.TrainStep | None = None,
    *,
    with_gradients: bool = True,
) -> dict[str, Any]:
    """All that a refused call must leave alone, comparable with ``==``."""
    facts: dict[str, Any] = {
        "weights and buffers": frozen(model.state_dict()),
        "modes": [module.training for module in model.modules()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "random state": random_state(),
    }
    if with_gradients:
        facts["which gradients"] = [id(parameter.grad) for parameter in model.parameters()]
        facts["gradients"] = frozen([parameter.grad for parameter in model.parameters()])
    if optimizer is not None:
        facts["optimizer"] = frozen(optimizer.state_dict())
    if step is not None:
        facts["step"] = frozen({key: value for key, value in step.state_dict().items() if key != "random"})
    return facts


def assert_unchanged(now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Asserts that two results of ``everything`` are equal; says only what differs, not how."""
    assert [name for name in before if now[name] != before[name]] == []


def no_cut(tensors: Any) -> AbstractContextManager[Any]:
    """Stands in for ``anybatch.cut`` where the truth is computed."""
    return nullcontext(tensors)
