"""Edits for calls that are missing or come at the wrong moment of a step, and of one setting."""

import ast
import contextlib
import itertools
from collections.abc import Iterator

from anybatch.doctor.crashing.usercode import LOOPS, SCOPES, called, nodes_in, operations, targets
from anybatch.doctor.fixes.scene import Scene, each, edits_of, inner_loop, primary
from anybatch.doctor.fixes.source import Change, Edit, UnclearEdit, UserSource, only, receiver
from anybatch.records.events import Cleared, Clipped, Scaler, Stepped


@edits_of("ZERO_GRAD_MISSING")
def cleared_before_the_backward(scene: Scene) -> Iterator[Edit]:
    """The gradients are cleared before the backward that the step stands behind."""
    source, step, name = scene.stepping()
    where, backward = scene.backward()
    if where.path == source.path and backward in source.block(step):
        yield source.edit([source.inserted(source.statement(backward.lineno), f"{name}.zero_grad()")])


@edits_of("ZERO_GRAD_MISSING")
def cleared_behind_the_step(scene: Scene) -> Iterator[Edit]:
    """The gradients are cleared behind the step, which is right for windows of several backwards too."""
    source, step, name = scene.stepping()
    yield source.edit([source.inserted(step, f"{name}.zero_grad()", after=True)])


@edits_of("STEP_MISSING")
def step_behind_the_backward(scene: Scene) -> Iterator[Edit]:
    """The step that is missing follows the backward."""
    source, backward = scene.backward()
    scene.call("step")
    yield source.edit([source.inserted(backward, scene.code, after=True)])


@edits_of("ZERO_GRAD_BEFORE_STEP")
def cleared_earlier(scene: Scene) -> Iterator[Edit]:
    """The clearing between backward and step goes before the backward."""
    source, clearing = _line_of(scene, Cleared)
    where, backward = scene.backward()
    if where.path != source.path:
        raise UnclearEdit("backward and clearing are in different files")
    yield source.edit(source.moved(clearing, _beside(source, source.statement(backward.lineno), clearing)))


@edits_of("ZERO_GRAD_PER_MICROBATCH")
def cleared_once_for_each_step(scene: Scene) -> Iterator[Edit]:
    """The gradients are cleared behind the step, not at each micro-batch."""
    source, clearing = _line_of(scene, Cleared)
    where, step, _ = scene.stepping()
    if where.path != source.path or source.scope(clearing) is not source.scope(source.statement(step.lineno)):
        raise UnclearEdit("step and clearing are in different functions")
    yield source.edit(source.moved(clearing, source.statement(step.lineno), after=True))


@edits_of("CLIP_NO_EFFECT")
def clipped_before_the_step(scene: Scene) -> Iterator[Edit]:
    """The clipping goes directly before the step."""
    source, clipping = _line_of(scene, Clipped)
    steps = {(one.file, one.line) for one in scene.run.of(Stepped) if one.file == source.path}
    found = [source.statement(line) for _, line in sorted(steps)]
    beside = [one for one in found if one in source.block(clipping)]
    for one in found if not beside else ():
        with contextlib.suppress(UnclearEdit):
            beside.append(_beside(source, one, clipping))
    yield source.edit(source.moved(clipping, only(beside, "steps beside the clipping")))


@edits_of("CLIP_BEFORE_UNSCALE")
def unscaled_before_the_clip(scene: Scene) -> Iterator[Edit]:
    """``scaler.unscale_(optimizer)`` comes before the clipping."""
    source, clipping = _line_of(scene, Clipped)
    where, _, call = _scaler_step(scene)
    if where.path != source.path or len(call.args) != 1:
        raise UnclearEdit("clipping and step of the scaler are in different files")
    code = f"{where.of(receiver(call))}.unscale_({where.of(call.args[0])})"
    yield source.edit([source.inserted(clipping, code)])


@edits_of("SCALER_NOT_UPDATED")
def scaler_updated(scene: Scene) -> Iterator[Edit]:
    """``scaler.update()`` follows the step of the scaler."""
    source, step, call = _scaler_step(scene)
    yield source.edit([source.inserted(step, f"{source.of(receiver(call))}.update()", after=True)])


