"""Which state is kept as the best one, or when training ends, against the direction in which its value is better."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.source import scripts, walked
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_RISES = re.compile(
    r"(?<![a-z])(acc|accuracy|f1|auc|auroc|iou|miou|dice|bleu|rouge|psnr|ssim|r2|recall|ndcg)(?![a-z])", re.I
)
_FALLS = re.compile(r"(loss(es)?|mse|mae|rmse|nll|perplexity|ppl)(?![a-z])", re.I)
_NOT_AS_NAMED = re.compile(r"neg|minus|inv|adv|attack|-|1 ?/", re.I)
_LOW, _HIGH = re.compile(r"worst|low|min", re.I), re.compile(r"worst|high|max", re.I)
_WAITS = re.compile(r"wait|patien|counter|stale|bad|no_improv|since", re.I)
_LESS, _MORE = (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_THROUGH = frozenset({"item", "mean", "sum", "float", "cpu", "detach", "tolist", "round", "compute", "numpy"})
"""Calls whose result is better where what they are given is."""

_DEEPEST = 6  # assignments and calls from a value back to what names it
_MODES = {"EarlyStopping": "monitor", "ModelCheckpoint": "monitor", "TrainingArguments": "metric_for_best_model",
          "Seq2SeqTrainingArguments": "metric_for_best_model"}  # fmt: skip
"""What ends a training, or chooses its checkpoint, and the argument with the name of its value."""

_FRAMES = ("lightning", "pytorch_lightning", "transformers")
_OF_A_MODEL = re.compile(r"state_dict|(save\w*|deepcopy)\([\w.]*(model|net)")


def about_best(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a state is kept when a value is worse than the best one so far."""
    for file, tree in scripts(run):
        for name, line, keeps in worse_kept(tree):
            evidence = {"name": name, "keeps": keeps}
            yield Probed(probe="worst kept", root=-1, answer="yes", file=file, line=line, evidence=evidence)
        for name, line, keeps, fix in wrong_modes(tree):
            evidence = {"name": name, "keeps": keeps, "fix": fix}
            yield Probed(probe="worst mode", root=-1, answer="yes", file=file, line=line, evidence=evidence)


def wrong_modes(tree: ast.Module) -> Iterator[tuple[str, int, str, str]]:
    """Callbacks of Lightning, and arguments of a Trainer, whose mode is not that of the value that they are given.

    Example:
        >>> text = "from lightning.pytorch.callbacks import EarlyStopping\\n"
        >>> list(wrong_modes(ast.parse(text + "EarlyStopping(monitor='val_acc', patience=2)")))
        [('val_acc', 2, 'lowest', "mode='max'")]
        >>> list(wrong_modes(ast.parse(text + "EarlyStopping(monitor='val_loss', patience=2)")))
        []
    """
    defined = {one.name for one in walked(tree) if isinstance(one, ast.ClassDef)} | set(_others(tree))
    stops = any("EarlyStoppingCallback" in ast.unparse(one) for one in walked(tree) if isinstance(one, ast.Call))
    for one in (each for each in walked(tree) if isinstance(each, ast.Call)):
        called = ast.unparse(one.func).rpartition(".")[2]
        if called not in _MODES or called in defined or any(word.arg is None for word in one.keywords):
            continue
        given = {word.arg or "": word.value for word in one.keywords}
        first = one.args[0] if called == "EarlyStopping" and one.args else None
        name = _constant(given.get(_MODES[called], first))
        of_trainer = _MODES[called] != "monitor"
        used = stops or _constant(given.get("load_best_model_at_end")) is True if of_trainer else True
        lower = _is_lower(given, str(name), of_trainer)
        keeps_all = ast.unparse(given.get("save_top_k", ast.Constant(1))) in ("0", "-1")
        if not isinstance(name, str) or lower is None or not used or keeps_all:
            continue
        if _named(name) == (1 if lower else -1):
            right = f"greater_is_better={lower}" if of_trainer else f"mode={'max' if lower else 'min'!r}"
            yield name, one.lineno, "lowest" if lower else "highest", right


def _others(tree: ast.Module) -> Iterator[str]:
    """What is imported by name from elsewhere than a framework; of all, where no framework is imported."""
    frames = False
    for one in walked(tree):
        names = [one.module or ""] if isinstance(one, ast.ImportFrom) else []
        names += [each.name for each in one.names] if isinstance(one, ast.Import) else []
        is_frame = any(name.split(".")[0] in _FRAMES for name in names)
        frames |= is_frame
        if isinstance(one, ast.ImportFrom) and not is_frame:
            yield from (each.asname or each.name for each in one.names)
    yield from () if frames else _MODES


