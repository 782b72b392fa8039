"""Operators on axes and masks, on the formula of the loss, and on the targets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from catalog import operator
from code_of import BINARY, CROSS_ENTROPY, DISTANCE, Code, Edit, atom, name_of, receiver

CUT = ("GRAPH_CUT", "LOSS_TERM_CUT", "STEP_WITHOUT_GRADIENT", "LOSS_NO_GRAD", "NO_GRAD_ACTIVE", "TENSOR_MISUSED")
UNRELATED = ("LABELS_UNRELATED", "ROWS_TORN", "NOT_LEARNING")
CONSTANT = ("TARGETS_CONSTANT", "INPUT_IGNORED")
TORN = ("ROWS_TORN", "AXES_TORN", "BATCH_MIXING", "TIME_LEAK", "SHAPE_MISMATCH")
Sites = Iterator[list[Edit]]

# --- masks and axes ----------------------------------------------------------------------------------------------


@operator("softmax-over-the-batch", "axes", "SOFTMAX_DIM", "BATCH_MIXING")
def softmax_over_batch(code: Code) -> Sites:
    for call in filter(code.is_trained, code.calls("softmax", "log_softmax")):
        if code.keyword(call, "dim") is not None:
            yield [code.with_keyword(call, "dim", "0")]
        elif isinstance(call.args[-1], ast.Constant | ast.UnaryOp):
            yield [code.replace(call.args[-1], "0")]


@operator("causal-mask-removed", "axes", "TIME_LEAK", hidden=True)
def causal_mask_removed(code: Code) -> Sites:
    for call in code.calls("scaled_dot_product_attention"):
        yield [code.with_keyword(call, "is_causal", "False")]
    for call in code.calls("tril"):
        yield [code.replace(call, code.text(call.args[0]))]
    for call in code.calls("triu"):
        yield [code.replace(call, f"torch.zeros_like({code.text(call.args[0])})")]


@operator("causal-mask-off-by-one", "axes", "TIME_LEAK", hidden=True)
def causal_off_by_one(code: Code) -> Sites:
    for call in code.calls("tril"):
        yield [code.with_keyword(call, "diagonal", "1")]
    for call in code.calls("triu"):
        yield [code.with_keyword(call, "diagonal", "2")]


@operator("mask-inverted", "axes", "MASK_INVERTED", "TIME_LEAK", "NAN_IN_FORWARD", "LOSS_ALL_IGNORED")
def mask_inverted(code: Code) -> Sites:
    for node in code.nodes:
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            text, around = code.text(node), code.text(code.statement(node))
            if "argmax" not in around and re.search(r"mask|pad", around, re.IGNORECASE):
                yield [code.replace(node, text.replace("==", "!="))]


@operator("reshape-for-transpose", "axes", *TORN)
def reshape_for_transpose(code: Code) -> Sites:
    for call in filter(code.is_trained, code.calls("transpose")):
        owner, axes = receiver(code, call), [code.text(one) for one in call.args]
        if len(owner) < 40 and axes == ["1", "2"]:
            yield [code.replace(call, f"{owner}.reshape(len({owner}), {owner}.shape[2], -1)")]
    for call in filter(code.is_trained, code.calls("t")):
        owner = receiver(code, call)
        if not call.args and len(owner) < 30:
            yield [code.replace(call, f"{owner}.reshape({owner}.shape[1], -1)")]


@operator("mean-over-the-batch", "axes", "BATCH_MIXING", "SHAPE_MISMATCH", "LOSS_BROADCAST")
def mean_over_batch(code: Code) -> Sites:
    for call in filter(code.is_trained, code.calls("mean", "sum")):
        dim = code.keyword(call, "dim")
        if dim is not None and code.text(dim.value) != "0":
            yield [code.replace(dim.value, "0")]


@operator("squeeze-forgotten", "axes", "LOSS_BROADCAST", "SHAPE_MISMATCH")
def squeeze_forgotten(code: Code) -> Sites:
    for call in filter(code.is_trained, code.calls("squeeze")):
        yield [code.replace(call, receiver(code, call))]


@operator("target-with-an-axis-more", "axes", "LOSS_BROADCAST", "SHAPE_MISMATCH")
def target_with_axis(code: Code) -> Sites:
    for call in code.losses(DISTANCE):
        yield [code.replace(call.args[1], f"{atom(code, call.args[1])}.unsqueeze(1)")]


@operator("batch-first-forgotten", "axes", *TORN)
def batch_first_forgotten(code: Code) -> Sites:
    for call in code.calls("LSTM", "GRU", "TransformerEncoderLayer", "MultiheadAttention"):
        if (edit := code.without_keyword(call, "batch_first")) is not None:
            yield [edit]


@operator("joined-along-the-batch", "axes", "SHAPE_MISMATCH", "BATCH_MIXING")
def joined_along_batch(code: Code) -> Sites:
    for call in filter(code.is_trained, code.calls("cat")):
        dim = code.keyword(call, "dim")
        if dim is not None and code.text(dim.value) != "0":
            yield [code.replace(dim.value, "0")]


@operator("ignore-index-dropped", "axes", "PADDING_COUNTED", "INDEX_OUT_OF_RANGE")
def ignore_index_dropped(code: Code) -> Sites:
    for call in code.calls("CrossEntropyLoss", "cross_entropy"):
        if (edit := code.without_keyword(call, "ignore_index")) is not None:
            yield [edit]


# --- the formula of the loss -------------------------------------------------------------------------------------


@operator(
    "softmax-before-cross-entropy", "loss", "DOUBLE_ACTIVATION", after="taxonomy of real faults: wrong last activation"
)
def softmax_before(code: Code) -> Sites:
    for call in code.losses(CROSS_ENTROPY):
        yield [code.replace(call.args[0], f"torch.softmax({code.text(call.args[0])}, dim=1)")]


@operator("sigmoid-before-its-loss", "loss", "DOUBLE_ACTIVATION")
def sigmoid_before(code: Code) -> Sites:
    for call in code.losses(BINARY):
        yield [code.replace(call.args[0], f"torch.sigmoid({code.text(call.args[0])})")]


@operator("log-softmax-before-cross-entropy", "loss")
def log_softmax_before(code: Code) -> Sites:
    for call in code.losses(CROSS_ENTROPY):
        yield [code.replace(call.args[0], f"torch.log_softmax({code.text(call.args[0])}, dim=1)")]


@operator("sign-of-the-loss", "loss", "LOSS_SIGN")
def sign_of_loss(code: Code) -> Sites:
    for value in code.loss_values():
        if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
            yield [code.replace(value, code.text(value.operand))]
    for one in code.backwards():
        owner = receiver(code, one.value)
        if owner.isidentifier() and "loss" in owner:
            yield [code.before(one, f"{owner} = -{owner}")]


@operator(
    "sum-for-mean",
    "loss",
    "LR_TOO_HIGH",
    "EXPLODING",
    "TERM_GROWS_WITH_BATCH",
    "LOSS_MIXED_REDUCTION",
    "NAN_IN_FORWARD",
)
def sum_for_mean(code: Code) -> Sites:
    for call in code.calls(*(CROSS_ENTROPY | BINARY | DISTANCE)):
        if code.keyword(call, "reduction") is None and (call.args or name_of(call).endswith("Loss")):
            yield [code.with_keyword(call, "reduction", '"sum"')]
    for value in code.loss_values():
        for call in ast.walk(value):
            if (
                isinstance(call, ast.Call)
                and name_of(call) == "mean"
                and isinstance(call.func, ast.Attribute)
                and not call.args
                and not call.keywords
            ):
                yield [code.replace(call, f"{receiver(code, call)}.sum()")]


@operator("nll-of-scores", "loss", "LOSS_SIGN", "NLL_OF_SCORES", after="DeepCrime LCH, DeepFD loss")
def nll_of_scores(code: Code) -> Sites:
    for call in code.calls("cross_entropy"):
        if len(call.args) == 2 and not call.keywords and isinstance(call.func, ast.Attribute):
            start = code.text(call.func).removesuffix("cross_entropy")
            yield [code.replace(call.func, f"{start}nll_loss")]
    for call in code.calls("CrossEntropyLoss"):
        if not call.args:
            yield [code.replace(call.func, code.text(call.func).replace("CrossEntropyLoss", "NLLLoss"))]


@operator("loss-of-the-chosen-class", "loss", *CUT, after="DeepCrime LCH, DeepFD loss")
def loss_of_argmax(code: Code) -> Sites:
    for call in code.losses(CROSS_ENTROPY):
        first, second = call.args[:2]
        text = f"torch.nn.functional.mse_loss({atom(code, first)}.argmax(dim=1).float(), {atom(code, second)}.float())"
        yield [code.replace(call, text)]


@operator("distance-changed", "loss", after="DeepCrime LCH, DeepFD loss")
def distance_changed(code: Code) -> Sites:
    for old, new in (("mse_loss", "l1_loss"), ("smooth_l1_loss", "mse_loss"), ("l1_loss", "mse_loss")):
        for call in code.calls(old):
            if not isinstance(call.func, ast.Attribute):
                continue
            yield [code.replace(call.func, code.text(call.func).removesuffix(old) + new)]


@operator("square-forgotten", "loss", "LOSS_SIGN")
def square_forgotten(code: Code) -> Sites:
    for value in code.loss_values():
        for call in ast.walk(value):
            if isinstance(call, ast.Call) and name_of(call) == "pow" and code.text(call.args[-1]) == "2":
                yield [code.replace(call, receiver(code, call))]


@operator("term-of-the-loss-dropped", "loss", "FIELD_UNREAD", "PARAM_UNUSED", "GRAPH_CUT", "OPT_PARAM_MISSING")
def term_dropped(code: Code) -> Sites:
    for value in code.loss_values():
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub):
            yield [code.replace(value, code.text(value.left))]


@operator("term-a-thousand-times-heavier", "loss", "TERM_DOMINATES", "LR_TOO_HIGH", "EXPLODING")
def term_heavier(code: Code) -> Sites:
    for value in code.loss_values():
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub):
            yield [code.replace(value.right, f"1000 * {code.text(value.right)}")]


@operator("temperature-multiplied", "loss", "TEMPERATURE", "NOT_LEARNING")
def temperature_multiplied(code: Code) -> Sites:
    for node in code.nodes:
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Div)
            and re.search(r"\b(T|temperature)$", code.text(node.right))
        ):
            yield [code.replace(node, f"{code.text(node.left)} * {code.text(node.right)}")]


@operator("compared-with-itself", "loss", "LOSS_OF_ITSELF", "GRADIENTS_ZERO", "LOSS_CONSTANT", "NOT_LEARNING", *CUT)
def compared_with_itself(code: Code) -> Sites:
    for call in code.calls("kl_div"):
        names = {node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name) and "student" in node.id}
        for node in ast.walk(call.args[1]):
            if isinstance(node, ast.Name) and "teacher" in node.id and names:
                yield [code.replace(node, min(names))]
    for call in code.losses(DISTANCE):
        yield [code.replace(call.args[1], code.text(call.args[0]))]
    for value in code.loss_values():
        for node in ast.walk(value):
            if (
                isinstance(node, ast.BinOp)
                and isinstance(node.op, ast.Sub)
                and isinstance(node.right, ast.Name | ast.Call)
            ):
                yield [code.replace(node.right, code.text(node.left))]


@operator("margin-turned-round", "loss", "LOSS_SIGN", "GRADIENTS_ZERO", "NOT_LEARNING")
def margin_turned(code: Code) -> Sites:
    for call in code.calls("relu", "logsigmoid"):
        function = code.function(call)
        inner = call.args[0] if call.args else None
        if function is not None and function.name == "forward" and name_of(call) == "relu":
            continue
        parts = inner.left if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Add) else inner
        if isinstance(parts, ast.BinOp) and isinstance(parts.op, ast.Sub):
            left, right = code.text(parts.left), code.text(parts.right)
            yield [code.replace(parts, f"{right} - {left}")]


@operator("prediction-without-graph", "loss", *CUT)
def prediction_without_graph(code: Code) -> Sites:
    for call in code.losses():
        yield [code.replace(call.args[0], f"{atom(code, call.args[0])}.data")]


# --- targets -----------------------------------------------------------------------------------------------------


def _targets(code: Code) -> list[ast.expr]:
    """What losses compare with in training: names, or parts of names."""
    found = [call.args[1] for call in code.losses()]
    return [one for one in found if isinstance(one, ast.Name | ast.Subscript | ast.Attribute)]


@operator("targets-shuffled-in-each-batch", "targets", *UNRELATED, after="DeepCrime TCL, DeepMutation LE and DF")
def targets_shuffled(code: Code) -> Sites:
    for one in _targets(code):
        text = code.text(one)
        yield [code.replace(one, f"{text}[torch.randperm(len({text}))]")]


@operator("targets-of-the-row-before", "targets", *UNRELATED, after="DeepCrime TCL, DeepMutation LE")
def targets_rolled(code: Code) -> Sites:
    for one in _targets(code):
        yield [code.replace(one, f"{code.text(one)}.roll(1, 0)")]


@operator("targets-constant", "targets", *CONSTANT, after="DeepCrime TCL")
def targets_constant(code: Code) -> Sites:
    for one in _targets(code):
        yield [code.replace(one, f"torch.zeros_like({code.text(one)})")]


@operator("half-of-the-targets-wrong", "targets", *UNRELATED, after="DeepCrime TCL, DeepMutation LE")
def half_wrong(code: Code) -> Sites:
    for one in _targets(code):
        text = code.text(one)
        yield [
            code.replace(
                one, f"torch.where(torch.rand({text}.shape) < 0.5, {text}[torch.randperm(len({text}))], {text})"
            )
        ]


@operator("ones-for-zeros", "targets", *CONSTANT, "GRADIENTS_ZERO", "NOT_LEARNING")
def ones_for_zeros(code: Code) -> Sites:
    for node in code.nodes:
        if isinstance(node, ast.Call) and name_of(node) in ("zeros", "zeros_like"):
            around = code.text(code.statement(node))
            if re.search(r"loss|fake|truth", around) and "dtype" not in around:
                text = code.text(node.func).replace("zeros", "ones")
                yield [code.replace(node.func, text)]


@operator("targets-not-shifted", "targets", "TARGET_IS_INPUT", "TIME_LEAK", "LABEL_SHIFT")
def targets_not_shifted(code: Code) -> Sites:
    for pattern, text in (
        (r"(?<=ids)\[:, 1:\]|(?<=series)\[:, 1:\]", "[:, :-1]"),
        (r"\[1 : usable \+ 1\]", "[:usable]"),
        (r"\[i \+ 1 : i \+ 1 \+ block_size\]", "[i : i + block_size]"),
    ):
        for match in re.finditer(pattern, code.source):
            yield [Edit(match.start(), match.end(), text)]


@operator("targets-shifted-once-more", "targets", "LABEL_SHIFT", *UNRELATED)
def targets_shifted_more(code: Code) -> Sites:
    for one in _targets(code):
        around = code.text(code.statement(one))
        if "ids[:, 1:]" in code.source or "targets.view(-1)" in around:
            yield [code.replace(one, f"{code.text(one)}.roll(-1, -1)")]


@operator("ends-of-episodes-ignored", "targets", "TERMINALS_BOOTSTRAPPED", "FIELD_UNREAD")
def ends_ignored(code: Code) -> Sites:
    for match in re.finditer(r" \* \(1 - (dones|done)\)", code.source):
        yield [Edit(match.start(), match.end(), "")]


@operator("targets-rounded", "targets", "TARGETS_ROUNDED", *CONSTANT)
def targets_rounded(code: Code) -> Sites:
    for call in code.losses(DISTANCE):
        yield [code.replace(call.args[1], f"{atom(code, call.args[1])}.round()")]


@operator("targets-detached-from-their-order", "targets", *UNRELATED, after="DeepMutation DF")
def targets_out_of_order(code: Code) -> Sites:
    """Inputs are put in another order and their targets are not, or into one of their own."""
    for node in code.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
            first, second = node.value.elts
            if all(isinstance(one, ast.Subscript) and isinstance(one.slice, ast.Name) for one in (first, second)):
                assert isinstance(second, ast.Subscript)
                index = code.text(second.slice)
                if index in ("order", "perm", "shuffle"):
                    yield [code.replace(second, code.text(second.value))]
