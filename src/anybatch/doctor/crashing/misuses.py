"""What a tensor, module, function, loader, optimizer or scaler was asked for or given that it can't give or take."""

import ast
import difflib
import inspect
import re
from types import GeneratorType

import torch

from anybatch.doctor.crashes import Answer, answer, quoted, shape
from anybatch.doctor.crashing.live import Live, attributes, tensors_in
from anybatch.doctor.crashing.usercode import called, loads, nodes_in, path_of, targets
from anybatch.doctor.graphs import leaf_of, nodes_behind


def stored_in(live: Live, match: "re.Match[str]") -> Answer | None:
    """The tensor an attribute of which the user's line sets."""
    stored = getattr(live.statement(), "targets", [None])[0]
    value = live.value(live.user, stored.value) if isinstance(stored, ast.Attribute) and live.user else None
    if not isinstance(value, torch.Tensor) or not isinstance(stored, ast.Attribute):
        return None
    path = ast.unparse(stored.value)
    return answer(path=quoted(path), name=path, tensor=f"{path} {shape(value)}")


def in_graph_of(live: Live, match: "re.Match[str]") -> Answer | None:
    """The tensor in what is copied that is no leaf."""
    read = [path for path, _ in live.line_reads()]
    for path, one, _ in live.named():
        if not one.is_leaf and any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in read):
            return answer(path=quoted(path), name=path, tensor=f"{path} {shape(one)}")
    return None


def raised(live: Live, match: "re.Match[str]") -> Answer | None:
    """Whether the user's line raises the error itself."""
    return {} if isinstance(live.statement(), ast.Raise) else None


def container(live: Live, match: "re.Match[str]") -> Answer | None:
    """The list, tuple or dict that the user's line takes for a tensor."""
    kind, attribute = match.groups()
    for path, value in live.line_reads():
        if type(value).__name__ == kind:
            inner = next((key for key, _ in tensors_in(path, value)), path)
            moved = (
                f"{path} = {{key: part.to(device) for key, part in {path}.items()}}" if kind == "dict" else
                f"{path} = [part.to(device) for part in {path}]"
            )  # fmt: skip
            change = moved if attribute in ("to", "cuda", "cpu") else f"{inner} instead of {path}"
            return answer(path=quoted(path), count=len(value), change=change, tensor=path)
    return None


def none(live: Live, match: "re.Match[str]") -> Answer | None:
    """What is None in the user's line, and the option of the call that gave it which was left out."""
    statement, frame = live.statement(), live.user
    for node in nodes_in(statement, ast.Attribute):
        if frame and node.attr == match.group(1) and path_of(node.value):
            path = path_of(node.value)
            if live.value(frame, node.value) is None:
                owner, _, field = path.rpartition(".")
                made = [one for one in live.scope() if (owner or path) in targets(one) and one.lineno <= frame.line]
                if not made or not isinstance(getattr(made[-1], "value", None), ast.Call):
                    return None
                at = live.at(made[-1])
                wanted = "labels=..., with which the model computes the loss" if field == "loss" else "what it needs"
                return answer(
                    path=quoted(path), why=f"{quoted(at[2])} made it, without what it needs for it.", at=at,
                    tensor=path, change=f"Give {quoted(ast.unparse(made[-1].value))} {wanted}.",  # type: ignore[attr-defined]
                )  # fmt: skip
    return None


def missing_arguments(live: Live, match: "re.Match[str]") -> Answer:
    """The arguments that a call was not given, and variables of the user's that bear their names."""
    names = re.findall(r"'(\w+)'", match.group(2))
    frame, call = live.user, next(iter(live.calls()), None)
    known = [] if frame is None else [
        name for wanted in names
        for name, value in frame.values.items() if wanted.rstrip("s") in name or
        (wanted == "metrics" and isinstance(value, torch.Tensor | float) and "loss" in name)
    ]  # fmt: skip
    given = "" if call is None else ast.unparse(call)[:-1]
    change = f"{given}{', ' if given and not given.endswith('(') else ''}{', '.join(known[:1] or names)})"
    where = match.group(1)
    return answer(change=f"{change}  # or a default for {' and '.join(names)} in {where}", module=where.split(".")[0])


def unknown_attribute(live: Live, match: "re.Match[str]") -> Answer | None:
    """The attributes of the user's object that has not the one that was asked for, and the nearest of them."""
    cls, name = match.groups()
    values = [one for frame in live.users for one in frame.values.values() if type(one).__name__ == cls]
    own = [key for key, _ in attributes(values[-1]) if not key.startswith("_")] if values else []
    near = difflib.get_close_matches(name, own, 1)
    return answer(names=", ".join(own[:8]), nearest=near[0], module=cls) if near else None


