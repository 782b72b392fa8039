"""Edits for graphs that are cut, kept or changed in place, and for what a loss is given."""

import ast
from collections.abc import Iterator

from anybatch.doctor.crashing.usercode import called, names_in, nodes_in, operations
from anybatch.doctor.fixes.scene import Scene, each, edits_of, inner_loop, methods, nn_name, primary, within
from anybatch.doctor.fixes.source import Change, Edit, UnclearEdit, UserSource, only, receiver

_NO_GRADIENT = ("no_grad", "inference_mode")


@edits_of("LOSS_TERM_CUT", "GRAPH_CUT")
def not_cut(scene: Scene) -> Iterator[Edit]:
    """What cuts the graph in the line of the finding goes: ``.detach()``, ``.data``, ``.item()``, ``torch.tensor``."""
    source, statement = scene.source, scene.statement
    cuts = [one for name in ("detach", "item", "numpy") for one in within(statement, methods(source, name))]
    if cuts:
        if len(cuts) > 1:
            yield source.edit([change for cut in cuts for change in _without_call(source, cut)])
        yield from each(source, cuts[:2], lambda cut: _without_call(source, cut))
    data = [one for one in nodes_in(statement, ast.Attribute) if one.attr == "data"]
    if len(data) == 1:
        yield source.edit([Change(source.end(data[0].value), source.end(data[0]), "")])
    for call in source.calls(statement, "tensor", "as_tensor"):
        if len(call.args) == 1 and not call.keywords and isinstance(call.func, ast.Attribute):
            holder = source.of(call.func.value)
            yield source.edit([source.replaced(call.func, f"{holder}.stack")])
    if isinstance(statement, ast.With):
        yield source.edit(_without_no_grad(source, statement))


@edits_of("LOSS_TERM_CUT")
def differentiated_twice(scene: Scene) -> Iterator[Edit]:
    """A gradient that is part of the loss is made with ``create_graph=True``."""
    source = scene.source
    call = source.one_call(scene.statement, "grad")
    names = [one.arg for one in call.keywords]
    if "retain_graph" in names and "create_graph" not in names:  # create_graph keeps the graph as well
        old = only([one for one in call.keywords if one.arg == "retain_graph"], "keywords retain_graph")
        yield source.edit([source.replaced(old, "create_graph=True")])
    else:
        yield source.edit([source.keyword(call, "create_graph", "True")])


@edits_of("LOSS_TERM_CUT")
def not_detached_on_the_way(scene: Scene) -> Iterator[Edit]:
    """Of a backward that lacks a term: a ``.detach()`` of the statements before it goes, the nearest first."""
    source, statement = scene.source, scene.statement
    if not source.calls(statement, "backward"):
        raise UnclearEdit("the place is no backward")
    before = [one for one in within(source.scope(statement), methods(source, "detach"))
              if one.lineno < statement.lineno]  # fmt: skip
    yield from each(source, reversed(before[-3:]), lambda cut: _without_call(source, cut))


def _without_call(source: UserSource, call: ast.Call) -> list[Change]:
    """``x.detach()`` becomes ``x``."""
    return [Change(source.end(receiver(call)), source.end(call), "")]


def _without_no_grad(source: UserSource, statement: ast.With) -> list[Change]:
    item = only(statement.items, "contexts")
    if not isinstance(item.context_expr, ast.Call) or called(item.context_expr) not in _NO_GRADIENT:
        raise UnclearEdit("the context is not no_grad")
    return source.dedented(statement)


@edits_of("NO_GRAD_ACTIVE", "LOSS_TERM_CUT", "GRAPH_CUT", "LOSS_NO_GRAD")
def with_gradients(scene: Scene) -> Iterator[Edit]:
    """The ``with torch.no_grad()`` around the line of the finding goes, or such a decorator of its function."""
    source, statement = scene.source, scene.statement
    for outer in (statement, *source.ancestors(statement)):
        if isinstance(outer, ast.With):
            yield from each(source, [outer], lambda one: _without_no_grad(source, one))
        if isinstance(outer, ast.FunctionDef):
            for one in outer.decorator_list:
                function = one.func if isinstance(one, ast.Call) else one
                if ast.unparse(function).rpartition(".")[2] in _NO_GRADIENT:
                    text = source.text.encode()
                    start = text.rfind(b"\n", 0, source.start(one)) + 1
                    yield source.edit([Change(start, text.find(b"\n", source.end(one)) + 1, "")])


@edits_of("NO_GRAD_ACTIVE", "LOSS_NO_GRAD")
def gradients_not_switched_off(scene: Scene) -> Iterator[Edit]:
    """``torch.set_grad_enabled(False)`` goes."""
    source = scene.source
    off = [one for one in source.calls(source.tree, "set_grad_enabled") if source.of(one).endswith("(False)")]
    call = only(off, "calls that switch gradients off")
    yield source.edit([source.removed(source.statement(call.lineno))])


