"""What is said of pairs that are brought near, of states behind padding, and of scalers: once where it is so.

How it could be silently wrong: a run that learned well is told that its states are lost.
"""

from answer_runs import asked, flat
from number_runs import call, fires, quiet


def test_padding_read_fires_where_nothing_of_a_row_is_left_behind_it() -> None:
    training = asked("padding forgotten", "yes")
    training.steps, training.loss, training.call = 150, flat, call(items=64, guess=2.3, value=2.3)
    assert "44 of 50 rows end in padding" in fires(training.run(), "PADDING_READ", "warning").message
    quiet(asked("padding forgotten", "no").run(), "PADDING_READ")


def test_evaluation_scaled_fires_where_a_scaler_is_fitted_anew() -> None:
    assert "scaler.transform(x_test)" in fires(asked("fitted anew", "yes").run(), "EVALUATION_SCALED", "warning").fix
    quiet(asked("fitted anew", "no").run(), "EVALUATION_SCALED")


def test_positives_mispaired_fires_where_far_pairs_are_brought_together() -> None:
    found = fires(asked("far pairs", "yes").run(), "POSITIVES_MISPAIRED", "warning")
    assert "brings 30 pairs together" in found.message
    quiet(asked("far pairs", "no").run(), "POSITIVES_MISPAIRED")