_KEEPS_AWAY = {
    "sqrt": "torch.sqrt(x + 1e-12)", "norm": "(x.pow(2).sum() + 1e-12).sqrt()", "log": "x.clamp(min=1e-12)",
    "div": "the divisor + 1e-12", "pow": "x.clamp(min=1e-12)", "acos": "x.clamp(-1 + 1e-6, 1 - 1e-6)",
    "linalgvectornorm": "(x.pow(2).sum() + 1e-12).sqrt()",
}  # fmt: skip


def nan_operation(live: Live, match: "re.Match[str]") -> Answer:
    """The operation whose gradient is not a number, and its line."""
    op = match.group(1)
    plain = re.sub(r"Backward\d*$", "", op).lower()
    here = live.here()
    calls = [node for node in ast.walk(here[0].tree) if called(node) == plain] if here else []
    at = live.at(calls[-1]) if calls else None
    return answer(
        plain=plain, where=f" in {quoted(at[2])}" if at else "", at=at, tensor=op, evidence={"op": op},
        change=_KEEPS_AWAY.get(plain, "clamp it, or add a small number"),
    )  # fmt: skip


def ragged(live: Live, match: "re.Match[str]") -> Answer | None:
    """The sizes of samples that could not be stacked, and the key that they have in the samples."""
    if not str(live.error).startswith("Caught") and collating(live, match) is None:  # in a worker
        return None
    sizes = list(match.groups()[:2]) if match.groups() else []
    keys = [f.values["key"] for f in live.frames if "collate" in f.function and isinstance(f.values.get("key"), str)]
    batch = next((f.values["batch"] for f in live.frames if "collate" in f.function and "batch" in f.values), None)
    if not keys and isinstance(batch, list) and batch and isinstance(batch[0], dict):
        lengths = {key: {getattr(row.get(key), "shape", None) for row in batch} for key in batch[0]}
        keys = [key for key, found in lengths.items() if len(found) > 1]
    return answer(
        key=f" of {keys[0]!r}" if keys else "", sizes=f": {sizes[0]} and {sizes[1]}" if len(sizes) == 2 else "",
        evidence={"sizes": sizes},
        change="DataLoader(..., collate_fn=f), where f pads: torch.nn.utils.rnn.pad_sequence("
        f"[row[{keys[0]!r}] for row in rows], batch_first=True)" if keys else
        "DataLoader(..., collate_fn=lambda rows: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))",
    )  # fmt: skip


def not_a_loss(live: Live, match: "re.Match[str]") -> Answer | None:
    """The number that the user's line calls backward of, and the line that made it one."""
    call = live.called("backward")
    if call is None or not isinstance(call.func, ast.Attribute):
        return None
    path, statements = ast.unparse(call.func.value), live.scope()
    made = [one for one in statements if path in targets(one)]
    sources = {path, *(name for one in made for name in loads(getattr(one, "value", None)))}
    numbers = [
        one for one in statements for node in ast.walk(one)
        if called(node) in ("item", "tolist", "float") and sources & {*targets(one), *loads(one)}
    ]  # fmt: skip
    by = next(reversed(numbers or made), None)
    code = live.at(by)[2] if by is not None else ""
    return answer(path=quoted(path), kind=match.group(1), at=live.at(by) if by is not None else None, tensor=path,
                  by=f" by {quoted(code)}" if code else "", name=path,
                  change=code.replace(".item()", "") if ".item()" in code else f"{path} as a tensor")  # fmt: skip


def class_itself(live: Live, match: "re.Match[str]") -> Answer | None:
    """A class of the user's line that was not called to make an object."""
    for path, value in live.line_reads():
        base = path.rpartition(".")[0]
        for name, one in ((path, value), (base, live.read(base))):
            if inspect.isclass(one) and issubclass(one, torch.nn.Module):
                made = [s for s in live.round() if name in targets(s)]
                return answer(path=quoted(name), name=name, cls=one.__name__, at=live.at(made[-1]) if made else None)
    return None


def collating(live: Live, match: "re.Match[str]") -> Answer | None:
    """Whether it happened while samples were put into a batch."""
    return {} if "collate" in live.text or any("collate" in one.function for one in live.frames) else None


def no_gradient(live: Live, match: "re.Match[str]") -> Answer | None:
    """Why a tensor has no gradient, where the line reads one."""
    statement, frame = live.statement(), live.user
    for node in nodes_in(statement, ast.Attribute):
        if frame and node.attr == "grad" and isinstance(node.ctx, ast.Load):
            tensor, path = live.value(frame, node.value), ast.unparse(node.value)
            if not isinstance(tensor, torch.Tensor) or (tensor.is_leaf and tensor.grad is not None):
                continue
            why = "No backward has reached it: the loss does not depend on it, or the gradients were cleared."
            change = f"if {path}.grad is not None:\n    {live.code()}"
            if not tensor.is_leaf:
                made = type(tensor.grad_fn).__name__
                why = f"It is the result of {made}, and a backward keeps gradients of leaves only."
                change = f"{path} = {path}.detach().requires_grad_()  # where it is made; or {path}.retain_grad()"
            elif not tensor.requires_grad:
                why, change = "Its requires_grad is False.", f"{path}.requires_grad_()"
            name = live.parameter_name(tensor)
            return answer(
                shown=quoted(path) + (f" ({name})" if name and name != path else ""), path=path, why=why,
                change=change, module=name.rpartition(".")[0], parameters=filter(None, [name]),
                tensor=f"{name or path} {shape(tensor)}",
            )  # fmt: skip
    return None


