"""Is the best state of a training the worst one? What the text of a script takes for better."""

import ast
import re
from collections.abc import Iterator

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.source import scripts
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_RISES = re.compile(
    r"(?<![a-z])(acc|accuracy|f1|auc|auroc|iou|miou|dice|bleu|rouge|psnr|ssim|r2|recall|ndcg)(?![a-z])", re.I
)
_FALLS = re.compile(r"(loss|mse|mae|rmse|nll|perplexity|ppl)(?![a-z])", re.I)
_NOT_AS_NAMED = re.compile(r"neg|minus|inv|adv|attack|-|1 ?/", re.I)
_LOW, _HIGH = re.compile(r"worst|low|min", re.I), re.compile(r"worst|high|max", re.I)
_WAITS = re.compile(r"wait|patien|counter|stale|bad|no_improv|since", re.I)
_LESS, _MORE = (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)


def about_best(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a state is kept when a value is worse than the best one so far."""
    for file, tree in scripts(run):
        for name, line, keeps in worse_kept(tree):
            evidence = {"name": name, "keeps": keeps}
            yield Probed(probe="worst kept", root=-1, answer="yes", file=file, line=line, evidence=evidence)


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
    for one in (node for node in ast.walk(tree) if isinstance(node, ast.If)):
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
    assigned = {pair for one in body if isinstance(one, ast.Assign) for pair in _pairs(one)}
    for value, best in (sides, sides[::-1]):
        if any(value == given and best.split(" ")[0] == name for name, given in assigned):
            return value
    return None


def _pairs(one: ast.Assign) -> Iterator[tuple[str, str]]:
    for target in one.targets:
        if isinstance(target, ast.Tuple) and isinstance(one.value, ast.Tuple):
            yield from zip(map(ast.unparse, target.elts), map(ast.unparse, one.value.elts), strict=False)
        else:
            yield ast.unparse(target), ast.unparse(one.value)


def _keeps(body: list[ast.stmt]) -> bool:
    """Whether a state is kept, or a patience begins anew."""
    text = [ast.unparse(one) for one in body]
    resets = (name for one in body if isinstance(one, ast.Assign) for name, given in _pairs(one) if given == "0")
    return any("state_dict" in one or re.search(r"save|deepcopy\(\w*(model|net)", one) for one in text) or any(
        _WAITS.search(name) for name in resets
    )
