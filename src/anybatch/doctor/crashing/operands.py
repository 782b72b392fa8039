"""Who takes part in the operation that failed: names, devices, dtypes and shapes."""

import ast
import re
from typing import Any, NamedTuple

import torch

from anybatch.doctor.crashing.kinds import Answer, answer, dtype, quoted, shape
from anybatch.doctor.crashing.live import Live

_ARGUMENTS = ("input", "self", "target", "weight", "bias")
_RECURRENT = ("RNN", "LSTM", "GRU")


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

    def add(tensor: Any, name: str, known: str = "") -> None:
        if isinstance(tensor, torch.Tensor):
            parameter = known or live.parameter_name(tensor)
            found.setdefault(id(tensor), Party(parameter or name, tensor, bool(parameter)))

    module = live.module()
    torchs = module is not None and type(module).__module__.startswith("torch.nn.")
    if module is not None and torchs:
        for name, tensor in module.named_parameters():
            add(tensor, name, live.parameter_name(tensor) or ".".join(filter(None, (live.module_name(module), name))))
    called = [frame.function for frame in reversed(live.frames) if frame.whose == "torch"][:2]
    for name in _ARGUMENTS:
        for function in ("forward", *called):
            value = live.local(function, name)
            add(value, live.label(value, name) if value is not None else name)
    if not (torchs and found and any(not party.parameter for party in found.values())):
        for path, value in live.line_reads():
            add(value, path)
    return list(found.values())


def given_to(live: Live, module: Any) -> tuple[str, Any]:
    """The tensor that a running module was given, and the user's name of it."""
    names = ("input", "x", "query", "hidden_states", "src", "tgt")
    frames = (frame for frame in reversed(live.frames) if frame.values.get("self") is module)
    found = next((frame.values[name] for frame in frames for name in names if name in frame.values), None)
    return (live.label(found, "its input"), found) if isinstance(found, torch.Tensor) else ("its input", None)


def devices(live: Live, match: "re.Match[str]") -> Answer | None:
    """Which tensor is not on the device where the parameters are."""
    found = parties(live)
    if len({party.tensor.device for party in found}) < 2:
        found += [Party(path, tensor, False) for path, tensor in live.tensors_in_line()]
    here = {str(party.tensor.device) for party in found}
    if len(here) < 2:
        return None
    homes = [str(parameter.device) for parameter in live.parameters().values()]
    real = [home for home in homes if home != "meta"] or homes
    own = next((party for party in found if party.parameter), found[0])
    home = max(dict.fromkeys(real), key=real.count, default="")
    home = home if home in here else str(own.tensor.device)
    wrong, right = (
        next(party for party in found if (str(party.tensor.device) == home) is same) for same in (False, True)
    )
    module = live.module_name(live.module())
    listed = "; ".join(
        f"{', '.join([p.name for p in found if str(p.tensor.device) == device][:3])} on {device}"
        for device in sorted(here)
    )
    return answer(
        wrong=quoted(wrong.name), there=wrong.tensor.device, right=quoted(right.name), home=home, listed=listed,
        what=f"The module {module}" if module else "The operation", change=_to_home(live, wrong, home),
        module=module or wrong.name.rpartition(".")[0], parameters=[party.name for party in found if party.parameter],
        tensor=f"{wrong.name} {shape(wrong.tensor)} on {wrong.tensor.device}",
        evidence={party.name: str(party.tensor.device) for party in found},
    )  # fmt: skip


def _to_home(live: Live, wrong: Party, home: str) -> str:
    target = repr(home)
    for frame in reversed(live.users):
        for name in ("device", "self.device", "dev"):
            if str(live.read(name, frame)) in (home, home.split(":")[0]):
                target = name
    if not wrong.parameter:
        if wrong.name.startswith("self."):
            name = wrong.name.removeprefix("self.")
            return f"self.register_buffer({name!r}, ...)  # in __init__, so that .to() moves it with the module"
        plain = re.fullmatch(r"[\w.]+(\[[^\]]*\])*", wrong.name)
        return f"{wrong.name} = {wrong.name}.to({target})" if plain else f"{wrong.name}.to({target})"
    root = next((path for path, one in live.roots.items() if any(p is wrong.tensor for p in one.parameters())), "model")
    if str(wrong.tensor.device) == "meta":
        return f"{root}.to_empty(device={target}) and initialise or load {wrong.name}, which has no values yet"
    return f"{root}.to({target})  # after all of its modules are there, {wrong.name.rpartition('.')[0]} among them"


