"""Rules of the family wiring: each fires on a run that has the fault, and is quiet on one that only looks like it."""

import dataclasses
from typing import Any

import pytest

from anybatch.records.events import Loaded
from anybatch.records.lossfacts import Followed, Probed
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, Tied
from anybatch.records.tables import GroupFacts, ModuleFacts, OptimizerFacts
from rule_runs import LINES, RunBuilder, alarms, findings, simple

HEAD = (2, 3)


def missing_head(steps: int = 6) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers[:2], variable="opt")
    built.train(numbers, steps)
    return built


def test_opt_param_missing_fires_with_names_and_code() -> None:
    (one,) = findings(missing_head(), "OPT_PARAM_MISSING")
    assert (one.code, one.severity) == ("AB101", "error")
    assert one.place.module == "head"
    assert one.place.parameters == ("head.weight", "head.bias")
    assert (one.place.optimizer, one.place.line) == ("opt", LINES["optimizer"])
    assert one.fix == 'opt.add_param_group({"params": model.head.parameters()})'
    assert one.evidence["elements"] == 72


@pytest.mark.parametrize(("used_up", "again"), [(True, True), (True, False), (False, True)])
def test_opt_param_missing_fires_on_a_group_that_an_iterator_left_empty(used_up: bool, again: bool) -> None:
    """Not where the group is frozen, and not where the optimizer that is made anew has the same parameters."""
    built = RunBuilder()
    own = built.model(variable="net")
    for number in range(2):
        groups = [GroupFacts(parameters=tuple(own[:2]), lr=0.1), GroupFacts(parameters=tuple(own[2:]), lr=0.1)]
        if number and used_up:
            groups[0] = GroupFacts(parameters=(), lr=0.1)
        built.groups[number] = tuple(one for group in groups for one in group.parameters)
        facts = OptimizerFacts(optimizer=number, variable="solver", cls="Adam", groups=tuple(groups))
        built.add(dataclasses.replace(facts, file="train.py", line=8 + number))
        for _ in range(6):
            built.clear(number)
            built.backward(own if again or not number else own[2:])
            built.step(number, with_grad=2)
    found = [one for one in findings(built, "OPT_PARAM_MISSING") if "re-created" in one.message]
    assert [one.evidence["group"] for one in found] == [0] * (used_up and again)


@pytest.mark.parametrize(("trained", "goes_on"), [(False, True), (True, False), (True, True)])
def test_opt_param_missing_is_quiet_on_an_empty_group_of_another_net(trained: bool, goes_on: bool) -> None:
    """One without biases has nothing in the group that has no weight decay."""
    built = RunBuilder()
    first, second = built.model(variable="encoder"), built.model(root=1, variable="critic")

    def made(number: int, decayed: tuple[int, ...], others: tuple[int, ...]) -> None:
        built.groups[number] = (*decayed, *others)
        groups = tuple(GroupFacts(parameters=one, lr=0.1) for one in (decayed, others))
        facts = OptimizerFacts(optimizer=number, variable=f"opt{number}", cls="Adam", groups=groups)
        built.add(dataclasses.replace(facts, file="train.py", line=8 + number))

    def step(*numbers: int) -> None:
        for _ in range(6):
            built.clear(numbers[0])
            built.backward([*first, *second] if 1 in numbers else first)
            for number in numbers:
                built.step(number, with_grad=2)

    made(0, first[::2], first[1::2])
    if trained:
        step(0)
    made(1, second, ())
    step(*((1, 0) if goes_on else (1,)))
    assert not [one for one in findings(built, "OPT_PARAM_MISSING") if "re-created" in one.message]


@pytest.mark.parametrize("given", [False, True])
def test_opt_param_missing_fires_on_nets_whose_optimizers_were_all_given_the_first_one(given: bool) -> None:
    built = RunBuilder()
    first, second = built.model(variable="one"), built.model(root=1, variable="two")
    built.optimizer(first, variable="opt")
    built.optimizer(second if given else first, number=1, variable="opt")
    for _ in range(6):
        built.train(first, 1)
        built.clear(1)
        built.backward(second)
        built.step(1, with_grad=4 if given else 0)
    assert len(findings(built, "OPT_PARAM_MISSING")) == (not given)
    assert not findings(built, "ZERO_GRAD_BEFORE_STEP")


