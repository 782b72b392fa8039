"""Crashes of memory, processes, modes and gradients that are not there."""

import ast
import re
from typing import Any

import torch

from anybatch.accelerators import in_use, memory_of
from anybatch.doctor.crashing.crashkinds import Told, kind, origin, quoted, shape
from anybatch.doctor.crashing.crashlive import Live
from anybatch.doctor.crashing.crashsource import called, loads
from anybatch.doctor.graphs import nodes_behind

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@kind(
    r"^(?:CUDA|HIP|XPU|MPS backend) out of memory",
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
    r"^Allocation on device .* would exceed allowed memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
    r"^\[enforce fail at .*alloc_cpu",
)
def out_of_memory(live: Live, _: Any) -> Told:
    """Tells what held the memory, by category."""
    held = _held(live)
    wanted = _wanted(live.text)
    largest = max((name for name in held if name != "device"), key=lambda name: held[name], default="")
    rows = next((one.shape[0] for _, one, _ in live.named() if one.dim() and not one.requires_grad), 0)
    frame = live.user
    module = live.module_name(live.module())
    parts = ", ".join(f"{name} {_bytes(size)}" for name, size in held.items() if size and name != "device")
    return Told(
        name="OUT_OF_MEMORY",
        message=f"{quoted(live.code(frame)) if frame else 'The script'} asked for {_bytes(wanted)} more than there "
        f"was{f'; alive were {parts}' if parts else ''}.",
        cause=f"Of what is known, {largest} hold the most; what the graph keeps for the backward grows with the batch."
        if largest else "What the graph keeps for the backward grows with the batch.",
        fix="anybatch plan finds what fits; then: step = anybatch.TrainStep(model, loss_fn, optimizer, memory=\"...\") "
        "trains the same batch with the same gradient in that memory",
        module=module,
        evidence={"wanted": wanted, **held, "rows": rows, "device": _device(live)},
    )  # fmt: skip


def _wanted(text: str) -> int:
    tried = re.search(r"Tried to allocate ([\d.]+) ([KMGT]?)i?B", text)
    if tried:
        return int(float(tried[1]) * _UNITS[tried[2]])
    plain = re.search(r"you tried to allocate (\d+) bytes", text)
    return int(plain[1]) if plain else 0


def _device(live: Live) -> str:
    return next((str(one.device) for one in live.parameters().values()), "cpu")


def _held(live: Live) -> dict[str, int]:
    """Bytes by category, each storage once; what the graph keeps is not gone through, since that may need memory."""
    seen: set[int] = set()

    def size(tensors: Any) -> int:
        total = 0
        for one in tensors:
            if isinstance(one, torch.Tensor) and not one.is_meta and one.layout is torch.strided:
                key = one.untyped_storage().data_ptr()
                if key and key not in seen:
                    seen.add(key)
                    total += one.untyped_storage().nbytes()
        return total

    own = list(live.parameters().values())
    held = {"parameters": size(own), "gradients": size(p.grad for p in own if p.is_leaf)}
    optimizers = [v for f in live.users for v in f.values.values() if isinstance(v, torch.optim.Optimizer)]
    states = (value for one in optimizers for state in one.state.values() for value in state.values())
    held["optimizer states"] = size(states)
    named = list(live.named())
    held["tensors with a graph"] = size(one for _, one, _ in named if one.requires_grad)
    held["other tensors"] = size(one for _, one, _ in named)
    if devices := in_use():
        counted = memory_of(devices[0])
        held |= {"allocated": counted.allocated, "reserved": counted.reserved}
    return held


def _bytes(size: int) -> str:
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes" if size else "memory"