def labels(live: Live, match: "re.Match[str]") -> Answer | None:
    """Class indices of another dtype than int64."""
    target, scores = (
        next(
            (one for function in ("cross_entropy", "nll_loss") if (one := live.local(function, name)) is not None), None
        )
        for name in ("target", "input")
    )
    if not isinstance(target, torch.Tensor) or target.dtype == torch.long:
        return None
    name = live.label(target, "target")
    other = target.is_floating_point() and getattr(scores, "shape", None) != target.shape
    return answer(
        path=quoted(name), kind=dtype(target), change=f"{name} = {name}.long()",
        other=" (or probabilities of the shape of the scores)" if other else "",
        tensor=f"{name} {shape(target)} {dtype(target)}", evidence={name: dtype(target)},
    )  # fmt: skip


def float_ids(live: Live, match: "re.Match[str]") -> Answer | None:
    """Indices of an embedding that are no whole numbers."""
    ids, weight = live.local("embedding", "input"), live.local("embedding", "weight")
    if not isinstance(ids, torch.Tensor) or not ids.is_floating_point():
        return None
    name = live.label(ids, "input")
    return answer(
        path=quoted(name), kind=dtype(ids), change=f"{name} = {name}.long()", module=live.module_name(live.module()),
        parameters=filter(None, [live.parameter_name(weight)]), tensor=f"{name} {shape(ids)} {dtype(ids)}",
        evidence={name: dtype(ids)},
    )  # fmt: skip


def dtypes(live: Live, match: "re.Match[str]") -> Answer | None:
    """Which tensor has another dtype than the parameters."""
    found = parties(live)
    if len({party.tensor.dtype for party in found}) < 2:
        return None
    home = next((party for party in found if party.parameter), found[0])
    wrong = _as_written(live, next(party for party in found if party.tensor.dtype != home.tensor.dtype))
    module = live.module_name(live.module())
    want = f"torch.{dtype(home.tensor)}" if home.parameter else f"{home.name}.dtype"
    change = f"{wrong.name} = {wrong.name}.to({want})"
    if wrong.tensor.is_complex() and not home.tensor.is_complex():
        change = f"{wrong.name} = {wrong.name}.abs()  # or torch.view_as_real({wrong.name}).flatten(-2), of both parts"
    elif not home.parameter and home.name in _ARGUMENTS and not wrong.tensor.is_floating_point():
        change = f"{wrong.name} = {wrong.name}.float()"
    return answer(
        wrong=quoted(wrong.name), kind=dtype(wrong.tensor), home=quoted(home.name), want=dtype(home.tensor),
        change=change, what=f"The module {module}" if module else "The operation",
        numpys=" numpy makes float64 unless told otherwise." if wrong.tensor.dtype == torch.float64 else "",
        module=module, parameters=[party.name for party in found if party.parameter],
        tensor=f"{wrong.name} {shape(wrong.tensor)} {dtype(wrong.tensor)}",
        evidence={party.name: dtype(party.tensor) for party in found},
    )  # fmt: skip


def _as_written(live: Live, party: Party) -> Party:
    """For a tensor without a name of the user's the one that it was computed from, if a single one can be meant."""
    if live.user is None or party.name not in _ARGUMENTS or party.name in live.user.values:
        return party
    alike = [(path, one) for path, one in live.tensors_in_line() if one.dtype == party.tensor.dtype]
    return Party(*alike[0], False) if len(alike) == 1 else party


def unnamed(live: Live, match: "re.Match[str]") -> Answer:
    """The text alone."""
    return answer(evidence={"text": live.text[:200]})


def running(live: Live, match: "re.Match[str]") -> Answer:
    """The innermost module that was running."""
    return answer(module=live.module_name(live.module()))


