"""Rules of the family modes: each fires on a run that has the fault, and is quiet on one that only looks like it."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from anybatch.records.events import DropoutCall
from anybatch.records.lossfacts import Probed
from anybatch.records.samples import Activations, Buffers, ModuleSample
from anybatch.records.tables import ModuleFacts
from rule_runs import FILE, LINES, RunBuilder, findings, simple

MODULES = (
    ModuleFacts(name="", cls="Net"),
    ModuleFacts(name="drop", cls="Dropout", kind="dropout", options={"p": 0.5}),
    ModuleFacts(name="norm", cls="BatchNorm1d", kind="batch_norm", parameters=(2, 3)),
)
TRAIN: dict[str, Any] = {"training": True, "trained": 2, "evaluated": 0}
EVAL: dict[str, Any] = {"training": False, "trained": 0, "evaluated": 2, "evaluating": ("drop", "norm")}
FROZEN_NORM: dict[str, Any] = {"training": True, "trained": 1, "evaluated": 1, "evaluating": ("norm",)}


def modes(sequence: Sequence[Mapping[str, Any]], modules: Sequence[ModuleFacts] = MODULES) -> RunBuilder:
    """One step for each mode of the sequence."""
    built = RunBuilder()
    numbers = built.model(("encoder.weight", "encoder.bias", "norm.weight", "norm.bias"), modules=modules)
    built.optimizer(numbers)
    for facts in sequence:
        built.clear()
        built.forward(**facts)
        built.backward(numbers)
        built.step()
    return built


def test_eval_in_training_fires_after_an_evaluation_that_did_not_go_back() -> None:
    (one,) = findings(modes([TRAIN] * 4 + [EVAL] * 5), "EVAL_IN_TRAINING")
    assert (one.severity, one.evidence["since"], one.place.line) == ("error", 4, LINES["forward"])
    assert one.fix.startswith("model.train()")


def test_eval_in_training_is_quiet_from_the_first_step_on_and_in_single_steps() -> None:
    for sequence in ([EVAL] * 8, [TRAIN, EVAL] * 5, [TRAIN] * 8, [TRAIN] * 8 + [EVAL] * 2, [FROZEN_NORM] * 8):
        assert not findings(modes(sequence), "EVAL_IN_TRAINING")


def test_eval_in_training_is_a_remark_for_norms_that_are_frozen_later() -> None:
    found = findings(modes([TRAIN] * 4 + [FROZEN_NORM] * 5), "EVAL_IN_TRAINING")
    assert [one.severity for one in found] == ["info"]


def taught(*, target: bool = True) -> RunBuilder:
    """A teacher that is trained first, and whose parameters are in the optimizer of a student after that."""
    built = RunBuilder()
    own = built.model(("encoder.weight", "norm.weight"), modules=MODULES, variable="teacher")
    built.optimizer(own)
    for mode in [TRAIN] * 4 + [EVAL] * 6:
        if mode is EVAL and len(built.parameters) == 2:
            students = built.model(("encoder.weight", "norm.weight"), modules=MODULES, root=1, variable="student")
            built.optimizer((*students, *own), number=1, variable="adam")
        built.forward(0, **mode)
        if mode is EVAL:
            built.forward(1, **TRAIN)
            built.loss(function="kl_div", target_requires_grad=target)
        built.backward((0, 1, 2, 3) if mode is EVAL else own)
        built.step(int(mode is EVAL))
    return built


@pytest.mark.parametrize(("target", "severity"), [(True, "error"), (False, "warning")])
def test_eval_in_training_fires_on_a_teacher_that_is_trained_with_its_student(target: bool, severity: str) -> None:
    (one,) = findings(taught(target=target), "EVAL_IN_TRAINING")
    assert (one.severity, one.evidence["beside"], one.place.module) == (severity, "student", "teacher")
    assert "no_grad" in one.fix
    assert "train()" not in one.fix


def test_eval_in_training_fires_with_train_on_two_parts_of_which_one_did_not_go_back() -> None:
    built = RunBuilder()
    own = built.model(("encoder.weight", "norm.weight"), modules=MODULES, variable="encoder")
    others = built.model(("encoder.weight", "norm.weight"), modules=MODULES, root=1, variable="decoder")
    built.optimizer((*own, *others))
    for mode in [TRAIN] * 12 + [EVAL] * 6:
        built.forward(0, **mode)
        built.forward(1, **TRAIN)
        built.backward((*own, *others))
        built.step()
    (one,) = findings(built, "EVAL_IN_TRAINING")
    assert one.fix.startswith("encoder.train()")


@pytest.mark.parametrize("follows", [True, False])
def test_modes_count_where_a_functional_dropout_follows_them(follows: bool) -> None:
    modules, built = MODULES[:1], RunBuilder()
    numbers = built.model(("encoder.weight",), modules=modules)
    built.optimizer(numbers)
    for step in range(18):
        if step == 0:
            built.add(DropoutCall(root=0, p=0.5, training=True, root_training=follows, file=FILE, line=15))
        for _ in range(4 if step in (2, 5, 8) else 0):
            built.forward(line=90, grad=False)
        built.forward(training=step < 10)
        built.backward(numbers)
        built.step()
    trained, evaluated = (findings(built, name) for name in ("EVAL_IN_TRAINING", "TRAIN_IN_EVAL"))
    assert [one.evidence["since"] for one in trained] == [10] * follows
    assert [one.evidence["calls"] for one in evaluated] == [12] * follows
    assert all("F.dropout (train.py:15)" in one.message for one in (*trained, *evaluated))


@pytest.mark.parametrize(("frozen", "severity"), [(30, "info"), (3, "error")])
def test_eval_in_training_is_a_remark_for_what_was_frozen_in_evaluation_mode_before(frozen: int, severity: str) -> None:
    built = RunBuilder()
    own = built.model(("encoder.weight", "norm.weight"), modules=MODULES, variable="backbone")
    head = built.model(("weight",), root=1, variable="head")
    built.optimizer((*own, *head))
    for mode, used in [(TRAIN, (*own, *head))] * 4 + [(EVAL, head)] * frozen + [(EVAL, (*own, *head))] * 6:
        built.forward(0, **mode)
        built.forward(1)
        built.backward(used)
        built.step()
    assert [one.severity for one in findings(built, "EVAL_IN_TRAINING")] == [severity]


def evaluated(calls: int, every: int = 6, steps: int = 18, **facts: Any) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model(modules=MODULES)
    built.optimizer(numbers)
    for step in range(1, steps + 1):
        built.clear()
        built.forward(**TRAIN)
        built.backward(numbers)
        built.step()
        for _ in range(calls if step % every == 0 else 0):
            built.forward(line=90, **TRAIN | {"grad": False} | facts)
    return built


@pytest.mark.parametrize(("calls", "every"), [(4, 6), (1, 6), (3, 9)])
def test_train_in_eval_fires_on_evaluations_with_dropout(calls: int, every: int) -> None:
    (one,) = findings(evaluated(calls, every), "TRAIN_IN_EVAL")
    assert one.place.line == 90
    assert "drop" in one.message


def test_train_in_eval_is_quiet_on_calls_of_each_step_and_without_such_modules() -> None:
    quiet = (evaluated(1, 1), evaluated(4, 1), evaluated(1, 9), evaluated(4, trained=0), evaluated(4, **EVAL), simple())
    for built in quiet:
        assert not findings(built, "TRAIN_IN_EVAL")


def test_train_in_eval_is_quiet_on_several_calls_on_one_batch_and_on_other_models() -> None:
    built = evaluated(4)
    built.add(Probed(probe="drawn again", root=0, answer="yes", evidence={"calls": 4}))
    assert not findings(built, "TRAIN_IN_EVAL")
    teacher = modes([TRAIN] * 9)
    teacher.model(("weight",), root=1, variable="teacher")
    for _ in range(6):
        teacher.forward(1, **TRAIN | {"grad": False})
    assert not findings(teacher, "TRAIN_IN_EVAL")


@pytest.mark.parametrize(("mode", "before", "count"), [(TRAIN, True, 1), (EVAL, True, 0), (TRAIN, False, 0)])
def test_train_in_eval_fires_on_a_teacher_that_was_trained_and_goes_on_in_training_mode(
    mode: dict[str, Any], before: bool, count: int
) -> None:
    built = RunBuilder()
    teachers = built.model(("encoder.weight", "norm.weight"), modules=MODULES, variable="teacher")
    built.optimizer(teachers)
    students = built.model(("encoder.weight", "norm.weight"), modules=MODULES, root=1, variable="student")
    for step in range(60):
        if step < 10 and before:
            built.forward(0, **TRAIN)
            built.backward(teachers)
            built.step()
            continue
        if step == 10:
            built.optimizer(students, number=1, variable="adam")
        built.forward(0, **mode | {"grad": False})
        built.forward(1, **TRAIN)
        built.backward(students)
        built.step(1 if step >= 10 else 0)
    found = findings(built, "TRAIN_IN_EVAL")
    assert len(found) == count
    assert not found or found[0].fix.startswith("teacher.eval()")


def dropped(*, training: bool, root_training: bool, p: float = 0.1) -> RunBuilder:
    built = simple()
    for _ in range(4):
        built.add(
            DropoutCall(
                root=0, module="block", p=p, training=training, root_training=root_training, file=FILE, line=15
            )
        )  # fmt: skip
    return built


def test_dropout_always_on_fires_at_the_line_of_the_call() -> None:
    (one,) = findings(dropped(training=True, root_training=False), "DROPOUT_ALWAYS_ON")
    assert (one.place.module, one.place.line, one.evidence["calls"]) == ("block", 15, 4)
    assert "training=self.training" in one.fix


def test_dropout_always_on_is_quiet_in_training_and_without_probability() -> None:
    assert not findings(dropped(training=True, root_training=True), "DROPOUT_ALWAYS_ON")
    assert not findings(dropped(training=True, root_training=False, p=0.0), "DROPOUT_ALWAYS_ON")
    assert not findings(dropped(training=False, root_training=True), "DROPOUT_ALWAYS_ON")


def test_dropout_never_on_fires_on_evaluation_mode_from_the_first_step_on() -> None:
    (one,) = findings(modes([EVAL] * 8), "DROPOUT_NEVER_ON")
    assert one.fix == "model.train()  # before the loop"
    assert findings(dropped(training=False, root_training=True), "DROPOUT_NEVER_ON")


def test_dropout_never_on_is_quiet_without_dropout_and_where_it_drops() -> None:
    only_norms = (MODULES[0], MODULES[2])
    for built in (modes([EVAL] * 8, only_norms), modes([TRAIN] * 8), modes([FROZEN_NORM] * 8), modes([EVAL] * 3)):
        assert not findings(built, "DROPOUT_NEVER_ON")


def drift(*, touched: bool = False, written: bool = False, affine: bool = True) -> RunBuilder:
    built = RunBuilder()
    held = (2, 3) if affine else ()
    modules = (MODULES[0], ModuleFacts(name="norm", cls="BatchNorm1d", kind="batch_norm", parameters=held))
    numbers = built.model(("head.weight", "head.bias", "norm.weight", "norm.bias"), modules=modules)
    for number in (2, 3):
        built.parameter(number, built.parameters[number].name, root=0, requires_grad=False, role="norm")
    built.optimizer(numbers[:2])
    for index in range(4):
        built.train(numbers if touched else numbers[:2], 1)
        built.add(Buffers(root=0, moved=("norm",), frozen=("norm",)))
        built.norms(numbers, index, since=(2, 3) if written else ())
    return built


def test_frozen_bn_drift_fires_with_the_module() -> None:
    (one,) = findings(drift(), "FROZEN_BN_DRIFT")
    assert one.place.module == "norm"
    assert one.fix.startswith("model.norm.eval()")


def test_frozen_bn_drift_is_quiet_on_targets_toggled_nets_and_plain_norms() -> None:
    for built in (drift(touched=True), drift(written=True), drift(affine=False), simple()):
        assert not findings(built, "FROZEN_BN_DRIFT")


def small(shapes: Sequence[tuple[int, ...]], *, training: bool = True) -> RunBuilder:
    built = modes([TRAIN] * 4)
    for shape in shapes:
        sample = ModuleSample(module="norm", cls="BatchNorm2d", order=0, input_shape=shape, training=training)
        built.add(Activations(root=0, modules=(sample,)))
    return built


def test_bn_tiny_batch_fires_on_two_values() -> None:
    (one,) = findings(small([(2, 16)] * 4), "BN_TINY_BATCH")
    assert one.evidence["values"] == [2, 2, 2, 2]


def test_bn_tiny_batch_is_quiet_on_maps_last_batches_and_frozen_norms() -> None:
    assert not findings(small([(1, 16, 8, 8)] * 4), "BN_TINY_BATCH")
    assert not findings(small([(32, 16)] * 4 + [(2, 16)]), "BN_TINY_BATCH")
    assert not findings(small([(2, 16)] * 4, training=False), "BN_TINY_BATCH")


@pytest.mark.parametrize("frozen", [True, False])
def test_eval_in_training_is_quiet_where_what_is_in_evaluation_mode_gets_no_gradient_any_more(frozen: bool) -> None:
    """A net that was trained, and stays as it is but for a new last layer."""
    built = RunBuilder()
    own = built.model(("encoder.weight", "norm.weight", "head.weight"), modules=MODULES)
    built.optimizer(own)
    for mode in [TRAIN] * 4 + [FROZEN_NORM] * 6:
        built.forward(0, **mode)
        built.backward(own[2:] if mode is FROZEN_NORM and frozen else own)
        built.step()
    assert bool(findings(built, "EVAL_IN_TRAINING")) is not frozen


def test_eval_in_training_fires_where_norms_never_had_a_gradient() -> None:
    """What they are in while they are frozen says nothing of what was meant."""
    built = RunBuilder()
    own = built.model(("encoder.weight", "norm.weight", "head.weight"), modules=MODULES)
    built.optimizer(own)
    for mode in [TRAIN] * 4 + [EVAL] * 6:
        built.forward(0, **mode)
        built.backward((own[0], own[2]))
        built.step()
    assert [one.severity for one in findings(built, "EVAL_IN_TRAINING")] == ["error"]