def _is_lower(given: dict[str, ast.expr], name: str, of_trainer: bool) -> bool | None:
    """Whether the lowest value is the best one, as it is said or by default; ``None`` if that is not known."""
    if not of_trainer:
        said = _constant(given["mode"]) if "mode" in given else "min"
        return {"min": True, "max": False}.get(str(said))
    if "greater_is_better" not in given:
        return name.endswith("loss")
    greater = _constant(given["greater_is_better"])
    return not greater if isinstance(greater, bool) else None


def _constant(node: Any) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def worse_kept(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Values that take the place of the best one where they are worse, together with a state or a patience.

    Example:
        >>> text = "if val_acc < best:\\n  best = val_acc\\n  torch.save(model.state_dict(), path)"
        >>> list(worse_kept(ast.parse(text)))
        [('val_acc', 1, 'lowest')]
        >>> text = "if best is None or loss > best:\\n  best, wait = loss, 0"
        >>> list(worse_kept(ast.parse(text)))
        [('loss', 1, 'highest')]
        >>> text = "if val_loss > best - delta:\\n  wait += 1\\nelse:\\n  best = val_loss\\n  wait = 0"
        >>> list(worse_kept(ast.parse(text)))
        []
        >>> text = "if loss > worst_loss:\\n  worst_loss = loss\\n  torch.save(model.state_dict(), path)"
        >>> list(worse_kept(ast.parse(text)))
        []
        >>> text = "if loss > best_loss:\\n  best_loss = loss\\n  best_delta = delta.clone()"
        >>> list(worse_kept(ast.parse(text)))
        []
    """
    for scope in [tree, *(one for one in walked(tree) if isinstance(one, _FUNCTIONS))]:
        inside = _own(scope)
        for one in (node for node in inside if isinstance(node, ast.If)):
            for test, turned in _tests(one.test, inside):
                for body, is_else in ((one.body, False), (one.orelse, True)):
                    both = isinstance(one.test, ast.BoolOp) and isinstance(one.test.op, ast.And)
                    value = _taken(test, body) if not (both and is_else) and _keeps(body) else None
                    if value is None or not isinstance(test.ops[0], (*_LESS, *_MORE)):
                        continue
                    is_less = isinstance(test.ops[0], _LESS) == (ast.unparse(test.left) == value)
                    lower = is_less != (turned != is_else)
                    meant = (_LOW if lower else _HIGH).search(ast.unparse(test))
                    sides = {ast.unparse(side): side for side in (test.left, *test.comparators)}
                    sure = bool(_named(value)) or _keeps(body, of_model=True)
                    if sure and not meant and _better(sides[value], tree, inside) == (1 if lower else -1):
                        yield value, one.lineno, "lowest" if lower else "highest"


def _own(scope: Any) -> list[ast.AST]:
    """The nodes of a scope without those of the functions in it."""
    found: list[ast.AST] = []
    waiting = [*ast.iter_child_nodes(scope)]
    while waiting:
        found.append(waiting.pop(0))
        waiting += [] if isinstance(found[-1], _FUNCTIONS) else ast.iter_child_nodes(found[-1])
    return found


def _tests(test: ast.expr, inside: list[ast.AST]) -> Iterator[tuple[ast.Compare, bool]]:
    """The comparisons of a condition, each with whether the condition is its contrary."""
    if isinstance(test, ast.Name):
        given = _values_of(test.id, inside)
        test = given[0] if len(given) == 1 else test
    if isinstance(test, ast.BoolOp):
        yield from ((one, False) for one in test.values if isinstance(one, ast.Compare) and len(one.ops) == 1)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from ((one, not turned) for one, turned in _tests(test.operand, inside))
    elif isinstance(test, ast.Compare) and len(test.ops) == 1:
        yield test, False


def _values_of(name: str, inside: list[ast.AST]) -> list[ast.expr]:
    """What a name is given in a scope; what is subtracted from it comes as such."""
    found: list[ast.expr] = []
    for one in inside:
        if isinstance(one, ast.Assign):
            for target in one.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    found.append(one.value)
                elif isinstance(target, ast.Tuple) and any(ast.unparse(each) == name for each in target.elts):
                    place = next(at for at, each in enumerate(target.elts) if ast.unparse(each) == name)
                    parts = isinstance(one.value, ast.Tuple) and len(one.value.elts) == len(target.elts)
                    item = ast.Subscript(one.value, ast.Constant(place), ast.Load())
                    found.append(one.value.elts[place] if parts and isinstance(one.value, ast.Tuple) else item)
        elif isinstance(one, ast.AugAssign) and ast.unparse(one.target) == name and not isinstance(one.op, ast.Div):
            found.append(one.value if isinstance(one.op, ast.Add) else ast.UnaryOp(ast.USub(), one.value))
    return found


def _named(text: str) -> int:
    """1 where a name says that more is better, -1 where less is, 0 where it says neither, or both."""
    known = not _NOT_AS_NAMED.search(text)
    return int(known and bool(_RISES.search(text))) - int(known and bool(_FALLS.search(text)))


def _better(node: ast.expr, tree: ast.Module, inside: list[ast.AST], deep: int = 0) -> int:
    """In which direction a value is better, by its name, or by what it was made of; 0 where it is not sure."""
    if deep > _DEEPEST:
        return 0
    name = ast.unparse(node)
    if isinstance(node, (ast.Name, ast.Attribute)):
        own = _named(name)
        if own or _NOT_AS_NAMED.search(name) or not isinstance(node, ast.Name):
            return own
        made = [one for one in _values_of(name, inside) if not isinstance(one, ast.Constant)]
        return _agreed([_better(one, tree, inside, deep + 1) for one in made])
    if isinstance(node, ast.Subscript):
        key = _constant(node.slice)
        if isinstance(key, str):
            return _named(key)
        if isinstance(key, int) and isinstance(node.value, ast.Call):
            return _of_call(node.value, tree, inside, deep, key)
        return _better(node.value, tree, inside, deep + 1) if key is None else 0
    if isinstance(node, ast.Call):
        return _of_call(node, tree, inside, deep, None)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mult)) and "-" not in name:
        return _better(node.left, tree, inside, deep + 1)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and not isinstance(node.comparators[0], ast.Constant):
        return {ast.Eq: 1, ast.NotEq: -1}.get(type(node.ops[0]), 0)
    return 0


def _of_call(node: ast.Call, tree: ast.Module, inside: list[ast.AST], deep: int, place: int | None) -> int:
    """The same of what a call gives, or of one of the values that it gives."""
    called = ast.unparse(node.func).rpartition(".")[2] if not isinstance(node.func, ast.Call) else ""
    if called in _THROUGH:
        of_method = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) not in (
            "np",
            "numpy",
            "torch",
        )
        part: Any = node.func.value if of_method and isinstance(node.func, ast.Attribute) else (*node.args, None)[0]
        return _better(part, tree, inside, deep + 1) if part is not None else 0
    functions = [one for one in walked(tree) if isinstance(one, _FUNCTIONS) and one.name == called]
    if not functions:
        return _named(called) if place is None else 0
    found = []
    for function in functions:
        own = _own(function)
        for one in own:
            if isinstance(one, ast.Return) and one.value is not None:
                value: ast.expr | None = one.value
                if isinstance(value, ast.Tuple):
                    value = value.elts[place] if place is not None and place < len(value.elts) else None
                elif place is not None:
                    value = None
                found.append(_better(value, tree, own, deep + 1) if value is not None else 0)
    return _agreed(found)


def _agreed(found: list[int]) -> int:
    return found[0] if found and len(set(found)) == 1 else 0


def _taken(test: ast.Compare, body: list[ast.stmt]) -> str | None:
    """The side of a comparison that becomes the other one, which is the best so far."""
    sides = [ast.unparse(test.left), ast.unparse(test.comparators[0])]
    assigned = {pair for one in body if isinstance(one, ast.Assign) for pair in _assigned(one)}
    for value, best in (sides, sides[::-1]):
        if any(value == given and best.split(" ")[0] == name for name, given in assigned):
            return value
    return None


def _assigned(one: ast.Assign) -> Iterator[tuple[str, str]]:
    """Names and what they are given, with the entries of a dict or a tuple as what they are read by."""
    for target in one.targets:
        name, value = ast.unparse(target), one.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(map(ast.unparse, target.elts), map(ast.unparse, value.elts), strict=False)
        elif isinstance(value, ast.Dict):
            pairs = zip(value.keys, value.values, strict=True)
            yield from ((f"{name}[{ast.unparse(key)}]", ast.unparse(each)) for key, each in pairs if key is not None)
        elif isinstance(value, ast.Tuple):
            yield from ((f"{name}[{place}]", ast.unparse(each)) for place, each in enumerate(value.elts))
        else:
            yield name, ast.unparse(value)


def _keeps(body: list[ast.stmt], *, of_model: bool = False) -> bool:
    """Whether a state is kept, of a model if that is asked, or a patience begins anew."""
    text = [ast.unparse(one) for one in body]
    resets = (name for one in body if isinstance(one, ast.Assign) for name, given in _assigned(one) if given == "0")
    kept = any(_OF_A_MODEL.search(one) or ("save" in one and not of_model) for one in text)
    return kept or any(_WAITS.search(name) for name in resets)
