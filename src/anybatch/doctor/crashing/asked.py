"""Asks the failing call what it needs, and tells it: the call, its operands, and the repairs that made it work."""

import ast
import inspect
import re
from typing import Any

import torch

from anybatch.doctor.crashes import dtype, first_line, quoted, shape
from anybatch.doctor.crashing.calls import Call, Operand, failing_calls, tensors_of
from anybatch.doctor.crashing.live import Live
from anybatch.doctor.crashing.repairs import SIZES, Repair, working_repairs
from anybatch.doctor.crashing.usercode import called, loads, path_of, targets
from anybatch.doctor.graphs import leaf_of, nodes_behind
from anybatch.records.events import Crashed
from anybatch.records.samples import Activations

_NAMES = (
    ("NON_LEAF_OPTIMIZED", r"can't optimize a non-leaf"),
    ("TENSOR_MISUSED", r"can require gradients|numpy|in-place|to Scalar|is ambiguous|one of the params is|be Tensor"),
    ("BN_ONE_VALUE", r"more than 1 value per channel"),
    (
        "DEVICE_MISMATCH",
        r"(?:same|expected|two) devices?\b|\bmeta tensor|device type|on (?:MPS|CPU|GPU)|at the same device",
    ),
    ("INDEX_OUT_OF_RANGE", r"out of bounds|out of range in self"),
    ("DTYPE_MISMATCH", r"dtype|scalar type|data ?type|floating point|not implemented for '|bool tensor|Input type \("),
    ("DISTRIBUTION_PARAMETER", r"of distribution|probability tensor"),
    (
        "SHAPE_MISMATCH",
        r"[Ss]izes?\b|shape|[Dd]im|channels|batch|multipl|length|stride|elements|divisible|must match|\dD ",
    ),
)
_CAUSES = {
    "BN_ONE_VALUE": "In training mode one value per channel has no variance.",
    "DEVICE_MISMATCH": "All operands of an operation have to be on one device.",
    "INDEX_OUT_OF_RANGE": "An index has to be at least 0 and below the number of rows that there are.",
    "DTYPE_MISMATCH": "The operands are of another kind of number than the operation takes.",
    "SHAPE_MISMATCH": "The shapes of the operands are not those that the operation takes.",
    "DISTRIBUTION_PARAMETER": "The output of a layer can be any number; here it has to lie in a range.",
    "TENSOR_MISUSED": "The operation was given something else than it takes.",
    "NON_LEAF_OPTIMIZED": "It was computed from another tensor; only leaves can be optimized.",
}
_GENERAL = {
    "DEVICE_MISMATCH": "model.to(device) once, and .to(device) for each of {names}",
    "DTYPE_MISMATCH": "Cast one of {names}: .float() for inputs, .long() for class indices",
    "INDEX_OUT_OF_RANGE": "Keep the indices in {names} below the size",
}
_AT_ONCE = (
    "Compare the shapes of {names} with what the call expects: no other dtype, layout or layer size alone makes it run"
)


