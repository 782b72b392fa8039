"""Crashes of shapes and indices: which module expects what, and which tensor does not have it."""

import ast
import re
from typing import Any

import torch

from anybatch.doctor.crashing.crashkinds import Told, kind, quoted, shape
from anybatch.doctor.crashing.crashlive import Live
from anybatch.doctor.crashing.crashplaces import parties
from anybatch.doctor.crashing.crashsource import loads


def _input(live: Live, module: Any) -> tuple[str, Any]:
    """The tensor that a running module was given, and the user's name of it."""
    names = ("input", "x", "query", "hidden_states")
    frames = (frame for frame in reversed(live.frames) if frame.values.get("self") is module)
    found = next((frame.values[name] for frame in frames for name in names if name in frame.values), None)
    if isinstance(found, torch.Tensor):
        return next((path for path, one, _ in live.named() if one is found), "its input"), found
    return "its input", None


@kind(r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)", r"size mismatch, got \d+, \d+x\d+")
def linear_shapes(live: Live, match: "re.Match[str]") -> Told | None:
    """Tells which linear layer got how many features."""
    module = next((m for m in live.running() if isinstance(m, torch.nn.Linear)), None)
    if module is None:
        return _of_two(live)
    name = live.module_name(module) or "the Linear"
    path, given = _input(live, module)
    if given is None:
        return None
    features = given.shape[-1]
    bias = ", bias=False" if module.bias is None else ""
    own = f"{name} = nn.Linear({features}, {module.out_features}{bias})"
    flatten = ""
    if given.dim() > 2 and given[0].numel() == module.in_features:
        flatten = f"{path}.flatten(1)  # {list(given.shape[1:])} becomes {module.in_features}"
    elif given.dim() > 1 and given.shape[-2] == module.in_features:
        flatten = f"{path}.transpose(-1, -2), if its last two dims are the wrong way round; or {own}"
    return Told(
        name="SHAPE_MISMATCH",
        message=f"{name} is a Linear of {module.in_features} input features, but {quoted(path)} {shape(given)} has "
        f"{features}.",
        cause="What is before the layer gives another number of features than its in_features, for an input of another "
        "size, or for a flatten that is missing or wrong.",
        fix=flatten or own,
        module=live.module_name(module),
        parameters=tuple(filter(None, [live.parameter_name(module.weight)])),
        tensor=f"{path} {shape(given)}",
        evidence={"in_features": module.in_features, "got": features, "input": list(given.shape)},
    )


@kind(
    r"Given groups=\d+, weight of size .* expected input.* to have (\d+) channels, but got (\d+) channels",
    r"Expected \dD \(unbatched\) or \dD \(batched\) input to",
    r"Given normalized_shape=.*expected input with shape",
    r"input\.size\(-1\) must be equal to input_size\. Expected (\d+), got (\d+)",
    r"running_mean should contain (\d+) elements not (\d+)",
    r"^expected \dD (?:or \dD )*input \(got \dD input\)",
    r"^(?:Expected number of channels|Expected more than 1 spatial element|Kernel size can't be greater)",
    r"^(?:was expecting embedding dimension|embed_dim must be divisible)",
    r"^(?:RNN|LSTM|GRU): Expected input to be|^Expected hidden(?:\[\d\])? size",
)
def layer_shapes(live: Live, _: Any) -> Told | None:
    """Tells which layer expects which shape."""
    module = live.module()
    if module is None or not type(module).__module__.startswith("torch.nn"):
        return None
    name, cls = live.module_name(module), type(module).__name__
    path, given = _input(live, module)
    said = repr(module)[:100] if not list(module.children()) else cls
    got = f" {shape(given)}" if given is not None else ""
    channels = given.shape[-3] if given is not None and given.dim() >= 3 and "Conv2d" in cls else None
    if channels is None and given is not None and given.dim() >= 2:
        channels = given.shape[-1] if cls in ("RNN", "LSTM", "GRU", "LayerNorm") else given.shape[1]
    first = {"LayerNorm": "normalized_shape", "RNN": "input_size", "LSTM": "input_size", "GRU": "input_size"}
    option = first.get(cls, "in_channels" if "Conv" in cls else "num_features")
    wanted = getattr(module, option, None)
    wanted = list(wanted) if isinstance(wanted, tuple) else wanted
    dims = re.search(r"got input of size: \[|got \dD", live.text)
    fix = f"{option}={channels} in {name or cls}; or give {path} another shape"
    if dims:
        fix = f"{path}.unsqueeze(...) or .flatten(...), so that it has the dims that {cls} expects"
    return Told(
        name="SHAPE_MISMATCH",
        message=f"{name or 'a layer'}, {said}, can't take {quoted(path)}{got}: {live.text.splitlines()[0][:200]}",
        cause=f"The layer was made for {option} = {wanted}.",
        fix=fix,
        module=name,
        parameters=tuple(n for p in module.parameters(recurse=False) if (n := live.parameter_name(p))),
        tensor=f"{path}{got}",
        evidence={option: wanted, "input": list(given.shape) if given is not None else []},
    )