def test_opt_param_missing_is_quiet_on_frozen_and_on_hand_written_parameters() -> None:
    frozen = missing_head()
    for number in HEAD:
        frozen.parameter(number, frozen.parameters[number].name, requires_grad=False)
    by_hand = missing_head()
    by_hand.norms((0, 1, 2, 3), since=HEAD)
    later = missing_head()
    later.optimizer(HEAD, number=1)
    for built in (frozen, by_hand, later, simple()):
        assert not findings(built, "OPT_PARAM_MISSING")


def unfrozen(*, then: tuple[int, ...] = (), by_step: bool = True) -> RunBuilder:
    """The body is trained, then a head alone, and then the body gets a gradient again."""
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers, variable="first")
    built.train(numbers, 6)
    built.optimizer((*HEAD, *then), number=1, variable="second")
    built.train(HEAD, 6, number=1)
    if by_step:
        built.train(numbers, 6, number=1)
    for _ in range(0 if by_step else 6):  # of something else than the training, as an attack on it
        built.backward(numbers)
    return built


def test_opt_param_missing_fires_on_what_a_later_training_unfreezes_behind_its_optimizer() -> None:
    (one,) = findings(unfrozen(), "OPT_PARAM_MISSING")
    assert (one.place.optimizer, one.fix.partition(".")[0]) == ("second", "second")


@pytest.mark.parametrize("built", [unfrozen(then=(0, 1)), unfrozen(by_step=False)])
def test_it_is_quiet_where_that_optimizer_has_it_or_no_step_uses_it(built: RunBuilder) -> None:
    assert not findings(built, "OPT_PARAM_MISSING")


def test_opt_param_missing_is_quiet_on_a_model_that_no_backward_reaches() -> None:
    built = simple()
    built.model(("teacher.weight",), root=1, variable="teacher")
    built.forward(1, grad=False)
    assert not findings(built, "OPT_PARAM_MISSING")


def test_opt_param_missing_is_quiet_on_a_backward_of_its_own_that_no_step_uses() -> None:
    built = RunBuilder()
    compared = built.model(("weight",), variable="reference")
    built.backward(compared, line=15)
    numbers = built.model(root=1)
    built.optimizer(numbers)
    built.train(numbers, root=1)
    assert not findings(built, "OPT_PARAM_MISSING")


@pytest.mark.parametrize("loaded", [True, False])
def test_opt_param_missing_is_a_remark_for_a_loaded_backbone(loaded: bool) -> None:
    built = RunBuilder()
    numbers = built.model()
    if loaded:
        built.add(Loaded(into="module", number=0, matched=2, of=4, strict=False))
    built.optimizer(numbers[2:])
    built.train(numbers)
    assert [one.severity for one in findings(built, "OPT_PARAM_MISSING")] == ["info" if loaded else "error"]


def test_opt_param_missing_is_a_remark_for_a_net_in_evaluation_mode() -> None:
    built = simple()
    modules = (ModuleFacts(name="", cls="Vgg", training=False, parameters=(4,)),)
    numbers = built.model(("weight",), root=1, variable="vgg", modules=modules)
    built.train((0, 1, 2, 3, *numbers))
    assert [one.severity for one in findings(built, "OPT_PARAM_MISSING")] == ["info"]


def unregistered(**facts: object) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model(("head.weight", "head.bias"))
    entries = {"registered": False, "root": 0, "module": "layers[0]"} | facts
    built.parameter(2, "layers[0].weight", **entries)
    built.optimizer(numbers)
    built.train((*numbers, 2))
    return built


def test_opt_param_unregistered_fires_on_layers_in_a_list() -> None:
    (one,) = findings(unregistered(), "OPT_PARAM_UNREGISTERED")
    assert one.place.module == "layers[0]"
    assert one.fix == "self.layers = nn.ModuleList(self.layers)  # at the end of __init__ of Net"
    assert not findings(unregistered(), "OPT_PARAM_MISSING")


def test_opt_param_unregistered_fires_on_a_plain_tensor_of_a_module() -> None:
    (one,) = findings(unregistered(is_parameter=False), "OPT_PARAM_UNREGISTERED")
    assert "nn.Parameter(" in one.fix


