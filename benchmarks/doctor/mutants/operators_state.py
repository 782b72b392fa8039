"""Operators on copies of models, on evaluation and checkpoints, and on gradients and optimizers written by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from catalog import operator
from code_of import Code, Edit, receiver

Sites = Iterator[list[Edit]]
STALE = ("COPY_NEVER_UPDATED",)
DIFFERS = ("EVALUATION_INPUTS",)

# --- copies ------------------------------------------------------------------------------------------------------


@operator("copy-never-updated", "copies", *STALE)
def copy_never_updated(code: Code) -> Sites:
    names = ("soft_update", "update_ema", "update_key_encoder")
    for one in code.statements_of(*names):
        yield [code.delete(one)]
    for one in code.statements_of("load_state_dict"):
        if "target" in receiver(code, one.value):
            yield [code.delete(one)]
    for one in code.statements_of("update"):
        if receiver(code, one.value) == "teacher":
            yield [code.delete(one)]
    for node in code.nodes:
        if (
            isinstance(node, ast.With)
            and re.search(r"slow\.(mul_|copy_)", code.text(node))
            and code.loop(node) is not None
        ):
            yield [code.delete(node)]


@operator("average-the-other-way-round", "copies", "COPY_FOLLOWS_AT_ONCE", "AVERAGE_REVERSED")
def average_reversed(code: Code) -> Sites:
    for pattern, first, second in (
        (r"mul_\((.+?)\)\.add_\((\w+), alpha=(.+?)\)", 1, 3),
        (r"data \* (self\.momentum) \+ q\.data \* (\(1 - self\.momentum\))", 1, 2),
        (r"copy_\((self\.decay) \* slow \+ (\(1 - self\.decay\)) \*", 1, 2),
    ):
        for match in re.finditer(pattern, code.source):
            a, b = match[first], match[second]
            if "1 -" in a + b:
                yield [Edit(*match.span(first), b), Edit(*match.span(second), a)]


@operator("average-that-hardly-moves", "copies", *STALE, "AVERAGE_TOO_SLOW")
def average_slow(code: Code) -> Sites:
    for pattern, text in (
        (r"TAU = [\d., ]+0\.\d+", "GAMMA, TAU = 0.8, 1e-6"),
        (r"(?<!weight_)decay=(0\.9\d*)", "0.99999"),
        (r"momentum=(0\.95)", "0.99999"),
        (r"tau=(0\.\d+)", "0.99999"),
    ):
        for match in re.finditer(pattern, code.source):
            if match.lastindex:
                yield [Edit(*match.span(1), text)]
    for match in re.finditer(r"^GAMMA, TAU = .*$", code.source, re.MULTILINE):
        yield [Edit(*match.span(), "GAMMA, TAU = 0.8, 1e-6")]


@operator("copy-is-the-model-itself", "copies", "COPY_IS_ALIAS")
def copy_is_alias(code: Code) -> Sites:
    for call in code.calls("deepcopy"):
        if "state_dict" not in code.text(call):
            yield [code.replace(call, code.text(call.args[0]))]


@operator("target-with-a-graph", "copies", "LEAK_TO_OTHER_NET", "BACKWARD_TWICE")
def target_with_graph(code: Code) -> Sites:
    for node in code.nodes:
        if (
            isinstance(node, ast.With)
            and "no_grad" in code.text(node.items[0].context_expr)
            and code.loop(node) is not None
        ) and not re.search(r"argmax|metric|action =|score|eval|slow|score", code.text(node)):
            yield [code.unwrapped(node)]


@operator("target-from-the-trained-model", "copies", "COPY_UNUSED")
def target_from_model(code: Code) -> Sites:
    pairs = {
        "target_network(next": "q_network(next",
        "critic_target(s2, actor_target(s2))": "critic(s2, actor(s2))",
        "teacher.model(x +": "student(x +",
        "sample(ema,": "sample(model,",
    }
    for old, new in pairs.items():
        for match in re.finditer(re.escape(old), code.source):
            yield [Edit(*match.span(), new)]


@operator("copy-trained-too", "copies", "OPT_PARAM_TWICE", "LEAK_TO_OTHER_NET")
def copy_trained(code: Code) -> Sites:
    for match in re.finditer(
        r"(actor|critic|q_network|student|model|self\.encoder_q)\.parameters\(\), lr", code.source
    ):
        for other in (f"{match[1]}_target", "target_network", "teacher"):
            if (
                re.search(rf"^ *{other} = (copy\.deepcopy|train_teacher)", code.source, re.MULTILINE)
                and other != match[1]
            ):
                text = f"[*{match[1]}.parameters(), *{other}.parameters()], lr"
                yield [Edit(*match.span(), text)]


# --- evaluation and checkpoints ----------------------------------------------------------------------------------


@operator("best-weights-kept-by-reference", "evaluation", "STATE_NOT_COPIED", hidden=True, elsewhere=True)
def best_by_reference(code: Code) -> Sites:
    for call in code.calls("deepcopy"):
        if "state_dict" in code.text(call):
            yield [code.replace(call, code.text(call.args[0]))]


@operator(
    "state-not-loaded", "evaluation", "WEIGHTS_NOT_LOADED", "STATE_NOT_USED", after="taxonomy of real faults: loading"
)
def state_not_loaded(code: Code) -> Sites:
    for one in code.statements_of("load_state_dict"):
        if "target" not in receiver(code, one.value):
            yield [code.delete(one)]


@operator(
    "made-anew-after-loading",
    "evaluation",
    "OPT_STATE_UNUSED",
    "OPT_STATE_RESET",
    "OPT_PARAM_STALE",
    "SCHED_STALE_OPT",
)
def made_after_loading(code: Code) -> Sites:
    for match in re.finditer(r"^( *)(start = load\(path, .*\))\n", code.source, re.MULTILINE):
        made = "model, optimizer, scheduler = build()"
        yield [Edit(match.end(), match.end(), f"{match[1]}{made}\n")]
        yield [Edit(match.end(), match.end(), f"{match[1]}_, optimizer, scheduler = build()\n")]


@operator(
    "evaluated-on-training-rows", "evaluation", "EVAL_ON_TRAIN", hidden=True, after="DeepCrime VRM", elsewhere=True
)
def evaluated_on_train(code: Code) -> Sites:
    models = r"(?:model|net|detector|tagger|self\.model)"
    for test, train in (("test_x", "train_x"), ("test_images", "images"), ("val_x", "train_x")):
        if train in code.source:
            for match in re.finditer(rf"{models}\(({test})\)", code.source):
                line = code.source[code.source.rfind("\n", 0, match.start()) + 1 : code.source.find("\n", match.end())]
                label = test.replace("_x", "_y")
                edits = [Edit(*match.span(1), train)]
                at = code.source.find(label, match.end())
                if label != test and 0 <= at <= match.end() + len(line):
                    edits.append(Edit(at, at + len(label), train.replace("_x", "_y")))
                yield edits


@operator("evaluation-not-normalised", "evaluation", *DIFFERS, elsewhere=True)
def eval_not_normalised(code: Code) -> Sites:
    for node in code.nodes:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id.startswith(("test", "val"))
        ) and re.search(r"\(\w+ - mean\) / std", code.text(node.value)):
            yield [code.delete(node)]
        if isinstance(node, ast.Assign) and re.search(r"test_numbers = .*\(test\[1\] - mean\) / std", code.text(node)):
            text = code.text(node)
            yield [code.replace(node, text.replace("(test[1] - mean) / std", "test[1]"))]


@operator("evaluation-in-another-scale", "evaluation", *DIFFERS, elsewhere=True)
def eval_other_scale(code: Code) -> Sites:
    for node in code.nodes:
        if (
            isinstance(node, ast.With)
            and "no_grad" in code.text(node.items[0].context_expr)
            and not re.search(r"Embedding|ids\b", code.source)
        ):
            for call in ast.walk(node):
                if (
                    isinstance(call, ast.Call)
                    and code.text(call.func) in ("model", "net", "self.model", "detector", "lit")
                    and len(call.args) == 1
                ) and not isinstance(call.args[0], ast.Starred):
                    yield [code.replace(call.args[0], f"{code.text(call.args[0])} * 255")]


@operator("chosen-over-the-batch", "evaluation", "EVAL_WRONG_AXIS", "SHAPE_MISMATCH", elsewhere=True)
def argmax_over_batch(code: Code) -> Sites:
    for call in code.calls("argmax"):
        if "loss" in code.text(code.statement(call)):
            continue
        if code.keyword(call, "dim") is not None:
            yield [code.with_keyword(call, "dim", "0")]
        elif call.args:
            yield [code.replace(call.args[0], "0")]


@operator("evaluated-with-a-graph", "evaluation", elsewhere=True)
def evaluated_with_graph(code: Code) -> Sites:
    for node in code.nodes:
        if (
            isinstance(node, ast.With)
            and "no_grad" in code.text(node.items[0].context_expr)
            and code.loop(node) is None
        ) and ("metric" in code.text(node) or "accuracy" in code.text(node)):
            yield [code.unwrapped(node)]


@operator(
    "trained-on-what-is-evaluated", "evaluation", "EVAL_ON_TRAIN", hidden=True, after="taxonomy of real faults: leak"
)
def trained_on_test(code: Code) -> Sites:
    """The training rows are all rows."""
    for line in re.finditer(r".+", code.source):
        found = list(re.finditer(r"\b(x|images|pixels|labels|y)\[:(1400|1300|600|1100)\]", line[0]))
        if found:
            at = line.start()
            yield [Edit(at + match.start(), at + match.end(), match[1]) for match in found]


# --- gradients and optimizers by hand ----------------------------------------------------------------------------


def _backward_return(code: Code) -> Iterator[ast.expr]:
    for node in code.nodes:
        function = code.function(node)
        if (
            isinstance(node, ast.Return)
            and function is not None
            and function.name == "backward"
            and node.value is not None
        ):
            yield node.value.elts[0] if isinstance(node.value, ast.Tuple) else node.value


@operator("backward-of-the-wrong-sign", "gradients", "FUNCTION_GRADIENT")
def backward_sign(code: Code) -> Sites:
    for value in _backward_return(code):
        text = code.text(value)
        yield [code.replace(value, text[1:] if text.startswith("-") else f"-{text}")]


@operator("backward-forgets-what-comes-in", "gradients", "FUNCTION_GRADIENT")
def backward_alone(code: Code) -> Sites:
    for value in _backward_return(code):
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
            kept = value.right if code.text(value.left) == "grad_output" else value.left
            text = code.text(kept)
            yield [
                code.replace(
                    value, text if "s" in text.split() or "(" in text else f"{text} * torch.ones_like(grad_output)"
                )
            ]


@operator("backward-of-another-function", "gradients", "FUNCTION_GRADIENT")
def backward_other(code: Code) -> Sites:
    for value in _backward_return(code):
        if "grad_output * (" in code.text(value):
            yield [code.replace(value, "grad_output * (x > 1).float()")]


@operator("straight-through-forgotten", "gradients", "GRAPH_CUT", "LOSS_TERM_CUT")
def straight_through(code: Code) -> Sites:
    for match in re.finditer(r"z \+ \(q - z\)\.detach\(\)", code.source):
        yield [Edit(*match.span(), "q")]
        yield [Edit(*match.span(), "(z + q - z).detach()")]


@operator("own-step-writes-nothing", "gradients", "BACKEND_NO_WRITE", "STEP_WRITES_NOTHING")
def step_writes_nothing(code: Code) -> Sites:
    for match in re.finditer(r"p\.sub_\((.+)\)\n", code.source):
        yield [Edit(match.start(), match.end(), f"p = p - {match[1]}\n")]


@operator("own-step-uphill", "gradients", "LOSS_SIGN", "STEP_UPHILL")
def step_uphill(code: Code) -> Sites:
    for match in re.finditer(r"p\.sub_\(", code.source):
        yield [Edit(*match.span(), "p.add_(")]
    for match in re.finditer(r"p - inner_lr \* g", code.source):
        yield [Edit(*match.span(), "p + inner_lr * g")]


@operator("own-state-never-kept", "gradients", "OWN_STATE_LOST")
def state_never_kept(code: Code) -> Sites:
    for match in re.finditer(r'if "momentum" not in state:', code.source):
        yield [Edit(*match.span(), "if True:")]


@operator("own-rate-multiplied-in-the-step", "gradients", "LR_COLLAPSED", "LR_CHANGES_ITSELF")
def rate_multiplied(code: Code) -> Sites:
    for match in re.finditer(r"^( *)for p in group\[.params.\]:\n", code.source, re.MULTILINE):
        yield [Edit(match.start(), match.start(), f'{match[1]}group["lr"] *= 0.9\n')]


@operator("inner-step-without-graph", "gradients", "LOSS_TERM_CUT", "GRAPH_CUT", "SECOND_ORDER_LOST")
def inner_without_graph(code: Code) -> Sites:
    for match in re.finditer(r"create_graph=True\):", code.source):
        yield [Edit(*match.span(), "create_graph=False):")]
