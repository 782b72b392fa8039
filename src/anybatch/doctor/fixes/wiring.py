"""Edits for what is registered, optimized, frozen and made at the wrong time."""

import ast
from collections.abc import Iterator
from dataclasses import replace

from anybatch.doctor.crashing.usercode import names_in, nodes_in, targets
from anybatch.doctor.fixes.scene import Scene, assigned, edits_of, inner_loop, nn_name, primary
from anybatch.doctor.fixes.source import Edit, UnclearEdit, UserSource, only, receiver
from anybatch.records.events import Loaded


@edits_of("OPT_PARAM_MISSING")
def whole_model(scene: Scene) -> Iterator[Edit]:
    """``model.encoder.parameters()`` becomes ``model.parameters()``, where the optimizer has a part only."""
    source, _, call = scene.construction()
    if not call.args:
        raise UnclearEdit("the optimizer is given no parameters in place")
    given = only([one for one in source.calls(call.args[0], "parameters") if not one.args], "calls of parameters()")
    roots = {one.variable for one in scene.run.roots.values() if one.variable}
    part = receiver(given)
    while isinstance(part, ast.Attribute | ast.Subscript):
        part = part.value
        if source.of(part) in roots:
            yield source.edit([source.replaced(given, f"{source.of(part)}.parameters()")])
            return


@edits_of("OPT_PARAM_MISSING")
def further_group(scene: Scene) -> Iterator[Edit]:
    """The group that is missing is added behind the line that makes the optimizer."""
    source, statement, _ = scene.construction()
    scene.call("add_param_group")
    yield source.edit([source.inserted(statement, scene.code, after=True)])


@edits_of("OPT_PARAM_UNREGISTERED")
def registered(scene: Scene) -> Iterator[Edit]:
    """A list, a mapping or a tensor that an attribute holds becomes what a module registers."""
    code = only(scene.fix, "statements of the fix")
    if not isinstance(code, ast.Assign) or not isinstance(code.value, ast.Call):
        raise UnclearEdit("the fix is no assignment")
    target, kind = code.targets[0], ast.unparse(code.value.func).rpartition(".")[2]
    if not isinstance(target, ast.Attribute) or "# at the end of __init__ of " not in scene.finding.fix:
        raise UnclearEdit("the fix is of no attribute of a class")
    of_class = scene.finding.fix.rpartition("# at the end of __init__ of ")[2].split()[0].strip(".")
    source = _file_with_class(scene, of_class)
    body = only([one for one in nodes_in(source.tree, ast.ClassDef) if one.name == of_class], "such classes")
    assigned = [one for one in nodes_in(body, ast.Assign) if ast.unparse(target) in targets(one)]
    value = only(assigned, "assignments of the attribute").value
    empty = isinstance(value, ast.List | ast.Dict) and not ast.unparse(value).strip("[]{}")
    inner = "" if empty else source.of(value)
    yield source.edit([source.replaced(value, f"{nn_name(source)}.{kind}({inner})")])


def _file_with_class(scene: Scene, name: str) -> UserSource:
    """The file of the finding, or of its model, that defines a class."""
    for file in (*scene.files, *(one.file for root in scene.run.roots.values() for one in root.modules)):
        try:
            source = scene.read(file)
        except UnclearEdit:
            continue
        if any(one.name == name for one in nodes_in(source.tree, ast.ClassDef)):
            return source
    raise UnclearEdit("the class is in no file of the user that is known")


@edits_of("MODULE_NOT_READY")
def module_made_ready(scene: Scene) -> Iterator[Edit]:
    """``super().__init__()`` becomes the first line of the constructor."""
    source, head = scene.source, scene.finding.fix.partition("  # ")[0]
    around = [one for one in source.ancestors(scene.statement) if isinstance(one, ast.FunctionDef)]
    made = only([one for one in around if one.name == "__init__"], "constructors")
    first = made.body[1] if ast.get_docstring(made) is not None and len(made.body) > 1 else made.body[0]
    if any(isinstance(one.func, ast.Attribute) for one in source.calls(made, "__init__")):
        raise UnclearEdit("the constructor calls another one, too late")
    yield source.edit([source.inserted(first, head)])


@edits_of("OPT_PARAM_STALE")
def made_after_the_model(scene: Scene) -> Iterator[Edit]:
    """The optimizer is made behind the last line of its block that replaces something of its model."""
    source, statement, call = scene.construction()
    block = source.block(statement)
    behind = block[block.index(statement) + 1 :]
    names = names_in(call.args[:1])
    last, renamed = None, ""
    for one in behind:
        if isinstance(one, ast.For | ast.While | ast.FunctionDef):
            break
        if not isinstance(one, ast.Assign) or len(one.targets) != 1:
            continue
        target, read = one.targets[0], names_in(one.value)
        base: ast.expr = target
        while isinstance(base, ast.Attribute | ast.Subscript):
            base = base.value
        if isinstance(base, ast.Name) and base.id in names - {"self"}:
            last, renamed = one, ""  # model.fc = ..., or model = wrap(model)
        elif read & names and isinstance(one.value, ast.Call):
            last, renamed = one, source.of(target)  # self.net = wrap(net)
    if last is None:
        raise UnclearEdit("no line behind the optimizer replaces something of its model")
    changes = source.moved(statement, last, after=True)
    if renamed:
        given = only(source.calls(call, "parameters"), "calls of parameters()")
        gone, comes = changes
        text = comes.text.replace(source.of(given), f"{renamed}.parameters()")
        changes = [gone, replace(comes, text=text)]
    yield source.edit(changes)


