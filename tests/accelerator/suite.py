"""The tests of the engine on an accelerator: whatever they make lies there, since it is the default device.

``scripts/test --device sim`` runs them on the test accelerator, ``--device cuda`` on a GPU; what can't
run there is skipped, and said at the end.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerator import sim

DEVICE = os.environ.get("ANYBATCH_TEST_DEVICE", "sim")

FILES = (
    # batches
    "test_bad_arguments", "test_bad_input", "test_layout_detection", "test_layout_named", "test_layout_time_first",
    "test_layout_tuples", "test_trees", "test_whole_batches", "test_windows",
    # losses
    "test_coupled", "test_coupled_faults", "test_coupled_passes", "test_cut", "test_cut_memory", "test_cut_old_ways",
    "test_cut_rows", "test_cut_steps", "test_cut_weighting", "test_gradients_in_losses", "test_losses", "test_overtime",
    "test_overtime_carry", "test_overtime_random", "test_parameters", "test_several_losses",
    # memory and plans
    "test_checkpointing", "test_freed", "test_optimizations_loss", "test_optimizations_offload",
    "test_optimizations_recompute", "test_plan_loops",
    # steps and updates
    "test_batchnorm_policies", "test_boundary", "test_exactness", "test_interrupted_updates", "test_precision",
    "test_repeated", "test_resume", "test_retries", "test_several_optimizers", "test_states", "test_transaction",
    # proofs and certificates
    "test_certificate", "test_certificate_counts", "test_certificate_grouped", "test_certificate_isolation",
    "test_certificate_matrix", "test_certificate_modules", "test_certificate_random", "test_certificate_state",
    "test_proof", "test_proof_causes", "test_proof_gpu", "test_proof_passes",
    "test_noise_scale",
)  # fmt: skip

_ASSERTS = "an index that is out of range stops the device for the rest of the process"
_SMALL_BUDGET = "their budgets are less than the segment of 2 MiB that the device's allocator takes at least"
_ON_HOST = "they name devices of the host, or internals that are given tensors of it"
_NUMPY = "arrays of NumPy lie on the host, and these tests take them for tensors of the device"
_LENGTHS = "packed sequences want their lengths on the host, where these tests do not make them"
ANYWHERE = {
    "recurrent]": _LENGTHS, "packed": _LENGTHS,
    **dict.fromkeys(
        ("test_precision.py::test_autocast", "[autocast", "autocast]"),
        "what they are compared with runs under autocast of the host",
    ),
    **dict.fromkeys(
        ("arrays", "numpy", "generator_of_its_own", "test_buffers_are_changed_as_in_the_loop"), _NUMPY,
    ),
    **dict.fromkeys(
        ("a tight budget", "test_a_budget_cuts_along", "in_no_part[planned]", "RepeatedBackward]",
         "test_a_plan_with_anything_wrong", "test_blocks_with_numbers", "test_the_plan_is_that_of_the_step"),
        _SMALL_BUDGET,
    ),
    **dict.fromkeys(
        ("[devices]", "one_of_several_devices", "test_the_leaf_of_a_cut_is_no_parameter",
         "test_parts_make_up_the_whole", "test_objects_that_can_be_moved", "in a function]"), _ON_HOST,
    ),
}  # fmt: skip
"""Parts of names of tests, and why these are not run on any device."""

ON_SIM = {
    **dict.fromkeys(
        ("sparse", "test_embeddings[True", "test_what_could_not_be_compared_is_said_once"),
        "the device has no sparse tensors",
    ),
    "nested": "the device has no nested tensors",
    "complex": "the device has no kernels of its own for complex numbers",
    "test_mixed_precision_of_the_leaves": "the device has no kernels of its own for complex numbers",
    "under_ddp": "torch.distributed has no backend for the device",
}  # fmt: skip
"""The same, of the test accelerator only."""

ON_CUDA = {
    **dict.fromkeys(
        ("test_a_class_that_there_is_not_is_refused", "test_the_certificate_names_a_weighting"), _ASSERTS,
    ),
    **dict.fromkeys(
        ("test_backward_in_a_loss[True-", "-64MiB]", "called[planned]", "test_the_other_options_of_backward",
         "test_proof_gpu.py::test_a_legal_step_is_let_through_and_nothing_is_left_of_it[budget"),
        "their budgets are less than the workspaces of cuBLAS",
    ),
    **dict.fromkeys(
        ("test_overtime_carry.py::test_state_dict_goes_on", "test_dropout_is_that_of_the_loop_bitwise[loss",
         "test_overtime_random.py::test_a_scaler"),
        "their copies of recurrent layers have weights in pieces, of which torch warns",
    ),
    "test_coupled_passes.py::test_autocast": "what it is compared with runs under autocast of the host",
}  # fmt: skip
"""The same, of a GPU only."""

LEFT_OUT = {
    "test_out_of_memory": "names the operations that the host takes; engine.py lets every allocation fail instead",
    "test_budgets_held, test_plan_*, test_planning_*": "count bytes of tensors on the host; plans.py, the device's",
    "test_optimizations_together": "compares the operations of fake tensors, those of the host, with the device's",
    "test_batches, test_remedies_*": "make packed sequences while they are collected",
    "test_devices_*": "name threads of the host; engine.py has two devices",
    "test_noise_scale_hooks, test_noise_scale_steps, test_verbs_matrix, test_proof_stops": "take many minutes there",
    "tests/distributed": "torch.distributed has no backend for the device",
}
"""Files of the engine that are not run, and why."""


class _Any(type(torch.Generator)):  # type: ignore[misc] # of some versions it is one of its own
    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, torch._C.Generator)


class _There(torch.Generator, metaclass=_Any):
    """A generator of the device, which a default device does not make."""

    def __new__(cls, device: Any = DEVICE) -> "_There":
        return super().__new__(cls, device)  # type: ignore[call-arg] # its stub has no __new__


def pytest_load_initial_conftests(args: list[str]) -> None:
    """Makes the device the default one, and takes all files where none is given."""
    if DEVICE == "sim":
        sim.load()
    torch.set_default_device(DEVICE)
    if DEVICE == "cuda":
        torch.Generator = _There  # type: ignore[misc]
    if not any(".py" in one for one in args):
        args += [str(path) for path in sorted(Path("tests").rglob("test_*.py")) if path.stem in FILES]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what can't run on the device."""
    reasons = ANYWHERE | (ON_SIM if DEVICE == "sim" else ON_CUDA)
    for item in items:
        why = next((why for part, why in reasons.items() if part in item.nodeid), None)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says what was left out, and why."""
    skipped = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", ()))
    terminalreporter.section(f"not run on {DEVICE}")
    for why, number in skipped.most_common():
        terminalreporter.write_line(f"{number:5} tests: {why.removeprefix('Skipped: ')}")
    for files, why in LEFT_OUT.items():
        terminalreporter.write_line(f"{files}: {why}")
