"""Crashes of tensors on the wrong device or of the wrong dtype: which one, by name."""

import ast
import re
from typing import Any, NamedTuple

import torch

from anybatch.doctor.crashing.crashkinds import Told, dtype, kind, quoted, shape
from anybatch.doctor.crashing.crashlive import Live
from anybatch.doctor.crashing.crashsource import called, loads

_FUNCTIONS = ("input", "self", "target", "weight", "bias")


class Party(NamedTuple):
    """A tensor that takes part in the operation that failed.

    Args:
        name: the user's.
        tensor: itself.
        parameter: whether a module has it.
    """

    name: str
    tensor: torch.Tensor
    parameter: bool


def parties(live: Live) -> list[Party]:
    """The tensors of the operation that failed: those of the running module, and those in the user's line."""
    found: dict[int, Party] = {}
    frame, module = live.user, live.module()
    torchs = module is not None and type(module).__module__.startswith("torch.nn.")
    if module is not None and torchs:
        own = live.module_name(module)
        for name, tensor in module.named_parameters():
            known = live.parameter_name(tensor) or ".".join(filter(None, (own, name)))
            found[id(tensor)] = Party(known, tensor, True)
    for name in _FUNCTIONS:
        for function in ("forward", *_called_functions(live)):
            value = live.local(function, name)
            if isinstance(value, torch.Tensor) and id(value) not in found:
                parameter = live.parameter_name(value)
                found[id(value)] = Party(parameter or _outer_name(live, value) or name, value, bool(parameter))
    if frame is not None and not (torchs and found and any(not p.parameter for p in found.values())):
        for path in loads(live.statement(frame)):
            value = live.value(frame, ast.parse(path, mode="eval").body)
            if isinstance(value, torch.Tensor) and id(value) not in found:
                parameter = live.parameter_name(value)
                found[id(value)] = Party(parameter or path, value, bool(parameter))
    return list(found.values())


def _called_functions(live: Live) -> list[str]:
    return [frame.function for frame in reversed(live.frames) if frame.whose == "torch"][:2]


def _outer_name(live: Live, value: torch.Tensor) -> str:
    return next((path for path, one, _ in live.named() if one is value), "")


def _moved(live: Live, name: str, what: str) -> str:
    return f"{name} = {name}.to({what})" if re.fullmatch(r"[\w.]+(\[[^\]]*\])*", name) else f"{name}.to({what})"


@kind(
    r"^Expected all tensors to be on the same device",
    r"^Tensor on device \S+ is not on the expected device",
    r"^Input type \((?:torch\.)?\w+(?:\.\w*)?Tensor\) and (?:weight|bias) type",
    r"^(?:Tensor for argument|Expected (?:a )?\S+ ?(?:tensor|object)).* on (?:CPU|GPU|cpu|cuda)",
    r"^Expected object of device type",
    r"^Placeholder storage has not been allocated on MPS device",
    r"^indices should be either on cpu or on the same device",
    r"^Cannot copy out of meta tensor",
)
def device_mismatch(live: Live, match: Any) -> Told | None:
    """Tells which tensor is on which device."""
    found = parties(live)
    groups: dict[str, list[Party]] = {}
    for one in found:
        groups.setdefault(str(one.tensor.device), []).append(one)
    if len(groups) < 2:
        return None if match.group().startswith("Input type") else _device_by_text(live)
    whole = live.parameters()
    votes: dict[str, int] = {}
    for parameter in whole.values():
        votes[str(parameter.device)] = votes.get(str(parameter.device), 0) + 1
    own = next((p for p in found if p.parameter), None)
    home = max(votes, key=lambda device: votes[device]) if votes else str((own or found[0]).tensor.device)
    if votes and home == "meta" and len(votes) > 1:
        home = next(device for device in votes if device != "meta")
    if home not in groups:
        home = str((own or found[0]).tensor.device)
    wrong = [one for one in found if str(one.tensor.device) != home]
    right = [one for one in found if str(one.tensor.device) == home]
    module = live.module_name(live.module())
    listed = "; ".join(
        f"{', '.join(one.name for one in part[:3])} on {device}" for device, part in sorted(groups.items())
    )
    return Told(
        name="DEVICE_MISMATCH",
        message=f"{quoted(wrong[0].name)} is on {wrong[0].tensor.device}, while {quoted(right[0].name)} is on {home}.",
        cause=f"{'The module ' + module if module else 'The operation'} got tensors of two devices: {listed}.",
        fix=_to_home(live, wrong[0], home, module),
        module=module or wrong[0].name.rpartition(".")[0],
        parameters=tuple(one.name for one in found if one.parameter),
        tensor=f"{wrong[0].name} {shape(wrong[0].tensor)} on {wrong[0].tensor.device}",
        evidence={one.name: str(one.tensor.device) for one in found},
    )


