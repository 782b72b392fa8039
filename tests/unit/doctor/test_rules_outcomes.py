"""That a run did not learn: rules on what became of it."""

import math
from dataclasses import replace

import pytest

from anybatch.doctor.diagnosing import diagnosis
from anybatch.doctor.views.outcomes import outcome
from anybatch.records.events import Clipped
from anybatch.records.lossfacts import LossCall, Probed
from anybatch.records.runs import Run
from number_runs import Training, call, falling, fires, found, sampled, silent

LN10 = math.log(10)


def stays(step: int) -> float:
    """A loss that is and stays at the entropy of ten classes."""
    return LN10 + 0.02 * ((step * 7) % 5 - 2)


def guessed(**values: object) -> LossCall:
    """A call whose best constant guess is known."""
    return call(**{"guess": LN10, **values})  # type: ignore[arg-type]


def test_not_learning_fires_at_the_level_of_a_constant_guess() -> None:
    one = fires(Training(steps=120, loss=stays, call=guessed()).run(), "NOT_LEARNING", "error")
    assert "2.303" in one.message
    assert (one.place.file, one.place.line) == ("train.py", 19)


@pytest.mark.parametrize(
    "healthy",
    [
        Training(steps=120, loss=falling, call=guessed()),
        Training(steps=30, loss=stays, call=guessed()),  # too short to say so
        Training(steps=80, loss=stays, call=guessed()),  # too few targets
        Training(steps=120, loss=stays),  # no guess is known
        Training(steps=120, loss=lambda step: 0.5 * stays(step), call=guessed()),
        Training(steps=120, loss=lambda step: LN10 * (1.4 - 0.004 * step), call=guessed()),  # it still falls
        Training(steps=120, loss=stays, call=guessed(), lr=lambda step: 1e-5 * (step + 1)),  # a warm-up
        # A task full of noise: a fifteenth of it can be known.
        Training(steps=400, loss=lambda step: stays(step) * (1 if step < 50 else 0.93), call=guessed()),
        Training(  # two heads of one line, one of which has no guess
            steps=200,
            loss=lambda step: 2.67,
            call=None,
            every=lambda step: [
                call(value=2.6, guess=None, classes=40, items=32),
                call(value=0.07, guess=0.69, classes=2, items=32),
            ],
        ),
        Training(  # values of states, which a model makes
            steps=120,
            loss=stays,
            call=None,
            every=lambda step: [
                call("mse_loss", value=stays(step), guess=LN10 if sampled(step) else None, target_mean=0.1 * step)
            ],
        ),
    ],
    ids=["falls", "short", "few", "no guess", "below", "falls still", "warm-up", "noise", "heads", "values"],
)
def test_not_learning_is_quiet(healthy: Training) -> None:
    silent(healthy.run(), "NOT_LEARNING")


def test_a_loss_far_above_a_guess_that_will_not_come_down_to_it_is_not_learned() -> None:
    slow = Training(steps=120, loss=lambda step: LN10 * (20 - 0.02 * step), call=guessed())
    assert "2.303" in fires(slow.run(), "NOT_LEARNING", "error").message
    soon = Training(steps=120, loss=lambda step: LN10 * (20 - 0.12 * step), call=guessed())
    silent(soon.run(), "NOT_LEARNING")


def test_a_sum_over_a_batch_is_compared_per_item() -> None:
    def summed(step: int) -> list[LossCall]:
        items = 32 if step % 3 else 8
        return [guessed(reduction="sum", items=items, guess=LN10 * items, value=stays(step) * items)]

    assert found(Training(steps=160, call=None, every=summed).run(), "NOT_LEARNING")


def test_a_sum_whose_targets_were_not_counted_is_no_mean() -> None:
    """Between the steps that are measured nothing but the value of a call is read."""

    def summed(step: int) -> list[LossCall]:
        counted = {"items": 64, "guess": LN10 * 64} if step % 10 == 0 else {"items": 0, "guess": None}
        return [guessed(reduction="sum", value=64 * LN10 / 2 + step % 3, **counted)]

    assert not found(Training(steps=160, call=None, every=summed).run(), "NOT_LEARNING")


def test_gradients_zero_fires_where_a_hinge_is_always_flat() -> None:
    flat = Training(steps=60, loss=lambda step: 0.0, grad=lambda step, layer: 0.0, call=None).run()
    one = fires(flat, "GRADIENTS_ZERO", "error")
    assert "from step 0 on" in one.message
    late = Training(steps=150, loss=lambda step: 2.0, grad=lambda step, layer: 0.1 * (step < 5), call=None).run()
    assert "from step 5 on" in fires(late, "GRADIENTS_ZERO", "error").message