def test_opt_param_unregistered_is_quiet_on_other_leaves() -> None:
    for facts in ({"root": -1, "is_parameter": False}, {"requires_grad": False}):
        assert not findings(unregistered(**facts), "OPT_PARAM_UNREGISTERED")
    held = unregistered()
    held.optimizer((2,), number=1)
    assert not findings(held, "OPT_PARAM_UNREGISTERED")


def stale(*, same_shapes: bool = True) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model()
    for number, shape in zip(range(4, 8), ((8, 8), (8,), (8, 8), (8,)), strict=True):
        built.parameter(number, f"old.{number}", root=-1, shape=shape if same_shapes else (3, 5))
    built.optimizer(range(4, 8), variable="opt")
    for _ in range(5):
        built.clear()
        built.forward()
        built.backward(numbers)
        built.step(with_grad=0, zero=None)
    return built


def test_opt_param_stale_fires_and_takes_the_place_of_missing() -> None:
    (one,) = findings(stale(), "OPT_PARAM_STALE")
    assert one.place.optimizer == "opt"
    assert one.evidence["shapes_match"] == 4
    assert "opt = SGD(model.parameters()" in one.fix
    assert not findings(stale(), "OPT_PARAM_MISSING")


def test_opt_param_stale_is_quiet_where_shapes_differ_or_the_model_is_trained() -> None:
    other = stale(same_shapes=False)
    assert not findings(other, "OPT_PARAM_STALE")
    assert findings(other, "STEP_WITHOUT_GRADIENT")
    trained = stale()
    trained.optimizer((0, 1, 2, 3), number=1)
    assert not findings(trained, "OPT_PARAM_STALE")


def shared(*, own_backward: bool, torchs: bool = True) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers, variable="first")
    built.optimizer(numbers[2:], number=1, variable="second", is_torchs=torchs)
    for _ in range(4):
        built.clear()
        built.forward()
        built.backward(numbers)
        built.step(0)
        if own_backward:
            built.clear(1)
            built.backward(numbers)
        built.step(1)
    return built


def test_opt_param_twice_fires_where_both_use_one_gradient() -> None:
    (one,) = findings(shared(own_backward=False), "OPT_PARAM_TWICE")
    assert one.place.parameters == ("head.weight", "head.bias")
    assert "first" in one.message
    assert "second" in one.message


def test_opt_param_twice_is_quiet_on_turns_and_on_wrappers() -> None:
    assert not findings(shared(own_backward=True), "OPT_PARAM_TWICE")
    assert not findings(shared(own_backward=False, torchs=False), "OPT_PARAM_TWICE")


def made_anew(times: int = 3, **facts: Any) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model()
    lrs = facts.pop("lrs", None)
    for number in range(times):
        built.epoch(loader=number if facts.get("loaders") else 0)
        entries: dict[str, Any] = {"cls": "Adam", "momentum": 0.9, "variable": "adam"} | {
            name: value for name, value in facts.items() if name != "loaders"
        }
        built.optimizer(numbers, number=number, **entries)
        for _ in range(4):
            built.clear(number)
            built.forward()
            built.backward(numbers)
            built.step(number, lrs=(lrs[number],) if lrs else (0.1,))
    return built


def test_opt_state_reset_fires_on_a_new_adam_in_each_epoch() -> None:
    (one,) = findings(made_anew(), "OPT_STATE_RESET")
    assert one.severity == "warning"
    assert "re-created 2 times" in one.message
    assert one.place.optimizer == "adam"


def test_opt_state_reset_is_quiet_or_a_remark_where_it_is_meant() -> None:
    assert not findings(made_anew(momentum=0.0), "OPT_STATE_RESET")
    assert not findings(simple(), "OPT_STATE_RESET")
    for facts in ({"lrs": (0.1, 0.05, 0.01)}, {"loaders": True}):
        assert {one.severity for one in findings(made_anew(**facts), "OPT_STATE_RESET")} <= {"info"}


def only_norms(losses: list[float], *, head_trained: bool = False) -> RunBuilder:
    built = RunBuilder()
    built.model(("fc.weight", "bn.weight", "bn.bias", "out.weight"))
    built.parameter(0, "fc.weight", root=0, shape=(64, 64), requires_grad=False)
    built.parameter(3, "out.weight", root=0, shape=(8, 64), requires_grad=head_trained)
    trained = (1, 2, 3) if head_trained else (1, 2)
    for number in (1, 2):
        built.parameter(number, built.parameters[number].name, root=0, shape=(8,), role="norm")
    built.optimizer(trained)
    for value in losses:
        built.clear()
        built.forward()
        built.backward(trained, value=value)
        built.step()
    return built