def unused_input(live: Live, match: "re.Match[str]") -> Answer:
    """The tensor that the value of ``torch.autograd.grad`` does not depend on."""
    outputs, given = live.local("grad", "outputs"), live.local("grad", "inputs")
    outputs, given = ([one] if isinstance(one, torch.Tensor) else list(one or ()) for one in (outputs, given))
    nodes = nodes_behind(outputs)
    reached = {id(leaf_of(node)) for node in nodes}
    tensor = next((one for one in given if id(one) not in reached and one.grad_fn not in nodes), None)
    name = live.name_of(tensor) if tensor is not None else ""
    return answer(path=quoted(name) or "A tensor", name=name or "it", tensor=name,
                  parameters=filter(None, [live.parameter_name(tensor)]))  # fmt: skip


def own_function(live: Live, match: "re.Match[str]") -> Answer | None:
    """Where the user's own Function or hook is written, by its name in the error."""
    name = match.group(1).removesuffix("Backward")
    for source in filter(None, map(live.source, live.users)):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                inner = (one for one in nodes_in(node, ast.FunctionDef) if one.name == "backward")
                back = list(nodes_in(next(inner, node), ast.Return))
                at = live.at(back[-1] if back else node, source.file)
                return answer(owner=name, at=at, returned=quoted(at[2]), tensor=name)
    return None


def inference_tensor(live: Live, match: "re.Match[str]") -> Answer | None:
    """Which tensor was made in inference mode."""
    read = {path for path, _ in live.line_reads()}
    found = [(name, one) for name, one in live.parameters().items() if one.is_inference()]
    found += sorted(((p, one) for p, one, _ in live.named() if one.is_inference()), key=lambda e: e[0] not in read)
    return answer(
        what=f"{quoted(found[0][0])} {shape(found[0][1])}", path=found[0][0], module=live.module_name(live.module()),
        tensor=f"{found[0][0]} {shape(found[0][1])}",
    ) if found else None  # fmt: skip


def empty(live: Live, match: "re.Match[str]") -> Answer:
    """Why an optimizer got no parameters."""
    live.modules()  # finds the models
    read = live.line_reads()
    for path, value in read:
        if isinstance(value, GeneratorType):
            return answer(
                said=f"`{path}` is a generator that was used up before: the optimizer got no parameters.",
                why="model.parameters() returns a generator, which can be iterated once.",
                change=f"{path} = list(model.parameters())",
                tensor=path,
            )  # fmt: skip
    models = [(path, one) for path, one in read if isinstance(one, torch.nn.Module)] or list(live.roots.items())[:1]
    for path, model in models:
        for name, value in vars(model).items():
            inner = list(value.values()) if isinstance(value, dict) else value
            if (
                isinstance(inner, list | tuple)
                and inner
                and name[0] != "_"
                and all(isinstance(one, torch.nn.Module) for one in inner)
            ):
                instead = "ModuleDict" if isinstance(value, dict) else "ModuleList"
                return answer(
                    said=f"{path}.{name} is a plain {type(value).__name__} of {len(inner)} modules, whose parameters "
                    f"{path}.parameters() does not see.",
                    why="Only modules that are attributes, or in a ModuleList, ModuleDict, Sequential, are registered.",
                    change=f"self.{name} = nn.{instead}(self.{name})", module=name, tensor=f"{path}.{name}",
                )  # fmt: skip
        own = list(model.parameters())
        if own and not any(one.requires_grad for one in own):
            return answer(
                said=f"All {len(own)} parameters of `{path}` have requires_grad=False: none is left to optimize.",
                why="The whole model was frozen, also the parts that are to be trained.",
                change=f"p.requires_grad_(True) for those parameters of {path} that are to be trained, after the rest "
                "was frozen", module=path,
            )  # fmt: skip
    return answer(
        said=f"The optimizer in `{live.code()}` got no parameters.",
        why="What was given has none yet, or a filter took all of them away (requires_grad=False).",
        change="Make the layers in __init__ before the optimizer; give it list(model.parameters()).",
    )  # fmt: skip