@pytest.mark.parametrize(("own_mean", "fix"), [(True, "axis of the samples"), (False, "print that factor")])
def test_gradients_zero_fires_and_names_the_factor_that_is_zero(own_mean: bool, fix: str) -> None:
    seen = {"entries": 40, "own_mean": own_mean, "optimizer": 0}
    asked = Probed(probe="zero factor", answer="yes", evidence=seen, file="train.py", line=26)
    flat = Training(steps=60, loss=lambda step: 0.0, grad=lambda step, layer: 0.0, call=None, after=(asked,)).run()
    one = fires(flat, "GRADIENTS_ZERO", "error")
    assert one.place.line == 26
    assert "zero in all 40 entries" in one.message
    assert fix in one.fix


@pytest.mark.parametrize(
    "healthy",
    [
        Training(),
        Training(steps=15, grad=lambda step, layer: 0.0),
        Training(grad=lambda step, layer: 0.1 * layer),  # a part only
        Training(steps=150, grad=lambda step, layer: 0.1 * (step < 20)),  # a hinge that was learned
    ],
    ids=["as usual", "short", "a part", "learned"],
)
def test_gradients_zero_is_quiet(healthy: Training) -> None:
    silent(healthy.run(), "GRADIENTS_ZERO")


def test_a_loss_that_is_known_to_learn_is_said_to() -> None:
    assert outcome(Training(steps=120, call=guessed()).run()).word == "learning"
    assert outcome(Training(steps=120).run()).word == "learning"  # it falls clearly
    assert outcome(Training(steps=120, call=None, loss=lambda step: 1.0 + 0.1 * (step % 3)).run()).word == "undecided"
    assert "too few" in outcome(Training(steps=9).run()).said
    bad = Training(steps=120, call=replace(guessed(), guess=0.5), loss=lambda step: 9.0 / (1 + 0.05 * step))
    assert outcome(bad.run()).word == "undecided"  # it falls, and a constant guess would be better


def same_for_others(answer: str = "no", *, alike: bool = False, **values: object) -> Training:
    """A training whose loss falls to where it is, and of which it was asked whether its targets matter."""
    seen = {"optimizer": 0, "rows": 32, "loss": 0.7, "others": 0.7, "alike": alike}
    probed = Probed(probe="related", root=-1, answer=answer, evidence=seen, file="train.py", line=23)
    low = {"loss": lambda step: 0.7 + 0.02 * ((step * 7) % 5 - 2) + (2.0 if step < 9 else 0.0), "call": None}
    return Training(**{"steps": 120, "after": (probed,), **low, **values})  # type: ignore[arg-type]


def test_not_learning_fires_where_the_targets_of_other_rows_do_as_well() -> None:
    assert outcome(same_for_others("unknown").run()).word == "learning"  # as far as its loss shows
    one = fires(same_for_others().run(), "NOT_LEARNING", "error")
    assert (one.place.line, one.evidence["others"]) == (23, 0.7)


@pytest.mark.parametrize(
    "other",
    [
        same_for_others(steps=40),
        same_for_others(loss=lambda step: 2.0 - 0.01 * step),  # it still falls
        same_for_others(call=guessed(), loss=falling),  # it beats a guess, and a batch may be of one kind
    ],
    ids=["short", "falls", "beats"],
)
def test_not_learning_is_quiet_and_the_verdict_open_where_that_may_be_otherwise(other: Training) -> None:
    silent(other.run(), "NOT_LEARNING")
    assert outcome(other.run()).word == "undecided"


def test_a_loss_that_is_the_same_with_inputs_of_other_rows_leaves_the_verdict_open() -> None:
    seen = {"optimizer": 0, "rows": 32, "loss": 0.7, "others": 0.7, "inputs": 2}
    probed = Probed(probe="related inputs", root=-1, answer="no", evidence=seen, file="train.py", line=23)
    alone = Training(steps=120, call=None, after=(probed,)).run()
    assert outcome(alone).word == "undecided"
    silent(alone, "NOT_LEARNING")
    assert outcome(Training(steps=120, call=guessed(), after=(probed,)).run()).word == "learning"


@pytest.mark.parametrize(("others", "word"), [(0.73, "undecided"), (2.7, "learning")])
def test_a_loss_that_fell_to_what_it_is_with_targets_of_other_rows_leaves_the_verdict_open(
    others: float, word: str
) -> None:
    seen = {"optimizer": 0, "rows": 32, "loss": 0.7, "others": others}
    probed = Probed(probe="related", root=-1, answer="yes", evidence=seen, file="train.py", line=23)
    assert outcome(Training(steps=120, call=None, loss=falling, after=(probed,)).run()).word == word
    assert outcome(Training(steps=120, call=guessed(), after=(probed,)).run()).word == "learning"


