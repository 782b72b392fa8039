"""Edits for graphs that are cut, kept, changed in place, or reach what they should not."""

import ast
from collections.abc import Iterator

from anybatch.doctor.crashing.usercode import called
from anybatch.doctor.fixes.scene import Scene, each, edits_of, inner_loop, methods, primary, within
from anybatch.doctor.fixes.source import Change, Edit, UnclearEdit, UserSource, only, receiver

_NO_GRADIENT = ("no_grad", "inference_mode")


@edits_of("LOSS_TERM_CUT", "GRAPH_CUT")
def not_cut(scene: Scene) -> Iterator[Edit]:
    """What cuts the graph in the line of the finding goes: ``.detach()``, ``.data``, ``.item()``, ``torch.tensor``."""
    source, statement = scene.source, scene.statement
    cuts = [one for name in ("detach", "item", "numpy") for one in within(source, statement, methods(source, name))]
    if cuts:
        if len(cuts) > 1:
            yield source.edit([change for cut in cuts for change in _without_call(source, cut)])
        yield from each(source, cuts[:2], lambda cut: _without_call(source, cut))
    data = [one for one in ast.walk(statement) if isinstance(one, ast.Attribute) and one.attr == "data"]
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
    before = [one for one in within(source, source.scope(statement), methods(source, "detach"))
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
    alone = [
        one for one in ast.walk(source.scope(scene.statement))
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and called(one.value) == "detach"
    ]  # fmt: skip
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
    products = [
        one for one in ast.walk(source.scope(statement))
        if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mult) and isinstance(one.right, ast.Name)
        and "log_prob" in source.of(one.left)
    ]  # fmt: skip
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
    for one in ast.walk(loop):
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Tuple) and isinstance(one.value, ast.Call):
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
    names = {to.id for one in ast.walk(statement) if isinstance(one, ast.Assign) for to in one.targets
             if isinstance(to, ast.Name)}  # fmt: skip
    for call in source.calls(scope, "backward"):
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            names.add(call.func.value.id)
    kept: list[ast.expr] = [
        one.value for one in ast.walk(scope)
        if isinstance(one, ast.AugAssign) and isinstance(one.value, ast.Name) and one.value.id in names
        and source.of(one.target) not in names
    ]  # fmt: skip
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
