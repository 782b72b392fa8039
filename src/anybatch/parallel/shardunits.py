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
        params = self.group.fsdp_params
        part = sum(one._sharded_param_data.numel() * _gathered_dtype(one).itemsize for one in params)
        return part * self.process_group.size(), part * self.process_group.size()

    @property
    def reduced_bytes(self) -> tuple[int, int]:
        """The bytes that are sent to all processes when gradients are summed, and those that come back."""
        trained = self._trained()
        size = sum(one._sharded_param_data.numel() for one in trained) * self._reduced_dtype(trained).itemsize
        return size * self.process_group.size(), size

    @property
    def served_bytes(self) -> int:
        """The most that it takes to take part when other processes gather or reduce."""
        arriving, _ = self.gathered_bytes
        sent, back = self.reduced_bytes
        mine = arriving // int(self.process_group.size())
        return max(arriving + mine, sent + 3 * back)

    def _trained(self) -> list[Any]:
        """The trained parameters in the order in which their gradients are reduced."""
        params = self.group.fsdp_params
        order = getattr(self.group, "_reduce_scatter_param_indices", None) or range(len(params))  # from torch 2.15 on
        return [params[index] for index in order if params[index].sharded_param.requires_grad]

    def _reduced_dtype(self, trained: Sequence[Any]) -> torch.dtype:
        """In what precision gradients are summed: from torch 2.15 on that of the parameters themselves, if not told."""
        if not trained:
            return torch.float32
        if hasattr(self.group, "_get_reduce_dtype"):
            found = self.group._get_reduce_dtype(trained, [one.sharded_param for one in trained])
        else:
            found = trained[0].reduce_dtype or _gathered_dtype(trained[0])
        return cast("torch.dtype", found)

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
                self._give_zeros(one)

    def _give_zeros(self, one: Any) -> None:
        whole = one._unsharded_param
        if _keeps_in_leaf(one):
            whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)
        elif self._accumulated_elsewhere(one):
            one.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=one.reduce_dtype)
        else:
            whole.grad = torch.zeros_like(whole)

    def _accumulated_elsewhere(self, one: Any) -> bool:
        """Whether other gradients of the unit, which travel in one buffer, are in a wider precision."""
        return one.reduce_dtype is not None and any(
            other.unsharded_accumulated_grad is not None for other in self.group.fsdp_params
        )

    def scale_accumulated_(self, scale: float) -> None:
        """Multiplies the gradients that FSDP2 keeps in a wider precision beside those of the whole parameters.

        Args:
            scale: by what.
        """
        for one in self.group.fsdp_params:
            if not _keeps_in_leaf(one) and one.unsharded_accumulated_grad is not None:
                one.unsharded_accumulated_grad.mul_(scale)

    def forget_gradients(self) -> None:
        """Takes off what is not reduced yet."""
        for one in self.group.fsdp_params:
            if not _keeps_in_leaf(one):
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
        parts = [one._sharded_param_data.to(_gathered_dtype(one)) for one in self.group.fsdp_params]
        if len({part.dtype for part in parts}) > 1:
            parts = [part.view(torch.uint8) for part in parts]
        mine = torch.cat(parts)
        found = mine.new_empty(mine.numel() * self.process_group.size())
        _collective("all_gather_single", "all_gather_into_tensor")(found, mine, group=self.process_group)

    def serve_reduce(self) -> None:
        """Takes part when other processes reduce gradients, with nothing to add; its part of the sum is kept."""
        trained = self._trained()
        sizes = [one._sharded_param_data.numel() for one in trained]
        dtype = self._reduced_dtype(trained)
        zeros = torch.zeros(sum(sizes) * self.process_group.size(), dtype=dtype, device=self.group.device)
        found = zeros.new_empty(sum(sizes))
        _collective("reduce_scatter_single", "reduce_scatter_tensor")(found, zeros, group=self.process_group)
        for one, summed in zip(trained, found.split(sizes), strict=True):
            part = summed.to(getattr(one, "sharded_grad_dtype", one.orig_dtype) or dtype)
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
        if hasattr(group, "_set_unsharded_grad_dtypes"):  # from torch 2.15 on
            group._set_unsharded_grad_dtypes(defer_upcast=False)
            group._post_backward_pending = False
        group._post_forward_indices.clear()
        group._training_state = type(group._training_state).IDLE
        self.release()


def _gathered_dtype(one: Any) -> torch.dtype:
    """In what precision a parameter is gathered."""
    return cast("torch.dtype", one.param_dtype or one.orig_dtype)


def _keeps_in_leaf(one: Any) -> bool:
    """Whether gradients that are not reduced yet are those of the whole parameter, in any precision; since torch 2.15.

    Before, those in a wider precision than the parameter lie beside it.
    """
    return isinstance(getattr(type(one), "unsharded_accumulated_grad", None), property)


def _collective(name: str, before: str) -> Callable[..., Any]:
    """A collective by its name, or by the one that it had before."""
    return cast("Callable[..., Any]", getattr(dist, name, None) or getattr(dist, before))
