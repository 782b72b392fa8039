"""Edits for what a loss is given: activations, shapes, dims, masks, targets, and the order of the data."""

import ast
from collections.abc import Iterator

from anybatch.doctor.crashing.usercode import called
from anybatch.doctor.fixes.scene import Scene, each, edits_of, nn_name, primary
from anybatch.doctor.fixes.source import Change, Edit, UnclearEdit, UserSource, only, receiver

_ACTIVATIONS = ("softmax", "Softmax", "sigmoid", "Sigmoid", "log_softmax", "LogSoftmax", "softmax2d", "Softmax2d")
_LIBRARIES = ("torch", "F", "nn", "functional")
_INFINITE = ('-float("inf")', "-float('inf')", 'float("-inf")', "float('-inf')", "-torch.inf", "-math.inf", "-np.inf")


@edits_of("DOUBLE_ACTIVATION")
def raw_scores(scene: Scene) -> Iterator[Edit]:
    """The activation before a loss that has its own goes: that in the line of the loss first, then the last ones."""
    source = scene.source
    here = source.calls(scene.statement, *_ACTIVATIONS)
    module = scene.finding.place.module.rpartition(".")[2]
    used = [one for one in source.calls(source.tree, module) if module and len(one.args) == 1]
    rest = [one for one in reversed(source.calls(source.tree, *_ACTIVATIONS)) if one not in here]
    yield from each(source, [*here, *used, *rest], lambda call: _without_activation(source, call))


def _without_activation(source: UserSource, call: ast.Call) -> list[Change]:
    """``softmax(x, 1)`` becomes ``x``, ``x.softmax(1)`` too, and ``nn.Softmax(1)`` leaves its ``nn.Sequential``."""
    outer = source.parent(call)
    if called(call)[:1].isupper():
        holder = outer.args if isinstance(outer, ast.Call) else getattr(outer, "elts", [])
        if call not in holder or len(holder) < 2:
            raise UnclearEdit("the activation is in no list of modules")
        at = holder.index(call)
        if at:
            return [Change(source.end(holder[at - 1]), source.end(call), "")]
        return [Change(source.start(call), source.start(holder[1]), "")]
    function = call.func
    library = isinstance(function, ast.Name) or ast.unparse(function).split(".")[0] in _LIBRARIES
    if library or ast.unparse(function).startswith("self."):
        if not call.args:
            raise UnclearEdit("the activation is given nothing in place")
        return [source.replaced(call, primary(source, call.args[0]))]
    return [Change(source.end(receiver(call)), source.end(call), "")]


@edits_of("SOFTMAX_DIM")
def over_the_last_dim(scene: Scene) -> Iterator[Edit]:
    """A softmax over the rows of the batch goes over the last dim."""
    source = scene.source
    calls = source.calls(scene.statement, "softmax", "log_softmax", "Softmax", "LogSoftmax")
    calls = calls or source.calls(source.tree, "Softmax", "LogSoftmax")
    call = only(calls, "softmaxes")
    position = 0 if called(call)[:1].isupper() or _is_method(call) else 1
    dim = str(scene.finding.evidence.get("classes", -1))
    if len(call.args) > position:
        yield source.edit([source.replaced(call.args[position], dim)])
    else:
        yield source.edit([source.keyword(call, "dim", dim)])


def _is_method(call: ast.Call) -> bool:
    function = call.func
    return isinstance(function, ast.Attribute) and ast.unparse(function.value) not in ("torch", "F", "nn.functional")


@edits_of("LOSS_BROADCAST")
def same_shapes(scene: Scene) -> Iterator[Edit]:
    """The side of a loss that has a last dim of one too many loses it."""
    source = scene.source
    shapes = [scene.finding.evidence.get(name) for name in ("input_shape", "target_shape")]
    given, wanted = (list(one) if isinstance(one, list | tuple) else [] for one in shapes)
    calls = [
        one for one in source.calls(scene.statement) if len(one.args) == 2 and not isinstance(one.args[0], ast.Starred)
    ]
    likely = [one for one in calls if "loss" in called(one).lower() or "criterion" in called(one).lower()]
    call = only(likely or calls, "calls with two arguments")
    if given == [*wanted, 1]:
        argument = call.args[0]
    elif wanted == [*given, 1]:
        argument = call.args[1]
    else:
        raise UnclearEdit("the shapes differ by more than a last dim of one")
    yield source.edit([source.replaced(argument, f"{primary(source, argument)}.squeeze(-1)")])


