"""Each crash that was explained becomes one finding of its own name, at the line that has to be changed."""

from anybatch.doctor.diagnosing import diagnose
from anybatch.doctor.rules.crashes import CRASHES, OF_OTHER_FAMILIES
from anybatch.doctor.rules.registry import all_rules
from anybatch.records.events import Crashed
from number_runs import Training, fires, found, silent


def crash(name: str, **values: object) -> Training:
    """A training that ended with an exception."""
    facts = {"error": "RuntimeError", "text": "it broke\nsecond line", "message": "h is of an earlier step.",
             "cause": "It was not detached.", "fix": "h = h.detach()", "module": "rnn", "tensor": "h",
             "file": "train.py", "line": 30, "code": "loss.backward()", **values}  # fmt: skip
    return Training(steps=3, after=(Crashed(name=name, **facts),))  # type: ignore[arg-type]


def crash_fires(name: str) -> None:
    """A crash of a name is found under it, and under no other name."""
    one = fires(crash(name).run(), name, "error")
    assert (one.message, one.fix, one.place.line, one.step) == ("h is of an earlier step.", "h = h.detach()", 30, 3)
    assert [other.name for other in diagnose(crash(name).run())] == [name]


def crash_is_quiet(name: str) -> None:
    """A crash of another name, or none, is not found under it."""
    silent(crash("ANOTHER").run(), name)
    silent(Training(steps=3).run(), name)


def test_the_line_that_has_to_be_changed_is_the_place() -> None:
    elsewhere = crash("INPLACE_ON_SAVED", evidence={"origin_file": "net.py", "origin_line": 7, "version": 2})
    (one,) = found(elsewhere.run(), "INPLACE_ON_SAVED")
    assert (one.place.file, one.place.line, one.evidence["raised_at"]) == ("net.py", 7, "train.py:30")
    assert one.evidence["version"] == 2


def test_codes_of_crashes_stay() -> None:
    rules = all_rules()
    assert [rules[name].code for name in CRASHES] == [f"AB{901 + number}" for number in range(len(CRASHES))]
    assert rules["BACKWARD_TWICE_STATE"].code == "AB901"
    assert rules["UNCLASSIFIED"].code == "AB929"
    assert set(OF_OTHER_FAMILIES) <= set(rules)


def test_unclassified_fires_for_an_error_of_the_script() -> None:
    (one,) = found(crash("", message="", fix="", cause="").run(), "UNCLASSIFIED")
    assert (one.severity, one.message) == ("info", "The script ended with RuntimeError: it broke")
    assert found(crash("OF_A_LATER_VERSION").run(), "UNCLASSIFIED")


def test_unclassified_is_quiet_for_known_crashes() -> None:
    silent(crash("OUT_OF_MEMORY").run(), "UNCLASSIFIED")
    silent(crash("LOSS_NO_GRAD").run(), "UNCLASSIFIED")
    silent(Training(steps=3).run(), "UNCLASSIFIED")


def test_backward_twice_state_fires() -> None:
    crash_fires("BACKWARD_TWICE_STATE")


def test_backward_twice_state_is_quiet() -> None:
    crash_is_quiet("BACKWARD_TWICE_STATE")


def test_backward_twice_fires() -> None:
    crash_fires("BACKWARD_TWICE")


def test_backward_twice_is_quiet() -> None:
    crash_is_quiet("BACKWARD_TWICE")


def test_inplace_on_saved_fires() -> None:
    crash_fires("INPLACE_ON_SAVED")


def test_inplace_on_saved_is_quiet() -> None:
    crash_is_quiet("INPLACE_ON_SAVED")


def test_leaf_inplace_fires() -> None:
    crash_fires("LEAF_INPLACE")


def test_leaf_inplace_is_quiet() -> None:
    crash_is_quiet("LEAF_INPLACE")


def test_device_mismatch_fires() -> None:
    crash_fires("DEVICE_MISMATCH")


def test_device_mismatch_is_quiet() -> None:
    crash_is_quiet("DEVICE_MISMATCH")


def test_dtype_mismatch_fires() -> None:
    crash_fires("DTYPE_MISMATCH")


def test_dtype_mismatch_is_quiet() -> None:
    crash_is_quiet("DTYPE_MISMATCH")


def test_inference_tensor_fires() -> None:
    crash_fires("INFERENCE_TENSOR")


def test_inference_tensor_is_quiet() -> None:
    crash_is_quiet("INFERENCE_TENSOR")


def test_empty_optimizer_fires() -> None:
    crash_fires("EMPTY_OPTIMIZER")


def test_empty_optimizer_is_quiet() -> None:
    crash_is_quiet("EMPTY_OPTIMIZER")


