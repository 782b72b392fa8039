"""Operators on optimizers, the graph, the order of the calls, and modes."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from catalog import operator
from code_of import Code, Edit, name_of, receiver

ACTIVATIONS = ("relu", "tanh", "gelu", "silu", "leaky_relu", "softplus")
ACTIVATION_MODULES = ("ReLU", "Tanh", "GELU", "SiLU", "LeakyReLU", "ELU")
CUT = ("GRAPH_CUT", "LOSS_TERM_CUT", "STEP_WITHOUT_GRADIENT", "LOSS_NO_GRAD", "NO_GRAD_ACTIVE", "TENSOR_MISUSED")
Sites = Iterator[list[Edit]]

# --- wiring ------------------------------------------------------------------------------------------------------


@operator("step-removed", "wiring", "STEP_MISSING")
def step_removed(code: Code) -> Sites:
    for one in code.steps():
        yield [code.delete(one)]


@operator("backward-removed", "wiring", "STEP_WITHOUT_GRADIENT", "LOSS_NO_GRAD")
def backward_removed(code: Code) -> Sites:
    for one in code.backwards():
        yield [code.delete(one)]


@operator(
    "model-made-after-its-optimizer", "wiring", "OPT_PARAM_STALE", after="taxonomy of real faults: wrong parameters"
)
def model_rebuilt(code: Code) -> Sites:
    for call in code.optimizers():
        statement, known = code.statement(call), code.optimized(call)
        made = code.made(known[0]) if known else None
        if made is not None and code.parents[made] is code.parents[statement]:
            yield [code.after(statement, code.lines(made))]


@operator("only-the-last-layer-optimized", "wiring", "OPT_PARAM_MISSING")
def part_of_parameters(code: Code) -> Sites:
    for call in code.optimizers():
        known = code.optimized(call)
        if known is None:
            continue
        variable, parameters = known
        made, owner = code.made(variable), code.class_of(variable)
        if made is not None and isinstance(made.value, ast.Call) and name_of(made.value) == "Sequential":
            yield [code.replace(parameters, f"{variable}[-1].parameters()")]
        elif owner is not None:
            names = [
                node.targets[0].attr
                for node in ast.walk(owner)
                if isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Attribute)
                and isinstance(node.value, ast.Call)
                and name_of(node.value) in ("Linear", "Conv2d", "Conv1d", "Sequential", "ConvTranspose2d")
            ]
            if len(names) > 1:
                yield [code.replace(parameters, f"{variable}.{names[-1]}.parameters()")]


@operator("layers-in-a-plain-list", "wiring", "OPT_PARAM_UNREGISTERED", "EMPTY_OPTIMIZER")
def layers_in_a_list(code: Code) -> Sites:
    for call in code.calls("ModuleList"):
        yield [code.replace(call, code.text(call.args[0]))]


@operator("optimizer-made-in-the-loop", "wiring", "OPT_STATE_RESET")
def optimizer_in_the_loop(code: Code) -> Sites:
    made = [code.statement(call) for call in code.optimizers()]
    for loop in code.training_loops():
        for one in made:
            if isinstance(one, ast.Assign) and code.function(one) is code.function(loop) and one.lineno < loop.lineno:
                yield [code.before(loop.body[0], code.lines(one))]


@operator("hidden-state-detached", "wiring", *CUT)
def hidden_detached(code: Code) -> Sites:
    for function in code.forwards():
        for one in function.body:
            if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) and isinstance(one.value, ast.Call):
                yield [code.replace(one.value, f"{code.text(one.value)}.detach()")]


@operator("through-a-list-of-numbers", "wiring", *CUT)
def through_numbers(code: Code) -> Sites:
    for function in code.forwards():
        found = [
            one
            for one in function.body
            if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) and isinstance(one.value, ast.Call)
        ]
        if found:
            yield [code.replace(found[-1].value, f"torch.tensor({code.text(found[-1].value)}.tolist())")]


@operator("loss-made-a-new-tensor", "wiring", *CUT)
def loss_made_new(code: Code) -> Sites:
    for one in code.backwards():
        owner = receiver(code, one.value)
        if owner.isidentifier() and owner != "accelerator" and owner != "fabric":
            yield [code.before(one, f"{owner} = torch.tensor({owner}.item(), requires_grad=True)")]


@operator("forward-under-no-grad", "wiring", *CUT)
def forward_without_graph(code: Code) -> Sites:
    models = {known[0] for call in code.optimizers() if (known := code.optimized(call))}
    for loop in code.training_loops():
        for one in loop.body:
            if isinstance(one, ast.Assign) and any(
                isinstance(node, ast.Call) and code.text(node.func) in models for node in ast.walk(one)
            ):
                yield [code.inside(one, "with torch.no_grad():")]


@operator(
    "all-but-biases-frozen",
    "wiring",
    "FREEZE_TOO_MUCH",
    "SYMMETRIC_INIT",
    after="taxonomy of real faults: frozen layers",
)
def all_frozen(code: Code) -> Sites:
    for call in code.optimizers():
        known = code.optimized(call)
        if known and known[0].isidentifier():
            text = (
                f'for name, parameter in {known[0]}.named_parameters():\n    parameter.requires_grad = "bias" in name'
            )
            yield [code.before(code.statement(call), text)]


@operator("term-of-the-loss-detached", "wiring", *CUT)
def term_detached(code: Code) -> Sites:
    for value in code.loss_values():
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            right = value.right
            text = code.text(right)
            yield [
                code.replace(
                    right, f"{text}.detach()" if isinstance(right, ast.Name | ast.Call) else f"({text}).detach()"
                )
            ]


@operator("term-of-the-loss-as-a-number", "wiring", *CUT)
def term_as_number(code: Code) -> Sites:
    for value in code.loss_values():
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            left = value.left
            text = code.text(left)
            yield [
                code.replace(left, f"{text}.item()" if isinstance(left, ast.Name | ast.Call) else f"({text}).item()")
            ]


@operator("both-optimizers-get-one-model", "wiring", "OPT_PARAM_TWICE", "OPT_PARAM_MISSING", "STEP_WITHOUT_GRADIENT")
def players_swapped(code: Code) -> Sites:
    found = [known for call in code.optimizers() if (known := code.optimized(call))]
    for first, second in itertools.pairwise(found):
        if first[0] != second[0] and code.function(first[1]) is code.function(second[1]):
            yield [code.replace(second[1], f"{first[0]}.parameters()")]


@operator("activations-removed", "wiring", "NO_ACTIVATION", after="DeepCrime ARM, DeepMutation AFRs, DeepFD activation")
def activations_removed(code: Code) -> Sites:
    inside = [call for call in code.calls(*ACTIVATIONS) if call.args and _in_forward(code, call)]
    if inside:
        rest = [Edit(code.span(one.args[0])[1], code.span(one)[1] - 1, "") for one in inside if len(one.args) > 1]
        yield [*(code.replace(one.func, "") for one in inside), *rest]
    modules = code.calls(*ACTIVATION_MODULES)
    if modules:
        yield [code.replace(call, "nn.Identity()") for call in modules]


@operator("activations-to-sigmoid", "wiring", "VANISHING", "SATURATED", after="DeepCrime ACH, DeepFD activation")
def activations_to_sigmoid(code: Code) -> Sites:
    inside = [call for call in code.calls(*ACTIVATIONS) if len(call.args) == 1 and _in_forward(code, call)]
    if inside:
        yield [code.replace(call.func, "torch.sigmoid") for call in inside]
    modules = code.calls(*ACTIVATION_MODULES)
    if modules:
        yield [code.replace(call, "nn.Sigmoid()") for call in modules]


def _in_forward(code: Code, node: ast.AST) -> bool:
    function = code.function(node)
    return function is not None and function.name in ("forward", "encode", "decode")


@operator(
    "output-through-a-relu",
    "wiring",
    "OUTPUT_RANGE",
    "DEAD_UNITS",
    "DOUBLE_ACTIVATION",
    "GRADIENTS_ZERO",
    after="DeepCrime AAL",
)
def output_activated(code: Code) -> Sites:
    for function in code.forwards():
        last = function.body[-1]
        value = last.value if isinstance(last, ast.Return) else None
        if isinstance(value, ast.Call) and code.text(value.func).startswith("self."):
            yield [code.replace(value, f"torch.relu({code.text(value)})")]


@operator(
    "detach-forgotten",
    "wiring",
    "LEAK_TO_OTHER_NET",
    "BACKWARD_TWICE",
    "BACKWARD_TWICE_STATE",
    "GRAPH_GROWS",
    "GRAPH_KEPT_IN_LOG",
    "INPLACE_ON_SAVED",
)
def detach_forgotten(code: Code) -> Sites:
    for call in code.calls("detach"):
        yield [code.replace(call, receiver(code, call))]


@operator("generator-detached", "wiring", *CUT)
def generator_detached(code: Code) -> Sites:
    for node in code.nodes:
        if not isinstance(node, ast.Assign):
            continue
        name, function = code.text(node.targets[0]).lower(), code.function(node)
        plays = name in ("g_loss", "loss_g", "actor_loss") or (function is not None and "generator" in function.name)
        if plays and "loss" in name:
            inner = [one for one in ast.walk(node.value) if isinstance(one, ast.Call) and one.args]
            made = [one.args[0] for one in inner if isinstance(one.args[0], ast.Name | ast.Call)]
            if made:
                target = made[-1] if isinstance(made[-1], ast.Name) else made[0]
                yield [code.replace(target, f"{code.text(target)}.detach()")]


@operator("create-graph-forgotten", "wiring", *CUT)
def create_graph_forgotten(code: Code) -> Sites:
    for call in code.calls("grad"):
        if (edit := code.without_keyword(call, "create_graph")) is not None:
            yield [edit]


@operator("biases-removed", "wiring", after="DeepCrime WRB")
def biases_removed(code: Code) -> Sites:
    calls = [call for call in code.calls("Linear") if len(call.args) == 2 and code.keyword(call, "bias") is None]
    if calls:
        yield [code.with_keyword(call, "bias", "False") for call in calls]


# --- order -------------------------------------------------------------------------------------------------------


def _trios(code: Code) -> Iterator[tuple[ast.Expr | None, ast.Expr, ast.Expr]]:
    """In each block that has them: the clearing, the backward and the step."""
    for backward in code.backwards():
        block = code.block(backward)
        steps = [one for one in code.steps() if one in block and one.lineno > backward.lineno]
        clears = [one for one in code.statements_of("zero_grad") if one in block]
        if steps:
            yield (clears[0] if clears else None), backward, steps[0]


@operator("zero-grad-removed", "order", "ZERO_GRAD_MISSING")
def zero_grad_removed(code: Code) -> Sites:
    clears = code.statements_of("zero_grad")
    for owner in dict.fromkeys(receiver(code, one.value) for one in clears):
        yield [code.delete(one) for one in clears if receiver(code, one.value) == owner]


@operator("zero-grad-between-backward-and-step", "order", "ZERO_GRAD_BEFORE_STEP")
def zero_grad_before_step(code: Code) -> Sites:
    for clear, backward, _ in _trios(code):
        if clear is not None:
            yield [code.after(backward, code.lines(clear)), code.delete(clear)]


@operator("step-before-backward", "order", "STEP_BEFORE_BACKWARD", "ZERO_GRAD_BEFORE_STEP", "STEP_WITHOUT_GRADIENT")
def step_before_backward(code: Code) -> Sites:
    for _, backward, step in _trios(code):
        yield [code.before(backward, code.lines(step)), code.delete(step)]


@operator("step-once-an-epoch", "order", "STEP_RARE", "ZERO_GRAD_PER_MICROBATCH")
def step_per_epoch(code: Code) -> Sites:
    for one in code.steps():
        loop = code.loop(one)
        if loop is not None and one in loop.body and code.loop(loop) is not None:
            yield [code.after(loop, code.lines(one)), code.delete(one)]


@operator("graphs-kept-in-the-total", "order", "GRAPH_KEPT_IN_LOG", hidden=True)
def total_keeps_graphs(code: Code) -> Sites:
    for node in code.nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Call) and name_of(node.value) == "item":
            yield [code.replace(node.value, receiver(code, node.value))]


@operator("graph-retained", "order", "RETAIN_GRAPH")
def graph_retained(code: Code) -> Sites:
    for one in code.backwards():
        call = one.value
        if isinstance(call, ast.Call) and not call.args and not call.keywords:
            yield [code.with_keyword(call, "retain_graph", "True")]


# --- modes -------------------------------------------------------------------------------------------------------


@operator("train-mode-forgotten", "modes", "EVAL_IN_TRAINING")
def train_forgotten(code: Code) -> Sites:
    if code.calls("eval"):
        for one in code.statements_of("train"):
            if isinstance(one.value, ast.Call) and not one.value.args:
                yield [code.delete(one)]


@operator("trained-in-evaluation-mode", "modes", "EVAL_IN_TRAINING", "DROPOUT_NEVER_ON")
def trained_in_eval(code: Code) -> Sites:
    for one in code.statements_of("train"):
        if isinstance(one.value, ast.Call) and not one.value.args:
            yield [code.replace(one, f"{receiver(code, one.value)}.eval()")]


@operator("evaluation-mode-forgotten", "modes", "TRAIN_IN_EVAL", elsewhere=True)
def eval_forgotten(code: Code) -> Sites:
    for one in code.statements_of("eval"):
        yield [code.delete(one)]


@operator("functional-dropout-always-on", "modes", "DROPOUT_ALWAYS_ON", elsewhere=True)
def dropout_always(code: Code) -> Sites:
    for call in code.calls("dropout"):
        if (edit := code.without_keyword(call, "training")) is not None:
            yield [edit]


@operator("dropout-of-nearly-all", "modes", "DROPOUT_TOO_HIGH", after="DeepCrime RCD")
def dropout_heavy(code: Code) -> Sites:
    for call in code.calls("Dropout"):
        yield [code.replace(call.args[0], "0.95")]
    for call in code.calls("dropout"):
        if code.keyword(call, "p") is not None:
            yield [code.with_keyword(call, "p", "0.95")]
        elif len(call.args) > 1:
            yield [code.replace(call.args[1], "0.95")]


@operator("momentum-of-statistics-exchanged", "modes", "BN_MOMENTUM", elsewhere=True)
def statistics_of_the_last(code: Code) -> Sites:
    for call in code.calls("BatchNorm1d", "BatchNorm2d"):
        yield [code.with_keyword(call, "momentum", "0.99")]


@operator("statistics-not-kept", "modes", "TRAIN_IN_EVAL", "BATCH_MIXING", elsewhere=True)
def statistics_not_kept(code: Code) -> Sites:
    for call in code.calls("BatchNorm1d", "BatchNorm2d"):
        yield [code.with_keyword(call, "track_running_stats", "False")]