@edits_of("LOSS_ALL_IGNORED")
def mean_over_what_counts(scene: Scene) -> Iterator[Edit]:
    """The sum over the targets that count, by their number or one."""
    source = scene.source
    call = source.one_call(scene.statement, "cross_entropy", "nll_loss")
    if len(call.args) != 2 or any(one.arg in ("reduction", "weight", None) for one in call.keywords):
        raise UnclearEdit("the loss is weighted or reduced in its own way")
    ignored = next((source.of(one.value) for one in call.keywords if one.arg == "ignore_index"), "-100")
    count = f"({source.of(call.args[1])} != {ignored}).sum().clamp(min=1)"
    yield source.edit([source.keyword(call, "reduction", '"sum"'), source.behind(call, f" / {count}")])


@edits_of("NAN_IN_FORWARD", "NAN_IN_BACKWARD")
def no_row_without_a_score(scene: Scene) -> Iterator[Edit]:
    """A mask of minus infinity, which may hide a whole row, becomes one of a large negative number."""
    source = scene.source
    if "oftmax" not in str(scene.finding.evidence.get("op")):
        raise UnclearEdit("no softmax made it")
    found = [
        one for one in ast.walk(source.tree)
        if isinstance(one, ast.expr) and source.of(one) in _INFINITE and not isinstance(source.parent(one), ast.UnaryOp)
    ]  # fmt: skip
    yield source.edit([source.replaced(only(found, "infinite masks"), "-1e4")])


@edits_of("NAN_IN_FORWARD")
def not_divided_by_nothing(scene: Scene) -> Iterator[Edit]:
    """What a number is divided by is kept from zero; a count is at least one."""
    if not str(scene.finding.evidence.get("op")).startswith("Div"):
        raise UnclearEdit("no division made it")
    source = scene.source
    quotients = [one for one in ast.walk(source.tree) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div)
                 and isinstance(one.right, ast.Name | ast.Attribute | ast.Call)]  # fmt: skip
    here = [one for one in quotients if one.lineno == scene.finding.place.line]
    divisors = [one.right for one in here or quotients]
    yield from each(source, divisors, lambda one: [source.replaced(one, _kept_from_zero(source, one))])


def _kept_from_zero(source: UserSource, node: ast.expr) -> str:
    text = source.of(node)
    count = any(word in text.lower() for word in ("num", "count", "valid", "mask", "len"))
    return f"{primary(source, node)}.clamp(min=1)" if count else f"{primary(source, node)}.clamp(min=1e-8)"


@edits_of("NAN_IN_FORWARD", "NAN_IN_BACKWARD")
def argument_kept_from_zero(scene: Scene) -> Iterator[Edit]:
    """The argument of a logarithm or a root is kept from zero."""
    op = str(scene.finding.evidence.get("op"))
    name = next((one for one in ("log", "sqrt") if op.lower().startswith(one) and "softmax" not in op.lower()), None)
    if name is None:
        raise UnclearEdit("no logarithm and no root made it")
    source = scene.source
    call = only(source.calls(scene.statement, name) or source.calls(source.tree, name), f"calls of {name}")
    value = call.args[0] if call.args else receiver(call)
    text = f"{primary(source, value)}.clamp(min=1e-8)" if name == "log" else f"({source.of(value)} + 1e-8)"
    yield source.edit([source.replaced(value, text)])


@edits_of("TARGETS_CONSTANT")
def other_targets(scene: Scene) -> Iterator[Edit]:
    """The targets that are the same for all become the other ones."""
    source = scene.source
    call = source.one_call(scene.statement, "ones_like", "zeros_like", "ones", "zeros")
    old = called(call)
    new = old.replace("ones", "zeros") if "ones" in old else old.replace("zeros", "ones")
    text = source.of(call.func)
    yield source.edit([source.replaced(call.func, text.removesuffix(old) + new)])


