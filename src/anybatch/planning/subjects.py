"""What a plan is made for."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from anybatch.batch.batches import Part, Splittable
from anybatch.batch.counting import count_samples
from anybatch.batch.layout import home_of, rows_of
from anybatch.batch.trees import leaves, tensors_within
from anybatch.errors import LossError
from anybatch.loss.accumulate import Settings
from anybatch.loss.losses import LossFunction
from anybatch.loss.weights import FORWARD, Count
from anybatch.memory.meter import held_by
from anybatch.options import Options
from anybatch.parallel.devices import Devices
from anybatch.planning.devices import workspace_bytes
from anybatch.tensors.modules import is_scripted, modules_behind, modules_of
from anybatch.tensors.optimizers import state_tensors
from anybatch.tensors.precision import LOW_PRECISION, needs_float32
from anybatch.tensors.sideeffects import SideEffects
from anybatch.update.batchnorm import BatchNormPolicy, coupling_modules

_GRANULARITY = 512


def sparse_error(what: str) -> LossError:
    """The error for a step that no plan can be made for, since its gradients are sparse."""
    return LossError(
        f"{what} has sparse gradients, whose bytes depend on the indices in a batch, so no plan can be made; "
        "expected dense gradients. Leave sparse=True out, or pass micro_batch_size= instead of memory="
    )


@dataclass
class Behaviour:
    """What was found out about a loss, and a ``collate``, while they were traced."""

    # whether it writes into its batch or gives it tangents, so that it gets copies; None as long as nobody knows
    writes_batch: bool | None = None
    # whether it can't run on fake tensors, so that it may do something else with other samples
    looks_at_numbers: bool = False
    # whether it writes into weights, or other tensors that it does not make; None as long as it was not run for
    # real
    writes_elsewhere: bool | None = None
    written_bytes: int = 0  # of these, which are copied while it is run for real
    # whether it draws random numbers that Python can look at, as where layers are left out at random: another
    # step may run other operations
    draws: bool = False
    collates_fakes: bool | None = None  # whether collate runs on fake tensors; None as long as nobody knows
    collate_writes: bool | None = None  # whether collate writes into samples; None as long as nobody knows
    collated_bytes: int = 0  # of the largest sample, collated; 0 as long as nobody knows
    # the state in Python that every run puts back, while a plan is made; else it is looked for each time
    python: SideEffects | None = None

    def note_elsewhere(self, written: int) -> None:
        """Notes that weights or other tensors were written to."""
        if written:
            self.writes_elsewhere = True
            self.written_bytes = max(self.written_bytes, written)


@dataclass
class Subject:
    """A step that is planned: everything that decides what it holds in memory and how long it takes."""

    model: torch.nn.Module  # the first argument of the loss function
    loss_fn: LossFunction  # the user's
    settings: Settings  # precision, scaling, inputs
    splittable: Splittable  # the logical batch
    optimizers: Sequence[torch.optim.Optimizer] = ()  # none for a plan of the gradient alone
    batch_norm: BatchNormPolicy = "refuse"  # what happens to BatchNorm in a split
    clip_norm: float | None = None  # what the norm of the gradient is clipped to, or None
    blocks: tuple[str, ...] = ()  # names of modules that may be recomputed or offloaded besides those that are found
    device_type: str = "cpu"  # of the device that is planned for: "cpu", or such as "cuda"
    is_present: bool = True  # whether the model lies on the device that is planned for, so that steps can be measured
    count: Count = count_samples  # how items are counted
    # that share the micro-batches, each with a copy of the model; None for that of the model
    devices: Devices | None = None
    # what is known of the loss, shared by all that are made of this one
    behaviour: Behaviour = field(default_factory=Behaviour)
    is_coupled: bool = False  # the loss couples the samples, so that the batch is not split
    _seen: tuple[int, bool] | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, options: Options, settings: Settings, splittable: Splittable, **more: Any) -> "Subject":
        """What the arguments of a verb say about a step; ``more`` are fields that they do not, or say otherwise."""
        given = {"optimizers": options.optimizer, "clip_norm": options.clip_norm, "device_type": settings.device.type}
        return cls(
            options.model, options.loss_fn, settings, splittable, batch_norm=options.batch_norm,
            blocks=tuple(options.blocks), count=options.count, **(given | more),
        )  # fmt: skip

    def attend(self, splittable: Splittable | None) -> None:
        """Looks at another logical batch, or at none to let go of the last one."""
        self.splittable = splittable  # type: ignore[assignment]  # nobody asks while there is none
        self._seen = None

    def note_writes(self, were_made: bool, *, is_through: bool) -> None:
        """Notes whether the loss needs a micro-batch of its own; what was moved to the device is a copy anyway.

        A trace that did not come to its end might have written later.
        """
        splittable = self.splittable
        is_shared = splittable.is_collated or splittable.lies_on(self.settings.device)
        if were_made and is_shared:
            self.behaviour.writes_batch = True
        elif is_through and self.behaviour.writes_batch is None:
            self.behaviour.writes_batch = False

    @property
    def counts_ahead(self) -> bool:
        """Whether raw samples are all collated before the first micro-batch runs, since a function counts them."""
        return self.splittable.is_collated and self.count is not count_samples and self.count != FORWARD

    @property
    def placements(self) -> int:
        """How many devices share the micro-batches."""
        return 1 if self.devices is None else len(self.devices.placements)

    def most_on_one(self, parts: Sequence[Part]) -> int:
        """How many micro-batches one device runs at most."""
        return len(parts) if self.devices is None else self.devices.most_on_one(parts)

    def seconds(self, parts: Sequence[Part], one: Callable[[float], float]) -> float:
        """The time of the micro-batches, on several devices until the last one is done."""
        if self.devices is not None:
            return self.devices.seconds(parts, one)
        return sum(number * one(cost) for cost, number in Counter(part.cost for part in parts).items())

    @property
    def bytes_beside(self) -> int:
        """The bytes beside the step: for summing gradients over ranks, and workspaces of libraries."""
        workspaces = workspace_bytes(self.settings.device) if self.is_present else 0
        return self.settings.reducer.bytes_beside(self.roots, self.parameters) + workspaces

    def settings_at(self, autocast: str) -> Settings:
        """The settings at a precision, as a plan names it; empty for the user's own."""
        return replace(self.settings, autocast=getattr(torch, autocast)) if autocast else self.settings

    @property
    def roots(self) -> list[torch.nn.Module]:
        """The model, and the loss if it is a module."""
        return modules_behind(self.model, self.loss_fn)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """All modules of these, each once."""
        return modules_of(*self.roots)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers of all modules."""
        return [buffer for module in self.modules for buffer in module._buffers.values() if buffer is not None]

    @property
    def is_scripted(self) -> bool:
        """Whether some of it was compiled by ``torch.jit``, in the way of which modes that see operations would be."""
        return any(map(is_scripted, self.modules))

    @property
    def is_recurrent(self) -> bool:
        """Whether it has recurrent layers, whose kernels keep for the backward what fake tensors do not know."""
        return any(isinstance(module, torch.nn.RNNBase) for module in self.modules)

    @property
    def wanted(self) -> list[int]:
        """The positions of the parameters that may get a gradient."""
        own = None if self.settings.inputs is None else {id(tensor) for tensor in self.settings.inputs}
        return [i for i, p in enumerate(self.parameters) if p.requires_grad and (own is None or id(p) in own)]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters that get a gradient or are stepped, each once."""
        found = {id(p): p for one in self.optimizers for group in one.param_groups for p in group["params"]}
        own = self.settings.inputs
        for parameter in (p for root in self.roots for p in root.parameters()) if own is None else own:
            found[id(parameter)] = parameter
        return list(found.values())

    @property
    def granularity(self) -> int:
        """What sizes are rounded up to by the allocator of the device."""
        return 1 if self.device_type == "cpu" else _GRANULARITY

    @property
    def splits(self) -> bool:
        """Whether the batch may be split: not if the loss, or BatchNorm in training mode, couples its samples."""
        if self.is_coupled or self.normalises_together:
            return False
        return self.batch_norm == "refuse" or not any(map(is_scripted, coupling_modules(*self.roots).values()))

    @property
    def normalises_together(self) -> bool:
        """Whether there is BatchNorm that has to see all samples at once."""
        return self.batch_norm == "refuse" and bool(coupling_modules(*self.roots))

    @property
    def batch_is_there(self) -> bool:
        """Whether micro-batches are views of a logical batch that lies on the device already."""
        return self.is_present and self.splittable.lies_on(self.settings.device)

    @property
    def batch_bytes(self) -> int:
        """The bytes of the logical batch on the device that is planned for; arrays lie on the CPU."""
        if not self.batch_is_there and self.device_type != "cpu":
            return 0
        return self._seen_in_batch[0]

    @property
    def hides_bytes(self) -> bool:
        """Whether samples are objects that can't be opened, so that what they hold is not known."""
        return not self._seen_in_batch[1]

    @property
    def _seen_in_batch(self) -> tuple[int, bool]:
        """The bytes of the logical batch with its gradients, and whether all of it can be seen."""
        if self._seen is None:
            self._seen = self._look_into_batch()
        return self._seen

    def _look_into_batch(self) -> tuple[int, bool]:
        seen: dict[int, int] = {}
        is_whole, gradients = True, 0
        for batch in self.splittable.batches:
            for _, _, leaf in leaves(batch):
                if isinstance(leaf, torch.Tensor) and not (leaf.is_nested and leaf.layout is torch.strided):
                    seen |= held_by([leaf])
                    if self.settings.inputs is None and leaf.requires_grad and leaf.is_leaf:
                        gradients += 2 * leaf.nbytes  # what is there, and what a micro-batch adds, as large
                elif home_of(leaf) is not None and hasattr(leaf, "data"):
                    seen[id(leaf)] = leaf.data.numel() * leaf.data.element_size()
                elif self.device_type == "cpu" and rows_of(leaf) is not None:
                    seen[id(leaf)] = leaf.nbytes
                elif not isinstance(leaf, torch.Tensor):
                    inside, all_of_it = tensors_within(leaf)
                    is_whole = is_whole and all_of_it
                    seen |= held_by(inside)
        return sum(seen.values()) + gradients, is_whole

    def refuse_sparse(self) -> None:
        """Refuses layers that say that their gradients are sparse, by the name of the first one."""
        for root in self.roots:
            for name, module in root.named_modules():
                if getattr(module, "sparse", False) is True and any(p.requires_grad for p in module.parameters()):
                    raise sparse_error(f"{name or type(module).__name__}, with sparse=True,")

    @property
    def tensors_held(self) -> list[torch.Tensor]:
        """Parameters, gradients, buffers and optimizer state."""
        tensors = [*self.parameters, *(p.grad for p in self.parameters if p.grad is not None), *self.buffers]
        return tensors + [state for one in self.optimizers for state in state_tensors(one)]

    @property
    def held_bytes(self) -> int:
        """The bytes that a step holds already, as far as they lie on this process; the batch, too, if it is there."""
        return sum(held_by(self.tensors_held).values()) + self.batch_bytes

    @property
    def state_bytes(self) -> int:
        """The bytes of the optimizers' state that is there already."""
        return sum(held_by(tensor for one in self.optimizers for tensor in state_tensors(one)).values())

    def summed_bytes(self, trained: Sequence[torch.Tensor]) -> int:
        """The bytes of parameters and gradients while gradients are summed over several devices; 0 on one device.

        One gradient at a time is sent to where the model lies, and multiplied there if it was divided by another count.
        On the CPU nothing is sent.
        """
        if self.devices is None:
            return 0
        in_float32 = needs_float32(trained, 2**31, self.settings.policy)
        gradients = [self._rounded(p.numel() * max(p.element_size(), 4 * in_float32)) for p in trained]
        sent = (1 if self.device_type == "cpu" else 2) * max(gradients, default=0)
        return sum(self._rounded(p.nbytes) for p in self.parameters) + sum(gradients) + sent

    def _rounded(self, size: int) -> int:
        return -(-size // self.granularity) * self.granularity

    def accumulators(self, micro_batches: int) -> list[int]:
        """The bytes of the float32 buffers in which low-precision gradients are added up; none where there are none."""
        parameters = self.parameters
        if not needs_float32(parameters, micro_batches, self.settings.policy):
            return []
        return [4 * p.numel() for p in parameters if p.dtype in LOW_PRECISION and p.requires_grad]
