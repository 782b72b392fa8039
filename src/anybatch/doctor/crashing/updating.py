"""What optimizers, gradient scalers and loaded states were given."""

import ast
import re
from types import GeneratorType

import torch

from anybatch.doctor.crashing.kinds import Answer, answer, shape
from anybatch.doctor.crashing.live import Live
from anybatch.doctor.crashing.usercode import called


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
