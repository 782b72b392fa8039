"""Rules on models that are built otherwise than they look: each fires on its fault, and is quiet on what is like it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from answer_runs import asked
from anybatch.doctor.diagnosing import diagnose
from anybatch.records.events import Ended, Forward
from anybatch.records.lossfacts import Evaluated, Probed, Walk
from anybatch.records.samples import Activations, ModuleSample
from anybatch.records.tables import ModuleFacts
from number_runs import Training, call, falling, fires, found, silent
from rule_runs import RunBuilder, findings

REGRESSION: dict[str, Any] = {"low": 0.0, "high": 2.0, "target_mean": 0.0, "target_std": 1.0}


def walked(loss: Callable[[int], float] | None = None, **values: Any) -> Training:
    """A training whose graph shows something at every fifth step."""
    walk = Walk(nodes=30, **values)
    training = Training(every=lambda step: [walk] if step % 5 == 0 else [])
    training.loss = loss or training.loss
    return training


def flat(step: int) -> float:
    return 2.3 + 0.01 * (step % 3)


@pytest.mark.parametrize(
    ("activation", "low", "high"), [("relu", -3.0, 2.0), ("sigmoid", 0.0, 9.0), ("tanh", -4.0, 4.0)]
)
def test_output_range_fires_on_targets_out_of_reach(activation: str, low: float, high: float) -> None:
    training = walked(activated=((activation, "mse_loss"),))
    training.call = call("mse_loss", **REGRESSION, target_low=low, target_high=high)
    one = fires(training.run(), "OUTPUT_RANGE", "warning")
    assert activation in one.message
    assert one.evidence["high"] == high


@pytest.mark.parametrize(
    ("activation", "low", "high"),
    [("relu", 0.0, 9.0), ("relu", -0.2, 9.0), ("sigmoid", 0.0, 1.0), ("tanh", -1.1, 1.1), ("", -9.0, 9.0)],
)
def test_output_range_is_quiet_on_targets_within_reach(activation: str, low: float, high: float) -> None:
    training = walked(activated=((activation, "mse_loss"),) if activation else ())
    training.call = call("mse_loss", **REGRESSION, target_low=low, target_high=high)
    silent(training.run(), "OUTPUT_RANGE")


def test_output_range_fires_on_bounded_scores_that_do_not_learn() -> None:
    training = walked(flat, doubled=(("relu", "cross_entropy"),))
    assert "negative" in fires(training.run(), "OUTPUT_RANGE", "warning").message
    for activation, severity in (("tanh", "info"), ("relu", "warning")):  # units that are 0 learn no more
        training = walked(doubled=((activation, "cross_entropy"),))
        assert [one.severity for one in found(training.run(), "OUTPUT_RANGE")] == [severity]


@pytest.mark.parametrize(("end", "severity"), [(0.05, "info"), (0.9, "warning")])
def test_output_range_is_a_note_where_all_was_learned_behind_a_relu(end: float, severity: str) -> None:
    training = walked(lambda step: max(2.3 - 0.08 * step, end), doubled=(("relu", "cross_entropy"),))
    training.call = call(guess=2.3)
    assert [one.severity for one in found(training.run(), "OUTPUT_RANGE")] == [severity]


def list_of(repeated: int, *, cls: str = "ModuleList", out: int = 8) -> RunBuilder:
    built = RunBuilder()
    modules = (
        ModuleFacts(name="", cls="Net", file="net.py", line=3),
        ModuleFacts(name="blocks", cls=cls, kind="container", repeated=repeated),
        ModuleFacts(name="blocks.0", cls="Block", parameters=(0, 1)),
    )
    numbers = built.model(("blocks.0.weight", "blocks.0.bias"), modules=modules)
    samples = (
        ModuleSample(module="blocks.0.norm", cls="LayerNorm", order=0, shape=(4, 8), input_shape=(4, 8)),
        ModuleSample(module="blocks.0.out", cls="Linear", order=1, shape=(4, out), input_shape=(4, 16)),
    )
    built.add(Activations(root=0, modules=samples))
    built.optimizer(numbers)
    built.train(numbers, 6)
    return built


def test_module_repeated_fires_with_the_list_and_the_code() -> None:
    (one,) = findings(list_of(6), "MODULE_REPEATED")
    assert (one.severity, one.place.module, one.place.file, one.place.line) == ("warning", "blocks", "net.py", 3)
    assert one.fix == "model.blocks = nn.ModuleList([Block(...) for _ in range(6)])"
    (one,) = findings(list_of(2, cls="Sequential"), "MODULE_REPEATED")
    assert one.fix == "model.blocks = nn.Sequential(*[Block(...) for _ in range(2)])"


def test_module_repeated_is_quiet_on_other_lists() -> None:
    assert not findings(list_of(0), "MODULE_REPEATED")
    assert [one.severity for one in findings(list_of(6, out=3), "MODULE_REPEATED")] == ["info"]


def frozen(**facts: Any) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model()
    built.parameter(4, "encoder.lora", root=0, **{"shape": (8, 4), "requires_grad": False, "constant": 0.0, **facts})
    built.optimizer(numbers)
    built.train(numbers, 6)
    return built


def test_frozen_at_zero_fires_as_a_remark() -> None:
    (one,) = findings(frozen(), "FROZEN_AT_ZERO")
    assert (one.severity, one.place.parameters) == ("info", ("encoder.lora",))


@pytest.mark.parametrize("facts", [{"requires_grad": True}, {"constant": None}, {"constant": 1.0}, {"shape": (8,)}])
def test_frozen_at_zero_is_quiet(facts: dict[str, Any]) -> None:
    assert not findings(frozen(**facts), "FROZEN_AT_ZERO")


def normed(momentum: Any, *, training: bool = True) -> RunBuilder:
    built = RunBuilder()
    modules = (
        ModuleFacts(name="", cls="Net"),
        ModuleFacts(
            name="norm", cls="BatchNorm1d", kind="batch_norm", parameters=(2, 3),
            options={"momentum": momentum, "track_running_stats": True},
        ),
    )  # fmt: skip
    numbers = built.model(("encoder.weight", "encoder.bias", "norm.weight", "norm.bias"), modules=modules)
    built.optimizer(numbers)
    for _ in range(6):
        built.clear()
        built.forward(training=training, trained=int(training), evaluated=int(not training))
        built.backward(numbers)
        built.step()
    return built


def test_bn_momentum_fires_on_the_meaning_of_another_library() -> None:
    (one,) = findings(normed(0.99), "BN_MOMENTUM")
    assert (one.severity, one.place.module) == ("warning", "norm")
    assert one.fix == "model.norm.momentum = 0.01"


@pytest.mark.parametrize(("value", "left"), [(0.001, "96%"), (0, "100%"), (0.0, "100%")])
def test_bn_momentum_fires_where_an_evaluation_uses_what_was_there_at_the_start(value: float, left: str) -> None:
    built = normed(value)
    for _ in range(30):
        built.forward(training=True, trained=1, evaluated=0)
    assert not findings(built, "BN_MOMENTUM")
    built.forward(training=False, trained=0, evaluated=1, grad=False)
    assert not findings(built, "BN_MOMENTUM"), "the training may go on"
    built.add(Ended())
    (one,) = findings(built, "BN_MOMENTUM")
    assert (one.severity, one.fix) == ("error", "model.norm.momentum = 0.1")
    assert left in one.message


def evaluated_at(value: float, momentum: float) -> list[str]:
    norm = ModuleFacts(name="norm", cls="BatchNorm1d", kind="batch_norm", options={"momentum": momentum})

    class Normed(Training):
        def _tables(self) -> Any:
            tables = super()._tables()
            root: Any = tables[1]
            return [tables[0], dataclasses.replace(root, modules=(*root.modules, norm)), *tables[2:]]

    last = Evaluated(function="cross_entropy", value=value, items=200, guess=2.3)
    trained = Forward(root=0, rows=32, training=True, trained=1)
    every = lambda step: [trained, call(guess=2.3, value=falling(step))]  # noqa: E731
    after = (Forward(root=0, rows=32, training=False, evaluated=1, grad=False), last, Ended())
    found = diagnose(Normed(every=every, steps=200, after=after).run())
    return [one.severity for one in found if one.name == "BN_MOMENTUM"]


@pytest.mark.parametrize(("value", "severity"), [(0.1, "info"), (2.0, "warning")])
def test_bn_momentum_fires_where_the_evaluation_is_far_worse(value: float, severity: str) -> None:
    assert evaluated_at(value, 0.99) == [severity]


def test_bn_momentum_of_zero_is_fine_where_the_evaluation_is() -> None:
    assert evaluated_at(2.0, 0) == ["warning"]
    assert evaluated_at(0.1, 0) == []


def test_bn_momentum_is_quiet() -> None:
    for built in (normed(0.1), normed(1.0), normed(None), normed(0.99, training=False)):
        assert not findings(built, "BN_MOMENTUM")


def dropped(p: float, loss: Callable[[int], float] = flat) -> Training:
    class WithDropout(Training):
        def _tables(self) -> Any:
            tables = super()._tables()
            root: Any = tables[1]
            row = ModuleFacts(name="drop", cls="Dropout", kind="dropout", options={"p": p})
            return [tables[0], dataclasses.replace(root, modules=(*root.modules, row)), *tables[2:]]

    return WithDropout(loss=loss, backward=lambda step: {"touched": (0, 1, 2), "touched_count": 3})


def test_dropout_too_high_fires_where_the_loss_stays() -> None:
    one = fires(dropped(0.9).run(), "DROPOUT_TOO_HIGH", "warning")
    assert one.place.module == "drop"
    assert "nn.Dropout(p=0.1)" in one.fix


def test_dropout_too_high_is_quiet() -> None:
    silent(dropped(0.5).run(), "DROPOUT_TOO_HIGH")
    silent(dropped(0.9, Training().loss).run(), "DROPOUT_TOO_HIGH")


def test_loss_sign_fires_on_a_loss_without_a_bound() -> None:
    one = fires(Training(call=None, loss=lambda step: 20.0 - 1.3**step).run(), "LOSS_SIGN", "warning")
    assert one.evidence["loss_last"] < -1000
    for healthy in (lambda step: 20.0 - step, lambda step: -2.0 - 1.3**step, lambda step: 20.0 - 9000 * (step > 30)):
        silent(Training(call=None, loss=healthy).run(), "LOSS_SIGN")


def test_next_state_is_state_fires_with_the_discount() -> None:
    one = Probed(probe="same state", answer="yes", evidence={"discount": 0.98, "rows": 32})
    found = fires(Training(after=(one,)).run(), "NEXT_STATE_IS_STATE", "warning")
    assert "0.98 times the value of the same 32 states" in found.message


def test_next_state_is_state_is_quiet_without_an_answer() -> None:
    silent(Training(after=(Probed(probe="same state", answer="no"),)).run(), "NEXT_STATE_IS_STATE")


def test_head_only_penalised_fires_with_its_size() -> None:
    one = Probed(probe="only penalised", answer="yes", evidence={"rows": 128, "entries": 20})
    found = fires(Training(after=(one,)).run(), "HEAD_ONLY_PENALISED", "warning")
    assert "whichever of 128 rows the 20 outputs of this layer" in found.message


def test_head_only_penalised_is_quiet_without_an_answer() -> None:
    silent(Training(after=(Probed(probe="only penalised", answer="no"),)).run(), "HEAD_ONLY_PENALISED")


def test_flow_volume_fires_with_both_figures() -> None:
    seen = {"claimed": 0.5, "stretched": 1.2, "off": 0.8}
    one = Probed(probe="false volume", answer="yes", evidence=seen)
    assert "is 0.5 on average" in fires(Training(after=(one,)).run(), "FLOW_VOLUME", "warning").message


def test_flow_volume_is_quiet_without_an_answer() -> None:
    silent(Training(after=(Probed(probe="false volume", answer="no"),)).run(), "FLOW_VOLUME")


def test_places_alike_fires_and_names_the_row() -> None:
    found = fires(asked("one place", "yes").run(), "PLACES_ALIKE", "warning")
    assert "row 12 of a table of 200" in found.message


def test_places_alike_is_quiet_without_an_answer() -> None:
    silent(asked("one place", "no").run(), "PLACES_ALIKE")
