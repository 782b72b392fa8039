"""What the text of a script shows: fields of a batch that nothing reads, and a module's method named backward."""

import ast
import contextlib
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.steps import slots_of
from anybatch.doctor.ask.tape import Slot
from anybatch.doctor.ask.trials import Line, told
from anybatch.doctor.crashing.usercode import called
from anybatch.doctor.samples.inputs import mark
from anybatch.doctor.samples.losscalls import LOSSES
from anybatch.records.events import Backward
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_ENDS = re.compile(
    r"^((b_?|batch_?)?(is_)?(done|terminal|terminated|not_?done|nonterminal)(s|_mask|_flags?|_batch)?(_?b)?|d)$", re.I
)
_MASKS = re.compile(r"^(\w+_)?(masks?|padding|sample_weights?|is_weights?|importance_weights?)(_?b)?$", re.I)
_ACTIONS = re.compile(r"^(b_?|batch_?)?a(ct(ion)?s?)?(_batch)?(_?b)?$", re.I)
_REWARDS = re.compile(r"^(b_?|batch_?)?r(ew|ewards?)?(s|_batch)?(_?b)?$", re.I)
_DISCOUNTS = re.compile(r"gamma|discount", re.I)
_FIELDS = {"end": _ENDS, "mask": _MASKS, "action": _ACTIONS}
_GRADIENTS = re.compile(r"grad|^g$|^dy$|^dout$", re.I)
_FRAMES = ("torch.", "lightning.", "pytorch_lightning.", "transformers.", "accelerate.", "deepspeed.")
_RISES = re.compile(
    r"(?<![a-z])(acc|accuracy|f1|auc|auroc|iou|miou|dice|bleu|rouge|psnr|ssim|r2|recall|ndcg)(?![a-z])", re.I
)
_FALLS = re.compile(r"(loss|mse|mae|rmse|nll|perplexity|ppl)(?![a-z])", re.I)
_NOT_AS_NAMED = re.compile(r"neg|minus|inv|adv|attack|-|1 ?/", re.I)
_LOW, _HIGH = re.compile(r"worst|low|min", re.I), re.compile(r"worst|high|max", re.I)
_WAITS = re.compile(r"wait|patien|counter|stale|bad|no_improv|since", re.I)
_LESS, _MORE = (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)
_REVERSAL = re.compile(
    r"\breversed\(|::\s*-1\]|\.reverse\(|flip\w*\(|,\s*-1,\s*-1\)|insert\(0,|\.pop\(|- 1 - \w+\]|-\w+ - 1\]"
)
_REDUCING = frozenset({"sum", "mean", "fmean", "max", "min", "len", "std", "median"})
_LEAST_BACK = 3  # times that a generator went back
_SEEDED = {"random.seed": "random", "np.random.seed": "np.random", "numpy.random.seed": "np.random",
           "torch.manual_seed": "torch", "torch.random.manual_seed": "torch"}  # fmt: skip
_TERMS = frozenset({"mean", "sum", *LOSSES})
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_REPEATED = (*FUNCTIONS, ast.For, ast.While)


@functools.lru_cache(maxsize=8)
def parsed(text: str) -> ast.Module:
    """The tree of a script, which several questions read and none changes."""
    return ast.parse(text)


@functools.lru_cache(maxsize=1024)
def walked(node: ast.AST) -> tuple[ast.AST, ...]:
    """A node of such a tree and all below it."""
    return tuple(ast.walk(node))


def tree_of(file: str | Path) -> ast.Module | None:
    """The tree of a file; ``None`` where it can't be read."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        return parsed(Path(file).read_text(encoding="utf-8"))
    return None


def scripts(run: Run) -> Iterator[tuple[str, ast.Module]]:
    """The files of lines that go back, read."""
    files = dict.fromkeys(one.file for one in run.of(Backward) if one.file.endswith(".py"))
    yield from ((file, tree) for file in files if (tree := tree_of(file)) is not None)


def about_fields(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether what says where an episode ends, or what counts, is unpacked beside a loss and then read by nothing."""
    for file, tree in scripts(run):
        lines = {one.line for one in run.of(Backward) if one.file == file}
        for name, line in unread(tree, lines):
            kind = next(kind for kind, one in _FIELDS.items() if one.match(name))
            yield told("unread field", Line(file, line), name=name, kind=kind)