def in_two_groups(live: Live, match: "re.Match[str]") -> Answer | None:
    """Which parameters are in two groups."""
    optimizer, group = live.local("add_param_group", "self"), live.local("add_param_group", "param_group")
    if not isinstance(group, dict) or not isinstance(getattr(optimizer, "param_groups", None), list):
        return None
    own = {id(one) for one in group["params"]}
    twice = [(n, one) for n, other in enumerate(optimizer.param_groups) for one in other["params"] if id(one) in own]
    names = [live.name_of(one) or shape(one) for _, one in twice] or ["A parameter is"]
    return answer(
        names=", ".join(names[:5]), first=twice[0][0] if twice else 0, last=len(optimizer.param_groups),
        some=", ".join(map(repr, names[:4])), parameters=names, module=names[0].rpartition(".")[0],
    )  # fmt: skip


def update_forgotten(live: Live, match: "re.Match[str]") -> Answer | None:
    """Whether the step that ``unscale_`` comes after was that of the round before."""
    lines = {called(node): one.lineno for one in live.round() for node in ast.walk(one) if called(node)}
    return {} if lines.get("step", 0) > getattr(live.user, "line", 0) and "update" not in lines else None


def sparse(live: Live, match: "re.Match[str]") -> Answer | None:
    """Which parameters have sparse gradients, and which layer makes them."""
    found = [name for name, one in live.parameters().items() if one.grad is not None and one.grad.is_sparse]
    layer = found[0].rpartition(".")[0] if found else ""
    return answer(
        listed=", ".join(found[:3]), layer=layer or "the embedding", module=layer, parameters=found
    ) if found else None  # fmt: skip


def optimizer_groups(live: Live, match: "re.Match[str]") -> Answer:
    """The sizes of the groups of an optimizer, and of those in a state."""
    own, state = live.local("load_state_dict", "self"), live.local("load_state_dict", "state_dict")
    here = [len(group["params"]) for group in getattr(own, "param_groups", [])]
    there = [len(group["params"]) for group in (state or {}).get("param_groups", [])]
    return answer(here=here, there=there, tensor=live.variable_of(own))


def state(live: Live, match: "re.Match[str]") -> Answer:
    """What a state and a model do not have in common: a prefix, a level of a checkpoint, sizes, or keys."""
    cls, text = match.groups()
    own, given = live.local("load_state_dict", "self"), live.local("load_state_dict", "state_dict")
    given = given if isinstance(given, dict) else {}
    wanted = dict(own.state_dict()) if isinstance(own, torch.nn.Module) else {}
    missing, unexpected = [key for key in wanted if key not in given], [key for key in given if key not in wanted]
    name, variable = live.variable_of(given) or "state", live.variable_of(own) or live.module_name(own) or "model"
    sizes = re.findall(r"size mismatch for ([\w.]+): .*?Size\((\[.*?\])\).*?is torch\.Size\((\[.*?\])\)", text)
    known = {"module": live.module_name(own) or cls, "parameters": [one[0] for one in sizes] or missing}
    for key, value in given.items():
        if isinstance(value, dict) and wanted and wanted.keys() == value.keys():
            return answer(
                **known, said=f"{variable}.load_state_dict got the whole checkpoint ({', '.join(given)}), which has "
                f"the model's state_dict under {key!r}.", why="What was saved is a dict of several states.",
                change=f"{variable}.load_state_dict({name}[{key!r}])",
            )  # fmt: skip
    for one, other in ((a, b) for a in unexpected[:1] for b in missing):
        longer, shorter = max(one, other, key=len), min(one, other, key=len)
        if longer.endswith(f".{shorter}"):
            prefix = longer.removesuffix(shorter)
            saved = longer == one
            key = f"key.removeprefix({prefix!r})" if saved else f"{prefix!r} + key"
            begins = "the state" if saved else variable
            return answer(
                **known, said=f"The keys of {begins} begin with {prefix!r}, the others do not: {one!r}, {other!r}.",
                why="One is a wrapper (DataParallel, torch.compile, a Lightning module), the other the model within.",
                change=f"{name} = {{{key}: value for key, value in {name}.items()}}",
            )  # fmt: skip
    if sizes:
        first, there, here = sizes[0]
        return answer(
            **known, said=f"{first} is {here} in the model and {there} in the state; {len(sizes)} differ.",
            why="The model was made with other sizes than the one that was saved, often another number of classes.",
            change=f"Make {variable} with the sizes of the state; or leave them out: for key in "
            f"{[one[0] for one in sizes[:4]]}: del {name}[key], then load_state_dict({name}, strict=False)",
        )  # fmt: skip
    return answer(
        **known, said=f"{variable} and the state have {len(missing)} missing and {len(unexpected)} unexpected keys: "
        f"{', '.join((missing + unexpected)[:4])}.",
        why="The state is of another architecture or version, or of a part of the model.",
        change="Load it into the part that it belongs to; strict=False only if what is missing is meant to stay.",
    )  # fmt: skip
