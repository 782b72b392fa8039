"""What held the memory when there was no more."""

import re
from typing import Any

import torch

from anybatch.accelerators import in_use, memory_of
from anybatch.doctor.crashing.kinds import Answer, answer
from anybatch.doctor.crashing.live import Live

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def out_of_memory(live: Live, match: "re.Match[str]") -> Answer:
    """What held the memory, by category."""
    held, wanted = _held(live), _wanted(live.text)
    known = {name: size for name, size in held.items() if size and name not in ("allocated", "reserved")}
    largest = max(known, key=lambda name: held[name], default="")
    parts = ", ".join(f"{name} {_bytes(size)}" for name, size in held.items() if size)
    why = "what the graph keeps for the backward grows with the batch."
    return answer(
        wanted=_bytes(wanted), alive=f"; alive were {parts}" if parts else "",
        why=f"Of what is known, {largest} hold the most; {why}" if largest else why[0].upper() + why[1:],
        change="anybatch plan finds what fits; then: step = anybatch.TrainStep(model, loss_fn, optimizer, "
        'memory="...") trains the same batch with the same gradient in that memory',
        module=live.module_name(live.module()),
        evidence={"wanted": wanted, **held, "rows": _rows(live), "device": _device(live)},
    )  # fmt: skip


def _rows(live: Live) -> int:
    return next((one.shape[0] for _, one, _ in live.named() if one.dim() and not one.requires_grad), 0)


def _wanted(text: str) -> int:
    tried = re.search(r"Tried to allocate ([\d.]+) ([KMGT]?)i?B", text)
    plain = re.search(r"you tried to allocate (\d+) bytes", text)
    return int(float(tried[1]) * _UNITS[tried[2]]) if tried else int(plain[1]) if plain else 0


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
