"""Rules on what a script prints."""

from dataclasses import replace

import pytest

from anybatch.records.lossfacts import Printed
from number_runs import Training, call, fires, quiet


def printing(label: str, values: tuple[float, ...], value: float = 0.05) -> Training:
    said = Printed(label=label, steps=(40, 80, 120)[: len(values)], values=values, file="train.py", line=9)
    seen = call(guess=1.61, classes=5, items=32, value=value)
    return Training(steps=120, loss=lambda step: 1.6 * 0.97**step, call=seen, after=(said,))


def test_metric_below_chance_fires_on_one_batch_over_the_whole_set() -> None:
    one = fires(printing("accuracy", (0.03, 0.033, 0.033)).run(), "METRIC_BELOW_CHANCE", "warning")
    assert (one.place.line, one.evidence["highest"]) == (9, 0.033)


@pytest.mark.parametrize(
    ("label", "values", "value"),
    [
        ("accuracy", (0.03, 0.5, 0.9), 0.05),
        ("accuracy", (0.15, 0.18, 0.2), 0.05),  # no better than guessing, on data that it may not know
        ("accuracy", (0.03, 0.03, 0.03), 1.6),  # nothing is learned as yet
        ("accuracy", (0.0, 0.0), 0.05),
        ("acc under attack", (0.0, 0.0, 0.0), 0.05),
        ("task 1 acc", (0.0, 0.0, 0.0), 0.05),
        ("loss", (0.03, 0.03, 0.03), 0.05),
        ("train/val acc gap", (0.01, 0.02, 0.03), 0.05),
        ("rare class acc", (0.01, 0.02, 0.03), 0.05),
        ("acc", (0.0, 0.0, 0.0), 0.05),  # what is left to 1, say
    ],
)
def test_metric_below_chance_is_quiet_about_what_may_be_so(label: str, values: tuple[float, ...], value: float) -> None:
    quiet(printing(label, values, value).run(), "METRIC_BELOW_CHANCE")


def test_metric_below_chance_is_quiet_about_whole_sequences() -> None:
    of_tokens = printing("accuracy", (0.0, 0.0, 0.0))
    assert of_tokens.call is not None
    quiet(replace(of_tokens, call=replace(of_tokens.call, items=32 * 20)).run(), "METRIC_BELOW_CHANCE")


def test_metric_below_chance_is_quiet_about_several_heads() -> None:
    two = replace(printing("accuracy", (0.03, 0.033, 0.033)), every=lambda step: [call(classes=40, line=20)])
    quiet(two.run(), "METRIC_BELOW_CHANCE")