def unread(tree: ast.Module, lines: set[int]) -> Iterator[tuple[str, int]]:
    """Names of the ends of episodes, and of masks, that are assigned in the scope of a backward and read nowhere.

    Example:
        >>> text = "def learn(batch):\\n  s, r, done = batch\\n  y = r + GAMMA * q(s)\\n  loss(y).backward()"
        >>> list(unread(ast.parse(text), {4}))
        [('done', 2)]
        >>> text = "for s, r, t, d in data:\\n  y = r + 0.99 * q(t).max()\\n  loss(q(s), y).backward()"
        >>> list(unread(ast.parse(text), {3}))
        [('d', 1)]
        >>> text = "for x in data:\\n  n, d = x.shape\\n  ema = 0.99 * ema + 0.01 * n\\n  net(x).mean().backward()"
        >>> list(unread(ast.parse(text), {4}))
        []
        >>> text = "def darker(sample):\\n  image, mask = sample\\n  return 0.9 * image\\nloss.backward()"
        >>> list(unread(ast.parse(text), {4}))
        []
    """
    blocks = [one for one in tree.body if isinstance(one, (ast.For, ast.While, ast.With, ast.If))]
    for scope in (*_functions(tree), *blocks):
        goes_back = any(scope.lineno <= line <= (scope.end_lineno or 0) for line in lines)
        if not goes_back and not _discounts(scope):
            continue
        read, given = _read(scope), dict(_unpacked(scope))
        for name, line in given.items():
            if name in read or (len(name) == 1 and not any(map(_REWARDS.match, given))):
                continue
            is_of_values = any(map(_REWARDS.match, given)) and any(
                isinstance(one, ast.Attribute) and one.attr in ("max", "amax") for one in walked(scope)
            )  # of a state alone no action is asked
            if (
                (_ENDS.match(name) or (_ACTIONS.match(name) and is_of_values)) and _discounts(scope, literals=goes_back)
            ) or _MASKS.match(name):
                yield name, line


def about_options(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a function is called with an option that it does not read."""
    for file, tree in scripts(run):
        for function, name, line in unread_options(tree):
            yield told("unread option", Line(file, line), name=name, function=function)


def unread_options(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Functions with an argument that has a plain default, is given by its name, and is read nowhere in the function.

    Example:
        >>> text = "def rank(net, seen=True):\\n  return net.scores().topk(9)\\nrank(net, seen={})"
        >>> list(unread_options(ast.parse(text.format(True))))
        [('rank', 'seen', 1)]
        >>> text = "def rank(net, seen=True):\\n  return net.scores(seen)\\nrank(net, seen=False)"
        >>> list(unread_options(ast.parse(text)))
        []
    """
    every = [one for one in tree.body if isinstance(one, FUNCTIONS)]  # methods may have them as others do
    calls = [(one.func.id, one.keywords) for one in walked(tree)
             if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)]  # fmt: skip
    for one in every:
        plain = [*one.args.posonlyargs, *one.args.args]
        pairs = [*zip(plain[len(plain) - len(one.args.defaults) :], one.args.defaults, strict=True)]
        pairs += [(arg, value) for arg, value in zip(one.args.kwonlyargs, one.args.kw_defaults, strict=True) if value]
        options = {arg.arg for arg, value in pairs if isinstance(value, ast.Constant) and value.value is not None}
        read = {part.id for part in walked(one) if isinstance(part, ast.Name)}
        given = {word.arg for name, words in calls if name == one.name for word in words}
        is_open = one.args.kwarg is not None or read & {"locals", "super"} or sum(o.name == one.name for o in every) > 1
        for name in sorted(options & given - read) if not is_open else ():
            yield one.name, name, one.lineno


