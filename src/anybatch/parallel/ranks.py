"""Ranks that compute one gradient, that of all their batches together, with any batch on each."""

import contextlib
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from anybatch.batch.trees import flat, like, map_leaves
from anybatch.errors import AnyBatchError, BatchError, LossError
from anybatch.loss.coupling import twins
from anybatch.loss.reducing import ALONE, Joint, Leaves, Reducer, Shortage, Stage
from anybatch.loss.sums import Sums, added, share_, told
from anybatch.loss.weights import Weights
from anybatch.parallel.buckets import Buffers, ready_to_sum
from anybatch.parallel.messages import Messages, RankError, as_flags, as_text
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.modules import modules_of
from anybatch.tensors.precision import sum_of_bits
from anybatch.tensors.shards import is_sharded


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to a module itself."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def names_of(model: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> list[str]:
    """The names of parameters, for messages."""
    known = {id(p): name for name, p in model.named_parameters()}
    return [known.get(id(p), f"parameter {i} of the optimizer") for i, p in enumerate(parameters)]


def fingerprints(tensors: Sequence[torch.Tensor | None]) -> list[str]:
    """A fingerprint of the bits of each tensor, as a short text.

    Args:
        tensors: dense, or ``None``; of those that lie on several processes only the form is compared.

    Example:
        >>> one, other, same = fingerprints([torch.tensor(numbers) for numbers in ([1.0, 2.0], [2.0, 1.0], [1.0, 2.0])])
        >>> one == other, one == same
        (False, True)
    """
    sums = [
        None if tensor is None or tensor.numel() == 0 or is_sharded(tensor) else sum_of_bits(tensor.detach())
        for tensor in tensors
    ]
    texts = []
    for tensor, number in zip(tensors, sums, strict=True):
        kind = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
        texts.append(f"{kind} {0 if number is None else int(number)}")
    return texts


def joined(texts: Sequence[str]) -> str:
    """One text for many."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:32]


def check_model(model: torch.nn.Module) -> None:
    """Refuses models whose own communication can't be disabled."""
    for module in modules_of(model):
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if "FullyShardedDataParallel" in kinds:
            raise AnyBatchError(
                f"{type(module).__name__} is sharded by FSDP1 (FullyShardedDataParallel), which communicates "
                "within every forward pass in a way that can't be controlled; use FSDP2, "
                "torch.distributed.fsdp.fully_shard"
            )
        if isinstance(module, DistributedDataParallel) and getattr(module, "static_graph", False):
            raise AnyBatchError(
                "DistributedDataParallel(static_graph=True) relies on a reduction in its first backward pass, and "
                "fails later if the first step accumulates; leave static_graph out; anybatch does not need it, "
                "since it reduces gradients itself, once per step"
            )
    is_by_fsdp = any(is_fully_sharded(module) for module in modules_of(model))
    if not is_by_fsdp and any(is_sharded(parameter) for parameter in model.parameters()):
        raise AnyBatchError(
            "a parameter is a DTensor that was not created by fully_shard; this version works with "
            "DistributedDataParallel, fully_shard, and plain modules that are equal on all ranks"
        )