def sizes(live: Live, match: "re.Match[str]") -> Answer:
    """The sizes in the text."""
    return answer(evidence={"sizes": list(match.groups()[:2])})


def linear(live: Live, match: "re.Match[str]") -> Answer | None:
    """Which linear layer got how many features."""
    module = next((one for one in live.running() if isinstance(one, torch.nn.Linear)), None)
    path, given = given_to(live, module)
    if module is None or given is None:
        return None
    name, features = live.module_name(module) or "the Linear", given.shape[-1]
    change = f"{name} = nn.Linear({features}, {module.out_features}{', bias=False' if module.bias is None else ''})"
    if given.dim() > 2 and given[0].numel() == module.in_features:
        change = f"{path}.flatten(1)  # {list(given.shape[1:])} becomes {module.in_features}"
    elif given.dim() > 1 and given.shape[-2] == module.in_features:
        change = f"{path}.transpose(-1, -2), if its last two dims are the wrong way round; or {change}"
    return answer(
        name=name, wanted=module.in_features, given=f"{quoted(path)} {shape(given)}", features=features, change=change,
        module=live.module_name(module), parameters=filter(None, [live.parameter_name(module.weight)]),
        tensor=f"{path} {shape(given)}",
        evidence={"in_features": module.in_features, "got": features, "input": list(given.shape)},
    )  # fmt: skip


def layer(live: Live, match: "re.Match[str]") -> Answer | None:
    """Which layer of torch's was running, what it was made for, and what it was given."""
    module = live.module()
    if module is None or not type(module).__module__.startswith("torch.nn"):
        return None
    name, cls = live.module_name(module), type(module).__name__
    path, given = given_to(live, module)
    option = "in_channels" if "Conv" in cls else "input_size" if cls in _RECURRENT else "num_features"
    option = "normalized_shape" if cls == "LayerNorm" else option
    channels = None
    if given is not None and given.dim() >= 2:
        last = cls in (*_RECURRENT, "LayerNorm")
        channels = given.shape[-1 if last else -3 if "Conv2d" in cls and given.dim() >= 3 else 1]
    wanted = getattr(module, option, None)
    wanted = list(wanted) if isinstance(wanted, tuple) else wanted
    change = f"{option}={channels} in {name or cls}; or give {path} another shape"
    if re.search(r"got input of size: \[|got \dD", live.text):
        change = f"{path}.unsqueeze(...) or .flatten(...), so that it has the dims that {cls} expects"
    size = f" {shape(given)}" if given is not None else ""
    return answer(
        name=name or "a layer", said=cls if list(module.children()) else repr(module)[:100], option=option, cls=cls,
        given=f"{quoted(path)}{size}", wanted=wanted, change=change, module=name, tensor=f"{path}{size}",
        parameters=[n for p in module.parameters(recurse=False) if (n := live.parameter_name(p))],
        evidence={option: wanted, "input": list(given.shape) if given is not None else []},
    )  # fmt: skip


def hidden_state(live: Live, match: "re.Match[str]") -> Answer | None:
    """The state that a recurrent layer was given, and the rows of its input."""
    known = layer(live, match)
    state = next((f.values["hx"] for f in reversed(live.frames) if f.values.get("hx") is not None), None)
    one = state[0] if isinstance(state, tuple) else state
    if known is None or not isinstance(one, torch.Tensor):
        return None
    path = live.label(one, "the state")
    return {**known, "state": quoted(path), "size": shape(one), "path": path, "tensor": f"{path} {shape(one)}"}


