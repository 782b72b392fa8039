"""What ``check`` says: exact or not, why not, and lines that make it exact."""

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import anybatch
from anybatch import Certificate, Mean, check
from anybatch.testing import assert_exact

Batch = dict[str, Any]
RELATIVE_FLOAT64 = 1e-10


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch_of(rows: int = 8) -> Batch:
    return {"x": torch.randn(rows, 5), "y": torch.randint(0, 3, (rows,)), "t": torch.randn(rows, 3)}


def mean_cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def summed_cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def penalty(model: nn.Module) -> torch.Tensor:
    return 0.1 * torch.stack([parameter.pow(2).sum() for parameter in model.parameters()]).sum()


def ratio(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch["x"])
    cross_entropy, distillation = F.cross_entropy(logits, batch["y"]), F.mse_loss(logits, batch["t"])
    return cross_entropy + (cross_entropy / distillation).detach() * distillation


def codes(certificate: Certificate) -> list[str]:
    return [reason.code for reason in certificate.reasons]


def naive_error(model: nn.Module, loss_fn: Callable[[Any, Any], torch.Tensor], batch: Batch, sizes: list[int]) -> float:
    """The relative error of the mean of the parts' means by their samples, by plain autograd in float64."""
    model = model.double()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    parameters = list(model.parameters())
    whole = torch.autograd.grad(loss_fn(model, batch), parameters)
    total = [torch.zeros_like(gradient) for gradient in whole]
    for position, size in enumerate(sizes):
        start = sum(sizes[:position])
        part = {name: value[start : start + size] for name, value in batch.items()}
        gradients = torch.autograd.grad(loss_fn(model, part), parameters)
        total = [added + gradient * (size / sum(sizes)) for added, gradient in zip(total, gradients, strict=True)]
    difference = torch.cat([(a - b).flatten() for a, b in zip(total, whole, strict=True)])
    return float(difference.norm() / torch.cat([gradient.flatten() for gradient in whole]).norm())


# A loss that does not add up over samples, one that does, and a sum with a term of its own.


def test_a_batch_level_ratio_is_refused() -> None:
    model, batch = classifier(), batch_of()
    certificate = check(model, ratio, batch, micro_batch_size=4)
    assert codes(certificate) == ["not-additive"]
    assert certificate.splits == ((4, 4), (2, 2, 4))
    assert certificate.reasons[0].where == "loss"
    assert certificate.loss_error < RELATIVE_FLOAT64  # its value is twice the cross entropy, which does add up
    expected = max(naive_error(model, ratio, batch, list(sizes)) for sizes in certificate.splits)
    assert certificate.error == pytest.approx(expected, rel=1e-6)
    assert expected > 0.01
    with pytest.raises(AssertionError, match="does not add up over samples"):
        assert_exact(model, ratio, batch, micro_batch_size=4)


def test_a_mean_cross_entropy_is_exact() -> None:
    certificate = assert_exact(classifier(), mean_cross_entropy, batch_of(), micro_batch_size=4)
    assert certificate.exact
    assert certificate.error < RELATIVE_FLOAT64
    assert (certificate.reasons, certificate.notes, certificate.dtype) == ((), (), "float64")


def test_a_sum_with_a_penalty_is_flagged_with_the_value_of_the_penalty() -> None:
    model = classifier()
    expected = penalty(model).item()
    certificate = check(model, lambda m, b: summed_cross_entropy(m, b) + penalty(m), batch_of())
    assert codes(certificate) == ["shared-term"]
    assert certificate.reasons[0].evidence["value"] == pytest.approx(expected, rel=1e-6)
    certificate = check(model, lambda m, b: Mean(summed_cross_entropy(m, b) + penalty(m), len(b["y"])), batch_of())
    assert codes(certificate) == ["shared-term"]
    assert certificate.reasons[0].evidence["value"] == pytest.approx(expected, rel=1e-6)


def test_a_mean_with_a_penalty_and_the_remedies_of_a_sum_with_one_are_exact() -> None:
    model, batch = classifier(), batch_of()

    def named(model: nn.Module, batch: Batch) -> dict[str, Any]:
        return {"data": Mean(summed_cross_entropy(model, batch), len(batch["y"])), "penalty": penalty(model)}

    assert_exact(model, lambda m, b: mean_cross_entropy(m, b) + penalty(m), batch)
    assert_exact(model, named, batch, count="forward")
    assert_exact(model, lambda m, b: summed_cross_entropy(m, b) / len(b["y"]) + penalty(m), batch)


def test_a_sum_is_told_from_a_mean_and_its_remedy_is_exact() -> None:
    for loss_fn in (summed_cross_entropy, lambda m, b: summed_cross_entropy(m, b) / 8):
        certificate = check(classifier(), loss_fn, batch_of())
        assert codes(certificate) == ["sum"]
    assert "anybatch.Mean(loss, anybatch.count_samples(batch))" in certificate.reasons[0].remedy
    assert_exact(classifier(), lambda m, b: Mean(summed_cross_entropy(m, b), anybatch.count_samples(b)), batch_of())