@edits_of("UNSCALE_TWICE")
def unscaled_once(scene: Scene) -> Iterator[Edit]:
    """The second ``unscale_`` goes."""
    source, statement = scene.source, scene.statement
    source.one_call(statement, "unscale_")
    yield source.edit([source.removed(statement)])


def _scaler_step(scene: Scene) -> tuple[UserSource, ast.stmt, ast.Call]:
    source, statement = scene.only_one((one for one in scene.run.of(Scaler) if one.call == "step"), "steps of a scaler")
    return source, statement, source.one_call(statement, "step")


def _line_of(scene: Scene, kind: type[Cleared] | type[Clipped]) -> tuple[UserSource, ast.stmt]:
    """The statement of the finding if it is such a call, otherwise the only one of the run."""
    every, place = list(scene.run.of(kind)), scene.finding.place
    here = [one for one in every if (one.file, one.line) == (place.file, place.line)]
    source, statement = scene.only_one(here or every, "such calls")
    if not isinstance(statement, ast.Expr | ast.Assign):
        raise UnclearEdit("the call is part of something larger")
    return source, statement


def _beside(source: UserSource, statement: ast.stmt, moved: ast.stmt) -> ast.stmt:
    """A statement, or what it is in, among those that another one stands in."""
    block = source.block(moved)
    for one in (statement, *source.ancestors(statement)):
        if one in block and isinstance(one, ast.stmt):
            return one
        if isinstance(one, SCOPES):
            break
    raise UnclearEdit("the two statements are not in one block")


@edits_of("SCHED_TOO_OFTEN")
def schedule_behind_the_loop(scene: Scene) -> Iterator[Edit]:
    """The schedule steps behind the loop over the batches, with the condition that it alone stands under."""
    source, statement = scene.source, scene.statement
    source.one_call(statement, "step")
    loop = inner_loop(source, statement)
    if not any(isinstance(one, LOOPS) for one in source.ancestors(loop)):
        raise UnclearEdit("there is no loop over the epochs around that over the batches")
    while statement not in loop.body:
        outer = source.parent(statement)
        if not isinstance(outer, ast.If) or outer.body != [statement] or outer.orelse:
            raise UnclearEdit("the schedule stands under a condition with other things")
        statement = outer
    yield source.edit(source.moved(statement, loop, after=True))


@edits_of("ACCUM_FIRST_WINDOW")
def window_from_one(scene: Scene) -> Iterator[Edit]:
    """``i % n == 0`` becomes ``(i + 1) % n == 0`` in the condition of the step."""
    source, step, _ = scene.stepping()
    guard = next((one for one in source.ancestors(step) if isinstance(one, ast.If)), None)
    if guard is None:
        raise UnclearEdit("the step stands under no condition")
    tests: list[ast.expr] = [guard.test]
    if isinstance(guard.test, ast.Name):
        scope = source.scope(guard)
        tests = [one.value for one in nodes_in(scope, ast.Assign) if guard.test.id in targets(one)]
    found = [part for part in operations(tests, ast.Mod) if isinstance(part.left, ast.Name)]
    left = only(found, "remainders of a name").left
    yield source.edit([source.replaced(left, f"({source.of(left)} + 1)")])


@edits_of("ACCUM_NOT_DIVIDED")
def divided(scene: Scene) -> Iterator[Edit]:
    """The loss is divided by the number of its micro-batches, as the script names it."""
    source, backward = scene.backward()
    loss = receiver(source.one_call(backward, "backward"))
    number = _windows_name(scene, source, source.statement(backward.lineno)) or f"{scene.number('backwards'):.0f}"
    if isinstance(loss, ast.Call) and called(loss) == "scale" and len(loss.args) == 1:
        loss = loss.args[0]
        yield source.edit([source.replaced(loss, f"{primary(source, loss)} / {number}")])
    else:
        yield source.edit([source.replaced(loss, f"({primary(source, loss)} / {number})")])


