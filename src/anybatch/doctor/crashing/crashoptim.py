"""Crashes of optimizers, schedulers, gradient scalers and loaded states."""

import ast
import re
from types import GeneratorType
from typing import Any

import torch

from anybatch.doctor.crashing.crashkinds import Told, kind, origin, quoted, shape
from anybatch.doctor.crashing.crashlive import Live
from anybatch.doctor.crashing.crashsource import called, loads, path_of, simple_statements


@kind(r"^optimizer got an empty parameter list")
def empty(live: Live, _: Any) -> Told | None:
    """Tells why there were no parameters."""
    frame = live.user
    if frame is None:
        return None
    given = live.statement(frame)
    for path in loads(given):
        value = live.value(frame, ast.parse(path, mode="eval").body)
        if isinstance(value, GeneratorType):
            return Told(
                name="EMPTY_OPTIMIZER",
                message=f"{quoted(path)} is a generator that has already been gone through, so that the optimizer got "
                "no parameters.",
                cause="What model.parameters() gives can be gone through once.",
                fix=f"{path} = list(model.parameters())",
                tensor=path,
            )
        if isinstance(value, torch.nn.Module):
            return _of_module(live, path, value)
    live.parameters()  # finds the models
    owning = [(path, one) for path, one in live.roots.items() if any(True for _ in one.parameters())]
    if len(owning) == 1 and _is_frozen(owning[0][1]):
        return _frozen(*owning[0])
    return Told(
        name="EMPTY_OPTIMIZER",
        message=f"The optimizer in {quoted(live.code(frame))} got no parameters.",
        cause="What was given has none, or a filter took all of them away (requires_grad=False).",
        fix="Give it list(model.parameters()), and look at its length.",
    )


def _is_frozen(module: torch.nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in module.parameters())


def _frozen(path: str, module: torch.nn.Module) -> Told:
    count = sum(1 for _ in module.parameters())
    return Told(
        name="EMPTY_OPTIMIZER",
        message=f"All {count} parameters of {quoted(path)}, a {type(module).__name__}, have requires_grad=False: "
        "none was left for the optimizer.",
        cause="The whole model was frozen, also the parts that are to be trained.",
        fix=f"p.requires_grad_(True) for those parameters of {path} that are to be trained, after the rest was frozen",
        module=path,
        evidence={"frozen": count},
    )


def _of_module(live: Live, path: str, module: torch.nn.Module) -> Told:
    own = {name: value for name, value in vars(module).items() if isinstance(value, list | tuple | dict)}
    for name, value in own.items():
        inner = list(value.values()) if isinstance(value, dict) else list(value)
        if inner and not name.startswith("_") and all(isinstance(one, torch.nn.Module) for one in inner):
            kind_ = "ModuleDict" if isinstance(value, dict) else "ModuleList"
            return Told(
                name="EMPTY_OPTIMIZER",
                message=f"{path}.{name} is a plain {type(value).__name__} of {len(inner)} modules, whose parameters "
                f"{path}.parameters() does not see.",
                cause="Only modules that are attributes, or in a ModuleList, ModuleDict or Sequential, are registered.",
                fix=f"self.{name} = nn.{kind_}(self.{name})",
                module=name,
                tensor=f"{path}.{name}",
                evidence={"modules": len(inner)},
            )
    count = sum(1 for _ in module.parameters())
    if count and _is_frozen(module):
        return _frozen(path, module)
    return Told(
        name="EMPTY_OPTIMIZER",
        message=f"{quoted(path)}, a {type(module).__name__}, gave the optimizer no parameters: it has {count}.",
        cause="Its layers are made later, or not kept as attributes.",
        fix=f"Make the layers of {type(module).__name__} in __init__ before the optimizer.",
        module=path,
    )


@kind(r"^can't optimize a non-leaf Tensor")
def non_leaf(live: Live, _: Any) -> Told | None:
    """Tells which tensor is no leaf."""
    group = live.local("add_param_group", "param_group")
    params = group.get("params", ()) if isinstance(group, dict) else ()
    bad = next((one for one in params if isinstance(one, torch.Tensor) and not one.is_leaf), None)
    if bad is None:
        return None
    name = next((path for path, one, _ in live.named() if one is bad and "[" not in path), "") or live.name_of(bad)
    line = _made_at(live, name)
    code = line.get("origin_code", "")
    made = bad.grad_fn.name() if bad.grad_fn is not None else "another operation"
    return Told(
        name="NON_LEAF_OPTIMIZED",
        message=f"{quoted(name) or 'A tensor'} {shape(bad)} is the result of {made}"
        f"{f' in {quoted(code)}' if code else ''}, not a tensor of its own.",
        cause="After requires_grad=True it was moved, scaled or reshaped, which makes a new tensor that depends on the "
        "first; only leaves can be optimized.",
        fix=f"{name or 'tensor'} = {name or 'tensor'}.detach().requires_grad_()  # before the optimizer",
        tensor=f"{name} {shape(bad)}",
        evidence={"made_by": made, **line},
    )


