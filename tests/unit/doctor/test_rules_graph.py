"""Rules of the family graph: each fires on a run that has the fault, and is quiet on one that only looks like it."""

from typing import Any

import pytest

from anybatch.records.events import Backward, Crashed, Forward, Warned
from anybatch.records.lossfacts import Followed, Walk
from anybatch.records.paths import Leaf, Paths, Stop, Term
from anybatch.records.samples import Activations, InputSample, ModuleSample
from anybatch.records.tables import ModuleFacts
from rule_runs import FILE, RunBuilder, findings, simple

LEAF = Leaf(False, True, True, False, 64)


def followed(
    stop: Stop, names: tuple[str, ...] = ("encoder.weight", "encoder.bias"), why: str = "no gradient"
) -> Followed:
    return Followed(why=why, paths=Paths(dict.fromkeys(names, LEAF), dict.fromkeys(names, stop)).to_dict())


def cut(stop: Stop | None, *, steps: int = 6, training: bool = True) -> RunBuilder:
    built = RunBuilder()
    modules = (
        ModuleFacts(name="", cls="Net", training=training),
        ModuleFacts(name="encoder", cls="Linear", training=training, parameters=(0, 1)),
        ModuleFacts(name="head", cls="Linear", training=training, parameters=(2, 3)),
    )
    numbers = built.model(modules=modules)
    built.optimizer(numbers)
    built.train(numbers[2:], steps)
    if stop is not None:
        built.add(followed(stop))
    return built


def test_graph_cut_fires_with_the_operation_and_its_line() -> None:
    stop = Stop("argmax", "bottleneck", FILE, 12, "linear in encoder")
    (one,) = findings(cut(stop), "GRAPH_CUT")
    assert one.severity == "error"
    assert (one.place.module, one.place.line) == ("bottleneck", 12)
    assert one.place.parameters == ("encoder.weight", "encoder.bias")
    assert "softmax" in one.fix


def test_graph_cut_fires_without_a_line_where_the_first_modules_are_cold() -> None:
    built = cut(None)
    samples = (
        ModuleSample(module="encoder", cls="Linear", order=0),
        ModuleSample(module="head", cls="Linear", order=1),
    )
    built.add(Activations(root=0, modules=samples))
    (one,) = findings(built, "GRAPH_CUT")
    assert one.severity == "warning"
    assert one.evidence["last_with_graph"] == "encoder"


@pytest.mark.parametrize("op", ["deepcopy", "state_dict"])
def test_graph_cut_fires_on_a_loss_of_a_copy_from_the_first_backward_on(op: str) -> None:
    built = cut(Stop(op, "", FILE, 12))
    (one,) = findings(built, "GRAPH_CUT")
    assert f"the loss is computed on a copy that {op} makes (train.py:12)" in one.message
    assert one.at == min(fact.at for fact in built.run.of(Backward))
    assert "functional_call" in one.fix


def test_graph_cut_fires_on_a_copy_where_the_model_itself_is_only_evaluated() -> None:
    numbers = (built := RunBuilder()).model()
    built.optimizer(numbers)
    names = [name for one in numbers for name in built.run.parameters[one].names[:1]]
    for _ in range(6):
        built.clear(0)
        built.add(Forward(root=0, training=False, grad=False))
        built.backward((), value=1.0)
        built.step(0)
    stop = dict.fromkeys(names, Stop("deepcopy", "", FILE, 12))
    built.add(Followed(why="no gradient", paths=Paths(dict.fromkeys(names, LEAF), stop).to_dict()))
    assert findings(built, "GRAPH_CUT")
    assert not findings(built, "NO_GRAD_ACTIVE")


@pytest.mark.parametrize("op", ["unused", "left out", "unknown", "requires_grad"])
def test_graph_cut_is_quiet_on_what_no_loss_uses(op: str) -> None:
    assert not findings(cut(Stop(op)), "GRAPH_CUT")


def test_graph_cut_is_quiet_where_a_gradient_came_once_or_code_writes() -> None:
    stop = Stop("detach", "", FILE, 12)
    once = cut(stop)
    once.train((0, 1, 2, 3), 1)
    written = cut(stop)
    written.norms((0, 1, 2, 3), since=(0, 1), grad=(None, None, 0.5, 0.5))
    by_hand = cut(stop)
    by_hand.norms((0, 1, 2, 3))
    for built in (once, written, by_hand, simple(), cut(None)):
        assert not findings(built, "GRAPH_CUT")


