"""Rules on what scores, masks and places of a sequence are like fire on their fault and are quiet otherwise."""

from dataclasses import replace

import pytest

from answer_runs import asked, flat
from anybatch.records.lossfacts import Probed
from number_runs import Training, call, fires, quiet, silent
from test_rules_asked import both


def test_evaluation_inputs_fires_where_sampling_gives_levels_that_were_not_trained() -> None:
    assert "model(noisy, t)" in fires(asked("sampling level", "yes").run(), "EVALUATION_INPUTS", "warning").fix
    both("sampling level", "EVALUATION_INPUTS")


@pytest.mark.parametrize(
    ("probe", "word"), [("distance as score", "distances"), ("drawn near", "640 randomly drawn rows")]
)
def test_loss_sign_fires_where_scores_go_the_wrong_way(probe: str, word: str) -> None:
    run = replace(asked(probe, "yes"), loss=flat).run()
    assert word in fires(run, "LOSS_SIGN", "error").message
    quiet(asked(probe, "yes").run(), "LOSS_SIGN")  # it learned all the same
    quiet(replace(asked(probe, "no"), loss=flat).run(), "LOSS_SIGN")


def test_target_given_fires_where_a_place_is_given_its_target() -> None:
    assert "9 positions" in fires(asked("given at its place", "yes").run(), "TARGET_GIVEN", "warning").message
    both("given at its place", "TARGET_GIVEN")


def test_places_alike_fires_where_the_order_is_not_seen() -> None:
    assert "position" in fires(asked("order ignored", "yes").run(), "PLACES_ALIKE", "info").fix
    well = replace(asked("order ignored", "yes"), loss=lambda step: 2.3 * 0.9**step, call=call(value=0.01, guess=2.3))
    silent(well.run(), "PLACES_ALIKE")
    both("order ignored", "PLACES_ALIKE", "info")


def test_mask_inverted_fires_where_a_mask_hides_nothing() -> None:
    assert "80 of the numbers" in fires(asked("hides nothing", "yes").run(), "MASK_INVERTED", "error").message
    well = replace(asked("hides nothing", "yes"), loss=lambda step: 2.3 * 0.9**step, call=call(value=0.01, guess=2.3))
    quiet(well.run(), "MASK_INVERTED")
    both("hides nothing", "MASK_INVERTED", "error")


@pytest.mark.parametrize(
    ("probe", "name", "severity", "word"),
    [
        ("flattened apart", "LABELS_UNRELATED", "error", "32 samples with 8 positions"),
        ("detached draw", "GRAPH_CUT", "warning", "The mean of the noisy sample"),
        ("unit columns", "SOFTMAX_DIM", "error", "32 columns"),
    ],
)
def test_what_goes_along_the_wrong_axis_fires(probe: str, name: str, severity: str, word: str) -> None:
    assert word in fires(asked(probe, "yes").run(), name, severity).message
    both(probe, name, severity)


def test_batch_mixing_is_quiet_of_a_square_batch_where_something_is_learned() -> None:
    evidence = {"op": "lstm", "equal_sizes": True, "dim_is_batch": True, "dim": 0}
    run = Training(after=(Probed(probe="batch", answer="yes", evidence=evidence),))
    learned = replace(run, call=call(value=0.01, guess=2.3), loss=lambda step: 2.3 * 0.9**step)
    quiet(learned.run(), "BATCH_MIXING")
    stuck = replace(run, loss=flat, every=lambda step: [call(value=flat(step), guess=2.3)])
    fires(stuck.run(), "BATCH_MIXING", "warning")