def test_freeze_too_much_fires_where_only_norms_are_trained_and_nothing_is_learned() -> None:
    (one,) = findings(only_norms([2.3] * 24), "FREEZE_TOO_MUCH")
    assert set(one.place.parameters) == {"fc.weight", "out.weight"}
    assert one.fix.startswith("model.out.requires_grad_(True)")


def test_freeze_too_much_is_quiet_while_it_learns_and_where_weights_were_loaded() -> None:
    assert not findings(only_norms([2.3 - 0.08 * i for i in range(24)]), "FREEZE_TOO_MUCH")
    assert not findings(only_norms([2.3] * 24, head_trained=True), "FREEZE_TOO_MUCH")
    loaded = only_norms([2.3] * 24)
    loaded.add(Loaded(into="module", number=0, matched=4, of=4))
    assert not findings(loaded, "FREEZE_TOO_MUCH")
    assert not findings(only_norms([2.3] * 8), "FREEZE_TOO_MUCH")


def all_frozen(*, thawed: bool = False, with_grad: int = 0) -> RunBuilder:
    built = RunBuilder()
    built.model(("body.weight", "head.weight"))
    for number in (0, 1):
        built.parameter(number, built.parameters[number].name, root=0, requires_grad=thawed and number == 1)
    built.optimizer((0, 1))
    for _ in range(6):
        built.clear()
        built.forward()
        built.backward((1,) if thawed else (), value=2.3)
        built.step(with_grad=with_grad)
    return built


def test_freeze_too_much_fires_where_all_is_frozen_and_no_error_tells_it() -> None:
    (one,) = findings(all_frozen(), "FREEZE_TOO_MUCH")
    assert one.severity == "error"
    assert "All 2 parameters" in one.message
    assert set(one.place.parameters) == {"body.weight", "head.weight"}


def test_freeze_too_much_is_quiet_where_a_part_is_trained_or_gradients_are_set_by_hand() -> None:
    assert not findings(all_frozen(thawed=True), "FREEZE_TOO_MUCH")
    assert not findings(all_frozen(with_grad=2), "FREEZE_TOO_MUCH")
    beside = all_frozen()
    beside.optimizer((2,))
    beside.step(1, with_grad=1)  # of a prompt, or a head
    assert not findings(beside, "FREEZE_TOO_MUCH")


def flagged(*, frozen: bool) -> RunBuilder:
    built = RunBuilder()
    modules = (
        ModuleFacts(name="", cls="Net"),
        ModuleFacts(name="encoder", cls="Linear", requires_grad=False, parameters=(0, 1)),
        ModuleFacts(name="head", cls="Linear", parameters=(2, 3)),
    )
    numbers = built.model(modules=modules)
    if frozen:
        for number in (0, 1):
            built.parameter(number, built.parameters[number].name, root=0, requires_grad=False)
    built.optimizer(numbers)
    built.train(numbers[2:] if frozen else numbers)
    return built


def test_freeze_ineffective_fires_on_a_flag_of_a_module() -> None:
    (one,) = findings(flagged(frozen=False), "FREEZE_INEFFECTIVE")
    assert one.place.module == "encoder"
    assert one.fix == "model.encoder.requires_grad_(False)"


def test_freeze_ineffective_is_quiet_where_the_parameters_are_frozen_too() -> None:
    assert not findings(flagged(frozen=True), "FREEZE_INEFFECTIVE")
    assert not findings(simple(), "FREEZE_INEFFECTIVE")


def drifting(zero_from: int = 0, *, decay: float = 0.01, moves: bool = True, none: bool = False) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers, weight_decay=decay)
    for number in range(6):
        built.train(numbers, 1)
        grad = (None if none else 0.0) if number >= zero_from else 0.5
        update = 0.01 if moves else 0.0
        built.norms(numbers, number, grad=(grad, 0.5, 0.5, 0.5), update=(update, 0.1, 0.1, 0.1))
    return built


