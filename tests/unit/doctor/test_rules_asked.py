"""Rules on what was kept of a run, and on questions to copies of it, fire on their fault and are quiet otherwise."""

from dataclasses import replace
from typing import Any

import pytest

from answer_runs import EVIDENCE, asked, flat
from anybatch.records.events import Backward, Loaded, Stepped
from anybatch.records.lines import Fact
from anybatch.records.lossfacts import Probed
from anybatch.records.tables import GroupFacts, OptimizerFacts
from number_runs import Training, call, fires, quiet


def answered(question: str, evidence: dict[str, Any]) -> Probed:
    """A yes to a question, with evidence."""
    (one,) = asked(question, "yes").after
    assert isinstance(one, Probed)
    return replace(one, evidence=evidence)


def both(probe: str, name: str, severity: str = "warning") -> None:
    """The rule speaks where the answer is yes, and in no other case."""
    found = fires(asked(probe, "yes").run(), name, severity)
    assert found.fix
    quiet(asked(probe, "no").run(), name)
    quiet(asked(probe, "unknown").run(), name)


def test_copy_never_updated_fires_and_names_both_nets() -> None:
    found = fires(asked("frozen copy", "yes").run(), "COPY_NEVER_UPDATED", "warning")
    assert "load_state_dict(model.state_dict())" in found.fix


def test_copy_never_updated_is_quiet_without_an_answer() -> None:
    both("frozen copy", "COPY_NEVER_UPDATED")
    both("slow copy", "COPY_NEVER_UPDATED")


def test_field_unread_fires_on_an_option_as_a_note() -> None:
    found = fires(asked("unread option", "yes").run(), "FIELD_UNREAD", "info")
    assert "has an argument remove_seen" in found.message


def test_eval_on_train_fires_and_names_what_is_held_out() -> None:
    assert "x_test" in fires(asked("trained rows", "yes").run(), "EVAL_ON_TRAIN", "info").message


def test_eval_on_train_is_quiet_without_an_answer() -> None:
    both("trained rows", "EVAL_ON_TRAIN", "info")


def test_terminals_bootstrapped_fires_and_gives_the_share() -> None:
    assert "6%" in fires(asked("ends alone", "yes").run(), "TERMINALS_BOOTSTRAPPED", "warning").message


def test_terminals_bootstrapped_is_quiet_without_an_answer() -> None:
    both("ends alone", "TERMINALS_BOOTSTRAPPED")


def test_inputs_alike_fires_and_gives_the_number() -> None:
    assert "in all 12 training calls" in fires(asked("inputs alike", "yes").run(), "INPUTS_ALIKE", "error").message


def test_inputs_alike_is_quiet_without_an_answer() -> None:
    both("inputs alike", "INPUTS_ALIKE", "error")


def test_copy_buffers_stale_fires_and_names_the_buffer() -> None:
    assert "1.running_mean" in fires(asked("copied buffers", "yes").run(), "COPY_BUFFERS_STALE", "warning").message


def test_eval_in_training_fires_on_statistics_that_were_never_made() -> None:
    stays = replace(asked("statistics never made", "yes"), steps=150, loss=flat, call=call(guess=2.3))
    assert "2 of its norm layers" in fires(stays.run(), "EVAL_IN_TRAINING", "error").message
    quiet(asked("statistics never made", "yes").run(), "EVAL_IN_TRAINING")  # of norms that are meant to be affine only


def test_copy_buffers_stale_is_quiet_without_an_answer() -> None:
    both("copied buffers", "COPY_BUFFERS_STALE")


def test_state_not_copied_fires_at_the_line_that_loads() -> None:
    assert fires(asked("own state", "yes").run(), "STATE_NOT_COPIED", "warning").place.line == 7


def test_state_not_copied_is_quiet_without_an_answer() -> None:
    both("own state", "STATE_NOT_COPIED")


def resumed(loaded: int) -> Training:
    """A training before which a state was loaded into an optimizer."""
    other = OptimizerFacts(
        optimizer=1, variable="first", cls="AdamW", groups=(GroupFacts(parameters=(0, 1, 2), lr=1e-3),)
    )
    return Training(before=(other, Loaded(into="optimizer", number=loaded, variable="first", line=4)))


def test_opt_state_unused_fires_where_another_optimizer_steps() -> None:
    assert "first" in fires(resumed(1).run(), "OPT_STATE_UNUSED", "warning").message


