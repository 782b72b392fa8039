"""Is a global random generator seeded with one and the same value again and again while a net is trained?

The run shows that a generator went back, see ``Streams``; the text of the script shows the line.
"""

import ast
from collections.abc import Iterator
from typing import Any

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.source import scripts
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_LEAST = 3  # times that a generator went back
_SEEDED = {"random.seed": "random", "np.random.seed": "np.random", "numpy.random.seed": "np.random",
           "torch.manual_seed": "torch", "torch.random.manual_seed": "torch"}  # fmt: skip
_OWN = (ast.FunctionDef, ast.AsyncFunctionDef)
_REPEATED = (*_OWN, ast.For, ast.While)


def about_seeds(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether draws of the training come back since their generator is seeded with the same value in a loop."""
    often = {name: count for name, count in kept.streams.back.items() if count >= _LEAST}
    for file, tree in scripts(run) if often else ():
        for name, value, line in reseeded(tree):
            if name in often:
                evidence = {"generator": name, "value": value, "times": often[name]}
                yield Probed(probe="reseeded", root=-1, answer="yes", file=file, line=line, evidence=evidence)
                return


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
        own = next((one for one in reversed(scopes) if isinstance(one, _OWN)), None)
        if name and own is not None and {ast.unparse(one) for one in call.args} & {one.arg for one in own.args.args}:
            helpers.setdefault(own.name, []).append(name)
    for scopes, call in _calls(tree, ()):
        func = ast.unparse(call.func)
        for name in [_SEEDED[func]] if func in _SEEDED else helpers.get(func, []):
            given = [*call.args, *(one.value for one in call.keywords)]
            if scopes and len(given) == 1 and not _names(given[0]) & set[str]().union(*map(_changing, scopes)):
                yield name, ast.unparse(given[0]), call.lineno


def _calls(node: ast.AST, scopes: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], ast.Call]]:
    """All calls, each with the functions and loops that it is in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield scopes, child
        yield from _calls(child, (*scopes, child) if isinstance(child, _REPEATED) else scopes)


def _names(node: ast.AST) -> set[str]:
    """What a value is made of; a call may give another one each time."""
    found = {ast.unparse(one) for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute))}
    return found | {"()"} if any(isinstance(one, (ast.Call, ast.Subscript)) for one in ast.walk(node)) else found


def _changing(scope: Any) -> set[str]:
    """What has a value of its own in each call or round, and what a value that nothing is known of has in it."""
    found = {"()"} | ({one.arg for one in scope.args.args} - {"self"} if isinstance(scope, _OWN) else set())
    for one in ast.walk(scope):
        if isinstance(one, (ast.Name, ast.Attribute)) and isinstance(one.ctx, ast.Store):
            found.add(ast.unparse(one))
    return found
