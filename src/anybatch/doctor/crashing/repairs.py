"""What a failing call may need: each repair is tried by running the call again, and the first that works is told."""

import inspect
import itertools
import operator
import re
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from anybatch.doctor.crashing.calls import ELEMENTWISE, Call, Operand, copied, on_cpu, tensors_of

_SECONDS = 5.0
_TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag)
SIZES = (
    "in_features", "in_channels", "input_size", "num_channels", "num_features", "normalized_shape", "num_embeddings",
    "in1_features", "in2_features", "hidden_size", "embed_dim",
)  # fmt: skip
"""Options of layers that say how large their input is."""


class Edit(NamedTuple):
    """A change to one operand."""

    kind: str  # ``"dtype"``, ``"shape"``, ``"value"`` or ``"device"``
    text: str  # the operand, changed; ``{}`` is what the user calls it
    change: Callable[[Any], Any]  # does it; ``None`` from it is no change


class Repair(NamedTuple):
    """A change that makes the call work."""

    kind: str  # of its edits; or "layer", "mode", "classes", "switch", "name", "function", "number", "out of place"
    edits: tuple[tuple[Operand, Edit], ...] = ()  # operands with their change
    option: tuple[str, Any] = ("", None)  # what is changed besides operands, with its new value
    left: str = ""  # what the call fails with now, of a change that is one of several that are needed


Candidate = tuple[Repair, Callable[[], Any]]


DTYPES = tuple(
    Edit("dtype", f"{{}}.{text}", partial(torch.Tensor.to, dtype=kind)) for text, kind in (
        ("long()", torch.long), ("float()", torch.float32), ("bool()", torch.bool), ("double()", torch.float64),
        ("half()", torch.float16), ("to(torch.bfloat16)", torch.bfloat16),
    )
)  # fmt: skip
COMPLEX = (
    Edit("dtype", "{}.abs()", torch.abs),
    Edit("dtype", "torch.view_as_real({}).flatten(-2)", lambda one: torch.view_as_real(one).flatten(-2)),
)
SHAPES = tuple(
    Edit("shape", f"{{}}{text}", change) for text, change in (
        (".squeeze(1)", lambda one: one.squeeze(1) if one.shape[1] == 1 else None),
        (".squeeze(-1)", lambda one: one.squeeze(-1) if one.shape[-1] == 1 else None),
        (".unsqueeze(-1)", lambda one: one.unsqueeze(-1)),
        (".permute(0, 3, 1, 2)", lambda one: one.permute(0, 3, 1, 2)),
        (".permute(2, 0, 1)", lambda one: one.permute(2, 0, 1)),
        (".permute(0, 4, 1, 2, 3)", lambda one: one.permute(0, 4, 1, 2, 3)),
        (".transpose(-2, -1)", lambda one: one.transpose(-2, -1)),
        (".transpose(1, 2)", lambda one: one.transpose(1, 2)),
        (".transpose(0, 1)", lambda one: one.transpose(0, 1)),
        (".unsqueeze(1)", lambda one: one.unsqueeze(1)),
        (".unsqueeze(0)", lambda one: one.unsqueeze(0)),
        (".squeeze()", lambda one: one.squeeze() if 1 in one.shape else None),
        (".flatten(1)", lambda one: one.flatten(1) if one.dim() > 2 else None),
        (".flatten(0, 1)", lambda one: one.flatten(0, 1) if one.dim() > 1 else None),
        ("[:, None, None, :]", lambda one: one[:, None, None, :] if one.dim() == 2 else None),
        (".contiguous()", lambda one: None if one.is_contiguous() else one.contiguous()),
    )
)  # fmt: skip
VALUES = tuple(
    Edit("value", text, change) for text, change in (
        ("~{}", lambda one: ~one if one.dtype == torch.bool else None),
        ("{} - 1", lambda one: one - 1 if not one.is_floating_point() and int(one.min()) == 1 else None),
        ("{}.clamp(min=0)", lambda one: one.clamp(min=0) if not one.is_floating_point() and one.min() < 0 else None),
        ("{}.detach().requires_grad_()", lambda one: None if one.is_leaf else one.detach().requires_grad_()),
        ("{}.detach()", lambda one: one.detach() if one.requires_grad else None),
        ("{}.cpu()", lambda one: one.cpu() if one.device.type != "cpu" else None),
    )
)  # fmt: skip
CLASSES = Edit("value", "{}.argmax(1)", lambda one: one.argmax(1) if one.dim() > 1 else None)
DOMAINS = (
    (r"GreaterThan", Edit("value", "torch.nn.functional.softplus({}) + 1e-5", functional.softplus)),
    (r"probability tensor|Simplex|Categorical", Edit("value", "{}.softmax(-1)", lambda one: one.softmax(-1))),
    (r"Interval|Boolean|between 0 and 1", Edit("value", "torch.sigmoid({})", torch.sigmoid)),
)
"""For errors about the range of values, what brings any number into it."""
OTHERS = tuple(
    Edit("value", text, change) for text, change in (
        ("{}()", lambda one: one() if inspect.ismethod(one) or inspect.isclass(one) else None),
        ("torch.from_numpy({})", torch.from_numpy),
        ("{}[0]", lambda one: one[0] if isinstance(one, list | tuple) else None),
        ("torch.stack({})", lambda one: torch.stack(list(one))),
        ("torch.tensor({})", lambda one: None if isinstance(one, torch.nn.Module) else torch.tensor(one)),
        ("{}.values()", lambda one: one.values() if isinstance(one, dict) else None),
        ("int({})", lambda one: int(one) if isinstance(one, float) else None),
    )
)  # fmt: skip
_FUNCTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "view": ("reshape", torch.Tensor.reshape),
    "item": ("mean().item", lambda one: one.mean().item()),
    "binary_cross_entropy": ("binary_cross_entropy_with_logits", functional.binary_cross_entropy_with_logits),
    "BCELoss": ("BCEWithLogitsLoss", functional.binary_cross_entropy_with_logits),
    "stack": ("nn.utils.rnn.pad_sequence", torch.nn.utils.rnn.pad_sequence),
}
"""Other functions of the same operands."""


