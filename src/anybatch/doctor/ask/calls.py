"""Calls in a script that do something else than is meant: changed copies, scalers, plateaus, schedules, states."""

import ast
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from anybatch.doctor.ask.keeping import Kept, Plateau
from anybatch.doctor.ask.source import FUNCTIONS, scope_at, scripts, tree_of, walked
from anybatch.doctor.ask.trials import Line, told
from anybatch.doctor.crashing.usercode import called
from anybatch.records.events import Forward, Loaded, Stepped
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_FLIPS = frozenset({"flip", "fliplr", "flipud", "rot90"})
_ENTRYWISE = frozenset({"abs", "exp", "log", "sigmoid", "sqrt", "tanh"})  # of one argument; a second is for the result
_ALONE = frozenset({"abs", "contiguous", "detach", "exp", "relu", "reset_index", "sigmoid", "sqrt", "tanh"})
"""Methods of a tensor that take no arguments; those of other things, such as a net, do."""

_ALONG = frozenset({"flip", "log_softmax", "roll", "softmax", "squeeze", "unsqueeze"})  # that take numbers of axes
_METHODS = _FLIPS | _ALONE | _ALONG | {
    "astype", "clamp", "clip", "div", "dropna", "fillna", "flatten", "index_add", "index_copy", "index_fill",
    "masked_fill", "masked_scatter", "mul", "nan_to_num", "permute", "reshape", "scatter_add", "sort_values",
    "swapaxes", "transpose", "tril", "triu",
}  # fmt: skip
"""Of a tensor, an array or a table; none that a list, a set, a string, a path, a figure or a module has."""

_FUNCTIONS = _METHODS | _ENTRYWISE | {
    "append", "concatenate", "delete", "dropout", "expand_dims", "gelu", "insert", "leaky_relu", "moveaxis",
    "normalize", "pad", "permutation", "repeat", "tile", "where",
}  # fmt: skip
_OWNERS = frozenset({"F", "TF", "cv2", "functional", "np", "numpy", "random", "torch"})
"""What the functions of libraries are called on, which take first what they are said to change."""

_IN_PLACE = (None, "out", "inplace", "dst")  # keywords that say where the result goes; ``None`` for those of a mapping
_CELLS = re.compile(r"^# ?(%%|In\s?\[)", re.M)  # a notebook, in which the last line of a cell is shown