@kind(r"^Expected more than 1 value per channel when training, got input size")
def one_value(live: Live, _: Any) -> Told | None:
    """Tells which batch norm got one value."""
    module = live.module()
    if module is None:
        return None
    name, (path, given) = live.module_name(module), _input(live, module)
    loader = _loader(live)
    fix = f"{name or 'the norm layer'}: use GroupNorm or LayerNorm, or give it more than one sample"
    if loader is not None:
        variable, rows, size = loader
        left = rows % size if size else 0
        tail = f" ({rows} samples, {left} in the last batch)" if left else ""
        fix = f"{variable} = DataLoader(..., batch_size={size}, drop_last=True){tail}"
    return Told(
        name="BN_ONE_VALUE",
        message=f"{name or type(module).__name__} is a {type(module).__name__} in training mode and got "
        f"{shape(given) if given is not None else 'a batch'}: one value per channel has no variance.",
        cause="The batch has one sample, mostly the last one of an epoch.",
        fix=fix,
        module=name,
        tensor=f"{path} {shape(given) if given is not None else ''}".strip(),
        evidence={"input": list(given.shape) if given is not None else []},
    )


def _loader(live: Live) -> tuple[str, int, int] | None:
    for frame in reversed(live.users):
        for name, value in frame.values.items():
            if isinstance(value, torch.utils.data.DataLoader) and value.batch_size and not value.drop_last:
                try:
                    rows = len(value.dataset)  # type: ignore[arg-type]
                except (TypeError, NotImplementedError):
                    continue
                if rows % value.batch_size == 1:
                    return name, rows, value.batch_size
    return None


@kind(r"^Target (-?\d+) is out of bounds")
def target_out_of_range(live: Live, match: "re.Match[str]") -> Told | None:
    """Tells the classes that there are and the labels that came."""
    target, scores = live.local("cross_entropy", "target"), live.local("cross_entropy", "input")
    if target is None:
        target, scores = live.local("nll_loss", "target"), live.local("nll_loss", "input")
    if not isinstance(target, torch.Tensor) or not isinstance(scores, torch.Tensor):
        return None
    classes = scores.shape[1] if scores.dim() > 1 else scores.shape[0]
    low, high = int(target.min()), int(target.max())
    name = next((path for path, one, _ in live.named() if one is target), "target")
    module, layer = _last_linear(live, classes)
    if low >= 1 and high == classes:
        fix = f"{name} = {name} - 1  # labels begin at 0"
    elif low < 0:
        fix = f"{name}: labels below 0 are only allowed as ignore_index, which is -100 unless given: ignore_index={low}"
    else:
        fix = f"{layer or 'the last layer'}: out_features={high + 1}; or remove labels above {classes - 1}"
    return Told(
        name="INDEX_OUT_OF_RANGE",
        message=f"{quoted(name)} has labels from {low} to {high}, but the scores are for {classes} classes, "
        f"0 to {classes - 1}.",
        cause=f"The label {match.group(1)} has no score.",
        fix=fix,
        module=module,
        tensor=f"{name} {shape(target)}",
        evidence={"classes": classes, "low": low, "high": high},
    )


def _last_linear(live: Live, classes: int) -> tuple[str, str]:
    live.module_name(None)
    found = ""
    for root in live.roots.values():
        for module in root.modules():
            if getattr(module, "out_features", getattr(module, "out_channels", None)) == classes:
                found = live.module_name(module)
    return found, found


