"""What optimizers, schedulers, gradient scalers and loaded states were given."""

import ast
import re
from types import GeneratorType
from typing import Any

import torch

from anybatch.doctor.crashing.kinds import Answer, answer, quoted, shape
from anybatch.doctor.crashing.live import Live
from anybatch.doctor.crashing.usercode import called, simple_statements, targets


def used_up(live: Live, match: "re.Match[str]") -> Answer | None:
    """A generator of parameters that was gone through before."""
    found = [path for path, value in live.line_reads() if isinstance(value, GeneratorType)]
    return answer(path=found[0], tensor=found[0]) if found else None


def unregistered(live: Live, match: "re.Match[str]") -> Answer | None:
    """Modules in a plain list or dict of the module whose parameters were asked for."""
    for path, module in live.line_reads():
        for name, value in vars(module).items() if isinstance(module, torch.nn.Module) else ():
            inner = list(value.values()) if isinstance(value, dict) else value
            plain = isinstance(inner, list | tuple) and not name.startswith("_")
            if plain and inner and all(isinstance(one, torch.nn.Module) for one in inner):
                return answer(
                    path=path, name=name, held=type(value).__name__, count=len(inner), module=name,
                    instead="ModuleDict" if isinstance(value, dict) else "ModuleList",
                    tensor=f"{path}.{name}", evidence={"modules": len(inner)},
                )  # fmt: skip
    return None


def all_frozen(live: Live, match: "re.Match[str]") -> Answer | None:
    """A model without a parameter that requires a gradient."""
    named = [(path, one) for path, one in live.line_reads() if isinstance(one, torch.nn.Module)]
    live.modules()  # finds the models
    owning = [(path, one) for path, one in live.roots.items() if any(True for _ in one.parameters())]
    for path, module in named[:1] or (owning if len(owning) == 1 else []):
        own = list(module.parameters())
        if own and not any(parameter.requires_grad for parameter in own):
            return answer(
                path=path, count=len(own), cls=type(module).__name__, module=path, evidence={"frozen": len(own)}
            )
    return None


def parameterless(live: Live, match: "re.Match[str]") -> Answer | None:
    """A module that gave no parameters."""
    for path, one in live.line_reads():
        if isinstance(one, torch.nn.Module):
            return answer(path=quoted(path), cls=type(one).__name__, count=len(list(one.parameters())), module=path)
    return None


def non_leaf(live: Live, match: "re.Match[str]") -> Answer | None:
    """Which tensor is no leaf, and what made it."""
    group = live.local("add_param_group", "param_group")
    given = group.get("params", ()) if isinstance(group, dict) else ()
    bad = next((one for one in given if isinstance(one, torch.Tensor) and not one.is_leaf), None)
    if bad is None or live.user is None:
        return None
    name = next((path for path, one, _ in live.named() if one is bad and "[" not in path), "") or live.name_of(bad)
    source = live.source(live.user)
    before = [] if source is None or not name else simple_statements(source.function(live.user.line))
    made = [
        one for one in before if isinstance(one, ast.Assign) and name in targets(one) and one.lineno < live.user.line
    ]
    at = live.at(made[-1]) if made else ("", 0, "")
    op = bad.grad_fn.name() if bad.grad_fn is not None else "another operation"
    return answer(
        path=quoted(name) or "A tensor", size=shape(bad), op=op, by=f" in {quoted(at[2])}" if at[2] else "",
        name=name or "tensor", at=at, tensor=f"{name} {shape(bad)}", evidence={"made_by": op},
    )  # fmt: skip


def in_two_groups(live: Live, match: "re.Match[str]") -> Answer | None:
    """Which parameters are in two groups."""
    optimizer, group = live.local("add_param_group", "self"), live.local("add_param_group", "param_group")
    if not isinstance(group, dict) or not isinstance(getattr(optimizer, "param_groups", None), list):
        return None
    own = {id(one) for one in group["params"]}
    twice = [(n, one) for n, other in enumerate(optimizer.param_groups) for one in other["params"] if id(one) in own]
    names = [live.name_of(one) or shape(one) for _, one in twice]
    first, last = twice[0][0] if twice else 0, len(optimizer.param_groups)
    return answer(
        names=", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else ""),
        are="is" if len(names) == 1 else "are", first=first, last=last,
        some=", ".join(map(repr, names[:4])) + (", ..." if len(names) > 4 else ""),
        parameters=names, module=names[0].rpartition(".")[0] if names else "",
        evidence={"groups": [first, last], "count": len(names)},
    )  # fmt: skip


