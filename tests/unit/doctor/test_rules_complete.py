"""Every rule has a page and two tests, and every name of the vocabulary has a rule or a reason why it has none."""

import ast
import dataclasses
import functools
import re
import textwrap

import pytest

from anybatch.doctor.rules.registry import FAMILIES, Found, Rule, all_rules
from anybatch.records.events import Stepped
from anybatch.records.runs import Run
from anybatch.records.samples import Activations
from rule_runs import simple
from source_tree import ROOT
from test_rules_crashes import KNOWN

VOCABULARY = re.findall(
    r"[A-Z_]+",
    """
OPT_PARAM_MISSING OPT_PARAM_UNREGISTERED OPT_PARAM_STALE OPT_PARAM_TWICE OPT_STATE_RESET FREEZE_TOO_MUCH
FREEZE_INEFFECTIVE FROZEN_MOVES TIE_BROKEN WEIGHTS_NOT_LOADED ZERO_GRAD_MISSING ZERO_GRAD_BEFORE_STEP STEP_MISSING
ZERO_GRAD_PER_MICROBATCH ACCUM_FIRST_WINDOW ACCUM_TAIL_DROPPED ACCUM_TAIL_LEAKS ACCUM_NOT_DIVIDED ACCUM_UNEQUAL_WEIGHT
CLIP_BEFORE_UNSCALE CLIP_NO_EFFECT CLIP_ALWAYS_ON LR_TOO_HIGH LR_TOO_LOW LR_ZERO LR_COLLAPSED SCHED_TOO_OFTEN
SCHED_STALE_OPT LR_IGNORED_ON_RESUME LR_NOT_SCALED GRAPH_CUT LOSS_TERM_CUT LOSS_NO_GRAD NO_GRAD_ACTIVE PARAM_UNUSED
CKPT_NO_INPUT_GRAD INFERENCE_TENSOR LEAK_TO_OTHER_NET BACKWARD_TWICE_STATE GRAPH_GROWS GRAPH_KEPT_IN_LOG
INPLACE_ON_SAVED EVAL_IN_TRAINING TRAIN_IN_EVAL DROPOUT_ALWAYS_ON DROPOUT_NEVER_ON FROZEN_BN_DRIFT BN_TINY_BATCH
VANISHING EXPLODING DEAD_UNITS SATURATED NAN_IN_FORWARD NAN_IN_BACKWARD UPDATE_LOST_PRECISION GRAD_UNDERFLOW
SYMMETRIC_INIT DECAY_DOMINATES BACKEND_NO_WRITE DOUBLE_ACTIVATION LOSS_BROADCAST LOSS_CONSTANT LOSS_SIGN
LOSS_ALL_IGNORED SOFTMAX_DIM LABEL_SHIFT BATCH_MIXING TIME_LEAK INPUT_IGNORED INPUT_SCALE DATA_ORDER DATA_REPEATED
LABEL_MISALIGNED DEVICE_MISMATCH DTYPE_MISMATCH DDP_BYPASSED INPUT_REQUIRES_GRAD SILENT_WRITE
""",
)
"""What the doctor is to be able to say."""

WITHOUT_A_RULE = {
    "LR_NOT_SCALED": "a hint in the message of LR_TOO_HIGH: no fact says for which batch a rate was meant",
    "LABEL_MISALIGNED": "CANNOT_FIT_BATCH says it: a batch that can't be fitted although gradients flow",
}

PARTS = ("## What is seen", "## Why it matters", "## What to change", "## When it is fine")


@functools.cache
def names_of_tests() -> set[str]:
    """Returns the names of all tests of rules; those of crashes are parameters in ``test_rules_crashes``."""
    return {
        node.name
        for path in (ROOT / "tests").rglob("test_rules_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    } | {f"test_{name.lower()}_{kind}" for name in KNOWN for kind in ("fires", "is_quiet")}


def untested(name: str, tests: set[str]) -> list[str]:
    """Returns which of its two tests a rule lacks; a longer name of another rule does not count."""
    start = f"test_{name.lower()}_"
    return [kind for kind in ("fires", "is_quiet") if not any(test.startswith(start + kind) for test in tests)]


@pytest.mark.parametrize("rule", all_rules().values(), ids=lambda rule: rule.name)
def test_each_rule_has_a_page_and_two_tests(rule: Rule) -> None:
    assert not (missing := untested(rule.name, names_of_tests())), f"{rule.name} has no test that it {missing}"
    heads = re.findall(r"^## .*", rule.page, re.MULTILINE)
    assert heads in ([*PARTS], [*PARTS, "## Source"]), f"the page of {rule.name} has the parts {heads}"
    assert "`" in rule.page, f"the page of {rule.name} shows no code"
    for code in re.findall(r"```python\n(.*?)```", rule.page, re.DOTALL):
        compile(textwrap.dedent(code), rule.name, "exec")


def test_each_name_of_the_vocabulary_has_a_rule_or_a_reason() -> None:
    rules = all_rules()
    assert not (lost := [name for name in VOCABULARY if name not in rules and name not in WITHOUT_A_RULE]), lost
    assert not set(WITHOUT_A_RULE) & set(rules)
    assert all(WITHOUT_A_RULE.values())


def test_codes_lie_in_the_fifty_of_a_family_and_explain_only_rules() -> None:
    rules = all_rules()
    for rule in rules.values():
        assert re.fullmatch(r"AB\d{3}", rule.code)
        number = int(rule.code[2:])
        assert any(first <= number < first + 50 or (first == 101 and number < 201) for first in FAMILIES.values())
        assert not (unknown := set(rule.explains) - set(rules) - set(WITHOUT_A_RULE)), (
            f"{rule.name} explains {sorted(unknown)}"
        )


def test_a_rule_without_tests_is_found() -> None:
    tests = {"test_some_rule_fires_on_this", "test_some_rule_longer_is_quiet_on_that"}
    assert untested("SOME_RULE", tests) == ["is_quiet"]
    assert untested("OTHER", tests) == ["fires", "is_quiet"]


@pytest.mark.parametrize("rule", all_rules().values(), ids=lambda rule: rule.name)
def test_each_threshold_is_declared_with_its_source_and_can_be_another_one(rule: Rule) -> None:
    assert all(limit.source.strip() for limit in rule.limits.values())
    for factor in (0.5, 2.0):
        assert rule.findings(Run([]), **{name: factor * limit for name, limit in rule.limits.items()}) == []
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_limit'"):
        rule.judge(Run([]), no_such_limit=1.0)


def test_what_is_found_gets_its_names_and_its_place_from_the_run() -> None:
    built = simple()
    step = next(built.run.of(Stepped))
    rule = Rule("AB199", "SOME_RULE", "warning", (), lambda run: [Found(text="wrong", since=step, parameters=(0, 1))])
    (found,) = rule.findings(built.run)
    assert (found.code, found.severity, found.step, found.at) == ("AB199", "warning", step.step, step.at)
    assert found.place.module == "encoder"
    assert found.place.parameters == ("encoder.weight", "encoder.bias")
    assert (found.place.file, found.place.line) == (step.file, step.line)
    silent = dataclasses.replace(rule, needs=(Activations,))
    assert not silent.findings(built.run), "it needs what was not recorded"
