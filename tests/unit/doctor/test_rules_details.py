"""Places, guards and roots of rules on runs that are close to the border between faulty and healthy."""

import dataclasses
import math

from anybatch.doctor.diagnosing import diagnose
from anybatch.records.events import Cleared, Epoch
from anybatch.records.lossfacts import Followed, Probed, Walk
from anybatch.records.paths import Paths, Term
from anybatch.records.samples import Activations, Buffers, InputSample, Memory, ModuleSample
from anybatch.records.tables import ModuleFacts, SchedulerFacts
from number_runs import Training, call, falling, fires, found, quiet, sample, silent
from rule_runs import FILE, LINES, RunBuilder, findings, simple

LOGITS = "binary_cross_entropy_with_logits"


def flat(step: int) -> float:
    """A loss that does not fall."""
    return 2.3 + 0.01 * (step % 3)


def test_zero_grad_missing_is_the_root_of_what_leaks_with_it() -> None:
    built = simple(0)
    for _ in range(6):
        built.forward()
        built.backward((0, 1, 2, 3), kept=(0, 1, 2, 3))
        built.step()
    assert [one.name for one in diagnose(built.run) if not one.consequence_of] == ["ZERO_GRAD_MISSING"]


def test_scores_between_zero_and_one_are_no_probabilities_without_a_sigmoid() -> None:
    squashed = call(LOGITS, normalised=True, low=0.05, high=0.33)
    graph = Walk(nodes=9, kinds={"AddmmBackward0": 3})
    silent(Training(call=squashed, every=lambda step: [graph]).run(), "DOUBLE_ACTIVATION")
    through = Walk(nodes=9, kinds={"AddmmBackward0": 3, "SigmoidBackward0": 1})
    fires(Training(call=squashed, every=lambda step: [through]).run(), "DOUBLE_ACTIVATION", "warning")


def test_the_loss_of_one_sample_says_nothing_about_the_rate() -> None:
    noisy = lambda step: 0.05 if step == 0 else 1.5 + 1.45 * math.sin(37.0 * step) + 80.0 * (step == 3)  # noqa: E731
    alone = Training(
        cls="SGD",
        loss=noisy,
        ratio=lambda s, n: 0.7 if s < 2 else 0.01,
        call=call("mse_loss", items=1, target_std=None),
    )
    quiet(alone.run(), "LR_TOO_HIGH")


def test_a_gradient_that_is_nan_at_once_did_not_explode() -> None:
    born = Training(loss=lambda step: 0.2 if step < 1 else math.nan, grad=lambda s, n: math.nan)
    silent(born.run(), "EXPLODING")
    grown = Training(
        loss=lambda step: 0.2 if step < 4 else math.nan,
        grad=lambda s, n: (0.1, 0.1, 0.1, 5.0, math.nan)[min(s, 4)],
        ratio=lambda s, n: 0.1,
    )
    fires(grown.run(), "EXPLODING", "warning")


def test_rows_that_rounding_parts_later_are_still_symmetric() -> None:
    begins = {"constant": 0.05, "equal_rows": True}
    parted = Training(loss=flat, parameter=begins, norms=lambda s: {"equal_grad_rows": (1,) if s < 8 else ()})
    assert fires(parted.run(), "SYMMETRIC_INIT", "error").place.parameters == ("layers.1.weight",)
    twice = Training(loss=flat, parameter=begins, norms=lambda s: {"equal_grad_rows": (1,) if s < 2 else ()})
    silent(twice.run(), "SYMMETRIC_INIT")


def test_inputs_and_targets_off_scale_are_one_finding_at_the_first_layer() -> None:
    targets = call("mse_loss", target_mean=20000.0, target_std=3000.0, low=-0.3, high=0.4)
    both = Training(loss=lambda step: 4e8 - step, call=targets, input=sample(mean=3000.0, std=900.0)).run()
    (one,) = found(both, "INPUT_SCALE")
    assert one.place.module == "layers.0"
    assert "input" in one.message
    assert "targets" in one.message


