"""Rules of the family amp: each fires on a run that has the fault, and is quiet on one that only looks like it."""

import math
from typing import Any

import pytest

from anybatch.doctor.diagnosing import diagnose
from rule_runs import LINES, RunBuilder, findings, simple

EMPTY: dict[str, Any] = {"tensors": 0, "norm": 0.0}


def clipped(where: str = "right", **clip: Any) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for _ in range(25):
        if where == "early":
            built.clip(**EMPTY | clip)
        built.clear()
        built.forward()
        if where == "after clearing":
            built.clip(**EMPTY | {"tensors": 4} | clip)
        built.backward(numbers)
        if where in ("right", "both"):
            built.clip(**clip)
        built.step()
        if where in ("late", "both"):
            built.clip(**{"line": 65} | clip)
    return built


def test_clip_before_unscale_fires_with_limit_and_scale() -> None:
    (one,) = findings(clipped(scaled=True, scale=65536.0, norm=70000.0), "CLIP_BEFORE_UNSCALE")
    assert one.place.line == LINES["clip"]
    assert one.fix.startswith("scaler.unscale_(optimizer)")
    assert one.evidence["times"] == 25


def test_clip_before_unscale_is_quiet_on_scaled_limits_and_without_a_scale() -> None:
    quiet: list[dict[str, Any]] = [
        {"scaled": True, "scale": 1.0},
        {"scaled": True, "scale": 1024.0, "limit": 1024.0},
        {"scale": 65536.0},
    ]
    for facts in quiet:
        assert not findings(clipped(**facts), "CLIP_BEFORE_UNSCALE")
    assert not findings(clipped(scaled=True, scale=65536.0, limit=math.inf), "CLIP_BEFORE_UNSCALE")


@pytest.mark.parametrize("where", ["late", "early", "after clearing"])
def test_clip_no_effect_fires_on_calls_that_come_too_late_or_too_early(where: str) -> None:
    (one,) = findings(clipped(where), "CLIP_NO_EFFECT")
    assert (one.severity, one.place.line) == ("error", 65 if where == "late" else LINES["clip"])


def test_clip_no_effect_fires_as_a_warning_on_parameters_of_no_optimizer() -> None:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for _ in range(4):
        built.clear()
        built.backward(numbers)
        built.clip(())
        built.step()
    assert [one.severity for one in findings(built, "CLIP_NO_EFFECT")] == ["warning"]


def test_clip_no_effect_is_quiet_on_useful_calls_and_on_measuring() -> None:
    assert not findings(clipped(), "CLIP_NO_EFFECT")
    assert not findings(clipped("both"), "CLIP_NO_EFFECT")
    assert not findings(clipped("late", limit=math.inf), "CLIP_NO_EFFECT")
    assert not findings(simple(), "CLIP_NO_EFFECT")


def test_clip_no_effect_is_quiet_on_optimizers_in_turn() -> None:
    built = RunBuilder()
    g, d = built.model(("g.weight",), variable="g"), built.model(("d.weight",), root=1, variable="d")
    built.optimizer(g, number=0)
    built.optimizer(d, number=1)
    for _ in range(5):
        for number in (1, 0):
            built.clear(number)
            built.backward(g + d if number == 0 else d)
            built.clip((number,))
            built.step(number)
    assert not findings(built, "CLIP_NO_EFFECT")


def test_clip_always_on_fires_as_a_remark() -> None:
    (one,) = findings(clipped(norm=500.0), "CLIP_ALWAYS_ON")
    assert one.severity == "info"
    assert one.evidence["median_norm"] == 500.0


def held(
    update: float, last: float, *, cls: str = "SGD", lr: float = 0.1, steps: int = 25, decay: float = 0.0
) -> RunBuilder:
    """Gradients of norm 500 that are clipped to 1, and steps of some length."""
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers, cls=cls, lr=lr, weight_decay=decay)
    for step in range(steps):
        built.clear()
        built.forward()
        built.backward(numbers, value=2.0 + (last - 2.0) * step / (steps - 1))
        built.clip(norm=500.0)
        built.norms(numbers, number=step, update=(update,) * 4)
        built.step(lrs=(lr,))
    return built


def test_clip_always_on_fires_as_a_warning_where_the_clipped_steps_change_nothing() -> None:
    (one,) = findings(held(1e-7, last=2.0), "CLIP_ALWAYS_ON")
    assert one.severity == "warning"
    assert "the loss does not fall" in one.message


