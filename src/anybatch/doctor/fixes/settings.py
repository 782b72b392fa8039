"""Edits of one setting: a mode, a rate, a keyword."""

import ast
import itertools
from collections.abc import Iterator

from anybatch.doctor.crashing.usercode import called
from anybatch.doctor.fixes.scene import Scene, each, edits_of, inner_loop
from anybatch.doctor.fixes.source import LOOPS, Change, Edit, UnclearEdit, UserSource, only

_ADAPTIVE = 1e-3
_PLAIN = 1e-2


def _receiver(scene: Scene, method: str) -> str:
    """What the fix calls a method of: ``model`` of ``model.train()``."""
    code = only(scene.fix, "statements of the fix")
    call = code.value if isinstance(code, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != method:
        raise UnclearEdit(f"the fix is no call of {method}")
    return ast.unparse(call.func.value)


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
    if len(call.args) > 2:
        yield source.edit([source.replaced(call.args[2], "self.training")])
    else:
        yield source.edit([source.keyword(call, "training", "self.training")])


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
    if len(call.args) > 1:
        yield source.edit([source.replaced(call.args[1], wanted)])
    else:
        yield source.edit([source.keyword(call, "mode", wanted)])


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
    if call.args and any(isinstance(one, ast.Dict) and any(isinstance(key, ast.Constant) and key.value == "lr"
                         for key in one.keys) for one in ast.walk(call.args[0])):  # fmt: skip
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
