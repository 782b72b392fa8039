"""The parameters that FSDP2 (``fully_shard``) gathers and reduces together, and what it does with them."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from anybatch.tensors.shards import local_of


class Unit:
    """The parameters that FSDP2 gathers and reduces together, most often those of one block.

    Args:
        group: of FSDP2.
        name: of the module, for messages.
    """

    def __init__(self, group: Any, name: str) -> None:
        self.group = group
        self.name = name or "the whole model"

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters as the optimizer has them."""
        return [one.sharded_param for one in self.group.fsdp_params]

    @property
    def whole(self) -> list[torch.Tensor]:
        """The parameters as the forward has them; their memory is there only while they are gathered."""
        return [one._unsharded_param for one in self.group.fsdp_params]

    @property
    def process_group(self) -> Any:
        """The processes that have the parts."""
        return self.group._all_gather_process_group

    @property
    def gathered_bytes(self) -> tuple[int, int]:
        """The bytes that arrive from all processes, padding included, and those that they lie in afterwards."""
        size = self.process_group.size()
        numel = sum(one._sharded_param_data.numel() for one in self.group.fsdp_params) * size
        first = self.group.fsdp_params[0]
        dtype = self.group.mp_policy.param_dtype or first.sharded_param.dtype
        return numel * dtype.itemsize, numel * dtype.itemsize

    @property
    def reduced_bytes(self) -> tuple[int, int]:
        """The bytes that are sent to all processes when gradients are summed, and those that come back."""
        trained = [one for one in self.group.fsdp_params if one.sharded_param.requires_grad]
        if not trained:
            return 0, 0
        numel = sum(one._sharded_param_data.numel() for one in trained)
        policy = self.group.mp_policy
        dtype = policy.reduce_dtype or policy.param_dtype or trained[0].sharded_param.dtype
        return numel * self.process_group.size() * dtype.itemsize, numel * dtype.itemsize

    @property
    def gathers_in_forward_only(self) -> bool:
        """Whether the parameters stay gathered from the forward to the backward."""
        return self.group.post_forward_mesh_info is None

    def would_gather(self) -> bool:
        """Whether ``unshard`` now communicates."""
        group = self.group
        is_backward = group._training_state.name == "PRE_BACKWARD"
        if is_backward and not getattr(group, "unshard_in_backward", True):
            return False
        return group._all_gather_result is None and not group.is_unsharded

    def would_reduce(self) -> bool:
        """Whether ``post_backward`` now has something to sum: the backward went through it, or left a gradient."""
        if not any(one.sharded_param.requires_grad for one in self.group.fsdp_params):
            return False
        if self.group._training_state.name == "PRE_BACKWARD":
            return True
        return any(self.has_gradient())

    def has_gradient(self) -> list[bool]:
        """For each parameter whether this process has a gradient of it that is not reduced yet."""
        return [self._gradient(one) is not None for one in self.group.fsdp_params]

    @staticmethod
    def _gradient(one: Any) -> torch.Tensor | None:
        found = one.unsharded_accumulated_grad
        if found is None and hasattr(one, "_unsharded_param"):
            found = one._unsharded_param.grad
        return cast("torch.Tensor | None", found)

    def fill_(self, wanted: Sequence[bool] | None = None) -> None:
        """Gives zeros to parameters without a gradient, so that all processes reduce the same ones.

        Args:
            wanted: for each parameter whether it takes part; ``None`` for all that are trained.
        """
        for index, one in enumerate(self.group.fsdp_params):
            takes_part = one.sharded_param.requires_grad if wanted is None else wanted[index]
            if takes_part and self._gradient(one) is None:
                dtype = one.reduce_dtype if self._accumulated_elsewhere(one) else None
                zeros = torch.zeros_like(one._unsharded_param, dtype=dtype)
                if dtype is None:
                    one._unsharded_param.grad = zeros
                else:
                    one.unsharded_accumulated_grad = zeros

    def _accumulated_elsewhere(self, one: Any) -> bool:
        """Whether other gradients of the unit, which travel in one buffer, are in a wider precision."""
        return one.reduce_dtype is not None and any(
            other.unsharded_accumulated_grad is not None for other in self.group.fsdp_params
        )

    def scale_accumulated_(self, scale: float) -> None:
        """Multiplies the gradients that FSDP2 keeps in a wider precision.

        Args:
            scale: by what.
        """
        for one in self.group.fsdp_params:
            if one.unsharded_accumulated_grad is not None:
                one.unsharded_accumulated_grad.mul_(scale)

    def forget_gradients(self) -> None:
        """Takes off what is not reduced yet."""
        for one in self.group.fsdp_params:
            one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None

    def gather(self) -> None:
        """Gathers the parameters and leaves them whole."""
        self.group.unshard()
        self.group.wait_for_unshard()

    def release(self) -> None:
        """Leaves each process its part only."""
        self.group._to_sharded()

    def reduce(self) -> None:
        """Sums the gradients that are there over the processes, to the part of each."""
        self.group.reduce_grads = True
        self.group.post_backward()

    def serve_gather(self) -> None:
        """Takes part when other processes gather the parameters; nothing changes here."""
        parts = [one._sharded_param_data.to(one.param_dtype or one.orig_dtype) for one in self.group.fsdp_params]
        if len({part.dtype for part in parts}) > 1:
            parts = [part.view(torch.uint8) for part in parts]
        mine = torch.cat(parts)
        found = mine.new_empty(mine.numel() * self.process_group.size())
        _collective("all_gather_single", "all_gather_into_tensor")(found, mine, group=self.process_group)

    def serve_reduce(self) -> None:
        """Takes part when other processes reduce gradients, with nothing to add; its part of the sum is kept."""
        trained = [one for one in self.group.fsdp_params if one.sharded_param.requires_grad]
        sizes = [one._sharded_param_data.numel() for one in trained]
        first = trained[0]
        dtype = first.reduce_dtype or first.param_dtype or first.orig_dtype
        zeros = torch.zeros(sum(sizes) * self.process_group.size(), dtype=dtype, device=self.group.device)
        found = zeros.new_empty(sum(sizes))
        _collective("reduce_scatter_single", "reduce_scatter_tensor")(found, zeros, group=self.process_group)
        for one, part in zip(trained, found.to(first.orig_dtype).split(sizes), strict=True):
            mine = torch.as_strided(
                part, one.sharded_size, one.contiguous_sharded_stride, storage_offset=part.storage_offset()
            )
            if one.sharded_param.grad is None:
                one.sharded_param.grad = one.to_sharded_dtensor(mine.clone())
            else:
                local_of(one.sharded_param.grad).add_(mine)

    def rest(self) -> None:
        """Ends whatever a forward or a backward has begun."""
        group = self.group
        if group._all_gather_result is not None:
            group.wait_for_unshard()
        group.finalize_backward()
        group._all_reduce_state = None
        group._post_forward_indices.clear()
        group._training_state = type(group._training_state).IDLE
        self.release()


def _collective(name: str, before: str) -> Callable[..., Any]:
    """A collective by its name, or by the one that it had before."""
    return cast("Callable[..., Any]", getattr(dist, name, None) or getattr(dist, before))
