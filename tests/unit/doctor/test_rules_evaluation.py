"""Labels of an evaluation that number the classes otherwise are told, and confusions of classes are not."""

from typing import Any

import pytest

from anybatch.records.lossfacts import Evaluated, Printed
from anybatch.records.runs import Run
from number_runs import Training, call, fires, quiet


def evaluated(**values: Any) -> Run:
    told = {"rows": 150, "right": 0.02, "renamed": 0.98, "names": ((0, 1), (1, 2)), "file": "train.py", "line": 30}
    return Training(after=(Evaluated(function="cross_entropy", value=9.0, **{**told, **values}),)).run()


def test_labels_renumbered_fires_and_says_what_the_labels_mean() -> None:
    found = fires(evaluated(), "LABELS_RENUMBERED", "warning")
    assert "label 0 is class 1, 1 is class 2" in found.message
    assert found.place.line == 30


@pytest.mark.parametrize(
    "values",
    [
        {"right": 0.9, "renamed": 0.9, "names": ()},  # it is right
        {"right": 0.3, "renamed": 0.6},  # classes are confused
        {"right": 0.5, "renamed": 0.0},  # two labels are given to one class
        {"rows": 20},  # by accident
        {"rows": 0, "right": 0.0, "renamed": 0.0, "names": ()},  # an older record
    ],
)
def test_labels_renumbered_is_quiet_on_confusions_and_few_rows(values: dict[str, Any]) -> None:
    quiet(evaluated(**values), "LABELS_RENUMBERED")


@pytest.mark.parametrize("label", ["Validation Dice Coeff", "val_iou", "test jaccard"])
def test_evaluation_inputs_fires_on_a_share_below_zero(label: str) -> None:
    one = Printed(label=label, steps=(30, 60), values=(-2.1, -0.4), file="train.py", line=30)
    assert f'prints "{label}" -0.4' in fires(Training(after=(one,)).run(), "EVALUATION_INPUTS", "warning").message


@pytest.mark.parametrize(
    ("label", "value"),
    [("val dice", 0.8), ("val dice loss", -0.8), ("dice", -0.8), ("val neg dice", -0.8), ("val r2", -0.8)],
)
def test_evaluation_inputs_is_quiet_on_shares_and_losses(label: str, value: float) -> None:
    quiet(Training(after=(Printed(label=label, steps=(60,), values=(value,), line=30),)).run(), "EVALUATION_INPUTS")


def scaled(scales: tuple[float, ...], mean: float = 0.0, std: float = 1.0, items: int = 1) -> Run:
    calls = [call("mse_loss", value=0.1, target_mean=mean, target_std=std) for _ in range(4)]
    last = Evaluated(
        function="l1_loss",
        value=9.0,
        scales=scales,
        items=items,
        guess=scales[-1] ** 2 if scales else None,
        file="train.py",
        line=30,
    )
    return Training(after=(*calls, last)).run()


def test_targets_of_one_value_in_evaluation_fire() -> None:
    found = fires(scaled((0.1, 0.9, 0.0, 0.0), items=150), "EVALUATION_INPUTS", "warning")
    assert "All 150 targets" in found.message


def test_targets_of_another_scale_in_evaluation_fire() -> None:
    found = fires(scaled((0.1, 0.9, 250000.0, 40000.0)), "EVALUATION_INPUTS", "warning")
    assert found.place.line == 30


@pytest.mark.parametrize(
    "run",
    [
        scaled((249000.0, 39000.0, 250000.0, 40000.0)),  # put back into their units
        scaled((0.1, 0.9, 0.2, 1.1)),
        scaled((0.1, 0.9, 8.0, 1.5)),  # others, of the same spread
        scaled((0.1, 0.9, 0.0, 0.0)),  # one target only
        scaled((2.0, 11.0, 3.0, 12.0)),  # harder data, and larger predictions
        scaled((250000.0, 30000.0, 250000.0, 40000.0), 250000.0, 40000.0),
        scaled(()),
    ],
)
def test_targets_of_the_scale_of_the_predictions_are_quiet(run: Run) -> None:
    quiet(run, "EVALUATION_INPUTS")