def _made_at(live: Live, path: str) -> dict[str, Any]:
    frame = live.user
    source = live.source(frame) if frame is not None else None
    if frame is None or source is None or not path:
        return {}
    lines = [
        one.lineno for one in simple_statements(source.function(frame.line))
        if isinstance(one, ast.Assign) and path in [path_of(t) for t in one.targets] and one.lineno < frame.line
    ]  # fmt: skip
    return origin(frame.file, lines[-1], source.text(lines[-1])) if lines else {}


@kind(r"^some parameters appear in more than one parameter group")
def in_two_groups(live: Live, _: Any) -> Told | None:
    """Tells which parameters are in two groups."""
    optimizer, group = live.local("add_param_group", "self"), live.local("add_param_group", "param_group")
    if not isinstance(group, dict) or not isinstance(getattr(optimizer, "param_groups", None), list):
        return None
    own = {id(one) for one in group["params"]}
    names: list[str] = []
    first = 0
    for number, other in enumerate(optimizer.param_groups):
        for one in other["params"]:
            if id(one) in own:
                first = first if names else number
                names.append(live.name_of(one) or shape(one))
    last = len(optimizer.param_groups)
    return Told(
        name="PARAM_IN_TWO_GROUPS",
        message=f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''} "
        f"{'is' if len(names) == 1 else 'are'} in group {first} and in group {last}.",
        cause="A parameter can be in one group only, since it would be stepped twice.",
        fix=f"Leave them out of group {first}: [p for n, p in model.named_parameters() if n not in "
        f"{{{', '.join(repr(name) for name in names[:4])}{', ...' if len(names) > 4 else ''}}}]",
        parameters=tuple(names),
        module=names[0].rpartition(".")[0] if names else "",
        evidence={"groups": [first, last], "count": len(names)},
    )


_SCALER = {
    "unscale_() has already been called": (
        "UNSCALE_TWICE",
        "{scaler}.unscale_({optimizer}) was called twice since {scaler}.update().",
        "Gradients would be divided by the scale twice.",
    ),
    "step() has already been called": (
        "STEP_TWICE_SCALER",
        "{scaler}.step({optimizer}) was called twice without {scaler}.update() between.",
        "The scaler keeps for each optimizer where it is in the step, and update() starts the next one.",
    ),
    "unscale_() is being called after step()": (
        "SCALER_MISUSED",
        "{scaler}.unscale_({optimizer}) comes after {scaler}.step({optimizer}).",
        "step() has unscaled the gradients and used them.",
    ),
    "no update": (
        "STEP_TWICE_SCALER",
        "{scaler}.update() is missing: {scaler}.unscale_({optimizer}) meets the step of the round before.",
        "The scaler keeps for each optimizer where it is in the step, and update() starts the next one.",
    ),
    "Attempted": (
        "STEP_WITHOUT_SCALE",
        "{scaler}.step({optimizer}) was called, but {scaler}.scale(loss) never was.",
        "The scaler knows its scale from the first scale() on.",
    ),
    "No inf checks were recorded prior to update": (
        "SCALER_MISUSED",
        "{scaler}.update() was called, but no {scaler}.step({optimizer}) came before it.",
        "{optimizer}.step() by itself steps along scaled gradients, and tells the scaler nothing.",
    ),
    "No inf checks were recorded": (
        "SCALER_MISUSED",
        "{optimizer} has no parameter with a gradient; {scaler}.step({optimizer}) has nothing to check.",
        "The backward put no gradient on the parameters of this optimizer.",
    ),
    "Attempting to unscale FP16 gradients": (
        "SCALER_MISUSED",
        "The weights of {optimizer} are float16, and so are their gradients; {scaler} can't unscale those.",
        "autocast needs float32 weights, and computes in float16 by itself.",
    ),
}