@edits_of("CKPT_NO_INPUT_GRAD")
def not_reentrant(scene: Scene) -> Iterator[Edit]:
    """``checkpoint(..., use_reentrant=False)``, in the line of the finding or the only one of the file."""
    source = scene.source
    calls = source.calls(scene.statement, "checkpoint", "checkpoint_sequential")
    calls = calls or source.calls(source.tree, "checkpoint", "checkpoint_sequential")
    yield source.edit([source.keyword(only(calls, "calls of checkpoint"), "use_reentrant", "False")])


@edits_of("LEAK_TO_OTHER_NET")
def detached_result_kept(scene: Scene) -> Iterator[Edit]:
    """``x.detach()`` as a statement, whose result nobody takes, becomes ``x = x.detach()``."""
    source = scene.source
    alone = [one for one in nodes_in(source.scope(scene.statement), ast.Expr) if called(one.value) == "detach"]
    one = only(alone, "results of detach that nobody takes")
    text = source.of(one)
    yield source.edit([source.replaced(one, f"{text.removesuffix('.detach()')} = {text}")])


@edits_of("LEAK_TO_OTHER_NET")
def target_detached(scene: Scene) -> Iterator[Edit]:
    """The target of a loss, or what the logarithm of a policy is multiplied by, is taken as given."""
    source, statement = scene.source, scene.statement
    for call in source.calls(statement):
        if called(call).endswith("loss") and len(call.args) == 2:
            yield source.edit([source.replaced(call.args[1], f"{primary(source, call.args[1])}.detach()")])
    products = [one for one in operations(source.scope(statement), ast.Mult)
                if isinstance(one.right, ast.Name) and "log_prob" in source.of(one.left)]  # fmt: skip
    factor = only(products, "products with log_prob").right
    yield source.edit([source.replaced(factor, f"{source.of(factor)}.detach()")])


@edits_of("RETAIN_GRAPH")
def graph_not_retained(scene: Scene) -> Iterator[Edit]:
    """``retain_graph=True`` goes."""
    source = scene.source
    yield source.edit([source.without_keyword(source.one_call(scene.statement, "backward"), "retain_graph")])


@edits_of("GRAPH_GROWS")
def carried_without_its_graph(scene: Scene) -> Iterator[Edit]:
    """What a call takes and gives back is detached before it, and the graph is not retained."""
    source, backward = scene.backward()
    loop = inner_loop(source, backward)
    found = []
    for one in nodes_in(loop, ast.Assign):
        if isinstance(one.targets[0], ast.Tuple) and isinstance(one.value, ast.Call):
            given = {part.id for part in one.value.args if isinstance(part, ast.Name)}
            found += [(one, to.id) for to in one.targets[0].elts if isinstance(to, ast.Name) and to.id in given]
    statement, name = only(found, "states that are carried")
    changes = [source.inserted(statement, f"{name} = {name}.detach()")]
    call = source.one_call(backward, "backward")
    if any(one.arg == "retain_graph" for one in call.keywords):
        changes.append(source.without_keyword(call, "retain_graph"))
    yield source.edit(changes)


@edits_of("GRAPH_KEPT_IN_LOG")
def number_kept(scene: Scene) -> Iterator[Edit]:
    """``total += loss`` becomes ``total += loss.item()``, and so does ``losses.append(loss)``."""
    source, statement = scene.source, scene.statement
    scope = source.scope(statement)
    names = {to.id for one in nodes_in(statement, ast.Assign) for to in one.targets if isinstance(to, ast.Name)}
    for call in source.calls(scope, "backward"):
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            names.add(call.func.value.id)
    kept = [one.value for one in nodes_in(scope, ast.AugAssign) if isinstance(one.value, ast.Name)
            and one.value.id in names and source.of(one.target) not in names]  # fmt: skip
    kept += [one.args[0] for one in source.calls(scope, "append") if len(one.args) == 1
             and isinstance(one.args[0], ast.Name) and one.args[0].id in names]  # fmt: skip
    value = only(kept, "places that keep a loss")
    yield source.edit([source.behind(value, ".item()")])


@edits_of("BACKWARD_TWICE_STATE")
def state_let_go(scene: Scene) -> Iterator[Edit]:
    """The state of the step before is detached before the line that takes it, or behind it."""
    source, statement = scene.origin()
    yield source.edit([source.inserted(statement, scene.code)])
    yield source.edit([source.inserted(statement, scene.code, after=True)])


@edits_of("BACKWARD_TWICE")
def written_anew(scene: Scene) -> Iterator[Edit]:
    """The line that takes what another loss was computed from takes it as given."""
    source, statement = scene.origin()
    code = only(scene.fix, "statements of the fix")
    if not isinstance(code, ast.Assign) or source.of(statement) != scene.finding.evidence.get("origin_code"):
        raise UnclearEdit("the line is not as it was")
    yield source.edit([source.replaced(statement, scene.code)])