def _to_home(live: Live, wrong: Party, home: str, module: str) -> str:
    target = repr(home)
    for frame in reversed(live.users):
        for name in ("device", "self.device", "dev"):
            if str(live.value(frame, ast.parse(name, mode="eval").body)) in (home, home.split(":")[0]):
                target = name
    if not wrong.parameter:
        if wrong.name.startswith("self."):
            name = wrong.name.removeprefix("self.")
            return f"self.register_buffer({name!r}, ...)  # in __init__, so that .to() moves it with the module"
        return _moved(live, wrong.name, target)
    root = next((path for path, one in live.roots.items() if any(p is wrong.tensor for p in one.parameters())), "model")
    if str(wrong.tensor.device) == "meta":
        return f"{root}.to_empty(device={target}) and initialise or load {wrong.name}, which has no values yet"
    return f"{root}.to({target})  # after all of its modules are there, {wrong.name.rpartition('.')[0]} among them"


def _device_by_text(live: Live) -> Told:
    return Told(
        name="DEVICE_MISMATCH",
        message=f"Tensors of two devices meet in {quoted(live.code(live.user)) if live.user else 'an operation'}: "
        f"{live.text.splitlines()[0][:200]}",
        cause="The model or one of the inputs was not moved.",
        fix="model.to(device) once, and batch.to(device) for each batch",
    )


@kind(
    r"mat1 and mat2 must have the same dtype",
    r"expected m1 and m2 to have the same dtype",
    r"^Input type \(\w+\) and (?:weight|bias) type \(\w+\) should be the same",
    r"expected scalar type \w+ but found \w+",
    r"^mixed dtype \(CPU\): (?:all inputs must share same datatype|expect parameter to have scalar type)",
    r"Found dtype \w+ but expected \w+",
    r"expected target dtype to be",
    r"Expected tensor for argument #\d+ '\w+' to have (?:one of the following scalar types|scalar type)",
    r"\"(?:nll_loss|embedding|cross_entropy)\w*\" not implemented for '\w+'",
    r"Expected floating point type for target with class probabilities",
    r"^result type \w+ can't be cast to the desired output type",
    r"(?:query|self) and (?:key|mat2|other).* must have the same dtype",
    r"^Expected query, key, and value to have the same dtype",
    r"Can only calculate the mean of floating types|\"(?:log_)?softmax\w*\" not implemented for '\w+'",
    r"^Input and (?:hidden|parameter) tensors are not the same dtype",
)
def dtype_mismatch(live: Live, _: Any) -> Told | None:
    """Tells which tensor has which dtype."""
    found = parties(live)
    target = live.local("cross_entropy", "target")
    target = live.local("nll_loss", "target") if target is None else target
    scores = live.local("cross_entropy", "input")
    if isinstance(target, torch.Tensor) and target.dtype != torch.long:
        return _labels(live, target, scores)
    ids, weight = live.local("embedding", "input"), live.local("embedding", "weight")
    if isinstance(ids, torch.Tensor) and ids.is_floating_point():
        name = _outer_name(live, ids) or "input"
        module = live.module_name(live.module())
        return Told(
            name="DTYPE_MISMATCH",
            message=f"{quoted(name)} is {dtype(ids)}, but the embedding {module} needs whole numbers.",
            cause="An embedding looks its rows up by index.",
            fix=f"{name} = {name}.long()",
            module=module,
            parameters=(live.parameter_name(weight),) if weight is not None else (),
            tensor=f"{name} {shape(ids)} {dtype(ids)}",
            evidence={name: dtype(ids)},
        )
    kinds = {dtype(one.tensor) for one in found}
    if len(kinds) < 2:
        return _dtype_by_text(live)
    home = next((one for one in found if one.parameter), found[0])
    wrong = _as_written(live, next(one for one in found if one.tensor.dtype != home.tensor.dtype))
    module = live.module_name(live.module())
    want = f"{home.name}.dtype" if not home.parameter else f"torch.{dtype(home.tensor)}"
    numpys = " numpy makes float64 unless told otherwise." if dtype(wrong.tensor) == "float64" else ""
    return Told(
        name="DTYPE_MISMATCH",
        message=f"{quoted(wrong.name)} is {dtype(wrong.tensor)}, while {quoted(home.name)} is {dtype(home.tensor)}.",
        cause=f"{'The module ' + module if module else 'The operation'} needs one dtype for both.{numpys}",
        fix=f"{wrong.name} = {wrong.name}.to({want})",
        module=module,
        parameters=tuple(one.name for one in found if one.parameter),
        tensor=f"{wrong.name} {shape(wrong.tensor)} {dtype(wrong.tensor)}",
        evidence={one.name: dtype(one.tensor) for one in found},
    )


def _as_written(live: Live, one: Party) -> Party:
    """For a tensor without a name of the user's the one that it was computed from, if a single one can be meant."""
    frame = live.user
    if frame is None or one.name not in _FUNCTIONS or one.name in frame.values:
        return one
    read = ((path, live.value(frame, ast.parse(path, mode="eval").body)) for path in loads(live.statement(frame)))
    alike = [(p, t) for p, t in read if isinstance(t, torch.Tensor) and t.dtype == one.tensor.dtype]
    return Party(*alike[0], False) if len(alike) == 1 else one