@edits_of("OPT_STATE_RESET")
def made_before_the_loop(scene: Scene) -> Iterator[Edit]:
    """The optimizer is made once, before the outermost loop of its function."""
    source, statement, call = scene.construction()
    loop = [inner_loop(source, statement), *source.loops_around(statement)][-1]
    if names_in(loop, ast.Store) & names_in(call):
        raise UnclearEdit("the optimizer is made from what the loop makes")
    if source.parent(statement) not in [*nodes_in(loop, ast.For), *nodes_in(loop, ast.While)]:
        raise UnclearEdit("the optimizer is made under a condition")
    yield source.edit(source.moved(statement, loop))


@edits_of("SCHED_STALE_OPT")
def schedule_of_the_new_optimizer(scene: Scene) -> Iterator[Edit]:
    """The schedule is made behind the line that makes the optimizer, where the one before came too early."""
    source, statement, _ = scene.construction()
    block = source.block(statement)
    number = scene.optimizer().optimizer
    stale = [one for one in scene.run.schedulers.values() if one.optimizer != number and one.file == source.path]
    made = only(sorted({one.line for one in stale}), "schedules of other optimizers")
    scheduled = source.statement(made)
    if scheduled not in block:
        raise UnclearEdit("the schedule is made elsewhere")
    if block.index(scheduled) < block.index(statement) and any(
        isinstance(one, ast.For | ast.While) or source.calls(one, "step")
        for one in block[block.index(scheduled) : block.index(statement)]
    ):
        raise UnclearEdit("the schedule is used before")
    if len(scene.run.optimizers) > 2 or block.index(scheduled) > block.index(statement):
        raise UnclearEdit("it is not clear which optimizer the schedule belongs to")
    yield source.edit(source.moved(scheduled, statement, after=True))


@edits_of("FREEZE_INEFFECTIVE")
def frozen_by_the_method(scene: Scene) -> Iterator[Edit]:
    """``module.requires_grad = False`` becomes ``module.requires_grad_(False)``."""
    last = scene.finding.place.module.rpartition(".")[2]
    for source in map(scene.read, scene.files):
        found = [(one, to) for one, to in assigned(source, "requires_grad")
                 if len(one.targets) == 1 and ast.unparse(to.value).rpartition(".")[2] == last]  # fmt: skip
        if found:
            one, to = only(found, "such assignments")
            yield source.edit([source.replaced(one, f"{source.of(to.value)}.requires_grad_({source.of(one.value)})")])
            return


@edits_of("FREEZE_TOO_MUCH")
def frozen_the_other_way(scene: Scene) -> Iterator[Edit]:
    """``requires_grad = "bn" in name`` is asked the other way round."""
    files = dict.fromkeys((scene.finding.place.file, *(one.file for one in scene.run.optimizers.values())))
    for source in (scene.read(file) for file in files if file):
        found = [one.value for one, _ in assigned(source, "requires_grad") if isinstance(one.value, ast.Compare)
                 and len(one.value.ops) == 1 and isinstance(one.value.ops[0], ast.In)]  # fmt: skip
        value = only(found, "conditions of this kind")
        text = f"{source.of(value.left)} not in {source.of(value.comparators[0])}"
        yield source.edit([source.replaced(value, text)])
        return


@edits_of("SYMMETRIC_INIT")
def first_factor_at_random(scene: Scene) -> Iterator[Edit]:
    """The first of two factors that are both zero begins at random."""
    names = [one.rpartition(".")[2] for one in scene.finding.place.parameters]
    if len(names) < 2:
        raise UnclearEdit("the finding is not of two factors")
    for file in dict.fromkeys(root.file for root in scene.run.roots.values()):
        source = scene.read(file)
        found = [one for one, _ in assigned(source, names[0])]
        if not found:
            continue
        zeros = source.one_call(only(found, "assignments of the factor"), "zeros")
        name = source.of(zeros.func)
        changes = [source.replaced(zeros.func, name.removesuffix("zeros") + "randn"), source.behind(zeros, " * 0.02")]
        yield source.edit(changes)
        return


@edits_of("SYMMETRIC_INIT", "DEAD_UNITS")
def initialised_before_the_optimizer(scene: Scene) -> Iterator[Edit]:
    """The weights are set anew before the optimizer is made."""
    source, statement, _ = scene.construction()
    if not scene.fix or (source.scope(statement) is not source.tree and "self" in scene.finding.fix):
        raise UnclearEdit("the fix belongs elsewhere")
    code = scene.finding.fix.replace("nn.", f"{nn_name(source)}.") if nn_name(source) != "nn" else scene.finding.fix
    yield source.edit([source.inserted(statement, code)])


@edits_of("LR_IGNORED_ON_RESUME")
def rate_behind_the_checkpoint(scene: Scene) -> Iterator[Edit]:
    """The rate that was asked for is set again behind the line that loads the optimizer's state."""
    source, made, call = scene.construction()
    rate = next((one.value for one in call.keywords if one.arg == "lr"), None)
    asked = repr(scene.number("asked")) if rate is None else source.of(rate)
    loads = (one for one in scene.run.of(Loaded) if one.into == "optimizer")
    target, loading = scene.only_one(loads, "lines that load an optimizer")
    if target.path != source.path or (source.scope(made) is not target.scope(loading) and rate is not None):
        asked = repr(scene.number("asked"))
    name = primary(target, receiver(target.one_call(loading, "load_state_dict")))
    code = f'for group in {name}.param_groups:\n    group["lr"] = {asked}'
    yield target.edit([target.inserted(loading, code, after=True)])