def test_a_softmax_is_placed_where_a_probe_has_seen_it() -> None:
    asked = Probed(probe="batch", answer="yes", evidence={"op": "softmax"}, module="pool", file=FILE, line=16)
    walk = Walk(nodes=9, softmaxes=((0, 2, 32, True),))
    training = Training(every=lambda step: [walk] if step % 10 == 0 else [], after=(asked,))
    place = fires(training.run(), "SOFTMAX_DIM", "error").place
    assert (place.module, place.line) == ("pool", 16)


def test_a_cut_term_is_placed_at_the_line_that_cuts_it() -> None:
    built = simple()
    built.add(Walk(nodes=9, constant_terms=1))
    terms = (
        Term(1.5, True, "cross_entropy", parameters=4),
        Term(0.3, False, "mean", "", FILE, 28, stopped=4, by="detach", by_file=FILE, by_line=52),
    )
    built.add(Followed(why="constant term", paths=Paths({}, {}, terms=terms).to_dict()))
    (one,) = findings(built, "LOSS_TERM_CUT")
    assert one.place.line == 52
    assert "line 28" in one.fix or ":28" in one.fix


def test_a_loss_that_is_kept_is_placed_where_it_is_made() -> None:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for index in range(9):
        built.clear()
        built.forward()
        made = built.loss(value=1.0)
        built.backward(numbers, loss_calls=(made,))
        built.step()
        built.add(Memory(graphs=index))
    (one,) = findings(built, "GRAPH_KEPT_IN_LOG")
    assert one.place.line == LINES["loss"]


def test_longer_windows_at_equal_distances_are_borders_of_epochs_without_a_loader() -> None:
    for sizes, names in (([4, 4, 6] * 3, ["ACCUM_TAIL_LEAKS"]), ([4, 6, 4, 4, 4, 6, 6, 4, 4], [])):
        built = RunBuilder()
        numbers = built.model()
        built.optimizer(numbers)
        for size in sizes:
            built.clear()
            for index in range(size):
                built.forward()
                built.backward(numbers, factor=0.25, value=0.5 + 0.1 * index)
            built.step()
        assert [one.name for one in findings(built, "ACCUM_TAIL_LEAKS")] == names


def test_statistics_of_a_frozen_norm_may_follow_a_layer_that_is_trained() -> None:
    modules = (
        ModuleFacts(name="", cls="Net"),
        ModuleFacts(name="first", cls="Linear", kind="linear", parameters=(0, 1)),
        ModuleFacts(name="norm", cls="BatchNorm1d", kind="batch_norm", parameters=(2, 3)),
    )
    order = tuple(ModuleSample(module=name, cls="", order=place) for place, name in enumerate(("first", "norm")))
    for trained, count in (((0, 1), 0), ((), 1)):
        built = RunBuilder()
        numbers = built.model(("first.weight", "first.bias", "norm.weight", "norm.bias"), modules=modules)
        built.optimizer(numbers[:2])
        for _ in range(4):
            built.train(trained, 1)
            built.add(Activations(root=0, modules=order))
            built.add(Buffers(root=0, moved=("norm",), frozen=("norm",)))
        assert len(findings(built, "FROZEN_BN_DRIFT")) == count


def test_outputs_that_are_all_one_are_placed_at_the_call_of_the_model() -> None:
    run = Training(loss=flat, spread=lambda step: 0.5 if step < 4 else 1e-9).run()
    assert fires(run, "INPUT_IGNORED", "warning").place.module