@kind(
    r"^(unscale_\(\) has already been called)",
    r"^(step\(\) has already been called) since the last update",
    r"^(unscale_\(\) is being called after step\(\))",
    r"^(Attempted) \w+ but _scale is None",
    r"^(No inf checks were recorded prior to update)",
    r"^(No inf checks were recorded)",
    r"^(Attempting to unscale FP16 gradients)",
)
def scaler(live: Live, match: "re.Match[str]") -> Told | None:
    """Tells what is wrong with the order of a gradient scaler's calls."""
    names = {"scaler": "scaler", "optimizer": "optimizer"}
    optimizer = None
    for function in ("unscale_", "step", "update"):
        own, given = live.local(function, "self"), live.local(function, "optimizer")
        if own is not None and type(own).__name__ == "GradScaler":
            names["scaler"] = live.variable_of(own) or "scaler"
        if isinstance(given, torch.optim.Optimizer):
            optimizer = given
            names["optimizer"] = live.variable_of(given) or "optimizer"
    before = _calls_before(live)
    said = match.group(1)
    if "after step()" in said and before.get("step", 0) > getattr(live.user, "line", 0) and "update" not in before:
        said = "no update"  # the step was that of the round before
    name, message, cause = _SCALER[said]
    what, who = names["scaler"], names["optimizer"]
    listed: tuple[str, ...] = ()
    if match.group(1).startswith(("No inf", "Attempting")) and optimizer is not None:
        listed = tuple(filter(None, (live.name_of(p) for g in optimizer.param_groups for p in g["params"][:5])))
    fix = {
        "UNSCALE_TWICE": f"Call {what}.unscale_({who}) once, before clipping; and {what}.update() after each step."
        if before.get("update") else f"{what}.update()  # after {what}.step({who})",
        "STEP_TWICE_SCALER": f"{what}.update()  # after {what}.step({who})",
        "STEP_WITHOUT_SCALE": f"{what}.scale(loss).backward()",
    }.get(name, f"{what}.unscale_({who})  # before {what}.step({who})")  # fmt: skip
    if match.group(1).endswith("prior to update"):
        fix = f"{what}.step({who})  # instead of {who}.step(), before {what}.update()"
    elif match.group(1).startswith("No inf"):
        fix = f"Give {who} the parameters of the model that the loss is computed with: {', '.join(listed[:3])} have no "
        fix += "gradient"
    if match.group(1).startswith("Attempting"):
        fix = "model.float()  # instead of model.half(); and torch.autocast for the forward"
    line = before.get("unscale_") if name == "UNSCALE_TWICE" else None
    source = live.source(live.user) if live.user is not None else None
    return Told(
        name=name,
        message=message.format(**names),
        cause=cause,
        fix=fix,
        parameters=listed,
        tensor=who,
        evidence={"optimizer": who, "scaler": what}
        | (origin(live.user.file, line, source.text(line)) if line and source and live.user else {}),
    )


def _calls_before(live: Live) -> dict[str, int]:
    """The lines of the calls in the user's round other than the one that failed."""
    frame = live.user
    source = live.source(frame) if frame is not None else None
    if frame is None or source is None:
        return {}
    loops = source.loops(frame.line)
    found: dict[str, int] = {}
    for statement in simple_statements(loops[0] if loops else source.function(frame.line)):
        for node in ast.walk(statement):
            if called(node) and statement.lineno != frame.line:
                found[called(node)] = statement.lineno
    return found


@kind(r"^`?(\w+)`? does not support sparse gradients")
def sparse_gradient(live: Live, match: "re.Match[str]") -> Told | None:
    """Tells which parameters of an optimizer have sparse gradients, and which layers make them."""
    own = next((f.values["self"] for f in reversed(live.frames) if isinstance(f.values.get("self"),
                torch.optim.Optimizer)), None)  # fmt: skip
    given = [] if own is None else [p for group in own.param_groups for p in group["params"]]
    sparse = [p for p in given if p.grad is not None and p.grad.is_sparse]
    if own is None or not sparse:
        return None
    name = live.variable_of(own) or "optimizer"
    listed = tuple(live.name_of(p) or shape(p) for p in sparse)
    layer = listed[0].rpartition(".")[0]
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return Told(
        name="SPARSE_GRADIENT",
        message=f"{', '.join(listed[:3])}{more} {'has a' if len(listed) == 1 else 'have'} sparse gradient"
        f"{'' if len(listed) == 1 else 's'}, which {name}, {type(own).__name__}, can't use.",
        cause=f"{layer or 'The embedding'} was made with sparse=True.",
        fix=f"sparse=False in {layer or 'the embedding'}; or torch.optim.SparseAdam for these"
        + (f", and {name} for the rest" if len(sparse) < len(given) else ""),
        module=layer,
        parameters=listed,
        tensor=name,
        evidence={"sparse": len(sparse), "parameters": len(given)},
    )