def with_a_term(**values: object) -> Training:
    """A training that learns, one term of whose loss is the same with the targets of other rows."""
    term = {"op": "l1_loss", "file": "train.py", "line": 24, "loss": 0.5, "others": 0.5}
    seen = {"optimizer": 0, "rows": 32, "loss": 0.7, "others": 2.7, "alike": False, "apart": [term]}
    probed = Probed(probe="related", root=-1, answer="yes", evidence=seen, file="train.py", line=23)
    return Training(**{"steps": 120, "call": guessed(), "after": (probed,), **values})  # type: ignore[arg-type]


def test_labels_unrelated_fires_for_one_term_of_a_loss() -> None:
    assert fires(with_a_term().run(), "LABELS_UNRELATED", "warning").place.line == 24
    silent(with_a_term(steps=60).run(), "LABELS_UNRELATED")  # too few targets
    silent(with_a_term(loss=stays).run(), "LABELS_UNRELATED")  # nothing is learned as yet


@pytest.mark.parametrize(("last", "other_lr", "fired"), [(1.0, 0.1, True), (0.93, 0.1, False), (1.0, 1.0, False)])
def test_labels_unrelated_fires_for_a_term_that_is_no_better_than_a_guess_where_the_rest_is_open(
    last: float, other_lr: float, fired: bool
) -> None:
    rate = Probed(probe="rate", root=-1, answer="no", evidence={"optimizer": 0, "lr": 0.1, "other_lr": other_lr})
    term = LossCall(function="l1_loss", items=20, guess=1.0, value=last, file="train.py", line=24)
    alone = with_a_term(call=None, loss=lambda step: 2.0 - step / 1000, every=lambda step: [term])
    run = replace(alone, after=(*alone.after, rate)).run()
    assert [one.name for one in found(run, "LABELS_UNRELATED")] == ["LABELS_UNRELATED"] * fired


def clipping_nothing(**values: object) -> Training:
    """A training that clips before each backward, where there is no gradient."""
    clip = Clipped(limit=1.0, norm=0.0, tensors=0, file="train.py", line=18)
    return Training(**{"steps": 120, "every": lambda step: [clip], **values})  # type: ignore[arg-type]


def test_what_only_slows_a_training_weighs_less_where_it_learned_well() -> None:
    def said(run: Run) -> list[tuple[str, str]]:
        return [(one.name, one.severity) for one in diagnosis(run).findings if one.name == "CLIP_NO_EFFECT"]

    well = clipping_nothing(call=guessed()).run()
    assert said(well) == [("CLIP_NO_EFFECT", "warning")]
    assert said(clipping_nothing().run()) == [("CLIP_NO_EFFECT", "error")]  # no guess is known
    half = clipping_nothing(call=guessed(), loss=lambda step: LN10 * (1.2 if step < 20 else 0.6))
    assert said(half.run()) == [("CLIP_NO_EFFECT", "error")]


def test_targets_that_are_all_alike_are_named_before_what_became_of_the_run() -> None:
    run = same_for_others(alike=True).run()
    names = [(one.name, one.consequence_of) for one in diagnosis(run).findings]
    assert names == [("TARGETS_CONSTANT", ""), ("NOT_LEARNING", "TARGETS_CONSTANT")]
    silent(same_for_others().run(), "TARGETS_CONSTANT")


def of_one_value(*, alike: bool = True, std: float = 0.0) -> Training:
    """A short training on targets of one value, as far as was looked."""
    seen = {"optimizer": 0, "rows": 32, "loss": 0.7, "others": 0.7, "alike": alike, "apart": []}
    probed = Probed(probe="related", root=-1, answer="no", evidence=seen, file="train.py", line=23)
    alone = LossCall(function="l1_loss", items=32, value=0.1, target_mean=2.0, target_std=std)
    return Training(steps=30, call=alone, after=(probed,))


def test_targets_constant_fires_on_a_short_run_all_of_whose_targets_are_one_value() -> None:
    assert fires(of_one_value().run(), "TARGETS_CONSTANT", "warning").place.line == 23


def test_targets_constant_is_quiet_on_one_batch_of_one_value_and_on_derivatives() -> None:
    silent(of_one_value(std=0.5).run(), "TARGETS_CONSTANT")
    silent(of_one_value(alike=False).run(), "TARGETS_CONSTANT")


def test_a_rate_whose_steps_are_longer_than_the_weights_is_why_nothing_was_learned() -> None:
    long = {"steps": 120, "ratio": lambda step, layer: 3.0 if step == 0 else 1e-3}
    wild = Training(**long, loss=stays, call=guessed()).run()  # type: ignore[arg-type]
    assert [one.name for one in diagnosis(wild).findings][:2] == ["LR_TOO_HIGH", "NOT_LEARNING"]
    learned = diagnosis(Training(**long, call=guessed()).run())  # type: ignore[arg-type]
    assert all(one.severity == "info" for one in learned.findings)