@pytest.mark.parametrize("loss_fn", ["contrastive", "deviation", "root", "pairs", "shuffled"])
def test_statistics_of_a_batch_do_not_add_up(loss_fn: str) -> None:
    def contrastive(model: nn.Module, batch: Batch) -> torch.Tensor:
        one, other = F.normalize(model(batch["x"]), dim=1), F.normalize(batch["t"], dim=1)
        return F.cross_entropy(5 * one @ other.T, torch.arange(len(one)))

    losses: dict[str, Callable[[nn.Module, Batch], torch.Tensor]] = {
        "contrastive": contrastive,
        "deviation": lambda model, batch: model(batch["x"]).std(),
        "root": lambda model, batch: F.mse_loss(model(batch["x"]), batch["t"]).sqrt(),
        "pairs": lambda model, batch: F.softplus(model(batch["x"])[:, :1] - model(batch["x"])[:, 1]).mean(),
        "shuffled": lambda model, b: F.mse_loss(model(b["x"]), b["t"][torch.randperm(len(b["t"]))]),
    }
    certificate = check(classifier(), losses[loss_fn], batch_of())
    assert codes(certificate) == ["not-additive"]
    assert certificate.reasons[0].where == "loss"


def test_samples_that_are_mixed_before_the_model_are_told_apart() -> None:
    def standardised(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model((batch["x"] - batch["x"].mean(0)) / batch["x"].std(0)), batch["y"])

    certificate = check(classifier(), standardised, batch_of())
    assert codes(certificate) == ["not-additive"]
    assert "before Sequential sees them" in certificate.reasons[0].message


@given(rows=st.integers(2, 12), size=st.integers(1, 12), weighted=st.booleans())
def test_a_mean_over_samples_is_exact_at_any_size_and_one_by_weights_only_by_its_count(
    rows: int, size: int, weighted: bool
) -> None:
    batch = {"x": torch.randn(rows, 3), "w": torch.rand(rows).add(0.1) if weighted else torch.ones(rows)}

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        result: torch.Tensor = (model(batch["x"]).tanh()[:, 0] * batch["w"]).sum() / batch["w"].sum()
        return result

    model = nn.Linear(3, 1)
    assert check(model, loss_fn, batch, micro_batch_size=size).exact == (not weighted)
    exact = check(model, loss_fn, batch, micro_batch_size=size, count=lambda b: b["w"].sum(dtype=torch.float64))
    assert exact.exact
    assert exact.error < RELATIVE_FLOAT64


# BatchNorm: four samples 0, 0, 10, 10 in two micro-batches, momentum 0.1.


def batch_norm_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(1, momentum=0.1), nn.Linear(1, 1))


def test_batch_norm_is_named_and_its_statistics_are_left_alone() -> None:
    model = batch_norm_model()
    batch = torch.tensor([[0.0], [0.0], [10.0], [10.0]])

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(batch), batch)

    certificate = check(model, loss_fn, batch, micro_batch_size=2)
    assert codes(certificate) == ["batch-norm"]
    reason = certificate.reasons[0]
    assert (reason.where, reason.evidence["modules"]) == ("0", ["0"])
    assert "`0` (BatchNorm1d)" in reason.message
    assert certificate.error > 0.1
    alone, double = copy.deepcopy(model).double(), batch.double()
    with torch.no_grad():
        whole, halves = loss_fn(alone, double), sum(loss_fn(alone, half) for half in double.chunk(2)) / 2
    assert certificate.loss_error >= abs(halves - whole) / whole > 1e-4  # and not 0
    normalisation: Any = model[0]
    assert normalisation.running_mean.item() == 0.0
    assert normalisation.num_batches_tracked.item() == 0
    anybatch.backward(model, loss_fn, batch)  # the remedy: the whole batch, whose mean of 5 goes in once
    assert normalisation.running_mean.item() == pytest.approx(0.5)
    assert check(model, loss_fn, batch, batch_norm="frozen").exact
    assert "accepted" in check(model, loss_fn, batch, batch_norm="ghost").reasons[0].message


def test_what_else_is_wrong_beside_batch_norm_is_said_too() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 3))
    certificate = check(model, summed_cross_entropy, batch_of())
    assert codes(certificate) == ["sum", "batch-norm"]
    assert [note.code for note in certificate.notes] == ["random"]


def test_batch_norm_without_running_statistics_has_no_frozen_remedy() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7, track_running_stats=False), nn.Linear(7, 3))
    certificate = check(model, mean_cross_entropy, batch_of())
    assert codes(certificate) == ["batch-norm"]
    assert not any("frozen" in remedy for remedy in certificate.reasons[0].remedies)