def test_a_function_between_modules_may_be_dead_as_a_module_may() -> None:
    def forward(share: float) -> Activations:
        before = ModuleSample(module="inp", cls="Linear", order=0, shape=(8, 4))
        middle = ModuleSample(module="mid", cls="Linear", order=1, shape=(8, 4), input_by="ReluBackward0",
                              input_dead=share, input_always_dead=share)  # fmt: skip
        last = ModuleSample(module="out", cls="Linear", order=2, shape=(8, 4))
        return Activations(root=0, modules=(before, middle, last, ModuleSample(module="", cls="Net", order=3)))

    dead = Training(loss=flat, activations=False, every=lambda step: [forward(1.0)] if step < 5 else []).run()
    assert fires(dead, "DEAD_UNITS", "warning").place.module == "inp"
    silent(Training(loss=flat, activations=False, every=lambda step: [forward(0.5)]).run(), "DEAD_UNITS")


def test_kl_div_of_numbers_that_are_not_negative_gets_no_logarithms() -> None:
    given = call("kl_div", normalised=None, low=0.05, high=0.7)
    assert "logarithms" in fires(Training(call=given).run(), "DOUBLE_ACTIVATION", "error").message
    silent(Training(call=call("kl_div", normalised=None, low=-4.0, high=-0.1)).run(), "DOUBLE_ACTIVATION")


def test_a_schedule_of_epochs_that_outlasts_the_first_one_is_still_stepped_too_often() -> None:
    for gamma, names in ((0.5, ["SCHED_TOO_OFTEN"]), (0.9, [])):
        rate = lambda step, gamma=gamma: 1e-3 * gamma ** (step // 10)  # noqa: E731
        facts = SchedulerFacts(
            scheduler=0, optimizer=0, cls="StepLR", variable="s", options={"step_size": 10, "gamma": gamma}
        )
        run = Training(steps=240, lr=rate, loss=flat, scheduler=facts, before=(Epoch(loader=0, batches=60),)).run()
        assert [one.name for one in found(run, "SCHED_TOO_OFTEN")] == names


def test_two_backwards_of_one_input_are_no_micro_batches() -> None:
    for same in (True, False):
        built = RunBuilder()
        numbers = built.model()
        built.optimizer(numbers)
        for step in range(4):
            for index in range(2):
                at = built.forward().at
                built.add(InputSample(root=0, forward=at, name="0", hash=f"{step}" if same else f"{step}{index}"))
                built.clear()
                built.backward(numbers, value=1.0 + index)
            built.step()
        assert bool(findings(built, "ZERO_GRAD_PER_MICROBATCH")) is not same


def test_a_gradient_that_grows_from_almost_nothing_did_not_explode() -> None:
    rare = Training(
        grad=lambda s, n: 1e-4 if s != 3 else 0.1,
        loss=lambda step: 2e-5 if step < 3 else 8e-3,
        ratio=lambda s, n: 1e-3,
    )
    silent(rare.run(), "EXPLODING")


def test_gradients_that_are_rounded_down_to_zero_have_vanished() -> None:
    def grad(step: int, layer: int) -> float:
        return 0.0 if layer < 2 else 0.1 ** (12 - layer)

    fires(Training(loss=flat, layers=13, grad=grad, ratio=lambda s, n: 1e-5).run(), "VANISHING", "warning")


def test_adapters_that_came_after_an_optimizer_of_what_is_now_frozen_are_missing_in_it() -> None:
    built = RunBuilder()
    base, adapters = built.model()[:2], (2, 3)
    for number in base:
        built.parameter(number, built.parameters[number].name, root=0, requires_grad=False)
    built.optimizer(base)
    built.train(adapters, 8)
    (one,) = findings(built, "OPT_PARAM_MISSING")
    assert one.place.parameters == ("head.weight", "head.bias")


def test_a_training_without_any_of_this_is_healthy() -> None:
    cleared = simple(20)
    cleared.facts = [
        dataclasses.replace(one, by="hand", number=-1) if isinstance(one, Cleared) else one for one in cleared.facts
    ]
    assert all(one.severity == "info" for run in (Training(loss=falling).run(), cleared.run) for one in diagnose(run))