def _windows_name(scene: Scene, source: UserSource, backward: ast.stmt) -> str:
    """What the script calls the number of micro-batches of a step: ``n`` of ``% n`` or of ``range(n)``."""
    try:
        where, step, _ = scene.stepping()
        step = source.statement(step.lineno)
    except UnclearEdit:
        return ""
    if where.path != source.path:
        return ""
    guards = [one.test for one in source.ancestors(step) if isinstance(one, ast.If)]
    found = [part.right for part in operations(guards, ast.Mod)]
    loop = next((one for one in source.ancestors(backward) if isinstance(one, ast.For)), None)
    if not found and loop is not None and step not in list(ast.walk(loop)) and isinstance(loop.iter, ast.Call):
        found = loop.iter.args[:1] if called(loop.iter) == "range" and len(loop.iter.args) == 1 else []
    return source.of(found[0]) if len(found) == 1 and isinstance(found[0], ast.Name | ast.Attribute) else ""


_ADAPTIVE = 1e-3
_PLAIN = 1e-2


def _receiver(scene: Scene, method: str) -> str:
    """What the fix calls a method of: ``model`` of ``model.train()``."""
    return ast.unparse(receiver(scene.call(method)))


@edits_of("EVAL_IN_TRAINING", "DROPOUT_NEVER_ON")
def mode_of_training(scene: Scene) -> Iterator[Edit]:
    """``model.train()`` comes before the loop over the batches, or where that is too early at its beginning."""
    source, statement = scene.backward()
    name = _receiver(scene, "train")
    loop = inner_loop(source, statement)
    inner = any(isinstance(one, LOOPS) for one in source.ancestors(loop))
    where = [*([loop] if inner else []), loop.body[0]]
    yield from each(source, where, lambda one: [source.inserted(one, f"{name}.train()")])


@edits_of("TRAIN_IN_EVAL")
def mode_of_evaluation(scene: Scene) -> Iterator[Edit]:
    """``model.train()`` before the evaluation becomes ``model.eval()``; where there is none it comes in around it."""
    source, statement = scene.source, scene.statement
    name = _receiver(scene, "eval")
    scope = source.scope(statement)
    before = [one for one in source.calls(scope, "train") if one.lineno < statement.lineno and not one.args
              and source.of(one) == f"{name}.train()"]  # fmt: skip
    backwards = [one.lineno for one in source.calls(scope, "backward")]
    after = [one for one in before if any(line < one.lineno for line in backwards)]
    if after:
        yield source.edit([source.replaced(after[-1], f"{name}.eval()")])
    outer = statement
    for one in source.ancestors(statement):
        if one is scope or source.calls(one, "backward"):
            break
        if isinstance(one, ast.With | ast.For):
            outer = one
    yield source.edit([source.inserted(outer, f"{name}.eval()"), source.inserted(outer, f"{name}.train()", after=True)])


@edits_of("FROZEN_BN_DRIFT")
def mode_of_the_frozen(scene: Scene) -> Iterator[Edit]:
    """A frozen part stays in evaluation mode: behind each line that sets the mode of all, or before the training."""
    source, statement = scene.backward()
    name = _receiver(scene, "eval")
    root = name.split(".")[0] if "." in name else name
    modes = [source.statement(one.lineno) for one in source.calls(source.tree, "train")
             if not one.args and ast.unparse(one.func) == f"{root}.train"]  # fmt: skip
    if modes:
        yield source.edit([source.inserted(one, f"{name}.eval()", after=True) for one in modes])
    loop = inner_loop(source, statement)
    outer = [one for one in source.ancestors(loop) if isinstance(one, LOOPS)
             and source.scope(one) is source.scope(loop)]  # fmt: skip
    yield source.edit([source.inserted(outer[-1] if outer else loop, f"{name}.eval()")])


@edits_of("DROPOUT_ALWAYS_ON")
def dropout_of_the_mode(scene: Scene) -> Iterator[Edit]:
    """``F.dropout(x, 0.5)`` in a module gets ``training=self.training``."""
    source, statement = scene.source, scene.statement
    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    call = source.one_call(statement, *names)
    _inside_a_module(source, statement)
    yield source.edit([source.argument(call, 2, "training", "self.training")])


