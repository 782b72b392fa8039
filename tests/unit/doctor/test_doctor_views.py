"""What rules ask of a run, alone: names, optimizers, windows, the course of a loss, what was lost."""

import math
from typing import Any

import pytest

from anybatch.doctor.views.courses import adversarial, course, phases, updates
from anybatch.doctor.views.naming import Names, common_module, near, parameters_code, shared_path
from anybatch.doctor.views.optimizing import OptimizerView, announced, loss_grew, lost, measured, optimizers
from anybatch.doctor.views.windows import calls_of, optimized, trained_forwards, usual_count
from anybatch.records.events import Backward
from anybatch.records.lossfacts import LossCall
from anybatch.records.samples import NonFinite
from rule_runs import FILE, LINES, RunBuilder, simple


def test_names_choose_the_form_of_their_verb() -> None:
    one, four = Names(["a"]), Names("abcd")
    assert f"{one} {one:is|are} here" == "a is here"
    assert f"{four} {four:is|are} here" == "a, b, c and 1 more are here"
    assert shared_path([]) == shared_path(["a", "b"]) == ""


def test_an_optimizer_is_called_as_the_user_calls_it_and_has_its_own_facts() -> None:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers[:2], 0, variable="first", lr=0.3)
    built.optimizer(numbers[2:], 1, variable="second", weight_decay=0.1)
    built.train(numbers, 3, 0)
    built.norms(numbers[:2])
    one, other = (OptimizerView(built.run, number) for number in (0, 1))
    assert (str(one), str(other), one.made) == ("first", "second", f"first (train.py:{LINES['optimizer']})")
    assert (one.own, optimized(built.run)) == (frozenset(numbers[:2]), frozenset(numbers))
    assert (len(one.steps), len(one.samples), len(other.steps)) == (3, 1, 0)
    assert [step.number for _, step in one.stepped] == [0, 1, 2]
    assert one.rate_at(1) == 0.1, "the rate of the step, not that it was made with"
    assert other.rate_at(1) == 0.1
    assert [str(view) for view in optimizers(built.run)] == ["first"] == [str(view) for view in measured(built.run)]
    assert str(OptimizerView(built.run, 7)) == "optimizer"


def two_optimizers(*turns: tuple[int, ...], lines: tuple[int, ...] = (1,)) -> bool:
    """Whether two optimizers are taken for adversaries, where those of a turn step behind each backward."""
    built = RunBuilder()
    numbers = built.model()
    for number in (0, 1):
        built.optimizer(numbers[number::2], number)
    for step in range(40):
        built.backward(numbers, line=lines[step % len(lines)])
        for number in turns[step % len(turns)]:
            built.step(number)
    return adversarial(built.run)


def test_optimizers_that_share_a_loss_are_no_adversaries() -> None:
    """As those of matrices and of the rest, or of sparse and of dense parameters."""
    assert not two_optimizers((0, 1))
    assert not two_optimizers((), (0, 1)), "accumulated"
    assert not two_optimizers(*[(0, 1)] * 19, (1,)), "a scaler skipped one"
    assert two_optimizers((0,), (1,))
    assert two_optimizers((0, 1), (1,))
    assert two_optimizers((), (0, 1), lines=(1, 2)), "a loss for each"