def test_graph_cut_is_a_remark_under_no_grad_in_evaluation_mode() -> None:
    built = cut(Stop("no_grad", "", FILE, 12), training=False)
    assert [one.severity for one in findings(built, "GRAPH_CUT")] == ["info"]


def summed(term: Term, other: float = 1.5) -> RunBuilder:
    built = simple()
    built.add(Walk(nodes=9, constant_terms=1))
    main = Term(other, True, "cross_entropy", parameters=4)
    built.add(Followed(why="constant term", paths=Paths({}, {}, terms=(main, term)).to_dict()))
    return built


def test_loss_term_cut_fires_on_a_term_without_graph() -> None:
    (one,) = findings(summed(Term(0.3, False, "mse_loss", "", FILE, 33, stopped=4, by="detach")), "LOSS_TERM_CUT")
    assert one.place.line == 33
    assert one.fix.startswith("remove .detach()")
    assert one.severity == "warning"


def test_loss_term_cut_is_quiet_on_plain_constants_and_surrogates() -> None:
    assert not findings(summed(Term(0.3, False, "tensor")), "LOSS_TERM_CUT")
    surrogate = Term(-1.5, False, "detach", stopped=4, by="detach")
    assert not findings(summed(surrogate), "LOSS_TERM_CUT")
    assert not findings(simple(), "LOSS_TERM_CUT")


def players(*, detached: bool) -> RunBuilder:
    """A generator (0, 1) and a discriminator (2, 3) that take turns; the generator also has a plain loss."""
    built = RunBuilder()
    generator = built.model(("0.weight", "2.weight"), variable="g")
    critic = built.model(("0.weight", "2.weight"), root=1, variable="d")
    built.optimizer(generator, number=0, variable="opt_g")
    built.optimizer(critic, number=1, variable="opt_d")
    for _ in range(6):
        built.clear(1)
        built.add(Walk(nodes=5, reached=critic, terms=(critic, critic)))
        built.backward(critic)
        built.step(1)
        built.clear(0)
        reached = critic if detached else generator + critic
        built.add(Walk(nodes=5, reached=generator + critic, terms=(generator, reached)))
        built.backward(generator + critic, kept=critic, line=44)
        built.step(0)
    return built


def test_loss_term_cut_fires_on_an_adversarial_term_that_reaches_only_the_critic() -> None:
    (one,) = findings(players(detached=True), "LOSS_TERM_CUT")
    assert one.place.module == "g"
    assert one.place.line == 44


def test_loss_term_cut_is_quiet_on_two_players() -> None:
    assert not findings(players(detached=False), "LOSS_TERM_CUT")


def test_loss_term_cut_is_quiet_where_optimizers_take_turns_on_one_loss() -> None:
    """One of them has a parameter that is a term of its own, as the scale of a flow is in its volume."""
    built = RunBuilder()
    own = built.model(("0.weight", "2.weight", "scale"))
    built.optimizer(own[:1], number=0)
    built.optimizer(own[1:], number=1)
    for step in range(12):
        built.clear(0)
        built.clear(1)
        built.add(Walk(nodes=5, reached=own, terms=(own, own[2:])))
        built.backward(own)
        built.step(step % 2)
    assert not findings(built, "LOSS_TERM_CUT")


def forced(*, is_leaf: bool = True, touched: tuple[int, ...] = ()) -> RunBuilder:
    built = RunBuilder()
    built.optimizer(built.model())
    for _ in range(4):
        built.clear()
        built.forward()
        built.add(Walk(forced=is_leaf))
        built.backward(touched, is_leaf=is_leaf)
        built.step(with_grad=0)
    return built


def test_loss_no_grad_fires_on_a_flag_set_by_hand_and_on_the_crash() -> None:
    built = forced()
    built.add(followed(Stop("argmax", "", FILE, 9), why="loss without graph"))
    (one,) = findings(built, "LOSS_NO_GRAD")
    assert one.place.line == 9
    crashed = RunBuilder()
    crashed.add(Crashed(name="LOSS_NO_GRAD", error="RuntimeError", text="element 0", message="no graph", line=5))
    assert [found.severity for found in findings(crashed, "LOSS_NO_GRAD")] == ["error"]


def test_loss_no_grad_is_quiet_on_losses_with_a_graph() -> None:
    assert not findings(forced(is_leaf=False, touched=(0, 1)), "LOSS_NO_GRAD")
    assert not findings(forced(touched=(0,)), "LOSS_NO_GRAD")