@edits_of("DROPOUT_NEVER_ON")
def dropout_not_switched_off(scene: Scene) -> Iterator[Edit]:
    """``training=False`` in a module becomes ``training=self.training``."""
    source, statement = scene.source, scene.statement
    _inside_a_module(source, statement)
    calls = [one for one in source.calls(statement) if any(
        word.arg == "training" and source.of(word.value) == "False" for word in one.keywords)]  # fmt: skip
    yield source.edit([source.keyword(only(calls, "calls with training=False"), "training", "self.training")])


def _inside_a_module(source: UserSource, statement: ast.stmt) -> None:
    function = source.scope(statement)
    if not isinstance(function, ast.FunctionDef) or not function.args.args or function.args.args[0].arg != "self":
        raise UnclearEdit("the line is in no method of a module")


@edits_of("BN_MOMENTUM")
def momentum_of_torch(scene: Scene) -> Iterator[Edit]:
    """The momentum of a batch norm as torch means it: one less that of other libraries."""
    wrong = scene.number("momentum") if "momentum" in scene.finding.evidence else scene.number("value")
    for source in map(scene.read, scene.files):
        found = [
            (call, word) for call in source.calls(source.tree) for word in call.keywords
            if word.arg == "momentum" and "BatchNorm" in called(call) and isinstance(word.value, ast.Constant)
            and word.value.value == wrong
        ]  # fmt: skip
        if found:
            yield source.edit([source.replaced(word.value, f"{1 - wrong:.6g}") for _, word in found])
            return


@edits_of("PLATEAU_MODE")
def mode_of_the_plateau(scene: Scene) -> Iterator[Edit]:
    """``ReduceLROnPlateau`` gets the mode of what it is given."""
    source = scene.source
    call = only(source.calls(source.tree, "ReduceLROnPlateau"), "such schedules")
    wanted = '"max"' if scene.finding.evidence.get("mode") == "min" else '"min"'
    yield source.edit([source.argument(call, 1, "mode", wanted)])


@edits_of("LR_TOO_HIGH", "EXPLODING")
def lower_rate(scene: Scene) -> Iterator[Edit]:
    """A tenth of the rate, or what the finding proposes, the higher first."""
    now = scene.number("lr") if "lr" in scene.finding.evidence else scene.optimizer().default_lr
    proposed = scene.finding.evidence.get("better_lr")
    wanted = {now / 10, now / 100, *([float(proposed)] if isinstance(proposed, int | float) else [])}
    yield from _rates(scene, sorted((one for one in wanted if one < now), reverse=True))


@edits_of("LR_TOO_LOW")
def higher_rate(scene: Scene) -> Iterator[Edit]:
    """The usual rate of the optimizer, or what the finding proposes."""
    now, proposed = scene.number("lr"), scene.finding.evidence.get("better_lr")
    usual = _ADAPTIVE if "Adam" in scene.optimizer().cls else _PLAIN
    wanted = [usual, *([float(proposed)] if isinstance(proposed, int | float) else [])]
    yield from _rates(scene, [one for one in wanted if one > now])


def _rates(scene: Scene, rates: list[float]) -> Iterator[Edit]:
    source, _, call = scene.construction()
    if not any(one.arg == "lr" for one in call.keywords) and len(call.args) > 1:
        raise UnclearEdit("the rate has no keyword")
    keys = [key for one in nodes_in(call.args[:1], ast.Dict) for key in one.keys]
    if any(isinstance(key, ast.Constant) and key.value == "lr" for key in keys):
        raise UnclearEdit("groups have rates of their own")
    texts = list(dict.fromkeys(f"{rate:.6g}" for rate in rates))
    for text in itertools.islice(texts, 3):
        yield source.edit([_rate(source, call, text)])


def _rate(source: UserSource, call: ast.Call, text: str) -> Change:
    """The rate of a call with another value, also where its keywords come from a mapping."""
    mapping = [one.value for one in call.keywords if one.arg is None]
    if not mapping:
        return source.keyword(call, "lr", text)
    name = only(mapping, "mappings of keywords")
    return source.replaced(name, f'{{**{source.of(name)}, "lr": {text}}}')