@kind(
    r"^Inference tensors cannot be saved for backward",
    r"^Inplace update to inference tensor outside InferenceMode",
    r"^Setting requires_grad=True on inference tensor",
    r"^Cannot set version_counter for inference tensor",
)
def inference_tensor(live: Live, _: Any) -> Told | None:
    """Tells which tensor was made in inference mode."""
    frame = live.user
    parameter = next((name for name, one in live.parameters().items() if one.is_inference()), "")
    found = [(path, one) for path, one, _ in live.named() if one.is_inference()]
    in_line = set(loads(live.statement(frame))) if frame is not None else set()
    found.sort(key=lambda entry: entry[0] not in in_line)
    if parameter:
        return Told(
            name="INFERENCE_TENSOR",
            message=f"The parameter {parameter} was made in inference mode, and can't be trained.",
            cause="Tensors that are made under torch.inference_mode() never take part in autograd.",
            fix="Make the model outside of torch.inference_mode().",
            module=parameter.rpartition(".")[0],
            parameters=(parameter,),
            tensor=parameter,
        )
    if not found:
        return None
    path, tensor = found[0]
    line = _inference_line(live)
    return Told(
        name="INFERENCE_TENSOR",
        message=f"{quoted(path)} {shape(tensor)} was made in inference mode, and is used where autograd is on.",
        cause="Tensors that are made under torch.inference_mode() can't be saved for a backward.",
        fix=f"torch.no_grad() instead of torch.inference_mode() where {path} is made; or {path} = {path}.clone()",
        module=live.module_name(live.module()),
        tensor=f"{path} {shape(tensor)}",
        evidence=line,
    )


def _inference_line(live: Live) -> dict[str, Any]:
    for frame in reversed(live.users):
        source = live.source(frame)
        for node in () if source is None else ast.walk(source.tree):
            if source is not None and isinstance(node, ast.Call) and called(node) == "inference_mode":
                return origin(frame.file, node.lineno, source.text(node.lineno))
    return {}


@kind(
    r"^'NoneType' object has no attribute",
    r"^unsupported operand type\(s\) for .*NoneType",
    r"^'NoneType' object is not (?:subscriptable|callable|iterable)",
    r"received an invalid combination of arguments.*NoneType|must be Tensor, not NoneType",
)
def gradient_is_none(live: Live, _: Any) -> Told | None:
    """Tells why a tensor has no gradient, where the line reads one."""
    frame = live.user
    statement = None if frame is None else live.statement(frame)
    if frame is None or statement is None:
        return None
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Load):
            tensor = live.value(frame, node.value)
            if isinstance(tensor, torch.Tensor) and (not tensor.is_leaf or tensor.grad is None):
                return _no_gradient(live, ast.unparse(node.value), tensor, live.code(frame))
    return None


def _no_gradient(live: Live, path: str, tensor: torch.Tensor, code: str) -> Told:
    name = live.parameter_name(tensor)
    shown = quoted(path) + (f" ({name})" if name and name != path else "")
    guard = f"if {path}.grad is not None:\n    {code}"
    if not tensor.is_leaf and tensor.grad_fn is not None:
        made = tensor.grad_fn.name()
        cause = f"It is no leaf: it is the result of {made}, and a backward keeps gradients of leaves only."
        fix = f"{path} = {path}.detach().requires_grad_()  # where it is made; or {path}.retain_grad()"
    elif not tensor.requires_grad:
        cause, fix = "Its requires_grad is False.", f"{path}.requires_grad_()  # or: {guard}"
    else:
        cause = "No backward has reached it: the loss does not depend on it, or the gradients were cleared, or there "
        cause += "was no backward."
        fix = guard
    return Told(
        name="TENSOR_MISUSED",
        message=f"{shown} has no gradient: {path}.grad is None.",
        cause=cause,
        fix=fix,
        module=name.rpartition(".")[0],
        parameters=(name,) if name else (),
        tensor=f"{name or path} {shape(tensor)}",
        evidence={"is_leaf": tensor.is_leaf, "requires_grad": tensor.requires_grad},
    )


@kind(
    r"^The differentiated Tensor at index (\d+) appears to not have been used in the graph",
    r"^One of the differentiated Tensors appears to not have been used in the graph",
    r"^One of the differentiated Tensors does not require grad",
)
def unused_input(live: Live, match: "re.Match[str]") -> Told | None:
    """Tells which tensor the value does not depend on."""
    given = live.local("grad", "inputs")
    given = (given,) if isinstance(given, torch.Tensor) else tuple(given or ())
    if match.groups():
        tensor = given[number] if (number := int(match.group(1))) < len(given) else None
    else:
        tensor = next((one for one in given if not one.requires_grad), _unused(live, given))
    name = live.name_of(tensor) if tensor is not None else ""
    return Told(
        name="TENSOR_MISUSED",
        message=f"{quoted(name) or 'A tensor'} is asked for its gradient, but the value does not depend on it.",
        cause="It is not used in the forward, or was detached, or another tensor of the same values was used.",
        fix=f"Use {name or 'it'} in the forward; or torch.autograd.grad(..., allow_unused=True) if that may be.",
        parameters=tuple(filter(None, [live.parameter_name(tensor)])) if tensor is not None else (),
        tensor=name,
    )


