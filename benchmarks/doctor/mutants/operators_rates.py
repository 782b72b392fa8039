"""Operators on learning rates, schedules, numbers of steps, accumulation and clipping."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from catalog import operator
from code_of import Code, Edit, name_of, receiver

Sites = Iterator[list[Edit]]
HIGH = ("LR_TOO_HIGH", "EXPLODING", "NAN_IN_FORWARD", "DEAD_UNITS")


def _rates(code: Code) -> list[tuple[ast.expr, float]]:
    """The learning rates that are written as numbers: of optimizers, of functions that make them, of settings."""
    found = []
    for node in code.nodes:
        name = node.arg if isinstance(node, ast.keyword) else ""
        if name in ("lr", "learning_rate", "max_lr") and isinstance(node.value, ast.Constant):
            found.append((node.value, float(node.value.value)))
        elif isinstance(node, ast.Call) and name_of(node) == "add_argument" and "learning_rate" in code.text(node):
            default = code.keyword(node, "default")
            if default is not None and isinstance(default.value, ast.Constant):
                found.append((default.value, float(default.value.value)))
        elif isinstance(node, ast.FunctionDef):
            names = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            for argument, value in zip(names, node.args.defaults, strict=True):
                if argument.arg == "lr" and isinstance(value, ast.Constant):
                    found.append((value, float(value.value)))
    return found


# --- rates and schedules -----------------------------------------------------------------------------------------


@operator(
    "rate-a-hundred-times-higher", "rates", *HIGH, after="taxonomy of real faults: learning rate; DeepFD learning rate"
)
def rate_high(code: Code) -> Sites:
    for node, value in _rates(code):
        yield [code.replace(node, f"{value * 100:g}")]


@operator("rate-in-thousandths", "rates", *HIGH)
def rate_thousands(code: Code) -> Sites:
    for node, value in _rates(code):
        yield [code.replace(node, f"{value * 1000:g}")]


@operator("rate-far-too-low", "rates", "LR_TOO_LOW", after="DeepCrime HLR, DeepFD learning rate")
def rate_low(code: Code) -> Sites:
    for node, value in _rates(code):
        yield [code.replace(node, f"{value / 3000:g}")]


@operator("schedule-stepped-for-every-batch", "rates", "SCHED_TOO_OFTEN", "LR_COLLAPSED")
def schedule_often(code: Code) -> Sites:
    for one in code.schedules():
        own = code.loop(one)
        for step in code.steps():
            inner = code.loop(step)
            if own is not None and inner is not None and inner is not own and code.loop(inner) is own:
                yield [code.delete(one), code.after(step, code.lines(one))]
    for one in code.schedules():  # a class steps it once an epoch, and its optimizer elsewhere
        owner = receiver(code, one.value)
        for step in code.steps():
            if owner.startswith("self.") and code.function(step) is not code.function(one):
                yield [code.delete(one), code.after(step, code.lines(one))]


@operator("schedule-never-stepped", "rates", "SCHED_NEVER", after="taxonomy of real faults: schedule")
def schedule_never(code: Code) -> Sites:
    for one in code.schedules():
        yield [code.delete(one)]


@operator("schedule-to-nothing", "rates", "LR_COLLAPSED")
def schedule_to_nothing(code: Code) -> Sites:
    for call in code.calls("StepLR", "ExponentialLR", "MultiStepLR"):
        yield [code.with_keyword(call, "gamma", "0.001" if name_of(call) != "ExponentialLR" else "0.8")]
    for call in code.calls("LinearLR"):
        yield [code.with_keyword(call, "total_iters", "5"), code.with_keyword(call, "end_factor", "1e-5")]


@operator("schedule-too-short", "rates", "LR_COLLAPSED", "LR_ZERO", "SCHED_PAST_END")
def schedule_short(code: Code) -> Sites:
    for call in code.calls("CosineAnnealingLR", "OneCycleLR", "get_linear_schedule_with_warmup"):
        for one in call.keywords:
            if one.arg in ("T_max", "total_steps", "num_training_steps"):
                yield [code.replace(one.value, f"{code.text(one.value)} // 10")]


@operator("warm-up-in-whole-numbers", "rates", "LR_ZERO")
def warm_up_whole(code: Code) -> Sites:
    for node in code.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and "step" in code.text(node.left):
            function = next(
                (one for one in code.ancestors(node) if isinstance(one, ast.Lambda | ast.FunctionDef)), None
            )
            if function is not None and code.text(node.right) in ("warmup", "20"):
                yield [code.replace(node, f"({code.text(node.left)}) // {code.text(node.right)}")]


@operator("lambda-gives-the-rate", "rates", "LAMBDA_GIVES_RATE", "LR_TOO_LOW")
def lambda_gives_rate(code: Code) -> Sites:
    for call in code.calls("LambdaLR"):
        given = call.args[1] if len(call.args) > 1 else call.keywords[0].value
        text = code.text(given)
        inner = code.text(given.body) if isinstance(given, ast.Lambda) else f"{text}(step)"
        yield [code.replace(given, f"lambda step: 3e-3 * {inner}")]


@operator("decay-of-one", "rates", "DECAY_DOMINATES", after="DeepCrime RAW")
def decay_one(code: Code) -> Sites:
    for call in code.optimizers():
        if name_of(call) not in ("LBFGS", "SignMomentum"):
            yield [code.with_keyword(call, "weight_decay", "20.0" if name_of(call) == "AdamW" else "1.0")]


@operator("momentum-near-one", "rates", "MOMENTUM_TOO_HIGH", *HIGH)
def momentum_high(code: Code) -> Sites:
    for call in code.optimizers():
        if name_of(call) == "SGD":
            yield [code.with_keyword(call, "momentum", "0.999")]


@operator("betas-exchanged", "rates", "BETAS_EXCHANGED", *HIGH)
def betas_exchanged(code: Code) -> Sites:
    for call in code.optimizers():
        betas = code.keyword(call, "betas")
        if betas is not None and isinstance(betas.value, ast.Tuple):
            first, second = (code.text(one) for one in betas.value.elts)
            yield [code.replace(betas.value, f"({second}, {first})")]


@operator("plain-descent-with-the-rate-of-adam", "rates", "LR_TOO_LOW", after="DeepCrime OCH, DeepFD optimizer")
def descent_for_adam(code: Code) -> Sites:
    for call in code.optimizers():
        if name_of(call) in ("Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"):
            edits = [code.replace(call.func, code.text(call.func).removesuffix(name_of(call)) + "SGD")]
            for name in ("betas", "eps"):
                if (edit := code.without_keyword(call, name)) is not None:
                    edits.append(edit)
            yield edits


@operator("adam-with-the-rate-of-descent", "rates", *HIGH, after="DeepCrime OCH, DeepFD optimizer")
def adam_for_descent(code: Code) -> Sites:
    for call in code.optimizers():
        if name_of(call) == "SGD":
            edits = [code.replace(call.func, code.text(call.func).removesuffix("SGD") + "Adam")]
            for name in ("momentum", "nesterov"):
                if (edit := code.without_keyword(call, name)) is not None:
                    edits.append(edit)
            if len(edits) < 3:  # two keywords beside each other would share a comma
                yield edits


@operator("few-steps", "rates", "TOO_FEW_STEPS", "LR_TOO_LOW", "UNDECIDED", after="DeepCrime HNE, DeepFD epochs")
def few_steps(code: Code) -> Sites:
    for loop in code.training_loops():
        if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and name_of(loop.iter) == "range":
            last = loop.iter.args[-1]
            if len(loop.iter.args) == 1 and isinstance(last, ast.Constant) and last.value >= 60:
                yield [code.replace(last, str(max(4, last.value // 50)))]


@operator("batches-far-too-large", "rates", "TOO_FEW_STEPS", "UNDECIDED", after="DeepCrime HBS and HDB")
def batches_large(code: Code) -> Sites:
    for call in code.calls("DataLoader"):
        size = code.keyword(call, "batch_size")
        if code.keyword(call, "drop_last") is not None:
            continue  # no batch would be left
        if size is not None and code.keyword(call, "shuffle") is not None and isinstance(size.value, ast.Constant):
            yield [code.replace(size.value, str(size.value.value * 20))]


@operator("plateau-of-the-wrong-kind", "rates", "PLATEAU_MODE", "LR_COLLAPSED")
def plateau_wrong(code: Code) -> Sites:
    for call in code.calls("ReduceLROnPlateau"):
        yield [code.with_keyword(call, "mode", '"max"')]


# --- accumulation ------------------------------------------------------------------------------------------------


@operator("window-not-divided", "accumulation", "ACCUM_NOT_DIVIDED")
def not_divided(code: Code) -> Sites:
    for match in re.finditer(r" / (args\.accumulate|accumulation_steps)\b", code.source):
        if "len(train)" not in code.source[max(0, match.start() - 30) : match.start() + 5]:
            yield [Edit(match.start(), match.end(), "")]
    for node in code.nodes:
        if (
            isinstance(node, ast.Assign)
            and code.text(node.targets[0]) == "loss"
            and re.search(r"^outer / ", code.text(node.value))
        ):
            yield [code.replace(node.value, "outer")]


@operator("window-off-by-one", "accumulation", "ACCUM_FIRST_WINDOW")
def window_off_by_one(code: Code) -> Sites:
    for match in re.finditer(r"\((i|batch_idx) \+ 1\) %", code.source):
        yield [Edit(match.start(), match.end(), f"{match[1]} %")]


@operator("cleared-for-every-micro-batch", "accumulation", "ZERO_GRAD_PER_MICROBATCH")
def cleared_each(code: Code) -> Sites:
    if not re.search(r"accumul", code.source):
        return
    for one in code.backwards():
        if code.loop(one) is not None:
            yield [code.before(code.statement(one), "optimizer.zero_grad()")]


@operator("cleared-before-the-window-only", "accumulation", "ZERO_GRAD_MISSING")
def cleared_once(code: Code) -> Sites:
    if re.search(r"accumul", code.source):
        clears = [one for one in code.statements_of("zero_grad") if isinstance(code.parents[one], ast.If)]
        for one in clears:
            yield [code.delete(one)]


@operator("each-micro-batch-steps", "accumulation", "STEP_PER_MICROBATCH")
def each_steps(code: Code) -> Sites:
    for node in code.nodes:
        if isinstance(node, ast.If) and re.search(
            r"\+ 1\) % (args\.accumulate|accumulation_steps) == 0", code.text(node.test)
        ):
            yield [code.replace(node.test, "True")]


# --- clipping ----------------------------------------------------------------------------------------------------


def _clips(code: Code) -> list[ast.Expr]:
    return code.statements_of("clip_grad_norm_", "clip_gradients")


@operator("clipped-to-nothing", "clipping", "CLIP_ALWAYS_ON", "LR_TOO_LOW", after="DeepCrime OCG")
def clip_tiny(code: Code) -> Sites:
    for one in _clips(code):
        call = one.value
        assert isinstance(call, ast.Call)
        if code.keyword(call, "max_norm") is not None:
            yield [code.with_keyword(call, "max_norm", "1e-6")]
        else:
            yield [code.replace(call.args[-1], "1e-6")]


@operator("clipped-after-the-step", "clipping", "CLIP_NO_EFFECT")
def clip_after(code: Code) -> Sites:
    for one in _clips(code):
        steps = [step for step in code.steps() if step in code.block(one)]
        if steps:
            yield [code.delete(one), code.after(steps[0], code.lines(one))]


@operator("clipped-before-the-backward", "clipping", "CLIP_NO_EFFECT")
def clip_before(code: Code) -> Sites:
    for one in _clips(code):
        backwards = [step for step in code.backwards() if step in code.block(one)]
        if backwards:
            yield [code.delete(one), code.before(backwards[0], code.lines(one))]


@operator("clip-removed", "clipping", "EXPLODING", after="DeepCrime OCG")
def clip_removed(code: Code) -> Sites:
    for one in _clips(code):
        yield [code.delete(one)]


@operator("parameters-of-the-clip-used-up", "clipping", "CLIP_NO_EFFECT")
def clip_used_up(code: Code) -> Sites:
    for one in _clips(code):
        call = one.value
        loop = code.loop(one)
        assert isinstance(call, ast.Call)
        if (
            loop is not None
            and name_of(call) == "clip_grad_norm_"
            and ".parameters()" in code.text(call.args[0])
            and "*" not in code.text(call.args[0])
        ):
            yield [
                code.before(loop, f"parameters = {code.text(call.args[0])}"),
                code.replace(call.args[0], "parameters"),
            ]


@operator("values-clipped-for-norms", "clipping", "CLIP_ALWAYS_ON", after="DeepCrime OCG")
def values_clipped(code: Code) -> Sites:
    for one in _clips(code):
        call = one.value
        assert isinstance(call, ast.Call)
        if (
            name_of(call) == "clip_grad_norm_"
            and len(call.args) == 2
            and not code.text(call.func).startswith("accelerator")
        ):
            text = code.text(call.func).replace("clip_grad_norm_", "clip_grad_value_")
            yield [code.replace(call.func, text), code.replace(call.args[1], "1e-6")]
