"""What is said of what people post about: states and orders that are lost, inputs of one number, derivatives."""

from dataclasses import replace

from answer_runs import asked, flat
from anybatch.records.events import Loaded
from number_runs import call, falling, fires, quiet


def both(probe: str, name: str) -> None:
    """The rule speaks where the answer is yes, and in no other case."""
    fires(asked(probe, "yes").run(), name, "warning")
    quiet(asked(probe, "no").run(), name)
    quiet(asked(probe, "unknown").run(), name)


def test_lr_ignored_on_resume_fires_on_an_optimizer_that_begins_anew() -> None:
    run = replace(asked("half resumed", "yes"), before=(Loaded(into="module"),)).run()
    assert "checkpoint['optimizer']" in fires(run, "LR_IGNORED_ON_RESUME", "warning").fix


def test_inputs_alike_fires_on_one_number_that_a_layer_is_given_and_is_quiet_where_it_does_no_harm() -> None:
    assert "is 0 in both" in fires(asked("one number", "yes").run(), "INPUTS_ALIKE", "warning").message
    quiet(asked("one number", "no").run(), "INPUTS_ALIKE")
    learned = lambda step: [call(guess=2.3, value=falling(step))]  # noqa: E731
    quiet(replace(asked("one number", "yes"), every=learned, steps=200).run(), "INPUTS_ALIKE")


def test_function_gradient_fires_on_mixed_derivatives() -> None:
    assert "all 2 columns" in fires(asked("mixed derivative", "yes").run(), "FUNCTION_GRADIENT", "warning").message
    both("mixed derivative", "FUNCTION_GRADIENT")


def test_axes_torn_fires_on_a_norm_of_places() -> None:
    assert "64 norms per row" in fires(asked("norm of places", "yes").run(), "AXES_TORN", "warning").message
    both("norm of places", "AXES_TORN")


def test_marks_as_rows_fires_and_says_how_many_are_marked() -> None:
    assert "not the 3 that are marked" in fires(asked("rows of marks", "yes").run(), "MARKS_AS_ROWS", "error").message


def test_marks_as_rows_is_quiet_without_an_answer() -> None:
    quiet(asked("rows of marks", "no").run(), "MARKS_AS_ROWS")
    quiet(asked("rows of marks", "unknown").run(), "MARKS_AS_ROWS")


def test_update_undone_fires_where_nothing_was_learned_and_nowhere_else() -> None:
    run = replace(asked("undone", "yes"), loss=flat, call=call(guess=2.31), steps=200)
    assert "after 9 of 10 steps" in fires(run.run(), "UPDATE_UNDONE", "error").message
    quiet(asked("undone", "yes").run(), "UPDATE_UNDONE")
    quiet(replace(asked("undone", "yes"), loss=flat).run(), "UPDATE_UNDONE")  # where no guess is known
    quiet(replace(asked("undone", "no"), loss=flat).run(), "UPDATE_UNDONE")


def test_update_undone_fires_on_weights_of_another_net() -> None:
    seen = {"online": 0, "online_module": "target", "times": 8, "kind": "loaded"}
    run = replace(asked("undone", "yes", seen), loss=flat, call=call(guess=2.31), steps=200)
    assert "is overwritten with the weights of" in fires(run.run(), "UPDATE_UNDONE", "error").message


def test_freeze_too_much_fires_on_a_frozen_table_and_is_quiet_where_something_was_learned() -> None:
    run = replace(asked("frozen", "yes"), loss=flat, call=call(guess=2.31), steps=200)
    assert "freeze=False" in (fires(run.run(), "FREEZE_TOO_MUCH", "warning").fix or "")
    other = replace(asked("frozen", "yes", {"table": False}), loss=flat, call=call(guess=2.31), steps=200)
    assert "requires_grad_" in (fires(other.run(), "FREEZE_TOO_MUCH", "warning").fix or "")
    quiet(asked("frozen", "yes").run(), "FREEZE_TOO_MUCH")
    quiet(replace(asked("frozen", "no"), loss=flat).run(), "FREEZE_TOO_MUCH")


def test_update_undone_is_quiet_where_the_question_has_no_answer() -> None:
    quiet(replace(asked("undone", "unknown"), loss=flat).run(), "UPDATE_UNDONE")


def test_sched_never_stepped_fires_and_says_at_which_rate() -> None:
    assert "0.004 in all 48 steps" in fires(asked("unstepped", "yes").run(), "SCHED_NEVER_STEPPED", "warning").message


def test_sched_never_stepped_is_quiet_without_an_answer() -> None:
    both("unstepped", "SCHED_NEVER_STEPPED")


def test_rows_torn_names_a_list_that_is_never_reversed() -> None:
    found = fires(asked("backward list", "yes").run(), "ROWS_TORN", "warning")
    assert found.fix.startswith("advantages.reverse()")
    assert "never reversed" in found.message


def test_frozen_statistics_fires_with_what_a_copy_reaches() -> None:
    found = fires(asked("frozen statistics", "yes").run(), "FROZEN_STATISTICS", "warning")
    assert "(3 in this step)" in found.message
    assert "0.153 with the statistics of the batch, and 1.43 with these" in found.message


def test_frozen_statistics_is_quiet_without_an_answer() -> None:
    both("frozen statistics", "FROZEN_STATISTICS")