def told_by_call(live: Live) -> Crashed | None:
    """What is known of a failing call of torch's, or else of the tensors in the user's line; ``None`` without any."""
    calls = list(failing_calls(live))
    hint = next((name for name, pattern in _NAMES if re.search(pattern, live.text)), "")
    if not calls:
        return _in_line(live, hint)
    shown = calls[-1]
    said, fix = _moved(live, shown) if hint == "DEVICE_MISMATCH" else ("", "")
    found = [] if fix else _that_work(live, calls, hint)
    if before := [taken_before(live, call.subject) for call, repair in found if _is_of_size(repair)]:
        found = [each for each in found if before[0] is None or not _is_of_size(each[1])]
        said, fix = _as_before(live, shown, before[0]) if before[0] is not None else (said, fix)
    kinds = {"dtype": "DTYPE_MISMATCH", "shape": "SHAPE_MISMATCH", "layer": "SHAPE_MISMATCH"}
    name = hint or (kinds.get(found[0][1].kind, "TENSOR_MISUSED") if found else "")
    if not name:
        return _in_line(live, "")
    tensors = [one for one in shown.operands if isinstance(one.value, torch.Tensor)]
    module = live.module_name(shown.subject) if isinstance(shown.subject, torch.nn.Module) else ""
    if any(repair.kind == "classes" for _, repair in found):
        module = _last(live, tensors[0].value.shape[1])
    held = shown.subject._parameters.values() if isinstance(shown.subject, torch.nn.Module) else []
    own = [one for one in held if one is not None]
    general = _GENERAL.get(name, _AT_ONCE).format(
        names=", ".join(one.text or "its input" for one in tensors) or shown.title
    )
    has_worked = bool(found) and not found[0][1].left
    doubles = name == "DTYPE_MISMATCH" and any(one.value.dtype == torch.float64 for one in tensors)
    return Crashed(
        name=name, error="", text="", message=said + _message(live, shown, name),
        cause=_CAUSES.get(name, "") + (" numpy makes float64 unless told otherwise." if doubles else ""),
        proof="with this change the call was run again on copies, and it works" if has_worked else "",
        fix="; or ".join(_fix(live, call, repair) for call, repair in found) or fix or general,
        module=module or live.module_name(live.module()) or _maker(live, tensors),
        parameters=tuple(filter(None, map(live.parameter_name, [*(one.value for one in tensors), *own]))),
        tensor=", ".join(described(live, one, name).replace("`", "") for one in tensors),
    )  # fmt: skip


def _is_of_size(repair: Repair) -> bool:
    """Whether it makes a layer for an input of another size."""
    return repair.kind == "layer" and repair.option[0] in SIZES and repair.option[0] != "num_embeddings"


def taken_before(live: Live, module: Any) -> tuple[int, ...] | None:
    """The shape of the input that a layer has last taken in the run; ``None`` where it was not seen to take any."""
    numbering, run = getattr(live.doctor, "numbering", None), getattr(live.doctor, "run", None)
    if numbering is None or not isinstance(module, torch.nn.Module):
        return None
    root = numbering.root_of(module)
    if root is None or run is None or not run.steps:
        return None
    name = numbering.models[root].names.get(id(module), "")
    samples = [one for each in run.of(Activations) if each.root == root for one in each.modules]
    return next((one.input_shape for one in reversed(samples) if one.module == name and one.input_shape), None)


def _as_before(live: Live, call: Call, before: tuple[int, ...]) -> tuple[str, str]:
    """That a layer has taken another input in all steps, so that this one is what differs."""
    given = next((one for one in call.operands if isinstance(one.value, torch.Tensor)), None)
    text = "its input" if given is None else given.text or live.label(given.value, "its input")
    steps = live.doctor.run.steps
    said = f"In {steps} step{'s' if steps != 1 else ''} before, this layer took {list(before)}: this is another input. "
    return said, f"Give it an input like the {list(before)} of the steps before: look where {text} comes from"


def _in_line(live: Live, hint: str) -> Crashed | None:
    """The tensors of a line that failed in a way that can't be run again."""
    own = isinstance(live.statement(), ast.Raise | ast.Assert)
    tensors = [Operand(0, one, path) for path, one in live.line_reads() if isinstance(one, torch.Tensor)]
    found = [] if own else tensors[:5]
    if not found:
        return None
    listed = ", ".join(f"{one.text} {shape(one.value)} {dtype(one.value)} on {one.value.device}" for one in found)
    general = _GENERAL.get(hint, _AT_ONCE).format(names=", ".join(one.text for one in found)) if hint else ""
    return Crashed(
        name=hint, error="", text="", cause=_CAUSES.get(hint, ""), fix=general, tensor=listed,
        message=f"{quoted(live.code())} raised: {first_line(live.text).rstrip('.')}. Its tensors: {listed}.",
        module=live.module_name(live.module()),
    )  # fmt: skip


def _that_work(live: Live, calls: list[Call], hint: str) -> list[tuple[Call, Repair]]:
    """The first repair that works, and beside a change of an operand that of the layer."""
    found: list[tuple[Call, Repair]] = []
    for call in calls:
        for repair in working_repairs(call, hint, live.text):
            if not found or (found[0][1].kind in ("shape", "value") and repair.kind in ("layer", "classes")):
                found.append((call, repair))
            if len(found) == 2:
                return found
    return found


