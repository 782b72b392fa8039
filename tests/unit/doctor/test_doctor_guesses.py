"""The loss of the best constant guess, against what an optimizer finds."""

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.doctor.samples.guesses import Guesses
from anybatch.records.lossfacts import LossCall
from loss_calls import patched

N = 120


def given(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def best(function: Any, shape: tuple[int, ...], target: torch.Tensor, made: Any, **kwargs: Any) -> float:
    """The least loss of one prediction for all rows."""
    own = torch.full(shape, 0.3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([own], lr=0.5, max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")
    predictions = (N, *shape)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = function(made(own).expand(predictions), target, **kwargs)
        loss.backward()
        return loss

    optimizer.step(closure)
    return closure().item()


def same(one: torch.Tensor) -> torch.Tensor:
    return one


@pytest.mark.parametrize(
    ("kwargs"),
    [
        {},
        {"weight": torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)},
        {"label_smoothing": 0.2, "weight": torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)},
        {"reduction": "sum"},
        {"ignore_index": 1},
    ],
)
def test_of_classes_it_is_the_entropy(kwargs: dict[str, Any]) -> None:
    target = torch.randint(3, (N,)).clamp_max(torch.randint(1, 3, (N,)))
    guess = Guesses().of("cross_entropy", F.cross_entropy, given(F.cross_entropy, torch.zeros(N, 3), target, **kwargs))
    assert guess == pytest.approx(best(F.cross_entropy, (3,), target, same, **kwargs), rel=1e-5)


@pytest.mark.parametrize(
    ("function", "target", "made", "bound"),
    [
        (F.mse_loss, torch.randn(N, 2, dtype=torch.float64) * 3 + 5, same, 1e-6),
        (F.smooth_l1_loss, torch.randn(N, 2, dtype=torch.float64), same, 0.02),
        (F.l1_loss, torch.rand(N, 2, dtype=torch.float64) ** 3, same, 0.02),
        (F.binary_cross_entropy_with_logits, (torch.rand(N, 2, dtype=torch.float64) > 0.8).double(), same, 1e-6),
        (F.binary_cross_entropy, (torch.rand(N, 2, dtype=torch.float64) > 0.8).double(), torch.sigmoid, 1e-6),
    ],
)
def test_of_numbers_it_is_the_mean_of_each_column(function: Any, target: torch.Tensor, made: Any, bound: float) -> None:
    guess = Guesses().of(function.__name__, function, given(function, torch.zeros_like(target), target))
    assert guess == pytest.approx(best(function, (2,), target, made), rel=bound)


def test_of_distributions_it_is_their_mean_and_torch_does_not_warn() -> None:
    target = torch.randn(N, 4, dtype=torch.float64).softmax(1)
    made = torch.nn.LogSoftmax(0)
    for kwargs in ({"reduction": "batchmean"}, {"reduction": "sum"}):
        guess = Guesses().of("kl_div", F.kl_div, given(F.kl_div, torch.zeros(N, 4), target, **kwargs))
        assert guess == pytest.approx(best(F.kl_div, (4,), target, made, **kwargs), rel=1e-5)
    assert Guesses().of("kl_div", F.kl_div, given(F.kl_div, torch.zeros(N, 4), target)) is not None


def test_small_batches_add_up_and_too_few_say_nothing() -> None:
    guesses = Guesses()
    found = [
        guesses.of("cross_entropy", F.cross_entropy, given(F.cross_entropy, torch.zeros(8, 4), torch.arange(8) % 4))
        for _ in range(20)
    ]
    assert found[0] is None
    assert found[-1] == pytest.approx(torch.tensor(4.0).log().item(), rel=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        (F.cross_entropy, torch.zeros(64, 64), torch.arange(64)),  # a contrast
        (F.cross_entropy, torch.zeros(64, 9), torch.zeros(64, dtype=torch.long)),
        (F.mse_loss, torch.zeros(64, 1), torch.zeros(64)),
        (F.mse_loss, torch.zeros(64, 1), torch.randn(64, 1, requires_grad=True)),
    ],
)
def test_what_is_no_data_set_of_targets_has_no_guess(arguments: tuple[Any, ...]) -> None:
    function, *rest = arguments
    assert Guesses().of(function.__name__, function, given(function, *rest)) is None


def test_the_recorder_asks_where_values_are_read() -> None:
    found: list[Any] = []
    with patched(found.append):
        F.mse_loss(torch.zeros(64, 1, requires_grad=True), torch.tensor([[0.0], [2.0]]).repeat(32, 1))
    assert isinstance(found[0], LossCall)
    assert found[0].guess == pytest.approx(1.0)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result._base is None and not func.is_view:
            self.bytes = max(self.bytes, result.nbytes)
        return result


@pytest.mark.parametrize("function", [F.mse_loss, F.l1_loss, F.kl_div])
def test_a_large_target_is_not_copied_to_a_wider_type(function: Any) -> None:
    target = torch.rand(N, 4096)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        guess = Guesses().of(function.__name__, function, given(function, torch.zeros(N, 4096), target))
    assert guess is not None
    assert largest.bytes <= target.nbytes


@pytest.mark.parametrize("log_target", [False, True])
def test_the_guess_for_shares_is_their_distance_from_their_mean(log_target: bool) -> None:
    target = torch.rand(N, 4).softmax(1)
    shown = target.log() if log_target else target
    kwargs = {"reduction": "batchmean", "log_target": log_target}
    guess = Guesses().of("kl_div", F.kl_div, given(F.kl_div, torch.zeros(N, 4), shown, **kwargs))
    expected = F.kl_div(target.mean(0).log().expand(N, 4), target, reduction="batchmean")
    assert guess == pytest.approx(float(expected), rel=1e-4)