def test_very_many_optimizers_are_seen_with_their_own_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As meta-learning makes one for a copy of the model in each task."""
    built = RunBuilder()
    outer = built.model()
    built.optimizer(outer)
    for task in range(1, 8):
        numbers = built.model(root=task, variable="fast")
        built.optimizer(numbers, task, variable="inner")
        built.train(numbers, 3, task, root=task)
        built.train(outer, 1)

    def seen() -> list[list[tuple[int, int, list[int]]]]:
        ways = (OptimizerView(built.run, number).windows for number in range(8))
        return [[(one.step.at, one.clears, [p.fact.at for p in one.used]) for one in way if one.step] for way in ways]

    def forwards() -> list[list[int]]:
        return [[one.at for one in trained_forwards(built.run, root)] for root in range(8)]

    whole, every, run = seen(), forwards(), built.run
    assert [len(way) for way in whole] == [7, *[3] * 7]
    assert [len(one) for one in every] == [7, *[3] * 7]
    monkeypatch.setattr("anybatch.doctor.views.windows.MANY", 2)
    assert seen() == whole
    assert forwards() == every
    assert [view.number for view in optimizers(run, most=3)] == [0, 1, 2], "those with the most steps"
    assert len(optimizers(run, most=None)) == 8


def test_a_window_ends_in_a_step_and_has_the_backwards_that_it_used() -> None:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for _ in range(4):
        built.clear()
        for _ in range(2):
            built.forward()
            built.backward(numbers)
        built.step()
    built.forward()
    built.backward(numbers)
    windows = OptimizerView(built.run, 0).windows
    assert [len(window.used) for window in windows] == [2, 2, 2, 2, 1]
    assert windows[-1].step is None
    assert usual_count(windows) == 2
    assert all(window.of_one_line for window in windows)
    assert len(trained_forwards(built.run, 0)) == 9


def test_the_loss_functions_of_a_backward_are_found() -> None:
    built = simple(1)
    call = built.loss(value=2.0)
    built.backward((0, 1), loss_calls=(call, 999))
    back = list(built.run.of(Backward))[-1]
    assert [one.value for one in calls_of(built.run, back)] == [2.0]
    assert near(back) == f" (train.py:{LINES['backward']})"
    assert near(None) == ""


def test_parameters_are_named_by_their_modules() -> None:
    run = simple().run
    assert common_module(run, [0, 1]) == (0, "encoder")
    assert common_module(run, [0, 3]) == (0, "")
    assert parameters_code(run, [2, 3]) == "model.head.parameters()"
    assert parameters_code(run, range(4)) == "model.parameters()"


def test_the_course_of_a_loss_says_whether_it_fell() -> None:
    run = simple(12).run
    losses = course(run, 0)
    assert losses.values == tuple(1.0 / (1 + index) for index in range(12))
    assert losses.fell
    assert losses.is_positive
    assert not losses.stands
    assert len(updates(run)) == 12
    assert [part.optimizers for part in phases(run)] == [frozenset({0})]
    still = RunBuilder()
    numbers = still.model()
    still.optimizer(numbers)
    still.train(numbers, 12, value=2.0)
    assert course(still.run, 0).stands


@pytest.mark.parametrize(("values", "grew"), [([1.0, 1.1, 0.9, 1.0], False), ([1.0, 2.0, 8.0, 40.0], True)])
def test_a_number_that_is_lost_was_announced_by_a_loss_that_grew(values: list[float], grew: bool) -> None:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for value in (*values, math.nan):
        built.train(numbers, 1, value=value)
    assert lost(built.run, 0) is not None
    assert loss_grew(built.run, 0) is grew
    assert announced(built.run, 0, 0.1) is grew
    assert lost(simple().run, 0) is None
    assert not announced(simple().run, 0, 0.1)


def test_a_number_that_came_with_the_data_is_not_announced_by_a_long_step() -> None:
    for where, expected in (("input", False), ("parameter", True)):
        built = RunBuilder()
        numbers = built.model()
        built.optimizer(numbers)
        built.train(numbers, 4, value=1.0)
        built.norms(numbers, 3, update=(0.9,) * 4)
        built.add(NonFinite(where=where, file=FILE, line=1))
        assert announced(built.run, 0, 0.1) is expected


def test_the_guess_of_a_loss_that_is_a_sum_over_heads_is_the_sum_of_theirs() -> None:
    def built(summed: float) -> RunBuilder:
        one = RunBuilder()
        numbers = one.model()
        one.optimizer(numbers)
        for _ in range(4):
            for classes, value in ((8, 2.2), (2, 0.8)):  # two heads
                told: dict[str, Any] = {"classes": classes, "target_classes": classes, "input_shape": (32, classes)}
                one.add(LossCall(function="cross_entropy", value=value, **told))
            one.train(numbers, 1, value=summed)
        return one

    assert course(built(3.0).run).prior == pytest.approx(math.log(8) + math.log(2))
    assert course(built(2.2).run).prior == pytest.approx(math.log(8)), "the other is not in the loss"