class Apart(Reducer):
    """One process, with a model that would communicate by itself."""

    @contextlib.contextmanager
    def apart(self, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Disables the communication of DistributedDataParallel, in forward and backward."""
        with ExitStack() as stack:
            for module in modules_of(*modules):
                if isinstance(module, DistributedDataParallel):
                    stack.enter_context(module.no_sync())
                    # True until the first forward that is not synchronised, which would still send buffers around.
                    stack.callback(setattr, module, "require_forward_param_sync", module.require_forward_param_sync)
                    module.require_forward_param_sync = False
            yield

    def bytes_beside(self, modules: Sequence[torch.nn.Module], parameters: Sequence[torch.Tensor]) -> int:
        """The bytes of the buckets that DistributedDataParallel takes when it is made, and that nobody uses."""
        wrappers = [module for module in modules_of(*modules) if isinstance(module, DistributedDataParallel)]
        return sum(p.nbytes for wrapper in wrappers for p in wrapper.module.parameters() if p.requires_grad)


class Ranks(Apart):
    """The ranks of a process group.

    A step takes two rounds of messages, one with the counts before the first micro-batch and one with the sums of the
    losses after the last, and then one all-reduce of each bucket of gradients. Counts that only forwards know take one
    round more. A rank that fails reports it in its next round.
    """

    is_shared = True

    def __init__(self, model: torch.nn.Module, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self._model = model
        self._messages = Messages(group, device)
        self._parameters: Sequence[torch.Tensor] = ()
        self._checked: list[int] = []
        self._updates = 0
        self._settings: Callable[[], Mapping[str, str]] | None = None
        self._added: list[str] = []
        self._rows_of: list[int] = []
        self._kind = "equal"
        self._heard: list[dict[str, Any]] = []
        self._is_wanted = False

    @contextlib.contextmanager
    def call(
        self, verb: str, parameters: Sequence[torch.Tensor], *, updates: int = 0, adds: bool = False,
        settings: Callable[[], Mapping[str, str]] | None = None,
    ) -> Iterator[None]:  # fmt: skip
        """A context for one logical batch; see ``Reducer``."""
        messages = self._messages
        messages.verb, messages.is_open = verb, True
        self._parameters, self._updates, self._settings = parameters, updates, settings
        try:
            self._added = fingerprints([parameter.grad for parameter in parameters]) if adds else []
            yield
        except Exception as error:
            if messages.is_open and not isinstance(error, RankError):
                with contextlib.suppress(RankError):  # it has its own error to tell
                    messages.tell_failure(error, verb)
            raise
        finally:
            messages.is_open = False

    def listen(self) -> None:
        """Starts another gradient of the same logical batch."""
        self._messages.is_open = True

    def bytes_beside(self, modules: Sequence[torch.nn.Module], parameters: Sequence[torch.Tensor]) -> int:
        """The bytes that gradients travel in, and of buckets that nobody uses."""
        return Buffers.bytes_for([p for p in parameters if p.requires_grad]) + super().bytes_beside(modules, parameters)

    def weights(self, local: Weights, rows: int, *, can_pad: bool = False) -> Weights:
        """Weighs the micro-batches by the counts of all ranks; see ``Reducer``.

        Raises:
            BatchError: no rank has any sample.
            AnyBatchError: the models, or the updates so far, are not the same on all ranks.
        """
        ids = [id(parameter) for parameter in self._parameters]
        prints = [] if ids == self._checked else fingerprints(self._parameters)
        mine = {
            "rows": rows, "counts": local.own_totals, "updates": self._updates, "parameters": len(ids),
            "model": joined(prints) if prints else "", "gradients": joined(self._added) if self._added else "",
            "parts": len(local.parts), "kind": self._kind, "settings": self._settings_in_short(), "can_pad": can_pad,
            "proves": self._is_wanted,
        }  # fmt: skip
        self._heard = heard = self._messages.round(Stage.BEGIN, mine)
        self._check_same(heard, prints)
        self._checked = ids
        self._rows_of = [one["rows"] for one in heard]
        if sum(self._rows_of) == 0:
            self._messages.is_open = False
            raise BatchError("no rank has any rows; expected at least one sample on one of them")
        return Weights(local.parts, added(one["counts"] for one in heard))

    def _check_same(self, heard: list[dict[str, Any]], prints: list[str]) -> None:
        kinds = [one["kind"] for one in heard]
        if len(set(kinds)) > 1:
            raise self._refused(
                f"the ranks have parameters that are {kinds}; expected the same fully_shard and "
                "set_reshard_after_forward on each"
            )
        for field in ("parameters", "updates"):
            values = [one[field] for one in heard]
            if len(set(values)) > 1:
                what = "parameters to train" if field == "parameters" else "updates so far"
                raise self._refused(
                    f"the ranks have {values} {what}; expected the same on each. Build the same model and "
                    "optimizer everywhere, freeze the same parameters, and load the same checkpoint"
                )
        if len({one["settings"] for one in heard}) > 1:
            raise self._refused(self._unlike_settings())
        for field, mine, what in (("model", prints, "values"), ("gradients", self._added, "gradients")):
            if len({one[field] for one in heard if one[field]}) > 1:
                raise self._refused(self._unlike(mine, what))

    def _settings_in_short(self) -> int:
        """A number for what the update is made with and for what is trained; 0 where no update is made."""
        if self._settings is None:
            return 0
        flags = bytes(parameter.requires_grad for parameter in self._parameters)
        return zlib.crc32(repr(self._settings()).encode() + flags)

    def _differing(self, mine: Mapping[str, str]) -> dict[str, list[str]]:
        """One more round, to name what differs: what each rank has of it that tells anything."""
        told = [one["facts"] for one in self._messages.round(Stage.NAMES, {"facts": dict(mine)})]
        told = [one for one in told if one]
        found = {
            key: [one.get(key, "not there") for one in told] for key in dict.fromkeys(k for one in told for k in one)
        }
        return {key: values for key, values in found.items() if len(set(values)) > 1}

    def _unlike_settings(self) -> str:
        mine = {} if self._settings is None else dict(self._settings())
        names = names_of(self._model, self._parameters)
        for name, parameter in zip(names, self._parameters, strict=True):
            mine[f"requires_grad of {name}"] = repr(parameter.requires_grad)
        texts = []
        for name, values in self._differing(mine).items():
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            texts.append(f"{name} is {values[0]} on rank 0 and {values[other]} on rank {other}")
        more = f"; and {len(texts) - 5} more" if len(texts) > 5 else ""
        return (
            f"the ranks make the update with different settings: {'; '.join(texts[:5])}{more}. Expected the same "
            "on all ranks, since their weights would diverge; nothing was changed. Give all ranks the same "
            "numbers, freeze the same parameters, and step schedulers on every rank"
        )

    def _unlike(self, mine: list[str], what: str) -> str:
        names = names_of(self._model, self._parameters) if mine else []
        found = list(self._differing(dict(zip(names, mine, strict=True))))
        shown = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        if what == "gradients":
            return (
                f"the ranks start with different gradients of {shown}; backward() adds the gradient of all ranks "
                "to .grad, which would then include batches of this rank only. Call optimizer.zero_grad() first, "
                "or let anybatch.backward take every gradient of the step"
            )
        return (
            f"the ranks have different values of {shown}; expected the same model on each: build it from the same "
            "seed, load the same checkpoint, or wrap it in DistributedDataParallel, which sends the values of "
            "rank 0 to all. With group=False each rank trains its own model"
        )

    def _refused(self, text: str) -> AnyBatchError:
        self._messages.is_open = False
        return AnyBatchError(text)

    def hear(self, mine: Mapping[str, Any], stage: Stage = Stage.PROOF) -> Sequence[Mapping[str, Any]]:
        """What every rank tells that comes to a stage, in the order of the ranks."""
        return self._messages.round(stage, mine)

    def gathered(self, outputs: Any, gets: Leaves, batch: Any) -> Joint:
        """The outputs of all ranks, in the order of the ranks; those with samples share out the loss."""
        joint = gathered(outputs, gets, batch, self._messages)
        having = [rank for rank, rows in enumerate(self._rows_of) if rows]
        joint.of, rank = len(having), self._messages.rank
        joint.place = having.index(rank) if rank in having else joint.rows  # behind the last block
        own = [leaf for leaf in joint.leaves if leaf is not None]

        def sum_() -> None:
            has_gradient = [leaf.grad is not None for leaf in own]
            self._sum_(Stage.RETURNED, {}, has_gradient, ready_to_sum(own, self.group, self._messages.lost))

        joint.sum_ = sum_
        return joint

    def rows(self, local: int) -> int:
        """The samples of all ranks together."""
        return sum(self._rows_of)

    def reduce_(self, sums: Sums, parameters: Sequence[torch.Tensor], outside: OutsideLeaves | None = None) -> None:
        """Sums losses, counts, metrics and gradients over the ranks; see ``Reducer``.

        Raises:
            LossError: a leaf that the other ranks do not know got a gradient.
            BatchError: a gradient is sparse.
        """
        _check_gradients(parameters, outside)
        mine, has_gradient = told(sums), self._has_gradient(parameters)
        heard = self._sum_(Stage.END, mine, has_gradient, self._ready_to_sum(parameters, sums))
        share_(sums, heard)

    def _sum_(
        self, stage: Stage, values: Mapping[str, Any], has_gradient: list[bool],
        sum_: Callable[[list[bool], float], None],
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Sums ``.grad`` over the ranks where any of them has it, after a round."""
        heard = self._messages.round(stage, {**values, "gradients": as_text(has_gradient)})
        self._messages.is_open = stage != Stage.END
        reached = [any(flags) for flags in zip(*[as_flags(one["gradients"]) for one in heard], strict=True)]
        sum_(reached, next((one["scale"] for one in heard if one.get("scale") is not None), 1.0))
        return heard

    def _has_gradient(self, parameters: Sequence[torch.Tensor]) -> list[bool]:
        return [parameter.grad is not None for parameter in parameters]

    def _ready_to_sum(self, parameters: Sequence[torch.Tensor], sums: Sums) -> Callable[[list[bool], float], None]:
        """Takes all memory before the others rely on this rank; gives what sums the gradients that any rank has.

        That is told which these are, and what those that were not scaled yet are multiplied by.
        """
        return ready_to_sum(parameters, self.group, self._messages.lost)

    @property
    def can_start_again(self) -> bool:
        """Whether the other ranks still wait for this one."""
        return self._messages.is_open

    def agree(self, tried: float, *, is_final: bool, where: str, text: str) -> Shortage:
        """Reports to the other ranks that memory ran out here."""
        return self._messages.tell_shortage(tried, is_final=is_final, where=where, text=text)


def reducer_for(model: torch.nn.Module, group: Any, device: torch.device, before: Reducer = ALONE) -> Reducer:
    """Finds the ranks that train a model together.

    Args:
        group: a process group; ``None`` for that of a DistributedDataParallel, or else the default one; ``False`` for
            this process alone.

    Raises:
        BatchError: ``group`` is something else.
        AnyBatchError: the model can't be trained so, see ``check_model``.
    """
    if not dist.is_available() or not dist.is_initialized():
        if group is not None and group is not False:
            raise BatchError(
                f"group is a {type(group).__name__}, and no process group was initialised; call "
                "torch.distributed.init_process_group() first, or leave group out"
            )
        return ALONE
    if group is not None and group is not False and not isinstance(group, dist.ProcessGroup):
        raise BatchError(
            f"group is a {type(group).__name__}; expected a torch.distributed.ProcessGroup, None for the default one, "
            "or False never to reduce over ranks"
        )
    found = group
    if group is None:
        wrapped = [module for module in modules_of(model) if isinstance(module, DistributedDataParallel)]
        found = wrapped[0].process_group if wrapped else dist.group.WORLD
    if isinstance(before, Ranks) and before.group is found and before.device == device:
        return before
    if isinstance(before, Apart) and (found is False or dist.get_world_size(found) < 2):
        return before
    check_model(model)
    if any(is_fully_sharded(module) for module in modules_of(model)):
        return _of_parts(model, found, device)
    return Apart() if found is False or dist.get_world_size(found) < 2 else Ranks(model, found, device)


def _of_parts(model: torch.nn.Module, group: Any, device: torch.device) -> Reducer:
    from anybatch.parallel.fsdp import ShardedRanks

    if group is False:
        raise AnyBatchError(
            "group=False, and the model is sharded by fully_shard, so no rank has the whole model; leave group out"
        )
    return ShardedRanks(model, group, device)


def _check_gradients(parameters: Sequence[torch.Tensor], outside: OutsideLeaves | None) -> None:
    if outside is not None and outside.found:
        raise LossError(
            f"the loss reaches {len(outside.found)} leaves that are not parameters of the model, so the ranks "
            "can't match them with each other; make them parameters of the model, or name them with inputs="
        )
    if any(p.grad is not None and p.grad.layout is not torch.strided for p in parameters):
        raise BatchError("a gradient is sparse, which is not summed over ranks; build the embedding with sparse=False")


_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def gathered(outputs: Any, gets: Leaves, batch: Any, messages: Messages) -> Joint:
    """Gathers the outputs of all ranks in the order of the ranks, with uneven rows, in one collective."""
    own = flat(outputs) if gets else []
    places = twins([0] * len(own), own)
    mine = {
        "rows": next((len(leaf) for leaf in own if isinstance(leaf, torch.Tensor)), 0),
        "outputs": [_described(*pair) for pair in zip(own, places, strict=True)],
        "gets": [leaf is not None for leaf in gets],
        "batch": batch is not None,
    }
    heard = messages.round(Stage.GATHERED, mine)
    takes = [one["batch"] for one in heard]
    if len(set(takes)) > 1:
        raise LossError(
            f"the loss of Coupled takes the batch on rank {takes.index(True)} and not on rank {takes.index(False)}; "
            "expected the same loss on all ranks"
        )
    kinds = _agreed(heard)
    rows = [one["rows"] for one in heard]
    order = sorted(kinds, key=lambda position: -kinds[position][0].itemsize)  # each begins where its dtype may
    sizes = [max(rows) * math.prod(kinds[position][1]) * kinds[position][0].itemsize for position in order]

    def parts_of(buffer: torch.Tensor) -> dict[int, torch.Tensor]:
        pairs = zip(order, buffer.split(sizes), strict=True)
        return {
            position: part.view(kinds[position][0]).view(max(rows), *kinds[position][1]) for position, part in pairs
        }

    buffers = [torch.zeros(sum(sizes), dtype=torch.uint8, device=messages.device) for _ in range(messages.size + 1)]
    messages.round(Stage.READY, {})  # all have the memory, so nobody is missing in what follows
    send = buffers.pop()
    sent = parts_of(send)
    for position in kinds if own else ():
        sent[position][: len(own[position])].copy_(own[position].detach())
    messages.gather_tensors(buffers, send)
    del send, sent
    found = [parts_of(buffer) for buffer in buffers]
    home = next((leaf.device for leaf in own if isinstance(leaf, torch.Tensor)), messages.device)
    columns = {
        position: torch.cat([parts[position][:n] for parts, n in zip(found, rows, strict=True)]).to(home)
        for position in kinds
    }
    batches = [] if batch is None else messages.gather_objects(map_leaves(compact, batch))
    wanted = [any(flags) for flags in zip(*[one["gets"] for one in heard if one["gets"]], strict=True)]
    leaf_of = [columns[i].requires_grad_() if i in columns and wanted[i] else None for i in range(len(wanted))]
    if own:
        outputs = like(outputs, [columns.get(place, leaf) for place, leaf in zip(places, own, strict=True)])
    return Joint(outputs, leaf_of, sum(rows), sum(rows[: messages.rank]), batches)


def _described(leaf: Any, twin: int) -> list[Any]:
    """An output in plain values that have to be equal on all ranks."""
    if isinstance(leaf, torch.Tensor):
        return [str(leaf.dtype), list(leaf.shape[1:]), twin]
    return ["value", hashlib.sha256(repr(leaf).encode()).hexdigest()[:16], repr(leaf)[:40]]


def _agreed(heard: Sequence[Mapping[str, Any]]) -> dict[int, tuple[torch.dtype, list[int]]]:
    """The dtype and the shape of a row of every output, by its position, each tensor once."""
    having = [(rank, one["outputs"]) for rank, one in enumerate(heard) if one["outputs"]]
    rank, expected = having[0]
    for other, outputs in having[1:]:
        if outputs == expected:
            continue
        pairs = list(zip(expected, outputs, strict=False))
        differs = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        texts = ["none" if differs >= len(o) else _worded(o[differs]) for o in (expected, outputs)]
        raise LossError(
            f"encode gave for output {differs} on rank {rank} {texts[0]}, on rank {other} {texts[1]}; expected the "
            "same containers, dtypes and row shapes on all ranks, and the same values of anything that is not a "
            "tensor, so that the loss sees the samples of all ranks. Pad to one shape in encode, or let each "
            "rank's loss see its own samples: Coupled(..., gather=False)"
        )
    return {
        position: (_DTYPES[kind[0]], kind[1])
        for position, kind in enumerate(expected)
        if kind[0] != "value" and kind[2] == position
    }


def _worded(kind: Sequence[Any]) -> str:
    return str(kind[2]) if kind[0] == "value" else f"{kind[0]} rows of shape {tuple(kind[1])}"


def compact(leaf: Any) -> Any:
    """A tensor without the rows of others that its storage may have, on the host; another value as it is."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        leaf = leaf.detach().cpu()
        return leaf.clone() if leaf.untyped_storage().nbytes() > leaf.nbytes else leaf
    return leaf