@edits_of("DATA_ORDER")
def shuffled(scene: Scene) -> Iterator[Edit]:
    """The loader that the training goes through shuffles."""
    source = scene.source
    own = ("sampler", "batch_sampler")  # an order that was asked for

    def is_ordered(loader: ast.Call) -> bool:
        words = loader.keywords
        return any(one.arg in own or (one.arg == "shuffle" and source.of(one.value) != "False") for one in words)

    loaders = [one for one in source.calls(source.tree, "DataLoader") if not is_ordered(one)]
    yield from each(source, loaders, lambda one: [source.keyword(one, "shuffle", "True")])


@edits_of("BN_ONE_VALUE")
def last_batch_left_out(scene: Scene) -> Iterator[Edit]:
    """A last batch of one sample is left out."""
    source = scene.source
    loaders = source.calls(source.tree, "DataLoader")
    yield from each(source, loaders, lambda one: [source.keyword(one, "drop_last", "True")])


@edits_of("DISTRIBUTION_PARAMETER")
def positive(scene: Scene) -> Iterator[Edit]:
    """The layer that gives the scale of a distribution goes through softplus."""
    source = scene.source
    layer = scene.finding.place.module.rpartition(".")[2]
    if not layer or scene.finding.evidence.get("constraint") != "GreaterThan":
        raise UnclearEdit("the parameter need not be positive, or its layer is not known")
    call = only([one for one in source.calls(source.tree, layer) if len(one.args) == 1], "calls of the layer")
    yield source.edit([source.replaced(call, f"{nn_name(source)}.functional.softplus({source.of(call)}) + 1e-3")])


@edits_of("DTYPE_MISMATCH", "DEVICE_MISMATCH")
def converted_before_the_call(scene: Scene) -> Iterator[Edit]:
    """What has the wrong type or device is converted before the line that takes it."""
    source, statement = scene.source, scene.statement
    code = only(scene.fix, "statements of the fix")
    target = code.targets[0] if isinstance(code, ast.Assign) else None
    if not isinstance(target, ast.Name) or target.id not in {
        one.id for one in ast.walk(statement) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)
    }:
        raise UnclearEdit("the line does not take what is converted")
    yield source.edit([source.inserted(statement, scene.code)])


@edits_of("LOSS_MIXED_REDUCTION")
def means_of_both(scene: Scene) -> Iterator[Edit]:
    """A term that is summed over the batch becomes a mean, or is summed over the last dim alone."""
    source, scope = scene.source, scene.source.scope(scene.statement)
    words = [word for call in source.calls(scope) for word in call.keywords if word.arg == "reduction"]
    reduced = [word for word in words if source.of(word.value)[1:-1] == "sum"]
    yield from each(source, reduced, lambda one: [source.replaced(one.value, '"mean"')])
    sums = [one for one in source.calls(scope, "sum") if not one.keywords and len(one.args) == (not _is_method(one))]
    for behind in ("", ".mean()"):
        yield from each(source, sums, lambda one: [_over_the_last(source, one), source.behind(one, behind)])  # noqa: B023 - used at once


def _over_the_last(source: UserSource, call: ast.Call) -> Change:
    return source.keyword(call, "dim", "-1") if call.args else Change(source.end(call) - 1, source.end(call) - 1, "-1")


@edits_of("FIELD_UNREAD")
def nothing_behind_the_end(scene: Scene) -> Iterator[Edit]:
    """The value of the next state does not count behind the last one: ``gamma * value * (1 - done)``."""
    name = str(scene.finding.evidence.get("name"))
    source, scope = scene.source, scene.source.scope(scene.statement)
    if not any(word in name.lower() for word in ("done", "terminal", "terminated")):
        raise UnclearEdit("the field says of no state that it is the last")
    products = [
        one
        for one in ast.walk(scope)
        if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mult) and "gamma" in source.of(one.left).lower()
    ]
    product = only(products, "products with gamma")
    for flag in (name, f"{name}.float()"):
        yield source.edit([source.behind(product, f" * (1 - {flag})")])