def test_opt_state_unused_is_quiet_where_the_one_that_was_given_it_steps() -> None:
    quiet(resumed(0).run(), "OPT_STATE_UNUSED")


def test_evaluation_writes_fires_and_names_what_is_written() -> None:
    assert "queue" in fires(asked("written in evaluation", "yes").run(), "EVALUATION_WRITES", "warning").message


def test_evaluation_writes_is_quiet_without_an_answer() -> None:
    both("written in evaluation", "EVALUATION_WRITES")


def test_evaluation_inputs_fires_with_both_scales() -> None:
    found = fires(asked("evaluated inputs", "yes").run(), "EVALUATION_INPUTS", "warning")
    assert "mean 120 and standard deviation 70" in found.message


def test_evaluation_inputs_is_quiet_without_an_answer() -> None:
    both("evaluated inputs", "EVALUATION_INPUTS")


def test_labels_unrelated_fires_where_nothing_is_learned_either() -> None:
    run = asked("labels", "yes")
    run.loss, run.call = flat, call(guess=2.3)
    assert "randperm" in fires(run.run(), "LABELS_UNRELATED", "warning").fix


def test_labels_unrelated_is_quiet_where_the_loss_falls_at_once() -> None:
    run = asked("labels", "yes")
    run.call = call(guess=2.3)
    quiet(run.run(), "LABELS_UNRELATED")
    quiet(asked("labels", "no").run(), "LABELS_UNRELATED")


def test_field_unread_fires_and_names_the_field() -> None:
    assert "(1 - done)" in fires(asked("unread field", "yes").run(), "FIELD_UNREAD", "warning").fix


def test_field_unread_is_quiet_without_an_answer() -> None:
    both("unread field", "FIELD_UNREAD")
    split = {"name": "train_mask", "held_out": "test_mask", "kind": "split"}
    run = Training(after=(answered("unread field", split),)).run()
    assert "those of test_mask are trained on" in fires(run, "FIELD_UNREAD", "warning").message
    result = {"name": "image", "call": "np.fliplr(image).copy()", "kind": "result"}
    run = Training(after=(answered("unread field", result),)).run()
    assert fires(run, "FIELD_UNREAD", "warning").fix == "image = np.fliplr(image).copy()"


def judged(values: tuple[float, ...], function: str = "binary_cross_entropy_with_logits", **more: Any) -> Training:
    """A training each of whose steps has losses with these constants as targets."""

    def every(step: int) -> list[Fact]:
        value = 0.7 / (1 + step)
        return [call(function, target_mean=one, target_std=0.0, value=value, line=30, **more) for one in values]

    return Training(call=None, every=every)


def test_targets_constant_fires_where_both_kinds_are_told_the_same() -> None:
    assert "compare with 1" in fires(judged((1.0, 1.0)).run(), "TARGETS_CONSTANT", "warning").message


def test_targets_constant_fires_where_all_labels_are_of_one_class() -> None:
    one = judged((3.0,), "cross_entropy", target_classes=1, classes=10)
    fires(one.run(), "TARGETS_CONSTANT", "warning")


