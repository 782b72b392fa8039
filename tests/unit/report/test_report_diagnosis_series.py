"""What is drawn and tabulated of a run: that nothing which stands out is lost, and that it stays short."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.records.events import Backward, Clipped, Epoch, Forward, Loaded, Scaler, Stepped
from anybatch.records.lines import Fact
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, Memory, ModuleSample, Norms
from anybatch.records.tables import GroupFacts, OptimizerFacts, ParameterFacts, Root
from anybatch.report.flow import MOST_COLUMNS, MOST_ROWS, flow_of
from anybatch.report.loop import MOST_CALLS, calls_of
from anybatch.report.series import MOST_MODULES, outputs_of, series_of, thinned
from diagnosis_samples import FILE, run_of

ANY = st.floats(allow_nan=True, allow_infinity=True)


def parameter(number: int, name: str, module: str = "", root: int = 0, **more: object) -> ParameterFacts:
    return ParameterFacts(parameter=number, names=(name,), root=root, module=module, shape=(4, 4), numel=16, **more)  # type: ignore[arg-type]


def optimizer(number: int, *parameters: int, variable: str = "") -> OptimizerFacts:
    return OptimizerFacts(optimizer=number, variable=variable, groups=(GroupFacts(parameters=parameters, lr=0.1),))


def norms(
    number: int, grads: dict[int, float | None], by: int = 0, weight: float = 4.0, update: float = 0.004
) -> Norms:
    count = len(grads)
    return Norms(
        optimizer=by, number=number, step=number, parameters=tuple(grads), grad=tuple(grads.values()),
        weight=(weight,) * count, update=(update,) * count,
    )  # fmt: skip


def rows(run: Run) -> dict[str, tuple[float | None, ...]]:
    return {row.name: row.values for row in flow_of(run).rows}


def same(one: object, other: object) -> bool:
    return repr(one) == repr(other)  # nan is equal to nan here


# The flow.


def test_an_optimizer_that_takes_over_is_drawn_behind_the_one_before() -> None:
    tables = [parameter(0, "a.weight", "a"), optimizer(0, 0), optimizer(1, 0)]
    before = [fact for n in (0, 1, 2) for fact in (Stepped(optimizer=0, number=n, step=n), norms(n, {0: 1.0 + n}))]
    begun = [Stepped(optimizer=1, number=n, step=3 + n) for n in (0, 1)]
    run = Run([*tables, *before, *begun, norms(0, {0: 8.0}, by=1), norms(1, {0: 9.0}, by=1)])
    flow = flow_of(run)
    assert (flow.steps, rows(run)) == ((0, 1, 2, 3, 4), {"a": (1.0, 2.0, 3.0, 8.0, 9.0)})
    assert {curve.steps for curve in series_of(run).norms} == {(0, 1, 2), (3, 4)}


def test_a_player_that_steps_less_often_is_drawn_where_it_stepped() -> None:
    often = [Stepped(optimizer=0, number=n, step=n) for n in range(9)]
    seldom = [Stepped(optimizer=1, number=n, step=3 * n + 3) for n in range(3)]
    run = Run([parameter(0, "a.weight", "a"), optimizer(1, 0), *often, *seldom, norms(2, {0: 1.0}, by=1)])
    assert flow_of(run).steps == (9,)


def test_none_zero_small_and_not_finite_stay_apart() -> None:
    kinds: tuple[float | None, ...] = (None, 0.0, 1e-200, 1e200, math.inf, math.nan)
    for norm in kinds:
        values = rows(Run([parameter(0, "a.weight", "a"), optimizer(0, 0), norms(0, {0: norm})]))["a"]
        assert same(values, (norm,))
    both = Run([parameter(0, "a.w", "a"), parameter(1, "a.b", "a"), optimizer(0, 0, 1), norms(0, {0: 1e-200, 1: None})])
    assert rows(both)["a"] == (1e-200,)  # its square would be zero
    assert rows(Run([*both.facts[:3], norms(0, {0: 3e200, 1: 4e200})]))["a"] == pytest.approx((5e200,))
    assert math.isnan(rows(Run([*both.facts[:3], norms(0, {0: math.inf, 1: math.nan})]))["a"][0] or 0)


def test_a_gradient_is_taken_from_the_step_of_the_optimizer_that_has_it() -> None:
    facts: list[Fact] = [parameter(0, "generator.weight", "generator"), parameter(1, "critic.weight", "critic")]
    facts += [optimizer(0, 0), optimizer(1, 1), norms(0, {1: 99.0, 0: 1.0}), norms(0, {0: 77.0, 1: 2.0}, by=1)]
    assert rows(Run(facts)) == {"generator": (1.0,), "critic": (2.0,)}


def test_one_that_no_optimizer_has_is_shown_and_one_that_is_frozen_is_not() -> None:
    facts: list[Fact] = [parameter(0, "a.weight", "a"), parameter(1, "b.weight", "b", requires_grad=False)]
    found = rows(Run([*facts, parameter(2, "c.weight", "c"), optimizer(0, 0), norms(0, {0: 1.0, 1: None, 2: 3.0})]))
    assert found == {"a": (1.0,), "c": (3.0,)}


def test_layers_come_in_the_order_of_the_forward() -> None:
    names = ("head", "encoder", "stem", "never")
    facts: list[Fact] = [parameter(index, f"{name}.weight", name) for index, name in enumerate(names)]
    facts += [parameter(9, "optimizer.param_groups[0]['params'][0]", root=-1)]
    order = (ModuleSample(module=name, cls="L", order=place) for place, name in enumerate(("stem", "encoder", "head")))
    facts += [Activations(root=0, modules=tuple(order)), norms(0, dict.fromkeys((9, 0, 1, 2, 3), 1.0))]
    found = list(rows(Run(facts)))
    assert [name for name in found if name != "never"] == ["stem", "encoder", "head", facts[4].name]  # type: ignore[attr-defined]
    without = Run([fact for fact in facts if not isinstance(fact, Activations)])
    assert list(rows(without))[:4] == list(names)


def test_many_layers_are_put_together_in_order_and_those_without_gradient_are_not_hidden() -> None:
    layers = 300
    facts: list[Fact] = [parameter(index, f"net.{index}.weight", f"net.{index}") for index in range(layers)]
    grads: dict[int, float | None] = {
        index: None if index == 150 else 0.0 if index == 160 else 1.0 for index in range(layers)
    }
    flow = flow_of(Run([*facts, norms(0, grads)]))
    assert len(flow.rows) <= MOST_ROWS
    assert flow.layers == layers
    assert sum(row.parameters for row in flow.rows) == layers
    named = {row.name: row.values for row in flow.rows}
    assert named["net.150"] == (None,)
    assert named["net.160"] == (0.0,)
    first = [int(row.name.split(".")[1].split(" ")[0]) for row in flow.rows]
    assert first == sorted(first)


def test_layers_with_common_prefixes_are_put_together_by_them() -> None:
    names = [f"block.{block}.part.{part}" for block in range(20) for part in range(10)]
    facts: list[Fact] = [parameter(index, f"{name}.weight", name) for index, name in enumerate(names)]
    flow = flow_of(Run([*facts, norms(0, dict.fromkeys(range(200), 2.0))]))
    assert [row.name for row in flow.rows][:2] == ["block.0.part.* (10 layers)", "block.1.part.* (10 layers)"]
    assert flow.rows[0].values == pytest.approx((math.sqrt(10) * 2.0,))
    assert len(flow.rows) == 20
    grads: dict[int, float | None] = dict.fromkeys(range(200), 2.0)
    assert rows(Run([*facts, norms(0, grads | {25: None})]))["block.2.part.5"] == (None,)


@given(st.integers(1, 400), st.integers(0, 399))
def test_many_steps_are_thinned_and_the_first_that_is_not_finite_stays(count: int, odd: int) -> None:
    steps = [5 * index for index in range(count)]
    facts: list[Fact] = [parameter(0, "a.weight", "a")]
    facts += [norms(step, {0: math.nan if index == odd else 1.0}) for index, step in enumerate(steps)]
    flow = flow_of(Run(facts))
    assert len(flow.steps) == min(count, MOST_COLUMNS)
    assert list(flow.steps) == sorted(set(flow.steps))
    assert set(steps[:10]) <= set(flow.steps)
    assert flow.steps[-1] == steps[-1]
    assert flow.total == count
    if odd < count:
        assert math.isnan(flow.rows[0].values[flow.steps.index(steps[odd])] or 0)


# Curves.


@given(st.lists(ANY, max_size=3000), st.integers(8, 240))
def test_thinning_keeps_the_ends_the_extremes_and_the_first_that_is_not_finite(values: list[float], most: int) -> None:
    points = list(enumerate(values))
    kept = thinned(points, most)
    assert len(kept) <= max(most, 8)
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert all(same(values[step], value) for step, value in kept)
    finite = [value for value in values if math.isfinite(value)]
    left = [value for _, value in kept if math.isfinite(value)]
    if finite:
        assert (min(finite), max(finite)) == (min(left), max(left))
    first = next((step for step, value in points if not math.isfinite(value)), None)
    assert first is None or first in [step for step, _ in kept]
    if points:
        assert (kept[0][0], kept[-1][0]) == (0, len(points) - 1)


def test_losses_are_told_apart_by_line_and_averaged_over_a_step() -> None:
    facts: list[Fact] = [Backward(value=value, step=0, file=FILE, line=3) for value in (1.0, 3.0)]
    facts += [Backward(value=7.0, step=1, file=FILE, line=3), Backward(value=5.0, step=0, file=FILE, line=9)]
    facts += [Backward(value=None, step=2, file=FILE, line=3), Backward(value=1.0, function="grad", file=FILE, line=4)]
    losses = series_of(Run(facts)).losses
    assert [(curve.name, curve.values) for curve in losses] == [("train.py:3", (2.0, 7.0)), ("train.py:9", (5.0,))]
    odd = series_of(Run([Backward(value=value, line=3) for value in (math.inf, -math.inf)])).losses[0]
    assert math.isnan(odd.values[0])


def test_learning_rates_that_are_equal_are_one_curve() -> None:
    facts: list[Fact] = [optimizer(0, 0, variable="adam")]
    facts += [Stepped(optimizer=0, number=step, lrs=(0.1, 0.1, 0.2)) for step in range(3)]
    assert [curve.name for curve in series_of(Run(facts)).rates] == ["adam, group 0 and 1 more", "adam, group 2"]


def test_the_norm_is_of_the_optimizers_own_gradients() -> None:
    facts: list[Fact] = [parameter(0, "a", "a"), parameter(1, "b", "b"), optimizer(0, 0, variable="adam")]
    run = Run(
        [
            *facts,
            norms(0, {0: 3.0, 1: 100.0}),
            Clipped(limit=1.0, norm=3.0),
            Clipped(by="value", limit=9.0),
            Clipped(limit=math.inf),
        ]
    )
    series = series_of(run)
    assert [(curve.name, curve.values) for curve in series.norms] == [
        ("before clipping", (3.0,)),
        ("used by adam", (3.0,)),
    ]
    assert series.clips == (1.0,)


def test_the_ratio_is_of_matrices_that_have_a_size() -> None:
    facts: list[Fact] = [
        parameter(0, "a.weight"),
        parameter(1, "b.weight"),
        parameter(2, "frozen", requires_grad=False),
    ]
    facts += [ParameterFacts(parameter=3, names=("bias",), shape=(4,), numel=4, root=0)]
    one = Norms(optimizer=0, parameters=(0, 1, 2, 3), weight=(4.0, 1e-9, 4.0, 4.0), update=(0.004, 1.0, 3.0, 2.0))
    (ratio,) = series_of(Run([*facts, one])).ratios
    assert (ratio.low, ratio.middle, ratio.high, ratio.highest) == (0.001, 0.001, 0.001, "a.weight")
    assert not series_of(Run([*facts, norms(0, {0: 1.0}, update=math.nan)])).ratios


def test_all_series_are_json_and_short() -> None:
    run = run_of(500, 500, odd=math.nan)
    text = json.dumps(series_of(run).to_dict(), allow_nan=False)
    assert len(text) < 400_000
    assert '"nan"' in text
    empty = series_of(Run([])).to_dict()
    assert json.loads(json.dumps(empty)) == empty
    assert series_of(Run([Memory(resident=0)])).memory == ()


# The loop and the activations.


def test_the_loop_is_shown_in_its_order_with_its_counts() -> None:
    calls = calls_of(run_of(20))
    assert [(call.what, call.where, call.times) for call in calls] == [
        ("forward of model, training", "train.py:30", 20),
        ("gradients cleared, optimizer", "train.py:32", 20),
        ("backward", "train.py:33", 20),
        ("gradients clipped by norm to 1", "train.py:34", 20),
        ("step of optimizer", "train.py:35", 20),
        ("step of scheduler", "train.py:36", 20),
    ]


def test_calls_that_differ_are_told_apart_and_the_rare_ones_are_left_out_first() -> None:
    facts: list[Fact] = [
        Forward(root=0, training=False, grad=False, at=1),
        Backward(retain=True, at=2),
        Backward(function="grad", at=3),
        Scaler(call="step", skipped=True, at=4),
        Stepped(optimizer=3, by="scaler", at=5),
        Epoch(loader=0, at=6),
        Epoch(loader=0, ended=True, at=7),
        Loaded(into="module", variable="net", at=8),
    ]
    assert [call.what for call in calls_of(Run(facts))] == [
        "forward of model 0, evaluation, no gradient",
        "backward, graph retained",
        "autograd.grad",
        "scaler: step, skipped",
        "step of optimizer 3, by the scaler",
        "an epoch of a DataLoader",
        "state loaded into net",
    ]
    assert all(call.times == 1 for call in calls_of(Run(facts)))
    many: list[Fact] = [Backward(line=line, at=line) for line in range(100) for _ in range(2 if line > 60 else 1)]
    found = calls_of(Run(many))
    assert len(found) == MOST_CALLS
    assert all(call.line > 60 for call in found)


def test_outputs_go_from_first_to_last_and_the_dead_ones_are_kept() -> None:
    def sample(module: str, **more: float) -> ModuleSample:
        return ModuleSample(module=module, cls="ReLU", order=0, **more)  # type: ignore[arg-type]

    first = Activations(root=0, modules=(sample("a", std=1.0, absmax=math.nan), sample("b", std=2.0)))
    last = Activations(root=0, modules=(sample("a", std=0.5, absmax=3.0), sample("b", always_dead=0.95)))
    for order in ((first, last), (last, first)):
        assert math.isnan(outputs_of(Run(list(order)))[0][0].absmax)
    outputs, count = outputs_of(Run([first, last]))
    assert count == 2
    a, b = outputs
    assert (a.first_std, a.last_std, math.isnan(a.absmax), a.samples) == (1.0, 0.5, True, 2)
    assert a.stands_out
    assert b.stands_out
    many = Activations(root=0, modules=tuple(sample(f"m{i}", always_dead=float(i == 499)) for i in range(500)))
    outputs, count = outputs_of(Run([many]))
    assert (len(outputs), count, outputs[-1].module) == (MOST_MODULES, 500, "m499")
    two = Run([Root(root=1, variable="critic"), first, Activations(root=1, modules=(sample(""),))])
    assert [one.module for one in outputs_of(two)[0]] == ["model 0.a", "model 0.b", "critic"]