@kind(r"^index out of range in self", r"^index -?\d+ is out of bounds for dimension \d+ with size \d+")
def index_out_of_range(live: Live, _: Any) -> Told | None:
    """Tells how many rows an embedding has and the largest index."""
    ids, weight = live.local("embedding", "input"), live.local("embedding", "weight")
    if not isinstance(ids, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return _plain_index(live)
    module = next((m for m in live.running() if isinstance(m, torch.nn.Embedding)), None)
    name = live.module_name(module) if module is not None else live.parameter_name(weight).rpartition(".")[0]
    path = next((path for path, one, _ in live.named() if one is ids), "its input")
    low, high = int(ids.min()), int(ids.max())
    positions = "position" in name.lower() or name.lower().endswith(("wpe", "pos", "pos_emb"))
    fix = f"{name or 'the embedding'}: nn.Embedding({high + 1}, {weight.shape[1]}), or keep {path} below {len(weight)}"
    if positions:
        fix = f"Cut the sequences to {len(weight)} tokens, or nn.Embedding({high + 1}, {weight.shape[1]}) for {name}"
    elif low < 0:
        fix = f"{path}.clamp(min=0), or a padding index that is not negative"
    return Told(
        name="INDEX_OUT_OF_RANGE",
        message=f"{quoted(path)} has indices from {low} to {high}, but {name or 'the embedding'} has {len(weight)} "
        f"rows, 0 to {len(weight) - 1}.",
        cause="The vocabulary (tokenizer) is larger than the embedding."
        if not positions
        else "The input is longer than the table of positions.",
        fix=fix,
        module=name,
        parameters=tuple(filter(None, [live.parameter_name(weight)])),
        tensor=f"{path} {shape(ids)}",
        evidence={"rows": len(weight), "low": low, "high": high},
    )


def _plain_index(live: Live) -> Told | None:
    frame = live.user
    statement = live.statement(frame)
    if frame is None or statement is None:
        return None
    for node in ast.walk(statement):
        if isinstance(node, ast.Subscript):
            tensor = live.value(frame, node.value)
            if isinstance(tensor, torch.Tensor):
                path = ast.unparse(node.value)
                return Told(
                    name="INDEX_OUT_OF_RANGE",
                    message=f"{quoted(ast.unparse(node))}: {live.text}; {path} is {shape(tensor)}.",
                    cause="The index is not smaller than the size of that dim.",
                    fix=f"Keep the index below the size: {path}.shape is {shape(tensor)}",
                    tensor=f"{path} {shape(tensor)}",
                )
    return None


@kind(
    r"^The size of tensor a \(\d+\) must match the size of tensor b \(\d+\)",
    r"^shape '\[.*\]' is invalid for input of size \d+",
    r"^view size is not compatible with input tensor's size and stride",
    r"^Sizes of tensors must match except in dimension",
    r"^Expected input batch_size \(\d+\) to match target batch_size \(\d+\)",
    r"^Using a target size \(.*\) that is different to the input size",
    r"^Target size \(.*\) must be the same as input size",
    r"^(?:Expected size for first two dimensions of batch2|batch1 and batch2 must|self must be a matrix|mat2 must be)",
    r"^(?:expand\(|The expanded size of the tensor)",
    r"^(?:einsum\(\)|dot : expected|inconsistent tensor size|size mismatch, (?!for))",
    r"^all elements of input should be between 0 and 1|^Assertion `input_val >= zero && input_val <= one`",
    r"^mask_fill|^Expected 2D array|^too many values to unpack|^tensors? used as indices must be",
)
def tensors_do_not_fit(live: Live, _: Any) -> Told | None:
    """Tells the shapes of the tensors in the line that failed."""
    return _of_two(live)


def _of_two(live: Live) -> Told | None:
    frame = live.user
    if frame is None:
        return None
    shapes = {party.name: list(party.tensor.shape) for party in parties(live)}
    for path in loads(live.statement(frame)):
        value = live.value(frame, ast.parse(path, mode="eval").body)
        if isinstance(value, torch.Tensor):
            shapes.setdefault(path, list(value.shape))
    if not shapes:
        return None
    listed = ", ".join(f"{name} {size}" for name, size in list(shapes.items())[:4])
    code = live.code(frame)
    names = list(shapes)
    return Told(
        name="SHAPE_MISMATCH",
        message=f"{quoted(code)}: {live.text.splitlines()[0][:200].rstrip('.')}; {listed}.",
        cause=_cause(live.text),
        fix=_fix(live.text, code, names, shapes),
        module=live.module_name(live.module()),
        tensor=listed,
        evidence={"shapes": shapes},
    )


def _cause(text: str) -> str:
    if text.startswith("view size"):
        return "The tensor is not contiguous, as after transpose or permute, and view can't copy."
    if text.startswith("all elements of input"):
        return "Binary cross entropy takes probabilities, and was given scores."
    if "batch_size" in text:
        return "The predictions and the targets have another number of rows, often for a view with -1 that joins dims."
    if "target size" in text.lower():
        return "The predictions have a dim of size 1 that the targets do not have, or the other way round."
    return "The sizes of the dims that are combined differ."


def _fix(text: str, code: str, names: list[str], shapes: dict[str, list[int]]) -> str:
    if text.startswith("view size"):
        return code.replace(".view(", ".reshape(")
    if text.startswith("all elements of input"):
        return code.replace("binary_cross_entropy(", "binary_cross_entropy_with_logits(").replace(
            "BCELoss(", "BCEWithLogitsLoss("
        )
    target = next((name for name, size in shapes.items() if [*size, 1] in shapes.values()), "")
    if target:
        return f"{target} = {target}.unsqueeze(-1)"
    return f"Print the shapes of {', '.join(names[:3])} before this line, and bring the differing dim into agreement."