@pytest.mark.parametrize(
    "healthy",
    {
        "two values": judged((1.0, 0.0)),
        "a generator": judged((1.0,)),
        "residuals": judged((0.0, 0.0), "mse_loss"),
        "two classes": judged((0.5,), "cross_entropy", target_classes=2, classes=10),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_targets_constant_is_quiet(healthy: tuple[str, Training]) -> None:
    quiet(healthy[1].run(), "TARGETS_CONSTANT")


def test_loss_of_itself_fires_at_the_line_of_the_term() -> None:
    assert fires(asked("itself", "yes").run(), "LOSS_OF_ITSELF", "warning").place.line == 7


def test_loss_of_itself_is_quiet_without_an_answer() -> None:
    both("itself", "LOSS_OF_ITSELF")


def test_loss_mixed_reduction_fires_at_the_sum() -> None:
    assert fires(asked("sums", "yes").run(), "LOSS_MIXED_REDUCTION", "warning").place.line == 7


def test_loss_mixed_reduction_is_quiet_without_an_answer() -> None:
    both("sums", "LOSS_MIXED_REDUCTION")


def test_weighed_late_fires_at_the_product() -> None:
    assert "reduction='none'" in fires(asked("weighed late", "yes").run(), "WEIGHED_LATE", "warning").fix


def test_weighed_late_is_quiet_without_an_answer() -> None:
    both("weighed late", "WEIGHED_LATE")


def test_evaluation_scaled_fires_on_a_table_and_gives_its_rows() -> None:
    assert "400 evaluation rows" in fires(asked("scaled apart", "yes").run(), "EVALUATION_SCALED", "warning").message


def test_evaluation_scaled_is_quiet_without_an_answer() -> None:
    both("scaled apart", "EVALUATION_SCALED")


def test_target_drawn_fires_at_the_loss() -> None:
    run = replace(asked("drawn targets", "yes"), loss=flat).run()
    assert "mse_loss" in fires(run, "TARGET_DRAWN", "warning").message


def test_target_drawn_is_quiet_where_it_is_learned_and_without_an_answer() -> None:
    quiet(asked("drawn targets", "yes").run(), "TARGET_DRAWN")
    quiet(replace(asked("drawn targets", "no"), loss=flat).run(), "TARGET_DRAWN")


def test_target_of_indices_fires_and_names_the_operation() -> None:
    assert "argmax" in fires(asked("indices", "yes").run(), "TARGET_OF_INDICES", "warning").message


def test_target_of_indices_is_quiet_without_an_answer() -> None:
    both("indices", "TARGET_OF_INDICES")


def test_collapsed_fires_with_both_losses() -> None:
    run = asked("related inputs", "no").run()
    assert "is -0.998, and -0.994" in fires(run, "COLLAPSED", "warning").message


def test_collapsed_is_quiet_where_rows_count_and_after_few_steps() -> None:
    quiet(asked("related inputs", "yes").run(), "COLLAPSED")
    quiet(replace(asked("related inputs", "no"), steps=20).run(), "COLLAPSED")


def test_weight_escapes_fires_with_both_losses() -> None:
    assert "from 1.5 to 0" in fires(asked("weighed away", "yes").run(), "WEIGHT_ESCAPES", "warning").message


def test_weight_escapes_is_quiet_without_an_answer() -> None:
    both("weighed away", "WEIGHT_ESCAPES")


def test_target_trained_fires_and_names_the_optimizer() -> None:
    assert "optimizer trains both" in fires(asked("only agreeing", "yes").run(), "TARGET_TRAINED", "warning").message


def test_target_trained_is_quiet_without_an_answer() -> None:
    both("only agreeing", "TARGET_TRAINED")


def test_positives_mispaired_fires_and_says_what_is_alike() -> None:
    found = fires(asked("mispaired", "yes").run(), "POSITIVES_MISPAIRED", "warning")
    assert "targets = (i + n // 2) % n" in found.fix


def test_positives_mispaired_is_quiet_without_an_answer() -> None:
    both("mispaired", "POSITIVES_MISPAIRED")
    by_likeness = answered("mispaired", EVIDENCE["mispaired"] | {"by": "likeness"})
    quiet(Training(after=(by_likeness,)).run(), "POSITIVES_MISPAIRED")  # in a run that learned


def test_worst_state_kept_fires_and_turns_the_comparison() -> None:
    assert "if val_acc > best" in fires(asked("worst kept", "yes").run(), "WORST_STATE_KEPT", "warning").fix


def test_worst_state_kept_is_quiet_without_an_answer() -> None:
    both("worst kept", "WORST_STATE_KEPT")


def test_loss_sign_fires_on_boxes_that_lie_apart() -> None:
    assert "30 of 32 overlaps" in fires(asked("overlap", "yes").run(), "LOSS_SIGN", "warning").message
    both("overlap", "LOSS_SIGN")


@pytest.mark.parametrize(("probe", "name", "severity"), [
    ("collate", "LABELS_UNRELATED", "error"), ("start", "INITIAL_LOSS", "warning"),
])  # fmt: skip
def test_what_only_a_run_that_learned_nothing_shows_is_the_cause_of_that(probe: str, name: str, severity: str) -> None:
    training = asked(probe, "yes")
    training.steps, training.loss, training.call = 150, flat, call(items=64, guess=2.3, value=2.3)
    found = fires(training.run(), name, severity)
    assert "7 of 13 samples" in found.message or "user.weight, item.weight" in found.message
    quiet(asked(probe, "no").run(), name)


def test_entries_pass_fires_and_counts_them() -> None:
    assert fires(asked("passed", "yes").run(), "ENTRIES_PASS", "warning").message.startswith("2 of 4 entries")


def test_entries_pass_is_quiet_without_an_answer() -> None:
    both("passed", "ENTRIES_PASS")


def test_rows_torn_names_a_list_that_is_turned_in_its_loop() -> None:
    assert "returns.reverse()" in fires(asked("turned list", "yes").run(), "ROWS_TORN", "warning").fix


def test_rows_torn_fires_where_rewards_are_summed_up_from_the_first_on() -> None:
    assert "reversed(rewards)" in fires(asked("past sums", "yes").run(), "ROWS_TORN", "warning").fix
    both("past sums", "ROWS_TORN")


def test_target_given_fires_where_data_are_nothing_beside_the_noise() -> None:
    assert "over all 64 rows" in fires(asked("drowned", "yes").run(), "TARGET_GIVEN", "warning").message
    both("drowned", "TARGET_GIVEN")


def test_target_given_fires_where_only_what_is_shown_counts() -> None:
    assert "~hidden" in fires(asked("shown", "yes").run(), "TARGET_GIVEN", "warning").fix
    both("shown", "TARGET_GIVEN")


def test_evaluation_inputs_fires_where_sampling_begins_with_other_noise() -> None:
    assert "randn_like" in fires(asked("sampling start", "yes").run(), "EVALUATION_INPUTS", "warning").fix
    both("sampling start", "EVALUATION_INPUTS")


def test_evaluation_inputs_fires_where_samples_run_away() -> None:
    assert "4e+05 times" in fires(asked("sampling", "no").run(), "EVALUATION_INPUTS", "warning").message
    for other in (asked("sampling", "no", {"far": False}), asked("sampling", "yes")):
        quiet(other.run(), "EVALUATION_INPUTS")


def test_rows_torn_fires_where_one_row_is_taken_for_all() -> None:
    detail = "an index along the batch takes one row for all of them"
    assert "out[:, -1]" in fires(asked("rows", "yes", detail=detail).run(), "ROWS_TORN", "error").fix


def test_rows_torn_fires_at_the_view() -> None:
    assert "view" in fires(asked("rows", "yes").run(), "ROWS_TORN", "error").message


def test_rows_torn_is_quiet_without_an_answer() -> None:
    both("rows", "ROWS_TORN", "error")


def test_plateau_mode_fires_with_the_other_mode() -> None:
    assert 'mode="max"' in fires(asked("plateau", "yes").run(), "PLATEAU_MODE", "warning").fix


def test_plateau_mode_is_quiet_without_an_answer() -> None:
    both("plateau", "PLATEAU_MODE")


def test_backward_of_module_fires_at_the_method() -> None:
    assert "Reverse.apply" in fires(asked("method backward", "yes").run(), "BACKWARD_OF_MODULE", "warning").fix


def test_backward_of_module_is_quiet_without_an_answer() -> None:
    both("method backward", "BACKWARD_OF_MODULE")


def test_function_gradient_fires_and_names_the_function() -> None:
    found = fires(asked("function gradient", "yes", detail="minus gives the same").run(), "FUNCTION_GRADIENT", "error")
    assert "Scaled.backward" in found.message


def test_function_gradient_is_quiet_without_an_answer() -> None:
    both("function gradient", "FUNCTION_GRADIENT", "error")


def test_what_is_asked_afterwards_counts_from_the_first_backward() -> None:
    run = asked("rows", "yes").run()
    first = next(one.at for one in run.of(Backward))
    assert fires(run, "ROWS_TORN", "error").at == first < next(one.at for one in run.of(Stepped))


def test_copy_too_close_fires_where_the_answer_is_yes() -> None:
    assert fires(asked("close copy", "yes").run(), "COPY_TOO_CLOSE", "warning").fix


def test_copy_too_close_is_quiet_without_an_answer() -> None:
    both("close copy", "COPY_TOO_CLOSE", "warning")


def test_target_given_fires_where_the_answer_is_yes() -> None:
    assert fires(asked("target given", "yes").run(), "TARGET_GIVEN", "warning").fix


def test_target_given_is_quiet_without_an_answer() -> None:
    both("target given", "TARGET_GIVEN", "warning")
    of_class = answered("target given", {"kind": "class", "place": 9, "of": 9, "rows": 600})
    assert "reveals the class" in fires(Training(after=(of_class,)).run(), "TARGET_GIVEN", "warning").message


@pytest.mark.parametrize(
    ("seen", "says"),
    [({"kind": "factor", "factor": -1.0}, "-1 times"), ({"kind": "turned"}, "transpose"), ({"kind": "zero"}, "is 0"),
     ({"kind": "aside"}, "elsewhere")],
)  # fmt: skip
def test_function_gradient_says_what_it_is_instead(seen: dict[str, Any], says: str) -> None:
    probed = answered("function gradient", {"cls": "Scaled", "place": 2, "shape": [8, 8], **seen})
    assert says in fires(Training(after=(probed,)).run(), "FUNCTION_GRADIENT", "error").message


def test_reseeded_fires_where_the_answer_is_yes() -> None:
    assert "self.seed" in fires(asked("reseeded", "yes").run(), "RESEEDED", "warning").message


def test_reseeded_is_quiet_without_an_answer() -> None:
    both("reseeded", "RESEEDED", "warning")


def test_weights_redrawn_fires_where_the_answer_is_yes() -> None:
    assert "about every 40 steps" in fires(asked("redrawn", "yes").run(), "WEIGHTS_REDRAWN", "warning").message


def test_weights_redrawn_is_quiet_without_an_answer() -> None:
    both("redrawn", "WEIGHTS_REDRAWN", "warning")


def test_axes_torn_fires_where_the_answer_is_yes() -> None:
    assert fires(asked("axes", "yes").run(), "AXES_TORN", "warning").fix


def test_axes_torn_is_quiet_without_an_answer() -> None:
    both("axes", "AXES_TORN", "warning")


def test_padding_counted_fires_where_the_answer_is_yes() -> None:
    assert fires(asked("padding", "yes").run(), "PADDING_COUNTED", "warning").fix


def test_padding_counted_is_quiet_without_an_answer() -> None:
    both("padding", "PADDING_COUNTED", "warning")


def test_several_classes_fires_where_the_answer_is_yes() -> None:
    assert fires(asked("several classes", "yes").run(), "SEVERAL_CLASSES", "warning").fix


def test_several_classes_is_quiet_without_an_answer() -> None:
    both("several classes", "SEVERAL_CLASSES", "warning")


def test_padding_read_fires_where_the_answer_is_yes() -> None:
    assert fires(asked("padding read", "yes").run(), "PADDING_READ", "warning").fix


def test_padding_read_is_quiet_without_an_answer() -> None:
    both("padding read", "PADDING_READ", "warning")


def test_ctc_targets_fires_where_the_answer_is_yes() -> None:
    assert fires(asked("blank", "yes").run(), "CTC_TARGETS", "error").fix


def test_ctc_targets_is_quiet_without_an_answer() -> None:
    both("blank", "CTC_TARGETS", "error")


@pytest.mark.parametrize(
    ("probe", "name", "severity"),
    [
        ("softmax axis", "SOFTMAX_DIM", "error"),
        ("compared axes", "SOFTMAX_DIM", "error"),
        ("hidden tokens", "MASK_INVERTED", "error"),
        ("rewarded", "LOSS_SIGN", "warning"),
        ("helped", "LOSS_SIGN", "warning"),
        ("bottomless", "LOSS_SIGN", "warning"),
        ("misplaced", "LOSS_SIGN", "warning"),
        ("unlikely", "LOSS_SIGN", "warning"),
        ("worse preferred", "LOSS_SIGN", "warning"),
        ("halfway preferred", "LOSS_SIGN", "warning"),
        ("picked apart", "LABELS_UNRELATED", "error"),
        ("numbering", "EVALUATION_INPUTS", "warning"),
        ("copied", "TARGET_GIVEN", "warning"),
        ("hardly noised", "EVALUATION_INPUTS", "warning"),
        ("pooled channels", "AXES_TORN", "warning"),
        ("positive weights", "CLASS_WEIGHTS_SWAPPED", "warning"),
        ("columns", "TARGET_GIVEN", "warning"),
        ("evaluated apart", "LABELS_UNRELATED", "warning"),
        ("mirrored", "MASKS_APART", "warning"),
        ("torn edges", "EDGES_NOT_OFFSET", "warning"),
        ("one-way edges", "EDGES_NOT_OFFSET", "info"),
        ("far ahead", "LABEL_SHIFT", "error"),
        ("tokens", "EVALUATION_INPUTS", "warning"),
        ("unknown tokens", "EVALUATION_INPUTS", "warning"),
        ("compared scores", "EVALUATION_INPUTS", "warning"),
        ("rounded alike", "INPUTS_ALIKE", "warning"),
        ("flat scores", "OUTPUT_RANGE", "warning"),
        *(
            (one, "GRAPH_CUT", "warning")
            for one in (
                "forgotten",
                "not carried",
                "cut between",
                "constant derivative",
                "unused update",
                "quantised",
                "flat derivative",
            )
        ),
        ("small value", "LOSS_SIGN", "warning"),
        ("evaluated scores", "DOUBLE_ACTIVATION", "error"),
    ],
)
def test_what_is_weighed_is_asked_too(probe: str, name: str, severity: str) -> None:
    both(probe, name, severity)


def test_class_weights_swapped_fires_and_gives_both_classes() -> None:
    assert "60 targets" in fires(asked("class weights", "yes").run(), "CLASS_WEIGHTS_SWAPPED", "warning").message


def test_class_weights_swapped_is_quiet_without_an_answer() -> None:
    both("class weights", "CLASS_WEIGHTS_SWAPPED")


def test_double_activation_fires_on_rates_that_are_taken_as_logarithms() -> None:
    assert "softplus" in fires(asked("rates", "yes").run(), "DOUBLE_ACTIVATION", "error").message
    both("rates", "DOUBLE_ACTIVATION", "error")


def test_own_negative_fires_and_names_the_operation() -> None:
    assert fires(asked("own negative", "yes").run(), "OWN_NEGATIVE", "warning").message.startswith("min (")


def test_own_negative_is_quiet_without_an_answer() -> None:
    both("own negative", "OWN_NEGATIVE")
    both("easiest", "OWN_NEGATIVE")
    both("picked masked", "OWN_NEGATIVE")


def test_a_schedule_that_begins_anew_is_told() -> None:
    run = replace(asked("resumed", "yes"), before=(Loaded(into="optimizer"),)).run()
    found = fires(run, "LR_IGNORED_ON_RESUME", "warning")
    assert "checkpoint['sched']" in found.fix


def test_edges_not_offset_fires_and_gives_the_nodes() -> None:
    assert "only to nodes 0 to 9, of 200" in fires(asked("edges", "yes").run(), "EDGES_NOT_OFFSET", "warning").message


def test_edges_not_offset_is_quiet_without_an_answer() -> None:
    both("edges", "EDGES_NOT_OFFSET")


def test_masks_apart_fires_and_gives_their_share() -> None:
    assert fires(asked("apart", "yes").run(), "MASKS_APART", "warning").message.startswith("70% of 90 masks")


def test_masks_apart_is_quiet_without_an_answer() -> None:
    both("apart", "MASKS_APART")


def test_loss_sign_fires_beside_another_loss_only_where_nothing_was_learned() -> None:
    evidence = {"kind": "probability of", "terms": 1, "beside": 1}
    one = Probed(probe="punished", answer="yes", evidence=evidence, file="train.py", line=7)
    fires(Training(after=(one,), loss=flat).run(), "LOSS_SIGN", "error")
    quiet(Training(after=(one,)).run(), "LOSS_SIGN")


@pytest.mark.parametrize(
    ("probe", "name", "severity", "said"),
    [
        ("outweighed", "LOSS_MIXED_REDUCTION", "warning", "from 0.32 to 0.14"),
        ("unseen errors", "LOSS_SIGN", "warning", "28 of the targets have no width"),
    ],
)
def test_what_a_loss_does_not_see_is_told_of_a_run_that_did_not_learn(
    probe: str, name: str, severity: str, said: str
) -> None:
    assert said in fires(replace(asked(probe, "yes"), loss=flat).run(), name, severity).message
    quiet(replace(asked(probe, "no"), loss=flat).run(), name)
    quiet(asked(probe, "yes").run(), name)


def test_inputs_alike_fires_where_states_are_their_own_next_ones() -> None:
    assert "its own next state" in fires(asked("unmoved", "yes").run(), "INPUTS_ALIKE", "warning").message
    quiet(asked("unmoved", "no").run(), "INPUTS_ALIKE")


def test_no_activation_fires_on_layers_that_fold() -> None:
    one = fires(asked("layers", "yes").run(), "NO_ACTIVATION", "warning")
    assert "model (8→16, 16→16, 16→10)" in one.message
    assert one.evidence["layers"] == ["8→16", "16→16", "16→10"]


def test_no_activation_is_quiet_without_an_answer() -> None:
    both("layers", "NO_ACTIVATION")


def test_outputs_are_one_fires_with_the_line_of_the_other_loss() -> None:
    assert "line 49" in fires(asked("one for two", "yes").run(), "OUTPUTS_ARE_ONE", "warning").message


def test_outputs_are_one_is_quiet_where_they_differ() -> None:
    both("one for two", "OUTPUTS_ARE_ONE")