def one_value(live: Live, match: "re.Match[str]") -> Answer | None:
    """Which batch norm got one value, and the loader whose last batch has one row."""
    module = live.module()
    if module is None:
        return None
    name, (path, given) = live.module_name(module), given_to(live, module)
    change = f"{name or 'the norm layer'}: use GroupNorm or LayerNorm, or give it more than one sample"
    for frame in live.users:
        for variable, value in frame.values.items():
            if isinstance(value, torch.utils.data.DataLoader) and value.batch_size and not value.drop_last:
                rows, size = _rows(value), value.batch_size
                if rows % size == 1:
                    change = f"{variable} = DataLoader(..., batch_size={size}, drop_last=True) ({rows} samples, 1 in "
                    change += "the last batch)"
    return answer(
        name=name or type(module).__name__, cls=type(module).__name__, change=change, module=name,
        given=shape(given) if given is not None else "a batch",
        tensor=f"{path} {shape(given) if given is not None else ''}".strip(),
        evidence={"input": list(given.shape) if given is not None else []},
    )  # fmt: skip


def _rows(loader: Any) -> int:
    try:
        return len(loader.dataset)
    except (TypeError, NotImplementedError):
        return 0


def target_range(live: Live, match: "re.Match[str]") -> Answer | None:
    """The classes that there are, and the labels that came."""
    function = "cross_entropy" if live.local("cross_entropy", "target") is not None else "nll_loss"
    target, scores = live.local(function, "target"), live.local(function, "input")
    if not isinstance(target, torch.Tensor) or not isinstance(scores, torch.Tensor):
        return None
    classes = scores.shape[1] if scores.dim() > 1 else scores.shape[0]
    low, high = int(target.min()), int(target.max())
    name, last = live.label(target, "target"), ""
    for module in live.modules():
        if getattr(module, "out_features", getattr(module, "out_channels", None)) == classes:
            last = live.module_name(module)
    change = f"{last or 'the last layer'}: out_features={high + 1}; or remove labels above {classes - 1}"
    if low >= 1 and high == classes:
        change = f"{name} = {name} - 1  # labels begin at 0"
    elif low < 0:
        change = f"{name}: labels below 0 are only allowed as ignore_index, which is -100 unless given: "
        change += f"ignore_index={low}"
    return answer(
        path=quoted(name), low=low, high=high, classes=classes, last=classes - 1, change=change, module=last,
        tensor=f"{name} {shape(target)}", evidence={"classes": classes, "low": low, "high": high},
    )  # fmt: skip


