"""Operators on inputs, on the first values of the weights, and on precision."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from catalog import operator
from code_of import Code, Edit, atom, name_of, receiver

UNRELATED = ("LABELS_UNRELATED", "ROWS_TORN", "NOT_LEARNING")
SCALE = ("INPUT_SCALE", "LR_TOO_HIGH", "SATURATED", "DEAD_UNITS", "INITIAL_LOSS", "EVALUATION_INPUTS")
Sites = Iterator[list[Edit]]

# --- inputs ------------------------------------------------------------------------------------------------------


def _standardised(code: Code) -> Iterator[ast.BinOp]:
    """Divisions that bring data to unit scale: by the largest value, or by the standard deviation."""
    for node in code.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            right = code.text(node.right)
            if right in ("255", "16", "10", "std", "self.std", "y_std", "SIZE") and code.loop(node) is None:
                yield node


@operator("normalisation-forgotten", "inputs", *SCALE, after="taxonomy of real faults: missing preprocessing")
def normalisation_forgotten(code: Code) -> Sites:
    for node in _standardised(code):
        left = node.left
        if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Sub):
            yield [code.replace(node, code.text(left.left))]
        else:
            yield [code.replace(node, code.text(left))]


@operator("normalised-twice", "inputs", "INPUT_SCALE", "LR_TOO_LOW", "SMALL_INPUTS")
def normalised_twice(code: Code) -> Sites:
    for node in _standardised(code):
        if code.text(node.right) in ("255", "16", "10"):
            yield [code.replace(node, f"{code.text(node)} / 255")]


def _fed(code: Code) -> Iterator[ast.expr]:
    """The first argument of the models that are trained, in training loops and what they call."""
    models = {known[0] for call in code.optimizers() if (known := code.optimized(call))} | {
        "model",
        "self.model",
        "self",
    }
    regions = [code.loop(one) or code.function(one) for one in code.backwards()]
    regions += code.training_loops()
    spans = [(one.lineno, one.end_lineno or one.lineno) for one in regions if one is not None]
    for node in code.nodes:
        inside = any(first <= node.lineno <= last for first, last in spans)
        if inside and isinstance(node, ast.Call) and code.text(node.func) in models and len(node.args) == 1:
            if isinstance(node.args[0], ast.Starred):
                continue
            yield node.args[0]


def _whole_numbers(code: Code) -> bool:
    return bool(code.calls("Embedding", "EmbeddingBag"))


@operator("inputs-of-0-to-255", "inputs", *SCALE)
def inputs_large(code: Code) -> Sites:
    if not _whole_numbers(code):
        for one in _fed(code):
            yield [code.replace(one, f"{atom(code, one)} * 255")]


@operator("inputs-drowned-in-noise", "inputs", "INPUT_NOISE", *UNRELATED, after="DeepCrime TAN, DeepMutation NP")
def inputs_noisy(code: Code) -> Sites:
    if not _whole_numbers(code):
        for one in _fed(code):
            text = code.text(one)
            yield [code.replace(one, f"{text} + 10 * torch.randn_like({text})")]


@operator(
    "inputs-overwritten",
    "inputs",
    "INPUTS_ALIKE",
    "INPUT_IGNORED",
    "FIELD_UNREAD",
    "GRAPH_CUT",
    "LOSS_TERM_CUT",
    *UNRELATED,
)
def inputs_overwritten(code: Code) -> Sites:
    for one in _fed(code):
        text = code.text(one)
        yield [code.replace(one, f"torch.zeros_like({text})")]


@operator("inputs-of-the-row-before", "inputs", *UNRELATED)
def inputs_rolled(code: Code) -> Sites:
    for one in _fed(code):
        yield [code.replace(one, f"{atom(code, one)}.roll(1, 0)")]


@operator("one-batch-again-and-again", "inputs", "DATA_REPEATED", after="DeepCrime TRD, DeepMutation DR and DM")
def one_batch(code: Code) -> Sites:
    for call in code.calls("randint"):
        target = code.parents[call]
        named = isinstance(target, ast.Assign) and code.text(target.targets[0]) in ("pick", "i", "idx", "batch")
        if (named or isinstance(target, ast.Subscript)) and code.loop(call) is not None and len(call.args) == 2:
            size = call.args[1]
            if isinstance(size, ast.Tuple) and len(size.elts) == 1:
                yield [code.replace(call, f"torch.arange({code.text(size.elts[0])})")]


@operator("few-rows-of-data", "inputs", "DATA_REPEATED", "TOO_FEW_DATA", after="DeepCrime TRD, DeepMutation DM")
def few_rows(code: Code) -> Sites:
    for call in code.calls("TensorDataset"):
        if len(call.args) >= 2:
            yield [code.replace(one, f"{code.text(one)}[:60]") for one in call.args]
    for node in code.nodes:
        if (
            isinstance(node, ast.Call)
            and name_of(node) == "randint"
            and node.args
            and isinstance(node.args[0], ast.Call)
            and name_of(node.args[0]) == "len"
        ):
            yield [code.replace(node.args[0], "40")]


@operator("loader-not-shuffled", "inputs", "DATA_ORDER")
def not_shuffled(code: Code) -> Sites:
    for call in code.calls("DataLoader"):
        if code.keyword(call, "shuffle") is not None:
            yield [code.with_keyword(call, "shuffle", "False")]


@operator(
    "sorted-by-label", "inputs", "DATA_ORDER", "SPLIT_DIFFERS", after="taxonomy of real faults: order of the data"
)
def sorted_by_label(code: Code) -> Sites:
    for node in code.nodes:
        if code.is_trained(node):
            continue
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
            texts = [code.text(one) for one in node.value.elts]
            match = re.fullmatch(r"(\w+)\[(order|perm|shuffle)\]", texts[1])
            if match and texts[0].endswith(f"[{match[2]}]"):
                yield [code.before(node, f"{match[2]} = {match[1]}.argsort()")]


@operator("loader-with-sorted-rows", "inputs", "DATA_ORDER", after="taxonomy of real faults: order of the data")
def loader_sorted(code: Code) -> Sites:
    for call in code.calls("DataLoader"):
        data = call.args[0] if call.args else None
        if (
            isinstance(data, ast.Call)
            and name_of(data) == "TensorDataset"
            and len(data.args) == 2
            and code.keyword(call, "shuffle")
        ):
            x, y = (code.text(one) for one in data.args)
            sorted_rows = [
                code.replace(data.args[0], f"{x}[{y}.argsort()]"),
                code.replace(data.args[1], f"{y}.sort().values"),
            ]
            yield [*sorted_rows, code.with_keyword(call, "shuffle", "False")]


@operator("labels-among-the-inputs", "inputs", "LABEL_LEAK", hidden=True, after="taxonomy of real faults: leak")
def leak(code: Code) -> Sites:
    """A noisy copy of the target is added to the inputs before the data are split."""
    for node in code.nodes:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Tuple)
            and len(node.value.elts) == 2
            and code.function(node) is None
        ):
            match = re.fullmatch(r"(\w+)\[(\w+)\], (\w+)\[\2\]", code.text(node.value).strip("()"))
            if match and match[2] in ("order", "perm", "shuffle"):
                x, y = match[1], match[3]
                yield [code.after(node, f"{x} = {x} + 0.3 * {y}.float().view(-1, *[1] * ({x}.dim() - 1))")]


# --- initialisation ----------------------------------------------------------------------------------------------


def _before_optimizer(code: Code, line: str) -> Sites:
    for call in code.optimizers():
        known = code.optimized(call)
        if known and not known[0].startswith(("self", "lit")):
            yield [code.before(code.statement(call), f"for weight in {known[0]}.parameters():\n    {line}")]


@operator("weights-zero", "initialisation", "SYMMETRIC_INIT", "GRADIENTS_ZERO", after="DeepCrime WCI")
def weights_zero(code: Code) -> Sites:
    return _before_optimizer(code, "torch.nn.init.zeros_(weight)")


@operator("weights-all-alike", "initialisation", "SYMMETRIC_INIT", after="DeepCrime WCI")
def weights_alike(code: Code) -> Sites:
    return _before_optimizer(code, "torch.nn.init.constant_(weight, 0.1)")


@operator(
    "weights-large",
    "initialisation",
    "LARGE_INIT",
    "EXPLODING",
    "SATURATED",
    "INITIAL_LOSS",
    "DEAD_UNITS",
    "NAN_IN_FORWARD",
    after="DeepCrime WCI",
)
def weights_large(code: Code) -> Sites:
    return _before_optimizer(code, "torch.nn.init.normal_(weight, std=3.0)")


@operator("weights-tiny", "initialisation", "SMALL_INIT", "VANISHING", "SYMMETRIC_INIT", after="DeepCrime WCI")
def weights_tiny(code: Code) -> Sites:
    return _before_optimizer(code, "torch.nn.init.normal_(weight, std=1e-5)")


@operator("own-initialisation-zero", "initialisation", "SYMMETRIC_INIT", "GRADIENTS_ZERO", after="DeepCrime WCI")
def own_zero(code: Code) -> Sites:
    for call in code.calls("uniform_", "normal_", "kaiming_uniform_"):
        if "init." in code.text(call.func):
            yield [code.replace(call, f"nn.init.zeros_({code.text(call.args[0])})")]


# --- precision ---------------------------------------------------------------------------------------------------


@operator("model-in-half-precision", "precision", "DTYPE_MISMATCH", "UPDATE_LOST_PRECISION")
def model_half(code: Code) -> Sites:
    for call in code.optimizers():
        known = code.optimized(call)
        if known and known[0].isidentifier():
            yield [code.before(code.statement(call), f"{known[0]} = {known[0]}.bfloat16()")]


@operator("weights-rounded-to-half", "precision", "UPDATE_LOST_PRECISION", "UPDATES_ROUNDED")
def weights_rounded(code: Code) -> Sites:
    models = [known[0] for call in code.optimizers() if (known := code.optimized(call)) and known[0].isidentifier()]
    for one in code.steps():
        if models and code.function(one) is None:
            text = f"for weight in {models[0]}.parameters():\n    weight.data = weight.data.bfloat16().float()"
            yield [code.after(one, text)]


@operator("gradients-not-unscaled", "precision", "CLIP_BEFORE_UNSCALE")
def unscale_removed(code: Code) -> Sites:
    for one in code.statements_of("unscale_"):
        yield [code.delete(one)]


@operator("stepped-without-the-scaler", "precision", "STEP_NOT_UNSCALED", "SCALER_MISUSED")
def stepped_without_scaler(code: Code) -> Sites:
    for one in code.statements_of("step"):
        if code.text(one) == "scaler.step(optimizer)":
            yield [code.replace(one, "optimizer.step()")]
            unscale = code.statements_of("unscale_")
            yield [code.replace(one, "optimizer.step()"), *(code.delete(other) for other in unscale)]


@operator("scaler-not-updated", "precision", "SCALER_NOT_UPDATED", "UNSCALE_TWICE", "STEP_TWICE_SCALER")
def scaler_not_updated(code: Code) -> Sites:
    for one in code.statements_of("update"):
        if code.text(one) == "scaler.update()":
            yield [code.delete(one)]


@operator("bound-of-a-number-removed", "precision", "NAN_IN_FORWARD", "NAN_IN_BACKWARD", "EXPLODING")
def bound_removed(code: Code) -> Sites:
    for call in filter(code.is_trained, code.calls("clamp")):
        yield [code.replace(call, receiver(code, call))]
    for match in re.finditer(r" \+ 1e-\d+\b", code.source):
        yield [Edit(match.start(), match.end(), "")]


@operator("exponential-without-its-log", "precision", "NAN_IN_FORWARD", "EXPLODING", "LOSS_SIGN")
def exponent_forgotten(code: Code) -> Sites:
    for call in filter(code.is_trained, code.calls("exp")):
        owner = receiver(code, call)
        if owner and owner != "torch" and not call.args:
            yield [code.replace(call, owner)]
