"""Rules of the family loss fire on their fault and are quiet on what only looks like it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from anybatch import Doctor
from anybatch.records.events import Backward, Stepped
from anybatch.records.lossfacts import Evaluated, Probed, Walk
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, ModuleSample
from anybatch.records.tables import GroupFacts, ModuleFacts, OptimizerFacts, Root
from number_runs import Training, call, fires, found, sampled, silent
from rule_runs import RunBuilder

SQUASHED: dict[str, Any] = {"normalised": True, "low": 0.02, "high": 0.7}
LOGITS = "binary_cross_entropy_with_logits"


def walked(**values: Any) -> Training:
    """A training whose graph shows something at every tenth step."""
    walk = Walk(nodes=30, **values)
    return Training(every=lambda step: [walk] if step % 10 == 0 else [])


def test_double_activation_fires_on_probabilities() -> None:
    one = fires(Training(call=call(**SQUASHED)).run(), "DOUBLE_ACTIVATION", "error")
    assert one.place.line == 19
    assert "softmax" in one.fix
    fires(Training(call=call(LOGITS, **SQUASHED)).run(), "DOUBLE_ACTIVATION", "warning")
    assert "log_softmax" in fires(Training(call=call("nll_loss", **SQUASHED)).run(), "DOUBLE_ACTIVATION", "error").fix


@pytest.mark.parametrize("logarithms", [False, True])
def test_double_activation_fires_on_ctc_of_probabilities_and_is_quiet_on_their_logarithms(logarithms: bool) -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 5)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    length, labels = torch.full((4,), 12), torch.full((4,), 3)
    with Doctor() as doctor:
        for _ in range(6):
            scores = net(torch.randn(12, 4, 6))
            given = scores.log_softmax(-1) if logarithms else scores.softmax(-1)
            sgd.zero_grad()
            torch.nn.functional.ctc_loss(given, torch.randint(1, 5, (4, 3)), length, labels).backward()
            sgd.step()
    if logarithms:
        silent(doctor.run, "DOUBLE_ACTIVATION")
        silent(doctor.run, "LOSS_SIGN")
    else:
        assert "log_softmax" in fires(doctor.run, "DOUBLE_ACTIVATION", "error").fix
        fires(doctor.run, "LOSS_SIGN", "warning")


def test_double_activation_names_no_softmax_where_there_is_none_and_tells_arguments_that_changed_places() -> None:
    walk = Walk(nodes=9, kinds={"LogSoftmaxBackward0": 3})
    given = call("kl_div", low=0.02, high=0.9, normalised=None)
    run = Training(call=given, every=lambda step: [walk]).run()
    assert "softmax;" not in fires(run, "DOUBLE_ACTIVATION", "error").message
    assert "softmax;" in fires(Training(call=given).run(), "DOUBLE_ACTIVATION", "error").message
    turned_round = Training(call=replace(given, target_requires_grad=True), every=lambda step: [walk]).run()
    assert "swapped" in fires(turned_round, "DOUBLE_ACTIVATION", "error").message


def test_double_activation_fires_on_what_the_graph_shows() -> None:
    training = walked(doubled=(("sigmoid", LOGITS),))
    training.call = call(LOGITS, low=0.1, high=0.9)
    assert fires(training.run(), "DOUBLE_ACTIVATION", "error").evidence["in_the_graph"]


@pytest.mark.parametrize("made", ["sigmoid", "softmax"])
@pytest.mark.parametrize(
    ("times", "between"), [(2, False), (1, False), (2, True)], ids=["twice", "once", "layer between"]
)
def test_double_activation_fires_on_a_loss_by_hand(made: str, times: int, between: bool) -> None:
    torch.manual_seed(0)
    net, layer = torch.nn.Linear(6, 5), torch.nn.Linear(5, 5)
    adam = torch.optim.Adam([*net.parameters(), *layer.parameters()])
    squash = torch.sigmoid if made == "sigmoid" else torch.nn.Softmax(-1)
    with Doctor() as doctor:
        for _ in range(6):
            x = torch.randn(16, 6)
            given = squash(net(x))
            if times == 2:
                given = squash(layer(given) if between else given[:, None].transpose(1, 2).squeeze(-1))
            hit = (x[:, :5] > 0).float()
            loss = 1 - (2 * (given * hit).sum() + 1) / (given.sum() + hit.sum() + 1)
            adam.zero_grad()
            loss.backward()
            adam.step()
    if times == 2 and not between:
        assert made in fires(doctor.run, "DOUBLE_ACTIVATION", "warning").fix
    else:
        silent(doctor.run, "DOUBLE_ACTIVATION")


@pytest.mark.parametrize("pair", [("softmax", "cross_entropy"), ("log_softmax", "cross_entropy"), ("sigmoid", LOGITS)])
def test_double_activation_is_quiet_on_another_line_than_that_of_the_graph(pair: tuple[str, str]) -> None:
    training = walked(doubled=(pair,))
    training.call = call(pair[1], low=-4.0, high=4.0, normalised=False)
    silent(training.run(), "DOUBLE_ACTIVATION")


@pytest.mark.parametrize(
    "healthy",
    {
        "scores": Training(),
        "two batches": Training(steps=2, call=call(**SQUASHED)),
        "scores in a narrow range": Training(steps=4, call=call(LOGITS, **SQUASHED)),
        "soft dice": Training(call=call("binary_cross_entropy", **SQUASHED)),
        "all one half": Training(call=call(LOGITS, normalised=True, low=0.5, high=0.5)),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_double_activation_is_quiet(healthy: tuple[str, Training]) -> None:
    silent(healthy[1].run(), "DOUBLE_ACTIVATION")


def test_double_activation_is_a_hint_for_log_probabilities() -> None:
    training = Training(call=call(log_normalised=True, low=-9.0, high=-0.1))
    assert [one.severity for one in found(training.run(), "DOUBLE_ACTIVATION")] == ["info"]


@pytest.mark.parametrize(
    ("inputs", "targets", "fix"),
    [
        ((32, 1), (32,), "squeeze(-1), y"), ((32,), (32, 1), "y.squeeze(-1)"), ((8, 1, 4), (8, 4), "reshape(8, 1, 4)"),
        ((32, 1), (32, 32), "unsqueeze(-1)"), ((32,), (32, 32), "squeeze(-1)"),  # rewards and values made them
    ],
)  # fmt: skip
def test_loss_broadcast_fires(inputs: tuple[int, ...], targets: tuple[int, ...], fix: str) -> None:
    run = Training(call=call("mse_loss", input_shape=inputs, target_shape=targets)).run()
    assert fix in fires(run, "LOSS_BROADCAST", "error").fix


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        ((32, 1), (32, 1)), ((1, 1), (1,)), ((32, 1), (1,)), ((32, 10), (10,)), ((32, 4), (32, 1)), ((32, 4), ()),
        ((32, 1), (32, 4)), ((32, 32), (32, 32)), ((1, 1), (32, 32)),
    ],
)  # fmt: skip
def test_loss_broadcast_is_quiet(inputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    silent(Training(call=call("mse_loss", input_shape=inputs, target_shape=targets)).run(), "LOSS_BROADCAST")
    evaluated = Training(after=(Evaluated(function="mse_loss", shapes=(inputs, targets)),))
    silent(evaluated.run(), "LOSS_BROADCAST")


def test_loss_broadcast_fires_in_an_evaluation() -> None:
    one = Evaluated(function="mse_loss", shapes=((32,), (32, 1)), file="train.py", line=7)
    found = fires(Training(after=(one,)).run(), "LOSS_BROADCAST", "warning")
    assert found.place.line == 7
    assert "y.squeeze(-1)" in found.fix
    silent(Training(after=(Evaluated(function="cross_entropy"),)).run(), "LOSS_BROADCAST")


def by_hand(spread: tuple[int, ...], *, every: int = 1) -> Training:
    """A training on a difference that was written by hand."""
    return Training(
        call=None,
        activations=False,
        every=lambda step: [Walk(nodes=9, spread=() if step % every else spread)] if sampled(step) else [],
    )


def test_loss_broadcast_fires_for_a_loss_written_by_hand() -> None:
    assert "squeeze(-1)" in fires(by_hand((32, 1)).run(), "LOSS_BROADCAST", "warning").fix
    assert "(32, 1)" in fires(by_hand((32,)).run(), "LOSS_BROADCAST", "warning").message
    silent(by_hand(()).run(), "LOSS_BROADCAST")
    silent(by_hand((32, 1), every=5).run(), "LOSS_BROADCAST")


def test_loss_broadcast_names_the_line_of_the_optimizer_whose_loss_it_is() -> None:
    run = by_hand((32, 1))
    walks = [Walk(nodes=9, spread=(32, 1), reached=(0,))]
    run.every = lambda step: walks if sampled(step) else []
    for optimizer, line in ((7, 31), (0, 19)):
        evidence = {"op": "sub", "optimizer": optimizer}
        run.after += (Probed(probe="outer", answer="yes", evidence=evidence, file="train.py", line=line),)
    run.after += (OptimizerFacts(optimizer=7, cls="Adam", groups=(GroupFacts(lr=0.1, parameters=(99,)),)),)
    assert fires(run.run(), "LOSS_BROADCAST", "warning").place.line == 19


def test_softmax_dim_fires_along_the_batch() -> None:
    one = fires(walked(softmaxes=((0, 2, 32, True),)).run(), "SOFTMAX_DIM", "error")
    assert one.fix == "softmax(dim=-1)"


def test_softmax_dim_is_quiet_for_attention_contrast_and_time() -> None:
    for softmaxes in (((1, 2, 10, False),), ((0, 2, 32, False),), ((0, 2, 32, True), (1, 2, 32, True))):
        silent(walked(softmaxes=softmaxes).run(), "SOFTMAX_DIM")
    silent(walked(softmaxes=((0, 2, 7, True),)).run(), "SOFTMAX_DIM")  # a bag of 7 with one target for all
    walk, score = Walk(softmaxes=((0, 2, 24, True),)), ModuleSample(module="", cls="Net", order=1)  # one of 24, too
    bag = Activations(root=0, modules=(score,))
    silent(Training(call=None, activations=False, every=lambda step: [bag, walk]).run(), "SOFTMAX_DIM")
    rows = Activations(root=0, modules=(replace(score, shape=(24, 5)),))
    fires(Training(call=None, activations=False, every=lambda step: [rows, walk]).run(), "SOFTMAX_DIM", "error")
    first = walked(softmaxes=((0, 2, 32, True),))
    lstm = ModuleFacts(name="lstm", cls="LSTM", kind="recurrent", options={"batch_first": False})
    first.after = (Root(root=0, variable="model", modules=(lstm,)),)
    silent(first.run(), "SOFTMAX_DIM")


def of_nodes(classes: int) -> Training:
    """A training on a graph of 300 nodes, 100 of which have a target, with attention among all of them."""
    of = call("nll_loss", input_shape=(100, classes), target_shape=(100,), log_normalised=False, high=-3.0, low=-9.0)
    walk = Walk(nodes=30, softmaxes=((0, 2, 300, True), (1, 2, 300, True)))
    return Training(call=of, every=lambda step: [walk] if step % 10 == 0 else [])


def test_softmax_dim_fires_along_nodes_beside_attention_among_them() -> None:
    assert "over the 300" in fires(of_nodes(5).run(), "SOFTMAX_DIM", "error").message


def test_softmax_dim_is_quiet_for_a_contrast_of_nodes() -> None:
    silent(of_nodes(300).run(), "SOFTMAX_DIM")


def sequences(function: str, dim: int, *, log_normalised: bool = False, high: float = -0.1) -> Training:
    """A training with a likelihood of (20, 16, 7), and with a log-softmax along a dim of it."""
    of = call(function, input_shape=(20, 16, 7), log_normalised=log_normalised, normalised=False, high=high, low=-9.0)
    walk = Walk(nodes=30, softmaxes=((dim, 3, (20, 16, 7)[dim], False),))
    return Training(call=of, every=lambda step: [walk] if step % 10 == 0 else [])


@pytest.mark.parametrize(("function", "dim", "wanted"), [("ctc_loss", 0, 2), ("nll_loss", 2, 1)])
def test_softmax_dim_fires_beside_the_classes_of_a_likelihood(function: str, dim: int, wanted: int) -> None:
    one = fires(sequences(function, dim).run(), "SOFTMAX_DIM", "error")
    assert one.evidence["classes"] == wanted


def test_softmax_dim_is_quiet_along_the_classes_and_beside_attention() -> None:
    silent(sequences("ctc_loss", 2, log_normalised=True).run(), "SOFTMAX_DIM")
    silent(sequences("ctc_loss", 0, log_normalised=True).run(), "SOFTMAX_DIM")  # attention over time, before the scores
    silent(sequences("ctc_loss", 0, high=3.0).run(), "SOFTMAX_DIM")  # scores, beside attention over time
    silent(sequences("nll_loss", 1, log_normalised=False).run(), "SOFTMAX_DIM")  # of a mixture, say


def test_label_shift_fires_where_targets_are_two_ahead() -> None:
    one = fires(Training(call=call(shift=2)).run(), "LABEL_SHIFT", "error")
    assert one.evidence["shift"] == 2


def test_label_shift_is_quiet_for_the_next_token_and_for_several_heads() -> None:
    silent(Training(call=call(shift=1)).run(), "LABEL_SHIFT")
    silent(Training(call=call(shift=0)).run(), "LABEL_SHIFT")
    silent(Training(call=call(shift=2), every=lambda step: [call(shift=1, line=40)]).run(), "LABEL_SHIFT")


def test_loss_constant_fires_for_one_class_one_unit_and_one_value() -> None:
    one = call(classes=1, input_shape=(32, 1))
    assert fires(Training(call=one).run(), "LOSS_CONSTANT", "error").place.line == 19
    ones = Activations(root=0, modules=(ModuleSample(module="", cls="Net", order=1, shape=(32, 1), mean=1.0),))
    walk = Walk(softmaxes=((1, 2, 1, False),))
    unit = Training(call=None, activations=False, every=lambda step: [ones, walk]).run()
    assert fires(unit, "LOSS_CONSTANT", "error").message.startswith("model ends in a softmax")
    assert fires(Training(loss=lambda step: 2.3).run(), "LOSS_CONSTANT", "warning").evidence["value"] == 2.3


@pytest.mark.parametrize(("steps", "each", "fires_too"), [(12, 1, True), (9, 1, False), (5, 4, False)])
def test_loss_constant_fires_in_a_second_part_of_the_run(steps: int, each: int, fires_too: bool) -> None:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    built.train(numbers, steps=30)
    built.optimizer(numbers, number=1)
    for _ in range(steps):
        for _ in range(each):
            built.forward()
            built.backward(numbers, value=0.6931, line=41)
        built.step(1)
    assert bool(found(built.run, "LOSS_CONSTANT")) is fires_too


@pytest.mark.parametrize(
    "healthy",
    {
        "falls": Training(),
        "hinge at zero": Training(loss=lambda step: 0.0),
        "no rate": Training(loss=lambda step: 2.3, lr=lambda step: 0.0),
        "short": Training(steps=9, loss=lambda step: 2.3),
        "attention over one key": walked(softmaxes=((2, 3, 1, False),)),
    }.items(),
    ids=lambda entry: entry[0],
)
def test_loss_constant_is_quiet(healthy: tuple[str, Training]) -> None:
    silent(healthy[1].run(), "LOSS_CONSTANT")


def turned(grows: bool = True, several: bool = False) -> Training:
    """A training on minus cross_entropy, which grows."""

    def value(step: int) -> float:
        return 2.0 + 0.5 * step if grows else 2.0 / (1 + step)

    lines = lambda step: {"value": -value(step), "loss_calls": (6 * step + 9,), "line": 20 + several * (step % 2)}  # noqa: E731
    return Training(loss=value, backward=lines)


def linked(run: Run) -> Run:
    """The same record, in which each backward names the call of the loss before it."""
    calls = {fact.at for fact in run.facts if type(fact).__name__ == "LossCall"}
    facts = [type(fact)(**{**_values(fact), "loss_calls": (max(at for at in calls if at < fact.at),)})
             if type(fact).__name__ == "Backward" else fact for fact in run.facts]  # fmt: skip
    return Run(facts)


def test_loss_sign_fires_where_the_loss_is_turned() -> None:
    assert "minus cross_entropy" in fires(linked(turned().run()), "LOSS_SIGN", "error").message
    silent(linked(turned(grows=False).run()), "LOSS_SIGN")


def _values(fact: object) -> dict[str, Any]:
    return {name: getattr(fact, name) for cls in type(fact).__mro__ for name in getattr(cls, "__slots__", ())}


@pytest.mark.parametrize("function", ["nll_loss", LOGITS, "mse_loss", "ctc_loss"])
def test_loss_sign_fires_below_the_bound(function: str) -> None:
    run = Training(call=call(function, value=-0.4, normalised=True, target_mean=2.0)).run()
    assert function in fires(run, "LOSS_SIGN", "warning").message


@pytest.mark.parametrize(("node", "fires_too"), [("ExpandBackward0", True), ("ExpBackward0", False)])
def test_loss_sign_fires_on_raw_scores_of_a_net_without_a_density(node: str, fires_too: bool) -> None:
    """A token that is expanded to each row is no exponential."""
    walk = Walk(nodes=9, kinds={"AddmmBackward0": 3, node: 1})
    scores = call("nll_loss", value=-0.4, normalised=False, log_normalised=False)
    run = Training(call=scores, every=lambda step: [walk]).run()
    if fires_too:
        assert "raw scores" in fires(run, "LOSS_SIGN", "warning").message
    else:
        silent(run, "LOSS_SIGN")


def test_loss_sign_fires_on_raw_scores_where_a_later_loss_takes_a_softmax() -> None:
    raw, later = Walk(nodes=9, kinds={"AddmmBackward0": 3}), Walk(nodes=9, kinds={"LogSoftmaxBackward0": 1})
    after = (later, Backward(value=1.0, file="train.py", line=60, loss_calls=(10**6,)))
    scores = call("nll_loss", value=-0.4, normalised=False, log_normalised=False)
    run = Training(call=scores, every=lambda step: [raw], backward=lambda step: {"loss_calls": (0,)}, after=after).run()
    assert "raw scores" in fires(run, "LOSS_SIGN", "warning").message


def test_double_activation_is_quiet_where_a_relu_gives_scores() -> None:
    walk = Walk(nodes=9, doubled=(("relu", LOGITS),))
    run = Training(call=call(LOGITS, low=0.0, high=0.0, normalised=True), every=lambda step: [walk]).run()
    silent(run, "DOUBLE_ACTIVATION")


def test_loss_sign_fires_on_raw_scores_with_weights_of_classes_and_not_on_weights_that_may_be_negative() -> None:
    walk = Walk(nodes=9, kinds={"ConvolutionBackward0": 3})
    scores = call("nll_loss", value=-0.4, normalised=False, log_normalised=False, weighted=True)
    assert "raw scores" in fires(Training(call=scores, every=lambda step: [walk]).run(), "LOSS_SIGN", "warning").message
    masks = call(LOGITS, value=-0.4, target_mean=30.0, weighted=True)
    assert "outside 0 and 1" in fires(Training(call=masks).run(), "LOSS_SIGN", "warning").message
    silent(Training(call=call(LOGITS, value=-0.4, target_mean=0.5, weighted=True)).run(), "LOSS_SIGN")


@pytest.mark.parametrize(
    ("told", "given"),
    [
        ({"low": -3.0, "high": 4.0}, "raw scores"),
        ({"low": 0.1, "high": 0.9}, "probabilities"),
        ({"low": -9.0, "high": -0.1}, "sums to more than 1"),
    ],
)
def test_loss_sign_fires_on_a_divergence_below_0(told: dict[str, float], given: str) -> None:
    wrong = call("kl_div", value=-0.4, reduction="batchmean", target_normalised=True, **told)
    assert given in fires(Training(call=wrong).run(), "LOSS_SIGN", "warning").message


def test_loss_sign_is_quiet_on_a_divergence_from_what_is_no_distribution_and_on_rounding() -> None:
    silent(Training(call=call("kl_div", value=-0.4, reduction="batchmean", target_normalised=False)).run(), "LOSS_SIGN")
    silent(Training(call=call("kl_div", value=-0.4, reduction="batchmean")).run(), "LOSS_SIGN")
    near = call("kl_div", value=-0.04, reduction="batchmean", target_normalised=True)
    silent(Training(call=near).run(), "LOSS_SIGN")
    silent(Training(call=replace(near, value=-0.4, reduction="sum")).run(), "LOSS_SIGN")  # of 32 rows
    fires(Training(call=replace(near, reduction="mean")).run(), "LOSS_SIGN", "warning")  # of 320 entries


@pytest.mark.parametrize("scores", ["raw", "log"])
def test_loss_sign_fires_on_a_divergence_of_raw_scores_and_is_quiet_on_one_of_logarithms(scores: str) -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 5)
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    with Doctor() as doctor:
        for _ in range(12):
            x = torch.randn(16, 6)
            given = net(x) if scores == "raw" else net(x).log_softmax(-1)
            sgd.zero_grad()
            F.kl_div(given, (3 * x[:, :5]).softmax(-1), reduction="batchmean").backward()
            sgd.step()
    if scores == "raw":
        assert "raw scores" in fires(doctor.run, "LOSS_SIGN", "warning").message
    else:
        silent(doctor.run, "LOSS_SIGN")


@pytest.mark.parametrize(("depth", "fires_too"), [(-1e14, True), (-1e5, False)])
def test_loss_sign_fires_on_a_loss_that_ran_to_an_absurd_depth_and_stays_there(depth: float, fires_too: bool) -> None:
    training = Training(loss=lambda step: 400.0 - step if step < 6 else depth * (1 - 0.7 ** (step - 5)), call=None)
    if fires_too:
        assert "nothing bounds it" in fires(training.run(), "LOSS_SIGN", "warning").message
    else:
        silent(training.run(), "LOSS_SIGN")


def test_loss_sign_fires_on_a_likelihood_that_is_made_small() -> None:
    training = Training(steps=200, loss=lambda step: -4 * 1.2**step, call=None)
    assert "nothing bounds it" in fires(training.run(), "LOSS_SIGN", "warning").message
    silent(Training(steps=200, loss=lambda step: -4 * 1.05**step, call=None).run(), "LOSS_SIGN")  # rewards that grow


def test_loss_sign_fires_on_a_loss_that_fell_faster_and_faster_until_it_met_a_bound() -> None:
    training = Training(steps=200, loss=lambda step: 1 - min(1.2**step, 9e3), call=None)
    assert "falls faster and faster" in fires(training.run(), "LOSS_SIGN", "warning").message
    rises_again = Training(steps=200, loss=lambda step: 1 - (min(1.2**step, 9e3) if step < 90 else 0), call=None)
    silent(rises_again.run(), "LOSS_SIGN")
    silent(Training(steps=200, loss=lambda step: 90 - min(step, 60) * 3.0, call=None).run(), "LOSS_SIGN")  # a density


def test_loss_sign_is_quiet_for_densities_and_policies() -> None:
    silent(Training(loss=lambda step: -1.0 - step, call=None).run(), "LOSS_SIGN")  # REINFORCE, Gaussian NLL
    silent(Training(call=call("gaussian_nll_loss", value=-3.0)).run(), "LOSS_SIGN")
    silent(Training(call=call("nll_loss", value=-3.0)).run(), "LOSS_SIGN")  # densities, not probabilities
    silent(Training(call=call("ctc_loss", value=-0.01)).run(), "LOSS_SIGN")  # of rounding
    silent(Training().run(), "LOSS_SIGN")
    other = OptimizerFacts(optimizer=1, groups=(GroupFacts(parameters=(9,), lr=1e-3),))
    adversary = turned()
    adversary.before, adversary.every = (other,), lambda step: [Stepped(optimizer=1, lrs=(1e-3,), number=step)]
    silent(adversary.run(), "LOSS_SIGN")


IGNORED = call(items=0, ignored=32, value=math.nan, line=33)


def test_loss_all_ignored_fires_where_nothing_counts() -> None:
    run = Training(every=lambda step: [IGNORED] if step == 7 else []).run()
    one = fires(run, "LOSS_ALL_IGNORED", "error")
    assert (one.step, one.place.line) == (7, 33)
    assert "!= -100" in one.fix


def test_loss_all_ignored_is_quiet_for_a_few_and_for_sums() -> None:
    silent(Training(call=call(items=3, ignored=29)).run(), "LOSS_ALL_IGNORED")
    silent(Training(call=call(items=0, ignored=32, reduction="sum", value=0.0)).run(), "LOSS_ALL_IGNORED")
    silent(Training(call=call(items=0, ignored=32, value=0.0)).run(), "LOSS_ALL_IGNORED")