@kind(r"^Error\(s\) in loading state_dict for (\w+):(.*)")
def state_of_a_model(live: Live, match: "re.Match[str]") -> Told:
    """Tells which entries of a state do not fit, and why."""
    cls, text = match.groups()
    sizes = re.findall(
        r"size mismatch for ([\w.]+): .*?shape torch\.Size\((\[.*?\])\).*?is torch\.Size\((\[.*?\])\)", text
    )
    missing = _quoted_names(text, "Missing key")
    unexpected = _quoted_names(text, "Unexpected key")
    name = live.module_name(live.local("load_state_dict", "self")) or cls
    variable = live.variable_of(live.local("load_state_dict", "self")) or "model"
    state = next((n for n, v in (live.user.values.items() if live.user else ()) if isinstance(v, dict) and unexpected
                  and unexpected[0] in v), "state")  # fmt: skip
    evidence = {"missing": missing[:20], "unexpected": unexpected[:20], "sizes": [list(one) for one in sizes[:20]]}
    prefix = _prefix(missing, unexpected)
    if prefix:
        message = f"The keys of the state begin with {prefix!r}, those of {name} do not: {unexpected[0]!r}."
        fix = f"{state} = {{key.removeprefix({prefix!r}): value for key, value in {state}.items()}}"
        cause = "The state was saved from a wrapper of the model (DataParallel, torch.compile, a Lightning module)."
    elif sizes:
        one = sizes[0]
        message = f"{one[0]} is {one[2]} in the model and {one[1]} in the state"
        message += f", and {len(sizes) - 1} more differ." if len(sizes) > 1 else "."
        cause = "The model was made with other sizes than the one that was saved, often another number of classes."
        fix = f"Make {variable} with the sizes of the state; or leave them out: for key in "
        fix += f"{[one[0] for one in sizes[:4]]}: del state[key], then load_state_dict(state, strict=False)"
    else:
        message = f"{name} and the state have {len(missing)} missing and {len(unexpected)} unexpected keys: "
        message += ", ".join((missing + unexpected)[:4]) + "."
        cause = "The state is of another architecture or version, or of a part of the model."
        fix = (
            "Load it into the part that it belongs to; strict=False only if what is missing is meant to stay as it is."
        )
    return Told(
        name="STATE_NOT_LOADED", message=message, cause=cause, fix=fix, module=name,
        parameters=tuple(one[0] for one in sizes) or tuple(missing), evidence=evidence,
    )  # fmt: skip


def _quoted_names(text: str, head: str) -> list[str]:
    part = re.search(rf"{head}\(s\) in state_dict: (.*?)(?:\n\t|$)", text, re.DOTALL)
    return re.findall(r"\"([^\"]+)\"", part.group(1)) if part else []


def _prefix(missing: list[str], unexpected: list[str]) -> str:
    for one in unexpected[:1]:
        for other in missing:
            if one.endswith(f".{other}"):
                return one.removesuffix(other)
    return ""


@kind(
    r"^loaded state dict has a different number of parameter groups",
    r"^loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
)
def state_of_an_optimizer(live: Live, _: Any) -> Told:
    """Tells how the groups of an optimizer and of a state differ."""
    own, state = live.local("load_state_dict", "self"), live.local("load_state_dict", "state_dict")
    name = live.variable_of(own) or "optimizer"
    here = [len(group["params"]) for group in getattr(own, "param_groups", [])]
    there = [len(group["params"]) for group in (state or {}).get("param_groups", [])]
    return Told(
        name="STATE_NOT_LOADED",
        message=f"{name} has groups of {here} parameters, the state has groups of {there}.",
        cause="The optimizer was made with other groups, or for a model with other parameters, than the one saved.",
        fix=f"Make {name} with the groups that were saved: groups of {there} parameters, in the same order.",
        tensor=name,
        evidence={"here": here, "there": there},
    )


@kind(r"^Tried to step (\d+) times\. The (?:specified|total) number of (?:total )?steps is (\d+)")
def past_the_end(live: Live, match: "re.Match[str]") -> Told:
    """Tells how many steps a schedule was made for."""
    own = live.local("get_lr", "self") or live.local("step", "self") or live.local("_get_lr", "self")
    name = live.variable_of(own) or "scheduler"
    done, total = int(match[1]), int(match[2])
    return Told(
        name="SCHED_PAST_END",
        message=f"{name}.step() was called {done} times, but {name} was made for total_steps={total}.",
        cause="The number of steps was counted otherwise than the loop steps: epochs instead of batches, or without "
        "accumulation, or training went on.",
        fix="total_steps=epochs * len(loader)  # as often as step() is called",
        tensor=name,
        evidence={"called": done, "total": total},
    )