def test_frozen_moves_fires_on_decay_without_gradient() -> None:
    (one,) = findings(drifting(), "FROZEN_MOVES")
    assert one.place.parameters == ("encoder.weight",)
    assert "weight decay of 0.01" in one.message


def test_frozen_moves_is_quiet_on_single_zeros_and_on_still_parameters() -> None:
    quiet = (drifting(4), drifting(moves=False), drifting(decay=0.0), drifting(none=True), simple())
    for built in quiet:
        assert not findings(built, "FROZEN_MOVES")


def tied(
    kinds: tuple[str, str], *, trained: bool = True, config: dict[str, object] | None = None,
    shape: tuple[int, int] = (40, 8),
) -> Run:  # fmt: skip
    built = RunBuilder()
    modules = tuple(
        ModuleFacts(name=name, cls="X", kind=kind, parameters=(n,))
        for n, (name, kind) in enumerate(zip(("embed", "head"), kinds, strict=True))
    )
    numbers = built.model(("embed.weight", "head.weight"), modules=modules, config=config or {})
    role = "embedding" if kinds[0] == "embedding" else "weight"
    built.parameter(0, "embed.weight", root=0, role=role, shape=shape)
    built.parameter(1, "head.weight", root=0, role="weight", shape=shape)
    built.optimizer(numbers)
    built.train(numbers if trained else numbers[:1])
    if config is None:
        built.add(Tied(pairs=((0, 1),), differ=((0, 1),)))
    return built.run


def test_tie_broken_fires_on_an_embedding_and_its_head() -> None:
    (one,) = findings(tied(("embedding", "linear")), "TIE_BROKEN")
    assert one.fix.startswith("model.head.weight = model.embed.weight")


def test_tie_broken_fires_on_a_configuration_that_says_so() -> None:
    config: dict[str, object] = {"tie_word_embeddings": True, "vocab_size": 40}
    assert findings(tied(("embedding", "linear"), config=config), "TIE_BROKEN")
    assert not findings(tied(("embedding", "linear"), config=config, shape=(16, 16)), "TIE_BROKEN")
    assert not findings(tied(("embedding", "linear"), config=config | {"vocab_size": 50}), "TIE_BROKEN")


def test_tie_broken_is_quiet_on_copies_that_are_meant_to_part() -> None:
    assert not findings(tied(("linear", "linear")), "TIE_BROKEN")
    assert not findings(tied(("embedding", "linear"), trained=False), "TIE_BROKEN")
    assert not findings(tied(("embedding", "linear"), config={"tie_word_embeddings": False}), "TIE_BROKEN")


def loaded(**facts: Any) -> RunBuilder:
    built = simple()
    entries: dict[str, Any] = {
        "into": "module", "number": 0, "variable": "model", "strict": False, "matched": 0, "of": 4,
        "missing": ("encoder.weight",), "unexpected": ("module.encoder.weight",),
    }  # fmt: skip
    built.add(Loaded(**entries | facts))
    return built


def test_weights_not_loaded_fires_with_the_prefix() -> None:
    (one,) = findings(loaded(), "WEIGHTS_NOT_LOADED")
    assert one.severity == "error"
    assert 'removeprefix("module.")' in one.fix
    (other,) = findings(loaded(unexpected=("weight",)), "WEIGHTS_NOT_LOADED")
    assert '"encoder." + name' in other.fix


def test_weights_not_loaded_is_quiet_on_new_heads_and_parts() -> None:
    for facts in ({"matched": 2}, {"strict": True}, {"matched": 1, "unexpected": ()}):
        assert not findings(loaded(**facts), "WEIGHTS_NOT_LOADED")


def test_silent_write_fires_as_a_remark_on_trained_parameters() -> None:
    built = simple()
    for number in range(2):
        built.norms((0, 1, 2, 3), number, since=(2,), silent=(2,))
    assert [one.severity for one in findings(built, "SILENT_WRITE")] == ["info"]


def test_silent_write_is_quiet_on_moving_averages() -> None:
    built = simple()
    (average,) = built.model(("average.weight",), root=1, variable="average")
    for number in range(3):
        built.norms((0, average), number, since=(average,), silent=(average,))
    assert not findings(built, "SILENT_WRITE")


