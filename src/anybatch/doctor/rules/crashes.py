"""Rules of the family crashes: the script ended with an exception that was explained with what was alive then."""

# The names that a ``Crashed`` fact may bear:
#   rules of this family: BACKWARD_TWICE_STATE, INPLACE_ON_SAVED, LEAF_INPLACE, DEVICE_MISMATCH, DTYPE_MISMATCH,
#     INFERENCE_TENSOR, EMPTY_OPTIMIZER, NON_LEAF_OPTIMIZED, PARAM_IN_TWO_GROUPS, UNSCALE_TWICE, STEP_TWICE_SCALER,
#     STEP_WITHOUT_SCALE, OUT_OF_MEMORY, DDP_READY_TWICE, BN_ONE_VALUE, SHAPE_MISMATCH, INDEX_OUT_OF_RANGE,
#     UNCLASSIFIED (an empty name counts as this one)
#   rules of the family graph, which reads ``Crashed`` too: LOSS_NO_GRAD, NO_GRAD_ACTIVE, CKPT_NO_INPUT_GRAD
#   rule of the family numerics: NAN_IN_BACKWARD (anomaly mode: "returned nan values in its 0th output")