def test_non_leaf_optimized_fires() -> None:
    crash_fires("NON_LEAF_OPTIMIZED")


def test_non_leaf_optimized_is_quiet() -> None:
    crash_is_quiet("NON_LEAF_OPTIMIZED")


def test_param_in_two_groups_fires() -> None:
    crash_fires("PARAM_IN_TWO_GROUPS")


def test_param_in_two_groups_is_quiet() -> None:
    crash_is_quiet("PARAM_IN_TWO_GROUPS")


def test_unscale_twice_fires() -> None:
    crash_fires("UNSCALE_TWICE")


def test_unscale_twice_is_quiet() -> None:
    crash_is_quiet("UNSCALE_TWICE")


def test_step_twice_scaler_fires() -> None:
    crash_fires("STEP_TWICE_SCALER")


def test_step_twice_scaler_is_quiet() -> None:
    crash_is_quiet("STEP_TWICE_SCALER")


def test_step_without_scale_fires() -> None:
    crash_fires("STEP_WITHOUT_SCALE")


def test_step_without_scale_is_quiet() -> None:
    crash_is_quiet("STEP_WITHOUT_SCALE")


def test_scaler_misused_fires() -> None:
    crash_fires("SCALER_MISUSED")


def test_scaler_misused_is_quiet() -> None:
    crash_is_quiet("SCALER_MISUSED")


def test_out_of_memory_fires() -> None:
    crash_fires("OUT_OF_MEMORY")


def test_out_of_memory_is_quiet() -> None:
    crash_is_quiet("OUT_OF_MEMORY")


def test_ddp_ready_twice_fires() -> None:
    crash_fires("DDP_READY_TWICE")


def test_ddp_ready_twice_is_quiet() -> None:
    crash_is_quiet("DDP_READY_TWICE")


def test_ddp_unfinished_fires() -> None:
    crash_fires("DDP_UNFINISHED")


def test_ddp_unfinished_is_quiet() -> None:
    crash_is_quiet("DDP_UNFINISHED")


def test_bn_one_value_fires() -> None:
    crash_fires("BN_ONE_VALUE")


def test_bn_one_value_is_quiet() -> None:
    crash_is_quiet("BN_ONE_VALUE")


def test_shape_mismatch_fires() -> None:
    crash_fires("SHAPE_MISMATCH")


def test_shape_mismatch_is_quiet() -> None:
    crash_is_quiet("SHAPE_MISMATCH")


def test_index_out_of_range_fires() -> None:
    crash_fires("INDEX_OUT_OF_RANGE")


def test_index_out_of_range_is_quiet() -> None:
    crash_is_quiet("INDEX_OUT_OF_RANGE")


def test_loss_not_scalar_fires() -> None:
    crash_fires("LOSS_NOT_SCALAR")


def test_loss_not_scalar_is_quiet() -> None:
    crash_is_quiet("LOSS_NOT_SCALAR")


def test_tensor_misused_fires() -> None:
    crash_fires("TENSOR_MISUSED")


def test_tensor_misused_is_quiet() -> None:
    crash_is_quiet("TENSOR_MISUSED")


def test_state_not_loaded_fires() -> None:
    crash_fires("STATE_NOT_LOADED")


def test_state_not_loaded_is_quiet() -> None:
    crash_is_quiet("STATE_NOT_LOADED")


def test_sched_past_end_fires() -> None:
    crash_fires("SCHED_PAST_END")


def test_sched_past_end_is_quiet() -> None:
    crash_is_quiet("SCHED_PAST_END")


def test_worker_died_fires() -> None:
    crash_fires("WORKER_DIED")


def test_worker_died_is_quiet() -> None:
    crash_is_quiet("WORKER_DIED")


def test_device_assert_fires() -> None:
    crash_fires("DEVICE_ASSERT")


def test_device_assert_is_quiet() -> None:
    crash_is_quiet("DEVICE_ASSERT")


def test_ckpt_changed_fires() -> None:
    crash_fires("CKPT_CHANGED")


def test_ckpt_changed_is_quiet() -> None:
    crash_is_quiet("CKPT_CHANGED")


def test_module_not_ready_fires() -> None:
    crash_fires("MODULE_NOT_READY")


def test_module_not_ready_is_quiet() -> None:
    crash_is_quiet("MODULE_NOT_READY")


def test_sparse_gradient_fires() -> None:
    crash_fires("SPARSE_GRADIENT")


def test_sparse_gradient_is_quiet() -> None:
    crash_is_quiet("SPARSE_GRADIENT")


def test_distribution_parameter_fires() -> None:
    crash_fires("DISTRIBUTION_PARAMETER")


def test_distribution_parameter_is_quiet() -> None:
    crash_is_quiet("DISTRIBUTION_PARAMETER")