def _labels(live: Live, target: torch.Tensor, scores: Any) -> Told:
    name = _outer_name(live, target) or "target"
    floating = target.is_floating_point()
    same = isinstance(scores, torch.Tensor) and scores.shape == target.shape
    return Told(
        name="DTYPE_MISMATCH",
        message=f"{quoted(name)} is {dtype(target)}, but cross entropy needs class indices as int64"
        f"{' (or probabilities of the shape of the scores)' if floating and not same else ''}.",
        cause="The labels were read as another dtype, as numpy, pandas and torch.tensor([1.0]) give them.",
        fix=f"{name} = {name}.long()",
        tensor=f"{name} {shape(target)} {dtype(target)}",
        evidence={name: dtype(target)},
    )


def _dtype_by_text(live: Live) -> Told:
    frame = live.user
    line = live.code(frame) if frame is not None else ""
    return Told(
        name="DTYPE_MISMATCH",
        message=f"Tensors of two dtypes meet in {quoted(line) or 'an operation'}: {live.text.splitlines()[0][:200]}",
        cause="One of the inputs or targets has another dtype than the weights.",
        fix="inputs.float() for inputs, target.long() for class indices, target.float() for values",
        evidence={"text": live.text[:200]},
    )


@kind(
    r"[Oo]nly Tensors of floating point (?:and complex )?dtype can require gradients",
    r"^Can't call numpy\(\) on Tensor that requires grad",
    r"^can't convert \S+ device type tensor to numpy",
    r"^Can't detach views in-place|^Can't detach .* in-place",
    r"[Oo]nly Tensors created explicitly by the user .*deepcopy",
    r"^you can only change requires_grad flags of leaf",
    r"a Tensor with \d+ elements cannot be converted to Scalar|only one element tensors can be converted",
    r"^Boolean value of Tensor with more than one value is ambiguous",
)
def misused(live: Live, _: Any) -> Told | None:
    """Tells which tensor was asked for what it can't give."""
    frame = live.user
    statement = None if frame is None else live.statement(frame)
    if frame is None or statement is None:
        return None
    path, tensor, call = "", None, ""
    for node in ast.walk(statement):
        name = called(node)
        owner = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if name in ("numpy", "detach_", "item", "requires_grad_", "tolist"):
            path, call = ast.unparse(owner) if owner is not None else "", name
            tensor = live.value(frame, owner)
            break
    if not path:
        candidates = [(p, live.value(frame, ast.parse(p, mode="eval").body)) for p in loads(statement)]
        targets = getattr(statement, "targets", [None])[0]
        if isinstance(targets, ast.Attribute):
            candidates.insert(0, (ast.unparse(targets.value), live.value(frame, targets.value)))
        tensors = [(p, v) for p, v in candidates if isinstance(v, torch.Tensor | torch.nn.Module)]
        path, tensor = tensors[0] if tensors else ("", None)
    if live.text.lower().startswith("only tensors created explicitly"):
        held = [p for p, one, _ in live.named() if not one.is_leaf and (p == path or p.startswith(f"{path}."))]
        path = held[0] if held else path
    cause, fix = _MISUSES[_which(live.text)]
    size = shape(tensor) if isinstance(tensor, torch.Tensor) else ""
    return Told(
        name="TENSOR_MISUSED",
        message=f"{quoted(path) or 'A tensor'} {_SAYS[_which(live.text)]}",
        cause=cause,
        fix=fix.format(name=path or "tensor"),
        tensor=f"{path} {size}".strip(),
        evidence={"call": call} if call else {},
    )


_SAYS = {
    "floating": "holds whole numbers, and can't require a gradient.",
    "numpy": "is in the graph, and can't be seen by numpy.",
    "device": "is not in the memory of the CPU, and can't be seen by numpy.",
    "detach": "is a view, which can't be detached in place.",
    "deepcopy": "is in a graph, and can't be copied with copy.deepcopy.",
    "flags": "is computed from something else; its requires_grad can't be set.",
    "one": "has more than one number.",
}
_MISUSES = {
    "floating": ("Only real and complex numbers have gradients.", "{name} = {name}.float().requires_grad_()"),
    "numpy": ("numpy knows nothing of the graph.", "{name}.detach().numpy()"),
    "device": ("numpy sees the CPU's memory only.", "{name}.detach().cpu().numpy()"),
    "detach": ("Its base would still be in the graph.", "{name} = {name}.detach()"),
    "deepcopy": ("Only leaves can be copied.", "{name} = {name}.detach()  # before the copy"),
    "flags": ("Whether it requires a gradient follows from what it is computed from.", "{name} = {name}.detach()"),
    "one": ("One number was asked for.", "{name}.mean()  # or .sum(), .tolist(), .any(), .all()"),
}


def _which(text: str) -> str:
    low = text.lower()
    marks = {"floating": "require gradients", "numpy": "call numpy", "device": "device type", "detach": "can't detach",
             "deepcopy": "deepcopy", "flags": "flags of leaf"}  # fmt: skip
    return next((name for name, mark in marks.items() if mark in low), "one")
