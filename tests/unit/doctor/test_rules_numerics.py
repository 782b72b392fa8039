"""Rules of the family numerics fire on their fault and are quiet on what only looks like it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anybatch.doctor.diagnosing import diagnose
from anybatch.records.events import Crashed, Scaler
from anybatch.records.findings import Finding
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.samples import NonFinite
from anybatch.records.tables import ParameterFacts
from number_runs import Training, falling, fires, found, quiet, silent


def flat(step: int) -> float:
    """A loss that does not fall."""
    return 2.3 + 0.01 * (step % 3)


def shrinking(step: int, layer: int) -> float:
    """Gradients that lose a factor of a million per layer."""
    return 1e-6 ** (2 - layer)


def test_vanishing_fires_from_the_first_step_on() -> None:
    run = Training(cls="SGD", loss=flat, layers=5, activation="Sigmoid", grad=lambda s, layer: 1e-3 ** (4 - layer),
                   ratio=lambda s, layer: 1e-3 * 1e-3 ** (4 - layer)).run()  # fmt: skip
    one = fires(run, "VANISHING", "warning")
    assert one.place.parameters == ("layers.0.weight",)
    assert "from the first step" in one.message
    assert "Sigmoid" in one.cause
    assert "ReLU" in one.fix


def test_vanishing_fires_where_it_comes_later_and_names_the_remedies_in_order() -> None:
    run = Training(loss=flat, grad=lambda step, layer: 0.1 if step < 3 or layer == 2 else 1e-12).run()
    one = fires(run, "VANISHING", "warning")
    assert "since step 3" in one.message
    words = ["warm-up", "clipping", "normalisation", "residual", "activation", "initialisation", "gated", "pretraining"]
    assert [one.fix.index(word) for word in words] == sorted(one.fix.index(word) for word in words)


def test_vanishing_fires_earlier_after_steps_that_were_far_too_long() -> None:
    thrown = lambda step, layer: 0.3 if step < 3 else 0.01  # noqa: E731
    faded = lambda step, layer: 0.1 if step < 5 or layer == 2 else 5e-6  # noqa: E731
    assert fires(Training(loss=flat, ratio=thrown, grad=faded).run(), "VANISHING", "warning").step == 7
    silent(Training(loss=flat, grad=faded).run(), "VANISHING")


def through(depth: int, factor: float = 0.1, loss: Callable[[int], float] = flat, **values: Any) -> Training:
    """A chain under Adam, which moves its first layers however small the gradient is."""
    return Training(loss=loss, layers=depth, grad=lambda step, layer: factor ** (depth - 1 - layer), **values)


def test_vanishing_fires_in_the_depth_of_a_chain_that_adam_moves_all_the_same() -> None:
    fires(through(9).run(), "VANISHING", "warning")
    constant = through(7, spread=lambda step: 3e-7).run()
    assert [one.name for one in diagnose(constant)] == ["VANISHING", "INPUT_IGNORED"]
    assert diagnose(constant)[1].consequence_of == "VANISHING"
    silent(through(7).run(), "VANISHING")
    silent(through(9, loss=falling).run(), "VANISHING")


@pytest.mark.parametrize(
    "healthy",
    {
        "converged": Training(loss=lambda step: 2.0 * 0.3**step, grad=shrinking, ratio=shrinking),
        "tiny everywhere": Training(loss=flat, grad=lambda step, layer: 1e-9, ratio=lambda step, layer: 1e-9),
        "zero at step 0": Training(loss=flat, grad=lambda step, layer: 0.0 if step == 0 and layer < 2 else 0.1),
        "never any": Training(loss=flat, grad=lambda step, layer: 0.1 if layer == 2 else 0.0, ratio=lambda s, n: 0.0),
        "Adam brings it up": Training(loss=flat, grad=shrinking),
        "comes back": Training(
            cls="SGD",
            loss=flat,
            grad=lambda s, n: 1e-4 ** (2 - n) if s < 10 else 0.1,
            ratio=lambda s, n: 1e-9 if s < 10 else 1e-3,
        ),
        "some steps": Training(loss=flat, grad=lambda step, layer: 1e-12 if step in (3, 5, 7) and layer == 0 else 0.1),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_vanishing_is_quiet(healthy: tuple[str, Training]) -> None:
    silent(healthy[1].run(), "VANISHING")


def test_exploding_fires_where_a_gradient_jumps_and_the_loss_follows() -> None:
    run = Training(grad=lambda s, n: 0.1 if s < 5 else 1e4, loss=lambda s: 2.0 if s < 6 else 1e3)
    one = fires(run.run(), "EXPLODING", "warning")
    assert one.step == 5
    assert "clip_grad_norm_(model.parameters(), 1.0)" in one.fix


def test_exploding_fires_at_the_start() -> None:
    run = Training(grad=lambda s, n: 1e5, loss=lambda s: 1e3 if s < 2 else math.nan, ratio=lambda s, n: 1.0).run()
    assert fires(run, "EXPLODING", "warning").step == 0


@pytest.mark.parametrize(
    "healthy",
    {
        "a spike without harm": Training(grad=lambda step, layer: 100.0 if step == 6 else 0.1),
        "zero before": Training(grad=lambda step, layer: 0.0 if step < 4 else 0.1),
        "converged before": Training(grad=lambda step, layer: 1e-9 if step < 9 else 1e-6, loss=lambda step: 1e-12),
        "large and learning": Training(grad=lambda step, layer: 1e4),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_exploding_is_quiet(healthy: tuple[str, Training]) -> None:
    silent(healthy[1].run(), "EXPLODING")


def test_dead_units_fires_where_a_layer_is_zero_for_all() -> None:
    run = Training(loss=flat, dead=lambda step, layer: 1.0 if layer == 1 else 0.3).run()
    one = fires(run, "DEAD_UNITS", "warning")
    assert one.place.module == "acts.1"
    assert "kaiming_normal_" in one.fix
    later = Training(loss=flat, dead=lambda step, layer: 0.95 if layer == 1 and step > 4 else 0.3).run()
    assert "since step 5" in fires(later, "DEAD_UNITS", "warning").message


def test_a_loss_that_falls_back_to_a_guess_has_not_fallen() -> None:
    spike = lambda step: (88.0, 3e4, 9e4, 16.7)[step] if step < 4 else 2.31 + 0.001 * (step % 2)  # noqa: E731
    fires(Training(loss=spike, dead=lambda step, layer: 0.97).run(), "DEAD_UNITS", "warning")


@pytest.mark.parametrize(
    "healthy",
    {
        "half": Training(loss=flat, dead=lambda step, layer: 0.5),
        "learns": Training(loss=falling, dead=lambda step, layer: 0.95),
        "few samples": Training(steps=2, loss=flat, dead=lambda step, layer: 1.0),
        "not a ReLU": Training(loss=flat, activation="Dropout", dead=lambda step, layer: 1.0),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_dead_units_is_quiet(healthy: tuple[str, Training]) -> None:
    silent(healthy[1].run(), "DEAD_UNITS")


def test_saturated_fires_where_a_tanh_is_at_its_limits() -> None:
    run = Training(loss=flat, activation="Tanh", saturated=lambda step, layer: 0.97 if layer == 0 else 0.1).run()
    assert fires(run, "SATURATED", "warning").place.module == "acts.0"


def test_saturated_is_quiet_for_outputs_and_where_the_model_learns() -> None:
    silent(Training(loss=falling, activation="Tanh", saturated=lambda step, layer: 0.97).run(), "SATURATED")
    last = Training(loss=flat, activation="Sigmoid", saturated=lambda step, layer: 0.97 if layer == 2 else 0.1)
    silent(last.run(), "SATURATED")


def bad(**values: object) -> Training:
    """A run with a number that is not finite at step 5, which ends in nan."""
    fact = NonFinite(**{"where": "forward", "module": "head", "op": "LogBackward0", **values})  # type: ignore[arg-type]
    return Training(loss=lambda s: 2.0 if s < 5 else math.nan, every=lambda step: [fact] if step == 5 else [])


def test_nan_in_forward_fires_with_the_operation_and_its_repair() -> None:
    one = fires(bad(detail="its input has 3 zeros", file="net.py", line=7).run(), "NAN_IN_FORWARD", "error")
    assert (one.step, one.place.module, one.place.line) == (5, "head", 7)
    assert "log" in one.message
    assert "clamp_min" in one.fix


def test_nan_in_forward_fires_without_the_name_of_an_operation_that_is_not_known() -> None:
    assert "op" not in fires(bad(op="").run(), "NAN_IN_FORWARD", "error").evidence
    assert fires(bad().run(), "NAN_IN_FORWARD", "error").evidence["op"] == "LogBackward0"


def test_nan_in_forward_fires_where_only_the_loss_is_known() -> None:
    run = Training(loss=lambda step: 2.0 if step < 5 else math.nan).run()
    assert "nan" in fires(run, "NAN_IN_FORWARD", "error").message


def test_nan_in_forward_is_quiet_for_masks_with_infinity() -> None:
    mask = NonFinite(where="forward", value="-inf", module="mask", loss=2.0)
    silent(Training(every=lambda step: [mask] if step == 5 else []).run(), "NAN_IN_FORWARD")
    silent(Training().run(), "NAN_IN_FORWARD")


def test_nan_in_backward_fires_where_the_loss_is_finite() -> None:
    run = bad(where="gradient", op="SqrtBackward0", loss=0.5, parameters=("head.weight",)).run()
    assert "infinite" in fires(run, "NAN_IN_BACKWARD", "error").fix
    crash = Crashed(name="NAN_IN_BACKWARD", error="RuntimeError", text="nan", message="Nan.", fix="x", cause="y",
                    evidence={"a": 1})  # fmt: skip
    assert fires(Training(after=(crash,)).run(), "NAN_IN_BACKWARD", "error").message == "Nan."


def test_nan_in_backward_is_quiet_where_a_scaler_skips() -> None:
    overflow = NonFinite(where="gradient", value="inf", loss=0.5)
    skip = Scaler(call="step", optimizer=0, skipped=True)
    silent(Training(every=lambda step: [overflow, skip] if step == 5 else []).run(), "NAN_IN_BACKWARD")


BF16 = {"dtype": "bfloat16", "role": "norm"}


def test_update_lost_precision_fires_where_entries_stay() -> None:
    run = Training(parameter=BF16, unchanged=lambda step, layer: 1.0 if layer == 1 else 0.2).run()
    one = fires(run, "UPDATE_LOST_PRECISION", "warning")
    assert one.place.parameters == ("layers.1.weight",)
    assert "autocast" in one.fix


@pytest.mark.parametrize(
    "healthy",
    {
        "float32": Training(unchanged=lambda step, layer: 1.0),
        "half of them": Training(parameter=BF16, unchanged=lambda step, layer: 0.6),
        "rows of an embedding": Training(
            parameter=BF16, unchanged=lambda s, n: 0.95, norms=lambda s: {"grad_zeros": (0.94,) * 3}
        ),
        "half of the rows": Training(
            parameter=BF16, unchanged=lambda s, n: 0.85, norms=lambda s: {"grad_zeros": (0.45,) * 3}
        ),
        "no gradient": Training(
            parameter=BF16, unchanged=lambda step, layer: 1.0, norms=lambda step: {"grad": (None,) * 3}
        ),
        "no rate": Training(parameter=BF16, unchanged=lambda step, layer: 1.0, lr=lambda step: 0.0),
        "short": Training(steps=5, parameter=BF16, unchanged=lambda step, layer: 1.0),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_update_lost_precision_is_quiet(healthy: tuple[str, Training]) -> None:
    silent(healthy[1].run(), "UPDATE_LOST_PRECISION")


def test_symmetric_init_fires_where_rows_and_gradient_rows_are_equal() -> None:
    run = Training(
        loss=flat, parameter={"constant": 0.5, "equal_rows": True}, norms=lambda s: {"equal_grad_rows": (0, 1)}
    ).run()
    one = fires(run, "SYMMETRIC_INIT", "error")
    assert one.place.parameters == ("layers.0.weight", "layers.1.weight")
    assert "model.layers[0].weight" in one.fix
    zeros = Training(parameter={"constant": 0.0, "equal_rows": True}, grad=lambda s, n: 0.0, ratio=lambda s, n: 0.0)
    assert found(zeros.run(), "SYMMETRIC_INIT")


def test_symmetric_init_fires_where_the_units_die_at_once() -> None:
    run = Training(
        parameter={"constant": 0.1, "equal_rows": True}, grad=lambda s, n: 10.0 if s < 2 else 0.0,
        norms=lambda s: {"equal_grad_rows": (0, 1) if s < 2 else ()},
    ).run()  # fmt: skip
    assert fires(run, "SYMMETRIC_INIT", "error").place.parameters == ("layers.0.weight", "layers.1.weight")


def test_symmetric_init_is_quiet_where_gradient_rows_differ() -> None:
    silent(Training(parameter={"constant": 0.0, "equal_rows": True}).run(), "SYMMETRIC_INIT")
    gate = Training(parameter={"constant": 0.0, "equal_rows": True}, grad=lambda s, n: 0.0 if s < 1 else 0.1)
    silent(gate.run(), "SYMMETRIC_INIT")
    silent(Training(norms=lambda step: {"equal_grad_rows": (0,)}).run(), "SYMMETRIC_INIT")


def test_symmetric_init_fires_on_a_table_all_of_whose_columns_are_equal() -> None:
    table = {"constant": 0.1, "role": "embedding"}
    one = fires(Training(parameter=table, norms=lambda s: {"equal_grad_rows": (0,)}).run(), "SYMMETRIC_INIT", "error")
    assert "columns of layers.0.weight (0.1) are equal" in one.message
    silent(Training(parameter=table).run(), "SYMMETRIC_INIT")  # layers behind it tell the columns apart


def test_symmetric_init_is_quiet_on_zeros_beside_a_factor_by_which_a_gradient_would_come() -> None:
    factor = ParameterFacts(parameter=9, root=0, module="layers.0", names=("layers.0.lora_A",), shape=(4, 8), numel=32)
    dead = Training(
        layers=1, parameter={"constant": 0.0, "equal_rows": True}, grad=lambda s, n: 0.0, ratio=lambda s, n: 0.0
    )
    fires(dead.run(), "SYMMETRIC_INIT", "error")
    silent(replace(dead, before=(factor,)).run(), "SYMMETRIC_INIT")


def heavy(loss: Callable[[int], float] = flat, decay: float = 5.0, cls: str = "SGD") -> Training:
    """Weights that a decay of 5 makes shorter by 2 % a step."""
    return Training(
        cls=cls,
        loss=loss,
        group={"weight_decay": decay},
        norms=lambda step: {"weight": (2.0 * 0.98**step,) * 3},
    )


def test_decay_dominates_fires_where_the_weights_shrink() -> None:
    one = fires(heavy().run(), "DECAY_DOMINATES", "warning")
    assert one.evidence["weight_decay"] == 5.0


def test_decay_dominates_is_quiet_where_the_model_learns() -> None:
    silent(heavy(falling).run(), "DECAY_DOMINATES")
    silent(heavy(decay=1e-2).run(), "DECAY_DOMINATES")
    silent(heavy(decay=0.1, cls="AdamW").run(), "DECAY_DOMINATES")
    silent(Training(loss=lambda step: 1e-12).run(), "DECAY_DOMINATES")


@pytest.mark.parametrize(
    ("by", "fix"),
    [("AdamW", "torch.optim.AdamW(..., weight_decay=0.01)"), ("Adam", "group['weight_decay'] = 0.01")],
)
def test_decay_dominates_fires_where_a_copy_learns_without_the_decay_alone(by: str, fix: str) -> None:
    evidence = {"optimizer": 0, "decay": 0.01, "loss": 6.2, "held": 2.1, "without": 0.6, "own": 2.3, "by": by,
                "other_decay": 0.01, "other_after": 0.6}  # fmt: skip
    call = LossCall(function="mse_loss", items=4000, guess=0.74, value=2.3)
    run = Training(cls="Adam", loss=lambda step: 2.3, group={"weight_decay": 0.01}, steps=120, call=call,
                   after=(Probed(probe="decay", root=-1, answer="yes", evidence=evidence),))  # fmt: skip
    one = fires(run.run(), "DECAY_DOMINATES", "warning")
    assert "from 6.2 to 2.1 with it, and to 0.6 without" in one.message
    assert fix in one.fix
    silent(replace(run, loss=falling, call=replace(call, value=0.0)).run(), "DECAY_DOMINATES")  # it learned


def test_decay_dominates_fires_on_a_share_of_the_weights_at_which_the_loss_stands_still() -> None:
    """6 % of the weights at each step leave them a memory of 16 steps: the loss falls and then stays far from zero."""
    taken = replace(
        heavy(lambda step: max(0.4, 1.0 - 0.05 * step), decay=20.0, cls="AdamW"), lr=lambda step: 3e-3, steps=120
    )
    one = fires(taken.run(), "DECAY_DOMINATES", "warning")
    assert one.evidence["share_of_a_step"] == pytest.approx(0.06)
    assert "takes 0.06 of the weights" in one.message
    going_on = replace(taken, loss=lambda step: 2.0 / (1 + 0.02 * step))
    fires(going_on.run(), "DECAY_DOMINATES", "info")
    fires(replace(taken, steps=26).run(), "DECAY_DOMINATES", "info")  # too short to say that it stands still


def test_decay_dominates_is_quiet_where_a_usual_decay_meets_a_loss_that_stands_still() -> None:
    stands = heavy(lambda step: max(0.4, 1.0 - 0.05 * step), decay=0.1, cls="AdamW")
    silent(replace(stands, steps=120).run(), "DECAY_DOMINATES")
    coupled = heavy(lambda step: max(0.4, 1.0 - 0.05 * step), decay=60.0, cls="Adam")
    silent(replace(coupled, steps=120).run(), "DECAY_DOMINATES")


def test_backend_no_write_fires_where_no_entry_changes() -> None:
    run = Training(loss=flat, unchanged=lambda s, n: float(n == 1), ratio=lambda s, n: 0.0 if n == 1 else 1e-3).run()
    one = fires(run, "BACKEND_NO_WRITE", "error")
    assert one.place.parameters == ("layers.1.weight",)


@pytest.mark.parametrize(
    "healthy",
    {
        "too low a rate": Training(lr=lambda step: 1e-12, unchanged=lambda s, n: 1.0, ratio=lambda s, n: 0.0),
        "no gradient": Training(grad=lambda s, n: 0.0, unchanged=lambda s, n: 1.0, ratio=lambda s, n: 0.0),
        "every other step": Training(unchanged=lambda s, n: float(s % 2), ratio=lambda s, n: 1e-3 * (1 - s % 2)),
        "skipped": Training(
            unchanged=lambda s, n: 1.0, ratio=lambda s, n: 0.0, norms=lambda s: {"state_moved": (False,) * 3}
        ),
        "short": Training(steps=4, unchanged=lambda s, n: 1.0, ratio=lambda s, n: 0.0),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_backend_no_write_is_quiet(healthy: tuple[str, Training]) -> None:
    silent(healthy[1].run(), "BACKEND_NO_WRITE")


def test_a_short_healthy_run_is_silent_everywhere() -> None:
    from anybatch.doctor.diagnosing import diagnose

    findings: list[Finding] = [one for steps in (1, 2, 10, 60) for one in diagnose(Training(steps=steps).run())]
    assert findings == []
    quiet(Training().run(), "LR_TOO_HIGH")