def working_repairs(call: Call, hint: str, text: str) -> Iterator[Repair]:
    """The repairs that make a call work, the likeliest first, by the finding that the words of its error hint at."""
    end, halfway = time.monotonic() + _SECONDS, None
    if not call.is_small() or (not call.writes and isinstance(_outcome(call.run), str) is False):
        return  # it does not fail by itself, so that nothing would be shown by another one that does not
    for repair, run in _candidates(call, hint, text):
        if time.monotonic() > end:
            break
        result = _outcome(run)
        if not isinstance(result, str):
            if _is_sensible(call, repair, result):
                yield repair
        elif (
            halfway is None
            and repair.kind == "dtype"
            and hint == "DTYPE_MISMATCH"
            and text[:30] not in result
            and "does not apply" not in result
            and not re.search("dtype|scalar type", result)
        ):
            halfway = repair._replace(left=result)
    if halfway is not None:
        yield halfway


def _outcome(run: Callable[[], Any]) -> Any:
    """What a call gives; the text of its error if it fails, or warns that its operands are broadcast."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="Using a target size")
        try:
            result = run()
        except Exception as error:  # noqa: BLE001 - a candidate may fail in any way
            return f"{type(error).__name__}: {error}"
    return None if isinstance(result, str) else result


def _candidates(call: Call, hint: str, text: str) -> Iterator[Candidate]:
    """The declared repairs with what tries them: layout and kind first, then layers and options, then pairs."""
    yield from _functions(call)
    # Targets, masks and indices come behind what they are for, and are asked first.
    free = [one for one in reversed(call.operands) if not isinstance(one.value, torch.nn.Parameter)]
    singles = [(one, edit) for one in free for edit in _edits(call, one, hint, text)]
    for one, edit in singles:
        yield _edited(call, (one, edit))
    yield from _more_classes(call)
    yield from _layers(call)
    yield from _resized(call, text)
    yield from _options(call)
    for (one, first), (other, second) in itertools.combinations(singles, 2):
        if one is other and {first.kind, second.kind} == {"shape", "dtype"}:
            yield _edited(call, *sorted(((one, first), (one, second)), key=lambda pair: pair[1].kind))
        elif one is not other and (first.kind == second.kind == "dtype" or (first is second and call.is_loss)):
            yield _edited(call, (one, first), (other, second))
    yield from _orders(call)


def _edits(call: Call, one: Operand, hint: str, text: str) -> list[Edit]:
    """What one operand may be changed to, the likeliest first."""
    value = one.value
    if isinstance(value, int) and not isinstance(value, bool):
        return _numbers(value, text)
    if not isinstance(value, torch.Tensor):
        plain = isinstance(value, str | bool | slice | torch.device | torch.dtype) or value is None
        return [] if plain else list(OTHERS)
    homes = [other.dtype for operand in call.operands if operand is not one for other in tensors_of(operand.value)]
    homes += [other.dtype for other in call.weights()]
    casts = list(COMPLEX) if value.is_complex() else [edit for edit in DTYPES if _keeps(edit, value)]
    alike = [edit for edit in casts if edit in COMPLEX or edit.change(torch.zeros(())).dtype in homes]
    casts = [*alike, *(edit for edit in casts if edit in DTYPES[:3] and edit not in alike)]
    if "mask" in f"{one.key} {one.text}":
        casts.sort(key=lambda edit: edit.text != "{}.bool()")
    values = [edit for pattern, edit in DOMAINS if value.is_floating_point() and re.search(pattern, text)]
    values += [*VALUES, *([CLASSES] if call.is_loss else [])]
    if hint == "DTYPE_MISMATCH":
        return [*casts, *SHAPES, *values]
    return [*SHAPES, *values, *casts] if hint == "SHAPE_MISMATCH" else [*values, *SHAPES, *casts]


def _keeps(edit: Edit, value: torch.Tensor) -> bool:
    """Whether a cast is to another dtype and loses nothing but digits behind the point."""
    value = on_cpu(value)
    cast = edit.change(value)
    return bool(cast.dtype != value.dtype and (cast.is_floating_point() or (cast.to(value.dtype) == value).all()))


def _constant(value: Any, _: Any) -> Any:
    return value


def _filled(size: tuple[int, ...], value: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_full(size, value)


def _numbers(value: int, text: str) -> list[Edit]:
    """Other numbers, for errors about a dim, a size or a divisor."""
    found: list[int] = []
    if re.search(r"Dimension out of range|is invalid for input of size", text):
        found = [-1]
    elif "divisib" in text:
        found = [value + sign * step for step in range(1, 9) for sign in (-1, 1) if value + sign * step > 0]
    return [Edit("number", str(other), partial(_constant, other)) for other in found]


def _edited(call: Call, *edits: tuple[Operand, Edit]) -> Candidate:
    def run() -> Any:
        changed: dict[Any, Any] = {}
        for one, edit in edits:
            value = edit.change(changed.get(one.key, one.value))
            if value is None:
                raise ValueError("the change does not apply")
            changed |= {other.key: value for other in call.operands if other.key == one.key or other.value is one.value}
        return call.run(changed)

    return Repair(edits[-1][1].kind, edits), run


def _functions(call: Call) -> Iterator[Candidate]:
    """Another function of the same operands: of a method in place the one that is not, of a class its object."""
    subject, name = call.subject, call.name
    of = call.operands[0] if call.operands else Operand(0, None)
    if call.function is operator.getitem and isinstance(of.value, torch.Tensor) and of.value.dim() == 0:
        yield Repair("number", option=(call.title, f"{of.text}.item()")), of.value.item
    if name in _FUNCTIONS:
        text, other = _FUNCTIONS[name]
        yield Repair("function", option=(name, text)), lambda: call.run(function=other)
    plain = getattr(torch.Tensor, name.removesuffix("_"), None)
    if call.writes and plain is not None:
        yield Repair("out of place", option=(name, name.removesuffix("_"))), lambda: call.run(function=plain)
    if inspect.isclass(subject) and issubclass(subject, torch.nn.Module):
        yield Repair("function", option=(call.title, f"{call.title}()")), lambda: call.run(function=subject())


def _resized(call: Call, text: str) -> Iterator[Candidate]:
    """A picture brought to the size of another one; states and lengths made for what the input and the error say."""
    tensors = [one for one in call.operands if isinstance(one.value, torch.Tensor)]
    for other, one in itertools.permutations(tensors[:3], 2):
        size = other.value.shape[2:]
        if 3 <= one.value.dim() <= 5 and size != one.value.shape[2:] and one.value.is_floating_point():
            change = f"torch.nn.functional.interpolate({{}}, size={other.text or 'other'}.shape[2:])"
            yield _edited(call, (one, Edit("size", change, partial(functional.interpolate, size=size))))
    for found in re.findall(r"[(\[]([\d, ]+)[)\]]", text):
        size = tuple(int(part) for part in found.split(",") if part.strip())
        states = [one for one in tensors if one.value.dim() == len(size) and f"got {list(one.value.shape)}" in text]
        rows = {
            len(one.value): f"{one.text}.size(0)"
            for one in tensors[:1]
            if one.text and one.value.dim() and one not in states
        }
        code = [rows.get(n, n) if states and n != states[0].value.shape[d] else n for d, n in enumerate(size)]
        made = Edit("size", f"torch.zeros({', '.join(map(str, code))})", partial(_filled, size, 0))
        if states:
            yield _edited(call, *((one, made) for one in states))
    for one in tensors:
        if one.value.dim() == 1 and not one.value.is_floating_point() and one.value.numel():
            most = int(one.value.max())
            others = {size for other in tensors if other is not one for size in other.value.shape}
            for rows in sorted(others - {len(one.value)}):
                new = Edit("size", f"torch.full(({rows},), {most})", partial(_filled, (rows,), most))
                yield _edited(call, (one, new))


def _layers(call: Call) -> Iterator[Candidate]:
    """The same layer made for what arrives, or in another mode."""
    module = call.subject
    if not isinstance(module, torch.nn.Module):
        return
    given = [one for operand in call.operands for one in tensors_of(operand.value)]
    sizes = [size for one in given for size in (one.shape[-1:] if one.dim() < 3 else one.shape[1:])]
    if isinstance(module, _TABLES):
        sizes = [int(one.max()) + 1 for one in given if one.numel() and not one.is_floating_point() and one.min() >= 0]
    changes: list[tuple[str, Any]] = []
    for name in SIZES if not isinstance(module, _TABLES) else ("num_embeddings",):
        before = getattr(module, name, None)
        if isinstance(before, int | tuple):
            changes += [(name, (size,) if isinstance(before, tuple) else size) for size in dict.fromkeys(sizes)]
    changes += [("padding", n) for n in range(1, 4) if isinstance(getattr(module, "padding", None), int | tuple)]
    changes += (
        [("batch_first", not module.batch_first)] if isinstance(getattr(module, "batch_first", None), bool) else []
    )
    for name, value in changes:
        if getattr(module, name) != value and (made := remade(module, {name: value})) is not None:
            yield Repair("layer", option=(name, value)), partial(call.run, function=made)
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training:
        yield Repair("mode"), lambda: call.run(function=copied(module).eval())


def _more_classes(call: Call) -> Iterator[Candidate]:
    """Scores for as many classes as the labels have."""
    tensors = [one for one in call.operands if isinstance(one.value, torch.Tensor)]
    if len(tensors) < 2 or not tensors[0].value.is_floating_point() or tensors[0].value.dim() < 2:
        return
    scores, labels = tensors[:2]
    largest = -1 if labels.value.is_floating_point() or not labels.value.numel() else int(labels.value.max())
    more = largest + 1 - scores.value.shape[1]
    if more > 0:
        wider = torch.cat([scores.value, scores.value[:, :1].expand(-1, more, *scores.value.shape[2:])], 1)
        yield Repair("classes", option=("classes", largest + 1)), lambda: call.run({scores.key: wider})


def remade(module: torch.nn.Module, changed: dict[str, Any]) -> Any:
    """A layer of the same class and options but for some; ``None`` if it can't be made."""
    names = set(inspect.signature(type(module).__init__).parameters) - {"self", "device", "dtype"}
    options = {name: getattr(module, name) for name in names if hasattr(module, name)}
    if "bias" in options and not isinstance(options["bias"], bool):
        options["bias"] = options["bias"] is not None
    weight = next(iter(module.parameters()), None)
    try:
        made = type(module)(**{**options, **changed})
        return made if weight is None else made.to(dtype=weight.dtype)
    except Exception:  # noqa: BLE001 - of options that do not go together
        return None