def about_results(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a statement calls what gives a changed copy, and what it was called with is read afterwards."""
    for file, tree in scripts(run):
        for name, call, line in () if _CELLS.search(Path(file).read_text(encoding="utf-8")) else thrown_away(tree):
            yield told("unread field", Line(file, line), name=name, call=call, kind="result")


def thrown_away(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """What is left as it is, the call whose result is thrown away, and its line.

    Example:
        >>> text = "def load(image):\\n  np.fliplr(image)\\n  return image"
        >>> list(thrown_away(ast.parse(text)))
        [('image', 'np.fliplr(image).copy()', 2)]
        >>> list(thrown_away(ast.parse("for x in data:\\n  x.clamp(0, 1)\\n  net(x)")))
        [('x', 'x.clamp(0, 1)', 2)]
        >>> list(thrown_away(ast.parse("h.detach_()\\nnp.clip(x, 0, 1, out=x)\\nx.view(2)\\nnet(h)")))
        []
    """
    imports = (one for one in walked(tree) if isinstance(one, ast.Import | ast.ImportFrom))
    imported = {(name.asname or name.name).partition(".")[0] for one in imports for name in one.names}
    for call in _statements(tree):
        found, function = _copied(call), _last(call.func)
        if found is None or ast.unparse(found) in imported:
            continue
        scope, name, text = scope_at(tree, call.lineno), ast.unparse(found), ast.unparse(call)
        if _is_read(scope, call, name) and _is_number(scope, name):
            is_of_numpy = function in _FLIPS and text.startswith(("np.", "numpy."))  # torch takes no negative strides
            yield name, f"{text}.copy()" if is_of_numpy else text, call.lineno


def _statements(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls that are statements, without those that are tried, or repeated for their own sake."""
    tried = {
        id(one)
        for block in walked(tree)
        if isinstance(block, ast.Try | ast.With | ast.For | ast.While)
        for one in block.body
        if isinstance(block, ast.Try) or len(block.body) == 1
    }
    for one in walked(tree):
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and id(one) not in tried:
            yield one.value


def _copied(call: ast.Call) -> ast.expr | None:
    """What a call gives a changed copy of; ``None`` for a call that may change something."""
    if not isinstance(call.func, ast.Attribute) or any(one.arg in _IN_PLACE for one in call.keywords):
        return None
    owner, name, given = call.func.value, call.func.attr, call.args
    if _last(owner) in _OWNERS:
        texts = [ast.unparse(one) for one in given]
        has_place = texts[:1] and (texts[0] in texts[1:] or "True" in texts or (name == "clip" and len(given) > 3))
        is_plain = name in _FUNCTIONS and not has_place and (name not in _ENTRYWISE or len(given) == 1)
        copied = given[0] if given and is_plain else None
    else:
        is_plain = name in _METHODS and _last(owner) != "self" and not (name in _ALONE and (given or call.keywords))
        axes = [*given, *(key.value for key in call.keywords)]
        is_along = bool(axes) and all(
            isinstance(one, ast.Constant | ast.UnaryOp | ast.Tuple | ast.List) for one in axes
        )
        copied = owner if is_plain and (name not in _ALONG or is_along) else None
    return copied if isinstance(copied, ast.Name | ast.Attribute | ast.Subscript) else None


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_number(scope: ast.AST, name: str) -> bool:
    """Whether something is computed with what has that name, which is no handle, loader or recorder then."""
    given = (
        [*one.args, *(key.value for key in one.keywords)] if isinstance(one, ast.Call) else [one.left, one.right]
        for one in walked(scope)
        if isinstance(one, ast.Call | ast.BinOp)
    )
    return any(ast.unparse(one) == name for each in given for one in each)


def _is_read(scope: ast.AST, call: ast.Call, name: str) -> bool:
    """Whether a scope reads what has that name after a call, before it gives it another value."""
    after = [
        one
        for one in walked(scope)
        if isinstance(one, ast.Name | ast.Attribute | ast.Subscript)
        and one.lineno > (call.end_lineno or 0)
        and ast.unparse(one) == name
    ]
    first = min(after, key=lambda one: (one.lineno, isinstance(one.ctx, ast.Store), one.col_offset), default=None)
    return first is not None and isinstance(first.ctx, ast.Load)


_FITTED = re.compile(r"^(?!Temperature).*(Scaler|Imputer|Vectorizer|PowerTransformer|QuantileTransformer)$")
_TRAINED = re.compile(r"(?<![a-z])([xy]?)train(ing)?(?!er|ed)", re.I)
_HELD_OUT = re.compile(r"(?<![a-z])([xy]?)(test|validation|valid|val)(?=[xy]?(?![a-z]))", re.I)
_ANY = r"\1*"  # in place of either
_LEARNING = frozenset({"fit", "fit_transform"})
_LOOPS, _EACH = (ast.For, ast.AsyncFor), (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Place = tuple[tuple[ast.AST, str], ...]
"""The nodes that something is within, from the outermost on, each with the name of the part that it is in."""


def about_scalers(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a scaler that was fitted to the data of the training is fitted again to those of the evaluation."""
    for file, tree in scripts(run):
        for name, trained, held_out, line in fitted_anew(tree):
            yield told("fitted anew", Line(file, line), name=name, trained=trained, held_out=held_out)


def fitted_anew(tree: ast.Module) -> Iterator[tuple[str, str, str, int]]:
    """Scalers that are fitted to training data, and later to those that are named alike, but for the evaluation.

    Example:
        >>> text = "s = MinMaxScaler()\\na = s.fit_transform(train_raw)\\nb = s.{}(test_raw)"
        >>> [list(fitted_anew(ast.parse(text.format(one)))) for one in ("fit_transform", "transform")]
        [[('s', 'train_raw', 'test_raw', 3)], []]
        >>> text = "s = StandardScaler()\\ns.fit(X_train)\\nx = s.fit_transform(cat(X_train, X_test))"
        >>> list(fitted_anew(ast.parse(text)))
        []
    """
    if not any(map(_is_made, walked(tree))):
        return
    made = {ast.unparse(one.targets[0]) for one in walked(tree) if isinstance(one, ast.Assign) and _is_made(one.value)}
    trained = dict[str, list[tuple[str, Place]]]()  # by the name of the scaler
    for one, place in sorted(_placed(tree), key=lambda pair: (pair[0].lineno, pair[0].col_offset)):
        if isinstance(one, ast.Assign):
            trained.pop(ast.unparse(one.targets[0]), None)  # another one of the same name
        elif isinstance(one.func, ast.Attribute) and not _is_reversed(given := one.args[0]):
            name, text = ast.unparse(one.func.value), ast.unparse(given)
            if name not in made and not _is_made(one.func.value):
                continue
            if _TRAINED.search(text) and not _HELD_OUT.search(text):
                trained.setdefault(name, []).append((text, place))
            elif _HELD_OUT.search(text) and not _TRAINED.search(text):
                alike = (its for its, other in trained.get(name, ())
                         if _TRAINED.sub(_ANY, its).lower() == _HELD_OUT.sub(_ANY, text).lower()
                         and _meet(other, place) and not _is_of_each(its, other, text, place))  # fmt: skip
                if its := next(alike, ""):
                    yield name, its, text, one.lineno


def _is_made(node: ast.AST) -> bool:
    return bool(_FITTED.search(called(node)))


def _placed(tree: ast.Module) -> Iterator[tuple[ast.Assign | ast.Call, Place]]:
    """Where scalers are made and fitted, and what that is within."""
    left: list[tuple[ast.AST, Place]] = [(tree, ())]
    while left:
        node, place = left.pop()
        if isinstance(node, ast.Assign) and _is_made(node.value):
            yield node, place
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LEARNING:
            yield from [(node, place)] if node.args else []
        for part, value in ast.iter_fields(node):
            every = value if isinstance(value, list) else [value]
            left += [(one, (*place, (node, part))) for one in every if isinstance(one, ast.AST)]


def _is_reversed(given: ast.expr) -> bool:
    """Whether it names what is left out: rows that are not of a set."""
    unlike = (ast.Invert, ast.Not, ast.NotEq, ast.IsNot, ast.NotIn)
    return any(isinstance(one, unlike) for one in ast.walk(given))


def _meet(one: Place, other: Place) -> bool:
    """Whether both can happen in one run: not in different branches of one condition."""
    parts = {id(node): part for node, part in one if isinstance(node, ast.If | ast.IfExp)}
    return all(parts.get(id(node), part) == part for node, part in other)


def _is_of_each(one: str, place: Place, other: str, otherwhere: Place) -> bool:
    """Whether data of several subjects, say, are scaled by themselves: in a comprehension, or in loops over them."""
    both = {id(node) for node, _ in place} & {id(node) for node, _ in otherwhere}
    for text, within in ((one, place), (other, otherwhere)):
        names = {each.id for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Name)}
        for node, _ in within:
            if isinstance(node, _EACH):
                return True
            if isinstance(node, _LOOPS) and id(node) not in both:
                bound = {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
                if bound & names:
                    return True
    return False


_RISES = re.compile(
    r"acc|f1|auc|dice|iou|jaccard|map\b|precision|recall|bleu|rouge|psnr|ssim|reward|return|score|success|r2|corr|hit|ndcg",
    re.IGNORECASE,
)
_FALLS = re.compile(r"loss|err|mse|mae|rmse|nll|perplex|ppl|wer|cer|fid|dist", re.IGNORECASE)
_SCHEDULE = re.compile(r"sched|^lrs?$", re.IGNORECASE)
_OPTIMIZER = re.compile(r"opt(im|$)", re.IGNORECASE)
_OPTIMIZES = re.compile(r"opt(im(izers?)?)?\w*$|scaler$", re.IGNORECASE)
_ENOUGH_STEPS = 30  # in which a schedule would have been stepped, or read
_PLACE = re.compile(r"^(start_?|last_?|cur(rent)?_?|global_?)?(epochs?|steps?|iter(ation)?s?)(_?idx)?$", re.IGNORECASE)
_MOST_FILES = 64  # of a program
_RISEN = 1.2  # times the rate of the state that was loaded


def about_plateaus(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a ``ReduceLROnPlateau`` is given values that get better in the direction that it takes for worse."""
    for one in kept.plateaus.values():
        values = one.values
        if len(values) < 4:
            continue
        sign = 1 if one.mode == "min" else -1  # of what is worse to it
        first, last = values[0], sum(values[-3:]) / 3
        worse = sign * (last - first) > 0.05 * (max(map(abs, values)) or 1.0)
        name = _named(one)
        better = _RISES.search(name) if one.mode == "min" else _FALLS.search(name)
        other = _FALLS.search(name) if one.mode == "min" else _RISES.search(name)
        pairs = [(a, b) for position, a in enumerate(values[:60]) for b in values[position + 1 : 60]]
        ranked = sum(1 for a, b in pairs if sign * (b - a) > 0) / max(len(pairs), 1)
        bounded = all(0 <= value <= 1 for value in values) or all(0 <= value <= 100 for value in values)
        silent = not name or not (better or other)
        wrong = bool(better and not other and worse) or bool(silent and bounded and worse and ranked > 0.75)
        if one.mode == "max" and silent:
            wrong = False  # a value that falls may simply be one that gets worse
        fell = any(later < before for before, later in zip(one.rates, one.rates[1:], strict=False))
        seen: dict[str, Any] = {"mode": one.mode, "first": first, "last": last, "name": name, "values": len(values)}
        seen |= {"rate": one.rates[-1], "rate_first": one.rates[0]}
        yield told("plateau", one, answer="yes" if wrong and fell else "no", **seen)


def _named(one: Plateau) -> str:
    """What the user's line gives to ``step``, as text."""
    tree = tree_of(one.file)
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.Call) or called(node) != "step":
            continue
        if node.lineno <= one.line <= (node.end_lineno or node.lineno):
            given = [*node.args, *(word.value for word in node.keywords)]
            return ast.unparse(given[0]) if given else ""
    return ""


def about_schedules(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a schedule is made and no line steps it, so that its optimizer stays at the first rate."""
    driven = {one.optimizer for one in run.schedulers.values()}
    for cls, number, (file, line) in reversed(kept.schedules.values()):  # one that is made of others comes last
        steps = [one for one in run.of(Stepped) if one.optimizer == number() and one.optimizer not in driven]
        if len(steps) < _ENOUGH_STEPS or len({one.lrs for one in steps}) > 1 or (tree := tree_of(file)) is None:
            continue
        loop = tree_of(steps[-1].file)
        if loop is not None and is_left(beside(file, tree), loop, steps[-1].line, name := name_given(tree, line)):
            seen: dict[str, Any] = {"cls": cls, "name": name or "scheduler", "steps": len(steps)}
            yield told("unstepped", Line(file, line), rate=steps[0].lrs[0], optimizer=number(), **seen)
            return


def name_given(tree: ast.Module, line: int) -> str:
    """The last name of what a statement assigns; empty for others."""
    every = [one for one in walked(tree) if isinstance(one, ast.Assign) and len(one.targets) == 1]
    target = next((one.targets[0] for one in every if one.lineno <= line <= (one.end_lineno or 0)), None)
    return ast.unparse(target).rpartition(".")[2] if isinstance(target, ast.Name | ast.Attribute) else ""


def is_left(trees: list[ast.Module], loop: ast.Module, line: int, name: str) -> bool:
    """Whether the ``step`` of nothing but optimizers and scalers is read, and a schedule is given to no library.

    Args:
        trees: the files of a program.
        loop: that of the line that steps an optimizer.
        line: its number.
        name: of the schedule.

    Example:
        >>> text = "sched = StepLR(opt, 9)\\nfor x in data:\\n  loss(x).backward()\\n  opt.step()\\n{}"
        >>> trees = [ast.parse(text.format(one)) for one in ("", "  sched.step()", "trainer.on_epoch(sched)")]
        >>> [is_left([one], one, 4, "sched") for one in trees]
        [True, False, False]
    """
    every = [one for tree in trees for one in walked(tree)]
    others = {id(one.func) for one in every if isinstance(one, ast.Call) and len(one.args) > 1}  # of a trainer, say
    read = [one for one in every if isinstance(one, ast.Attribute) and one.attr == "step" and id(one) not in others]
    own = {
        ast.unparse(one.value)
        for one in walked(loop)
        if isinstance(one, ast.Attribute) and one.attr == "step" and one.lineno <= line <= (one.end_lineno or 0)
    }
    steps = [ast.unparse(one.value) for one in read]
    if not own or not all(one in own or _OPTIMIZES.search(one) for one in steps):
        return False
    known = {one.name for one in every if isinstance(one, (*FUNCTIONS, ast.ClassDef))} | {"print", "isinstance"}
    for one in every:
        if isinstance(one, ast.Call) and called(one) not in known and not (called(one) or "").endswith("LR"):
            given = [*one.args, *(each.value for each in one.keywords)]
            if name and any(ast.unparse(each).rpartition(".")[2] == name for each in given):
                return False
    return True


def about_own_states(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a state was loaded that was never a copy, so that nothing was put back."""
    for one in kept.own[:1]:
        yield told("own state", one, cls=one.name, tensors=one.count, loads=len(kept.own))


def about_resumed(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether an optimizer or a schedule begins anew on a resume, though its state is in what is loaded."""
    loads = [one for one in run.of(Loaded) if one.into == "optimizer" and one.lrs_after]
    if any(one.into == "scheduler" for one in run.of(Loaded)):
        return
    for file, tree in () if loads else scripts(run):
        for key in itertools.islice(saved_only(*beside(file, tree), key=_OPTIMIZER, beside=_PLACE), 1):
            if (goes_on := next((one for one in run.of(Loaded) if _goes_on(run, one)), None)) is not None:
                yield told("half resumed", goes_on, key=key)
                return
    for file, tree in scripts(run):
        for key in itertools.islice(saved_only(*beside(file, tree)), 1):
            for load in loads:
                later = [step for step in run.of(Stepped) if step.optimizer == load.number and step.at > load.at]
                highest = max((max(step.lrs) for step in later if step.lrs), default=0.0)
                if highest > _RISEN * max(load.lrs_after):
                    yield told("resumed", load, key=key, loaded=max(load.lrs_after), highest=highest)
                    return


def _goes_on(run: Run, load: Loaded) -> bool:
    """Whether a net is trained after a state was loaded into it; one that was not called before is the next new one."""
    forwards = [one for one in run.of(Forward) if load.into == "module" and load.matched]
    known = {one.root for one in forwards if one.at < load.at}
    later = [one for one in forwards if one.at > load.at]
    root = load.number if load.number in known else next((one.root for one in later if one.root not in known), -1)
    return any(one.grad and one.root == root for one in later)


def beside(file: str, tree: ast.Module) -> list[ast.Module]:
    """A file, and those of its folder, and of that of the script, that it or the script imports, read."""
    found = {Path(file).resolve(): tree}
    folders = [Path(file).resolve().parent, Path(sys.path[0]).resolve()]
    waiting = [tree] + [one for path in [Path(sys.argv[0])] if (one := _read(found, path.resolve())) is not None]
    while waiting and len(found) < _MOST_FILES:
        for name in _imported(waiting.pop()):
            path = Path(*name.split("."))
            tries = [folder / one for folder in folders for one in (path.with_suffix(".py"), path / "__init__.py")]
            waiting += [one for one in map(partial(_read, found), tries) if one is not None]
    return [*found.values()]


def _read(found: dict[Path, ast.Module], path: Path) -> ast.Module | None:
    """Reads a file unless it was read before, or can't be."""
    if path in found or path.suffix != ".py" or "site-packages" in path.parts:
        return None
    if (tree := tree_of(path)) is not None:
        found[path] = tree
    return tree


def _imported(tree: ast.Module) -> Iterator[str]:
    """The names of modules that are imported, and of what is imported of them, which may be modules too."""
    for one in walked(tree):
        if isinstance(one, ast.Import):
            yield from (name.name for name in one.names)
        elif isinstance(one, ast.ImportFrom):
            front = f"{one.module}." if one.module else ""
            yield from ([one.module] if one.module else [])
            yield from (f"{front}{name.name}" for name in one.names if name.name != "*")


def saved_only(
    *trees: ast.Module, key: re.Pattern[str] = _SCHEDULE, beside: re.Pattern[str] | None = None
) -> Iterator[str]:
    """Keys of a dict with the state of a schedule beside others, by which nothing is read in any file of a program.

    The same for keys of another kind, where one beside them, such as that of the epoch, is read on a load.

    Example:
        >>> text = "torch.save({'opt': opt.state_dict(), 'sched': sched.state_dict()}, path)\\nload(ckpt['opt'])"
        >>> list(saved_only(ast.parse(text)))
        ['sched']
        >>> list(saved_only(ast.parse(text), ast.parse("sched.load_state_dict(ckpt['sched'])")))
        []
        >>> list(saved_only(ast.parse(text + "\\nsched.last_epoch = ckpt['epoch']")))
        []
        >>> text = "save({'epoch': 3, 'net': net.state_dict(), 'optim': opt.state_dict()}, path)\\n"
        >>> text += "net.load_state_dict(ckpt['net'])"
        >>> list(saved_only(ast.parse(text), key=_OPTIMIZER, beside=_PLACE))
        []
        >>> list(saved_only(ast.parse(text + "\\nstart = ckpt['epoch']"), key=_OPTIMIZER, beside=_PLACE))
        ['optim']
    """
    every = [one for tree in trees for one in walked(tree)]
    saved = [one for one in every if isinstance(one, ast.Dict) and _states(one, key)]
    if not saved or any("last_epoch" in ast.unparse(tree) for tree in trees):
        return
    said = Counter(one.value for one in every if isinstance(one, ast.Constant))
    taken = [one for one in every if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Load)]
    prints = [one for one in every if isinstance(one, ast.JoinedStr) or called(one) == "print"]
    shown = {id(one) for node in prints for one in ast.walk(node)}
    loaded = {ast.unparse(given.value) for one in every if isinstance(one, ast.Call) for given in one.args
              if called(one) == "load_state_dict" and isinstance(given, ast.Subscript)}  # fmt: skip
    read = {one.slice.value for one in taken if isinstance(one.slice, ast.Constant) and id(one) not in shown
            and ast.unparse(one.value) in loaded}  # fmt: skip
    for one in saved:
        names = {each.value for each in one.keys if isinstance(each, ast.Constant)}
        if beside is None or any(isinstance(each, str) and beside.search(each) for each in read & names):
            yield from (name for name in _states(one, key) if said[name] == 1)


def _states(node: ast.Dict, key: re.Pattern[str]) -> list[str]:
    """Its keys of a kind, each of a state."""
    names = [one.value if isinstance(one, ast.Constant) else None for one in node.keys]
    return [name for name, value in zip(names, node.values, strict=True)
            if isinstance(name, str) and key.search(name) and "state_dict()" in ast.unparse(value)]  # fmt: skip