def scaler(live: Live, match: "re.Match[str]") -> Answer:
    """The scaler and the optimizer of a call, and the calls of the same round."""
    names = {"scaler": "scaler", "optimizer": "optimizer"}
    listed: list[str] = []
    for function in ("unscale_", "step", "update"):
        own, given = live.local(function, "self"), live.local(function, "optimizer")
        if type(own).__name__ == "GradScaler":
            names["scaler"] = live.variable_of(own) or "scaler"
        if isinstance(given, torch.optim.Optimizer):
            names["optimizer"] = live.variable_of(given) or "optimizer"
            listed = [name for group in given.param_groups for p in group["params"][:5] if (name := live.name_of(p))]
    about_gradients = live.text.startswith(("No inf", "Attempting"))
    return answer(
        **names,
        listed=", ".join(listed[:3]),
        parameters=listed if about_gradients else (),
        tensor=names["optimizer"],
        evidence={"optimizer": names["optimizer"], "scaler": names["scaler"]},
    )


def calls_in_round(live: Live) -> dict[str, int]:
    """The lines of the calls in the user's round other than the one that failed."""
    here = live.user.line if live.user is not None else 0
    return {
        called(node): one.lineno for one in live.round() if one.lineno != here for node in ast.walk(one) if called(node)
    }


def unscaled_twice(live: Live, match: "re.Match[str]") -> Answer:
    """The other call of ``unscale_`` in the round."""
    known, before = scaler(live, match), calls_in_round(live)
    what, who = known["scaler"], known["optimizer"]
    change = f"Call {what}.unscale_({who}) once, before clipping; and {what}.update() after each step."
    change = change if before.get("update") else f"{what}.update()  # after {what}.step({who})"
    return {**known, "change": change, "at": live.at(before["unscale_"]) if before.get("unscale_") else None}


def update_forgotten(live: Live, match: "re.Match[str]") -> Answer | None:
    """Whether the step that ``unscale_`` comes after was that of the round before."""
    before = calls_in_round(live)
    late = before.get("step", 0) > getattr(live.user, "line", 0) and "update" not in before
    return scaler(live, match) if late else None


def sparse(live: Live, match: "re.Match[str]") -> Answer | None:
    """Which parameters have sparse gradients, and which layers make them."""
    frames = (frame.values.get("self") for frame in reversed(live.frames))
    own = next((one for one in frames if isinstance(one, torch.optim.Optimizer)), None)
    given = [p for group in own.param_groups for p in group["params"]] if own else list(live.parameters().values())
    found = [p for p in given if p.grad is not None and p.grad.is_sparse]
    if not found:
        return None
    name = (live.variable_of(own) if own is not None else "") or "optimizer"
    listed = [live.name_of(p) or shape(p) for p in found]
    layer = listed[0].rpartition(".")[0]
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    user = f"{name}, {type(own).__name__}," if own is not None else quoted(live.code())
    return answer(
        listed=", ".join(listed[:3]) + more,
        have="has a sparse gradient" if len(listed) == 1 else "have sparse gradients",
        user=user, layer=layer or "The embedding", of=layer or "the embedding",
        rest=f", and {name} for the rest" if len(found) < len(given) and own is not None else "",
        module=layer, parameters=listed, tensor=name, evidence={"sparse": len(found), "parameters": len(given)},
    )  # fmt: skip


