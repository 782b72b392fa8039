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
    assert "pulls 30 pairs together" in found.message
    quiet(asked("far pairs", "no").run(), "POSITIVES_MISPAIRED")


def test_positives_mispaired_fires_where_pairs_of_one_label_are_driven_apart() -> None:
    found = fires(asked("labels apart", "yes").run(), "POSITIVES_MISPAIRED", "warning")
    assert "(40 of them)" in found.message
    quiet(asked("labels apart", "no").run(), "POSITIVES_MISPAIRED")


def test_loss_mixed_reduction_fires_where_all_rows_are_summed_up_too_early() -> None:
    assert "a sum over 128 rows" in fires(asked("summed early", "yes").run(), "LOSS_MIXED_REDUCTION", "warning").message
    quiet(asked("summed early", "no").run(), "LOSS_MIXED_REDUCTION")


def test_time_leak_fires_where_the_next_value_is_seen() -> None:
    assert "bidirectional" in fires(asked("given ahead", "yes").run(), "TIME_LEAK", "warning").fix
    quiet(asked("given ahead", "no").run(), "TIME_LEAK")
