"""What held the memory when there was no more: by category, and what the graph keeps by module and line."""

import ast
import re
from collections.abc import Iterable
from typing import Any

import torch

from anybatch.accelerators import in_use, memory_of
from anybatch.doctor.crashes import Answer, answer
from anybatch.doctor.crashing.carried import function_of
from anybatch.doctor.crashing.live import Live, whose
from anybatch.doctor.crashing.usercode import path_of
from anybatch.doctor.graphs import kept_by, leaf_of, nodes_behind
from anybatch.units import format_bytes

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MODULES = 5


def out_of_memory(live: Live, match: "re.Match[str]") -> Answer:
    """What held the memory, by category, module and line."""
    held = _held(live)
    modules = _by_module(live)
    tried = re.search(r"(?:Tried|Unable) to allocate ([\d.]+) ([KMGT]?)i?B", live.text)
    plain = re.search(r"[Tt]ried to allocate (\d+) bytes", live.text)
    wanted = int(float(tried[1]) * _UNITS[tried[2]]) if tried else int(plain[1]) if plain else 0
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items() if size)
    largest = max((name for name in held if name not in ("allocated", "reserved")), key=held.__getitem__)
    grows = "what the graph keeps for the backward grows with the batch"
    listed = [
        f"{name} {format_bytes(size)}{f' (line {line})' if line else ''}" for name, (size, line) in modules.items()
    ]
    if listed:
        grows += f": {', '.join(listed[:_MODULES])}{f', and {n} more' if (n := len(listed) - _MODULES) > 0 else ''}"
    named = (one.shape[0] for _, one, _ in live.named() if one.dim() and not one.requires_grad)
    return answer(
        wanted=format_bytes(wanted) if wanted else "memory", alive=f"; alive were {parts}" if parts else "",
        why=f"Of what is known, {largest} hold the most; {grows}." if held[largest] else f"W{grows[1:]}.",
        module=live.module_name(live.module()),
        evidence={
            "wanted": wanted, **held, "modules": {name: size for name, (size, _) in modules.items()},
            "rows": next(named, 0), "device": next((str(one.device) for one in live.parameters().values()), "cpu"),
        },
    )  # fmt: skip


def _held(live: Live) -> dict[str, int]:
    """Bytes by category, each storage once."""
    seen: set[int] = set()

    def size(tensors: Iterable[Any]) -> int:
        total = 0
        for one in tensors:
            if isinstance(one, torch.Tensor) and not one.is_meta and one.layout is torch.strided:
                key = one.untyped_storage().data_ptr()
                total += one.untyped_storage().nbytes() if key and key not in seen else 0
                seen.add(key)
        return total

    own = list(live.parameters().values())
    held = {"parameters": size(own), "gradients": size(p.grad for p in own if p.is_leaf)}
    optimizers = [v for f in live.users for v in f.values.values() if isinstance(v, torch.optim.Optimizer)]
    held["optimizer states"] = size(
        value for one in optimizers for state in one.state.values() for value in state.values()
    )
    named = list(live.named())
    kept = kept_by(_with_graph(live), {}, [*own, *(one for _, one, _ in named)])
    held["tensors with a graph"] = size(one for _, one, _ in named if one.requires_grad)
    held["other tensors"] = size(one for _, one, _ in named)
    held["kept by the graph"] = kept.bytes if kept is not None else 0
    if devices := in_use():
        counted = memory_of(devices[0])
        held |= {"allocated": counted.allocated, "reserved": counted.reserved}
    return held


def _with_graph(live: Live) -> list[torch.Tensor]:
    """Tensors in any frame whose graph is alive."""
    values = [one for frame in live.frames for one in list(frame.values.values())]
    return [one for one in values if isinstance(one, torch.Tensor) and one.grad_fn is not None]


def _by_module(live: Live) -> dict[str, tuple[int, int]]:
    """What the graph keeps, by the module whose parameter was used last before it; the user's line that runs it.

    Nothing is unpacked, since that may need memory.
    """
    own = {id(one): name.rpartition(".")[0] for name, one in live.parameters().items()}
    tensors, places = _with_graph(live), dict[Any, str]()
    for node in reversed(nodes_behind(tensors)):  # what made a tensor comes before what uses it
        inputs = [one for one, _ in node.next_functions if one is not None]
        nearest = [*inputs, *(one for given in inputs for one, _ in given.next_functions if one is not None)]
        leaves = (own.get(id(leaf_of(one)), "") for one in nearest)
        places[node] = next(filter(None, leaves), "") or next((places[one] for one in inputs if places.get(one)), "")
    kept = kept_by(tensors, places, live.parameters().values())
    found = {} if kept is None else {name: size for name, size in kept.modules.items() if name}
    return {name: (size, _line_of(live, name)) for name, size in found.items()}


def _line_of(live: Live, name: str) -> int:
    """The line of the user's forward that runs a module, or what it lies in; 0 if none is known."""
    line = 0
    for root in live.roots.values():
        owner: Any = root
        for part in name.split("."):
            source, scope = function_of(live, type(owner).forward)
            if source is not None and scope is not None and whose(source.file) == "user":
                uses = [one for one in ast.walk(scope) if path_of(one).startswith(f"self.{part}")]
                line = min((one.lineno for one in uses), default=line)  # type: ignore[attr-defined]
            owner = dict(owner.named_children()).get(part)
            if owner is None:
                break
    return line