def _options(call: Call) -> Iterator[Candidate]:
    """A switch of the function the other way, or an operand under another name."""
    target = call.subject.forward if isinstance(call.subject, torch.nn.Module) else call.subject
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return
    names = list(parameters)
    taken = {names[one.key] if isinstance(one.key, int) and one.key < len(names) else one.key for one in call.operands}
    for given in call.operands:
        is_last = given is call.operands[-1] and isinstance(given.key, int) and given.key < len(names)
        was = names[given.key] if is_last else given.key
        for name, one in parameters.items() if isinstance(was, str) else ():
            if name not in taken and one.default is None and name.rpartition("_")[2] == was.rpartition("_")[2]:
                rest = [other for other in call.operands if other is not given]
                renamed = Call(call.function, call.title, [*rest, Operand(name, given.value)], call.subject)
                yield Repair("name", option=(given.key, name)), renamed.run
    for name, one in parameters.items():
        if isinstance(one.default, bool):
            before = next((given.value for given in call.operands if given.key == name), one.default)
            yield _switched(call, name, not before)
    labels = [one for one in tensors_of([one.value for one in call.operands]) if not one.is_floating_point()]
    for value in labels if "ignore_index" in parameters else ():
        if value.numel() and int(value.min()) < 0:
            yield _switched(call, "ignore_index", int(value.min()))


def _switched(call: Call, name: str, value: Any) -> Candidate:
    return Repair("switch", option=(name, value)), lambda: call.run({name: value})


def _orders(call: Call) -> Iterator[Candidate]:
    """Two operands that change places."""
    places = [one for one in call.operands if isinstance(one.key, int)]
    for first, second in itertools.combinations(places[:3], 2):
        yield _edited(call, *(
            (one, Edit("order", other.text, partial(_constant, other.value)))
            for one, other in ((first, second), (second, first))
        ))  # fmt: skip


def _is_sensible(call: Call, repair: Repair, result: Any) -> bool:
    """Whether what a repaired call gives is what was meant: one number of a loss, no shape that is only broadcast."""
    if not isinstance(result, torch.Tensor) or repair.kind == "classes":
        return True
    shapes = [one.value.shape for one in call.operands if isinstance(one.value, torch.Tensor)]
    if call.is_loss:
        return bool(result.dim() == 0 or result.shape in shapes) and bool(result.isfinite().all())
    return call.subject not in ELEMENTWISE or len(shapes) < 2 or result.shape in shapes