def test_clip_always_on_fires_as_a_warning_where_sgd_gets_nowhere() -> None:
    """Adam divides by the length of the gradient, and many such steps lead somewhere."""
    severities = {
        (cls, steps): findings(held(6e-5, 2.0, cls=cls, steps=steps), "CLIP_ALWAYS_ON")[0].severity
        for cls, steps in (("SGD", 25), ("Adam", 25), ("SGD", 900))
    }
    assert severities == {("SGD", 25): "warning", ("Adam", 25): "info", ("SGD", 900): "info"}


@pytest.mark.parametrize(
    ("cls", "decay", "severity"), [("Adam", 10.0, "warning"), ("Adam", 1e-5, "info"), ("AdamW", 10.0, "info")]
)
def test_clip_always_on_fires_as_a_warning_where_decay_is_longer_than_what_is_left(
    cls: str, decay: float, severity: str
) -> None:
    (one,) = findings(held(1e-3, last=2.0, cls=cls, decay=decay), "CLIP_ALWAYS_ON")
    assert one.severity == severity


def test_a_rate_that_looks_too_low_follows_from_clipping() -> None:
    found = diagnose(held(1e-8, last=2.0, lr=1e-4).run)
    roots = {one.name: one.consequence_of for one in found if one.severity == "warning"}
    assert roots == {
        "CLIP_ALWAYS_ON": "", "LR_TOO_LOW": "CLIP_ALWAYS_ON", "LOSS_CONSTANT": "CLIP_ALWAYS_ON",
    }  # fmt: skip


def test_clip_always_on_is_quiet_about_short_steps_that_learn_and_about_usual_ones() -> None:
    for built in (held(1e-7, last=0.2), held(1e-3, last=2.0)):
        (one,) = findings(built, "CLIP_ALWAYS_ON")
        assert one.severity == "info"
        assert "does not fall" not in one.message


def test_clip_always_on_is_quiet_on_usual_clipping() -> None:
    assert not findings(clipped(norm=20.0), "CLIP_ALWAYS_ON")
    assert not findings(clipped(norm=5e4, scaled=True, scale=65536.0), "CLIP_ALWAYS_ON")


def half(zeros: float, *, dtype: str = "float16", scaled: bool = False, role: str = "weight") -> RunBuilder:
    built = RunBuilder()
    numbers = built.model()
    for number in numbers:
        one = built.parameters[number]
        built.parameter(number, one.name, root=0, dtype=dtype, shape=one.shape, role=role)
    built.optimizer(numbers)
    for number in range(4):
        built.train(numbers, 1, scaled=scaled)
        built.norms(numbers, number, grad_zeros=(zeros,) * 4)
    return built


def test_grad_underflow_fires_on_zeros_in_half_precision() -> None:
    (one,) = findings(half(0.8), "GRAD_UNDERFLOW")
    assert one.place.parameters == ("encoder.weight", "head.weight")


def test_grad_underflow_is_quiet_with_a_scaler_and_in_other_precisions() -> None:
    for built in (half(0.2), half(0.8, scaled=True), half(0.8, dtype="bfloat16"), half(0.8, role="embedding")):
        assert not findings(built, "GRAD_UNDERFLOW")


def scaled_steps(*, by: str = "step", unscaled: bool = False, edited: int = 0) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for _ in range(4):
        built.clear()
        built.backward(numbers, scaled=True)
        if unscaled:
            built.scaler("unscale_", 0)
        built.step(by=by, edited=edited)
        built.scaler("update")
    return built


def test_step_not_unscaled_fires_on_a_direct_step() -> None:
    (one,) = findings(scaled_steps(), "STEP_NOT_UNSCALED")
    assert one.fix.startswith("scaler.step(optimizer)")


def test_step_not_unscaled_is_quiet_on_the_scalers_own_step_and_on_unscaling() -> None:
    for built in (scaled_steps(by="scaler"), scaled_steps(unscaled=True), scaled_steps(edited=4), simple()):
        assert not findings(built, "STEP_NOT_UNSCALED")


def test_scaler_not_updated_fires_after_two_steps() -> None:
    built = simple()
    for _ in range(2):
        built.scaler("step", 0)
    assert [one.evidence["steps"] for one in findings(built, "SCALER_NOT_UPDATED")] == [2]


def test_scaler_not_updated_is_quiet_on_one_update_for_several_optimizers() -> None:
    built = simple()
    for _ in range(3):
        built.scaler("step", 0)
        built.scaler("step", 1)
        built.scaler("update")
    assert not findings(built, "SCALER_NOT_UPDATED")