def test_norms_within_a_sample_are_exact() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 3))
    assert_exact(model, mean_cross_entropy, {"x": torch.randn(8, 2, 5), "y": torch.randint(0, 3, (8,))})


# What the user reads.


def test_the_text_has_verdict_numbers_reason_and_remedy_within_eighty_columns() -> None:
    certificate = check(classifier(), summed_cross_entropy, batch_of())
    lines = str(certificate).splitlines()
    assert lines[0] == "not exact: in micro-batches the gradient of Sequential is not the whole batch's"
    assert lines[2] == "  8 samples as 4 + 4 and as 2 + 2 + 4"
    assert any(line.startswith("1. sum, in loss: ") for line in lines)
    assert any(line.startswith("    return anybatch.Mean(") for line in lines)
    assert all(len(line) <= 80 for line in lines if not line.startswith("    "))


def test_a_certificate_survives_json() -> None:
    batch = {"x": torch.randn(4, 5), "y": torch.tensor([0, 1, -100, -100])}
    for certificate in (
        check(classifier(), mean_cross_entropy, batch),
        check(classifier(), ratio, batch_of()),
        check(classifier(), lambda m, b: mean_cross_entropy(m, b) * math.nan, batch),
    ):
        text = json.dumps(certificate.to_dict(), allow_nan=False)
        assert Certificate.from_dict(json.loads(text)).to_dict() == certificate.to_dict()
        assert json.loads(text)["exact"] is certificate.exact is False


def test_a_gradient_that_is_not_finite_can_not_be_compared() -> None:
    certificate = check(classifier(), lambda m, b: mean_cross_entropy(m, b) * math.nan, batch_of())
    assert codes(certificate) == ["not-finite"]
    assert certificate.error == math.inf


def test_a_gradient_that_cancels_to_nothing_is_exact() -> None:
    rows = torch.randn(4, 5, dtype=torch.float64)
    model = nn.Linear(5, 1, bias=False)
    certificate = check(model, lambda m, b: m(b).mean(), torch.cat([rows, -rows + 1e-12 * torch.randn(4, 5)]))
    assert certificate.exact, certificate


def signed(model: nn.Module, batch: Batch) -> torch.Tensor:
    """It cancels out over the whole batch."""
    total: torch.Tensor = (model(batch["x"]).mean(-1) * batch["sign"]).sum()
    return total


def test_what_is_off_from_nothing_is_told_in_absolute_numbers() -> None:
    batch = {"x": torch.ones(8, 4), "sign": torch.tensor([1.0, -1.0]).repeat_interleave(4)}
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    certificate = anybatch.check(model, signed, batch)
    assert min(certificate.error, certificate.loss_error) > 1e12
    half = anybatch.check(model, lambda m, b: signed(m, b) / 2, batch)
    assert certificate.apart == pytest.approx(2 * half.apart)
    shown = (
        f"the gradient of the whole batch is 0 within rounding, that of micro-batches {certificate.apart:.2g} (loss "
    )
    assert shown in str(certificate)
    assert f"{certificate.loss_apart:.2g} instead of 0), tolerance 1e-09" in str(certificate)
    assert "e+" not in str(certificate)
    assert "inf" not in str(certificate)
    assert anybatch.Certificate.from_dict(certificate.to_dict()) == certificate
    few = lambda model, b: model(b["x"]).mean() * (len(b["x"]) < 4)  # noqa: E731
    with pytest.raises(anybatch.NotSplittable, match=r"than whole \([\d.]+ off, where the whole batch's is 0\)"):
        anybatch.backward(model, few, batch, micro_batch_size=4)


# Arguments that can't be meant.


def test_one_sample_can_not_be_split() -> None:
    with pytest.raises(anybatch.BatchError, match="1 sample, which can't be split"):
        check(classifier(), mean_cross_entropy, batch_of(1))


def test_a_loss_with_another_model_is_refused() -> None:
    other = classifier()
    with pytest.raises(anybatch.LossError, match="not with another one from outside"):
        check(classifier(), lambda model, b: (model, mean_cross_entropy(other, b))[1], batch_of())


def test_a_batch_with_nothing_to_count_is_refused() -> None:
    batch = {**batch_of(), "y": torch.full((8,), -100)}
    with pytest.raises(anybatch.CountError, match="the count of the batch is 0"):
        check(classifier(), mean_cross_entropy, batch, count=anybatch.count_tokens("y"))


def test_an_error_of_the_loss_itself_is_raised_as_it_is() -> None:
    def broken(model: nn.Module, batch: Batch) -> torch.Tensor:
        raise KeyError(f"weights of {model}")

    with pytest.raises(KeyError, match="weights"):
        check(classifier(), broken, batch_of())
    with pytest.raises(anybatch.LossError, match="shape"):
        check(classifier(), lambda model, b: model(b["x"]), batch_of())
