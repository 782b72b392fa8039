"""Plateaus, schedules that are not resumed, states loaded into their own owner, and the first NaN of a forward."""

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
from anybatch.doctor.ask.source import scripts, tree_of
from anybatch.doctor.ask.trials import told
from anybatch.doctor.crashing.usercode import called
from anybatch.records.events import Forward, Loaded, Stepped
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_RISES = re.compile(
    r"acc|f1|auc|dice|iou|jaccard|map\b|precision|recall|bleu|rouge|psnr|ssim|reward|return|score|success|r2|corr|hit|ndcg",
    re.IGNORECASE,
)
_FALLS = re.compile(r"loss|err|mse|mae|rmse|nll|perplex|ppl|wer|cer|fid|dist", re.IGNORECASE)
_SCHEDULE = re.compile(r"sched|^lrs?$", re.IGNORECASE)
_OPTIMIZER = re.compile(r"opt(im|$)", re.IGNORECASE)
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
    for one in ast.walk(tree):
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
    if any("last_epoch" in ast.unparse(tree) for tree in trees):
        return
    every = [one for tree in trees for one in ast.walk(tree)]
    said = Counter(one.value for one in every if isinstance(one, ast.Constant))
    taken = [one for one in every if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Load)]
    prints = [one for one in every if isinstance(one, ast.JoinedStr) or called(one) == "print"]
    shown = {id(one) for node in prints for one in ast.walk(node)}
    loaded = {ast.unparse(given.value) for one in every if isinstance(one, ast.Call) for given in one.args
              if called(one) == "load_state_dict" and isinstance(given, ast.Subscript)}  # fmt: skip
    read = {one.slice.value for one in taken if isinstance(one.slice, ast.Constant) and id(one) not in shown
            and ast.unparse(one.value) in loaded}  # fmt: skip
    for one in (node for node in every if isinstance(node, ast.Dict)):
        names = [each.value if isinstance(each, ast.Constant) else None for each in one.keys]
        if beside is not None and not any(isinstance(each, str) and beside.search(each) for each in read & {*names}):
            continue
        for name, value in zip(names, one.values, strict=True):
            if isinstance(name, str) and key.search(name) and "state_dict()" in ast.unparse(value):
                yield from [name] if said[name] == 1 else []