def state_keys(live: Live, match: "re.Match[str]") -> Answer:
    """What a state and a model do not have in common."""
    cls, text = match.groups()
    sizes = re.findall(
        r"size mismatch for ([\w.]+): .*?shape torch\.Size\((\[.*?\])\).*?is torch\.Size\((\[.*?\])\)", text
    )
    missing, unexpected = _keys(text, "Missing key"), _keys(text, "Unexpected key")
    own, values = live.local("load_state_dict", "self"), live.user.values if live.user else {}
    dicts = (n for n, v in values.items() if isinstance(v, dict) and unexpected and unexpected[0] in v)
    name = live.module_name(own) or cls
    return answer(
        name=name, variable=live.variable_of(own) or "model", state=next(dicts, "state"), missing=missing,
        unexpected=unexpected, sizes=sizes, counts=(len(missing), len(unexpected)),
        some=", ".join((missing + unexpected)[:4]), module=name,
        parameters=[one[0] for one in sizes] or missing,
        evidence={"missing": missing[:20], "unexpected": unexpected[:20], "sizes": [list(one) for one in sizes[:20]]},
    )  # fmt: skip


def _keys(text: str, head: str) -> list[str]:
    part = re.search(rf"{head}\(s\) in state_dict: (.*?)(?:\n\t|$)", text, re.DOTALL)
    return re.findall(r"\"([^\"]+)\"", part.group(1)) if part else []


def state_of_a_wrapper(live: Live, match: "re.Match[str]") -> Answer | None:
    """What the keys of a state begin with besides those of the model."""
    known = state_keys(live, match)
    for one in known["unexpected"][:1]:
        for other in known["missing"]:
            if one.endswith(f".{other}"):
                return {**known, "prefix": one.removesuffix(other), "key": one}
    return None


def state_of_the_inside(live: Live, match: "re.Match[str]") -> Answer | None:
    """What the keys of a model begin with besides those of the state."""
    known = state_keys(live, match)
    for one in known["unexpected"][:1]:
        for other in known["missing"]:
            if other.endswith(f".{one}"):
                return {**known, "prefix": other.removesuffix(one), "key": one}
    return None


def given_state(live: Live, match: "re.Match[str]") -> Answer:
    """What was given instead of a state."""
    given, own = live.local("load_state_dict", "state_dict"), live.local("load_state_dict", "self")
    return answer(given=live.variable_of(given) or "model", variable=live.variable_of(own) or "model")


def state_within(live: Live, match: "re.Match[str]") -> Answer | None:
    """The key under which a checkpoint holds the state that fits."""
    known, own = state_keys(live, match), live.local("load_state_dict", "self")
    whole = live.local("load_state_dict", "state_dict")
    names = set(own.state_dict()) if isinstance(own, torch.nn.Module) else set()
    for key, value in whole.items() if isinstance(whole, dict) else ():
        if isinstance(value, dict) and names and names == set(value):
            return {**known, "key": repr(key), "keys": ", ".join(map(repr, list(whole)[:5]))}
    return None


def state_sizes(live: Live, match: "re.Match[str]") -> Answer | None:
    """The entries of a state that have another size than the model's."""
    known = state_keys(live, match)
    if not known["sizes"]:
        return None
    (name, there, here), count = known["sizes"][0], len(known["sizes"])
    more = f", and {count - 1} more differ" if count > 1 else ""
    return {**known, "first": f"{name} is {here} in the model and {there} in the state{more}",
            "keys": [one[0] for one in known["sizes"][:4]]}  # fmt: skip


def optimizer_groups(live: Live, match: "re.Match[str]") -> Answer:
    """The sizes of the groups of an optimizer, and of those in a state."""
    own, state = live.local("load_state_dict", "self"), live.local("load_state_dict", "state_dict")
    here = [len(group["params"]) for group in getattr(own, "param_groups", [])]
    there = [len(group["params"]) for group in (state or {}).get("param_groups", [])]
    name = live.variable_of(own) or "optimizer"
    return answer(name=name, here=here, there=there, tensor=name, evidence={"here": here, "there": there})


def scheduler(live: Live, match: "re.Match[str]") -> Answer:
    """The name of a scheduler that was stepped, or of the optimizer that it was given."""
    own: Any = live.local("get_lr", "self") or live.local("step", "self") or live.local("_get_lr", "self")
    name = live.variable_of(own) or "scheduler"
    known: dict[str, Any] = {"name": name, "tensor": name}
    if match.groups() and len(match.groups()) == 2:
        known["evidence"] = {"called": int(match[1]), "total": int(match[2])}
    held = next((path for frame in live.users for path, value in frame.values.items()
                 if isinstance(value, torch.optim.Optimizer)), "optimizer")  # fmt: skip
    return {**known, "optimizer": held}