def _moved(live: Live, call: Call) -> tuple[str, str]:
    """What is not where the parameters are, and how it gets there."""
    held = [(one.text or live.label(one.value, "its input"), one.value) for one in call.operands]
    held += [(live.parameter_name(one) or "its weights", one) for one in call.weights()]
    held = [(text, one) for text, one in held if isinstance(one, torch.Tensor)]
    own = [str(one.device) for one in live.parameters().values()]
    homes = [device for device in own if device != "meta"] or own or [str(held[0][1].device)]
    home = max(dict.fromkeys(homes), key=homes.count)
    wrong = next(((text, one) for text, one in held if str(one.device) != home), None)
    if wrong is None:
        return "", ""
    path, tensor = wrong
    text = f"{quoted(path)} is on {tensor.device}, while the model is on {home}. "
    target = next((name for frame in live.users for name in ("device", "self.device")
                   if str(live.read(name, frame)) == home), repr(home))  # fmt: skip
    if live.parameter_name(tensor):
        root = next((name for name, one in live.roots.items() if any(p is tensor for p in one.parameters())), "model")
        moved = f"{root}.to_empty(device={target}), and initialise or load {path}, which has no values"
        return text, moved if tensor.is_meta else f"{root}.to({target})  # after all of its modules are there"
    if path.startswith("self."):
        name = re.split(r"\W", path.removeprefix("self."))[0]
        return text, f"self.register_buffer({name!r}, ...)  # in __init__, so that .to() moves it with the module"
    return text, f"{path} = {path}.to({target})" if re.fullmatch(r"[\w.\[\]'\"]+", path) else f"{path}.to({target})"


def _maker(live: Live, tensors: list[Operand]) -> str:
    """The module that computed the last operand with a graph."""
    own = {id(one): path for path, one in live.parameters().items()}
    for operand in reversed(tensors):
        leaves = (id(leaf_of(node)) for node in nodes_behind([operand.value]))
        if path := next((own[leaf] for leaf in leaves if leaf in own), ""):
            return path.rpartition(".")[0]
    return ""


def _message(live: Live, call: Call, name: str) -> str:
    """The call, what it was given, and the first line of the error."""
    said = call.title
    if isinstance(call.subject, torch.nn.Module) and not list(call.subject.children()):
        said = f"{call.title}, {repr(call.subject)[:100]},"
    kinds = {dtype(one) for one in call.weights() if one.is_floating_point()}
    weights = f" with weights of {' and '.join(sorted(kinds))}" if kinds and name == "DTYPE_MISMATCH" else ""
    given = ", ".join(described(live, one, name) for one in call.operands[:6] if not isinstance(one.key, tuple))
    return f"{said}{weights} can't take {given}: {first_line(live.text).rstrip('.')}."


def described(live: Live, one: Operand, name: str) -> str:
    """An operand with its shape and its kind, as far as that matters."""
    path, value = one.text or live.label(one.value, "its input"), one.value
    if not isinstance(value, torch.Tensor):
        inner = tensors_of(value)
        listed = f" of {', '.join(map(shape, inner[:3]))}" if inner else ""
        return f"{quoted(path)} ({type(value).__name__}{listed})" if path != repr(value) else path
    text = f"{quoted(path)} {shape(value)}"
    if name != "SHAPE_MISMATCH":
        text += f" {dtype(value)}"
    if name == "DEVICE_MISMATCH":
        text += f" on {value.device}"
    if name == "INDEX_OUT_OF_RANGE" and not value.is_floating_point() and value.numel() and not value.is_meta:
        text += f" (values from {int(value.min())} to {int(value.max())})"
    return text