def blind(*, training: bool = True, grad: bool = False, requires_grad: bool = True) -> RunBuilder:
    built = RunBuilder()
    encoder = built.model(("0.weight",), variable="encoder")
    built.parameter(0, "0.weight", root=0, requires_grad=requires_grad)
    head = built.model(("weight",), root=1, variable="head")
    built.optimizer(encoder + head)
    for _ in range(5):
        built.clear()
        built.forward(0, grad=grad, training=training)
        built.forward(1)
        built.backward(head)
        built.step()
    return built


def test_no_grad_active_fires_on_a_model_in_an_optimizer() -> None:
    (one,) = findings(blind(), "NO_GRAD_ACTIVE")
    assert (one.severity, one.place.line) == ("error", 30)
    assert not findings(blind(), "GRAPH_CUT")


def test_no_grad_active_is_quiet_on_frozen_models_and_a_remark_in_evaluation_mode() -> None:
    assert not findings(blind(requires_grad=False), "NO_GRAD_ACTIVE")
    assert not findings(blind(grad=True), "NO_GRAD_ACTIVE")
    assert [one.severity for one in findings(blind(training=False), "NO_GRAD_ACTIVE")] == ["info"]


def warned(touched: tuple[int, ...]) -> RunBuilder:
    built = RunBuilder()
    built.optimizer(built.model())
    built.add(Warned(category="UserWarning", text="None of the inputs have requires_grad=True. Gradients will be None"))
    built.train(touched, 4)
    return built


def test_ckpt_no_input_grad_fires_on_the_warning_with_cold_parameters() -> None:
    (one,) = findings(warned((2, 3)), "CKPT_NO_INPUT_GRAD")
    assert one.place.module == "encoder"
    assert not findings(warned((2, 3)), "GRAPH_CUT")
    by_stop = cut(Stop("checkpoint", "block", FILE, 8))
    assert findings(by_stop, "CKPT_NO_INPUT_GRAD")[0].place.line == 8


def test_ckpt_no_input_grad_is_quiet_where_all_parameters_get_gradients() -> None:
    assert not findings(warned((0, 1, 2, 3)), "CKPT_NO_INPUT_GRAD")


def actor_critic(*, leak: bool = True, cleared: bool = False, classes: bool = False) -> RunBuilder:
    built = RunBuilder()
    actor = built.model(("0.weight",), variable="actor")
    critic = built.model(("0.weight", "2.weight"), root=1, variable="critic")
    built.optimizer(actor, number=0, variable="actor_opt")
    built.optimizer(critic, number=1, variable="critic_opt")
    logs = {"NllLossBackward0": 1} if classes else {"MulBackward0": 1}
    for _ in range(5):
        built.clear(0)
        built.clear(1)
        built.add(Walk(nodes=9, kinds={"LogSoftmaxBackward0": 1, "MeanBackward0": 1} | logs))
        built.backward(actor + critic if leak else actor, line=41)
        if cleared:
            built.step(0)
            built.clear(1)
        built.add(Walk(nodes=9, kinds={"MeanBackward0": 1, "PowBackward0": 1}))
        built.backward(critic, line=42)
        if not cleared:
            built.step(0)
        built.step(1)
    return built


def test_leak_to_other_net_fires_on_a_policy_loss_that_trains_the_critic() -> None:
    (one,) = findings(actor_critic(), "LEAK_TO_OTHER_NET")
    assert (one.place.module, one.place.optimizer, one.place.line) == ("critic", "critic_opt", 41)


def test_leak_to_other_net_fires_on_gradient_left_over_from_the_step_of_another() -> None:
    built = RunBuilder()
    g, d = built.model(("g.weight",), variable="g"), built.model(("d.weight",), root=1, variable="d")
    built.optimizer(g, number=0, variable="opt_g")
    built.optimizer(d, number=1, variable="opt_d")
    for _ in range(5):
        built.clear(0)
        built.backward(g + d, line=41)
        built.step(0)
        built.backward(d, line=42)
        built.step(1)
        built.clear(1)
    assert [one.place.line for one in findings(built, "LEAK_TO_OTHER_NET")] == [41]


def test_leak_to_other_net_is_quiet_on_players_and_on_encoders_with_a_loss_of_their_own() -> None:
    quiet = (actor_critic(leak=False), actor_critic(cleared=True), actor_critic(classes=True), players(detached=False))
    for built in quiet:
        assert not findings(built, "LEAK_TO_OTHER_NET")