def about_terms(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a step computes a loss, or a mean, with a graph and gives it a name that nothing reads."""
    for tape, end in ((one, one.losses[-1]) for one in kept.tapes.values()):
        parts = [slots_of(tape, one) for one in tape.losses]
        needed, last = set[Slot]().union(*parts), parts[-1]  # those before may be of weights that are tried out
        idle = [one for one in tape.operations if one.grad and one.kind in _TERMS and not needed & set(one.outs)]
        trees = {file: tree for file in {one.file for one in idle} if (tree := tree_of(file)) is not None}
        used = {(end.file, end.line), *((one.file, one.line) for one in tape.operations if last & {*one.outs})}
        beside = {scope_at(trees[file], line) for file, line in used if file in trees}  # with other parts of the loss
        for file, line in dict.fromkeys((one.file, one.line) for one in idle if one.file in trees):
            for name in unread_at(trees[file], line) if scope_at(trees[file], line) in beside else ():
                yield told("unread field", Line(file, line), name=name, kind="term")


def unread_at(tree: ast.Module, line: int) -> Iterator[str]:
    """Names that a line gives one value each, and that nothing reads.

    Example:
        >>> text = "def learn():\\n  a = x.mean()\\n  b = y.mean()\\n  c, d = two()\\n  return a"
        >>> [list(unread_at(ast.parse(text), line)) for line in (2, 3, 4)]
        [[], ['b'], []]
    """
    scope = scope_at(tree, line)
    shared = {name for one in walked(scope) if isinstance(one, (ast.Global, ast.Nonlocal)) for name in one.names}
    for one in walked(scope):
        if isinstance(one, ast.Assign) and one.lineno <= line <= (one.end_lineno or 0):
            names = [each.id for each in one.targets if isinstance(each, ast.Name) and not each.id.startswith("_")]
            yield from (name for name in names if name not in _read(scope) | shared)


def scope_at(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function around a line, or the whole file."""
    inside = [one for one in _functions(tree) if one.lineno <= line <= (one.end_lineno or 0)]
    return max(inside, key=lambda one: one.lineno, default=tree)


@functools.lru_cache(maxsize=8)
def _functions(tree: ast.Module) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    return tuple(one for one in walked(tree) if isinstance(one, FUNCTIONS))


def about_lists(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a list is turned round in the loop that fills it, or never, where that goes back in time."""
    for file, tree in scripts(run):
        for name, line in turned_lists(tree):
            yield told("turned list", Line(file, line), name=name)
        for name, line in backward_lists(tree):
            yield told("backward list", Line(file, line), name=name)


def turned_lists(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Lists to which each round of a loop appends, and which it turns round then.

    Example:
        >>> text = "for r in rewards[::-1]:\\n  R = r + g * R\\n  returns.append(R)\\n  returns.reverse()"
        >>> list(turned_lists(ast.parse(text)))
        [('returns', 4)]
        >>> text = "for r in rewards[::-1]:\\n  R = r + g * R\\n  returns.append(R)\\nreturns.reverse()"
        >>> list(turned_lists(ast.parse(text)))
        []
        >>> text = "for a, b in pairs:\\n  both = []\\n  both.append(a)\\n  both.append(b)\\n  both.reverse()"
        >>> list(turned_lists(ast.parse(text)))
        []
    """
    for loop in (one for one in walked(tree) if isinstance(one, (ast.For, ast.While))):
        calls = [one.value for one in loop.body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)]
        done = [(one.func.attr, ast.unparse(one.func.value), one.lineno) for one in calls
                if isinstance(one.func, ast.Attribute)]  # fmt: skip
        filled = {name for method, name, _ in done if method == "append"}
        fresh = {ast.unparse(target) for one in loop.body if isinstance(one, ast.Assign) for target in one.targets}
        if not isinstance(loop.body[-1], (ast.Break, ast.Return)):
            yield from ((name, line) for method, name, line in done if method == "reverse" and name in filled - fresh)


def backward_lists(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Lists of discounted sums to which a loop from the last step to the first appends, in a file that turns none.

    Example:
        >>> text = "for r in reversed(rewards):\\n  R = r + gamma * R\\n  returns.append(R)\\nlearn(returns)"
        >>> list(backward_lists(ast.parse(text)))
        [('returns', 3)]
        >>> list(backward_lists(ast.parse(text + "\\nreturns.reverse()")))
        []
    """
    loops = [one for one in walked(tree) if isinstance(one, ast.For) and _REVERSAL.search(ast.unparse(one.iter))]
    heads = {id(node) for loop in loops for node in walked(loop.iter)}
    turns = (one for one in walked(tree) if id(one) not in heads and isinstance(one, (ast.Call, ast.Subscript)))
    if any(_REVERSAL.search(ast.unparse(one)) for one in turns):
        return
    for loop in loops:
        carried = {target.id for one in walked(loop) for target, value in _assigned(one)
                   if isinstance(target, ast.Name) and target.id in _loaded(value)}  # fmt: skip
        done = [one for one in walked(loop) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)
                and one.func.attr == "append" and len(one.args) == 1]  # fmt: skip
        # what else is appended has the same order
        is_sums = all(carried & set(_loaded(one.args[0])) for one in done) and _discounts(loop, literals=True)
        for one in done if is_sums else ():
            name = ast.unparse(one.func).removesuffix(".append")
            if isinstance(one.args[0], ast.Name) and not _is_only_reduced(tree, name):
                yield name, one.lineno


def _is_only_reduced(tree: ast.Module, name: str) -> bool:
    """Whether a list is read for its sum, its mean or the like alone, for which its order is nothing."""
    calls = [one for one in walked(tree) if isinstance(one, ast.Call)]
    reducing = [each for one in calls if ast.unparse(one.func).rpartition(".")[2] in _REDUCING for each in one.args]
    appending = [one.func for one in calls if ast.unparse(one.func) == f"{name}.append"]

    def read(nodes: list[Any]) -> set[int]:
        return {id(each) for one in nodes for each in walked(one) if ast.unparse(each) == name
                and isinstance(getattr(each, "ctx", None), ast.Load)}  # fmt: skip

    return read([tree]) == read(reducing) | read(appending)


def _discounts(scope: Any, *, literals: bool = False) -> bool:
    for one in walked(scope):
        if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mult):
            sides = [side for side in (one.left, one.right) if isinstance(side, (ast.Name, ast.Attribute))]
            names = [side.id if isinstance(side, ast.Name) else side.attr for side in sides]
            numbers = [side.value for side in (one.left, one.right) if isinstance(side, ast.Constant)]
            is_usual = literals and any(isinstance(number, float) and 0.9 <= number < 1 for number in numbers)
            if is_usual or any(_DISCOUNTS.search(name) for name in names):
                return True
    return False


def _unpacked(scope: Any) -> Iterator[tuple[str, int]]:
    """Names that are unpacked from something together with others, or given what a call or an index gives."""
    for one in walked(scope):
        targets: list[Any] = one.targets if isinstance(one, ast.Assign) else []
        targets = [one.target] if isinstance(one, ast.For) else targets
        is_made = isinstance(one, ast.Assign) and isinstance(one.value, (ast.Call, ast.Subscript))
        for target in targets:
            if isinstance(target, (ast.Tuple, ast.List)):
                yield from ((n.id, n.lineno) for n in walked(target) if isinstance(n, ast.Name))
            elif isinstance(target, ast.Name) and is_made:
                yield target.id, target.lineno


@functools.lru_cache(maxsize=64)
def _read(scope: Any) -> frozenset[str]:
    """Names that something reads which is more than a name that nothing reads itself."""
    uses: dict[str, set[str]] = {}
    waiting: list[str] = []
    for one in walked(scope):
        pairs = [(to.id, value) for to, value in _assigned(one) if isinstance(to, ast.Name)]
        for name, value in pairs:
            uses.setdefault(name, set()).update(_loaded(value) - {name})
        if not pairs and isinstance(one, ast.stmt) and not isinstance(one, (ast.FunctionDef, ast.ClassDef)):
            waiting += _loaded_by(one)
    found = set(waiting)
    while waiting:
        for name in uses.get(waiting.pop(), ()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return frozenset(found)


def _assigned(statement: Any) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a statement gives a value, each with its own where both are tuples; nothing where it does more than that."""
    for target in statement.targets if isinstance(statement, ast.Assign) else ():
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            yield from zip(target.elts, statement.value.elts, strict=False)
        else:
            yield target, statement.value


def _loaded(node: Any) -> set[str]:
    return {n.id for n in walked(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _loaded_by(statement: Any) -> set[str]:
    """Names that a statement itself reads, without those in its body."""
    parts: list[Any] = []
    for field, value in ast.iter_fields(statement):
        if field not in ("body", "orelse", "finalbody", "handlers"):
            parts += value if isinstance(value, list) else [value]
    return {name for part in parts if isinstance(part, ast.AST) for name in _loaded(part)}


def about_methods(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a module of the user's defines a ``backward`` that takes a gradient, which nothing calls."""
    seen: set[type] = set()
    for state in list(kept.states.values()):
        for name, cls in state.methods.items():
            owner = next((base for base in cls.__mro__ if "backward" in vars(base)), None)
            if owner is None or owner in seen or owner.__module__.startswith(_FRAMES):
                continue
            seen.add(owner)
            if (found := _method(owner)) is not None:
                place = Line(*found[:2], name)
                yield told("method backward", place, root=state.root, cls=owner.__name__, negative=found[2])


def _method(owner: type) -> tuple[str, int, bool] | None:
    """Where a method stands that looks like a rule of differentiation, and whether it gives a negative gradient."""
    method = vars(owner)["backward"]
    method = getattr(method, "__func__", method)
    try:
        text, line = inspect.getsourcelines(method)
        file = inspect.getsourcefile(method) or ""
        tree = ast.parse(textwrap.dedent("".join(text))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    names = [one.arg for one in tree.args.args if one.arg not in ("self", "ctx", "cls")]
    calls = {n.attr for n in walked(tree) if isinstance(n, ast.Attribute)}
    gives = any(isinstance(n, ast.Return) and n.value is not None for n in walked(tree))
    if "backward" in calls or "grad" in calls or not gives or not any(_GRADIENTS.search(name) for name in names):
        return None
    start = line + tree.lineno - 1 + (1 if tree.decorator_list else 0)
    return file, start, any(isinstance(n, ast.USub) for n in walked(tree))


def about_best(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a state is kept when a value is worse than the best one so far."""
    for file, tree in scripts(run):
        for name, line, keeps in worse_kept(tree):
            yield told("worst kept", Line(file, line), name=name, keeps=keeps)


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
    for one in (node for node in walked(tree) if isinstance(node, ast.If)):
        tests = one.test.values if isinstance(one.test, ast.BoolOp) and isinstance(one.test.op, ast.Or) else [one.test]
        for test in tests:
            if not isinstance(test, ast.Compare) or len(test.ops) != 1:
                continue
            for body, turned in ((one.body, False), (one.orelse, True)):
                value = _taken(test, body)
                if value is None or not _keeps(body):
                    continue
                is_less = isinstance(test.ops[0], _LESS) == (ast.unparse(test.left) == value)
                lower = is_less != turned
                known = isinstance(test.ops[0], (*_LESS, *_MORE)) and not _NOT_AS_NAMED.search(value)
                meant = (_LOW if lower else _HIGH).search(ast.unparse(test))
                if known and not meant and (_RISES if lower else _FALLS).search(value):
                    yield value, one.lineno, "lowest" if lower else "highest"


def _taken(test: ast.Compare, body: list[ast.stmt]) -> str | None:
    """The side of a comparison that becomes the other one, which is the best so far."""
    sides = [ast.unparse(test.left), ast.unparse(test.comparators[0])]
    assigned = _texts(body)
    for value, best in (sides, sides[::-1]):
        if any(value == given and best.split(" ")[0] == name for name, given in assigned):
            return value
    return None


def _texts(body: list[ast.stmt]) -> list[tuple[str, str]]:
    """What statements give a value, with that, as text."""
    return [(ast.unparse(to), ast.unparse(value)) for one in body for to, value in _assigned(one)]


def _keeps(body: list[ast.stmt]) -> bool:
    """Whether a state is kept, or a patience begins anew."""
    text = [ast.unparse(one) for one in body]
    resets = (name for name, given in _texts(body) if given == "0")
    return any("state_dict" in one or re.search(r"save|deepcopy\(\w*(model|net)", one) for one in text) or any(
        _WAITS.search(name) for name in resets
    )


def about_seeds(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether draws of the training come back since their generator is seeded with the same value in a loop."""
    often = {name: count for name, count in kept.streams.back.items() if count >= _LEAST_BACK}
    alike = any(
        len(one) >= _LEAST_BACK and len({mark(first) for first, *_ in one}) == 1 for one in kept.batches.values()
    )
    stood = {name: count for name, count in kept.streams.stood.items() if alike and count >= _LEAST_BACK}
    for file, tree in scripts(run) if often or stood else ():
        each = lines_of_steps(tree) if stood else set[int]()
        for name, value, line in reseeded(tree):
            times = often.get(name) or (stood.get(name) if line in each else None)
            if times:
                yield told("reseeded", Line(file, line), generator=name, value=value, times=times)
                return


def lines_of_steps(tree: ast.Module) -> set[int]:
    """The lines of the innermost loops with a backward, and of the functions that those call.

    Example:
        >>> text = "def get():\\n  seed(0)\\ndef fold():\\n  seed(0)\\n  for x in get():\\n    f(x).backward()\\n"
        >>> sorted(lines_of_steps(ast.parse(text + "    get()\\nfor k in range(5):\\n  fold()")))
        [1, 2, 5, 6, 7]
    """
    loops = [
        one
        for one in walked(tree)
        if isinstance(one, (ast.For, ast.While)) and any(called(each) == "backward" for each in walked(one))
    ]
    inner = [one for one in loops if not any(each in loops for each in walked(one) if each is not one)]
    own = {_own_called(each) for one in inner for each in walked(one)}
    functions = [
        one
        for one in walked(tree)
        if isinstance(one, FUNCTIONS) and one.name in own and not any(each in inner for each in walked(one))
    ]
    return {
        each.lineno for one in (*inner, *functions) for each in walked(one) if isinstance(each, (ast.stmt, ast.expr))
    }


def _own_called(node: ast.AST) -> str:
    """The name of a function of the script, or of a method of ``self``, that is called; empty if there is none."""
    name = ast.unparse(node.func).removeprefix("self.") if isinstance(node, ast.Call) else ""
    return name if name.isidentifier() else ""


def reseeded(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Calls within functions and loops that seed a generator with what does not change there.

    Example:
        >>> text = "def reset(self):\\n  np.random.seed(self.seed)\\nfor i in range(9):\\n  torch.manual_seed(i)"
        >>> list(reseeded(ast.parse(text)))
        [('np.random', 'self.seed', 2)]
        >>> text = "def fix(seed):\\n  random.seed(seed)\\nfix(0)\\nfor epoch in range(9):\\n  fix(1)\\n  fix(epoch)"
        >>> list(reseeded(ast.parse(text)))
        [('random', '1', 5)]
    """
    helpers: dict[str, list[str]] = {}  # generators that a function of the user's seeds with its argument
    for scopes, call in _calls(tree, ()):
        name = _SEEDED.get(ast.unparse(call.func))
        own = next((one for one in reversed(scopes) if isinstance(one, FUNCTIONS)), None)
        if name and own is not None and {ast.unparse(one) for one in call.args} & {one.arg for one in own.args.args}:
            helpers.setdefault(own.name, []).append(name)
    for scopes, call in _calls(tree, ()):
        func = ast.unparse(call.func)
        for name in [_SEEDED[func]] if func in _SEEDED else helpers.get(func, []):
            given = [*call.args, *(one.value for one in call.keywords)]
            if scopes and len(given) == 1 and not _made_of(given[0]) & set[str]().union(*map(_changing, scopes)):
                yield name, ast.unparse(given[0]), call.lineno


def _calls(node: ast.AST, scopes: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], ast.Call]]:
    """All calls, each with the functions and loops that it is in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield scopes, child
        yield from _calls(child, (*scopes, child) if isinstance(child, _REPEATED) else scopes)


def _made_of(node: ast.AST) -> set[str]:
    """What a value is made of; a call may give another one each time."""
    found = {ast.unparse(one) for one in walked(node) if isinstance(one, (ast.Name, ast.Attribute))}
    return found | {"()"} if any(isinstance(one, (ast.Call, ast.Subscript)) for one in walked(node)) else found


def _changing(scope: Any) -> set[str]:
    """What has a value of its own in each call or round, and what a value that nothing is known of has in it."""
    found = {"()"} | ({one.arg for one in scope.args.args} - {"self"} if isinstance(scope, FUNCTIONS) else set())
    for one in walked(scope):
        if isinstance(one, (ast.Name, ast.Attribute)) and isinstance(one.ctx, ast.Store):
            found.add(ast.unparse(one))
    return found


def about_numbers(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a term of a loss that goes back is a number that ``item`` took out of its graph."""
    for file, tree in scripts(run):
        for name, line in number_terms(tree):
            yield told("number term", Line(file, line), name=name)


def number_terms(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The summands of a loss that are numbers by ``item``, with the line that makes them so.

    Example:
        >>> text = "while True:\\n  d = f(z).item()\\n  loss = mse(x, y) + 0.5 * d\\n  loss.backward()"
        >>> list(number_terms(ast.parse(text)))
        [('d', 2)]
        >>> list(number_terms(ast.parse(text.replace(".item()", ""))))
        []
    """
    for scope in (one for one in walked(tree) if isinstance(one, (*FUNCTIONS, ast.Module))):
        own = [one for one in _own(scope) if isinstance(one, ast.Assign | ast.AugAssign)]
        made = sorted(own, key=lambda one: one.lineno)
        for back in (one for one in _own(scope) if isinstance(one, ast.Call) and called(one) == "backward"):
            losses = {one.id for one in walked(back.func) if isinstance(one, ast.Name)}
            before = [one for one in made if one.lineno < back.lineno]
            loss = next((one for one in reversed(before) if _target(one) in losses), None)
            for term in _summands(loss.value) if loss is not None else ():
                name = _number(term)
                last = next((one for one in reversed(before) if name and _target(one) == name), None)
                if last is not None and isinstance(last, ast.Assign) and called(last.value) == "item":
                    yield name, last.lineno


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """What is in a scope, without other functions."""
    for one in ast.iter_child_nodes(scope):
        if not isinstance(one, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield one
            yield from _own(one)


def _target(one: ast.Assign | ast.AugAssign) -> str:
    target = one.target if isinstance(one, ast.AugAssign) else one.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


def _summands(value: ast.expr) -> list[ast.expr]:
    """The terms of a sum of several."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return [*(_summands(value.left) or [value.left]), *(_summands(value.right) or [value.right])]
    return []


def _number(term: ast.expr) -> str:
    """The name that a term is, but for constant factors and one more name, as of a weight; empty for another term."""
    parts = (ast.BinOp, ast.Mult, ast.Div, ast.Name, ast.Constant, ast.Attribute, ast.expr_context)
    names = [one.id for one in walked(term) if isinstance(one, ast.Name)]
    return names[-1] if names and len(names) < 3 and all(isinstance(one, parts) for one in walked(term)) else ""