def _fix(live: Live, call: Call, repair: Repair) -> str:
    """The user's line, or the line that made the layer, with the change."""
    code, (name, value) = live.code(), repair.option
    if repair.edits:
        text = _of_edits(live, call, repair)
        return f"{text}  # and then: {first_line(repair.left)}" if repair.left else text
    if repair.kind == "function":
        return code.replace(f"{name}(", f"{value}(", 1)
    if repair.kind == "number":
        return code.replace(name, value, 1)
    if repair.kind == "out of place":
        path = call.operands[0].text
        return f"{path} = {code.replace(f'.{name}(', f'.{value}(', 1)}"
    if repair.kind == "classes":
        classes = next(one.value for one in call.operands if isinstance(one.value, torch.Tensor)).shape[1]
        last = _last(live, classes) or "the last layer"
        return f"out_features={value} in {last}; or leave out labels above {classes - 1}"
    if repair.kind == "mode":
        return _of_mode(live)
    if repair.kind == "layer":
        return _of_layer(live, call, name, value)
    return _rewritten(live, call, renamed=(name, value)) if repair.kind == "name" else _rewritten(
        live, call, {name: repr(value)}
    )  # fmt: skip


def _rewritten(live: Live, call: Call, texts: dict[Any, str] | None = None, renamed: tuple[Any, Any] = ("", "")) -> str:
    """The user's line with other texts for some operands of the call, or another name for one."""
    texts, node, code = dict(texts or {}), call.node, live.code()
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        if "self" in texts and isinstance(node.func, ast.Attribute):
            function = f"{texts.pop('self')}.{node.func.attr}"
        args = [texts.pop(n, ast.unparse(one)) for n, one in enumerate(node.args) if n != renamed[0]]
        if isinstance(renamed[0], int):
            texts[renamed[1]] = ast.unparse(node.args[renamed[0]])
        keywords = {one.arg: texts.pop(one.arg, ast.unparse(one.value)) for one in node.keywords if one.arg}
        keywords = {renamed[1] if key == renamed[0] else key: text for key, text in keywords.items()} | texts
        new = _written(function, args, keywords)
        here = live.here()
        whole = ast.get_source_segment("".join(here[0].lines), node) if here else None
        for old in (whole, ast.unparse(node)):
            if old and old in code:
                return code.replace(old, new)
        return new
    for one in call.operands:
        code = code.replace(one.text, texts[one.key], 1) if one.text and one.key in texts else code
    return code


def _of_edits(live: Live, call: Call, repair: Repair) -> str:
    """The operands with their changes: those with a name before the user's line, the others in it."""
    texts: dict[Any, tuple[str, str]] = {}
    for one, edit in repair.edits:
        text = one.text or live.label(one.value, "its input")
        node = ast.parse(text, mode="eval").body if text != "its input" else ast.Constant(0)
        path = "" if edit.kind in ("order", "number") or edit.text == "{}()" else path_of(node)
        if one.key == "self" and edit.kind != "dtype":
            path = ""
        if not path and edit.kind == "dtype" and text != "its input":
            path = _source_of(live, text, one.value)
        before = texts[one.key][1] if one.key in texts else path or text
        simple = path or isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Subscript | ast.Constant)
        texts[one.key] = (path, edit.text.format(before if simple else f"({before})"))
    fixes = []
    for operand in call.operands:
        parts = [key for key in texts if isinstance(key, tuple) and key[0] == operand.key]
        if parts and isinstance(operand.value, tuple) and path_of(ast.parse(operand.text, mode="eval").body):
            new = [texts.pop((operand.key, n), ("", f"{operand.text}[{n}]"))[1] for n in range(len(operand.value))]
            fixes.append(f"{operand.text} = ({', '.join(new)})")
    fixes += [f"{path} = {new}" for path, new in texts.values() if path]
    lines = {key: new for key, (path, new) in texts.items() if not path}
    if lines and (call.node is None or any(isinstance(key, tuple) for key in lines)):
        fixes += [f"{new} in {quoted(live.code())}" for new in lines.values()]
    elif lines:
        fixes.append(_rewritten(live, call, lines))
    return "; ".join(fixes)


def _source_of(live: Live, text: str, value: Any) -> str:
    """The one tensor in an expression that has the kind of number of its value."""
    found = [
        path for path in loads(ast.parse(text, mode="eval"))
        if isinstance(one := live.read(path), torch.Tensor) and one.dtype == value.dtype
    ]  # fmt: skip
    return found[0] if len(found) == 1 else ""