def embedding_range(live: Live, match: "re.Match[str]") -> Answer | None:
    """How many rows an embedding has, and the largest index."""
    ids, weight = live.local("embedding", "input"), live.local("embedding", "weight")
    if not isinstance(ids, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return None
    module = next((one for one in live.running() if isinstance(one, torch.nn.Embedding)), None)
    name = live.module_name(module) if module is not None else live.parameter_name(weight).rpartition(".")[0]
    path, low, high = live.label(ids, "its input"), int(ids.min()), int(ids.max())
    positions = "position" in name.lower() or name.lower().endswith(("wpe", "pos", "pos_emb"))
    larger = f"nn.Embedding({high + 1}, {weight.shape[1]})"
    change = f"{name or 'the embedding'}: {larger}, or keep {path} below {len(weight)}"
    if positions:
        change = f"Cut the sequences to {len(weight)} tokens, or {larger} for {name}"
    elif low < 0:
        change = f"{path}.clamp(min=0), or a padding index that is not negative"
    return answer(
        path=quoted(path), low=low, high=high, name=name or "the embedding", rows=len(weight), last=len(weight) - 1,
        why="The input is longer than the table of positions." if positions
        else "The vocabulary (tokenizer) is larger than the embedding.",
        change=change, module=name, parameters=filter(None, [live.parameter_name(weight)]),
        tensor=f"{path} {shape(ids)}", evidence={"rows": len(weight), "low": low, "high": high},
    )  # fmt: skip


def subscript(live: Live, match: "re.Match[str]") -> Answer | None:
    """The tensor that is read at an index in the user's line."""
    statement = live.statement()
    for node in () if statement is None else ast.walk(statement):
        tensor = live.value(live.user, node.value) if live.user and isinstance(node, ast.Subscript) else None
        if isinstance(node, ast.Subscript) and isinstance(tensor, torch.Tensor):
            path = ast.unparse(node.value)
            return answer(
                read=quoted(ast.unparse(node)), path=path, size=shape(tensor), tensor=f"{path} {shape(tensor)}"
            )
    return None


def in_line(live: Live, match: "re.Match[str]") -> Answer | None:
    """The shapes of the tensors in the line that failed, and the change that they suggest."""
    shapes = {party.name: list(party.tensor.shape) for party in parties(live)} if live.user is not None else {}
    for path, tensor in live.tensors_in_line():
        shapes.setdefault(path, list(tensor.shape))
    if not shapes:
        return None
    listed = ", ".join(f"{name} {size}" for name, size in list(shapes.items())[:4])
    target = next((name for name, size in shapes.items() if [*size, 1] in shapes.values()), "")
    names = ", ".join(list(shapes)[:3])
    change = f"Print the shapes of {names} before this line, and bring the differing dim into agreement."
    code = live.code()
    return answer(
        said=match.string.strip().splitlines()[0][:200].rstrip("."), listed=listed, names=names,
        change=f"{target} = {target}.unsqueeze(-1)" if target else change,
        reshape=code.replace(".view(", ".reshape("),
        logits=code.replace("binary_cross_entropy(", "binary_cross_entropy_with_logits(").replace(
            "BCELoss(", "BCEWithLogitsLoss("),
        module=live.module_name(live.module()), tensor=listed, evidence={"shapes": shapes},
    )  # fmt: skip


def joined(live: Live, match: "re.Match[str]") -> Answer | None:
    """The tensors that were to be joined, as arguments of ``interpolate``."""
    known = in_line(live, match)
    shapes = list(known["evidence"]["shapes"].items()) if known is not None else []
    if known is None or len(shapes) < 2 or {len(size) for _, size in shapes} != {4}:
        return None
    (first, _), (_, size) = shapes[:2]
    return {**known, "names": f"{first}, size={size[2:]}"}


def target_dims(live: Live, match: "re.Match[str]") -> Answer | None:
    """Class indices that have a dim too many."""
    target, scores = live.local("cross_entropy", "target"), live.local("cross_entropy", "input")
    if not isinstance(target, torch.Tensor) or not isinstance(scores, torch.Tensor):
        return None
    name, wanted = live.label(target, "target"), [scores.shape[0], *scores.shape[2:]]
    squeezed = target.dim() > 1 and target.shape[1] == 1
    change = f"{name} = {name}.squeeze(1)" if squeezed else f"{name} = {name}.argmax(1)  # of one-hot targets"
    return answer(path=quoted(name), size=shape(target), scores=shape(scores), wanted=wanted, change=change,
                  tensor=f"{name} {shape(target)}")  # fmt: skip


def transposed(live: Live, match: "re.Match[str]") -> Answer | None:
    """Two operands of a product whose last dims agree."""
    found = live.tensors_in_line()
    if len(found) != 2 or found[0][1].shape[-1] != found[1][1].shape[-1]:
        return None
    (first, one), (second, other) = found
    change = f"{second}.transpose(-2, -1) instead of {second} in {quoted(live.code())}"
    listed = f"{first} {shape(one)}, {second} {shape(other)}"
    return answer(first=f"{first} {shape(one)}", second=f"{second} {shape(other)}", change=change, tensor=listed)


def sequences(live: Live, match: "re.Match[str]") -> Answer | None:
    """What a Transformer was given."""
    src, tgt = live.local("forward", "src"), live.local("forward", "tgt")
    return None if src is None or tgt is None else answer(src=shape(src), tgt=shape(tgt))


def heads(live: Live, match: "re.Match[str]") -> Answer | None:
    """The features and the heads of an attention that is being made."""
    size, count = live.local("__init__", "embed_dim"), live.local("__init__", "num_heads")
    return answer(size=size, heads=count, change=-(-size // count) * count) if size and count else None


def unknown(live: Live, match: "re.Match[str]") -> Answer | None:
    """The tensors of a line that raised by itself."""
    found = live.tensors_in_line() if not isinstance(live.statement(), ast.Raise | ast.Assert) else []
    listed = [f"{path} {shape(one)} {dtype(one)} on {one.device}" for path, one in found[:5]]
    return answer(listed=", ".join(listed), tensor=", ".join(listed)) if listed else None