def bootstrapped(*, top: tuple[str, ...], requires_grad: bool = True, calls: int = 2) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model(variable="q")
    built.optimizer(numbers)
    for _ in range(4):
        for _ in range(calls):
            built.forward()
        call = built.loss(
            function="mse_loss", target_shape=(32, 4), target_requires_grad=requires_grad, target_top=top, value=1.0
        )
        built.clear()
        built.backward(numbers, loss_calls=(call,))
        built.step()
    return built


TARGET = ("AddBackward0", "MulBackward0", "MaxBackward0")


def test_leak_to_other_net_fires_on_a_target_of_the_trained_network() -> None:
    (one,) = findings(bootstrapped(top=TARGET), "LEAK_TO_OTHER_NET")
    assert one.place.module == "q"
    assert "detach" in one.fix


def test_leak_to_other_net_is_quiet_on_two_views_and_on_detached_targets() -> None:
    assert not findings(bootstrapped(top=("AddmmBackward0",)), "LEAK_TO_OTHER_NET")
    assert not findings(bootstrapped(top=TARGET, requires_grad=False), "LEAK_TO_OTHER_NET")
    assert not findings(bootstrapped(top=TARGET, calls=1), "LEAK_TO_OTHER_NET")


def copied(*, trained: bool = True, alike: bool = True, requires_grad: bool = True) -> RunBuilder:
    """A network and one that computes its targets, each called once a step."""
    built = RunBuilder()
    online = built.model(("0.weight", "0.bias"), variable="online")
    other = built.model(("0.weight", "0.bias") if alike else ("2.weight",), root=1, variable="target")
    built.optimizer(online + other if trained else online)
    for _ in range(4):
        built.forward(0)
        built.forward(1)
        call = built.loss(
            function="mse_loss", target_shape=(32, 1), target_requires_grad=requires_grad, target_top=TARGET, root=1
        )
        built.clear()
        built.backward(online + other, loss_calls=(call,))
        built.step()
    return built


def test_leak_to_other_net_fires_on_a_copy_that_computes_the_targets_and_is_trained() -> None:
    (one,) = findings(copied(), "LEAK_TO_OTHER_NET")
    assert "computed from online or target, both of which are trained" in one.message
    assert len(one.place.parameters) == 4


def test_leak_to_other_net_is_quiet_on_a_copy_that_is_not_trained_and_on_another_network() -> None:
    assert not findings(copied(trained=False), "LEAK_TO_OTHER_NET")
    assert not findings(copied(alike=False), "LEAK_TO_OTHER_NET")
    assert not findings(copied(requires_grad=False), "LEAK_TO_OTHER_NET")


def with_input(**backward: Any) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for _ in range(4):
        call = built.forward()
        built.add(InputSample(root=0, forward=call.at, name="0", requires_grad=True, bytes=4096, shape=(32, 32)))
        built.clear()
        built.backward(numbers, **backward)
        built.step()
    return built


def test_input_requires_grad_fires_as_a_remark_with_its_bytes() -> None:
    (one,) = findings(with_input(), "INPUT_REQUIRES_GRAD")
    assert (one.severity, one.evidence["bytes"]) == ("info", 4096)


def test_input_requires_grad_is_quiet_where_derivatives_are_taken() -> None:
    assert not findings(with_input(create=True), "INPUT_REQUIRES_GRAD")
    assert not findings(simple(), "INPUT_REQUIRES_GRAD")


def test_input_requires_grad_is_quiet_where_an_optimizer_has_the_input_or_no_step_uses_the_backward() -> None:
    optimized = with_input()
    optimized.parameter(9, "image", root=-1, shape=(32, 32), registered=False)
    optimized.optimizer((9,), number=1)
    assert not findings(optimized, "INPUT_REQUIRES_GRAD")
    adversarial = RunBuilder()
    numbers = adversarial.model()
    adversarial.optimizer(numbers)
    for _ in range(6):
        forward = adversarial.forward()
        adversarial.add(
            InputSample(root=0, forward=forward.at, name="0", shape=(32, 32), requires_grad=True, bytes=4096)
        )
        adversarial.backward(numbers)
        adversarial.clear()
        adversarial.forward()
        adversarial.backward(numbers)
        adversarial.step()
    assert not findings(adversarial, "INPUT_REQUIRES_GRAD")