def _of_mode(live: Live) -> str:
    """A norm in training mode that got one row: the loader whose last batch has one, or the model's mode."""
    for frame in live.users:
        for variable, value in frame.values.items():
            if isinstance(value, torch.utils.data.DataLoader) and value.batch_size and not value.drop_last:
                rows = len(value.dataset) if hasattr(value.dataset, "__len__") else 0
                if rows % value.batch_size == 1:
                    size = value.batch_size
                    return f"{variable} = DataLoader(..., batch_size={size}, drop_last=True)  # 1 of {rows} is left"
    live.modules()
    return f"{next(iter(live.roots), 'model')}.eval() before this line, where it is not trained; or several samples"


def _of_layer(live: Live, call: Call, name: str, value: Any) -> str:
    """The line that makes the layer, with the option that was changed."""
    module, cls = call.subject, type(call.subject).__name__
    path = live.module_name(module) or call.title
    given = [one.value for one in call.operands if isinstance(one.value, torch.Tensor) and one.value.dim()]
    positions = name == "num_embeddings" and any((one == torch.arange(one.shape[-1])).all() for one in given)
    more = f"; or cut the sequences to {module.num_embeddings} tokens" if positions else ""
    plain = value[0] if isinstance(value, tuple) else value
    unnamed: dict[tuple[str, int, int], ast.Call] = {}
    for frame in reversed(live.users):
        source = live.source(frame)
        for node in () if source is None else ast.walk(source.tree):
            made = getattr(node, "value", None)
            names = [one.rpartition(".")[2] for one in targets(node)]
            if isinstance(made, ast.Call) and called(made) == cls and path.rpartition(".")[2] in names:
                new = _with_option(made, name, plain, module)
                return f"{ast.unparse(node.targets[0])} = {new}{more}"  # type: ignore[attr-defined]
            if isinstance(node, ast.Call) and called(node) == cls and _has_option(node, name, module):
                unnamed[frame.file, node.lineno, node.col_offset] = node  # in a ``Sequential``, say
    alike = [one for one in live.modules() if type(one) is type(module) and getattr(one, name) == getattr(module, name)]
    if len(unnamed) == 1 and len(alike) == 1:
        (node,) = unnamed.values()
        new, old = _with_option(node, name, plain, module), ast.unparse(node)
        return f"{new}  # {name}={plain} instead of {old} in line {node.lineno}{more}"
    if name in ("in_features", "num_embeddings"):
        rest = module.out_features if name == "in_features" else module.embedding_dim
        return f"{path}: nn.{cls}({plain}, {rest}){more}"
    return f"{name}={plain} in {path}"


def _has_option(node: ast.Call, name: str, module: Any) -> bool:
    """Whether a line that makes a layer says what this one has."""
    try:
        given = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
        signature = inspect.signature(type(module).__init__)
        said = signature.bind(module, *map(ast.literal_eval, node.args), **given).arguments
    except (ValueError, TypeError):
        return False
    return bool(said.get(name) == getattr(module, name))


def _with_option(node: ast.Call, name: str, value: Any, module: Any) -> str:
    names = [one for one in inspect.signature(type(module).__init__).parameters if one != "self"]
    args = [repr(value) if names[n] == name else ast.unparse(one) for n, one in enumerate(node.args)]
    keywords = {one.arg: repr(value) if one.arg == name else ast.unparse(one.value) for one in node.keywords}
    if name not in keywords and names.index(name) >= len(args):
        keywords[name] = repr(value)
    return _written(ast.unparse(node.func), args, keywords)


def _written(function: str, args: list[str], keywords: dict[Any, str]) -> str:
    return f"{function}({', '.join([*args, *(f'{key}={text}' for key, text in keywords.items())])})"


def _last(live: Live, classes: int) -> str:
    """The last layer that has as many outputs as there are classes."""
    sizes = [(getattr(one, "out_features", getattr(one, "out_channels", None)), one) for one in live.modules()]
    return next((live.module_name(one) for size, one in reversed(sizes) if size == classes), "")