@edits_of("INPLACE_ON_SAVED")
def not_in_place(scene: Scene) -> Iterator[Edit]:
    """``x += y`` becomes ``x = x + y``, ``x.relu_()`` becomes ``x = x.relu()``, and ``inplace=True`` goes."""
    source, statement = scene.origin()
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        middle = source.text.encode()[source.end(statement.target) : source.start(statement.value)].decode()
        sign, name = middle.strip().removesuffix("="), statement.target.id
        yield source.edit([source.replaced(statement, f"{name} = {name} {sign} {primary(source, statement.value)}")])
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.attr[-1] == "_":
            name, text = call.func.value.id, source.of(statement)
            made = text.replace(call.func.attr, call.func.attr[:-1], 1)
            yield source.edit([source.replaced(statement, f"{name} = {made}")])
    for call in source.calls(source.tree):
        if any(one.arg == "inplace" and source.of(one.value) == "True" for one in call.keywords):
            yield source.edit([source.keyword(call, "inplace", "False")])


@edits_of("INPLACE_ON_SAVED")
def step_behind_both(scene: Scene) -> Iterator[Edit]:
    """A step between two backwards goes behind the second, as the fix says."""
    source, statement = scene.origin()
    said = scene.finding.fix
    if said != f"`{source.of(statement)}` after `{source.of(scene.statement)}`":
        raise UnclearEdit("the fix moves no step")
    yield source.edit(source.moved(statement, scene.statement, after=True))


@edits_of("LOSS_NOT_SCALAR")
def mean_of_the_loss(scene: Scene) -> Iterator[Edit]:
    """``loss.backward()`` becomes ``loss.mean().backward()``."""
    source = scene.source
    loss = receiver(source.one_call(scene.statement, "backward"))
    yield source.edit([source.replaced(loss, f"{primary(source, loss)}.mean()")])


_ACTIVATIONS = ("softmax", "Softmax", "sigmoid", "Sigmoid", "log_softmax", "LogSoftmax", "softmax2d", "Softmax2d")
_OF_LOGARITHMS = ("nll_loss", "kl_div", "ctc_loss")
_LIBRARIES = ("torch", "F", "nn", "functional")
_INFINITE = ('-float("inf")', "-float('inf')", 'float("-inf")', "float('-inf')", "-torch.inf", "-math.inf", "-np.inf")


@edits_of("DOUBLE_ACTIVATION")
def raw_scores(scene: Scene) -> Iterator[Edit]:
    """The activation before a loss that has its own goes: that in the line of the loss first, then the last ones.

    A loss that takes logarithms of probabilities gets these instead, as it has no softmax of its own.
    """
    source = scene.source
    here = source.calls(scene.statement, *_ACTIVATIONS)
    module = scene.finding.place.module.rpartition(".")[2]
    used = [one for one in source.calls(source.tree, module) if module and len(one.args) == 1]
    rest = [one for one in reversed(source.calls(source.tree, *_ACTIVATIONS)) if one not in here]
    if scene.finding.evidence.get("function") in _OF_LOGARITHMS:
        yield from each(source, [*here, *rest, *used], lambda call: [_logarithm_of(source, call)])
    else:
        yield from each(source, [*here, *used, *rest], lambda call: _without_activation(source, call))


def _logarithm_of(source: UserSource, call: ast.Call) -> Change:
    """``x.softmax(1)`` becomes ``x.log_softmax(1)``, ``nn.Softmax(1)`` becomes ``nn.LogSoftmax(1)``."""
    name, function = called(call), call.func
    is_own = isinstance(function, ast.Attribute) and ast.unparse(function.value) == "self"
    if name in ("softmax", "Softmax") and isinstance(function, ast.Attribute) and not is_own:
        end = source.end(function)
        return Change(end - len(name), end, "log_softmax" if name == "softmax" else "LogSoftmax")
    if name in _ACTIVATIONS and name != "softmax":
        raise UnclearEdit("the logarithm of the activation has no name here")
    return source.behind(call, ".log()")


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
    yield source.edit([source.argument(call, position, "dim", dim)])


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
    infinite = [one for one in nodes_in(source.tree, ast.expr) if source.of(one) in _INFINITE]
    found = [one for one in infinite if not isinstance(source.parent(one), ast.UnaryOp)]
    yield source.edit([source.replaced(only(found, "infinite masks"), "-1e4")])


@edits_of("NAN_IN_FORWARD")
def not_divided_by_nothing(scene: Scene) -> Iterator[Edit]:
    """What a number is divided by is kept from zero; a count is at least one."""
    if not str(scene.finding.evidence.get("op")).startswith("Div"):
        raise UnclearEdit("no division made it")
    source = scene.source
    by = ast.Name | ast.Attribute | ast.Call
    quotients = [one for one in operations(source.tree, ast.Div) if isinstance(one.right, by)]
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
    if not isinstance(target, ast.Name) or target.id not in names_in(statement, ast.Load):
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
    products = [one for one in operations(scope, ast.Mult) if "gamma" in source.of(one.left).lower()]
    product = only(products, "products with gamma")
    for flag in (name, f"{name}.float()"):
        yield source.edit([source.behind(product, f" * (1 - {flag})")])