def pooler(*, uncalled: bool, steps: int = 7) -> RunBuilder:
    built = RunBuilder()
    numbers = built.model(("encoder.weight", "pooler.weight"))
    built.optimizer(numbers)
    built.train(numbers[:1], steps)
    built.add(Activations(root=0, uncalled=("pooler",) if uncalled else ()))
    return built


def test_param_unused_fires_as_a_remark() -> None:
    (one,) = findings(pooler(uncalled=True), "PARAM_UNUSED")
    assert (one.severity, one.place.module) == ("info", "pooler")


@pytest.mark.parametrize(("again", "severity"), [(True, "warning"), (False, "info")])
def test_param_unused_fires_louder_where_the_loss_is_assigned_again(again: bool, severity: str) -> None:
    built = pooler(uncalled=True)
    evidence = {"op": "mul", "shapes": [[8, 8]], "again": again, "is_loss": False}
    built.add(Probed(probe="dropped", answer="yes", evidence=evidence, file="train.py", line=31))
    (one,) = findings(built, "PARAM_UNUSED")
    assert (one.severity, one.place.line) == (severity, 31)
    assert "left" in one.message


@pytest.mark.parametrize(
    ("steps", "is_loss", "severity"), [(120, True, "warning"), (7, True, "info"), (120, False, "info")]
)
def test_param_unused_fires_louder_where_a_term_is_never_added(steps: int, is_loss: bool, severity: str) -> None:
    built = pooler(uncalled=True, steps=steps)
    evidence = {"op": "mse_loss", "shapes": [[8, 8]], "again": False, "is_loss": is_loss}
    built.add(Probed(probe="dropped", answer="yes", evidence=evidence, file="train.py", line=31))
    (one,) = findings(built, "PARAM_UNUSED")
    assert (one.severity, one.place.line) == (severity, 31)


def listed(unused: tuple[int, ...], uncalled: tuple[str, ...] = (), shape: tuple[int, ...] = (8, 8)) -> RunBuilder:
    """A list of three layers and a head, of which some are not in the loss."""
    built = RunBuilder()
    numbers = built.model(("blocks.0.weight", "blocks.1.weight", "blocks.2.weight", "head.weight"))
    for number in numbers[:3]:
        built.parameter(number, f"blocks.{number}.weight", root=0, shape=shape, role="weight")
    built.optimizer(numbers)
    built.train([one for one in numbers if one not in unused], 7)
    built.add(Activations(root=0, uncalled=uncalled))
    built.add(Followed(why="no gradient", unused=tuple(f"blocks.{n}.weight" for n in unused)))
    return built


def test_param_unused_fires_where_only_the_last_layer_of_a_list_is_used() -> None:
    (one,) = findings(listed((0, 1)), "PARAM_UNUSED")
    assert one.severity == "warning"
    assert "the output of blocks.2 replaces it" in one.message
    assert "x = layer(x)" in one.fix


@pytest.mark.parametrize(("unused", "uncalled"), [((2,), ()), ((0,), ()), ((0, 1), ("blocks.0", "blocks.1"))])
def test_param_unused_is_quiet_about_lists_whose_last_layers_or_uncalled_ones_are_left(
    unused: tuple[int, ...], uncalled: tuple[str, ...]
) -> None:
    assert all(one.severity == "info" for one in findings(listed(unused, uncalled), "PARAM_UNUSED"))


def test_param_unused_is_quiet_about_heads_of_other_tasks_which_give_no_input_for_the_next() -> None:
    (one,) = findings(listed((0, 1), shape=(3, 8)), "PARAM_UNUSED")
    assert one.severity == "info"
    assert "takes its place" not in one.message


def test_param_unused_is_quiet_on_modules_that_are_called_or_written() -> None:
    assert not findings(pooler(uncalled=False), "PARAM_UNUSED")
    built = pooler(uncalled=True)
    built.norms((0, 1), since=(1,))
    assert not findings(built, "PARAM_UNUSED")


def test_a_healthy_run_has_no_alarm_of_any_rule() -> None:
    assert alarms(simple(30)) == []
    assert alarms(Run([])) == []


def test_a_run_without_optional_facts_breaks_no_rule() -> None:
    built = missing_head()
    kept = [one for one in built.facts if type(one).__name__ not in ("Norms", "Root", "ParameterFacts")]
    alarms(Run([dataclasses.replace(one) for one in kept]))