def _unused(live: Live, given: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """The first input of which the outputs do not depend; torch 2.6 does not say which one it is."""
    outputs = live.local("grad", "outputs")
    nodes = nodes_behind((outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs or ()))
    leaves = {id(leaf) for node in nodes if (leaf := getattr(node, "variable", None)) is not None}
    return next((one for one in given if id(one) not in leaves and one.grad_fn not in nodes), None)


@kind(r"^Function '(\w+)' returned nan values in its (\d+)th output")
def nan_in_backward(live: Live, match: "re.Match[str]") -> Told:
    """Tells which operation's gradient was not a number."""
    op = match.group(1)
    plain = re.sub(r"Backward\d*$", "", op).lower()
    frame = live.user
    source = live.source(frame) if frame is not None else None
    at: dict[str, Any] = {}
    for node in () if source is None or frame is None else ast.walk(source.tree):
        if source is not None and frame is not None and isinstance(node, ast.Call) and called(node) == plain:
            at = origin(frame.file, node.lineno, source.text(node.lineno))
    hints = {"sqrt": "torch.sqrt(x + 1e-12)", "norm": "(x.pow(2).sum() + 1e-12).sqrt()", "log": "x.clamp(min=1e-12)",
             "div": "the divisor + 1e-12", "pow": "x.clamp(min=1e-12)", "acos": "x.clamp(-1 + 1e-6, 1 - 1e-6)",
             "linalgvectornorm": "(x.pow(2).sum() + 1e-12).sqrt()"}  # fmt: skip
    where = f" in {quoted(at['origin_code'])}" if at else ""
    return Told(
        name="NAN_IN_BACKWARD",
        message=f"The gradient of {plain}{where} is not a number.",
        cause=f"The derivative of {plain} is infinite at one of its inputs, and infinity times zero is not a number.",
        fix=f"Keep its input away from there: {hints.get(plain, 'clamp it, or add a small number')}",
        tensor=op,
        evidence={"op": op, **at},
    )


@kind(
    r"torch\.utils\.checkpoint: (?:A different number|Recomputed values|Unpack is being triggered|trying to save)",
)
def recomputed_otherwise(live: Live, _: Any) -> Told:
    """Tells that a checkpoint computed something else the second time."""
    return Told(
        name="CKPT_CHANGED",
        message="A checkpointed part computed something else when it was run again for the backward: "
        f"{live.text.splitlines()[0].partition(': ')[2]}",
        cause="It depends on something that changes between forward and backward: a counter, a mode, a global flag, "
        "random numbers of Python or numpy, autocast, or weights that were stepped.",
        fix="Make what runs in the checkpoint depend on its arguments alone; "
        "torch.utils.checkpoint.set_checkpoint_debug_enabled(True) shows the operations that differ.",
        evidence={"text": live.text[:500]},
    )


@kind(r"Expected to mark a variable ready only once")
def ready_twice(live: Live, _: Any) -> Told:
    """Tells which parameter was used twice under DistributedDataParallel."""
    name = re.search(r"Parameter at index (\d+) (?:with name (\S+) )?has been marked", live.text)
    shown = (name[2] or f"number {name[1]}") if name else ""
    return Told(
        name="DDP_READY_TWICE",
        message=f"DistributedDataParallel saw the gradient of {shown or 'a parameter'} twice in one backward.",
        cause="The parameter is used in several forwards of the wrapper before one backward, in a reentrant "
        "checkpoint, or shared between two checkpoints.",
        fix="checkpoint(..., use_reentrant=False); one forward of the wrapper for each backward; "
        "or DistributedDataParallel(..., static_graph=True)",
        parameters=(shown.rstrip("."),) if shown else (),
        module=shown.rpartition(".")[0],
    )


@kind(r"^Expected to have finished reduction in the prior iteration")
def not_finished(live: Live, _: Any) -> Told:
    """Tells which parameters got no gradient under DistributedDataParallel."""
    missing = [name for name, one in live.parameters().items() if one.requires_grad and one.grad is None]
    listed = f": {', '.join(missing[:5])}" if missing else ""
    return Told(
        name="DDP_UNFINISHED",
        message="Some parameters got no gradient in the step before, and DistributedDataParallel still waits for them"
        f"{listed}.",
        cause="Not all outputs of the model go into the loss, or some layers are not used in each step.",
        fix="Use all of them in the loss, freeze them, or DistributedDataParallel(..., find_unused_parameters=True)",
        parameters=tuple(missing[:50]),
        evidence={"missing": len(missing)},
    )


@kind(
    r"DataLoader worker \(pid.*\) (?:exited unexpectedly|is killed by signal)",
    r"^An attempt has been made to start a new process before|^Can't pickle local object|^Can't get local object",
    r"^DataLoader timed out after|^unable to mmap \d+ bytes|^unable to open shared memory|Too many open files",
    r"^Cannot re-initialize CUDA in forked subprocess",
)
def worker_died(live: Live, match: "re.Match[str]") -> Told:
    """Tells why a worker of a loader could not go on."""
    text = match.group()
    cause, fix = (
        "A worker ended without a traceback, mostly for a lack of memory or of /dev/shm, or in native code.",
        ("num_workers=0 shows its error; fewer workers or smaller batches need less memory"),
    )
    if "new process" in text or "local object" in text:
        cause = "Workers that are started anew import the script again, and get the data set by pickle."
        fix = (
            'Put what starts training under if __name__ == "__main__":, and functions of the data set at the top level'
        )
    elif "CUDA" in text:
        cause = "A forked process can't use CUDA after its parent has."
        fix = "Give the data set CPU tensors and move the batches in the loop; or multiprocessing_context='spawn'"
    elif "mmap" in text or "shared memory" in text or "open files" in text:
        cause, fix = (
            "Tensors go from workers through shared memory, which is used up.",
            ('torch.multiprocessing.set_sharing_strategy("file_system"), a larger /dev/shm, or fewer workers'),
        )
    return Told(
        name="WORKER_DIED",
        message=f"A worker of a DataLoader failed: {live.text.strip().splitlines()[0][:200]}",
        cause=cause,
        fix=fix,
    )


@kind(
    r"stack expects each tensor to be equal size, but got (\[[\d, ]*\]) at entry \d+ and (\[[\d, ]*\]) at entry (\d+)",
    r"each element in list of batch should be of equal size",
    r"[Tt]rying to resize storage that is not resizable",
)
def lengths_differ(live: Live, match: "re.Match[str]") -> Told:
    """Tells the sizes that could not be stacked."""
    sizes = list(match.groups()[:2]) if match.groups() else []
    collating = "collate" in live.text or any("collate" in frame.function for frame in live.frames)
    return Told(
        name="SHAPE_MISMATCH",
        message=f"{'The samples of a batch' if collating else 'The tensors of a list'} have different sizes"
        f"{f': {sizes[0]} and {sizes[1]}' if len(sizes) == 2 else ''}, and can't be stacked.",
        cause="The loader's default collate_fn stacks samples, which must be of one size."
        if collating else "torch.stack needs tensors of one shape.",
        fix="DataLoader(..., collate_fn=lambda rows: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)), or "
        "bring the samples to one size in the data set"
        if collating else "torch.nn.utils.rnn.pad_sequence(rows), or torch.cat(rows)",
        evidence={"sizes": sizes},
    )  # fmt: skip


@kind(r"device-side assert triggered|CUDA error: an illegal memory access")
def device_assert(live: Live, _: Any) -> Told:
    """Tells what mostly makes a GPU assert."""
    frame = live.user
    return Told(
        name="DEVICE_ASSERT",
        message="A kernel on the GPU met an index out of range; the line shown may be later than the one that did it"
        f"{f': {quoted(live.code(frame))}' if frame else ''}.",
        cause="Mostly a label that is not below the number of classes, or a token that is not below num_embeddings.",
        fix="Run once with CUDA_LAUNCH_BLOCKING=1, or on the CPU, where the index and the line are named.",
        module=live.module_name(live.module()),
    )


@kind(r"^cannot assign (\w+) before (\w+)\.__init__\(\) call")
def no_super(live: Live, match: "re.Match[str]") -> Told | None:
    """Tells which class does not call the constructor of Module."""
    frame = live.user
    own = frame.values.get("self") if frame is not None else None
    cls = type(own).__name__ if own is not None else "the module"
    return Told(
        name="MODULE_NOT_READY",
        message=f"{cls}.__init__ sets {quoted(live.code(frame)) if frame else 'an attribute'} before "
        "super().__init__().",
        cause="nn.Module makes its tables of parameters and modules in its constructor.",
        fix=f"super().__init__()  # the first line of {cls}.__init__",
        module=cls,
    )


@kind(r"^Weights only load failed")
def weights_only(live: Live, _: Any) -> Told:
    """Tells what a file holds besides tensors."""
    found = re.search(r"GLOBAL ([\w.]+)|Unsupported class ([\w.]+)", live.text)
    name = next(filter(None, found.groups()), "") if found else ""
    safe = f"torch.serialization.add_safe_globals([{name}])" if name else "torch.serialization.add_safe_globals([...])"
    return Told(
        name="STATE_NOT_LOADED",
        message=f"torch.load got a file that holds {quoted(name) or 'objects'} besides tensors.",
        cause="From torch 2.6 on torch.load reads tensors and plain values only, unless told otherwise.",
        fix=f"{safe} before it; or torch.load(..., weights_only=False) for a file that you trust",
        evidence={"holds": name},
    )


_DISTRIBUTION = (
    r"^Expected parameter (\w+) \(.*?\) of distribution (\w+)\(.* to satisfy the constraint "
    r"(\w+)\(?(?:lower_bound=([\d.e+-]+))?.*?, but found"
)
_INTO = {
    "GreaterThan": ("above {}", "torch.nn.functional.softplus({}) + 1e-5"),
    "GreaterThanEq": ("at least {}", "torch.nn.functional.softplus({})"),
    "Interval": ("between two limits", "torch.sigmoid({})"),
    "Simplex": ("not negative and of sum 1", "{}.softmax(-1)"),
    "Real": ("finite", ""),
    "IndependentConstraint": ("finite", ""),
}


@kind(_DISTRIBUTION)
def parameter_of_distribution(live: Live, match: "re.Match[str]") -> Told:
    """Tells which tensor a distribution was given that it can't take, and what made it."""
    parameter, distribution, constraint, bound = match.groups()
    value = live.local("__init__", "value")
    lost = isinstance(value, torch.Tensor) and bool(value.isnan().any())
    name = module = ""
    if isinstance(value, torch.Tensor):
        place = value.untyped_storage().data_ptr()
        same = (path for path, one, _ in live.named() if one.untyped_storage().data_ptr() == place)
        name, module = next(same, ""), _made_in(live, value)
    wanted, into = _INTO.get(constraint, ("what it takes", ""))
    wanted = wanted.format(f"{float(bound or 0):g}")
    least = f"; the smallest is {float(value.min()):.4g}" if isinstance(value, torch.Tensor) and not lost else ""
    return Told(
        name="DISTRIBUTION_PARAMETER",
        message=f"{distribution} was given a {parameter} that is not {'a number' if lost else wanted}"
        f"{f' ({quoted(name)}' + (f', made by {module}' if module else '') + ')' if name else ''}{least}.",
        cause="An earlier step or the data made it nan." if lost
        else f"The output of a layer can be any number; {distribution} takes a {parameter} that is {wanted}.",
        fix=f"{name or parameter} = {into.format(name or parameter)}" if into and not lost
        else f"look where {name or parameter} became nan: torch.autograd.set_detect_anomaly(True)",
        module=module,
        tensor=name,
        evidence={"distribution": distribution, "parameter": parameter, "constraint": constraint},
    )  # fmt: skip


def _made_in(live: Live, value: torch.Tensor) -> str:
    """The module whose parameter is the nearest behind a tensor."""
    own = {id(one): name for name, one in live.parameters().items()}
    for node in nodes_behind([value]):
        if hasattr(type(node), "variable") and id(node.variable) in own:
            return own[id(node.variable)].rpartition(".")[0]
    return ""
